"""Memory that parts are received in, and sent from where their segments are many; and the copies from and to it.

A destination receives into *slots* of its own and puts the bytes in their place itself.  So nobody but its own thread
ever writes its regions, and it can stop doing so at once, whatever UCX and the peer are doing (C5.2, C6.4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.connector import DeviceEvent, MemoryRegion
from kvbaton.segments import Segments
from kvbaton_cuda_ipc.parts import INLINE

Bytes = npt.NDArray[np.uint8]


class Mover(Protocol):
    """Copies between a stage's regions and slots.

    ``gather`` and ``scatter`` return ``None`` where the copy is over, else the event that says when it will be; until
    then neither the regions' bytes nor the slot may be touched by anybody else.  They raise nothing but what a device
    does.
    """

    #: Bytes that :meth:`scatter` takes as ``bytes``.
    inline: int
    #: From so many bytes on a segment is better sent as it lies than gathered with others; ``None``: never.
    alone: int | None

    def slot(self, nbytes: int) -> Any:
        """A new slot, for the wire and for this mover; it is freed when nobody has it."""

    def part(self, slot: Any, nbytes: int) -> Any:
        """The first ``nbytes`` of a slot, for the wire."""

    def direct(self, segments: Segments) -> Any | None:
        """The memory of a single segment, for the wire, where it can be sent as it lies; else ``None``."""

    def gather(self, segments: Segments, slot: Any) -> DeviceEvent | None:
        """The segments' bytes, in a row, to the beginning of ``slot``."""

    def scatter(self, slot: Any, segments: Segments) -> DeviceEvent | None:
        """The bytes at the beginning of ``slot`` (or of ``bytes``) over the segments', in their order."""

    def read(self, segments: Segments) -> bytes | None:
        """The segments' bytes in a row, where they can be had at once; else ``None``."""

    def enter(self) -> None:
        """Called before UCX is, on its thread: whatever has to be current is made so."""

    def close(self) -> None:
        """Wait for what is under way, and let go of the memory.  Idempotent."""


class HostMover:
    """numpy, on the calling thread.

    Equal segments on one grid, which is what a paged cache consists of, move in one call per region; anything else goes
    by slices, a third of a microsecond each.
    """

    inline = INLINE
    alone: int | None = 256 << 10

    def __init__(self, regions: Sequence[MemoryRegion]) -> None:
        self._regions: Mapping[int, Bytes] = {region.id: region.view() for region in regions}

    def slot(self, nbytes: int) -> Bytes:
        return np.empty(nbytes, np.uint8)  # pages come with the first use

    def part(self, slot: Bytes, nbytes: int) -> Bytes:
        return slot[:nbytes]

    def direct(self, segments: Segments) -> Bytes | None:
        if len(segments) != 1:
            return None
        offset = int(segments.offset[0])
        return self._regions[int(segments.region[0])][offset : offset + int(segments.length[0])]

    def gather(self, segments: Segments, slot: Bytes) -> None:
        grid = self._grid(segments)
        if grid is not None:
            items, index = grid
            # every index is within bounds; "clip" is what lets numpy write to `out` directly
            items.take(index, out=slot[: segments.nbytes].view(items.dtype), mode="clip")
            return
        place, row = 0, slot.data
        for region, offset, length in segments.triples():
            row[place : place + length] = self._regions[region].data[offset : offset + length]
            place += length

    def scatter(self, slot: Bytes | bytes, segments: Segments) -> None:
        grid = self._grid(segments)
        if grid is not None:
            items, index = grid
            items.put(index, np.frombuffer(slot, items.dtype, len(segments)), mode="clip")
            return
        place, row = 0, slot.data if isinstance(slot, np.ndarray) else memoryview(slot)
        for region, offset, length in segments.triples():
            self._regions[region].data[offset : offset + length] = row[place : place + length]
            place += length

    def read(self, segments: Segments) -> bytes:
        return b"".join(
            [self._regions[region].data[offset : offset + length] for region, offset, length in segments.triples()]
        )

    def _grid(self, segments: Segments) -> tuple[npt.NDArray[np.void], npt.NDArray[np.int64]] | None:
        """The region as items as long as a segment, and which of them are meant; ``None`` where it is not so simple."""
        lengths, regions = segments.length, segments.region
        if len(segments) < 2 or (lengths != lengths[0]).any() or (regions != regions[0]).any():
            return None
        length, region = int(lengths[0]), self._regions[int(regions[0])]
        shift = int(segments.offset[0]) % length
        index = (segments.offset - shift) // length
        if (index * length + shift != segments.offset).any():
            return None
        whole = (len(region) - shift) // length
        return region[shift : shift + whole * length].view(np.dtype((np.void, length))), index

    def enter(self) -> None:
        """Nothing is current."""

    def close(self) -> None:
        self._regions = {}
