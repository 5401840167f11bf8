"""A pair as its user sees it: two ends, two ways between them."""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from kvbaton.connector import Capabilities, MemoryKind, Reach
from kvbaton.errors import LocalProtocolError
from kvbaton.identity import new_transfer_id
from kvbaton.pair.batches import batched
from kvbaton.pair.process import GRACE, Cause, EndProcess, PairFailed
from kvbaton.pair.words import (
    Call,
    Check,
    Connect,
    Copy,
    Done,
    Expect,
    Fill,
    Found,
    Open,
    Opened,
    Order,
    Part,
    Result,
    Send,
    Times,
    Watch,
)
from kvbaton.segments import Segments

__all__ = ["Bounds", "Cause", "Moved", "Pair", "PairFailed", "Way", "open_pair"]

#: What a chunk is at most in a deployment that is not told otherwise.
CHUNK_BYTES = 64 << 20
#: Seconds in which a target that has failed too has said so.
_ANSWERED = 0.25


@dataclass(frozen=True, slots=True)
class Bounds:
    """Seconds for each step: to open an end (a library may compile, a device may warm up), to connect, to look at or
    fill memory, to close."""

    open: float = 60.0
    connect: float = 15.0
    look: float = 60.0
    close: float = 10.0


@dataclass(frozen=True, slots=True)
class Moved:
    """What one :meth:`Way.move` took: seconds from the first call, for each repetition.

    ``done``: the source knew all of it done.  ``received``: the target had all receipts, by the clock that both share.
    For each chunk of every repetition, seconds: ``submit``, in the call that took it; ``each``, from the beginning of
    that call until its completion was seen.
    """

    nbytes: int
    segments: int
    chunks: int
    done: tuple[float, ...]
    received: tuple[float, ...]
    submit: tuple[float, ...] = ()
    each: tuple[float, ...] = ()

    @property
    def seconds(self) -> float:
        """The median until it was received."""
        return statistics.median(self.received)

    @property
    def rate(self) -> float:
        """Bytes per second, by :attr:`seconds`."""
        return self.nbytes / max(self.seconds, 1e-9)


