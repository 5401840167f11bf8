"""Stages that are killed or stopped at each point of a hand-off, over any connector between processes.

A *cell* is a point (:class:`~kvbaton_conformance.halt.Point`), a victim (the prefill stage, the decode stage, or both)
and a signal (SIGKILL; SIGSTOP: a process that hangs; or :data:`~kvbaton_conformance.halt.SEIZE`: one whose interpreter
hangs, so that its process still answers heartbeats).  Each cell is a deployment of its own, with a second stage of
the victim's kind.  The request is held at the point, the victim gets the signal, and from then on

- the request ends within a deadline: with its cause and the victim's name, or, where everything had arrived, with the
  right answer;
- what a survivor's engine or transport may still touch stays held until that is over, and what a dead writer might
  still touch until the writer was joined (C5.1, C5.2, C6.4); the credits for it stay out;
- the victim is joined, after a kill where it only hung; the survivors serve the next request; all books balance;
- closing ends every process, survivors with status 0 and without a word that is not about the victim; no file, process
  or shared-memory object is left.

Whole matrices from the command line::

    python -m kvbaton_conformance.kill_matrix --transport example_shm --runs 40
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, load
from kvbaton.cli.assignments import assignments
from kvbaton.connector import Need
from kvbaton.errors import KvbatonError
from kvbaton.handoff.table import Milestones
from kvbaton.hooks import hookimpl
from kvbaton.identity import PeerId
from kvbaton.plugins import choose_connector
from kvbaton_conformance import shared_memory
from kvbaton_conformance.clauses import ClauseBroken, require
from kvbaton_conformance.halt import GO, MARK, SEIZE, SEIZED, Point
from kvbaton_conformance.leaks import holdings, left_behind
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model
from kvbaton_conformance.suite.handoff.runtime import PATIENCE, Fleet

Victim = Literal["prefill", "decode", "both"]

#: Seconds of each phase: a hung stage is found within these, and everybody else keeps them on a busy machine, too.  A
#: stage that is found by none of them (nothing is asked of it) answers no heartbeat, or where its interpreter alone
#: hangs no call.  A seized stage must not be found by its silence before the one that waits for it is overdue: hence
#: the long ``deadline.step``.
PHASE, DRAIN, CONTROL, HEARTBEAT, STEP, SHUTDOWN = 4.0, 4.0, 4.0, 5.0, 12.0, 12.0
#: What the machine may add to a deadline, being busy with other things.
SLACK = 20.0
#: What is to find nobody in a cell is so many times as long: nothing of a killed stage waits for a deadline, a stopped
#: one is found by its heartbeat before its silence, and the library answers heartbeats for a seized interpreter.
_NEVER = 10.0

#: Within these a victim is found.  Silence takes five of the four questions in ``deadline.step``, and one may be out.
_FOUND = {signal.SIGKILL: 0.0, signal.SIGSTOP: max(PHASE + CONTROL, HEARTBEAT), SEIZE: 1.5 * STEP}
_HOW = {signal.SIGKILL: "killed", signal.SIGSTOP: "hung", SEIZE: "seized"}

#: The last milestone that the coordinator knows at each point.
_KNOWN = {
    Point.BEFORE_RESERVE: Milestones.PLACED, Point.RESERVED: Milestones.RESERVED,
    Point.COMPUTING: Milestones.RESERVED, Point.POSTED: Milestones.PREFILL_STARTED,
    Point.COMMITTED: Milestones.COMMITTED, Point.RECEIVED: Milestones.RECEIVED,
    Point.DECODING: Milestones.SOURCE_RETIRED,
}  # fmt: skip
#: The first milestone that it cannot know.
_UNKNOWN = {
    Point.BEFORE_RESERVE: Milestones.RESERVED, Point.RESERVED: Milestones.PREFILL_STARTED,
    Point.COMPUTING: Milestones.PREFILL_STARTED, Point.POSTED: Milestones.COMMITTED,
    Point.COMMITTED: Milestones.RECEIVED, Point.RECEIVED: Milestones.ACTIVATED, Point.DECODING: Milestones.FINISHED,
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One way to fail."""

    point: Point
    victim: Victim
    how: signal.Signals

    def __str__(self) -> str:
        return f"{self.point.value}-{self.victim}-{_HOW[self.how]}"

    @property
    def victims(self) -> tuple[str, ...]:
        names = {"prefill": ("prefill-0",), "decode": ("decode-0",), "both": ("prefill-0", "decode-0")}
        return names[self.victim]

    @property
    def survives(self) -> bool:
        """Whether the request does: D has everything, and P is not needed any more."""
        return self.victim == "prefill" and self.point in (Point.RECEIVED, Point.DECODING)

    @property
    def held(self) -> set[str]:
        """Stages that hold memory for the request when it fails: all that were told of it, dead ones included, until
        somebody proves otherwise."""
        if self.survives:
            return set()
        if self.point is Point.BEFORE_RESERVE:
            return {"decode-0"}
        # P is done by then; at RECEIVED it is not quiet yet, until we let it go or its own end was seen first
        waits = self.how is signal.SIGKILL and self.victim == "decode"
        done = self.point is Point.DECODING or (self.point is Point.RECEIVED and not waits)
        return {"decode-0"} if done else {"prefill-0", "decode-0"}

    @property
    def survivor_busy(self) -> str | None:
        """The survivor whose engine is held with the request, and which must keep its memory for so long.

        Later than that it is the transport's word that counts, and that may come at once: of a dead peer it knows.
        """
        if self.victim == "prefill" and self.point is Point.BEFORE_RESERVE:
            return "decode-0"
        if self.victim == "decode" and self.point in (Point.RESERVED, Point.COMPUTING, Point.POSTED):
            return "prefill-0"
        return None


