"""What figures need to be read: whose they are, and of which versions."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvbaton.doctor.machine import read_machine

#: What may have a part in a figure, where it is installed.
_DISTRIBUTIONS = ("kvbaton", "numpy", "pyzmq", "nixl", "ucxx-cu13", "ucxx-cu12", "torch")


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory in bytes, the models of the GPUs, and the kernel."""
    found = read_machine()
    return {
        "cpu": found.processor or found.architecture,
        "cores": found.cores_usable,
        "memory_bytes": found.memory,
        "gpus": [gpu.name for gpu in found.gpus],
        "system": f"{platform.system()} {found.kernel}",
    }


def versions() -> dict[str, str]:
    """Of what may have a part in the figures."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
