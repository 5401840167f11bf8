"""Which GPU a stage's process uses when nobody says which: its own.

Every library in a process (the engine, the transport, what they call) takes device 0 of the calling thread unless told
otherwise, and a stray context on another stage's GPU costs it hundreds of megabytes.  So a stage's own device comes
first in what its process sees.  The others stay visible behind it: to map a peer's memory, CUDA must see its device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"

#: One entry for each GPU that the driver has.
_GPUS = Path("/proc/driver/nvidia/gpus")


def pin(device: int, environment: Mapping[str, str], gpus: Path = _GPUS) -> tuple[dict[str, str], int]:
    """What to add to ``environment`` for a process whose device ``device`` is to come first, and its number there.

    ``device`` counts as a process with ``environment`` would.  One that is not there, or that nobody can count, stays
    as it is: whoever opens it says so better.
    """
    if VISIBLE in environment:
        names = [name.strip() for name in environment[VISIBLE].split(",") if name.strip()]
    else:
        names = [str(index) for index in range(_count(gpus))]
    if device == 0 or device >= len(names):
        return {}, device
    first = names.pop(device)
    return {VISIBLE: ",".join([first, *names])}, 0


def _count(gpus: Path) -> int:
    try:
        return sum(1 for _ in gpus.iterdir())
    except OSError:
        return 0
