"""A minute's worth of what :mod:`kvbaton_conformance.soak` does for half an hour."""

from __future__ import annotations

import pytest

from kvbaton_conformance.long_run import SCRIPTED
from kvbaton_conformance.soak import Plan, play


@pytest.mark.clause("C2.5", "C5.2", "C8.4", "T10", "T12")
@pytest.mark.parametrize("transport", ["example_shm", "nixl"])
def test_a_deployment_at_load_with_cancels_ends_as_it_should(transport: str) -> None:
    result = play(Plan({**SCRIPTED, "transport.name": transport}, seconds=6.0, every=0.2))
    assert result.ends["right"] > 50
    assert result.ends["cancelled"] > 10
    assert not [str(level) for level in result.levels() if level.figure != "memory" and not level.holds]
