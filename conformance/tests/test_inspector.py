"""The inspector finds what is wrong and says where, and keeps quiet otherwise."""

import pytest

from kvbaton.segments import Segments
from kvbaton_conformance import inspector
from kvbaton_conformance.inspector import ByteInspector


@pytest.fixture
def ends():
    source, target = ByteInspector("prefill-0", 0), ByteInspector("decode-0", 1)
    for end in (source, target):
        end.allocate(0, 1000)
        end.allocate(1, 100)
    source.fill()
    return source, target


def expected(ends, reads=((0, 0, 10), (1, 5, 20)), writes=((0, 100, 10), (0, 200, 20))):
    source, target = ends
    return target.image().with_copy(source.image(), Segments.of(reads), Segments.of(writes))


def carry(ends, read, write):
    (region, first, length), (into, start, _) = read, write
    source, target = (end.regions for end in ends)
    target[into].view()[start : start + length] = source[region].view()[first : first + length]


def test_what_was_copied_exactly_passes(ends):
    image = expected(ends)
    carry(ends, (0, 0, 10), (0, 100, 10))
    carry(ends, (1, 5, 20), (0, 200, 20))
    ends[1].check(image)


@pytest.mark.parametrize(
    ("carried", "says"),
    [
        ([((0, 0, 10), (0, 100, 10))], r"region 0, bytes 200..220: .* in segment 1 \(bytes 200..220\)"),
        ([((0, 0, 11), (0, 100, 11)), ((1, 5, 20), (0, 200, 20))], r"bytes 110..111: .* 0 bytes after segment 0"),
        ([((0, 0, 10), (0, 100, 10)), ((1, 4, 21), (0, 199, 21))], r"bytes 199..200: .* 0 bytes before segment 1"),
        ([((0, 0, 10), (0, 100, 10)), ((1, 6, 20), (0, 200, 20))], r"in segment 1"),
        ([((0, 0, 10), (0, 100, 10)), ((1, 5, 19), (0, 200, 19))], r"bytes 219..220"),
        (
            [((0, 0, 10), (0, 100, 10)), ((1, 5, 20), (0, 200, 20)), ((0, 0, 1), (1, 50, 1))],
            r"region 1, bytes 50..51: .* where nothing was to be written",
        ),
    ],
)
@pytest.mark.clause("T3")
def test_every_kind_of_wrong_byte_is_found(ends, carried, says):
    image = expected(ends)
    for read, write in carried:
        carry(ends, read, write)
    with pytest.raises(AssertionError, match=r"^T3: memory of decode-0(.|\n)*" + says):
        ends[1].check(image)


@pytest.mark.clause("T3")
def test_of_many_wrong_runs_a_few_are_described_and_all_counted(ends, monkeypatch):
    """Each is looked for among the segments: of thousands in as many segments that would take minutes."""
    described = []
    where = inspector._where
    monkeypatch.setattr(inspector, "_where", lambda *about: described.append(about) or where(*about))
    image = expected(ends)
    for at in range(300, 500, 2):
        carry(ends, (0, at, 1), (0, at, 1))
    with pytest.raises(AssertionError, match=r"and 99 more runs"):
        ends[1].check(image)
    assert len(described) == 3


def test_the_message_begins_with_the_clause_that_is_asked_for(ends):
    before = ends[1].image()
    ends[1].untouched(before)
    carry(ends, (0, 0, 1), (0, 0, 1))
    with pytest.raises(AssertionError, match=r"^C5\.2: "):
        ends[1].untouched(before, "C5.2")


@pytest.mark.clause("C3.2")
def test_a_plan_that_writes_a_byte_twice_has_no_right_answer(ends):
    with pytest.raises(AssertionError, match=r"^C3\.2: bytes 109..119"):
        expected(ends, [(0, 0, 10), (0, 0, 10)], [(0, 100, 10), (0, 109, 10)])
    image = expected(ends)
    with pytest.raises(AssertionError, match=r"^C3\.2"):
        image.with_copy(ends[0].image(), Segments.of([(0, 0, 1)]), Segments.of([(0, 100, 1)]))


@pytest.mark.clause("C3.6")
def test_unequal_lengths_have_no_right_answer(ends):
    with pytest.raises(AssertionError, match=r"^C3\.6"):
        expected(ends, [(0, 0, 10)], [(0, 0, 9)])


def test_patterns_differ_by_end_region_and_kind(ends):
    source, target = ends
    assert all(byte < 128 for byte in source.image().regions[0])
    assert all(byte >= 128 for byte in target.image().regions[0])
    assert source.image().regions[0][:100] != source.image().regions[1]
    before = target.image()
    target.fill(0)
    target.poison(0)
    assert target.image() == before
