"""Plans against an oracle that knows only where one byte of one token lies, over simulated memory.

One element stands for one byte.  Source elements all differ, so that a right value at the right place proves which byte
was read; the destination counts how often each was written.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton import geometry
from kvbaton.connector import Chunk
from kvbaton.engine import ComputedRange
from kvbaton.errors import SegmentError
from kvbaton.geometry import Component, KVGeometry, KVMap, Plane, ready_range
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.reservation import Reservation
from kvbaton.segments import Segments, coalesce, split
from kvbaton.stage.planner import ChunkLimits, ChunkPlanner

# no test asserts a time on the wall, which is what the default deadline does
untimed = settings(deadline=None)

Byte = tuple[int, int]
Shape = list[list[tuple[int, bool]]]  # [plane][component] -> (token_bytes, per_block)
Pair = tuple[Segments, Segments]

LAYOUTS = ["block", "tensors", "stacked", "pool"]


@dataclass
class Case:
    source: KVGeometry
    destination: KVGeometry
    source_tables: list[np.ndarray]
    destination_tables: list[np.ndarray]
    tokens: int

    def plan(self, start: int, end: int) -> Pair:
        return KVMap(self.source, self.destination).plan(self.source_tables, self.destination_tables, start, end)

    @property
    def per_block(self) -> bool:
        return any(c.per_block for plane in self.source.planes for c in plane.components)


@st.composite
def cases(draw: st.DrawFn, per_block: bool | None = None) -> Case:
    block_tokens = draw(st.integers(1, 5))
    flags = st.booleans() if per_block is None else st.just(per_block)
    one = st.lists(st.tuples(st.integers(1, 4), flags), min_size=1, max_size=4)
    # planes alike may share one pool of blocks
    alike = draw(st.booleans())
    count = draw(st.integers(1, 3))
    shape: Shape = [draw(one)] * count if alike else [draw(one) for _ in range(count)]
    length = draw(st.integers(0, 6))
    tokens = length * block_tokens - draw(st.integers(0, block_tokens - 1)) if length else 0
    sides = []
    for _ in range(2):
        layout = draw(st.sampled_from(LAYOUTS if alike else LAYOUTS[:3]))
        blocks = (length + draw(st.integers(1, 4))) * (count if layout == "pool" else 1)
        sides.append((place(draw, shape, layout, block_tokens, blocks), tables(draw, layout, count, length, blocks)))
    (source, source_tables), (destination, destination_tables) = sides
    return Case(source, destination, source_tables, destination_tables, tokens)


def place(draw: st.DrawFn, shape: Shape, layout: str, block_tokens: int, blocks: int) -> KVGeometry:
    """Where everything lies: in order or not, with gaps or not, in one region or many."""
    gap = st.sampled_from([0, 0, 1, 3])
    one_region = draw(st.booleans())
    planes, region, at = [], draw(st.integers(0, 2)), draw(gap)
    for index, plane in enumerate(shape):
        extents = [size * (1 if per_block else block_tokens) for size, per_block in plane]
        order = draw(st.permutations(range(len(plane)))) if draw(st.booleans()) else list(range(len(plane)))
        placed: dict[int, tuple[int, int, int]] = {}
        if layout in ("block", "pool"):
            inside, offsets = 0, {}
            for c in order:
                offsets[c] = inside
                inside += extents[c] + draw(gap)
            stride = inside + draw(gap)
            placed = {c: (region, at + offset, stride) for c, offset in offsets.items()}
            at += stride * blocks + draw(gap)
        else:
            for c in order:
                stride = extents[c] + draw(gap)
                placed[c] = (region, at, stride)
                at += stride * blocks + draw(gap)
                if layout == "tensors":
                    region, at = region + 1, 0
        if not one_region and layout != "tensors":
            region, at = region + 1, draw(gap)
        components = tuple(
            Component(*placed[c], size, f"t{size}", per_block) for c, (size, per_block) in enumerate(plane)
        )
        if layout == "pool" and planes:
            components = planes[0].components
        planes.append(Plane(f"p{index}", components, blocks))
    return KVGeometry({"m": "x"}, block_tokens, tuple(planes), 0)


def tables(draw: st.DrawFn, layout: str, count: int, length: int, blocks: int) -> list[np.ndarray]:
    kind = draw(st.sampled_from([np.int32, np.int64, np.uint16]))
    needed = length * (count if layout == "pool" else 1)
    found = []
    for _ in range(1 if layout == "pool" else count):
        if draw(st.booleans()):  # consecutive, perhaps up to the last block
            first = draw(st.integers(0, blocks - needed))
            ids = list(range(first, first + needed))
            if draw(st.booleans()) and needed > 2:  # with one break
                a, b = draw(st.integers(0, needed - 1)), draw(st.integers(0, needed - 1))
                ids[a], ids[b] = ids[b], ids[a]
        else:
            ids = list(draw(st.permutations(range(blocks))))[:needed]
        found += [ids[i * length : (i + 1) * length] for i in range(needed // length)] if length else [ids]
    if length == 0:
        found = [[]] * count
    return [np.array(ids, dtype=kind) for ids in found]


# -- the oracle --------------------------------------------------------------------------------------------------------


def bytes_of(c: Component, table: np.ndarray, block_tokens: int, token: int) -> list[Byte]:
    at = c.base + int(table[token // block_tokens]) * c.block_stride
    if not c.per_block:
        at += token % block_tokens * c.token_bytes
    return [(c.region, at + i) for i in range(c.token_bytes)]


def oracle(case: Case, start: int, end: int) -> dict[Byte, Byte]:
    """Destination byte -> source byte, for every valid byte of the tokens."""
    goes: dict[Byte, Byte] = {}
    tokens = case.source.block_tokens
    for p, (s, d) in enumerate(zip(case.source.planes, case.destination.planes, strict=True)):
        for cs, cd in zip(s.components, d.components, strict=True):
            for token in range(start, end):
                read = bytes_of(cs, case.source_tables[p], tokens, token)
                write = bytes_of(cd, case.destination_tables[p], tokens, token)
                goes.update(zip(write, read, strict=True))
    return goes


class Memory:
    """Regions of a geometry, with room to spare on either end of what it uses."""

    def __init__(self, geometry: KVGeometry, first: int, step: int) -> None:
        ends: dict[int, int] = {}
        for plane in geometry.planes:
            for c in plane.components:
                ends[c.region] = max(ends.get(c.region, 0), c.base + plane.blocks * c.block_stride + 8)
        if geometry.final_bytes:
            end = geometry.final_base + geometry.final_slots * geometry.final_stride + 8
            ends[geometry.final_region] = max(ends.get(geometry.final_region, 0), end)
        self.regions: dict[int, np.ndarray] = {}
        for region, size in sorted(ends.items()):
            self.regions[region] = first + step * np.arange(size, dtype=np.int64)
            first += size if step else 0

    @property
    def lengths(self) -> dict[int, int]:
        return {region: len(memory) for region, memory in self.regions.items()}


def final_oracle(case: Case, slots: tuple[int, int]) -> dict[Byte, Byte]:
    s, d = case.source, case.destination
    return {
        (d.final_region, d.final_base + slots[1] * d.final_stride + i): (
            s.final_region,
            s.final_base + slots[0] * s.final_stride + i,
        )
        for i in range(s.final_bytes)
    }


def check(case: Case, plans: list[Pair], start: int, end: int, final: tuple[int, int] | None = None) -> None:
    """The plans together move each byte of ``[start, end)``, and the payload of ``final`` slots, once, to its place,
    and touch nothing else."""
    source, destination = Memory(case.source, 1, 1), Memory(case.destination, -1, 0)
    written: Counter[Byte] = Counter()
    for reads, writes in plans:
        assert reads.length.tolist() == writes.length.tolist()  # C3.6
        reads.check_bounds(source.lengths)
        writes.check_bounds(destination.lengths)
        for (r, o, n), (tr, to, _) in zip(reads.triples(), writes.triples(), strict=True):
            destination.regions[tr][to : to + n] = source.regions[r][o : o + n]
            written.update((tr, to + i) for i in range(n))
    goes = oracle(case, start, end) | (final_oracle(case, final) if final else {})
    assert set(written) == set(goes), "C3.1: bytes that should not be, or should"
    assert set(written.values()) <= {1}, "C3.2: a byte written twice"
    for (region, at), (from_region, from_at) in goes.items():
        assert destination.regions[region][at] == source.regions[from_region][from_at]
    for region, memory in destination.regions.items():
        assert np.count_nonzero(memory != -1) == sum(1 for r, _ in goes if r == region)


# -- properties --------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C3.1", "C3.2", "C3.6")
@given(st.data())
@settings(max_examples=250, deadline=None)
def test_any_range_of_tokens_moves_exactly(data):
    case = data.draw(cases())
    grain = case.source.block_tokens if case.per_block else 1
    start = data.draw(st.integers(0, case.tokens // grain)) * grain
    end = data.draw(st.integers(start, case.tokens))

    source, target = case.plan(start, end)

    check(case, [(source, target)], start, end)
    assert target.disjoint()
    assert (source, target) == coalesce(source, target)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_few_runs_are_planned_as_many_are(data):
    case = data.draw(cases())
    grain = case.source.block_tokens if case.per_block else 1
    start = data.draw(st.integers(0, case.tokens // grain)) * grain
    end = data.draw(st.integers(start, case.tokens))
    with mock.patch.object(geometry, "FEW", 0):
        many = case.plan(start, end)
    with mock.patch.object(geometry, "FEW", 1000):
        few = case.plan(start, end)
    assert few == many
    for column in ("region", "offset", "length"):
        for one, other in zip(few, many, strict=True):
            assert getattr(one, column).dtype == getattr(other, column).dtype
            assert not getattr(one, column).flags.writeable


@pytest.mark.clause("C3.1", "C3.2", "C3.3")
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_ranges_cut_anywhere_move_every_token_once(data):
    case = data.draw(cases(per_block=False))
    prefix = data.draw(st.integers(0, case.tokens))
    inner = data.draw(st.lists(st.integers(prefix, case.tokens), max_size=5))

    plans = [case.plan(start, end) for start, end in pairwise([prefix, *sorted(inner), case.tokens])]

    check(case, plans, prefix, case.tokens)


@pytest.mark.clause("C3.1", "C3.2", "C3.3", "C3.7")
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_ranges_as_an_engine_reports_them_in_chunks_under_limits(data):
    """The whole way: reported ranges, held back to block edges, planned, split; per-block values included."""
    case = data.draw(cases())
    block = case.source.block_tokens
    grain = block if case.per_block else 1
    sent = prefix = data.draw(st.integers(0, case.tokens // grain)) * grain
    reported = sorted(data.draw(st.lists(st.integers(0, case.tokens), max_size=5)))
    max_bytes, max_segments = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 6))
    chunks: list[Pair] = []
    for computed, last in [*((c, False) for c in reported), (case.tokens, True)]:
        start, end = ready_range(sent, computed, block, last)
        chunks += split(*case.plan(start, end), max_bytes, max_segments)
        sent = end

    check(case, chunks, prefix, case.tokens)
    for source, _ in chunks:
        assert source.nbytes <= max_bytes
        assert len(source) <= max_segments


@st.composite
def with_final_payload(draw: st.DrawFn, geometry: KVGeometry, nbytes: int) -> KVGeometry:
    """Slots in a region of their own, or right behind the cache."""
    used: dict[int, int] = {}
    for plane in geometry.planes:
        for c in plane.components:
            used[c.region] = max(used.get(c.region, 0), c.base + plane.blocks * c.block_stride)
    region = draw(st.sampled_from([max(used), max(used) + 1]))
    gap = st.sampled_from([0, 0, 3])
    return replace(
        geometry,
        final_bytes=nbytes,
        final_region=region,
        final_base=used.get(region, 0) + draw(gap),
        final_stride=nbytes + draw(gap),
        final_slots=draw(st.integers(1, 3)),
    )


@pytest.mark.clause("C3.1", "C3.2", "C3.3", "C3.4", "C3.6")
@given(st.data())
@settings(max_examples=200, deadline=None)
def test_a_stage_plans_a_whole_transfer(data):
    """What an engine reports, in the chunks that a connector gets: KV that D lacks, then the final payload, once."""
    draw = data.draw
    case = draw(cases())
    payload = draw(st.sampled_from([0, 1, 6, 50]))
    case.source = draw(with_final_payload(case.source, payload))
    case.destination = draw(with_final_payload(case.destination, payload))
    block = case.source.block_tokens
    grain = block if case.per_block else 1
    # a prefix may end inside a block, at the end of the prompt, or (an engine's whim) behind it
    valid = draw(st.integers(0, case.tokens // grain + 2)) * grain
    alignment = draw(st.sampled_from([1, 1, 2]))
    limits = ChunkLimits(draw(st.integers(alignment, 60)), draw(st.integers(1, 6)), alignment)
    slots = (
        draw(st.integers(0, max(case.source.final_slots - 1, 0))),
        draw(st.integers(0, max(case.destination.final_slots - 1, 0))),
    )
    # each report tells the end of what is computed by now; the last one may tell nothing new
    ends = [*sorted(draw(st.lists(st.integers(0, case.tokens), max_size=5))), case.tokens]
    peer, transfer = PeerId("decode-0", 3), new_transfer_id()
    planner = ChunkPlanner(case.source, limits)
    planner.peer_up(peer, case.destination)
    tables = tuple(tuple(table.tolist()) for table in case.destination_tables)
    planner.begin(transfer, peer, Reservation(transfer, tables, valid, slots[1]), case.tokens)

    chunks: list[Chunk] = []
    for start, end in pairwise([0, *ends[:-1]]):
        chunks += planner.plan(ComputedRange(transfer, start, end, known(case, end), None, last=False))
    before_last = len(chunks)
    start = [0, *ends][-2]
    last_range = ComputedRange(transfer, start, case.tokens, known(case, case.tokens), None, True, slots[0])
    chunks += planner.plan(last_range)

    pairs = [(chunk.source, chunk.target) for chunk in chunks]
    check(case, pairs, min(valid, case.tokens), case.tokens, slots)
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert len(chunks) > before_last, "C3.4: the last range always has a chunk"
    for chunk in chunks:
        assert (chunk.transfer, chunk.peer) == (transfer, peer)
        assert chunk.nbytes == chunk.source.nbytes <= limits.max_bytes
        assert len(chunk.source) <= limits.max_segments
    assert planner.totals(transfer) == (sum(len(s) for s, _ in pairs), sum(s.nbytes for s, _ in pairs))
    assert planner.plan(last_range) == []


def known(case: Case, end: int) -> tuple[np.ndarray, ...]:
    """P's tables when ``end`` tokens are computed: blocks to come are not in them yet."""
    return tuple(table[: case.source.blocks_for(end)] for table in case.source_tables)


