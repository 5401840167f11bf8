"""The clauses that code and tests cite are those that docs/contracts.md publishes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from .workspace import ROOT, distributions, python_files

CLAUSE = re.compile(r"\b[CTA]\d+(?:\.\d+)?\b")
PUBLISHED = re.compile(r"^- ([CTA]\d+(?:\.\d+)?) ", re.MULTILINE)
# The table of milestones is a clause as well; it goes by the name of its section.
MILESTONES = re.compile(r"^## (C4) .*\n(?:[^#\n].*\n|\n)*\| milestone \|", re.MULTILINE)
# What a docs reader knows as the clauses of the first edition: none of them may vanish.
FIRST_EDITION = {
    **{f"C{section}": count for section, count in enumerate((5, 7, 7, 2, 4, 7, 4, 5, 4), start=1)},
}


def published() -> list[str]:
    text = (ROOT / "docs" / "contracts.md").read_text()
    return [*PUBLISHED.findall(text), *MILESTONES.findall(text)]


def marked(file: Path) -> Iterator[tuple[int, str]]:
    """Line and argument of each ``clause(...)`` mark in a file."""
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "clause":
            for argument in node.args:
                yield node.lineno, str(ast.literal_eval(argument))


def test_every_published_clause_has_one_place() -> None:
    clauses = published()
    assert len(clauses) == len(set(clauses))


def test_no_clause_of_the_first_edition_is_missing() -> None:
    first = {f"{section}.{number}" for section, count in FIRST_EDITION.items() for number in range(1, count + 1)}
    first |= {f"T{number}" for number in range(1, 14)} | {f"A{number}" for number in range(1, 4)}
    assert first <= set(published())


def test_every_marked_clause_is_published() -> None:
    clauses = set(published())
    folders = [ROOT / "tests", *(folder for d in distributions() for folder in (d.folder / "tests", d.source))]
    unknown = [
        f"{file.relative_to(ROOT)}:{line} marks {clause}"
        for file in python_files(*(folder for folder in folders if folder.is_dir()))
        for line, clause in marked(file)
        if clause not in clauses
    ]
    assert not unknown, unknown


def test_every_clause_cited_in_code_is_published() -> None:
    known = set(published())
    known |= {clause.split(".")[0] for clause in known}
    unknown = [
        f"{file.relative_to(ROOT)}:{number} cites {clause}"
        for distribution in distributions()
        for file in python_files(distribution.source)
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if "#" in line
        for clause in CLAUSE.findall(line.split("#", 1)[1])
        if clause not in known
    ]
    assert not unknown, unknown
