"""OpenTelemetry spans: one for each request with its phases inside it, and an error's cause where there is one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kvbaton import PDRuntime, Request, SamplingParams, Settings, load
from kvbaton.errors import RequestCancelled, SettingsError, TransferFailed
from kvbaton.identity import RequestKey, TransferId
from kvbaton.observe import otel
from kvbaton.observe.otel import Spans
from kvbaton.records import RequestRecord

T = TransferId("1" * 32)


def settings(**more: object) -> Settings:
    return load(overrides={
        "model": "scripted:7", "transport.name": "loopback",
        "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
        **{key.replace("__", "."): value for key, value in more.items()},
    })[0]  # fmt: skip


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def attributes(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_a_request_is_a_span_with_its_phases_inside_it(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    before = time.time_ns()
    with PDRuntime.start(settings(), hooks=[Spans(provider)]) as runtime:
        for number in range(2):
            tokens = tuple(range(number * 100, number * 100 + 21))
            key = runtime.add_request(Request(tokens, SamplingParams(max_tokens=3)), f"request-{number}")
            record = list(runtime.stream(key))[-1].record
            assert record is not None
    after = time.time_ns()
    spans = exporter.get_finished_spans()
    whole = {str(attributes(span)["kvbaton.request"]): span for span in spans if span.name == "kvbaton.request"}
    assert set(whole) == {"request-0", "request-1"}
    for name, span in whole.items():
        facts = attributes(span)
        assert (facts["kvbaton.prefill"], facts["kvbaton.decode"]) == ("prefill-0", "decode-0")
        assert (facts["kvbaton.outcome"], facts["kvbaton.tokens"]) == ("length", 3)
        assert span.status.status_code is trace.StatusCode.UNSET
        assert [event.name for event in span.events] == ["first_token"]
        children = [child for child in spans if child.parent and child.parent.span_id == span.context.span_id]
        assert [child.name for child in children] == [
            f"kvbaton.{phase}" for phase in ("queue", "reserve", "prefill", "receive", "import", "admit", "decode")
        ]
        for child in children:
            assert attributes(child) == {"kvbaton.request": name, "kvbaton.transfer": facts["kvbaton.transfer"]}
            assert span.start_time and child.start_time and child.end_time and span.end_time  # noqa: PT018
            assert before <= span.start_time <= child.start_time <= child.end_time <= span.end_time <= after


@pytest.mark.parametrize(("error", "outcome", "code"), [
    (TransferFailed("request a failed: C6.4: decode-0 is lost", cause="C6.4: decode-0 is lost", stage="decode-0"),
     "failed", trace.StatusCode.ERROR),
    (RequestCancelled("request a: cancelled by the caller", cause="cancelled by the caller"),
     "cancelled", trace.StatusCode.UNSET),
])  # fmt: skip
def test_a_request_that_failed_says_why_and_one_that_was_cancelled_has_not_failed(
    provider: TracerProvider, exporter: InMemorySpanExporter, error: Exception, outcome: str, code: trace.StatusCode
) -> None:
    times = {"placed": 0.1, "reserved": 0.2, "finished": 0.5}
    Spans(provider).kvbaton_request_finished(
        RequestRecord(RequestKey("a"), T, 3, (), (), outcome, error, milestones=times)
    )
    *children, span = exporter.get_finished_spans()
    assert [child.name for child in children] == ["kvbaton.queue", "kvbaton.reserve"], "the phases that there were"
    assert span.status.status_code is code
    assert [event.name for event in span.events] == ["exception"]
    assert attributes(span)["kvbaton.cause"] == ("stage_lost" if outcome == "failed" else "caller")
    if outcome == "failed":
        assert span.status.description == str(error)


def test_an_exporter_that_is_not_installed_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "consle")
    with pytest.raises(SettingsError, match=r'there is no exporter "consle"; installed: .*Did you mean "console"'):
        PDRuntime.start(settings(trace__otel=True), progress=lambda text: pytest.fail(text))


@pytest.mark.parametrize(("chosen", "installed"), [("mine", "mine"), (None, "otlp_proto_http"), ("otlp", "otlp")])
def test_the_setting_exports_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, exporter: InMemorySpanExporter, chosen: str | None, installed: str
) -> None:
    class Entry:
        name = installed

        def load(self) -> Callable[[], InMemorySpanExporter]:
            return lambda: exporter

    monkeypatch.setattr(otel, "entry_points", lambda group: [Entry()])
    monkeypatch.setenv("OTEL_SERVICE_NAME", "my-service")
    monkeypatch.delenv("OTEL_TRACES_EXPORTER", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", chosen)
    with PDRuntime.start(settings(trace__otel=True)) as runtime:
        list(runtime.stream(runtime.add_request(Request((1, 2, 3), SamplingParams(max_tokens=1)), "only")))
    (whole,) = [span for span in exporter.get_finished_spans() if span.name == "kvbaton.request"]
    assert whole.resource.attributes["service.name"] == "my-service"
