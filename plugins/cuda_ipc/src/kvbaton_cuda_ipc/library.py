"""UCX itself, by way of ucxx: whether it may be loaded here, how, and what its errors mean.

Nothing else in this package imports ucxx.  What the code rests on was measured with ucxx 0.52 and UCX 1.21:

- ``import ucxx`` writes UCX's settings into the environment, where every child process would find them; they are taken
  out again;
- two copies of UCX in one process hang, and NIXL brings one of its own: the second is refused;
- of an endpoint without error handling, a peer that dies while its memory is read ends *this* process (``cma`` aborts);
  so every endpoint here handles errors, which costs host memory the faster path (it goes by TCP), and a dead peer is
  seen within milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from kvbaton.errors import PeerLost, TransportError

#: What is read once, when UCX is loaded.  The cache of memory kinds is not compatible with how ucxx uses UCX; a handler
#: of signals is the application's affair.
_AT_LOAD = {"UCX_MEMTYPE_CACHE": "n", "UCX_HANDLE_ERRORS": "none"}
_LIBRARY = re.compile(r"/lib(?:ucp|uct|ucs)[^/]*\.so[^/]*$")


def missing() -> str:
    """Why ucxx cannot be loaded here; empty where it can.  Loads nothing."""
    if sys.platform != "linux":
        return f"UCX exists for Linux, and this is {sys.platform}"
    if not importlib.util.find_spec("ucxx"):
        return "ucxx is not installed"
    return conflict()


def remedy(distribution: str) -> str:
    """What to do about what :func:`missing` says; ``distribution`` brings ucxx."""
    if sys.platform != "linux":
        return "run it on Linux"
    if not importlib.util.find_spec("ucxx"):
        return f"pip install {distribution}"
    return "run the stages in processes of their own, each with one transport"


def conflict() -> str:
    """Which other copy of UCX this process has loaded, in words; empty where there is none.

    Two of them in one process hang.
    """
    nixl = [name for name in sys.modules if re.match(r"nixl(_cu\d+)?\._bindings$", name)]
    foreign = _foreign(Path("/proc/self/maps"), _own_folder())
    if not nixl and not foreign:
        return ""
    what = f"NIXL ({nixl[0]})" if nixl else foreign[0]
    return (
        f"this process has loaded {what}, which brings its own copy of UCX, and two of them hang; use one transport per"
        " process"
    )


def _own_folder() -> str:
    found = importlib.util.find_spec("libucx")
    return str(Path(found.origin).parent) if found is not None and found.origin else ""


def _foreign(maps: Path, own: str) -> list[str]:
    """Libraries of UCX in this process that are not those that ucxx loads."""
    try:
        lines = maps.read_text(errors="replace").splitlines()
    except OSError:
        return []
    files = {line.split(maxsplit=5)[5] for line in lines if _LIBRARY.search(line) and len(line.split(maxsplit=5)) == 6}
    return sorted(file for file in files if not own or not file.startswith(f"{own}{os.sep}"))


def version() -> str:
    """The version of ucxx, or ``unknown``."""
    for name in ("ucxx-cu13", "ucxx-cu12", "ucxx"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "unknown"


_one_at_a_time = threading.Lock()
_loaded: list[ModuleType] = []


def load(log_level: str = "fatal") -> ModuleType:
    """The low-level module of ucxx.  ``log_level`` counts the first time.

    Raises :class:`~kvbaton.errors.TransportError` where it is missing, does not load, or must not.
    """
    with _one_at_a_time:  # several stages of one process open their connectors at once
        if not _loaded:
            reason = missing()
            if reason:
                raise TransportError(f"UCX cannot be used: {reason}")
            levels = {"UCX_LOG_LEVEL": log_level, "UCXX_LOG_LEVEL": log_level}
            try:
                with _environment({**_AT_LOAD, **levels}):
                    _loaded.append(importlib.import_module("ucxx._lib.libucxx"))
            except Exception as error:
                raise TransportError(f"ucxx is installed and does not load: {describe(error)}") from error
        return _loaded[0]


@contextlib.contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """What the environment says already counts.  Afterwards it is what it was, with regard to UCX."""
    before = {name: value for name, value in os.environ.items() if name.startswith(("UCX_", "UCXX_"))}
    os.environ.update({name: value for name, value in settings.items() if name not in os.environ})
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(("UCX_", "UCXX_"))]:
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]


def destroy(worker: Any, context: Any) -> None:
    """End a worker and its context, whatever ucxx still holds of them.

    What ucxx has cancelled keeps its endpoint, and with it the worker and its sockets, in a circle of references; and
    its own destructor first receives whatever nobody has asked for.  So UCX is asked directly.  The Python objects are
    kept for ever, a few hundred bytes, because their destructor would do it again.

    No endpoint may be open, and nobody may hold a request.
    """
    descriptor = worker.epoll_file_descriptor
    handles = worker.handle, context.handle
    for one in (worker, context):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(one))
    ucp = _ucp()
    ucp.ucp_worker_destroy(ctypes.c_void_p(handles[0]))
    ucp.ucp_cleanup(ctypes.c_void_p(handles[1]))
    os.close(descriptor)


@functools.cache
def _ucp() -> ctypes.CDLL:
    """The library that ucxx has loaded, by its file."""
    lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    file = next(line.split(maxsplit=5)[5] for line in lines if re.search(r"/libucp[-.][^/]*$", line))
    ucp = ctypes.CDLL(file)
    ucp.ucp_worker_destroy.restype = ucp.ucp_cleanup.restype = None
    return ucp


def buffer_of(memory: Any) -> Any:
    """What ucxx takes as a buffer: of anything with Python's buffer protocol or ``__cuda_array_interface__``."""
    return importlib.import_module("ucxx._lib.arr").Array(memory)


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def lost(what: str, peer: object, error: BaseException | None = None) -> PeerLost:
    """The end of a connection, as ours; the cause chained."""
    said = f": {describe(error)}" if error is not None else ""
    ours = PeerLost(f"T7: {what}: UCX reports that {peer} is disconnected{said}", peer=peer)
    ours.__cause__ = error
    return ours
