"""Which ways UCX chose: what it says is read, and is what happens."""

import subprocess
import sys

import pytest

from kvbaton.connector import Lane
from kvbaton.errors import TransportError
from kvbaton_nixl import lanes, plugin
from kvbaton_nixl.options import NixlOptions

ON_DEVICE = """
[1795989601.176884] [host:1:0]   +-----------+-------------+------------+
[1795989601.176884] [host:1:0]   | prefill-0 self cfg#0                 |
[1795989601.176884] [host:1:0]   | remote memory write by ucp_put* from host memory to host |
[1795989601.176884] [host:1:0]   +-----------+-------------+------------+
[1795989601.176884] [host:1:0]   | Range     | Description | Config     |
[1795989601.176884] [host:1:0]   +-----------+-------------+------------+
[1795989601.176884] [host:1:0]   | 0..inf    | zero-copy   | cma/memory |
[1795989601.176884] [host:1:0]   +-----------+-------------+------------+
[1795989601.176884] [host:1:0]   ucp_worker.c:1997 UCX  INFO  rma_am(tcp/lo)
+-----------+-------------+---------------+
| prefill-0 intra-node cfg#1              |
| remote memory write by ucp_put* from cuda/GPU0 memory to cuda/GPU1 |
+-----------+-------------+---------------+
| Range     | Description | Config        |
+-----------+-------------+---------------+
| 0..8184   | short       | tcp/lo        |
| 8185..1M  | zero-copy   | cuda_ipc/cuda |
| 1025K..inf | software emulation | 52% on tcp/lo and 48% on tcp/eth0 |
+-----------+-------------+---------------+
+-----------+-------------+---------------+
| prefill-0 intra-node cfg#1              |
| remote memory write by ucp_put*(multi) from cuda/GPU0 memory to cuda/GPU1 |
+-----------+-------------+---------------+
| Range     | Description | Config        |
+-----------+-------------+---------------+
| 0..8184   | short       | tcp/lo        |
| 8185..inf | copy-in     | tcp/lo        |
+-----------+-------------+---------------+
"""


def test_tables_are_read():
    assert lanes.read(ON_DEVICE + ON_DEVICE) == [
        Lane("write", "cuda", "cuda", 0, 8184, "tcp/lo", "short"),
        Lane("write", "cuda", "cuda", 8185, 1 << 20, "cuda_ipc/cuda", "zero-copy"),
        Lane("write", "cuda", "cuda", 1025 << 10, None, "52% on tcp/lo and 48% on tcp/eth0", "software emulation"),
        Lane("write (multi)", "cuda", "cuda", 8185, None, "tcp/lo", "copy-in"),
    ]


@pytest.mark.parametrize("text", ["", "nonsense\n| a | b |", "+--+\n| | |\n", "| x | y | z |\n" * 3])
def test_what_is_no_table_is_passed_over(text):
    assert lanes.read(text) == []


def test_a_size_that_cannot_be_read_is_said():
    with pytest.raises(TransportError, match="several"):
        lanes.read(ON_DEVICE.replace("8185..1M", "8185..several"))


def writes(options, nbytes=1 << 20):
    """By which way a write of so many bytes goes."""
    found = plugin.lanes(NixlOptions(**options))
    assert {(lane.source, lane.target) for lane in found} == {("host", "host")}
    assert any(lane.operation == "note" and "tcp/" in lane.lane for lane in found)
    (way,) = [
        lane.lane for lane in found
        if lane.operation == "write" and lane.first <= nbytes and (lane.last is None or nbytes <= lane.last)
    ]  # fmt: skip
    return way


@pytest.mark.clause("T13")
def test_within_a_host_bytes_go_from_memory_to_memory(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)
    assert writes({}) == "cma/memory"


@pytest.mark.clause("T13")
def test_where_only_tcp_is_allowed_that_is_said():
    way = writes({"ucx": {"TLS": "tcp"}})
    assert "tcp/" in way
    assert "cma" not in way


def test_the_environment_counts_as_it_does_for_a_connector(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert "cma" not in writes({})


def test_settings_that_reach_nobody_are_an_error_that_names_them():
    with pytest.raises(TransportError, match=r"no lane.*no-such-transport") as caught:
        plugin.lanes(NixlOptions(ucx={"TLS": "no-such-transport"}))
    assert "Traceback" not in str(caught.value)


def test_a_process_that_says_nothing_is_given_up(monkeypatch):
    """And killed: both children are gone afterwards."""
    started = []
    real = subprocess.Popen

    def popen(command, **how):
        started.append(real([sys.executable, "-c", "import time; time.sleep(60)"], **how))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.setattr(lanes, "BOUND", 0.2)
    with pytest.raises(TransportError, match="said nothing"):
        plugin.lanes(NixlOptions())
    assert [child.returncode for child in started] == [-9, -9]


def test_the_command_shows_them():
    program = "from kvbaton.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program, "lanes", "nixl", "--transport-option", "ucx.TLS=tcp"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert any(line.startswith("write") and "tcp/" in line for line in done.stdout.splitlines())
