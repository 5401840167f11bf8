"""T5: one end for each chunk, and only news."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.connector import IDLE, Completion, Outcome, PeerEvent, Receipt
from kvbaton.errors import LocalProtocolError, PeerLost
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.guard.rig import CHUNK, D0, D1, Rig, RigTopic, chunk, faults, refused


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

    @pytest.mark.clause("T5", "T7", "C6.3")
    def test_a_malformed_event_takes_nothing_with_it(self) -> None:
        """What comes before, behind and beside it counts; it is a fault, and the chunk that it means is awaited."""
        rig = Rig(D0)
        before, meant, behind = (rig.post() for _ in range(3))
        rig.plugin.complete(before)
        rig.plugin.say(completions=[None, Completion([meant.transfer], 0, Outcome.DONE, True, True)])  # type: ignore[arg-type]
        rig.plugin.complete(behind)
        rig.plugin.receive(D0, before.transfer, 0)
        rig.plugin.say(receipts=[None, Receipt(D0, meant.transfer, None)], peers=[None, PeerEvent(D0, "no")])  # type: ignore[arg-type]
        rig.plugin.receive(D0, behind.transfer, 0)
        progress = rig.poll()
        good = [before.transfer, behind.transfer]
        ends, heard = [end.transfer for end in progress.completions], [one.transfer for one in progress.receipts]
        require(ends == good, "T5", "a malformed completion takes others with it, or ends its chunk", seen=ends)
        require(heard == good, "T7", "a malformed receipt takes others with it", seen=heard)
        require(not progress.peers, "T7", "a malformed event of a peer counts", seen=progress.peers)
        require(len(faults(progress)) == 1, "C6.3", "malformed events are not reported once", seen=faults(progress))
        require(rig.figure("dropped_malformed") == 6, "C6.3", "malformed events are not counted", seen=str(rig))
        rig.plugin.complete(meant)
        ends = [end.transfer for end in rig.poll().completions]
        require(ends == [meant.transfer] and rig.balanced(), "T5", "its chunk does not end any more", seen=ends)

    @pytest.mark.clause("T5", "C6.1", "T8")
    @pytest.mark.parametrize("quiet", ["no", 1, None], ids=["text", "number", "none"])
    def test_nothing_but_true_proves_quiet(self, quiet: Any) -> None:
        """A completion that says something else of a side proves nothing: its chunk is late at its deadline."""
        rig = Rig(D0)
        posted = rig.post()
        rig.plugin.say(completions=[
            Completion(posted.transfer, 0, Outcome.DONE, quiet, True),
            Completion(posted.transfer, 0, Outcome.DONE, True, quiet),
        ])  # fmt: skip
        ends = rig.poll().completions
        require(not ends, "T5", f"{quiet!r} was taken for a proof", seen=ends)
        rig.clock.advance(CHUNK)
        late = [(end.outcome, end.source_quiet, end.target_quiet) for end in rig.poll().completions]
        require(late == [(Outcome.TIMED_OUT, False, False)], "T8", "it is not late at its deadline", seen=late)

    @pytest.mark.clause("C6.3", "T12")
    def test_rubbish_for_ever_is_told_few_times(self) -> None:
        """At first and whenever there is twice as much of it: a broken plugin fills no log."""
        rig = Rig(D0)
        told = 0
        for _ in range(64):
            rig.plugin.say(completions=["rubbish"] * 50, receipts=[None] * 50)
            told += len(faults(rig.poll()))
        require(1 <= told <= 8, "T12", "malformed events are told again and again", expected="1 to 8 faults", seen=told)

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
