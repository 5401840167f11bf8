"""Two guarded connectors of one transport in one process, and a bounded way to make them move.

::

    with open_pair("loopback") as pair:                   # registered, connected, memory filled and poisoned
        sent = pair.send(reads, writes)                   # granted at the target, submitted at the source
        pair.pump_until(lambda: sent.received and sent.done)
        pair.target.memory.check(sent.expected)

Nothing here waits for something without a bound, and a bound that passes says what has been seen until then.
"""

from __future__ import annotations

import abc
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar, cast

from kvbaton.connector import (
    Chunk,
    Completion,
    ConnectorContext,
    ConnectorPlugin,
    Need,
    Outcome,
    PeerEvent,
    Receipt,
    TransferConnector,
    wire_version,
)
from kvbaton.errors import KvbatonError, Outstanding
from kvbaton.guard import Clock, GuardedConnector, GuardLimits, GuardProgress, PeerState
from kvbaton.identity import PeerId, TransferId, new_transfer_id
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import ClauseBroken, leading_clause
from kvbaton_conformance.events import EventLog, looks_like
from kvbaton_conformance.inspector import ByteInspector, Image
from kvbaton_conformance.placement import PAIR
from kvbaton_conformance.scripted_connector import ManualClock
from kvbaton_conformance.witness import Testimony, Witness

if TYPE_CHECKING:
    from kvbaton_conformance.two_process import RemoteGuard, RemoteMemory

    Guard: TypeAlias = GuardedConnector | RemoteGuard
    Memory: TypeAlias = ByteInspector | RemoteMemory

#: Seconds that a condition may take to come true.  Far more than a healthy transport needs, far less than a test's
#: own limit.
PATIENCE = 10.0

#: Seconds that ends get to drain when they are closed: what a test waited for is over by then.
DRAIN = 1.0

#: Bytes of each region of an end, by id, unless a test asks for others.
REGIONS: Mapping[int, int] = {0: 1 << 16, 1: 1 << 14}


T = TypeVar("T")


def segments(*rows: tuple[int, int, int]) -> Segments:
    """Segments from rows ``(region, offset, length)``."""
    return Segments.of(rows)


class ConditionNotReached(AssertionError):
    """A condition did not come true within its bound."""


@dataclass(frozen=True)
class Heard:
    """What one pass at one end has brought."""

    completions: tuple[Completion, ...] = ()
    receipts: tuple[Receipt, ...] = ()
    peers: tuple[PeerEvent, ...] = ()
    faults: tuple[KvbatonError, ...] = ()
    #: Receipts whose bytes were not there at that moment, in words.
    broken: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.completions or self.receipts or self.peers or self.faults)


