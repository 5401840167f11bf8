"""A logical paged KV cache for engines that have none of their own: who owns which block, and nothing about tensors.

:class:`KVCache` hands out blocks to :class:`KVSequence` objects, shares full blocks with equal token history, keeps
:class:`Lease` d blocks from being freed or preempted, and can prove at any moment that no block is lost (C8).

Threading: one thread, the engine's.  Nothing here blocks; lack of space is a return value, misuse a
:class:`~kvbaton.errors.CacheError` that changes nothing.
"""

from kvbaton.cache.cache import CacheStatistics, KVCache
from kvbaton.cache.leases import Lease
from kvbaton.cache.pool import BlockPool
from kvbaton.cache.sequences import KVSequence, SequenceState
from kvbaton.cache.slots import SlotPool

__all__ = ["BlockPool", "CacheStatistics", "KVCache", "KVSequence", "Lease", "SequenceState", "SlotPool"]
