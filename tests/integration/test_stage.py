"""Stages under every kind of trouble, turn by turn: real machines and guards, a scripted engine, a stepped wire."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest

from kvbaton import Request, SamplingParams, tracing
from kvbaton.engine import Role, StepOutput
from kvbaton.errors import PeerLost
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Deadlines, Limits
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton.identity import TransferId
from kvbaton.messages import Call, Failed, PeerDown, Reply, Reserved
from kvbaton.settings import Settings
from kvbaton.stage.engine_loop import EngineLoop, Quit, Released
from kvbaton.stage.prefill import PrefillStage
from kvbaton.stage.tracing import Recorder
from kvbaton.stage.worker import run
from kvbaton.tracing import Paused, Resumed
from kvbaton_conformance.deployment import Deployment, StageSeat
from kvbaton_conformance.scripted import ScriptedLayout
from kvbaton_loopback.plugin import LoopbackPlugin

PROMPT = tuple(range(30))
REQUEST = Request(PROMPT, SamplingParams(max_tokens=5))


def open_world(*, revocable: bool = False, settings: Mapping[str, object] | None = None, **more: Any) -> Deployment:
    """One P, one D, a wire that moves only while ``flow`` is set.

    ``revocable`` False: D cannot take a grant back by itself, as with most transports.
    """
    return Deployment(
        "loopback", stepped=True, narrow={} if revocable else {"revocable": False},
        settings={
            "transfer.chunk_bytes": 400, "deadline.shutdown": 5.0, "deadline.chunk": 30.0, **(settings or {}),
        }, **more,
    )  # fmt: skip


@pytest.fixture
def world() -> Deployment:
    return open_world()


# -- one boundary after another ----------------------------------------------------------------------------------------


def reach_computing(world: Deployment) -> None:
    world.seats["prefill-0"].device_runs = False
    world.run_until(lambda: world.seats["prefill-0"].device.pending() > 0)


def reach_posted(world: Deployment) -> None:
    world.flow = False
    world.run_until(lambda: world.seats["prefill-0"].guard.outstanding() > 0)


def reach_committed(world: Deployment) -> None:
    world.flow = False
    world.run_until(lambda: world.p is SourcePhase.COMMITTED)


def reach_received(world: Deployment) -> None:
    world.seats["decode-0"].engine_frozen = False
    world.run_until(lambda: world.p is SourcePhase.COMMITTED)
    world.seats["decode-0"].engine_frozen = True
    world.run_until(lambda: world.d is DestinationPhase.RECEIVED)


def reach_decoding(world: Deployment) -> None:
    world.run_until(lambda: world.d is DestinationPhase.ACTIVE)


BOUNDARIES: Sequence[tuple[str, Callable[[Deployment], None], DestinationPhase | None]] = [
    ("reserving", lambda world: None, None),
    (
        "reserved",
        lambda world: world.run_until(lambda: world.d is DestinationPhase.RESERVED),
        DestinationPhase.RESERVED,
    ),
    ("computing", reach_computing, DestinationPhase.RESERVED),
    ("posted", reach_posted, DestinationPhase.RESERVED),
    ("committed", reach_committed, DestinationPhase.RESERVED),
    ("received", reach_received, DestinationPhase.RECEIVED),
    ("decoding", reach_decoding, DestinationPhase.ACTIVE),
]


@pytest.mark.clause("C5.1", "C5.2", "C5.3", "C2.5", "T9")
@pytest.mark.parametrize(("reach", "phase"), [b[1:] for b in BOUNDARIES], ids=[b[0] for b in BOUNDARIES])
def test_cancel_at_every_boundary(
    world: Deployment, reach: Callable[[Deployment], None], phase: DestinationPhase | None
) -> None:
    """It ends as cancelled at once; memory comes back when it is quiet, and another request is served rightly."""
    answer = world.submit("a", REQUEST)
    reach(world)
    assert world.d is phase
    world.abort("a")
    assert answer.ending.ending is fx.Ending.CANCELLED
    world.let_go()
    world.submit("a", REQUEST)  # C1.1: the id is free although the old transfer still drains
    world.run_until(world.idle)
    world.check_answer("a")
    assert not world.violations
    world.finish()


@pytest.mark.clause("C5.1", "C5.2")
def test_memory_is_held_while_a_chunk_is_on_the_wire(world: Deployment) -> None:
    """Field failure 1: neither side gives a block away until the wire and the device are quiet."""
    world.submit("a", REQUEST)
    reach_computing(world)
    world.abort("a")
    world.settle()
    assert (world.p, world.d) == (SourcePhase.DRAINING, DestinationPhase.HELD)
    used = [world.seats[name].engine.statistics()["blocks_used"] for name in ("prefill-0", "decode-0")]
    assert min(used) > 0
    world.let_go()
    world.run_until(world.idle)
    world.finish()


@pytest.mark.clause("C6.4", "C5.2")
def test_a_revocable_transport_frees_the_destination_without_its_writer() -> None:
    world = open_world(revocable=True)
    world.submit("a", REQUEST)
    reach_computing(world)
    world.abort("a")
    world.settle()
    assert (world.p, world.d) == (SourcePhase.DRAINING, None)
    world.let_go()
    world.finish()


@pytest.mark.clause("C4", "C2.5")
def test_retired_is_said_after_the_engine_released(world: Deployment) -> None:
    """RETIRED is a side that *has* released: a credit that came back earlier would promise memory that is not there."""
    world.submit("a", REQUEST)
    world.run_until(lambda: world.p is SourcePhase.COMMITTED)
    world.seats["prefill-0"].engine_frozen = True
    world.run_until(lambda: world.answers["a"].ended)
    world.settle()
    view = next(v for v in world.coordinator.peers() if v.peer.name == "prefill-0")
    assert view.blocks_out > 0
    world.seats["prefill-0"].engine_frozen = False
    world.finish()


@pytest.mark.clause("C6.3", "C2.5")
@pytest.mark.parametrize("where", ["compute", "import", "decode"])
def test_one_requests_fault_ends_that_request_only(world: Deployment, where: str) -> None:
    good = world.submit("good", Request(tuple(range(50, 70)), SamplingParams(max_tokens=3)))
    bad = world.submit("bad", REQUEST)
    engine = world.seats["prefill-0" if where == "compute" else "decode-0"].engine
    getattr(engine, f"fail_{where}").add(bad.transfers[0])
    world.run_until(world.idle)
    world.check_answer("good")
    assert bad.ending.ending is fx.Ending.FAILED
    assert f"scripted: {where} fails" in bad.ending.cause
    assert good.ended
    world.finish()


@pytest.mark.clause("C2.6")
def test_a_refusal_in_spite_of_credits_waits_again_with_its_age(world: Deployment) -> None:
    refusals = iter(["not now", "not now"])
    world.seats["decode-0"].engine.refuse = lambda admission: next(refusals, None)
    answer = world.submit("a", REQUEST)
    world.run_until(lambda: answer.requeued == 1)
    world.advance(10)
    world.run_until(lambda: answer.requeued == 2)
    world.advance(10)
    world.run_until(world.idle)
    world.check_answer("a")
    assert len(set(answer.transfers)) == 3, "each attempt is a generation of its own (C1.2)"
    world.finish()


@pytest.mark.clause("C2.6")
def test_refusals_are_bounded() -> None:
    world = open_world(limits=Limits(retries=2))
    world.seats["decode-0"].engine.refuse = lambda admission: "never"
    answer = world.submit("a", REQUEST)
    for _ in range(5):
        world.settle()
        world.advance(10)
    assert answer.ending.ending is fx.Ending.FAILED
    assert "never" in answer.ending.cause
    world.finish()


@pytest.mark.clause("C6.7")
@pytest.mark.parametrize(
    ("name", "reach"),
    [("prefill_idle", reach_computing), ("receipts", reach_committed)],
)
def test_a_passed_deadline_ends_the_request_and_keeps_the_memory(
    name: str, reach: Callable[[Deployment], None]
) -> None:
    world = open_world(deadlines=Deadlines(prefill_start=60, prefill_idle=60, receipts=10))
    answer = world.submit("a", REQUEST)
    reach(world)
    world.begin()
    world.settle()
    assert not answer.ended
    world.advance(70 if name == "prefill_idle" else 15)
    world.settle()
    assert answer.ending.ending is fx.Ending.FAILED
    assert f"deadline.{name}" in answer.ending.cause
    assert world.d is DestinationPhase.HELD
    world.let_go()
    world.finish()


@pytest.mark.clause("T8", "C6.1", "C6.4")
def test_a_chunk_past_its_deadline_is_quarantined_until_it_ends(world: Deployment) -> None:
    """Field failure 5: timed out is not terminal."""
    answer = world.submit("a", REQUEST)
    reach_committed(world)
    world.begin()
    world.advance(31)
    world.settle()
    assert answer.ending.ending is fx.Ending.FAILED
    assert world.seats["prefill-0"].guard.statistics()["quarantined_bytes"] > 0
    assert (world.p, world.d) == (SourcePhase.DRAINING, DestinationPhase.HELD)
    world.flow = True
    world.finish()


# -- the end of a stage ------------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.4", "C2.5")
@pytest.mark.parametrize("reach", [b[1] for b in BOUNDARIES[1:5]], ids=[b[0] for b in BOUNDARIES[1:5]])
def test_a_dead_prefill_stage_costs_its_transfers_only(world: Deployment, reach: Callable[[Deployment], None]) -> None:
    answer = world.submit("a", REQUEST)
    reach(world)
    world.crash("prefill-0")
    assert answer.ending.ending is fx.Ending.FAILED
    assert "killed by the test" in answer.ending.cause
    world.let_go()
    world.run_until(world.idle)
    assert world.d is None
    world.add_stage("prefill-0", Role.PREFILL)
    world.run_until(world.connected)
    world.submit("b", REQUEST)
    world.run_until(world.idle)
    world.check_answer("b")
    world.finish()


@pytest.mark.clause("C6.4", "C2.5")
@pytest.mark.parametrize("reach", [b[1] for b in BOUNDARIES[1:]], ids=[b[0] for b in BOUNDARIES[1:]])
def test_a_dead_decode_stage_costs_its_transfers_only(world: Deployment, reach: Callable[[Deployment], None]) -> None:
    answer = world.submit("a", REQUEST)
    reach(world)
    world.crash("decode-0")
    assert answer.ending.ending is fx.Ending.FAILED
    world.let_go()
    world.run_until(world.idle)
    assert world.p is None
    world.add_stage("decode-0", Role.DECODE)
    world.run_until(world.connected)
    world.submit("b", REQUEST)
    world.run_until(world.idle)
    world.check_answer("b")
    world.finish()


@pytest.mark.clause("C6.6")
def test_stages_whose_coordinator_is_gone_drain_and_end(world: Deployment) -> None:
    world.submit("a", REQUEST)
    reach_committed(world)
    for seat in world.seats.values():
        seat.stage.channel.sever("the coordinator's process is gone")
    world.flow = True
    world.run_until(lambda: all(seat.stage.ended for seat in world.seats.values()))
    for name, seat in world.seats.items():
        assert seat.stage.outcome is not None
        assert seat.stage.outcome.status == 0, (name, seat.stage.outcome)
        assert "coordinator is gone" in seat.stage.outcome.reason
        assert seat.engine.statistics()["blocks_used"] == 0
        assert not seat.engine.late_writes


@pytest.mark.clause("C6.6", "C6.7")
def test_a_stage_that_cannot_drain_says_what_it_held(world: Deployment) -> None:
    world.submit("a", REQUEST)
    reach_committed(world)
    world.begin()
    for seat in world.seats.values():
        seat.stage.channel.sever("the coordinator's process is gone")
    world.settle()
    assert not world.seats["prefill-0"].stage.ended
    world.advance(6)
    world.settle()
    outcome = world.seats["prefill-0"].stage.outcome
    assert outcome is not None
    assert outcome.status == 1
    assert "still held" in outcome.reason
    assert "DRAINING" in outcome.reason


def run_again(seat: StageSeat, monkeypatch: pytest.MonkeyPatch) -> int:
    """What a process does around a stage, of which everything is over."""
    monkeypatch.setattr(seat.stage, "advance", lambda: False)
    loop = EngineLoop(seat.engine, lambda report: None, lambda transfer, tokens: True)
    loop.post(Quit())
    return run(seat.stage, loop, seat.engine, Settings(model="scripted:1"))


@pytest.mark.clause("C6.6", "C6.4", "C5.4")
@pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
def test_what_a_transport_may_still_touch_is_not_given_up_before_the_process_ends(
    world: Deployment, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without a coordinator nobody proves the writer quiet.  D's deadline ends D, and proves nothing either."""
    seat = world.seats[name]
    closed: list[str] = []
    monkeypatch.setattr(seat.connector, "close", lambda: closed.append("transport"))
    monkeypatch.setattr(seat.engine, "close", lambda: closed.append("engine"))
    world.submit("a", REQUEST)
    reach_committed(world)
    world.begin()
    world.seats["decode-0"].frozen = name == "prefill-0"
    seat.stage.channel.sever("the coordinator's process is gone")
    world.settle()
    world.advance(6)
    world.settle()
    outcome = seat.stage.outcome
    assert outcome is not None
    assert (outcome.status, outcome.exposed) == (1, True)
    assert {"prefill-0": "DRAINING", "decode-0": "HELD"}[name] in outcome.reason
    assert run_again(seat, monkeypatch) == 1
    assert closed == []


