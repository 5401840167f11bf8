"""Repeated measurements, with how far they lie apart: what a bench and a report make of many values of one thing."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Spread:
    """Values of one measurement: how many, their mean and median, and how far they lie apart."""

    count: int
    mean: float
    median: float
    p10: float
    p90: float
    p99: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value.  A percentile is a value that was measured: the nearest one.

        Raises ``ValueError`` where there is no value.
        """
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

        return cls(
            len(ordered), statistics.fmean(ordered), statistics.median(ordered), at(0.1), at(0.9), at(0.99),
            ordered[0], ordered[-1],
        )  # fmt: skip

    def times(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.count, *(getattr(self, name) * factor for name in _FIELDS))

    def as_dict(self, digits: int = 4) -> dict[str, Any]:
        return {"count": self.count} | {name: significant(getattr(self, name), digits) for name in _FIELDS}


_FIELDS: Final = ("mean", "median", "p10", "p90", "p99", "least", "most")
#: What there is of something that never happened.
NOTHING: Final = Spread(0, *(0.0 for _ in _FIELDS))


def significant(value: float, digits: int = 4) -> float:
    """``value`` with so many digits that mean something."""
    return float(f"{value:.{digits}g}")
