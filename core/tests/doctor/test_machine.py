"""What is read of a machine, from a made-up one."""

import resource

import pytest

from kvbaton.doctor.gpus import Gpu, GpuReport
from kvbaton.doctor.machine import Sources, notes, read_machine

NO_GPU = GpuReport(reason="no NVIDIA driver")


@pytest.fixture
def machine(tmp_path):
    """``machine(files, environment=..., limits=..., shm=..., gpus=...)``: what is read there."""

    def read(files=None, *, environment=None, limits=None, shm=(8 << 30, 7 << 30), gpus=NO_GPU):
        for path, text in (files or {}).items():
            file = tmp_path / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        limits = limits or {}
        everything = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
        return read_machine(
            Sources(tmp_path, environment or {}, lambda which: limits.get(which, everything), lambda path: shm,
                    lambda: gpus)
        )  # fmt: skip

    return read


def said(machine):
    return {note.subject: f"{note.text}: {note.remedy}" for note in notes(machine)}


def test_of_nothing_nothing_is_read_and_nothing_is_raised(machine):
    found = machine(shm=None)
    assert (found.memory, found.memory_limit, found.cpu_limit, found.shm_bytes) == (None, None, None, None)
    assert (found.ptrace_scope, found.memlock, found.rdma, found.container, found.namespaces) == (
        None,
        None,
        (),
        "",
        (),
    )
    assert notes(found) == [] or found.cores_usable < 2


def test_memory_cores_and_what_cgroups_allow(machine):
    found = machine(
        {
            "etc/os-release": 'NAME="x"\nPRETTY_NAME="Some Linux 3"\n',
            "proc/meminfo": "MemTotal:       1024 kB\nMemAvailable:    512 kB\n",
            "proc/cpuinfo": "processor : 0\nmodel name\t: A   Processor\n",
            "sys/fs/cgroup/memory.max": "1048576\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        }
    )
    assert (found.system, found.processor) == ("Some Linux 3", "A Processor")
    assert (found.memory, found.memory_available, found.memory_limit) == (1 << 20, 1 << 19, 1 << 20)
    assert found.cpu_limit == 1.5
    assert "fewer than two" in said(found)["cores"]


@pytest.mark.parametrize(
    ("path", "text"),
    [("memory.max", "max\n"), ("memory/memory.limit_in_bytes", "9223372036854771712\n"), ("memory.max", "")],
)
def test_a_cgroup_without_a_limit_is_none(machine, path, text):
    assert machine({f"sys/fs/cgroup/{path}": text, "sys/fs/cgroup/cpu.max": "max 100000"}).memory_limit is None


@pytest.mark.parametrize(("scope", "capabilities", "told"), [(0, 0, False), (1, 0, False), (2, 0, True), (3, 0, True),
                                                              (2, 1 << 19, False)])  # fmt: skip
def test_attaching_is_told_where_the_kernel_forbids_it(machine, scope, capabilities, told):
    found = machine(
        {
            "proc/sys/kernel/yama/ptrace_scope": f"{scope}\n",
            "proc/self/status": f"Name:\tx\nCapEff:\t{capabilities:016x}\n",
        }
    )
    assert found.ptrace_scope == scope
    assert ("ptrace_scope" in said(found)) is told


def test_rdma_ports_and_what_is_missing_for_them(machine):
    base = "sys/class/infiniband/mlx5_0/ports"
    files = {
        f"{base}/1/state": "4: ACTIVE\n", f"{base}/1/link_layer": "InfiniBand\n", f"{base}/1/rate": "400 Gb/sec\n",
        f"{base}/2/state": "1: DOWN\n", f"{base}/2/link_layer": "Ethernet\n",
    }  # fmt: skip
    found = machine(files, limits={resource.RLIMIT_MEMLOCK: (65536, 65536)})
    first, second = found.rdma
    assert (first.device, first.port, first.active, first.link_layer, first.rate) == (
        "mlx5_0", 1, True, "InfiniBand", "400 Gb/sec"
    )  # fmt: skip
    assert (second.active, second.rate) == (False, "unknown")
    told = said(found)
    assert "1: DOWN" in told["mlx5_0/2"]
    assert "--device=/dev/infiniband" in told["/dev/infiniband"]
    assert "64 KiB" in told["locked memory"]
    (found_with := {**files, "dev/infiniband/uverbs0": ""}).update(files)
    assert "/dev/infiniband" not in said(machine(found_with))


@pytest.mark.parametrize(
    ("files", "environment", "name"),
    [
        ({}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes"),
        ({".dockerenv": ""}, {}, "docker"),
        ({"run/.containerenv": ""}, {}, "podman"),
        ({"proc/1/cgroup": "0::/kubepods/x\n"}, {}, "kubepods"),
        ({"proc/1/cgroup": "0::/init.scope\n"}, {}, ""),
    ],
)
def test_containers_by_their_marks(machine, files, environment, name):
    assert machine(files, environment=environment).container == name


def test_a_namespace_of_its_own(machine, tmp_path):
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    (tmp_path / "proc/self/ns/ipc").symlink_to("ipc:[4026532999]")
    gpu = Gpu(0, "H200", 1 << 37, 1 << 36, "GPU-1", "default", False)
    found = machine({".dockerenv": ""}, gpus=GpuReport((gpu,)))
    assert found.namespaces == ("ipc",)
    assert "--ipc=host" in said(found)["container"]


def test_a_small_dev_shm_and_few_files(machine):
    found = machine(shm=(64 << 20, 60 << 20), limits={resource.RLIMIT_NOFILE: (1024, 4096)})
    told = said(found)
    assert "64 MiB" in told["/dev/shm"]
    assert "--shm-size" in told["/dev/shm"]
    assert "1024" in told["open files"]


@pytest.mark.parametrize(
    ("ways", "says"),
    [("tcp", "limits the ways"), ("cma,sm", "without tcp: set UCX_TLS=cma,sm,tcp"), ("^cuda", "limits the ways"),
     ("all", None)],
)  # fmt: skip
def test_variables_that_bend_the_choice(machine, ways, says):
    found = machine(environment={"UCX_TLS": ways, "HOME": "/x", "CUDA_VISIBLE_DEVICES": "0", "UCX_LOG_LEVEL": "info"})
    assert set(found.environment) == {"UCX_TLS", "CUDA_VISIBLE_DEVICES", "UCX_LOG_LEVEL"}
    told = said(found).get("UCX_TLS")
    assert (told is None) if says is None else (says in told)


def test_gpus_that_cannot_be_shared_or_reached(machine):
    gpus = tuple(
        Gpu(n, "H200", 1 << 37, 1 << 36, f"GPU-{n}", mode, mig)
        for n, (mode, mig) in enumerate([("default", False), ("exclusive process", False), ("default", True)])
    )
    report = GpuReport(gpus, "580", "13.0", ((0, 1, "nvlink"), (0, 2, "none"), (1, 2, "pcie")))
    told = said(machine(gpus=report, environment={"CUDA_VISIBLE_DEVICES": ""}))
    assert "exclusive process" in told["GPU 1"]
    assert "MIG" in told["GPU 2"]
    assert "0 and 2" in told["peer access"]
    assert "hides" in told["CUDA_VISIBLE_DEVICES"]


def test_this_machine_is_read(monkeypatch):
    found = read_machine()
    assert found.cores >= 1
    assert found.memory
    assert found.shm_bytes is None or found.shm_free <= found.shm_bytes
    notes(found)
