"""The guard level: core's guard alone against a scripted plugin.

It judges core, not a connector: what every connector gets from it (T2, T6, T8, T11, T12, C1.4, C3.5, C3.6).
"""

from __future__ import annotations

from kvbaton_conformance.suite.guard.bounds import Bounds
from kvbaton_conformance.suite.guard.budgets import Budgets
from kvbaton_conformance.suite.guard.completions import Completions
from kvbaton_conformance.suite.guard.handshakes import Handshakes
from kvbaton_conformance.suite.guard.ownership import Ownership
from kvbaton_conformance.suite.guard.sharing import Sharing
from kvbaton_conformance.suite.guard.timeouts import Timeouts


class GuardConformance(
    Bounds,
    Handshakes,
    Budgets,
    Completions,
    Timeouts,
    Ownership,
    Sharing,
):
    """Core's guard: what holds for every connector, whoever wrote it."""
