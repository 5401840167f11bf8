"""Bytes of many short segments in a row, and back: what packing does on host memory.

Equal segments on one grid, which is what a paged cache consists of, move in one call of numpy per region; anything
else goes by slices, a third of a microsecond each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvbaton.segments import Segments

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]


def gather(segments: Segments, regions: Mapping[int, Bytes], into: Bytes) -> None:
    """Copy the segments' bytes, in their order, to the beginning of ``into``, which is large enough."""
    length = _equal(segments)
    if length:
        rows = into[: length * len(segments)].view(np.dtype((np.void, length)))
        groups = list(_groups(segments, regions, length))
        if all(group is not None for group in groups):
            for group in groups:
                assert group is not None
                items, index, start, stop = group
                # every index is within bounds; "clip" is what lets numpy write to `out` directly
                items.take(index, out=rows[start:stop], mode="clip")
            return
    place, row = 0, into.data
    for region, offset, length in segments.triples():
        row[place : place + length] = regions[region].data[offset : offset + length]
        place += length


def scatter(segments: Segments, regions: Mapping[int, Bytes], source: Bytes) -> None:
    """Copy the beginning of ``source`` over the segments' bytes, in their order.  They do not overlap."""
    length = _equal(segments)
    if length:
        rows = source[: length * len(segments)].view(np.dtype((np.void, length)))
        groups = list(_groups(segments, regions, length))
        if all(group is not None for group in groups):
            for group in groups:
                assert group is not None
                items, index, start, stop = group
                items.put(index, rows[start:stop], mode="clip")
            return
    place, row = 0, source.data
    for region, offset, length in segments.triples():
        regions[region].data[offset : offset + length] = row[place : place + length]
        place += length


def _equal(segments: Segments) -> int:
    """The length that all segments have, or 0."""
    lengths = segments.length
    return int(lengths[0]) if len(lengths) > 1 and bool((lengths == lengths[0]).all()) else 0


def _groups(
    segments: Segments, regions: Mapping[int, Bytes], length: int
) -> Iterator[tuple[npt.NDArray[np.void], Offsets, int, int] | None]:
    """Runs of segments of one region: the region as items of ``length``, their indices, and where the run stands.

    ``None`` for a run whose offsets do not fall on one grid.
    """
    changes = np.flatnonzero(segments.region[1:] != segments.region[:-1]) + 1
    bounds = [0, *changes.tolist(), len(segments)]
    if len(bounds) > 2 and len(segments) < 8 * (len(bounds) - 1):
        yield None  # regions alternate: slices are quicker than a call for each run
        return
    for start, stop in pairwise(bounds):
        region = regions[int(segments.region[start])]
        offsets = segments.offset[start:stop]
        shift = int(offsets[0]) % length
        whole = (len(region) - shift) // length
        items = region[shift : shift + whole * length].view(np.dtype((np.void, length)))
        index = (offsets - shift) // length
        yield (items, index, start, stop) if bool((index * length + shift == offsets).all()) else None
