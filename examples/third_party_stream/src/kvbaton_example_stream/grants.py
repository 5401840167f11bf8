"""What one peer may write for one transfer."""

from __future__ import annotations

import numpy as np

from kvbaton.identity import PeerId
from kvbaton.segments import Segments, coalesce_one


class Grant:
    """To ``peer``, every byte of ``target`` and no other (C2.2)."""

    def __init__(self, peer: PeerId, target: Segments) -> None:
        self.peer = peer
        order = np.lexsort((target.offset, target.region))
        self._runs = coalesce_one(Segments(target.region[order], target.offset[order], target.length[order]))

    def covers(self, target: Segments) -> bool:
        """Whether each segment of ``target`` lies within a granted run."""
        for region in np.unique(target.region):
            asked, here = target.region == region, self._runs.region == region
            starts = self._runs.offset[here]
            # of what lies before the first run, the run is number -1: the last one here, which ends at 0
            ends = np.append(starts + self._runs.length[here], 0)
            run = np.searchsorted(starts, target.offset[asked], side="right") - 1
            if (target.length[asked] > ends[run] - target.offset[asked]).any():  # cannot overflow
                return False
        return True
