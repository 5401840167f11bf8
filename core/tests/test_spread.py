"""One rule for what many values of one thing come to."""

from __future__ import annotations

import pytest

from kvbaton.spread import NOTHING, Spread


def test_a_percentile_is_a_value_that_was_measured_and_the_median_lies_in_the_middle() -> None:
    spread = Spread.of([float(value) for value in range(100, 0, -1)])
    assert (spread.count, spread.mean, spread.median) == (100, 50.5, 50.5)
    assert (spread.p10, spread.p90, spread.p99, spread.least, spread.most) == (10.0, 90.0, 99.0, 1.0, 100.0)


def test_between_two_values_the_larger_one_is_taken() -> None:
    spread = Spread.of([float(value) for value in range(1, 16)])
    assert (spread.p10, spread.p90, spread.p99) == (2.0, 14.0, 15.0)


def test_of_one_value_everything_is_that_value() -> None:
    assert set(Spread.of([3.0]).as_dict().values()) == {1, 3.0}


def test_nothing_is_said_to_be_nothing_and_never_made_of_values() -> None:
    assert set(NOTHING.as_dict().values()) == {0}
    with pytest.raises(ValueError, match="data point"):
        Spread.of([])


def test_another_unit_leaves_the_count() -> None:
    spread = Spread.of([1.0, 2.0, 4.0])
    assert spread.times(1e3) == Spread.of([1e3, 2e3, 4e3])
