"""Segments as addresses, and as the tables that notes carry."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connector import MemoryRegion
from kvbaton.errors import SegmentError
from kvbaton.segments import Segments, coalesce
from kvbaton_nixl.descriptors import AddressBook, Lattice, columns, decode_places, encode_places, lattices

REGIONS = st.one_of(st.just(3), st.integers(-(1 << 31), (1 << 31) - 1))
LENGTHS = st.one_of(st.integers(1, 1 << 20), st.integers(1, (1 << 63) - 1))
OFFSETS = st.one_of(
    st.integers(0, 1 << 20), st.integers(0, 1 << 24).map(lambda at: at << 12), st.integers(0, 1 << 63 - 1)
)


@st.composite
def lists(draw):
    """Segment lists: of equal lengths or not, in one region or several, on a grid or anywhere."""
    count = draw(st.integers(0, 12))
    region, length = draw(REGIONS), draw(LENGTHS)
    return Segments.of(
        [
            (
                region if draw(st.integers(0, 3)) else draw(REGIONS),
                min(draw(OFFSETS), (1 << 63) - 1),
                length if draw(st.integers(0, 5)) else draw(LENGTHS),
            )
            for _ in range(count)
        ]
    )


@pytest.mark.clause("C9.3")
@settings(max_examples=500)
@given(lists())
def test_a_table_says_what_the_segments_say(segments):
    assert columns(decode_places(encode_places(segments))) == segments
    lattice = Lattice.of(segments)
    if lattice is not None:
        assert lattice.segments() == segments
        assert (len(lattice), lattice.nbytes) == (len(segments), sum(length for _, _, length in segments.triples()))
        assert columns(decode_places(encode_places(lattice))) == segments
        assert lattice[1:3].segments() == segments[1:3]


def test_a_segment_of_a_paged_cache_costs_four_bytes():
    pages = Segments(
        np.zeros(4096, np.int32), np.random.default_rng(1).permutation(1 << 20)[:4096] << 14, [1 << 14] * 4096
    )
    lattice = Lattice.of(pages)
    assert lattice is not None
    assert len(encode_places(lattice)) < 4 * 4096 + 32
    assert len(encode_places(pages)) < 8 * 4096 + 32


@pytest.mark.clause("C3.6")
@settings(max_examples=300)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 64), st.integers(0, 8), st.integers(1, 400))
def test_a_lattice_is_within_its_region_when_its_segments_are(units, length, shift, size):
    lattice = Lattice(1, length, shift, np.array(units, np.uint32))
    refused = []
    for places in (lattice, lattice.segments()):
        try:
            places.check_bounds({1: size}, "a list")
        except SegmentError as error:
            refused.append(str(error))
    assert len(refused) in (0, 2)
    assert len(set(refused)) <= 1
    with pytest.raises(SegmentError, match="not registered"):
        lattice.check_bounds({2: 1 << 40}, "a list")


@pytest.mark.clause("C3.2", "C3.6")
@settings(max_examples=500)
@given(st.data(), st.sampled_from([1, 16, 24, 4096]), st.booleans())
def test_neighbours_are_merged_in_either_form(data, length, equal):
    count = data.draw(st.integers(1, 10))
    lengths = [length if equal else data.draw(st.integers(1, 3)) for _ in range(count)]
    source, target = (
        Segments([0] * count, [length * data.draw(st.integers(0, 12)) for _ in range(count)], lengths) for _ in range(2)
    )
    fewer = coalesce(source, target)
    assert tuple(map(columns, lattices(source, target))) == fewer
    if equal and len(fewer[0]) == count:
        assert all(isinstance(places, Lattice) for places in lattices(source, target))


@pytest.mark.clause("C9.3")
@settings(max_examples=500)
@given(lists(), st.data())
def test_a_table_that_was_tampered_with_is_refused_or_a_list_no_longer_than_its_bytes(segments, data):
    table = bytearray(encode_places(segments))
    for _ in range(data.draw(st.integers(0, 3))):
        table[data.draw(st.integers(0, len(table) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(table[: data.draw(st.integers(0, len(table)))]) if data.draw(st.booleans()) else bytes(table)
    try:
        said = decode_places(cut)
    except SegmentError:
        return
    assert 4 * len(said) <= len(cut)
    listed = columns(said)
    assert (listed.length > 0).all()
    assert (listed.offset >= 0).all()


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize(
    "table",
    [
        b"",
        b"\x01" * 11,
        struct.pack("<BBHQi", 1, 0, 0, 8, 0),  # a lattice of nothing
        struct.pack("<BBHQiH", 1, 0, 0, 8, 0, 5),
        struct.pack("<BBHQiI", 1, 32, 0, 8, 0, 5),
        struct.pack("<BBHQiI", 1, 0, 1, 8, 0, 5),
        struct.pack("<BBHQiI", 1, 0, 0, 0, 0, 5),
        struct.pack("<BBHQiI", 1, 0, 0, 1 << 63, 0, 5),
        struct.pack("<BBHQiI", 3, 0, 0, 8, 0, 5),
        struct.pack("<BBHQiI", 2, 0, 1, 0, 0, 0),
        struct.pack("<BBHQiIII", 2, 0, 1, 0, 0, 2, 5, 8),
        struct.pack("<BBHQiIII", 2, 0, 1, 0, 0, (1 << 32) - 1, 5, 8),
        struct.pack("<BBHQiIII", 2, 0, 0, 0, 0, 1, 5, 8),
        struct.pack("<BBHQiIII", 2, 32, 1, 0, 0, 1, 5, 8),
        struct.pack("<BBHQiIII", 2, 0, 1, 0, 0, 1, 5, 0),
        struct.pack("<BBHQiIII", 2, 0, 1, 9, 0, 1, 5, 8),
        struct.pack("<BBHQiIII", 2, 0, 65535, 0, 0, 1, 5, 8),
        struct.pack("<BBHQ", 0, 1, 0, 0),
        struct.pack("<BBHQ19s", 0, 0, 0, 0, b""),
    ],
)
def test_a_table_that_cannot_be_is_refused(table):
    with pytest.raises(SegmentError):
        decode_places(table)


@pytest.mark.clause("C3.6")
@settings(max_examples=200)
@given(st.data())
def test_rows_are_where_the_regions_are(data):
    ids = data.draw(st.lists(st.integers(-5, 500), min_size=1, max_size=8, unique=True))
    regions = [
        MemoryRegion(id, "host", data.draw(st.integers(0, 3)), data.draw(st.integers(1, 1 << 47)), 1 << 20)
        for id in ids
    ]
    known = {region.id: region for region in regions}
    picked = data.draw(
        st.lists(st.tuples(st.sampled_from(ids), st.integers(0, 1 << 19), st.integers(1, 99)), max_size=9)
    )
    rows = AddressBook.of(regions).rows(Segments.of(picked))
    assert rows.dtype == np.uint64
    assert rows.tolist() == [
        [known[id].address + offset, length, known[id].device] for id, offset, length in picked
    ]  # fmt: skip
    assert AddressBook.of(regions).addresses(Segments.of(picked)).tolist() == [row[0] for row in rows.tolist()]
    stranger = max(ids) + 1
    with pytest.raises(SegmentError, match=rf"\[{stranger}\] were not registered"):
        AddressBook.of(regions).rows(Segments.of([*picked, (stranger, 0, 1)]))
    with pytest.raises(SegmentError, match="not registered"):
        AddressBook.of(regions).require(Segments.of([(stranger, 0, 1)]))


@pytest.mark.clause("C3.6", "T1")
def test_no_regions_two_kinds_and_one_id_twice_are_refused():
    with pytest.raises(SegmentError, match="no regions"):
        AddressBook.of([]).rows(Segments.of([(0, 0, 1)]))
    with pytest.raises(SegmentError, match="cuda and host"):
        AddressBook.of([MemoryRegion(0, "host", 0, 1, 1), MemoryRegion(1, "cuda", 0, 1, 1)])
    with pytest.raises(SegmentError, match="twice"):
        AddressBook.of([MemoryRegion(0, "host", 0, 1, 1), MemoryRegion(0, "host", 0, 64, 1)])
