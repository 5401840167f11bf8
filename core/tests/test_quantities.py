"""Figures as people read them."""

from kvbaton.quantities import duration, milliseconds, moments, plural, rate, size


def test_sizes_have_three_digits() -> None:
    sizes = (0, 1, 1536, 64 << 20, 1023 << 20, 94.8 * (1 << 30), 5 << 40)
    assert [size(n) for n in sizes] == ["0 B", "1 B", "1.5 KiB", "64 MiB", "1023 MiB", "94.8 GiB", "5 TiB"]


def test_durations_have_the_unit_that_suits_them() -> None:
    assert [duration(s) for s in (0.0, 4.12e-5, 0.0031, 0.0125, 0.25, 1.0, 1.25, 10.0, 48.66)] == [
        "0 ms", "41.2 us", "3.1 ms", "12.5 ms", "250 ms", "1 s", "1.25 s", "10 s", "48.7 s",
    ]  # fmt: skip
    assert [milliseconds(s) for s in (0.0, 4e-5, 0.0125, 1.25)] == ["0", "0.04", "12.5", "1,250"]


def test_marks_of_an_axis_have_one_unit_and_the_digits_of_their_step() -> None:
    marks = {
        (0.5, 5): "0 s, 0.5 s, 1.0 s, 1.5 s, 2.0 s",
        (0.1, 11): "0 s, 0.1 s, 0.2 s, 0.3 s, 0.4 s, 0.5 s, 0.6 s, 0.7 s, 0.8 s, 0.9 s, 1.0 s",
        (2.0, 3): "0 s, 2 s, 4 s",
        (20.0, 4): "0 s, 20 s, 40 s, 60 s",
        (500.0, 3): "0 s, 500 s, 1000 s",
        (0.1, 5): "0 ms, 100 ms, 200 ms, 300 ms, 400 ms",
        (0.02, 3): "0 ms, 20 ms, 40 ms",
        (0.0002, 6): "0 ms, 0.2 ms, 0.4 ms, 0.6 ms, 0.8 ms, 1.0 ms",
        (5e-06, 3): "0 us, 5 us, 10 us",
        (5e-08, 3): "0 us, 0.05 us, 0.10 us",
        (0.0, 1): "0 s",
    }
    assert {key: ", ".join(moments(*key)) for key in marks} == marks


def test_rates_and_counts() -> None:
    assert [rate(r) for r in (8.1e9, 41.8e6, 999.9e9, 1101.2e9)] == [
        "8.1 GB/s", "41.8 MB/s", "999.9 GB/s", "1.10 TB/s",
    ]  # fmt: skip
    assert [plural(n, "chunk") for n in (1, 2)] == ["1 chunk", "2 chunks"]
