"""Profiling sessions of one stage: begun and ended by generic control (C9.2), bounded in length, one at a time.

What is profiled is the engine's thread, by Python's own profiler, and what the engine offers besides
(:class:`~kvbaton.engine.ProfilingEngine`).  :class:`ProfileSessions` keeps the session on the pump's thread and touches
no transfer; :class:`_Profile` is the engine thread's part, reached by questions to its loop, whose order makes the end
of a session follow its beginning even where the engine was busy meanwhile.
"""

from __future__ import annotations

import cProfile
import errno
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from kvbaton.bounds import MAX_PROFILE_SECONDS
from kvbaton.control import private_directory
from kvbaton.engine import StageEngine
from kvbaton.errors import KvbatonError, ProfilingError
from kvbaton.identity import PeerId
from kvbaton.messages import Call
from kvbaton.profiling import TOOLS

_log = logging.getLogger(__name__)

_SESSION: Final = re.compile(r"[0-9a-f]{32}")

#: Puts a question to the engine's thread; the answer, or the exception in its place, comes back on the pump's.
Ask = Callable[[Callable[[StageEngine], object], Callable[[Any], None]], None]
#: Answers a call with a result, or with an error.
Answer = Callable[[Call, Any, str | None], None]


class ProfileSessions:
    """The sessions of one stage; one is open at most, and of the last one that ended the result is kept.

    Threading: the pump's thread.  Every call is answered once, also where the session ends by itself meanwhile.
    """

    def __init__(self, peer: PeerId, ask: Ask, answer: Answer, clock: Callable[[], float]) -> None:
        self._peer, self._ask, self._answer, self._clock = peer, ask, answer, clock
        self._open: _Session | None = None
        self._last: tuple[str, _Result] | None = None

    def start(self, call: Call) -> None:
        """Begin the session ``call.session_id``: ``directory``, ``seconds`` at most, ``tools``."""
        try:
            directory, seconds, tools = _order(call)
            if self._open is not None:
                left = self._open.by - self._clock()
                raise ProfilingError(
                    f"{self._peer.name} profiles already, in session {self._open.id}, for {max(left, 0.0):.1f} s more"
                )
        except KvbatonError as error:
            self._answer(call, None, f"C9.2: {error}")
            return
        name = f"{self._peer.name}-{self._peer.epoch}-{call.session_id[:8]}"
        session = self._open = _Session(
            call.session_id, self._clock() + seconds, _Profile(directory, name, tools), f"after its {seconds:g} s"
        )
        self._ask(session.profile.start, lambda failure: self._started(call, session, failure))

    def stop(self, call: Call) -> None:
        """End the session ``call.session_id`` and answer with its files; again: the same answer."""
        if self._open is not None and self._open.id == call.session_id:
            self._open.asked.append(call)
            self._finish("when it was told")
        elif self._last is not None and self._last[0] == call.session_id:
            self._say(call, self._last[1])
        else:
            self._answer(call, None, f"C9.2: {self._peer.name} knows no profiling session {call.session_id[:40]!r}")

    def expire(self) -> bool:
        """End the session if its time is up; whether it was."""
        session = self._open
        if session is None or session.ending is not None or self._clock() < session.by:
            return False
        self._finish(session.bound)
        return True

    def end(self) -> None:
        """The stage ends: so does its session, before the engine's thread leaves its loop."""
        if self._open is not None:
            self._finish("when the stage ended")

    def _started(self, call: Call, session: _Session, failure: Exception | None) -> None:
        if failure is None:
            self._answer(call, {"seconds": session.by - self._clock()}, None)
            return
        if self._open is session and session.ending is None:
            self._open = None
        self._answer(call, None, _said(failure))

    def _finish(self, ending: str) -> None:
        session = self._open
        if session is None or session.ending is not None:
            return
        session.ending = ending
        self._ask(session.profile.stop, lambda files: self._ended(session, files))

    def _ended(self, session: _Session, files: Sequence[str] | Exception) -> None:
        if isinstance(files, Exception):
            result = _Result((), "", _said(files))
        else:
            result = _Result(tuple(files), session.ending or "", None)
        _log.info("%s: profiling session %s ended %s: %s", self._peer, session.id, session.ending, result)
        self._open, self._last = None, (session.id, result)
        for call in session.asked:
            self._say(call, result)

    def _say(self, call: Call, result: _Result) -> None:
        self._answer(call, None if result.error else {"files": list(result.files), "ended": result.ended}, result.error)


