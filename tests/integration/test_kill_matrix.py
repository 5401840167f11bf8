"""Stages as processes, killed and stopped at each point of a hand-off: see :mod:`kvbaton_conformance.kill_matrix`.

Here the whole matrix runs over one transport and a slice of it over each of the others; the module's command runs all
of it over any, as often as wanted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvbaton import PDRuntime, Request, SamplingParams, load
from kvbaton.connector import Need
from kvbaton.errors import KvbatonError
from kvbaton.plugins import choose_connector
from kvbaton_conformance import shared_memory
from kvbaton_conformance.halt import DIE, GO, LAST_WORDS, SEIZE, STATUS, Point
from kvbaton_conformance.kill_matrix import CELLS, Cell, Outcome, matrix, shared_memory_left

#: Everything of one stage, and of the ways to hang that cost seconds only where something is waited for; the rest is
#: for the command.
WHOLE = [
    cell for cell in CELLS
    if cell.victim != "both" and (cell.how is not SEIZE or cell.point in (Point.POSTED, Point.COMMITTED))
]  # fmt: skip
#: Bytes are under way and nobody knows how many have come.
SLICE = [cell for cell in WHOLE if cell.point is Point.POSTED]
TRIALS = [("example_stream", cell) for cell in WHOLE]
TRIALS += [(transport, cell) for transport in ("example_shm", "nixl") for cell in SLICE]

Running = Mapping[tuple[str, Cell], Future[Outcome]]


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    """The cells that are asked for, several at a time: most of a cell is waiting for deadlines."""
    wanted: list[tuple[str, Cell]] = [
        (item.callspec.params["transport"], item.callspec.params["cell"])  # type: ignore[misc]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_survivors
    ]
    usable = {transport: _usable(transport) for transport in dict.fromkeys(name for name, _ in wanted)}
    before = shared_memory.objects()
    with matrix([(name, cell) for name, cell in wanted if usable[name]]) as futures:
        yield futures
    left = shared_memory_left(before)
    assert not left, f"T10: shared-memory objects are left of stages that were killed: {left}"


def _usable(transport: str) -> bool:
    try:
        choose_connector(transport, Need("host", "cross_process"))
    except KvbatonError:
        return False
    return True


@pytest.mark.clause("C2.5", "C4.1", "C5.1", "C5.2", "C6.1", "C6.2", "C6.3", "C6.4", "C6.7", "C8.4", "T7", "T10")
@pytest.mark.parametrize(("transport", "cell"), TRIALS, ids=lambda value: str(value))
def test_survivors(running: Running, transport: str, cell: Cell) -> None:
    """They say why, keep what they must, serve on, and end cleanly."""
    if (transport, cell) not in running:
        pytest.skip(f"{transport} cannot be used here")
    outcome = running[transport, cell].result(timeout=100)
    assert (outcome.ended == "length") == cell.survives


#: An application with one request under way, that does nothing else until it is killed.
APPLICATION = """
import json, sys
from kvbaton import PDRuntime, Request, SamplingParams, load
runtime = PDRuntime.start(load(overrides=json.loads(sys.argv[1]))[0])
runtime.add_request(Request((49_999, *range(20)), SamplingParams(max_tokens=12)))
print(json.dumps({name: runtime.stage(name).pid for name in runtime.stages}), flush=True)
sys.stdin.read()
"""


@pytest.mark.clause("C6.6", "C6.7", "T10")
@pytest.mark.parametrize("transport", ["example_stream", "nixl"])
@pytest.mark.parametrize("busy", [False, True], ids=["drains", "never-drains"])
def test_stages_do_not_outlive_a_killed_application(tmp_path: Path, transport: str, busy: bool) -> None:
    """They end once what is under way is over, or at their shutdown deadline.  No file stays."""
    if not _usable(transport):
        pytest.skip(f"{transport} cannot be used here")
    # where nothing is waited for in vain no deadline passes, however busy the machine is
    shutdown, point = 4.0 if busy else 40.0, Point.POSTED
    held = {"folder": str(tmp_path), "point": point.value}
    control = Path(tempfile.mkdtemp(prefix="kvbaton-kill-"))  # a short path: sockets take no long one
    settings = {
        "model": "scripted:1", "engine.name": "kvbaton_conformance.halt:engine", "engine.options": held,
        "transport.name": "kvbaton_conformance.halt:connector",
        "transport.options": {"named": transport, **held}, "recovery.mode": "off", "stages.launch": "process",
        "transfer.chunk_bytes": 512,
        "deadline.shutdown": shutdown, "control.dir": str(control),
    }  # fmt: skip
    with subprocess.Popen(
        [sys.executable, "-c", APPLICATION, json.dumps(settings)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as application:  # fmt: skip
        assert application.stdout is not None
        pids: dict[str, int] = json.loads(application.stdout.readline())
        try:
            _wait_until((tmp_path / point.value).exists, 20, "the request is held")
            killed = time.monotonic()
            application.kill()
            application.wait()
            if not busy:
                assert not any(map(_ended, pids.values())), "what is under way is not left"
                (tmp_path / GO).touch()
            _wait_until(lambda: all(map(_ended, pids.values())), shutdown + 30, "the stages end")
            took = time.monotonic() - killed
            assert busy or took < shutdown, "nothing was left to wait for"
            assert not busy or took > shutdown, "what was under way was left"
            _wait_until(lambda: not any(control.iterdir()), 20, "the control directory is empty")
        finally:
            for pid in [pid for pid in pids.values() if not _ended(pid)]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(control, ignore_errors=True)


def _ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def _wait_until(condition: Callable[[], bool], seconds: float, what: str) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not so within {seconds:g} s"
        time.sleep(0.01)


@pytest.mark.clause("C6.3", "C6.4")
def test_a_stage_that_ends_by_itself_is_quoted(tmp_path: Path) -> None:
    """Its exit status and its last lines are in what the caller is told, at once."""
    held = {"folder": str(tmp_path), "point": Point.DECODING.value}
    settings, _ = load(
        overrides={
            "model": "scripted:1", "engine.name": "kvbaton_conformance.halt:engine", "engine.options": held,
            "transport.name": "kvbaton_conformance.halt:connector",
            "transport.options": {"named": "example_stream", **held}, "recovery.mode": "off",
            "stages.launch": "process", "control.heartbeat": 60.0, "deadline.prefill_start": 60.0,
        }
    )  # fmt: skip
    with PDRuntime.start(settings) as runtime:
        key = runtime.add_request(Request((DIE, 1, 2), SamplingParams(max_tokens=2)))
        began = time.monotonic()
        (output,) = runtime.stream(key)
        took = time.monotonic() - began
    told = str(output.error)
    assert f"prefill-0 ended: exit status {STATUS}" in told
    assert f"prefill-0: {LAST_WORDS}" in told
    assert took < 20  # every deadline and the heartbeat are longer
