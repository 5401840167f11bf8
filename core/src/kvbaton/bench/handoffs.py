"""Whole hand-offs over a runtime with the bench's engine: how long one takes, and how many there are in a second."""

from __future__ import annotations

import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton.bench.engine import NAME, BenchOptions
from kvbaton.bench.traffic import Traffic
from kvbaton.engine import Request, SamplingParams
from kvbaton.errors import TransferFailed
from kvbaton.records import RequestRecord
from kvbaton.runtime import PDRuntime
from kvbaton.settings import EngineSettings, Settings, StagesSettings
from kvbaton.spread import Spread

#: Rounds of the rate; how many times as many requests one of them has at least as are under way at once, and at most.
_ROUNDS, _ROUND, _LONGEST = 5, 2, 2000
#: Hand-offs without a payload, at most; they take milliseconds.
_EMPTY = 100
#: How long nothing may happen at all.
_PATIENCE = 60.0


@dataclass(frozen=True, slots=True)
class HandOffs:
    """``empty``: from ``add_request`` to the end of a request of one token, one at a time.  ``alone``: the same of
    whole requests.  ``together``: whole requests in a second, ``at_once`` of them under way, of rounds of ``round``
    requests each.  ``milestones``: seconds since ``add_request`` of those one at a time, in the order in which they
    were reached; a stage's own are placed by its clock's distance from ours.

    ``chunks``, ``segments`` and ``nbytes`` are those of one request.
    """

    launch: str
    at_once: int
    chunks: int
    segments: int
    nbytes: int
    empty: Spread
    alone: Spread
    together: Spread
    round: int
    milestones: dict[str, Spread]


def bench_settings(settings: Settings, traffic: Traffic, at_once: int, memory: str) -> Settings:
    """``settings`` for one prefill and one decode stage of the bench's engine.

    Nothing begins again: what fails is to be seen.  Nothing listens and nothing is traced, where a deployment of the
    same settings may.
    """
    options = BenchOptions.of(traffic, at_once).model_dump()
    devices = settings.stages.devices
    if memory == "host":
        devices = None
    elif devices is None or len(devices) < 2:
        devices = (0, 0)
    else:
        devices = (devices[0], devices[settings.stages.prefill])
    stages = StagesSettings(prefill=1, decode=1, launch=settings.stages.launch, devices=devices)
    return settings.model_copy(
        update={
            "model": "bench", "engine": EngineSettings(name=NAME, options=options), "stages": stages,
            "recovery": settings.recovery.model_copy(update={"mode": "off"}),
            "metrics": settings.metrics.model_copy(update={"listen": None}),
            "trace": settings.trace.model_copy(update={"path": None, "otel": False}),
        }
    )  # fmt: skip


def measure(
    settings: Settings,
    traffic: Traffic,
    *,
    at_once: int,
    requests: int,
    seconds: float,
    progress: Callable[[str, float], None],
    clock: Callable[[], float] = time.perf_counter,
) -> HandOffs:
    """``settings`` are those of :func:`bench_settings`.  ``requests``: how many are timed one at a time, at most; about
    ``seconds`` are taken in all, each part of it at least one repetition.  ``progress`` is told what is going on, and
    how much of it is done (0 to 1).

    Raises what :meth:`~kvbaton.runtime.PDRuntime.start` does, and the error of a hand-off that fails.
    """
    whole = Request((1,) * traffic.tokens, SamplingParams(max_tokens=1))
    single = Request((1,), SamplingParams(max_tokens=1))
    with PDRuntime.start(settings, progress=lambda text: progress(text, 0.0)) as runtime:
        run = _Run(runtime, clock)
        progress("warming up, looking at every byte", 0.0)
        run.serve([whole] * 2 * at_once, at_once)
        run.serve([single] * 2 * at_once, at_once)

        def until(share: float, most: int, what: str, request: Request) -> tuple[list[float], list[RequestRecord]]:
            records: list[RequestRecord] = []
            took: list[float] = []
            by = clock() + share * seconds
            while len(records) < most and (not records or clock() < by):
                began = clock()
                records += run.serve([request], 1)
                took.append(clock() - began)
                progress(what, len(records) / most)
            return took, records

        empty, _ = until(0.15, _EMPTY, "hand-offs without a payload", single)
        alone, records = until(0.35, requests, "hand-offs, one at a time", whole)
        # a round long enough to be told from noise, and of several turns
        count = max(_ROUND * at_once, min(int(0.5 * seconds / _ROUNDS / statistics.median(alone)), _LONGEST))
        rates: list[float] = []
        by = clock() + 0.5 * seconds
        while len(rates) < _ROUNDS and (not rates or clock() < by):
            began = clock()
            run.serve([whole] * count, at_once)
            rates.append(count / (clock() - began))
            progress(f"hand-offs, {at_once} at a time", len(rates) / _ROUNDS)
        launch = "threads" if runtime.stage(runtime.stages[0]).pid == os.getpid() else "processes"
    last = records[-1]
    return HandOffs(
        launch, at_once, last.chunks, last.segments, last.bytes, Spread.of(empty), Spread.of(alone), Spread.of(rates),
        count, _milestones(records),
    )  # fmt: skip


class _Run:
    def __init__(self, runtime: PDRuntime, clock: Callable[[], float]) -> None:
        self._runtime = runtime
        self._clock = clock

    def serve(self, requests: list[Request], at_once: int) -> list[RequestRecord]:
        """Hand all over, ``at_once`` of them under way; their records, in the order of their ends."""
        waiting, live = list(requests), 0
        records: list[RequestRecord] = []
        heard = self._clock()
        while waiting or live:
            while waiting and live < at_once:
                self._runtime.add_request(waiting.pop())
                live += 1
            for output in self._runtime.step(0.1):
                heard = self._clock()
                if output.finished:
                    live -= 1
                    if output.error is not None:
                        raise output.error
                    assert output.record is not None, "the last output has the record"
                    records.append(output.record)
            if self._clock() - heard > _PATIENCE:
                raise TransferFailed(f"C6.3: nothing has come of {live} hand-offs for {_PATIENCE:g} s")
        return records


def _milestones(records: list[RequestRecord]) -> dict[str, Spread]:
    times: defaultdict[str, list[float]] = defaultdict(list)
    for record in records:
        for name, at in dict(record.milestones).items():
            times[name].append(at)
    spreads = {name: Spread.of(found) for name, found in times.items()}
    return dict(sorted(spreads.items(), key=lambda item: item[1].median))