@dataclass(slots=True, eq=False)
class _Session:
    id: str
    by: float
    profile: _Profile
    bound: str
    #: Why it ends, from when its end was asked for.
    ending: str | None = None
    #: Calls that want its result.
    asked: list[Call] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Result:
    files: tuple[str, ...]
    ended: str
    error: str | None


def _order(call: Call) -> tuple[Path, float, tuple[str, ...]]:
    """What a call asks for, none of it believed before it was looked at (C9.3)."""
    if not _SESSION.fullmatch(call.session_id):
        raise ProfilingError("a profiling session's id is 32 hexadecimal digits")
    given: Mapping[str, Any] = call.arguments
    directory, seconds, tools = given.get("directory"), given.get("seconds"), given.get("tools")
    if not isinstance(directory, str) or not Path(directory).is_absolute() or "\0" in directory:
        raise ProfilingError(f"directory is {directory!r}; give an absolute path on the stage's host")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_PROFILE_SECONDS:
        raise ProfilingError(f"seconds is {seconds!r}; a session lasts more than 0 and at most {MAX_PROFILE_SECONDS:g}")
    if not isinstance(tools, list) or not tools or not set(tools) <= set(TOOLS):
        raise ProfilingError(f"tools is {tools!r}; some of {', '.join(TOOLS)} are wanted")
    return Path(directory), float(seconds), tuple(tools)


def _said(failure: Exception) -> str:
    return str(failure) if isinstance(failure, KvbatonError) else f"{type(failure).__name__}: {failure}"


class _Profile:
    """One session on the engine's thread.  ``start`` gives None or raises; ``stop`` gives the files or raises."""

    def __init__(self, directory: Path, name: str, tools: tuple[str, ...]) -> None:
        self._directory, self._name, self._tools = directory, name, tools
        self._python: cProfile.Profile | None = None
        self._engine = False
        self._failure: Exception | None = None

    def start(self, engine: StageEngine) -> None:
        try:
            self._prepare()
            if "engine" in self._tools:
                begin = getattr(engine, "start_profile", None)
                if begin is None:
                    raise ProfilingError(f"the engine ({type(engine).__name__}) offers no profiler of its own")
                begin(self._directory / self._name)
                self._engine = True
            if "python" in self._tools:
                profile = cProfile.Profile()
                try:
                    profile.enable()
                except ValueError as error:  # from Python 3.12 on a process has one at most
                    raise ProfilingError(f"this process is being profiled already: {error}") from error
                self._python = profile
        except Exception as error:
            self._failure = error
            self._abandon(engine)
            raise

    def stop(self, engine: StageEngine) -> Sequence[str]:
        if self._failure is not None:
            raise self._failure
        files: list[str] = []
        profile, self._python = self._python, None
        try:
            if profile is not None:
                profile.disable()
                path = self._directory / f"{self._name}.prof"
                _write(path, profile)
                files.append(str(path))
        finally:  # whatever became of the one, the other ends, too
            if self._engine:
                self._engine = False
                files += [str(path) for path in engine.stop_profile()]  # type: ignore[attr-defined]
        return files

    def _prepare(self) -> None:
        """A directory of ours alone, in which a file can be made: what fails later has disturbed for nothing."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            wrong = private_directory.wrong(self._directory)
            if wrong is None:
                probe = self._directory / f"{self._name}.probe"
                os.close(_create(probe))
                probe.unlink()
        except OSError as error:
            raise ProfilingError(
                f"the directory {self._directory} cannot be written to:"
                f" {private_directory.why_not_made(self._directory, error)}"
            ) from error
        if wrong is not None:
            raise ProfilingError(
                f"the directory {self._directory} {wrong}; a profile shows what runs here and goes to a directory that"
                " is yours alone"
            )

    def _abandon(self, engine: StageEngine) -> None:
        if self._engine:
            self._engine = False
            for path in engine.stop_profile():  # type: ignore[attr-defined]
                Path(path).unlink(missing_ok=True)


def _write(path: Path, profile: cProfile.Profile) -> None:
    """The whole profile under its name, or nothing (a disk that is full); never over what is there."""
    if os.path.lexists(path):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    part = path.with_name(f"{path.name}.part")
    os.close(_create(part))
    try:
        profile.dump_stats(part)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _create(path: Path) -> int:
    """A new file of ours alone; never one that is there, nor what a link leads to."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