class End(abc.ABC):
    """One stage's end: guard, memory, and every event that ``pump`` has seen; here or in another process."""

    peer: PeerId
    guard: Guard
    memory: Memory

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.completions: list[Completion] = []
        self.receipts: list[Receipt] = []
        self.peers: list[PeerEvent] = []
        self.faults: list[KvbatonError] = []
        #: What was wrong at the moment of a receipt.
        self.broken: list[str] = []
        #: A test killed it: there is nothing left to close.
        self.dead = False
        #: A test stopped it: it answers nothing.
        self.hung = False
        #: A test expects what its transport reports as faults.
        self.faults_expected = False
        #: The last events, for whoever reads a failure.
        self.log = EventLog()

    @abc.abstractmethod
    def hear(self) -> Heard:
        """One ``poll()``."""

    @abc.abstractmethod
    def expect(self, transfer: TransferId, sequence: int, writes: Segments, data: bytes) -> None:
        """When the receipt of this chunk comes, ``data`` must be in ``writes`` (T3)."""

    @abc.abstractmethod
    def testimony(self) -> Testimony:
        """What the plugin itself said and did, beneath the guard."""

    @abc.abstractmethod
    def advance(self, seconds: float) -> None:
        """Let the guard's clock pass, where the end was opened with ``manual_clock``."""

    @abc.abstractmethod
    def apply(self, action: Callable[..., T], *arguments: Any) -> T:
        """``action(end, *arguments)`` in the process of this end, with ``end`` as it is there.

        ``action`` is a function of a module, so that it can be named to another process.
        """

    def calls(self, method: str) -> int:
        """How often the guard has called a method of the plugin."""
        return self.testimony().calls.get(method, 0)

    def forget_events(self) -> None:
        """Drop the lists of what was heard: a loop that looks for growth must not find its own."""
        for heard in (self.completions, self.receipts, self.peers):
            heard.clear()
        self.log.clear()
        self._forget_books()

    @abc.abstractmethod
    def _forget_books(self) -> None:
        """Drop what is kept about chunks that are over."""

    @property
    def awake(self) -> bool:
        """Whether it can be polled: not dead, not stopped, not closed."""
        return not (self.dead or self.hung)

    def put_down(self) -> None:  # noqa: B027 - nothing, in this process
        """End it for good, where it has a process of its own: killed and joined, it is ``dead``."""

    def pump(self) -> bool:
        """One ``poll()``; whether anything happened.  An end that is not awake does nothing."""
        if not self.awake:
            return False
        heard = self.hear()
        self.completions += heard.completions
        self.receipts += heard.receipts
        self.peers += heard.peers
        self.faults += heard.faults
        self.broken += heard.broken
        self.log.note(heard.completions, heard.receipts, heard.peers, heard.faults)
        return bool(heard)

    def problems(self) -> list[str]:
        """What is wrong at this end whatever the test is about, each beginning with its clause."""
        if self.dead or self.hung:
            return list(self.broken)
        problems = [*self.broken, *self.testimony().problems]
        return problems + ([] if self.faults_expected else [str(fault) for fault in self.faults])

    def is_up(self, peer: PeerId) -> bool:
        return self.guard.peer_states().get(peer) is PeerState.UP

    def is_down(self, peer: PeerId) -> bool:
        return self.guard.peer_states().get(peer) in (PeerState.DOWN, None)

    def told_down(self, peer: PeerId) -> bool:
        """Whether this end has heard that ``peer`` is down."""
        return any(event.peer == peer and not event.up for event in self.peers)

    def told_quiet(self, peer: PeerId) -> bool:
        """Whether this end has heard that ``peer`` is down and quiet."""
        return any(event.peer == peer and not event.up and event.quiet for event in self.peers)

    def story(self) -> str:
        """What it has heard, without asking it."""
        state = " was killed by the test," if self.dead else " was stopped by the test," if self.hung else ""
        return f"{self.peer}{state} {self.log}"

    def __str__(self) -> str:
        if self.dead or self.hung:
            return self.story()
        try:
            figures = {name: value for name, value in self.guard.statistics().items() if value}
        except Exception as error:
            return f"{self.story()}\n      it does not answer any more: {error}"
        return f"{self.story()}\n      {figures}"


class LocalEnd(End):
    """An end in this process."""

    guard: GuardedConnector
    memory: ByteInspector

    def __init__(
        self,
        peer: PeerId,
        connector: TransferConnector,
        witness: Witness,
        guard: GuardedConnector,
        memory: ByteInspector,
        clock: Clock,
    ) -> None:
        super().__init__(peer)
        #: What the plugin opened.  Tests of a contract talk to ``guard``; this is for the kit's own controls.
        self.connector = connector
        self.guard = guard
        self.memory = memory
        self._witness = witness
        self._clock = clock
        self._expected: dict[tuple[TransferId, int], tuple[Segments, bytes]] = {}

    @property
    def awake(self) -> bool:
        return super().awake and not self.guard.closed

    def hear(self) -> Heard:
        progress = self.guard.poll()
        faults = progress.faults if isinstance(progress, GuardProgress) else ()
        broken = tuple(text for receipt in progress.receipts if (text := self._missing(receipt)))
        return Heard(progress.completions, progress.receipts, progress.peers, faults, broken)

    def expect(self, transfer: TransferId, sequence: int, writes: Segments, data: bytes) -> None:
        self._expected[transfer, sequence] = writes, data

    def testimony(self) -> Testimony:
        return self._witness.testimony()

    def advance(self, seconds: float) -> None:
        assert isinstance(self._clock, ManualClock), "open it with manual_clock=True"
        self._clock.advance(seconds)

    def apply(self, action: Callable[..., T], *arguments: Any) -> T:
        return action(self, *arguments)

    def let_go(self) -> None:
        """Drop connector and memory: the end can only be asked for what it has heard any more."""
        del self.connector, self.guard, self.memory, self._witness

    def _forget_books(self) -> None:
        self._expected.clear()
        self._witness.forget()

    def _missing(self, receipt: Receipt) -> str:
        """T3, looked at in the moment of the receipt."""
        known = self._expected.pop((receipt.transfer, receipt.sequence), None)
        if known is None:
            return ""
        writes, data = known
        found = self.memory.read(writes)
        if found == data:
            return ""
        wrong = sum(here != there for here, there in zip(found, data, strict=True))
        return (
            f"T3: {self.peer} got the receipt of chunk {receipt.sequence} of transfer {receipt.transfer}, and at that"
            f" moment {wrong} of its {len(data)} bytes were not what the source holds: the receipt came before the"
            " data, or the data is wrong"
        )


