"""Ends in processes of their own: two real processes, which can hang, be killed, and die by themselves.

:class:`RemoteEnd` is an :class:`~kvbaton_conformance.harness.End` whose connector, guard and memory are in a
:class:`PeerProcess`; the same test bodies drive both.  Processes are kept by a :class:`Processes` and used again for
the next test, unless something went wrong in them.

Every request has a deadline shorter than a test's own.  When it passes, the stacks of all threads over there are part
of the error, and the process is killed.  That a process died comes before everything else: it is the cause.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from kvbaton.connector import Capabilities, Chunk, Endpoint, MemoryRegion
from kvbaton.guard import PeerState
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import ClauseBroken
from kvbaton_conformance.deadline import has_passed
from kvbaton_conformance.harness import PATIENCE, End, Heard, Pair, closing
from kvbaton_conformance.inspector import Image
from kvbaton_conformance.leaks import disown, own
from kvbaton_conformance.placement import PAIR
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.witness import Testimony

T = TypeVar("T")

#: Seconds for a process to be ready, and for it to answer one request.
START_BOUND = 30.0
ANSWER_BOUND = 20.0
#: ... and to open an end with device memory, which loads torch and CUDA the first time.
DEVICE_BOUND = 60.0

#: Which clause a call breaks that does not return.
_NEVER = {"submit": "T6", "close": "T10", "register": "T1", "connect": "T2"}


class PeerProcess:
    """A process that answers requests; see :mod:`kvbaton_conformance.peer_process`."""

    def __init__(self, device: int | None = None) -> None:
        """``device``: for ends with memory of this CUDA device; what that needs is loaded there meanwhile."""
        ours, theirs = socket.socketpair()
        # unlinked, so that it goes with the last descriptor; a file never fills up, as a pipe that nobody reads would
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._reported = 0
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvbaton_conformance.peer_process", str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=self._stderr, stderr=self._stderr, pass_fds=(theirs.fileno(),),
            )  # fmt: skip
        self._pipe = Connection(ours.detach())
        self._pipe.send([entry or str(Path.cwd()) for entry in sys.path])
        #: What it was made ready for, and the connectors that have done everything there once.
        self.device = device
        self.warm: set[str] = set()
        self._ready = False
        self._warming = device is not None
        if self._warming:
            self._pipe.send(("warm_up", (device,)))
        self.stopped = False
        for descriptor in (self._pipe.fileno(), self._stderr.fileno()):
            own(descriptor=descriptor)
        own(process=self.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def call(self, request: str, *arguments: Any, bound: float = ANSWER_BOUND) -> Any:
        """The answer; raises what was raised there, with the traceback of there as a note."""
        if not self._ready:
            self._receive("start", START_BOUND)
            self._ready = True
            if self._warming:
                self._receive("warm_up()", DEVICE_BOUND)
        try:
            self._pipe.send((request, arguments))
        except OSError as error:
            raise self._died(request) from error
        kind, *answer = self._receive(_what(request, arguments), bound)
        if kind == "answer":
            return answer[0]
        raised: Exception = answer[0]
        raised.add_note(f"in process {self.pid}:\n{answer[1]}")
        raise raised

    def let_go(self) -> int:
        """Its process id, for whoever ends it from now on; nobody here waits for it any more."""
        self._process.returncode = 0
        return self._process.pid

    def hang(self) -> None:
        """SIGSTOP: it answers nothing, and nothing in it runs, until :meth:`resume`."""
        os.kill(self.pid, signal.SIGSTOP)
        self.stopped = True

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self.stopped = False

    def kill(self) -> None:
        """SIGKILL, and joined: afterwards it is proven dead."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait(PATIENCE)
        self._forget()

    def leave(self) -> list[str]:
        """Let it exit by itself; what was wrong with how it did (T10), in words."""
        with contextlib.suppress(OSError):
            self._pipe.send(("leave", ()))
        problems = []
        try:
            status = self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            problems.append(f"T10: process {self.pid} does not exit:\n{self._stacks()}")
            self._process.kill()
            self._process.wait(PATIENCE)
        else:
            if status:
                problems.append(f"T10: process {self.pid} ended with {_status(status)}")
            if said := self.said():
                problems.append(f"T10: process {self.pid} wrote to stderr or stdout:\n{said}")
        self._forget()
        return problems

    def said(self) -> str:
        """What it has written to standard output and standard error since this was last asked."""
        text = os.pread(self._stderr.fileno(), 1 << 16, self._reported)
        self._reported += len(text)
        return text.decode(errors="replace").strip()

    def _receive(self, what: str, bound: float) -> Any:
        try:
            if self._pipe.poll(bound):
                return self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._died(what) from error
        has_passed()
        stacks = self._stacks()
        self.kill()
        method = what.split("(")[0].split(".")[-1]
        raise ClauseBroken(
            _NEVER.get(method, "T7"),
            f"{what} did not return within {bound:g} s in process {self.pid}, which was killed",
            expected="no call waits for a peer", seen=stacks or "no stack: the process does not even take signals",
            look=f"what {method}() waits for",
        )  # fmt: skip

    def _stacks(self) -> str:
        if self.stopped or not self.alive:
            return ""
        self.said()
        os.kill(self.pid, signal.SIGUSR2)
        deadline, text = time.monotonic() + 2.0, ""
        while time.monotonic() < deadline and not text.endswith("in <module>"):
            time.sleep(0.02)
            text = "\n".join(part for part in (text, self.said()) if part)
        return text

    def _died(self, what: str) -> ClauseBroken:
        try:
            status = _status(self._process.wait(PATIENCE))
        except subprocess.TimeoutExpired:
            status = "still running, but its pipe is closed"
        said = self.said()
        self._forget()
        return ClauseBroken(
            "T7", f"process {self.pid} died during {what}: {status}", expected="faults are events from poll()",
            seen=said or "it wrote nothing", look="native code: run the replay line under a debugger",
        )  # fmt: skip

    def _forget(self) -> None:
        if not self._pipe.closed:
            disown(descriptor=self._pipe.fileno())
            self._pipe.close()
            disown(descriptor=self._stderr.fileno(), process=self.pid)
            self._stderr.close()


