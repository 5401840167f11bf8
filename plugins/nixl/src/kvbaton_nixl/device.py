"""Packing in device memory: all segments of a part in one launch, ordered by events and not by waiting.

The kernel reads a table, which stays in pinned host memory: a copy of it would cost more than its few bytes.  A program
takes a piece of a segment, so that unequal segments share the device evenly.  Where everything is aligned to 16 bytes
it moves whole words, else bytes.
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
from kvbaton_nixl.descriptors import AddressBook, Lattice, Places, columns

if TYPE_CHECKING:
    from kvbaton_nixl.staging import Slots

#: Elements that one program moves at a time.
_BLOCK = 2048
#: Programs that share a segment, at most; enough to fill a device with a few long segments.
_SPLIT = 64


# not a kernel for every count and place: what prepare() compiles is all that there is
@triton.jit(do_not_specialize=["count", "base", "origin", "shift", "each"])  # type: ignore[untyped-decorator,unused-ignore]
def _move(  # type: ignore[no-untyped-def]  # noqa: ANN202 - the compiler reads this, Python does not run it
    table,
    count,
    base,
    origin,
    shift,
    each,
    lattice: tl.constexpr,
    wide: tl.constexpr,
    gather: tl.constexpr,
    block: tl.constexpr,
):
    """``table``: a lattice's units, 32 bits, of segments of ``each`` bytes from the address ``origin`` on; else three
    columns of ``count``, int64: address, place in the slot, length; bytes."""
    row = tl.program_id(0)
    if lattice:
        address = origin + (tl.load(table + row).to(tl.uint32, bitcast=True).to(tl.int64) << shift)
        place = base + row.to(tl.int64) * each
        length = each
    else:
        address = tl.load(table + row)
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


@dataclass(frozen=True, slots=True)
class Move:
    """One launch of the kernel.

    ``table`` is in memory that the device reads: on it, or pinned.  ``base`` is the slot's address; ``origin``,
    ``shift`` and ``each`` are a lattice's, and 0 where there is none; ``longest`` is the longest segment's length.
    """

    table: Any
    count: int
    base: int
    origin: int
    shift: int
    each: int
    longest: int
    wide: bool
    gather: bool

    def _arguments(self) -> tuple[Any, ...]:
        numbers = (self.count, self.base, self.origin, self.shift, self.each)
        return (self.table, *numbers, self.each > 0, self.wide, self.gather, _BLOCK)

    def _grid(self) -> tuple[int, int, int]:
        per_program = _BLOCK * (8 if self.wide else 1)
        return self.count, max(1, min(_SPLIT, -(-self.longest // per_program))), 1

    def start(self) -> Any:
        """On the current stream, by way of Triton's compiler.  Returns what it compiled, or had."""
        return _move[self._grid()](*self._arguments())

    def run(self, kernels: Kernels, stream: Any) -> None:
        """On ``stream``, by way of what :func:`prepare` compiled: a fifth of the time of :meth:`start`."""
        kernel = kernels.get((self.each > 0, self.wide, self.gather))
        if kernel is None:
            with torch.cuda.stream(stream):
                self.start()
        else:
            with torch.cuda.device(stream.device):
                kernel[self._grid()](*self._arguments(), stream=stream.cuda_stream)


#: What was compiled: whether for a lattice, for whole words, to gather.
Kernels = dict[tuple[bool, bool, bool], Any]


@functools.cache
def prepare(device: int) -> Kernels:
    """Compile the kernels for a CUDA device, once: it takes seconds, and no call of a connector may.

    Returns those that can be launched without asking the compiler again; which need not be all, because how that is
    done is Triton's affair, so it is tried here.
    """
    kernels: Kernels = {}
    with torch.cuda.device(device):
        memory = torch.arange(64, dtype=torch.uint8, device="cuda")
        address = memory.data_ptr()
        for lattice in (True, False):
            table = torch.zeros((4,), dtype=torch.int32 if lattice else torch.int64).pin_memory()
            if not lattice:
                table[:3] = torch.tensor([address, 0, 16])
            origin, each = (address, 16) if lattice else (0, 0)
            for wide in (True, False):
                for gather in (True, False):
                    move = Move(table, 1, address + 32, origin, 0, each, 16, wide, gather)
                    memory[:16], memory[32:48] = 1, 2
                    compiled = move.start()
                    memory[:16], memory[32:48] = 3, 4
                    try:
                        move.run({(lattice, wide, gather): compiled}, torch.cuda.current_stream())
                        right = 3 if gather else 4
                        if (
                            compiled is not None
                            and memory[:48].tolist() == [right] * 16 + [*range(16, 32)] + [right] * 16
                        ):
                            kernels[lattice, wide, gather] = compiled
                    except (TypeError, AttributeError):
                        continue  # a version of Triton that does it otherwise
        torch.cuda.synchronize()
    return kernels


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
        # of a segment of 2 GiB the kernel would have another type of argument, and have to be compiled
        if isinstance(segments, Lattice) and not segments.length >> 31:
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
