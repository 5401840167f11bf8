"""P4: what a hand-off costs that carries next to nothing, over the whole runtime with a scripted engine.

Each request is one prompt token, and each answer one token: 8 bytes of KV and 4 of the final state cross, so that what
is timed is the hand-off itself: the coordinator, both stages' pumps, engines and connectors, fourteen control
messages.

*In process*: 1P1D as threads of this process, which may use one core, over loopback, with 64 requests under way;
hand-offs per second, and per second of the processor, which other programs disturb less.  *Three processes*: the
coordinator, P and D, which talk over ZeroMQ's ipc and move bytes through shared memory.  Latency is from
``add_request`` to the end of the request, of one at a time and of 16 at a time; it also says how many of the three
processes' milliseconds of processor a hand-off took, and the least disturbed of several rounds, since what is measured
is three processes that wake each other and each needs a processor at once.
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
from pathlib import Path
from typing import Any

from absent import Absent

from kvbaton import PDRuntime, Request, SamplingParams, load

TOGETHER = 64
WARM_UP = 500
ROUND, ROUNDS = 2000, 7
LATENCIES, LATENCY_ROUNDS = 400, 7
MANY = 16
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


def latencies(runtime: PDRuntime, count: int, together: int) -> list[float]:
    """Milliseconds of each of ``count`` hand-offs, sorted; ``together`` of them are under way at a time."""
    began: dict[str, float] = {}
    found: list[float] = []
    while len(found) < count:
        while len(began) < together and len(found) + len(began) < count:
            now = time.perf_counter()
            key = runtime.add_request(REQUESTS[(len(found) + len(began)) % len(REQUESTS)])
            began[key] = now
        for output in runtime.step(1.0):
            if output.finished:
                if output.error is not None:
                    raise output.error
                found.append((time.perf_counter() - began.pop(output.request_id)) * 1e3)
    return sorted(found)


def processor_seconds(runtime: PDRuntime) -> float:
    """Of this process and of both stages, so far."""
    own = os.times()
    ticks = 0
    for name in runtime.stages:
        fields = Path(f"/proc/{runtime.stage(name).pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return own.user + own.system + ticks / os.sysconf("SC_CLK_TCK")


def three_processes(together: int) -> dict[str, Any]:
    """The median of each round's median, the quietest round, and what it costs."""
    with running(transport__name="example_shm", stages__launch="process") as runtime:
        serve(runtime, WARM_UP, together)
        spent = processor_seconds(runtime)
        rounds = [latencies(runtime, LATENCIES, together) for _ in range(LATENCY_ROUNDS)]
        spent = processor_seconds(runtime) - spent
    medians = sorted(statistics.median(times) for times in rounds)
    times = sorted(time for times in rounds for time in times)
    return {
        "id": "P4", "value": round(statistics.median(medians), 3), "unit": "ms", "better": "lower",
        "rounds": [round(one, 3) for one in medians], "fastest_ms": round(times[0], 3),
        "p10_ms": round(times[len(times) // 10], 3), "p90_ms": round(times[len(times) * 9 // 10], 3),
        "processor_ms": round(spent / len(times) * 1e3, 3),
    }  # fmt: skip


def run() -> list[dict[str, Any]]:
    """One row per figure."""
    found, cost = rates()
    rate = statistics.median(found)
    alone, many = three_processes(1), three_processes(MANY)
    quietest = alone["rounds"][0]
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
            **alone, "case": "three processes, median latency", "target": LATENCY, "ok": alone["value"] <= LATENCY,
        },
        {
            "id": "P4", "case": "three processes, median latency, quietest round", "value": quietest, "unit": "ms",
            "target": None, "better": "lower", "ok": None,
        },
        {
            **many, "case": f"three processes, median latency, {MANY} at a time", "target": None, "ok": None,
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
