"""CUDA devices on the command line: ``--devices 0,1``."""

from __future__ import annotations

import re

from kvbaton import cuda
from kvbaton.errors import SettingsError


def devices(flag: str, text: str) -> tuple[int, ...]:
    """The numbers in ``text``, which followed ``flag``; at least one.

    Raises :class:`~kvbaton.errors.SettingsError` for anything else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch("[0-9]{1,6}", part) for part in parts):
        raise SettingsError(
            f'{flag} "{text}": write numbers of CUDA devices with commas between, such as 0,1', key="", origin=None
        )
    return tuple(map(int, parts))


def present(flag: str, chosen: tuple[int, ...]) -> None:
    """Raise :class:`~kvbaton.errors.SettingsError` where CUDA's driver is here, and has not all of ``chosen``."""
    library = cuda.library()
    if library is None:
        return
    count = cuda.Driver(library).count()
    if max(chosen, default=0) >= count:
        raise SettingsError(
            f"{flag} {','.join(map(str, chosen))}: there is no CUDA device {max(chosen)}, because this process sees"
            f" {count}, numbered from 0 (nvidia-smi -L; CUDA_VISIBLE_DEVICES may hide others)",
            key="", origin=None,
        )  # fmt: skip
