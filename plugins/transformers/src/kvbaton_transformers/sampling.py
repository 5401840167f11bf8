"""Choosing tokens from logits, by a rule whose only state is two numbers.

The n-th sample of a request depends on its seed, on n and on the logits, on nothing else: not on the batch, not on the
device, not on how often the request was preempted, and not on which stage runs it.  So a request that is recomputed or
handed over goes on with the token it would have had anyway (A1).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from kvbaton.engine import FinishReason, SamplingParams


def uniform(seed: int, drawn: int) -> float:
    """The number in [0, 1) for sample ``drawn`` (0, 1, ...) of the stream ``seed`` (any integer, modulo 2**128).

    One value of the counter-based generator Philox, keyed by the seed, at counter ``drawn``.
    """
    generator = np.random.Philox(key=seed % 2**128, counter=drawn)
    return int(generator.random_raw() >> 11) * 2.0**-53


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], drawn: Sequence[int]) -> list[int]:
    """One token id per row of ``logits`` (``[rows, vocabulary]``, any dtype and device).

    ``drawn[i]`` is how many tokens row i's request has sampled before, greedy ones included.  Greedy rows
    (temperature 0) take the first of the largest logits.  Others scale by temperature, keep the ``top_k`` largest (0:
    all), of these the smallest set whose probability reaches ``top_p``, and draw.

    Waits for the device.  Raises ``ValueError`` if a row has no finite largest logit: the model is broken there.
    """
    if not len(logits) == len(params) == len(drawn):
        raise ValueError(f"{len(logits)} rows of logits, {len(params)} parameters, {len(drawn)} counts: must be equal")
    best, index = logits.float().max(dim=-1)
    if not bool(torch.isfinite(best).all()):
        broken = [row for row, value in enumerate(best.tolist()) if not np.isfinite(value)]
        raise ValueError(f"logits of rows {broken} have no finite maximum; the weights or the KV cache are damaged")
    greedy: list[int] = index.tolist()
    return [
        token if p.temperature == 0.0 else _draw(logits[row], p, n)
        for row, (token, p, n) in enumerate(zip(greedy, params, drawn, strict=True))
    ]


def _draw(logits: torch.Tensor, params: SamplingParams, drawn: int) -> int:
    # Rows come to the host: equal bits of logits give equal tokens whatever the device's sort and scan do.
    row = logits.float().cpu().numpy().astype(np.float64)
    order = np.argsort(-row, kind="stable")
    if params.top_k:
        order = order[: params.top_k]
    with np.errstate(over="ignore"):  # a tiny temperature: everything but the best weighs nothing
        weights = np.cumsum(np.exp((row[order] - row[order[0]]) / params.temperature))
    kept = len(weights)
    if params.top_p < 1.0:
        kept = int(np.searchsorted(weights, params.top_p * weights[-1], side="left")) + 1
        kept = min(kept, len(weights))
    at = int(np.searchsorted(weights[:kept], uniform(params.seed, drawn) * weights[kept - 1], side="right"))
    return int(order[min(at, kept - 1)])


def finish_reason(
    token: int, produced: int, params: SamplingParams, end_token_ids: Collection[int]
) -> FinishReason | None:
    """Why generation ends with ``token``, the ``produced``-th (1, 2, ...) of its request; None if it goes on.

    ``end_token_ids`` are the model's own; ``params.ignore_eos`` disregards them, never ``params.stop_token_ids``.  Stop
    *texts* are the business of whoever decodes text.
    """
    if token in params.stop_token_ids or (token in end_token_ids and not params.ignore_eos):
        return FinishReason.STOP
    return FinishReason.LENGTH if produced >= params.max_tokens else None
