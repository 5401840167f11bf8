"""A transport for kvbaton over stream sockets, for stages in any processes of one machine.

Two-sided: the source sends, and the destination puts the bytes in their place itself, so that it can also refuse
them.  This module is what is loaded before anybody knows whether the transport is wanted, so it is light.  The
transport is :mod:`kvbaton_example_stream.connector`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvbaton.connector import API_VERSION, Availability, Capabilities, ConnectorContext, Need

if TYPE_CHECKING:
    from kvbaton_example_stream.connector import StreamConnector

#: What every connector of ours promises, and no more than that: the kit looks in both directions (T13).
CAPABILITIES = Capabilities(
    memory_kinds=frozenset({"host"}),
    same_process=True,
    cross_process=True,
    quiet="exact",  # a chunk ends with the destination's word, or with the end of the destination's stream
    disconnect_fences=True,  # the destination closes its socket: what is still under way has no way in
    revocable=True,  # the destination writes its memory itself, or does not
    max_segments=4096,
)


#: The most chunks that one peer may have under way to another.
MAX_QUEUE = 4096


class StreamOptions(BaseModel):
    """``transport.options``.  An option that nobody reads is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: Literal["unix", "tcp"] = Field("unix", description="unix sockets, or TCP on the loopback interface")
    queue_limit: Annotated[int, Field(ge=1, le=MAX_QUEUE)] = Field(
        32, description="chunks per peer under way; more are refused until there is room (T6)"
    )


class StreamPlugin:
    """``transport.name = "example_stream"``."""

    name = "example_stream"
    api_version = API_VERSION
    Options = StreamOptions

    def probe(self, need: Need) -> Availability:
        """Usable for host memory, within one machine."""
        if need.memory_kind not in CAPABILITIES.memory_kinds:
            return Availability(
                False,
                f"it moves host memory, not {need.memory_kind} memory",
                "keep the KV cache in host memory, or choose another transport",
                CAPABILITIES,
            )
        if not CAPABILITIES.reaches(need.reach):
            return Availability(
                False,
                "it listens on this machine only, and what it sends is not encrypted",
                "choose a transport that was made for networks",
                CAPABILITIES,
            )
        return Availability(True, capabilities=CAPABILITIES)

    def open(self, options: StreamOptions, context: ConnectorContext) -> StreamConnector:
        """A connector for the stage ``context.peer``."""
        from kvbaton_example_stream.connector import StreamConnector  # only who opens one pays for it

        return StreamConnector(context.peer, options)


#: The object behind the entry point.
plugin = StreamPlugin()

__all__ = ["StreamPlugin", "plugin"]
