"""What holds memory for a transfer: reservations, leases and credits.

A *reservation* is destination memory promised to one transfer and frozen while it lives; a *lease* keeps blocks from
being freed or preempted; a *credit* is the coordinator's book entry for capacity it has promised (C2.4: not a
measurement).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

from kvbaton.identity import TransferId, WireTransferId
from kvbaton.segments import FEW

#: What block ids, token counts and slots are when they come over the wire (C9.3): more would not fit a table.
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]

#: One block table per plane: block ids, in token order.
Tables = tuple[npt.NDArray[np.int64], ...]


class Reservation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Destination memory of one transfer, frozen while a remote write may reference it (C2.2).

    ``tables[plane]`` holds the block ids for the whole prompt; ``valid`` is the number of leading tokens that the
    destination holds already and that nobody sends (C3.3); ``final_slot`` is where the final payload goes.
    Being able to construct one is a promise that its memory is locally quiet (C2.7).
    """

    transfer: WireTransferId
    tables: tuple[tuple[Natural, ...], ...]
    valid: Natural
    final_slot: Natural

    def arrays(self) -> Tables:
        """The tables as numpy arrays, for planning."""
        return tuple(np.asarray(table, dtype=np.int64) for table in self.tables)

    def planning(self) -> Tables | tuple[tuple[int, ...], ...]:
        """:meth:`arrays`; of tables of a few blocks, which are planned without numpy, the tables themselves."""
        return self.tables if all(len(table) <= FEW for table in self.tables) else self.arrays()


class Credit(msgspec.Struct, frozen=True):
    """Capacity promised to one transfer on one stage: slots and blocks, returned once and together (C2.5)."""

    transfer: TransferId
    blocks: int
    slots: int = 1


class Capacity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a stage's engine offers: what credits are made of.

    ``blocks``: KV blocks of the pool that all ``planes`` share; ``compute_slots``: requests computed at once;
    ``transfer_slots``: transfers alive at once (final payload slots); ``block_tokens``: tokens per block;
    ``max_tokens``: the longest sequence.
    """

    blocks: int
    compute_slots: int
    transfer_slots: int
    block_tokens: int
    max_tokens: int
    planes: int = 1

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a sequence of ``tokens`` tokens takes, over all planes."""
        return -(-tokens // self.block_tokens) * self.planes
