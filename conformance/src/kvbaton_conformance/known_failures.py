"""Failures that are known: a file of them, each with a reason and a link, each strict.

::

    [[known]]
    test = "timeout::test_a_late_end_is_reported[two-processes]"    # without [...]: in every mode
    reason = "releases handles at the deadline"
    link = "https://example.org/issues/7"

A known failure that passes, and an entry that matches no test, are errors: the file never says what is not so.  It
excuses tests and no clause: where no test of a mandatory clause passes, there is no verdict.  Nor does it excuse that a
test was not run, skipped, or answered for by somebody else.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class KnownFailure:
    test: str
    reason: str
    link: str
    matched: list[str] = field(default_factory=list)

    def covers(self, id: str) -> bool:
        return self.test in (id, id.split("[")[0])


class KnownFailuresError(ValueError):
    """The file cannot be read, or does not have the form that it must have."""


def read_known_failures(path: Path) -> list[KnownFailure]:
    """Raises :class:`KnownFailuresError`, which names the file and the entry."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise KnownFailuresError(f"known failures {path}: {error}") from error
    entries = content.pop("known", [])
    if content or not isinstance(entries, list):
        raise KnownFailuresError(f"known failures {path}: only [[known]] tables are understood, not {list(content)}")
    found = []
    for number, entry in enumerate(entries, start=1):
        keys = set(entry) if isinstance(entry, dict) else set()
        texts = isinstance(entry, dict) and all(isinstance(value, str) and value.strip() for value in entry.values())
        if keys != {"test", "reason", "link"} or not texts:
            raise KnownFailuresError(
                f"known failures {path}, entry {number}: it needs test, reason and link, each a text; it has"
                f" {', '.join(sorted(keys)) or 'nothing'}"
            )
        found.append(KnownFailure(**entry))
    return found
