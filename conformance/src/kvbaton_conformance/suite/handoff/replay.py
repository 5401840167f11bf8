"""C7: what comes twice, late, early or in another order."""

from __future__ import annotations

import random

import pytest

from kvbaton import messages
from kvbaton.connector import Receipt
from kvbaton.engine import FinishReason
from kvbaton.handoff import effects as fx
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton.identity import PeerId
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.gate import Weather
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.failure import after_a_death, failed_because
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic, OpenDeployment, request


class Replay(DeploymentTopic):
    """C7: a repeat has no second effect, an order nobody promised is not needed, a lie is refused by name."""

    @pytest.mark.clause("C7.1", "C2.5", "C1.2")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("end", ["finished", "cancelled"])
    def test_every_word_is_said_twice(self, world: Deployment, end: str) -> None:
        """Each message about a transfer is delivered twice, both ways, from the first to the last."""
        world.echoing = True
        answer = world.submit("a", REQUEST)
        if end == "cancelled":
            boundaries.committed(world)
            world.abort("a")
            world.abort("a")
            world.let_go()
        world.run_until(world.idle, "C7.1: with every word said twice the request ends")
        require(
            len(answer.endings) == 1 and len(answer.transfers) == 1, "C7.1", "a repeated word had a second effect",
            expected="one generation, one outcome", seen=answer,
        )  # fmt: skip
        require(not world.violations, "C7.1", "a repeat counts as a violation", seen=world.violations)
        if end == "finished":
            world.check_answer("a")
        world.finish(returned_twice=1)  # P's second Retired, which changed no balance

    @pytest.mark.clause("C7.1", "C7.3", "C4.2")
    @pytest.mark.mode("in-process")
    def test_receipts_come_in_any_order_and_again(self, open_deployment: OpenDeployment, draw: random.Random) -> None:
        """Slow and careless pollers on both sides: events late, in another order, receipts again and again."""
        world = open_deployment(prefill=2, decode=2)
        for seat in world.seats.values():
            seat.gate.weather = Weather(random.Random(draw.random()), report=0.3, repeat=0.5)
        for index in range(8):
            world.submit(str(index), request(100 * index, draw.randrange(1, 40)))
        world.run_until(world.idle, "C7.3: all end, whatever the order", turns=6000)
        for key in world.answers:
            world.check_answer(key)
        require(not world.violations, "C7.1", "a repeated receipt counts as a violation", seen=world.violations)
        world.finish()

    @pytest.mark.clause("C7.3")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("commit", ["first", "last"])
    def test_commit_and_receipts_in_the_opposite_order(self, world: Deployment, commit: str) -> None:
        """Receipts from the last to the first, before the commit or after it."""
        world.submit("a", REQUEST)
        d = world.seats["decode-0"]
        if commit == "last":
            world.hold_mail("from", "prefill-0")
        d.gate.hold("receipts")
        world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
        count = len(world.seats["prefill-0"].gate.submitted)
        world.run_until(lambda: d.gate.waiting[1] >= count, "T3: every chunk is received")
        d.gate.reverse()
        d.gate.let_go()
        world.settle()
        world.let_go()
        world.run_until(world.idle, "C7.3: it ends all the same")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C7.1", "C4.2")
    @pytest.mark.mode("in-process")
    def test_a_receipt_that_comes_twice_counts_once(self, world: Deployment) -> None:
        """As many receipts as chunks, but one twice and one missing."""
        answer = world.submit("a", REQUEST)
        d = world.seats["decode-0"]
        d.gate.hold("receipts")
        world.run_until(lambda: bool(world.letters(messages.Commit)), "C4: P commits")
        count = world.letters(messages.Commit)[0].count
        world.run_until(lambda: d.gate.waiting[1] >= count, "T3: every chunk is received")
        receipts = {receipt.sequence: receipt for receipt in d.gate.set_aside()}
        d.gate.let_go()
        for sequence in (*range(1, count), 1):
            d.gate.inject(receipts[sequence])
        world.settle()
        require(
            d.phases.get(answer.transfer) is DestinationPhase.RESERVED, "C7.1",
            "a repeated receipt was counted for one that is missing", expected=f"RESERVED, chunk 0 of {count} missing",
            seen=d.phases.get(answer.transfer),
        )  # fmt: skip
        d.gate.inject(receipts[0])
        world.run_until(world.idle, "C7.1: with the missing one it ends")
        world.check_answer("a")
        world.finish()

    # -- lies ----------------------------------------------------------------------------------------------------------

    @pytest.mark.clause("C7.2", "C5.2")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("lie", ["a conflicting commit", "a commit of nothing", "a second reservation"])
    def test_a_word_that_cannot_be_true_is_refused(self, world: Deployment, lie: str) -> None:
        """D is told something that contradicts what it knows: that transfer fails by name, and its memory is held."""
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        if lie == "a second reservation":
            reserve = world.letters(messages.Reserve)[0]
            again = messages.Reserve(reserve.transfer, reserve.ordinal + 1, reserve.request, reserve.source)
            world.resend("decode-0", again)
            world.coordinator.peers()  # its own numbers are now behind D's: no more is reserved there
        else:
            world.resend("decode-0", messages.Commit(answer.transfer, 0 if "nothing" in lie else 1000))
        world.settle()
        failed_because(answer, "C7.2")
        require(
            world.d is DestinationPhase.HELD, "C5.2", f"after {lie} D let go of memory that is being written",
            expected="HELD", seen=world.d,
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C7.2: both sides drain")
        world.finish()

    @pytest.mark.clause("C7.2", "C6.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("when", ["committed", "decoding"])
    def test_a_write_that_nobody_reserved_for_costs_its_writer(
        self, world: Deployment, subject: Subject, when: str
    ) -> None:
        """A receipt of a chunk beyond the commit: P has written what was not planned, so it counts as lost.

        When D decodes already that is a late write.
        """
        answer = world.submit("a", REQUEST)
        {"committed": boundaries.committed, "decoding": boundaries.decoding}[when](world)
        count = world.letters(messages.Commit)[0].count
        d = world.seats["decode-0"]
        d.gate.inject(Receipt(world.seats["prefill-0"].peer, answer.transfer, count))
        world.run_until(lambda: bool(world.kills), "C7.2: a writer that wrote what nobody reserved for is lost")
        require(
            world.kills[0].name == "prefill-0" and answer.ended, "C7.2", "the wrong stage was given up",
            expected="prefill-0", seen=world.kills,
        )  # fmt: skip
        failed_because(answer, "C7.2")
        after_a_death(world, subject)

    @pytest.mark.clause("C7.2")
    @pytest.mark.mode("in-process")
    def test_a_receipt_from_the_wrong_writer_is_refused(self, open_deployment: OpenDeployment) -> None:
        """Another P, which is connected and innocent, is named as the sender of a chunk."""
        world = open_deployment(stepped=True, prefill=2, narrow={"revocable": False})
        answer = world.submit("a", REQUEST)
        world.hold()
        world.run_until(lambda: bool(world.letters(messages.Commit)), "C4: P commits")
        world.begin()
        d = world.seats["decode-0"]
        (writer,) = [mail.peer for mail in world.mail if isinstance(mail.message, messages.Prefill)]
        (other,) = [s.peer for s in world.seats.values() if s.peer.name.startswith("prefill") and s.peer != writer]
        d.gate.inject(Receipt(other, answer.transfer, 0))
        world.settle()
        failed_because(answer, "C7.2")
        require(
            d.phases.get(answer.transfer) is DestinationPhase.HELD, "C5.2", "D let go of memory that is being written",
            expected="HELD", seen=d.phases,
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C7.2: both sides drain")
        world.finish()

    @pytest.mark.clause("C7.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("early", ["Received", "Finished", "Activated", "Output", "Retired by D", "Retired by P"])
    def test_a_word_before_its_time_is_a_violation_by_its_sender(self, world: Deployment, early: str) -> None:
        """A stage claims what cannot be true yet: not applied, the transfer ends, and the memory drains."""
        answer = world.submit("a", REQUEST)
        boundaries.computing(world)
        t = answer.transfer
        words: dict[str, tuple[str, messages.Message]] = {
            "Received": ("decode-0", messages.Received(t)),
            "Finished": ("decode-0", messages.Finished(t, FinishReason.STOP)),
            "Activated": ("decode-0", messages.Activated(t)),
            "Output": ("decode-0", messages.Output(t, 0, (1,))),
            "Retired by D": ("decode-0", messages.Retired(t)),
            "Retired by P": ("prefill-0", messages.Retired(t)),
        }
        name, word = words[early]
        world.repeat(name, word)
        world.settle()
        blamed: set[PeerId | None] = {violation.peer for violation in world.violations}
        require(
            blamed == {world.seats[name].peer} and answer.ended and answer.ending.ending is fx.Ending.FAILED
            and not answer.tokens, "C7.4", f"{early} before its time was believed",
            expected=f"a violation by {name}, and the transfer fails", seen=f"{world.violations}, {answer}",
        )  # fmt: skip
        require(
            world.coordinator.credits_out(t) == (True, True), "C2.5", f"{early} before its time returned a credit",
            seen=world.coordinator.credits_out(t),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C7.4: both sides drain")
        world.submit("b", OTHER)
        world.run_until(world.idle, "C7.4: the next request ends")
        world.check_answer("b")
        world.finish()
