"""Ctrl-C, as a real signal to a real process."""

import signal
import subprocess
import sys

import pytest

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


@pytest.mark.timeout(60)
@pytest.mark.parametrize("asked_by", [signal.SIGINT, signal.SIGTERM])
def test_the_first_ctrl_c_cancels_drains_and_exits_130(process, asked_by):
    child = process("run", "--model", "m", "--prompt", "slow one", "--prompt", "slow two", "--prompt", "quick")
    wait_for(child, "decoding")
    child.send_signal(asked_by)
    out, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    last = errors.splitlines()[-1]
    assert last == "kvbaton: interrupted: 2 of 3 requests cancelled, everything stopped"
    assert "Traceback" not in errors
    assert "prefill-0" not in out  # no table of what was cut short


@pytest.mark.timeout(60)
def test_the_second_ctrl_c_forces(process):
    child = process("run", "--model", "stuck", "--prompt", "slow one")
    wait_for(child, "decoding")
    child.send_signal(signal.SIGINT)
    wait_for(child, "decoding")
    wait_for(child, "decoding")
    assert child.poll() is None, "the first Ctrl-C must wait for what is under way"
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert errors.splitlines()[-1].startswith("kvbaton: interrupted again: forced to stop")


@pytest.mark.timeout(60)
def test_ctrl_c_during_start_up_does_not_wait_for_it(process):
    child = process("run", "--model", "sleepy", "--prompt", "x")
    wait_for(child, "starting")
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 130
    assert errors == "kvbaton: interrupted\n"


@pytest.mark.timeout(60)
def test_ctrl_c_before_anything_is_loaded_is_one_line_too():
    ran = subprocess.run([sys.executable, "-c", EARLY, "doctor"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "kvbaton: interrupted\n")


@pytest.mark.timeout(60)
def test_json_prints_nothing_when_interrupted(process):
    child = process("run", "--model", "m", "--prompt", "slow one", "--json")
    wait_for(child, "decoding")
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    assert (child.returncode, out) == (130, "")
