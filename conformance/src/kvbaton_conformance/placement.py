"""Where the memory of each end lies: on the host, or on the CUDA devices that were named, in turn."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.connector import MemoryKind

#: The devices where none are named: one holds both ends.
DEFAULT: tuple[int, ...] = (0,)

#: What one pair of ends is called.
PAIR = ("prefill-0", "decode-0")


def device_of(name: str, devices: Sequence[int]) -> int | None:
    """The device of the end, or stage, ``name``; None: on the host, where all are if there are no ``devices``.

    The order is prefill-0, decode-0, prefill-1, decode-1 and so on, and begins again where it comes to the last device:
    of two, prefill has the first and decode the second, so that every chunk crosses.  An end of another name has its
    turn by the number at its end.
    """
    if not devices:
        return None
    role, _, digits = name.rpartition("-")
    number = int(digits) if digits.isdecimal() else 0
    turn = {"prefill": 2 * number, "decode": 2 * number + 1}.get(role, number)
    return devices[turn % len(devices)]


def stage_devices(prefill: int, decode: int, devices: Sequence[int]) -> list[int | None] | None:
    """``stages.devices`` of so many stages; None: their memory is the host's."""
    names = [f"prefill-{index}" for index in range(prefill)] + [f"decode-{index}" for index in range(decode)]
    return [device_of(name, devices) for name in names] if devices else None


def kind_of(device: int | None) -> MemoryKind:
    """The kind of memory of an end that lies there."""
    return "host" if device is None else "cuda"


def shown(devices: Sequence[int]) -> str:
    """As they are written on a command line."""
    return ",".join(map(str, devices))
