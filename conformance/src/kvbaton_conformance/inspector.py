"""Look at memory without asking the transport: what was there, what should be there now, and what is.

A :class:`ByteInspector` owns regions, on the host or on a device, and knows every byte of them.  Sources hold a
pattern whose bytes are all below 128, destinations a poison whose bytes are all above, both different at every place:
so a byte that was not written, was written twice from different places, or came from elsewhere shows itself.

An :class:`Image` is memory as it should be.  It is built byte by byte with plain Python slices from segment columns,
by none of the code under test::

    expected = destination.image().with_copy(source.image(), chunk.source, chunk.target)
    ...                                          # let the transport work
    destination.check(expected, clause="T3")     # AssertionError: "T3: …" names the first wrong bytes and how they
    relate to segments
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvbaton.connector import MemoryKind, MemoryRegion
from kvbaton.segments import Segments
from kvbaton_conformance import device_memory
from kvbaton_conformance.device_memory import window
from kvbaton_conformance.placement import kind_of

Bytes = npt.NDArray[np.uint8]

#: How many wrong runs a message lists.
_SHOWN = 3


@dataclass(frozen=True)
class Image:
    """Bytes of each region at one moment, a copy; and the segments that were written to make it what it is."""

    regions: Mapping[int, bytes]
    written: tuple[tuple[int, int, int], ...] = ()

    def with_copy(self, source: Image, reads: Segments, writes: Segments) -> Image:
        """This image after each segment of ``reads`` in ``source`` was copied over the one of ``writes`` at its index.

        Raises ``AssertionError`` (C3.2) where a byte would be written twice: then there is no single right answer.
        """
        after = {region: bytearray(data) for region, data in self.regions.items()}
        touched = {region: bytearray(len(data)) for region, data in self.regions.items()}
        for region, offset, length in self.written:
            touched[region][offset : offset + length] = b"\1" * length
        for (region, first, length), (into, start, wanted) in zip(reads.triples(), writes.triples(), strict=True):
            assert length == wanted, f"C3.6: {length} source bytes against {wanted} target bytes"
            assert not any(touched[into][start : start + length]), (
                f"C3.2: bytes {start}..{start + length} of region {into} are written twice"
            )
            touched[into][start : start + length] = b"\1" * length
            after[into][start : start + length] = source.regions[region][first : first + length]
        return Image({region: bytes(data) for region, data in after.items()}, (*self.written, *writes.triples()))


class ByteInspector:
    """The memory of one end, under a test's own eyes.

    ``name`` appears in messages; ``seed`` makes patterns repeatable and different from other inspectors'.
    ``device``: the CUDA device on which it allocates; None: on the host.  On a device every look is a plain copy to the
    host, made when it is asked for and not before: nothing orders it behind the transport but what the transport has
    proved.
    Threading: reads while a transport writes may see anything; look when it is quiet.
    """

    def __init__(self, name: str, seed: int = 0, device: int | None = None) -> None:
        self.name = name
        self.device = device
        self._seed = seed
        self._regions: dict[int, MemoryRegion] = {}

    @property
    def place(self) -> tuple[MemoryKind, int]:
        """Kind of memory and number of the device, as a region has them and ``allocate`` takes them."""
        return kind_of(self.device), self.device or 0  # a region on the host has 0, too

    @property
    def regions(self) -> Sequence[MemoryRegion]:
        return tuple(self._regions.values())

    def allocate(self, id: int, nbytes: int) -> MemoryRegion:
        """A new poisoned region of ``nbytes`` bytes."""
        return self.adopt(device_memory.allocate(id, *self.place, nbytes))

    def adopt(self, region: MemoryRegion) -> MemoryRegion:
        """Take over a region that somebody else allocated, for instance the transport, and poison it."""
        self._regions[region.id] = region
        self.poison(region.id)
        return region

    def poison(self, *ids: int) -> None:
        """Fill regions (all, where none is named) with bytes of 128 and more."""
        for id in ids or self._regions:
            self._fill(id, high=True)

    def fill(self, *ids: int) -> None:
        """Fill regions (all, where none is named) with a source pattern: bytes below 128."""
        for id in ids or self._regions:
            self._fill(id, high=False)

    def read(self, where: Segments) -> bytes:
        """The bytes of each segment now, one after the other."""
        named = set(where.region.tolist())
        views = {id: np.asarray(window(region)) for id, region in self._regions.items() if id in named}
        return b"".join(views[id][start : start + length].tobytes() for id, start, length in where.triples())

    def write(self, where: Segments, data: bytes) -> None:
        """Put bytes there, one segment after the other: what reuses memory does."""
        views, at = {id: window(region) for id, region in self._regions.items()}, 0
        for id, start, length in where.triples():
            views[id][start : start + length] = np.frombuffer(data, np.uint8, length, at)
            at += length

    def image(self) -> Image:
        """What is there now."""
        return Image({id: window(region).tobytes() for id, region in self._regions.items()})

    def check(self, expected: Image, clause: str = "T3") -> None:
        """Raise ``AssertionError``, beginning with ``clause``, unless every byte of every region is as expected."""
        problems: list[str] = []
        count = 0
        for id, data in expected.regions.items():
            wanted, seen = np.frombuffer(data, np.uint8), np.asarray(window(self._regions[id]))
            for start, end in _runs(wanted != seen):
                count += 1
                if count > _SHOWN:  # there may be many, and each is looked for among many segments
                    continue
                problems.append(
                    f"region {id}, bytes {start}..{end}: expected {_hex(wanted[start:end])},"
                    f" found {_hex(seen[start:end])},"
                    f" {_where(id, start, end, expected.written)}"
                )
        if problems:
            more = f"\n  and {count - _SHOWN} more runs" if count > _SHOWN else ""
            lines = "\n  ".join(problems)
            raise AssertionError(f"{clause}: memory of {self.name} is not what it must be:\n  {lines}{more}")

    def untouched(self, since: Image, clause: str = "T3") -> None:
        """Raise ``AssertionError`` unless nothing was written since the image was taken."""
        self.check(Image(since.regions), clause)

    def _fill(self, id: int, high: bool) -> None:
        view = window(self._regions[id])
        generator = np.random.default_rng((self._seed, id, high))
        # eight bytes at a time: drawn one by one they take 25 times as long, and regions are filled for every test
        pattern = generator.integers(1 << 64, size=-(-view.size // 8), dtype=np.uint64).view(np.uint8)[: view.size]
        view[:] = pattern | 128 if high else pattern & 127


def _runs(differs: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """``[start, end)`` of each run of True."""
    edges = np.flatnonzero(np.diff(differs, prepend=False, append=False))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _where(region: int, start: int, end: int, written: Sequence[tuple[int, int, int]]) -> str:
    """How a run of bytes relates to what was to be written."""
    near: tuple[int, str] | None = None
    for number, (into, offset, length) in enumerate(written):
        if into != region:
            continue
        if start < offset + length and end > offset:
            return f"in segment {number} (bytes {offset}..{offset + length})"
        gap = offset - end if end <= offset else start - (offset + length)
        side = "before" if end <= offset else "after"
        if near is None or gap < near[0]:
            near = (
                gap,
                f"outside of all segments, {gap} bytes {side} segment {number} (bytes {offset}..{offset + length})",
            )
    return near[1] if near else "where nothing was to be written"


def _hex(data: Bytes) -> str:
    shown = data[:8].tobytes().hex(" ")
    return f"{shown} …" if data.size > 8 else shown
