"""Stages on several hosts: two network namespaces joined by a cable, or this host's loopback address.

Every stage is started as an operator would, with ``kvbaton stage``; data goes over NIXL with ``UCX_TLS=tcp``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvbaton.connector import Need
from kvbaton.control.curve import make_keys
from kvbaton.errors import PluginError
from kvbaton.plugins import choose_connector
from kvbaton.settings import TransportSettings

SCRIPTED = 'model = "scripted:7"\nengine = { name = "kvbaton_conformance.scripted_plugin:plugin" }'
#: What is lost ends its requests.
FAIL_CLOSED = f'{SCRIPTED}\nrecovery = {{ mode = "off" }}'
REAL = 'model = "smollm2"'

#: A coordinator that is never without a request, until one fails.
BUSY = """
import logging, sys
from kvbaton import PDRuntime, Request, SamplingParams, load

logging.basicConfig(level=logging.ERROR, format="%(message)s")
settings, _ = load(sys.argv[1])
with PDRuntime.start(settings) as runtime:
    print("busy", file=sys.stderr, flush=True)
    while True:
        for output in runtime.stream(runtime.add_request(Request(tuple(range(40)), SamplingParams(max_tokens=200)))):
            if output.error is not None:
                print(f"failed: {output.error}", file=sys.stderr, flush=True)
                sys.exit(3)
"""


#: The same; it goes on when one fails.
PATIENT = """
import logging, sys
from kvbaton import PDRuntime, Request, SamplingParams, load

logging.basicConfig(level=logging.ERROR, format="%(message)s")
settings, _ = load(sys.argv[1], overrides=dict(zip(sys.argv[2::2], sys.argv[3::2])))
with PDRuntime.start(settings) as runtime:
    served = 0
    while True:
        for output in runtime.stream(runtime.add_request(Request(tuple(range(40)), SamplingParams(max_tokens=4)))):
            if output.error is not None:
                print(f"failed: {output.error}", file=sys.stderr, flush=True)
            elif output.finished:
                served += 1
                print(f"served {served}", file=sys.stderr, flush=True)
"""

#: Once it has served again after a loss it is told that the lost process has ended, and says what that came to.
CONFIRMING = PATIENT.replace(
    """                print(f"served {served}", file=sys.stderr, flush=True)
""",
    """                print(f"served {served}", file=sys.stderr, flush=True)
        if runtime.stage("prefill-0").status is None and runtime._service._counts["restarts"] and served >= 10:
            break
    ended = [runtime.confirm_ended("prefill-0") for _ in range(2)]
    print(f"confirmed {ended}", file=sys.stderr, flush=True)
    while any(book["transfers"] for book in runtime.statistics()["coordinator"]["credits"].values()):
        pass
    print(f"books of {len(runtime._service._machine.peers())} stages balance", file=sys.stderr, flush=True)
""",
)


def _nixl_missing() -> str | None:
    try:
        choose_connector(TransportSettings(name="nixl"), Need("host", "cross_host"))
    except PluginError as error:
        return str(error)
    return None


def _no_namespaces() -> str | None:
    if shutil.which("ip") is None:
        return "network namespaces need the ip command (iproute2), which is not here"
    name = f"kvb-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=20, check=False)
    if made.returncode:
        return f"this user may not make network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], timeout=20, check=True)
    return None


needs_nixl = pytest.mark.skipif((_why := _nixl_missing()) is not None, reason=f"nixl cannot be used here: {_why}")


class Host:
    """Where processes run: a namespace, or this host."""

    def __init__(self, address: str, prefix: tuple[str, ...] = ()) -> None:
        self.address = address
        self.prefix = prefix


class Deployment:
    """One coordinator and its stages, each a process; ended by their ids when the test is over."""

    def __init__(self, folder: Path, coordinator: Host, port: int, stages: dict[str, Host], text: str) -> None:
        self.folder = folder
        self.coordinator = coordinator
        self.stages = stages
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        make_keys(folder / "keys", ["coordinator", *stages])
        self.config = folder / "kvbaton.toml"
        self.config.write_text(
            f"""
{text}

[transport]
name = "nixl"
options = {{ ucx = {{ TLS = "tcp" }} }}

[stages]
launch = "remote"

