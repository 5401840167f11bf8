"""Bytes alone: three ways that take turns, and a baseline that breaks nothing but itself."""

import re
from pathlib import Path

import pytest

from kvbaton.bench import wire
from kvbaton.bench.models import Model
from kvbaton.bench.traffic import Traffic
from kvbaton.pair.batches import batched

TRAFFIC = Traffic(Model("small", layers=3, kv_heads=2, head_dim=16, hidden=5), 64, 4)


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def over(transport, **changes):
    how = {
        "options": {}, "memory": "host", "devices": (0, 0), "reach": "same_process", "chunk_bytes": 4096,
        "chunk_segments": 1 << 16, **changes,
    }  # fmt: skip
    return wire.Wire(transport, **how)


def measured(of):
    regions = [TRAFFIC.kv_bytes(1), TRAFFIC.final_stored(1)]
    return wire.measure(of, regions, *TRAFFIC.segments, 0.2, lambda what, share: None)


def test_kvbaton_beside_a_copy_and_a_baseline():
    told = []
    of = over("bench_transports:sound")
    regions = [TRAFFIC.kv_bytes(1), TRAFFIC.final_stored(1)]
    found = wire.measure(of, regions, *TRAFFIC.segments, 0.2, lambda what, share: told.append(share))
    assert of.notes == []
    assert (found.nbytes, found.segments) == (TRAFFIC.request_bytes, len(TRAFFIC.segments[0]))
    assert found.chunks == len(batched(*TRAFFIC.segments, 4096, 1 << 16, 1)) > 2
    assert found.baseline.name == "raw copies"
    runs = found.rate.count
    assert {found.latency.count, found.copy.count, found.baseline.rate.count, found.of_baseline.count} == {runs}
    assert found.submit.count == found.chunk_latency.count == runs * found.chunks
    assert found.rate.least <= found.rate.p10 <= found.rate.median <= found.rate.p90 <= found.rate.most
    assert 0 <= min(told) <= max(told) <= 1


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("fails_at_open", "the baseline is left out: RuntimeError: no such device"),
        ("fails_at_move", "raw copies is left out: RuntimeError: the wire is cut"),
        ("dies", "raw copies failed and is left out: .*died"),
        ("early", "raw copies is left out: its target has everything before it was sent"),
        ("wrong", "raw copies failed and is left out: T3: .*bytes are wrong"),
    ],
)
def test_a_broken_baseline_is_left_out_and_told(name, note, monkeypatch):
    # what it was waiting for does not come: not for long
    monkeypatch.setattr(wire, "_PATIENCE", 2.0)
    of = over(f"bench_transports:{name}")
    found = measured(of)
    assert found.baseline is None
    assert found.of_baseline is None
    assert found.rate.count >= 1
    assert len(of.notes) == 1
    assert re.search(note, of.notes[0]), of.notes


def test_a_baseline_that_fails_at_its_end_keeps_its_figures():
    of = over("bench_transports:fails_at_close")
    assert measured(of).baseline is not None
    assert of.notes == ["raw copies, at its end: RuntimeError: it would not go"]


def test_a_transport_without_a_baseline_says_nothing_of_it():
    of = over("loopback")
    assert measured(of).baseline is None
    assert of.notes == []


def test_a_sweep_has_a_point_for_each_length(monkeypatch):
    monkeypatch.setattr(wire, "_SWEEP_BYTES", 1 << 18)
    points = wire.sweep(over("loopback"), 0.2, lambda what, share: None, (4096, 65536))
    assert [(p.segment_bytes, p.segments) for p in points] == [(4096, 64), (65536, 8)]
