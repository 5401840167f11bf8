"""One launch moves any number of runs of bytes, each from an address to an address.

A *table* names them (:mod:`~kvbaton_cuda_ipc.runs`).  Whoever makes it (:func:`plan`) cuts what is long into pieces, so
that no program has more to do than another, and sorts what is aligned to 16 bytes at both ends before what is not: the
former moves in vectors of 16 bytes, the latter byte by byte.  Of a run whose two ends are equally far from alignment
only the few bytes before and after go by themselves.

A program takes a tile, so many rows and so many bytes of each; tiles of one row, which may be a piece of a long run,
and of several, each a whole run, are compiled apart.
The number of programs is whatever the launch has: each takes every so manieth tile, and reads its rows of the table
one tile ahead, so that the table may lie in the host's memory.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import triton
import triton.language as tl

from kvbaton_cuda_ipc.runs import NOWHERE, Column, Origins, Table

#: Those of a table, in one array or each by itself.
Columns = Table | tuple[Column, ...]
#: Bytes of a vector access; what both addresses and the length must be multiples of.
ALIGNED = 16
#: Rows of a tile, and 64-bit words of each: all have 32 KiB, which with this many warps keep enough of the memory busy
#: that one program for each multiprocessor reaches its rate.
TILES = ((1, 4096), (2, 2048), (8, 512), (32, 128))
_WARPS = 16
#: How it is compiled.  No number here has a fraction, but unless it is said Triton 3.9 warns of what it fuses of those.
OPTIONS = {"num_warps": _WARPS, "enable_fp_fusion": True}
#: A long run is cut into pieces of at least and at most this many bytes, powers of two.
MIN_PIECE, MAX_PIECE = 1 << 14, 1 << 18
#: What is not aligned is cut into pieces of this many bytes.
NARROW_PIECE = 1 << 12
#: Pieces that a program should get, so that all end at about the same time.
_SHARE = 4
#: Rows of a tile of alike runs that are longer than :data:`MIN_PIECE`, where there are enough, and of shorter ones,
#: none of which has more than so many bytes: with more rows the table is read in fewer and longer reads and earlier,
#: which is what counts where something else uses the host's memory.
_TOGETHER = (8, 2, 1)
_SHORT_TOGETHER = ((32, 1 << 12), (8, MIN_PIECE))
#: Runs are alike where, if all were as long as the longest, there would be more bytes by this part of all at most: a
#: tile takes as many steps as the longest needs.  And by so much more rows at most there may be, had the last round of
#: tiles one for each program.
_UNEVEN = 8
_NARROW_ROWS, _NARROW_BYTES = 16, 128
#: With tiles of up to two rows a launch of so many bytes may have twice the programs.  It is one of several that follow
#: each other, and while one of two programs of a multiprocessor waits for its rows of the table, or for the launch
#: behind, the other copies.  A launch that comes alone is not faster with them, and a small one slower.
_DOUBLED_ROWS, _DOUBLED_FROM = 2, 128 << 20
_WORDS = dict(TILES)


@triton.jit(  # type: ignore[untyped-decorator,unused-ignore]
    do_not_specialize=["rows", "wide", "per", "piece", "narrow", "from_origin", "to_origin"]
)
def _scatter(  # type: ignore[no-untyped-def]  # noqa: ANN202 - the compiler reads this
    table,
    rows,
    wide,
    per,
    piece,
    narrow,
    from_origin: tl.int64,
    to_origin: tl.int64,
    tile_rows: tl.constexpr,
    tile_words: tl.constexpr,
    narrow_rows: tl.constexpr,
    narrow_bytes: tl.constexpr,
):
    """``table`` has ``rows`` rows.  The first ``wide`` are aligned; each of them is cut into ``per`` pieces of
    ``piece`` bytes, the last one maybe shorter or empty.  Where tiles have several rows, none of these is cut, and
    ``piece`` is the longest; where they have one, ``wide`` is not 0.  None of the others has more than ``narrow``
    bytes.  The type of origins is said, for what is below 2**31 would come in 32 bits.

    The first pieces of all runs come first, then the second ones: programs that run at the same time read different
    rows, because reads of one line of the host's memory wait for each other, a microsecond each.

    Loops go as far as the longest of all runs: that of a tile's would be a reduction, which Triton 3.6.0 takes out of
    the loop around it."""
    first = tl.program_id(0)
    programs = tl.num_programs(0)

    # -- aligned: vectors of 16 bytes.  Names are used once, for the compiler's sake
    word = tl.arange(0, tile_words)
    if tile_rows == 1:  # one at a time, each in `per` pieces
        items = wide * per
        index = first % wide
        source = tl.load(table + index, mask=first < items, other=0)
        target = tl.load(table + rows + index, mask=first < items, other=0)
        length = tl.load(table + 2 * rows + index, mask=first < items, other=0)
        for item in range(first, items, programs):
            ahead = item + programs
            next_index = ahead % wide
            next_source = tl.load(table + next_index, mask=ahead < items, other=0)
            next_target = tl.load(table + rows + next_index, mask=ahead < items, other=0)
            next_length = tl.load(table + 2 * rows + next_index, mask=ahead < items, other=0)
            skip = (item // wide).to(tl.int64) * piece
            left = tl.minimum(tl.maximum(length - skip, 0), piece).to(tl.int32)
            words = tl.multiple_of(left // 16 * 2, 2)
            reads = tl.multiple_of((from_origin + source + skip).to(tl.pointer_type(tl.int64)), 16)
            writes = tl.multiple_of((to_origin + target + skip).to(tl.pointer_type(tl.int64)), 16)
            for begin in range(0, words, tile_words):
                at = begin + word
                values = tl.load(reads + at, mask=at < words)
                tl.store(writes + at, values, mask=at < words)
            source, target, length = next_source, next_target, next_length
    else:  # several at a time, none of them cut
        row = first * tile_rows + tl.arange(0, tile_rows)
        sources = tl.load(table + row, mask=row < wide, other=0)
        targets = tl.load(table + rows + row, mask=row < wide, other=0)
        lengths = tl.load(table + 2 * rows + row, mask=row < wide, other=0)
        for start in range(first * tile_rows, wide, programs * tile_rows):
            rows_ahead = start + programs * tile_rows + tl.arange(0, tile_rows)
            next_sources = tl.load(table + rows_ahead, mask=rows_ahead < wide, other=0)
            next_targets = tl.load(table + rows + rows_ahead, mask=rows_ahead < wide, other=0)
            next_lengths = tl.load(table + 2 * rows + rows_ahead, mask=rows_ahead < wide, other=0)
            row_words = tl.multiple_of(lengths.to(tl.int32) // 16 * 2, 2)
            from_rows = tl.multiple_of((from_origin + sources).to(tl.pointer_type(tl.int64)), 16)
            to_rows = tl.multiple_of((to_origin + targets).to(tl.pointer_type(tl.int64)), 16)
            for begin in range(0, piece // 8, tile_words):
                place = begin + word[None, :]
                inside = place < row_words[:, None]
                tl.store(to_rows[:, None] + place, tl.load(from_rows[:, None] + place, mask=inside), mask=inside)
            sources, targets, lengths = next_sources, next_targets, next_lengths

    # -- the rest: bytes
    for start in range(wide + first * narrow_rows, rows, programs * narrow_rows):
        which = start + tl.arange(0, narrow_rows)
        origin = tl.load(table + which, mask=which < rows, other=0)
        goal = tl.load(table + rows + which, mask=which < rows, other=0)
        size = tl.load(table + 2 * rows + which, mask=which < rows, other=0).to(tl.int32)
        from_bytes = (from_origin + origin).to(tl.pointer_type(tl.int8))
        to_bytes = (to_origin + goal).to(tl.pointer_type(tl.int8))
        for begin in range(0, narrow, narrow_bytes):
            byte = begin + tl.arange(0, narrow_bytes)[None, :]
            within = byte < size[:, None]
            tl.store(to_bytes[:, None] + byte, tl.load(from_bytes[:, None] + byte, mask=within), mask=within)


class Plan(NamedTuple):
    """What one launch does: ``table``, and how the kernel has to read it.

    The first ``wide`` rows are aligned, and each is moved in ``per`` pieces of at most ``piece`` bytes by tiles of
    ``tile_rows`` rows.  None of the others has more than ``narrow`` bytes.  ``programs``: how many the launch should
    have; ``nbytes``: what it moves; ``origins``: of the table.
    """

    table: Table
    wide: int
    per: int
    piece: int
    narrow: int
    tile_rows: int
    programs: int
    nbytes: int
    origins: Origins

    @property
    def rows(self) -> int:
        return int(self.table.shape[1])


def _fresh(rows: int) -> Table:
    return np.empty((3, rows), np.int64)


def plan(
    runs: Table,
    programs: int,
    room: Callable[[int], Table] = _fresh,
    longest: int | None = None,
    nbytes: int | None = None,
    origins: Origins = NOWHERE,
    double: bool = False,
) -> Plan:
    """A launch that copies every run of a table.

    ``runs``: where they can be moved as they are, they are the plan's table.  ``programs``: how many there may be at
    most, and where ``double`` twice as many if the launch is large.  ``room``: where another table of so many rows can
    be written; what ``runs`` are in is not needed once it is asked.  ``longest``, ``nbytes``: the greatest length and
    the sum of all, where they are known.  ``origins``: of ``runs``.  Lengths are positive, target ranges do not
    overlap, and there is at least one.  Nothing here depends on what the addresses mean.
    """
    if nbytes is None:
        nbytes = int(np.add.reduce(runs[2]))
    columns: Columns = runs
    if (int(np.bitwise_or.reduce(runs, axis=None)) | origins[0] | origins[1]) % ALIGNED == 0:
        total, narrow = nbytes, None
    else:
        columns, narrow = _sort(runs[0] + origins[0], runs[1] + origins[1], runs[2])
        origins = NOWHERE
        total, longest = int(np.add.reduce(columns[2])), None
    if longest is None:
        longest = int(np.maximum.reduce(columns[2], initial=0))
    count = len(columns[0])
    piece, per, tile_rows = _pieces(total, longest, count, programs)
    even = per == 1 or per * count <= 2 * (total // piece + count)
    if not even:  # most pieces would be empty
        columns, per = _cut(columns, piece), 1
        count = len(columns[0])
    tiles, longest_narrow = -(-count * per // tile_rows), 0
    if narrow is not None:
        tiles = max(tiles, -(-len(narrow[0]) // _NARROW_ROWS))
        longest_narrow = int(np.maximum.reduce(narrow[2], initial=0))
        table = _written((columns, narrow), room)
    else:
        table = runs if even else _written((columns,), room)
    if double and tile_rows <= _DOUBLED_ROWS and total >= _DOUBLED_FROM:
        programs *= 2
    return Plan(table, count, per, piece, longest_narrow, tile_rows, max(1, min(programs, tiles)), nbytes, origins)


def _pieces(total: int, longest: int, count: int, programs: int) -> tuple[int, int, int]:
    """Bytes of a piece, pieces of the longest run, and rows of a tile, for aligned runs."""
    alike = longest * count <= total + total // _UNEVEN
    if longest > MIN_PIECE:
        piece = min(MAX_PIECE, max(MIN_PIECE, 1 << (total // (programs * _SHARE)).bit_length()))
        alike = alike and longest <= piece
        rows = next(rows for rows in _TOGETHER if rows == 1 or (alike and _is_shared(count, rows * programs)))
        return (piece, -(-longest // piece), 1) if rows == 1 else (longest, 1, rows)
    rows = next(rows for rows, words in reversed(TILES) if rows == 1 or total <= count * words * 8)
    many = next(many for many, most in _SHORT_TOGETHER if longest <= most)
    return longest, 1, many if many > rows and alike and _is_even(count, many * programs) else rows


def _is_shared(count: int, at_once: int) -> bool:
    """Whether so many rows, of which so many are moved at once, give each program its share, evenly."""
    return count >= at_once * _SHARE and _is_even(count, at_once)


def _is_even(count: int, at_once: int) -> bool:
    """Whether in the last round few programs have nothing to do."""
    return -(-count // at_once) * at_once <= count + count // _UNEVEN


def _written(parts: tuple[Columns, ...], room: Callable[[int], Table]) -> Table:
    """A table of all these rows, one part after the other."""
    table = room(sum(len(part[0]) for part in parts))
    start = 0
    for part in parts:
        end = start + len(part[0])
        for line, column in zip(table, part, strict=True):
            line[start:end] = column
        start = end
    return table


def _sort(source: Column, target: Column, length: Column) -> tuple[Columns, Columns]:
    """The aligned middles of runs whose ends are equally far from alignment, and everything else in short pieces."""
    alike = (source - target) % ALIGNED == 0
    before = np.where(alike, np.minimum(-source % ALIGNED, length), length)
    middle = (length - before) // ALIGNED * ALIGNED
    after = length - before - middle
    end = before + middle
    narrow = tuple(np.concatenate(parts) for parts in ((source, source + end), (target, target + end), (before, after)))
    some, kept = middle > 0, narrow[2] > 0
    return (
        ((source + before)[some], (target + before)[some], middle[some]),
        _cut(tuple(column[kept] for column in narrow), NARROW_PIECE),
    )


def _cut(columns: Columns, piece: int) -> Columns:
    """The same bytes in rows of at most ``piece`` bytes."""
    source, target, length = columns
    pieces = -(-length // piece)
    if int(pieces.max(initial=1)) <= 1:
        return columns
    index = np.arange(len(length)).repeat(pieces)
    skip = (np.arange(len(index)) - (pieces.cumsum() - pieces)[index]) * piece
    return source[index] + skip, target[index] + skip, np.minimum(length[index] - skip, piece)


def arguments(plan: Plan, table: Any) -> tuple[Any, ...]:
    """What the kernel is called with; ``table``: the plan's, where the device reads it."""
    words = _WORDS[plan.tile_rows]
    return (
        table, plan.rows, plan.wide, plan.per, plan.piece, plan.narrow, *plan.origins,
        plan.tile_rows, words, _NARROW_ROWS, _NARROW_BYTES,
    )  # fmt: skip


def launch(plan: Plan, table: Any) -> Any:
    """On the current stream, by way of Triton's compiler.  Returns what it compiled, or had."""
    return _scatter[(plan.programs,)](*arguments(plan, table), **OPTIONS)
