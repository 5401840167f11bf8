"""T6, T12, C6.4: what several peers share, and what is left of peers that have gone."""

from __future__ import annotations

import pytest

from kvbaton.connector import Outcome
from kvbaton.identity import PeerId
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.guard.rig import D0, D1, Rig, RigTopic, chunk, endpoint


class Sharing(RigTopic):
    """T6, T12: peers share one budget, and past epochs cost nothing."""

    @pytest.mark.clause("T6")
    def test_two_peers_have_no_more_than_the_budget_together(self) -> None:
        """Both are offered as much as they take."""
        rig = Rig(D0, D1, inflight_bytes=1000)
        for _ in range(40):
            for peer in (D0, D1):
                rig.guard.submit(chunk(peer, length=100))
        together = rig.figure("inflight_bytes")
        require(together <= 1000, "T6", "two peers have more under way than the budget", expected=1000, seen=together)
        require(together >= 800, "T6", "two peers do not use the budget", expected="nearly 1000", seen=together)

    @pytest.mark.clause("T12", "C1.4")
    def test_epochs_that_have_gone_are_forgotten(self) -> None:
        """A peer starts anew fifty times; each time the start before is down and quiet."""
        rig = Rig()
        for epoch in range(1, 51):
            peer = PeerId("decode-0", epoch)
            rig.guard.connect(endpoint(peer))
            rig.plugin.up(peer)
            rig.poll()
            rig.plugin.complete(rig.post(peer))
            rig.poll()
            rig.guard.disconnect(peer)
            rig.plugin.down(peer, quiet=True)
            rig.poll()
        known = rig.guard.peer_states()
        require(len(known) <= 2, "T12", "starts of a peer that have ended are kept", expected="the last one",
                seen=f"{len(known)} of 50")  # fmt: skip

    @pytest.mark.clause("C6.4", "T8")
    def test_a_completion_that_comes_after_the_fence_is_terminal(self) -> None:
        """The plugin has ended a chunk without proof, and reports it when its peer was fenced already."""
        rig = Rig(D0)
        posted = rig.post()
        rig.guard.fenced(D0)
        rig.plugin.complete(posted, Outcome.FAILED, source=True, target=False)
        completions = rig.poll().completions
        require(
            len(completions) == 1 and completions[0].terminal and rig.balanced(), "C6.4",
            "a chunk towards a peer that is proven dead stays in quarantine", expected="FAILED, terminal",
            seen=f"{[str(one) for one in completions]}, {rig}",
        )  # fmt: skip