class Way:
    """From ``source`` to ``target``, which are names.  ``seed`` is that of the pattern that travels here."""

    def __init__(self, pair: Pair, source: EndProcess, target: EndProcess, seed: int) -> None:
        self._pair = pair
        self._source, self._target = source, target
        self._seed = seed
        self.source, self.target = source.name, target.name

    def prepare(self) -> None:
        """The pattern at the source, poison at the target, everywhere; which also touches all pages."""
        look = self._pair.bounds.look
        self._pair._both((self._source, Fill(self._seed)), (self._target, Fill(0)), look)

    def move(
        self, reads: Segments, writes: Segments, *, repeats: int = 1, chunk_bytes: int = CHUNK_BYTES,
        chunk_segments: int | None = None, bound: float = 30.0,
    ) -> Moved:  # fmt: skip
        """Move ``reads`` of the source over ``writes`` of the target, ``repeats`` times, one after the other.

        In chunks of at most ``chunk_bytes`` and ``chunk_segments``, within what the transport can.  Empty lists are one
        receipt without bytes.  Each repetition is a transfer of its own, over when the target has every receipt.

        Raises :class:`PairFailed`, also where it is not over within ``bound`` seconds in all;
        :class:`~kvbaton.errors.SegmentError` for lists that do not fit each other or the regions.
        """
        able = self._pair.capabilities
        chunk_bytes = min(chunk_bytes, able.max_chunk_bytes)
        chunk_segments = min(chunk_segments or able.max_segments, able.max_segments)
        self._pair._check(self._source, reads)
        self._pair._check(self._target, writes)
        chunks = len(batched(reads, writes, chunk_bytes, chunk_segments, able.alignment))
        transfers = tuple(new_transfer_id() for _ in range(repeats))
        here, there = reads.to_bytes(), writes.to_bytes()
        expect = Expect(transfers, there, chunks, bound)
        send = Send(transfers, here, there, chunk_bytes, chunk_segments, bound)
        times = self._timed(send, expect, bound)
        return Moved(
            reads.nbytes, len(reads), times.chunks, times.done, times.received, times.submit, times.each
        )  # fmt: skip

    def copy(self, reads: Segments, writes: Segments, *, repeats: int = 1, bound: float = 30.0) -> Moved:
        """What the hardware can: the same bytes copied by one thread of the source into memory that both see.

        Between device memories it is the source device's own copy to the target's, within the source's process.
        """
        here, there = reads.to_bytes(), writes.to_bytes()
        copy = Copy(here, there, repeats, bound, self._pair.devices[self._pair._processes.index(self._target)])
        if self._pair.memory == "cuda":
            times = self._pair._ask(self._source, copy, bound + GRACE, Times)
        else:
            times = self._timed(copy, Watch(repeats, bound), bound)
        return Moved(reads.nbytes, len(reads), 1, times.done, times.received)

    def check(self, reads: Segments, writes: Segments) -> None:
        """That a move since :meth:`prepare` has written each byte of ``writes``, and no other; then poison again.

        Raises :class:`PairFailed` with the cause *wrong*.
        """
        order = Check(reads.to_bytes(), writes.to_bytes(), self._seed)
        found = self._pair._ask(self._target, order, self._pair.bounds.look, Found)
        if not found.wrong and not found.outside:
            return
        said = [f"{found.wrong} of {writes.nbytes} bytes are wrong"] if found.wrong else []
        said += [f"{found.outside} bytes outside of what was to be written have changed"] if found.outside else []
        self._pair._broken = True
        raise PairFailed(
            f"T3: {self.source} to {self.target}: {' and '.join(said)}, the first at byte {found.offset} of region"
            f" {found.region}", cause="wrong", end=self.target, said="",
        )  # fmt: skip

    def call(self, end: str, function: str, *, bound: float = 30.0, **arguments: Any) -> Any:
        """``module:function(end, **arguments)`` in the process of ``end``, which is a name; what it returns.

        Its first argument is the :class:`~kvbaton.pair.end.End` there.  Arguments and result are plain values.
        """
        process = self._source if end == self.source else self._target
        return self._pair._ask(process, Call(function, arguments), bound, Result).value

    def call_both(self, source: tuple[str, dict[str, Any]], target: tuple[str, dict[str, Any]], *,
                  bound: float = 30.0) -> tuple[Any, Any]:  # fmt: skip
        """As :meth:`call`, at both ends at once: the target's is called first, and runs beside the source's."""
        target_result, source_result = self._pair._both(
            (self._target, Call(*target)), (self._source, Call(*source)), bound
        )
        return cast(Result, source_result).value, cast(Result, target_result).value

    def _timed(self, send: Order, expect: Order, bound: float) -> Times:
        """``expect`` at the target; once it is ready, ``send`` at the source; both end."""
        pair, source, target = self._pair, self._source, self._target
        pair._ask(target, expect, pair.bounds.look, Done)
        with pair._whole():
            source.tell(send)
            try:
                times: Times = source.hear(send, bound + GRACE, target)
            except PairFailed as error:
                raise pair._first_cause(error, source, target, expect) from None
            target.hear(expect, bound + GRACE, source)
        return times


