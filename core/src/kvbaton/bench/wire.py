"""Bytes alone: given segments moved between two real processes, by kvbaton over a transport, by what that is made of,
and by a plain copy; the three take turns.

A figure of kvbaton's and the one beside it come from the same turn, and their ratio from each turn: what else the
machine does meanwhile slows both.  What is timed is from the first call at the source until the target knows that
everything has come, by a clock that both share.  Before anything is timed, each way has moved everything once into
memory that held something else, and every byte of it was looked at (T3).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kvbaton.connector import MemoryKind, Reach
from kvbaton.pair import Bounds, PairFailed, Way, open_pair
from kvbaton.segments import Segments
from kvbaton.spread import Spread

#: Turns that count, at most and at least, and those before the first.
_TURNS: Final = 200
_LEAST: Final = 3
_WARM_UP: Final = 2
#: Lengths of a segment in a sweep; bytes of one point, and segments at most and at least.
LENGTHS: Final = tuple(4096 << step for step in range(13))
_SWEEP_BYTES, _SWEEP_MOST, _SWEEP_LEAST = 64 << 20, 8192, 8
#: Bytes per second of a wire that is given up.
_TOO_SLOW: Final = 20e6
#: Seconds beyond that, for everything that is waited for.
_PATIENCE: Final = 30.0
_RAW = "kvbaton.bench.raw:"

Told = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Beside:
    """The rate of the transport's own baseline, bytes per second."""

    name: str
    rate: Spread


@dataclass(frozen=True, slots=True)
class Carried:
    """Rates are bytes per second, times seconds.  ``latency``: all segments, until received.  ``chunk_latency``: a
    chunk, from its submission to its completion at the source.  ``submit``: a chunk, in the call that submits it.
    ``copy``: the same segments copied by one thread into memory that both processes see, or on the device.
    ``of_copy``, ``of_baseline``: the ratio of each turn.
    """

    segment_bytes: int
    segments: int
    chunks: int
    nbytes: int
    reach: Reach
    rate: Spread
    latency: Spread
    chunk_latency: Spread
    submit: Spread
    copy: Spread | None
    of_copy: Spread | None
    baseline: Beside | None = None
    of_baseline: Spread | None = None


@dataclass(frozen=True)
class Wire:
    """What to open: ``transport`` (a name, or ``module:object``) and its options, and how chunks are cut."""

    transport: str
    options: Mapping[str, Any]
    memory: MemoryKind
    devices: tuple[int, int]
    reach: Reach
    chunk_bytes: int
    chunk_segments: int
    #: What is worth saying besides figures.
    notes: list[str] = field(default_factory=list)


def measure(
    wire: Wire, regions: Sequence[int], reads: Segments, writes: Segments, seconds: float, progress: Told
) -> Carried:
    """The same segments again and again, for about ``seconds``.

    Raises :class:`~kvbaton.pair.PairFailed` where a byte is wrong or kvbaton's own way fails.
    """
    return _several(wire, regions, [(reads, writes)], seconds, progress, "bytes alone")[0]


