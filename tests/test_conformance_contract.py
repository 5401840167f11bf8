"""The conformance kit speaks of the clauses that docs/contracts.md publishes, in its words."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from kvbaton_conformance.clauses import MANDATORY, clauses, parse
from kvbaton_conformance.plugin import standard_tests
from kvbaton_conformance.suite.levels import ConnectorConformance

from .test_contract_clauses import published
from .workspace import ROOT


def test_the_kit_carries_the_texts_of_the_contract() -> None:
    contract = parse((ROOT / "docs" / "contracts.md").read_text())
    renew = "python -m kvbaton_conformance.clauses docs/contracts.md"
    assert [asdict(clause) for clause in clauses().values()] == [asdict(clause) for clause in contract.values()], renew
    assert sorted(contract) == sorted(published())


def test_mandatory_clauses_are_published() -> None:
    assert {clause for level in MANDATORY.values() for clause in level} <= set(clauses())


def test_every_standard_test_says_which_clauses_it_proves_and_what_it_does() -> None:
    for name, owner in standard_tests(ConnectorConformance).items():
        test = getattr(owner, name)
        marked = [id for mark in getattr(test, "pytestmark", ()) if mark.name == "clause" for id in mark.args]
        assert marked, f"{owner.__module__}: {name} names no clause"
        assert set(marked) <= set(clauses()), f"{owner.__module__}: {name}"
        assert test.__doc__, f"{owner.__module__}: {name} has no docstring"


def test_a_topic_has_one_class_named_after_its_module() -> None:
    for owner in set(standard_tests(ConnectorConformance).values()):
        stem = Path(owner.__module__.replace(".", "/")).name
        assert owner.__name__.lower().rstrip("s") == stem.replace("_", "").rstrip("s"), owner
        assert owner.__doc__
