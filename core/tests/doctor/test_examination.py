"""Transports that work and transports that are broken, each tried between two processes, and what is said of them."""

from functools import partial

import msgspec
import pytest
from datagram_transport import Plugin
from impatience import with_what_hangs

from kvbaton.connector import Advice, Lane
from kvbaton.doctor import examination, trial
from kvbaton.doctor.examination import examine
from kvbaton.doctor.gpus import Gpu
from kvbaton.doctor.machine import read_machine
from kvbaton.doctor.trial import Failure, Measured, Trial, attempt
from kvbaton.doctor.verdict import judge
from kvbaton.errors import OptionsError, PluginNotFound, TransportError
from kvbaton.pair import pair as pair_module
from kvbaton.plugins import PluginRow
from kvbaton.settings import load

pytestmark = pytest.mark.usefixtures("no_child_is_left")

DATAGRAMS = "datagram_transport:plugin"
MACHINE = read_machine()
QUICK = partial(attempt, sizes=(4096, 1 << 17))


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.setattr(pair_module, "GRACE", 0.5)
    monkeypatch.setattr(trial, "CLOSE", 5.0)


def examined(name=DATAGRAMS, attempt=QUICK, **overrides):
    settings, _ = load(overrides={"model": "x", "transport.name": name, **overrides})
    return examine(settings, machine=MACHINE, attempt=attempt)


def only(report):
    (transport,) = report.transports
    return transport


def test_a_transport_that_works_is_fit():
    progress = []
    settings, _ = load(overrides={"model": "x", "transport.name": DATAGRAMS})
    report = examine(
        settings, named="argument", machine=MACHINE, attempt=partial(QUICK, bound=10.0), progress=progress.append
    )
    found = only(report)
    assert (report.exit_status, report.chosen.standing, report.chosen.by) == (0, "fit", "argument")
    assert [(one.nbytes, one.source) for one in found.trial.measured] == [
        (nbytes, source) for source in ("prefill-0", "decode-0") for nbytes in (4096, 1 << 17)
    ]
    assert all(one.seconds > 0 and one.copy_seconds > 0 for one in found.trial.measured)
    assert found.trial.rate == min(one.rate for one in found.trial.measured if one.nbytes == 1 << 17)
    assert found.verdict.summary in report.chosen.text
    assert any("4 KiB from prefill-0 to decode-0" in line for line in progress)


@pytest.mark.parametrize(
    ("fault", "standing", "status", "says"),
    [
        ("open", "unusable", 2, "the library is not what it was"),
        ("hang", "unusable", 2, "prefill-0: its process hangs in sending, in submit"),
        ("corrupt", "unusable", 2, "T3: prefill-0 to decode-0: 1 of 4096 bytes are wrong"),
        ("close", "degraded", 1, "it does not end as it must: "),
        ("slow", "degraded", 1, "times slower than plain copying"),
    ],
)
def test_a_transport_that_is_broken_is_judged_and_its_cause_told(fault, standing, status, says, monkeypatch, tmp_path):
    if fault == "hang":
        with_what_hangs(monkeypatch, tmp_path / "reached")
    quick = {"slow": partial(QUICK, sizes=(4096, 1 << 20)), "hang": partial(QUICK, bound=1.0)}.get(fault, QUICK)
    options = {"fault": fault, "reached": str(tmp_path / "reached")}
    report = examined(attempt=quick, **{"transport.options": options})
    assert (report.chosen.standing, report.exit_status) == (standing, status)
    assert says in report.chosen.text
    assert any(says in finding.text for finding in only(report).verdict.findings)


def test_one_that_raises_in_its_probe_is_unusable(monkeypatch):
    def probe(self, need):
        raise RuntimeError("no such device")

    monkeypatch.setattr(Plugin, "probe", probe)
    report = examined(attempt=None)
    assert (report.chosen.standing, report.exit_status) == ("unusable", 2)
    assert "its probe failed" in report.chosen.text
    assert "no such device" in report.chosen.text
    assert (only(report).reach, only(report).trial) == (None, None)


def test_one_that_works_within_a_process_only_is_tried_there_and_said_so():
    report = examined("loopback")
    assert only(report).reach == "same_process"
    assert (report.chosen.standing, report.chosen.reach) == ("fit", "same_process")
    assert "within one process" in report.chosen.text
    assert only(report).trial.measured


