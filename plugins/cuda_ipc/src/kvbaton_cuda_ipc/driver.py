"""What is asked of CUDA's driver itself: whose memory an address is, and memory that is shared between processes.

By the driver's own interface (``libcuda.so.1``), so that memory of any framework will do, and so that probing loads
neither torch nor a CUDA runtime.  Calls that concern memory act in the context that is current in the calling thread:
:meth:`Driver.enter` makes it the device's primary one, which is the one that every framework uses.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import kvbaton.cuda
from kvbaton.cuda import DriverError

__all__ = ["HANDLE_BYTES", "Allocation", "Cuda", "Driver", "DriverError", "load"]

#: Bytes of a handle by which one process gives memory to another.
HANDLE_BYTES = 64

# CUpointer_attribute of cuda.h
_MEMORY_TYPE, _DEVICE_ORDINAL, _IPC_CAPABLE, _RANGE_START, _RANGE_SIZE = 2, 9, 10, 11, 12
_DEVICE_MEMORY = 2
# CUipcMem_flags
_LAZY_PEER_ACCESS = 1
# CUevent_flags
_WITHOUT_TIMING = 2
# CU_MEMHOSTREGISTER_*: for every context, and with an address for devices
_PORTABLE, _MAPPED = 1, 2
# CUstreamWriteValue_flags: with a fence at system scope before it
_FENCED = 0
# CUresult
_NOT_READY = 600


@dataclass(frozen=True, slots=True)
class Allocation:
    """What the driver knows of the memory at an address: on which device, and what was allocated there as a whole.

    ``exportable``: it can be opened by another process; not so virtual memory mapped piece by piece, or a memory pool.
    """

    device: int
    base: int
    nbytes: int
    exportable: bool


class Cuda(Protocol):
    """The driver, or what a test has in its place."""

    def version(self) -> int:
        """The newest CUDA that the driver serves, as 1000 times major plus 10 times minor."""

    def devices(self) -> Sequence[bytes]:
        """The UUIDs of the devices that this process sees, in their order; 16 bytes each."""

    def reaches(self, device: int, other: int) -> bool:
        """Whether ``device`` can address the memory of ``other``."""

    def enter(self, device: int) -> None:
        """Make the primary context of a device the calling thread's own."""

    def allocation(self, address: int) -> Allocation | None:
        """What is allocated at ``address``, ``None`` where that is no memory of a device."""

    def export(self, address: int) -> bytes:
        """A handle for the allocation at ``address``, valid while that lives; the same whenever it is asked for."""

    def open(self, handle: bytes) -> int:
        """Map another process's allocation here; where.  Each opening wants one :meth:`close`."""

    def close(self, address: int) -> None:
        """Unmap what :meth:`open` returned.  Nothing of ours may be using it."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Let the device's copy engine move bytes, in the order of ``stream``; device or pinned addresses."""


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * HANDLE_BYTES)]


