"""Stages under every kind of trouble, turn by turn: real machines and guards, a scripted engine, a stepped wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvbaton import Request, SamplingParams
from kvbaton.engine import Role, StepOutput
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Deadlines, Limits
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton.messages import Call, Reply
from kvbaton_conformance.deployment import Deployment, StageSeat
from kvbaton_conformance.scripted import ScriptedDevice, ScriptedLayout

PROMPT = tuple(range(30))
REQUEST = Request(PROMPT, SamplingParams(max_tokens=5))


@dataclass
class FakeClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


class World(Deployment):
    """One P, one D, a wire that moves only while ``flow`` is set, a device that completes only while ``run_device`` is.

    ``revocable`` False: D cannot take a grant back by itself, as with most transports.
    """

    def __init__(self, *, revocable: bool = False, **more: Any) -> None:
        self.revocable = revocable
        self.fake = FakeClock()
        self.flow = True
        self.run_device = True
        self.p_device, self.d_device = ScriptedDevice(automatic=False), ScriptedDevice(automatic=False)
        super().__init__(
            "loopback", {"carrier": "manual"}, clock=self.fake, between=self.move,
            devices={Role.PREFILL: self.p_device, Role.DECODE: self.d_device},
            settings={"transfer.chunk_bytes": 400, "deadline.shutdown": 5.0, "deadline.chunk": 30.0}, **more,
        )  # fmt: skip

    def add_stage(self, name: str, role: Role) -> StageSeat:
        seat = super().add_stage(name, role)
        seat.connector.capabilities = replace(seat.connector.capabilities, revocable=self.revocable)
        return seat

    def move(self) -> None:
        if self.run_device:
            self.p_device.complete()
            self.d_device.complete()
        if self.flow:
            for seat in self.seats.values():
                while seat.connector.wire.step() or seat.connector.wire.finish():
                    pass

    @property
    def p(self) -> SourcePhase | None:
        return next(iter(self._phases("prefill-0")), None)

    @property
    def d(self) -> DestinationPhase | None:
        return next(iter(self._phases("decode-0")), None)

    def _phases(self, name: str) -> list[Any]:
        return list(self.seats[name].stage.machine.transfers().values())

    def settle(self, turns: int = 50) -> None:
        for _ in range(turns):
            self.turn()


@pytest.fixture
def world() -> World:
    return World()


# -- one boundary after another ----------------------------------------------------------------------------------------


def reach_computing(world: World) -> None:
    world.run_device = False
    world.run_until(lambda: world.p_device.pending() > 0)


def reach_posted(world: World) -> None:
    world.flow = False
    world.run_until(lambda: world.seats["prefill-0"].guard.outstanding() > 0)


def reach_committed(world: World) -> None:
    world.flow = False
    world.run_until(lambda: world.p is SourcePhase.COMMITTED)


def reach_received(world: World) -> None:
    world.seats["decode-0"].engine_frozen = False
    world.run_until(lambda: world.p is SourcePhase.COMMITTED)
    world.seats["decode-0"].engine_frozen = True
    world.run_until(lambda: world.d is DestinationPhase.RECEIVED)


def reach_decoding(world: World) -> None:
    world.run_until(lambda: world.d is DestinationPhase.ACTIVE)


def begin_all(world: World) -> None:
    """What waits on the wire is begun, so it can no longer be taken back."""
    for seat in world.seats.values():
        while seat.connector.wire.start():
            pass


BOUNDARIES: Sequence[tuple[str, Callable[[World], None], DestinationPhase | None]] = [
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
def test_cancel_at_every_boundary(world: World, reach: Callable[[World], None], phase: DestinationPhase | None) -> None:
    """It ends as cancelled at once; memory comes back when it is quiet, and another request is served rightly."""
    answer = world.submit("a", REQUEST)
    reach(world)
    assert world.d is phase
    world.abort("a")
    assert answer.ending.ending is fx.Ending.CANCELLED
    world.flow = world.run_device = True
    world.seats["decode-0"].engine_frozen = False
    world.submit("a", REQUEST)  # C1.1: the id is free although the old transfer still drains
    world.run_until(world.idle)
    world.check_answer("a")
    assert not world.violations
    world.finish()


@pytest.mark.clause("C5.1", "C5.2")
def test_memory_is_held_while_a_chunk_is_on_the_wire(world: World) -> None:
    """Field failure 1: neither side gives a block away until the wire and the device are quiet."""
    world.submit("a", REQUEST)
    reach_computing(world)
    world.abort("a")
    world.settle()
    assert (world.p, world.d) == (SourcePhase.DRAINING, DestinationPhase.HELD)
    used = [world.seats[name].engine.statistics()["blocks_used"] for name in ("prefill-0", "decode-0")]
    assert min(used) > 0
    world.run_device = True
    world.run_until(world.idle)
    world.finish()


@pytest.mark.clause("C6.4", "C5.2")
def test_a_revocable_transport_frees_the_destination_without_its_writer() -> None:
    world = World(revocable=True)
    world.submit("a", REQUEST)
    reach_computing(world)
    world.abort("a")
    world.settle()
    assert (world.p, world.d) == (SourcePhase.DRAINING, None)
    world.run_device = True
    world.finish()


@pytest.mark.clause("C4", "C2.5")
def test_retired_is_said_after_the_engine_released(world: World) -> None:
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
def test_one_requests_fault_ends_that_request_only(world: World, where: str) -> None:
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
def test_a_refusal_in_spite_of_credits_waits_again_with_its_age(world: World) -> None:
    refusals = iter(["not now", "not now"])
    world.seats["decode-0"].engine.refuse = lambda admission: next(refusals, None)
    answer = world.submit("a", REQUEST)
    world.run_until(lambda: answer.requeued == 1)
    world.fake.now += 10
    world.run_until(lambda: answer.requeued == 2)
    world.fake.now += 10
    world.run_until(world.idle)
    world.check_answer("a")
    assert len(set(answer.transfers)) == 3, "each attempt is a generation of its own (C1.2)"
    world.finish()


@pytest.mark.clause("C2.6")
def test_refusals_are_bounded() -> None:
    world = World(limits=Limits(retries=2))
    world.seats["decode-0"].engine.refuse = lambda admission: "never"
    answer = world.submit("a", REQUEST)
    for _ in range(5):
        world.settle()
        world.fake.now += 10
    assert answer.ending.ending is fx.Ending.FAILED
    assert "never" in answer.ending.cause
    world.finish()


@pytest.mark.clause("C6.7")
@pytest.mark.parametrize(
    ("name", "reach"),
    [("prefill_idle", reach_computing), ("receipts", reach_committed)],
)
def test_a_passed_deadline_ends_the_request_and_keeps_the_memory(name: str, reach: Callable[[World], None]) -> None:
    world = World(deadlines=Deadlines(prefill_start=60, prefill_idle=60, receipts=10))
    answer = world.submit("a", REQUEST)
    reach(world)
    begin_all(world)
    world.settle()
    assert not answer.ended
    world.fake.now += 70 if name == "prefill_idle" else 15
    world.settle()
    assert answer.ending.ending is fx.Ending.FAILED
    assert f"deadline.{name}" in answer.ending.cause
    assert world.d is DestinationPhase.HELD
    world.flow = world.run_device = True
    world.finish()


@pytest.mark.clause("T8", "C6.1", "C6.4")
def test_a_chunk_past_its_deadline_is_quarantined_until_it_ends(world: World) -> None:
    """Field failure 5: timed out is not terminal."""
    answer = world.submit("a", REQUEST)
    reach_committed(world)
    begin_all(world)
    world.fake.now += 31
    world.settle()
    assert answer.ending.ending is fx.Ending.FAILED
    assert world.seats["prefill-0"].guard.statistics()["quarantined_bytes"] > 0
    assert (world.p, world.d) == (SourcePhase.DRAINING, DestinationPhase.HELD)
    world.flow = True
    world.finish()


# -- the end of a stage ------------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.4", "C2.5")
@pytest.mark.parametrize("reach", [b[1] for b in BOUNDARIES[1:5]], ids=[b[0] for b in BOUNDARIES[1:5]])
def test_a_dead_prefill_stage_costs_its_transfers_only(world: World, reach: Callable[[World], None]) -> None:
    answer = world.submit("a", REQUEST)
    reach(world)
    world.crash("prefill-0")
    assert answer.ending.ending is fx.Ending.FAILED
    assert "killed by the test" in answer.ending.cause
    world.flow = world.run_device = True
    world.run_until(world.idle)
    assert world.d is None
    world.add_stage("prefill-0", Role.PREFILL)
    world.run_until(world._connected)
    world.submit("b", REQUEST)
    world.run_until(world.idle)
    world.check_answer("b")
    world.finish()


@pytest.mark.clause("C6.4", "C2.5")
@pytest.mark.parametrize("reach", [b[1] for b in BOUNDARIES[1:]], ids=[b[0] for b in BOUNDARIES[1:]])
def test_a_dead_decode_stage_costs_its_transfers_only(world: World, reach: Callable[[World], None]) -> None:
    answer = world.submit("a", REQUEST)
    reach(world)
    world.crash("decode-0")
    assert answer.ending.ending is fx.Ending.FAILED
    world.flow = world.run_device = True
    world.run_until(world.idle)
    assert world.p is None
    world.add_stage("decode-0", Role.DECODE)
    world.run_until(world._connected)
    world.submit("b", REQUEST)
    world.run_until(world.idle)
    world.check_answer("b")
    world.finish()


@pytest.mark.clause("C6.6")
def test_stages_whose_coordinator_is_gone_drain_and_end(world: World) -> None:
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
def test_a_stage_that_cannot_drain_says_what_it_held(world: World) -> None:
    world.submit("a", REQUEST)
    reach_committed(world)
    begin_all(world)
    for seat in world.seats.values():
        seat.stage.channel.sever("the coordinator's process is gone")
    world.settle()
    assert not world.seats["prefill-0"].stage.ended
    world.fake.now += 6
    world.settle()
    outcome = world.seats["prefill-0"].stage.outcome
    assert outcome is not None
    assert outcome.status == 1
    assert "still held" in outcome.reason
    assert "DRAINING" in outcome.reason


@pytest.mark.clause("C6.3")
def test_an_engine_that_raises_in_a_step_ends_its_stage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_generic_control_answers_and_disturbs_nothing(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert by_id["2"].result == {"healthy": True}
    assert "dance" in (by_id["3"].error or "")
    monkeypatch.undo()
    world.flow = True
    world.run_until(world.idle)
    world.check_answer("a")
    world.finish()


@pytest.mark.clause("C3.3", "C3.4")
def test_unequal_prefixes_and_a_full_hit_send_only_what_is_missing() -> None:
    """D's valid prefix is skipped, what only P had cached is sent, and a full hit still sends the final payload."""
    world = World(layouts={Role.PREFILL: ScriptedLayout(blocks=96), Role.DECODE: ScriptedLayout(blocks=80, gap=3)})
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
