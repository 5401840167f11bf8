"""Trials: the standard tests run against one mutant in a process of its own.

The tests are collected once per base connector; each trial is a fork of that process, so that it starts warm, cannot
disturb another, and can be killed when it hangs.  A trial runs the tests that it is given in order, and stops where it
is told to.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from kvbaton_conformance.mutants.mutant import Mutant

_MODULE = "kvbaton_conformance.mutants"


def _core() -> str:
    """What core is judged over: a wire that can be stepped shows more, and faster, than one that moves by itself."""
    stepped = any(entry.name == "loopback" for entry in entry_points(group="kvbaton.connectors"))
    return "loopback" if stepped else f"{_MODULE}.reference:plugin"


#: Connectors that keep the contract: what is run against them collects the tests.
BASES = {
    "core": _core(),
    "reference": f"{_MODULE}.reference:plugin",
    "own": f"{_MODULE}.connectors:own_memory",
    "two": f"{_MODULE}.connectors:other_processes_only",
}

#: Seconds that a condition may take here: nothing healthy takes a tenth of it.
PATIENCE = 3.0


@dataclass(frozen=True)
class Test:
    """A standard test in one mode."""

    #: ``topic::test_name[parameters]``.
    id: str
    clauses: frozenset[str]
    level: str
    two_processes: bool

    @property
    def name(self) -> str:
        """Without parameters."""
        return self.id.split("[")[0]


@dataclass(frozen=True)
class Failure:
    """One test that failed, by the clause that its message begins with."""

    test: str
    clause: str
    message: str


@dataclass
class Trial:
    """``mutant`` (None: nothing is broken) against ``tests``, in order, until ``enough`` of the failures so far."""

    mutant: Mutant | None
    tests: Sequence[str]
    #: What to stop at: a failure by one of these clauses; nothing, where it is empty.
    until: tuple[str, ...] = ()
    limit: float = 60.0
    ran: int = 0
    failures: list[Failure] = field(default_factory=list)
    seconds: float = 0.0
    #: Why it ended early: it was killed, or died.
    ended: str = ""
    #: A word that it did not finish.
    cut: str = ""

    @property
    def caught(self) -> Failure | None:
        """The first failure by a clause that the mutant breaks."""
        clauses = self.mutant.clauses if self.mutant is not None else ()
        return next((failure for failure in self.failures if failure.clause in clauses), None)


#: Gives the next trial, or None: wait for one that runs.  Ends when there is none left.
Plan = Callable[[Sequence[Test]], Iterator["Trial"]]


class Trials:
    """A pytest plugin: instead of running the collected tests it makes a plan of trials and carries it out."""

    def __init__(self, plan: Plan, done: Callable[[Trial], None], jobs: int) -> None:
        self._plan = plan
        self._done = done
        self._jobs = jobs
        self.collected = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        from kvbaton_conformance.plugin import KIT

        if session.testsfailed or not session.items:
            return True
        self.collected = True
        results = session.config.stash[KIT].results
        items = {results[item.nodeid].id: item for item in session.items if item.nodeid in results}
        tests = [
            Test(id, frozenset(results[item.nodeid].clauses), results[item.nodeid].level, "two-processes" in item.name)
            for id, item in items.items()
            if not item.get_closest_marker("skip")
        ]
        waiting = self._plan(tests)
        running: dict[int, _Running] = {}
        more = True
        while more or running:
            while more and len(running) < self._jobs:
                trial = next(waiting, None)
                if trial is None:
                    more = False
                    break
                one = _start(trial, items)
                running[one.pipe] = one
            if not running:
                break
            for pipe in _ready(running):
                one = running[pipe]
                if one.read():
                    del running[pipe]
                    self._done(one.finish())
        return True


@dataclass
class _Running:
    trial: Trial
    pid: int
    pipe: int
    started: float
    said: bytes = b""
    killed: bool = False

    def read(self) -> bool:
        """Whether it has ended."""
        if time.monotonic() > self.started + self.trial.limit and not self.killed:
            self.killed = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        if not select.select([self.pipe], [], [], 0)[0]:
            return False
        data = os.read(self.pipe, 1 << 16)
        self.said += data
        return not data

    def finish(self) -> Trial:
        os.close(self.pipe)
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started and not ended
        for path in Path("/dev/shm").glob(f"kvbaton-reference-{self.pid}-*"):
            path.unlink(missing_ok=True)  # what its mutant has left
        trial = self.trial
        trial.seconds = time.monotonic() - self.started
        for line in self.said.splitlines():
            try:
                word = json.loads(line)
            except ValueError:
                # it was killed, or died, while it said this: of what came before nothing is lost
                trial.cut = line.decode(errors="replace")[:100]
                continue
            if "died" in word:
                trial.ended = word["died"]
                continue
            if "failure" in word:
                trial.failures.append(Failure(**word["failure"]))
            trial.ran += 1
        if self.killed:
            trial.ended = f"hung: killed after {trial.limit:g} s"
        elif status and not trial.ended:
            trial.ended = f"died: status {status}"
        if trial.cut:
            trial.ended = f"{trial.ended or 'ended'}, in the middle of a word: {trial.cut!r}"
        return trial


def _ready(running: dict[int, _Running]) -> list[int]:
    ready = set(select.select(list(running), [], [], 0.2)[0])
    late = {pipe for pipe, one in running.items() if time.monotonic() > one.started + one.trial.limit}
    return list(ready | late)


def _start(trial: Trial, items: dict[str, pytest.Item]) -> _Running:
    read, write = os.pipe()
    os.set_inheritable(write, False)
    pid = os.fork()
    if pid:
        os.close(write)
        return _Running(trial, pid, read, time.monotonic())
    status = 1
    try:
        os.setsid()
        os.close(read)
        with tempfile.TemporaryFile() as log:
            for descriptor in (1, 2):
                os.dup2(log.fileno(), descriptor)
            _run(trial, [items[id] for id in trial.tests if id in items], lambda word: os.write(write, word))
        status = 0
    except BaseException as error:
        os.write(write, json.dumps({"died": f"{type(error).__name__}: {error}"}).encode() + b"\n")
    finally:
        os._exit(status)


def _run(trial: Trial, items: Sequence[Any], say: Callable[[bytes], object]) -> None:
    """In the fork: break it, run the tests, say what fails."""
    from kvbaton_conformance.leaks import own
    from kvbaton_conformance.plugin import KIT

    _be_impatient()
    if not items:
        return
    kit = items[0].config.stash[KIT]
    kit.warm |= set(kit.judged)  # the process that was forked has imported everything
    for descriptor in Path("/proc/self/fd").iterdir():
        own(descriptor=int(descriptor.name))
    with contextlib.ExitStack() as stack:
        if trial.mutant is not None:
            stack.enter_context(trial.mutant.installed())
            if trial.mutant.connector:
                _judge_instead(items, trial.mutant.connector)
        for number, item in enumerate(items):
            following = items[number + 1] if number + 1 < len(items) else None
            item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
            result = kit.results[item.nodeid]
            if result.outcome != "failed":
                say(json.dumps({"passed": result.id}).encode() + b"\n")
                continue
            failure = Failure(result.id, result.broken, result.message[:2000])
            say(json.dumps({"failure": asdict(failure)}).encode() + b"\n")
            if failure.clause in trial.until:
                break
        for close in kit.closers:
            close()


def _judge_instead(items: Sequence[Any], connector: str) -> None:
    """The classes that judge a connector judge this one."""
    from kvbaton_conformance.plugin import KIT
    from kvbaton_conformance.subject import Reference, Subject, SubjectRefused, resolve

    for judged in items[0].config.stash[KIT].judged.values():
        if isinstance(judged.subject, Subject):
            try:
                judged.subject = resolve(connector, {}, Reference(connector), connector)
            except SubjectRefused as error:
                judged.subject = _Refuses(error)


class _Refuses:
    """Stands for a subject that could not even be opened: whatever asks it fails with the reason.

    The error is kept with its traceback, and so is a connector that could not be closed: what the collector says of its
    sockets would otherwise come in the middle of a test, and stand for the reason.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(str(self._error))


