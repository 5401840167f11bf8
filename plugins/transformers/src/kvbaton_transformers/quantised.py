"""KV in eight bits: values in float8 (e4m3), each block of tokens with scales of its own.

The first token of a block sets the block's scales, for K and V of every layer; the tokens that follow it are stored by
them.  So a block's scales and bytes are written once and never again, whatever is appended: a range that is computed
is final (C3.7), results do not depend on how a prompt is cut into chunks, and a token that turns out wrong takes back
nothing but itself.  What makes that affordable is the format: its relative precision is the same over sixteen powers
of two.  The first token's largest value is put at 8 to 16 of 448, so that later ones may be at least 28 times as large
before they saturate, and 512 times smaller before they lose precision.

Or every block of a layer has the same scales, found once by running a text of sorts through the model.

Scales are powers of two: to scale is exact, and only the rounding to four significant bits is lost.
"""

from __future__ import annotations

import enum

import torch

#: What values are stored as, and the largest one.
DTYPE = torch.float8_e4m3fn
_LARGEST = torch.finfo(DTYPE).max
#: The first token's largest value is stored in [2 ** (_EXPONENT - 1), 2 ** _EXPONENT); by constant scales, the largest
#: value of a whole text in the same of _EXPONENT_OF_TEXT.
_EXPONENT = 4
_EXPONENT_OF_TEXT = 6


class Scales(enum.Enum):
    """Which scales K, and as many V, of one layer has in a block: one for all heads, set by the block's first token;
    one for each head, likewise; or one that is the same in every block."""

    BLOCK = "block"
    HEAD = "head"
    TENSOR = "tensor"

    def count(self, heads: int) -> int:
        return heads if self is Scales.HEAD else 1


def scales_of(tokens: torch.Tensor, count: int) -> torch.Tensor:
    """The scales of blocks that begin with ``tokens`` (``[block, head, dim]``): ``[block, count]``, float32.

    ``count``: 1 or the number of heads.  Not a number where a token is not finite, so that damage shows.
    """
    return _scales(tokens.float().abs().flatten(1).unflatten(1, (count, -1)).amax(dim=-1), _EXPONENT)


def constant_scales(text: torch.Tensor) -> torch.Tensor:
    """One scale for each layer whose largest value in some text is given: ``[layer]``, float32."""
    return _scales(text.float(), _EXPONENT_OF_TEXT)


def _scales(largest: torch.Tensor, exponent: int) -> torch.Tensor:
    """Powers of two by which ``largest`` is stored just below ``2 ** exponent``."""
    scales = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - exponent)
    return torch.where(torch.isfinite(largest), scales, torch.nan)


def quantise(tokens: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``tokens`` (``[token, head, dim]``) by ``scales`` (``[token, count]``): float8 of the same shape, saturated."""
    return (tokens.float() / scales[:, :, None]).clamp(-_LARGEST, _LARGEST).to(DTYPE)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What ``blocks`` (``[block, token, head, dim]``) stand for by ``scales`` (``[block, count]``), in ``dtype``."""
    return (blocks.float() * scales[:, None, :, None]).to(dtype)
