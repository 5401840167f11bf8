"""Many requests at once through the whole runtime, a third of them cancelled at random moments."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import psutil
import pytest

from kvbaton import PDRuntime, Request, RequestOutput, RequestRecord, SamplingParams, Settings, load, run_colocated
from kvbaton.segments import Segments
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model
from kvbaton_loopback import connector as loopback
from kvbaton_loopback.copying import copy_segments

#: Seconds that everything may take; a healthy run needs two.
PATIENCE = 60.0

REQUESTS = 32
SCRIPTED = {
    "model": "scripted:1",
    "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
    "engine.options": {"planes": 2},
    "transfer.chunk_bytes": 300,
}
#: Every request's bits are its own, so that tokens can be compared although batches differ (A3).
TINY = {
    "model": "tiny-llama",
    "engine.options": {"block_tokens": 4, "blocks": 128, "prefill_chunk": 8, "batching": "isolated"},
    "transfer.chunk_bytes": 2048,
}


def settings(base: Mapping[str, object], prefill: int, decode: int) -> Settings:
    stages = {"stages.prefill": prefill, "stages.decode": decode, "transport.name": "loopback"}
    return load(overrides={**base, **stages})[0]


def draw_requests(rng: random.Random, vocabulary: int) -> list[Request]:
    """Prompts of 1 to 60 tokens; half of them begin alike, so that prefixes are shared and differ between stages."""
    beginning = tuple(rng.randrange(vocabulary) for _ in range(20))
    requests = []
    for index in range(REQUESTS):
        rest = tuple(rng.randrange(vocabulary) for _ in range(rng.randrange(1, 40)))
        prompt = (*beginning, *rest) if index % 2 else rest
        sampling = SamplingParams(max_tokens=rng.randrange(1, 20), seed=index, temperature=0.8 * (index % 3 == 0))
        requests.append(Request(prompt, sampling))
    return requests


def serve(
    runtime: PDRuntime, requests: Sequence[Request], rng: random.Random, share: float
) -> dict[str, RequestRecord]:
    """Run everything, aborting ``share`` of the requests at random moments; the record of each."""
    ends: dict[str, RequestRecord] = {}
    streamed: dict[str, list[int]] = {str(index): [] for index in range(len(requests))}
    doomed = {str(index) for index in range(len(requests)) if rng.random() < share}
    for index, request in enumerate(requests):
        runtime.add_request(request, str(index))
    give_up = time.monotonic() + PATIENCE
    while len(ends) < len(requests):
        assert time.monotonic() < give_up, f"only {sorted(ends)} of {len(requests)} requests have ended"
        for key in sorted(doomed):
            if rng.random() < 0.05:
                runtime.abort(key)
                doomed.discard(key)
        for output in runtime.step(0.005):
            collect(output, streamed, ends)
    for key, record in ends.items():
        assert tuple(streamed[key]) == record.token_ids
    return ends


def collect(output: RequestOutput, streamed: dict[str, list[int]], ends: dict[str, RequestRecord]) -> None:
    assert output.request_id not in ends, "nothing follows the end of a request"
    streamed[output.request_id] += output.token_ids
    if output.finished:
        assert output.record is not None
        ends[output.request_id] = output.record


def settled_statistics(runtime: PDRuntime) -> dict[str, Any]:
    """The books once every stage has retired everything; bounded."""
    give_up = time.monotonic() + PATIENCE
    while True:
        books = runtime.statistics()
        if not books["coordinator"]["transfers"] or time.monotonic() > give_up:
            return books


def check_balance(books: Mapping[str, Any]) -> None:
    """C2.5, C8.4: every credit, block, slot and chunk is back."""
    coordinator = books["coordinator"]
    assert (coordinator["live"], coordinator["waiting"], coordinator["transfers"]) == (0, 0, 0)
    for name, book in coordinator["credits"].items():
        assert (book["blocks_out"], book["slots_out"], book["repeated_returns"]) == (0, 0, 0), name
        engine, transport = books[name]["engine"], books[name]["transport"]
        assert engine["blocks_free"] + engine["blocks_prefix"] == engine["blocks_total"], (name, engine)
        assert engine["blocks_used"] == engine["blocks_leased"] == engine["blocks_promised"] == 0, (name, engine)
        assert (engine["transfers"], engine["final_slots_free"]) == (0, book["slots"]), (name, engine)
        for figure in ("outstanding", "inflight_bytes", "quarantined_bytes", "grants", "unproven_chunks"):
            assert transport[figure] == 0, (name, figure, transport)
        assert not any(key.startswith("violations") for key in books[name]["stage"]), books[name]["stage"]
    assert not any(key.startswith("violations") for key in coordinator["counts"]), coordinator["counts"]


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    """T10: no thread and no descriptor more than before."""
    threads, descriptors = set(threading.enumerate()), psutil.Process().num_fds()
    yield
    left = [thread.name for thread in threading.enumerate() if thread not in threads and "kvbaton" in thread.name]
    assert not left, f"threads are left: {left}"
    assert psutil.Process().num_fds() <= descriptors


@pytest.mark.clause("A1", "C2.5", "C8.4", "C1.1", "T10")
@pytest.mark.parametrize("stages", [(1, 1), (2, 2)], ids=["1P1D", "2P2D"])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_rest_agree_and_all_books_balance(stages: tuple[int, int], seed: int) -> None:
    """32 requests, 30 % cancelled: a wrong byte would change a scripted engine's tokens."""
    rng = random.Random(f"{stages} {seed}")
    requests = draw_requests(rng, 100)
    model = scripted_model("scripted:1", ScriptedOptions(planes=2))
    with PDRuntime.start(settings(SCRIPTED, *stages)) as runtime:
        ends = serve(runtime, requests, rng, 0.3)
        check_balance(settled_statistics(runtime))
    for key, record in ends.items():
        tokens, depths, reason = model.generate(requests[int(key)])
        if record.finish_reason == "cancelled":
            assert record.token_ids == tokens[: len(record.token_ids)]
        else:
            assert (record.token_ids, record.exit_depths, record.finish_reason) == (tokens, depths, reason.value)
            assert record.milestones["placed"] <= record.milestones["received"] <= record.milestones["finished"]


