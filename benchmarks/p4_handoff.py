"""P4: what a hand-off costs that carries next to nothing, over the whole runtime with a scripted engine.

Each request is one prompt token, and each answer one token: 8 bytes of KV and 4 of the final state cross, so that what
is timed is the hand-off itself: the coordinator, both stages' pumps, engines and connectors, fourteen control
messages.

*In process*: 1P1D as threads of this process, which may use one core, over loopback, with 64 requests under way;
hand-offs per second, and per second of the processor, which other programs do not disturb.  *Three processes*: the
coordinator, P and D, which talk over ZeroMQ's ipc and move bytes through shared memory; one request at a time, from
``add_request`` to its end.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from absent import Absent

from kvbaton import PDRuntime, Request, SamplingParams, load

TOGETHER = 64
WARM_UP = 500
ROUND, ROUNDS = 2000, 7
LATENCIES = 1500
RATE, LATENCY = 2000.0, 2.0
#: Told apart by their token, so that no prefix is shared.
REQUESTS = [Request((token,), SamplingParams(max_tokens=1)) for token in range(1, 4097)]

SCRIPTED = {
    "model": "scripted:1",
    "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
    "engine.options": {
        "token_bytes": (4, 4), "final_bytes": 4, "transfer_slots": 128, "compute_slots": 128, "prefill_blocks": 1024,
        "decode_blocks": 1024, "prefix_caching": False,
    },
}  # fmt: skip


@contextmanager
def running(**more: Any) -> Iterator[PDRuntime]:
    """1P1D."""
    with PDRuntime.start(load(overrides={**SCRIPTED, **{k.replace("__", "."): v for k, v in more.items()}})[0]) as it:
        yield it


@contextmanager
def one_core() -> Iterator[None]:
    """This process and its threads, those to come included, may use one core."""
    if not hasattr(os, "sched_setaffinity"):
        raise Absent("a process can be given one core on Linux only")
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def serve(runtime: PDRuntime, count: int, together: int = TOGETHER) -> None:
    """``count`` requests, ``together`` of them under way at a time, each of them answered."""
    begun = ended = 0
    while ended < count:
        while begun < count and begun - ended < together:
            runtime.add_request(REQUESTS[begun % len(REQUESTS)])
            begun += 1
        for output in runtime.step(1.0):
            if output.finished:
                if output.error is not None:
                    raise output.error
                ended += 1


def rates() -> tuple[list[float], float]:
    """Hand-offs per second of each round, and milliseconds of processor for one."""
    with one_core(), running(transport__name="loopback") as runtime:
        serve(runtime, WARM_UP)
        found = []
        spent = time.process_time()
        for _ in range(ROUNDS):
            began = time.perf_counter()
            serve(runtime, ROUND)
            found.append(ROUND / (time.perf_counter() - began))
        return found, (time.process_time() - spent) / (ROUND * ROUNDS) * 1e3


def latencies() -> list[float]:
    """Milliseconds of each hand-off, sorted."""
    with running(transport__name="example_shm", stages__launch="process") as runtime:
        serve(runtime, WARM_UP, together=1)
        found = []
        for number in range(LATENCIES):
            began = time.perf_counter()
            key = runtime.add_request(REQUESTS[number % len(REQUESTS)])
            for output in runtime.stream(key):
                if output.error is not None:
                    raise output.error
            found.append((time.perf_counter() - began) * 1e3)
        return sorted(found)


def run() -> list[dict[str, Any]]:
    """One row per figure."""
    found, cost = rates()
    rate = statistics.median(found)
    times = latencies()
    median = statistics.median(times)
    return [
        {
            "id": "P4", "case": "in process, one core", "value": round(rate, 1), "unit": "hand-offs/s", "target": RATE,
            "ok": rate >= RATE, "rounds": [round(one) for one in found],
        },
        {
            "id": "P4", "case": "in process, per second of processor", "value": round(1e3 / cost, 1),
            "unit": "hand-offs/s", "target": None, "ok": None,
        },
        {
            "id": "P4", "case": "three processes, median latency", "value": round(median, 3), "unit": "ms",
            "target": LATENCY, "better": "lower", "ok": median <= LATENCY, "fastest_ms": round(times[0], 3),
            "p10_ms": round(times[len(times) // 10], 3), "p90_ms": round(times[len(times) * 9 // 10], 3),
        },
    ]  # fmt: skip


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
        print(f"P4  {r['case']:<36} {r['value']:>10,.2f} {r['unit']:<12} (target: {reached})  {r}")


if __name__ == "__main__":
    main()
