"""A stage: machine, connector and engine joined, on the pump thread.

:class:`Stage` is what prefill and decode stages share: carrying out a machine's effects, connecting to peers,
watching device events, answering generic control, and ending.  It owns no thread: :class:`~kvbaton.stage.pump.Pump`
drives
``advance()``, and so can a test.  The engine is reached only through commands to its loop and heard only through
reports (see :mod:`kvbaton.stage.engine_loop`).

A stage has two honest ends: *stopped* (told to, drained, closed) and *orphaned* (its coordinator is gone, C6.6).
Either is bounded by the shutdown deadline, and what was still held then is named in :attr:`Stage.outcome`.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvbaton import messages, tracing
from kvbaton.connector import DeviceEvent, Endpoint, PeerEvent, Progress
from kvbaton.control import StageChannel
from kvbaton.durations import Durations
from kvbaton.engine import Role, StageEngine
from kvbaton.errors import KvbatonError, MessageError, QuarantineFull
from kvbaton.guard import GuardedConnector, GuardProgress
from kvbaton.handoff import effects as fx
from kvbaton.handoff.destination import Destination
from kvbaton.handoff.source import Source
from kvbaton.identity import PeerId, TransferId
from kvbaton.reservation import Capacity
from kvbaton.stage import engine_loop as loop
from kvbaton.stage.profiling import ProfileSessions
from kvbaton.stage.tracing import Recorder, TraceSession

_log = logging.getLogger(__name__)

#: Stage-local timings also carry when the last handle was seen terminal (C4's HANDLE_DONE), which no machine needs.
HANDLE_DONE = "handle_done"


@dataclass(frozen=True, slots=True)
class StageOutcome:
    """How a stage ended: ``status`` 0 as ordered, 1 not; ``reason`` in words, naming what was still held.

    ``exposed``: a transport, here or at a writer, may still touch the engine's memory.  Then nothing was deregistered,
    and the memory must stay until the process has ended (C5.4, C6.4).
    """

    status: int
    reason: str
    exposed: bool = False


class Stage(ABC):
    """The common part.  ``post`` puts a command into the engine loop's inbox; ``capacity`` is the engine's.

    Threading: everything but :meth:`report` and :meth:`wait`'s waker belongs to the thread that calls :meth:`advance`.
    """

    role: Role
    machine: Source | Destination

    def __init__(
        self,
        *,
        peer: PeerId,
        guard: GuardedConnector,
        channel: StageChannel,
        capacity: Capacity,
        post: Callable[[loop.Command], None],
        clock: Callable[[], float],
        shutdown_deadline: float,
    ) -> None:
        self.peer = peer
        self.guard = guard
        self.channel = channel
        self.capacity = capacity
        self.outcome: StageOutcome | None = None
        self._post_command = post
        self._clock = clock
        self._shutdown_deadline = shutdown_deadline
        self._reports: deque[loop.Report | _Answered] = deque()
        #: Seconds that the engine's thread has been in one step or command; set where the two are joined.
        self.engine_age: Callable[[], float] = lambda: 0.0
        #: Where the engine's thread notes what it does, if anywhere; set where the two are joined.
        self.record_engine: Callable[[Recorder | None], None] = lambda recorder: None
        #: What is timed here, by name: chunks here, the engine's steps and the pump's passes where those are joined.
        self.durations: dict[str, Durations] = {"chunk": guard.chunk_seconds}
        #: The pump waits for the channel, or is about to.
        self._asleep = False
        #: The last pass submitted something, or heard from the transport what may not be all.
        self.flowing = False
        #: Commands that nobody waits for: they go with the next one, or at the end of a pass.
        self._put_off: deque[loop.Command] = deque()
        #: Effects that are still to be carried out, and whether that is being done.
        self._line: deque[fx.Effect] = deque()
        self._carrying_out = False
        self._greeted = False
        self._stop_by: float | None = None
        self._orphaned = False
        self._told_to_stop = False
        self._fatal: str | None = None
        self._engine_broken = False
        self._endpoints: dict[PeerId, Endpoint] = {}
        #: Freed in the machine, not yet released by the engine; with the Retired that waits for it.
        self._releasing: dict[TransferId, messages.Retired | None] = {}
        self._quiet: list[tuple[DeviceEvent, TransferId]] = []
        self._began: dict[TransferId, float] = {}
        self._timings: dict[TransferId, dict[str, float]] = {}
        self._counts: Counter[str] = Counter()
        self._profiles = ProfileSessions(peer, self._ask_engine, self._reply, clock)
        self._trace = TraceSession(peer, self._record, self._reply, clock)
        #: Where the pump's thread notes what it does; None: nobody wants to know.
        self._recorder: Recorder | None = None

    # -- driven by the pump ------------------------------------------------------------------------------------------

    def advance(self) -> bool:
        """One pass: messages, reports, device events, transport; whether anything happened."""
        if not self._greeted:
            self._greeted = True
            self.channel.send(messages.Hello(self.peer, self.role, self.capacity, self.guard.endpoint().encode()))
        busy = False
        for message in self.channel.receive():
            busy = True
            self._on_message(message)
        if self.channel.lost is not None and not self._orphaned:
            busy = self._orphaned = True
            self._begin_stop()
            self._run(self._coordinator_gone())
        while self._reports:
            busy = True
            self._on_report(self._reports.popleft())
        if self._quiet:
            busy = self._check_quiet() or busy
        busy = self._profiles.expire() or busy
        self.channel.flush()  # what follows may copy bytes, for long
        flowing = self._progress()
        self.channel.flush()
        progress = self.guard.poll()
        if progress:
            busy = True
            self._on_progress(progress)
            self.channel.flush()
            flowing = flowing or self._more_may_come()
        self.flowing = flowing
        self._command()
        self._end_if_done()
        return busy or flowing

    @property
    def live(self) -> bool:
        return self.guard.needs_polling or bool(self._quiet) or self._stop_by is not None or self._has_pending()

    @property
    def urgent(self) -> bool:
        return self.guard.awaits or bool(self._quiet) or self._stop_by is not None or self._has_pending()

    @property
    def imminent(self) -> bool:
        return True

    @property
    def ended(self) -> bool:
        return self.outcome is not None

    @property
    def counts(self) -> Mapping[str, int]:
        """Faults, ignored events and ``violations_<clause>`` so far."""
        return self._counts

    def wait(self, timeout: float) -> None:
        """Where the next event will most likely come from the transport, on that: a message then waits for as long."""
        if self._expects_transport():
            if not self._reports:
                self.guard.wait(timeout)
            return
        # first the flag, then the look: the engine's thread reports first and then looks at the flag, so whichever is
        # later, the report is seen here or ends the wait
        self._asleep = True
        try:
            if not self._reports:
                self.channel.wait(timeout)
        finally:
            self._asleep = False

    def report(self, report: loop.Report | _Answered) -> None:
        """From the engine thread: lock-free, wakes the pump."""
        self._reports.append(report)
        # not asleep: it is seen before the next wait, and a ring would end that for nothing; nobody waits to hear of an
        # import, and a pump that is up takes the interpreter from the step that follows it
        if self._asleep and type(report) is not loop.Imported:
            self.channel.wake()

    # -- what the roles add ------------------------------------------------------------------------------------------

    @abstractmethod
    def _on_transfer(self, message: messages.TransferMessage) -> Iterable[fx.Effect]:
        """A transfer message from the coordinator."""

    @abstractmethod
    def _on_engine(self, report: loop.Report) -> Iterable[fx.Effect]:
        """A report that only this role has."""

    @abstractmethod
    def _on_role_effect(self, effect: fx.Effect) -> None:
        """An effect that only this role's machine has."""

    @abstractmethod
    def _coordinator_gone(self) -> Iterable[fx.Effect]:
        """The coordinator will not answer any more (C6.6)."""

    @abstractmethod
    def _on_suspended(self, transfer: TransferId) -> Iterable[fx.Effect]:
        """The engine computes nothing for it and its device is quiet."""

    @abstractmethod
    def _on_events(self, progress: Progress) -> None:
        """Completions or receipts."""

    @abstractmethod
    def _peer_announced(self, endpoint: Endpoint) -> None:
        """A peer is about to be connected."""

    @abstractmethod
    def _peer_gone(self, peer: PeerId) -> None:
        """A peer's connection is down."""

    @abstractmethod
    def _forget(self, transfer: TransferId) -> None:
        """The engine holds nothing of it any more."""

    def _progress(self) -> bool:
        """Role-specific work of each pass."""
        return False

    def _has_pending(self) -> bool:
        return False

    def _expects_transport(self) -> bool:
        """Whether the pump's short pauses are spent on the connector's ``wait`` rather than on the channel's."""
        return False

    def _more_may_come(self) -> bool:
        """Whether the transport, which has just told of something, may have more to tell at once."""
        return True

    def _settled(self) -> bool:
        """Whether nothing of this role keeps the stage from ending."""
        return True

    def _leased(self, transfer: TransferId) -> bool:
        """Of a transfer that is known here: whether its memory is held for what may still be read or written."""
        return True

    def _oldest_lease(self) -> float:
        """Seconds that the oldest lease has lasted; 0 where there is none."""
        began = min((began for transfer, began in self._began.items() if self._leased(transfer)), default=None)
        return 0.0 if began is None else self._clock() - began

    def _role_figures(self) -> Mapping[str, float]:
        """What only this role counts."""
        return {}

    @abstractmethod
    def _exposed(self) -> bool:
        """Whether a transport, here or at a writer, may still touch memory of this stage."""

    # -- messages ----------------------------------------------------------------------------------------------------

    def _on_message(self, message: msgspec.Struct) -> None:
        match message:
            case messages.Connect(endpoint=data):
                self._connect(data)
            case messages.Disconnect(peer=peer):
                self._run(self.machine.disconnect(peer))
            case messages.Stop():
                self._told_to_stop = True
                self._begin_stop()
                self._run(self.machine.stop())
            case messages.Call():
                self._call(message)
            case messages.Reserve(transfer=transfer) | messages.Prefill(transfer=transfer):
                self._began.setdefault(transfer, self._clock())
                self._timings.setdefault(transfer, {})
                if self._recorder is not None:
                    self._recorder.pump.note(tracing.Told(self._began[transfer], transfer))
                self._run(self._on_transfer(message))
                if self.machine.phase(transfer) is None and transfer not in self._releasing:
                    self._drop_timings(transfer)
            case _:
                self._run(self._on_transfer(message))  # type: ignore[arg-type]

    def _connect(self, data: bytes) -> None:
        try:
            endpoint = Endpoint.decode(data)
        except KvbatonError as error:
            self._counts["endpoint_malformed"] += 1
            _log.error("%s: %s", self.peer, error)
            return
        try:
            self._peer_announced(endpoint)
            self.guard.connect(endpoint)
        except KvbatonError as error:
            # nothing was connected, so nothing of that peer can be written here
            self._run(self.machine.peer_down(endpoint.peer, True, str(error)))

    # -- reports -----------------------------------------------------------------------------------------------------

    def _on_report(self, report: loop.Report | _Answered) -> None:
        match report:
            case loop.Suspended(transfer, quiet):
                if quiet is None or quiet.query():
                    self._run(self._on_suspended(transfer))
                else:
                    self._quiet.append((quiet, transfer))
            case loop.Released(transfer):
                self._released(transfer)
            case loop.CommandFailed(transfer, error):
                self._fail(transfer, error)
            case loop.EngineFailed(error):
                self._engine_broken = True
                self._die(f"C6.3: the engine of {self.peer} failed: {type(error).__name__}: {error}")
            case _Answered(then, answer):
                then(answer)
            case _:
                self._run(self._on_engine(report))

    def _released(self, transfer: TransferId) -> None:
        retired = self._releasing.pop(transfer, None)
        self._forget(transfer)
        if retired is not None:
            self._send(retired)

    def _check_quiet(self) -> bool:
        done = [item for item in self._quiet if item[0].query()]
        for item in done:
            self._quiet.remove(item)
            self._run(self._on_suspended(item[1]))
        return bool(done)

    # -- transport ---------------------------------------------------------------------------------------------------

    def _on_progress(self, progress: Progress) -> None:
        for event in progress.peers:
            self._on_peer(event)
        self._on_events(progress)
        for fault in progress.faults if isinstance(progress, GuardProgress) else ():
            self._counts["faults"] += 1
            _log.error("%s: %s", self.peer, fault)
            if isinstance(fault, QuarantineFull):
                self._die(str(fault))

    def _on_peer(self, event: PeerEvent) -> None:
        if event.up:
            self._run(self.machine.peer_up(event.peer))
        else:
            self._peer_gone(event.peer)
            self._run(self.machine.peer_down(event.peer, event.quiet, "" if event.error is None else str(event.error)))

    # -- effects -----------------------------------------------------------------------------------------------------

    def _run(self, effects: Iterable[fx.Effect]) -> None:
        """Carry out effects in order; what that brings about goes to the end of the line."""
        self._line.extend(effects)
        if self._carrying_out:
            return
        self._carrying_out = True
        try:
            while self._line:
                self._carry_out(self._line.popleft())
        finally:
            self._carrying_out = False

    def _carry_out(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Send(message):
                self._send(message)
            case fx.Milestone(transfer, name):
                self._mark(transfer, name)
            case fx.Suspend(transfer):
                if self._engine_broken:
                    self._run(self._on_suspended(transfer))
                else:
                    self._command(loop.Suspend(transfer))
            case fx.Free(transfer):
                self.channel.flush()  # whoever waits for the request's end does not wait for its memory
                self.guard.forget(transfer)
                self._releasing[transfer] = None
                self._command(loop.Release(transfer))
            case fx.DisconnectPeer(peer):
                self.guard.fenced(peer)
                self.guard.disconnect(peer)
            case fx.Fault(transfer, cause, retained):
                self._counts["faults"] += 1
                # the coordinator hears of it, and the caller from there
                held = "; memory is held until it is proven quiet" if retained else ""
                about = f" (transfer {transfer})" if transfer else ""
                _log.info("%s: %s%s%s", self.peer, cause, about, held, extra=self._about(transfer))
            case fx.Ignored(transfer, event, reason):
                self._counts["ignored"] += 1
                if _log.isEnabledFor(logging.DEBUG):
                    _log.debug("%s: ignored %s: %s", self.peer, event, reason, extra=self._about(transfer))
            case fx.Violation(clause, transfer, peer, text):
                self._counts[f"violations_{clause}"] += 1
                _log.error(
                    "%s: %s violation by %s: %s (transfer %s)", self.peer, clause, peer or "C", text, transfer,
                    extra={**self._about(transfer), "clause": clause},
                )  # fmt: skip
            case _:
                self._on_role_effect(effect)

    def _about(self, transfer: TransferId | None) -> dict[str, str | None]:
        """What a log record is about."""
        return {"stage": self.peer.name, "transfer": transfer}

    def _send(self, message: messages.Message) -> None:
        match message:
            case messages.Retired(transfer):
                if transfer in self._releasing:
                    self._releasing[transfer] = message  # RETIRED is a side that *has* released everything (C4)
                    return
                message = msgspec.structs.replace(message, timings=self._timings.get(transfer, {}))
                self._drop_timings(transfer)
            case messages.Rejected(transfer):
                self._drop_timings(transfer)
                self._forget(transfer)
            case messages.Received(transfer) | messages.Activated(transfer):
                message = msgspec.structs.replace(message, timings=dict(self._timings.get(transfer, {})))
            case messages.Commit(transfer):
                message = self._committed(message)
            case _:
                pass
        try:
            self.channel.hold(message)
        except MessageError as error:
            about: TransferId | None = getattr(message, "transfer", None)
            if about is None or isinstance(message, messages.Failed | messages.Retired):
                self._die(str(error))
            else:
                self._fail(about, error)

    def _fail(self, transfer: TransferId, error: Exception) -> None:
        """Something went wrong that is about one transfer only."""
        self._run(self.machine.engine_failed(transfer, f"C6.3: {type(error).__name__}: {error}"))

    def _committed(self, message: messages.Commit) -> messages.Commit:
        return msgspec.structs.replace(message, timings=dict(self._timings.get(message.transfer, {})))

    def _mark(self, transfer: TransferId, name: str) -> None:
        timings = self._timings.get(transfer)
        if timings is not None:
            now = self._clock()
            timings[name] = now - self._began[transfer]
            if self._recorder is not None:
                self._recorder.pump.note(tracing.Marked(now, transfer, name))

    def _drop_timings(self, transfer: TransferId) -> None:
        self._timings.pop(transfer, None)
        self._began.pop(transfer, None)

    def _command(self, *commands: loop.Command) -> None:
        """To the engine's thread, in order, after what was put off: to wake it costs the time of a message."""
        while self._put_off:
            self._post_command(self._put_off.popleft())
        for command in commands:
            self._post_command(command)

    # -- generic control ---------------------------------------------------------------------------------------------

    def _call(self, call: messages.Call) -> None:
        """C9.2: statistics, health and profiling; disturbs no transfer."""
        match call.method:
            case "statistics":
                self._ask_engine(lambda engine: engine.statistics(), partial(self._answer_statistics, call))
            case "health":
                healthy = not self._engine_broken and self._fatal is None
                # the pump's word: an engine may hang
                self._reply(call, {"healthy": healthy, "step_seconds": self.engine_age()})
            case "profile_start":
                self._profiles.start(call)
            case "profile_stop":
                self._profiles.stop(call)
            case "trace_start":
                self._trace.start(call)
            case "trace_read":
                self._trace.read(call)
            case "trace_stop":
                self._trace.stop(call)
            case method:
                known = "statistics, health, profile_start, profile_stop, trace_start, trace_read and trace_stop"
                self._reply(call, None, f"C9.2: no method {method!r}; there are {known}")

    def _ask_engine(self, question: Callable[[StageEngine], object], then: Callable[[Any], None]) -> None:
        """Put a question to the engine's thread; ``then`` gets its answer, or the exception in its place, on this
        one.
        """

        def answer(found: object) -> None:
            self.report(_Answered(then, found))

        self._command(loop.Query(question, answer))

    def _reply(self, call: messages.Call, result: Any, error: str | None = None) -> None:
        try:
            self.channel.send(messages.Reply(call.control_id, call.session_id, result, error))
        except MessageError as failure:  # too large, and not sent: the caller hears why (C9.2)
            self.channel.send(messages.Reply(call.control_id, call.session_id, None, str(failure)))

    def _record(self, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self.record_engine(recorder)

    def _answer_statistics(self, call: messages.Call, engine: Mapping[str, float] | Exception) -> None:
        """The engine's figures have come; the others are the pump's own, and are read on its thread."""
        if isinstance(engine, Exception):
            self._reply(call, None, f"{type(engine).__name__}: {engine}")
            return
        channel = self.channel.statistics()
        dropped = {f"dropped_{family}_{reason}": count for (family, reason), count in channel.dropped.items()}
        figures = {
            "engine": dict(engine),
            "transport": dict(self.guard.statistics()),
            "stage": {
                "transfers": len(self.machine),
                "oldest_lease_seconds": self._oldest_lease(),
                **self._counts,
                **dropped,
                **self._role_figures(),
            },
            "durations": {name: times.figures() for name, times in self.durations.items()},
        }
        self._reply(call, figures)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _begin_stop(self) -> None:
        if self._stop_by is None:
            self._stop_by = self._clock() + self._shutdown_deadline
            self._profiles.end()

    def _die(self, cause: str) -> None:
        """The stage must not go on: tell C, drain what can be drained, end with status 1."""
        if self._fatal is None:
            self._fatal = cause
            self._run(self.machine.fatal(cause))
            self._begin_stop()
            self._run(self.machine.stop())

    def pump_failed(self, error: BaseException) -> None:
        """An exception escaped a pass: nothing can be proven any more, so the process must end and be joined."""
        _log.critical("%s: the pump failed", self.peer, exc_info=error)
        self.outcome = StageOutcome(1, f"the pump failed: {type(error).__name__}: {error}", exposed=True)
        self._profiles.end()
        self._command(loop.Quit())

    def _end_if_done(self) -> None:
        if self._stop_by is None:
            return
        drained = self.machine.drained and not self._releasing and not self._quiet and self._settled()
        late = self._clock() >= self._stop_by
        if not drained and not late:
            return
        orphan = self._orphaned and not self._told_to_stop
        why = self._fatal or ("the coordinator is gone" if orphan else "stopped")
        if late and not drained:
            held = ", ".join(f"{t} {p.name}" for t, p in self.machine.transfers().items()) or "releases by the engine"
            why = f"{why}; shutdown deadline of {self._shutdown_deadline:g} s passed, still held: {held}"
        status = 0 if drained and self._fatal is None else 1
        exposed = self._exposed()
        if not exposed:
            try:
                self.guard.close()
            except KvbatonError as error:
                status, why = 1, f"{why}; closing the transport: {error}"
        self.outcome = StageOutcome(status, why, exposed)
        self._command(loop.Quit())


@dataclass(frozen=True, slots=True)
class _Answered:
    """What the engine's thread has answered to a question, or why it could not, and who wants to know."""

    then: Callable[[Any], None]
    answer: Any
