"""P11: what prefix-aware routing saves where prompts begin alike, and what it costs where they do not.

2P2D as threads of this process over loopback, the scripted engine, 16 requests under way at a time, taken in the same
random order under both policies.  A prompt is a beginning of 256 tokens and an end of 32 of its own; every answer is 8
tokens.  The beginning is one of 32 (*shared*), one of 32 with half of all requests on the first (*one hot prefix*), or
the request's own (*nothing shared*).  *roomy*: a stage can hold all beginnings besides its live requests; *tight*: half
of them.

Figures are ratios of sums over all requests, prefix-aware over least loaded, of the same run: bytes that crossed the
transport (what D did not hold), prompt tokens that P computed, and the largest share of the requests that one decode
stage had.  None of them is a time, so that other programs do not disturb them; how requests interleave does, a little:
each figure is the median over rounds.  Where nothing is shared, also the processor's time per request.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, load

BEGINNINGS, BEGINNING, END, ANSWER = 32, 256, 32, 8
BLOCK, TOGETHER, REQUESTS, ROUNDS = 16, 16, 400, 3
POLICIES = ("least-loaded", "prefix-aware")
LIVE = -(-(BEGINNING + END + ANSWER) // BLOCK) * TOGETHER
KEPT = BEGINNINGS * BEGINNING // BLOCK
#: Blocks of each stage.
POOLS = {"roomy": LIVE + 4 * KEPT, "tight": KEPT // 2 + LIVE // 4}
#: case -> (share of the requests that have the first beginning, pool); None: nothing is shared
CASES: dict[str, tuple[float | None, str]] = {
    "shared, roomy": (1 / BEGINNINGS, "roomy"),
    "shared, tight": (1 / BEGINNINGS, "tight"),
    "one hot prefix, tight": (0.5, "tight"),
    "nothing shared": (None, "roomy"),
}


def requests(hot: float | None, seed: int) -> list[Request]:
    draw = random.Random(seed)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(50_000) for _ in range(count))

    beginnings = [tokens(BEGINNING) for _ in range(BEGINNINGS)]
    weights = [] if hot is None else [hot, *[(1 - hot) / (BEGINNINGS - 1)] * (BEGINNINGS - 1)]
    made = []
    for _ in range(REQUESTS):
        beginning = tokens(BEGINNING) if hot is None else draw.choices(beginnings, weights)[0]
        made.append(Request((*beginning, *tokens(END)), SamplingParams(max_tokens=ANSWER)))
    return made


def served(policy: str, pool: str, prompts: Sequence[Request]) -> tuple[list[RequestRecord], float]:
    """The records, and milliseconds of this process's processor for each request."""
    settings = load(
        overrides={
            "model": "scripted:1",
            "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
            "engine.options": {
                "token_bytes": (64, 64), "block_tokens": BLOCK, "chunk": 64, "prefill_blocks": POOLS[pool],
                "decode_blocks": POOLS[pool],
            },
            "transport.name": "loopback",
            "stages.prefill": 2,
            "stages.decode": 2,
            "routing.policy": policy,
        }
    )[0]  # fmt: skip
    records: list[RequestRecord] = []
    with PDRuntime.start(settings) as runtime:
        waiting, live, began = list(reversed(prompts)), 0, time.process_time()
        while waiting or live:
            while waiting and live < TOGETHER:
                runtime.add_request(waiting.pop())
                live += 1
            for output in runtime.step(1.0):
                if output.finished:
                    if output.error is not None or output.record is None:
                        raise output.error or RuntimeError("a request ended without a record")
                    live -= 1
                    records.append(output.record)
        spent = time.process_time() - began
    return records, spent / len(prompts) * 1e3


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    stages = Counter(record.decode for record in records)
    return {
        "bytes": sum(record.bytes for record in records),
        "computed": sum(record.prompt_tokens - record.prefix_prefill for record in records),
        "share": max(stages.values()) / len(records),
    }


WHAT = {"bytes": "bytes sent", "computed": "prompt tokens computed", "share": "busiest D's share", "ms": "processor"}
#: What the bytes sent are to come down to.
GOALS = {"shared, roomy": 0.9, "shared, tight": 0.75, "one hot prefix, tight": 0.85}
#: No worse than least loaded, within a twentieth, where nothing is shared; processor time is not that exact.
BOUNDS = {"bytes": 1.05, "computed": 1.05, "share": 1.05, "ms": 1.15}


def run() -> list[dict[str, Any]]:
    """One row per case and figure; ``of``: its two parts."""
    rows = []
    for case, (hot, pool) in CASES.items():
        found: dict[str, list[dict[str, float]]] = {policy: [] for policy in POLICIES}
        for seed in range(ROUNDS):
            prompts = requests(hot, seed)
            for policy in POLICIES:
                records, spent = served(policy, pool, prompts)
                found[policy].append({**figures(records), "ms": spent})
        least, aware = ({key: statistics.median(one[key] for one in found[policy]) for key in WHAT}
                        for policy in POLICIES)  # fmt: skip
        for key, what in WHAT.items():
            if key == "ms" and hot is not None:
                continue  # what is not transferred is not paid for either
            goal = BOUNDS[key] if hot is None else GOALS[case] if key == "bytes" else None
            value = aware[key] / least[key]
            rows.append(
                {
                    "id": "P11", "case": f"{case}: {what}", "value": round(value, 4), "unit": "ratio", "target": goal,
                    "better": "lower", "ok": None if goal is None else value <= goal,
                    "of": {"prefix-aware": round(aware[key], 3), "least-loaded": round(least[key], 3)},
                }
            )  # fmt: skip
    return rows


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bytes sent and tokens computed under both policies, case by case."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvbaton"
    from matplotlib import pyplot

    figure, both = pyplot.subplots(1, 2, figsize=(10, 3))
    for axes, key, unit, scale in ((both[0], "bytes", "MB", 1e6), (both[1], "computed", "thousand tokens", 1e3)):
        shown = [row for row in rows if row["case"].endswith(WHAT[key])]
        for place, policy in enumerate(POLICIES):
            heights = [i + place * 0.4 for i in range(len(shown))]
            axes.barh(heights, [row["of"][policy] / scale for row in shown], height=0.4, label=policy)
        axes.set_yticks([i + 0.2 for i in range(len(shown))], [row["case"].split(":")[0] for row in shown])
        axes.set_xlabel(f"{WHAT[key]}, {unit}")
        axes.invert_yaxis()
    both[0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    rows = run()
    if parser.parse_args().json:
        json.dump(rows, sys.stdout, indent=2)
        print()
        return
    for r in rows:
        reached = {True: "reached", False: "missed", None: "none"}[r["ok"]]
        print(f"P11  {r['case']:<48} {r['value']:>7.3f}  (target: {reached})  {r['of']}")


if __name__ == "__main__":
    main()
