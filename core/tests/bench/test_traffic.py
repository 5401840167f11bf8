"""A request's KV in segments: as many and as large as the layout says, each byte once (C3.2)."""

import numpy as np
import pytest

from kvbaton.bench.models import Model, find
from kvbaton.bench.traffic import FINAL, KV, Traffic
from kvbaton.errors import SettingsError
from kvbaton.pair.batches import batched

SMALL = Model("small", layers=3, kv_heads=2, head_dim=4, dtype="float16", hidden=5)


def bytes_of(segments, region):
    return np.concatenate([np.arange(at, at + length) for of, at, length in segments.triples() if of == region])


@pytest.mark.parametrize("model", [SMALL, Model("looped", 2, 1, 8, planes=3), Model("latent", 2, 1, 8, latent=9)])
@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("scattered", [True, False])
@pytest.mark.clause("C3.2")
def test_every_byte_travels_once(model, layout, scattered):
    traffic = Traffic(model, 24, 4, layout, scattered)
    for segments in traffic.segments:
        assert np.array_equal(np.sort(bytes_of(segments, KV)), np.arange(traffic.kv_bytes(1)))
        assert segments.nbytes == traffic.request_bytes
        if model.final_bytes:
            assert np.array_equal(bytes_of(segments, FINAL), np.arange(model.final_bytes))


@pytest.mark.parametrize(
    ("layout", "count", "length"),
    [("block", 2 * 128 + 1, 1 << 20), ("layer", 2 * 32 * 128 + 1, 32 << 10)],
)
def test_the_shapes_of_a_known_model(layout, count, length):
    traffic = Traffic(find("llama-8b"), layout=layout)
    assert (len(traffic.segments[0]), traffic.segment_bytes) == (count, length)
    chunks = batched(*traffic.segments, 64 << 20, 1 << 16, 1)
    assert sum(len(source) for source, _ in chunks) == count
    assert len(chunks) == 5


def test_contiguous_blocks_are_long_runs_and_scattered_ones_are_not():
    assert len(Traffic(SMALL, 64, 4, scattered=False).segments[0]) == 2
    source, target = Traffic(SMALL, 64, 4).segments
    assert len(source) == 2 * 16 + 1
    assert not np.array_equal(source.offset, target.offset)


@pytest.mark.parametrize("blocks", [2, 3, 4, 100])
def test_scattered_blocks_never_follow_each_other(blocks):
    for seed in range(20):
        (tables,) = Traffic(SMALL, 4 * blocks, 4).tables(1, seed)
        assert not (np.diff(tables[0]) == 1).any()
        assert np.array_equal(np.sort(tables[0]), np.arange(blocks))


def test_every_request_has_places_of_its_own():
    tables = Traffic(Model("looped", 2, 1, 8, planes=3), 24, 4).tables(5, seed=1)
    assert tables.shape == (5, 3, 6)
    assert np.array_equal(np.sort(tables, axis=None), np.arange(90))


def test_a_block_that_does_not_divide_is_refused_with_what_would():
    with pytest.raises(SettingsError, match="take 96 or 112 tokens"):
        Traffic(SMALL, 100, 16)
    with pytest.raises(SettingsError, match="take 16 tokens"):
        Traffic(SMALL, 10, 16)
