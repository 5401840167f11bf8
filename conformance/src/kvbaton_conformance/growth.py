"""Whether something grows with every round of a loop, and where (T12)."""

from __future__ import annotations

import gc
import tracemalloc
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from kvbaton_conformance.leaks import holdings, left_behind

#: As a part of the rounds: what remains of fewer is a cache that fills, or a list that doubles.
_SLACK = 0.5

#: Modules of the kit that keep books of their own, which a loop empties by itself.
_KIT = ("growth", "harness", "inspector", "leaks", "peer_process", "two_process", "witness")

_CONTAINERS = (dict, set, list, deque)


class Growth:
    """Allocations and containers that have grown since its making.

    Memory of Python objects by the line that allocated it, entries of containers by who holds the container, and
    everything of :mod:`kvbaton_conformance.leaks`.  What a native library allocates for itself is not seen.
    """

    _open: ClassVar[int] = 0

    def __init__(self) -> None:
        gc.collect()
        self._held = holdings()
        self._lengths = {id(container): len(container) for container in _containers(8)}
        if not Growth._open:
            tracemalloc.start()
        Growth._open += 1
        self._before = tracemalloc.take_snapshot()

    def per(self, count: int) -> list[str]:
        """What has grown by at least one in two rounds of ``count``, in words.  Ends the watch."""
        gc.collect()
        after = tracemalloc.take_snapshot()
        containers = list(self._grown(int(count * _SLACK)))
        held = self.held()
        here = Path(__file__).parent
        ours = [tracemalloc.Filter(False, str(here / f"{name}.py")) for name in _KIT]
        ours.append(tracemalloc.Filter(False, tracemalloc.__file__))
        differences = after.filter_traces(ours).compare_to(self._before.filter_traces(ours), "lineno")
        lines = [
            f"{difference.count_diff} objects of {count} rounds, allocated at"
            f" {difference.traceback[0].filename}:{difference.traceback[0].lineno}"
            for difference in differences
            if difference.count_diff > count * _SLACK
        ]
        return containers + lines + held

    def held(self) -> list[str]:
        """Threads, descriptors and the like that have come, in words.  Ends the watch."""
        Growth._open -= 1
        if not Growth._open:
            tracemalloc.stop()
        return left_behind(self._held)

    def _grown(self, least: int) -> Iterator[str]:
        for container in _containers(least):
            more = len(container) - self._lengths.get(id(container), 0)
            if more > least and (owner := _owner(container)):
                yield f"{more} entries more in {owner}"


def _containers(least: int) -> Iterator[Any]:
    for thing in gc.get_objects():
        if isinstance(thing, _CONTAINERS) and len(thing) >= least:
            yield thing


def _owner(container: Any) -> str:
    """Which attribute of which object holds a container; nothing where it is the kit's, the interpreter's or nobody's.

    An instance whose attributes are kept inline is its own referrer; otherwise its ``__dict__`` is.
    """
    for referrer in gc.get_referrers(container):
        holders = gc.get_referrers(referrer) if type(referrer) is dict else [referrer]
        for holder in holders:
            kind = type(holder)
            if kind.__module__.partition(".")[0] in ("builtins", "_pytest", "pytest", "pluggy", "tracemalloc"):
                continue
            if kind.__module__ in {f"kvbaton_conformance.{name}" for name in _KIT}:
                continue
            names = [*getattr(holder, "__dict__", ()), *(slot for base in kind.__mro__ for slot in _slots(base))]
            for name in names:
                if getattr(holder, name, None) is container:
                    return f"{kind.__module__}.{kind.__qualname__}.{name}"
    return ""


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