def test_launching_processes_over_it_is_unusable():
    report = examined("loopback", attempt=unwanted, **{"stages.launch": "process"})
    assert (report.chosen.standing, report.exit_status) == ("unusable", 2)
    assert "works only within one process" in report.chosen.text


def unwanted(name, plugin, options, memory, devices, **how):
    """Nothing is measured: what it says does not matter."""
    return Trial(memory, devices)


def test_memory_that_there_is_not_is_unusable():
    settings, _ = load(overrides={"model": "x", "transport.name": DATAGRAMS})
    report = examine(settings, memory="cuda", machine=MACHINE, attempt=unwanted)
    assert (report.chosen.memory, report.exit_status) == ("cuda", 2)


def test_device_memory_is_tried_on_two_devices_where_there_are_two():
    gpus = tuple(Gpu(n, "H200", 1 << 37, 1 << 36, f"GPU-{n}", "default", False) for n in range(2))
    machine = msgspec.structs.replace(MACHINE, gpus=gpus, gpu_peers=((0, 1, "none"),))
    settings, _ = load(overrides={"model": "x", "transport.name": "made_up_devices:plugin"})
    report = examine(settings, memory="cuda", machine=machine, attempt=partial(QUICK, sizes=(4096,)))
    assert (report.chosen.memory, report.chosen.reach) == ("cuda", "cross_process")
    assert only(report).trial.devices == (0, 1)
    assert len(only(report).trial.measured) == 2
    assert only(report).trial.failure is None


def test_devices_are_those_of_the_stages():
    devices = []

    def attempted(name, plugin, options, memory, devices_, **how):
        devices.append((memory, devices_))
        return measured(9e9)

    settings, _ = load(
        overrides={"model": "x", "transport.name": "made_up_devices:plugin", "stages.devices": (3, 2, 1),
                   "stages.prefill": 2}
    )  # fmt: skip
    examine(settings, machine=MACHINE, attempt=attempted)
    assert devices == [("cuda", (3, 1))]


def test_what_is_not_configured_does_not_change_the_status(monkeypatch):
    broken = Plugin()
    broken.probe = lambda need: 1 / 0
    rows = [PluginRow("connector", DATAGRAMS, "mine", "1", True), PluginRow("connector", "broken", "his", "2", False)]
    monkeypatch.setattr(examination, "list_plugins", lambda: rows)
    choose = examination.choose_connector

    def chosen(transport, need, options=None, remedies=None):
        name = getattr(transport, "name", transport)
        if name == "broken":
            return choose(broken, need, options)
        plugin, valid = choose(DATAGRAMS, need, options if isinstance(transport, str) else {})
        plugin.name = DATAGRAMS
        return plugin, valid

    monkeypatch.setattr(examination, "choose_connector", chosen)
    report = examined("auto", attempt=fine)
    assert [(one.name, one.reach) for one in report.transports] == [(DATAGRAMS, "cross_process"), ("broken", None)]
    assert (report.chosen.by, report.exit_status) == ("auto", 0)
    assert "its probe failed" in report.transports[1].reason


def test_a_name_or_an_option_that_is_none_is_an_error():
    with pytest.raises(PluginNotFound):
        examined("nobody")
    with pytest.raises(OptionsError):
        examined(**{"transport.options": {"falt": ""}})


# -- the verdict -------------------------------------------------------------------------------------------------------


def measured(rate, plain=10e9, memory="host", lanes=(), devices=(0, 0)):
    one = Measured(1 << 24, "prefill-0", "decode-0", 3, (1 << 24) / rate, rate, (1 << 24) / plain, plain)
    return Trial(memory, devices, (one,), tuple(lanes))


def fine(name, plugin, options, memory, devices, **how):
    return measured(9e9)


@pytest.mark.parametrize(
    ("memory", "rate", "plain", "standing"),
    [
        ("host", 0.2e9, 10e9, "fit"),
        ("host", 0.05e9, 10e9, "degraded"),
        ("cuda", 16e9, 1000e9, "fit"),
        ("cuda", 0.5e9, 1000e9, "degraded"),
    ],
)
def test_without_advice_only_the_rate_beside_plain_copying_counts(memory, rate, plain, standing):
    verdict = judge("mine", Plugin(), None, measured(rate, plain, memory), MACHINE)
    assert verdict.standing == standing


