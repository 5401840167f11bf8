"""Stages as processes: started clean, watched, killed if need be, and joined.

Each stage is ``python -m kvbaton.launch.worker`` in a session of its own, so that Ctrl-C in a terminal reaches the
application only.  It inherits nothing but a pipe, which is both its order and its lifeline, and the pipe that it prints
into.  One thread of the launcher watches every stage's end (a descriptor of its process where the system has them)
and reads what it prints.

*What a join proves*: the process, every thread of it and every process it left in its session's process group were
killed or ended, and the process was waited for.  No instruction of it runs any more, its descriptors are closed.  Bytes
that it had handed to a transport may still be under way: that is the second half of a fence (C6.4).
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from kvbaton.control.bell import DescriptorBell
from kvbaton.control.zmq import ZmqCoordinatorChannels
from kvbaton.errors import KvbatonError, LocalProtocolError, StageDied, StartupError
from kvbaton.identity import PeerId
from kvbaton.launch import StageSpec
from kvbaton.launch.exit_status import describe
from kvbaton.launch.log_ring import LogRing
from kvbaton.launch.worker import Order
from kvbaton.observe.log_line import readable

_logger = logging.getLogger(__name__)

#: What a pipe holds unless asked, and the most that an ordinary user may ask for.
_PIPE_BYTES: Final = 1 << 16
_LARGEST_PIPE_BYTES: Final = 1 << 20

#: A pipe holds at most 16 pages; each may be a read of its own.
_READS_PER_PASS: Final = 16

#: Seconds between looks where the system has no descriptors for processes.
_LOOK_INTERVAL: Final = 0.05


class ProcessHandle:
    """A stage in a process; see :class:`~kvbaton.launch.StageHandle`."""

    def __init__(
        self,
        peer: PeerId,
        spec: StageSpec,
        process: subprocess.Popen[bytes],
        lifeline: int,
        output: int,
        log_lines: int,
    ) -> None:
        self._peer = peer
        self._spec = spec
        self._process = process
        self._status: int | None = None
        self._over = threading.Event()
        # a process number is ours until it was waited for; the lock keeps a kill from coming after that
        self._reaping = threading.Lock()
        #: the watching thread's alone from here on
        self.log = LogRing(log_lines, shown=readable)
        self.lifeline = lifeline
        self.output: int | None = output
        self.pidfd: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self.pidfd = os.pidfd_open(process.pid)

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def spec(self) -> StageSpec:
        return self._spec

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def joined(self) -> bool:
        return self.exit_status() is not None

    def exit_status(self) -> int | None:
        return self._status if self._over.is_set() else None

    def join(self, timeout: float) -> bool:
        return self._over.wait(max(timeout, 0.0))

    def kill(self) -> None:
        with self._reaping:
            if self._status is None:
                self._kill_group()

    def log_tail(self) -> list[str]:
        return self.log.tail()

    def death(self) -> StageDied | None:
        status = self.exit_status()
        return None if status is None else StageDied(self._peer.name, describe(status), self.log_tail())

    # -- the launcher's thread -----------------------------------------------------------------------------------------

    def has_ended(self) -> bool:
        """Whether the process is over, without waiting for it in the system's sense."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> None:
        """The process is over: end what it left in its group, then wait for it."""
        with self._reaping:
            # first the group, while the number still cannot mean anybody else: whoever shares the dead stage's mappings
            # could go on writing through them
            self._kill_group()
            self._status = self._process.wait()

    def conclude(self) -> None:
        """Its log is complete: let the others know that it is over."""
        self._over.set()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class ProcessLauncher:
    """Starts stages as processes; see :class:`~kvbaton.launch.Launcher`.

    ``log_lines``: how many last lines are kept of each stage.  ``on_line(peer, line)`` sees every line, on the
    launcher's thread: be brief.  ``orphan_grace``: seconds after which a stage that outlives this process is ended by
    its own watchdog (one that hung before, without ever letting Python run, is not).  ``patience``: seconds that
    ``close`` waits for a killed stage.  ``log_level``: from which level on the stages log.

    Ownership: one thread, and while a stage lives its process and three descriptors; all are gone after ``close``.
    """

    def __init__(
        self,
        channels: ZmqCoordinatorChannels,
        *,
        log_lines: int = 50,
        on_line: Callable[[PeerId, str], None] | None = None,
        orphan_grace: float = 60.0,
        patience: float = 10.0,
        log_level: int = logging.WARNING,
    ) -> None:
        self._channels = channels
        self._log_lines = log_lines
        self._on_line = on_line
        self._orphan_grace = orphan_grace
        self._patience = patience
        self._log_level = log_level
        self._lock = threading.Lock()
        self._new: deque[ProcessHandle] = deque()
        self._running: set[ProcessHandle] = set()
        self._exited: deque[ProcessHandle] = deque()
        self._closing = False
        self._leaving = False
        self._bell = DescriptorBell()
        self._thread = threading.Thread(target=self._watch_over, name="kvbaton-launcher", daemon=True)
        self._thread.start()

    def start(self, spec: StageSpec) -> ProcessHandle:
        if self._closing:
            raise LocalProtocolError(f"the launcher is closed; stage {spec.name} was not started")
        peer = PeerId.start(spec.name)
        self._channels.add(peer)
        try:
            handle = self._spawn(peer, spec)
        except (OSError, TypeError, ValueError, subprocess.SubprocessError) as error:
            self._channels.remove(peer)
            raise StartupError(f"stage {spec.name} cannot be started: {error}", stage=spec.name) from error
        with self._lock:
            self._running.add(handle)
            self._new.append(handle)
        self._bell.ring()
        return handle

    def exited(self) -> Sequence[ProcessHandle]:
        found = []
        while self._exited:
            found.append(self._exited.popleft())
        return found

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        with self._lock:
            running = sorted(self._running, key=lambda handle: handle.peer)
        for handle in running:
            handle.kill()
        deadline = time.monotonic() + self._patience
        stuck = [handle for handle in running if not handle.join(deadline - time.monotonic())]
        self._leaving = True
        self._bell.ring()
        self._thread.join()
        self._bell.close()
        if stuck:
            names = ", ".join(f"{handle.peer} (process {handle.pid})" for handle in stuck)
            raise KvbatonError(
                f"stages {names} were killed {self._patience} s ago and are still there, which the system does to a"
                " process that waits for a device. They are not fenced: what they may write to must stay held (C6.4).",
                stages=tuple(handle.peer for handle in stuck),
            )

    # -- start ---------------------------------------------------------------------------------------------------------

    def _spawn(self, peer: PeerId, spec: StageSpec) -> ProcessHandle:
        with ExitStack() as parent, ExitStack() as child:
            order_read, order_write = os.pipe()
            parent.callback(os.close, order_write)
            child.callback(os.close, order_read)
            output_read, output_write = os.pipe()
            parent.callback(os.close, output_read)
            child.callback(os.close, output_write)
            order = Order(
                spec=spec,
                ticket=self._channels.ticket(peer),
                coordinator_pid=os.getpid(),
                output=output_read,
                path=[str(entry) or str(Path.cwd()) for entry in sys.path],
                orphan_grace=self._orphan_grace,
                log_level=self._log_level,
            )
            try:
                line = msgspec.json.encode(order) + b"\n"
            except (TypeError, ValueError) as error:
                raise TypeError(f"its settings do not fit JSON: {error}") from error
            # the order must fit the pipe, so that writing it waits for nobody
            if len(line) > _LARGEST_PIPE_BYTES:
                raise ValueError(f"its settings are {len(line)} bytes of JSON, more than {_LARGEST_PIPE_BYTES}")
            if len(line) > _PIPE_BYTES:
                fcntl.fcntl(order_write, fcntl.F_SETPIPE_SZ, len(line))
            os.set_blocking(order_write, False)
            os.set_blocking(output_read, False)
            if os.write(order_write, line) != len(line):
                raise ValueError(f"its settings, {len(line)} bytes of JSON, do not fit a pipe")
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "kvbaton.launch.worker"],
                stdin=order_read,
                stdout=output_write,
                stderr=output_write,
                pass_fds=(output_read,),  # see the lifeline
                env={**os.environ, **spec.environment},
                start_new_session=True,
            )
            parent.pop_all()
            return ProcessHandle(peer, spec, process, order_write, output_read, self._log_lines)

    # -- watch: all below runs on the launcher's thread ----------------------------------------------------------------

    def _watch_over(self) -> None:
        watched: dict[int, ProcessHandle] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell.fileno(), selectors.EVENT_READ)
            while True:
                blind = any(handle.pidfd is None for handle in watched.values())
                ready = {key.fd for key, _ in selector.select(_LOOK_INTERVAL if blind else None)}
                self._bell.hush()
                while self._new:
                    handle = self._new.popleft()
                    watched[handle.pid] = handle
                    for fd in (handle.output, handle.pidfd):
                        if fd is not None:
                            selector.register(fd, selectors.EVENT_READ)
                for handle in list(watched.values()):
                    if handle.output in ready:
                        self._read(handle, selector)
                    if handle.has_ended() if handle.pidfd is None else handle.pidfd in ready:
                        self._conclude(handle, selector)
                        del watched[handle.pid]
                # what is still watched when close has waited in vain keeps its descriptors until this process ends
                if self._leaving:
                    return

    def _read(self, handle: ProcessHandle, selector: selectors.BaseSelector) -> None:
        # a pipeful and no more at a time: who writes without end must not keep us from watching the others
        for _ in range(_READS_PER_PASS):
            if handle.output is None:
                return
            try:
                data = os.read(handle.output, _PIPE_BYTES)
            except BlockingIOError:
                return
            if data:
                self._tell(handle, handle.log.feed(data))
            else:
                self._close_output(handle, selector)

    def _close_output(self, handle: ProcessHandle, selector: selectors.BaseSelector) -> None:
        if handle.output is not None:
            selector.unregister(handle.output)
            os.close(handle.output)
            handle.output = None
            self._tell(handle, handle.log.finish())

    def _conclude(self, handle: ProcessHandle, selector: selectors.BaseSelector) -> None:
        handle.reap()
        self._read(handle, selector)  # what is in the pipe is its last words
        self._close_output(handle, selector)
        os.close(handle.lifeline)
        if handle.pidfd is not None:
            selector.unregister(handle.pidfd)
            os.close(handle.pidfd)
        handle.conclude()
        with self._lock:
            self._running.discard(handle)
            self._exited.append(handle)
        self._channels.wake()

    def _tell(self, handle: ProcessHandle, lines: list[str]) -> None:
        for line in lines:
            if self._on_line is None:
                return
            try:
                self._on_line(handle.peer, line)
            except Exception:
                # an observer must not end the watch over the stages
                _logger.exception("on_line raised for %s; it is not called any more", handle.peer)
                self._on_line = None
