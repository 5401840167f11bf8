"""C2: memory that is promised before anything is computed, and the books of what is promised."""

from __future__ import annotations

from itertools import combinations

import pytest

from kvbaton import messages
from kvbaton.engine import Request, Role, SamplingParams
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Limits
from kvbaton.handoff.table import DestinationPhase
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.scripted import ScriptedLayout
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_conformance.suite.handoff.topic import OTHER, REQUEST, DeploymentTopic, OpenDeployment, request


class Reservations(DeploymentTopic):
    """C2: D reserves first and keeps its word; credits are returned apart, once, and not before they are free."""

    @pytest.mark.clause("C2.1")
    @pytest.mark.mode("in-process")
    def test_p_is_told_only_after_d_has_reserved(self, world: Deployment) -> None:
        """D's engine takes its time to answer."""
        world.submit("a", REQUEST)
        boundaries.reserving(world)
        world.settle()
        p = world.seats["prefill-0"]
        require(
            not p.phases and not p.engine.statistics()["transfers"] and not world.letters(messages.Prefill), "C2.1",
            "P was asked to compute before D had reserved", expected="nothing at P", seen=world.describe(),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.1: once D answers, P is told")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C2.1", "C5.2")
    @pytest.mark.mode("in-process")
    def test_what_may_be_written_is_granted_before_anybody_is_told(self, world: Deployment) -> None:
        """When P is told, D's connector has the grant: exactly the bytes that P will write."""
        answer = world.submit("a", REQUEST)
        boundaries.reserved(world)
        grants = [call for call in world.seats["decode-0"].gate.called("grant") if call[0] == answer.transfer]
        require(
            len(grants) == 1 and grants[0][1] == world.seats["prefill-0"].peer, "C2.1",
            "D said Reserved and its connector has no grant for the writer", expected="one grant to P", seen=grants,
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.1: the request ends")
        written = sorted(row for chunk in world.seats["prefill-0"].gate.submitted for row in chunk.target.triples())
        granted = grants[0][2]
        require(
            sum(length for _, _, length in written) == granted.nbytes
            and all(
                any(region == g and start <= at and at + length <= start + size for g, start, size in granted.triples())
                for region, at, length in written
            ),
            "C5.2", "what P wrote is not what D had granted", expected=granted.triples(), seen=written,
        )  # fmt: skip
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C2.2", "C5.2")
    @pytest.mark.mode("in-process")
    def test_a_reservation_does_not_move(self, world: Deployment) -> None:
        """While it may be written, D decodes other requests whose caches grow; its blocks and slot stay as told.

        Troubleshooting:
        - two transfers share a block that is no common prefix: the pool gave away what was promised.
        """
        for index in range(3):
            world.submit(f"growing-{index}", request(1000 * index, 9, max_tokens=40))
        world.run_until(
            lambda: list(world.seats["decode-0"].phases.values()).count(DestinationPhase.ACTIVE) == 3,
            "C2.3: three requests are decoding",
        )
        world.hold()
        held = [world.submit(f"held-{index}", request(5000 + 1000 * index, 26)) for index in range(2)]
        world.run_until(lambda: len(world.letters(messages.Reserved)) == 5, "C2.1: D reserves for two more")
        engine = world.seats["decode-0"].engine
        for _ in range(15):
            world.turn()
            for answer in held:
                told = world.letters(messages.Reserved, answer.transfer)[0].reservation
                now = engine.tables(answer.transfer)
                require(
                    now == told.tables, "C2.2", "block tables changed while a writer may use them",
                    expected=told.tables, seen=now,
                )  # fmt: skip
            tables = {t: {b for table in engine.tables(t) for b in table} for t in world.seats["decode-0"].phases}
            for (one, mine), (other, theirs) in combinations(tables.items(), 2):
                require(
                    not mine & theirs, "C2.2", "two transfers hold the same block, and share no prefix",
                    expected="none in common", seen=f"{one} and {other}: {sorted(mine & theirs)}",
                )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.2: all end")
        for key in world.answers:
            world.check_answer(key)
        world.finish()

    @pytest.mark.clause("C2.3", "C4.1")
    @pytest.mark.mode("in-process")
    def test_a_reservation_takes_no_compute_slot(self, open_deployment: OpenDeployment) -> None:
        """D computes one request at a time; a second one is imported meanwhile and waits like any other."""
        world = open_deployment(
            stepped=True,
            layouts={
                Role.PREFILL: ScriptedLayout(blocks=96), Role.DECODE: ScriptedLayout(blocks=80, gap=5, compute_slots=1)
            },
        )  # fmt: skip
        first = world.submit("a", request(0, 10, max_tokens=60))
        second = world.submit("b", request(500, 10))
        world.run_until(
            lambda: world.seats["decode-0"].phases.get(second.transfer) is DestinationPhase.IMPORTED,
            "C2.3: the second request is imported while the first has the only compute slot",
        )
        world.run_until(
            lambda: second.transfer not in world.seats["prefill-0"].phases,
            "C4.1: P retires the second transfer although D has no compute slot for it",
        )
        require(
            not first.ended and not second.tokens, "C2.3", "the second request computed without a slot", seen=second
        )
        world.run_until(world.idle, "C2.3: both end")
        require(first.endings and second.endings, "C2.3", "a request was lost", seen=world.describe())
        world.check_answer("a")
        world.check_answer("b")
        world.finish()

    @pytest.mark.clause("C2.4")
    @pytest.mark.mode("in-process")
    def test_credits_budget_the_worst_case(self, open_deployment: OpenDeployment) -> None:
        """Two requests whose prompts fit together and whose growth does not: the second one waits.

        Troubleshooting:
        - the second is refused by D again and again: credits count prompts only;
        - credits equal the blocks in use: they are measured instead of promised.
        """
        world = open_deployment(
            stepped=True,
            layouts={Role.PREFILL: ScriptedLayout(blocks=96), Role.DECODE: ScriptedLayout(blocks=40, gap=5)},
        )
        first = world.submit("a", request(0, 8, max_tokens=60))
        second = world.submit("b", request(500, 8, max_tokens=60))
        boundaries.decoding(world)
        view, used = world.view("decode-0"), world.seats["decode-0"].engine.statistics()["blocks_used"]
        budget = first.request.max_length // 4 * 2
        require(
            view.blocks_out == budget and used < budget and not second.transfers, "C2.4",
            "credits are not what a request may grow to",
            expected=f"{budget} blocks promised, fewer in use, and the second request waits",
            seen=f"{view.blocks_out} promised, {used:g} in use, second request placed {len(second.transfers)} times",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.4: both end")
        require(not second.requeued, "C2.4", "D had to refuse what credits had promised", seen=second.requeued)
        world.check_answer("a")
        world.check_answer("b")
        world.finish()

    @pytest.mark.clause("C2.5")
    @pytest.mark.mode("in-process")
    def test_each_credit_comes_back_by_its_own_sides_word(self, world: Deployment) -> None:
        """While D decodes, P's credit is back and D's is not."""
        answer = world.submit("a", REQUEST)
        boundaries.decoding(world)
        world.settle()
        require(
            world.coordinator.credits_out(answer.transfer) == (False, True), "C2.5",
            "the two credits do not come back apart", expected="P's is back, D's is out while it decodes",
            seen=f"out (P, D): {world.coordinator.credits_out(answer.transfer)}",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.5: D's credit comes back, too")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C2.5", "C5.2")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("scarce", [Role.PREFILL, Role.DECODE], ids=["of-P", "of-D"])
    def test_no_credit_comes_back_at_cancel(self, open_deployment: OpenDeployment, scarce: Role) -> None:
        """One side can hold one transfer; it is cancelled with chunks under way, and the next one must wait for it."""
        layouts = {
            role: ScriptedLayout(blocks=80, gap=5, final_slots=1 if role is scarce else 8)
            for role in (Role.PREFILL, Role.DECODE)
        }
        world = open_deployment(stepped=True, narrow={"revocable": False}, layouts=layouts)
        world.submit("a", REQUEST)
        boundaries.committed(world)
        world.abort("a")
        second = world.submit("b", OTHER)
        world.settle()
        require(
            not second.transfers, "C2.5", f"the {scarce.value} stage's credit came back at Cancel",
            expected="the next request waits until the chunks have ended", seen=world.describe(),
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.5: the next request is placed once the first has drained")
        require(not second.requeued, "C2.5", "capacity was promised that was not there", seen=second.requeued)
        world.check_answer("b")
        world.finish()

    @pytest.mark.clause("C2.6", "C1.2")
    @pytest.mark.mode("in-process")
    def test_a_refusal_in_spite_of_credits_waits_again(self, world: Deployment) -> None:
        """D refuses twice and then takes it: each time a new generation, and never a lost credit."""
        refusals = iter(["not now", "not now"])
        world.seats["decode-0"].engine.refuse = lambda admission: next(refusals, None)
        answer = world.submit("a", REQUEST)
        world.run_until(lambda: answer.requeued == 1, "C2.6: a refused request waits again")
        world.advance(10)
        world.run_until(lambda: answer.requeued == 2, "C2.6: and once more")
        world.advance(10)
        world.run_until(world.idle, "C2.6: it is placed again")
        require(len(set(answer.transfers)) == 3, "C1.2", "a generation was used again", seen=answer.transfers)
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C2.6", "C2.5")
    @pytest.mark.mode("in-process")
    def test_a_refusal_for_good_ends_the_request_and_costs_nothing(self, world: Deployment) -> None:
        """D says that it never fits: both credits are back at once, and the next request is served."""
        engine = world.seats["decode-0"].engine
        engine.refuse, engine.refuse_for_ever = (lambda admission: "never"), True
        answer = world.submit("a", REQUEST)
        world.run_until(lambda: answer.ended, "C2.6: a request that never fits ends")
        require(
            answer.ending.ending is fx.Ending.FAILED and "never" in answer.ending.cause, "C6.3",
            "the end of a refused request does not say why", expected="failed, with D's reason", seen=answer.ending,
        )  # fmt: skip
        require(
            not any(view.blocks_out or view.slots_out for view in world.coordinator.peers()), "C2.5",
            "a refusal costs credits", expected="both are back", seen=world.coordinator.peers(),
        )  # fmt: skip
        engine.refuse = lambda admission: None
        world.submit("b", OTHER)
        world.run_until(world.idle, "C2.6: the next request ends")
        world.check_answer("b")
        world.finish()

    @pytest.mark.clause("C2.6")
    @pytest.mark.mode("in-process")
    def test_small_requests_pass_a_large_one_a_bounded_number_of_times(self, open_deployment: OpenDeployment) -> None:
        """A large request waits for memory; small ones that fit go first, twice, and then no more."""
        world = open_deployment(
            stepped=True, limits=Limits(passes=2),
            layouts={Role.PREFILL: ScriptedLayout(blocks=200), Role.DECODE: ScriptedLayout(blocks=60, gap=5)},
        )  # fmt: skip
        world.seats["decode-0"].engine_frozen = True
        blocker = world.submit("blocker", request(0, 60, max_tokens=20))
        large = world.submit("large", request(1000, 80, max_tokens=20))
        small = [world.submit(f"small-{index}", request(2000 + 100 * index, 5, max_tokens=3)) for index in range(5)]
        world.settle()
        passed = [answer for answer in small if answer.transfers]
        require(
            blocker.transfers and not large.transfers and len(passed) == 2, "C2.6",
            "the number of requests that may pass a waiting one is not kept",
            expected="2 of the small ones are placed before the large one", seen=f"{len(passed)}; large: {large}",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.6: all are served in the end")
        for key in world.answers:
            world.check_answer(key)
        world.finish()

    @pytest.mark.clause("C2.7")
    @pytest.mark.mode("in-process")
    def test_p_writes_only_once_d_is_locally_quiet(self, world: Deployment) -> None:
        """D's own device has work queued when it is asked to reserve."""
        seat = world.seats["decode-0"]
        seat.device_runs = False
        seat.device.event()
        world.submit("a", REQUEST)
        world.settle()
        require(
            world.d is DestinationPhase.RESERVING and world.p is None, "C2.7",
            "memory was promised to a writer while D's own device may still be using it",
            expected="D waits for its device", seen=f"D {world.d}, P {world.p}",
        )  # fmt: skip
        world.let_go()
        world.run_until(world.idle, "C2.7: once its device is quiet it reserves")
        world.check_answer("a")
        world.finish()

    @pytest.mark.clause("C2.4")
    @pytest.mark.mode("in-process")
    def test_memory_for_permitted_growth_is_there(self, open_deployment: OpenDeployment) -> None:
        """As many requests as credits allow, each grown to its limit: no block is missing."""
        world = open_deployment(
            stepped=True, prefix_caching=False,
            layouts={
                Role.PREFILL: ScriptedLayout(blocks=200, final_slots=16),
                Role.DECODE: ScriptedLayout(blocks=64, gap=5, final_slots=16, compute_slots=16),
            },
        )  # fmt: skip
        for index in range(6):
            world.submit(str(index), Request(tuple(range(index, index + 3)), SamplingParams(max_tokens=29)))
        world.run_until(world.idle, "C2.4: all grow to their limit")
        for key in world.answers:
            world.check_answer(key)
        world.finish()
