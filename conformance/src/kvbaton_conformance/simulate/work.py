"""What worker processes do for the command."""

from __future__ import annotations

import logging
import multiprocessing
import multiprocessing.connection
import os
import threading
from dataclasses import dataclass

from kvbaton_conformance.simulate.run import play
from kvbaton_conformance.simulate.scenario import Scenario
from kvbaton_conformance.simulate.shrink import shrink, tell


def begin() -> None:
    """Stages that die in a simulation say nothing; whoever works for a process that is gone ends as well."""
    logging.disable(logging.CRITICAL)
    parent = multiprocessing.parent_process()
    if parent is not None:  # its queue never ends by itself: a worker holds both of its ends
        threading.Thread(target=_follow, args=(parent.sentinel,), daemon=True).start()


def _follow(parent: int) -> None:
    multiprocessing.connection.wait([parent])
    os._exit(1)


@dataclass(frozen=True)
class Batch:
    """What came of some runs: ``broken`` is (run seed, invariant) of each that failed."""

    runs: int
    handoffs: int
    requests: int
    finished: int
    moves: int
    broken: tuple[tuple[int, str], ...]


def run_batch(first: int, count: int) -> Batch:
    results = [play(Scenario.draw(seed)) for seed in range(first, first + count)]
    broken = tuple((r.scenario.seed, str(r.broken)) for r in results if r.broken is not None)
    return Batch(
        count, sum(r.handoffs for r in results), sum(r.requests for r in results),
        sum(r.finished for r in results), sum(r.made for r in results), broken,
    )  # fmt: skip


def story(seed: int, seconds: float) -> tuple[str, str, int, int]:
    """The scenario, the shortened story, and how many moves there were before and after."""
    result = play(Scenario.draw(seed))
    if result.broken is None:
        return str(result.scenario), tell(result.scenario, result.moves), len(result.moves), len(result.moves)
    short = shrink(result, seconds=seconds)
    return str(short.scenario), tell(short.scenario, short.moves), len(result.moves), len(short.moves)
