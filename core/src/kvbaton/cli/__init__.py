"""The command line, ``kvbaton``: :mod:`kvbaton.cli.app` has its commands.

stdout carries the answer and nothing else; progress and logs go to stderr.  Exit status: 0 done; 1 a request failed, or
``--compare`` found a difference; 2 bad configuration or input; 130 interrupted, by Ctrl-C or SIGTERM.
``kvbaton doctor`` ends with its verdict: 0 fit, 1 degraded, 2 unusable.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import NoReturn

from kvbaton.cli import ending

__all__ = ["main"]


def main() -> None:
    """The console script.  Does not return: it ends in ``SystemExit``."""
    try:
        ending.own_process()
        _run()
    except KeyboardInterrupt:  # while it was still being loaded, or at its very end
        ending.say_interrupted()
        _leave(130)
    except Exception:  # a bug, which keeps its traceback
        if not _hangs():
            raise
        sys.excepthook(*sys.exc_info())
        _leave(1)


def _run() -> None:
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"kvbaton: the command line needs {error.name}, which is not installed: pip install 'kvbaton[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    if sys.stdout is None:
        print("kvbaton: stdout is closed: there is nowhere to write the answer", file=sys.stderr)
        sys.exit(1)
    from kvbaton.cli.app import app

    status: object = 0
    failure: OSError | None = None
    try:
        app()
    except SystemExit as leaving:
        status = leaving.code
        failure = _refused("")
    except OSError as error:
        # the text that failed is gone where stdout has no buffer, so that only another write can tell
        failure = _refused("\n") if error.filename is None else None
        if failure is None or failure.errno != error.errno:
            raise
    if failure is not None:
        if not isinstance(failure, BrokenPipeError):  # a reader that has gone wants no more
            print(f"kvbaton: the answer cannot be written to stdout: {failure.strerror}", file=sys.stderr)
        # what is left in the buffer goes nowhere, or the interpreter would complain of it at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        status = status or 1
    _leave(status)


def _hangs() -> bool:
    """Whether something that was asked has not come back: what its library does at an exit may wait for it."""
    answering = sys.modules.get("kvbaton.answering")
    return answering is not None and bool(answering.hanging())


def _leave(status: object) -> NoReturn:
    if status == 130:
        ending.deafen()
    if _hangs():
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # None where it is closed; and nobody is left to hear of it
                stream.flush()
        os._exit(status if isinstance(status, int) else 0 if status is None else 1)
    sys.exit(status)  # type: ignore[arg-type]


def _refused(text: str) -> OSError | None:
    """Why ``text``, or what is still to be written before it, cannot be written to stdout; None where it can."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as error:
        return error
    return None
