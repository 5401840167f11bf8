"""A transport for kvbaton over shared memory, for stages in any processes of one machine.

This module is what is loaded before anybody knows whether the transport is wanted, so it is light.  The transport is
:mod:`kvbaton_example_shm.connector`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

from kvbaton.connector import API_VERSION, Availability, Capabilities, ConnectorContext, Need

if TYPE_CHECKING:
    from kvbaton_example_shm.connector import ShmConnector

#: What every connector of ours promises, and no more than that: the kit looks in both directions (T13).
CAPABILITIES = Capabilities(
    memory_kinds=frozenset({"host"}),
    memory_origin="allocated",  # only memory that we allocated is in a file that a peer can map
    same_process=True,
    cross_process=True,
    quiet="exact",  # a copy is over when submit() returns: no failure leaves anything in the dark
    # Not disconnect_fences: a peer that does not listen keeps its mapping, and nobody can take it away.  Not revocable,
    # for the same reason.
    copies_in_submit=True,
)


class ShmOptions(BaseModel):
    """There is nothing to set.  An option that nobody reads is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ShmPlugin:
    """``transport.name = "example_shm"``."""

    name = "example_shm"
    api_version = API_VERSION
    Options = ShmOptions

    def probe(self, need: Need) -> Availability:
        """Usable on Linux, for host memory, within one machine."""
        if not hasattr(os, "memfd_create"):
            return Availability(False, "this system has no memfd_create", "use Linux", CAPABILITIES)
        if need.memory_kind not in CAPABILITIES.memory_kinds:
            return Availability(
                False,
                f"it moves host memory, not {need.memory_kind} memory",
                "keep the KV cache in host memory, or choose another transport",
                CAPABILITIES,
            )
        if not CAPABILITIES.reaches(need.reach):
            return Availability(
                False, "it shares memory within one machine", "choose a transport over a network", CAPABILITIES
            )
        return Availability(True, capabilities=CAPABILITIES)

    def open(self, options: ShmOptions, context: ConnectorContext) -> ShmConnector:
        """A connector for the stage ``context.peer``."""
        from kvbaton_example_shm.connector import ShmConnector  # only who opens one pays for it

        return ShmConnector(context.peer)


#: The object behind the entry point.
plugin = ShmPlugin()

__all__ = ["ShmPlugin", "plugin"]
