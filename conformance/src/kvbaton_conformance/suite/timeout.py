"""T8: a chunk past its deadline."""

from __future__ import annotations

import pytest

from kvbaton.connector import Outcome
from kvbaton.errors import Outstanding
from kvbaton.guard import GuardLimits
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import Pair, Sent
from kvbaton_conformance.suite.quiet import nothing_proves_quiet
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.two_process import RemoteEnd

_DEADLINE = 5.0
_COUNT = 12


class Timeout(ConnectorTopic):
    """T8: a late chunk is reported once and stays owned until it is quiet or its peer is fenced.

    Time passes by the test's clock.  A transport that does not need its peer may have every chunk done before: then
    nothing is late, and that is right too.
    """

    @pytest.mark.clause("T8", "C6.1")
    def test_what_is_late_is_reported_once_and_ends_later(self, ends: Ends) -> None:
        """The target does not poll until after the deadline.

        Troubleshooting:
        - no end after the deadline: the transport cancels or forgets its handle by its own timer;
        - two ends: a timer of the transport's reports what also completes.
        """
        pair = ends.pair(manual_clock=True, chunk_deadline=_DEADLINE)
        pair.clog(pair.target)
        sent = _send(pair)
        _let_pass(pair, sent)
        late = [one for one in sent if not one.over]
        figures = pair.source.guard.statistics()
        owed = sum(one.chunk.nbytes for one in late if _timed_out(one))
        require(
            figures["quarantined_bytes"] == owed, "T8", "what is late and not quiet is not what is quarantined",
            expected=owed, seen=figures["quarantined_bytes"],
        )  # fmt: skip
        pair.unclog()
        pair.pump_until(lambda: all(one.over for one in sent), "T8: late chunks end when the target polls again")
        for one in sent:
            count = _timed_out(one)
            require(count <= 1, "T8", "a chunk was reported late more than once", expected=1, seen=count)
        require(
            pair.source.guard.statistics()["quarantined_bytes"] == 0, "T8", "memory stays in quarantine though quiet"
        )

    @pytest.mark.clause("T8", "C5.4", "T10")
    def test_close_refuses_while_a_late_chunk_may_still_be_read(self, ends: Ends) -> None:
        """After the deadline, before the end."""
        pair = ends.pair(manual_clock=True, chunk_deadline=_DEADLINE)
        pair.clog(pair.target)
        sent = _send(pair)
        _let_pass(pair, sent)
        late = [one for one in sent if not any(completion.source_quiet for completion in one.completions)]
        if late:
            try:
                pair.source.guard.close()
            except Outstanding:
                pass
            else:
                require(False, "T10", "close() went through with chunks that may still be read", seen=len(late))
        pair.unclog()
        pair.pump_until(lambda: all(one.over for one in sent), "T8: late chunks end when the target polls again")

    @pytest.mark.clause("T8", "C6.4")
    @pytest.mark.absent_where(reason=nothing_proves_quiet)
    @pytest.mark.mode("two-processes")
    def test_a_fence_ends_what_a_hung_peer_holds(self, ends: Ends) -> None:
        """The target hangs past the deadline, is killed and joined: every chunk becomes terminal.

        Troubleshooting:
        - never terminal: ``fenced(peer)`` must complete everything towards the dead peer as FAILED and quiet.
        """
        pair = ends.pair(manual_clock=True, chunk_deadline=_DEADLINE)
        assert isinstance(pair.target, RemoteEnd)
        pair.target.hang()
        sent = _send_to_the_hung(pair)
        _let_pass(pair, sent)
        pair.target.hung = False
        pair.target.kill()
        pair.source.guard.fenced(pair.target.peer)
        pair.pump_until(lambda: all(one.over for one in sent), "C6.4: chunks towards a joined process are terminal")
        require(
            pair.source.guard.statistics()["quarantined_bytes"] == 0, "T8", "memory stays in quarantine after a fence"
        )

    @pytest.mark.clause("T8")
    def test_late_memory_is_bounded(self, ends: Ends) -> None:
        """More is late than the limit allows: the stage is told to stop, and nothing more is accepted."""
        limits = GuardLimits(quarantine_bytes=256)
        pair = ends.pair(manual_clock=True, chunk_deadline=_DEADLINE, limits=limits)
        pair.clog(pair.target)
        pair.source.faults_expected = True
        sent = _send(pair)
        _let_pass(pair, sent)
        pair.source.pump()
        held = pair.source.guard.statistics()["quarantined_bytes"]
        if held > limits.quarantine_bytes:
            said = any("T8" in str(fault) for fault in pair.source.faults)
            require(said, "T8", "the quarantine is over its bound and nobody is told", seen=f"{held} bytes")
            more = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 0, 64)))
            require(not more.accepted, "T8", "a chunk was accepted with the quarantine over its bound")
        pair.unclog()
        pair.pump_until(lambda: all(one.over for one in sent), "T8: late chunks end when the target polls again")


def _send(pair: Pair) -> list[Sent]:
    rows = [pair.rows((0, 128 * number, 128)) for number in range(_COUNT)]
    transfer = pair.grant(rows[0].concat(*rows[1:]))
    return [pair.send(row, row, transfer=transfer, sequence=number) for number, row in enumerate(rows)]


def _send_to_the_hung(pair: Pair) -> list[Sent]:
    """Nothing can be granted there any more, nor looked at."""
    from kvbaton.connector import Chunk
    from kvbaton.identity import new_transfer_id
    from kvbaton_conformance.inspector import Image

    transfer = new_transfer_id()
    sent = []
    for number in range(_COUNT):
        row = pair.rows((0, 128 * number, 128))
        chunk = Chunk(transfer, number, pair.target.peer, row, row, row.nbytes)
        sent.append(Sent(chunk, pair.source.guard.submit(chunk), Image({}), pair.source, pair.target))
    return [one for one in sent if one.accepted]


def _let_pass(pair: Pair, sent: list[Sent]) -> None:
    """The deadline, with polls before and after; then nothing is left that nobody was told about."""
    for _ in range(5):
        pair.source.pump()
    pair.source.advance(_DEADLINE + 1)
    pair.source.pump()
    for one in sent:
        require(
            bool(one.completions), "T8", "a chunk passed its deadline and nobody was told",
            expected="TIMED_OUT, or its end", seen="nothing",
        )  # fmt: skip
        first = one.completions[0].outcome
        require(
            first in (Outcome.DONE, Outcome.FAILED, Outcome.TIMED_OUT), "T8", "a late chunk ended otherwise", seen=first
        )


def _timed_out(one: Sent) -> int:
    return sum(completion.outcome is Outcome.TIMED_OUT for completion in one.completions)
