"""The transport protocol: what a backend author implements, and the values that cross it.

A connector is one stage's end of a transport.  It moves bytes one-sidedly from registered source memory into registered
destination memory and tells each side what it can *prove*: a receipt at the destination, one completion per chunk at
the source.  It knows nothing of requests, engines or credits.

Threading: after ``open()`` every method is called on one thread, the stage's pump (``close()`` too, or after the pump
was joined).  No method waits for a peer.  Only :meth:`TransferConnector.poll` produces events.  Core's guard
(:mod:`kvbaton.guard`) wraps every connector and has validated every argument before a method is called.

The clauses T1 to T13 of ``docs/contracts.md`` are what the methods promise; ``kvbaton conformance NAME`` finds out.
"""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.errors import CapabilityError, LocalProtocolError
from kvbaton.identity import PeerId, TransferId, WireTransferId
from kvbaton.segments import Segments

if TYPE_CHECKING:
    from kvbaton.bench.baseline import Baseline
    from kvbaton.doctor.leftovers import Leftover

#: The version of this protocol that a plugin states as ``api_version``.
API_VERSION = 1

#: An endpoint on the wire is at most this large, geometry and metadata included.
MAX_ENDPOINT_BYTES = 64 * 1024

MemoryKind = Literal["host", "cuda"]
Reach = Literal["same_process", "cross_process", "cross_host"]


# -- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class MemoryRegion:
    """A contiguous run of memory that a transport may reach once it is registered.

    ``address`` and ``length`` are bytes; ``device`` counts within ``kind`` (0 for host memory).  ``owner`` keeps the
    memory alive for as long as the region object lives; region memory outlives ``close()`` (T1).
    """

    id: int
    kind: MemoryKind
    device: int
    address: int
    length: int
    owner: object = field(repr=False, default=None)

    @classmethod
    def of_array(cls, id: int, array: npt.NDArray[Any]) -> MemoryRegion:
        """The memory of a C-contiguous numpy array, which becomes the owner."""
        if not array.flags.c_contiguous:
            raise LocalProtocolError(f"region {id}: the array is not C-contiguous; copy it into one that is")
        return cls(id, "host", 0, array.ctypes.data, array.nbytes, array)

    def view(self) -> npt.NDArray[np.uint8]:
        """The bytes of a host region, shared, writable.  Raises :class:`LocalProtocolError` for device memory."""
        if self.kind != "host":
            raise LocalProtocolError(f"region {self.id} is {self.kind} memory: the host cannot address it")
        buffer = (ctypes.c_uint8 * self.length).from_address(self.address)
        return np.ctypeslib.as_array(buffer)


