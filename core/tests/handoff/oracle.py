"""The real machines behind the model's interface, so that the model's world runs them, searches them and judges them.

A machine's state is frozen into a value after each step and thawed before the next.  Each value carries a *shadow*: the
model's own state, which takes the same steps; phase, messages and verdict are compared after every one.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import coordinator as co
import destination as de
import messages as words
import source as so
import world

from kvbaton import messages as wire
from kvbaton.connector import Completion, Outcome, Receipt
from kvbaton.engine import FinishReason, Request, Role, SamplingParams
from kvbaton.handoff import coordinator as real_co
from kvbaton.handoff import destination as real_de
from kvbaton.handoff import effects as fx
from kvbaton.handoff import source as real_so
from kvbaton.handoff.table import ChunkState, CoordinatorPhase, DestinationPhase, PeerLink, PeerStatus, SourcePhase
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.reservation import Capacity, Reservation

REQUEST = Request((1, 2, 3), SamplingParams(max_tokens=4))


def tid(t: int) -> TransferId:
    return TransferId(f"{t:032x}")


def peer(side: str, i: int) -> PeerId:
    return PeerId(f"{side}{i}", 1)


def reservation(t: TransferId) -> Reservation:
    return Reservation(t, ((0,),), 0, 0)


class Disagreement(AssertionError):
    """The real machine did something else than the model's."""


def agree(condition: bool, *facts: object) -> None:
    if not condition:
        raise Disagreement("; ".join(map(str, facts)))


def verdict(effects: list) -> str | None:
    for effect in effects:
        if isinstance(effect, fx.Violation):
            return f"violation: {effect.clause} {effect.text}"
    for effect in effects:
        if isinstance(effect, fx.Ignored):
            return f"ignored: {effect.reason}"
    return None


def sent(effects: list) -> list:
    """The messages of a stage's effects in the model's words; what the model leaves out is dropped."""
    out = []
    for effect in effects:
        if isinstance(effect, fx.Send) and not isinstance(effect.message, (wire.Progress, wire.PeerDown)):
            message = effect.message
            argument = message.count if isinstance(message, wire.Commit) else None
            out.append((type(message).__name__, argument))
    return out


def freeze(record: Any) -> tuple:
    out = []
    for slot in record.__slots__:
        value = getattr(record, slot)
        if isinstance(value, dict):
            value = ("dict", tuple(sorted(value.items())))
        elif isinstance(value, set):
            value = ("set", tuple(sorted(value)))
        out.append((slot, value))
    return tuple(out)


def thaw(kind: Any, state: tuple) -> Any:
    record = kind.__new__(kind)
    for slot, value in state:
        if isinstance(value, tuple) and len(value) == 2 and value[0] in ("dict", "set"):
            value = dict(value[1]) if value[0] == "dict" else set(value[1])
        setattr(record, slot, value)
    return record


# -- P ---------------------------------------------------------------------------------------------------------------

T, P0, D0 = tid(7), peer("P", 0), peer("D", 0)

_CHUNK = {
    ChunkState.COMPUTING: so.COMPUTING,
    ChunkState.READY: so.READY,
    ChunkState.POSTED: so.POSTED,
    ChunkState.EXPIRED: so.EXPIRED,
    ChunkState.PINNED: so.EXPIRED,  # D has acknowledged it; the source may still be read
}


class RealSource(NamedTuple):
    phase: str
    chunks: tuple
    state: tuple
    shadow: so.Source


def source_machine(record: RealSource | None, ordinal: int = 0) -> real_so.Source:
    machine = real_so.Source()
    machine._ordinal = ordinal
    if record:
        machine._records[T] = thaw(real_so._Record, record.state)
    return machine


def prefill_message(ordinal: int) -> wire.Prefill:
    return wire.Prefill(T, ordinal, REQUEST, reservation(T), D0)


