"""Packing in device memory: all segments of a part in one launch, ordered by events and not by waiting.

The kernel reads a table of addresses, places and lengths; a program takes a piece of a segment, so that unequal
segments share the device evenly.  Where everything is aligned to 16 bytes it moves whole words, else bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvbaton.connector import MemoryRegion
from kvbaton.segments import Segments
from kvbaton_nixl.descriptors import AddressBook

if TYPE_CHECKING:
    from kvbaton_nixl.staging import Slots

#: Elements that one program moves at a time.
_BLOCK = 2048
#: Programs that share a segment, at most; enough to fill a device with a few long segments.
_SPLIT = 64


# not a kernel for every count and place: what prepare() compiles is all that there is
@triton.jit(do_not_specialize=["count", "base", "each"])  # type: ignore[untyped-decorator,unused-ignore]
def _move(  # type: ignore[no-untyped-def]  # noqa: ANN202 - the compiler reads this, Python does not run it
    table, count, base, each, equal: tl.constexpr, wide: tl.constexpr, gather: tl.constexpr, block: tl.constexpr
):
    """``table``: int64, a column of ``count`` addresses, and unless all lengths are ``each`` two more: place in the
    slot, length; bytes."""
    row = tl.program_id(0)
    address = tl.load(table + row)
    if equal:
        length = each
        place = base + row.to(tl.int64) * each
    else:
        place = base + tl.load(table + count + row)
        length = tl.load(table + 2 * count + row)
    if wide:
        address = tl.multiple_of(address, 16)
        place = tl.multiple_of(place, 16)
        length = tl.multiple_of(length // 8, 2)
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


def launch(table: Any, count: int, base: int, each: int, longest: int, *, wide: bool, gather: bool) -> None:
    """Start the kernel on the current stream.

    ``table`` is an int64 tensor on the device: ``count`` addresses, and where ``each`` is 0 as many places and lengths;
    ``base`` is the slot's address, ``each`` the length of all segments, ``longest`` that of the longest; bytes.
    """
    per_program = _BLOCK * (8 if wide else 1)
    split = max(1, min(_SPLIT, -(-longest // per_program)))
    _move[count, split](table, count, base, each, equal=each > 0, wide=wide, gather=gather, block=_BLOCK)


@functools.cache
def prepare(device: int) -> None:
    """Compile the kernels for a CUDA device, once: it takes seconds, and no call of a connector may."""
    with torch.cuda.device(device):
        table = torch.zeros((3,), dtype=torch.int64, device="cuda")
        slot = torch.zeros((16,), dtype=torch.uint8, device="cuda")
        table[0] = slot.data_ptr()
        for each in (16, 0):
            for wide in (True, False):
                for gathers in (True, False):
                    launch(table, 1, slot.data_ptr(), each, 0, wide=wide, gather=gathers)
        torch.cuda.synchronize()


class _Table:
    """One slot's table, here and on the device, and the event of the copy that it is for.  Free again when its slot is.

    The copy to the device is put on the stream that is current.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._pinned = torch.empty((3 * rows,), dtype=torch.int64, pin_memory=True)
        self._device = torch.empty((3 * rows,), dtype=torch.int64, device=device)
        self.host: Any = self._pinned.numpy()
        self.event = torch.cuda.Event()

    def __len__(self) -> int:
        return len(self.host) // 3

    def upload(self, words: int) -> Any:
        self._device[:words].copy_(self._pinned[:words], non_blocking=True)
        return self._device


class DeviceMover:
    """See :class:`~kvbaton_nixl.staging.Mover`.  Everything runs on a stream of its own."""

    def __init__(self, regions: Sequence[MemoryRegion], slots: Slots) -> None:
        self._slots = slots
        self._book = AddressBook.of(regions)
        self._device = torch.device("cuda", regions[0].device)
        self._stream = torch.cuda.Stream(self._device)
        prepare(regions[0].device)
        with torch.cuda.stream(self._stream):  # what torch reuses is of this stream
            self._memory = torch.empty((slots.total,), dtype=torch.uint8, device=self._device)
        address = self._memory.data_ptr()
        self.region = MemoryRegion(-1, "cuda", regions[0].device, address, slots.total, self._memory)
        self._tables: dict[tuple[bool, int], _Table] = {}

    def gather(self, segments: Segments, slot: int) -> Any:
        return self._start(segments, self._slots.sending(slot), (True, slot))

    def scatter(self, slot: int, segments: Segments) -> Any:
        return self._start(segments, self._slots.receiving(slot), (False, slot))

    def _start(self, segments: Segments, start: int, key: tuple[bool, int]) -> Any:
        count, lengths = len(segments), segments.length
        base = self.region.address + start
        with torch.cuda.stream(self._stream):
            table = self._tables.get(key)
            if table is None or len(table) < count:
                table = self._tables[key] = _Table(1 << (count - 1).bit_length(), self._device)
            rows = table.host
            rows[:count] = self._book.addresses(segments)
            longest = each = int(lengths[0])
            # of a segment of 2 GiB the kernel would have another type of argument, and have to be compiled
            if each >> 31 or not (lengths == each).all():
                each = 0
                rows[count] = 0
                np.cumsum(lengths[:-1], out=rows[count + 1 : 2 * count])
                rows[2 * count : 3 * count] = lengths
                longest = int(lengths.max())
            words = count if each else 3 * count
            wide = not (int(np.bitwise_or.reduce(rows[:words])) | each | base) & 15
            launch(table.upload(words), count, base, each, longest, wide=wide, gather=key[0])
            table.event.record(self._stream)
        return table.event

    def close(self) -> None:
        self._stream.synchronize()
        self._tables.clear()
