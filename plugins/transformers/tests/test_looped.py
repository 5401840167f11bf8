"""Looped models: per-token exits, and what each layout promises."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from transformers import DynamicCache

from kvbaton_transformers.looped import Layout, LoopedModel, LoopOptions
from kvbaton_transformers.paged import KVSpec, PagedKV
from kvbaton_transformers.runner import Row, Runner
from kvbaton_transformers.support import cache_argument, probe
from kvbaton_transformers.testing import tiny_llama, tiny_looped

BLOCK = 4
TABLES = [[plane * 3 + block for block in (40, 7, 21, 1, 30, 12, 3, 50, 16, 25)] for plane in range(4)]
LAYOUTS = pytest.mark.parametrize("layout", list(Layout))


def prompt(length: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def runner(model: LoopedModel) -> Runner:
    spec = KVSpec(probe(model.decoder), planes=model.options.planes, blocks=64, block_tokens=BLOCK, final_slots=2)
    storage = PagedKV(spec)
    for tensor in storage.tensors.values():
        tensor.fill_(float("nan"))
    return Runner(model, storage)


def run(r: Runner, tokens: Sequence[int], cuts: Sequence[int] = ()) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Prefill in pieces cut at ``cuts``: the last hidden state, and the exit depth of every token."""
    depths: tuple[int, ...] = ()
    edges = [0, *cuts, len(tokens)]
    for start, end in itertools.pairwise(edges):
        forward = r.forward([Row(tokens[start:end], start, TABLES[: r.planes])])
        depths += forward.exit_depths[0]
    return forward.hidden[0], depths


def plane_kv(r: Runner, plane: int, length: int) -> torch.Tensor:
    """``[layer, token, ...]``, K and V side by side."""
    parts = [
        storage[plane][TABLES[plane]].transpose(0, 1).flatten(1, 2)[:, :length]
        for storage in (r.storage.keys, r.storage.values)
    ]
    return torch.cat(parts, dim=-1)


def naive(model: LoopedModel, tokens: Sequence[int]) -> tuple[torch.Tensor, list[int], list[list[torch.Tensor]]]:
    """LAST_EXITED by its definition, one token and one pass at a time, without a paged cache.

    Token i at pass d sees of token j < i the KV of j's pass min(d, last pass of j).  Returns the last hidden state, the
    exit depths, and ``kv[i][p]`` = what pass p of token i wrote (``[layer, ...]``).
    """
    written: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = []
    depths = []
    for position, token in enumerate(tokens):
        hidden = model.decoder.get_input_embeddings()(torch.tensor([[token]]))
        written.append([])
        for depth in range(model.options.max_depth):
            cache = DynamicCache()
            if position:
                for layer in range(2):
                    seen = [passes[min(depth, len(passes) - 1)][layer] for passes in written[:position]]
                    cache.update(torch.cat([k for k, _ in seen], dim=2), torch.cat([v for _, v in seen], dim=2), layer)
            hidden = model.decoder.base_model(
                inputs_embeds=hidden,
                position_ids=torch.tensor([[position]]),
                use_cache=True,
                **{cache_argument(model.decoder): cache},
            ).last_hidden_state
            written[-1].append([(layer.keys[:, :, -1:], layer.values[:, :, -1:]) for layer in cache.layers])
            if bool(model.exits(hidden)):
                break
        depths.append(len(written[-1]))
    final = [
        [torch.stack([torch.cat((k, v), dim=-1)[0, :, 0] for k, v in layers]) for layers in passes]
        for passes in written
    ]
    return hidden[0, 0], depths, final


def test_tokens_exit_at_every_depth() -> None:
    _, depths = run(runner(tiny_looped()), prompt(40))
    assert set(depths) == {1, 2, 3, 4}


@pytest.mark.clause("A1", "C3.7")
@torch.no_grad()
def test_last_exited_is_its_definition() -> None:
    model, tokens = tiny_looped(), prompt(24)
    hidden, depths, written = naive(model, tokens)
    assert set(depths) == {1, 2, 3, 4}
    r = runner(model)
    got, got_depths = run(r, tokens, cuts=[5, 6, 16])
    assert list(got_depths) == depths
    torch.testing.assert_close(got, hidden, rtol=0, atol=1e-4)
    for plane in range(4):
        # the KV of an exited token stands in every deeper plane
        expected = torch.stack([passes[min(plane, len(passes) - 1)] for passes in written], dim=1)
        torch.testing.assert_close(plane_kv(r, plane, 24), expected, rtol=0, atol=1e-4)


