"""A directory that only its owner can enter, made fresh for sockets and checked by everybody who uses it.

Whoever can connect to a control socket can end a run; on one host the file system keeps others out.  The coordinator
makes the directory, each end checks owner and mode before it trusts what is inside.

Who made a directory holds a lock on it, which the system gives back however it ends.  What a killed process left is
removed by its last stages, or by the next one that makes a directory in the same place.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvbaton.errors import ConfigurationError

#: The name carries the process id, so that what a killed process left behind can be recognised.  No more than what
#: mkdtemp makes of it: ``kvbaton-20260412-results`` is somebody's.
NAME: Final = r"kvbaton-(?P<pid>[1-9]\d{0,6})-[a-z0-9_]{8}"
_NAME = re.compile(NAME)
#: Directories that are made before it is given up.
_TRIES: Final = 8


@dataclass(frozen=True, slots=True)
class PrivateDirectory:
    """A directory that :func:`make` has made, and the descriptor of the lock on it.  Owned by the caller."""

    path: Path
    lock: int

    def remove(self) -> None:
        """Remove it with all that is in it, and give the lock back.  Once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def make(base: Path | None) -> PrivateDirectory:
    """A fresh directory with mode 0700 below ``base``, or below the user's runtime or temporary folder.

    ``base`` is made (0700) if it does not exist, in a folder that does; if it does it must be private too.
    Directories of this user's dead processes in the same place are removed.  The caller removes what is returned.
    Raises: ConfigurationError with the reason.
    """
    if base is not None:
        try:
            base.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"the control directory {base} cannot be made: {why_not_made(base, error)}. Set control.dir to a folder"
                " of yours, or unset it.",
                directory=str(base),
            ) from error
        check(base)
        parent = base
    else:
        parent = _default_base()
    _sweep(parent)
    try:
        return locked(parent)
    except OSError as error:
        raise ConfigurationError(
            f"no private directory for control sockets can be made in {parent}: {error}. Set control.dir to a folder"
            " that you can write to.",
            directory=str(parent),
        ) from error


def why_not_made(directory: Path, error: OSError) -> str:
    """Why ``directory`` could not be made: above all that what it is to lie in, mistyped perhaps, is not there."""
    if not directory.parent.is_dir():
        return f"there is no directory {directory.parent}"
    return error.strerror or str(error)


def locked(parent: Path, prefix: str = "") -> PrivateDirectory:
    """A fresh directory (0700) in ``parent``, whose name is ``prefix`` and a :data:`NAME`.  The caller removes it.

    Raises ``OSError``.
    """
    for _ in range(_TRIES):
        made = Path(tempfile.mkdtemp(prefix=f"{prefix}kvbaton-{os.getpid()}-", dir=parent))
        # before it is locked, a container to which our number means nobody may take it for a dead one's
        with contextlib.suppress(FileNotFoundError):
            lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                kept = made.exists()
            except BlockingIOError:
                kept = False
            except OSError:  # a file system without locks: nobody will find the lock free either
                kept = True
            if kept:
                return PrivateDirectory(made, lock)
            os.close(lock)
    raise OSError(errno.ENOENT, "what is made there is removed at once by somebody else")


def remove_abandoned(directory: Path) -> bool:
    """Remove a directory that :func:`make` has made and whose maker is gone; whether it was.  Never raises.

    A maker that lives, in whatever container, holds the lock.  So does a child that it forked, for as long as that
    lives.
    """
    if not _NAME.fullmatch(directory.name):
        return False
    try:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        found = os.fstat(lock)
        if found.st_uid != os.geteuid() or found.st_mode & 0o777 != 0o700:
            return False
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(directory, ignore_errors=True)
        return True
    except OSError:
        return False
    finally:
        os.close(lock)


def _sweep(parent: Path) -> None:
    """Remove what this user's dead processes left here."""
    with contextlib.suppress(OSError), os.scandir(parent) as found:
        for entry in found:
            # one that is just being made is not locked yet, and its maker lives
            named = _NAME.fullmatch(entry.name)
            if named and not _lives(int(named[1])):
                remove_abandoned(Path(entry.path))


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # another user's
        return True
    return True


def check(directory: Path) -> None:
    """Pass if ``directory`` is a directory (no link) that this user owns and nobody else can enter.

    Raises: ConfigurationError that says what is wrong and what to do.
    """
    try:
        status = os.lstat(directory)
    except OSError as error:
        raise ConfigurationError(
            f"the control directory {directory} cannot be looked at: {error}. Is the coordinator running?",
            directory=str(directory),
        ) from error
    if found := _wrong(status):
        raise ConfigurationError(
            f"the control directory {directory} {found}. Control sockets need a directory that is yours alone; nothing"
            " was opened.",
            directory=str(directory),
        )


def wrong(directory: Path) -> str | None:
    """Why ``directory`` is not this user's alone, as the end of a sentence about it; None: it is.  Raises OSError."""
    return _wrong(os.lstat(directory))


def _wrong(found: os.stat_result) -> str | None:
    if not stat.S_ISDIR(found.st_mode):
        return "is not a directory"
    if found.st_uid != os.geteuid():
        return f"belongs to user {found.st_uid}, not to user {os.geteuid()}"
    if found.st_mode & 0o077:
        return f"has mode {stat.S_IMODE(found.st_mode):04o} and can be entered by others (chmod 700 it)"
    return None


def bases() -> tuple[Path, ...]:
    """Where :func:`make` makes one if nobody says, the first that can be used: the user's runtime folder, if the
    environment names one, and the folder for temporary files."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return (*([Path(runtime)] if runtime else []), Path(tempfile.gettempdir()))


def _default_base() -> Path:
    *preferred, last = bases()
    return next((base for base in preferred if base.is_dir() and os.access(base, os.W_OK | os.X_OK)), last)
