"""Random lives of many sequences against a perfect model: who holds which block, what is in it, what can be found (C8).

The model keeps, per block, its holders and its content as plain tokens, and predicts everything the cache may decide:
whether there is space, which prefix is found, which cached block goes first.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbaton.cache import KVCache, KVSequence, Lease, SequenceState
from kvbaton.errors import CacheError

BLOCK = 2


@dataclass
class Twin:
    """What the model knows of one sequence."""

    real: KVSequence
    tokens: list[int]
    budget: int
    state: SequenceState
    blocks: list[int] = field(default_factory=list)
    valid: int = 0
    leases: int = 0


@dataclass
class TwinLease:
    real: Lease
    twin: Twin
    blocks: list[int]


tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)


class CacheMachine(RuleBasedStateMachine):
    planes = 1
    total = 12

    @initialize(total=st.integers(3, 12), planes=st.integers(1, 3))
    def start(self, total: int, planes: int) -> None:
        self.total, self.planes = total, planes
        self.cache = KVCache(blocks=total, block_tokens=BLOCK, planes=planes, slots=2, identity=b"model")
        self.twins: list[Twin] = []
        self.leases: list[TwinLease] = []
        self.slots: list[int] = []
        #: Published content, by the whole history that it ends: where it is.
        self.content: dict[tuple[int, ...], int] = {}
        #: Published and held by nobody, the next to be evicted first.
        self.cached: list[int] = []

    # -- the model's own view ------------------------------------------------------------------------------------------

    def owners(self) -> Counter[int]:
        return Counter(block for twin in self.twins for block in twin.blocks)

    def leased(self) -> Counter[int]:
        return Counter(block for lease in self.leases for block in lease.blocks)

    def held(self) -> set[int]:
        return {*self.owners(), *self.leased()}

    def free_count(self) -> int:
        return self.total - len(self.held()) - len(self.cached)

    def hits(self, tokens: list[int], reuse: int | None) -> list[int]:
        most = len(tokens) if reuse is None else min(reuse, len(tokens))
        found = []
        for end in range(BLOCK, most + 1, BLOCK):
            block = self.content.get(tuple(tokens[:end]))
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, tokens: list[int], shared: list[int]) -> bool:
        fresh = -(-len(tokens) // BLOCK) - len(shared)
        return fresh <= self.free_count() + len(set(self.cached) - set(shared))

    def give(self, twin: Twin, shared: list[int]) -> None:
        """The cache gave ``twin`` blocks: the shared ones first, the rest free ones or the oldest cached."""
        new = twin.real.blocks[len(twin.blocks) :]
        assert new[: len(shared)] == shared
        fresh = new[len(shared) :]
        evicted = max(0, len(fresh) - self.free_count())  # before, since what is shared and was cached is not free
        self.cached = [block for block in self.cached if block not in shared]
        gone, self.cached = self.cached[:evicted], self.cached[evicted:]
        self.content = {history: block for history, block in self.content.items() if block not in gone}
        assert len(set(fresh)) == len(fresh)
        assert not set(fresh) & (self.held() | set(self.cached) | set(shared)), "a block was given out that is held"
        twin.blocks.extend(new)
        for lease in self.leases:
            if lease.twin is twin:
                lease.blocks.extend(new)

    def unhold(self, blocks: list[int]) -> None:
        """After a holder let go of ``blocks``: what nobody holds and has content is cached, in this order."""
        held, published = self.held(), set(self.content.values())
        for block in blocks:
            if block not in held and block in published and block not in self.cached:
                self.cached.append(block)

    def publish(self, twin: Twin, before: int) -> None:
        """Each block is offered once, when it becomes valid; if its content was cached then and is forgotten later, the
        block that was not needed is not offered again.
        """
        for end in range((before // BLOCK + 1) * BLOCK, twin.valid + 1, BLOCK):
            self.content.setdefault(tuple(twin.tokens[:end]), twin.blocks[end // BLOCK - 1])

    def pick(self, index: int, *states: SequenceState) -> Twin | None:
        chosen = [twin for twin in self.twins if twin.state in states]
        return chosen[index % len(chosen)] if chosen else None

    # -- rules ---------------------------------------------------------------------------------------------------------

    @rule(tokens=tokens, growth=st.integers(0, 6), reuse=st.none() | st.integers(0, 9), importing=st.booleans())
    def open(self, tokens: list[int], growth: int, reuse: int | None, importing: bool) -> None:
        shared = self.hits(tokens, reuse)
        assert self.cache.match(tokens, reuse) == len(shared) * BLOCK
        open_one = self.cache.open_import if importing else self.cache.open
        real = open_one(tokens, len(tokens) + growth, reuse=reuse)
        assert (real is not None) == self.fits(tokens, shared)
        if real is not None:
            state = SequenceState.IMPORTING if importing else SequenceState.OPEN
            twin = Twin(real, list(tokens), len(tokens) + growth, state, valid=len(shared) * BLOCK)
            self.give(twin, shared)
            self.twins.append(twin)

    @rule(index=st.integers(0, 9), more=st.lists(st.integers(0, 1), max_size=3))
    def append(self, index: int, more: list[int]) -> None:
        if twin := self.pick(index, SequenceState.OPEN, SequenceState.PREEMPTED):
            if len(twin.tokens) + len(more) > twin.budget:
                with pytest.raises(CacheError, match=r"C8\.4"):
                    self.cache.append(twin.real, more)
            else:
                self.cache.append(twin.real, more)
                twin.tokens.extend(more)

    @rule(index=st.integers(0, 9), ahead=st.integers(0, 5))
    def ensure(self, index: int, ahead: int) -> None:
        if twin := self.pick(index, SequenceState.OPEN):
            tokens = min(len(twin.tokens) + ahead, twin.budget)
            missing = max(0, -(-tokens // BLOCK) - len(twin.blocks))
            possible = missing <= self.free_count() + len(self.cached)
            assert self.cache.ensure(twin.real, tokens) == possible
            if possible:
                self.give(twin, [])

    @rule(index=st.integers(0, 9), part=st.floats(0, 1))
    def trim(self, index: int, part: float) -> None:
        if twin := self.pick(index, SequenceState.OPEN):
            tokens = twin.valid + int(part * (twin.budget - twin.valid))
            if twin.valid:
                with pytest.raises(CacheError, match=r"C3\.1"):
                    self.cache.trim(twin.real, twin.valid - 1)
            self.cache.trim(twin.real, tokens)
            kept = -(-tokens // BLOCK)
            gone, twin.blocks = twin.blocks[kept:], twin.blocks[:kept]
            self.unhold(gone[::-1])

    @rule(index=st.integers(0, 9), part=st.floats(0, 1))
    def advance(self, index: int, part: float) -> None:
        if twin := self.pick(index, SequenceState.OPEN):
            room, before = min(len(twin.tokens), len(twin.blocks) * BLOCK), twin.valid
            twin.valid += int(part * (room - twin.valid))
            self.cache.advance(twin.real, twin.valid)
            self.publish(twin, before)

    @rule(index=st.integers(0, 9))
    def complete_import(self, index: int) -> None:
        if twin := self.pick(index, SequenceState.IMPORTING):
            before, twin.valid, twin.state = twin.valid, len(twin.tokens), SequenceState.OPEN
            self.cache.complete_import(twin.real, twin.valid)
            self.publish(twin, before)

    @rule(index=st.integers(0, 9))
    def preempt(self, index: int) -> None:
        if twin := self.pick(index, SequenceState.OPEN):
            if twin.leases:
                with pytest.raises(CacheError, match=r"C8\.2"):
                    self.cache.preempt(twin.real)
                return
            self.cache.preempt(twin.real)
            self.let_go(twin)
            twin.state = SequenceState.PREEMPTED

    @rule(index=st.integers(0, 9), reuse=st.none() | st.integers(0, 9))
    def resume(self, index: int, reuse: int | None) -> None:
        if twin := self.pick(index, SequenceState.PREEMPTED):
            shared = self.hits(twin.tokens, reuse)
            possible = self.fits(twin.tokens, shared)
            assert self.cache.resume(twin.real, reuse=reuse) == possible
            if possible:
                self.give(twin, shared)
                twin.valid, twin.state = len(shared) * BLOCK, SequenceState.OPEN

    @rule(index=st.integers(0, 9))
    def free(self, index: int) -> None:
        if self.twins:
            twin = self.twins[index % len(self.twins)]
            self.cache.free(twin.real)
            with pytest.raises(CacheError):
                self.cache.free(twin.real)
            self.twins.remove(twin)
            self.let_go(twin)

    @rule(index=st.integers(0, 9))
    def lease(self, index: int) -> None:
        if twin := self.pick(index, SequenceState.OPEN, SequenceState.IMPORTING):
            self.leases.append(TwinLease(self.cache.lease(twin.real), twin, list(twin.blocks)))
            twin.leases += 1

    @precondition(lambda self: self.leases)
    @rule(index=st.integers(0, 9))
    def end_lease(self, index: int) -> None:
        lease = self.leases.pop(index % len(self.leases))
        lease.real.end()
        with pytest.raises(CacheError, match=r"C8\.1"):
            lease.real.end()
        lease.twin.leases -= 1
        self.unhold(lease.blocks[::-1])

    @rule()
    def take_slot(self) -> None:
        slot = self.cache.slots.take()
        assert (slot is None) == (len(self.slots) == 2)
        if slot is not None:
            assert slot not in self.slots
            self.slots.append(slot)

    @precondition(lambda self: self.slots)
    @rule()
    def give_slot(self) -> None:
        slot = self.slots.pop(0)
        self.cache.slots.give(slot)
        with pytest.raises(CacheError):
            self.cache.slots.give(slot)

    @rule()
    def drop_prefix(self) -> None:
        assert self.cache.drop_prefix() == len(self.cached) * self.planes
        self.content = {history: block for history, block in self.content.items() if block not in self.cached}
        self.cached = []

    def let_go(self, twin: Twin) -> None:
        blocks, twin.blocks, twin.valid = twin.blocks, [], 0
        self.unhold(blocks[::-1])

    # -- what always holds ---------------------------------------------------------------------------------------------

    @invariant()
    def books_are_exact(self) -> None:
        self.cache.check()
        statistics = self.cache.statistics()
        owners, leased = set(self.owners()), set(self.leased())
        assert statistics.total == self.total * self.planes
        assert statistics.used == len(owners) * self.planes
        assert statistics.leased == len(leased - owners) * self.planes
        assert statistics.under_lease == len(leased) * self.planes
        assert statistics.prefix == len(self.cached) * self.planes
        assert statistics.free == self.free_count() * self.planes
        assert statistics.free + statistics.used + statistics.leased + statistics.prefix == statistics.total
        assert statistics.sequences == len(self.twins)
        assert statistics.slots_free == 2 - len(self.slots)

    @invariant()
    def sequences_agree(self) -> None:
        for twin in self.twins:
            real = twin.real
            assert (real.tokens, real.valid, real.budget, real.state) == (
                twin.tokens, twin.valid, twin.budget, twin.state
            )  # fmt: skip
            assert real.blocks == twin.blocks
            assert real.leased == bool(twin.leases)
            assert [list(table) for table in real.tables] == [
                [(block + plane * self.total // self.planes) % self.total for block in twin.blocks]
                for plane in range(self.planes)
            ]

    def teardown(self) -> None:
        """Whatever the order of the ends, the pool balances exactly."""
        if not hasattr(self, "cache"):
            return
        for twin in self.twins[::2] + self.twins[1::2]:
            self.cache.free(twin.real)
        for lease in self.leases:
            lease.real.end()
        for slot in self.slots:
            self.cache.slots.give(slot)
        self.cache.check()
        after = self.cache.statistics()
        assert (after.used, after.leased, after.under_lease, after.promised, after.sequences) == (0, 0, 0, 0, 0)
        assert after.prefix == len(self.content) * self.planes
        assert after.free + after.prefix == after.total
        assert self.cache.drop_prefix() == after.prefix
        assert self.cache.statistics().free == after.total
        assert self.cache.slots.free == 2


@pytest.mark.clause("C8.1", "C8.2", "C8.4", "C3.1")
class TestCacheMachine(CacheMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(
        max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


@pytest.mark.clause("C3.1")
def test_what_is_shared_makes_no_room_for_the_rest() -> None:
    """All is cached: the prefix that is found is taken from there, and the rest evicts the oldest of what remains."""
    machine = CacheMachine()
    machine.start(total=3, planes=1)
    machine.open(tokens=[0] * 6, growth=0, reuse=None, importing=True)
    machine.complete_import(index=0)
    machine.free(index=0)
    machine.open(tokens=[0] * 3, growth=0, reuse=None, importing=False)
    machine.books_are_exact()
    machine.sequences_agree()
    machine.teardown()
