"""What a process holds: threads, child processes, descriptors and sockets, shared-memory objects.

Two snapshots are compared; what is new in the second one was left behind.  What the kit itself holds is told to it by
:func:`own` and left out.
"""

from __future__ import annotations

import contextlib
import gc
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvbaton_conformance import shared_memory

#: Threads of the kit itself are named so.
OWN_THREADS = "kvbaton-conformance"

#: Seconds that what is being let go of may take to be gone.
SETTLE = 2.0

_own_descriptors: set[int] = set()
_own_processes: set[int] = set()


def own(*, descriptor: int | None = None, process: int | None = None) -> None:
    """The kit holds this, not what is judged."""
    if descriptor is not None:
        _own_descriptors.add(descriptor)
    if process is not None:
        _own_processes.add(process)


def disown(*, descriptor: int | None = None, process: int | None = None) -> None:
    """It does not any more."""
    _own_descriptors.discard(-1 if descriptor is None else descriptor)
    _own_processes.discard(-1 if process is None else process)


@dataclass(frozen=True)
class Holdings:
    """What this process held at one moment.

    A line each, a number and a name: one object, however many there are, since what is held while something else is
    counted must not count (T12).
    """

    threads: str
    native: str
    descriptors: str
    children: frozenset[int]
    #: All of the machine's.
    shared_memory: str

    def beyond(self, before: Holdings) -> list[str]:
        """What is here and was not in ``before``, in words."""
        python = {name for _, name in _new(self.threads, before.threads)}
        found = [f"thread {name!r}" for name in sorted(python)]
        if not python:
            found += [f"native thread {name!r}" for _, name in sorted(_new(self.native, before.native))]
        found += [f"descriptor {fd} ({target})" for fd, target in sorted(_new(self.descriptors, before.descriptors))]
        found += [f"child process {pid} ({_command(pid)})" for pid in sorted(self.children - before.children)]
        new = set(self.shared_memory.splitlines()) - set(before.shared_memory.splitlines())
        return found + [f"shared-memory object {name}" for name in shared_memory.of_this_run(new, _own_processes)]


def holdings() -> Holdings:
    """What this process holds now."""
    objects = "\n".join(shared_memory.objects())
    own(descriptor=shared_memory.evidence().descriptor)
    threads = [thread for thread in threading.enumerate() if not thread.name.startswith(OWN_THREADS)]
    own_native = {thread.native_id for thread in threading.enumerate() if thread.name.startswith(OWN_THREADS)}
    return Holdings(
        _lines((thread.ident or 0, thread.name) for thread in threads),
        _lines((tid, name) for tid, name in _native() if tid not in own_native),
        _lines(_descriptors()),
        frozenset(pid for pid in shared_memory.children("self") if pid not in _own_processes),
        objects,
    )


def _lines(rows: Iterable[tuple[int, str]]) -> str:
    return "\n".join(f"{number} {name}" for number, name in rows)


def _new(after: str, before: str) -> Iterator[tuple[int, str]]:
    for line in set(after.split("\n")) - set(before.split("\n")):
        number, _, name = line.partition(" ")
        if number:
            yield int(number), name


def left_behind(before: Holdings) -> list[str]:
    """What has come since ``before`` and does not go within :data:`SETTLE` seconds, in words."""
    found = holdings().beyond(before)
    if not found:
        return []
    gc.collect()
    deadline = time.monotonic() + SETTLE
    while (found := holdings().beyond(before)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def of_the_driver(found: str) -> bool:
    """Whether one of these is a descriptor of a GPU's driver."""
    return found.startswith("descriptor ") and "(/dev/nvidia" in found


def _names(folder: Path) -> list[str]:
    try:
        return [path.name for path in folder.iterdir()]
    except OSError:
        return []


def _native() -> Iterator[tuple[int, str]]:
    for tid in _names(Path("/proc/self/task")):
        with contextlib.suppress(OSError):
            yield int(tid), Path(f"/proc/self/task/{tid}/comm").read_text().strip()


def _descriptors() -> Iterator[tuple[int, str]]:
    for fd in _names(Path("/proc/self/fd")):
        # the descriptor of this very listing is gone by now
        with contextlib.suppress(OSError):
            if int(fd) not in _own_descriptors:
                yield int(fd), str(Path(f"/proc/self/fd/{fd}").readlink())


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "ended"
