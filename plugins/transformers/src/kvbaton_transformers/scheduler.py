"""Which tokens of which requests the next forward computes: admission, chunks, budgets, preemption.  No tensors.

One scheduler serves every role, so that a disaggregated run and a colocated one cut a prompt into the same chunks (A1):
a chunk ends at a multiple of ``prefill_chunk`` in the prompt whatever else is in the step.

Requests are admitted in order of arrival; at D one arrives when its import is complete (C8.3).  When memory runs out,
the youngest request without a lease gives its blocks to an older one (C8.2) and waits to be recomputed.  So the oldest
always gets on, unless leases hold the memory, and those end without the scheduler's help.
"""

from __future__ import annotations

import bisect
import enum
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvbaton.cache import KVCache, KVSequence, Lease, SequenceState
from kvbaton.engine import Request
from kvbaton.identity import TransferId
from kvbaton_transformers.drafting import PromptLookup


class Phase(enum.Enum):
    #: D: memory is held, nothing is valid yet.
    RESERVED = "reserved"
    #: In the queue for a compute slot: new, imported or preempted.
    WAITING = "waiting"
    #: Has a compute slot.
    RUNNING = "running"
    #: P: all computed; the compute slot is given back by the stage.
    PREFILLED = "prefilled"
    #: Suspended or finished: computes no more, keeps what it has until it is released.
    PARKED = "parked"


