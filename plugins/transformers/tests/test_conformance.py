"""The reference engine against the kit's engine level: a plain decoder, and a looped one in both layouts."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.identity import TransferId
from kvbaton_conformance import EngineConformance
from kvbaton_transformers.engine import TransformersEngine
from kvbaton_transformers.runner import Forward, Row

SMALL = {"block_tokens": 4, "blocks": 64, "prefill_chunk": 8, "transfer_slots": 8, "batching": "isolated"}


def break_request(engine: TransformersEngine, transfer: TransferId) -> None:
    """Every forward that computes this request fails."""
    job, forward = engine._jobs[transfer], engine._runner.forward

    def failing(rows: Sequence[Row]) -> Sequence[Forward]:
        if job.sequence is not None and any(row.tables is job.held.tables for row in rows):
            raise RuntimeError("broken by the test")
        return forward(rows)

    engine._runner.forward = failing  # type: ignore[assignment,method-assign]


class TestLlama(EngineConformance):
    engine = "transformers"
    model = "tiny-llama"
    engine_options = SMALL
    break_request = staticmethod(break_request)


class TestLastExited(EngineConformance):
    engine = "transformers"
    model = "tiny-llama"
    engine_options = {**SMALL, "loops": {"max_depth": 4, "layout": "last_exited", "threshold": 0.6}}
    break_request = staticmethod(break_request)


class TestShared(EngineConformance):
    engine = "transformers"
    model = "tiny-llama"
    engine_options = {**SMALL, "loops": {"max_depth": 4, "layout": "shared", "threshold": 0.6}}
    break_request = staticmethod(break_request)


class TestLlamaOnDevice(EngineConformance):
    """The same on a GPU: its memory is there, and its work is queued."""

    engine = "transformers"
    model = "tiny-llama"
    engine_options = SMALL
    device = 0
    break_request = staticmethod(break_request)


class TestQuantised(EngineConformance):
    engine = "transformers"
    model = "tiny-llama"
    engine_options = {**SMALL, "kv_dtype": "fp8"}
    break_request = staticmethod(break_request)


class TestSpeculation(EngineConformance):
    engine = "transformers"
    model = "tiny-llama"
    engine_options = {**SMALL, "speculation": "prompt-lookup", "ngram": 1}
    break_request = staticmethod(break_request)


class TestLastExitedSpeculation(EngineConformance):
    engine = "transformers"
    model = "tiny-llama"
    engine_options = {**TestLastExited.engine_options, "speculation": "prompt-lookup", "ngram": 1}
    break_request = staticmethod(break_request)
