"""P6: a burst of 32 requests over NIXL while the source's main thread is busy in steps of 90 ms.

Two processes with the stage's own pump (:class:`kvbaton.stage.pump.Pump`) and its pauses, host memory, each request
256 segments of 1 MiB in chunks of 64 MiB.  The source's main thread waits (*idle*), or computes: *large kernels* are
one call of torch that releases the interpreter for 90 ms; *launch-bound* are thousands of small ones, which want the
interpreter all the time.  In each round the three take turns, and each kind of step is also timed with the pump parked.

Figures: rate of the burst, busy over idle; median time from a chunk's submission to the poll that saw it done, busy
over idle; median time of a step, with the burst over without.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvbaton.bounds import GuardLimits
from kvbaton.connector import Chunk, ConnectorContext, Endpoint, MemoryRegion
from kvbaton.guard import GuardedConnector
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments, split
from kvbaton.settings import PumpSettings
from kvbaton.stage.pump import Pump

MiB = 1 << 20
REQUESTS, SEGMENTS, LENGTH, CHUNK_BYTES = 32, 256, MiB, 64 * MiB
STEP = 0.09
NBYTES = 2 * SEGMENTS * LENGTH


def open_guard(name: str, memory: np.ndarray) -> GuardedConnector:
    from kvbaton_nixl import plugin

    peer = PeerId.start(name)
    guard = GuardedConnector(
        plugin.open(plugin.Options(), ConnectorContext(peer)), transport="nixl", version="1", peer=peer,
        limits=GuardLimits(),
    )  # fmt: skip
    guard.register([MemoryRegion.of_array(0, memory)])
    return guard


class Pumped:
    """What either stage does on its pump thread, without the rest of a stage."""

    urgent = imminent = True
    flowing = False

    def __init__(self, guard: GuardedConnector, peer: PeerId | None = None) -> None:
        self.ended = False
        self.waiting: deque[Chunk] = deque()
        self.submitted: dict[tuple[str, int], float] = {}
        self.seconds: list[float] = []
        self.failed: BaseException | None = None
        self.over = threading.Event()
        #: When the last chunk was seen done.
        self.finished = 0.0
        self._left = 0
        self._guard, self._peer = guard, peer
        self._woken = threading.Event()

    @property
    def live(self) -> bool:
        return self._left > 0 or self._peer is None  # a destination is polled for the sender's sake

    def burst(self, chunks: list[Chunk]) -> None:
        """From the main thread: submit these as there is room, and set :attr:`over` when all are done."""
        self.seconds, self._left = [], len(chunks)
        self.over.clear()
        self.waiting.extend(chunks)
        self._woken.set()

    def advance(self) -> bool:
        busy = False
        while self.waiting:
            chunk = self.waiting[0]
            began = time.perf_counter()
            if not self._guard.submit(chunk):
                break
            self.submitted[chunk.transfer, chunk.sequence] = began
            self.waiting.popleft()
            busy = True
        progress = self._guard.poll()
        now = time.perf_counter()
        for completion in progress.completions:
            if completion.outcome.value != "done":
                raise RuntimeError(f"chunk {completion.sequence}: {completion.error}")
            self.seconds.append(now - self.submitted.pop((completion.transfer, completion.sequence)))
            self._left -= 1
            if not self._left:
                self.finished = now
                self.over.set()
        self.flowing = busy or bool(progress)
        return self.flowing

    def wait(self, timeout: float) -> None:
        if self.live:
            self._guard.wait(timeout)
        else:
            self._woken.wait(min(timeout, 0.05))  # and the peer's pings are heard
            self._woken.clear()

    def fail(self, error: BaseException) -> None:
        self.failed = error
        self.over.set()

    def start(self, name: str) -> None:
        self._guard.detach()
        pauses = PumpSettings()
        Pump(self, name=name, idle_min=pauses.idle_min, idle_max=pauses.idle_max, failed=self.fail).start()


def target(pipe: Any) -> None:
    """The decode stage: its main thread waits, its pump polls."""
    memory = np.zeros(NBYTES, np.uint8)
    guard = open_guard("decode-0", memory)
    pipe.send(guard.endpoint().encode())
    guard.connect(Endpoint.decode(pipe.recv()))
    pumped = Pumped(guard)
    pumped.start("pump-decode")
    pipe.recv()
    pipe.send((pumped.failed, int((memory == 7).sum())))
    os._exit(0)


@contextlib.contextmanager
def stages() -> Iterator[tuple[Pumped, Callable[[], list[Chunk]]]]:
    """The source's pump, running, and what makes a burst for it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    try:
        guard = open_guard("prefill-0", np.full(NBYTES, 7, np.uint8))
        endpoint = Endpoint.decode(ours.recv())
        ours.send(guard.endpoint().encode())
        guard.connect(endpoint)
        while not any(event.up for event in guard.poll().peers):
            os.sched_yield()
        pumped = Pumped(guard, endpoint.peer)
        pumped.start("pump-prefill")
        draw = np.random.default_rng(6)
        zeros, lengths = np.zeros(SEGMENTS, np.int32), np.full(SEGMENTS, LENGTH)
        reads, writes = (draw.permutation(2 * SEGMENTS)[:SEGMENTS] * LENGTH for _ in range(2))
        batches = split(
            Segments(zeros, reads, lengths), Segments(zeros.copy(), writes, lengths.copy()), CHUNK_BYTES, 1 << 14
        )

        def burst() -> list[Chunk]:
            return [
                Chunk(transfer, sequence, endpoint.peer, source, goal, source.nbytes)
                for transfer in (new_transfer_id() for _ in range(REQUESTS))
                for sequence, (source, goal) in enumerate(batches)
            ]

        yield pumped, burst
        pumped.ended = True
        ours.send("stop")
        failed, arrived = ours.recv()
        if failed or arrived != SEGMENTS * LENGTH:
            raise RuntimeError(f"T3: {arrived} of {SEGMENTS * LENGTH} bytes arrived; {failed}")
    finally:
        process.kill()
        process.join()


