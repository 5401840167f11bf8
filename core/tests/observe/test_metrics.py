"""Metrics: what is scraped equals what the records say, a scrape disturbs nobody, nothing grows (C9.2, C2.4, T12)."""

from __future__ import annotations

import asyncio
import socket
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, Settings, hookimpl, load
from kvbaton.durations import BOUNDS, Durations
from kvbaton.errors import (
    ConfigurationError,
    DuplicateRequest,
    PromptTooLong,
    RequestRefused,
    RuntimeClosed,
    SettingsError,
)
from kvbaton.observe.catalogue import FIGURES, PHASES, PREFIX
from kvbaton.observe.causes import CAUSES, cause_of
from kvbaton.observe.metrics import Metrics
from kvbaton_conformance.scripted import ScriptedEngine

Key = tuple[str, frozenset[tuple[str, str]]]

#: Never ends by itself within a test.
LONG = Request(tuple(range(100, 130)), SamplingParams(max_tokens=500))


def settings(**more: object) -> Settings:
    base: Mapping[str, object] = {
        "model": "scripted:7",
        "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
        "transport.name": "loopback",
    }
    return load(overrides={**base, **{key.replace("__", "."): value for key, value in more.items()}})[0]


def short(number: int) -> Request:
    """A prompt that shares no block with another number's."""
    return Request(tuple(range(number * 40, number * 40 + 21)), SamplingParams(max_tokens=3))


def samples(text: bytes | str) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for family in text_string_to_metric_families(text if isinstance(text, str) else text.decode()):
        for sample in family.samples:
            key = (sample.name.removeprefix(PREFIX), frozenset(sample.labels.items()))
            assert key not in found, f"twice: {sample}"
            found[key] = sample.value
    return found


