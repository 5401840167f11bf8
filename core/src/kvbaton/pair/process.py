"""The process of one end, seen from whoever started it: bounded answers, and what became of it where there is none."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

import msgspec

from kvbaton.errors import TransportError
from kvbaton.launch.exit_status import describe
from kvbaton.pair.words import Answer, Close, Failed, Frames, Order

Cause = Literal["refused", "failed", "late", "hung", "died", "wrong"]

#: Seconds beyond an order's own bound after which its process is taken to hang.
GRACE = 5.0
#: ... for the stacks of a process that hangs, and for one that was killed to be gone.
_LAST_WORDS = 2.0
#: Bytes of what it says that are looked at.
_SAID = 1 << 16
_FRAME = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)$', re.MULTILINE)


class PairFailed(TransportError):
    """What was asked of a pair could not be done.  Facts: ``cause``, ``end``, ``said`` (its last words).

    ``cause``: *refused* to open or to connect; *failed*, by an error; *late*, its end answered, but the bytes had not
    come; *hung*, it did not even answer, and was killed; *died*; *wrong* bytes came.
    """


class EndProcess:
    """Started at once; see :mod:`kvbaton.pair.end` for what runs there.  ``frames`` leads to its end there."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], said: IO[bytes], frames: Frames) -> None:
        self.name = name
        self._process = process
        self._said = said
        self._frames = frames

    @classmethod
    def start(
        cls, ends: Sequence[tuple[str, socket.socket]], shared: int, environment: Mapping[str, str]
    ) -> list[EndProcess]:
        """One process for all of ``ends``, which are names and bells; each is an end of its own."""
        # unlinked, so that it goes with the last descriptor; a file never fills up, as a pipe that nobody reads would
        said = tempfile.TemporaryFile()  # noqa: SIM115
        controls = [socket.socketpair() for _ in ends]
        descriptors = [shared]
        for (_, theirs), (_, bell) in zip(controls, ends, strict=True):
            descriptors += [theirs.fileno(), bell.fileno()]
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvbaton.pair.end", str(os.getpid()), *map(str, descriptors)],
                stdin=subprocess.DEVNULL, stdout=said, stderr=said, pass_fds=descriptors,
                env={**os.environ, "PYTHONPATH": path, **environment}, start_new_session=True,
            )  # fmt: skip
        finally:
            for _, theirs in controls:
                theirs.close()
        return [
            cls(name, process, said, Frames(ours)) for (name, _), (ours, _) in zip(ends, controls, strict=True)
        ]  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, order: Order) -> None:
        """Send an order.  Raises :class:`PairFailed` where the process is gone."""
        try:
            self._frames.send(order)
        except EOFError:
            raise self._died(order) from None

    def hear(self, order: Order, bound: float, other: EndProcess | None = None) -> Any:
        """The answer to ``order``.  Raises :class:`PairFailed` where it is one of failure, or none within ``bound``.

        That ``other`` dies meanwhile is noticed at once: it is then the cause, of a failure here, too.
        """
        until = time.monotonic() + bound
        watched = select.poll()
        watched.register(self._frames.socket, select.POLLIN)
        if other is not None:
            watched.register(other._frames.socket, 0)  # for its end alone: an answer of its own is for later
        while not self._frames.ready(0.0):
            if not watched.poll(max(until - time.monotonic(), 0.0) * 1000):
                raise self._hung(order, bound)
            if other is not None and other.gone():
                raise other._died(order)
        try:
            answer: Answer = self._frames.receive(Answer, max(until - time.monotonic(), 0.1))
        except TimeoutError:
            raise self._hung(order, bound) from None
        except EOFError:
            raise self._died(order) from None
        except msgspec.MsgspecError as error:  # what a transport declares is part of some
            raise PairFailed(
                f"{self.name}: what it answers in {_doing(order)} is not what it should be: {error}",
                cause="failed", end=self.name, said=self.said(),
            ) from error  # fmt: skip
        if isinstance(answer, Failed):
            if other is not None and other.gone():
                raise other._died(order)
            raise PairFailed(
                f"{self.name}: {answer.text}", cause=answer.cause, end=self.name, said=self.said() or answer.trace
            )
        return answer

    def gone(self) -> bool:
        """Whether its side of the connection is closed, whatever it said before."""
        look = select.poll()
        look.register(self._frames.socket, 0)  # for its end alone
        return bool(look.poll(0))

    def said(self) -> str:
        """What it has written to standard output and standard error, the last of it."""
        return self._since(0).strip()

    def _since(self, offset: int) -> str:
        """What has come behind the first ``offset`` bytes; of much the last."""
        end = os.fstat(self._said.fileno()).st_size
        start = max(offset, end - _SAID)
        return os.pread(self._said.fileno(), _SAID, start).decode(errors="replace")

    def leave(self, bound: float) -> str:
        """Let it close; what was wrong with that, empty where nothing was."""
        try:
            self.tell(Close())
            self.hear(Close(), bound)
        except PairFailed as error:
            return str(error)
        return ""

    def exit(self, bound: float) -> str:
        """Wait for the exit of a process of which every end has closed; what was wrong with that."""
        try:
            status = self._process.wait(bound)
        except subprocess.TimeoutExpired:
            return f"{self.name}: closed, and its process did not exit within {bound:g} s"
        return f"{self.name}: its process ended with {describe(status)}" if status else ""

    def end(self) -> None:
        """Kill and join it, whatever state it is in; idempotent."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL) if self._process.poll() is None else None
        self._process.wait()
        self._frames.close()
        self._said.close()

    def _died(self, order: Order) -> PairFailed:
        try:
            status = describe(self._process.wait(_LAST_WORDS))
        except subprocess.TimeoutExpired:
            status = "it closed its connection and lives"
        said = self.said()
        last = f": {said.splitlines()[-1].strip()}" if said else ""
        return PairFailed(
            f"{self.name}: its process died in {_doing(order)} ({status}){last}", cause="died", end=self.name, said=said
        )

    def _hung(self, order: Order, bound: float) -> PairFailed:
        stacks = self._stacks()
        frame = next((match for match in _FRAME.finditer(stacks) if "/kvbaton/pair/" not in match["file"]), None)
        where = f", in {frame['function']} ({Path(frame['file']).name}:{frame['line']})" if frame else ""
        return PairFailed(
            f"{self.name}: its process hangs in {_doing(order)}{where}: no answer within {bound:g} s; it was killed",
            cause="hung", end=self.name, said=stacks,
        )  # fmt: skip

    def _stacks(self) -> str:
        """Where its threads are, the one that answers first."""
        before = os.fstat(self._said.fileno()).st_size
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
        until = time.monotonic() + _LAST_WORDS
        text = ""
        while time.monotonic() < until and "in _run_module_as_main" not in text:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)
                break
            text = self._since(before)
        threads = [part for part in text.split("\n\n") if "in serve" in part]
        return threads[0] if threads else text


def _doing(order: Order) -> str:
    return {
        "Open": "opening",
        "Connect": "connecting",
        "Send": "sending",
        "Expect": "receiving",
        "Part": "parting",
    }.get(type(order).__name__, type(order).__name__.lower())
