"""``docs/mutants.md`` is what its command writes."""

from __future__ import annotations

from pathlib import Path

from kvbaton_conformance.mutants import mutants
from kvbaton_conformance.mutants.record import Record
from kvbaton_conformance.mutants.table import table

PAGE = Path(__file__).parent.parent / "docs" / "mutants.md"


def test_the_page_of_mutants_is_up_to_date() -> None:
    written = PAGE.read_text(encoding="utf-8")
    assert written == table(mutants(), Record.load()), (
        "docs/mutants.md is old: python -m kvbaton_conformance.mutants --table docs/mutants.md"
    )
