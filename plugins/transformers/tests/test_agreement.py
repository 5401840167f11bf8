"""A1, A2: what two engines produce with a hand-off between them equals what one produces without.

The hand-off is done by hand, bytes copied from region to region as core's geometry says: no transport, no protocol.  So
a difference is the engines'.  Compared are token ids, exit depths, finish reasons, the KV of the prompt bit by bit
in every plane, and every final hidden state that a token was drawn from.  Each comparison is repeated with one V row
zeroed in between and must then fail.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from kvbaton.connector import MemoryRegion
from kvbaton.engine import Admission, ComputedRange, FinishReason, Request, Role, SamplingParams, StepOutput
from kvbaton.geometry import KVMap
from kvbaton.identity import TransferId, new_transfer_id
from kvbaton.reservation import Reservation
from kvbaton.segments import Segments
from kvbaton_transformers import TransformersOptions
from kvbaton_transformers.checkpoints import ByteTokenizer, Checkpoint
from kvbaton_transformers.engine import TransformersEngine
from kvbaton_transformers.looped import Layout
from kvbaton_transformers.testing import tiny_llama, tiny_looped, tiny_qwen

BLOCK, CHUNK = 4, 8

MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "qwen": tiny_qwen,
    "last_exited": tiny_looped,
    "shared": lambda: tiny_looped(layout=Layout.SHARED),
}
SAMPLING = {
    "greedy": SamplingParams(max_tokens=16),
    "seeded": SamplingParams(max_tokens=16, temperature=0.9, top_k=40, top_p=0.95, seed=7),
}


@functools.cache
def checkpoint(model: str) -> Checkpoint:
    return Checkpoint(model, MODELS[model](), {"weights": model}, frozenset())


def tokens(length: int, text: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(text)
    return tuple(torch.randint(1, 256, (length,), generator=generator).tolist())


@dataclass
class Answer:
    """What one request came to: its tokens, and the bits they came from."""

    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    hidden: list[torch.Tensor] = field(default_factory=list)
    kv: list[torch.Tensor] = field(default_factory=list)

    def add(self, output: StepOutput) -> None:
        assert output.error is None, output.error
        self.token_ids.extend(output.token_ids)
        self.exit_depths.extend(output.exit_depths)
        self.finish_reason = output.finish_reason

    @property
    def shown(self) -> tuple[list[int], list[int], FinishReason | None]:
        """What the caller sees."""
        return self.token_ids, self.exit_depths, self.finish_reason

    def same_bits(self, other: Answer) -> bool:
        return all(
            len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
            for ours, theirs in ((self.hidden, other.hidden), (self.kv, other.kv))
        )


class Bench:
    """One engine with its memory in view."""

    def __init__(self, model: Checkpoint, role: Role, **options: Any) -> None:
        settings = {"block_tokens": BLOCK, "blocks": 64, "prefill_chunk": CHUNK, "transfer_slots": 8} | options
        self.engine = TransformersEngine(model, TransformersOptions(**settings), role, ByteTokenizer)
        self.regions: Mapping[int, MemoryRegion] = {region.id: region for region in self.engine.regions(None)}
        self.engine.attach(self)
        self.ranges: list[ComputedRange] = []
        self.reservations: dict[TransferId, Reservation] = {}
        self.refusals: list[tuple[TransferId, str, bool]] = []
        self.answers: dict[TransferId, Answer] = {}
        if role is not Role.PREFILL:
            self._watch()

    def _watch(self) -> None:
        """Keep the hidden state behind every token."""
        sample = self.engine._sample

        def watched(jobs: Sequence[Any]) -> list[StepOutput]:
            for job in jobs:
                self.answers.setdefault(job.transfer, Answer()).hidden.append(job.final[0].clone())
            return sample(jobs)

        self.engine._sample = watched  # type: ignore[method-assign]

    # -- StageCallbacks ------------------------------------------------------------------------------------------------

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        return True

    def prefill_submitted(self, computed: ComputedRange) -> None:
        self.ranges.append(computed)

    def reserved(self, reservation: Reservation) -> None:
        self.reservations[reservation.transfer] = reservation

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> None:
        self.refusals.append((transfer, reason, retry))

    def activated(self, transfer: TransferId) -> None:
        """Told once; counted elsewhere."""

    # -- work ----------------------------------------------------------------------------------------------------------

    def step(self) -> list[StepOutput]:
        outputs = list(self.engine.step())
        for output in outputs:
            self.answers.setdefault(output.transfer, Answer()).add(output)
        return outputs

    def finish(self) -> None:
        for _ in range(3000):
            if not self.engine.has_work():
                return
            self.step()
        raise AssertionError("the engine does not come to an end")

    def prompt_kv(self, transfer: TransferId) -> list[torch.Tensor]:
        """K and V of the prompt, ``[token, layer, head, dim]``, for every plane."""
        job, storage = self.engine._jobs[transfer], self.engine._storage
        assert storage is not None
        length, found = len(job.request.prompt), []
        for plane, table in enumerate(job.held.tables):
            for tensor in (storage.keys[plane], storage.values[plane]):
                rows = tensor[torch.tensor(table)].transpose(1, 2).flatten(0, 1)
                found.append(rows[:length].clone())
        return found

    def zero_v(self, transfer: TransferId, token: int) -> None:
        """The damage that every comparison has to notice: one token's V."""
        assert self.engine._storage is not None
        for values, table in zip(self.engine._storage.values, self.engine._jobs[transfer].held.tables, strict=True):
            values[table[token // BLOCK], :, token % BLOCK] = 0

    def balanced(self) -> None:
        self.engine.check()
        s = self.engine.statistics()
        assert s["blocks_used"] == s["blocks_leased"] == s["blocks_under_lease"] == s["blocks_promised"] == 0
        assert s["blocks_free"] + s["blocks_prefix"] == s["blocks_total"]
        assert s["final_slots_free"] == s["final_slots_total"]
        assert s["transfers"] == s["requests_waiting"] == s["requests_running"] == 0


class Colocated(Bench):
    def __init__(self, model: Checkpoint, **options: Any) -> None:
        super().__init__(model, Role.COLOCATED, **options)

    def run(self, request: Request) -> Answer:
        transfer = new_transfer_id()
        self.engine.add(transfer, request)
        while not self.step():
            pass
        if transfer in self.engine._jobs:
            self.answers[transfer].kv = self.prompt_kv(transfer)
        self.finish()
        self.balanced()
        return self.answers[transfer]


def copy(source: Bench, reads: Segments, target: Bench, writes: Segments) -> int:
    """What a transport would do; the number of bytes."""
    rows = zip(*(column.tolist() for s in (reads, writes) for column in (s.region, s.offset, s.length)), strict=True)
    total = 0
    for region, start, length, into, at, wanted in rows:
        assert length == wanted
        target.regions[into].view()[at : at + length] = source.regions[region].view()[start : start + length]
        total += length
    return total


class Pair:
    """P and D with a hand-off by hand between them."""

    def __init__(
        self, model: Checkpoint, p: Mapping[str, Any] | None = None, d: Mapping[str, Any] | None = None
    ) -> None:
        self.p = Bench(model, Role.PREFILL, **(p or {}))
        # Another number of blocks: another table for the same request.
        self.d = Bench(model, Role.DECODE, **{"blocks": 57, "transfer_slots": 5, **(d or {})})
        self.map = KVMap(self.p.engine.geometry, self.d.engine.geometry)
        self.sent: dict[TransferId, int] = {}

    def carry(self, computed: ComputedRange) -> None:
        """Copy what a range adds and D lacks; with the last one, the final payload."""
        reservation = self.d.reservations[computed.transfer]
        start = max(computed.start, reservation.valid)
        if computed.end > start:
            source, target = self.map.plan(computed.tables, reservation.arrays(), start, computed.end)
            sent = copy(self.p, source, self.d, target)
            self.sent[computed.transfer] = self.sent.get(computed.transfer, 0) + sent
        if computed.last:
            payload = self.p.engine.geometry.final_segment(computed.final_slot)
            slot = self.d.engine.geometry.final_segment(reservation.final_slot)
            copy(self.p, payload, self.d, slot)

    def hand_over(self, request: Request) -> TransferId:
        """Reserve, prefill, carry, import; P is empty again."""
        transfer = new_transfer_id()
        self.d.engine.reserve_transfer(Admission(transfer, request))
        reservation = self.d.reservations[transfer]
        self.p.engine.reserve_transfer(Admission(transfer, request, reservation.valid))
        self.p.finish()
        assert self.p.ranges[-1].last
        for computed in self.p.ranges:
            self.carry(computed)
        self.p.ranges.clear()
        self.p.engine.release_transfer_compute(transfer)
        self.p.engine.release_transfer(transfer)
        self.p.balanced()
        self.d.engine.accept_import(transfer, len(request.prompt))
        return transfer

    def run(self, request: Request, *, damage: int | None = None) -> Answer:
        transfer = self.hand_over(request)
        kv = self.d.prompt_kv(transfer)
        if damage is not None:
            self.d.zero_v(transfer, damage)
        self.d.finish()
        self.d.engine.release_transfer(transfer)
        self.d.balanced()
        self.d.answers[transfer].kv = kv
        return self.d.answers[transfer]

    def drop(self, side: str) -> None:
        """Forget the cached prefixes of ``p`` or ``d``."""
        {"p": self.p, "d": self.d}[side].engine._cache.drop_prefix()


def agree(ours: Answer, theirs: Answer) -> None:
    assert ours.shown == theirs.shown
    assert len(ours.token_ids) >= 16
    assert ours.finish_reason is not None
    assert ours.same_bits(theirs)


def differ(damaged: Callable[[int], Answer], expected: Answer, places: Sequence[int]) -> None:
    """The negative control: a V row that was zeroed before decoding shows in the bits, and in the tokens.

    Wherever it is, bits differ; greedy choices may shrug one row off, so the first of ``places`` that changes a token
    is enough.  The first token depends on the final payload alone.
    """
    for place in places:
        ours = damaged(place)
        assert torch.equal(ours.hidden[0], expected.hidden[0])
        assert ours.token_ids[0] == expected.token_ids[0]
        assert not ours.same_bits(expected)
        if ours.shown != expected.shown:
            return
    raise AssertionError("no damage shows in the tokens: equal tokens prove nothing here")


def spread(length: int) -> list[int]:
    """Places in a prompt, the middle first."""
    return list(dict.fromkeys(place for place in (length // 2, length - 1, 0, length // 3) if place < length))


@pytest.mark.clause("A1", "A2", "C3.1", "C3.4")
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("length", [1, 3 * BLOCK - 1, 3 * BLOCK, 3 * BLOCK + 1, 4 * CHUNK])
def test_a_handed_over_request_goes_on_as_a_colocated_one(model: str, sampling: str, length: int) -> None:
    weights = checkpoint(model)
    request = Request(tokens(length), SAMPLING[sampling])
    expected = Colocated(weights).run(request)
    agree(Pair(weights).run(request), expected)
    differ(lambda place: Pair(weights).run(request, damage=place), expected, spread(length))
    if model in ("last_exited", "shared"):
        assert len(set(expected.exit_depths)) > 1, "tokens exit at different depths"
    else:
        assert set(expected.exit_depths) == {1}


@pytest.mark.clause("A1", "C3.3", "C3.4")
@pytest.mark.parametrize("model", ["llama", "last_exited"])
@pytest.mark.parametrize("length", [4 * BLOCK, 4 * BLOCK + 1])
@pytest.mark.parametrize("warm", ["p", "d", "pd"])
def test_a_fully_cached_prompt(model: str, length: int, warm: str) -> None:
    weights = checkpoint(model)
    request = Request(tokens(length), SAMPLING["seeded"])
    cached = length // BLOCK * BLOCK

    def warmed(damage: int | None = None) -> Answer:
        pair = Pair(weights)
        pair.run(request)
        for side in {"p", "d"} - set(warm):
            pair.drop(side)
        answer = pair.run(request, damage=damage)
        transfer, valid = list(pair.d.reservations)[-1], cached if "d" in warm else 0
        assert pair.d.reservations[transfer].valid == valid
        planes = pair.p.engine.geometry.planes
        row = sum(component.token_bytes for plane in planes for component in plane.components)
        assert pair.sent.get(transfer, 0) == (length - valid) * row
        return answer

    colocated = Colocated(weights)
    expected = colocated.run(request)
    if "p" in warm:
        # Equal geometry: what P computes depends on what P has cached.
        expected = colocated.run(request)
    agree(warmed(), expected)
    differ(warmed, expected, spread(length))


@pytest.mark.clause("A1", "C3.3")
@pytest.mark.parametrize("model", ["llama", "qwen", "last_exited"])
@pytest.mark.parametrize(("on_p", "on_d"), [(CHUNK, 2 * CHUNK), (2 * CHUNK, CHUNK), (0, 2 * CHUNK), (2 * CHUNK, 0)])
def test_unequal_prefixes(model: str, on_p: int, on_d: int) -> None:
    weights = checkpoint(model)
    request = Request(tokens(21), SAMPLING["seeded"])

    def beginning(length: int) -> Request:
        return Request((*request.prompt[:length], *tokens(5, 99)), SamplingParams(max_tokens=1))

    def unequal(damage: int | None = None) -> Answer:
        pair = Pair(weights)
        pair.run(beginning(on_d))
        pair.drop("p")
        if on_p:
            # P alone learns this one: its transfer ends before D imports.
            transfer = new_transfer_id()
            pair.p.engine.reserve_transfer(Admission(transfer, beginning(on_p)))
            pair.p.finish()
            pair.p.engine.release_transfer(transfer)
            pair.p.ranges.clear()
        assert pair.p.engine._cache.match(request.prompt) == on_p
        assert pair.d.engine._cache.match(request.prompt) == on_d
        return pair.run(request, damage=damage)

    colocated = Colocated(weights)
    if on_p:
        colocated.run(beginning(on_p))
    expected = colocated.run(request)
    agree(unequal(), expected)
    differ(unequal, expected, spread(21))


@pytest.mark.clause("A1", "C8.2", "C8.3", "C8.4")
@pytest.mark.parametrize("model", ["llama", "last_exited", "shared"])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_preemption_on_d_under_pressure_changes_nothing(model: str, sampling: str) -> None:
    """Imported requests lose their memory, some before their first token, and are recomputed by D itself."""
    weights = checkpoint(model)
    requests = [Request(tokens(10 + n, n), SAMPLING[sampling]) for n in range(4)]
    alone = Colocated(weights, batching="isolated", prefix_caching=False)
    expected = [alone.run(request) for request in requests]
    options = {"batching": "isolated", "prefix_caching": False}
    pair = Pair(weights, options, {**options, "blocks": 16, "max_running": 3})
    transfers = [pair.hand_over(request) for request in requests]
    # One more is on its way meanwhile and never a victim.
    idle = new_transfer_id()
    pair.d.engine.reserve_transfer(Admission(idle, Request(tokens(4, 9), SamplingParams(max_tokens=1))))
    tables = pair.d.reservations[idle].tables if idle in pair.d.reservations else None
    while pair.d.engine.has_work():
        for output in pair.d.step():
            if output.finish_reason is not None:
                pair.d.engine.release_transfer(output.transfer)
        held = pair.d.engine._jobs.get(idle)
        assert held is None or tuple(map(tuple, held.held.tables)) == tables
    assert pair.d.engine.statistics()["preemptions_total"] > 0
    for transfer, other in zip(transfers, expected, strict=True):
        ours = pair.d.answers[transfer]
        assert ours.shown == other.shown
        assert all(torch.equal(a, b) for a, b in zip(ours.hidden, other.hidden, strict=True))
    pair.d.engine.release_transfer(idle)
    pair.d.balanced()


@pytest.mark.clause("A1", "C5.1", "C5.2", "C8.1", "C8.4")
@pytest.mark.parametrize("seed", range(2))
def test_many_at_once_some_cancelled_at_random_moments(seed: int) -> None:
    """Random order of everything; the rest agree, and every block and slot is back."""
    rng = random.Random(seed)
    weights = checkpoint("llama")
    requests = [
        Request(tokens(rng.randint(1, 30), rng.randint(0, 5)), SamplingParams(max_tokens=rng.randint(1, 20), seed=n,
                temperature=rng.choice([0.0, 1.0])))
        for n in range(24)
    ]  # fmt: skip
    alone = Colocated(weights, batching="isolated")
    expected = []
    for request in requests:
        alone.engine._cache.drop_prefix()
        expected.append(alone.run(request))
    pair = Pair(weights, {"batching": "isolated", "blocks": 30}, {"batching": "isolated", "blocks": 20})
    waiting = list(enumerate(requests))
    live: dict[TransferId, int] = {}
    finished, cancelled = set(), 0
    for _ in range(20000):
        if not waiting and not live:
            break
        if waiting and rng.random() < 0.5:
            number, request = waiting[0]
            transfer = new_transfer_id()
            pair.d.engine.reserve_transfer(Admission(transfer, request))
            if transfer in pair.d.reservations:
                waiting.pop(0)
                live[transfer] = number
                pair.p.engine.reserve_transfer(Admission(transfer, request, pair.d.reservations[transfer].valid))
            else:
                assert pair.d.refusals.pop()[2], "it would fit later"
        if pair.p.engine.has_work():
            pair.p.step()
        while pair.p.ranges and rng.random() < 0.7:
            computed = pair.p.ranges.pop(0)
            transfer = computed.transfer
            if transfer not in live:
                continue
            pair.carry(computed)
            if computed.last:
                pair.p.engine.release_transfer_compute(transfer)
                pair.d.engine.accept_import(transfer, computed.end)
                pair.p.engine.release_transfer(transfer)
        for output in pair.d.step() if pair.d.engine.has_work() else ():
            if output.finish_reason is not None:
                pair.d.engine.release_transfer(output.transfer)
                number = live.pop(output.transfer)
                finished.add(number)
                assert pair.d.answers[output.transfer].shown == expected[number].shown
        if live and rng.random() < 0.02:
            transfer = rng.choice(sorted(live))
            del live[transfer]
            cancelled += 1
            for side in rng.sample([pair.p, pair.d], 2):
                if rng.random() < 0.5:
                    side.engine.suspend_transfer(transfer)
                side.engine.release_transfer(transfer)
        pair.p.engine.check()
        pair.d.engine.check()
    assert not waiting
    assert not live
    assert cancelled
    assert len(finished) == 24 - cancelled
    pair.p.balanced()
    pair.d.balanced()
