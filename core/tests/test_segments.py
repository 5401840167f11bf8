"""Segments against a naive, byte by byte reading of the same triples."""

from __future__ import annotations

import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvbaton.errors import SegmentError
from kvbaton.segments import Segments, aligned, coalesce, coalesce_one, same_lengths, split

# no test asserts a time on the wall, which is what the default deadline does
untimed = settings(deadline=None)

Byte = tuple[int, int]
MAX64 = 2**63 - 1


def every_byte(segments: Segments) -> list[Byte]:
    return [(region, offset + i) for region, offset, length in segments.triples() for i in range(length)]


def moves(source: Segments, target: Segments) -> list[tuple[Byte, Byte]]:
    """From where to where each byte goes, in order."""
    assert source.length.tolist() == target.length.tolist()
    return list(zip(every_byte(source), every_byte(target), strict=True))


def runs_of(lengths: list[int]) -> st.SearchStrategy[Segments]:
    """Lists with these lengths that often continue where the one before ended."""

    def build(steps: list[tuple[int, int | None]]) -> Segments:
        triples, end = [], 0
        for (region, jump), length in zip(steps, lengths, strict=True):
            offset = end if jump is None else jump
            triples.append((region, offset, length))
            end = offset + length
        return Segments.of(triples)

    step = st.tuples(st.integers(0, 1), st.one_of(st.none(), st.none(), st.integers(0, 60)))
    return st.lists(step, min_size=len(lengths), max_size=len(lengths)).map(build)


LENGTHS = st.lists(st.integers(1, 9), max_size=10)
SINGLE = LENGTHS.flatmap(runs_of)
PAIRS = LENGTHS.flatmap(lambda lengths: st.tuples(runs_of(lengths), runs_of(lengths)))


@st.composite
def long_lists(draw: st.DrawFn) -> tuple[Segments, dict[int, int]]:
    """Few, some, and many that are all inside, but for those that are put among them; and the regions' lengths."""
    count = draw(st.sampled_from((1, 8, 9, 41, 300, 4096, 4097, 5000)))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    regions = draw(st.sampled_from((1, 2, 5, 100)))
    region = random.integers(0, regions, count).astype(np.int32) * draw(st.sampled_from((1, 1, 400)))
    if draw(st.booleans()):
        region.sort()
    length = random.integers(1, 1 + draw(st.sampled_from((1, 9))), count)
    offset = random.integers(0, 1000, count)
    rows = zip(region.tolist(), offset.tolist(), length.tolist(), strict=True)
    ends: dict[int, int] = {}
    for r, o, n in rows:
        ends[r] = max(ends.get(r, 0), o + n)
    lengths = {r: end + draw(st.sampled_from((0, 0, 1, 5))) if r < 5 else end for r, end in ends.items()}
    here = int(region[0])
    odd = st.sampled_from(("past", "end", "far", "huge", "stranger", "negative"))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, count - 1))
        region[at] = here
        match draw(odd):
            case "past":  # by one byte
                offset[at], length[at] = lengths[here], 1
            case "end":  # not even by one
                offset[at], length[at] = lengths[here] - 1, 1
            case "far":
                offset[at] = MAX64
            case "huge":  # the end is beyond 64 bits, and looks small there
                offset[at], length[at] = MAX64, 2**61
            case "stranger":
                region[at] = 2**31 - 1
            case "negative":
                region[at] = -(2**31)
    return Segments(region, offset, length), lengths


