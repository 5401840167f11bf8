"""The memory of one end of a pair, on the host or on a CUDA device, and what every byte of it should be.

A source holds a *pattern*, a target *poison*, which no byte of a pattern equals: a byte that was not written shows
itself, and so does one that came from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvbaton import cuda
from kvbaton.connector import MemoryKind, MemoryRegion
from kvbaton.guard import GuardedConnector
from kvbaton.pair.words import Found
from kvbaton.segments import Segments

Bytes = npt.NDArray[np.uint8]

POISON: Final = 0xEE
#: A prime: what is misplaced by a power of two, or by a block, is seen.
_PERIOD: Final = 1_048_573
#: Bytes that are looked at at once.
_PIECE: Final = 64 << 20


class Pattern:
    """Endless bytes for each region, the same wherever ``seed`` is the same."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._known: dict[int, Bytes] = {}

    def of(self, region: int, offset: int, length: int) -> Bytes:
        """``length`` bytes of it, from ``offset`` on; read only."""
        base = self._known.get(region)
        if base is None:
            once = np.random.default_rng((self._seed, region)).integers(256, size=_PERIOD, dtype=np.uint8)
            once[once == POISON] = POISON + 1
            base = self._known[region] = np.tile(once, 2)
        start = offset % _PERIOD
        if length <= _PERIOD:
            return base[start : start + length]
        return np.resize(base[start : start + _PERIOD], length)


class Memory:
    """Regions ``0``, ``1`` and so on of so many bytes, allocated by the transport where it asks for that.

    Ownership: device memory lives until :meth:`free`, which comes after the connector was closed.
    """

    def __init__(self, guard: GuardedConnector, kind: MemoryKind, device: int, lengths: Sequence[int]) -> None:
        self.kind, self.device = kind, device
        self._ours = cuda.Allocations()
        self._elsewhere: dict[int, list[int]] = {}
        own = guard.capabilities.memory_origin == "any"
        self.regions = [
            self._allocated(id, nbytes) if own else guard.allocate(id, kind, device, nbytes)
            for id, nbytes in enumerate(lengths)
        ]

    def fill(self, seed: int) -> None:
        """With the pattern of ``seed``; with poison where it is 0."""
        pattern = Pattern(seed)
        for region in self.regions:
            if not seed:
                self._poison(region)
                continue
            for start in range(0, region.length, _PIECE):
                length = min(_PIECE, region.length - start)
                self._write(region, start, pattern.of(region.id, start, length))

    def check(self, reads: Segments, writes: Segments, seed: int) -> Found:
        """Compare with what copying ``reads`` out of the pattern of ``seed`` over ``writes`` makes of poison.

        Afterwards all of it is poison again.
        """
        pattern = Pattern(seed)
        images = {region.id: self.image(region) for region in self.regions}
        wrong, first = 0, (-1, -1)
        for (source, offset, length), (target, at, _) in zip(reads.triples(), writes.triples(), strict=True):
            for start in range(0, length, _PERIOD):
                count = min(_PERIOD, length - start)
                seen = images[target][at + start : at + start + count]
                differs = seen != pattern.of(source, offset + start, count)
                if differs.any():
                    first = (target, at + start + int(differs.argmax())) if not wrong else first
                    wrong += int(differs.sum())
                seen[:] = POISON
        outside = 0
        for id, image in images.items():
            for start in range(0, len(image), _PIECE):
                differs = image[start : start + _PIECE] != POISON
                if differs.any():
                    first = (id, start + int(differs.argmax())) if first == (-1, -1) else first
                    outside += int(differs.sum())
        self.fill(0)
        return Found(wrong, outside, *first)

    def image(self, region: MemoryRegion) -> Bytes:
        """The bytes of a region: shared where it is the host's, a copy where it is a device's."""
        if region.kind == "host":
            return region.view()
        image = np.empty(region.length, np.uint8)
        cuda.require().read(image.ctypes.data, region.address, region.length)
        return image

    def elsewhere(self, device: int) -> list[int]:
        """Where memory as large as each of ours is on a device, for :meth:`copy`; the same whenever it is asked for."""
        if device not in self._elsewhere:
            self._elsewhere[device] = [self._ours.allocate(device, region.length) for region in self.regions]
            cuda.require().enter(self.device)
        return self._elsewhere[device]

    def copy(self, reads: Segments, writes: Segments, places: Sequence[int]) -> None:
        """Copy from our regions of a device to ``places``; it is over when this returns."""
        driver = cuda.require()
        bases = [region.address for region in self.regions]
        for (source, offset, length), (target, at, _) in zip(reads.triples(), writes.triples(), strict=True):
            driver.copy(places[target] + at, bases[source] + offset, length)
        driver.settle()

    def free(self) -> None:
        """Give device memory back."""
        self._ours.free()

    def _allocated(self, id: int, nbytes: int) -> MemoryRegion:
        if self.kind == "host":
            return MemoryRegion.of_array(id, np.zeros(nbytes, np.uint8))
        address = self._ours.allocate(self.device, nbytes)
        return MemoryRegion(id, self.kind, self.device, address, nbytes, self)

    def _poison(self, region: MemoryRegion) -> None:
        if region.kind == "host":
            region.view()[:] = POISON
        else:
            cuda.require().fill(region.address, POISON, region.length)

    def _write(self, region: MemoryRegion, start: int, piece: Bytes) -> None:
        if region.kind == "host":
            region.view()[start : start + len(piece)] = piece
        else:
            piece = np.ascontiguousarray(piece)
            cuda.require().write(region.address + start, piece.ctypes.data, len(piece))
