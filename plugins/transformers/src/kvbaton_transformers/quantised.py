"""KV in eight bits: values in float8 (e4m3), each block of tokens with scales of its own.

The first token of a block sets the block's scales, for K and V of every layer; the tokens that follow it are stored by
them.  So a block's scales and bytes are written once and never again, whatever is appended: a range that is computed
is final (C3.7), results do not depend on how a prompt is cut into chunks, and a token that turns out wrong takes back
nothing but itself.  What makes that affordable is the format: its relative precision is the same over sixteen powers
of two.  The first token's largest value is put at 8 to 16 of 448, so that later ones may be at least 28 times as large
before they saturate, and 512 times smaller before they lose precision.

Scales are powers of two: to scale is exact, and only the rounding to four significant bits is lost.
"""

from __future__ import annotations

import enum

import torch

#: What values are stored as, and the largest one.
DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max
#: The first token's largest value lies in [2 ** (_EXPONENT - 1), 2 ** _EXPONENT).
_EXPONENT = 4


class Scales(enum.Enum):
    """How many scales K, and as many V, of one layer has in a block: one for all heads, or one for each."""

    BLOCK = "block"
    HEAD = "head"

    def count(self, heads: int) -> int:
        return 1 if self is Scales.BLOCK else heads


def scales_of(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The scales of blocks that begin with ``tokens`` (``[block, head, dim]``): ``[block, count]``, float32.

    ``count``: 1 or the number of heads.  Not a number where a token is not finite, so that damage shows.
    """
    largest = tokens.float().abs().flatten(1).unflatten(1, (count, -1)).amax(dim=-1)
    exponent = torch.frexp(largest).exponent
    scales = torch.ldexp(torch.ones_like(largest), exponent - _EXPONENT)
    return torch.where(torch.isfinite(largest), scales, torch.nan)


def quantise(tokens: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``tokens`` (``[token, head, dim]``) by ``scales`` (``[token, count]``): float8 of the same shape, saturated."""
    return (tokens.float() / scales[:, :, None]).clamp(-_LARGEST, _LARGEST).to(DTYPE)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What ``blocks`` (``[block, token, head, dim]``) stand for by ``scales`` (``[block, count]``), in ``dtype``."""
    return (blocks.float() * scales[:, None, :, None]).to(dtype)