def _what(request: str, arguments: Sequence[Any]) -> str:
    if request in ("guard", "memory"):
        return f"{request}.{arguments[0]}()"
    return f"{arguments[0].__name__}()" if request == "apply" else f"{request}()"


def _status(status: int) -> str:
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class Processes:
    """The peer processes of a run."""

    def __init__(self) -> None:
        self._idle: list[PeerProcess] = []

    def prepare(self, devices: Sequence[int | None]) -> None:
        """Start processes ahead, for an end on each of ``devices`` (None: on the host), so that they start together; as
        many again for ends on a device, which take seconds."""
        for device, count in Counter(devices).items():
            ready = sum(process.device == device for process in self._idle)
            wanted = count if device is None else 2 * count
            self._idle += [PeerProcess(device) for _ in range(wanted - ready)]

    def take(self, device: int | None = None) -> PeerProcess:
        """One that was made ready for an end on this device; None: on the host."""
        for process in [process for process in self._idle if process.device == device]:
            self._idle.remove(process)
            if process.alive:
                return process
            process.kill()
        return PeerProcess(device)

    def give_back(self, process: PeerProcess) -> list[str]:
        """Keep it for the next test, after what the last one left in it was looked for; that, in words."""
        if not process.alive:
            process.kill()
            return []
        left = process.call("left_behind")
        said = process.said()
        problems = [f"T10: the process of an end still holds, after close(): {thing}" for thing in left]
        if said:
            problems.append(f"T10: the process of an end wrote to stderr or stdout:\n{said}")
        if problems:
            process.kill()
        else:
            self._idle.append(process)
        return problems

    def close(self) -> list[str]:
        """Let all exit; what was wrong with that, in words."""
        problems = [problem for process in self._idle for problem in process.leave()]
        self._idle.clear()
        return problems


class RemoteGuard:
    """The guard of an end in another process: the same calls as :class:`~kvbaton.guard.GuardedConnector`."""

    def __init__(self, process: PeerProcess, capabilities: Capabilities) -> None:
        self._process = process
        self.capabilities = capabilities

    @property
    def closed(self) -> bool:
        return bool(self._ask("closed"))

    @property
    def needs_polling(self) -> bool:
        return bool(self._ask("needs_polling"))

    def endpoint(self) -> Endpoint:
        endpoint: Endpoint = self._ask("endpoint")
        return endpoint

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._ask("register", regions)

    def connect(self, endpoint: Endpoint) -> None:
        self._ask("connect", endpoint)

    def disconnect(self, peer: PeerId) -> None:
        self._ask("disconnect", peer)

    def fenced(self, peer: PeerId) -> None:
        self._ask("fenced", peer)

    def submit(self, chunk: Chunk) -> bool:
        return bool(self._ask("submit", chunk))

    def cancel(self, transfer: TransferId) -> None:
        self._ask("cancel", transfer)

    def acknowledge(self, transfer: TransferId) -> None:
        self._ask("acknowledge", transfer)

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        self._ask("grant", transfer, peer, target)

    def revoke(self, transfer: TransferId) -> bool:
        return bool(self._ask("revoke", transfer))

    def forget(self, transfer: TransferId) -> None:
        self._ask("forget", transfer)

    def wait(self, timeout: float) -> None:
        self._ask("wait", timeout)

    def close(self) -> None:
        self._ask("close")

    def outstanding(self) -> int:
        return int(self._ask("outstanding"))

    def statistics(self) -> Mapping[str, float]:
        figures: Mapping[str, float] = self._ask("statistics")
        return figures

    def peer_states(self) -> Mapping[PeerId, PeerState]:
        states: Mapping[PeerId, PeerState] = self._ask("peer_states")
        return states

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._process.call("guard", name, *arguments)


