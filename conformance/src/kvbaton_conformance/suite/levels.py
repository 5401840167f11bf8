"""The classes that a third party derives from: each joins the topics of its level."""

from __future__ import annotations

from kvbaton_conformance.suite.back_pressure import BackPressure
from kvbaton_conformance.suite.cancellation import Cancellation
from kvbaton_conformance.suite.completion import Completion
from kvbaton_conformance.suite.cost import Cost
from kvbaton_conformance.suite.epochs import Epochs
from kvbaton_conformance.suite.failure import Failure
from kvbaton_conformance.suite.handoff import HandoffConformance
from kvbaton_conformance.suite.handshake import Handshake
from kvbaton_conformance.suite.honesty import Honesty
from kvbaton_conformance.suite.ordering import Ordering
from kvbaton_conformance.suite.quiet import Quiet
from kvbaton_conformance.suite.registration import Registration
from kvbaton_conformance.suite.teardown import Teardown
from kvbaton_conformance.suite.threads import Threads
from kvbaton_conformance.suite.timeout import Timeout
from kvbaton_conformance.suite.visibility import Visibility


class ConnectorLevel(
    Registration,
    Handshake,
    Epochs,
    Visibility,
    Ordering,
    Completion,
    Quiet,
    BackPressure,
    Failure,
    Timeout,
    Cancellation,
    Teardown,
    Threads,
    Cost,
    Honesty,
):
    """Two ends of a connector against T1 to T13."""


class ConnectorConformance(ConnectorLevel, HandoffConformance):
    """Everything that a connector must pass: its own level, and the hand-off over it.

    ::

        from kvbaton_conformance import ConnectorConformance

        class TestMine(ConnectorConformance):
            connector = "mine"
    """
