"""Two processes, and the same bytes moved between them by kvbaton over NIXL and by NIXL's own API, taking turns.

NIXL's own API is used as its manual says is fastest: descriptor lists prepared once, a write made from index arrays,
handles polled in a loop.  The target process polls whichever has its turn.  What is timed, at the source, is from the
first call to the last write known to be done at the target; with packing that includes the target's scatter.

Segments lie scattered over twice the memory that they need, on both sides.  Before anything is timed, each way of
kvbaton's moves every shape once into memory that was cleared, and every byte of the target is looked at.

An end of :mod:`kvbaton.pair` has one connector: here several of them, with other options each, and NIXL's own API take
turns over the same memory of the same two processes, so that a ratio has nothing in it but the way.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from kvbaton.connector import Chunk, ConnectorContext, ConnectorPlugin, Endpoint, MemoryRegion
from kvbaton.guard import GuardedConnector, GuardLimits
from kvbaton.identity import PeerId, TransferId, new_transfer_id
from kvbaton.segments import Segments, split

KiB, MiB = 1 << 10, 1 << 20
#: Segments are scattered over this many times the memory that they need, on both sides.
SPREAD = 2
#: What a chunk is at most in a deployment that is not told otherwise.
CHUNK_BYTES = 64 * MiB
#: The way that is not kvbaton's.
RAW = "nixl"
#: Seconds for the longest thing that a target is asked for.
_PATIENCE = 120.0


class Memory:
    """Host memory, or that of CUDA device ``device``, of one process; zeroed."""

    def __init__(self, kind: str, device: int, nbytes: int) -> None:
        self.kind, self.device, self.nbytes = kind, device, nbytes
        if kind == "host":
            self.owner: Any = np.zeros(nbytes, np.uint8)
            self.region = MemoryRegion.of_array(0, self.owner)
        else:
            import torch

            self.owner = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
            torch.cuda.synchronize(device)
            self.region = MemoryRegion(0, "cuda", device, self.owner.data_ptr(), nbytes, self.owner)

    def fill(self, length: int, values: np.ndarray) -> None:
        """Cell after cell of ``length`` bytes, each all of one value."""
        cells = self.owner[: len(values) * length].reshape(len(values), length)
        cells[:] = self._column(values)
        self._wait()

    def wrong(self, length: int, values: np.ndarray) -> int:
        """How many bytes are not what :meth:`fill` would have made them."""
        cells = self.owner[: len(values) * length].reshape(len(values), length)
        return int((cells != self._column(values)).sum())

    def _column(self, values: np.ndarray) -> Any:
        if self.kind == "host":
            return values[:, None]
        import torch

        return torch.from_numpy(values).to(self.owner.device)[:, None]

    def _wait(self) -> None:
        if self.kind == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


class Shape:
    """``count`` segments of ``length`` bytes, and where they are at either end; the same in both processes."""

    def __init__(self, length: int, count: int) -> None:
        self.length, self.count, self.cells = length, count, SPREAD * count
        draw = np.random.default_rng(length)
        self.reads, self.writes = (draw.permutation(self.cells)[:count] for _ in range(2))

    def batches(self, chunk_bytes: int, chunk_segments: int) -> list[tuple[Segments, Segments]]:
        """Source and target of each chunk."""
        lengths, zeros = np.full(self.count, self.length), np.zeros(self.count, np.int32)
        here, there = (
            Segments(zeros.copy(), cells * self.length, lengths.copy()) for cells in (self.reads, self.writes)
        )
        return split(here, there, chunk_bytes, chunk_segments)

    def source(self) -> np.ndarray:
        """What each cell of the source holds: never 0."""
        return (np.arange(self.cells) % 251 + 1).astype(np.uint8)

    def target(self) -> np.ndarray:
        """What each cell of the target holds once everything has come."""
        cells = np.zeros(self.cells, np.uint8)
        cells[self.writes] = self.source()[self.reads]
        return cells


def raw(memory: Memory) -> Any:
    """One end of NIXL's own API, as ``kvbaton bench`` uses it."""
    from kvbaton_nixl.baseline import RawNixl
    from kvbaton_nixl.options import NixlOptions

    return RawNixl(NixlOptions(), [memory.region])


