"""Memory that short segments are packed into, in slots: a half to send from, a half to receive in.

Each link has its own, so that a peer that is frozen holds its own slots and nobody else's.  What moves bytes between
regions and slots is a *mover*, one for host memory and one for device memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from kvbaton.connector import DeviceEvent, MemoryKind, MemoryRegion
from kvbaton.errors import TransportError
from kvbaton_nixl.descriptors import Places, columns
from kvbaton_nixl.gathering import gather, scatter
from kvbaton_nixl.options import Packing

_log = logging.getLogger(__name__)

#: What is copied faster than a thread is woken.  Bytes.
_APART = 1 << 20


class Mover(Protocol):
    """Copies between a stage's regions and the slots of one link.

    Both methods return ``None`` where the copy is over, else the event that says when it will be.  Until then neither
    the regions' bytes nor the slot may be touched by anybody else.
    """

    #: The slots, those to send from first.
    region: MemoryRegion

    def gather(self, segments: Places, slot: int) -> DeviceEvent | None:
        """The segments' bytes, in a row, into a slot to send from."""

    def scatter(self, slot: int, segments: Places) -> DeviceEvent | None:
        """The bytes in a slot that was received, over the segments."""

    def close(self) -> None:
        """Wait for what is under way, and let go of the memory.  Idempotent."""


class Slots:
    """How a link's staging memory is divided.  Bytes."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self.nbytes = nbytes

    @property
    def total(self) -> int:
        """Both halves."""
        return 2 * self.count * self.nbytes

    def sending(self, slot: int) -> int:
        """Where a slot to send from begins."""
        return slot * self.nbytes

    def receiving(self, slot: int) -> int:
        """Where a slot to receive in begins."""
        return (self.count + slot) * self.nbytes


class _Copy:
    """A copy on the worker's thread, as an event."""

    def __init__(self, under_way: Future[None]) -> None:
        self._under_way = under_way

    def query(self) -> bool:
        """Raises what the copy raised."""
        if not self._under_way.done():
            return False
        self._under_way.result()
        return True


class HostMover:
    """Copies short parts at once, and longer ones on a thread of its own: meanwhile NIXL writes the part before, which
    on one host is a copy too.  The thread calls nothing but numpy, which lets go of the interpreter (T11).
    """

    def __init__(self, regions: Sequence[MemoryRegion], slots: Slots) -> None:
        self._slots = slots
        self._regions = {region.id: region.view() for region in regions}
        self._memory = np.empty(slots.total, np.uint8)  # pages come with the first use
        self.region = MemoryRegion.of_array(-1, self._memory)
        self._worker: ThreadPoolExecutor | None = None

    def gather(self, segments: Places, slot: int) -> DeviceEvent | None:
        return self._start(gather, segments, self._slots.sending(slot))

    def scatter(self, slot: int, segments: Places) -> DeviceEvent | None:
        return self._start(scatter, segments, self._slots.receiving(slot))

    def _start(self, copy: Callable[..., None], segments: Places, start: int) -> DeviceEvent | None:
        listed, memory = columns(segments), self._memory[start : start + self._slots.nbytes]
        if segments.nbytes < _APART:
            copy(listed, self._regions, memory)
            return None
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "kvbaton-nixl-copies")
        return _Copy(self._worker.submit(copy, listed, self._regions, memory))

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown()  # T10: it has no thread left then
            self._worker = None
        self._regions = {}


def make_mover(kind: MemoryKind, regions: Sequence[MemoryRegion], slots: Slots, packing: Packing) -> Mover | None:
    """The mover for a kind of memory; ``None`` where nothing is packed.  Raises as :func:`packs` does."""
    if packing == "never":
        return None
    if kind == "host":
        return HostMover(regions, slots)
    if not packs(regions[0].device, packing):
        return None
    from kvbaton_nixl.device import DeviceMover  # needs torch and triton, which host memory does not

    mover: Any = DeviceMover(regions, slots)
    return mover  # type: ignore[no-any-return]


def packs(device: int, packing: Packing) -> bool:
    """Whether segments are packed on a CUDA device, which is made ready for it: the first time that takes seconds.

    Where the device cannot, ``auto`` goes on without, and a line of the log says why, once.  For ``always``
    :class:`~kvbaton.errors.TransportError` is raised.
    """
    if packing == "never":
        return False
    try:
        _make_ready(device)
    except TransportError as error:
        if packing == "always":
            raise
        _say_once(f"CUDA device {device} does not pack short segments, so moving them takes longer: {error}")
        return False
    return True


def _make_ready(device: int) -> None:
    try:
        from kvbaton_nixl.kernels import prepare
    except Exception as error:  # not only what is missing: a library of theirs may not load
        raise TransportError(
            f"packing in device memory needs torch and triton, and {error}; pip install torch, or set the"
            ' option packing to "never"'
        ) from error
    prepare(device)


@functools.cache
def _say_once(line: str) -> None:
    _log.warning("%s", line)
