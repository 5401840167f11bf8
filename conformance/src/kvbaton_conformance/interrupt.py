"""Ctrl-C in a run of the kit, which ends it wherever it comes.

The exception that a signal raises may land in a ``__del__`` or in a callback of a library, where Python drops it.  The
run would go on, and what was torn there would count as a failure of whom it judges.  So the kit remembers that it came:
it is raised again at the end of what was under way (see the plugin).
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from kvbaton_conformance.leaks import OWN_THREADS

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

#: Seconds after which an interrupt that Python dropped is tried again: who was interrupted has returned by then.
_DROPPED_BOUND = 0.05
#: Seconds after which it is where the run does not end: somebody has caught it, and goes on.
_CAUGHT_BOUND = 2.0
#: Seconds for a run whose command is gone to end by itself.
ORPHAN_BOUND = 20.0
_FORCED = 130
_RAISED, _DROPPED = b".", b"!"


class Interrupt:
    """Whether the run was interrupted.  Its methods are the main thread's."""

    def __init__(self) -> None:
        #: It was, whatever has become of the exception.  Final.
        self.seen = False
        #: From now on it is only noted: the run ends anyway.
        self.ends = False
        #: A pipe that tells the watching thread what has become of it.
        self._bell: int | None = None

    @contextmanager
    def heard(self) -> Iterator[None]:
        """Within this, Ctrl-C is remembered; not off the main thread, and not where somebody else handles it."""
        ours = threading.current_thread() is threading.main_thread()
        if not ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            yield
            return
        before, hook = signal.signal(signal.SIGINT, self._handle), sys.unraisablehook
        self._hook()
        try:
            yield
        finally:
            sys.unraisablehook = hook
            signal.signal(signal.SIGINT, before)

    def serve(self, lifeline: int) -> None:
        """For as long as this process lives: of ``kvbaton conformance``, which has held both signals back until now.

        SIGTERM is what the command passes on.  ``lifeline`` is a pipe whose other end only that command holds; once it
        is gone this run ends itself.
        """
        bell, self._bell = os.pipe()
        os.set_inheritable(lifeline, False)
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self._handle)
        self._hook()
        threading.Thread(
            target=self._watch_over, args=(lifeline, bell), name=f"{OWN_THREADS}-interrupt", daemon=True
        ).start()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})

    def check(self) -> None:
        """Raise ``KeyboardInterrupt`` where one has come and the run goes on nevertheless."""
        if self.seen and not self.ends:
            self.ends = True  # this one is pytest's, and not to be disturbed
            raise KeyboardInterrupt

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGTERM and self.seen:
            return  # Ctrl-C has come to the whole group, and the command passes it on
        self.seen = True
        if not self.ends:
            self._tell(_RAISED)
            raise KeyboardInterrupt

    def _hook(self) -> None:
        before = sys.unraisablehook

        def dropped(unraisable: UnraisableHookArgs) -> None:
            if not (self.seen and issubclass(unraisable.exc_type, KeyboardInterrupt)):
                before(unraisable)
            else:
                self._tell(_DROPPED)

        sys.unraisablehook = dropped

    def _tell(self, what: bytes) -> None:
        if self._bell is not None:
            os.write(self._bell, what)

    def _watch_over(self, lifeline: int, bell: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        poll = select.poll()
        poll.register(lifeline, select.POLLIN)
        poll.register(bell, select.POLLIN)
        patience: float | None = None  # in milliseconds
        while lifeline not in (ready := {fd for fd, _ in poll.poll(patience)}):
            patience = _CAUGHT_BOUND * 1e3
            if ready and _DROPPED not in os.read(bell, 64):
                continue
            time.sleep(_DROPPED_BOUND)
            if not self.ends:
                signal.pthread_kill(main, signal.SIGINT)
        if self.seen:
            os._exit(_FORCED)  # it was waited for, and is not any more
        # should it hang in native code that never lets Python run, this ends it
        faulthandler.dump_traceback_later(ORPHAN_BOUND, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        signal.pthread_kill(main, signal.SIGTERM)
