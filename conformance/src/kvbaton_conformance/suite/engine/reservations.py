"""C2 at D: what a reservation promises."""

from __future__ import annotations

import pytest

from kvbaton.engine import Admission, Request, SamplingParams
from kvbaton.identity import TransferId, new_transfer_id
from kvbaton.reservation import Reservation
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.engine.bench import Ask, Bench, BenchTopic, Hand


class EngineReservations(BenchTopic):
    """C2: memory for the whole prompt, frozen, quiet, and no compute slot."""

    @pytest.mark.clause("C2.2", "C3.6")
    def test_a_reservation_covers_the_prompt(self, d: Bench, ask: Ask) -> None:
        """Tables of every plane, blocks that exist and differ, a final slot that exists, no valid prefix yet."""
        geometry, block = d.engine.geometry, d.engine.capacity().block_tokens
        request = ask(3 * block + 1)
        one, two = d.hold(request), d.hold(ask(2 * block, text=1))
        for reservation, length in ((one, len(request.prompt)), (two, 2 * block)):
            needed = -(-length // block)
            require(
                len(reservation.tables) == len(geometry.planes)
                and all(len(table) >= needed for table in reservation.tables)
                and all(
                    set(table) <= set(range(plane.blocks))
                    for plane, table in zip(geometry.planes, reservation.tables, strict=True)
                ),
                "C3.6", "a reservation's tables do not cover the prompt with blocks that exist",
                expected=f"{len(geometry.planes)} tables of {needed} blocks", seen=reservation.tables,
            )  # fmt: skip
            require(
                reservation.valid == 0 and 0 <= reservation.final_slot < geometry.final_slots, "C2.2",
                "a reservation of an empty engine has a valid prefix, or no final slot", seen=reservation,
            )  # fmt: skip
        places = [d.places(r.arrays(), 0, len_) for r, len_ in ((one, len(request.prompt)), (two, 2 * block))]
        require(
            places[0].concat(places[1]).disjoint() and one.final_slot != two.final_slot, "C2.2",
            "two reservations share memory", seen=(one, two),
        )  # fmt: skip
        for reservation in (one, two):
            d.engine.release_transfer(reservation.transfer)
        d.check_balance()

    @pytest.mark.clause("C2.2", "C2.7", "C5.2")
    def test_d_itself_writes_nothing_into_a_reservation(self, hand: Hand, ask: Ask) -> None:
        """From the moment of ``reserved`` until the import: D decodes others meanwhile, and not one byte changes.

        Troubleshooting:
        - bytes change at once: zeroing or a prefix copy was still running when D said reserved;
        - they change later: the blocks were given to another request, or a padded row writes to block 0.
        """
        d, block = hand.d, hand.d.engine.capacity().block_tokens
        busy = [hand.hand_over(ask(block + text, text=text, max_tokens=12)) for text in range(1, 4)]
        d.step()
        looks: dict[str, list[bytes]] = {}

        def where(reservation: Reservation) -> list[bytes]:
            kv = d.places(reservation.arrays(), reservation.valid, 4 * block)
            return d.read(kv.concat(d.final(reservation.final_slot)))

        def look(reservation: Reservation) -> None:
            looks[reservation.transfer] = where(reservation)

        d.on_reserved = look
        held = d.hold(ask(4 * block, text=9))
        for _ in range(STEPS_OF_OTHERS):
            if d.engine.has_work():
                d.step()
            require(
                where(held) == looks[held.transfer],
                "C2.7",
                "D's own engine wrote into memory that a remote writer was promised",
            )
        for transfer in busy:
            d.quiet(transfer)
            d.engine.release_transfer(transfer)
        d.engine.release_transfer(held.transfer)
        d.check_balance()

    @pytest.mark.clause("C2.7")
    @pytest.mark.requires("device_control")
    def test_reserved_is_said_when_the_device_is_quiet(self, d: Bench, ask: Ask) -> None:
        """Work is queued on D's device when it is asked: the answer waits for it."""
        d.device.automatic = False
        d.device.event()
        id = new_transfer_id()
        d.engine.reserve_transfer(Admission(id, ask(9)))
        for _ in range(5):
            d.step()
        require(id not in d.reservations, "C2.7", "D said reserved while its device was at work", seen=d.reservations)
        d.device.complete()
        d.run_until(lambda: id in d.reservations, "C2.7: once the device is done D answers")
        d.engine.release_transfer(id)
        d.check_balance()

    @pytest.mark.clause("C2.3", "C8.3")
    def test_a_reservation_is_no_work(self, d: Bench, ask: Ask) -> None:
        """Nothing to do, nothing computed, nothing activated."""
        held = d.hold(ask(9))
        require(not d.engine.has_work(), "C2.3", "a reservation alone makes the engine busy")
        for _ in range(5):
            d.step()
        require(
            held.transfer not in d.answers and held.transfer not in d.active, "C8.3",
            "a request was computed before it was imported", seen=d.answers,
        )  # fmt: skip
        d.engine.release_transfer(held.transfer)
        d.check_balance()

    @pytest.mark.clause("C2.6", "C2.5")
    @pytest.mark.parametrize("side", ["p", "d"])
    def test_what_never_fits_is_refused_and_holds_nothing(self, p: Bench, d: Bench, ask: Ask, side: str) -> None:
        """Longer than the longest sequence: refused for good, with a reason, and the books are as before."""
        bench = {"p": p, "d": d}[side]
        longest = bench.engine.capacity().max_tokens
        transfer = bench.reserve(Request(ask(1).prompt * (longest + 1), SamplingParams(max_tokens=1)))
        if side == "p":
            bench.finish()
        reason, retry = bench.refusals.get(transfer, ("", True))
        require(
            reason and not retry, "C2.6", "a request that never fits was not refused for good",
            expected="refused, with a reason, retry False", seen=bench.refusals,
        )  # fmt: skip
        bench.check_balance()

    @pytest.mark.clause("C2.6", "C2.4")
    def test_what_does_not_fit_now_is_refused_and_may_ask_again(self, d: Bench, ask: Ask) -> None:
        """Reservations until one is refused: it may be retried, holds nothing, and fits once another is released."""
        block = d.engine.capacity().block_tokens
        held: list[TransferId] = []
        while not d.refusals and len(held) < 2000:
            held.append(d.reserve(ask(2 * block, text=len(held))))
        reason, retry = d.refusals.get(held.pop(), ("", False))
        require(
            held and reason and retry, "C2.6", "a full engine does not refuse, or says never",
            expected="refused with retry True", seen=f"{len(held)} held, {d.refusals}",
        )  # fmt: skip
        before = dict(d.engine.statistics())
        again = d.reserve(ask(2 * block, text=5000))
        require(
            again in d.refusals and dict(d.engine.statistics()) == before, "C2.5", "a refusal holds something",
            expected=before, seen=d.engine.statistics(),
        )  # fmt: skip
        d.engine.release_transfer(held.pop())
        held.append(d.hold(ask(2 * block, text=6000)).transfer)
        for other in held:
            d.engine.release_transfer(other)
        d.check_balance()


#: Steps of other requests that a reservation is watched for.
STEPS_OF_OTHERS = 12
