"""The state machines as pictures, drawn from the tables that the machines check themselves against.

A phase is a row; an arrow is a legal transition, with the events that make it.  An arrow to the next phase goes
straight down, one that passes phases goes round them on the right.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvbaton.handoff.table import (
    COORDINATOR,
    DESTINATION,
    LEGAL_COORDINATOR,
    LEGAL_DESTINATION,
    LEGAL_SOURCE,
    SOURCE,
    Table,
)

#: File name (without ending), table, legal transitions.
MACHINES: tuple[tuple[str, Table[Any], frozenset[tuple[Any, Any]]], ...] = (
    ("source", SOURCE, LEGAL_SOURCE),
    ("destination", DESTINATION, LEGAL_DESTINATION),
    ("coordinator", COORDINATOR, LEGAL_COORDINATOR),
)
ROW, WIDTH = 1.45, 2.6


def events(table: Table[Any]) -> dict[tuple[str, str], list[str]]:
    """(from, to) to the events that lead there, by name of phase; ``none`` is no record."""
    found: dict[tuple[str, str], list[str]] = {}
    for event, phase, outcomes in table.cells():
        here = "none" if phase is None else phase.name
        for outcome in outcomes:
            if outcome.phase != here:
                names = found.setdefault((here, outcome.phase), [])
                name = event if outcome.verdict == "apply" else f"{event} (violation)"
                if name not in names:
                    names.append(name)
    return found


def _label(events: list[str]) -> str:
    """The first few; the table beside the picture has them all."""
    shown = [event for event in events if not event.endswith("(violation)")] or events
    more = len(events) - len(shown[:3])
    return ", ".join(shown[:3]) + (f" and {more} more" if more else "")


def draw(table: Table[Any], legal: Iterable[tuple[Any, Any]], file: Path) -> None:
    """Write one machine as an SVG.  The same table gives the same bytes."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": table.title, "svg.fonttype": "none", "font.family": "sans-serif"})
    from matplotlib import pyplot
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    phases = [phase.name for phase in table.phases if phase is not None]
    rows = {name: -ROW * (number + 1) for number, name in enumerate(phases)}
    begin, end = 0.0, -ROW * (len(phases) + 1)
    said = events(table)
    moves = [("none" if a is None else a.name, "none" if b is None else b.name) for a, b in legal]

    def place(move: tuple[str, str]) -> tuple[float, float]:
        return (begin if move[0] == "none" else rows[move[0]]), (end if move[1] == "none" else rows[move[1]])

    figure, axes = pyplot.subplots(figsize=(9.6, 1.05 * (len(phases) + 2)))
    for name, y in rows.items():
        box = FancyBboxPatch(
            (-WIDTH / 2, y - 0.26), WIDTH, 0.52, boxstyle="round,pad=0.02,rounding_size=0.14", fc="#e8eef7",
            ec="#3b5b92", lw=1.2,
        )  # fmt: skip
        axes.add_patch(box)
        axes.text(0, y, name, ha="center", va="center", fontsize=10, color="#12233f")
    for y in (begin, end):
        axes.plot([0], [y], marker="o", ms=9, mfc="#3b5b92", mec="#3b5b92")
    axes.text(0.25, begin, "no record", va="center", fontsize=9, color="#555555")
    axes.text(-0.25, end, "no record", va="center", ha="right", fontsize=9, color="#555555")

    column = 0.0
    leaving: dict[str, int] = {}
    entering: dict[str, int] = {}
    for move in sorted(moves, key=lambda move: (place(move)[0] - place(move)[1], -place(move)[0])):
        top, bottom = place(move)
        label = _label(said.get(move, ["a request arrives"]))
        direct = abs(top - bottom - ROW) < 0.01
        if direct or top < bottom:
            axes.add_patch(
                FancyArrowPatch(
                    (0, top - 0.28), (0, bottom + 0.28), arrowstyle="-|>", mutation_scale=11, lw=1.1, color="#3b5b92",
                )
            )  # fmt: skip
            axes.text(
                -0.12, (top + bottom) / 2, textwrap.fill(label, 34), ha="right", va="center", fontsize=7.2,
                color="#333333",
            )  # fmt: skip
            continue
        column += 1
        x = WIDTH / 2 + 3.0 + 0.35 * column
        # arrows that begin in one row lie below each other, and so do their ends
        start = top + 0.16 - 0.22 * leaving.get(move[0], 0)
        stop = bottom + 0.05 - 0.11 * entering.get(move[1], 0)
        leaving[move[0]] = leaving.get(move[0], 0) + 1
        entering[move[1]] = entering.get(move[1], 0) + 1
        path = [(WIDTH / 2 + 0.04, start), (x, start), (x, stop)]
        axes.plot([p[0] for p in path], [p[1] for p in path], color="#8a6d3b", lw=1.0, solid_joinstyle="round")
        target = WIDTH / 2 + 0.04 if move[1] != "none" else 0.14
        axes.add_patch(
            FancyArrowPatch(
                (x, stop), (target, stop), arrowstyle="-|>", mutation_scale=10, lw=1.0,
                color="#8a6d3b",
            )
        )  # fmt: skip
        axes.text(
            WIDTH / 2 + 0.1, start + 0.03, textwrap.fill(label, 60), ha="left", va="bottom", fontsize=7,
            color="#6b5429",
        )  # fmt: skip
    axes.set_xlim(-4.4, WIDTH / 2 + 3.3 + 0.35 * column)
    axes.set_ylim(end - 0.4, begin + 0.4)
    axes.axis("off")
    figure.savefig(file, format="svg", bbox_inches="tight", metadata={"Date": None})
    pyplot.close(figure)


def draw_all(folder: Path) -> list[Path]:
    """Each machine as ``FOLDER/NAME.svg``."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, table, legal in MACHINES:
        draw(table, legal, folder / f"{name}.svg")
        files.append(folder / f"{name}.svg")
    return files
