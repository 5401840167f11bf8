"""P3: from a token range to chunks, vectorised, against a loop over descriptors in Python.

One request of 2048 tokens over 24 layers, K and V, 4 planes, with blocks of 16 tokens: 24,576 places where one layer's
K or V of one block lies.  Both ways go from the two stages' block tables to chunks of at most 64 MiB and 65,536
segments: find every place on both sides, merge neighbours that follow each other on both, cut into chunks.  They take
turns in one run and must give the same chunks.

Planning computes and never waits, so what is measured is the thread's own processor time: on a machine shared with
others, time on the wall tells how busy they are.  The figures are the median of the vectorised way and the median of
each turn's ratio; the wall's median stands beside them in the JSON.

Layouts: *block-major* keeps a block contiguous over all layers (one tensor for K and one for V in each plane);
*layer-major* has one tensor for each layer's K and V.  Block ids are scattered at random or contiguous, on both sides.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvbaton.geometry import Component, KVGeometry, KVMap, Plane
from kvbaton.segments import Segments, split

TOKENS, BLOCK_TOKENS, LAYERS, PLANES = 2048, 16, 24, 4
TOKEN_BYTES = 4096
BLOCKS = 1024
CHUNK_BYTES, CHUNK_SEGMENTS = 64 << 20, 65536
MAX_MS, MIN_RATIO = 0.5, 100.0
#: Vectorised calls in each turn, each timed alone.
CALLS = 20

Tables = Sequence[npt.NDArray[np.int64]]
Chunks = list[tuple[Segments, Segments]]
Triple = tuple[int, int, int]


def block_major() -> KVGeometry:
    size = BLOCK_TOKENS * TOKEN_BYTES
    return geometry(
        [
            [
                Component(2 * p + kv, layer * size, LAYERS * size, TOKEN_BYTES)
                for layer in range(LAYERS)
                for kv in range(2)
            ]
            for p in range(PLANES)
        ]
    )


def layer_major() -> KVGeometry:
    size = BLOCK_TOKENS * TOKEN_BYTES
    return geometry(
        [
            [
                Component(2 * (p * LAYERS + layer) + kv, 0, size, TOKEN_BYTES)
                for layer in range(LAYERS)
                for kv in range(2)
            ]
            for p in range(PLANES)
        ]
    )


def geometry(planes: Sequence[Sequence[Component]]) -> KVGeometry:
    named = tuple(Plane(f"depth{p}", tuple(components), BLOCKS) for p, components in enumerate(planes))
    return KVGeometry({"model": "benchmark"}, BLOCK_TOKENS, named, final_bytes=0)


def tables(scattered: bool, seed: int) -> Tables:
    count = TOKENS // BLOCK_TOKENS
    generator = np.random.default_rng(seed)
    return [
        generator.permutation(BLOCKS)[:count].astype(np.int64)
        if scattered
        else np.arange(seed + p, seed + p + count, dtype=np.int64)
        for p in range(PLANES)
    ]


def by_descriptor(layout: KVGeometry, sources: Tables, targets: Tables) -> list[tuple[list[Triple], list[Triple]]]:
    """The same chunks, one descriptor at a time; written as well as such a loop can be."""
    reads: list[Triple] = []
    writes: list[Triple] = []
    size = BLOCK_TOKENS * TOKEN_BYTES
    read_region = read_end = write_region = write_end = -1
    for plane, source, target in zip(layout.planes, sources, targets, strict=True):
        pairs = list(zip(source.tolist(), target.tolist(), strict=True))
        block_first = plane.components[0].block_stride > size
        order: Any
        if block_first:
            # all K layers of a block, then all V layers: the order in which they lie
            halves = (plane.components[0::2], plane.components[1::2])
            order = ((c, pair) for half in halves for pair in pairs for c in half)
        else:
            order = ((c, pair) for c in plane.components for pair in pairs)
        for c, (s, t) in order:
            region = c.region
            read, write = c.base + s * c.block_stride, c.base + t * c.block_stride
            if read == read_end and write == write_end and region == read_region and region == write_region:
                reads[-1] = (region, reads[-1][1], reads[-1][2] + size)
                writes[-1] = (region, writes[-1][1], writes[-1][2] + size)
            else:
                reads.append((region, read, size))
                writes.append((region, write, size))
            read_region = write_region = region
            read_end, write_end = read + size, write + size
    chunks: list[tuple[list[Triple], list[Triple]]] = []
    batch: tuple[list[Triple], list[Triple]] = ([], [])
    nbytes = 0
    for read_run, write_run in zip(reads, writes, strict=True):
        done = 0
        while done < read_run[2]:
            if batch[0] and (
                len(batch[0]) == CHUNK_SEGMENTS or nbytes + min(read_run[2] - done, CHUNK_BYTES) > CHUNK_BYTES
            ):
                chunks.append(batch)
                batch, nbytes = ([], []), 0
            length = min(read_run[2] - done, CHUNK_BYTES)
            batch[0].append((read_run[0], read_run[1] + done, length))
            batch[1].append((write_run[0], write_run[1] + done, length))
            nbytes += length
            done += length
    if batch[0]:
        chunks.append(batch)
    return chunks


def vectorised(mapping: KVMap, sources: Tables, targets: Tables) -> Chunks:
    return split(*mapping.plan(sources, targets, 0, TOKENS), CHUNK_BYTES, CHUNK_SEGMENTS)


def measure(case: str, layout: KVGeometry, scattered: bool, repeats: int) -> list[dict[str, Any]]:
    mapping = KVMap(layout, layout)
    sources, targets = tables(scattered, 3), tables(scattered, 11)
    chunks = vectorised(mapping, sources, targets)
    if [(s.triples(), t.triples()) for s, t in chunks] != by_descriptor(layout, sources, targets):
        raise RuntimeError(f"P3 {case}: the two ways give different chunks")
    fast: list[float] = []
    walls: list[float] = []
    ratios: list[float] = []
    for turn in range(repeats + 2):
        begin = time.thread_time()
        by_descriptor(layout, sources, targets)
        slow = time.thread_time() - begin
        quick: list[float] = []
        for _ in range(CALLS):
            wall, begin = time.perf_counter(), time.thread_time()
            vectorised(mapping, sources, targets)
            quick.append(time.thread_time() - begin)
            walls.append((time.perf_counter() - wall) * 1e3)
        if turn >= 2:
            fast += (seconds * 1e3 for seconds in quick)
            ratios.append(slow / statistics.median(quick))
    took, ratio = statistics.median(fast), statistics.median(ratios)
    facts = {
        "segments": sum(len(s) for s, _ in chunks),
        "chunks": len(chunks),
        "wall_ms": round(statistics.median(walls), 3),
    }
    return [
        row(case, took, "ms", MAX_MS, took < MAX_MS, {**facts, "better": "lower"}),
        row(case, ratio, "x the loop", MIN_RATIO, ratio >= MIN_RATIO, facts),
    ]


def row(case: str, value: float, unit: str, target: float, ok: bool, facts: dict[str, Any]) -> dict[str, Any]:
    return {"id": "P3", "case": case, "value": round(value, 3), "unit": unit, "target": target, "ok": ok, **facts}


def run(repeats: int = 21) -> list[dict[str, Any]]:
    """Two rows a case: ``id``, ``case``, ``value``, ``unit``, ``target``, ``ok``, and what stands behind the value."""
    rows = []
    for name, layout in (("block-major", block_major()), ("layer-major", layer_major())):
        for scattered in (True, False):
            rows += measure(f"{name}, {'scattered' if scattered else 'contiguous'}", layout, scattered, repeats)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the rows there as JSON")
    parser.add_argument("--repeats", type=int, default=21)
    arguments = parser.parse_args()
    rows = run(arguments.repeats)
    for r in rows:
        goal = f"{'below' if r['unit'] == 'ms' else 'at least'} {r['target']:g}"
        print(
            f"P3  {r['case']:<24} {r['value']:>9.3f} {r['unit']:<10} ({goal}: {'reached' if r['ok'] else 'missed'})"
            f"  {r['segments']:>6,} segments in {r['chunks']} chunks"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")
    if not all(r["ok"] for r in rows):
        print("P3  not every target was reached", file=sys.stderr)


if __name__ == "__main__":
    main()