def sweep(wire: Wire, seconds: float, progress: Told, lengths: Sequence[int] = LENGTHS) -> list[Carried]:
    """Scattered segments of each length, for about ``seconds`` in all."""
    cases: list[tuple[Segments, Segments]] = []
    for length in lengths:
        count = max(_SWEEP_LEAST, min(_SWEEP_MOST, _SWEEP_BYTES // length))
        draw = np.random.default_rng(length)
        reads, writes = (
            Segments(np.zeros(count, np.int32), draw.permutation(count) * length, np.full(count, length))
            for _ in range(2)
        )
        cases.append((reads, writes))
    return _several(wire, [sweep_bytes(lengths)], cases, seconds, progress, "segments of each length")


def sweep_bytes(lengths: Sequence[int] = LENGTHS) -> int:
    """What one end of a sweep takes."""
    return max(max(_SWEEP_LEAST, min(_SWEEP_MOST, _SWEEP_BYTES // length)) * length for length in lengths)


def _several(
    wire: Wire, regions: Sequence[int], cases: Sequence[tuple[Segments, Segments]], seconds: float, progress: Told,
    what: str,
) -> list[Carried]:  # fmt: skip
    """All cases over one pair of processes; over another one without the baseline, where that was what failed."""
    bounds = Bounds(open=120.0, look=60.0 + sum(regions) / 50e6)
    for beside in (True, False):
        raw: _Raw | None = None
        try:
            with open_pair(
                wire.transport, wire.options, regions=regions, memory=wire.memory, devices=wire.devices, bounds=bounds,
                reach=wire.reach, problems=wire.notes.append,
            ) as pair:  # fmt: skip
                found = []
                raw = _Raw(wire, pair.forward) if beside else None
                for place, (reads, writes) in enumerate(cases):

                    def told(share: float, place: int = place) -> None:
                        progress(what, (place + share) / len(cases))

                    found.append(_take(wire, pair.forward, raw, reads, writes, seconds / len(cases), told))
                if raw is not None:
                    raw.close()
                return found
        except PairFailed as error:
            if raw is None or not raw.has_its_turn:
                raise
            wire.notes.append(f"{raw.name} failed and is left out: {error}")
    raise AssertionError("without a baseline it has returned or raised")


def _take(
    wire: Wire, way: Way, raw: _Raw | None, reads: Segments, writes: Segments, seconds: float,
    told: Callable[[float], None],
) -> Carried:  # fmt: skip
    """One case: looked at, warm, and then for about ``seconds``."""
    nbytes = reads.nbytes
    bound = _PATIENCE + nbytes / _TOO_SLOW
    cut = {"chunk_bytes": wire.chunk_bytes, "chunk_segments": wire.chunk_segments}
    told(0.0)
    way.prepare()
    moved = way.move(reads, writes, bound=bound, **cut)
    way.check(reads, writes)
    if raw is not None:
        raw.take(reads, writes, bound)
    took: list[float] = []
    copied: list[float] = []
    of_copy: list[float] = []
    beside: list[float] = []
    of_baseline: list[float] = []
    submit: list[float] = []
    each: list[float] = []
    by = time.monotonic() + seconds
    turn = 0
    while turn < _WARM_UP + _LEAST or (turn < _WARM_UP + _TURNS and time.monotonic() < by):
        moved = way.move(reads, writes, bound=bound, **cut)
        copy = way.copy(reads, writes, bound=bound).done[0]
        other = raw.turn(bound) if raw is not None else None
        if turn >= _WARM_UP:
            ours = moved.received[0]
            took.append(ours)
            copied.append(copy)
            of_copy.append(copy / ours)
            submit += moved.submit
            each += moved.each
            if other is not None:
                beside.append(other)
                of_baseline.append(other / ours)
        turn += 1
        told(min(1.0, max(1 - (by - time.monotonic()) / seconds, turn / (_WARM_UP + _TURNS))))
    return Carried(
        int(np.median(reads.length)), len(reads), moved.chunks, nbytes, wire.reach,
        Spread.of([nbytes / spent for spent in took]), Spread.of(took), Spread.of(each), Spread.of(submit),
        Spread.of([nbytes / spent for spent in copied]), Spread.of(of_copy),
        Beside(raw.name, Spread.of([nbytes / spent for spent in beside])) if raw is not None and beside else None,
        Spread.of(of_baseline) if beside else None,
    )  # fmt: skip


class _Raw:
    """The transport's baseline at both ends.  What it raises is a note; that it hangs or dies ends the pair."""

    def __init__(self, wire: Wire, way: Way) -> None:
        self._wire, self._way = wire, way
        self.name = "the baseline"
        #: Whatever fails now is the baseline's failure.
        self.has_its_turn = True
        self._able = True
        self._closing = False
        how = {"transport": wire.transport, "options": dict(wire.options), "memory": wire.memory, "reach": wire.reach}
        ends = [self._said(way.call(end, f"{_RAW}open_end", bound=60.0, **how)) for end in (way.source, way.target)]
        source, target = ends
        if source is not None and target is not None:
            self.name = source["name"]
            self._both("meet", {"address": target["address"]}, {"address": source["address"]}, 60.0)
        self.has_its_turn = False

    def take(self, reads: Segments, writes: Segments, bound: float) -> None:
        """What is moved from now on: once, and looked at."""
        if not self._able:
            return
        self.has_its_turn = True
        cut = {"chunk_bytes": self._wire.chunk_bytes, "chunk_segments": self._wire.chunk_segments}
        lists = {"reads": reads.to_bytes(), "writes": writes.to_bytes(), **cut}
        if self._both("prepare", {**lists, "source": True}, {**lists, "source": False}, 60.0) is not None:
            self.turn(bound)
            if self._able:
                self.has_its_turn = True
                self._way.check(reads, writes)
        self.has_its_turn = False

    def turn(self, bound: float) -> float | None:
        """Seconds to move everything once; None where it cannot any more."""
        if not self._able:
            return None
        self.has_its_turn = True
        answers = self._way.call_both(
            (f"{_RAW}move", {"bound": bound}), (f"{_RAW}receive", {"bound": bound}), bound=bound + 10.0
        )
        source, target = (self._said(answer) for answer in answers)
        self.has_its_turn = False
        if source is None or target is None:
            return None
        seconds = float(source["seconds"])
        if target.get("early") or seconds <= 0.0:
            self._said({"error": "its target has everything before it was sent, as it says"})
            return None
        return seconds

    def close(self) -> None:
        self._closing = True
        if self._able:
            self.has_its_turn = True
            self._both("close_end", {}, {}, 60.0)
            self.has_its_turn = False

    def _both(self, function: str, source: dict[str, Any], target: dict[str, Any], bound: float) -> Any:
        answers = self._way.call_both((_RAW + function, source), (_RAW + function, target), bound=bound)
        found = [self._said(answer) for answer in answers]
        return found if all(answer is not None for answer in found) else None

    def _said(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """The answer; None, with a note the first time, where the baseline raised or there is none."""
        if "error" in answer:
            if self._able and answer["error"]:
                what = f"{self.name}, at its end" if self._closing else f"{self.name} is left out"
                self._wire.notes.append(f"{what}: {answer['error']}")
            self._able = False
            return None
        return answer
