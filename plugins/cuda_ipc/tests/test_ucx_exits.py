"""T10: however a process ends, it does so with status 0 and silently, with and without ``close()``."""

import pytest
from ucx_exits import CASES, CLOSES, end_of, possible


@pytest.mark.slow
@pytest.mark.clause("T10")
@pytest.mark.parametrize("closes", CLOSES)
@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_silently(case, closes):
    """Each way once; ``ucx_exits.py --count 50`` runs many."""
    if possible(case, closes):
        assert not end_of(case, closes)