@pytest.mark.parametrize(("memory", "more"), [("host", ""), ("cuda", " --memory cuda")])
def test_what_looks_closer_looks_at_the_same_memory(memory, more):
    lane = Lane("write", memory, memory, 0, None, "tcp/lo")
    slow = measured(0.05e9, 1000e9, memory, [lane])
    ends = msgspec.structs.replace(slow, closing=("a thread is left",))
    late = msgspec.structs.replace(slow, left_out=(1 << 25,))
    hung = msgspec.structs.replace(slow, failure=Failure("hung", "its process hangs"))
    remedies = [
        finding.remedy
        for trial in (ends, late, hung)
        for finding in judge("mine", Plugin(), None, trial, MACHINE).findings
    ]
    for expected in (
        f"kvbaton lanes mine{more}", f"kvbaton conformance mine{more} -k teardown --partial looks closer",
        f"kvbaton bench mine{more} takes as long", f"kvbaton conformance mine{more} says in which",
    ):  # fmt: skip
        assert any(expected in remedy for remedy in remedies), (expected, remedies)


class Advised(Plugin):
    def __init__(self, advice):
        self.advice = advice


def test_what_the_plugin_advises_is_told_and_counts():
    heard = []

    def advice(options, found):
        heard.append((options, found))
        return [Advice("degraded", "device memory falls to TCP", "cuda_ipc", "set it"), Advice("note", "by the way")]

    lane = Lane("write", "cuda", "cuda", 0, None, "tcp/lo")
    verdict = judge("mine", Advised(advice), "options", measured(0.5e9, 1000e9, "cuda", [lane]), MACHINE)
    assert verdict.standing == "degraded"
    assert [one.level for one in verdict.findings] == ["degraded", "note"]  # and no second word on the rate
    assert verdict.findings[0].sentence() == "device memory falls to TCP; expected cuda_ipc; set it"
    ((options, found),) = heard
    assert (options, found.memory, found.rate, found.lanes) == ("options", "cuda", 0.5e9, (lane,))


NO_ADVICE = {
    "raises": lambda options, found: 1 / 0,
    "none": lambda options, found: None,
    "words": lambda options, found: ["use it"],
    "level": lambda options, found: [Advice("fatal", "stop")],
    "text": lambda options, found: [Advice("degraded", None)],
}


@pytest.mark.parametrize("advice", NO_ADVICE.values(), ids=NO_ADVICE)
def test_advice_that_fails_is_a_note_and_the_rate_counts(advice):
    verdict = judge("mine", Advised(advice), None, measured(9e9), MACHINE)
    assert verdict.standing == "fit"
    assert "could not say what to expect" in verdict.findings[0].text


def test_notes_alone_leave_it_fit():
    verdict = judge("mine", Advised(lambda options, found: [Advice("note", "as meant")]), None, measured(9e9), MACHINE)
    assert verdict.standing == "fit"


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (TransportError("no lane"), "no lane"),
        (OSError("no device"), "OSError: no device"),
        (RuntimeError(), "RuntimeError"),
    ],
)
def test_lanes_that_cannot_be_found_out_are_no_verdict(error, says):
    def sorry(options, kind):
        raise error

    plugin = Plugin()
    plugin.lanes = sorry
    found = attempt(DATAGRAMS, plugin, Plugin.Options(), "host", sizes=(4096,))
    assert found.lanes_reason == says
    assert found.failure is None


@pytest.mark.parametrize("lane", ["tcp", Lane("write", "cuda", "cuda", 0, "more", "tcp/lo"), None])
def test_lanes_that_are_none_are_no_verdict(lane):
    plugin = Plugin()
    plugin.lanes = lambda options, kind: [lane]
    trial = attempt(DATAGRAMS, plugin, Plugin.Options(), "host", sizes=(4096,), bound=2.0)
    assert "Lane" in trial.lanes_reason
    assert trial.lanes == ()
    assert trial.failure is None


@pytest.mark.parametrize(("enough", "measured", "standing"), [(0.0, 1, "degraded"), (60.0, 4, "fit")])
def test_what_took_long_enough_is_left_out_and_said(enough, measured, standing):
    """A rate of the smallest size is no verdict on the transport's."""
    report = examined(attempt=partial(QUICK, enough=enough))
    (one,) = [one for one in report.transports if one.trial is not None]
    assert len(one.trial.measured) == measured
    assert one.trial.left_out == (1 << 17, 4096, 1 << 17)[: 4 - measured]
    assert one.trial.whole is (standing == "fit")
    assert one.verdict.standing == standing
    told = " ".join(finding.sentence() for finding in one.verdict.findings)
    assert ("3 of 4 measurements were not begun, and none of 128 KiB was made" in told) is (standing == "degraded")
