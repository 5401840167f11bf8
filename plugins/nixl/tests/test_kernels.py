"""What a compiled kernel must show before it packs, and what happens where it does not; without a device."""

import ctypes
import importlib.util
import logging
import os
import sys
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbaton.connector import ConnectorContext, MemoryRegion
from kvbaton.errors import TransportError
from kvbaton.identity import PeerId
from kvbaton_nixl import kernels, plugin, staging
from kvbaton_nixl.kernels import VARIANTS, Move, Proof, first_unit

COLUMNS = [variant for variant in VARIANTS if not variant[0]]


def named(variant):
    lattice, wide, gather = variant
    return f"{'lattice' if lattice else 'columns'}-{'words' if wide else 'bytes'}-{'gather' if gather else 'scatter'}"


each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=named)


def segments(move):
    """Of each: its address, that of its place in the slot, and its length."""
    table = move.table.numpy()
    if not move.each:
        address, place, length = table.reshape(3, move.count)
        return address, move.base + place, length
    units = table[: move.count].view(np.uint32).astype(np.int64)
    length = np.full(move.count, move.each)
    return move.origin + (units << move.shift), move.base + length.cumsum() - length, length


def by_hand(move, lengths=None, leave=lambda row, rows, program, step, last: False):
    """What the kernel should do; what a program is to ``leave`` is a block of a row, whether its step is the last."""
    outside, inside, length = segments(move)
    length = length if lengths is None else lengths
    programs, block = move.grid[1], move.block
    for row, program in product(range(move.count), range(programs)):
        starts = range(program * block, int(length[row]), programs * block)
        for step, start in enumerate(starts):
            if leave(row, move.count, program, step, start + block >= length[row]):
                continue
            here, there = int(outside[row]) + start, int(inside[row]) + start
            read, write = (here, there) if move.gather else (there, here)
            ctypes.memmove(write, read, min(block, int(length[row]) - start))


FAULTS = {
    "nothing": lambda row, rows, program, step, last: True,
    "the first row is missing": lambda row, rows, program, step, last: row == 0,
    "the last row is missing": lambda row, rows, program, step, last: row == rows - 1,
    "every last block is missing": lambda row, rows, program, step, last: last,
    "one last block is missing": lambda row, rows, program, step, last: last and row == 2,
    "one program is missing": lambda row, rows, program, step, last: program == 1,
    "every program takes one step": lambda row, rows, program, step, last: step > 0,
    "no program takes a third step": lambda row, rows, program, step, last: step > 1,
}


@pytest.mark.clause("T3")
@each_variant
def test_a_proof_holds_for_what_moves_every_byte(variant):
    proof = Proof(*variant, "cpu")
    move = proof.by(lambda move: by_hand(move) or move)
    assert proof.holds()
    assert move.variant == variant
    outside, inside, length = segments(move)
    assert move.grid[1] > 1, "several programs share a segment"
    assert move.longest == length.max() > 2 * move.block * move.grid[1], "and take several steps"
    assert (length % move.block).all() or not move.each
    assert not (np.bitwise_or.reduce([*outside, *inside, *length]) & 15) or not move.wide
    assert move.wide or {int(address) & 1 for address in outside} == {0, 1} or move.each
    assert move.wide or move.base & 1


@pytest.mark.clause("T3")
@each_variant
@pytest.mark.parametrize("fault", FAULTS)
def test_a_proof_sees_what_is_missing(variant, fault):
    proof = Proof(*variant, "cpu")
    proof.by(by_hand)
    proof.by(lambda move: by_hand(move, leave=FAULTS[fault]))  # what the launch before had moved does not count
    assert not proof.holds()


@pytest.mark.clause("T3")
@pytest.mark.parametrize("variant", COLUMNS, ids=named)
@pytest.mark.parametrize("of", ["the first", "the one before", "the longest before"])
def test_a_proof_sees_lengths_that_are_another_rows(variant, of):
    """No longer than their own here, where more would be written who knows where; that is the test below."""
    proof = Proof(*variant, "cpu")

    def wrong(move):
        length = segments(move)[2]
        others = {
            "the first": np.full_like(length, length[0]),
            "the one before": np.roll(length, 1),
            "the longest before": np.maximum.accumulate(np.roll(length, 1)),
        }
        by_hand(move, np.minimum(others[of], length))

    proof.by(wrong)
    assert not proof.holds()