class RegionInfo(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a peer is told about a region: enough to name it and to check bounds, no address."""

    id: int
    kind: MemoryKind
    length: int


class Endpoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one connector is reached, serialisable (T2).  At most :data:`MAX_ENDPOINT_BYTES` encoded.

    ``version`` is the plugin's own (:func:`wire_version`).  ``geometry`` is an encoded
    :class:`~kvbaton.geometry.KVGeometry` (or empty, where a test has none).  ``metadata`` is what the connector's own
    ``metadata()`` returned: opaque to core.
    """

    transport: str
    version: str
    peer: PeerId
    regions: tuple[RegionInfo, ...]
    geometry: bytes
    metadata: bytes

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Endpoint:
        """Raises :class:`~kvbaton.errors.LocalProtocolError` where ``data`` is not an endpoint."""
        if len(data) > MAX_ENDPOINT_BYTES:
            raise LocalProtocolError(f"an endpoint of {len(data)} bytes: at most {MAX_ENDPOINT_BYTES} are accepted")
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise LocalProtocolError(f"not an endpoint: {error}") from error


# -- operations and what is known of them ----------------------------------------------------------------------------


@runtime_checkable
class DeviceEvent(Protocol):
    """Something a device will have done: ``query()`` says, without waiting, whether it has.  Never goes back to
    False."""

    def query(self) -> bool: ...


@dataclass(frozen=True, eq=False, slots=True)
class Chunk:
    """A bounded batch of source segments and the destination segments they go to (equal count, equal lengths).

    ``sequence`` counts from 0 within ``transfer``.  ``nbytes`` is the sum of lengths; 0 with empty lists is legal: a
    receipt without bytes.  The device has finished the source: core waits for that before it submits (C4).

    Ownership: from an accepting ``submit`` until the completion says ``source_quiet`` / ``target_quiet`` the bytes of
    that side belong to the transport.
    """

    transfer: TransferId
    sequence: int
    peer: PeerId
    source: Segments
    target: Segments
    nbytes: int


class Outcome(enum.Enum):
    """How an accepted chunk ended at the source."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    #: Core's own word: no completion by the deadline.  Not terminal; the memory stays quarantined (T8).
    TIMED_OUT = "timed_out"


@dataclass(frozen=True, slots=True)
class Completion:
    """The one end of an accepted chunk at its source (T5), with what is *proven* quiet on either side.

    ``source_quiet``: the source bytes are not read any more.  ``target_quiet``: no byte of this chunk can still be
    written. Both together are called *terminal*.  A raised error alone proves neither.
    """

    transfer: TransferId
    sequence: int
    outcome: Outcome
    source_quiet: bool
    target_quiet: bool
    error: Exception | None = None

    @property
    def terminal(self) -> bool:
        return self.source_quiet and self.target_quiet


class Receipt(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The destination's own evidence that one chunk's bytes are visible to it (T3).  ``peer`` is who sent them."""

    peer: PeerId
    transfer: WireTransferId
    sequence: int


@dataclass(frozen=True, slots=True)
class PeerEvent:
    """A peer came up (it accepted my epoch) or went down.

    ``quiet`` on *down* is the transport's fence: nothing of that peer can still be written here, and nothing here is
    still read for it.  *Down* without *quiet* proves nothing about memory (C6.4).
    """

    peer: PeerId
    up: bool
    quiet: bool = False
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """What one ``poll()`` found.  The same event is never reported twice."""

    completions: tuple[Completion, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    peers: tuple[PeerEvent, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.completions or self.receipts or self.peers)


#: What ``poll()`` returns when nothing happened.
IDLE = Progress()


# -- capabilities ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a connector declares, in both directions true (T13): the suite finds what is declared and refuses the
    rest."""

    #: Memory it can move, e.g. ``{"host"}``.
    memory_kinds: frozenset[MemoryKind] = frozenset({"host"})
    #: ``any``: memory of any origin can be registered.  ``allocated``: only what :meth:`allocate` returned.
    memory_origin: Literal["any", "allocated"] = "any"
    same_process: bool = False
    cross_process: bool = False
    cross_host: bool = False
    #: ``exact``: every completion proves what is quiet.  ``peer_death``: after a failure only a dead peer does.
    #: ``never``: nothing does but the end of this process.
    quiet: Literal["exact", "peer_death", "never"] = "exact"
    #: After ``disconnect`` this peer can write here no more, and what it submits later is refused (C6.4).
    disconnect_fences: bool = False
    #: ``revoke(transfer)`` works: a fence per transfer without the peer's help.
    revocable: bool = False
    #: ``submit`` copies in the calling thread (it still never waits for a peer).
    copies_in_submit: bool = False
    #: Limits of one chunk; core plans within them.
    max_segments: int = 65536
    max_chunk_bytes: int = 1 << 30
    #: Offsets and lengths must be multiples of this.
    alignment: int = 1

    def reaches(self, reach: Reach) -> bool:
        return bool(getattr(self, reach))


# -- the protocol ----------------------------------------------------------------------------------------------------


class TransferConnector(Protocol):
    """One stage's end of a transport.  See :class:`ConnectorBase` for defaults of the optional half."""

    capabilities: Capabilities

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Make ``regions`` reachable, once, before ``metadata()``.

        Raises :class:`~kvbaton.errors.RegistrationError` before any side effect where one cannot be (T1).
        """

    def metadata(self) -> bytes:
        """What a peer needs in order to connect: opaque, serialisable, at most 64 KiB with the rest of the endpoint
        (T2)."""

    def connect(self, peer: Endpoint) -> None:
        """Start to connect.  ``poll()`` reports *up* when the peer accepted my epoch, or *down* with the error (T2).

        A new epoch of a known name replaces the old peer.  Both sides call it; which first does not matter.
        """

    def disconnect(self, peer: PeerId) -> None:
        """Start to disconnect: posted work drains, queued work is cancelled; ``poll()`` reports *down* (C6.4)."""

    def submit(self, chunk: Chunk) -> bool:
        """Take a chunk: ``True`` means owned, and exactly one completion follows, also if posting failed (T5).

        ``False``: the transport's own queue is full; nothing was taken (T6).  Never waits for a peer.
        """

    def poll(self) -> Progress:
        """Bounded work; what has happened since the last call.  The :data:`IDLE` singleton when nothing has.

        Each event is taken by itself.  One whose fields are not of their types is refused and told, and counts for
        nothing: a chunk that it meant is awaited until its deadline (T5).  But an outcome that is none, or core's own,
        ends its chunk, as failed, and proves neither side quiet.
        """

    def outstanding(self) -> int:
        """Chunks accepted and not yet completed."""

    def close(self) -> None:
        """Release everything but the region memory; idempotent (T10).

        Raises :class:`~kvbaton.errors.Outstanding` unless ``outstanding()`` is 0.
        """

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        """Memory that this transport can reach, where ``capabilities.memory_origin`` is ``allocated``; zeroed."""

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        """At the destination: ``peer`` may write ``target`` for ``transfer``.  Called before the peer is told to."""

    def revoke(self, transfer: TransferId) -> bool:
        """At the destination: ``True`` promises that from now on nothing of ``transfer`` is written here any more.

        A fence per transfer without the peer's help, where ``capabilities.revocable``.  ``False``: cannot promise yet.
        """

    def fenced(self, peer: PeerId) -> None:
        """Core proved the peer's process dead: complete everything towards it as FAILED and quiet."""

    def cancel(self, transfer: TransferId) -> None:
        """What is queued and not started completes as CANCELLED; what is posted drains and is reported (T9)."""

    def acknowledge(self, transfer: TransferId) -> None:
        """At the source: the destination has received this transfer.  The last call for it."""

    def wait(self, timeout: float) -> None:
        """Return within ``timeout`` seconds, earlier when ``poll()`` may have something.

        At the source, while chunks are under way, the pump spends its pauses here (of half a millisecond at most): what
        comes next is most likely a completion.  ``poll`` is called whether or not it returned early.
        """

    def statistics(self) -> Mapping[str, float]:
        """Figures of its own, counters named ``*_total``; operators see them as ``connector_*`` beside the guard's.

        The one method that may be called from any thread: it reads and changes nothing.
        """


class ConnectorBase:
    """Defaults for the optional half of :class:`TransferConnector`: what a one-sided transport on ordinary memory
    needs."""

    capabilities: Capabilities = Capabilities()

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        name = type(self).__name__
        if self.capabilities.memory_origin == "allocated":
            what = f"{name} declares memory_origin={self.capabilities.memory_origin!r}, and allocate() is not written"
        else:
            what = f"{name} registers memory of any origin and allocates none"
        raise CapabilityError(what, capability="memory_origin")

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        """One-sided: the source names the destination itself."""

    def revoke(self, transfer: TransferId) -> bool:
        return False

    def fenced(self, peer: PeerId) -> None:
        """Nothing is posted that outlives the peer."""

    def cancel(self, transfer: TransferId) -> None:
        """Nothing is queued here."""

    def acknowledge(self, transfer: TransferId) -> None:
        """Nothing is kept per transfer."""

    def wait(self, timeout: float) -> None:
        time.sleep(timeout)

    def statistics(self) -> Mapping[str, float]:
        return {}


# -- the plugin object -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """What a deployment asks of a transport, for ``probe`` and for ``transport.name = "auto"``."""

    memory_kind: MemoryKind = "host"
    reach: Reach = "same_process"


@dataclass(frozen=True, slots=True)
class Availability:
    """Whether a plugin can be used here; if not, ``reason`` says why and ``remedy`` what to do about it."""

    usable: bool
    reason: str = ""
    remedy: str = ""
    capabilities: Capabilities | None = None


@dataclass(frozen=True, slots=True)
class Lane:
    """By which way a transport moves bytes here: what it has chosen, not what it could.

    ``first`` to ``last`` bytes at once, ``None``: however many more.  ``lane`` and ``method`` in the transport's words.
    """

    operation: str
    source: str
    target: str
    first: int
    last: int | None
    lane: str
    method: str = ""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """What two processes of one host have shown of a transport, for the ``advice`` of its plugin.

    ``rate`` (bytes per second, of the slower direction) is that of the largest size that was tried, ``plain`` that of
    copying the same bytes without a transport, ``latency`` seconds until the smallest size had arrived.  ``devices``
    are those of the two ends, where ``memory`` is ``cuda``.  ``environment`` has the variables that bend the choice,
    ``peer_access`` whether the two devices reach each other's memory, ``ptrace_scope`` what the kernel allows (``None``
    where it was not found out).
    """

    memory: MemoryKind
    devices: tuple[int, int]
    rate: float
    plain: float
    latency: float
    lanes: tuple[Lane, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    peer_access: bool | None = None
    ptrace_scope: int | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What a plugin says of a :class:`SelfTest`: one sentence each, for an operator.

    ``degraded``: it works, and not as it should; ``note``: as it should, and worth knowing.
    """

    level: Literal["degraded", "note"]
    text: str
    expected: str = ""
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class ConnectorContext:
    """What a connector is opened with: who it is, and on which device its stage lives (``None``: host only)."""

    peer: PeerId
    device: int | None = None


class ConnectorPlugin(Protocol):
    """The object behind an entry point of the group ``kvbaton.connectors``.  Importing it loads no native library.

    What it may also have is below, each a protocol of its own: :class:`WithWireVersion`, :class:`WithLanes`,
    :class:`WithAdvice`, :class:`WithLeftovers`, :class:`WithBaseline`.  Nothing needs to be derived from or declared:
    what is there is used.
    """

    name: str
    api_version: int
    #: A pydantic model with ``extra="forbid"``: the transport's own settings.
    Options: type[Any]

    def probe(self, need: Need) -> Availability:
        """Whether this transport works here for ``need``.  Cheap; opens nothing; never raises.

        Threading: any thread, one call at a time.  A plugin that has not answered after a minute, as where a driver is
        stuck, is taken to be unusable, and is not asked again.
        """

    def open(self, options: Any, context: ConnectorContext) -> TransferConnector:
        """A connector that nobody else has.  ``options`` is an instance of ``Options``."""


@runtime_checkable
class WithWireVersion(Protocol):
    """A connector plugin whose ends have changed what they say to each other."""

    #: 1 where a plugin has none.  Raise it with a release whose ends cannot understand those of the release before, be
    #: it their metadata or what they send each other.  Core tells it to the peer and refuses to connect two that
    #: differ, with both values (T2).
    wire_version: int


@runtime_checkable
class WithLanes(Protocol):
    """A connector plugin whose library chooses among several ways."""

    def lanes(self, options: Any, kind: MemoryKind) -> list[Lane]:
        """By which ways bytes in memory of that kind go between two processes of this host, found out by sending some.

        May take seconds.  Raises :class:`~kvbaton.errors.TransportError` where none go.  ``kvbaton lanes`` and
        ``kvbaton doctor`` show them.
        """


@runtime_checkable
class WithAdvice(Protocol):
    """A connector plugin that knows what its transport should reach."""

    def advice(self, options: Any, found: SelfTest) -> list[Advice]:
        """Whether what was found is what this transport should reach on such a machine, and what to do where it is not.

        Pure: it opens and measures nothing.  ``kvbaton doctor`` asks; without it only the rate counts.
        """


@runtime_checkable
class WithLeftovers(Protocol):
    """A plugin, of a connector or an engine, whose processes may leave something on disk under names of their own."""

    def leftovers(self) -> list[Leftover]:
        """What there is.  ``kvbaton doctor --clean`` proves each abandoned before it removes it."""


@runtime_checkable
class WithBaseline(Protocol):
    """A connector plugin that can do without kvbaton what it does with it."""

    def baseline(self, options: Any, regions: Sequence[MemoryRegion]) -> Baseline:
        """One end of what the transport is made of.  ``kvbaton bench`` sets its rate beside; nothing else calls it."""


def wire_version(plugin: ConnectorPlugin) -> str:
    """What both ends of a connection must have in common: :attr:`Endpoint.version`."""
    # not by isinstance, which since Python 3.12 does not see what a plugin that wraps another passes on
    return str(getattr(plugin, "wire_version", 1))


def clash(regions: Sequence[MemoryRegion]) -> tuple[MemoryRegion, str] | None:
    """A region that cannot be registered beside the others, and why: another has its id, or some of its memory (T1).

    ``None`` where all are apart.  Libraries take such regions silently, and a write may then go through either.
    """
    seen: set[int] = set()
    for region in regions:
        if region.id in seen:
            return region, "its id appears twice"
        seen.add(region.id)
    placed = sorted(regions, key=lambda region: (region.kind, region.device, region.address))
    for left, right in pairwise(placed):
        if (left.kind, left.device) == (right.kind, right.device) and left.address + left.length > right.address:
            return right, f"it begins inside region {left.id}"
    return None


def region_lengths(regions: Sequence[MemoryRegion] | Sequence[RegionInfo]) -> Mapping[int, int]:
    """Region id to length in bytes, for bounds checks."""
    return {region.id: region.length for region in regions}
