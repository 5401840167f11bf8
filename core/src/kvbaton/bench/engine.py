"""An engine that holds KV of some model's shape and computes nothing: ``engine.name = "kvbaton.bench.engine:plugin"``.

What a hand-off costs is not to be mixed with what a model costs, so the bench hands over between engines for which a
prompt is computed the moment it is placed, and its one token sampled the moment it arrived.  Everything else is as in
service: the coordinator, the stages, their pumps, credits and leases, the transport.  The scripted engine of the
conformance kit proves every byte of every hand-off, which takes longer than most transports need to move it; here each
place in D's cache is looked at once, after the first hand-off into it, and no longer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from kvbaton.bench.models import Model
from kvbaton.bench.rows import Allocated, Bytes, Rows
from kvbaton.bench.traffic import FINAL, KV, Traffic
from kvbaton.connector import DeviceEvent, MemoryKind, MemoryRegion
from kvbaton.engine import (
    ENGINE_API_VERSION,
    Admission,
    Allocator,
    ComputedRange,
    FinishReason,
    Role,
    StageCallbacks,
    StepOutput,
    Tokenizer,
)
from kvbaton.errors import KvbatonError, UnsupportedModel
from kvbaton.identity import TransferId
from kvbaton.reservation import Capacity, Reservation

NAME = "kvbaton.bench.engine:plugin"
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]


class BenchOptions(BaseModel):
    """The traffic (:class:`~kvbaton.bench.traffic.Traffic`) and for how many ``requests`` at once there is room."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layers: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: str
    latent: Natural = 0
    planes: Positive = 1
    hidden: Natural = 0
    tokens: Positive
    block: Positive
    layout: Literal["block", "layer"] = "block"
    scattered: bool = True
    requests: Positive = 1

    @classmethod
    def of(cls, traffic: Traffic, requests: int) -> BenchOptions:
        m = traffic.model
        return cls(
            layers=m.layers, kv_heads=m.kv_heads, head_dim=m.head_dim, dtype=m.dtype, latent=m.latent, planes=m.planes,
            hidden=m.hidden, tokens=traffic.tokens, block=traffic.block, layout=traffic.layout,
            scattered=traffic.scattered, requests=requests,
        )  # fmt: skip

    def traffic(self) -> Traffic:
        model = Model(
            "bench", self.layers, self.kv_heads, self.head_dim, self.dtype, self.latent, self.planes, self.hidden
        )
        return Traffic(model, self.tokens, self.block, self.layout, self.scattered)


@dataclass(slots=True, eq=False)
class _Sequence:
    admission: Admission
    slot: int


