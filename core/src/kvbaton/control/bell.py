"""Waking one waiting thread: a bell that is rung from anywhere, and that remembers having been rung."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class Bell:
    """For threads that share memory.  All methods from any thread; one thread waits."""

    def __init__(self) -> None:
        #: Held while nobody has rung: a semaphore of one, and the cheapest that there is to ring and to wait for.
        self._silence = threading.Lock()
        self._silence.acquire()

    def ring(self) -> None:
        """End the present or the next ``wait``."""
        if self._silence.locked():
            try:
                self._silence.release()
            except RuntimeError:
                return  # somebody else has rung at the same time, and one ring is as good as two

    def wait(self, timeout: float, unless: Callable[[], object]) -> None:
        """Wait for ``ring``, at most ``timeout`` seconds, not at all if ``unless()`` is true.  Uses the ring up."""
        # whoever makes ``unless`` true rings afterwards: what it does not see now ends the wait
        self._silence.acquire(timeout=0 if unless() else max(timeout, 0))


class DescriptorBell:
    """For a thread that waits in ``poll``: readable once rung.  ``ring`` from any thread, also after ``close``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rung = False
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """The descriptor to poll for reading; -1 once closed."""
        return self._fd

    def ring(self) -> None:
        """Make the descriptor readable."""
        if self._rung:  # and not hushed yet: who waits has still to look for what there is
            return
        # the lock keeps a late ring from writing into whatever reused the number of a closed descriptor
        with self._lock:
            if self._fd >= 0 and not self._rung:
                self._rung = True
                os.eventfd_write(self._fd, 1)

    def hush(self) -> None:
        """Use up what was rung so far.  Look for what there is afterwards.  By who waits, and closes, only.

        Without the lock: who rings holds it while it wakes this thread, which would only sleep again.  A ring from now
        until the last line counts as one with those before: what it tells of was there before it.
        """
        if self._rung and self._fd >= 0:
            try:
                os.eventfd_read(self._fd)
            except BlockingIOError:
                return  # it is just being rung, and will be readable
            self._rung = False

    def close(self) -> None:
        """Give the descriptor back.  Idempotent."""
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
