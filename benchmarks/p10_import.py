"""P10: what ``import kvbaton`` costs beside ``import numpy``, each in fresh processes, and what it loads.

The package's names are loaded on first use, so that the bare import is nearly nothing; ``from kvbaton import
KVGeometry, Segments`` is the part that needs numpy, and ``kvbaton.runtime`` what an application needs (settings,
plugins and hooks included).  The processes take turns, so that whatever else the machine does touches all alike; the
figures are medians of the user and system time of a process, less that of one that imports nothing.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from typing import Any

TARGET = 1.5
REPEATS = 15

NOTHING, NUMPY = "pass", "import numpy"
#: statement, target
CASES = [
    ("import kvbaton", TARGET),
    ("from kvbaton import KVGeometry, Segments", TARGET),
    ("import kvbaton.runtime", None),
]


def run(repeats: int = REPEATS) -> list[dict[str, Any]]:
    """A row per statement: ``id``, ``case``, ``value``, ``unit``, ``target``, ``ok``, the times, what it loads."""
    statements = [NOTHING, NUMPY, *(statement for statement, _ in CASES)]
    seconds: dict[str, list[float]] = {statement: [] for statement in statements}
    for statement in statements:
        _cpu_seconds(statement)  # writes the bytecode
    for _ in range(repeats):
        for statement in statements:
            seconds[statement].append(_cpu_seconds(statement))
    median = {statement: statistics.median(values) for statement, values in seconds.items()}
    numpy = median[NUMPY] - median[NOTHING]
    rows = []
    for statement, target in CASES:
        cost = max(median[statement] - median[NOTHING], 0.0)
        ratio = cost / numpy
        rows.append(
            {
                "id": "P10", "case": statement, "value": round(ratio, 3), "unit": "import numpy", "target": target,
                "better": "lower", "ok": None if target is None else ratio <= target,
                "ms": round(cost * 1e3, 2), "numpy_ms": round(numpy * 1e3, 2), "loads": _third_parties(statement),
            }
        )  # fmt: skip
    return rows


def _cpu_seconds(statement: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def _third_parties(statement: str) -> list[str]:
    """Top-level modules that ``statement`` loads from outside the standard library."""
    code = f"""
import sys
before = set(sys.modules)
{statement}
import json
names = {{name.partition('.')[0] for name in set(sys.modules) - before}}
print(json.dumps(sorted(name for name in names if name not in sys.stdlib_module_names and not name.startswith('_'))))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names: list[str] = json.loads(done.stdout)
    return names


if __name__ == "__main__":
    for row in run():
        print(f"{row['id']}  {row['case']:<42} {row['value']:.2f}  loads {', '.join(row['loads'])}")