class BenchEngine:
    """A :class:`~kvbaton.engine.StageEngine` with room for ``requests`` requests, each always in the same blocks."""

    def __init__(self, role: Role, traffic: Traffic, requests: int, device: int | None) -> None:
        self.role = role
        self.geometry = traffic.geometry(requests)
        self._traffic = traffic
        self._requests = requests
        self._device = device
        # elsewhere on the other side
        self._tables = traffic.tables(requests, 1 if role is Role.PREFILL else 2)
        self._free = deque(range(requests))
        self._live: dict[TransferId, _Sequence] = {}
        self._queue: deque[TransferId] = deque()
        self._looked_at: set[int] = set()
        self._memory: dict[int, Bytes] = {}
        self._allocated = Allocated()
        self._callbacks: StageCallbacks | None = None

    # -- set-up --------------------------------------------------------------------------------------------------------

    def regions(self, allocate: Allocator | None) -> Sequence[MemoryRegion]:
        make = allocate or self._allocated.allocate
        kind: MemoryKind = "host" if self._device is None else "cuda"
        sizes = {KV: self._traffic.kv_bytes(self._requests), FINAL: self._traffic.final_stored(self._requests)}
        regions = [make(id, kind, self._device or 0, nbytes) for id, nbytes in sizes.items()]
        self._memory = {region.id: Bytes(region) for region in regions}
        for slot in range(self._requests):
            for region, rows, ids, values in self._expected(slot, self._traffic.tokens):
                self._memory[region].fill(rows, ids, values if self.role is Role.PREFILL else np.zeros_like(values))
        return regions

    def attach(self, callbacks: StageCallbacks) -> None:
        self._callbacks = callbacks

    def capacity(self) -> Capacity:
        t = self._traffic
        # one more block each: that of the token that D samples, of which nobody ever computes the KV
        return Capacity(
            blocks=self._requests * (t.blocks + 1) * t.model.planes, compute_slots=self._requests,
            transfer_slots=self._requests, block_tokens=t.block, max_tokens=t.tokens + 1, planes=t.model.planes,
        )  # fmt: skip

    # -- transfers -----------------------------------------------------------------------------------------------------

    def reserve_transfer(self, admission: Admission) -> None:
        transfer, request = admission.transfer, admission.request
        if transfer in self._live:
            return
        if len(request.prompt) > self._traffic.tokens or request.sampling.max_tokens > 1:
            self._tell.refused(transfer, f"more than {self._traffic.tokens} tokens and one", False)
        elif not self._free:
            self._tell.refused(transfer, "no room now", True)
        else:
            slot = self._free.popleft()
            self._live[transfer] = _Sequence(admission, slot)
            if self.role is Role.DECODE:
                count = self.geometry.blocks_for(len(request.prompt))
                tables = tuple(tuple(table[:count].tolist()) for table in self._tables[slot])
                self._tell.reserved(Reservation(transfer, tables, 0, slot if self._traffic.model.final_bytes else 0))
            else:
                self._queue.append(transfer)

    def accept_import(self, transfer: TransferId, valid: int) -> None:
        sequence = self._live.get(transfer)
        if sequence is None:
            return
        if sequence.slot not in self._looked_at and valid == self._traffic.tokens:
            self._look(sequence.slot, valid)
            self._looked_at.add(sequence.slot)
        self._queue.append(transfer)

    def suspend_transfer(self, transfer: TransferId) -> DeviceEvent | None:
        if transfer in self._queue:
            self._queue.remove(transfer)
        return None

    def release_transfer_compute(self, transfer: TransferId) -> None:
        """Nothing is kept for computing."""

    def release_transfer(self, transfer: TransferId) -> None:
        sequence = self._live.pop(transfer, None)
        if sequence is not None:
            self.suspend_transfer(transfer)
            self._free.append(sequence.slot)  # the longest unused is next: each place gets its turn

    # -- steps ---------------------------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return bool(self._queue)

    def step(self) -> Sequence[StepOutput]:
        outputs = []
        while self._queue:
            transfer = self._queue.popleft()
            sequence = self._live[transfer]
            if self.role is Role.PREFILL:
                tokens = len(sequence.admission.request.prompt)
                slot = sequence.slot if self._traffic.model.final_bytes else 0
                self._tell.prefill_submitted(
                    ComputedRange(transfer, 0, tokens, tuple(self._tables[sequence.slot]), None, True, slot)
                )
            else:
                self._tell.activated(transfer)
                outputs.append(StepOutput(transfer, (1,), (1,), FinishReason.LENGTH))
        return outputs

    def statistics(self) -> Mapping[str, float]:
        each = self._traffic.blocks * self._traffic.model.planes
        free = len(self._free)
        return {
            "blocks_free": free * each, "blocks_used": (self._requests - free) * each, "blocks_leased": 0,
            "blocks_prefix": 0, "final_slots_free": free,
        }  # fmt: skip

    def close(self) -> None:
        self._memory = {}
        self._allocated.free()

    # -- inside --------------------------------------------------------------------------------------------------------

    @property
    def _tell(self) -> StageCallbacks:
        assert self._callbacks is not None, "attach() comes before any transfer"
        return self._callbacks

    def _expected(self, slot: int, tokens: int) -> list[tuple[int, Rows, Any, Any]]:
        """What a slot holds: each of its blocks is all one value, never 0, different from its neighbours'; and so is
        its final payload."""
        traffic, model = self._traffic, self._traffic.model
        total = self._requests * traffic.blocks * model.planes
        count = tokens // traffic.block
        ids = self._tables[slot][:, :count].reshape(-1)
        values = np.arange(traffic.blocks * model.planes).reshape(model.planes, -1)[:, :count].reshape(-1)
        found, base = [], 0
        for token_bytes in model.components:
            runs, width = (1, model.layers) if traffic.layout == "block" else (model.layers, 1)
            for run in range(runs):
                rows = Rows(base, total, width * token_bytes * traffic.block)
                found.append((KV, rows, ids, ((values + run) % 251 + 1).astype(np.uint8)))
                base += rows.count * rows.width
        if model.final_bytes:
            rows = Rows(0, self._requests, model.final_bytes)
            found.append((FINAL, rows, np.array([slot]), np.array([251], np.uint8)))
        return found

    def _look(self, slot: int, valid: int) -> None:
        expected = self._expected(slot, valid)
        wrong = sum(self._memory[region].wrong(rows, ids, values) for region, rows, ids, values in expected)
        if wrong:
            raise KvbatonError(f"T3: of the first hand-off into place {slot}, {wrong} bytes are wrong")


class BenchPlugin:
    """An :class:`~kvbaton.engine.EnginePlugin`."""

    name = "bench"
    api_version = ENGINE_API_VERSION
    Options: type[BenchOptions] = BenchOptions

    def check(self, model: str, options: BenchOptions) -> None:
        """Any name will do: the options say what there is."""

    def tokenizer(self, model: str, options: BenchOptions) -> Tokenizer:
        raise UnsupportedModel("the bench's engine has no tokenizer: its requests are made of numbers", model=model)

    def open(self, model: str, options: BenchOptions, role: Role, device: int | None) -> BenchEngine:
        return BenchEngine(role, options.traffic(), options.requests, device)


plugin = BenchPlugin()
