"""Lifelines: how a stage learns that it has no coordinator any more (C6.6)."""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

from kvbaton.control.bell import DescriptorBell


class FlagLifeline:
    """A lifeline that somebody in this process cuts; see :class:`~kvbaton.launch.Lifeline`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._event = threading.Event()
        self._reason: str | None = None
        self._callbacks: list[Callable[[], None]] = []

    @property
    def cut(self) -> str | None:
        return self._reason

    def wait(self, timeout: float) -> bool:
        return self._event.wait(timeout)

    def watch(self, callback: Callable[[], None]) -> None:
        with self._lock:
            if self._reason is None:
                self._callbacks.append(callback)
                return
        callback()

    def sever(self, reason: str) -> None:
        """Cut it.  The first reason stays; callbacks run on this thread, once, before ``wait`` returns."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        self._event.set()


class ProcessLifeline(FlagLifeline):
    """The lifeline of a stage's process: a pipe whose other end only the coordinator's process holds.

    The pipe's end is read as soon as that process is gone or lets go.  Where the system offers a descriptor for a
    process, that is watched too: a child that the application forked may hold the pipe open for longer.

    ``output`` is the reading end of the pipe that the stage prints into.  That it is open here too means that printing
    never fails, however the launcher ends; once the lifeline is cut this thread reads and drops what is printed, so
    that printing never blocks either.  A stage without a coordinator may drain in peace.

    ``severed`` runs before any other callback.  Both descriptors belong to the lifeline from now on.
    """

    def __init__(self, pipe: int, output: int, coordinator_pid: int, severed: Callable[[], None]) -> None:
        super().__init__()
        self.watch(severed)
        self._pipe = pipe
        self._output = output
        self._process: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._process = os.pidfd_open(coordinator_pid)
        # a coordinator that was gone before we looked may have left its number to somebody else; ours is then no child
        self._orphan = os.getppid() != coordinator_pid
        self._bell = DescriptorBell()
        self._thread = threading.Thread(target=self._watch_over, name="kvbaton-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching and give the descriptors back, but for ``output``: what is still printed finds it open.

        Idempotent.
        """
        self._bell.ring()
        self._thread.join()
        self._bell.close()

    def _watch_over(self) -> None:
        try:
            if self._orphan:
                self.sever("the coordinator's process was gone before this stage had started")
            else:
                ready = self._poll(self._pipe, self._process)
                if self._process in ready:
                    self.sever("the coordinator's process is gone")
                elif self._pipe in ready:
                    self.sever("the coordinator's process is gone, or it let go of this stage")
        finally:
            os.close(self._pipe)
            if self._process is not None:
                os.close(self._process)
        while self._output in self._poll(self._output):
            with contextlib.suppress(BlockingIOError):
                os.read(self._output, 1 << 16)

    def _poll(self, *fds: int | None) -> set[int]:
        """Those of ``fds`` that are ready, once any is; none when the lifeline is being closed."""
        poll = select.poll()
        for fd in (self._bell.fileno(), *fds):
            if fd is not None:
                poll.register(fd, select.POLLIN)
        ready = {fd for fd, _ in poll.poll()}
        return set() if self._bell.fileno() in ready else ready
