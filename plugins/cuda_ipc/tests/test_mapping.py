"""What a stage offers, what of an offer can be mapped, and in which order mappings end."""

import dataclasses
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.connector import MemoryRegion, RegionInfo
from kvbaton.errors import ConnectError, ProtocolViolation, RegistrationError
from kvbaton_cuda_ipc import mapping
from kvbaton_cuda_ipc.driver import Allocation, DriverError
from kvbaton_cuda_ipc.mapping import MAX_OFFER, Mapping, Offer, Place, Shared, offer, unreachable

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import FakeCuda

HERE, THERE = b"device-0" * 2, b"device-1" * 2
PEER = "decode-0"


class Pools(FakeCuda):
    """Allocations of a MiB each, as a framework's pools; what is in none of them is no device memory."""

    def __init__(self, *bases, **how):
        super().__init__(**how)
        self.pools = {base: Allocation(0, base, 1 << 20, True) for base in bases}

    def allocation(self, address):
        return next((one for base, one in self.pools.items() if base <= address < base + one.nbytes), None)


def region(id, address, length=4096, device=0, kind="cuda"):
    return MemoryRegion(id, kind, device, address, length)


def theirs(**changes):
    made = offer(Pools(1 << 30), [region(0, (1 << 30) + 512)])
    return msgspec.structs.replace(made, **{"process": bytes(16), **changes})


@pytest.mark.clause("T1", "T2")
def test_regions_of_one_allocation_share_its_handle():
    """Two pieces of one pool and one of another: two handles, and where each piece is."""
    cuda = Pools(1 << 30, 1 << 31)
    made = offer(cuda, [region(3, (1 << 30) + 512), region(5, (1 << 31) + 64, 100), region(7, (1 << 30) + 8192)])
    assert [shared.handle for shared in made.allocations] == [cuda.export(1 << 30), cuda.export(1 << 31)]
    assert made.places == (Place(3, 0, 512, 4096), Place(5, 1, 64, 100), Place(7, 0, 8192, 4096))
    assert Offer.decode(made.encode()) == made


