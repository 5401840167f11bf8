"""Every benchmark by one command: a table, and with ``--save`` the files in ``benchmarks/results/``.

    python benchmarks                     run all
    python benchmarks --only P3,P10       some of them
    python benchmarks --json PATH         also write what this run measured
    python benchmarks --attempts 5        on a machine that others use: keep each benchmark's least disturbed run
    python benchmarks --save              also keep it: results/PN.json, and results.md and results.svg over all of them
    python benchmarks --devices 0,1       CUDA devices of source and target, for those that want to know; 0,0 by default

A benchmark is a module ``pN_name.py`` beside this file with ``run() -> list of rows``; a row has ``id``, ``case``,
``value``, ``unit``, ``target``, ``ok`` (None: no target), and ``better`` (``higher`` where it is not stated), and
whatever else stands behind the value.  It may draw a picture of its own, ``picture(rows, path)``, which ``--save``
keeps as ``results/FILE.svg``, or ``FILE-I-J.svg`` where devices were named, and shows in ``results.md``.

One that cannot run here raises: it is reported, the others run, and the exit status is 1; or 3 where all that could
not be measured wants something that is not here, such as a CUDA device.  A target that was missed changes no exit
status: a figure is no test.

Each result keeps the machine, the versions and the command, because some need another machine than others; and how
disturbed it was: the load, and the share of the time for which this process was ready to run and another one had the
processor.  Of several attempts the one with the smallest share is kept, whatever it measured.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import inspect
import json
import os
import re
import shlex
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from absent import Absent
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvbaton.bench.circumstances import in_words, machine, versions

HERE = Path(__file__).parent
RESULTS = HERE / "results"
HEADS = ("id", "case", "value", "unit", "target", "")
Row = dict[str, Any]
#: What one benchmark gave: its ``rows``, and ``id``, ``command``, ``date``, ``machine``, ``versions``, ``load``,
#: ``disturbed``, ``seconds``.
Result = dict[str, Any]
#: A run that waited less than this share of its time needs no further attempt.
QUIET = 0.02


def benchmarks() -> dict[str, Path]:
    """Id to file, in the order of the numbers."""
    found = {}
    for file in HERE.glob("p*_*.py"):
        match = re.match(r"p(\d+)_", file.name)
        if match:
            found[f"P{match[1]}"] = file
    return dict(sorted(found.items(), key=lambda item: _number(item[0])))


def _name(result: Result) -> str:
    """Its id, and on what it was measured where there is more than one."""
    return str(result.get("file", result["id"]))


def _number(name: str) -> int:
    return int(name[1:])


def measure(name: str, file: Path, command: str, devices: tuple[int, int]) -> Result:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    began, before, delay = time.perf_counter(), os.getloadavg()[0], run_delay()
    wants = "devices" in inspect.signature(module.run).parameters
    rows: list[Row] = module.run(devices=devices) if wants else module.run()
    seconds = time.perf_counter() - began
    return {
        "id": name,
        "file": f"{name}-{devices[0]}-{devices[1]}" if wants and devices != (0, 0) else name,
        "command": command,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": machine(),
        "versions": versions(),
        "load": [round(load, 1) for load in (before, os.getloadavg()[0])],
        "disturbed": None if delay is None else round(((run_delay() or 0.0) - delay) / seconds, 3),
        "seconds": round(seconds, 1),
        "rows": rows,
    }


def least_disturbed(attempts: int, name: str, file: Path, command: str, devices: tuple[int, int]) -> Result:
    best = measure(name, file, command, devices)
    for _ in range(attempts - 1):
        if best["disturbed"] is None or best["disturbed"] < QUIET:
            break
        best = min(best, measure(name, file, command, devices), key=lambda result: result["disturbed"])
    return best


def run_delay() -> float | None:
    """Seconds for which this thread was ready and had no processor, so far; None where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None


# -- showing -----------------------------------------------------------------------------------------------------------


def cells(row: Row) -> list[str]:
    target = "" if row["target"] is None else f"{'<=' if _lower(row) else '>='} {row['target']:,g}"
    verdict = {True: "reached", False: "missed", None: ""}[row["ok"]]
    value = f"{row['value']:,.3g}" if row["value"] < 1000 else f"{row['value']:,.0f}"
    return [row["id"], row["case"], value, row["unit"], target, verdict]


def _lower(row: Row) -> bool:
    return row.get("better") == "lower"


def show(results: list[Result], console: Console) -> None:
    table = Table(*HEADS, title=f"{in_words(machine())}, load {os.getloadavg()[0]:.1f}")
    for result in results:
        for row in result["rows"]:
            table.add_row(*map(Text, cells(row)), style="yellow" if row["ok"] is False else None)
    console.print(table)


