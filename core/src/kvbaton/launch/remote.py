"""Stages of other hosts: started by an operator there, expected, told to end and told of here.

Nothing of another host's process can be joined from here, so an end is one of two things:

- *left*: the stage's last word was status 0, which it says once its transfers are drained and its transport is closed.
  That is its own word, as ``Retired`` is, and counts as its end;
- *lost*: its channel went without that word.  Lost is not fenced (C6.4): nothing that it may still write to is freed,
  however long that lasts, unless a transport states a fence.  ``StageHandle.joined`` is False.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from kvbaton.control.zmq import ZmqCoordinatorChannels
from kvbaton.errors import KvbatonError, LocalProtocolError, StageDied, StageLost
from kvbaton.identity import PeerId
from kvbaton.launch import StageSpec


class RemoteHandle:
    """A stage that somebody starts on another host; see :class:`~kvbaton.launch.StageHandle`."""

    def __init__(self, peer: PeerId, spec: StageSpec, launcher: RemoteLauncher) -> None:
        self._peer = peer
        self._spec = spec
        self._launcher = launcher
        self._status: int | None = None
        self._reason = ""
        self._joined = False
        self._over = threading.Event()
        #: the launcher's alone: it was asked to end the stage, and when the stage was told
        self.unwanted = False
        self.told: float | None = None

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def spec(self) -> StageSpec:
        return self._spec

    @property
    def pid(self) -> int:
        """0: it is not a process of this host."""
        return 0

    @property
    def joined(self) -> bool:
        return self._joined

    def exit_status(self) -> int | None:
        return self._status if self._over.is_set() else None

    def join(self, timeout: float) -> bool:
        return self._over.wait(max(timeout, 0.0))

    def kill(self) -> None:
        """Tell it that it has no coordinator any more.  Nobody can do more from here."""
        if not self._over.is_set():
            self.unwanted = True
            self._launcher.wake()

    def log_tail(self) -> list[str]:
        return []

    def death(self) -> StageDied | None:
        if not self._over.is_set():
            return None
        if self._status is not None:
            return StageDied(self._peer.name, f"exit status {self._status}; its log is on its own host")
        return StageLost(self._peer.name, self._reason)

    def conclude(self, status: int | None, reason: str, joined: bool) -> None:
        """Its end as the launcher has seen it."""
        self._status, self._reason, self._joined = status, reason, joined
        self._over.set()


class RemoteLauncher:
    """Expects stages; see :class:`~kvbaton.launch.Launcher`.

    ``patience``: seconds that a stage which was told to end may take before it counts as lost.
    Threading: ``exited`` and ``close`` on the thread that uses the channels.
    """

    def __init__(self, channels: ZmqCoordinatorChannels, *, patience: float) -> None:
        self._channels = channels
        self._patience = patience
        self._running: dict[PeerId, RemoteHandle] = {}
        self._closed = False

    def start(self, spec: StageSpec) -> RemoteHandle:
        """Expect the stage from now on, under a fresh epoch that it is told when it joins."""
        if self._closed:
            raise LocalProtocolError(f"the launcher is closed; stage {spec.name} is not expected")
        peer = PeerId.start(spec.name)
        self._channels.add(peer)
        handle = self._running[peer] = RemoteHandle(peer, spec, self)
        return handle

    def wake(self) -> None:
        """Somebody wants a stage to end."""
        self._channels.wake()

    def exited(self) -> Sequence[RemoteHandle]:
        over: list[RemoteHandle] = []
        for departure in self._channels.departures():
            handle = self._running.get(departure.peer)
            if handle is None:
                continue
            # who was given up is final, whatever it says later (C6.4)
            left = departure.status == 0 and not handle.unwanted
            # one that never said what it is holds nothing of anybody's
            handle.conclude(departure.status, departure.reason, left or not self._channels.introduced(departure.peer))
            over.append(handle)
        now = time.monotonic()
        for handle in self._running.values():
            if handle.unwanted and handle not in over and self._give_up(handle, now):
                over.append(handle)
        for handle in over:
            del self._running[handle.peer]
        return over

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        left = tuple(self._running.values())
        for handle in left:
            self._channels.expel(handle.peer, "the coordinator ends")
            handle.conclude(None, "the coordinator ended first", False)
        self._running.clear()
        if left:
            names = ", ".join(str(handle.peer) for handle in left)
            raise KvbatonError(
                f"stages {names} of other hosts were still there when the coordinator ended; they end by themselves, or"
                " must be ended there",
                stages=tuple(handle.peer for handle in left),
            )

    def _give_up(self, handle: RemoteHandle, now: float) -> bool:
        if handle.told is None:
            handle.told = now
            known = self._channels.introduced(handle.peer)
            self._channels.expel(handle.peer, "the coordinator gave this stage up")
            if not known:
                self._channels.remove(handle.peer)
                handle.conclude(None, "it was not wanted any more before it was up", True)
            return not known
        if now - handle.told > self._patience:
            handle.conclude(None, f"it was told to end and did not within {self._patience:g} s", False)
            return True
        return False
