"""The scheduler alone, over a real cache and without a model: chunks, budgets, order, preemption."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbaton.cache import KVCache
from kvbaton.engine import Request, SamplingParams
from kvbaton.identity import TransferId
from kvbaton_transformers.scheduler import Job, Limits, Phase, Plan, Scheduler

BLOCK = 4


class Bench:
    """A scheduler whose model is "done": carries plans out by marking tokens valid and drawing token 1."""

    def __init__(
        self,
        blocks: int = 64,
        *,
        chunk: int | None = 8,
        batch: int = 64,
        running: int = 8,
        singly: bool = False,
        may: Callable[[Job, int], bool] = lambda job, tokens: True,
    ) -> None:
        self.cache = KVCache(blocks=blocks, block_tokens=BLOCK, prefix_caching=False)
        self.scheduler = Scheduler(self.cache, Limits(chunk, batch, running, singly), self._place, may)
        self.count = 0

    def _place(self, job: Job) -> bool:
        job.sequence = self.cache.open(job.request.prompt, job.request.max_length)
        return job.sequence is not None

    def add(self, prompt: int, more: int = 8, *, imported: bool = False) -> Job:
        self.count += 1
        tokens = tuple(range(self.count * 1000, self.count * 1000 + prompt))
        job = Job(TransferId(f"{self.count:032x}"), Request(tokens, SamplingParams(max_tokens=more)))
        if imported:
            job.sequence = self.cache.open_import(tokens, job.request.max_length)
            assert job.sequence is not None
            self.cache.complete_import(job.sequence, prompt)
            job.final = (None, 1)
        self.scheduler.submit(job)
        return job

    def step(self) -> Plan:
        plan = self.scheduler.plan()
        for work in plan.work:
            self.cache.advance(work.job.held, work.start + work.count)
        for job in [*plan.samples, *(work.job for work in plan.work)]:
            if job.held.valid == job.length:
                job.final = None
                job.generated.append(1)
                self.cache.append(job.held, [1])
                if len(job.generated) == job.request.sampling.max_tokens:
                    self.scheduler.park(job)
                    self.cache.free(job.held)
        self.cache.check()
        return plan

    def run(self, limit: int = 1000) -> list[list[tuple[int, int, int]]]:
        """Steps until nothing is left: of each, ``(request, start, count)``."""
        steps = []
        while self.scheduler.has_work():
            plan = self.step()
            assert plan.work or plan.samples, "has_work promised something to do"
            steps.append([(int(w.job.transfer, 16), w.start, w.count) for w in plan.work])
            assert len(steps) < limit
        return steps


@pytest.mark.clause("A1")
def test_chunks_end_at_multiples_of_the_chunk_size_whatever_else_runs() -> None:
    alone = Bench(chunk=8)
    alone.add(21, 1)
    crowd = Bench(chunk=8, batch=20)
    for _ in range(4):
        crowd.add(21, 1)
    expected = [(0, 8), (8, 8), (16, 5)]
    assert [(s, n) for step in alone.run() for _, s, n in step] == expected
    work = [row for step in crowd.run() for row in step]
    for request in range(1, 5):
        assert [(s, n) for r, s, n in work if r == request] == expected


def test_a_cached_prefix_moves_the_start_and_not_the_ends() -> None:
    bench = Bench(chunk=8)
    job = bench.add(21, 1)
    bench.scheduler.plan()
    bench.cache.advance(job.held, 4)
    assert [(s, n) for step in bench.run() for _, s, n in step] == [(4, 4), (8, 8), (16, 5)]


def test_decodes_go_first_and_chunks_fill_the_budget() -> None:
    bench = Bench(chunk=8, batch=17)
    bench.add(4, 6)
    bench.step()
    bench.add(24, 1)
    bench.add(24, 1)
    bench.add(24, 1)
    plan = bench.step()
    assert [(w.start, w.count) for w in plan.work] == [(4, 1), (0, 8), (0, 8)]


def test_one_chunk_always_goes_so_that_nothing_starves() -> None:
    bench = Bench(chunk=None, batch=1, running=4)
    bench.add(30, 2)
    bench.add(50, 2)
    steps = bench.run()
    assert [row for step in steps for row in step if row[2] > 1] == [(1, 0, 30), (2, 0, 50)]


def test_compute_slots_are_given_in_order_of_arrival() -> None:
    bench = Bench(running=2)
    jobs = [bench.add(8, 3) for _ in range(5)]
    first: list[Job] = []
    while bench.scheduler.has_work():
        first.extend(bench.step().activated)
        assert bench.scheduler.running <= 2
    assert first == jobs


@pytest.mark.clause("C8.2", "C8.4")
def test_the_youngest_gives_way_and_comes_back_with_what_it_had() -> None:
    bench = Bench(blocks=7, chunk=8)
    old, young = bench.add(8, 12), bench.add(8, 12)
    while bench.scheduler.preemptions == 0:
        bench.step()
    assert (old.phase, young.phase) == (Phase.RUNNING, Phase.WAITING)
    kept = list(young.generated)
    assert kept
    assert bench.scheduler.short_of_memory
    bench.run()
    assert (len(old.generated), len(young.generated)) == (12, 12)
    assert young.generated[: len(kept)] == kept
    assert bench.cache.statistics().free == 7
    assert not bench.scheduler.short_of_memory


@pytest.mark.clause("C8.2", "C8.3")
def test_a_leased_request_is_no_victim_and_an_imported_one_is() -> None:
    bench = Bench(blocks=4)
    old = bench.add(4, 8, imported=True)
    reserved = bench.cache.open_import(range(100, 108), 8)
    assert reserved is not None
    lease = bench.cache.lease(reserved)
    young = bench.add(4, 8, imported=True)
    bench.step()
    bench.step()
    assert (bench.scheduler.preemptions, young.phase) == (1, Phase.WAITING)
    for _ in range(3):
        bench.step()
    # Four more tokens later nothing is left to take: it waits in place and keeps what it has.
    bench.step()
    assert not bench.scheduler.has_work()
    assert old.phase is Phase.RUNNING
    bench.cache.free(reserved)
    assert not bench.scheduler.has_work()
    lease.end()
    bench.run()
    assert len(old.generated) == len(young.generated) == 8


@pytest.mark.clause("C8.2")
def test_of_several_the_youngest_unleased_one_is_the_victim() -> None:
    for leased, victim in (((), 2), ((2,), 1), ((1, 2), None)):
        bench = Bench(blocks=3)
        jobs = [bench.add(4, 8, imported=True) for _ in range(3)]
        leases = [bench.cache.lease(jobs[number].held) for number in leased]
        bench.step()
        bench.step()
        preempted = [number for number, job in enumerate(jobs) if job.phase is Phase.WAITING]
        assert preempted == ([] if victim is None else [victim])
        for lease in leases:
            lease.end()
        bench.run()
        assert [len(job.generated) for job in jobs] == [8, 8, 8]


def test_a_preempted_request_comes_back_before_those_that_arrived_later() -> None:
    def waits(job: Job) -> bool:
        return job.phase is Phase.WAITING

    bench = Bench(blocks=5, running=2)
    first, second, third = bench.add(8, 12), bench.add(8, 6), bench.add(4, 1)
    while not (waits(second) and second.generated):
        bench.step()
    # Memory for the small one there is; it would be taken from under the one that came before.
    assert bench.cache.available
    while waits(second):
        assert waits(third)
        bench.step()
    assert first.phase is Phase.PARKED


def test_what_waits_for_memory_is_passed_only_by_what_has_it() -> None:
    bench = Bench(blocks=4)
    first = bench.add(12, 1, imported=True)
    big, small = bench.add(8, 1), bench.add(4, 1)
    imported = bench.add(4, 1, imported=True)
    plan = bench.scheduler.plan()
    assert plan.activated == [first, imported]
    assert (big.phase, small.phase) == (Phase.WAITING, Phase.WAITING)


@pytest.mark.clause("A1")
def test_replay_recomputes_the_prompt_in_chunks_and_generated_tokens_one_by_one() -> None:
    for singly, expected in ((True, [(0, 8), (8, 2), (10, 1), (11, 1), (12, 1)]), (False, [(0, 8), (8, 5)])):
        bench = Bench(chunk=8, singly=singly)
        job = bench.add(10, 4)
        for _ in range(4):
            bench.step()
        assert len(job.generated) == 3
        bench.scheduler._preempt(job)
        assert [(s, n) for step in bench.run() for _, s, n in step] == expected


def test_back_pressure_holds_chunks_back_and_nothing_else() -> None:
    allowed = {1}
    bench = Bench(chunk=8, may=lambda job, tokens: int(job.transfer, 16) in allowed)
    bench.add(16, 1)
    bench.add(16, 1)
    assert {request for step in bench.run() for request, _, _ in step} == {1}
    assert not bench.scheduler.has_work()
    allowed.add(2)
    assert bench.scheduler.has_work()
    assert [row for step in bench.run() for row in step] == [(2, 0, 8), (2, 8, 8)]


def test_parking_is_idempotent_and_frees_the_compute_slot() -> None:
    bench = Bench(running=1)
    first, second = bench.add(8, 4), bench.add(8, 4)
    bench.step()
    bench.scheduler.park(first)
    bench.scheduler.park(first)
    assert bench.step().activated == [second]


def test_has_work_asks_for_memory_again_only_when_it_changed() -> None:
    asked = 0
    bench = Bench(blocks=4)
    hold = bench.cache.open(range(12), 12)
    assert hold is not None
    bench.add(8, 1)
    bench.step()

    def place(job: Job) -> bool:
        nonlocal asked
        asked += 1
        return bench._place(job)

    bench.scheduler._place = place
    assert not bench.scheduler.has_work()
    bench.cache.free(hold)
    assert bench.scheduler.has_work()
    assert asked == 0
    bench.run()
    assert asked == 1
