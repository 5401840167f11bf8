"""The cache in single steps: each clause by itself, misuse, sizes, and what a caller can rely on."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest

from kvbaton.cache import BlockPool, KVCache, KVSequence, SequenceState, SlotPool
from kvbaton.errors import CacheError


def make(blocks: int = 8, block_tokens: int = 4, **options: object) -> KVCache:
    return KVCache(blocks=blocks, block_tokens=block_tokens, **options)  # type: ignore[arg-type]


def computed(cache: KVCache, tokens: list[int], budget: int | None = None) -> KVSequence:
    sequence = cache.open(tokens, budget or len(tokens))
    assert sequence is not None
    cache.advance(sequence, len(tokens))
    return sequence


@pytest.mark.clause("C8.1")
def test_freed_blocks_stay_until_the_last_lease_ends_and_then_go_once() -> None:
    cache = make()
    sequence = cache.open([1, 2, 3, 4, 5], 8)
    assert sequence is not None
    first, second = cache.lease(sequence), cache.lease(sequence)
    held = set(sequence.blocks)
    cache.free(sequence)
    first.end()
    statistics = cache.statistics()
    assert (statistics.leased, statistics.used, statistics.free) == (2, 0, 6)
    other = cache.open(list(range(24)), 24)
    assert other is not None
    assert not held & set(other.blocks)
    assert cache.open([9], 1) is None
    second.end()
    assert cache.statistics().free == 2
    with pytest.raises(CacheError, match=r"C8\.1"):
        second.end()
    assert cache.statistics().free == 2
    cache.check()


@pytest.mark.clause("C8.1")
def test_a_lease_covers_blocks_that_the_sequence_gets_later() -> None:
    cache = make()
    sequence = cache.open([1, 2], 16)
    assert sequence is not None
    lease = cache.lease(sequence)
    cache.append(sequence, [3] * 10)
    assert cache.ensure(sequence, 12)
    assert cache.statistics().under_lease == 3
    cache.free(sequence)
    assert cache.statistics().leased == 3
    lease.end()
    assert cache.statistics().free == 8


@pytest.mark.clause("C8.2", "C8.3")
def test_neither_a_leased_nor_an_importing_sequence_is_preempted() -> None:
    cache = make()
    sequence = cache.open_import([1, 2, 3, 4, 5], 8)
    assert sequence is not None
    with pytest.raises(CacheError, match="importing"):
        cache.preempt(sequence)
    lease = cache.lease(sequence)
    cache.complete_import(sequence, 5)
    with pytest.raises(CacheError, match=r"C8\.2"):
        cache.preempt(sequence)
    lease.end()
    cache.preempt(sequence)
    assert sequence.state is SequenceState.PREEMPTED
    assert cache.statistics().used == 0


@pytest.mark.clause("C3.1", "C8.4")
def test_an_import_publishes_nothing_before_it_is_complete() -> None:
    cache = make()
    prompt = list(range(9))
    sequence = cache.open_import(prompt, 16)
    assert sequence is not None
    assert cache.match(prompt) == 0
    with pytest.raises(CacheError):
        cache.advance(sequence, 4)
    with pytest.raises(CacheError):
        cache.ensure(sequence, 16)
    cache.complete_import(sequence, 9)
    assert cache.match(prompt) == 8
    with pytest.raises(CacheError):
        cache.complete_import(sequence, 9)
    # Cancelled before it arrived: nothing of it can be found.
    cancelled = cache.open_import([7] * 8, 8)
    assert cancelled is not None
    cache.free(cancelled)
    assert cache.match([7] * 8) == 0


@pytest.mark.clause("C8.4")
def test_budget_and_shared_prefix_survive_preemption_and_resumption() -> None:
    cache = make()
    prompt = list(range(8))
    keeper, victim = computed(cache, prompt, 12), cache.open(prompt, 12)
    assert victim is not None
    assert victim.valid == 8
    cache.append(victim, [50, 51])
    cache.preempt(victim)
    cache.append(victim, [52])
    assert cache.resume(victim)
    assert victim.valid == 8
    assert victim.tokens == [*prompt, 50, 51, 52]
    assert victim.budget == 12
    with pytest.raises(CacheError, match=r"C8\.4"):
        cache.append(victim, [53, 54])
    cache.free(victim)
    cache.free(keeper)
    cache.check()
    after = cache.statistics()
    assert (after.used, after.leased, after.prefix, after.free, after.promised) == (0, 0, 2, 6, 0)


def test_only_equal_history_under_an_equal_model_is_shared() -> None:
    cache, other = make(identity=b"a"), make(identity=b"b")
    computed(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8]) == 8
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 9]) == 4
    assert cache.match([5, 6, 7, 8]) == 0
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8], limit=7) == 4
    sequence = computed(cache, [1, 2, 3, 4])
    name = sequence.names[0]
    assert cache.pool.find(name) is not None
    assert other.pool.find(name) is None
    foreign = computed(other, [1, 2, 3, 4])
    assert foreign.names[0] != name


def test_cached_content_is_evicted_oldest_first_and_from_its_end() -> None:
    cache = make(blocks=4)
    old, new = computed(cache, [1] * 8), computed(cache, [2] * 8)
    cache.free(old)
    cache.free(new)
    assert cache.statistics().prefix == 4
    assert cache.open([3], 1) is not None
    assert (cache.match([1] * 8), cache.match([2] * 8)) == (4, 8)


def test_making_room_never_evicts_what_is_about_to_be_shared() -> None:
    cache = make(blocks=4)
    cache.free(computed(cache, [1] * 8))
    assert cache.open([1] * 8 + [2] * 9, 17) is None
    assert cache.match([1] * 8) == 8
    sequence = cache.open([1] * 8 + [2] * 8, 16)
    assert sequence is not None
    assert sequence.valid == 8


def test_without_prefix_caching_nothing_is_kept() -> None:
    cache = make(prefix_caching=False)
    cache.free(computed(cache, [1] * 8))
    assert cache.match([1] * 8) == 0
    assert cache.statistics().free == 8


def test_planes_have_tables_of_their_own_and_all_their_blocks_count() -> None:
    cache = make(blocks=6, planes=3)
    sequence = cache.open([1] * 9, 12)
    assert sequence is not None
    assert len({tuple(table) for table in sequence.tables}) == 3
    assert all(len(set(table)) == 3 and all(0 <= b < 6 for b in table) for table in sequence.tables)
    statistics = cache.statistics()
    assert (statistics.total, statistics.used, statistics.free) == (18, 9, 9)
    other = cache.open([2] * 9, 12)
    assert other is not None
    for ours, theirs in zip(sequence.tables, other.tables, strict=True):
        assert sorted([*ours, *theirs]) == list(range(6))


def test_arrays_are_a_copy_that_keeps_what_was_true() -> None:
    cache = make()
    sequence = cache.open([1] * 5, 12)
    assert sequence is not None
    (before,) = sequence.arrays()
    cache.append(sequence, [1] * 7)
    assert cache.ensure(sequence, 12)
    assert before.tolist() == sequence.tables[0][:2]


def test_a_sequence_that_nobody_shares_gets_neighbouring_blocks_back_in_order() -> None:
    cache = make()
    first = cache.open([1] * 16, 16)
    assert first is not None
    assert first.blocks == [0, 1, 2, 3]
    cache.free(first)
    second = cache.open([2] * 12, 12)
    assert second is not None
    assert second.blocks == [0, 1, 2]


@pytest.mark.parametrize(
    ("tokens", "budget"), [([], 4), ([1, 2, 3], 2)], ids=["no tokens", "more tokens than the budget"]
)
def test_impossible_sequences_are_refused(tokens: list[int], budget: int) -> None:
    with pytest.raises(CacheError):
        make().open(tokens, budget)


def test_misuse_changes_nothing() -> None:
    cache, other = make(), make()
    sequence = cache.open([1] * 5, 8)
    assert sequence is not None
    before = cache.statistics()
    for attempt in (
        lambda: other.free(sequence),
        lambda: cache.advance(sequence, 6),
        lambda: cache.ensure(sequence, 9),
        lambda: cache.append(sequence, [1] * 4),
        lambda: cache.resume(sequence),
        lambda: cache.complete_import(sequence, 5),
        lambda: cache.slots.give(0),
        lambda: KVCache(blocks=0, block_tokens=4),
        lambda: KVCache(blocks=4, block_tokens=0),
        lambda: SlotPool(-1),
    ):
        with pytest.raises(CacheError):
            attempt()
    cache.advance(sequence, 5)
    with pytest.raises(CacheError):
        cache.advance(sequence, 4)
    assert cache.statistics() == before
    cache.check()


def test_the_pool_refuses_what_would_break_its_books() -> None:
    pool = BlockPool(2)
    for attempt in (pool.own, pool.disown, pool.lease, pool.unlease):
        with pytest.raises(CacheError):
            attempt(0)
    with pytest.raises(CacheError):
        pool.publish(0, b"name")
    assert pool.take(2) == [0, 1]
    assert pool.take(1) is None
    assert pool.publish(0, b"name")
    assert not pool.publish(1, b"name")
    with pytest.raises(CacheError):
        pool.publish(0, b"another")


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._owners.__setitem__(0, 2),
        lambda pool: pool._leases.__setitem__(0, 1),
        lambda pool: setattr(pool, "_used", 0),
        lambda pool: setattr(pool, "_deferred", 1),
        lambda pool: pool._named.clear(),
        lambda pool: pool._named.__setitem__(b"x", 5),
        lambda pool: pool._cached.__setitem__(7, None),
    ],
    ids=["lost", "free twice", "owned by two", "leased", "used", "deferred", "names lost", "named", "cached"],
)  # fmt: skip
def test_check_finds_damaged_books(damage: Callable[[BlockPool], object]) -> None:
    cache = make()
    computed(cache, [1] * 5)
    cache.check()
    damage(cache.pool)
    with pytest.raises(CacheError, match="C8"):
        cache.check()


def test_a_block_operation_costs_the_same_in_a_large_pool() -> None:
    """Counts executed lines rather than time."""

    def lines(blocks: int) -> int:
        cache = make(blocks=blocks)
        for start in range(0, blocks - 4, 4):
            cache.free(computed(cache, [start] * 16))
        count = 0

        def trace(frame: object, event: str, argument: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        gc.disable()  # what others left behind would be finalised in between, and counted
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            sequence = cache.open([-1] * 16, 20)
            assert sequence is not None
            lease = cache.lease(sequence)
            cache.advance(sequence, 16)
            cache.append(sequence, [1] * 4)
            cache.ensure(sequence, 20)
            cache.free(sequence)
            lease.end()
        finally:
            sys.settrace(None)
            gc.enable()
        return count

    assert lines(64) == lines(4096)
