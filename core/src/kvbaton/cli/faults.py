"""From an exception to one line on stderr and an exit status."""

from __future__ import annotations

import errno
import resource
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
    return BAD_INPUT if any(isinstance(cause, _THE_OPERATORS) for cause in _causes(error)) else FAILED


def _causes(error: BaseException) -> Iterator[BaseException]:
    """``error`` and what it was raised from, the last first."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        yield cause
        seen.add(id(cause))
        # only what was raised *from* something: mere context is not its cause
        cause = cause.__cause__


def _too_many_files(error: BaseException) -> str:
    """What to do where no file could be opened any more, whoever says so; empty for what is something else."""
    numbers = {getattr(cause, "errno", None) for cause in _causes(error)}
    if errno.EMFILE in numbers:
        limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        bound = "" if most == resource.RLIM_INFINITY else f" (up to {most}; beyond that as root)"
        return f"A process may have {limit} files open here: raise that with ulimit -n{bound}."
    return "This host has as many files open as it may (sysctl fs.file-max)." if errno.ENFILE in numbers else ""


def say(message: str) -> None:
    """One line of kvbaton's own on stderr."""
    print(f"kvbaton: {message}", file=sys.stderr, flush=True)


@contextmanager
def explained(*, debug: bool) -> Iterator[None]:
    """Turn an error of kvbaton into one line and an exit status; ``debug`` shows the traceback first.

    An exception that is not kvbaton's is a bug and keeps its traceback, but for the want of open files; a
    closed pipe is typer's to handle.
    """
    try:
        yield
    except KvbatonError as error:
        if debug:
            traceback.print_exc()
        files = _too_many_files(error)
        say(f"{str(error).rstrip('.')}. {files}" if files else str(error))
        raise typer.Exit(exit_status(error)) from error
    except KeyboardInterrupt as error:
        say_interrupted()
        raise typer.Exit(INTERRUPTED) from error
    except Exception as error:
        files = _too_many_files(error)
        if not files:
            raise
        if debug:
            traceback.print_exc()
        say(f"{error}. {files}")
        raise typer.Exit(FAILED) from error
