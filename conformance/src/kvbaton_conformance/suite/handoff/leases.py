"""C8: how long blocks are held, and by whom."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from kvbaton import messages
from kvbaton.engine import Request, Role, SamplingParams
from kvbaton.handoff.coordinator import Deadlines
from kvbaton.handoff.table import DestinationPhase
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.growth import Growth
from kvbaton_conformance.scripted import ScriptedLayout
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.boundaries import Boundary
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic, OpenDeployment, request


class Leases(DeploymentTopic):
    """C8: blocks are freed once, by an event, and the pool is then what the books say."""

    @pytest.mark.clause("C8.1", "C5.1")
    @pytest.mark.mode("in-process")
    def test_each_side_is_told_to_free_once(self, world: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
        """Cancelled, retired, repeated: each engine releases the transfer exactly once, and only at its end."""
        freed: list[tuple[str, str]] = []
        for name, seat in world.seats.items():
            release = seat.engine.release_transfer

            def noted(transfer: Any, name: str = name, release: Any = release) -> None:
                freed.append((name, transfer))
                release(transfer)

            monkeypatch.setattr(seat.engine, "release_transfer", noted)
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        world.abort("a")
        world.settle()
        require(not freed, "C8.1", "an engine was told to free under a live lease", seen=freed)
        world.let_go()
        world.run_until(world.idle, "C8.1: both sides drain")
        require(
            sorted(freed) == [("decode-0", answer.transfer), ("prefill-0", answer.transfer)], "C8.1",
            "blocks were not freed exactly once on each side", seen=freed,
        )  # fmt: skip
        world.finish()

    @pytest.mark.clause("C8.3", "C2.3")
    @pytest.mark.mode("in-process")
    def test_only_imported_requests_compute(self, world: Deployment) -> None:
        """A reserved, a held and a received transfer are at D; its scheduler touches none of them."""
        received = world.submit("received", REQUEST)
        boundaries.received(world)
        world.hold()
        held = world.submit("held", request(300, 9))
        reserved = world.submit("reserved", request(400, 9))
        d = world.seats["decode-0"]
        d.loop.advance()  # the engine carries out its orders, and would compute
        d.engine_frozen = True
        world.settle()
        require(
            not held.tokens and not reserved.tokens, "C8.3", "a request was computed before it was imported",
            seen=(held, reserved),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C8.3: all end")
        for answer in (received, held, reserved):
            require(len(answer.endings) == 1, "C8.3", "a request was lost", seen=answer)
        for key in world.answers:
            world.check_answer(key)
        world.finish()

    @pytest.mark.clause("C8.4", "C3.3")
    @pytest.mark.mode("in-process")
    def test_shared_prefixes_survive_their_first_owner(
        self, open_deployment: OpenDeployment, draw: random.Random
    ) -> None:
        """Requests with one beginning, some cancelled at different moments: the shared blocks live as long as needed.

        Troubleshooting:
        - tokens differ: a block was freed while another request still read it, or written after it was shared.
        """
        world = open_deployment(
            stepped=True, narrow={"revocable": False},
            layouts={
                Role.PREFILL: ScriptedLayout(blocks=120, final_slots=12),
                Role.DECODE: ScriptedLayout(blocks=110, gap=5, final_slots=12),
            },
        )  # fmt: skip
        beginning = tuple(range(16))
        world.submit("first", Request((*beginning, 77), SamplingParams(max_tokens=3)))
        world.run_until(world.idle, "C8.4: the first request ends")
        for index in range(12):
            rest = tuple(draw.randrange(1000) for _ in range(draw.randrange(1, 12)))
            world.submit(str(index), Request((*beginning, *rest), SamplingParams(max_tokens=draw.randrange(1, 9))))
        doomed = draw.sample(range(12), 4)
        for index in doomed:
            for _ in range(draw.randrange(12)):
                world.turn()
            world.abort(str(index))
        world.run_until(world.idle, "C8.4: all end")
        for key in world.answers:
            if key == "first" or int(key) not in doomed:
                world.check_answer(key)
        last = world.submit("last", Request((*beginning, 99), SamplingParams(max_tokens=3)))
        world.run_until(world.idle, "C8.4: the last request ends")
        valid = world.letters(messages.Reserved, last.transfer)[0].reservation.valid
        require(valid == 16, "C8.4", "the shared prefix is gone", expected="16 tokens", seen=f"{valid} tokens")
        world.check_answer("last")
        world.finish()

    @pytest.mark.clause("C8.5", "C6.7")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("boundary", boundaries.BOUNDARIES, ids=lambda boundary: boundary.name)
    def test_nothing_is_freed_by_age(self, open_deployment: OpenDeployment, boundary: Boundary) -> None:
        """A day passes at every boundary, with no deadline set: everything is where it was, and goes on."""
        never = Deadlines(*[math.inf] * 6)
        settings = {f"deadline.{name}": 1e6 for name in ("chunk", "receipts", "connect")}
        world = open_deployment(stepped=True, deadlines=never, settings=settings)
        answer = world.submit("a", REQUEST)
        boundary.go(world)
        used = {name: seat.engine.statistics()["blocks_used"] for name, seat in world.seats.items()}
        world.advance(86_400)
        world.settle()
        now = {name: seat.engine.statistics()["blocks_used"] for name, seat in world.seats.items()}
        require(
            now == used and (world.p, world.d) == (boundary.p, boundary.d) and not answer.ended, "C8.5",
            "a lease ended by age", expected=f"{used}, P {boundary.p}, D {boundary.d}",
            seen=f"{now}, P {world.p}, D {world.d}, {answer}",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C8.5: it goes on")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C8.4", "C2.5", "T12")
    @pytest.mark.mode("in-process")
    def test_two_hundred_transfers_leave_nothing(self, open_deployment: OpenDeployment, draw: random.Random) -> None:
        """Finished, cancelled and failed in turn: afterwards every table of every part is as large as before."""
        world = open_deployment()

        def cycle(number: int) -> None:
            key = str(number)
            answer = world.submit(key, request(draw.randrange(3) * 1000, draw.randrange(1, 30), draw.randrange(1, 5)))
            kind = number % 4
            if kind == 1:
                for _ in range(draw.randrange(12)):
                    world.turn()
                world.abort(key)
            elif kind == 2:
                world.seats["decode-0"].engine.fail_decode.add(answer.transfer)
            world.run_until(world.idle, f"C2.5: transfer {number} ends")
            if kind in (0, 3):
                world.check_answer(key)
            world.seats["decode-0"].engine.fail_decode.clear()
            world.forget()

        for number in range(40):
            cycle(number)
        watch = Growth()
        for number in range(40, 240):
            cycle(number)
        grown = watch.per(200)
        require(
            not grown, "T12", "something grows with the number of finished transfers", seen="; ".join(grown),
            look="what is kept per transfer, and when it is forgotten",
        )  # fmt: skip
        world.finish()

    @pytest.mark.clause("C8.4", "C2.5")
    @pytest.mark.mode("in-process")
    def test_a_burst_of_cancels_leaves_a_stage_that_serves(self, world: Deployment, draw: random.Random) -> None:
        """Sixty requests, cancelled in every state; then one more is served as if nothing had been."""
        for index in range(60):
            world.submit(str(index), request(100 * index, draw.randrange(1, 30), max_tokens=6))
            for _ in range(draw.randrange(6)):
                world.turn()
            if index >= 5:
                world.abort(str(index - draw.randrange(5)))
        for index in range(60):
            world.abort(str(index))
        world.run_until(world.idle, "C8.4: all have drained")
        world.check_balance()
        world.submit("after", OTHER)
        world.run_until(world.idle, "C8.4: after a burst of cancels a request is served")
        world.check_answer("after")
        require(
            world.d is None and DestinationPhase.HELD not in world.seats["decode-0"].phases.values(), "C5.2", "held"
        )
        world.finish()
