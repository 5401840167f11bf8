"""The kernel of :mod:`~kvbaton_cuda_ipc.scatter`, compiled for a device, proved on it, and launched.

**Proved**: a compiler can be wrong, and a copy that is wrong corrupts a cache without a word.  (Triton 3.6.0 took the
lengths of a program's first tile for those of all its tiles, when the kernel asked for the longest of each.)  So what
was compiled moves runs of very unequal lengths over several tiles first, and every byte of the target is looked at.

**Launched** by the driver itself, whose call costs less than Triton's launcher does, where the compiled kernel takes
its arguments as we know it; else by that launcher.  Either way is proved before it is used.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
import struct
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from kvbaton.errors import TransportError
from kvbaton_cuda_ipc import scatter
from kvbaton_cuda_ipc.driver import Driver, DriverError

_log = logging.getLogger(__name__)
#: The kernel's own parameters as the compiler writes them, behind which it may have up to two addresses of its own.
_PARAMETERS = ["u64", *["u32"] * 5, "u64", "u64"]
_PARAMETER = re.compile(r"^\s*\.param\s+\.(\w+)\b[^,;]*_param_\d+,?$", re.MULTILINE)
_ARGUMENTS = struct.Struct("@Q5i4Q")
_OFFSETS = (0, 8, 12, 16, 20, 24, 32, 40, 48, 56)
_WARP = 32


class Unsuitable(Exception):
    """A compiled kernel that the driver cannot be handed as we would: Triton's affair, which changes with it."""


class _Arguments(threading.local):
    """Where the driver reads a launch's arguments: in each thread elsewhere, for others run while it does."""

    def __init__(self) -> None:
        self.values = bytearray(_ARGUMENTS.size)
        self._kept = ctypes.c_char.from_buffer(self.values)  # it cannot move as long as this is
        first = ctypes.addressof(self._kept)
        self._places = (ctypes.c_void_p * len(_OFFSETS))(*[first + offset for offset in _OFFSETS])
        self.address = ctypes.addressof(self._places)


class Launch:
    """One compiled kernel, launched by the driver.  Raises :class:`Unsuitable` where that is not known to be right.

    Threading: any; connectors of one process share it.
    """

    def __init__(self, cuda: Driver, compiled: Any) -> None:
        try:
            about = compiled.metadata
            taken = _PARAMETER.findall(compiled.asm["ptx"].partition(".entry")[2].partition(")")[0])
            beside = taken[len(_PARAMETERS) :]
            plain = (
                taken[: len(_PARAMETERS)] == _PARAMETERS
                and beside in ([], ["u64"], ["u64", "u64"])
                and about.num_ctas == 1
                and about.shared == about.global_scratch_size == about.profile_scratch_size == 0
                and not about.launch_cooperative_grid
                and not about.launch_pdl
            )
            self._function = int(compiled.function)
            self._threads = int(about.num_warps) * _WARP
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unsuitable(f"Triton's compiled kernels are not as known: {error!r}") from error
        if not plain:
            raise Unsuitable(f"the kernel takes {', '.join(taken)} and {about}")
        self._cuda = cuda
        self._arguments = _Arguments()

    def __call__(self, plan: scatter.Plan, _table: Any, stream: int, address: int) -> None:
        mine = self._arguments
        _ARGUMENTS.pack_into(
            mine.values, 0, address, plan.rows, plan.wide, plan.per, plan.piece, plan.narrow, *plan.origins, 0, 0
        )
        self._cuda.launch(self._function, plan.programs, self._threads, stream, mine.address)


class Kernels:
    """The kernel, compiled for a device: one for each shape of tile."""

    def __init__(self, cuda: Driver) -> None:
        self._cuda = cuda
        self._launches: dict[int, Callable[[scatter.Plan, Any, int, int], None]] = {}
        #: Why Triton's launcher is used; empty where the driver is.
        self.indirect = ""

    def compile(self) -> None:
        """For the current device.  Takes seconds the first time, on a machine that has not done it before.

        Raises :class:`~kvbaton.errors.TransportError` where nothing could be compiled, or what was moves wrong bytes.
        """
        import torch
        import triton

        stream = torch.cuda.current_stream().cuda_stream
        for rows, words in scatter.TILES:
            proof = Proof(rows, words)
            try:
                compiled = proof.by(scatter.launch)
            except Exception as error:  # Triton's, its C compiler's, or CUDA's
                raise TransportError(
                    f"triton {triton.__version__} compiles no kernel for this device: {type(error).__name__}: {error};"
                    " install another version of triton, or choose the transport nixl"
                ) from error
            if not proof.holds():
                raise TransportError(
                    f"T3: the kernel that triton {triton.__version__} makes for this device moves wrong bytes (tiles "
                    f"of {rows} rows): install another version of triton, or choose the transport nixl"
                )
            try:
                direct = Launch(self._cuda, compiled)
                proof.by(functools.partial(direct, stream=stream, address=proof.address))
                if not proof.holds():
                    raise Unsuitable(f"a tile of {rows} rows was not moved")
                self._launches[rows] = direct
            except (Unsuitable, DriverError) as error:
                self.indirect = str(error)
                self._launches[rows] = _by_triton

    def run(self, plan: scatter.Plan, table: Any, stream: int, address: int) -> None:
        """On the stream with this handle, of the device that the kernel was compiled for, which is current.  ``table``:
        a tensor that holds the plan's at its beginning, in that device's memory or pinned in the host's, until the
        launch is over; ``address``: the tensor's ``data_ptr()``, which costs 5 microseconds where nobody has asked for
        a while."""
        self._launches[plan.tile_rows](plan, table, stream, address)


