"""T12: nothing grows with the number of finished transfers."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.connector import IDLE
from kvbaton_conformance.clauses import require
from kvbaton_conformance.growth import Growth
from kvbaton_conformance.harness import LocalEnd, Pair
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends

_WARM, _ROUNDS = 60, 200


class Cost(ConnectorTopic):
    """T12: what a transfer has needed is gone when it is over, however it ended."""

    @pytest.mark.clause("T12")
    def test_nothing_grows_with_finished_transfers(self, pair: Pair) -> None:
        """200 transfers, one after the other, each acknowledged and forgotten.

        Troubleshooting:
        - the line that is named keeps something per transfer: grants, handles, receipts that were seen. Drop it in
          acknowledge() at the source, in revoke() at the target, when the last completion was reported.
        """

        def one_round() -> None:
            row = pair.rows((0, 0, 256))
            sent = pair.send(row, row, base=pair.target.memory.image())
            pair.pump_until(lambda: sent.received and sent.done, "T12: one of many chunks arrives")
            pair.finish(sent.chunk.transfer)

        _does_not_grow(pair, one_round, "finished transfers")

    @pytest.mark.clause("T12", "T9")
    def test_nothing_grows_with_cancelled_transfers(self, pair: Pair) -> None:
        """200 transfers that are cancelled as soon as they are submitted."""

        def one_round() -> None:
            row = pair.rows((0, 0, 256))
            sent = pair.send(row, row, base=pair.target.memory.image())
            pair.source.guard.cancel(sent.chunk.transfer)
            pair.pump_until(lambda: sent.over or sent.received, "T12: one of many cancelled chunks ends")
            pair.pump_until(
                lambda: any(completion.source_quiet for completion in sent.completions), "T12: and is quiet"
            )
            pair.finish(sent.chunk.transfer)

        _does_not_grow(pair, one_round, "cancelled transfers")

    @pytest.mark.clause("T12", "T10")
    def test_nothing_grows_with_peers_that_come_and_go(self, ends: Ends) -> None:
        """Peers that connect and disconnect leave no thread, descriptor or memory at the one that stays.

        Troubleshooting:
        - one descriptor per peer: the socket or mapping of a peer that is down is not closed.
        """
        stays = ends.end("prefill-0")
        stays.memory.fill()
        grown: list[str] = []
        for number in range(6):
            if number == 2:
                stays.apply(_start)
            pair = Pair(stays, ends.end("decode-0"))
            pair.connect()
            sent = pair.send(pair.rows((0, 0, 64)), pair.rows((0, 64, 64)))
            pair.pump_until(lambda sent=sent: sent.received and sent.done, "T12: a chunk to a new peer arrives")  # type: ignore[misc]
            pair.finish(sent.chunk.transfer)
            stays.guard.disconnect(pair.target.peer)
            pair.pump_until(lambda pair=pair: stays.told_down(pair.target.peer), "T2: a peer that left is down")  # type: ignore[misc]
            pair.target.pump()
            pair.target.guard.close()
        grown = stays.apply(_held)
        require(
            not grown, "T12", "peers that have come and gone have left something behind", seen="; ".join(grown),
            look="what is done when a peer is down",
        )  # fmt: skip

    @pytest.mark.clause("T12")
    def test_a_poll_that_finds_nothing_costs_nothing(self, pair: Pair) -> None:
        """``poll()`` returns the ``IDLE`` singleton when nothing has happened, and does not wait.

        Troubleshooting:
        - another object: ``return progress or IDLE`` does it;
        - slow: waiting belongs into ``wait()``.
        """
        pair.pump_idle()
        for end in (pair.source, pair.target):
            other, longest = end.apply(_idle_polls)
            require(not other, "T12", "an idle poll() made a new object each time", expected="IDLE", seen=other)
            require(longest < 0.5, "T12", "an idle poll() waits", expected="no waiting", seen=f"{longest:.2f} s")


def _does_not_grow(pair: Pair, one_round: Any, what: str) -> None:
    def rounds(count: int) -> None:
        for _ in range(count):
            one_round()
            for end in (pair.source, pair.target):
                end.forget_events()

    rounds(_WARM)
    for end in (pair.source, pair.target):
        end.apply(_start)
    rounds(_ROUNDS)
    for end in (pair.source, pair.target):
        grown = end.apply(_grown, _ROUNDS)
        require(
            not grown, "T12", f"{end.peer} grows with the number of {what}", expected="nothing per transfer",
            seen="; ".join(grown), look="the line that is named",
        )  # fmt: skip


#: Watches that are open in this process, by end.
_watches: dict[int, Growth] = {}


def _start(end: LocalEnd) -> None:
    _watches[id(end)] = Growth()


def _grown(end: LocalEnd, count: int) -> list[str]:
    return _watches.pop(id(end)).per(count)


def _held(end: LocalEnd) -> list[str]:
    return _watches.pop(id(end)).held()


def _idle_polls(end: LocalEnd) -> tuple[str, float]:
    import time

    other, longest = "", 0.0
    for _ in range(50):
        start = time.monotonic()
        progress = end.connector.poll()
        longest = max(longest, time.monotonic() - start)
        if not progress and progress is not IDLE:
            other = repr(progress)
    return other, longest
