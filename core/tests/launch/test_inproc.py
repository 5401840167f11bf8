"""What only threads have: kills are requests, and a thread that hangs cannot be ended."""

import threading

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


def test_a_system_exit_is_a_status(threads, monkeypatch):
    import stage_entries

    def leave(spec, channel, lifeline):
        raise SystemExit(4)

    monkeypatch.setattr(stage_entries, "leave_now", leave, raising=False)
    handle = threads.start("leave_now")
    assert handle.join(20.0)
    assert handle.exit_status() == 4
    assert handle.log_tail() == []