@pytest.mark.clause("C3.2")
@untimed
@given(
    st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True), min_size=2, max_size=2),
    st.tuples(st.integers(16, 18), st.sampled_from([0, 0, 7, 8, 16, 40]), st.sampled_from([0, 0, 0, 1])),
    st.tuples(st.integers(0, 8), st.integers(0, 8)).map(sorted),
)
def test_planes_that_share_storage_never_get_the_same_byte_twice(ids, place_of_second, bounds):
    """Two planes over one pool, or over overlapping parts of it."""
    stride, base, region = place_of_second
    first = Plane("a", (Component(0, 0, stride, 2), Component(0, 8, stride, 2)), 6)
    second = Plane("b", (Component(region, base, stride, 2), Component(region, base + 8, stride, 2)), 6)
    target = KVGeometry({}, 4, (first, second), 0)
    source = KVGeometry(
        {}, 4, tuple(Plane(name, (Component(r, 0, 8, 2), Component(r, 64, 8, 2)), 6) for r, name in enumerate("ab")), 0
    )
    tables = [np.array(table) for table in ids]
    start, end = bounds

    def bytes_between(a: int, b: int) -> list[Byte]:
        return [
            byte
            for plane, table in zip(target.planes, tables, strict=True)
            for c in plane.components
            for token in range(a, b)
            for byte in bytes_of(c, table, 4, token)
        ]

    def twice(touched: list[Byte]) -> bool:
        return len(touched) != len(set(touched))

    try:
        _, writes = KVMap(source, target).plan([np.array([0, 1]), np.array([2, 3])], tables, start, end)
        refused = False
        assert writes.disjoint()
    except SegmentError:
        refused = True
    if twice(bytes_between(start, end)):
        assert refused
    # one pool: a block named twice is refused, whichever of its tokens are asked for
    if refused:
        assert twice(bytes_between(start - start % 4, end + -end % 4))


