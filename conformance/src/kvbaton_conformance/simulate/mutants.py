"""Is each guard of the protocol needed?  Take it away, and see in which run somebody notices.

The mutants are those of :mod:`kvbaton_conformance.mutants` that remove a guard of the protocol's model, or one that
came later and is marked ``simulated``.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvbaton_conformance.mutants import Mutant, mutants
from kvbaton_conformance.simulate.run import play
from kvbaton_conformance.simulate.scenario import Scenario


@dataclass(frozen=True)
class Found:
    """``run`` counts from 1; 0: not found in ``runs``."""

    mutant: str
    guard: str
    run: int
    seed: int
    clause: str
    text: str


def guards() -> list[Mutant]:
    """Every mutant that a simulation can show: a removed guard, in core."""
    return [mutant for mutant in mutants().values() if (mutant.guard or mutant.simulated) and not mutant.connector]


def find(name: str, first: int, runs: int) -> Found:
    """The first run from seed ``first`` on that a mutant breaks."""
    mutant = mutants()[name]
    guard = mutant.guard or name
    with mutant.installed():
        for number in range(runs):
            try:
                result = play(Scenario.draw(first + number))
            except Exception as error:  # a machine that trips over itself is noticed, too
                return Found(name, guard, number + 1, first + number, "", f"{type(error).__name__}: {error}")
            if result.broken is not None:
                broken = result.broken
                return Found(name, guard, number + 1, first + number, broken.clause, str(broken))
    return Found(name, guard, 0, 0, "", "")
