"""The kernel in Triton's interpreter, against numpy; and the plans that it follows."""

import importlib.util
import os
import sys

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def scatter():
    """The module once more, made for the interpreter, whatever device is here."""
    found = importlib.util.find_spec("kvbaton_cuda_ipc.scatter")
    spec = importlib.util.spec_from_file_location("interpreted_scatter", found.origin)
    module = importlib.util.module_from_spec(spec)
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
        yield module
    finally:
        del sys.modules[spec.name]
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


class Runs:
    """Runs of bytes in two pools: lengths, and where they are in either."""

    def __init__(self, lengths, reads, writes, size):
        self.length = np.array(lengths, np.int64)
        self.reads, self.writes = np.array(reads, np.int64), np.array(writes, np.int64)
        self.source = np.random.default_rng(7).integers(0, 128, size, np.uint8)
        self.target = np.full(size, 200, np.uint8)

    def expected(self):
        target = self.target.copy()
        for read, write, length in zip(self.reads, self.writes, self.length, strict=True):
            target[write : write + length] = self.source[read : read + length]
        return target

    def columns(self):
        return self.source.ctypes.data + self.reads, self.target.ctypes.data + self.writes, self.length


def packed(lengths, gaps, order, grain):
    """Offsets of runs that lie in ``order``, with gaps between them."""
    offsets, at = [0] * len(lengths), 0
    for which, gap in zip(order, gaps, strict=True):
        at += gap * grain
        offsets[which] = at
        at += lengths[which]
    return offsets, at