@pytest.mark.clause("T3")
@each_variant
@pytest.mark.parametrize("away", [-1, 0, 15])
def test_a_proof_sees_a_byte_beside_any_segment(variant, away):
    rows = Proof(*variant, "cpu").by(lambda move: move.count)
    for row in range(rows):
        proof = Proof(*variant, "cpu")

        def wrong(move, row=row):
            by_hand(move)
            outside, inside, length = segments(move)
            ends = inside + length if move.gather else outside + length
            starts = inside if move.gather else outside
            if move.each and move.gather:  # a lattice's places in the slot follow each other
                row = -1 if away >= 0 else 0
            at = int(starts[row]) + away if away < 0 else int(ends[row]) + away
            ctypes.memset(at, ctypes.c_uint8.from_address(at).value ^ 1, 1)

        proof.by(wrong)
        assert not proof.holds()


@pytest.mark.clause("T3")
@each_variant
def test_a_proof_sees_a_byte_that_is_wrong_in_any_segment(variant):
    for row in range(Proof(*variant, "cpu").by(lambda move: move.count)):
        proof = Proof(*variant, "cpu")

        def wrong(move, row=row):
            by_hand(move)
            outside, inside, length = segments(move)
            at = int((inside if move.gather else outside)[row] + length[row]) - 1
            ctypes.memset(at, ctypes.c_uint8.from_address(at).value ^ 1, 1)

        proof.by(wrong)
        assert not proof.holds()


@pytest.mark.clause("T3")
@pytest.mark.parametrize("address", [0x7F45_80DE_D2F0, 0x55D0_1234_5670, 0x3383_D041])
def test_a_lattice_has_units_beyond_31_bits(address, monkeypatch):
    """Wherever torch puts a proof's memory: a heap may be so low that an origin that far before it is none."""
    monkeypatch.setattr(kernels, "first_unit", lambda at, last: first_unit(address, last))
    for variant in VARIANTS:
        if variant[0]:
            units = Proof(*variant, "cpu").by(lambda move: move.table.numpy()).view(np.uint32)
            shift = 5 if variant[1] else 1
            assert int(units.min()) << shift <= address, "its origin is none"
            if address >> 40:
                assert units.min() < 1 << 31 < units.max()


@pytest.mark.clause("T3")
def test_a_step_beyond_the_longest_segment_of_a_lattice_fits_32_bits():
    move = Move(None, 1, 0, 1, 0, kernels.MAX_EACH - 1, kernels.MAX_EACH - 1, wide=False, gather=True)
    assert move.longest + move.grid[1] * move.block < 1 << 31


# -- what is made of it ------------------------------------------------------------------------------------------------


class Direct:
    """A compiled kernel, as far as it is launched: :attr:`wrong` says what it does."""

    def __init__(self, wrong=None):
        self.wrong = wrong

    def __call__(self, move):
        if self.wrong is not None:
            self.wrong(move)
        else:
            by_hand(move)


def compile_with(monkeypatch, by_triton, direct):
    def start(move):
        by_triton(move)
        return direct

    monkeypatch.setattr(Move, "start", start)
    monkeypatch.setattr(Move, "run", lambda move, given, stream: given[move.variant](move))


def fails(move):
    raise TypeError("run() takes 3 positional arguments")


@pytest.mark.clause("T3")
@each_variant
def test_what_is_right_by_either_way_is_launched_directly(variant, monkeypatch):
    direct = Direct()
    compile_with(monkeypatch, by_hand, direct)
    assert kernels.compiled(variant, None, "cpu") is direct


