"""The end of a command that was interrupted: whoever presses Ctrl-C again has been heard, and disturbs it no more."""

from __future__ import annotations

import os
import signal
import sys
import threading

#: Seconds that the interpreter may take to end, exit handlers included, while Ctrl-C is ignored.
AT_MOST = 10.0

_is_ours = False


def own_process() -> None:
    """From now on this process is the command's: what it does with signals at its end concerns nobody else."""
    global _is_ours
    _is_ours = threading.current_thread() is threading.main_thread()


def say_interrupted(what: str = "interrupted") -> None:
    """That line on stderr, and nothing after it: where the process is the command's own, Ctrl-C is ignored from here
    on, for at most :data:`AT_MOST` seconds, in which the process ends or is ended.  SIGTERM still ends it at once.
    """
    deafen()
    print(f"kvbaton: {what}", file=sys.stderr, flush=True)


def deafen() -> None:
    """The same without the line: it was written already."""
    if _is_ours:
        # by the system and not by a handler: the interpreter takes its handlers away before it has ended
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, lambda *_: os._exit(130))
        signal.setitimer(signal.ITIMER_REAL, AT_MOST)
