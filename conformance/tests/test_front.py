"""What the kit does not let pass: runs that judge nothing, or less than they seem to."""

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

#: A transport that can be told how to be wrong, over the loopback.
PARTS = """
from kvbaton.connector import Availability, Capabilities
from kvbaton_loopback.connector import LoopbackConnector
from kvbaton_loopback.plugin import LoopbackPlugin

class Refuses(LoopbackPlugin):
    name = "refuses"
    def probe(self, need):
        return Availability(False, "there is no such device here", "plug one in")

class Half(LoopbackPlugin):
    name = "half"
    def open(self, options, context):
        class Written:
            capabilities = Capabilities(same_process=True)
            def register(self, regions): ...
            def close(self): ...
        return Written()

class Twice(LoopbackConnector):
    def poll(self):
        progress = super().poll()
        self._again = getattr(self, "_again", ())
        from kvbaton.connector import Progress
        found = Progress(progress.completions + self._again, progress.receipts, progress.peers)
        self._again = progress.completions
        return found if found else progress

class Repeats(LoopbackPlugin):
    name = "repeats"
    def open(self, options, context):
        return Twice(context.peer, options)

refuses, half, repeats = Refuses(), Half(), Repeats()
"""

ONE = "-k test_a_chunk_ends_once --conformance-partial"