def value(found: Mapping[Key, float], name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def until(condition: Callable[[], Any], seconds: float = 40.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true"
        threading.Event().wait(0.002)


def finished(runtime: PDRuntime, count: int) -> list[RequestRecord]:
    """The records of the next ``count`` requests to end."""
    records: list[RequestRecord] = []
    give_up = time.monotonic() + 30
    while len(records) < count:
        assert time.monotonic() < give_up, f"{len(records)} of {count} requests ended"
        records += [output.record for output in runtime.step(0.1) if output.record is not None]
    return records


def at_rest(metrics: Metrics) -> dict[Key, float]:
    """A scrape after everything was given back."""
    found: dict[Key, float] = {}

    def rests() -> bool:
        nonlocal found
        found = samples(metrics.text())
        return not any(value(found, "requests", state=state) for state in ("waiting", "running", "draining"))

    until(rests)
    return found


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


class Milestones:
    """What the records say of each request when it ends; later words make some of them more exact."""

    def __init__(self) -> None:
        self.ended: list[dict[str, float]] = []

    @hookimpl
    def kvbaton_request_finished(self, record: RequestRecord) -> None:
        self.ended.append(dict(record.milestones))


@pytest.fixture
def milestones() -> Milestones:
    return Milestones()


@pytest.fixture
def runtime(metrics: Metrics, milestones: Milestones) -> Iterator[PDRuntime]:
    with PDRuntime.start(settings(), hooks=[metrics, milestones]) as running:
        yield running


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Decode steps wait for the event."""
    event = threading.Event()
    step = ScriptedEngine._decode_step
    monkeypatch.setattr(ScriptedEngine, "_decode_step", lambda self: step(self) if event.wait(60) else [])
    yield event
    event.set()


# -- the figures -------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C2.4")
def test_the_figures_equal_the_records(runtime: PDRuntime, metrics: Metrics, milestones: Milestones) -> None:
    for number in range(24):
        runtime.add_request(short(number))
    records = finished(runtime, 24)
    found = at_rest(metrics)

    assert value(found, "requests_added_total") == 24
    assert value(found, "transfers_total", role="none", outcome="length", cause="none") == 24
    assert value(found, "bytes_total", stage="prefill-0") == sum(r.bytes for r in records) > 0
    assert value(found, "chunks_total", stage="prefill-0") == sum(r.chunks for r in records)
    assert value(found, "chunk_outcomes_total", stage="prefill-0", outcome="done") == sum(r.chunks for r in records)
    assert value(found, "receipts_total", stage="decode-0") == sum(r.chunks for r in records)
    after = value(found, "segments_total", stage="prefill-0", coalescing="after")
    assert after == sum(r.segments for r in records)
    # 21 tokens are 6 blocks of 4; each is 4 runs of memory (K and V of two layers), and there is the final payload
    assert value(found, "segments_total", stage="prefill-0", coalescing="before") == 24 * (6 * 4 + 1) > after
    assert value(found, "chunk_seconds_count", stage="prefill-0") == sum(r.chunks for r in records)
    assert value(found, "tokens_total", kind="prompt") == 24 * 21
    assert value(found, "tokens_total", kind="output") == sum(len(r.token_ids) for r in records)
    for phase, (start, end) in PHASES.items():
        # two stages' clocks, each placed by when it was sent its first message: a span between them may be below 0
        spans = [max(r[end] - (0.0 if start == "added" else r[start]), 0.0) for r in milestones.ended]
        assert value(found, "transfer_phase_seconds_count", phase=phase) == 24
        assert value(found, "transfer_phase_seconds_sum", phase=phase) == pytest.approx(sum(spans), abs=1e-9)
        assert value(found, "transfer_phase_seconds_bucket", phase=phase, le="0.005") == sum(s <= 0.005 for s in spans)
    for stage in runtime.stages:
        assert value(found, "peer_up", peer=stage) == value(found, "scrape_ok", stage=stage) == 1
        assert value(found, "credits", kind="blocks", peer=stage, state="reserved") == 0
        assert value(found, "blocks", stage=stage, state="used") == 0
        assert value(found, "engine_step_seconds_count", stage=stage) > 0
        assert value(found, "pump_pass_seconds_count", stage=stage) > 0
        assert value(found, "oldest_lease_seconds", stage=stage) == 0
    assert value(found, "backpressure_seconds_total", stage="prefill-0") >= 0


@pytest.mark.clause("C2.4")
def test_promised_and_in_use_are_two_figures(
    runtime: PDRuntime, metrics: Metrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    # steps that make no token: the request is there for as long as anybody looks, and the stage answers meanwhile
    pause = threading.Event()
    monkeypatch.setattr(ScriptedEngine, "_decode_step", lambda self: pause.wait(0.002) or [])
    key = runtime.add_request(LONG)
    used = "blocks", frozenset({"stage": "decode-0", "state": "used"}.items())
    until(lambda: samples(metrics.text()).get(used))
    found = samples(metrics.text())
    promised = value(found, "credits", kind="blocks", peer="decode-0", state="reserved")
    assert promised == -(-LONG.max_length // 4)  # the worst case
    assert 0 < found[used] < promised
    assert 0 < value(found, "oldest_transfer_seconds", state="running") < 20
    runtime.abort(key)
    (record,) = finished(runtime, 1)
    assert record.finish_reason == "cancelled"
    found = at_rest(metrics)
    assert value(found, "transfers_total", role="none", outcome="cancelled", cause="caller") == 1


def test_refusals_are_counted_by_reason(runtime: PDRuntime, metrics: Metrics, gate: threading.Event) -> None:
    runtime.add_request(LONG, "a")
    for key, request, error in (
        ("a", LONG, DuplicateRequest),
        ("b", Request(tuple(range(5000))), PromptTooLong),
        ("c", Request((1,), SamplingParams(temperature=float("nan"))), RequestRefused),
    ):
        with pytest.raises(error):
            runtime.add_request(request, key)
    gate.set()
    found = samples(metrics.text())
    assert [value(found, "requests_refused_total", reason=r) for r in ("duplicate", "too_long", "invalid")] == [1, 1, 1]
    assert value(found, "requests_added_total") == 1


def test_a_failed_request_says_with_which_side_it_lies(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: ScriptedEngine) -> list[Any]:
        self.fail_compute.update(self._queue)
        return original(self)

    original = ScriptedEngine._prefill_step
    monkeypatch.setattr(ScriptedEngine, "_prefill_step", step)
    with PDRuntime.start(settings(), hooks=[metrics]) as runtime:
        runtime.add_request(short(1))
        (record,) = finished(runtime, 1)
        assert record.finish_reason == "failed"
        found = at_rest(metrics)
    assert value(found, "transfers_total", role="prefill", outcome="failed", cause="engine") == 1


def test_every_family_is_in_the_catalogue(runtime: PDRuntime, metrics: Metrics) -> None:
    for number in range(3):
        runtime.add_request(short(number))
    finished(runtime, 3)
    families = {f.name.removeprefix(PREFIX): f for f in text_string_to_metric_families(metrics.text().decode())}
    names = {name if FIGURES.get(name) else f"{name}_total" for name in families}
    assert names <= set(FIGURES)
    # those that have nothing to say before something went wrong, or without a policy or a plugin that counts
    silent = {
        "peers_lost_total", "peers_fenced_total", "requests_refused_total", "routing", "connector",
        "transport_dropped_total", "dropped_messages_total", "violations_total",
    }  # fmt: skip
    assert set(FIGURES) - names <= silent
    for name, family in families.items():
        figure = FIGURES.get(name) or FIGURES[f"{name}_total"]
        assert family.type == figure.kind, name
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(figure.labels), sample
            assert set(sample.labels.values()) & {"cause"} <= set(CAUSES)


@pytest.mark.clause("T12")
def test_nothing_grows_with_finished_requests(runtime: PDRuntime, metrics: Metrics) -> None:
    def serve(first: int, count: int) -> dict[Key, float]:
        for number in range(first, first + count):
            key = runtime.add_request(short(number), f"external-{number}")
            if number % 5 == 0:
                runtime.abort(key)
        records = finished(runtime, count)
        assert {"length", "cancelled"} == {r.finish_reason for r in records}
        found = at_rest(metrics)
        text = metrics.text().decode()
        assert not any(str(r.transfer) in text or r.request_id in text for r in records)
        return found

    before = serve(0, 20)
    sizes = [len(vars(metrics)[name]) for name in ("_endings", "_tokens", "_lost", "_fenced", "_phases")]
    after = serve(20, 100)
    assert set(after) == set(before)
    assert [len(vars(metrics)[name]) for name in ("_endings", "_tokens", "_lost", "_fenced", "_phases")] == sizes


# -- scrapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C9.2")
def test_many_scrapes_at_once_disturb_nobody() -> None:
    asked = Counter[str]()
    with PDRuntime.start(settings(metrics__listen="0")) as runtime:
        url, statistics = runtime.metrics_url, runtime.statistics
        assert url is not None

        def counted() -> dict[str, Any]:
            asked["statistics"] += 1
            return statistics()

        runtime.statistics = counted  # type: ignore[method-assign]

        def scrape(_: int) -> dict[Key, float]:
            with urllib.request.urlopen(url, timeout=20) as answer:
                return samples(answer.read())

        with ThreadPoolExecutor(20) as pool:
            scrapes = pool.map(scrape, range(60))
            for number in range(60):
                runtime.add_request(short(number))
            records = finished(runtime, 60)
            every = list(scrapes)
        assert {r.finish_reason for r in records} == {"length"}
        assert all(value(found, "scrape_ok", stage=s) == 1 for found in every for s in ("coordinator", *runtime.stages))
        assert 0 < asked["statistics"] <= 60
        last = scrape(0)
        assert value(last, "transfers_total", role="none", outcome="length", cause="none") == 60
    with pytest.raises(OSError):  # whatever the system says of a port that nobody listens at
        scrape(0)


@pytest.mark.clause("C9.2")
def test_scrapes_that_come_together_ask_once(runtime: PDRuntime, metrics: Metrics) -> None:
    ask, begun, go, calls = runtime.statistics, threading.Event(), threading.Event(), Counter[str]()

    def slow() -> dict[str, Any]:
        calls["statistics"] += 1
        begun.set()
        assert go.wait(20)
        return ask()

    runtime.statistics = slow  # type: ignore[method-assign]
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(metrics.text)
        assert begun.wait(20)
        others = [pool.submit(metrics.text) for _ in range(7)]
        until(lambda: sum(thread.name.startswith("ThreadPoolExecutor") for thread in threading.enumerate()) >= 8)
        until(lambda: _waiting_on(metrics) == 7)
        go.set()
        assert all(value(samples(f.result(20)), "up") == 1 for f in (first, *others))
    assert calls["statistics"] == 1


def _waiting_on(metrics: Metrics) -> int:
    """How many scrapes wait for another's answer."""
    asked = metrics._asking
    return sum(
        frame.f_code.co_name == "result" and frame.f_locals.get("self") is asked
        for frame in sys._current_frames().values()
        for frame in _stack(frame)
    )


def _stack(frame: Any) -> Iterator[Any]:
    while frame is not None:
        yield frame
        frame = frame.f_back


@pytest.mark.clause("C9.2", "C6.7")
def test_a_stage_that_is_busy_is_missing_from_a_scrape_that_comes_in_time(
    metrics: Metrics, gate: threading.Event
) -> None:
    with PDRuntime.start(settings(deadline__control=0.2), hooks=[metrics]) as runtime:
        runtime.add_request(LONG, "a")
        found: dict[Key, float] = {}

        def one_is_missing() -> bool:
            """And not the other, too, which a busy machine keeps from answering in time, or from sending."""
            began = time.monotonic()
            found.clear()
            found.update(samples(metrics.text()))
            assert time.monotonic() - began < 15  # 0.2 s, and what the machine is busy with; the stage stands for 60
            return [value(found, "scrape_ok", stage=s) for s in ("coordinator", "prefill-0", "decode-0")] == [
                1, 1, 0,
            ] and value(found, "bytes_total", stage="prefill-0") > 0  # fmt: skip

        until(one_is_missing)
        assert value(found, "peer_up", peer="decode-0") == 1
        assert ("bytes_total", frozenset({("stage", "decode-0")})) not in found
        assert value(found, "scrape_seconds") >= 0.2
        gate.set()
        runtime.abort("a")
        finished(runtime, 1)
        until(lambda: value(at_rest(metrics), "scrape_ok", stage="decode-0") == 1)


def test_a_closed_runtime_leaves_what_was_counted(metrics: Metrics) -> None:
    with PDRuntime.start(settings(), hooks=[metrics]) as runtime:
        runtime.add_request(short(1))
        finished(runtime, 1)
    with pytest.raises(RuntimeClosed):
        runtime.statistics()
    found = samples(metrics.text())
    assert (value(found, "up"), value(found, "requests_added_total")) == (0, 1)
    assert {value(found, "scrape_ok", stage=s) for s in ("coordinator", *runtime.stages)} == {0}


def test_without_a_runtime_there_is_little_to_say(metrics: Metrics) -> None:
    assert value(samples(metrics.text()), "up") == 0


def test_it_is_an_asgi_application_too(runtime: PDRuntime, metrics: Metrics) -> None:
    def call(method: str) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(metrics.asgi()({"type": "http", "method": method, "headers": []}, receive, send))
        return sent

    start, body = call("GET")
    assert start["status"] == 200
    assert dict(start["headers"])[b"content-type"].startswith(b"text/plain")
    assert value(samples(body["body"]), "up") == 1
    assert call("HEAD")[1]["body"] == b""
    assert call("POST")[0]["status"] == 405


def test_openmetrics_is_spoken_where_it_is_asked_for(runtime: PDRuntime, metrics: Metrics) -> None:
    content_type, body = metrics.scrape("application/openmetrics-text; version=1.0.0")
    assert "openmetrics" in content_type
    assert body.endswith(b"# EOF\n")


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "address"),
    [("9400", "127.0.0.1:9400"), (":0", "127.0.0.1:0"), ("0.0.0.0:1", "0.0.0.0:1"), ("[::1]:9400", "[::1]:9400")],
)
def test_a_port_alone_is_loopback(given: str, address: str) -> None:
    assert settings(metrics__listen=given).metrics.listen == address


