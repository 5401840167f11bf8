"""An engine without a model: real memory, real block tables, arithmetic in place of attention.

:class:`ScriptedModel` defines, by hashing alone, what the KV bytes of a token are (a function of all tokens up to it,
the plane and the component) and which token follows from the *bytes* of a whole cache and a final payload.  So a
decode stage that received one wrong byte answers with other tokens, and :meth:`ScriptedModel.generate` says what the
right ones are without any memory at all.

:class:`ScriptedEngine` is a :class:`~kvbaton.engine.StageEngine` over that model: paged memory, prefix reuse, chunked
prefill, worst-case growth budgets, device events under a test's control.  Freed blocks are poisoned, and a block that
is handed out again with its poison disturbed is reported in :attr:`ScriptedEngine.late_writes`: the byte-level witness
of C5.2.

Threading: as every engine; :class:`ScriptedDevice` may be driven from any thread.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvbaton.connector import DeviceEvent, MemoryKind, MemoryRegion
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
from kvbaton.reservation import Capacity, Reservation, Tables
from kvbaton_conformance import device_memory

_MASK = (1 << 64) - 1
_POISON = 0xDD
_POISON_BYTE = bytes([_POISON])
#: Between two looks at what holds an engine.
_HELD_SECONDS = 0.001

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


def _mix(x: int) -> int:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


_ADD, _FIRST, _SECOND = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)
_30, _27, _31 = np.array([30, 27, 31], np.uint64)


def _mix_words(x: Words) -> Words:
    """:func:`_mix` of each element; uint64 arithmetic wraps, which is what is wanted."""
    x = x + _ADD
    x = (x ^ (x >> _30)) * _FIRST
    x = (x ^ (x >> _27)) * _SECOND
    x = x ^ (x >> _31)
    return x


@lru_cache(256)
def _places(first: int, count: int) -> Words:
    """A weight for each of ``count`` positions from ``first`` on."""
    return _mix_words(np.arange(first, first + count, dtype=np.uint64)) | np.uint64(1)


# -- the model -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptedModel:
    """Arithmetic that stands for a model.  Two stages must share one (it is the geometry's identity)."""

    seed: int = 1
    planes: int = 1
    #: Bytes per token of each component of a plane, e.g. K and V of every layer.
    token_bytes: tuple[int, ...] = (16, 16, 12, 12)
    final_bytes: int = 24
    vocabulary: int = 50_000

    def histories(self, tokens: Sequence[int]) -> Words:
        """Per position, a hash of all tokens up to and including it.  Shape ``[len(tokens)]``."""
        state, out = _mix(self.seed), []
        for token in tokens:
            state = _mix(state ^ token)
            out.append(state)
        return np.array(out, dtype=np.uint64)

    def extend(self, history: int, token: int) -> int:
        return _mix(history ^ token)

    def kv(self, plane: int, histories: Words) -> Bytes:
        """The bytes of every component, one after the other, for each position.

        Shape ``[len(histories), sum(token_bytes)]``.
        """
        salts, counts, columns = self._words[plane]
        words = _mix_words((histories[:, None] ^ salts) + counts)
        return words.view(np.uint8)[:, columns]

    @cached_property
    def _words(self) -> list[tuple[Words, Words, npt.NDArray[np.int64]]]:
        """Per plane, of the words that its bytes are cut from: salts, numbers within their component; and which bytes
        of theirs are used."""
        counts = [np.arange(-(-width // 8), dtype=np.uint64) for width in self.token_bytes]
        starts = np.cumsum([0, *(8 * len(count) for count in counts)])
        columns = np.concatenate([start + np.arange(w) for start, w in zip(starts, self.token_bytes, strict=False)])
        return [
            (
                np.concatenate([np.full_like(count, _mix((plane << 20) | c)) for c, count in enumerate(counts)]),
                np.concatenate(counts),
                columns,
            )
            for plane in range(self.planes)
        ]

    @cached_property
    def _weights(self) -> list[Words]:
        """Per plane, one for each byte of a token."""
        return [
            np.concatenate(
                [
                    _mix_words(np.arange(width, dtype=np.uint64) + np.uint64((plane << 40) | (component << 24)))
                    for component, width in enumerate(self.token_bytes)
                ]
            )
            for plane in range(self.planes)
        ]

    def final(self, history: int) -> Bytes:
        """The final payload behind the last prompt token.  Shape ``[final_bytes]``."""
        words = _mix_words(np.uint64(history ^ 0x5EED) + np.arange(-(-self.final_bytes // 8) or 1, dtype=np.uint64))
        return words.view(np.uint8)[: self.final_bytes]

    def digest(self, plane: int, rows: Bytes, first: int) -> int:
        """What ``rows`` (as of :meth:`kv`, positions ``first`` on) contribute to the state that decides the next token:
        every byte counts."""
        values = (rows.astype(np.uint64) + np.uint64(1)) @ self._weights[plane]
        return int(values @ _places(first, len(rows)))

    def choose(self, digest: int, final: Bytes, seed: int) -> tuple[int, int]:
        """The next token id and its exit depth, from everything the cache holds."""
        state = _mix(digest ^ int.from_bytes(final.tobytes()[:8], "little") ^ _mix(seed) ^ _mix(int(final.sum())))
        return state % self.vocabulary, 1 + (state >> 40) % self.planes

    def generate(self, request: Request) -> tuple[tuple[int, ...], tuple[int, ...], FinishReason]:
        """What an undisaggregated run answers: token ids, exit depths, finish reason."""
        histories = self.histories(request.prompt)
        state, final = int(histories[-1]), self.final(int(histories[-1]))
        digest = self._contribution(histories, 0)
        position, tokens, depths = len(histories), [], []
        while True:
            token, depth = self.choose(digest, final, request.sampling.seed)
            tokens.append(token)
            depths.append(depth)
            reason = finish_reason(request, tokens)
            if reason is not None:
                return tuple(tokens), tuple(depths), reason
            state = self.extend(state, token)
            digest = (digest + self._contribution(np.array([state], dtype=np.uint64), position)) & _MASK
            final = self.final(state)  # so that a request which goes on from its own answer gets the rest of it
            position += 1

    def _contribution(self, histories: Words, first: int) -> int:
        return sum(self.digest(plane, self.kv(plane, histories), first) for plane in range(self.planes)) & _MASK


def finish_reason(request: Request, tokens: Sequence[int]) -> FinishReason | None:
    """Whether ``tokens`` end the request."""
    if tokens[-1] in request.sampling.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(tokens) >= request.sampling.max_tokens else None


# -- the device ------------------------------------------------------------------------------------------------------


class ScriptedDevice:
    """Device work under a test's control: events complete in order, when told to.

    ``automatic``: work is done as soon as it is launched, and no events are made.
    """

    def __init__(self, automatic: bool = True) -> None:
        self._lock = threading.Lock()
        self._pending: deque[_Event] = deque()
        self.automatic = automatic

    def event(self) -> DeviceEvent | None:
        """An event behind everything launched so far."""
        if self.automatic:
            return None
        event = _Event()
        with self._lock:
            self._pending.append(event)
        return event

    def pending(self) -> int:
        return len(self._pending)

    def complete(self, count: int | None = None) -> None:
        """Let the oldest ``count`` events (default: all) complete."""
        with self._lock:
            for _ in range(len(self._pending) if count is None else min(count, len(self._pending))):
                self._pending.popleft().done = True


@dataclass(eq=False)
class _Event:
    done: bool = False

    def query(self) -> bool:
        return self.done


# -- the engine ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScriptedLayout:
    """How much memory a :class:`ScriptedEngine` has and how it lies; may differ between two stages of one model."""

    blocks: int = 64
    block_tokens: int = 4
    #: Unused bytes between blocks, so that strides differ and strays are seen.
    gap: int = 0
    final_slots: int = 8
    compute_slots: int = 4
    max_tokens: int = 4096


@dataclass(eq=False)
class _Sequence:
    admission: Admission
    tables: list[list[int]]
    slot: int
    histories: Words
    shared: int = 0  # leading tokens in blocks that others may hold too: never written
    valid: int = 0  # tokens whose KV is in our memory
    reported: int = 0
    budget: int = 0  # blocks promised for growth and not yet taken
    suspended: bool = False
    active: bool = False
    computed: bool = False
    tokens: list[int] = field(default_factory=list)
    history: int = 0
    digest: int = 0
    final: Bytes = field(default_factory=lambda: np.zeros(0, np.uint8))


class ScriptedEngine:
    """A stage engine over a :class:`ScriptedModel`.  ``chunk`` is the number of prompt tokens computed per step and
    request.

    Faults on demand: a transfer in :attr:`fail_compute` (P), :attr:`fail_import` or :attr:`fail_decode` (D) fails
    there, one in :attr:`fail_range` (P) is reported in blocks that do not exist; :attr:`refuse` answers a reservation
    by refusing it, :attr:`refuse_for_ever` says that asking again is of no use.  While the file ``held_by`` exists, D
    gives each request its first token and no other: whatever is to happen to a request that runs can take its time.

    ``cuda``: the number of the CUDA device that its memory lies on; None: on the host.  It computes on the host all the
    same, and each access is a copy that is over when it returns.

    D says that memory is reserved once everything that its device was given before has completed (C2.7).
    """

    def __init__(
        self, role: Role, model: ScriptedModel | None = None, layout: ScriptedLayout | None = None, *, chunk: int = 8,
        device: ScriptedDevice | None = None, prefix_caching: bool = True, cuda: int | None = None,
        held_by: Path | None = None,
    ) -> None:  # fmt: skip
        self.role = role
        self._held_by = held_by
        self._cuda = cuda
        self.model = model or ScriptedModel()
        self.layout = layout or ScriptedLayout()
        self.chunk = chunk
        self.device = device or ScriptedDevice()
        self.prefix_caching = prefix_caching
        self.fail_compute: set[TransferId] = set()
        self.fail_import: set[TransferId] = set()
        self.fail_decode: set[TransferId] = set()
        self.fail_range: set[TransferId] = set()
        self.refuse: Callable[[Admission], str | None] = lambda admission: None
        self.refuse_for_ever = False
        #: Blocks whose poison was disturbed between free and reuse: (block, first changed byte).  Final slots count
        #: from -1 downwards; a block of a finished request whose bytes changed after they were imported counts, too.
        self.late_writes: list[tuple[int, int]] = []
        #: How many tokens this engine chose (A2: none on P).
        self.sampled = 0
        self._callbacks: StageCallbacks | None = None
        m, s = self.model, self.layout
        self._used_bytes = sum(m.token_bytes) * s.block_tokens
        self._stride = self._used_bytes + s.gap
        bases = np.concatenate(([0], np.cumsum(m.token_bytes)[:-1])) * s.block_tokens
        #: Where in a block the bytes of each of its tokens lie.  Shape ``[block_tokens, sum(token_bytes)]``.
        self._within = np.concatenate(
            [
                base + width * np.arange(s.block_tokens)[:, None] + np.arange(width)
                for base, width in zip(bases, m.token_bytes, strict=True)
            ],
            axis=1,
        )
        components = tuple(
            Component(region=0, base=int(base), block_stride=self._stride, token_bytes=width, dtype="uint8")
            for base, width in zip(bases, m.token_bytes, strict=True)
        )
        self.geometry = KVGeometry(
            identity={"model": f"scripted-{m.seed}", "vocabulary": str(m.vocabulary)},
            block_tokens=s.block_tokens,
            planes=tuple(Plane(name=f"depth{p}", components=components, blocks=s.blocks) for p in range(m.planes)),
            final_bytes=m.final_bytes, final_region=1, final_base=0, final_stride=max(m.final_bytes, 1),
            final_slots=s.final_slots,
        )  # fmt: skip
        self._memory: Bytes = np.zeros(0, np.uint8)
        self._finals: Bytes = np.zeros(0, np.uint8)
        self._free: deque[int] = deque(range(s.blocks))
        self._owners: dict[int, int] = {}  # block -> number of sequences that hold it
        self._cached: OrderedDict[int, tuple[int, ...]] = (
            OrderedDict()
        )  # prefix hash -> one block per plane, oldest first
        self._cached_blocks: dict[int, int] = {}  # block -> prefix hash
        self._promised = 0  # blocks of growth budgets not yet taken
        self._free_slots = list(range(s.final_slots))
        self._sequences: dict[TransferId, _Sequence] = {}
        self._queue: deque[TransferId] = deque()
        self._colocated: deque[tuple[TransferId, Request]] = deque()
        #: D: reserved, and not said because the device is not quiet yet.
        self._unquiet: list[tuple[DeviceEvent, TransferId]] = []

    # -- StageEngine: set-up -----------------------------------------------------------------------------------------

    def regions(self, allocate: Allocator | None) -> Sequence[MemoryRegion]:
        sizes = (self._stride * self.layout.blocks, max(self.model.final_bytes, 1) * self.layout.final_slots)
        kind: MemoryKind = "host" if self._cuda is None else "cuda"
        make = allocate or device_memory.allocate
        regions = [make(i, kind, self._cuda or 0, size) for i, size in enumerate(sizes)]
        self._regions = list(regions)
        self._memory, self._finals = device_memory.window(regions[0]), device_memory.window(regions[1])
        self._memory[:] = _POISON
        self._finals[:] = _POISON
        return regions

    def attach(self, callbacks: StageCallbacks) -> None:
        self._callbacks = callbacks

    def capacity(self) -> Capacity:
        s = self.layout
        return Capacity(blocks=s.blocks, compute_slots=s.compute_slots, transfer_slots=s.final_slots,
                        block_tokens=s.block_tokens, max_tokens=s.max_tokens, planes=self.model.planes)  # fmt: skip

    def add(self, transfer: TransferId, request: Request) -> None:
        """COLOCATED: answered by the next step, straight from the model's definition."""
        self._colocated.append((transfer, request))

    # -- StageEngine: transfers --------------------------------------------------------------------------------------

    def reserve_transfer(self, admission: Admission) -> None:
        if admission.transfer in self._sequences:
            return
        reason = self.refuse(admission)
        if reason is not None:
            self._tell.refused(admission.transfer, reason, not self.refuse_for_ever)
            return
        prompt = admission.request.prompt
        histories = self.model.histories(prompt)
        growth = admission.request.max_length if self.role is Role.DECODE else len(prompt)
        needed = self.layout_blocks(growth) * self.model.planes
        if needed > self.layout.blocks or growth > self.layout.max_tokens:
            self._tell.refused(admission.transfer, f"{growth} tokens never fit", False)
            return
        prefix = self._match(histories)
        # a hit that nobody owns leaves the evictable blocks when it is taken
        taken = sum(1 for group in prefix for block in group if not self._owners.get(block))
        shared = sum(len(group) for group in prefix)
        if needed - shared + taken > self._available() or not self._free_slots:
            self._tell.refused(admission.transfer, "no room now", True)
            return
        sequence = _Sequence(admission, [[] for _ in range(self.model.planes)], self._take_slot(), histories)
        for group in prefix:
            for plane, block in enumerate(group):
                sequence.tables[plane].append(block)
                self._owners[block] = self._owners.get(block, 0) + 1
        sequence.shared = sequence.valid = len(prefix) * self.layout.block_tokens
        self._grow(sequence, len(prompt))
        sequence.budget = needed - sum(map(len, sequence.tables))
        self._promised += sequence.budget
        self._sequences[admission.transfer] = sequence
        if self.role is Role.DECODE:
            event = self.device.event() if self.device.pending() else None
            if event is None:
                self._tell_reserved(sequence)
            else:
                self._unquiet.append((event, admission.transfer))
        else:
            sequence.valid = min(sequence.valid, len(prompt) - 1)  # the last token is always computed (C3.4)
            self._queue.append(admission.transfer)

    def accept_import(self, transfer: TransferId, valid: int) -> None:
        sequence = self._sequences.get(transfer)
        if sequence is None or sequence.suspended:
            return
        if transfer in self.fail_import:
            raise RuntimeError("scripted: import fails")
        sequence.valid = valid
        sequence.final = self._final(sequence.slot).copy()
        self._give_slot(sequence)
        sequence.digest = self._digest(sequence, 0)
        sequence.history = int(sequence.histories[-1])
        self._publish(sequence)
        self._queue.append(transfer)

    def suspend_transfer(self, transfer: TransferId) -> DeviceEvent | None:
        sequence = self._sequences.get(transfer)
        if sequence is None:
            return None
        if not sequence.suspended:
            sequence.suspended = True
            if transfer in self._queue:
                self._queue.remove(transfer)
        return self.device.event()

    def release_transfer_compute(self, transfer: TransferId) -> None:
        """The scripted P holds no runner state: its slot is free once the last range was computed."""

    def release_transfer(self, transfer: TransferId) -> None:
        sequence = self._sequences.pop(transfer, None)
        if sequence is None:
            return
        if transfer in self._queue:
            self._queue.remove(transfer)
        for table in sequence.tables:
            for block in table:
                self._disown(block)
        self._promised -= sequence.budget
        self._unquiet = [(event, other) for event, other in self._unquiet if other != transfer]
        if sequence.slot >= 0:
            self._give_slot(sequence)

    # -- StageEngine: compute ----------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._colocated) or bool(self._unquiet) or any(self._runnable(t) for t in self._queue)

    def step(self) -> Sequence[StepOutput]:
        self._say_reserved()
        if self.role is Role.PREFILL:
            return self._prefill_step()
        if self.role is Role.COLOCATED:
            outputs = [StepOutput(t, *self.model.generate(request)) for t, request in self._colocated]
            self._colocated.clear()
            return outputs
        return self._decode_step()

    def statistics(self) -> Mapping[str, float]:
        cached = sum(1 for block in self._cached_blocks if not self._owners.get(block))
        return {
            "blocks_total": self.layout.blocks,
            "blocks_free": len(self._free),
            "blocks_used": sum(1 for count in self._owners.values() if count),
            "blocks_leased": 0,
            "blocks_prefix": cached,
            "blocks_promised": self._promised,
            "final_slots_free": len(self._free_slots),
            "transfers": len(self._sequences),
            "late_writes": len(self.late_writes),
            "strays": len(self.strays()),
        }

    def close(self) -> None:
        self._queue.clear()
        self._regions = []
        self._memory = self._finals = np.zeros(0, np.uint8)

    # -- compute -----------------------------------------------------------------------------------------------------

    def _runnable(self, transfer: TransferId) -> bool:
        sequence = self._sequences[transfer]
        if self.role is Role.PREFILL:
            return self._tell.can_schedule(transfer, min(self.chunk, len(sequence.histories) - sequence.valid))
        return True

    def _prefill_step(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        for transfer in [t for t in self._queue if self._runnable(t)][: self.layout.compute_slots]:
            sequence = self._sequences[transfer]
            if transfer in self.fail_compute:
                self._queue.remove(transfer)
                outputs.append(StepOutput(transfer, error=RuntimeError("scripted: compute fails")))
                continue
            start, total = sequence.valid, len(sequence.histories)
            end = min(start + self.chunk, total)
            self._write(sequence, start, sequence.histories[start:end])
            sequence.valid = end
            last = end == total
            if last:
                self._final(sequence.slot)[:] = self.model.final(int(sequence.histories[-1]))
                self._queue.remove(transfer)
                self._publish(sequence)
            astray = self.layout.blocks if transfer in self.fail_range else 0
            tables: Tables = tuple(np.array(table, dtype=np.int64) + astray for table in sequence.tables)
            self._tell.prefill_submitted(
                ComputedRange(
                    transfer,
                    sequence.reported,
                    end,
                    tables,
                    self.device.event(),
                    last,
                    sequence.slot,
                    sequence.shared,
                )
            )
            sequence.reported = end
        return outputs

    def _decode_step(self) -> list[StepOutput]:
        outputs: list[StepOutput] = []
        held = self._held_by is not None and self._held_by.exists()
        for transfer in list(self._queue)[: self.layout.compute_slots]:
            sequence = self._sequences[transfer]
            if held and sequence.tokens:
                continue
            if not sequence.active:
                sequence.active = True
                self._tell.activated(transfer)
            if transfer in self.fail_decode:
                self._queue.remove(transfer)
                outputs.append(StepOutput(transfer, error=RuntimeError("scripted: decode fails")))
                continue
            if sequence.tokens:
                sequence.history = self.model.extend(sequence.history, sequence.tokens[-1])
                before = sum(map(len, sequence.tables))
                self._grow(sequence, sequence.valid + 1)
                grown = sum(map(len, sequence.tables)) - before
                sequence.budget -= grown
                self._promised -= grown
                self._write(sequence, sequence.valid, np.array([sequence.history], dtype=np.uint64))
                sequence.valid += 1
                sequence.digest = (sequence.digest + self._digest(sequence, sequence.valid - 1)) & _MASK
                sequence.final = self.model.final(sequence.history)
            request = sequence.admission.request
            token, depth = self.model.choose(sequence.digest, sequence.final, request.sampling.seed)
            self.sampled += 1
            sequence.tokens.append(token)
            reason = finish_reason(request, sequence.tokens)
            if reason is not None:
                self._queue.remove(transfer)
                if self._digest(sequence, 0) != sequence.digest:
                    self.late_writes.append((sequence.tables[0][0], 0))
            outputs.append(StepOutput(transfer, (token,), (depth,), reason))
        if held and not outputs:
            time.sleep(_HELD_SECONDS)  # it has work as before, and must not keep a processor with it
        return outputs

    def _tell_reserved(self, sequence: _Sequence) -> None:
        tables = tuple(tuple(table) for table in sequence.tables)
        self._tell.reserved(Reservation(sequence.admission.transfer, tables, sequence.valid, sequence.slot))

    def _say_reserved(self) -> None:
        """C2.7: what waits for the device, and need not any more."""
        if not self._unquiet:
            return
        quiet = [transfer for event, transfer in self._unquiet if event.query()]
        self._unquiet = [(event, transfer) for event, transfer in self._unquiet if transfer not in quiet]
        for transfer in quiet:
            self._tell_reserved(self._sequences[transfer])

    @property
    def _tell(self) -> StageCallbacks:
        assert self._callbacks is not None, "attach() comes before any transfer"
        return self._callbacks

    # -- memory, for tests -------------------------------------------------------------------------------------------

    @property
    def memory(self) -> Bytes:
        """Every byte of the KV region, shared."""
        return self._memory

    @property
    def finals(self) -> Bytes:
        """Every byte of the final payloads' region, shared."""
        return self._finals

    def strays(self) -> list[tuple[int, int]]:
        """(block, byte) of what was written where nothing is: into free blocks and between blocks.

        Final slots count from -1 downwards.
        """
        count, stride = self.layout.blocks, self._stride
        if not len(self._memory):
            return []
        wrong = self._memory[: count * stride].reshape(count, stride) != _POISON
        taken = np.ones(count, dtype=np.bool_)
        taken[list(self._free)] = False
        wrong[taken, : self._used_bytes] = False
        found = [(int(block), int(np.argmax(wrong[block]))) for block in np.flatnonzero(wrong.any(axis=1))]
        for slot in self._free_slots:
            changed = np.flatnonzero(self._final(slot) != _POISON)
            if len(changed):
                found.append((-1 - slot, int(changed[0])))
        return found

    def expected_prompt(self, tokens: Sequence[int], table: Sequence[Sequence[int]], start: int = 0) -> Bytes:
        """What :attr:`memory` holds if it holds tokens ``[start, len(tokens))`` in ``table`` and nothing else."""
        memory = np.full_like(self._memory, _POISON)
        histories = self.model.histories(tokens)[start:]
        for plane in range(self.model.planes):
            memory[self._where(table[plane], start, len(tokens))] = self.model.kv(plane, histories)
        return memory

    def tables(self, transfer: TransferId) -> tuple[tuple[int, ...], ...]:
        """Block ids that a transfer holds now, per plane."""
        return tuple(tuple(table) for table in self._sequences[transfer].tables)

    def forget_prefixes(self) -> None:
        """Evict every cached prefix block that nobody owns."""
        while any(not any(self._owners.get(b) for b in group) for group in self._cached.values()):
            self._evict()

    # -- memory ------------------------------------------------------------------------------------------------------

    def layout_blocks(self, tokens: int) -> int:
        return -(-tokens // self.layout.block_tokens)

    def _final(self, slot: int) -> Bytes:
        width = self.model.final_bytes
        return self._finals[slot * max(width, 1) : slot * max(width, 1) + width]

    def _digest(self, sequence: _Sequence, start: int) -> int:
        """What tokens ``[start, valid)`` in our memory contribute to the choice of the next token."""
        total = 0
        for plane, table in enumerate(sequence.tables):
            total += self.model.digest(plane, self._memory[self._where(table, start, sequence.valid)], start)
        return total & _MASK

    def _take_slot(self) -> int:
        slot = self._free_slots.pop()
        self._expect_poison(-1 - slot, self._final(slot))
        return slot

    def _expect_poison(self, place: int, memory: Bytes) -> None:
        if memory.tobytes().strip(_POISON_BYTE):  # cheap, as it is for every block that is handed out
            self.late_writes.append((place, int(np.argmax(memory != _POISON))))

    def _give_slot(self, sequence: _Sequence) -> None:
        self._final(sequence.slot)[:] = _POISON
        self._free_slots.append(sequence.slot)
        sequence.slot = -1

    def _addresses(self, table: Sequence[int], component: int, start: int, end: int) -> npt.NDArray[np.int64]:
        """First byte of each token's row in region 0.  Shape ``[end - start]``."""
        return self._where(table, start, end)[:, sum(self.model.token_bytes[:component])]

    def _where(self, table: Sequence[int], start: int, end: int) -> npt.NDArray[np.int64]:
        """Where the bytes of tokens ``[start, end)`` lie in region 0.  Shape ``[end - start, sum(token_bytes)]``."""
        if end - start == 1:  # what each step of decode asks for
            index, row = divmod(start, self.layout.block_tokens)
            return self._within[row : row + 1] + table[index] * self._stride
        blocks, within = np.divmod(np.arange(start, end), self.layout.block_tokens)
        first = np.asarray(table, dtype=np.int64)[blocks] * self._stride
        where: npt.NDArray[np.int64] = first[:, None] + self._within[within]
        return where

    def _write(self, sequence: _Sequence, start: int, histories: Words) -> None:
        skip = max(sequence.shared - start, 0)
        start, histories = start + skip, histories[skip:]
        for plane, table in enumerate(sequence.tables):
            self._memory[self._where(table, start, start + len(histories))] = self.model.kv(plane, histories)

    def _available(self) -> int:
        unowned = sum(1 for block in self._cached_blocks if not self._owners.get(block))
        return len(self._free) + unowned - self._promised

    def _grow(self, sequence: _Sequence, tokens: int) -> None:
        for table in sequence.tables:
            while len(table) < self.layout_blocks(tokens):
                table.append(self._take())

    def _take(self) -> int:
        if not self._free:
            self._evict()
        block = self._free.popleft()
        self._expect_poison(block, self._block(block))
        self._owners[block] = 1
        return block

    def _block(self, block: int) -> Bytes:
        return self._memory[block * self._stride : (block + 1) * self._stride]

    def _disown(self, block: int) -> None:
        self._owners[block] -= 1
        if not self._owners[block]:
            del self._owners[block]
            if block not in self._cached_blocks:
                self._block(block)[:] = _POISON
                self._free.append(block)

    def _match(self, histories: Words) -> list[tuple[int, ...]]:
        """Cached blocks, one per plane, of the longest known prefix in whole blocks."""
        found: list[tuple[int, ...]] = []
        size = self.layout.block_tokens
        for end in range(size, len(histories) + 1, size) if self.prefix_caching else ():
            group = self._cached.get(int(histories[end - 1]))
            if group is None:
                break
            self._cached.move_to_end(int(histories[end - 1]))
            found.append(group)
        return found

    def _publish(self, sequence: _Sequence) -> None:
        """Make whole prompt blocks reusable by others."""
        size = self.layout.block_tokens
        for i in range(len(sequence.histories) // size if self.prefix_caching else 0):
            key = int(sequence.histories[(i + 1) * size - 1])
            if key not in self._cached:
                group = tuple(table[i] for table in sequence.tables)
                self._cached[key] = group
                self._cached_blocks.update(dict.fromkeys(group, key))

    def _evict(self) -> None:
        """Forget the oldest cached prefix block that nobody owns."""
        idle = (k for k, group in self._cached.items() if not any(self._owners.get(block) for block in group))
        key = next(idle, None)
        if key is None:
            raise RuntimeError("scripted: the growth budget was wrong, no block is left")
        for block in self._cached.pop(key):
            del self._cached_blocks[block]
            self._block(block)[:] = _POISON
            self._free.append(block)
