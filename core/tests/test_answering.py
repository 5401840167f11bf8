"""Asking what never answers, and going on."""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from kvbaton import answering
from kvbaton.answering import Apart, Gone, NoAnswer, hanging, of_thread

HERE = f"{Path(__file__).stem}"
SHORT = 0.3


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


# -- what is asked -----------------------------------------------------------------------------------------------------


def answers(*texts):
    print("nobody reads this")
    yield from texts


def hangs_after_one(text):
    """As a call of a driver does, and holding the interpreter."""
    yield text
    ctypes.PyDLL(None).pause()


def dies(text):
    yield text
    os.kill(os.getpid(), signal.SIGSEGV)


def asks_a_program(ends):
    """As one that asks nvidia-smi, by whatever starts it; the program hangs, and its number is told."""
    read, write = os.pipe()
    os.set_inheritable(write, True)
    os.posix_spawn("/bin/sh", ["sh", "-c", f"echo $$ >&{write}; exec sleep 600"], os.environ)
    yield os.read(read, 20).decode().strip()
    if ends:
        os._exit(3)
    ctypes.CDLL(None).pause()


def writes_everywhere():
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"\xff nothing\n")
    yield "here"


def starts_another(how):
    """Which has the pipe as well, and knows nothing of it; as nvidia-smi would be where a driver is stuck."""
    another = os.fork()
    if not another:
        time.sleep(600)
    yield str(another)
    if how == "dies":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif how == "hangs":
        ctypes.CDLL(None).pause()


def says_what_it_finds():
    yield json.dumps([str(Path.cwd()), sys.path])


# -- of a thread -------------------------------------------------------------------------------------------------------


def test_an_answer_comes_back_and_its_thread_is_gone():
    before = threading.active_count()
    assert of_thread("it", lambda: 7, 60.0) == 7
    assert threading.active_count() == before


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3)])
def test_what_it_raises_is_raised_here(error):
    def call():
        raise error

    with pytest.raises(type(error)) as caught:
        of_thread("it", call, 60.0)
    assert caught.value is error


@pytest.fixture
def once_it_hangs(monkeypatch):
    """A thread is waited for from when what it asks waits: on a busy machine it may take longer to come so far."""
    patiently = answering._patiently

    def from_then_on(what, seconds, wait):
        asked, until = answering._hanging[-1].ident, time.monotonic() + 60.0
        while sys._current_frames()[asked].f_code.co_name != "wait":
            assert time.monotonic() < until, "it does not hang"
            time.sleep(0.01)
        return patiently(what, seconds, wait)

    monkeypatch.setattr(answering, "_patiently", from_then_on)


@pytest.mark.usefixtures("once_it_hangs")
def test_a_call_that_hangs_is_given_up_with_the_line_where_it_was():
    over = threading.Event()
    with pytest.raises(NoAnswer, match=r"did not answer within 0.3 s \(threading.py, line \d+, in wait\)"):
        of_thread("it", over.wait, SHORT)
    assert hanging()
    over.set()


