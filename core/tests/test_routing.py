"""Prefix-aware routing: what it learns, forgets and prefers, and the bound on what it may prefer."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import settings as budget
from hypothesis import strategies as st

from kvbaton.hooks import Hooks, StageLoad
from kvbaton.identity import PeerId
from kvbaton.records import RequestRecord
from kvbaton.routing import PATIENCE, TOKENS_PER_CALL, PrefixAware, policy
from kvbaton.settings import RoutingSettings

BLOCK = 4
PREFILLS, DECODES = ("prefill-0", "prefill-1"), ("decode-0", "decode-1")
ALL = tuple(itertools.product(PREFILLS, DECODES))


@dataclass
class Deployment:
    """A policy behind the hooks, and stages that hold whatever a test says."""

    imbalance: float = 0.5
    entries: int = 1000
    loads: dict[str, float] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.policy = PrefixAware(imbalance=self.imbalance, entries=self.entries)
        self.hooks = Hooks([self.policy])

    def stage(self, name: str) -> StageLoad:
        return StageLoad(name, 0, 99, 9, self.epochs.get(name, 1), self.loads.get(name, 0.0), BLOCK)

    def choose(self, key: str, prompt: tuple[int, ...], pairs: tuple[tuple[str, str], ...] = ALL) -> tuple[str, str]:
        prefill = [self.stage(name) for name in dict.fromkeys(p for p, _ in pairs)]
        decode = [self.stage(name) for name in dict.fromkeys(d for _, d in pairs)]
        chosen = self.hooks.choose_pair(key, prompt, prefill, decode, pairs)
        assert chosen is not None
        assert not self.hooks.failures
        return chosen

    def reached(self, key: str, stage: str, milestone: str, prefix: int = 0, epoch: int | None = None) -> None:
        peer = PeerId(stage, self.epochs.get(stage, 1) if epoch is None else epoch)
        self.hooks.tell(
            "kvbaton_milestone", transfer="0" * 32, request=key, stage=stage, milestone=milestone, at=0.0, peer=peer,
            prefix=prefix,
        )  # fmt: skip
        assert not self.hooks.failures

    def finish(self, key: str, prompt: tuple[int, ...], token_ids: tuple[int, ...] = (1,)) -> None:
        self.hooks.tell(
            "kvbaton_request_finished", record=RequestRecord(key, None, len(prompt), token_ids, (), "length")
        )
        assert not self.hooks.failures

    def serve(self, key: str, prompt: tuple[int, ...], found: tuple[int, int] = (0, 0), answer: int = 1) -> tuple:
        """A whole life; ``found``: what P and D turn out to hold."""
        p, d = self.choose(key, prompt)
        self.reached(key, d, "reserved", found[1])
        self.reached(key, p, "committed", found[0])
        self.reached(key, d, "activated")
        self.finish(key, prompt, tuple(range(1000, 1000 + answer)))
        return p, d

    def lose(self, name: str) -> None:
        self.hooks.tell("kvbaton_peer_lost", peer=PeerId(name, self.epochs.get(name, 1)), cause="a test")
        self.epochs[name] = self.epochs.get(name, 1) + 1


PROMPT = tuple(range(16))
LONGER = (*PROMPT, *range(50, 62))


def busy(**loads: float) -> dict[str, float]:
    return {name.replace("_", "-"): load for name, load in loads.items()}


def test_a_prompt_goes_where_its_beginning_was_imported_and_computed() -> None:
    it = Deployment(loads=busy(prefill_0=0.1, decode_0=0.1))
    assert it.serve("a", PROMPT) == ("prefill-1", "decode-1")
    it.loads = busy(prefill_1=0.2, decode_1=0.2)
    assert it.choose("b", LONGER) == ("prefill-1", "decode-1")
    assert it.choose("c", tuple(range(1, 17))) == ("prefill-0", "decode-0")
    assert it.policy.statistics()["decode_tokens_expected"] == it.policy.statistics()["prefill_tokens_expected"] == 16


@pytest.mark.clause("C3.1", "C8.3")
def test_nothing_is_expected_of_d_before_the_import() -> None:
    it = Deployment(loads=busy(decode_0=0.1))
    p, d = it.choose("a", PROMPT)
    assert (p, d) == ("prefill-0", "decode-1")
    it.loads = busy(prefill_0=0.1, decode_1=0.1)
    it.reached("a", d, "reserved")
    assert it.choose("b", PROMPT) == ("prefill-1", "decode-0")
    it.reached("a", p, "committed")
    assert it.choose("c", PROMPT) == ("prefill-0", "decode-0")
    it.reached("a", d, "received")
    assert it.choose("d", PROMPT) == ("prefill-0", "decode-0")
    it.reached("a", d, "activated")
    assert it.choose("e", PROMPT) == ("prefill-0", "decode-1")


def test_only_whole_blocks_with_the_same_history_count() -> None:
    it = Deployment()
    it.serve("a", PROMPT)
    it.loads = busy(decode_0=0.1, prefill_0=0.1)
    for other in (PROMPT[:3], (99, *PROMPT[1:]), (*range(40, 44), *PROMPT[4:])):
        assert it.choose("b", other) == ("prefill-1", "decode-1"), other
        it.finish("b", other)
    assert it.choose("b", (*PROMPT[:4], 99)) == ("prefill-0", "decode-0")


def test_what_was_generated_is_a_beginning_for_what_comes_next() -> None:
    it = Deployment()
    it.serve("a", PROMPT, answer=8)
    conversation = (*PROMPT, *range(1000, 1008), 5)
    it.loads = busy(decode_0=0.1)
    assert it.choose("b", conversation)[1] == "decode-0"
    assert it.policy.statistics()["decode_tokens_expected"] == 20  # the eighth has no KV yet


def test_a_recomputed_request_counts_its_delivered_tokens_once() -> None:
    it = Deployment()
    p, d = it.choose("a", PROMPT)
    again = (*PROMPT, 1000, 1001)
    assert it.choose("a", again) == (p, d)
    it.reached("a", d, "activated")
    it.finish("a", PROMPT, tuple(range(1000, 1005)))
    assert it.choose("b", (*PROMPT, *range(1000, 1004), 1))[1] == d
    assert it.policy.statistics()["decode_tokens_expected"] == 20


# -- the bound on imbalance --------------------------------------------------------------------------------------------


def test_a_hot_prefix_is_left_where_it_is_once_its_stages_are_fuller_than_the_bound_allows() -> None:
    it = Deployment(imbalance=0.3)
    it.serve("a", PROMPT)
    for load, expected in ((0.3, "decode-0"), (0.31, "decode-1")):
        it.loads = busy(decode_0=load)
        assert it.choose("b", PROMPT) == ("prefill-0", expected)


loads = st.fixed_dictionaries({name: st.floats(0, 1) for name in (*PREFILLS, *DECODES)})
some_pairs = st.sets(st.sampled_from(ALL), min_size=1).map(lambda chosen: tuple(sorted(chosen)))


@given(loads, some_pairs, st.floats(0, 2), st.integers(0, 2**32))
@budget(max_examples=200, deadline=None)
def test_the_choice_is_offered_and_within_the_bound(
    load: dict[str, float], pairs: tuple[tuple[str, str], ...], imbalance: float, seed: int
) -> None:
    it = Deployment(imbalance=imbalance)
    draw = random.Random(seed)
    for number in range(6):
        it.loads = {name: draw.random() for name in load}
        it.serve(str(number), tuple(draw.choice([0, 1]) for _ in range(12)))
    it.loads = load
    chosen = it.choose("x", tuple(draw.choice([0, 1]) for _ in range(12)), pairs)
    least = min(load[p] + load[d] for p, d in pairs)
    assert chosen in pairs
    assert load[chosen[0]] + load[chosen[1]] <= least + imbalance + 1e-6


@given(loads, some_pairs)
@budget(max_examples=200, deadline=None)
def test_where_nothing_is_shared_it_is_the_least_loaded_policy(
    load: dict[str, float], pairs: tuple[tuple[str, str], ...]
) -> None:
    it = Deployment()
    it.serve("a", PROMPT)
    it.loads = load
    assert it.choose("b", tuple(range(100, 120)), pairs) == min(pairs, key=lambda pair: load[pair[0]] + load[pair[1]])


# -- forgetting --------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C1.4")
def test_a_lost_stage_is_forgotten_and_its_next_life_begins_with_nothing() -> None:
    it = Deployment()
    it.serve("a", PROMPT)
    it.loads = busy(decode_0=0.1)
    _, d = it.choose("b", PROMPT)
    assert d == "decode-0"
    it.lose("decode-0")
    it.reached("b", d, "activated", epoch=1)  # said before the end, heard after it
    assert it.choose("c", PROMPT)[1] == "decode-1"
    it.reached("b", d, "activated", epoch=1)
    assert it.choose("d", PROMPT)[1] == "decode-1"
    assert {key for key in it.policy._stages if key[0] == "decode-0"} == {("decode-0", 2)}
    it.hooks.tell("kvbaton_peer_fenced", peer=PeerId("decode-0", 2))
    assert not any(key[0] == "decode-0" for key in it.policy._stages)


def test_what_a_stage_turned_out_not_to_hold_is_forgotten() -> None:
    it = Deployment()
    it.serve("a", PROMPT)
    it.loads = busy(decode_0=0.1)
    _, d = it.choose("b", PROMPT)
    it.reached("b", d, "reserved", prefix=4)
    it.finish("b", PROMPT)
    before = it.policy.statistics()["decode_tokens_expected"]
    assert it.choose("c", PROMPT)[1] == "decode-0"
    assert it.policy.statistics()["decode_tokens_expected"] - before == 4
    it.reached("c", d, "reserved", prefix=0)
    assert it.choose("d", PROMPT)[1] == "decode-1"


def test_a_stage_that_never_holds_what_it_should_is_not_preferred_until_it_does() -> None:
    """An engine without a prefix cache, say."""
    it = Deployment()
    it.serve("a", PROMPT, answer=1)
    it.loads = busy(decode_0=0.1)
    for number in range(PATIENCE):
        assert it.serve(f"b{number}", PROMPT, found=(12, 0))[1] == "decode-0", number
    assert it.serve("c", PROMPT, found=(12, 0))[1] == "decode-1"
    it.loads = busy(decode_1=0.1)
    assert it.serve("d", PROMPT, found=(12, 16))[1] == "decode-1", "that one has disappointed nobody"
    it.loads = busy(decode_1=0.9)
    assert it.serve("e", PROMPT, found=(12, 16))[1] == "decode-0"
    it.loads = busy(decode_0=0.1, decode_1=0.1)
    assert it.choose("f", PROMPT)[1] == "decode-0"


@pytest.mark.clause("C9.3")
@pytest.mark.timeout(20)
@pytest.mark.parametrize("found", [10**15, -5])
def test_what_a_stage_claims_to_hold_costs_no_more_than_its_prompt(found: int) -> None:
    deployment = Deployment()
    deployment.serve("a", PROMPT)
    deployment.serve("b", LONGER, found=(found, found))
    assert deployment.policy.statistics()["entries"] <= 2 * 7 * len(ALL)


@pytest.mark.clause("T12")
def test_what_is_remembered_is_bounded_and_the_beginning_stays_longest() -> None:
    it = Deployment(entries=6)
    for number in range(50):
        it.serve(str(number), tuple(range(100 * number, 100 * number + 16)))
    assert it.policy.statistics()["entries"] <= 4 * 6
    assert all(len(seen) <= 6 for seen in it.policy._stages.values())
    assert not it.policy._asked
    it = Deployment(entries=6)
    it.serve("a", PROMPT)
    it.serve("b", tuple(range(70, 86)))  # two of the first one's blocks have to go: its last
    before = it.policy.statistics()["decode_tokens_expected"]
    it.choose("c", PROMPT)
    assert it.policy.statistics()["decode_tokens_expected"] - before == 8


class Sliced(tuple):
    """A prompt that takes note of how much of it is read at a time."""

    largest = 0

    def __getitem__(self, index):
        if isinstance(index, slice):
            Sliced.largest = max(Sliced.largest, len(range(*index.indices(len(self)))))
        return super().__getitem__(index)


def test_a_long_prompt_is_learned_in_slices_and_none_of_the_calls_reads_it_whole() -> None:
    prompt = Sliced(range(5 * TOKENS_PER_CALL))
    it = Deployment(entries=100_000)
    Sliced.largest = 0
    p, d = it.choose("a", prompt)
    held = []
    for stage, milestone in (
        (p, "placed"), (d, "reserved"), (p, "committed"), (d, "received"), (d, "imported"), (d, "activated"),
    ):  # fmt: skip
        it.reached("a", stage, milestone)
        held.append(it.policy.statistics()["entries"])
    assert 0 < Sliced.largest <= TOKENS_PER_CALL
    assert held[1] == 0 < held[2] < held[3] < held[5]  # P holds it from the commit on, and its end is learned later
    marks = 64 + (len(prompt) // BLOCK - 64) // 16
    assert held[5] == 2 * marks
    it.finish("a", prompt)
    it.loads = dict.fromkeys((p, d), 0.2)
    assert it.choose("b", Sliced(prompt)) == (p, d)
    # the end counts, too: a stage that turned out to hold less of it is not believed to hold more
    for _ in range(4):
        it.reached("b", d, "placed")
    it.reached("b", d, "reserved", prefix=100 * BLOCK)
    assert len(it.policy._stages[d, 1]) == 64 + (100 - 64) // 16


@pytest.mark.parametrize(("shared", "believed"), [(3, 3), (64, 64), (79, 64), (80, 80), (100, 96)])
def test_far_into_a_prompt_every_sixteenth_block_counts(shared: int, believed: int) -> None:
    it = Deployment()
    first = tuple(range(128 * BLOCK))
    it.serve("a", first)
    before = it.policy.statistics()["decode_tokens_expected"]
    it.choose("b", (*first[: shared * BLOCK], *range(1000, 1000 + 20 * BLOCK)))
    assert it.policy.statistics()["decode_tokens_expected"] - before == believed * BLOCK


def test_requests_it_was_not_asked_about_leave_nothing() -> None:
    it = Deployment()
    it.reached("strange", "decode-0", "activated")
    it.finish("strange", PROMPT)
    assert not it.policy._stages
    assert not it.policy._asked


# -- as a hook ---------------------------------------------------------------------------------------------------------


def test_a_policy_of_ones_own_is_asked_first_whenever_it_was_added() -> None:
    class Own:
        def kvbaton_choose_pair(self, prompt: tuple[int, ...], pairs: tuple) -> tuple[str, str] | None:
            return pairs[-1] if prompt[0] == 7 else None

    hooks = Hooks([Own(), PrefixAware(imbalance=0.5, entries=10)])
    stages = [StageLoad(name, 0, 9, 9, 1, 0.0, BLOCK) for name in (*PREFILLS, *DECODES)]
    assert hooks.choose_pair("a", (7,), stages[:2], stages[2:], ALL) == ALL[-1]
    assert hooks.choose_pair("a", (8,), stages[:2], stages[2:], ALL) == ALL[0]
    assert not hooks.failures


def test_the_setting_makes_it() -> None:
    assert policy(RoutingSettings()) is None
    made = policy(RoutingSettings(policy="prefix-aware", imbalance=0.1, entries=7))
    assert made is not None
    assert (made._imbalance, made._entries) == (0.1, 7)


# -- against caches that evict -----------------------------------------------------------------------------------------


class Cache:
    """A stage's real cache: so many blocks, the longest unused goes first."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.held = blocks, OrderedDict[tuple[int, ...], None]()

    def find(self, prompt: tuple[int, ...]) -> int:
        found = 0
        while found + BLOCK <= len(prompt) and prompt[: found + BLOCK] in self.held:
            found += BLOCK
        return found

    def keep(self, prompt: tuple[int, ...]) -> None:
        for end in range(len(prompt) // BLOCK * BLOCK, 0, -BLOCK):
            self.held[prompt[:end]] = None
            self.held.move_to_end(prompt[:end])
        while len(self.held) > self.blocks:
            self.held.popitem(last=False)


def sent(seed: int, count: int, *, aware: bool) -> tuple[int, list[tuple[str, str]]]:
    """Tokens that had to be sent for ``count`` requests over six beginnings, of which a stage holds three."""
    it, draw = Deployment(), random.Random(seed)
    caches = {name: Cache(3 * 8 + 4) for name in (*PREFILLS, *DECODES)}
    beginnings = [tuple(draw.randrange(999) for _ in range(32)) for _ in range(6)]
    total, pairs = 0, []
    for number in range(count):
        prompt = (*draw.choice(beginnings), *(draw.randrange(999) for _ in range(4)))
        it.loads = {name: draw.random() / 5 for name in caches}
        if aware:
            p, d = it.choose(str(number), prompt)
        else:
            p, d = min(ALL, key=lambda pair: it.loads[pair[0]] + it.loads[pair[1]])
        held = {name: caches[name].find(prompt) for name in (p, d)}
        total += len(prompt) - held[d]
        it.reached(str(number), d, "reserved", held[d])
        it.reached(str(number), p, "committed", held[p])
        it.reached(str(number), d, "activated")
        it.finish(str(number), prompt)
        for name in (p, d):
            caches[name].keep(prompt)
        pairs.append((p, d))
    return total, pairs


@pytest.mark.parametrize("seed", range(3))
def test_stages_come_to_hold_different_beginnings(seed: int) -> None:
    aware, chosen = sent(seed, 300, aware=True)
    assert sent(seed, 300, aware=True) == (aware, chosen), "equal calls, equal answers"
    assert aware < 0.6 * sent(seed, 300, aware=False)[0]
    assert min(sum(d == name for _, d in chosen) for name in DECODES) > 60, "neither stage is left out"