@pytest.mark.clause("A1", "A2", "C2.5", "C8.4")
@pytest.mark.parametrize("stages", [(1, 1), (2, 2)], ids=["1P1D", "2P2D"])
def test_a_real_model_agrees_under_load(stages: tuple[int, int]) -> None:
    """The same with a tiny Llama, greedy and seeded."""
    rng = random.Random(f"{stages}")
    requests = draw_requests(rng, 90)
    chosen = settings(TINY, *stages)
    expected = run_colocated(chosen, requests)
    with PDRuntime.start(chosen) as runtime:
        ends = serve(runtime, requests, rng, 0.3)
        check_balance(settled_statistics(runtime))
    finished = [index for index in range(REQUESTS) if ends[str(index)].finish_reason != "cancelled"]
    assert len(finished) >= REQUESTS // 2
    for index in finished:
        got, want = ends[str(index)], expected[index]
        assert (got.token_ids, got.exit_depths, got.finish_reason) == (
            want.token_ids, want.exit_depths, want.finish_reason,
        )  # fmt: skip


@pytest.mark.clause("A1", "T3")
def test_one_damaged_byte_changes_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of this file: one bit of one byte, flipped on the wire."""
    damaged: list[tuple[int, int]] = []

    def copy_and_damage(source: Segments, sources: Any, target: Segments, targets: Any) -> None:
        copy_segments(source, sources, target, targets)
        if not damaged:
            region, offset, _ = target.triples()[0]
            targets[region][offset] ^= 1
            damaged.append((region, offset))

    monkeypatch.setattr(loopback, "copy_segments", copy_and_damage)
    request = Request(tuple(range(30)), SamplingParams(max_tokens=8))
    with PDRuntime.start(settings(SCRIPTED, 1, 1)) as runtime:
        ends = serve(runtime, [request], random.Random(0), 0.0)
    tokens, _, _ = scripted_model("scripted:1", ScriptedOptions(planes=2)).generate(request)
    assert damaged
    assert ends["0"].finish_reason == "length"
    assert ends["0"].token_ids != tokens
