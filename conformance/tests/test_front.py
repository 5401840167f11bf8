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

#: Of pytest's plugins the kit's alone: others that are installed beside it are a third of the start of a run.
ALONE = ["-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:hypothesispytest"]


@pytest.fixture
def judge(tmp_path):
    """``judge(body, *options)``: a test file of a third party, run as it would be."""
    (tmp_path / "parts.py").write_text(PARTS)

    def run(body: str, *options: str, target: str = "test_mine.py") -> tuple[int, str]:
        (tmp_path / "test_mine.py").write_text(
            "from parts import *\nfrom kvbaton_conformance import ConnectorConformance\n" + textwrap.dedent(body)
        )
        command = [sys.executable, "-m", "pytest", "-q", *ALONE, "--rootdir", str(tmp_path)]
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


@pytest.mark.parametrize("part", [[], ["--conformance-partial"]])
def test_a_selection_that_matches_nothing_is_named_and_what_to_write_instead(judge, part):
    status, output = judge(MINE, "-k", "visability", *part)
    assert status == 1
    assert (
        'NO VERDICT on loopback: no standard test matches -k "visability". Did you mean "visibility"? It takes a topic'
        " such as visibility, a clause such as T3, or a part of a test's name, and"
    ) in output
    assert "clause  verdict" not in output


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


def test_markers_of_a_third_party_make_no_test_absent(judge, tmp_path):
    (tmp_path / "conftest.py").write_text(
        """
import pytest

def pytest_itemcollected(item):
    item.add_marker(pytest.mark.requires("disconnect_fences", cross_process=True))
    item.add_marker(pytest.mark.mode("two-processes"))
    item.add_marker(pytest.mark.absent_where(reason=lambda subject: "not today"))
    item.add_marker(pytest.mark.clause("T13"))
"""
    )
    body = """
    class TestMine(ConnectorConformance):
        connector = "loopback"
        pytestmark = __import__("pytest").mark.requires(quiet="never")
    """
    status, output = judge(body, *ONE.split(), "--conformance-report", "out")
    assert status == 0, output
    (result,) = json.loads((tmp_path / "out" / "conformance.json").read_text())["tests"]
    assert (result["outcome"], result["clauses"]) == ("passed", ["T5"])


@pytest.mark.parametrize("skips", ["pytest.skip('not today', allow_module_level=True)", "pytest.importorskip('nope')"])
def test_a_module_that_skips_itself_is_an_error(judge, tmp_path, skips):
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    (tmp_path / "test_skips.py").write_text(
        f"import pytest\nfrom kvbaton_conformance import ConnectorConformance\n{skips}\n"
        "class TestSkipped(ConnectorConformance): connector = 'loopback'"
    )
    for others in ((), ("test_other.py",)):
        status, output = judge("", *others, target="test_skips.py")
        assert status == 1, output
        assert "error: test_skips.py skipped itself, and with it TestSkipped: " in output
        assert "NO VERDICT" in output
    (tmp_path / "test_skips.py").write_text(f"import pytest\n{skips}\nclass TestMine(object): pass")
    status, output = judge("", "test_other.py", target="test_skips.py")
    assert status == 0, output


def test_what_the_first_test_of_a_class_leaves_is_found(judge):
    body = """
    from kvbaton_loopback.connector import LoopbackConnector as Loopback
    import os
    class Leaks(LoopbackPlugin):
        name = "leaks"
        def open(self, options, context):
            os.dup(1)
            return Loopback(context.peer, options)
    class TestMine(ConnectorConformance): connector = Leaks()
    """
    status, output = judge(body, *ONE.split())
    assert status == 1, output
    assert "T10: something was left behind after everything was closed" in output
    assert re.search(r"seen: descriptor \d+ .*; descriptor", output)


def test_a_failure_tells_what_each_end_has_heard(judge, tmp_path):
    body = """
    from kvbaton.connector import Progress
    class Wasteful(LoopbackConnector):
        def poll(self):
            return super().poll() or Progress()
    class Wastes(LoopbackPlugin):
        name = "wastes"
        def open(self, options, context):
            return Wasteful(context.peer, options)
    class TestMine(ConnectorConformance): connector = Wastes()
    """
    part = ("-k", "test_a_poll_that_finds_nothing", "--conformance-partial")
    status, output = judge(body, *part, "--conformance-report", "out")
    assert status == 1, output
    (failed,) = json.loads((tmp_path / "out" / "conformance.json").read_text())["tests"]
    assert failed["broken"] == "T12"
    assert "what each end has heard" in output
    assert re.search(r"prefill-0@\w+ heard 1 peer events\n +\S+ s peer decode-0@\w+ is up", failed["events"])
    assert re.search(r"decode-0@\w+ heard 1 peer events", failed["events"])
    assert "what each end had heard" in (tmp_path / "out" / "conformance.html").read_text()


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
    assert "known, 1 tests: it repeats itself" in output
    status, output = judge(MINE, *options, known(tmp_path, "completion::test_a_chunk_ends_once[in-process]"))
    assert status == 1
    assert "is a known failure (it repeats itself, https://example.org/7), and passed: take it out" in output
    status, output = judge(body, *options, known(tmp_path, "completion::test_a_chunk_end_once"))
    assert status == 1
    assert "matches no test. Did you mean completion::test_a_chunk_ends_once?" in output
    status, output = judge(body, *options, known(tmp_path, "completion::test_a_chunk_ends_once", link=""))
    assert status == 4
    assert "it needs test, reason and link" in output