# -- how many segments -------------------------------------------------------------------------------------------------

LAYERS, TOKENS, SIZE = 3, 4, 8


def block_major(blocks: int = 32, gap: int = 0) -> KVGeometry:
    stride = LAYERS * TOKENS * SIZE + gap
    plane = Plane("kv", tuple(Component(0, i * TOKENS * SIZE, stride, SIZE) for i in range(LAYERS)), blocks)
    return KVGeometry({}, TOKENS, (plane,), 0)


def layer_major(blocks: int = 32) -> KVGeometry:
    plane = Plane("kv", tuple(Component(i, 0, TOKENS * SIZE, SIZE) for i in range(LAYERS)), blocks)
    return KVGeometry({}, TOKENS, (plane,), 0)


SCATTERED = np.array([9, 4, 20, 1])
IN_ORDER = np.array([5, 6, 7, 8])


@pytest.mark.parametrize(
    ("source", "target", "source_ids", "target_ids", "start", "end", "segments"),
    [
        pytest.param(block_major(), block_major(), SCATTERED, SCATTERED, 0, 16, 4, id="a block is one"),
        pytest.param(block_major(), block_major(), IN_ORDER, IN_ORDER, 0, 16, 1, id="blocks in a row are one"),
        pytest.param(block_major(), block_major(), IN_ORDER, SCATTERED, 0, 16, 4, id="in a row on one side only"),
        pytest.param(block_major(), block_major(gap=8), IN_ORDER, IN_ORDER, 0, 16, 4, id="a gap between blocks"),
        pytest.param(block_major(), layer_major(), IN_ORDER, IN_ORDER, 0, 16, 12, id="different layouts"),
        pytest.param(layer_major(), layer_major(), IN_ORDER, IN_ORDER, 0, 16, 3, id="a layer's row is one"),
        pytest.param(layer_major(), layer_major(), SCATTERED, SCATTERED, 0, 16, 12, id="layer by layer"),
        pytest.param(
            block_major(), block_major(), IN_ORDER, IN_ORDER, 0, 14, 3, id="tail: the first layer's follows the row"
        ),
        pytest.param(
            block_major(), block_major(), IN_ORDER, IN_ORDER, 2, 16, 3, id="head: the row follows the last layer's"
        ),
        pytest.param(block_major(), block_major(), IN_ORDER, IN_ORDER, 5, 7, 3, id="inside one block"),
        pytest.param(block_major(), block_major(), IN_ORDER, IN_ORDER, 7, 7, 0, id="nothing"),
    ],
)
def test_no_more_segments_than_the_layouts_need(source, target, source_ids, target_ids, start, end, segments):
    plan = KVMap(source, target).plan([source_ids], [target_ids], start, end)
    assert [len(side) for side in plan] == [segments, segments]