def _source_events(machine: real_so.Source, kind: str, arg: Any, count: int) -> list:
    if kind == words.PREFILL:
        effects = machine.prefill(prefill_message(machine._ordinal + 1))
        if not verdict(effects):
            effects += machine.computed(T, 1, last=count == 1)
        return effects
    if kind == words.ACK:
        return machine.ack(T)
    if kind == words.CANCEL:
        return machine.cancel(T)
    if kind == words.STOP:
        return machine.stop()
    if kind == so.DEVICE_READY:
        before = machine.phase(T)
        computing = machine.chunks(T).get(arg) is ChunkState.COMPUTING
        effects = machine.source_ready(T, arg)
        if not computing:
            return effects
        if before is SourcePhase.PREFILLING:
            agree(fx.Post(T, arg) in effects, "a ready chunk was not handed to the connector", effects)
            following = machine.next_sequence(T)
            if following is not None and not verdict(effects):
                effects += machine.computed(T, 1, last=following == count - 1)
        elif before is SourcePhase.DRAINING:  # the model's device is quiet when its one running chunk is ready
            effects = [e for e in effects if not isinstance(e, fx.Ignored)] + [
                e for e in machine.suspended(T) if not isinstance(e, fx.Ignored)
            ]
        return effects
    if kind == so.SUBMITTED:
        agree(machine.may_submit(T, arg), "a chunk that the model submits may not be submitted")
        return machine.submitted(T, arg)
    if kind == so.ENGINE_FAILED:
        return machine.engine_failed(T, "no")
    outcome, quiet = {
        so.TERMINAL: (Outcome.DONE, True),
        so.TERMINAL_FAILED: (Outcome.FAILED, True),
        so.DEADLINE: (Outcome.TIMED_OUT, False),
    }[kind]
    return machine.completion(Completion(T, arg, outcome, quiet, quiet))


@functools.cache
def step_source(record: RealSource | None, kind: str, arg: Any = None) -> tuple:
    shadow, shadow_sends, shadow_note = _MODEL_SOURCE_STEP(record.shadow if record else None, kind, arg)
    count = len(record.chunks) if record else (arg if kind == words.PREFILL else 0)
    machine = source_machine(record)
    effects = _source_events(machine, kind, arg, count)
    note, sends = verdict(effects), sent(effects)
    if (note or "").startswith("violation"):
        agree((shadow_note or "").startswith("violation"), record, kind, arg, effects, shadow_note)
        return record, [], note
    live = machine._records.get(T)
    after = None
    if live:
        agree(shadow is not None, "the model has retired it", record, kind, effects)
        chunks = tuple(
            _CHUNK[live.chunks[i]] if i in live.chunks
            else so.PLANNED if i >= live.assigned and live.phase is SourcePhase.PREFILLING
            else so.SETTLED
            for i in range(count)
        )  # fmt: skip
        after = RealSource(live.phase.name, chunks, freeze(live), shadow)
    agree(not (shadow_note or "").startswith("violation"), record, kind, arg, shadow_note, effects)
    agree(sends == shadow_sends, record, kind, arg, "sent", sends, "the model", shadow_sends)
    agree((after is None) == (shadow is None), record, kind, arg, after, shadow)
    if after:
        agree((after.phase, after.chunks) == tuple(shadow), record, kind, arg, after, shadow)
    if note:
        before = record
        if record and kind == words.CANCEL:  # that it was said is kept, for display alone: what an Ack then answers
            state = tuple((slot, True if slot == "cancelled" else value) for slot, value in record.state)
            before = record._replace(state=state)
        agree(after == before or (after, record) == (None, None), "ignored, and yet changed", record, kind, effects)
    freed = fx.Free(T) in effects
    agree(freed == (record is not None and after is None), "memory and record part ways", record, kind, effects)
    return after, sends, note


# -- D ---------------------------------------------------------------------------------------------------------------


class RealDestination(NamedTuple):
    phase: str
    commit: int
    seen: int
    state: tuple
    shadow: de.Destination | None


class _Context:
    """What the model's step functions are not told."""

    external: tuple = ()
    link = PeerLink.UP
    #: The engine answers a Reserve, and a closed connection becomes quiet, in moves of their own.
    delayed = False


