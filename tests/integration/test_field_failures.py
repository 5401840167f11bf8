"""What went wrong in other systems that do this job, as docs/field-failures.md lists it: the situations for which no
other test exists.  Real machines, guards and stages, a scripted engine, a stepped wire and a clock that stands still.

Item numbers are those of the page.
"""

from __future__ import annotations

import gc
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvbaton import messages
from kvbaton.connector import Chunk, Completion, Endpoint, MemoryRegion, Outcome, PeerEvent, Receipt, RegionInfo
from kvbaton.engine import Request, Role, SamplingParams
from kvbaton.errors import PeerLost
from kvbaton.guard import GuardedConnector
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Deadlines, Limits, Pair
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton.identity import PeerId, RequestKey, TransferId, new_transfer_id
from kvbaton.segments import Segments, coalesce, split
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.gate import broken_wire
from kvbaton_conformance.growth import Growth
from kvbaton_conformance.scripted import ScriptedLayout
from kvbaton_conformance.scripted_connector import ScriptedConnector
from kvbaton_conformance.suite.handoff import boundaries

REQUEST = Request(tuple(range(30)), SamplingParams(max_tokens=5))
OTHER = Request(tuple(range(100, 122)), SamplingParams(max_tokens=3))
Open = Callable[..., Deployment]


def prompt(start: int, length: int, max_tokens: int = 4) -> Request:
    """A prompt that shares no beginning with one of another ``start``."""
    return Request(tuple(range(start, start + length)), SamplingParams(max_tokens=max_tokens))


@pytest.fixture
def deploy() -> Iterator[Open]:
    """``deploy(**how)``: stages over a stepped loopback; D cannot revoke, unless told otherwise."""
    opened: list[Deployment] = []

    def one(**how: Any) -> Deployment:
        settings = {"transfer.chunk_bytes": 400, "deadline.chunk": 30.0, "deadline.shutdown": 5.0}
        how = {"stepped": True, "narrow": {"revocable": False}, **how}
        world = Deployment("loopback", **{**how, "settings": {**settings, **how.get("settings", {})}})
        opened.append(world)
        return world

    yield one
    while opened:
        opened.pop().abandon()


@pytest.fixture
def world(deploy: Open) -> Deployment:
    return deploy()


def blocks_of(world: Deployment, name: str, transfer: TransferId) -> set[int]:
    return {block for table in world.seats[name].engine.tables(transfer) for block in table}


def failed(world: Deployment, key: str, cause: str) -> None:
    ends = world.answers[key].endings
    assert [end.ending for end in ends] == [fx.Ending.FAILED], world.describe()
    assert cause in ends[0].cause


# -- memory reused before the wire is quiet ----------------------------------------------------------------------------


@pytest.mark.clause("C5.1", "C5.2", "C7.1")
def test_two_aborts_are_both_answered_after_the_drain(world: Deployment) -> None:
    """Item 2.  Each stage is told twice, by two who do not know of each other, while a chunk is on the wire."""
    answer = world.submit("a", REQUEST)
    boundaries.committed(world)
    world.abort("a")
    world.settle()
    for name in world.seats:
        world.resend(name, messages.Cancel(answer.transfer))
    world.abort("a")
    world.settle()
    assert not world.letters(messages.Retired), "nobody answers before the drain"
    assert (world.p, world.d) == (SourcePhase.DRAINING, DestinationPhase.HELD)
    world.let_go()
    world.run_until(world.idle)
    answers = [mail.peer.name for mail in world.mail if isinstance(mail.message, messages.Retired)]
    assert sorted(answers) == ["decode-0", "prefill-0"], "and each answers once"
    assert [end.ending for end in answer.endings] == [fx.Ending.CANCELLED]
    world.finish()


