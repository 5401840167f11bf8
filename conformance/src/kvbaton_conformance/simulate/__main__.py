"""``python -m kvbaton_conformance.simulate``: see the package's text."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbaton_conformance.simulate.mutants import Found, find, guards
from kvbaton_conformance.simulate.work import Batch, begin, run_batch, story

#: Runs that a worker is given at once.
_BATCH = 25
#: Seconds from one line of progress to the next, where stdout is no terminal.
_LINE = 30.0
#: So many run seeds belong to one seed.
_RUNS = 1_000_000_000


def _workers(jobs: int) -> ProcessPoolExecutor:
    """Processes in which a seed says everything: the order of sets, too."""
    os.environ["PYTHONHASHSEED"] = "0"
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn"), initializer=begin)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.  Status 0: every invariant held, every guard was missed."""
    parser = argparse.ArgumentParser(prog="python -m kvbaton_conformance.simulate", description=__doc__)
    parser.add_argument("--handoffs", metavar="N", type=_natural, default=10_000, help="at least so many (10,000)")
    parser.add_argument("--seed", metavar="N", type=int, default=1, help="where the schedules come from (1)")
    parser.add_argument("--jobs", metavar="N", type=_natural, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--run", metavar="SEED", type=int, help="play one run, by its own seed, and tell its story")
    parser.add_argument("--mutants", action="store_true", help="take each guard away: which run notices?")
    parser.add_argument("--only", metavar="TEXT", default="", help="with --mutants: whose name or guard contains this")
    parser.add_argument(
        "--runs", metavar="N", type=_natural, default=400, help="with --mutants: for each, at most (400)"
    )
    parser.add_argument(
        "--patience", metavar="S", type=float, default=60.0, help="seconds to shorten a failing run (60)"
    )
    asked = parser.parse_args(arguments)
    console = Console()
    with _workers(asked.jobs) as pool:
        if asked.run is not None:
            return _tell(console, pool, asked.run, asked.patience)
        if asked.mutants:
            return _mutants(console, pool, asked.only, asked.seed * _RUNS, asked.runs)
        return _simulate(console, pool, asked.handoffs, asked.seed, asked.jobs, asked.patience)


def _natural(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def _tell(console: Console, pool: ProcessPoolExecutor, run: int, patience: float) -> int:
    scenario, told, before, after = pool.submit(story, run, patience).result()
    broken = "!! " in told
    console.print(f"run {run}:", highlight=False)
    console.print(scenario, highlight=False, markup=False)
    if broken:
        console.print(f"{before} moves, of which {after} are needed; what happens:", highlight=False)
    console.print(told, highlight=False, markup=False, soft_wrap=True)
    return 1 if broken else 0


def _simulate(console: Console, pool: ProcessPoolExecutor, handoffs: int, seed: int, jobs: int, patience: float) -> int:
    started = time.monotonic()
    done = Batch(0, 0, 0, 0, 0, ())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"),
               TimeElapsedColumn())  # fmt: skip
    told = started
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("hand-offs", total=handoffs, rate="")
        for batch in _batches(pool, seed * _RUNS, jobs):
            done = Batch(
                done.runs + batch.runs, done.handoffs + batch.handoffs, done.requests + batch.requests,
                done.finished + batch.finished, done.moves + batch.moves, done.broken + batch.broken,
            )  # fmt: skip
            now = time.monotonic()
            rate = done.handoffs / (now - started)
            if not console.is_terminal and now - told >= _LINE:
                told = now
                console.print(
                    f"{done.handoffs:,} of {handoffs:,} hand-offs, {rate:,.0f}/s, {now - started:.0f} s,"
                    f" {len(done.broken)} violations",
                    highlight=False, soft_wrap=True,
                )  # fmt: skip
                console.file.flush()  # a file is looked at while the run goes on
            progress.update(task, completed=min(done.handoffs, handoffs), rate=f"{rate:,.0f}/s")
            if done.handoffs >= handoffs or done.broken:
                break
    seconds = time.monotonic() - started
    if done.broken:
        first, _ = min(done.broken)
        _tell(console, pool, first, patience)
        console.print(f"again: python -m kvbaton_conformance.simulate --run {first}", highlight=False)
        for other, what in sorted(done.broken)[1:10]:
            console.print(f"also run {other}: {what}", highlight=False, markup=False)
    figures = (
        f"{done.handoffs:,} hand-offs of {done.requests:,} requests ({done.finished:,} finished) in {done.runs:,} runs,"
        f" {done.moves:,} moves, seed {seed}; {seconds:.0f} s, {done.handoffs / seconds:,.0f} hand-offs/s,"
        f" {jobs} processes"
    )
    verdict = f"BROKEN: {len(done.broken)} runs" if done.broken else "HOLDS: 0 violations"
    console.print(f"{verdict}; {figures}", highlight=False, soft_wrap=True)
    return 1 if done.broken else 0


def _batches(pool: ProcessPoolExecutor, first: int, jobs: int) -> Iterator[Batch]:
    """Batches in the order of their seeds, so that what is found does not depend on who was faster; without end."""
    waiting: list[Future[Batch]] = []
    try:
        while True:
            while len(waiting) < 2 * jobs:
                waiting.append(pool.submit(run_batch, first, _BATCH))
                first += _BATCH
            yield waiting.pop(0).result()
    finally:
        for future in waiting:
            future.cancel()


def _mutants(console: Console, pool: ProcessPoolExecutor, only: str, first: int, runs: int) -> int:
    chosen = [mutant for mutant in guards() if only in mutant.name or only in mutant.guard]
    if not chosen:
        console.print(f"no guard is called {only}; they are: {', '.join(sorted(m.guard or m.name for m in guards()))}")
        return 2
    table = Table("guard", "found in run", "clause", "how")
    futures = [pool.submit(find, mutant.name, first, runs) for mutant in chosen]
    found: list[Found] = []
    with Progress(console=console) as progress:
        task = progress.add_task("guards", total=len(futures))
        for future in futures:
            found.append(future.result())
            progress.advance(task)
    for one in found:
        table.add_row(one.guard, str(one.run or "NOT FOUND"), one.clause, one.text[:90])
    console.print(table)
    missed = [one.guard for one in found if not one.run]
    worst = max((one.run for one in found), default=0)
    console.print(
        f"{'MISSED: ' + ', '.join(missed) if missed else 'FOUND: all'}; {len(found) - len(missed)} of {len(found)}"
        " guards"
        f" within {worst if not missed else runs} runs, seed {first // _RUNS}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