@pytest.mark.clause("T10", "C5.4")
def test_a_stage_that_nobody_can_touch_any_more_gives_everything_up(
    world: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    seat = world.seats["decode-0"]
    closed: list[str] = []
    monkeypatch.setattr(seat.engine, "close", lambda: closed.append("engine"))
    seat.stage.channel.sever("the coordinator's process is gone")
    world.settle()
    assert seat.guard.closed
    assert run_again(seat, monkeypatch) == 0
    assert closed == ["engine"]


@pytest.mark.clause("C6.3")
def test_an_engine_that_raises_in_a_step_ends_its_stage(world: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Sequence[StepOutput]:
        raise RuntimeError("the device fell off")

    answer = world.submit("a", REQUEST)
    monkeypatch.setattr(world.seats["decode-0"].engine, "step", step)
    world.run_until(lambda: answer.ended)
    assert "the device fell off" in answer.ending.cause
    assert world.kills[0].name == "decode-0"
    world.run_until(lambda: world.seats["prefill-0"].stage.machine.transfers() == {})


# -- generic control ---------------------------------------------------------------------------------------------------


@pytest.mark.clause("C9.2", "C1.5")
def test_generic_control_answers_and_disturbs_nothing(world: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    replies: list[Reply] = []
    world.submit("a", REQUEST)
    reach_posted(world)
    seat = world.seats["prefill-0"]
    send = seat.stage.channel.send
    monkeypatch.setattr(
        type(seat.stage.channel), "send",
        lambda self, message: replies.append(message) if isinstance(message, Reply) else send(message),
    )  # fmt: skip
    seat.stage._on_message(Call("1", "s", "statistics"))
    seat.stage._on_message(Call("2", "s", "health"))
    seat.stage._on_message(Call("3", "s", "dance"))
    seat.loop.advance()
    seat.stage.advance()
    by_id = {reply.control_id: reply for reply in replies}
    assert by_id["1"].result["engine"]["blocks_used"] > 0
    assert by_id["2"].result == {"healthy": True, "step_seconds": 0.0}
    assert "dance" in (by_id["3"].error or "")
    monkeypatch.undo()
    world.flow = True
    world.run_until(world.idle)
    world.check_answer("a")
    world.finish()


@pytest.mark.clause("C3.3", "C3.4")
def test_unequal_prefixes_and_a_full_hit_send_only_what_is_missing() -> None:
    """D's valid prefix is skipped, what only P had cached is sent, and a full hit still sends the final payload."""
    world = open_world(layouts={Role.PREFILL: ScriptedLayout(blocks=96), Role.DECODE: ScriptedLayout(blocks=80, gap=3)})
    first = Request(tuple(range(16)), SamplingParams(max_tokens=2))
    world.submit("a", first)
    world.run_until(world.idle)
    sent = world.seats["prefill-0"].guard.statistics()["bytes_total"]
    world.submit("b", first)
    world.run_until(world.idle)
    again = world.seats["prefill-0"].guard.statistics()["bytes_total"] - sent
    assert again == world.model.final_bytes
    # D forgets, P does not: everything is sent although P computes one token only
    decode = world.seats["decode-0"].engine
    while decode._cached:
        decode._evict()
    world.submit("c", first)
    world.run_until(world.idle)
    whole = world.seats["prefill-0"].guard.statistics()["bytes_total"] - sent - again
    assert whole == sent
    for key in ("a", "b", "c"):
        world.check_answer(key)
    world.finish()


# -- back-pressure, effects and revocations ----------------------------------------------------------------------------

LONG = Request(tuple(range(1000, 1150)), SamplingParams(max_tokens=3))


@pytest.mark.clause("T6")
def test_a_frozen_destination_pauses_its_own_requests_only() -> None:
    """One P, two D.  So much is computed for one D, which takes nothing, that the engine is to pause: for that D."""
    layouts = {Role.PREFILL: ScriptedLayout(blocks=300), Role.DECODE: ScriptedLayout(blocks=200)}
    world = open_world(decode=2, layouts=layouts, settings={"transfer.inflight_bytes": 4096})
    p = world.seats["prefill-0"]
    stuck = world.submit("stuck", LONG)
    world.run_until(lambda: bool(stuck.transfers))
    p.gate.hold("completions")
    p.gate.of = lambda transfer: transfer == stuck.transfer
    world.settle()
    assert not p.engine.has_work(), "the engine pauses"
    other = world.submit("other", Request(tuple(range(2000, 2150)), SamplingParams(max_tokens=3)))
    world.run_until(lambda: other.ended)
    assert not stuck.ended
    assert not p.engine.has_work(), "the first one's pause goes on"
    world.let_go()
    world.run_until(world.idle)
    for key in world.answers:
        world.check_answer(key)
    world.finish()


@pytest.mark.clause("T12", "T6")
def test_nothing_is_kept_of_cancelled_transfers_behind_a_frozen_destination() -> None:
    world = open_world(layouts={Role.PREFILL: ScriptedLayout(blocks=300), Role.DECODE: ScriptedLayout(blocks=300)})
    p = world.seats["prefill-0"]
    stage = cast(PrefillStage, p.stage)
    p.gate.hold("submissions")  # the destination takes nothing
    head = world.submit("head", REQUEST)
    world.settle()
    (lane,) = stage._lanes.values()
    before = len(lane.ready)
    assert before > 0
    for number in range(20):
        behind = world.submit(f"{number}", REQUEST)
        world.run_until(lambda: len(lane.ready) > before, "its chunks stand in line")
        world.abort(f"{number}")
        world.run_until(lambda behind=behind: world.coordinator.phase(behind.transfer) is None)  # type: ignore[misc]
        assert len(lane.ready) == before
    assert not head.ended
    world.let_go()
    world.run_until(world.idle)
    world.check_answer("head")
    world.finish()


@pytest.mark.clause("T6")
def test_how_long_chunks_found_no_room_is_counted_until_they_find_some(world: Deployment) -> None:
    p = world.seats["prefill-0"]
    stage = cast(PrefillStage, p.stage)

    def seconds() -> float:
        return stage._role_figures()["backpressure_seconds_total"]

    world.submit("a", REQUEST)
    world.run_until(world.idle)
    world.advance(5.0)
    assert seconds() == 0.0
    p.gate.hold("submissions")  # the destination takes nothing
    for key, before in (("b", 0.0), ("c", 2.5)):
        world.submit(key, REQUEST)
        world.settle()
        assert seconds() == before
        world.advance(1.0)
        world.settle()
        world.advance(1.5)
        assert seconds() == before + 2.5
        world.let_go()
        world.run_until(world.idle)
        world.advance(1.0)
        assert seconds() == before + 2.5
        p.gate.hold("submissions")
    world.let_go()
    world.finish()


@pytest.mark.clause("C8.5", "C8.3")
def test_the_oldest_lease_is_that_of_a_transfer_that_is_not_imported_or_not_over(world: Deployment) -> None:
    p, d = (world.seats[name].stage for name in ("prefill-0", "decode-0"))
    assert p is not None
    assert d is not None
    assert (p._oldest_lease(), d._oldest_lease()) == (0.0, 0.0)
    world.submit("a", REQUEST)
    reach_posted(world)
    world.advance(0.25)
    world.submit("b", REQUEST)
    world.settle()
    world.advance(0.25)
    assert (p._oldest_lease(), d._oldest_lease()) == (0.5, 0.5)
    world.let_go()
    reach_decoding(world)
    world.run_until(lambda: len(p.machine) == 0 and not p._releasing)
    world.advance(0.25)
    assert p._oldest_lease() == 0.0
    assert d._oldest_lease() == 0.0  # the request's memory is its own
    assert len(d.machine) > 0
    world.run_until(world.idle)
    world.finish()


@pytest.mark.clause("T6")
def test_a_trace_has_what_keeps_a_hand_off_back() -> None:
    world = open_world(settings={"transfer.inflight_bytes": 4096})
    p = world.seats["prefill-0"]
    assert p.stage is not None
    recorder = Recorder()
    p.stage._record(recorder)
    world.submit("a", LONG)
    p.gate.hold("completions")
    world.settle()
    world.let_go()
    world.run_until(world.idle)
    noted = list(map(tracing.decode, recorder.page(0.0, tracing.PAGE_EVENTS, tracing.PAGE_BYTES).events))
    assert None not in noted
    kinds = {type(event) for event in noted}
    missing = {tracing.Full, tracing.Submitted, tracing.Paused, tracing.Resumed, tracing.Step} - kinds
    assert not missing
    paused, resumed = ([event for event in noted if isinstance(event, kind)] for kind in (Paused, Resumed))
    assert len(paused) == len(resumed), "said once each time, not at each look"
    full = [event for event in noted if isinstance(event, tracing.Full)]
    assert len({event.sequence for event in full}) == len(full), "once for each chunk"
    world.finish()


@pytest.mark.clause("T6")
def test_a_pause_that_is_eased_while_it_begins_is_not_lost() -> None:
    """The pump sends what was left between the engine's look at the backlog and its flag: the engine goes on."""
    world = open_world(settings={"transfer.inflight_bytes": 4096})
    p = world.seats["prefill-0"]
    world.submit("a", LONG)
    p.gate.hold("completions")
    world.settle()
    stage = cast(PrefillStage, p.stage)
    (lane,) = stage._lanes.values()
    lane.paused = False

    class Eased:
        """A backlog that shrinks, and a pump that looks at the flag, right after the first look."""

        looks = 0

        def __le__(self, limit: int) -> bool:
            Eased.looks += 1
            if Eased.looks == 1:
                lane.backlog = 0
                stage._submit_ready()
                return False
            return True

    backlog, lane.backlog = lane.backlog, cast(int, Eased())
    may = stage.can_schedule(world.answers["a"].transfer, 8)
    eased = lane.paused
    assert may or eased, "the engine waits, and nobody will wake it"
    lane.backlog = backlog
    world.let_go()
    world.run_until(world.idle)
    world.finish()


@pytest.mark.clause("T12")
def test_nothing_is_kept_of_destinations_that_have_gone() -> None:
    world = open_world()
    stage = cast(PrefillStage, world.seats["prefill-0"].stage)
    for number in range(3):
        world.submit(f"{number}", REQUEST)
        world.run_until(world.idle)
        world.check_answer(f"{number}")
        assert len(stage._lanes) == 1
        if number:  # with a transfer under way
            world.submit("cut", LONG)
            world.run_until(lambda: world.p is SourcePhase.PREFILLING)
            world.seats["prefill-0"].engine_frozen = number == 2
        world.crash("decode-0")
        world.settle(5)
        world.seats["prefill-0"].engine_frozen = False
        world.run_until(lambda: not stage._lanes)
        world.restart("decode-0")
    world.finish()


@pytest.mark.clause("C5.2", "C6.4")
def test_a_revocation_is_tried_until_the_transport_can_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport says "not yet" some times: D asks again, and frees without its writer."""
    world = open_world(revocable=True)
    connector = world.seats["decode-0"].gate
    revoke, asked = connector.revoke, []

    def not_yet(transfer: TransferId) -> bool:
        asked.append(transfer)
        return len(asked) > 4 and revoke(transfer)

    monkeypatch.setattr(connector, "revoke", not_yet)
    world.submit("a", REQUEST)
    reach_computing(world)
    world.abort("a")
    world.run_until(lambda: len(asked) == 4)
    assert (world.p, world.d) == (SourcePhase.DRAINING, DestinationPhase.HELD)
    world.run_until(lambda: world.d is None)
    assert world.p is SourcePhase.DRAINING
    assert len(asked) >= 5
    world.let_go()
    world.finish()


@pytest.mark.clause("C5.2", "T12")
def test_a_revocation_ends_with_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transport can never promise: D is asked no more once C has released the transfer."""
    world = open_world(revocable=True)
    connector, asked = world.seats["decode-0"].gate, []
    monkeypatch.setattr(connector, "revoke", lambda transfer: asked.append(transfer))
    world.submit("a", REQUEST)
    reach_computing(world)
    world.abort("a")
    world.settle(500)
    assert 8 < len(asked) < 40, "again and again, but not at every pass"
    world.let_go()
    world.seats["decode-0"].engine_frozen = True  # it is over for the machine, and not yet for the engine
    world.run_until(lambda: world.d is None)
    asked.clear()
    world.settle()
    assert not asked
    world.let_go()
    world.finish()


@pytest.mark.clause("C6.3", "C7.4")
def test_what_an_effect_brings_about_comes_after_the_effects_before_it(
    world: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A grant fails: C hears that D has reserved, and then that it has failed, in that order."""
    d = world.seats["decode-0"]

    def grant(*arguments: object) -> None:
        raise PeerLost("T7: the test says no")

    monkeypatch.setattr(d.guard, "grant", grant)
    answer = world.submit("a", REQUEST)
    world.run_until(lambda: answer.ended)
    assert "the test says no" in answer.ending.cause
    told = [type(mail.message) for mail in world.mail if mail.way == "from" and mail.peer == d.peer]
    assert told[told.index(Reserved) :][:2] == [Reserved, Failed]
    assert not world.violations
    monkeypatch.undo()
    world.finish()


@pytest.mark.clause("C9.2", "T11")
def test_only_the_engines_figures_are_read_on_the_engines_thread(
    world: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Channel and counters are the pump's: the engine's loop reads none of them."""
    seat = world.seats["prefill-0"]
    turns: list[str] = []
    on = ["pump"]
    for owner in (seat.guard, seat.stage.channel):

        def statistics(self: object, read: Callable[[], Any] = owner.statistics) -> Any:
            turns.append(on[0])
            return read()

        monkeypatch.setattr(type(owner), "statistics", statistics)
    seat.stage._on_message(Call("1", "s", "statistics"))
    on[0] = "engine"
    seat.loop.advance()
    on[0] = "pump"
    seat.stage.advance()
    assert turns == ["pump", "pump"]
    monkeypatch.undo()
    world.finish()


@pytest.mark.clause("T2")
def test_transports_whose_wires_differ_are_not_connected() -> None:
    """A plugin states what its ends must have in common; a peer that has another is refused, with both values."""

    class Released(LoopbackPlugin):
        wire_version = 1

    plugin = Released()
    world = Deployment(plugin, stepped=True)
    plugin.wire_version = 2
    newer = world.add_stage("decode-1", Role.DECODE)
    world.settle()
    causes = [down.cause for down in world.letters(PeerDown)]
    assert any("version 2" in cause and "we speak 1" in cause for cause in causes), causes
    assert not world.coordinator.connected(world.seats["prefill-0"].peer, newer.peer)
    world.submit("a", REQUEST)
    world.run_until(world.idle)
    world.check_answer("a")
    world.finish()


def test_a_report_ends_the_wait_of_a_pump_that_sleeps_and_rings_for_no_other(
    world: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    d = world.seats["decode-0"].stage
    rings: list[str] = []
    monkeypatch.setattr(type(d.channel), "wake", lambda self: rings.append("ring"))
    report = Released(TransferId("0" * 32))
    d.report(report)
    assert rings == []  # it is seen before the next wait
    # whoever reports between the pump's last look and its sleep has to ring
    monkeypatch.setattr(type(d.channel), "wait", lambda self, timeout: d.report(report))
    d.wait(0.1)
    assert rings == []  # something was there: it did not sleep at all
    d._reports.clear()
    d.wait(0.1)
    assert rings == ["ring"]
    d._reports.clear()
    d.report(report)
    assert rings == ["ring"]
    d._reports.clear()
    monkeypatch.undo()
    world.finish()


@pytest.mark.clause("T5", "C2.3")
def test_who_waits_for_the_transport(world: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    """P waits on it while chunks are under way; D polls it eagerly until all has come, and then for P's sake only."""
    p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))
    waits: list[str] = []
    monkeypatch.setattr(p.guard, "wait", lambda timeout: waits.append("transport"))
    monkeypatch.setattr(type(p.stage.channel), "wait", lambda self, timeout: waits.append("channel"))
    assert (p.stage.live, d.stage.live) == (False, False)
    p.stage.wait(0.1)
    world.submit("a", REQUEST)
    reach_posted(world)
    p.stage._reports.clear()
    p.stage.wait(0.1)
    assert waits == ["channel", "transport"]
    assert (p.stage.urgent, d.stage.urgent) == (True, True)
    assert (p.stage.imminent, d.stage.imminent) == (True, False)  # nothing has come yet, and no Commit either
    world.let_go()
    world.run_until(lambda: d.stage.imminent)
    reach_decoding(world)
    assert (d.stage.live, d.stage.urgent) == (True, False)
    world.run_until(world.idle)
    assert (p.stage.live, d.stage.live) == (False, False)
    assert not d.guard._received
    monkeypatch.undo()
    world.finish()