class Pair:
    """Two ends that are connected.  Threading: one thread's.  See :func:`open_pair`."""

    def __init__(
        self, processes: tuple[EndProcess, EndProcess], opened: Opened, regions: Sequence[int], memory: MemoryKind,
        devices: tuple[int, int], bounds: Bounds,
    ) -> None:  # fmt: skip
        self._processes = processes
        self._regions = dict(enumerate(regions))
        self._broken = False
        self.memory = memory
        self.devices = devices
        self.bounds = bounds
        #: What the transport declares, opened so.
        self.capabilities: Capabilities = opened.capabilities
        first, second = processes
        self.forward = Way(self, first, second, 1)
        self.back = Way(self, second, first, 2)

    @property
    def pids(self) -> tuple[int, int]:
        """The processes of the two ends."""
        first, second = self._processes
        return first.pid, second.pid

    def close(self) -> list[str]:
        """Disconnect, close both ends and join their processes; what was wrong with that, in words.  Idempotent."""
        problems: list[str] = []
        if not self._broken:
            self._broken = True
            bound = self.bounds.close
            order = Part(bound)
            try:
                for process in self._processes:
                    process.tell(order)
                for process in self._processes:
                    process.hear(order, bound + GRACE)
            except PairFailed as error:
                problems.append(str(error))
            else:
                problems = [said for process in self._processes if (said := process.leave(bound))]
                if not problems:
                    said_at_exit = (process.exit(bound) for process in self._processes)
                    problems = list(dict.fromkeys(filter(None, said_at_exit)))
        for process in self._processes:
            process.end()
        return problems

    def _check(self, process: EndProcess, segments: Segments) -> None:
        segments.check_bounds(self._regions, f"the segments at {process.name}")

    def _ask(self, process: EndProcess, order: Order, bound: float, kind: type[Any]) -> Any:
        with self._whole():
            process.tell(order)
            answer = process.hear(order, bound, *(other for other in self._processes if other is not process))
            assert isinstance(answer, kind), answer
            return answer

    def _both(self, first: tuple[EndProcess, Order], second: tuple[EndProcess, Order], bound: float) -> list[Any]:
        with self._whole():
            for process, order in (first, second):
                process.tell(order)
            return [
                process.hear(order, bound, other) for (process, order), (other, _) in ((first, second), (second, first))
            ]

    @contextlib.contextmanager
    def _whole(self) -> Iterator[None]:
        """After anything went wrong, nothing more is asked."""
        if self._broken:
            raise LocalProtocolError("this pair has failed, or is closed: open another")
        try:
            yield
        except BaseException:
            self._broken = True
            raise

    def _first_cause(self, error: PairFailed, source: EndProcess, target: EndProcess, expect: Order) -> PairFailed:
        """What the source tells of may be the consequence of what the target has to tell, or of its end."""
        if error.cause in ("hung", "died"):
            return error
        # a source that failed by itself leaves a target that waits for nothing
        failed = error.cause == "failed"
        try:
            target.hear(expect, _ANSWERED if failed else 2 * GRACE, source)
        except PairFailed as other:
            if other.cause in ("died", "failed") or (other.cause == "hung" and not failed):
                return other
        return error


@contextlib.contextmanager
def open_pair(
    transport: str,
    options: Mapping[str, Any] | None = None,
    *,
    regions: Sequence[int],
    memory: MemoryKind = "host",
    devices: tuple[int, int] = (0, 0),
    names: tuple[str, str] = ("prefill-0", "decode-0"),
    bounds: Bounds | None = None,
    chunk: float = 30.0,
    reach: Reach = "cross_process",
    environment: Mapping[str, str] | None = None,
    problems: Callable[[str], object] | None = None,
) -> Iterator[Pair]:
    """A pair of ``transport`` (a name, or ``module:object``) with ``regions``, bytes each, at either end; connected.

    ``options``: plain values, as in settings.  ``chunk``: seconds that a chunk may take (T8).  ``environment`` is set
    for both processes besides their own.  ``problems`` hears what was wrong with closing, in words.  ``reach``
    ``same_process``: both ends are threads of one process, for a transport that reaches no further.

    Raises :class:`PairFailed` where an end cannot be opened or connected, with what was said.
    """
    bounds = bounds or Bounds()
    ours, theirs = socket.socketpair()
    shared = os.memfd_create("kvbaton-pair", os.MFD_CLOEXEC)
    processes: list[EndProcess] = []
    try:
        with ours, theirs:
            os.ftruncate(shared, max(1, sum(regions)))
            ends = list(zip(names, (ours, theirs), strict=True))
            for together in [ends] if reach == "same_process" else [[end] for end in ends]:
                processes += EndProcess.start(together, shared, environment or {})
        first, second = processes
        opens = [
            Open(transport, dict(options or {}), memory, device, name, tuple(regions), bounds.connect, chunk, reach)
            for name, device in zip(names, devices, strict=True)
        ]
        for process, order in zip(processes, opens, strict=True):
            process.tell(order)
        opened: list[Opened] = [
            process.hear(order, bounds.open, other)
            for process, order, other in ((first, opens[0], second), (second, opens[1], first))
        ]
        connects = [Connect(opened[1].endpoint), Connect(opened[0].endpoint)]
        for process, connect in zip(processes, connects, strict=True):
            process.tell(connect)
        for process, connect, other in ((first, connects[0], second), (second, connects[1], first)):
            process.hear(connect, bounds.connect + GRACE, other)
        pair = Pair((first, second), opened[0], regions, memory, devices, bounds)
        yield pair
        for said in pair.close():
            if problems is not None:
                problems(said)
    finally:
        for process in processes:
            process.end()
        os.close(shared)
