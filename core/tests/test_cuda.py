"""What is asked of CUDA's driver, by a made-up library that notes its calls."""

from __future__ import annotations

import pytest

from kvbaton import cuda
from kvbaton.errors import TransportError


class Library:
    """``libcuda.so.1``: notes its calls."""

    def __init__(self, status=0):
        self.status, self.calls = status, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append((name, [getattr(getattr(one, "_obj", one), "value", one) for one in arguments]))
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_OUT_OF_MEMORY"
                return 0
            if name == "cuMemAlloc_v2":
                arguments[0]._obj.value = 0x7000
            return self.status

        return call


def test_the_drivers_calls():
    library = Library()
    driver = cuda.Driver(library)
    driver.enter(1)
    assert driver.allocate(4096) == 0x7000
    driver.write(0x7000, 0x10, 8)
    driver.read(0x10, 0x7000, 8)
    driver.fill(0x7000, 0xEE, 4096)
    driver.copy(0x8000, 0x7000, 16)
    driver.free(0x7000)
    assert [name for name, _ in library.calls] == [
        "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuMemAlloc_v2", "cuMemcpyHtoD_v2",
        "cuCtxSynchronize", "cuMemcpyDtoH_v2", "cuMemsetD8_v2", "cuCtxSynchronize", "cuMemcpyAsync", "cuMemFree_v2",
    ]  # fmt: skip
    assert dict(library.calls)["cuMemcpyAsync"] == [0x8000, 0x7000, 16, None]
    assert dict(library.calls)["cuMemsetD8_v2"] == [0x7000, 0xEE, 4096]


def test_a_context_is_retained_once_however_often_it_is_entered():
    library = Library()
    driver = cuda.Driver(library)
    for device in (0, 1, 0, 1, 1):
        driver.enter(device)
    names = [name for name, _ in library.calls]
    assert names.count("cuDevicePrimaryCtxRetain") == 2
    assert names.count("cuCtxSetCurrent") == 5


def test_a_device_whose_context_was_refused_is_asked_again():
    library = Library(2)
    driver = cuda.Driver(library)
    with pytest.raises(cuda.DriverError):
        driver.enter(0)
    library.status = 0
    driver.enter(0)
    assert library.calls[-1][0] == "cuCtxSetCurrent"


def test_what_the_driver_refuses_is_named():
    with pytest.raises(TransportError, match=r"cuMemAlloc_v2 failed with CUDA_ERROR_OUT_OF_MEMORY \(2\)"):
        cuda.Driver(Library(2)).allocate(1 << 50)