def _by_triton(plan: scatter.Plan, table: Any, stream: int, _address: int) -> None:
    import torch

    with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
        scatter.launch(plan, table)


class Proof:
    """Runs that show whether a kernel for such tiles moves what it should, and nothing else: of lengths from one vector
    to what takes a tile three steps, or tiles of one row two pieces of two steps each; several tiles for each program,
    short ones first; and some that are not aligned."""

    def __init__(self, rows: int, words: int, device: str = "cuda") -> None:
        import torch

        draw = np.random.default_rng(rows)
        width = 8 * words
        longest = 3 * width
        lengths = draw.integers(1, longest // 16, 13 * rows // 2 + 6, endpoint=True) * 16
        lengths[: 2 * rows] = 16
        lengths[-1] = longest
        lengths = np.append(lengths, (1, 37, 4111))
        order = draw.permutation(len(lengths))
        spans = lengths + 48
        reads, writes = spans.cumsum() - spans, np.empty_like(spans)
        writes[order] = spans[order].cumsum() - spans[order]
        for places in (reads, writes):
            places[:-3] = (places[:-3] + 15) // 16 * 16
        writes[-3:] += (1, 3, 5)
        size = int(spans.sum()) + 64
        held = draw.integers(0, 128, size, np.uint8)
        self._expected = np.full(size, 200, np.uint8)
        for read, write, length in zip(reads.tolist(), writes.tolist(), lengths.tolist(), strict=True):
            self._expected[write : write + length] = held[read : read + length]
        self._source = torch.from_numpy(held).to(device)
        self._target = torch.empty_like(self._source)
        runs = self._source.data_ptr() + reads, self._target.data_ptr() + writes, lengths
        plan = scatter.plan(np.stack(runs), 2)
        # for lengths this unequal another tile would be chosen, and no pieces; each has to be right for any lengths
        per = 2 if rows == 1 else 1
        plan = plan._replace(per=per, piece=longest // per, tile_rows=rows)
        # some are not aligned, so that it is planned in addresses; what the kernel adds to places is to be seen, too
        origins = self._source.data_ptr() - 48, self._target.data_ptr() + 32
        plan.table[:2] -= np.array(origins).reshape(2, 1)
        self._plan = plan._replace(origins=origins)
        assert plan.table[2, : plan.wide].max() == longest, "a run was cut"
        table = torch.from_numpy(self._plan.table)
        self._table = table.pin_memory() if self._target.is_cuda else table  # where a mover's are, too
        #: The table's.
        self.address: int = self._table.data_ptr()

    def by(self, run: Callable[[scatter.Plan, Any], Any]) -> Any:
        """Let a launch move them, into a target that holds nothing of them; what it returns."""
        import torch

        self._target.fill_(200)
        made = run(self._plan, self._table)
        if self._target.is_cuda:
            torch.cuda.synchronize()
        return made

    def holds(self) -> bool:
        return bool(np.array_equal(self._target.cpu().numpy(), self._expected))


def kernels(cuda: Driver, device: int) -> Kernels:
    """Those of a CUDA device, compiled once: it takes seconds, and no call of a connector may.

    Raises :class:`~kvbaton.errors.TransportError` as :meth:`Kernels.compile` did, whenever it is asked again.
    """
    made = _compiled(cuda, device)
    if isinstance(made, str):
        raise TransportError(made)
    return made


@functools.cache
def _compiled(cuda: Driver, device: int) -> Kernels | str:
    """Or why there are none."""
    import torch

    made = Kernels(cuda)
    try:
        with torch.cuda.device(device):
            made.compile()
    except TransportError as error:
        return str(error)
    if made.indirect:
        _log.info("each launch costs more: it goes by Triton and not by the driver: %s", made.indirect)
    return made
