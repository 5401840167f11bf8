"""Two processes, and the same bytes moved between them over CUDA IPC by kvbaton and in the ways that bound it.

The ways take turns, at the source:

- ``kvbaton``: chunks through the guard and the connector, from the first ``submit`` until the last receipt has been
  passed on *at the target*, by the clock that processes of one host share; and ``kvbaton-done``, the same until the
  last completion at the source.  The source polls before the first chunk, too, as a stage's pump does that has
  something under way;
- ``kernel``: the transport's own kernel over a mapping of its own, one launch for each chunk, its plans and tables made
  beforehand, these in the device's memory, nobody told;
- ``engine``: one copy by the driver for each segment, over that mapping;
- ``ucxx``: one tagged message for each segment, by UCX on its own;
- ``copy``: a plain copy of as many bytes within the source's device: what its memory gives.

Segments lie scattered over twice the memory that they need, on both sides, where that is there.  Before anything is
timed, every way has moved every shape once into memory that was cleared, and every byte of the target is looked at.

The source's end is in the benchmark's own process, where one of :mod:`kvbaton.pair` is not: the streams, the mapping
and the kernels are driven and timed from here, also within ``submit`` and beside something else that computes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
from cores import UNDISTURBED, halves, kept_to, pace, siblings
from nixl_pair import CHUNK_BYTES, Memory, Shape, answer, guarded, hand_over, wait_until_up

from kvbaton.connector import Endpoint
from kvbaton.identity import new_transfer_id
from kvbaton.segments import Segments

WAYS = ("kvbaton", "kvbaton-done", "kernel", "engine", "ucxx", "copy")
#: Ways that pay for each segment: not asked for more than so many.
SLOW = {"engine": 2048, "ucxx": 2048}
#: UCX on its own: the tag of its messages.
_TAG = 77
#: Turns that count at least, the least disturbed.
_FEWEST = 5
#: Seconds for all messages of a turn.
_PATIENCE = 5.0


class RawUcx:
    """UCX on its own at one end: tagged messages of device memory."""

    def __init__(self, memory: Memory) -> None:
        from kvbaton_cuda_ipc import library

        self._ucxx = library.load()
        self._buffer = library.buffer_of
        context = self._ucxx.UCXContext({}, (self._ucxx.Feature.TAG,))
        self.worker = self._ucxx.UCXWorker(context)
        self.address = bytes(self.worker.address)
        self._memory = memory
        self._cells: list[Any] = []

    def meet(self, address: bytes) -> None:
        theirs = self._ucxx.UCXAddress.create_from_buffer(address)
        self._endpoint = self.worker.create_endpoint_from_worker_address(theirs, False)

    def prepare(self, cells: np.ndarray, length: int) -> None:
        owner = self._memory.owner
        self._cells = [self._buffer(owner[cell * length : (cell + 1) * length]) for cell in cells.tolist()]

    def send(self) -> None:
        tag = self._ucxx.UCXXTag(_TAG)
        self._all([self._endpoint.tag_send(cell, tag) for cell in self._cells])

    def receive(self) -> None:
        tag, mask = self._ucxx.UCXXTag(_TAG), self._ucxx.UCXXTagMask((1 << 64) - 1)
        self._all([self.worker.tag_recv(cell, tag, mask) for cell in self._cells])

    def _all(self, requests: list[Any]) -> None:
        limit = time.monotonic() + _PATIENCE
        for request in requests:
            while not request.completed:
                self.worker.progress()
                if time.monotonic() > limit:
                    raise RuntimeError(f"ucxx: messages are not over within {_PATIENCE:g} s")
            request.check_error()


def target(pipe: Any, device: int, nbytes: int, options: Mapping[str, Any]) -> None:
    """The other process: polls kvbaton's end, and says what is wrong with what has come."""
    from kvbaton_cuda_ipc import cuda_ipc, driver

    memory = Memory("cuda", device, nbytes)
    guard = guarded(cuda_ipc, "decode-0", memory, options)
    ucx = RawUcx(memory)
    cuda = driver.load()
    assert cuda is not None
    known = cuda.allocation(memory.region.address)
    assert known is not None
    handle = cuda.export(known.base)
    pipe.send((guard.endpoint().encode(), handle, memory.region.address - known.base, ucx.address))
    endpoint, address = pipe.recv()
    guard.connect(Endpoint.decode(endpoint))
    ucx.meet(address)
    wanted, idle = 0, 0
    while True:
        progress = guard.poll()
        if progress.receipts:
            wanted -= len(progress.receipts)
            if wanted == 0:
                pipe.send(time.perf_counter())
            continue
        idle += 1
        if wanted == 0 or idle % 64 == 0:
            if not pipe.poll(0.002 if wanted == 0 else 0):
                continue
            match pipe.recv():
                case "expect", wanted:
                    pipe.send("ready")
                case "cells", cells, length:
                    ucx.prepare(cells, length)
                    pipe.send("ready")
                case "ucxx":
                    pipe.send("ready")
                    try:
                        ucx.receive()
                    except Exception as error:
                        pipe.send(f"ucxx, at the target: {error}")
                    else:
                        pipe.send("received")
                case "clear", length, cells:
                    memory.fill(length, np.zeros(cells, np.uint8))
                    pipe.send("cleared")
                case "check", length, count:
                    pipe.send(memory.wrong(length, Shape(length, count).target()))
                case "stop":
                    break
    guard.close()
    pipe.send("over")
    os._exit(0)  # what is timed is over; how ends are closed is for the kit to look at


