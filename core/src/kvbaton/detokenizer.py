"""Token ids in, text out, as they come."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.engine import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """Token ids in, text out, piece by piece: the pieces concatenate to the whole text.

    A piece that ends within a character is held back.  Each call decodes a short window, not the whole text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0  # the first token of the window
        self._shown = 0  # tokens whose text was handed out

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain."""
        self._ids += token_ids
        text, known = self._window_texts()
        if len(text) <= len(known) or text.endswith(_UNFINISHED):
            return ""
        # the window keeps the previous piece: what a token reads like depends on its neighbour
        self._window, self._shown = self._shown, len(self._ids)
        return text[len(known) :]

    def finish(self) -> str:
        """What was held back, as it is."""
        text, known = self._window_texts()
        self._window, self._shown = self._shown, len(self._ids)
        return text[len(known) :]

    def _window_texts(self) -> tuple[str, str]:
        window = self._ids[self._window :]
        known = self._tokenizer.decode(window[: self._shown - self._window]) if self._shown > self._window else ""
        return self._tokenizer.decode(window) if window else "", known
