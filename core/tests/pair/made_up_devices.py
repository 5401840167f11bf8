"""Two made-up CUDA devices, whose memory is arrays of the host, and a transport that moves it.

In the process of an end they take the place of the driver as soon as the transport is loaded.
"""

import ctypes
import sys
from dataclasses import replace

import datagram_transport
import numpy as np

from kvbaton import cuda
from kvbaton.connector import Availability, MemoryRegion

CAPABILITIES = replace(datagram_transport.CAPABILITIES, memory_kinds=frozenset({"cuda"}))


class Devices:
    """See :class:`kvbaton.cuda.Cuda`; remembers which device each array belongs to."""

    def __init__(self):
        self.current = None
        self.arrays = {}
        self.settled = True

    def enter(self, device):
        self.current = device

    def allocate(self, nbytes):
        array = np.full(nbytes, 7, np.uint8)
        self.arrays[array.ctypes.data] = (self.current, array)
        return array.ctypes.data

    def free(self, address):
        device, _ = self.arrays.pop(address)
        assert device == self.current, "freed in another context than it was allocated in"

    def fill(self, address, value, nbytes):
        ctypes.memset(address, value, nbytes)

    def write(self, address, source, nbytes):
        ctypes.memmove(address, source, nbytes)

    def read(self, target, address, nbytes):
        assert self.settled
        ctypes.memmove(target, address, nbytes)

    def copy(self, target, source, nbytes):
        self.settled = False
        ctypes.memmove(target, source, nbytes)

    def settle(self):
        self.settled = True


class Connector(datagram_transport.Connector):
    capabilities = CAPABILITIES

    def register(self, regions):
        host = [MemoryRegion(one.id, "host", 0, one.address, one.length, one.owner) for one in regions]
        super().register(host)


class Plugin(datagram_transport.Plugin):
    name = "devices"

    def probe(self, need):
        return Availability(need.memory_kind == "cuda", "no host memory", "", CAPABILITIES)

    def open(self, options, context):
        assert context.device in (0, 1)
        return Connector(context.peer, options.fault)


plugin = Plugin()
if sys.modules["__main__"].__spec__ is not None and sys.modules["__main__"].__spec__.name == "kvbaton.pair.end":
    _devices = Devices()
    cuda.load = lambda: _devices
