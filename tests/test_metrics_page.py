"""``docs/metrics.md`` and the dashboard are what their code writes, and speak of metrics that there are."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator

from kvbaton.observe.catalogue import FIGURES, PREFIX
from kvbaton.observe.dashboard import ROWS

from .workspace import ROOT

PAGE, DASHBOARD = ROOT / "docs" / "metrics.md", ROOT / "docs" / "grafana-dashboard.json"
#: A metric with what stands in braces behind it.
NAMED = re.compile(rf"\b{PREFIX}(\w+)(?:\{{([^}}]*)\}})?")


def named(text: str) -> Iterator[tuple[str, set[str]]]:
    """Every metric that a text names, without a histogram's suffix, and the labels it is narrowed by."""
    for name, labels in NAMED.findall(text):
        family = re.sub(r"_(bucket|sum|count)$", "", name)
        figure = FIGURES.get(family)
        yield (family if figure and figure.kind == "histogram" else name), set(re.findall(r"(\w+)=", labels))


def test_page_and_dashboard_are_what_their_code_writes() -> None:
    process = subprocess.run(
        [sys.executable, ROOT / "tools" / "metrics_page.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 0, process.stderr
    written = PAGE.read_text(encoding="utf-8")
    assert all(f"`{PREFIX}{name}` ({figure.kind})" in written for name, figure in FIGURES.items())


def test_the_page_names_no_metric_that_is_not_there() -> None:
    for name, labels in named(PAGE.read_text(encoding="utf-8")):
        assert name in FIGURES, name
        assert labels <= set(FIGURES[name].labels), (name, labels)


def test_every_expression_of_the_dashboard_is_over_metrics_that_there_are() -> None:
    shown: set[str] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel.get("targets", ()):
            expression, legend = target["expr"], target["legendFormat"]
            over = list(named(expression))
            assert over, expression
            available = {"le"}
            for name, narrowed in over:
                assert name in FIGURES, f"{panel['title']}: {expression}"
                assert narrowed <= set(FIGURES[name].labels), expression
                available |= set(FIGURES[name].labels)
                shown.add(name)
                if FIGURES[name].kind == "counter" and "rate(" not in expression:
                    assert panel["type"] == "stat" or "Since start" in panel["description"], expression
            grouped = set(re.findall(r"\w+", " ".join(re.findall(r"\b(?:by|on|ignoring) \(([^)]*)\)", expression))))
            assert grouped <= available, expression
            used = set(re.findall(r"{{(\w+)}}", legend))
            kept = set.union(*(set(FIGURES[name].labels) for name, _ in over))
            assert used <= (grouped - {"le"} if re.search(r"\bby \(", expression) else kept), (legend, expression)
    # what is nowhere to be seen would be looked for in vain
    assert set(FIGURES) - shown <= {"final_slots_free", "inflight_segments", "inflight_chunks", "stage_transfers",
                                    "receipts_total", "credit_returns_repeated_total"}  # fmt: skip


def test_no_two_panels_of_the_dashboard_cover_each_other() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
    assert sum(len(panels) for panels in ROWS.values()) > 20
