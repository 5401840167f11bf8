"""The contract, at the engine's level, and a whole deployment over the reference transport."""

from __future__ import annotations

import pytest

from kvbaton import PDRuntime, Request, SamplingParams, load, run_colocated
from kvbaton.identity import TransferId
from kvbaton_conformance import EngineConformance
from kvbaton_engine_skeleton.engine import SkeletonEngine


def break_request(engine: SkeletonEngine, transfer: TransferId) -> None:
    """A token that is no token: this request, and only this one, cannot be computed."""
    part = engine._parts[transfer]
    part.sequence.tokens[-1] = 10**6
    part.tokens = [10**6]


class TestSkeleton(EngineConformance):
    engine = "skeleton"
    model = "toy"
    engine_options = {"block_tokens": 4, "blocks": 64, "prefill_chunk": 8, "transfer_slots": 8}
    break_request = staticmethod(break_request)


@pytest.mark.clause("A1")
def test_a_deployment_answers_as_one_engine() -> None:
    settings, _ = load(overrides={"engine.name": "skeleton", "model": "toy", "transport.name": "loopback"})
    requests = [Request(tuple(b"The capital of France is"), SamplingParams(max_tokens=8, seed=n)) for n in range(3)]
    with PDRuntime.start(settings) as runtime:
        keys = [runtime.add_request(request) for request in requests]
        records = [list(runtime.stream(key))[-1].record for key in keys]
    assert [record.token_ids for record in records if record] == [
        r.token_ids for r in run_colocated(settings, requests)
    ]