def test_components_merge_across_the_edge_of_two_tensors():
    """The last block of one layer's part of a region and the first of the next one's lie next to each other."""
    size = TOKENS * SIZE
    plane = Plane("kv", tuple(Component(0, i * 2 * size, size, SIZE) for i in range(2)), 2)
    g = KVGeometry({}, TOKENS, (plane,), 0)
    whole, _ = KVMap(g, g).plan([np.array([0, 1])], [np.array([0, 1])], 0, 8)
    assert whole.triples() == [(0, 0, 4 * size)]


@pytest.mark.clause("C3.2")
def test_components_that_touch_in_the_first_block_only_stay_apart():
    plane = Plane("kv", (Component(0, 0, 16, 1), Component(0, 4, 32, 1)), 4)
    g = KVGeometry({}, TOKENS, (plane,), 0)
    whole, _ = KVMap(g, g).plan([np.array([1])], [np.array([1])], 0, 4)
    assert sorted(whole.triples()) == [(0, 16, 4), (0, 36, 4)]


def test_a_per_block_value_beside_its_block_costs_no_segment():
    stride = TOKENS * SIZE + 2
    plane = Plane("kv", (Component(0, 0, stride, SIZE), Component(0, TOKENS * SIZE, stride, 2, "scale", True)), 8)
    g = KVGeometry({}, TOKENS, (plane,), 0)
    whole, _ = KVMap(g, g).plan([np.array([3])], [np.array([3])], 0, 4)
    part, _ = KVMap(g, g).plan([np.array([3])], [np.array([3])], 0, 1)
    assert whole.triples() == [(0, 3 * stride, stride)]
    assert part.triples() == [(0, 3 * stride, SIZE), (0, 3 * stride + TOKENS * SIZE, 2)]


