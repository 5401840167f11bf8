"""What the plugin ``ucx`` says of what was found."""

from functools import partial

import pytest

from kvbaton.connector import SelfTest
from kvbaton.doctor.examination import examine
from kvbaton.doctor.trial import attempt
from kvbaton.settings import load
from kvbaton_cuda_ipc import ucx_plugin as plugin


def advised(rate, memory="cuda", ucx=None, **facts):
    return plugin.advice(plugin.Options(ucx=ucx or {}), SelfTest(memory, (0, 1), rate, 1000e9, 1e-4, **facts))


def test_host_memory_goes_by_tcp_as_is_meant():
    (advice,) = advised(1e9, "host")
    assert advice.level == "note"
    assert "as is meant" in advice.text


def test_device_memory_that_is_fast_is_no_word_worth():
    assert advised(16e9) == []


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({}, "--ipc=host"),
        (
            {"environment": {"UCX_TLS": "tcp"}},
            "UCX_TLS is tcp and leaves cuda_copy and cuda_ipc out: unset it, or set tcp,cuda_copy,cuda_ipc",
        ),
        (
            {"environment": {"UCX_TLS": "^cuda_ipc"}},
            "^cuda_ipc and leaves cuda_ipc out: unset it, or set all",
        ),
        ({"ucx": {"TLS": "tcp,cuda_ipc"}}, 'options.ucx, "TLS" is tcp,cuda_ipc and leaves cuda_copy out'),
        ({"ucx": {"TLS": "tcp,cuda"}, "environment": {"UCX_TLS": "tcp"}, "peer_access": False}, "devices 0 and 1"),
    ],
)
def test_device_memory_that_is_slow(facts, says):
    (advice,) = advised(0.5e9, **facts)
    assert (advice.level, advice.expected) == ("degraded", "cuda_ipc")
    assert says in advice.remedy


def test_on_this_machine():
    settings, _ = load(overrides={"model": "x", "transport.name": "ucx"})
    report = examine(settings, attempt=partial(attempt, sizes=(4096, 1 << 20)))
    assert (report.chosen.standing, report.exit_status) == ("fit", 0), report.chosen.text
    assert "as is meant" in report.transports[0].verdict.findings[0].text
