"""From an exception to one line on stderr and an exit status."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvbaton.cli.ending import say_interrupted
from kvbaton.errors import CapabilityError, ConfigurationError, GeometryMismatch, KvbatonError, RequestRefused

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130

#: What the operator mends by changing settings or input.
_THE_OPERATORS = (ConfigurationError, RequestRefused, GeometryMismatch, CapabilityError)


def exit_status(error: BaseException) -> int:
    """2 where the configuration or the input is to blame, also as the cause of a failed start; 1 otherwise."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, _THE_OPERATORS):
            return BAD_INPUT
        seen.add(id(cause))
        # only what was raised *from* something: mere context is not its cause
        cause = cause.__cause__
    return FAILED


def say(message: str) -> None:
    """One line of kvbaton's own on stderr."""
    print(f"kvbaton: {message}", file=sys.stderr, flush=True)


@contextmanager
def explained(*, debug: bool) -> Iterator[None]:
    """Turn an error of kvbaton into one line and an exit status; ``debug`` shows the traceback first.

    An exception that is not kvbaton's is a bug and keeps its traceback; a closed pipe is typer's to handle.
    """
    try:
        yield
    except KvbatonError as error:
        if debug:
            traceback.print_exc()
        say(str(error))
        raise typer.Exit(exit_status(error)) from error
    except KeyboardInterrupt as error:
        say_interrupted()
        raise typer.Exit(INTERRUPTED) from error