@pytest.mark.parametrize("given", ["", "localhost", "127.0.0.1", "a:b", "host:65536", "http://127.0.0.1:9400", "-1"])
def test_what_is_no_address_is_refused(given: str) -> None:
    with pytest.raises(SettingsError, match=r"metrics\.listen.*HOST:PORT"):
        settings(metrics__listen=given)


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=rf"cannot listen at 127\.0\.0\.1:{port}: .*in use.*port 0") as refused:
            PDRuntime.start(settings(metrics__listen=f"127.0.0.1:{port}"))
    assert "9400" not in str(refused.value)  # which may be the very one
    assert not [t for t in threading.enumerate() if t.name.startswith("kvbaton")]


def test_an_address_of_another_host_is_said() -> None:
    with pytest.raises(SettingsError, match=r"cannot listen at 192\.0\.2\.1:0"):
        PDRuntime.start(settings(metrics__listen="192.0.2.1:0"))


@pytest.mark.parametrize("wrong", [{"model": "nothing"}, {"stages__launch": "process"}])
def test_a_start_that_is_refused_listens_no_more(monkeypatch: pytest.MonkeyPatch, wrong: dict[str, str]) -> None:
    urls: list[str] = []
    listen = Metrics.listen

    def listened(self: Metrics, address: str) -> Any:
        listening = listen(self, address)
        urls.append(listening.url)
        return listening

    monkeypatch.setattr(Metrics, "listen", listened)
    with pytest.raises(ConfigurationError):
        PDRuntime.start(settings(metrics__listen="0", **wrong))
    (url,) = urls
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=5)


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "kvbaton.observe.metrics")
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvbaton\[metrics\]'"):
        PDRuntime.start(settings(metrics__listen="0"))


