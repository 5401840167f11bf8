"""A device that is none: its memory is the host's, and its kernels run when the test lets them.

What one process *exports* another *opens*, as with CUDA: a handle names a process and an address there, opening it
gives an address of our own, and what is moved to that address is written into the other process's memory.
"""

import ctypes
import os
import struct
from collections import deque

import numpy as np

from kvbaton_cuda_ipc.counters import Page
from kvbaton_cuda_ipc.driver import HANDLE_BYTES, Allocation, DriverError
from kvbaton_cuda_ipc.mover import LANES, Mark

PAGE_BYTES = 4096
#: Addresses that :meth:`FakeCuda.open` returns begin here; no process has memory there.
MAPPED = 1 << 60
SPAN = 1 << 40
#: Bytes of an allocation: whatever is behind its first page.
ALLOCATED = 1 << 32

_libc = ctypes.CDLL(None, use_errno=True)


class _Run(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def write_to(pid, target, source, length):
    """Bytes of ours into another process, which may be gone."""
    here, there = _Run(source, length), _Run(target, length)
    if pid == os.getpid():
        ctypes.memmove(target, source, length)
        return
    _libc.process_vm_writev(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)


class FakeCuda:
    """See :class:`~kvbaton_cuda_ipc.driver.Cuda`."""

    def __init__(self, devices=(b"device-0" * 2,), peers=True, exportable=True):
        self.uuids = list(devices)
        self.peers = peers
        self.exportable = exportable
        self.mapped = {}
        self.opened = 0
        self.entered = []
        #: Raised by the next call of a method of that name.
        self.fails = {}

    def _maybe(self, name):
        if name in self.fails:
            raise self.fails.pop(name)

    def version(self):
        return 13000

    def devices(self):
        return self.uuids

    def reaches(self, device, other):
        return device == other or self.peers

    def enter(self, device):
        self.entered.append(device)

    def allocation(self, address):
        if address >= MAPPED:
            return None
        return Allocation(0, address - address % PAGE_BYTES, ALLOCATED, self.exportable)

    def export(self, address):
        self._maybe("export")
        return struct.pack("<qq", os.getpid(), address).ljust(HANDLE_BYTES, b"\0")

    def open(self, handle):
        self._maybe("open")
        pid, address = struct.unpack_from("<qq", handle)
        self.opened += 1
        base = MAPPED + self.opened * SPAN
        self.mapped[base] = pid, address
        return base

    def close(self, address):
        if address not in self.mapped:
            raise DriverError(f"nothing is open at {address:#x}")
        del self.mapped[address]
        self._maybe("close")

    def where(self, address):
        """The process and the address there of what is mapped at ``address``."""
        base = address - (address - MAPPED) % SPAN
        pid, start = self.mapped[base]  # KeyError: something is written through a mapping that is closed
        return pid, start + address - base


class _Copy:
    def __init__(self, cuda, runs, patience, mark, page, before):
        self.cuda = cuda
        self.runs = runs
        self.patience = patience
        self.mark = mark
        self.page = page
        self.before = before
        self.over = False

    def finish(self):
        if self.over:
            return
        for copy in self.before:
            copy.finish()
        self.before = ()
        for source, target, length in self.runs:
            pid, there = self.cuda.where(target)
            write_to(pid, there, source, length)
        self.over = True
        if self.mark is not None:
            self.page.write(*self.mark)

    def query(self):
        if self.patience is not None and not self.over:
            self.patience -= 1
            if self.patience < 0:
                self.finish()
        return self.over


class FakeMover:
    """See :class:`~kvbaton_cuda_ipc.mover.Mover`.  A copy is over after ``patience`` queries, ``None``: when the test
    says so (:meth:`finish`), and so are those before it in its lane.  ``counted``: it raises counters, as a device
    does."""

    def __init__(self, cuda, patience=1, counted=True):
        self.page = Page() if counted else None
        self.numbers = [0] * LANES
        self.turn = 0
        self.cuda = cuda
        self.patience = patience
        self.copies = deque()
        self.closed = False
        #: Raised by the next start.
        self.fails = None
        #: What :meth:`settle` answers.
        self.answers = True

    @property
    def counters(self):
        return self.page.where if self.page else None

    def room(self, rows):
        return np.empty((3, rows), np.int64)

    def start(self, runs, nbytes=None, longest=None, origins=(0, 0)):
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        assert nbytes in (None, runs[2].sum())
        assert longest in (None, runs[2].max())
        runs = [(origins[0] + source, origins[1] + target, length) for source, target, length in runs.T.tolist()]
        self.turn = (self.turn + 1) % LANES
        self.numbers[self.turn] += 1
        mark = Mark(self.turn, self.numbers[self.turn]) if self.page else None
        self.copies = deque(one for one in self.copies if not one.over)
        before = [one for one in self.copies if mark is not None and one.mark.lane == mark.lane]
        copy = _Copy(self.cuda, runs, self.patience, mark, self.page, before)
        self.copies.append(copy)
        return copy

    def finish(self, count=1):
        """The device does the oldest copies that it has not done."""
        left = [copy for copy in self.copies if not copy.over]
        for copy in left[:count]:
            copy.finish()

    def settle(self):
        if self.answers:
            self.finish(len(self.copies))
        return self.answers

    def figures(self):
        return {"launches_total": 0}

    def close(self):
        self.closed = True
        if self.page:
            self.page.close()