#: Guards that let other threads in, at every method and at one.
_ANY_THREAD = "GuardedConnector._enter = lambda self: None"
_ANY_THREAD_MAY_CANCEL = """
def cancel(self, transfer, plain=GuardedConnector.cancel):
    self._owner = None
    plain(self, transfer)

GuardedConnector.cancel = cancel
"""


def guarded(defect: str) -> str:
    imports = "from kvbaton.guard import GuardedConnector\nfrom kvbaton_conformance import GuardConformance\n"
    return f"{imports}{defect}\nclass TestMine(GuardConformance): pass\n"


def excuse(tmp_path: Path, *tests: str) -> str:
    entry = '[[known]]\ntest = "{}"\nreason = "threads are free here"\nlink = "https://example.org/8"\n'
    (tmp_path / "known.toml").write_text("".join(entry.format(test) for test in tests))
    return "known.toml"


@pytest.mark.timeout(240)
def test_known_failures_excuse_tests_and_no_whole_clause(judge, tmp_path):
    level = ("--conformance-level", "guard", "--known-failures")
    tests = ("every_method_has_one_thread", "the_owner_may_let_go", "close_refuses_while_a_source_may_be_read")
    file = excuse(tmp_path, *(f"guard.ownership::test_{test}" for test in tests))
    status, output = judge(guarded(_ANY_THREAD), *level, file)
    assert status == 1, output
    assert "known failures excuse tests, not a mandatory clause of which no test passes: T11 (guard)" in output
    assert "NO VERDICT on core's guard" in output
    file = excuse(tmp_path, "guard.ownership::test_every_method_has_one_thread[cancel]")
    status, output = judge(guarded(_ANY_THREAD_MAY_CANCEL), *level, file)
    assert status == 0, output
    assert re.search(r"core's guard CONFORMS EXCEPT for 1 known failures of \d\d+ tests, clauses T11", output)


def test_a_known_failure_does_not_excuse_that_a_test_was_not_run(judge, tmp_path):
    (tmp_path / "conftest.py").write_text("def pytest_pyfunc_call(pyfuncitem): return True")
    file = known(tmp_path, "completion::test_a_chunk_ends_once")
    status, output = judge(MINE, *ONE.split(), "--known-failures", file)
    assert status == 1, output
    assert "whose body did not run" in output


def test_where_pytest_does_not_begin_that_is_all_there_is_to_say(judge):
    status, output = judge(MINE, "-o", "no_such_option=1", "--strict-config")
    assert status == 4, output
    assert "ERROR: Unknown config option: no_such_option" in output
    assert "VERDICT" not in output
    assert "unrun" not in output


def test_a_report_that_cannot_be_written_is_told_before_any_test(judge, tmp_path):
    status, output = judge(MINE, "--conformance-report", str(tmp_path / "parts.py"))
    assert status == 4, output
    said = f"ERROR: --conformance-report {tmp_path / 'parts.py'}: it cannot be written: it is not a directory\n"
    assert said in output
    assert "Traceback" not in output


#: Ctrl-C comes in a destructor, which drops it.
DROPPED = """
import os, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which is ignored in the background of a shell

class Hides:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

class Drops(LoopbackConnector):
    def connect(self, *arguments):
        Hides()
        super().connect(*arguments)

class Plugin(LoopbackPlugin):
    def open(self, options, context):
        return Drops(context.peer, options)

class TestMine(ConnectorConformance):
    connector = Plugin()
"""


def test_ctrl_c_that_a_destructor_drops_ends_the_run_by_the_doors_of_pytest_too(judge):
    status, output = judge(DROPPED, *ONE.split(), "-W", "error")
    assert status == 2, output
    assert "KeyboardInterrupt" in output
    assert "CONFORM" not in output
    assert "PytestUnraisableExceptionWarning" not in output


