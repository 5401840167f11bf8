"""What this machine is, as far as it matters to a transport: read from the kernel's own files; what is loaded, another
process loads.

What cannot be read is ``None``, and never an error.  A test gives another root, environment and limits.
"""

from __future__ import annotations

import os
import platform
import re
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvbaton.doctor.gpus import Gpu, GpuReport, read_gpus_apart

#: Inode numbers of the kernel's own namespaces: whoever has others is in a container, or the like.
INITIAL_NAMESPACES = {"pid": 4026531836, "ipc": 4026531839, "user": 4026531837}
_CONTAINERS = re.compile(r"docker|kubepods|containerd|libpod|lxc")
#: More than any machine has: a cgroup's way to say that there is no limit.
_NO_LIMIT = 1 << 60
#: Capability number of cross-memory attach to processes that did not agree.
_CAP_SYS_PTRACE = 19


class Port(msgspec.Struct, frozen=True):
    """A port of an RDMA device, in the kernel's words."""

    device: str
    port: int
    state: str
    link_layer: str
    rate: str

    @property
    def active(self) -> bool:
        return "ACTIVE" in self.state.upper() or self.state.startswith("4:")


class Machine(msgspec.Struct, frozen=True):
    """Bytes and counts; ``None`` where it could not be read, or, of a limit, where there is none."""

    system: str
    kernel: str
    architecture: str
    processor: str
    cores: int
    cores_usable: int
    memory: int | None
    memory_available: int | None
    memory_limit: int | None
    cpu_limit: float | None
    gpus: tuple[Gpu, ...]
    gpu_driver: str
    cuda: str
    gpu_reason: str
    gpu_peers: tuple[tuple[int, int, str], ...]
    shm_bytes: int | None
    shm_free: int | None
    shmmax: int | None
    shmall: int | None
    shmmni: int | None
    ptrace_scope: int | None
    may_ptrace: bool
    user_namespaces: int | None
    memlock: int | None
    nofile: int | None
    nofile_hard: int | None
    rdma: tuple[Port, ...]
    rdma_usable: bool
    container: str
    namespaces: tuple[str, ...]
    environment: dict[str, str]


class Note(msgspec.Struct, frozen=True):
    """Something about the machine that bends what transports can do, and what to do about it."""

    subject: str
    text: str
    remedy: str = ""


def _limit(which: int) -> tuple[int, int]:
    return resource.getrlimit(which)


def _space(path: Path) -> tuple[int, int] | None:
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


