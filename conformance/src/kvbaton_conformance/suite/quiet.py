"""T5, C6.1: that what a completion says is quiet is quiet, looked at while the other end lags behind."""

from __future__ import annotations

import pytest

from kvbaton.connector import Chunk, Completion
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import Pair, Sent
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.two_process import RemoteEnd

_COUNT = 20


def nothing_proves_quiet(subject: Subject) -> str:
    """Why nothing that was under way becomes terminal, where that is declared."""
    return "quiet is declared never" if subject.capabilities.quiet == "never" else ""


class Quiet(ConnectorTopic):
    """T5: *terminal* is about the bytes.  While the target does not poll, a chunk that is said to be over really is."""

    @pytest.mark.clause("T5", "C6.1", "C5.2")
    @pytest.mark.parametrize("end", ["by-itself", "cancelled", "disconnected"])
    def test_what_is_terminal_while_the_target_lags_is_written_no_more(self, pair: Pair, end: str) -> None:
        """20 chunks for a target that does not poll.  Of those that are said to be over by then, the target's memory is
        used for something else at once, and stays as it is when the target polls again.

        Troubleshooting:
        - bytes arrive: DONE or CANCELLED, with ``target_quiet``, is said when the bytes have left; they are still to be
          written. Wait for the target's answer, or say that the target is not quiet.
        """
        source, target = pair.source, pair.target
        sent = _under_way(pair)
        if end == "cancelled":
            source.guard.cancel(sent[0].chunk.transfer)
        if end == "disconnected":
            source.guard.disconnect(target.peer)
        for _ in range(20):
            pair.pump()
        over = [one for one in sent if one.over]
        target.memory.poison()
        after = target.memory.image()
        pair.unclog()
        pair.pump_idle(60)
        for one in over:
            row = one.chunk.target
            require(
                target.memory.read(row) == b"".join(
                    after.regions[id][at : at + length] for id, at, length in row.triples()
                ),
                "T5", f"bytes of chunk {one.chunk.sequence} were written after its target was said to be quiet",
                expected="what was put there since", seen=_said(one.completions),
                look="what a completion with target_quiet waits for",
            )  # fmt: skip

    @pytest.mark.clause("T7", "T5")
    @pytest.mark.absent_where(reason=nothing_proves_quiet)
    def test_what_is_under_way_to_a_peer_that_goes_away_ends(self, ends: Ends) -> None:
        """20 chunks that have left and that the target has not looked at; it goes away, and is proven dead.

        Troubleshooting:
        - some never end: what waits for the peer's answer is forgotten with the connection.
        """
        pair = ends.pair()
        sent = _under_way(pair)
        ends.lose(pair.target)
        pair.pump_until(lambda: pair.source.told_down(pair.target.peer), "T7: a peer that is gone is down")
        pair.source.guard.fenced(pair.target.peer)
        pair.pump_until(lambda: all(one.over for one in sent), "T7: what was under way to it ends")

    @pytest.mark.clause("C6.4", "T7", "T13")
    @pytest.mark.mode("two-processes")
    def test_what_a_dead_source_has_sent_is_written_before_quiet_or_never(self, ends: Ends) -> None:
        """20 chunks have left; the source is killed; only then does the target look.  Once it hears *quiet*, its memory
        is used for something else.

        Troubleshooting:
        - bytes arrive after quiet: what came together with the end of the stream was put aside.
        """
        pair = ends.pair()
        _under_way(pair)
        assert isinstance(pair.source, RemoteEnd)
        pair.source.kill()
        pair.unclog()
        a_joined_source_becomes_quiet(pair)


def a_joined_source_becomes_quiet(pair: Pair) -> None:
    """The source was killed and joined: the target hears of it, fences it, hears *quiet*, and its memory is its own.

    Where ``quiet="never"`` is declared it must not hear that, or more is kept than is declared.
    """
    source, target = pair.source.peer, pair.target
    pair.pump_until(lambda: target.told_down(source), "T7: a killed source is down at the target")
    target.guard.fenced(source)
    target.guard.disconnect(source)
    if target.guard.capabilities.quiet == "never":
        pair.pump_idle(60)
        require(
            not target.told_quiet(source), "T13", "a dead peer is said to be quiet, and quiet=never is declared",
            expected="down, not quiet", seen=target.story(), look="the capability quiet, or what says quiet",
        )  # fmt: skip
        return
    pair.pump_until(lambda: target.told_quiet(source), "C6.4: a joined peer becomes quiet")
    target.memory.poison()
    before = target.memory.image()
    pair.pump_idle(60)
    target.memory.untouched(before, "C6.4")


def _under_way(pair: Pair) -> list[Sent]:
    """Chunks that the source has had time to send, to a target that does not poll.

    Nothing is expected of their receipts: what is looked at is what becomes of the target's memory afterwards.
    """
    source, target = pair.source, pair.target
    pair.clog(target)
    rows = [pair.rows((0, 512 * number, 512)) for number in range(_COUNT)]
    transfer = pair.grant(rows[0].concat(*rows[1:]))
    before = target.memory.image()
    sent = []
    for number, row in enumerate(rows):
        chunk = Chunk(transfer, number, target.peer, row, row, row.nbytes)
        sent.append(Sent(chunk, source.guard.submit(chunk), before, source, target))
    for _ in range(20):
        pair.pump()
    return [one for one in sent if one.accepted]


def _said(completions: list[Completion]) -> list[str]:
    return [f"{one.outcome.name}, target_quiet={one.target_quiet}" for one in completions]
