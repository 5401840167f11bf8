"""What only threads have: kills are requests, and a thread that hangs cannot be ended."""

import threading
import time

import pytest

from kvbaton.errors import KvbatonError, StartupError
from kvbaton.launch.inproc import InprocLauncher


def test_a_stage_with_an_environment_is_refused(threads):
    with pytest.raises(StartupError, match=r"STAGE_DEVICE.*as processes"):
        threads.start("echo", environment={"STAGE_DEVICE": "0"})


def test_a_kill_severs_the_channel_for_those_who_look_only_there(threads):
    handle = threads.start("echo")
    handle.kill()
    assert handle.join(20.0)
    assert handle.exit_status() == 7


def test_a_thread_that_does_not_end_is_reported_by_close(threads, monkeypatch):
    import stage_entries

    release = threading.Event()

    def stubborn(spec, channel, lifeline):
        release.wait(60.0)
        return 0

    monkeypatch.setattr(stage_entries, "stubborn", stubborn, raising=False)
    launcher = InprocLauncher(threads.channels, patience=0.05)
    handle = launcher.start(threads.spec("stubborn"))
    try:
        with pytest.raises(KvbatonError, match=r"prefill-0.*did not end within 0\.05 s") as caught:
            launcher.close()
        assert caught.value.stages == (handle.peer,)
        assert handle.exit_status() is None
    finally:
        release.set()
        assert handle.join(20.0)


@pytest.mark.clause("C6.4")
def test_a_thread_has_ended_only_once_it_is_over(threads, monkeypatch):
    """Else it would count as one that cannot be joined, and what it may have written to would stay held."""
    last_word, may_end = threading.Event(), threading.Event()
    wake = threads.channels.wake

    def held():
        wake()
        if threading.current_thread() is handle._thread:
            last_word.set()
            may_end.wait(60.0)

    handle = threads.start("echo")
    monkeypatch.setattr(threads.channels, "wake", held)
    handle.kill()
    assert last_word.wait(20.0)
    threads.channels.wait(30.0)
    threads.channels.receive()
    assert list(threads.launcher.exited()) == []
    may_end.set()
    told = time.monotonic()
    assert threads.exits(1) == [handle]
    assert time.monotonic() - told < 20.0, "nobody was woken for it"
    assert (handle.joined, handle.exit_status()) == (True, 7)


def test_a_system_exit_is_a_status(threads, monkeypatch):
    import stage_entries

    def leave(spec, channel, lifeline):
        raise SystemExit(4)

    monkeypatch.setattr(stage_entries, "leave_now", leave, raising=False)
    handle = threads.start("leave_now")
    assert handle.join(20.0)
    assert handle.exit_status() == 4
    assert handle.log_tail() == []
