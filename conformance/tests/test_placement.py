"""Each end lies on its own of the devices that were named: its memory, and what its connector is opened with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.connector import Availability, ConnectorContext, MemoryKind, Need
from kvbaton_conformance import exits
from kvbaton_conformance.exits import Way, end_of
from kvbaton_conformance.mutants.reference import ReferenceConnector, ReferencePlugin
from kvbaton_conformance.placement import device_of, stage_devices
from kvbaton_conformance.subject import Reference, SubjectRefused, resolve
from kvbaton_conformance.suite import topic

pytest.importorskip("torch")

NAMED = "pretended_devices:plugin"
FOLDER = str(Path(__file__).parent / "pretended")

#: What was done, the process, the end, its devices.
Note = tuple[str, int, str, list[int | None]]


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Note]]:
    """What the pretended transport has written down until now, in any process that is started under this."""
    log = tmp_path / "log"
    monkeypatch.setenv("PRETENDED_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([FOLDER, os.environ.get("PYTHONPATH", "")]))
    return lambda: [tuple(json.loads(line)) for line in log.read_text().splitlines()]


def judge(tmp_path: Path, *options: str) -> tuple[int, str]:
    command = [
        sys.executable, "-m", "pytest", "--pyargs", "kvbaton_conformance.run", "-q", "-p", "no:cacheprovider", "-c",
        "/dev/null", "--rootdir", str(tmp_path), "--connector", NAMED, "--conformance-partial", *options,
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    return done.returncode, done.stdout + done.stderr


def devices_by_end(notes: list[Note]) -> dict[tuple[str, str], set[int | None]]:
    found: dict[tuple[str, str], set[int | None]] = {}
    for what, _, name, devices in notes:
        found.setdefault((what, name), set()).update(devices)
    return found


@pytest.mark.parametrize(
    ("devices", "placed"),
    [
        ((), [None] * 5),
        ((3,), [3] * 5),
        ((3, 5), [3, 5, 3, 5, 5]),
        ((3, 5, 6, 7), [3, 5, 6, 7, 5]),
    ],
)
def test_ends_lie_on_the_devices_in_turn(devices: tuple[int, ...], placed: list[int | None]) -> None:
    names = ("prefill-0", "decode-0", "prefill-1", "decode-1", "warm-up-1")
    assert [device_of(name, devices) for name in names] == placed


def test_stages_lie_on_the_devices_in_the_same_turn() -> None:
    assert stage_devices(2, 2, ()) is None
    assert stage_devices(1, 1, (3, 5)) == [3, 5]
    assert stage_devices(2, 2, (3, 5)) == [3, 3, 5, 5]
    assert stage_devices(2, 1, (0, 1, 2)) == [0, 2, 1]


#: Both levels, in one process and in two, and each way in which the kit opens an end.
PART = (
    "test_every_byte_of_a_chunk_arrives or (in-process and"
    " (test_opening_and_closing_leaves_nothing or (test_the_process_exits_silently and not not-closed)))"
    " or test_real_stages_agree_and_balance or test_a_prefix_is_valid_only_after_its_import"
)


def test_each_end_is_on_its_own_device(notes: Callable[[], list[Note]], tmp_path: Path) -> None:
    options = ("--connector-memory", "cuda", "--connector-devices", "3,5", "-k", PART)
    status, output = judge(tmp_path, *options, "--conformance-report", "out")
    assert status == 0, output
    said = "memory: cuda, devices 3,5"
    assert said in output
    assert said in (tmp_path / "out" / "conformance.html").read_text()
    assert said in (tmp_path / "out" / "conformance.json").read_text()
    assert "--connector-memory cuda --connector-devices 3,5" in (tmp_path / "out" / "conformance.json").read_text()
    found = devices_by_end(notes())
    for (_, name), devices in found.items():
        if name.startswith(("prefill", "decode")):
            assert devices == {3 if name.startswith("prefill") else 5}, name
    for what in ("open", "register"):
        assert found[what, "prefill-0"] == {3}
        assert found[what, "decode-0"] == {5}
    assert set.union(*found.values()) == {3, 5}
    alone = []
    for process in {process for _, process, _, _ in notes()}:
        mine = devices_by_end([note for note in notes() if note[1] == process])
        ends = {name for what, name in mine if what == "register" and not name.startswith("warm-up")}
        if len(ends) == 1:
            alone += ends
            assert len(set.union(*mine.values())) == 1  # its process has nothing on the other's device
    assert {"prefill-0", "decode-0"} <= set(alone)


@pytest.mark.parametrize("case", ["data", "live-peer"])
def test_the_ends_of_a_process_that_exits_are_on_theirs(case: str, notes: Callable[[], list[Note]]) -> None:
    way = Way(NAMED, case, "close", memory="cuda", devices=(3, 5))
    assert end_of(way, [FOLDER]) == ""
    found = devices_by_end(notes())
    assert found["register", "prefill-0"] == {3}
    assert found["register", "decode-0"] == {5}


# -- what is asked for and cannot be had -------------------------------------------------------------------------------


class Config(SimpleNamespace):
    """What pytest was told."""

    def getoption(self, name: str) -> object:
        return {"--connector-memory": self.memory, "--connector-devices": self.devices}[name]


NUMBERS = "write numbers of CUDA devices, such as (0, 1)"


@pytest.mark.parametrize(
    ("own", "memory", "devices", "chosen"),
    [
        ({}, "host", None, ()),
        ({}, "cuda", "3,5", (3, 5)),
        ({"connector_memory": "host"}, "host", "3,5", (3, 5)),  # another class's, and of no effect on the host
        ({"connector_memory": "cuda", "connector_devices": (2, 3)}, "cuda", "4", (2, 3)),
        ({"connector_devices": (0, 1)}, "cuda", None, (0, 1)),
        ({}, "host", "0,1", "--connector-devices 0,1: it goes with --connector-memory cuda"),
        ({"connector_devices": (0, 1)}, "host", None, "sets connector_devices, and its memory is the host's"),
        ({"connector_devices": (0, -1)}, "cuda", None, f"Mine sets connector_devices = (0, -1): {NUMBERS}"),
        ({"connector_devices": ()}, "cuda", None, f"Mine sets connector_devices = (): {NUMBERS}"),
    ],
)
def test_a_class_and_the_command_line_name_devices(
    own: dict[str, Any], memory: MemoryKind, devices: str | None, chosen: object
) -> None:
    mine: type[topic.ConnectorSubject] = type("Mine", (topic.ConnectorSubject,), {"connector": "loopback", **own})
    config: Any = Config(memory=memory, devices=devices)
    if isinstance(chosen, tuple):
        assert tuple(mine._devices(config, memory)) == chosen
    else:
        with pytest.raises(SubjectRefused, match=re.escape(str(chosen))):
            mine._devices(config, memory)


def test_what_are_no_numbers_is_a_wrong_use_of_pytest(tmp_path: Path) -> None:
    status, output = judge(tmp_path, "--connector-devices", "0,x")
    assert status == 4, output
    assert '--connector-devices "0,x": write numbers of CUDA devices with commas between, such as 0,1' in output
    assert "Traceback" not in output


class Opened(ReferencePlugin):
    """Says that it moves device memory; keeps the device of each connector."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: list[int | None] = []

    def probe(self, need: Need) -> Availability:
        return Availability(need.memory_kind == "cuda" and need.reach == "same_process", "not so")

    def open(self, options: Any, context: ConnectorContext) -> ReferenceConnector:
        self.devices.append(context.device)
        return super().open(options, context)


