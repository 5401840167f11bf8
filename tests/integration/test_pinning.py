"""A runtime starts each stage's process with that stage's device first."""

from __future__ import annotations

import pytest

from kvbaton import PDRuntime, load
from kvbaton.errors import StartupError
from kvbaton.launch import StageSpec
from kvbaton.launch.pinning import VISIBLE
from kvbaton.launch.process import ProcessLauncher


def test_a_runtime_pins_the_processes_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started is what was pinned: seen by the launcher, before any process is."""
    monkeypatch.setenv(VISIBLE, "5,6")
    seen: list[object] = []

    def start(self: ProcessLauncher, spec: StageSpec) -> None:
        seen.append((spec.name, spec.environment, spec.settings["device"]))
        raise StartupError("seen enough", stage=spec.name)

    monkeypatch.setattr(ProcessLauncher, "start", start)
    settings, _ = load(
        overrides={
            "model": "scripted:1", "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
            "transport.name": "kvbaton_conformance.gate_plugin:plugin", "stages.devices": [1, 0],
            "stages.launch": "process",
        }
    )  # fmt: skip
    with pytest.raises(StartupError, match="seen enough"):
        PDRuntime.start(settings)
    assert seen == [("prefill-0", {VISIBLE: "6,5"}, 0)]
