"""``cuda_ipc`` on a device that is none, for the whole kit in two processes."""

from dataclasses import replace

from fake_cuda import FakeCuda, FakeMover

from kvbaton_cuda_ipc.ipc import IpcConnector
from kvbaton_cuda_ipc.ipc_plugin import CAPABILITIES, IpcPlugin

ON_HOST = replace(CAPABILITIES, memory_kinds=frozenset({"host"}))


class HostConnector(IpcConnector):
    """Takes the host's memory for that of device 0."""

    capabilities = ON_HOST

    def register(self, regions):
        super().register([replace(region, kind="cuda", device=0) for region in regions])


class FakePlugin(IpcPlugin):
    """Everything is the plugin's own but the driver and what moves bytes."""

    def cuda(self):
        return FakeCuda()

    def mover(self, cuda, device, options, *, counted):
        return FakeMover(cuda, counted=counted)

    def connector(self):
        return HostConnector

    def lacks(self):
        return ""

    def probe(self, need):
        kind = {"host": "cuda", "cuda": "host"}[need.memory_kind]
        return replace(super().probe(replace(need, memory_kind=kind)), capabilities=ON_HOST)

    def baseline(self, options, regions):
        return super().baseline(options, [replace(region, kind="cuda", device=0) for region in regions])

    def open(self, options, context):
        return super().open(options, replace(context, device=0))


plugin = FakePlugin()
