"""The real machines in the model's world: every reachable state of small systems, long walks through larger ones.

After every step of every machine, phase, messages and verdict are compared with the model's machine (``oracle``); after
every move, the model's invariants must hold; every end must be clean.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import check
import oracle
import pytest
import walk
import world
from configs import BY_NAME

MUTANTS = json.loads((Path(__file__).parent / "model" / "mutants.json").read_text())


@pytest.mark.clause("C1.2", "C2.1", "C2.5", "C4.1", "C4.2", "C5.1", "C5.2", "C6.4", "C7.1", "C7.3")
@pytest.mark.parametrize(
    ("name", "delayed"),
    [
        ("plain", False), ("plain", True), ("replay", False), ("reuse", False), ("sever", False), ("sever", True),
        ("starve", False), ("stall-fatal", True), pytest.param("crash-both", True, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_every_reachable_state_is_sound_and_every_end_is_clean(name, delayed):
    """The larger systems: ``python search.py``."""
    config = BY_NAME[name]
    with oracle.real_machines(config, delayed):
        verdict = check.check(config)
    assert verdict.complete
    assert verdict.problem is None, str(verdict)


def follow(config: world.World, steps: list[str]) -> list:
    """All worlds that the steps lead to; a step that the real machines do not offer is left out."""
    worlds = [world.first(config)]
    for step in steps:
        after = []
        for w in worlds:
            found = []
            for label, _, w2, complaint in world.moves(w, config):
                if check.show(label) == step:
                    assert complaint is None, f"{step}: {complaint}"
                    for problem in world.broken(w2, config):
                        pytest.fail(f"{step}: {problem}")
                    found.append(w2)
            after += found or [w]
        worlds = list(dict.fromkeys(after))
    return worlds


def settle(w: world.World, config: world.Config, seed: int) -> None:
    """Make obligatory moves, in some order, until there are none; the end must be clean."""
    rng = random.Random(seed)
    for _ in range(500):
        choices = []
        for label, must, w2, complaint in world.moves(w, config):
            if must and w2 != w:
                assert complaint is None, f"{label}: {complaint}"
                choices.append(w2)
        if not choices:
            unclean = world.unfinished if config.must_admit else world.source_unfinished
            assert unclean(w, config) is None, unclean(w, config)
            return
        w = rng.choice(choices)
        for problem in world.broken(w, config):
            pytest.fail(problem)
    pytest.fail("obligatory moves do not end")


@pytest.mark.clause("C2.1", "C2.5", "C4.1", "C4.2", "C5.1", "C5.2", "C5.3", "C6.2", "C6.4", "C7.1", "C7.2", "C1.3")
@pytest.mark.parametrize("mutant", MUTANTS, ids=[f"{n}-{m['guard']}-{m['config']}" for n, m in enumerate(MUTANTS)])
def test_what_breaks_a_protocol_without_one_guard_does_not_break_ours(mutant):
    config = BY_NAME[mutant["config"]]
    with oracle.real_machines(config):
        for number, w in enumerate(follow(config, mutant["steps"])):
            settle(w, config, number)


@pytest.mark.clause("C2.5", "C5.1", "C5.2", "C6.2", "C6.4", "C7.1")
@pytest.mark.parametrize("delayed", [False, True], ids=["answers at once", "answers later"])
@pytest.mark.parametrize("config", [walk.BIG, walk.SHUTDOWN], ids=lambda config: config.name)
def test_walks_through_a_large_system_with_every_fault_end_clean(config, delayed):
    with oracle.real_machines(config, delayed):
        for seed in range(25):
            _, problem, steps = walk.walk(config, seed)
            assert problem is None, f"seed {seed}: {problem}: {[check.show(s) for s in steps]}"
