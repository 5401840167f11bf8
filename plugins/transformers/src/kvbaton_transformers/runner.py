"""One forward over a ragged batch of requests, and the logits of what it leaves.

The two halves are apart because they run on different stages: P computes hidden states and sends the last one; D
turns it into logits and samples (A2).
"""

from __future__ import annotations

import copy
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from kvbaton.errors import UnsupportedModel
from kvbaton_transformers.looped import Layout, LoopedModel
from kvbaton_transformers.paged import PagedCache, PagedKV, RowIndex
from kvbaton_transformers.support import cache_argument


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a forward: a prefill chunk, or the single token of a decode step.

    ``tokens``: new token ids, at least one, at positions ``start``, ``start + 1``, ...; the KV of ``[0, start)`` is
    valid in the cache already.  ``tables[plane]``: block ids that cover ``start + len(tokens)`` tokens; the blocks
    that get the new tokens belong to this row alone.  ``every``: the hidden state of every new token is wanted, for
    the tokens are guesses and each has to be checked.
    """

    tokens: Sequence[int]
    start: int
    tables: Sequence[Sequence[int]]
    every: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Forward:
    """What a forward leaves.

    ``hidden``: ``[rows, hidden]``, for each row that of its last token after the final norm and before the output
    head: the final payload.  ``exit_depths[row][i]``: how many passes over the decoder stack its i-th new token took
    (1 in an ordinary model).  ``every[row]``: ``[new, hidden]``, the same of all its new tokens, where that was asked
    for.
    """

    hidden: torch.Tensor
    exit_depths: tuple[tuple[int, ...], ...]
    every: tuple[torch.Tensor | None, ...]


class Batching(enum.Enum):
    """Which rows share a pass through the model.

    ``GROUPED``: all single-token rows together, likewise those with equally many guesses to check, each other row
    alone.  ``ISOLATED``: every row alone, so that its bits do not depend on what else is in the batch: for exact
    agreement (A1) under concurrency, where GROUPED may differ in roundings (A3).
    """

    GROUPED = "grouped"
    ISOLATED = "isolated"


def attend_repeatably(device: torch.device) -> None:
    """Keep attention on ``device`` to kernels that give equal bits for equal inputs (A1), in the whole process.

    cuDNN's does not: with bfloat16 on an H200 (torch 2.11), one process that ran the same requests five times had two
    different answers; without it, and with the mathematical form, one.  Flash and memory-efficient attention stay.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class Runner:
    """Runs ``model`` over the cache ``storage``.

    Deterministic: equal rows over equal cache bytes give equal bits.  Threading: one thread, that of the engine.
    Work on a GPU is queued on the current stream; nothing waits for it, except that a looped model reads its exits
    after every pass.
    """

    def __init__(
        self, model: PreTrainedModel | LoopedModel, storage: PagedKV, batching: Batching = Batching.GROUPED
    ) -> None:
        self.model, self.storage, self.batching = model, storage, batching
        decoder = model.decoder if isinstance(model, LoopedModel) else model
        self._base = decoder.base_model
        self._takes = cache_argument(decoder)
        self._tail = _logits_tail(decoder, storage.spec.shape.hidden)
        attend_repeatably(storage.device)

    @property
    def planes(self) -> int:
        """How many block tables a row has."""
        return self.storage.spec.planes

    @property
    def chunk_invariant(self) -> bool:
        """Whether results are independent of how a prompt is cut into chunks.

        False for a SHARED looped model: its prompts go in one piece and share no prefixes (C3.7).
        """
        return not (isinstance(self.model, LoopedModel) and self.model.options.layout is Layout.SHARED)

    @torch.no_grad()
    def forward(self, rows: Sequence[Row]) -> Forward:
        """Compute the new tokens of ``rows`` and store their KV in the rows' blocks.

        Raises ``ValueError`` for a row without tokens or a table that is too short, before anything is written.
        """
        groups = self._groups(rows)
        indices = [self._index([rows[i] for i in group]) for group in groups]
        hidden: list[torch.Tensor | None] = [None] * len(rows)
        every: list[torch.Tensor | None] = [None] * len(rows)
        depths: list[tuple[int, ...]] = [()] * len(rows)
        for group, planes in zip(groups, indices, strict=True):
            states, group_depths = self._run([rows[i] for i in group], planes)
            for position, i in enumerate(group):
                hidden[i], depths[i] = states[position, -1], group_depths[position]
                every[i] = states[position] if rows[i].every else None
        return Forward(torch.stack([h for h in hidden if h is not None]), tuple(depths), tuple(every))

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[rows, hidden]`` before the head -> logits ``[rows, vocabulary]``, by the model's own tail.

        With :attr:`Batching.ISOLATED` each row is computed alone.
        """
        rows = hidden.split(1) if self.batching is Batching.ISOLATED else (hidden,)
        return torch.cat([self._tail(inputs_embeds=part[:, None], use_cache=False).logits[:, -1] for part in rows])

    def _groups(self, rows: Sequence[Row]) -> list[list[int]]:
        """Indices of the rows that go through the model together; all rows of a group are equally long."""
        if not rows or not all(row.tokens for row in rows):
            raise ValueError("a forward needs at least one row, and every row at least one token")
        if self.batching is Batching.ISOLATED:
            return [[i] for i in range(len(rows))]
        alike: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            if row.every or len(row.tokens) == 1:
                alike.setdefault(len(row.tokens), []).append(i)
        chunks = [[i] for i, row in enumerate(rows) if not row.every and len(row.tokens) > 1]
        return [*(alike[new] for new in sorted(alike)), *chunks]

    def _index(self, rows: Sequence[Row]) -> list[RowIndex]:
        spec = self.storage.spec
        starts, new = [row.start for row in rows], len(rows[0].tokens)
        return [
            RowIndex([row.tables[plane] for row in rows], starts, new, spec.block_tokens, self.storage.device)
            for plane in range(spec.planes)
        ]

    def _run(self, rows: Sequence[Row], planes: Sequence[RowIndex]) -> tuple[torch.Tensor, list[tuple[int, ...]]]:
        token_ids = torch.tensor([list(row.tokens) for row in rows], device=self.storage.device)
        if isinstance(self.model, LoopedModel):
            hidden, depths = self.model.run(token_ids, self.storage, planes)
            return hidden, [tuple(row) for row in depths.tolist()]
        index = planes[0]
        hidden = self._base(
            input_ids=token_ids,
            attention_mask=index.mask,
            position_ids=index.positions,
            use_cache=True,
            **{self._takes: PagedCache(self.storage, 0, index)},
        ).last_hidden_state
        return hidden, [(1,) * index.new] * index.rows


class _Received(nn.Module):
    """Stands in for the decoder stack and returns what it is given: the hidden state that another stage computed."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _logits_tail(decoder: PreTrainedModel, size: int) -> nn.Module:
    """``decoder`` with its base replaced, sharing every parameter: several families scale or cap after ``lm_head``.

    ``size`` is that of the hidden state; the tail is tried once on zeros.
    """
    tail = copy.copy(decoder)
    tail._modules = {**decoder._modules, decoder.base_model_prefix: _Received()}
    hidden = torch.zeros((1, 1, size), dtype=decoder.dtype, device=decoder.device)
    try:
        with torch.no_grad():
            tail(inputs_embeds=hidden, use_cache=False)
    except Exception as error:
        raise UnsupportedModel(
            f"{decoder.config.model_type} cannot be served: its logits cannot be computed from the last hidden state"
            f" alone ({type(error).__name__}: {error})",
            model=decoder.config.model_type,
            missing=("an output head apart from the decoder stack",),
        ) from error
    return tail