CONTEXT = _Context()
ANSWER, NO_ANSWER, WRITER_QUIET = "answer", "no-answer", "writer-quiet"


def destination_machine(record: RealDestination | None, link: PeerLink, ordinal: int = 0) -> real_de.Destination:
    machine = real_de.Destination()
    machine._ordinal = ordinal
    machine._links[P0] = link
    if record:
        machine._records[T] = thaw(real_de._Record, record.state)
        if record.phase == de.COMPLETE:
            machine._importable[T] = True
    return machine


def reserve_message(ordinal: int) -> wire.Reserve:
    return wire.Reserve(T, ordinal, REQUEST, P0)


def _destination_events(machine: real_de.Destination, kind: str, arg: Any, delayed: bool) -> list:
    if kind in (words.RESERVE, de.NO_ROOM):
        effects = machine.reserve(reserve_message(machine._ordinal + 1))
        if verdict(effects) or delayed:
            return effects
        kind = ANSWER if kind == words.RESERVE else NO_ANSWER
        return effects + _destination_events(machine, kind, None, delayed)
    if kind == ANSWER:
        return machine.reserved(reservation(T))
    if kind == NO_ANSWER:
        return machine.refused(T, "no room", retry=False)
    if kind == words.COMMIT:
        return machine.commit(wire.Commit(T, arg))
    if kind == words.CANCEL:
        return machine.cancel(T)
    if kind == words.RELEASE:
        return machine.release(T)
    if kind == de.RECEIPT:
        return machine.receipt(Receipt(P0, T, arg))
    if kind == de.IMPORT:
        due = machine.phase(T) is DestinationPhase.RECEIVED
        agree(machine.begin_import(T) == due, "the second look said otherwise")
        agree(not machine.begin_import(T), "an import began twice")
        return machine.imported(T)
    if kind == de.ADMIT:
        return machine.activated(T)
    if kind == de.FINISH:
        return machine.finished(T, FinishReason.LENGTH)
    if kind == de.DEVICE_QUIET:
        return machine.device_quiet(T)
    if kind == de.ENGINE_FAILED:
        return machine.engine_failed(T, "no")
    if kind == WRITER_QUIET:
        return machine.peer_down(P0, quiet=True)
    raise ValueError(kind)


def step_destination(record: RealDestination | None, kind: str, arg: Any = None) -> tuple:
    return _step_destination(record, kind, arg, CONTEXT.link, CONTEXT.delayed)


@functools.cache
def _step_destination(record: RealDestination | None, kind: str, arg: Any, link: PeerLink, delayed: bool) -> tuple:
    machine = destination_machine(record, link)
    before = machine.phase(T)
    effects = _destination_events(machine, kind, arg, delayed)
    if before is DestinationPhase.IMPORTED and machine.phase(T) is DestinationPhase.CLOSING:
        effects += machine.device_quiet(T)  # the model's engine computes nothing before it admits
    note, sends = verdict(effects), sent(effects)
    if delayed:
        shadow, shadow_sends, shadow_note = None, sends, note
    else:
        shadow, shadow_sends, shadow_note = _MODEL_DESTINATION_STEP(record.shadow if record else None, kind, arg)
    if (note or "").startswith("violation"):
        agree((shadow_note or "").startswith("violation"), record, kind, arg, effects, shadow_note)
        return record, [], note
    live = machine._records.get(T)
    after = None
    if live:
        seen = sum(1 << i for i in live.seen)
        after = RealDestination(live.phase.name, live.count, seen, freeze(live), shadow)
    agree(not (shadow_note or "").startswith("violation"), record, kind, arg, shadow_note, effects)
    agree(sends == shadow_sends, record, kind, arg, "sent", sends, "the model", shadow_sends)
    if not delayed:
        agree((after is None) == (shadow is None), record, kind, arg, after, shadow)
        if after:
            agree(tuple(after[:3]) == tuple(shadow), record, kind, arg, after, shadow)
    if note:
        agree(after == record or (after, record) == (None, None), "ignored, and yet changed", record, kind, effects)
    freed = fx.Free(T) in effects
    refused = ("Rejected", None) in sends
    gone = record is not None and after is None
    if delayed:
        agree(freed == (gone and not refused), "memory and record part ways", record, kind, effects)
    else:
        agree(freed == gone, "memory and record part ways", record, kind, effects)
    return after, sends, note


