"""A stage's own device is number 0 of its process, and no other is hidden from it."""

import pytest

from kvbaton import load
from kvbaton.launch.pinning import VISIBLE, pin
from kvbaton.service import _pinned
from kvbaton.stage.worker import stage_specs


@pytest.fixture
def gpus(tmp_path):
    for bus in ("0000:04:00.0", "0000:05:00.0", "0000:06:00.0"):
        (tmp_path / bus).mkdir()
    return tmp_path


@pytest.mark.parametrize(("device", "expected"), [(1, "1,0,2"), (2, "2,0,1")])
def test_the_own_device_comes_first_and_the_others_stay(gpus, device: int, expected: str) -> None:
    assert pin(device, {}, gpus) == ({VISIBLE: expected}, 0)


def test_the_first_device_is_first_already(gpus) -> None:
    assert pin(0, {}, gpus) == ({}, 0)


def test_devices_count_as_the_application_sees_them(gpus) -> None:
    """Its own restriction holds for its stages, by number or by name."""
    assert pin(1, {VISIBLE: "2,0"}, gpus) == ({VISIBLE: "0,2"}, 0)
    assert pin(1, {VISIBLE: "GPU-aa, GPU-bb"}, gpus) == ({VISIBLE: "GPU-bb,GPU-aa"}, 0)


def test_a_device_that_is_not_there_is_left_to_whoever_opens_it(gpus) -> None:
    assert pin(3, {}, gpus) == ({}, 3)
    assert pin(1, {VISIBLE: "2"}, gpus) == ({}, 1)
    assert pin(1, {}, gpus / "nothing") == ({}, 1)


def test_a_stage_of_its_own_process_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "5,6")
    settings, _ = load(overrides={"model": "m", "stages.devices": [1, 0]})
    prefill, decode = map(_pinned, stage_specs(settings, "cross_process", None))
    assert (prefill.environment, prefill.settings["device"]) == ({VISIBLE: "6,5"}, 0)
    assert (decode.environment, decode.settings["device"]) == ({}, 0)


def test_a_stage_without_a_device_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "5,6")
    settings, _ = load(overrides={"model": "m"})
    for spec in stage_specs(settings, "cross_process", None):
        assert _pinned(spec) == spec