[control]
listen = "tcp://{coordinator.address}:{port}"
keys = "{folder / "keys"}"
heartbeat = 5

[deadline]
startup = 150
shutdown = 4
drain = 6
"""
        )

    def start(
        self, who: str, *arguments: str, program: str = "from kvbaton.cli import main; main()"
    ) -> subprocess.Popen[bytes]:
        host = self.stages.get(who, self.coordinator)
        with (self.folder / f"{who}.out").open("wb") as out, (self.folder / f"{who}.err").open("wb") as err:
            process = subprocess.Popen(
                [*host.prefix, sys.executable, "-c", program, *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )  # fmt: skip
        self._processes[who] = process
        return process

    def start_stages(self) -> None:
        for name in self.stages:
            self.start(name, "stage", "--config", str(self.config), "--name", name)

    def run(self, *arguments: str) -> subprocess.Popen[bytes]:
        return self.start("coordinator", "run", "--config", str(self.config), *arguments)

    def busy(self) -> None:
        """A coordinator whose stages are up and at work."""
        self.start("coordinator", str(self.config), program=BUSY)
        self.until_said("coordinator", "busy")

    def status(self, who: str, seconds: float) -> int:
        try:
            return self._processes[who].wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{who} did not end within {seconds} s\n{self.told()}") from None

    def said(self, who: str) -> str:
        return (self.folder / f"{who}.err").read_text()

    def told(self) -> str:
        return "\n".join(f"--- {who}\n{self.said(who)}" for who in self._processes)

    def until_said(self, who: str, text: str, seconds: float = 100.0) -> None:
        give_up = time.monotonic() + seconds
        while text not in self.said(who):
            assert time.monotonic() < give_up, f"{who} did not say {text!r} within {seconds} s\n{self.told()}"
            assert self._processes[who].poll() is None or text in self.said(who), self.told()
            time.sleep(0.01)

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "coordinator.out").read_text())
        return found

    def kill(self, who: str, number: int) -> None:
        self._processes[who].send_signal(number)

    def close(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
            process.wait(20)


@pytest.fixture
def ip() -> Iterator[Any]:
    """``ip(*arguments)``, whose namespaces are gone afterwards."""
    why = _no_namespaces()
    if why is not None:
        pytest.skip(why)
    made: list[str] = []

    def run(*arguments: str) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20, check=False)
        assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
        if arguments[:2] == ("netns", "add"):
            made.append(arguments[2])

    yield run
    for name in made:
        subprocess.run(["ip", "netns", "delete", name], timeout=20, check=True)


@pytest.fixture
def cable(ip: Any) -> tuple[Host, Host]:
    """Two hosts, each a namespace of its own, joined by a veth pair and nothing else."""
    names = [f"kvb-{side}-{os.getpid()}" for side in "pd"]
    hosts = [Host(f"10.213.7.{number}", ("ip", "netns", "exec", name)) for number, name in enumerate(names, 1)]
    for name in names:
        ip("netns", "add", name)
    ip("link", "add", "kvb0", "netns", names[0], "type", "veth", "peer", "name", "kvb0", "netns", names[1])
    for name, host in zip(names, hosts, strict=True):
        ip("-n", name, "address", "add", f"{host.address}/24", "dev", "kvb0")
        ip("-n", name, "link", "set", "lo", "up")
        ip("-n", name, "link", "set", "kvb0", "up")
    return hosts[0], hosts[1]


@pytest.fixture
def deploy(tmp_path: Path) -> Iterator[Any]:
    with contextlib.ExitStack() as undo:

        def make(coordinator: Host, stages: dict[str, Host], text: str) -> Deployment:
            port = 5555 if coordinator.prefix else _free_port()
            made = Deployment(tmp_path, coordinator, port, stages, text)
            undo.callback(made.close)
            return made

        yield make


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


HERE = Host("127.0.0.1")


@needs_nixl
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.clause("A1", "C3.1", "C6.2")
def test_two_hosts_give_the_tokens_of_one(cable: tuple[Host, Host], deploy: Any) -> None:
    """P and the coordinator on one host, D on the other; the real model; nothing but the cable joins them."""
    first, second = cable
    deployed = deploy(first, {"prefill-0": first, "decode-0": second}, REAL)
    deployed.start_stages()
    prompts = ("--prompt", "The capital of France is", "--prompt", "Once upon a time")
    deployed.run(*prompts, "--max-tokens", "8", "--compare", "--json")
    assert deployed.status("coordinator", 240) == 0, deployed.told()
    answer = deployed.answer()
    assert answer["equal"] is True
    for request in answer["requests"]:
        assert request["finish_reason"] == "length"
        assert request["bytes"] > 0
    for name in ("prefill-0", "decode-0"):
        assert deployed.status(name, 20) == 0, deployed.told()
        assert f"{name}: ended with status 0" in deployed.said(name)


@needs_nixl
@pytest.mark.clause("C6.2")
def test_stages_may_be_there_before_their_coordinator(deploy: Any) -> None:
    deployed = deploy(HERE, {"prefill-0": HERE, "decode-0": HERE}, SCRIPTED)
    deployed.start_stages()
    for name in ("prefill-0", "decode-0"):
        deployed.until_said(name, "no coordinator answers at tcp://127.0.0.1")
    deployed.run("--prompt", "1 2 3", "--json")
    assert deployed.status("coordinator", 60) == 0, deployed.told()
    assert deployed.answer()["requests"][0]["finish_reason"] == "length", deployed.told()
    for name in ("prefill-0", "decode-0"):
        assert deployed.status(name, 20) == 0, deployed.told()


@needs_nixl
@pytest.mark.clause("C6.6")
def test_a_stage_that_is_told_to_end_drains_and_is_gone_in_order(deploy: Any) -> None:
    deployed = deploy(HERE, {"prefill-0": HERE, "decode-0": HERE}, FAIL_CLOSED)
    deployed.start_stages()
    deployed.busy()
    deployed.kill("prefill-0", signal.SIGTERM)
    assert deployed.status("prefill-0", 30) == 0, deployed.told()
    assert "told to end by SIGTERM" in deployed.said("prefill-0"), deployed.told()
    assert deployed.status("coordinator", 60) == 3, deployed.told()
    said = deployed.said("coordinator")
    assert "failed: " in said, deployed.told()
    assert "not fenced" not in said, "its last word was status 0, so that nothing of it is left"
    assert deployed.status("decode-0", 30) == 0, deployed.told()


@needs_nixl
@pytest.mark.clause("C6.4", "C6.7", "C6.3")
def test_a_stage_that_dies_on_its_host_is_lost_and_not_fenced(deploy: Any) -> None:
    deployed = deploy(HERE, {"prefill-0": HERE, "decode-0": HERE}, FAIL_CLOSED)
    deployed.start_stages()
    deployed.busy()
    deployed.kill("prefill-0", signal.SIGKILL)
    assert deployed.status("coordinator", 60) == 3, deployed.told()
    said = deployed.said("coordinator")
    assert "C6.4: stage prefill-0 is lost" in said, deployed.told()
    assert "cannot be joined from here, so it is not fenced" in said, deployed.told()
    assert deployed.status("decode-0", 30) in (0, 1), deployed.told()


@needs_nixl
@pytest.mark.clause("C6.4", "C6.6", "C6.7")
def test_a_cable_that_is_cut_ends_both_sides_within_their_deadlines(
    cable: tuple[Host, Host], ip: Any, deploy: Any
) -> None:
    """Nobody is there to say that the connection is gone: only heartbeats tell."""
    first, second = cable
    deployed = deploy(first, {"prefill-0": first, "decode-0": second}, FAIL_CLOSED)
    deployed.start_stages()
    deployed.busy()
    ip("-n", second.prefix[-1], "link", "set", "kvb0", "down")
    assert deployed.status("coordinator", 60) == 3, deployed.told()
    said = deployed.said("coordinator")
    assert "C6.4: stage decode-0 is lost: its connection ended, or it answered no heartbeat for 5 s" in said, (
        deployed.told()
    )
    assert deployed.status("decode-0", 30) in (0, 1), deployed.told()
    assert "the connection to the coordinator ended" in deployed.said("decode-0"), deployed.told()


@needs_nixl
@pytest.mark.clause("C1.4", "C6.2", "C6.4")
@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
def test_a_stage_that_is_started_again_on_its_host_serves(deploy: Any, victim: str) -> None:
    """Requests wait for it meanwhile; only those of which tokens were delivered fail."""
    deployed = deploy(HERE, {"prefill-0": HERE, "decode-0": HERE}, SCRIPTED)
    deployed.start_stages()
    deployed.start("coordinator", str(deployed.config), program=PATIENT)
    deployed.until_said("coordinator", "served 3")
    deployed.kill(victim, signal.SIGKILL)
    assert deployed.status(victim, 20) == -signal.SIGKILL
    deployed.until_said("coordinator", f"stage {victim} is lost")
    before = deployed.said("coordinator").count("served ")
    deployed.start(victim, "stage", "--config", str(deployed.config), "--name", victim)
    deployed.until_said("coordinator", f"served {before + 30}")
    failed = [line for line in deployed.said("coordinator").splitlines() if line.startswith("failed: ")]
    assert len(failed) <= 1
    assert all("tokens were delivered" in line for line in failed)


@needs_nixl
@pytest.mark.clause("C6.4", "T12", "C2.5")
def test_whoever_has_seen_to_it_says_that_a_lost_process_has_ended(deploy: Any) -> None:
    """Only then are its books closed, and what it might have written to is given back."""
    deployed = deploy(HERE, {"prefill-0": HERE, "decode-0": HERE}, SCRIPTED)
    deployed.start_stages()
    deployed.start("coordinator", str(deployed.config), program=CONFIRMING)
    deployed.until_said("coordinator", "served 3")
    deployed.kill("prefill-0", signal.SIGKILL)
    assert deployed.status("prefill-0", 20) == -signal.SIGKILL
    deployed.until_said("coordinator", "stage prefill-0 is lost")
    deployed.start("prefill-0", "stage", "--config", str(deployed.config), "--name", "prefill-0")
    assert deployed.status("coordinator", 100) == 0, deployed.told()
    said = deployed.said("coordinator")
    assert "confirmed [1, 0]" in said, deployed.told()
    assert "books of 2 stages balance" in said, deployed.told()
    assert deployed.status("decode-0", 30) == 0, deployed.told()


@needs_nixl
@pytest.mark.clause("C6.3", "C6.7")
def test_a_stage_that_nobody_starts_again_is_waited_for_within_its_deadline(deploy: Any) -> None:
    deployed = deploy(HERE, {"prefill-0": HERE, "decode-0": HERE}, SCRIPTED)
    deployed.start_stages()
    deployed.start("coordinator", str(deployed.config), "deadline.startup", "8", program=PATIENT)
    deployed.until_said("coordinator", "served 3")
    deployed.kill("prefill-0", signal.SIGKILL)
    deployed.until_said("coordinator", "no prefill stage is up and takes requests", 60)
    said = deployed.said("coordinator")
    assert "deadline.startup of 8 s passed, and prefill-0 was not started again on its host" in said, deployed.told()


@pytest.mark.clause("C9.3")
def test_no_tcp_without_keys(tmp_path: Path, deploy: Any) -> None:
    deployed = deploy(HERE, {"prefill-0": HERE, "decode-0": HERE}, SCRIPTED)
    deployed.config.write_text(deployed.config.read_text().replace("keys = ", "# "))
    deployed.run("--prompt", "1")
    assert deployed.status("coordinator", 30) == 2
    assert "listen without keys" in deployed.said("coordinator"), deployed.told()


@pytest.mark.clause("C9.3")
def test_a_stage_says_what_is_wrong_with_its_keys_name_and_address(deploy: Any) -> None:
    deployed = deploy(HERE, {"prefill-0": HERE, "decode-0": HERE}, SCRIPTED)
    config = ["--config", str(deployed.config), "--set", "deadline.startup=1"]
    (deployed.folder / "keys" / "decode-0.key_secret").chmod(0o644)
    for who, name, text, status in (
        ("a", "prefil-0", 'no stage is called "prefil-0". Did you mean "prefill-0"?', 2),
        ("b", "decode-0", "has mode 0644, so that others can use it: chmod 600", 2),
        ("c", "prefill-0", "no coordinator could be reached at tcp://127.0.0.1", 1),
    ):
        deployed.start(who, "stage", *config, "--name", name)
        assert deployed.status(who, 30) == status, deployed.told()
        assert text in deployed.said(who)