@dataclass(frozen=True)
class Sources:
    """Where it is read: ``root`` stands for ``/``."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    limit: Callable[[int], tuple[int, int]] = _limit
    space: Callable[[Path], tuple[int, int] | None] = _space
    gpus: Callable[[], GpuReport] = read_gpus_apart

    def text(self, path: str) -> str | None:
        try:
            return (self.root / path).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, path: str) -> int | None:
        text = self.text(path)
        try:
            return int(text.split()[0]) if text else None
        except ValueError:
            return None


def read_machine(sources: Sources | None = None) -> Machine:
    """Read everything.  Takes some hundred milliseconds, and a minute where the GPU driver is stuck."""
    found = sources or Sources()
    memory = _meminfo(found)
    gpus = found.gpus()
    shm = found.space(found.root / "dev/shm")
    memlock = found.limit(resource.RLIMIT_MEMLOCK)[0]
    nofile, nofile_hard = found.limit(resource.RLIMIT_NOFILE)
    ports = _ports(found)
    return Machine(
        system=_system(found), kernel=platform.release(), architecture=platform.machine(), processor=_processor(found),
        cores=os.cpu_count() or 1, cores_usable=_usable(),
        memory=memory.get("MemTotal"), memory_available=memory.get("MemAvailable"),
        memory_limit=_memory_limit(found), cpu_limit=_cpu_limit(found),
        gpus=gpus.gpus, gpu_driver=gpus.driver, cuda=gpus.cuda, gpu_reason=gpus.reason, gpu_peers=gpus.peers,
        shm_bytes=shm[0] if shm else None, shm_free=shm[1] if shm else None,
        shmmax=_bounded(found.number("proc/sys/kernel/shmmax")),
        shmall=_bounded(found.number("proc/sys/kernel/shmall")),
        shmmni=found.number("proc/sys/kernel/shmmni"),
        ptrace_scope=found.number("proc/sys/kernel/yama/ptrace_scope"), may_ptrace=_may_ptrace(found),
        user_namespaces=found.number("proc/sys/user/max_user_namespaces"),
        memlock=_finite(memlock), nofile=_finite(nofile), nofile_hard=_finite(nofile_hard),
        rdma=ports, rdma_usable=any((found.root / "dev/infiniband").glob("uverbs*")),
        container=_container(found), namespaces=_namespaces(found), environment=_environment(found.environment),
    )  # fmt: skip


# -- the parts ---------------------------------------------------------------------------------------------------------


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _bounded(limit: int | None) -> int | None:
    return None if limit is None or limit >= _NO_LIMIT else limit


def _usable() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return os.cpu_count() or 1


def _system(found: Sources) -> str:
    for line in (found.text("etc/os-release") or "").splitlines():
        if line.startswith("PRETTY_NAME="):
            return line.partition("=")[2].strip('"')
    return platform.system()


def _processor(found: Sources) -> str:
    for line in (found.text("proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return " ".join(line.partition(":")[2].split())
    return ""


def _meminfo(found: Sources) -> dict[str, int]:
    rows = re.findall(r"^(\w+):\s+(\d+) kB", found.text("proc/meminfo") or "", re.MULTILINE)
    return {name: int(count) * 1024 for name, count in rows}


def _memory_limit(found: Sources) -> int | None:
    for path in ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = found.number(path)
        if limit is not None:
            return _bounded(limit)
    return None


def _cpu_limit(found: Sources) -> float | None:
    """Cores that a cgroup allows."""
    words = (found.text("sys/fs/cgroup/cpu.max") or "").split()
    if len(words) == 2 and words[0].isdigit() and int(words[1]):
        return int(words[0]) / int(words[1])
    quota, period = (found.number(f"sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period"))
    return quota / period if quota and period and quota > 0 else None


def _may_ptrace(found: Sources) -> bool:
    match = re.search(r"^CapEff:\s+([0-9a-f]+)$", found.text("proc/self/status") or "", re.MULTILINE)
    return match is not None and bool(int(match[1], 16) >> _CAP_SYS_PTRACE & 1)


def _ports(found: Sources) -> tuple[Port, ...]:
    ports = []
    base = found.root / "sys/class/infiniband"
    for folder in sorted(base.glob("*/ports/*")):
        if folder.name.isdigit():
            state, layer, rate = (
                found.text(str(folder.relative_to(found.root) / name)) or "unknown"
                for name in ("state", "link_layer", "rate")
            )
            ports.append(Port(folder.parent.parent.name, int(folder.name), state, layer, rate))
    return tuple(ports)


def _container(found: Sources) -> str:
    """Which kind of container this looks like; empty where it does not."""
    if "KUBERNETES_SERVICE_HOST" in found.environment:
        return "kubernetes"
    if (found.root / ".dockerenv").exists():
        return "docker"
    if (found.root / "run/.containerenv").exists():
        return "podman"
    match = _CONTAINERS.search(found.text("proc/1/cgroup") or "")
    return match[0] if match else ""


def _namespaces(found: Sources) -> tuple[str, ...]:
    """Those of pid, ipc and user that are not the kernel's own."""
    own = []
    for name, initial in INITIAL_NAMESPACES.items():
        try:
            inode = re.search(r"\d+", str((found.root / f"proc/self/ns/{name}").readlink()))
        except OSError:
            continue
        if inode is not None and int(inode[0]) != initial:
            own.append(name)
    return tuple(own)


