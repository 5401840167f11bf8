"""A stage's death is survived: its requests begin again elsewhere, it is started again, the others never notice."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, load
from kvbaton.connector import Need
from kvbaton.errors import KvbatonError, LocalProtocolError, StartupError, TransferFailed
from kvbaton.hooks import hookimpl
from kvbaton.identity import PeerId
from kvbaton.plugins import choose_connector
from kvbaton_conformance.long_run import SCRIPTED
from kvbaton_conformance.recovery import Plan, play
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model

MODEL = scripted_model("scripted:7", ScriptedOptions())


def start(transport: str, hooks: Sequence[object] = (), **more: object) -> PDRuntime:
    base: dict[str, object] = {
        "model": "scripted:7", "engine.name": "kvbaton_conformance.scripted_plugin:plugin", "transport.name": transport,
        "stages.launch": "process", "stages.prefill": 2, "stages.decode": 2, "deadline.step": 10.0,
    }  # fmt: skip
    return PDRuntime.start(
        load(overrides={**base, **{key.replace("__", "."): value for key, value in more.items()}})[0], hooks=hooks
    )


@contextlib.contextmanager
def losing(**more: Any) -> Iterator[PDRuntime]:
    """One that loses a stage for good."""
    running = start("example_shm", **more)
    yield running
    with contextlib.suppress(KvbatonError):  # a stage that was killed and not started again did not end as ordered
        running.close()


def until(condition: object, what: str, seconds: float = 60.0) -> None:
    give_up = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < give_up, f"{what}: not within {seconds:g} s"
        threading.Event().wait(0.01)


def request(number: int, tokens: int = 24, growth: int = 4) -> Request:
    draw = random.Random(number)
    return Request(tuple(draw.randrange(1, 50_000) for _ in range(tokens)), SamplingParams(max_tokens=growth))


def books_balance(runtime: PDRuntime) -> bool:
    books = runtime.statistics()["coordinator"]
    return books["live"] == books["transfers"] == 0 and not any(
        one["blocks_out"] or one["slots_out"] for one in books["credits"].values()
    )


def record(runtime: PDRuntime, key: str) -> RequestRecord:
    outputs = list(runtime.stream(key))
    assert outputs[-1].record is not None
    return outputs[-1].record


@pytest.mark.clause("C6.2", "C6.4", "A1")
@pytest.mark.parametrize("victim", ["prefill-0", "prefill-1", "decode-0", "decode-1"])
def test_a_killed_stage_is_started_again_and_nobody_else_is(victim: str, caplog: pytest.LogCaptureFixture) -> None:
    with start("example_shm") as runtime:
        before = {name: runtime.stage(name).pid for name in runtime.stages}
        keys = [runtime.add_request(request(n, tokens=200), str(n)) for n in range(24)]
        os.kill(before[victim], signal.SIGKILL)
        for n, key in enumerate(keys):
            told = record(runtime, key)
            if told.error is None:
                assert told.token_ids == MODEL.generate(request(n, tokens=200))[0]
            else:  # tokens had been delivered (recovery.mode is requeue)
                assert isinstance(told.error, TransferFailed)
                assert "tokens were delivered" in str(told.error)
        until(lambda: runtime.stage(victim).pid != before[victim], f"{victim} is started again")
        key = runtime.add_request(request(99), "after")
        assert record(runtime, key).token_ids == MODEL.generate(request(99))[0]
        until(lambda: books_balance(runtime), "C2.5: every credit is back")
        after = {name: runtime.stage(name).pid for name in runtime.stages}
        assert {name for name in before if before[name] != after[name]} == {victim}
        assert not runtime._service._dying, "its end was seen, so no time runs for it any more (C1.3, T12)"
    [again] = [text for text in caplog.messages if "is started again" in text]
    assert again == (
        f"{victim} is started again; of its requests those of which no token was delivered begin again, and the others"
        " have failed (recovery.mode = requeue)"
    )
    [ended] = [text for text in caplog.messages if text.startswith(f"stage {victim} ended")]
    assert ended.endswith("ended: killed by SIGKILL. Was it out of memory? The kernel's log tells (dmesg).")


#: An engine that is killed while it is opened, in the stages of one role.
KILLED = """
import os, signal
from kvbaton_conformance.scripted_plugin import ScriptedPlugin

class Plugin(ScriptedPlugin):
    def open(self, model, options, role, device):
        if role.value == "decode":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().open(model, options, role, device)

