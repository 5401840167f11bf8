"""``python -m kvbaton_conformance.mutants``: is every mutant caught, and does every standard test catch one?

Which test catches which mutant is on record (``record.json``).  Without options the record is checked: every mutant
must be caught by its test, by a clause that it breaks, and every test must fail for the mutant that proves it.
``--search`` finds out anew what the record does not know (or, with ``--all``, everything) and writes it.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvbaton_conformance.mutants import mutants
from kvbaton_conformance.mutants.mutant import Mutant
from kvbaton_conformance.mutants.record import Record
from kvbaton_conformance.mutants.table import table
from kvbaton_conformance.mutants.trial import BASES, Test, Trial, carry_out

#: Tests of one trial where nothing is broken: small enough that several trials run side by side.
_AT_ONCE = 20


class Run:
    """One run over the mutants that were asked for."""

    def __init__(self, chosen: dict[str, Mutant], record: Record, jobs: int) -> None:
        self._chosen = chosen
        self.record = record
        self._jobs = jobs
        self._total = len(chosen)
        self._count = 0
        self.problems: list[str] = []
        self.tests: dict[str, Test] = {}
        #: The trials' own output is taken away from it.
        self._out = sys.stdout

    # -- the record is checked -----------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Every mutant by its test, every test by its mutant, and nothing fails where nothing is broken."""
        for base in self._bases():
            carry_out(base, lambda tests, base=base: self._verifications(base, tests), self._verified, self._jobs)  # type: ignore[misc]

    def _verifications(self, base: str, tests: Sequence[Test]) -> Iterator[Trial]:
        known = self._know(tests)
        needed: dict[str, None] = {}
        trials = []
        for mutant in self._of(base):
            wanted = [test for test in self.record.tests_for(mutant.name) if test in known]
            needed.update(dict.fromkeys(wanted))
            trials.append(Trial(mutant, wanted))
        unbroken = list(needed)
        for start in range(0, len(unbroken), _AT_ONCE):
            yield Trial(None, unbroken[start : start + _AT_ONCE], limit=240)
        yield from trials

    def _verified(self, trial: Trial) -> None:
        if trial.mutant is None:
            self._none_is_broken(trial)
            return
        failed = {failure.test for failure in trial.failures}
        missing = [test for test in trial.tests if test not in failed]
        caught = trial.caught
        if caught is None:
            others = "; ".join(f"{one.test} failed by {one.clause}: {one.message}" for one in trial.failures)
            what = others or f"{trial.ran} of {len(trial.tests)} tests on record for it ran and passed"
            self._say(trial, "NOT CAUGHT", f"{trial.ended} {what}")
        elif missing:
            self._say(trial, "CAUGHT, BUT", f"these tests, which it proves, pass: {', '.join(missing)} {trial.ended}")
        else:
            self._say(trial, "caught", "")

    def _none_is_broken(self, trial: Trial) -> None:
        for failure in trial.failures:
            self.problems.append(f"nothing is broken, and {failure.test} fails: {failure.message}")
        if trial.ended or trial.ran < len(trial.tests):
            self.problems.append(
                f"nothing is broken, and only {trial.ran} of {len(trial.tests)} tests ran: {trial.ended}"
            )
        print(
            f"unmutated: {trial.ran} tests, {len(trial.failures)} failed, {trial.seconds:.0f} s {trial.ended}",
            file=self._out,
            flush=True,
        )

    # -- the record is made --------------------------------------------------------------------------------------------

    def search(self) -> None:
        """Find a test for every mutant that the record has none for, then a mutant for every test."""
        for base in self._bases():
            carry_out(base, lambda tests, base=base: self._searches(base, tests), self._searched, self._jobs)  # type: ignore[misc]

    def _searches(self, base: str, tests: Sequence[Test]) -> Iterator[Trial]:
        self._know(tests)
        for mutant in self._of(base):
            if mutant.name not in self.record.mutants:
                yield Trial(mutant, [test.id for test in _likely(mutant, tests)], mutant.clauses, limit=150)

    def _searched(self, trial: Trial) -> None:
        caught = trial.caught
        assert trial.mutant is not None
        if caught is None:
            others = {f"{failure.test} ({failure.clause})": None for failure in trial.failures[:6]}
            self._say(
                trial, "NOT CAUGHT", f"{trial.ended} {trial.ran} tests; other failures: {', '.join(others) or 'none'}"
            )
            return
        self.record.catches(trial.mutant.name, caught)
        for failure in trial.failures:
            self.record.proves(failure.test.split("[")[0], trial.mutant.name, failure.test)
        self.record.save()
        self._say(trial, "caught", f"{caught.clause} by {caught.test}")

    def cover(self) -> None:
        """Find a mutant for every test that none is on record for."""
        for base in self._bases():
            carry_out(base, lambda tests, base=base: self._covers(base, tests), self._covered, self._jobs)  # type: ignore[misc]

    def _covers(self, base: str, tests: Sequence[Test]) -> Iterator[Trial]:
        self._know(tests)
        for mutant in self._of(base):
            core = not mutant.connector
            open_ = [
                test for test in tests
                if test.name not in self.record.tests and not (test.two_processes and core)
                and test.clauses & set(mutant.clauses)
            ]  # fmt: skip
            if open_:
                yield Trial(mutant, [test.id for test in open_], limit=200)

    def _covered(self, trial: Trial) -> None:
        assert trial.mutant is not None
        new = [failure for failure in trial.failures if failure.test.split("[")[0] not in self.record.tests]
        for failure in new:
            self.record.proves(failure.test.split("[")[0], trial.mutant.name, failure.test)
        self._say(trial, "proves", ", ".join(failure.test for failure in new) or "nothing more")

    # -- both ----------------------------------------------------------------------------------------------------------

    def _bases(self) -> list[str]:
        return [base for base in BASES if self._of(base)]

    def _of(self, base: str) -> list[Mutant]:
        return [mutant for mutant in self._chosen.values() if mutant.base == base]

    def _know(self, tests: Sequence[Test]) -> dict[str, Test]:
        found = {test.id: test for test in tests}
        self.tests.update(found)
        return found

    def _say(self, trial: Trial, verdict: str, text: str) -> None:
        assert trial.mutant is not None
        self._count += 1
        line = f"{verdict}: {trial.mutant.place} {trial.mutant.name} {text}".rstrip()
        print(f"[{self._count}/{self._total}] {trial.seconds:5.1f} s {line}", file=self._out, flush=True)
        if verdict.isupper() or "BUT" in verdict:
            self.problems.append(line)

    def unproven(self) -> list[str]:
        """Standard tests that fail for no mutant."""
        return sorted({test.name for test in self.tests.values()} - set(self.record.tests))


