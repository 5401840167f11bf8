"""The connector that is judged, behind a :class:`~kvbaton_conformance.gate.Gate`, as a connector plugin.

``transport.name = "kvbaton_conformance.gate_plugin:plugin"``: whole runtimes, in threads or in processes, over the
connector that a test judges, whichever way it was named, with pollers that are slow and careless under a seed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Annotated, Any, cast

from pydantic import BaseModel, ConfigDict, Field

from kvbaton.connector import API_VERSION, Availability, ConnectorContext, Need, Reach, TransferConnector
from kvbaton_conformance import shared_memory
from kvbaton_conformance.gate import Gate, Weather
from kvbaton_conformance.subject import Reference, Subject


class GateOptions(BaseModel):
    """Which connector, and how its events are reported; see :class:`~kvbaton_conformance.subject.Reference`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    named: str | None = None
    file: str = ""
    module: str = ""
    class_name: str = ""
    options: dict[str, Any] = {}
    reach: Reach = "same_process"
    #: Share of the waiting events that a poll reports, and of the receipts that are reported again.
    report: Annotated[float, Field(gt=0, le=1)] = 1.0
    repeat: Annotated[float, Field(ge=0, lt=1)] = 0.0
    seed: int = 0


class GatePlugin:
    """A :class:`~kvbaton.connector.ConnectorPlugin`.  Usable wherever it is asked: the connector itself was probed."""

    name = "gate"
    api_version = API_VERSION
    Options = GateOptions

    def probe(self, need: Need) -> Availability:
        return Availability(True)

    def open(self, options: GateOptions, context: ConnectorContext) -> TransferConnector:
        from kvbaton.plugins import choose_connector

        shared_memory.join()  # this may be a stage's process
        reference = Reference(options.named, options.file, options.module, options.class_name)
        need = Need("host" if context.device is None else "cuda", options.reach)
        plugin, valid = choose_connector(reference.load(), need, dict(options.options))
        gate = Gate(plugin.open(valid, context))
        draw = random.Random(f"{options.seed} {context.peer.name}")
        gate.weather = Weather(draw, report=options.report, repeat=options.repeat)
        return cast("TransferConnector", gate)


plugin = GatePlugin()


def transport_settings(subject: Subject, reach: Reach, *, seed: int, report: float, repeat: float) -> Mapping[str, Any]:
    """Dotted settings that put ``subject`` behind a gate."""
    reference = subject.reference
    return {
        "transport.name": "kvbaton_conformance.gate_plugin:plugin",
        "transport.options": {
            "named": reference.named, "file": reference.file, "module": reference.module,
            "class_name": reference.class_name, "options": dict(subject.given_options), "reach": reach,
            "seed": seed, "report": report, "repeat": repeat,
        },
    }  # fmt: skip
