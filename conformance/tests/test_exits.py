"""The ways to end that are tried for a connector: what goes wrong with one is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton_conformance.exits import Way, end_of

LOUD = """
import atexit, os, sys
from kvbaton_loopback import plugin
if os.environ.get("LOUD") == "words":
    atexit.register(print, "a word too many", file=sys.stderr)
else:
    atexit.register(os._exit, 3)
"""


@pytest.mark.clause("T10")
@pytest.mark.parametrize(("how", "seen"), [("words", "status 0 after"), ("status", "status 3 after")])
def test_a_bad_end_is_told(how: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loud.py").write_text(LOUD)
    monkeypatch.setenv("LOUD", how)
    told = end_of(Way("loud:plugin", "data", "close"), [str(tmp_path)])
    assert told.startswith("data, close: ")
    assert seen in told
    assert ("a word too many" in told) == (how == "words")


@pytest.mark.clause("T10")
def test_the_command_tries_what_a_connector_reaches() -> None:
    command = [sys.executable, "-m", "kvbaton_conformance.exits", "--transport", "loopback"]
    done = subprocess.run([*command, "--count", "2", "--jobs", "2", "--case", "data", "--case", "live-peer"],
                          capture_output=True, text=True, timeout=120, check=False)  # fmt: skip
    assert done.stdout.startswith("4 exits, 0 wrong, ")
    assert done.returncode == 0
    unknown = subprocess.run([*command[:-1], "loopbak"], capture_output=True, text=True, timeout=60, check=False)
    assert unknown.returncode == 2
    assert 'Did you mean "loopback"?' in unknown.stderr
