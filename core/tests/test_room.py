"""Whether memory is there is found out, and said, before any is allocated."""

import pytest

from kvbaton import room
from kvbaton.doctor.gpus import Gpu, GpuReport
from kvbaton.errors import SettingsError
from kvbaton.room import Need, check, device_free, host_free

GiB = 1 << 30


@pytest.fixture
def free(monkeypatch):
    def there_is(**figures):
        for name, nbytes in {"host": None, "shm": None, "device": None, **figures}.items():
            monkeypatch.setattr(room, f"{name}_free", lambda *device, nbytes=nbytes: nbytes)

    return there_is


@pytest.mark.parametrize(
    ("need", "there", "says"),
    [
        (
            Need("two ends", host=20 * GiB),
            {"host": 16 * GiB},
            "takes 20 GiB.*free on this host there is 16 GiB",
        ),
        (Need("two ends", shm=GiB), {"shm": 64 << 20}, "/dev/shm there is 64 MiB"),
        (Need("two ends", devices={1: 90 * GiB}), {"device": 80 * GiB}, "CUDA device 1 there is 80 GiB"),
        (Need("two ends", host=GiB), {"host": GiB + 1}, "some is left to others. Nothing was allocated. Less!"),
    ],
)
def test_what_does_not_fit_is_told_with_both_figures(free, need, there, says):
    free(**there)
    with pytest.raises(SettingsError, match=says):
        check(need, "Less!")


def test_what_fits_or_cannot_be_found_out_is_no_error(free):
    free(host=16 * GiB, shm=GiB)
    check(Need("it", host=8 * GiB, shm=GiB // 2, devices={0: 1 << 60}), "")


def test_what_is_not_sparing_may_take_all_that_is_free(free):
    free(host=16 * GiB)
    check(Need("it", host=16 * GiB), "", sparing=False)
    with pytest.raises(
        SettingsError, match=r"it takes 16\.5 GiB, and .* there is 16 GiB\. Nothing was allocated\. Less!"
    ):
        check(Need("it", host=16 * GiB + (GiB >> 1)), "Less!", sparing=False)


def test_a_containers_limit_counts(tmp_path):
    proc = tmp_path / "meminfo"
    proc.write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert host_free(proc, tmp_path) == 4 << 20
    for name, text in {
        "memory.max": "3000000",
        "memory.current": "2000000",
        "memory.stat": "anon 1\ninactive_file 7",
    }.items():
        (tmp_path / name).write_text(text)
    assert host_free(proc, tmp_path) == 1000007
    (tmp_path / "memory.max").write_text("max\n")
    assert host_free(proc, tmp_path) == 4 << 20
    assert host_free(tmp_path / "none", tmp_path / "none") is None


@pytest.mark.parametrize(
    ("visible", "device", "free"),
    [(None, 1, 200), ("1", 0, 200), ("GPU-aaa", 0, 100), ("1,0", 1, 100), ("0", 1, None), (",", 0, None)],
)
def test_a_devices_free_memory_as_this_process_counts(visible, device, free):
    gpus = tuple(
        Gpu(index, "H200", 1 << 40, nbytes, uuid, "default", False)
        for index, (uuid, nbytes) in enumerate([("GPU-aaa-1", 100), ("GPU-bbb-2", 200)])
    )
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert device_free(device, environment, lambda: GpuReport(gpus)) == free


def test_a_device_that_nobody_can_ask_about_is_unknown():
    assert device_free(0, {}, GpuReport) is None
