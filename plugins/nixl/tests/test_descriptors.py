"""Segments as addresses: the same bytes in the same pairing, in fewer rows."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connector import MemoryRegion
from kvbaton.errors import SegmentError
from kvbaton.segments import Segments
from kvbaton_nixl.descriptors import AddressBook, merge


def pairing(source, target):
    """Which byte goes where, one by one, in order."""
    pairs = []
    for (from_, length, device), (to, same, there) in zip(source.tolist(), target.tolist(), strict=True):
        assert length == same
        pairs += [((device, from_ + at), (there, to + at)) for at in range(length)]
    return pairs


@st.composite
def rows(draw):
    """Two lists that pair up, with neighbours that follow each other on one side, on both, or across devices."""
    source, target = [], []
    for _ in range(draw(st.integers(0, 12))):
        length = draw(st.integers(1, 5))
        for side in (source, target):
            if side and draw(st.booleans()):
                last = side[-1]
                side.append((last[0] + last[1], length, draw(st.sampled_from([last[2], 0, 1]))))
            else:
                side.append((draw(st.integers(0, 60)), length, draw(st.integers(0, 1))))
    return [np.array(side, np.uint64).reshape(-1, 3) for side in (source, target)]


@pytest.mark.clause("C3.2", "C3.6")
@settings(max_examples=400)
@given(rows())
def test_merging_moves_the_same_bytes_to_the_same_places(lists):
    source, target = lists
    before = pairing(source, target)
    fewer, there = merge(source, target)
    assert pairing(fewer, there) == before
    assert len(fewer) <= len(source)
    for one, other in zip(fewer[:-1].tolist(), fewer[1:].tolist(), strict=True):
        if one[0] + one[1] == other[0] and one[2] == other[2]:  # then they do not follow each other at the target
            at = fewer.tolist().index(one)
            left, right = there[at].tolist(), there[at + 1].tolist()
            if fewer.tolist().count(one) == 1:
                assert left[0] + left[1] != right[0] or left[2] != right[2]


def test_a_whole_region_in_pages_is_one_row():
    book = AddressBook.of([MemoryRegion(3, "host", 0, 4096, 1 << 20)])
    pages = Segments(np.full(256, 3), np.arange(256) * 4096, np.full(256, 4096))
    fewer, there = merge(book.rows(pages), book.rows(pages))
    assert fewer.tolist() == there.tolist() == [[4096, 1 << 20, 0]]


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
    stranger = max(ids) + 1
    with pytest.raises(SegmentError, match=rf"\[{stranger}\] were not registered"):
        AddressBook.of(regions).rows(Segments.of([*picked, (stranger, 0, 1)]))


@pytest.mark.clause("C3.6", "T1")
def test_no_regions_two_kinds_and_one_id_twice_are_refused():
    with pytest.raises(SegmentError, match="no regions"):
        AddressBook.of([]).rows(Segments.of([(0, 0, 1)]))
    with pytest.raises(SegmentError, match="cuda and host"):
        AddressBook.of([MemoryRegion(0, "host", 0, 1, 1), MemoryRegion(1, "cuda", 0, 1, 1)])
    with pytest.raises(SegmentError, match="twice"):
        AddressBook.of([MemoryRegion(0, "host", 0, 1, 1), MemoryRegion(0, "host", 0, 64, 1)])
