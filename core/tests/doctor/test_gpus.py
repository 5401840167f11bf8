"""GPUs by made-up driver libraries: what they answer comes through pointers, as from the real ones."""

import ctypes

import pytest

from kvbaton.doctor import gpus
from kvbaton.doctor.gpus import read_gpus


class Management:
    """``libnvidia-ml.so.1`` with two GPUs over NVLink, the second one with MIG; ``broken``: these calls fail."""

    def __init__(self, broken=(), count=2, peers=(0, 1, 2)):
        self.broken, self.count, self.peers = broken, count, peers
        self.open = 0

    def __getattr__(self, name):
        def call(*arguments):
            return 999 if name in self.broken else getattr(self, f"_{name}")(*arguments)

        if name.startswith("_"):
            raise AttributeError(name)
        return call

    def _nvmlInit_v2(self):
        self.open += 1
        return 0

    def _nvmlShutdown(self):
        self.open -= 1
        return 0

    def _nvmlDeviceGetCount_v2(self, count):
        count._obj.value = self.count
        return 0

    def _nvmlDeviceGetHandleByIndex_v2(self, index, handle):
        handle._obj.value = index.value + 1
        return 0

    def _nvmlDeviceGetName(self, handle, buffer, size):
        buffer.value = b"NVIDIA H200"
        return 0

    def _nvmlDeviceGetUUID(self, handle, buffer, size):
        buffer.value = b"GPU-%d" % handle.value
        return 0

    def _nvmlDeviceGetMemoryInfo(self, handle, memory):
        memory._obj.total, memory._obj.free = 141 << 30, 140 << 30
        return 0

    def _nvmlDeviceGetComputeMode(self, handle, mode):
        mode._obj.value = 3 if handle.value == 2 else 0
        return 0

    def _nvmlDeviceGetMigMode(self, handle, now, later):
        now._obj.value = handle.value == 2
        return 0

    def _nvmlDeviceGetP2PStatus(self, one, other, what, status):
        status._obj.value = 0 if what.value in self.peers else 4
        return 0

    def _nvmlSystemGetDriverVersion(self, buffer, size):
        buffer.value = b"580.65.06"
        return 0

    def _nvmlSystemGetCudaDriverVersion_v2(self, version):
        version._obj.value = 13000
        return 0


class Cuda:
    """``libcuda.so.1`` with two GPUs that do not reach each other."""

    def __init__(self, status=0):
        self.status = status

    def cuInit(self, flags):
        return self.status

    def cuGetErrorName(self, status, text):
        text._obj.value = b"CUDA_ERROR_NO_DEVICE"
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = 2
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = 12040
        return 0

    def cuDeviceGet(self, handle, index):
        handle._obj.value = index.value
        return 0

    def cuDeviceGetName(self, buffer, size, handle):
        buffer.value = b"A GPU"
        return 0

    def cuDeviceTotalMem_v2(self, total, handle):
        total._obj.value = 1 << 34
        return 0

    def cuDeviceCanAccessPeer(self, can, one, other):
        can._obj.value = 0
        return 0


def loader(**libraries):
    def load(name):
        found = libraries.get("management" if "nvidia-ml" in name else "cuda")
        if found is None:
            raise OSError(name)
        return found

    return load


def test_the_management_library_says_everything():
    library = Management()
    report = read_gpus(loader(management=library))
    assert (report.driver, report.cuda, report.reason) == ("580.65.06", "13.0", "")
    first, second = report.gpus
    assert (first.name, first.memory, first.memory_free) == ("NVIDIA H200", 141 << 30, 140 << 30)
    assert (first.compute_mode, first.mig, second.compute_mode, second.mig) == (
        "default", False, "exclusive process", True
    )  # fmt: skip
    assert report.peers == ((0, 1, "nvlink"),)
    assert library.open == 0


@pytest.mark.parametrize(("peers", "how"), [((0, 1), "pcie"), ((0,), "none"), ((), "none")])
def test_how_two_reach_each_other(peers, how):
    assert read_gpus(loader(management=Management(peers=peers))).peers == ((0, 1, how),)


def test_what_an_older_driver_does_not_know_is_left_out():
    broken = ("nvmlDeviceGetMigMode", "nvmlDeviceGetMemoryInfo", "nvmlSystemGetCudaDriverVersion_v2")
    report = read_gpus(loader(management=Management(broken)))
    assert [(gpu.mig, gpu.memory) for gpu in report.gpus] == [(False, None), (False, None)]
    assert report.cuda == ""


@pytest.mark.parametrize("management", [None, Management(("nvmlInit_v2",)), Management(("nvmlDeviceGetCount_v2",))])
def test_the_cuda_driver_is_asked_where_the_other_is_not_there_or_refuses(management):
    report = read_gpus(loader(management=management, cuda=Cuda()))
    assert [gpu.name for gpu in report.gpus] == ["A GPU", "A GPU"]
    assert (report.cuda, report.peers) == ("12.4", ((0, 1, "none"),))


@pytest.mark.parametrize(
    ("libraries", "reason"),
    [
        ({}, "no NVIDIA driver"),
        ({"cuda": Cuda(100)}, "CUDA's driver: cuInit failed with CUDA_ERROR_NO_DEVICE (100)"),
        ({"cuda": object()}, "the CUDA driver: 'object' object has no attribute 'cuInit'"),
        ({"management": Management(("nvmlInit_v2",))}, "the NVIDIA driver: nvmlInit_v2 failed (999)"),
        ({"management": Management(count=0)}, "the NVIDIA driver finds no GPU"),
    ],
)
def test_why_there_are_none(libraries, reason):
    report = read_gpus(loader(**libraries))
    assert (report.gpus, report.reason) == ((), reason)


def test_a_library_that_is_not_there_is_an_answer_on_this_machine_too():
    report = read_gpus(ctypes.CDLL)
    assert report.gpus or report.reason


def test_a_driver_that_does_not_answer_is_a_reason(monkeypatch):
    monkeypatch.setattr(gpus, "PATIENCE", 0.0)
    report = gpus.read_gpus_apart()
    assert report.gpus == ()
    assert report.reason.startswith("the NVIDIA driver did not answer within 0 s: if nvidia-smi does not either")


def test_another_process_says_what_this_one_would():
    assert gpus.read_gpus_apart() == read_gpus()