def steps() -> dict[str, Callable[[], None]]:
    """Each kind of step, made as long as it should be while nothing else runs here."""
    import torch

    torch.set_num_threads(1)
    tall, square, small = torch.rand(16384, 1024), torch.rand(1024, 1024), torch.zeros(16)

    def large(rows: int) -> None:
        torch.mm(tall[:rows], square)

    def launches(count: int) -> None:
        for _ in range(count):
            small.add_(1)

    def fitted(step: Callable[[int], None], size: int) -> Callable[[], None]:
        while True:
            start = time.perf_counter()
            step(size)
            spent = time.perf_counter() - start
            if spent > STEP / 2:
                size = max(1, round(size * STEP / spent))
                return lambda: step(size)
            size *= 2

    return {"large kernels": fitted(large, 128), "launch-bound": fitted(launches, 1024)}


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def run(rounds: int = 4) -> list[dict[str, Any]]:
    """Three figures for each kind of step: ``id``, ``case``, ``value``, ``unit``, ``target``, ``ok``, their parts."""
    nbytes = REQUESTS * SEGMENTS * LENGTH
    rates: dict[str, list[float]] = {"idle": []}
    latencies: dict[str, list[float]] = {"idle": []}
    alone: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    with stages() as (pumped, burst):
        kinds = steps()
        for kind in kinds:
            rates[kind], latencies[kind], alone[kind], beside[kind] = [], [], [], []
        for turn in range(rounds + 1):
            for kind in rates:
                step = kinds.get(kind)
                lonely = [timed(step) for _ in range(6)] if step else []
                start = time.perf_counter()
                pumped.burst(burst())
                busy = []
                while step and not pumped.over.is_set():
                    busy.append(timed(step))
                if not pumped.over.wait(60) or pumped.failed:
                    raise RuntimeError(f"T7: the burst did not end: {pumped.failed}")
                # a step may outlast the burst, so its end is told by the last chunk
                spent = pumped.finished - start
                if turn:  # the first is to warm up
                    rates[kind].append(nbytes / spent / 1e9)
                    latencies[kind].append(statistics.median(pumped.seconds))
                    if step:
                        alone[kind] += lonely
                        beside[kind] += busy[:-1] or busy  # the last step may have been alone for a while
    rows = []
    for kind in kinds:
        figures = [
            ("burst", "rate / idle rate", rates[kind], rates["idle"], 0.80, "higher"),
            ("chunk submitted to seen done", "time / idle time", latencies[kind], latencies["idle"], 2, "lower"),
            ("the main thread's step", "time / time without", beside[kind], alone[kind], 1.10, "lower"),
        ]
        for what, unit, ours, base, goal, better in figures:
            value = statistics.median(ours) / statistics.median(base)
            rows.append(
                {
                    "id": "P6", "case": f"{kind}: {what}", "value": round(value, 3), "unit": unit, "target": goal,
                    "ok": value >= goal if better == "higher" else value <= goal, "better": better,
                    "of": [round(statistics.median(ours), 5), round(statistics.median(base), 5)],
                }
            )  # fmt: skip
    return rows
