"""What is run where there is a GPU: nobody sees it here, so that at least its commands are ones that there are."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer

from kvbaton.cli.app import app

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def on_gpu() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_gpu", ROOT / "tools" / "on_gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["on_gpu"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("devices", ["0,0", "0,1"])
def test_every_step_is_a_command_that_there_is(on_gpu: ModuleType, tmp_path: Path, devices: str) -> None:
    cli = typer.main.get_command(app)
    steps = on_gpu.steps(tmp_path, devices)
    assert len({step.name for step in steps}) == len(steps)
    for step in steps:
        first, *rest = step.words
        if first == "kvbaton":
            with cli.make_context("kvbaton", list(rest)) as context:
                name, command, words = cli.resolve_command(context, rest)  # type: ignore[attr-defined]
                command.make_context(name, words, parent=context)  # raises for a flag that it has not
        elif first == "-m":
            assert importlib.util.find_spec(rest[0]) is not None
            assert all(Path(word).exists() for word in rest if word.startswith("/"))
        else:
            assert (ROOT / first).exists()


def test_two_devices_are_told_to_whatever_has_two_ends(on_gpu: ModuleType, tmp_path: Path) -> None:
    one, two = ({step.name: step for step in on_gpu.steps(tmp_path, devices)} for devices in ("0,0", "3,5"))
    assert not [name for name, step in one.items() if "--devices" in step.words]
    told = {name for name, step in two.items() if "3,5" in step.words or "stages.devices=3,5" in step.words}
    kits = {name for name in two if name.startswith("kit-")}
    assert told == {*kits, "exits", "trace", "compare", "p7", "p8"}
    assert kits


def test_a_wrong_name_or_no_gpu_is_said(
    on_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_gpu.main(["--only", "p7,nope"]) == 2
    assert "no such step: nope" in capsys.readouterr().err
    assert on_gpu.main(["--list", "--devices", "1"]) == 2
    assert "--devices 1: two numbers are wanted, as in 0,1" in capsys.readouterr().err
    monkeypatch.setattr(on_gpu, "has_gpu", lambda: False)
    assert on_gpu.main(["--into", str(tmp_path / "out")]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_step_that_fails_or_hangs_is_one_line_and_status_1(
    on_gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [
        on_gpu.Step("fine", ("-c", f"print('well  '); print('{tmp_path}/x.svg')"), 30, alone=True),
        on_gpu.Step("fails", ("-c", "print('why'); raise SystemExit(3)"), 30),
        on_gpu.Step("hangs", ("-c", "import threading; threading.Event().wait()"), 0.5),
    ]
    monkeypatch.setattr(on_gpu, "steps", lambda into, devices: made)
    monkeypatch.setattr(on_gpu, "has_gpu", lambda: True)
    assert on_gpu.main(["--into", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "ok   fine: status 0" in told
    assert "FAIL fails: status 3" in told
    assert "why" in told
    assert "FAIL hangs: not over within" in told
    command, *printed = (tmp_path / "fine.txt").read_text().splitlines()
    assert command.startswith("$ python -c ")
    assert str(tmp_path) not in command
    assert printed == ["well", "x.svg"]  # as a page may show it