@dataclass(eq=False, slots=True)
class Job:
    """One transfer in the engine: the request, what it holds, how far it is.

    ``final``: a final payload that has not been turned into a token yet, and its exit depth; opaque here.
    ``ahead``: drafts that were computed along with it, and what they left; opaque here as well.
    """

    transfer: TransferId
    request: Request
    phase: Phase = Phase.WAITING
    arrival: int = 0
    sequence: KVSequence | None = None
    lease: Lease | None = None
    slot: int | None = None
    final: tuple[Any, int] | None = None
    ahead: Any = None
    lookup: PromptLookup | None = None
    generated: list[int] = field(default_factory=list)
    activated: bool = False
    #: P: how many prompt tokens were reported, and how many of them were found in the prefix cache.
    reported: int = 0
    cached: int = 0

    @property
    def length(self) -> int:
        """Tokens known: prompt and generated."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def held(self) -> KVSequence:
        """Its sequence, which it has whenever it is computed."""
        assert self.sequence is not None
        return self.sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """``prefill_chunk`` None: a prompt goes in one piece.  ``replay_singly``: recompute what was generated in the
    shapes in which it was generated, token by token.

    ``max_batch_tokens`` is kept except that every step takes its decodes and may take one chunk: nothing starves.
    ``draft_tokens``: how many drafts a request may have computed ahead in one step; they use only what a step has left.
    """

    prefill_chunk: int | None
    max_batch_tokens: int
    max_running: int
    replay_singly: bool = False
    draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens ``[start, start + count)`` of a job, and behind them ``draft``: guesses at what comes next.

    There are blocks for the drafts, and none that the request's budget does not cover (C8.4).
    """

    job: Job
    start: int
    count: int
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step: what to compute, whose final payload to sample from, and who got a compute slot for the first time."""

    work: list[Work]
    samples: list[Job]
    activated: list[Job]


class Scheduler:
    """Decides steps over ``cache``.

    ``place(job)`` opens a new job's sequence, False where there is no memory now; ``may(job, tokens)`` is advisory
    back-pressure; ``draft(job, most)`` guesses tokens.  Threading: the engine's.
    """

    def __init__(
        self,
        cache: KVCache,
        limits: Limits,
        place: Callable[[Job], bool],
        may: Callable[[Job, int], bool],
        draft: Callable[[Job, int], Sequence[int]] | None = None,
    ) -> None:
        self.cache, self.limits = cache, limits
        self._place, self._may, self._draft = place, may, draft
        self._arrivals = itertools.count(1)
        self._waiting: list[Job] = []
        self._running: list[Job] = []
        self.preemptions = 0
        #: Whom admission last found no memory for, the free memory then, and how much could be shared: no use in asking
        #: again before one of these changes.
        self._refused: tuple[Job, int, int, int] | None = None

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Compute slots taken."""
        return len(self._running)

    @property
    def short_of_memory(self) -> bool:
        """Whether a request was preempted and waits for memory, which no new one may take before it."""
        return any(job.sequence is not None and not _holds_blocks(job) for job in self._waiting)

    # -- the queue -----------------------------------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Queue a new or imported job for ordinary admission."""
        job.phase, job.arrival = Phase.WAITING, next(self._arrivals)
        self._waiting.append(job)

    def park(self, job: Job) -> None:
        """Compute no more of it; its compute slot is free.  Idempotent."""
        self._leave(job)
        job.phase = Phase.PARKED

    def prefilled(self, job: Job) -> None:
        """P: nothing is left to compute; the slot stays taken until ``park``."""
        job.phase = Phase.PREFILLED

    def _leave(self, job: Job) -> None:
        for jobs in (self._waiting, self._running):
            if job in jobs:
                jobs.remove(job)

    # -- a step --------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        """Whether :meth:`plan` would find something to do."""
        if any(self._ready(job) for job in self._running):
            return True
        if len(self._running) >= self.limits.max_running or not self._waiting:
            return False
        return any(map(_holds_blocks, self._waiting)) or self._refused != self._memory(self._starved())

    def plan(self) -> Plan:
        """Admit who fits, make room for who grows, and say what the next forward computes."""
        activated = [job for job in self._admit() if not job.activated]
        for job in activated:
            job.activated = True
        decodes: list[Work] = []
        chunks: list[Work] = []
        samples: list[Job] = []
        for job in list(self._running):
            # A younger one may have been preempted for an older one meanwhile.
            if job.phase is not Phase.RUNNING or not self._grow(job):
                continue
            count = self._next(job)
            work = Work(job, job.held.valid, count)
            if count == 0:
                samples.append(job)
            elif work.start >= len(job.request.prompt) and count == 1:
                decodes.append(work)
            elif self._may(job, count):
                chunks.append(work)
        left = self.limits.max_batch_tokens - len(decodes)
        taken: list[Work] = []
        for work in chunks:
            if work.count <= left or not taken:
                taken.append(work)
                left -= work.count
        return Plan([*self._ahead(decodes, left), *taken], samples, activated)

    def _ahead(self, decodes: Sequence[Work], left: int) -> Iterator[Work]:
        """Add drafts to those ``decodes`` that end with a request's latest token; ``left`` tokens at most."""
        for work in decodes:
            job = work.job
            # The forward yields one token more than it has drafts, and the last permitted token is never computed: so
            # a draft is always within the budget.
            most = min(left, self.limits.draft_tokens, job.request.sampling.max_tokens - len(job.generated) - 1)
            if self._draft is not None and most > 0 and job.final is None and work.start + 1 == job.length:
                draft = tuple(self._draft(job, most))
                # Nobody is preempted for a guess.
                if not self.cache.ensure(job.held, job.length + len(draft)):
                    draft = draft[: len(job.held.blocks) * self.cache.block_tokens - job.length]
                left -= len(draft)
                work = replace(work, draft=draft)
            yield work

    def _next(self, job: Job) -> int:
        """How many tokens of ``job`` go into its next forward; 0: all are there, its final payload waits."""
        start, prompt, chunk = job.held.valid, len(job.request.prompt), self.limits.prefill_chunk
        end = job.length
        if self.limits.replay_singly:
            end = min(end, max(prompt, start + 1))
        if chunk is None:
            return end - start
        return min(end, (start // chunk + 1) * chunk) - start

    def _ready(self, job: Job) -> bool:
        if job.phase is not Phase.RUNNING:
            return False
        count = self._next(job)
        if count and not self._may(job, count):
            return False
        missing = self.cache.blocks_for(job.length) - len(job.held.blocks)
        return missing <= self.cache.available or self._victim(job) is not None

    # -- memory --------------------------------------------------------------------------------------------------------

    def _admit(self) -> Iterator[Job]:
        starved = False
        for job in list(self._waiting):
            if len(self._running) >= self.limits.max_running:
                return
            if not _holds_blocks(job):
                # In order among those who need memory.  One that has it may pass: it gives some back at its end.
                if starved:
                    continue
                if not (self._place(job) if job.sequence is None else self._resume(job)):
                    self._refused, starved = self._memory(job), True
                    continue
            self._waiting.remove(job)
            bisect.insort(self._running, job, key=_arrival)
            job.phase = Phase.RUNNING
            yield job

    def _resume(self, job: Job) -> bool:
        # Without a final payload the last token is computed again, for the next one is sampled from it.
        return self.cache.resume(job.held, reuse=job.length if job.final else job.length - 1)

    def _grow(self, job: Job) -> bool:
        """Blocks for all tokens of a running job, at the cost of younger ones.  False: it has to wait for memory."""
        while not self.cache.ensure(job.held, job.length):
            victim = self._victim(job)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _victim(self, job: Job) -> Job | None:
        """The youngest job, younger than ``job``, whose blocks may be taken."""
        candidates = [
            other
            for other in (*self._running, *self._waiting)
            if other.arrival > job.arrival and _holds_blocks(other) and not other.held.leased  # C8.2
        ]
        return max(candidates, key=_arrival, default=None)

    def _preempt(self, job: Job) -> None:
        self.cache.preempt(job.held)
        self._leave(job)
        job.phase = Phase.WAITING
        bisect.insort(self._waiting, job, key=_arrival)
        self.preemptions += 1

    def _starved(self) -> Job:
        return next(job for job in self._waiting if not _holds_blocks(job))

    def _memory(self, job: Job) -> tuple[Job, int, int, int]:
        return job, self.cache.available, self.cache.slots.free, self.cache.pool.named


def _holds_blocks(job: Job) -> bool:
    return job.sequence is not None and job.sequence.state is SequenceState.OPEN


def _arrival(job: Job) -> int:
    return job.arrival