def _deadlines(how: signal.Signals) -> dict[str, float]:
    """The settings of a cell whose victim ends so."""
    times = _NEVER if how is signal.SIGKILL else 1.0
    phase, drain, control = PHASE * times, DRAIN * times, CONTROL * times
    phases = ("reserve", "prefill_start", "prefill_idle", "chunk", "receipts")
    return {
        **{f"deadline.{name}": phase for name in phases}, "deadline.drain": drain, "deadline.control": control,
        "deadline.step": STEP * (1.0 if how is SEIZE else _NEVER), "deadline.shutdown": SHUTDOWN,
        "control.heartbeat": HEARTBEAT * (1.0 if how is signal.SIGSTOP else _NEVER),
    }  # fmt: skip


CELLS = tuple(Cell(point, victim, how) for victim in ("prefill", "decode", "both") for point in Point for how in _HOW)


@dataclass(frozen=True)
class Outcome:
    """What was seen in a cell that held."""

    #: How the held request ended, as its caller was told.
    ended: str
    #: Seconds from the signal to that end, to the victims' joins, and from ``close()`` to its return.
    told: float
    joined: float
    closed: float


class _Watch:
    """An observer: places the held request on the victims, and notes what is told, and when."""

    def __init__(self, cell: Cell) -> None:
        self._cell = cell
        self.statuses: Callable[[], Mapping[str, int | None]] = dict
        self.key = ""
        #: (milestone, stage) of the held request, with the moment and whether all victims were joined by then.
        self.milestones: dict[str, tuple[float, bool]] = {}
        self.lost: dict[str, str] = {}
        self.fenced: Counter[str] = Counter()
        self.faults: list[str] = []

    @hookimpl
    def kvbaton_choose_pair(self, request: str, prefill: Sequence[Any], decode: Sequence[Any]) -> Any:
        return ("prefill-0", "decode-0") if request == self.key else None

    @hookimpl
    def kvbaton_milestone(self, request: str, milestone: str) -> None:
        if request == self.key:
            joined = all(self.statuses().get(name) is not None for name in self._cell.victims)
            self.milestones.setdefault(milestone, (time.monotonic(), joined))

    @hookimpl
    def kvbaton_peer_lost(self, peer: PeerId, cause: str) -> None:
        self.lost[peer.name] = cause

    @hookimpl
    def kvbaton_peer_fenced(self, peer: PeerId) -> None:
        self.fenced[peer.name] += 1

    @hookimpl
    def kvbaton_fault(self, error: Exception) -> None:
        self.faults.append(str(error))


