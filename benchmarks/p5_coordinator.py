"""P5: messages per second of the coordinator machine alone, with 100 and with 10,000 transfers live.

Transfers stay in flight, spread over the phases, while others come, go through their whole life and are replaced: each
one is ten messages to the machine (Reserved, Progress, Commit, Received, Retired of P, Activated, two Outputs,
Finished, Retired of D) and one submission.  Only the handling is timed; the messages are made beforehand.  The runs
take turns, and the figures are medians.  ``flat`` is the rate at 10,000 live over the rate at 100.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from typing import Any

from kvbaton.engine import FinishReason, Request, Role, SamplingParams
from kvbaton.handoff.coordinator import Coordinator
from kvbaton.identity import PeerId, RequestKey, TransferId, new_transfer_id
from kvbaton.messages import (
    Activated,
    Commit,
    Connected,
    Finished,
    Hello,
    Message,
    Output,
    Progress,
    Received,
    Reserved,
    Retired,
)
from kvbaton.reservation import Capacity, Reservation

REQUEST = Request(tuple(range(64)), SamplingParams(max_tokens=64))
STAGES = 2
REPEATS = 7


class Load:
    """A coordinator with 2P2D and ``live`` transfers in flight."""

    def __init__(self, live: int) -> None:
        self.fresh: TransferId | None = None
        self.c = Coordinator(new_id=self._take)
        self.number = 0
        capacity = Capacity(blocks=10**7, compute_slots=64, transfer_slots=10**6, block_tokens=16, max_tokens=4096)
        self.prefills = [PeerId(f"prefill-{i}", 1) for i in range(STAGES)]
        self.decodes = [PeerId(f"decode-{i}", 1) for i in range(STAGES)]
        for peers, role in ((self.prefills, Role.PREFILL), (self.decodes, Role.DECODE)):
            for peer in peers:
                self.c.handle(peer, Hello(peer, role, capacity, b""), 0.0)
        for p in self.prefills:
            for d in self.decodes:
                self.c.handle(p, Connected(d), 0.0)
                self.c.handle(d, Connected(p), 0.0)
        for i in range(live):
            transfer, where = self._submit()
            for sender, message in self._life(transfer, where)[: i % 9]:
                self.c.handle(sender, message, 0.0)

    def _take(self) -> TransferId:
        assert self.fresh is not None
        return self.fresh

    def _submit(self) -> tuple[TransferId, tuple[PeerId, PeerId]]:
        self.number += 1
        self.fresh = new_transfer_id()
        effects = self.c.submit(RequestKey(f"r{self.number}"), REQUEST, 0.0)
        placed: Any = effects[0]
        return self.fresh, (placed.event.prefill, placed.event.decode)

    @staticmethod
    def _life(t: TransferId, where: tuple[PeerId, PeerId]) -> list[tuple[PeerId, Message]]:
        p, d = where
        return [
            (d, Reserved(Reservation(t, ((0, 1, 2, 3),), 0, 0))),
            (p, Progress(t, 1)),
            (p, Commit(t, 1)),
            (d, Received(t)),
            (p, Retired(t)),
            (d, Activated(t)),
            (d, Output(t, 0, (1,), (1,))),
            (d, Output(t, 1, (2,), (1,))),
            (d, Finished(t, FinishReason.LENGTH)),
            (d, Retired(t)),
        ]

    def rate(self, transfers: int) -> float:
        """Messages per second over ``transfers`` whole lives, 20 of them interleaved at a time."""
        spent = 0.0
        count = 0
        handle = self.c.handle
        gc.collect()
        for _ in range(transfers // 20):
            began = time.perf_counter()
            placed = [self._submit() for _ in range(20)]
            spent += time.perf_counter() - began
            lives = [self._life(*one) for one in placed]
            messages = [message for step in zip(*lives, strict=True) for message in step]
            began = time.perf_counter()
            for sender, message in messages:
                handle(sender, message, 0.0)
            spent += time.perf_counter() - began
            count += len(messages)
        return count / spent


def run() -> list[dict[str, Any]]:
    """One row per figure."""
    few, many = Load(100), Load(10_000)
    few.rate(200)
    many.rate(200)
    rates: dict[str, list[float]] = {"few": [], "many": []}
    for _ in range(REPEATS):
        rates["few"].append(few.rate(1000))
        rates["many"].append(many.rate(1000))
    at_few, at_many = statistics.median(rates["few"]), statistics.median(rates["many"])
    flat = statistics.median(b / a for a, b in zip(rates["few"], rates["many"], strict=True))
    return [
        row("100 live transfers", at_few, "messages/s", 30_000.0),
        row("10,000 live transfers", at_many, "messages/s", 30_000.0),
        row("flat: 10,000 live / 100 live", flat, "ratio", 0.80),
    ]


def row(case: str, value: float, unit: str, target: float) -> dict[str, Any]:
    return {"id": "P5", "case": case, "value": round(value, 3), "unit": unit, "target": target, "ok": value >= target}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    rows = run()
    if arguments.json:
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    for r in rows:
        reached = "reached" if r["ok"] else "missed"
        print(f"P5  {r['case']:<30} {r['value']:>12,.2f} {r['unit']:<10}  (at least {r['target']:,.2f}: {reached})")


if __name__ == "__main__":
    main()
