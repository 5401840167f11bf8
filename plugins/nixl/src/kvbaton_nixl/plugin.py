"""The plugin object: light, and loaded before anybody knows whether the transport is wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbaton import cuda
from kvbaton.connector import (
    API_VERSION,
    Advice,
    Availability,
    Capabilities,
    ConnectorContext,
    Lane,
    MemoryKind,
    MemoryRegion,
    Need,
    SelfTest,
)
from kvbaton_nixl import library
from kvbaton_nixl.options import NixlOptions
from kvbaton_nixl.words import MAX_SEGMENTS

if TYPE_CHECKING:
    from kvbaton_nixl.baseline import RawNixl
    from kvbaton_nixl.connector import NixlConnector

#: True of every connector that is opened; see :class:`~kvbaton.connector.Capabilities` for what each word promises.
CAPABILITIES = Capabilities(
    memory_kinds=frozenset({"host"}),
    same_process=True,
    cross_process=True,
    cross_host=True,
    quiet="peer_death",  # after an error a live peer on this host may still write: it needs no socket for that
    copies_in_submit=True,  # through shared memory and cross-memory attach NIXL writes while it posts
    max_segments=MAX_SEGMENTS,
)
#: True as well where there is a CUDA device.
WITH_DEVICES = replace(CAPABILITIES, memory_kinds=frozenset({"host", "cuda"}))


class NixlPlugin:
    """``transport.name = "nixl"``."""

    name = "nixl"
    api_version = API_VERSION
    #: Of what :mod:`kvbaton_nixl.words` says; peers that speak another are refused at connect.
    wire_version = 1
    Options = NixlOptions

    def probe(self, need: Need) -> Availability:
        """Usable where NIXL is installed; for device memory, where a CUDA device is visible too."""

        def no(reason: str, remedy: str) -> Availability:
            return Availability(False, reason, remedy, CAPABILITIES if need.memory_kind == "host" else WITH_DEVICES)

        # first what nobody can change here: whoever has no GPU shall not install packages for one
        if need.memory_kind == "cuda" and not cuda.visible():
            return no(*cuda.INVISIBLE)
        if need.memory_kind == "cuda" and need.reach == "same_process":
            return no(
                "two NIXL agents of one process do not reach each other's device memory",
                'run the stages in processes of their own: stages.launch = "process"',
            )
        missing = library.missing()
        if missing:
            return no(missing, "run it on Linux" if "Linux" in missing else "pip install kvbaton-nixl")
        return Availability(True, capabilities=capabilities_here())

    def lanes(self, options: NixlOptions, kind: MemoryKind = "host") -> list[Lane]:
        """By which ways UCX moves bytes between two processes of this host, with these options.

        Two processes are started for it, which takes seconds; a start never waits for that.  Raises
        :class:`~kvbaton.errors.TransportError` where no byte goes, with what UCX or CUDA said.
        """
        from kvbaton_nixl.lanes import look

        return look(options, kind)

    def baseline(self, options: NixlOptions, regions: Sequence[MemoryRegion]) -> RawNixl:
        """One end of NIXL's own API, for ``kvbaton bench``."""
        from kvbaton_nixl.baseline import RawNixl

        return RawNixl(options, regions)

    def advice(self, options: NixlOptions, found: SelfTest) -> list[Advice]:
        """Whether the ways that UCX took are those that it should, and what keeps it from them."""
        from kvbaton_nixl.advice import advise

        return advise(options, found)

    def open(self, options: NixlOptions, context: ConnectorContext) -> NixlConnector:
        """A connector for the stage ``context.peer``.

        Where the stage has a device, what packing needs there is made ready before anybody waits for it.  Raises
        :class:`~kvbaton.errors.TransportError` where it cannot pack and the option says that it must.
        """
        from kvbaton_nixl.connector import NixlConnector  # only who opens one pays for it
        from kvbaton_nixl.staging import packs

        if context.device is not None:
            packs(context.device, options.packing)
        return NixlConnector(context.peer, options, capabilities_here())


def capabilities_here() -> Capabilities:
    """With device memory where this process sees a CUDA device."""
    if not cuda.visible():
        return CAPABILITIES
    return WITH_DEVICES