class Source:
    """The source, connected in every way."""

    def __init__(self, pipe: Any, device: int, nbytes: int, options: Mapping[str, Any]) -> None:
        import torch

        from kvbaton_cuda_ipc import cuda_ipc, driver
        from kvbaton_cuda_ipc.kernels import kernels

        self._torch = torch
        self._pipe = pipe
        self.memory = Memory("cuda", device, nbytes)
        self.guard = guarded(cuda_ipc, "prefill-0", self.memory, options)
        self._ucx = RawUcx(self.memory)
        cuda = driver.load()
        assert cuda is not None
        self._cuda = cuda
        endpoint, handle, offset, address = answer(pipe)
        pipe.send((self.guard.endpoint().encode(), self._ucx.address))
        self._there = cuda.open(handle) + offset
        self._ucx.meet(address)
        self._kernels = kernels(cuda, device)
        self._streams = [torch.cuda.Stream(device) for _ in range(2)]
        theirs = Endpoint.decode(endpoint)
        self._peer = theirs.peer
        self.guard.connect(theirs)
        wait_until_up(self.guard)

    def _ask(self, *words: Any) -> Any:
        self._pipe.send(words if len(words) > 1 else words[0])
        return answer(self._pipe)

    def take(
        self,
        length: int,
        count: int,
        ways: Sequence[str],
        *,
        chunk_bytes: int = CHUNK_BYTES,
        programs: int | None = None,
    ) -> list[str]:
        """What is moved from now on.  Every way has moved it once, and what came was looked at (T3).

        The ways that can; UCX's own may not here, which is said."""
        torch = self._torch
        from kvbaton_cuda_ipc.mover import PROGRAMS

        shape = self._shape = Shape(length, count)
        self.memory.fill(length, shape.source())
        self._batches = shape.batches(chunk_bytes, 1 << 16)
        if programs is None:
            programs = PROGRAMS * torch.cuda.get_device_properties(self.memory.device).multi_processor_count
        base = self.memory.region.address
        self._launches = [self._launch(reads, writes, programs) for reads, writes in self._batches]
        self._copies = (
            (base + shape.reads * length).tolist(), (self._there + shape.writes * length).tolist(), length
        )  # fmt: skip
        if "ucxx" in ways:
            self._ask("cells", shape.writes, length)
            self._ucx.prepare(shape.reads, length)
        torch.cuda.synchronize(self.memory.device)
        able = []
        for way in ways:
            if way == "copy":
                able.append(way)
                continue
            self._ask("clear", length, shape.cells)
            try:
                self.turn(way)
            except RuntimeError as error:
                if way != "ucxx":
                    raise
                print(f"ucxx: {count} x {length}: {error}", file=sys.stderr, flush=True)
                continue
            able.append(way)
            wrong = self._ask("check", length, count)
            if wrong:
                raise RuntimeError(f"T3: {way}: {wrong} bytes of {count} x {length} are wrong")
        return able

    def _launch(self, reads: Segments, writes: Segments, programs: int) -> tuple[Any, Any, int]:
        """Of a chunk: the kernel's plan, its table on the device, and the table's address."""
        from kvbaton_cuda_ipc import scatter

        runs = np.stack((reads.offset, writes.offset, reads.length))
        plan = scatter.plan(runs, programs, origins=(self.memory.region.address, self._there))
        table = self._torch.from_numpy(plan.table).to(self.memory.owner.device)
        return plan, table, table.data_ptr()

    def turn(self, way: str) -> float:
        """Move everything once; seconds."""
        run: Callable[[], float] = {
            "kvbaton": lambda: self._by_kvbaton()[0],
            "kvbaton-done": lambda: self._by_kvbaton()[1],
            "kernel": self._by_kernel,
            "engine": self._by_engine,
            "ucxx": self._by_ucxx,
            "copy": self._by_copy,
        }[way]
        return run()

    #: What :func:`cores.pace` may say of an undisturbed processor.
    _quick = float("inf")

    def rates(self, ways: Sequence[str], repeats: int) -> dict[str, float]:
        """GB/s of each way, the median over ``repeats`` in which they take turns; and two rounds before them.

        Each turn is two runs of a way, of which the second counts: where both processes use one device, the first also
        pays for the device's change from the process whose way it was before.  Only turns count in which this
        processor was as fast as it can be (:func:`cores.pace`, before and after), and the least disturbed of the others
        where these are fewer than five; ``undisturbed``: the share of all turns that were so.
        """
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for turn in range(repeats + 2):
            for way in ways:
                self.turn(way)
                before = pace()
                spent = self.turn(way)
                if turn >= 2:
                    seconds[way].append((max(before, pace()), spent))
        nbytes = self._shape.length * self._shape.count
        paces = [took for turns in seconds.values() for took, _ in turns]
        quick = self._quick = UNDISTURBED * min(paces)
        rates = {}
        for way, turns in seconds.items():
            counted = max(_FEWEST, sum(took <= quick for took, _ in turns))
            rates[way] = nbytes / statistics.median(spent for _, spent in sorted(turns)[:counted]) / 1e9
        return {**rates, "undisturbed": sum(took <= quick for took in paces) / len(paces)}

    def costs(self, repeats: int = 9) -> dict[str, float]:
        """Where the time of a hand-off goes, medians in microseconds.  Of the source's thread: a chunk in ``submit``;
        what moves bytes being started, which several chunks may share, and within that its plan and the call that
        launches it; from the first call until the first launch has been begun (``first``); from the last completion
        here until the target has passed on the last receipt (``tail``), which is negative where the target sees by the
        device's counter what has come, before this thread does.  Of the device: one launch of a chunk alone
        (``launch``)."""
        guard = self.guard
        mover = guard._connector._mover  # type: ignore[attr-defined]
        watched = {
            "submit": (guard, "submit"), "start": (mover, "start"), "plan": (mover, "_plan"),
            "call": (mover._kernels, "run"),
        }  # fmt: skip
        spent: dict[str, list[float]] = {name: [] for name in (*watched, "first", "tail")}

        def timed(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                begun = time.perf_counter()
                try:
                    return call(*arguments)
                finally:
                    over = time.perf_counter()
                    spent[name].append(over - begun)
                    if name == "start" and len(spent["first"]) < len(spent["tail"]) + 1:
                        spent["first"].append(over - self._began)

            return run

        with contextlib.ExitStack() as stack:
            for name, (owner, attribute) in watched.items():
                stack.enter_context(patch.object(owner, attribute, timed(name, getattr(owner, attribute))))
            for left in range(4 * repeats, 0, -1):
                known = {name: len(each) for name, each in spent.items()}
                received, done = self._by_kvbaton()
                spent["tail"].append(received - done)
                wanted = repeats - known["tail"]
                if pace() > self._quick and left > wanted:
                    for name, each in spent.items():
                        del each[known[name] :]
                elif wanted == 1:
                    break
        event = self._torch.cuda.Event
        stream = self._streams[0]
        device = []
        for plan, table, address in self._launches * 2:
            before, behind = event(enable_timing=True), event(enable_timing=True)
            before.record(stream)
            self._kernels.run(plan, table, stream.cuda_stream, address)
            behind.record(stream)
            behind.synchronize()
            device.append(before.elapsed_time(behind) * 1e-3)
        return {
            **{f"{name}_us": 1e6 * statistics.median(each) for name, each in spent.items() if each},
            "launch_us": 1e6 * statistics.median(device), "launches": len(spent["start"]) / len(spent["tail"]),
            "chunks": len(self._batches),
        }  # fmt: skip

    # -- the ways ------------------------------------------------------------------------------------------------------

    def _by_kvbaton(self) -> tuple[float, float]:
        """Seconds until the target had the last receipt, and until the last completion here."""
        guard, pipe = self.guard, self._pipe
        self._ask_polling("expect", len(self._batches))
        transfer = new_transfer_id()
        self._began = time.perf_counter()
        hand_over(guard, transfer, self._peer, self._batches, lambda: None)
        done = time.perf_counter() - self._began
        while not pipe.poll(0):
            guard.poll()
        received = float(answer(pipe)) - self._began
        guard.acknowledge(transfer)
        return received, done

    def _ask_polling(self, *words: Any) -> Any:
        """As a stage's pump does that has something under way: it does not sleep until there is more."""
        self._pipe.send(words)
        while not self._pipe.poll(0):
            self.guard.poll()
        return answer(self._pipe)

    def _by_kernel(self) -> float:
        streams = [stream.cuda_stream for stream in self._streams]
        start = time.perf_counter()
        for index, (plan, table, address) in enumerate(self._launches):
            self._kernels.run(plan, table, streams[index % 2], address)
        return self._settled(start)

    def _by_engine(self) -> float:
        reads, writes, length = self._copies
        stream = self._streams[0].cuda_stream
        start = time.perf_counter()
        for read, write in zip(reads, writes, strict=True):
            self._cuda.copy(write, read, length, stream)
        return self._settled(start)

    def _settled(self, start: float) -> float:
        for stream in self._streams:
            while not stream.query():
                pass
        return time.perf_counter() - start

    def _by_ucxx(self) -> float:
        self._ask("ucxx")
        start = time.perf_counter()
        self._ucx.send()
        said = self._pipe.recv()
        if said != "received":
            raise RuntimeError(said)
        return time.perf_counter() - start

    def _by_copy(self) -> float:
        nbytes = min(self._shape.length * self._shape.count, self.memory.nbytes // 2)
        here, there = self.memory.owner[:nbytes], self.memory.owner[self.memory.nbytes - nbytes :]
        with self._torch.cuda.stream(self._streams[0]):
            start = time.perf_counter()
            there.copy_(here)
            spent = self._settled(start)
        return spent * self._shape.length * self._shape.count / nbytes

    # -- a compute kernel beside it -----------------------------------------------------------------------------------

    def beside(self, programs: Sequence[int], seconds: float = 0.25) -> list[dict[str, float]]:
        """How much matrix products and a copy of the device's own memory slow down while chunks are copied without a
        pause, with so many programs at once; and the rate of those copies."""
        torch = self._torch
        a = torch.randn(4096, 4096, dtype=torch.bfloat16, device=self.memory.owner.device)
        big = torch.empty(1 << 28, dtype=torch.uint8, device=self.memory.owner.device)
        out = torch.empty_like(a)
        compute = torch.cuda.Stream(self.memory.device)
        works: dict[str, Callable[[], Any]] = {
            "matmul": lambda: torch.matmul(a, a, out=out),
            "memory": lambda: big[: 1 << 27].copy_(big[1 << 27 :]),
        }
        reads, writes = self._batches[0]
        nbytes = reads.nbytes

        def timed(work: Callable[[], Any], launch: tuple[Any, Any, int] | None) -> tuple[float, float]:
            """Seconds of one work, bytes copied per second; neither stream is ever without something to do."""
            copy = self._streams[0]
            working: deque[Any] = deque()
            copying: deque[Any] = deque()
            works_done = copies_done = 0
            with torch.cuda.stream(compute):
                work()  # the first one sets its library up, which may take longer than all that is timed
            torch.cuda.synchronize(self.memory.device)
            start = time.perf_counter()
            while time.perf_counter() - start < seconds or not works_done:
                if len(working) < 4:
                    with torch.cuda.stream(compute):
                        for _ in range(4):
                            work()
                    working.append(compute.record_event())
                if launch is not None and len(copying) < 6:
                    plan, table, address = launch
                    for _ in range(8):
                        self._kernels.run(plan, table, copy.cuda_stream, address)
                    copying.append(copy.record_event())
                while working and working[0].query():
                    working.popleft()
                    works_done += 4
                while copying and copying[0].query():
                    copying.popleft()
                    copies_done += 8
            took = time.perf_counter() - start
            torch.cuda.synchronize(self.memory.device)
            return took / works_done, copies_done * nbytes / took

        found = []
        for name, work in works.items():
            alone, _ = timed(work, None)
            for count in programs:
                launch = self._launch(reads, writes, count)
                torch.cuda.synchronize(self.memory.device)
                slowed, rate = timed(work, launch)
                found.append({"beside": name, "programs": count, "slowdown": slowed / alone, "gb_per_s": rate / 1e9})
        return found


@contextlib.contextmanager
def pair(nbytes: int, options: Mapping[str, Any], devices: tuple[int, int] = (0, 0)) -> Iterator[Source]:
    """A source here and a target in a process of its own, with ``nbytes`` of memory each, on cores of their own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, devices[1], nbytes, options), daemon=True)
    here, there = halves(siblings())
    with kept_to(there):
        process.start()
    theirs.close()  # so that its death is the end of ours
    try:
        with kept_to(here):
            source = Source(ours, devices[0], nbytes, options)
            yield source
        source.guard.close()
        ours.send("stop")
        answer(ours)
    finally:
        process.kill()
        process.join()
