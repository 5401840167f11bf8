"""``kvbaton doctor``: what is shown, what it ends with."""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from kvbaton import cuda
from kvbaton.cli import doctor as command
from kvbaton.cli.app import app
from kvbaton.connector import API_VERSION, Lane
from kvbaton.doctor.examination import Chosen, Report, Transport
from kvbaton.doctor.gpus import Gpu
from kvbaton.doctor.leftovers import Leftover, Outcome
from kvbaton.doctor.machine import Port, notes, read_machine
from kvbaton.doctor.trial import Measured, Trial
from kvbaton.doctor.verdict import Finding, Verdict

DATAGRAMS = "datagram_transport:plugin"


def kvbaton(*arguments):
    return CliRunner().invoke(app, ["doctor", *arguments])


def report():
    """One of everything."""
    import msgspec

    machine = msgspec.structs.replace(
        read_machine(),
        gpus=tuple(Gpu(n, "NVIDIA H200", 141 << 30, 140 << 30, "GPU-x", "exclusive process", True) for n in range(3)),
        gpu_driver="580.65", cuda="13.0", gpu_peers=((0, 1, "nvlink"), (0, 2, "none"), (1, 2, "none")),
        rdma=(Port("mlx5_0", 1, "4: ACTIVE", "InfiniBand", "400 Gb/sec (4X NDR)"),), memory_limit=8 << 30,
        cpu_limit=1.5, shm_bytes=64 << 20, container="docker", namespaces=("pid",), environment={"UCX_TLS": "tcp"},
    )  # fmt: skip
    measured = tuple(
        Measured(nbytes, *ends, 9, 1e-5, 1e9, 1e-6, 1e10)
        for ends in (("prefill-0", "decode-0"), ("decode-0", "prefill-0")) for nbytes in (4096, 1 << 24)
    )  # fmt: skip
    trial = Trial("cuda", (0, 1), measured[:3], (Lane("write", "cuda", "cuda", 0, None, "tcp/lo"),), seconds=3.0)
    finding = Finding("degraded", "device memory falls to TCP (tcp/lo): 0.5 GB/s", "cuda_ipc", "unset [UCX_TLS]")
    verdict = Verdict("degraded", "1.0 GB/s, 0.10 of plain copying", (finding,))
    return Report(
        1, 1, Chosen("nixl", "auto", "cuda", "cross_process", "degraded", finding.sentence()), machine,
        tuple(notes(machine)),
        (
            Transport("nixl", "kvbaton-nixl", "0.1.0", "cross_process", "", "", trial, verdict),
            Transport("other[x]", "kvbaton-a-rather-long-name", "0.1.0", None, "not here", "install it"),
            Transport("loopback", "kvbaton-loopback", "0.1.0", "same_process", "", "", Trial("host", (0, 0)),
                      Verdict("unusable", "", (Finding("unusable", "hung"),))),
        ),
    )  # fmt: skip


def test_everything_is_shown_within_eighty_columns(monkeypatch):
    monkeypatch.setattr(command, "examine", lambda settings, **how: report())
    ran = kvbaton("nixl")
    assert ran.exit_code == 1
    assert max(map(len, ran.stdout.splitlines())) <= 80
    text = " ".join(ran.stdout.split())
    for part in (
        "NVIDIA H200, 140 GiB of 141 GiB, exclusive process, MIG", "3, driver 580.65, CUDA 13.0", "nvlink: 0-1",
        "no access: 0-2 1-2", "mlx5_0/1 InfiniBand ACTIVE 400 Gb/sec (4X NDR)", "a cgroup allows 8 GiB",
        "docker, own pid namespace", "! /dev/shm: it has 64 MiB", "other[x] no", "not here: install it",
        "not between processes: within one only", "ways: write tcp/lo", "two processes, cuda memory, devices 0 and 1",
        "device memory falls to TCP (tcp/lo): 0.5 GB/s; expected cuda_ipc; unset [UCX_TLS]",
        "degraded: nixl (chosen by auto):",
    ):  # fmt: skip
        assert part in text, part
    lines = [line.rstrip() for line in ran.stdout.splitlines()]
    assert lines[lines.index("  other[x]  no   kvbaton-a-rather-long-name 0.1.0") + 1] == "      not here: install it"


def test_the_longest_figures_stand_in_one_line_each_below_one_heading():
    measured = [
        Measured(nbytes, *ends, 9, took, per_second, copy, copied)
        for ends in (("prefill-0", "decode-0"), ("decode-0", "prefill-0"))
        for nbytes, took, per_second, copy, copied in (
            (4096, 890.8e-6, 99.9e6, 10.5e-6, 0.4e9), (1 << 24, 139.3e-6, 120.5e9, 15.2e-6, 1101.2e9),
            (1 << 20, 139.3e-6, 999.94e9, 806.1e-6, 999.94e9),
        )
    ]  # fmt: skip
    console = Console(width=80, highlight=False)
    with console.capture() as shown:
        console.print(command._measured(measured[:-1]))
    heading, small, large, other = shown.get().splitlines()
    assert " ".join(heading.split()) == "to decode-0 to prefill-0 copying"
    assert " ".join(small.split()) == "4 KiB 890.8 us 99.9 MB/s 890.8 us 99.9 MB/s 10.5 us 0.4 GB/s"
    assert " ".join(large.split()) == "16 MiB 139.3 us 120.5 GB/s 139.3 us 120.5 GB/s 15.2 us 1.10 TB/s"
    assert " ".join(other.split()) == "1 MiB 139.3 us 999.9 GB/s 806.1 us 999.9 GB/s"
    assert heading.index("to decode-0") + len("to decode-0") == small.index("99.9 MB/s") + len("99.9 MB/s")


