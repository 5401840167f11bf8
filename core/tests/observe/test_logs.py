"""The log: a line for each milestone with its ids, the stages' own words under their names, and silence by default."""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, Settings, load
from kvbaton.errors import SettingsError
from kvbaton.identity import PeerId
from kvbaton.launch.log_ring import LogRing
from kvbaton.observe import log_line
from kvbaton.observe.logs import JsonFormatter, TextFormatter

#: In the order in which a transfer that goes well reaches them; P and D retire each in its own time.
COMMON = (
    "placed", "reserved", "prefill_started", "source_ready", "submitted", "committed", "received", "imported",
    "activated", "finished",
)  # fmt: skip
RETIRED = {"source_retired", "destination_retired", "acknowledged", "handle_done"}


def settings(**more: object) -> Settings:
    base: Mapping[str, object] = {
        "model": "scripted:7",
        "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
        "transport.name": "loopback",
    }
    return load(overrides={**base, **{key.replace("__", "."): value for key, value in more.items()}})[0]


@pytest.fixture(autouse=True)
def _levels_as_before() -> Iterator[None]:
    yield
    logging.getLogger("kvbaton").setLevel(logging.NOTSET)


class Lines(logging.Handler):
    """A log of JSON lines, as a program would write it."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def objects(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler = Lines()
    logging.getLogger("kvbaton").addHandler(handler)
    yield handler
    logging.getLogger("kvbaton").removeHandler(handler)


def serve(runtime: PDRuntime, count: int) -> list[RequestRecord]:
    for number in range(count):
        request = Request(tuple(range(number * 40, number * 40 + 21)), SamplingParams(max_tokens=3))
        runtime.add_request(request, f"request-{number}")
    records: list[RequestRecord] = []
    give_up = time.monotonic() + 30
    while len(records) < count:
        assert time.monotonic() < give_up
        records += [output.record for output in runtime.step(0.1) if output.record is not None]
    return records


@pytest.mark.clause("C4")
def test_the_debug_log_has_each_milestone_of_each_transfer_in_order_with_its_ids(lines: Lines) -> None:
    with PDRuntime.start(settings(log__level="debug")) as runtime:
        records = serve(runtime, 8)
    found = lines.objects()
    for record in records:
        mine = [line for line in found if line.get("request") == record.request_id and "milestone" in line]
        assert mine[0]["milestone"] == "added"
        assert all(line["transfer"] == record.transfer and line["level"] == "debug" for line in mine[1:])
        names = [line["milestone"] for line in mine[1:]]
        assert len(names) == len(set(names)), names
        assert [name for name in names if name in COMMON] == list(COMMON)
        assert set(names) - set(COMMON) == RETIRED
        stages = {line["milestone"]: line["stage"] for line in mine[1:]}
        assert [stages[m] for m in ("placed", "reserved", "committed", "received", "finished")] == [
            "coordinator", "decode-0", "prefill-0", "decode-0", "coordinator",
        ]  # fmt: skip
        assert all(line["seconds"] >= 0 for line in mine[1:])
        assert all(record.request_id in line["message"] for line in mine)
        assert all(str(record.transfer) in line["message"] for line in mine[1:])
        assert next(line for line in mine if line["milestone"] == "finished")["outcome"] == "length"


def test_stages_that_are_threads_are_named(lines: Lines) -> None:
    with PDRuntime.start(settings(log__level="debug")) as runtime:
        serve(runtime, 1)
    ended = {line["stage"] for line in lines.objects() if line["logger"] == "kvbaton.stage.worker"}
    assert ended == {"prefill-0", "decode-0"}


def test_it_is_quiet_by_default(lines: Lines, capfd: pytest.CaptureFixture[str]) -> None:
    with PDRuntime.start(settings()) as runtime:
        serve(runtime, 3)
    assert lines.lines == []
    assert capfd.readouterr() == ("", "")


def test_an_unset_level_leaves_the_applications(lines: Lines) -> None:
    logging.getLogger("kvbaton").setLevel(logging.INFO)
    with PDRuntime.start(settings()) as runtime:
        serve(runtime, 1)
    assert logging.getLogger("kvbaton").level == logging.INFO
    assert {line["level"] for line in lines.objects()} == {"info"}


def test_a_level_that_is_none_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"log\.level.*'debug', 'info', 'warning' or 'error'.*\"debug\""):
        settings(log__level="debgu")


# -- a stage's line ----------------------------------------------------------------------------------------------------

PEER = PeerId("decode-0", 7)


def printed(message: str, **extra: object) -> str:
    """What a stage's process prints of an error that it logs, with the traceback of what is being handled."""
    failing = sys.exc_info() if sys.exc_info()[0] else None
    record = logging.LogRecord("elsewhere.kvbaton", logging.ERROR, "", 0, "%s", (message,), failing)
    record.__dict__.update(extra)
    return log_line.LineFormatter().format(record)


