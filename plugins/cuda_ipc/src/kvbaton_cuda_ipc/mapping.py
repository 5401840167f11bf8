"""Memory that one process opens to another: what is offered, and what of a peer's offer is mapped here.

An :class:`Offer` is what a stage tells its peers: on which host and device it is, a handle for each *allocation* that
its regions lie in, and where in it each region is.  Handles are for allocations as a whole, and frameworks hand out
pieces of larger ones.

A :class:`Mapping` is a peer's offer, opened.  The order of ends matters to CUDA: whoever imports closes before whoever
exports frees, so a mapping is closed as soon as nothing of ours is written through it any more, and the memory of
regions outlives the connector (T1).
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from kvbaton.connector import MemoryRegion, RegionInfo
from kvbaton.errors import ConnectError, ProtocolViolation, RegistrationError
from kvbaton_cuda_ipc.driver import HANDLE_BYTES, Cuda, DriverError

#: The first bytes of an offer: what it is, and the version of this page.
_MAGIC = b"kvi1"
#: An offer fits an endpoint with room for everything else there.
MAX_OFFER = 48 * 1024

#: This process and no other, also where two of them have the same number because they count apart.
PROCESS = secrets.token_bytes(16)

_Size = Annotated[int, msgspec.Meta(ge=1, lt=1 << 56)]
_Place = Annotated[int, msgspec.Meta(ge=0, lt=1 << 56)]
_Sixteen = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Handle = Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]


class Shared(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An allocation as another process opens it, and its bytes."""

    handle: _Handle
    nbytes: _Size


