"""Writes the tables of ``docs/metrics.md`` between its marks, from ``kvbaton.observe.catalogue``, and the dashboard.

python tools/metrics_page.py
python tools/metrics_page.py --check   whether both are as they would be written
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kvbaton.observe.catalogue import PREFIX, SECTIONS
from kvbaton.observe.dashboard import dashboard

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "metrics.md"
DASHBOARD = DOCS / "grafana-dashboard.json"
BEGIN, END = "<!-- tables: python tools/metrics_page.py -->\n", "<!-- end of the tables -->\n"


def tables() -> str:
    """Every metric, by section."""
    lines: list[str] = []
    for section, figures in SECTIONS.items():
        lines += [f"### {section}", "", "| metric | labels | what it is | when it moves |", "| --- | --- | --- | --- |"]
        for figure in figures:
            labels = ", ".join(f"`{label}`" for label in figure.labels) or "none"
            name = f"`{PREFIX}{figure.name}` ({figure.kind})"
            lines.append(f"| {name} | {labels} | {figure.text} | {figure.advice} |")
        lines.append("")
    return "\n".join(lines)


def page(written: str) -> str:
    """The page with its tables as they should be."""
    before, _, rest = written.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


def panels() -> str:
    """The dashboard's file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    wanted = {PAGE: page(PAGE.read_text(encoding="utf-8")), DASHBOARD: panels()}
    if "--check" in sys.argv[1:]:
        old = [path for path, text in wanted.items() if path.read_text(encoding="utf-8") != text]
        sys.exit(f"old: {', '.join(path.name for path in old)}; run python tools/metrics_page.py" if old else 0)
    for path, text in wanted.items():
        path.write_text(text, encoding="utf-8")
