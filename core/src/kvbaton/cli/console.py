"""Where tables go: stdout, as wide as it takes where nobody's terminal wraps it."""

from __future__ import annotations

import sys

from rich.console import Console

#: More than any row needs: a table in a file or a pipe is for other programs, which want a row on a line.
_UNBOUNDED = 2000


def answers() -> Console:
    """A console over stdout."""
    return Console(width=None if sys.stdout.isatty() else _UNBOUNDED)
