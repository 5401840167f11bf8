"""Whether something grows with every round of a loop, and where (T12)."""

from __future__ import annotations

import abc
import gc
import warnings
from collections import Counter, deque
from collections.abc import Iterator
from itertools import chain, filterfalse, tee
from typing import Any

from kvbaton_conformance.leaks import holdings, left_behind

#: As a part of the rounds: what remains of fewer is a cache that fills, or a list that doubles.
_SLACK = 0.5

#: Modules of the kit that keep books of their own, which a loop empties by itself.
_KIT = ("growth", "harness", "inspector", "leaks", "peer_process", "shared_memory", "two_process", "witness")

_CONTAINERS = (dict, set, list, deque)


class Growth:
    """What can be reached and has grown since its making.

    Entries of containers, by who holds the container; objects, by their type; and everything of
    :mod:`kvbaton_conformance.leaks`.  What a native library allocates for itself is not seen.
    """

    def __init__(self) -> None:
        self._held = holdings()
        gc.collect()
        self._lengths = {id(container): len(container) for container in _containers(8)}
        self._counts = _counts()

    def per(self, count: int) -> list[str]:
        """What has grown by at least one in two rounds of ``count``, in words."""
        gc.collect()
        least = int(count * _SLACK)
        found = list(self._grown(least))
        more = {name: number - self._counts[name] for name, number in _counts().items()}
        found += [f"{number} objects more of type {name}" for name, number in sorted(more.items()) if number > least]
        return found + self.held()

    def held(self) -> list[str]:
        """Threads, descriptors and the like that have come, in words."""
        return left_behind(self._held)

    def _grown(self, least: int) -> Iterator[str]:
        for container in _containers(least):
            more = len(container) - self._lengths.get(id(container), 0)
            if more > least and (owner := _owner(container)):
                yield f"{more} entries more in {owner}"


def _containers(least: int) -> Iterator[Any]:
    for thing in gc.get_objects():
        # by type: isinstance asks the object for its class, and some library's object answers with a warning
        if issubclass(type(thing), _CONTAINERS) and len(thing) >= least:
            yield thing


def _counts() -> Counter[str]:
    """How many objects of each type can be reached, those included that the collector does not track."""
    none: dict[int, type] = {}
    for empty in (map(type, none), none.values()):
        Counter(empty)  # it asks whether this is a mapping, which every abstract one remembers: so before it is counted
    tracked = gc.get_objects()
    # No step in Python per object: there are millions.  What is tracked is listed once, what is not must be told apart.
    referents = chain.from_iterable(map(gc.get_referents, tracked))
    one, same = tee(filterfalse(gc.is_tracked, referents))
    kinds: Counter[type] = Counter(map(type, tracked))
    kinds.update(dict(zip(map(id, one), map(type, same), strict=True)).values())
    counts: Counter[str] = Counter()
    for kind, number in kinds.items():
        counts[f"{kind.__module__}.{kind.__qualname__}"] += number
    remembered = sum(_remembered(thing) for thing in tracked if issubclass(type(thing), abc.ABCMeta))
    for name in ("weakref.ReferenceType", "builtins.builtin_function_or_method"):
        counts[name] -= remembered
    # integers come and go with every count that anybody keeps, these included
    del counts["builtins.int"]
    return counts


def _remembered(kind: Any) -> int:
    """Classes of which an abstract one remembers whether they are its own: each is a weak reference with a function.
    They are forgotten all at once, whenever anybody registers a class, and come again as they are asked for."""
    return sum(map(len, abc._get_dump(kind)[:3]))  # type: ignore[attr-defined,arg-type]


def _owner(container: Any) -> str:
    """Which attribute of which object holds a container; nothing where it is the kit's, the interpreter's or nobody's.

    An instance whose attributes are kept inline is its own referrer; otherwise its ``__dict__`` is.
    """
    for referrer in gc.get_referrers(container):
        holders = gc.get_referrers(referrer) if type(referrer) is dict else [referrer]
        for holder in holders:
            kind = type(holder)
            if kind.__module__.partition(".")[0] in ("builtins", "_pytest", "pytest", "pluggy"):
                continue
            if kind.__module__ in {f"kvbaton_conformance.{name}" for name in _KIT}:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # what an object of somebody else's says when it is looked at
                names = [*getattr(holder, "__dict__", ()), *(slot for base in kind.__mro__ for slot in _slots(base))]
                found = next((name for name in names if getattr(holder, name, None) is container), None)
            if found is not None:
                return f"{kind.__module__}.{kind.__qualname__}.{found}"
    return ""


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