_News = TypeVar("_News", Completion, Receipt)


class _Own(Generic[_News]):
    """One chunk's part of what an end has heard.  Looks at each event once: many chunks are asked after in each pass of
    a test, and would otherwise take more time than the transport.
    """

    def __init__(self, chunk: Chunk) -> None:
        self._key = (chunk.transfer, chunk.sequence)
        self._found: list[_News] = []
        self._seen = 0

    def of(self, heard: list[_News]) -> list[_News]:
        if len(heard) < self._seen:  # a test has cleared it
            self._found, self._seen = [], 0
        self._found += [one for one in heard[self._seen :] if (one.transfer, one.sequence) == self._key]
        self._seen = len(heard)
        return list(self._found)


@dataclass(eq=False)
class Sent:
    """One submitted chunk and what both ends have heard of it.  ``expected``: the target's memory once it arrived."""

    chunk: Chunk
    accepted: bool
    expected: Image
    source: End
    target: End

    def __post_init__(self) -> None:
        self._completions = _Own[Completion](self.chunk)
        self._receipts = _Own[Receipt](self.chunk)

    @property
    def completions(self) -> list[Completion]:
        """In the order in which they were reported."""
        return self._completions.of(self.source.completions)

    @property
    def receipts(self) -> list[Receipt]:
        return self._receipts.of(self.target.receipts)

    @property
    def received(self) -> bool:
        return bool(self.receipts)

    @property
    def over(self) -> bool:
        """A terminal completion was reported."""
        return any(completion.terminal for completion in self.completions)

    @property
    def done(self) -> bool:
        """It completed as DONE."""
        return any(completion.outcome is Outcome.DONE for completion in self.completions)


# -- paces: when each end is polled.  They change when something is seen, never what (T4) ----------------------------


def steady(_turn: int, ends: Sequence[End]) -> Sequence[End]:
    """Each end once per pass."""
    return ends


def reverse(_turn: int, ends: Sequence[End]) -> Sequence[End]:
    """The other way round."""
    return ends[::-1]


def slow_target(turn: int, ends: Sequence[End]) -> Sequence[End]:
    """The last end in each seventh pass only."""
    return ends if turn % 7 == 0 else ends[:-1]


def slow_source(turn: int, ends: Sequence[End]) -> Sequence[End]:
    """The first end in each seventh pass only."""
    return ends if turn % 7 == 0 else ends[1:]


def stopping(turn: int, ends: Sequence[End]) -> Sequence[End]:
    """The last end stops for forty passes of every hundred, the first for forty others."""
    if turn % 100 < 40:
        return ends[:-1]
    return ends[1:] if turn % 100 < 80 else ends


Pace = Callable[[int, Sequence[End]], Sequence[End]]

#: Some transports deliver only when the sender polls, some only when the receiver does: all of these come out even.
PACES: Mapping[str, Pace] = {
    "steady": steady, "reverse": reverse, "slow-target": slow_target, "slow-source": slow_source, "stopping": stopping
}  # fmt: skip


