"""Whether something grows with every round of a loop, and where it was allocated (T12)."""

from __future__ import annotations

import gc
import tracemalloc

from kvbaton_conformance.leaks import holdings

#: Blocks from one line of code that may remain without being growth: caches that fill, lists that double.
_SLACK = 0.5


class Growth:
    """Allocations that are still there, from its making on.

    Memory of Python objects by the line that allocated it, and everything of :mod:`kvbaton_conformance.leaks`.  What a
    native library allocates for itself is not seen.
    """

    def __init__(self) -> None:
        gc.collect()
        self._held = holdings()
        tracemalloc.start(4)
        self._before = tracemalloc.take_snapshot()

    def per(self, count: int) -> list[str]:
        """What has grown by at least one allocation in two rounds of ``count``, in words; ends the watch."""
        gc.collect()
        after = tracemalloc.take_snapshot()
        tracemalloc.stop()
        ours = [tracemalloc.Filter(False, pattern) for pattern in (tracemalloc.__file__, __file__)]
        differences = after.filter_traces(ours).compare_to(self._before.filter_traces(ours), "lineno")
        found = [
            f"{difference.count_diff} objects ({difference.size_diff} bytes) of {count} rounds, allocated at"
            f" {difference.traceback[0].filename}:{difference.traceback[0].lineno}"
            for difference in differences
            if difference.count_diff > count * _SLACK
        ]
        return found + holdings().beyond(self._held)
