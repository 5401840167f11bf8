"""A stage's part of a trace: what it notes, within which bounds, and how it is read."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvbaton import tracing
from kvbaton.engine import ComputedRange, StageCallbacks, StepOutput
from kvbaton.identity import PeerId, TransferId
from kvbaton.messages import Argument, Call
from kvbaton.stage.engine_loop import EngineLoop, Release
from kvbaton.stage.tracing import Recorder, Ring, TraceSession

A, B = "a" * 32, "b" * 32
T = TransferId("1" * 32)


class Stage:
    def __init__(self) -> None:
        self.now = 5.0
        self.recorder: Recorder | None = None
        self.answers: list[tuple[Any, str | None]] = []
        self.session = TraceSession(
            PeerId("decode-0", 7), self._record, lambda call, result, error: self.answers.append((result, error)),
            lambda: self.now,
        )  # fmt: skip

    def _record(self, recorder: Recorder | None) -> None:
        self.recorder = recorder

    def ask(self, method: str, session: str = A, **arguments: Argument) -> tuple[Any, str | None]:
        getattr(self.session, method)(Call(f"{method}-1", session, f"trace_{method}", arguments))
        return self.answers.pop()


def marked(at: float) -> tracing.Marked:
    return tracing.Marked(at, T, "reserved")


def test_a_ring_keeps_the_newest_and_counts_the_rest() -> None:
    ring = Ring(3)
    for number in range(5):
        ring.note(marked(number))
    assert ring.dropped == 2
    found = []
    while (event := ring.take()) is not None:
        found.append(event)
    assert found == [marked(2), marked(3), marked(4)]
    assert ring.dropped == 2
    ring.note(marked(5))
    assert (ring.take(), ring.dropped) == (marked(5), 2)


@pytest.mark.clause("C9.2")
def test_it_is_read_in_pages_until_nothing_is_left() -> None:
    stage = Stage()
    page, error = stage.ask("start")
    assert (error, page["now"], page["events"]) == (None, 5.0, [])
    assert stage.recorder is not None
    for number in range(5):
        stage.recorder.pump.note(marked(number))
    stage.recorder.engine.note(tracing.Step(1.0, 2.0, ((T, 0, 16),), 1, (), 0, 0))
    first, _ = stage.ask("read", events=4)
    assert (len(first["events"]), first["more"]) == (4, True)
    second, _ = stage.ask("read", bytes=1)
    assert (len(second["events"]), second["more"]) == (1, True)
    last, _ = stage.ask("read")
    assert not last["more"]
    events = list(map(tracing.decode, [*first["events"], *second["events"], *last["events"]]))
    assert events == [*(marked(n) for n in range(5)), tracing.Step(1.0, 2.0, ((T, 0, 16),), 1, (), 0, 0)]


@pytest.mark.clause("C9.2", "C1.5")
def test_there_is_one_session_and_no_stranger_reads_it() -> None:
    stage = Stage()
    assert "knows no trace session" in str(stage.ask("read")[1])
    stage.ask("start")
    mine = stage.recorder
    assert "is traced already" in str(stage.ask("start", B)[1])
    assert "knows no trace session" in str(stage.ask("read", B)[1])
    assert "knows no trace session" in str(stage.ask("stop", B)[1])
    assert stage.ask("start")[1] is None
    assert stage.recorder is mine is not None, "asked again, it goes on"
    mine.pump.note(marked(1))
    page, _ = stage.ask("stop")
    assert len(page["events"]) == 1
    assert stage.recorder is None
    assert stage.ask("start", B)[1] is None


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("order", [{"events": 0}, {"events": "4"}, {"bytes": True}, {"bytes": 1 << 40}])
def test_an_order_that_makes_no_sense_is_refused_by_name(order: dict[str, Argument]) -> None:
    stage = Stage()
    stage.ask("start")
    ((name, _),) = order.items()
    assert f"{name} is " in str(stage.ask("read", **order)[1])


@pytest.mark.clause("C9.3")
def test_what_is_no_event_is_none() -> None:
    good = tracing.encode(marked(1.0))
    assert tracing.decode(good) == marked(1.0)
    for data in (b"", b"\xc1", good[:-3], good + b"\x00", good[:2] + b"\xff" * 9):
        assert tracing.decode(data) is None
    senseless = [marked(float("nan")), marked(float("inf")), marked(-1.0), tracing.Command(2.0, 1.0, "Admit", T)]
    assert [tracing.decode(tracing.encode(event)) for event in senseless] == [None] * 4, "times that no clock shows"


class Engine:
    """Steps as often as it has outputs."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []

    def attach(self, callbacks: StageCallbacks) -> None:
        self.callbacks = callbacks

    def has_work(self) -> bool:
        return bool(self.outputs)

    def step(self) -> list[StepOutput]:
        outputs, self.outputs = self.outputs, []
        self.callbacks.prefill_submitted(ComputedRange(T, 0, 16, ((0,),), None, last=False))
        return outputs

    def release_transfer(self, transfer: TransferId) -> None:
        del transfer


def test_the_engines_thread_notes_whose_tokens_and_ranges_a_step_made_and_what_it_was_told() -> None:
    engine, recorder, now = Engine(), Recorder(), iter(range(100))
    loop = EngineLoop(cast("Any", engine), lambda report: None, lambda transfer, tokens: True, lambda: float(next(now)))
    loop.record(recorder)
    engine.outputs = [StepOutput(TransferId(f"{n:032x}"), (1, 2)) for n in range(40)]
    loop.post(Release(T))
    loop.advance()
    command, step = recorder.engine.take(), recorder.engine.take()
    assert command == tracing.Command(0.0, 1.0, "Release", T)
    assert isinstance(step, tracing.Step)
    assert (step.began, step.ended, step.computed, step.ranges) == (2.0, 3.0, ((T, 0, 16),), 1)
    assert (step.batch, step.tokens, len(step.produced)) == (40, 80, tracing.MAX_NAMED)
    loop.record(None)
    engine.outputs = [StepOutput(T, (1,))]
    loop.advance()
    assert recorder.engine.take() is None
