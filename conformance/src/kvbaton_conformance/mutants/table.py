"""The table of mutants, clauses and tests: ``docs/mutants.md``."""

from __future__ import annotations

from collections.abc import Mapping

from kvbaton_conformance.mutants.mutant import Mutant, Place
from kvbaton_conformance.mutants.record import Record

_TITLES: dict[Place, str] = {
    "machine": "Hand-off machines", "connector": "Connectors", "guard": "Core's guard", "stage": "Stages",
    "engine": "Engines",
}  # fmt: skip

_HEAD = """\
# Mutants

The conformance kit is proved by mutants: connectors, guards, machines, stages and engines, each broken in exactly one
way. Every one is caught by a standard test, by a clause that it breaks, and every standard test catches at least one.

This page is written by `python -m kvbaton_conformance.mutants --table docs/mutants.md`; `python -m
kvbaton_conformance.mutants` checks it, and `--search` finds out anew.

The simulator misses the guards of the protocol's model, too, and those of the words that came later: `python -m
kvbaton_conformance.simulate --mutants --runs 300` finds each of the 57 within 300 of its random runs (seeds 1 and 2026:
within 127 and 268).

"""


def table(mutants: Mapping[str, Mutant], record: Record) -> str:
    """The page, in Markdown."""
    caught = sum(name in record.mutants for name in mutants)
    guards = sum(bool(mutant.guard) for mutant in mutants.values())
    lines = [
        _HEAD,
        (
            f"{len(mutants)} mutants, {caught} caught; {guards} of them are the guards of the protocol's model, whose"
            " names begin with `C.`, `P.`, `D.` or `T.`.\n"
        ),
    ]
    for place, title in _TITLES.items():
        lines.append(f"\n## {title}\n\n| mutant | what it breaks | caught by | in |\n|---|---|---|---|")
        for mutant in mutants.values():
            if mutant.place == place:
                test, clause = record.mutants.get(mutant.name, ("", ""))
                name = f"{mutant.guard} ({mutant.name})" if mutant.guard not in ("", mutant.name) else mutant.name
                seen = f"{clause} | `{test}`" if test else "**not caught** |"
                lines.append(f"| {name} | {mutant.breaks} | {seen} |")
    lines.append("\n## By clause\n\n| clause | mutants |\n|---|---|")
    by_clause: dict[str, list[str]] = {}
    for name in mutants:
        if name in record.mutants:
            by_clause.setdefault(record.mutants[name][1], []).append(name)
    from kvbaton_conformance.report.verdict import clause_order

    lines += [f"| {clause} | {', '.join(by_clause[clause])} |" for clause in sorted(by_clause, key=clause_order)]
    lines.append("\n## Standard tests, each with a mutant that it fails for\n\n| test | mutant |\n|---|---|")
    lines += [f"| `{test}` | {mutant} |" for test, (mutant, _) in sorted(record.tests.items())]
    return "\n".join(lines) + "\n"
