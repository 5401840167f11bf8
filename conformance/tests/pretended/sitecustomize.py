"""Every process that has this folder on its path: device memory is torch's, on the host, and each device is noted.

Into the file ``PRETENDED_LOG``, a line each: what was done, the process, the end, its devices.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from kvbaton.connector import MemoryKind, MemoryRegion
from kvbaton_conformance import device_memory


def note(what: str, name: str, devices: Sequence[int | None]) -> None:
    with Path(os.environ["PRETENDED_LOG"]).open("a") as log:
        log.write(json.dumps([what, os.getpid(), name, devices]) + "\n")


def allocate(id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
    note("allocate", kind, [device])
    return made(id, kind, device, nbytes)


made = device_memory.allocate
device_memory.allocate = allocate
device_memory.DEVICE = "cpu"
