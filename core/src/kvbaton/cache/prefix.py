"""Names for the content of full blocks: equal names, equal model and equal tokens from the very first one on.

A name is a hash of the previous block's name and this block's tokens, so a block is never shared with a different
history.  The first link is the model's identity: two models never share (C3.5).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

#: Long enough that two contents never meet by chance, nor by intent.
_DIGEST_BYTES = 32


class PrefixNames:
    """Names of the blocks of sequences over one model; ``identity`` is whatever makes cached KV incomparable."""

    def __init__(self, identity: bytes, block_tokens: int) -> None:
        self._root = blake2b(identity, digest_size=_DIGEST_BYTES).digest()
        self._block_tokens = block_tokens

    def extend(self, names: list[bytes], tokens: Sequence[int], blocks: int) -> None:
        """Make ``names`` name at least the first ``blocks`` blocks of ``tokens``, which must fill them."""
        size = self._block_tokens
        for index in range(len(names), blocks):
            link = array("q", tokens[index * size : (index + 1) * size])
            parent = names[-1] if names else self._root
            names.append(blake2b(parent + link.tobytes(), digest_size=_DIGEST_BYTES).digest())
