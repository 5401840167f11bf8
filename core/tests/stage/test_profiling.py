"""Profiling sessions of one stage by themselves: one at a time, bounded, answered once, and ended with the stage."""

from __future__ import annotations

import marshal
import os
import pstats
import resource
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.identity import PeerId
from kvbaton.messages import Call
from kvbaton.stage.profiling import ProfileSessions

A, B = "a" * 32, "b" * 32


class Engine:
    """An engine, as far as a profile is concerned, whose thread takes its time."""

    traced = False


class Tracing(Engine):
    def start_profile(self, stem: Path) -> None:
        self.stem, self.traced = stem, True

    def stop_profile(self) -> list[Path]:
        self.traced = False
        path = self.stem.with_name(self.stem.name + ".trace")
        path.write_text("a trace")
        return [path]


class Stage:
    """The pump's thread and the engine's, one after the other."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine, self.now = engine or Engine(), 0.0
        self.answers: dict[str, tuple[Any, str | None]] = {}
        self.inbox: deque[tuple[Callable[[Any], object], Callable[[Any], None]]] = deque()
        self.sessions = ProfileSessions(
            PeerId("decode-0", 7), lambda question, then: self.inbox.append((question, then)), self.answer,
            lambda: self.now,
        )  # fmt: skip

    def answer(self, call: Call, result: Any, error: str | None) -> None:
        assert call.control_id not in self.answers, "answered twice"
        self.answers[call.control_id] = result, error

    def run(self) -> None:
        while self.inbox:
            question, then = self.inbox.popleft()
            try:
                found = question(self.engine)
            except Exception as error:
                found = error
            then(found)

    def start(self, where: Path, session: str = A, control_id: str = "start", **changed: Any) -> None:
        order = {"directory": str(where), "seconds": 10.0, "tools": ["python"]} | changed
        self.sessions.start(Call(control_id, session, "profile_start", order))

    def stop(self, session: str = A, control_id: str = "stop") -> None:
        self.sessions.stop(Call(control_id, session, "profile_stop"))


def files(answer: tuple[Any, str | None]) -> list[Path]:
    assert answer[1] is None, answer[1]
    return [Path(file) for file in answer[0]["files"]]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "profiles"


@pytest.mark.clause("C9.2")
def test_a_session_leaves_a_file_that_only_its_owner_can_read(directory: Path) -> None:
    stage = Stage()
    stage.start(directory)
    assert "start" not in stage.answers, "not before the engine's thread has begun"
    stage.run()
    assert stage.answers["start"] == ({"seconds": 10.0}, None)
    sorted(range(1000), key=lambda number: -number)
    stage.stop()
    stage.run()
    (file,) = files(stage.answers["stop"])
    assert stage.answers["stop"][0]["ended"] == "when it was told"
    assert file == directory / "decode-0-7-aaaaaaaa.prof"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert pstats.Stats(str(file)).total_calls > 1000  # type: ignore[attr-defined]
    assert [entry.name for entry in directory.iterdir()] == [file.name]


def test_what_the_engine_offers_comes_with_it(directory: Path) -> None:
    stage = Stage(Tracing())
    stage.start(directory, tools=["python", "engine"])
    stage.run()
    assert stage.engine.traced
    stage.stop()
    stage.run()
    assert not stage.engine.traced
    assert [file.suffix for file in files(stage.answers["stop"])] == [".prof", ".trace"]


def test_an_engine_that_offers_nothing_is_told_by_name_and_nothing_goes_on(directory: Path) -> None:
    stage = Stage()
    stage.start(directory, tools=["python", "engine"])
    stage.run()
    assert "the engine (Engine) offers no profiler" in str(stage.answers["start"][1])
    stage.start(directory, control_id="again")
    stage.run()
    assert stage.answers["again"][1] is None
    stage.sessions.end()
    stage.run()


@pytest.mark.clause("C9.2", "C1.5")
def test_there_is_one_session_at_a_time_and_a_stranger_ends_none(directory: Path) -> None:
    stage = Stage()
    stage.start(directory)
    stage.run()
    stage.now = 4.0
    stage.start(directory, B, "second")
    stage.stop(B, "stranger")
    assert f"profiles already, in session {A}, for 6.0 s more" in str(stage.answers["second"][1])
    assert "knows no profiling session" in str(stage.answers["stranger"][1])
    stage.stop()
    stage.stop(control_id="stop too")
    stage.run()
    stage.stop(control_id="stop late")
    assert stage.answers["stop"] == stage.answers["stop too"] == stage.answers["stop late"]
    stage.start(directory, B, "third")
    stage.run()
    stage.stop(B, "third stop")
    stage.run()
    assert files(stage.answers["third stop"])[0].name == "decode-0-7-bbbbbbbb.prof"
    stage.stop(control_id="forgotten")
    assert "knows no profiling session" in str(stage.answers["forgotten"][1]), "of one session the result is kept"


def test_it_ends_by_itself_and_keeps_its_result(directory: Path) -> None:
    stage = Stage()
    stage.start(directory, seconds=2.0)
    stage.run()
    stage.now = 1.9
    assert not stage.sessions.expire()
    stage.now = 2.0
    assert stage.sessions.expire()
    assert not stage.sessions.expire(), "it is ending already"
    stage.run()
    assert not stage.sessions.expire()
    stage.stop()
    assert stage.answers["stop"][0]["ended"] == "after its 2 s"
    assert files(stage.answers["stop"])[0].exists()


def test_an_end_that_comes_before_a_busy_engine_has_begun_follows_the_beginning(directory: Path) -> None:
    stage = Stage()
    stage.start(directory)
    stage.stop()
    assert stage.answers == {}
    stage.run()
    assert stage.answers["start"][1] is None
    assert files(stage.answers["stop"])[0].exists()


def test_a_stage_that_ends_ends_its_session_first(directory: Path) -> None:
    stage = Stage(Tracing())
    stage.start(directory, tools=["python", "engine"])
    stage.run()
    stage.sessions.end()
    stage.sessions.end()
    stage.run()
    assert not stage.engine.traced
    assert len(list(directory.iterdir())) == 2
    assert len(stage.inbox) == 0


@pytest.mark.clause("C6.3")
def test_a_directory_that_is_not_private_or_not_one_is_refused_before_anything_is_profiled(tmp_path: Path) -> None:
    shared, file, link = tmp_path / "shared", tmp_path / "file", tmp_path / "link"
    shared.mkdir(mode=0o755)
    shared.chmod(0o755)
    file.touch()
    link.symlink_to(tmp_path)
    for directory, reason in (
        (shared, "has mode 0755 and can be entered by others (chmod 700 it)"),
        (file, "cannot be written to"),
        (file / "below", "cannot be written to"),
        (link, "is not a directory"),
        (tmp_path / "mistyped" / "below", f"there is no directory {tmp_path / 'mistyped'}"),
    ):
        stage = Stage(Tracing())
        stage.start(directory, tools=["python", "engine"])
        stage.run()
        assert reason in str(stage.answers["start"][1])
        assert not stage.engine.traced
        stage.stop()
        assert "knows no profiling session" in str(stage.answers["stop"][1])
    assert list(shared.iterdir()) == []


def test_a_file_that_is_there_is_never_written_over(directory: Path) -> None:
    stage = Stage(Tracing())
    stage.start(directory, tools=["python", "engine"])
    stage.run()
    mine = directory / "decode-0-7-aaaaaaaa.prof"
    mine.symlink_to(directory / "elsewhere")
    stage.stop()
    stage.run()
    assert "FileExistsError" in str(stage.answers["stop"][1])
    assert not stage.engine.traced, "the other profiler ends all the same"
    assert not (directory / "elsewhere").exists()
    stage.stop(control_id="again")
    assert "FileExistsError" in str(stage.answers["again"][1])
    stage.start(directory, B, "next")
    stage.run()
    assert stage.answers["next"][1] is None
    stage.sessions.end()
    stage.run()


def test_a_disk_that_is_full_leaves_nothing_under_the_final_name(directory: Path) -> None:
    stage = Stage()
    stage.start(directory)
    stage.run()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        stage.stop()
        stage.run()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "OSError" in str(stage.answers["stop"][1])
    assert list(directory.iterdir()) == []


@pytest.mark.clause("C9.3")
@pytest.mark.parametrize(
    ("session", "changed"),
    [
        ("../../etc", {}), (A[:-1], {}), (A.upper(), {}), (A + "\n", {}),
        (A, {"directory": "relative"}), (A, {"directory": 7}), (A, {"directory": "/a\0b"}),
        (A, {"seconds": 0}), (A, {"seconds": float("nan")}), (A, {"seconds": 3601}), (A, {"seconds": "1"}),
        (A, {"seconds": True}),
        (A, {"tools": []}), (A, {"tools": ["perf"]}), (A, {"tools": "python"}),
    ],
)  # fmt: skip
def test_a_call_is_not_believed_before_it_was_looked_at(session: str, changed: dict[str, Any], tmp_path: Path) -> None:
    stage = Stage()
    stage.start(tmp_path / "new", session, **changed)
    assert str(stage.answers["start"][1]).startswith("C9.2: ")
    assert not stage.inbox
    assert not (tmp_path / "new").exists()


def test_the_file_is_what_pstats_reads(directory: Path) -> None:
    stage = Stage()
    stage.start(directory)
    stage.run()
    os.getpid()
    stage.stop()
    stage.run()
    stats = marshal.loads(files(stage.answers["stop"])[0].read_bytes())
    assert any("getpid" in name for _, _, name in stats)
