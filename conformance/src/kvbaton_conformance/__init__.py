"""The conformance kit of kvbaton: tells the author of a transport or of an engine whether it keeps the contract.

::

    from kvbaton_conformance import ConnectorConformance

    class TestMine(ConnectorConformance):
        connector = "mine"
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvbaton_conformance.suite.engine import EngineConformance
    from kvbaton_conformance.suite.guard import GuardConformance
    from kvbaton_conformance.suite.handoff import HandoffConformance
    from kvbaton_conformance.suite.levels import ConnectorConformance

__all__ = ["ConnectorConformance", "EngineConformance", "GuardConformance", "HandoffConformance"]

#: Loaded on first use: the pytest plugin of this distribution must cost a run without conformance tests nothing.
_HOMES = {
    "ConnectorConformance": "kvbaton_conformance.suite.levels",
    "EngineConformance": "kvbaton_conformance.suite.engine",
    "GuardConformance": "kvbaton_conformance.suite.guard",
    "HandoffConformance": "kvbaton_conformance.suite.handoff",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
