"""T9: what ``cancel(transfer)`` stops, and what it does not."""

from __future__ import annotations

import random

import pytest

from kvbaton.connector import Chunk, Outcome
from kvbaton.identity import new_transfer_id
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import Pair
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.traffic import Traffic


class Cancellation(ConnectorTopic):
    """T9: what is not started ends as CANCELLED and writes nothing; what is posted drains and is reported."""

    @pytest.mark.clause("T9", "T5")
    @pytest.mark.parametrize("when", ["at-once", "after-some-passes", "clogged"])
    def test_every_cancelled_chunk_ends_once_and_says_what_it_did(
        self, pair: Pair, draw: random.Random, when: str
    ) -> None:
        """40 chunks of one transfer, cancelled at different moments.

        Troubleshooting:
        - never ended: chunks were taken out of a queue without a completion;
        - bytes of a CANCELLED chunk arrive: it had been started. Releasing a handle is not quiet: it must drain, and
          end as DONE or FAILED;
        - bytes arrive after everything ended: the same, later.
        """
        traffic = Traffic(pair, draw, transfers=1, chunks=40, segments=3)
        if when == "clogged":
            pair.clog(pair.target)
        traffic.submit()
        if when == "after-some-passes":
            for _ in range(3):
                pair.pump()
        (transfer,) = traffic.transfers
        pair.source.guard.cancel(transfer)
        pair.source.guard.cancel(transfer)
        pair.unclog()
        sent = [one for one in traffic.sent if one.accepted]
        pair.pump_until(lambda: all(one.over for one in sent), "T9: every chunk of a cancelled transfer ends")
        pair.pump_idle()
        traffic.check_once()
        done = [one for one in sent if one.done]
        pair.pump_until(lambda: all(one.received for one in done), "T9: what ended as DONE is received")
        for one in sent:
            if one.completions[-1].outcome is Outcome.CANCELLED:
                require(
                    not one.received, "T9", f"chunk {one.chunk.sequence} is CANCELLED at the source and received at"
                    " the target", look="what cancel() takes out of the queue after it was started",
                )  # fmt: skip
        # of what failed any byte may have been written; all others are as they must be
        failed = [one.chunk.target for one in sent if one.completions[-1].outcome is Outcome.FAILED]
        expected, found = traffic.expected(done), pair.target.memory.image()
        for writes in failed:
            expected = expected.with_copy(found, writes, writes)
        pair.target.memory.check(expected, "T9")
        pair.target.memory.poison()
        pair.source.memory.poison()
        before = pair.target.memory.image()
        pair.pump_idle(60)
        pair.target.memory.untouched(before, "T9")

    @pytest.mark.clause("T9")
    def test_other_transfers_go_on(self, pair: Pair, draw: random.Random) -> None:
        """Three transfers, the middle one is cancelled.

        Troubleshooting:
        - chunks of others end too: cancelled by peer, or by sequence.
        """
        pair.clog(pair.target)
        traffic = Traffic(pair, draw, transfers=3, chunks=10, segments=2)
        traffic.submit()
        cancelled = traffic.transfers[1]
        pair.source.guard.cancel(cancelled)
        pair.unclog()
        pair.pump_until(lambda: traffic.over, "T9: all chunks end")
        others = [one for one in traffic.sent if one.chunk.transfer != cancelled]
        pair.pump_until(lambda: all(one.received and one.done for one in others), "T9: other transfers arrive whole")
        traffic.check_once()

    @pytest.mark.clause("T9", "C7.1")
    def test_cancelling_what_is_not_there_is_nothing(self, pair: Pair) -> None:
        """A transfer that never was, and one that is over."""
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 64, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T5: one chunk is received and done")
        pair.source.guard.cancel(new_transfer_id())
        pair.source.guard.cancel(sent.chunk.transfer)
        pair.pump_idle()
        require(len(sent.completions) == 1, "T9", "a chunk that was over ended again", seen=sent.completions)
        again = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 256, 64)))
        pair.pump_until(lambda: again.received and again.done, "T9: a new transfer is unaffected")

    @pytest.mark.clause("T9", "C5.2")
    @pytest.mark.requires("revocable")
    def test_after_a_revocation_nothing_of_the_transfer_is_written(self, ends: Ends) -> None:
        """The target revokes a transfer of 30 large chunks under way and uses its memory for something else at once.

        Troubleshooting:
        - bytes arrive later: revoke() returned True while a write was under way. It says False until that is over, or
          it makes the late bytes go elsewhere.
        """
        size, count = (512 << 10) // ends.subject.capabilities.alignment, 30
        pair = ends.pair(regions={0: size * count})
        target = pair.target
        rows = [pair.rows((0, size * number, size)) for number in range(count)]
        transfer = pair.grant(pair.rows((0, 0, size * count)))
        chunks = [Chunk(transfer, number, target.peer, row, row, row.nbytes) for number, row in enumerate(rows)]
        taken = [chunk for chunk in chunks if pair.source.guard.submit(chunk)]
        pair.pump_until(lambda: target.guard.revoke(transfer), "C5.2: a revocation is promised")
        # both ends of each chunk: few bytes, so that they are in use before the wire gets there
        marks = pair.rows(*((0, size * number + at, 1) for number in range(count) for at in (0, size - 1)))
        used = b"\xee" * marks.nbytes
        target.memory.write(marks, used)
        pair.pump_until(
            lambda: len({c.sequence for c in pair.source.completions if c.terminal}) == len(taken),
            "T5: the chunks of a revoked transfer end at their source",
        )
        pair.pump_idle(60)
        found = target.memory.read(marks)
        late = sum(here != there for here, there in zip(found, used, strict=True))
        require(
            not late, "C5.2", "bytes of a transfer arrived after revoke() had returned True",
            expected="nothing is written any more", seen=f"{late} of {len(used)} places were overwritten",
            look="revoke(): what is under way when it says True",
        )  # fmt: skip
        fresh = pair.grant(rows[0])
        again = Chunk(fresh, 0, target.peer, rows[0], rows[0], rows[0].nbytes)
        require(pair.source.guard.submit(again), "C5.2", "after a revocation the next chunk is refused")
        pair.pump_until(
            lambda: any(receipt.transfer == fresh for receipt in target.receipts),
            "C5.2: the next transfer is unaffected",
        )
