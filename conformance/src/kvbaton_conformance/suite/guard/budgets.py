"""T6: how much may be under way."""

from __future__ import annotations

import pytest

from kvbaton.connector import Outcome
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.guard.rig import D0, D1, Rig, RigTopic, chunk, endpoint


class Budgets(RigTopic):
    """T6: submit accepts or says that it is full; the budget returns in full; peers do not stall each other."""

    @pytest.mark.clause("T6")
    def test_the_byte_budget_is_kept_and_returns_in_full(self) -> None:
        """1000 bytes, taken, refused, given back by a success and by a failure."""
        rig = Rig(D0, inflight_bytes=1000)
        first, second = rig.post(length=600), rig.post(length=400)
        require(not rig.guard.submit(chunk(length=1)), "T6", "more than the budget was accepted", seen=rig)
        rig.plugin.complete(first)
        rig.poll()
        require(not rig.guard.submit(chunk(length=601)), "T6", "more than the budget was accepted", seen=rig)
        rig.plugin.complete(rig.post(length=600))
        rig.plugin.complete(second, Outcome.FAILED)
        rig.poll()
        require(rig.balanced(), "T6", "the budget did not return in full", seen=rig)

    @pytest.mark.clause("T6")
    def test_segments_and_chunks_have_budgets_too(self) -> None:
        """Three segments at once; two chunks per peer that have not completed."""
        rig = Rig(D0, inflight_segments=3)
        rig.post(source=Segments.of([(0, 0, 1), (0, 2, 1)]))
        over = chunk(source=Segments.of([(0, 4, 1), (0, 6, 1)]))
        require(not rig.guard.submit(over), "T6", "more segments than the budget were accepted", seen=rig)
        rig.post(source=Segments.of([(0, 4, 1)]))
        rig = Rig(D0, D1, unreceipted_chunks=2)
        rig.post(D0)
        rig.post(D0)
        require(not rig.guard.submit(chunk(D0)), "T6", "chunks to one peer pile up without bound", seen=rig)
        rig.post(D1)

    @pytest.mark.clause("T6")
    def test_no_chunk_is_too_large_for_ever(self) -> None:
        """One that is larger than the budget goes alone."""
        rig = Rig(D0, inflight_bytes=100)
        big = rig.post(length=5000)
        require(not rig.guard.submit(chunk(length=1)), "T6", "beside a chunk that fills the budget another went")
        rig.plugin.complete(big)
        rig.poll()
        require(rig.balanced(), "T6", "the budget did not return in full", seen=rig)

    @pytest.mark.clause("T6")
    def test_one_frozen_peer_does_not_stall_another(self) -> None:
        """D0 completes nothing and holds its share, no more; chunks go to D1 meanwhile, also if D1 came late."""
        rig = Rig(D0, D1, inflight_bytes=1000)
        while rig.guard.submit(chunk(D0, length=100)):
            pass
        share = rig.figure("inflight_bytes")
        require(share == 500, "T6", "a peer has taken more than its share of the budget", expected=500, seen=share)
        several = [rig.post(D1, length=100) for _ in range(5)]
        require(len(several) == 5, "T6", "another peer cannot use its own share", seen=rig)
        rig = Rig(D0, inflight_bytes=1000)
        while rig.guard.submit(chunk(D0, length=100)):
            pass
        rig.guard.connect(endpoint(D1))
        rig.plugin.up(D1)
        rig.poll()
        for _ in range(100):
            rig.plugin.complete(rig.post(D1, length=400))
            rig.poll()

    @pytest.mark.clause("T6")
    def test_where_the_transports_queue_is_full_peers_take_turns(self) -> None:
        """D0 has three chunks in a queue that is full; D1 waits: the next place is D1's."""
        rig = Rig(D0, D1)
        for _ in range(3):
            rig.post(D0)
        rig.plugin.full = True
        require(not rig.guard.submit(chunk(D1)), "T6", "a chunk that the transport refused counts as accepted")
        rig.plugin.complete(rig.plugin.posted[0])
        rig.plugin.full = False
        rig.poll()
        require(not rig.guard.submit(chunk(D0)), "T6", "who has most in the queue was served before who waits")
        rig.post(D1)
        rig.post(D0)

    @pytest.mark.clause("T6", "T2")
    def test_before_a_peer_is_up_its_chunks_wait(self) -> None:
        """Full, not failed."""
        rig = Rig()
        rig.guard.connect(endpoint(D0))
        waiting = chunk(D0)
        require(not rig.guard.submit(waiting), "T6", "a chunk was accepted for a peer that is not up")
        rig.plugin.up(D0)
        rig.poll()
        require(rig.guard.submit(waiting), "T6", "a chunk that waited for its peer is not accepted")
