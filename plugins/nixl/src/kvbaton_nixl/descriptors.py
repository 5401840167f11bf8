"""Segments as NIXL's descriptors, rows ``(address, length, device)`` of uint64; as lattices; and as bytes in notes.

Nothing here loops over segments in Python: a chunk may have many thousand, and each call is paid for every chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.connector import MemoryKind, MemoryRegion
from kvbaton.errors import SegmentError
from kvbaton.segments import Segments, coalesce
from kvbaton_nixl.words import Region

Rows = npt.NDArray[np.uint64]

Offsets = npt.NDArray[np.int64]

#: NIXL's words for memory.
SPACES: dict[MemoryKind, str] = {"host": "DRAM", "cuda": "VRAM"}


@dataclass(frozen=True)
class AddressBook:
    """Where regions begin, by id.  One side's; all of one kind of memory."""

    kind: MemoryKind
    ids: npt.NDArray[np.int64]
    bases: Rows
    devices: Rows

    @classmethod
    def of(cls, regions: Iterable[MemoryRegion | Region]) -> AddressBook:
        """Raises :class:`~kvbaton.errors.SegmentError` for regions of two kinds, because a write has one kind on each
        side, and for an id that comes twice.
        """
        ordered = sorted(regions, key=lambda region: region.id)
        kinds = {region.kind for region in ordered}
        if len(kinds) > 1:
            raise SegmentError(f"T1: regions of {' and '.join(sorted(kinds))} memory in one connector; use one kind")
        if len({region.id for region in ordered}) < len(ordered):
            raise SegmentError("T1: the id of a region comes twice, and a segment names its region by it")
        kind: MemoryKind = next(iter(kinds), "host")
        return cls(
            kind,
            np.array([region.id for region in ordered], np.int64),
            np.array([region.address for region in ordered], np.uint64),
            np.array([region.device for region in ordered], np.uint64),
        )

    def require(self, places: Places) -> None:
        """Raise :class:`~kvbaton.errors.SegmentError` for a region that is not in the book."""
        if not isinstance(places, Lattice) or places.region not in self.ids:
            self._at(columns(places))

    def _at(self, segments: Segments) -> npt.NDArray[np.intp] | int:
        """Where each segment's region stands in the book; one number where it is the same for all."""
        if not len(self.ids):
            raise SegmentError("C3.6: the peer has no regions")
        region = one_region(segments)
        if region is not None:
            place = int(np.searchsorted(self.ids, region))
            if place < len(self.ids) and self.ids[place] == region:
                return place
        at = np.minimum(np.searchsorted(self.ids, segments.region), len(self.ids) - 1)
        if (self.ids[at] != segments.region).any():
            unknown = sorted(set(segments.region.tolist()) - set(self.ids.tolist()))
            raise SegmentError(f"C3.6: regions {unknown} were not registered")
        return at

    def rows(self, segments: Segments) -> Rows:
        """One row per segment.  Raises :class:`~kvbaton.errors.SegmentError` for a region that is not in the book."""
        at = self._at(segments)
        rows = np.empty((len(segments), 3), np.uint64)
        np.add(segments.offset.view(np.uint64), self.bases[at], out=rows[:, 0])
        rows[:, 1] = segments.length
        rows[:, 2] = self.devices[at]
        return rows

    def addresses(self, segments: Segments) -> Offsets:
        """Where each segment begins.  Raises as :meth:`rows` does."""
        return segments.offset + self.bases[self._at(segments)].astype(np.int64)


def one_region(segments: Segments) -> int | None:
    """The region that all segments are in, if it is one."""
    region = segments.region
    if not len(region):
        return None
    first = region[0]
    return int(first) if bool((region == first).all()) else None


# -- lattices ----------------------------------------------------------------------------------------------------------

_WORD = 1 << 32
Units = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Lattice:
    """Segments of one region and one length, at offsets ``units << shift``: what most chunks of a paged cache are.

    A handful of operations of numpy is what it costs to make, check, send and use, where three columns cost thirty.
    ``region`` and ``length`` fit 32 and 63 bits, ``shift`` is below 32.
    """

    region: int
    length: int
    shift: int
    units: Units

    @classmethod
    def of(cls, segments: Segments) -> Lattice | None:
        """``None`` for segments that are none."""
        region = one_region(segments)
        if region is None:
            return None
        offset, length = segments.offset, segments.length
        every = int(np.bitwise_or.reduce(offset))
        shift = min(31, (every & -every).bit_length() - 1) if every else 31
        if every >> shift >= _WORD or not (length == length[0]).all():
            return None
        return cls(region, int(length[0]), shift, (offset >> shift).astype(np.uint32))

    def __len__(self) -> int:
        return len(self.units)

    def __getitem__(self, index: slice) -> Lattice:
        return Lattice(self.region, self.length, self.shift, self.units[index])

    @property
    def nbytes(self) -> int:
        """The sum of lengths."""
        return self.length * len(self.units)

    def check_bounds(self, lengths: Mapping[int, int], what: str) -> None:
        """As :meth:`~kvbaton.segments.Segments.check_bounds` does (C3.6)."""
        size = lengths.get(self.region)
        if size is None or (int(self.units.max()) << self.shift) + self.length > size:
            self.segments().check_bounds(lengths, what)

    def follows(self) -> npt.NDArray[np.bool_]:
        """For each segment but the first: whether it begins where the one before it ends."""
        step, rest = divmod(self.length, 1 << self.shift)
        if rest or step >= _WORD:
            return np.zeros(len(self.units) - 1, bool)
        # differences wrap, so equal lengths on both sides are compared as the words that they are
        before, after = self.units[:-1], self.units[1:]
        return np.asarray((after - before == np.uint32(step)) & (after > before))

    def segments(self) -> Segments:
        """The same as columns."""
        count = len(self.units)
        offset = self.units.astype(np.int64) << self.shift
        return Segments(np.full(count, self.region, np.int32), offset, np.full(count, self.length, np.int64))


