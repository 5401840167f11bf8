"""The calls that this transport adds to core's binding to CUDA's driver, by a made-up library that notes them."""

import ctypes

import pytest

from kvbaton_cuda_ipc.driver import HANDLE_BYTES, Driver, DriverError


class Library:
    """``libcuda.so.1`` with two devices."""

    def __init__(self, status=0):
        self.status, self.calls = status, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_MAP_FAILED"
                return 0
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = 2
            elif name == "cuDeviceGetUuid_v2":
                ctypes.memset(arguments[0], arguments[1].value + 1, 16)
            elif name == "cuIpcGetMemHandle":
                ctypes.memset(ctypes.byref(arguments[0]._obj), 5, HANDLE_BYTES)
            elif name == "cuIpcOpenMemHandle_v2":
                assert bytes(arguments[1].reserved) == b"\x05" * HANDLE_BYTES
                arguments[0]._obj.value = 0x7000
            return self.status

        # found again, so that the types that were set on it stay
        self.__dict__[name] = call
        return call


def test_memory_goes_from_one_process_to_another_by_a_handle():
    driver = Driver(Library())
    handle = driver.export(0x1000)
    assert handle == b"\x05" * HANDLE_BYTES
    assert driver.open(handle) == 0x7000
    driver.close(0x7000)


def test_devices_are_known_by_their_uuids_and_entered_as_core_does():
    library = Library()
    driver = Driver(library)
    assert driver.devices() == [b"\x01" * 16, b"\x02" * 16]
    assert driver.reaches(0, 0)
    assert not driver.reaches(0, 1)
    driver.enter(1)
    driver.enter(1)
    assert library.calls.count("cuDevicePrimaryCtxRetain") == 1


def test_a_refusal_has_its_name_also_of_a_copy_that_is_called_directly():
    driver = Driver(Library(205))
    with pytest.raises(DriverError, match=r"cuMemcpyAsync failed with CUDA_ERROR_MAP_FAILED \(205\)"):
        driver.copy(0x8000, 0x7000, 16, 0)
