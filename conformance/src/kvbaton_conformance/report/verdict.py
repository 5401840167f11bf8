"""What a run has shown, clause by clause."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from kvbaton_conformance.clauses import clauses

#: ``absent``: a capability is declared absent.  ``unavailable``: the environment lacks something.  ``known``: failed
#: as a file of known failures says.
#: ``unrun``: the run ended before, or the class was given up.
Outcome = Literal["passed", "failed", "absent", "unavailable", "known", "unrun"]

#: The columns of a table of clauses.
OUTCOMES: tuple[Outcome, ...] = ("passed", "failed", "absent", "unavailable", "known", "unrun")


@dataclass
class Result:
    """One standard test, in one mode, of one judged class."""

    #: ``topic::test_name[mode]``: what a file of known failures calls it.
    id: str
    nodeid: str
    #: The class that was collected, and the connector or engine that it judges.
    judged: str
    subject: str
    level: str
    clauses: tuple[str, ...]
    outcome: Outcome = "unrun"
    #: Why it is not ``passed``: the failure's text, or what is absent.
    message: str = ""
    #: Of a failure: the clause that its message begins with, and its parts.
    broken: str = ""
    expected: str = ""
    seen: str = ""
    look: str = ""
    #: What each end had heard, where the message does not say so already.
    events: str = ""
    #: What the test's docstring says about such failures.
    troubleshooting: str = ""
    replay: str = ""
    seconds: float = 0.0


@dataclass
class ClauseRow:
    """One clause over all tests that name it."""

    id: str
    counts: dict[Outcome, int]
    failures: list[str] = field(default_factory=list)

    @property
    def word(self) -> str:
        if self.counts["failed"]:
            return "BROKEN"
        if self.counts["known"]:
            return "known failure"
        if self.counts["passed"]:
            return "holds"
        if not any(self.counts.values()):
            return "unjudged"  # its tests found another clause broken
        words: tuple[Outcome, ...] = ("unrun", "unavailable")
        for outcome in words:
            if self.counts[outcome]:
                return outcome
        return "absent"


@dataclass
class Verdict:
    """The whole run.  ``problems`` are what makes it no verdict at all: tests that did not run but should have."""

    subjects: tuple[str, ...]
    header: tuple[str, ...]
    results: Sequence[Result]
    problems: Sequence[str]
    partial: bool
    seconds: float
    #: Why some of the tests were not run.
    given_up: str = ""

    @property
    def rows(self) -> list[ClauseRow]:
        return rows(self.results)

    def count(self, outcome: Outcome) -> int:
        return sum(result.outcome == outcome for result in self.results)

    @property
    def conforms(self) -> bool:
        return bool(self.tried) and not (self.partial or self.problems or self.given_up or self.count("failed"))

    @property
    def tried(self) -> int:
        """Tests that could be tried here."""
        return self.count("passed") + self.count("known") + self.count("failed")

    @property
    def reasons(self) -> list[str]:
        """Why tests are absent or unavailable, and how many for each reason."""
        found: dict[str, int] = {}
        for result in self.results:
            if result.outcome in ("absent", "unavailable", "known"):
                reason = f"{result.outcome}, {{}} tests: {result.message.splitlines()[0]}"
                found[reason] = found.get(reason, 0) + 1
        return [reason.replace("{}", str(count), 1) for reason, count in found.items()]

    @property
    def sentence(self) -> str:
        """The verdict in one line."""
        who = ", ".join(self.subjects) or "nothing"
        broken = [row.id for row in self.rows if row.counts["failed"]]
        if broken:
            rest = f". The rest was left, because {self.given_up}" if self.given_up else ""
            return f"{who} DOES NOT CONFORM: {self.count('failed')} tests failed, clauses {', '.join(broken)}{rest}"
        if self.problems:
            return f"NO VERDICT on {who}: {self.problems[0]}"
        if not self.results:
            return "NO VERDICT: no standard test ran"
        if not self.tried:
            return f"NO VERDICT on {who}: nothing could be tried here"
        if self.partial:
            return f"NO VERDICT on {who}: a part of the suite passed ({self.count('passed')} tests)"
        known = self.count("known")
        if not known:
            return f"{who} CONFORMS"
        of = ", ".join(row.id for row in self.rows if row.counts["known"])
        return f"{who} CONFORMS EXCEPT for {known} known failures of {self.tried} tests, clauses {of}"


def rows(results: Sequence[Result]) -> list[ClauseRow]:
    """Per clause, in the order of the contract's numbers, T first."""
    found: dict[str, ClauseRow] = {}
    for result in results:
        # a failure is also one of the clause that it found broken, whatever the test set out to prove
        named = dict.fromkeys((*result.clauses, *((result.broken,) if result.broken else ())))
        for clause in named:
            row = found.setdefault(clause, ClauseRow(clause, dict.fromkeys(OUTCOMES, 0)))
            if result.outcome == "failed" and result.broken and clause != result.broken:
                continue
            row.counts[result.outcome] += 1
            if result.outcome == "failed":
                row.failures.append(result.id)
    return sorted(found.values(), key=lambda row: clause_order(row.id))


def clause_order(id: str) -> tuple[int, list[int]]:
    """T before C before A, numbers as numbers."""
    return "TCA".find(id[0]), [int(number) for number in re.findall(r"\d+", id)]


def clause_text(id: str) -> str:
    known = clauses().get(id)
    return known.text if known else ""
