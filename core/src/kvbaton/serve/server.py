"""The server: a socket, an event loop on a thread of its own, and an end in order."""

from __future__ import annotations

import asyncio
import concurrent.futures
import importlib.util
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

import uvicorn

from kvbaton.errors import KvbatonError, SettingsError
from kvbaton.runtime import PDRuntime
from kvbaton.serve.app import Front, build
from kvbaton.serve.bridge import Bridge
from kvbaton.serve.door import read_keys
from kvbaton.serve.readiness import Readiness
from kvbaton.serve.refusal import unavailable
from kvbaton.settings import Settings

if TYPE_CHECKING:
    from kvbaton.observe.metrics import Metrics

#: Seconds that connections may take to close at the end.
_PARTING = 5
#: Connections that wait to be accepted.
_BACKLOG = 512

_log = logging.getLogger(__name__)


class Server:
    """HTTP over a runtime that comes later: a context manager that listens in it.

    Until :meth:`attach` requests are answered 503.  The runtime's owner closes it, after :meth:`drain`.
    Raises :class:`~kvbaton.errors.SettingsError` where it cannot listen, or has no keys where it should.

    Threading: for one thread.  ``on_failure`` is called on the server's, should that end by itself.
    """

    def __init__(self, settings: Settings, on_failure: Callable[[], None] = lambda: None) -> None:
        keys = read_keys(settings.serve.api_key_file)
        self._settings = settings
        self._on_failure = on_failure
        self._readiness = Readiness()
        self._metrics = _metrics()
        self._front = Front(settings, self._readiness, self._metrics)
        self._socket = _bind(settings.serve.listen)
        self.host, self.port = self._socket.getsockname()[:2]
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                build(self._front, keys), loop="asyncio", http="h11", ws="none", lifespan="off", interface="asgi3",
                log_config=None, access_log=False, proxy_headers=False, server_header=False, backlog=_BACKLOG,
                limit_concurrency=settings.serve.connections, timeout_graceful_shutdown=_PARTING,
            )
        )  # fmt: skip
        self._bridge: Bridge | None = None
        self._thread = threading.Thread(target=self._run, name="kvbaton-http", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def hooks(self) -> list[object]:
        """What the runtime is to be started with."""
        return [self._readiness] if self._metrics is None else [self._readiness, self._metrics]

    @property
    def failed(self) -> bool:
        """Whether it has ended by itself."""
        return not self._thread.is_alive()

    def progress(self, text: str) -> None:
        """What start-up is at, for ``/health``."""
        self._readiness.progress(text)

    def attach(self, runtime: PDRuntime) -> None:
        """Serve requests by ``runtime`` from now on.  Loads the tokenizer, which may take long."""
        serve = self._settings.serve
        runtime.tokenizer  # noqa: B018  loaded here, not on the event loop

        async def bridge() -> Bridge:
            return Bridge(runtime, serve.requests, serve.timeout)

        self._bridge = self._on_loop(bridge())
        self._bridge.on_closed = self._readiness.end
        self._front.bridge = self._bridge
        self._readiness.ready(runtime.stages)

    def drain(self, seconds: float) -> bool:
        """Accept nothing more, and wait for the requests under way; those that take longer are cancelled, with 503.

        Returns whether all ended by themselves.
        """
        self._readiness.end("shutting down")

        async def drain() -> bool:
            await _stop_listening(self._uvicorn.servers)
            if self._bridge is None or await self._bridge.drained(seconds):
                return True
            await self._bridge.stop(unavailable("shutting down: the request was cancelled"))
            return False

        drained: bool = self._on_loop(drain())
        return drained

    def __enter__(self) -> Server:
        self._thread.start()
        self._uvicorn.up.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bridge is not None and not self.failed:
            self.drain(0.0)
        self._uvicorn.should_exit = True
        self._thread.join()
        if self._bridge is not None:
            self._bridge.close()

    # -- inside ------------------------------------------------------------------------------------------------------

    def _on_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self.failed:
            work.close()
            raise KvbatonError("the HTTP server has ended; its log says why")
        return asyncio.run_coroutine_threadsafe(work, self._uvicorn.up.result()).result()

    def _run(self) -> None:
        try:
            asyncio.run(self._uvicorn.serve([self._socket]))
        except BaseException as error:
            _log.critical("the HTTP server failed", exc_info=error)
        finally:
            if not self._uvicorn.up.done():
                self._uvicorn.up.set_exception(KvbatonError("the HTTP server did not start; its log says why"))
            if not self._uvicorn.should_exit:
                self._on_failure()


class _Uvicorn(uvicorn.Server):
    """uvicorn, which tells when it listens.  It is not on the main thread, and so leaves signals alone."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set_result(asyncio.get_running_loop())


async def _stop_listening(servers: Sequence[asyncio.Server]) -> None:
    """Close ``servers``, whose connections go on.

    asyncio loses a connection that it has accepted but not yet handed over when its server is closed, so that none is
    accepted for two turns before.
    """
    loop = asyncio.get_running_loop()
    for server in servers:
        for listening in server.sockets:
            loop.remove_reader(listening.fileno())
    for _ in range(2):
        await asyncio.sleep(0)
    for server in servers:
        server.close()


def _metrics() -> Metrics | None:
    """For ``/metrics``; None where the extra is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        return None
    from kvbaton.observe.metrics import Metrics

    return Metrics()


def _bind(listen: str) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            bound.listen(_BACKLOG)
        except BaseException:
            bound.close()
            raise
    except OSError as error:
        raise SettingsError(
            f"serve.listen {listen}: cannot listen there: {error.strerror}. Choose another address, or port 0 for one"
            " that is free.",
            key="serve.listen", origin=None,
        ) from error  # fmt: skip
    return bound
