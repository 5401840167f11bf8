"""The classes that a third party derives from: each joins the topics of its level."""

from __future__ import annotations

from kvbaton_conformance.suite.completion import Completion
from kvbaton_conformance.suite.handoff import HandoffConformance
from kvbaton_conformance.suite.visibility import Visibility


class ConnectorLevel(
    Visibility,
    Completion,
):
    """Two ends of a connector against T1 to T13."""


class ConnectorConformance(ConnectorLevel, HandoffConformance):
    """Everything that a connector must pass: its own level, and the hand-off over it.

    ::

        from kvbaton_conformance import ConnectorConformance

        class TestMine(ConnectorConformance):
            connector = "mine"
    """
