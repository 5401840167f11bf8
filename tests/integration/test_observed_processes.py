"""Metrics and logs over stages that are processes, one of which is killed: figures equal the records (C6.4, C9.2)."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, load
from kvbaton.observe.logs import JsonFormatter

OPTIONS = {"prefill_blocks": 1000, "decode_blocks": 1000}
SETTINGS: dict[str, object] = {
    "model": "scripted:7",
    "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
    "transport.name": "example_shm",
    "stages.launch": "process",
    "metrics.listen": "127.0.0.1:0",
    "log.level": "debug",
}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter())
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))

    def about(self, **facts: object) -> list[dict[str, Any]]:
        found = map(json.loads, tuple(self.lines))
        return [line for line in found if all(line.get(name) == value for name, value in facts.items())]


@pytest.fixture
def lines() -> Iterator[Lines]:
    handler, logger = Lines(), logging.getLogger("kvbaton")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true"
        threading.Event().wait(0.01)


def scraped(runtime: PDRuntime) -> dict[tuple[str, ...], float]:
    """By name and the labels' values, in the order of the labels' names."""
    assert runtime.metrics_url is not None
    with urllib.request.urlopen(runtime.metrics_url, timeout=20) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {
            (s.name.removeprefix("kvbaton_"), *(v for _, v in sorted(s.labels.items()))): s.value
            for family in families
            for s in family.samples
        }


def finished(runtime: PDRuntime, count: int) -> list[RequestRecord]:
    records: list[RequestRecord] = []

    def all_over() -> bool:
        records.extend(output.record for output in runtime.step(0.1) if output.record is not None)
        return len(records) >= count

    until(all_over)
    return records


def request(number: int) -> Request:
    return Request(tuple(range(number * 40, number * 40 + 21)), SamplingParams(max_tokens=3))


@pytest.fixture
def hold(tmp_path: Path) -> Path:
    """While it exists, a request that decodes has its first token and gets no other."""
    return tmp_path / "hold"


def start(hold: Path, **overrides: object) -> PDRuntime:
    more: dict[str, object] = {"engine.options": {**OPTIONS, "held_by": str(hold)}}
    return PDRuntime.start(load(overrides=SETTINGS | more | overrides)[0])


@pytest.mark.clause("C6.4", "C9.2", "C2.4")
def test_a_killed_stage_is_seen_in_metrics_and_log(lines: Lines, hold: Path) -> None:
    with start(hold) as runtime:
        for number in range(6):
            runtime.add_request(request(number))
        records = finished(runtime, 6)
        at = scraped(runtime)
        assert at["bytes_total", "prefill-0"] == sum(r.bytes for r in records) > 0
        assert at["segments_total", "after", "prefill-0"] == sum(r.segments for r in records)
        assert at["receipts_total", "decode-0"] == sum(r.chunks for r in records)

        hold.touch()
        runtime.add_request(request(10), "dies")
        until(lambda: any(o.token_ids for o in runtime.step(0.1)))
        os.kill(runtime.stage("decode-0").pid, signal.SIGKILL)
        (lost,) = finished(runtime, 1)
        hold.unlink()
        assert lost.finish_reason == "failed"  # tokens were delivered, and recovery.mode is requeue
        until(lambda: scraped(runtime).get(("peer_up", "decode-0")) == 1 and scraped(runtime)["restarts_total",] == 1)

        for number in range(20, 24):
            runtime.add_request(request(number), f"cancelled-{number}" if number % 2 else None)
            if number % 2:
                runtime.abort(f"cancelled-{number}")
        records += [lost, *finished(runtime, 4)]
        at = scraped(runtime)
        outcomes = Counter[str]()
        for key, count in at.items():
            if key[0] == "transfers_total":
                outcomes[key[2]] += int(count)
        assert outcomes == Counter(r.finish_reason for r in records)
        assert at["transfers_total", "stage_lost", "failed", "decode"] == 1
        assert at["peers_lost_total", "decode-0"] == 1
        assert at["requests_added_total",] == len(records)
        assert at["tokens_total", "output"] == sum(len(r.token_ids) for r in records)
        until(lambda: scraped(runtime)["unfenced_peers",] == 0)
        assert scraped(runtime)["peers_fenced_total", "decode-0"] == 1
        until(lambda: scraped(runtime)["requests", "draining"] == 0)
        assert scraped(runtime)["credits", "blocks", "decode-0", "reserved"] == 0
    # the stages' own words, under their names
    worker = {line["stage"] for line in lines.about(logger="kvbaton.stage.worker")}
    assert worker == {"prefill-0", "decode-0"}
    for record in records:
        mine = lines.about(request=record.request_id)
        assert next(line["milestone"] for line in mine if "milestone" in line) == "added"
        (end,) = [line for line in mine if line.get("milestone") == "finished"]
        assert (end["outcome"], end["transfer"]) == (record.finish_reason, record.transfer)


@pytest.mark.clause("C6.4")
def test_a_request_that_begins_again_has_the_milestones_of_both_generations(lines: Lines, hold: Path) -> None:
    with start(hold, **{"recovery.mode": "recompute"}) as runtime:
        hold.touch()
        runtime.add_request(request(1), "again")
        until(lambda: any(o.token_ids for o in runtime.step(0.1)))
        os.kill(runtime.stage("decode-0").pid, signal.SIGKILL)
        hold.unlink()
        (record,) = finished(runtime, 1)
        assert (record.finish_reason, record.requeued) == ("length", 1)
        at = scraped(runtime)
        assert at["requeued_total",] == 1
        assert at["transfers_total", "none", "length", "none"] == 1
    mine = lines.about(request="again")
    first, second = dict.fromkeys(line["transfer"] for line in mine if "transfer" in line)
    assert second == record.transfer
    for transfer in (first, second):
        reached = [line["milestone"] for line in mine if line.get("transfer") == transfer and "milestone" in line]
        common = ("placed", "reserved", "committed", "received")
        assert [name for name in reached if name in common] == list(common)
    assert any("waits again" in line["message"] for line in mine)
