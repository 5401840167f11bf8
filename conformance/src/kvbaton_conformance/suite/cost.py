"""T12: nothing grows with the number of finished transfers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbaton.connector import IDLE, Chunk
from kvbaton_conformance.clauses import require
from kvbaton_conformance.growth import Growth
from kvbaton_conformance.harness import LocalEnd, Pair, Sent
from kvbaton_conformance.inspector import Image
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends

#: Transfers before the watch begins, which fill caches; under it; and how many are under way at once.
_WARM, _WATCHED, _AT_ONCE = 60, 200, 10


class Cost(ConnectorTopic):
    """T12: what a transfer has needed is gone when it is over, however it ended."""

    @pytest.mark.clause("T12")
    def test_nothing_grows_with_finished_transfers(self, pair: Pair) -> None:
        """200 transfers, one after the other, each acknowledged and forgotten.

        Troubleshooting:
        - the line that is named keeps something per transfer: grants, handles, receipts that were seen. Drop it in
          acknowledge() at the source, in revoke() at the target, when the last completion was reported.
        """

        def transfers() -> None:
            sent = _send(pair)
            pair.pump_until(lambda: all(one.received and one.done for one in sent), "T12: some of many chunks arrive")
            for one in sent:
                pair.finish(one.chunk.transfer)

        _does_not_grow(pair, transfers, "finished transfers")

    @pytest.mark.clause("T12", "T9")
    def test_nothing_grows_with_cancelled_transfers(self, pair: Pair) -> None:
        """200 transfers that are cancelled as soon as they are submitted."""

        def transfers() -> None:
            sent = _send(pair)
            for one in sent:
                pair.source.guard.cancel(one.chunk.transfer)
            pair.pump_until(
                lambda: all(any(completion.source_quiet for completion in one.completions) for one in sent),
                "T12: some of many cancelled chunks end",
            )
            for one in sent:
                pair.finish(one.chunk.transfer)

        _does_not_grow(pair, transfers, "cancelled transfers")

    @pytest.mark.clause("T12", "T10")
    def test_nothing_grows_with_peers_that_come_and_go(self, ends: Ends) -> None:
        """Peers that connect and disconnect leave no thread, descriptor or memory at the one that stays.

        Troubleshooting:
        - one descriptor per peer: the socket or mapping of a peer that is down is not closed.
        """
        stays = ends.end("prefill-0")
        stays.memory.fill()
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
            ends.done(pair.target)
            pair.target = stays
        for _ in range(20):  # the end of a stream is seen by looking
            stays.pump()
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


def _send(pair: Pair) -> list[Sent]:
    """A chunk of each of some new transfers."""
    sent = []
    for number in range(_AT_ONCE):
        row = pair.rows((0, 512 * number, 256))
        chunk = Chunk(pair.grant(row), 0, pair.target.peer, row, row, row.nbytes)
        sent.append(Sent(chunk, pair.source.guard.submit(chunk), Image({}), pair.source, pair.target))
    return sent


def _does_not_grow(pair: Pair, transfers: Callable[[], None], what: str) -> None:
    def loop(count: int) -> None:
        for _ in range(count // _AT_ONCE):
            transfers()
            for end in (pair.source, pair.target):
                end.forget_events()

    loop(_WARM)
    # a watch sees all of a process: where both ends share it, one sees what both hold
    shared = isinstance(pair.source, LocalEnd) and isinstance(pair.target, LocalEnd)
    watched = (pair.source,) if shared else (pair.source, pair.target)
    for end in watched:
        end.apply(_start)
    loop(_WATCHED)
    for end in watched:
        grown = end.apply(_grown, _WATCHED)
        require(
            not grown, "T12", f"{end.peer} grows with the number of {what}", expected="nothing per transfer",
            seen="; ".join(grown), look="the attribute or the line that is named",
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
