"""One stage's end of the transport ``ucx``: parts of chunks over a wire, each taken or refused by its destination.

The promises are those of :class:`~kvbaton.connector.TransferConnector`; comments say where each is kept.

What is quiet when?  A destination receives into slots and copies from there, if it has granted that to that peer; so
its memory is quiet as soon as it says so itself: its answers, its *bye*, or ``revoke`` and ``disconnect`` returning.  A
source's memory is quiet once UCX has sent it, or has let go of it with the connection.  What a source cannot know after
a connection broke is whether its destination lives and still copies what it had received: only its death tells.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.connector import (
    IDLE,
    Capabilities,
    Chunk,
    Completion,
    ConnectorBase,
    DeviceEvent,
    Endpoint,
    MemoryRegion,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
    clash,
)
from kvbaton.errors import ConnectError, Outstanding, PeerLost, ProtocolViolation, RegistrationError, TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments
from kvbaton_cuda_ipc import parts
from kvbaton_cuda_ipc.grants import Grant
from kvbaton_cuda_ipc.options import UcxOptions
from kvbaton_cuda_ipc.parts import WINDOW, Answer, Bye, Key, Offer, Outgoing, Part
from kvbaton_cuda_ipc.staging import HostMover, Mover
from kvbaton_cuda_ipc.wire import Bulk, Down, Sent, Settings, Up, Wire, Word

#: What peers must have in common.
PROTOCOL = "kvbaton-ucx/1"
#: How long a slot is unless options say otherwise, by kind of memory.
SLOT_BYTES = {"host": 4 << 20, "cuda": 64 << 20}
#: Chunks of one peer that are partly here; a source that has more under way breaks the protocol.
_MAX_LANDINGS = 8192


@dataclass(eq=False)
class _Flight:
    """A chunk at its source, from submit to its completion."""

    chunk: Chunk
    #: Parts that are still to be sent; ``None``: not begun, so that it can be cancelled.
    left: deque[Outgoing] | None = None
    unanswered: int = 0
    taken: bool = True
    failed: Exception | None = None


@dataclass(eq=False)
class _Sending:
    """A payload until UCX has let go of it, and the slot that it is sent from; ``None``: from the region itself."""

    sent: Sent
    slot: Any


@dataclass(eq=False)
class _Gathering:
    """A part whose bytes the device is copying to its slot; those behind it wait, for the order's sake."""

    flight: _Flight
    part: Outgoing
    slot: Any
    event: DeviceEvent | None


@dataclass(eq=False)
class _Landing:
    """A chunk at its destination, from its first part to its last."""

    count: int
    announced: int = 0
    landed: int = 0
    taken: bool = True


@dataclass(eq=False)
class _Scattering:
    """A part whose bytes the device is copying to their place."""

    part: Part
    slot: Any
    event: DeviceEvent


@dataclass(eq=False)
class _Link:
    peer: PeerId
    theirs: Offer | None = None
    closing: bool = False
    cause: Exception | None = None
    # as a source
    flights: dict[Key, _Flight] = field(default_factory=dict)
    waiting: deque[_Flight] = field(default_factory=deque)
    gathering: deque[_Gathering] = field(default_factory=deque)
    sending: list[_Sending] = field(default_factory=list)
    spare: list[Any] = field(default_factory=list)
    window: int = WINDOW
    credit: int = 0
    # which unanswered parts have a slot at the peer
    bulky: set[tuple[Key, int]] = field(default_factory=set)
    # as a destination
    landings: dict[Key, _Landing] = field(default_factory=dict)
    coming: deque[tuple[Part, Any]] = field(default_factory=deque)
    scattering: list[_Scattering] = field(default_factory=list)
    free: list[Any] = field(default_factory=list)
    made: int = 0


@dataclass(eq=False)
class _Ending:
    """A link that is over, until UCX has let go of what it was sending."""

    link: _Link
    cause: Exception | None
    target_quiet: bool