@dataclass(eq=False)
class Pair:
    """A source end and a target end (both can do both).

    ``between`` is called between passes: where a test carries bytes itself, this is where it does.
    """

    source: End
    target: End
    between: Callable[[], object] = lambda: None
    #: The ends, in the order in which a pass polls them.  One that is left out accepts and does not progress: it is
    #: *clogged*.
    order: Sequence[End] = ()
    #: Which of them a pass polls.
    pace: Pace = steady
    _passes: int = 0

    def __post_init__(self) -> None:
        self.order = self.order or (self.source, self.target)

    def connect(self, bound: float | None = None) -> None:
        """Exchange endpoints and wait until each end has heard that the other is up."""
        source, target = self.source, self.target
        source.guard.connect(target.guard.endpoint())
        target.guard.connect(source.guard.endpoint())
        self.pump_until(
            lambda: source.is_up(target.peer) and target.is_up(source.peer), "T2: both ends are up", bound or PATIENCE
        )

    def send(
        self,
        reads: Segments,
        writes: Segments,
        *,
        transfer: TransferId | None = None,
        sequence: int = 0,
        base: Image | None = None,
    ) -> Sent:
        """Grant ``writes`` (for a transfer's first chunk) and submit one chunk.

        ``base``: the target's memory before, where more than one chunk is under way (another ``Sent``'s ``expected``).
        """
        known = transfer is not None
        transfer = transfer or new_transfer_id()
        if not known:
            self.target.guard.grant(transfer, self.source.peer, writes)
        chunk = Chunk(transfer, sequence, self.target.peer, reads, writes, reads.nbytes)
        before = base or self.target.memory.image()
        expected = before.with_copy(self.source.memory.image(), reads, writes)
        self.target.expect(transfer, sequence, writes, self.source.memory.read(reads))
        return Sent(chunk, self.source.guard.submit(chunk), expected, self.source, self.target)

    @property
    def grain(self) -> int:
        """What offsets and lengths must be multiples of."""
        return self.source.guard.capabilities.alignment

    def rows(self, *rows: tuple[int, int, int]) -> Segments:
        """Segments from rows ``(region, offset, length)``, scaled to what the transport's alignment asks for."""
        grain = self.grain
        return Segments.of([(region, offset * grain, length * grain) for region, offset, length in rows])

    def grant(self, target: Segments) -> TransferId:
        """A new transfer that may write ``target``."""
        transfer = new_transfer_id()
        self.target.guard.grant(transfer, self.source.peer, target)
        return transfer

    def finish(self, transfer: TransferId) -> None:
        """As core does when everything was received: acknowledge at the source, forget at both."""
        if not (self.source.dead or self.source.hung):
            self.source.guard.acknowledge(transfer)
            self.source.guard.forget(transfer)
        if not (self.target.dead or self.target.hung):
            self.target.guard.forget(transfer)

    def clog(self, end: End) -> None:
        """``end`` accepts and does not progress: it is not polled until :meth:`unclog`."""
        self.order = tuple(other for other in self.order if other is not end)

    def unclog(self) -> None:
        """Both are polled again, the source first."""
        self.order = (self.source, self.target)

    def pump(self) -> bool:
        """One pass: poll each end once.  Whether anything happened."""
        self._passes += 1
        moved = [end.pump() for end in self.pace(self._passes, self.order)]
        self.between()
        return any(moved)

    def pump_until(self, condition: Callable[[], bool], what: str = "the condition", bound: float = PATIENCE) -> None:
        """Pump until ``condition()``; raises :class:`ConditionNotReached` after ``bound`` seconds.

        ``what`` begins with a clause: it is the message.
        """
        end = time.monotonic() + bound
        while not condition():
            if time.monotonic() > end:
                # what a plugin did wrong beneath the guard is the cause, that nothing came is the consequence
                causes = "".join(f"{problem}\n" for end in (self.source, self.target) for problem in end.problems())
                hint = looks_like(self.source, self.target)
                raise ConditionNotReached(
                    f"{causes}{what}: not reached within {bound:g} s.\n  {self.source}\n  {self.target}"
                    + (f"\n  it looks like this: {hint}" if hint else "")
                )
            if not self.pump():
                awake = [end for end in self.order if end.awake]
                if awake:
                    awake[-1].guard.wait(0.001)
                else:
                    time.sleep(0.001)

    def pump_idle(self, passes: int = 20) -> None:
        """Pump until nothing has happened for ``passes`` passes in a row: for what must *not* come."""
        end = time.monotonic() + PATIENCE
        quiet = 0
        while quiet < passes:
            assert time.monotonic() < end, f"T12: events without end.\n  {self.source}\n  {self.target}"
            quiet = 0 if self.pump() else quiet + 1


