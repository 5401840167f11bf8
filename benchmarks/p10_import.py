"""P10: what ``import kvbaton`` costs beside ``import numpy``, each in fresh processes, and what it loads.

The processes take turns, so that whatever else the machine does touches both alike; the figures are medians of the
user and system time of the process, less that of one that imports nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from typing import Any

TARGET = 1.5
REPEATS = 15


def run(repeats: int = REPEATS) -> list[dict[str, Any]]:
    """One row: ``id``, ``case``, ``value``, ``unit``, ``target``, ``ok``, and the seconds behind the ratio."""
    statements = {
        "nothing": "pass",
        "numpy": "import numpy",
        "kvbaton": "import kvbaton",
        "runtime": "import kvbaton.runtime",
    }
    seconds: dict[str, list[float]] = {name: [] for name in statements}
    for statement in statements.values():
        _cpu_seconds(statement)  # writes the bytecode
    for _ in range(repeats):
        for name, statement in statements.items():
            seconds[name].append(_cpu_seconds(statement))
    median = {name: statistics.median(values) for name, values in seconds.items()}
    numpy, kvbaton, runtime = (median[name] - median["nothing"] for name in ("numpy", "kvbaton", "runtime"))
    loaded = _third_parties("import kvbaton")
    rows = []
    for case, cost in (("import kvbaton", kvbaton), ("import kvbaton.runtime", runtime)):
        ratio = max(cost, 0.0) / numpy
        checked = case == "import kvbaton"
        rows.append(
            {
                "id": "P10", "case": f"{case} / import numpy", "value": ratio, "unit": "x",
                "target": TARGET if checked else None, "better": "lower", "ok": ratio <= TARGET if checked else None,
                "seconds": cost, "numpy_seconds": numpy, "loads": loaded,
            }
        )  # fmt: skip
    return rows


def _cpu_seconds(statement: str) -> float:
    before = os.times()
    subprocess.run([sys.executable, "-c", statement], check=True)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


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
        print(f"{row['id']}  {row['case']:<36} {row['value']:.2f}  loads {', '.join(row['loads'])}")
