"""Copying, in each of its ways, against plain slices."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.segments import Segments
from kvbaton_loopback import copying
from kvbaton_loopback.copying import copy_segments


def check(source, target, sizes):
    """Copy, and compare all bytes of all regions with what slices would have made of them."""
    generator = np.random.default_rng(1)
    sources = {id: generator.integers(256, size=size, dtype=np.uint8) for id, size in sizes.items()}
    targets = {id: generator.integers(256, size=size, dtype=np.uint8) for id, size in sizes.items()}
    expected = {id: bytearray(data.tobytes()) for id, data in targets.items()}
    for (region, first, length), (into, start, _) in zip(source.triples(), target.triples(), strict=True):
        expected[into][start : start + length] = sources[region][first : first + length].tobytes()
    copy_segments(source, sources, target, targets)
    for id, data in expected.items():
        assert targets[id].tobytes() == bytes(data), f"T3: region {id}"


@st.composite
def plans(draw):
    """Segments of equal or mixed lengths, on a grid or off it, over one or more regions; targets do not overlap."""
    length = draw(st.sampled_from([1, 7, 64, 512]))
    count = draw(st.integers(0, 30))
    mixed, regions = draw(st.booleans()), draw(st.integers(1, 2))
    shifts = draw(st.tuples(st.integers(0, length), st.integers(0, length)))
    cells = draw(st.permutations(range(40)))
    source, target = [], []
    for number in range(count):
        size = draw(st.integers(1, length)) if mixed else length
        jitter = draw(st.integers(0, 1)) if draw(st.booleans()) and mixed else 0
        source.append((draw(st.integers(0, regions - 1)), shifts[0] + draw(st.integers(0, 38)) * length + jitter, size))
        target.append((draw(st.integers(0, regions - 1)), shifts[1] + cells[number] * length, size))
    return Segments.of(source), Segments.of(target), dict.fromkeys(range(regions), 43 * length + 3)


@pytest.mark.clause("T3")
@settings(max_examples=300, deadline=None)
@given(plans())
def test_like_slices(plan):
    check(*plan)


@pytest.mark.clause("T3")
@pytest.mark.parametrize("length", [4096, 8192, 16384, 65536, 100_000])
def test_every_way_of_copying(length):
    generator = np.random.default_rng(2)
    count = 100 if length < 10_000 else 9
    cells = generator.permutation(count + 5)
    source = Segments([0] * count, 3 + cells[:count] * length, [length] * count)
    target = Segments([0] * count, 5 + generator.permutation(count + 5)[:count] * length, [length] * count)
    check(source, target, {0: (count + 6) * length})


def test_short_segments_on_one_grid_are_gathered(monkeypatch):
    """The fast way is taken where it applies: benchmarks rest on it."""
    batches = []
    way = copying._gather_and_scatter
    monkeypatch.setattr(copying, "_gather_and_scatter", lambda *rows: (batches.append(1), way(*rows)))
    count = copying._FEW + 1
    grid = Segments([0] * count, range(0, 8192 * count, 8192), [4096] * count)
    check(grid, grid, {0: 8192 * count})
    assert batches == [1]
    off = Segments([0] * count, [0, *range(8191, 8192 * (count - 1), 8192)], [4096] * count)
    check(off, grid, {0: 8192 * count})
    assert batches == [1]
    few = grid[: copying._FEW]  # not worth the trouble
    check(few, few, {0: 8192 * count})
    assert batches == [1]
