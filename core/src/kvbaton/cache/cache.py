"""The cache: sequences over a pool of blocks, with prefix reuse, leases, import and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbaton.cache.leases import Lease
from kvbaton.cache.pool import BlockPool
from kvbaton.cache.prefix import PrefixNames
from kvbaton.cache.sequences import KVSequence, SequenceState
from kvbaton.cache.slots import SlotPool
from kvbaton.errors import CacheError


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """What the books say.  Blocks are counted over all planes; ``free + used + leased + prefix == total`` always.

    ``leased``: held by leases alone, their owners gone.  ``under_lease``: all that a lease covers, owned or not.
    ``prefix``: held by nobody, kept for their content.  ``promised``: what live sequences may still take within their
    budgets.  ``sequences``: not freed yet, of which ``preempted``.
    """

    total: int
    free: int
    used: int
    leased: int
    prefix: int
    under_lease: int
    promised: int
    sequences: int
    preempted: int
    slots_total: int
    slots_free: int


class KVCache:
    """``planes`` planes of ``blocks`` blocks of ``block_tokens`` tokens each, and ``slots`` final payload slots.

    All planes of a sequence are equally long, so a block is taken and given back in every plane at once; its id
    differs from plane to plane, so that mixing up two planes' tables cannot go unnoticed.

    ``identity``: cached KV is shared only under an equal one.  ``prefix_caching`` False: nothing is shared.
    """

    def __init__(
        self,
        *,
        blocks: int,
        block_tokens: int,
        planes: int = 1,
        slots: int = 0,
        identity: bytes = b"",
        prefix_caching: bool = True,
    ) -> None:
        if block_tokens < 1 or planes < 1:
            raise CacheError(f"block_tokens and planes must be at least 1, not {block_tokens} and {planes}")
        self.pool = BlockPool(blocks)
        self.slots = SlotPool(slots)
        self.block_tokens = block_tokens
        self.planes = planes
        self.prefix_caching = prefix_caching
        self._names = PrefixNames(identity, block_tokens)
        self._shift = [plane * blocks // planes for plane in range(planes)]
        self._sequences: set[KVSequence] = set()
        self._leases: set[Lease] = set()

    def blocks_for(self, tokens: int) -> int:
        """Blocks, in each plane, that ``tokens`` tokens need."""
        return -(-tokens // self.block_tokens)

    # -- a sequence's life ---------------------------------------------------------------------------------------------

    def open(self, tokens: Sequence[int], budget: int, *, reuse: int | None = None) -> KVSequence | None:
        """A sequence with blocks for all of ``tokens``, to be computed here.  None: no space, nothing changed.

        Its ``valid`` leading tokens, at most ``reuse`` (default: all), were found in the cache: whole blocks, shared.
        """
        return self._open(tokens, budget, reuse, SequenceState.OPEN)

    def open_import(self, tokens: Sequence[int], budget: int, *, reuse: int | None = None) -> KVSequence | None:
        """Like :meth:`open`, but KV past the prefix comes from elsewhere: :meth:`complete_import` makes it valid.

        Until then the tables are frozen (C2.2) and nothing new is published.
        """
        return self._open(tokens, budget, reuse, SequenceState.IMPORTING)

    def append(self, sequence: KVSequence, tokens: Sequence[int]) -> None:
        """Add tokens whose KV is not there yet; takes no block.  Raises :class:`CacheError` past the budget."""
        self._expect(sequence, "append", SequenceState.OPEN, SequenceState.PREEMPTED)
        if len(sequence.tokens) + len(tokens) > sequence.budget:
            raise CacheError(
                f"C8.4: {len(tokens)} tokens more than the {len(sequence.tokens)} there are exceed the budget of"
                f" {sequence.budget}; it is fixed when the sequence is opened", budget=sequence.budget,
            )  # fmt: skip
        sequence.tokens.extend(tokens)

    def ensure(self, sequence: KVSequence, tokens: int) -> bool:
        """Blocks for the first ``tokens`` tokens.  False: no space, nothing changed; preempt one and ask again."""
        self._expect(sequence, "ensure", SequenceState.OPEN)
        if tokens > sequence.budget:
            raise CacheError(f"C8.4: {tokens} tokens exceed the budget of {sequence.budget}", budget=sequence.budget)
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        taken = self.pool.take(missing)
        if taken is None:
            return False
        self._attach(sequence, taken)
        return True

    def advance(self, sequence: KVSequence, valid: int) -> None:
        """KV of the first ``valid`` tokens is in place, never to be written again.  Full blocks become shareable, each
        once.
        """
        self._expect(sequence, "advance", SequenceState.OPEN)
        self._validate(sequence, valid)

    def trim(self, sequence: KVSequence, tokens: int) -> None:
        """Give back the blocks past those of the first ``tokens`` tokens: what was computed ahead in them is void.

        Raises :class:`CacheError` where that would take valid tokens away.  Leased blocks follow at the end of their
        last lease (C8.1).
        """
        self._expect(sequence, "trim", SequenceState.OPEN)
        if tokens < sequence.valid:
            raise CacheError(f"C3.1: {sequence!r} cannot be cut to {tokens} tokens: more are valid", tokens=tokens)
        kept = self.blocks_for(tokens)
        for block in reversed(sequence.blocks[kept:]):
            self.pool.disown(block)
        del sequence.blocks[kept:]
        for table in sequence.tables:
            del table[kept:]

    def complete_import(self, sequence: KVSequence, valid: int) -> None:
        """Everything up to ``valid`` has arrived: only now is it valid and shareable (C3.1, C8.3)."""
        self._expect(sequence, "complete_import", SequenceState.IMPORTING)
        self._validate(sequence, valid)
        sequence.state = SequenceState.OPEN

    def preempt(self, sequence: KVSequence) -> None:
        """Take the blocks away; tokens and budget stay.  Refused while a lease lives (C8.2) or it is imported."""
        self._expect(sequence, "preempt", SequenceState.OPEN)
        if sequence.leases:
            raise CacheError("C8.2: a sequence with a live lease is never preempted", leases=len(sequence.leases))
        self._detach(sequence)
        sequence.state = SequenceState.PREEMPTED

    def resume(self, sequence: KVSequence, *, reuse: int | None = None) -> bool:
        """Blocks again for all tokens; the ``valid`` ones need not be recomputed.  False: no space, nothing changed."""
        self._expect(sequence, "resume", SequenceState.PREEMPTED)
        if not self._place(sequence, reuse):
            return False
        sequence.state = SequenceState.OPEN
        return True

    def free(self, sequence: KVSequence) -> None:
        """The owner is done, in whatever state.  Leased blocks follow at the end of their last lease (C8.1)."""
        self._expect(sequence, "free", SequenceState.OPEN, SequenceState.IMPORTING, SequenceState.PREEMPTED)
        self._detach(sequence)
        sequence.state = SequenceState.FREED
        self._sequences.remove(sequence)

    # -- leases --------------------------------------------------------------------------------------------------------

    def lease(self, sequence: KVSequence) -> Lease:
        """Hold every block of ``sequence``, also those it gets later, until the lease is ended."""
        self._expect(sequence, "lease", SequenceState.OPEN, SequenceState.IMPORTING)
        lease = Lease(self, sequence)
        for block in sequence.blocks:
            self.pool.lease(block)
        lease.blocks.extend(sequence.blocks)
        sequence.leases.append(lease)
        self._leases.add(lease)
        return lease

    def end_lease(self, lease: Lease) -> None:
        """What :meth:`Lease.end` does."""
        if lease not in self._leases:
            raise CacheError("C8.1: this lease has ended already, or belongs to another cache")
        self._leases.remove(lease)
        lease.live = False
        lease.sequence.leases.remove(lease)
        # Tail first, as in _detach.
        for block in reversed(lease.blocks):
            self.pool.unlease(block)
        lease.blocks.clear()

    # -- figures -------------------------------------------------------------------------------------------------------

    @property
    def available(self) -> int:
        """Blocks of each plane that could be taken now, cached ones included."""
        return self.pool.available

    def match(self, tokens: Sequence[int], limit: int | None = None) -> int:
        """How many leading tokens, at most ``limit``, a sequence opened now would find."""
        return len(self._find(tokens, [], limit)) * self.block_tokens

    def drop_prefix(self) -> int:
        """Forget all cached content that nobody holds; how many blocks, over all planes, that freed."""
        return self.pool.drop_cached() * self.planes

    def statistics(self) -> CacheStatistics:
        pool, planes = self.pool, self.planes
        return CacheStatistics(
            total=pool.blocks * planes,
            free=pool.free * planes,
            used=pool.used * planes,
            leased=pool.deferred * planes,
            prefix=pool.cached * planes,
            under_lease=len({block for lease in self._leases for block in lease.blocks}) * planes,
            promised=sum(self.blocks_for(s.budget) - len(s.blocks) for s in self._sequences) * planes,
            sequences=len(self._sequences),
            preempted=sum(s.state is SequenceState.PREEMPTED for s in self._sequences),
            slots_total=self.slots.slots,
            slots_free=self.slots.free,
        )

    def check(self) -> None:
        """Count everything anew; raise :class:`CacheError` where the books differ from the truth (C8)."""
        self.pool.check(
            (block for sequence in self._sequences for block in sequence.blocks),
            (block for lease in self._leases for block in lease.blocks),
        )
        self.slots.check()
        for s in self._sequences:
            if not (s.valid <= len(s.tokens) <= s.budget and s.valid <= len(s.blocks) * self.block_tokens):
                raise CacheError(f"C8.4: impossible sequence {s!r}")
            if s.published > s.valid // self.block_tokens:
                raise CacheError(f"C3.1: {s!r} published {s.published} blocks")
            if self.blocks_for(s.budget) < len(s.blocks):
                raise CacheError(f"C8.4: more blocks than the budget allows: {s!r}")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _expect(self, sequence: KVSequence, operation: str, *states: SequenceState) -> None:
        if sequence not in self._sequences:
            raise CacheError(f"{operation}: {sequence!r} is freed or belongs to another cache")
        if sequence.state not in states:
            wanted = " or ".join(state.value for state in states)
            raise CacheError(f"{operation}: {sequence!r} must be {wanted}", state=sequence.state)

    def _open(self, tokens: Sequence[int], budget: int, reuse: int | None, state: SequenceState) -> KVSequence | None:
        if not tokens or len(tokens) > budget:
            raise CacheError(f"a sequence needs 1 to {budget} tokens (its budget), not {len(tokens)}", budget=budget)
        sequence = KVSequence(tokens, budget, self.planes, state)
        if not self._place(sequence, reuse):
            return None
        self._sequences.add(sequence)
        return sequence

    def _find(self, tokens: Sequence[int], names: list[bytes], limit: int | None) -> list[int]:
        """The blocks that hold the leading tokens already, at most ``limit`` of them.  Adds to ``names``."""
        found: list[int] = []
        if self.prefix_caching:
            most = len(tokens) if limit is None else min(limit, len(tokens))
            for count in range(1, most // self.block_tokens + 1):
                self._names.extend(names, tokens, count)
                block = self.pool.find(names[count - 1])
                if block is None:
                    break
                found.append(block)
        return found

    def _place(self, sequence: KVSequence, reuse: int | None) -> bool:
        """Give a sequence without blocks what it needs for all its tokens; all or nothing."""
        shared = self._find(sequence.tokens, sequence.names, reuse)
        fresh = self.blocks_for(len(sequence.tokens)) - len(shared)
        # What is shared must not be evicted to make room for the rest.
        if fresh > self.pool.available - sum(self.pool.is_cached(block) for block in shared):
            return False
        for block in shared:
            self.pool.own(block)
        self._attach(sequence, shared)
        self._attach(sequence, self.pool.take(fresh) or [])
        sequence.published = len(shared)
        sequence.valid = len(shared) * self.block_tokens
        return True

    def _attach(self, sequence: KVSequence, blocks: list[int]) -> None:
        sequence.blocks.extend(blocks)
        total = self.pool.blocks
        for table, shift in zip(sequence.tables, self._shift, strict=True):
            table.extend([(block + shift) % total for block in blocks])
        for lease in sequence.leases:
            for block in blocks:
                self.pool.lease(block)
            lease.blocks.extend(blocks)

    def _detach(self, sequence: KVSequence) -> None:
        # Tail first: of one history the end is evicted before the beginning, which alone is worth nothing without it.
        for block in reversed(sequence.blocks):
            self.pool.disown(block)
        sequence.blocks.clear()
        # New lists: whoever was shown the old ones keeps what it saw.
        sequence.tables = tuple([] for _ in range(self.planes))
        sequence.valid = sequence.published = 0

    def _validate(self, sequence: KVSequence, valid: int) -> None:
        held = len(sequence.blocks) * self.block_tokens
        if not sequence.valid <= valid <= min(len(sequence.tokens), held):
            raise CacheError(f"C3.1: {valid} tokens cannot be valid in {sequence!r}", valid=valid)
        sequence.valid = valid
        if self.prefix_caching:
            full = valid // self.block_tokens
            self._names.extend(sequence.names, sequence.tokens, full)
            for index in range(sequence.published, full):
                self.pool.publish(sequence.blocks[index], sequence.names[index])
            sequence.published = full
