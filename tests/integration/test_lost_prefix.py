"""What a lost generation leaves behind is used by the next one, on the stage that is left.

On one clock and with both kinds of engine, so that who computes and sends what again is counted, not timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from kvbaton import Settings, load, messages, run_colocated
from kvbaton.engine import FinishReason, Request, Role, SamplingParams, StageEngine
from kvbaton.handoff import effects as fx
from kvbaton.handoff.table import CoordinatorPhase
from kvbaton.identity import PeerId, TransferId
from kvbaton.plugins import choose_engine
from kvbaton_conformance.scripted import ScriptedDevice
from kvbaton_conformance.simulate.scenario import Scenario
from kvbaton_conformance.simulate.world import Answer, Engines, ScriptedEngines, World

BLOCK, STEP, PROMPT = 4, 8, 46
#: Whole blocks of a prompt whose last token is computed in any case: the first answer comes from it (C3.4).
WHOLE = (PROMPT - 1) // BLOCK * BLOCK
PHASE = CoordinatorPhase
Make = Callable[[Scenario], Engines]


@dataclasses.dataclass(frozen=True)
class Growing(Scenario):
    """Request 0 is the beginning of the others, which are all the same."""

    def request(self, index: int) -> Request:
        return Request(tuple(range(1, 1 + (PROMPT if index else PROMPT // 2))), SamplingParams(max_tokens=3))


class ReferenceEngines:
    """The reference engine with a small real model on the CPU, whose work is always done."""

    def __init__(self) -> None:
        pytest.importorskip("kvbaton_transformers")
        options = {"blocks": 64, "block_tokens": BLOCK, "prefill_chunk": STEP, "transfer_slots": 4}
        self._settings: Settings = load(
            overrides={"model": "tiny-llama", "engine.name": "transformers", "engine.options": options}
        )[0]

    def open(self, role: Role) -> tuple[StageEngine, ScriptedDevice]:
        plugin, options = choose_engine(self._settings.engine)
        return plugin.open(self._settings.model, options, role, None), ScriptedDevice(automatic=False)

    def answer(self, request: Request) -> Answer:
        (record,) = run_colocated(self._settings, [request])
        return record.token_ids, record.exit_depths, FinishReason(record.finish_reason)


def scripted(scenario: Scenario) -> Engines:
    return ScriptedEngines(scenario)


def reference(scenario: Scenario) -> Engines:
    return ReferenceEngines()


class Play:
    """A world in which the wire stands still until it is told to move, and what its stages have said."""

    def __init__(self, make: Make, prefills: int, decodes: int) -> None:
        scenario = Growing(
            seed=1, prefills=prefills, decodes=decodes, block_tokens=BLOCK, prefill_blocks=64, decode_blocks=64,
            step_tokens=STEP, longest_prompt=PROMPT, most_tokens=3, chunk_bytes=1 << 20, inflight_bytes=1 << 24,
            attempts=3, queue=16, unreceipted_chunks=16,
        )  # fmt: skip
        self.world = World(scenario, make(scenario))
        self.commits: dict[TransferId, messages.Commit] = {}
        self.reserved: dict[TransferId, int] = {}
        hear = self.world.coordinator.handle

        def overhear(peer: PeerId, message: messages.Message, now: float) -> list[fx.CoordinatorEffect]:
            if isinstance(message, messages.Commit):
                self.commits[message.transfer] = message
            elif isinstance(message, messages.Reserved):
                self.reserved[message.transfer] = message.reservation.valid
            return hear(peer, message, now)

        self.world.coordinator.handle = overhear  # type: ignore[method-assign]
        self.until(lambda: self.world.whole)

    def turn(self, *, wire: bool = True) -> None:
        world = self.world
        for name in tuple(world.seats):
            for fate in ("notice", "kill", "join", "restart"):
                world.make((fate, name))
            seat = world.seats[name]
            world.make(("pump", name, len(seat.channel.coming)))
            world.make(("engine", name))
            while seat.device.pending() and not seat.over:
                world.make(("device", name))
            while seat.channel.going and not seat.joined:
                world.make(("hear", name))
        for seat, peer, _ in tuple(world.links()):
            for move in ("up", "closed"):
                world.make((move, seat.peer.name, peer.name))
        for flight in tuple(world.wire.flights) if wire else ():
            for kind, *rest in (("start",), ("land", False), ("report",)):
                world.make((kind, world.chunk(flight), *rest))
        world.wire.tidy()

    def until(self, condition: Callable[[], bool], *, wire: bool = True) -> None:
        for _ in range(300):
            if condition():
                return
            self.turn(wire=wire)
        raise AssertionError("it does not come to that")

    def serve(self, number: int) -> None:
        self.world.make(("submit", number))
        self.until(lambda: self.world.quiet)

    def committed(self, number: int) -> tuple[TransferId, PeerId, PeerId]:
        """A request whose KV is all computed and of which nothing has arrived: its generation and stages."""
        self.world.make(("submit", number))
        asked = self.world.asked[number]
        self.until(lambda: self.world.coordinator.phase(asked.generations[-1]) is PHASE.COMMITTED, wire=False)
        return (asked.generations[-1], *self.world._pairs[asked.generations[-1]])

    def again(self, number: int, lost: TransferId) -> tuple[TransferId, PeerId, PeerId]:
        """The generation after the lost one, once the request has been answered (rightly: the world looks, A1)."""
        self.until(lambda: self.world.quiet)
        asked = self.world.asked[number]
        assert asked.ended is not None
        assert asked.ended.ending is fx.Ending.FINISHED, asked.ended
        old, new = asked.generations
        assert old == lost
        return (new, *self.world._pairs[new])


@pytest.mark.clause("C6.5", "C3.3", "C3.4", "C1.2", "A1")
@pytest.mark.parametrize("engines", [scripted, reference])
def test_what_was_computed_for_a_lost_decode_stage_is_sent_again_and_not_computed_again(engines: Make) -> None:
    play = Play(engines, prefills=2, decodes=2)
    old, p, d = play.committed(1)
    assert play.commits[old].cached == 0
    play.world.make(("crash", d.name))
    new, second_p, second_d = play.again(1, old)
    assert second_p == p, "P holds all of it"
    assert second_d != d
    assert play.commits[new].cached == WHOLE, "only what is behind the last whole block is computed once more"
    assert play.commits[new].nbytes == play.commits[old].nbytes, "all of it is sent: the new D has nothing (C3.3)"


@pytest.mark.clause("C6.5", "C3.3", "C1.2", "C2.2", "C5.2", "A1")
@pytest.mark.parametrize("engines", [scripted, reference])
def test_what_a_decode_stage_holds_is_sent_by_no_other_prefill_stage_either(engines: Make) -> None:
    """The lost generation's own blocks stay held for its writer until the fence; what D has published is D's."""
    play = Play(engines, prefills=2, decodes=2)
    play.serve(0)
    old, p, d = play.committed(1)
    published = PROMPT // 2 // BLOCK * BLOCK
    assert play.reserved[old] == published, "D holds the beginning, from request 0"
    play.world.make(("crash", p.name))
    new, second_p, second_d = play.again(1, old)
    assert second_p != p
    assert second_d == d, "the other D is the less loaded one, and has nothing of it"
    assert play.reserved[new] == published
    assert play.commits[new].nbytes == play.commits[old].nbytes, "no more than the lost one had to send"
    assert play.commits[new].cached == 0, "its own KV died with P: all of it is computed"
