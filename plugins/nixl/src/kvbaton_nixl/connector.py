"""One stage's end of the transport: a lobby, and a link to each peer.

The promises are those of :class:`~kvbaton.connector.TransferConnector`; comments say where each is kept.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvbaton.connector import (
    IDLE,
    Capabilities,
    Chunk,
    Completion,
    ConnectorBase,
    Endpoint,
    MemoryRegion,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
    clash,
)
from kvbaton.errors import (
    ConnectError,
    Outstanding,
    PeerLost,
    ProtocolViolation,
    RegistrationError,
    TransportError,
)
from kvbaton.identity import PeerId, TransferId
from kvbaton_nixl import cuda, library
from kvbaton_nixl.link import Ended, Link, LinkBroken, destroy, register
from kvbaton_nixl.options import NixlOptions
from kvbaton_nixl.telemetry import Measured
from kvbaton_nixl.words import Hello, Kind, Lobby, Region

#: Hellos of peers that ``connect`` has not named yet; the oldest gives way to one more.
MAX_CALLERS = 256


class NixlConnector(ConnectorBase):
    """See the package's docstring for the design.  One thread; nothing waits for a peer.

    ``clock`` (seconds, growing) is what the pings go by.
    """

    def __init__(
        self,
        peer: PeerId,
        options: NixlOptions,
        capabilities: Capabilities,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capabilities = capabilities
        self.peer = peer
        self._options = options
        self._clock = clock
        self._regions: tuple[MemoryRegion, ...] = ()
        self._links: dict[PeerId, Link] = {}
        self._lobbies: dict[PeerId, tuple[str, Lobby]] = {}  # of peers that may not have had our hello yet
        self._hellos: OrderedDict[PeerId, Hello] = OrderedDict()
        # peers that are down and may still write here, with the staging memory that they know
        self._unquiet: dict[PeerId, MemoryRegion | None] = {}
        self._completions: list[Completion] = []
        self._receipts: list[Receipt] = []
        self._events: list[PeerEvent] = []
        self._dropped = 0
        self._measured = Measured()
        self._count = 0
        self._secret = secrets.token_bytes(16)
        self._closed = False
        self._thread = 0  # whose CUDA context is the regions'
        self._lobby: Any = library.make_agent(self._name("lobby"), options)
        # before anything is registered, so that it tells how to reach the lobby and nothing else
        self._metadata = Lobby(self._lobby.get_agent_metadata(), self._secret).encode()

    def _name(self, what: str) -> str:
        """A name that no agent had before: NIXL takes two of one name for the same."""
        self._count += 1
        return f"{self.peer}/{what}/{os.getpid()}.{self._count}.{secrets.token_hex(4)}"

    # -- memory (T1) -------------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Every link registers the regions anew.  Here they are tried, and let go again, so that what UCX cannot
        reach is refused now and not when the first peer comes.
        """
        kinds = sorted({region.kind for region in regions})
        for region in regions:
            reason = ""
            if region.kind not in self.capabilities.memory_kinds:
                reason = f"it is {region.kind} memory, and no CUDA device is visible to this process"
            elif len(kinds) > 1:
                reason = f"there are regions of {' and '.join(kinds)} memory, and one write has one kind on each side"
            elif region.device != regions[0].device:
                reason = f"it is on device {region.device}, and region {regions[0].id} on device {regions[0].device}"
            elif region.kind == "cuda":
                reason = cuda.refusal(region)
            if reason:
                raise RegistrationError(f"T1: region {region.id}: {reason}", region=region.id, reason=reason)
        if (found := clash(regions)) is not None:
            region, reason = found
            raise RegistrationError(f"T1: region {region.id}: {reason}", region=region.id, reason=reason)
        self._enter(regions)
        try:
            tried = register(self._lobby, regions)
            if tried is not None:
                self._lobby.deregister_memory(tried)
        except Exception as error:
            reason = library.describe(error)
            raise RegistrationError(
                f"T1: NIXL registers none of {len(regions)} regions: {reason}", reason=reason
            ) from error
        self._regions = tuple(regions)

    def _enter(self, regions: Sequence[MemoryRegion]) -> None:
        """Once per thread that calls: UCX acts in the CUDA context that is current there."""
        thread = threading.get_ident()
        if self._thread != thread and regions and regions[0].kind == "cuda":
            cuda.make_current(regions[0])
            self._thread = thread

    # -- the handshake (T2) ------------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        return self._metadata

    def connect(self, peer: Endpoint) -> None:
        """Make a link for the peer and tell its lobby; it is up when its own hello has come, which names our epoch."""
        self._enter(self._regions)
        id = peer.peer
        for old in [known for known in self._links if known.name == id.name and known != id]:
            self._lose(old, PeerLost(f"C1.4: {old} was replaced by {id}", peer=old))
        if id in self._links:
            return
        try:
            if not 0 <= id.epoch < 1 << 64:
                raise ProtocolViolation("C1.4", f"epoch {id.epoch} is not a number of 64 bits", peer=id)
            lobby = Lobby.decode(peer.metadata)
            name = self._lobby.add_remote_agent(lobby.agent)
            name = name.decode() if isinstance(name, bytes) else name
        except ProtocolViolation as error:
            self._refuse(id, ConnectError(f"T2: the metadata of {id} is not ours: {error}", peer=id), error)
            return
        except Exception as error:
            self._refuse(id, ConnectError(f"T2: the metadata of {id} names no agent of NIXL", peer=id), error)
            return
        self._lobbies[id] = (name, lobby)
        try:
            self._links[id] = Link(self.peer, id, self._name(str(id)), self._options, self._regions, self._measured)
        except Exception as error:
            self._refuse(id, ConnectError(f"T2: no link to {id}: {library.describe(error)}", peer=id), error)
            return
        self._greet(id)

    def _greet(self, id: PeerId) -> None:
        """Say hello.  Again with each ping until the peer has answered, so that one that is gone is noticed."""
        name, lobby = self._lobbies[id]
        regions = tuple(
            Region(region.id, region.kind, region.device, region.address, region.length) for region in self._regions
        )
        link = self._links[id]
        hello = Hello(self.peer, id, lobby.secret, self._secret, link.metadata, regions, link.staging)
        link.beat(self._clock())
        try:
            self._lobby.send_notif(name, hello.encode())
        except Exception as error:
            cause = ConnectError(f"T2: {id} does not hear: {library.describe(error)}", peer=id)
            cause.__cause__ = error
            self._lose(id, cause)

    def _refuse(self, id: PeerId, cause: ConnectError, error: Exception) -> None:
        cause.__cause__ = error
        self._leave_lobby(id)
        self._events.append(PeerEvent(id, up=False, quiet=True, error=cause))  # it was never told of our memory

    def _hear_hellos(self) -> None:
        try:
            news = self._lobby.get_new_notifs()
        except Exception:
            self._dropped += 1  # one caller's misfortune; those that are connected go on
            return
        for words in news.values():
            for word in words:
                self._hear_hello(word)
        for id, link in list(self._links.items()):
            hello = None if link.open else self._hellos.pop(id, None)
            if hello is None:
                continue
            if not hmac.compare_digest(hello.proof, self._lobbies[id][1].secret):
                self._dropped += 1  # somebody else, in its name
                continue
            try:
                link.greet(hello)
                link.say(Kind.PING)
            except Exception as error:
                self._lose(id, ConnectError(f"T2: {_cause(error, id)}", peer=id))
                continue
            self._events.append(PeerEvent(id, up=True))

    def _hear_hello(self, word: bytes) -> None:
        """Keep the newest of each caller: an older one names a link that its sender has given up since."""
        try:
            hello = Hello.decode(word)
        except ProtocolViolation:
            self._dropped += 1
            return
        # for this epoch of ours, by somebody who was given our endpoint (C1.4)
        if hello.you != self.peer or not hmac.compare_digest(hello.secret, self._secret):
            self._dropped += 1
            return
        link = self._links.get(hello.me)
        if link is not None and link.open:
            return  # it has said so before
        self._hellos.pop(hello.me, None)
        self._hellos[hello.me] = hello
        if len(self._hellos) > MAX_CALLERS:
            # those we wait for come again, but need not
            stranger = next((id for id in self._hellos if id not in self._links), hello.me)
            del self._hellos[stranger]

    def disconnect(self, peer: PeerId) -> None:
        link = self._links.get(peer)
        if link is None:
            return  # down already; only its death makes it quiet then
        if not link.open:  # our hello may have come: then the peer knows our memory, and has not said bye
            self._lose(peer, PeerLost(f"T2: {peer} was disconnected before it was up", peer=peer))
        else:
            link.closing = True
            self._finish(link.cancel(None))

    def cancel(self, transfer: TransferId) -> None:
        """A packed chunk may still wait for a slot; anything else is posted when it is accepted, and drains (T9)."""
        for link in self._links.values():
            self._finish(link.cancel(transfer))

    def fenced(self, peer: PeerId) -> None:
        """The peer's process is dead, so it writes nothing itself; with its link goes what waits in our sockets."""
        if peer in self._links:
            self._lose(peer, PeerLost(f"C6.4: {peer} was fenced", peer=peer), dead=True)
        elif peer in self._unquiet and self._settled():
            del self._unquiet[peer]
            self._events.append(PeerEvent(peer, up=False, quiet=True))

    def _settled(self) -> bool:
        """Whether nothing runs on our device; a failed one never says so, and then memory stays held (C6.4)."""
        return not any(region.kind == "cuda" for region in self._regions[:1]) or cuda.synchronize(self._regions[0])

    def _lose(self, id: PeerId, cause: Exception, *, dead: bool = False) -> None:
        """The end of a link, for whatever reason but a disconnection that both have agreed to (T7).

        ``dead``: core has proved the peer's process dead.
        """
        link = self._links.pop(id)
        if link.open:
            with contextlib.suppress(Exception):  # what had come before the end
                self._hear(link)
        self._finish(link.end(cause, peer_is_dead=dead))
        self._receipts += [Receipt(id, *key) for key in link.late]
        self._dropped += link.dropped
        self._leave_lobby(id)
        self._hellos.pop(id, None)
        quiet = (dead or link.heard_bye) and link.settled
        if not quiet:
            self._unquiet[id] = link.memory
        self._events.append(PeerEvent(id, up=False, quiet=quiet, error=cause))

    def _leave_lobby(self, id: PeerId) -> None:
        known = self._lobbies.pop(id, None)
        if known is not None:
            try:
                self._lobby.remove_remote_agent(known[0])
            except Exception:
                self._dropped += 1  # NIXL has removed it itself, with the connection

    # -- chunks at the source (T5, T6, T9) ---------------------------------------------------------------------------

    def submit(self, chunk: Chunk) -> bool:
        link = self._links.get(chunk.peer)
        if link is None or not link.open or link.closing:
            error = PeerLost(f"T7: {chunk.peer} is not connected", peer=chunk.peer)
            self._finish([Ended(chunk, Outcome.FAILED, True, True, error)])
            return True
        if link.full:
            return False  # T6: per peer, so that a frozen one fills only its own room
        try:
            ended = link.post(chunk)
        except Exception as error:
            cause = _cause(error, chunk.peer)
            if not link.has(chunk):
                self._finish([Ended(chunk, Outcome.FAILED, True, True, cause)])
            self._lose(chunk.peer, cause)
            return True
        if ended is not None:
            self._finish([ended])
        return True

    def outstanding(self) -> int:
        return len(self._completions) + sum(link.under_way for link in self._links.values())

    def _finish(self, ended: Sequence[Ended]) -> None:
        self._completions += [
            Completion(
                one.chunk.transfer, one.chunk.sequence, one.outcome, one.source_quiet, one.target_quiet, one.error
            )
            for one in ended
        ]

    # -- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        if self._closed:
            return IDLE
        self._enter(self._regions)
        self._hear_hellos()
        now = self._clock()
        for id, link in list(self._links.items()):
            try:
                if link.open:
                    self._hear(link)
                    for one in link.ended():
                        self._finish([one])
                    self._close_link(id, link)
                if now >= link.next_ping:
                    self._ping(id, link, now)
            except Exception as error:  # one link's misfortune, whatever it is: the others go on (T7)
                if id in self._links:
                    self._lose(id, _cause(error, id))
        if not (self._completions or self._receipts or self._events):
            return IDLE
        progress = Progress(tuple(self._completions), tuple(self._receipts), tuple(self._events))
        self._completions, self._receipts, self._events = [], [], []
        return progress

    def _hear(self, link: Link) -> None:
        for note in link.notes():
            if link.heard_bye and note.kind in (Kind.WRITTEN, Kind.PACKED):
                self._dropped += 1  # it had said that nothing more would come
                continue
            match note.kind:
                case Kind.WRITTEN:
                    self._receipts.append(Receipt(link.peer, note.transfer, note.sequence))  # T3
                case Kind.BYE:
                    link.heard_bye = link.closing = True
                    self._finish(link.cancel(None))
                case Kind.PACKED:
                    link.arrived(note)
                case Kind.LANDED:
                    self._finish(link.landed_there(note))
                case Kind.PING:
                    pass
        for key in link.landed_here():
            self._receipts.append(Receipt(link.peer, *key))  # T3: scattered, by then
        if link.heard:
            self._leave_lobby(link.peer)

    def _ping(self, id: PeerId, link: Link, now: float) -> None:
        if id in self._lobbies:
            self._greet(id)
        else:
            link.beat(now)
        if link.open:
            link.say(Kind.PING)

    def _close_link(self, id: PeerId, link: Link) -> None:
        """A disconnection goes through when nothing of ours is under way and the peer says the same."""
        if not link.closing or link.under_way:
            return
        if not link.said_bye:
            link.said_bye = True
            link.say(Kind.BYE)
        if link.heard_bye:
            del self._links[id]
            link.end(PeerLost(f"C6.4: {id} was disconnected", peer=id), peer_is_dead=False)
            self._dropped += link.dropped
            self._leave_lobby(id)
            self._events.append(PeerEvent(id, up=False, quiet=True))

    def statistics(self) -> Mapping[str, float]:
        """What was dropped as no word of ours; with the option ``telemetry``, what NIXL measured."""
        dropped = self._dropped + sum(link.dropped for link in tuple(self._links.values()))
        return {"dropped_notes_total": dropped, **(self._measured.figures() if self._options.telemetry else {})}

    # -- the end (T10) -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say bye to everybody, then destroy every agent, while CUDA, if there is any, is still alive."""
        if self._closed:
            return
        if waiting := self.outstanding():
            raise Outstanding(f"T10: {waiting} chunks are outstanding; poll() until each has completed", count=waiting)
        self._closed = True
        for id, link in list(self._links.items()):
            if link.open and not link.said_bye:
                with contextlib.suppress(LinkBroken):
                    link.say(Kind.BYE)
            link.end(PeerLost(f"T10: closed with {id} connected", peer=id), peer_is_dead=False)
        self._links.clear()
        self._lobbies.clear()
        destroy(self._lobby)
        self._lobby = None
        self._receipts, self._events = [], []


def _cause(error: Exception, peer: PeerId) -> Exception:
    """Why a link is over: what broke it by name, or what nobody had thought of."""
    if isinstance(error, LinkBroken):
        return error.cause
    cause = TransportError(f"T7: the link to {peer} cannot go on: {library.describe(error)}", peer=peer)
    cause.__cause__ = error
    return cause