# -- C ---------------------------------------------------------------------------------------------------------------

_STATUS = {PeerStatus.UP: co.UP, PeerStatus.LOST: co.LOST, PeerStatus.FENCED: co.FENCED}
_PHASE = {
    CoordinatorPhase.RESERVING: co.RESERVING,
    CoordinatorPhase.PREFILLING: co.PREFILLING,
    CoordinatorPhase.COMMITTED: co.COMMITTED,
    CoordinatorPhase.RECEIVED: co.HANDED_OVER,
    CoordinatorPhase.ENDED: co.ENDED,
}
_OUTCOME = {fx.Ending.FINISHED: co.DONE, fx.Ending.CANCELLED: co.ABORTED, fx.Ending.FAILED: co.BROKEN}
_BACK = {
    words.RESERVED: lambda t, arg: wire.Reserved(reservation(t)),
    words.REJECTED: lambda t, arg: wire.Rejected(t, "no room"),
    words.COMMIT: lambda t, arg: wire.Commit(t, arg),
    words.RECEIVED: lambda t, arg: wire.Received(t),
    words.ACTIVATED: lambda t, arg: wire.Activated(t),
    words.FINISHED: lambda t, arg: wire.Finished(t, FinishReason.LENGTH),
    words.FAILED: lambda t, arg: wire.Failed(t, "no"),
    words.RETIRED: lambda t, arg: wire.Retired(t),
}


class RealPeer(NamedTuple):
    status: PeerStatus
    ordinal: int
    leaving: bool
    known: bool


class RealBook(NamedTuple):
    entries: tuple
    credits_p: tuple
    credits_d: tuple
    status_p: tuple
    status_d: tuple
    ordinal_p: tuple
    ordinal_d: tuple
    stopping: int
    peers_p: tuple
    peers_d: tuple
    capacity: tuple
    external: tuple
    shadow: co.Book


def key_of(external: int) -> RequestKey:
    return RequestKey(f"request-{external}")


def _machine(book: RealBook, choose: Any = None, t: int = -1) -> real_co.Coordinator:
    machine = real_co.Coordinator(choose=choose or (lambda key, request, pairs: None), new_id=lambda: tid(t))
    machine._now = 0.0
    sides: dict = {"P": [], "D": []}
    for side, frozen, capacity in (("P", book.peers_p, book.capacity[0]), ("D", book.peers_d, book.capacity[1])):
        for i, state in enumerate(frozen):
            role = Role.PREFILL if side == "P" else Role.DECODE
            hello = wire.Hello(peer(side, i), role, Capacity(1000, 1, capacity[i], 16, 1000), b"")
            made = real_co._Peer(hello)
            made.status, made.ordinal, made.leaving = state.status, state.ordinal, state.leaving
            made.connected = {peer("D" if side == "P" else "P", k) for k in range(9)}
            sides[side].append(made)
            if state.known:
                machine._peers[made.id] = made
                (machine._prefills if side == "P" else machine._decodes)[made.id] = made
    for u, e in enumerate(book.entries):
        if e.phase in (co.UNBORN, co.GONE):
            continue
        waiting = real_co._Waiting(key_of(book.external[u]), REQUEST, u + 1)
        if e.phase == co.WAITING:
            machine._queue.append(waiting)
            machine._live[waiting.key] = waiting
            continue
        p, d = sides["P"][e.p], sides["D"][e.d]
        entry = real_co._Entry(tid(u), waiting, p, d)
        entry.phase = next(phase for phase, number in _PHASE.items() if number == e.phase)
        entry.p_out, entry.d_out, entry.count = e.p_credit, e.d_credit, e.commit
        machine._entries[entry.transfer] = p.entries[entry.transfer] = d.entries[entry.transfer] = entry
        if entry.p_out:
            p.ledger.take(entry.transfer, 1)
        if entry.d_out:
            d.ledger.take(entry.transfer, 1)
        if entry.phase is not CoordinatorPhase.ENDED:
            machine._live[waiting.key] = entry
    machine._age = len(book.entries)
    machine._stopping = book.stopping
    return machine


