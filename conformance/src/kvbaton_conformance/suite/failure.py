"""T7: a peer that is dead or cannot be reached."""

from __future__ import annotations

import random
import time

import pytest

from kvbaton.connector import Chunk, Outcome
from kvbaton.identity import new_transfer_id
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import Pair
from kvbaton_conformance.suite.quiet import a_joined_source_becomes_quiet, nothing_proves_quiet
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.traffic import Traffic
from kvbaton_conformance.two_process import RemoteEnd

#: Seconds within which a dead peer must be noticed: the guard's deadline for connecting, in these tests.
_NOTICED = 5.0


class Failure(ConnectorTopic):
    """T7: a dead peer is an event from ``poll()`` and failed completions for exactly its chunks; never a hang, a crash
    or silence.
    """

    @pytest.mark.clause("T7")
    def test_a_peer_that_is_gone_is_down(self, ends: Ends) -> None:
        """With nothing under way.  In two processes it is killed.

        Troubleshooting:
        - silence: nothing watches an idle connection; a heartbeat, the end of a stream or a process descriptor does.
        """
        pair = ends.pair()
        ends.lose(pair.target)
        start = time.monotonic()
        pair.pump_until(lambda: pair.source.told_down(pair.target.peer), "T7: a peer that is gone is down", _NOTICED)
        took = time.monotonic() - start
        require(took < _NOTICED, "T7", "a dead peer was noticed too late", expected=_NOTICED, seen=took)
        downs = [event for event in pair.source.peers if not event.up]
        require(len(downs) >= 1 and downs[0].peer == pair.target.peer, "T7", "down names another peer", seen=downs)

    @pytest.mark.clause("T7", "T5")
    @pytest.mark.absent_where(reason=nothing_proves_quiet)
    def test_chunks_of_a_peer_that_is_gone_fail_and_only_those(self, ends: Ends, draw: random.Random) -> None:
        """Two targets with chunks under way; the first goes away.

        Troubleshooting:
        - chunks of the other fail: an error of one connection ends the whole connector;
        - chunks of the dead one never end: nobody completes what its handle has forgotten.
        """
        pair = ends.pair()
        other = Pair(pair.source, ends.end("decode-1"))
        other.connect()
        lost = Traffic(pair, draw, transfers=2, chunks=10, segments=2)
        kept = Traffic(other, draw, transfers=2, chunks=10, segments=2)
        pair.clog(pair.target)
        other.clog(other.target)
        lost.submit()
        kept.submit()
        ends.lose(pair.target)
        pair.pump_until(lambda: pair.source.told_down(pair.target.peer), "T7: a peer that is gone is down")
        other.unclog()
        other.pump_until(lambda: kept.arrived, "T7: the chunks of the peer that lives have arrived")
        other.target.memory.check(kept.expected(), "T3")
        pair.source.guard.fenced(pair.target.peer)
        pair.pump_until(lambda: lost.over, "T7: the chunks of the dead peer end once it is fenced")
        lost.check_once()
        seen = {sent.completions[-1].outcome for sent in kept.sent}
        require(seen == {Outcome.DONE}, "T7", "a chunk of a peer that lives failed", expected="DONE", seen=seen)

    @pytest.mark.clause("T7", "T5")
    @pytest.mark.absent_where(reason=nothing_proves_quiet)
    def test_a_chunk_for_a_peer_that_is_gone_fails(self, ends: Ends) -> None:
        """Submitted before the source has noticed, and after."""
        pair = ends.pair()
        ends.lose(pair.target)
        chunks = [_chunk(pair, number) for number in range(3)]
        taken = [chunk for chunk in chunks if pair.source.guard.submit(chunk)]
        pair.pump_until(lambda: pair.source.told_down(pair.target.peer), "T7: a peer that is gone is down")
        pair.source.guard.fenced(pair.target.peer)
        late = _chunk(pair, 9)
        require(pair.source.guard.submit(late), "T7", "a chunk for a dead peer is full for ever", seen="False")
        ended = {}

        def over() -> bool:
            ended.update({(c.transfer, c.sequence): c for c in pair.source.completions if c.terminal})
            return all((chunk.transfer, chunk.sequence) in ended for chunk in (*taken, late))

        pair.pump_until(over, "T7: all of them end")
        require(
            ended[late.transfer, late.sequence].outcome is Outcome.FAILED, "T7", "a chunk for a dead peer did not fail"
        )

    @pytest.mark.clause("T7", "C6.4", "T13")
    @pytest.mark.mode("two-processes")
    def test_a_killed_source_is_an_event_at_the_target_and_then_quiet(self, ends: Ends, draw: random.Random) -> None:
        """The source is killed with chunks under way.  Once the target has disconnected from it and heard *quiet*, its
        memory is used for something else and stays as it is.

        Troubleshooting:
        - the target hears nothing: it looks at a connection only when it sends;
        - bytes arrive after quiet: what the kernel still holds for us was not drained before down was said.
        """
        pair = ends.pair()
        traffic = Traffic(pair, draw, transfers=4, chunks=10, segments=4)
        traffic.submit()
        assert isinstance(pair.source, RemoteEnd)
        pair.source.kill()
        a_joined_source_becomes_quiet(pair)

    @pytest.mark.clause("T7")
    @pytest.mark.mode("two-processes")
    def test_a_hung_process_does_not_block_its_peers(self, ends: Ends) -> None:
        """A stopped target: no call of the source blocks, and afterwards everything goes on.

        Troubleshooting:
        - poll() hangs: it takes a lock in shared memory that the stopped process holds, or reads without a bound.
        """
        pair = ends.pair()
        assert isinstance(pair.target, RemoteEnd)
        transfer = pair.grant(pair.rows(*((0, 128 * number, 128) for number in range(20))))
        sent = []
        for number in range(20):
            row = pair.rows((0, 128 * number, 128))
            sent.append(pair.send(row, row, transfer=transfer, sequence=number))
            if number == 9:
                pair.target.hang()
                break
        for _ in range(100):
            pair.pump()
        pair.target.resume()
        pair.pump_until(
            lambda: pair.source.told_down(pair.target.peer) or all(one.received and one.done for one in sent),
            "T7: a process that goes on is served, or is down",
        )

    @pytest.mark.clause("T7")
    def test_the_survivor_serves_a_new_peer(self, ends: Ends, draw: random.Random) -> None:
        """Three peers go away one after the other; each time a new one gets its chunks.

        Troubleshooting:
        - the pair is broken for good: something of the dead peer is kept and found again.
        """
        source = None
        for turn in range(3):
            if source is None:
                pair = ends.pair()
                source = pair.source
            else:
                pair = Pair(source, ends.end(f"decode-{turn}"))
                pair.connect()
            Traffic(pair, draw, transfers=2, chunks=5).run("T7: 10 chunks to a new peer have arrived")
            for transfer in {sent.transfer for sent in pair.target.receipts}:
                pair.finish(transfer)
            ends.lose(pair.target)
            pair.pump_until(lambda pair=pair: pair.source.told_down(pair.target.peer), "T7: it is down")  # type: ignore[misc]


def _chunk(pair: Pair, sequence: int) -> Chunk:
    row = pair.rows((0, 0, 64))
    return Chunk(new_transfer_id(), sequence, pair.target.peer, row, row, row.nbytes)
