"""T10: however a process ends, it does so with status 0 and silently, with and without ``close()``."""

import pytest

from kvbaton_conformance.exits import CASES, CLOSES, Way, end_of

#: Over TCP the peer has a part in a write: one that stands still lets it stay under way.
TCP = {"ucx": {"TLS": "tcp,self"}}


@pytest.mark.slow
@pytest.mark.clause("T10")
@pytest.mark.parametrize("closes", CLOSES)
@pytest.mark.parametrize("case", CASES)
def test_a_process_ends_silently(case, closes):
    """Each way once; ``python -m kvbaton_conformance.exits --transport nixl`` tries many."""
    stopped = case == "stopped-peer"
    way = Way("nixl", case, closes, options=TCP if stopped else {}, stalls=stopped)
    if way.possible:
        assert not end_of(way)
