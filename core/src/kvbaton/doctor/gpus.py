"""The GPUs of this machine, asked of NVIDIA's management library, or of the CUDA driver where that is not there.

Neither is a package, and both come with the driver.  Where there is none, that is the answer.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

from kvbaton import cuda
from kvbaton.answering import PATIENCE, Apart, NoAnswer

_COMPUTE_MODES = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_TEXT: Final = 96
#: Of nvmlGpuP2PCapsIndex: reading, writing, over NVLink.
_READ, _WRITE, _NVLINK = 0, 1, 2


class Gpu(msgspec.Struct, frozen=True):
    """``index`` counts all of the machine's, whatever CUDA_VISIBLE_DEVICES says, where the management library told."""

    index: int
    name: str
    memory: int | None
    memory_free: int | None
    uuid: str
    compute_mode: str
    mig: bool


class GpuReport(msgspec.Struct, frozen=True):
    """``peers``: for two GPUs ``nvlink``, ``pcie`` or ``none``.  ``reason``: why there are no GPUs, or some facts."""

    gpus: tuple[Gpu, ...] = ()
    driver: str = ""
    cuda: str = ""
    peers: tuple[tuple[int, int, str], ...] = ()
    reason: str = ""


class _Refused(Exception):
    """A call of a library did not succeed."""


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


Load = Callable[[str], Any]


def read_gpus(load: Load = ctypes.CDLL) -> GpuReport:
    """Never raises; ``load`` is what a test has another for."""
    try:
        library = load("libnvidia-ml.so.1")
    except OSError:
        return _by_driver(load)
    try:
        return _Nvml(library).read()
    except (_Refused, AttributeError) as error:
        report = _by_driver(load)
        return report if report.gpus else msgspec.structs.replace(report, reason=f"the NVIDIA driver: {error}")


def read_gpus_apart() -> GpuReport:
    """The same by a process of its own, so that a driver that is stuck is a ``reason``, and hangs nobody here."""
    with Apart("kvbaton.doctor.gpus:_told") as process:
        try:
            return msgspec.json.decode(process.answer("the NVIDIA driver", PATIENCE), type=GpuReport)
        except NoAnswer as error:
            return GpuReport(
                reason=f"the NVIDIA driver {error}: if nvidia-smi does not either, it is stuck, and the machine has to"
                " be restarted"
            )


def _told() -> Iterator[str]:
    yield msgspec.json.encode(read_gpus()).decode()


class _Nvml:
    def __init__(self, library: Any) -> None:
        self._library = library

    def read(self) -> GpuReport:
        self._call("nvmlInit_v2")
        try:
            count = ctypes.c_uint()
            self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
            handles = [self._handle(index) for index in range(count.value)]
            gpus = tuple(self._gpu(index, handle) for index, handle in enumerate(handles))
            peers = tuple(
                (a, b, self._between(handles[a], handles[b]))
                for a in range(len(handles)) for b in range(a + 1, len(handles))
            )  # fmt: skip
            reason = "" if gpus else "the NVIDIA driver finds no GPU"
            return GpuReport(gpus, self._text("nvmlSystemGetDriverVersion"), self._cuda(), peers, reason)
        finally:
            with contextlib.suppress(_Refused):
                self._call("nvmlShutdown")

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise _Refused(f"{name} failed ({status})")

    def _handle(self, index: int) -> ctypes.c_void_p:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        return handle

    def _gpu(self, index: int, handle: ctypes.c_void_p) -> Gpu:
        memory = _Memory()
        total = free = None
        with contextlib.suppress(_Refused, AttributeError):
            self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            total, free = int(memory.total), int(memory.free)
        mode, now, next_ = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
        with contextlib.suppress(_Refused, AttributeError):
            self._call("nvmlDeviceGetComputeMode", handle, ctypes.byref(mode))
        with contextlib.suppress(_Refused, AttributeError):  # many models have no MIG
            self._call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(next_))
        return Gpu(
            index, self._text("nvmlDeviceGetName", handle), total, free, self._text("nvmlDeviceGetUUID", handle),
            _COMPUTE_MODES.get(mode.value, str(mode.value)), bool(now.value),
        )  # fmt: skip

    def _between(self, one: ctypes.c_void_p, other: ctypes.c_void_p) -> str:
        if all(self._peer(one, other, what) for what in (_READ, _WRITE)):
            return "nvlink" if self._peer(one, other, _NVLINK) else "pcie"
        return "none"

    def _peer(self, one: ctypes.c_void_p, other: ctypes.c_void_p, what: int) -> bool:
        status = ctypes.c_uint(1)
        with contextlib.suppress(_Refused, AttributeError):
            self._call("nvmlDeviceGetP2PStatus", one, other, ctypes.c_uint(what), ctypes.byref(status))
            return status.value == 0
        return False

    def _cuda(self) -> str:
        version = ctypes.c_int()
        with contextlib.suppress(_Refused, AttributeError):
            self._call("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(version))
            return _dotted(version.value)
        return ""

    def _text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        with contextlib.suppress(_Refused, AttributeError):
            self._call(name, *arguments, buffer, ctypes.c_uint(_TEXT))
            return buffer.value.decode(errors="replace")
        return ""


def _by_driver(load: Load) -> GpuReport:
    try:
        driver = cuda.Driver(load(cuda.LIBRARY))
    except OSError:
        return GpuReport(reason="no NVIDIA driver")
    try:
        driver.start()
        numbers = range(driver.count())
        gpus = tuple(Gpu(n, driver.name(n), driver.memory(n), None, "", "unknown", False) for n in numbers)
        peers = tuple(
            (a, b, "pcie" if driver.reaches(a, b) else "none") for a in numbers for b in numbers if a < b
        )  # fmt: skip
        reason = "" if gpus else "the CUDA driver finds no GPU"
        return GpuReport(gpus, "", _dotted(driver.version()), peers, reason)
    except cuda.DriverError as error:
        return GpuReport(reason=str(error))
    except AttributeError as error:  # what an older one does not have
        return GpuReport(reason=f"the CUDA driver: {error}")


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
