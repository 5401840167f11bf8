"""Storage and geometry, and that no byte outside a row's valid range matters."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from kvbaton.connector import MemoryRegion
from kvbaton_transformers.paged import KVShape, KVSpec, PagedCache, PagedKV, RowIndex, tensor_over

SHAPE = KVShape(layers=2, kv_heads=3, key_dim=4, value_dim=5, hidden=6, dtype=torch.float32)
SPEC = KVSpec(SHAPE, planes=2, blocks=7, block_tokens=4, final_slots=3)


@pytest.mark.clause("C3.2", "C3.5")
def test_geometry_names_every_byte_of_a_token() -> None:
    storage = PagedKV(SPEC)
    memory = {region.id: region.view() for region in storage.regions()}
    geometry = SPEC.geometry({"weights": "x"})
    for view in memory.values():
        view[:] = 0
    # write one token through the geometry, as a transport would
    plane, block, offset = 1, 5, 2
    for component in geometry.planes[plane].components:
        start = component.base + block * component.block_stride + offset * component.token_bytes
        memory[component.region][start : start + component.token_bytes] = 1
    filled = storage.keys[plane][block, :, offset].contiguous(), storage.values[plane][block, :, offset].contiguous()
    assert all((part.view(torch.uint8) == 1).all() for part in filled)
    written = sum(int(view.sum()) for view in memory.values())
    assert written == sum(part.nbytes for part in filled) == 2 * 3 * (4 + 5) * 4


@pytest.mark.clause("C3.4")
def test_geometry_names_the_final_payload() -> None:
    storage = PagedKV(SPEC)
    geometry = SPEC.geometry({})
    hidden = torch.arange(6.0) + 1
    storage.write_final(1, hidden, 3)
    [region] = [region for region in storage.regions() if region.id == geometry.final_region]
    start = geometry.final_base + geometry.final_stride
    row = region.view()[start : start + geometry.final_bytes].copy()
    other = PagedKV(SPEC)
    [region] = [region for region in other.regions() if region.id == geometry.final_region]
    region.view()[start : start + geometry.final_bytes] = row
    got, depth = other.read_final(1)
    assert torch.equal(got, hidden)
    assert depth == 3


def test_final_payload_in_bfloat16_holds_the_depth() -> None:
    shape = KVShape(layers=1, kv_heads=1, key_dim=8, value_dim=8, hidden=16, dtype=torch.bfloat16)
    storage = PagedKV(KVSpec(shape, planes=1, blocks=1, block_tokens=1, final_slots=1))
    for depth in (1, 7, 200):
        storage.write_final(0, torch.ones(16, dtype=torch.bfloat16), depth)
        assert storage.read_final(0)[1] == depth
    assert storage.spec.geometry({}).final_bytes % 16 == 0


def test_storage_over_foreign_memory_shares_it_and_keeps_it_alive() -> None:
    sizes = SPEC.region_bytes()
    arrays = {region: np.zeros(size + 64, dtype=np.uint8) for region, size in sizes.items()}
    regions = {region: MemoryRegion.of_array(region, array) for region, array in arrays.items()}
    storage = PagedKV(SPEC, buffers={region: tensor_over(memory) for region, memory in regions.items()})
    storage.keys[0][3, 1, 2] = 9.0
    assert arrays[0].view(np.float32).sum() == 9.0 * 3 * 4
    assert [region.address for region in storage.regions()] == [array.ctypes.data for array in arrays.values()]
    assert [region.length for region in storage.regions()] == list(sizes.values())
    del arrays, regions
    gc.collect()
    storage.values[1].fill_(2.0)
    assert float(storage.values[1].sum()) == 2.0 * storage.values[1].numel()


def exchange(storage: PagedKV, index: RowIndex, writes: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    key = torch.randn((index.rows, 3, index.new, 4), generator=generator)
    value = torch.randn((index.rows, 3, index.new, 5), generator=generator)
    return key, value, *PagedCache(storage, 0, index, writes).update(key, value, 1, {"unknown": 1}, extra=2)


def test_update_stores_new_tokens_and_returns_the_history() -> None:
    storage = PagedKV(SPEC)
    tables, starts = [[5, 2], [3]], [5, 1]
    old = {}
    for row, (table, start) in enumerate(zip(tables, starts, strict=True)):
        for position in range(start):
            old[row, position] = torch.full((3, 4), 10.0 * row + position)
            storage.keys[0][table[position // 4], 1, position % 4] = old[row, position]
    index = RowIndex(tables, starts, new=2, block_tokens=4, device=torch.device("cpu"))
    key, value, keys, values = exchange(storage, index)
    assert keys.shape == (2, 3, 7, 4)
    assert values.shape == (2, 3, 7, 5)
    for (row, position), expected in old.items():
        assert torch.equal(keys[row, :, position], expected)
    assert torch.equal(keys[0, :, 5:7], key[0])
    assert torch.equal(values[1, :, 1:3], value[1])
    assert torch.equal(storage.keys[0][2, 1, 1:3].transpose(0, 1), key[0])
    assert not storage.keys[0][:, 0].any()  # no other layer
    assert not storage.keys[1].any()  # no other plane
    assert index.mask is not None
    assert index.mask[1, 0].tolist() == [[True] * 2 + [False] * 5, [True] * 3 + [False] * 4]


@pytest.mark.clause("C3.1")
def test_memory_outside_the_valid_range_is_never_read() -> None:
    storage = PagedKV(SPEC)
    for tensor in storage.tensors.values():
        tensor.fill_(float("nan"))
    storage.keys[0][5], storage.values[0][5] = 1.0, 1.0  # the one block with a history, whole
    index = RowIndex([[5, 2], [3]], [4, 0], new=1, block_tokens=4, device=torch.device("cpu"))
    _, _, keys, values = exchange(storage, index)
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()


def test_update_leaves_out_what_must_not_be_written() -> None:
    storage = PagedKV(SPEC)
    index = RowIndex([[5], [3]], [0, 0], new=2, block_tokens=4, device=torch.device("cpu"))
    key, _, keys, _ = exchange(storage, index, torch.tensor([[True, False], [False, True]]))
    assert torch.equal(keys[0, :, 0], key[0, :, 0])
    assert torch.equal(keys[1, :, 1], key[1, :, 1])
    assert not keys[0, :, 1].any()
    assert not keys[1, :, 0].any()


def test_a_table_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot hold 9 tokens"):
        RowIndex([[1, 2]], [7], new=2, block_tokens=4, device=torch.device("cpu"))


def test_copy_block() -> None:
    storage = PagedKV(SPEC)
    storage.keys[1][4], storage.values[1][4] = 3.0, 4.0
    storage.copy_block(1, 4, 6)
    assert (storage.keys[1][6] == 3.0).all()
    assert (storage.values[1][6] == 4.0).all()
    assert not storage.keys[0].any()