class TestValue:
    @pytest.mark.clause("C3.6")
    def test_columns_have_their_types_and_cannot_be_written(self):
        segments = Segments([1, 2], np.array([0, 8], np.uint8), np.array([4, 4], np.int32))

        assert (segments.region.dtype, segments.offset.dtype, segments.length.dtype) == (np.int32, np.int64, np.int64)
        assert len(segments) == 2
        assert segments.nbytes == 8
        for column in (segments.region, segments.offset, segments.length):
            assert column.flags.c_contiguous
            with pytest.raises(ValueError, match="read-only"):
                column[0] = 7
        with pytest.raises(AttributeError, match="immutable"):
            segments.length = segments.offset
        with pytest.raises(AttributeError, match="immutable"):
            del segments.length

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize(
        ("columns", "text"),
        [
            pytest.param(([0], [0, 1], [1, 1]), "each segment needs one of each", id="unequal"),
            pytest.param(([0], [0], [0]), "lengths at least 1", id="empty-lengthed"),
            pytest.param(([0, 0], [0, 0], [1, -1]), "segment 1", id="negative length"),
            pytest.param(([0], [-1], [1]), "offsets are at least 0", id="negative offset"),
            pytest.param(([0], [2**63], [1]), "does not fit 64 bits", id="offset beyond 64 bits"),
            pytest.param(([2**31], [0], [1]), "does not fit 32 bits", id="region beyond 32 bits"),
            pytest.param(([0], [2**70], [1]), "integers", id="beyond any"),
            pytest.param(([0], [0.5], [1]), "integers", id="float"),
            pytest.param(([[0]], [[0]], [[1]]), "one dimension", id="two dimensions"),
            pytest.param(([0], [0], [[1], [1, 2]]), "one integer per segment", id="ragged"),
        ],
    )
    def test_columns_that_are_none_are_refused(self, columns, text):
        with pytest.raises(SegmentError, match=text):
            Segments(*columns)

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize(
        "triples",
        [
            pytest.param([(1, 2), (3, 4), (5, 6)], id="pairs whose numbers would make triples"),
            pytest.param([(0, 1, 2), (3, 4)], id="ragged"),
            pytest.param([(0, 1.5, 2)], id="float"),
            pytest.param([(0, 2**63, 2)], id="beyond 64 bits"),
            pytest.param([7], id="no tuple"),
        ],
    )
    def test_triples_that_are_none_are_refused(self, triples):
        with pytest.raises(SegmentError):
            Segments.of(triples)

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize(
        ("triple", "text"),
        [
            ((0, -5, 10), "offsets are at least 0"), ((0, 5, 0), "lengths at least 1"),
            ((0, 5, -3), "lengths at least 1"),
            ((0, 2**63, 1), "does not fit 64 bits"), ((2**31, 0, 1), "does not fit 32 bits"),
        ],
    )  # fmt: skip
    def test_one_that_is_none_is_refused(self, triple, text):
        with pytest.raises(SegmentError, match=text):
            Segments.one(*triple)

    def test_one_is_a_list_of_one(self):
        one = Segments.one(3, 100, 7)
        assert one.triples() == [(3, 100, 7)]
        assert one == Segments([3], [100], [7])
        assert [column.dtype for column in (one.region, one.offset, one.length)] == [np.int32, np.int64, np.int64]

    def test_of_triples_and_back(self):
        triples = [(3, 100, 7), (0, 0, 1)]
        assert Segments.of(triples).triples() == triples
        assert len(Segments.of([])) == len(Segments.empty()) == Segments.empty().nbytes == 0
        assert Segments.of_few([]) == Segments.empty()

    @untimed
    @given(SINGLE, SINGLE)
    def test_equality_is_that_of_triples(self, one, other):
        assert (one == other) == (one.triples() == other.triples())
        assert one == Segments.of(one.triples())
        assert one != one.triples()

    @untimed
    @given(SINGLE)
    def test_copies_are_equal_and_read_only(self, segments):
        for twin in (copy.copy(segments), copy.deepcopy(segments), pickle.loads(pickle.dumps(segments))):  # noqa: S301
            assert twin == segments
            assert not twin.offset.flags.writeable

    @untimed
    @given(SINGLE, st.integers(-12, 12), st.integers(-12, 12))
    def test_a_range_is_that_of_triples(self, segments, first, last):
        part = segments[first:last]
        assert part.triples() == segments.triples()[first:last]
        assert part.offset.flags.c_contiguous
        assert not part.offset.flags.writeable

    def test_other_indices_are_refused(self):
        segments = Segments.of([(0, i, 1) for i in range(4)])
        with pytest.raises(SegmentError, match="step of 2"):
            segments[::2]
        with pytest.raises(TypeError, match="by range"):
            segments[0]

    @untimed
    @given(st.lists(SINGLE, min_size=1, max_size=4))
    def test_concat_keeps_order(self, parts):
        first, *others = parts
        assert first.concat(*others).triples() == [triple for part in parts for triple in part.triples()]

    def test_a_long_list_prints_short(self):
        text = repr(Segments.of([(0, i, 1) for i in range(1000)]))
        assert text == "Segments([(0, 0, 1), (0, 1, 1), (0, 2, 1), ... 997 more])"


