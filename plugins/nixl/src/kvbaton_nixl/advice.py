"""What UCX should choose between two processes of one host, and why it may not have."""

from __future__ import annotations

from collections.abc import Iterable

from kvbaton.connector import Advice, Lane, SelfTest
from kvbaton_nixl.options import NixlOptions

#: UCX's names of ways that need no network, by memory.
_GOOD = {"host": ("cma", "xpmem", "knem", "sysv", "posix", "mm"), "cuda": ("cuda_ipc", "gdr_copy", "cuda_copy")}
#: ... and of network cards.
_CARDS = ("rc", "dc", "ud", "ib", "srd", "gga")


def advise(options: NixlOptions, found: SelfTest) -> list[Advice]:
    """On large writes: they should go by ``cma`` in host memory, by ``cuda_ipc`` in that of devices."""
    lanes = [lane for lane in found.lanes if lane.operation.split()[0] == "write" and lane.last is None]
    if not lanes:
        return []
    best = "cuda_ipc" if found.memory == "cuda" else "cma"
    ways = {_way(lane) for lane in lanes}
    if best in ways or (found.memory == "host" and ways & set(_GOOD["host"])):
        return []
    named = ", ".join(sorted(lane.lane for lane in lanes))
    rate = f"{found.rate / 1e9:.1f} GB/s"
    memory = "device memory" if found.memory == "cuda" else "host memory"
    if "tcp" in ways:
        text = f"{memory} falls to TCP ({named}): {rate}"
    elif any(way.startswith(_CARDS) for way in ways):
        text = f"{memory} goes by a network card ({named}) although both processes are on this host: {rate}"
    else:
        text = f"{memory} goes by {named}: {rate}"
    return [Advice("degraded", text, best, _remedy(options, found, best))]


def _remedy(options: NixlOptions, found: SelfTest, best: str) -> str:
    """What keeps UCX from the best way, as far as it can be known here; the option comes before the variable."""
    wanted = ("cuda_copy", best) if found.memory == "cuda" else (best,)
    for where, ways in (('options.ucx, "TLS"', options.ucx.get("TLS")), ("UCX_TLS", found.environment.get("UCX_TLS"))):
        if ways is None:
            continue
        if not _allows(ways, wanted):
            return f"{where} is {ways} and leaves it out: unset it, or set {_with(ways, wanted)}"
        break  # the option overrides the variable
    if found.memory == "host":
        if found.ptrace_scope is not None and found.ptrace_scope >= 2:
            return (
                f"kernel.yama.ptrace_scope is {found.ptrace_scope} and forbids it: set it to 1, or give the processes"
                " CAP_SYS_PTRACE"
            )
        return "containers may forbid it: docker run --cap-add=SYS_PTRACE, and stages in one container"
    if found.peer_access is False:
        one, other = found.devices
        return (
            f"devices {one} and {other} do not reach each other's memory (nvidia-smi topo -p2p rw): choose two that do"
        )
    return (
        "stages in one container, or docker run --ipc=host --pid=host; memory of cudaMalloc, not of a memory pool;"
        " UCX_LOG_LEVEL=info shows what UCX makes of the device"
    )


def _way(lane: Lane) -> str:
    return lane.lane.partition("/")[0].split()[-1] if lane.lane else ""


def _allows(ways: str, wanted: Iterable[str]) -> bool:
    names = set(ways.removeprefix("^").split(","))
    aliases = {
        "cuda_ipc": {"cuda_ipc", "cuda"}, "cuda_copy": {"cuda_copy", "cuda"}, "cma": {"cma", "sm", "shm"}
    }  # fmt: skip
    if ways.startswith("^"):
        return not any(names & aliases[one] for one in wanted)
    return "all" in names or all(names & aliases[one] for one in wanted)


def _with(ways: str, wanted: Iterable[str]) -> str:
    if ways.startswith("^"):
        rest = [name for name in ways.removeprefix("^").split(",") if name not in (*wanted, "cuda", "sm", "shm")]
        return f"^{','.join(rest)}" if rest else "all"
    return ",".join(dict.fromkeys([*ways.split(","), *wanted]))