@pytest.fixture
def judge(tmp_path):
    """``judge(body, *options)``: a test file of a third party, run as it would be."""
    (tmp_path / "parts.py").write_text(PARTS)

    def run(body: str, *options: str, target: str = "test_mine.py") -> tuple[int, str]:
        (tmp_path / "test_mine.py").write_text(
            "from parts import *\nfrom kvbaton_conformance import ConnectorConformance\n" + textwrap.dedent(body)
        )
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        command += ["-c", "/dev/null", "--conformance-level", "connector", target, *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
        return done.returncode, done.stdout + done.stderr

    return run


REFUSED = {
    "names-nothing": ("class TestMine(ConnectorConformance): pass", "says nothing about which connector it judges"),
    "unknown": ('class TestMine(ConnectorConformance): connector = "nope"', 'no transport "nope"'),
    "import-fails": ('class TestMine(ConnectorConformance): connector = "nowhere:plugin"', "cannot be imported"),
    "probe-says-no": (
        "class TestMine(ConnectorConformance): connector = refuses",
        "cannot be judged here, because its probe says no: transport refuses cannot be used here: there is no such",
    ),
    "half-written": (
        "class TestMine(ConnectorConformance): connector = half",
        "is half written: Written has no metadata, connect, disconnect, submit, poll",
    ),
    "factory-raises": (
        """
        class TestMine(ConnectorConformance):
            connector = staticmethod(lambda: 1 / 0)
        """,
        "the factory of connector of TestMine raised ZeroDivisionError",
    ),
    "not-collected": ('class Mine(ConnectorConformance): connector = "loopback"', "call it TestMine"),
    "has-an-init": (
        """
        class TestMine(ConnectorConformance):
            def __init__(self): self.connector = "loopback"
        """,
        "TestMine has an __init__",
    ),
    "misspelt": ('class TestMine(ConnectorConformance): conector = "loopback"', "Did you mean connector?"),
    "unknown-option": (
        'class TestMine(ConnectorConformance):\n    connector = "loopback"\n    connector_options = {"laps": 1}',
        'has no option "laps"',
    ),
    "overrides-a-test": (
        """
        class TestMine(ConnectorConformance):
            connector = "loopback"
            def test_a_chunk_ends_once(self): pass
        """,
        "overrides the standard test completion::test_a_chunk_ends_once",
    ),
    "overrides-a-fixture": (
        'class TestMine(ConnectorConformance):\n    connector = "loopback"\n    pair = None',
        "overrides pair, which is the kit's own",
    ),
}


@pytest.mark.parametrize(("body", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_judged_is_one_clear_error(judge, body, reason):
    status, output = judge(body)
    assert status == 2, output
    assert reason in output
    assert output.count("ERROR collecting") == 1
    assert "Traceback" not in output
    assert "CONFORMS" not in output


MINE = 'class TestMine(ConnectorConformance): connector = "loopback"\n'


def test_a_part_is_no_verdict(judge):
    status, output = judge(MINE, "-k", "test_a_chunk_ends_once")
    assert status == 1
    assert "standard tests were deselected or removed: registration::test_" in output
    assert "no test of a mandatory clause ran: T1, T2" in output
    status, output = judge(MINE, *ONE.split())
    assert status == 0
    assert "NO VERDICT on loopback: a part of the suite passed (1 tests)" in output


def test_a_single_test_by_its_name_is_a_part_too(judge):
    status, output = judge(MINE, target="test_mine.py::TestMine::test_a_chunk_ends_once")
    assert status == 1
    assert "standard tests were deselected or removed" in output


def test_one_run_of_a_test_that_was_deselected_is_named(judge):
    left_out = "test_mine.py::TestMine::test_both_are_told_up_once_whoever_calls_first[in-process-source-first]"
    status, output = judge(MINE, "-x", "--conformance-level", "connector", "--deselect", left_out)
    assert status == 1
    assert f"1 runs of standard tests were deselected or removed: {left_out}" in output


_REWRITES = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    report.outcome = "passed"
    return report
"""


@pytest.mark.parametrize(
    ("cheat", "defect", "said"),
    [
        ("def pytest_pyfunc_call(pyfuncitem): return True", "", "whose body did not run"),
        (
            _REWRITES,
            "LoopbackConnector.poll = lambda self: 1 / 0\n",
            "something else than the kit reported otherwise",
        ),
    ],
    ids=["body", "report"],
)
def test_an_answer_by_anybody_else_is_a_failure(judge, tmp_path, cheat, defect, said):
    (tmp_path / "conftest.py").write_text(cheat)
    body = "from kvbaton_loopback.connector import LoopbackConnector\n" + defect + MINE
    status, output = judge(body, *ONE.split())
    assert status == 1, output
    assert said in output


def test_a_skip_by_anybody_else_is_a_failure(judge):
    body = 'import pytest\n@pytest.mark.skip(reason="slow today")\n' + MINE
    status, output = judge(body, *ONE.split())
    assert status == 1
    assert "something else than the kit skipped it: Skipped: slow today" in output


def test_hardware_that_is_absent_is_a_skip_and_an_error_on_demand(judge):
    body = 'class TestMine(ConnectorConformance):\n    connector = refuses\n    needs_hardware = "such a device"\n'
    status, output = judge(body)
    assert status == 0
    assert re.search(r"unavailable, \d\d+ tests: such a device: connector refuses cannot be judged", output)
    assert "NO VERDICT on TestMine: nothing could be tried here" in output
    assert "CONFORMS" not in output
    status, output = judge(body, "--require-env", *ONE.split())
    assert status == 1
    assert "--require-env: completion::test_a_chunk_ends_once[in-process] needs what is not here" in output


def test_a_second_completion_is_found_beneath_the_guard_and_named(judge, tmp_path):
    status, output = judge(
        "class TestMine(ConnectorConformance): connector = repeats", *ONE.split(), "--conformance-report", "out"
    )
    assert status == 1
    report = json.loads((tmp_path / "out" / "conformance.json").read_text())
    (result,) = report["tests"]
    assert (result["outcome"], result["broken"]) == ("failed", "T5")
    assert "a second completion (done) for chunk 0" in result["message"]
    assert "repeats DOES NOT CONFORM" in report["verdict"]
    page = (tmp_path / "out" / "conformance.html").read_text()
    assert page.index("DOES NOT CONFORM") < page.index("T5 of the contract says") < page.index("exactly one completion")
    assert "http" not in page
    assert (tmp_path / "out" / "junit.xml").is_file()
    assert (tmp_path / "out" / "badge.md").read_text().startswith("❌")
    assert "to replay it" in output


def known(tmp_path: Path, test: str, **other: str) -> str:
    entry = {"test": test, "reason": "it repeats itself", "link": "https://example.org/7", **other}
    lines = "".join(f"{key} = {json.dumps(value)}\n" for key, value in entry.items() if value)
    (tmp_path / "known.toml").write_text("[[known]]\n" + lines)
    return "known.toml"


def test_a_known_failure_is_strict(judge, tmp_path):
    body = "class TestMine(ConnectorConformance): connector = repeats"
    options = (*ONE.split(), "--known-failures")
    status, output = judge(body, *options, known(tmp_path, "completion::test_a_chunk_ends_once"))
    assert status == 0, output
    assert "known failure" in output
    status, output = judge(MINE, *options, known(tmp_path, "completion::test_a_chunk_ends_once[in-process]"))
    assert status == 1
    assert "is a known failure (it repeats itself, https://example.org/7), and passed: take it out" in output
    status, output = judge(body, *options, known(tmp_path, "completion::test_a_chunk_end_once"))
    assert status == 1
    assert "matches no test. Did you mean completion::test_a_chunk_ends_once?" in output
    status, output = judge(body, *options, known(tmp_path, "completion::test_a_chunk_ends_once", link=""))
    assert status == 4
    assert "it needs test, reason and link" in output


def test_a_run_without_conformance_tests_is_left_alone(judge):
    status, output = judge("def test_other(): pass")
    assert status == 0
    assert "conformance" not in output.replace("--conformance", "")
