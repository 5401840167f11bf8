"""The KV cache's tensors: blocks of tokens, planes of blocks, slots of final payloads; and how a forward uses them.

Storage of one plane is one tensor for K and one for V, ``[block, layer, token, kv_head, head_dim]``: a whole block is
one contiguous run over all layers, which is what makes it cheap to transfer.  Which block belongs to whom is not
decided here: every forward is told its block tables.

A quantised cache has a third and a fourth tensor in each plane, ``[block, layer, scale]``: the scales of the block's K
and V (see :mod:`~kvbaton_transformers.quantised`).  They are valid with the block's tokens and travel with them.

Nothing outside the valid range of a row is ever read into a result: stale, quarantined or never written memory may
hold any bits, NaN included.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache

from kvbaton.connector import MemoryKind, MemoryRegion
from kvbaton.geometry import Component, KVGeometry, Plane
from kvbaton_transformers import quantised
from kvbaton_transformers.quantised import Scales

#: Final payload of a slot: the hidden state, then this many bytes whose first element is the exit depth.  Sixteen keep
#: rows aligned for every transport.
_TRAILER_BYTES = 16


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one token leaves in the cache of one pass over the decoder stack.

    ``layers`` layers with ``kv_heads`` heads each, ``key_dim`` and ``value_dim`` elements per head (they may differ),
    in ``dtype``; ``hidden`` elements of final hidden state.
    """

    layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    hidden: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class KVSpec:
    """How large a cache is: ``planes`` planes of ``blocks`` blocks of ``block_tokens`` tokens, and ``final_slots``
    slots.  ``scales``: K and V are kept in float8, with such scales; None: as the model computes them.

    Regions, one per tensor: K of plane p has id ``2 * p``, V of plane p ``2 * p + 1``, the final slots ``2 * planes``,
    the scales of K of plane p ``2 * planes + 1 + 2 * p``, those of V the next.
    """

    shape: KVShape
    planes: int
    blocks: int
    block_tokens: int
    final_slots: int
    scales: Scales | None = None

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.shape.dtype if self.scales is None else quantised.DTYPE

    @property
    def scale_shape(self) -> tuple[int, int, int]:
        """Of a quantised cache."""
        assert self.scales is not None
        return self.blocks, self.shape.layers, self.scales.count(self.shape.kv_heads)

    @property
    def key_shape(self) -> tuple[int, int, int, int, int]:
        s = self.shape
        return self.blocks, s.layers, self.block_tokens, s.kv_heads, s.key_dim

    @property
    def value_shape(self) -> tuple[int, int, int, int, int]:
        s = self.shape
        return self.blocks, s.layers, self.block_tokens, s.kv_heads, s.value_dim

    @property
    def final_shape(self) -> tuple[int, int]:
        return self.final_slots, self.shape.hidden + _TRAILER_BYTES // self.shape.dtype.itemsize

    @property
    def final_region(self) -> int:
        return 2 * self.planes

    def scale_region(self, plane: int, value: bool) -> int:
        """The region of the scales of K, or with ``value`` of V, of ``plane``."""
        return self.final_region + 1 + 2 * plane + value

    def tensors(self) -> dict[int, tuple[tuple[int, ...], torch.dtype]]:
        """Region id -> shape and type of its tensor, in order of id."""
        kinds: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
        for plane in range(self.planes):
            kinds[2 * plane] = self.key_shape, self.kv_dtype
            kinds[2 * plane + 1] = self.value_shape, self.kv_dtype
        kinds[self.final_region] = self.final_shape, self.shape.dtype
        if self.scales is not None:
            for plane in range(self.planes):
                for value in (False, True):
                    kinds[self.scale_region(plane, value)] = self.scale_shape, torch.float32
        return kinds

    def region_bytes(self) -> dict[int, int]:
        """Region id -> bytes that its tensor takes."""
        return {region: math.prod(shape) * dtype.itemsize for region, (shape, dtype) in self.tensors().items()}

    def geometry(self, identity: Mapping[str, str]) -> KVGeometry:
        """The same, in the terms that two stages compare and transfers are planned in.

        ``identity`` says what the model is; how its KV is kept is added here (C3.5).
        """
        shape, dtype = self.shape, str(self.kv_dtype).removeprefix("torch.")
        planes = []
        for plane in range(self.planes):
            components = []
            for layer in range(shape.layers):
                for region, dim in ((2 * plane, shape.key_dim), (2 * plane + 1, shape.value_dim)):
                    token_bytes = shape.kv_heads * dim * self.kv_dtype.itemsize
                    layer_bytes = self.block_tokens * token_bytes
                    components.append(
                        Component(
                            region=region,
                            base=layer * layer_bytes,
                            block_stride=shape.layers * layer_bytes,
                            token_bytes=token_bytes,
                            dtype=dtype,
                        )
                    )
            components.extend(self._scale_components(plane))
            planes.append(Plane(name=f"depth{plane}", components=tuple(components), blocks=self.blocks))
        final_bytes = self.final_shape[1] * shape.dtype.itemsize
        return KVGeometry(
            identity={
                **identity,
                "kv_dtype": dtype,
                "kv_scales": "none" if self.scales is None else self.scales.value,
            },
            block_tokens=self.block_tokens,
            planes=tuple(planes),
            final_bytes=final_bytes,
            final_region=self.final_region,
            final_base=0,
            final_stride=final_bytes,
            final_slots=self.final_slots,
        )

    def _scale_components(self, plane: int) -> Iterator[Component]:
        if self.scales is None:
            return
        _, layers, count = self.scale_shape
        nbytes = count * torch.float32.itemsize
        for layer in range(layers):
            for value in (False, True):
                yield Component(
                    region=self.scale_region(plane, value),
                    base=layer * nbytes,
                    block_stride=layers * nbytes,
                    token_bytes=nbytes,
                    dtype="float32",
                    per_block=True,
                )


