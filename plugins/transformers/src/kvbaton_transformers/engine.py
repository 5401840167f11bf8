"""The reference engine: Hugging Face decoders behind :class:`~kvbaton.engine.StageEngine`.

Here requests meet tensors: the scheduler says what to compute, core's cache says where it lies, the runner computes it,
and this module keeps each transfer's state and reports to the stage.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from kvbaton import quantities, room
from kvbaton.cache import KVCache, SequenceState
from kvbaton.connector import DeviceEvent, MemoryKind, MemoryRegion
from kvbaton.engine import (
    Admission,
    Allocator,
    ComputedRange,
    Request,
    Role,
    StageCallbacks,
    StepOutput,
    Tokenizer,
)
from kvbaton.errors import (
    CacheError,
    ConfigurationError,
    LocalProtocolError,
    ProfilingError,
    PromptTooLong,
    RequestRefused,
    SettingsError,
)
from kvbaton.identity import TransferId
from kvbaton.reservation import Capacity, Reservation
from kvbaton_transformers import support
from kvbaton_transformers.checkpoints import Checkpoint
from kvbaton_transformers.drafting import PromptLookup
from kvbaton_transformers.generation import Generator
from kvbaton_transformers.looped import LoopedModel
from kvbaton_transformers.paged import KVSpec, PagedKV, tensor_over
from kvbaton_transformers.plugin import TransformersOptions
from kvbaton_transformers.quantised import Scales, constant_scales
from kvbaton_transformers.runner import Batching, Forward, Row, Runner
from kvbaton_transformers.scheduler import Job, Limits, Phase, Scheduler, Work

#: Two sessions of torch's profiler in one process end it.
_TRACED = threading.Lock()
#: What to do where memory for the cache is not there.
_FEWER = "Set the engine's option blocks lower, or its dtype or kv_dtype to one that takes less."


class _Ahead(NamedTuple):
    """Drafts that were computed: for each a hidden state (``[draft, hidden]``) and an exit depth, as if it were
    right."""

    tokens: tuple[int, ...]
    hidden: torch.Tensor
    depths: tuple[int, ...]


class _Result(NamedTuple):
    """What a forward left for one piece of work: the hidden state of its last token that is no draft, and that token's
    exit depth; the same for its drafts; or a fault."""

    work: Work
    hidden: torch.Tensor | None
    depth: int
    error: Exception | None
    ahead: _Ahead | None = None


class TransformersEngine:
    """``checkpoint``'s model in one role.  See :class:`~kvbaton.engine.StageEngine` for threading and ownership.

    ``tokenizer`` opens the model's tokenizer; needed only for stop texts.  COLOCATED takes requests by :meth:`add`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        options: TransformersOptions,
        role: Role,
        tokenizer: Callable[[], Tokenizer] | None = None,
    ) -> None:
        self.role = role
        self._checkpoint, self._options, self._open_tokenizer = checkpoint, options, tokenizer
        model, decoder = checkpoint.model, checkpoint.decoder
        self._device = decoder.device
        config = decoder.config.get_text_config()
        self._vocabulary = config.vocab_size
        spec = KVSpec(
            shape=support.probe(decoder, checkpoint.source),
            planes=model.options.planes if isinstance(model, LoopedModel) else 1,
            blocks=options.blocks,
            block_tokens=options.block_tokens,
            final_slots=options.transfer_slots,
            scales=Scales(options.kv_scales) if options.kv_dtype == "fp8" else None,
        )
        if spec.scales is not None and isinstance(model, LoopedModel):
            raise ConfigurationError(
                "a looped model's cache cannot be kept in float8: a token that exits is copied to blocks with other"
                ' scales. Set kv_dtype to "model".'
            )
        self._spec = spec
        self.geometry = spec.geometry(checkpoint.identity)
        longest = getattr(config, "max_position_embeddings", None) or spec.blocks * spec.block_tokens
        self._max_tokens = min(longest, spec.blocks * spec.block_tokens)
        self._storage: PagedKV | None = None
        self._callbacks: StageCallbacks | None = None
        self._jobs: dict[TransferId, Job] = {}
        #: D: reservations whose memory is not locally quiet yet (C2.7).
        self._unquiet: list[tuple[DeviceEvent, Job]] = []
        self._drafted = self._accepted = 0
        self._profiler: tuple[torch.profiler.profile, Path] | None = None
        self._closed = False
        if role is Role.COLOCATED:
            self.regions(None)

    # -- set-up --------------------------------------------------------------------------------------------------------

    def regions(self, allocate: Allocator | None) -> Sequence[MemoryRegion]:
        """The memory to register.  Allocated by the first call, the same ever after."""
        if self._storage is None:
            buffers = None
            kind: MemoryKind = "cuda" if self._device.type == "cuda" else "host"
            device = self._device.index or 0
            sizes = self._spec.region_bytes()
            what, nbytes = f"the KV cache of {self._spec.blocks} blocks", sum(sizes.values())
            if kind == "host":  # there what is not there may seem to be had, until it is written to
                room.check(room.Need(what, host=nbytes), _FEWER, sparing=False)
            try:
                if allocate is not None:
                    buffers = {
                        region: tensor_over(allocate(region, kind, device, size)) for region, size in sizes.items()
                    }
                constants = None
                if self._spec.scales is Scales.TENSOR:
                    keys, values = support.largest_kv(self._checkpoint.decoder)
                    constants = constant_scales(keys), constant_scales(values)
                storage = PagedKV(self._spec, self._device, buffers, constants)
            except (MemoryError, RuntimeError) as error:
                if not _out_of_memory(error):
                    raise
                raise SettingsError(
                    f"{what} takes {quantities.size(nbytes)}, which was not to be had{self._free()}. {_FEWER}",
                    key="engine.options.blocks", origin=None,
                ) from error  # fmt: skip
            self._build(storage)
        assert self._storage is not None
        return self._storage.regions()

    def _free(self) -> str:
        if self._device.type != "cuda":
            return ""
        free, _ = torch.cuda.mem_get_info(self._device)
        return f": of memory that is free on CUDA device {self._device.index or 0} there is {quantities.size(free)}"

    def _build(self, storage: PagedKV) -> None:
        options = self._options
        runner = Runner(self._checkpoint.model, storage, Batching(options.batching))
        whole = runner.chunk_invariant
        identity = repr(sorted(self._checkpoint.identity.items())).encode()
        cache = KVCache(
            blocks=self._spec.blocks,
            block_tokens=self._spec.block_tokens,
            planes=self._spec.planes,
            slots=self._spec.final_slots,
            identity=identity,
            # A result that depends on chunking depends on what was found in the cache, too.
            prefix_caching=options.prefix_caching and whole,
        )
        speculates = options.speculation != "off" and self.role is not Role.PREFILL
        if speculates and not whole:
            raise ConfigurationError(
                "speculation does not work with a SHARED looped model: its results depend on how tokens are cut into"
                ' chunks. Set speculation to "off", or loop in the layout last_exited.'
            )
        limits = Limits(
            prefill_chunk=options.prefill_chunk if whole else None,
            max_batch_tokens=options.max_batch_tokens,
            max_running=options.max_running,
            replay_singly=not whole or runner.batching is Batching.ISOLATED,
            draft_tokens=options.draft_tokens if speculates else 0,
        )
        self._scheduler = Scheduler(cache, limits, self._place, self._may, self._draft if speculates else None)
        # A2: P has nothing to sample with.
        self._generator = (
            None
            if self.role is Role.PREFILL
            else Generator(runner, self._checkpoint.end_token_ids, self._open_tokenizer)
        )
        # last: what could not be built holds nothing, and an engine without it is closed as any other
        self._storage, self._runner, self._cache = storage, runner, cache

    def attach(self, callbacks: StageCallbacks) -> None:
        self._callbacks = callbacks

    @property
    def _stage(self) -> StageCallbacks:
        if self._callbacks is None:
            raise LocalProtocolError("attach() the engine's callbacks before its first transfer")
        return self._callbacks

    def capacity(self) -> Capacity:
        options, spec = self._options, self._spec
        return Capacity(
            blocks=spec.blocks * spec.planes,
            compute_slots=options.max_running,
            transfer_slots=options.transfer_slots,
            block_tokens=spec.block_tokens,
            max_tokens=self._max_tokens,
            planes=spec.planes,
        )

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, transfer: TransferId, request: Request) -> None:
        """COLOCATED: queue a request; ``step`` reports its tokens, and its memory is free again after the last.

        Raises :class:`~kvbaton.errors.RequestRefused` where it can never be served.
        """
        if self.role is not Role.COLOCATED:
            raise LocalProtocolError(f"a {self.role.value} engine takes requests by reserve_transfer")
        self._new(transfer)
        if refusal := self._never(request):
            raise refusal
        job = self._jobs[transfer] = Job(transfer, request)
        self._scheduler.submit(job)

    def reserve_transfer(self, admission: Admission) -> None:
        transfer, request = admission.transfer, admission.request
        if self.role is Role.COLOCATED:
            raise LocalProtocolError("a colocated engine takes requests by add")
        self._new(transfer)
        if refusal := self._never(request):
            self._stage.refused(transfer, str(refusal), False)
            return
        job = Job(transfer, request)
        if self.role is Role.PREFILL:
            self._jobs[transfer] = job
            self._scheduler.submit(job)
        elif reason := self._reserve(job):
            self._stage.refused(transfer, reason, True)
        else:
            self._jobs[transfer] = job
            if (event := self._event()) is None:
                self._answer(job)
            else:
                self._unquiet.append((event, job))

    def accept_import(self, transfer: TransferId, valid: int) -> None:
        job = self._jobs.get(transfer)
        if job is None or job.phase is not Phase.RESERVED:
            return
        self._cache.complete_import(job.held, valid)
        assert self._storage is not None and job.slot is not None and job.lease is not None  # noqa: PT018
        job.final = self._storage.read_final(job.slot)
        self._cache.slots.give(job.slot)
        job.slot = None
        job.lease.end()
        job.lease = None
        self._scheduler.submit(job)

    def suspend_transfer(self, transfer: TransferId) -> DeviceEvent | None:
        job = self._jobs.get(transfer)
        if job is None:
            return None
        self._scheduler.park(job)
        return self._event()

    def release_transfer_compute(self, transfer: TransferId) -> None:
        job = self._jobs.get(transfer)
        if job is not None and self.role is Role.PREFILL:
            self._scheduler.park(job)

    def release_transfer(self, transfer: TransferId) -> None:
        job = self._jobs.pop(transfer, None)
        if job is None:
            return
        self._scheduler.park(job)
        self._unquiet = [(event, other) for event, other in self._unquiet if other is not job]
        job.final = job.ahead = job.lookup = None
        if job.lease is not None:
            job.lease.end()
            job.lease = None
        if job.sequence is not None and job.sequence.state is not SequenceState.FREED:
            self._cache.free(job.sequence)
        if job.slot is not None:
            self._cache.slots.give(job.slot)
            job.slot = None

    # -- a step --------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return not self._closed and (bool(self._unquiet) or self._scheduler.has_work())

    def step(self) -> Sequence[StepOutput]:
        """One forward over whatever the scheduler chose; at a GPU the caller's thread waits for it only to sample."""
        self._answer_quiet()
        plan = self._scheduler.plan()
        if self.role is Role.DECODE:
            for job in plan.activated:
                self._stage.activated(job.transfer)
        results = self._compute(plan.work)
        outputs = [self._fail(r.work.job, r.error) for r in results if r.error is not None]
        done = [r for r in results if r.error is None]
        for result in done:
            self._cache.advance(result.work.job.held, result.work.start + result.work.count)
        if self.role is Role.PREFILL:
            self._report(done)
            return outputs
        for work, hidden, depth, _, ahead in done:
            job = work.job
            # While a preempted request is recomputed, its next token waits; a final payload it still has stays the one.
            if job.held.valid == job.length and job.final is None:
                job.final, job.ahead = (hidden, depth), ahead
        ready = [*plan.samples, *(r.work.job for r in done)]
        outputs.extend(self._sample([job for job in ready if job.final and job.held.valid == job.length]))
        return outputs

    def _compute(self, work: Sequence[Work]) -> list[_Result]:
        if not work:
            return []
        rows = [
            Row(
                tokens=[*w.job.held.tokens[w.start : w.start + w.count], *w.draft],
                start=w.start,
                tables=w.job.held.tables,
                every=bool(w.draft),
            )
            for w in work
        ]
        try:
            return _results(work, self._runner.forward(rows))
        except Exception as error:
            if len(work) == 1:
                if work[0].draft:  # a guess never costs a request its life
                    return self._compute([replace(work[0], draft=())])
                return [_Result(work[0], None, 0, error)]
        # One request's fault is not the others': compute each alone.  What is written twice is written alike.
        return [result for w in work for result in self._compute([w])]

    def _report(self, done: Sequence[_Result]) -> None:
        """P: tell the stage which ranges will be final once the device is through (C3.7)."""
        assert self._storage is not None
        ends = {r.work.job: r.work.start + r.work.count for r in done}
        for work, hidden, depth, _, _ in done:
            job = work.job
            if ends[job] == len(job.request.prompt):
                assert hidden is not None and job.slot is not None  # noqa: PT018
                self._storage.write_final(job.slot, hidden, depth)
                self._scheduler.prefilled(job)
        ready = self._event() if done else None
        for job, end in ends.items():
            assert job.slot is not None
            start, job.reported = job.reported, end
            self._stage.prefill_submitted(
                ComputedRange(
                    transfer=job.transfer,
                    start=start,
                    end=end,
                    tables=job.held.arrays(),
                    ready=ready,
                    last=end == len(job.request.prompt),
                    final_slot=job.slot,
                    cached=job.cached,
                )
            )

    def _sample(self, jobs: Sequence[Job]) -> list[StepOutput]:
        """Turn each job's final payload into its next token, and as many of its drafts as that confirms into more."""
        if not jobs:
            return []
        assert self._generator is not None
        states = [(job, *_states(job)) for job in jobs]
        try:
            # Sample n of a request is the same whether it comes alone or with others: a draft is kept if the ordinary
            # sampler would have chosen it (A1).
            tokens = self._generator.draw(
                [hidden for _, hiddens, _ in states for hidden in hiddens],
                [job.request for job, hiddens, _ in states for _ in hiddens],
                [len(job.generated) + place for job, hiddens, _ in states for place in range(len(hiddens))],
            )
        except Exception as error:
            if len(jobs) > 1:
                return [output for job in jobs for output in self._sample([job])]
            if jobs[0].ahead is None:
                return [self._fail(jobs[0], error)]
            jobs[0].ahead = None
            return self._sample(jobs)
        chosen = iter(tokens)
        return [self._extend(job, [next(chosen) for _ in depths], depths) for job, _, depths in states]

    def _extend(self, job: Job, chosen: Sequence[int], depths: Sequence[int]) -> StepOutput:
        """Go on with ``chosen``: what is sampled next, then what would be sampled behind each draft in turn."""
        assert self._generator is not None
        draft = () if job.ahead is None else job.ahead.tokens
        job.final = job.ahead = None
        reason, taken, accepted = None, 0, 0
        try:
            for token, guess in zip(chosen, (*draft, None), strict=True):
                job.generated.append(token)
                self._cache.append(job.held, [token])
                taken += 1
                accepted += token == guess
                reason = self._generator.reason(job.request, job.generated)
                if reason is not None or token != guess:
                    break
            # Of what was computed ahead all but the last token taken is in place; the rest is void.
            self._cache.advance(job.held, job.length - 1)
            self._cache.trim(job.held, job.length - 1)
        except Exception as error:
            return self._fail(job, error)
        self._drafted += len(draft)
        self._accepted += accepted
        if reason is not None:
            self._end(job)
        return StepOutput(job.transfer, tuple(chosen[:taken]), tuple(depths[:taken]), reason)

    def _fail(self, job: Job, error: Exception) -> StepOutput:
        self._end(job)
        return StepOutput(job.transfer, error=error)

    def _end(self, job: Job) -> None:
        """Nothing more is computed.  A stage says when the memory may go (C5.2); alone, that is now."""
        self._scheduler.park(job)
        if self.role is Role.COLOCATED:
            self.release_transfer(job.transfer)

    # -- profiling -----------------------------------------------------------------------------------------------------

    def start_profile(self, stem: Path) -> None:
        """Trace every operation, by torch's own profiler.  The trace grows with each of them, and is kept in memory.

        Raises :class:`~kvbaton.errors.ProfilingError` where another engine of this process is traced.
        """
        if not _TRACED.acquire(blocking=False):
            raise ProfilingError("torch traces one engine of a process at a time, and another one is being traced")
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        try:
            profiler = torch.profiler.profile(activities=kinds)
            profiler.start()
        except BaseException:
            _TRACED.release()
            raise
        self._profiler = profiler, stem.with_name(f"{stem.name}.trace.json")

    def stop_profile(self) -> Sequence[Path]:
        """The trace, in Chrome's format, which Perfetto shows as well."""
        if self._profiler is None:
            return []
        (profiler, path), self._profiler = self._profiler, None
        try:
            profiler.stop()
            _export(profiler, path)
        finally:
            _TRACED.release()
        return [path]

    # -- figures and the end -------------------------------------------------------------------------------------------

    def statistics(self) -> Mapping[str, float]:
        """Blocks over all planes (free + used + leased + prefix = total), slots, queues."""
        books = self._cache.statistics()
        return {
            "blocks_total": books.total,
            "blocks_free": books.free,
            "blocks_used": books.used,
            "blocks_leased": books.leased,
            "blocks_prefix": books.prefix,
            "blocks_under_lease": books.under_lease,
            "blocks_promised": books.promised,
            "final_slots_total": books.slots_total,
            "final_slots_free": books.slots_free,
            "transfers": len(self._jobs),
            "requests_waiting": self._scheduler.waiting,
            "requests_running": self._scheduler.running,
            "preemptions_total": self._scheduler.preemptions,
            "draft_tokens_total": self._drafted,
            "draft_tokens_accepted_total": self._accepted,
        }

    def check(self) -> None:
        """Raise :class:`~kvbaton.errors.CacheError` unless every block and slot is accounted for (C8)."""
        self._cache.check()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._profiler is not None:
                (profiler, _), self._profiler = self._profiler, None
                profiler.stop()
                _TRACED.release()
            self._jobs.clear()
            self._unquiet.clear()
            # Regions that were handed out keep their tensors alive.
            del self._checkpoint
            if self._storage is not None:
                self._storage = None
                del self._runner, self._generator

    # -- inside --------------------------------------------------------------------------------------------------------

    def _new(self, transfer: TransferId) -> None:
        if self._closed or self._storage is None:
            raise LocalProtocolError("the engine is closed" if self._closed else "call regions() first")
        if transfer in self._jobs:
            raise LocalProtocolError(f"transfer {transfer} is here already; each has its own id", transfer=transfer)

    def _never(self, request: Request) -> RequestRefused | None:
        """Why a request can never be served here."""
        try:
            request.check()
        except RequestRefused as refusal:
            return refusal
        tokens = len(request.prompt) if self.role is Role.PREFILL else request.max_length
        if tokens > self._max_tokens:
            growth = "" if self.role is Role.PREFILL else f" and {request.sampling.max_tokens} more"
            return PromptTooLong(
                f"a prompt of {len(request.prompt)} tokens{growth} does not fit: the {self.role.value} engine holds"
                f" sequences of at most {self._max_tokens} tokens ({self._spec.blocks} blocks of"
                f" {self._spec.block_tokens}, and what the model permits)", tokens=tokens, limit=self._max_tokens,
            )  # fmt: skip
        strange = [token for token in request.prompt if not 0 <= token < self._vocabulary]
        if strange:
            reason = f"token ids {strange[:5]} are outside of the model's vocabulary of {self._vocabulary}"
            return RequestRefused(reason, reason=reason)
        return None

    def _reserve(self, job: Job) -> str | None:
        """D: hold memory for the whole prompt and the final payload, or say why not now; nothing is held then."""
        if self._scheduler.short_of_memory:
            return "requests that were preempted wait for memory"
        slot = self._cache.slots.take()
        if slot is None:
            return f"all {self._spec.final_slots} transfer slots are taken"
        prompt = job.request.prompt
        # D computes nothing of the prompt, so that all of it may be shared.
        try:
            sequence = self._cache.open_import(prompt, job.request.max_length)
        except CacheError:
            self._cache.slots.give(slot)
            raise
        if sequence is None:
            self._cache.slots.give(slot)
            needed = self._cache.blocks_for(len(prompt))
            return f"{needed} blocks are needed and {self._cache.available} of {self._spec.blocks} are to be had"
        job.phase, job.sequence, job.slot = Phase.RESERVED, sequence, slot
        job.lease = self._cache.lease(sequence)
        return None

    def _place(self, job: Job) -> bool:
        """P and COLOCATED: memory for a new job that got a compute slot; P leases it for its transfer at once."""
        slot = None
        if self.role is Role.PREFILL:
            slot = self._cache.slots.take()
            if slot is None:
                return False
        prompt = job.request.prompt
        # C3.4: the last prompt token is computed always; cached KV alone has no final payload.
        budget = len(prompt) if self.role is Role.PREFILL else job.request.max_length
        job.sequence = self._cache.open(prompt, budget, reuse=len(prompt) - 1)
        if job.sequence is None:
            if slot is not None:
                self._cache.slots.give(slot)
            return False
        job.cached = job.sequence.valid
        if slot is not None:
            job.slot, job.lease = slot, self._cache.lease(job.sequence)
        return True

    def _draft(self, job: Job, most: int) -> Sequence[int]:
        if job.lookup is None:
            job.lookup = PromptLookup(self._options.ngram)
        return job.lookup.draft(job.held.tokens, most)

    def _may(self, job: Job, tokens: int) -> bool:
        return self.role is not Role.PREFILL or self._stage.can_schedule(job.transfer, tokens)

    def _event(self) -> DeviceEvent | None:
        """Completes when all device work queued so far has; None on the host, where it has."""
        if self._device.type != "cuda":
            return None
        with torch.cuda.device(self._device):
            event = torch.cuda.Event()
            event.record()
            done: DeviceEvent = event
        return done

    def _answer(self, job: Job) -> None:
        tables = tuple(tuple(table) for table in job.held.tables)
        assert job.slot is not None
        self._stage.reserved(Reservation(job.transfer, tables, job.held.valid, job.slot))

    def _answer_quiet(self) -> None:
        for event, job in [(event, job) for event, job in self._unquiet if event.query()]:
            self._unquiet.remove((event, job))
            self._answer(job)


