"""Packing in device memory: all segments of a part in one launch, ordered by events and not by waiting.

The kernel reads a table of addresses, places and lengths; a program takes a piece of a segment, so that unequal
segments share the device evenly.  Where everything is aligned to 16 bytes it moves whole words, else bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvbaton.connector import MemoryRegion
from kvbaton.segments import Segments

if TYPE_CHECKING:
    from kvbaton_nixl.staging import Slots

#: Elements that one program moves at a time.
_BLOCK = 2048
#: Programs that share a segment, at most; enough to fill a device with a few long segments.
_SPLIT = 64


# not a kernel for every count and place: what prepare() compiles is all that there is
@triton.jit(do_not_specialize=["count", "base"])  # type: ignore[untyped-decorator,unused-ignore]
def _move(  # type: ignore[no-untyped-def]  # noqa: ANN202 - the compiler reads this, Python does not run it
    table, count, base, wide: tl.constexpr, gather: tl.constexpr, block: tl.constexpr
):
    """``table``: int64, three columns of ``count``: address, place in the slot, length; bytes."""
    row = tl.program_id(0)
    address = tl.load(table + row)
    place = base + tl.load(table + count + row)
    length = tl.load(table + 2 * count + row)
    if wide:
        address = tl.multiple_of(address, 16)
        place = tl.multiple_of(place, 16)
        length = length // 8
        outside = address.to(tl.pointer_type(tl.int64))
        inside = place.to(tl.pointer_type(tl.int64))
    else:
        outside = address.to(tl.pointer_type(tl.int8))
        inside = place.to(tl.pointer_type(tl.int8))
    for start in range(tl.program_id(1) * block, length, tl.num_programs(1) * block):
        at = start + tl.arange(0, block)
        if gather:
            tl.store(inside + at, tl.load(outside + at, mask=at < length), mask=at < length)
        else:
            tl.store(outside + at, tl.load(inside + at, mask=at < length), mask=at < length)


def launch(table: Any, count: int, base: int, longest: int, *, wide: bool, gather: bool) -> None:
    """Start the kernel on the current stream.

    ``table`` is an int64 tensor of shape ``[3, count]`` on the device, ``base`` the slot's address, ``longest`` the
    length of the longest segment in bytes.
    """
    per_program = _BLOCK * (8 if wide else 1)
    split = max(1, min(_SPLIT, -(-longest // per_program)))
    _move[count, split](table, count, base, wide=wide, gather=gather, block=_BLOCK)


@functools.cache
def prepare(device: int) -> None:
    """Compile the kernels for a CUDA device, once: it takes seconds, and no call of a connector may."""
    with torch.cuda.device(device):
        table = torch.zeros((3, 1), dtype=torch.int64, device="cuda")
        slot = torch.zeros((16,), dtype=torch.uint8, device="cuda")
        for wide in (True, False):
            for gathers in (True, False):
                launch(table, 1, slot.data_ptr(), 0, wide=wide, gather=gathers)
        torch.cuda.synchronize()


@dataclass(eq=False)
class _Table:
    """One slot's table, here and on the device.  Free again when its slot is."""

    pinned: Any
    device: Any

    @classmethod
    def of(cls, rows: int, device: torch.device) -> _Table:
        return cls(
            torch.empty((3 * rows,), dtype=torch.int64, pin_memory=True),
            torch.empty((3 * rows,), dtype=torch.int64, device=device),
        )


class DeviceMover:
    """See :class:`~kvbaton_nixl.staging.Mover`.  Everything runs on a stream of its own."""

    def __init__(self, regions: Sequence[MemoryRegion], slots: Slots) -> None:
        self._slots = slots
        self._bases = {region.id: region.address for region in regions}
        self._device = torch.device("cuda", regions[0].device)
        self._stream = torch.cuda.Stream(self._device)
        prepare(regions[0].device)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):  # what torch reuses is of this stream
            self._memory = torch.empty((slots.total,), dtype=torch.uint8, device=self._device)
        address = self._memory.data_ptr()
        self.region = MemoryRegion(-1, "cuda", regions[0].device, address, slots.total, self._memory)
        self._tables: dict[tuple[bool, int], _Table] = {}

    def gather(self, segments: Segments, slot: int) -> Any:
        return self._start(segments, self._slots.sending(slot), (True, slot))

    def scatter(self, slot: int, segments: Segments) -> Any:
        return self._start(segments, self._slots.receiving(slot), (False, slot))

    def _start(self, segments: Segments, start: int, key: tuple[bool, int]) -> Any:
        count = len(segments)
        rows = np.empty((3, count), np.int64)
        rows[0] = segments.offset
        for id in np.unique(segments.region).tolist():
            rows[0][segments.region == id] += self._bases[id]
        rows[1, 0] = 0
        np.cumsum(segments.length[:-1], out=rows[1, 1:])
        rows[2] = segments.length
        table = self._tables.get(key)
        if table is None or len(table.pinned) < 3 * count:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                table = self._tables[key] = _Table.of(1 << (count - 1).bit_length(), self._device)
        table.pinned.numpy()[: 3 * count] = rows.reshape(-1)
        base = self.region.address + start
        wide = not bool((rows & 15).any()) and not base & 15
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            table.device[: 3 * count].copy_(table.pinned[: 3 * count], non_blocking=True)
            launch(table.device, count, base, int(rows[2].max()), wide=wide, gather=key[0])
            event = torch.cuda.Event()
            event.record(self._stream)
        return event

    def close(self) -> None:
        self._stream.synchronize()
        self._tables.clear()
        self._bases = {}
