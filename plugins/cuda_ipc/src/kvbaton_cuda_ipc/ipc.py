"""CUDA IPC: one stage's end of the transport that writes straight into a peer's device memory.

**Bytes** go through mappings (:mod:`~kvbaton_cuda_ipc.mapping`): by a kernel of the source's, or copies by its engine,
on streams of the source's own (:mod:`~kvbaton_cuda_ipc.mover`).  The destination does nothing.  The first three chunks
after a ``poll`` are started together, the next three, then six, then twelve, and the ``poll`` starts what is left, of
more than four chunks the last ones by themselves: within a device a copy of 64 MiB takes no longer than it costs to
begin one, and the device is busy with what was started while more is gathered.
**Words** go over the wire (:mod:`~kvbaton_cuda_ipc.wire`), which also says when a peer is gone.
**Receipts**: the source says with which launch a chunk went while the device is at it (``Begun``; what ``submit`` has
started, the next ``poll`` or ``wait`` says, or where it is many chunks ``submit`` itself), and its device raises a
counter that the destination reads (:mod:`~kvbaton_cuda_ipc.counters`), so that nothing waits for a turn of the source's
thread and a word behind the last copy.  Where the destination cannot read it, a word follows the copy (``Written``).

**Visibility** (T3).  The kernel's and the engine's writes are weak, and nothing in the kernel publishes them.  What
does is the end of the grid, or of the copy.  *By a counter*: the device writes it in the order of the stream, thus
after that end, and behind a fence at system scope, thus after all writes before it have been performed with regard to
the whole system, the memory of peers included; who reads the number reads it after that.  *By a word*: an event
recorded behind a launch is complete only when the same holds, and a query that finds it complete synchronises with that
end; the word is sent by the host thread that made that query and after it, and a message through UCX is received after
it was sent.  Either way whatever the destination starts on its device or reads by its host after ``poll()`` has
returned the receipt is ordered behind that.  So the order is: writes, their end, counter (or event, query, word),
receipt, the destination's next launch; each step is ordered behind the one before, and no fence inside of the kernel
would add anything.  A kernel of the destination's that *runs* at that time is not ordered, and reads none of these
bytes: they are reserved (C2.7).

**Quiet** (T5, C6.4).  A copy whose event is complete reads and writes nothing any more.  Until then it may, whatever
has become of the peer: the driver keeps a dead peer's memory for as long as we have it mapped, so a copy to it ends by
itself, and the mapping is closed behind it.  At the destination nothing revokes a mapping that a live peer has, so that
a disconnection fences nothing by itself (``disconnect_fences`` is not declared): a peer says *bye* when it has drained
and unmapped, or it is dead.  A process that was joined has no device work left: the driver ends and discards its
channels before the process can be joined.

**Order of ends**: drained, unmapped, *bye*; the exporter's memory outlives its connector (T1).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping as Figures
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbaton.connector import (
    IDLE,
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
)
from kvbaton.errors import ConnectError, Outstanding, PeerLost, ProtocolViolation, RegistrationError, TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton_cuda_ipc import ipc_words
from kvbaton_cuda_ipc.counters import Reader, Where
from kvbaton_cuda_ipc.driver import Cuda
from kvbaton_cuda_ipc.ipc_plugin import CAPABILITIES
from kvbaton_cuda_ipc.ipc_words import Begun, Bye, Chunks, Heard, Key, Metadata, Said, Watching, Written, decode, encode
from kvbaton_cuda_ipc.mapping import Mapping, Offer, offer, unreachable
from kvbaton_cuda_ipc.mover import LANES, Adrift, Mover
from kvbaton_cuda_ipc.runs import AddressBook
from kvbaton_cuda_ipc.wire import Down, Up, Wire, Word

_log = logging.getLogger(__name__)
#: What is spoken on the wire, and its version.
PROTOCOL = "cuda_ipc/3"
#: Chunks that a peer may have begun and that have not come: no peer of ours begins more.
MAX_EXPECTED = 8192
#: Chunks of which a peer was told and has not said that it heard, at most, or as many as may be under way where these
#: are more: one that stands still is told no more.
MAX_UNHEARD = 1024
#: What is started together, at most: nobody waits long for the first of it, and it fits a table that is there.
GROUP_BYTES, GROUP_ROWS = 512 << 20, 16384
#: Chunks that are started together at first: with fewer the device would begin some microseconds earlier, and stand
#: still behind them.
_TOGETHER = 3
#: More chunks than this are not started together by a ``poll``: about a quarter, the last, has a launch of its own.
_AT_ONCE = 4
#: Chunks that were started since the last ``poll`` from which on the peer is told at once: what the device has to do by
#: then outlasts a word, and the peer has passed most of them on when the last one comes.
_TOLD_FROM = 16
#: Chunks that have come and are not answered, from which on they are, though more is on its way: below what stops the
#: peer, :data:`MAX_UNHEARD`.
_ANSWERED_FROM = MAX_UNHEARD // 4
#: Seconds between two looks at the device while somebody waits for it, and for how long: words may have come meanwhile.
_PAUSE, _LOOKING = 20e-6, 1e-3


@dataclass(slots=True)
class _Flight:
    """A chunk that was started.  ``event``: that of all that were started with it; ``None`` where there is nothing to
    wait for."""

    chunk: Chunk
    event: DeviceEvent | None
    #: The peer sees by itself when it is over.
    counted: bool = False

    @property
    def key(self) -> Key:
        return self.chunk.transfer, self.chunk.sequence


@dataclass(eq=False)
class _Link:
    """A peer, from ``connect`` until nothing of it can be written here and nothing of ours there."""

    peer: PeerId
    offer: Offer
    #: Where its counters are, if it counts.
    where: Where | None
    mapping: Mapping | None = None
    book: AddressBook | None = None
    flights: list[_Flight] = field(default_factory=list)
    #: Accepted and not started: never longer than until the next ``poll``.
    queued: list[Chunk] = field(default_factory=list)
    queued_bytes: int = 0
    queued_rows: int = 0
    #: Launches of which the peer was not told yet: lane, number, chunks.
    begun: list[tuple[int, int, list[Key]]] = field(default_factory=list)
    #: The peer reads our counters.
    watched: bool = False
    #: The peer's counters; and what it has begun by them, each lane's launches in their order.
    reader: Reader | None = None
    coming: dict[int, deque[tuple[int, list[Receipt]]]] = field(default_factory=dict)
    #: Chunks that were started since the last ``poll``.
    started: int = 0
    #: ``disconnect`` was called, or the peer has said bye: nothing new is started.
    closing: bool = False
    said_bye: bool = False
    heard_bye: bool = False
    #: Why it is down; ``None`` as long as it is not.
    lost: Exception | None = None
    #: Core has proved the peer's process dead.
    dead: bool = False
    #: Chunks that the peer was told of, as written or as begun, and of which it has said that it heard.
    told: int = 0
    acknowledged: int = 0
    #: Chunks of ``coming``.
    expected: int = 0
    #: Chunks of the peer's that have come, and what of them we have answered.
    heard: int = 0
    answered: int = 0
    #: Flights of which the device no longer says anything.
    adrift: int = 0

    @property
    def open(self) -> bool:
        return self.mapping is not None and self.lost is None

    @property
    def quiet(self) -> bool:
        """Nothing of it can be written here any more, and nothing here is read for it."""
        return (self.dead or self.heard_bye) and not self.flights and not self.adrift


class IpcConnector(ConnectorBase):
    """See the module.  ``device``: the stage's.  ``inflight``: chunks per peer that are under way, at most."""

    capabilities = CAPABILITIES

    def __init__(self, peer: PeerId, device: int, cuda: Cuda, mover: Mover, wire: Wire, inflight: int) -> None:
        self.peer = peer
        self._device = device
        self._cuda = cuda
        self._mover = mover
        self._wire = wire
        self._inflight = inflight
        # what is under way may have been told already, and is no sign of a peer that stands still
        self._unheard = max(MAX_UNHEARD, inflight)
        self._links: dict[PeerId, _Link] = {}
        #: Links that are down, and may still be written or read through.
        self._ebbing: dict[PeerId, _Link] = {}
        self._offer: Offer | None = None
        self._book: AddressBook | None = None
        self._completions: list[Completion] = []
        self._receipts: list[Receipt] = []
        self._events: list[PeerEvent] = []
        #: Receipts that a peer's counters gave, and not its words.
        self._counted = 0
        self._dropped = 0
        self._unmap_failures = 0
        self._thread = 0
        self._closed = False

    def _enter(self) -> None:
        """Once per thread that calls: the driver acts in the context that is current there."""
        thread = threading.get_ident()
        if self._thread != thread:
            self._cuda.enter(self._device)
            self._thread = thread

    # -- memory (T1) -------------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._enter()
        for region in regions:
            if region.kind == "cuda" and region.device != self._device:
                reason = f"it is on device {region.device}, and the stage was opened on device {self._device}"
                raise RegistrationError(f"T1: region {region.id}: {reason}", region=region.id, reason=reason)
        self._offer = offer(self._cuda, regions)
        self._book = AddressBook({region.id: region.address for region in regions})

    def metadata(self) -> bytes:
        if self._offer is None:
            raise TransportError("T2: there is no metadata before regions are registered: it tells of them")
        return Metadata(self._wire.card, self._offer.encode(), self._mover.counters).encode()

    # -- the handshake (T2) ------------------------------------------------------------------------------------------

    def connect(self, peer: Endpoint) -> None:
        """Refuse what cannot work, with the reason, and else say hello: up when the peer's own has come, and its memory
        is mapped."""
        self._enter()
        id = peer.peer
        for old in [known for known in self._links if known.name == id.name and known != id]:
            self._lose(self._links[old], PeerLost(f"C1.4: {old} was replaced by {id}", peer=old))
        if id in self._links:
            return
        try:
            metadata = Metadata.decode(peer.metadata)
            theirs = Offer.decode(metadata.offer)
            theirs.check(peer.regions, id)
            reason = unreachable(self._cuda, theirs, self._device, id)
            if reason:
                raise ConnectError(f"T2: {reason}", peer=id)
            self._wire.connect(id, metadata.card)
        except (ProtocolViolation, TransportError) as error:
            cause = error if isinstance(error, ConnectError) else ConnectError(f"T2: {error}", peer=id)
            if cause is not error:
                cause.__cause__ = error
            # it was not greeted, so it is not up there, and writes nothing
            self._events.append(PeerEvent(id, up=False, quiet=True, error=cause))
            return
        self._links[id] = _Link(id, theirs, metadata.counters)

    def _greeted(self, link: _Link) -> None:
        try:
            link.mapping = Mapping(self._cuda, link.offer, link.peer)
        except Exception as error:
            self._lose(link, error)
            return
        link.book = AddressBook(link.mapping.addresses)
        self._events.append(PeerEvent(link.peer, up=True))
        if link.where is not None:
            try:
                link.reader = Reader(link.where)
            except TransportError as error:
                _log.info("%s says by words only what has come: %s", link.peer, error)
            else:
                self._say(link, Watching())

    def _say(self, link: _Link, word: Said) -> None:
        """A peer that cannot be told is down, which the wire reports."""
        with contextlib.suppress(PeerLost):
            self._wire.send(link.peer, encode(word))

    def disconnect(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is None:
            return  # down already; only its death makes it quiet then
        if link.open:
            link.closing = True
            self._part(link)
        else:
            self._lose(link, PeerLost(f"T2: {peer} was disconnected before it was up", peer=peer))

    def _part(self, link: _Link) -> None:
        """An orderly end, as far as it has come: drained, unmapped, bye; over when both have said it."""
        if link.flights or link.queued or link.adrift:
            return
        if not link.said_bye:
            problem = self._unmap(link)
            if problem is not None:
                self._lose(link, problem)
                return
            link.said_bye = True
            try:
                self._wire.send(link.peer, encode(Bye()))
            except PeerLost as error:
                self._lose(link, error)
                return
        if link.heard_bye:
            del self._links[link.peer]
            self._watch_no_more(link)
            self._wire.leave(link.peer)
            self._events.append(PeerEvent(link.peer, up=False, quiet=True))

    def _watch_no_more(self, link: _Link) -> None:
        reader, link.reader = link.reader, None
        if reader is not None:
            reader.close()
        link.coming.clear()
        link.expected = 0

    def _unmap(self, link: _Link) -> Exception | None:
        mapping, link.mapping = link.mapping, None
        if mapping is not None:
            try:
                mapping.close()
            except Exception as error:
                self._unmap_failures += 1
                return error
        return None

    def fenced(self, peer: PeerId) -> None:
        """The peer's process is dead, and its device work with it.  What of ours is still under way to it ends by
        itself, in a later ``poll``."""
        link = self._links.get(peer)
        if link is not None:
            link.dead = True
            self._lose(link, PeerLost(f"C6.4: {peer} was fenced", peer=peer))
        elif peer in self._ebbing:
            link = self._ebbing[peer]
            link.dead = True
            self._ebb(link)

    def _lose(self, link: _Link, cause: Exception) -> None:
        """The end of a link for whatever reason but an agreed one (T7).  What was started goes on until it is over."""
        link.lost = cause
        self._see(link)  # what had come before the end
        self._watch_no_more(link)
        link.begun.clear()
        self._completions += [_failed(chunk, cause) for chunk in link.queued]
        self._unqueue(link)
        del self._links[link.peer]
        self._wire.drop(link.peer)
        self._ebbing[link.peer] = link
        self._look(link)
        quiet = link.quiet
        self._events.append(PeerEvent(link.peer, up=False, quiet=quiet, error=cause))
        if quiet:
            self._forget(link)

    def _ebb(self, link: _Link) -> None:
        """A link that is down: tell what ends, and when it is quiet."""
        self._look(link)
        if link.quiet:
            self._events.append(PeerEvent(link.peer, up=False, quiet=True, error=link.lost))
            self._forget(link)
        elif not link.flights and not link.adrift:
            self._unmap(link)

    def _forget(self, link: _Link) -> None:
        del self._ebbing[link.peer]
        self._unmap(link)

    # -- chunks at the source (T5, T6, T9) ---------------------------------------------------------------------------

    def submit(self, chunk: Chunk) -> bool:
        """Take it, and start the copy, or leave that to a later ``submit`` or the next ``poll``; where there is no room
        for it, refuse (T6).

        There is none while as many are under way as may be, or while a peer has not said that it heard of many that it
        was told of, as one that stands still.
        """
        link = self._links.get(chunk.peer)
        if link is None or link.mapping is None or link.lost is not None or link.closing:
            error = PeerLost(f"T7: {chunk.peer} is not connected", peer=chunk.peer)
            self._completions.append(_failed(chunk, error))
            return True
        queued = link.queued
        if len(link.flights) + len(queued) >= self._inflight or link.told - link.acknowledged >= self._unheard:
            return False
        if not chunk.nbytes:
            link.flights.append(_Flight(chunk, None))
            return True
        rows = len(chunk.source)
        if queued and (link.queued_bytes + chunk.nbytes > GROUP_BYTES or link.queued_rows + rows > GROUP_ROWS):
            self._start_now(link)
        queued.append(chunk)
        link.queued_bytes += chunk.nbytes
        link.queued_rows += rows
        # at first twice the same, then each time as many as before in all: what was started outlasts the start of what
        # comes next
        if len(queued) >= max(_TOGETHER, link.started):
            self._start_now(link)
        return True

    def cancel(self, transfer: TransferId) -> None:
        """What is not started is over (T9)."""
        for link in self._links.values():
            if any(chunk.transfer == transfer for chunk in link.queued):
                kept = [chunk for chunk in link.queued if chunk.transfer != transfer]
                self._completions += [
                    Completion(transfer, chunk.sequence, Outcome.CANCELLED, True, True)
                    for chunk in link.queued
                    if chunk.transfer == transfer
                ]
                link.queued[:] = kept
                link.queued_bytes = sum(chunk.nbytes for chunk in kept)
                link.queued_rows = sum(len(chunk.source) for chunk in kept)

    def _start_now(self, link: _Link) -> None:
        """All that is queued, before the next ``poll``."""
        self._start(link)
        if link.begun and link.started >= _TOLD_FROM:
            self._announce(link)

    def _start_all(self, link: _Link) -> None:
        """All that is queued; of many the last few by themselves, because nothing is said of any before all that were
        started with it are over, and whoever waits for the last waits for all that is said with it."""
        count = len(link.queued)
        if count > _AT_ONCE:
            self._start(link, count - count // _AT_ONCE)
        self._start(link)

    def _start(self, link: _Link, count: int | None = None) -> None:
        """All that is queued, or so many of it, in one launch."""
        chunks = tuple(link.queued[:count])
        if len(chunks) == len(link.queued):
            rows, nbytes = link.queued_rows, link.queued_bytes
            self._unqueue(link)
        else:
            rows, nbytes = sum(len(chunk.source) for chunk in chunks), sum(chunk.nbytes for chunk in chunks)
            link.queued_rows -= rows
            link.queued_bytes -= nbytes
            del link.queued[:count]
        here, there = self._book, link.book
        assert here is not None
        assert there is not None
        try:
            self._enter()
            # numpy's calls are what this costs, the more when nothing like it has run for a while: few, for all rows
            runs = self._mover.room(rows)
            sources, targets = [chunk.source for chunk in chunks], [chunk.target for chunk in chunks]
            columns = [segments.offset for segments in sources]
            columns += [segments.offset for segments in targets]
            columns += [segments.length for segments in sources]
            np.concatenate(columns, out=runs.reshape(-1))
            here.locate(sources, runs[0])
            there.locate(targets, runs[1])
            bound = max([segments.length_bound for segments in sources])
            longest = bound if bound * rows == nbytes else None  # of lengths that are all alike
            event = self._mover.start(runs, nbytes, longest, (here.origin, there.origin))
        except BaseException as error:
            # who is interrupted cannot know what was begun
            adrift = isinstance(error, Adrift) or not isinstance(error, Exception)
            for chunk in chunks:
                what = f"chunk {chunk.sequence} of transfer {chunk.transfer} to {chunk.peer}"
                cause = TransportError(f"T5: {what} was not started: {error}", peer=chunk.peer)
                cause.__cause__ = error
                link.adrift += adrift
                self._completions.append(_failed(chunk, cause, quiet=not adrift))
            if not isinstance(error, Exception):
                raise
            return
        mark = event.mark if link.watched else None
        if mark is not None:
            link.begun.append((*mark, [(chunk.transfer, chunk.sequence) for chunk in chunks]))
        link.started += len(chunks)
        link.flights += [_Flight(chunk, event, mark is not None) for chunk in chunks]

    def _announce(self, link: _Link) -> None:
        """Tell the peer with which launch its chunks went, while the device is at it."""
        begun, link.begun = link.begun, []
        link.told += sum([len(chunks) for _, _, chunks in begun])
        for word in ipc_words.begun(begun):
            self._say(link, word)

    def _unqueue(self, link: _Link) -> None:
        link.queued.clear()
        link.queued_bytes = link.queued_rows = 0

    def outstanding(self) -> int:
        links = (*self._links.values(), *self._ebbing.values())
        return len(self._completions) + sum(len(link.flights) + len(link.queued) for link in links)

    def _look(self, link: _Link) -> None:
        """Take up what the device has finished, tell the peer of what it does not see by itself, and report it."""
        done = self._landed(link)
        if not done:
            return
        error: Exception | None = link.lost
        unseen = [flight.key for flight in done if not flight.counted]
        if error is None and unseen:
            try:
                for word in ipc_words.written(unseen):
                    self._wire.send(link.peer, encode(word))
            except PeerLost as lost:
                error = lost  # the wire reports it as down, too
        if error is None:
            link.told += len(unseen)
            self._completions += [
                Completion(flight.chunk.transfer, flight.chunk.sequence, Outcome.DONE, True, True) for flight in done
            ]
        else:
            self._completions += [_failed(flight.chunk, error) for flight in done]

    def _landed(self, link: _Link) -> list[_Flight]:
        """Flights that are over, in their order.  In each lane one ends after the other."""
        done: list[_Flight] = []
        left: list[_Flight] = []
        waiting = 0
        asked: DeviceEvent | None = None
        over = True
        for index, flight in enumerate(link.flights):
            if flight.event is None:
                done.append(flight)
                continue
            if flight.event is not asked:
                if waiting == LANES:
                    left += link.flights[index:]
                    break
                asked = flight.event
                try:
                    over = asked.query()
                except Exception as error:
                    link.flights = [*left, *link.flights[index:]]
                    self._set_adrift(link, error)
                    return done
                waiting += not over
            (done if over else left).append(flight)
        if done:
            link.flights = left
        return done

    def _set_adrift(self, link: _Link, error: Exception) -> None:
        """The device has failed: of nothing that is under way it says any more whether it is over (T5)."""
        cause = TransportError(f"T5: the device failed: {error}; what it still does is not known", peer=link.peer)
        cause.__cause__ = error
        self._completions += [_failed(flight.chunk, cause, quiet=False) for flight in link.flights]
        link.adrift += len(link.flights)
        link.flights = []

    # -- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        if self._closed:
            return IDLE
        self._enter()
        for waiting in list(self._links.values()):
            if waiting.queued:
                self._start_all(waiting)
            waiting.started = 0
            if waiting.begun:
                self._announce(waiting)
            self._answer(waiting)
        for event in self._wire.poll():
            link = self._links.get(event.peer)
            if link is None:
                continue
            match event:
                case Up():
                    self._greeted(link)
                case Word(data=data):
                    self._hear(link, data)
                case Down(error=error):
                    self._lose(link, error)
        for link in list(self._links.values()):
            self._see(link)
            self._look(link)
            if link.closing:
                self._part(link)
        for link in list(self._ebbing.values()):
            self._ebb(link)
        if not (self._completions or self._receipts or self._events):
            return IDLE
        progress = Progress(tuple(self._completions), tuple(self._receipts), tuple(self._events))
        self._completions, self._receipts, self._events = [], [], []
        return progress

    def _hear(self, link: _Link, data: bytes) -> None:
        try:
            word = decode(data)
            match word:
                case Written(chunks):
                    receipts = _receipts(link.peer, chunks)
                    self._receipts += receipts
                    link.heard += len(receipts)
                case Begun(launches):
                    for launch in launches:
                        self._expect(link, launch.lane, launch.number, _receipts(link.peer, launch.chunks))
                case Watching():
                    link.watched = True
                case Heard(count):
                    if not link.acknowledged <= count <= link.told:
                        raise ProtocolViolation(
                            "C7.4", f"{link.peer} has heard of {count} chunks, and was told of {link.told}"
                        )
                    link.acknowledged = count
                case Bye():
                    self._see(link)  # all of it is over; what has not come has failed
                    link.coming.clear()
                    link.expected = 0
                    link.heard_bye = True
                    link.closing = True
        except ProtocolViolation as error:
            self._dropped += 1
            self._lose(link, error)

    def _expect(self, link: _Link, lane: int, number: int, receipts: list[Receipt]) -> None:
        if link.reader is None:
            raise ProtocolViolation("C7.4", f"{link.peer} tells of its counters, which are not read here")
        waiting = link.coming.setdefault(lane, deque())
        if waiting and number < waiting[-1][0]:
            raise ProtocolViolation("C7.4", f"{link.peer} begins launch {number} behind {waiting[-1][0]}")
        link.expected += len(receipts)
        if link.expected > MAX_EXPECTED:
            raise ProtocolViolation("C9.3", f"{link.peer} has begun {link.expected} chunks, and {MAX_EXPECTED} may be")
        waiting.append((number, receipts))

    def _see(self, link: _Link) -> None:
        """Pass on what the peer's counters say has come (T3)."""
        for lane, waiting in link.coming.items():
            if not waiting:
                continue
            assert link.reader is not None
            reached = link.reader.value(lane)
            while waiting and waiting[0][0] <= reached:
                _, receipts = waiting.popleft()
                self._receipts += receipts
                self._counted += len(receipts)
                link.heard += len(receipts)
                link.expected -= len(receipts)

    def _answer(self, link: _Link) -> None:
        """Say what has come, in the pass behind the one that reported it: nobody is in a hurry to hear it, and whoever
        has something more to write has us polling.  Nor does what is on its way wait for it, unless there is much."""
        new = link.heard - link.answered
        if new and (not link.expected or new >= _ANSWERED_FROM) and link.open and not link.said_bye:
            link.answered = link.heard
            self._say(link, Heard(link.heard))

    def wait(self, timeout: float) -> None:
        """Until a word comes; while copies are under way, ours or a peer's, until one is over, or for a moment."""
        for link in self._links.values():
            if link.queued:
                self._start(link)
            if link.begun:
                self._announce(link)
            self._answer(link)
        if self._completions or self._events or self._receipts:
            return
        links = [link for link in self._links.values() if link.flights or link.expected]
        if not links:
            self._wire.wait(timeout)
            return
        limit = time.monotonic() + min(timeout, _LOOKING)
        while time.monotonic() < limit:
            try:
                if any(_has_news(link) for link in links):
                    return
            except Exception:
                return  # poll reports it
            time.sleep(_PAUSE)

    def statistics(self) -> Figures[str, float]:
        return {
            **self._mover.figures(),
            "counted_receipts_total": self._counted,
            "dropped_words_total": self._dropped + self._wire.dropped,
            "unmap_failures_total": self._unmap_failures,
        }

    # -- the end (T10) -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        waiting = self.outstanding()
        if waiting:
            raise Outstanding(f"T10: {waiting} chunks are outstanding; poll until they are over", outstanding=waiting)
        self._enter()
        self._closed = True
        links = [*self._links.values(), *self._ebbing.values()]
        for link in links:
            self._watch_no_more(link)
        problems = [self._unmap(link) for link in links]
        self._links.clear()
        self._ebbing.clear()
        self._wire.close()
        self._mover.close()
        for problem in problems:
            if problem is not None:
                raise TransportError(f"T10: a peer's memory was not unmapped: {problem}") from problem


def _receipts(peer: PeerId, chunks: tuple[Chunks, ...]) -> list[Receipt]:
    return [Receipt(peer, some.transfer, sequence) for some in chunks for sequence in some.sequences]


def _has_news(link: _Link) -> bool:
    """Whether the oldest of its copies is over, or one of the peer's."""
    if link.flights:
        event = link.flights[0].event
        if event is None or event.query():
            return True
    reader = link.reader
    return reader is not None and any(
        waiting and waiting[0][0] <= reader.value(lane) for lane, waiting in link.coming.items()
    )


def _failed(chunk: Chunk, error: Exception, *, quiet: bool = True) -> Completion:
    return Completion(chunk.transfer, chunk.sequence, Outcome.FAILED, quiet, quiet, error)
