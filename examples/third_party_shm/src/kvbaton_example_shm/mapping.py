"""Memory that is a file's, mapped by the C library.

Why not :class:`mmap.mmap`?  Before Python 3.13 it keeps a descriptor of the file for as long as the memory lives, and
a region's memory outlives ``close()``, after which no descriptor may be left (T10).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def mapped(descriptor: int, length: int, offset: int = 0) -> Bytes:
    """``length`` bytes of a file from ``offset``, shared, writable; unmapped when the last array over them is gone."""
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, descriptor, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), f"mmap of {length} bytes: {os.strerror(ctypes.get_errno())}")
    memory = (ctypes.c_uint8 * length).from_address(address)
    weakref.finalize(memory, _libc.munmap, address, length).atexit = False  # at exit the kernel does it
    return np.ctypeslib.as_array(memory)


def keep_from_children(memory: Bytes) -> None:
    """Processes that this one forks do not inherit ``memory``, the whole of one mapping."""
    _libc.madvise(memory.ctypes.data, memory.nbytes, mmap.MADV_DONTFORK)
