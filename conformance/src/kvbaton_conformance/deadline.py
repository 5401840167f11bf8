"""A test that does not come back: a call of a connector that blocks must be a failure with stacks, not a stuck run."""

from __future__ import annotations

import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvbaton_conformance.clauses import ClauseBroken
from kvbaton_conformance.leaks import OWN_THREADS

#: What interrupts the main thread.  Timers of the system are left to others.
_SIGNAL = signal.SIGUSR1


#: Seconds until whoever goes on, and blocks again, is interrupted again.
_AGAIN = 2.0

_passed = 0


def passed() -> int:
    """How many deadlines of the kit have passed in this process so far."""
    return _passed


def has_passed() -> None:
    """One has: of this module, or of a process that was asked and did not answer."""
    global _passed
    _passed += 1


@contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """Within this, the main thread gets :class:`ClauseBroken` after ``seconds``, with the stacks of all threads.

    Whoever catches it (core takes an exception out of a connector for a fault of that) and blocks again is interrupted
    again, and in the end the first one is raised all the same.  A thread that is in native code and never returns to
    Python cannot be interrupted.  Elsewhere than in the main thread this does nothing.
    """
    main = threading.main_thread()
    if threading.current_thread() is not main:
        yield
        return
    over = threading.Event()
    raised: list[ClauseBroken] = []

    def expired(_signal: int, frame: FrameType | None) -> None:
        if over.is_set():
            return
        error = ClauseBroken(
            "T7", f"a test did not come back within {seconds:g} s: a call does not return",
            expected="no call waits for a peer", seen=_stacks(frame), look="the call at the end of the first stack",
        )  # fmt: skip
        if not raised:
            has_passed()
        raised.append(error)
        raise error

    def watch() -> None:
        patience = seconds
        while not over.wait(patience) and main.ident is not None:
            patience = min(seconds, _AGAIN)
            signal.pthread_kill(main.ident, _SIGNAL)

    before = signal.signal(_SIGNAL, expired)
    watcher = threading.Thread(target=watch, name=f"{OWN_THREADS}-deadline", daemon=True)
    watcher.start()
    try:
        yield
    except Exception as error:
        if raised and error is not raised[0]:
            raise raised[0] from error
        raise
    finally:
        over.set()
        watcher.join()
        signal.signal(_SIGNAL, before)
    if raised:
        raise raised[0]


def _stacks(frame: FrameType | None) -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = ["thread MainThread, which was interrupted:\n" + "".join(traceback.format_stack(frame)[-8:])]
    for ident, other in sys._current_frames().items():
        name = names.get(ident, str(ident))
        if ident != threading.main_thread().ident and not name.startswith(OWN_THREADS):
            parts.append(f"thread {name}:\n" + "".join(traceback.format_stack(other)[-8:]))
    return "\n".join(parts)
