"""T3: what a receipt promises about bytes."""

from __future__ import annotations

import random

import pytest

from kvbaton.segments import Segments
from kvbaton_conformance.harness import Pair
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.traffic import Traffic

#: Regions of the tests of large chunks.
_LARGE = {0: 8 << 20}
#: The region of the test of many segments: room for them and the gaps between them.
_MANY = {0: 8 << 20}


class Visibility(ConnectorTopic):
    """T3: when a receipt is there, so are all bytes of its chunk; no other byte changes, and none again.

    In every test of the kit, the bytes of a chunk are looked at in the moment in which its receipt is reported.
    """

    @pytest.mark.clause("T3", "C3.1", "C3.6")
    def test_every_byte_of_a_chunk_arrives_and_no_other_changes(self, pair: Pair) -> None:
        """Segments of one byte, at the edges of regions, and side by side.

        Troubleshooting:
        - one byte too many or too few: the end of a segment is ``offset + length``, exclusive;
        - right bytes at the wrong place: source and target are paired by index, whatever their order in memory;
        - a whole region shifted: offsets count from the region's start, not from the mapping's.
        """
        reads = pair.rows((0, 0, 100), (1, 5, 50), (0, 4096, 4096), (0, 12288, 4096), (0, 777, 1), (0, 65535, 1))
        writes = pair.rows((0, 7, 100), (0, 900, 50), (0, 8192, 4096), (0, 20480, 4096), (1, 16383, 1), (0, 0, 1))
        sent = pair.send(reads, writes)
        pair.pump_until(lambda: sent.received and sent.done, "T3: one chunk of six segments is received and done")
        pair.pump_idle()
        pair.target.memory.check(sent.expected, "T3")

    @pytest.mark.clause("T3", "C3.2")
    def test_segments_of_equal_length_are_paired_by_index(self, pair: Pair, draw: random.Random) -> None:
        """64 segments of equal length, shuffled on both sides: any other order goes unnoticed by sizes.

        Troubleshooting:
        - blocks exchanged: the segments of one side were sorted or coalesced without those of the other.
        """
        pieces = list(range(64))
        here, there = draw.sample(pieces, 64), draw.sample(pieces, 64)
        sent = pair.send(
            pair.rows(*((0, 512 * piece, 128) for piece in here)),
            pair.rows(*((0, 512 * piece + 256, 128) for piece in there)),
        )
        pair.pump_until(lambda: sent.received and sent.done, "T3: one chunk of 64 equal segments is received and done")
        pair.target.memory.check(sent.expected, "C3.2")

    @pytest.mark.clause("T3")
    def test_neighbouring_segments_stay_apart(self, pair: Pair) -> None:
        """Segments side by side at one end and apart at the other, in both directions.

        Troubleshooting:
        - bytes between segments change: runs were joined because they touch at one end only.
        """
        apart = [(0, 1024 * number, 100) for number in range(16)]
        together = [(0, 32768 + 100 * number, 100) for number in range(16)]
        sent = pair.send(pair.rows(*apart, *together), pair.rows(*together, *apart))
        pair.pump_until(lambda: sent.received and sent.done, "T3: one chunk of 32 segments is received and done")
        pair.target.memory.check(sent.expected, "T3")

    @pytest.mark.clause("T3", "C3.4")
    def test_a_chunk_without_bytes_is_received(self, pair: Pair) -> None:
        """No segments, no bytes: a receipt all the same (a prompt whose prefix is cached whole).

        Troubleshooting:
        - no receipt: it is sent by what moves bytes, and there are none;
        - an error in the native library: it is never to see an empty list.
        """
        before = pair.target.memory.image()
        sent = pair.send(Segments.empty(), Segments.empty())
        pair.pump_until(lambda: sent.received and sent.done, "T3: a chunk without bytes is received and done")
        pair.target.memory.untouched(before, "T3")

    @pytest.mark.clause("T3")
    def test_a_large_chunk_arrives_whole(self, ends: Ends) -> None:
        """2 MiB in one segment and 2 MiB in 512, in one chunk.

        Troubleshooting:
        - the tail is missing: a write that was cut short was not continued;
        - a receipt with part of the bytes: it is counted per operation, not per chunk.
        """
        pair = ends.pair(regions=_LARGE)
        half, piece = (2 << 20) // pair.grain, 4096 // pair.grain
        capabilities = pair.source.guard.capabilities
        pieces = min(512, capabilities.max_segments - 1)
        half = min(half, capabilities.max_chunk_bytes // pair.grain - pieces * piece)
        reads = [(0, 0, half), *((0, half + number * 2 * piece, piece) for number in range(pieces))]
        writes = [(0, piece // 2, half), *((0, half + (3 + number * 2) * piece + 1, piece) for number in range(pieces))]
        sent = pair.send(pair.rows(*reads), pair.rows(*writes))
        pair.pump_until(lambda: sent.received and sent.done, "T3: a chunk of 4 MiB is received and done")
        pair.target.memory.check(sent.expected, "T3")

    @pytest.mark.clause("T3")
    def test_thousands_of_unequal_segments_arrive_whole(self, ends: Ends, draw: random.Random) -> None:
        """2,600 segments of 16 bytes to 5 KB, in one chunk; more than a device has programs for, several times.  The
        first half are short.

        Troubleshooting:
        - ends of segments are missing: segments that are moved together go as far as one of them, or as others did
          before; look at what a compiler made of the loop, too, on every device and with every version of it.
        """
        pair = ends.pair(regions=_MANY)
        capabilities = pair.source.guard.capabilities
        unit = max(1, 16 // pair.grain)
        count = min(2600, capabilities.max_segments)
        # who takes the lengths of what it moved first for those of all moves too little
        lengths = [unit * draw.randint(1, 20 if number < count // 2 else 312) for number in range(count)]
        while pair.grain * sum(lengths) > min(capabilities.max_chunk_bytes, 7 << 20):
            lengths.pop()
        places = []
        for order in (range(len(lengths)), draw.sample(range(len(lengths)), len(lengths))):
            at, starts = 0, dict.fromkeys(order, 0)
            for number in order:
                at += unit * draw.randint(0, 3)
                starts[number] = at
                at += lengths[number]
            places.append([(0, starts[number], length) for number, length in enumerate(lengths)])
        sent = pair.send(pair.rows(*places[0]), pair.rows(*places[1]))
        pair.pump_until(lambda: sent.received and sent.done, "T3: a chunk of unequal segments is received and done")
        pair.target.memory.check(sent.expected, "T3")

    @pytest.mark.clause("T3")
    def test_nothing_is_written_after_the_receipt(self, pair: Pair) -> None:
        """After the receipt the target's memory is used for something else, and the source's too.

        Troubleshooting:
        - old bytes come back: a second attempt, or a retry on another lane, was still under way; a receipt may be sent
          only when nothing of the chunk can be written any more.
        """
        reads, writes = pair.rows((0, 0, 16384)), pair.rows((0, 16384, 16384))
        for _ in range(5):
            sent = pair.send(reads, writes, base=pair.target.memory.image())
            pair.pump_until(lambda sent=sent: sent.received and sent.done, "T3: one chunk is received and done")  # type: ignore[misc]
            pair.finish(sent.chunk.transfer)
            pair.source.memory.poison()
            pair.target.memory.poison()
            before = pair.target.memory.image()
            pair.pump_idle(40)
            pair.target.memory.untouched(before, "T3")
            pair.source.memory.fill()

    @pytest.mark.clause("T3", "T5", "C5.1")
    def test_the_source_is_not_read_once_it_is_quiet(self, pair: Pair) -> None:
        """When a completion says that the source is quiet, the source's memory is used for something else at once.

        Troubleshooting:
        - the new content arrives: source_quiet is said when the chunk is queued, not when it has been read.
        """
        reads, writes = pair.rows((0, 0, 32768)), pair.rows((0, 4096, 32768))
        sent = pair.send(reads, writes)
        pair.pump_until(
            lambda: any(completion.source_quiet for completion in sent.completions), "T5: the source becomes quiet"
        )
        pair.source.memory.poison()
        pair.pump_until(lambda: sent.received, "T3: one chunk is received")
        pair.target.memory.check(sent.expected, "C5.1")

    @pytest.mark.clause("T3", "C1.2", "C3.2")
    def test_transfers_do_not_touch_each_other(self, pair: Pair, draw: random.Random) -> None:
        """Eight transfers of six chunks each, at random places.

        Troubleshooting:
        - a chunk is missing: something is kept under the sequence alone; sequences count anew in each transfer.
        """
        Traffic(pair, draw, transfers=8, chunks=6, segments=4).run("T3: 48 chunks of 8 transfers have arrived")
