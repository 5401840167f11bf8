"""What a plugin answers, looked at before anybody relies on it: other people's code may answer anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec

from kvbaton.doctor.leftovers import Leftover

T = TypeVar("T")


def values(answer: Iterable[Any], kind: type[T]) -> list[T]:
    """All of ``answer``, each a ``kind`` (a dataclass of plain values) with fields of its types.

    Raises ``TypeError`` for anything else.
    """
    return [_plain(one, kind) for one in answer]


def leftovers(answer: Iterable[Any]) -> list[Leftover]:
    """The same of leftovers, whose paths must be absolute.  Raises ``TypeError``."""
    return [_leftover(one) for one in answer]


def _plain(one: Any, kind: type[T]) -> T:
    if not isinstance(one, kind):
        raise TypeError(f"{one!r:.80} is no {kind.__name__}")
    try:
        # numbers of other libraries are numbers: these are what a report is written with
        return msgspec.convert(msgspec.to_builtins(one), kind)
    except (msgspec.MsgspecError, TypeError) as error:
        raise TypeError(f"a {kind.__name__} that is none: {error}") from error


def _leftover(one: Any) -> Leftover:
    if not isinstance(one, Leftover):
        raise TypeError(f"{one!r:.80} is no Leftover")
    found = cast(Any, one)  # a dataclass takes everything
    pid = found.pid is None or (type(found.pid) is int and found.pid > 0)
    paths = isinstance(found.locks, tuple) and all(
        isinstance(path, Path) and path.is_absolute() for path in (found.path, *found.locks)
    )
    if not (pid and paths and isinstance(found.what, str)):
        raise TypeError(f"a Leftover that is none: {one!r:.200}")
    return one
