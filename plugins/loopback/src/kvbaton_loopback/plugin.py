"""The plugin object: light, and loaded before anybody knows whether the transport is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.connector import API_VERSION, Availability, Capabilities, ConnectorContext, Need
from kvbaton_loopback.options import LoopbackOptions

if TYPE_CHECKING:
    from kvbaton_loopback.connector import LoopbackConnector

#: True of every connector that is opened; see :class:`~kvbaton.connector.Capabilities` for what each word promises.
CAPABILITIES = Capabilities(
    memory_kinds=frozenset({"host"}),
    same_process=True,
    quiet="exact",
    disconnect_fences=True,
    revocable=True,
)


class LoopbackPlugin:
    """``transport.name = "loopback"``."""

    name = "loopback"
    api_version = API_VERSION
    #: Both ends are of one process, so they never differ.
    wire_version = 1
    Options = LoopbackOptions
    #: What the conformance kit's stepped mode asks for: nothing moves but by :attr:`LoopbackConnector.wire`.
    stepped_options = {"carrier": "manual"}

    def probe(self, need: Need) -> Availability:
        """Usable for host memory within one process, and for nothing else."""
        if need.memory_kind not in CAPABILITIES.memory_kinds:
            return Availability(
                False,
                f"loopback moves host memory, not {need.memory_kind} memory",
                "keep the KV cache in host memory, or choose a transport for device memory",
                CAPABILITIES,
            )
        if not CAPABILITIES.reaches(need.reach):
            return Availability(
                False,
                f"loopback reaches stages of its own process only ({need.reach} was asked for)",
                "run the stages in one process, or choose a transport that reaches further",
                CAPABILITIES,
            )
        return Availability(True, capabilities=CAPABILITIES)

    def open(self, options: LoopbackOptions, context: ConnectorContext) -> LoopbackConnector:
        """A connector for the stage ``context.peer``."""
        from kvbaton_loopback.connector import LoopbackConnector  # only who opens one pays for it

        return LoopbackConnector(context.peer, options)
