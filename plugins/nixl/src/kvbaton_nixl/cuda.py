"""What CUDA's driver knows of a region, and its context for the thread that calls NIXL.

By the driver's own interface, so that memory of any framework will do and none is loaded.  NIXL and UCX act in the
context that is current in the calling thread, and take what they are told about memory as it is.
"""

from __future__ import annotations

import ctypes
import functools

from kvbaton.connector import MemoryRegion

# CUpointer_attribute of cuda.h
_CONTEXT, _MEMORY_TYPE, _DEVICE_ORDINAL, _RANGE_START, _RANGE_SIZE = 1, 2, 9, 11, 12
_DEVICE_MEMORY = 2


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return driver if driver.cuInit(0) == 0 else None


def _ask(address: int, attribute: int, kind: type[ctypes.c_uint64] | type[ctypes.c_int]) -> int | None:
    """An attribute of the memory at ``address``, ``None`` where the driver has none for it."""
    driver, value = _driver(), kind()
    if driver is None:
        return None
    if driver.cuPointerGetAttribute(ctypes.byref(value), ctypes.c_int(attribute), ctypes.c_uint64(address)):
        return None
    return int(value.value)


def refusal(region: MemoryRegion) -> str:
    """Why ``region`` is not the device memory that it is said to be; empty where it is (T1)."""
    if _driver() is None:
        return "CUDA's driver cannot be loaded (libcuda.so.1)"
    if _ask(region.address, _MEMORY_TYPE, ctypes.c_int) != _DEVICE_MEMORY:
        return f"there is no device memory at address {region.address:#x}"
    device = _ask(region.address, _DEVICE_ORDINAL, ctypes.c_int)
    if device != region.device:
        return f"its memory is on CUDA device {device}, not {region.device}"
    start, size = (_ask(region.address, what, ctypes.c_uint64) for what in (_RANGE_START, _RANGE_SIZE))
    if start is not None and size is not None and region.address + region.length > start + size:
        beyond = region.address + region.length - start - size
        return f"its last {beyond} bytes are beyond the end of the memory that was allocated there"
    return ""


def make_current(region: MemoryRegion) -> None:
    """Make the context of ``region``'s memory current in the calling thread, as a first call of torch would."""
    driver = _driver()
    context = _ask(region.address, _CONTEXT, ctypes.c_uint64)
    if driver is not None and context:
        driver.cuCtxSetCurrent(ctypes.c_uint64(context))


def synchronize(region: MemoryRegion) -> bool:
    """Wait until the device has finished everything that was started in the context of ``region``'s memory.

    By whomever, because nobody else can name the streams that UCX has for itself; so a step of the engine that runs is
    waited for too, and no peer ever is.  Whether the device says so: not where it has failed.
    """
    driver = _driver()
    if driver is None:
        return False
    make_current(region)
    return bool(driver.cuCtxSynchronize() == 0)
