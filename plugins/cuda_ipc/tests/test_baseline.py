"""What the transports are made of beside kvbaton, as ``kvbaton bench`` sets it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fake_plugin import FakePlugin

from kvbaton.connector import MemoryRegion
from kvbaton.segments import Segments
from kvbaton_cuda_ipc import ipc_baseline
from kvbaton_cuda_ipc.ipc_plugin import IpcOptions


@pytest.mark.parametrize(
    ("transport", "name"),
    [("ucx", "UCX, a message each"), ("fake_plugin:plugin", "its kernel alone")],
    ids=["ucx", "cuda_ipc"],
)
def test_it_moves_the_same_bytes_and_both_are_timed(transport, name):
    program = "from kvbaton.cli import main; main()"
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        [
            sys.executable, "-c", program, "bench", transport, "--part", "transport", "--like", "smollm2-135m",
            "--tokens", "64", "--layout", "layer", "--chunk-bytes", "512KiB", "--seconds", "0.5", "--json",
        ],
        capture_output=True, text=True, timeout=100, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    moved = found["moved"]
    assert found["notes"] == []
    assert (moved["reach"], moved["chunks"]) == ("cross_process", 3)
    assert moved["baseline"]["name"] == name
    assert moved["of_baseline"]["count"] == moved["baseline"]["rate"]["count"] == moved["rate"]["count"]
    assert all(moved[name]["median"] > 0 for name in ("rate", "of_baseline", "of_copy", "submit", "chunk_latency"))


def test_a_kernel_alone_is_not_counted_for_anybody(monkeypatch):
    """Else what kvbaton is compared with pays for what kvbaton adds: a write by the device behind each launch."""
    monkeypatch.setattr(ipc_baseline, "unreachable", lambda *_: "")
    source, target = (
        FakePlugin().baseline(IpcOptions(), [MemoryRegion.of_array(0, np.zeros(4096, np.uint8))]) for _ in range(2)
    )
    source.meet(target.address())
    row = Segments.of([(0, 0, 64)])
    source.prepare_source([(row, row)])
    assert source._mover.counters is None
    source.move()
    source.close()
    target.close()
