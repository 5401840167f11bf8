"""C7.4, C1.3: words that come late, or contradict what is known, at each of the three machines."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton import messages
from kvbaton.connector import PeerEvent, Receipt
from kvbaton.errors import KvbatonError
from kvbaton.handoff import effects as fx
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.stage.engine_loop import CommandFailed
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.gate import broken_wire
from kvbaton_conformance.scripted import ScriptedLayout
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.failure import after_a_death, failed_because
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic, OpenDeployment, request


class Words(DeploymentTopic):
    """C7.4, C1.3: what is late changes nothing, and nothing is done twice because it was said twice."""

    # -- at the coordinator
    # ---------------------------------------------------------------------------------------------

    @pytest.mark.clause("C1.1", "C1.2", "C1.3")
    @pytest.mark.mode("in-process")
    def test_a_late_end_is_not_the_next_requests(self, world: Deployment) -> None:
        """A request is cancelled while its Finished is on the way, and its id is used again.

        Troubleshooting:
        - the new request ends at once: Finished is applied to whoever has the id now.
        """
        first = world.submit("a", REQUEST)
        boundaries.decoding(world)
        world.hold_mail("from", "decode-0")
        world.seats["decode-0"].engine_frozen = False
        world.run_until(lambda: world.waits(messages.Finished), "C4: D finishes")
        world.abort("a")
        require(first.ending.ending is fx.Ending.CANCELLED, "C1.1", "the request did not end as cancelled", seen=first)
        second = world.submit("a", OTHER)
        world.let_go()
        world.run_until(world.idle, "C1.1: the second request ends")
        require(
            len(first.endings) == len(second.endings) == 1, "C1.1", "a request ended more than once",
            expected="one end each", seen=f"{first}; {second}",
        )  # fmt: skip
        require(
            second.ending.ending is fx.Ending.FINISHED and len(second.tokens) == OTHER.sampling.max_tokens, "C1.1",
            "the end of an earlier generation ended the request that has its id now", seen=second,
            look="what Finished is looked up by",
        )  # fmt: skip
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C2.5", "C7.1")
    @pytest.mark.mode("in-process")
    def test_ds_second_retired_returns_nothing(self, world: Deployment) -> None:
        """D has retired and P has not; D says so again."""
        answer = world.submit("a", REQUEST)
        d = world.seats["decode-0"]
        world.seats["prefill-0"].gate.hold("completions")
        world.run_until(lambda: world.p is not None, "C2.1: P is told")
        world.hold_mail("from", "decode-0")
        world.run_until(lambda: world.waits(messages.Received), "C4.2: D has received")
        world.abort("a")
        world.run_until(lambda: answer.transfer not in d.phases, "C5.2: after RECEIVED D frees by itself")
        world.let_mail_go()
        world.settle()
        require(
            world.coordinator.credits_out(answer.transfer) == (True, False), "C2.5",
            "the two credits do not come back apart", expected="P's is out, D's is back",
            seen=world.coordinator.credits_out(answer.transfer),
        )  # fmt: skip
        world.repeat("decode-0", messages.Retired(answer.transfer))
        world.settle()
        view = world.view("decode-0")
        require(
            (view.slots_out, view.blocks_out, view.repeated_returns) == (0, 0, 1), "C2.5",
            "a second return changed a balance, or was not noticed", expected="nothing out, one repeated return",
            seen=view,
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.5: P retires")
        world.finish(returned_twice=1)

    @pytest.mark.clause("C7.2", "C7.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("lie", ["another count", "nothing"])
    def test_a_commit_that_cannot_be_true_is_refused_by_c(self, world: Deployment, lie: str) -> None:
        """P commits a second time with another count, or commits no chunks."""
        answer = world.submit("a", REQUEST)
        if lie == "nothing":
            boundaries.computing(world)
            count = 0
        else:
            boundaries.committed(world)
            count = world.letters(messages.Commit)[0].count + 1
        world.repeat("prefill-0", messages.Commit(answer.transfer, count))
        world.settle()
        blamed = {violation.peer for violation in world.violations}
        require(
            blamed == {world.seats["prefill-0"].peer} and answer.ended and answer.ending.ending is fx.Ending.FAILED,
            "C7.2", f"a commit of {count} chunks was believed", expected="a violation by P, and the transfer fails",
            seen=f"{world.violations}, {answer}",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C7.2: both sides drain")
        world.finish()

    @pytest.mark.clause("C2.6")
    @pytest.mark.mode("in-process")
    def test_a_refused_request_waits_again_with_its_age(self, open_deployment: OpenDeployment) -> None:
        """One slot.  The oldest request is refused, a younger one passes it, a third waits: the oldest is next."""
        from kvbaton.engine import Role

        small = ScriptedLayout(blocks=80, gap=5, final_slots=1)
        world = open_deployment(stepped=True, layouts={Role.DECODE: small})
        refusals = iter(["not now"])
        world.seats["decode-0"].engine.refuse = lambda admission: next(refusals, None)
        oldest, passing, third = (world.submit(key, request(100 * n, 9)) for n, key in enumerate(("1", "2", "3")))
        world.run_until(lambda: oldest.requeued == 1, "C2.6: a refused request waits again")
        world.run_until(lambda: bool(passing.transfers), "C2.6: one that fits may pass it")
        require(not third.transfers, "C2.6", "two transfers have one slot", seen=third)
        world.advance(10)
        world.run_until(lambda: len(oldest.transfers) == 2 or bool(third.transfers), "C2.6: the next one is placed")
        require(
            not third.transfers, "C2.6", "a refused request has lost its place", expected="the oldest is next",
            seen=f"oldest {oldest}; third {third}",
        )  # fmt: skip
        world.run_until(world.idle, "C2.6: all end")
        for key in world.answers:
            world.check_answer(key)
        world.finish()

    @pytest.mark.clause("C1.4")
    @pytest.mark.mode("in-process")
    def test_an_earlier_start_of_a_stage_is_not_taken_in(self, world: Deployment) -> None:
        """A Hello of an earlier epoch of a stage that is up: refused, and the present one goes on."""
        seat = world.seats["decode-0"]
        older = PeerId(seat.peer.name, seat.peer.epoch - 1)
        hello = messages.Hello(older, seat.engine.role, seat.engine.capacity(), b"")
        effects = world.coordinator.handle(older, hello, world.clock())
        require(
            [type(effect) for effect in effects] == [fx.Violation] and len(world.coordinator.peers()) == 2, "C1.4",
            "a stage was replaced by an earlier start of itself", expected="a violation, nothing else", seen=effects,
        )  # fmt: skip
        world.submit("a", REQUEST)
        world.run_until(world.idle, "C1.4: the present stage serves")
        world.check_answer("a")
        world.finish()

    # -- at both stages
    # -------------------------------------------------------------------------------------------------

    @pytest.mark.clause("C9.3", "T2")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
    def test_an_endpoint_that_is_none_stops_nobody(self, world: Deployment, name: str) -> None:
        """A stage is told to connect to bytes that are no endpoint: counted, and it goes on."""
        for nonsense in (b"", b"\xc1", b"\x81\xa4peer\xc0"):
            world.resend(name, messages.Connect(nonsense))
        try:
            world.settle()
            world.submit("a", REQUEST)
            world.run_until(world.idle, "C9.3: the stage goes on")
        except KvbatonError as error:
            require(False, "C9.3", "an endpoint that is none went through to the pump", seen=error)
        world.check_answer("a")
        world.finish()

    # -- at P ----------------------------------------------------------------------------------------------------------

    @pytest.mark.clause("C5.2", "C6.1", "C6.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("how", ["a chunk fails", "the connection is down"])
    def test_a_quiet_source_is_not_a_quiet_target(self, world: Deployment, subject: Subject, how: str) -> None:
        """Nothing reads P's memory any more, and what it had sent may still be written at D: P frees and does not
        retire, D holds.

        Troubleshooting:
        - D frees: P said Retired, which is also "I write no more", on evidence about its own side.
        """
        answer = world.submit("a", REQUEST)
        p = world.seats["prefill-0"]
        if how == "a chunk fails":
            p.gate.fail_next(broken_wire(), source_quiet=True, target_quiet=False)
            world.run_until(lambda: answer.ended, "C6.3: a failed chunk ends its request")
        else:
            boundaries.committed(world)
            p.gate.inject(PeerEvent(world.seats["decode-0"].peer, False, True, broken_wire()))
            world.run_until(lambda: answer.ended, "C6.4: a connection that is down ends its requests")
        world.settle()
        require(
            world.coordinator.credits_out(answer.transfer)[0] and world.d is DestinationPhase.HELD, "C5.2",
            "P said that it writes no more, and nobody has proven it", expected="P's credit out, D HELD",
            seen=world.describe(), look="what Retired needs: every target quiet, not every source",
        )  # fmt: skip
        world.crash("prefill-0")
        after_a_death(world, subject)

    @pytest.mark.clause("C5.2", "C6.7")
    @pytest.mark.mode("in-process")
    def test_ds_receipts_prove_what_p_cannot(self, world: Deployment) -> None:
        """P does not know whether a chunk of an ended transfer is still written.  D's receipt of it says so, and both
        retire.

        Troubleshooting:
        - P never retires: nobody asked D for its receipts, or its answer did not get to P.
        """
        answer = world.submit("a", REQUEST)
        p = world.seats["prefill-0"]
        p.gate.fail_next(broken_wire(), source_quiet=True, target_quiet=False)
        world.run_until(lambda: answer.ended, "C6.3: a failed chunk ends its request")
        world.settle()
        require(
            world.coordinator.credits_out(answer.transfer)[0], "C5.2", "P retired before anything was proven",
            expected="P's credit out", seen=world.describe(),
        )  # fmt: skip
        world.seats["decode-0"].gate.inject(Receipt(p.peer, answer.transfer, 0))
        world.run_until(world.idle, "C5.2: a receipt of what was unproven lets both retire")
        world.finish()

    @pytest.mark.clause("C6.1")
    @pytest.mark.mode("in-process")
    def test_after_a_failed_chunk_nothing_more_is_submitted(self, world: Deployment) -> None:
        """The first chunk fails while others are computed; C has not heard of it yet.

        Troubleshooting:
        - further chunks are submitted: P waits for C's Cancel before it stops.
        """
        answer = world.submit("a", REQUEST)
        boundaries.computing(world)
        p = world.seats["prefill-0"]
        world.hold_mail("from", "prefill-0")
        p.gate.fail_next(broken_wire(), source_quiet=True, target_quiet=True)
        p.device.complete(1)
        world.run_until(lambda: world.waits(messages.Failed), "C6.3: a failed chunk is reported")
        before = len(p.gate.submitted)  # with the one that failed, before anybody knew
        p.device_runs = True
        world.settle()
        require(
            len(p.gate.submitted) == before and world.p in (SourcePhase.DRAINING, None), "C6.1",
            "chunks were submitted after one of them had failed", expected="new work stops at once",
            seen=f"{len(p.gate.submitted) - before} more chunks, P {world.p}",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C6.1: both sides drain")
        require(answer.ending.ending is fx.Ending.FAILED, "C6.3", "the request did not fail", seen=answer)
        world.finish()

    @pytest.mark.clause("C6.2")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
    def test_a_stopping_stage_takes_nothing_new(self, world: Deployment, name: str) -> None:
        """Stop comes while a transfer drains, and then a Prefill or a Reserve with a new number."""
        answer = world.submit("a", REQUEST)
        seat, fresh = world.seats[name], new_transfer_id()
        word: messages.Message
        if name == "prefill-0":
            boundaries.committed(world)
            prefill = world.letters(messages.Prefill)[0]
            reservation = msgspec.structs.replace(prefill.reservation, transfer=fresh)
            number = prefill.ordinal + 1
            word = msgspec.structs.replace(prefill, transfer=fresh, ordinal=number, reservation=reservation)
        else:
            boundaries.decoding(world)
            seat.device_runs = seat.engine_frozen = False
            reserve = world.letters(messages.Reserve)[0]
            word = msgspec.structs.replace(reserve, transfer=fresh, ordinal=reserve.ordinal + 1)
        world.resend(name, messages.Stop())
        world.resend(name, word)
        for _ in range(3):
            world.turn()
        require(
            fresh not in seat.phases and answer.transfer in seat.phases, "C6.2",
            "a stage that was told to stop began something new", expected="what it had, draining, and nothing new",
            seen=seat.phases,
        )  # fmt: skip
        world.let_go()
        world.run_until(lambda: seat.over, "C6.2: it drains and ends")
        require(
            seat.stage.outcome is not None and not seat.stage.outcome.status, "C6.2", "it did not end as ordered",
            seen=seat.stage.outcome,
        )  # fmt: skip
        world.abandon()

    @pytest.mark.clause("T9", "C6.1")
    @pytest.mark.mode("in-process")
    def test_a_cancel_reaches_the_transport(self, world: Deployment) -> None:
        """A request is cancelled with chunks in the transport's own queue: the transport is told, once."""
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        p = world.seats["prefill-0"]
        world.abort("a")
        world.settle()
        require(
            p.gate.called("cancel") == [answer.transfer], "T9",
            "the transport was not told that a transfer is cancelled", expected="cancel(transfer), once",
            seen=p.gate.called("cancel"),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C6.1: both sides drain")
        world.finish()

    @pytest.mark.clause("T6")
    @pytest.mark.mode("in-process")
    def test_a_stuck_destination_holds_up_no_other(self, open_deployment: OpenDeployment) -> None:
        """One P, two D.  The chunks to one D do not complete and fill its share; the other D's request goes on.

        Troubleshooting:
        - both stand still: chunks of all destinations wait in one line.
        """
        world = open_deployment(stepped=True, decode=2, settings={"transfer.unreceipted_chunks": 2})
        p = world.seats["prefill-0"]
        stuck = world.submit("stuck", REQUEST)
        p.gate.hold("completions")
        p.gate.of = lambda transfer: transfer == stuck.transfer
        world.run_until(lambda: p.figures()["full_total"] > 0, "T6: the first destination has its share")
        other = world.submit("other", OTHER)
        world.run_until(lambda: other.ended, "T6: a request to another destination goes on")
        require(not stuck.ended, "T6", "a request ended whose chunks have not", seen=stuck)
        world.let_go()
        world.run_until(world.idle, "T6: then the first goes on as well")
        for key in world.answers:
            world.check_answer(key)
        world.finish()

    @pytest.mark.clause("T6")
    @pytest.mark.mode("in-process")
    def test_back_pressure_reaches_the_engine_and_is_eased(self, open_deployment: OpenDeployment) -> None:
        """The transport takes nothing for a while: P's engine stops computing ahead, and goes on later.

        Troubleshooting:
        - it computes to the end: ``can_schedule`` does not look at what waits to be sent;
        - it never goes on: nobody asks the engine again when there is room.
        """
        limit = 4096
        world = open_deployment(stepped=True, settings={"transfer.inflight_bytes": limit})
        p = world.seats["prefill-0"]
        p.gate.hold("submissions")
        world.submit("a", request(0, 150))
        world.run_until(lambda: world.p is SourcePhase.PREFILLING, "C2.1: P is told")
        world.settle()
        computed = max((progress.chunks for progress in world.letters(messages.Progress)), default=0)
        p.gate.let_go()
        world.run_until(world.idle, "T6: with room again the request ends")
        count = world.letters(messages.Commit)[0].count
        require(
            0 < computed < count // 2, "T6", "the engine computed on although nothing could be sent",
            expected=f"less than half of {count} chunks", seen=f"{computed} chunks with {limit} bytes allowed",
        )  # fmt: skip
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("T6", "T12")
    @pytest.mark.mode("in-process")
    def test_a_cancelled_backlog_is_forgotten(self, open_deployment: OpenDeployment) -> None:
        """Requests are cancelled with much waiting to be sent; the engine is not held up by what nobody waits for."""
        world = open_deployment(stepped=True, settings={"transfer.inflight_bytes": 4096})
        p = world.seats["prefill-0"]
        for number in range(3):
            p.gate.hold("submissions")
            world.submit("a", request(1000 * number, 150))
            world.run_until(lambda: world.p is SourcePhase.PREFILLING, "C2.1: P is told")
            world.settle()
            world.abort("a")
            p.gate.let_go()
            world.run_until(world.idle, "C6.1: both sides drain")
        world.submit("b", request(9000, 40))
        world.run_until(world.idle, "T6: what is computed next is sent, whatever was cancelled before")
        world.check_answer("b")
        world.finish()

    # -- at D ----------------------------------------------------------------------------------------------------------

    @pytest.mark.clause("C7.4", "C4.2", "C5.2")
    @pytest.mark.mode("in-process")
    def test_what_completes_after_a_cancel_is_not_imported(self, world: Deployment) -> None:
        """D is cancelled with one receipt missing; then it comes.

        Troubleshooting:
        - D goes on: commit and receipts are counted in HELD as well.
        """
        answer = world.submit("a", REQUEST)
        d = world.seats["decode-0"]
        world.seats["prefill-0"].gate.hold("completions")
        d.gate.hold("receipts")
        world.run_until(lambda: bool(world.letters(messages.Commit)), "C4: P commits")
        count = world.letters(messages.Commit)[0].count
        world.run_until(lambda: d.gate.waiting[1] >= count, "T3: every chunk is received")
        world.abort("a")
        world.run_until(lambda: world.d is DestinationPhase.HELD, "C5.2: D holds what P may still write")
        d.gate.let_go()
        world.settle()
        require(
            d.phases.get(answer.transfer) is DestinationPhase.HELD, "C7.4",
            "a cancelled transfer went on when its last receipt came", expected="HELD",
            seen=d.phases.get(answer.transfer),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C5.2: D is released when P has retired")
        world.finish()

    @pytest.mark.clause("C1.3", "C5.2")
    @pytest.mark.mode("in-process")
    def test_a_queued_import_looks_again(self, world: Deployment) -> None:
        """D has received, its engine has not come to it, and the request is cancelled.

        Troubleshooting:
        - a prefix is published: the order to import was carried out without asking whether it still stands.
        """
        answer = world.submit("a", REQUEST)
        boundaries.received(world)
        world.abort("a")
        d = world.seats["decode-0"]
        world.run_until(lambda: answer.transfer not in d.phases, "C5.2: after RECEIVED D frees by itself")
        world.let_go()
        world.run_until(world.idle, "C5.2: its credit comes back")
        published = d.engine.statistics()["blocks_prefix"]
        require(
            not published, "C1.3", "a transfer that had been cancelled was imported", expected="nothing published",
            seen=f"{published:g} blocks of its prompt", look="the second look right before the import",
        )  # fmt: skip
        world.finish()

    @pytest.mark.clause("C6.4", "C5.2")
    @pytest.mark.mode("in-process")
    def test_an_end_that_is_down_proves_nothing_without_a_fence(self, world: Deployment, subject: Subject) -> None:
        """D's end of a connection goes down and does not say quiet, with chunks under way: D holds.

        Troubleshooting:
        - D frees: that nothing comes any more was taken for proof that nothing can.
        """
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        d = world.seats["decode-0"]
        d.gate.inject(PeerEvent(world.seats["prefill-0"].peer, False, False, broken_wire()))
        world.run_until(lambda: answer.ended, "C6.4: a connection that is down ends its requests")
        world.settle()
        require(
            d.phases.get(answer.transfer) is DestinationPhase.HELD
            and world.coordinator.credits_out(answer.transfer) == (True, True), "C6.4",
            "memory was freed on a connection's end that proves nothing", expected="D HELD, both credits out",
            seen=world.describe(),
        )  # fmt: skip
        world.crash("prefill-0")
        after_a_death(world, subject)

    @pytest.mark.clause("C5.2")
    @pytest.mark.requires("revocable")
    @pytest.mark.mode("in-process")
    def test_a_revocation_that_is_not_promised_frees_nothing(self, open_deployment: OpenDeployment) -> None:
        """A request is cancelled while a chunk is being written: the transport cannot promise yet, and D waits.

        A transport that writes in ``poll()`` can always promise; then D is free at once.
        """
        world = open_deployment(stepped=True)
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        world.abort("a")
        world.settle()
        d = world.seats["decode-0"]
        if world.stepped:
            require(
                d.phases.get(answer.transfer) is DestinationPhase.HELD, "C5.2",
                "D freed memory that is being written, on a revocation that was refused", expected="HELD",
                seen=d.phases.get(answer.transfer), look="what revoke() returned",
            )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C5.2: D is free in the end")
        world.finish()

    @pytest.mark.clause("C5.2", "C6.1", "C6.3")
    @pytest.mark.mode("in-process")
    def test_a_failure_at_d_holds_what_is_being_written(self, world: Deployment) -> None:
        """D's engine gives a reservation up while its writer is at work: reported, and held until the writer is done.

        Troubleshooting:
        - D frees: its own failure was taken for the end of the writer's.
        """
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        d = world.seats["decode-0"]
        d.stage.report(CommandFailed(answer.transfer, RuntimeError("the test's own engine broke")))
        world.settle()
        failed_because(answer, "the test's own engine broke")
        require(
            d.phases.get(answer.transfer) is DestinationPhase.HELD, "C5.2",
            "D gave memory back on its own failure, while its writer is at work", expected="HELD",
            seen=d.phases.get(answer.transfer),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C6.1: both sides drain")
        world.finish()
