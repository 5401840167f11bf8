"""Runs of bytes as what moves them takes them: tables of places and lengths.

A *row* of a table is a run.  Its places are told from *origins*, one address for all sources and one for all targets:
where all segments of a side lie in one region, their offsets are places as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from kvbaton.segments import Segments

Column = npt.NDArray[np.int64]
#: ``[3, rows]``: the columns of sources and of targets, in bytes from their origins, and that of lengths in bytes.
Table = npt.NDArray[np.int64]
#: Addresses that sources and targets are told from.
Origins = tuple[int, int]
#: Where places are addresses themselves.
NOWHERE: Origins = (0, 0)


class AddressBook:
    """Where regions begin.  ``bases``: region id to address.  Immutable."""

    def __init__(self, bases: Mapping[int, int]) -> None:
        self._ids = np.array(sorted(bases), np.int64)
        self._bases = np.array([bases[id] for id in sorted(bases)], np.int64)
        #: What places are told from: where the only region begins, or 0 where there are several.
        self.origin = int(self._bases[0]) if len(bases) == 1 else 0

    def locate(self, lists: Sequence[Segments], offsets: Column) -> None:
        """Make places, told from :attr:`origin`, of the offsets of all segments of these lists, one after the other,
        where they stand; all of them are in regions of the book."""
        if len(self._ids) > 1:
            regions = np.concatenate([segments.region for segments in lists])
            np.add(offsets, self._bases[self._ids.searchsorted(regions)], out=offsets)
