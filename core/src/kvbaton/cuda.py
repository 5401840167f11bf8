"""CUDA's devices and their memory, by the driver's own interface (``libcuda.so.1``): no framework is loaded for it.

What is allocated so can be shared between processes, as frameworks' memory can.  Calls that concern memory act in the
context that is current in the calling thread; :meth:`Driver.enter` makes it the device's primary one, which every
framework uses.
"""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path
from typing import Final, Protocol

from kvbaton.errors import TransportError

LIBRARY: Final = "libcuda.so.1"
#: Bytes of a device's name.
_NAME: Final = 96
#: Why there is no memory of a device where none is :func:`visible`, and what to do: the same for every transport.
INVISIBLE: Final = (
    "no CUDA device is visible, and cuda memory was asked for",
    "keep the KV cache in host memory, or look at CUDA_VISIBLE_DEVICES and the driver (nvidia-smi)",
)


class DriverError(TransportError):
    """A call of CUDA's driver that did not succeed."""


class Cuda(Protocol):
    """What moves bytes takes of the driver, or what a test has in its place.  Addresses and sizes are bytes."""

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
    """See :class:`Cuda`; and what there is to know of devices, which are numbered as this process sees them.

    Raises :class:`DriverError` where the driver refuses.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        #: Of each device that was entered, its primary context.  Each is retained once and for good: what frameworks
        #: and transports made there they may give back as late as at the process's exit, which ends it anyway.
        self._contexts: dict[int, ctypes.c_void_p] = {}

    # -- devices -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """To be called before anything else."""
        self._call("cuInit", ctypes.c_uint(0))

    def version(self) -> int:
        """The newest CUDA that the driver serves, as 1000 times major plus 10 times minor."""
        found = ctypes.c_int()
        self._call("cuDriverGetVersion", ctypes.byref(found))
        return found.value

    def count(self) -> int:
        """How many devices this process sees."""
        found = ctypes.c_int()
        self._call("cuDeviceGetCount", ctypes.byref(found))
        return found.value

    def name(self, device: int) -> str:
        name = ctypes.create_string_buffer(_NAME)
        self._call("cuDeviceGetName", name, ctypes.c_int(_NAME), self._handle(device))
        return name.value.decode(errors="replace")

    def memory(self, device: int) -> int:
        """Bytes in all."""
        total = ctypes.c_size_t()
        self._call("cuDeviceTotalMem_v2", ctypes.byref(total), self._handle(device))
        return total.value

    def reaches(self, device: int, other: int) -> bool:
        """Whether ``device`` can address the memory of ``other``."""
        if device == other:
            return True
        can = ctypes.c_int()
        self._call("cuDeviceCanAccessPeer", ctypes.byref(can), self._handle(device), self._handle(other))
        return bool(can.value)

    def _handle(self, device: int) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
        return handle

    # -- memory --------------------------------------------------------------------------------------------------------

    def enter(self, device: int) -> None:
        context = self._contexts.get(device)
        if context is None:
            context = ctypes.c_void_p()
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._handle(device))
            self._contexts[device] = context
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

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        self._call(
            "cuMemcpyAsync", ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(nbytes),
            ctypes.c_void_p(stream),
        )  # fmt: skip

    def settle(self) -> None:
        self._call("cuCtxSynchronize")

    # -- its answers ---------------------------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: object) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, status: int) -> None:
        if status:
            text = ctypes.c_char_p()
            known = self._library.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value
            what = known.decode() if known else "an error without a name"
            raise DriverError(f"CUDA's driver: {name} failed with {what} ({status})", status=status)


@functools.cache
def visible() -> bool:
    """Whether this process could use a device, found out without loading CUDA or a framework."""
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    if devices is not None and devices.strip() in ("", "-1"):
        return False
    return present()


def present() -> bool:
    """Whether a driver of NVIDIA's is loaded on this machine, also where its devices are hidden from this process."""
    return any(Path(device).exists() for device in ("/dev/nvidiactl", "/dev/dxg"))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The driver's library, ready for use; ``None`` where there is none, or none that finds a device."""
    try:
        found = ctypes.CDLL(LIBRARY)
    except OSError:
        return None
    return found if found.cuInit(0) == 0 else None


@functools.cache
def load() -> Cuda | None:
    """The driver; ``None`` where there is none, or none that finds a device."""
    found = library()
    return None if found is None else Driver(found)


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
