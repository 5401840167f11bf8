"""T6: a full queue, and a peer that does not progress."""

from __future__ import annotations

import time

import pytest

from kvbaton.connector import Chunk
from kvbaton.guard import GuardLimits
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import End, Pair, Sent
from kvbaton_conformance.suite.quiet import nothing_proves_quiet
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.two_process import RemoteEnd

#: Seconds that one submit may take however full everything is.  Copying 4 KiB takes microseconds.
_SUBMIT = 1.0
_PIECE = 4096


class BackPressure(ConnectorTopic):
    """T6: ``submit()`` never waits and never drops; budgets come back in full; one frozen peer stalls nobody else."""

    @pytest.mark.clause("T6")
    def test_a_clogged_target_is_said_to_be_full_and_loses_nothing(self, pair: Pair) -> None:
        """400 chunks for a target that accepts and does not poll; then it polls.

        Troubleshooting:
        - submit() hangs: it writes to a socket or a ring that is full, blocking;
        - chunks are missing at the end: what did not fit was dropped instead of refused.
        """
        pair.clog(pair.target)
        sent = _flood(pair, 400)
        refused = [one for one in sent if not one.accepted]
        pair.unclog()
        _offer_until_taken(pair, refused)
        pair.pump_until(lambda: all(one.received and one.done for one in sent), "T6: all 400 chunks arrive in the end")
        _budget_is_back(pair.source)

    @pytest.mark.clause("T6")
    def test_a_budget_that_is_used_up_comes_back_in_full(self, ends: Ends) -> None:
        """A budget of four chunks: further ones are refused, and four fit again, ten times over.

        Troubleshooting:
        - fewer fit each time: a completion is lost, or comes for another chunk.
        """
        limits = GuardLimits(inflight_bytes=4 * _PIECE, unreceipted_chunks=4)
        pair = ends.pair(limits=limits, regions={0: 1 << 20, 1: 1 << 14})
        for turn in range(10):
            sent = _flood(pair, 6)
            accepted = [one for one in sent if one.accepted]
            require(
                len(accepted) == 4, "T6", f"in round {turn} the budget of four chunks took {len(accepted)}",
                expected=4, seen=len(accepted), look="completions that have not been reported",
            )  # fmt: skip
            pair.pump_until(
                lambda accepted=accepted: all(one.received and one.done for one in accepted),  # type: ignore[misc]
                "T6: what was accepted arrives",
            )
            pair.target.memory.poison()
        _budget_is_back(pair.source)

    @pytest.mark.clause("T6")
    def test_a_clogged_peer_does_not_stall_another(self, ends: Ends) -> None:
        """One source, two targets, of which the first does not poll: the second gets all of its chunks.

        Troubleshooting:
        - the second gets nothing: one queue for all peers, and its head cannot move.
        """
        pair = ends.pair()
        other = Pair(pair.source, ends.end("decode-1"))
        other.connect()
        pair.clog(pair.target)
        stuck = _flood(pair, 300)
        _serves(other, 30)
        pair.unclog()
        _offer_until_taken(pair, [one for one in stuck if not one.accepted])
        pair.pump_until(lambda: all(one.received and one.done for one in stuck), "T6: then the first gets its chunks")
        _budget_is_back(pair.source)

    @pytest.mark.clause("T6", "T7")
    @pytest.mark.mode("two-processes")
    def test_a_hung_process_does_not_stall_another(self, ends: Ends) -> None:
        """The same with a target whose whole process is stopped, and goes on later.

        Troubleshooting:
        - submit() or poll() blocks: something waits for a lock or an answer of the stopped process.
        """
        pair = ends.pair()
        other = Pair(pair.source, ends.end("decode-1"))
        other.connect()
        assert isinstance(pair.target, RemoteEnd)
        sent = _flood(pair, 40, submit=False)
        pair.target.hang()
        _submit(pair, sent)
        _serves(other, 30)
        pair.target.resume()
        _offer_until_taken(pair, [one for one in sent if not one.accepted])
        pair.pump_until(
            lambda: all(one.received and one.done for one in sent), "T6: the hung one gets its chunks later"
        )
        _budget_is_back(pair.source)

    @pytest.mark.clause("T6", "T7")
    @pytest.mark.absent_where(reason=nothing_proves_quiet)
    def test_the_budget_comes_back_from_chunks_that_fail(self, ends: Ends) -> None:
        """A target goes away with chunks under way; another one then has the whole budget.

        Troubleshooting:
        - the budget stays used: a failed chunk gets no completion, or one that is not quiet although its peer is
          proven dead (``fenced``).
        """
        limits = GuardLimits(inflight_bytes=8 * _PIECE)
        pair = ends.pair(limits=limits, regions={0: 1 << 20, 1: 1 << 14})
        pair.clog(pair.target)
        sent = [one for one in _flood(pair, 8) if one.accepted]
        ends.lose(pair.target)
        pair.pump_until(lambda: pair.source.told_down(pair.target.peer), "T7: a peer that is gone is down")
        pair.source.guard.fenced(pair.target.peer)
        pair.pump_until(lambda: all(one.over for one in sent), "T7: its chunks end once it is proven dead")
        _budget_is_back(pair.source)
        other = Pair(pair.source, ends.end("decode-1", limits=limits, regions={0: 1 << 20, 1: 1 << 14}))
        other.connect()
        _serves(other, 16)


