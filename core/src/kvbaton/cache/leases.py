"""Leases: a transfer's hold on the blocks of a sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvbaton.cache.cache import KVCache
    from kvbaton.cache.sequences import KVSequence


class Lease:
    """Keeps every block of one sequence, also those it gets later, from being freed or preempted (C8.1, C8.2).

    It has no time to live: only :meth:`end` ends it (C8.5).  It outlives the sequence's owner: blocks that were
    given back under the lease stay as they are until then.
    """

    __slots__ = ("_cache", "blocks", "live", "sequence")

    def __init__(self, cache: KVCache, sequence: KVSequence) -> None:
        self._cache = cache
        self.sequence = sequence
        self.blocks: list[int] = []
        self.live = True

    def end(self) -> None:
        """Let go.  Raises :class:`~kvbaton.errors.CacheError` if it has ended before."""
        self._cache.end_lease(self)
