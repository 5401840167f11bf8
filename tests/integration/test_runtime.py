"""The library's face: adding, stepping, streaming, iterating, aborting, draining, closing, and every refusal."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import msgspec
import numpy as np
import pytest

from kvbaton import PDRuntime, Request, RequestOutput, RequestRecord, SamplingParams, Settings, hookimpl, load, messages
from kvbaton.control.inproc import InprocCoordinatorChannels
from kvbaton.engine import Role, StageEngine
from kvbaton.errors import (
    ConfigurationError,
    DuplicateRequest,
    GeometryError,
    KvbatonError,
    LocalProtocolError,
    MessageError,
    ModelNotFound,
    PluginError,
    PluginUnavailable,
    PromptTooLong,
    ProtocolViolation,
    RequestCancelled,
    RequestRefused,
    RuntimeClosed,
    SettingsError,
    StartupError,
    TransferFailed,
)
from kvbaton.identity import PeerId, RequestKey, new_transfer_id
from kvbaton.service import Service
from kvbaton.stage import worker
from kvbaton.stage.engine_loop import EngineLoop
from kvbaton.stage.stage import Stage, StageOutcome
from kvbaton.stage.worker import stage_settings
from kvbaton_conformance.scripted import ScriptedEngine
from kvbaton_conformance.scripted_plugin import ScriptedOptions, plugin, scripted_model
from kvbaton_loopback import plugin as loopback
from kvbaton_loopback.wire import Wire

MODEL = scripted_model("scripted:7", ScriptedOptions())
SHORT = Request(tuple(range(20)), SamplingParams(max_tokens=4))
#: With the fixture ``endless``, it never ends by itself.
LONG = Request(tuple(range(100, 130)), SamplingParams(max_tokens=500))


def settings(**more: object) -> Settings:
    base: Mapping[str, object] = {
        "model": "scripted:7",
        "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
        "transport.name": "loopback",
    }
    return load(overrides={**base, **{key.replace("__", "."): value for key, value in more.items()}})[0]


@pytest.fixture
def endless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A request that decodes has its first token and gets no other."""
    (hold := tmp_path / "hold").touch()
    opened = plugin.open
    monkeypatch.setattr(
        plugin, "open", lambda model, options, *rest: opened(model, options.model_copy(update={"held_by": hold}), *rest)
    )


@pytest.fixture
def runtime() -> Iterator[PDRuntime]:
    with PDRuntime.start(settings()) as running:
        yield running


