"""P2: NIXL on host memory, through kvbaton and by its own API, between two processes that take turns.

The figure is the ratio of the median rates (see :mod:`nixl_pair`).  A second picture shows where packing pays: the rate
over the length of a segment with packing never, always, and as ``auto`` decides.

What bounds packing on host memory: each byte is copied three times, gathered, written and scattered, the first two by
the source's thread, where NIXL's own API copies it once.  So it can pay only where NIXL's cost per descriptor is larger
than two copies of a segment.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nixl_pair import CROSSOVER_WAYS, RAW, KiB, MiB, crossing, crossover, pair, plot_crossover

#: case, bytes of a segment, segments, target
CASES = [
    ("256 x 1 MiB", MiB, 256, 0.95),
    ("2,048 x 64 KiB", 64 * KiB, 2048, 1.5),
    ("8,192 x 16 KiB", 16 * KiB, 8192, 1.5),
    ("8,192 x 8 KiB", 8 * KiB, 8192, 1.5),
    ("8,192 x 4 KiB", 4 * KiB, 8192, 1.5),
]
LENGTHS = [KiB << step for step in range(9)]


def run(repeats: int = 9) -> list[dict[str, Any]]:
    """All cases, and where packing begins to pay: ``id``, ``case``, ``value``, ``unit``, ``target``, ``ok``, rates."""
    from kvbaton_nixl.link import PACKING_BELOW

    rows: list[dict[str, Any]] = []
    with pair("host", 512 * MiB, CROSSOVER_WAYS) as source:
        copy = source.copy_rate()
        for case, length, count, target in CASES:
            source.take(length, count)
            rates = source.rates([RAW, "auto"], repeats)
            ratio = rates["auto"] / rates[RAW]
            rows.append(
                {
                    "id": "P2", "case": case, "value": round(ratio, 3), "unit": "kvbaton rate / NIXL rate",
                    "target": target, "ok": ratio >= target, "gb_per_s": round(rates["auto"], 2),
                    "nixl_gb_per_s": round(rates[RAW], 2), "memcpy_gb_per_s": round(copy, 2),
                }
            )  # fmt: skip
        points = crossover(source, LENGTHS, 64 * MiB, max(3, repeats // 2))
    below = PACKING_BELOW["host"]
    rows.append(
        {
            "id": "P2", "case": f"packing pays below (auto: {below // KiB} KiB)",
            "value": round(crossing(points) / KiB, 1), "unit": "KiB", "target": None, "ok": None, "points": points,
        }
    )  # fmt: skip
    return rows


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Where packing pays."""
    from kvbaton_nixl.link import PACKING_BELOW

    points = next(row["points"] for row in rows if "points" in row)
    plot_crossover(points, "NIXL on host memory, two processes", PACKING_BELOW["host"], path)
