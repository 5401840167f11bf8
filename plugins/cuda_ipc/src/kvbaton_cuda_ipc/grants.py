"""What one peer may write for one transfer."""

from __future__ import annotations

import numpy as np

from kvbaton.identity import PeerId
from kvbaton.segments import Segments, coalesce_one


class Grant:
    """To ``peer``, every byte of ``target`` and no other (C2.2)."""

    __slots__ = ("_ends", "_starts", "peer")

    def __init__(self, peer: PeerId, target: Segments) -> None:
        self.peer = peer
        order = np.lexsort((target.offset, target.region))
        runs = coalesce_one(Segments(target.region[order], target.offset[order], target.length[order]))
        self._starts: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        self._ends: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        for region in np.unique(runs.region).tolist():
            here = runs.region == region
            self._starts[region] = runs.offset[here]
            self._ends[region] = runs.offset[here] + runs.length[here]

    def covers(self, target: Segments) -> bool:
        """Whether each segment of ``target`` lies within what was granted."""
        regions = np.unique(target.region).tolist()
        if not self._starts.keys() >= set(regions):
            return False
        for region in regions:
            here = slice(None) if len(regions) == 1 else target.region == region
            offset, length = target.offset[here], target.length[here]
            run = np.searchsorted(self._starts[region], offset, side="right") - 1
            if (run < 0).any() or (length > self._ends[region][run] - offset).any():  # a difference cannot overflow
                return False
        return True
