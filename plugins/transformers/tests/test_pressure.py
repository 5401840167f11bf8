"""Two real engines in pools that are too small, with hand-offs in every order between them (C2.6, C5, C8).

A random game: reserve, prefill, carry, import, grow, preempt, cancel at every boundary, release, evict.  After each
move the books of both engines are compared with what the game knows: which transfer holds which blocks, which of them
are leased, who has a final slot.  A reservation's tables stay as they were promised while anybody may write to them,
also after a cancellation, when bytes still arrive; what is promised anew is nobody else's.  Every token is the one of
the undisturbed run, so that memory given away too early is seen in the answers, too.  In the end all that lives is
driven to its end, within bounds, and both pools are as full of prefixes and as empty of owners as the books say.
"""

from __future__ import annotations

import functools
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvbaton.cache import SequenceState
from kvbaton.engine import Admission, ComputedRange, FinishReason, Request, Role, SamplingParams, StepOutput
from kvbaton.errors import CacheError
from kvbaton.geometry import KVMap
from kvbaton.identity import TransferId, new_transfer_id
from kvbaton.reservation import Reservation
from kvbaton.segments import Segments
from kvbaton_transformers import TransformersOptions
from kvbaton_transformers.checkpoints import ByteTokenizer, Checkpoint
from kvbaton_transformers.engine import TransformersEngine
from kvbaton_transformers.scheduler import Job, Phase
from kvbaton_transformers.testing import tiny_llama, tiny_looped

BLOCK, CHUNK = 4, 8
LIVES = 7
MODELS: dict[str, Callable[[], Any]] = {"llama": tiny_llama, "last_exited": tiny_looped}


@functools.cache
def checkpoint(model: str) -> Checkpoint:
    return Checkpoint(model, MODELS[model](), {"weights": model}, frozenset())