@pytest.mark.clause("C5.2", "C8.1")
@pytest.mark.parametrize("revocable", [False, True])
def test_blocks_of_an_aborted_load_are_nobody_elses_while_it_lasts(deploy: Open, revocable: bool) -> None:
    """Item 3.  D is loading a request's cache when it is aborted; others want the memory, and decode in what is left.

    Also where D could take grants back: it cannot take back what is being written.
    """
    layouts = {Role.PREFILL: ScriptedLayout(blocks=200), Role.DECODE: ScriptedLayout(blocks=40, gap=5)}
    world = deploy(layouts=layouts, prefix_caching=False, narrow={} if revocable else {"revocable": False})
    answer = world.submit("a", REQUEST)
    boundaries.committed(world)
    loading = blocks_of(world, "decode-0", answer.transfer)
    wires = [seat.connector.wire for seat in world.seats.values()]
    world.abort("a")
    for number in range(6):
        world.submit(f"b{number}", prompt(1000 * number + 500, 7, max_tokens=9))
    world.settle()
    d = world.seats["decode-0"]
    assert d.phases[answer.transfer] is DestinationPhase.HELD
    others = set[int]().union(*(blocks_of(world, "decode-0", t) for t in d.phases if t != answer.transfer))
    assert others
    assert not others & loading
    while any(wire.finish() for wire in wires):  # the late write
        world.check_memory()
    world.let_go()
    world.run_until(world.idle)
    for number in range(6):
        world.check_answer(f"b{number}")
    world.finish()


