"""The trace of a run: every event obeys the format, hand-offs can be followed through it, and it costs no run."""

from __future__ import annotations

import itertools
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton import PDRuntime, Request, SamplingParams, Settings, load, tracing
from kvbaton.errors import RuntimeClosed, SettingsError, TraceNotWritten, TraceUnreadable
from kvbaton.hooks import hookimpl
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.observe import perfetto, timeline
from kvbaton.observe.clock_offset import ClockOffset
from kvbaton.observe.trace import Trace
from kvbaton.records import RequestRecord
from kvbaton.report import report
from kvbaton.service import Answer

T = TransferId("1" * 32)
P, D = PeerId("prefill-0", 1), PeerId("decode-0", 2)
#: A transport between processes that needs no other distribution.
DATAGRAMS = "datagram_transport:plugin"


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stages' processes, too."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "pair"))


def settings(**more: object) -> Settings:
    base: Mapping[str, object] = {
        "model": "scripted:7",
        "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
        "transport.name": "loopback",
    }
    return load(overrides={**base, **{key.replace("__", "."): value for key, value in more.items()}})[0]


def serve(runtime: PDRuntime, count: int, prompt: int = 21) -> None:
    for number in range(count):
        tokens = tuple(range(number * 100, number * 100 + prompt))
        runtime.add_request(Request(tokens, SamplingParams(max_tokens=3)), f"request-{number}")
    ended, give_up = 0, time.monotonic() + 30
    while ended < count:
        assert time.monotonic() < give_up
        ended += sum(output.finished for output in runtime.step(0.1))