# -- the parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("cancelled by the caller", "caller"),
        ("the runtime closed", "shutdown"),
        ("C6.7: the request's own deadline passed", "deadline_request"),
        ("C6.7: deadline.receipts of 30 s passed in COMMITTED, waiting for decode-0:1", "deadline_receipts"),
        ("prefill-0:1 is lost: C6.7: deadline.step of 120 s passed: it hangs", "stage_lost"),
        ("the connection from prefill-0:1 to decode-0:1 is down: no reason given", "connection"),
        ("no prefill stage is up and takes requests", "no_stage"),
        (
            "T8: chunk 3 of transfer 0a, prefill-0:1 -> decode-0:1, passed its deadline (30 s) in state",
            "deadline_chunk",
        ),
        ("C7.2: decode-0:1: Output at 3 where 2 comes next", "violation"),
        ("C6.3: decode: RuntimeError: out of memory", "engine"),
        ("decode-0:1 refused (3 times): no blocks", "refused"),
        ("C6.3: chunk 2 to decode-0:1: broken pipe", "transport"),
        ("C9.3: a message of 9 bytes, more than the 8 allowed (control.max_message)", "message"),
        ("something else altogether", "other"),
    ],
)
def test_causes_are_few(text: str, cause: str) -> None:
    assert cause_of(text) == cause
    assert cause in CAUSES


def test_durations_fall_into_buckets_whose_bounds_are_inclusive() -> None:
    times = Durations()
    for seconds in (-1e-9, BOUNDS[0], BOUNDS[0] * 1.01, BOUNDS[-1], BOUNDS[-1] + 1):
        times.add(seconds)
    assert times.counts[:2] == [2, 1]
    assert times.counts[-2:] == [1, 1]
    assert times.figures()["seconds"] == pytest.approx(BOUNDS[0] * 2.01 + 2 * BOUNDS[-1] + 1)
