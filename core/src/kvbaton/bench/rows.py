"""The bytes of a region by rows, on the host or on a CUDA device: filled, and looked at once something arrived."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbaton import cuda
from kvbaton.connector import MemoryKind, MemoryRegion

Which: TypeAlias = Sequence[int] | npt.NDArray[Any]
Values: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` rows of ``width`` bytes each, one behind the other from ``base`` on."""

    base: int
    count: int
    width: int


class Bytes:
    """One region's memory, by rows of which each has one value.  Device memory goes through CUDA's driver."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region

    def fill(self, rows: Rows, which: Which, values: Values) -> None:
        """Row ``which[i]`` is all ``values[i]`` once this returns."""
        if self._region.kind == "host":
            self._cells(rows)[which] = values[:, None]
            return
        driver = cuda.require()
        for at, value in zip(which, values, strict=True):
            driver.fill(self._region.address + rows.base + int(at) * rows.width, int(value), rows.width)

    def wrong(self, rows: Rows, which: Which, values: Values) -> int:
        """How many bytes are not what :meth:`fill` would have made them."""
        found = 0
        # row by row: a copy of all of them would take the memory a second time
        for at, value in zip(which, values, strict=True):
            found += rows.width - int(np.count_nonzero(self._row(rows, int(at)) == value))
        return found

    def _cells(self, rows: Rows) -> Values:
        return self._region.view()[rows.base : rows.base + rows.count * rows.width].reshape(rows.count, rows.width)

    def _row(self, rows: Rows, at: int) -> Values:
        if self._region.kind == "host":
            row: Values = self._cells(rows)[at]
            return row
        row = np.empty(rows.width, np.uint8)
        cuda.require().read(row.ctypes.data, self._region.address + rows.base + at * rows.width, rows.width)
        return row


class Allocated:
    """Memory of our own; that of devices is given back by :meth:`free`."""

    def __init__(self) -> None:
        self._on_devices = cuda.Allocations()

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        """Zeroed, and touched: none of its pages is made while something is timed."""
        if kind == "host":
            array = np.empty(nbytes, np.uint8)
            array.fill(0)
            return MemoryRegion.of_array(id, array)
        address = self._on_devices.allocate(device, nbytes)
        cuda.require().fill(address, 0, nbytes)
        return MemoryRegion(id, kind, device, address, nbytes, self)

    def free(self) -> None:
        """Once no transport reaches it any more."""
        self._on_devices.free()
