"""The engine: what a stage asks of it, and what it answers.

A stage calls it from one thread, between steps, and never re-entered; nothing here may wait for a peer.  A call about a
transfer that is unknown or released does nothing (C1.2).  The same class serves in three roles: P computes prompts and
reports what is final, D takes over where P ended, and COLOCATED does both, for comparison.

Who owns which block is kept by :class:`kvbaton.cache.KVCache`, which is for engines that have no paged cache of their
own.  An engine that has one puts it in its place: what must hold is said at each call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbaton.cache import KVCache, KVSequence, Lease
from kvbaton.connector import DeviceEvent, MemoryRegion
from kvbaton.engine import (
    Admission,
    Allocator,
    ComputedRange,
    FinishReason,
    Request,
    Role,
    StageCallbacks,
    StepOutput,
)
from kvbaton.geometry import Component, KVGeometry, Plane
from kvbaton.identity import TransferId
from kvbaton.reservation import Capacity, Reservation
from kvbaton_engine_skeleton import SkeletonOptions, toy

_FLOAT = 4  # bytes


@dataclass(eq=False)
class Part:
    """This engine's part in one transfer, from ``reserve_transfer`` to ``release_transfer``."""

    admission: Admission
    sequence: KVSequence
    #: Keeps its blocks from being freed or preempted while a remote read or write may touch them (C8.1).
    lease: Lease
    #: Its row among the final payloads; None once D has copied it out.
    slot: int | None
    #: P: leading tokens of the prompt that were reported.
    reported: int = 0
    #: D: what the next token is chosen from: P's final payload at first.
    hidden: toy.Floats = field(default_factory=lambda: np.zeros(toy.WIDTH, np.float32))
    tokens: list[int] = field(default_factory=list)
    active: bool = False
    suspended: bool = False


