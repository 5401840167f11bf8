"""A deployment of processes that is asked for too much, cancelled at, and taken apart while it serves."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton import PDRuntime, Request, RequestOutput, SamplingParams, load
from kvbaton.errors import RequestRefused
from kvbaton.handoff.table import Milestones
from kvbaton.hooks import hookimpl
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model

MODEL = scripted_model("scripted:7", ScriptedOptions())


def start(*hooks: object, **more: object) -> PDRuntime:
    base: dict[str, object] = {
        "model": "scripted:7", "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
        "transport.name": "example_shm", "stages.launch": "process", "stages.prefill": 2, "stages.decode": 2,
        "transfer.chunk_bytes": 2048,
    }  # fmt: skip
    overrides = {**base, **{key.replace("__", "."): value for key, value in more.items()}}
    return PDRuntime.start(load(overrides=overrides)[0], hooks=hooks)


def request(number: int, tokens: int = 60, growth: int = 12) -> Request:
    draw = random.Random(number)
    return Request(tuple(draw.randrange(1, 50_000) for _ in range(tokens)), SamplingParams(max_tokens=growth))


def until(condition: Callable[[], bool], what: str, seconds: float = 40.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not within {seconds:g} s"
        threading.Event().wait(0.01)


def is_right(output: RequestOutput, number: int, **how: int) -> bool:
    record = output.record
    return record is not None and record.error is None and record.token_ids == MODEL.generate(request(number, **how))[0]


def check_balance(runtime: PDRuntime) -> None:
    until(lambda: not runtime.statistics()["coordinator"]["transfers"], "C2.5: every stage retires every transfer")
    books = runtime.statistics()
    for name, book in books["coordinator"]["credits"].items():
        assert (book["blocks_out"], book["slots_out"], book["repeated_returns"]) == (0, 0, 0), name
        engine = books[name]["engine"]
        assert (engine["transfers"], engine["blocks_used"], engine["blocks_promised"]) == (0, 0, 0), name
        assert (engine["late_writes"], engine["strays"]) == (0, 0), name


_RETIRED = Milestones.SOURCE_RETIRED


class _Furthest:
    """An observer: the last milestone that the coordinator knew of each request when it ended."""

    def __init__(self) -> None:
        self.known: dict[str, str] = {}
        self.at_end: Counter[str] = Counter()

    def met_all(self) -> bool:
        """While it waited, was reserved for, computed and sent; and, seldom seen, while it was decoded."""
        met = set(self.at_end)
        sending, decoding = {Milestones.PREFILL_STARTED, Milestones.COMMITTED}, {Milestones.ACTIVATED, _RETIRED}
        return {"waiting", Milestones.PLACED, Milestones.RESERVED} <= met and all(met & m for m in (sending, decoding))

    @hookimpl
    def kvbaton_milestone(self, request: str, milestone: str) -> None:
        self.known[request] = milestone

    @hookimpl
    def kvbaton_request_finished(self, record: object) -> None:
        if record.finish_reason == "cancelled":  # type: ignore[attr-defined]
            self.at_end[self.known.get(record.request_id, "waiting")] += 1  # type: ignore[attr-defined]


@pytest.mark.timeout(240)
@pytest.mark.clause("C1.1", "C2.5", "C5.2", "C8.4")
def test_after_three_hundred_cancels_in_every_state_a_request_is_served() -> None:
    """Item 11 of the page, with processes and threads of their own: whatever the cancel meets there."""
    draw = random.Random(11)
    watch = _Furthest()
    with start(watch, limits__waiting=500) as runtime:
        ends: dict[str, RequestOutput] = {}
        live: list[str] = []
        number = 0
        last = time.monotonic()

        def take(seconds: float) -> None:
            """The test's own timeout bounds what a busy machine makes slow, and this what stands still."""
            nonlocal last
            assert time.monotonic() < last + 60, f"cancels met too little: {watch.at_end}"
            for output in runtime.step(seconds):
                if output.finished:
                    ends[output.request_id] = output
                    last = time.monotonic()

        while watch.at_end.total() < 300 or not watch.met_all():
            for _ in range(draw.randrange(1, 12)):
                number += 1
                live.append(
                    runtime.add_request(request(number, draw.randrange(1, 300), draw.randrange(1, 60)), str(number))
                )
            take(draw.random() * 0.01)
            while number - len(ends) > 60:  # a busy machine is not to fall behind ever further
                take(0.05)
            live = [key for key in live if key not in ends]
            draw.shuffle(live)
            while len(live) > draw.randrange(40):
                runtime.abort(live.pop())
        for key in live:
            runtime.abort(key)
        while len(ends) < number:
            take(0.05)
        assert {end.finish_reason for end in ends.values()} <= {"cancelled", "length", "stop"}
        assert is_right(list(runtime.stream(runtime.add_request(request(1), "after")))[-1], 1)
        check_balance(runtime)