@pytest.mark.usefixtures("once_it_hangs")
@pytest.mark.parametrize(
    ("file", "module"),
    [
        ("hang_at_all/__init__.py", "hang_at_all"),
        ("hang_in/part.py", "hang_in.part"),
        ("hangs_alone.py", "hangs_alone"),
    ],
)
def test_the_line_is_that_of_whoever_called_the_standard_library_with_its_package(file, module, tmp_path, monkeypatch):
    written = tmp_path / file
    written.parent.mkdir(exist_ok=True)
    written.write_text("import threading\nover = threading.Event()\ndef ask():\n    over.wait()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked = importlib.import_module(module)
    with pytest.raises(NoAnswer) as given_up:
        of_thread("it", asked.ask, SHORT)
    asked.over.set()
    del sys.modules[module]
    assert str(given_up.value) == f"did not answer within 0.3 s ({file}, line 4, in ask)"


# -- of a process ------------------------------------------------------------------------------------------------------


def test_answers_come_one_by_one_and_then_it_is_gone():
    with Apart(f"{HERE}:answers", "one", "two\nlines", "") as process:
        assert [process.answer("it", 60.0) for _ in range(3)] == ["one", "two\nlines", ""]
        with pytest.raises(Gone, match=r"ended the process that asked it \(exit status 0\)"):
            process.answer("it", 60.0)
    assert not psutil.pid_exists(process.pid)


def test_it_finds_what_this_process_would(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    with Apart(f"{HERE}:says_what_it_finds") as process:
        folder, path = json.loads(process.answer("it", 60.0))
    assert folder == str(tmp_path)
    assert path == [str(tmp_path), *sys.path[1:]]


def test_one_that_hangs_is_left_and_is_gone():
    with Apart(f"{HERE}:hangs_after_one", "first") as process:
        assert process.answer("it", 60.0) == "first"
        with pytest.raises(NoAnswer, match=r"^did not answer within 0.3 s$"):
            process.answer("it", SHORT)
    assert not psutil.pid_exists(process.pid)


def gone(pid):
    """Within a bound; it may still have to be waited for."""
    until = time.monotonic() + 30.0
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            if time.monotonic() > until:
                os.kill(pid, signal.SIGKILL)
                pytest.fail("it lives")
            time.sleep(0.01)


def test_nor_is_a_program_left_that_it_has_started():
    with Apart(f"{HERE}:asks_a_program", "") as process:
        program = int(process.answer("it", 60.0))
    gone(program)


def test_a_program_that_it_leaves_does_not_hide_its_end():
    with Apart(f"{HERE}:asks_a_program", "ends") as process:
        program = int(process.answer("it", 60.0))
        with pytest.raises(Gone, match=r"exit status 3"):
            process.answer("it", 60.0)
    gone(program)


def test_one_that_dies_is_told_with_the_signal():
    with Apart(f"{HERE}:dies", "first") as process:
        assert process.answer("it", 60.0) == "first"
        with pytest.raises(Gone, match=r"ended the process that asked it \(killed by SIGSEGV\)"):
            process.answer("it", 60.0)


@pytest.mark.parametrize("how", ["dies", "ends", "hangs"])
def test_nobody_is_killed_whose_number_may_be_another_s(how, monkeypatch):
    """Once a process was waited for, its number is anybody's."""
    killed, kill = [], os.killpg

    def killpg(number, signum):
        killed.append(os.waitid(os.P_PID, number, os.WEXITED | os.WNOHANG | os.WNOWAIT))  # raises where it is nobody's
        kill(number, signum)

    monkeypatch.setattr(os, "killpg", killpg)
    with Apart(f"{HERE}:starts_another", how) as process:
        another = int(process.answer("it", 60.0))
        if how != "hangs":
            gone(process.pid)
        for _ in range(2):
            with pytest.raises(NoAnswer):
                process.answer("it", SHORT)
    assert len(killed) == 1
    gone(another)


def test_where_the_system_waits_for_children_it_ends_too():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with Apart(f"{HERE}:answers") as process, pytest.raises(Gone):
            process.answer("it", 60.0)
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_what_is_no_answer_ends_it():
    with Apart(f"{HERE}:writes_everywhere") as process:
        with pytest.raises(Gone, match="wrote what is no answer"):
            process.answer("it", 60.0)
        gone(process.pid)


@pytest.mark.parametrize(
    ("how", "says"),
    [("hangs", r"^did not answer"), ("dies", r"killed by SIGSEGV"), ("ends", r"exit status 0")],
)
def test_what_it_has_started_is_not_left_behind_and_is_not_taken_for_it(how, says):
    with Apart(f"{HERE}:starts_another", how) as process:
        another = int(process.answer("it", 60.0))
        if how != "hangs":
            gone(process.pid)
        with pytest.raises(NoAnswer, match=says) as caught:
            process.answer("it", SHORT)
        assert isinstance(caught.value, Gone) == (how != "hangs")
    assert not psutil.pid_exists(process.pid)
    gone(another)


def test_it_does_not_outlive_a_process_that_is_killed():
    program = (
        f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r}); from kvbaton.answering import Apart;"
        f" process = Apart('{HERE}:answers_and_waits'); print(process.pid, process.answer('it', 60.0), flush=True);"
        " time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as asker:
        try:
            pid, another = map(int, asker.stdout.readline().split())
        finally:
            asker.kill()
    gone(pid)
    gone(another)


def answers_and_waits():
    another = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield str(another.pid)
    ctypes.CDLL(None).pause()
