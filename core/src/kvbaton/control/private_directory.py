"""A directory that only its owner can enter, made fresh for sockets and checked by everybody who uses it.

Whoever can connect to a control socket can end a run; on one host the file system keeps others out.  The coordinator
makes the directory, each end checks owner and mode before it trusts what is inside.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from kvbaton.errors import ConfigurationError


def make(base: Path | None) -> Path:
    """A fresh directory with mode 0700 below ``base``, or below the user's runtime or temporary folder.

    ``base`` is made (0700) if it does not exist; if it does it must be private too.  The caller removes what is
    returned.  The name carries the process id, so that what a killed process left behind can be recognised.
    Raises: ConfigurationError with the reason.
    """
    if base is not None:
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the control directory {base} cannot be made: {error}. Set control.dir to a folder of yours, or unset"
                " it.",
                directory=str(base),
            ) from error
        check(base)
        parent = base
    else:
        parent = _default_base()
    try:
        return Path(tempfile.mkdtemp(prefix=f"kvbaton-{os.getpid()}-", dir=parent))
    except OSError as error:
        raise ConfigurationError(
            f"no private directory for control sockets can be made in {parent}: {error}. Set control.dir to a folder"
            " that you can write to.",
            directory=str(parent),
        ) from error


def check(directory: Path) -> None:
    """Pass if ``directory`` is a directory (no link) that this user owns and nobody else can enter.

    Raises: ConfigurationError that says what is wrong and what to do.
    """
    try:
        found = os.lstat(directory)
    except OSError as error:
        raise ConfigurationError(
            f"the control directory {directory} cannot be looked at: {error}. Is the coordinator running?",
            directory=str(directory),
        ) from error
    wrong = None
    if not stat.S_ISDIR(found.st_mode):
        wrong = "is not a directory"
    elif found.st_uid != os.geteuid():
        wrong = f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    elif found.st_mode & 0o077:
        wrong = f"has mode {stat.S_IMODE(found.st_mode):04o} and can be entered by others (chmod 700 it)"
    if wrong:
        raise ConfigurationError(
            f"the control directory {directory} {wrong}. Control sockets need a directory that is yours alone; nothing"
            " was opened.",
            directory=str(directory),
        )


def _default_base() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir() and os.access(runtime, os.W_OK | os.X_OK):
        return Path(runtime)
    return Path(tempfile.gettempdir())