@pytest.mark.clause("C2.5", "C6.2")
def test_a_stage_of_each_kind_is_drained_while_the_others_serve() -> None:
    with start() as runtime:
        over = threading.Event()
        ends: list[tuple[int, float, RequestOutput]] = []

        def ask(first: int) -> None:
            number = first
            while not over.is_set():
                began = time.monotonic()
                ends.append((number, began, list(runtime.stream(runtime.add_request(request(number))))[-1]))
                number += 1

        askers = [threading.Thread(target=ask, args=(1000 * n,)) for n in range(6)]
        for asker in askers:
            asker.start()
        try:
            until(lambda: len(ends) > 30, "requests are served")
            before = {name: runtime.stage(name).pid for name in runtime.stages}
            for name in ("decode-1", "prefill-0"):
                assert runtime.drain(name, timeout=30), f"{name} is not empty"
            drained = time.monotonic()
            served = len(ends)
            until(lambda: len(ends) > served + 30, "the others serve on")
        finally:
            over.set()
            for asker in askers:
                asker.join(30)
        assert all(is_right(output, number) for number, _, output in ends), "nobody noticed"
        pairs = {(e.record.prefill, e.record.decode) for _, began, e in ends if began > drained and e.record}
        assert pairs == {("prefill-1", "decode-0")}
        assert {(e.record.prefill, e.record.decode) for _, _, e in ends if e.record} > pairs, "they served before"
        books = runtime.statistics()
        for name in ("decode-1", "prefill-0"):
            assert books["coordinator"]["credits"][name]["transfers"] == books[name]["engine"]["transfers"] == 0
        assert {name: runtime.stage(name).pid for name in runtime.stages} == before
        check_balance(runtime)


@pytest.mark.clause("C2.6")
def test_overload_is_refused_at_once_and_costs_those_that_were_taken_nothing(tmp_path: Path) -> None:
    """The queue never grows beyond its bound; what is refused leaves nothing, and its id is free."""
    (hold := tmp_path / "hold").touch()  # nobody ends meanwhile, however slowly requests come on a busy machine
    with start(limits__waiting=10, engine__options={"transfer_slots": 2, "held_by": str(hold)}) as runtime:
        taken, refused, why = [], [], ""
        for number in range(400):
            try:
                taken.append((number, runtime.add_request(request(number, 100, 24), str(number))))
            except RequestRefused as error:
                refused.append(number)
                why = str(error)
            assert runtime.statistics()["coordinator"]["waiting"] <= 10 if number % 40 == 0 else True
        hold.unlink()
        assert refused
        assert "10 requests wait already; try later, or raise limits.waiting" in why
        for number, key in taken:
            assert is_right(list(runtime.stream(key))[-1], number, tokens=100, growth=24)
        key = runtime.add_request(request(refused[0]), str(refused[0]))
        assert is_right(list(runtime.stream(key))[-1], refused[0])
        assert runtime.statistics()["coordinator"]["live"] == 0
        check_balance(runtime)