def _out_of_memory(error: Exception) -> bool:
    """Whether memory was not to be had: on the host torch has no error of its own for that."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def _results(work: Sequence[Work], forward: Forward) -> list[_Result]:
    results = []
    for w, hidden, depths, every in zip(work, forward.hidden, forward.exit_depths, forward.every, strict=True):
        ahead = None
        if every is not None:
            hidden, ahead = every[w.count - 1], _Ahead(w.draft, every[w.count :], depths[w.count :])
        results.append(_Result(w, hidden, depths[w.count - 1], None, ahead))
    return results


def _states(job: Job) -> tuple[list[torch.Tensor], list[int]]:
    """Hidden states and exit depths of the latest token and of the drafts behind it."""
    assert job.final is not None
    hidden, depth = job.final
    if job.ahead is None:
        return [hidden], [depth]
    return [hidden, *job.ahead.hidden], [depth, *job.ahead.depths]


def _export(profiler: torch.profiler.profile, path: Path) -> None:
    """The whole trace under its name, or nothing (a disk that is full, of which torch says no word)."""
    part = path.with_name(f"{path.name}.part")
    try:
        profiler.export_chrome_trace(str(part))
        part.chmod(0o600)
        with part.open("rb") as written:
            written.seek(max(part.stat().st_size - 8, 0))
            if not written.read().rstrip().endswith(b"}"):
                raise ProfilingError(f"the trace {path} could not be written whole: is the disk full?")
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
