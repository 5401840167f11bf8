"""``docs/field-failures.md`` names a test for each failure, and each of them exists."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from .test_contract_clauses import CLAUSE, published
from .workspace import ROOT

PAGE = ROOT / "docs" / "field-failures.md"
ITEMS = set(range(1, 36))
_ROW = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)]+)\)")


@dataclass(frozen=True)
class Row:
    number: int
    what: str
    clauses: str
    tests: tuple[tuple[str, str], ...]


def rows() -> list[Row]:
    found = _ROW.findall(PAGE.read_text(encoding="utf-8"))
    return [Row(int(number), what, clauses, tuple(_LINK.findall(tests))) for number, what, clauses, tests in found]


@cache
def parsed(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8"), str(file)).body


def exists(test: str) -> bool:
    """Whether ``file::function`` or ``file::Class.function`` is a test."""
    path, _, name = test.partition("::")
    file = ROOT / path
    if not file.is_file():
        return False
    body = parsed(file)
    *classes, function = name.split(".")
    for wanted in classes:
        body = [item for node in body if isinstance(node, ast.ClassDef) and node.name == wanted for item in node.body]
    return function.startswith("test_") and any(
        isinstance(node, ast.FunctionDef) and node.name == function for node in body
    )


def test_every_failure_has_one_row() -> None:
    assert [row.number for row in rows()] == sorted(ITEMS)


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row.number))
def test_a_row_names_clauses_and_tests_that_exist(row: Row) -> None:
    assert row.tests, "a test is named"
    for test, target in row.tests:
        assert exists(test), f"{test} is not there"
        assert target == "../" + test.partition("::")[0], f"the link of {test} leads elsewhere"
    cited = CLAUSE.findall(row.clauses)
    assert cited, "a clause is named"
    assert not set(cited) - set(published())


def test_what_is_not_there_is_noticed() -> None:
    kit = "conformance/src/kvbaton_conformance/suite/handoff/lifetime.py"
    assert exists(f"{kit}::Lifetime.test_nothing_is_submitted_after_a_cancel")
    for wrong in (
        f"{kit}::test_nothing_is_submitted_after_a_cancel", f"{kit}::Lifetime.test_nothing",
        f"{kit}::Nothing.test_nothing_is_submitted_after_a_cancel", f"{kit}::name_of", "tests/nowhere.py::test_it",
    ):  # fmt: skip
        assert not exists(wrong), wrong
