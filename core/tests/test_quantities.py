"""Figures as people read them."""

from kvbaton.quantities import duration, milliseconds, plural, rate, size


def test_sizes_have_three_digits() -> None:
    sizes = (0, 1, 1536, 64 << 20, 1023 << 20, 94.8 * (1 << 30), 5 << 40)
    assert [size(n) for n in sizes] == ["0 B", "1 B", "1.5 KiB", "64 MiB", "1023 MiB", "94.8 GiB", "5 TiB"]


def test_durations_have_the_unit_that_suits_them() -> None:
    assert [duration(s) for s in (0.0, 4.12e-5, 0.0031, 0.0125, 0.25, 1.0, 1.25, 10.0, 48.66)] == [
        "0 ms", "41.2 us", "3.1 ms", "12.5 ms", "250 ms", "1 s", "1.25 s", "10 s", "48.7 s",
    ]  # fmt: skip
    assert [milliseconds(s) for s in (0.0, 4e-5, 0.0125, 1.25)] == ["0", "0.04", "12.5", "1,250"]


def test_rates_and_counts() -> None:
    assert [rate(r) for r in (8.1e9, 41.8e6, 999.9e9, 1101.2e9)] == [
        "8.1 GB/s", "41.8 MB/s", "999.9 GB/s", "1.10 TB/s",
    ]  # fmt: skip
    assert [plural(n, "chunk") for n in (1, 2)] == ["1 chunk", "2 chunks"]
