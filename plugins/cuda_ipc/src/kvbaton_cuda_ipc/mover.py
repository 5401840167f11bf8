"""What moves the bytes of a chunk on a device: the kernel of :mod:`~kvbaton_cuda_ipc.scatter`, and the copy engine.

Everything is started on streams of this connector's own, *lanes* that take turns, so that the table of one chunk is
uploaded and its first tiles run while the last tiles of the one before still do.  Nothing here waits for the device:
what was started is over when its event says so.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvbaton.connector import DeviceEvent
from kvbaton.errors import TransportError
from kvbaton_cuda_ipc.driver import Driver

Column = npt.NDArray[np.int64]

#: Lanes of a connector.
LANES = 2
#: Tables that there are from the beginning, and the rows that each has room for.
_TABLES, _ROWS = 64, 8192
#: Programs of the kernel for each multiprocessor, unless told otherwise: more were not faster.
PROGRAMS = 1
#: A run of at least so many bytes goes to the copy engine, which costs some microseconds for each.
ENGINE_ABOVE = 32 << 20
#: Seconds that :meth:`Mover.settle` gives the device.  What is started here takes milliseconds.
_SETTLING = 10.0


class Mover(Protocol):
    """Copies between addresses that the device reaches, and says when it is done.

    Threading: one thread.
    """

    def start(self, source: Column, target: Column, length: Column) -> DeviceEvent:
        """Begin to copy ``length`` bytes from each address to the one at its index.  Never waits.  The columns are the
        caller's again afterwards.

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
    """Room for one launch's table: pinned memory to write it in, and device memory to upload it to."""

    def __init__(self, pinned: Any, device: Any) -> None:
        self.pinned, self.device = pinned, device
        self.host: npt.NDArray[np.int64] = pinned.numpy()
        self.from_address, self.to_address = pinned.data_ptr(), device.data_ptr()
        self.rows = len(self.host) // 3


def _tables(count: int, rows: int, device: Any) -> list[_Table]:
    import torch

    pinned = torch.empty((count, 3 * rows), dtype=torch.int64, pin_memory=True)
    there = torch.empty((count, 3 * rows), dtype=torch.int64, device=device)
    return [_Table(*ends) for ends in zip(pinned, there, strict=True)]


class DeviceMover:
    """See :class:`Mover`.  ``programs``: how many the kernel may have at once; ``engine_above``: bytes of a run that
    goes to the copy engine; ``None``: what was measured."""

    def __init__(self, cuda: Driver, device: int, programs: int | None, engine_above: int | None) -> None:
        import torch

        from kvbaton_cuda_ipc import scatter

        if programs is None:
            programs = PROGRAMS * int(torch.cuda.get_device_properties(device).multi_processor_count)

        self._cuda = cuda
        self._ordinal = device
        self._device = torch.device("cuda", device)
        self._programs = programs
        self._engine_above = ENGINE_ABOVE if engine_above is None else engine_above
        self._kernels = kernels(device)
        self._lanes = [torch.cuda.Stream(self._device) for _ in range(LANES)]
        self._streams = [lane.cuda_stream for lane in self._lanes]
        self._turn = 0
        self._event: Any = torch.cuda.Event
        self._plan = scatter.plan
        self._free: list[_Table] = []
        self._busy: deque[tuple[_Table, Any]] = deque()
        self._figures = dict.fromkeys(
            ("launches_total", "kernel_bytes_total", "kernel_runs_total", "engine_bytes_total", "engine_runs_total"), 0
        )
        self._free += _tables(_TABLES, _ROWS, self._device)
        torch.cuda.synchronize(self._device)

    def start(self, source: Column, target: Column, length: Column) -> DeviceEvent:
        self._turn = (self._turn + 1) % LANES
        lane, stream = self._lanes[self._turn], self._streams[self._turn]
        event: Any = self._event()
        table: _Table | None = None
        try:
            if int(np.maximum.reduce(length)) >= self._engine_above:
                source, target, length = self._by_engine(source, target, length, stream)
            if len(length):
                table = self._by_kernel(source, target, length, stream)
            event.record(lane)
        except Exception as error:
            if not self.settle():
                raise Adrift(f"T5: the device failed, and does not say what it still does: {error}") from error
            raise
        if table is not None:
            self._busy.append((table, event))
        return event  # type: ignore[no-any-return]

    def _by_engine(self, source: Column, target: Column, length: Column, stream: int) -> tuple[Column, Column, Column]:
        """Start what the copy engine is better at; what is left."""
        large = length >= self._engine_above
        runs = np.flatnonzero(large)
        for run in runs.tolist():
            self._cuda.copy(int(target[run]), int(source[run]), int(length[run]), stream)
        self._figures["engine_bytes_total"] += int(length[runs].sum())
        self._figures["engine_runs_total"] += len(runs)
        return source[~large], target[~large], length[~large]

    def _by_kernel(self, source: Column, target: Column, length: Column, stream: int) -> _Table:
        taken: list[_Table] = []

        def room(rows: int) -> npt.NDArray[np.int64]:
            """The plan is written where it is uploaded from."""
            if taken:
                self._free.append(taken.pop())
            taken.append(self._take(rows))
            return taken[0].host[: 3 * rows].reshape(3, rows)

        launch = self._plan(source, target, length, self._programs, room)
        (table,) = taken
        self._cuda.copy(table.to_address, table.from_address, 24 * launch.rows, stream)
        self._kernels.run(launch, table.device, stream)
        figures = self._figures
        figures["launches_total"] += 1
        figures["kernel_runs_total"] += len(length)
        figures["kernel_bytes_total"] += launch.nbytes
        return table

    def _take(self, rows: int) -> _Table:
        if not self._free:
            while self._busy and self._busy[0][1].query():
                self._free.append(self._busy.popleft()[0])
        if self._free:
            table = self._free.pop()
            if table.rows >= rows:
                return table
        (table,) = _tables(1, max(_ROWS, 1 << (rows - 1).bit_length()), self._device)
        return table

    def settle(self) -> bool:
        limit = time.monotonic() + _SETTLING
        try:
            for lane in self._lanes:
                while not lane.query():
                    if time.monotonic() > limit:
                        return False
                    time.sleep(0.0001)
        except Exception:
            return False  # a device that has failed says nothing of what it still does
        return True

    def figures(self) -> Mapping[str, float]:
        return {**self._figures, "tables": len(self._free) + len(self._busy)}

    def close(self) -> None:
        self._busy.clear()
        self._free.clear()
        self._lanes.clear()


