"""What UCX should choose between two processes of one host, and why it may not have."""

from __future__ import annotations

import re

from kvbaton.connector import Advice, SelfTest
from kvbaton.ucx import left_out, out_of_reach
from kvbaton_nixl.options import NixlOptions

#: UCX's names of ways that need no network, by memory.
_GOOD = {"host": ("cma", "xpmem", "knem", "sysv", "posix", "mm"), "cuda": ("cuda_ipc", "gdr_copy", "cuda_copy")}
#: ... and of network cards.
_CARDS = ("rc", "dc", "ud", "ib", "srd", "gga")
#: Bytes per second: more than TCP carries between two processes of one host, where it copies each byte at least twice.
_TCP_AT_MOST = 25e9
#: A lane may be several, each with its share: ``52% on tcp/lo and 48% on tcp/eth0``.
_WAY = re.compile(r"(?:^|on )([a-z]\w*)")


def advise(options: NixlOptions, found: SelfTest) -> list[Advice]:
    """On large writes: they should go by ``cma`` in host memory, by ``cuda_ipc`` in that of devices.

    From one end's memory to the other's alone: by which way UCX would write into other memory is no matter.
    """
    lanes = [
        lane for lane in found.lanes
        if lane.operation.split()[0] == "write" and lane.last is None
        and (lane.source, lane.target) == (found.memory, found.memory)
    ]  # fmt: skip
    if not lanes:
        return []
    best = "cuda_ipc" if found.memory == "cuda" else "cma"
    ways = {way for lane in lanes for way in _WAY.findall(lane.lane)}
    if best in ways or (found.memory == "host" and ways & set(_GOOD["host"])):
        return []
    named = ", ".join(sorted(lane.lane for lane in lanes))
    rate = f"{found.rate / 1e9:.1f} GB/s"
    memory = "device memory" if found.memory == "cuda" else "host memory"
    if "tcp" in ways and found.rate > _TCP_AT_MOST:
        # what was measured is what happens; what UCX says of itself, and how it is read, may be wrong
        return [
            Advice("note", f"UCX names {named} for {memory}, and {rate} is more than TCP carries: it is not by that")
        ]
    if "tcp" in ways:
        text = f"{memory} falls to TCP ({named}): {rate}"
    elif any(way.startswith(_CARDS) for way in ways):
        text = f"{memory} goes by a network card ({named}) although both processes are on this host: {rate}"
    else:
        text = f"{memory} goes by {named}: {rate}"
    return [Advice("degraded", text, best, _remedy(options, found, best))]


def _remedy(options: NixlOptions, found: SelfTest, best: str) -> str:
    """What keeps UCX from the best way, as far as it can be known here."""
    wanted = ("cuda_copy", best) if found.memory == "cuda" else (best,)
    if refused := left_out(wanted, options.ucx.get("TLS"), found):
        return refused
    if found.memory == "host":
        if found.ptrace_scope is not None and found.ptrace_scope >= 2:
            return (
                f"kernel.yama.ptrace_scope is {found.ptrace_scope} and forbids it: set it to 1, or give the processes"
                " CAP_SYS_PTRACE"
            )
        return "containers may forbid it: docker run --cap-add=SYS_PTRACE, and stages in one container"
    return out_of_reach(found) or (
        "stages in one container, or docker run --ipc=host --pid=host; memory of cudaMalloc, not of a memory pool;"
        " UCX_LOG_LEVEL=info shows what UCX makes of the device"
    )
