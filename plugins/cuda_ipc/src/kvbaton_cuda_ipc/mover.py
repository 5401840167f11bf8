"""What moves the bytes of a chunk on a device: the kernel of :mod:`~kvbaton_cuda_ipc.scatter`, and the copy engine.

Everything is started on streams of this connector's own, *lanes* that take turns, so that the first tiles of one chunk
run while the last tiles of the one before still do.  Nothing here waits for the device: what was started is over when
its event says so.

A launch's table stays where it was written, in pinned memory, and the kernel reads it there.  To upload it costs a call
of the driver's, and the copy would wait in the device's one queue of copies from the host: behind a gigabyte of
somebody else's, the weights or a cache that come back, for 20 milliseconds (measured).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.connector import DeviceEvent
from kvbaton.errors import TransportError
from kvbaton_cuda_ipc.counters import Counters, Where
from kvbaton_cuda_ipc.driver import Driver, DriverError
from kvbaton_cuda_ipc.runs import NOWHERE, Origins, Table

_log = logging.getLogger(__name__)

#: Lanes of a connector.
LANES = 2
#: Tables that there are from the beginning, and the rows that each has room for.
_TABLES, _ROWS = 64, 16384
#: Views of a table that are remembered.
_VIEWS = 64
#: Programs of the kernel for each multiprocessor, unless told otherwise; a large launch may have twice as many.
PROGRAMS = 1
#: A run of at least so many bytes goes to the copy engine, which costs some microseconds for each.
ENGINE_ABOVE = 32 << 20
#: Tables of movers that are closed and whose device never said that it had read them.  To free one would be to use it
#: again: whoever got its memory next would write what the device then takes for addresses.
_NEVER_AGAIN: list[_Table] = []
#: Seconds that :meth:`Mover.settle` gives the device.  What is started here takes milliseconds.
_SETTLING = 10.0


class Mark(NamedTuple):
    """A launch by its lane and its number there: over when the lane's counter says that number, or more."""

    lane: int
    number: int


class Started(DeviceEvent, Protocol):
    """What was started, and whether it is over."""

    @property
    def mark(self) -> Mark | None:
        """How others can see it, ``None`` where they cannot."""


class Mover(Protocol):
    """Copies between addresses that the device reaches, and says when it is done.

    Threading: one thread.
    """

    def room(self, rows: int) -> Table:
        """Where the runs of the next :meth:`start` are best written, C-contiguous: the device reads them there.  The
        caller's until then, or until the next ``room``."""

    @property
    def counters(self) -> Where | None:
        """Where other processes of this host find how far the lanes have come, ``None`` where nothing is counted."""

    def start(
        self, runs: Table, nbytes: int | None = None, longest: int | None = None, origins: Origins = NOWHERE
    ) -> Started:
        """Begin to copy every run.  Never waits.  ``runs``: what :meth:`room` gave, or anything else, which is the
        caller's again afterwards; ``origins``: theirs.  ``nbytes``: of all of them; ``longest``: the greatest length;
        where they are known.

        Until the event says that it is over, neither side may be touched, nor unmapped.  Raises what the device says
        where nothing was begun or everything that was begun is over; else :class:`Adrift`.
        """

    def settle(self) -> bool:
        """Wait until the device has finished what was started here, and no peer; whether it says so."""

    def figures(self) -> Mapping[str, float]:
        """Counts and bytes, by the way that they went."""

    def close(self) -> None:
        """Let go of streams and tables.  Idempotent.  Nothing may be under way."""


class Adrift(TransportError):
    """Something was begun, and the device no longer says when it is over."""


class _Table:
    """Room for one launch's table, in pinned memory."""

    def __init__(self, pinned: Any) -> None:
        self.pinned = pinned
        self.host: npt.NDArray[np.int64] = pinned.numpy()
        self.address: int = pinned.data_ptr()
        #: What was given of it last.
        self.runs: Table | None = None
        self.rows = len(self.host) // 3
        self._views: dict[int, Table] = {}

    def of(self, rows: int) -> Table:
        """Its beginning, as a table of so many rows.  Requests are alike, and a view costs more than to remember
        it."""
        runs = self._views.get(rows)
        if runs is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            runs = self._views[rows] = self.host[: 3 * rows].reshape(3, rows)
        self.runs = runs
        return runs


