"""The page of a run: complete in itself, safe whatever the run's texts are, and right in what it says."""

from __future__ import annotations

import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from kvbaton.cli.app import app
from kvbaton.errors import SettingsError, TraceUnreadable
from kvbaton.observe.timeline import (
    PHASES,
    Chunk,
    CommandLine,
    Generation,
    RequestLine,
    Span,
    StageLine,
    StepLine,
    Timeline,
)
from kvbaton.report import figures, pictures, report
from kvbaton.report.page import page

EVIL = "<script>alert(1)</script>\"'&"


def request(number: int, *, outcome: str = "length", name: str = "", error: str = "") -> RequestLine:
    added = number * 0.01
    moments = [added, *(added + 0.01 * place for place in range(1, 9))]
    spans = [Span(*item) for item in zip(list(PHASES)[:8], moments, moments[1:], strict=False)]
    ended = None if outcome == "" else spans[-1].ended
    chunks = [
        Chunk(0, 1024, 2, added + 0.03, added + 0.031, None, added + 0.032, added + 0.0325, added + 0.036,
              added + 0.0361, added + 0.037, "done"),
        Chunk(1, 1024, 2, added + 0.033, added + 0.034, added + 0.034, None, None, None, None, None, ""),
    ]  # fmt: skip
    generation = Generation("0" * 32, "prefill-0", "decode-0", {}, spans, chunks)
    return RequestLine(
        name or f"request-{number}", added, ended, outcome, error, "stage_lost" if error else "", 20, 5, added + 0.07,
        0, 0, 1, 2, 1024, [generation],
    )  # fmt: skip


def run(*requests: RequestLine, stages: list[StageLine] | None = None) -> Timeline:
    ends = [phase.ended for line in requests for phase in line.generations[0].phases]
    if stages is None:
        stages = [
            StageLine("prefill-0", 1, "prefill", [StepLine(0.0, 0.5, [("request-0", 0, 8)], 1, [], 0, 0)]),
            StageLine("decode-0", 2, "decode", [StepLine(0.5, 0.75, [], 0, ["request-0"], 3, 3)],
                      [CommandLine("Import", "request-0", 0.4, 0.45)]),
        ]  # fmt: skip
    return Timeline(1.7e9, max(ends, default=0.0), list(requests), stages, 0, {"model": "m", "transport": "loopback"})