def _look(machine: real_co.Coordinator, book: RealBook, shadow: co.Book, placed: dict) -> RealBook:
    """Freeze the machine; what it has forgotten is as it was in ``book``."""
    entries = []
    waiting = {w.age - 1 for w in machine._queue}
    for u, e in enumerate(book.entries):
        entry = machine._entries.get(tid(u))
        if entry:
            p, d = int(entry.p.id.name[1:]), int(entry.d.id.name[1:])
            e = co.Entry(_PHASE[entry.phase], p, d, entry.p_out, entry.d_out, entry.count)
        elif u in waiting:
            e = e._replace(phase=co.WAITING)
        elif e.phase != co.UNBORN or u in placed:
            p, d = placed.get(u, (e.p, e.d))
            e = e._replace(phase=co.GONE, p=p, d=d, p_credit=False, d_credit=False)
        entries.append(e)
    frozen: dict = {"P": [], "D": []}
    credit: dict = {"P": [], "D": []}
    for side, old in (("P", book.peers_p), ("D", book.peers_d)):
        for i, state in enumerate(old):
            found = machine._peers.get(peer(side, i))
            if found:
                state = RealPeer(found.status, found.ordinal, found.leaving, True)
                credit[side].append(found.ledger.slots_free)
            else:
                state = state._replace(status=PeerStatus.FENCED, known=False)
                credit[side].append(book.capacity[0 if side == "P" else 1][i])
            frozen[side].append(state)
    return RealBook(
        tuple(entries), tuple(credit["P"]), tuple(credit["D"]),
        tuple(_STATUS[s.status] for s in frozen["P"]), tuple(_STATUS[s.status] for s in frozen["D"]),
        tuple(s.ordinal for s in frozen["P"]), tuple(s.ordinal for s in frozen["D"]),
        machine._stopping, tuple(frozen["P"]), tuple(frozen["D"]), book.capacity, book.external, shadow,
    )  # fmt: skip


def _sends(effects: list, rules: co.Rules | None, book: RealBook) -> list:
    out: list = []
    for effect in effects:
        if isinstance(effect, fx.SendTo):
            side, i = effect.peer.name[0], int(effect.peer.name[1:])
            message = effect.message
            if isinstance(message, wire.Disconnect):
                if side == "D":  # the model has no use for telling P
                    out.append((("D", i), (words.DISCONNECT, -1, int(message.peer.name[1:]))))
                continue
            if isinstance(message, wire.Stop):
                out.append(((side, i), (words.STOP, -1, None)))
                continue
            t = int(message.transfer, 16)
            argument: Any = None
            if isinstance(message, wire.Reserve):
                argument = message.ordinal
            elif isinstance(message, wire.Prefill):
                agree(rules is not None, "Prefill at the wrong time")
                argument = (rules.chunks[t], message.ordinal)
            elif isinstance(message, wire.Commit):
                argument = message.count
            out.append(((side, i), (type(message).__name__, t, argument)))
        elif isinstance(effect, fx.Tell) and isinstance(effect.event, fx.Ended):
            if effect.transfer is None:
                t = next(u for u, e in enumerate(book.entries)
                         if e.phase in (co.UNBORN, co.WAITING) and key_of(book.external[u]) == effect.key)  # fmt: skip
            else:
                t = int(effect.transfer, 16)
            out.append(((co.USER, t), _OUTCOME[effect.event.ending]))
    return out


def _by_channel(sends: list) -> dict:
    out: dict = defaultdict(list)
    for address, message in sends:
        out[address].append(message)
    return dict(out)


