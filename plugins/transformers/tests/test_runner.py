"""The paged forward against transformers' own, whole against chunked, alone against batched."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import CohereConfig, DeepseekV3Config, DynamicCache, PreTrainedModel

from kvbaton_transformers.looped import LoopedModel
from kvbaton_transformers.paged import KVSpec, PagedKV
from kvbaton_transformers.random_weights import random_model
from kvbaton_transformers.runner import Batching, Row, Runner, attend_repeatably
from kvbaton_transformers.support import cache_argument, largest_kv, probe
from kvbaton_transformers.testing import tiny_llama, tiny_looped, tiny_qwen

BLOCK = 4
TABLE = [5, 9, 3, 1, 30, 2, 8, 13, 21, 4, 17, 11]


def tiny_latent() -> PreTrainedModel:
    """Multi-head latent attention: what is cached as K and as V differs in size."""
    config = DeepseekV3Config(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
        first_k_dense_replace=2, initializer_range=0.2, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return random_model(config, 0)


FACTORIES = pytest.mark.parametrize("factory", [tiny_llama, tiny_qwen, tiny_latent])


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def runner(model: PreTrainedModel | LoopedModel, batching: Batching = Batching.GROUPED) -> Runner:
    """Over storage full of NaN: a forward that read a byte it should not would show."""
    decoder, planes = (model.decoder, model.options.planes) if isinstance(model, LoopedModel) else (model, 1)
    storage = PagedKV(KVSpec(probe(decoder), planes=planes, blocks=64, block_tokens=BLOCK, final_slots=2))
    for tensor in storage.tensors.values():
        tensor.fill_(float("nan"))
    return Runner(model, storage, batching)


def prefill(run: Runner, tokens: Sequence[int], table: Sequence[int] = TABLE, chunk: int = 1000) -> torch.Tensor:
    """The final hidden state, ``[1, hidden]``."""
    for start in range(0, len(tokens), chunk):
        hidden = run.forward([Row(tokens[start : start + chunk], start, [table] * run.planes)]).hidden
    return hidden


def greedy(run: Runner, hidden: torch.Tensor, start: int, count: int, table: Sequence[int] = TABLE) -> list[int]:
    tokens = []
    for position in range(start, start + count):
        tokens.append(int(run.logits(hidden)[0].argmax()))
        hidden = run.forward([Row(tokens[-1:], position, [table] * run.planes)]).hidden
    return tokens


def kv(run: Runner, length: int, table: Sequence[int] = TABLE) -> torch.Tensor:
    """``[layer, token, ...]`` of plane 0, K and V side by side."""
    blocks = list(table)
    parts = [
        storage[0][blocks].transpose(0, 1).flatten(1, 2)[:, :length]
        for storage in (run.storage.keys, run.storage.values)
    ]
    return torch.cat(parts, dim=-1)


@pytest.mark.clause("A1")
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("looped", [False, True], ids=["plain", "looped"])
def test_a_cache_is_given_by_the_name_that_a_model_has_for_it(name: str, looped: bool) -> None:
    """Transformers called it ``past_key_values`` until 5.23, and model code that is not its own still does."""
    model, tokens = (tiny_looped if looped else tiny_llama)(), prompt(9)
    expected = prefill(runner(model), tokens)
    decoder = model.decoder if isinstance(model, LoopedModel) else model
    base, theirs = decoder.base_model, cache_argument(decoder)
    inner = base.forward

    def forward(**given: Any) -> Any:
        assert set(given) <= set(inspect.signature(base.forward).parameters)
        return inner(**{theirs if word == name else word: value for word, value in given.items()})

    words = ["input_ids", "inputs_embeds", "attention_mask", "position_ids", name, "use_cache"]
    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(word, inspect.Parameter.KEYWORD_ONLY, default=None) for word in words]
    )
    base.forward = forward
    assert cache_argument(decoder) == name
    again = LoopedModel(decoder, model.options) if isinstance(model, LoopedModel) else model
    assert torch.equal(prefill(runner(again), tokens), expected)
    assert [value.shape for value in largest_kv(decoder)] == [(2,), (2,)]


@pytest.mark.clause("A1")
@FACTORIES
def test_the_paged_forward_is_the_models_own(factory: Callable[..., PreTrainedModel]) -> None:
    model, tokens = factory(), prompt(21)
    cache = DynamicCache()
    with torch.no_grad():
        own = model(torch.tensor([tokens]), use_cache=True, **{cache_argument(model): cache})
    run = runner(model)
    hidden = prefill(run, tokens)
    torch.testing.assert_close(run.logits(hidden), own.logits[:, -1], rtol=0, atol=1e-5)
    theirs = torch.stack(
        [torch.cat((layer.keys[0], layer.values[0]), dim=-1).transpose(0, 1) for layer in cache.layers]
    )
    torch.testing.assert_close(kv(run, 21), theirs, rtol=0, atol=1e-5)
    generated = model.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False)[0, 21:].tolist()
    assert greedy(run, hidden, 21, 20) == generated


@pytest.mark.clause("A1")
@FACTORIES
@pytest.mark.parametrize("length", [1, 15, 16, 17])
@pytest.mark.parametrize("chunk", [1, 4, 7])
def test_a_chunked_prefill_is_close_to_the_whole(
    factory: Callable[..., PreTrainedModel], length: int, chunk: int
) -> None:
    model, tokens = factory(), prompt(length)
    whole, chunked = runner(model), runner(model)
    torch.testing.assert_close(prefill(chunked, tokens, chunk=chunk), prefill(whole, tokens), rtol=0, atol=1e-5)
    torch.testing.assert_close(kv(chunked, length), kv(whole, length), rtol=0, atol=1e-5)


@pytest.mark.clause("A1", "A2")
def test_another_runner_goes_on_from_kv_and_final_payload_alone() -> None:
    model, tokens = tiny_llama(), prompt(18)
    source, target = runner(model), runner(tiny_llama())
    other_table = [table + 20 for table in TABLE]
    source.storage.write_final(1, prefill(source, tokens)[0], 1)
    for mine, theirs in zip(
        (source.storage.keys, source.storage.values), (target.storage.keys, target.storage.values), strict=True
    ):
        theirs[0][other_table] = mine[0][TABLE]
    target.storage.final[0] = source.storage.final[1]
    hidden, depth = target.storage.read_final(0)
    assert depth == 1
    expected = greedy(source, source.storage.read_final(1)[0][None], 18, 20)
    assert greedy(target, hidden[None], 18, 20, other_table) == expected


@FACTORIES
@pytest.mark.parametrize("part", ["keys", "values"])
def test_one_damaged_row_of_kv_is_noticed(factory: Callable[..., PreTrainedModel], part: str) -> None:
    """The control of every agreement test: 20 tokens are not equal by indifference."""
    model, tokens = factory(), prompt(18)
    sound, damaged = runner(model), runner(model)
    hidden = prefill(sound, tokens), prefill(damaged, tokens)
    assert torch.equal(*hidden)
    getattr(damaged.storage, part)[0][TABLE[2], 0, 1] = 0.0
    assert greedy(damaged, hidden[1], 18, 20) != greedy(sound, hidden[0], 18, 20)


@FACTORIES
def test_a_ragged_batch_mixes_chunks_and_single_tokens(factory: Callable[..., PreTrainedModel]) -> None:
    model = factory()
    run, alone = runner(model), runner(model)
    lengths, tables = [9, 3, 16, 6], [list(range(10 * row, 10 * row + 8)) for row in range(4)]
    prompts = [prompt(length, seed) for seed, length in enumerate(lengths)]
    for r in (run, alone):
        for tokens, table in zip(prompts, tables, strict=True):
            prefill(r, tokens[:-1] if table[0] < 30 else tokens[:2], table)
    rows = [Row(tokens[-1:], len(tokens) - 1, [table]) for tokens, table in zip(prompts[:3], tables[:3], strict=True)]
    rows.insert(1, Row(prompts[3][2:], 2, [tables[3]]))
    together = run.forward(rows)
    assert together.exit_depths == ((1,), (1,) * 4, (1,), (1,))
    for position, row in enumerate(rows):
        single = alone.forward([row]).hidden[0]
        torch.testing.assert_close(together.hidden[position], single, rtol=0, atol=1e-5)
    for length, table in zip(lengths, tables, strict=True):
        torch.testing.assert_close(kv(run, length, table), kv(alone, length, table), rtol=0, atol=1e-5)


@pytest.mark.clause("A1", "A3")
@pytest.mark.parametrize("factory", [tiny_llama, tiny_qwen, tiny_looped])
def test_isolated_rows_have_equal_bits_in_any_batch(factory: Callable[..., PreTrainedModel | LoopedModel]) -> None:
    model = factory()
    run, alone = runner(model, Batching.ISOLATED), runner(model, Batching.ISOLATED)
    rows = [Row(prompt(n, n), 0, [list(range(8 * n, 8 * n + 8))] * run.planes) for n in (1, 5, 2, 6)]
    together = run.forward(rows)
    for position, row in enumerate(rows):
        assert torch.equal(together.hidden[position], alone.forward([row]).hidden[0])
    logits = run.logits(together.hidden)
    assert all(torch.equal(logits[i], run.logits(together.hidden[i : i + 1])[0]) for i in range(4))


@pytest.mark.parametrize("factory", [tiny_llama, tiny_qwen, tiny_looped])
def test_equal_runs_have_equal_bits(factory: Callable[..., PreTrainedModel | LoopedModel]) -> None:
    first, second = runner(factory()), runner(factory())
    tokens = prompt(30)
    assert torch.equal(prefill(first, tokens, chunk=7), prefill(second, tokens, chunk=7))
    assert torch.equal(kv(first, 30), kv(second, 30))


def test_bfloat16_stays_bfloat16() -> None:
    run = runner(tiny_llama(dtype=torch.bfloat16))
    hidden = prefill(run, prompt(9), chunk=4)
    assert hidden.dtype == run.storage.keys[0].dtype == torch.bfloat16
    assert torch.isfinite(run.logits(hidden)).all()


def test_the_logits_tail_is_the_models_own() -> None:
    """Families that scale or cap after the head: the runner must not stop at ``lm_head``."""
    config = CohereConfig(
        vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logit_scale=0.125, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model, tokens = random_model(config, 0), prompt(9)
    run = runner(model)
    with torch.no_grad():
        own = model(torch.tensor([tokens])).logits[:, -1]
    torch.testing.assert_close(run.logits(prefill(run, tokens)), own, rtol=0, atol=1e-6)


def test_what_cannot_run_is_refused_before_anything_is_written() -> None:
    run = runner(tiny_llama())
    good = Row([1, 2], 0, [TABLE])
    for bad in ([], [good, Row([], 0, [TABLE])], [good, Row([1], 4 * len(TABLE), [TABLE])]):
        with pytest.raises(ValueError):
            run.forward(bad)
    assert torch.isnan(run.storage.keys[0]).all()


@pytest.mark.clause("A1")
@pytest.mark.parametrize(("device", "cudnn"), [("cuda", False), ("cpu", True)])
def test_attention_on_a_gpu_gives_equal_bits_for_equal_inputs(device, cudnn):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        attend_repeatably(torch.device(device))
        assert torch.backends.cuda.cudnn_sdp_enabled() is cudnn
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)
