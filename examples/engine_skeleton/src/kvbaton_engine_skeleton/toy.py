"""What stands for a model: one layer of attention with random weights.  Fill in: your model.

It is a real decoder in what matters here: the next token depends on every byte of K and V of the tokens before it, so
that a hand-off that loses one byte answers with other tokens.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvbaton.engine import SamplingParams

VOCABULARY, WIDTH = 256, 32
Floats = npt.NDArray[np.float32]

_draw = np.random.default_rng(20)
_EMBEDDING = _draw.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
_QUERY, _KEY, _VALUE = (
    (_EMBEDDING @ _draw.standard_normal((WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32) for _ in range(3)
)


def _places(start: int, count: int) -> Floats:
    """Something of each position, so that the order of tokens counts.  Shape ``[count, WIDTH]``."""
    angles = np.arange(start, start + count)[:, None] * (1.0 + np.arange(WIDTH))[None, :]
    return np.sin(angles).astype(np.float32)


def keys_and_values(tokens: list[int], start: int) -> tuple[Floats, Floats]:
    """K and V of ``tokens``, which stand at positions ``start`` on.  Shapes ``[len(tokens), WIDTH]``."""
    here = _places(start, len(tokens))
    return _KEY[tokens] + here, _VALUE[tokens] + here


def attend(token: int, position: int, keys: Floats, values: Floats) -> Floats:
    """The hidden state behind ``token``, from K and V of all tokens up to it.  Shape ``[WIDTH]``."""
    scores = keys @ (_QUERY[token] + _places(position, 1)[0])
    weights = np.exp((scores - scores.max()) / WIDTH**0.5)
    return np.asarray(values.T @ (weights / weights.sum()), dtype=np.float32)


def choose(hidden: Floats, sampling: SamplingParams, position: int) -> int:
    """The next token.  Equal seeds and positions draw alike, whatever else runs (A1)."""
    logits = (_EMBEDDING @ hidden).astype(np.float64)
    if sampling.temperature == 0.0:
        return int(logits.argmax())
    order = np.argsort(-logits, kind="stable")
    logits = logits[order] / sampling.temperature
    chances = np.exp(logits - logits[0])
    if sampling.top_k:
        chances[sampling.top_k :] = 0.0
    chances /= chances.sum()
    chances[np.cumsum(chances) - chances >= sampling.top_p] = 0.0
    draw = np.random.default_rng([sampling.seed, position])
    return int(order[draw.choice(VOCABULARY, p=chances / chances.sum())])