class RemoteMemory:
    """The inspector of an end in another process: the same calls as
    :class:`~kvbaton_conformance.inspector.ByteInspector`."""

    def __init__(self, process: PeerProcess) -> None:
        self._process = process

    def poison(self, *ids: int) -> None:
        self._ask("poison", *ids)

    def fill(self, *ids: int) -> None:
        self._ask("fill", *ids)

    def read(self, where: Segments) -> bytes:
        return bytes(self._ask("read", where))

    def write(self, where: Segments, data: bytes) -> None:
        self._ask("write", where, data)

    def image(self) -> Image:
        image: Image = self._ask("image")
        return image

    def check(self, expected: Image, clause: str = "T3") -> None:
        self._ask("check", expected, clause)

    def untouched(self, since: Image, clause: str = "T3") -> None:
        self._ask("untouched", since, clause)

    def _ask(self, name: str, *arguments: Any) -> Any:
        return self._process.call("memory", name, *arguments)


class RemoteEnd(End):
    """An end in a process of its own."""

    guard: RemoteGuard
    memory: RemoteMemory

    def __init__(self, peer: PeerId, process: PeerProcess, capabilities: Capabilities) -> None:
        super().__init__(peer)
        self.process = process
        self.guard = RemoteGuard(process, capabilities)
        self.memory = RemoteMemory(process)

    def hear(self) -> Heard:
        heard: Heard = self.process.call("hear")
        return heard

    def expect(self, transfer: TransferId, sequence: int, writes: Segments, data: bytes) -> None:
        self.process.call("expect", transfer, sequence, writes, data)

    def testimony(self) -> Testimony:
        testimony: Testimony = self.process.call("testimony")
        return testimony

    def advance(self, seconds: float) -> None:
        self.process.call("advance", seconds)

    def apply(self, action: Callable[..., T], *arguments: Any) -> T:
        result: T = self.process.call("apply", action, *arguments)
        return result

    def _forget_books(self) -> None:
        self.process.call("forget_events")

    # -- what can happen to a process ----------------------------------------------------------------------------------

    def kill(self) -> None:
        """SIGKILL and join."""
        self.process.kill()
        self.dead = True

    def put_down(self) -> None:
        self.kill()

    def hang(self) -> None:
        """SIGSTOP."""
        self.process.hang()
        self.hung = True

    def resume(self) -> None:
        """SIGCONT."""
        self.process.resume()
        self.hung = False


def open_remote_end(
    processes: Processes, subject: Subject, peer: PeerId, how: Mapping[str, Any], options: Mapping[str, Any]
) -> RemoteEnd:
    """Open one end in a process of its own; ``how`` goes to :func:`kvbaton_conformance.harness.open_end` there."""
    device = subject.device(peer.name)
    process = processes.take(device)
    how = {"device": device, **how}
    bound = ANSWER_BOUND if device is None else DEVICE_BOUND
    try:
        need = subject.need("two-processes")
        if subject.title not in process.warm:
            process.warm.add(subject.title)
            meet = "same_process" in subject.reaches
            far = len(set(subject.devices)) > 1
            process.call("meet", subject.reference, options, need, meet, device, far, bound=bound)
        capabilities = process.call("open", subject.reference, options, need, peer, how, bound=bound)
    except BaseException:
        process.kill()
        raise
    return RemoteEnd(peer, process, capabilities)


@contextmanager
def remote_pair(processes: Processes, subject: Subject, names: tuple[str, str] = PAIR, **how: Any) -> Iterator[Pair]:
    """Two connected ends in two processes, for use outside of the suite."""
    processes.prepare([subject.device(name) for name in names])
    ends = [
        open_remote_end(processes, subject, PeerId.start(name), {**how, "seed": seed}, subject.given_options)
        for seed, name in enumerate(names)
    ]
    try:
        with closing(ends):
            pair = Pair(ends[0], ends[1])
            pair.source.memory.fill()
            pair.connect()
            yield pair
    finally:
        for end in ends:
            if not end.dead:
                processes.give_back(end.process)
