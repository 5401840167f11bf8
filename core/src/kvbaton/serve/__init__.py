"""An OpenAI-compatible HTTP front over :class:`~kvbaton.runtime.PDRuntime`: what ``kvbaton serve`` runs.

::

    with Server(settings) as server, PDRuntime.start(settings, hooks=server.hooks, progress=server.progress) as runtime:
        server.attach(runtime)      # from here on it answers; before that, 503 with the reason
        ...
        server.drain(30.0)

It needs the extra ``serve``.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from kvbaton.errors import ConfigurationError

if TYPE_CHECKING:
    from kvbaton.serve.server import Server

__all__ = ["Server", "check_installed"]


def check_installed() -> None:
    """Raise :class:`~kvbaton.errors.ConfigurationError` where what the HTTP front needs is not installed."""
    missing = [name for name in ("fastapi", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigurationError(
            f"the HTTP front needs {' and '.join(missing)}, not installed here: pip install 'kvbaton[serve]'",
            missing=tuple(missing),
        )


def __getattr__(name: str) -> object:
    if name == "Server":
        check_installed()
        from kvbaton.serve.server import Server

        return Server
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