def test_json_is_the_report(monkeypatch):
    monkeypatch.setattr(command, "examine", lambda settings, **how: report())
    ran = kvbaton("--json")
    found = json.loads(ran.stdout)
    assert ran.exit_code == found["exit_status"] == 1
    assert set(found) == {"version", "exit_status", "chosen", "machine", "notes", "transports"}
    assert found["version"] == 1
    first, second, _ = found["transports"]
    assert first["verdict"]["findings"][0]["expected"] == "cuda_ipc"
    assert first["trial"]["lanes"][0]["lane"] == "tcp/lo"
    assert (second["reach"], second["trial"]) == (None, None)


def test_what_it_is_asked_for_reaches_the_examination(monkeypatch):
    heard = []

    def examine(settings, **how):
        heard.append((settings.transport.name, settings.transport.options, how["named"], how["memory"]))
        return report()

    monkeypatch.setattr(command, "examine", examine)
    kvbaton()
    kvbaton("nixl", "--transport-option", "packing=never", "--memory", "cuda")
    kvbaton("--set", "transport.name=ucx")
    assert heard == [
        ("auto", {}, "settings", None), ("nixl", {"packing": "never"}, "argument", "cuda"),
        ("ucx", {}, "settings", None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "disk"], "host or cuda"), (["--dry-run"], "goes with --clean"),
        (["nobody"], 'no transport "nobody"'),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(arguments, says):
    ran = kvbaton(*arguments)
    assert ran.exit_code == 2
    assert says in ran.stderr
    assert ran.stdout == ""


@pytest.mark.usefixtures("no_child_is_left")
def test_a_broken_transport_ends_it_with_two_and_no_traceback():
    ran = kvbaton(DATAGRAMS, "--transport-option", "fault=corrupt")
    assert ran.exit_code == 2
    assert "1 of 4096 bytes are wrong" in " ".join(ran.stdout.split())
    assert "Traceback" not in ran.stdout + ran.stderr
    assert "kvbaton: trying datagram_transport" in ran.stderr


def test_what_became_of_leftovers_is_shown(monkeypatch):
    outcomes = [
        Outcome("/tmp/kvbaton-1-a", "control directory", "removed", "process 1 is gone", 2048),
        Outcome("/tmp/kvbaton-2-a", "control directory", "removed", "process 1 is gone"),
        Outcome("/dev/shm/kvbaton-x-3-a", "shared memory", "failed", "Operation not permitted"),
    ]
    monkeypatch.setattr(command, "clean", lambda places, dry_run: outcomes if not dry_run else [])
    ran = kvbaton("--clean")
    assert ran.exit_code == 1
    assert ran.stdout.count("process 1 is gone") == 1
    assert "removed /tmp/kvbaton-1-a 2 KiB" in ran.stdout
    assert json.loads(kvbaton("--clean", "--json").stdout)[2]["fate"] == "failed"
    nothing = kvbaton("--clean", "--dry-run")
    assert (nothing.exit_code, nothing.stdout) == (0, "nothing was left behind\n")


@pytest.mark.parametrize(
    "answer", ["/home", ["/home"], [Leftover("/home", "a folder", 1)], [Leftover(Path("home"), "a folder", 1)],
               [Leftover(Path("/home"), "a folder", "1")], [Leftover(Path("/home"), "a folder", locks="/lock")], 1]
)  # fmt: skip
def test_what_is_no_leftover_is_passed_over(monkeypatch, answer, tmp_path):
    plugin = SimpleNamespace(leftovers=lambda: answer)
    monkeypatch.setattr(command, "each_plugin", lambda broken: [("odd", plugin)])
    told = []
    monkeypatch.setattr(command, "say", told.append)
    assert command._of_plugins() == []
    assert "odd could not say what it leaves behind: TypeError" in told[0]


def test_a_plugin_that_cannot_be_loaded_is_told_and_passed_over(monkeypatch):
    broken = EntryPoint("odd", "kvbaton_nowhere:plugin", "kvbaton.engines")
    monkeypatch.setattr("kvbaton.plugins.entry_points", lambda group: [broken] if group == broken.group else [])
    told = []
    monkeypatch.setattr(command, "say", told.append)
    assert command._of_plugins() == []
    assert 'engine "odd" of an unknown distribution cannot be imported' in told[0]


def test_interrupted_it_ends_with_its_children():
    here = str(Path(__file__).parents[1] / "pair")
    program = f"import sys; sys.path.insert(0, {here!r}); from kvbaton.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "doctor", DATAGRAMS, "--transport-option", "fault=hang"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        children = _children(process)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert "interrupted" in said
    _, left = psutil.wait_procs(children, timeout=40)
    assert not left


