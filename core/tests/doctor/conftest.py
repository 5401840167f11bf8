"""Transports that are broken in one way, and children that must not outlive a test."""

import sys
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "pair"))


@pytest.fixture
def no_child_is_left():
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    after = {child.pid for child in psutil.Process().children(recursive=True)}
    assert after <= before