class TestChecks:
    @pytest.mark.clause("C3.6")
    @untimed
    @given(SINGLE, st.dictionaries(st.integers(0, 2), st.integers(0, 80), max_size=3))
    def test_bounds_are_those_of_every_byte(self, segments, lengths):
        outside = [at for at, (r, o, n) in enumerate(segments.triples()) if r not in lengths or o + n > lengths[r]]
        if not outside:
            segments.check_bounds(lengths)
            return
        with pytest.raises(SegmentError, match=r"C3\.6") as caught:
            segments.check_bounds(lengths)
        assert caught.value.segment == outside[0]

    @pytest.mark.clause("C3.6")
    def test_bounds_do_not_overflow(self):
        for run in [(0, MAX64 - 5, 5), (0, 2**62, 2**62), (0, MAX64, MAX64)]:
            with pytest.raises(SegmentError, match="has 100 bytes"):
                Segments.of([run]).check_bounds({0: 100})

    @pytest.mark.clause("C3.6")
    @settings(deadline=None, max_examples=30)
    @given(st.data())
    def test_bounds_of_long_lists_too(self, data):
        """One that is outside is found wherever it stands, also by one byte, and whatever the others are like."""
        segments, lengths = data.draw(long_lists())
        rows = segments.triples()
        first, past = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
        size = data.draw(st.sampled_from((7, 41, 3000)))
        batches = split(segments, segments, MAX64, size)
        begins = range(0, len(rows), size)
        for part, those in [
            (segments, rows), (segments[first:past], rows[first:past]),
            *((batch, rows[at : at + size]) for at, (batch, _) in zip(begins, batches, strict=True)),
        ]:  # fmt: skip
            outside = [at for at, (r, o, n) in enumerate(those) if o + n > lengths.get(r, 0)]
            assert part.within(lengths) == (not outside)
            if outside:
                with pytest.raises(SegmentError, match=r"C3\.6") as caught:
                    part.check_bounds(lengths)
                assert caught.value.segment == outside[0]

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize("count", [9, 4096, 4097, 5000])
    @pytest.mark.parametrize("regions", [[0], [1, 4], [2, 2 + 2**16, 2 + 2**17]])
    def test_one_outside_is_found_in_its_batch_and_in_no_other(self, count, regions):
        cells, which = np.arange(count), np.arange(count) % len(regions)
        region, offset, length = np.array(regions)[which], cells * 8 + which * 800, np.full(count, 8)
        lengths = {region: 8 * count + 800 * at for at, region in enumerate(regions)}
        for at in sorted({*range(0, count, 977), 63, 64, 4031, 4032, 4090, 4095, 4096, count - 1} & set(range(count))):
            for column, wrong in [(offset, 8 * count + 800 * which[at] - 7), (region, 2**31 - 1), (region, -(2**31))]:
                right, column[at] = column[at], wrong
                segments = Segments(region.copy(), offset.copy(), length.copy())
                column[at] = right
                assert not segments.within(lengths)
                batches = split(segments, segments, 64 * 8, 4096)
                found = [n for n, (source, _) in enumerate(batches) if not source.within(lengths)]
                assert found == [at // 64]
                with pytest.raises(SegmentError) as caught:
                    segments.check_bounds(lengths)
                assert caught.value.segment == at

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize("count", [9, 5000])
    def test_a_long_segment_may_be_followed_by_short_ones_near_the_end(self, count):
        segments = Segments.of([(0, 0, 50), *((0, 50 + at, 1) for at in range(count))])
        assert segments.within({0: 50 + count})
        assert not segments.within({0: 49 + count})

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize("count", [5, 4096, 5000])
    def test_the_pieces_of_what_is_cut_are_looked_at(self, count):
        whole = Segments.one(0, 0, 8 * count)
        found = [batch.within({0: 8 * count - 1}) for batch, _ in split(whole, whole, 9, 1, alignment=8)]
        assert found == [True] * (count - 1) + [False]

    @pytest.mark.clause("C3.6")
    def test_regions_that_no_segment_can_name_are_none(self):
        announced = {0: 100, 1: 2**63, 2**40: 7, 2**63: 7}
        inside = [(0, 0, 100), (1, MAX64 - 1, 1)] * 20
        Segments.of(inside).check_bounds(announced)
        with pytest.raises(SegmentError, match="region 7, which is not registered") as caught:
            Segments.of([*inside, (7, 0, 1)]).check_bounds(announced)
        assert caught.value.segment == len(inside)

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize("size", [0, -1, 10 - 2**63, -(2**63)])
    @pytest.mark.parametrize("count", [1, 40, 5000])
    def test_a_region_of_no_size_holds_nothing(self, size, count):
        """A peer may announce what is no size: that near the end of 64 bits must not turn into room."""
        with pytest.raises(SegmentError, match=f"which has {size} bytes"):
            Segments.of([(0, 0, 50)] * count).check_bounds({0: size})

    @pytest.mark.clause("C3.6")
    @settings(deadline=None, max_examples=30)
    @given(st.data())
    def test_lengths_agree_where_each_does(self, data):
        source, _ = data.draw(long_lists())
        lengths = source.length.copy()
        if data.draw(st.booleans()):
            lengths[data.draw(st.integers(0, len(lengths) - 1))] ^= 1 << data.draw(st.integers(0, 30))
            lengths[lengths < 1] = 1
        target = Segments(source.region.copy(), source.offset.copy(), lengths)
        assert same_lengths(source, target) == (lengths.tolist() == source.length.tolist())
        assert same_lengths(source, source)

    @pytest.mark.clause("T13")
    @settings(deadline=None, max_examples=50)
    @given(st.data(), st.sampled_from((1, 2, 3, 8, 12, 16, 4096, 2**62)))
    def test_aligned_is_every_offset_and_length(self, data, grain):
        count = data.draw(st.sampled_from((1, 8, 9, 41, 5000)))
        draw = np.random.default_rng(data.draw(st.integers(0, 99)))
        most = min(1000, MAX64 // grain)
        offsets = [draw.integers(0, most + 1, count) * grain for _ in range(2)]
        length = draw.integers(1, most + 1, count) * grain
        off = data.draw(st.sampled_from((None, *offsets, length)))
        if off is not None:
            off[data.draw(st.integers(0, count - 1))] += data.draw(st.integers(1, grain) | st.just(1)) % MAX64
        assume(min(map(np.min, (*offsets, length))) >= 0)
        region = np.zeros(count, np.int32)
        expected = not any(value % grain for column in (*offsets, length) for value in column.tolist())
        source, target = (Segments(region.copy(), offset, length.copy()) for offset in offsets)
        assert aligned(source, target, grain) == expected

    @pytest.mark.clause("C3.2")
    @untimed
    @given(SINGLE)
    def test_disjoint_is_that_of_every_byte(self, segments):
        touched = every_byte(segments)
        assert segments.disjoint() == (len(touched) == len(set(touched)))

    @pytest.mark.clause("C3.2")
    def test_disjoint_does_not_overflow(self):
        assert not Segments.of([(0, 2**62, MAX64), (0, MAX64, 5)]).disjoint()
        assert Segments.of([(0, 0, MAX64), (0, MAX64, 5)]).disjoint()


class TestWire:
    @pytest.mark.clause("C9.3")
    @untimed
    @given(SINGLE)
    def test_bytes_and_back(self, segments):
        data = segments.to_bytes()
        assert len(data) == 20 * len(segments)
        for form in (data, bytearray(data), memoryview(data)):
            assert Segments.from_bytes(form) == segments

    @pytest.mark.clause("C9.3")
    @untimed
    @given(st.binary(max_size=90))
    def test_any_bytes_are_segments_or_refused(self, data):
        try:
            segments = Segments.from_bytes(data)
        except SegmentError:
            return
        assert segments.to_bytes() == data
        assert all(offset >= 0 and length >= 1 for _, offset, length in segments.triples())

    @pytest.mark.clause("C9.3")
    def test_decoded_columns_do_not_alias_the_message(self):
        data = bytearray(Segments.of([(1, 2, 3)]).to_bytes())
        segments = Segments.from_bytes(data)
        data[:] = bytes(len(data))
        assert segments.triples() == [(1, 2, 3)]


class TestCoalesce:
    @pytest.mark.clause("C3.2")
    @untimed
    @given(PAIRS)
    def test_the_same_bytes_in_the_fewest_segments(self, pair):
        merged = coalesce(*pair)

        assert moves(*merged) == moves(*pair)
        neighbours = zip(*(pairwise(side.triples()) for side in merged), strict=True)
        for sides in neighbours:
            assert not all(a[0] == b[0] and a[1] + a[2] == b[1] for a, b in sides)

    @untimed
    @given(SINGLE)
    def test_one_list_alone(self, segments):
        merged = coalesce_one(segments)
        assert every_byte(merged) == every_byte(segments)
        assert merged == coalesce(segments, segments)[0]

    def test_a_gap_on_either_side_or_another_region_keeps_them_apart(self):
        straight = Segments.of([(0, 0, 4), (0, 4, 4)])
        gap = Segments.of([(0, 0, 4), (0, 5, 4)])
        region = Segments.of([(0, 0, 4), (1, 4, 4)])
        assert [len(coalesce(straight, other)[0]) for other in (straight, gap, region)] == [1, 2, 2]
        assert [len(coalesce(other, straight)[0]) for other in (straight, gap, region)] == [1, 2, 2]

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize("use", [coalesce, lambda s, t: split(s, t, 10, 10)], ids=["coalesce", "split"])
    def test_lists_that_do_not_pair_up_are_refused(self, use):
        one = Segments.of([(0, 0, 4)])
        with pytest.raises(SegmentError, match="do not pair up"):
            use(one, Segments.empty())
        with pytest.raises(SegmentError, match="segment 0 has 4 bytes here, 5 at the target"):
            use(one, Segments.of([(0, 0, 5)]))


class TestSplit:
    @pytest.mark.clause("C3.2", "C3.6")
    @untimed
    @given(PAIRS, st.integers(1, 30), st.integers(1, 5), st.integers(1, 4))
    def test_limits_are_kept_and_no_byte_is_lost_or_doubled(self, pair, max_bytes, max_segments, alignment):
        if max_bytes < alignment:
            with pytest.raises(SegmentError, match="holds nothing"):
                split(*pair, max_bytes, max_segments, alignment=alignment)
            return

        batches = split(*pair, max_bytes, max_segments, alignment=alignment)

        assert [move for batch in batches for move in moves(*batch)] == moves(*pair)
        for source, target in batches:
            assert 1 <= len(source) == len(target) <= max_segments
            assert source.nbytes <= max_bytes
            for side in (source, target):
                assert side.offset.flags.c_contiguous
                assert not side.length.flags.writeable
        pieces = [triple for source, _ in batches for triple in source.triples()]
        assert pieces == [piece for run in pair[0].triples() for piece in cut(run, max_bytes, alignment)]

    @pytest.mark.clause("C3.6")
    @untimed
    @given(PAIRS, st.integers(1, 3), st.dictionaries(st.integers(0, 2), st.integers(0, 80), max_size=3))
    def test_batches_and_ranges_of_them_are_looked_at_as_closely_as_any_list(self, pair, max_segments, lengths):
        for batch in split(*pair, 30, max_segments):
            for segments in (*batch, batch[0][1:], batch[1][:-1]):
                afresh = Segments.of(segments.triples())
                assert segments.nbytes == afresh.nbytes == sum(length for _, _, length in segments.triples())
                greatest = max((length for _, _, length in segments.triples()), default=0)
                assert segments.length_bound >= afresh.length_bound == greatest
                outside = [at for at, (r, o, n) in enumerate(segments.triples()) if o + n > lengths.get(r, -1)]
                assert not segments.within(lengths) or not outside
                if outside:
                    with pytest.raises(SegmentError) as caught:
                        segments.check_bounds(lengths)
                    assert caught.value.segment == outside[0]
                else:
                    segments.check_bounds(lengths)

    @pytest.mark.clause("C3.6")
    def test_an_end_beyond_64_bits_is_in_no_region_in_batches_either(self):
        far = Segments.of([(0, MAX64 - 5, 10), (0, 7, 10)])
        for source, target in split(far, far, 100, 1):
            assert source.within({0: MAX64}) == target.within({0: MAX64}) == (source.offset[0] == 7)

    @untimed
    @given(PAIRS, st.integers(1, 30), st.integers(1, 5))
    def test_batches_are_full(self, pair, max_bytes, max_segments):
        batches = [source for source, _ in split(*pair, max_bytes, max_segments)]
        for batch, following in pairwise(batches):
            assert len(batch) == max_segments or batch.nbytes + following.length[0] > max_bytes

    @untimed
    @given(st.lists(st.integers(1, 6), min_size=1, max_size=6), st.integers(1, 6), st.integers(1, 5))
    def test_aligned_lists_stay_aligned(self, lengths, quanta, alignment):
        source = Segments.of([(0, i * 100 * alignment, n * alignment) for i, n in enumerate(lengths)])
        target = Segments.of([(1, i * 200 * alignment, n * alignment) for i, n in enumerate(lengths)])
        for batch in split(source, target, quanta * alignment + alignment - 1, 3, alignment=alignment):
            for side in batch:
                assert not np.any(side.offset % alignment)
                assert not np.any(side.length % alignment)

    def test_only_what_is_too_long_is_cut(self):
        """One that fits stays whole, though it is longer than the pieces that its neighbour is cut into."""
        one = Segments.of([(0, 0, 16), (0, 100, 7)])
        batches = split(one, one, 7, 10, alignment=4)
        assert [source.triples() for source, _ in batches] == [
            [(0, 0, 4)], [(0, 4, 4)], [(0, 8, 4)], [(0, 12, 4)], [(0, 100, 7)]
        ]  # fmt: skip

    def test_no_segment_no_batch(self):
        assert split(Segments.empty(), Segments.empty(), 1, 1) == []

    @pytest.mark.parametrize("limit", [MAX64, 2**64, 10**30])
    def test_limits_may_be_as_large_as_one_likes(self, limit):
        one = Segments.of([(0, 2**61, 2**61), (0, 0, 5)])
        assert split(one, one, limit, limit) == [(one, one)]

    @pytest.mark.parametrize(("max_bytes", "max_segments", "alignment"), [(0, 1, 1), (1, 0, 1), (3, 1, 4), (4, 1, 0)])
    def test_limits_that_hold_nothing_are_refused(self, max_bytes, max_segments, alignment):
        one = Segments.of([(0, 0, 4)])
        with pytest.raises(SegmentError, match="holds nothing"):
            split(one, one, max_bytes, max_segments, alignment=alignment)


def cut(run: tuple[int, int, int], max_bytes: int, alignment: int) -> list[tuple[int, int, int]]:
    """Only what is too long is cut, into pieces as long as the limit and the alignment allow."""
    region, offset, length = run
    if length <= max_bytes:
        return [run]
    grain = max_bytes // alignment * alignment
    return [(region, offset + at, min(grain, length - at)) for at in range(0, length, grain)]
