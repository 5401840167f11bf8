"""The plugin object ``ucx``: light, and loaded before anybody knows whether the transport is wanted."""

from __future__ import annotations

import importlib.util
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
    MemoryRegion,
    Need,
    SelfTest,
)
from kvbaton.errors import TransportError
from kvbaton_cuda_ipc import library
from kvbaton_cuda_ipc.options import UcxOptions

if TYPE_CHECKING:
    from kvbaton_cuda_ipc.baseline import RawUcx
    from kvbaton_cuda_ipc.ucx import UcxConnector

#: True of every connector that is opened; see :class:`~kvbaton.connector.Capabilities` for what each word promises.
CAPABILITIES = Capabilities(
    memory_kinds=frozenset({"host"}),
    same_process=True,
    cross_process=True,
    quiet="peer_death",  # where the connection breaks, a destination that lives may still put in place what it has
    disconnect_fences=True,  # a destination's memory is written by itself alone, from slots that it throws away
    revocable=True,  # for the same reason
    max_segments=65536,
)
#: True as well where there is a CUDA device.
WITH_DEVICES = replace(CAPABILITIES, memory_kinds=frozenset({"host", "cuda"}))


class UcxPlugin:
    """``transport.name = "ucx"``."""

    name = "ucx"
    api_version = API_VERSION
    wire_version = 1
    Options = UcxOptions

    def probe(self, need: Need) -> Availability:
        """Usable where ucxx can be loaded, within one host; for device memory, with torch and a CUDA device."""

        def no(reason: str, remedy: str) -> Availability:
            return Availability(False, reason, remedy, CAPABILITIES if need.memory_kind == "host" else WITH_DEVICES)

        # first what nobody can change here: whoever has no GPU shall not install packages for one
        if need.memory_kind == "cuda" and not cuda.visible():
            return no(*cuda.INVISIBLE)
        if not CAPABILITIES.reaches(need.reach):
            return no(
                "it was made for stages of one host", 'choose a transport that was made for networks, such as "nixl"'
            )
        missing = library.missing()
        if missing:
            return no(missing, library.remedy("kvbaton-cuda-ipc"))
        capabilities = capabilities_here()
        if need.memory_kind not in capabilities.memory_kinds:
            return no(
                "torch or triton cannot be found, and cuda memory was asked for",
                'pip install "kvbaton-cuda-ipc[device]", or keep the KV cache in host memory',
            )
        return Availability(True, capabilities=capabilities)

    def baseline(self, options: UcxOptions, regions: Sequence[MemoryRegion]) -> RawUcx:
        """One end of UCX on its own, for ``kvbaton bench``."""
        from kvbaton_cuda_ipc.baseline import RawUcx

        return RawUcx(options, regions)

    def advice(self, options: UcxOptions, found: SelfTest) -> list[Advice]:
        """Whether bytes go as fast as they should here."""
        from kvbaton_cuda_ipc.advice import advise

        return advise(options, found)

    def open(self, options: UcxOptions, context: ConnectorContext) -> UcxConnector:
        """A connector for the stage ``context.peer``."""
        from kvbaton_cuda_ipc.ucx import UcxConnector  # only who opens one pays for it

        if context.device is not None and "cuda" not in capabilities_here().memory_kinds:
            raise TransportError("device memory needs torch and triton: pip install kvbaton-cuda-ipc[device]")
        return UcxConnector(context.peer, options, capabilities_here())


def capabilities_here() -> Capabilities:
    """With device memory where this process sees a CUDA device."""
    if not cuda.visible() or not all(importlib.util.find_spec(name) for name in ("torch", "triton")):
        return CAPABILITIES
    return WITH_DEVICES