@pytest.mark.clause("A1", "C3.7")
@pytest.mark.parametrize("cuts", [[8], [1, 2, 3], [4, 8, 12, 16, 20], list(range(1, 31))])
def test_last_exited_does_not_depend_on_chunking(cuts: list[int]) -> None:
    model, tokens = tiny_looped(), prompt(31)
    whole, chunked = runner(model), runner(model)
    assert whole.chunk_invariant
    hidden, depths = run(whole, tokens)
    got, got_depths = run(chunked, tokens, cuts)
    assert got_depths == depths
    torch.testing.assert_close(got, hidden, rtol=0, atol=1e-4)
    for plane in range(4):
        torch.testing.assert_close(plane_kv(chunked, plane, 31), plane_kv(whole, plane, 31), rtol=0, atol=1e-4)


@pytest.mark.clause("C3.7")
def test_shared_depends_on_chunking_and_says_so() -> None:
    model, tokens = tiny_looped(layout=Layout.SHARED), prompt(31)
    whole, chunked = runner(model), runner(model)
    assert not whole.chunk_invariant
    assert whole.planes == 1
    assert not torch.allclose(run(whole, tokens)[0], run(chunked, tokens, [8])[0], atol=1e-2)


@pytest.mark.clause("A1")
def test_layouts_agree_on_a_first_prompt_in_one_piece() -> None:
    """Within one piece a token at pass d sees the same of its predecessors in both layouts."""
    tokens = prompt(31)
    separate, shared = runner(tiny_looped()), runner(tiny_looped(layout=Layout.SHARED))
    assert run(separate, tokens)[1] == run(shared, tokens)[1]
    # what SHARED keeps is what the deepest plane of LAST_EXITED holds: of each token its last pass
    assert torch.equal(plane_kv(shared, 0, 31), plane_kv(separate, 3, 31))


@LAYOUTS
def test_equal_runs_have_equal_bits(layout: Layout) -> None:
    first, second = runner(tiny_looped(layout=layout)), runner(tiny_looped(layout=layout))
    tokens = prompt(20)
    assert torch.equal(run(first, tokens)[0], run(second, tokens)[0])
    assert all(torch.equal(plane_kv(first, p, 20), plane_kv(second, p, 20)) for p in range(first.planes))


@LAYOUTS
def test_decode_rows_of_a_batch_exit_apart(layout: Layout) -> None:
    model = tiny_looped(layout=layout)
    together, alone = runner(model), runner(model)
    rows = []
    for row in range(6):
        tables = [[10 * row + block for block in range(4)]] * together.planes
        tokens = prompt(5 + row, seed=row)
        for r in (together, alone):
            r.forward([Row(tokens[:-1], 0, tables)])
        rows.append(Row(tokens[-1:], len(tokens) - 1, tables))
    forward = together.forward(rows)
    assert len(set(forward.exit_depths)) > 1
    for position, row in enumerate(rows):
        single = alone.forward([row])
        assert single.exit_depths == (forward.exit_depths[position],)
        torch.testing.assert_close(forward.hidden[position], single.hidden[0], rtol=0, atol=1e-4)
    for mine, theirs in zip(together.storage.keys, alone.storage.keys, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4, equal_nan=True)


def test_a_damaged_deep_plane_is_noticed() -> None:
    """The control: agreement is not indifference to the planes that only deep tokens read."""
    model, tokens = tiny_looped(), prompt(31)
    sound, damaged = runner(model), runner(model)
    for r in (sound, damaged):
        run(r, tokens)
    damaged.storage.values[3][TABLES[3][2], 0, 1] = 0.0
    differ = False
    for position, token in enumerate(prompt(9, seed=5), start=31):
        row = [Row([token], position, TABLES)]
        differ |= not torch.equal(sound.forward(row).hidden, damaged.forward(row).hidden)
    assert differ


def test_thresholds_at_both_ends() -> None:
    tokens = prompt(12)
    assert set(run(runner(tiny_looped(threshold=0.0)), tokens)[1]) == {1}
    assert set(run(runner(tiny_looped(threshold=1.0)), tokens)[1]) == {4}
    once = LoopedModel(tiny_llama(), LoopOptions(max_depth=1))
    plain = Runner(tiny_llama(), PagedKV(KVSpec(probe(tiny_llama()), 1, 64, BLOCK, 2)))
    assert torch.equal(run(runner(once), tokens)[0], run(plain, tokens)[0])


@pytest.mark.clause("C3.5")
def test_identity_tells_loops_apart() -> None:
    same = tiny_looped().identity
    assert tiny_looped().identity == same
    for other in (
        tiny_looped(max_depth=3),
        tiny_looped(layout=Layout.SHARED),
        tiny_looped(threshold=0.7),
        LoopedModel(tiny_llama(), LoopOptions(4, threshold=0.6, gate_seed=5)),
    ):
        assert other.identity != same


def test_a_depth_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        LoopOptions(0)