def guarded(plugin: ConnectorPlugin, name: str, memory: Memory, options: Mapping[str, Any]) -> GuardedConnector:
    """One end of kvbaton, with budgets that nothing here exhausts."""
    peer = PeerId.start(name)
    device = memory.device if memory.kind == "cuda" else None
    guard = GuardedConnector(
        plugin.open(plugin.Options(**options), ConnectorContext(peer, device)), transport=plugin.name, version="1",
        peer=peer, limits=GuardLimits(inflight_bytes=1 << 40, inflight_segments=1 << 30, unreceipted_chunks=1 << 16),
    )  # fmt: skip
    guard.register([memory.region])
    return guard


def wait_until_up(guard: GuardedConnector) -> None:
    """The guard's own deadline bounds it."""
    while True:
        for event in guard.poll().peers:
            if event.up:
                return
            raise RuntimeError(f"kvbaton: {event}")
        os.sched_yield()


def answer(pipe: Any) -> Any:
    """What the target says."""
    if not pipe.poll(_PATIENCE):
        raise RuntimeError(f"the target has not answered within {_PATIENCE:g} s")
    return pipe.recv()


def hand_over(
    guard: GuardedConnector,
    transfer: TransferId,
    peer: PeerId,
    batches: Sequence[tuple[Segments, Segments]],
    idle: Callable[[], object],
) -> None:
    """Submit everything and poll until the source knows it done; ``idle`` is called whenever nothing was.

    The transfer has its id when its request is admitted, long before there is anything to hand over (C1.2)."""
    left = len(batches)
    coming = (
        Chunk(transfer, sequence, peer, source, goal, source.nbytes) for sequence, (source, goal) in enumerate(batches)
    )
    chunk = next(coming, None)
    while left:
        while chunk is not None and guard.submit(chunk):
            chunk = next(coming, None)
        done = guard.poll().completions
        for completion in done:
            if completion.outcome.value != "done":
                raise RuntimeError(f"chunk {completion.sequence}: {completion.error}")
        left -= len(done)
        if not done:
            idle()


def target(pipe: Any, kind: str, device: int, nbytes: int, ways: Mapping[str, Mapping[str, Any]]) -> None:
    """The other process: polls the way that has its turn, and says what is wrong with what has come."""
    from kvbaton_nixl import plugin

    memory = Memory(kind, device, nbytes)
    other = raw(memory)
    guards = {way: guarded(plugin, f"decode-{way}", memory, options) for way, options in ways.items()}
    endpoints = {way: guard.endpoint().encode() for way, guard in guards.items()}
    pipe.send((other.address(), endpoints))
    for way, endpoint in pipe.recv().items():
        guards[way].connect(Endpoint.decode(endpoint))
    turn, idle = RAW, 0
    while True:
        if turn == RAW:
            busy = bool(other.arrived())
        else:
            busy = bool(guards[turn].poll())
        if busy:
            continue
        os.sched_yield()
        idle += 1
        if idle % 64 == 0 and pipe.poll(0):
            match pipe.recv():
                case "turn", turn:
                    pipe.send(turn)
                case "clear", length, cells:
                    memory.fill(length, np.zeros(cells, np.uint8))
                    pipe.send("cleared")
                case "check", length, count:
                    pipe.send(memory.wrong(length, Shape(length, count).target()))
                case "stop":
                    break
    pipe.send("over")
    os._exit(0)  # what is timed is over; how ends are closed is for the kit to look at


