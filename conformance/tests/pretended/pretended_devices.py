"""A transport of device memory that is the host's, between processes too; it notes on which device each end is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from sitecustomize import note

from kvbaton.connector import Availability, ConnectorContext, MemoryRegion, Need
from kvbaton_conformance.mutants.reference import CAPABILITIES, Options, ReferenceConnector, ReferencePlugin

torch.set_num_threads(1)  # threads of a device are started with its first use, not with the first large copy


class Pretended(ReferenceConnector):
    capabilities = replace(CAPABILITIES, memory_kinds=frozenset({"cuda"}))

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        note("register", self.peer.name, sorted({region.device for region in regions}))
        super().register([replace(region, kind="host", device=0) for region in regions])


class PretendedPlugin(ReferencePlugin):
    def __init__(self) -> None:
        super().__init__(Pretended, "pretended")

    def probe(self, need: Need) -> Availability:
        able = self.connector.capabilities
        if need.memory_kind != "cuda" or not able.reaches(need.reach):
            return Availability(False, f"it moves device memory on one host, not {need}", "choose another", able)
        return Availability(True, capabilities=able)

    def open(self, options: Options, context: ConnectorContext) -> ReferenceConnector:
        note("open", context.peer.name, [context.device])
        return super().open(options, context)


plugin = PretendedPlugin()