@pytest.mark.clause("T1")
@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        (region(1, 1 << 30, kind="host"), "host memory"),
        (region(1, 1 << 30, device=1), "a stage has one device"),
        (region(1, 4096), "no device memory"),
        (region(1, (1 << 30) + (1 << 20) - 8, 100), "last 92 bytes are beyond"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_the_reason(wrong, word):
    with pytest.raises(RegistrationError, match=word) as refused:
        offer(Pools(1 << 30), [region(0, 1 << 30), wrong])
    assert refused.value.region == 1


@pytest.mark.clause("T1")
def test_memory_mapped_piece_by_piece_is_refused_with_the_remedy():
    cuda = Pools(1 << 30)
    cuda.pools[1 << 30] = dataclasses.replace(cuda.pools[1 << 30], exportable=False)
    with pytest.raises(RegistrationError, match="PYTORCH_CUDA_ALLOC_CONF"):
        offer(cuda, [region(0, 1 << 30)])


@pytest.mark.clause("T1")
def test_a_driver_that_refuses_is_quoted():
    cuda = Pools(1 << 30)
    cuda.fails["export"] = DriverError("cuIpcGetMemHandle failed with CUDA_ERROR_NOT_SUPPORTED (801)")
    with pytest.raises(RegistrationError, match="NOT_SUPPORTED"):
        offer(cuda, [region(0, 1 << 30)])


@pytest.mark.clause("T1")
def test_more_than_an_endpoint_has_room_for_is_refused():
    bases = [(1 << 30) + (index << 20) for index in range(1000)]
    with pytest.raises(RegistrationError, match="fewer, larger pieces"):
        offer(Pools(*bases), [region(index, base) for index, base in enumerate(bases)])


@pytest.mark.clause("T2")
@pytest.mark.parametrize(
    ("offered", "cuda", "word"),
    [
        ({"host": b"x" * 16}, FakeCuda(), "another host"),
        ({"process": mapping.PROCESS}, FakeCuda(), "in this process"),
        ({"device": THERE}, FakeCuda(), "CUDA_VISIBLE_DEVICES"),
        ({"device": THERE}, FakeCuda((HERE, THERE), peers=False), "no peer access"),
        ({"device": THERE}, FakeCuda((HERE, THERE)), ""),
        ({}, FakeCuda(), ""),
    ],
)
def test_what_cannot_be_reached_is_told_before_anything_is_opened(offered, cuda, word):
    reason = unreachable(cuda, theirs(**offered), 0, PEER)
    assert bool(reason) == bool(word)
    assert word in reason
    assert not cuda.opened


@pytest.mark.clause("T2", "C3.6")
def test_an_offer_must_be_of_the_regions_that_are_announced():
    """Core checks segments by the announced lengths: what is offered may not be shorter, longer or other."""
    theirs().check([RegionInfo(0, "cuda", 4096)], PEER)
    for wrong in ([RegionInfo(0, "cuda", 8192)], [RegionInfo(1, "cuda", 4096)], []):
        with pytest.raises(ProtocolViolation, match="announces"):
            theirs().check(wrong, PEER)


@pytest.mark.clause("T2")
def test_a_mapping_has_an_address_for_each_region_and_closes_each_allocation_once():
    cuda = FakeCuda()
    made = offer(Pools(1 << 30, 1 << 31), [region(3, (1 << 30) + 512), region(5, (1 << 31) + 64, 100)])
    mapped = Mapping(cuda, made, PEER)
    first, second = cuda.mapped
    assert mapped.addresses == {3: first + 512, 5: second + 64}
    mapped.close()
    mapped.close()
    assert not cuda.mapped


@pytest.mark.clause("T2")
def test_what_was_opened_is_closed_where_one_cannot_be():
    class Second(FakeCuda):
        def open(self, handle):
            if self.mapped:
                raise DriverError("cuIpcOpenMemHandle_v2 failed with CUDA_ERROR_INVALID_VALUE (1)")
            return super().open(handle)

    cuda = Second()
    made = offer(Pools(1 << 30, 1 << 31), [region(3, 1 << 30), region(5, 1 << 31)])
    with pytest.raises(ConnectError, match=r"INVALID_VALUE.*CUDA 13\.0"):
        Mapping(cuda, made, PEER)
    assert not cuda.mapped


@pytest.mark.clause("T2", "C3.6")
def test_an_allocation_that_is_smaller_than_it_is_said_to_be_is_not_used():
    class Small(FakeCuda):
        def allocation(self, address):
            return Allocation(0, address, 4096, True)

    cuda = Small()
    with pytest.raises(ConnectError, match="is said to have 1048576 bytes and has 4096"):
        Mapping(cuda, theirs(), PEER)
    assert not cuda.mapped


@pytest.mark.clause("T10")
def test_one_that_does_not_close_keeps_no_other_open():
    cuda = FakeCuda()
    mapped = Mapping(cuda, offer(Pools(1 << 30, 1 << 31), [region(3, 1 << 30), region(5, 1 << 31)]), PEER)
    cuda.fails["close"] = DriverError("cuIpcCloseMemHandle failed")
    with pytest.raises(DriverError):
        mapped.close()
    assert not cuda.mapped


# -- bytes from anywhere ---------------------------------------------------------------------------------------------


@pytest.mark.clause("C9.3")
@given(st.binary(max_size=400))
def test_arbitrary_bytes_are_refused(data):
    with pytest.raises(ProtocolViolation):
        Offer.decode(data)


@pytest.mark.clause("C9.3")
@given(at=st.integers(0, 10_000), bit=st.integers(0, 7), cut=st.booleans())
def test_damaged_offers_are_refused(at, bit, cut):
    data = bytearray(theirs().encode())
    at %= len(data)
    if cut:
        del data[at:]
    else:
        data[at] ^= 1 << bit
    with pytest.raises(ProtocolViolation):
        Offer.decode(bytes(data))


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize(
    "wrong",
    [
        {"places": (Place(0, 1, 0, 64),)},
        {"places": (Place(0, 0, 4000, 64),)},
        {"places": (Place(0, 0, 0, 64), Place(0, 0, 64, 64))},
        {"places": (Place(0, 0, 0, 0),)},
        {"places": (Place(0, 0, -64, 128),)},
        {"allocations": (Shared(b"short", 4032),)},
        {"device": b"short"},
        {"driver": -1},
    ],
)
def test_well_formed_nonsense_is_refused(wrong):
    made = Offer(bytes(16), bytes(16), 13000, HERE, (Shared(bytes(64), 4032),), (Place(0, 0, 0, 64),))
    assert Offer.decode(made.encode()) == made
    with pytest.raises(ProtocolViolation):
        Offer.decode(msgspec.structs.replace(made, **wrong).encode())


@pytest.mark.clause("C9.3")
def test_an_offer_that_is_too_long_is_not_even_read():
    with pytest.raises(ProtocolViolation, match="bytes"):
        Offer.decode(bytes(MAX_OFFER + 1))


def test_addresses_are_integers_that_numpy_takes():
    mapped = Mapping(FakeCuda(), theirs(), PEER)
    assert np.array(list(mapped.addresses.values()), np.int64).tolist() == list(mapped.addresses.values())
