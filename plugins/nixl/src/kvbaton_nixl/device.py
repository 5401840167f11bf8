"""Packing in device memory: all segments of a part in one launch, ordered by events and not by waiting.

The kernel of :mod:`~kvbaton_nixl.kernels` reads a table, which stays in pinned host memory: a copy of it would cost
more than its few bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvbaton.connector import MemoryRegion
from kvbaton_nixl.descriptors import AddressBook, Lattice, Places, columns
from kvbaton_nixl.kernels import MAX_EACH, Move, prepare

if TYPE_CHECKING:
    from kvbaton_nixl.staging import Slots


class _Table:
    """One slot's table, in pinned memory that the device reads, and the event of the copy that it is for.

    Free again when its slot is.
    """

    def __init__(self, rows: int) -> None:
        self.columns = torch.empty((3 * rows,), dtype=torch.int64, pin_memory=True)
        self.units = self.columns.view(torch.int32)
        self.host: Any = self.columns.numpy()
        self.host_units: Any = self.host.view(np.uint32)
        self.event = torch.cuda.Event()

    def __len__(self) -> int:
        return len(self.host) // 3


class DeviceMover:
    """See :class:`~kvbaton_nixl.staging.Mover`.  Everything runs on a stream of its own."""

    def __init__(self, regions: Sequence[MemoryRegion], slots: Slots) -> None:
        self._slots = slots
        self._book = AddressBook.of(regions)
        self._bases = {region.id: region.address for region in regions}
        self._device = torch.device("cuda", regions[0].device)
        self._stream = torch.cuda.Stream(self._device)
        self._kernels = prepare(regions[0].device)
        with torch.cuda.stream(self._stream):  # what torch reuses is of this stream
            self._memory = torch.empty((slots.total,), dtype=torch.uint8, device=self._device)
        address = self._memory.data_ptr()
        self.region = MemoryRegion(-1, "cuda", regions[0].device, address, slots.total, self._memory)
        self._tables: dict[tuple[bool, int], _Table] = {}

    def gather(self, segments: Places, slot: int) -> Any:
        return self._start(segments, self._slots.sending(slot), (True, slot))

    def scatter(self, slot: int, segments: Places) -> Any:
        return self._start(segments, self._slots.receiving(slot), (False, slot))

    def _start(self, segments: Places, start: int, key: tuple[bool, int]) -> Any:
        count = len(segments)
        base = self.region.address + start
        table = self._tables.get(key)
        if table is None or len(table) < count:
            table = self._tables[key] = _Table(1 << (count - 1).bit_length())
        if isinstance(segments, Lattice) and segments.length < MAX_EACH:
            origin, shift, each = self._bases[segments.region], segments.shift, segments.length
            table.host_units[:count] = segments.units
            wide = not (origin | (1 << shift) | each | base) & 15
            move = Move(table.units, count, base, origin, shift, each, each, wide, key[0])
        else:
            listed, rows = columns(segments), table.host
            rows[:count] = self._book.addresses(listed)
            rows[count] = 0
            np.cumsum(listed.length[:-1], out=rows[count + 1 : 2 * count])
            rows[2 * count : 3 * count] = listed.length
            wide = not (int(np.bitwise_or.reduce(rows[: 3 * count])) | base) & 15
            move = Move(table.columns, count, base, 0, 0, 0, int(listed.length.max()), wide, key[0])
        move.run(self._kernels, self._stream)
        table.event.record(self._stream)
        return table.event

    def close(self) -> None:
        self._stream.synchronize()
        self._tables.clear()