def _tables(count: int, rows: int) -> list[_Table]:
    import torch

    return [_Table(pinned) for pinned in torch.empty((count, 3 * rows), dtype=torch.int64, pin_memory=True)]


class _Recorded:
    """A place in a stream, and whether the device has come there.  Its event goes back once that was seen."""

    __slots__ = ("_events", "_handle", "mark")

    def __init__(self, events: Events, handle: int, mark: Mark | None) -> None:
        self._events = events
        self._handle: int | None = handle
        self.mark = mark

    @property
    def seen(self) -> bool:
        """Whether a query has said that it is over; the device is not asked."""
        return self._handle is None

    def query(self) -> bool:
        handle = self._handle
        if handle is None:
            return True
        if not self._events.over(handle):
            return False
        self._handle = None
        return True


def _over(query: Callable[[], bool]) -> bool:
    try:
        return query()
    except Exception:
        return False  # a device that has failed says nothing of what it still does


class Events:
    """The driver's events, used again: to make one costs more than to record it."""

    def __init__(self, cuda: Driver) -> None:
        self._cuda = cuda
        self._made: list[int] = []
        self._free: list[int] = []
        self._closed = False

    def record(self, stream: int, mark: Mark | None = None) -> _Recorded:
        """Behind all that is in the stream, where ``mark`` is, too."""
        free = self._free
        if not free:
            made = self._cuda.event()
            self._made.append(made)
            free.append(made)
        self._cuda.record(free[-1], stream)  # where it fails, the event stays
        return _Recorded(self, free.pop(), mark)

    def over(self, handle: int) -> bool:
        """Whether the device has come there; then the event is free again, and this may not be asked once more."""
        if self._closed:
            return True
        if not self._cuda.reached(handle):
            return False
        self._free.append(handle)
        return True

    def close(self) -> None:
        """What was recorded is over.  Idempotent."""
        self._closed = True
        self._free.clear()
        while self._made:
            with contextlib.suppress(DriverError):  # of a device that has failed, which has been told where it mattered
                self._cuda.forget(self._made.pop())


