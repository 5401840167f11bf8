"""Sequences: the token history of one request and the blocks that hold its KV."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from kvbaton.cache.leases import Lease
from kvbaton.reservation import Tables


class SequenceState(enum.Enum):
    #: Its KV is computed here.
    OPEN = "open"
    #: Its KV past the prefix comes from elsewhere; nothing of that is valid until it is imported (C3.1).
    IMPORTING = "importing"
    #: It has no blocks for now; tokens and budget are kept (C8.4).
    PREEMPTED = "preempted"
    #: Over.  A lease may still hold its blocks.
    FREED = "freed"


class KVSequence:
    """One request's part of the cache.  Read it freely; only :class:`~kvbaton.cache.KVCache` changes it.

    ``tokens``: all that are known.  ``valid``: how many leading ones have their KV in place.  ``budget``: how many
    there may ever be, kept through import, preemption and resumption (C8.4).  ``tables[plane]``: block ids in token
    order, the cache's own lists: they grow in place, and :meth:`~kvbaton.cache.KVCache.trim` cuts them in place.
    """

    __slots__ = ("blocks", "budget", "leases", "names", "published", "state", "tables", "tokens", "valid")

    def __init__(self, tokens: Sequence[int], budget: int, planes: int, state: SequenceState) -> None:
        self.tokens = list(tokens)
        self.budget = budget
        self.state = state
        self.valid = 0
        self.blocks: list[int] = []
        self.tables: tuple[list[int], ...] = tuple([] for _ in range(planes))
        self.leases: list[Lease] = []
        #: Names of the leading full blocks, as far as they have been asked for.
        self.names: list[bytes] = []
        #: How many leading blocks have been offered for reuse.
        self.published = 0

    @property
    def leased(self) -> bool:
        return bool(self.leases)

    def arrays(self) -> Tables:
        """A copy of the tables as they are now."""
        return tuple(np.array(table, dtype=np.int64) for table in self.tables)

    def __repr__(self) -> str:
        return (
            f"<KVSequence {self.state.value}: {self.valid}/{len(self.tokens)} tokens valid, budget {self.budget},"
            f" {len(self.blocks)} blocks, {len(self.leases)} leases>"
        )
