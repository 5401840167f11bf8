"""C4: what each milestone is evidence of, and that none stands in for another."""

from __future__ import annotations

import pytest

from kvbaton import messages
from kvbaton.handoff.table import DestinationPhase, Milestones, SourcePhase
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.topic import REQUEST, DeploymentTopic

_ORDER = (
    Milestones.PLACED, Milestones.RESERVED, Milestones.PREFILL_STARTED, Milestones.COMMITTED, Milestones.RECEIVED,
    Milestones.ACTIVATED, Milestones.DESTINATION_RETIRED,
)  # fmt: skip
#: What each side's own clock says at its end.
_ON_P = (
    Milestones.PREFILL_STARTED, Milestones.SOURCE_READY, Milestones.SUBMITTED, Milestones.COMMITTED,
    Milestones.ACKNOWLEDGED, Milestones.SOURCE_RETIRED,
)  # fmt: skip
_ON_D = (
    Milestones.RESERVED, Milestones.RECEIVED, Milestones.IMPORTED, Milestones.ACTIVATED, Milestones.FINISHED,
    Milestones.DESTINATION_RETIRED,
)  # fmt: skip


class Evidence(DeploymentTopic):
    """C4: each milestone has its own evidence."""

    @pytest.mark.clause("C4")
    @pytest.mark.mode("in-process")
    def test_each_milestone_is_reached_once_and_in_order(self, world: Deployment) -> None:
        """One request from beginning to end, as the coordinator sees it; each side's own clock agrees."""
        world.between = lambda: world.advance(0.001)
        answer = world.submit("a", REQUEST)
        world.run_until(world.idle, "C4: the request ends")
        reached = [name for name in answer.milestones if name in _ORDER]
        require(
            reached == list(_ORDER) and answer.milestones.count(Milestones.SOURCE_RETIRED) == 1, "C4",
            "milestones are missing, repeated or out of order", expected=f"{_ORDER} and source_retired once",
            seen=answer.milestones,
        )  # fmt: skip
        for mail in world.mail:
            if isinstance(mail.message, messages.Retired):
                times = mail.message.timings
                order = _ON_P if mail.peer.name == "prefill-0" else _ON_D
                require(
                    list(order) == sorted(order, key=lambda name: times.get(name, -1.0)) and set(order) <= set(times),
                    "C4", f"the milestones of {mail.peer.name} are missing or out of order by its own clock",
                    expected=order, seen=times,
                )  # fmt: skip
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C4.2", "C7.3")
    @pytest.mark.mode("in-process")
    def test_received_needs_the_commit(self, world: Deployment) -> None:
        """Every receipt is in before D knows how many there are.

        Troubleshooting:
        - D imports at once: it takes the chunks that it has seen for all there are.
        """
        world.submit("a", REQUEST)
        world.hold_mail("from", "prefill-0")
        p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))
        world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
        count = len(p.gate.submitted)
        world.run_until(lambda: d.guard.statistics()["receipts_total"] >= count, "T3: D sees a receipt of every chunk")
        world.settle()
        require(
            world.d is DestinationPhase.RESERVED, "C4.2", "D has received without knowing the number of chunks",
            expected="RESERVED until the commit", seen=world.d,
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C4.2: with the commit D has received")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C4.2")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("which", ["first", "last"])
    def test_received_needs_every_receipt(self, world: Deployment, which: str) -> None:
        """D knows the number, and one receipt is still missing."""
        answer = world.submit("a", REQUEST)
        d = world.seats["decode-0"]
        d.gate.hold("receipts")
        world.run_until(lambda: bool(world.letters(messages.Commit)), "C4: P commits")
        count = world.letters(messages.Commit)[0].count
        require(
            count == len(world.seats["prefill-0"].gate.submitted) > 2, "C4",
            "the commit does not count the chunks", expected=len(world.seats["prefill-0"].gate.submitted), seen=count,
        )  # fmt: skip
        world.run_until(lambda: d.gate.waiting[1] >= count, "T3: every chunk is received")
        receipts = {receipt.sequence: receipt for receipt in d.gate.set_aside()}
        missing = receipts.pop(0 if which == "first" else count - 1)
        d.gate.let_go()
        for receipt in receipts.values():
            d.gate.inject(receipt)
        world.settle()
        require(
            d.phases.get(answer.transfer) is DestinationPhase.RESERVED, "C4.2",
            f"D has received although the receipt of chunk {missing.sequence} of {count} is missing",
            expected="RESERVED", seen=d.phases.get(answer.transfer), look="counting receipts instead of keeping a set",
        )  # fmt: skip
        d.gate.inject(missing)
        world.run_until(world.idle, "C4.2: with the last receipt D has received")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C4.1", "C4")
    @pytest.mark.mode("in-process")
    def test_p_is_acknowledged_without_ds_engine(self, world: Deployment) -> None:
        """D's engine computes something else for a long time: P retires, D has not imported."""
        answer = world.submit("a", REQUEST)
        boundaries.received(world)
        require(
            answer.transfer not in world.seats["prefill-0"].phases and not answer.tokens, "C4.1",
            "P waits for D's engine", seen=world.describe(),
        )  # fmt: skip
        require(
            Milestones.ACTIVATED not in answer.milestones, "C4", "RECEIVED was taken for ACTIVATED",
            seen=answer.milestones,
        )  # fmt: skip
        require(
            world.seats["prefill-0"].gate.called("acknowledge") == [answer.transfer], "C4.1",
            "the source's connector was not told once that its transfer has been received",
            seen=world.seats["prefill-0"].gate.called("acknowledge"),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C4.1: D's engine goes on")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C4")
    @pytest.mark.mode("in-process")
    def test_a_terminal_handle_is_not_received(self, world: Deployment) -> None:
        """Every handle at P is terminal, and D has noticed nothing: P is not acknowledged and frees nothing."""
        answer = world.submit("a", REQUEST)
        p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))
        d.gate.hold("receipts")
        world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
        world.run_until(lambda: p.figures()["done_total"] >= len(p.gate.submitted), "T5: every handle is terminal")
        world.settle()
        require(
            (world.p, world.d) == (SourcePhase.COMMITTED, DestinationPhase.RESERVED)
            and Milestones.RECEIVED not in answer.milestones and p.engine.statistics()["blocks_used"] > 0, "C4",
            "HANDLE_DONE was taken for RECEIVED", expected="P COMMITTED with its blocks, D RESERVED",
            seen=f"P {world.p}, D {world.d}, {answer.milestones}",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C4: with the receipts it goes on")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C4", "C5.1")
    @pytest.mark.mode("in-process")
    def test_nothing_is_sent_before_the_device_is_done(self, world: Deployment) -> None:
        """P's device has launched everything and finished nothing.

        Troubleshooting:
        - chunks are submitted: their source is stale until the device event behind them completes.
        """
        world.submit("a", REQUEST)
        boundaries.computing(world)
        p = world.seats["prefill-0"]
        require(
            not p.gate.submitted, "C4", "a chunk was handed to the transport before its source was ready",
            expected="nothing submitted", seen=f"{len(p.gate.submitted)} chunks",
        )  # fmt: skip
        p.device.complete(1)
        world.run_until(lambda: bool(p.gate.submitted), "C4: what is ready is sent while the rest is computed")
        world.settle()
        require(
            world.p is SourcePhase.PREFILLING, "C4", "P has committed while its device is still at work", seen=world.p
        )
        world.let_go()
        world.run_until(world.idle, "C4: the request ends")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C4", "C2.5")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
    def test_retired_is_said_after_the_engine_has_released(self, world: Deployment, name: str) -> None:
        """The engine of one side is busy and cannot release yet: its credit stays out."""
        answer = world.submit("a", REQUEST)
        if name == "prefill-0":
            world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
            world.seats[name].engine_frozen = True
            world.run_until(lambda: answer.ended, "C4: D serves the request")
        else:
            boundaries.decoding(world)
            world.seats[name].engine_frozen = False
            world.run_until(lambda: answer.ended, "C4: D serves the request")
            world.seats[name].engine_frozen = True
        world.settle()
        used = world.seats[name].engine.statistics()["blocks_used"]
        out = world.view(name).blocks_out
        require(
            (used > 0) == (out > 0), "C4", "RETIRED was said while the engine still holds the memory",
            expected="the credit is out while blocks are in use", seen=f"{used:g} blocks in use, {out} promised",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C4: it retires in the end")
        world.check_answer("a")
        world.finish()
