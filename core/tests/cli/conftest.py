"""The command line over a runtime without stages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))

import fake_runtime

#: What a subprocess runs in place of the console script.
PROGRAM = (
    f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import fake_runtime; fake_runtime.install();"
    " from kvbaton.cli import main; main()"
)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.upper().startswith("KVBATON_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def fake(monkeypatch):
    """The runtime class that the command line finds, with its log emptied."""
    monkeypatch.delitem(sys.modules, "kvbaton.cli.run", raising=False)
    monkeypatch.setitem(sys.modules, "kvbaton.runtime", None)
    fake_runtime.install()
    fake_runtime.FakeRuntime.log.clear()
    yield fake_runtime.FakeRuntime
    sys.modules.pop("kvbaton.cli.run", None)


@pytest.fixture
def kvbaton(fake):
    """``kvbaton(*arguments, stdin=...)`` in this process."""

    def run(*arguments: str, stdin: str | bytes | None = None) -> Result:
        from kvbaton.cli.app import app

        return CliRunner().invoke(app, list(arguments), input=stdin)

    return run


@pytest.fixture
def process():
    """``process(*arguments)``: the same as a process of its own, with pipes; killed at the end where it still runs."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, program: str = PROGRAM, **how) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **how},
        )  # fmt: skip
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=30)