def _tokens(length: int, text: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(text)
    return tuple(torch.randint(1, 256, (length,), generator=generator).tolist())


#: Few beginnings, so that prefixes are shared, and lengths around a block's.
REQUESTS = [
    Request((*_tokens(beginning, beginning), *_tokens(end, 100 + end)), SamplingParams(max_tokens=growth))
    for beginning, end, growth in (
        (8, 1, 12), (8, 4, 6), (8, 8, 9), (12, 1, 7), (12, 5, 4), (4, 1, 14), (4, 12, 5), (16, 4, 11), (1, 0, 13),
    )
]  # fmt: skip


def make(model: str, role: Role, **options: Any) -> TransformersEngine:
    base = {"block_tokens": BLOCK, "prefill_chunk": CHUNK, "batching": "isolated"}
    return TransformersEngine(checkpoint(model), TransformersOptions(**base | options), role, ByteTokenizer)


@functools.cache
def undisturbed(model: str) -> tuple[tuple[int, ...], ...]:
    """What each request answers alone, without a hand-off, a cache or want of memory."""
    made = make(model, Role.COLOCATED, blocks=64, prefix_caching=False)
    answers = []
    for request in REQUESTS:
        made.add(new_transfer_id(), request)
        found: list[int] = []
        while made.has_work():
            for output in made.step():
                found += output.token_ids
        answers.append(tuple(found))
    return tuple(answers)


@dataclass(eq=False)
class Life:
    """One transfer as the game knows it.

    ``d``: reserved, held (cancelled, and P may still write), imported, closing, finished, gone; ``p``: untold,
    prefilling, draining (cancelled), gone.
    """

    number: int
    transfer: TransferId
    reservation: Reservation
    d: str = "reserved"
    p: str = "untold"
    ranges: deque[ComputedRange] = field(default_factory=deque)
    received: bool = False
    compute_released: bool = False
    tokens: list[int] = field(default_factory=list)

    @property
    def request(self) -> Request:
        return REQUESTS[self.number]


class Side:
    """One engine, and what it reports."""

    def __init__(self, engine: TransformersEngine) -> None:
        self.engine = engine
        self.regions = {region.id: region for region in engine.regions(None)}
        self.ranges: list[ComputedRange] = []
        self.reservations: list[Reservation] = []
        self.refusals: list[tuple[TransferId, str, bool]] = []
        self.active: list[TransferId] = []
        engine.attach(self)

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        return True

    def prefill_submitted(self, computed: ComputedRange) -> None:
        self.ranges.append(computed)

    def reserved(self, reservation: Reservation) -> None:
        self.reservations.append(reservation)

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> None:
        self.refusals.append((transfer, reason, retry))

    def activated(self, transfer: TransferId) -> None:
        self.active.append(transfer)

    def job(self, life: Life) -> Job:
        return self.engine._jobs[life.transfer]

    def blocks(self, life: Life) -> set[int]:
        """Of plane 0; a block is taken in every plane at once."""
        job = self.engine._jobs.get(life.transfer)
        return set() if job is None or job.sequence is None else set(job.sequence.tables[0])


def copy(source: Side, reads: Segments, target: Side, writes: Segments) -> None:
    rows = zip(*(column.tolist() for s in (reads, writes) for column in (s.region, s.offset, s.length)), strict=True)
    for region, start, length, into, at, _ in rows:
        target.regions[into].view()[at : at + length] = source.regions[region].view()[start : start + length]


class Pressure(RuleBasedStateMachine):
    model = "llama"
    planes = 1
    on_d: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.p = Side(make(self.model, Role.PREFILL, blocks=14, transfer_slots=4, max_running=2))
        self.d = Side(make(self.model, Role.DECODE, blocks=15, transfer_slots=5, max_running=3, **self.on_d))
        self.map = KVMap(self.p.engine.geometry, self.d.engine.geometry)
        self.expected = undisturbed(self.model)
        self.lives: list[Life] = []

    def pick(self, index: int, d: Sequence[str] = (), p: Sequence[str] = ()) -> Life | None:
        found = [life for life in self.lives if (not d or life.d in d) and (not p or life.p in p)]
        return found[index % len(found)] if found else None

    # -- a hand-off's moves --------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.lives) < LIVES)
    @rule(number=st.integers(0, len(REQUESTS) - 1))
    def reserve(self, number: int) -> None:
        before, transfer, request = self.books(self.d), new_transfer_id(), REQUESTS[number]
        owned = {block for life in self.lives for block in self.d.blocks(life)}
        self.d.engine.reserve_transfer(Admission(transfer, request))
        if self.d.refusals:
            ((refused, reason, retry),) = self.d.refusals
            self.d.refusals.clear()
            assert refused == transfer
            assert retry, reason
            assert self.books(self.d) == before, "C2.6: what refuses holds nothing"
            return
        (reservation,) = self.d.reservations
        self.d.reservations.clear()
        assert len(reservation.tables[0]) == -(-len(request.prompt) // BLOCK)
        fresh = reservation.tables[0][reservation.valid // BLOCK :]
        assert not owned & set(fresh), "C2.2: what is to be written is nobody else's"
        self.lives.append(Life(number, transfer, reservation))

    @rule(index=st.integers(0, 9))
    def prefill(self, index: int) -> None:
        if life := self.pick(index, ["reserved"], ["untold"]):
            self.p.engine.reserve_transfer(Admission(life.transfer, life.request, life.reservation.valid))
            assert not self.p.refusals
            life.p = "prefilling"

    @rule(steps=st.integers(1, 3))
    def step_p(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.one_step_p()

    def one_step_p(self) -> None:
        assert self.p.engine.step() == []
        for computed in self.p.ranges:
            life = next(life for life in self.lives if life.transfer == computed.transfer)
            assert life.p == "prefilling", "C5.3: what was suspended computes no more"
            life.ranges.append(computed)
        self.p.ranges.clear()

    @rule(index=st.integers(0, 9))
    def carry(self, index: int) -> None:
        """Bytes arrive, also after a cancellation: only P's release ends that."""
        waiting = [life for life in self.lives if life.ranges and life.p != "gone"]
        if waiting:
            self.bring(waiting[index % len(waiting)])

    def bring(self, life: Life) -> None:
        computed = life.ranges.popleft()
        start = max(computed.start, life.reservation.valid)
        if computed.end > start:
            reads, writes = self.map.plan(computed.tables, life.reservation.arrays(), start, computed.end)
            copy(self.p, reads, self.d, writes)
        if computed.last:
            ours = self.p.engine.geometry.final_segment(computed.final_slot)
            copy(self.p, ours, self.d, self.d.engine.geometry.final_segment(life.reservation.final_slot))
            life.received = life.d == "reserved"

    @rule(index=st.integers(0, 9))
    def release_compute(self, index: int) -> None:
        if (life := self.pick(index, p=["prefilling"])) and self.p.job(life).phase is Phase.PREFILLED:
            self.p.engine.release_transfer_compute(life.transfer)

    @rule(index=st.integers(0, 9))
    def retire_p(self, index: int) -> None:
        """Acknowledged, or drained after a cancellation."""
        if life := self.pick(index, p=["prefilling", "draining"]):
            if life.p == "draining" or life.received:
                self.p.engine.release_transfer(life.transfer)
                life.p = "gone"
                life.ranges.clear()
                self.forget()

    @rule(index=st.integers(0, 9))
    def accept(self, index: int) -> None:
        if (life := self.pick(index, ["reserved"])) and life.received:
            self.d.engine.accept_import(life.transfer, len(life.request.prompt))
            life.d = "imported"

    @rule(steps=st.integers(1, 4))
    def step_d(self, steps: int = 1) -> None:
        for _ in range(steps):
            for output in self.d.engine.step():
                self.take(output)

    @precondition(lambda self: len(self.lives) < LIVES)
    @rule(number=st.integers(0, len(REQUESTS) - 1), whole=st.booleans())
    def hand_over(self, number: int, whole: bool) -> None:
        """The way of one transfer without a break, as far as there is room; else up to its last bytes."""
        before = len(self.lives)
        self.reserve(number)
        if len(self.lives) == before:
            return
        life = self.lives[-1]
        self.p.engine.reserve_transfer(Admission(life.transfer, life.request, life.reservation.valid))
        life.p = "prefilling"
        for _ in range(5):
            self.one_step_p()
        while whole and life.ranges:
            self.bring(life)
        if life.received:
            self.d.engine.accept_import(life.transfer, len(life.request.prompt))
            life.d = "imported"
            self.p.engine.release_transfer_compute(life.transfer)
            self.p.engine.release_transfer(life.transfer)
            life.p = "gone"

    def take(self, output: StepOutput) -> None:
        assert output.error is None, output.error
        life = next(life for life in self.lives if life.transfer == output.transfer)
        assert life.d == "imported", f"C8.3, C5.3: {life.d} and computed"
        life.tokens += output.token_ids
        expected = self.expected[life.number]
        assert tuple(life.tokens) == expected[: len(life.tokens)], "A1: not the undisturbed run's tokens"
        if output.finish_reason is not None:
            assert output.finish_reason is FinishReason.LENGTH
            assert len(life.tokens) == len(expected)
            life.d = "finished"

    @rule(index=st.integers(0, 9))
    def retire_d(self, index: int) -> None:
        life = self.pick(index, ["finished", "closing", "held"])
        if life is not None and (life.d != "held" or life.p == "gone"):  # C5.2
            if life.d == "finished":
                self.d.engine.suspend_transfer(life.transfer)
            self.d.engine.release_transfer(life.transfer)
            life.d = "gone"
            self.forget()

    @rule(index=st.integers(0, 9))
    def cancel(self, index: int) -> None:
        if life := self.pick(index, ["reserved", "imported"]):
            if life.p == "prefilling" and life.d == "reserved":
                self.p.engine.suspend_transfer(life.transfer)
                life.p = "draining"
            elif life.p == "untold":
                life.p = "gone"
            self.d.engine.suspend_transfer(life.transfer)
            life.d = "held" if life.d == "reserved" else "closing"
            self.forget()

    @rule(index=st.integers(0, 9))
    def say_it_late(self, index: int) -> None:
        """What crossed with a cancellation or an end changes nothing (C1.2, C7.4)."""
        if life := self.pick(index, ["held", "closing", "finished", "gone"]):
            before = self.books(self.p), self.books(self.d)
            self.d.engine.accept_import(life.transfer, len(life.request.prompt))
            self.d.engine.suspend_transfer(life.transfer)
            if life.p in ("untold", "gone"):
                self.p.engine.suspend_transfer(life.transfer)
                self.p.engine.release_transfer_compute(life.transfer)
                self.p.engine.release_transfer(life.transfer)
            assert (self.books(self.p), self.books(self.d)) == before

    # -- pressure ------------------------------------------------------------------------------------------------------

    @rule(index=st.integers(0, 9))
    def preempt(self, index: int) -> None:
        """Whoever has memory and no lease may lose it at any time between steps."""
        if life := self.pick(index, ["imported"]):
            job = self.d.job(life)
            if job.held.state is SequenceState.OPEN:
                self.d.engine._scheduler._preempt(job)
                assert not self.d.blocks(life)

    @rule(index=st.integers(0, 9))
    def preempt_what_is_leased(self, index: int) -> None:
        for side, life in (
            (self.d, self.pick(index, ["reserved", "held"])),
            (self.p, self.pick(index, p=["prefilling", "draining"])),
        ):
            if life is not None and self.blocks_of(side, life):
                with pytest.raises(CacheError):
                    side.engine._cache.preempt(side.job(life).held)

    @rule(of_p=st.booleans())
    def evict(self, of_p: bool) -> None:
        side = self.p if of_p else self.d
        before = self.books(side)
        assert side.engine._cache.drop_prefix() == before["blocks_prefix"]

    # -- what always holds ---------------------------------------------------------------------------------------------

    @staticmethod
    def books(side: Side) -> dict[str, float]:
        return dict(side.engine.statistics())

    @staticmethod
    def blocks_of(side: Side, life: Life) -> set[int]:
        return side.blocks(life)

    def forget(self) -> None:
        self.lives = [life for life in self.lives if (life.p, life.d) != ("gone", "gone")]

    @invariant()
    def books_are_exact(self) -> None:
        on_p = [life for life in self.lives if life.p in ("prefilling", "draining")]
        on_d = [life for life in self.lives if life.d != "gone"]
        # P leases whatever it has; D until it has imported
        leased_on_d = [life for life in on_d if life.d in ("reserved", "held")]
        for side, lives, leased in ((self.p, on_p, on_p), (self.d, on_d, leased_on_d)):
            side.engine.check()
            books = self.books(side)
            assert set(side.engine._jobs) == {life.transfer for life in lives}
            total = sum(books[f"blocks_{state}"] for state in ("free", "used", "leased", "prefix"))
            assert total == books["blocks_total"]
            owned = {block for life in lives for block in side.blocks(life)}
            under_lease = {block for life in leased for block in side.blocks(life)}
            assert books["blocks_used"] == len(owned) * self.planes, "C8.4: owners"
            assert books["blocks_under_lease"] == len(under_lease) * self.planes, "C8.2: leases"
            assert books["blocks_leased"] == 0, "every lease here has an owner"
            slots = sum(side.engine._jobs[life.transfer].slot is not None for life in leased)
            assert books["final_slots_free"] == books["final_slots_total"] - slots
            assert books["requests_running"] <= side.engine.capacity().compute_slots
            for life in lives:
                job = side.engine._jobs[life.transfer]
                if job.sequence is not None:
                    budget = len(life.request.prompt) if side is self.p else life.request.max_length
                    assert job.sequence.budget == budget, "C8.4"
                    assert len(job.sequence.blocks) <= -(-budget // BLOCK)
                    assert len(job.sequence.blocks) <= -(-job.length // BLOCK), "what was ahead is given back"

    @invariant()
    def promises_are_kept(self) -> None:
        """C2.2, C5.2: what may still be written is as it was promised, leased, and in nobody else's hands to write."""
        for life in self.lives:
            if life.d in ("reserved", "held"):
                job = self.d.job(life)
                assert tuple(tuple(table) for table in job.held.tables) == life.reservation.tables
                assert job.held.leased
                assert job.slot == life.reservation.final_slot
                written = set(life.reservation.tables[0][life.reservation.valid // BLOCK :])
                for other in self.lives:
                    assert other is life or not written & self.d.blocks(other), "C5.2: promised twice"
            if life.p in ("prefilling", "draining") and self.p.blocks(life):
                assert self.p.job(life).held.leased, "C5.1"

    def teardown(self) -> None:
        """Everything comes to its end, whatever the order so far, and nothing is left."""
        if sys.exc_info()[0] is not None:
            return  # what is broken need not end well, and the first cause is the one to see
        for _ in range(600):
            if not self.lives:
                break
            for index in range(LIVES):
                self.prefill(index)
                self.retire_p(index)
                self.retire_d(index)
                self.accept(index)
                self.release_compute(index)
            for _ in range(LIVES):
                self.carry(0)
            # as a stage does: an engine that says it has nothing to do is not stepped
            if self.p.engine.has_work():
                self.step_p()
            if self.d.engine.has_work():
                self.step_d()
            self.books_are_exact()
        assert not self.lives, f"C2.6: does not come to an end: {self.lives}"
        for side in (self.p, self.d):
            side.engine.check()
            books = self.books(side)
            assert books["transfers"] == books["requests_waiting"] == books["requests_running"] == 0
            assert books["blocks_used"] == books["blocks_leased"] == books["blocks_under_lease"] == 0
            assert books["blocks_promised"] == 0
            assert books["final_slots_free"] == books["final_slots_total"]
            side.engine._cache.drop_prefix()
            assert self.books(side)["blocks_free"] == books["blocks_total"]


class Speculating(Pressure):
    """Drafts take blocks ahead, and give them back."""

    on_d = {"speculation": "prompt-lookup", "draft_tokens": 3, "ngram": 1}


class Looped(Pressure):
    """Four planes: a block is four."""

    model = "last_exited"
    planes = 4


def playing(games: int) -> settings:
    return settings(
        max_examples=games, stateful_step_count=50, deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )  # fmt: skip


@pytest.mark.clause("C2.2", "C2.6", "C5.1", "C5.2", "C5.3", "C8.1", "C8.2", "C8.3", "C8.4", "A1")
class TestPressure(Pressure.TestCase):  # type: ignore[misc, valid-type]
    settings = playing(40)


@pytest.mark.clause("C2.2", "C2.6", "C5.1", "C5.2", "C5.3", "C8.1", "C8.2", "C8.3", "C8.4", "A1")
class TestSpeculating(Speculating.TestCase):  # type: ignore[misc, valid-type]
    settings = playing(15)


@pytest.mark.clause("C2.2", "C2.6", "C5.1", "C5.2", "C5.3", "C8.1", "C8.2", "C8.3", "C8.4", "A1")
class TestLooped(Looped.TestCase):  # type: ignore[misc, valid-type]
    settings = playing(8)
