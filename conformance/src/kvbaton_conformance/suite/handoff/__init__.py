"""The hand-off level: coordinator and two stages with a scripted engine over the connector that is judged."""

from __future__ import annotations

from kvbaton_conformance.suite.topic import HandoffTopic


class HandoffConformance(
    HandoffTopic,
):
    """A whole hand-off over a connector against the C clauses that a transport can break."""