def _children(process):
    """Both ends' processes, once they are there."""
    assert "trying" in process.stderr.readline()
    until = time.monotonic() + 60
    while time.monotonic() < until:
        children = psutil.Process(process.pid).children(recursive=True)
        if len(children) == 2:
            return children
        time.sleep(0.02)
    raise AssertionError("no ends were started")


def test_advice_is_what_this_command_takes():
    said = " ".join(kvbaton("loopback", "--memory", "cuda").stdout.split())
    assert "moves host memory only, and cuda memory is asked for: write --memory host or choose another" in said
    # what is configured is another matter
    said = " ".join(kvbaton("loopback", "--set", "stages.devices=0,1").stdout.split())
    assert "use host memory (no stages.devices) or choose another transport" in said
    ran = kvbaton("--memory", "gpu")
    assert (ran.exit_code, ran.stderr) == (2, "kvbaton: --memory gpu: write cuda\n")


# -- what does not answer ----------------------------------------------------------------------------------------------

STUCK = """
import atexit
import ctypes
import sys
from pydantic import BaseModel

class Plugin:
    name = "a-stuck"
    api_version = {version}
    class Options(BaseModel):
        pass
    def probe(self, need):
        atexit.register(ctypes.CDLL(None).pause)  # as a library that waits for its threads
        print("asked", file=sys.stderr, flush=True)
        ctypes.CDLL(None).pause()
    def open(self, options, context):
        raise AssertionError("opened")

plugin = Plugin()
"""
#: The command line, impatient with what is stuck and with nothing else.
IMPATIENT = """
from kvbaton import plugins
from kvbaton.doctor import gpus
def soon(what, seconds):
    return 0.2 if "stuck" in what else seconds
class Impatient(plugins.Apart):
    def answer(self, what, seconds):
        return super().answer(what, soon(what, seconds))
ask = plugins.of_thread
plugins.Apart = Impatient
plugins.of_thread = lambda what, call, seconds: ask(what, call, soon(what, seconds))
from kvbaton.cli import main
main()
"""


SCRIPTED = "--model scripted:1 --set engine.name=kvbaton_conformance.scripted_plugin:plugin"


@pytest.fixture
def stuck(tmp_path):
    """The environment of a command for which a transport is installed that does not answer."""
    info = tmp_path / "a_stuck-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-stuck\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text("[kvbaton.connectors]\na-stuck = stuck_transport:plugin\n")
    (tmp_path / "stuck_transport.py").write_text(STUCK.format(version=API_VERSION))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}


@pytest.mark.parametrize(
    ("words", "status"),
    [
        ("doctor a-stuck", 2),
        ("plugins", 0),
        ("lanes a-stuck", 2),
        ("bench a-stuck", 2),
        (f"run {SCRIPTED} --prompt x --transport a-stuck", 2),
        (f"serve {SCRIPTED} --listen 127.0.0.1:0 --transport a-stuck", 2),
        ("conformance a-stuck", 2),
    ],
)
def test_a_transport_that_does_not_answer_is_told_and_the_command_ends(stuck, words, status):
    ran = subprocess.run(
        [sys.executable, "-c", IMPATIENT, *words.split()], env=stuck, capture_output=True, text=True, timeout=300
    )
    said = " ".join((ran.stdout + ran.stderr).split())
    assert ran.returncode == status, said
    assert "did not answer within 0.2 s" in said
    assert "name another transport (transport.name), or uninstall a-stuck" in said
    assert ("if nvidia-smi does not answer either" in said) is cuda.present()
    assert "Traceback" not in said


def test_a_command_ends_too_where_stderr_is_closed(stuck):
    words = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", IMPATIENT, "lanes", "a-stuck"]
    assert subprocess.run(words, env=stuck, stdout=subprocess.DEVNULL, timeout=120).returncode == 2


def test_a_bug_ends_a_command_too_and_keeps_its_traceback():
    program = """
import atexit, ctypes
from kvbaton import answering, cli
pause = atexit.register(ctypes.CDLL(None).pause)
try:
    answering.of_thread("it", pause, 0.2)
except answering.NoAnswer:
    pass
def bug():
    raise RuntimeError("of kvbaton's own")
cli._run = bug
cli.main()
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 1
    assert ran.stderr.startswith("Traceback")
    assert ran.stderr.endswith("RuntimeError: of kvbaton's own\n")


@pytest.mark.parametrize("words", ["lanes a-stuck", f"run {SCRIPTED} --prompt x --transport a-stuck"])
def test_ctrl_c_ends_a_command_that_waits_for_an_answer(stuck, words):
    program = "from kvbaton.cli import main; main()"
    command = [sys.executable, "-c", program, *words.split()]
    with subprocess.Popen(command, env=stuck, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr.readline() == "asked\n"
            process.send_signal(signal.SIGINT)
            said = process.communicate(timeout=120)[1]
        finally:
            process.kill()
    assert process.returncode == 130
    assert said == "kvbaton: interrupted\n"
