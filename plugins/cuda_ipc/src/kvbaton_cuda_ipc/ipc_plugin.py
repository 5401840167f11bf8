"""The plugin object of ``transport.name = "cuda_ipc"``, and its options."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from kvbaton.byte_size import InBytes
from kvbaton.connector import API_VERSION, Availability, Capabilities, ConnectorContext, MemoryRegion, Need
from kvbaton.errors import TransportError
from kvbaton_cuda_ipc import driver, library

if TYPE_CHECKING:
    from kvbaton_cuda_ipc.driver import Cuda
    from kvbaton_cuda_ipc.ipc import IpcConnector
    from kvbaton_cuda_ipc.ipc_baseline import RawKernel
    from kvbaton_cuda_ipc.mover import Mover

#: The oldest CUDA that a driver must serve.
_OLDEST = 11040

#: See :class:`~kvbaton.connector.Capabilities` for what each word promises.
CAPABILITIES = Capabilities(
    memory_kinds=frozenset({"cuda"}),
    same_process=False,  # a handle cannot be opened in the process that made it
    cross_process=True,
    cross_host=False,
    quiet="peer_death",  # exact but for a device that fails: it does not say any more what it still does
    disconnect_fences=False,  # a mapping that a live peer has cannot be taken from it
)


class IpcOptions(BaseModel):
    """Every field has a default that was measured; an option that nobody reads is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    programs: Annotated[int, Field(ge=1, le=65535)] | None = Field(
        None,
        description="programs that a copy may have on the device at once: fewer leave more of it to the engine; by"
        " default one for each of its multiprocessors, or two where that is faster",
    )
    inflight_chunks: Annotated[int, Field(ge=1, le=4096)] = Field(
        64, description="chunks per peer that are under way; more are refused until there is room (T6)"
    )
    engine_above: Annotated[InBytes, Field(ge=1)] | None = Field(
        None,
        description="bytes of a run from which on the copy engine moves it instead of the kernel; by default what was"
        " measured",
    )
    ucx: dict[str, str] = Field(
        default_factory=dict,
        description='settings of UCX, which carries the words, without their prefix, as in {"TLS": "tcp,self"}',
    )


class IpcPlugin:
    """``transport.name = "cuda_ipc"``."""

    name = "cuda_ipc"
    api_version = API_VERSION
    #: Of the words on the wire and the metadata; peers that speak another are refused at connect.
    wire_version = 2
    Options = IpcOptions

    # -- what a test has others for --

    def cuda(self) -> Cuda | None:
        """The driver, ``None`` where there is none, or none that finds a device."""
        return driver.load()

    def mover(self, cuda: Cuda, device: int, options: IpcOptions, *, counted: bool) -> Mover:
        """What moves bytes on a device; ``counted``: and counts it for peers.  Compiles its kernels, which takes
        seconds."""
        from kvbaton_cuda_ipc.mover import DeviceMover

        assert isinstance(cuda, driver.Driver)
        return DeviceMover(cuda, device, options.programs, options.engine_above, counted=counted)

    def connector(self) -> type[IpcConnector]:
        from kvbaton_cuda_ipc.ipc import IpcConnector

        return IpcConnector

    def lacks(self) -> str:
        """Which package is not installed that moving bytes needs; empty where none is missing.  Loads nothing."""
        missing = [name for name in ("torch", "triton") if not importlib.util.find_spec(name)]
        return f"{' and '.join(missing)} cannot be found" if missing else ""

    # -- the plugin protocol --

    def probe(self, need: Need) -> Availability:
        """Usable on Linux with ucxx, torch, triton and a CUDA device, for device memory between processes of a host."""

        def no(reason: str, remedy: str) -> Availability:
            return Availability(False, reason, remedy, CAPABILITIES)

        # first what nobody can change here: whoever has no GPU shall not install packages for one
        if need.memory_kind != "cuda":
            return no(
                f"CUDA IPC is for memory of a device, and {need.memory_kind} memory was asked for",
                'set transport.name to "ucx" or "nixl"',
            )
        try:
            cuda = self.cuda()
            if cuda is None or not cuda.devices():
                return no(
                    "there is no CUDA driver, or no device that this process sees",
                    "look at CUDA_VISIBLE_DEVICES and the driver (nvidia-smi), or keep the KV cache in host memory",
                )
            if cuda.version() < _OLDEST:
                return no(
                    f"the driver serves CUDA {cuda.version() // 1000}.{cuda.version() % 1000 // 10}, and"
                    f" {_OLDEST // 1000}.{_OLDEST % 1000 // 10} is needed",
                    "install a newer driver",
                )
        except TransportError as error:
            return no(f"CUDA's driver does not answer: {error}", "look at the driver (nvidia-smi)")
        reason = library.missing()
        if reason:
            return no(reason, library.remedy('"kvbaton-cuda-ipc[device]"'))
        reason = self.lacks()
        if reason:
            return no(reason, 'pip install "kvbaton-cuda-ipc[device]"')
        if need.reach == "same_process":
            return no(
                "a CUDA IPC handle cannot be opened in the process that made it",
                'run the stages in processes of their own: stages.launch = "process"',
            )
        if need.reach == "cross_host":
            return no("CUDA IPC reaches one host", 'set transport.name to "nixl"')
        return Availability(True, capabilities=CAPABILITIES)

    def baseline(self, options: IpcOptions, regions: Sequence[MemoryRegion]) -> RawKernel:
        """One end of the kernel without kvbaton, for ``kvbaton bench``."""
        from kvbaton_cuda_ipc.ipc_baseline import RawKernel

        cuda = self.cuda()
        if cuda is None:
            raise TransportError("cuda_ipc: there is no CUDA driver, or no device that this process sees")
        return RawKernel(cuda, lambda: self.mover(cuda, regions[0].device, options, counted=False), regions)

    def open(self, options: IpcOptions, context: ConnectorContext) -> IpcConnector:
        """A connector for the stage ``context.peer``, which has the device ``context.device``."""
        from kvbaton_cuda_ipc.ipc import PROTOCOL
        from kvbaton_cuda_ipc.wire import Settings, Wire

        cuda = self.cuda()
        if cuda is None:
            raise TransportError("cuda_ipc: there is no CUDA driver, or no device that this process sees")
        device = context.device
        if device is None:
            raise TransportError(
                'cuda_ipc: the stage has no device; set its device, or transport.name to "ucx" for host memory'
            )
        count = len(cuda.devices())
        if device >= count:
            raise TransportError(f"cuda_ipc: the stage's device is {device}, and this process sees {count}")
        reason = self.lacks()
        if reason:
            raise TransportError(f'cuda_ipc: {reason}; pip install "kvbaton-cuda-ipc[device]"')
        wire = Wire(context.peer, PROTOCOL, Settings(options.ucx))
        try:
            cuda.enter(device)
            mover = self.mover(cuda, device, options, counted=True)
        except Exception:
            wire.close()
            raise
        return self.connector()(context.peer, device, cuda, mover, wire, options.inflight_chunks)
