"""Slots in device memory, and the copies from and to them: all segments of a part in one launch.

Everything is ordered by events; nothing waits for the device but ``close``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvbaton.connector import DeviceEvent, MemoryRegion
from kvbaton.errors import TransportError
from kvbaton.segments import Segments
from kvbaton_cuda_ipc import driver
from kvbaton_cuda_ipc.mover import DeviceMover

Column = npt.NDArray[np.int64]


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
        self._bases = {region.id: region.address for region in regions}
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
        addresses, places = self._addresses(segments), self._places(segments, slot)
        return self._start(addresses, places, segments)

    def scatter(self, slot: Any, segments: Segments) -> DeviceEvent | None:
        addresses, places = self._addresses(segments), self._places(segments, slot)
        return self._start(places, addresses, segments)

    def read(self, segments: Segments) -> None:
        return None

    def _start(self, source: Column, target: Column, segments: Segments) -> DeviceEvent:
        assert self._mover is not None
        runs = self._mover.room(len(segments.length))
        runs[0], runs[1], runs[2] = source, target, segments.length
        return self._mover.start(runs)

    def _addresses(self, segments: Segments) -> Column:
        bases = np.array([self._bases[region] for region in segments.region.tolist()], np.int64)
        return bases + segments.offset

    def _places(self, segments: Segments, slot: Any) -> Column:
        places = segments.length.cumsum() - segments.length
        return places + int(slot.data_ptr())

    def enter(self) -> None:
        self._cuda.enter(self._ordinal)

    def close(self) -> None:
        if self._mover is not None:
            self._mover.settle()
            self._mover.close()
            self._mover = None
