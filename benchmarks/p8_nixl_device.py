"""P8: NIXL on device memory, through kvbaton and by its own API, between two processes that take turns.

The figure is the ratio of the median rates (see :mod:`nixl_pair`); the device's own copy rate is measured in the same
run.  A second picture shows where packing pays.  With ``--devices 0,1`` the source is on the first device and the
target on the second; else both are on device 0, whose kernels then run in turns of the two processes.

    python benchmarks --only P8 [--devices 0,1]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absent import Absent
from nixl_pair import CROSSOVER_WAYS, RAW, KiB, MiB, crossing, crossover, pair, plot_crossover

#: case, bytes of a segment, segments, target, repeats
CASES = [
    ("1,024 x 1.5 MiB", 1536 * KiB, 1024, 0.95, 15),
    ("8,192 x 16 KiB", 16 * KiB, 8192, 30, 9),
    ("2,048 x 64 KiB", 64 * KiB, 2048, None, 9),
    ("32,768 x 4 KiB", 4 * KiB, 32768, None, 5),
]
LENGTHS = [KiB << step for step in range(2, 14)]
#: What a case ends with where source and target are on devices of their own.
APART = " (two devices)"


def run(devices: tuple[int, int] = (0, 0)) -> list[dict[str, Any]]:
    """All cases, and where packing begins to pay: ``id``, ``case``, ``value``, ``unit``, ``target``, ``ok``, rates.

    Raises :class:`absent.Absent` where there is no such device.
    """
    try:
        import torch
    except ImportError as error:
        raise Absent(f"no CUDA device: {error}") from error
    if torch.cuda.device_count() <= max(devices):
        raise Absent(f"no CUDA device {max(devices)}: torch sees {torch.cuda.device_count()}")
    from kvbaton_nixl.link import PACKING_BELOW

    where = APART if devices[0] != devices[1] else ""
    rows: list[dict[str, Any]] = []
    with pair("cuda", 3 << 30, CROSSOVER_WAYS, devices) as source:
        copy = source.copy_rate()
        for case, length, count, target, repeats in CASES:
            source.take(length, count)
            rates = source.rates([RAW, *CROSSOVER_WAYS], repeats)
            ratio = rates["auto"] / rates[RAW]
            rows.append(
                {
                    "id": "P8", "case": case + where, "value": round(ratio, 3), "unit": "kvbaton rate / NIXL rate",
                    "target": target, "ok": None if target is None else ratio >= target,
                    "gb_per_s": round(rates["auto"], 2), "nixl_gb_per_s": round(rates[RAW], 2),
                    "never_gb_per_s": round(rates["never"], 2), "always_gb_per_s": round(rates["always"], 2),
                    "device_copy_gb_per_s": round(copy, 1),
                }
            )  # fmt: skip
        points = crossover(source, LENGTHS, 256 * MiB, 3)
    below = PACKING_BELOW["cuda"]
    rows += [
        {
            "id": "P8", "case": f"packing pays below (auto: {below // KiB} KiB){where}",
            "value": round(crossing(points) / KiB, 1), "unit": "KiB", "target": None, "ok": None, "points": points,
        },
        {
            "id": "P8", "case": f"the device's own copy{where}", "value": round(copy, 1), "unit": "GB/s",
            "target": None, "ok": None,
        },
    ]  # fmt: skip
    return rows


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Where packing pays."""
    from kvbaton_nixl.link import PACKING_BELOW

    row = next(row for row in rows if "points" in row)
    where = APART if row["case"].endswith(APART) else ""
    plot_crossover(row["points"], f"NIXL on device memory, two processes{where}", PACKING_BELOW["cuda"], path)
