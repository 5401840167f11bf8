"""The calls that this transport adds to core's binding to CUDA's driver, by a made-up library that notes them."""

import ctypes

import pytest

from kvbaton_cuda_ipc.driver import HANDLE_BYTES, Driver, DriverError


class Library:
    """``libcuda.so.1`` with two devices."""

    def __init__(self, status=0):
        self.status, self.calls, self.arguments = status, [], {}

    def status_of(self, name):
        return self.status

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            self.arguments[name] = arguments
            if name == "cuGetErrorName":
                arguments[1]._obj.value = b"CUDA_ERROR_MAP_FAILED"
                return 0
            if name == "cuDeviceGetCount":
                arguments[0]._obj.value = 2
            elif name == "cuDeviceGetUuid_v2":
                ctypes.memset(arguments[0], arguments[1].value + 1, 16)
            elif name == "cuMemHostGetDevicePointer_v2":
                arguments[0]._obj.value = arguments[1].value + 0x100000
            elif name == "cuIpcGetMemHandle":
                ctypes.memset(ctypes.byref(arguments[0]._obj), 5, HANDLE_BYTES)
            elif name == "cuIpcOpenMemHandle_v2":
                assert bytes(arguments[1].reserved) == b"\x05" * HANDLE_BYTES
                arguments[0]._obj.value = 0x7000
            return self.status_of(name)

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


def test_pages_of_the_host_are_written_by_a_device_behind_a_fence():
    library = Library()
    driver = Driver(library)
    assert driver.pin(0x7000, 4096) == 0x107000
    driver.write_behind(3, 0x107040, 1 << 40)
    driver.unpin(0x7000)
    assert library.arguments["cuMemHostRegister_v2"][2].value == 3  # in every context, and where devices see it
    assert library.arguments["cuStreamWriteValue64_v2"] == (3, 0x107040, 1 << 40, 0)  # 0: not without a fence
    assert library.calls[-4:] == [
        "cuMemHostRegister_v2", "cuMemHostGetDevicePointer_v2", "cuStreamWriteValue64_v2", "cuMemHostUnregister"
    ]  # fmt: skip


def test_what_cannot_be_seen_by_a_device_is_not_left_pinned():
    class Half(Library):
        def status_of(self, name):
            return 801 if name == "cuMemHostGetDevicePointer_v2" else 0

    library = Half()
    with pytest.raises(DriverError, match="cuMemHostGetDevicePointer_v2"):
        Driver(library).pin(0x7000, 4096)
    assert library.calls[-1] == "cuMemHostUnregister"


def test_a_driver_that_does_not_write_values_says_so():
    class Old(Library):
        def __getattr__(self, name):
            if name.startswith("cuStreamWriteValue"):
                raise AttributeError(name)
            return super().__getattr__(name)

    with pytest.raises(DriverError, match=r"too old.*11\.7"):
        Driver(Old()).write_behind(3, 0x7000, 1)
