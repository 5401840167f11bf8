"""The engine by itself: colocated against Hugging Face, and what a stage sees of it in the roles P and D."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from pydantic import ValidationError
from transformers import PreTrainedModel

from kvbaton.engine import (
    Admission,
    ComputedRange,
    FinishReason,
    Request,
    Role,
    SamplingParams,
    StepOutput,
)
from kvbaton.errors import (
    ConfigurationError,
    LocalProtocolError,
    ModelNotFound,
    ProfilingError,
    PromptTooLong,
    RequestRefused,
    SettingsError,
    UnsupportedModel,
)
from kvbaton.identity import TransferId, new_transfer_id
from kvbaton.reservation import Reservation
from kvbaton_transformers import Loops, TransformersOptions, plugin
from kvbaton_transformers.checkpoints import ByteTokenizer, Checkpoint
from kvbaton_transformers.engine import TransformersEngine
from kvbaton_transformers.looped import Layout, LoopedModel
from kvbaton_transformers.random_weights import random_model
from kvbaton_transformers.testing import tiny_llama, tiny_looped, tiny_qwen


class Recorder:
    """What a stage is told."""

    def __init__(self) -> None:
        self.ranges: list[ComputedRange] = []
        self.reservations: list[Reservation] = []
        self.refusals: list[tuple[TransferId, str, bool]] = []
        self.active: list[TransferId] = []
        self.open = True

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        return self.open

    def prefill_submitted(self, computed: ComputedRange) -> None:
        self.ranges.append(computed)

    def reserved(self, reservation: Reservation) -> None:
        self.reservations.append(reservation)

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> None:
        self.refusals.append((transfer, reason, retry))

    def activated(self, transfer: TransferId) -> None:
        self.active.append(transfer)


def engine(
    model: PreTrainedModel | LoopedModel | None = None,
    role: Role = Role.COLOCATED,
    *,
    end: frozenset[int] = frozenset(),
    **options: Any,
) -> TransformersEngine:
    checkpoint = Checkpoint("tiny", model or tiny_llama(), {"weights": "tiny"}, end)
    settings = {"block_tokens": 4, "blocks": 64, "prefill_chunk": 8, "transfer_slots": 4} | options
    made = TransformersEngine(checkpoint, TransformersOptions(**settings), role, ByteTokenizer)
    made.regions(None)
    return made


def staged(role: Role, **options: Any) -> tuple[TransformersEngine, Recorder]:
    made, recorder = engine(role=role, **options), Recorder()
    made.attach(recorder)
    return made, recorder


def prompt(length: int, text: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(text)
    return tuple(torch.randint(1, 256, (length,), generator=generator).tolist())


def ask(length: int, text: int = 0, **sampling: Any) -> Request:
    return Request(prompt(length, text), SamplingParams(**({"max_tokens": 16} | sampling)))


def finish(made: TransformersEngine, limit: int = 500) -> dict[TransferId, list[StepOutput]]:
    outputs: dict[TransferId, list[StepOutput]] = {}
    for _ in range(limit):
        if not made.has_work():
            return outputs
        for output in made.step():
            outputs.setdefault(output.transfer, []).append(output)
    raise AssertionError("the engine does not come to an end")


def serve(made: TransformersEngine, requests: Sequence[Request]) -> list[list[StepOutput]]:
    transfers = [new_transfer_id() for _ in requests]
    for transfer, request in zip(transfers, requests, strict=True):
        made.add(transfer, request)
    outputs = finish(made)
    balanced(made)
    return [outputs[transfer] for transfer in transfers]


def ids(outputs: Sequence[StepOutput]) -> list[int]:
    assert all(output.error is None for output in outputs), outputs
    return [token for output in outputs for token in output.token_ids]


def balanced(made: TransformersEngine) -> None:
    made.check()
    s = made.statistics()
    assert s["blocks_used"] == s["blocks_leased"] == s["blocks_under_lease"] == s["blocks_promised"] == 0
    assert s["blocks_free"] + s["blocks_prefix"] == s["blocks_total"]
    assert s["final_slots_free"] == s["final_slots_total"]
    assert s["transfers"] == s["requests_waiting"] == s["requests_running"] == 0


# -- colocated ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen])
@pytest.mark.parametrize("batching", ["grouped", "isolated"])
def test_greedy_tokens_are_those_of_generate(build: Callable[[], Any], batching: str) -> None:
    model = build()
    requests = [ask(length, length) for length in (1, 3, 4, 5, 8, 9, 31)]
    outputs = serve(engine(model, batching=batching, max_running=4), requests)
    for request, output in zip(requests, outputs, strict=True):
        tokens = torch.tensor([request.prompt])
        expected = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, do_sample=False)
        assert ids(output) == expected[0, tokens.shape[1] :].tolist()
        assert output[-1].finish_reason is FinishReason.LENGTH


def test_seeded_sampling_repeats_and_differs_between_seeds() -> None:
    requests = [ask(9, temperature=1.0, seed=seed) for seed in (1, 2, 1)]
    first, other, again = (ids(output) for output in serve(engine(), requests))
    assert first == again != other
    made = engine(max_running=1, prefix_caching=False)
    assert ids(serve(made, requests[:1])[0]) == first


def test_an_engine_whose_memory_was_not_had_is_closed_as_any_other() -> None:
    """The head of this family looks into its decoder stack, which only what runs it can find."""
    config = transformers.OPTConfig(
        vocab_size=256, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=4, word_embed_proj_dim=32
    )
    checkpoint = Checkpoint("opt", random_model(config, 0), {"weights": "none"}, frozenset())
    made = TransformersEngine(checkpoint, TransformersOptions(block_tokens=4, blocks=8), Role.DECODE, ByteTokenizer)
    with pytest.raises(UnsupportedModel, match="opt cannot be served: its logits cannot be computed"):
        made.regions(None)
    made.close()


@pytest.mark.clause("C3.5", "A1")
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"kv_dtype": "fp8"}, {"loops": Loops(max_depth=3, threshold=0.6)}])
def test_an_engine_is_what_it_is_whatever_dtype_the_process_has_for_default(
    options: dict[str, Any], default: torch.dtype
) -> None:
    """The default is the process's, and transformers sets it while another stage's thread builds a model."""

    def served() -> Any:
        settings = TransformersOptions(**{"block_tokens": 4, "blocks": 64, "batching": "isolated"} | options)
        made = plugin.open_engine("tiny-llama", settings, Role.COLOCATED, None)
        outputs = serve(made, [ask(9), ask(13, 1, temperature=1.0, seed=5)])
        return made.geometry, [(ids(output), [d for step in output for d in step.exit_depths]) for output in outputs]

    expected, before = served(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        assert served() == expected
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("layout", list(Layout))
def test_looped_models_report_an_exit_depth_per_token(layout: Layout) -> None:
    made = engine(tiny_looped(layout=layout), batching="isolated")
    (output,) = serve(made, [ask(13)])
    depths = [depth for step in output for depth in step.exit_depths]
    assert len(depths) == len(ids(output)) == 16
    assert len(set(depths)) > 1, "exits at different depths"
    assert all(1 <= depth <= 4 for depth in depths)
    assert made.statistics()["blocks_total"] == 64 * (4 if layout is Layout.LAST_EXITED else 1)
    assert made.capacity().blocks == made.statistics()["blocks_total"]
    assert made.capacity().blocks_for(5) == 2 * made.capacity().planes


def test_a_shared_loop_prefills_in_one_piece_and_shares_no_prefix() -> None:
    made, recorder = staged(Role.PREFILL, model=tiny_looped(layout=Layout.SHARED), prefill_chunk=4)
    for _ in range(2):
        transfer = new_transfer_id()
        made.reserve_transfer(Admission(transfer, ask(21)))
        made.step()
        assert [(r.start, r.end, r.last) for r in recorder.ranges] == [(0, 21, True)]
        recorder.ranges.clear()
        made.release_transfer(transfer)
    assert made.statistics()["blocks_prefix"] == 0
    balanced(made)


@pytest.mark.clause("A1")
@pytest.mark.parametrize("model", ["llama", "last_exited", "shared"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("batching", ["grouped", "isolated"])
def test_preemption_changes_no_token(model: str, temperature: float, batching: str) -> None:
    builds: dict[str, Callable[[], Any]] = {
        "llama": tiny_llama,
        "last_exited": tiny_looped,
        "shared": lambda: tiny_looped(layout=Layout.SHARED),
    }
    build = builds[model]
    requests = [ask(10, seed, temperature=temperature, seed=seed, max_tokens=20) for seed in range(4)]
    roomy = engine(build(), batching=batching, prefix_caching=False)
    expected = [(ids(o), [d for s in o for d in s.exit_depths]) for o in serve(roomy, requests)]
    assert roomy.statistics()["preemptions_total"] == 0
    tight = engine(build(), batching=batching, blocks=14, prefix_caching=False)
    outputs = serve(tight, requests)
    assert tight.statistics()["preemptions_total"] > 0
    assert [(ids(o), [d for s in o for d in s.exit_depths]) for o in outputs] == expected


@pytest.mark.clause("C8.4")
def test_a_cached_prompt_is_not_computed_again_but_for_its_end() -> None:
    made = engine()
    request = ask(16)
    first = ids(serve(made, [request])[0])
    rows: list[tuple[int, int]] = []
    forward = made._runner.forward

    def watched(work: Any) -> Any:
        rows.extend((row.start, len(row.tokens)) for row in work)
        return forward(work)

    made._runner.forward = watched  # type: ignore[method-assign, assignment]
    assert ids(serve(made, [request])[0]) == first
    assert rows[0] == (12, 4)
    longer = Request((*request.prompt, *first[:8], 7), SamplingParams(max_tokens=1))
    rows.clear()
    serve(made, [longer])
    # What was generated is found as well.
    assert rows[0] == (24, 1)


@pytest.mark.clause("C3.4", "C8.4")
def test_a_resumed_request_computes_its_last_token_even_when_all_of_it_is_cached() -> None:
    made, request, transfer = engine(), ask(8), new_transfer_id()
    expected = ids(serve(made, [request])[0])
    made.add(transfer, request)
    job = made._jobs[transfer]
    while job.length % 4:
        made.step()
    made.step()
    while job.length % 4:
        made.step()
    made._scheduler._preempt(job)
    assert made._cache.match(job.held.tokens) == job.length
    finish(made)
    assert job.generated == expected


def test_stop_conditions() -> None:
    made = engine()
    (plain,) = serve(made, [ask(9)])
    tokens = ids(plain)
    at = next(i for i in range(3, 16) if tokens[i] not in tokens[:i])
    (stopped,) = serve(made, [ask(9, stop_token_ids=(tokens[at],))])
    assert (ids(stopped), stopped[-1].finish_reason) == (tokens[: at + 1], FinishReason.STOP)
    text = ByteTokenizer().decode(tokens)
    printable = next(c for c in text[2:] if c.isascii())
    (by_text,) = serve(made, [ask(9, stop=("no such text", printable))])
    assert by_text[-1].finish_reason is FinishReason.STOP
    assert printable in ByteTokenizer().decode(ids(by_text))
    assert printable not in ByteTokenizer().decode(ids(by_text)[:-1])
    ending = engine(end=frozenset({tokens[at]}))
    (ended,) = serve(ending, [ask(9)])
    assert (ids(ended), ended[-1].finish_reason) == (tokens[: at + 1], FinishReason.STOP)
    (ignoring,) = serve(ending, [ask(9, ignore_eos=True)])
    assert (ids(ignoring), ignoring[-1].finish_reason) == (tokens, FinishReason.LENGTH)


def test_a_stop_text_without_a_tokenizer_ends_that_request_alone() -> None:
    made = engine()
    made._generator._open_tokenizer = None  # type: ignore[union-attr]
    broken, fine = serve(made, [ask(9, stop=("x",)), ask(9)])
    assert "tokenizer" in str(broken[-1].error)
    assert len(ids(fine)) == 16


@pytest.mark.clause("C6.3")
def test_one_requests_fault_is_not_the_others() -> None:
    expected = [ids(output) for output in serve(engine(), [ask(9, seed) for seed in range(3)])]
    made = engine()
    forward, poison = made._runner.forward, prompt(9, 1)[8]

    def faulty(rows: Any) -> Any:
        if any(row.start == 8 and row.tokens[0] == poison for row in rows):
            raise RuntimeError("a broken row")
        return forward(rows)

    made._runner.forward = faulty  # type: ignore[method-assign]
    outputs = serve(made, [ask(9, seed) for seed in range(3)])
    assert str(outputs[1][-1].error) == "a broken row"
    assert [ids(outputs[0]), ids(outputs[2])] == [expected[0], expected[2]]


def test_broken_logits_end_one_request() -> None:
    made = engine()
    draw = made._generator.draw  # type: ignore[union-attr]

    def faulty(hidden: Any, requests: Any, drawn: Any) -> Any:
        hidden = [h * float("nan") if r.prompt == prompt(9, 1) and n == 2 else h for h, r, n in
                  zip(hidden, requests, drawn, strict=True)]  # fmt: skip
        return draw(hidden, requests, drawn)

    made._generator.draw = faulty  # type: ignore[union-attr, method-assign]
    outputs = serve(made, [ask(9, seed) for seed in range(3)])
    assert isinstance(outputs[1][-1].error, ValueError)
    assert [len(ids(outputs[i])) for i in (0, 2)] == [16, 16]


def test_an_aborted_colocated_request_leaves_nothing() -> None:
    made = engine()
    transfer = new_transfer_id()
    made.add(transfer, ask(20))
    for _ in range(4):
        made.step()
    made.release_transfer(transfer)
    made.release_transfer(transfer)
    assert not made.has_work()
    balanced(made)


def test_requests_that_can_never_be_served_are_refused() -> None:
    made = engine(blocks=8)
    with pytest.raises(PromptTooLong, match="32 tokens"):
        made.add(new_transfer_id(), ask(20, max_tokens=13))
    with pytest.raises(RequestRefused, match="vocabulary of 256"):
        made.add(new_transfer_id(), Request((3, 256), SamplingParams()))
    with pytest.raises(RequestRefused, match="cannot be served"):
        made.add(new_transfer_id(), Request((-1,), SamplingParams()))
    made.add(new_transfer_id(), ask(20, max_tokens=12))
    finish(made)
    balanced(made)


# -- P -----------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("A2")
def test_p_never_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("A2: P samples")

    monkeypatch.setattr("kvbaton_transformers.engine.Generator", refuse)
    monkeypatch.setattr("kvbaton_transformers.generation.sample", refuse)
    monkeypatch.setattr("kvbaton_transformers.runner.Runner.logits", refuse)
    made, recorder = staged(Role.PREFILL)
    transfer = new_transfer_id()
    made.reserve_transfer(Admission(transfer, ask(21, temperature=1.0)))
    assert finish(made) == {}
    assert recorder.ranges[-1].last
    with pytest.raises(AssertionError, match="A2"):
        engine(role=Role.DECODE)


@pytest.mark.clause("C3.3", "C3.4", "C3.7")
def test_p_reports_ranges_that_tile_the_prompt_with_the_cached_part_in_the_first() -> None:
    made, recorder = staged(Role.PREFILL)
    for expected in ([(0, 8), (8, 16), (16, 20)], [(0, 20)]):
        transfer = new_transfer_id()
        made.reserve_transfer(Admission(transfer, ask(20)))
        finish(made)
        assert [(r.start, r.end) for r in recorder.ranges] == expected
        assert [r.last for r in recorder.ranges] == [False] * (len(expected) - 1) + [True]
        assert all(r.transfer == transfer and len(r.tables[0]) * 4 >= r.end for r in recorder.ranges)
        made.release_transfer_compute(transfer)
        made.release_transfer(transfer)
        recorder.ranges.clear()
    balanced(made)


@pytest.mark.clause("C5.1")
def test_p_keeps_kv_and_slot_until_release_and_its_compute_slot_until_told() -> None:
    made, recorder = staged(Role.PREFILL, max_running=1)
    first, second = new_transfer_id(), new_transfer_id()
    made.reserve_transfer(Admission(first, ask(8, 1)))
    made.reserve_transfer(Admission(second, ask(8, 2)))
    finish(made)
    assert [r.transfer for r in recorder.ranges] == [first]
    kept = [made._storage.keys[0][block].clone() for block in recorder.ranges[0].tables[0]]  # type: ignore[union-attr]
    made.release_transfer_compute(first)
    made.release_transfer_compute(first)
    finish(made)
    assert [r.transfer for r in recorder.ranges] == [first, second]
    assert made.statistics()["blocks_under_lease"] == 4
    assert made.statistics()["final_slots_free"] == 2
    for block, before in zip(recorder.ranges[0].tables[0], kept, strict=True):
        assert torch.equal(made._storage.keys[0][block], before)  # type: ignore[union-attr]
    for transfer in (first, second, first):
        made.release_transfer(transfer)
    balanced(made)


def test_p_waits_for_a_final_slot_and_for_blocks() -> None:
    made, recorder = staged(Role.PREFILL, transfer_slots=1, max_running=4)
    transfers = [new_transfer_id() for _ in range(3)]
    for seed, transfer in enumerate(transfers):
        made.reserve_transfer(Admission(transfer, ask(8, seed)))
    for expected in transfers:
        finish(made)
        assert recorder.ranges[-1].transfer == expected
        assert not made.has_work()
        made.release_transfer(expected)
    balanced(made)


def test_p_heeds_back_pressure() -> None:
    made, recorder = staged(Role.PREFILL)
    made.reserve_transfer(Admission(new_transfer_id(), ask(20)))
    made.step()
    recorder.open = False
    assert not made.has_work()
    made.step()
    assert len(recorder.ranges) == 1
    recorder.open = True
    finish(made)
    assert recorder.ranges[-1].last


@pytest.mark.clause("C5.3")
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_p_suspends_at_any_moment_and_keeps_every_byte(steps: int) -> None:
    made, recorder = staged(Role.PREFILL)
    transfer = new_transfer_id()
    made.reserve_transfer(Admission(transfer, ask(20)))
    for _ in range(steps):
        made.step()
    before = made.statistics()
    assert made.suspend_transfer(transfer) is None
    assert made.suspend_transfer(transfer) is None
    assert not made.has_work()
    for name in ("blocks_used", "blocks_under_lease", "final_slots_free"):
        assert made.statistics()[name] == before[name]
    assert len(recorder.ranges) == steps
    made.release_transfer_compute(transfer)
    made.release_transfer(transfer)
    made.release_transfer(transfer)
    balanced(made)


def test_p_refuses_what_it_can_never_hold_without_keeping_anything() -> None:
    made, recorder = staged(Role.PREFILL, blocks=4)
    made.reserve_transfer(Admission(new_transfer_id(), ask(17)))
    # Growth is D's matter.
    made.reserve_transfer(Admission(new_transfer_id(), ask(16, max_tokens=1000)))
    assert [(retry, "at most 16 tokens" in reason) for _, reason, retry in recorder.refusals] == [(False, True)]
    assert made.statistics()["transfers"] == 1


# -- D -----------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C2.2", "C2.7")
def test_d_reserves_whole_prompts_and_a_slot_until_it_is_full() -> None:
    made, recorder = staged(Role.DECODE, blocks=8, transfer_slots=2)
    first, second, third = (new_transfer_id() for _ in range(3))
    made.reserve_transfer(Admission(first, ask(17, 1, max_tokens=4)))
    made.reserve_transfer(Admission(second, ask(17, 2, max_tokens=4)))
    made.reserve_transfer(Admission(third, ask(9, 3, max_tokens=4)))
    assert [(r.transfer, len(r.tables[0]), r.valid) for r in recorder.reservations] == [(first, 5, 0), (third, 3, 0)]
    assert not set(recorder.reservations[0].tables[0]) & set(recorder.reservations[1].tables[0])
    assert recorder.reservations[0].final_slot != recorder.reservations[1].final_slot
    made.reserve_transfer(Admission(new_transfer_id(), ask(1, 4, max_tokens=1)))
    assert recorder.refusals[0][::2] == (second, True)
    assert "5 blocks are needed and 3 of 8" in recorder.refusals[0][1]
    assert "transfer slots" in recorder.refusals[1][1]
    assert recorder.refusals[1][2]
    made.reserve_transfer(Admission(new_transfer_id(), ask(30, 5, max_tokens=3)))
    assert recorder.refusals[2][2] is False
    assert not made.has_work()
    for transfer in (first, second, third):
        made.release_transfer(transfer)
    balanced(made)


@pytest.mark.clause("C2.2", "C8.1", "C8.2", "C8.3")
def test_d_starts_nothing_before_the_import_and_activates_once_after() -> None:
    made, recorder = staged(Role.DECODE)
    transfer = new_transfer_id()
    made.reserve_transfer(Admission(transfer, ask(9)))
    assert not made.has_work()
    assert made.step() == []
    assert made.statistics()["blocks_under_lease"] == 3
    made.accept_import(transfer, 9)
    assert made.statistics()["blocks_under_lease"] == 0
    assert made.statistics()["final_slots_free"] == 4
    made.accept_import(transfer, 9)
    outputs = finish(made)[transfer]
    assert recorder.active == [transfer]
    assert len(ids(outputs)) == 16
    assert made.statistics()["blocks_used"] > 0, "a finished request keeps its memory until it is released"
    made.release_transfer(transfer)
    made.release_transfer(transfer)
    balanced(made)


@pytest.mark.clause("A2", "C8.3", "C8.4")
def test_d_draws_the_first_token_from_what_was_received_even_when_it_recomputes_the_prompt() -> None:
    made, recorder = staged(Role.DECODE, prefix_caching=False)
    transfer = new_transfer_id()
    made.reserve_transfer(Admission(transfer, ask(9)))
    assert made._storage is not None
    made._storage.write_final(recorder.reservations[0].final_slot, torch.zeros(32), 3)
    made.accept_import(transfer, 9)
    made._scheduler._preempt(made._jobs[transfer])
    assert made.statistics()["blocks_used"] == 0
    first, *others = finish(made)[transfer]
    # Logits of nothing are all equal: the first of them wins.
    assert (first.token_ids, first.exit_depths) == ((0,), (3,))
    assert [output.exit_depths for output in others] == [(1,)] * 15


@pytest.mark.clause("C3.1", "C8.4")
def test_d_publishes_a_prefix_only_when_it_is_imported() -> None:
    made, recorder = staged(Role.DECODE)
    transfers = [new_transfer_id() for _ in range(4)]
    made.reserve_transfer(Admission(transfers[0], ask(16)))
    made.reserve_transfer(Admission(transfers[1], ask(16)))
    made.release_transfer(transfers[0])
    made.reserve_transfer(Admission(transfers[2], ask(16)))
    made.accept_import(transfers[1], 16)
    made.reserve_transfer(Admission(transfers[3], ask(16)))
    assert [r.valid for r in recorder.reservations] == [0, 0, 0, 16]
    assert recorder.reservations[3].tables == recorder.reservations[1].tables
    for transfer in transfers:
        made.release_transfer(transfer)
    balanced(made)


@pytest.mark.clause("C5.3")
@pytest.mark.parametrize("moment", ["reserved", "imported", "decoding", "finished"])
def test_d_suspends_and_releases_at_any_moment(moment: str) -> None:
    made, _ = staged(Role.DECODE)
    transfer = new_transfer_id()
    made.reserve_transfer(Admission(transfer, ask(9)))
    if moment != "reserved":
        made.accept_import(transfer, 9)
    if moment == "decoding":
        made.step()
        made.step()
    if moment == "finished":
        finish(made)
    used = made.statistics()["blocks_used"]
    made.suspend_transfer(transfer)
    made.suspend_transfer(transfer)
    assert not made.has_work()
    assert made.statistics()["blocks_used"] == used > 0
    made.accept_import(transfer, 9)
    made.release_transfer_compute(transfer)
    assert not made.has_work()
    made.release_transfer(transfer)
    balanced(made)


def test_d_takes_no_new_reservation_while_a_preempted_request_waits_for_memory() -> None:
    made, recorder = staged(Role.DECODE, blocks=8)
    transfers = [new_transfer_id() for _ in range(3)]
    for seed in (0, 1):
        made.reserve_transfer(Admission(transfers[seed], ask(12, seed, max_tokens=12)))
        made.accept_import(transfers[seed], 12)
    while not made.statistics()["preemptions_total"]:
        made.step()
    made.reserve_transfer(Admission(transfers[2], ask(4, 2, max_tokens=1)))
    ((_, reason, retry),) = recorder.refusals
    assert retry
    assert "preempted" in reason
    outputs = finish(made)
    assert outputs[transfers[0]][-1].finish_reason is FinishReason.LENGTH
    # The finished one's memory comes back only when the stage says so.
    assert made.statistics()["requests_waiting"] == 1
    made.release_transfer(transfers[0])
    assert finish(made)[transfers[1]][-1].finish_reason is FinishReason.LENGTH
    assert recorder.active == transfers[:2], "activated once, however often it comes back"
    for transfer in transfers:
        made.release_transfer(transfer)
    balanced(made)


@pytest.mark.clause("C2.7")
def test_d_answers_a_reservation_only_once_its_device_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    made, recorder = staged(Role.DECODE)
    first, second = Event(), Event()
    events = [first, second]
    monkeypatch.setattr(made, "_event", lambda: events.pop(0) if events else None)
    kept, gone = new_transfer_id(), new_transfer_id()
    made.reserve_transfer(Admission(kept, ask(9)))
    made.reserve_transfer(Admission(gone, ask(9, 1)))
    assert made.has_work()
    made.step()
    assert recorder.reservations == []
    made.release_transfer(gone)
    first.done = second.done = True
    made.step()
    assert [r.transfer for r in recorder.reservations] == [kept]
    assert not made.has_work()
    made.release_transfer(kept)
    balanced(made)


# -- misuse and settings -----------------------------------------------------------------------------------------------


@pytest.mark.clause("C1.2")
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
def test_unknown_transfers_are_ignored_and_leave_nothing(role: Role) -> None:
    made, _ = staged(role)
    transfer = new_transfer_id()
    made.accept_import(transfer, 4)
    assert made.suspend_transfer(transfer) is None
    made.release_transfer_compute(transfer)
    made.release_transfer(transfer)
    balanced(made)


def test_misuse_is_told() -> None:
    colocated, (decode, _) = engine(), staged(Role.DECODE)
    with pytest.raises(LocalProtocolError, match="add"):
        colocated.reserve_transfer(Admission(new_transfer_id(), ask(4)))
    with pytest.raises(LocalProtocolError, match="reserve_transfer"):
        decode.add(new_transfer_id(), ask(4))
    transfer = new_transfer_id()
    decode.reserve_transfer(Admission(transfer, ask(4)))
    with pytest.raises(LocalProtocolError, match="already"):
        decode.reserve_transfer(Admission(transfer, ask(4)))
    for _ in range(2):
        decode.close()
    assert not decode.has_work()
    with pytest.raises(LocalProtocolError, match="closed"):
        decode.reserve_transfer(Admission(new_transfer_id(), ask(4)))


def test_storage_can_lie_in_memory_that_a_transport_allocated() -> None:
    import numpy as np

    from kvbaton.connector import MemoryKind, MemoryRegion

    given: dict[int, Any] = {}

    def allocate(region: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        given[region] = np.zeros(nbytes, dtype=np.uint8)
        return MemoryRegion.of_array(region, given[region])

    checkpoint = Checkpoint("tiny", tiny_llama(), {"weights": "tiny"}, frozenset())
    made = TransformersEngine(checkpoint, TransformersOptions(block_tokens=4, blocks=8, prefill_chunk=8), Role.PREFILL)
    regions = made.regions(allocate)
    assert [(r.id, r.address, r.length) for r in regions] == [(i, a.ctypes.data, a.nbytes) for i, a in given.items()]
    made.attach(Recorder())
    made.reserve_transfer(Admission(new_transfer_id(), ask(9)))
    finish(made)
    assert all(array.any() for array in given.values())


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    checkpoint = Checkpoint("tiny", tiny_llama(), {"weights": "tiny"}, frozenset())
    made = TransformersEngine(checkpoint, TransformersOptions(blocks=1 << 40), Role.PREFILL)
    for allocate in (None, lambda *_: pytest.fail("it was allocated")):
        with pytest.raises(SettingsError, match=r"of 1099511627776 blocks takes .* TiB, and of .* there is .* lower"):
            made.regions(allocate)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("DefaultCPUAllocator: can't allocate memory"),
     MemoryError()],
)  # fmt: skip
def test_memory_that_was_not_to_be_had_is_one_line_with_advice(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def zeros(*_: Any, **__: Any) -> torch.Tensor:
        raise error

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(SettingsError, match=r"cache of 64 blocks takes .* KiB, which was not to be had\. Set .* lower"):
        engine()


def test_what_is_no_want_of_memory_stays_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("a bug")

    monkeypatch.setattr(torch, "zeros", zeros)
    with pytest.raises(RuntimeError, match="a bug"):
        engine()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_tokens": 0}, "block_tokens"),
        ({"block_tokens": "many"}, "block_tokens"),
        ({"blocks": 0}, "blocks"),
        ({"prefill_chunk": 0}, "prefill_chunk"),
        ({"dtype": "int8"}, "dtype"),
        ({"max_runing": 3}, "max_runing"),
        ({"loops": {"max_depth": 0}}, "max_depth"),
        ({"loops": {"max_depth": 2, "threshold": 1.5}}, "threshold"),
    ],
)
def test_settings_out_of_range_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TransformersOptions(**options)


def test_the_plugin_checks_opens_and_reads_text() -> None:
    options = TransformersOptions(loops=Loops(max_depth=2, layout="shared"), blocks=8)
    plugin.check("tiny-llama", options)
    with pytest.raises(ModelNotFound):
        plugin.check("tiny-lama", options)
    with pytest.raises(ConfigurationError, match="GPU 99"):
        plugin.open("tiny-llama", TransformersOptions(device="cuda"), Role.DECODE, 99)
    made = plugin.open("tiny-llama", options, Role.DECODE, None)
    assert made.geometry.final_slots == options.transfer_slots
    assert "layout=shared" in str(made.geometry.identity)
    tokenizer = plugin.tokenizer("tiny-llama", options)
    assert tokenizer.decode(tokenizer.encode("text")) == "text"


def test_importing_the_plugin_loads_no_framework() -> None:
    code = (
        "import sys, kvbaton_transformers as t; assert t.plugin.name == 'transformers';"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- profiling ---------------------------------------------------------------------------------------------------------


def test_a_trace_shows_what_was_computed_and_a_process_has_one(tmp_path: Path) -> None:
    made, other = engine(), engine()
    expected = ids(serve(other, [ask(9)])[0])
    made.start_profile(tmp_path / "stem")
    try:
        with pytest.raises(ProfilingError, match="one engine of a process"):
            other.start_profile(tmp_path / "other")
        assert ids(serve(made, [ask(9)])[0]) == expected
    finally:
        files = made.stop_profile()
    assert list(files) == [tmp_path / "stem.trace.json"] == list(tmp_path.iterdir())
    assert any(event.get("name") == "aten::linear" for event in json.loads(files[0].read_text())["traceEvents"])
    assert made.stop_profile() == []
    other.start_profile(tmp_path / "other")
    other.close()
    made.start_profile(tmp_path / "again")
    assert len(made.stop_profile()) == 1


def test_a_trace_that_could_not_be_written_whole_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine()

    def cut_short(self: object, path: str) -> None:
        Path(path).write_bytes(b'{"traceEvents": [{"na')

    with monkeypatch.context() as full:
        full.setattr(torch.profiler.profile, "export_chrome_trace", cut_short)
        made.start_profile(tmp_path / "stem")
        with pytest.raises(ProfilingError, match="is the disk full"):
            made.stop_profile()
    assert list(tmp_path.iterdir()) == []
    made.start_profile(tmp_path / "again")
    assert len(made.stop_profile()) == 1


@pytest.mark.clause("C8.4")
def test_p_goes_on_with_a_prompt_that_fits_because_its_beginning_has_been_computed_meanwhile() -> None:
    made, recorder = staged(Role.PREFILL, blocks=3)
    first, second = new_transfer_id(), new_transfer_id()
    made.reserve_transfer(Admission(first, Request(prompt(8))))
    made.reserve_transfer(Admission(second, Request((*prompt(8), 1, 2))))
    finish(made)
    # the first one's blocks are still leased: memory has not changed, but what the second one needs has
    assert [r.transfer for r in recorder.ranges] == [first, second]
    assert [r.cached for r in recorder.ranges] == [0, 8]
    for transfer in (first, second):
        made.release_transfer(transfer)
    balanced(made)