class DeviceMover:
    """See :class:`Mover`.  ``programs``: how many the kernel may have at once; ``engine_above``: bytes of a run that
    goes to the copy engine; ``None``: what was measured.  ``counted``: other processes want to see what is over, so
    that there are counters where the device can."""

    def __init__(
        self, cuda: Driver, device: int, programs: int | None, engine_above: int | None, *, counted: bool = False
    ) -> None:
        import torch

        from kvbaton_cuda_ipc import scatter
        from kvbaton_cuda_ipc.kernels import kernels

        self._double = programs is None
        if programs is None:
            programs = PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)

        self._cuda = cuda
        self._ordinal = device
        self._device = torch.device("cuda", device)
        self._programs = programs
        self._engine_above = ENGINE_ABOVE if engine_above is None else engine_above
        self._kernels = kernels(cuda, device)
        self._lanes = [torch.cuda.Stream(self._device) for _ in range(LANES)]
        self._streams = [lane.cuda_stream for lane in self._lanes]
        self._turn = 0
        self._events = Events(cuda)
        self._plan = scatter.plan
        self._free: list[_Table] = []
        self._busy: deque[tuple[_Table, _Recorded]] = deque()
        #: Given to be written, and not started.
        self._given: _Table | None = None
        #: Of launches of which the device does not say whether they are over: kept, and never used again (C6.1).
        self._adrift: list[_Table] = []
        self._figures = dict.fromkeys(
            ("launches_total", "kernel_bytes_total", "kernel_runs_total", "engine_bytes_total", "engine_runs_total"), 0
        )
        self._free += _tables(_TABLES, _ROWS)
        torch.cuda.synchronize(self._device)
        self._counters: Counters | None = None
        if counted:
            try:
                self._counters = Counters(cuda, self._streams, self.settle)
            except TransportError as error:
                _log.info("peers hear of what has come by words only: %s", error)

    @property
    def counters(self) -> Where | None:
        return None if self._counters is None else self._counters.where

    def room(self, rows: int) -> Table:
        self._give_back()
        self._given = table = self._take(rows)
        return table.of(rows)

    def start(
        self, runs: Table, nbytes: int | None = None, longest: int | None = None, origins: Origins = NOWHERE
    ) -> Started:
        self._turn = lane = (self._turn + 1) % LANES
        stream = self._streams[lane]
        counters = self._counters
        launched = False
        try:
            if longest is None:
                longest = int(np.maximum.reduce(runs[2]))
            if longest >= self._engine_above:
                runs, nbytes = self._by_engine(runs, origins, stream), None
                longest = int(np.maximum.reduce(runs[2], initial=0))
            if runs.shape[1]:
                self._by_kernel(runs, longest, nbytes, origins, stream)
                launched = True
            mark = None if counters is None else Mark(lane, counters.raise_behind(lane))
            # behind the number: where the event was seen, nobody who reads it then reads too little
            event = self._events.record(stream, mark)
            if launched:
                assert self._given is not None
                self._busy.append((self._given, event))
                self._given = None
        except BaseException as error:
            # whatever has failed, the device may read the table, until it has said that it does nothing any more
            table, self._given = self._given, None
            if table is not None:
                self._adrift.append(table)
            if not isinstance(error, Exception):
                raise
            if not self.settle():
                raise Adrift(f"T5: the device failed, and does not say what it still does: {error}") from error
            if table is not None:
                self._free.append(self._adrift.pop())
            raise
        return event

    def _by_engine(self, runs: Table, origins: Origins, stream: int) -> Table:
        """Start what the copy engine is better at; what is left."""
        large = runs[2] >= self._engine_above
        for source, target, length in runs[:, large].T.tolist():
            self._cuda.copy(origins[1] + target, origins[0] + source, length, stream)
            self._figures["engine_bytes_total"] += length
            self._figures["engine_runs_total"] += 1
        return runs[:, ~large]

    def _by_kernel(self, runs: Table, longest: int, nbytes: int | None, origins: Origins, stream: int) -> None:
        """Launch it, with the table that was given last, which then stays the given one."""
        count = runs.shape[1]
        if self._given is None or self._given.runs is not runs:
            mine = self.room(count)
            mine[:] = runs
            runs = mine
        launch = self._plan(runs, self._programs, self.room, longest, nbytes, origins, self._double)
        table = self._given
        assert table is not None
        self._kernels.run(launch, table.pinned, stream, table.address)
        figures = self._figures
        figures["launches_total"] += 1
        figures["kernel_runs_total"] += count
        figures["kernel_bytes_total"] += launch.nbytes

    def _give_back(self) -> None:
        table, self._given = self._given, None
        if table is not None:
            self._free.append(table)

    def _take(self, rows: int) -> _Table:
        # those whose launches somebody has seen to be over come first: few are in use, and these are in the caches
        while self._busy and self._busy[0][1].seen:
            self._free.append(self._busy.popleft()[0])
        if not self._free:
            while self._busy and self._busy[0][1].query():
                self._free.append(self._busy.popleft()[0])
        if self._free and self._free[-1].rows >= rows:
            return self._free.pop()
        (table,) = _tables(1, max(_ROWS, 1 << (rows - 1).bit_length()))
        if self._free:
            self._free.pop()  # the larger one takes its place
        return table

    def settle(self) -> bool:
        limit = time.monotonic() + _SETTLING
        try:
            while not self._idle():
                if time.monotonic() > limit:
                    return False
                time.sleep(0.0001)
        except Exception:
            return False  # a device that has failed says nothing of what it still does
        return True

    def _idle(self) -> bool:
        return all(lane.query() for lane in self._lanes)

    def figures(self) -> Mapping[str, float]:
        tables = len(self._free) + len(self._busy) + len(self._adrift) + (self._given is not None)
        return {**self._figures, "tables": tables}

    def close(self) -> None:
        if self._counters is not None:
            self._counters.close(quiet=_over(self._idle))
        _NEVER_AGAIN.extend(self._adrift)
        _NEVER_AGAIN.extend(table for table, event in self._busy if not _over(event.query))
        self._given = None
        self._adrift.clear()
        self._busy.clear()
        self._free.clear()
        self._lanes.clear()
        self._events.close()