class UcxConnector(ConnectorBase):
    """See the module.  One thread; nothing waits for a peer."""

    def __init__(self, peer: PeerId, options: UcxOptions, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self.peer = peer
        self._options = options
        self._regions: tuple[MemoryRegion, ...] = ()
        self._mover: Mover = HostMover(())
        self._slot_bytes = options.slot_bytes or SLOT_BYTES["host"]
        self._grants: dict[TransferId, Grant] = {}
        self._links: dict[PeerId, _Link] = {}
        self._endings: list[_Ending] = []
        self._completions: list[Completion] = []
        self._receipts: list[Receipt] = []
        self._events: list[PeerEvent] = []
        self._refused = 0
        self._parts = 0
        self._wire = Wire(peer, PROTOCOL, Settings(options.settings(), options.log_level))
        self._closed = False

    # -- memory (T1) and grants (C5.2) -------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Nothing to pin: slots are what UCX reads and writes, and in host memory it reads any."""
        kinds = sorted({region.kind for region in regions})
        for region in regions:
            reason = ""
            if region.kind not in self.capabilities.memory_kinds:
                reason = f"it is {region.kind} memory, and no CUDA device, or no torch, is there for this process"
            elif len(kinds) > 1:
                reason = f"there are regions of {' and '.join(kinds)} memory, and a stage has one kind"
            elif region.device != regions[0].device:
                reason = f"it is on device {region.device}, and region {regions[0].id} on device {regions[0].device}"
            if reason:
                raise RegistrationError(f"T1: region {region.id}: {reason}", region=region.id, reason=reason)
        if (found := clash(regions)) is not None:
            region, reason = found
            raise RegistrationError(f"T1: region {region.id}: {reason}", region=region.id, reason=reason)
        if kinds == ["cuda"]:
            from kvbaton_cuda_ipc.device import DeviceSlots  # needs torch and triton, which host memory does not

            self._mover = DeviceSlots(regions)
        else:
            self._mover = HostMover(regions)
        self._regions = tuple(regions)
        self._slot_bytes = self._options.slot_bytes or SLOT_BYTES[kinds[0] if kinds else "host"]

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        self._grants[transfer] = Grant(peer, target)

    def revoke(self, transfer: TransferId) -> bool:
        """At once: this very thread writes the memory, and from now on it does not.  Only a copy that the device has
        begun must end first.
        """
        self._grants.pop(transfer, None)
        busy = False
        for link in self._links.values():
            for key, landing in link.landings.items():
                if key[0] == transfer:
                    landing.taken = False
            busy = busy or any(one.part.key[0] == transfer and not one.event.query() for one in link.scattering)
        return not busy

    # -- the handshake (T2) ------------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        return self._wire.card

    def connect(self, peer: Endpoint) -> None:
        """Both say hello, with what they offer; up when the peer's has come, which names our epoch (C1.4)."""
        id = peer.peer
        for old in [known for known in self._links if known.name == id.name and known != id]:
            self._lose(old, PeerLost(f"C1.4: {old} was replaced by {id}", peer=old))
        if id in self._links:
            return
        self._mover.enter()
        offer = Offer(self._options.slots, self._slot_bytes, self._mover.inline)
        try:
            self._wire.connect(id, peer.metadata, offer.encode())
        except ConnectError as error:
            self._events.append(PeerEvent(id, up=False, quiet=True, error=error))
            return
        self._links[id] = _Link(id)

    def _greeted(self, link: _Link, body: bytes) -> None:
        link.theirs = Offer.decode(body)
        link.credit = link.theirs.slots
        if not link.closing:
            self._events.append(PeerEvent(link.peer, up=True))

    # -- chunks at the source (T5, T6, T9) ---------------------------------------------------------------------------

    def submit(self, chunk: Chunk) -> bool:
        """Queued; ``poll`` sends it."""
        link = self._links.get(chunk.peer)
        if link is None or link.theirs is None or link.closing:
            self._complete(chunk, Outcome.FAILED, True, PeerLost(f"T7: {chunk.peer} is not connected", peer=chunk.peer))
            return True
        if len(link.flights) >= self._options.queue_limit:
            return False  # T6: per peer, so that a frozen one fills only its own queue
        flight = _Flight(chunk)
        link.flights[chunk.transfer, chunk.sequence] = flight
        link.waiting.append(flight)
        return True

    def outstanding(self) -> int:
        under_way = sum(len(link.flights) for link in self._links.values())
        return under_way + sum(len(ending.link.flights) for ending in self._endings) + len(self._completions)

    def cancel(self, transfer: TransferId) -> None:
        for link in self._links.values():
            self._withdraw(link, transfer)

    def _withdraw(self, link: _Link, transfer: TransferId | None, error: Exception | None = None) -> None:
        """T9: of what has begun every part is sent, and its answers end it.  With ``error`` it is no cancellation."""
        kept: deque[_Flight] = deque()
        for flight in link.waiting:
            if flight.left is None and transfer in (None, flight.chunk.transfer):
                del link.flights[flight.chunk.transfer, flight.chunk.sequence]
                self._complete(flight.chunk, Outcome.FAILED if error else Outcome.CANCELLED, True, error)
            else:
                kept.append(flight)
        link.waiting = kept

    def _complete(self, chunk: Chunk, outcome: Outcome, target_quiet: bool, error: Exception | None = None) -> None:
        """The source is quiet whenever this is said (T5)."""
        self._completions.append(Completion(chunk.transfer, chunk.sequence, outcome, True, target_quiet, error))

    def _push(self, link: _Link) -> None:
        """Send what may be sent: parts for which the peer has room, in their order."""
        theirs = link.theirs
        if theirs is None:
            return
        if link.sending:
            still = []
            for one in link.sending:
                if not one.sent.done:
                    still.append(one)
                elif one.slot is not None:
                    link.spare.append(one.slot)
            link.sending = still
        self._push_gathered(link)
        part_bytes = min(self._slot_bytes, theirs.slot_bytes)
        while link.waiting and link.window:
            flight = link.waiting[0]
            if flight.left is None:
                flight.left = deque(parts.plan(flight.chunk, part_bytes, self._mover.alone))
            while flight.left and link.window:
                part = flight.left[0]
                body = self._mover.read(part.source) if part.nbytes <= theirs.inline else None
                if not part.nbytes or (body is not None and not link.gathering):
                    flight.left.popleft()
                    self._announce(link, flight, part, body or b"")
                    continue
                if not (link.credit and self._gather(link, flight, part)):
                    return
                flight.left.popleft()
                self._push_gathered(link)
            if not flight.left:
                link.waiting.popleft()

    def _gather(self, link: _Link, flight: _Flight, part: Outgoing) -> bool:
        """Begin a part that goes by a slot of the peer's; whether there was one to send it from."""
        if self._mover.direct(part.source) is not None:
            slot, event = None, None
        else:
            busy = sum(one.slot is not None for one in link.gathering)
            busy += sum(one.slot is not None for one in link.sending)
            if link.spare:
                slot = link.spare.pop()
            elif busy < self._options.slots:
                slot = self._mover.slot(self._slot_bytes)
            else:
                return False
            event = self._mover.gather(part.source, slot)
        link.credit -= 1
        link.gathering.append(_Gathering(flight, part, slot, event))
        return True

    def _push_gathered(self, link: _Link) -> None:
        while link.gathering and link.window:
            one = link.gathering[0]
            if one.event is not None and not one.event.query():
                return
            link.gathering.popleft()
            if one.slot is None:
                memory = self._mover.direct(one.part.source)
            else:
                memory = self._mover.part(one.slot, one.part.nbytes)
            link.bulky.add(((one.flight.chunk.transfer, one.flight.chunk.sequence), one.part.number))
            self._announce(link, one.flight, one.part)
            link.sending.append(_Sending(self._wire.send_bulk(link.peer, memory), one.slot))

    def _announce(self, link: _Link, flight: _Flight, part: Outgoing, inline: bytes = b"") -> None:
        link.window -= 1
        flight.unanswered += 1
        self._wire.send(link.peer, parts.say((flight.chunk.transfer, flight.chunk.sequence), part, inline))

    def _answered(self, link: _Link, answer: Answer) -> None:
        flight = link.flights.get(answer.key)
        if flight is None or not flight.unanswered:
            raise ProtocolViolation("C7.4", f"an answer to a part of {answer.key} that was not sent", peer=link.peer)
        flight.unanswered -= 1
        link.window += 1
        if (answer.key, answer.number) in link.bulky:
            link.bulky.discard((answer.key, answer.number))
            link.credit += 1
        flight.taken = flight.taken and answer.taken
        if flight.unanswered or flight.left or any(one.flight is flight for one in link.gathering):
            return
        if flight.left is None:
            raise ProtocolViolation("C7.4", f"an answer to {answer.key}, which was not begun", peer=link.peer)
        del link.flights[answer.key]
        if flight.taken:
            self._complete(flight.chunk, Outcome.DONE, True)
        else:
            error = TransportError(
                f"C5.2: {link.peer} has not granted this, or not any more", peer=link.peer, transfer=answer.key[0]
            )
            self._complete(flight.chunk, Outcome.FAILED, True, error)

    # -- parts at the destination (T3) -------------------------------------------------------------------------------

    def _announced(self, link: _Link, part: Part) -> None:
        """A part has come, or its bytes are about to: there is a slot for them, or its source breaks the protocol."""
        landing = link.landings.get(part.key)
        if landing is None:
            landing = link.landings[part.key] = _Landing(part.count, taken=not link.closing)
        if (
            (landing.announced, landing.count) != (part.number, part.count)
            or len(link.landings) > _MAX_LANDINGS
            or len(link.coming) + len(link.scattering) >= 2 * WINDOW
        ):
            raise ProtocolViolation("C7.4", f"part {part.number} of {part.count} is out of place", peer=link.peer)
        landing.announced += 1
        if part.inline or not part.nbytes:
            self._place(link, part, part.inline, None)
            return
        if link.free:
            slot = link.free.pop()
        elif link.made < self._options.slots:
            link.made += 1
            slot = self._mover.slot(self._slot_bytes)
        else:
            raise ProtocolViolation("C7.4", "a part, and no slot is free that was offered", peer=link.peer)
        link.coming.append((part, slot))
        self._wire.expect(link.peer, self._mover.part(slot, part.nbytes))

    def _came(self, link: _Link) -> None:
        part, slot = link.coming.popleft()
        self._place(link, part, slot, slot)

    def _place(self, link: _Link, part: Part, memory: Any, slot: Any) -> None:
        """Put a part's bytes in their place, if this peer may write there now."""
        landing = link.landings[part.key]
        grant = self._grants.get(part.key[0])
        if not (landing.taken and grant is not None and grant.peer == link.peer and grant.covers(part.target)):
            landing.taken = False
            self._refused += 1
        elif part.nbytes:
            event = self._mover.scatter(memory, part.target)
            if event is not None:
                link.scattering.append(_Scattering(part, slot, event))
                return
        self._landed(link, part, slot)

    def _landed(self, link: _Link, part: Part, slot: Any) -> None:
        if slot is not None:
            link.free.append(slot)
        landing = link.landings[part.key]
        landing.landed += 1
        self._parts += 1
        if landing.landed == landing.count:
            del link.landings[part.key]
            if landing.taken:  # T3: all its bytes are there, and none is written again
                self._receipts.append(Receipt(link.peer, *part.key))
        self._wire.send(link.peer, Answer(part.key, part.number, landing.taken).encode())

    def _look_at_scattered(self, link: _Link) -> None:
        if link.scattering:
            still = []
            for one in link.scattering:
                if one.event.query():
                    self._landed(link, one.part, one.slot)
                else:
                    still.append(one)
            link.scattering = still

    # -- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        if self._closed:
            return IDLE
        self._mover.enter()
        for event in self._wire.poll():
            link = self._links.get(event.peer)
            if link is None:
                continue  # it was lost by what came before, in this very list
            try:
                match event:
                    case Up(body=body):
                        self._greeted(link, body)
                    case Word(data=data):
                        self._hear(link, data)
                    case Bulk():
                        self._came(link)
                    case Down(error=error):
                        self._over(link, error)
            except ProtocolViolation as violation:
                self._lose(link.peer, _broken(violation, link.peer))
            except PeerLost as error:
                self._lose(link.peer, error)
        for link in list(self._links.values()):
            try:
                self._look_at_scattered(link)
                self._push(link)
            except PeerLost as error:
                self._lose(link.peer, error)
                continue
            if link.closing and not link.flights:
                self._part(link)
        if self._endings:
            self._endings = [ending for ending in self._endings if not self._ended(ending)]
        if not (self._completions or self._receipts or self._events):
            return IDLE
        progress = Progress(tuple(self._completions), tuple(self._receipts), tuple(self._events))
        self._completions, self._receipts, self._events = [], [], []
        return progress

    def _hear(self, link: _Link, data: bytes) -> None:
        match parts.read(data, self._slot_bytes):
            case Part() as part:
                self._announced(link, part)
            case Answer() as answer:
                self._answered(link, answer)
            case Bye():
                # T7: it has let go of us in good order: nothing of ours is written there any more
                self._lose(link.peer, PeerLost(f"T7: {link.peer} has disconnected", peer=link.peer), target_quiet=True)

    def wait(self, timeout: float) -> None:
        if self._completions or self._receipts or self._events:
            return
        if any(link.gathering or link.scattering for link in self._links.values()):
            timeout = min(timeout, 0.0001)  # a device says nothing on a descriptor
        self._wire.wait(timeout)

    def statistics(self) -> Mapping[str, float]:
        return {
            "dropped_messages_total": self._wire.dropped,
            "parts_total": self._parts,
            "parts_refused_total": self._refused,
        }

    # -- the end of a connection (C6.4, T7) --------------------------------------------------------------------------

    def disconnect(self, peer: PeerId) -> None:
        """From here on nothing of the peer lands; down when nothing of ours is under way to it."""
        link = self._links.get(peer)
        if link is None:
            return
        if link.theirs is None:
            self._lose(peer, PeerLost(f"T2: {peer} was disconnected before it was up", peer=peer))
            return
        link.closing = True
        for landing in link.landings.values():
            landing.taken = False
        self._withdraw(link, None)
        if not link.flights and not link.scattering:
            self._part(link)

    def _part(self, link: _Link) -> None:
        if link.scattering:
            return
        try:
            self._wire.send(link.peer, Bye().encode())
        except PeerLost as error:
            self._lose(link.peer, error)
            return
        self._wire.leave(link.peer)
        del self._links[link.peer]
        self._events.append(PeerEvent(link.peer, up=False, quiet=True, error=link.cause))

    def fenced(self, peer: PeerId) -> None:
        """The peer's process is dead: it reads and writes nothing."""
        if peer in self._links:
            self._lose(peer, PeerLost(f"C6.4: {peer} was fenced", peer=peer), target_quiet=True)
        for ending in self._endings:
            if ending.link.peer == peer:
                ending.target_quiet = True

    def _lose(self, peer: PeerId, cause: Exception, *, target_quiet: bool = False) -> None:
        self._wire.drop(peer)
        self._over(self._links[peer], cause, target_quiet=target_quiet)

    def _over(self, link: _Link, cause: Exception, *, target_quiet: bool = False) -> None:
        """The wire has nothing of this peer any more; what it was sending it may still let go of."""
        del self._links[link.peer]
        self._withdraw(link, None, cause)
        self._endings.append(_Ending(link, cause, target_quiet))

    def _ended(self, ending: _Ending) -> bool:
        """Whether a link's end is complete, which is told then: nothing is read here any more, and nothing written."""
        link = ending.link
        copies = [one.event for one in link.gathering] + [one.event for one in link.scattering]
        if any(event is not None and not event.query() for event in copies):
            return False
        if not all(one.sent.done for one in link.sending):
            return False
        for flight in link.flights.values():
            begun = flight.unanswered > 0
            self._complete(flight.chunk, Outcome.FAILED, ending.target_quiet or not begun, ending.cause)
        link.flights.clear()
        self._events.append(PeerEvent(link.peer, up=False, quiet=True, error=ending.cause))
        return True

    # -- teardown (T10) ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        if waiting := self.outstanding():
            raise Outstanding(f"T10: {waiting} chunks are outstanding; poll until they are not", outstanding=waiting)
        self._closed = True
        self._wire.close()
        self._mover.close()
        self._links.clear()
        self._endings.clear()
        self._grants.clear()


def _broken(violation: ProtocolViolation, peer: PeerId) -> TransportError:
    error = TransportError(f"{violation.clause}: {peer}: {violation}", peer=peer)
    error.__cause__ = violation
    return error
