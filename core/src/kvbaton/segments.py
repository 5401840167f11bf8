"""Segments: contiguous runs of bytes inside registered regions, as numpy columns.

A chunk pairs a *source* list with a *target* list of equal count and equal lengths (C3.6).  Everything here is
vectorised: a request of some thousand tokens has tens of thousands of descriptors, and a Python loop over them is a
defect.  A request of a few tokens has few, and there numpy is what costs: few are kept as rows of Python integers, and
get their columns when somebody asks for these.  All values are immutable and safe to share between threads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.errors import SegmentError

Regions = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]

_new = object.__new__

_MAX_REGION, _MAX = 2**31 - 1, 2**63 - 1

#: Up to so many segments, a look at each in Python costs less than one numpy call.
FEW = 8
#: Up to so many, one look at all is over before a look at each part of them would be, and holds no first chunk up.
_LOOKED_AT_ONCE = 4096

#: ``(region, offset, length)`` of one segment.
Row = tuple[int, int, int]


class Segments:
    """Runs of bytes ``(region, offset, length)``: columns int32, int64, int64, C-contiguous, read-only, shape ``[n]``.

    The constructor takes ownership of arrays that already have those types (they are made read-only, not copied).
    Raises :class:`~kvbaton.errors.SegmentError` for columns of unequal length or of anything but integers, negative
    offsets, or lengths below 1 (C3.6).  An end may lie beyond 64 bits: no region holds it, and
    :meth:`check_bounds` says so.
    """

    __slots__ = ("_extent", "_length", "_longest", "_nbytes", "_offset", "_region", "_rows")

    #: Either all three columns are there, or the rows are, of few; or all are.
    _region: Regions | None
    _offset: Offsets | None
    _length: Offsets | None
    _rows: tuple[Row, ...] | None
    #: What is known of a list that this one is a range of, where somebody has looked.
    _extent: _Extent | None
    #: The sum of lengths; 0 until somebody asks.
    _nbytes: int
    #: No length is above it, be it because none is in a longer list; 0 until somebody asks.
    _longest: int

    def __init__(self, region: npt.ArrayLike, offset: npt.ArrayLike, length: npt.ArrayLike) -> None:
        columns = (_column(region, np.int32), _column(offset, np.int64), _column(length, np.int64))
        if not len(columns[0]) == len(columns[1]) == len(columns[2]):
            raise SegmentError(
                f"C3.6: columns of {len(columns[0])} regions, {len(columns[1])} offsets and {len(columns[2])} lengths:"
                " each segment needs one of each"
            )
        if len(columns[2]) and (columns[2].item(columns[2].argmin()) < 1 or columns[1].item(columns[1].argmin()) < 0):
            at = int(np.argmax((columns[2] < 1) | (columns[1] < 0)))
            raise SegmentError(
                f"C3.6: segment {at} has offset {int(columns[1][at])} and length {int(columns[2][at])}:"
                " offsets are at least 0, lengths at least 1",
                segment=at,
            )
        for column in columns:
            column.setflags(write=False)
        _set_region(self, columns[0])
        _set_offset(self, columns[1])
        _set_length(self, columns[2])
        _set_rows(self, None)
        _set_extent(self, None)
        _set_nbytes(self, 0)
        _set_longest(self, 0)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Segments are immutable: {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Segments are immutable: {name} cannot be deleted")

    def __reduce__(self) -> tuple[Any, ...]:
        return Segments, (self.region, self.offset, self.length)

    @classmethod
    def _trusted(cls, region: Regions, offset: Offsets, length: Offsets) -> Segments:
        """Columns that are known to be valid and that nobody else writes: made from valid segments."""
        for column in (region, offset, length):
            column.setflags(write=False)
        return _of_read_only(region, offset, length)

    @classmethod
    def of_few(cls, rows: Iterable[Row]) -> Segments:
        """At most :data:`FEW` rows of Python integers that are known to be valid."""
        known = tuple(rows)
        if not known:
            return _EMPTY
        self = _new(Segments)
        _set_region(self, None)
        _set_offset(self, None)
        _set_length(self, None)
        _set_rows(self, known)
        _set_extent(self, None)
        _set_nbytes(self, 0)
        _set_longest(self, 0)
        return self

    @classmethod
    def empty(cls) -> Segments:
        """No segments."""
        return _EMPTY

    @classmethod
    def one(cls, region: int, offset: int, length: int) -> Segments:
        """One segment of three integers, at a fraction of the constructor's cost; raises what that does (C3.6)."""
        if not (0 <= region <= _MAX_REGION and 0 <= offset <= _MAX and 1 <= length <= _MAX):
            return cls((region,), (offset,), (length,))  # which says what is wrong
        return cls.of_few(((int(region), int(offset), int(length)),))

    @classmethod
    def of(cls, runs: Iterable[tuple[int, int, int]]) -> Segments:
        """From ``(region, offset, length)`` triples."""
        try:
            columns = list(zip(*[(region, offset, length) for region, offset, length in runs], strict=True))
        except (TypeError, ValueError) as error:
            raise SegmentError("C3.6: a segment is a triple (region, offset, length)") from error
        return cls(*columns) if columns else _EMPTY

    # -- looking -------------------------------------------------------------------------------------------------------

    @property
    def region(self) -> Regions:
        """The region of each."""
        return self._columns()[0] if self._region is None else self._region

    @property
    def offset(self) -> Offsets:
        """Where each begins, in bytes."""
        return self._columns()[1] if self._offset is None else self._offset

    @property
    def length(self) -> Offsets:
        """How many bytes each has."""
        return self._columns()[2] if self._length is None else self._length

    def _columns(self) -> tuple[Regions, Offsets, Offsets]:
        """Of rows: columns, from now on.  Two threads at once make equal ones."""
        region, offset, length = zip(*self._rows or (), strict=True)
        columns = np.array(region, np.int32), np.array(offset, np.int64), np.array(length, np.int64)
        for column in columns:
            column.setflags(write=False)
        _set_region(self, columns[0])
        _set_offset(self, columns[1])
        _set_length(self, columns[2])
        return columns

    @property
    def few(self) -> bool:
        """Whether to look at each in Python costs less than numpy."""
        return self._rows is not None or len(self._length) <= FEW  # type: ignore[arg-type]

    def rows(self) -> tuple[Row, ...]:
        """``(region, offset, length)`` of each, as Python integers; of few they are there already."""
        rows = self._rows
        if rows is None:
            rows = tuple(zip(self.region.tolist(), self.offset.tolist(), self.length.tolist(), strict=True))
            if len(rows) <= FEW:
                _set_rows(self, rows)
        return rows

    def __len__(self) -> int:
        rows = self._rows
        return len(self._length) if rows is None else len(rows)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """The sum of lengths."""
        nbytes = self._nbytes
        if not nbytes:
            rows = self._rows
            nbytes = int(np.add.reduce(self.length)) if rows is None else sum([row[2] for row in rows])
            _set_nbytes(self, nbytes)
        return nbytes

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Segments):
            return NotImplemented
        return (
            np.array_equal(self.region, other.region)
            and np.array_equal(self.offset, other.offset)
            and np.array_equal(self.length, other.length)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        runs = ", ".join(map(str, self[:3].triples()))
        more = f", ... {len(self) - 3} more" if len(self) > 3 else ""
        return f"Segments([{runs}{more}])"

    def triples(self) -> list[tuple[int, int, int]]:
        """``(region, offset, length)`` of each, as Python integers."""
        return list(self.rows())

    def __getitem__(self, index: slice) -> Segments:
        """A range of segments, sharing memory.  Columns stay contiguous, so there is no step."""
        if not isinstance(index, slice):
            raise TypeError(f"segments are taken by range, as in segments[2:5], not by {index!r}")
        if index.step not in (None, 1):
            raise SegmentError(f"segments are taken one after the other, not with a step of {index.step}")
        return _of_read_only(self.region[index], self.offset[index], self.length[index], self._extent, 0, self._longest)

    def concat(self, *others: Segments) -> Segments:
        """These segments and then those of ``others``."""
        parts = [part for part in (self, *others) if len(part)]
        if len(parts) <= 1:
            return parts[0] if parts else _EMPTY
        if sum(map(len, parts)) <= FEW:
            return Segments.of_few(row for part in parts for row in part.rows())
        return Segments._trusted(
            np.concatenate([part.region for part in parts]),
            np.concatenate([part.offset for part in parts]),
            np.concatenate([part.length for part in parts]),
        )

    # -- checks --------------------------------------------------------------------------------------------------------

    def within(self, lengths: Mapping[int, int]) -> bool:
        """Whether every segment is inside its region (C3.6); :meth:`check_bounds` says which is not."""
        extent = self._extent
        if extent is not None and extent.inside(lengths):
            return True
        rows = self._rows
        if rows is not None or self.few:
            for region, offset, length in self.rows() if rows is None else rows:
                if offset + length > lengths.get(region, 0):
                    return False
            return True
        ends = _ends(self)
        for region, end in ends:
            if end > lengths.get(region, 0):
                # where several regions end is said exactly; of one, the last byte may lie before it
                return len(ends) == 1 and _largest(_past(self.offset, self.length)) <= lengths.get(region, 0)
        return True

    @property
    def length_bound(self) -> int:
        """What no length is above: the greatest, or that of a list that this one is a range of.  0 where there is none
        and nobody has looked at that list."""
        longest = self._longest
        if not longest and len(self):
            longest = _largest(self.length)
            _set_longest(self, longest)
        return longest

    def check_bounds(self, lengths: Mapping[int, int], what: str = "a segment list") -> None:
        """Raise :class:`~kvbaton.errors.SegmentError` for the first segment outside its region (C3.6).

        ``lengths``: region id to length in bytes.
        """
        if self.within(lengths):
            return
        # a peer may have announced what no column can name, and sizes that are none
        ids = np.array(sorted(id for id in lengths if abs(id) <= _MAX_REGION + 1), dtype=np.int64)
        sizes = np.array([max(0, min(lengths[int(id)], _MAX)) for id in ids], dtype=np.int64)
        if not len(ids):
            raise SegmentError(f"C3.6: {what} has segments, but there are no regions", segment=0)
        at = np.minimum(np.searchsorted(ids, self.region), len(ids) - 1)
        bad = (ids[at] != self.region) | (self.offset > sizes[at] - self.length)  # cannot overflow
        if bad.any():
            first = int(np.argmax(bad))
            region, offset, length = self[first : first + 1].triples()[0]
            size = lengths.get(region)
            inside = "is not registered" if size is None else f"has {size} bytes"
            raise SegmentError(
                f"C3.6: {what}, segment {first}: {length} bytes at offset {offset} of region {region}, which {inside}",
                segment=first, region=region, offset=offset, length=length,
            )  # fmt: skip

    def disjoint(self) -> bool:
        """Whether no byte is in two of the segments (C3.2)."""
        if len(self) < 2:
            return True
        order = np.lexsort((self.offset, self.region))
        region, offset, length = self.region[order], self.offset[order], self.length[order]
        same = region[1:] == region[:-1]
        return not bool(np.any(same & (offset[1:] - offset[:-1] < length[:-1])))  # cannot overflow

    # -- the wire ------------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """Compact form: three little-endian columns, 20 bytes per segment."""
        return (
            self.region.astype("<i4").tobytes()
            + self.offset.astype("<i8").tobytes()
            + self.length.astype("<i8").tobytes()
        )

    @classmethod
    def from_bytes(cls, data: bytes | bytearray | memoryview) -> Segments:
        """From :meth:`to_bytes`.  Raises :class:`~kvbaton.errors.SegmentError` for anything else."""
        count, rest = divmod(memoryview(data).nbytes, 20)
        if rest:
            raise SegmentError(f"C9.3: {memoryview(data).nbytes} bytes are no segment list: 20 bytes each are expected")
        region = np.frombuffer(data, "<i4", count, 0)
        offset = np.frombuffer(data, "<i8", count, 4 * count)
        length = np.frombuffer(data, "<i8", count, 12 * count)
        return cls(region.astype(np.int32), offset.astype(np.int64), length.astype(np.int64))


def _column(values: npt.ArrayLike, kind: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(values)
    except ValueError as error:  # ragged
        raise SegmentError("C3.6: a column is one integer per segment") from error
    if array.ndim != 1:
        raise SegmentError(f"C3.6: a column of shape {array.shape}: one dimension is needed")
    if array.dtype.kind not in "iu" and array.size:
        raise SegmentError(f"C3.6: a column of {array.dtype}: integers of at most 64 bits are needed")
    limits = np.iinfo(kind)
    if array.size and array.dtype != kind and (int(array.max()) > limits.max or int(array.min()) < limits.min):
        raise SegmentError(f"C3.6: a value that does not fit {limits.bits} bits")
    return np.ascontiguousarray(array, dtype=kind)


# the slots' own setters: what Segments.__setattr__ refuses to everybody else, and the quickest way in
_set_region, _set_offset, _set_length, _set_rows, _set_extent, _set_nbytes, _set_longest = (
    Segments.__dict__[name].__set__
    for name in ("_region", "_offset", "_length", "_rows", "_extent", "_nbytes", "_longest")
)


class _Extent:
    """Of a list, and so of every range of it: the regions that it touches, and where in each its last byte lies at
    most.  One look at the list, when it is first asked for, instead of one at each chunk of it."""

    __slots__ = ("_ends", "_list")

    def __init__(self, segments: Segments) -> None:
        self._list: Segments | None = segments
        self._ends: tuple[tuple[int, int], ...] = ()

    def inside(self, lengths: Mapping[int, int]) -> bool:
        """``False`` is not the last word: a range may end earlier than the list."""
        segments = self._list
        if segments is not None:
            self._ends = _ends(segments)
            self._list = None  # not before: another thread may ask
        for region, end in self._ends:  # noqa: SIM110  # a generator would take three times as long
            if end > lengths.get(region, 0):
                return False
        return True


def _ends(segments: Segments) -> tuple[tuple[int, int], ...]:
    """The regions of a list that is not empty, and where in each its last byte lies: where it is one, at most."""
    region, offset = segments.region, segments.offset
    if _alike(region):
        return ((region.item(0), _largest(offset) + segments.length_bound),)
    starts = np.flatnonzero(np.concatenate(([True], region[1:] != region[:-1])))
    regions = region[starts]
    ends = np.maximum.reduceat(_past(offset, segments.length), starts)
    if len(starts) > FEW:
        # radix sort; ids that are alike in 16 bits only may stay mixed, and are named more than once then
        order = regions.astype(np.int16).argsort(kind="stable")
        regions, ends = regions[order], ends[order]
        starts = np.flatnonzero(np.concatenate(([True], regions[1:] != regions[:-1])))
        regions, ends = regions[starts], np.maximum.reduceat(ends, starts)
    return tuple(zip(regions.tolist(), ends.tolist(), strict=True))


def _past(offset: Offsets, length: Offsets) -> npt.NDArray[np.uint64]:
    """Where each ends.  Neither column is negative, so that read without a sign no sum is beyond 64 bits."""
    return (offset + length).view(np.uint64)


# a numpy reduction costs more to set up than to carry out on some hundreds, and argmax and a copy are begun sooner


def _alike(region: Regions) -> bool:
    """Whether a column that is not empty has the same value everywhere."""
    if len(region) > _LOOKED_AT_ONCE:
        return not np.count_nonzero(region != region[0])
    data = region.tobytes()
    return data == data[: region.itemsize] * len(region)


def _largest(column: npt.NDArray[Any]) -> int:
    """Of a column that is not empty."""
    return int(column.max() if len(column) > _LOOKED_AT_ONCE else column.item(column.argmax()))


def _of_read_only(
    region: Regions,
    offset: Offsets,
    length: Offsets,
    extent: _Extent | None = None,
    nbytes: int = 0,
    longest: int = 0,
) -> Segments:
    """Of columns that are valid and read-only: other segments' columns, or views of them."""
    self = _new(Segments)
    _set_region(self, region)
    _set_offset(self, offset)
    _set_length(self, length)
    _set_rows(self, None)
    _set_extent(self, extent)
    _set_nbytes(self, nbytes)
    _set_longest(self, longest)
    return self


_EMPTY = Segments(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))


# -- pairs of lists ----------------------------------------------------------------------------------------------------


def joined(*pairs: tuple[Segments, Segments]) -> tuple[Segments, Segments]:
    """The segments of every pair, in order, on either side.  In each pair the lengths agree (C3.6), and are trusted to.

    Both sides of the result share their lengths, so that comparing them costs nothing.
    """
    pairs = tuple(pair for pair in pairs if len(pair[0]))
    if len(pairs) <= 1:
        return pairs[0] if pairs else (_EMPTY, _EMPTY)
    sources, targets = zip(*pairs, strict=True)
    if sum(map(len, sources)) <= FEW:
        return (
            Segments.of_few([row for one in sources for row in one.rows()]),
            Segments.of_few([row for one in targets for row in one.rows()]),
        )
    length = np.concatenate([one.length for one in sources])
    return (
        Segments._trusted(
            np.concatenate([one.region for one in sources]), np.concatenate([one.offset for one in sources]), length
        ),
        Segments._trusted(
            np.concatenate([one.region for one in targets]), np.concatenate([one.offset for one in targets]), length
        ),
    )


def coalesce(source: Segments, target: Segments) -> tuple[Segments, Segments]:
    """Merge neighbours that follow each other without a gap on *both* sides.  Order is kept.

    Raises :class:`~kvbaton.errors.SegmentError` unless both lists have equal count and lengths (C3.6).
    """
    require_equal_lengths(source, target)
    if len(source) < 2 or (source.few and not _any_follows(source)):
        return source, target
    follows = _follows(source) & _follows(target)
    if not follows.any():
        return source, target
    starts = np.flatnonzero(np.concatenate(([True], ~follows)))
    length = np.add.reduceat(source.length, starts)
    return (
        Segments._trusted(source.region[starts], source.offset[starts], length),
        Segments._trusted(target.region[starts], target.offset[starts], length),
    )


def coalesce_one(segments: Segments) -> Segments:
    """:func:`coalesce` of a single list."""
    return coalesce(segments, segments)[0]


def _any_follows(segments: Segments) -> bool:
    """Whether one of a few segments begins where the one before it ends."""
    end = (-1, 0)
    for region, offset, length in segments.rows():
        if (region, offset) == end:
            return True
        end = region, offset + length
    return False


def _follows(segments: Segments) -> npt.NDArray[np.bool_]:
    """For each segment but the first: whether it begins where the one before it ends."""
    end = segments.offset[:-1] + segments.length[:-1]
    return np.asarray((segments.region[1:] == segments.region[:-1]) & (segments.offset[1:] == end))


def split(
    source: Segments, target: Segments, max_bytes: int, max_segments: int, *, alignment: int = 1
) -> list[tuple[Segments, Segments]]:
    """Batches of at most ``max_bytes`` bytes and ``max_segments`` segments, in order; no byte lost or doubled.

    Only a segment longer than ``max_bytes`` is cut, at multiples of ``alignment`` from its start: where offsets and
    lengths are aligned, so are those of the pieces.  Empty lists give no batch.

    Raises :class:`~kvbaton.errors.SegmentError` for unequal lists, or limits below 1 (``max_bytes`` below
    ``alignment``).
    """
    require_equal_lengths(source, target)
    grain = max_bytes - max_bytes % alignment if alignment > 0 else 0
    if grain < 1 or max_segments < 1:
        raise SegmentError(
            f"a chunk of at most {max_bytes} bytes (alignment {alignment}) and {max_segments} segments holds nothing"
        )
    if not len(source):
        return []
    if len(source) <= max_segments and source.nbytes <= max_bytes:
        if not source.few:
            _set_longest(target, source.length_bound)  # looked for once, not on either side
        return [(source, target)]
    longest = source.length_bound
    if longest > max_bytes:
        source, target = _cut(source, target, max_bytes, grain)
        longest = max_bytes
    lengths = source.length  # the same on both sides, and shared
    ends = lengths.cumsum().data
    count = len(lengths)
    from_region, from_offset, to_region, to_offset = source.region, source.offset, target.region, target.offset
    # each batch is looked at before it is sent (C3.6), which costs the more per segment the fewer it has
    together = 0 if count > _LOOKED_AT_ONCE else count
    from_extent, to_extent = (_Extent(source), _Extent(target)) if together else (None, None)
    batches = []
    first, sent = 0, 0
    while first < count:
        # one step per batch, not per segment; each segment alone fits
        last = bisect_right(ends, sent + max_bytes, first, min(first + max_segments, count))
        batch = slice(first, last)
        length, nbytes = lengths[batch], ends[last - 1] - sent
        if last > together:
            together = first + _LOOKED_AT_ONCE
            if last - first <= _LOOKED_AT_ONCE // 2:
                those = slice(first, together)
                from_extent, to_extent = (
                    _Extent(_of_read_only(region[those], offset[those], lengths[those], longest=longest))
                    for region, offset in ((from_region, from_offset), (to_region, to_offset))
                )
            else:
                together, from_extent, to_extent = last, None, None
        batches.append(
            (
                _of_read_only(from_region[batch], from_offset[batch], length, from_extent, nbytes, longest),
                _of_read_only(to_region[batch], to_offset[batch], length, to_extent, nbytes, longest),
            )
        )
        first, sent = last, ends[last - 1]
    return batches


def _cut(source: Segments, target: Segments, max_bytes: int, grain: int) -> tuple[Segments, Segments]:
    """Every segment above ``max_bytes`` in pieces of ``grain`` bytes, the last one maybe shorter."""
    pieces = np.where(source.length > max_bytes, -(-source.length // grain), 1)
    index = np.arange(len(source)).repeat(pieces)
    ends = pieces.cumsum()
    begins = ends - pieces
    shift = np.arange(len(index))
    shift -= begins.take(index)
    shift *= grain
    length = np.empty_like(shift)
    length.fill(grain)
    ends -= 1
    length[ends] = source.length - shift.take(ends)
    return (
        Segments._trusted(source.region.take(index), source.offset.take(index) + shift, length),
        Segments._trusted(target.region.take(index), target.offset.take(index) + shift, length),
    )


def same_lengths(source: Segments, target: Segments) -> bool:
    """Of lists of equal count: whether the lengths agree, one by one."""
    length = source._length
    if length is not None and length is target._length:
        return True
    if source.few:
        return [row[2] for row in source.rows()] == [row[2] for row in target.rows()]
    return not np.count_nonzero(source.length != target.length)


def aligned(source: Segments, target: Segments, grain: int) -> bool:
    """Of lists whose lengths agree: whether all offsets and lengths are multiples of ``grain``, which is at least 1."""
    if source.few:
        return not any(offset % grain or length % grain for _, offset, length in (*source.rows(), *target.rows()))
    columns = source.offset, target.offset, source.length
    if grain & (grain - 1):
        return not any(np.count_nonzero(column % grain) for column in columns)
    # none is negative: what is below a power of two is in the same bits of all
    return not any(int(np.bitwise_or.reduce(column)) & (grain - 1) for column in columns)


def require_equal_lengths(source: Segments, target: Segments) -> None:
    """Raise :class:`~kvbaton.errors.SegmentError` unless both lists pair up (C3.6)."""
    if len(source) != len(target):
        raise SegmentError(f"C3.6: {len(source)} source segments and {len(target)} target segments do not pair up")
    if not same_lengths(source, target):
        at = int(np.argmax(source.length != target.length))
        raise SegmentError(
            f"C3.6: segment {at} has {int(source.length[at])} bytes here, {int(target.length[at])} at the target",
            segment=at,
        )
