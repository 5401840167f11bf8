"""Sampling: what is chosen, and that nothing but seed, count and logits matters."""

from __future__ import annotations

import pytest
import torch

from kvbaton.engine import FinishReason, SamplingParams
from kvbaton_transformers.sampling import finish_reason, sample, uniform

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0, -1.0])


def draws(params: SamplingParams, count: int = 400, logits: torch.Tensor = LOGITS) -> list[int]:
    return [sample(logits[None], [params], [n])[0] for n in range(count)]


@pytest.mark.clause("A1")
def test_greedy_takes_the_first_of_the_largest() -> None:
    assert sample(LOGITS[None], [SamplingParams()], [0]) == [1]


@pytest.mark.clause("A1", "A2")
def test_a_sample_depends_on_seed_and_count_alone() -> None:
    params = SamplingParams(temperature=1.0, seed=7)
    alone = draws(params, 40)
    # in any batch, at any place in it, in any order of steps, in any precision that holds the logits exactly
    other = SamplingParams(temperature=2.0, seed=8)
    rows = torch.stack([LOGITS * 2, LOGITS, LOGITS - 1])
    assert [sample(rows, [other, params, other], [3, n, n])[1] for n in reversed(range(40))] == alone[::-1]
    assert draws(params, 40, LOGITS.to(torch.bfloat16)) == alone
    assert draws(SamplingParams(temperature=1.0, seed=8), 40) != alone


def test_global_random_state_is_neither_used_nor_changed() -> None:
    params = SamplingParams(temperature=1.0, seed=1)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    first = draws(params, 20)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert draws(params, 20) == first


def test_frequencies_follow_the_softmax() -> None:
    params = SamplingParams(temperature=1.5, seed=3)
    counts = torch.bincount(torch.tensor(draws(params, 4000)), minlength=5) / 4000
    expected = torch.softmax(LOGITS / 1.5, dim=0)
    assert torch.allclose(counts, expected, atol=0.03)
    assert not torch.allclose(counts, torch.softmax(LOGITS, dim=0), atol=0.03)  # the temperature shows


def test_top_k_and_top_p_keep_the_largest() -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_k=2))) == {1, 3}
    assert set(draws(SamplingParams(temperature=1.0, top_k=3))) == {1, 2, 3}
    assert set(draws(SamplingParams(temperature=1.0, top_p=1e-9))) == {1}
    # 1 and 3 together have 0.77 of the mass, with 2 it is 0.91
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.7))) == {1, 3}
    assert set(draws(SamplingParams(temperature=1.0, top_p=0.8))) == {1, 2, 3}
    assert set(draws(SamplingParams(temperature=1e-30))) <= {1, 3}


def test_uniform_numbers() -> None:
    numbers = [uniform(seed, n) for seed in (0, -1, 2**200 + 5) for n in range(500)]
    assert all(0.0 <= u < 1.0 for u in numbers)
    assert len(set(numbers)) == len(numbers)
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.03


def test_damaged_logits_are_an_error() -> None:
    rows = torch.stack([LOGITS, LOGITS * float("nan")])
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        sample(rows, [SamplingParams()] * 2, [0, 0])
    with pytest.raises(ValueError, match="must be equal"):
        sample(rows, [SamplingParams()], [0])


@pytest.mark.parametrize(
    ("token", "produced", "params", "reason"),
    [
        (5, 1, SamplingParams(max_tokens=4), None),
        (5, 4, SamplingParams(max_tokens=4), FinishReason.LENGTH),
        (2, 1, SamplingParams(max_tokens=4), FinishReason.STOP),
        (2, 4, SamplingParams(max_tokens=4), FinishReason.STOP),
        (2, 1, SamplingParams(max_tokens=4, ignore_eos=True), None),
        (5, 1, SamplingParams(max_tokens=4, stop_token_ids=(5,), ignore_eos=True), FinishReason.STOP),
    ],
)
def test_finish_reason(token: int, produced: int, params: SamplingParams, reason: FinishReason | None) -> None:
    assert finish_reason(token, produced, params, frozenset({2})) is reason
