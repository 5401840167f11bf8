"""A profiling session over the stages of a runtime, as whoever asked for it sees it.

    with runtime.profile("profiles", seconds=30) as session:
        ...                                        # requests run meanwhile
    for name, stage in session.stages.items():
        print(name, stage.files or stage.error)    # open them with pstats, or any viewer of cProfile's format

Each stage profiles its engine's thread and writes into the directory on its own host.  A stage that cannot, or that is
gone, says so for itself; the others go on.  No transfer waits for it (C9.2).
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
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
        self._stopped = False

    @classmethod
    def start(
        cls, fan_out: FanOut, lives: Mapping[str, PeerId], directory: str | Path, seconds: float,
        tools: Sequence[str], stages: Sequence[str] | None,
    ) -> Profiling:  # fmt: skip
        """What :meth:`kvbaton.runtime.PDRuntime.profile` does.  ``lives``: the stages there are, by name."""
        if not isinstance(seconds, int | float) or not 0 < seconds <= MAX_PROFILE_SECONDS:
            raise ProfilingError(
                f"seconds is {seconds!r}; a session lasts more than 0 and at most {MAX_PROFILE_SECONDS:g}"
            )
        chosen = tuple(lives) if stages is None else stages
        for given, names, what in ((tools, TOOLS, "profiler"), (chosen, tuple(lives), "stage")):
            if isinstance(given, str) or not given:
                raise ProfilingError(f"{given!r}: a list of {what}s is wanted, out of {', '.join(names)}")
            for name in given:
                if name not in names:
                    raise ProfilingError(
                        f"there is no {what} {name!r}.{closest(str(name), names)} There are {', '.join(names)}"
                    )
        session_id = uuid.uuid4().hex
        order = {"directory": str(Path(directory).absolute()), "seconds": float(seconds), "tools": list(tools)}
        peers = [lives[name] for name in dict.fromkeys(chosen)]
        return cls(fan_out, session_id, peers, fan_out("profile_start", session_id, order, peers))

    def stop(self) -> Mapping[str, StageProfile]:
        """End the session wherever it runs; what it came to at each stage.  Idempotent.

        A stage that did not answer the start in time may have begun since, so it is told as well; what failed to begin
        keeps its first cause (C6.3).  After the runtime was closed, which ends every session, nobody can be asked.
        """
        if not self._stopped:
            self._stopped = True
            try:
                answers = self._fan_out("profile_stop", self.session_id, {}, self._peers)
                ended = {name: _read(answers.get(name)) for name in self.stages}
            except RuntimeClosed as error:
                ended = {name: StageProfile(error=str(error)) for name in self.stages}
            self.stages = {
                name: before if before.error is not None and not ended[name].files else ended[name]
                for name, before in self.stages.items()
            }
        return self.stages

    def __enter__(self) -> Profiling:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


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
