"""Slots in device memory, and the copies from and to them: all segments of a part in one launch.

Everything is ordered by events; nothing waits for the device but ``close``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvbaton.connector import DeviceEvent, MemoryRegion
from kvbaton.errors import TransportError
from kvbaton.segments import Segments
from kvbaton_cuda_ipc import driver
from kvbaton_cuda_ipc.mover import DeviceMover
from kvbaton_cuda_ipc.runs import AddressBook


class DeviceSlots:
    """See :class:`~kvbaton_cuda_ipc.staging.Mover`.

    A region is never sent as it lies: the peer's device would read it, and a peer that is lost would go on to.
    """

    inline = 0
    alone: int | None = None

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        cuda = driver.load()
        if cuda is None:
            raise TransportError("there is no CUDA driver, or no device that this process sees")
        self._cuda = cuda
        self._ordinal = regions[0].device
        self._device = torch.device("cuda", self._ordinal)
        self._book = AddressBook({region.id: region.address for region in regions})
        self._owners = [region.owner for region in regions]
        cuda.enter(self._ordinal)
        self._mover: DeviceMover | None = DeviceMover(cuda, self._ordinal, None, None)

    def slot(self, nbytes: int) -> Any:
        return torch.empty((nbytes,), dtype=torch.uint8, device=self._device)

    def part(self, slot: Any, nbytes: int) -> Any:
        return slot[:nbytes]

    def direct(self, segments: Segments) -> None:
        return None

    def gather(self, segments: Segments, slot: Any) -> DeviceEvent | None:
        return self._start(segments, slot, 0)

    def scatter(self, slot: Any, segments: Segments) -> DeviceEvent | None:
        return self._start(segments, slot, 1)

    def read(self, segments: Segments) -> None:
        return None

    def _start(self, segments: Segments, slot: Any, theirs: int) -> DeviceEvent:
        """``theirs``: which column of the table the segments are, 0 that of sources, 1 that of targets; the slot is the
        other."""
        assert self._mover is not None
        runs = self._mover.room(len(segments))
        runs[theirs], runs[2] = segments.offset, segments.length
        self._book.locate([segments], runs[theirs])
        runs[1 - theirs] = segments.length.cumsum() - segments.length
        here, there = self._book.origin, int(slot.data_ptr())
        return self._mover.start(runs, segments.nbytes, None, (there, here) if theirs else (here, there))

    def enter(self) -> None:
        self._cuda.enter(self._ordinal)

    def close(self) -> None:
        if self._mover is not None:
            self._mover.settle()
            self._mover.close()
            self._mover = None
