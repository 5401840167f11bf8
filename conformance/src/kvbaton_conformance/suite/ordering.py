"""T4: in which order things happen, and that it does not matter."""

from __future__ import annotations

import random

import pytest

from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import PACES, Pair
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.traffic import Planned, Traffic


class Ordering(ConnectorTopic):
    """T4: no order among chunks; polling slowly, in reverse, or not for a while changes when, never what."""

    @pytest.mark.clause("T4", "T3", "C7.3")
    @pytest.mark.parametrize("pace", sorted(PACES))
    def test_everything_arrives_at_any_pace(self, ends: Ends, draw: random.Random, pace: str) -> None:
        """24 chunks of 4 transfers while the ends are polled evenly, in reverse, seldom, or not at all for a while.

        Troubleshooting:
        - it hangs while one end is slow: something waits for a poll of that end inside of a poll of the other;
        - chunks get lost: a queue of the transport overflowed while nobody collected from it.
        """
        pair = ends.pair(pace=PACES[pace])
        Traffic(pair, draw, transfers=4, chunks=6).run(f"T4: 24 chunks have arrived at pace {pace}")

    @pytest.mark.clause("T4", "C7.3")
    @pytest.mark.parametrize("order", ["backwards", "shuffled"])
    def test_chunks_are_submitted_in_any_order(self, pair: Pair, draw: random.Random, order: str) -> None:
        """Sequences backwards, and chunks of several transfers mixed.

        Troubleshooting:
        - the first to be submitted is expected to be sequence 0, or the last to be the highest.
        """

        def arrange(planned: list[Planned]) -> list[Planned]:
            return planned[::-1] if order == "backwards" else draw.sample(planned, len(planned))

        Traffic(pair, draw, transfers=3, chunks=8, order=arrange).run(f"T4: 24 chunks, {order}, have arrived")

    @pytest.mark.clause("T4", "T5")
    def test_a_target_that_was_not_polled_catches_up(self, pair: Pair, draw: random.Random) -> None:
        """The target is not polled until the source has nothing more to do.

        Troubleshooting:
        - receipts are missing afterwards: they were signalled by a counter or a flag that the next one overwrote.
        """
        pair.clog(pair.target)
        traffic = Traffic(pair, draw, transfers=4, chunks=10, segments=2)
        traffic.submit()
        pair.pump_idle(40)
        received = len(pair.target.receipts)
        require(not received, "T4", "an end that is not polled got receipts", expected=0, seen=received)
        pair.unclog()
        pair.pump_until(lambda: traffic.arrived, "T4: 40 chunks have arrived after the target began to poll")
        pair.target.memory.check(traffic.expected(), "T3")

    @pytest.mark.clause("T4", "T5")
    def test_a_source_that_was_not_polled_catches_up(self, pair: Pair, draw: random.Random) -> None:
        """The source is not polled after its submits until the target has nothing more to do.

        Troubleshooting:
        - completions are missing afterwards: the transport dropped what nobody collected.
        """
        traffic = Traffic(pair, draw, transfers=4, chunks=10, segments=2)
        traffic.submit()
        pair.clog(pair.source)
        pair.pump_idle(40)
        pair.unclog()
        pair.pump_until(lambda: traffic.arrived, "T4: 40 chunks have arrived after the source was polled again")
        pair.target.memory.check(traffic.expected(), "T3")
        traffic.check_once()
