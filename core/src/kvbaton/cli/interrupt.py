"""Ctrl-C: the first asks, the second forces.  SIGTERM, a supervisor's way of asking, does the same.

An exception out of nowhere could tear the runtime in the middle of its books, so while it is stepped the first Ctrl-C
is only noted and the loop acts on it.  Everywhere else (start-up, the comparison) it is the usual KeyboardInterrupt.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from kvbaton.cli.faults import INTERRUPTED, say


class Interrupt:
    """SIGINT and SIGTERM while a command runs; a context manager that restores the handlers it found.

    Off the main thread, where Python takes no handlers, it changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        #: Called before the second Ctrl-C ends this process; it must not wait.
        self.forced: Callable[[], object] = lambda: None
        self._noting = False
        self._before: dict[int, Any] = {}
        self._bell, self._ringer = os.pipe()

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._before[signum] = signal.signal(signum, self._handle)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            if signal.getsignal(signum) == self._handle:  # else whoever ends the process has seen to it
                signal.signal(signum, handler)
        os.close(self._bell)
        os.close(self._ringer)

    def note(self) -> None:
        """From now on the first Ctrl-C sets ``requested`` and raises nothing."""
        self._noting = True

    def interrupt(self) -> None:
        """From now on the first Ctrl-C raises ``KeyboardInterrupt`` again."""
        self._noting = False

    def wait(self) -> None:
        """Until the first Ctrl-C, or :meth:`wake`."""
        select.select([self._bell], [], [])

    def wake(self) -> None:
        """End :meth:`wait`; from any thread."""
        os.write(self._ringer, b"!")

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            say("interrupted again: forced to stop without waiting for what is under way")
            sys.stdout.flush()
            # no clean-up that could wait: spawned stages see their death pipe close
            self.forced()
            os._exit(INTERRUPTED)
        self.requested = True
        self.wake()
        if not self._noting:
            raise KeyboardInterrupt
