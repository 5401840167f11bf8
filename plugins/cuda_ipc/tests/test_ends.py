"""How processes end, and what their peers learn, on a device that is none; on a real one see test_device.py."""

from pathlib import Path

import deaths
import pytest

from kvbaton_conformance.exits import Way, end_of

#: Where ``fake_plugin`` is.
HERE = str(Path(__file__).parent)


@pytest.mark.clause("T5", "C6.4")
@pytest.mark.parametrize("killed", ["source", "target"])
def test_a_process_that_dies(killed):
    found = deaths.one_round(killed, (None, None), 1 << 20, None, 0.0, 2)
    assert not any(found.get("LATE BYTES", ()))


@pytest.mark.clause("T10")
@pytest.mark.parametrize(("case", "closes"), [("busy", "no-close"), ("exception", "close")])
def test_exits(case, closes):
    way = Way("fake_plugin:plugin", case, closes, options={"programs": 1}, nbytes=1 << 20)
    assert end_of(way, [HERE]) == ""
