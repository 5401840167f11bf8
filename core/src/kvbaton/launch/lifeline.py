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
        """Cut it.  The first reason stays; callbacks run on this thread, once."""
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            callbacks, self._callbacks = self._callbacks, []
        self._event.set()
        for callback in callbacks:
            callback()


class ProcessLifeline(FlagLifeline):
    """The lifeline of a stage's process: a pipe whose other end only the coordinator's process holds.

    The pipe's end is read as soon as that process is gone or lets go.  Where the system offers a descriptor for a
    process, that is watched too: a child that the application forked may hold the pipe open for longer.
    ``pipe`` (a descriptor) belongs to the lifeline from now on.  ``severed`` runs before any other callback.
    """

    def __init__(self, pipe: int, coordinator_pid: int, severed: Callable[[], None]) -> None:
        super().__init__()
        self.watch(severed)
        self._pipe = pipe
        self._process: int | None = None
        with contextlib.suppress(OSError, AttributeError):
            self._process = os.pidfd_open(coordinator_pid)
        # a coordinator that was gone before we looked may have left its number to somebody else; ours is then no child
        self._orphan = os.getppid() != coordinator_pid
        self._bell = DescriptorBell()
        self._thread = threading.Thread(target=self._watch_over, name="kvbaton-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching and give the descriptors back.  Idempotent."""
        self._bell.ring()
        self._thread.join()
        self._bell.close()

    def _watch_over(self) -> None:
        poll = select.poll()
        poll.register(self._bell.fileno(), select.POLLIN)
        poll.register(self._pipe, select.POLLIN)
        if self._process is not None:
            poll.register(self._process, select.POLLIN)
        try:
            if self._orphan:
                self.sever("the coordinator's process was gone before this stage had started")
                return
            ready = {fd for fd, _ in poll.poll()}
            if self._bell.fileno() in ready:
                return
            if self._process in ready:
                self.sever("the coordinator's process is gone")
            else:
                self.sever("the coordinator's process is gone, or it let go of this stage")
        finally:
            os.close(self._pipe)
            if self._process is not None:
                os.close(self._process)
