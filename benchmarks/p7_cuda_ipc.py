"""P7: CUDA IPC between two processes, against what bounds it and against what others do, in one run.

The figures are rates, along a curve over the length of a segment, and for whole hand-offs those over the rate of the
transport's own kernel and over that of a plain copy within the device (see :mod:`ipc_pair`).
NIXL's own API is measured in processes of its own, because two copies of UCX must not meet; ``P7_NIXL=0`` in the
environment leaves it out.  With ``--devices 0,1`` the
source is on the first device and the target on the second; else both are on device 0, whose kernels take turns where
both processes have some.

    python benchmarks --only P7 [--devices 0,1]
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from absent import Absent
from ipc_pair import SLOW, WAYS, pair
from nixl_pair import RAW, KiB, MiB
from nixl_pair import pair as nixl_pair

#: Bytes of memory at either end.
MEMORY = 4 << 30
LENGTHS = [KiB << step for step in range(2, 17, 2)] + [32 * KiB, 1536 * KiB]
#: Bytes of one point of the curve; at most so many segments, at least one.
TOTAL, MOST = 256 * MiB, 32768
#: case, bytes of a segment, segments: the hand-offs, in chunks of 64 MiB.
HAND_OFFS = [("1,024 x 1.5 MiB in 25 chunks", 1536 * KiB, 1024), ("49,152 x 32 KiB in 24 chunks", 32 * KiB, 49152)]
PROGRAMS = (8, 16, 32, 64, 132, 264, 528)


#: Between two devices there are fewer points, and nothing is computed beside.
LENGTHS_BETWEEN = [16 * KiB, 64 * KiB, 1536 * KiB, 64 * MiB]


def points(devices: tuple[int, int]) -> list[tuple[int, int]]:
    """Length and count of each point of the curve."""
    lengths = LENGTHS if devices[0] == devices[1] else LENGTHS_BETWEEN
    return [(length, max(1, min(MOST, TOTAL // length))) for length in sorted(lengths)]


def tell(**found: Any) -> None:
    """What has been measured so far, for whoever waits."""
    print(
        {name: _rounded(one) if isinstance(one, Mapping) else one for name, one in found.items()},
        file=sys.stderr,
        flush=True,
    )


def measure_ipc(pipe: Any, devices: tuple[int, int]) -> None:
    """In a process of its own: everything that uses the UCX of ucxx."""
    curve = []
    with pair(MEMORY, {}, devices) as source:
        offs = []
        for case, length, count in HAND_OFFS:
            ways = source.take(length, count, [way for way in WAYS if count <= SLOW.get(way, count)])
            offs.append({"case": case, "length": length, "count": count, **source.rates(ways, 41), **source.costs()})
            tell(hand_off=offs[-1])
        for length, count in points(devices):
            ways = source.take(length, count, [way for way in WAYS if count <= SLOW.get(way, count)])
            curve.append({"length": length, "count": count, **source.rates(ways, 15), **source.costs(5)})
            tell(point=curve[-1])
        beside = source.beside(PROGRAMS) if devices[0] == devices[1] else []
        for one in beside:
            tell(beside=one)
        figures = dict(source.guard.statistics())
    pipe.send((curve, offs, beside, figures))


def measure_nixl(pipe: Any, devices: tuple[int, int]) -> None:
    """In a process of its own: NIXL brings another UCX."""
    found = []
    with nixl_pair("cuda", MEMORY, {}, devices) as source:
        for length, count in [*points(devices), *((length, count) for _, length, count in HAND_OFFS)]:
            source.take(length, min(count, 8192))
            found.append({"length": length, "count": min(count, 8192), **source.rates([RAW], 3)})
            tell(nixl=found[-1])
    pipe.send(found)


def apart(measure: Any, devices: tuple[int, int]) -> Any:
    """What ``measure`` sends, from a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=measure, args=(theirs, devices))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError as error:
        raise RuntimeError(f"{measure.__name__} failed; what it printed says why") from error
    finally:
        process.join(30)
        process.kill()


