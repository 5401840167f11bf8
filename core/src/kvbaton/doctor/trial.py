"""A transport tried between two real processes: a few sizes, both ways, every byte looked at, plain copying beside it.

Whatever it does (hang, die, corrupt, refuse) is a :class:`Failure` of bounded duration, never an exception.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Literal

import msgspec

from kvbaton.connector import ConnectorPlugin, Lane, MemoryKind, Reach, WithLanes
from kvbaton.doctor import foreign
from kvbaton.errors import KvbatonError
from kvbaton.pair import Bounds, Moved, Pair, PairFailed, Way, open_pair
from kvbaton.quantities import size
from kvbaton.segments import Segments

KiB, MiB = 1 << 10, 1 << 20
SIZES: Final = (4 * KiB, 64 * KiB, 1 * MiB, 16 * MiB)
#: Seconds for one size in one direction, warm-up aside, and the repetitions within them.
BUDGET: Final = 0.2
REPEATS: Final = (3, 40)
#: Seconds that any one order may take; and from when both ends are open until no further size is begun.
BOUND: Final = 10.0
ENOUGH: Final = 20.0
#: Seconds to connect, and to close; a machine that does much else takes its time.
CONNECT: Final = 15.0
CLOSE: Final = 15.0

Progress = Callable[[str], object]
OpenPair = Callable[..., AbstractContextManager[Pair]]


class Measured(msgspec.Struct, frozen=True):
    """One size in one direction: seconds and bytes per second of the fastest of ``repeats``, since what else runs here
    is no matter of the transport's.  ``copy_*``: of plain copying, in the same way.
    """

    nbytes: int
    source: str
    target: str
    repeats: int
    seconds: float
    rate: float
    copy_seconds: float
    copy_rate: float


class Failure(msgspec.Struct, frozen=True):
    """``cause``: refused, failed, late, hung, died or wrong; see :class:`~kvbaton.pair.PairFailed`."""

    cause: Literal["refused", "failed", "late", "hung", "died", "wrong"]
    text: str
    said: str = ""


class Trial(msgspec.Struct, frozen=True):
    """What was found.  ``lanes_reason``: why there are no lanes.  ``closing``: what was wrong with how it ended.
    ``left_out``: sizes, of either direction, that were not begun, because it had taken long enough."""

    memory: MemoryKind
    devices: tuple[int, int]
    measured: tuple[Measured, ...] = ()
    lanes: tuple[Lane, ...] = ()
    lanes_reason: str = ""
    failure: Failure | None = None
    closing: tuple[str, ...] = ()
    seconds: float = 0.0
    left_out: tuple[int, ...] = ()

    def _of_size(self, nbytes: int) -> list[Measured]:
        return [one for one in self.measured if one.nbytes == nbytes]

    @property
    def rate(self) -> float:
        """Bytes per second at the largest size, of the slower direction; 0 where nothing was measured."""
        return min((one.rate for one in self._of_size(max(self._sizes))), default=0.0) if self.measured else 0.0

    @property
    def whole(self) -> bool:
        """Whether the largest size that was meant to be was measured, so that :attr:`rate` is one of bytes and not of
        what it costs to begin."""
        return bool(self.measured) and max(self._sizes) >= max(self.left_out, default=0)

    @property
    def plain(self) -> float:
        """The same of plain copying, of the faster direction."""
        return max((one.copy_rate for one in self._of_size(max(self._sizes))), default=0.0) if self.measured else 0.0

    @property
    def latency(self) -> float:
        """Seconds until the smallest size had arrived, of the slower direction."""
        return max((one.seconds for one in self._of_size(min(self._sizes))), default=0.0) if self.measured else 0.0

    @property
    def _sizes(self) -> set[int]:
        return {one.nbytes for one in self.measured}


def attempt(
    name: str,
    plugin: ConnectorPlugin,
    options: Any,
    memory: MemoryKind,
    devices: tuple[int, int] = (0, 0),
    *,
    reach: Reach = "cross_process",
    progress: Progress = lambda line: None,
    sizes: Sequence[int] = SIZES,
    bound: float = BOUND,
    enough: float = ENOUGH,
    opener: OpenPair = open_pair,
) -> Trial:
    """Try ``name``, whose plugin and valid options are given.  Nothing runs any more when it returns.

    ``reach`` ``same_process``: between two threads of one process, which is not this one either.
    """
    start = time.monotonic()
    lanes, reason = ((), "") if reach == "same_process" else _lanes(plugin, options, memory, progress)
    measured: list[Measured] = []
    closing: list[str] = []
    left_out: list[int] = []
    failure = None
    progress("starting one process" if reach == "same_process" else "starting two processes")
    try:
        with opener(
            name, _plain(options), regions=(2 * max(sizes),), memory=memory, devices=devices,
            bounds=Bounds(open=30.0 if memory == "host" else 90.0, connect=CONNECT, look=30.0, close=CLOSE),
            chunk=bound, reach=reach, problems=closing.append,
        ) as pair:  # fmt: skip
            opened = time.monotonic()  # what came before may have taken long: kernels are compiled, once
            for way in (pair.forward, pair.back):
                way.prepare()
                for nbytes in sizes:
                    if time.monotonic() - opened > enough and measured:
                        left_out.append(nbytes)
                        continue
                    progress(f"{size(nbytes)} from {way.source} to {way.target}")
                    measured.append(_measure(way, nbytes, 2 * max(sizes), bound))
    except PairFailed as error:
        failure = Failure(error.cause, str(error), error.said)
    except KvbatonError as error:
        failure = Failure("failed", str(error))
    return Trial(
        memory, devices, tuple(measured), lanes, reason, failure, tuple(closing), time.monotonic() - start,
        tuple(left_out),
    )  # fmt: skip


def _lanes(
    plugin: ConnectorPlugin, options: Any, memory: MemoryKind, progress: Progress
) -> tuple[tuple[Lane, ...], str]:
    if not isinstance(plugin, WithLanes):
        return (), ""
    progress("looking which ways it takes")
    try:
        return tuple(foreign.values(plugin.lanes(options, memory), Lane)), ""
    except KvbatonError as error:
        return (), str(error)
    except Exception as error:  # foreign code, and what it could not find out is no verdict on what it can
        return (), f"{type(error).__name__}: {error}".removesuffix(": ")


def _measure(way: Way, nbytes: int, room: int, bound: float) -> Measured:
    reads, writes = Segments.one(0, 0, nbytes), Segments.one(0, room - nbytes, nbytes)
    way.move(reads, writes, bound=bound)
    way.check(reads, writes)  # T3
    once = way.move(reads, writes, bound=bound)
    moved = _timed(lambda repeats: way.move(reads, writes, repeats=repeats, bound=bound), once)
    way.check(reads, writes)
    way.copy(reads, writes, bound=bound)
    plainly = way.copy(reads, writes, bound=bound)
    copied = _timed(lambda repeats: way.copy(reads, writes, repeats=repeats, bound=bound), plainly)
    spent, plain = max(min(moved.received), 1e-9), max(min(copied.received), 1e-9)
    return Measured(
        nbytes, way.source, way.target, len(moved.received), spent, nbytes / spent, plain, nbytes / plain
    )  # fmt: skip


def _timed(move: Callable[[int], Moved], once: Moved) -> Moved:
    fewest, most = REPEATS
    if once.seconds * fewest > BUDGET:
        return once
    return move(max(fewest, min(most, int(BUDGET / max(once.seconds, 1e-6)))))


def _plain(options: Any) -> Mapping[str, Any]:
    values: Mapping[str, Any] = options.model_dump(mode="json", exclude_unset=True)
    return values
