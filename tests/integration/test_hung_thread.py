"""A stage that hangs as a thread can neither be killed nor started again: who waits for it is told so."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

from kvbaton import PDRuntime, Request, SamplingParams, load
from kvbaton.errors import KvbatonError
from kvbaton.stage.stage import Stage
from kvbaton_conformance.scripted import ScriptedEngine


@pytest.mark.clause("C6.7", "C6.3")
def test_requests_wait_for_a_hung_thread_no_longer_than_a_start_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    step = ScriptedEngine._decode_step
    monkeypatch.setattr(ScriptedEngine, "_decode_step", lambda self: step(self) if gate.wait(30) else [])
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
        assert time.monotonic() - began < 15
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
