"""Profiling sessions over whole runtimes: what each stage says, and that no transfer is disturbed (C9.2)."""

from __future__ import annotations

import contextlib
import json
import os
import pstats
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from kvbaton import PDRuntime, Request, SamplingParams, Settings, load
from kvbaton.errors import KvbatonError, ProfilingError
from kvbaton.identity import PeerId
from kvbaton.profiling import Profiling, StageProfile
from kvbaton_conformance.scripted import ScriptedEngine
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model

MODEL = scripted_model("scripted:7", ScriptedOptions())


def settings(transport: str = "loopback", **more: object) -> Settings:
    base: dict[str, object] = {
        "model": "scripted:7", "engine.name": "kvbaton_conformance.scripted_plugin:plugin", "transport.name": transport,
    }  # fmt: skip
    return load(overrides={**base, **{key.replace("__", "."): value for key, value in more.items()}})[0]


@pytest.fixture
def runtime() -> Iterator[PDRuntime]:
    """Of processes: from Python 3.12 on cProfile is one for a process, and stages that are threads share it."""
    with PDRuntime.start(settings("example_shm", stages__launch="process")) as running:
        yield running


def until(condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, f"{what}: not within {seconds:g} s"
        threading.Event().wait(0.01)


def serve(runtime: PDRuntime, count: int, first: int = 0) -> None:
    """Requests one after the other, with the right answers."""
    for number in range(first, first + count):
        request = Request(tuple(range(number, number + 20)), SamplingParams(max_tokens=6))
        outputs = list(runtime.stream(runtime.add_request(request)))
        assert outputs[-1].error is None, outputs[-1].error
        assert tuple(token for output in outputs for token in output.token_ids) == MODEL.generate(request)[0]


def balanced(runtime: PDRuntime) -> bool:
    books = runtime.statistics()
    return books["coordinator"]["transfers"] == 0 and not any(
        one["blocks_out"] or one["slots_out"] for one in books["coordinator"]["credits"].values()
    )


@contextlib.contextmanager
def load_beside(runtime: PDRuntime) -> Iterator[list[int]]:
    """Transfers under way all the time, in a thread; how many were served so far."""
    served, stop, failed = [0], threading.Event(), list[BaseException]()

    def work() -> None:
        try:
            while not stop.is_set():
                serve(runtime, 1, served[0] * 20)
                served[0] += 1
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        stop.set()
        thread.join(30)
    assert not failed, failed
    assert not thread.is_alive()


@pytest.mark.clause("C9.2", "C1.5")
def test_stages_that_are_processes_are_profiled_while_transfers_run(tmp_path: Path) -> None:
    directory = tmp_path / "profiles"
    with PDRuntime.start(settings("example_shm", stages__launch="process", stages__decode=2)) as runtime:
        with load_beside(runtime) as served, runtime.profile(directory) as session:
            assert {name: profile.error for name, profile in session.stages.items()} == dict.fromkeys(runtime.stages)
            before = served[0]
            until(lambda: served[0] > before + 10, "transfers go on")
        assert served[0] > before + 10
        until(lambda: balanced(runtime), "the books balance")
        assert session.stop() is session.stages
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    for name in ("prefill-0", "decode-0", "decode-1"):
        profile = session.stages[name]
        assert (profile.error, profile.ended) == (None, "when it was told")
        (file,) = profile.files
        assert file.name.startswith(f"{name}-")
        assert file.name.endswith(f"-{session.session_id[:8]}.prof")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        seen = {function for _, _, function in pstats.Stats(str(file)).stats}  # type: ignore[attr-defined]
        # every decode stage that had no request waited all the time
        assert "_prefill_step" in seen or name != "prefill-0"
        if sys.version_info < (3, 12):
            assert "advance" not in seen, "the pump's thread is another one"


@pytest.mark.clause("C9.2", "C6.4")
def test_a_stage_that_is_killed_says_so_and_the_others_files_are_there(tmp_path: Path) -> None:
    runtime = PDRuntime.start(settings("example_shm", stages__launch="process", stages__decode=2))
    try:
        serve(runtime, 2)
        session = runtime.profile(tmp_path)
        os.kill(runtime.stage("decode-1").pid, signal.SIGKILL)
        serve(runtime, 4, 100)  # decode-0 is the first of equals
        pid = runtime.stage("decode-0").pid
        until(lambda: runtime.health().get("decode-1", {}).get("healthy"), "decode-1 is back")
        stages = session.stop()
        assert stages["decode-1"].error == "the stage ended"
        assert [len(stages[name].files) for name in ("prefill-0", "decode-0")] == [1, 1]
        assert sorted(tmp_path.iterdir()) == sorted(file for stage in stages.values() for file in stage.files)
        assert runtime.stage("decode-0").pid == pid
        # its next life has no part in that session, and can have one of its own
        with runtime.profile(tmp_path, stages=["decode-1"]) as again:
            serve(runtime, 2, 200)
        assert len(again.stages["decode-1"].files) == 1
    finally:
        with contextlib.suppress(KvbatonError):  # a killed stage did not end as ordered
            runtime.close()


@pytest.mark.clause("C9.2")
def test_who_profiles_already_says_so_and_goes_on(runtime: PDRuntime, tmp_path: Path) -> None:
    with runtime.profile(tmp_path, stages=["decode-0"]) as first:
        second = runtime.profile(tmp_path)
        serve(runtime, 1)
        second.stop()
        assert "profiles already" in str(second.stages["decode-0"].error)
        assert len(second.stages["prefill-0"].files) == 1
    assert len(first.stages["decode-0"].files) == 1


@pytest.mark.clause("C9.2", "C6.3")
def test_a_directory_that_is_open_to_others_is_every_stages_own_error(runtime: PDRuntime, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with runtime.profile(tmp_path) as session:
        serve(runtime, 2)
    assert all("chmod 700" in str(stage.error) for stage in session.stages.values())
    assert list(tmp_path.iterdir()) == []
    serve(runtime, 1)


@pytest.mark.clause("C9.2")
def test_a_session_nobody_stops_ends_by_itself(runtime: PDRuntime, tmp_path: Path) -> None:
    session = runtime.profile(tmp_path, seconds=0.1)
    until(lambda: len(list(tmp_path.glob("*.prof"))) == 2, "both have ended")
    assert {stage.ended for stage in session.stop().values()} == {"after its 0.1 s"}
    with runtime.profile(tmp_path) as another:
        serve(runtime, 1)
    assert all(stage.files for stage in another.stages.values())


@pytest.mark.clause("C9.2", "C6.7")
def test_a_stage_whose_engine_is_busy_misses_the_deadline_and_its_profile_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    gate, inside = threading.Event(), threading.Event()
    step = ScriptedEngine._decode_step

    def slow(self: ScriptedEngine) -> list[object]:
        inside.set()
        return list(step(self)) if gate.wait(20) else []

    monkeypatch.setattr(ScriptedEngine, "_decode_step", slow)
    with PDRuntime.start(settings(deadline__control=0.3)) as runtime:
        key = runtime.add_request(Request((1, 2, 3), SamplingParams(max_tokens=4)))
        assert inside.wait(20)
        session = runtime.profile(tmp_path, stages=["decode-0"])
        assert "no reply within deadline.control" in str(session.stages["decode-0"].error)
        gate.set()
        assert list(runtime.stream(key))[-1].error is None
        # a stop may come too late on a busy machine, too, and be asked for again
        until(lambda: len(session.stop()["decode-0"].files) == 1, "it had begun since")


@pytest.mark.clause("C9.2", "C6.2")
def test_closing_ends_a_session(tmp_path: Path) -> None:
    with PDRuntime.start(settings("example_shm", stages__launch="process")) as runtime:
        session = runtime.profile(tmp_path)
        serve(runtime, 1)
    assert len(list(tmp_path.glob("*.prof"))) == 2
    assert all("closed" in str(stage.error) for stage in session.stop().values())


def test_what_nobody_could_do_is_refused_before_anybody_is_asked(runtime: PDRuntime, tmp_path: Path) -> None:
    for wrong, reason in (
        ({"seconds": 0.0}, "at most 3600"),
        ({"seconds": 1e9}, "at most 3600"),
        ({"tools": ["pyhton"]}, "no profiler 'pyhton'. Did you mean \"python\"?"),
        ({"tools": "python"}, "a list of profilers"),
        ({"stages": ["decode-7"]}, "no stage 'decode-7'"),
        ({"stages": []}, "a list of stages"),
        ({"stages": iter(())}, "a list of stages"),
        ({"stages": 5}, "a list of stages"),
        ({"tools": b"python"}, "a list of profilers"),
        ({"tools": None}, "a list of profilers"),
        ({"seconds": True}, "at most 3600"),
        ({"directory": None}, "a text or a pathlib.Path"),
        ({"directory": b"/tmp"}, "a text or a pathlib.Path"),
        ({"directory": ""}, "a text or a pathlib.Path"),
    ):
        with pytest.raises(ProfilingError, match=reason.replace("?", r"\?").replace(".", r"\.")):
            runtime.profile(**{"directory": tmp_path, **wrong})  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_names_may_come_from_anything_that_gives_them_once(runtime: PDRuntime, tmp_path: Path) -> None:
    with runtime.profile(tmp_path, stages=iter(["decode-0", "decode-0"]), tools=(t for t in ["python"])) as session:
        assert list(session.stages) == ["decode-0"]
    assert len(session.stages["decode-0"].files) == 1


@pytest.mark.clause("C9.2", "C6.7")
def test_a_stop_that_a_stage_missed_may_be_asked_for_again_and_every_thread_has_the_outcome(tmp_path: Path) -> None:
    """The stages are a table: what is asked of them waits until the test answers."""
    decode, prefill = PeerId("decode-0", 1), PeerId("prefill-0", 1)
    missed: dict[str, object] = {"error": "no reply"}
    told: dict[str, object] = {"files": [str(tmp_path / "a.prof")], "ended": "when it was told"}
    both = threading.Barrier(2)
    asked: list[tuple[str, list[str]]] = []
    answers: list[dict[str, dict[str, object]]] = [{"decode-0": missed, "prefill-0": told}] * 2 + [{"decode-0": told}]

    def fan_out(method: str, session: str, arguments: object, peers: Sequence[PeerId]) -> Mapping[str, object]:
        asked.append((method, [peer.name for peer in peers]))
        if method == "profile_start":
            return {peer.name: {"seconds": 9.0} for peer in peers}
        if len(answers) > 1:
            both.wait(10)  # neither is answered before both have asked
        return answers.pop(0)

    lives = {peer.name: peer for peer in (decode, prefill)}
    session = Profiling.start(fan_out, lives, tmp_path, 9.0, ("python",), None)
    outcomes: list[Mapping[str, StageProfile]] = []
    threads = [threading.Thread(target=lambda: outcomes.append(session.stop())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    for outcome in outcomes:
        assert outcome["prefill-0"].files == (tmp_path / "a.prof",)
        assert outcome["decode-0"].error == "no reply"
    assert len(outcomes) == 2
    assert session.stop()["decode-0"].files == (tmp_path / "a.prof",)
    assert asked[-1] == ("profile_stop", ["decode-0"]), "who has answered is not asked again"
    session.stop()
    assert len(asked) == 4


#: An application that profiles and does nothing else until it is killed.
APPLICATION = """
import json, sys
from kvbaton import PDRuntime, Request, SamplingParams, load
runtime = PDRuntime.start(load(overrides=json.loads(sys.argv[1]))[0])
session = runtime.profile(sys.argv[2])
list(runtime.stream(runtime.add_request(Request(tuple(range(20)), SamplingParams(max_tokens=3)))))
print(json.dumps([stage.error for stage in session.stages.values()]), flush=True)
sys.stdin.read()
"""


@pytest.mark.clause("C9.2", "C6.6")
def test_a_session_whose_application_is_killed_ends_with_its_stages(tmp_path: Path) -> None:
    control = tempfile.mkdtemp(prefix="kvbaton-profile-")  # a short path: sockets take no long one
    made = settings("example_shm", stages__launch="process", control__dir=control)
    with subprocess.Popen(
        [sys.executable, "-c", APPLICATION, made.model_dump_json(), str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as application:  # fmt: skip
        assert application.stdout is not None
        try:
            assert json.loads(application.stdout.readline()) == [None, None]
        finally:
            application.kill()
            application.wait()
    until(lambda: len(list(tmp_path.glob("*.prof"))) == 2, "both stages have ended their profiles")
    for file in tmp_path.iterdir():
        until(lambda file=file: file.stat().st_size, f"{file.name} is written")  # type: ignore[misc]
    until(lambda: not any(Path(control).iterdir()), "the stages have tidied up")
    Path(control).rmdir()
    assert all(pstats.Stats(str(file)).total_calls for file in tmp_path.iterdir())  # type: ignore[attr-defined]


def test_the_command_line_profiles_a_run(tmp_path: Path) -> None:
    command = [
        sys.executable, "-c", "from kvbaton.cli import main; main()", "run", "--model", "scripted:7",
        "--transport", "example_shm", "--set", "engine.name=kvbaton_conformance.scripted_plugin:plugin",
        "--prompt", "some words", "--profile", str(tmp_path / "new"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, done.stderr
    files = sorted((tmp_path / "new").iterdir())
    assert [file.name.partition("-")[0] for file in files] == ["decode", "prefill"]
    assert all(f"was profiled: {file}" in done.stderr for file in files)
    (tmp_path / "new").chmod(0o755)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, "the requests were served"
    assert done.stderr.count("was not profiled: ") == 2
