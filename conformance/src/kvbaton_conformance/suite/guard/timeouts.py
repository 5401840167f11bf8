"""T8: a chunk past its deadline."""

from __future__ import annotations

import pytest

from kvbaton.connector import IDLE, Outcome
from kvbaton.errors import QuarantineFull
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.guard.rig import CHUNK, D0, D1, Rig, RigTopic, chunk, faults


class Timeouts(RigTopic):
    """T8: said once, kept until quiet or fenced, bounded and counted."""

    @pytest.mark.clause("T8", "C6.1")
    def test_a_passed_deadline_is_said_once_and_proves_nothing(self) -> None:
        """Not before its time; then TIMED_OUT, once, with the memory in quarantine; the late end is heard."""
        rig = Rig(D0)
        posted = rig.post(length=100)
        rig.clock.advance(CHUNK - 0.1)
        require(rig.poll() is IDLE, "T8", "a chunk was given up before its deadline")
        rig.clock.advance(0.1)
        ends = [(end.outcome, end.source_quiet, end.target_quiet) for end in rig.poll().completions]
        require(
            ends == [(Outcome.TIMED_OUT, False, False)] and rig.poll() is IDLE, "T8",
            "a passed deadline is not said exactly once, or counts as quiet", seen=ends,
        )  # fmt: skip
        require(
            rig.figure("quarantined_bytes") == 100 and rig.guard.outstanding() == 1 and rig.guard.needs_polling, "T8",
            "a chunk past its deadline is not kept and counted", seen=rig,
        )  # fmt: skip
        rig.plugin.complete(posted)
        late = [(end.outcome, end.terminal) for end in rig.poll().completions]
        require(late == [(Outcome.DONE, True)] and rig.balanced(), "T8", "a late end is not heard", seen=late)

    @pytest.mark.clause("T8", "T6")
    def test_a_quarantined_chunk_keeps_its_share(self) -> None:
        """Otherwise a peer that never completes would be sent more and more."""
        rig = Rig(D0, inflight_bytes=100)
        rig.post(length=100)
        rig.clock.advance(CHUNK)
        rig.poll()
        require(not rig.guard.submit(chunk(length=100)), "T8", "a quarantined chunk gave its budget back", seen=rig)

    @pytest.mark.clause("T8", "C6.4")
    def test_a_fence_ends_the_quarantine(self) -> None:
        """The peer's process was proven dead: whatever the plugin has said its last word of is quiet."""
        rig = Rig(D0, D1)
        failed, other = rig.post(D0), rig.post(D1)
        for posted in (failed, other):
            rig.plugin.complete(posted, Outcome.FAILED, source=False, target=False)
        rig.poll()
        rig.guard.fenced(D0)
        ends = [(end.transfer, end.terminal) for end in rig.poll().completions]
        require(
            ends == [(failed.transfer, True)], "C6.4", "a fence does not end what was under way to that peer alone",
            expected=[(failed.transfer, True)], seen=ends,
        )  # fmt: skip
        require(rig.figure("quarantined_chunks") == 1, "T8", "another peer's chunk left the quarantine", seen=rig)

    @pytest.mark.clause("T8", "C6.4", "T13")
    def test_where_nothing_proves_quiet_a_fence_does_not_either(self) -> None:
        """quiet="never": only the end of this process does."""
        rig = Rig(D0, capabilities={"quiet": "never"})
        rig.plugin.complete(rig.post(), Outcome.FAILED, source=False, target=False)
        rig.poll()
        rig.guard.fenced(D0)
        require(
            rig.poll() is IDLE and rig.figure("quarantined_chunks") == 1, "T8",
            'memory left the quarantine although quiet="never" is declared', seen=rig,
        )  # fmt: skip

    @pytest.mark.clause("C6.4")
    def test_the_transports_fence_proves_the_source_only(self) -> None:
        """Down and quiet at the source: nothing here is read any more; what is written there it cannot know."""
        rig = Rig(D0)
        rig.plugin.complete(rig.post(), Outcome.FAILED, source=False, target=False)
        rig.poll()
        rig.plugin.down(D0, quiet=True)
        ends = [(end.source_quiet, end.target_quiet) for end in rig.poll().completions]
        require(ends == [(True, False)], "C6.4", "a fence in one direction was taken for both", seen=ends)

    @pytest.mark.clause("T8")
    def test_the_quarantine_is_bounded_and_said_once(self) -> None:
        """Beyond the limit nothing more is accepted, and the stage is told that it must not go on."""
        rig = Rig(D0, quarantine_bytes=150)
        for _ in range(2):
            rig.post(length=100)
        rig.clock.advance(CHUNK)
        told = [fault for fault in faults(rig.poll()) if isinstance(fault, QuarantineFull)]
        again = [fault for fault in faults(rig.poll()) if isinstance(fault, QuarantineFull)]
        require(
            len(told) == 1 and not again and rig.guard.quarantine_full, "T8",
            "a full quarantine is not said exactly once", seen=(told, again),
        )  # fmt: skip
        require(not rig.guard.submit(chunk(D0)), "T8", "with its quarantine full the guard accepts more", seen=rig)
