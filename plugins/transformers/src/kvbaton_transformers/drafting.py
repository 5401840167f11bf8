"""Guessing what a request will say next from what it has said and was asked, without a model."""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Drafts for one request: what followed the last occurrence of its latest ``ngram`` tokens.

    A draft depends on the tokens alone, so that equal requests get equal ones wherever they run (A1).  It costs the
    tokens that are new since the draft before; memory is proportional to the tokens.
    """

    def __init__(self, ngram: int) -> None:
        if ngram < 1:
            raise ValueError(f"an n-gram has at least one token, not {ngram}")
        self._ngram = ngram
        #: n-gram -> where the token that followed it last is.  The latest n-gram has no follower yet.
        self._follower: dict[tuple[int, ...], int] = {}
        self._seen = ngram

    def draft(self, tokens: Sequence[int], most: int) -> list[int]:
        """Up to ``most`` guesses at what follows ``tokens``, which begin with the ones given before."""
        n = self._ngram
        for follower in range(self._seen, len(tokens)):
            self._follower[tuple(tokens[follower - n : follower])] = follower
        self._seen = max(self._seen, len(tokens))
        place = self._follower.get(tuple(tokens[-n:])) if len(tokens) >= n else None
        if place is None:
            return []
        # A repetition shorter than the draft goes on in the draft itself.
        guesses: list[int] = []
        for at in range(place, place + most):
            guesses.append(tokens[at] if at < len(tokens) else guesses[at - len(tokens)])
        return guesses
