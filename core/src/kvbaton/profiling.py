"""A profiling session over the stages of a runtime, as whoever asked for it sees it.

    with runtime.profile("profiles", seconds=30) as session:
        ...                                        # requests run meanwhile
    for name, stage in session.stages.items():
        print(name, stage.files or stage.error)    # open them with pstats, or any viewer of cProfile's format

Each stage profiles its engine's thread and writes into the directory on its own host.  A stage that cannot, or that is
gone, says so for itself; the others go on.  No transfer waits for it (C9.2).
"""

from __future__ import annotations

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from kvbaton.bounds import MAX_PROFILE_SECONDS
from kvbaton.errors import ProfilingError, RuntimeClosed, closest
from kvbaton.identity import PeerId

#: What may be asked for: Python's profiler on the engine's thread, and the engine's own.
TOOLS: Final = ("python", "engine")


@dataclass(frozen=True, slots=True)
class StageProfile:
    """What a session came to at one stage: its ``files``, or ``error``, why there are none.

    ``ended`` says when: when it was told, after its seconds, or when the stage ended.
    """

    files: tuple[Path, ...] = ()
    ended: str = ""
    error: str | None = None


#: ``fan_out(method, session, arguments, peers)``: the result of each peer by its name, ``{"error": text}`` where it has
#: none.
FanOut = Callable[[str, str, Mapping[str, Any], Sequence[PeerId]], Mapping[str, Any]]


class Profiling:
    """One session.  Made by :meth:`kvbaton.runtime.PDRuntime.profile`; a context manager that stops it.

    ``session_id`` is of this session alone (C1.5).  ``stages``: by name, what is known of it at each; until it was
    stopped that is whether it began there.  Threading: any thread.
    """

    def __init__(self, fan_out: FanOut, session_id: str, peers: Sequence[PeerId], started: Mapping[str, Any]) -> None:
        self.session_id = session_id
        #: The lives of the stages that take part (C1.4).
        self._peers = peers
        self.stages: Mapping[str, StageProfile] = {peer.name: _read(started.get(peer.name)) for peer in peers}
        self._fan_out = fan_out
        self._lock = threading.Lock()  # guards ``stages`` and ``_settled``
        #: Stages that have said how it ended there.
        self._settled: set[str] = set()

    @classmethod
    def start(
        cls, fan_out: FanOut, lives: Mapping[str, PeerId], directory: str | os.PathLike[str], seconds: float,
        tools: Iterable[str], stages: Iterable[str] | None,
    ) -> Profiling:  # fmt: skip
        """What :meth:`kvbaton.runtime.PDRuntime.profile` does.  ``lives``: the stages there are, by name."""
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_PROFILE_SECONDS:
            raise ProfilingError(
                f"seconds is {seconds!r}; a session lasts more than 0 and at most {MAX_PROFILE_SECONDS:g}"
            )
        where = os.fspath(directory) if isinstance(directory, os.PathLike) else directory
        if not isinstance(where, str) or not where:
            raise ProfilingError(f"directory is {directory!r}; a text or a pathlib.Path is wanted")
        wanted = _names(tools, TOOLS, "profiler")
        chosen = tuple(lives) if stages is None else _names(stages, tuple(lives), "stage")
        session_id = uuid.uuid4().hex
        order = {"directory": str(Path(where).absolute()), "seconds": float(seconds), "tools": list(wanted)}
        peers = [lives[name] for name in chosen]
        return cls(fan_out, session_id, peers, fan_out("profile_start", session_id, order, peers))

    def stop(self) -> Mapping[str, StageProfile]:
        """End the session wherever it runs; what it came to at each stage.

        Idempotent: a stage that has answered is not asked again, and one that has not, within ``deadline.control``, is
        asked again by the next call; what it has written meanwhile is told then.  A stage that did not answer the start
        in time may have begun since, so it is told as well; what failed to begin keeps its first cause (C6.3).  After
        the runtime was closed, which ends every session, nobody can be asked.
        """
        with self._lock:
            asked = [peer for peer in self._peers if peer.name not in self._settled]
        if asked:
            # without the lock: two threads that stop it both ask, and a stage gives both the same answer
            try:
                answers = self._fan_out("profile_stop", self.session_id, {}, asked)
                ended = {peer.name: _read(answers.get(peer.name)) for peer in asked}
            except RuntimeClosed as error:
                ended = {peer.name: StageProfile(error=str(error)) for peer in asked}
            with self._lock:
                known = dict(self.stages)
                for name, profile in ended.items():
                    if profile.error is None:
                        self._settled.add(name)
                        known[name] = profile
                    elif name not in self._settled and known[name].error is None:
                        known[name] = profile
                self.stages = known
        return self.stages

    def __enter__(self) -> Profiling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _names(given: object, known: Sequence[str], what: str) -> tuple[str, ...]:
    """Each once, in order, and every one of them ``known``."""
    there = f"a list of {what}s is wanted, out of {', '.join(known)}"
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        raise ProfilingError(f"{given!r}: {there}")
    names = tuple(given)  # whatever gives them may give them once
    if not names:
        raise ProfilingError(f"none is named: {there}")
    for name in names:
        if name not in known:
            raise ProfilingError(
                f"there is no {what} {name!r}.{closest(str(name), known)} There are {', '.join(known)}"
            )
    return tuple(dict.fromkeys(names))


def _read(answer: object) -> StageProfile:
    """A stage's answer, whatever it is: the one peer's nonsense is not the others' failure."""
    if answer is None:
        return StageProfile(error="the runtime ended before it answered")
    if not isinstance(answer, Mapping):
        return StageProfile(error=f"an answer that is none: {answer!r}")
    error, files, ended = answer.get("error"), answer.get("files", ()), answer.get("ended", "")
    if error is not None or not isinstance(files, list | tuple):
        return StageProfile(error=str(error))
    return StageProfile(tuple(Path(str(file)) for file in files), str(ended))
