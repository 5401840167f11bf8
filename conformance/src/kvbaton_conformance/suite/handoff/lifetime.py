"""C5: until when memory stays as it is."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbaton import messages
from kvbaton.engine import Request, Role
from kvbaton.handoff.coordinator import Pair
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton.identity import RequestKey
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.scripted import ScriptedLayout
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic, OpenDeployment, request


class Lifetime(DeploymentTopic):
    """C5: nothing is freed that a device or a wire may still touch."""

    @pytest.mark.clause("C5.1", "C4")
    @pytest.mark.mode("in-process")
    def test_p_keeps_its_memory_until_every_handle_is_terminal(self, world: Deployment) -> None:
        """D has everything and P is acknowledged, but a handle at P is not terminal: the transport may read again."""
        answer = world.submit("a", REQUEST)
        p = world.seats["prefill-0"]
        p.gate.hold("completions")
        world.run_until(lambda: answer.ended, "C4.2: D serves the request")
        world.settle()
        figures = p.figures()
        require(
            world.p is SourcePhase.DRAINING and figures["blocks_used"] > 0 and world.view("prefill-0").blocks_out > 0,
            "C5.1", "P gave its memory back while handles were outstanding", expected="DRAINING, with its blocks",
            seen=f"{world.p}, {figures['blocks_used']:g} blocks", look="acknowledgement taken for quiet",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C5.1: with the last handle P retires")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C5.1", "C5.3")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("end", ["cancelled", "compute-fails"])
    def test_p_keeps_its_memory_until_its_device_is_done(self, world: Deployment, end: str) -> None:
        """The request is over while P's device still writes its blocks."""
        answer = world.submit("a", REQUEST)
        p = world.seats["prefill-0"]
        p.device_runs = False
        world.run_until(lambda: p.device.pending() > 0, "C2.1: P starts to compute")
        if end == "cancelled":
            world.abort("a")
        else:
            p.engine.fail_compute.add(answer.transfer)
            p.loop.advance()
        world.run_until(lambda: answer.ended, "C6.3: the request ends")
        world.settle()
        used = p.engine.statistics()["blocks_used"]
        if p.device.pending():
            require(
                used > 0 and world.p is SourcePhase.DRAINING, "C5.1", "P freed blocks that its device may still write",
                expected="DRAINING, with its blocks", seen=f"{world.p}, {used:g} blocks",
            )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C5.1: once the device is done P retires")
        world.submit("b", OTHER)
        world.run_until(world.idle, "C5.1: the next request ends")
        world.check_answer("b")
        world.finish()

    @pytest.mark.clause("C5.2")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("boundary", boundaries.EXPOSED, ids=lambda boundary: boundary.name)
    def test_d_holds_what_a_writer_may_still_touch(
        self, open_deployment: OpenDeployment, boundary: boundaries.Boundary
    ) -> None:
        """Cancelled with the writer under way, and D short of memory: other requests get none of those blocks.

        Troubleshooting:
        - "written after it was free": D frees at Cancel, and what was on the wire lands in another request's cache;
        - the next request never gets memory: D is never told that no writer is left.
        """
        world = open_deployment(
            stepped=True, narrow={"revocable": False}, prefix_caching=False,
            layouts={Role.PREFILL: ScriptedLayout(blocks=96), Role.DECODE: ScriptedLayout(blocks=40, gap=5)},
        )  # fmt: skip
        answer = world.submit("a", REQUEST)
        boundary.go(world)
        d = world.seats["decode-0"]
        mine = {block for table in d.engine.tables(answer.transfer) for block in table}
        world.abort("a")
        waits = world.submit("b", request(300, 20, max_tokens=30))
        small = world.submit("c", request(600, 3, max_tokens=2))
        world.settle()
        require(
            world.d is DestinationPhase.HELD, "C5.2", "D let go of memory that a writer may still touch",
            expected="HELD until P has retired", seen=world.d,
        )  # fmt: skip
        theirs = {block for t in d.phases if t != answer.transfer for table in d.engine.tables(t) for block in table}
        require(
            not mine & theirs, "C5.2", "blocks of a cancelled transfer were given away with its writer under way",
            seen=sorted(mine & theirs),
        )  # fmt: skip
        require(not waits.transfers, "C2.5", "memory was promised that a writer may still touch", seen=waits)
        world.let_go()
        world.run_until(world.idle, "C5.2: once P has retired, D frees and the others are served")
        for key in ("b", "c"):
            world.check_answer(key)
        require(small.ended, "C5.2", "a request that fits was not served", seen=small)
        world.finish()

    @pytest.mark.clause("C5.2")
    @pytest.mark.mode("in-process")
    def test_release_comes_only_after_p_has_retired(self, world: Deployment) -> None:
        """P hears of nothing; D is told to hold, and not to release, however long it takes."""
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        world.hold_mail("to", "prefill-0")
        world.abort("a")
        world.advance(20)
        world.settle()
        require(
            world.letters(messages.Cancel, answer.transfer) and not world.letters(messages.Release), "C5.2",
            "the coordinator released D's memory before P had retired", expected="Cancel, and no Release",
            seen=[type(m.message).__name__ for m in world.mail if m.peer.name == "decode-0"],
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C5.2: then P drains and D is released")
        order = [
            type(m.message).__name__ for m in world.mail
            if isinstance(m.message, (messages.Retired, messages.Release))
        ]  # fmt: skip
        require(
            order == ["Retired", "Release", "Retired"], "C5.2", "the end of a cancelled transfer is out of order",
            expected="Retired by P, Release to D, Retired by D", seen=order,
        )  # fmt: skip
        world.finish()

    @pytest.mark.clause("C5.2", "T3")
    @pytest.mark.mode("in-process")
    def test_from_received_d_frees_on_its_own_evidence(self, world: Deployment) -> None:
        """P hangs after its last chunk; D has received: cancelled, it needs nobody to free its memory."""
        world.submit("a", REQUEST)
        world.seats["prefill-0"].gate.hold("completions")
        world.run_until(lambda: world.d is DestinationPhase.RESERVED, "C2.1: D reserves")
        world.seats["decode-0"].engine_frozen = True
        world.run_until(lambda: world.d is DestinationPhase.RECEIVED, "C4.2: D receives")
        world.seats["prefill-0"].frozen = True
        world.abort("a")
        world.seats["decode-0"].engine_frozen = False
        world.run_until(
            lambda: world.d is None and not world.seats["decode-0"].engine.statistics()["blocks_used"],
            "C5.2: D, which has received everything, frees without P",
        )
        world.let_go()
        world.finish()

    @pytest.mark.clause("C5.2", "C1.3")
    @pytest.mark.mode("in-process")
    def test_a_cancelled_import_does_not_happen(self, world: Deployment) -> None:
        """Cancelled between RECEIVED and the engine's import: the queued import finds nothing, and nothing comes of it.

        Troubleshooting:
        - the request is decoded, or memory is used twice: the import does not look again on the engine's thread.
        """
        answer = world.submit("a", REQUEST)
        boundaries.received(world)
        world.abort("a")
        world.settle()
        second = world.submit("b", REQUEST)
        world.let_go()
        world.run_until(world.idle, "C1.3: the next request ends")
        require(
            not world.letters(messages.Activated, answer.transfer) and not answer.tokens, "C1.3",
            "a transfer that had been cancelled was imported", expected="the queued import does nothing",
            seen=answer.milestones,
        )  # fmt: skip
        world.check_answer("b")
        require(len(second.transfers) == 1, "C1.3", "the next request was disturbed", seen=second)
        world.finish()

    @pytest.mark.clause("C5.3")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("end", ["cancelled", "finished"])
    def test_d_frees_when_its_device_is_quiet(self, world: Deployment, end: str) -> None:
        """D decodes with work launched ahead; the request ends while that work still runs."""
        answer = world.submit("a", REQUEST)
        boundaries.decoding(world)
        d = world.seats["decode-0"]
        d.device_runs = False
        if end == "cancelled":
            world.abort("a")
        d.engine_frozen = False
        world.run_until(lambda: answer.ended and world.d is DestinationPhase.CLOSING, "C5.3: the request ends")
        world.settle()
        require(
            world.d is DestinationPhase.CLOSING and d.engine.statistics()["blocks_used"] > 0, "C5.3",
            "D freed memory that its device may still write", expected="CLOSING, with its blocks", seen=world.d,
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C5.3: once the device is quiet D retires")
        world.finish()

    @pytest.mark.clause("C5.4", "C6.2", "T10")
    @pytest.mark.mode("in-process")
    def test_nothing_is_closed_under_a_handle(self, world: Deployment) -> None:
        """Everything is stopped while chunks are under way: P's connector is closed after the last one, D's after P."""
        world.submit("a", REQUEST)
        boundaries.committed(world)
        p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))
        world.stop()
        world.settle()
        require(
            not p.gate.called("close") and not d.gate.called("close") and not p.stage.ended, "C5.4",
            "a connector was closed, and its memory deregistered, under an outstanding chunk", seen=world.describe(),
        )  # fmt: skip
        world.let_go()
        world.run_until(lambda: p.over and d.over, "C6.2: both drain and end")
        for seat in (p, d):
            require(
                seat.stage.outcome is not None and seat.stage.outcome.status == 0 and seat.guard.closed, "C5.4",
                f"{seat.peer.name} did not end as ordered", seen=seat.stage.outcome,
            )  # fmt: skip
        world.check_memory()

    @pytest.mark.clause("C5.2", "C6.4")
    @pytest.mark.requires("revocable")
    @pytest.mark.mode("in-process")
    def test_a_revocable_transport_frees_d_without_its_writer(self, open_deployment: OpenDeployment) -> None:
        """P hangs with chunks not yet sent; D revokes and uses the memory for others; then P goes on, unaware.

        Troubleshooting:
        - "written after it was free": revoke() returned True, and what the writer has posted, or posts later, is
          written all the same.
        """

        def first_then_second(key: RequestKey, _request: Request, pairs: Sequence[Pair]) -> Pair:
            return next((pair for pair in pairs if pair.prefill.name == f"prefill-{int(key != 'a')}"), pairs[0])

        world = open_deployment(stepped=True, prefix_caching=False, prefill=2, choose=first_then_second)
        answer = world.submit("a", REQUEST)
        p, d = world.seats["prefill-0"], world.seats["decode-0"]
        p.device_runs = p.flows = False
        world.run_until(lambda: p.device.pending() > 1, "C2.1: P computes")
        p.device.complete(1)
        world.run_until(lambda: bool(p.gate.submitted), "C4: P sends what is ready")
        if not world.stepped:  # what has begun must end before anything can be promised
            world.run_until(lambda: not p.guard.outstanding(), "T5: what is sent ends")
        p.frozen = True
        world.abort("a")
        world.hold_mail("to", "prefill-0")
        world.run_until(lambda: answer.transfer not in d.phases, "C6.4: D revokes the grant and frees without P")
        require(
            answer.transfer in d.gate.called("revoke"), "C6.4", "D freed memory without a fence",
            expected="revoke() of the transfer", seen=list(d.gate.calls)[-5:],
        )  # fmt: skip
        fillers = [world.submit(f"filler-{index}", request(1000 * index + 400, 30)) for index in range(3)]
        world.run_until(lambda: all(one.ended for one in fillers), "C5.2: the memory is used by others")
        again = [world.submit(f"again-{index}", request(1000 * index + 400, 30, max_tokens=40)) for index in range(3)]
        world.run_until(lambda: all(len(one.tokens) > 3 for one in again), "C5.2: and is used again")
        p.frozen, p.device_runs, p.flows = False, True, True
        # P may also be through with it within the turn in which it hears
        refused = (SourcePhase.DRAINING, None)
        world.run_until(lambda: p.phases.get(answer.transfer) in refused, "C6.4: P's writes are refused")
        world.let_go()
        world.run_until(world.idle, "C5.1: P drains in the end")
        for key in world.answers:
            if key != "a":
                world.check_answer(key)
        world.finish()

    @pytest.mark.clause("C5.1", "C6.1", "T9")
    @pytest.mark.mode("in-process")
    def test_nothing_is_submitted_after_a_cancel(self, world: Deployment) -> None:
        """The transport is full when the request is cancelled; when it has room again, what waited is gone."""
        answer = world.submit("a", REQUEST)
        p = world.seats["prefill-0"]
        p.gate.hold("submissions")
        world.run_until(lambda: world.p is SourcePhase.PREFILLING, "C2.1: P is told")
        world.settle()
        world.abort("a")
        world.run_until(lambda: world.p is not SourcePhase.PREFILLING, "C6.1: P drains")
        p.gate.let_go()
        world.submit("b", OTHER)
        world.run_until(world.idle, "C6.1: the next request ends")
        late = [chunk.sequence for chunk in p.gate.submitted if chunk.transfer == answer.transfer]
        require(not late, "C6.1", "chunks were submitted after their transfer was cancelled", seen=late)
        world.check_answer("b")
        world.finish()
