"""Whether memory that is to be taken is there: found out, and said, before any of it is allocated."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from kvbaton.doctor.gpus import GpuReport, read_gpus
from kvbaton.errors import SettingsError
from kvbaton.quantities import size

#: What is left to everything else: bytes, or the share of what is free, whichever is more.
_KEEP, _KEPT_SHARE = 128 << 20, 0.1


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one thing takes: on the host, in ``/dev/shm``, and on each CUDA device."""

    what: str
    host: int = 0
    shm: int = 0
    devices: Mapping[int, int] | None = None


def check(need: Need, advice: str, *, sparing: bool = True) -> None:
    """Raise :class:`~kvbaton.errors.SettingsError`, with both figures and ``advice``, where it does not fit.

    ``sparing``: something has to be left to others; else only what is more than all that is free does not fit.  What
    cannot be found out is taken to be enough.
    """
    places: list[tuple[str, int, int | None]] = [
        ("memory that is free on this host", need.host, host_free()),
        ("/dev/shm", need.shm, shm_free()),
    ]
    for device, nbytes in (need.devices or {}).items():
        places.append((f"memory that is free on CUDA device {device}", nbytes, device_free(device)))
    for place, wanted, free in places:
        if wanted and free is not None and wanted > free - (max(_KEEP, int(free * _KEPT_SHARE)) if sparing else 0):
            left = ", of which some is left to others" if sparing else ""
            raise SettingsError(
                f"{need.what} takes {size(wanted)}, and of {place} there is {size(free)}{left}. Nothing was allocated."
                f" {advice}",
                key="memory", origin=None,
            )  # fmt: skip


def host_free(proc: Path = Path("/proc/meminfo"), group: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be had without swapping, within the limit of this container where it has one."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(proc), re.MULTILINE)
    free = [int(found[1]) * 1024] if found else []
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        # pages of files are given back on demand
        cached = re.search(r"^inactive_file (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
        free.append(max(int(limit) - int(used) + (int(cached[1]) if cached else 0), 0))
    return min(free) if free else None


def shm_free(folder: str = "/dev/shm") -> int | None:
    """Bytes that ``/dev/shm`` still takes."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def device_free(
    device: int, environment: Mapping[str, str] | None = None, gpus: Callable[[], GpuReport] = read_gpus
) -> int | None:
    """Bytes that are free on the CUDA device of that number, as a process with this environment counts.

    Asked of the management library: a context of our own would take memory, and stay.
    """
    found = gpus().gpus
    visible = (os.environ if environment is None else environment).get("CUDA_VISIBLE_DEVICES")
    names = [name.strip() for name in visible.split(",")] if visible else [str(gpu.index) for gpu in found]
    if device >= len(names) or not names[device]:
        return None  # whoever opens it says so better
    for gpu in found:
        if names[device] == str(gpu.index) or gpu.uuid.startswith(names[device]):
            return gpu.memory_free
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""
