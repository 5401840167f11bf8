"""Ctrl-C, as a real signal to a real process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import PROGRAM

#: The first Ctrl-C comes while the commands are still being imported.
EARLY = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "kvbaton.cli.app":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvbaton.cli import main
main()
"""


def wait_for(child: subprocess.Popen[str], line: str) -> None:
    """Reads stderr up to ``line``; the test's own timeout bounds it."""
    assert child.stderr is not None
    heard = []
    for said in child.stderr:
        if said.strip() == line:
            return
        heard.append(said)
    raise AssertionError(f"the process ended with {child.wait()} before it said {line!r}:\n{''.join(heard)}")


@pytest.mark.parametrize("asked_by", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_cancels_drains_and_exits_130(process, asked_by):
    child = process("run", "--model", "m", "--prompt", "slow one", "--prompt", "slow two", "--prompt", "quick")
    wait_for(child, "decoding")
    child.send_signal(asked_by)
    out, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    last = errors.splitlines()[-1]
    assert last == "kvbaton: interrupted: 2 of 3 requests cancelled, everything stopped"
    assert "Traceback" not in errors
    assert "prefill-0" not in out  # no table of what was cut short


def test_the_second_ctrl_c_forces(process):
    child = process("run", "--model", "stuck", "--prompt", "slow one")
    wait_for(child, "decoding")
    child.send_signal(signal.SIGINT)
    wait_for(child, "aborting in vain")  # it was heard: two that come together are one
    wait_for(child, "decoding")
    assert child.poll() is None, "the first Ctrl-C must wait for what is under way"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors.splitlines()[-1].startswith("kvbaton: interrupted again: forced to stop")


def test_ctrl_c_during_start_up_does_not_wait_for_it(process):
    child = process("run", "--model", "sleepy", "--prompt", "x")
    wait_for(child, "starting")
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors == "kvbaton: interrupted\n"


#: An exit handler that says when it runs, and then waits for a line on stdin.
LINGERS = "import atexit, sys; atexit.register(lambda: (print('leaving', file=sys.stderr, flush=True), input())); "


@pytest.mark.parametrize(("model", "under_way"), [("m", "decoding"), ("sleepy", "starting")])
def test_ctrl_c_again_while_the_interpreter_ends_is_not_heard(process, model, under_way):
    child = process(
        "run", "--model", model, "--prompt", "slow one", program=LINGERS + PROGRAM, stdin=subprocess.PIPE
    )  # fmt: skip
    wait_for(child, under_way)
    child.send_signal(signal.SIGINT)
    wait_for(child, "leaving")
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate("\n", timeout=60)
    assert (child.returncode, errors) == (130, "")


def test_an_end_that_hangs_while_ctrl_c_is_ignored_is_bounded(process):
    soon = "from kvbaton.cli import ending; ending.AT_MOST = 0.2; "
    child = process(
        "run", "--model", "sleepy", "--prompt", "x", program=LINGERS + soon + PROGRAM, stdin=subprocess.PIPE
    )  # fmt: skip
    wait_for(child, "starting")
    child.send_signal(signal.SIGINT)
    assert child.wait(timeout=60) == 130


def test_ctrl_c_before_anything_is_loaded_is_one_line_too():
    ran = subprocess.run([sys.executable, "-c", EARLY, "doctor"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "kvbaton: interrupted\n")


def test_json_prints_nothing_when_interrupted(process):
    child = process("run", "--model", "m", "--prompt", "slow one", "--json")
    wait_for(child, "decoding")
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (130, "")


#: A transport whose fifth connection blocks: that of a test, after those that warm it up and of the first one.
BLOCKS = """
import threading
from pathlib import Path
from kvbaton_loopback.connector import LoopbackConnector
from kvbaton_loopback.plugin import LoopbackPlugin

connections = []

class Connector(LoopbackConnector):
    def connect(self, *arguments):
        connections.append(1)
        if len(connections) > 4:
            Path({here!r}).touch()
            threading.Event().wait()
        super().connect(*arguments)

class Plugin(LoopbackPlugin):
    def open(self, options, context):
        return Connector(context.peer, options)

plugin = Plugin()
"""

#: Ctrl-C comes while pytest itself is being imported.
WHILE_IMPORTED = """
import signal, sys, threading
from pathlib import Path
if "kvbaton_conformance.run" in sys.orig_argv:
    Path({here!r}).touch()
    gone = threading.Event()
    while signal.SIGINT not in signal.sigpending() and not gone.wait(0.01): ...
"""


#: Ctrl-C comes where Python drops what is raised: in a destructor, as its last statement would, or in a test whose
#: library catches everything.
DROPS = """
import threading
from pathlib import Path
from kvbaton_loopback.connector import LoopbackConnector
from kvbaton_loopback.plugin import LoopbackPlugin

def blocks(*_):
    Path({here!r}).touch()
    threading.Event().wait(600.0)

class Hides:
    __del__ = blocks

class Connector(LoopbackConnector):
    connections = 0

    def connect(self, *arguments):
        Connector.connections += 1
        if Connector.connections == 5:
            {drop}
        super().connect(*arguments)

class Plugin(LoopbackPlugin):
    def open(self, options, context):
        return Connector(context.peer, options)

plugin = Plugin()
"""
_CATCHES = "try: blocks()\n            except BaseException: raise ValueError('torn') from None"


@pytest.fixture
def kit(process, tmp_path):
    """``kit(module)``: the kit at work on a transport of that text, once that has touched the file ``here``."""
    here = tmp_path / "here"
    temporary = tmp_path / "temporary"
    temporary.mkdir()

    def start(module: str, *arguments: str, **how: str) -> subprocess.Popen[str]:
        (tmp_path / "blocking_here.py").write_text(module.format(here=str(here), **how))
        paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {name: value for name, value in os.environ.items() if name != "XDG_RUNTIME_DIR"}
        child = process(
            "conformance", "blocking_here:plugin", "--level", "connector", *arguments, start_new_session=True,
            env={**environment, "PYTHONPATH": paths, "TMPDIR": str(temporary)},
            program="from kvbaton.cli import main; main()",
        )  # fmt: skip
        _wait_for_file(here, child)
        assert list(temporary.glob("kvbaton-*"))
        return child

    return start


def _is_one_line(child: subprocess.Popen[str], folder: Path) -> None:
    out, errors = child.communicate(timeout=60)
    assert (child.returncode, errors) == (130, "kvbaton: interrupted\n"), out
    for word in ("Interrupt", "Traceback", "VERDICT", "CONFORM", "FAILED", "passed"):
        assert word not in out
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    assert not list((folder / "temporary").glob("kvbaton-*"))


@pytest.mark.parametrize("when", ["in-a-test", "while-it-is-imported"])
def test_ctrl_c_in_a_run_of_the_kit_is_one_line(kit, tmp_path, when):
    if when == "while-it-is-imported":
        (tmp_path / "sitecustomize.py").write_text(WHILE_IMPORTED.format(here=str(tmp_path / "here")))
    child = kit(BLOCKS)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    _is_one_line(child, tmp_path)


@pytest.mark.parametrize("drop", ["Hides()", _CATCHES], ids=["destructor", "caught"])
def test_ctrl_c_that_a_library_drops_is_neither_lost_nor_a_failure(kit, tmp_path, drop):
    report = tmp_path / "report"
    report.mkdir()
    (report / "conformance.html").write_text("of an earlier run")
    child = kit(DROPS, "--report", str(report), drop=drop)
    os.killpg(child.pid, signal.SIGINT)
    _is_one_line(child, tmp_path)
    assert not {"conformance.html", "conformance.json", "badge.md"} & {path.name for path in report.iterdir()}


def test_sigterm_to_the_command_alone_ends_the_kit_as_ctrl_c_does(kit, tmp_path):
    child = kit(BLOCKS)
    child.send_signal(signal.SIGTERM)
    _is_one_line(child, tmp_path)


def test_the_kit_does_not_outlive_a_command_that_is_killed(kit, tmp_path):
    child = kit(BLOCKS)
    child.kill()
    out, errors = child.communicate(timeout=60)  # the end of what the kit prints into
    assert "VERDICT" not in out
    assert "CONFORM" not in out
    assert errors == ""


#: A call that neither lets go of the interpreter nor is interrupted.  What signals come is written beside ``here``, by
#: Python's own handler, which needs no interpreter.
_KEEPS = """
            import ctypes, os, signal
            heard = os.open({here!r} + ".heard", os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
            signal.set_wakeup_fd(heard, warn_on_full_buffer=False)
            signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
            os.write(heard, b"!")
            ctypes.PyDLL(None).sleep(600)"""


def test_the_second_ctrl_c_ends_a_kit_that_keeps_the_interpreter(kit, tmp_path):
    child = kit(BLOCKS.replace("threading.Event().wait()", _KEEPS))
    heard = tmp_path / "here.heard"
    _wait_until(lambda: heard.exists() and heard.read_bytes() == b"!", child)
    os.killpg(child.pid, signal.SIGINT)
    # which the command passes on once it has heard the first
    _wait_until(lambda: signal.SIGTERM in heard.read_bytes(), child)
    assert child.poll() is None
    os.killpg(child.pid, signal.SIGINT)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert errors.splitlines()[-1].startswith("kvbaton: interrupted again: forced to stop")


def _wait_for_file(path: Path, child: subprocess.Popen[str]) -> None:
    _wait_until(path.exists, child)


def _wait_until(condition: Callable[[], bool], child: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 50.0
    while not condition():
        assert child.poll() is None, child.communicate()
        assert time.monotonic() < until, "it did not come so far"
        time.sleep(0.01)
