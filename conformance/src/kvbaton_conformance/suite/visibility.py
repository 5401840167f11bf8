"""T3: what a receipt promises about bytes."""

from __future__ import annotations

import pytest

from kvbaton_conformance.harness import Pair, segments
from kvbaton_conformance.suite.topic import ConnectorTopic


class Visibility(ConnectorTopic):
    """T3: when a receipt is there, so are all bytes of its chunk, and no other byte has changed."""

    @pytest.mark.clause("T3", "C3.1")
    def test_every_byte_of_a_chunk_arrives_and_no_other_changes(self, pair: Pair) -> None:
        """Segments of one byte, at the edges of regions, and side by side.

        Troubleshooting:
        - one byte too many or too few: the end of a segment is ``offset + length``, exclusive;
        - right bytes at the wrong place: source and target are paired by index, whatever their order in memory;
        - a whole region shifted: offsets count from the region's start, not from the mapping's.
        """
        reads = segments((0, 0, 100), (1, 5, 50), (0, 4096, 4096), (0, 12288, 4096), (0, 777, 1))
        writes = segments((0, 7, 100), (0, 900, 50), (0, 8192, 4096), (0, 20480, 4096), (1, 16383, 1))
        sent = pair.send(reads, writes)
        pair.pump_until(lambda: sent.received and sent.done, "T3: one chunk of five segments is received and done")
        pair.target.memory.check(sent.expected, "T3")