@pytest.mark.clause("C5.1", "C8.1", "C8.2")
def test_a_computed_source_stays_until_it_was_sent(deploy: Open) -> None:
    """Item 6.  P has computed everything, the transport takes nothing yet, and other requests want P's memory."""
    layouts = {Role.PREFILL: ScriptedLayout(blocks=28), Role.DECODE: ScriptedLayout(blocks=160, gap=5)}
    world = deploy(layouts=layouts)
    p = world.seats["prefill-0"]
    answer = world.submit("a", REQUEST)
    p.gate.hold("submissions")
    world.run_until(lambda: bool(p.engine.tables(answer.transfer)) and not p.engine.has_work() if world.p else False)
    mine = p.engine.tables(answer.transfer)
    kept = p.engine.memory.copy()
    for number in range(8):
        world.submit(f"b{number}", prompt(1000 * number + 500, 9))
    world.settle()
    assert len(p.phases) > 1, "others are computed beside it"
    for transfer in p.phases:
        assert transfer == answer.transfer or not blocks_of(world, "prefill-0", transfer) & {b for t in mine for b in t}
    assert p.engine.tables(answer.transfer) == mine
    changed = {int(at) // (56 * 4) for at in np.flatnonzero(kept != p.engine.memory)}
    assert not changed & {block for table in mine for block in table}, "the source has changed before it was sent"
    world.let_go()
    world.run_until(world.idle)
    for key in world.answers:
        world.check_answer(key)
    world.finish()


@pytest.mark.clause("C5.4", "C8.5", "T10")
def test_no_age_deregisters_memory_under_an_open_read(deploy: Open) -> None:
    """Item 7.  A chunk never ends, and every deadline there is passes, that of P's shutdown included.

    Nothing is closed or deregistered; when the bytes land after all, they land where they were meant to.
    """
    world = deploy(deadlines=Deadlines(drain=20.0, receipts=20.0))
    answer = world.submit("a", REQUEST)
    boundaries.committed(world)
    world.launcher_runs = False
    for seconds in (31, 61, 3600):
        world.advance(seconds)
        world.settle()
    failed(world, "a", "deadline")
    p, d = world.seats["prefill-0"], world.seats["decode-0"]
    p.stage.channel.sever("the coordinator's process is gone")
    world.settle()
    world.advance(3600)
    world.settle()
    assert p.stage.outcome is not None
    assert p.stage.outcome.status == 1
    assert answer.transfer in p.stage.outcome.reason, "it says what it could not let go of"
    for seat in (p, d):
        assert not seat.gate.called("close"), f"{seat.peer.name} deregistered memory under an operation"
        assert seat.engine.statistics()["blocks_used"] > 0
    world.carry()
    world.check_memory()


# -- leases, deadlines, terminal states --------------------------------------------------------------------------------


@pytest.mark.clause("C6.1", "C6.3", "C7.4", "C8.5")
@pytest.mark.parametrize("name", ["receipts", "chunk"])
def test_what_has_expired_is_never_served(deploy: Open, name: str) -> None:
    """Item 9.  A deadline passes, its caller hears of a failure, and then everything arrives after all.

    No token, no second outcome, no import, no published prefix; and the memory serves others only when it is quiet.
    """
    deadlines = Deadlines(receipts=15.0 if name == "receipts" else 600.0)
    layouts = {Role.PREFILL: ScriptedLayout(blocks=96), Role.DECODE: ScriptedLayout(blocks=40, gap=5)}
    world = deploy(deadlines=deadlines, layouts=layouts)
    answer = world.submit("a", REQUEST)
    boundaries.committed(world)
    world.submit("next", prompt(500, 30, max_tokens=40))
    world.advance(20 if name == "receipts" else 31)
    world.settle()
    failed(world, "a", "deadline.receipts" if name == "receipts" else "passed its deadline")
    assert world.d is DestinationPhase.HELD
    assert not world.answers["next"].transfers, "its memory was promised to another"
    world.let_go()
    world.run_until(world.idle)
    failed(world, "a", "deadline")
    assert not answer.tokens
    for word in (messages.Received, messages.Activated):
        assert not world.letters(word, answer.transfer)
    world.check_answer("next")
    world.finish()


@pytest.mark.clause("C2.5", "C6.1", "C8.4")
def test_three_hundred_cancels_in_every_state_and_one_request_is_served(deploy: Open) -> None:
    """Item 11.  Everything at once, on the stages themselves: waiting, reserving, computing, sending, decoding."""
    draw = random.Random(11)
    world = deploy(limits=Limits(waiting=400), prefill=2, decode=2)
    seen: set[Any] = set()
    live: list[str] = []
    for number in range(300):
        world.submit(str(number), prompt(1000 * number, draw.randrange(1, 30), max_tokens=8))
        live.append(str(number))
        world.flow = number % 5 != 0
        for _ in range(draw.randrange(4)):
            world.turn()
        if len(live) > draw.randrange(12):
            doomed = world.answers[live.pop(draw.randrange(len(live)))]
            if not doomed.ended:
                phases = [s.phases.get(doomed.transfer) for s in world.seats.values()] if doomed.transfers else []
                seen |= {phase for phase in phases if phase is not None} or {"waiting"}
                world.abort(next(key for key, answer in world.answers.items() if answer is doomed))
    for key in live:
        world.abort(key)
    source = {SourcePhase.PREFILLING, SourcePhase.COMMITTED}
    destination = {DestinationPhase.RESERVING, DestinationPhase.RESERVED, DestinationPhase.ACTIVE}
    assert {"waiting"} | source | destination <= seen, seen
    world.let_go()
    world.run_until(world.idle)
    world.check_balance()
    world.submit("after", REQUEST)
    world.run_until(world.idle)
    world.check_answer("after")
    world.finish()


@pytest.mark.clause("C6.3", "T5", "C4.2")
@pytest.mark.parametrize("how", ["submit raises", "the chunk fails", "the receipt is lost"])
def test_one_of_many_writes_is_missing_and_the_failure_names_it(deploy: Open, how: str) -> None:
    """Item 15.  Chunk 2 of many never gets through.  The request fails at once, or by its deadline, and says which."""
    world = deploy(settings={"deadline.receipts": 15.0})
    p, d = world.seats["prefill-0"], world.seats["decode-0"]
    answer = world.submit("a", REQUEST)
    if how == "the receipt is lost":
        d.gate.hold("receipts")
        world.run_until(lambda: bool(world.letters(messages.Commit)))
        count = world.letters(messages.Commit)[0].count
        world.run_until(lambda: d.gate.waiting[1] >= count)
        for receipt in d.gate.set_aside():
            if receipt.sequence != 2:
                d.gate.inject(receipt)
        world.settle()
        assert not answer.ended, "nobody has counted to the number of chunks"
        world.advance(16)
    else:
        p.gate.hold("submissions")
        world.run_until(lambda: world.p is SourcePhase.PREFILLING)
        world.settle()
        taken = p.gate.submit
        offered: list[int] = []

        def submit(chunk: Chunk) -> bool:
            offered.append(chunk.sequence)
            if chunk.sequence == 2:
                quiet = how == "the chunk fails"
                p.gate.fail_next(broken_wire(), source_quiet=quiet, target_quiet=quiet, raises=not quiet)
            return taken(chunk)

        p.gate.submit = submit  # type: ignore[method-assign]
        p.gate.let_go("submissions")
    world.run_until(lambda: answer.ended)
    world.settle()
    if how == "the receipt is lost":
        failed(world, "a", "C6.7: deadline.receipts of 15 s passed (no receipt of chunks 2)")
        assert answer.ending.peer == d.peer
    else:
        failed(world, "a", "chunk 2")
        assert answer.ending.peer == p.peer
    assert not answer.tokens
    world.let_go()
    if how == "submit raises":  # which proves nothing: only the end of P's process does
        world.crash("prefill-0")
    world.run_until(world.idle)
    world.finish()


@pytest.mark.clause("C1.2", "C7.4", "T12")
def test_a_flood_of_unknown_ids_leaves_nothing(world: Deployment) -> None:
    """Item 16.  Thousands of messages, receipts and completions about transfers that nobody knows, at every party."""
    seats = {name: world.seats[name] for name in ("prefill-0", "decode-0")}
    p, d = seats["prefill-0"].peer, seats["decode-0"].peer

    def flood(count: int) -> None:
        for _ in range(count):
            t = new_transfer_id()
            for word in (messages.Cancel(t), messages.Ack(t)):
                world.resend("prefill-0", word)
            for order in (messages.Cancel(t), messages.Release(t), messages.Commit(t, 3)):
                world.resend("decode-0", order)
            for said in (messages.Progress(t, 1), messages.Commit(t, 3), messages.Retired(t), messages.Failed(t, "x")):
                world.repeat("prefill-0", said)
            for heard in (
                messages.Received(t),
                messages.Activated(t),
                messages.Output(t, 0, (1,)),
                messages.Retired(t),
            ):
                world.repeat("decode-0", heard)
            seats["decode-0"].gate.inject(Receipt(p, t, 0))
            seats["prefill-0"].gate.inject(Completion(t, 0, Outcome.DONE, True, True, None))
            world.turn()
            world.forget()

    def tables() -> list[int]:
        machines = [len(seat.stage.machine) for seat in seats.values()]
        return [*machines, len(world.coordinator), *(int(s.engine.statistics()["transfers"]) for s in seats.values())]

    flood(50)
    watch = Growth()
    flood(1000)
    assert tables() == [0] * 5
    assert not watch.per(1000)
    assert world.seats["prefill-0"].guard.statistics()["dropped_completion_unknown"] == 1050
    assert world.view("prefill-0").repeated_returns == world.view("decode-0").repeated_returns == 0
    assert d not in world.kills
    world.submit("a", REQUEST)
    world.run_until(world.idle)
    world.check_answer("a")
    world.finish()


# -- duplicates, late messages, ids ------------------------------------------------------------------------------------


@pytest.mark.clause("C1.2", "C1.3", "T5")
@pytest.mark.parametrize("end", ["finished", "cancelled"])
def test_a_completion_of_a_freed_request_takes_nobody_down(world: Deployment, end: str) -> None:
    """Item 17.  Long after both sides have freed it, every chunk is reported once more, in every way there is."""
    answer = world.submit("a", REQUEST)
    if end == "cancelled":
        boundaries.committed(world)
        world.abort("a")
        world.let_go()
    world.run_until(world.idle)
    p, d = world.seats["prefill-0"], world.seats["decode-0"]
    used = [seat.engine.statistics() for seat in (p, d)]
    for chunk in list(p.gate.submitted):
        for outcome in Outcome:
            p.gate.inject(Completion(chunk.transfer, chunk.sequence, outcome, True, True, None))
        d.gate.inject(Receipt(p.peer, chunk.transfer, chunk.sequence))
    for seat in (p, d):  # and what an engine may still hear, in any order
        seat.engine.suspend_transfer(answer.transfer)
        seat.engine.release_transfer(answer.transfer)
        seat.engine.release_transfer_compute(answer.transfer)
    d.engine.accept_import(answer.transfer, 30)
    world.settle()
    assert not any(seat.over for seat in (p, d))
    assert [seat.engine.statistics() for seat in (p, d)] == used
    assert not world.violations
    assert not world.kills
    world.submit("b", OTHER)
    world.run_until(world.idle)
    world.check_answer("b")
    world.finish()


@pytest.mark.clause("T5", "C7.1", "C7.2")
def test_two_parts_of_a_transport_report_one_chunk(deploy: Open) -> None:
    """Item 18.  The end of a chunk is said by two parts of P's transport, and its receipt by two of D's: it counts
    once; said by a second *peer* it is refused."""
    world = deploy()
    p, d = world.seats["prefill-0"], world.seats["decode-0"]
    taken = type(p.gate).poll

    def poll_twice(gate: Any) -> Any:
        progress = taken(gate)
        return type(progress)(progress.completions * 2, progress.receipts * 2, progress.peers * 2)

    for gate in (p.gate, d.gate):
        gate.poll = poll_twice.__get__(gate)  # type: ignore[method-assign]
    for number in range(4):
        world.submit(str(number), prompt(1000 * number, 25))
    world.run_until(world.idle)
    count = len(p.gate.submitted)
    figures = p.guard.statistics()
    assert (figures["done_total"], figures["dropped_completion_unknown"]) == (count, count)
    for key in world.answers:
        world.check_answer(key)
    assert not world.violations
    world.finish()


@pytest.mark.clause("C1.1", "C1.2", "C1.3", "C7.4")
@pytest.mark.parametrize("end", ["finished", "cancelled", "expired"])
@pytest.mark.parametrize(
    "when", [boundaries.computing, boundaries.committed, boundaries.decoding], ids=lambda f: f.__name__
)
def test_a_stale_reference_is_never_answered_with_an_earlier_prompt(
    deploy: Open, end: str, when: Callable[[Deployment], None]
) -> None:
    """Item 21.  An id is used again with another prompt of equal length, and everything that was ever said about its
    first generation, orders to reserve and to prefill included, is said again."""
    world = deploy(deadlines=Deadlines(receipts=15.0))
    first = world.submit("a", REQUEST)
    if end != "finished":
        boundaries.committed(world)
        if end == "cancelled":
            world.abort("a")
        else:
            world.advance(16)
            world.settle()
        world.let_go()
    world.run_until(world.idle)
    old = [mail for mail in world.mail if messages.family_of(mail.message) == "transfer"]
    chunks = len(world.seats["prefill-0"].gate.submitted)
    ending = list(first.endings)
    second = world.submit("a", prompt(5000, 30))
    when(world)
    for mail in old:
        say = world.resend if mail.way == "to" else world.repeat
        say(mail.peer.name, mail.message)
    for sequence in range(chunks):
        world.seats["decode-0"].gate.inject(Receipt(world.seats["prefill-0"].peer, first.transfer, sequence))
    world.settle()
    world.let_go()
    world.run_until(world.idle)
    world.check_answer("a")
    assert first.endings == ending
    late = list(world.seats["prefill-0"].gate.submitted)[chunks:]
    assert {chunk.transfer for chunk in late} == {second.transfer}, "an old order was carried out again"
    assert len(second.transfers) == 1
    assert not world.violations
    again = world.view("prefill-0").repeated_returns + world.view("decode-0").repeated_returns
    world.finish(returned_twice=again)
    assert again == 0, "what is forgotten is unknown"


# -- peer death, restart -----------------------------------------------------------------------------------------------


@pytest.mark.clause("T7", "C6.3", "C6.4")
@pytest.mark.parametrize("method", ["submit", "poll", "cancel", "fenced", "disconnect"])
def test_what_a_dead_peer_makes_the_transport_raise_kills_no_healthy_worker(deploy: Open, method: str) -> None:
    """Item 25.  One of two D dies with chunks under way, and P's transport raises at its next call; the other D is
    served on."""
    victim = "decode-1"

    def for_victim(key: RequestKey, _request: Request, pairs: Sequence[Pair]) -> Pair:
        return next((pair for pair in pairs if (pair.decode.name == victim) is ("doomed" in key)), pairs[0])

    world = deploy(decode=2, choose=for_victim)
    doomed = world.submit("doomed", REQUEST)
    boundaries.committed(world)
    assert doomed.transfer in world.seats[victim].phases
    p = world.seats["prefill-0"]
    real = getattr(p.gate, method)
    raised: list[Any] = []

    def raises_once(*given: Any) -> Any:
        if not raised and (method != "submit" or given[0].peer.name == victim):
            raised.append(given)
            raise ConnectionResetError(f"{victim} has reset the connection")
        return real(*given)

    setattr(p.gate, method, raises_once)
    if method == "submit":
        world.submit("doomed too", OTHER)
        world.run_until(lambda: bool(raised))
    elif method == "cancel":
        world.abort("doomed")
        world.settle()
    world.crash(victim)
    world.let_go()
    world.submit("b", prompt(900, 20))
    world.run_until(lambda: world.answers["b"].ended)
    world.check_answer("b")
    assert raised
    assert not p.over
    assert p.peer not in world.kills
    world.run_until(world.idle)
    world.restart(victim)
    world.finish()


@pytest.mark.clause("T2", "C6.4", "C1.4")
@pytest.mark.parametrize("restarted", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("end", ["prefill-0", "decode-0"])
def test_a_pair_that_was_cut_is_a_pair_again(deploy: Open, end: str, restarted: str) -> None:
    """Item 26.  A connection between two living stages is down at one end.  Everybody's idea of who is connected
    agrees: nothing more is placed on the pair, the other pair serves on, and after a restart of either stage the pair
    serves again."""
    world = deploy(prefill=2, choose=lambda key, request, pairs: min(pairs, key=lambda pair: pair.prefill.name))
    p, d = world.seats["prefill-0"], world.seats["decode-0"]
    other = d.peer if end == "prefill-0" else p.peer
    world.seats[end].gate.inject(PeerEvent(other, False, True, PeerLost("reset by peer")))
    world.run_until(lambda: not world.coordinator.connected(p.peer, d.peer))
    world.submit("meanwhile", REQUEST)
    world.run_until(world.idle)
    world.check_answer("meanwhile")
    assert not p.gate.submitted, "it went over the pair that is left"
    world.crash(restarted)
    world.restart(restarted)
    assert world.coordinator.connected(world.seats["prefill-0"].peer, world.seats["decode-0"].peer)
    world.submit("again", OTHER)
    world.run_until(world.idle)
    world.check_answer("again")
    assert world.seats["prefill-0"].gate.submitted
    world.finish()


# -- geometry, descriptors ---------------------------------------------------------------------------------------------


@pytest.mark.clause("C3.5", "C3.2")
@pytest.mark.parametrize(("mine", "theirs"), [(40, 300), (300, 40)])
def test_stages_with_different_numbers_of_blocks(deploy: Open, mine: int, theirs: int) -> None:
    """Item 27.  Block numbers of one stage do not exist at the other; strides differ, too."""
    layouts = {Role.PREFILL: ScriptedLayout(blocks=mine, gap=3), Role.DECODE: ScriptedLayout(blocks=theirs, gap=9)}
    world = deploy(layouts=layouts)
    beyond = 0
    for number in range(30):
        answer = world.submit(str(number), prompt(1000 * number, 20 + number % 7))
        world.run_until(lambda answer=answer: answer.ended)  # type: ignore[misc]
        for name in ("prefill-0", "decode-0"):
            gate = world.seats[name].gate
            beyond = max(
                [beyond, *(max(max(t) for t in r.reservation.tables) for r in world.letters(messages.Reserved))]
            )
            gate.calls.clear()
    if theirs > mine:
        assert beyond >= mine, "D's blocks went beyond the number that P has"
    world.run_until(world.idle)
    for key in world.answers:
        world.check_answer(key)
    world.finish()


@pytest.mark.clause("C3.5", "T2")
def test_unequal_block_sizes_are_refused_at_the_handshake(deploy: Open) -> None:
    """Item 28.  Both sides refuse before anything is connected, and both values are in the error."""
    layouts = {Role.PREFILL: ScriptedLayout(block_tokens=4), Role.DECODE: ScriptedLayout(block_tokens=8)}
    world = deploy(layouts=layouts, connected=False)
    world.run_until(lambda: len(world.letters(messages.PeerDown)) == 2)
    for word in world.letters(messages.PeerDown):
        assert word.cause.startswith("C3.5")
        assert "block_tokens" in word.cause
        assert {"4", "8"} <= set(word.cause.replace(":", " ").replace(".", " ").replace(",", " ").split())
    assert not any(seat.gate.called("connect") for seat in world.seats.values())
    world.close()


def lines_run(action: Callable[[], object]) -> int:
    """Lines of Python that ``action`` runs."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what others left behind would be finalised in between, and counted
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.clause("C3.6", "T12")
@pytest.mark.parametrize("what", ["coalesce", "split", "submit", "wire"])
def test_a_hundred_thousand_descriptors_cost_no_python_each(what: str) -> None:
    """Item 29.  The lines of Python that planning and posting run do not depend on how many descriptors there are."""

    def cost(count: int) -> int:
        at = 48 * np.arange(count, dtype=np.int64)
        rows = Segments(np.zeros(count, np.int64), at, np.full(count, 32, np.int64))
        if what == "coalesce":
            return lines_run(lambda: coalesce(rows, rows))
        if what == "split":
            return lines_run(lambda: split(rows, rows, 1 << 40, 1 << 40))
        if what == "wire":
            return lines_run(lambda: Segments.from_bytes(rows.to_bytes()))
        me, peer = PeerId("prefill-0", 1), PeerId("decode-0", 1)
        plugin = ScriptedConnector(replace(ScriptedConnector().capabilities, max_segments=1 << 20))
        guard = GuardedConnector(plugin, transport="scripted", version="1", peer=me)
        memory = np.zeros(48 * count, np.uint8)
        guard.register([MemoryRegion.of_array(0, memory)])
        guard.connect(Endpoint("scripted", "1", peer, (RegionInfo(0, "host", len(memory)),), b"", b""))
        plugin.up(peer)
        guard.poll()
        chunk = Chunk(new_transfer_id(), 0, peer, rows, rows, rows.nbytes)
        spent = lines_run(lambda: guard.submit(chunk))
        assert plugin.posted == [chunk]
        return spent

    few, many = cost(1_000), cost(100_000)
    assert many <= few + 50, f"{few} lines for 1,000 descriptors, {many} for 100,000"


@pytest.mark.clause("C3.6", "T6", "T8")
def test_a_long_context_goes_in_pieces_each_within_its_deadline(deploy: Open) -> None:
    """Item 30.  P computes much faster than the wire carries: ten seconds for each chunk, many deadlines for the whole.

    No chunk is late, because the planner splits, and no more is posted at once than the budget allows.
    """
    size = 2048
    layouts = {Role.PREFILL: ScriptedLayout(blocks=600), Role.DECODE: ScriptedLayout(blocks=600, gap=5)}
    settings = {"transfer.chunk_bytes": size, "transfer.inflight_bytes": 2 * size, "deadline.chunk": 30.0}
    never = Deadlines(*[float("inf")] * 6)
    world = deploy(layouts=layouts, settings=settings, deadlines=never, chunk=250)
    p = world.seats["prefill-0"]
    answer = world.submit("a", prompt(0, 1000))
    world.flow = False
    turns = spent = 0

    def slowly() -> None:
        nonlocal turns, spent
        turns += 1
        if turns % 5 == 0 and p.guard.outstanding():
            world.advance(10)
            spent += 10
            p.connector.wire.start()
            p.connector.wire.finish()

    world.between = slowly
    world.run_until(lambda: answer.ended)
    world.between = lambda: None
    world.check_answer("a")
    assert spent > 10 * 30
    assert max(chunk.nbytes for chunk in p.gate.submitted) <= size
    world.flow = True
    world.run_until(world.idle)
    world.finish()
