"""Write the generated part of docs/protocol.md: the messages and the state tables, from the code that enforces them.

python tools/protocol_tables.py            rewrite the page in place
python tools/protocol_tables.py --check    exit with status 1 if it is not up to date
"""

from __future__ import annotations

import sys
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
from kvbaton.messages import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "protocol.md"
BEGIN, END = "<!-- generated: begin -->", "<!-- generated: end -->"


def rewritten(page: str) -> str:
    """The page with its generated part made anew."""
    head, _, rest = page.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n\n{generated()}\n{END}{tail}"


def generated() -> str:
    parts = ["## Messages", ""]
    for family, kinds in FAMILIES.items():
        parts += [f"### The {family} family", "", "| message | fields | meaning |", "| --- | --- | --- |"]
        for kind in kinds:
            fields = ", ".join(kind.__struct_fields__) or "-"
            meaning = " ".join((kind.__doc__ or "").split("\n\n")[0].split()).replace("``", "`").replace("|", "\\|")
            parts.append(f"| {kind.__name__} | {fields} | {meaning} |")
        parts.append("")
    tables = ((SOURCE, LEGAL_SOURCE), (DESTINATION, LEGAL_DESTINATION), (COORDINATOR, LEGAL_COORDINATOR))
    for table, legal in tables:
        parts += [f"## {table.title}", "", *_diagram(legal), "", *_rows(table), ""]
    return "\n".join(parts)


def _diagram(legal: Any) -> list[str]:
    """A Mermaid state diagram of the legal transitions."""

    def name(phase: Any) -> str:
        return "[*]" if phase is None else str(phase.name)

    arrows = sorted(f"    {name(before)} --> {name(after)}" for before, after in legal)
    return ["```mermaid", "stateDiagram-v2", *arrows, "```"]


def _rows(table: Table[Any]) -> list[str]:
    heads = ["no record" if phase is None else phase.name for phase in table.phases]
    lines = [f"| event | {' | '.join(heads)} |", "| --- " * (len(heads) + 1) + "|"]
    for event, cells in table.rows.items():
        lines.append(f"| {event} | {' | '.join(cell.replace(' | ', ' or ') for cell in cells)} |")
    return lines


def main() -> int:
    page = PAGE.read_text()
    new = rewritten(page)
    if "--check" in sys.argv:
        if new != page:
            print(f"{PAGE.name} is not up to date: python tools/protocol_tables.py")
        return int(new != page)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())