class SkeletonEngine:
    """A :class:`~kvbaton.engine.StageEngine` over :mod:`~kvbaton_engine_skeleton.toy`, in host memory."""

    def __init__(self, options: SkeletonOptions, role: Role) -> None:
        self.role = role
        self._options = o = options
        row = toy.WIDTH * _FLOAT
        half = o.block_tokens * row  # a block is K of its tokens, then V of its tokens
        # What a peer must know of our memory.  `identity` is whatever makes KV comparable: two stages must agree on it,
        # on block_tokens and on the components; blocks, strides, bases and regions may differ (C3.5).
        self.geometry = KVGeometry(
            identity={"model": "toy", "dtype": "float32"},
            block_tokens=o.block_tokens,
            planes=(
                Plane(
                    "kv",
                    (
                        Component(region=0, base=0, block_stride=2 * half, token_bytes=row, dtype="float32"),
                        Component(region=0, base=half, block_stride=2 * half, token_bytes=row, dtype="float32"),
                    ),
                    blocks=o.blocks,
                ),
            ),
            # What D needs besides KV to choose the first token, so that P never samples (A2): here the hidden state
            # behind the last prompt token.  0 bytes where D computes the last prompt token again.
            final_bytes=row, final_region=1, final_base=0, final_stride=row, final_slots=o.transfer_slots,
        )  # fmt: skip
        self._cache = KVCache(blocks=o.blocks, block_tokens=o.block_tokens, slots=o.transfer_slots, identity=b"toy")
        self._parts: dict[TransferId, Part] = {}
        #: Whose turn it is to be computed, in order.  Reserved alone is no work (C2.3), nor is what was suspended.
        self._queue: list[Part] = []

    # -- set-up --------------------------------------------------------------------------------------------------------

    def regions(self, allocate: Allocator | None) -> Sequence[MemoryRegion]:
        """Where the cache lies.  A transport that can only reach memory of its own hands us some; else it is ours."""
        o = self._options
        shapes = ((o.blocks, 2, o.block_tokens, toy.WIDTH), (o.transfer_slots, toy.WIDTH))
        regions = []
        for id, shape in enumerate(shapes):
            if allocate is None:
                regions.append(MemoryRegion.of_array(id, np.zeros(shape, np.float32)))
            else:
                regions.append(allocate(id, "host", 0, int(np.prod(shape)) * _FLOAT))
        self._regions = regions  # a region keeps its memory alive
        self._kv, self._finals = (
            region.view().view(np.float32).reshape(shape) for region, shape in zip(regions, shapes, strict=True)
        )
        return regions

    def attach(self, callbacks: StageCallbacks) -> None:
        self._tell = callbacks

    def capacity(self) -> Capacity:
        """What credits are made of (C2.4)."""
        o = self._options
        return Capacity(
            blocks=o.blocks, compute_slots=o.max_running, transfer_slots=o.transfer_slots, block_tokens=o.block_tokens,
            max_tokens=o.max_tokens,
        )  # fmt: skip

    # -- transfers -----------------------------------------------------------------------------------------------------

    def reserve_transfer(self, admission: Admission) -> None:
        """Memory for all that this side will ever need of it, or a refusal that holds nothing."""
        transfer, request = admission.transfer, admission.request
        if transfer in self._parts:
            return
        # P holds the prompt, D also what is generated: growth is promised now, so that it is there later (C2.4).
        most = len(request.prompt) if self.role is Role.PREFILL else request.max_length
        if most > self._options.max_tokens or self._cache.blocks_for(most) > self._options.blocks:
            self._tell.refused(transfer, f"{most} tokens never fit", retry=False)
            return
        if request.sampling.stop:
            self._tell.refused(transfer, "the skeleton knows no stop texts; use stop_token_ids", retry=False)
            return
        part = self._open(admission, most)
        if part is None:
            self._tell.refused(transfer, "no room now", retry=True)
            return
        if self.role is Role.PREFILL:
            self._queue.append(part)  # it starts by itself and reports what it has computed
            return
        # D may say so at once because nothing of ours still writes there: numpy is done when it returns.  An engine
        # with a device says it when all work that was launched on those blocks and that slot has completed (C2.7).
        assert part.slot is not None
        tables = tuple(tuple(int(block) for block in table) for table in part.sequence.tables)
        self._tell.reserved(Reservation(transfer, tables, part.sequence.valid, part.slot))

    def accept_import(self, transfer: TransferId, valid: int) -> None:
        """D: every byte of tokens ``[0, valid)`` and of the final payload has arrived."""
        part = self._parts.get(transfer)
        if part is None or part.suspended or part.slot is None:  # unknown, stopped, or imported already
            return
        self._cache.complete_import(part.sequence, valid)  # valid only now, and shareable only now (C8.3)
        part.hidden = self._finals[part.slot].copy()
        self._give_slot(part)
        part.lease.end()
        self._queue.append(part)  # and from now on it is a request like any other

    def suspend_transfer(self, transfer: TransferId) -> DeviceEvent | None:
        """Compute no more of it, keep all bytes.  Returns what completes once launched work has; here it has (C5.3)."""
        part = self._parts.get(transfer)
        if part is not None:
            part.suspended = True
            self._drop(part)
        return None

    def release_transfer_compute(self, transfer: TransferId) -> None:
        """P has computed it all: free what only computing needs.  Here that is nothing; KV and the final slot stay."""

    def release_transfer(self, transfer: TransferId) -> None:
        """The only call that gives memory back: core has proof that nobody reads or writes it (C5.1, C5.2)."""
        part = self._parts.pop(transfer, None)
        if part is None:
            return
        self._drop(part)
        if part.lease.live:
            part.lease.end()
        self._give_slot(part)
        self._cache.free(part.sequence)

    # -- computing -----------------------------------------------------------------------------------------------------

    def add(self, transfer: TransferId, request: Request) -> None:
        """COLOCATED: the same scheduler and the same chunks, without a hand-off."""
        part = self._open(Admission(transfer, request), request.max_length)
        if part is None:
            raise MemoryError("the skeleton's cache is full; raise engine.options.blocks")
        self._queue.append(part)

    def has_work(self) -> bool:
        return any(self._may_run(part) for part in self._queue)

    def step(self) -> Sequence[StepOutput]:
        """A forward of the oldest requests.  One request's fault is its own, never an exception (C6.3)."""
        outputs: list[StepOutput] = []
        for part in [part for part in self._queue if self._may_run(part)][: self._options.max_running]:
            try:
                if part.sequence.valid < len(part.admission.request.prompt):
                    self._prefill(part)
                else:
                    outputs.append(self._decode(part))
            except Exception as error:
                self._drop(part)
                outputs.append(StepOutput(part.admission.transfer, error=error))
        return outputs

    def _may_run(self, part: Part) -> bool:
        """P asks before it computes: a wire that is full makes it wait (T6)."""
        if self.role is not Role.PREFILL:
            return True
        left = len(part.admission.request.prompt) - part.sequence.valid
        return self._tell.can_schedule(part.admission.transfer, min(left, self._options.prefill_chunk))

    def _prefill(self, part: Part) -> None:
        prompt = part.admission.request.prompt
        cached = part.sequence.valid if not part.reported else 0
        end = min(part.sequence.valid + self._options.prefill_chunk, len(prompt))
        part.hidden = self._forward(part.sequence, end)
        last = end == len(prompt)
        if self.role is Role.PREFILL:
            if last:
                assert part.slot is not None
                self._finals[part.slot] = part.hidden
                self._queue.remove(part)
            # Nobody writes [reported, end) again (C3.7), so it may be sent.  What was found in the prefix cache is part
            # of the first range (C3.3).  `ready` is the device event behind what was launched; None: it is done.
            self._tell.prefill_submitted(
                ComputedRange(
                    part.admission.transfer, part.reported, end, part.sequence.arrays(), ready=None, last=last,
                    final_slot=part.slot or 0, cached=cached,
                )
            )  # fmt: skip
        part.reported = end

    def _decode(self, part: Part) -> StepOutput:
        transfer, sampling = part.admission.transfer, part.admission.request.sampling
        if not part.active:
            part.active = True
            if self.role is Role.DECODE:
                self._tell.activated(transfer)  # it has a compute slot, which the import alone did not give it (C2.3)
        if part.tokens:  # the first token is chosen from the final payload alone
            self._cache.append(part.sequence, part.tokens[-1:])
            if not self._cache.ensure(part.sequence, len(part.sequence.tokens)):
                raise MemoryError("C2.4: promised growth is not there")
            part.hidden = self._forward(part.sequence, len(part.sequence.tokens))
        token = toy.choose(part.hidden, sampling, part.sequence.valid)
        part.tokens.append(token)
        reason = None
        if token in sampling.stop_token_ids:
            reason = FinishReason.STOP
        elif len(part.tokens) == sampling.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._drop(part)  # D's memory stays until release_transfer: its device may still be at work
            if self.role is Role.COLOCATED:
                self.release_transfer(transfer)
        return StepOutput(transfer, (token,), finish_reason=reason)

    def _forward(self, sequence: KVSequence, end: int) -> toy.Floats:
        """Write K and V of tokens ``[valid, end)``; the hidden state behind the last.  Fill in: your forward."""
        start = sequence.valid
        blocks = np.array(sequence.tables[0])
        where, row = np.divmod(np.arange(end), self._options.block_tokens)
        keys, values = toy.keys_and_values(sequence.tokens[start:end], start)
        self._kv[blocks[where[start:]], 0, row[start:]] = keys
        self._kv[blocks[where[start:]], 1, row[start:]] = values
        self._cache.advance(sequence, end)
        return toy.attend(
            sequence.tokens[end - 1], end - 1, self._kv[blocks[where], 0, row], self._kv[blocks[where], 1, row]
        )

    # -- books ---------------------------------------------------------------------------------------------------------

    def _open(self, admission: Admission, most: int) -> Part | None:
        """Blocks for the prompt, a promise of the rest, a lease and a slot; or nothing at all."""
        prompt = admission.request.prompt
        room = self._cache.available - self._cache.statistics().promised
        if not self._cache.slots.free or self._cache.blocks_for(most) > room:
            return None
        if self.role is Role.DECODE:
            sequence = self._cache.open_import(prompt, most)
        else:  # the last token is always computed: its KV alone makes no first token (C3.4)
            sequence = self._cache.open(prompt, most, reuse=len(prompt) - 1)
        if sequence is None:
            return None
        part = Part(admission, sequence, self._cache.lease(sequence), self._cache.slots.take())
        self._parts[admission.transfer] = part
        return part

    def _drop(self, part: Part) -> None:
        """Its computing is over."""
        if part in self._queue:
            self._queue.remove(part)

    def _give_slot(self, part: Part) -> None:
        if part.slot is not None:
            self._cache.slots.give(part.slot)
            part.slot = None

    def statistics(self) -> Mapping[str, float]:
        books = self._cache.statistics()
        return {
            "blocks_free": books.free,
            "blocks_used": books.used,
            "blocks_leased": books.leased,
            "blocks_prefix": books.prefix,
            "blocks_promised": books.promised,
            "final_slots_free": books.slots_free,
            "transfers": len(self._parts),
        }

    def close(self) -> None:
        """Drop model and storage; a region that the transport still holds keeps its memory."""
        self._queue.clear()
        self._parts.clear()
        self._regions = []
