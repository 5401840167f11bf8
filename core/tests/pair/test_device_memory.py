"""Device memory of an end, through a made-up driver whose devices are arrays of the host."""

import ctypes

import numpy as np
import pytest
from made_up_devices import Devices

from kvbaton import cuda
from kvbaton.connector import Capabilities, MemoryRegion
from kvbaton.errors import TransportError
from kvbaton.pair import Bounds, PairFailed, open_pair
from kvbaton.pair.memory import POISON, Memory, Pattern
from kvbaton.segments import Segments


class Guard:
    capabilities = Capabilities(memory_kinds=frozenset({"cuda"}))


@pytest.fixture
def devices(monkeypatch):
    made = Devices()
    monkeypatch.setattr(cuda, "load", lambda: made)
    return made


READS = Segments.of([(0, 0, 5), (1, 100, 400)])
WRITES = Segments.of([(1, 3, 5), (0, 50, 400)])


def moved(source, target):
    """What a transport would do."""
    for (a, offset, length), (b, at, _) in zip(READS.triples(), WRITES.triples(), strict=True):
        ctypes.memmove(target.regions[b].address + at, source.regions[a].address + offset, length)


def test_every_byte_of_a_device_is_filled_compared_and_given_back(devices):
    source, target = Memory(Guard, "cuda", 0, (1000, 2000)), Memory(Guard, "cuda", 1, (1000, 2000))
    assert [region.kind for region in source.regions] == ["cuda", "cuda"]
    source.fill(1)
    assert (source.image(source.regions[1]) == Pattern(1).of(1, 0, 2000)).all()
    target.fill(0)
    moved(source, target)
    found = target.check(READS, WRITES, 1)
    assert (found.wrong, found.outside) == (0, 0)
    assert all((target.image(region) == POISON).all() for region in target.regions)
    moved(source, target)
    ctypes.memset(target.regions[0].address + 60, POISON, 1)
    ctypes.memset(target.regions[1].address + 0, 1, 2)
    found = target.check(READS, WRITES, 1)
    assert (found.wrong, found.outside) == (1, 2)
    for memory in (source, target):
        memory.free()
    assert devices.arrays == {}


def test_copying_to_another_device_allocates_there_once(devices):
    memory = Memory(Guard, "cuda", 0, (1000, 2000))
    memory.fill(1)
    places = memory.elsewhere(1)
    assert memory.elsewhere(1) == places
    assert [devices.arrays[place][0] for place in places] == [1, 1]
    assert devices.current == 0
    memory.copy(READS, WRITES, places)
    assert devices.settled
    copied = np.empty(400, np.uint8)
    devices.read(copied.ctypes.data, places[0] + 50, 400)
    assert (copied == Pattern(1).of(1, 100, 400)).all()
    memory.free()
    assert devices.arrays == {}


def test_memory_that_the_transport_allocates_is_left_to_it(devices):
    array = np.zeros(1000, np.uint8)

    class Allocating:
        capabilities = Capabilities(memory_origin="allocated")

        @staticmethod
        def allocate(id, kind, device, nbytes):
            return MemoryRegion(id, kind, device, array.ctypes.data, nbytes, array)

    memory = Memory(Allocating, "cuda", 0, (1000,))
    memory.fill(0)
    assert (array == POISON).all()
    memory.free()
    assert devices.arrays == {}


def test_without_a_driver_it_is_said(monkeypatch):
    monkeypatch.setattr(cuda, "load", lambda: None)
    with pytest.raises(TransportError, match="no CUDA driver"):
        Memory(Guard, "cuda", 0, (1000,))


def test_a_pair_between_two_devices(tmp_path):
    problems = []
    bounds = Bounds(30.0, 20.0, 30.0, 5.0)
    with open_pair(
        "made_up_devices:plugin", regions=(1000, 2000), memory="cuda", devices=(0, 1), bounds=bounds,
        problems=problems.append,
    ) as pair:  # fmt: skip
        for way in (pair.forward, pair.back):
            way.prepare()
            way.move(READS, WRITES)
            way.check(READS, WRITES)
            assert len(way.copy(READS, WRITES, repeats=3).received) == 3
        with pytest.raises(PairFailed, match="405 of 405 bytes are wrong"):
            pair.back.check(READS, WRITES)
    assert problems == []