@st.composite
def runs(draw):
    grain = draw(st.sampled_from([1, 2, 4, 8, 16, 16]))
    longest = draw(st.sampled_from([40, 700, 5000, 40000]))
    count = draw(st.integers(1, 24 if longest > 1000 else 60))
    lengths = [grain * -(-draw(st.integers(1, longest)) // grain) for _ in range(count)]
    if draw(st.booleans()):
        lengths = [lengths[0]] * count
    sides = [
        packed(
            lengths,
            draw(st.lists(st.integers(0, 20), min_size=count, max_size=count)),
            draw(st.permutations(range(count))),
            grain,
        )
        for _ in range(2)
    ]
    return Runs(lengths, sides[0][0], sides[1][0], max(end for _, end in sides) + 64)


#: Twice the programs: never, or from so many bytes on.
DOUBLED = st.sampled_from([None, 1, 4096, 128 << 20])


def planned(scatter, runs, programs, doubled, *more, **origins):
    """And that it may have twice the programs changes their number alone, and only where the launch is large."""
    if doubled is None:
        return scatter.plan(runs, programs, *more, **origins)
    single = scatter.plan(runs.copy(), programs, **origins)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scatter, "_DOUBLED_FROM", doubled)
        plan = scatter.plan(runs, programs, *more, **origins, double=True)
    assert np.array_equal(plan.table, single.table)
    assert plan._replace(table=None, programs=0) == single._replace(table=None, programs=0)
    large = plan.tile_rows <= 2 and int(plan.table[2, : plan.wide].sum()) >= doubled
    items = max(-(-plan.wide * plan.per // plan.tile_rows), -(-(plan.rows - plan.wide) // 16))
    assert plan.programs == min(programs * (2 if large else 1), items)
    return plan


def run(scatter, given, programs, origins=(0, 0), doubled=None):
    source, target, length = given.columns()
    runs = np.stack((source - origins[0], target - origins[1], length))
    plan = planned(scatter, runs, programs, doubled, origins=origins)
    assert 1 <= plan.programs <= programs * (1 if doubled is None else 2)
    scatter._scatter[(plan.programs,)](*scatter.arguments(plan, torch.from_numpy(plan.table)))
    return plan


@pytest.mark.clause("T3")
@given(given_runs=runs(), programs=st.integers(1, 9), near=st.sampled_from([None, 0, 16, 5]), doubled=DOUBLED)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_every_byte_goes_where_it_should_and_no_other_changes(scatter, given_runs, programs, near, doubled):
    """``near``: how far origins are before the pools that places are told from; ``None``: places are addresses."""
    expected = given_runs.expected()
    pools = given_runs.source.ctypes.data, given_runs.target.ctypes.data
    origins = (0, 0) if near is None else (pools[0] - near, pools[1] - 3 * near)
    plan = run(scatter, given_runs, programs, origins, doubled)
    assert plan.origins in (origins, (0, 0))
    assert np.array_equal(given_runs.target, expected)


@pytest.mark.clause("T3")
@given(given_runs=runs(), programs=st.integers(1, 600), doubled=DOUBLED)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_plan_covers_every_byte_once(scatter, given_runs, programs, doubled):
    """By its own rows: what the kernel makes of one is looked at above."""
    plan = planned(scatter, np.stack(given_runs.columns()), programs, doubled)
    source, target, length = plan.table
    assert (length > 0).all()
    assert length.sum() == given_runs.length.sum()
    wide = slice(plan.wide)
    assert not (np.bitwise_or.reduce(plan.table[:, wide], axis=1) % 16).any()
    assert length[plan.wide :].max(initial=0) == plan.narrow <= scatter.NARROW_PIECE
    assert (length[wide] <= plan.per * plan.piece).all()
    assert plan.wide or plan.tile_rows > 1, "where each has its own tile, the kernel divides by their number"
    moves = {int(to): int(start) for to, start in zip(given_runs.columns()[1], given_runs.columns()[0], strict=True)}
    starts = sorted(moves)
    at = np.searchsorted(starts, target, side="right") - 1
    shift = np.array([moves[start] - start for start in starts])[at]
    assert np.array_equal(source - target, shift)
    order = np.argsort(target)
    assert (target[order][1:] >= (target + length)[order][:-1]).all()


@pytest.mark.clause("T3")
@pytest.mark.parametrize("apart", [(0, 0), (8, 0), (0, 8), (8, 8), (1, 16), (16, 1), (3, 5)])
def test_what_is_moved_in_vectors_is_aligned_where_it_is_also_where_regions_begin_anywhere(scatter, apart):
    """Offsets and lengths that are multiples of 16 say nothing of addresses.  A device faults, the interpreter not."""
    origins = (1 << 40) + apart[0], (1 << 41) + apart[1]
    runs = np.array([[0, 4096, 160], [64, 8192, 160], [64, 4096, 48]])
    plan = scatter.plan(runs.copy(), 8, origins=origins)
    places = plan.table[:2] + np.array(plan.origins).reshape(2, 1)
    assert not (places[:, : plan.wide] % 16).any()
    assert not (plan.table[2, : plan.wide] % 16).any()
    assert (plan.origins == origins) == (not any(one % 16 for one in apart))
    assert bool(plan.wide) == ((apart[0] - apart[1]) % 16 == 0)
    moved = {to + at: of + at for of, to, length in zip(*places, plan.table[2], strict=True) for at in range(length)}
    expected = {
        origins[1] + to + at: origins[0] + of + at for of, to, length in runs.T.tolist() for at in range(length)
    }
    assert moved == expected


@pytest.mark.clause("T3")
@given(given_runs=runs(), programs=st.integers(1, 600), doubled=DOUBLED)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_a_plan_may_be_written_over_the_runs_that_it_is_of(scatter, given_runs, programs, doubled):
    """As a mover has it: one table, in which the runs are, and which is given again."""
    given = np.stack(given_runs.columns())
    apart = planned(scatter, given.copy(), programs, doubled)
    memory = np.zeros((1, 3 * 4 * max(len(given[0]), apart.rows)), np.int64)[0]

    def room(rows):
        return memory[: 3 * rows].reshape(3, rows)

    here = room(given.shape[1])
    here[:] = given
    plan = planned(scatter, here, programs, doubled, room)
    assert np.array_equal(plan.table, apart.table)
    assert np.shares_memory(plan.table, memory)
    assert plan._replace(table=None) == apart._replace(table=None)


@pytest.mark.clause("T3")
def test_offsets_beyond_32_bits_are_kept(scatter):
    """Addresses of a pool of many GiB, and one run that is longer than 4 GiB."""
    base = 1 << 45
    source = np.array([base, base + (11 << 30)], np.int64)
    length = np.array([(9 << 30) + 48, 1 << 30], np.int64)
    plan = scatter.plan(np.stack((source, source + (1 << 40), length)), 528)
    assert plan.piece == scatter.MAX_PIECE
    assert int(plan.table[2].sum()) == int(length.sum())
    assert (plan.table[1] - plan.table[0] == 1 << 40).all()
    assert plan.table[2].max() <= plan.per * plan.piece


@pytest.mark.parametrize(
    "lengths", [[64 << 20] + [16] * 65535, [16] * 65535 + [1 << 29, 1 << 28], [4096] * 65536, [1 << 30]]
)
def test_unequal_runs_are_cut_into_even_pieces(scatter, lengths):
    """Whatever the lengths, there are not many more pieces than bytes ask for, and none is much larger than others."""
    length = np.array(lengths, np.int64)
    offset = np.concatenate(([0], length[:-1].cumsum()))
    plan = scatter.plan(np.stack((offset + (1 << 40), offset + (1 << 41), length)), 528)
    pieces = plan.wide * plan.per
    total = int(length.sum())
    assert pieces <= 2 * (total // scatter.MIN_PIECE + len(lengths))
    assert plan.rows <= total // scatter.MIN_PIECE + len(lengths)


@pytest.mark.parametrize(
    ("length", "count", "rows"),
    [
        (32 << 10, 8192, 8), (32 << 10, 8 * 132 * 4, 8), (32 << 10, 8 * 132 * 4 - 1, 2),
        (64 << 10, 2 * 132 * 4, 2), (64 << 10, 2 * 132 * 4 - 1, 1), (256 << 10, 8192, 8), (257 << 10, 8192, 1),
        (32 << 10, 32 * 132 * 4, 8), (32 << 10, 8 * 132 * 4 + 1, 2), (32 << 10, 2 * 132 * 4 + 1, 1),
        (32 << 10, 4693, 2), (32 << 10, 4694, 8),
        (16 << 10, 8192, 8), (16 << 10, 8 * 132, 8), (16 << 10, 938, 2), (16 << 10, 939, 8), (5 << 10, 8192, 8),
        (4 << 10, 16384, 32), (4 << 10, 2048, 8), (2 << 10, 16384, 32), (2 << 10, 2048, 8), (1 << 10, 2048, 32),
    ],
)  # fmt: skip
def test_alike_runs_are_moved_several_at_a_time_where_each_program_has_its_share(scatter, length, count, rows):
    """So that the table, which is in the host's memory, is read in few reads and early.  Where a few programs would
    have a tile more than all others, these would wait for them."""
    offset = np.arange(count) * length
    plan = scatter.plan(np.stack((offset, offset, np.full(count, length))), 132, origins=(1 << 40, 1 << 41))
    assert plan.tile_rows == rows
    assert rows == 1 or (plan.per, plan.piece) == (1, length)


@pytest.mark.parametrize(
    ("length", "nbytes", "programs"),
    [
        (1536 << 10, 192 << 20, 264), (1536 << 10, 126 << 20, 132),
        (16 << 20, 128 << 20, 264), (16 << 20, 112 << 20, 132),
        (64 << 10, 192 << 20, 264), (64 << 10, 384 << 20, 132), (4 << 10, 192 << 20, 132),
    ],
)  # fmt: skip
def test_large_launches_of_few_rows_a_tile_may_have_twice_the_programs(scatter, length, nbytes, programs):
    """And no others, nor any unless they may: that is the operator's bound."""
    count = nbytes // length
    offset = np.arange(count) * length
    runs = np.stack((offset, offset, np.full(count, length)))
    assert scatter.plan(runs, 132, origins=(1 << 40, 1 << 41), double=True).programs == programs
    assert scatter.plan(runs, 132, origins=(1 << 40, 1 << 41)).programs == 132


def test_few_pieces_have_no_more_programs_than_tiles(scatter):
    """Also where twice as many may be."""
    runs = np.array([[0], [0], [128 << 20]])
    plan = scatter.plan(runs, 5000, origins=(1 << 40, 1 << 41), double=True)
    assert plan.programs == plan.per == 8192


@pytest.mark.parametrize(
    ("longest", "others", "rows"),
    [
        (32 << 10, 29136, 8), (32 << 10, 29120, 1), (16 << 10, 14576, 8), (16 << 10, 14560, 2),
        (4 << 10, 3648, 32), (4 << 10, 3632, 8),
    ],
)  # fmt: skip
def test_runs_are_alike_where_a_tile_takes_few_steps_for_nothing(scatter, longest, others, rows):
    """A tile takes as many steps as the longest of all runs needs: of these all but one are a ninth shorter, by which
    an eighth of the bytes is missing, or more."""
    length = np.full(8192, others)
    length[77] = longest
    offset = np.arange(8192) * longest
    assert scatter.plan(np.stack((offset, offset, length)), 132, origins=(1 << 40, 1 << 41)).tile_rows == rows


@pytest.mark.clause("T3")
@pytest.mark.parametrize(
    ("length", "count", "programs", "rows"),
    [
        (20_480, 37, 1, 8), (20_480, 37, 2, 2),
        (4096, 61, 1, 32), (4096, 65, 1, 8), (2064, 127, 2, 32),
        (16_384, 31, 2, 8), (16_384, 33, 4, 2), (4112, 15, 1, 8),
    ],
)  # fmt: skip
def test_alike_runs_several_at_a_time_go_where_they_should(scatter, length, count, programs, rows):
    """Long ones and short ones, in many steps, the last rows by themselves and some shorter than others."""
    lengths = np.full(count, length)
    lengths[[3, count - 1]] = length * 5 // 6 // 16 * 16
    order = np.random.default_rng(1).permutation(count)
    reads, writes = np.arange(count) * (length + 32), order * (length + 16)
    given_runs = Runs(lengths, reads, writes, count * (length + 32) + 64)
    expected = given_runs.expected()
    assert run(scatter, given_runs, programs).tile_rows == rows
    assert np.array_equal(given_runs.target, expected)


def test_alike_misaligned_ends_move_in_vectors(scatter):
    """Only the bytes before and after alignment go by themselves."""
    start = np.array([(1 << 40) + 5], np.int64)
    plan = scatter.plan(np.stack((start, start + (1 << 30), np.array([100_000]))), 64)
    assert plan.wide == 1
    assert sorted(plan.table[2].tolist()) == [5, 11, 99_984]