def test_a_device_that_is_not_there_is_absent_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    plugin = Opened()
    with pytest.raises(SubjectRefused, match="there is no CUDA device 2 and no 7: torch sees 2") as refused:
        resolve(plugin, {}, Reference(None), "opened", "cuda", (0, 2, 1, 7))
    assert refused.value.unavailable
    assert refused.value.hardware == "a CUDA device"
    assert not plugin.devices
    subject = resolve(plugin, {}, Reference(None), "opened", "cuda", (1, 0))
    assert plugin.devices == [1]
    assert (subject.device("prefill-0"), subject.device("decode-0")) == (1, 0)
    assert "memory: cuda, devices 1,0" in subject.header()[2]


def test_the_command_of_exits_advises_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exits.main(["--transport", "loopback", "--memory", "cuda"])
    assert ended.value.code == 2
    assert "cuda memory is asked for: judge it on host memory (--memory host)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ("0,-1", '--devices "0,-1": write numbers of CUDA devices with commas between, such as 0,1'),
        ("", '--devices "": write numbers of CUDA devices'),
        ("0,1", "--devices 0,1: it goes with --memory cuda"),
    ],
)
def test_the_command_of_exits_says_it_in_one_line(devices: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exits.main(["--transport", "loopback", "--devices", devices])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
