"""The hand-off level: coordinator and two stages with a scripted engine over the connector that is judged.

A module per contract, so that the report reads as the contract does.
"""

from __future__ import annotations

from kvbaton_conformance.suite.handoff.agreement import Agreement
from kvbaton_conformance.suite.handoff.control import Control
from kvbaton_conformance.suite.handoff.evidence import Evidence
from kvbaton_conformance.suite.handoff.failure import Failure
from kvbaton_conformance.suite.handoff.identity import Identity
from kvbaton_conformance.suite.handoff.leases import Leases
from kvbaton_conformance.suite.handoff.lifetime import Lifetime
from kvbaton_conformance.suite.handoff.replay import Replay
from kvbaton_conformance.suite.handoff.reservation import Reservations
from kvbaton_conformance.suite.handoff.runtime import Runtime
from kvbaton_conformance.suite.handoff.validity import Validity
from kvbaton_conformance.suite.handoff.words import Words


class HandoffConformance(
    Identity,
    Reservations,
    Validity,
    Evidence,
    Lifetime,
    Failure,
    Replay,
    Leases,
    Control,
    Agreement,
    Runtime,
    Words,
):
    """A whole hand-off over a connector against the C clauses that a transport can break."""
