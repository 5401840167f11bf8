"""How long something that happens often takes: a histogram that costs a fraction of a microsecond to add to.

The bounds are the same everywhere, so that counts alone travel between processes.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

#: Upper bounds of the buckets, in seconds; one more bucket has what is longer.
BOUNDS: Final = (
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0,
    10.0, 30.0, 60.0,
)  # fmt: skip


class Durations:
    """Counts by bucket, and the sum.  One thread adds; any thread may read, and then sees one duration more or less."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        #: How many fell into each bucket of :data:`BOUNDS`, not added up, and beyond the last.
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        """Count one; what is below zero, by a clock's grain, counts as zero."""
        if seconds < 0.0:
            seconds = 0.0
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def figures(self) -> dict[str, Any]:
        """What travels: ``counts`` by bucket and the sum in ``seconds``."""
        return {"counts": list(self.counts), "seconds": self.seconds}