def _finish(
    book: RealBook, machine: real_co.Coordinator, effects: list, expected: tuple, rules: co.Rules | None = None,
    placed: dict | None = None,
) -> tuple:  # fmt: skip
    """Compare with what the model did (``expected``) and freeze."""
    shadow, shadow_sends, shadow_note = expected
    note, sends = verdict(effects), _sends(effects, rules, book)
    if (note or "").startswith("violation"):
        agree((shadow_note or "").startswith("violation"), effects, shadow_note)
        return book, [], note
    agree(not (shadow_note or "").startswith("violation"), shadow_note, effects)
    # the model refuses a waiting request that nobody can serve in a move of its own, the real machine at once
    told = [m for m in sends if m[0][0] == co.USER and shadow.entries[m[0][1]].phase == co.WAITING]
    for (_, t), outcome in told:
        agree(outcome == co.BROKEN and not _served(shadow), "refused without need", effects)
        shadow, more, _ = _MODEL_COORDINATOR["refuse"](shadow, t)
        shadow_sends = shadow_sends + more
    after = _look(machine, book, shadow, placed or {})
    for kind in ("credits_p", "credits_d", "status_p", "status_d", "ordinal_p", "ordinal_d", "stopping"):
        agree(getattr(after, kind) == getattr(shadow, kind), kind, getattr(after, kind), getattr(shadow, kind))
    for t, (ours, theirs) in enumerate(zip(after.entries, shadow.entries, strict=True)):
        agree(ours[:5] == theirs[:5], f"T{t}", ours, theirs, effects)
        if theirs.phase < co.GONE:
            agree(ours.commit == theirs.commit, f"T{t}", ours, theirs)
    agree(_by_channel(sends) == _by_channel(shadow_sends), "sent", sends, "the model", shadow_sends)
    if note:
        agree(after == book and not sends, "ignored, and yet changed", effects)
    outcomes = Counter(
        effect.key for effect in effects if isinstance(effect, fx.Tell) and isinstance(effect.event, fx.Ended)
    )
    agree(all(n == 1 for n in outcomes.values()), "two outcomes at once", effects)
    return after, sends, note


def _served(book: co.Book) -> bool:
    return co.UP in book.status_p and co.UP in book.status_d and not book.stopping


def open_book(transfers: int, credits_p: tuple, credits_d: tuple) -> RealBook:
    shadow = _MODEL_COORDINATOR["open_book"](transfers, credits_p, credits_d)
    fresh = RealPeer(PeerStatus.UP, 0, False, True)
    return RealBook(*shadow, (fresh,) * len(credits_p), (fresh,) * len(credits_d), (credits_p, credits_d),
                    CONTEXT.external, shadow)  # fmt: skip


@functools.cache
def submit(book: RealBook, t: int) -> tuple:
    machine = _machine(book)
    machine._age = t
    effects = machine.submit(key_of(book.external[t]), REQUEST, 0.0)
    born = book._replace(entries=world._put(book.entries, t, book.entries[t]._replace(phase=co.WAITING)))
    expected = _MODEL_COORDINATOR["submit"](book.shadow, t)
    if any(isinstance(e, fx.Tell) for e in effects):  # refused at once: in the model that is the next move
        agree(not _served(book.shadow), "refused without need", effects)
        return born._replace(shadow=expected[0]), [], None
    return _finish(born, machine, effects, expected)


@functools.cache
def refuse(book: RealBook, t: int) -> tuple:
    machine = _machine(book)
    effects: list = []
    machine._refuse_unserved(effects)
    return _finish(book, machine, effects, (book.shadow, [], None))


@functools.cache
def place(book: RealBook, rules: co.Rules, t: int, p: int, d: int) -> tuple:
    done: list = []

    def choose(key: RequestKey, request: Request, pairs: Any) -> Any:
        if done or key != key_of(book.external[t]):
            return None
        done.append(t)
        return next(pair for pair in pairs if (pair.prefill, pair.decode) == (peer("P", p), peer("D", d)))

    machine = _machine(book, choose, t)
    effects = machine.place(0.0)
    return _finish(book, machine, effects, _MODEL_COORDINATOR["place"](book.shadow, rules, t, p, d), rules, {t: (p, d)})