plugin = Plugin()
"""


@pytest.mark.clause("C6.2")
def test_a_stage_that_is_killed_while_it_starts_is_told_of_once_with_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "killed_at_open.py").write_text(KILLED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    with pytest.raises(StartupError) as caught:
        start("example_shm", engine__name="killed_at_open:plugin", stages__prefill=1, stages__decode=1)
    said = "stage decode-0 ended: killed by SIGKILL. Was it out of memory? The kernel's log tells (dmesg)."
    assert str(caught.value) == said
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.clause("C6.2", "C6.3")
def test_with_recovery_off_a_death_ends_its_requests_and_is_final(tmp_path: Path) -> None:
    (hold := tmp_path / "hold").touch()  # the first request decodes for as long as it lives
    with losing(
        recovery__mode="off", stages__prefill=1, stages__decode=1, engine__options={"held_by": str(hold)}
    ) as runtime:
        key = runtime.add_request(request(1, tokens=30), "a")
        next(iter(outputs := runtime.stream(key)))
        os.kill(runtime.stage("decode-0").pid, signal.SIGKILL)
        told = list(outputs)[-1].record
        assert told is not None
        assert "decode-0" in str(told.error)
        assert "SIGKILL" in str(told.error)
        later = record(runtime, runtime.add_request(request(2), "b"))
        assert "no decode stage is up" in str(later.error)


@pytest.mark.clause("C6.3", "C6.4", "C6.7")
def test_a_stage_that_hangs_while_it_is_dismissed_is_killed_and_joined() -> None:
    with contextlib.suppress(KvbatonError):  # it did not end as ordered
        with start("example_shm", stages__prefill=1, deadline__shutdown=1.0, deadline__startup=20.0) as runtime:
            os.kill(runtime.stage("decode-1").pid, signal.SIGSTOP)
            assert not runtime.dismiss("decode-1", timeout=0.1)
            answers: list[bool] = []
            waiting = [threading.Thread(target=lambda: answers.append(runtime.dismiss("decode-1"))) for _ in range(2)]
            for one in waiting:
                one.start()
            for one in waiting:
                one.join(20.0)
            assert answers == [True, True]
            assert runtime.stage("decode-1").status == -signal.SIGKILL
            told = record(runtime, runtime.add_request(request(1), "a"))
            assert (told.error, told.decode) == (None, "decode-0")
            for call in (runtime.dismiss, runtime.drain):
                with pytest.raises(LocalProtocolError, match="decode-1 has ended and is not started again"):
                    call("decode-1")


class _Faults:
    """What went wrong, and which stages were lost for what."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.lost: list[tuple[str, str]] = []

    @hookimpl
    def kvbaton_fault(self, error: Exception) -> None:
        self.told.append(str(error))

    @hookimpl
    def kvbaton_peer_lost(self, peer: PeerId, cause: str) -> None:
        self.lost.append((peer.name, cause))


@pytest.mark.clause("C6.2", "C6.4", "C6.7", "A1")
@pytest.mark.parametrize("transport", ["example_shm", "nixl"])
def test_a_handshake_that_takes_too_long_does_not_end_the_service(transport: str) -> None:
    """The only decode stage stands still while the only prefill stage comes back: both live then, and are not
    connected."""
    if not _usable(transport):
        pytest.skip(f"{transport} cannot be used here")
    seen = _Faults()
    with start(
        transport,
        hooks=[seen],
        stages__prefill=1,
        stages__decode=1,
        deadline__connect=8.0,  # which those that live keep, on a busy machine, too
        deadline__control=1.0,
        control__heartbeat=60.0,
        deadline__step=60.0,
    ) as runtime:
        prefill, decode = (runtime.stage(name).pid for name in runtime.stages)
        os.kill(decode, signal.SIGSTOP)
        os.kill(prefill, signal.SIGKILL)
        until(lambda: any("could not connect" in fault for fault in seen.told), "the handshake is given up")
        os.kill(decode, signal.SIGCONT)
        for n in range(3):
            told = record(runtime, runtime.add_request(request(n), str(n)))
            assert told.error is None
            assert told.token_ids == MODEL.generate(request(n))[0]
        until(lambda: books_balance(runtime), "C2.5: every credit is back")
        names = [name for name, cause in seen.lost if "connection" in cause]
        assert len(names) == 1, seen.lost


@pytest.mark.clause("A1", "C2.5", "C6.2", "C6.3", "C6.4", "C8.4", "T10")
@pytest.mark.parametrize(
    ("transport", "mode"), [("example_shm", "requeue"), ("nixl", "requeue"), ("nixl", "recompute")]
)  # fmt: skip
def test_stages_that_are_killed_at_random_cost_nobody_else_anything(transport: str, mode: str) -> None:
    """Those that were decoding fail, or with ``recompute`` go on; everybody else's answer is right.  Longer, and with a
    real model: by the command of :mod:`kvbaton_conformance.recovery`."""
    if not _usable(transport):
        pytest.skip(f"{transport} cannot be used here")
    plan = Plan(
        {**SCRIPTED, "transport.name": transport, "recovery.mode": mode}, requests=80, kills=5, every=0.8, patience=40.0
    )
    result = play(plan)
    assert sum(result.kills.values()) >= plan.kills
    assert result.right > result.other_end + sum(result.failed.values())
    assert result.generations > result.right + result.other_end + sum(result.failed.values()), "some began again"
    assert not result.other_end or mode == "recompute"


def _usable(transport: str) -> bool:
    try:
        choose_connector(transport, Need("host", "cross_process"))
    except KvbatonError:
        return False
    return True
