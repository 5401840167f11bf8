"""C5 and C8 in an engine: until when blocks and slots stay as they are."""

from __future__ import annotations

import pytest

from kvbaton.identity import new_transfer_id
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.engine.bench import Ask, Bench, BenchTopic, Hand


class Lifetimes(BenchTopic):
    """C5, C8: a lease ends by release, once; what is suspended computes no more and keeps every byte."""

    @pytest.mark.clause("C1.2", "C7.1")
    @pytest.mark.parametrize("side", ["p", "d"])
    def test_unknown_and_released_transfers_are_no_ops(self, p: Bench, d: Bench, ask: Ask, side: str) -> None:
        """Every call about nobody, and about somebody who has gone, twice."""
        bench = {"p": p, "d": d}[side]
        gone = bench.reserve(ask(9))
        bench.engine.release_transfer(gone)
        for transfer in (new_transfer_id(), gone):
            for _ in range(2):
                bench.engine.suspend_transfer(transfer)
                bench.engine.release_transfer_compute(transfer)
                bench.engine.release_transfer(transfer)
                bench.engine.accept_import(transfer, 9)
        require(not bench.engine.has_work(), "C1.2", "a call about nobody made work")
        bench.check_balance("C7.1")
        bench.finish()

    @pytest.mark.clause("C5.1", "C8.1")
    def test_p_keeps_everything_until_the_release(self, p: Bench, ask: Ask) -> None:
        """After the last range, without its compute slot, P holds blocks, slot and bytes, whoever comes and goes."""
        block = p.engine.capacity().block_tokens
        transfer = p.reserve(ask(3 * block + 1, text=1))
        ranges = p.prefill(transfer)
        where = p.places(ranges[-1].tables, 0, ranges[-1].end).concat(p.final(ranges[-1].final_slot))
        before = p.read(where)
        p.engine.release_transfer_compute(transfer)
        p.engine.release_transfer_compute(transfer)
        for text in range(2, 8):
            other = p.reserve(ask(4 * block, text=text))
            p.prefill(other)
            p.engine.release_transfer(other)
        used = p.engine.statistics()
        require(
            p.read(where) == before and used["blocks_used"] + used["blocks_leased"] > 0, "C5.1",
            "P gave memory away before it was released", expected="the same bytes, and its blocks in use", seen=used,
        )  # fmt: skip
        p.engine.release_transfer(transfer)
        p.engine.release_transfer(transfer)
        p.check_balance("C8.1")

    @pytest.mark.clause("C5.3", "C6.1")
    def test_a_suspended_prefill_computes_no_more(self, p: Bench, ask: Ask) -> None:
        """Suspended before its first range, or in the middle: no further range, its blocks stay, and it is no work."""
        block = p.engine.capacity().block_tokens
        for begun in (False, True):
            transfer = p.reserve(ask(8 * block, text=begun))
            if begun:
                p.run_until(lambda transfer=transfer: bool(p.of(transfer)), "C3.2: P reports a range")  # type: ignore[misc]
            count = len(p.of(transfer))
            held = p.engine.statistics()["blocks_free"]
            p.quiet(transfer)
            p.quiet(transfer)
            for _ in range(5):
                p.step()
            require(
                len(p.of(transfer)) == count and not p.engine.has_work(), "C5.3", "a suspended prefill went on",
                expected=f"{count} ranges", seen=f"{len(p.of(transfer))} ranges",
            )  # fmt: skip
            require(
                p.engine.statistics()["blocks_free"] == held, "C5.1", "suspend_transfer() freed memory",
                expected=f"{held:g} free", seen=p.engine.statistics()["blocks_free"],
            )  # fmt: skip
            p.engine.release_transfer(transfer)
            p.check_balance()

    @pytest.mark.clause("C5.3", "C5.1")
    @pytest.mark.requires("device_control")
    @pytest.mark.parametrize("side", ["p", "d"])
    def test_a_suspension_waits_for_the_device(self, hand: Hand, ask: Ask, side: str) -> None:
        """Suspended while its device is at work: the event it returns completes with the device, and not before."""
        bench, request = {"p": hand.p, "d": hand.d}[side], ask(9, max_tokens=20)
        if side == "p":
            transfer = hand.p.reserve(request)
            bench.device.automatic = False
            bench.step()
        else:
            transfer = hand.hand_over(request)
            bench.device.automatic = False
            bench.step()
            bench.device.event()
        event = bench.engine.suspend_transfer(transfer)
        require(
            event is not None and not event.query(), "C5.3", "a suspension counts as quiet while the device is at work",
            expected="an event that has not completed", seen=event,
        )  # fmt: skip
        bench.device.complete()
        require(event.query(), "C5.3", "the event of a suspension does not complete with the device")
        bench.device.automatic = True
        bench.engine.release_transfer(transfer)
        bench.check_balance()

    @pytest.mark.clause("C5.3", "C6.1", "C8.3")
    @pytest.mark.parametrize("when", ["reserved", "imported", "decoding"])
    def test_a_suspended_request_decodes_no_more(self, hand: Hand, ask: Ask, when: str) -> None:
        """Suspended at D before the import, before it got a compute slot, or while it decodes: no more tokens."""
        d, request = hand.d, ask(9, max_tokens=50)
        transfer = d.hold(request).transfer if when == "reserved" else hand.hand_over(request)
        if when == "decoding":
            d.run_until(lambda: transfer in d.answers and len(d.answers[transfer].token_ids) > 2, "C4: D decodes")
        count = len(d.answers[transfer].token_ids) if transfer in d.answers else 0
        used = d.engine.statistics()["blocks_free"]
        d.quiet(transfer)
        d.quiet(transfer)
        for _ in range(5):
            d.step()
        now = len(d.answers[transfer].token_ids) if transfer in d.answers else 0
        require(
            now == count and not d.engine.has_work(), "C5.3", "a suspended request went on", expected=count, seen=now
        )
        require(d.engine.statistics()["blocks_free"] == used, "C5.2", "suspend_transfer() freed memory")
        d.engine.release_transfer(transfer)
        d.check_balance()

    @pytest.mark.clause("C8.1", "C8.2", "C5.2")
    def test_a_lease_is_never_anothers_memory(self, hand: Hand, ask: Ask) -> None:
        """One reservation is held while D serves request after request until its memory has been used many times over.

        Troubleshooting:
        - bytes change: leased blocks were freed, evicted or taken from a victim.
        """
        d, block = hand.d, hand.d.engine.capacity().block_tokens
        held = d.hold(ask(3 * block, text=77))
        where = d.places(held.arrays(), 0, 3 * block)
        d.write(where, 0xA5)
        blocks = d.before["blocks_free"] + d.before["blocks_prefix"]
        rounds = min(int(blocks // (5 * len(d.engine.geometry.planes))) + 2, 24)
        for text in range(rounds):
            hand.run(ask(4 * block, text=text, max_tokens=block))
        require(
            all(set(run) == {0xA5} for run in d.read(where)), "C8.1", "memory under a lease was given to others",
            expected="the bytes that were written there first",
        )  # fmt: skip
        d.engine.release_transfer(held.transfer)
        d.check_balance("C8.1")