# -- what is refused ---------------------------------------------------------------------------------------------------


def two_planes(source_blocks: int = 8, target_blocks: int = 4) -> KVMap:
    def geometry(blocks: int) -> KVGeometry:
        planes = tuple(Plane(f"depth{p}", (Component(p, 0, 32, 8),), blocks) for p in range(2))
        return KVGeometry({}, 4, planes, 0)

    return KVMap(geometry(source_blocks), geometry(target_blocks))


GOOD = [np.array([1, 2]), np.array([3, 0])]
SHORT = [GOOD[0][:1], GOOD[1]]
HUGE = np.array([2**63, 1], np.uint64)
TWICE = np.array([2, 2])


@pytest.mark.clause("C3.1", "C3.2", "C3.6")
@pytest.mark.parametrize(
    ("source", "target", "start", "end", "text"),
    [
        pytest.param(GOOD[:1], GOOD, 0, 8, "1 source and 2 target tables for 2 planes", id="a table missing"),
        pytest.param(GOOD, [*GOOD, GOOD[0]], 0, 8, "2 source and 3 target tables", id="a table too many"),
        pytest.param(SHORT, GOOD, 0, 5, "source table of plane depth0 is .*2 integer", id="source too short"),
        pytest.param(GOOD, SHORT, 0, 5, "destination table of plane depth0", id="target too short"),
        pytest.param([GOOD[0], [3, 8]], GOOD, 0, 8, "block 8 in the source table of plane depth1.* 8$", id="source id"),
        pytest.param(GOOD, [[4, 1], GOOD[1]], 0, 8, "block 4 in the destination table .*depth0.* 4$", id="target id"),
        pytest.param([[-1, 1], GOOD[1]], GOOD, 0, 8, "block -1 in the source table", id="negative id"),
        pytest.param([HUGE, GOOD[1]], GOOD, 0, 8, "in the source table", id="huge id"),
        pytest.param([[1.5, 1], GOOD[1]], GOOD, 0, 8, "float64", id="float ids"),
        pytest.param([GOOD[0][None], GOOD[1]], GOOD, 0, 4, "source table of plane depth0", id="two dimensions"),
        pytest.param(GOOD, [GOOD[0], TWICE], 0, 8, r"C3\.2: block 2 is twice in .* plane depth1", id="twice"),
        pytest.param(GOOD, GOOD, 5, 4, "is not one", id="backwards"),
        pytest.param(GOOD, GOOD, -1, 4, "is not one", id="negative start"),
    ],
)
def test_what_cannot_be_planned_is_refused(source, target, start, end, text):
    with pytest.raises(SegmentError, match=text):
        two_planes().plan(source, target, start, end)


