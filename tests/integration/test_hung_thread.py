"""A stage that hangs as a thread can neither be killed nor started again: who waits for it is told so."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

import pytest

from kvbaton import PDRuntime, Request, SamplingParams, load
from kvbaton.connector import ConnectorContext, Endpoint
from kvbaton.errors import KvbatonError, StartupError
from kvbaton.service import Service
from kvbaton.stage.stage import Stage
from kvbaton_conformance.scripted import ScriptedEngine
from kvbaton_loopback.connector import LoopbackConnector
from kvbaton_loopback.plugin import LoopbackPlugin


@pytest.mark.clause("C6.7", "C6.3")
def test_requests_wait_for_a_hung_thread_no_longer_than_a_start_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, gate = threading.Event(), threading.Event()
    step, take = ScriptedEngine._decode_step, Service._take_pulses

    def hanging(self: ScriptedEngine) -> list[Any]:
        hangs.set()
        return list(step(self)) if gate.wait(60) else []

    def asks_who_hangs(self: Service, now: float) -> None:
        """A busy machine may keep anybody else from so short a deadline, and its stage from an answer."""
        for peer, pulse in self._pulses.items():
            if peer.name != "decode-0" or not hangs.is_set():
                pulse.due = now + 0.5
            pulse.missed = 0
        take(self, now)

    monkeypatch.setattr(ScriptedEngine, "_decode_step", hanging)
    monkeypatch.setattr(Service, "_take_pulses", asks_who_hangs)
    settings, _ = load(
        overrides={
            "model": "scripted:7", "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
            "transport.name": "loopback", "deadline.step": 0.5, "deadline.startup": 3.0, "deadline.shutdown": 2.0,
        }
    )  # fmt: skip
    runtime = PDRuntime.start(settings)
    try:
        began = time.monotonic()
        request = Request(tuple(range(8)), SamplingParams(max_tokens=4))
        (end,) = [o for o in runtime.stream(runtime.add_request(request, "a")) if o.finished]
        assert time.monotonic() - began < 30
        assert "deadline.step" in str(end.error)
        assert "no decode stage is up" in str(end.error)
        assert "memory is held on decode-0 until it is proven quiet" in str(end.error)
    finally:
        gate.set()
        with contextlib.suppress(KvbatonError):  # the stage that was lost did not end as ordered
            runtime.close()


@pytest.mark.clause("C6.7")
def test_who_dismisses_a_hung_thread_is_told_that_it_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    settings, _ = load(
        overrides={
            "model": "scripted:7", "engine.name": "kvbaton_conformance.scripted_plugin:plugin", "stages.decode": 2,
            "transport.name": "loopback", "deadline.startup": 3.0, "deadline.shutdown": 0.2,
        }
    )  # fmt: skip
    runtime = PDRuntime.start(settings)
    advance = Stage.advance
    monkeypatch.setattr(
        Stage, "advance", lambda self: advance(self) if self.peer.name != "decode-0" or gate.wait(30) else None
    )
    try:
        for _ in range(2):  # the second call finds it as the first has left it
            assert not runtime.dismiss("decode-0")
        assert not gate.is_set()
    finally:
        gate.set()
        with contextlib.suppress(KvbatonError):  # the stage that was lost did not end as ordered
            runtime.close()


@pytest.mark.clause("C6.7")
def test_a_connect_that_never_returns_is_told_at_the_deadline_and_ends_the_start_soon(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that hangs cannot be ended, so that nobody waits for it in turn after turn."""
    hangs, gone = list[float](), threading.Event()
    look = Service._on_time

    def from_then_on(self: Service, now: float) -> None:
        """The second of the start begins where one hangs: a busy machine may take as long to come so far."""
        if not hangs:
            self._start_by = now + 1.0
        look(self, now)

    class Hangs(LoopbackConnector):
        def connect(self, endpoint: Endpoint) -> None:
            hangs.append(time.time())
            gone.wait()

    class Plugin(LoopbackPlugin):
        def open(self, options: Any, context: ConnectorContext) -> LoopbackConnector:
            return Hangs(context.peer, options)

    settings, _ = load(
        overrides={
            "model": "scripted:7", "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
            "stages.launch": "inproc", "deadline.startup": 1.0, "deadline.shutdown": 6.0,
        }
    )  # fmt: skip
    said = "C6.7: the stages did not all connect within deadline.startup of 1 s"
    monkeypatch.setattr(Service, "_on_time", from_then_on)
    try:
        with pytest.raises(StartupError) as caught:
            PDRuntime.start(settings, connector=Plugin())
    finally:
        gone.set()
    ended = time.time()
    assert str(caught.value) == said
    [told] = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert told.getMessage() == f"{said}; stopping what was started"
    assert told.created < hangs[0] + 6.0, "at once, and not when everything has ended"
    # the deadline, deadline.shutdown once, and the 10 s of the launcher; with deadline.shutdown three times it was 32 s
    assert ended < hangs[0] + 25.0
