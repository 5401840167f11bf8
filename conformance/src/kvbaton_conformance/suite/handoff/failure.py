"""C6: what ends early, and what is kept until it is proven quiet."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from kvbaton import messages
from kvbaton.engine import StepOutput
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Deadlines, Recovery
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Answer, Deployment
from kvbaton_conformance.gate import broken_wire
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.boundaries import Boundary
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic, OpenDeployment


def name_of(boundary: Boundary) -> str:
    return boundary.name


class Failure(DeploymentTopic):
    """C6: a failure ends what it must, says why, and gives nothing back on a guess."""

    # -- cancel ------------------------------------------------------------------------------------------------------

    @pytest.mark.clause("C6.1", "C5.1", "C5.2", "C2.5")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("boundary", boundaries.BOUNDARIES, ids=name_of)
    def test_cancel_at_every_boundary(self, world: Deployment, boundary: Boundary) -> None:
        """It is over for its caller at once; then both sides drain, and the same id is served again."""
        answer = world.submit("a", REQUEST)
        boundary.go(world)
        world.abort("a")
        require(
            answer.ended and answer.ending.ending is fx.Ending.CANCELLED, "C6.1",
            "a cancelled request is not over for its caller", expected="cancelled, at once", seen=answer,
        )  # fmt: skip
        world.settle()
        world.let_go()
        again = world.submit("a", REQUEST)
        world.run_until(world.idle, f"C6.1: after a cancel when {boundary.name}, both sides drain")
        require(
            len(answer.endings) == 1 and not again.requeued, "C6.1", "a cancel has two outcomes", seen=answer.endings
        )
        require(not world.violations, "C7.4", "a cancel makes somebody break the protocol", seen=world.violations)
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C6.1", "C1.1", "C7.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("word", ["Reserved", "Commit", "Received", "Finished"])
    def test_a_cancel_crosses_a_word_on_its_way(self, world: Deployment, word: str) -> None:
        """The coordinator ends a request while the next word about it is under way: that word changes nothing more."""
        answer = world.submit("a", REQUEST)
        sender = "prefill-0" if word == "Commit" else "decode-0"
        if word == "Received":
            world.run_until(lambda: world.p is not None, "C2.1: P is told")
        if word == "Finished":
            world.run_until(lambda: bool(answer.tokens), "C4: D decodes")
        world.hold_mail("from", sender)
        world.run_until(lambda: world.waits(getattr(messages, word)), f"C4: {word} is said")
        world.abort("a")
        told = world.letters(messages.Prefill)
        world.let_go()
        world.run_until(world.idle, f"C6.1: a request that is cancelled before {word} was heard drains")
        require(
            len(answer.endings) == 1 and answer.ending.ending is fx.Ending.CANCELLED, "C6.1",
            "a request that was cancelled ended in another way as well", expected="cancelled, once",
            seen=answer.endings,
        )  # fmt: skip
        if word == "Reserved":
            require(
                world.letters(messages.Prefill) == told, "C6.1", "P was asked to compute a cancelled request",
                look="a late Reserved that is acted on",
            )  # fmt: skip
        if word == "Commit":
            require(
                not world.letters(messages.Received), "C6.1", "a cancelled request was received",
                look="a late Commit that is passed on, or D's HELD that goes on counting",
            )  # fmt: skip
        world.submit("b", OTHER)
        world.run_until(world.idle, "C6.1: the next request ends")
        world.check_answer("b")
        world.finish()

    # -- faults of one request -----------------------------------------------------------------------------------------

    @pytest.mark.clause("C6.3", "C2.5")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("where", ["compute", "import", "decode"])
    def test_one_requests_fault_ends_that_request_only(self, world: Deployment, where: str) -> None:
        """The engine cannot compute, import or decode one of two requests."""
        world.submit("good", OTHER)
        bad = world.submit("bad", REQUEST)
        engine = world.seats["prefill-0" if where == "compute" else "decode-0"].engine
        getattr(engine, f"fail_{where}").add(bad.transfer)
        world.run_until(world.idle, "C6.3: both requests end")
        world.check_answer("good")
        failed_because(bad, f"scripted: {where} fails")
        world.finish()

    @pytest.mark.clause("C6.1", "C6.3", "T5")
    @pytest.mark.mode("in-process")
    def test_a_chunk_that_fails_ends_its_request(self, world: Deployment) -> None:
        """The transport fails one chunk and proves both sides quiet: everything comes back, the next request is served.

        Troubleshooting:
        - the request never ends: D waits for the receipt of a chunk that will not come.
        """
        p = world.seats["prefill-0"]
        p.gate.fail_next(broken_wire(), source_quiet=True, target_quiet=True)
        bad = world.submit("bad", REQUEST)
        world.run_until(lambda: bad.ended, "C6.3: a failed chunk ends its request")
        failed_because(bad, "the test's own wire broke")
        world.submit("good", OTHER)
        world.run_until(world.idle, "C6.1: both sides drain and the next request ends")
        world.check_answer("good")
        world.finish()

    @pytest.mark.clause("C6.1", "C6.3", "C6.4", "T8")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("how", ["fails", "raises"])
    def test_a_failure_that_proves_nothing_frees_nothing(self, world: Deployment, subject: Subject, how: str) -> None:
        """A chunk fails without proof of quiet, or submit raises: both sides keep the memory until P is dead.

        Troubleshooting:
        - memory comes back at once: an error is taken for the end of the operation.
        """
        p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))
        p.gate.fail_next(broken_wire(), source_quiet=False, target_quiet=False, raises=how == "raises")
        bad = world.submit("bad", REQUEST)
        world.run_until(lambda: bad.ended, "C6.3: a failed chunk ends its request")
        failed_because(bad, "the test's own wire broke")
        world.settle()
        require(
            (world.p, world.d) == (SourcePhase.DRAINING, DestinationPhase.HELD)
            and p.figures()["quarantined_bytes"] > 0 and min(s.figures()["blocks_used"] for s in (p, d)) > 0, "C6.1",
            "memory was given back although nobody has proven it quiet", expected="P DRAINING, D HELD, quarantined",
            seen=world.describe(),
        )  # fmt: skip
        world.crash("prefill-0")
        after_a_death(world, subject)

    @pytest.mark.clause("T8", "C6.1", "C6.7")
    @pytest.mark.mode("in-process")
    def test_a_chunk_past_its_deadline_keeps_its_memory(self, world: Deployment) -> None:
        """Timed out is not terminal: quarantined, until it ends after all."""
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        world.advance(31)
        world.settle()
        failed_because(answer, "passed its deadline")
        p = world.seats["prefill-0"]
        require(
            (world.p, world.d) == (SourcePhase.DRAINING, DestinationPhase.HELD)
            and p.figures()["quarantined_bytes"] > 0, "T8",
            "a chunk that passed its deadline counts as over", expected="P DRAINING, D HELD, bytes in quarantine",
            seen=world.describe(),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "T8: when it ends after all, both sides drain")
        world.finish()

    @pytest.mark.clause("T8", "C6.1")
    @pytest.mark.mode("in-process")
    def test_the_quarantine_is_bounded(self, open_deployment: OpenDeployment, subject: Subject) -> None:
        """More than the limit is in quarantine: the stage must not go on, and says so."""
        world = open_deployment(stepped=True, settings={"limits.quarantine_bytes": 1})
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        world.advance(31)
        world.run_until(lambda: bool(world.kills), "T8: a stage whose quarantine is full is lost")
        require(
            world.kills[0].name == "prefill-0" and answer.ended, "T8", "the wrong stage was given up", seen=world.kills
        )
        after_a_death(world, subject)

    # -- deadlines ---------------------------------------------------------------------------------------------------

    @pytest.mark.clause("C6.7", "C6.1")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize(
        ("name", "boundary"),
        [
            ("reserve", boundaries.reserving), ("prefill_start", boundaries.reserved),
            ("prefill_idle", boundaries.computing), ("receipts", boundaries.committed),
        ],
    )  # fmt: skip
    def test_a_passed_deadline_ends_the_request_and_keeps_the_memory(
        self, open_deployment: OpenDeployment, name: str, boundary: Callable[[Deployment], None]
    ) -> None:
        """Each phase lasts too long in turn: it fails by the deadline's name, and what a writer may touch is held."""
        seconds = {"reserve": 11.0, "prefill_start": 12.0, "prefill_idle": 13.0, "receipts": 14.0}
        deadlines = Deadlines(**seconds, control=0.25)
        world = open_deployment(stepped=True, narrow={"revocable": False}, deadlines=deadlines)
        answer = world.submit("a", REQUEST)
        boundary(world)
        world.advance(seconds[name] - 0.5)
        world.settle()
        require(not answer.ended, "C6.7", f"deadline.{name} came early", seen=answer)
        world.advance(1)
        world.settle()
        failed_because(answer, f"deadline.{name}")
        if name != "reserve":
            require(
                world.d is DestinationPhase.HELD, "C6.1", f"a passed deadline.{name} gave memory back on a guess",
                expected="D holds until no writer is left", seen=world.d,
            )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C6.7: both sides drain")
        world.submit("b", OTHER)
        world.run_until(world.idle, "C6.7: the next request ends")
        world.check_answer("b")
        world.finish()

    @pytest.mark.clause("C6.7", "C6.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("hung", ["prefill-0", "decode-0"])
    def test_a_stage_that_does_not_drain_is_lost(
        self, open_deployment: OpenDeployment, subject: Subject, hung: str
    ) -> None:
        """One hangs with a cancelled transfer, and P retires it in neither case.  After deadline.drain the one that
        hangs is killed, and not the one that waits for it."""
        deadlines = Deadlines(drain=20.0, control=5.0)
        world = open_deployment(stepped=True, narrow={"revocable": False}, deadlines=deadlines)
        world.submit("a", REQUEST)
        boundaries.committed(world)
        world.seats[hung].frozen = True
        world.abort("a")
        world.advance(19)
        world.settle()
        held = hung == "decode-0" or world.d is DestinationPhase.HELD
        require(not world.kills and held, "C6.7", "deadline.drain came early", seen=world.kills)
        for seconds in (2, 5):
            world.advance(seconds)
            world.settle()
        require(
            [peer.name for peer in world.kills] == [hung], "C6.7", "the wrong stage was given up", expected=hung,
            seen=world.kills,
        )  # fmt: skip
        after_a_death(world, subject, hung)

    # -- deaths ------------------------------------------------------------------------------------------------------

    @pytest.mark.clause("C6.4", "C6.3", "C2.5")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("boundary", boundaries.BOUNDARIES, ids=name_of)
    def test_a_dead_prefill_stage_costs_its_transfers_only(
        self, world: Deployment, subject: Subject, boundary: Boundary
    ) -> None:
        """P's process is killed and joined at every boundary: D's memory comes back, and a new P serves the next."""
        answer = world.submit("a", REQUEST)
        boundary.go(world)
        world.crash("prefill-0")
        if boundary.name in ("received", "decoding"):
            require(not answer.ended, "C5.2", "D has received everything, and P's death ended the request", seen=answer)
        else:
            failed_because(answer, "killed by the test")
        after_a_death(world, subject)

    @pytest.mark.clause("C6.4", "C6.3", "C2.5")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("boundary", boundaries.BOUNDARIES, ids=name_of)
    def test_a_dead_decode_stage_costs_its_transfers_only(
        self, world: Deployment, subject: Subject, boundary: Boundary
    ) -> None:
        """D's process is killed and joined at every boundary: P's handles end, its memory and credit come back."""
        answer = world.submit("a", REQUEST)
        boundary.go(world)
        world.crash("decode-0")
        failed_because(answer, "killed by the test")
        after_a_death(world, subject, "decode-0")

    @pytest.mark.clause("C6.4", "C5.2", "C2.5")
    @pytest.mark.mode("in-process")
    def test_lost_is_not_fenced(self, world: Deployment, subject: Subject) -> None:
        """P's channel is gone, and nobody has joined its process: it may be alive, and write."""
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        world.launcher_runs = False
        world.lose("prefill-0")
        world.settle()
        failed_because(answer, "lost by the test")
        require(
            world.d is DestinationPhase.HELD and not world.letters(messages.Release)
            and world.coordinator.credits_out(answer.transfer) == (True, True), "C6.4",
            "a lost writer was taken for a dead one", expected="D HELD, both credits out, no Release",
            seen=f"D {world.d}, credits out {world.coordinator.credits_out(answer.transfer)}",
        )  # fmt: skip
        require(
            [peer.name for peer in world.kills] == ["prefill-0"], "C6.4", "nobody is told to end the lost process",
            seen=world.kills,
        )  # fmt: skip
        world.launcher_runs = True
        after_a_death(world, subject)

    @pytest.mark.clause("C6.4")
    @pytest.mark.mode("in-process")
    def test_the_connection_is_closed_before_memory_is_released(self, world: Deployment, subject: Subject) -> None:
        """P is dead and joined; what it had sent may still be in D's own end, which is drained and closed first.

        Troubleshooting:
        - "written after it was free": bytes of a dead writer were applied after its transfer had been released.
        """
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        d = world.seats["decode-0"]
        world.crash("prefill-0")
        dead = world.seats["prefill-0"].peer
        world.run_until(lambda: bool(world.letters(messages.Release)), "C6.4: D is released")
        order = [
            type(mail.message).__name__
            for mail in world.mail
            if mail.way == "to" and isinstance(mail.message, (messages.Disconnect, messages.Release))
        ]
        require(
            order == ["Disconnect", "Release"], "C6.4", "memory was released before the connection was to be closed",
            expected="Disconnect, then Release, on one channel", seen=order,
        )  # fmt: skip
        world.settle()
        require(
            dead in d.gate.called("fenced") and dead in d.gate.called("disconnect"), "C6.4",
            "D's connector was not told that the peer is dead", seen=list(d.gate.calls)[-5:],
        )  # fmt: skip
        if world.stepped:
            require(
                answer.transfer in d.phases, "C6.4", "D freed memory while bytes of the dead writer were landing",
                expected="HELD until its end of the connection is quiet", seen=d.phases,
            )  # fmt: skip
        after_a_death(world, subject)

    @pytest.mark.clause("C6.4")
    @pytest.mark.requires("disconnect_fences")
    @pytest.mark.mode("in-process")
    def test_a_severed_writer_frees_d_and_not_p(self, world: Deployment, subject: Subject) -> None:
        """D's transport closes the connection by itself, which fences one way: D's memory comes back, P's credit does
        not before P has retired."""
        answer = world.submit("a", REQUEST)
        boundaries.computing(world)
        d = world.seats["decode-0"]
        world.seats["prefill-0"].frozen = True
        d.guard.disconnect(world.seats["prefill-0"].peer)
        world.run_until(lambda: world.d is None, "C6.4: after the transport's fence D frees")
        world.settle()
        failed_because(answer, "is down")
        require(
            world.coordinator.credits_out(answer.transfer) == (True, False), "C6.4",
            "a fence in one direction gave P's memory back as well", expected="P's credit is out, D's is back",
            seen=world.coordinator.credits_out(answer.transfer),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C5.1: P retires by itself")
        world.finish()

    @pytest.mark.clause("C6.2", "C6.3", "C6.4")
    @pytest.mark.mode("in-process")
    def test_a_connection_that_broke_is_mended_or_given_up_aloud(self, open_deployment: OpenDeployment) -> None:
        """Both ends live: one is started again for it, so often and no oftener, and then it is said."""
        world = open_deployment(
            stepped=True, narrow={"revocable": False}, recovery=Recovery(restarts=1), prefill=2, decode=2
        )
        p, d = world.seats["prefill-0"].peer, world.seats["decode-0"].peer
        for restarted in (1, 0):
            before = {name: seat.peer for name, seat in world.seats.items()}
            world.seats[d.name].guard.disconnect(before[p.name])
            world.run_until(lambda: len(world.letters(messages.PeerDown)) > 0, "C6.4: the stages tell that it is down")
            world.settle()
            world.advance(Deadlines().control + 1)
            world.settle()
            new = [name for name, seat in world.seats.items() if seat.peer != before[name]]
            require(
                len(new) == restarted, "C6.2", "a connection was not mended as often as it may be",
                expected=f"{restarted} of them started again", seen=new,
            )  # fmt: skip
            if restarted:
                world.run_until(world.connected, "C6.2: all are connected again")
        told = [fault.cause for fault in world.faults if "has not helped" in fault.cause]
        require(
            len(told) == 1, "C6.3", "a connection that nothing mends is left as it is in silence", seen=world.faults
        )
        answer = world.submit("a", REQUEST)
        world.run_until(lambda: answer.ended, "C6.4: the others serve")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C6.4", "C6.7")
    @pytest.mark.mode("in-process")
    def test_what_nobody_serves_any_more_fails_at_once(self, world: Deployment) -> None:
        """Requests wait when the only D dies: they fail and say why, and none waits for ever."""
        world.seats["decode-0"].engine_frozen = True
        answers = [world.submit(str(index), REQUEST) for index in range(12)]
        world.settle()
        require(any(not answer.transfers for answer in answers), "C2.4", "no request waits", seen=answers)
        world.crash("decode-0")
        world.settle()
        for answer in answers:
            require(answer.ended, "C6.4", "a request waits for a stage that nobody will start", seen=answer)
        late = world.submit("late", REQUEST)
        require(
            late.ended and "decode" in late.ending.cause, "C6.3", "a request that nobody can serve is not refused",
            seen=late,
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C6.4: P retires")
        world.finish()

    @pytest.mark.clause("C6.3", "C6.4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("name", ["prefill-0", "decode-0"])
    def test_an_engine_that_raises_in_a_step_ends_its_stage(
        self, world: Deployment, subject: Subject, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        """It has promised not to: nothing can be known of its memory, so the stage is lost, with the first cause."""

        def step() -> Sequence[StepOutput]:
            raise RuntimeError("the device fell off")

        monkeypatch.setattr(world.seats[name].engine, "step", step)
        answer = world.submit("a", REQUEST)
        world.run_until(lambda: answer.ended, "C6.3: the request ends")
        failed_because(answer, "the device fell off")
        world.run_until(lambda: bool(world.kills), "C6.3: the stage is given up")
        require(world.kills[0].name == name, "C6.3", "the wrong stage was given up", seen=world.kills)
        after_a_death(world, subject, name)

    # -- the end of everything -----------------------------------------------------------------------------------------

    @pytest.mark.clause("C6.2", "C5.2", "T10")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("boundary", boundaries.BOUNDARIES, ids=name_of)
    def test_everything_is_stopped_senders_first(self, world: Deployment, boundary: Boundary) -> None:
        """Fatal shutdown at every boundary: D is stopped only when every P has been joined; all end with status 0."""
        answer = world.submit("a", REQUEST)
        boundary.go(world)
        waiting = world.submit("b", OTHER)
        world.stop()
        require(answer.ended and waiting.ended, "C6.2", "a request outlives a fatal shutdown", seen=(answer, waiting))
        world.settle()
        p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))

        def stopped() -> list[str]:
            return [mail.peer.name for mail in world.mail if isinstance(mail.message, messages.Stop)]

        require(
            p.joined or d.peer.name not in stopped(), "C6.2", "receivers were stopped before their senders were joined",
            expected="P first, D once P was joined", seen=f"{stopped()}, P joined: {p.joined}",
        )  # fmt: skip
        world.let_go()
        world.run_until(lambda: p.over and d.over, "C6.2: both drain and end")
        require(
            stopped() == ["prefill-0", "decode-0"], "C6.2", "a stage was not told to stop, or twice", seen=stopped()
        )
        for seat in (p, d):
            outcome = seat.stage.outcome
            require(
                outcome is not None and outcome.status == 0 and not seat.engine.statistics()["blocks_used"], "C6.2",
                f"{seat.peer.name} did not end as ordered", expected="status 0, and nothing held",
                seen=f"{outcome}, {seat.engine.statistics()['blocks_used']:g} blocks",
            )  # fmt: skip
        world.check_memory()

    @pytest.mark.clause("C6.6")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("boundary", boundaries.EXPOSED, ids=name_of)
    def test_stages_without_a_coordinator_drain_and_end(self, world: Deployment, boundary: Boundary) -> None:
        """The coordinator is gone: P drains and ends, D ends when P is down and quiet."""
        world.submit("a", REQUEST)
        boundary.go(world)
        for seat in world.seats.values():
            seat.stage.channel.sever("the coordinator's process is gone")
        world.let_go()
        world.run_until(
            lambda: all(seat.stage.ended for seat in world.seats.values()), "C6.6: both stages drain and end"
        )
        for name, seat in world.seats.items():
            outcome = seat.stage.outcome
            require(
                outcome is not None and outcome.status == 0 and "coordinator is gone" in outcome.reason
                and not seat.engine.statistics()["blocks_used"], "C6.6",
                f"{name} did not end well without its coordinator", seen=outcome,
            )  # fmt: skip
        world.check_memory()

    @pytest.mark.clause("C6.6", "C6.7")
    @pytest.mark.mode("in-process")
    def test_a_stage_that_cannot_drain_says_what_it_held(self, world: Deployment) -> None:
        """The coordinator is gone and a chunk never ends: after deadline.shutdown P ends, and names the transfer."""
        answer = world.submit("a", REQUEST)
        boundaries.committed(world)
        for seat in world.seats.values():
            seat.stage.channel.sever("the coordinator's process is gone")
        world.settle()
        p = world.seats["prefill-0"]
        require(not p.stage.ended, "C6.6", "P ended with a chunk outstanding", seen=p.stage.outcome)
        world.seats["decode-0"].frozen = True
        world.advance(6)
        world.settle()
        outcome = p.stage.outcome
        require(
            outcome is not None and outcome.status == 1 and answer.transfer in outcome.reason, "C6.6",
            "a stage that could not drain does not say what it held", expected="status 1 and the transfer",
            seen=outcome,
        )  # fmt: skip


def failed_because(answer: Answer, cause: str) -> None:
    """C6.3: it has failed, once, and says its first cause."""
    require(
        len(answer.endings) == 1 and answer.ending.ending is fx.Ending.FAILED and cause in answer.ending.cause, "C6.3",
        "a failure is not reported with its first cause", expected=f'failed, once, because of "{cause}"',
        seen=answer.endings or answer,
    )  # fmt: skip


def after_a_death(world: Deployment, subject: Subject, name: str = "prefill-0") -> None:
    """A stage has died: what the others held of its transfers comes back, and a new one takes its place."""
    world.let_go()
    if subject.capabilities.quiet == "never" and name == "prefill-0":
        # nothing but the end of D's own process proves anything: what D held, it goes on holding
        world.run_until(lambda: all(answer.ended for answer in world.answers.values()), "C6.4: every request ends")
        world.settle()
        held = world.seats["decode-0"].stage.machine.transfers().values()
        require(
            all(phase is DestinationPhase.HELD for phase in held), "C6.4",
            'memory was freed although quiet="never" is declared', seen=world.describe(),
        )  # fmt: skip
        return
    world.run_until(world.idle, f"C6.4: with {name} dead and joined, all that was held of its transfers comes back")
    for other in world.seats.values():
        if not other.over:
            figures = other.figures()
            require(
                not figures["blocks_used"] and not figures["quarantined_bytes"], "C6.4",
                f"{other.peer.name} holds memory of a stage that is dead", seen=world.describe(),
            )  # fmt: skip
    world.restart(name)
    world.submit("after", REQUEST)
    world.run_until(world.idle, "C6.4: a new stage in its place serves the next request")
    world.check_answer("after")
    world.finish()
