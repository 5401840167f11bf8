"""C8.4, C6.3, T12: what an engine's own figures say after everything."""

from __future__ import annotations

import random

import pytest

from kvbaton.identity import TransferId
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.engine.bench import Answer, Ask, BenchTopic, Hand


class Books(BenchTopic):
    """C8.4: however requests end, the pool is then exactly as full as the books say."""

    @pytest.mark.clause("C8.4", "C2.5", "T12")
    def test_any_order_of_everything_balances(self, hand: Hand, ask: Ask, draw: random.Random) -> None:
        """Forty requests with common beginnings: reserved, prefilled, imported, suspended, released in random order."""
        p, d = hand.p, hand.d
        block = d.engine.capacity().block_tokens
        live: list[TransferId] = []
        imported: set[TransferId] = set()
        for number in range(40):
            request = ask(draw.randrange(1, 5 * block), text=draw.randrange(3), max_tokens=draw.randrange(1, 6))
            transfer = d.reserve(request)
            if transfer in d.refusals:
                if live:
                    _drop(hand, live.pop(draw.randrange(len(live))), draw)
                continue
            live.append(transfer)
            fate = draw.random()
            if fate < 0.75:
                p.reserve(request, prefix=d.reservations[transfer].valid, transfer=transfer)
                if fate < 0.6:
                    for computed in p.prefill(transfer):
                        hand.carry(computed)
                    p.engine.release_transfer_compute(transfer)
                    p.engine.release_transfer(transfer)
                    d.engine.accept_import(transfer, len(request.prompt))
                    imported.add(transfer)
                elif p.engine.has_work():
                    p.step()
            for _ in range(draw.randrange(4)):
                if d.engine.has_work():
                    d.step()
            if (number % 3 == 0 or len(live) == 3) and live:
                _drop(hand, live.pop(draw.randrange(len(live))), draw)
        while live:
            _drop(hand, live.pop(draw.randrange(len(live))), draw)
        p.finish()
        d.finish()
        p.check_balance()
        d.check_balance()
        require(len(imported) > 10, "C8.4", "hardly anything was imported", seen=len(imported))

    @pytest.mark.clause("C8.4", "T12")
    def test_the_figures_add_up_at_every_moment(self, hand: Hand, ask: Ask) -> None:
        """Free, used, leased and cached blocks are all blocks, and slots never exceed what there is."""
        block = hand.d.engine.capacity().block_tokens
        total = {id(bench): bench.before["blocks_free"] + bench.before["blocks_prefix"] for bench in (hand.p, hand.d)}

        def look() -> None:
            for bench in (hand.p, hand.d):
                now = bench.engine.statistics()
                found = sum(now[f"blocks_{state}"] for state in ("free", "used", "leased", "prefix"))
                require(
                    found == total[id(bench)] and 0 <= now["final_slots_free"] <= bench.before["final_slots_free"],
                    "C8.4", f"the figures of {bench.engine.role.value} do not add up", expected=total[id(bench)],
                    seen=now,
                )  # fmt: skip

        for text in range(3):
            reservation = hand.d.hold(ask(3 * block + text, text=text % 2, max_tokens=5))
            look()
            hand.p.reserve(
                ask(3 * block + text, text=text % 2), prefix=reservation.valid, transfer=reservation.transfer
            )
            look()
            for computed in hand.p.prefill(reservation.transfer):
                hand.carry(computed)
            look()
            hand.p.engine.release_transfer(reservation.transfer)
            hand.d.engine.accept_import(reservation.transfer, 3 * block + text)
            look()
            while hand.d.engine.has_work():
                hand.d.step()
                look()
            hand.d.quiet(reservation.transfer)
            hand.d.engine.release_transfer(reservation.transfer)
            look()

    @pytest.mark.clause("C2.4", "C8.4")
    def test_promised_growth_is_there(self, hand: Hand, ask: Ask) -> None:
        """As many requests as D takes, each of which grows by three blocks: all of them get to their end."""
        d, block = hand.d, hand.d.engine.capacity().block_tokens
        transfers: list[TransferId] = []
        for text in range(500):
            request = ask(block, text=text, max_tokens=3 * block)
            transfer = d.reserve(request)
            if transfer in d.refusals:
                break
            hand.p.reserve(request, prefix=d.reservations[transfer].valid, transfer=transfer)
            for computed in hand.p.prefill(transfer):
                hand.carry(computed)
            hand.p.engine.release_transfer(transfer)
            transfers.append(transfer)
            d.engine.accept_import(transfer, block)
        held = list(transfers)
        while True:
            # some have ended while D was asked for memory: on a device an answer takes steps
            for transfer in [t for t in held if (a := d.answers.get(t)) and (a.finish_reason is not None or a.errors)]:
                d.quiet(transfer)
                d.engine.release_transfer(transfer)
                held.remove(transfer)
            if not d.engine.has_work():
                break
            d.step()
        answers = [d.answers.get(transfer, Answer()) for transfer in transfers]
        short = [len(answer.token_ids) for answer in answers if len(answer.token_ids) != 3 * block or answer.errors]
        require(
            transfers and not short, "C2.4", "a request did not get the memory that it was admitted with",
            expected=f"{3 * block} tokens each", seen=f"{len(short)} of {len(answers)} requests: {short[:5]}",
        )  # fmt: skip
        d.check_balance()

    @pytest.mark.clause("C6.3")
    @pytest.mark.requires("breakable")
    @pytest.mark.parametrize("side", ["p", "d"])
    def test_one_requests_fault_is_its_own(self, hand: Hand, ask: Ask, side: str) -> None:
        """Two requests, one of which cannot be computed: one error for it, no exception, and the other is right."""
        block = hand.d.engine.capacity().block_tokens
        good, bad = ask(3 * block + 1, text=1, max_tokens=6), ask(3 * block + 1, text=2, max_tokens=6)
        expected = hand.run(good)
        bench = {"p": hand.p, "d": hand.d}[side]
        if side == "p":
            transfers = []
            for request in (bad, good):
                reservation = hand.d.hold(request)
                hand.p.reserve(request, prefix=reservation.valid, transfer=reservation.transfer)
                transfers.append(reservation.transfer)
            self.break_request(hand.p.engine, transfers[0])
            for computed in hand.p.prefill(transfers[1]):
                hand.carry(computed)
            hand.p.finish()
            hand.d.engine.accept_import(transfers[1], len(good.prompt))
        else:
            transfers = [hand.hand_over(request) for request in (bad, good)]
            self.break_request(hand.d.engine, transfers[0])
        hand.d.finish()
        errors = bench.answers[transfers[0]].errors if transfers[0] in bench.answers else []
        require(
            len(errors) == 1, "C6.3", "a request that cannot be computed did not end with one error",
            expected="one StepOutput(error=...)", seen=errors,
        )  # fmt: skip
        require(
            hand.d.answers[transfers[1]].shown == expected.shown, "C6.3", "one request's fault changed another answer",
            expected=expected.shown, seen=hand.d.answers[transfers[1]].shown,
        )  # fmt: skip
        for transfer in transfers:
            for each in (hand.p, hand.d):
                each.quiet(transfer)
                each.engine.release_transfer(transfer)
        hand.p.check_balance()
        hand.d.check_balance()


def _drop(hand: Hand, transfer: TransferId, draw: random.Random) -> None:
    """Cancel, on both sides in either order, with or without suspending first."""
    for bench in draw.sample([hand.p, hand.d], 2):
        bench.quiet(transfer)
        bench.engine.release_transfer(transfer)
