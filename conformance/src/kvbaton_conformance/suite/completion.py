"""T5: how an accepted chunk ends at its source."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvbaton.connector import Chunk, Outcome
from kvbaton.identity import new_transfer_id
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import Pair
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.traffic import Traffic


class Completion(ConnectorTopic):
    """T5: each accepted chunk ends in exactly one completion, with its outcome and with what is quiet.

    In every test of the kit, a witness beneath the guard counts what the plugin itself reports.
    """

    @pytest.mark.clause("T5")
    def test_a_chunk_ends_once(self, pair: Pair) -> None:
        """One chunk, then many passes.

        Troubleshooting:
        - twice: the completion is queued by the thread that moves bytes *and* found again by poll;
        - never: the handle is forgotten before it was seen terminal.
        """
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 64, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T5: one chunk is received and done")
        pair.pump_idle()
        require(
            len(sent.completions) == 1, "T5", "a chunk had more than one completion",
            expected="one", seen=[str(one) for one in sent.completions], look="what poll() collects completions from",
        )  # fmt: skip

    @pytest.mark.clause("T5")
    def test_each_of_many_ends_once_under_its_own_name(self, pair: Pair, draw: random.Random) -> None:
        """60 chunks of three transfers, whose sequences are the same numbers.

        Troubleshooting:
        - some end twice and others never: they are looked up by sequence alone.
        """
        traffic = Traffic(pair, draw, transfers=3, chunks=20, segments=2)
        traffic.run("T5: 60 chunks have arrived")
        seen = Counter((c.transfer, c.sequence) for c in pair.source.completions if c.outcome is Outcome.DONE)
        wanted = {(sent.chunk.transfer, sent.chunk.sequence) for sent in traffic.sent}
        require(set(seen) == wanted, "T5", "completions do not belong to the chunks that were submitted", seen=seen)

    @pytest.mark.clause("T5")
    def test_a_chunk_without_bytes_ends(self, pair: Pair) -> None:
        """Three of them, between others."""
        transfer = pair.grant(pair.rows((0, 0, 256)))
        sent = [
            pair.send(
                *((pair.rows((1, 0, 64)), pair.rows((0, 64 * number, 64))) if number % 2 else (Segments.empty(),) * 2),
                transfer=transfer, sequence=number,
            )
            for number in range(5)
        ]  # fmt: skip
        pair.pump_until(lambda: all(one.received and one.done for one in sent), "T5: chunks with and without bytes end")

    @pytest.mark.clause("T5", "C6.1")
    def test_what_is_said_to_be_quiet_is_quiet_after_a_disconnect(self, pair: Pair, draw: random.Random) -> None:
        """The source disconnects with 40 chunks under way: each ends once, and where a side is said to be quiet, its
        memory is used for something else at once.

        Troubleshooting:
        - bytes arrive after target_quiet: a chunk ends as CANCELLED or FAILED when its handle is released; releasing is
          not stopping. Wait until the operation is over, or say that it is not quiet;
        - chunks never end: disconnect() dropped the queue.
        """
        traffic = Traffic(pair, draw, transfers=4, chunks=10, segments=4)
        traffic.submit()
        pair.source.guard.disconnect(pair.target.peer)
        ended = {sent.chunk.transfer: sent for sent in traffic.sent}
        pair.pump_until(lambda: traffic.over, "T5: all chunks end after a disconnect")
        traffic.check_once()
        require(len(ended) == 4, "T5", "transfers were lost")
        outcomes = {completion.outcome for completion in pair.source.completions}
        allowed = {Outcome.DONE, Outcome.FAILED, Outcome.CANCELLED}
        require(outcomes <= allowed, "T5", "a chunk ended in another way than it can", expected=allowed, seen=outcomes)
        # terminal: nothing reads the source any more, nothing writes the target
        pair.source.memory.poison()
        pair.target.memory.poison()
        before = pair.target.memory.image()
        pair.pump_idle(60)
        pair.target.memory.untouched(before, "T5")

    @pytest.mark.clause("T5", "T7")
    def test_a_chunk_for_a_peer_that_is_down_fails_and_is_quiet(self, pair: Pair) -> None:
        """Submitted after a disconnect: accepted, and ended as FAILED, both sides quiet."""
        source, target = pair.source, pair.target
        before = target.memory.image()
        source.guard.disconnect(target.peer)
        pair.pump_until(lambda: source.told_down(target.peer), "T2: a disconnected peer is down")
        chunk = Chunk(new_transfer_id(), 0, target.peer, pair.rows((0, 0, 64)), pair.rows((0, 0, 64)), 64 * pair.grain)
        require(source.guard.submit(chunk), "T5", "a chunk for a peer that is down was not taken and failed")
        pair.pump_until(lambda: bool(source.completions), "T5: it ends")
        (completion,) = source.completions
        require(
            completion.outcome is Outcome.FAILED and completion.terminal, "T5",
            "a chunk for a peer that is down did not end as FAILED and quiet", seen=completion,
        )  # fmt: skip
        target.memory.untouched(before, "T5")

    @pytest.mark.clause("T5", "C3.6")
    def test_a_chunk_that_cannot_be_is_refused_before_anything_moves(self, ends: Ends) -> None:
        """Segments outside of their region, lists of different length, a wrong sum: refused at submit."""
        from kvbaton.errors import SegmentError

        pair = ends.pair()
        before, calls = pair.target.memory.image(), pair.source.calls("submit")
        size = 1 << 16
        wrong = {
            "a source segment past its region": (pair.rows((0, size - 10, 20)), pair.rows((0, 0, 20)), None),
            "a target segment past its region": (pair.rows((0, 0, 20)), pair.rows((0, size - 10, 20)), None),
            "a region that is not registered": (pair.rows((0, 0, 20)), pair.rows((9, 0, 20)), None),
            "fewer target segments than source ones": (pair.rows((0, 0, 9), (0, 9, 9)), pair.rows((0, 0, 9)), None),
            "unequal lengths": (pair.rows((0, 0, 9)), pair.rows((0, 0, 8)), None),
            "a sum that is not that of its segments": (pair.rows((0, 0, 9)), pair.rows((0, 0, 9)), 8),
        }
        for what, (reads, writes, nbytes) in wrong.items():
            chunk = Chunk(
                new_transfer_id(), 0, pair.target.peer, reads, writes, reads.nbytes if nbytes is None else nbytes
            )
            try:
                pair.source.guard.submit(chunk)
            except SegmentError:
                continue
            require(False, "C3.6", f"{what} was accepted", expected="SegmentError", seen="nothing was raised")
        require(pair.source.calls("submit") == calls, "C3.6", "a chunk that cannot be reached the plugin")
        pair.pump_idle()
        pair.target.memory.untouched(before, "C3.6")
