"""How processes end, and what their peers learn, on a device that is none; on a real one see test_device.py."""

import deaths
import exits
import pytest


@pytest.mark.clause("T5", "C6.4")
@pytest.mark.parametrize("killed", ["source", "target"])
def test_a_process_that_dies(killed):
    found = deaths.one_round(killed, (None, None), 1 << 20, None, 0.0, 2)
    assert not any(found.get("LATE BYTES", ()))


@pytest.mark.clause("T10")
@pytest.mark.parametrize(("case", "closes"), [("busy", "no-close"), ("exception", "close")])
def test_exits(case, closes):
    assert exits.end_of(case, closes, device=False) == ""
