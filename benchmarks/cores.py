"""Which processors two processes get that both poll, and how fast these are at a time.

Two processors of one core each do half of what it does alone, and where the scheduler puts two processes that never
sleep is a matter of luck, as is who else has a machine that is shared, which need not show in anything that the system
counts: the same Python took 9.5 and 19 microseconds in one run.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

#: A turn is undisturbed where the same work took no longer than so many times the shortest that it ever took.
UNDISTURBED = 1.25
_SIBLINGS = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"


def siblings() -> dict[int, str]:
    """Of each processor that this process may use: its core, by the names of all of its processors."""
    found = {}
    for processor in os.sched_getaffinity(0):
        path = Path(_SIBLINGS.format(processor))
        found[processor] = path.read_text().strip() if path.exists() else str(processor)
    return found


def halves(of: Mapping[int, str]) -> tuple[set[int], set[int]]:
    """Two sets of processors without a core in common; both everything where there is one core only."""
    cores = sorted(set(of.values()), key=lambda core: min(one for one, its in of.items() if its == core))
    if len(cores) < 2:
        return set(of), set(of)
    first = set(cores[: len(cores) // 2])
    return {one for one, core in of.items() if core in first}, {one for one, core in of.items() if core not in first}


def pace() -> float:
    """Seconds that some fixed work in Python takes now, about 50 microseconds."""
    began = time.perf_counter()
    for _ in range(2000):
        pass
    return time.perf_counter() - began


@contextlib.contextmanager
def kept_to(processors: set[int]) -> Iterator[None]:
    """This thread, and what it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
