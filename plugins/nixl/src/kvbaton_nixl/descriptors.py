"""Segments as NIXL's descriptors: rows ``(address, length, device)``, uint64, made and merged without a Python loop."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.connector import MemoryKind, MemoryRegion
from kvbaton.errors import SegmentError
from kvbaton.segments import Segments
from kvbaton_nixl.words import Region

Rows = npt.NDArray[np.uint64]

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

    def rows(self, segments: Segments) -> Rows:
        """One row per segment.  Raises :class:`~kvbaton.errors.SegmentError` for a region that is not in the book."""
        if not len(self.ids):
            raise SegmentError("C3.6: the peer has no regions")
        at = np.minimum(np.searchsorted(self.ids, segments.region), len(self.ids) - 1)
        if (self.ids[at] != segments.region).any():
            unknown = sorted(set(segments.region.tolist()) - set(self.ids.tolist()))
            raise SegmentError(f"C3.6: regions {unknown} were not registered")
        rows = np.empty((len(segments), 3), np.uint64)
        rows[:, 0] = self.bases[at] + segments.offset.astype(np.uint64)
        rows[:, 1] = segments.length
        rows[:, 2] = self.devices[at]
        return rows


def merge(source: Rows, target: Rows) -> tuple[Rows, Rows]:
    """The same bytes in fewer rows: neighbours that follow each other on both sides become one."""
    if len(source) < 2:
        return source, target
    follows = np.ones(len(source) - 1, bool)
    for rows in (source, target):
        follows &= (rows[:-1, 0] + rows[:-1, 1] == rows[1:, 0]) & (rows[:-1, 2] == rows[1:, 2])
    if not follows.any():
        return source, target
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    lengths = np.add.reduceat(source[:, 1], first)
    merged: list[Any] = []
    for rows in (source, target):
        fewer = rows[first]
        fewer[:, 1] = lengths
        merged.append(fewer)
    return merged[0], merged[1]
