"""A folder for what a command writes at its end, tried before it begins: ``--report DIR``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from pathlib import Path

from kvbaton.control.private_directory import why_not_made
from kvbaton.errors import SettingsError


def ready(flag: str, folder: Path, names: Iterable[str]) -> None:
    """Make the folder where it is not there, in one that is; see that a file can be written in it, and remove files of
    these names.

    Raises :class:`~kvbaton.errors.SettingsError`, which names ``flag``.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise refused(flag, folder, "it is not a directory")
        try:
            folder.mkdir(exist_ok=True)
        except FileNotFoundError as error:
            raise refused(flag, folder, why_not_made(folder, error)) from error
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".kvbaton-") as probe:
            probe.write(b"!")
        for name in names:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise refused(flag, folder, error) from error


def refused(flag: str, folder: Path, reason: OSError | str) -> SettingsError:
    """That it cannot be written, and why."""
    said = (reason.strerror or str(reason)) if isinstance(reason, OSError) else reason
    return SettingsError(f"{flag} {folder}: it cannot be written: {said}", key="", origin=None)