class Source:
    """The source, connected in every way."""

    def __init__(self, pipe: Any, kind: str, devices: tuple[int, int], nbytes: int, ways: Mapping[str, Any]) -> None:
        from kvbaton_nixl import plugin

        self._pipe = pipe
        self._memory = Memory(kind, devices[0], nbytes)
        self._raw = raw(self._memory)
        self._guards = {way: guarded(plugin, f"prefill-{way}", self._memory, options) for way, options in ways.items()}
        address, endpoints = answer(pipe)
        pipe.send({way: guard.endpoint().encode() for way, guard in self._guards.items()})
        self._raw.meet(address)
        self._peers = {way: Endpoint.decode(endpoint).peer for way, endpoint in endpoints.items()}
        for way, guard in self._guards.items():
            self._ask("turn", way)
            guard.connect(Endpoint.decode(endpoints[way]))
            wait_until_up(guard)

    def _ask(self, *words: Any) -> Any:
        self._pipe.send(words)
        return answer(self._pipe)

    def take(self, length: int, count: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        """What is moved from now on.  Every way of kvbaton's has moved it once, and was looked at (T3)."""
        shape = self._shape = Shape(length, count)
        self._memory.fill(length, shape.source())
        self._batches = shape.batches(chunk_bytes, 1 << 14)
        for way in self._guards:
            self._ask("clear", length, shape.cells)
            self.turn(way)
            wrong = self._ask("check", length, count)
            if wrong:
                raise RuntimeError(f"T3: {way}: {wrong} bytes of {count} x {length} are wrong")
        self._raw.prepare_source(self._batches)

    def turn(self, way: str) -> float:
        """Move everything once; seconds."""
        self._ask("turn", way)
        transfer = new_transfer_id()
        start = time.perf_counter()
        if way == RAW:
            self._raw.move()
        else:
            guard = self._guards[way]
            hand_over(guard, transfer, self._peers[way], self._batches, os.sched_yield)
            guard.acknowledge(transfer)
        return time.perf_counter() - start

    def rates(self, ways: Sequence[str], repeats: int) -> dict[str, float]:
        """GB/s of each way, the median over ``repeats`` in which they take turns; and two rounds before them."""
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(repeats + 2):
            for way in ways:
                spent = self.turn(way)
                if turn >= 2:
                    seconds[way].append(spent)
        nbytes = self._shape.length * self._shape.count
        return {way: nbytes / statistics.median(spent) / 1e9 for way, spent in seconds.items()}

    def copy_rate(self) -> float:
        """GB/s of a copy within the source's own memory: one thread's memcpy, or the device's own."""
        half = min(self._memory.nbytes // 2, 1 << 30)
        here, there = self._memory.owner[:half], self._memory.owner[half : 2 * half]
        spent = []
        for _ in range(7):
            self._memory._wait()
            start = time.perf_counter()
            if self._memory.kind == "host":
                np.copyto(there, here)
            else:
                there.copy_(here)
            self._memory._wait()
            spent.append(time.perf_counter() - start)
        return half / statistics.median(spent) / 1e9


@contextlib.contextmanager
def pair(
    kind: str, nbytes: int, ways: Mapping[str, Mapping[str, Any]], devices: tuple[int, int] = (0, 0)
) -> Iterator[Source]:
    """A source here and a target in a process of its own, with ``nbytes`` of memory each.

    ``ways``: the connector's options for each way of kvbaton's; :data:`RAW` is there besides.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, kind, devices[1], nbytes, ways), daemon=True)
    process.start()
    theirs.close()  # so that its death is the end of ours
    try:
        yield Source(ours, kind, devices, nbytes, ways)
        ours.send("stop")
        answer(ours)
    finally:
        process.kill()
        process.join()


# -- the crossover -----------------------------------------------------------------------------------------------------

CROSSOVER_WAYS: dict[str, dict[str, Any]] = {
    "auto": {},
    "never": {"packing": "never"},
    "always": {"packing": "always"},
}


def crossover(source: Source, lengths: Sequence[int], total: int, repeats: int) -> list[dict[str, float]]:
    """GB/s of each way for each length of segment, ``total`` bytes at a time and at most 8192 segments."""
    found = []
    for length in lengths:
        count = max(8, min(8192, total // length))
        source.take(length, count)
        found.append({"length": length, "count": count, **source.rates([RAW, *CROSSOVER_WAYS], repeats)})
    return found


def crossing(points: Sequence[Mapping[str, float]]) -> float:
    """The length at which *never* overtakes *always*, between two measured ones by a line over their logarithms; the
    largest measured where it does not."""
    for before, after in pairwise(points):
        was, is_ = (np.log(point["always"] / point["never"]) for point in (before, after))
        if was > 0 >= is_:
            share = was / (was - is_)
            return float(before["length"] * (after["length"] / before["length"]) ** share)
    return float(points[-1]["length"] if points[-1]["always"] > points[-1]["never"] else points[0]["length"])


def plot_crossover(points: Sequence[Mapping[str, float]], title: str, below: int, path: Any) -> None:
    """Rate over length of segment, a line for each way; ``below`` is where *auto* changes over."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "kvbaton"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    labels = {RAW: "NIXL's own API", "never": "packing = never", "always": "packing = always", "auto": "packing = auto"}
    styles = {RAW: "k--", "never": "o-", "always": "s-", "auto": "x:"}
    for way, label in labels.items():
        axes.plot(
            [point["length"] / KiB for point in points], [point[way] for point in points], styles[way], label=label
        )
    axes.axvline(below / KiB, color="grey", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("length of a segment, KiB (grey line: auto packs below)")
    axes.set_ylabel("GB/s")
    axes.set_title(title)
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
