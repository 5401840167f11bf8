"""Memory of a CUDA device by the driver's own interface (``libcuda.so.1``): no framework is loaded for it.

What is allocated so can be shared between processes, as frameworks' memory can.  Calls act in the context that is
current in the calling thread; :meth:`Driver.enter` makes it the device's primary one, which every framework uses.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Protocol

from kvbaton.errors import TransportError


class Cuda(Protocol):
    """The driver, or what a test has in its place.  Addresses and sizes are bytes."""

    def enter(self, device: int) -> None:
        """Make the device's primary context the calling thread's own."""

    def allocate(self, nbytes: int) -> int:
        """Where new memory of the present device is."""

    def free(self, address: int) -> None: ...

    def fill(self, address: int, value: int, nbytes: int) -> None: ...

    def write(self, address: int, source: int, nbytes: int) -> None:
        """From the host; it is there when this returns."""

    def read(self, target: int, address: int, nbytes: int) -> None:
        """To the host."""

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Between addresses of devices; started, see :meth:`settle`."""

    def settle(self) -> None:
        """Wait until the present device has done everything."""


class Driver:
    """See :class:`Cuda`.  Raises :class:`~kvbaton.errors.TransportError` where the driver refuses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def enter(self, device: int) -> None:
        context = ctypes.c_void_p()
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
        self._call("cuCtxSetCurrent", context)

    def allocate(self, nbytes: int) -> int:
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(nbytes))
        return address.value

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def fill(self, address: int, value: int, nbytes: int) -> None:
        self._call("cuMemsetD8_v2", ctypes.c_uint64(address), ctypes.c_ubyte(value), ctypes.c_size_t(nbytes))
        self.settle()

    def write(self, address: int, source: int, nbytes: int) -> None:
        self._call("cuMemcpyHtoD_v2", ctypes.c_uint64(address), ctypes.c_void_p(source), ctypes.c_size_t(nbytes))
        self.settle()

    def read(self, target: int, address: int, nbytes: int) -> None:
        self._call("cuMemcpyDtoH_v2", ctypes.c_void_p(target), ctypes.c_uint64(address), ctypes.c_size_t(nbytes))

    def copy(self, target: int, source: int, nbytes: int) -> None:
        stream = ctypes.c_void_p(None)
        self._call(
            "cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes), stream
        )  # fmt: skip

    def settle(self) -> None:
        self._call("cuCtxSynchronize")

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            known = self._library.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value
            what = known.decode() if known else "an error without a name"
            raise TransportError(f"CUDA's driver: {name} failed with {what} ({status})", status=status)


@functools.cache
def load() -> Cuda | None:
    """The driver; ``None`` where there is none, or none that finds a device."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return Driver(library) if library.cuInit(0) == 0 else None


def require() -> Cuda:
    """The driver.  Raises :class:`~kvbaton.errors.TransportError` where there is none."""
    cuda = load()
    if cuda is None:
        raise TransportError("there is no CUDA driver here, or it finds no device: look at nvidia-smi")
    return cuda


class Allocations:
    """Device memory of our own, until :meth:`free`, which comes once nobody reaches it any more."""

    def __init__(self) -> None:
        #: Device and address of each.
        self._made: list[tuple[int, int]] = []

    def allocate(self, device: int, nbytes: int) -> int:
        """Where it is.  The device is the calling thread's own afterwards."""
        driver = require()
        driver.enter(device)
        address = driver.allocate(nbytes)
        self._made.append((device, address))
        return address

    def free(self) -> None:
        """Give all of it back, from any thread.  Idempotent."""
        while self._made:
            device, address = self._made.pop()
            driver = require()
            driver.enter(device)
            driver.free(address)