class RowIndex:
    """Where the tokens of one forward lie in one plane: rows of equally many new tokens over unequal histories.

    ``tables[row]`` are block ids that cover ``starts[row] + new`` tokens, ``starts[row]`` the tokens already valid,
    ``new`` the tokens each row adds.  Index tensors are on ``device``.
    """

    def __init__(
        self, tables: Sequence[Sequence[int]], starts: Sequence[int], new: int, block_tokens: int, device: torch.device
    ) -> None:
        ends = [start + new for start in starts]
        for table, end in zip(tables, ends, strict=True):
            if len(table) * block_tokens < end:
                raise ValueError(f"a table of {len(table)} blocks of {block_tokens} tokens cannot hold {end} tokens")
        self.rows, self.new, self.length = len(starts), new, max(ends)
        width = -(-self.length // block_tokens)
        # Past its own end a row gathers its first block: any valid block will do, for none of it is used.
        padded = torch.tensor([(list(table[:width]) + [table[0]] * width)[:width] for table in tables])
        positions = torch.tensor(list(starts))[:, None] + torch.arange(new)
        self.table = padded.to(device)
        self.positions = positions.to(device)
        #: ``[rows, new]``: the block and the offset in it of every new token.
        self.block = torch.gather(padded, 1, positions // block_tokens).to(device)
        self.offset = (positions % block_tokens).to(device)
        #: ``[rows, 1, new, length]``, True where a query may look; None for a single row, whose mask the model makes
        #: itself.
        self.mask: torch.Tensor | None = None
        #: ``[rows, length, 1, 1]``, True where a gathered token is not part of its row.
        self.stale: torch.Tensor | None = None
        if self.rows > 1:
            columns = torch.arange(self.length)
            self.mask = (columns[None, None, :] <= positions[:, :, None])[:, None].to(device)
            if min(ends) != self.length:
                self.stale = (columns[None, :] >= torch.tensor(ends)[:, None])[:, :, None, None].to(device)

    def select(self, rows: torch.Tensor) -> RowIndex:
        """The same for a subset of rows, given by their indices."""
        if len(rows) == self.rows:
            return self
        chosen = copy.copy(self)
        chosen.rows = len(rows)
        chosen.table, chosen.positions = self.table[rows], self.positions[rows]
        chosen.block, chosen.offset = self.block[rows], self.offset[rows]
        chosen.mask = None if self.mask is None else self.mask[rows]
        chosen.stale = None if self.stale is None else self.stale[rows]
        return chosen


class PagedKV:
    """The tensors of one cache.

    ``keys[plane]``, ``values[plane]``: ``[block, layer, token, kv_head, head_dim]``; ``final``: ``[slot, hidden +
    trailer]``; ``key_scales[plane]``, ``value_scales[plane]``: ``[block, layer, scale]``, of a quantised cache only;
    ``tensors``: all of them by region id.

    Ownership: the caller of every method says which blocks and slots, and owns them for as long as device work runs.
    Threading: the engine's thread.
    """

    def __init__(
        self,
        spec: KVSpec,
        device: torch.device | str = "cpu",
        buffers: Mapping[int, torch.Tensor] | None = None,
        constants: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Allocate zeroed storage on ``device``, or lay it over ``buffers``.

        ``buffers``: region id -> contiguous uint8 tensor of at least ``spec.region_bytes()[id]`` bytes (see
        :func:`tensor_over`), kept alive by this object, its content left as it is.  ``constants``, with
        :attr:`Scales.TENSOR`: the scales of K and of V that blocks begun here get, each ``[layer]``.
        """
        if (spec.scales is Scales.TENSOR) != (constants is not None):
            raise ValueError("constant scales are what blocks have with Scales.TENSOR, and only then")
        self.spec, self.constants = spec, constants
        self.device = torch.device(device)
        self.tensors = {
            region: torch.zeros(shape, dtype=dtype, device=self.device)
            if buffers is None
            else buffers[region][: spec.region_bytes()[region]].view(dtype).view(shape)
            for region, (shape, dtype) in spec.tensors().items()
        }
        self.keys = [self.tensors[2 * plane] for plane in range(spec.planes)]
        self.values = [self.tensors[2 * plane + 1] for plane in range(spec.planes)]
        self.final = self.tensors[spec.final_region]
        self.key_scales, self.value_scales = (
            [self.tensors[spec.scale_region(plane, value)] for plane in range(spec.planes)] if spec.scales else []
            for value in (False, True)
        )

    def regions(self) -> list[MemoryRegion]:
        """The memory to register: one region per tensor, in order of id, each owned by its tensor."""
        kind: MemoryKind = "cuda" if self.device.type == "cuda" else "host"
        return [
            MemoryRegion(region, kind, tensor.device.index or 0, tensor.data_ptr(), tensor.nbytes, tensor)
            for region, tensor in sorted(self.tensors.items())
        ]

    def write_final(self, slot: int, hidden: torch.Tensor, depth: int) -> None:
        """Put a final payload into ``slot``: ``hidden`` (``[hidden]``) and the exit depth of its token (1, 2, ...)."""
        size = self.spec.shape.hidden
        self.final[slot, :size] = hidden
        self.final[slot, size:] = float(depth)

    def read_final(self, slot: int) -> tuple[torch.Tensor, int]:
        """A copy of the hidden state in ``slot``, ``[hidden]``, and the exit depth.  Waits for the device."""
        size = self.spec.shape.hidden
        return self.final[slot, :size].clone(), int(self.final[slot, size].item())

    def copy_tokens(
        self, source_plane: int, source: RowIndex, target_plane: int, target: RowIndex, which: torch.Tensor
    ) -> None:
        """Copy K and V of all layers of the new tokens in ``which`` (``[rows, new]``, bool) from plane to plane.

        Not in a quantised cache, where a token means nothing without its block's scales.
        """
        assert self.spec.scales is None
        source_block, source_offset = source.block[which], source.offset[which]
        target_block, target_offset = target.block[which], target.offset[which]
        for storage in (self.keys, self.values):
            storage[target_plane][target_block, :, target_offset] = storage[source_plane][
                source_block, :, source_offset
            ]

    def copy_block(self, plane: int, source: int, target: int) -> None:
        """Copy a whole block within a plane, all layers."""
        self.keys[plane][target] = self.keys[plane][source]
        self.values[plane][target] = self.values[plane][source]
        if self.spec.scales is not None:
            self.key_scales[plane][target] = self.key_scales[plane][source]
            self.value_scales[plane][target] = self.value_scales[plane][source]


class _Exposed:
    """Memory of a region in the forms that numpy and torch read; whoever reads it keeps the region alive."""

    def __init__(self, region: MemoryRegion) -> None:
        self._region = region
        interface = {"shape": (region.length,), "typestr": "|u1", "data": (region.address, False), "version": 3}
        if region.kind == "cuda":
            self.__cuda_array_interface__ = interface
        else:
            self.__array_interface__ = interface


def tensor_over(region: MemoryRegion) -> torch.Tensor:
    """The bytes of ``region``, shared, as a uint8 tensor on its device that keeps the region alive."""
    if region.kind == "cuda":
        return torch.as_tensor(_Exposed(region), device=f"cuda:{region.device}")
    return torch.from_numpy(np.asarray(_Exposed(region)))


class PagedCache(Cache):
    """One forward's view of a plane, in the form in which a Hugging Face model wants its cache.

    ``update`` stores the new K and V in their blocks and returns the whole history.  ``writes`` (``[rows, new]``, bool)
    leaves out the tokens where it is False; None stores all.  Used for one forward and thrown away.
    """

    def __init__(self, storage: PagedKV, plane: int, index: RowIndex, writes: torch.Tensor | None = None) -> None:
        super().__init__(layers=[])
        self._index, self._writes = index, writes
        self._keys, self._values = (tensors[plane] for tensors in (storage.keys, storage.values))
        if writes is None:
            self._block, self._offset = index.block.flatten(), index.offset.flatten()
        else:
            self._block, self._offset = index.block[writes], index.offset[writes]
        self._flat_table = index.table.flatten()
        self._key_scales: torch.Tensor | None = None
        self._value_scales: torch.Tensor | None = None
        self._constants = storage.constants or (None, None)
        if storage.spec.scales is not None:
            self._key_scales, self._value_scales = storage.key_scales[plane], storage.value_scales[plane]
            #: Which of the tokens to store begin a block.
            self._first = (self._offset == 0).nonzero()[:, 0]
        self._layers = storage.spec.shape.layers

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            self._exchange(self._keys, self._key_scales, self._constants[0], layer_idx, key_states),
            self._exchange(self._values, self._value_scales, self._constants[1], layer_idx, value_states),
        )

    def _exchange(
        self,
        storage: torch.Tensor,
        scales: torch.Tensor | None,
        constants: torch.Tensor | None,
        layer: int,
        states: torch.Tensor,
    ) -> torch.Tensor:
        """Store ``states`` (``[row, head, new, dim]``) in a layer of ``storage``, read all back.

        Returns ``[row, head, length, dim]``.
        """
        index, storage = self._index, storage[:, layer]
        rows = states.transpose(1, 2)
        tokens = rows.flatten(0, 1) if self._writes is None else rows[self._writes]
        if scales is None:
            storage[self._block, self._offset] = tokens
            blocks = storage.index_select(0, self._flat_table)
        else:
            # Bytes, as not every device gathers and scatters float8.
            scales, storage = scales[:, layer], storage.view(torch.uint8)
            if constants is None:
                scales[self._block[self._first]] = quantised.scales_of(tokens[self._first], scales.shape[-1])
            else:
                scales[self._block[self._first]] = constants[layer]
            stored = quantised.quantise(tokens, scales[self._block])
            storage[self._block, self._offset] = stored.view(torch.uint8)
            # What was stored is what is seen, here as after a hand-off.
            gathered = storage.index_select(0, self._flat_table).view(quantised.DTYPE)
            blocks = quantised.dequantise(gathered, scales.index_select(0, self._flat_table), states.dtype)
        history = blocks.view(index.rows, -1, *blocks.shape[2:])[:, : index.length]
        if index.stale is not None:
            history.masked_fill_(index.stale, 0)
        return history.transpose(1, 2)

    # A model asks these once, before layer 0 writes: they speak of the state before the forward.

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._index.length - self._index.new

    def get_mask_sizes(self, query_length: Any, layer_idx: int) -> tuple[int, int]:
        return self._index.length, 0

    def __len__(self) -> int:
        return self._layers
