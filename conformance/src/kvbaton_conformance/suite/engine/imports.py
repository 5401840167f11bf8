"""C8.3 and C4 at D: what an import makes of a reservation."""

from __future__ import annotations

import pytest

from kvbaton.engine import FinishReason
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.engine.bench import Ask, BenchTopic, Hand


class Imports(BenchTopic):
    """C8.3: from the import on, and not before, it is a request like any other."""

    @pytest.mark.clause("C3.3", "C8.3")
    @pytest.mark.requires("prefix_caching")
    def test_a_prefix_is_offered_only_after_the_import(self, hand: Hand, ask: Ask) -> None:
        """The same prompt is reserved while the first is on its way, and after it was imported."""
        d, block = hand.d, hand.d.engine.capacity().block_tokens
        request = ask(4 * block + 1)
        first = d.hold(request)
        early = d.hold(request)
        require(early.valid == 0, "C8.3", "blocks that are still being written were offered as valid", seen=early.valid)
        for reservation in (first, early):
            d.engine.release_transfer(reservation.transfer)
        abandoned = d.hold(request)
        require(abandoned.valid == 0, "C8.3", "a prefix was published that was never imported", seen=abandoned.valid)
        d.engine.release_transfer(abandoned.transfer)
        hand.run(request)
        late = d.hold(request)
        require(late.valid == 4 * block, "C3.3", "an imported prefix is not found", expected=4 * block, seen=late.valid)
        d.engine.release_transfer(late.transfer)
        d.check_balance()

    @pytest.mark.clause("C4", "C5.2")
    def test_the_final_slot_is_free_after_the_import(self, hand: Hand, ask: Ask) -> None:
        """The payload is copied out: the slot is back at once, and what is written there next changes nothing."""
        d, request = hand.d, ask(9, max_tokens=6)
        expected = Hand(hand.p, d).run(request)
        reservation = d.hold(request)
        transfer = reservation.transfer
        hand.p.reserve(request, prefix=reservation.valid, transfer=transfer)
        for computed in hand.p.prefill(transfer):
            hand.carry(computed)
        hand.p.engine.release_transfer(transfer)
        d.engine.accept_import(transfer, len(request.prompt))
        free = d.engine.statistics()["final_slots_free"]
        require(
            free == d.before["final_slots_free"], "C4", "the final slot is still held after the import",
            expected=d.before["final_slots_free"], seen=free,
        )  # fmt: skip
        if d.engine.geometry.final_bytes:
            d.write(d.final(reservation.final_slot), 0x55)
        d.finish()
        require(
            d.answers[transfer].shown == expected.shown, "C5.2",
            "what was written to the slot after the import changed the answer", expected=expected.shown,
            seen=d.answers[transfer].shown,
        )  # fmt: skip

    @pytest.mark.clause("C2.3", "C4", "A2")
    def test_it_is_activated_once_and_ends_once(self, hand: Hand, ask: Ask) -> None:
        """Activated before its first token, then exactly as many tokens as were asked for, with the reason last."""
        d = hand.d
        for text, length in enumerate((1, 2, 7)):
            transfer = hand.hand_over(ask(10, text=text, max_tokens=length))
            require(d.engine.has_work(), "C8.3", "an imported request is no work")
            require(transfer not in d.active, "C4", "the import was taken for a compute slot")
            d.finish()
            answer = d.answers[transfer]
            require(
                d.active.count(transfer) == 1 and len(answer.token_ids) == length
                and len(answer.exit_depths) in (0, length) and answer.finish_reason is FinishReason.LENGTH, "C4",
                "it was not activated once and ended once, with all its tokens", expected=f"{length} tokens, LENGTH",
                seen=f"activated {d.active.count(transfer)} times, {answer}",
            )  # fmt: skip
            d.quiet(transfer)
            d.engine.release_transfer(transfer)
        d.check_balance()

    @pytest.mark.clause("C1.2", "C1.3")
    def test_an_import_of_nobody_is_nothing(self, hand: Hand, ask: Ask) -> None:
        """Unknown, released and suspended transfers."""
        d, before = hand.d, dict(hand.d.engine.statistics())
        d.engine.accept_import("0" * 32, 9)
        gone = d.hold(ask(9)).transfer
        d.engine.release_transfer(gone)
        d.engine.accept_import(gone, 9)
        require(
            dict(d.engine.statistics()) == before and not d.engine.has_work(), "C1.2",
            "an import of an unknown transfer has an effect", expected=before, seen=d.engine.statistics(),
        )  # fmt: skip
        stopped = d.hold(ask(9)).transfer
        d.quiet(stopped)
        d.engine.accept_import(stopped, 9)
        for _ in range(3):
            d.step()
        require(
            stopped not in d.answers and stopped not in d.active, "C1.3", "a suspended transfer was computed",
            seen=d.answers.get(stopped),
        )  # fmt: skip
        d.engine.release_transfer(stopped)
        d.check_balance()
