"""Prefix-aware routing through a whole runtime: what it saves, what it must not cost, and that it never matters."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, load
from kvbaton.handoff.table import Milestones
from kvbaton.hooks import StageLoad, hookimpl
from kvbaton_conformance.scripted import ScriptedEngine
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model

BLOCK, TOGETHER, BEGINNING, END = 4, 8, 64, 8
MODEL = scripted_model("scripted:3", ScriptedOptions())


def prompts(count: int, beginnings: int, seed: int = 0) -> list[Request]:
    """``beginnings`` 0: each has its own."""
    draw = random.Random(seed)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(draw.randrange(50_000) for _ in range(length))

    known = [tokens(BEGINNING) for _ in range(beginnings)]
    sampling = SamplingParams(max_tokens=3)
    return [
        Request((*(draw.choice(known) if known else tokens(BEGINNING)), *tokens(END)), sampling) for _ in range(count)
    ]


class Pairs:
    """Requests two by two, whose pairs no thread's pace has a say in.

    The second is placed while the first is reserved for and not computed, and the next two once nothing is left of
    these: else who has ended by then weighs nothing, and all may go to one stage.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reserved, self._computes = threading.Semaphore(0), threading.Event()
        step = ScriptedEngine._prefill_step
        monkeypatch.setattr(
            ScriptedEngine, "_prefill_step", lambda engine: step(engine) if self._computes.wait(60) else []
        )

    @hookimpl
    def kvbaton_milestone(self, milestone: str) -> None:
        if milestone == Milestones.RESERVED:
            self._reserved.release()

    def add(self, runtime: PDRuntime, requests: Iterator[tuple[int, Request]]) -> int:
        """The next two, if there are; how many."""
        while runtime.statistics()["coordinator"]["transfers"]:
            runtime.step(0.001)
        self._computes.clear()
        added = 0
        for number, request in requests:
            runtime.add_request(request, str(number))
            assert self._reserved.acquire(timeout=30), "it is not reserved for"
            added += 1
            if added == 2:
                break
        self._computes.set()
        return added


def serve(
    policy: str, requests: Sequence[Request], blocks: int, pairs: Pairs | None = None, hooks: Sequence[object] = ()
) -> tuple[list[RequestRecord], Any]:
    """The records in the order of ``requests``, each checked, and the coordinator's books at the end."""
    settings = load(
        overrides={
            "model": "scripted:3",
            "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
            "engine.options": {"prefill_blocks": blocks, "decode_blocks": blocks, "block_tokens": BLOCK, "chunk": 32},
            "transport.name": "loopback",
            "stages.prefill": 2,
            "stages.decode": 2,
            "routing.policy": policy,
        }
    )[0]
    records: dict[str, RequestRecord] = {}
    with PDRuntime.start(settings, hooks=[*hooks, *filter(None, [pairs])]) as runtime:
        waiting, live = iter(enumerate(requests)), 0
        while len(records) < len(requests):
            if pairs is None:
                for number, request in itertools.islice(waiting, TOGETHER - live):
                    runtime.add_request(request, str(number))
                    live += 1
            elif not live:
                live = pairs.add(runtime, waiting)
            for output in runtime.step(20.0):
                if output.finished:
                    assert output.error is None, output.error
                    assert output.record is not None
                    records[output.request_id] = output.record
                    live -= 1
        books = runtime.statistics()
    found = [records[str(number)] for number in range(len(requests))]
    for record, request in zip(found, requests, strict=True):
        assert record.token_ids == MODEL.generate(request)[0]
        assert record.bytes == (len(request.prompt) - record.prefix_decode) * sum(MODEL.token_bytes) + MODEL.final_bytes
    for name, figures in books.items():
        if name != "coordinator":
            assert figures["engine"]["late_writes"] == figures["engine"]["strays"] == 0
    return found, books["coordinator"]


def sent(records: Sequence[RequestRecord]) -> int:
    return sum(record.bytes for record in records)


def test_shared_beginnings_are_sent_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve beginnings, of which a stage can keep about half besides what is live."""
    requests = prompts(240, beginnings=12)
    blocks = 6 * BEGINNING // BLOCK + TOGETHER * 8
    pairs = Pairs(monkeypatch)
    least, _ = serve("least-loaded", requests, blocks, pairs)
    aware, books = serve("prefix-aware", requests, blocks, pairs)
    assert sent(aware) < 0.85 * sent(least)
    assert sum(r.prefix_prefill for r in aware) > sum(r.prefix_prefill for r in least)
    assert all(count > 60 for count in Counter(record.decode for record in aware).values()), "neither is left out"
    routing = books["routing"]
    assert routing["chosen"] >= len(requests)
    assert routing["decode_tokens_found"] >= sum(record.prefix_decode for record in aware)
    assert routing["prefill_tokens_found"] >= sum(record.prefix_prefill for record in aware)


class LeastLoaded:
    """Which pair had the least load when each request was placed; it is asked first, and leaves the choice."""

    def __init__(self) -> None:
        self.pairs: dict[str, tuple[str, str]] = {}

    @hookimpl
    def kvbaton_choose_pair(
        self, request: str, prefill: Sequence[StageLoad], decode: Sequence[StageLoad], pairs: Sequence[tuple[str, str]]
    ) -> None:
        loads = {stage.name: stage.load for stage in (*prefill, *decode)}
        self.pairs[request] = min(pairs, key=lambda pair: loads[pair[0]] + loads[pair[1]])


def test_where_nothing_is_shared_nothing_is_lost() -> None:
    requests = prompts(120, beginnings=0)
    least, books = serve("least-loaded", requests, 300)
    aware, _ = serve("prefix-aware", requests, 300, hooks=[watch := LeastLoaded()])
    assert books["routing"] == {}
    assert sent(aware) == sent(least)
    assert [(record.prefill, record.decode) for record in aware] == [watch.pairs[str(n)] for n in range(len(requests))]


@pytest.mark.clause("C3.3")
def test_a_policy_that_is_always_wrong_costs_and_breaks_nothing() -> None:
    class Contrary:
        """Sends everything where its beginning was not."""

        def __init__(self) -> None:
            self.turn = 0

        def kvbaton_choose_pair(self, prompt: tuple[int, ...], pairs: Sequence[tuple[str, str]]) -> tuple[str, str]:
            assert len(prompt) == BEGINNING + END
            self.turn += 1
            return pairs[self.turn % len(pairs)]

    policy = Contrary()
    serve("prefix-aware", prompts(60, beginnings=3), 200, hooks=[policy])
    assert policy.turn >= 60
