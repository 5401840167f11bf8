"""Stages as threads of this process, for tests and for transports that reach no further.

What a join proves here is less than a process's: the entry returned, so no code of the stage's own thread runs any
more; threads that the entry started are only as joined as the entry saw to it.  And a kill is a request: the lifeline
is cut and the channel severed, and the stage ends when it looks.  Nothing can end a thread that never does.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections import deque
from collections.abc import Sequence

from kvbaton.control.inproc import InprocCoordinatorChannels, InprocStageChannel
from kvbaton.errors import ConfigurationError, KvbatonError, LocalProtocolError, StageDied, StartupError
from kvbaton.identity import PeerId
from kvbaton.launch import Entry, StageSpec
from kvbaton.launch.entry import resolve
from kvbaton.launch.exit_status import describe
from kvbaton.launch.lifeline import FlagLifeline


class InprocHandle:
    """A stage on a thread; see :class:`~kvbaton.launch.StageHandle`."""

    def __init__(
        self, launcher: InprocLauncher, spec: StageSpec, entry: Entry, channel: InprocStageChannel, log_lines: int
    ) -> None:
        self._launcher = launcher
        self._spec = spec
        self._entry = entry
        self._channel = channel
        self._peer = channel.peer
        self._status: int | None = None
        self._log: deque[str] = deque(maxlen=log_lines)
        self._lifeline = FlagLifeline()
        self._lifeline.watch(lambda: channel.sever(self._lifeline.cut or ""))
        # a daemon: a stage that hangs must not keep the process from exiting
        self._thread = threading.Thread(target=self._run, name=f"kvbaton-{self._peer.name}", daemon=True)

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def spec(self) -> StageSpec:
        return self._spec

    @property
    def pid(self) -> int:
        return os.getpid()

    @property
    def joined(self) -> bool:
        return self.exit_status() is not None

    def exit_status(self) -> int | None:
        # the status is set by the thread's last statements; only a thread that is over counts as joined
        return None if self._thread.is_alive() else self._status

    def join(self, timeout: float) -> bool:
        self._thread.join(max(timeout, 0.0))
        return not self._thread.is_alive()

    def kill(self) -> None:
        self._lifeline.sever("the launcher wants this stage to end now")

    def log_tail(self) -> list[str]:
        return list(self._log)

    def death(self) -> StageDied | None:
        status = self.exit_status()
        return None if status is None else StageDied(self._peer.name, describe(status), self.log_tail())

    def start(self) -> None:
        """Start the thread; called by the launcher, once."""
        self._thread.start()

    def _run(self) -> None:
        status = 1
        try:
            status = self._entry(self._spec, self._channel, self._lifeline)
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:
            self._log.extend(traceback.format_exc().splitlines())
        finally:
            self._status = status
            self._channel.close()
            self._launcher.report(self)


class InprocLauncher:
    """Starts stages as threads; see :class:`~kvbaton.launch.Launcher`.

    ``patience``: seconds that ``close`` waits for the stages to end once they were told.
    """

    def __init__(self, channels: InprocCoordinatorChannels, *, log_lines: int = 50, patience: float = 10.0) -> None:
        self._channels = channels
        self._log_lines = log_lines
        self._patience = patience
        self._lock = threading.Lock()
        self._running: list[InprocHandle] = []
        self._exited: deque[InprocHandle] = deque()
        self._closed = False

    def start(self, spec: StageSpec) -> InprocHandle:
        if self._closed:
            raise LocalProtocolError(f"the launcher is closed; stage {spec.name} was not started")
        if spec.environment:
            raise StartupError(
                f"stage {spec.name} needs environment variables of its own ({', '.join(spec.environment)}), which a"
                " thread cannot have. Launch stages as processes.",
                stage=spec.name,
            )
        try:
            entry = resolve(spec.entry)
        except ConfigurationError as error:
            raise StartupError(f"stage {spec.name} cannot be started: {error}", stage=spec.name) from error
        peer = PeerId.start(spec.name)
        self._channels.add(peer)
        handle = InprocHandle(self, spec, entry, self._channels.connect(peer), self._log_lines)
        with self._lock:
            self._running.append(handle)
        handle.start()
        return handle

    def exited(self) -> Sequence[InprocHandle]:
        found = []
        # its last statement was to say so, and what remains of the thread takes no time; but where others hold the
        # interpreter, or the process was stopped, that may not have come yet: then it is told with the next call
        while self._exited and self._exited[0].join(1.0):
            found.append(self._exited.popleft())
        if self._exited:
            self._channels.wake()
        return found

    def report(self, handle: InprocHandle) -> None:
        """Called by a stage's thread as the last thing it does."""
        with self._lock:
            self._running.remove(handle)
            self._exited.append(handle)
        self._channels.wake()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with self._lock:
            # one that has said its last word may still be about to leave its thread
            handles = [*self._exited, *self._running]
        for handle in handles:
            handle.kill()
        deadline = time.monotonic() + self._patience
        stuck = [handle for handle in handles if not handle.join(deadline - time.monotonic())]
        if stuck:
            names = ", ".join(str(handle.peer) for handle in stuck)
            raise KvbatonError(
                f"stages {names} did not end within {self._patience} s of being told to; a thread cannot be killed."
                " They end with this process.",
                stages=tuple(handle.peer for handle in stuck),
            )