def _be_impatient() -> None:
    """Shorter bounds of the kit's own waiting, so that a mutant that hangs costs seconds."""
    from kvbaton_conformance import deployment, harness

    harness.PATIENCE = deployment.PATIENCE = PATIENCE
    harness.Pair.pump_until.__defaults__ = (*(harness.Pair.pump_until.__defaults__ or ())[:-1], PATIENCE)


def carry_out(base: str, plan: Plan, done: Callable[[Trial], None], jobs: int) -> None:
    """Collect the tests against a base connector and run the trials that ``plan`` makes of them.

    Raises :class:`RuntimeError` where nothing can be collected.
    """
    import gc

    trials = Trials(plan, done, jobs)
    arguments = [
        "-q", "-s", "-p", "no:cacheprovider", "--no-header", "--tb=line", "--conformance-partial", "-o", "addopts=",
        "--rootdir", "/", "--connector", BASES[base], "--pyargs", "kvbaton_conformance.run",
        "-W", "ignore::pytest.PytestAssertRewriteWarning",  # the kit is loaded already: it runs this
        *([f"{_MODULE}.test_scripted"] if base == "core" else []),
    ]  # fmt: skip
    with tempfile.TemporaryFile("w+") as log, contextlib.redirect_stdout(log):
        gc.freeze()
        pytest.main(arguments, plugins=[trials])
        log.seek(0)
        said = log.read()
    if not trials.collected:
        raise RuntimeError(f"the standard tests could not be collected against {BASES[base]}:\n{said}")
