"""What figures need to be read: whose they are, and of which versions."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from kvbaton.doctor.machine import read_machine

#: What may have a part in a figure, where it is installed.
_DISTRIBUTIONS = ("kvbaton", "numpy", "msgspec", "pyzmq", "torch", "nixl", "ucxx-cu13", "ucxx-cu12")


def machine() -> dict[str, Any]:
    """Processor, cores that may be used, memory in bytes, the models of the GPUs, CUDA as their driver has it (empty
    where there is none), and the kernel."""
    found = read_machine()
    return {
        "cpu": found.processor or found.architecture,
        "cores": found.cores_usable,
        "memory_bytes": found.memory,
        "gpus": [gpu.name for gpu in found.gpus],
        "cuda": found.cuda,
        "system": f"{platform.system()} {found.kernel}",
    }


def in_words(machine: Mapping[str, Any]) -> str:
    """What :func:`machine` found, as a line says it: processor, cores, and GPUs where there are any."""
    gpus = [f"{count} x {name}" for name, count in Counter(machine["gpus"]).items()]
    cuda = [f"CUDA {machine['cuda']}"] if gpus and machine["cuda"] else []
    return ", ".join([machine["cpu"], f"{machine['cores']} cores", *gpus, *cuda])


def versions() -> dict[str, str]:
    """Of what may have a part in the figures."""
    found = {"python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
