"""Asking what may never answer, such as a driver that is stuck, and going on after so long without.

Of a *thread* it is cheap, and enough where the call that hangs has let go of the interpreter, as those by ctypes do.
A *process* of its own can be left behind in every case: where the call keeps the interpreter, where it dies, and where
it hangs in the kernel, so that not even a kill ends the process that it is in.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Final, TypeVar

from kvbaton.launch.exit_status import describe

T = TypeVar("T")

#: Seconds after which no answer is expected any more.  The first start of CUDA takes ten or twenty on a slow machine
#: with many devices.
PATIENCE: Final = 60.0
#: Seconds after which somebody who watches is told what is waited for.
_TELL: Final = 10.0
#: Seconds for a process that was killed, or has nothing more to say, to be gone.
_GONE: Final = 2.0

_log = logging.getLogger(__name__)
_hanging: list[threading.Thread] = []
#: Processes that a kill did not end: kept, since whoever forgets one waits for it.
_left: list[subprocess.Popen[bytes]] = []


class NoAnswer(Exception):
    """There was none in time; the text says so, as the end of a sentence."""


class Gone(NoAnswer):
    """Its process has ended, so that there never will be one."""


# -- of a thread -------------------------------------------------------------------------------------------------------


def of_thread(what: str, call: Callable[[], T], seconds: float) -> T:
    """What ``call()`` returns, or raises, within ``seconds``.  ``what`` is asked, for whoever watches.

    Raises :class:`NoAnswer` after that, with the line where it was; its thread is left to itself, and ends with the
    process.  A call that hangs without letting go of the interpreter hangs everything.
    """
    outcome: list[tuple[T | None, BaseException | None]] = []
    done = threading.Event()

    def ask() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # it is raised where it was asked for
            outcome.append((None, error))
        done.set()

    thread = threading.Thread(target=ask, name="kvbaton-asking", daemon=True)
    _hanging.append(thread)  # also where whoever waits is interrupted
    thread.start()
    if not _patiently(what, seconds, done.wait):
        raise NoAnswer(f"did not answer within {seconds:g} s{_place(thread)}")
    thread.join()
    _hanging.remove(thread)
    answer, error = outcome.pop()
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def hanging() -> bool:
    """Whether a thread of :func:`of_thread` still hangs.  What a library does at the exit of the process may then wait
    for it: ``os._exit`` does not."""
    return any(thread.is_alive() for thread in _hanging)


#: Where the standard library is, which is where much hangs and little is wrong.
_LIBRARY: Final = Path(sysconfig.get_path("stdlib"))


def _place(thread: threading.Thread) -> str:
    """The line where it is, of whoever called the standard library, with the package's path."""
    innermost = frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None and _of_library(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == __file__:  # nobody but the standard library was asked
        frame = innermost
    if frame is None:
        return ""
    return f" ({_path(frame)}, line {frame.f_lineno}, in {frame.f_code.co_name})"


def _of_library(file: str) -> bool:
    path = Path(file)
    return file.startswith("<frozen ") or (
        path.is_relative_to(_LIBRARY) and not {"site-packages", "dist-packages"} & set(path.parts)
    )


def _path(frame: FrameType) -> str:
    """``package/module.py``: the file's name alone may be ``__init__.py``, and all of it is long."""
    file = Path(frame.f_code.co_filename)
    depth = str(frame.f_globals.get("__name__", "")).count(".") + (file.name == "__init__.py")
    return "/".join(file.parts[-1 - depth :])


def _patiently(what: str, seconds: float, wait: Callable[[float], bool]) -> bool:
    """``wait`` for at most ``seconds``, in two parts where that is long."""
    if seconds <= _TELL:
        return wait(seconds)
    if wait(_TELL):
        return True
    _log.warning("%s has not answered for %g s; after %g s it is given up", what, _TELL, seconds)
    return wait(seconds - _TELL)


# -- of a process ------------------------------------------------------------------------------------------------------


class Apart:
    """A process that runs the function ``entry`` (``module:function``) with ``arguments``: texts, and it yields texts.

    It prints nothing, imports what this process would, and ends with it.  A context manager; its end leaves the process
    neither running nor waited for, nor what it has started in its session, such as an nvidia-smi that hangs, too.
    """

    def __init__(self, entry: str, *arguments: str) -> None:
        path = json.dumps([part or str(Path.cwd()) for part in sys.path])
        self._received = b""
        self._answers, theirs = os.pipe()
        words = [str(os.getpid()), str(theirs), path, entry, *arguments]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _PROGRAM, *words], pass_fds=(theirs,), stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(self._answers)
            raise
        finally:
            os.close(theirs)

    def __enter__(self) -> Apart:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._answers)
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def answer(self, what: str, seconds: float) -> str:
        """The next one, of ``what``.  Raises :class:`NoAnswer` after ``seconds``, :class:`Gone` where it has ended."""
        # what it has started may hold the pipe open after its end
        if not _patiently(what, seconds, self._read) and not self._ended(0.0):
            raise NoAnswer(f"did not answer within {seconds:g} s")
        line, newline, self._received = self._received.partition(b"\n")
        if newline:
            try:
                text: str = json.loads(line)
            except ValueError:  # whoever writes into descriptors that are not its own
                self._kill()
                raise Gone("wrote what is no answer where answers are read") from None
            return text
        status = None
        if self._ended(_GONE):
            self._kill()
            status = self._process.wait()
        raise Gone(f"ended the process that asked it{'' if status is None else f' ({describe(status)})'}")

    def _read(self, seconds: float) -> bool:
        """Until there is a line, or its end; false where there was neither."""
        until = time.monotonic() + seconds
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        while b"\n" not in self._received:
            if not poll.poll(max(until - time.monotonic(), 0.0) * 1e3):
                return False
            read = os.read(self._answers, 1 << 16)
            if not read:
                return True
            self._received += read
        return True

    def _ended(self, seconds: float) -> bool:
        """Whether it has within so long; it is not waited for in the system's sense, which would free its number."""
        until = time.monotonic() + seconds
        while self._process.returncode is None:
            try:
                if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    return True
            except ChildProcessError:  # the system waits for it, where this process ignores SIGCHLD
                self._process.poll()
                continue
            if time.monotonic() >= until:
                return False
            time.sleep(0.002)
        return True

    def _kill(self) -> None:
        """It and what it has started, unless it was waited for: its number may be another's by now."""
        if self._process.returncode is None:
            _kill_session(self.pid)

    def _end(self) -> None:
        self._kill()
        try:
            self._process.wait(_GONE)
        except subprocess.TimeoutExpired:
            _left.append(self._process)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(OSError):  # all gone
        os.killpg(leader, signal.SIGKILL)


_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[3]); from kvbaton.answering import _answer; _answer()"
)


def _answer() -> None:
    """What runs in the process of :class:`Apart`.  It does not return: what was loaded is not asked to tidy up."""
    asker, answers, _, entry, *arguments = sys.argv[1:]
    os.set_inheritable(int(answers), False)  # or what is started here could hide that this has ended
    _end_with(int(asker))
    module, _, function = entry.partition(":")
    given: Iterable[str] = getattr(importlib.import_module(module), function)(*arguments)
    for text in given:
        line = json.dumps(text).encode() + b"\n"
        while line:
            line = line[os.write(int(answers), line) :]
    os._exit(0)


def _end_with(asker: int) -> None:
    """End when that process does, unless what is asked keeps the interpreter, or the system has no way to tell."""
    try:
        handle = os.pidfd_open(asker)
    except (AttributeError, OSError):
        handle = -1
    if os.getppid() != asker:
        os._exit(1)
    if handle < 0:
        return
    poll = select.poll()
    poll.register(handle, select.POLLIN)

    def watch() -> None:
        poll.poll()
        _kill_session(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, name="kvbaton-asker", daemon=True).start()
