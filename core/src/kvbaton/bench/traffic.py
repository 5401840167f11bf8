"""One request's KV as a hand-off sees it: where its blocks lie on either side, and the segments that carry them.

The segments are those that core's own planner makes of block tables (:class:`~kvbaton.geometry.KVMap`), so that their
size and count are what the framework would move for this model, this block size and this layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from kvbaton.bench.models import Model
from kvbaton.errors import SettingsError
from kvbaton.geometry import Component, KVGeometry, KVMap, Plane
from kvbaton.segments import Segments, coalesce, joined

#: ``block``: all layers of a block lie together, K and V apart, as in ``[block, layer, token, ...]`` (the reference
#: engine).  ``layer``: every layer has a tensor of its own, as in vLLM: more and smaller segments.
Layout = Literal["block", "layer"]
#: Region ids of the cache and of the final payloads.
KV, FINAL = 0, 1


@dataclass(frozen=True)
class Traffic:
    """Requests of ``tokens`` tokens in blocks of ``block`` tokens.

    ``scattered``: a request's blocks lie anywhere in the cache, and elsewhere on the other side, as in a cache that has
    been in use; else one behind the other on both sides.
    """

    model: Model
    tokens: int = 2048
    block: int = 16
    layout: Layout = "block"
    scattered: bool = True

    def __post_init__(self) -> None:
        for name in ("tokens", "block"):
            if getattr(self, name) < 1:
                raise SettingsError(f"--{name} {getattr(self, name)}: at least 1", key=name, origin=None)
        if self.tokens % self.block:
            down = self.tokens - self.tokens % self.block
            nearest = " or ".join(str(n) for n in (down, down + self.block) if n)
            raise SettingsError(
                f"--tokens {self.tokens}: not a multiple of --block {self.block}, so that the last block would be cut"
                f" into other segments than the rest; take {nearest} tokens",
                key="tokens", origin=None,
            )  # fmt: skip

    # -- size ----------------------------------------------------------------------------------------------------------

    @property
    def blocks(self) -> int:
        """Blocks of one request in each plane."""
        return self.tokens // self.block

    @property
    def request_bytes(self) -> int:
        """What one request brings over, the final payload included."""
        return self.tokens * self.model.token_bytes + self.model.final_bytes

    @property
    def pieces(self) -> int:
        """Of one request, before what lies side by side is joined: what it takes to plan it."""
        model = self.model
        return model.planes * model.layers * len(model.components) * self.blocks

    def kv_bytes(self, requests: int) -> int:
        """The cache's storage for so many requests."""
        return requests * self.tokens * self.model.token_bytes

    def final_stored(self, requests: int) -> int:
        return requests * max(self.model.final_bytes, 1)

    # -- place ---------------------------------------------------------------------------------------------------------

    def geometry(self, requests: int) -> KVGeometry:
        """A cache with room for so many requests and nothing else."""
        model = self.model
        blocks = requests * self.blocks * model.planes
        components, base = [], 0
        for token_bytes in model.components:
            extent = token_bytes * self.block
            for layer in range(model.layers):
                if self.layout == "block":
                    place, stride = base + layer * extent, model.layers * extent
                else:
                    place, stride = base + layer * blocks * extent, extent
                components.append(Component(KV, place, stride, token_bytes, model.dtype))
            base += blocks * model.layers * extent
        return KVGeometry(
            {"bench": str(model)}, self.block,
            tuple(Plane(f"depth{plane}", tuple(components), blocks) for plane in range(model.planes)),
            model.final_bytes, FINAL, 0, model.final_bytes, requests if model.final_bytes else 0,
        )  # fmt: skip

    def tables(self, requests: int, seed: int) -> npt.NDArray[np.int64]:
        """Block ids, of shape ``[requests, planes, blocks]``: every block of the cache once.

        Where they are scattered no block of a request lies right behind the one before it: none is merged with another.
        """
        shape = requests, self.model.planes, self.blocks
        count = int(np.prod(shape))
        if not self.scattered:
            return np.arange(count, dtype=np.int64).reshape(shape)
        draw = np.random.default_rng(seed)
        ids = draw.permutation(count).astype(np.int64)
        first = np.arange(1, count) % (shape[1] * shape[2]) == 0
        while True:
            # about one in a row, however long it is
            behind = 1 + np.flatnonzero((np.diff(ids) == 1) & ~first)
            if not len(behind):
                return ids.reshape(shape)
            for at, other in zip(behind, draw.integers(count, size=len(behind)), strict=True):
                ids[at], ids[other] = ids[other], ids[at]

    # -- one request, as segments --------------------------------------------------------------------------------------

    @cached_property
    def segments(self) -> tuple[Segments, Segments]:
        """Source and target of one request, in a cache that has room for it alone."""
        geometry = self.geometry(1)
        source, target = self.tables(1, 1)[0], self.tables(1, 2)[0]
        planned = KVMap(geometry, geometry).plan(list(source), list(target), 0, self.tokens)
        final = geometry.final_segment(0)
        return coalesce(*joined(planned, (final, final))) if len(final) else planned

    @property
    def segment_bytes(self) -> int:
        """Of most segments; the final payload is another one."""
        return int(np.median(self.segments[0].length))
