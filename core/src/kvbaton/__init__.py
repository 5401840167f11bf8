"""kvbaton: the KV cache of a request, handed from the stage that prefilled it to the stage that decodes it.

The names below are the public surface; each is loaded from its module on first use, so that importing the package costs
little and loads no transport and no framework.

**An application** loads its settings, starts a runtime, adds requests and takes outputs:

- :func:`~kvbaton.settings.load`, :class:`~kvbaton.settings.Settings`: what a deployment is told, and where from;
- :class:`~kvbaton.runtime.PDRuntime`: the stages behind one face; :func:`~kvbaton.runtime.run_colocated`: the same
  requests without a hand-off, for comparison (A1);
- :class:`~kvbaton.engine.Request`, :class:`~kvbaton.engine.SamplingParams`: what is asked;
- :class:`~kvbaton.records.RequestOutput`, :class:`~kvbaton.records.RequestRecord`: what is answered, and what it took;
- :class:`~kvbaton.records.StageState`, :class:`~kvbaton.profiling.Profiling`: how a stage stands; a session that
  profiles them;
- :data:`~kvbaton.hooks.hookimpl`: marks the methods of an observer or of a policy, which is shown each stage's
  :class:`~kvbaton.hooks.StageLoad`;
- :class:`~kvbaton.errors.KvbatonError`: the base of every error.

**A transport** is a :class:`~kvbaton.connector.TransferConnector`, most simply a
:class:`~kvbaton.connector.ConnectorBase`, over :class:`~kvbaton.connector.MemoryRegion`,
:class:`~kvbaton.connector.Endpoint` and :class:`~kvbaton.connector.Chunk`; it reports
:class:`~kvbaton.connector.Progress`, made of :class:`~kvbaton.connector.Completion` and
:class:`~kvbaton.connector.Receipt`, and states :class:`~kvbaton.connector.Capabilities`.

**An engine** is a :class:`~kvbaton.engine.StageEngine`; it answers through
:class:`~kvbaton.engine.StageCallbacks`, and says by a :class:`~kvbaton.geometry.KVGeometry` of
:class:`~kvbaton.geometry.Plane` and :class:`~kvbaton.geometry.Component` where its cache lies.

**Values** of both: :class:`~kvbaton.segments.Segments`, :class:`~kvbaton.identity.PeerId`,
:data:`~kvbaton.identity.TransferId`, :data:`~kvbaton.identity.RequestKey`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

__version__: Final = "0.1.0"

if TYPE_CHECKING:
    from kvbaton.connector import (
        Capabilities,
        Chunk,
        Completion,
        ConnectorBase,
        Endpoint,
        MemoryRegion,
        Progress,
        Receipt,
        TransferConnector,
    )
    from kvbaton.engine import Request, SamplingParams, StageCallbacks, StageEngine
    from kvbaton.errors import KvbatonError
    from kvbaton.geometry import Component, KVGeometry, Plane
    from kvbaton.hooks import StageLoad, hookimpl
    from kvbaton.identity import PeerId, RequestKey, TransferId
    from kvbaton.profiling import Profiling
    from kvbaton.records import RequestOutput, RequestRecord, StageState
    from kvbaton.runtime import PDRuntime, run_colocated
    from kvbaton.segments import Segments
    from kvbaton.settings import Settings, load

_MODULES: Final = {
    "connector": (
        "Capabilities", "Chunk", "Completion", "ConnectorBase", "Endpoint", "MemoryRegion", "Progress", "Receipt",
        "TransferConnector",
    ),
    "engine": ("Request", "SamplingParams", "StageCallbacks", "StageEngine"),
    "errors": ("KvbatonError",),
    "geometry": ("Component", "KVGeometry", "Plane"),
    "hooks": ("StageLoad", "hookimpl"),
    "identity": ("PeerId", "RequestKey", "TransferId"),
    "profiling": ("Profiling",),
    "records": ("RequestOutput", "RequestRecord", "StageState"),
    "runtime": ("PDRuntime", "run_colocated"),
    "segments": ("Segments",),
    "settings": ("Settings", "load"),
}  # fmt: skip
_HOME: Final = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "Capabilities", "Chunk", "Completion", "Component", "ConnectorBase", "Endpoint", "KVGeometry", "KvbatonError",
    "MemoryRegion", "PDRuntime", "PeerId", "Plane", "Profiling", "Progress", "Receipt", "Request", "RequestKey",
    "RequestOutput", "RequestRecord", "SamplingParams", "Segments", "Settings", "StageCallbacks", "StageEngine",
    "StageLoad", "StageState", "TransferConnector", "TransferId", "__version__", "hookimpl", "load",
    "run_colocated",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    module = _HOME.get(name)
    if module is None:
        raise AttributeError(f"module 'kvbaton' has no attribute {name!r}")
    value = getattr(import_module(f"kvbaton.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
