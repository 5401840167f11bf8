"""What dead processes of kvbaton left behind, and taking it away.

A process that is killed removes nothing.  What it leaves is found by its name and removed only where its owner is
*proven* dead: the lock that its maker held is free, and the process whose number the name carries is gone (or is a
younger one that got the same number).  Nothing of another user is touched, no link is followed, and what cannot be
proven is kept and said.

===============================  ===========================================  ====================================
name                             what it is                                   proof
===============================  ===========================================  ====================================
``kvbaton-PID-*`` directory      control sockets; the kit's working folder    its lock is free, and PID is gone
``/dev/shm/kvbaton-*-PID-*``     shared memory of a transport of that name    PID is gone, and nobody has it open; in a
                                                                              container with numbers of its own, none
``.kvbaton-PID-*`` directory     keys that were just being made               its lock is free, and PID is gone
what a plugin's ``leftovers``    its own, such as a half converted model      the locks that it names are free
===============================  ===========================================  ====================================

A directory is one of these only where it is as ``mkdtemp`` makes it: eight characters behind the number, mode 0700.
Logs, pairs' shared memory and abstract sockets have no name in any folder, and go with their processes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

import msgspec

from kvbaton.control import private_directory
from kvbaton.doctor.machine import INITIAL_NAMESPACES

#: Directories of one process, which holds a lock on them.  As ``kvbaton-2026-results`` is not.
_DIRECTORY: Final = re.compile(rf"\.?{private_directory.NAME}")
#: Objects in shared memory.
_SHARED: Final = re.compile(r"kvbaton-[a-z][a-z_-]*-(?P<pid>[1-9]\d{0,6})-[\w-]+")
#: Ours by the name, and nobody can say whose.
_UNSAID: Final = re.compile(r"\.?kvbaton-[\w-]+")

Fate = Literal["removed", "would be removed", "kept", "failed"]


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something that a plugin may have left: a file or a folder of its own making.

    ``what`` in a few words.  ``pid``: the process that made it, where that is known; ``locks``: files on which its
    maker holds a lock (``flock``) for as long as it is in use.  At least one of the two, or it is kept.
    """

    path: Path
    what: str
    pid: int | None = None
    locks: tuple[Path, ...] = ()


class Outcome(msgspec.Struct, frozen=True):
    """What became of one thing, and why."""

    path: str
    what: str
    fate: Fate
    why: str
    nbytes: int = 0


@dataclass(frozen=True)
class Places:
    """Where to look.  ``plugins``: what plugins tell of.  A test gives others, and another ``proc``."""

    folders: Sequence[Path] = ()
    shared_memory: Path = Path("/dev/shm")
    keys: Sequence[Path] = ()
    plugins: Callable[[], Iterable[Leftover]] = tuple
    proc: Path = Path("/proc")
    user: int = field(default_factory=os.geteuid)


def clean(places: Places, *, dry_run: bool) -> list[Outcome]:
    """Look everywhere, remove what may be removed; what became of each thing.  Never raises for what it finds."""
    outcomes = []
    for leftover in _found(places):
        outcome = _settle(leftover, places, dry_run=dry_run)
        if outcome is not None:
            outcomes.append(outcome)
    return outcomes


# -- finding -----------------------------------------------------------------------------------------------------------


def _found(places: Places) -> Iterator[Leftover]:
    for folder in places.folders:
        for path in _entries(folder):
            if (named := _DIRECTORY.fullmatch(path.name)) and _private(path):
                yield Leftover(path, "control directory", int(named["pid"]), (path,))
            elif _UNSAID.fullmatch(path.name):
                yield Leftover(path, "folder or file of that name")
    for path in _entries(places.shared_memory):
        if named := _SHARED.fullmatch(path.name):
            yield Leftover(path, "shared memory", int(named["pid"]))
        elif _UNSAID.fullmatch(path.name):
            yield Leftover(path, "shared memory")
    for folder in places.keys:
        for path in _entries(folder):
            if (named := _DIRECTORY.fullmatch(path.name)) and _private(path):
                yield Leftover(path, "keys being made", int(named["pid"]), (path,))
    yield from places.plugins()


