"""``kvbaton serve``: the HTTP front, from the first line to an end in order."""

from __future__ import annotations

import logging

from kvbaton.cli.faults import FAILED, OK, say
from kvbaton.cli.interrupt import Interrupt
from kvbaton.runtime import PDRuntime
from kvbaton.serve import check_installed
from kvbaton.settings import Settings

_log = logging.getLogger(__name__)


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C, then drain and stop; the exit status.

    Raises :class:`~kvbaton.errors.KvbatonError` where it cannot start, and ``KeyboardInterrupt`` where it is told to
    stop before it has.
    """
    check_installed()
    from kvbaton.serve.server import Server

    with Interrupt() as interrupt, Server(settings, interrupt.wake) as server:
        # said with the first that is heard of the runtime: what the settings have wrong is refused before that
        unsaid = [f"listening at {server.url}; requests are answered 503 until the stages are up"]

        def progress(text: str) -> None:
            server.progress(text)
            while unsaid:
                say(unsaid.pop())
            say(text)

        with PDRuntime.start(settings, hooks=server.hooks, progress=progress) as runtime:
            interrupt.note()  # from here until everything is closed
            server.attach(runtime)
            say(f"serving {settings.serve.model_name or settings.model} at {server.url}/v1 (Ctrl-C stops)")
            interrupt.wait()
            if server.failed:
                say("the HTTP server has ended; its log says why")
                return FAILED
            say(f"stopping: requests under way may take {settings.serve.drain:g} s (Ctrl-C again forces)")
            if not server.drain(settings.serve.drain):
                say("requests that took longer were cancelled")
        say("stopped")
    return OK