def open_end(
    plugin: ConnectorPlugin,
    options: Any,
    peer: PeerId,
    *,
    regions: Mapping[int, int] = REGIONS,
    geometry: bytes = b"",
    limits: GuardLimits | None = None,
    connect_deadline: float = PATIENCE,
    chunk_deadline: float = PATIENCE,
    clock: Clock = time.monotonic,
    manual_clock: bool = False,
    register: bool = True,
    seed: int = 0,
    device: int | None = None,
) -> LocalEnd:
    """Open one connector, guarded, with poisoned memory registered (``regions``: id to bytes).

    ``device``: the CUDA device on which memory and connector are; None: memory of the host.
    Where ``register`` is false the test registers ``memory.regions`` itself.

    ``manual_clock``: the guard's time passes by :meth:`End.advance` only.
    """
    if manual_clock:
        clock = ManualClock()
    connector = plugin.open(options, ConnectorContext(peer, device))
    witness = Witness(connector, str(peer))
    guard = GuardedConnector(
        cast(TransferConnector, witness), transport=plugin.name, version=wire_version(plugin), peer=peer,
        geometry=geometry, limits=limits, connect_deadline=connect_deadline, chunk_deadline=chunk_deadline, clock=clock,
    )  # fmt: skip
    memory = ByteInspector(str(peer), seed, device)
    for id, nbytes in regions.items():
        if guard.capabilities.memory_origin == "allocated":
            memory.adopt(guard.allocate(id, *memory.place, nbytes))
        else:
            memory.allocate(id, nbytes)
    if register:
        guard.register(memory.regions)
    return LocalEnd(peer, connector, witness, guard, memory, clock)


@contextmanager
def open_pair(
    connector: ConnectorPlugin | str,
    options: Mapping[str, Any] | Any = None,
    *,
    names: tuple[str, str] = PAIR,
    connect: bool = True,
    **end_options: Any,
) -> Iterator[Pair]:
    """Two ends of one transport in this process, the source's memory filled, connected unless told otherwise.

    ``connector`` is an entry point's name, ``module:object`` or an instance; ``options`` a mapping or an instance of
    its ``Options``; ``end_options`` go to :func:`open_end` for both ends.  On leaving, both ends are closed, see
    :func:`close_ends`.
    """
    from kvbaton.plugins import choose_connector

    plugin, valid = choose_connector(connector, Need("host", "same_process"), options)
    ends: list[LocalEnd] = []
    with closing(ends):
        for number, name in enumerate(names):
            ends.append(open_end(plugin, valid, PeerId.start(name), seed=number, **end_options))
        pair = Pair(ends[0], ends[1])
        pair.source.memory.fill()
        if connect:
            pair.connect()
        yield pair


@contextmanager
def closing(ends: Sequence[End]) -> Iterator[None]:
    """Close what is in ``ends`` on leaving.  Where the body has failed, what closing finds is a note to that."""
    try:
        yield
    except BaseException as error:
        try:
            close_ends(ends)
        except ClauseBroken as further:
            error.add_note(f"and then: {further}")
        raise
    close_ends(ends)


def drain_ends(ends: Sequence[End], bound: float | None = None) -> list[str]:
    """Poll all of them until every accepted chunk has had a completion (T5).

    What has none after ``bound`` seconds (:data:`PATIENCE`), although both of its ends live and are polled, in words.
    An end that does not answer is left to :func:`close_ends`.
    """
    deadline = time.monotonic() + (PATIENCE if bound is None else bound)
    awake = [end for end in ends if end.awake]
    while True:
        try:
            owing = [end for end in awake if end.guard.outstanding()]
            silent = {end: testimony.accepted - testimony.completed for end in owing for testimony in [end.testimony()]}
            silent = {end: chunks for end, chunks in silent.items() if chunks}
            if not silent:
                return []
            if time.monotonic() > deadline:
                return [
                    f"T5: {len(chunks)} chunks that {end.peer} has accepted have had no completion, although both ends"
                    f" live and are polled, among them"
                    f" {', '.join(sorted(f'({transfer[:8]}, {sequence})' for transfer, sequence in chunks)[:3])}\n"
                    f"  {end.story()}"
                    for end, chunks in silent.items()
                ]
            for end in awake:
                end.pump()
            awake[-1].guard.wait(0.001)
        except Exception:
            return []