@dataclass(eq=False)
class _Trial:
    """One cell under way."""

    cell: Cell
    folder: Path
    transport: str
    options: Mapping[str, Any]
    revocable: bool
    fleet: Fleet = field(init=False)
    watch: _Watch = field(init=False)
    signalled: float = 0.0
    went: float = 0.0

    def run(self) -> Outcome:
        self._start()
        try:
            self._reach()
            self._strike()
            ended, told, joined = self._survive()
            self._serve_on()
        finally:
            self._go()
            pids = {name: self.fleet.pid(name) for name in self.fleet.runtime.stages}
            for name in self.cell.victims:  # a trial that was given up may have left one stopped
                if self.fleet.statuses()[name] is None:
                    os.kill(pids[name], signal.SIGCONT)
            began = time.monotonic()
            error = self._close()
            closed = time.monotonic() - began
        self._check_end(error, closed, pids)
        return Outcome(ended, told, joined, closed)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        cell = self.cell
        held = {"folder": str(self.folder), "point": cell.point.value}
        engine = ScriptedOptions(planes=2, token_bytes=(16, 16, 16, 16), final_bytes=32, gap=16)
        settings, _ = load(
            overrides={
                "model": "scripted:1", "engine.name": "kvbaton_conformance.halt:engine",
                "engine.options": {**engine.model_dump(mode="json"), **held},
                "transport.name": "kvbaton_conformance.halt:connector",
                "transport.options": {"named": self.transport, "options": dict(self.options), **held},
                "stages.launch": "process", "recovery.mode": "off", "transfer.chunk_bytes": 512,
                "stages.prefill": 1 if cell.victim == "decode" else 2,
                "stages.decode": 1 if cell.victim == "prefill" else 2,
                "control.dir": self.folder / "control", **_deadlines(cell.how),
            }
        )  # fmt: skip
        self.watch = _Watch(cell)
        runtime = PDRuntime.start(settings, hooks=[self.watch])
        self.fleet = Fleet(runtime, scripted_model("scripted:1", engine))
        self.watch.statuses = self.fleet.statuses

    def _reach(self) -> None:
        """The request is held at its point, and the coordinator knows that and no more."""
        cell, fleet, watch = self.cell, self.fleet, self.watch
        watch.key = "held"
        fleet.add("held", Request((MARK, *range(20)), SamplingParams(max_tokens=12)))

        def there() -> bool:
            known = _KNOWN[cell.point]
            told = known in watch.milestones and (cell.point is not Point.DECODING or bool(fleet.tokens["held"]))
            # that a chunk count is known is the coordinator's word alone
            return told and (cell.point is Point.COMMITTED or (self.folder / cell.point.value).exists())

        fleet.run_until(lambda: there() or fleet.all_ended(), f"the request comes to the point {cell.point.value}")
        require(
            not fleet.all_ended() and _UNKNOWN[cell.point] not in watch.milestones, "C4",
            "the request was not held where it should be", seen=(sorted(watch.milestones), fleet.ends),
        )  # fmt: skip

    def _strike(self) -> None:
        pids = [self.fleet.pid(name) for name in self.cell.victims]
        self.signalled = time.monotonic()
        for pid in pids:
            os.kill(pid, self.cell.how)
        if self.cell.how is not signal.SIGKILL:
            # the rest goes on as if nothing were: only a deadline can find out
            self._until(lambda: all(map(self._hangs, pids)), SLACK, "C6.7", "the victim hangs")
            if not (self.cell.victim == "prefill" and self.cell.point is Point.COMMITTED):
                self._go()  # else D lacks receipts until P is joined: with them it needs no P to give memory back

    def _survive(self) -> tuple[str, float, float]:
        cell, fleet = self.cell, self.fleet
        bound = _FOUND[cell.how] + SLACK
        if not cell.survives:
            self._until(fleet.all_ended, bound, "C6.7", "the request of a dead stage ends")
        told = time.monotonic() - self.signalled
        if cell.how is signal.SIGKILL:
            self._until(self._joined, SLACK, "C6.4", "a dead stage is noticed at once")
            self._check_held()
            self._go()
        # a stage that is asked for nothing but its memory is lost once that is overdue
        self._until(self._joined, bound + DRAIN + CONTROL, "C6.4", "a hung stage is killed and joined")
        self._go()
        joined = time.monotonic() - self.signalled
        if cell.survives:
            self._until(fleet.all_ended, SLACK, "C4.1", "a request that D has received ends without its P")
            told = time.monotonic() - self.signalled
        record = fleet.ends["held"]
        fleet.check_answer("held")
        if cell.survives:
            require(record.error is None, "C5.2", "D had everything and failed", seen=record.error)
            return record.finish_reason, told, joined
        require(
            record.finish_reason == "failed" and bool(record.transfer) and str(record.transfer) in str(record.error),
            "C6.3", "a failure does not name its transfer", expected=record.transfer, seen=record.error,
        )  # fmt: skip
        cause = str(getattr(record.error, "cause", ""))
        # of a P that hangs after its commit D's silence is all that is known
        unsure = cell.how is not signal.SIGKILL and cell.point is Point.COMMITTED and "deadline.receipts" in cause
        require(
            unsure or any(name in cause for name in cell.victims), "C6.3",
            "a failure does not name the stage that it lies with", expected=cell.victims, seen=cause,
        )  # fmt: skip
        require(
            self._named_as_held(record) >= cell.held, "C6.3", "a failure does not name what was retained",
            expected=cell.held, seen=record.error,
        )  # fmt: skip
        words = ("SIGKILL",) if cell.how is signal.SIGKILL else ("deadline", "heartbeat")
        require(
            any(word in cause for word in words), "C6.3", "a failure does not say what happened",
            expected=" or ".join(words), seen=cause,
        )  # fmt: skip
        return str(record.error), told, joined

    @staticmethod
    def _named_as_held(record: RequestRecord) -> set[str]:
        retained: tuple[str, ...] = getattr(record.error, "retained", ())
        return {name for name in retained if name in str(record.error).partition(": ")[0]}

    def _check_held(self) -> None:
        """C5.1, C5.2: what a survivor is busy with is not given back for somebody else's death."""
        busy = self.cell.survivor_busy
        if busy is None:
            return
        # its pump answers although its engine is held: after all that it was told before, and has said what follows
        answer = self.fleet.runtime.health()[busy]
        require(answer.get("healthy") is True, "C9.2", f"{busy} is not well", seen=answer)
        book = self.fleet.runtime.health()["coordinator"]["credits"][busy]
        require(
            book["blocks_out"] > 0 and book["slots_out"] > 0, "C2.5",
            f"{busy} is still busy with the request, and its credit is back", seen=book,
        )  # fmt: skip

    def _serve_on(self) -> None:
        cell, fleet, watch = self.cell, self.fleet, self.watch
        fleet.give_up = time.monotonic() + PATIENCE
        fleet.add("after", Request(tuple(range(100, 121)), SamplingParams(max_tokens=4)))
        fleet.run_until(fleet.all_ended, "C6.4: those that are left serve the next request")
        require(fleet.ends["after"].error is None, "C6.4", "the next request failed", seen=fleet.ends["after"].error)
        fleet.check_answer("after")
        fleet.check_balance()
        seen, never = watch.milestones, (0.0, False)
        if cell.victim == "decode" and cell.survivor_busy and cell.how is signal.SIGKILL:
            require(
                seen.get(Milestones.SOURCE_RETIRED, never)[0] > self.went, "C5.1", "P retired what was still in use",
                seen=seen,
            )  # fmt: skip
        told = cell.point not in (Point.BEFORE_RESERVE, Point.RECEIVED, Point.DECODING)
        if cell.victim == "prefill" and told and not self.revocable:
            require(
                seen.get(Milestones.DESTINATION_RETIRED, never)[1], "C5.2",
                "D gave memory away before its writer was joined", seen=seen,
            )  # fmt: skip
        for name in cell.victims:
            require(name in watch.lost, "C6.3", f"nobody was told that {name} is lost", seen=watch.lost)
        self._until(lambda: all(watch.fenced[name] for name in cell.victims), SLACK, "C6.4", "the victims are fenced")
        require(max(watch.fenced.values()) == 1, "C6.4", "one was fenced more than once", seen=watch.fenced)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _close(self) -> KvbatonError | None:
        try:
            self.fleet.runtime.close()
        except KvbatonError as error:
            return error
        return None

    def _check_end(self, error: KvbatonError | None, closed: float, pids: Mapping[str, int]) -> None:
        cell, fleet = self.cell, self.fleet
        require(error is None, "C6.2", "a stage did not end as ordered", seen=error)
        require(closed < SHUTDOWN, "C6.7", "the end took longer than its deadline", seen=f"{closed:.1f} s")
        statuses = fleet.statuses()
        require(
            all(statuses[name] == -signal.SIGKILL for name in cell.victims), "C6.4", "a victim was not killed",
            seen=statuses,
        )  # fmt: skip
        others = {name: statuses[name] for name in statuses if name not in cell.victims}
        require(not any(others.values()), "C6.2", "a survivor did not end with status 0", seen=statuses)
        for name in others:
            log = fleet.runtime.stage(name).log
            lines = [line for line in log if not any(v in line for v in cell.victims)]
            require(not lines, "T10", f"{name} printed what is not about the victim", seen=lines)
        left = [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]
        require(not left, "C6.2", "processes are left", seen=left)
        files = [str(path) for path in (self.folder / "control").iterdir()]
        require(not files, "T10", "files are left in the control directory", seen=files)

    # -- small -------------------------------------------------------------------------------------------------------

    def _hangs(self, pid: int) -> bool:
        if self.cell.how is SEIZE:
            return (self.folder / f"{SEIZED}{pid}").exists()
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def _joined(self) -> bool:
        return all(self.fleet.statuses()[name] is not None for name in self.cell.victims)

    def _go(self) -> None:
        if not self.went:
            self.went = time.monotonic()
            (self.folder / GO).touch()

    def _until(self, condition: Callable[[], bool], seconds: float, clause: str, what: str) -> None:
        give_up = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > give_up:
                raise ClauseBroken(clause, f"{what}: not so within {seconds:g} s", seen=self.watch.__dict__)
            self.fleet.step()