def _private(path: Path) -> bool:
    """Whether its mode is that of what we make, where it is a directory."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return False
    return stat.S_ISLNK(mode) or (stat.S_ISDIR(mode) and mode & 0o777 == 0o700)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


# -- proof and removal -------------------------------------------------------------------------------------------------


def _settle(leftover: Leftover, places: Places, *, dry_run: bool) -> Outcome | None:
    """What becomes of it; None for what is gone meanwhile, or is another's: nobody asked about theirs."""
    path = leftover.path
    try:
        status = os.lstat(path)
    except OSError:
        return None
    if status.st_uid != places.user:
        return None

    def outcome(fate: Fate, why: str) -> Outcome:
        return Outcome(str(path), leftover.what, fate, why, nbytes)

    nbytes = 0
    if stat.S_ISLNK(status.st_mode):
        return outcome("kept", "it is a link")
    if not (stat.S_ISDIR(status.st_mode) or stat.S_ISREG(status.st_mode)):
        return outcome("kept", "it is neither a file nor a directory")
    nbytes = _size(path)
    if leftover.pid is None and not leftover.locks:
        return outcome("kept", "its name does not say whose it is: nobody can tell whether that process lives")
    if leftover.pid is not None and (alive := _alive(leftover.pid, status, places)):
        return outcome("kept", alive)
    with ExitStack() as held:
        for lock in leftover.locks:
            if (refused := _locked(lock, held, places.user)) is not None:
                return outcome("kept", refused)
        if not leftover.locks:
            if not _sees_all(places):
                why = "this container sees its own processes only, and those of another may have it open"
                return outcome("kept", f"{why}: remove it from the host")
            if (user := _user_of(status, places)) is not None:
                return outcome("kept", f"process {user} has it open")
        why = (
            f"process {leftover.pid} is gone" if leftover.pid is not None else "nobody holds its lock"
        ) + (", and its lock is free" if leftover.pid is not None and leftover.locks else "")  # fmt: skip
        if dry_run:
            return outcome("would be removed", why)
        if (failed := _removed(path, status)) is not None:
            return outcome("failed", failed)
    return outcome("removed", why)


def _alive(pid: int, made: os.stat_result, places: Places) -> str:
    """Why the process of that number may be the one that made it; empty where it is not."""
    try:
        fields = (places.proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        began = _boot(places) + int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, IndexError):
        return f"process {pid} may live: it cannot be looked at"
    if fields[0] in "ZX":
        return ""  # nothing of it runs any more
    # a clock that was set, and the grain of both: only what is clearly younger did not make it
    if began > made.st_mtime + 2.0 and began > made.st_ctime + 2.0:
        return ""
    return f"process {pid} lives"


def _boot(places: Places) -> float:
    match = re.search(r"^btime (\d+)$", (places.proc / "stat").read_text(errors="replace"), re.MULTILINE)
    if match is None:
        raise ValueError("no btime")
    return float(match[1])


def _locked(path: Path, held: ExitStack, user: int) -> str | None:
    """Take the lock on ``path`` until ``held`` ends; why that cannot be, else None.  One that is not there is free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        return f"its lock cannot be looked at: {error.strerror}"
    held.callback(os.close, descriptor)
    if os.fstat(descriptor).st_uid != user:
        return "its lock belongs to another user"
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "its lock is held: whoever made it lives"
    except OSError as error:
        return f"its lock cannot be tried: {error.strerror}"
    return None


def _sees_all(places: Places) -> bool:
    """Whether ``proc`` has every process of the system, so that a number that is not there is nobody's."""
    try:
        inode = re.search(r"\d+", str((places.proc / "self/ns/pid").readlink()))
    except OSError:
        return True  # a kernel that has one namespace only
    return inode is not None and int(inode[0]) == INITIAL_NAMESPACES["pid"]


def _user_of(status: os.stat_result, places: Places) -> int | None:
    """A process that has the file open or mapped, of those that can be looked at."""
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x} {status.st_ino} "
    for process in _entries(places.proc):
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if device in (process / "maps").read_text(errors="replace"):
                return int(process.name)
        for descriptor in _entries(process / "fd"):
            with contextlib.suppress(OSError):
                found = descriptor.stat()
                if (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino):
                    return int(process.name)
    return None


def _removed(path: Path, looked_at: os.stat_result) -> str | None:
    """Remove exactly what was looked at; why not, else None.  Links inside a directory are removed, not followed."""
    try:
        now = os.lstat(path)
        if (now.st_dev, now.st_ino) != (looked_at.st_dev, looked_at.st_ino):
            return "it was replaced meanwhile"
        if stat.S_ISDIR(now.st_mode):
            shutil.rmtree(path)
        else:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _size(path: Path) -> int:
    total = 0
    with contextlib.suppress(OSError):
        if not path.is_dir():
            return os.lstat(path).st_size
        for folder, _, files in os.walk(path):
            for name in files:
                with contextlib.suppress(OSError):
                    total += os.lstat(Path(folder, name)).st_size
    return total