@functools.cache
def abort(book: RealBook, t: int, outcome: str = co.ABORTED) -> tuple:
    expected = _MODEL_COORDINATOR["abort"](book.shadow, t, outcome)
    if book.entries[t].phase not in co.LIVE:
        return book, [], "ignored: already terminal for the caller"
    machine = _machine(book)
    return _finish(book, machine, machine.abort(key_of(book.external[t]), 0.0), expected)


@functools.cache
def peer_lost(book: RealBook, side: str, i: int) -> tuple:
    machine = _machine(book)
    effects = machine.peer_lost(peer(side, i), "gone", 0.0)
    return _finish(book, machine, effects, _MODEL_COORDINATOR["peer_lost"](book.shadow, side, i))


@functools.cache
def peer_joined(book: RealBook, side: str, i: int) -> tuple:
    machine = _machine(book)
    effects = machine.peer_joined(peer(side, i), 0.0)
    return _finish(book, machine, effects, _MODEL_COORDINATOR["peer_joined"](book.shadow, side, i))


@functools.cache
def peer_severed(book: RealBook, p: int, d: int) -> tuple:
    machine = _machine(book)
    effects = machine.handle(peer("D", d), wire.PeerDown(peer("P", p), quiet=True), 0.0)
    return _finish(book, machine, effects, _MODEL_COORDINATOR["peer_severed"](book.shadow, p, d))


@functools.cache
def fatal(book: RealBook) -> tuple:
    machine = _machine(book)
    return _finish(book, machine, machine.fatal("enough", 0.0), _MODEL_COORDINATOR["fatal"](book.shadow))


@functools.cache
def receive(book: RealBook, rules: co.Rules, sender: tuple, message: tuple) -> tuple:
    kind, t, arg = message
    machine = _machine(book)
    effects = machine.handle(peer(*sender), _BACK[kind](tid(t), arg), 0.0)
    return _finish(book, machine, effects, _MODEL_COORDINATOR["receive"](book.shadow, rules, sender, message), rules)


# -- the world -------------------------------------------------------------------------------------------------------

_MODEL_SOURCE_STEP, _MODEL_DESTINATION_STEP = so.step, de.step
_REAL_COORDINATOR = {
    f.__name__: f
    for f in (open_book, submit, refuse, place, abort, peer_lost, peer_joined, peer_severed, fatal, receive)
}
_MODEL_COORDINATOR = {name: getattr(co, name) for name in _REAL_COORDINATOR}
_MODEL_WORLD = {
    name: getattr(world, name)
    for name in ("_to_source", "_to_destination", "_reserve", "_close_end", "_exit", "_peer_moves", "_engine_moves")
}


def _to_source(w: world.World, config: world.Config, p: int, kind: str, t: int, arg: Any) -> world.World:
    if kind == words.PREFILL:
        record = w.src[t] if isinstance(w.src[t], RealSource) else None
        replayed = verdict(source_machine(record, w.seen_p[p]).prefill(prefill_message(arg[1]))) == "ignored: replayed"
        agree(replayed == (arg[1] <= w.seen_p[p]), "a replay was taken for new, or the reverse")
    return _MODEL_WORLD["_to_source"](w, config, p, kind, t, arg)


def _to_destination(w: world.World, config: world.Config, t: int, kind: str, arg: Any = None) -> world.World:
    e = w.book.entries[t]
    CONTEXT.link = PeerLink.CLOSING if ("closing", e.p, e.d) in w.severed else PeerLink.UP
    if ("quiet", e.p, e.d) in w.severed:
        CONTEXT.link = PeerLink.QUIET
    return _MODEL_WORLD["_to_destination"](w, config, t, kind, arg)