def relayed(caplog: pytest.LogCaptureFixture, *texts: str) -> list[logging.LogRecord]:
    caplog.clear()
    with caplog.at_level(logging.DEBUG):
        for text in texts:
            log_line.relay(PEER, text)
    return list(caplog.records)


def test_a_stages_record_arrives_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    message = 'two\nlines, "quoted" – and more'
    line = printed(message, transfer="0a", clause="C7.2")
    assert "\n" not in line
    (record,) = relayed(caplog, line)
    assert (record.name, record.levelname, record.getMessage()) == ("elsewhere.kvbaton", "ERROR", message)
    written = json.loads(JsonFormatter().format(record))
    assert (written["stage"], written["transfer"], written["clause"]) == ("decode-0", "0a", "C7.2")
    assert TextFormatter().format(record) == f"ERROR elsewhere.kvbaton: [decode-0] {message}"
    assert abs(record.created - time.time()) < 60
    assert log_line.readable(line) == f"ERROR elsewhere.kvbaton: {message}"


def test_a_long_message_is_cut_so_that_its_line_is_kept_whole() -> None:
    ring = LogRing(10, shown=log_line.readable)
    (line,) = ring.feed(f"{printed('é' * 5000)}\n".encode())
    assert line.startswith(log_line.MARK)
    assert ring.tail() == [f"ERROR elsewhere.kvbaton: {'é' * 1200}…"]


def test_a_traceback_follows_as_text(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        text = printed("it failed")
    first, *rest = relayed(caplog, *text.split("\n"))
    assert first.getMessage() == "it failed"
    assert rest[-1].getMessage() == "ValueError: broken"
    assert {(record.name, record.levelname) for record in rest} == {(log_line.OUTPUT, "DEBUG")}


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        "\x1e",
        "\x1e{",
        '\x1e{"level":1}',
        '\x1e{"level":"x","name":"n","created":1,"message":"m"}',
        "\x1e[]",
    ],
)
def test_what_is_no_record_is_text(text: str, caplog: pytest.LogCaptureFixture) -> None:
    assert [(r.name, r.getMessage()) for r in relayed(caplog, text)] == ([(log_line.OUTPUT, text)] if text else [])
    assert log_line.readable(text) == text


def test_a_line_that_others_have_begun_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    line = '50 %\x1e{"level":40,"name":"kvbaton.x","created":1.0,"message":"m","facts":{"msg":"no","peer":"p"}}'
    record, before = relayed(caplog, line)
    assert (record.name, record.getMessage(), record.__dict__["peer"]) == ("kvbaton.x", "m", "p")
    assert before.getMessage() == "50 %"
    assert log_line.readable(line) == "50 %ERROR kvbaton.x: m"


def test_json_lines_have_the_exception() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("kvbaton.x", logging.ERROR, "", 0, "it failed: %s", ("why",), sys.exc_info())
    record.threadName = threading.current_thread().name
    written = json.loads(JsonFormatter().format(record))
    assert written["exception"].endswith("ValueError: broken")
    assert (written["message"], written["level"], written["time"][-6:]) == ("it failed: why", "error", "+00:00")