@pytest.mark.clause("T3")
@each_variant
@pytest.mark.parametrize(
    "wrong",
    [lambda move: None, lambda move: by_hand(move, leave=FAULTS["no program takes a third step"]), fails],
    ids=["nothing", "cut-short", "fails"],
)
def test_a_direct_launch_that_is_wrong_is_not_used(variant, wrong, monkeypatch):
    compile_with(monkeypatch, by_hand, Direct(wrong))
    assert kernels.compiled(variant, None, "cpu") is None


@pytest.mark.clause("T3")
def test_a_triton_that_returns_no_kernel_is_launched_by_itself(monkeypatch):
    compile_with(monkeypatch, by_hand, None)
    assert kernels.compiled(VARIANTS[0], None, "cpu") is None


@pytest.mark.clause("T3")
@each_variant
def test_a_kernel_that_moves_wrong_bytes_is_refused(variant, monkeypatch):
    """Whatever its direct launch does."""
    compile_with(monkeypatch, lambda move: by_hand(move, leave=FAULTS["one last block is missing"]), Direct())
    with pytest.raises(TransportError, match=r"T3: .*triton \d.*wrong bytes.*install another version.*never"):
        kernels.compiled(variant, None, "cpu")


@pytest.fixture
def device(monkeypatch):
    """One that compiles nothing that is right; ``device.asked``: how often it was tried."""

    class Device:
        asked = 0

    def wrong(variant, stream):
        Device.asked += 1
        raise TransportError("T3: wrong bytes")

    class Current:
        def __init__(self, device):
            pass

        def __enter__(self):
            pass

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(kernels, "compiled", wrong)
    monkeypatch.setattr(torch.cuda, "device", Current)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    kernels._prepared.cache_clear()
    staging._say_once.cache_clear()
    yield Device
    kernels._prepared.cache_clear()
    staging._say_once.cache_clear()


ON_DEVICE = MemoryRegion(0, "cuda", 0, 4096, 4096)


def opened(packing):
    return plugin.open(plugin.Options(packing=packing), ConnectorContext(PeerId("decode-0", 1), 0))


@pytest.mark.clause("T3")
def test_auto_goes_on_without_packing_and_says_so_once(device, caplog):
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            opened("auto").close()
            assert staging.make_mover("cuda", [ON_DEVICE], staging.Slots(1, 4096), "auto") is None
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA device 0 does not pack short segments, so moving them takes longer: T3: wrong bytes"
    ]
    assert device.asked == 1


@pytest.mark.clause("T3")
def test_always_is_refused(device, caplog):
    for _ in range(2):
        with pytest.raises(TransportError, match="T3: wrong bytes"):
            opened("always")
        with pytest.raises(TransportError, match="T3: wrong bytes"):
            staging.make_mover("cuda", [ON_DEVICE], staging.Slots(1, 4096), "always")
    assert device.asked == 1
    assert not caplog.records


@pytest.mark.clause("T3")
def test_never_asks_no_device(device):
    opened("never").close()
    assert staging.make_mover("cuda", [ON_DEVICE], staging.Slots(1, 4096), "never") is None
    assert device.asked == 0


@pytest.mark.clause("T3")
def test_host_memory_is_packed_whatever_a_device_does(device):
    memory = np.zeros(4096, np.uint8)
    mover = staging.make_mover("host", [MemoryRegion.of_array(0, memory)], staging.Slots(1, 4096), "always")
    assert mover is not None
    mover.close()
    assert device.asked == 0


@pytest.mark.clause("T3")
def test_a_compiler_that_fails_is_named_with_what_it_said(device, monkeypatch):
    def fails(variant, stream):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernels, "compiled", fails)
    with pytest.raises(TransportError, match=r"triton \d.*CUDA device 0.*RuntimeError: Failed to find C.*never"):
        opened("always")
    opened("auto").close()


def test_a_library_that_is_missing_is_named(device, monkeypatch):
    monkeypatch.setitem(sys.modules, "kvbaton_nixl.kernels", None)
    with pytest.raises(TransportError, match="torch and triton"):
        opened("always")
    opened("auto").close()


