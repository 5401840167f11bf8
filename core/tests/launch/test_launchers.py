"""What both launchers guarantee: stages start under fresh epochs, talk, end, and their end is joined and explained."""

import pytest

from kvbaton.control import ChannelLost, Received
from kvbaton.errors import LocalProtocolError, StageDied, StartupError
from kvbaton.launch import StageSpec
from kvbaton.messages import Cancel, Fatal, Stop

MESSAGE = Cancel("a" * 32)


@pytest.mark.clause("C6.2")
def test_a_stage_starts_talks_and_is_joined(launched):
    handle = launched.start("echo")
    launched.channels.send(handle.peer, MESSAGE)  # at once: it waits for the stage
    assert launched.gather(1) == [Received(handle.peer, MESSAGE)]
    assert handle.exit_status() is None
    assert handle.death() is None
    assert not handle.join(0.0)
    launched.channels.send(handle.peer, Stop())
    assert handle.join(20.0)
    assert handle.exit_status() == 0
    assert launched.exits(1) == [handle]
    assert launched.launcher.exited() == []


@pytest.mark.clause("C1.4")
def test_each_start_has_a_newer_epoch(launched):
    epochs = []
    for _ in range(2):
        handle = launched.start("leave", status=0)
        epochs.append(handle.peer.epoch)
        assert launched.exits(1) == [handle]
        launched.channels.remove(handle.peer)
    assert epochs == sorted(set(epochs))


@pytest.mark.clause("C6.3")
def test_a_crash_is_told_with_status_and_last_lines(launched):
    handle = launched.start("crash")
    assert launched.exits(1) == [handle]
    death = handle.death()
    assert isinstance(death, StageDied)
    assert death.stage == "prefill-0"
    assert death.status == "exit status 1"
    assert "ZeroDivisionError" in death.log[-1]
    assert any("stage_entries.py" in line for line in death.log)
    assert "ZeroDivisionError" in str(death)


def test_an_exit_status_comes_through_and_the_last_message_too(launched):
    handle = launched.start("leave", status=3)
    events = launched.gather(2)
    assert events[0] == Received(handle.peer, Fatal("leaving"))
    assert isinstance(events[1], ChannelLost)
    assert handle.join(20.0)
    assert handle.exit_status() == 3
    assert str(handle.death()).startswith("stage prefill-0 ended: exit status 3.")


@pytest.mark.clause("C6.2")
def test_an_end_wakes_the_coordinator_by_itself(launched, tmp_path):
    """A lost channel is no end: the launcher has its own word."""
    handle = launched.start("mute", until=str(tmp_path / "heard"))
    [lost] = launched.gather(1)
    assert isinstance(lost, ChannelLost)
    assert not launched.launcher.exited()
    (tmp_path / "heard").touch()
    assert launched.exits(1) == [handle]


def test_a_kill_ends_a_stage_that_looks_at_its_lifeline(launched):
    handle = launched.start("obedient")
    launched.gather(1)
    handle.kill()
    handle.kill()
    assert handle.join(20.0)
    assert handle.exit_status() == (5 if launched.kind == "inproc" else -9)
    handle.kill()


@pytest.mark.clause("C6.2")
def test_close_ends_and_joins_what_still_runs(launched):
    handles = [launched.start("echo", name=f"decode-{index}") for index in range(2)]
    for handle in handles:
        launched.channels.send(handle.peer, MESSAGE)
    launched.gather(2)
    launched.launcher.close()
    assert all(handle.exit_status() is not None for handle in handles)
    launched.launcher.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        launched.start("echo")


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ("no_such_module_anywhere:main", "cannot be imported"),
        ("stage_entries:nothing", 'no function "nothing"'),
        ("stage_entries", '"module:function"'),
    ],
)
def test_an_entry_that_is_not_there_is_explained(launched, entry, text):
    spec = StageSpec(name="prefill-0", role="prefill", entry=entry)
    if launched.kind == "inproc":
        with pytest.raises(StartupError, match=text):
            launched.launcher.start(spec)
        return
    handle = launched.launcher.start(spec)
    assert launched.exits(1) == [handle]
    [line] = handle.log_tail()
    assert line.startswith("ConfigurationError")
    assert text in line