class Reader(HTMLParser):
    """Elements that are opened are closed, in order."""

    VOID = ("meta", "br", "link", "img", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.rows = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attributes:
            assert not name.startswith("on") or tag == "option", f"a handler: {name}"
            assert name not in ("src", "href", "xlink:href"), f"something to fetch: {value}"
        self.rows += ("class", "rows") in attributes
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    assert reader.open == []
    assert not reader.tags & {"script", "link", "img", "iframe", "object"}
    assert "url(" not in text
    assert "http:" not in text
    assert "https:" not in text
    return reader


def test_a_phase_that_took_next_to_nothing_is_not_named_as_0_percent() -> None:
    line = request(0)
    phases = line.generations[0].phases
    phases[-1] = Span(phases[-1].name, phases[-1].began, 30.0)
    text = " ".join("".join(read(page(run(line), "a run")).text).split())
    assert "on average: 100% in decode." in text


@pytest.mark.parametrize("count", [0, 1, 32, 500])
def test_it_is_one_whole_page_for_however_many_requests(count: int) -> None:
    reader = read(page(run(*(request(number) for number in range(count))), "a run"))
    text = " ".join(reader.text)
    assert text.count("request-0") >= min(count, 1)
    for title in ("Where the time went", "How long each phase took", "What the engines did", "Failures"):
        assert title in text
    if count:
        assert reader.rows == 1
        assert "A request took 80.0 ms on average" in text


def test_no_text_of_a_run_becomes_markup() -> None:
    lost = StageLine(EVIL, 1, EVIL, lost=0.1, cause=EVIL, note=EVIL, dropped=3, doubt=0.001)
    bad = msgspec.structs.replace(request(0, outcome="failed", name=EVIL, error=EVIL), cause=EVIL)
    odd = [msgspec.structs.replace(g, prefill=EVIL, decode=EVIL, transfer=EVIL) for g in bad.generations]
    timeline = run(msgspec.structs.replace(bad, generations=odd), stages=[lost])
    text = page(msgspec.structs.replace(timeline, about={"model": EVIL, "transport": EVIL}), EVIL)
    reader = read(text)
    assert "script" not in reader.tags
    assert EVIL in "".join(reader.text)
    assert "<script" not in text


def test_failures_are_told_with_their_causes() -> None:
    gone = StageLine("decode-0", 2, "decode", lost=0.25, fenced=0.3, cause="killed by SIGKILL")
    timeline = run(request(0), request(1, outcome="failed", error="decode-0 is lost"), stages=[gone])
    text = " ".join(read(page(timeline, "a run")).text)
    assert "1 × stage_lost" in text
    assert "decode-0 is lost" in text
    assert "killed by SIGKILL" in text
    assert "50.0% of all" in text


def test_what_a_phase_comes_to_is_counted_over_the_requests_that_were_in_it() -> None:
    lines = [request(number) for number in range(4)]
    spreads = dict(figures.phases(lines))
    assert list(spreads) == list(PHASES)[:8]
    assert spreads["queue"].count == 4
    assert spreads["prefill"].median == pytest.approx(0.01)
    assert sum(part for _, _, part in figures.shares(lines)) == pytest.approx(1.0)
    assert figures.totals(lines).most == pytest.approx(0.08)


def test_a_stage_is_as_busy_as_its_steps_and_commands() -> None:
    stage = run(request(0)).stages[1]
    found = figures.use(stage, 1.0)
    assert (found.decode, found.prefill, found.other) == (pytest.approx(0.25), 0.0, pytest.approx(0.05))
    assert found.course.sum() / figures.BINS == pytest.approx(found.busy)
    course = figures.covered([(0.1, 0.35), (0.5, 0.5)], 1.0, bins=10)
    np.testing.assert_allclose(course, [0, 1, 1, 0.5, 0, 0, 0, 0, 0, 0], atol=1e-9)


def test_the_rate_is_of_the_time_in_which_anything_was_on_its_way() -> None:
    chunks = [Chunk(n, 100, 1, 0.0, began, None, began, began, ended, ended, ended, "done")
              for n, (began, ended) in enumerate([(0.0, 0.2), (0.1, 0.3), (0.8, 0.9)])]  # fmt: skip
    line = request(0)
    line = msgspec.structs.replace(line, generations=[msgspec.structs.replace(line.generations[0], chunks=chunks)])
    (way,) = figures.ways([line])
    assert way.rate == pytest.approx(300 / 0.4)
    assert figures.flying([line], 1.0, bins=10).tolist() == [100, 200, 200, 100, 0, 0, 0, 0, 100, 100]


@pytest.mark.parametrize("length", [0.0, 3e-6, 0.047, 1.0, 48.7, 90000.0])
def test_the_axis_has_some_round_moments(length: float) -> None:
    found = pictures.ticks(length)
    assert found[0] == 0.0
    assert len(found) <= 11
    assert found[-1] <= length * (1 + 1e-9)
    if length:
        assert len(found) >= 4
        assert re.fullmatch(r"[125]e.*", f"{found[1]:.0e}")


def test_marks_of_an_axis_share_their_digits() -> None:
    for length, said in ((1.6, "0.2 s"), (4.1, "1.5 s"), (4.1, "4.0 s"), (0.0023, "0.5 ms"), (61.0, "60 s")):
        texts = re.findall(r">([^<>]+)</text>", pictures.axis(length))
        assert said in texts
        assert len({len(text.split()[0].partition(".")[2]) for text in texts[1:]}) == 1


def test_the_page_lies_beside_its_trace_or_where_it_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "out.json"
    trace.write_bytes(msgspec.json.encode({"traceEvents": [], "kvbaton": run(request(0))}))
    assert report(trace) == tmp_path / "out.html"
    assert report(trace, tmp_path / "other.html").read_text() == (tmp_path / "out.html").read_text()
    with pytest.raises(SettingsError, match="written over the trace"):
        report(trace, trace)
    with pytest.raises(SettingsError, match="the page cannot be written"):
        report(trace, tmp_path / "no" / "page.html")
    with pytest.raises(TraceUnreadable, match="is no trace of kvbaton"):
        report(tmp_path / "out.html", tmp_path / "page.html")


@pytest.mark.parametrize("change", [
    {"began": 1e300}, {"length": -1.0},
    *({"requests": [msgspec.structs.replace(request(0), **wrong)]} for wrong in (
        {"generations": []}, {"added": -1e300}, {"nbytes": 1 << 60},
        {"generations": [Generation("", "", "", {}, [], [])]},
        {"generations": [Generation("", "p", "d", {}, [Span("queue", 0.0, 1.0)], [
            Chunk(0, 1, 1, None, None, None, -1e9, 0.0, 0.0, 0.0, None, "done")])]},
    )),
])  # fmt: skip
def test_a_file_with_what_no_run_can_have_been_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    trace = tmp_path / "out.json"
    trace.write_bytes(msgspec.json.encode({"kvbaton": msgspec.structs.replace(run(request(0)), **change)}))
    with pytest.raises(TraceUnreadable, match="is no trace of kvbaton"):
        report(trace)


def test_a_pipe_is_not_waited_for_and_a_name_that_is_no_text_is_shown(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TraceUnreadable, match="is no file"):
        report(tmp_path / "pipe")
    trace = tmp_path / "out\udcff.json"
    trace.write_bytes(msgspec.json.encode({"kvbaton": run(request(0))}))
    assert "<h1>out\\udcff</h1>" in report(trace).read_text()


def test_the_commands_say_what_is_wrong_with_what_they_are_given(tmp_path: Path) -> None:
    commands = CliRunner()
    trace = tmp_path / "out.json"
    trace.write_bytes(msgspec.json.encode({"traceEvents": [], "kvbaton": run(request(0))}))
    drawn = commands.invoke(app, ["report", str(trace)])
    assert (drawn.exit_code, drawn.stdout.strip()) == (0, str(tmp_path / "out.html"))
    refused = commands.invoke(app, ["report", str(tmp_path / "out.html")])
    assert refused.exit_code == 2
    assert "give a file that kvbaton run --trace FILE has written" in refused.stderr
    scripted = ["--model", "scripted:1", "--set", "engine.name=kvbaton_conformance.scripted_plugin:plugin"]
    order = ["run", *scripted, "--transport", "loopback", "--prompt", "a b c", "--trace"]
    refused = commands.invoke(app, [*order, str(tmp_path / "no" / "out.json")])
    assert refused.exit_code == 2
    assert "the trace cannot be written to" in refused.stderr
    traced = commands.invoke(app, [*order, str(tmp_path / "run.json")])
    assert traced.exit_code == 0, traced.stderr
    assert commands.invoke(app, ["report", str(tmp_path / "run.json")]).exit_code == 0
