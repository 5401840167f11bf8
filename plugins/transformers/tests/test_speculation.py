"""Speculation changes when tokens come, never which: against the same engine without it, in every situation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbaton import PDRuntime, load
from kvbaton.engine import Admission, FinishReason, Request, Role, SamplingParams, StepOutput
from kvbaton.errors import ConfigurationError
from kvbaton.identity import TransferId, new_transfer_id
from kvbaton.reservation import Reservation
from kvbaton_transformers import TransformersOptions, plugin
from kvbaton_transformers.checkpoints import ByteTokenizer, Checkpoint
from kvbaton_transformers.drafting import PromptLookup
from kvbaton_transformers.engine import TransformersEngine
from kvbaton_transformers.looped import Layout
from kvbaton_transformers.testing import tiny_llama, tiny_looped, tiny_qwen

MODELS: Mapping[str, Callable[[], Any]] = {"llama": tiny_llama, "qwen": tiny_qwen, "last_exited": tiny_looped}
SAMPLING: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    # Cold enough to repeat itself, warm enough to leave a draft at any place.
    "seeded": {"temperature": 0.3, "top_k": 30, "top_p": 0.9, "seed": 11},
}


@functools.cache
def checkpoint(model: str) -> Checkpoint:
    return Checkpoint(model, MODELS[model](), {"weights": model}, frozenset())


class Silent:
    """A stage that listens and says nothing."""

    def __init__(self) -> None:
        self.reservations: dict[TransferId, Reservation] = {}
        self.refusals: list[str] = []

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        return True

    def prefill_submitted(self, computed: Any) -> None:
        raise AssertionError("only P prefills for others")

    def reserved(self, reservation: Reservation) -> None:
        self.reservations[reservation.transfer] = reservation

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> None:
        self.refusals.append(reason)

    def activated(self, transfer: TransferId) -> None: ...


def engine(model: str = "llama", role: Role = Role.COLOCATED, *, speculates: bool = True, **options: Any) -> Any:
    given = {"block_tokens": 4, "blocks": 64, "prefill_chunk": 8, "ngram": 1, "draft_tokens": 3} | options
    given["speculation"] = "prompt-lookup" if speculates else "off"
    made = TransformersEngine(checkpoint(model), TransformersOptions(**given), role, ByteTokenizer)
    made.regions(None)
    made.attach(Silent())
    return made


def watched(made: Any) -> list[Any]:
    """The rows of every forward from now on; None for one that fails, which the engine would make up for."""
    steps: list[Any] = []
    forward = made._runner.forward

    def forwarding(rows: Any) -> Any:
        steps.append(None)
        result = forward(rows)
        steps[-1] = rows
        return result

    made._runner.forward = forwarding
    return steps


def repetitive(seed: int, period: int = 3, length: int = 14) -> tuple[int, ...]:
    words = torch.randint(1, 256, (period,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tuple((words * length)[:length])


def ask(text: int = 0, *, period: int = 3, length: int = 14, **sampling: Any) -> Request:
    return Request(repetitive(text, period, length), SamplingParams(**({"max_tokens": 24} | sampling)))


def run(made: Any, requests: Sequence[Request]) -> list[list[StepOutput]]:
    transfers = [new_transfer_id() for _ in requests]
    for transfer, request in zip(transfers, requests, strict=True):
        made.add(transfer, request)
    outputs: dict[TransferId, list[StepOutput]] = {transfer: [] for transfer in transfers}
    for _ in range(2000):
        if not made.has_work():
            break
        for output in made.step():
            assert output.error is None, output.error
            outputs[output.transfer].append(output)
        made.check()
    assert not made.has_work()
    balanced(made)
    return [outputs[transfer] for transfer in transfers]


def shown(outputs: Sequence[StepOutput]) -> tuple[list[int], list[int], FinishReason | None]:
    assert all(output.finish_reason is None for output in outputs[:-1])
    return (
        [token for output in outputs for token in output.token_ids],
        [depth for output in outputs for depth in output.exit_depths],
        outputs[-1].finish_reason,
    )


def balanced(made: Any) -> None:
    made.check()
    s = made.statistics()
    assert s["blocks_used"] == s["blocks_leased"] == s["blocks_under_lease"] == s["blocks_promised"] == 0
    assert s["transfers"] == s["requests_waiting"] == s["requests_running"] == 0


def accepted(made: Any) -> float:
    s = made.statistics()
    assert 0 <= s["draft_tokens_accepted_total"] <= s["draft_tokens_total"]
    return s["draft_tokens_accepted_total"]


# -- drafts ------------------------------------------------------------------------------------------------------------


def test_a_draft_is_what_followed_last() -> None:
    lookup = PromptLookup(2)
    tokens = [1, 2, 3, 4, 1, 2]
    assert lookup.draft(tokens, 2) == [3, 4]
    assert lookup.draft(tokens, 3) == [3, 4, 1]
    tokens += [9, 1, 2]
    assert lookup.draft(tokens, 2) == [9, 1], "the latest occurrence counts"
    assert lookup.draft([*tokens, 7], 2) == []
    assert PromptLookup(3).draft([1, 2], 4) == []
    assert PromptLookup(1).draft([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5], "a short repetition goes on"


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40), ngram=st.integers(1, 4), cut=st.integers(1, 40))
@settings(deadline=None)
def test_a_draft_depends_on_the_tokens_alone(tokens: list[int], ngram: int, cut: int) -> None:
    """Not on how often it was asked before; so that a request drafts alike wherever it runs."""
    often = PromptLookup(ngram)
    often.draft(tokens[:cut], 3)
    draft = often.draft(tokens, 6)
    assert draft == PromptLookup(ngram).draft(tokens, 6)
    whole = [*tokens, *draft]
    places = [at for at in range(ngram, len(tokens)) if tokens[at - ngram : at] == tokens[-ngram:]]
    assert len(draft) == (6 if places else 0)
    assert not places or draft == [whole[places[-1] + i] for i in range(6)]


# -- equality ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("A1")
@pytest.mark.parametrize("batching", ["grouped", "isolated"])
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("model", MODELS)
def test_the_output_is_that_without_speculation(model: str, sampling: str, batching: str) -> None:
    requests = [
        ask(seed, period=1 + seed % 5, length=1 + 3 * seed, max_tokens=1 + 5 * seed, **SAMPLING[sampling])
        for seed in range(8)
    ]
    plain = run(engine(model, speculates=False, batching=batching), requests)
    made = engine(model, batching=batching)
    outputs = run(made, requests)
    assert [shown(o) for o in outputs] == [shown(o) for o in plain]
    assert accepted(made) > 10, "drafts hit"
    assert made.statistics()["draft_tokens_total"] > accepted(made), "and miss"
    assert sum(map(len, outputs)) == sum(map(len, plain)) - accepted(made), "each accepted draft saves a step"


@pytest.mark.clause("A1")
@given(
    prompts=st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=20), min_size=1, max_size=4),
    length=st.integers(1, 30),
    temperature=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 5),
    block=st.sampled_from([1, 3, 8]),
    drafts=st.integers(1, 9),
    ngram=st.integers(1, 3),
    batch=st.sampled_from([1, 6, 2048]),
)
@settings(max_examples=25, deadline=None)
def test_the_output_is_equal_whatever_is_asked(
    prompts: list[list[int]],
    length: int,
    temperature: float,
    seed: int,
    block: int,
    drafts: int,
    ngram: int,
    batch: int,
) -> None:
    sampling = SamplingParams(max_tokens=length, temperature=temperature, seed=seed)
    requests = [Request(tuple(prompt), sampling) for prompt in prompts]
    sizes = {"block_tokens": block, "blocks": 256, "max_batch_tokens": batch}
    expected = [shown(o) for o in run(engine(speculates=False, **sizes), requests)]
    made = engine(draft_tokens=drafts, ngram=ngram, **sizes)
    steps = watched(made)
    assert [shown(o) for o in run(made, requests)] == expected
    assert None not in steps
    for rows in steps:
        guesses = [len(row.tokens) - 1 for row in rows if row.every]
        assert not guesses or sum(len(row.tokens) for row in rows) <= batch
        assert max(guesses, default=0) <= drafts


@pytest.mark.clause("A1", "C8.4")
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("batching", ["grouped", "isolated"])
def test_under_preemption(sampling: str, batching: str) -> None:
    requests = [ask(seed, length=10, max_tokens=22, **SAMPLING[sampling]) for seed in range(4)]
    expected = [shown(o) for o in run(engine(speculates=False, batching=batching), requests)]
    made = engine(batching=batching, blocks=13, prefix_caching=False)
    assert [shown(o) for o in run(made, requests)] == expected
    assert made.statistics()["preemptions_total"] > 0
    assert accepted(made) > 0


# -- ends --------------------------------------------------------------------------------------------------------------


def foreseeing(tokens: Sequence[int], **options: Any) -> Any:
    """An engine whose guesses at what one request will say are ``tokens``."""
    made = engine(**options)
    made._scheduler._draft = lambda job, most: tokens[len(job.generated) : len(job.generated) + most]
    return made


@pytest.mark.clause("A1")
@pytest.mark.parametrize("how", ["token", "text", "model"])
def test_a_stop_inside_an_accepted_run_ends_it_there(how: str) -> None:
    tested = 0
    for text in range(6):
        (whole,) = run(engine(speculates=False, prefix_caching=False), [ask(text, temperature=1.0)])
        tokens = shown(whole)[0]
        for at in range(2, 23):
            character = ByteTokenizer().decode(tokens[at : at + 1])
            before = ByteTokenizer().decode(tokens[:at])
            if tokens[at] in tokens[:at] or (how == "text" and (character in before or not character.isascii())):
                continue
            stops = {"token": {"stop_token_ids": (tokens[at],)}, "text": {"stop": ("not that", character)}, "model": {}}
            made, plain = foreseeing(tokens, draft_tokens=23), engine(speculates=False)
            if how == "model":
                for one in (made, plain):
                    one._generator._end_token_ids = frozenset({tokens[at]})
            request = ask(text, temperature=1.0, **stops[how])
            (outputs,) = run(made, [request])
            assert shown(outputs) == shown(run(plain, [request])[0])
            assert shown(outputs)[0] == tokens[: at + 1]
            assert outputs[-1].finish_reason is FinishReason.STOP
            assert len(outputs[-1].token_ids) > 1, "the stop lies in a run"
            assert made.statistics()["blocks_prefix"] == plain.statistics()["blocks_prefix"]
            tested += 1
            break
    assert tested > 3


@pytest.mark.clause("A1", "C3.1")
@given(wrong=st.sets(st.integers(1, 30)), drafts=st.integers(1, 31), temperature=st.sampled_from([0.0, 1.0]))
@settings(max_examples=25, deadline=None)
def test_a_draft_may_be_wrong_in_any_place(wrong: set[int], drafts: int, temperature: float) -> None:
    request = ask(5, temperature=temperature, max_tokens=31)
    (plain,) = run(engine(speculates=False), [request])
    tokens = shown(plain)[0]
    made = foreseeing([(t + 1) % 256 if i in wrong else t for i, t in enumerate(tokens)], draft_tokens=drafts)
    (outputs,) = run(made, [request])
    assert shown(outputs) == shown(plain)
    assert len(outputs) == 31 - accepted(made)
    if not wrong:
        # The first token comes with the prompt; then each step yields its drafts and one more.
        assert len(outputs) == 1 + -(-30 // (drafts + 1))


@pytest.mark.clause("C2.4", "C8.4")
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 4, 7])
def test_a_draft_never_goes_past_the_budget(max_tokens: int) -> None:
    """Not a block more than the request was promised, and never more drafts than it may still say tokens."""
    request = ask(length=15, period=1, max_tokens=max_tokens)
    made = engine(draft_tokens=64)
    seen: list[tuple[int, int]] = []
    forward = made._runner.forward

    def watching(rows: Any) -> Any:
        seen.extend((row.start + len(row.tokens), len(row.tables[0])) for row in rows)
        return forward(rows)

    made._runner.forward = watching
    (outputs,) = run(made, [request])
    assert shown(outputs) == shown(run(engine(speculates=False), [request])[0])
    assert max(end for end, _ in seen) < request.max_length, "the last token is never computed"
    assert max(blocks for _, blocks in seen) <= -(-request.max_length // 4)


@pytest.mark.clause("C8.2", "C8.4")
def test_drafts_take_no_memory_from_others_and_give_theirs_back() -> None:
    made = engine(draft_tokens=16, blocks=12, prefix_caching=False)
    transfer = new_transfer_id()
    made.add(transfer, ask(length=13, period=1, max_tokens=30))
    job = made._jobs[transfer]
    shorter, steps = 0, watched(made)
    other = made._cache.open([1] * 24, 24)
    while made.has_work():
        before, free = made.statistics()["draft_tokens_total"], made._cache.available
        made.step()
        made.check()
        drafted = made.statistics()["draft_tokens_total"] - before
        assert drafted == sum(len(row.tokens) - 1 for row in steps[-1] if row.every), "what was guessed was computed"
        shorter += 0 < drafted < 16 and free < 4
        if job.sequence is not None and job.held.blocks:
            if job.generated:
                assert len(job.held.blocks) == -(-job.held.valid // 4), "nothing is kept for what was guessed"
            if job.length > 21 and other is not None:
                made._cache.free(other)
                other = None
    assert shorter
    assert None not in steps
    assert made.statistics()["preemptions_total"] == 0
    balanced(made)


@pytest.mark.clause("C3.1")
def test_only_what_was_said_is_valid_and_shared() -> None:
    """After a rejected draft the cache knows nothing of it, and the blocks it shares hold what was said."""
    request = ask(3, max_tokens=26)
    made = engine(draft_tokens=7)
    (outputs,) = run(made, [request])
    told = [*request.prompt, *shown(outputs)[0]]
    full = (len(told) - 1) // 4 * 4
    assert made._cache.match(told) == full
    plain = engine(speculates=False)
    run(plain, [request])
    ours = made._cache.open(told, len(told))
    theirs = plain._cache.open(told, len(told))
    for mine, others in zip(made._storage.keys, plain._storage.keys, strict=True):
        a, b = mine[ours.blocks].transpose(1, 2).flatten(0, 1), others[theirs.blocks].transpose(1, 2).flatten(0, 1)
        torch.testing.assert_close(a[:full], b[:full], rtol=0, atol=1e-5)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.3")
@pytest.mark.parametrize("where", ["forward", "sampler"])
def test_a_fault_in_the_guesses_costs_the_request_nothing(where: str) -> None:
    requests = [ask(seed) for seed in range(3)]
    expected = [shown(o) for o in run(engine(speculates=False), requests)]
    made = engine()
    faults = 0
    owner, name = (made._runner, "forward") if where == "forward" else (made._generator, "draw")
    original = getattr(owner, name)

    def faulty(first: Any, *others: Any) -> Any:
        nonlocal faults
        if (where == "forward" and any(row.every for row in first)) or (where == "sampler" and len(first) > 3):
            faults += 1
            raise RuntimeError("broken by a guess")
        return original(first, *others)

    setattr(owner, name, faulty)
    assert [shown(o) for o in run(made, requests)] == expected
    assert faults > 5


# -- D -----------------------------------------------------------------------------------------------------------------


def decoding(**options: Any) -> tuple[Any, TransferId]:
    """A D that has just checked drafts of one request, in the middle of its output."""
    made = engine(role=Role.DECODE, **options)
    transfer = new_transfer_id()
    made.reserve_transfer(Admission(transfer, ask(max_tokens=40)))
    made.accept_import(transfer, 14)
    while not made.statistics()["draft_tokens_total"] > 6:
        assert made.has_work()
        made.step()
    return made, transfer


@pytest.mark.clause("C5.2", "C5.3")
def test_a_cancelled_request_keeps_its_memory_until_its_guesses_have_retired(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        done = False

        def query(self) -> bool:
            return self.done

    made, transfer = decoding(blocks=14)
    held = list(made._jobs[transfer].held.blocks)
    work: list[int] = []
    events: list[tuple[int, Event]] = []
    forward = made._runner.forward

    def launched(rows: Any) -> Any:
        work.append(max(len(row.tokens) for row in rows))
        return forward(rows)

    def record() -> Event:
        events.append((len(work), Event()))
        return events[-1][1]

    monkeypatch.setattr(made._runner, "forward", launched)
    monkeypatch.setattr(made, "_event", record)
    while not work or work[-1] == 1:
        made.step()
    held = list(made._jobs[transfer].held.blocks)
    event = made.suspend_transfer(transfer)
    assert events == [(len(work), event)], "the event is behind the forward that checked the guesses"
    assert not made.has_work()
    assert made.step() == []
    assert work == work[: events[0][0]], "nothing more is guessed for it"
    # What the guesses may still write is nobody else's: a new reservation gets other blocks, or none.
    fits, too_large = new_transfer_id(), new_transfer_id()
    made.reserve_transfer(Admission(fits, Request(tuple(range(1, 9)), SamplingParams(max_tokens=4))))
    made.reserve_transfer(Admission(too_large, Request(tuple(range(1, 46)), SamplingParams(max_tokens=4))))
    assert len(made._callbacks.refusals) == 1
    assert not set(held) & set(made._jobs[fits].held.blocks)
    # Nor is a block that was given back promised before the device is through with it (C2.7).
    assert fits not in made._callbacks.reservations
    assert made._jobs[transfer].held.blocks == held
    made.release_transfer(transfer)
    events[-1][1].done = True
    made.step()
    assert fits in made._callbacks.reservations
    made.release_transfer(fits)
    balanced(made)


@pytest.mark.clause("C5.2", "C5.3")
def test_a_request_that_fails_amid_its_guesses_keeps_all_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    made, transfer = decoding(draft_tokens=9)

    def fail(*_: Any) -> Any:
        raise RuntimeError("no more text")

    monkeypatch.setattr(made._generator, "reason", fail)
    while not (outputs := list(made.step())):
        assert made.has_work()
    assert str(outputs[-1].error) == "no more text"
    assert not made.has_work()
    job = made._jobs[transfer]
    assert len(job.held.blocks) * 4 >= job.length
    assert made.statistics()["blocks_used"] == len(job.held.blocks)
    made.release_transfer(transfer)
    balanced(made)


@pytest.mark.clause("A1", "A2")
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("loops", [None, {"max_depth": 3, "threshold": 0.6}])
def test_after_a_hand_off(sampling: str, loops: dict[str, Any] | None) -> None:
    """Over loopback, all at once, one of them cancelled: the rest says what one engine without speculation says."""
    requests = [ask(seed, length=6 + 5 * seed, **SAMPLING[sampling]) for seed in range(5)]
    options = {"block_tokens": 4, "blocks": 64, "prefill_chunk": 8, "batching": "isolated", "loops": loops}
    plain = TransformersOptions(**options)
    alone = plugin.open_engine("tiny-llama", plain, Role.COLOCATED, None)
    expected = [shown(o) for o in run(alone, requests)]
    overrides = {
        "model": "tiny-llama",
        "transport.name": "loopback",
        "stages.launch": "inproc",
        "engine.options": {**options, "speculation": "prompt-lookup", "ngram": 1},
    }
    with PDRuntime.start(load(overrides=overrides)[0]) as runtime:
        keys = [runtime.add_request(request) for request in requests]
        gone = runtime.add_request(ask(9, max_tokens=180))
        streams = {key: list(runtime.stream(key)) for key in keys[:1]}
        runtime.abort(gone)
        streams |= {key: list(runtime.stream(key)) for key in keys[1:]}
        figures = runtime.statistics()
    for key, (tokens, depths, reason) in zip(keys, expected, strict=True):
        outputs = streams[key]
        assert [token for output in outputs for token in output.token_ids] == tokens
        assert [depth for output in outputs for depth in output.exit_depths] == depths
        assert FinishReason(outputs[-1].finish_reason) is reason
    assert any(len(output.token_ids) > 1 for outputs in streams.values() for output in outputs), "drafts hit"
    assert "draft_tokens_accepted_total" in str(figures)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_it_is_off_unless_asked_for() -> None:
    assert TransformersOptions().speculation == "off"
    made = engine(speculates=False)
    run(made, [ask()])
    assert made.statistics()["draft_tokens_total"] == 0


def test_a_looped_model_whose_results_depend_on_chunks_is_refused() -> None:
    shared = {"max_depth": 2, "layout": "shared"}
    with pytest.raises(ValidationError, match=r"loops\.layout shared"):
        TransformersOptions(speculation="prompt-lookup", loops=shared)
    TransformersOptions(loops=shared)
    model = Checkpoint("shared", tiny_looped(layout=Layout.SHARED), {}, frozenset())
    with pytest.raises(ConfigurationError, match="last_exited"):
        TransformersEngine(model, TransformersOptions(speculation="prompt-lookup"), Role.COLOCATED)
    for wrong in ({"speculation": "on"}, {"draft_tokens": 0}, {"ngram": 0}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            TransformersOptions(**wrong)