def shared_memory_left(before: Iterable[str]) -> list[str]:
    """Shared-memory objects of this run that were not there ``before``: none, once all its cells are over (T10).

    Not a cell's to look for: cells run side by side, and one's objects are those of the whole run.
    """
    return shared_memory.of_this_run(shared_memory.objects() - frozenset(before), ())


def run_cell(cell: Cell, transport: str, options: Mapping[str, Any] | None = None) -> Outcome:
    """Run one cell over the connector ``transport`` in processes of its own; a few seconds.

    Raises :class:`~kvbaton_conformance.clauses.ClauseBroken` with what did not hold; every process is gone then, too.
    Threading: cells may run side by side.
    """
    plugin, _ = choose_connector(transport, Need("host", "cross_process"), dict(options or {}))
    capabilities = plugin.probe(Need("host", "cross_process")).capabilities
    folder = Path(tempfile.mkdtemp(prefix="kvbaton-kill-"))
    try:
        return _Trial(
            cell, folder, transport, options or {}, capabilities is not None and capabilities.revocable
        ).run()  # fmt: skip
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def matrix(
    trials: Sequence[tuple[str, Cell]], options: Mapping[str, Any] | None = None, jobs: int = 4
) -> Iterator[dict[tuple[str, Cell], Future[Outcome]]]:
    """All ``trials``, each a transport and a cell, ``jobs`` of them at a time: a cell mostly waits for deadlines."""
    with ThreadPoolExecutor(jobs, thread_name_prefix="kvbaton-conformance-cell") as pool:
        futures = {(name, cell): pool.submit(run_cell, cell, name, options) for name, cell in trials}
        try:
            yield futures
        finally:
            for future in futures.values():
                future.cancel()


