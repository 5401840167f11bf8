"""The coordinator's event loop: machine, channels and launcher joined on one thread.

The machine (:mod:`kvbaton.handoff.coordinator`) decides; this carries out its effects, feeds it messages, deaths and
the clock, and keeps per request what a caller wants to know.  Everything from outside comes in as a command, so the
machine, the channels and the launcher are touched by one thread only.

Start-up and shutdown are the same loop: *ready* once every prefill stage is connected to every decode stage, *over*
once every stage was joined in the order of C6.2.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import heapq
import itertools
import logging
import math
import os
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import msgspec

from kvbaton import messages
from kvbaton.bounds import FAIL_CLOSED, Recovery
from kvbaton.connector import ConnectorPlugin
from kvbaton.control import ChannelLost, CoordinatorChannels, Received
from kvbaton.engine import Request, Role
from kvbaton.errors import (
    ConfigurationError,
    DuplicateRequest,
    KvbatonError,
    LocalProtocolError,
    MessageError,
    PromptTooLong,
    ProtocolViolation,
    RequestCancelled,
    RequestOverdue,
    RequestRefused,
    RuntimeClosed,
    SettingsError,
    StartupError,
    TransferFailed,
)
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Coordinator, Deadlines, Limits, Pair, least_loaded
from kvbaton.handoff.table import Milestones, PeerStatus
from kvbaton.hooks import Hooks, StageLoad
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.launch import Launcher, StageHandle, StageSpec
from kvbaton.launch.pinning import pin
from kvbaton.observe.log_line import relay
from kvbaton.plugins import choose_placement
from kvbaton.records import RequestOutput, RequestRecord, StageState
from kvbaton.routing import policy
from kvbaton.settings import Settings
from kvbaton.stage.stage import HANDLE_DONE
from kvbaton.stage.worker import forget_given, stage_specs

_log = logging.getLogger(__name__)

#: How long the loop sleeps at most when nothing is due.
_NAP = 0.5
#: A stage ends by itself at its shutdown deadline and says what it held; so long after that it is killed.
_GRACE = 1.0
#: How often within ``deadline.step`` a stage is asked how it fares.
_BEATS = 4
#: So many messages are heard before those who wait for outputs are told of them.
_HEARD_AT_ONCE = 64
#: How long a stage whose channel has gone may take to be found dead, before the channel's loss is all that is known.
_LAST_WORDS = 0.25

#: How long at most a stage's end waits until everything is heard that it had said.
_HEARD_OUT = 5.0

#: Where each milestone stands in the life of a transfer, for the log.
_ORDER = {name: place for place, name in enumerate((
    Milestones.PLACED, Milestones.RESERVED, Milestones.PREFILL_STARTED, Milestones.SOURCE_READY, Milestones.SUBMITTED,
    Milestones.COMMITTED, HANDLE_DONE, Milestones.RECEIVED, Milestones.ACKNOWLEDGED, Milestones.IMPORTED,
    Milestones.ACTIVATED, Milestones.FINISHED, Milestones.SOURCE_RETIRED, Milestones.DESTINATION_RETIRED,
))}  # fmt: skip
#: What becomes of the requests of a stage that is started again, by ``recovery.mode``.
_BEGINS_AGAIN = {
    "requeue": "of its requests those of which no token was delivered begin again, and the others have failed",
    "recompute": "its requests begin again, and those of which tokens were delivered go on from these, unless they have"
    " stop texts: those have failed",
}
#: Of a stage that was killed, and not by this process.
_WHO_KILLED = "Was it out of memory? The kernel's log tells (dmesg)."
#: What is said for a stage that can say nothing any more.
_ENDED = "the stage ended"

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Tracked:
    """What is known of a live request."""

    request: Request
    number: int
    added: float
    deadline: float | None
    transfer: TransferId | None = None
    prefill: str = ""
    decode: str = ""
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    milestones: dict[str, float] = field(default_factory=dict)
    #: When this loop sent each stage its creating message: where that stage's own clock starts.
    sent: dict[str, float] = field(default_factory=dict)
    #: The milestones of this generation that a stage has placed by its own clock.
    timed: set[str] = field(default_factory=set)
    #: The milestones of this generation that are in the log.
    logged: set[str] = field(default_factory=set)
    chunks: int = 0
    segments: int = 0
    nbytes: int = 0
    prefix_prefill: int = 0
    prefix_decode: int = 0
    overdue: bool = False
    requeued: int = 0


@dataclass(slots=True, eq=False)
class _Pulse:
    """What a stage says when it is asked how it fares: that its process lives, and how long its engine's step takes.

    ``missed`` counts the times that the answer was still out when the next question was due, so that a coordinator
    that stood still itself (Ctrl-Z) blames nobody for it.
    """

    due: float
    control_id: str | None = None
    missed: int = 0


@dataclass(slots=True, eq=False)
class _Census:
    """A generic control call to several peers, waiting for replies (C9.2)."""

    future: concurrent.futures.Future[dict[str, Any]]
    waiting: dict[PeerId, str]
    by: float
    result: dict[str, Any]
    #: When they were asked, and when each one's reply was heard.
    asked: float
    heard: dict[PeerId, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Answer:
    """A stage's reply to a call, or ``{"error": text}``, given between ``asked`` and ``heard`` on our clock."""

    result: Any
    asked: float
    heard: float


@dataclass(slots=True, eq=False)
class _HeldBack:
    """What a stage says after it reported that ``about`` is down, until ``by`` or the end of ``about``."""

    about: PeerId
    by: float
    events: deque[Received | ChannelLost]


