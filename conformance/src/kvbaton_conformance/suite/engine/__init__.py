"""The engine level: a :class:`~kvbaton.engine.StageEngine` alone, and two of them with plain copies between them."""

from __future__ import annotations

from kvbaton_conformance.suite.engine.agreement import EngineAgreement
from kvbaton_conformance.suite.engine.books import Books
from kvbaton_conformance.suite.engine.imports import Imports
from kvbaton_conformance.suite.engine.lifetimes import Lifetimes
from kvbaton_conformance.suite.engine.memory import EngineMemory
from kvbaton_conformance.suite.engine.ranges import Ranges
from kvbaton_conformance.suite.engine.reservations import EngineReservations


class EngineConformance(
    EngineMemory,
    Ranges,
    EngineReservations,
    Imports,
    Lifetimes,
    Books,
    EngineAgreement,
):
    """What an inference engine must be to take part in a hand-off.

    ::

        from kvbaton_conformance import EngineConformance

        class TestMine(EngineConformance):
            engine = "mine"
            model = "some-small-model"
            engine_options = {"block_tokens": 4}
    """