def test_ids_outside_the_range_do_not_matter():
    """A table may hold what is not known yet, as long as nothing asks for it."""
    ids = np.array([99, 1, -1])
    plan = two_planes().plan([ids, ids], [ids, ids], 4, 8)
    assert [len(side) for side in plan] == [2, 2]


@pytest.mark.clause("C3.2", "C3.3")
def test_a_range_that_would_tear_a_per_block_value_is_refused():
    plane = Plane("kv", (Component(0, 0, 16, 4), Component(1, 0, 2, 2, "scale", True)), 8)
    g = KVGeometry({}, 4, (plane,), 0)
    table = [np.array([1, 2])]
    assert KVMap(g, g).plan(table, table, 4, 6)[0].triples() == [(0, 32, 8), (1, 4, 2)]
    with pytest.raises(SegmentError, match="must end at a block edge"):
        KVMap(g, g).plan(table, table, 2, 8)


# -- the planner's books -----------------------------------------------------------------------------------------------

DECODE = PeerId("decode-0", 1)
LIMITS = ChunkLimits(1 << 20, 1 << 10)


def planning(final_bytes: int = 8) -> tuple[ChunkPlanner, KVGeometry]:
    g = replace(block_major(), final_bytes=final_bytes, final_region=1, final_stride=final_bytes, final_slots=4)
    planner = ChunkPlanner(g, LIMITS)
    planner.peer_up(DECODE, g)
    return planner, g


