"""Every cell of the state tables (``kvbaton.handoff.table``), legal and illegal.

For each phase there are several *situations* (ways to be in it) and for each event several *acts*.  All of them
together must show exactly the outcomes that the cell declares: neither one more nor one less.  An event without acts,
or a phase without situations, is an error while the tests are collected.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvbaton.connector import Completion, Receipt
from kvbaton.connector import Outcome as ChunkOutcome
from kvbaton.engine import FinishReason, Request, Role, SamplingParams
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Coordinator
from kvbaton.handoff.destination import Destination
from kvbaton.handoff.source import Source
from kvbaton.handoff.table import (
    COORDINATOR,
    DESTINATION,
    SOURCE,
    CoordinatorPhase,
    DestinationPhase,
    Outcome,
    SourcePhase,
    Table,
)
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.messages import (
    Ack,
    Activated,
    Commit,
    Connected,
    Failed,
    Finished,
    Hello,
    Output,
    PeerDown,
    Prefill,
    Progress,
    Received,
    Rejected,
    Reserve,
    Reserved,
    Retired,
    Unproven,
)
from kvbaton.reservation import Capacity, Reservation

T = TransferId("a" * 32)
OLD = TransferId("b" * 32)
KEY = RequestKey("request")
P0, D0 = PeerId("prefill-0", 1), PeerId("decode-0", 1)
REQUEST = Request((1, 2, 3), SamplingParams(max_tokens=4))
HELD = Reservation(T, ((0,),), 0, 0)

S, D, C = SourcePhase, DestinationPhase, CoordinatorPhase


def observed(effects: list, before: str, after: str, sends: tuple[str, ...]) -> Outcome:
    if any(isinstance(e, fx.Violation) for e in effects):
        return Outcome("violation", after, sends)
    if any(isinstance(e, fx.Ignored) for e in effects):
        assert before == after, f"ignored, and yet it went from {before} to {after}"
        assert all(isinstance(e, (fx.Ignored, fx.Fault)) for e in effects), effects
        return Outcome("ignore", after, sends)
    return Outcome("apply", after, sends)


def cells(table: Table, situations: dict, acts: dict) -> list:
    """One parameter set per possible cell; what is missing is found here, at collection."""
    missing = set(table.rows) - set(acts)
    assert not missing, f"{table.title}: no act for {missing}"
    assert not set(acts) - set(table.rows), f"acts without a row: {set(acts) - set(table.rows)}"
    out = []
    for event, phase, declared in table.cells():
        assert situations[phase], f"{table.title}: no situation for {phase}"
        if declared:
            name = f"{event}-{phase.name if phase else 'none'}"
            out.append(pytest.param(event, phase, frozenset(declared), id=name))
    return out


def name(phase) -> str:
    return phase.name if phase else "none"


def words(effects: list) -> tuple[str, ...]:
    return tuple(type(e.message).__name__ for e in effects if isinstance(e, fx.Send))


# -- P ---------------------------------------------------------------------------------------------------------------


def chunk(
    sequence: int, outcome: ChunkOutcome = ChunkOutcome.DONE, source: bool = True, target: bool = True
) -> Completion:
    return Completion(T, sequence, outcome, source, target)


def source(*steps: Callable[[Source], object]) -> Callable[[], Source]:
    def make() -> Source:
        machine = Source()
        machine.prefill(Prefill(OLD, 1, REQUEST, HELD, D0))  # a transfer that came and went
        machine.cancel(OLD)
        machine.suspended(OLD)
        for step in steps:
            step(machine)
        return machine

    return make


def begin(m: Source) -> None:
    m.prefill(Prefill(T, 5, REQUEST, HELD, D0))


def compute(n: int, last: bool) -> Callable[[Source], object]:
    return lambda m: m.computed(T, n, last)


def ready(i: int) -> Callable[[Source], object]:
    return lambda m: m.source_ready(T, i)


def posted(i: int) -> Callable[[Source], object]:
    return lambda m: m.submitted(T, i)


def ended(i: int, *how) -> Callable[[Source], object]:
    return lambda m: m.completion(chunk(i, *how))


def one_posted(last: bool) -> tuple:
    return begin, compute(1, last), ready(0), posted(0)


TARGET_UNKNOWN = (ChunkOutcome.DONE, True, False)
LATE = (ChunkOutcome.TIMED_OUT, False, False)
SOURCE_SITUATIONS = {
    None: [source()],
    S.PREFILLING: [
        source(begin),
        source(begin, compute(1, False)),
        source(begin, compute(2, False), ready(0)),
        source(begin, compute(1, True)),
        source(begin, compute(1, True), ready(0)),
        source(*one_posted(False)),
        source(*one_posted(False), ended(0)),
        source(*one_posted(False), ended(0, *TARGET_UNKNOWN)),
        source(begin, compute(2, True), ready(0), posted(0), ready(1)),
        source(begin, compute(2, True), ready(0), posted(0), ended(0), ready(1)),
    ],
    S.COMMITTED: [
        source(*one_posted(True)),
        source(*one_posted(True), ended(0)),
        source(*one_posted(True), ended(0, *TARGET_UNKNOWN)),
        source(begin, compute(2, True), ready(0), ready(1), posted(0), posted(1), ended(1)),
        source(begin, compute(2, True), ready(0), ready(1), posted(0), posted(1)),
    ],
    S.DRAINING: [
        source(begin, lambda m: m.cancel(T)),
        source(begin, compute(1, False), lambda m: m.cancel(T)),
        source(begin, compute(1, True), lambda m: m.cancel(T)),
        source(begin, compute(2, True), ready(0), posted(0), lambda m: m.cancel(T)),
        source(*one_posted(True), lambda m: m.cancel(T)),
        source(*one_posted(True), lambda m: m.ack(T)),
        source(*one_posted(True), ended(0, *TARGET_UNKNOWN), lambda m: m.cancel(T)),
        source(*one_posted(True), ended(0, *LATE)),
        source(*one_posted(False), ended(0, *LATE)),
    ],
}  # fmt: skip


def stopped_prefill(m: Source) -> list:
    m.stop()
    return m.prefill(Prefill(T, 9, REQUEST, HELD, D0))


SOURCE_ACTS: dict[str, list[Callable[[Source], list]]] = {
    "Prefill": [lambda m: m.prefill(Prefill(T, 9, REQUEST, HELD, D0))],
    "Prefill, replayed": [lambda m: m.prefill(Prefill(T, 1, REQUEST, HELD, D0))],
    "Prefill, after Stop": [stopped_prefill],
    "Ack": [lambda m: m.ack(T)],
    "Cancel": [lambda m: m.cancel(T)],
    "Stop": [lambda m: m.stop()],
    "Disconnect": [lambda m: m.disconnect(D0)],
    "computed": [
        lambda m: m.computed(T, 1, False), lambda m: m.computed(T, 0, False), lambda m: m.computed(T, 1, True),
        lambda m: m.computed(T, 0, True),
    ],
    "source ready": [lambda m: m.source_ready(T, 0), lambda m: m.source_ready(T, 1)],
    "refused": [lambda m: m.refused(T, "no")],
    "engine failed": [lambda m: m.engine_failed(T, "no")],
    "suspended": [lambda m: m.suspended(T)],
    "submitted": [lambda m: m.submitted(T, 0), lambda m: m.submitted(T, 1)],
    "done": [lambda m: m.completion(chunk(0)), lambda m: m.completion(chunk(1))],
    "done, target not quiet": [
        lambda m: m.completion(chunk(0, *TARGET_UNKNOWN)), lambda m: m.completion(chunk(7, *TARGET_UNKNOWN)),
    ],
    "failed": [
        lambda m: m.completion(chunk(0, ChunkOutcome.FAILED)), lambda m: m.completion(chunk(0, ChunkOutcome.CANCELLED)),
        lambda m: m.completion(chunk(7, ChunkOutcome.FAILED)),
    ],
    "failed, not quiet": [lambda m: m.completion(chunk(0, ChunkOutcome.FAILED, False, False))],
    "only target quiet": [lambda m: m.completion(chunk(0, ChunkOutcome.DONE, False, True))],
    "deadline": [lambda m: m.completion(chunk(0, *LATE))],
    "destination up": [lambda m: m.peer_up(D0)],
    "destination down": [lambda m: m.peer_down(D0, quiet=False)],
    "destination down, quiet": [lambda m: m.peer_down(D0, quiet=True)],
    "quarantine bound": [lambda m: m.fatal("the quarantine is full")],
}  # fmt: skip


@pytest.mark.clause("C5.1", "C7.1", "C7.2", "C7.4", "C1.2")
@pytest.mark.parametrize(("event", "phase", "declared"), cells(SOURCE, SOURCE_SITUATIONS, SOURCE_ACTS))
def test_source_cell(event, phase, declared):
    found = set()
    for situation in SOURCE_SITUATIONS[phase]:
        for act in SOURCE_ACTS[event]:
            machine = situation()
            assert machine.phase(T) is phase
            effects = act(machine)
            assert (fx.Send(Retired(T)) in effects) == (phase is not None and machine.phase(T) is None)
            found.add(observed(effects, name(phase), name(machine.phase(T)), words(effects)))
    assert found == declared


# -- D ---------------------------------------------------------------------------------------------------------------


def destination(*steps: Callable[[Destination], object]) -> Callable[[], Destination]:
    def make() -> Destination:
        machine = Destination()
        machine.peer_up(P0)
        machine.reserve(Reserve(OLD, 1, REQUEST, P0))
        machine.refused(OLD, "no", retry=False)
        for step in steps:
            step(machine)
        return machine

    return make


def ask(m: Destination) -> None:
    m.reserve(Reserve(T, 5, REQUEST, P0))


def hold(m: Destination) -> None:
    ask(m)
    m.reserved(HELD)


def arrived(m: Destination) -> None:
    hold(m)
    m.receipt(Receipt(P0, T, 0))
    m.commit(Commit(T, 1))


def imported(m: Destination) -> None:
    arrived(m)
    assert m.begin_import(T)
    m.imported(T)


def active(m: Destination) -> None:
    imported(m)
    m.activated(T)


def closing_link(m: Destination) -> None:
    m.disconnect(P0)


def cancelled(m: Destination) -> None:
    m.cancel(T)


def released(m: Destination) -> None:
    m.release(T)


def awaiting(m: Destination) -> None:
    hold(m)
    m.cancel(T)
    m.unproven(Unproven(T, ((0, 1),)))


DESTINATION_SITUATIONS = {
    None: [destination()],
    D.RESERVING: [destination(ask), destination(ask, cancelled), destination(ask, released)],
    D.RESERVED: [
        destination(hold),
        destination(hold, lambda m: m.receipt(Receipt(P0, T, 0))),
        destination(hold, lambda m: m.commit(Commit(T, 1))),
        destination(hold, lambda m: m.commit(Commit(T, 2)), lambda m: m.receipt(Receipt(P0, T, 0))),
        destination(hold, lambda m: m.receipt(Receipt(P0, T, 1))),
    ],
    D.HELD: [
        destination(hold, cancelled),
        destination(hold, closing_link, released),
        destination(hold, cancelled, closing_link, released),
        destination(hold, lambda m: m.receipt(Receipt(P0, T, 0)), cancelled),
        destination(awaiting),
    ],
    D.RECEIVED: [destination(arrived), destination(arrived, lambda m: m.begin_import(T))],
    D.IMPORTED: [destination(imported)],
    D.ACTIVE: [destination(active)],
    D.CLOSING: [
        destination(active, cancelled),
        destination(imported, cancelled),
        destination(active, lambda m: m.finished(T, FinishReason.STOP)),
    ],
}


class After:
    """An act that needs something to have happened; where that alone changes the phase, it is another cell's
    business.
    """

    def __init__(self, before: Callable[[Destination], object], act: Callable[[Destination], list]) -> None:
        self.before, self.act = before, act

    def __call__(self, m: Destination) -> list:
        return self.act(m)


STRANGER = PeerId("prefill-9", 1)
DESTINATION_ACTS: dict[str, list[Callable[[Destination], list]]] = {
    "Reserve": [lambda m: m.reserve(Reserve(T, 9, REQUEST, P0))],
    "Reserve, replayed": [lambda m: m.reserve(Reserve(T, 1, REQUEST, P0))],
    "Reserve, after Stop": [After(lambda m: m.stop(), lambda m: m.reserve(Reserve(T, 9, REQUEST, P0)))],
    "Commit": [lambda m, n=n: m.commit(Commit(T, n)) for n in (1, 2, 0)],
    "Unproven": [lambda m, past=past: m.unproven(Unproven(T, ((0, past),))) for past in (1, 1 << 40)],
    "Cancel": [lambda m: m.cancel(T)],
    "Release": [lambda m: m.release(T), After(closing_link, lambda m: m.release(T))],
    "Disconnect": [lambda m: m.disconnect(STRANGER)],
    "Stop": [lambda m: m.stop()],
    "C gone": [lambda m: m.orphaned(), After(lambda m: m.peer_down(P0, quiet=True), lambda m: m.orphaned())],
    "reserved": [lambda m: m.reserved(HELD)],
    "refused": [lambda m: m.refused(T, "no", retry=True)],
    "imported": [lambda m: m.imported(T)],
    "activated": [lambda m: m.activated(T)],
    "output": [lambda m: m.output(T, (1, 2))],
    "finished": [lambda m: m.finished(T, FinishReason.LENGTH)],
    "device quiet": [lambda m: m.device_quiet(T)],
    "engine failed": [lambda m: m.engine_failed(T, "no")],
    "receipt": [lambda m, i=i: m.receipt(Receipt(P0, T, i)) for i in (0, 1, -1, 1 << 40)],
    "receipt from another peer": [
        lambda m: m.receipt(Receipt(STRANGER, T, 0)), lambda m: m.receipt(Receipt(PeerId(P0.name, 2), T, 0)),
    ],
    "revoked": [lambda m: m.revoked(T)],
    "writer up": [lambda m: m.peer_up(P0)],
    "writer down": [lambda m: m.peer_down(P0, quiet=False)],
    "writer down, quiet": [lambda m: m.peer_down(P0, quiet=True)],
    "quarantine bound": [lambda m: m.fatal("the quarantine is full")],
}  # fmt: skip


@pytest.mark.clause("C4.2", "C5.2", "C7.1", "C7.2", "C7.3", "C7.4", "C1.2", "C6.4")
@pytest.mark.parametrize(("event", "phase", "declared"), cells(DESTINATION, DESTINATION_SITUATIONS, DESTINATION_ACTS))
def test_destination_cell(event, phase, declared):
    found = set()
    for situation in DESTINATION_SITUATIONS[phase]:
        for act in DESTINATION_ACTS[event]:
            machine = situation()
            if isinstance(act, After):
                act.before(machine)
                if machine.phase(T) is not phase:
                    continue
            assert machine.phase(T) is phase
            effects = act(machine)
            if phase not in (None, D.RESERVING):
                gone = machine.phase(T) is None
                assert (fx.Free(T) in effects) == (fx.Send(Retired(T)) in effects) == gone
            found.add(observed(effects, name(phase), name(machine.phase(T)), words(effects)))
    assert found == declared


# -- C ---------------------------------------------------------------------------------------------------------------

CAPACITY = Capacity(blocks=100, compute_slots=4, transfer_slots=4, block_tokens=16, max_tokens=1000)


class Desk:
    """A coordinator with one stage of each role, which places requests only when ``willing``."""

    def __init__(self) -> None:
        self.willing = True
        self.c = Coordinator(
            choose=lambda key, request, pairs: pairs[0] if self.willing else None, new_id=lambda: T
        )  # fmt: skip
        for peer, role in ((P0, Role.PREFILL), (D0, Role.DECODE)):
            self.c.handle(peer, Hello(peer, role, CAPACITY, b""), 0.0)
        self.c.handle(P0, Connected(D0), 0.0)
        self.c.handle(D0, Connected(P0), 0.0)

    def hear(self, peer: PeerId, *messages) -> list:
        effects: list = []
        for message in messages:
            effects = self.c.handle(peer, message, 0.0)
        return effects

    @property
    def phase(self):
        return self.c.phase(T) or self.c.phase_of(KEY)


def desk(*steps: Callable[[Desk], object], willing: bool = True) -> Callable[[], Desk]:
    def make() -> Desk:
        d = Desk()
        d.willing = willing
        for step in steps:
            step(d)
        return d

    return make


def wanted(d: Desk) -> None:
    d.c.submit(KEY, REQUEST, 0.0)


def abort(d: Desk) -> list:
    return d.c.abort(KEY, 0.0)


def prefilling(d: Desk) -> None:
    wanted(d)
    d.hear(D0, Reserved(HELD))


def committed(d: Desk) -> None:
    prefilling(d)
    d.hear(P0, Commit(T, 2))


def received(d: Desk) -> None:
    committed(d)
    d.hear(D0, Received(T))


def hear(peer: PeerId, *messages) -> Callable[[Desk], list]:
    return lambda d: d.hear(peer, *messages)


COORDINATOR_SITUATIONS = {
    None: [desk()],
    C.WAITING: [desk(wanted, willing=False)],
    C.RESERVING: [desk(wanted)],
    C.PREFILLING: [desk(prefilling), desk(prefilling, hear(P0, Progress(T, 1)))],
    C.COMMITTED: [desk(committed)],
    C.RECEIVED: [desk(received), desk(received, hear(P0, Retired(T)))],
    C.ENDED: [
        desk(wanted, abort),  # D's credit is out
        desk(prefilling, abort),  # both are
        desk(committed, abort),
        desk(received, abort),
        desk(received, hear(P0, Retired(T)), abort),
        desk(received, abort, hear(P0, Unproven(T, ((0, 1),)))),
        desk(received, hear(D0, Finished(T, FinishReason.STOP)), hear(D0, Retired(T))),  # P's is
    ],
}
#: Situations that are told apart by one event only.
D_IS_LOST = desk(prefilling, lambda d: d.c.peer_lost(D0, "gone", 0.0))
RECEIVED_AND_ACTIVE = desk(received, hear(D0, Activated(T), Output(T, 0, (1, 2), (1, 1))))
MORE = {
    ("Retired (P)", C.ENDED): [D_IS_LOST],
    ("Activated", C.RECEIVED): [RECEIVED_AND_ACTIVE],
    ("Output", C.RECEIVED): [RECEIVED_AND_ACTIVE],
    ("Commit", C.ENDED): [],
}

OTHER = PeerId("decode-9", 1)


def of_a_stranger(d: Desk) -> list:
    d.hear(OTHER, Hello(OTHER, Role.DECODE, CAPACITY, b""))
    return d.hear(OTHER, Received(T))


def become_willing(d: Desk) -> list:
    d.willing = True
    return d.c.place(0.0)


COORDINATOR_ACTS: dict[str, list[Callable[[Desk], list]]] = {
    "placed": [become_willing],
    "abort": [abort],
    "deadline": [lambda d: d.c.expire(1e6)],
    "nobody serves": [lambda d: d.c.drain(P0, 0.0), lambda d: d.c.drain(D0, 0.0)],
    "fatal": [lambda d: d.c.fatal("enough", 0.0)],
    "Reserved": [hear(D0, Reserved(HELD))],
    "Rejected": [hear(D0, Rejected(T, "full"))],
    "Rejected, retry": [hear(D0, Rejected(T, "full", retry=True))],
    "Received": [hear(D0, Received(T))],
    "Activated": [hear(D0, Activated(T))],
    "Output": [hear(D0, Output(T, 0, (1, 2), (1, 1))), hear(D0, Output(T, 5, (1,)))],
    "Finished": [hear(D0, Finished(T, FinishReason.LENGTH))],
    "Failed (D)": [hear(D0, Failed(T, "no"))],
    "Retired (D)": [hear(D0, Retired(T))],
    "Progress": [hear(P0, Progress(T, 1))],
    "Commit": [hear(P0, Commit(T, n)) for n in (2, 1, 0)],
    "Failed (P)": [hear(P0, Failed(T, "no"))],
    "Unproven": [hear(P0, Unproven(T, ((0, 1),)))],
    "Retired (P)": [hear(P0, Retired(T))],
    "stranger": [of_a_stranger],
    "word of the other role": [hear(P0, Received(T)), hear(D0, Commit(T, 2)), hear(D0, Ack(T))],
    "P lost": [lambda d: d.c.peer_lost(P0, "gone", 0.0)],
    "P joined": [lambda d: d.c.peer_joined(P0, 0.0)],
    "D lost": [lambda d: d.c.peer_lost(D0, "gone", 0.0)],
    "D joined": [lambda d: d.c.peer_joined(D0, 0.0)],
    "down at D": [hear(D0, PeerDown(P0, quiet=False))],
    "severed": [hear(D0, PeerDown(P0, quiet=True))],
    "down at P": [hear(P0, PeerDown(D0, quiet=True)), hear(P0, PeerDown(D0, quiet=False))],
}


def told(effects: list) -> tuple[str, ...]:
    out = []
    for e in effects:
        if isinstance(e, fx.SendTo):
            out.append(f"{type(e.message).__name__}>{'P' if e.peer.name.startswith('prefill') else 'D'}")
        elif isinstance(e, fx.Tell) and isinstance(e.event, fx.Ended):
            out.append(e.event.ending.value)
        elif isinstance(e, fx.Tell) and isinstance(e.event, fx.Tokens):
            out.append("tokens")
    return tuple(out)


@pytest.mark.clause("C2.5", "C4.1", "C5.2", "C6.2", "C6.4", "C6.7", "C7.1", "C7.2", "C7.4", "C1.2", "C1.4")
@pytest.mark.parametrize(("event", "phase", "declared"), cells(COORDINATOR, COORDINATOR_SITUATIONS, COORDINATOR_ACTS))
def test_coordinator_cell(event, phase, declared):
    found = set()
    for situation in COORDINATOR_SITUATIONS[phase] + MORE.get((event, phase), []):
        for act in COORDINATOR_ACTS[event]:
            d = situation()
            assert d.phase is phase
            if event == "deadline" and d.c.next_deadline() is None:
                continue
            effects = act(d)
            if event == "Rejected, retry" and d.c.phase_of(KEY) is C.WAITING:
                assert any(isinstance(e, fx.Tell) and isinstance(e.event, fx.Requeued) for e in effects)
            found.add(observed(effects, name(phase), name(d.phase), told(effects)))
    assert found == declared


@pytest.mark.clause("C7.4")
def test_what_a_table_calls_impossible_is_written_down():
    for table in (SOURCE, DESTINATION, COORDINATOR):
        for _, _, declared in table.cells():
            assert all(outcome.verdict in ("apply", "ignore", "violation") for outcome in declared)
