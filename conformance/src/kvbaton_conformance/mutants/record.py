"""Which test catches which mutant, as was found out: ``record.json`` beside this module."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from kvbaton_conformance.mutants.trial import Failure

_PATH = "record.json"


@dataclass
class Record:
    """``mutants``: for each, the test that catches it and by which clause.  ``tests``: for each (without parameters),
    the mutant that it fails for, and the test with its parameters.
    """

    mutants: dict[str, tuple[str, str]] = field(default_factory=dict)
    tests: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls) -> Record:
        """As it is in this distribution."""
        place = files("kvbaton_conformance.mutants").joinpath(_PATH)
        if not place.is_file():
            return cls()
        data = json.loads(place.read_text(encoding="utf-8"))
        return cls(
            {name: (test, clause) for name, (test, clause) in data["mutants"].items()},
            {test: (mutant, id) for test, (mutant, id) in data["tests"].items()},
        )

    def save(self) -> None:
        """Write it where it was read from."""
        data = {"mutants": dict(sorted(self.mutants.items())), "tests": dict(sorted(self.tests.items()))}
        path = Path(__file__).with_name(_PATH)
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def keep(self, mutants: Collection[str]) -> None:
        """Forget mutants that there are no more."""
        self.mutants = {name: caught for name, caught in self.mutants.items() if name in mutants}
        self.tests = {test: proof for test, proof in self.tests.items() if proof[0] in mutants}

    def forget(self, mutants: Collection[str]) -> None:
        """Forget what is known of these."""
        self.keep([name for name in self.mutants if name not in mutants])
        self.tests = {test: proof for test, proof in self.tests.items() if proof[0] not in mutants}

    def catches(self, mutant: str, failure: Failure) -> None:
        self.mutants[mutant] = failure.test, failure.clause

    def proves(self, test: str, mutant: str, id: str) -> None:
        """``mutant`` makes ``test`` fail; the first that is found stays."""
        self.tests.setdefault(test, (mutant, id))

    def tests_for(self, mutant: str) -> list[str]:
        """What must fail for a mutant: the test that catches it first."""
        caught = [self.mutants[mutant][0]] if mutant in self.mutants else []
        return list(dict.fromkeys([*caught, *(id for name, id in self.tests.values() if name == mutant)]))