class Place(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a region is: in which of the offer's allocations, and where in that.  Bytes."""

    id: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
    allocation: Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
    offset: _Place
    length: _Size


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything that a peer needs in order to write into our regions.

    ``host``: the same for all processes that share a kernel.  ``process``: no two processes have the same.
    ``driver``: the newest CUDA that the driver serves.  ``device``: the UUID of the device that the memory is on.
    """

    host: _Sixteen
    process: _Sixteen
    driver: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    device: _Sixteen
    allocations: tuple[Shared, ...]
    places: tuple[Place, ...]

    def encode(self) -> bytes:
        body = msgspec.msgpack.encode(self)
        return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything that is not an offer, whole and consistent."""
        if not 8 < len(data) <= MAX_OFFER:
            raise ProtocolViolation("C9.3", f"an offer of {len(data)} bytes: 9 to {MAX_OFFER} are accepted")
        if data[:4] != _MAGIC:
            raise ProtocolViolation("C9.3", f"an offer begins with {_MAGIC!r}, not {bytes(data[:4])!r}")
        body = data[8:]
        if zlib.crc32(body) != int.from_bytes(data[4:8], "little"):
            raise ProtocolViolation("C9.3", "an offer whose checksum is wrong: it was damaged on its way")
        try:
            offer = msgspec.msgpack.decode(body, type=cls)
        except msgspec.MsgspecError as error:
            raise ProtocolViolation("C9.3", f"not an offer: {error}") from error
        if len({place.id for place in offer.places}) != len(offer.places):
            raise ProtocolViolation("C9.3", "an offer in which a region appears twice")
        for place in offer.places:
            if place.allocation >= len(offer.allocations):
                raise ProtocolViolation("C9.3", f"region {place.id} is in an allocation that the offer does not have")
            if place.offset + place.length > offer.allocations[place.allocation].nbytes:
                raise ProtocolViolation("C9.3", f"region {place.id} is not inside of its allocation")
        return offer

    def check(self, regions: Iterable[RegionInfo], peer: object) -> None:
        """Raise :class:`~kvbaton.errors.ProtocolViolation` unless these are the regions that ``peer`` announces: by
        their lengths core checks every segment."""
        announced = {region.id: region.length for region in regions}
        offered = {place.id: place.length for place in self.places}
        if announced != offered:
            raise ProtocolViolation(
                "C3.6", f"{peer} announces regions {_some(announced)} and offers {_some(offered)} (bytes)", peer=peer
            )


def _some(regions: dict[int, int]) -> str:
    shown = ", ".join(f"{id}: {length}" for id, length in sorted(regions.items())[:4])
    return "{" + shown + (", ..." if len(regions) > 4 else "") + "}"


# -- our own memory --------------------------------------------------------------------------------------------------


def this_host() -> bytes:
    """What all processes share that can share memory of a device: the kernel they run on, since it was started."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))[:16].ljust(16, b"\0")
    except (OSError, ValueError):
        return bytes(16)


def offer(cuda: Cuda, regions: Sequence[MemoryRegion]) -> Offer:
    """Our regions, to be opened by peers.

    Raises :class:`~kvbaton.errors.RegistrationError` for what cannot be: memory of another kind or of two devices,
    memory that the driver does not know or that it cannot share.  Nothing has been done then.  There may be no region
    at all: such a stage only reads what it writes elsewhere, which is nothing.
    """
    allocations: dict[int, tuple[int, Shared]] = {}
    places = []
    for region in regions:
        reason = _refusal(cuda, region, regions[0].device)
        known = cuda.allocation(region.address)
        if not reason and known is not None and known.base not in allocations:
            try:
                shared = Shared(cuda.export(known.base), known.nbytes)
            except DriverError as error:
                reason = f"it cannot be shared with another process: {error}"
            else:
                allocations[known.base] = (len(allocations), shared)
        if reason or known is None:
            raise RegistrationError(f"T1: region {region.id}: {reason}", region=region.id, reason=reason)
        index = allocations[known.base][0]
        places.append(Place(region.id, index, region.address - known.base, region.length))
    device = cuda.devices()[regions[0].device] if regions else bytes(16)
    ours = Offer(
        this_host(), PROCESS, cuda.version(), device, tuple(shared for _, shared in allocations.values()), tuple(places)
    )
    size = len(ours.encode())
    if size > MAX_OFFER:
        reason = f"{len(allocations)} allocations with {len(places)} regions take {size} bytes to describe, at most"
        reason += f" {MAX_OFFER} may: allocate the KV cache in fewer, larger pieces"
        raise RegistrationError(f"T1: {reason}", reason=reason)
    return ours


def _refusal(cuda: Cuda, region: MemoryRegion, device: int) -> str:
    if region.kind != "cuda":
        return f"it is {region.kind} memory, and CUDA IPC is for memory of a device; the transport ucx takes either"
    if region.device != device:
        return f"it is on device {region.device}, and other regions on device {device}: a stage has one device"
    known = cuda.allocation(region.address)
    if known is None:
        return f"there is no device memory at address {region.address:#x}"
    if known.device != region.device:
        return f"its memory is on CUDA device {known.device}, not {region.device}"
    beyond = region.address + region.length - known.base - known.nbytes
    if beyond > 0:
        return f"its last {beyond} bytes are beyond the end of the memory that was allocated there"
    if not known.exportable:
        return (
            "its memory cannot be shared between processes: it was mapped piece by piece (expandable segments), or"
            " comes from a memory pool. Allocate it with cudaMalloc; in torch take"
            " expandable_segments:True and backend:cudaMallocAsync out of PYTORCH_CUDA_ALLOC_CONF"
        )
    return ""


# -- a peer's memory -------------------------------------------------------------------------------------------------


def unreachable(cuda: Cuda, theirs: Offer, device: int, peer: object) -> str:
    """Why what ``peer`` offers cannot be mapped by our device ``device``; empty where it may be."""
    if theirs.host != this_host():
        return f"{peer} is on another host, and CUDA IPC reaches one; use a transport that reaches hosts, such as nixl"
    if theirs.process == PROCESS:
        return (
            f"{peer} is in this process, and a handle cannot be opened in the process that made it; run the stages in"
            ' processes of their own: launch = "process"'
        )
    if not theirs.places:
        return ""
    ours = cuda.devices()
    if theirs.device not in ours:
        return (
            f"the device of {peer}, {theirs.device.hex()}, is not visible to this process, which sees"
            f" {', '.join(uuid.hex() for uuid in ours) or 'none'}: let CUDA_VISIBLE_DEVICES name the devices of"
            " both stages for both"
        )
    there = ours.index(theirs.device)
    if not cuda.reaches(device, there):
        return (
            f"device {device} cannot address the memory of device {there}, where {peer} is: there is no peer access"
            " between them; use the transport ucx or nixl"
        )
    return ""


class Mapping:
    """A peer's regions, mapped into this process.

    ``addresses``: where each region begins here, by its id.

    Ownership: the memory is the peer's; the mapping is ours until :meth:`close`.
    """

    def __init__(self, cuda: Cuda, theirs: Offer, peer: object) -> None:
        """Opens every allocation.  Raises :class:`~kvbaton.errors.ConnectError`; then none is open."""
        self._cuda = cuda
        self._open: list[int] = []
        try:
            for index, shared in enumerate(theirs.allocations):
                base = cuda.open(shared.handle)
                self._open.append(base)
                known = cuda.allocation(base)
                if known is not None and known.base + known.nbytes - base < shared.nbytes:
                    raise ConnectError(
                        f"T2: allocation {index} of {peer} is said to have {shared.nbytes} bytes and has"
                        f" {known.base + known.nbytes - base}",
                        peer=peer,
                    )
        except Exception as error:
            self.close()
            if isinstance(error, ConnectError):
                raise
            raise ConnectError(
                f"T2: the memory of {peer} cannot be mapped here: {error}. Its driver serves CUDA"
                f" {theirs.driver // 1000}.{theirs.driver % 1000 // 10}, ours"
                f" {cuda.version() // 1000}.{cuda.version() % 1000 // 10}; both must be the same driver, and containers"
                " must share the host's IPC and PID namespaces",
                peer=peer,
            ) from error
        self.addresses = {place.id: self._open[place.allocation] + place.offset for place in theirs.places}

    def close(self) -> None:
        """Unmap everything.  Idempotent.  Nothing of ours may be using it."""
        failed: Exception | None = None
        while self._open:
            try:
                self._cuda.close(self._open.pop())
            except Exception as error:
                failed = error
        if failed is not None:
            raise failed
