"""The bytes of memory regions, on the host or on a CUDA device, for filling them and for looking at what arrived.

torch is imported with the first region of a device, and not at all without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvbaton.connector import MemoryKind, MemoryRegion
from kvbaton.errors import CapabilityError

Values: TypeAlias = npt.NDArray[np.uint8]


def allocate(id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
    """New memory, zeroed and touched: none of its pages is made while something is timed."""
    if kind == "host":
        array = np.empty(nbytes, np.uint8)
        array.fill(0)
        return MemoryRegion.of_array(id, array)
    torch = _torch()
    tensor = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    return MemoryRegion(id, kind, device, tensor.data_ptr(), nbytes, tensor)


@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` rows of ``width`` bytes each, one behind the other from ``base`` on."""

    base: int
    count: int
    width: int


class Bytes:
    """One region's memory, by rows of which each has one value."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region
        self._all: Any = region.view() if region.kind == "host" else _torch().as_tensor(_Exposed(region))

    def fill(self, rows: Rows, which: Sequence[int] | npt.NDArray[Any], values: Values) -> None:
        """Row ``which[i]`` is all ``values[i]`` once this returns."""
        cells, column = self._pair(rows, values)
        cells[which] = column
        self._settle()

    def wrong(self, rows: Rows, which: Sequence[int] | npt.NDArray[Any], values: Values) -> int:
        """How many bytes are not what :meth:`fill` would have made them."""
        cells, column = self._pair(rows, values)
        # row by row on the host: a copy of all of them would take the memory a second time
        if self._region.kind == "host":
            return sum(rows.width - int(np.count_nonzero(cells[at] == v)) for at, v in zip(which, values, strict=True))
        return int((cells[which] != column).sum())

    def _pair(self, rows: Rows, values: Values) -> tuple[Any, Any]:
        cells = self._all[rows.base : rows.base + rows.count * rows.width].reshape(rows.count, rows.width)
        if self._region.kind == "host":
            return cells, values[:, None]
        return cells, _torch().from_numpy(values).to(cells.device)[:, None]

    def _settle(self) -> None:
        if self._region.kind == "cuda":
            _torch().cuda.synchronize(self._region.device)


class _Exposed:
    """A device region in the form that torch reads; whoever reads it keeps the region alive."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (region.length,), "typestr": "|u1", "data": (region.address, False), "version": 3
        }  # fmt: skip


def _torch() -> Any:
    try:
        import torch
    except ImportError as error:
        raise CapabilityError(
            f"device memory is allocated through torch, which cannot be imported ({error}); pip install torch",
            capability="memory_kinds",
        ) from error
    return torch
