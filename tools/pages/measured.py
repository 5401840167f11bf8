"""The measured figures, from the files that the benchmarks wrote: nothing of this is typed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from tools.pages.borrowed import relinked

from kvbaton.bench.circumstances import in_words

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
#: What each benchmark asks, in the order of the page.
TITLES = {
    "P1": "The loopback against memcpy",
    "P2": "NIXL, host memory, against NIXL's own API",
    "P3": "Planning a prompt of 100,000 tokens' segments",
    "P4": "Whole hand-offs",
    "P5": "The coordinator's messages",
    "P6": "A burst beside a busy main thread",
    "P7": "CUDA IPC",
    "P8": "NIXL, device memory, against NIXL's own API",
    "P9": "What stays behind",
    "P10": "What an import costs",
    "P11": "Routing by prefixes",
}
ABOUT = (
    "What was measured, on which machine and with what, from the files of `benchmarks/results` as they were when this"
    " site was built. `python benchmarks` runs them again. *Disturbed* is the share of the time in which another"
    " program had the processor: where it is not near 0, figures that take time on the wall are lower than the"
    " machine's own."
)


def page(pictures: Path, repository: str = "") -> str:
    """The page, as Markdown; its pictures are copied to ``pictures`` and referred to by file name."""
    parts = [
        "# Performance", "",
        ABOUT, "",
    ]  # fmt: skip
    runs = [
        {"file": file.stem, **json.loads(file.read_text(encoding="utf-8"))} for file in sorted(RESULTS.glob("P*.json"))
    ]
    order = list(TITLES)
    runs.sort(key=lambda run: (order.index(run["id"]) if run["id"] in order else len(order), run["file"]))
    said = ""
    for run in runs:
        if run["id"] != said:
            said = run["id"]
            parts += [f"## {said}: {TITLES.get(said, 'Further figures')}", ""]
        parts += [*_run(run), ""]
    parts += ["## Pictures", ""]
    pictures.mkdir(parents=True, exist_ok=True)
    for file in sorted(RESULTS.glob("*.svg")):
        shutil.copyfile(file, pictures / file.name)
        parts += [f"### {file.stem.replace('-', ' ').replace('_', ' ')}", "", f"![{file.stem}]({file.name})", ""]
    notes = relinked((RESULTS / "notes.md").read_text(encoding="utf-8"), RESULTS, pictures, repository)
    return "\n".join([*parts, notes])


def _run(run: dict[str, Any]) -> list[str]:
    lines = [
        f"`{run['command']}`, {run['date']}, {in_words(run['machine'])}; disturbed {run.get('disturbed', 0):.0%}", "",
        "| case | measured | unit | target | | in figures |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for row in run["rows"]:
        target = row.get("target")
        bound = "" if target is None else f"{'≤' if row.get('better') == 'lower' else '≥'} {target:,g}"
        verdict = {True: "reached", False: "missed"}.get(row.get("ok"), "")
        value = row["value"]
        shown = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
        lines.append(f"| {row['case']} | {shown} | {row['unit']} | {bound} | {verdict} | {_rates(row)} |")
    return lines


#: Key of a row to how its figure is shown.
RATES = {
    "gb_per_s": "{:.3g} GB/s",
    "nixl_gb_per_s": "NIXL {:.3g} GB/s",
    "memcpy_gb_per_s": "memcpy {:.3g} GB/s",
    "device_copy_gb_per_s": "the device's own copy {:,.0f} GB/s",
    "ms": "{:.3g} ms",
    "wall_ms": "{:.3g} ms on the wall",
    "p90_ms": "90% below {:.3g} ms",
}


def _rates(row: dict[str, Any]) -> str:
    return ", ".join(how.format(row[key]) for key, how in RATES.items() if isinstance(row.get(key), (int, float)))
