"""One stage's end of the transport: what the contract promises, clause by clause."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvbaton.connector import (
    IDLE,
    Chunk,
    Completion,
    ConnectorBase,
    Endpoint,
    MemoryRegion,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
)
from kvbaton.errors import ConnectError, Outstanding, PeerLost, RegistrationError, TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments
from kvbaton_loopback.copying import copy_segments
from kvbaton_loopback.ether import ETHER
from kvbaton_loopback.options import LoopbackOptions
from kvbaton_loopback.plugin import CAPABILITIES
from kvbaton_loopback.wire import Post, Wire

#: How long ``close()`` lets a copy into this memory finish.  A copy is memory against memory: it does not depend on a
#: peer.
_LAST_COPY_SECONDS = 2.0


@dataclass(slots=True, eq=False)
class Route:
    """This end of the connection to one peer.  It is forgotten once down."""

    far: LoopbackConnector
    #: Both ends have called ``connect``.
    up: bool = False
    #: Being severed: nothing starts any more, what has started finishes.
    closing: bool = False
    cause: Exception | None = None
    #: Chunks of ours towards it that have not completed.
    sending: int = 0
    #: Its copies into our memory that have started and not finished.
    arriving: int = 0

    @property
    def drained(self) -> bool:
        return not (self.sending or self.arriving)


@dataclass(slots=True, eq=False)
class Grant:
    """At a destination: one transfer that one peer may write."""

    peer: PeerId
    open: bool = True
    arriving: int = 0


@dataclass(slots=True, eq=False)
class Landing:
    """A copy under way, seen from the destination: what it holds open there."""

    connector: LoopbackConnector
    route: Route
    grant: Grant


@dataclass(slots=True)
class Inbox:
    """Events that the next ``poll`` returns."""

    completions: list[Completion] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    peers: list[PeerEvent] = field(default_factory=list)
    #: Duplicate receipts: they become receipts after the next poll.
    echoes: list[Receipt] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.completions or self.receipts or self.peers or self.echoes)


class LoopbackConnector(ConnectorBase):
    """The design is in :mod:`kvbaton_loopback`, the promises in :class:`~kvbaton.connector.TransferConnector`.

    Public beyond the protocol, for tests: :attr:`wire`, and :meth:`kill`.
    """

    capabilities = CAPABILITIES

    def __init__(self, peer: PeerId, options: LoopbackOptions) -> None:
        self.peer = peer
        self.wire = Wire(str(peer), options, ETHER.lock, self)
        self._queue_limit = options.queue_limit
        self._bell = threading.Condition(ETHER.lock)
        self._regions: dict[int, npt.NDArray[np.uint8]] = {}
        self._routes: dict[PeerId, Route] = {}
        self._grants: dict[TransferId, Grant] = {}
        self._inbox = Inbox()
        self._outstanding = 0
        self._gone = False
        self._address = ETHER.join(self)

    # -- T1 registration ---------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Nothing to pin, nothing to map: the regions' bytes are at hand.  The guard has looked for overlaps."""
        for region in regions:
            if region.kind != "host":
                reason = f"it is {region.kind} memory"
                raise RegistrationError(
                    f"T1: region {region.id} cannot be registered: {reason}", region=region.id, reason=reason
                )
        self._regions = {region.id: region.view() for region in regions}

    # -- T2 handshake ------------------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        return self._address.encode()

    def connect(self, peer: Endpoint) -> None:
        """*Up*, at both ends at once, when the second of the two calls: each has accepted the other's epoch."""
        with ETHER.lock:
            for known in [id for id in self._routes if id.name == peer.peer.name and id != peer.peer]:
                self._sever(known, PeerLost(f"C1.4: {known} was replaced by {peer.peer}", peer=known))
            try:
                far = ETHER.find(peer.peer, peer.metadata)
            except ConnectError as error:
                self._tell(PeerEvent(peer.peer, up=False, quiet=True, error=error))
                return
            if peer.peer in self._routes:
                return
            here = self._routes[peer.peer] = Route(far)
            there = far._routes.get(self.peer)
            if there is not None and there.far is self and not there.closing:
                here.up = there.up = True
                self._tell(PeerEvent(peer.peer, up=True))
                far._tell(PeerEvent(self.peer, up=True))

    def disconnect(self, peer: PeerId) -> None:
        """A fence: nothing of ``peer`` starts to be written here any more; *down* comes when the rest is over."""
        with ETHER.lock:
            self._sever(peer, None)

    # -- T5, T6 chunks at the source ---------------------------------------------------------------------------------

    def submit(self, chunk: Chunk) -> bool:
        with ETHER.lock:
            route = self._routes.get(chunk.peer)
            if route is not None and route.sending >= self._queue_limit:
                return False  # T6: per peer, so that a frozen one fills only its own queue
            self._outstanding += 1
            if route is None or not route.up or route.closing:
                self._complete(chunk, Outcome.FAILED, PeerLost(f"T7: {chunk.peer} is not connected", peer=chunk.peer))
                return True
            route.sending += 1
            self.wire.put(chunk)
            return True

    def outstanding(self) -> int:
        """A chunk counts until ``poll`` has returned its completion, which the wire's thread may have made already."""
        with ETHER.lock:
            return self._outstanding + len(self._inbox.completions)

    def cancel(self, transfer: TransferId) -> None:
        """T9: a started chunk is left alone; its completion comes when it has finished."""
        with ETHER.lock:
            for post in self.wire.take(lambda post: post.chunk.transfer == transfer):
                self._end(post.chunk, Outcome.CANCELLED, None)

    def fenced(self, peer: PeerId) -> None:
        with ETHER.lock:
            error = PeerLost(f"C6.4: {peer} was fenced", peer=peer)
            for post in self.wire.take_stalled(lambda post: post.chunk.peer == peer):
                self._end(post.chunk, Outcome.FAILED, error)
            self._sever(peer, error)

    # -- C2, C5 grants at the destination ----------------------------------------------------------------------------

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        """A write without a grant is refused: that is what makes :meth:`revoke` a fence, without remembering what is
        over.
        """
        with ETHER.lock:
            self._grants[transfer] = Grant(peer)

    def revoke(self, transfer: TransferId) -> bool:
        with ETHER.lock:
            grant = self._grants.get(transfer)
            if grant is None:
                return True
            grant.open = False
            if grant.arriving:
                return False  # a copy is under way; a later call finds that it has finished
            self._forget(transfer, grant)
            return True

    # -- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        with ETHER.lock:
            if not self._inbox:
                return IDLE
            inbox, self._inbox = self._inbox, Inbox(receipts=self._inbox.echoes)
        if not (inbox.completions or inbox.receipts or inbox.peers):
            return IDLE
        return Progress(tuple(inbox.completions), tuple(inbox.receipts), tuple(inbox.peers))

    def wait(self, timeout: float) -> None:
        with ETHER.lock:
            if not self._inbox:
                self._bell.wait(timeout)

    # -- T10 teardown ------------------------------------------------------------------------------------------------

    def close(self) -> None:
        with ETHER.lock:
            if self._gone:
                return
            if self._outstanding:
                raise Outstanding(
                    f"T10: {self._outstanding} chunks of {self.peer} are outstanding; poll until they have completed",
                    outstanding=self._outstanding,
                )
            for peer in list(self._routes):
                self._sever(peer, None)
            if not self._bell.wait_for(lambda: not self._routes, _LAST_COPY_SECONDS):
                raise Outstanding(f"T10: a chunk is still being written into {self.peer}; close again", outstanding=0)
            thread = self._leave()
        self._join(thread)

    def kill(self) -> None:
        """End as a killed process does: nothing of ours completes, and peers find out by themselves (T7)."""
        with ETHER.lock:
            thread = self._leave()
            error = PeerLost(f"T7: {self.peer} is gone", peer=self.peer)
            for peer, route in list(self._routes.items()):
                far = route.far
                there = far._routes.get(self.peer)
                if there is not None and there.far is self:
                    far._begin_closing(self.peer, there, error)
                del self._routes[peer]
        self._join(thread)

    def _leave(self) -> threading.Thread | None:
        self._gone = True
        ETHER.leave(self._address)
        self._regions = {}
        self._grants.clear()
        return self.wire.stop()

    def _join(self, thread: threading.Thread | None) -> None:
        if thread is not None and not sys.is_finalizing():  # at exit daemon threads no longer run, nor end
            thread.join()

    # -- the wire's carriage: start and finish under the lock, copy without it ---------------------------------------

    def start(self, post: Post) -> None:
        """Ask the destination, and hold it open while the copy is under way."""
        chunk = post.chunk
        far = self._routes[chunk.peer].far
        route, grant = far._routes.get(self.peer), far._grants.get(chunk.transfer)
        if post.fails:
            post.error = TransportError(f"T5: chunk {chunk.sequence} was told to fail", transfer=chunk.transfer)
        elif route is None or route.far is not self or route.closing or not route.up:
            post.error = PeerLost(f"T7: {chunk.peer} does not accept us any more", peer=chunk.peer)
        elif grant is None or not grant.open or grant.peer != self.peer:
            post.error = TransportError(
                f"C5.2: {chunk.peer} has not granted transfer {chunk.transfer} to {self.peer}, or not any more",
                peer=chunk.peer, transfer=chunk.transfer,
            )  # fmt: skip
        else:
            post.landing = Landing(far, route, grant)
            route.arriving += 1
            grant.arriving += 1

    def copy(self, post: Post) -> None:
        assert post.landing is not None
        far = post.landing.connector
        try:
            copy_segments(post.chunk.source, self._regions, post.chunk.target, far._regions)
        except Exception as error:
            post.error = TransportError(f"T5: chunk {post.chunk.sequence} could not be copied: {error}")
            post.error.__cause__ = error

    def finish(self, post: Post) -> None:
        """T3: the receipt comes after the bytes, and nothing is written after the receipt."""
        chunk, landing = post.chunk, post.landing
        if landing is not None:
            landing.route.arriving -= 1
            landing.grant.arriving -= 1
            if post.error is None:
                landing.connector._receive(Receipt(self.peer, chunk.transfer, chunk.sequence), post.echoes)
            if not (landing.grant.open or landing.grant.arriving):
                landing.connector._forget(chunk.transfer, landing.grant)
            landing.connector._settle(self.peer, landing.route)
        self._end(chunk, Outcome.DONE if post.error is None else Outcome.FAILED, post.error)

    # -- bookkeeping, under the lock ---------------------------------------------------------------------------------

    def _receive(self, receipt: Receipt, twice: bool) -> None:
        if not self._gone:
            self._inbox.receipts.append(receipt)
            if twice:
                self._inbox.echoes.append(receipt)
            self._bell.notify()

    def _forget(self, transfer: TransferId, grant: Grant) -> None:
        if self._grants.get(transfer) is grant:
            del self._grants[transfer]

    def _tell(self, event: PeerEvent) -> None:
        if not self._gone:
            self._inbox.peers.append(event)
            self._bell.notify()

    def _end(self, chunk: Chunk, outcome: Outcome, error: Exception | None) -> None:
        """A chunk that was put on the wire is over."""
        route = self._routes.get(chunk.peer)
        self._complete(chunk, outcome, error)
        if route is not None:
            route.sending -= 1
            self._settle(chunk.peer, route)

    def _complete(self, chunk: Chunk, outcome: Outcome, error: Exception | None) -> None:
        """T5: nothing is read or written any more when this is said, so both sides are quiet, however it ended."""
        self._outstanding -= 1
        if not self._gone:
            self._inbox.completions.append(Completion(chunk.transfer, chunk.sequence, outcome, True, True, error))
            self._bell.notify()

    def _sever(self, peer: PeerId, cause: Exception | None) -> None:
        """Close the route at both ends.  Each end is down when nothing is under way between the two, as far as it can
        see.
        """
        here = self._routes.get(peer)
        if here is None or here.closing:
            return
        far = here.far
        self._begin_closing(peer, here, cause)
        there = far._routes.get(self.peer)
        if there is not None and there.far is self:
            far._begin_closing(self.peer, there, PeerLost(f"T7: {self.peer} disconnected", peer=self.peer))

    def _begin_closing(self, peer: PeerId, route: Route, cause: Exception | None) -> None:
        if route.closing:
            return
        route.closing, route.cause = True, cause
        for post in self.wire.take(lambda post: post.chunk.peer == peer):
            self._end(post.chunk, Outcome.CANCELLED if cause is None else Outcome.FAILED, cause)
        self._settle(peer, route)

    def _settle(self, peer: PeerId, route: Route) -> None:
        """C6.4: *down* is said with *quiet*, because it is said only when the counts prove it."""
        if route.closing and route.drained and self._routes.get(peer) is route:
            del self._routes[peer]
            self._tell(PeerEvent(peer, up=False, quiet=True, error=route.cause))
            self._bell.notify_all()