def _reserve(w: world.World, config: world.Config, d: int, t: int, ordinal: int, kind: str) -> world.World:
    record = w.dst[t] if isinstance(w.dst[t], RealDestination) else None
    machine = destination_machine(record, PeerLink.UP, w.seen_d[d])
    replayed = verdict(machine.reserve(reserve_message(ordinal))) == "ignored: replayed"
    agree(replayed == (ordinal <= w.seen_d[d]), "a replay was taken for new, or the reverse")
    return _MODEL_WORLD["_reserve"](w, config, d, t, ordinal, kind)


def _close_end(w: world.World, d: int, p: int) -> world.World:
    """D is told to close its end; what is buffered there is applied until it is quiet."""
    marks = (("closing", p, d), ("quiet", p, d))
    return w if any(mark in w.severed for mark in marks) else w._replace(severed=(*w.severed, marks[0]))


def _exit(w: world.World, side: str, i: int) -> world.World:
    """A stopped D leaves when every closed end is quiet."""
    if side == "P" or not any(mark[0] == "closing" and mark[2] == i for mark in w.severed):
        return _MODEL_WORLD["_exit"](w, side, i)
    return w if ("leaving", i) in w.severed else w._replace(severed=(*w.severed, ("leaving", i)))


def _peer_moves(w: world.World, config: world.Config) -> Iterator:
    yield from _MODEL_WORLD["_peer_moves"](w, config)
    for mark in w.severed:
        if mark[0] == "closing" and w.alive_d[mark[2]]:
            _, p, d = mark
            w2 = _MODEL_WORLD["_close_end"](w, d, p)
            for t, e in enumerate(w.book.entries):
                if (e.p, e.d) == (p, d) and isinstance(w2.dst[t], RealDestination):
                    w2 = _to_destination(w2, config, t, WRITER_QUIET)
            w2 = w2._replace(severed=(*(m for m in w2.severed if m != mark), ("quiet", p, d)))
            if ("leaving", d) in w2.severed:
                w2 = _exit(w2, "D", d)
            yield (f"D{d} end of P{p} is quiet",), True, w2


def _engine_moves(w: world.World, config: world.Config, t: int) -> Iterator:
    yield from _MODEL_WORLD["_engine_moves"](w, config, t)
    record = w.dst[t]
    if isinstance(record, RealDestination) and record.phase == "RESERVING" and w.alive_d[w.book.entries[t].d]:
        yield ("D answers", t), True, _to_destination(w, config, t, ANSWER)
        if world._left(w, "reject"):
            yield ("D refuses", t), False, _to_destination(world._spend(w, "reject"), config, t, NO_ANSWER)


@contextlib.contextmanager
def real_machines(config: world.Config, delayed: bool = False) -> Iterator[None]:
    """Within, the model's world runs the real machines.

    ``delayed``: D's engine answers in a move of its own, and so does the end of a closed connection.
    """
    CONTEXT.external, CONTEXT.delayed = config.external, delayed
    legal = de.LEGAL
    changes: dict = {"_to_source": _to_source, "_to_destination": _to_destination, "_reserve": _reserve}
    if delayed:
        changes |= {
            "_close_end": _close_end,
            "_exit": _exit,
            "_peer_moves": _peer_moves,
            "_engine_moves": _engine_moves,
        }
        legal = legal | {(None, "RESERVING"), ("RESERVING", de.AWAITING), ("RESERVING", de.HELD), ("RESERVING", None)}
    try:
        # the world sees our machines where it looked for the model's
        world.so = SimpleNamespace(**{**vars(so), "step": step_source, "Source": RealSource})
        world.de = SimpleNamespace(
            **{**vars(de), "step": step_destination, "Destination": RealDestination, "LEGAL": legal}
        )
        world.co = SimpleNamespace(**{**vars(co), **_REAL_COORDINATOR})
        for name, function in changes.items():
            setattr(world, name, function)
        yield
    finally:
        world.so, world.de, world.co = so, de, co
        for name, function in _MODEL_WORLD.items():
            setattr(world, name, function)
        CONTEXT.external, CONTEXT.link, CONTEXT.delayed = (), PeerLink.UP, False
        for cache in (step_source, _step_destination, *_REAL_COORDINATOR.values()):
            getattr(cache, "cache_clear", lambda: None)()