def close_ends(ends: Sequence[End], gone: Collection[PeerId] = ()) -> None:
    """Close every end that is open and alive, whatever becomes of the others.

    They disconnect from each other and are polled for :data:`DRAIN` seconds.  Nothing is said to be fenced that may
    still act (C6.4): only peers in ``gone``, ends that are dead, and ends that were closed before.  So an end with
    chunks that do not drain is closed last; a peer that has a process of its own is killed and joined for it.

    Raises :class:`~kvbaton_conformance.clauses.ClauseBroken` with everything that could not be closed.
    """
    closing = _Closing(ends, gone)
    closing.run()
    raise_all(closing.problems)


class _Closing:
    """One run of :func:`close_ends`."""

    def __init__(self, ends: Sequence[End], gone: Collection[PeerId]) -> None:
        self.problems: list[str] = []
        self._gone = {*gone, *(end.peer for end in ends if end.dead)}
        self._open: list[End] = []
        self._closed: list[End] = []
        for end in ends:
            with self._at(end):
                if end.dead or end.hung:
                    continue
                if end.guard.closed:
                    self._gone.add(end.peer)
                else:
                    self._open.append(end)

    def run(self) -> None:
        for end in tuple(self._open):
            with self._at(end):
                self._fence(end)
                for peer in end.guard.peer_states():
                    end.guard.disconnect(peer)
        self._drain_and_close(time.monotonic() + DRAIN)
        if not self._open:
            return
        # what is left waits for somebody who does not answer it: those that are closed already end for good
        for end in self._closed:
            with self._at(end):
                end.put_down()
                self._gone.add(end.peer)
        for end in tuple(self._open):
            with self._at(end):
                self._fence(end)
        self._drain_and_close(time.monotonic() + PATIENCE)
        for end in tuple(self._open):
            with self._at(end):
                end.guard.close()  # it raises

    def _fence(self, end: End) -> None:
        for peer in end.guard.peer_states():
            if peer in self._gone:
                end.guard.fenced(peer)

    def _drain_and_close(self, deadline: float) -> None:
        """Close each as soon as nothing of it is outstanding; an end with nothing under way stays until all are."""
        while True:
            waiting = []
            for end in tuple(self._open):
                with self._at(end):
                    if end.guard.outstanding():
                        waiting.append(end)
            late = time.monotonic() > deadline
            if not waiting or late:
                self._close_what_can_be()
                if late or not self._open:
                    return
            for end in tuple(self._open):
                with self._at(end):
                    end.pump()
                    end.guard.wait(0.001)

    def _close_what_can_be(self) -> None:
        for end in tuple(self._open):
            with self._at(end):
                with suppress(Outstanding):
                    end.guard.close()
                    self._open.remove(end)
                    self._closed.append(end)

    @contextmanager
    def _at(self, end: End) -> Iterator[None]:
        """What goes wrong at one end keeps no other from being closed."""
        try:
            yield
        except Exception as error:
            text = str(error)
            clause = leading_clause(text) or "T10"
            self.problems.append(f"{clause}: {end.peer} could not be closed: {text.removeprefix(f'{clause}: ')}")
            if end in self._open:
                self._open.remove(end)
            end.put_down()
            if end.dead:
                self._gone.add(end.peer)


def raise_all(problems: Sequence[str]) -> None:
    """Raise the first problem, whose text begins with its clause, with the others in the same message."""
    if problems:
        clause, _, first = problems[0].partition(": ")
        others = [f"and: {other}" for other in dict.fromkeys(problems[1:]) if other != problems[0]]
        raise ClauseBroken(clause, "\n".join([first, *others]))
