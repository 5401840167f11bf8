"""Which ways UCX chose: what it says is read, and is what happens."""

import subprocess
import sys

import pytest

from kvbaton.connector import Lane
from kvbaton.errors import TransportError
from kvbaton_nixl import lanes, plugin
from kvbaton_nixl.options import NixlOptions

# what UCX 1.23 printed for two agents on one H200: the tables that matter
ON_DEVICE = """
[1796037887.8] [vm:509  :0]   +--------+--------------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | lanes-source-509 self cfg#1                                     |
[1796037887.8] [vm:509  :0]   | remote memory write by ucp_put* from host memory to cuda/dev[1] |
[1796037887.8] [vm:509  :0]   +--------+--------------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | Range  |    Description     |              Config               |
[1796037887.8] [vm:509  :0]   +--------+--------------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | 0..inf | software emulation | tcp/lo                            |
[1796037887.8] [vm:509  :0]   +--------+--------------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   +--------+-------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | lanes-source-509 intra-node cfg#2                        |
[1796037887.8] [vm:509  :0]   | remote memory write by ucp_put* from host memory to host |
[1796037887.8] [vm:509  :0]   +--------+-------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | Range  | Description |              Config               |
[1796037887.8] [vm:509  :0]   +--------+-------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | 0..inf | zero-copy   | cma/memory                        |
[1796037887.8] [vm:509  :0]   +--------+-------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   +--------+--------------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | lanes-source-509 intra-node cfg#2                               |
[1796037887.8] [vm:509  :0]   | remote memory write by ucp_put* from host memory to cuda/dev[1] |
[1796037887.8] [vm:509  :0]   +--------+--------------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | Range  |    Description     |              Config               |
[1796037887.8] [vm:509  :0]   +--------+--------------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   | 0..inf | software emulation | tcp/lo                            |
[1796037887.8] [vm:509  :0]   +--------+--------------------+-----------------------------------+
[1796037887.8] [vm:509  :0]   +------------+--------------------+---------------+
[1796037887.8] [vm:509  :0]   | lanes-source-509 intra-node cfg#2               |
[1796037887.8] [vm:509  :0]   | active message by ucp_am_send* from host memory |
[1796037887.8] [vm:509  :0]   +------------+--------------------+---------------+
[1796037887.8] [vm:509  :0]   |   Range    |    Description     |    Config     |
[1796037887.8] [vm:509  :0]   +------------+--------------------+---------------+
[1796037887.8] [vm:509  :0]   |          0 | short              | tcp/lo        |
[1796037887.8] [vm:509  :0]   |   1..16515 | zero-copy          | tcp/lo        |
[1796037887.8] [vm:509  :0]   | 16516..inf | multi-frag copy-in | tcp/lo        |
[1796037887.8] [vm:509  :0]   +------------+--------------------+---------------+
[1796037887.8] [vm:509  :0]   +-------------+--------------------+---------------------+
[1796037887.8] [vm:509  :0]   | lanes-source-509 intra-node cfg#2                      |
[1796037887.8] [vm:509  :0]   | active message by ucp_am_send*(multi) from host memory |
[1796037887.8] [vm:509  :0]   +-------------+--------------------+---------------------+
[1796037887.8] [vm:509  :0]   |    Range    |    Description     |       Config        |
[1796037887.8] [vm:509  :0]   +-------------+--------------------+---------------------+
[1796037887.8] [vm:509  :0]   |     0..8184 | short              | tcp/lo              |
[1796037887.8] [vm:509  :0]   | 8185..65528 | zero-copy          | tcp/lo              |
[1796037887.8] [vm:509  :0]   |  65529..inf | multi-frag copy-in | tcp/lo              |
[1796037887.8] [vm:509  :0]   +-------------+--------------------+---------------------+
[1796037887.8] [vm:509  :0]   +--------+-------------+-----------------------------------------------+
[1796037887.8] [vm:509  :0]   | lanes-source-509 intra-node cfg#2                                    |
[1796037887.8] [vm:509  :0]   | remote memory write by ucp_put*(multi) from cuda/GPU0 to cuda/dev[1] |
[1796037887.8] [vm:509  :0]   +--------+-------------+-----------------------------------------------+
[1796037887.8] [vm:509  :0]   | Range  | Description |                    Config                     |
[1796037887.8] [vm:509  :0]   +--------+-------------+-----------------------------------------------+
[1796037887.8] [vm:509  :0]   | 0..inf | zero-copy   | cuda_ipc/cuda                                 |
[1796037887.8] [vm:509  :0]   +--------+-------------+-----------------------------------------------+
"""
#: Where UCX does not know which device it is, and sends several otherwise than one.
WITHOUT_A_NAME = """
[1795989601.176884] [host:1:0]   ucp_worker.c:1997 UCX  INFO  rma_am(tcp/lo)
+-----------+-------------+---------------+
| prefill-0 intra-node cfg#1              |
| remote memory write by ucp_put* from cuda memory to cuda |
+-----------+-------------+---------------+
| Range     | Description | Config        |
+-----------+-------------+---------------+
| 0..inf    | zero-copy   | cuda_ipc/cuda |
+-----------+-------------+---------------+
+-----------+-------------+---------------+
| prefill-0 intra-node cfg#1              |
| remote memory write by ucp_put*(multi) from cuda memory to cuda |
+-----------+-------------+---------------+
| Range     | Description | Config        |
+-----------+-------------+---------------+
| 0..8184   | short       | tcp/lo        |
| 8185..1M  | zero-copy   | cuda_ipc/cuda |
| 1025K..inf | software emulation | 52% on tcp/lo and 48% on tcp/eth0 |
+-----------+-------------+---------------+
+-----------+-------------+---------------+
| prefill-0 intra-node cfg#1              |
| remote memory write by ucp_put*(fast-completion) from cuda memory to cuda |
+-----------+-------------+---------------+
| Range     | Description | Config        |
+-----------+-------------+---------------+
| 0..inf    | copy-in     | tcp/lo        |
+-----------+-------------+---------------+
+-----------+-------------+---------------+
| prefill-0 intra-node cfg#1              |
| active message by ucp_am_send* from cuda/GPU0 |
+-----------+-------------+---------------+
| Range     | Description | Config        |
+-----------+-------------+---------------+
| 0         | short       | tcp/lo        |
+-----------+-------------+---------------+
"""
NOTES = [
    Lane("note", "host", "host", 0, 0, "tcp/lo", "short"),
    Lane("note", "host", "host", 1, 16515, "tcp/lo", "zero-copy"),
    Lane("note", "host", "host", 16516, None, "tcp/lo", "multi-frag copy-in"),
]


