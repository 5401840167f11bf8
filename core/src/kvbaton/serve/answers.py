"""What clients get, whole or piece by piece, in the two shapes that OpenAI's clients know."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """``cached``: tokens of the prompt that the prefill stage had computed before."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class Shape(Protocol):
    """How one endpoint writes its answers."""

    def whole(self, text: str, reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        """The whole answer at once."""

    def opening(self) -> dict[str, Any] | None:
        """What a stream begins with, if anything."""

    def piece(self, text: str) -> dict[str, Any]:
        """More text of a stream."""

    def closing(self, reason: str) -> dict[str, Any]:
        """The end of the text of a stream."""

    def tail(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        """What a stream ends with where usage was asked for."""


class _Shape:
    prefix: str
    object: str
    piece_object: str

    def __init__(self, model: str, include_usage: bool = False) -> None:
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._usage = {"usage": None} if include_usage else {}

    def tail(self, usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.piece_object, "choices": [], "usage": usage}

    def _whole(self, choice: Mapping[str, Any], usage: Mapping[str, Any]) -> dict[str, Any]:
        return {**self._head, "object": self.object, "choices": [{"index": 0, "logprobs": None, **choice}],
                "usage": usage}  # fmt: skip

    def _piece(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        choices = [{"index": 0, "logprobs": None, "finish_reason": None, **choice}]
        return {**self._head, "object": self.piece_object, "choices": choices, **self._usage}


class CompletionShape(_Shape):
    """``/v1/completions``."""

    prefix, object, piece_object = "cmpl", "text_completion", "text_completion"

    def whole(self, text: str, reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        return self._whole({"text": text, "finish_reason": reason}, usage)

    def opening(self) -> dict[str, Any] | None:
        return None

    def piece(self, text: str) -> dict[str, Any]:
        return self._piece({"text": text})

    def closing(self, reason: str) -> dict[str, Any]:
        return self._piece({"text": "", "finish_reason": reason})


class ChatShape(_Shape):
    """``/v1/chat/completions``."""

    prefix, object, piece_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def whole(self, text: str, reason: str, usage: Mapping[str, Any]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._whole({"message": message, "finish_reason": reason}, usage)

    def opening(self) -> dict[str, Any] | None:
        return self._piece({"delta": {"role": "assistant", "content": ""}})

    def piece(self, text: str) -> dict[str, Any]:
        return self._piece({"delta": {"content": text}})

    def closing(self, reason: str) -> dict[str, Any]:
        return self._piece({"delta": {}, "finish_reason": reason})
