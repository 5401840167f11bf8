"""The coordinator's books of promised capacity (C2.4, C2.5).

A credit is a promise, not a measurement: it budgets the worst case (prompt plus permitted growth) against what a stage
said it can hold.  ``Ledger`` keeps one stage's promises.  Each is returned exactly once; a second return changes
nothing and is reported.

Threading: one thread, the coordinator's.
"""

from __future__ import annotations

from kvbaton.errors import LocalProtocolError
from kvbaton.identity import TransferId
from kvbaton.reservation import Capacity, Credit


class Ledger:
    """The credits of one stage: ``blocks`` and transfer ``slots``, each within what the stage can hold."""

    __slots__ = ("_out", "blocks_free", "capacity", "repeated", "slots_free")

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.blocks_free = capacity.blocks
        self.slots_free = capacity.transfer_slots
        #: Second returns seen: each is somebody's mistake, and none has changed a balance.
        self.repeated = 0
        self._out: dict[TransferId, Credit] = {}

    def __len__(self) -> int:
        """Credits that are out."""
        return len(self._out)

    @property
    def blocks_out(self) -> int:
        """Blocks promised and not returned."""
        return self.capacity.blocks - self.blocks_free

    @property
    def slots_out(self) -> int:
        """Transfer slots promised and not returned."""
        return self.capacity.transfer_slots - self.slots_free

    @property
    def load(self) -> float:
        """How much is promised, 0 to 1: the scarcer of blocks and slots."""
        capacity = self.capacity
        blocks = self.blocks_out / capacity.blocks if capacity.blocks else 1.0
        slots = self.slots_out / capacity.transfer_slots if capacity.transfer_slots else 1.0
        return max(blocks, slots)

    def fits(self, blocks: int) -> bool:
        """Whether one more transfer with so many blocks can be promised now."""
        return blocks <= self.blocks_free and self.slots_free > 0

    def fits_ever(self, blocks: int) -> bool:
        """Whether it could be promised were nothing else out."""
        return blocks <= self.capacity.blocks and self.capacity.transfer_slots > 0

    def out(self, transfer: TransferId) -> Credit | None:
        """The credit of a transfer while it is out."""
        return self._out.get(transfer)

    def take(self, transfer: TransferId, blocks: int) -> Credit:
        """Promise ``blocks`` and one slot.  Raises :class:`LocalProtocolError` where they are not free or already
        out.
        """
        if transfer in self._out:
            raise LocalProtocolError(f"C2.5: the credit of {transfer} is out already", transfer=transfer)
        if blocks < 0 or not self.fits(blocks):
            raise LocalProtocolError(
                f"C2.4: {blocks} blocks and a slot are not free: {self.blocks_free} and {self.slots_free} are",
                transfer=transfer,
            )
        credit = Credit(transfer, blocks)
        self._out[transfer] = credit
        self.blocks_free -= credit.blocks
        self.slots_free -= credit.slots
        return credit

    def give_back(self, transfer: TransferId) -> bool:
        """Return a credit.  False, counted and without any effect, where it is not out (C2.5)."""
        credit = self._out.pop(transfer, None)
        if credit is None:
            self.repeated += 1
            return False
        self.blocks_free += credit.blocks
        self.slots_free += credit.slots
        return True