def until(condition: Any, seconds: float = 20.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true"
        threading.Event().wait(0.002)


@pytest.fixture
def slow_decode(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Decode steps wait for the event, so that a request is live for as long as a test wants."""
    gate = threading.Event()
    step = ScriptedEngine._decode_step
    monkeypatch.setattr(ScriptedEngine, "_decode_step", lambda self: step(self) if gate.wait(20) else [])
    yield gate
    gate.set()


# -- outputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("A1")
def test_a_stream_ends_with_the_record(runtime: PDRuntime) -> None:
    outputs = list(runtime.stream(runtime.add_request(SHORT, "a")))
    tokens, depths, _ = MODEL.generate(SHORT)
    assert tuple(token for output in outputs for token in output.token_ids) == tokens
    record = outputs[-1].record
    assert isinstance(record, RequestRecord)
    assert (record.token_ids, record.exit_depths, record.finish_reason) == (tokens, depths, "length")
    assert record.chunks >= 1
    assert record.bytes == 20 * sum(MODEL.token_bytes) + MODEL.final_bytes
    assert {"placed", "reserved", "committed", "received", "imported", "activated", "finished"} <= set(
        record.milestones
    )


def test_a_stream_that_begins_after_the_end_still_has_everything(runtime: PDRuntime) -> None:
    key = runtime.add_request(SHORT)
    until(lambda: key not in runtime._live)
    assert [output.finished for output in runtime.stream(key)][-1]
    with pytest.raises(LocalProtocolError, match="unknown, or its end was taken"):
        runtime.stream(key)


def test_a_request_has_one_reader(runtime: PDRuntime, slow_decode: threading.Event) -> None:
    key = runtime.add_request(SHORT)
    first = runtime.stream(key)
    with pytest.raises(LocalProtocolError, match="streamed already"):
        runtime.stream(key)
    slow_decode.set()
    assert list(first)[-1].finished
    assert runtime.step() == []


def test_async_iteration(runtime: PDRuntime) -> None:
    async def both() -> list[tuple[int, ...]]:
        async def one(request: Request) -> tuple[int, ...]:
            return tuple([token async for output in runtime.generate(request) for token in output.token_ids])

        return list(await asyncio.gather(one(SHORT), one(Request((1, 2, 3)))))

    assert asyncio.run(both()) == [MODEL.generate(SHORT)[0], MODEL.generate(Request((1, 2, 3)))[0]]


@pytest.mark.clause("C4")
def test_a_record_learns_of_the_retirements_that_come_after_the_end(runtime: PDRuntime) -> None:
    record = list(runtime.stream(runtime.add_request(SHORT)))[-1].record
    assert record is not None
    until(lambda: {"source_retired", "destination_retired", "handle_done"} <= set(record.milestones))


@pytest.mark.clause("T12")
def test_records_that_learn_nothing_more_are_let_go(runtime: PDRuntime) -> None:
    for _ in range(20):
        list(runtime.stream(runtime.add_request(SHORT)))
        until(lambda: runtime.statistics()["coordinator"]["transfers"] == 0)
    assert not runtime._service._retiring


@pytest.mark.clause("C2.5")
def test_leaving_an_async_iterator_aborts(endless: None, runtime: PDRuntime) -> None:
    async def leave() -> None:
        outputs = runtime.generate(LONG, "left")
        async for _ in outputs:
            break
        await outputs.aclose()

    asyncio.run(leave())
    until(lambda: runtime.statistics()["coordinator"]["transfers"] == 0)


# -- endings -----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C1.1")
def test_a_live_id_is_refused_and_free_after_the_end(runtime: PDRuntime, slow_decode: threading.Event) -> None:
    runtime.add_request(SHORT, "same")
    with pytest.raises(DuplicateRequest, match="same"):
        runtime.add_request(SHORT, "same")
    slow_decode.set()
    assert list(runtime.stream("same"))[-1].finish_reason == "length"
    runtime.add_request(SHORT, "same")
    assert list(runtime.stream("same"))[-1].finish_reason == "length"


def test_abort(endless: None, runtime: PDRuntime) -> None:
    stream = runtime.stream(runtime.add_request(LONG, "gone"))
    next(stream)
    runtime.abort("gone")
    end = list(stream)[-1]
    assert (end.finish_reason, type(end.error)) == ("cancelled", RequestCancelled)
    runtime.abort("gone")
    runtime.abort("never was")


@pytest.mark.clause("C6.7")
def test_a_requests_own_deadline_fails_it(runtime: PDRuntime, slow_decode: threading.Event) -> None:
    end = list(runtime.stream(runtime.add_request(SHORT, deadline=0.05)))[-1]
    assert end.finish_reason == "failed"
    assert isinstance(end.error, TransferFailed)
    assert "deadline" in str(end.error)
    slow_decode.set()


def test_closing_cancels_what_is_live(endless: None) -> None:
    runtime = PDRuntime.start(settings())
    stream = runtime.stream(runtime.add_request(LONG))
    next(stream)
    runtime.close()
    assert list(stream)[-1].finish_reason == "cancelled"
    runtime.close()
    with pytest.raises(RuntimeClosed):
        runtime.add_request(SHORT)
    with pytest.raises(RuntimeClosed):
        runtime.statistics()
    runtime.abort("anything")


@pytest.mark.clause("C6.2")
def test_an_interrupted_close_has_joined_every_stage_nevertheless(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = PDRuntime.start(settings(stages__launch="process", transport__name="example_shm"))
    over = runtime._service._over

    class Impatient:
        interrupts = 1

        def wait(self) -> bool:
            if self.interrupts:
                self.interrupts -= 1
                raise KeyboardInterrupt
            return over.wait()

    monkeypatch.setattr(runtime._service, "_over", impatient := Impatient())
    impatient.set = over.set  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        runtime.close()
    assert not runtime._service._thread.is_alive()
    assert {runtime.stage(name).status for name in runtime.stages} == {0}


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_what_can_never_fit_is_refused_at_once(runtime: PDRuntime) -> None:
    with pytest.raises(PromptTooLong, match="1501 tokens"):
        runtime.add_request(Request(tuple(range(1000)), SamplingParams(max_tokens=501)))
    with pytest.raises(RequestRefused, match="empty"):
        runtime.add_request(Request(()))


@pytest.mark.clause("C2.6")
def test_more_than_may_wait_are_refused(slow_decode: threading.Event) -> None:
    with PDRuntime.start(settings(limits__waiting=2, engine__options={"transfer_slots": 1})) as runtime:
        keys = [runtime.add_request(SHORT) for _ in range(3)]
        with pytest.raises(RequestRefused, match=r"limits\.waiting"):
            runtime.add_request(SHORT)
        slow_decode.set()
        assert [list(runtime.stream(key))[-1].finish_reason for key in keys] == ["length"] * 3


@pytest.mark.parametrize(
    ("given", "error", "says", "looked"),
    [
        ({"model": "nothing"}, ModelNotFound, "nothing", True),
        ({"transport__name": "lopback"}, PluginError, 'Did you mean "loopback"', False),
        ({"transport__options": {"no-such": 1}}, PluginError, "no-such", False),
        ({"stages__launch": "process"}, PluginUnavailable, "only within one process", True),
        ({"trace__path": "no/such/trace.json"}, SettingsError, "there is no directory no/such", False),
        ({"metrics__listen": "192.0.2.1:0"}, SettingsError, r"cannot listen at 192\.0\.2\.1:0", False),
        (
            {"transport__name": "example_stream", "stages__launch": "process", "control__dir": "no/such"},
            ConfigurationError, "there is no directory no", True,
        ),
    ],
    ids=lambda value: [*value][-1] if isinstance(value, dict) else "",
)  # fmt: skip
def test_start_refuses_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, object], error: type[KvbatonError], says: str,
    looked: bool,
) -> None:  # fmt: skip
    """In silence, and what can be seen at once before the engine looks at the model, for which it imports much."""
    monkeypatch.chdir(tmp_path)
    check, models, said = plugin.check, list[str](), list[str]()

    def checked(model: str, options: Any) -> None:
        models.append(model)
        check(model, options)

    monkeypatch.setattr(plugin, "check", checked)
    before = threading.active_count()
    with pytest.raises(error, match=says):
        PDRuntime.start(settings(**given), progress=said.append)
    assert (said, bool(models)) == ([], looked)
    assert threading.active_count() == before
    assert list(tmp_path.iterdir()) == []


def test_progress_begins_with_where_the_metrics_are_and_how_the_stages_run() -> None:
    said: list[str] = []
    with PDRuntime.start(settings(metrics__listen="0"), progress=said.append) as runtime:
        assert said[:2] == [f"metrics at {runtime.metrics_url}", "transport loopback, stages as threads"]


@pytest.mark.clause("C6.2", "C6.3")
def test_a_stage_that_cannot_start_stops_the_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    open_engine = plugin.open

    def refuse(model: str, options: Any, role: Any, device: int | None) -> ScriptedEngine:
        if role.value == "decode":
            raise GeometryError("the cache does not fit this device; give it fewer blocks", field="blocks")
        return open_engine(model, options, role, device)

    monkeypatch.setattr(plugin, "open", refuse)
    before = set(threading.enumerate())
    with pytest.raises(
        StartupError, match="decode-0: the cache does not fit this device; give it fewer blocks"
    ) as caught:
        PDRuntime.start(settings())
    assert isinstance(caught.value.__cause__, ConfigurationError), "the settings are to blame, and the status is 2"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING], "the error says it, once"
    assert not [thread for thread in set(threading.enumerate()) - before if "kvbaton" in thread.name]


@pytest.mark.clause("T2")
@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("metadata", r"-0: T2: transport loopback: metadata\(\) returned str, not bytes"),
        ("open", r"-0: transport loopback: open\(\) returned None, not a connector"),
    ],
)
def test_a_wrong_connector_ends_the_start_at_once_and_is_named(
    wrong: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_connector = loopback.open

    def opened(*arguments: Any) -> Any:
        connector = open_connector(*arguments)
        monkeypatch.setattr(type(connector), "metadata", lambda self: "text")
        return connector if wrong == "metadata" else None

    monkeypatch.setattr(loopback, "open", opened)
    with pytest.raises(StartupError, match=says):
        PDRuntime.start(settings(deadline__startup=100))


@pytest.mark.clause("C6.7")
def test_start_up_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    open_engine = plugin.open

    def hang(*arguments: Any) -> ScriptedEngine:
        gate.wait(20)
        return open_engine(*arguments)

    class Release(logging.Handler):
        """The stages go on once they were given up, however long that takes here."""

        def emit(self, record: logging.LogRecord) -> None:
            if "stopping what was started" in record.getMessage():
                gate.set()

    monkeypatch.setattr(plugin, "open", hang)
    log, release = logging.getLogger("kvbaton.service"), Release()
    log.addHandler(release)
    try:
        with pytest.raises(
            StartupError, match=r"prefill-0, decode-0 did not report within deadline\.startup of 0\.2 s"
        ):
            PDRuntime.start(settings(deadline__startup=0.2))
    finally:
        log.removeHandler(release)


# -- the whole ---------------------------------------------------------------------------------------------------------


def test_drain_waits_for_what_runs(slow_decode: threading.Event) -> None:
    with PDRuntime.start(settings(stages__decode=2)) as runtime:
        first = runtime.add_request(SHORT)
        until(lambda: runtime.statistics()["coordinator"]["transfers"] == 1)
        busy = next(
            name
            for name, book in runtime.statistics()["coordinator"]["credits"].items()
            if name.startswith("decode") and book["transfers"]
        )
        assert not runtime.drain(busy, timeout=0.05)
        slow_decode.set()
        assert runtime.drain(busy, timeout=20)
        records = [list(runtime.stream(runtime.add_request(SHORT)))[-1].record for _ in range(4)]
        assert busy not in {record.decode for record in records if record}
        assert list(runtime.stream(first))[-1].finish_reason == "length"
        with pytest.raises(LocalProtocolError, match="there is no stage 'decode-9'"):
            runtime.drain("decode-9")


@pytest.mark.clause("C6.2", "C2.5")
def test_a_stage_that_is_dismissed_exits_and_the_others_serve_on(slow_decode: threading.Event) -> None:
    listener = _Listener()
    with PDRuntime.start(settings(stages__decode=2), hooks=[listener]) as runtime:
        first = runtime.add_request(SHORT)
        until(lambda: runtime.statistics()["coordinator"]["transfers"] == 1)
        busy = next(
            name
            for name, book in runtime.statistics()["coordinator"]["credits"].items()
            if name.startswith("decode") and book["transfers"]
        )
        assert not runtime.dismiss(busy, timeout=0.05)
        assert runtime.stage(busy).status is None
        slow_decode.set()
        assert runtime.dismiss(busy, timeout=20)
        assert runtime.stage(busy).status == 0
        assert list(runtime.stream(first))[-1].finish_reason == "length"
        records = [list(runtime.stream(runtime.add_request(SHORT)))[-1].record for _ in range(3)]
        assert {record.decode for record in records if record} == {"decode-0", "decode-1"} - {busy}
        assert busy not in runtime.statistics()["coordinator"]["credits"], "and nothing is kept of it (T12)"
        with pytest.raises(LocalProtocolError, match=f"stage {busy} has ended and is not started again"):
            runtime.dismiss(busy, timeout=20)
        assert runtime.confirm_ended(busy) == 0
        for call in (runtime.dismiss, runtime.confirm_ended):
            with pytest.raises(LocalProtocolError, match="there is no stage 'decode-9'"):
                call("decode-9")
    assert listener.lost == []


@pytest.mark.parametrize("timeout", ["x", -1, float("nan"), True])
def test_a_timeout_is_looked_at_before_a_stage_is_drained(runtime: PDRuntime, timeout: Any) -> None:
    for call in (runtime.drain, runtime.dismiss):
        with pytest.raises(LocalProtocolError, match="a number of seconds, or None"):
            call("decode-0", timeout)
    assert list(runtime.stream(runtime.add_request(SHORT)))[-1].error is None
    assert runtime.drain("decode-0", 1e300)


@pytest.mark.clause("C9.2")
def test_statistics_report_a_stage_that_does_not_answer(slow_decode: threading.Event) -> None:
    with PDRuntime.start(settings(deadline__control=0.3)) as runtime:
        runtime.add_request(SHORT)
        books: dict[str, Any] = {}

        def one_answers() -> bool:
            """Decode's engine answers between steps, and its step now hangs; prefill's, unless the machine is busy."""
            books.update(runtime.statistics())
            return "error" in books["decode-0"] and "error" not in books["prefill-0"]

        until(one_answers)
        assert "no reply within deadline.control" in books["decode-0"]["error"]
        assert books["prefill-0"]["engine"]["blocks_total"] == 256
        slow_decode.set()


@pytest.mark.clause("C9.2")
def test_health_is_told_by_a_stage_whose_engine_is_in_a_step(slow_decode: threading.Event) -> None:
    with PDRuntime.start(settings(deadline__control=5.0)) as runtime:
        key = runtime.add_request(SHORT)
        until(lambda: runtime.health()["decode-0"].get("step_seconds", 0.0) > 0)
        health = runtime.health()
        assert [health[name]["healthy"] for name in runtime.stages] == [True, True]
        assert health["coordinator"]["live"] == 1
        slow_decode.set()
        list(runtime.stream(key))


def test_how_a_stage_stands_is_known_without_asking_it(runtime: PDRuntime) -> None:
    state = runtime.stage("decode-0")
    assert (state.name, state.pid, state.status, state.log) == ("decode-0", os.getpid(), None, ())
    with pytest.raises(LocalProtocolError, match="there is no stage 'decode-9'; there are prefill-0, decode-0"):
        runtime.stage("decode-9")
    runtime.close()
    assert runtime.stage("decode-0").status == 0


def test_observers_hear_of_every_request_and_milestone() -> None:
    class Observer:
        def __init__(self) -> None:
            self.added: list[str] = []
            self.milestones: list[str] = []
            self.records: list[RequestRecord] = []
            self.up: list[str] = []

        @hookimpl
        def kvbaton_request_added(self, request: str) -> None:
            self.added.append(request)

        @hookimpl
        def kvbaton_milestone(self, milestone: str) -> None:
            self.milestones.append(milestone)

        @hookimpl
        def kvbaton_request_finished(self, record: RequestRecord) -> None:
            self.records.append(record)

        @hookimpl
        def kvbaton_peer_up(self, peer: Any) -> None:
            self.up.append(peer.name)

    observer = Observer()
    with PDRuntime.start(settings(), hooks=[observer]) as runtime:
        list(runtime.stream(runtime.add_request(SHORT, "seen")))
        until(lambda: "destination_retired" in observer.milestones)
    assert (observer.added, sorted(observer.up)) == (["seen"], ["decode-0", "prefill-0"])
    assert observer.records[0].request_id == "seen"
    assert observer.milestones.index("reserved") < observer.milestones.index("committed")


class _Listener:
    """What is told of faults, dropped messages and stages."""

    def __init__(self) -> None:
        self.faults: list[tuple[Exception, Any, Any, Any]] = []
        self.dropped: list[tuple[str, str, Any, int]] = []
        self.lost: list[str] = []

    @hookimpl
    def kvbaton_fault(self, error: Exception, transfer: Any, request: Any, stage: Any) -> None:
        self.faults.append((error, transfer, request, stage))

    @hookimpl
    def kvbaton_message_dropped(self, family: str, reason: str, peer: Any, count: int) -> None:
        self.dropped.append((family, reason, peer, count))

    @hookimpl
    def kvbaton_peer_lost(self, peer: Any) -> None:
        self.lost.append(peer.name)


@pytest.mark.clause("C6.3")
def test_a_fault_says_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    healthy = ScriptedEngine.step

    def broken(self: ScriptedEngine) -> Any:
        if self.role.value == "decode" and self._sequences:
            raise RuntimeError("scripted")
        return healthy(self)

    monkeypatch.setattr(ScriptedEngine, "step", broken)
    listener = _Listener()
    runtime = PDRuntime.start(settings(deadline__shutdown=2.0), hooks=[listener])
    end = list(runtime.stream(runtime.add_request(SHORT, "mine")))[-1]
    until(lambda: len(listener.faults) >= 2)
    monkeypatch.undo()
    with contextlib.suppress(KvbatonError):
        runtime.close()
    told = {(type(error), transfer, request, stage) for error, transfer, request, stage in listener.faults}
    assert end.record is not None
    assert (TransferFailed, end.record.transfer, "mine", "decode-0") in told
    assert (KvbatonError, None, None, "decode-0") in told


@pytest.mark.clause("C7.2", "C6.3")
def test_a_lie_is_told_as_a_fault_of_its_stage(slow_decode: threading.Event) -> None:
    listener = _Listener()
    with PDRuntime.start(settings(), hooks=[listener]) as runtime:
        runtime.add_request(SHORT, "mine")
        until(lambda: runtime.statistics()["coordinator"]["transfers"] == 1)
        (transfer,) = runtime._service._machine._entries
        channels = cast("InprocCoordinatorChannels", runtime._service._channels)
        peer = next(peer for peer in channels._peers if peer.name == "prefill-0")
        channels._accept(peer, messages.Commit(transfer, 99))
        until(lambda: len(listener.faults) >= 2)
        slow_decode.set()
    ((error, *about),) = [told for told in listener.faults if isinstance(told[0], ProtocolViolation)]
    assert isinstance(error, ProtocolViolation)
    assert (error.clause, *about) == ("C7.2", transfer, "mine", "prefill-0")


@pytest.mark.clause("C1.2", "C9.3")
def test_dropped_are_messages_and_what_is_none_of_a_stages() -> None:
    listener = _Listener()
    with PDRuntime.start(settings(), hooks=[listener]) as runtime:
        runtime.abort("never was")
        runtime.statistics()
        assert listener.dropped == []
        channels = cast("InprocCoordinatorChannels", runtime._service._channels)
        peer = next(peer for peer in channels._peers if peer.name == "decode-0")
        channels._accept(peer, messages.Retired(new_transfer_id()))
        until(lambda: bool(listener.dropped))
        assert listener.dropped == [("transfer", "Retired: unknown transfer", "decode-0", 1)]
        for _ in range(3):
            channels._accept(peer, b"rubbish")
        until(lambda: sum(told[3] for told in listener.dropped[1:]) == 3)
        assert {told[:3] for told in listener.dropped[1:]} == {("unknown", "malformed", None)}


@pytest.mark.clause("C6.4")
def test_a_stage_whose_channel_has_gone_is_waited_for_and_nobody_else_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvbaton.service._LAST_WORDS", 60.0)
    may_end = threading.Event()
    end = Stage._end_if_done
    monkeypatch.setattr(
        Stage, "_end_if_done", lambda self: end(self) if may_end.is_set() or self.peer.name != "decode-1" else None
    )
    listener = _Listener()
    with PDRuntime.start(settings(stages__decode=2), hooks=[listener]) as runtime:
        channels = cast("InprocCoordinatorChannels", runtime._service._channels)
        peer = next(peer for peer in channels._peers if peer.name == "decode-1")
        runtime.drain("decode-1", timeout=20)
        channels._accept(peer, None)  # its channel ends, and it does not
        key = runtime.add_request(SHORT)
        until(lambda: key not in runtime._live)
        assert list(runtime.stream(key))[-1].finish_reason == "length"
        assert listener.lost == []
        runtime._service._silent[peer] = (0.0, "its channel ended")
        until(lambda: listener.lost == ["decode-1"])
        may_end.set()
        until(lambda: peer in runtime._service._gone)


@pytest.mark.clause("C6.7", "C6.3")
@pytest.mark.parametrize(
    ("what", "says"),
    [("engine", "its engine has not come back from one step for"), ("process", "it has answered nothing in that time")],
)
def test_a_decode_stage_that_hangs_is_lost_by_its_deadline(
    monkeypatch: pytest.MonkeyPatch, what: str, says: str
) -> None:
    """Field failure 10.  Received and never answered: no deadline of a phase is running there."""
    hangs, gate = threading.Event(), threading.Event()
    healthy: Callable[[Any], Any] = ScriptedEngine._decode_step if what == "engine" else Stage.advance
    take = Service._take_pulses

    def hanging(self: Any) -> Any:
        busy = self._sequences if what == "engine" else self.role.value == "decode" and self.machine.transfers()
        if busy:
            hangs.set()
            gate.wait(30)
        return healthy(self)

    def asks_who_hangs(self: Service, now: float) -> None:
        """A busy machine may keep anybody else from so short a deadline, and an engine's stage from its answer."""
        for peer, pulse in self._pulses.items():
            if peer.name != "decode-0" or not hangs.is_set():
                pulse.due = now + 0.4
            if what == "engine":
                pulse.missed = 0
        take(self, now)

    monkeypatch.setattr(Service, "_take_pulses", asks_who_hangs)
    listener = _Listener()
    runtime = PDRuntime.start(
        settings(recovery__mode="off", deadline__step=0.4, deadline__shutdown=2.0), hooks=[listener]
    )
    monkeypatch.setattr(*{"engine": (ScriptedEngine, "_decode_step"), "process": (Stage, "advance")}[what], hanging)
    try:
        began = time.monotonic()
        end = list(runtime.stream(runtime.add_request(SHORT)))[-1]
        took = time.monotonic() - began
    finally:
        gate.set()
    assert end.finish_reason == "failed"
    assert "decode-0" in str(end.error)
    assert "C6.7: deadline.step of 0.4 s passed" in str(end.error)
    assert says in str(end.error)
    assert took < 30.0, "it hangs no longer"
    assert listener.lost == ["decode-0"]
    monkeypatch.undo()
    with contextlib.suppress(KvbatonError):  # it did not end as ordered
        runtime.close()


@pytest.mark.clause("C6.7")
def test_many_steps_that_each_keep_the_deadline_are_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on in steps only, since a machine may be busy for longer than the deadline: they take five
    times as long together, and in each of them the stage says how long it takes."""
    now, step = [0.0], ScriptedEngine._decode_step
    answers: list[float] = []
    take, hear = Service._take_pulses, Service._on_pulse

    def timed(engine: StageEngine, report: Any, can_schedule: Any, clock: Any) -> EngineLoop:
        return EngineLoop(engine, report, can_schedule, lambda: now[0] if engine.role is Role.DECODE else 0.0)

    def patiently(self: Service, now: float) -> None:
        for pulse in self._pulses.values():
            pulse.missed = 0
        take(self, now)

    def heard(self: Service, peer: PeerId, reply: messages.Reply, now: float) -> bool:
        if peer.name == "decode-0" and reply.result:
            answers.append(reply.result.get("step_seconds", 0.0))
        return hear(self, peer, reply, now)

    def slow(self: ScriptedEngine) -> list[Any]:
        now[0] += 0.05
        before = len(answers)
        until(lambda: len(answers) > before + 1)  # the second was asked for in this step
        return list(step(self))

    monkeypatch.setattr(worker, "EngineLoop", timed)
    monkeypatch.setattr(Service, "_take_pulses", patiently)
    monkeypatch.setattr(Service, "_on_pulse", heard)
    monkeypatch.setattr(ScriptedEngine, "_decode_step", slow)
    with PDRuntime.start(settings(deadline__step=0.08)) as runtime:
        request = Request(tuple(range(20)), SamplingParams(max_tokens=12))
        assert list(runtime.stream(runtime.add_request(request)))[-1].finish_reason == "length"
    assert now[0] > 5 * 0.08
    assert max(answers) == pytest.approx(0.05)


def test_a_policy_chooses_the_pair() -> None:
    class Last:
        @hookimpl
        def kvbaton_choose_pair(self, prefill: Any, decode: Any) -> tuple[str, str]:
            return max(p.name for p in prefill), max(d.name for d in decode)

    with PDRuntime.start(settings(stages__prefill=2, stages__decode=2), hooks=[Last()]) as runtime:
        records = [list(runtime.stream(runtime.add_request(SHORT)))[-1].record for _ in range(3)]
    assert {(record.prefill, record.decode) for record in records if record} == {("prefill-1", "decode-1")}


def test_a_connector_instance_takes_the_place_of_a_name() -> None:
    opened = []

    class Mine(type(loopback)):  # type: ignore[misc]
        def open(self, options: Any, context: Any) -> Any:
            opened.append(context.peer.name)
            return super().open(options, context)

    with PDRuntime.start(settings(), connector=Mine()) as runtime:
        assert list(runtime.stream(runtime.add_request(SHORT)))[-1].finish_reason == "length"
    assert sorted(opened) == ["decode-0", "prefill-0"]
    assert worker._given == {}, "a closed runtime keeps the connector that it was given"


def test_what_a_stage_is_told_is_plain_json() -> None:
    """It crosses to a process as text: pydantic's own kinds of numbers are not enough."""
    chosen = settings(transfer__chunk_bytes="3MiB", stages__devices="0,1")
    told = msgspec.json.decode(msgspec.json.encode(stage_settings(chosen, 1, "cross_process")))
    assert Settings.model_validate(told["settings"]) == chosen


# -- what an attack found ----------------------------------------------------------------------------------------------


@pytest.mark.clause("C1.1")
def test_a_reused_id_streams_the_live_request_not_the_former_ones_leftovers(slow_decode: threading.Event) -> None:
    """Field failure 21."""
    with PDRuntime.start(settings()) as runtime:
        slow_decode.set()
        runtime.add_request(SHORT, "x")
        until(lambda: "x" not in runtime._live)  # its outputs lie there; nobody has taken them
        slow_decode.clear()
        other = Request(tuple(range(50, 70)), SamplingParams(max_tokens=6))
        runtime.add_request(other, "x")
        live = runtime.stream("x")
        slow_decode.set()
        assert tuple(token for output in live for token in output.token_ids) == MODEL.generate(other)[0]
        former = runtime.stream("x")
        assert tuple(token for output in former for token in output.token_ids) == MODEL.generate(SHORT)[0]


@pytest.mark.clause("C1.1")
def test_two_ended_requests_under_one_id_are_read_one_after_the_other(runtime: PDRuntime) -> None:
    requests = [SHORT, Request(tuple(range(50, 70)), SamplingParams(max_tokens=6))]
    for request in requests:
        runtime.add_request(request, "x")
        until(lambda: "x" not in runtime._live)
    for request in requests:
        tokens = tuple(token for output in runtime.stream("x") for token in output.token_ids)
        assert tokens == MODEL.generate(request)[0]


@pytest.mark.clause("T12")
def test_a_far_deadline_keeps_nothing_of_a_finished_request(runtime: PDRuntime) -> None:
    for _ in range(200):
        list(runtime.stream(runtime.add_request(Request((1,), SamplingParams(max_tokens=1)), deadline=86400.0)))
    assert len(runtime._service._due) < 100


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize(
    "request_",
    [
        Request((np.int64(1), 2)), Request((1.5, 2)), Request((-1,)), Request(()),  # type: ignore[arg-type]
        Request((1,), SamplingParams(max_tokens=0)), Request((1,), SamplingParams(max_tokens=-2)),
        Request((1,), SamplingParams(temperature=-1.0)), Request((1,), SamplingParams(temperature=float("nan"))),
        Request((1,), SamplingParams(top_p=0.0)), Request((1,), SamplingParams(seed=2**70)),
        Request((1,), SamplingParams(stop=("",))), Request((1,), SamplingParams(stop=("\ud800",))),
        Request((1,), SamplingParams(stop=("x" * (5 << 20),))), Request((1,), SamplingParams(stop="abc")),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_served_is_refused_at_the_entrance(runtime: PDRuntime, request_: Request) -> None:
    """Past it, one such request would end a stage or the coordinator, and everybody else's with it."""
    with pytest.raises(RequestRefused):
        runtime.add_request(request_)
    assert runtime.statistics()["coordinator"]["live"] == 0


@pytest.mark.parametrize("deadline", ["5", float("nan"), float("inf"), -1.0])
def test_a_deadline_is_a_number_of_seconds(runtime: PDRuntime, deadline: Any) -> None:
    with pytest.raises(RequestRefused, match="number of seconds"):
        runtime.add_request(SHORT, deadline=deadline)
    assert runtime.statistics()["coordinator"]["live"] == 0


@pytest.mark.clause("C6.2", "C6.3")
def test_the_last_stages_bad_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    end = Stage._end_if_done

    def badly(self: Stage) -> None:
        end(self)
        if self.outcome is not None and self.peer.name == "decode-0":
            self.outcome = StageOutcome(1, "scripted bad end")

    class Observer:
        fenced: ClassVar[list[str]] = []

        @hookimpl
        def kvbaton_peer_fenced(self, peer: Any) -> None:
            self.fenced.append(peer.name)

    monkeypatch.setattr(Stage, "_end_if_done", badly)
    runtime = PDRuntime.start(settings(), hooks=[Observer()])
    with pytest.raises(KvbatonError, match="decode-0 ended"):
        runtime.close()
    assert sorted(Observer.fenced) == ["decode-0", "prefill-0"]


@pytest.mark.clause("C9.2")
def test_statistics_that_raise_disturb_nothing(runtime: PDRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScriptedEngine, "statistics", lambda self: 1 / 0)
    assert "ZeroDivisionError" in runtime.statistics()["decode-0"]["error"]
    assert list(runtime.stream(runtime.add_request(SHORT)))[-1].finish_reason == "length"


@pytest.mark.clause("C6.3")
@pytest.mark.parametrize("method", ["has_work", "step"])
def test_an_engine_that_breaks_its_promise_ends_its_stage_and_says_so(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    healthy = getattr(ScriptedEngine, method)

    def broken(self: ScriptedEngine) -> Any:
        if self.role.value == "decode" and self._sequences:
            raise SystemExit(3)
        return healthy(self)

    monkeypatch.setattr(ScriptedEngine, method, broken)
    runtime = PDRuntime.start(settings(deadline__shutdown=2.0))
    end = list(runtime.stream(runtime.add_request(SHORT)))[-1]
    assert end.finish_reason == "failed"
    assert "SystemExit" in str(end.error)
    monkeypatch.undo()
    with contextlib.suppress(KvbatonError):
        runtime.close()


@pytest.mark.parametrize("call", ["statistics", "close", "add_request", "drain"])
def test_a_hook_that_calls_back_is_told_and_nothing_hangs(call: str) -> None:
    seen: list[BaseException] = []

    class Caller:
        @hookimpl
        def kvbaton_request_finished(self) -> None:
            try:
                getattr(runtime, call)(*{"add_request": (SHORT,), "drain": ("decode-0",)}.get(call, ()))
            except BaseException as error:
                seen.append(error)
                raise SystemExit(1) from None

    with PDRuntime.start(settings(), hooks=[Caller()]) as runtime:
        assert list(runtime.stream(runtime.add_request(SHORT)))[-1].finish_reason == "length"
        assert list(runtime.stream(runtime.add_request(SHORT)))[-1].finish_reason == "length"
    assert set(map(type, seen)) == {LocalProtocolError}


def test_a_reader_that_is_gone_takes_nobody_along(runtime: PDRuntime) -> None:
    runtime._service.add(RequestKey("gone"), SHORT, None, lambda: runtime._live.update({RequestKey("gone"): _raise}))
    assert list(runtime.stream(runtime.add_request(SHORT)))[-1].finish_reason == "length"


def _raise(output: RequestOutput) -> None:
    raise RuntimeError("Event loop is closed")


@pytest.mark.clause("C9.3", "C2.5")
def test_a_prefill_that_is_too_large_ends_its_request_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reserve fits a control message, Prefill with the block tables does not."""
    send = InprocCoordinatorChannels.send
    too_large: set[str] = set()

    def narrow(self: InprocCoordinatorChannels, peer: Any, message: Any) -> None:
        if type(message).__name__ in too_large:
            raise MessageError("C9.3: a message of 17 MiB, more than the 16 MiB allowed (control.max_message)")
        send(self, peer, message)

    monkeypatch.setattr(InprocCoordinatorChannels, "send", narrow)
    with PDRuntime.start(settings()) as runtime:
        for kind in ("Reserve", "Prefill"):
            too_large.add(kind)
            end = list(runtime.stream(runtime.add_request(SHORT)))[-1]
            assert (end.finish_reason, "17 MiB" in str(end.error)) == ("failed", True)
            too_large.clear()
            until(lambda: runtime.statistics()["coordinator"]["transfers"] == 0)
            assert list(runtime.stream(runtime.add_request(SHORT)))[-1].finish_reason == "length"


@pytest.mark.clause("C9.4", "C6.2")
def test_where_a_pass_hears_one_word_of_each_stage_everything_is_heard_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also a stage's last words, before its end."""
    monkeypatch.setattr("kvbaton.control.inproc.ENVELOPES_PER_PASS", 1)
    unheard, asked = InprocCoordinatorChannels.unheard, []

    def slowly(self: InprocCoordinatorChannels, peer: Any) -> bool:
        """A few times there is more."""
        asked.append(peer)
        return asked.count(peer) < 3 or unheard(self, peer)

    monkeypatch.setattr(InprocCoordinatorChannels, "unheard", slowly)
    with PDRuntime.start(settings()) as runtime:
        keys = [runtime.add_request(SHORT) for _ in range(6)]
        assert {list(runtime.stream(key))[-1].finish_reason for key in keys} == {"length"}
        until(lambda: runtime.statistics()["coordinator"]["transfers"] == 0)
    assert len(asked) >= 2 * 3


def test_a_display_that_fails_shows_nothing_and_breaks_nothing() -> None:
    def progress(text: str) -> None:
        raise OSError("the terminal is gone")

    with PDRuntime.start(settings(), progress=progress) as runtime:
        assert list(runtime.stream(runtime.add_request(SHORT)))[-1].finish_reason == "length"


def test_a_drain_that_timed_out_leaves_nothing(slow_decode: threading.Event) -> None:
    with PDRuntime.start(settings()) as runtime:
        runtime.add_request(SHORT)
        until(lambda: runtime.statistics()["coordinator"]["transfers"] == 1)
        assert not any(runtime.drain("decode-0", timeout=0.001) for _ in range(20))
        until(lambda: len(runtime._service._draining) <= 1)
        slow_decode.set()


class _Crossing(concurrent.futures.Future[bool]):
    """Its waiter gives up in the very moment between a look at it and its answer."""

    looks = 0

    def cancelled(self) -> bool:
        before = super().cancelled()
        self.looks += 1
        if self.looks == 2:
            self.cancel()
        return before

    def set_running_or_notify_cancel(self) -> bool:
        self.cancel()
        return super().set_running_or_notify_cancel()


def test_a_drain_that_is_given_up_while_it_is_answered_ends_nothing(
    runtime: PDRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton.service.concurrent.futures.Future", _Crossing)
    with pytest.raises(concurrent.futures.CancelledError):
        runtime.drain("decode-0", timeout=20)
    monkeypatch.undo()
    assert runtime.statistics()["coordinator"]["live"] == 0  # the loop goes on


class _Late(concurrent.futures.Future[bool]):
    """The answer has come by the time its waiter gives up."""

    waiting = threading.Event()

    def result(self, timeout: float | None = None) -> bool:
        if timeout is None:
            return super().result(20)
        self.waiting.set()
        super().result(20)
        raise TimeoutError


def test_a_drain_says_what_was_answered_and_not_that_there_was_an_answer(
    monkeypatch: pytest.MonkeyPatch, slow_decode: threading.Event
) -> None:
    runtime = PDRuntime.start(settings())
    runtime.add_request(SHORT)
    until(lambda: runtime.statistics()["coordinator"]["transfers"] == 1)
    drained: list[bool] = []
    monkeypatch.setattr("kvbaton.service.concurrent.futures.Future", _Late)
    waiter = threading.Thread(target=lambda: drained.append(runtime.drain("decode-0", timeout=1.0)), daemon=True)
    waiter.start()
    assert _Late.waiting.wait(20)
    monkeypatch.setattr(runtime._service._machine, "idle", lambda peer: False)
    slow_decode.set()
    runtime.close()
    waiter.join(20)
    assert drained == [False]


def test_a_tokenizer_that_loads_slowly_holds_nobody_up(runtime: PDRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, loading = threading.Event(), threading.Event()
    load_it = runtime._make_tokenizer

    def slowly() -> Any:
        loading.set()
        assert gate.wait(60)
        return load_it()

    monkeypatch.setattr(runtime, "_make_tokenizer", slowly)
    loader = threading.Thread(target=lambda: runtime.tokenizer, daemon=True)
    loader.start()
    assert loading.wait(20)
    key = runtime.add_request(SHORT)
    until(lambda: key not in runtime._live)
    gate.set()
    loader.join(20)
    assert list(runtime.stream(key))[-1].finish_reason == "length"


@pytest.fixture
def stalled(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once a chunk has stalled, which nothing takes back any more."""
    event, take = threading.Event(), Wire._next

    def taken(self: Wire) -> Any:
        post = take(self)
        if self._stalled:
            event.set()
        return post

    monkeypatch.setattr(Wire, "_next", taken)
    return event


@pytest.mark.clause("C6.3", "T10")
def test_a_stage_that_ends_badly_says_what_it_held(stalled: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton.service._GRACE", 60.0)  # for which it is waited, however busy the machine is
    runtime = PDRuntime.start(settings(transport__options={"stall_chunks": [0]}, deadline__shutdown=0.3))
    runtime.add_request(SHORT)
    assert stalled.wait(60)
    with pytest.raises(KvbatonError, match=r"prefill-0 ended.*still held: [0-9a-f]{32} DRAINING"):
        runtime.close()
    runtime.close()


@pytest.mark.clause("C6.2")
def test_a_bad_end_is_told_although_nobody_waited_for_it_any_more(
    stalled: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine may let a stage take longer for its end than its coordinator waits."""
    monkeypatch.setattr("kvbaton.service._GRACE", -0.3)  # it does not wait at all
    runtime = PDRuntime.start(settings(transport__options={"stall_chunks": [0]}, deadline__shutdown=0.3))
    runtime.add_request(SHORT)
    assert stalled.wait(60)
    with pytest.raises(KvbatonError, match=r"^stage prefill-0 ended: exit status 1\.$"):
        runtime.close()
