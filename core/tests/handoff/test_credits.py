"""The books of promised capacity against a naive model (C2.4, C2.5)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, rule

from kvbaton.errors import LocalProtocolError
from kvbaton.handoff.credits import Ledger
from kvbaton.identity import TransferId, new_transfer_id
from kvbaton.reservation import Capacity

BLOCKS, SLOTS = 20, 4


class Books(RuleBasedStateMachine):
    transfers = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(Capacity(BLOCKS, 1, SLOTS, 16, 1000))
        self.out: dict[TransferId, int] = {}
        self.repeated = 0

    @rule(target=transfers)
    def admit(self) -> TransferId:
        return new_transfer_id()

    @rule(transfer=transfers, blocks=st.integers(-1, BLOCKS + 1))
    def take(self, transfer: TransferId, blocks: int) -> None:
        possible = 0 <= blocks <= BLOCKS - sum(self.out.values()) and len(self.out) < SLOTS and transfer not in self.out
        if possible:
            assert self.ledger.fits(blocks)
            assert self.ledger.take(transfer, blocks).blocks == blocks
            self.out[transfer] = blocks
        else:
            with pytest.raises(LocalProtocolError):
                self.ledger.take(transfer, blocks)

    @rule(transfer=transfers)
    def give_back(self, transfer: TransferId) -> None:
        known = self.out.pop(transfer, None) is not None
        assert self.ledger.give_back(transfer) is known
        self.repeated += not known

    @invariant()
    def the_books_balance(self) -> None:
        promised = sum(self.out.values())
        assert (self.ledger.blocks_out, self.ledger.blocks_free) == (promised, BLOCKS - promised)
        assert (self.ledger.slots_out, self.ledger.slots_free) == (len(self.out), SLOTS - len(self.out))
        assert len(self.ledger) == len(self.out)
        assert self.ledger.repeated == self.repeated
        assert self.ledger.load == max(promised / BLOCKS, len(self.out) / SLOTS)
        for transfer, blocks in self.out.items():
            credit = self.ledger.out(transfer)
            assert credit is not None
            assert (credit.transfer, credit.blocks, credit.slots) == (transfer, blocks, 1)


Books.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBooks = pytest.mark.clause("C2.4", "C2.5")(Books.TestCase)


@pytest.mark.clause("C2.5")
def test_a_second_return_is_counted_and_changes_nothing():
    ledger = Ledger(Capacity(10, 1, 2, 16, 1000))
    transfer = new_transfer_id()
    ledger.take(transfer, 3)
    assert ledger.give_back(transfer)
    assert not ledger.give_back(transfer)
    assert (ledger.blocks_free, ledger.slots_free, ledger.repeated) == (10, 2, 1)


@pytest.mark.clause("C2.4")
def test_a_stage_without_capacity_is_full():
    ledger = Ledger(Capacity(0, 0, 0, 16, 0))
    assert ledger.load == 1.0
    assert not ledger.fits(0)
    assert not ledger.fits_ever(0)
