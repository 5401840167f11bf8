"""Two processes, and the same bytes moved between them by kvbaton over NIXL and by NIXL's own API, taking turns.

NIXL's own API is used as its manual says is fastest: descriptor lists prepared once, a write made from index arrays,
handles polled in a loop.  The target process polls both all the time.  What is timed, at the source, is from the first
call to the last write known to be done at the target; with packing that includes the target's scatter.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvbaton.connector import Chunk, ConnectorContext, Endpoint, MemoryRegion
from kvbaton.guard import GuardedConnector, GuardLimits
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments, split

#: Segments are scattered over this many times the memory that they need, on both sides.
SPREAD = 2
_SPACES = {"host": "DRAM", "cuda": "VRAM"}


class Memory:
    """Host or device memory of one process, filled."""

    def __init__(self, kind: str, nbytes: int, value: int) -> None:
        self.kind, self.nbytes = kind, nbytes
        if kind == "host":
            self.owner: Any = np.full(nbytes, value, np.uint8)
            self.region = MemoryRegion.of_array(0, self.owner)
        else:
            import torch

            self.owner = torch.full((nbytes,), value, dtype=torch.uint8, device="cuda")
            torch.cuda.synchronize()
            self.region = MemoryRegion(0, "cuda", 0, self.owner.data_ptr(), nbytes, self.owner)

    def count(self, value: int) -> int:
        """Bytes that are ``value``."""
        return int((self.owner == value).sum())


class Raw:
    """NIXL's own API at one end."""

    def __init__(self, name: str, memory: Memory, options: Any) -> None:
        from kvbaton_nixl import library

        self.agent = library.make_agent(f"{name}-{os.getpid()}", options)
        self.space = _SPACES[memory.kind]
        self.base = memory.region.address
        self.agent.register_memory([(self.base, memory.nbytes, 0, "")], self.space)

    def rows(self, base: int, offsets: np.ndarray, length: int) -> Any:
        rows = np.empty((len(offsets), 3), np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = base + offsets, length, 0
        return self.agent.get_xfer_descs(rows, self.space)

    def prepare(self, peer: bytes, base: int, reads: np.ndarray, writes: np.ndarray, length: int) -> None:
        name = self.agent.add_remote_agent(peer)
        self.name = name.decode() if isinstance(name, bytes) else name
        self.ours = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", self.rows(self.base, reads, length))
        self.theirs = self.agent.prep_xfer_dlist(self.name, self.rows(base, writes, length))

    def transfer(self, pieces: list[np.ndarray]) -> None:
        """All segments, in as many writes as kvbaton makes chunks."""
        waiting = []
        for piece in pieces:
            handle = self.agent.make_prepped_xfer("WRITE", self.ours, piece, self.theirs, piece, b"x" * 48)
            self.agent.transfer(handle)
            waiting.append(handle)
        while waiting:
            still = []
            for handle in waiting:
                if self.agent.check_xfer_state(handle) == "DONE":
                    handle.release()
                else:
                    still.append(handle)
            if len(still) == len(waiting):
                os.sched_yield()
            waiting = still


def _guard(name: str, memory: Memory, options: Any) -> GuardedConnector:
    from kvbaton_nixl import plugin

    peer = PeerId.start(name)
    device = 0 if memory.kind == "cuda" else None
    guard = GuardedConnector(
        plugin.open(options, ConnectorContext(peer, device)), transport="nixl", version="1", peer=peer,
        limits=GuardLimits(inflight_bytes=1 << 40, inflight_segments=1 << 30, unreceipted_chunks=1 << 16),
    )  # fmt: skip
    guard.register([memory.region])
    return guard


def target(pipe: Any, kind: str, nbytes: int, options: Any) -> None:
    """The other process: polls until it is told to stop, and says how many bytes have arrived."""
    memory = Memory(kind, nbytes, 0)
    raw = Raw("raw-decode", memory, options)
    guard = _guard("decode-0", memory, options)
    pipe.send((raw.agent.get_agent_metadata(), memory.region.address, guard.endpoint().encode()))
    guard.connect(Endpoint.decode(pipe.recv()))
    turns = 0
    while True:
        busy = bool(guard.poll().receipts)
        raw.agent.get_new_notifs()
        turns += 1
        if not busy:
            os.sched_yield()
            if turns % 64 == 0 and pipe.poll(0):
                match pipe.recv():
                    case "count":
                        pipe.send(memory.count(7))
                    case "stop":
                        break
    guard.disconnect(guard.peer)
    pipe.send("over")
    os._exit(0)  # what is timed is over; the kit looks at ends


class Bench:
    """The source, warm and connected.  ``options`` are the connector's."""

    def __init__(self, kind: str, length: int, count: int, chunk_bytes: int, options: Any, pipe: Any) -> None:
        cells = SPREAD * count
        draw = np.random.default_rng(length)
        self.memory = Memory(kind, cells * length, 7)
        reads, writes = (draw.permutation(cells)[:count] * length for _ in range(2))
        lengths = np.full(count, length)
        zeros = np.zeros(count, np.int32)
        self.batches = split(
            Segments(zeros, reads, lengths), Segments(zeros.copy(), writes, lengths.copy()), chunk_bytes, 1 << 14
        )
        ends = np.cumsum([len(source) for source, _ in self.batches])
        self.pieces = [
            np.arange(end - len(source), end, dtype=np.int32)
            for end, (source, _) in zip(ends, self.batches, strict=True)
        ]
        self.raw = Raw("raw-prefill", self.memory, options)
        self.guard = _guard("prefill-0", self.memory, options)
        metadata, address, endpoint = pipe.recv()
        pipe.send(self.guard.endpoint().encode())
        self.peer = Endpoint.decode(endpoint).peer
        self.guard.connect(Endpoint.decode(endpoint))
        while not any(event.up for event in self.guard.poll().peers):
            os.sched_yield()
        self.raw.prepare(metadata, address, reads, writes, length)

    def by_kvbaton(self) -> None:
        transfer = new_transfer_id()
        waiting = [
            Chunk(transfer, sequence, self.peer, source, goal, source.nbytes)
            for sequence, (source, goal) in enumerate(self.batches)
        ]
        waiting.reverse()
        left = len(waiting)
        while left:
            while waiting and self.guard.submit(waiting[-1]):
                waiting.pop()
            done = self.guard.poll().completions
            for completion in done:
                if completion.outcome.value != "done":
                    raise RuntimeError(f"chunk {completion.sequence}: {completion.error}")
            left -= len(done)
            if not done:
                os.sched_yield()
        self.guard.acknowledge(transfer)

    def by_nixl(self) -> None:
        self.raw.transfer(self.pieces)


@contextlib.contextmanager
def bench(kind: str, length: int, count: int, chunk_bytes: int, options: Any) -> Iterator[Bench]:
    """A source here and a target in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    nbytes = SPREAD * count * length
    process = context.Process(target=target, args=(theirs, kind, nbytes, options), daemon=True)
    process.start()
    try:
        one = Bench(kind, length, count, chunk_bytes, options, ours)
        yield one
        ours.send("count")
        arrived = ours.recv()
        if arrived != count * length:
            raise RuntimeError(f"T3: {arrived} of {count * length} bytes arrived")
        ours.send("stop")
        ours.recv()
    finally:
        process.kill()
        process.join()


def measure(
    kind: str, length: int, count: int, *, chunk_bytes: int = 64 << 20, repeats: int = 15, **options: Any
) -> dict[str, float]:
    """``kvbaton`` and ``nixl``: median GB/s of each; ``ratio`` of them."""
    from kvbaton_nixl.options import NixlOptions

    with bench(kind, length, count, chunk_bytes, NixlOptions(**options)) as one:
        times: dict[str, list[float]] = {"kvbaton": [], "nixl": []}
        for turn in range(repeats + 2):
            for name, way in (("kvbaton", one.by_kvbaton), ("nixl", one.by_nixl)):
                start = time.perf_counter()
                way()
                if turn >= 2:
                    times[name].append(time.perf_counter() - start)
    nbytes = length * count
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    rates = {name: nbytes / seconds / 1e9 for name, seconds in medians.items()}
    return {**rates, "ratio": medians["nixl"] / medians["kvbaton"]}