#: Ctrl-C comes in a destructor in a phase of the first test, by name; and what bodies run is said.
DROPPED_IN = """
import os, signal
import pytest
signal.signal(signal.SIGINT, signal.default_int_handler)

class Hides:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)

@pytest.fixture(autouse=True)
def phases():
    {setup}
    yield
    {teardown}

def pytest_pyfunc_call(pyfuncitem):
    print("BODY of", pyfuncitem.name)
    {body}

def pytest_runtest_logreport(report):
    print("REPORT of", report.when, report.outcome)
"""


@pytest.mark.parametrize("phase", ["setup", "body", "teardown"])
def test_ctrl_c_that_was_dropped_ends_the_run_at_the_end_of_its_phase(judge, tmp_path, phase):
    """Not a phase later: nothing is made of one that was torn."""
    where = dict.fromkeys(("setup", "body", "teardown"), "pass") | {phase: "Hides()"}
    (tmp_path / "conftest.py").write_text(DROPPED_IN.format(**where))
    status, output = judge(MINE, *ONE.split(), "-s", "-W", "error")
    assert status == 2, output
    assert ("BODY of" in output) == (phase != "setup")
    reports = [line.rpartition("REPORT of ")[2] for line in output.splitlines() if "REPORT of" in line]
    assert reports == {"setup": [], "body": ["setup passed"], "teardown": ["setup passed", "call passed"]}[phase]


def test_a_run_without_conformance_tests_is_left_alone(judge):
    status, output = judge("def test_other(): pass")
    assert status == 0
    assert "conformance" not in output.replace("--conformance", "")


BLOCKS = """
import threading
import kvbaton_conformance.plugin
import kvbaton_conformance.subject
from kvbaton_loopback.connector import LoopbackConnector
from kvbaton_loopback.plugin import LoopbackPlugin

kvbaton_conformance.plugin.TEST_BOUND = kvbaton_conformance.subject.LOOK_BOUND = 1.0

class Blocks(LoopbackConnector):
    def {call}(self, *arguments):
        threading.Event().wait()

class Plugin(LoopbackPlugin):
    def open(self, options, context):
        return Blocks(context.peer, options)

class TestMine(ConnectorConformance):
    connector = Plugin()
"""


@pytest.mark.parametrize("call", ["register", "connect", "close"])
def test_a_call_that_does_not_return_is_a_failure_and_no_stuck_run(judge, call):
    """Before the first test, before a test, after it: wherever it is asked."""
    status, output = judge(BLOCKS.format(call=call), *ONE.split())
    assert status not in (0, 5), output
    assert "did not come back within 1 s: a call does not return" in output
    assert f"in {call}" in output, "which call it was"


def test_a_class_whose_tests_do_not_come_back_is_given_up_and_does_not_conform(judge, tmp_path):
    body = BLOCKS.format(call="register")
    status, output = judge(body, "-k", "visibility", "--conformance-partial", "--conformance-report", str(tmp_path))
    assert status == 1, output
    assert (
        "DOES NOT CONFORM: 3 tests failed, clauses T7. The rest was left, because 3 tests in a row did not come back;"
        " --conformance-keep-going runs the others as well"
    ) in output
    verdict = json.loads((tmp_path / "conformance.json").read_text())
    assert not verdict["conforms"]
    outcomes = [test["outcome"] for test in verdict["tests"] if test["outcome"] != "absent"]
    assert outcomes[:3] == ["failed"] * 3
    assert set(outcomes[3:]) == {"unrun"}
    assert (
        f"TestMine: {len(outcomes) - 3} standard tests were not run, because 3 tests in a row did not come back;"
        " --conformance-keep-going runs the others as well"
    ) in verdict["problems"]


def test_a_class_whose_tests_do_not_come_back_is_run_whole_where_that_is_asked_for(judge):
    status, output = judge(
        BLOCKS.format(call="register"), "-k", "visibility", "--conformance-partial", "--conformance-keep-going"
    )
    assert status == 1, output
    assert "DOES NOT CONFORM: 9 tests failed, clauses T7" in output
    assert "were not run" not in output
    assert " skipped" not in output


def test_only_what_is_in_a_row_is_given_up(judge):
    """Of two classes one blocks; and one whose tests come back now and then is not stuck."""
    now_and_then = """
    class NowAndThen(Blocks):
        made = 0
        def register(self, *arguments):
            NowAndThen.made += 1
            if NowAndThen.made % 3:
                return LoopbackConnector.register(self, *arguments)
            return super().register(*arguments)

    class Now(LoopbackPlugin):
        def open(self, options, context):
            return NowAndThen(context.peer, options)

    class TestNow(ConnectorConformance):
        connector = Now()
    """
    body = BLOCKS.format(call="register") + textwrap.dedent(now_and_then)
    status, output = judge(body, "-k", "TestNow and visibility", "--conformance-partial")
    assert status == 1, output
    assert "did not come back within 1 s" in output
    assert "were not run" not in output
