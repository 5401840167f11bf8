"""A reservation as it comes off the wire."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvbaton.identity import new_transfer_id
from kvbaton.reservation import Capacity, Reservation

T = new_transfer_id()


def test_tables_as_arrays():
    tables = Reservation(T, ((3, 1), ()), valid=2, final_slot=0).arrays()
    assert [table.tolist() for table in tables] == [[3, 1], []]
    assert all(table.dtype == np.int64 for table in tables)


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize("field", ["tables", "valid", "final_slot"])
@pytest.mark.parametrize("value", [-1, 2**63, 2**64 - 1, 0.5, "1"])
def test_numbers_that_fit_no_table_are_refused_before_anyone_plans_with_them(field, value):
    wire = msgspec.to_builtins(Reservation(T, ((3, 1),), valid=2, final_slot=0))
    wire[field] = [[3, value]] if field == "tables" else value
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=Reservation)


def test_blocks_of_all_planes_are_counted():
    capacity = Capacity(blocks=64, compute_slots=1, transfer_slots=1, block_tokens=16, max_tokens=512, planes=4)
    assert [capacity.blocks_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 4, 4, 8]
