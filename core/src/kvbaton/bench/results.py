"""What was measured: times with their spread, and what they need to be read."""

from __future__ import annotations

import math
import os
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

#: What may have a part in a figure, where it is installed.
_DISTRIBUTIONS = ("kvbaton", "numpy", "pyzmq", "nixl", "ucxx-cu13", "ucxx-cu12", "torch")


@dataclass(frozen=True, slots=True)
class Spread:
    """Repetitions of one measurement: how many, their median, and how far they lie apart."""

    count: int
    median: float
    p10: float
    p90: float
    p99: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value.  A percentile is a value that was measured: the nearest one."""
        ordered = sorted(values)

        def at(share: float) -> float:
            return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]

        return cls(
            len(ordered), statistics.median(ordered), at(0.1), at(0.9), at(0.99), ordered[0], ordered[-1]
        )  # fmt: skip

    def times(self, factor: float) -> Spread:
        """The same in another unit."""
        return Spread(self.count, *(getattr(self, name) * factor for name in _FIELDS))

    def as_dict(self, digits: int = 4) -> dict[str, Any]:
        return {"count": self.count} | {name: significant(getattr(self, name), digits) for name in _FIELDS}


_FIELDS = ("median", "p10", "p90", "p99", "least", "most")


def significant(value: float, digits: int = 4) -> float:
    """``value`` with so many digits that mean something."""
    return float(f"{value:.{digits}g}")


def machine() -> dict[str, Any]:
    """Whose figures these are: processor, cores that may be used, memory, and how busy it is now."""
    names = re.findall(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s+(\d+) kB", _text("/proc/meminfo"), re.MULTILINE)
    return {
        "cpu": names[0] if names else platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": int(memory[1]) * 1024 if memory else None,
        "gpus": gpus(),
        "system": f"{platform.system()} {platform.release()}",
        "load": significant(os.getloadavg()[0], 3),
    }


def gpus() -> list[str]:
    """The models of the GPUs that the driver has, without loading anything of it."""
    try:
        folders = sorted(Path("/proc/driver/nvidia/gpus").iterdir())
    except OSError:
        return []
    found = (re.search(r"^Model:\s*(.+)$", _text(folder / "information"), re.MULTILINE) for folder in folders)
    return [match[1] if match else "unknown" for match in found]


def versions() -> dict[str, str]:
    """Of what may have a part in the figures."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
