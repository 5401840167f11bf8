"""P9: what the process grows by for each finished transfer, over 100,000 hand-offs.

The deployment of P4: coordinator, P and D as threads of one process over loopback, 64 requests under way, each of one
prompt token with a text of its own as its id.  After each round of 10,000, with nothing under way, the garbage is
collected and two figures are taken: the blocks that Python's allocator has given out, which miss nothing that Python
code keeps; and the resident memory of the process, which misses nothing at all but moves by pages, also for other
reasons.  Growth is the median slope over all pairs of rounds (Theil-Sen), in each figure's own unit for one hand-off.

A container that keeps one entry for each transfer would show as at least a pointer's 8 bytes, and what it keeps as at
least one block and 32.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from p4_handoff import running, serve

WARM_UP = 20_000
ROUND, ROUNDS = 10_000, 10
#: What is no growth: less than one block for a hundred hand-offs, and less than a pointer for one.
BLOCKS, BYTES = 0.01, 8.0


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def slope(values: list[int]) -> float:
    """By which each hand-off made ``values``, one for each round, grow."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((b - a) / (j - i) for (i, a), (j, b) in pairs) / ROUND


def measure(rounds: int = ROUNDS) -> tuple[list[int], list[int]]:
    """Blocks and resident bytes at the beginning and after each round."""
    blocks, memory = [], []
    with running(transport__name="loopback") as runtime:
        serve(runtime, WARM_UP)
        for number in range(rounds + 1):
            if number:
                serve(runtime, ROUND)
            books = runtime.statistics()["coordinator"]
            while books["transfers"]:  # the last ones retire
                books = runtime.statistics()["coordinator"]
            gc.collect()
            blocks.append(sys.getallocatedblocks())
            memory.append(resident())
    return blocks, memory


def run() -> list[dict[str, Any]]:
    """One row per figure."""
    blocks, memory = measure()
    handoffs = ROUND * ROUNDS
    rows = []
    for case, values, unit, bound in (
        ("Python objects", blocks, "blocks", BLOCKS),
        ("resident memory", memory, "bytes", BYTES),
    ):
        grows = slope(values)
        value = max(grows, 0.0)  # what shrinks has not grown
        rows.append(
            {
                "id": "P9", "case": f"{case}, per hand-off of {handoffs:,}", "value": round(value, 5), "unit": unit,
                "target": bound, "better": "lower", "ok": value < bound, "slope": grows, "first": values[0],
                "change": [b - a for a, b in itertools.pairwise(values)],
            }
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    rows = run()
    if parser.parse_args().json:
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    for r in rows:
        reached = "reached" if r["ok"] else "missed"
        print(f"P9  {r['case']:<44} {r['value']:>9.4f} {r['unit']:<7} (less than {r['target']}: {reached})  {r}")


if __name__ == "__main__":
    main()