def main(arguments: Sequence[str] | None = None) -> int:
    """The matrix as a command; the status is 0 where every cell of every run held."""
    parser = argparse.ArgumentParser(prog="python -m kvbaton_conformance.kill_matrix")
    parser.add_argument("--transport", required=True, help="a connector, as transport.name names it")
    parser.add_argument("--options", type=json.loads, default={}, help="its options, as JSON")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="one of them; repeatable")
    parser.add_argument("--runs", type=int, default=1, help="how often the whole matrix is run")
    parser.add_argument("--jobs", type=int, default=4, help="cells at a time")
    parser.add_argument("--only", default="", help="cells whose name contains one of these, with commas")
    given = parser.parse_args(arguments)
    options = {**given.options, **dict(assignments("--option", given.option))}
    logging.getLogger("kvbaton").addHandler(logging.NullHandler())
    logging.getLogger("kvbaton").propagate = False
    cells = [cell for cell in CELLS if any(part in str(cell) for part in given.only.split(","))]
    before = holdings()
    held: dict[Cell, list[Outcome]] = {cell: [] for cell in cells}
    broken = 0
    for run in range(given.runs):
        began = time.monotonic()
        with matrix([(given.transport, cell) for cell in cells], options, given.jobs) as futures:
            for (_, cell), future in futures.items():
                try:
                    held[cell].append(future.result())
                except Exception as error:
                    broken += 1
                    print(f"run {run + 1}, {cell}: {type(error).__name__}: {error}", flush=True)
        left = left_behind(before)
        broken += bool(left)
        print(f"run {run + 1}: {time.monotonic() - began:.1f} s, left behind: {left or 'nothing'}", flush=True)
    print(f"{'cell':34} {'held':>7} {'told':>6} {'joined':>6} {'closed':>6}  how the request ended")
    for cell, outcomes in held.items():
        worst = [max((getattr(o, name) for o in outcomes), default=0.0) for name in ("told", "joined", "closed")]
        times = " ".join(f"{seconds:6.2f}" for seconds in worst)
        end = outcomes[-1].ended.split("\n")[0] if outcomes else ""
        print(f"{cell!s:34} {len(outcomes):3}/{given.runs:<3} {times}  {end}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