def reported(transfer: str, end: int, *, last: bool = False, slot: int = 0) -> ComputedRange:
    return ComputedRange(transfer, 0, end, (SCATTERED,), None, last, slot)


@pytest.mark.clause("C3.4")
@pytest.mark.parametrize(("final_bytes", "expected"), [(8, [(1, 16, 8)]), (0, [])])
def test_a_prompt_that_the_destination_holds_still_gives_one_chunk(final_bytes, expected):
    planner, _ = planning(final_bytes)
    transfer = new_transfer_id()
    planner.begin(transfer, DECODE, Reservation(transfer, ((5, 6, 7, 8),), 16, 3), 16)
    assert planner.plan(reported(transfer, 13)) == []
    (chunk,) = planner.plan(reported(transfer, 16, last=True, slot=2))
    assert (chunk.sequence, chunk.source.triples(), chunk.nbytes) == (0, expected, final_bytes)
    assert chunk.target.triples() == [(1, 24, 8)][: len(expected)]


@pytest.mark.clause("C3.3")
def test_an_unfinished_block_waits_and_what_only_the_source_had_cached_goes():
    planner, _ = planning()
    transfer = new_transfer_id()
    planner.begin(transfer, DECODE, Reservation(transfer, ((5, 6, 7, 8),), 4, 0), 16)
    # P found 8 tokens in its cache and computed 3 more: [4, 8) is new to D, [8, 11) waits
    (first,) = planner.plan(reported(transfer, 11))
    block = LAYERS * TOKENS * SIZE
    assert first.source.triples() == [(0, 4 * block, block)]
    assert planner.plan(reported(transfer, 11)) == []
    (second,) = planner.plan(reported(transfer, 11, last=True))
    assert second.source.triples()[:-1] == [(0, 20 * block + i * TOKENS * SIZE, 3 * SIZE) for i in range(LAYERS)]
    assert (first.sequence, second.sequence) == (0, 1)


@pytest.mark.clause("C1.2")
def test_transfers_are_planned_apart_and_nothing_of_an_unknown_one():
    planner, _ = planning()
    one, other, stranger = (new_transfer_id() for _ in range(3))
    planner.begin(one, DECODE, Reservation(one, ((5, 6, 7, 8),), 0, 0), 16)
    planner.begin(other, DECODE, Reservation(other, ((1, 2, 3, 4),), 8, 1), 16)
    chunks = [*planner.plan(reported(one, 8)), *planner.plan(reported(other, 16)), *planner.plan(reported(one, 16))]
    assert [(c.transfer, c.sequence, c.nbytes) for c in chunks] == [(one, 0, 192), (other, 0, 192), (one, 1, 192)]
    assert planner.plan(reported(stranger, 16)) == []
    assert planner.totals(stranger) == (0, 0)
    planner.forget(one)
    planner.forget(stranger)
    assert len(planner) == 1
    assert planner.plan(reported(one, 16, last=True)) == []


