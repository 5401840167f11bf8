"""The option ``telemetry``: what NIXL measures comes to whoever asks the stage for its statistics."""

import pytest

from kvbaton_conformance.harness import Pair, segments

FIGURES = {
    "writes_total",
    "write_descriptors_total",
    "write_bytes_total",
    "write_posting_seconds_total",
    "write_seconds_total",
}


def carry(open_here, options, count):
    """The figures of a source after ``count`` chunks of 3 segments, 96 bytes each chunk."""
    pair = Pair(open_here("prefill-0", options), open_here("decode-0", options, seed=1))
    pair.source.memory.fill()
    pair.connect()
    rows = segments((0, 0, 32), (0, 64, 32), (0, 128, 32))
    for _ in range(count):
        sent = pair.send(rows, rows)
        pair.pump_until(lambda sent=sent: sent.done and sent.received, "T5: it is done")
    return pair.source.connector.statistics(), pair


def test_what_was_measured_is_added_up(open_here):
    figures, pair = carry(open_here, {"telemetry": True, "packing": "never"}, 4)
    assert figures["writes_total"] == 4
    assert figures["write_descriptors_total"] == 12
    assert figures["write_bytes_total"] == 4 * 96
    assert pair.source.guard.statistics()["connector_writes_total"] == 4
    assert 0 <= figures["write_posting_seconds_total"] <= figures["write_seconds_total"] < 60


def test_a_packed_chunk_is_one_descriptor_and_figures_outlive_the_link(open_here):
    figures, pair = carry(open_here, {"telemetry": True, "packing": "always"}, 2)
    measured = {name: figures[name] for name in FIGURES}
    assert measured["write_descriptors_total"] == 2
    assert measured["write_bytes_total"] == 2 * 96
    pair.source.guard.disconnect(pair.target.peer)
    pair.pump_until(lambda: pair.source.told_quiet(pair.target.peer), "C6.4: it has gone")
    after = pair.source.connector.statistics()
    assert {name: after[name] for name in FIGURES} == measured


@pytest.mark.parametrize("options", [{}, {"telemetry": False}])
def test_without_the_option_nothing_is_measured(open_here, options):
    figures, _pair = carry(open_here, options, 1)
    assert not FIGURES & set(figures)
    assert figures["dropped_notes_total"] == 0
