"""T10: however a process ends, it does so with status 0 and silently, with and without ``close()``."""

import pytest

from kvbaton_conformance.exits import CASES, CLOSES, Way, end_of


@pytest.mark.slow
@pytest.mark.clause("T10")
@pytest.mark.parametrize("closes", CLOSES)
@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_silently(case, closes):
    """Each way once; ``python -m kvbaton_conformance.exits --transport ucx`` tries many."""
    way = Way("ucx", case, closes, stalls=case == "stopped-peer")
    if way.possible:
        assert not end_of(way)
