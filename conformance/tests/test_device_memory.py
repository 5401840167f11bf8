"""The kit on device memory, with a device that is only pretended: everything but the hardware."""

import subprocess
import sys

import numpy as np
import pytest

from kvbaton.connector import MemoryRegion
from kvbaton.engine import Role
from kvbaton.segments import Segments
from kvbaton_conformance import device_memory
from kvbaton_conformance.device_memory import window
from kvbaton_conformance.inspector import ByteInspector
from kvbaton_conformance.scripted import ScriptedEngine

torch = pytest.importorskip("torch")


@pytest.fixture
def pretended(monkeypatch):
    """Device memory is torch's, on the host."""
    monkeypatch.setattr(device_memory, "DEVICE", "cpu")


@pytest.fixture
def memory(pretended):
    memory = ByteInspector("decode-0", 1, 0)
    memory.allocate(0, 1000)
    memory.allocate(1, 100)
    return memory


def test_regions_are_of_the_device(memory):
    assert [(region.kind, region.length) for region in memory.regions] == [("cuda", 1000), ("cuda", 100)]


@pytest.mark.clause("T3")
def test_the_inspector_sees_every_byte_of_a_device(memory):
    before = memory.image()
    assert all(byte >= 128 for byte in before.regions[0])
    memory.untouched(before)
    where = Segments.of([(0, 7, 3), (1, 99, 1)])
    memory.write(where, b"abcd")
    assert memory.read(where) == b"abcd"
    with pytest.raises(AssertionError, match=r"T3: memory of decode-0(.|\n)*region 0, bytes 7..10"):
        memory.untouched(before)
    memory.fill()
    assert all(byte < 128 for byte in memory.image().regions[1])


def test_memory_that_a_transport_allocated_is_looked_into(pretended):
    bytes_ = np.zeros(64, np.uint8)
    region = MemoryRegion(3, "cuda", 0, bytes_.ctypes.data, 64, bytes_)
    memory = ByteInspector("decode-0", 1, 0)
    memory.adopt(region)
    assert (bytes_ >= 128).all()
    assert memory.image().regions[3] == bytes_.tobytes()


def test_a_window_is_shared_where_an_array_would_be(pretended):
    region = device_memory.allocate(0, "cuda", 0, 32)
    view = window(region)
    view[8:16][:] = 5
    view[np.array([[0, 1], [2, 3]])] = np.array([[1, 2], [3, 4]], np.uint8)
    assert view[:4].tobytes() == bytes([1, 2, 3, 4])
    assert (view[8:16] != 5).sum() == 0
    assert view[np.array([0, 31])].tolist() == [1, 0]
    assert np.asarray(view).sum() == 10 + 40


def test_what_was_read_of_a_device_is_a_copy(pretended):
    """On a device that is none as on any other: what is kept must not change with the memory."""
    view = window(device_memory.allocate(0, "cuda", 0, 8))
    kept = [view.copy(), np.asarray(view), view[2:4].copy(), view[np.array([1, 2])]]
    view[:] = 9
    assert not any(array.any() for array in kept)


def test_each_device_is_the_one_that_is_asked_for(monkeypatch):
    """Where memory is made, and which device is waited for; whichever is the current one."""
    made, waited = [], []
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device, dtype: made.append(device) or zeros(*size, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    memory = ByteInspector("decode-0", 1, 5)
    monkeypatch.setattr(memory, "adopt", lambda region: region)
    region = memory.allocate(0, 16)
    assert (made, region.kind, region.device) == (["cuda:5"], "cuda", 5)

    class Far:
        is_cuda, device = True, "cuda:5"

    device_memory._settle(Far())
    assert waited == ["cuda:5"]


@pytest.mark.parametrize(
    ("devices", "lacks"), [((0,), ""), ((0, 1), "no CUDA device 1: torch sees 1"), ((4, 4), "no CUDA")]
)
def test_a_device_that_torch_does_not_see_is_named(monkeypatch, devices, lacks):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert lacks in device_memory.absent(devices)
    assert bool(device_memory.absent(devices)) == bool(lacks)


def test_a_scripted_engine_keeps_its_cache_there(pretended):
    engine = ScriptedEngine(Role.DECODE, cuda=0)
    regions = engine.regions(None)
    assert {region.kind for region in regions} == {"cuda"}
    assert not engine.strays()
    engine.memory[5:6] = 0
    assert engine.strays() == [(0, 5)]


PARTS = '''
from dataclasses import replace

import torch

from kvbaton.connector import Availability
from kvbaton_conformance import device_memory
from kvbaton_loopback.connector import LoopbackConnector
from kvbaton_loopback.plugin import CAPABILITIES, LoopbackPlugin

device_memory.DEVICE = "cpu"
torch.set_num_threads(1)  # threads of a device are started with its first use, not with the first large copy

ABLE = replace(CAPABILITIES, memory_kinds=frozenset({"cuda"}), cross_process=True)

class Disguised(LoopbackConnector):
    """Device memory that is not: it is registered as what it is."""
    def __init__(self, peer, options):
        super().__init__(peer, options)
        self.capabilities = ABLE

    def register(self, regions):
        super().register([replace(region, kind="host") for region in regions])

class Pretend(LoopbackPlugin):
    name = "pretend"
    def probe(self, need):
        if need.memory_kind != "cuda" or need.reach != "same_process":
            return Availability(False, "not between processes", "stay in one", ABLE)
        return Availability(True)
    def open(self, options, context):
        assert context.device == 0
        return Disguised(context.peer, options)

plugin = Pretend()
'''


def judge(tmp_path, *options):
    (tmp_path / "pretend.py").write_text(PARTS)
    command = [
        sys.executable, "-m", "pytest", "--pyargs", "kvbaton_conformance.run", "-q", "-p", "no:cacheprovider", "-c",
        "/dev/null", "--rootdir", str(tmp_path), "--conformance-level", "connector", "--conformance-partial", *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_connector_is_judged_on_device_memory(tmp_path):
    status, output = judge(
        tmp_path, "--connector", "pretend:plugin", "--connector-memory", "cuda",
        "-k", "visibility or registration or epochs or test_a_dead_peer",
    )  # fmt: skip
    assert status == 0, output
    assert "modes: in-process; memory: cuda" in output
    assert "absent with cuda memory: cross_process" in output
    assert "not between processes" in output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.parametrize(("options", "status"), [((), 0), (("--require-env",), 1)])
def test_without_a_device_it_is_skipped_and_an_error_where_it_must_be_there(tmp_path, options, status):
    done, output = judge(
        tmp_path, "--connector", "loopback", "--connector-memory", "cuda", "-k", "visibility", *options
    )
    assert done == status, output
    assert "a CUDA device" in output
