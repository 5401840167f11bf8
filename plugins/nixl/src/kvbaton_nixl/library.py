"""NIXL itself: which of its builds to load, how an agent is made and destroyed, and what its errors mean.

Nothing else in this package imports NIXL.  Facts about it that the code rests on were measured with NIXL 1.5.1:

- its progress thread spins a core for each agent, so it stays off, and every call is made on the stage's pump thread;
- two threads in one agent crash, so the guard's check of the calling thread (T11) is not a formality here;
- its Python objects for transfers keep the agent alive, so an agent is destroyed only after they are released.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import importlib.util
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from kvbaton.errors import PeerLost, TransportError
from kvbaton_nixl.options import NixlOptions

#: NIXL's builds by the major version of CUDA that they were made for; either serves host memory.
_BUILDS = ("nixl_cu13", "nixl_cu12")


def missing() -> str:
    """Why NIXL cannot be loaded here; empty where it can.  Loads nothing."""
    if sys.platform != "linux":
        return f"NIXL exists for Linux, and this is {sys.platform}"
    if not any(importlib.util.find_spec(name) for name in _BUILDS):
        return f"NIXL is not installed: none of {', '.join(_BUILDS)} can be found"
    return ""


def version() -> str:
    """NIXL's own version, or ``unknown``."""
    for name in ("nixl", *(build.replace("_", "-") for build in _BUILDS)):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


@functools.cache
def load(log_level: str) -> ModuleType:
    """NIXL's Python layer, of the build that fits the torch that is loaded, else the newest.

    ``log_level`` counts the first time: NIXL reads its when it is loaded, UCX when the first agent is made.
    Raises :class:`~kvbaton.errors.TransportError` where NIXL is missing or does not load.
    """
    if "ucxx" in sys.modules:
        raise TransportError(
            "NIXL brings its own copy of UCX, and this process has loaded another with ucxx: two of them hang; use one"
            " transport per process"
        )
    reason = missing()
    if reason:
        raise TransportError(f"{reason}; pip install kvbaton-nixl")
    builds = [name for name in _BUILDS if importlib.util.find_spec(name)]
    torch = sys.modules.get("torch")
    made_for = getattr(getattr(torch, "version", None), "cuda", None) if torch is not None else None
    if made_for:
        builds.sort(key=lambda name: not name.endswith(made_for.split(".", maxsplit=1)[0]))
    try:
        with _environment(_log_levels(log_level)):
            return importlib.import_module(f"{builds[0]}._api")
    except ImportError as error:
        raise TransportError(f"{builds[0]} is installed and does not load: {error}") from error


_one_at_a_time = threading.Lock()


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """NIXL and UCX read their settings from the environment while they start; afterwards they are what they were, so
    that nothing is handed on to processes that this one starts.
    """
    with _one_at_a_time:  # several stages of one process open their connectors at once, each with its own settings
        before = {name: os.environ.get(name) for name in settings}
        os.environ.update(settings)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _log_levels(level: str) -> dict[str, str]:
    """What the environment says already is what somebody wants to see."""
    levels = {"NIXL_LOG_LEVEL": level, "UCX_LOG_LEVEL": level.lower()}
    return {name: value for name, value in levels.items() if name not in os.environ}


def make_agent(name: str, options: NixlOptions) -> Any:
    """An agent without a progress thread and with our backend.  Raises :class:`~kvbaton.errors.TransportError`."""
    api = load(options.log_level)
    config = api.nixl_agent_config(
        enable_prog_thread=False, backends=[], capture_telemetry=options.telemetry, enable_listen_thread=False
    )
    try:
        with _environment({**_log_levels(options.log_level), **{f"UCX_{key}": v for key, v in options.ucx.items()}}):
            agent = api.nixl_agent(name, config)
            agent.create_backend(options.backend, {"ucx_error_handling_mode": "peer"})
    except Exception as error:
        settings = f" with UCX settings {options.ucx}" if options.ucx else ""
        raise TransportError(
            f"NIXL could not start its backend {options.backend}{settings}: {describe(error)}."
            " NIXL_LOG_LEVEL=INFO UCX_LOG_LEVEL=info in the environment show why"
        ) from error
    return agent


def describe(error: BaseException) -> str:
    """What NIXL raised, in words: its exceptions are named after statuses and carry little else."""
    return f"{type(error).__name__.removeprefix('nixl')}: {error}"


def translate(error: Exception, what: str, peer: object) -> TransportError:
    """NIXL's exception as ours, the cause chained.  A *remote disconnect* is :class:`~kvbaton.errors.PeerLost`."""
    lost = "RemoteDisconnect" in type(error).__name__
    ours: TransportError
    if lost:
        ours = PeerLost(f"T7: {what}: NIXL reports that {peer} is disconnected", peer=peer)
    else:
        ours = TransportError(f"T5: {what} for {peer}: {describe(error)}", peer=peer)
    ours.__cause__ = error
    return ours