def test_tables_are_read():
    assert lanes.read(ON_DEVICE + ON_DEVICE) == [
        Lane("write", "host", "host", 0, None, "cma/memory", "zero-copy"),
        Lane("write", "host", "cuda", 0, None, "tcp/lo", "software emulation"),
        *NOTES,
        Lane("write", "cuda", "cuda", 0, None, "cuda_ipc/cuda", "zero-copy"),
    ]


def test_between_memories_of_two_kinds_nothing_of_ours_goes():
    found = lanes.taken(ON_DEVICE, "cuda")
    assert found == [Lane("write", "cuda", "cuda", 0, None, "cuda_ipc/cuda", "zero-copy"), *NOTES]


def test_what_is_posted_is_one_of_several():
    """How UCX would send one alone is not what happens, whatever comes first."""
    of_several = [
        Lane("write", "cuda", "cuda", 0, 8184, "tcp/lo", "short"),
        Lane("write", "cuda", "cuda", 8185, 1 << 20, "cuda_ipc/cuda", "zero-copy"),
        Lane("write", "cuda", "cuda", 1025 << 10, None, "52% on tcp/lo and 48% on tcp/eth0", "software emulation"),
        Lane("note", "cuda", "host", 0, 0, "tcp/lo", "short"),
    ]
    assert lanes.read(WITHOUT_A_NAME) == lanes.read(WITHOUT_A_NAME * 2) == of_several


def test_where_only_one_alone_is_told_that_is_it():
    alone = WITHOUT_A_NAME[: WITHOUT_A_NAME.index("(multi)")].rpartition("+--")[0]
    assert lanes.read(alone) == [Lane("write", "cuda", "cuda", 0, None, "cuda_ipc/cuda", "zero-copy")]


def test_of_writes_in_words_that_are_not_known_nothing_is_said():
    """Rather than of others, by which no byte goes."""
    with pytest.raises(TransportError, match="did not say by which way from cuda to cuda memory"):
        lanes.taken(ON_DEVICE.replace("from cuda/GPU0", "out of cuda/GPU0"), "cuda")


@pytest.mark.parametrize("text", ["", "nonsense\n| a | b |", "+--+\n| | |\n", "| x | y | z |\n" * 3])
def test_what_is_no_table_is_passed_over(text):
    assert lanes.read(text) == []


def test_a_size_that_cannot_be_read_is_said():
    with pytest.raises(TransportError, match="several"):
        lanes.read(ON_DEVICE.replace("1..16515", "1..several"))


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