def test_a_library_that_does_not_load_is_named(device, monkeypatch):
    """A torch that was made for another CUDA raises what the loader says."""

    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == "kvbaton_nixl.kernels":
                raise OSError("libcudnn.so.9: cannot open shared object file")

    monkeypatch.delitem(sys.modules, "kvbaton_nixl.kernels")
    monkeypatch.setattr(sys, "meta_path", [Broken, *sys.meta_path])
    with pytest.raises(TransportError, match=r"torch and triton, and libcudnn\.so\.9"):
        opened("always")
    opened("auto").close()


# -- the kernel itself, in Triton's interpreter ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def interpreted():
    """The module once more, made for the interpreter, whatever device is here."""
    spec = importlib.util.spec_from_file_location("interpreted_kernels", kernels.__file__)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "TRITON_INTERPRET", "1")
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


@pytest.mark.clause("T3")
@each_variant
def test_the_kernel_holds_before_its_proof(interpreted, variant):
    assert interpreted.compiled(variant, None, "cpu") is None  # it compiles nothing


@pytest.mark.clause("T3")
@given(data=st.data(), variant=st.sampled_from(COLUMNS), programs=st.integers(1, 4))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_the_kernel_moves_segments_of_any_lengths(interpreted, data, variant, programs):
    _, wide, gather = variant
    grain = 16 if wide else 1
    longest = data.draw(st.sampled_from([40, 3000, 20000]))
    drawn = data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=12))
    length = np.array([grain * one for one in drawn], np.int64)
    gaps = grain * np.array(data.draw(st.lists(st.integers(0, 9), min_size=len(drawn), max_size=len(drawn))))
    reads, places = (gaps + length).cumsum() - length, length.cumsum() - length
    outside = np.random.default_rng(1).integers(0, 128, int(reads[-1] + length[-1]) + 64, np.uint8)
    slot = np.random.default_rng(2).integers(128, 256, int(length.sum()) + 64, np.uint8)
    expected = (outside.copy(), slot.copy())
    for read, place, size in zip(reads, places, length, strict=True):
        pair = (expected[1][place : place + size], expected[0][read : read + size])
        pair[0 if gather else 1][:] = pair[1 if gather else 0]
    table = torch.from_numpy(np.concatenate((outside.ctypes.data + reads, places, length)))
    interpreted.Move(
        table, len(drawn), slot.ctypes.data, 0, 0, 0, int(length.max()), wide, gather, split=programs
    ).start()
    assert np.array_equal(outside, expected[0])
    assert np.array_equal(slot, expected[1])


# -- on a device -------------------------------------------------------------------------------------------------------

on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")


@on_device
@pytest.mark.clause("T3")
def test_every_variant_is_proved_and_launched_directly():
    """Else the transport works, and each launch costs more."""
    kernels._prepared.cache_clear()
    assert sorted(kernels.prepare(0)) == sorted(VARIANTS)


@on_device
@pytest.mark.clause("T3")
@each_variant
def test_a_kernel_that_moves_wrong_bytes_on_a_device_is_not_used(variant, monkeypatch):
    real = Move.start
    monkeypatch.setattr(Move, "start", lambda move: real(move) if move.variant != variant else None)
    kernels._prepared.cache_clear()
    staging._say_once.cache_clear()
    try:
        with pytest.raises(TransportError, match=r"triton \d.*wrong bytes.*install another version"):
            opened("always")
        assert not staging.packs(0, "auto")
        opened("auto").close()
    finally:
        kernels._prepared.cache_clear()


@on_device
@pytest.mark.clause("T3")
def test_a_direct_launch_that_is_wrong_on_a_device_is_left_to_triton(monkeypatch):
    real = Move.run
    monkeypatch.setattr(Move, "run", lambda move, given, stream: None)
    kernels._prepared.cache_clear()
    try:
        assert kernels.prepare(0) == {}
    finally:
        kernels._prepared.cache_clear()
    stream = torch.cuda.current_stream()
    for variant in VARIANTS:
        proof = Proof(*variant)
        proof.by(lambda move: real(move, {}, stream))
        assert proof.holds()