def _likely(mutant: Mutant, tests: Sequence[Test]) -> list[Test]:
    """All tests that can see it: those of its first clause, of its others, the rest; its own level before others."""
    order = {clause: number for number, clause in enumerate(mutant.clauses)}
    level = {"connector": "connector", "guard": "guard", "engine": "engine"}.get(mutant.place, "handoff")
    able = [test for test in tests if not test.two_processes or mutant.connector]
    if not mutant.two_processes:
        able = [test for test in able if not test.two_processes] or able
    else:
        able = [test for test in able if test.two_processes]

    def rank(test: Test) -> tuple[int, bool]:
        return min((order.get(clause, len(order)) for clause in test.clauses), default=len(order)), test.level != level

    return sorted(able, key=rank)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m kvbaton_conformance.mutants", description=__doc__)
    parser.add_argument("--only", metavar="NAME", nargs="+", help="these mutants (patterns), or places")
    parser.add_argument("--jobs", metavar="N", type=int, default=4, help="trials at once (4): most of them wait")
    parser.add_argument("--search", action="store_true", help="find tests for mutants, and mutants for tests, anew")
    parser.add_argument("--all", action="store_true", help="with --search: forget what is on record")
    parser.add_argument("--table", metavar="FILE", type=Path, help="write the table of mutants and tests there")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    options = parser.parse_args(arguments)
    everything = mutants()
    chosen = {
        name: mutant for name, mutant in everything.items()
        if not options.only or any(fnmatch.fnmatch(text, one) for one in options.only for text in (name, mutant.place))
    }  # fmt: skip
    if not chosen:
        parser.error(f"no mutant is called {' or '.join(options.only)}; see --list")
    if options.list:
        for mutant in chosen.values():
            print(f"{mutant.place:10}{mutant.name}: {mutant.breaks} ({', '.join(mutant.clauses)})")
        return 0
    began = time.monotonic()
    record = Record.load()
    record.keep(everything)
    run = Run(chosen, record, options.jobs)
    if options.search:
        if options.all:
            record.forget(chosen)
        run.search()
        if not options.only:
            run.cover()
        record.save()
        if not options.only:
            run.problems += [f"no mutant makes {test} fail" for test in run.unproven()]
    elif not options.table:
        run.verify()
        if not options.only:
            run.problems += [f"no mutant on record makes {test} fail" for test in run.unproven()]
    if options.table:
        options.table.write_text(table(everything, record), encoding="utf-8")
    for problem in run.problems:
        print(problem, file=sys.stderr)
    print(f"{len(chosen)} mutants, {len(run.problems)} problems, {time.monotonic() - began:.0f} s")
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
