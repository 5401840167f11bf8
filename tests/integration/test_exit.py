"""The end of an application whose requests were served and verified (docs/field-failures.md, 33)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

_PROGRAM = """
import sys
from kvbaton import PDRuntime, Request, SamplingParams, load
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model

request = Request(tuple(range(20)), SamplingParams(max_tokens=4))
wanted = scripted_model("scripted:7", ScriptedOptions()).generate(request)[0]


def main(transport, end):
    settings, _ = load(overrides={
        "model": "scripted:7", "engine.name": "kvbaton_conformance.scripted_plugin:plugin", "transport.name": transport,
    })
    runtime = PDRuntime.start(settings)
    for _ in range(3):
        outputs = list(runtime.stream(runtime.add_request(request)))
        assert tuple(token for output in outputs for token in output.token_ids) == wanted
    if end == "closed":
        runtime.close()
    elif end == "live":
        runtime.add_request(Request(tuple(range(100, 130)), SamplingParams(max_tokens=500)))
    elif end == "told":
        print("served", flush=True)
        sys.stdin.read()
    return runtime


if __name__ == "__main__":
    runtime = main(*sys.argv[1:])
"""

#: Seconds until a process that was left alone has ended.
PATIENCE = 30.0


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "application.py"
    path.write_text(_PROGRAM, encoding="utf-8")
    return path


def stages(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children(recursive=True) if child.is_running()]


@pytest.mark.clause("T10", "C6.2", "C6.6")
@pytest.mark.parametrize(
    ("transport", "end"),
    [
        ("loopback", "closed"), ("loopback", "not-closed"), ("example_shm", "closed"), ("example_shm", "not-closed"),
        ("example_stream", "live"),
    ],
)  # fmt: skip
def test_an_application_exits_with_status_zero_and_silently(program: Path, transport: str, end: str) -> None:
    """After three requests: closed; left open; left open with a fourth one live."""
    done = subprocess.run([sys.executable, program, transport, end], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


@pytest.mark.clause("T10", "C6.6")
def test_a_killed_application_leaves_no_stage(program: Path) -> None:
    """The application's process is killed after its requests were served: its stages drain and end, and say nothing."""
    with subprocess.Popen(
        [sys.executable, program, "example_shm", "told"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as application:  # fmt: skip
        assert application.stdout is not None
        assert application.stderr is not None
        try:
            assert application.stdout.readline() == b"served\n"
            left = stages(application.pid)
            assert len(left) == 2
        finally:
            os.kill(application.pid, signal.SIGKILL)
        application.wait(PATIENCE)
        started = time.monotonic()
        _, alive = psutil.wait_procs(left, timeout=PATIENCE)
        assert not alive, f"still there after {time.monotonic() - started:.0f} s"
        assert application.stderr.read() == b""
