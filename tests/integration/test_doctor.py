"""``kvbaton doctor`` on transports of others, and after deployments that were killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import cast

import psutil
import pytest

from kvbaton.doctor.examination import examine
from kvbaton.doctor.leftovers import Places, clean
from kvbaton.doctor.trial import attempt
from kvbaton.settings import load

#: A deployment that serves a request for each line that it is sent.
DEPLOYMENT = """
import sys
from kvbaton import PDRuntime, Request, SamplingParams, load

settings, _ = load(overrides={
    "model": "scripted:1", "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
    "transport.name": sys.argv[1], "control.dir": sys.argv[2],
})
with PDRuntime.start(settings) as runtime:
    print("up", flush=True)
    for line in sys.stdin:
        request = runtime.add_request(Request((1, 2, 3), SamplingParams(max_tokens=4)))
        print(sum(len(output.token_ids) for output in runtime.stream(request)), flush=True)
"""


@contextmanager
def deployment(transport: str, control: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", DEPLOYMENT, transport, str(control)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to it and to all of its stages at once, as an operator or the kernel would, out of memory."""
    if process.poll() is not None:
        return
    everything = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in everything:
        one.kill()
    process.wait()
    psutil.wait_procs(everything, timeout=10)


@pytest.mark.parametrize("transport", ["loopback", "nixl"])
def test_what_a_killed_deployment_left_is_removed_and_a_living_one_serves_on(transport: str, tmp_path: Path) -> None:
    control, shared = tmp_path / "control", tmp_path / "shm"
    shared.mkdir()
    control.mkdir(mode=0o700)
    places = Places(folders=(control,), shared_memory=shared)
    with deployment(transport, control) as victim, deployment(transport, control) as other:
        assert [one.fate for one in clean(places, dry_run=False)] == ["kept"] * len(list(control.iterdir()))
        kill(victim)
        left = [one for one in clean(places, dry_run=True) if one.fate == "would be removed"]
        assert [f"kvbaton-{victim.pid}-" in one.path for one in left] == ([True] if transport == "nixl" else [])
        outcomes = clean(places, dry_run=False)
        assert [one.fate for one in outcomes if f"kvbaton-{victim.pid}-" in one.path] == ["removed"] * len(left)
        assert not list(control.glob(f"kvbaton-{victim.pid}-*"))
        stdin, stdout = cast("tuple[object, object]", (other.stdin, other.stdout))
        print("go", file=stdin, flush=True)  # type: ignore[call-overload]
        assert int(stdout.readline()) == 4  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["example_shm", "example_stream"])
def test_a_third_partys_transport_is_fit(name: str) -> None:
    settings, _ = load(overrides={"model": "x", "transport.name": name})
    report = examine(settings, attempt=partial(attempt, sizes=(4096, 1 << 20)))
    assert (report.chosen.standing, report.exit_status) == ("fit", 0), report.chosen.text
    (found,) = report.transports
    assert found.trial is not None
    assert found.trial.closing == ()
    assert len(found.trial.measured) == 4
