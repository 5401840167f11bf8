"""The transport's own kernel alone, for ``kvbaton bench`` to set beside what kvbaton makes of it.

One launch for each chunk over a mapping of its own, all of them started at once, and nobody is told: what the device
gives to copies like these, and so what words, checks and events cost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from kvbaton.connector import MemoryRegion
from kvbaton.errors import ConnectError
from kvbaton.segments import Segments
from kvbaton_cuda_ipc.driver import Cuda
from kvbaton_cuda_ipc.mapping import Mapping, Offer, offer, unreachable
from kvbaton_cuda_ipc.mover import Mover
from kvbaton_cuda_ipc.runs import NOWHERE, AddressBook, Table


class RawKernel:
    """See :class:`~kvbaton.bench.baseline.Baseline`.  ``mover`` makes what copies, at the source, when it is needed."""

    name = "its kernel alone"
    tells = False

    def __init__(self, cuda: Cuda, mover: Callable[[], Mover], regions: Sequence[MemoryRegion]) -> None:
        self._cuda = cuda
        self._make = mover
        self._mover: Mover | None = None
        self._device = regions[0].device
        cuda.enter(self._device)
        self._offer = offer(cuda, regions)
        self._here = AddressBook({region.id: region.address for region in regions})
        self._mapped: Mapping | None = None
        self._theirs: Offer | None = None
        self._launches: list[Table] = []
        self._origins = NOWHERE

    def address(self) -> bytes:
        return self._offer.encode()

    def meet(self, peer: bytes) -> None:
        self._theirs = Offer.decode(peer)

    def prepare_source(self, chunks: Sequence[tuple[Segments, Segments]]) -> None:
        if self._mapped is None:
            assert self._theirs is not None, "meet() comes first"
            reason = unreachable(self._cuda, self._theirs, self._device, "the target")
            if reason:
                raise ConnectError(reason)
            self._mapped = Mapping(self._cuda, self._theirs, "the target")
            self._mover = self._make()
        here, there = self._here, AddressBook(self._mapped.addresses)
        self._origins = here.origin, there.origin
        self._launches = [np.stack((reads.offset, writes.offset, reads.length)) for reads, writes in chunks]
        for runs, (reads, writes) in zip(self._launches, chunks, strict=True):
            here.locate([reads], runs[0])
            there.locate([writes], runs[1])

    def prepare_target(self, writes: Sequence[Segments]) -> None:
        """One-sided: the source says where."""

    def begin(self) -> None:
        """One-sided: nothing is posted at the target."""

    def move(self) -> None:
        assert self._mover is not None, "prepare_source() comes first"
        events = [self._mover.start(runs, origins=self._origins) for runs in self._launches]
        for event in events:
            while not event.query():
                pass

    def arrived(self) -> int:
        return 0

    def close(self) -> None:
        if self._mover is not None:
            self._mover.settle()
            self._mover.close()
        if self._mapped is not None:
            self._mapped.close()
        self._mover = self._mapped = None
