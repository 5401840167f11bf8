"""Many chunks of several transfers at once, compared with memory as it should be.

The places in the target never overlap; those in the source may.  A chunk that is refused is offered again on the next
pass, as core does it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvbaton.connector import Chunk
from kvbaton.identity import TransferId
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import REGIONS, ConditionNotReached, Pair, Sent
from kvbaton_conformance.inspector import Image

#: The target's memory is dealt out in pieces of this many bytes.
PIECE = 256


@dataclass(frozen=True)
class Planned:
    """One chunk that will be submitted."""

    transfer: TransferId
    sequence: int
    reads: Segments
    writes: Segments


class Traffic:
    """``transfers`` times ``chunks`` times ``segments``, in an order drawn from ``draw``, granted at the target."""

    def __init__(
        self,
        pair: Pair,
        draw: random.Random,
        *,
        transfers: int = 4,
        chunks: int = 6,
        segments: int = 4,
        order: Callable[[list[Planned]], Sequence[Planned]] = list,
    ) -> None:
        self.pair = pair
        self.before = pair.target.memory.image()
        self._source = pair.source.memory.image()
        self.sent: list[Sent] = []
        self._waiting: list[Sent] = []
        room = min(REGIONS[0], transfers * chunks * segments * PIECE * 2)
        pieces = list(range(0, room, PIECE))
        assert len(pieces) >= transfers * chunks * segments, "the target is too small for this"
        draw.shuffle(pieces)
        planned: list[Planned] = []
        for _ in range(transfers):
            rows = []
            for _ in range(chunks):
                lengths = [draw.choice((1, 7, 64, PIECE)) for _ in range(draw.randint(1, segments))]
                reads = [(0, draw.randrange(REGIONS[0] - PIECE), length) for length in lengths]
                writes = [(0, pieces.pop() + draw.randrange(PIECE - length + 1), length) for length in lengths]
                rows.append((pair.rows(*reads), pair.rows(*writes)))
            transfer = pair.grant(Segments.empty().concat(*(writes for _, writes in rows)))
            planned += [Planned(transfer, number, *row) for number, row in enumerate(rows)]
        self.planned = tuple(order(planned))

    @property
    def transfers(self) -> tuple[TransferId, ...]:
        return tuple(dict.fromkeys(plan.transfer for plan in self.planned))

    def submit(self) -> None:
        """Offer every chunk once, in order; what is refused waits for :meth:`offer_again`."""
        pair = self.pair
        for plan in self.planned:
            chunk = Chunk(plan.transfer, plan.sequence, pair.target.peer, plan.reads, plan.writes, plan.reads.nbytes)
            pair.target.expect(plan.transfer, plan.sequence, plan.writes, self._bytes(plan.reads))
            sent = Sent(chunk, pair.source.guard.submit(chunk), self.before, pair.source, pair.target)
            self.sent.append(sent)
            if not sent.accepted:
                self._waiting.append(sent)

    def offer_again(self) -> None:
        """Offer again what was refused."""
        for sent in list(self._waiting):
            sent.accepted = self.pair.source.guard.submit(sent.chunk)
            if not sent.accepted:
                return
            self._waiting.remove(sent)

    @property
    def arrived(self) -> bool:
        """Every chunk is received and done."""
        if self._waiting:
            self.offer_again()
            return False
        done = {(c.transfer, c.sequence) for c in self.pair.source.completions if c.outcome.value == "done"}
        received = {(r.transfer, r.sequence) for r in self.pair.target.receipts}
        return all((sent.chunk.transfer, sent.chunk.sequence) in done & received for sent in self.sent)

    def missing(self) -> str:
        """Which chunks were not received, and which are not done, in words: transfers are numbered as submitted."""
        done = {(c.transfer, c.sequence) for c in self.pair.source.completions if c.outcome.value == "done"}
        received = {(r.transfer, r.sequence) for r in self.pair.target.receipts}
        number = {transfer: place for place, transfer in enumerate(self.transfers, 1)}

        def those(known: set[tuple[TransferId, int]]) -> str:
            chunks: dict[int, list[int]] = {}
            for sent in self.sent:
                if (sent.chunk.transfer, sent.chunk.sequence) not in known:
                    chunks.setdefault(number[sent.chunk.transfer], []).append(sent.chunk.sequence)
            of = [f"of transfer {place} the sequences {sorted(them)}" for place, them in sorted(chunks.items())]
            return "; ".join(of) or "none"

        return f"not received: {those(received)}\n  not done: {those(done)}"

    @property
    def over(self) -> bool:
        """Every chunk is terminal."""
        if self._waiting:
            self.offer_again()
            return False
        terminal = {(c.transfer, c.sequence) for c in self.pair.source.completions if c.terminal}
        return all((sent.chunk.transfer, sent.chunk.sequence) in terminal for sent in self.sent)

    def expected(self, sent: Sequence[Sent] | None = None) -> Image:
        """The target's memory when ``sent`` (all, by default) has arrived and nothing else has."""
        image = self.before
        for one in self.sent if sent is None else sent:
            image = image.with_copy(self._source, one.chunk.source, one.chunk.target)
        return image

    def run(self, what: str) -> None:
        """Submit, wait until all have arrived, and compare memory; ``what`` begins with a clause."""
        self.submit()
        try:
            self.pair.pump_until(lambda: self.arrived, what)
        except ConditionNotReached as error:
            raise ConditionNotReached(f"{error}\n  {self.missing()}") from None
        self.pair.pump_idle()
        self.check_once()
        self.pair.target.memory.check(self.expected(), "T3")

    def check_once(self) -> None:
        """No chunk has had more than one completion that ends it."""
        for sent in self.sent:
            terminal = [completion for completion in sent.completions if completion.terminal]
            require(
                len(terminal) <= 1, "T5", f"chunk {sent.chunk.sequence} ended more than once", expected="one end",
                seen=terminal, look="what poll() collects completions from",
            )  # fmt: skip

    def _bytes(self, reads: Segments) -> bytes:
        return b"".join(self._source.regions[id][start : start + length] for id, start, length in reads.triples())
