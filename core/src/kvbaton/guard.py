"""What every transport would otherwise get wrong, once, around every plugin.

The stage talks to a :class:`GuardedConnector`, never to a plugin.  The guard checks each argument before the plugin
sees it (bounds, equal lengths, declared capabilities and limits, epochs, the calling thread), keeps budgets and
deadlines, and passes on only events that are news: a chunk ends once, a peer of an older epoch is not heard, an
exception out of a plugin becomes an event, and so does an event that is none, which takes nothing with it of what came
beside it. Of the clauses T1 to T13 it adds T2, T6, T8, T11 and T12 to what the
plugin promises, and it enforces C1.4, C3.5, C3.6 and C5.4.

What a chunk's life looks like from outside: ``submit`` accepts it, then one or more completions follow, *each proving
more than the one before*, the last one terminal, exactly once::

    accepted ──────────────────────────────▶ DONE | FAILED | CANCELLED, terminal
        ├── deadline ──▶ TIMED_OUT ────────▶ … the same, late
        └── FAILED, not quiet ─────────────▶ FAILED, terminal, once a fence proves it

Between an early, not terminal completion and the terminal one the chunk's memory is *quarantined*: counted, bounded,
never reused on a guess (C6.1).  A chunk reported DONE by a buffering transport that cannot yet say that the target is
quiet is *unproven*: it gives its budget back at once, and the acknowledgement (which rests on receipts) or a fence
ends it.

Back-pressure (T6): there is no queue in here.  ``submit`` accepts now or says that it is full, and the stage offers
again on its next pass.  Peers share the budgets evenly, and each may always have one chunk under way, so that one
frozen peer holds its own share and nobody else's; where the transport's own queue is what is full, the peer with more
chunks in it yields to one with fewer.
"""

from __future__ import annotations

import contextlib
import enum
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import current_thread

import msgspec
import numpy as np

from kvbaton.bounds import GuardLimits as GuardLimits
from kvbaton.connector import (
    IDLE,
    MAX_ENDPOINT_BYTES,
    Capabilities,
    Chunk,
    Completion,
    Endpoint,
    MemoryKind,
    MemoryRegion,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
    RegionInfo,
    TransferConnector,
    clash,
    region_lengths,
)
from kvbaton.durations import Durations
from kvbaton.errors import (
    CapabilityError,
    ConnectError,
    ConnectorFault,
    KvbatonError,
    LocalProtocolError,
    Outstanding,
    PeerLost,
    PluginBroken,
    QuarantineFull,
    RegistrationError,
    SegmentError,
    ThreadError,
    TransportError,
)
from kvbaton.geometry import KVGeometry
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments, aligned, same_lengths

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class GuardProgress(Progress):
    """A :class:`~kvbaton.connector.Progress` with what went wrong inside the transport.

    ``faults`` are to be reported (C6.3).  A :class:`~kvbaton.errors.QuarantineFull` among them means that the stage
    must not go on.
    """

    faults: tuple[KvbatonError, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.completions or self.receipts or self.peers or self.faults)


class PeerState(enum.Enum):
    CONNECTING = "connecting"
    UP = "up"
    #: ``disconnect`` was called: nothing new is accepted, posted work drains.
    CLOSING = "closing"
    #: Gone for good: a peer comes back only under a new epoch (C1.4, C6.4).
    DOWN = "down"


# by a name of the module: to look one up in its class costs several times as much, which each chunk would pay
_CONNECTING, _UP, _CLOSING, _DOWN = PeerState
_LEAVING = (_CLOSING, _DOWN)
_DONE, _TIMED_OUT = Outcome.DONE, Outcome.TIMED_OUT


