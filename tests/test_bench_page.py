"""``docs/bench.md`` names every field of the JSON that ``kvbaton bench`` prints, and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvbaton.bench.circumstances import machine, versions
from kvbaton.bench.handoffs import HandOffs
from kvbaton.bench.measured import SCHEMA, Measured
from kvbaton.bench.models import find
from kvbaton.bench.traffic import Traffic
from kvbaton.bench.wire import Beside, Carried
from kvbaton.spread import Spread

from .workspace import ROOT

PAGE = ROOT / "docs" / "bench.md"
SPREAD = Spread.of([1.0, 2.0, 4.0])
#: Objects whose own keys depend on what is installed, chosen or reached, or that are the same as another.
OPEN = {"versions", "transport.options", "handoffs.milestones", "sweep"}


def everything() -> dict[str, Any]:
    """A bench of which every part was measured."""
    carried = Carried(
        4096,
        3,
        1,
        12288,
        "cross_process",
        SPREAD,
        SPREAD,
        SPREAD,
        SPREAD,
        SPREAD,
        SPREAD,
        Beside("raw", SPREAD),
        SPREAD,
    )
    handoffs = HandOffs("processes", 4, 1, 3, 12288, SPREAD, SPREAD, SPREAD, 8, {"received": SPREAD})
    return Measured(
        "nixl", {}, "host", Traffic(find("smollm2-135m"), 64), 1 << 26, machine(), versions(), (1.0, 2.0), 3.0, carried,
        (carried,), handoffs, ("a note",),
    ).as_json()  # fmt: skip


def names(value: dict[str, Any], path: str = "") -> Iterator[str]:
    """The path of each field; of objects that the page speaks of as a whole as well, a spread being a value."""
    for key, inner in value.items():
        where = path + key
        if isinstance(inner, dict) and "median" not in inner and where not in OPEN:
            yield from names(inner, f"{where}.")
        else:
            yield where


def test_the_page_has_every_field_and_no_other() -> None:
    section = PAGE.read_text(encoding="utf-8").split("## For programs")[1].split("\n## ")[0]
    rows = [row.split("|")[1] for row in section.splitlines() if row.startswith("| `")]
    written = {name for row in rows for name in re.findall(r"`([a-z_.0-9]+)`", row)}
    found = everything()
    assert written - {"moved", "handoffs"} == set(names(found))
    assert set(found["sweep"][0]) == set(found["moved"])


def test_a_spread_has_the_fields_that_the_page_says() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    listed = re.search(r"A \*spread\* has (.*?)\. \|", text)
    assert listed is not None
    assert set(re.findall(r"`(\w+)`", listed[1])) == set(SPREAD.as_dict())


def test_the_page_has_the_number_of_the_schema() -> None:
    assert f"| `schema` | {SCHEMA} |" in PAGE.read_text(encoding="utf-8")
