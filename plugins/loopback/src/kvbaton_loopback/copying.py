"""Copy segments between host regions, as fast as Python can.

What is fastest depends on the length of a segment, measured on both sides scattered (``benchmarks/p1_loopback.py``):

- short ones of one length gain from leaving Python: *gather* a batch into a buffer that stays in the cache, *scatter*
  it from there;
- middling ones: a loop of ``memoryview`` slices, a third of a microsecond each;
- long ones: a loop of numpy slices, slower to start but releasing the GIL while it copies.

In all of them destinations ascend where that costs nothing, for the memory's sake.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvbaton.segments import Segments

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]

#: Up to so many segments, finding out how best to copy them takes longer than copying them one by one.
_FEW = 8
#: Up to here a batch of segments goes through the buffer.
_SHORT = 8 << 10
#: From here a copy takes much longer than giving up the GIL for it.
_LONG = 64 << 10
#: The buffer: with what is read and written beside it, it fits a core's second-level cache.
_BUFFER = 256 << 10


def copy_segments(
    source: Segments, sources: Mapping[int, Bytes], target: Segments, targets: Mapping[int, Bytes]
) -> None:
    """Copy the bytes of each source segment over those of the target segment with the same index.

    ``sources`` and ``targets`` map region ids to the regions' bytes.  The lists are equally long, lengths agree,
    everything is within its region (the guard has seen to it), and no target overlaps another target or any source.
    """
    if len(source) <= _FEW:
        for (region, first, length), (into, start, _) in zip(source.triples(), target.triples(), strict=True):
            targets[into][start : start + length] = sources[region][first : first + length]
        return
    pair = source.region.astype(np.int64) << 32 | target.region.astype(np.int64)
    if (pair == pair[0]).all():
        groups: list[slice | Offsets] = [slice(None)]
    else:
        _, which = np.unique(pair, return_inverse=True)
        groups = [np.flatnonzero(which == number) for number in range(int(which.max()) + 1)]
    for group in groups:
        region, into = source.region[group][0], target.region[group][0]
        _copy(
            sources[int(region)], source.offset[group], targets[int(into)], target.offset[group], source.length[group]
        )


def _copy(source: Bytes, reads: Offsets, target: Bytes, writes: Offsets, lengths: Offsets) -> None:
    """One pair of regions."""
    length = int(lengths[0])
    if length <= _SHORT and len(lengths) > 1 and (lengths == length).all():
        rows, read = _as_rows(source, reads, length)
        into, write = _as_rows(target, writes, length)
        if read is not None and write is not None:
            _gather_and_scatter(rows, read, into, write)
            return
    order = np.argsort(writes)
    reads, writes, lengths = reads[order], writes[order], lengths[order]
    places = zip(reads.tolist(), (reads + lengths).tolist(), writes.tolist(), (writes + lengths).tolist(), strict=True)
    if lengths.mean() >= _LONG:
        for first, end, start, stop in places:
            target[start:stop] = source[first:end]
        return
    view, onto = source.data, target.data
    for first, end, start, stop in places:
        onto[start:stop] = view[first:end]


def _as_rows(region: Bytes, offsets: Offsets, length: int) -> tuple[npt.NDArray[np.void], Offsets | None]:
    """``region`` as items of ``length`` bytes and the items' indices, or no indices where offsets do not fall on one
    grid.
    """
    shift = int(offsets[0]) % length
    whole = (len(region) - shift) // length
    rows = region[shift : shift + whole * length].view(np.dtype((np.void, length)))
    index = (offsets - shift) // length
    return rows, index if (index * length + shift == offsets).all() else None


def _gather_and_scatter(rows: npt.NDArray[np.void], read: Offsets, into: npt.NDArray[np.void], write: Offsets) -> None:
    batch = max(1, _BUFFER // rows.dtype.itemsize)
    buffer = np.empty(min(batch, len(read)), rows.dtype)
    for start in range(0, len(read), batch):
        here = read[start : start + batch]
        there = buffer[: len(here)]
        # every index is within bounds; "clip" is what lets numpy write to `out` directly
        rows.take(here, out=there, mode="clip")
        into.put(write[start : start + batch], there, mode="clip")
