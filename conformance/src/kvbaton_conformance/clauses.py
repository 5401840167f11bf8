"""The clauses of the contract, and the one way in which a test of the kit says that one is broken.

The texts are those of ``docs/contracts.md``, taken over into ``contract.json`` by::

    python -m kvbaton_conformance.clauses docs/contracts.md
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path

#: Clauses that no capability and no known environment can gate away: each must have run wherever the level is run.
MANDATORY: Mapping[str, tuple[str, ...]] = {
    "connector": ("T1", "T2", "T3", "T4", "T5", "T6", "T7", "T8", "T9", "T10", "T11", "T12", "T13", "C1.4", "C3.6"),
    "handoff": ("C1.2", "C4.2", "C5.1", "C5.2", "C6.1", "C7.1", "C7.3"),
    "engine": ("C2.2", "C2.7", "C3.2", "C3.4", "C5.1", "C8.1", "C8.3", "C8.4", "A1", "A2"),
    "guard": ("T2", "T6", "T8", "T11", "T12"),
}

_SECTION = re.compile(r"^## (C\d+|T|A) (.*)$")
_CLAUSE = re.compile(r"^- ([CTA]\d+(?:\.\d+)?) (.*)$")
_LEADING = re.compile(r"^[CTA]\d+(?:\.\d+)?(?=\b)")


@dataclass(frozen=True)
class Clause:
    """One clause: its identifier, the title of its section, and what it says (Markdown)."""

    id: str
    section: str
    text: str


def parse(contract: str) -> dict[str, Clause]:
    """The clauses in the text of ``docs/contracts.md``, in its order.

    A section whose table is its clause (the milestones) goes by the section's own identifier.
    """
    found: dict[str, Clause] = {}
    section, title, introduction, table = "", "", [""], False
    for line in contract.splitlines():
        if heading := _SECTION.match(line):
            section, title = heading.groups()
            introduction, table = [], False
        elif clause := _CLAUSE.match(line):
            if table and section not in found:
                found[section] = Clause(section, title, "\n".join(introduction).strip())
            found[clause[1]] = Clause(clause[1], title, clause[2])
        elif section and not line.startswith("## "):
            introduction.append(line)
            table = table or line.startswith("| ")
    return found


@cache
def clauses() -> Mapping[str, Clause]:
    """Every clause of the contract that this kit was made for, by identifier."""
    data = json.loads(files("kvbaton_conformance").joinpath("contract.json").read_text(encoding="utf-8"))
    return {entry["id"]: Clause(**entry) for entry in data}


def leading_clause(message: str) -> str | None:
    """The clause that a message begins with, if it does and there is one of that name."""
    found = _LEADING.match(message)
    return found[0] if found and found[0] in clauses() else None


class ClauseBroken(AssertionError):
    """A clause does not hold.  The message begins with the clause and can be acted on by somebody who has not seen the
    test: what was expected, what was seen, where to look.
    """

    def __init__(self, clause: str, what: str, *, expected: object = "", seen: object = "", look: str = "") -> None:
        self.clause = clause
        self.what = what
        self.expected = str(expected)
        self.seen = str(seen)
        self.look = look
        lines = [f"{clause}: {what}"]
        for title, text in (("expected", self.expected), ("seen", self.seen), ("where to look", look)):
            if text:
                lines.append(f"  {title}: {text}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[object, ...]:
        return _broken, (self.clause, self.what, self.expected, self.seen, self.look)


def _broken(clause: str, what: str, expected: str, seen: str, look: str) -> ClauseBroken:
    return ClauseBroken(clause, what, expected=expected, seen=seen, look=look)


def require(holds: object, clause: str, what: str, *, expected: object = "", seen: object = "", look: str = "") -> None:
    """Raise :class:`ClauseBroken` unless ``holds``.

    ``what``: the fault in one sentence, as if it were there.  ``look``: where in a connector such a fault usually is.
    """
    if not holds:
        raise ClauseBroken(clause, what, expected=expected, seen=seen, look=look)


def main() -> None:
    """Write ``contract.json`` beside this module from the contract that is named."""
    (source,) = sys.argv[1:]
    entries = [asdict(clause) for clause in parse(Path(source).read_text(encoding="utf-8")).values()]
    target = Path(__file__).with_name("contract.json")
    target.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
