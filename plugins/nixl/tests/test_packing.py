"""Packed chunks: what the two halves do with parts, and that bytes come where they belong."""

from __future__ import annotations

import random
import struct
import threading
import time
from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connector import Chunk, MemoryRegion
from kvbaton.errors import ProtocolViolation
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments
from kvbaton_nixl.descriptors import Places, encode_places
from kvbaton_nixl.packing import Landing, Packer, Part, Unpacker
from kvbaton_nixl.staging import HostMover, Slots
from kvbaton_nixl.words import MAX_SEGMENTS

PEER = PeerId("decode-0", 1)
NBYTES = 1 << 14


class Late:
    """An event that completes when a test says so."""

    def __init__(self) -> None:
        self.done = False

    def query(self) -> bool:
        return self.done


class Slow(HostMover):
    """Copies at once and says so later."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.events: list[Late] = []

    def _event(self) -> Late:
        self.events.append(Late())
        return self.events[-1]

    def gather(self, segments: Places, slot: int) -> Late:
        super().gather(segments, slot)
        return self._event()

    def scatter(self, slot: int, segments: Places) -> Late:
        super().scatter(slot, segments)
        return self._event()


class World:
    """A source and a destination, and the memory of both; what NIXL would write is copied by :meth:`write`."""

    def __init__(self, slots: Slots, mover: type[HostMover] = HostMover) -> None:
        draw = np.random.default_rng(1)
        self.source = draw.integers(1, 256, NBYTES).astype(np.uint8)
        self.target = np.zeros(NBYTES, np.uint8)
        self.slots = slots
        self.here = mover([MemoryRegion.of_array(0, self.source)], slots)
        self.there = mover([MemoryRegion.of_array(0, self.target)], slots)
        self.packer = Packer(self.here, slots, slots.count, slots.nbytes)
        self.unpacker = Unpacker(self.there, slots, {0: NBYTES})

    def write(self, part: Part) -> bytes:
        start, onto = self.slots.sending(part.slot), self.slots.receiving(part.theirs)
        self.there.region.view()[onto : onto + part.nbytes] = self.here.region.view()[start : start + part.nbytes]
        return part.note

    def run(self, chunks: list[Chunk]) -> list[tuple[str, int]]:
        """Carry everything; the receipts."""
        received, done = [], []
        for chunk in chunks:
            self.packer.add(chunk)
        for _ in range(10_000):
            for part in self.packer.ready():
                key = (part.chunk.transfer, part.chunk.sequence)
                self.unpacker.arrived(key, self.write(part))
                self.packer.written(part)
            for landing in self.unpacker.landed():
                received += [landing.key] if landing.complete else []
                if self.packer.landed(landing.key, landing.body) is not None:
                    done.append(landing.key)
            if not len(self.packer):
                break
        assert done == received
        assert not len(self.unpacker)
        return received


def chunk_of(reads: list[int], writes: list[int], lengths: list[int], sequence: int = 0) -> Chunk:
    zeros = [0] * len(lengths)
    source, target = Segments(zeros, reads, lengths), Segments(zeros, writes, lengths)
    return Chunk(new_transfer_id(), sequence, PEER, source, target, sum(lengths))


@pytest.mark.clause("T3", "T5")
@settings(max_examples=60, deadline=None)
@given(data=st.data(), count=st.integers(1, 3), nbytes=st.sampled_from([64, 100, 256]), equal=st.booleans())
def test_every_byte_comes_to_its_place_and_no_other(data: st.DataObject, count: int, nbytes: int, equal: bool) -> None:
    world = World(Slots(count, nbytes))
    wanted = world.target.copy()
    chunks, place = [], 0
    for sequence in range(data.draw(st.integers(1, 4))):
        if equal:
            lengths = [data.draw(st.sampled_from([16, 32, 50]))] * data.draw(st.integers(1, 20))
        else:
            lengths = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=20))
        writes = []
        for length in lengths:
            writes.append(place)
            place += length + data.draw(st.integers(0, 3) if not equal else st.just(0))
        reads = [data.draw(st.integers(0, NBYTES - length)) for length in lengths]
        if equal:
            reads = [read // lengths[0] * lengths[0] for read in reads]
            reads = [min(read, NBYTES - lengths[0]) for read in reads]
        for read, write, length in zip(reads, writes, lengths, strict=True):
            wanted[write : write + length] = world.source[read : read + length]
        chunks.append(chunk_of(reads, writes, lengths, sequence))
    received = world.run(chunks)
    assert received == [(chunk.transfer, chunk.sequence) for chunk in chunks]
    np.testing.assert_array_equal(world.target, wanted)


@pytest.mark.clause("T5", "T3")
def test_nothing_is_said_before_the_device_has_copied() -> None:
    world = World(Slots(2, 64), Slow)
    assert isinstance(world.here, Slow)
    assert isinstance(world.there, Slow)
    chunk = chunk_of([0, 100], [0, 200], [40, 40])  # two parts
    world.packer.add(chunk)
    assert list(world.packer.ready()) == []
    for event in world.here.events:
        event.done = True
    parts = list(world.packer.ready())
    assert [part.number for part in parts] == [0, 1]
    key = (chunk.transfer, 0)
    for part in parts:
        world.unpacker.arrived(key, world.write(part))
    assert list(world.unpacker.landed()) == []
    for event in world.there.events:
        event.done = True
    landings = list(world.unpacker.landed())
    assert [landing.complete for landing in landings] == [False, True]
    assert [world.packer.landed(key, landing.body) for landing in landings] == [None, chunk]


@pytest.mark.clause("T9", "T6")
def test_what_has_begun_is_finished_and_the_rest_is_taken_back() -> None:
    world = World(Slots(1, 64))
    first, second = chunk_of([0, 100], [0, 200], [40, 40]), chunk_of([0], [300], [40])
    world.packer.add(first)
    world.packer.add(second)
    (part,) = world.packer.ready()  # there is one slot
    assert part.chunk is first
    assert world.packer.cancel(first.transfer) == []
    assert world.packer.cancel(second.transfer) == [second]
    assert len(world.packer) == 1
    assert world.packer.give_up() == [first]


@pytest.mark.clause("T6")
def test_a_mover_that_raises_takes_no_slot() -> None:
    world = World(Slots(1, 64))
    world.packer.add(chunk_of([0], [0], [40]))
    real = world.here.gather
    world.here.gather = lambda *_: 1 / 0  # type: ignore[assignment]
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            list(world.packer.ready())
    world.here.gather = real  # type: ignore[method-assign]
    assert len(list(world.packer.ready())) == 1


@pytest.mark.clause("T6")
def test_a_queue_is_full_when_more_waits_than_the_slots_hold() -> None:
    world = World(Slots(2, 64))
    taken = 0
    while not world.packer.full:
        world.packer.add(chunk_of([0], [0], [40], taken))
        taken += 1
        assert taken < 10
    assert taken * 40 > 2 * 64
    small = World(Slots(2, 64))
    for sequence in range(20):
        small.packer.add(chunk_of([0], [0], [1], sequence))
        assert not small.packer.full


@pytest.mark.clause("T3", "T10")
def test_a_long_part_is_copied_on_a_thread_that_ends_with_its_mover() -> None:
    count, length = 512, 4096
    order = np.random.default_rng(1).permutation(2 * count)[:count]
    memory = np.zeros(2 * count * length, np.uint8)
    memory.reshape(-1, length)[:] = (np.arange(2 * count) % 251)[:, None]
    before, slots = memory.copy(), Slots(1, count * length)
    mover = HostMover([MemoryRegion.of_array(0, memory)], slots)
    places = Segments([0] * count, order * length, [length] * count)
    for gathers in (True, False):
        event = mover.gather(places, 0) if gathers else mover.scatter(0, places)
        deadline = time.monotonic() + 30
        assert event is not None
        while not event.query():
            assert time.monotonic() < deadline
        slot = mover.region.view().reshape(2, count, length)
        np.testing.assert_array_equal(slot[0], before.reshape(-1, length)[order])
        slot[1] = slot[0]
        memory[:] = 0
    mover.scatter(0, places)
    mover.close()  # waits
    wanted = np.zeros_like(before).reshape(-1, length)
    wanted[order] = before.reshape(-1, length)[order]
    np.testing.assert_array_equal(memory.reshape(-1, length), wanted)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("kvbaton-nixl-copies")]


HEAD = struct.Struct("<IIIIQ")


@pytest.mark.clause("C9.3", "T3")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        HEAD.pack(0, 1, 0, 1, 40),
        HEAD.pack(0, 1, 9, 1, 40) + encode_places(Segments([0], [0], [40])),
        HEAD.pack(1, 1, 0, 1, 40) + encode_places(Segments([0], [0], [40])),
        HEAD.pack(0, 1, 0, 1, 41) + encode_places(Segments([0], [0], [40])),
        HEAD.pack(0, 1, 0, 2, 40) + encode_places(Segments([0], [0], [40])),
        HEAD.pack(0, 1, 0, 1, 400) + encode_places(Segments([0], [0], [400])),
        HEAD.pack(0, 1, 0, 1, 40) + encode_places(Segments([0], [NBYTES], [40])),
        HEAD.pack(0, 1, 0, 1, 40) + encode_places(Segments([7], [0], [40])),
        HEAD.pack(0, 1, 0, 0, 0),
        HEAD.pack(0, MAX_SEGMENTS + 1, 0, 1, 40) + encode_places(Segments([0], [0], [40])),
    ],
    ids=[
        "empty",
        "no-table",
        "no-such-slot",
        "part-past-the-end",
        "sum",
        "count",
        "slot-overrun",
        "bounds",
        "region",
        "none",
        "more-parts-than-segments",
    ],
)
def test_a_part_that_cannot_be_writes_nothing(body: bytes) -> None:
    world = World(Slots(2, 64))
    world.there.region.view()[:] = 9
    with pytest.raises(ProtocolViolation):
        world.unpacker.arrived((new_transfer_id(), 0), body)
    assert not world.target.any()
    assert not len(world.unpacker)


@pytest.mark.clause("C7.4")
def test_a_landing_that_was_never_sent_is_a_violation() -> None:
    world = World(Slots(1, 64))
    chunk = chunk_of([0], [0], [40])
    world.packer.add(chunk)
    (part,) = world.packer.ready()
    waiting = deque([(0, 5), (1, 0)])
    for number, slot in waiting:
        with pytest.raises(ProtocolViolation):
            world.packer.landed((chunk.transfer, 0), struct.pack("<II", number, slot))
    with pytest.raises(ProtocolViolation):
        world.packer.landed((new_transfer_id(), 0), struct.pack("<II", part.number, part.theirs))
    assert world.packer.landed((chunk.transfer, 0), struct.pack("<II", part.number, part.theirs)) is chunk


def first_of_two(slot: int) -> bytes:
    """The note of a part behind which another would come."""
    return HEAD.pack(0, 2, slot, 1, 40) + encode_places(Segments([0], [0], [40]))


@pytest.mark.clause("T12", "C9.3")
def test_a_peer_that_begins_chunks_and_finishes_none_is_refused_and_not_remembered() -> None:
    world = World(Slots(3, 64))
    for _ in range(3):
        world.unpacker.arrived((new_transfer_id(), 0), first_of_two(0))
        assert [landing.complete for landing in world.unpacker.landed()] == [False]
    before = world.target.copy()
    world.target[:40] = 9
    for _ in range(100):
        with pytest.raises(ProtocolViolation, match="T12"):
            world.unpacker.arrived((new_transfer_id(), 0), first_of_two(0))
    assert len(world.unpacker) == 3
    assert (world.target[:40] == 9).all()
    assert (world.target[40:] == before[40:]).all()


@pytest.mark.clause("T12", "T6")
@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), count=st.integers(1, 4))
def test_a_correct_source_never_has_more_unfinished_chunks_than_slots(seed: int, count: int) -> None:
    """Whenever what arrives and what has landed comes, in any order that the protocol permits."""
    draw, most = random.Random(seed), 0
    world = World(Slots(count, 64), Slow)
    assert isinstance(world.here, Slow)
    assert isinstance(world.there, Slow)
    for sequence in range(12):
        rows = draw.randint(1, 4)  # a part each
        world.packer.add(chunk_of([0] * rows, list(range(0, 50 * rows, 50)), [40] * rows, sequence))
    on_the_wire: list[Part] = []
    said: list[Landing] = []
    while len(world.packer):
        step = draw.randrange(4)
        if step == 0:
            for event in world.here.events:
                event.done = True
            on_the_wire += world.packer.ready()
        elif step == 1 and on_the_wire:
            part = on_the_wire.pop(draw.randrange(len(on_the_wire)))
            world.unpacker.arrived((part.chunk.transfer, part.chunk.sequence), world.write(part))
            most = max(most, len(world.unpacker))
            world.packer.written(part)
        elif step == 2:
            for event in world.there.events:
                event.done = True
            said += world.unpacker.landed()
        elif step == 3 and said:
            landing = said.pop(draw.randrange(len(said)))
            world.packer.landed(landing.key, landing.body)
    assert most <= count
