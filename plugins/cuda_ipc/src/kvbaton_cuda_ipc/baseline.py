"""UCX on its own, for ``kvbaton bench`` to set beside what kvbaton makes of it; nothing else uses this.

One tagged message for each segment, all posted at once, as a program would that has UCX and no more: without error
handling, too, so that UCX may take faster ways than :mod:`kvbaton_cuda_ipc.library` says are safe for a stage.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from typing import Any

from kvbaton.connector import MemoryRegion
from kvbaton.segments import Segments
from kvbaton_cuda_ipc import library
from kvbaton_cuda_ipc.options import UcxOptions

_TAG = 77


class RawUcx:
    """See :class:`~kvbaton.bench.baseline.Baseline`.  Messages come in the order in which they were sent."""

    name = "UCX, a message each"
    tells = True

    def __init__(self, options: UcxOptions, regions: Sequence[MemoryRegion]) -> None:
        self._ucxx = library.load(options.log_level)
        self._context = self._ucxx.UCXContext(dict(options.ucx), (self._ucxx.Feature.TAG,))
        self._worker = self._ucxx.UCXWorker(self._context)
        self._regions = {region.id: region for region in regions}
        self._endpoint: Any = None
        self._buffers: list[list[Any]] = []
        self._receiving: deque[Any] = deque()
        self._left: deque[int] = deque()

    def address(self) -> bytes:
        return bytes(self._worker.address)

    def meet(self, peer: bytes) -> None:
        theirs = self._ucxx.UCXAddress.create_from_buffer(peer)
        self._endpoint = self._worker.create_endpoint_from_worker_address(theirs, False)

    def prepare_source(self, chunks: Sequence[tuple[Segments, Segments]]) -> None:
        self._buffers = [self._of(reads) for reads, _ in chunks]

    def prepare_target(self, writes: Sequence[Segments]) -> None:
        self._buffers = [self._of(segments) for segments in writes]

    def begin(self) -> None:
        tag, mask = self._ucxx.UCXXTag(_TAG), self._ucxx.UCXXTagMask((1 << 64) - 1)
        self._left = deque(len(buffers) for buffers in self._buffers)
        for buffers in self._buffers:
            self._receiving.extend(self._worker.tag_recv(buffer, tag, mask) for buffer in buffers)

    def move(self) -> None:
        tag = self._ucxx.UCXXTag(_TAG)
        requests = [self._endpoint.tag_send(buffer, tag) for buffers in self._buffers for buffer in buffers]
        for request in requests:
            while not request.completed:
                if not self._worker.progress_once():
                    os.sched_yield()
            request.check_error()

    def arrived(self) -> int:
        self._worker.progress()
        chunks = 0
        while self._receiving and self._receiving[0].completed:
            self._receiving.popleft().check_error()
            self._left[0] -= 1
            if not self._left[0]:
                self._left.popleft()
                chunks += 1
        return chunks

    def close(self) -> None:
        # the rest goes with the process, which exits now: nothing is cancelled here, so nothing keeps it
        self._receiving.clear()
        self._buffers = []
        if self._endpoint is not None:
            self._endpoint.close_blocking(10_000_000, 10)
        self._endpoint = self._worker = self._context = None

    def _of(self, segments: Segments) -> list[Any]:
        return [
            library.buffer_of(_bytes(self._regions[region], offset, length))
            for region, offset, length in segments.triples()
        ]


class _Bytes:
    """A part of a device region in the form that UCX reads; it keeps the region alive."""

    def __init__(self, region: MemoryRegion, offset: int, length: int) -> None:
        self._region = region
        self.__cuda_array_interface__ = {
            "shape": (length,), "typestr": "|u1", "data": (region.address + offset, False), "version": 3
        }  # fmt: skip


def _bytes(region: MemoryRegion, offset: int, length: int) -> Any:
    return region.view()[offset : offset + length] if region.kind == "host" else _Bytes(region, offset, length)