def run(devices: tuple[int, int] = (0, 0)) -> list[dict[str, Any]]:
    """Raises :class:`absent.Absent` where there is no such device."""
    try:
        import torch
    except ImportError as error:
        raise Absent(f"no CUDA device: {error}") from error
    if torch.cuda.device_count() <= max(devices):
        raise Absent(f"no CUDA device {max(devices)}: torch sees {torch.cuda.device_count()}")
    where = " (two devices)" if devices[0] != devices[1] else ""
    curve, offs, beside, figures = apart(measure_ipc, devices)
    try:
        if os.environ.get("P7_NIXL") == "0":
            raise RuntimeError("not asked for")
        nixl = {(point["length"], point["count"]): point[RAW] for point in apart(measure_nixl, devices)}
    except RuntimeError:
        nixl = {}  # not installed here, say; the curve is drawn without it
    for point in (*curve, *offs):
        point["nixl"] = nixl.get((point["length"], min(point["count"], 8192)))
    rows = [of_curve(point, where) for point in curve]
    for off in offs:
        ratio = off["kvbaton"] / off["kernel"]
        rows.append(
            {
                "id": "P7", "case": off["case"] + where, "value": round(ratio, 3),
                "unit": "hand-off rate / kernel rate", "target": 0.9, "ok": ratio >= 0.9, "point": _rounded(off),
            }
        )  # fmt: skip
        if off["length"] == 1536 * KiB and not where:
            ratio = off["kvbaton"] / off["copy"]
            rows.append(
                {
                    "id": "P7", "case": off["case"], "value": round(ratio, 4),
                    "unit": "kvbaton rate / the device's own copy", "target": 0.7, "ok": ratio >= 0.7,
                }
            )  # fmt: skip
    rows += [
        {
            "id": "P7", "case": f"{one['beside']} beside copies of {one['programs']} programs{where}",
            "value": round(one["slowdown"], 3), "unit": "its time / its time alone", "target": None, "ok": None,
            "better": "lower", "gb_per_s": round(one["gb_per_s"], 1),
        }
        for one in beside
    ]  # fmt: skip
    rows[0]["connector"] = {name: value for name, value in figures.items() if name.startswith("connector_")}
    return rows


def of_curve(point: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The row of a point; what else was measured there is in it."""
    target = 400 if 16 * KiB <= point["length"] <= 64 * KiB and not where else None
    return {
        "id": "P7", "case": f"{point['count']:,} x {_size(point['length'])}{where}",
        "value": round(point["kvbaton"], 1), "unit": "GB/s", "target": target,
        "ok": None if target is None else point["kvbaton"] >= target, "point": _rounded(point),
    }  # fmt: skip


def _rounded(point: Mapping[str, Any]) -> dict[str, Any]:
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in point.items()}


def _size(length: int) -> str:
    return f"{length / MiB:g} MiB" if length >= MiB else f"{length / KiB:g} KiB"


def picture(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rate over length of segment, a line for each way."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvbaton"
    from matplotlib import pyplot

    curve = [row["point"] for row in rows if "point" in row and "case" not in row["point"]]
    curve.sort(key=lambda point: point["length"])
    lines = {
        "copy": ("k:", "copy within the device"), "kernel": ("k--", "the kernel alone"),
        "kvbaton": ("o-", "kvbaton, cuda_ipc, until received"), "engine": ("s-", "a copy of the driver's each"),
        "ucxx": ("^-", "UCX, a message each"), "nixl": ("v-", "NIXL's own API"),
    }  # fmt: skip
    figure, axes = pyplot.subplots(figsize=(9, 5))
    for way, (style, label) in lines.items():
        drawn = [(point["length"] / KiB, point[way]) for point in curve if point.get(way)]
        if drawn:
            axes.plot(*zip(*drawn, strict=True), style, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length of a segment, KiB")
    axes.set_ylabel("GB/s")
    axes.set_title("between two processes on CUDA devices")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
