"""Looped models: one decoder stack run several times over the hidden state, with a gate that ends a token's loops
early.

Pass d (0, 1, ...) of a token takes the hidden state that pass d-1 left, through all layers and the final norm.  After
each pass the gate decides for every token whether it was the last; the last permitted pass always is.  A token's
*exit depth* is the number of its passes: 1 to ``max_depth``.

What a token at pass d sees of an earlier token that has exited before is the layout's matter:

``LAST_EXITED``
    One storage plane per depth.  The earlier token's KV of its last pass stands in every deeper plane.  It is copied
    there before the deeper pass attends, and an exited token writes nothing any more; so the result does not depend
    on chunking.
``SHARED``
    One plane.  Each pass overwrites the KV of the tokens still running.  A later chunk sees what the last pass of an
    earlier chunk left, so the result depends on chunking: a prompt is prefilled in one piece, and prefixes cannot be
    shared.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from kvbaton_transformers.paged import PagedCache, PagedKV, RowIndex
from kvbaton_transformers.support import cache_argument


class Layout(enum.Enum):
    LAST_EXITED = "last_exited"
    SHARED = "shared"


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """How a decoder is looped.

    ``max_depth`` passes at most (at least 1).  A token exits after a pass where the gate's sigmoid exceeds
    ``threshold``: 0.0 exits at once, 1.0 never early.  ``gate_seed`` seeds the gate's random weights.
    """

    max_depth: int
    layout: Layout = Layout.LAST_EXITED
    threshold: float = 0.5
    gate_seed: int = 0

    def __post_init__(self) -> None:
        if self.max_depth < 1:
            raise ValueError(f"max_depth must be at least 1, not {self.max_depth}")

    @property
    def planes(self) -> int:
        return self.max_depth if self.layout is Layout.LAST_EXITED else 1


class LoopedModel(nn.Module):
    """A causal decoder of Hugging Face, looped.  ``decoder`` is the whole causal model; its logits tail serves as
    before."""

    def __init__(self, decoder: PreTrainedModel, options: LoopOptions) -> None:
        super().__init__()
        self.decoder, self.options = decoder, options
        self._takes = cache_argument(decoder)
        hidden = decoder.config.get_text_config().hidden_size
        generator = torch.Generator().manual_seed(options.gate_seed)
        # The normed hidden state has unit mean square, so scores are about standard normal.  In float32: an exit must
        # not depend on the rounding of a low-precision product more than it has to.  Said so, for torch's default dtype
        # is the process's, and transformers sets it while another thread builds a model.
        weight = torch.randn(hidden, generator=generator, dtype=torch.float32) / hidden**0.5
        self.gate = nn.Parameter(weight.to(decoder.device), requires_grad=False)

    @property
    def identity(self) -> dict[str, str]:
        """What two stages must agree on besides the decoder."""
        gate = hashlib.sha256(self.gate.float().cpu().numpy().tobytes()).hexdigest()
        o = self.options
        return {
            "loops": f"max_depth={o.max_depth} layout={o.layout.value} threshold={o.threshold!r} gate=sha256:{gate}"
        }

    def exits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``[..., hidden]`` after a pass -> ``[...]``, True where the gate ends the token's loops."""
        return torch.sigmoid(hidden.float() @ self.gate) > self.options.threshold

    def run(
        self, token_ids: torch.Tensor, storage: PagedKV, planes: Sequence[RowIndex]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``token_ids`` (``[rows, new]``) until each has exited; ``planes[p]`` says where they lie in plane p.

        Returns the hidden states at exit, ``[rows, new, hidden]``, and the exit depths, ``[rows, new]``.  Afterwards
        the new tokens' KV is final in every plane.
        """
        hidden = self.decoder.get_input_embeddings()(token_ids)
        running = torch.ones_like(token_ids, dtype=torch.bool)
        depths = torch.zeros_like(token_ids)
        base = self.decoder.base_model
        separate = self.options.layout is Layout.LAST_EXITED
        for depth in range(self.options.max_depth):
            plane = depth if separate else 0
            if separate and depth:
                # Before this depth attends, and also where no token is left to attend: later tokens may run deeper.
                storage.copy_tokens(depth - 1, planes[depth - 1], depth, planes[depth], ~running)
            rows = running.any(dim=1).nonzero()[:, 0]
            if len(rows) == 0:
                if not separate:
                    break
                continue
            index = planes[plane].select(rows)
            writes = running[rows]
            result = base(
                inputs_embeds=hidden[rows],
                attention_mask=index.mask,
                position_ids=index.positions,
                use_cache=True,
                **{self._takes: PagedCache(storage, plane, index, None if bool(writes.all()) else writes)},
            ).last_hidden_state
            hidden[rows] = torch.where(writes[..., None], result, hidden[rows])
            depths += running
            running &= ~self.exits(hidden)
        return hidden, depths
