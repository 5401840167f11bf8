"""Shared-memory objects, and which of a machine's are of this run.

``/dev/shm`` and the System V segments are the machine's: other programs make objects there, and so do other runs of the
kit.  An object is of this run where a process of the run holds it, made it, or was seen to hold it; and what another
process holds now is that one's.

What a process of a run learns it appends to a file without a name, which the first one makes and the others find by the
environment: so it is known of a process that was killed, too.  Python says itself what it makes (an audit hook); what a
native library maps is seen by :func:`notice`, which the kit calls while a connector works and before it is closed.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

#: Where processes of a run find its file.  Not a name of the settings, whose variables begin with KVBATON_.
VARIABLE = "_KVBATON_CONFORMANCE_EVIDENCE"

_FOLDER = "/dev/shm/"

#: Seconds between two looks of :func:`notice_now_and_then`.
_PERIOD = 0.1


class Evidence:
    """What the processes of one run made or held, by the name of the object; ``pid N`` for each that takes part."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.pid = os.getpid()
        self.looked = 0.0
        self._written: set[str] = set()
        self.add(f"pid {self.pid}")

    def add(self, name: str) -> None:
        if name not in self._written:
            self._written.add(name)
            os.write(self.descriptor, name.encode(errors="replace") + b"\n")

    def names(self) -> frozenset[str]:
        """What all of them have said so far."""
        size = os.fstat(self.descriptor).st_size
        return frozenset(os.pread(self.descriptor, size, 0).decode(errors="replace").splitlines())


_evidence: Evidence | None = None
_hooked = False


def evidence() -> Evidence:
    """This run's.  A process that has none begins a run of its own, also where it was forked from one that has."""
    if _evidence is None or _evidence.pid != os.getpid():
        file = os.open(f"/proc/self/fd/{(made := os.memfd_create('kvbaton-conformance'))}", os.O_RDWR | os.O_APPEND)
        os.close(made)
        os.environ[VARIABLE] = f"/proc/{os.getpid()}/fd/{file}"
        return _begin(file)
    return _evidence


def join() -> None:
    """This process was started by a run, and acts for it."""
    path = os.environ.get(VARIABLE, "")
    if (_evidence is None or _evidence.pid != os.getpid()) and path:
        with contextlib.suppress(OSError):  # that run is over, or somebody else's: this is one of its own
            _begin(os.open(path, os.O_RDWR | os.O_APPEND))
    evidence()


def _begin(descriptor: int) -> Evidence:
    global _evidence, _hooked
    _evidence = Evidence(descriptor)
    if not _hooked:
        _hooked = True
        sys.addaudithook(_heard)
    return _evidence


def _heard(event: str, arguments: tuple[object, ...]) -> None:
    """What Python opens to make it, sizes, maps or moves there; it must never raise."""
    if event not in ("open", "os.truncate", "mmap.__new__", "os.rename") or _evidence is None:
        return
    with contextlib.suppress(Exception):
        where = arguments[1] if event == "os.rename" else arguments[0]
        if event == "open" and not int(arguments[2]) & os.O_CREAT:  # type: ignore[call-overload]
            return
        if isinstance(where, int):
            where = Path(f"/proc/self/fd/{where}").readlink() if where >= 0 else ""
        path = os.fsdecode(os.fspath(where))  # type: ignore[call-overload]
        if path.startswith(_FOLDER):
            _evidence.add(path)


def notice() -> None:
    """Remember what this process holds now."""
    known = evidence()
    for name in _held(os.getpid()):
        known.add(name)
    known.looked = time.monotonic()


def notice_now_and_then() -> None:
    """The same, where the last look is some time ago: cheap enough for every poll."""
    if _evidence is not None and time.monotonic() > _evidence.looked + _PERIOD:
        notice()


def objects() -> frozenset[str]:
    """All of this machine."""
    evidence()
    with contextlib.suppress(OSError):
        return frozenset([*(entry.path for entry in os.scandir(_FOLDER)), *_segments()])
    return frozenset(_segments())


def of_this_run(names: Iterable[str], processes: Iterable[int]) -> list[str]:
    """Those that are there and of this run; ``processes``: what it started, beyond its own children."""
    if not (waiting := set(names)):
        return []
    family, known, segments = _tree([os.getpid(), *processes]), evidence().names(), _segments()
    mine = waiting & {name for pid in family for name in _held(pid)}
    # one that another live end has attached goes with that end
    found = {name for name in waiting if name in segments and name in mine}
    unless_held = {
        name for name in waiting - found
        if (
            segments[name] in family or f"pid {segments[name]}" in known
            if name in segments
            else (name in mine or name in known) and Path(name).exists()
        )
    }  # fmt: skip
    if unless_held:  # what others hold is asked of every process there is: only where it decides
        theirs = {name for pid in _numbers("/proc") if pid not in family for name in _held(pid)}
        found |= unless_held - theirs
    return sorted(found)


def _segments() -> dict[str, int]:
    """System V segments: name to the process that made it."""
    found = {}
    with contextlib.suppress(OSError):
        for line in Path("/proc/sysvipc/shm").read_text().splitlines()[1:]:
            columns = line.split()
            found[f"System V segment {columns[1]}"] = int(columns[4])
    return found


def _held(pid: int) -> set[str]:
    """Objects that a process has mapped or open."""
    found = set()
    with contextlib.suppress(OSError):
        maps = Path(f"/proc/{pid}/maps").read_text()
        # most hold none, among hundreds of lines
        for line in maps.splitlines() if _FOLDER in maps or "/SYSV" in maps else ():
            if _FOLDER in line:
                found.add(_FOLDER + line.split(_FOLDER, 1)[1])
            elif "/SYSV" in line:
                found.add(f"System V segment {line.split()[4]}")  # the inode is the segment's id
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if (target := str(entry.readlink())).startswith(_FOLDER):
                    found.add(target)
    return {name for name in found if not name.endswith(" (deleted)")}


def _tree(roots: Iterable[int]) -> set[int]:
    """These processes and all that descend from them."""
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting += children(pid)
    return found


def children(pid: int | str) -> Iterator[int]:
    """The processes that ``pid`` (or ``self``) has started and that are there."""
    for task in _numbers(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError):
            yield from map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())


def _numbers(folder: str) -> list[int]:
    try:
        return [int(entry.name) for entry in Path(folder).iterdir() if entry.name.isdigit()]
    except OSError:
        return []
