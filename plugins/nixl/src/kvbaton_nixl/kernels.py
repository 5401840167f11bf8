"""The kernel that packs in device memory, compiled for a device, and proved on it.

A program takes a piece of a segment, so that unequal segments share the device evenly.  Where everything is aligned to
16 bytes it moves whole words, else bytes.

**Proved**: a compiler can be wrong, and a copy that is wrong corrupts a cache without a word.  (Triton 3.6.0 made runs
of unequal lengths too short, in another kernel.)  So what was compiled moves segments first that take several programs
several steps, and every byte is looked at; by either way to launch it, before that is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvbaton.errors import TransportError
from kvbaton_nixl import library

#: Elements that one program moves at a time.
_BLOCK = 2048
#: Programs that share a segment, at most; enough to fill a device with a few long segments.
_SPLIT = 64
#: A lattice's segments must be shorter: the kernel counts their bytes in 32 bits, and one step beyond the end.
MAX_EACH = 1 << 30


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


#: Whether a kernel is for a lattice, for whole words, and to gather.
Variant = tuple[bool, bool, bool]
VARIANTS: list[Variant] = list(product((True, False), (True, False), (True, False)))


@dataclass(frozen=True, slots=True)
class Move:
    """One launch of the kernel.

    ``table`` is in memory that the device reads: on it, or pinned.  ``base`` is the slot's address; ``origin``,
    ``shift`` and ``each`` are a lattice's, and 0 where there is none; ``longest`` is the longest segment's length, and
    ``split`` how many programs share a segment at most.
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
    split: int = _SPLIT

    @property
    def block(self) -> int:
        """What one program moves at a time.  Bytes."""
        return _BLOCK * (8 if self.wide else 1)

    @property
    def grid(self) -> tuple[int, int, int]:
        """A row of programs for each segment."""
        return self.count, max(1, min(self.split, -(-self.longest // self.block))), 1

    @property
    def variant(self) -> Variant:
        return self.each > 0, self.wide, self.gather

    def _arguments(self) -> tuple[Any, ...]:
        return (self.table, self.count, self.base, self.origin, self.shift, self.each, *self.variant, _BLOCK)

    def start(self) -> Any:
        """On the current stream, by way of Triton's compiler.  Returns what it compiled, or had."""
        return _move[self.grid](*self._arguments())

    def run(self, kernels: Kernels, stream: Any) -> None:
        """On ``stream``, by way of what :func:`prepare` compiled: a fifth of the time of :meth:`start`."""
        kernel = kernels.get(self.variant)
        if kernel is None:
            with torch.cuda.stream(stream):
                self.start()
        else:
            with torch.cuda.device(stream.device):
                kernel[self.grid](*self._arguments(), stream=stream.cuda_stream)


#: What was compiled, and can be launched without asking the compiler again.
Kernels = dict[Variant, Any]


class Proof:
    """A move that shows whether a variant of the kernel moves what it should, and nothing else.

    Of a lattice whose rows have several blocks; or of columns whose lengths go from one byte, or one vector, to several
    blocks, short ones and the shortest first.  A program takes several steps, the last one in part.  The segments are
    scattered with gaps between them, columns' places in the slot have gaps too, and all is in one piece of memory, of
    which every byte is looked at.
    """

    def __init__(self, lattice: bool, wide: bool, gather: bool, device: str = "cuda") -> None:
        draw = np.random.default_rng(1)
        grain, block = (16, 8 * _BLOCK) if wide else (1, _BLOCK)
        if lattice:
            lengths = np.full(5, 7 * block + 5 * grain)
        else:
            fixed = [37 * grain, block - grain, block, block + grain, 3 * block, 5 * block + 3 * grain, 7 * block]
            drawn = grain * draw.integers(1, 7 * block // grain, 6)
            lengths = np.concatenate(([grain, grain], draw.permutation([*fixed, *drawn])))
        count = len(lengths)
        shift = (5 if wide else 1) if lattice else 0
        # where each segment begins, outside and in the slot
        cell = max(grain, 1 << shift)
        spans = (lengths + cell - 1) // cell * cell + cell * draw.integers(1, 9, count)
        order, reads = draw.permutation(count), np.empty_like(spans)
        reads[order] = spans[order].cumsum() - spans[order]
        taken = lengths + (0 if lattice else grain)
        places = taken.cumsum() - taken
        outside = 3 * cell if wide else 3 * cell + 1
        slot = (outside + int(spans.sum()) + 127) // 64 * 64 + (0 if wide else 1)
        size = slot + int(places[-1] + lengths[-1]) + 100

        before = np.full(size, 200, np.uint8)
        filled = slice(0, slot) if gather else slice(slot, size)
        before[filled] = draw.integers(0, 128, filled.stop - filled.start, np.uint8)
        self._expected = before.copy()
        starts = zip((outside + reads).tolist(), (slot + places).tolist(), lengths.tolist(), strict=True)
        for here, there, length in starts:
            read, write = (here, there) if gather else (there, here)
            self._expected[write : write + length] = before[read : read + length]

        self._before = torch.from_numpy(before)
        self._memory = torch.empty((size,), dtype=torch.uint8, device=device)
        address = self._memory.data_ptr() + outside
        origin = 0
        if lattice:
            first = first_unit(address, int(reads.max()) >> shift)
            origin = address - (first << shift)
            rows = ((reads >> shift) + first).astype(np.uint32).view(np.int32)
        else:
            rows = np.concatenate((address + reads, places, lengths))
        table = torch.from_numpy(rows)
        self._move = Move(
            table.pin_memory() if self._memory.is_cuda else table, count, self._memory.data_ptr() + slot, origin, shift,
            int(lengths[0]) if lattice else 0, int(lengths.max()), wide, gather, split=3,
        )  # fmt: skip

    def by(self, run: Callable[[Move], Any]) -> Any:
        """Let a launch do it, to memory that holds nothing of it; what it returns."""
        self._memory.copy_(self._before)
        made = run(self._move)
        if self._memory.is_cuda:
            torch.cuda.synchronize()
        return made

    def holds(self) -> bool:
        return bool(np.array_equal(self._memory.cpu().numpy(), self._expected))


def first_unit(address: int, last: int) -> int:
    """Of a lattice whose first segment lies at ``address``, and its last one so many units behind: the first one's
    place, so that units lie on both sides of 31 bits.  An address that leaves no room for that (no device's, but a
    heap's may be so low) gets the lowest."""
    return (1 << 31) - last // 2 if address >> 40 else 1


def prepare(device: int) -> Kernels:
    """Compile the kernel for a CUDA device and prove it, once: it takes seconds, and no call of a connector may.

    Returns what can be launched without asking the compiler again; which need not be all, because how that is done is
    Triton's affair, so it is tried here.  Raises :class:`~kvbaton.errors.TransportError` where what was compiled moves
    wrong bytes, or nothing could be: then nothing may be launched.
    """
    kernels, reason = _prepared(device)
    if reason:
        raise TransportError(reason)
    return kernels


@functools.cache
def _prepared(device: int) -> tuple[Kernels, str]:
    """What :func:`prepare` returns, and why it does not."""
    try:
        with torch.cuda.device(device):
            stream = torch.cuda.current_stream()
            made = {variant: compiled(variant, stream) for variant in VARIANTS}
    except TransportError as error:
        return {}, str(error)
    except Exception as error:  # Triton's, its C compiler's, or CUDA's
        return {}, (
            f"triton {triton.__version__} compiles no kernel for CUDA device {device}: {library.describe(error)};"
            ' install another version of triton, or set the option packing to "never"'
        )
    return {variant: kernel for variant, kernel in made.items() if kernel is not None}, ""


def compiled(variant: Variant, stream: Any, device: str = "cuda") -> Any:
    """A variant of the kernel, for the current device; ``None`` where only Triton's own launch is right.

    Raises :class:`~kvbaton.errors.TransportError` where that moves wrong bytes.
    """
    proof = Proof(*variant, device)
    kernel = proof.by(Move.start)
    if not proof.holds():
        lattice, wide, gather = variant
        what = f"{'equal' if lattice else 'unequal'} segments, {'words' if wide else 'bytes'}"
        raise TransportError(
            f"T3: the kernel that triton {triton.__version__} makes for this device moves wrong bytes"
            f" ({'gathers' if gather else 'scatters'} {what}): install another version of triton, or set the option"
            ' packing to "never"'
        )
    if kernel is None:
        return None
    try:
        proof.by(lambda move: move.run({variant: kernel}, stream))
    except (TypeError, AttributeError):
        return None  # a version of Triton that does it otherwise
    return kernel if proof.holds() else None
