"""P1: what loopback, through the guard, makes of one thread's memcpy.

Each case moves the same bytes in two ways that take turns: one contiguous copy, and chunks through a pair of guarded
connectors, submitted, carried by the wire's thread, and polled until every receipt and completion is in.  Segments are
scattered on both sides over twice the memory that they need.  The figure is the ratio of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from kvbaton.connector import Chunk, ConnectorContext, MemoryRegion
from kvbaton.guard import GuardedConnector
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments, split
from kvbaton_loopback import plugin

KiB, MiB = 1 << 10, 1 << 20

#: case, bytes of a segment, segments, target
CASES = [
    ("64 x 1 MiB", MiB, 64, 0.90),
    ("256 x 256 KiB", 256 * KiB, 256, 0.90),
    ("4,096 x 16 KiB", 16 * KiB, 4096, 0.55),
    ("10,000 x 4 KiB", 4 * KiB, 10_000, 0.35),
]

CHUNK_BYTES = 64 * MiB


class Path:
    """Two guarded connectors and their memory, warm."""

    def __init__(self, length: int, count: int, seed: int) -> None:
        generator = np.random.default_rng(seed)
        cells = 2 * count
        self.source = np.full(cells * length, 7, np.uint8)
        self.target = np.zeros(cells * length, np.uint8)
        lengths = np.full(count, length)
        self.reads = Segments(np.zeros(count, np.int32), generator.permutation(cells)[:count] * length, lengths.copy())
        self.writes = Segments(np.zeros(count, np.int32), generator.permutation(cells)[:count] * length, lengths.copy())
        self.batches = split(self.reads, self.writes, CHUNK_BYTES, 1 << 16)
        self.ends = []
        for name, memory in (("prefill-0", self.source), ("decode-0", self.target)):
            peer = PeerId.start(name)
            guard = GuardedConnector(
                plugin.open(plugin.Options(), ConnectorContext(peer)), transport="loopback", version="1", peer=peer
            )
            guard.register([MemoryRegion.of_array(0, memory)])
            self.ends.append(guard)
        prefill, decode = self.ends
        prefill.connect(decode.endpoint())
        decode.connect(prefill.endpoint())
        for end in self.ends:
            end.poll()

    def transfer(self) -> None:
        """One hand-off's bytes, until both sides know that they are there."""
        prefill, decode = self.ends
        transfer = new_transfer_id()
        decode.grant(transfer, prefill.peer, self.writes)
        for sequence, (source, target) in enumerate(self.batches):
            if not prefill.submit(Chunk(transfer, sequence, decode.peer, source, target, source.nbytes)):
                raise RuntimeError("the guard's budget is too small for this benchmark")
        completed = received = 0
        while completed < len(self.batches) or received < len(self.batches):
            prefill.wait(0.5)
            completed += len(prefill.poll().completions)
            received += len(decode.poll().receipts)
        prefill.acknowledge(transfer)
        decode.forget(transfer)

    def close(self) -> None:
        for end in self.ends:
            end.close()


def turns(repeats: int, *ways: Callable[[], object]) -> list[float]:
    """Median seconds of each way, the ways taking turns, after two rounds of warm-up."""
    seconds: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats + 2):
        for way, times in zip(ways, seconds, strict=True):
            start = time.perf_counter()
            way()
            if turn >= 2:
                times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def measure(case: str, length: int, count: int, target: float, repeats: int) -> dict[str, Any]:
    path = Path(length, count, seed=length)
    nbytes = length * count
    plain, onto = np.full(nbytes, 7, np.uint8), np.zeros(nbytes, np.uint8)
    memcpy, loopback = turns(repeats, lambda: np.copyto(onto, plain), path.transfer)
    path.close()
    wrong = nbytes - int(np.count_nonzero(path.target))
    if wrong:
        raise RuntimeError(f"T3: {wrong} bytes did not arrive")
    return {
        "id": "P1",
        "case": case,
        "value": round(memcpy / loopback, 3),
        "unit": "loopback rate / memcpy rate",
        "target": target,
        "ok": memcpy / loopback >= target,
        "gb_per_s": round(nbytes / loopback / 1e9, 2),
        "memcpy_gb_per_s": round(nbytes / memcpy / 1e9, 2),
    }


def run(repeats: int = 21) -> list[dict[str, Any]]:
    """All cases: ``id``, ``case``, ``value``, ``unit``, ``target``, ``ok``, and the rates behind the value."""
    return [measure(*case, repeats) for case in CASES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    rows = run(arguments.repeats)
    if arguments.json:
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    for row in rows:
        print(
            f"{row['id']}  {row['case']:<16} {row['value']:5.2f}  (at least {row['target']:.2f}: "
            f"{'reached' if row['ok'] else 'missed'})  {row['gb_per_s']:6.2f} of {row['memcpy_gb_per_s']:6.2f} GB/s"
        )


if __name__ == "__main__":
    main()
