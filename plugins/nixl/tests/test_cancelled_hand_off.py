"""Whole hand-offs over TCP in processes, cancelled while their bytes are under way (C5.1, C5.2)."""

import random

import pytest

from kvbaton import PDRuntime, Request, SamplingParams, load
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model
from kvbaton_conformance.suite.handoff.runtime import DEADLINES, Fleet


@pytest.mark.slow
@pytest.mark.clause("C5.1", "C5.2", "C2.5", "C6.1", "T9")
def test_blocks_of_a_cancelled_request_are_not_reused_before_its_bytes_stopped():
    """Large tokens, little memory, half of the requests cancelled early: blocks are used again at once.

    The scripted engine knows every byte of its memory: one that is written where nobody may write is counted.
    """
    engine = ScriptedOptions(
        planes=1, token_bytes=(1 << 15, 1 << 15), prefill_blocks=48, decode_blocks=40, chunk=16, max_tokens=64,
        prefix_caching=False,
    )  # fmt: skip
    settings, _ = load(
        overrides={
            "model": "scripted:1", "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
            "engine.options": engine.model_dump(mode="json"), "stages.prefill": 1, "stages.decode": 1,
            "stages.launch": "process", "transport.name": "nixl", "transport.options": {"ucx": {"TLS": "tcp,self"}},
            "transfer.chunk_bytes": 1 << 20, **dict.fromkeys(DEADLINES, 30.0),
        }
    )  # fmt: skip
    draw = random.Random(7)
    runtime = PDRuntime.start(settings)
    try:
        fleet = Fleet(runtime, scripted_model("scripted:1", engine))
        doomed = set()
        for index in range(16):
            key = str(index)
            fleet.add(key, Request(tuple(range(100 * index, 100 * index + 40)), SamplingParams(max_tokens=3)))
            if index % 2:
                doomed.add(key)
        waiting = set(doomed)
        while not fleet.all_ended():
            if waiting and draw.random() < 0.3:
                key = min(waiting, key=int)
                waiting.discard(key)
                runtime.abort(key)
            fleet.run_until(lambda: fleet.step() or fleet.all_ended() or draw.random() < 0.3, "C6.7: requests end")
        for key, record in fleet.ends.items():
            assert record.finish_reason in ("length", "stop") or key in doomed, record.error
            fleet.check_answer(key)
        assert any(record.finish_reason == "cancelled" for record in fleet.ends.values())
        fleet.check_balance()
    finally:
        runtime.close()
