"""What the command line logs, and how."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kvbaton.cli.app import app

RUN = (
    "run", "--model", "scripted:7", "--set", "engine.name=kvbaton_conformance.scripted_plugin:plugin", "--transport",
    "loopback", "--prompt", "a b c", "--prompt", "d e f", "--max-tokens", "2",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("kvbaton")
    before, level = root.handlers[:], root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)
    ours.setLevel(logging.NOTSET)


def run(*more: str) -> list[str]:
    """Lines on stderr of a run that goes well, in this process."""
    result = CliRunner().invoke(app, [*RUN, *more])
    assert result.exit_code == 0, result.output
    return result.stderr.splitlines()


def test_as_json_each_record_is_one_line_with_its_ids() -> None:
    records = [
        json.loads(line) for line in run("--set", "log.level=debug", "--set", "log.format=json") if line[0] == "{"
    ]
    ended = [record for record in records if record.get("milestone") == "finished"]
    assert {record["request"] for record in ended} == {"1", "2"}
    assert all(len(record["transfer"]) == 32 for record in ended)
    assert {logging.getLevelName(record["level"].upper()) for record in records} <= {logging.DEBUG, logging.INFO}


def test_as_text_the_ids_are_in_the_message() -> None:
    lines = [line for line in run("--set", "log.level=debug") if "placed, by coordinator" in line]
    assert len(lines) == 2
    assert all(line.startswith("DEBUG kvbaton.service: request ") and ", transfer " in line for line in lines)


@pytest.mark.parametrize("more", [(), ("--set", "log.level=error")])
def test_a_run_that_goes_well_logs_nothing(more: tuple[str, ...]) -> None:
    assert not [line for line in run(*more) if line.startswith(("DEBUG", "INFO", "WARNING", "ERROR", "{"))]
