"""One end of a pair: ``python -P -m kvbaton.pair.end COORDINATOR SHARED CONTROL BELL``, started by :mod:`kvbaton.pair`.
With a second CONTROL and BELL it is both, a thread each: for a transport that reaches no further than its process.

It does what it is told over CONTROL.  BELL leads to the other end: a target rings it, with the time, whenever
everything of a transfer has come, so that neither waits for whoever started them.  SHARED is memory that both see.
Times are those of the system's monotonic clock, which all processes of a host have in common.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np

from kvbaton.connector import Chunk, ConnectorContext, Endpoint, Need, Outcome, wire_version
from kvbaton.errors import KvbatonError, TransportError
from kvbaton.guard import GuardedConnector, GuardLimits, GuardProgress
from kvbaton.identity import PeerId, TransferId
from kvbaton.launch.entry import resolve
from kvbaton.pair.batches import batched
from kvbaton.pair.memory import Bytes, Memory
from kvbaton.pair.words import (
    Answer,
    Call,
    Check,
    Close,
    Connect,
    Copy,
    Done,
    Expect,
    Failed,
    Fill,
    Frames,
    Open,
    Opened,
    Order,
    Part,
    Result,
    Send,
    Times,
    Watch,
)
from kvbaton.plugins import choose_connector
from kvbaton.segments import Segments

_TIME = struct.Struct("<d")
#: Seconds between two polls while nothing is asked: a transport may have to answer its peer.
_IDLE = 0.02
#: Passes in which nothing happened before the transport's own ``wait`` is used, as a stage's pump does.
_EAGER = 2048
_PAUSE = 50e-6


class Late(TransportError):
    """What was asked for was not done within its bound."""


class End:
    """A guarded connector with memory.  ``call`` orders hand it to a function of somebody else's.

    ``bell`` is a stream socket to the other end, which nobody uses while such a function runs.
    """

    def __init__(self, order: Open, bell: socket.socket, shared: int) -> None:
        plugin, valid = choose_connector(order.transport, Need(order.memory, order.reach), order.options)
        self.peer = PeerId.start(order.name)
        device = order.device if order.memory == "cuda" else None
        self.guard = GuardedConnector(
            plugin.open(valid, ConnectorContext(self.peer, device)), transport=plugin.name,
            version=wire_version(plugin), peer=self.peer, connect_deadline=order.connect, chunk_deadline=order.chunk,
            limits=GuardLimits(1 << 40, 1 << 30, 1 << 16, 1 << 40),
        )  # fmt: skip
        self.memory = Memory(self.guard, order.memory, order.device, order.regions)
        self.guard.register(self.memory.regions)
        self.bell = bell
        self._shared = shared
        self._mapped: mmap.mmap | None = None
        self._up: set[PeerId] = set()
        self._down: dict[PeerId, Exception | None] = {}
        self._parting = False
        self._completed = 0
        #: When each chunk of the present transfer was about to be submitted; how long that took, and it until done.
        self._began: dict[int, float] = {}
        self._submit: list[float] = []
        self._each: list[float] = []
        self._receipts: dict[str, int] = {}
        #: The other end, from :meth:`connect` on.
        self.theirs = self.peer

    def opened(self) -> Opened:
        return Opened(self.guard.endpoint().encode(), self.guard.capabilities)

    # -- progress ------------------------------------------------------------------------------------------------------

    def pump(self) -> bool:
        """Poll once.  Raises :class:`~kvbaton.errors.TransportError` for what no healthy transport does."""
        progress = self.guard.poll()
        if not progress:
            return False
        for completion in progress.completions:
            if completion.outcome is not Outcome.DONE:
                raise TransportError(
                    f"T5: chunk {completion.sequence} ended as {completion.outcome.name}: {completion.error}"
                )
            self._each.append(time.monotonic() - self._began.pop(completion.sequence))
        self._completed += len(progress.completions)
        for receipt in progress.receipts:
            self._receipts[receipt.transfer] = self._receipts.get(receipt.transfer, 0) + 1
        for event in progress.peers:
            if event.up:
                self._up.add(event.peer)
            else:
                self._down[event.peer] = event.error
                if not self._parting:
                    raise TransportError(f"T7: {event.peer.name} went down: {event.error}")
        faults = progress.faults if isinstance(progress, GuardProgress) else ()
        if faults:
            raise TransportError(str(faults[0])) from faults[0]
        return True

    def until(self, condition: Callable[[], bool], bound: float, what: str) -> None:
        """Poll eagerly until ``condition()``.  Raises :class:`Late` after ``bound`` seconds."""
        end, idle = time.monotonic() + bound, 0
        while not condition():
            if self.pump():
                idle = 0
                continue
            idle += 1
            os.sched_yield()
            if idle > _EAGER:
                self.guard.wait(_PAUSE)
            if time.monotonic() > end:
                raise Late(f"{what} within {bound:g} s")

    # -- the orders ----------------------------------------------------------------------------------------------------

    def connect(self, order: Connect) -> Done:
        theirs = Endpoint.decode(order.endpoint)
        self.theirs = theirs.peer
        self.guard.connect(theirs)
        # the guard's own deadline comes first, and says more
        self.until(lambda: theirs.peer in self._up, 3600.0, "it was not up")
        return Done()

    def fill(self, order: Fill) -> Done:
        self.memory.fill(order.seed)
        return Done()

    def send(self, order: Send) -> Times:
        able = self.guard.capabilities
        reads, writes = Segments.from_bytes(order.reads), Segments.from_bytes(order.writes)
        batches = batched(reads, writes, order.chunk_bytes, order.chunk_segments, able.alignment)
        end = time.monotonic() + order.bound
        done, received = [], []
        for transfer in order.transfers:
            waiting = [
                Chunk(TransferId(transfer), sequence, self.theirs, source, target, source.nbytes)
                for sequence, (source, target) in enumerate(batches)
            ]
            waiting.reverse()
            self._completed, count = 0, len(waiting)
            start = time.monotonic()

            def all_done(waiting: list[Chunk] = waiting, count: int = count) -> bool:
                while waiting and self._submitted(waiting[-1]):
                    waiting.pop()
                return self._completed == count

            self.until(all_done, end - start, f"not all of {count} chunks were done")
            done.append(time.monotonic() - start)
            rung = self._rung(end, f"no receipt came for what is done ({count} chunks)")
            received.append(rung - start)
            self.guard.acknowledge(TransferId(transfer))
            self.guard.forget(TransferId(transfer))
        submit, each, self._submit, self._each = self._submit, self._each, [], []
        return Times(tuple(done), tuple(received), len(batches), tuple(submit), tuple(each))

    def _submitted(self, chunk: Chunk) -> bool:
        start = time.monotonic()
        if not self.guard.submit(chunk):
            return False
        self._submit.append(time.monotonic() - start)
        self._began[chunk.sequence] = start
        return True

    def _rung(self, end: float, what: str) -> float:
        """The time that the other end rings the bell with."""

        def rung() -> bool:
            return bool(select.select([self.bell], [], [], 0)[0])

        self.until(rung, end - time.monotonic(), what)
        return self.heard()

    def heard(self) -> float:
        data = self.bell.recv(_TIME.size, socket.MSG_WAITALL)
        if len(data) < _TIME.size:
            raise TransportError("the other end is gone")
        moment: float = _TIME.unpack(data)[0]
        return moment

    def ring(self) -> None:
        self.bell.sendall(_TIME.pack(time.monotonic()))

    def expect(self, order: Expect, ready: Callable[[], None]) -> Done:
        writes = Segments.from_bytes(order.writes)
        for transfer in order.transfers:
            self.guard.grant(TransferId(transfer), self.theirs, writes)
        ready()
        end = time.monotonic() + order.bound
        for transfer in order.transfers:

            def all_here(transfer: str = transfer) -> bool:
                return self._receipts.get(transfer, 0) >= order.chunks

            self.until(all_here, end - time.monotonic(), f"not all of {order.chunks} receipts came")
            self.ring()
            self.guard.received(TransferId(transfer))
        for transfer in order.transfers:
            del self._receipts[transfer]
            self.guard.forget(TransferId(transfer))
        return Done()

    def copy(self, order: Copy) -> Times:
        reads, writes = Segments.from_bytes(order.reads), Segments.from_bytes(order.writes)
        if self.memory.kind == "cuda":
            return self._copy_on_device(reads, writes, order)
        shared = self._mapping()
        sources = [region.view().data for region in self.memory.regions]
        bases = [0, *accumulate(region.length for region in self.memory.regions)]
        runs = [
            (sources[source][offset : offset + length], bases[target] + at, length)
            for (source, offset, length), (target, at, _) in zip(reads.triples(), writes.triples(), strict=True)
        ]
        place = shared.data
        done, received = [], []
        end = time.monotonic() + order.bound
        for _ in range(order.repeats):
            start = time.monotonic()
            for source, offset, length in runs:
                place[offset : offset + length] = source
            done.append(time.monotonic() - start)
            self.ring()
            received.append(self._rung(end, "the other end did not see the copy") - start)
        return Times(tuple(done), tuple(received), 1)

    def _copy_on_device(self, reads: Segments, writes: Segments, order: Copy) -> Times:
        places = self.memory.elsewhere(order.device)
        spent = []
        for _ in range(order.repeats):
            start = time.monotonic()
            self.memory.copy(reads, writes, places)
            spent.append(time.monotonic() - start)
        return Times(tuple(spent), tuple(spent), 1)

    def watch(self, order: Watch) -> Done:
        end = time.monotonic() + order.bound
        for _ in range(order.repeats):
            if not select.select([self.bell], [], [], max(end - time.monotonic(), 0.0))[0]:
                raise Late(f"no copy was seen within {order.bound:g} s")
            self.heard()
            self.ring()
        return Done()

    def _mapping(self) -> Bytes:
        if self._mapped is None:
            self._mapped = mmap.mmap(self._shared, os.fstat(self._shared).st_size)
            array = np.frombuffer(self._mapped, np.uint8)
            array[:] = 0  # its pages are there before anything is timed
        return np.frombuffer(self._mapped, np.uint8)

    def call(self, order: Call) -> Result:
        function = cast(Callable[..., Any], resolve(order.function))
        return Result(function(self, **order.arguments))

    def part(self, order: Part) -> Done:
        self._parting = True
        self.guard.disconnect(self.theirs)
        self.until(lambda: self.theirs in self._down, order.bound, "the connection did not end")
        return Done()

    def close(self) -> None:
        self.guard.close()
        self.memory.free()


# -- the process -------------------------------------------------------------------------------------------------------


class _Main:
    def __init__(self, control: Frames, bell: socket.socket, shared: int) -> None:
        self._control = control
        self._bell = bell
        self._shared = shared
        self._end: End | None = None

    def serve(self) -> None:
        """Answer until told to close, or nobody is there any more."""
        while True:
            if not self._control.ready(_IDLE):
                if self._end is not None:
                    with contextlib.suppress(KvbatonError):  # the next order says what became of it
                        self._end.pump()
                continue
            order: Order = self._control.receive(Order, 60.0)
            try:
                answer = self._obey(order)
            except Late as error:
                answer = Failed("late", str(error), traceback.format_exc())
            except KvbatonError as error:
                cause = "refused" if isinstance(order, Open | Connect) else "failed"
                answer = Failed(cause, str(error), traceback.format_exc())  # type: ignore[arg-type]
            except Exception as error:
                text = f"{type(error).__name__}: {error}"
                answer = Failed("failed", text, traceback.format_exc())
            try:
                self._control.send(answer)
            except (TypeError, ValueError, OverflowError) as error:  # a text or a value that is no message's
                text = f"its answer cannot be sent: {type(error).__name__}: {error!a}"
                self._control.send(Failed("failed", text))
            if isinstance(order, Close):
                return

    def _obey(self, order: Order) -> Answer:
        if isinstance(order, Open):
            self._end = End(order, self._bell, self._shared)
            return self._end.opened()
        end = self._end
        if isinstance(order, Close):
            if end is not None:
                end.close()
            return Done()
        assert end is not None, "open it first"
        match order:
            case Connect():
                return end.connect(order)
            case Fill():
                return end.fill(order)
            case Send():
                return end.send(order)
            case Expect():
                return end.expect(order, lambda: self._control.send(Done()))
            case Check():
                reads, writes = Segments.from_bytes(order.reads), Segments.from_bytes(order.writes)
                return end.memory.check(reads, writes, order.seed)
            case Copy():
                return end.copy(order)
            case Watch():
                end._mapping() if end.memory.kind == "host" else None
                self._control.send(Done())
                return end.watch(order)
            case Call():
                return end.call(order)
            case Part():
                return end.part(order)


def _end_with(coordinator: int) -> None:
    """Whatever hangs here ends with the process that started this one."""
    try:
        handle = os.pidfd_open(coordinator)
    except OSError:
        handle = -1
    if os.getppid() != coordinator:
        os._exit(1)
    if handle >= 0:
        poll = select.poll()
        poll.register(handle, select.POLLIN)

        def watch() -> None:
            poll.poll()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=watch, name="kvbaton-lifeline", daemon=True).start()


def main(coordinator: int, shared: int, *ends: int) -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for descriptor in (shared, *ends):
        os.set_inheritable(descriptor, False)
    _end_with(coordinator)

    def serve(control: int, bell: int) -> None:
        with socket.socket(fileno=control) as ours, socket.socket(fileno=bell) as other, contextlib.suppress(EOFError):
            _Main(Frames(ours), other, shared).serve()

    beside = [threading.Thread(target=serve, args=ends[2:], name="kvbaton-pair")] if len(ends) > 2 else []
    for thread in beside:
        thread.start()
    serve(*ends[:2])
    for thread in beside:
        thread.join()
    return 0


if __name__ == "__main__":
    sys.path[:] = [entry or str(Path.cwd()) for entry in sys.path]
    sys.exit(main(*map(int, sys.argv[1:])))
