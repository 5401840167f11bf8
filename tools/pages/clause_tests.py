"""Which tests prove which clause: read off the ``clause`` markers, without importing any test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Where tests stand; the kit's standard tests are part of its package.
PLACES = (
    "tests", "core/tests", "conformance/tests", "conformance/src/kvbaton_conformance/suite", "plugins/*/tests",
    "examples/*/tests",
)  # fmt: skip
ABOUT = (
    "Made from the markers of the tests when this site was built. The words are those of"
    " [the contract](../contracts.md), which is where they are changed. A test under `conformance/src` belongs to"
    " the kit and is run against every transport and engine that is judged; the others run with `pytest`."
)
_CLAUSE = re.compile(r"^- ([CTA]\d+(?:\.\d+)?) (.*)$")
_SECTION = re.compile(r"^## (?:([CTA]\d*) )?(.*)$")


@dataclass(frozen=True, order=True)
class Proof:
    """One test function, and where it stands."""

    path: str
    line: int
    name: str


def proofs_by_clause(root: Path = ROOT) -> dict[str, list[Proof]]:
    """Clause to the tests that are marked with it, in the order of their files.

    Raises ``ValueError`` for a marker whose argument is not literal: nobody could list it.
    """
    found: dict[str, set[Proof]] = {}
    for place in PLACES:
        for folder in sorted(root.glob(place)):
            for file in sorted(folder.rglob("*.py")):
                for test, clauses in _marked(ast.parse(file.read_text(encoding="utf-8")), file, root):
                    for clause in clauses:
                        found.setdefault(clause, set()).add(test)
    return {clause: sorted(tests) for clause, tests in found.items()}


def _marked(tree: ast.Module, file: Path, root: Path) -> Iterator[tuple[Proof, set[str]]]:
    path = file.relative_to(root).as_posix()
    whole = {clause for node in tree.body if isinstance(node, ast.Assign) for clause in _clauses([node.value], path)}

    def inside(body: list[ast.stmt], prefix: str, given: set[str]) -> Iterator[tuple[Proof, set[str]]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{node.name}.", given | _clauses(node.decorator_list, path))
            elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name.startswith("test_"):
                clauses = given | _clauses(node.decorator_list, path)
                if clauses:
                    yield Proof(path, node.lineno, prefix + node.name), clauses

    yield from inside(tree.body, "", whole)


def _clauses(nodes: list[ast.expr], path: str) -> set[str]:
    found: set[str] = set()
    for outer in nodes:
        for node in ast.walk(outer):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "clause":
                for argument in node.args:
                    if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                        raise ValueError(f"{path}:{node.lineno}: a clause marker whose argument is not literal")
                    found.add(argument.value)
    return found


def page(root: Path = ROOT) -> str:
    """The contract with each clause's tests under it, as Markdown.  ``docs/contracts.md`` is where the words stand."""
    tests = proofs_by_clause(root)
    clauses = dict(_published(root))
    proved = sum(1 for clause in clauses if tests.get(clause))
    distinct = {test for found in tests.values() for test in found}
    parts = [
        "# Every clause and the tests that prove it", "",
        ABOUT, "",
        f"{len(distinct)} tests name a clause; {proved} of {len(clauses)} clauses are named by at least one.", "",
    ]  # fmt: skip
    section = ""
    for clause, (heading, words) in clauses.items():
        if heading != section:
            section = heading
            parts += [f"## {section}", ""]
        found = tests.get(clause, [])
        parts += [f"(clause-{clause})=", f"### {clause}", "", words, "", *_listed(found), ""]
    return "\n".join(parts)


def _listed(found: list[Proof]) -> list[str]:
    if not found:
        return ["*No test names it.*"]
    lines = ["<details>", f"<summary>{len(found)} test{'s' if len(found) != 1 else ''}</summary>", ""]
    for path in dict.fromkeys(test.path for test in found):
        names = ", ".join(f"`{test.name}`" for test in found if test.path == path)
        lines.append(f"- `{path}`: {names}")
    return [*lines, "", "</details>"]


def _published(root: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    """Each clause with its section's heading and its words, in the order of the contract."""
    heading, milestones = "", False
    for line in (root / "docs" / "contracts.md").read_text(encoding="utf-8").splitlines():
        if section := _SECTION.match(line):
            heading, milestones = line.removeprefix("## "), section[1] == "C4"
        elif milestones and line.startswith("| milestone"):
            milestones = False
            yield "C4", (heading, "The table of milestones: none of them stands in for another.")
        elif clause := _CLAUSE.match(line):
            yield clause[1], (heading, clause[2])