class Kernels:
    """The kernel, compiled for a device: one for each shape of tile."""

    def __init__(self) -> None:
        self._compiled: dict[int, Any] = {}
        self._direct = False

    def compile(self) -> None:
        """For the current device.  Takes seconds the first time, on a machine that has not done it before."""
        import torch

        from kvbaton_cuda_ipc import scatter

        memory = torch.arange(8192, dtype=torch.int64, device="cuda")
        base = memory.data_ptr()
        probes = {}
        for rows, words in scatter.TILES:
            length = 8 * words
            start = np.arange(rows, dtype=np.int64) * length
            lengths = np.full(rows, length, np.int64)
            probe = scatter.plan(base + start, base + 32768 + start, lengths, 8)
            assert probe.tile_rows == rows
            probes[rows] = probe
            table = torch.from_numpy(probe.table).to("cuda")
            self._compiled[rows] = scatter.launch(probe, table)
        torch.cuda.synchronize()
        # how a compiled kernel is launched without its compiler is Triton's affair, so it is tried here
        try:
            for rows, probe in probes.items():
                memory[4096:] = -1
                self._direct = True
                self.run(probe, torch.from_numpy(probe.table).to("cuda"), torch.cuda.current_stream().cuda_stream)
                moved = int(probe.table[2].sum()) // 8
                if memory[4096 : 4096 + moved].tolist() != memory[:moved].tolist():
                    raise TypeError(f"a tile of {rows} rows was not moved")
        except (TypeError, AttributeError):
            self._direct = False
        torch.cuda.synchronize()

    def run(self, launch: Any, table: Any, stream: int) -> None:
        """On the stream with this handle, of the device that the kernel was compiled for."""
        from kvbaton_cuda_ipc import scatter

        compiled = self._compiled[launch.tile_rows]
        if self._direct:
            # an address: of a tensor the launcher would ask the driver where it is
            compiled[(launch.programs, 1, 1)](*scatter.arguments(launch, table.data_ptr()), stream=stream)
        else:
            import torch

            with torch.cuda.stream(torch.cuda.ExternalStream(stream, table.device)):
                scatter.launch(launch, table)


@functools.cache
def kernels(device: int) -> Kernels:
    """Those of a CUDA device, compiled once: it takes seconds, and no call of a connector may."""
    import torch

    made = Kernels()
    with torch.cuda.device(device):
        made.compile()
    return made