#: Segments in either form.
Places = Segments | Lattice


def lattices(source: Segments, target: Segments) -> tuple[Places, Places]:
    """The same bytes: neighbours that follow each other on both sides merged, and in the form of lattices if they are.

    Raises :class:`~kvbaton.errors.SegmentError` where the two do not pair up.
    """
    reads, writes = Lattice.of(source), Lattice.of(target)
    if (
        reads is None
        or writes is None
        or (len(reads), reads.length) != (len(writes), writes.length)
        or (reads.follows() & writes.follows()).any()
    ):
        source, target = coalesce(source, target)
        reads, writes = Lattice.of(source), Lattice.of(target)
    return reads or source, writes or target


def columns(places: Places) -> Segments:
    """Either form as columns."""
    return places.segments() if isinstance(places, Lattice) else places


#: How segments in a note begin: their form; a lattice's shift; how many runs of one region; a lattice's length.
_HEAD = struct.Struct("<BBHQ")
#: Three columns, as :meth:`~kvbaton.segments.Segments.to_bytes` makes them: what does not fit the other forms.
_PLAIN = 0
#: The region, and the units of a lattice: a segment costs four bytes.
_LATTICE = 1
#: Runs ``(region, count)``, then columns of units and of lengths, four bytes each.
_RUNS = 2
_REGION = struct.Struct("<i")
_RUN = np.dtype([("region", "<i4"), ("count", "<u4")])


def encode_places(places: Places) -> bytes:
    """As bytes, in as few as they allow."""
    if isinstance(places, Lattice):
        head = _HEAD.pack(_LATTICE, places.shift, 0, places.length) + _REGION.pack(places.region)
        return head + places.units.astype("<u4", copy=False).tobytes()
    region, offset, length = places.region, places.offset, places.length
    first = np.concatenate(([0], np.flatnonzero(region[1:] != region[:-1]) + 1)) if len(places) else np.empty(0, int)
    every = int(np.bitwise_or.reduce(offset))
    shift = min(31, (every & -every).bit_length() - 1) if every else 31
    if not 0 < len(first) < 1 << 16 or every >> shift >= _WORD or int(length.max()) >= _WORD:
        return _HEAD.pack(_PLAIN, 0, 0, 0) + places.to_bytes()
    runs = np.empty(len(first), _RUN)
    runs["region"] = region[first]
    runs["count"] = np.diff(first, append=len(places))
    columns = runs.tobytes() + (offset >> shift).astype("<u4").tobytes() + length.astype("<u4").tobytes()
    return _HEAD.pack(_RUNS, shift, len(runs), 0) + columns


def decode_places(data: bytes | memoryview) -> Places:
    """From :func:`encode_places`.  Raises :class:`~kvbaton.errors.SegmentError` for anything else (C9.3).

    Whatever the bytes say, the segments are no more than a quarter as many as there are bytes.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise SegmentError(f"C9.3: {len(view)} bytes say where segments are: their head has {_HEAD.size}")
    form, shift, runs, length = _HEAD.unpack_from(view)
    rest = view[_HEAD.size :]
    if form == _LATTICE:
        count, odd = divmod(len(rest) - _REGION.size, 4)
        if count < 1 or odd or shift > 31 or runs or not 0 < length < 1 << 63:
            raise SegmentError(f"C9.3: a lattice of shift {shift} and length {length} in {len(view)} bytes")
        units = np.frombuffer(rest, "<u4", count, _REGION.size)
        return Lattice(_REGION.unpack_from(rest)[0], length, shift, units)
    if form == _PLAIN and not (shift or runs or length):
        return Segments.from_bytes(rest)
    count, odd = divmod(len(rest) - runs * _RUN.itemsize, 8)
    if form != _RUNS or runs < 1 or count < 1 or odd or shift > 31 or length:
        raise SegmentError(f"C9.3: segments of form {form} in {runs} runs, shift {shift}, in {len(view)} bytes")
    table = np.frombuffer(rest, _RUN, runs)
    if int(table["count"].sum(dtype=np.int64)) != count:
        raise SegmentError(f"C9.3: {count} segments whose runs have another number")
    units = np.frombuffer(rest, "<u4", count, runs * _RUN.itemsize)
    lengths = np.frombuffer(rest, "<u4", count, runs * _RUN.itemsize + 4 * count)
    region = np.repeat(table["region"].astype(np.int32), table["count"])
    return Segments(region, units.astype(np.int64) << shift, lengths.astype(np.int64))
