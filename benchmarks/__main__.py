"""Every benchmark by one command: a table, and with ``--save`` the files in ``benchmarks/results/``.

    python benchmarks                     run all
    python benchmarks --only P3,P10       some of them
    python benchmarks --save              also write results.json, results.md and results.svg

A benchmark is a module ``pN_name.py`` beside this file with ``run() -> list of rows``; a row has ``id``, ``case``,
``value``,
``unit``, ``target``, ``ok`` (None: no target), and ``better`` (``higher`` where it is not stated).  Figures are
ratios measured side by side in one run.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
Row = dict[str, Any]


def benchmarks() -> dict[str, Path]:
    """Id to file, in the order of the numbers."""
    found = {}
    for file in HERE.glob("p*_*.py"):
        match = re.match(r"p(\d+)_", file.name)
        if match:
            found[f"P{match[1]}"] = file
    return dict(sorted(found.items(), key=lambda item: int(item[0][1:])))


def run(file: Path) -> list[Row]:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    rows: list[Row] = module.run()
    return rows


def machine() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [
            line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")
        ]
        cpu = names[0] if names else cpu
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "load before": [round(load, 2) for load in os.getloadavg()],
        "python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "msgspec", "kvbaton")},
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def cells(row: Row) -> list[str]:
    lower = row.get("better") == "lower"
    target = "" if row["target"] is None else f"{'<=' if lower else '>='} {row['target']:g}"
    verdict = {True: "reached", False: "missed", None: ""}[row["ok"]]
    return [
        row["id"],
        row["case"],
        f"{row['value']:,.3g}" if row["value"] < 1000 else f"{row['value']:,.0f}",
        row["unit"],
        target,
        verdict,
    ]


HEADS = ["id", "case", "value", "unit", "target", ""]


def markdown(rows: list[Row], facts: dict[str, Any]) -> str:
    lines = [f"# Benchmarks\n\n`python benchmarks --save` on {', '.join(f'{k} {v}' for k, v in facts.items())}.\n"]
    lines += [f"| {' | '.join(HEADS)} |", "| --- " * len(HEADS) + "|"]
    lines += [f"| {' | '.join(cells(row))} |" for row in rows]
    return "\n".join(lines) + "\n"


def plot(rows: list[Row], path: Path) -> None:
    """Each measure with a target, as a multiple of it: 1 is reached, to the right is better."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["target"]]
    scores = [
        row["target"] / row["value"] if row.get("better") == "lower" else row["value"] / row["target"] for row in shown
    ]
    figure, axes = pyplot.subplots(figsize=(9, 0.4 * len(shown) + 1))
    colours = ["tab:green" if row["ok"] else "tab:orange" for row in shown]
    axes.barh([f"{row['id']}  {row['case']}" for row in shown], scores, color=colours)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("multiple of the target (right is better)")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    known = benchmarks()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="IDS", help=f"comma-separated, out of {', '.join(known)}")
    parser.add_argument("--save", action="store_true", help="write the files in benchmarks/results/")
    arguments = parser.parse_args()
    chosen = [name.strip().upper() for name in arguments.only.split(",")] if arguments.only else list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    facts, rows = machine(), []
    console, errors = Console(), Console(stderr=True)
    for number, name in enumerate(chosen, 1):
        errors.print(f"[{number}/{len(chosen)}] {name}: {known[name].stem}", markup=False)
        rows += run(known[name])
    table = Table(*HEADS, title=f"{facts['cpu']}, {facts['cores']} cores, load {facts['load before'][0]}")
    for row in rows:
        table.add_row(*cells(row))
    console.print(table)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "results.json").write_text(json.dumps({"machine": facts, "rows": rows}, indent=1) + "\n")
        (RESULTS / "results.md").write_text(markdown(rows, facts))
        plot(rows, RESULTS / "results.svg")
    return 0


if __name__ == "__main__":
    sys.exit(main())
