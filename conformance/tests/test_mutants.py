"""The proof of the kit itself, in small; ``python -m kvbaton_conformance.mutants`` is the whole."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter

import pytest

from kvbaton_conformance.mutants import mutants, trial
from kvbaton_conformance.mutants.mutant import EditDoesNotApply, Mutant, edit
from kvbaton_conformance.mutants.record import Record

#: A few of every place; the whole run is an environment of its own.
FEW = (
    "C.release-waits-for-p", "P.cancel-waits-for-handles", "D.received-needs-all", "receipt-before-data",
    "equal-lengths-in-another-order", "cancelled-and-still-landing", "close-leaves-a-thread", "a-full-queue-drops",
    "late-is-quiet", "an-older-epoch-may-connect", "the-final-payload-is-not-sent", "release-forgets-blocks",
)  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=120, check=False
    )  # fmt: skip


def test_every_edit_applies_to_the_code_as_it_is():
    for mutant in mutants().values():
        for one in mutant.edits:
            one.compile()


def test_every_mutant_breaks_something_by_name():
    for mutant in mutants().values():
        assert mutant.clauses, mutant.name
        assert bool(mutant.edits) != bool(mutant.connector), mutant.name


def test_every_guard_of_the_protocol_is_among_them():
    sides = Counter(mutant.guard[0] for mutant in mutants().values() if mutant.guard)
    assert sides == {"C": 30, "P": 12, "D": 11, "T": 6}


def test_an_edit_that_no_longer_fits_is_an_error():
    with pytest.raises(EditDoesNotApply, match="occurs 0 times"):
        edit(Record.keep, "nothing like this", "").compile()


def test_an_edit_is_undone():
    record = Record(mutants={"one": ("test", "C1.1")})
    with edit(Record.keep, "if name in mutants", "if False").applied():
        record.keep(["one"])
        assert not record.mutants
    record.mutants["one"] = ("test", "C1.1")
    record.keep(["one"])
    assert record.mutants


def test_every_mutant_is_on_record_by_a_clause_that_it_breaks():
    record = Record.load()
    for name, mutant in mutants().items():
        assert name in record.mutants, f"{name} is not on record: python -m kvbaton_conformance.mutants --search"
        test, clause = record.mutants[name]
        assert clause in mutant.clauses, f"{name} is caught by {clause} in {test}"


@pytest.mark.timeout(120)
def test_a_few_mutants_are_caught_and_an_unbroken_connector_is_not():
    done = run("-m", "kvbaton_conformance.mutants", "--only", *FEW)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(FEW)} mutants, 0 problems" in done.stdout
    assert "0 failed" in done.stdout
    assert not re.search(r" [1-9]\d* failed", done.stdout)


def test_a_word_that_was_cut_is_no_traceback():
    """A trial that is killed while it says something has said the rest."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        os._exit(9)
    os.write(write, b'{"passed": "one"}\n{"failure": {"test": "tw')
    os.close(write)
    mutant = Mutant("cuts", "guard", "a word", ("T6",))
    running = trial._Running(trial.Trial(mutant, ["one", "two"]), pid, read, time.monotonic())
    while not running.read():
        pass
    done = running.finish()
    assert (done.ran, done.caught) == (1, None)
    assert 'in the middle of a word: \'{"failure": {"test": "tw\'' in done.ended


_SCRIPT = """
import sys, time
from kvbaton.handoff.credits import Ledger
from kvbaton_conformance.mutants.mutant import Mutant, edit
from kvbaton_conformance.mutants.trial import Trial, carry_out

def plan(tests):
    some = [test.id for test in tests if "completion::test_a_chunk_ends_once[in-process]" in test.id]
    yield Trial(Mutant("harmless", "machine", "nothing", ("T5",), (edit(Ledger.out, "return", "return"),)), some)
    from kvbaton.guard import GuardedConnector
    first = "    key = (chunk.transfer, chunk.sequence)"
    hang = edit(GuardedConnector.submit, first, "    __import__('time').sleep(600)")
    yield Trial(Mutant("hangs", "guard", "all", ("T6",), (hang,)), some, limit=3)
    dies = edit(GuardedConnector.submit, first, "    __import__('os')._exit(7)")
    yield Trial(Mutant("dies", "guard", "all", ("T6",), (dies,)), some)

def done(trial):
    print(trial.mutant.name, trial.ran, trial.caught, trial.ended, file=sys.stderr)

carry_out("reference", plan, done, 2)
"""


@pytest.mark.timeout(60)
def test_what_is_not_caught_hangs_or_dies_is_said_to():
    done = run("-c", _SCRIPT)
    lines = dict(line.split(" ", 1) for line in done.stderr.splitlines() if line)
    assert lines["harmless"].startswith("1 None"), done.stderr
    assert "hung: killed after 3 s" in lines["hangs"], done.stderr
    assert "died" in lines["dies"], done.stderr