def check_format(document: Mapping[str, Any]) -> None:
    """Every rule of the trace-event format that a reader relies on."""
    assert next(iter(document)) == "traceEvents", "a reader may stop at what it does not know"
    assert document["displayTimeUnit"] == "ms"
    events: Sequence[Mapping[str, Any]] = document["traceEvents"]
    named: dict[str, set[Any]] = defaultdict(set)
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[int, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for event in events:
        assert isinstance(event["pid"], int), event
        if event["ph"] != "M":
            assert event["ts"] >= 0, event
        match event["ph"]:
            case "M":
                key = (event["pid"], event["tid"]) if event["name"].startswith("thread") else event["pid"]
                assert key not in named[event["name"]], f"named twice: {event}"
                named[event["name"]].add(key)
                assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                assert list(event["args"]) == ["name" if event["name"].endswith("name") else "sort_index"]
            case "X":
                assert event["dur"] >= 0
                assert event["name"]
                began = round(event["ts"] * 1000)
                slices[event["pid"], event["tid"]].append((began, began + round(event["dur"] * 1000)))
            case "s" | "f":
                assert event["ph"] not in flows[event["id"]], "a flow has one beginning and one end"
                flows[event["id"]][event["ph"]] = event
            case "C":
                assert all(value >= 0 for value in event["args"].values())
            case "i":
                assert event["s"] == "t"
            case other:
                pytest.fail(f"phase {other!r}")
    assert set(slices) <= named["thread_name"] == named["thread_sort_index"]
    assert {pid for pid, _ in slices} <= named["process_name"] == named["process_sort_index"]
    for track, spans in slices.items():
        open_until: list[int] = []
        for began, ended in sorted(spans, key=lambda span: (span[0], -span[1])):
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or ended <= open_until[-1], f"slices of {track} overlap at {began} ns"
            open_until.append(ended)
    for number, ends in flows.items():
        assert set(ends) == {"s", "f"}, f"flow {number} does not bind"
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        assert ends["f"]["bp"] == "e"
        for end in ends.values():
            at = round(end["ts"] * 1000)
            assert any(began <= at < ended for began, ended in slices[end["pid"], end["tid"]]), "it binds to a slice"


def names(document: Mapping[str, Any], kind: str) -> set[str]:
    return {event["args"]["name"] for event in document["traceEvents"] if event["name"] == kind}


@pytest.mark.parametrize("launch", ["inproc", "process"])
def test_a_hand_off_can_be_followed_from_the_first_word_to_the_last(launch: str, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with PDRuntime.start(settings(
        stages__launch=launch, transport__name=DATAGRAMS if launch == "process" else "loopback", trace__path=str(path),
    )) as runtime:  # fmt: skip
        serve(runtime, 6)
    document = json.loads(path.read_text())
    check_format(document)
    assert names(document, "process_name") == {"prefill-0", "decode-0", "requests"}
    assert {"engine", "transport", "request-3 prefill-0 → decode-0", "request-3 chunks"} <= names(
        document, "thread_name"
    )
    seen = timeline.read(path)
    assert [stage.note for stage in seen.stages] == ["", ""]
    assert [stage.dropped for stage in seen.stages] == [0, 0]
    for request in seen.requests:
        (generation,) = request.generations
        assert [phase.name for phase in generation.phases][:7] == [
            "queue", "reserve", "prefill_queue", "prefill", "receive", "import", "admit",
        ]  # fmt: skip
        bounds = [phase.began for phase in generation.phases] + [generation.phases[-1].ended]
        assert bounds == sorted(bounds)
        assert generation.phases[0].began == request.added
        assert request.ended in bounds
        assert len(generation.chunks) == request.chunks > 0
        assert sum(chunk.nbytes for chunk in generation.chunks) == request.nbytes
        for chunk in generation.chunks:
            way = [chunk.planned, chunk.ready, chunk.submitted, chunk.receipt]
            assert way == sorted(at for at in way if at is not None), "on one host the clocks are one"
            # all has come and every token is out, perhaps before P's transport says that it is done
            assert chunk.outcome in ("done", "")
        received = generation.milestones["received"]
        assert all(chunk.receipt is not None and chunk.receipt <= received for chunk in generation.chunks)
    computed = {name for step in seen.stages[0].steps for name, _, _ in step.computed}
    produced = {name for step in seen.stages[1].steps for name in step.produced}
    assert computed == produced == {f"request-{number}" for number in range(6)}
    flows = [event for event in document["traceEvents"] if event["ph"] == "s"]
    assert len(flows) == sum(request.chunks for request in seen.requests)


def test_what_holds_a_hand_off_back_is_seen() -> None:
    trace, key = Trace(), RequestKey("a")
    trace.kvbaton_request_added(key, 3, 0.0)
    trace.kvbaton_milestone(T, key, "prefill_started", 0.1, P)
    stages = Stages({}, {
        P: answer(
            1.0, tracing.Planned(0.1, T, 0, 1), tracing.Ready(0.2, T, 0), tracing.Full(0.2, T, 0),
            tracing.Paused(0.25, str(D)), tracing.Submitted(0.4, 0.41, T, 0, 64, 1), tracing.Resumed(0.42, str(D)),
            tracing.Completed(0.5, T, 0, "done"), tracing.Paused(0.6, str(D)),
        )
    })  # fmt: skip
    trace.watch(stages.ask, {})
    trace.close()
    document = perfetto.draw(trace.timeline())
    check_format(document)
    assert "engine waits: backlog to decode-0" in names(document, "thread_name")
    told = {event["name"]: (event["ts"], event["dur"]) for event in document["traceEvents"] if event["ph"] == "X"}
    assert told["too much waits to be sent"] == (250_000.0, 170_000.0)
    assert told["device"] == (100_000.0, 100_000.0)
    assert told["waits for room"] == (200_000.0, 200_000.0)
    assert told["on the way"] == (400_000.0, 100_000.0)
    assert not any(event["name"] == "chunk" for event in document["traceEvents"]), "nobody has received it"


def test_a_place_where_nothing_can_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "out.json", tmp_path, Path("/dev/full")):
        with pytest.raises(SettingsError, match="the trace cannot be written to"):
            PDRuntime.start(settings(trace__path=str(path)), progress=lambda text: pytest.fail(text))
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_written_at_the_end_is_one_clear_error_and_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    path.write_text("an earlier one")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    runtime = PDRuntime.start(settings(trace__path=str(path)))
    serve(runtime, 1)
    with pytest.raises(TraceNotWritten, match="No space left on device; the run itself is over"):
        runtime.close()
    runtime.close()
    assert path.read_text() == "an earlier one"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def answer(now: float, *events: tracing.Event, more: bool = False, dropped: int = 0) -> Answer:
    page = {"now": now, "events": [tracing.encode(event) for event in events], "dropped": dropped, "more": more}
    return Answer(page, now, now)


class Stages:
    """Answers of stages, one after the other; a call that finds none is answered by nobody."""

    def __init__(self, *rounds: Mapping[PeerId, Answer]) -> None:
        self.rounds = list(rounds)
        self.asked: list[str] = []

    def ask(self, method: str, session: str, arguments: object, peers: object) -> Mapping[PeerId, Answer]:
        self.asked.append(method)
        return self.rounds.pop(0) if self.rounds else {}


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("nonsense", [
    None, 7, "x", [], {"now": "noon"}, {"now": float("nan")}, {"now": 1.0, "events": [1]}, {"now": 1.0, "events": b"x"},
    {"events": []}, {"now": 1.0, "events": [b"\xff", b""]}, {"now": 1.0, "events": [b"\x00" * 10_000]},
])  # fmt: skip
def test_an_answer_that_is_none_is_that_stages_affair_alone(nonsense: object) -> None:
    good = answer(1.0, tracing.Command(0.1, 0.2, "Admit", T))
    stages = Stages({}, {P: Answer(nonsense, 0.9, 1.1), D: good})
    trace = Trace()
    trace.watch(stages.ask, {})
    trace.close()
    seen = {stage.name: stage for stage in trace.timeline().stages}
    assert len(seen["decode-0"].commands) == 1
    assert (seen["decode-0"].note, seen["prefill-0"].commands) == ("", [])
    assert seen["prefill-0"].note
    assert "prefill-0: " in trace.incomplete
    check_format(perfetto.draw(trace.timeline()))


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("page", [
    {"now": 1e300, "events": [tracing.encode(tracing.Marked(1e300, T, "reserved"))]},
    {"now": 1.0, "events": [tracing.encode(tracing.Command(0.5, 1e300, "Admit", T))]},
    {"now": -1e9, "events": [tracing.encode(tracing.Command(1e9, 2e9, "Admit", T))]},
    {"now": 1.0, "events": [tracing.encode(tracing.Step(0.5, 0.6, ((T, -5, 1 << 62),), 1, (), 0, 0))]},
    {"now": 1.0, "events": [tracing.encode(tracing.Ready(0.5, T, 1 << 62))]},
    {"now": 1.0, "dropped": -5}, {"now": 1.0, "dropped": 1 << 62},
])  # fmt: skip
def test_what_no_stage_can_have_seen_does_not_spoil_the_file(page: Mapping[str, Any], tmp_path: Path) -> None:
    trace, path = Trace(), tmp_path / "out.json"
    trace.kvbaton_request_added(RequestKey("r"), 3, 1.0)
    trace.kvbaton_milestone(T, RequestKey("r"), "placed", 1.1, None)
    trace.watch(Stages({}, {P: Answer({"events": [], **page}, 0.9, 1.1)}).ask, {})
    trace.close()
    trace.write(path)
    report(path)
    check_format(json.loads(path.read_text()))


@pytest.mark.clause("C9.3")
def test_a_stage_that_always_has_more_is_not_read_for_ever() -> None:
    class Endless(Stages):
        def ask(self, method: str, session: str, arguments: object, peers: object) -> Mapping[PeerId, Answer]:
            self.asked.append(method)
            return {P: answer(1.0, tracing.Marked(0.5, T, "reserved"), more=True)}

    stages, trace = Endless(), Trace(events=5)
    trace.watch(stages.ask, {})
    trace.close()
    assert len(stages.asked) < 100
    assert "events were pushed out (trace.events)" in trace.incomplete


def test_a_dead_stage_loses_only_what_was_not_read(tmp_path: Path) -> None:
    trace = Trace()
    stages = Stages({}, {P: answer(1.0, tracing.Command(0.1, 0.2, "Admit", T), more=True)}, {})
    trace.watch(stages.ask, {})
    trace.kvbaton_peer_lost(D, "killed")
    trace.close()
    document = perfetto.draw(trace.timeline())
    check_format(document)
    assert any(event["name"] == "decode-0 lost" for event in document["traceEvents"])
    assert any(event["name"].startswith("Admit") for event in document["traceEvents"])


class InTurn:
    """To each decode stage in turn: the least loaded is the first for every request that ends before the next comes."""

    def __init__(self) -> None:
        self._count = itertools.count()

    @hookimpl
    def kvbaton_choose_pair(self, pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
        return pairs[next(self._count) % len(pairs)]


def test_a_stage_that_is_killed_costs_the_trace_its_own_part_alone(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    with PDRuntime.start(settings(
        stages__launch="process", stages__decode=2, transport__name=DATAGRAMS, recovery__mode="off",
        trace__path=str(path),
    ), hooks=[InTurn()]) as runtime:  # fmt: skip
        serve(runtime, 8)
        (trace,) = runtime._traces
        trace._wake.set()  # what has happened so far is read now, not in a second
        give_up = time.monotonic() + 60
        while not all(stage.commands for stage in trace.timeline().stages):
            assert time.monotonic() < give_up
            runtime.step(0.01)
        os.kill(runtime.stage("decode-1").pid, signal.SIGKILL)
        while not any(stage.lost is not None for stage in trace.timeline().stages):
            assert time.monotonic() < give_up
            runtime.step(0.01)
        serve(runtime, 2)
    seen = {stage.name: stage for stage in timeline.read(path).stages}
    assert "SIGKILL" in seen["decode-1"].cause
    assert all(stage.commands for stage in seen.values())
    check_format(json.loads(path.read_text()))


def test_of_requests_the_newest_are_kept_and_the_rest_is_counted() -> None:
    trace = Trace(events=100)
    for number in range(50):
        key = RequestKey(str(number))
        trace.kvbaton_request_added(key, 3, float(number))
        trace.kvbaton_milestone(TransferId(f"{number:032x}"), key, "placed", number + 0.1, None)
        trace.kvbaton_request_finished(RequestRecord(key, None, 3, (), (), "length"))
    seen = trace.timeline()
    assert ([request.id for request in seen.requests], seen.missing) == (["45", "46", "47", "48", "49"], 45)
    assert "45 earlier requests were pushed out" in trace.incomplete


@pytest.mark.clause("T12")
def test_a_request_that_outlives_its_place_is_forgotten_whole() -> None:
    trace = Trace(events=1)
    for number in range(20):
        trace.kvbaton_request_added(RequestKey(str(number)), 3, 1.0)
    for number in range(20):
        trace.kvbaton_milestone(TransferId(f"{number:032d}"), RequestKey(str(number)), "placed", 1.1, P)
    assert (len(trace._live), len(trace._handoffs), len(trace.timeline().requests)) == (1, 1, 1)


@pytest.mark.clause("T12")
def test_a_stage_that_is_started_again_and_again_has_the_room_of_one() -> None:
    trace = Trace(events=10)
    lives = [PeerId("decode-0", epoch) for epoch in range(40)]
    events = [tracing.Command(0.1, 0.2, "Admit", T)] * 8
    trace.watch(Stages(*({life: answer(1.0, *events)} for life in lives[:1])).ask, {})
    for life in lives:
        trace.kvbaton_peer_up(life)
        trace._take(life, answer(1.0, *events))
    trace.close()
    stages = trace.timeline().stages
    assert [len(stage.commands) for stage in stages[-3:]] == [0, 2, 8]
    assert len(stages) == 16
    assert "6 events were pushed out" in trace.incomplete


@pytest.mark.clause("C6.2")
def test_who_interrupts_the_trace_has_the_stages_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PDRuntime.start(settings(stages__launch="inproc"), hooks=[trace := Trace()])

    def interrupted(ask: object, method: str) -> None:
        if method == "trace_stop":
            raise KeyboardInterrupt

    monkeypatch.setattr(trace, "_read_all", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runtime.close()
    with pytest.raises(RuntimeClosed):
        runtime.add_request(Request((1,), SamplingParams(max_tokens=1)))


def test_a_trace_is_of_one_runtime() -> None:
    trace = Trace()
    with PDRuntime.start(settings(stages__launch="inproc"), hooks=[trace]) as runtime:
        with pytest.raises(SettingsError, match="make one for each"):
            PDRuntime.start(settings(stages__launch="inproc"), hooks=[trace])
        serve(runtime, 1)
    assert len(trace.timeline().requests) == 1


def test_texts_that_are_none_and_long_names_are_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 120 + ".json")
    with PDRuntime.start(settings(stages__launch="inproc", trace__path=str(path))) as runtime:
        runtime.add_request(Request((1, 2, 3), SamplingParams(max_tokens=1)), "a\udcff")
        give_up = time.monotonic() + 30
        while not any(output.finished for output in runtime.step(0.1)):
            assert time.monotonic() < give_up
    assert [request.id for request in timeline.read(path).requests] == ["a\\udcff"]


def test_a_request_that_began_again_has_both_generations_on_its_track() -> None:
    trace, key = Trace(), RequestKey("a")
    trace.kvbaton_request_added(key, 3, 0.0)
    for number, (transfer, peer) in enumerate([("0" * 32, P), ("1" * 32, P)]):
        for place, milestone in enumerate(("placed", "reserved", "prefill_started")):
            at = number * 10 + place + 1.0
            trace.kvbaton_milestone(TransferId(transfer), key, milestone, at, peer if place else None)
    trace.kvbaton_milestone(TransferId("1" * 32), key, "committed", 14.0, P)
    seen = trace.timeline()
    (request,) = seen.requests
    first, second = request.generations
    assert [(phase.name, phase.began, phase.ended) for phase in first.phases] == [
        ("queue", 0.0, 1.0), ("reserve", 1.0, 2.0), ("prefill_queue", 2.0, 3.0), ("prefill", 3.0, 3.0),
    ]  # fmt: skip
    assert (second.phases[0].name, second.phases[0].began, second.phases[0].ended) == ("queue", 3.0, 11.0)
    assert request.outcome == ""
    check_format(perfetto.draw(seen))


def test_two_clocks_are_placed_by_the_messages_between_them() -> None:
    same, far = ClockOffset(), ClockOffset()
    assert same.learn(10.0, 10.2, 10.3)
    assert (same.seconds, same.doubt) == (0.0, 0.0)
    assert far.learn(10.0, 110.4, 11.0)
    assert far.learn(20.0, 120.1, 20.2)
    assert far.seconds == pytest.approx(100.0, abs=far.doubt)
    assert far.doubt == pytest.approx(0.1)
    assert not far.learn(30.0, 131.0, 30.1), "it has drifted: another estimate must begin"


def test_a_host_with_another_clock_stands_where_its_messages_put_it() -> None:
    trace, key = Trace(), RequestKey("a")
    trace.kvbaton_request_added(key, 3, 5.0)
    trace.kvbaton_milestone(T, key, "reserved", 5.1, D)
    trace.kvbaton_milestone(T, key, "prefill_started", 5.1, P)
    sent = tracing.Submitted(1005.2, 1005.25, T, 0, 64, 1)
    stages = Stages({}, {
        P: Answer(answer(1005.5, sent).result, 5.499, 5.501),
        D: Answer(answer(2005.5, tracing.Receipt(2005.3, 2005.31, T, 0)).result, 5.499, 5.501),
    })  # fmt: skip
    trace.watch(stages.ask, {})
    trace.close()
    seen = trace.timeline()
    (chunk,) = seen.requests[0].generations[0].chunks
    assert (chunk.submitted, chunk.receipt) == (pytest.approx(0.2, abs=2e-3), pytest.approx(0.3, abs=2e-3))
    assert [round(stage.doubt, 6) for stage in seen.stages] == [0.001, 0.001]
    document = perfetto.draw(seen)
    check_format(document)
    assert [event["ph"] for event in document["traceEvents"] if event["name"] == "chunk"] == ["s", "f"]


def test_a_file_that_is_no_trace_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    for text, words in (
        (None, "cannot read the trace"), ("{}", "run --trace"), ("\xff", "is no trace"),
        ('{"traceEvents": []}', "is no trace"),
    ):  # fmt: skip
        if text is not None:
            path.write_text(text, encoding="latin-1")
        with pytest.raises(TraceUnreadable, match=words):
            timeline.read(path)
    newer = msgspec.structs.replace(timeline.Timeline(0.0, 0.0, [], []), version=9)
    path.write_bytes(msgspec.json.encode({"kvbaton": newer}))
    with pytest.raises(TraceUnreadable, match="version 9"):
        timeline.read(path)
