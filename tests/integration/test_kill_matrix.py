"""Stages as processes, killed and stopped at each point of a hand-off: see :mod:`kvbaton_conformance.kill_matrix`.

Here the whole matrix runs over one transport and a slice of it over each of the others; the module's command runs all
of it over any, as often as wanted.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvbaton import PDRuntime, Request, SamplingParams, load
from kvbaton.connector import Need
from kvbaton.errors import KvbatonError
from kvbaton.plugins import choose_connector
from kvbaton_conformance.halt import DIE, LAST_WORDS, STATUS, Point
from kvbaton_conformance.kill_matrix import CELLS, Cell, Outcome, matrix

#: Everything of one stage; both at once is for the command.
WHOLE = [cell for cell in CELLS if cell.victim != "both"]
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
    with matrix([(name, cell) for name, cell in wanted if usable[name]]) as futures:
        yield futures


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


@pytest.mark.clause("C6.3", "C6.4")
def test_a_stage_that_ends_by_itself_is_quoted(tmp_path: Path) -> None:
    """Its exit status and its last lines are in what the caller is told, at once."""
    held = {"folder": str(tmp_path), "point": Point.DECODING.value}
    settings, _ = load(
        overrides={
            "model": "scripted:1", "engine.name": "kvbaton_conformance.halt:engine", "engine.options": held,
            "transport.name": "kvbaton_conformance.halt:connector",
            "transport.options": {"named": "example_stream", **held}, "stages.launch": "process",
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
    assert took < 5  # every deadline and the heartbeat are longer
