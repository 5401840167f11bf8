"""The simulator itself: a seed says everything, moves can be left out, and what is broken is found and told."""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.engine import Role, StageEngine
from kvbaton_conformance.mutants import mutants
from kvbaton_conformance.scripted import ScriptedDevice, ScriptedEngine
from kvbaton_conformance.simulate.mutants import find, guards
from kvbaton_conformance.simulate.run import play, replay
from kvbaton_conformance.simulate.scenario import FAULTS, Scenario
from kvbaton_conformance.simulate.shrink import shrink, tell
from kvbaton_conformance.simulate.world import Broken, ScriptedEngines, World


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Stages that die in a simulation say so, which is no news here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_a_seed_says_everything() -> None:
    first, second = play(Scenario.draw(11)), play(Scenario.draw(11))
    assert first.moves == second.moves
    assert (first.handoffs, first.finished, first.made) == (second.handoffs, second.finished, second.made)
    assert first.broken is None
    assert first.handoffs > 1


def test_the_moves_of_a_run_make_the_same_run_again() -> None:
    played = play(Scenario.draw(12))
    again = replay(played.scenario, played.moves)
    assert again.moves == played.moves
    assert (again.handoffs, again.finished) == (played.handoffs, played.finished)


def test_any_part_of_a_run_is_a_run() -> None:
    """Moves that cannot be made without those that were left out are passed over, and everything still ends."""
    played = play(Scenario.draw(13))
    draw = random.Random(1)
    for _ in range(5):
        some = [move for move in played.moves if draw.random() < 0.5]
        again = replay(played.scenario, some)
        assert again.broken is None
        assert len(again.moves) <= len(some)


def test_scenarios_differ_and_every_fault_happens() -> None:
    drawn = [Scenario.draw(seed) for seed in range(200)]
    assert set().union(*(scenario.faults for scenario in drawn)) == set(FAULTS)
    assert any(not scenario.faults for scenario in drawn)
    for name in ("prefills", "decodes", "planes", "buffering", "revocable", "exact", "restarts", "attempts", "queue"):
        assert len({getattr(scenario, name) for scenario in drawn}) > 1, name


@pytest.mark.clause("C6.7", "C8.4", "C5.2", "A1")
def test_a_hundred_runs_hold() -> None:
    results = [play(Scenario.draw(seed)) for seed in range(5000, 5100)]
    assert [str(result.broken) for result in results if result.broken] == []
    assert sum(result.handoffs for result in results) > 500
    assert sum(result.finished for result in results) > 200


@pytest.mark.clause("C6.2")
def test_a_connection_that_broke_is_not_whole_before_its_stage_has_said_so() -> None:
    """A request that may not begin again fails by it, and that is what was asked for."""
    assert play(Scenario.draw(3_000_000_010_455)).broken is None


@pytest.mark.parametrize(
    ("guard", "clauses"),
    [
        ("P.cancel-waits-for-handles", {"C5.1"}),
        ("D.cancel-holds", {"C5.2"}),
        ("D.received-needs-commit", {"C7.4", "C4.2", "C6.3"}),
        ("P.drain-waits-for-device", {"C5.3", "C5.1"}),
    ],
)
def test_a_guard_that_is_taken_away_is_missed(guard: str, clauses: set[str]) -> None:
    (mutant,) = [mutant for mutant in guards() if mutant.guard == guard]
    found = find(mutant.name, 0, 60)
    assert found.run, f"{guard} was not missed in 60 runs"
    assert found.clause in clauses


@pytest.mark.clause("C5.2")
def test_a_failing_run_becomes_a_short_story() -> None:
    (name,) = [mutant.name for mutant in guards() if mutant.guard == "D.cancel-holds"]
    found = find(name, 0, 60)
    with mutants()[name].installed():
        failed = play(Scenario.draw(found.seed))
        short = shrink(failed, seconds=20)
        assert short.broken is not None
        assert short.broken.clause == found.clause
        assert len(short.moves) < min(len(failed.moves), 80)
        story = tell(short.scenario, short.moves)
    assert story.splitlines()[-1].startswith(f"!! {found.clause}: ")
    assert "gives up" in story
    # the same moves break nothing where nothing is broken
    assert replay(short.scenario, short.moves).broken is None


@pytest.mark.clause("C6.2", "C6.3")
@pytest.mark.parametrize("seed", [2026000000940, 2026000230])
def test_a_connection_that_nothing_mends_is_given_up_aloud(seed: int) -> None:
    """Runs in which others serve in its place, so that no request misses it."""
    assert play(Scenario.draw(seed)).broken is None


def test_an_engine_of_ones_own_is_watched_by_the_protocol_alone() -> None:
    """What a world knows of an engine's memory it has from the calls that cross the protocol."""

    class Unwilling(ScriptedEngines):
        """Its D refuses whatever it is asked, although there is room."""

        def open(self, role: Role) -> tuple[StageEngine, ScriptedDevice]:
            engine, device = super().open(role)
            assert isinstance(engine, ScriptedEngine)
            if role is Role.DECODE:
                engine.refuse = lambda admission: "it does not like it"
            return engine, device

    result = play(Scenario(seed=1), lambda scenario: Unwilling(scenario))
    assert isinstance(result.broken, Broken)
    assert result.broken.clause == "C2.4"


def test_a_move_that_cannot_be_made_changes_nothing() -> None:
    world = World(Scenario(seed=1))
    before = world.coordinator.peers()
    for move in (("hear", "decode-0"), ("abort", 0), ("land", (0, 0, 0), False), ("kill", "prefill-0"), ("expire",)):
        assert not world.make(move)
    assert world.coordinator.peers() == before


def test_the_command_says_what_it_did() -> None:
    command = [sys.executable, "-m", "kvbaton_conformance.simulate"]
    done = subprocess.run([*command, "--handoffs", "200", "--seed", "4", "--jobs", "1"], capture_output=True, text=True,
                          timeout=120, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
    last = done.stdout.strip().splitlines()[-1]
    assert last.startswith("HOLDS: 0 violations; ")
    assert "seed 4" in last
    assert "hand-offs/s, 1 processes" in last
    told = subprocess.run(
        [*command, "--run", "11", "--jobs", "1"], capture_output=True, text=True, timeout=120, check=False
    )
    assert told.returncode == 0
    assert "C places r" in told.stdout


def test_no_worker_outlives_the_command() -> None:
    command = [sys.executable, "-m", "kvbaton_conformance.simulate", "--handoffs", "1000000", "--jobs", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as running:
        by = time.monotonic() + 60.0
        while _seconds(running.pid) < 1.5:  # of which starting takes less: a worker is at work
            assert time.monotonic() < by, "no worker has begun"
            threading.Event().wait(0.02)
        running.kill()
        running.communicate(timeout=60.0)  # the pipe ends when its last holder has
    assert running.returncode == -signal.SIGKILL


def _seconds(pid: int) -> float:
    """Of a processor, of the child of ``pid`` that has had most."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    fields = [Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split() for child in children]
    return max((int(each[11]) / os.sysconf("SC_CLK_TCK") for each in fields), default=0.0)