class Driver(kvbaton.cuda.Driver):
    """See :class:`Cuda`.  Every method raises :class:`DriverError` where the driver refuses."""

    def __init__(self, library: ctypes.CDLL) -> None:
        super().__init__(library)
        library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
        pointer = ctypes.c_uint64
        handle, count = ctypes.c_void_p, ctypes.c_uint
        library.cuMemcpyAsync.argtypes = [pointer, pointer, ctypes.c_size_t, handle]
        library.cuLaunchKernel.argtypes = [handle, *[count] * 7, handle, handle, handle]
        library.cuEventRecord.argtypes = [handle, handle]
        library.cuEventQuery.argtypes = [handle]
        self._write_value = getattr(library, "cuStreamWriteValue64_v2", None)  # since CUDA 11.7
        if self._write_value is not None:
            self._write_value.argtypes = [handle, pointer, pointer, count]

    def devices(self) -> Sequence[bytes]:
        found = []
        for ordinal in range(self.count()):
            uuid = (ctypes.c_byte * 16)()
            self._call("cuDeviceGetUuid_v2", uuid, ctypes.c_int(ordinal))
            found.append(bytes(uuid))
        return found

    def allocation(self, address: int) -> Allocation | None:
        if self._ask(address, _MEMORY_TYPE, ctypes.c_int()) != _DEVICE_MEMORY:
            return None
        device = self._ask(address, _DEVICE_ORDINAL, ctypes.c_int())
        base = self._ask(address, _RANGE_START, ctypes.c_uint64())
        nbytes = self._ask(address, _RANGE_SIZE, ctypes.c_size_t())
        if device is None or base is None or nbytes is None:
            return None
        return Allocation(device, base, nbytes, self._ask(address, _IPC_CAPABLE, ctypes.c_int()) == 1)

    def _ask(self, address: int, attribute: int, value: ctypes.c_int | ctypes.c_uint64 | ctypes.c_size_t) -> int | None:
        status = self._library.cuPointerGetAttribute(
            ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_uint64(address)
        )
        return None if status else int(value.value)

    def export(self, address: int) -> bytes:
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(handle.reserved)

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy(self, target: int, source: int, nbytes: int, stream: int = 0) -> None:
        status = self._library.cuMemcpyAsync(target, source, nbytes, stream)
        if status:
            self._check("cuMemcpyAsync", status)

    def launch(self, function: int, programs: int, threads: int, stream: int, arguments: int) -> None:
        """Start a kernel in the order of ``stream``.  ``arguments``: the address of an array of the addresses of its
        arguments, which are free again afterwards."""
        status = self._library.cuLaunchKernel(function, programs, 1, 1, threads, 1, 1, 0, stream, arguments, None)
        if status:
            self._check("cuLaunchKernel", status)

    def pin(self, address: int, nbytes: int) -> int:
        """Keep the host's pages there in memory, so that devices can write them; where they see them."""
        self._call(
            "cuMemHostRegister_v2",
            ctypes.c_void_p(address),
            ctypes.c_size_t(nbytes),
            ctypes.c_uint(_PORTABLE | _MAPPED),
        )
        there = ctypes.c_uint64()
        try:
            self._call("cuMemHostGetDevicePointer_v2", ctypes.byref(there), ctypes.c_void_p(address), ctypes.c_uint(0))
        except DriverError:
            self.unpin(address)
            raise
        return there.value

    def unpin(self, address: int) -> None:
        """What :meth:`pin` began.  No device may be writing there."""
        self._call("cuMemHostUnregister", ctypes.c_void_p(address))

    def write_behind(self, stream: int, address: int, value: int) -> None:
        """Let the device write 64 bits behind all that is in the stream, and behind a fence at system scope."""
        if self._write_value is None:
            raise DriverError("CUDA's driver is too old to write values in the order of a stream: 11.7 is needed")
        status = self._write_value(stream, address, value, _FENCED)
        if status:
            self._check("cuStreamWriteValue64", status)

    def event(self) -> int:
        """A new event; :meth:`forget` ends it."""
        made = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(made), ctypes.c_uint(_WITHOUT_TIMING))
        assert made.value is not None
        return made.value

    def record(self, event: int, stream: int) -> None:
        """Put it behind all that is in the stream."""
        status = self._library.cuEventRecord(event, stream)
        if status:
            self._check("cuEventRecord", status)

    def reached(self, event: int) -> bool:
        """Whether the device has come to where it was last recorded."""
        status = self._library.cuEventQuery(event)
        if status == _NOT_READY:
            return False
        if status:
            self._check("cuEventQuery", status)
        return True

    def forget(self, event: int) -> None:
        """End what :meth:`event` made, which the device need not have reached."""
        self._call("cuEventDestroy_v2", ctypes.c_void_p(event))


@functools.cache
def load() -> Driver | None:
    """The driver, ``None`` where there is none, or none that finds a device."""
    library = kvbaton.cuda.library()
    return None if library is None else Driver(library)
