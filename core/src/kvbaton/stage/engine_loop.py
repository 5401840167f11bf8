"""The engine thread of a stage: the one place from which an engine is called.

The pump posts commands into one inbox; the loop carries them out between steps, in order, and reports back.  The
order is what makes cross-thread ownership simple: a block that is released and then promised again is released first
(C5). The loop blocks on its inbox when the engine has nothing to do.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence

import msgspec

from kvbaton import tracing
from kvbaton.connector import DeviceEvent
from kvbaton.durations import Durations
from kvbaton.engine import Admission, ComputedRange, StageEngine, StepOutput
from kvbaton.identity import TransferId
from kvbaton.reservation import Reservation
from kvbaton.stage.tracing import Recorder


class _Word(msgspec.Struct, frozen=True, gc=False):
    """What one of the two threads says to the other; immutable, and cheap to make: a hand-off takes some twenty.

    Where a word holds a function or an exception the collector looks into it, because these may lead back to the stage:
    one that is left in a queue at the end would keep its stage and engine for ever (T12).
    """


# -- commands: pump -> engine ----------------------------------------------------------------------------------------


class Admit(_Word, frozen=True, gc=False):
    admission: Admission


class Import(_Word, frozen=True, gc=True):
    """``begin(transfer)`` is asked right before: the transfer may have ended since (C1.3)."""

    transfer: TransferId
    valid: int
    begin: Callable[[TransferId], bool]


class Suspend(_Word, frozen=True, gc=False):
    transfer: TransferId


class ReleaseCompute(_Word, frozen=True, gc=False):
    transfer: TransferId


class Release(_Word, frozen=True, gc=False):
    transfer: TransferId


class Query(_Word, frozen=True, gc=True):
    """Run ``question`` on the engine thread and report its answer: statistics, balance checks."""

    question: Callable[[StageEngine], object]
    answer: Callable[[object], None]


class Nudge(_Word, frozen=True, gc=False):
    """Back-pressure has eased: ask the engine again whether it has work."""


class Quit(_Word, frozen=True, gc=False):
    """Leave the loop; the engine is closed by whoever opened it."""


Command = Admit | Import | Suspend | ReleaseCompute | Release | Query | Nudge | Quit

# -- reports: engine -> pump -----------------------------------------------------------------------------------------


class Computed(_Word, frozen=True, gc=False):
    range: ComputedRange


class Reserved(_Word, frozen=True, gc=False):
    reservation: Reservation


class Refused(_Word, frozen=True, gc=False):
    transfer: TransferId
    reason: str
    retry: bool


class Imported(_Word, frozen=True, gc=False):
    transfer: TransferId


class Activated(_Word, frozen=True, gc=False):
    transfer: TransferId


class Produced(_Word, frozen=True, gc=False):
    outputs: tuple[StepOutput, ...]


class Suspended(_Word, frozen=True, gc=False):
    """Nothing more is computed for it; ``quiet`` completes with the last device work (None: quiet already)."""

    transfer: TransferId
    quiet: DeviceEvent | None


class Released(_Word, frozen=True, gc=False):
    """The engine holds nothing of it any more."""

    transfer: TransferId


class CommandFailed(_Word, frozen=True, gc=True):
    """A command about one transfer raised; the engine goes on."""

    transfer: TransferId
    error: Exception


class EngineFailed(_Word, frozen=True, gc=True):
    """A step raised, which engines promise not to do: the stage must not go on."""

    error: BaseException


Report = (
    Computed
    | Reserved
    | Refused
    | Imported
    | Activated
    | Produced
    | Suspended
    | Released
    | CommandFailed
    | EngineFailed
)


class _Callbacks:
    """:class:`~kvbaton.engine.StageCallbacks`: turns calls into reports; lock-free."""

    def __init__(self, report: Callable[[Report], None], can_schedule: Callable[[TransferId, int], bool]) -> None:
        self._report = report
        self._can_schedule = can_schedule
        #: Ranges reported since it was emptied; None: nobody wants to know.
        self.computed: list[tuple[TransferId, int, int]] | None = None

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        return self._can_schedule(transfer, tokens)

    def prefill_submitted(self, computed: ComputedRange) -> None:
        noted = self.computed
        if noted is not None:
            noted.append((computed.transfer, computed.start, computed.end))
        self._report(Computed(computed))

    def reserved(self, reservation: Reservation) -> None:
        self._report(Reserved(reservation))

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> None:
        self._report(Refused(transfer, reason, retry))

    def activated(self, transfer: TransferId) -> None:
        self._report(Activated(transfer))


class EngineLoop:
    """Runs an engine on the calling thread until :class:`Quit`.

    ``report`` and ``can_schedule`` are called on the engine thread and must not block.  ``post`` may be called from any
    thread.  A step that raises ends the loop with :class:`EngineFailed`; commands are still carried out until
    ``Quit``, so that the pump can drain what the wire may touch.
    """

    def __init__(
        self,
        engine: StageEngine,
        report: Callable[[Report], None],
        can_schedule: Callable[[TransferId, int], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._report = report
        self._clock = clock
        #: When the engine was last called; None while the loop waits for a command.
        self._since: float | None = None
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._broken = False
        #: What a step of the engine takes.
        self.steps = Durations()
        #: Where the loop notes what it does; None: nobody wants to know.
        self._recorder: Recorder | None = None
        self._callbacks = _Callbacks(report, can_schedule)
        engine.attach(self._callbacks)

    def post(self, command: Command) -> None:
        self._inbox.put(command)

    def record(self, recorder: Recorder | None) -> None:
        """Note steps and commands from now on; None: no more.  From any thread."""
        self._callbacks.computed = None if recorder is None else []
        self._recorder = recorder

    def age(self) -> float:
        """Seconds since the engine was called, where it has not come back since.  From any thread."""
        since = self._since
        return 0.0 if since is None else self._clock() - since

    def run(self) -> None:
        while self._drain():
            if self._has_work():
                self._step()

    def advance(self) -> bool:
        """One turn without waiting, for tests and simulators that have no threads: whether anything was done."""
        busy = not self._inbox.empty()
        while not self._inbox.empty():
            self._carry_out(self._inbox.get_nowait())
        if self._has_work():
            self._step()
            return True
        return busy

    def _drain(self) -> bool:
        """Carry out what waits; block for the first command when the engine is idle.  False on Quit."""
        inbox = self._inbox
        wait = inbox.empty() and not self._has_work()
        while wait or not inbox.empty():
            self._since = None
            command = inbox.get()
            self._since = self._clock()
            if isinstance(command, Quit):
                return False
            self._carry_out(command)
            wait = False
        self._since = self._clock()  # a step comes next
        return True

    def _has_work(self) -> bool:
        if self._broken:
            return False
        try:
            return self._engine.has_work()
        except BaseException as error:
            self._break(error)
            return False

    def _break(self, error: BaseException) -> None:
        """The engine broke its promise: nothing more is computed, and the stage is told."""
        self._broken = True
        self._report(EngineFailed(error))

    def _step(self) -> None:
        began = self._clock()
        try:
            outputs = self._engine.step()
        except BaseException as error:  # also a SystemExit: a loop that ended unseen would leave the pump waiting
            self._break(error)
            return
        ended = self._clock()
        self.steps.add(ended - began)
        if outputs:
            self._report(Produced(tuple(outputs)))
        recorder = self._recorder  # looked at once: the pump may end the trace at any moment
        if recorder is not None:
            self._note_step(recorder, began, ended, outputs)
        elif self._callbacks.computed is not None:
            self._callbacks.computed = None

    def _note_step(self, recorder: Recorder, began: float, ended: float, outputs: Sequence[StepOutput]) -> None:
        computed, self._callbacks.computed = self._callbacks.computed or [], []
        tokens = sum(len(output.token_ids) for output in outputs)
        most = tracing.MAX_NAMED
        named = tuple(output.transfer for output in outputs[:most])
        recorder.engine.note(
            tracing.Step(began, ended, tuple(computed[:most]), len(computed), named, len(outputs), tokens)
        )

    def _admit(self, admission: Admission) -> None:
        """An engine that raises instead of refusing has refused; what it had taken by then is given back."""
        try:
            self._engine.reserve_transfer(admission)
        except Exception as error:
            self._engine.release_transfer(admission.transfer)
            self._report(Refused(admission.transfer, f"{type(error).__name__}: {error}", False))

    def _carry_out(self, command: Command) -> None:
        recorder = self._recorder
        if recorder is None:
            self._obey(command)
            return
        began = self._clock()
        self._obey(command)
        subject = _subject(command)
        if subject is not None:
            recorder.engine.note(tracing.Command(began, self._clock(), type(command).__name__, subject))

    def _obey(self, command: Command) -> None:
        engine = self._engine
        try:
            match command:
                case Admit(admission):
                    self._admit(admission)
                case Import(transfer, valid, begin):
                    if begin(transfer):  # C1.3
                        engine.accept_import(transfer, valid)
                        self._report(Imported(transfer))
                case Suspend(transfer):
                    self._report(Suspended(transfer, engine.suspend_transfer(transfer)))
                case ReleaseCompute(transfer):
                    engine.release_transfer_compute(transfer)
                case Release(transfer):
                    engine.release_transfer(transfer)
                    self._report(Released(transfer))
                case Query(question, answer):
                    answer(_answered(question, engine))
                case Nudge() | Quit():
                    pass
        except Exception as error:
            subject = _subject(command)
            # a release that raises leaves memory in doubt: that is the engine's end, not one transfer's
            if subject is None or isinstance(command, Release | Suspend):
                self._break(error)
            else:
                self._report(CommandFailed(subject, error))


def _answered(question: Callable[[StageEngine], object], engine: StageEngine) -> object:
    """The answer, or the exception in its place: a question disturbs nothing (C9.2)."""
    try:
        return question(engine)
    except Exception as error:
        return error


def _subject(command: Command) -> TransferId | None:
    match command:
        case Admit(admission):
            return admission.transfer
        case Import(transfer) | Suspend(transfer) | ReleaseCompute(transfer) | Release(transfer):
            return transfer
        case _:
            return None
