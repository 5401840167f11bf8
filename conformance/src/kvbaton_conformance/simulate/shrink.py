"""From a failing run to a short one: leave out moves as long as the same thing goes wrong."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvbaton_conformance.simulate.run import MakeEngines, Result, replay
from kvbaton_conformance.simulate.scenario import Scenario
from kvbaton_conformance.simulate.world import Move


def shrink(
    failed: Result,
    engines: MakeEngines | None = None,
    *,
    seconds: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> Result:
    """A run that breaks the same clause with fewer moves; the given one where it does not fail again."""
    assert failed.broken is not None
    clause, by = failed.broken.clause, clock() + seconds

    def fails(moves: Sequence[Move]) -> Result | None:
        result = replay(failed.scenario, moves, engines)
        return result if result.broken is not None and result.broken.clause == clause else None

    best = fails(failed.moves)
    if best is None:
        return failed
    size = max(len(best.moves) // 2, 1)
    while clock() < by:
        start, shorter = 0, False
        while start < len(best.moves) and clock() < by:
            found = fails(best.moves[:start] + best.moves[start + size :])
            if found is not None and len(found.moves) < len(best.moves):
                best, shorter = found, True
            else:
                start += size
        if size > 1:
            size //= 2
        elif not shorter:
            break
    return best


def tell(scenario: Scenario, moves: Sequence[Move], engines: MakeEngines | None = None) -> str:
    """What happens in a run, line by line."""
    lines: list[str] = []
    replay(scenario, moves, engines, lines.append)
    return "\n".join(lines)
