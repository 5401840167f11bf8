"""Launchers start stages and prove their end.

A launcher gives a stage its identity (a fresh epoch, C1.4), announces it to the coordinator's channels, starts it, and
notices its end at once.  The end is *joined*, never announced (C6.2): ``StageHandle.join`` returning True is the first
half of a fence (C6.4); the second, draining and closing the destination's end of the connection, is not a launcher's.

``kvbaton.launch.process`` starts one process per stage, ``kvbaton.launch.inproc`` one thread per stage, and
``kvbaton.launch.remote`` expects stages that an operator starts on other hosts (``kvbaton.launch.host``).

An *entry* is named ``"module:function"`` and has the signature of ``Entry``.  It runs on the main thread of a stage's
process (or on the stage's thread), gets its spec, a channel that is ready for use, and a lifeline; it returns the exit
status.  When the lifeline is cut the launcher's worker has already severed the channel, so that a stage which looks at
``channel.lost`` need not watch the lifeline as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvbaton.control import StageChannel
from kvbaton.errors import StageDied
from kvbaton.identity import PeerId

__all__ = ["Entry", "Launcher", "Lifeline", "StageHandle", "StageSpec"]


class StageSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage is told when it starts; everything in it survives JSON.

    ``settings`` belongs to the entry.  ``environment`` is added to the environment of the stage's process (to pin its
    device, for instance); a launcher without processes refuses a spec that has any.
    """

    name: str
    role: str
    entry: str
    settings: Mapping[str, Any] = {}
    environment: Mapping[str, str] = {}


class Lifeline(Protocol):
    """Whether a stage still has a coordinator (C6.6).  All methods may be called from any thread."""

    @property
    def cut(self) -> str | None:
        """Why there is no coordinator any more (its process is gone, it let go of this stage, it wants this stage
        dead), or None while there is one.  Final."""

    def wait(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for the cut; True if it is cut."""

    def watch(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once when the lifeline is cut, at once if it is.  On the lifeline's thread: be brief."""


class Entry(Protocol):
    """What a stage runs."""

    def __call__(self, spec: StageSpec, channel: StageChannel, lifeline: Lifeline) -> int:
        """Be the stage until it shall end, then return its exit status (0: as ordered).

        Ownership: the channel is the caller's, which closes it after the entry returned.  Threads that the entry
        started must be joined when it returns.  An exception ends the stage with status 1 and its traceback in the log.
        """


class StageHandle(Protocol):
    """A stage that was started.  All methods may be called from any thread and are valid for ever."""

    @property
    def peer(self) -> PeerId:
        """Who it is, with the epoch of this start."""

    @property
    def spec(self) -> StageSpec:
        """What it was started with."""

    @property
    def pid(self) -> int:
        """Its process; the process of the caller where stages are threads."""

    @property
    def joined(self) -> bool:
        """Once it is over: whether that is proven, the first half of a fence (C6.4).  False: it is lost, no more."""

    def exit_status(self) -> int | None:
        """None while it has not been joined; then its status, negative for the signal that killed it.  Never waits."""

    def join(self, timeout: float) -> bool:
        """Wait up to ``timeout`` seconds for its end; True once it is over.

        Completion: over means that nothing of it runs any more: see each launcher for what exactly that proves.
        """

    def kill(self) -> None:
        """End it now, without asking.  Idempotent; no effect once it is over.  Not evidence: ``join`` is."""

    def log_tail(self) -> list[str]:
        """The last lines that it wrote, oldest first, bounded; complete once it is over."""

    def death(self) -> StageDied | None:
        """Its end as an error with status and last lines, whatever the status; None while it is not over."""


class Launcher(Protocol):
    """Starts stages.  Threading: all methods but ``close`` from any thread; ``close`` once the others are done."""

    def start(self, spec: StageSpec) -> StageHandle:
        """Start a stage under a fresh epoch.  Its channel is announced before it runs, so that messages to it may be
        sent at once.  Call it on the thread that uses the channels.

        Completion: it was started; whether it works is seen by its first message, or by its death.
        Raises: StartupError if it cannot be started; nothing is left of it.
        """

    def exited(self) -> Sequence[StageHandle]:
        """The stages that ended since the last call, each once, in the order in which that was noticed.  The
        coordinator's channels are woken for each."""

    def close(self) -> None:
        """Kill what still runs, join everything, give up every resource.  Idempotent.

        Raises: KvbatonError if a stage could not be joined within a bounded time; the rest was.
        """