class Service:
    """See the module's text.  ``deliver`` and ``delivered`` are set by the runtime and called on the service's thread:
    the one with each output, the other once after some of them.
    """

    def __init__(
        self,
        settings: Settings,
        hooks: Hooks,
        progress: Callable[[str], None],
        connect: Callable[[], tuple[CoordinatorChannels, Launcher]],
        specs: Sequence[StageSpec],
        opening: Sequence[str] = (),
    ) -> None:
        self.deliver: Callable[[RequestOutput], None] = lambda output: None
        self.delivered: Callable[[], None] = lambda: None
        #: Outputs were delivered of which nobody was told yet.
        self._untold = False
        self.stages = tuple(spec.name for spec in specs)
        self._settings = settings
        self._hooks = hooks
        self._show = progress
        #: What is shown first, once ``connect`` has refused nothing.
        self._opening = opening
        self._connect = connect
        self._specs = specs
        #: The built-in policy behind ``routing.policy``, an observer like any other.
        self._policy = policy(settings.routing)
        if self._policy is not None:
            hooks.add(self._policy, f"kvbaton.routing:{settings.routing.policy}")
        limits, deadline = settings.limits, settings.deadline
        self._machine = Coordinator(
            Limits(waiting=limits.waiting, passes=limits.passes, retries=limits.retries),
            Deadlines(
                reserve=deadline.reserve, prefill_start=deadline.prefill_start, prefill_idle=deadline.prefill_idle,
                receipts=deadline.receipts, drain=deadline.drain, control=deadline.control,
                shutdown=deadline.shutdown + _GRACE,
            ),
            choose=self._choose_pair,
            recovery=_recovery(settings),
        )  # fmt: skip
        self._commands: deque[Callable[[], None]] = deque()
        self._channels: CoordinatorChannels  # once ``_connected``
        self._connected = False
        self._handles: dict[PeerId, StageHandle] = {}
        self._expected: set[PeerId] = set()  # told to exit, or killed by us
        self._tracked: dict[RequestKey, _Tracked] = {}
        #: Ended for their callers, not yet retired everywhere: their records still get milestones.
        self._retiring: dict[TransferId, _Tracked] = {}
        #: The machine's next deadline, as the loop last saw it.
        self._deadline: float | None = None
        #: Requests' own deadlines: (when, number, key); entries of ended requests are weeded out now and then.
        self._due: list[tuple[float, int, RequestKey]] = []
        self._order = itertools.count()
        self._draining: list[tuple[PeerId, concurrent.futures.Future[bool]]] = []
        #: Told to exit while the others go on, and who waits for that.
        self._dismissed: list[tuple[PeerId, concurrent.futures.Future[bool]]] = []
        self._censuses: list[_Census] = []
        self._pulses: dict[PeerId, _Pulse] = {}
        self._counts: Counter[str] = Counter()
        #: What the channels have refused so far, as far as observers were told.
        self._dropped: Mapping[tuple[str, str], int] = {}
        #: Their channels are gone, and their ends not seen yet: until when they are waited for, and why they are lost.
        self._silent: dict[PeerId, tuple[float, str]] = {}
        self._held_back: dict[PeerId, _HeldBack] = {}
        self._ready: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._up: set[PeerId] = set()
        self._launcher: Launcher  # once ``_connected``
        #: Lost, and not seen to have ended: until when requests wait for its successor.
        self._dying: dict[PeerId, float] = {}
        #: Started again, and not connected to every peer yet.
        self._unconnected: set[PeerId] = set()
        #: Started again, and not heard of yet: until when they are waited for.
        self._starting: dict[PeerId, float] = {}
        self._gone: set[PeerId] = set()  # joined, and the end looked at
        #: Ended, and not all of what they had said was heard yet; and until when that is waited for.
        self._ended: list[tuple[StageHandle, float]] = []
        self._last_words: dict[PeerId, str] = {}
        self._start_by = time.monotonic() + deadline.startup
        self._cause: KvbatonError | None = None  # why start-up failed
        self._bad_ends: list[str] = []
        self._closing = False
        self._give_up_at = math.inf
        self._over = threading.Event()
        self._lock = threading.Lock()  # guards "commands are still taken", and the count of refusals
        self._refused: Counter[str] = Counter()
        self._accepting = True
        self._thread = threading.Thread(target=self._run, name="kvbaton-coordinator", daemon=True)

    @classmethod
    def start(
        cls, settings: Settings, hooks: Hooks, progress: Callable[[str], None], connector: ConnectorPlugin | None,
        opening: Sequence[str] = (),
    ) -> Service:  # fmt: skip
        """Launch, connect, return when ready.  Raises what :meth:`PDRuntime.start` does.

        ``opening`` is what ``progress`` is told first, once the settings were accepted.
        """
        if settings.stages.launch == "remote":
            return cls._start_remote(settings, hooks, progress, connector, opening)
        placement = choose_placement(settings, connector)
        transport = settings.transport
        if transport.name == "auto":
            transport = transport.model_copy(update={"name": placement.plugin.name})
        settings = settings.model_copy(update={"transport": transport})
        specs = stage_specs(settings, placement.need.reach, connector)
        if placement.launch == "process":
            specs = [_pinned(spec) for spec in specs]

        def connect() -> tuple[CoordinatorChannels, Launcher]:
            if placement.launch == "inproc":
                from kvbaton.control.inproc import InprocCoordinatorChannels
                from kvbaton.launch.inproc import InprocLauncher

                channels = InprocCoordinatorChannels()
                return channels, InprocLauncher(channels)
            from kvbaton.control.zmq import ZmqCoordinatorChannels
            from kvbaton.launch.process import ProcessLauncher

            control = settings.control
            sockets = ZmqCoordinatorChannels(
                directory=control.dir, max_message=int(control.max_message), heartbeat=control.heartbeat
            )
            # an orphan has its own shutdown deadline; the watchdog is for one that does not keep it
            return sockets, ProcessLauncher(
                sockets, orphan_grace=2 * settings.deadline.shutdown, on_line=relay,
                log_level=logging.getLogger("kvbaton").getEffectiveLevel(),
            )  # fmt: skip

        what = "threads" if placement.launch == "inproc" else "processes"
        about = f"transport {placement.plugin.name}, stages as {what}"
        service = cls(settings, hooks, progress, connect, specs, (*opening, about))
        service._await_ready()
        return service

    @classmethod
    def _start_remote(
        cls, settings: Settings, hooks: Hooks, progress: Callable[[str], None], connector: ConnectorPlugin | None,
        opening: Sequence[str],
    ) -> Service:  # fmt: skip
        """Stages that operators start on their hosts: listen, and return when all have joined and are connected."""
        if connector is not None:
            raise LocalProtocolError("a connector object does not travel to another host; name one in transport.name")
        control = settings.control
        if control.listen is None or control.keys is None:
            raise SettingsError(
                "the coordinator needs control.listen and control.keys where stages are on other hosts",
                key="control.listen", origin=None,
            )  # fmt: skip
        from kvbaton.control.curve import COORDINATOR, ServerKeys, load_allowed, load_pair
        from kvbaton.control.zmq import Listen, ZmqCoordinatorChannels
        from kvbaton.launch.remote import RemoteLauncher

        specs = stage_specs(settings, "cross_host", None)
        allowed = load_allowed(control.keys, [spec.name for spec in specs])
        listen = Listen(control.listen, ServerKeys(load_pair(control.keys, COORDINATOR), allowed))

        def connect() -> tuple[CoordinatorChannels, Launcher]:
            sockets = ZmqCoordinatorChannels(
                max_message=int(control.max_message), heartbeat=control.heartbeat, listen=listen
            )
            return sockets, RemoteLauncher(sockets, patience=settings.deadline.shutdown + _GRACE)

        names = ", ".join(spec.name for spec in specs)
        about = f"transport {settings.transport.name}, waiting at {control.listen} for {names}"
        service = cls(settings, hooks, progress, connect, specs, (*opening, about))
        service._await_ready()
        return service

    def _await_ready(self) -> None:
        self._thread.start()
        try:
            self._ready.result()
        except BaseException:
            self._abandon()
            raise

    @property
    def settings(self) -> Settings:
        """What it runs with; ``transport.name`` is the one that was chosen."""
        return self._settings

    # -- for the runtime, from any thread ----------------------------------------------------------------------------

    def call(self, action: Callable[[], T]) -> T:
        """Run ``action`` on the service's thread and return what it returns, or raise what it raises."""
        self._not_from_a_hook()
        answer: queue.SimpleQueue[tuple[T, None] | tuple[None, BaseException]] = queue.SimpleQueue()

        def command() -> None:
            try:
                answer.put((action(), None))
            except BaseException as error:
                answer.put((None, error))

        self._post(command)
        result, error = answer.get()
        if error is None:
            return cast("T", result)
        try:
            raise error
        finally:
            del error  # it holds this frame, which would hold it

    def add(self, key: RequestKey, request: Request, deadline: float | None, accepted: Callable[[], None]) -> None:
        """Take a request; ``accepted`` runs once it was taken and before anything is delivered for it."""
        try:
            self._add(key, request, deadline, accepted)
        except (RequestRefused, RuntimeClosed) as error:
            with self._lock:
                self._refused[_refusal(error)] += 1
            raise

    def _add(self, key: RequestKey, request: Request, deadline: float | None, accepted: Callable[[], None]) -> None:
        if deadline is not None and not (isinstance(deadline, int | float) and 0 <= deadline < math.inf):
            raise RequestRefused(
                f"request {key}: deadline is {deadline!r}; it is a number of seconds from now", request=key
            )
        size, limit = request.check(), int(self._settings.control.max_message) // 4  # the block tables travel with it
        if size > limit:
            raise RequestRefused(
                f"request {key}: {size} bytes, more than the {limit} that a control message leaves for it; raise"
                " control.max_message",
                request=key,
            )
        added = time.monotonic()

        def action() -> None:
            now = time.monotonic()
            if self._closing:
                raise RuntimeClosed("the runtime is closing; it takes no more requests")
            effects = self._machine.submit(key, request, now)
            tracked = _Tracked(request, next(self._order), added, None if deadline is None else added + deadline)
            self._tracked[key] = tracked
            if tracked.deadline is not None:
                heapq.heappush(self._due, (tracked.deadline, tracked.number, key))
            accepted()
            self._hooks.tell("kvbaton_request_added", request=key, prompt_tokens=len(request.prompt), at=added)
            if _log.isEnabledFor(logging.DEBUG):
                _log.debug("request %s: added", key, extra={"request": key, "milestone": "added"})
            self._carry_out(effects, now)

        self.call(action)

    def abort(self, key: RequestKey) -> None:
        def command() -> None:
            now = time.monotonic()
            self._carry_out(self._machine.abort(key, now), now)

        try:
            self._post(command)
        except RuntimeClosed:
            return  # what was live has ended with it

    def drain(self, stage: str, timeout: float | None) -> bool:
        timeout = _patience(timeout)
        future: concurrent.futures.Future[bool] = concurrent.futures.Future()

        def action() -> None:
            now = time.monotonic()
            peer = next((p for p in reversed(tuple(self._handles)) if p.name == stage), None)
            if peer is None:
                raise LocalProtocolError(f"there is no stage {stage!r}; there are {', '.join(self.stages)}")
            if peer in self._gone:
                how = "has ended" if self._handles[peer].joined else "is lost"
                raise LocalProtocolError(
                    f"stage {stage} {how} and is not started again; nothing is placed on it", stage=stage
                )
            if peer in self._starting:
                raise LocalProtocolError(f"stage {stage} is being started again; drain it once it is up", stage=stage)
            if peer not in self._up:
                raise LocalProtocolError(f"stage {stage} is not up: it was not started again", stage=stage)
            self._carry_out(self._machine.drain(peer, now), now)
            if self._dying.get(peer) == math.inf:  # it hangs for good: what it holds does not come back
                _answer(future, False)
                return
            self._draining.append((peer, future))

        self.call(action)
        return _within(future, timeout)

    def dismiss(self, stage: str, timeout: float | None) -> bool:
        began, timeout = time.monotonic(), _patience(timeout)
        if not self.drain(stage, timeout):
            return False
        future: concurrent.futures.Future[bool] = concurrent.futures.Future()

        def action() -> None:
            now = time.monotonic()
            peer = next(p for p in reversed(tuple(self._handles)) if p.name == stage)
            if peer in self._gone:  # it was lost while it was drained, or another call has dismissed it
                _answer(future, self._handles[peer].joined)
                return
            if self._dying.get(peer) == math.inf:
                _answer(future, False)
                return
            self._carry_out(self._machine.dismiss(peer, now), now)
            self._dismissed.append((peer, future))

        self.call(action)
        return _within(future, None if timeout is None else max(began + timeout - time.monotonic(), 0.0))

    def confirm_ended(self, stage: str) -> int:
        if stage not in self.stages:
            raise LocalProtocolError(f"there is no stage {stage!r}; there are {', '.join(self.stages)}")

        def action() -> int:
            now = time.monotonic()
            lives = self._machine.unjoined(stage)
            for peer in lives:
                _log.warning("%s: its process is said to have ended", peer)
                self._carry_out(self._machine.peer_joined(peer, now), now)
            return len(lives)

        return self.call(action)

    def stage(self, name: str) -> StageState:
        handle = next((h for peer, h in reversed(tuple(self._handles.items())) if peer.name == name), None)
        if handle is None:
            raise LocalProtocolError(f"there is no stage {name!r}; there are {', '.join(self.stages)}")
        return StageState(name, handle.pid, handle.exit_status(), tuple(handle.log_tail()))

    def ask(self, method: str) -> dict[str, Any]:
        """C9.2: one reply or error of each stage within ``deadline.control``, and the coordinator's books."""

        def present() -> tuple[list[PeerId], dict[str, Any]]:
            return [v.peer for v in self._machine.peers() if v.peer in self._up], {"coordinator": self._books()}

        return self._fan_out(method, "runtime", {}, present)

    def lives(self) -> dict[str, PeerId]:
        """The present life of each stage, by name."""
        return {peer.name: peer for peer in tuple(self._handles)}  # of several lives the last one counts

    def profile(
        self, method: str, session: str, arguments: Mapping[str, Any], peers: Sequence[PeerId]
    ) -> dict[str, Any]:
        """C9.2: one call of a profiling session.  For a life that has ended its end is said; the next has no part in
        it.
        """

        def present() -> tuple[list[PeerId], dict[str, Any]]:
            ended = {peer.name: {"error": _ENDED} for peer in peers if peer not in self._up}
            return [peer for peer in peers if peer in self._up], ended

        return self._fan_out(method, session, arguments, present)

    def trace(
        self, method: str, session: str, arguments: Mapping[str, Any], peers: Collection[PeerId] | None
    ) -> dict[PeerId, Answer]:
        """C9.2: one call of a trace session to ``peers``, or all that are up; of those that replied, the replies."""

        def present() -> tuple[list[PeerId], dict[str, Any]]:
            up = [view.peer for view in self._machine.peers() if view.peer in self._up]
            return [peer for peer in up if peers is None or peer in peers], {}

        census = self._census(method, session, arguments, present)
        result = census.future.result()
        return {peer: Answer(result.get(peer.name), census.asked, at) for peer, at in census.heard.items()}

    def _fan_out(
        self, method: str, session: str, arguments: Mapping[str, Any],
        present: Callable[[], tuple[Sequence[PeerId], dict[str, Any]]],
    ) -> dict[str, Any]:  # fmt: skip
        """Call the peers that are ``present``; what each says within ``deadline.control``, by name, besides what is
        known without.
        """
        return self._census(method, session, arguments, present).future.result()

    def _census(
        self, method: str, session: str, arguments: Mapping[str, Any],
        present: Callable[[], tuple[Sequence[PeerId], dict[str, Any]]],
    ) -> _Census:  # fmt: skip
        """A call that has been sent; its ``future`` gets the result."""
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()

        def action() -> _Census:
            peers, known = present()
            now = time.monotonic()
            census = _Census(future, {}, now + self._settings.deadline.control, known, now)
            for peer in peers:
                call = messages.Call(f"{method}-{next(self._order)}", session, method, dict(arguments))
                try:
                    self._channels.send(peer, call)
                except KvbatonError as error:  # this peer's affair; the others are asked
                    known[peer.name] = {"error": str(error)}
                else:
                    census.waiting[peer] = call.control_id
            self._censuses.append(census)
            return census

        return self.call(action)

    def close(self) -> None:
        """Cancel, stop and join everything.  Raises where a stage did not end as ordered.

        ``KeyboardInterrupt`` is raised once everything has been joined, which is bounded; a second one at once.
        """
        self._not_from_a_hook()
        with contextlib.suppress(RuntimeClosed):  # it ended by itself
            self._post(self._begin_closing)
        interrupted: KeyboardInterrupt | None = None
        try:
            self._over.wait()
        except KeyboardInterrupt as first:  # what it asks for is under way
            interrupted = first
            self._over.wait()
        self._thread.join()
        if interrupted is not None:
            raise interrupted
        ends, self._bad_ends = tuple(self._bad_ends), []
        if ends:
            raise KvbatonError("; ".join(ends), stages=ends)

    def _not_from_a_hook(self) -> None:
        if threading.current_thread() is self._thread:
            raise LocalProtocolError(
                "a hook must not call back into its runtime: it runs on the coordinator's own thread, which would wait"
                " for itself; hand the work to another thread (abort is the exception)"
            )

    def _progress(self, text: str) -> None:
        try:
            self._show(text)
        except Exception as error:  # a display must not end what it shows
            _log.error("showing progress failed: %s: %s", type(error).__name__, error)

    def _post(self, command: Callable[[], None]) -> None:
        with self._lock:
            if not self._accepting:
                raise RuntimeClosed("the runtime is closed; start another one")
            self._commands.append(command)
        if self._connected:  # before that the loop has not begun, and looks when it does
            self._channels.wake()

    def _abandon(self) -> None:
        """Start-up failed or was interrupted: everything is stopped again."""
        try:
            self.close()
        except KvbatonError as error:
            _log.info("while giving up: %s", error)  # the first cause is the one that is raised

    # -- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._channels, self._launcher = self._connect()
            launcher = self._launcher
            self._connected = True
        except BaseException as error:
            self._accepting = False
            self._over.set()
            self._ready.set_exception(error)
            return
        for text in self._opening:
            self._progress(text)
        try:
            self._loop(launcher)
        except BaseException as error:
            _log.critical("the coordinator failed", exc_info=error)
            self._bad_ends.append(f"the coordinator failed: {type(error).__name__}: {error}")
        finally:
            self._finish(launcher)

    def _loop(self, launcher: Launcher) -> None:
        self._launch(launcher)
        while not self._is_over():
            self._channels.wait(self._nap())
            now = time.monotonic()
            # before the messages, so that a stage's last ones come before its end
            self._ended += [(handle, now + _HEARD_OUT) for handle in launcher.exited()]
            for heard, event in enumerate(self._channels.receive(), 1):
                self._hear(event, now)
                if heard % _HEARD_AT_ONCE == 0:
                    self._tell_delivered()
            self._tell_delivered()
            if self._ended:
                self._on_exits(now)
            self._tell_dropped()
            while self._commands:
                self._commands.popleft()()
            self._on_time(now)
            self._tell_delivered()

    def _launch(self, launcher: Launcher) -> None:
        for spec in self._specs:
            while self._commands:  # a start that was interrupted
                self._commands.popleft()()
            if self._closing:
                return
            if self._settings.stages.launch != "remote":
                self._progress(f"starting {spec.name}")
            try:
                handle = launcher.start(spec)
            except KvbatonError as error:
                self._fail_startup(error)
                return
            self._handles[handle.peer] = handle

    def _is_over(self) -> bool:
        if not self._closing:
            return False
        # senders and receivers have a shutdown deadline each, and are killed after it; only a thread survives a kill
        return time.monotonic() > self._give_up_at or self._gone >= set(self._handles)

    def _finish(self, launcher: Launcher) -> None:
        with self._lock:
            self._accepting = False
        while self._commands:
            self._commands.popleft()()
        for census in self._censuses:
            census.future.set_result(census.result)
        for _, future in (*self._draining, *self._dismissed):
            _answer(future, False)
        # whoever still waits for a request learns its end
        for key in tuple(self._tracked):
            self._end(key, None, fx.Ended(fx.Ending.FAILED, None, "the runtime ended"))
        self._tell_delivered()
        for end in (launcher.close, lambda: self._tell_late_ends(launcher), self._channels.close):
            try:
                end()
            except KvbatonError as error:
                self._bad_ends.append(str(error))
        for spec in self._specs:
            forget_given(spec.settings)
        if not self._ready.done():
            self._ready.set_exception(self._cause or StartupError("start-up ended early; see the log"))
        self._over.set()

    def _tell_late_ends(self, launcher: Launcher) -> None:
        """Of stages that nobody waited for any more: a bad end is one, however late it comes (C6.2)."""
        for handle in (*(handle for handle, _ in self._ended), *launcher.exited()):
            if handle.exit_status() and self._ready.done() and handle.peer not in self._starting:
                self._bad_ends.append(self._end_of(handle))

    def _end_of(self, handle: StageHandle) -> str:
        """In words, with what it said last."""
        peer, death = handle.peer, handle.death()
        text = str(death) if death is not None else f"stage {peer.name} ended"
        said = self._last_words.get(peer, "")
        return text if said in text else f"{text} It said: {said}"

    def _nap(self) -> float:
        self._deadline = self._machine.next_deadline()
        if self._commands:
            return 0.0
        now = time.monotonic()
        times = [now + _NAP, *self._starting.values(), *self._dying.values()]
        times += [pulse.due for pulse in self._pulses.values()]
        if self._deadline is not None:
            times.append(self._deadline)
        if self._due:
            times.append(self._due[0][0])
        if self._censuses or self._silent or self._held_back:
            times += [census.by for census in self._censuses]
            times += [by for by, _ in self._silent.values()]
            times += [held.by for held in self._held_back.values()]
        return max(min(times) - now, 0.0)

    # -- events ------------------------------------------------------------------------------------------------------

    def _hear(self, event: Received | ChannelLost, now: float) -> None:
        """A stage that lost its connection to another may have seen a death sooner than we do.  What it says from then
        on waits for that: a dead stage's own end, with status and last words, says more than what others saw of it.
        """
        if self._held_back and event.peer in self._held_back:
            self._held_back[event.peer].events.append(event)
            return
        if isinstance(event, Received) and isinstance(event.message, messages.PeerDown) and not self._closing:
            about = event.message.peer
            if self._ready.done() and about in self._up and about not in self._expected:
                self._held_back[event.peer] = _HeldBack(about, now + _LAST_WORDS, deque([event]))
                return
        self._on_event(event, now)

    def _hear_out(self, reporter: PeerId, now: float) -> None:
        """What ``reporter`` has said waits no longer."""
        held = self._held_back.pop(reporter, None)
        if held is not None:
            self._on_event(held.events.popleft(), now)
            for event in held.events:
                self._hear(event, now)

    def _on_event(self, event: Received | ChannelLost, now: float) -> None:
        peer = event.peer
        if isinstance(event, ChannelLost):
            # the channel goes moments before its process does: the exit, with status and last words, says more
            if peer not in self._expected:
                self._silent[peer] = now + _LAST_WORDS, event.reason
            return
        message = event.message
        match message:
            case messages.Reply():
                self._on_reply(peer, message, now)
                return
            case messages.Hello():
                self._up.add(peer)
                self._starting.pop(peer, None)
                self._progress(f"{peer.name} is up")
                if self._ready.done():
                    _log.warning("%s is up again", peer.name)
                    self._pulses[peer] = _Pulse(now + self._settings.deadline.step / _BEATS)
                    self._unconnected.add(peer)
            case messages.Fatal(cause, settings):
                _log.log(self._severity(), "%s: %s", peer, cause)
                self._last_words[peer] = cause
                if not self._ready.done():
                    error = StartupError(f"{peer.name}: {cause}", stage=peer.name)
                    error.__cause__ = ConfigurationError(cause) if settings else None
                    self._fail_startup(error)
            case messages.PeerDown(other, _, cause) if not self._ready.done():
                self._fail_startup(
                    StartupError(f"{peer.name} and {other.name} cannot be connected: {cause}", stage=peer.name)
                )
            case _:
                pass
        effects = self._machine.handle(peer, message, now)
        if self._hooks.heard("kvbaton_message_dropped"):
            for effect in effects:
                if isinstance(effect, fx.Ignored):
                    self._hooks.tell(
                        "kvbaton_message_dropped", family=messages.family_of(message),
                        reason=f"{effect.event}: {effect.reason}", peer=peer.name, count=1,
                    )  # fmt: skip
        self._carry_out(effects, now)
        if isinstance(message, messages.Connected):
            self._check_ready()
            self._check_back()

    def _check_ready(self) -> None:
        views = self._machine.peers()
        prefills = [view.peer for view in views if view.role is Role.PREFILL]
        decodes = [view.peer for view in views if view.role is Role.DECODE]
        if len(prefills) + len(decodes) < len(self._specs) or self._ready.done():
            return
        if all(self._machine.connected(p, d) for p in prefills for d in decodes):
            for peer in (*prefills, *decodes):
                self._hooks.tell("kvbaton_peer_up", peer=peer)
            self._progress("all stages are connected")
            self._pulses = {peer: _Pulse(time.monotonic()) for peer in (*prefills, *decodes)}
            self._ready.set_result(None)

    def _check_back(self) -> None:
        """Of those that were started again: who is connected to every peer that is up."""
        if not self._unconnected:
            return
        views = [view for view in self._machine.peers() if view.peer in self._up]
        for view in [view for view in views if view.peer in self._unconnected]:
            others = {other.peer for other in views if other.role is not view.role}
            if others <= set(view.connected):
                self._unconnected.discard(view.peer)
                self._hooks.tell("kvbaton_peer_up", peer=view.peer)

    def _on_exits(self, now: float) -> None:
        """Of those who have ended, and of whom everything was heard, or who have waited long enough for that."""
        ended, self._ended = self._ended, []
        for handle, by in ended:
            if now < by and self._channels.unheard(handle.peer):
                self._ended.append((handle, by))
            else:
                self._on_exit(handle, now)

    def _on_exit(self, handle: StageHandle, now: float) -> None:
        peer = handle.peer
        self._hear_out(peer, now)
        self._gone.add(peer)
        expected = peer in self._expected
        self._up.discard(peer)
        self._silent.pop(peer, None)
        self._pulses.pop(peer, None)
        self._unconnected.discard(peer)
        told_to = self._dying.pop(peer, None) is not None
        if not expected or handle.exit_status() or not handle.joined:
            text = advised = self._end_of(handle)
            if handle.exit_status() == -signal.SIGKILL and not (expected or told_to):
                advised = f"{text}{chr(10) if chr(10) in text else ' '}{_WHO_KILLED}"
            _log.log(self._severity(), "%s", advised)
            if not self._ready.done():
                self._fail_startup(StartupError(advised, stage=peer.name))
            elif self._closing and peer not in self._starting:  # that one was killed before it had begun
                self._bad_ends.append(text)
            self._carry_out(self._machine.peer_lost(peer, text, now), now)
        over = self._machine.peer_joined if handle.joined else self._machine.peer_unjoinable
        self._carry_out(over(peer, now), now)
        if self._starting.pop(peer, None) is not None:
            self._carry_out(self._machine.start_failed(peer.name, now), now)
        if self._ready.done() and not self._closing:
            self._forget_handle(handle)
        for census in self._censuses:
            if census.waiting.pop(peer, None):
                census.result[peer.name] = {"error": _ENDED}
        self._answer_leaving(peer, handle.joined)
        for reporter in [r for r, held in self._held_back.items() if held.about == peer]:
            self._hear_out(reporter, now)

    def _answer_leaving(self, peer: PeerId, joined: bool) -> None:
        """Whoever waits for a dismissed stage's end has an answer; and where its end will not be seen, whoever waits
        until it is empty, which it never will be (C6.7).
        """
        for waiting in (self._dismissed,) if joined else (self._dismissed, self._draining):
            for item in [item for item in waiting if item[0] == peer]:
                waiting.remove(item)
                _answer(item[1], joined)

    def _tell_dropped(self) -> None:
        if not self._hooks.heard("kvbaton_message_dropped"):
            return
        dropped = self._channels.statistics().dropped
        if dropped != self._dropped:
            for (family, reason), total in dropped.items():
                more = total - self._dropped.get((family, reason), 0)
                if more:
                    self._hooks.tell("kvbaton_message_dropped", family=family, reason=reason, peer=None, count=more)
            self._dropped = dropped

    def _on_time(self, now: float) -> None:
        if self._held_back:
            for reporter in [r for r, held in self._held_back.items() if held.by <= now or self._closing]:
                self._hear_out(reporter, now)
        if self._silent:
            self._give_up_silent(now, now)
        self._take_pulses(now)
        if self._starting or self._dying:
            self._expire_starts(now)
        if self._deadline is not None and self._deadline <= now:
            self._carry_out(self._machine.expire(now), now)
        while self._due and self._due[0][0] <= now:
            _, number, key = heapq.heappop(self._due)
            tracked = self._tracked.get(key)
            if tracked is not None and tracked.number == number:  # C1.3
                tracked.overdue = True
                self._carry_out(self._machine.abort(key, now, "C6.7: the request's own deadline passed"), now)
        if self._draining:
            for peer, future in [d for d in self._draining if d[1].cancelled() or self._machine.idle(d[0])]:
                self._draining.remove((peer, future))
                _answer(future, True)
        if self._censuses:
            self._close_censuses(now)
        if self._start_by <= now and not self._ready.done():
            missing = [spec.name for spec in self._specs if not any(p.name == spec.name for p in self._up)]
            what = f"{', '.join(missing)} did not report" if missing else "the stages did not all connect"
            error = StartupError(f"C6.7: {what} within deadline.startup of {self._settings.deadline.startup:g} s")
            if not self._closing:  # what hangs takes its time to stop, and is not to do so in silence
                _log.error("%s; stopping what was started", error)
            self._fail_startup(error)
            if all(handle.pid == os.getpid() for handle in self._handles.values()):
                # nothing was transferred yet, and a thread that hangs, as in a plugin's connect(), outlives every round
                self._give_up_at = min(self._give_up_at, now + self._settings.deadline.shutdown + _GRACE)

    def _expire_starts(self, now: float) -> None:
        """C6.7: of stages that are started again, and of lost ones that do not end."""
        for peer in [peer for peer, by in self._starting.items() if by <= now]:
            text = f"C6.7: deadline.startup of {self._settings.deadline.startup:g} s passed"
            if self._settings.stages.launch == "remote":  # an operator starts it, in his own time; nobody waits longer
                del self._starting[peer]
                text = f"{text}, and {peer.name} was not started again on its host"
                self._carry_out(self._machine.start_failed(peer.name, now, final=text), now)
            else:
                self._starting[peer] = math.inf  # its end says the rest
                self._kill(peer, text)
        for peer in [peer for peer, by in self._dying.items() if by <= now]:
            self._dying[peer] = math.inf
            text = (
                f"C6.7: {peer} is lost and has not ended within deadline.startup of"
                f" {self._settings.deadline.startup:g} s, so that it cannot be started again: a thread that hangs, say"
            )
            if peer in self._starting:  # it was killed because it did not report
                self._carry_out(self._machine.start_failed(peer.name, now, final=text), now)
            else:
                self._carry_out(self._machine.never_ended(peer, now, text), now)
            self._answer_leaving(peer, False)

    def _close_censuses(self, now: float) -> None:
        """C9.2: those that everybody has answered, or whose time is over."""
        for census in [c for c in self._censuses if not c.waiting or c.by <= now]:
            self._censuses.remove(census)
            for peer in census.waiting:
                census.result[peer.name] = {
                    "error": f"no reply within deadline.control of {self._settings.deadline.control:g} s"
                }
            census.future.set_result(census.result)

    def _give_up_silent(self, until: float, now: float) -> None:
        """Lost are those whose channel has gone and who are still not seen to have ended."""
        for peer, (_, reason) in [item for item in self._silent.items() if item[1][0] <= until]:
            del self._silent[peer]
            handle = self._handles.get(peer)
            if handle is not None and handle.exit_status() is None and not self._closing:
                reason = (
                    f"{reason}, and it has not exited: it has closed its channel, or is stopped or cut off and has"
                    f" answered no heartbeat for control.heartbeat of {self._settings.control.heartbeat:g} s"
                )
            self._carry_out(self._machine.peer_lost(peer, reason, now), now)

    def _take_pulses(self, now: float) -> None:
        """C6.7: an engine that hangs in a step, or a process that hangs, is noticed although its channel is up."""
        for peer, pulse in [item for item in self._pulses.items() if item[1].due <= now]:
            pulse.due = now + self._settings.deadline.step / _BEATS
            if pulse.control_id is None:
                pulse.control_id = f"health-{next(self._order)}"
                self._send(peer, messages.Call(pulse.control_id, "coordinator", "health"), now)
            else:
                pulse.missed += 1
                if pulse.missed >= _BEATS:
                    self._hung(peer, "it has answered nothing in that time: its process hangs", now)

    def _on_pulse(self, peer: PeerId, reply: messages.Reply, now: float) -> bool:
        pulse = self._pulses.get(peer)
        if pulse is None or pulse.control_id != reply.control_id:
            return False
        pulse.control_id, pulse.missed = None, 0
        seconds = reply.result.get("step_seconds", 0.0) if isinstance(reply.result, Mapping) else 0.0
        if seconds >= self._settings.deadline.step:
            self._hung(peer, f"its engine has not come back from one step for {seconds:.1f} s", now)
        return True

    def _hung(self, peer: PeerId, what: str, now: float) -> None:
        del self._pulses[peer]
        cause = f"C6.7: deadline.step of {self._settings.deadline.step:g} s passed: {what}"
        self._carry_out(self._machine.peer_lost(peer, cause, now), now)

    def _on_reply(self, peer: PeerId, reply: messages.Reply, now: float) -> None:
        self._machine.heard(peer, now)
        if self._on_pulse(peer, reply, now):
            return
        for census in self._censuses:
            if census.waiting.get(peer) == reply.control_id:
                del census.waiting[peer]
                census.heard[peer] = time.monotonic()  # not ``now``: the reply may have come since
                census.result[peer.name] = reply.result if reply.error is None else {"error": reply.error}

    # -- ending ------------------------------------------------------------------------------------------------------

    def _severity(self) -> int:
        """Of a stage's end: where it is what ends the start, whoever asked for that is told by its error."""
        return logging.DEBUG if self._closing else logging.ERROR if self._ready.done() else logging.INFO

    def _fail_startup(self, error: KvbatonError) -> None:
        if self._cause is None and not self._ready.done():
            self._cause = error
            self._begin_closing()

    def _begin_closing(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._pulses.clear()  # from here on deadline.shutdown says how long a stage may take
        now = time.monotonic()
        self._give_up_at = now + 3 * (self._settings.deadline.shutdown + _GRACE)
        self._give_up_silent(math.inf, now)
        for key in tuple(self._tracked):
            self._carry_out(self._machine.abort(key, now, "the runtime closed"), now)
        self._carry_out(self._machine.fatal("the runtime closed", now), now)
        # a stage that has not said Hello is unknown to the machine and holds nothing of anybody's
        for peer, handle in self._handles.items():
            if peer not in self._up and handle.exit_status() is None:
                self._expected.add(peer)
                handle.kill()

    # -- effects -----------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[fx.CoordinatorEffect], now: float) -> None:
        for effect in effects:
            match effect:
                case fx.SendTo(peer, message):
                    self._send(peer, message, now)
                case fx.Tell(key, transfer, event):
                    self._tell(key, transfer, event, now)
                case fx.Reached():
                    self._reached(effect, now)
                case fx.Ask(peer):
                    self._send(peer, messages.Call(f"alive-{next(self._order)}", "coordinator", "health"), now)
                case fx.Kill(peer, cause):
                    self._kill(peer, cause)
                case fx.Join(peer):
                    self._expected.add(peer)
                    self._pulses.pop(peer, None)  # from here on deadline.shutdown says how long it may take
                case fx.Restart(name):
                    self._restart(name, now)
                case fx.Fenced(peer):
                    self._hooks.tell("kvbaton_peer_fenced", peer=peer)
                case fx.Fault(_, cause, _, peer):
                    _log.log(logging.DEBUG if self._closing else logging.ERROR, "%s", cause)
                    self._tell_fault(KvbatonError(cause), None, None, peer)
                case fx.Ignored():
                    self._counts["ignored"] += 1
                case fx.Violation(clause, transfer, peer, text):
                    self._counts[f"violations_{clause}"] += 1
                    _log.error(
                        "%s violation by %s: %s", clause, peer, text,
                        extra={"clause": clause, "peer": str(peer), "transfer": transfer},
                    )  # fmt: skip
                    violation = ProtocolViolation(clause, f"{peer}: {text}", peer=peer, transfer=transfer)
                    self._tell_fault(violation, transfer, self._machine.key(transfer) if transfer else None, peer)

    def _tell_fault(
        self, error: KvbatonError, transfer: TransferId | None, request: RequestKey | None, peer: PeerId | None
    ) -> None:
        stage = peer.name if peer else None
        self._hooks.tell("kvbaton_fault", error=error, transfer=transfer, request=request, stage=stage)

    def _send(self, peer: PeerId, message: messages.Message, now: float) -> None:
        try:
            self._channels.send(peer, message)
        except MessageError as error:
            # nothing was sent, so the peer answers as it would have: it holds nothing, and this transfer ends
            match message:
                case messages.Reserve(transfer):
                    self._carry_out(self._machine.handle(peer, messages.Rejected(transfer, str(error)), now), now)
                case messages.Prefill(transfer):
                    self._carry_out(self._machine.handle(peer, messages.Failed(transfer, str(error)), now), now)
                    self._carry_out(self._machine.handle(peer, messages.Retired(transfer), now), now)
                case _:
                    self._carry_out(self._machine.peer_lost(peer, str(error), now), now)
        except KvbatonError as error:
            # a message of ours that cannot travel leaves the peer ignorant for ever: that is a loss
            _log.error("a %s cannot be sent to %s: %s", type(message).__name__, peer, error)
            self._carry_out(self._machine.peer_lost(peer, str(error), now), now)

    def _restart(self, name: str, now: float) -> None:
        """A stage that died is started again under a new epoch (C6.4: its last process was joined)."""
        if self._closing:
            return
        spec = next(spec for spec in self._specs if spec.name == name)
        self._progress(f"starting {name} again")
        mode = self._settings.recovery.mode
        _log.warning("%s is started again; %s (recovery.mode = %s)", name, _BEGINS_AGAIN[mode], mode)
        try:
            handle = self._launcher.start(spec)
        except KvbatonError as error:
            _log.error("%s cannot be started again: %s", name, error)
            self._carry_out(self._machine.start_failed(name, now), now)
            return
        self._counts["restarts"] += 1
        self._handles[handle.peer] = handle
        self._starting[handle.peer] = now + self._settings.deadline.startup

    def _forget_handle(self, handle: StageHandle) -> None:
        """Of earlier lives the last one is kept, which says how the stage ended (T12)."""
        lives = [peer for peer in self._handles if peer.name == handle.peer.name]
        for peer in lives[:-2]:
            if peer in self._gone:
                del self._handles[peer]
                self._gone.discard(peer)
                self._expected.discard(peer)
                self._last_words.pop(peer, None)
                self._channels.remove(peer)

    def _kill(self, peer: PeerId, cause: str) -> None:
        handle = self._handles.get(peer)
        if handle is not None and peer not in self._gone:  # else its end was seen: nobody waits for it (C1.3)
            self._dying.setdefault(peer, time.monotonic() + self._settings.deadline.startup)
        self._hooks.tell("kvbaton_peer_lost", peer=peer, cause=cause)
        if handle is not None and handle.exit_status() is None:
            handle.kill()

    def _tell(
        self, key: RequestKey, transfer: TransferId | None, event: fx.Placed | fx.Tokens | fx.Requeued | fx.Ended,
        now: float
    ) -> None:  # fmt: skip
        tracked = self._tracked.get(key)
        if tracked is None:
            return
        match event:
            case fx.Placed(prefill, decode):
                tracked.transfer, tracked.prefill, tracked.decode = transfer, prefill.name, decode.name
            case fx.Tokens(_, token_ids, exit_depths):
                tracked.milestones.setdefault("first_token", now - tracked.added)
                tracked.tokens += token_ids
                tracked.depths += exit_depths
                self._deliver(RequestOutput(key, token_ids, exit_depths))
            case fx.Requeued(cause):
                tracked.requeued += 1
                self._counts["requeued"] += 1
                _log.info(
                    "request %s, transfer %s: waits again: %s", key, transfer, cause,
                    extra={"request": key, "transfer": transfer},
                )  # fmt: skip
            case fx.Ended():
                tracked.milestones.setdefault(Milestones.FINISHED, now - tracked.added)
                self._end(key, transfer, event)

    def _end(self, key: RequestKey, transfer: TransferId | None, event: fx.Ended) -> None:
        tracked = self._tracked.pop(key)
        if len(self._due) > 64 + 2 * len(self._tracked):  # T12
            numbers = {live.number for live in self._tracked.values()}
            self._due = [item for item in self._due if item[1] in numbers]
            heapq.heapify(self._due)
        reason = "failed"
        error: KvbatonError | None = None
        if event.ending is fx.Ending.FINISHED and event.reason is not None:
            reason = event.reason.value
        elif event.ending is fx.Ending.CANCELLED and not tracked.overdue:
            reason = "cancelled"
            error = RequestCancelled(f"request {key}: {event.cause}", request=key, cause=event.cause)
        else:
            transfer = transfer or tracked.transfer  # one that waited again is held for by its last generation
            out = self._machine.credits_out(transfer) if transfer else (False, False)
            retained = tuple(name for name, held in zip((tracked.prefill, tracked.decode), out, strict=True) if held)
            held = f" (memory is held on {' and '.join(retained)} until it is proven quiet)" if retained else ""
            kind = RequestOverdue if tracked.overdue else TransferFailed
            error = kind(
                f"request {key}{f', transfer {transfer}' if transfer else ''} failed{held}: {event.cause}",
                request=key, transfer=transfer, cause=event.cause, retained=retained,
                stage=event.peer.name if event.peer else None,
            )  # fmt: skip
            self._tell_fault(error, transfer, key, event.peer)
        if tracked.transfer is not None and self._machine.phase(tracked.transfer) is not None:
            self._retiring[tracked.transfer] = tracked
            if len(self._retiring) > 64 + 2 * len(self._machine):  # T12: what a fence ended has said no word of it
                for transfer in [t for t in self._retiring if self._machine.phase(t) is None]:
                    del self._retiring[transfer]
        record = RequestRecord(
            key, tracked.transfer, len(tracked.request.prompt), tuple(tracked.tokens), tuple(tracked.depths), reason,
            error, tracked.chunks, tracked.segments, tracked.nbytes, tracked.prefix_prefill, tracked.prefix_decode,
            tracked.prefill, tracked.decode, tracked.milestones, tracked.requeued,
        )  # fmt: skip
        if _log.isEnabledFor(logging.DEBUG):
            tracked.logged.add(Milestones.FINISHED)
            seconds = time.monotonic() - tracked.added
            _log.debug(
                "request %s, transfer %s: finished as %s, after %.6f s", key, tracked.transfer, reason, seconds,
                extra={"request": key, "transfer": tracked.transfer, "milestone": Milestones.FINISHED,
                       "stage": "coordinator", "seconds": round(seconds, 6), "outcome": reason},
            )  # fmt: skip
        self._hooks.tell("kvbaton_request_finished", record=record)
        self._deliver(RequestOutput(key, (), (), True, reason, error, record))

    def _tell_delivered(self) -> None:
        """Whoever waits for outputs is woken once for what has come together: a thread that is woken for each fights
        this one for the interpreter.
        """
        if self._untold:
            self._untold = False
            self.delivered()

    def _deliver(self, output: RequestOutput) -> None:
        self._untold = True
        try:
            self.deliver(output)
        except Exception as error:  # a caller's sink must not take everybody else's requests with it
            _log.error("request %s: its reader failed: %s: %s", output.request_id, type(error).__name__, error)

    def _reached(self, reached: fx.Reached, now: float) -> None:
        stage = reached.peer.name if reached.peer else "coordinator"
        if self._hooks.heard("kvbaton_milestone"):
            self._hooks.tell(
                "kvbaton_milestone", transfer=reached.transfer, request=reached.key, stage=stage,
                milestone=reached.milestone, at=now, peer=reached.peer, prefix=reached.prefix,
            )  # fmt: skip
        tracked = self._tracked.get(reached.key)
        if tracked is None or tracked.transfer != reached.transfer:
            tracked = self._retiring.get(reached.transfer)
            if tracked is None:
                return  # an earlier generation of it
            if self._machine.phase(reached.transfer) is None:
                del self._retiring[reached.transfer]  # this was its last word
        at = now - tracked.added
        tracked.milestones[reached.milestone] = at
        if reached.milestone == Milestones.COMMITTED:
            tracked.chunks, tracked.segments, tracked.nbytes = reached.chunks, reached.segments, reached.nbytes
            tracked.prefix_prefill = reached.prefix
        if reached.milestone == Milestones.PLACED:
            tracked.timed.clear()
            tracked.logged.clear()
            tracked.sent[tracked.decode] = at
        elif reached.milestone == Milestones.RESERVED:
            tracked.sent[tracked.prefill] = at
            tracked.prefix_decode = reached.prefix
        start = tracked.sent.get(stage)
        if start is not None:
            for name, seconds in reached.timings.items():
                # the stage's own word, but never later than we heard it first; the last handle is told of twice
                if name not in tracked.timed or name == HANDLE_DONE:
                    tracked.timed.add(name)
                    tracked.milestones[name] = min(start + seconds, at)
        if _log.isEnabledFor(logging.DEBUG):
            self._log_milestones(reached, tracked, stage)

    def _log_milestones(self, reached: fx.Reached, tracked: _Tracked, stage: str) -> None:
        """A line for each milestone that is new, with its ids: the one that was reached, and those that the stage has
        told of along with it.
        """
        new = {name: tracked.milestones[name] for name in (reached.milestone, *reached.timings)
               if name in tracked.milestones and name not in tracked.logged}  # fmt: skip
        # what a stage tells of at once is placed by its own clock, and bounded by ours: not in order
        for name, seconds in sorted(new.items(), key=lambda item: _ORDER.get(item[0], 0)):
            tracked.logged.add(name)
            _log.debug(
                "request %s, transfer %s: %s, by %s, after %.6f s",
                reached.key, reached.transfer, name, stage, seconds,
                extra={"request": reached.key, "transfer": reached.transfer, "milestone": name, "stage": stage,
                       "seconds": round(seconds, 6)},
            )  # fmt: skip

    def _choose_pair(self, key: RequestKey, request: Request, pairs: Sequence[Pair]) -> Pair | None:
        if self._hooks.heard("kvbaton_choose_pair"):
            views = {view.peer: view for view in self._machine.peers()}
            loads = {
                peer: StageLoad(
                    peer.name, v.transfers, v.blocks - v.blocks_out, v.slots - v.slots_out, peer.epoch, v.load,
                    v.block_tokens,
                )
                for peer, v in views.items()
            }  # fmt: skip
            prefill = [loads[p] for p in dict.fromkeys(pair.prefill for pair in pairs)]
            decode = [loads[d] for d in dict.fromkeys(pair.decode for pair in pairs)]
            names = [(pair.prefill.name, pair.decode.name) for pair in pairs]
            choice = self._hooks.choose_pair(key, request.prompt, prefill, decode, names)
            for pair in pairs:
                if choice == (pair.prefill.name, pair.decode.name):
                    return pair
        return least_loaded(key, request, pairs)

    def _oldest(self) -> dict[str, float]:
        """Seconds since the oldest request was added, by whether it waits or is placed, and since the end of the oldest
        one whose memory is still to be given back.
        """
        now = time.monotonic()
        waiting = running = draining = now
        for tracked in self._tracked.values():
            if tracked.transfer is None:
                waiting = min(waiting, tracked.added)
            else:
                running = min(running, tracked.added)
        for tracked in self._retiring.values():
            if self._machine.phase(cast("TransferId", tracked.transfer)) is not None:
                draining = min(draining, tracked.added + tracked.milestones.get(Milestones.FINISHED, 0.0))
        return {"waiting": now - waiting, "running": now - running, "draining": now - draining}

    def _books(self) -> dict[str, Any]:
        dropped = self._channels.statistics().dropped
        views = self._machine.peers()
        with self._lock:
            refused = dict(self._refused)
        return {
            "live": self._machine.live,
            "waiting": self._machine.waiting,
            "transfers": len(self._machine),
            "counts": dict(self._counts),
            "refused": refused,
            "oldest": self._oldest(),
            "unfenced": sum(view.status is PeerStatus.LOST for view in views),
            "dropped": {f"{family}_{reason}": count for (family, reason), count in dropped.items()},
            "routing": {} if self._policy is None else dict(self._policy.statistics()),
            "credits": {
                view.peer.name: {
                    "blocks_out": view.blocks_out,
                    "blocks": view.blocks,
                    "slots_out": view.slots_out,
                    "slots": view.slots,
                    "repeated_returns": view.repeated_returns,
                    "transfers": view.transfers,
                    "status": view.status.value,
                }
                for view in views
            },
        }  # fmt: skip


def _refusal(error: RequestRefused | RuntimeClosed) -> str:
    """Why a request was not taken, out of a bounded set."""
    match error:
        case RuntimeClosed():
            return "closed"
        case DuplicateRequest():
            return "duplicate"
        case PromptTooLong():
            return "too_long"
        case _:
            return "queue_full" if error.facts.get("reason") == "too many wait" else "invalid"


def _recovery(settings: Settings) -> Recovery:
    recovery = settings.recovery
    if recovery.mode == "off":
        return FAIL_CLOSED
    # on another host nobody is started from here: what serves there is not to be ended for a connection's sake
    here = settings.stages.launch != "remote"
    return Recovery(recovery.attempts, recovery.mode == "recompute", recovery.restarts, mend_idle=here)


def _patience(timeout: object) -> float | None:
    """Looked at before anything is done."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout >= 0:
        raise LocalProtocolError(f"timeout is {timeout!r}; it is a number of seconds, or None: as long as it takes")
    return timeout if timeout < threading.TIMEOUT_MAX else None


def _within(future: concurrent.futures.Future[bool], timeout: float | None) -> bool:
    """The answer; False where there is none in time."""
    try:
        return future.result(timeout)
    except concurrent.futures.TimeoutError:
        # the loop may be about to answer: who cancels first decides, and an answer that came first counts
        return False if future.cancel() else future.result()


def _answer(future: concurrent.futures.Future[bool], result: bool) -> None:
    """Answer who waits, unless it has given up: it may do so at any moment until the future says that it runs."""
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _pinned(spec: StageSpec) -> StageSpec:
    """The same stage for a process of its own, in which its device comes first."""
    device: int | None = spec.settings["device"]
    if device is None:
        return spec
    environment, number = pin(device, os.environ)
    return msgspec.structs.replace(spec, environment=environment, settings={**spec.settings, "device": number})