class GuardedConnector:
    """A connector that a stage can trust.

    Raises :class:`~kvbaton.errors.PluginBroken` where ``connector``, which a plugin's ``open`` returned, is none.

    ``transport``, ``version``, ``peer`` and ``geometry`` (encoded, or empty where a test has none) are what the peer
    is told and compared with.  ``connect_deadline`` bounds both connecting and disconnecting, ``chunk_deadline`` each
    chunk; seconds of ``clock``, which only grows.

    Threading: the first caller's thread owns it; a call from another raises :class:`~kvbaton.errors.ThreadError` (T11).
    :meth:`detach` lets the next caller become the owner, and ``close`` may also come from another thread once the
    owner has ended.  Any thread may read ``capabilities``, ``needs_polling``, ``awaits``, ``quarantine_full``,
    ``closed``, ``outstanding``, ``statistics`` and ``peer_states``.
    """

    def __init__(
        self,
        connector: TransferConnector,
        *,
        transport: str,
        version: str,
        peer: PeerId,
        geometry: bytes = b"",
        limits: GuardLimits | None = None,
        connect_deadline: float = 10.0,
        chunk_deadline: float = 30.0,
        clock: Clock = time.monotonic,
    ) -> None:
        if wrong := _no_connector(connector):
            raise PluginBroken(f"transport {transport}: {wrong}", name=transport, distribution=None)
        self.peer = peer
        self._connector = connector
        self._transport = transport
        self._version = version
        self._geometry = geometry
        self._limits = limits or GuardLimits()
        self._connect_deadline = connect_deadline
        self._chunk_deadline = chunk_deadline
        self._clock = clock
        self._owner: threading.Thread | None = None
        #: From a chunk's submission until the plugin said that it is done.
        self.chunk_seconds = Durations()
        self._closed = False
        self._allocated: set[tuple[int, int, int]] = set()
        self._regions: tuple[MemoryRegion, ...] | None = None
        self._lengths: Mapping[int, int] = {}
        self._peers: dict[PeerId, _Peer] = {}
        self._current: dict[str, PeerId] = {}
        #: No peer's deadline is before it.
        self._next_deadline = math.inf
        # accepted and not reported terminal: on time, in order of deadline; and those that a proof is missing for
        self._posted: dict[_Key, _Flight] = {}
        self._lingering: dict[_Key, _Flight] = {}
        # the same by transfer: a word about one transfer must not cost a look at all
        self._flights: dict[TransferId, dict[int, _Flight]] = {}
        self._grants: dict[TransferId, PeerId] = {}
        #: Of those, the ones of which everything has come.
        self._received: set[TransferId] = set()
        #: Of those, the ones whose revocation has raised: said once, though it is tried again.
        self._revoke_failing: set[TransferId] = set()
        self._news = _News()
        self._pass = 0
        #: The last in which the transport refused a chunk.
        self._refused_in = -2
        self._quarantined_bytes = 0
        self._quarantined_chunks = 0
        self._quarantine_reported = False
        self._poll_is_failing = False
        #: At how many malformed events in all the next is told, and the pass in which one was told last.
        self._malformed_told_at, self._malformed_in = 1, -1
        self._dropped: Counter[str] = Counter()
        self._count: dict[str, int] = dict.fromkeys(_COUNTERS, 0)

    # -- what anyone may read ----------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        """What the running connector declares (T13)."""
        return self._connector.capabilities

    @property
    def needs_polling(self) -> bool:
        """Whether anything is live: a chunk, a grant, a connection being made or ended, an event not yet collected.

        While it is true ``poll`` must go on being called, also at a destination: some transports' senders progress
        only then.
        """
        transient = (PeerState.CONNECTING, PeerState.CLOSING)
        return bool(
            self._posted
            or self._lingering
            or self._grants
            or self._news
            or any(peer.state in transient for peer in tuple(self._peers.values()))
        )

    @property
    def awaits(self) -> bool:
        """Whether somebody waits for what ``poll`` will find, so that it should be called often.

        Not so where only grants are left of which everything was received: then ``poll`` is called for the peers' sake.
        """
        return self.needs_polling and bool(
            self._posted or self._news or len(self._grants) > len(self._received) or not self._grants
        )

    @property
    def quarantine_full(self) -> bool:
        """Whether more is in quarantine than the limits allow: the stage must not go on (T8)."""
        return self._quarantined_bytes > self._limits.quarantine_bytes

    @property
    def closed(self) -> bool:
        return self._closed

    def outstanding(self) -> int:
        """Chunks accepted and neither reported terminal nor DONE."""
        return len(self._posted) + self._quarantined_chunks

    def statistics(self) -> Mapping[str, float]:
        """Counters (``*_total``, ``dropped_*``) and gauges (the rest), bytes and counts; a snapshot.

        ``connector_*`` are the plugin's own, where it has any.
        """
        peers = tuple(self._peers.values())
        quarantined = self._quarantined_chunks
        figures: dict[str, float] = {
            "inflight_bytes": sum(peer.nbytes for peer in peers),
            "inflight_segments": sum(peer.segments for peer in peers),
            "inflight_chunks": sum(peer.chunks for peer in peers),
            "outstanding": len(self._posted) + quarantined,
            "quarantined_chunks": quarantined,
            "quarantined_bytes": self._quarantined_bytes,
            "unproven_chunks": len(self._lingering) - quarantined,
            "grants": len(self._grants),
            "peers": len(peers),
            "peers_up": sum(peer.state is PeerState.UP for peer in peers),
        }
        for name in _COUNTERS:
            figures[f"{name}_total"] = self._count[name]
        for reason, count in sorted(self._dropped.items()):
            figures[f"dropped_{reason}"] = count
        figures.update(self._plugins_figures())
        return figures

    def _plugins_figures(self) -> dict[str, float]:
        """Foreign code, asked from whatever thread: what goes wrong there is a figure that is missing, never ours."""
        try:
            return {f"connector_{name}": float(value) for name, value in self._connector.statistics().items()}
        except Exception:
            return {}

    def peer_states(self) -> Mapping[PeerId, PeerState]:
        """Every known peer epoch and its state."""
        return {id: peer.state for id, peer in tuple(self._peers.items())}

    # -- memory and the handshake ------------------------------------------------------------------------------------

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        """Memory that the transport can reach, zeroed, where it demands memory of its own.

        Raises :class:`~kvbaton.errors.CapabilityError` where it takes memory of any origin.
        """
        self._enter()
        if self.capabilities.memory_origin != "allocated":
            raise CapabilityError(
                f"T13: {self._transport} registers memory of any origin and allocates none", capability="memory_origin"
            )
        region = self._connector.allocate(id, kind, device, nbytes)
        self._allocated.add((region.id, region.address, region.length))
        return region

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make ``regions`` reachable, once.  Raises :class:`~kvbaton.errors.RegistrationError`; then none was (T1)."""
        self._enter()
        if self._regions is not None:
            raise LocalProtocolError("T1: regions are registered once, before the first endpoint")
        self._check_regions(regions)
        try:
            self._connector.register(regions)
        except KvbatonError:
            raise
        except Exception as error:
            raise RegistrationError(
                f"T1: {self._transport} could not register memory: {_text(error)}. None was registered.",
                transport=self._transport, reason=_text(error),
            ) from error  # fmt: skip
        self._regions = tuple(regions)
        self._lengths = region_lengths(regions)

    def endpoint(self) -> Endpoint:
        """How this connector is reached (T2).  Raises unless regions are registered."""
        self._enter()
        if self._regions is None:
            raise LocalProtocolError("T1: register the regions before asking for the endpoint")
        try:
            metadata = self._connector.metadata()
        except KvbatonError:
            raise
        except Exception as error:
            raise TransportError(f"T2: {self._transport} has no metadata: {_text(error)}") from error
        if type(metadata) is not bytes:  # the peer would not take it for an endpoint, and would wait
            raise TransportError(
                f"T2: transport {self._transport}: metadata() returned {type(metadata).__name__}, not bytes",
                transport=self._transport,
            )
        infos = tuple(RegionInfo(region.id, region.kind, region.length) for region in self._regions)
        endpoint = Endpoint(self._transport, self._version, self.peer, infos, self._geometry, metadata)
        size = len(endpoint.encode())
        if size > MAX_ENDPOINT_BYTES:
            raise TransportError(
                f"T2: the endpoint of {self.peer} has {size} bytes, at most {MAX_ENDPOINT_BYTES} are allowed; register"
                " fewer, larger regions",
                transport=self._transport,
            )
        return endpoint

    def connect(self, endpoint: Endpoint) -> None:
        """Start to connect; ``poll`` reports *up*, or *down* by the deadline (T2).  Twice is once.

        A new epoch replaces the old one, which is *down* from here on.

        Raises, and then nothing was connected: :class:`~kvbaton.errors.GeometryMismatch` (C3.5);
        :class:`~kvbaton.errors.ConnectError` for another transport or version, for our own endpoint, for an epoch
        older than one seen, and for an epoch that was up and went down (C1.4).
        """
        self._enter()
        if self._regions is None:
            raise LocalProtocolError("T1: register the regions before connecting")
        id = endpoint.peer
        self._check_endpoint(endpoint)
        known = self._current.get(id.name)
        if known is not None and id.epoch < known.epoch:
            raise ConnectError(
                f"C1.4: {id} is an older epoch of {known}; ask the stage for its present endpoint", peer=id
            )
        if known == id:
            peer = self._peers[id]
            if peer.state in (PeerState.CONNECTING, PeerState.UP):
                return
            if peer.state is PeerState.CLOSING or peer.was_up:
                raise ConnectError(
                    f"C6.4: {id} was disconnected; it comes back only as a new process with a new epoch", peer=id
                )
        elif known is not None:
            self._lose(self._peers[known], PeerLost(f"C1.4: {known} was replaced by {id}", peer=known))
        self._current[id.name] = id
        peer = _Peer(id, region_lengths(endpoint.regions), self._deadline())
        self._peers[id] = peer
        if known is not None and known != id:
            self._forget_peer(self._peers[known])
        try:
            self._connector.connect(endpoint)
        except Exception as error:
            cause = ConnectError(f"T2: {self._transport} cannot connect to {id}: {_text(error)}", peer=id)
            cause.__cause__ = error
            self._lose(peer, cause)

    def disconnect(self, peer: PeerId) -> None:
        """Start to disconnect: nothing new is accepted for it, posted work drains; ``poll`` reports *down* (C6.4).

        Also for a peer that is already down but not quiet: a later *down* may then say quiet.  Unknown peer: no effect.
        """
        self._enter()
        known = self._peers.get(peer)
        if known is None or known.quiet:
            return
        if known.state is not PeerState.DOWN:
            known.state = PeerState.CLOSING
            known.deadline = self._deadline()
        self._disconnect(peer)

    def _deadline(self) -> float:
        """Of connecting or disconnecting that begins now."""
        deadline = self._clock() + self._connect_deadline
        self._next_deadline = min(self._next_deadline, deadline)
        return deadline

    def fenced(self, peer: PeerId) -> None:
        """Core proved this peer's process dead: everything towards it becomes terminal.  Unknown peer: no effect."""
        self._enter()
        if peer not in self._peers or not self._foreign("fenced", lambda: self._connector.fenced(peer), peer=peer):
            return
        if self.capabilities.quiet == "never":
            return
        self._peers[peer].fenced = True  # also for completions that the plugin has not reported yet
        for flight in self._waiting_for_proof(peer):
            self._prove(flight, Outcome.FAILED, True, True, PeerLost(f"C6.4: {peer} was fenced", peer=peer))

    # -- chunks at the source ----------------------------------------------------------------------------------------

    def submit(self, chunk: Chunk) -> bool:
        """Accept ``chunk`` now, or say that there is no room: nothing was taken, offer it on the next pass (T6).

        Ownership: from acceptance until a completion says ``source_quiet`` / ``target_quiet`` the bytes of that side
        belong to the transport.  A chunk for a peer that is down is accepted and ends as FAILED, terminal, at the
        next ``poll``.

        Raises, before any side effect: :class:`~kvbaton.errors.SegmentError` (C3.6),
        :class:`~kvbaton.errors.CapabilityError` (T13) beyond a declared limit,
        :class:`~kvbaton.errors.LocalProtocolError` for a peer never connected, or a chunk that is already under way.
        """
        if self._owner is not current_thread() or self._closed:
            self._enter()
        key = (chunk.transfer, chunk.sequence)
        if key in self._posted or key in self._lingering:
            raise LocalProtocolError(
                f"T5: chunk {chunk.sequence} of transfer {chunk.transfer} is already under way", transfer=chunk.transfer
            )
        peer = self._peers.get(chunk.peer)
        if peer is None and chunk.peer.name not in self._current:
            raise LocalProtocolError(f"T2: {chunk.peer} was never connected; call connect() with its endpoint first")
        if peer is None or peer.state in _LEAVING:
            self._count["failed"] += 1
            self._news.completions.append(
                Completion(
                    chunk.transfer, chunk.sequence, Outcome.FAILED, True, True,
                    PeerLost(f"T7: {chunk.peer} is down; chunk {chunk.sequence} was not posted", peer=chunk.peer),
                )
            )  # fmt: skip
            return True
        segments = len(chunk.source)
        if (
            peer.state is _CONNECTING
            or (self._quarantined_chunks and self.quarantine_full)
            or not self._room(peer, chunk.nbytes, segments)
        ):
            self._count["full"] += 1
            return False
        if peer.checked is not chunk:
            self._check_chunk(chunk, peer, segments)
        flight = _Flight(
            chunk.transfer, chunk.sequence, peer, chunk.nbytes, segments, self._clock() + self._chunk_deadline
        )
        try:
            accepted = self._connector.submit(chunk)
        except Exception as error:
            # Field failure 14: an exception while posting is a failure of the chunk.  Whether bytes moved is not known.
            self._take(flight)
            flight.raised = True
            self._linger(key, flight)
            cause = TransportError(
                f"C6.3: {self._transport} raised while posting chunk {chunk.sequence} to {peer.id}: {_text(error)}."
                " Its memory is quarantined until the peer is fenced.",
                peer=peer.id, transfer=chunk.transfer,
            )  # fmt: skip
            cause.__cause__ = error
            self._prove(flight, Outcome.FAILED, False, False, cause)
            return True
        if not accepted:
            peer.checked = chunk
            peer.refused_in = self._refused_in = self._pass
            self._count["full"] += 1
            return False
        self._take(flight)
        self._posted[key] = flight
        return True

    def cancel(self, transfer: TransferId) -> None:
        """What is not started completes as CANCELLED; what is posted drains and is reported (T9).  Also what is late: a
        chunk that still waits in the plugin's queue would be written when its peer wakes up.
        """
        self._enter()
        if any(not flight.completed for flight in self._flights.get(transfer, {}).values()):
            self._foreign("cancel", lambda: self._connector.cancel(transfer), transfer=transfer)

    def acknowledge(self, transfer: TransferId) -> None:
        """The destination has received all of ``transfer``: by T3 nothing of it is written any more."""
        self._enter()
        self._foreign("acknowledge", lambda: self._connector.acknowledge(transfer), transfer=transfer)
        for flight in tuple(self._flights.get(transfer, {}).values()):
            flight.acknowledged = True  # whatever is learnt of its source later, its target is quiet
            if flight.source_quiet:
                self._prove(flight, Outcome.DONE if flight.unproven else Outcome.FAILED, True, True, None)

    # -- grants at the destination -----------------------------------------------------------------------------------

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        """``peer`` may write ``target`` for ``transfer``; call it before the peer is told to.

        Raises :class:`~kvbaton.errors.SegmentError` for a target outside our regions,
        :class:`~kvbaton.errors.PeerLost` for a peer that is down or was never connected, and
        :class:`~kvbaton.errors.TransportError` where the transport cannot; nothing is granted then.
        """
        self._enter()
        target.check_bounds(self._lengths, f"the grant for transfer {transfer}")
        known = self._peers.get(peer)
        if known is None or known.state in (PeerState.CLOSING, PeerState.DOWN):
            raise PeerLost(f"T7: {peer} is not connected; nothing was granted to it", peer=peer)
        if transfer in self._grants:
            raise LocalProtocolError(
                f"C2.2: transfer {transfer} has a grant already, and it is frozen", transfer=transfer
            )
        try:
            self._connector.grant(transfer, peer, target)
        except KvbatonError:
            raise
        except Exception as error:
            raise TransportError(f"T3: {self._transport} cannot grant transfer {transfer}: {_text(error)}") from error
        self._grants[transfer] = peer

    def revoke(self, transfer: TransferId) -> bool:
        """True: from now on nothing of ``transfer`` is written here any more, whatever its peer does.  False: not yet.

        Raises :class:`~kvbaton.errors.CapabilityError` unless ``capabilities.revocable`` (T13): look before calling.
        """
        self._enter()
        if not self.capabilities.revocable:
            raise CapabilityError(f"T13: {self._transport} does not declare revocable", capability="revocable")
        return self._revoke(transfer)

    def received(self, transfer: TransferId) -> None:
        """Everything of a granted transfer has come; only its peer may still want ``poll`` to be called."""
        self._enter()
        if transfer in self._grants:
            self._received.add(transfer)

    def forget(self, transfer: TransferId) -> None:
        """This side is done with ``transfer``, its memory is quiet: nothing of it is kept (T12).  Twice is once."""
        self._enter()
        if transfer in self._grants:
            # a transport that keeps grants has no other word that this one is over
            self._revoke(transfer)
            self._grants.pop(transfer, None)
            self._received.discard(transfer)
            self._revoke_failing.discard(transfer)
        for peer in self._peers.values():
            if peer.checked is not None and peer.checked.transfer == transfer:
                peer.checked = None

    # -- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        """What has happened since the last call; bounded work, never raises for a fault of the plugin.

        Order within one result is of no meaning (T4).  A malformed event of the plugin counts for nothing, and a chunk
        that it meant is under way as before; they are counted (``dropped_malformed``), and a fault tells of the first
        and whenever their number has doubled.  :data:`~kvbaton.connector.IDLE` when nothing happened.
        """
        if self._owner is not current_thread() or self._closed:
            self._enter()
        self._pass += 1
        try:
            progress = self._connector.poll()
            if progress is not IDLE:
                self._filter(progress)
            self._poll_is_failing = False
        except Exception as error:
            # Field failure 25: a transport's exception must not kill a healthy worker.  Deadlines go on counting.
            if not self._poll_is_failing:
                self._fault("poll", error)
            self._poll_is_failing = True
        now = self._clock()
        if self._posted or now >= self._next_deadline:
            self._expire(now)
        full = self._quarantined_chunks > 0 and self.quarantine_full
        if full and not self._quarantine_reported:
            self._news.faults.append(
                QuarantineFull(
                    f"T8: {self._quarantined_bytes} bytes are in quarantine, {self._limits.quarantine_bytes} are"
                    " allowed. The stage must not go on; fence the peers that do not answer, or restart it.",
                    bytes=self._quarantined_bytes, limit=self._limits.quarantine_bytes,
                )
            )  # fmt: skip
        self._quarantine_reported = full
        news = self._news
        if not (news.completions or news.receipts or news.peers or news.faults):
            return IDLE
        self._news = _News()
        self._count["receipts"] += len(news.receipts)
        return GuardProgress(tuple(news.completions), tuple(news.receipts), tuple(news.peers), tuple(news.faults))

    def wait(self, timeout: float) -> None:
        """Return within ``timeout`` seconds, earlier when ``poll`` may have something.  Releases the GIL."""
        self._enter()
        if self._news or timeout <= 0:
            return
        if not self._foreign("wait", lambda: self._connector.wait(timeout)):
            time.sleep(timeout)  # a plugin whose wait raises must not turn the pump into a busy loop

    def detach(self) -> None:
        """The owning thread lets go; whichever calls next owns the connector (T11)."""
        self._enter()
        self._owner = None

    def close(self) -> None:
        """Release everything but the region memory; idempotent (T10).

        Raises :class:`~kvbaton.errors.Outstanding` while the transport may still read a chunk's source (C5.4): drain,
        or fence the peer, or let the process end.
        """
        if self._closed:
            return
        if self._owner is not None and not self._owner.is_alive():
            self._owner = None
        self._enter()
        flights = [*self._posted.values(), *self._lingering.values()]
        unread = sum(not flight.source_quiet for flight in flights)
        if unread:
            raise Outstanding(
                f"T10: {unread} chunks are outstanding; poll until they are terminal, or fence their peers, then close",
                outstanding=unread,
            )
        try:
            self._connector.close()
        except KvbatonError:
            raise
        except Exception as error:
            raise TransportError(f"T10: {self._transport} failed to close: {_text(error)}") from error
        self._closed = True

    # -- checks before the plugin is touched -------------------------------------------------------------------------

    def _enter(self) -> None:
        # T11
        current = current_thread()
        if self._owner is None:
            self._owner = current
        elif self._owner is not current:
            raise ThreadError(
                f"T11: the connector of {self.peer} belongs to thread {self._owner.name!r}, it was called from"
                f" {current.name!r}",
                owner=self._owner.name, caller=current.name,
            )  # fmt: skip
        if self._closed:
            raise LocalProtocolError(f"T10: the connector of {self.peer} is closed")

    def _check_regions(self, regions: Sequence[MemoryRegion]) -> None:
        # T1: libraries accept overlapping and bogus registrations silently, so core looks.
        def refuse(region: MemoryRegion, reason: str, **facts: object) -> RegistrationError:
            return RegistrationError(
                f"T1: region {region.id} cannot be registered with {self._transport}: {reason}. None was registered.",
                region=region.id, reason=reason, transport=self._transport, **facts,
            )  # fmt: skip

        capabilities = self.capabilities
        for region in regions:
            if region.length < 1 or region.address < 1:
                raise refuse(region, f"{region.length} bytes at address {region.address:#x} is no memory")
            if region.kind not in capabilities.memory_kinds:
                able = ", ".join(sorted(capabilities.memory_kinds))
                raise refuse(region, f"it is {region.kind} memory; only {able} is supported", capability="memory_kinds")
            if capabilities.memory_origin == "allocated" and (
                region.id, region.address, region.length
            ) not in self._allocated:  # fmt: skip
                raise refuse(region, "it did not come from allocate()", capability="memory_origin")
        if (found := clash(regions)) is not None:
            raise refuse(*found)

    def _check_endpoint(self, endpoint: Endpoint) -> None:
        id = endpoint.peer
        if endpoint.transport != self._transport:
            raise ConnectError(
                f"T2: {id} speaks {endpoint.transport!r}, we speak {self._transport!r}; both stages need one transport",
                peer=id, ours=self._transport, theirs=endpoint.transport,
            )  # fmt: skip
        if endpoint.version != self._version:
            raise ConnectError(
                f"T2: {id} speaks version {endpoint.version} of {self._transport}'s wire, we speak {self._version};"
                " install the same release on both",
                peer=id, ours=self._version, theirs=endpoint.version,
            )  # fmt: skip
        if id.name == self.peer.name:
            raise ConnectError(f"T2: {id} has our own name; every stage needs its own", peer=id)
        if bool(endpoint.geometry) != bool(self._geometry):
            raise ConnectError(f"C3.5: {id} and {self.peer} must both state a geometry, or neither", peer=id)
        if self._geometry:
            ours, theirs = KVGeometry.decode(self._geometry), KVGeometry.decode(endpoint.geometry)
            ours.require_compatible(theirs, str(self.peer), str(id))

    def _check_chunk(self, chunk: Chunk, peer: _Peer, segments: int) -> None:
        capabilities = self._connector.capabilities
        source, target = chunk.source, chunk.target
        # C3.6
        if segments != len(target):
            raise SegmentError(
                f"C3.6: {_what(chunk)} has {segments} source and {len(target)} target segments. No byte moved."
            )
        if segments > capabilities.max_segments:
            raise CapabilityError(
                f"T13: {_what(chunk)} has {segments} segments, {self._transport} takes {capabilities.max_segments}",
                capability="max_segments",
            )
        if not same_lengths(source, target):
            at = int(np.flatnonzero(source.length != target.length)[0])
            raise SegmentError(
                f"C3.6: {_what(chunk)}, segment {at}: {int(source.length[at])} source bytes against"
                f" {int(target.length[at])} target bytes. No byte moved.",
                segment=at,
            )
        if not source.within(self._lengths):
            source.check_bounds(self._lengths, f"the source of {_what(chunk)}")
        if not target.within(peer.lengths):
            target.check_bounds(peer.lengths, f"the target at {peer.id} of {_what(chunk)}")
        total = source.nbytes
        if total != chunk.nbytes:
            raise SegmentError(
                f"C3.6: {_what(chunk)} says {chunk.nbytes} bytes, its segments have {total}. No byte moved."
            )
        if total > capabilities.max_chunk_bytes:
            raise CapabilityError(
                f"T13: {_what(chunk)} has {total} bytes, {self._transport} takes {capabilities.max_chunk_bytes}",
                capability="max_chunk_bytes",
            )
        grain = capabilities.alignment
        if grain > 1 and not aligned(source, target, grain):
            raise CapabilityError(
                f"T13: {_what(chunk)} has offsets or lengths that are no multiples of {grain}, as {self._transport}"
                " needs",
                capability="alignment",
            )

    # -- budgets -----------------------------------------------------------------------------------------------------

    def _room(self, peer: _Peer, nbytes: int, segments: int) -> bool:
        limits = self._limits
        if peer.chunks >= limits.unreceipted_chunks:
            return False
        # one chunk is always allowed: no peer waits for another's share, and no chunk is too large for ever
        if peer.chunks:
            nbytes, segments, known = peer.nbytes + nbytes, peer.segments + segments, len(self._peers)
            # who shares is looked at only where it matters: they are not more than are known
            if nbytes > limits.inflight_bytes // known or segments > limits.inflight_segments // known:
                sharing = sum(other.state is _UP or other.chunks > 0 for other in self._peers.values())
                if nbytes > limits.inflight_bytes // sharing or segments > limits.inflight_segments // sharing:
                    return False
        # the transport's own queue was full for somebody with fewer chunks in it who asked in this or the last pass
        return self._refused_in < self._pass - 1 or not any(
            other.refused_in >= self._pass - 1 and other.chunks < peer.chunks and other.state is _UP
            for other in self._peers.values()
        )

    def _take(self, flight: _Flight) -> None:
        peer, nbytes, segments = flight.peer, flight.nbytes, flight.segments
        peer.chunks += 1
        peer.nbytes += nbytes
        peer.segments += segments
        peer.flights += 1
        of_transfer = self._flights.get(flight.transfer)
        if of_transfer is None:
            of_transfer = self._flights[flight.transfer] = {}
        of_transfer[flight.sequence] = flight
        peer.checked = None
        peer.refused_in = -2
        count = self._count
        count["chunks"] += 1
        count["bytes"] += nbytes
        count["segments"] += segments

    def _give_back(self, flight: _Flight) -> None:
        if flight.holds_budget:
            flight.holds_budget = False
            flight.peer.chunks -= 1
            flight.peer.nbytes -= flight.nbytes
            flight.peer.segments -= flight.segments

    # -- from flight to terminal -------------------------------------------------------------------------------------

    def _linger(self, key: _Key, flight: _Flight) -> None:
        self._lingering[key] = flight
        flight.quarantined = True
        self._quarantined_chunks += 1
        self._quarantined_bytes += flight.nbytes

    def _release_quarantine(self, flight: _Flight) -> None:
        flight.quarantined = False
        self._quarantined_chunks -= 1
        self._quarantined_bytes -= flight.nbytes

    def _prove(
        self,
        flight: _Flight,
        outcome: Outcome,
        source: bool,
        target: bool,
        error: Exception | None,
        said: Completion | None = None,
    ) -> None:
        """Pass on what is newly known of a flight; end it where nothing is left to prove.

        ``said``: the plugin's own word, which is passed on as it is where it says just that.
        """
        source = source or flight.source_quiet
        target = target or flight.target_quiet or flight.acknowledged
        grew = (source, target) != (flight.source_quiet, flight.target_quiet)
        flight.source_quiet, flight.target_quiet = source, target
        key = (flight.transfer, flight.sequence)
        if source and target:
            if self._posted.pop(key, None) is None:
                self._lingering.pop(key, None)
            self._forget_flight(flight)
            if flight.quarantined:
                self._release_quarantine(flight)
            self._give_back(flight)
            flight.peer.flights -= 1
            if flight.peer.quiet:
                self._forget_peer(flight.peer)
        elif outcome is _DONE:
            # a buffering transport: the budget must return before the acknowledgement can come
            self._posted.pop(key, None)
            self._lingering[key] = flight
            if flight.quarantined:
                self._release_quarantine(flight)
            self._give_back(flight)
            flight.unproven = True
        elif key not in self._lingering:
            del self._posted[key]
            self._linger(key, flight)
        if flight.told and not grew:
            return
        flight.told = True
        if outcome is _DONE:
            if source and target:
                self._count["done"] += 1
        elif (source and target) or outcome is _TIMED_OUT:
            self._count[outcome.value] += 1
        if (
            said is None
            or type(said) is not Completion
            or said.transfer is not flight.transfer
            or said.sequence is not flight.sequence
            or said.source_quiet is not source
            or said.target_quiet is not target
            or said.error is not error
        ):
            said = Completion(flight.transfer, flight.sequence, outcome, source, target, error)
        self._news.completions.append(said)

    def _forget_flight(self, flight: _Flight) -> None:
        of_transfer = self._flights.get(flight.transfer)
        if of_transfer is not None:
            of_transfer.pop(flight.sequence, None)
            if not of_transfer:
                del self._flights[flight.transfer]

    def _expire(self, now: float) -> None:
        while self._posted:
            flight = next(iter(self._posted.values()))
            if flight.deadline > now:
                break
            # T8, C6.1: reported once; the memory stays owned
            self._prove(flight, Outcome.TIMED_OUT, False, False, TransportError(
                f"T8: chunk {flight.sequence} of transfer {flight.transfer}, {self.peer} -> {flight.peer.id},"
                f" passed its deadline ({self._chunk_deadline:g} s) in state SUBMITTED. Not quiet: {flight.nbytes}"
                f" bytes on either side are quarantined until it completes or {flight.peer.id} is fenced.",
                peer=flight.peer.id, transfer=flight.transfer, sequence=flight.sequence, retained=flight.nbytes,
            ))  # fmt: skip
        if now < self._next_deadline:
            return
        for peer in [peer for peer in self._peers.values() if peer.deadline <= now]:
            connecting = peer.state is PeerState.CONNECTING
            verb = "connect to" if connecting else "disconnect from"
            self._lose(peer, ConnectError(
                f"T2: {self.peer} could not {verb} {peer.id} within {self._connect_deadline:g} s", peer=peer.id
            ))  # fmt: skip
            if connecting:
                self._disconnect(peer.id)
        self._next_deadline = min((peer.deadline for peer in self._peers.values()), default=math.inf)

    def _waiting_for_proof(self, peer: PeerId) -> list[_Flight]:
        """Flights to ``peer`` of which the plugin has said, or may have said, its last word: not quiet."""
        return [
            flight
            for flight in self._lingering.values()
            if flight.peer.id == peer and (flight.completed or flight.raised)
        ]

    # -- events from the plugin --------------------------------------------------------------------------------------

    def _filter(self, progress: Progress) -> None:
        # Each event by itself: one that is malformed, or a field that is no sequence, costs only itself (T5, C6.3).
        # Nothing of it is applied, since each is looked at whole before it changes anything.
        try:
            if completions := progress.completions:
                self._on_completions(completions, self._clock())
        except Exception as error:
            self._refuse(error)
        try:
            if receipts := progress.receipts:
                self._on_receipts(receipts)
        except Exception as error:
            self._refuse(error)
        try:
            if peers := progress.peers:
                for event in peers:
                    try:
                        self._on_peer(event)
                    except Exception as error:
                        self._refuse(error)
        except Exception as error:
            self._refuse(error)

    def _refuse(self, error: Exception) -> None:
        """A malformed event.  Of any number in one pass one is told, and of any number of passes few: a broken plugin
        fills no log (T12)."""
        self._dropped["malformed"] += 1
        count = self._dropped["malformed"]
        if count < self._malformed_told_at or self._malformed_in == self._pass:
            return
        self._malformed_told_at, self._malformed_in = 2 * count, self._pass
        self._report(
            "poll", error,
            f"C6.3: {self._transport} returned from poll() what is no event: {_text(error)}. It counts for nothing; a"
            f" chunk that it meant is still awaited, until its deadline. {count} so far; this is said again once they"
            " have doubled.",
        )  # fmt: skip

    def _on_completions(self, completions: Iterable[Completion], now: float) -> None:
        posted, lingering = self._posted, self._lingering
        for completion in completions:
            try:
                sequence, outcome, error = completion.sequence, completion.outcome, completion.error
                source, target = completion.source_quiet, completion.target_quiet
                if (
                    source is not True
                    or target is not True
                    or error is not None
                    or type(sequence) is not int
                    or type(completion) is not Completion
                ):
                    _check_completion(completion, sequence, source, target, error)
                    error = _told(error)
                key = (completion.transfer, sequence)
                flight = posted.get(key) or lingering.get(key)
                if flight is None:
                    _must_be(key[0], str, "the transfer of a completion")
                    self._dropped["completion_unknown"] += 1
                elif flight.completed:
                    self._dropped["completion_duplicate"] += 1
                elif outcome is not _DONE and (type(outcome) is not Outcome or outcome is _TIMED_OUT):
                    # only the guard says timed out, and what is no outcome ends a chunk, too; neither proves quiet
                    # (T5, T8)
                    flight.completed = True
                    cause = self._no_outcome(flight) if error is None else error
                    self._prove(flight, Outcome.FAILED, False, False, cause)
                else:
                    flight.completed = True
                    if outcome is _DONE:
                        self.chunk_seconds.add(now - flight.deadline + self._chunk_deadline)
                    fenced = flight.peer.fenced
                    self._prove(flight, outcome, source or fenced, target or fenced, error, completion)
            except Exception as wrong:
                self._refuse(wrong)

    def _no_outcome(self, flight: _Flight) -> TransportError:
        return TransportError(
            f"T5: {self._transport} ended chunk {flight.sequence} of transfer {flight.transfer} by what is no outcome,"
            " or is core's own; it proves nothing",
            peer=flight.peer.id, transfer=flight.transfer, sequence=flight.sequence,
        )  # fmt: skip

    def _on_receipts(self, receipts: Iterable[Receipt]) -> None:
        peers, current, heard = self._peers, self._current, self._news.receipts
        for receipt in receipts:
            try:
                id, transfer, sequence = receipt.peer, receipt.transfer, receipt.sequence
                if type(sequence) is not int or type(transfer) is not str or type(receipt) is not Receipt:
                    _check_receipt(receipt, transfer, sequence)
                    receipt = Receipt(id, transfer, sequence)  # what was looked at, whatever it says next
                peer = peers.get(id)
                # C1.4.  A peer that is down but not quiet is still heard: what arrived, arrived.
                if current.get(id.name, id) != id:
                    self._dropped["receipt_old_epoch"] += 1
                elif peer is None:
                    self._dropped["receipt_unknown_peer"] += 1
                elif peer.quiet:
                    self._dropped["receipt_after_fence"] += 1
                else:
                    heard.append(receipt)
            except Exception as error:
                self._refuse(error)

    def _on_peer(self, event: PeerEvent) -> None:
        # each read once: what is looked at is what counts
        id, up, quiet, error = event.peer, event.up, event.quiet, event.error
        _check_peer_event(event, id, up, quiet, error)
        error = _told(error)
        peer = self._peers.get(id)
        if peer is None:
            self._dropped["event_unknown_peer"] += 1
        elif up:
            if peer.state is not PeerState.CONNECTING:
                self._dropped["event_up_again"] += 1
                return
            peer.state, peer.deadline, peer.was_up = PeerState.UP, math.inf, True
            self._news.peers.append(PeerEvent(id, True, quiet, error))
        else:
            self._lose(peer, error, quiet)

    def _lose(self, peer: _Peer, error: Exception | None, quiet: bool = False) -> None:
        """A peer is down, or is now also quiet; said once each."""
        if peer.state is PeerState.DOWN and (peer.quiet or not quiet):
            self._dropped["event_down_again"] += 1
            return
        peer.state, peer.deadline, peer.checked = PeerState.DOWN, math.inf, None
        peer.quiet = quiet
        self._news.peers.append(PeerEvent(peer.id, False, quiet, error))
        if quiet:
            # this fence proves that nothing here is still read for it; what may still land there it cannot know
            for flight in self._waiting_for_proof(peer.id):
                self._prove(flight, Outcome.FAILED, True, False, error)
        self._forget_peer(peer)

    def _forget_peer(self, peer: _Peer) -> None:
        # an old epoch is remembered until nothing of it can come any more
        if peer.quiet and not peer.flights and self._current.get(peer.id.name) != peer.id:
            self._peers.pop(peer.id, None)

    # -- foreign code ------------------------------------------------------------------------------------------------

    def _disconnect(self, peer: PeerId) -> None:
        self._foreign("disconnect", lambda: self._connector.disconnect(peer), peer=peer)

    def _revoke(self, transfer: TransferId) -> bool:
        try:
            revoked = self._connector.revoke(transfer) is True
        except Exception as error:
            if transfer not in self._revoke_failing:
                self._fault("revoke", error, transfer=transfer)
            if transfer in self._grants:
                self._revoke_failing.add(transfer)
            return False
        if revoked:
            self._grants.pop(transfer, None)
            self._received.discard(transfer)
            self._revoke_failing.discard(transfer)
        return revoked

    def _foreign(self, call: str, action: Callable[[], None], **facts: object) -> bool:
        """Run one call into the plugin; an exception becomes a fault that ``poll`` reports.  Whether it went well."""
        try:
            action()
        except Exception as error:
            self._fault(call, error, **facts)
            return False
        return True

    def _fault(self, call: str, error: Exception, **facts: object) -> None:
        self._report(
            call, error,
            f"C6.3: {self._transport} raised in {call}(): {_text(error)}. What it was asked may not have happened.",
            **facts,
        )  # fmt: skip

    def _report(self, call: str, error: Exception, text: str, **facts: object) -> None:
        self._count["faults"] += 1
        fault = ConnectorFault(text, transport=self._transport, call=call, **facts)
        fault.__cause__ = error
        self._news.faults.append(fault)


# -- what the guard keeps --------------------------------------------------------------------------------------------

_Key = tuple[TransferId, int]

_COUNTERS = (
    "chunks", "bytes", "segments", "receipts", "full", "faults", *(outcome.value for outcome in Outcome)
)  # fmt: skip


@dataclass(slots=True, eq=False)
class _Peer:
    """One epoch of one peer, and what is under way to it."""

    id: PeerId
    #: Of the regions that it announced.
    lengths: Mapping[int, int]
    #: When connecting or disconnecting must be over.
    deadline: float
    state: PeerState = PeerState.CONNECTING
    was_up: bool = False
    quiet: bool = False
    #: Core proved its process dead, and the transport took note.
    fenced: bool = False
    #: Chunks, bytes and segments that hold budget; ``flights`` also counts the unproven ones.
    chunks: int = 0
    nbytes: int = 0
    segments: int = 0
    flights: int = 0
    #: The last chunk that passed all checks and that the transport had no room for.
    checked: Chunk | None = None
    #: The pass in which the transport itself last refused a chunk for it.
    refused_in: int = -2


class _Flight(msgspec.Struct, eq=False):
    """One accepted chunk until it is terminal.  The segments are the plugin's; only their size is kept."""

    transfer: TransferId
    sequence: int
    peer: _Peer
    nbytes: int
    segments: int
    deadline: float
    source_quiet: bool = False
    target_quiet: bool = False
    #: The plugin has spoken its one completion.
    completed: bool = False
    #: ``submit`` raised: the plugin may speak or not.
    raised: bool = False
    #: The stage was told something.
    told: bool = False
    quarantined: bool = False
    #: DONE, but the target is not proven quiet.
    unproven: bool = False
    #: The destination has received the transfer, so that nothing of it is written any more (T3).
    acknowledged: bool = False
    holds_budget: bool = True


