"""The text of one answer as it grows, up to the first stop text."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.detokenizer import Detokenizer
from kvbaton.engine import Tokenizer


class Transcript:
    """Token ids in, the answer's text out, piece by piece.

    What may turn out to be the beginning of a stop text is held back; neither the stop text nor what follows it is part
    of the answer.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = tuple(stop)
        self._held = ""
        #: Tokens so far.
        self.tokens = 0
        #: A stop text was found: nothing more belongs to the answer.
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that has become certain."""
        self.tokens += len(token_ids)
        return self._certain(self._detokenizer.push(token_ids))

    def finish(self) -> str:
        """What was held back, as it is."""
        text = self._certain(self._detokenizer.finish())
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _certain(self, text: str) -> str:
        if self.stopped or not self._stop:
            return "" if self.stopped else text
        text = self._held + text
        # the one that is complete first, so that it does not matter in which pieces the text comes
        found = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        keep = max(_overlap(text, stop) for stop in self._stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that ``stop`` begins with, and goes on after."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
