"""What the transport ``ucx`` should reach between two processes of one host."""

from __future__ import annotations

from kvbaton.connector import Advice, SelfTest
from kvbaton.ucx import left_out, out_of_reach
from kvbaton_cuda_ipc.options import UcxOptions

#: Bytes per second: less than any ``cuda_ipc`` reaches, more than any TCP of one connection does from device memory.
_LEAST = 3e9


def advise(options: UcxOptions, found: SelfTest) -> list[Advice]:
    """Host memory goes by TCP, as it must where UCX is to tell of a peer that dies; device memory by ``cuda_ipc``."""
    rate = f"{found.rate / 1e9:.1f} GB/s"
    if found.memory == "host":
        return [
            Advice(
                "note", f"host memory goes by TCP ({rate}), as is meant: UCX tells of a dead peer there alone", "",
                'transport.name = "nixl" is faster where one process may write into another\'s memory',
            )
        ]  # fmt: skip
    if found.rate >= min(_LEAST, found.plain):
        return []
    return [Advice("degraded", f"device memory falls to TCP or the host: {rate}", "cuda_ipc", _remedy(options, found))]


def _remedy(options: UcxOptions, found: SelfTest) -> str:
    return (
        left_out(("cuda_copy", "cuda_ipc"), options.ucx.get("TLS"), found)
        or out_of_reach(found)
        or "stages in one container, or docker run --ipc=host --pid=host"
    )
