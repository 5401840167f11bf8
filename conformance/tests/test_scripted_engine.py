"""The scripted engine passes the kit's engine level, in one plane and in several, with final payloads and without."""

from __future__ import annotations

from kvbaton.identity import TransferId
from kvbaton_conformance import EngineConformance
from kvbaton_conformance.scripted import ScriptedEngine


def break_request(engine: ScriptedEngine, transfer: TransferId) -> None:
    engine.fail_compute.add(transfer)
    engine.fail_decode.add(transfer)


class TestScripted(EngineConformance):
    engine = "kvbaton_conformance.scripted_plugin:plugin"
    model = "scripted:1"
    engine_options = {"planes": 3}
    break_request = staticmethod(break_request)


class TestScriptedWithoutFinalPayload(EngineConformance):
    engine = "kvbaton_conformance.scripted_plugin:plugin"
    model = "scripted:2"
    engine_options = {"final_bytes": 0, "prefix_caching": False, "block_tokens": 3, "gap": 0}
    break_request = staticmethod(break_request)