def test_a_peer_that_went_down_is_not_known_but_what_it_was_promised_is_still_planned():
    planner, g = planning()
    transfer = new_transfer_id()
    planner.begin(transfer, DECODE, Reservation(transfer, ((5, 6, 7, 8),), 0, 0), 16)
    assert planner.knows(DECODE)
    planner.peer_down(DECODE)
    planner.peer_down(DECODE)
    assert not planner.knows(DECODE)
    assert len(planner.plan(reported(transfer, 16))) == 1
    with pytest.raises(KeyError):
        planner.begin(new_transfer_id(), DECODE, Reservation(transfer, ((5, 6, 7, 8),), 0, 0), 16)
    planner.peer_up(DECODE, g)
    assert planner.knows(DECODE)


@pytest.mark.clause("C3.6")
@pytest.mark.parametrize(
    ("bad", "what"),
    [
        (lambda t: ComputedRange(t, 0, 8, (np.array([3, 99]),), None, last=False), "block 99"),
        (lambda t: reported(t, 8, last=True, slot=4), "final slot"),
    ],
    ids=["block", "slot"],
)
def test_a_range_that_is_refused_leaves_the_books_as_they_were(bad, what):
    planner, _ = planning()
    transfer = new_transfer_id()
    planner.begin(transfer, DECODE, Reservation(transfer, ((5, 6, 7, 8),), 0, 0), 16)
    with pytest.raises(SegmentError, match=what):
        planner.plan(bad(transfer))
    assert planner.totals(transfer) == (0, 0)
    (chunk,) = planner.plan(reported(transfer, 8, last=True))
    assert (chunk.sequence, chunk.nbytes) == (0, 192 + 8)


@pytest.mark.clause("C3.6", "C3.2")
@pytest.mark.parametrize(
    ("table", "valid", "slot", "what"),
    [
        # one range ends with block 5, a later one would write it again: neither sees the other
        ((5, 6, 7, 5), 0, 0, "C3.2: block 5 is twice in the destination table"),
        ((5, 99, 7, 8), 0, 0, "C3.6: block 99 in the destination table"),
        ((5, 6, 7), 0, 0, "C3.6: the destination table"),
        ((5, 6, 7, 8), 0, 4, "C3.6: final slot 4"),
        ((5, 6, 7, 8), 16, -1, "C3.6: final slot -1"),
    ],
)
def test_a_reservation_that_cannot_be_written_to_is_refused_before_anything_is_planned(table, valid, slot, what):
    planner, _ = planning()
    transfer = new_transfer_id()
    with pytest.raises(SegmentError, match=what):
        planner.begin(transfer, DECODE, Reservation(transfer, (table,), valid, slot), 16)
    assert not len(planner)


@pytest.mark.clause("C3.4")
def test_a_payload_right_behind_the_last_block_costs_no_segment():
    """The cache and the slots may be one region: what follows on both sides is one descriptor."""
    end = 32 * LAYERS * TOKENS * SIZE
    g = replace(block_major(), final_bytes=8, final_region=0, final_base=end, final_stride=8, final_slots=1)
    planner = ChunkPlanner(g, LIMITS)
    planner.peer_up(DECODE, g)
    transfer = new_transfer_id()
    planner.begin(transfer, DECODE, Reservation(transfer, ((31,),), 0, 0), 4)
    (chunk,) = planner.plan(ComputedRange(transfer, 0, 4, (np.array([31]),), None, last=True))
    assert chunk.source.triples() == chunk.target.triples() == [(0, end - 96, 104)]