def _flood(pair: Pair, count: int, *, submit: bool = True) -> list[Sent]:
    """``count`` chunks of one transfer, each of :data:`_PIECE` bytes of its own or, where there are many, of 128."""
    length = _PIECE // pair.grain if count <= 8 else 128
    rows = [(0, length * number, length) for number in range(count)]
    transfer = pair.grant(pair.rows(*rows))
    data = pair.source.memory.read(pair.rows(rows[0]))
    before = pair.target.memory.image()
    sent = []
    for number, row in enumerate(rows):
        reads, writes = pair.rows(rows[0]), pair.rows(row)
        chunk = Chunk(transfer, number, pair.target.peer, reads, writes, reads.nbytes)
        pair.target.expect(transfer, number, writes, data)
        sent.append(Sent(chunk, False, before, pair.source, pair.target))
    if submit:
        _submit(pair, sent)
    return sent


def _submit(pair: Pair, sent: list[Sent]) -> None:
    for one in sent:
        start = time.monotonic()
        one.accepted = pair.source.guard.submit(one.chunk)
        took = time.monotonic() - start
        require(
            took < _SUBMIT, "T6", f"submit() of chunk {one.chunk.sequence} took {took:.1f} s", expected="no waiting",
            seen=f"{took:.1f} s", look="what submit() writes to or locks",
        )  # fmt: skip


def _offer_until_taken(pair: Pair, refused: list[Sent]) -> None:
    waiting = list(refused)

    def offer() -> bool:
        while waiting:
            waiting[0].accepted = pair.source.guard.submit(waiting[0].chunk)
            if not waiting[0].accepted:
                return False
            waiting.pop(0)
        return True

    pair.pump_until(offer, "T6: what was refused is taken later")


def _serves(pair: Pair, count: int) -> None:
    """Chunks one after the other, each within the usual bound."""
    for number in range(count):
        sent = pair.send(pair.rows((0, 128 * number, 128)), pair.rows((0, 128 * number, 128)))
        require(sent.accepted, "T6", "a peer with nothing under way was said to be full", seen=f"chunk {number}")
        pair.pump_until(lambda sent=sent: sent.received and sent.done, "T6: a chunk to the other peer arrives")  # type: ignore[misc]
        pair.finish(sent.chunk.transfer)


def _budget_is_back(end: End) -> None:
    figures = end.guard.statistics()
    held = {name: figures[name] for name in ("inflight_bytes", "inflight_segments", "inflight_chunks") if figures[name]}
    require(not held, "T6", "a budget has not come back in full", expected="nothing under way", seen=held,
            look="chunks without a terminal completion")  # fmt: skip
