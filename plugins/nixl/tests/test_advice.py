"""What NIXL's plugin says of what was found: which way UCX should have taken, and what keeps it from that."""

from dataclasses import replace
from functools import partial

import pytest

from kvbaton.connector import Lane, SelfTest
from kvbaton.doctor.examination import examine
from kvbaton.doctor.trial import attempt
from kvbaton.settings import load
from kvbaton_nixl import plugin
from kvbaton_nixl.options import NixlOptions


def advised(lane, memory="host", ucx=None, note="tcp/lo", **facts):
    lanes = (
        Lane("write", memory, memory, 0, 8184, "tcp/lo", "short"), Lane("write", memory, memory, 8185, None, lane),
        Lane("note", "host", "host", 0, None, note),
    )  # fmt: skip
    found = SelfTest(memory, (0, 1), 0.5e9, 10e9, 1e-4, lanes, **facts)
    return plugin.advice(NixlOptions(ucx=ucx or {}), found)


@pytest.mark.parametrize(
    ("lane", "memory"),
    [("cma/memory", "host"), ("sysv/memory", "host"), ("cuda_ipc/cuda", "cuda"),
     ("50% on cuda_ipc/cuda and 50% on tcp/lo", "cuda"), ("50% on tcp/lo and 50% on cuda_ipc/cuda", "cuda")],
)  # fmt: skip
def test_what_it_should_be_is_no_word_worth(lane, memory):
    assert advised(lane, memory) == []


@pytest.mark.parametrize("memory", ["host", "cuda"])
def test_by_which_way_other_memory_would_be_written_is_no_matter(memory):
    other = {"host": "cuda", "cuda": "host"}[memory]
    lanes = (Lane("write", memory, other, 0, None, "tcp/lo"), Lane("write", other, other, 0, None, "tcp/lo"))
    best = Lane("write", memory, memory, 0, None, "cuda_ipc/cuda" if memory == "cuda" else "cma/memory")
    found = SelfTest(memory, (0, 0), 148.8e9, 953.7e9, 1e-4, (*lanes, best))
    assert plugin.advice(NixlOptions(), found) == []
    assert plugin.advice(NixlOptions(), replace(found, lanes=lanes)) == []
    falls = replace(found, rate=0.5e9, lanes=(*lanes, replace(best, lane="tcp/lo")))
    assert [one.level for one in plugin.advice(NixlOptions(), falls)] == ["degraded"]


def test_a_rate_that_tcp_does_not_carry_is_none_of_tcps():
    """Whatever UCX is understood to have said: what was measured is what happens."""
    lanes = (Lane("write", "cuda", "cuda", 0, None, "tcp/lo"),)
    (advice,) = plugin.advice(NixlOptions(), SelfTest("cuda", (0, 0), 148.8e9, 953.7e9, 1e-4, lanes))
    assert (advice.level, advice.remedy) == ("note", "")
    assert (
        advice.text == "UCX names tcp/lo for device memory, and 148.8 GB/s is more than TCP carries: it is not by that"
    )


def test_without_lanes_it_says_nothing():
    assert plugin.advice(NixlOptions(), SelfTest("host", (0, 0), 1e9, 1e10, 1e-4)) == []


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "--ipc=host"),
        ({"environment": {"UCX_TLS": "tcp"}}, "leaves cuda_copy and cuda_ipc out: unset it, or set tcp,cuda_copy,"),
        ({"environment": {"UCX_TLS": "^cuda_ipc,ib"}}, "or set ^ib"),
        ({"environment": {"UCX_TLS": "all"}, "peer_access": False}, "devices 0 and 1 do not reach"),
        ({"ucx": {"TLS": "tcp,cuda_copy"}, "environment": {"UCX_TLS": "tcp"}}, 'options.ucx, "TLS" is tcp,cuda_copy'),
        ({"ucx": {"TLS": "tcp,cuda"}, "environment": {"UCX_TLS": "tcp"}}, "--ipc=host"),
    ],
)  # fmt: skip
def test_device_memory_that_falls_to_tcp(facts, says):
    (advice,) = advised("tcp/lo", "cuda", **facts)
    assert (advice.level, advice.expected) == ("degraded", "cuda_ipc")
    assert advice.text == "device memory falls to TCP (tcp/lo): 0.5 GB/s"
    assert says in advice.remedy


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"ptrace_scope": 2}, "kernel.yama.ptrace_scope is 2"),
        ({"ptrace_scope": 1}, "--cap-add=SYS_PTRACE"),
        ({"environment": {"UCX_TLS": "tcp,self"}, "ptrace_scope": 3}, "UCX_TLS is tcp,self and leaves cma out"),
    ],
)
def test_host_memory_that_falls_to_tcp(facts, says):
    (advice,) = advised("52% on tcp/lo and 48% on tcp/eth0", **facts)
    assert (advice.level, advice.expected) == ("degraded", "cma")
    assert "host memory falls to TCP (52% on tcp/lo and 48% on tcp/eth0)" in advice.text
    assert says in advice.remedy


def test_a_network_card_between_two_processes_of_one_host():
    (advice,) = advised("rc_mlx5/mlx5_0:1/path0", "cuda")
    assert "goes by a network card" in advice.text


def test_on_this_machine_where_only_tcp_is_allowed():
    options = {"ucx": {"TLS": "tcp"}}
    settings, _ = load(overrides={"model": "x", "transport.name": "nixl", "transport.options": options})
    report = examine(settings, attempt=partial(attempt, sizes=(4096, 1 << 20)))
    assert (report.chosen.standing, report.exit_status) == ("degraded", 1)
    assert "host memory falls to TCP" in report.chosen.text
    assert 'options.ucx, "TLS" is tcp and leaves cma out' in report.chosen.text
    (found,) = report.transports
    assert found.trial.lanes
    assert (found.trial.failure, found.trial.closing) == (None, ())
