"""The scripted engine as the engine level's subject, so that the mutants of engines are judged by it."""

from __future__ import annotations

from kvbaton.identity import TransferId
from kvbaton_conformance import EngineConformance
from kvbaton_conformance.scripted import ScriptedEngine


def break_request(engine: ScriptedEngine, transfer: TransferId) -> None:
    """Make one request fail while it is computed."""
    engine.fail_compute.add(transfer)
    engine.fail_decode.add(transfer)


class TestScripted(EngineConformance):
    """Several planes and a final payload."""

    engine = "kvbaton_conformance.scripted_plugin:plugin"
    model = "scripted:1"
    engine_options = {"planes": 3}
    break_request = staticmethod(break_request)