def markdown(results: list[Result]) -> str:
    """One table; below it, how each benchmark was run."""
    lines = ["# Benchmarks", "", "Figures are ratios or medians of one run; each benchmark's own file says how."]
    lines += ["`P6-two-cores` is P6 on two processors, `P7-0-1` is P7 between the CUDA devices 0 and 1.", ""]
    lines += [f"| {' | '.join(HEADS)} |", "| --- " * len(HEADS) + "|"]
    rows = [[_name(result), *cells(row)[1:]] for result in results for row in result["rows"]]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    lines += [
        "",
        "*Disturbed*: the share of the time in which another program had the processor.  Where it is not near 0,",
    ]
    lines += [
        "figures that take time on the wall, P1's above all, are lower than the machine's own.  Targets are stated"
    ]
    lines += ["for a machine that does nothing else."]
    lines += [
        "",
        "![Each figure as a multiple of its target](results.svg)",
        "",
        *notes(),
        "| id | run | on | load | disturbed | with |",
    ]
    lines += ["| --- " * 6 + "|"]
    for result in results:
        load, share = result["load"], result["disturbed"]
        of = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
        lines.append(
            f"| {_name(result)} | `{result['command']}`, {result['date']} | {in_words(result['machine'])} |"
            f" {load[0]} to {load[1]} | {'' if share is None else f'{share:.0%}'} | {of} |"
        )
    return "\n".join(lines) + "\n"


def notes() -> list[str]:
    """What was found out besides the figures, and the benchmarks' own pictures."""
    lines = (RESULTS / "notes.md").read_text().splitlines() if (RESULTS / "notes.md").exists() else []
    pictures = [f"![{file.stem}]({file.name})" for file in sorted(RESULTS.glob("p*.svg"))]
    return [line for part in (lines, pictures) if part for line in (*part, "")]


def plot(results: list[Result], path: Path) -> None:
    """Each measure with a target, as a multiple of it: 1 is reached, to the right is better."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvbaton"  # the same figures, the same file
    from matplotlib import pyplot

    shown = [
        row | {"id": _name(result)} for result in results for row in result["rows"] if row["target"] and row["value"]
    ]
    scores = [row["target"] / row["value"] if _lower(row) else row["value"] / row["target"] for row in shown]
    figure, axes = pyplot.subplots(figsize=(9, 0.3 * len(shown) + 1))
    colours = ["tab:green" if row["ok"] else "tab:orange" for row in shown]
    axes.barh([f"{row['id']}  {row['case']} [{row['unit']}]" for row in shown], scores, color=colours)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    axes.set_xlabel("multiple of the target (1: reached; further right: better)")
    axes.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def keep(results: list[Result]) -> None:
    RESULTS.mkdir(exist_ok=True)
    files = benchmarks()
    for result in results:
        module = sys.modules[files[result["id"]].stem]
        if hasattr(module, "picture"):
            devices = result["file"].removeprefix(result["id"])  # "", or "-0-1"
            module.picture(result["rows"], RESULTS / f"{module.__name__}{devices}.svg")
        (RESULTS / f"{result['file']}.json").write_text(json.dumps(result, indent=1) + "\n")
    kept = [json.loads(file.read_text()) for file in RESULTS.glob("P*.json")]
    kept.sort(key=lambda result: (_number(result["id"]), _name(result)))
    (RESULTS / "results.md").write_text(markdown(kept))
    plot(kept, RESULTS / "results.svg")


def main() -> int:
    known = benchmarks()
    parser = argparse.ArgumentParser(
        prog="python benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="IDS", help=f"comma-separated, out of {', '.join(known)}")
    parser.add_argument("--json", metavar="PATH", type=Path, help="write what this run measured there")
    parser.add_argument("--attempts", metavar="N", type=int, default=1, help="keep the least disturbed of up to N runs")
    parser.add_argument("--devices", metavar="I,J", default="0,0", help="CUDA devices of source and target")
    parser.add_argument("--save", action="store_true", help="keep it in benchmarks/results/")
    arguments = parser.parse_args()
    chosen = [name.strip().upper() for name in arguments.only.split(",")] if arguments.only else list(known)
    unknown = [name for name in chosen if name not in known]
    if unknown:
        parser.error(f"no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    only = ["--only", ",".join(chosen)] if arguments.only else []
    several = ["--attempts", str(arguments.attempts)] if arguments.attempts > 1 else []
    on = ["--devices", arguments.devices] if arguments.devices != "0,0" else []
    try:
        first, second = map(int, arguments.devices.split(","))
    except ValueError:
        parser.error(f"--devices {arguments.devices}: two numbers are wanted, as in 0,1")
    command = shlex.join(["python", "benchmarks", *only, *several, *on])
    console, errors = Console(), Console(stderr=True)
    results: list[Result] = []
    failed, absent = [], []
    for number, name in enumerate(chosen, 1):
        errors.print(f"[{number}/{len(chosen)}] {name}: {known[name].stem} ...", markup=False, highlight=False)
        try:
            results.append(least_disturbed(arguments.attempts, name, known[name], command, (first, second)))
        except Absent as reason:
            absent.append(name)
            errors.print(f"{name}: {reason}", markup=False, highlight=False)
        except Exception:  # the others still run
            failed.append(name)
            traceback.print_exc()
    show(results, console)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.save:
        keep(results)
    if failed:
        errors.print(f"could not be measured: {', '.join(failed)} (see above)", style="red")
    return 1 if failed else 3 if absent else 0


if __name__ == "__main__":
    sys.exit(main())
