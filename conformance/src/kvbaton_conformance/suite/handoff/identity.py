"""C1: which generation is meant."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvbaton import messages
from kvbaton.connector import Receipt
from kvbaton.engine import Request
from kvbaton.errors import DuplicateRequest
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Pair
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton.identity import RequestKey
from kvbaton_conformance.clauses import ClauseBroken, require
from kvbaton_conformance.deployment import Deployment, Mail
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic, OpenDeployment

_CREATING = (messages.Reserve, messages.Prefill)


class Identity(DeploymentTopic):
    """C1: a request's id may be used again at once; whatever is late or strange finds nobody."""

    @pytest.mark.clause("C1.1", "C1.2", "C1.3")
    @pytest.mark.mode("in-process")
    def test_an_id_is_free_while_its_old_transfer_drains(self, world: Deployment) -> None:
        """A request is cancelled with chunks under way; the same id is served again before they have ended.

        Troubleshooting:
        - the new request ends with the old one: something is looked up by request id instead of by transfer;
        - it never ends: old orders (here Cancel and Release again) are applied to the new transfer.
        """
        seat = world.seats["prefill-0"]
        first = world.submit("a", REQUEST)
        old = first.transfer
        for each in world.seats.values():
            each.gate.hold()
            each.gate.of = lambda transfer: transfer == old
        world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
        world.run_until(lambda: seat.gate.waiting[0] > 0, "T5: the chunks complete at the source")
        world.abort("a")
        require(
            first.ended and first.ending.ending is fx.Ending.CANCELLED, "C1.1",
            "a cancelled request is not over for its caller until its chunks are", seen=first,
        )  # fmt: skip
        second = world.submit("a", REQUEST)
        require(
            second.transfers and second.transfer != old, "C1.2",
            "an id that is used again has the transfer id of before", expected="a new one", seen=second.transfers,
        )  # fmt: skip
        world.run_until(lambda: second.transfer in seat.phases, "C2.1: P is told of the second generation")
        for name in world.seats:
            world.resend(name, messages.Cancel(old))
        world.run_until(lambda: second.ended, "C1.1: the second request ends while the first one's chunks are held")
        world.check_answer("a")
        require(
            seat.phases.get(old) is SourcePhase.DRAINING, "C5.1",
            "P has retired a transfer whose chunks have not ended", seen=world.describe(),
            look="completions of one transfer that end those of another",
        )  # fmt: skip
        world.let_go()
        world.finish()

    @pytest.mark.clause("C1.1")
    @pytest.mark.mode("in-process")
    def test_an_id_that_is_live_is_refused_and_its_request_goes_on(self, world: Deployment) -> None:
        """The same id twice: the second is refused with an error of its own, the first notices nothing."""
        world.submit("a", REQUEST)
        for _ in range(3):
            try:
                world.submit("a", OTHER)
            except DuplicateRequest:
                world.turn()
            else:
                raise ClauseBroken("C1.1", "a second request was taken under an id that is live")
        world.run_until(world.idle, "C1.1: the first request ends")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C1.2", "C7.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("cancelled", [False, True], ids=["finished", "cancelled"])
    def test_words_about_a_transfer_that_is_gone_leave_nothing_behind(self, world: Deployment, cancelled: bool) -> None:
        """After the end every message is said again, and every receipt reported again.

        Troubleshooting:
        - a record or memory appears: a late message or receipt creates one;
        - P computes again: Prefill is recognised by its transfer, which is unknown by now, instead of by its number.
        """
        world.submit("a", REQUEST)
        if cancelled:
            boundaries.committed(world)
            world.abort("a")
            world.let_go()
        world.run_until(world.idle, "C2.5: the request ends and both sides retire it")
        transfer = world.answers["a"].transfer
        sent = list(world.mail)
        chunks = len(world.seats["prefill-0"].gate.submitted)
        _say_again(world, sent)
        for sequence in range(chunks + 1):
            world.seats["decode-0"].gate.inject(Receipt(world.seats["prefill-0"].peer, transfer, sequence))
        world.settle()
        for name, seat in world.seats.items():
            require(
                not seat.phases and not seat.engine.statistics()["transfers"], "C1.2",
                f"a message or receipt about a retired transfer has created something on {name}",
                expected="it is dropped", seen=f"{seat.phases}\n{world.describe()}",
            )  # fmt: skip
        require(
            len(world.seats["prefill-0"].gate.submitted) == chunks, "C1.2",
            "chunks of a retired transfer were sent again", look="how a replayed Prefill is recognised",
        )  # fmt: skip
        require(not world.violations, "C7.4", "what is merely late counts as a violation", seen=world.violations)
        world.submit("b", OTHER)
        world.run_until(world.idle, "C1.2: another request is served")
        world.check_answer("b")
        world.finish()

    @pytest.mark.clause("C1.2", "C4.2")
    @pytest.mark.mode("in-process")
    def test_a_receipt_of_an_older_generation_counts_for_nobody(self, world: Deployment) -> None:
        """The first generation's receipts come when the second one, under the same id, waits for its own.

        Troubleshooting:
        - D imports with chunks missing: receipts are counted by request or by number, not by transfer.
        """
        d = world.seats["decode-0"]
        first = world.submit("a", REQUEST)
        d.gate.hold("receipts")
        world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
        count = world.letters(messages.Commit)[-1].count
        world.run_until(lambda: d.gate.waiting[1] >= count, "T3: every chunk is received")
        world.abort("a")
        second = world.submit("a", REQUEST)
        world.run_until(
            lambda: bool(world.letters(messages.Commit, second.transfer)), "C4: P submits the second generation"
        )
        world.settle()
        d.gate.of = lambda transfer: transfer != first.transfer
        world.settle()
        require(
            d.phases.get(second.transfer) is DestinationPhase.RESERVED, "C1.2",
            "receipts of a cancelled generation were counted for the next one", expected="D waits for its own receipts",
            seen=d.phases.get(second.transfer),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C4.2: the second generation ends")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C1.2")
    @pytest.mark.mode("in-process")
    def test_orders_that_create_are_numbered_when_they_are_sent(self, open_deployment: OpenDeployment) -> None:
        """Two D answer in the opposite order of their admission, so P hears of the younger transfer first.

        Troubleshooting:
        - the older request never ends: its Prefill has a lower number than the last and is taken for a replay.
        """
        placed: list[Pair] = []

        def in_turn(_key: RequestKey, _request: Request, pairs: Sequence[Pair]) -> Pair:
            name = f"decode-{len(placed) % 2}"
            placed.append(next((pair for pair in pairs if pair.decode.name == name), pairs[0]))
            return placed[-1]

        world = open_deployment(stepped=True, decode=2, choose=in_turn)
        world.seats["decode-0"].frozen = True
        world.submit("old", REQUEST)
        young = world.submit("young", OTHER)
        world.run_until(lambda: young.ended, "C1.2: the younger request ends")
        world.let_go()
        world.run_until(world.idle, "C1.2: the older request, whose D answered later, is prefilled, too")
        world.check_answer("old")
        world.check_answer("young")
        world.finish()

    @pytest.mark.clause("C1.4")
    @pytest.mark.mode("in-process")
    def test_an_epoch_of_yesterday_is_not_heard(self, world: Deployment) -> None:
        """P dies and starts again; receipts and messages of its first life come late.

        Troubleshooting:
        - a receipt is applied although its sender's process is another one by now: peers are compared by name.
        """
        old = world.seats["prefill-0"].peer
        world.submit("a", REQUEST)
        boundaries.posted(world)
        world.crash("prefill-0")
        world.let_go()
        world.run_until(world.idle, "C6.4: the dead stage's transfer ends")
        world.restart("prefill-0")
        d = world.seats["decode-0"]
        answer = world.submit("b", REQUEST)
        d.gate.hold("receipts")
        world.run_until(lambda: world.p is SourcePhase.COMMITTED, "C4: P submits its last chunk")
        count = world.letters(messages.Commit)[-1].count
        world.run_until(lambda: d.gate.waiting[1] >= count, "T3: every chunk is received")
        true = d.gate.set_aside()
        d.gate.let_go()
        for sequence in range(count):
            d.gate.inject(Receipt(old, answer.transfer, sequence))
        world.coordinator.handle(old, messages.Retired(answer.transfer), world.clock())
        world.settle()
        require(
            world.d is DestinationPhase.RESERVED, "C1.4", "receipts of an older epoch of P were counted",
            expected="they are dropped", seen=world.d,
        )  # fmt: skip
        for receipt in true:
            d.gate.inject(receipt)
        world.let_go()
        world.run_until(world.idle, "C1.4: the request of the new epoch ends")
        world.check_answer("b")
        world.finish()

    @pytest.mark.clause("C1.4", "C7.4")
    @pytest.mark.mode("in-process")
    def test_a_stranger_has_no_word(self, open_deployment: OpenDeployment) -> None:
        """Stages that have no part in a transfer say something about it: refused, and the transfer goes on."""
        world = open_deployment(stepped=True, prefill=2, decode=2)
        answer = world.submit("a", REQUEST)
        boundaries_of = {seat.peer: name for name, seat in world.seats.items()}
        world.hold()
        world.run_until(lambda: bool(world.letters(messages.Commit)), "C4: P submits its last chunk")
        placed = {m.peer for m in world.mail if isinstance(m.message, (messages.Reserve, messages.Prefill))}
        for peer, name in boundaries_of.items():
            if peer not in placed:
                for word in (messages.Received, messages.Retired):
                    world.repeat(name, word(answer.transfer))
        world.settle()
        strangers = {v.peer for v in world.violations if v.clause == "C1.4"}
        require(
            len(strangers) == 2 and not answer.ended, "C1.4",
            "a word about a transfer by a stage that has no part in it is not refused",
            expected="a violation by each, and nothing changes", seen=f"{world.violations}\n{world.describe()}",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C1.4: the transfer goes on")
        world.check_answer("a")
        world.finish()


def _say_again(world: Deployment, mail: list[Mail]) -> None:
    for letter in mail:
        if getattr(letter.message, "transfer", None) is None and not hasattr(letter.message, "reservation"):
            continue
        if letter.way == "to":
            world.resend(letter.peer.name, letter.message)
        else:
            world.repeat(letter.peer.name, letter.message)
