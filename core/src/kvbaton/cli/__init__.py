"""The command line: ``kvbaton run``, ``kvbaton plugins``, ``kvbaton config``.

stdout carries the answer and nothing else; progress and logs go to stderr.  Exit status: 0 done; 1 a request failed, or
``--compare`` found a difference; 2 bad configuration or input; 130 interrupted.
"""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """The console script.  Does not return: it ends in ``SystemExit``."""
    try:
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ModuleNotFoundError as error:
        print(
            f"kvbaton: the command line needs {error.name}, which is not installed: pip install 'kvbaton[cli]'",
            file=sys.stderr,
        )
        sys.exit(2)
    from kvbaton.cli.app import app

    app()
