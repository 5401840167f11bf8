"""T5: one end for each chunk, and only news."""

from __future__ import annotations

import pytest

from kvbaton.connector import IDLE, Outcome
from kvbaton.errors import LocalProtocolError, PeerLost
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.guard.rig import CHUNK, D0, D1, Rig, RigTopic, chunk, refused


class Completions(RigTopic):
    """T5: each accepted chunk ends terminal exactly once, after strictly growing proof."""

    @pytest.mark.clause("T5")
    def test_repeats_are_dropped(self) -> None:
        """The plugin completes one chunk three times."""
        rig = Rig(D0)
        posted = rig.post()
        for _ in range(3):
            rig.plugin.complete(posted)
        ends = rig.poll().completions
        require(
            len(ends) == 1 and rig.poll() is IDLE and rig.balanced(), "T5", "a chunk ended more than once", seen=ends
        )

    @pytest.mark.clause("T5")
    def test_a_chunk_under_way_cannot_be_submitted_again(self) -> None:
        """Nor one to a peer that was never connected."""
        rig = Rig(D0)
        posted = rig.post()
        refused(lambda: rig.guard.submit(posted), LocalProtocolError, "T5", "a chunk was accepted twice")
        refused(lambda: rig.guard.submit(chunk(D1)), LocalProtocolError, "T2", "a chunk to nobody was accepted")

    @pytest.mark.clause("T7")
    def test_for_a_peer_that_is_down_a_chunk_fails_at_once(self) -> None:
        """Failed, terminal, and never given to the plugin."""
        rig = Rig(D0)
        rig.plugin.down(D0, error=PeerLost("gone"))
        rig.poll()
        rig.post()
        ends = [(end.outcome, end.terminal) for end in rig.poll().completions]
        require(
            ends == [(Outcome.FAILED, True)] and not rig.plugin.called("submit"), "T7",
            "a chunk for a peer that is down does not fail at once", seen=ends,
        )  # fmt: skip

    @pytest.mark.clause("T5", "T8", "C6.1")
    def test_an_exception_while_posting_proves_nothing(self) -> None:
        """It is a failure of the chunk, whose memory stays owned until more is known."""
        rig = Rig(D0)
        rig.plugin.raises["submit"] = OSError("card fell off")
        posted = rig.post(length=100)
        (end,) = rig.poll().completions
        require(
            (end.outcome, end.source_quiet, end.target_quiet) == (Outcome.FAILED, False, False)
            and "card fell off" in str(end.error) and rig.figure("quarantined_bytes") == 100, "C6.1",
            "a submit that raised counts as proof of quiet", seen=end,
        )  # fmt: skip
        rig.plugin.complete(posted, Outcome.FAILED)
        ends = rig.poll().completions
        require(len(ends) == 1 and ends[0].terminal and rig.balanced(), "T5", "the late proof was not used", seen=ends)

    @pytest.mark.clause("T5", "T6")
    def test_a_buffering_transport_is_proven_by_the_acknowledgement(self) -> None:
        """DONE with the target unproven: the budget is back at once, the proof comes with the acknowledgement."""
        rig = Rig(D0, inflight_bytes=100)
        posted = rig.post(length=100)
        rig.plugin.complete(posted, Outcome.DONE, source=True, target=False)
        ends = [(end.outcome, end.terminal) for end in rig.poll().completions]
        require(ends == [(Outcome.DONE, False)], "T5", "an unproven completion was not passed on as it is", seen=ends)
        require(not rig.figure("inflight_bytes"), "T6", "an unproven chunk keeps its budget", seen=rig)
        rig.post(length=100)
        rig.guard.acknowledge(posted.transfer)
        ends = [(end.outcome, end.terminal) for end in rig.poll().completions]
        require(ends == [(Outcome.DONE, True)], "T5", "the acknowledgement does not prove the target quiet", seen=ends)

    @pytest.mark.clause("T5")
    def test_what_proves_nothing_new_is_not_said_again(self) -> None:
        """After the deadline the plugin reports a completion that proves neither side quiet: no news."""
        rig = Rig(D0)
        late = rig.post()
        rig.clock.advance(CHUNK)
        rig.poll()
        rig.plugin.complete(late, Outcome.DONE, source=False, target=False)
        require(rig.poll() is IDLE, "T5", "the same was said twice")
        rig.guard.fenced(D0)
        ends = [end.terminal for end in rig.poll().completions]
        require(ends == [True], "T5", "the fence does not end it", seen=ends)

    @pytest.mark.clause("T5", "T13")
    def test_timed_out_is_not_a_plugins_word(self) -> None:
        """It is core's own; from a plugin it proves nothing."""
        rig = Rig(D0)
        rig.plugin.complete(rig.post(), Outcome.TIMED_OUT)
        (end,) = rig.poll().completions
        require(
            (end.outcome, end.source_quiet, end.target_quiet) == (Outcome.FAILED, False, False), "T5",
            "a plugin's TIMED_OUT was taken for a proof", seen=end,
        )  # fmt: skip

    @pytest.mark.clause("T9")
    def test_cancel_reaches_the_plugin_only_for_what_is_posted(self) -> None:
        """Unknown transfers do not; what it cancels ends as CANCELLED."""
        rig = Rig(D0)
        posted = rig.post()
        rig.guard.cancel(chunk().transfer)
        rig.guard.cancel(posted.transfer)
        require(rig.plugin.called("cancel") == [posted.transfer], "T9", "cancel() of an unknown transfer was passed on")
        rig.plugin.complete(posted, Outcome.CANCELLED)
        ends = [end.outcome for end in rig.poll().completions]
        require(ends == [Outcome.CANCELLED] and rig.balanced(), "T9", "a cancelled chunk does not end", seen=ends)