class _News(msgspec.Struct, eq=False):
    """Events for the next ``poll``."""

    completions: list[Completion] = []
    receipts: list[Receipt] = []
    peers: list[PeerEvent] = []
    faults: list[KvbatonError] = []

    def __bool__(self) -> bool:
        return bool(self.completions or self.receipts or self.peers or self.faults)


#: Characters that are told of what foreign code says: a message with more than it may have is not sent (C9.3).
_LONGEST = 1000


def _text(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # foreign code, too
        text = ""
    text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def _told(error: Exception | None) -> Exception | None:
    """The error of an event, or where it cannot be told, because it has no words or too many, one that can."""
    if error is None:
        return None
    with contextlib.suppress(Exception):
        if len(str(error)) <= _LONGEST:
            return error
    told = TransportError(_text(error))
    told.__cause__ = error
    return told


def _what(chunk: Chunk) -> str:
    return f"chunk {chunk.sequence} of transfer {chunk.transfer}"


# -- is it a connector? ------------------------------------------------------------------------------------------------

#: What every connector is asked; the rest only where it declares it, or has from ``ConnectorBase``.
_ASKED = ("register", "metadata", "connect", "disconnect", "submit", "poll", "outstanding", "close")


def _no_connector(opened: object) -> str:
    """Why what ``open()`` returned is no connector; empty where it is one."""
    if isinstance(opened, type):
        return f"open() returned the class {opened.__name__}, not a connector: return an instance of it"
    shown = "None" if opened is None else type(opened).__name__
    said = f"open() returned {shown}, not a connector"
    if opened is None:
        return f"{said}: it must return a kvbaton.connector.TransferConnector"
    if missing := [name for name in _ASKED if not callable(getattr(opened, name, None))]:
        return f"{said}: it has no {', '.join(missing)}"
    able = getattr(opened, "capabilities", None)
    if not isinstance(able, Capabilities):
        return f"{said}: its capabilities are {type(able).__name__}, not Capabilities"
    return ""


# -- is it an event?  Each raises TypeError where it is not ------------------------------------------------------------


def _check_completion(completion: Completion, sequence: object, source: object, target: object, error: object) -> None:
    """Whatever its outcome is.  Quiet is proven by nothing but True (T5)."""
    _must_be(completion, Completion, "a completion")
    _must_be(sequence, int, "the sequence of a completion")
    _must_be(source, bool, "source_quiet of a completion")
    _must_be(target, bool, "target_quiet of a completion")
    if error is not None:
        _must_be(error, BaseException, "the error of a completion")


def _check_receipt(receipt: Receipt, transfer: object, sequence: object) -> None:
    _must_be(receipt, Receipt, "a receipt")
    _must_be(transfer, str, "the transfer of a receipt")
    _must_be(sequence, int, "the sequence of a receipt")


def _check_peer_event(event: PeerEvent, id: object, up: object, quiet: object, error: object) -> None:
    """A fence is proven by nothing but True (C6.4)."""
    _must_be(event, PeerEvent, "an event of a peer")
    _must_be(id, PeerId, "the peer of an event")
    _must_be(up, bool, "up of an event of a peer")
    _must_be(quiet, bool, "quiet of an event of a peer")
    if error is not None:
        _must_be(error, BaseException, "the error of an event of a peer")


def _must_be(value: object, kind: type, what: str) -> None:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{what} is of type {type(value).__name__}, not {kind.__name__}")
