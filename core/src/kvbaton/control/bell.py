"""Waking one waiting thread: a bell that is rung from anywhere, and that remembers having been rung."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable


class Bell:
    """For threads that share memory.  All methods from any thread; one thread waits."""

    def __init__(self) -> None:
        self._condition = threading.Condition(threading.Lock())
        self._rung = False

    def ring(self) -> None:
        """End the present or the next ``wait``."""
        with self._condition:
            if not self._rung:
                self._rung = True
                self._condition.notify()

    def wait(self, timeout: float, unless: Callable[[], object]) -> None:
        """Wait for ``ring``, at most ``timeout`` seconds, not at all if ``unless()`` is true.  Uses the ring up."""
        with self._condition:
            # ``unless`` is asked under the lock: whoever makes it true rings afterwards, so that no ring is missed
            if not self._rung and not unless():
                self._condition.wait(timeout)
            self._rung = False


class DescriptorBell:
    """For a thread that waits in ``poll``: readable once rung.  ``ring`` from any thread, also after ``close``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to poll for reading; -1 once closed."""
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable."""
        # the lock keeps a late ring from writing into whatever reused the number of a closed descriptor
        with self._lock:
            if self._fd >= 0:
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        """Use up what was rung so far."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._fd)

    def close(self) -> None:
        """Give the descriptor back.  Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