def _environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables that change which way bytes go."""
    wanted = re.compile(r"UCX_\w+|NIXL_\w+|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NVIDIA_VISIBLE_DEVICES")
    return {name: value for name, value in sorted(environment.items()) if wanted.fullmatch(name)}


# -- what of it is worth a word ----------------------------------------------------------------------------------------

_SMALL_SHM = 1 << 30
_FEW_FILES = 4096
_LITTLE_LOCKED = 1 << 30


def notes(machine: Machine) -> list[Note]:
    """What limits transports here.  None of it decides anything: that is for what was tried."""
    return [*_of_memory(machine), *_of_gpus(machine), *_of_network(machine), *_of_variables(machine)]


def _of_memory(machine: Machine) -> list[Note]:
    found = []
    if machine.shm_bytes is not None and machine.shm_bytes < _SMALL_SHM:
        found.append(
            Note(
                "/dev/shm", f"it has {machine.shm_bytes >> 20} MiB: transports through shared memory may find no room",
                "give the container more: docker run --shm-size=8g; in Kubernetes an emptyDir with medium: Memory",
            )
        )  # fmt: skip
    if machine.ptrace_scope is not None and machine.ptrace_scope >= 2 and not machine.may_ptrace:
        found.append(
            Note(
                "ptrace_scope",
                f"it is {machine.ptrace_scope}: no process may write into another's memory, so that UCX has no"
                " cross-memory attach (cma)",
                "sysctl kernel.yama.ptrace_scope=1 (3 stays until the next boot), or give the processes CAP_SYS_PTRACE",
            )
        )  # fmt: skip
    if machine.nofile is not None and machine.nofile < _FEW_FILES:
        more = "" if machine.nofile_hard is None else f" (at most {machine.nofile_hard})"
        found.append(
            Note(
                "open files", f"a process may have {machine.nofile}; NIXL wants about 15 for each peer",
                f"ulimit -n 65536{more}",
            )
        )  # fmt: skip
    if machine.cores_usable < 2 or (machine.cpu_limit is not None and machine.cpu_limit < 2):
        found.append(
            Note("cores", "fewer than two may be used: a source and a target that poll wait for each other", "")
        )
    return found


def _of_gpus(machine: Machine) -> list[Note]:
    found = []
    for gpu in machine.gpus:
        if gpu.compute_mode in ("exclusive process", "prohibited"):
            found.append(
                Note(
                    f"GPU {gpu.index}", f"its compute mode is {gpu.compute_mode}: two stages cannot share it",
                    f"nvidia-smi -i {gpu.index} -c DEFAULT, or a GPU for each stage",
                )
            )  # fmt: skip
        if gpu.mig:
            found.append(
                Note(f"GPU {gpu.index}", "MIG is on: memory of one instance cannot be opened from another", "")
            )
    apart = [(a, b) for a, b, how in machine.gpu_peers if how == "none"]
    if apart:
        pairs = ", ".join(f"{a} and {b}" for a, b in apart[:4]) + (" and others" if len(apart) > 4 else "")
        found.append(
            Note(
                "peer access", f"GPUs {pairs} cannot reach each other's memory: bytes go through the host",
                "nvidia-smi topo -p2p rw says why; in virtual machines, IOMMU and ACS settings do",
            )
        )  # fmt: skip
    own = [name for name in machine.namespaces if name in ("pid", "ipc")]
    if machine.gpus and own and machine.container:
        found.append(
            Note(
                "container", f"it has {' and '.join(own)} namespaces of its own: stages in different containers cannot"
                " use CUDA IPC",
                "stages in one container, or docker run --ipc=host --pid=host",
            )
        )  # fmt: skip
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if machine.gpus and visible is not None and visible.strip() in ("", "-1"):
        found.append(Note("CUDA_VISIBLE_DEVICES", "it hides every GPU from what is started here", "unset it"))
    return found


def _of_network(machine: Machine) -> list[Note]:
    found = [
        Note(f"{port.device}/{port.port}", f"the port is {port.state}", "look at the cable and ibstat")
        for port in machine.rdma
        if not port.active
    ]
    if machine.rdma and not machine.rdma_usable:
        found.append(
            Note(
                "/dev/infiniband", "there are RDMA devices, and it has none of theirs: UCX cannot use them",
                "docker run --device=/dev/infiniband --cap-add=IPC_LOCK; in Kubernetes the RDMA device plugin",
            )
        )  # fmt: skip
    if machine.rdma and machine.memlock is not None and machine.memlock < _LITTLE_LOCKED:
        found.append(
            Note(
                "locked memory", f"a process may lock {machine.memlock >> 10} KiB, and RDMA locks what is registered",
                "ulimit -l unlimited; of a container, --ulimit memlock=-1",
            )
        )  # fmt: skip
    return found


def _of_variables(machine: Machine) -> list[Note]:
    found = []
    ways = machine.environment.get("UCX_TLS")
    if ways is not None:
        names = ways.removeprefix("^").split(",")
        if not ways.startswith("^") and not {"all", "tcp"} & set(names):
            found.append(
                Note("UCX_TLS", f"{ways}: UCX cannot connect two processes without tcp", f"set UCX_TLS={ways},tcp")
            )
        elif ways != "all":
            found.append(Note("UCX_TLS", f"{ways}: it limits the ways that UCX takes", "unset it, and UCX chooses"))
    nets = machine.environment.get("UCX_NET_DEVICES")
    if nets is not None:
        found.append(Note("UCX_NET_DEVICES", f"{nets}: UCX uses no other network than these", ""))
    return found
