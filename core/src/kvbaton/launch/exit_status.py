"""What an exit status says, in words."""

from __future__ import annotations

import signal


def describe(status: int) -> str:
    """``exit status 3``, or ``killed by SIGKILL`` for a negative status as ``subprocess`` gives them."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"
