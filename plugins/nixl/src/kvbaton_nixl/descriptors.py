"""Segments as NIXL's descriptors, rows ``(address, length, device)`` of uint64; and as tables, which notes carry.

Both without a Python loop: a chunk may have many thousand segments, and each call here is paid for every chunk.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.connector import MemoryKind, MemoryRegion
from kvbaton.errors import SegmentError
from kvbaton.segments import Segments
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

    def require(self, segments: Segments) -> None:
        """Raise :class:`~kvbaton.errors.SegmentError` for a region that is not in the book."""
        self._at(segments)

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


# -- tables ------------------------------------------------------------------------------------------------------------

#: How a table begins: its form; the bits by which offsets are shifted; the number of runs; the length of all segments,
#: 0 where a column of lengths follows.
_HEAD = struct.Struct("<BBHQ")
#: Three columns, as :meth:`~kvbaton.segments.Segments.to_bytes` makes them: what does not fit the other form.
_PLAIN = 0
#: Runs ``(region, count)`` of segments of one region; offsets in units of the largest power of two that divides all;
#: lengths.  Four bytes each, so that a segment of a paged cache costs four.
_UNITS = 1
_RUN = np.dtype([("region", "<i4"), ("count", "<u4")])
_WORD = 1 << 32


def encode_table(segments: Segments) -> bytes:
    """Segments as bytes, in as few as they allow."""
    if not len(segments):
        return _HEAD.pack(_PLAIN, 0, 0, 0)
    offset, length = segments.offset, segments.length
    every = int(np.bitwise_or.reduce(offset))
    shift = (every & -every).bit_length() - 1 if every else 0
    changes = np.flatnonzero(segments.region[1:] != segments.region[:-1]) + 1
    same = bool((length == length[0]).all())
    longest = int(length[0]) if same else int(length.max())
    if len(changes) >= (1 << 16) - 1 or every >> shift >= _WORD or (longest >= _WORD and not same):
        return _HEAD.pack(_PLAIN, 0, 0, 0) + segments.to_bytes()
    runs = np.empty(len(changes) + 1, _RUN)
    first = np.concatenate(([0], changes, [len(segments)]))
    runs["region"] = segments.region[first[:-1]]
    runs["count"] = np.diff(first)
    columns = [runs.tobytes(), (offset >> shift).astype("<u4").tobytes()]
    if not same:
        columns.append(length.astype("<u4").tobytes())
    return _HEAD.pack(_UNITS, shift, len(runs), longest if same else 0) + b"".join(columns)


def decode_table(data: bytes | memoryview) -> Segments:
    """From :func:`encode_table`.  Raises :class:`~kvbaton.errors.SegmentError` for anything else (C9.3).

    Whatever the bytes say, the segments are no more than a quarter as many as there are bytes.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise SegmentError(f"C9.3: {len(view)} bytes are no table of segments: its head has {_HEAD.size}")
    form, shift, runs, length = _HEAD.unpack_from(view)
    rest = view[_HEAD.size :]
    if form == _PLAIN and not (shift or runs or length):
        return Segments.from_bytes(rest)
    count, odd = divmod(len(rest) - runs * _RUN.itemsize, 4 if length else 8)
    if form != _UNITS or shift > 31 or length >> 63 or runs < 1 or count < 1 or odd:
        raise SegmentError(f"C9.3: a table of form {form} with {runs} runs, shift {shift}, in {len(view)} bytes")
    table = np.frombuffer(rest, _RUN, runs)
    if int(table["count"].sum(dtype=np.int64)) != count:
        raise SegmentError(f"C9.3: a table of {count} segments whose runs have another number")
    units = np.frombuffer(rest, "<u4", count, runs * _RUN.itemsize)
    if runs == 1:
        region = np.full(count, table["region"][0], np.int32)
    else:
        region = np.repeat(table["region"].astype(np.int32), table["count"])
    if length:
        lengths = np.full(count, length, np.int64)
    else:
        lengths = np.frombuffer(rest, "<u4", count, runs * _RUN.itemsize + 4 * count).astype(np.int64)
    return Segments(region, units.astype(np.int64) << shift, lengths)
