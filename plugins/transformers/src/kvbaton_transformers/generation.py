"""From final payloads to tokens: what only a stage that decodes has (A2)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch

from kvbaton.engine import FinishReason, Request, Tokenizer
from kvbaton.errors import ModelError
from kvbaton_transformers.runner import Runner
from kvbaton_transformers.sampling import finish_reason, sample


class Generator:
    """Turns final hidden states into tokens and says when a request ends.

    Has no state: what was drawn before is the number of tokens generated, so a request that was preempted or handed
    over goes on as it would have.
    """

    def __init__(
        self, runner: Runner, end_token_ids: Collection[int], tokenizer: Callable[[], Tokenizer] | None = None
    ) -> None:
        self._runner, self._end_token_ids, self._open_tokenizer = runner, end_token_ids, tokenizer
        self._tokenizer: Tokenizer | None = None

    def draw(self, hidden: Sequence[torch.Tensor], requests: Sequence[Request], drawn: Sequence[int]) -> list[int]:
        """The next token of each request, from its ``[hidden]``; ``drawn`` came before it.  Waits for the device."""
        logits = self._runner.logits(torch.stack(list(hidden)))
        return sample(logits, [request.sampling for request in requests], drawn)

    def reason(self, request: Request, generated: Sequence[int]) -> FinishReason | None:
        """Whether, and why, generation ends with the last of ``generated``."""
        sampling = request.sampling
        reason = finish_reason(generated[-1], len(generated), sampling, self._end_token_ids)
        if sampling.stop and reason is not FinishReason.STOP:
            text = self._decoder().decode(generated)
            if any(stop in text for stop in sampling.stop):
                return FinishReason.STOP
        return reason

    def _decoder(self) -> Tokenizer:
        if self._tokenizer is None:
            if self._open_tokenizer is None:
                raise ModelError("stop texts need the model's tokenizer, and this engine was opened without one")
            self._tokenizer = self._open_tokenizer()
        return self._tokenizer
