"""A1: two engines with a hand-off by plain copies between them answer as one without."""

from __future__ import annotations

from typing import Any

import pytest

from kvbaton.engine import Request, Role
from kvbaton.identity import new_transfer_id
from kvbaton.reservation import Reservation
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.engine.bench import Answer, Ask, Bench, BenchTopic, Hand, OpenBench

_SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 7},
}


def colocated(bench: Bench, request: Request) -> Answer:
    transfer = new_transfer_id()
    bench.engine.add(transfer, request)
    bench.finish()
    return bench.answers[transfer]


class EngineAgreement(BenchTopic):
    """A1, A2: token ids, exit depths and finish reasons are those of a colocated run."""

    @pytest.mark.clause("A1", "A2", "C3.1", "C3.4")
    @pytest.mark.parametrize("sampling", _SAMPLING)
    @pytest.mark.parametrize("blocks", [(0, 1), (2, -1), (2, 0), (5, 1)], ids=lambda b: f"{b[0]}b{b[1]:+}")
    def test_a_handed_over_request_answers_as_a_colocated_one(
        self, open_bench: OpenBench, hand: Hand, ask: Ask, blocks: tuple[int, int], sampling: str
    ) -> None:
        """Prompts around block edges; sixteen tokens, of which the first depends on the final payload alone.

        Troubleshooting:
        - the first token differs: the final payload; later ones: the KV, or the random state of sampling.
        """
        block = hand.d.engine.capacity().block_tokens
        request = ask(max(1, blocks[0] * block + blocks[1]), max_tokens=16, **_SAMPLING[sampling])
        expected = colocated(open_bench(Role.COLOCATED), request)
        ours = hand.run(request)
        require(
            ours.shown == expected.shown, "A1", "a handed-over request answers other than a colocated one",
            expected=expected.shown, seen=ours.shown,
        )  # fmt: skip
        hand.p.check_balance()
        hand.d.check_balance()

    @pytest.mark.clause("A1", "C3.3", "C3.4")
    @pytest.mark.requires("prefix_caching")
    def test_prefixes_on_either_side_change_nothing(self, open_bench: OpenBench, ask: Ask) -> None:
        """P, D, both or neither have seen the prompt before: D is sent what it lacks, and answers alike."""
        block = open_bench(Role.DECODE).engine.capacity().block_tokens
        request, first = ask(4 * block, max_tokens=16), ask(4 * block, max_tokens=1)
        cold = colocated(open_bench(Role.COLOCATED), request)
        warm_bench = open_bench(Role.COLOCATED)
        colocated(warm_bench, first)
        warm = colocated(warm_bench, request)
        for p_knows in (False, True):
            for d_knows in (False, True):
                hand = Hand(open_bench(Role.PREFILL), open_bench(Role.DECODE))
                if p_knows:
                    transfer = hand.p.reserve(first)
                    hand.p.prefill(transfer)
                    hand.p.engine.release_transfer(transfer)
                if d_knows:
                    Hand(open_bench(Role.PREFILL), hand.d).run(first)
                ours = hand.run(request)
                valid = list(hand.d.reservations.values())[-1].valid
                require((valid > 0) == d_knows, "C3.3", "D's valid prefix is not what it knows", seen=f"{valid} tokens")
                expected = warm if p_knows else cold
                require(
                    ours.shown == expected.shown, "A1", f"P knows the prompt: {p_knows}, D: {d_knows}: other answer",
                    expected=expected.shown, seen=ours.shown,
                )  # fmt: skip
                hand.p.check_balance()
                hand.d.check_balance()

    @pytest.mark.clause("A1")
    def test_damage_is_noticed(self, open_bench: OpenBench, hand: Hand, ask: Ask) -> None:
        """The negative control: one token's bytes are destroyed before the import, at one place or another.

        Where this fails equal tokens prove nothing: choose a model whose weights are large enough.
        """
        block = hand.d.engine.capacity().block_tokens
        length = 3 * block + 1
        request = ask(length, max_tokens=16)
        expected = hand.run(request).shown
        for place in (length // 2, length - 1, 0, length // 3):
            fresh = Hand(open_bench(Role.PREFILL), open_bench(Role.DECODE))

            # values that belong to a whole block are addressed with its first token only
            shared = any(c.per_block for plane in fresh.d.engine.geometry.planes for c in plane.components)
            start = place - place % block if shared else place

            def damage(reservation: Reservation, place: int = place, start: int = start, d: Bench = fresh.d) -> None:
                d.write(d.places(reservation.arrays(), start, place + 1), 0)

            if fresh.run(request, damage).shown != expected:
                return
        require(False, "A1", "no damage to the KV shows in sixteen tokens: equal tokens prove nothing here")
