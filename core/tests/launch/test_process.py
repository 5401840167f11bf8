"""What only processes have: signals, sessions, orphans, output, the environment."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from kvbaton.control import ChannelLost, Received, private_directory
from kvbaton.control.zmq import ZmqCoordinatorChannels
from kvbaton.errors import StartupError
from kvbaton.launch.process import ProcessLauncher
from kvbaton.messages import Cancel, Stop

MESSAGE = Cancel("a" * 32)


# -- the end of a stage ------------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.3", "C6.4", "T7")
def test_a_killed_stage_is_noticed_with_signal_and_log(processes):
    handle = processes.start("hang")
    [hello] = processes.gather(1)
    assert int(hello.message.cause) == handle.pid
    assert psutil.Process(handle.pid).name() == f"kvb:{handle.peer.name}"[:15], "ps and top name the stage"
    os.kill(handle.pid, signal.SIGKILL)
    assert processes.exits(1) == [handle]
    assert not psutil.pid_exists(handle.pid), "joined: not even a zombie is left"
    assert handle.exit_status() == -signal.SIGKILL
    assert handle.death().status == "killed by SIGKILL"


@pytest.mark.clause("C6.2")
def test_a_stopped_stage_is_killed_and_joined(processes):
    handle = processes.start("hang")
    processes.gather(1)
    os.kill(handle.pid, signal.SIGSTOP)
    assert not handle.join(0.05)
    handle.kill()
    assert handle.join(20.0)
    assert handle.exit_status() == -signal.SIGKILL


@pytest.mark.clause("C6.4")
def test_what_a_stage_left_in_its_group_dies_with_it(processes, until):
    """A child of the stage may share the mappings through which it wrote."""
    handle = processes.start("hang_with_child")
    [hello] = processes.gather(1)
    child = int(hello.message.cause)
    assert psutil.pid_exists(child)
    os.kill(handle.pid, signal.SIGKILL)
    assert handle.join(20.0), "although the child holds the stage's output open"
    until(lambda: not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE, "its end")


def test_a_kill_never_hits_a_process_that_was_joined(processes, monkeypatch):
    handle = processes.start("leave", status=0)
    assert processes.exits(1) == [handle]
    monkeypatch.setattr(os, "killpg", lambda *arguments: pytest.fail("the number may be somebody else's"))
    handle.kill()


def test_without_descriptors_for_processes_an_end_is_noticed_too(processes, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    handle = processes.start("hang")
    processes.gather(1)
    os.kill(handle.pid, signal.SIGKILL)
    assert processes.exits(1) == [handle]
    assert handle.death().status == "killed by SIGKILL"


# -- what it prints ----------------------------------------------------------------------------------------------------


def test_both_streams_go_to_the_log_and_not_to_ours(processes, capfd):
    handle = processes.start("leave", status=0)
    assert processes.exits(1) == [handle]
    assert handle.log_tail() == ["printed", "warned", "raw, without an end"]
    assert capfd.readouterr() == ("", "")


def test_the_log_is_bounded_and_a_flood_disturbs_nobody(processes, until):
    flooding = processes.start("flood", name="prefill-0")
    echoing = processes.start("echo", name="decode-0")
    processes.channels.send(echoing.peer, MESSAGE)
    assert {event.peer.name for event in processes.gather(2)} == {"prefill-0", "decode-0"}
    os.kill(echoing.pid, signal.SIGKILL)
    assert processes.exits(1) == [echoing]
    until(lambda: len(flooding.log_tail()) == 50, "the flood")
    flooding.kill()
    assert processes.exits(1) == [flooding]
    assert len(flooding.log_tail()) == 50
    assert set(flooding.log_tail()[:-1]) == {"x" * 99}


def test_a_broken_observer_of_lines_does_not_end_the_watch(processes, caplog):
    seen = []

    def observe(peer, line):
        seen.append((peer.name, line))
        raise RuntimeError("broken observer")

    launcher = ProcessLauncher(processes.channels, on_line=observe)
    try:
        handle = launcher.start(processes.spec("leave", status=0))
        assert handle.join(20.0)
        assert seen == [("prefill-0", "printed")]
        assert "broken observer" in caplog.text
        assert len(handle.log_tail()) == 3
    finally:
        launcher.close()


# -- what it is started with -------------------------------------------------------------------------------------------


def test_a_stage_starts_clean(processes, monkeypatch):
    inheritable = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(inheritable, True)
    try:
        handle = processes.start("describe", environment={"STAGE_DEVICE": "3"}, depth={"of": ["settings", 1, None]})
        [event, _] = processes.gather(2)
    finally:
        os.close(inheritable)
    facts = event.message.result
    assert facts["settings"] == {"depth": {"of": ["settings", 1, None]}}
    assert (facts["role"], facts["device"]) == ("prefill", "3")
    assert facts["pid"] == handle.pid
    assert facts["session"] == handle.pid, "a session of its own, away from the terminal"
    assert facts["stdin"] == ""
    assert facts["fds"].count("/dev/null") == 2, "its standard input, and nothing of ours"
    assert sum(target.startswith("pipe:") for target in facts["fds"]) == 4, (
        "its output, both streams and the end that is read, and the lifeline"
    )


def test_large_settings_fit_and_too_large_ones_are_refused(processes):
    handle = processes.start("describe", text="x" * 400_000)
    [event, _] = processes.gather(2)
    assert event.message.result["settings"] == {"text": "x" * 400_000}
    assert handle.join(20.0)
    with pytest.raises(StartupError, match="more than 1048576"):
        processes.start("describe", text="x" * 1_100_000)


def test_settings_that_are_not_json_are_refused(processes):
    with pytest.raises(StartupError, match="do not fit JSON"):
        processes.start("describe", what=object())


def test_an_interpreter_that_cannot_run_is_explained(processes, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(StartupError, match="prefill-0 cannot be started"):
        processes.start("echo")


def test_ctrl_c_is_not_for_stages(processes):
    handle = processes.start("echo")
    processes.channels.send(handle.peer, MESSAGE)
    processes.gather(1)
    os.kill(handle.pid, signal.SIGINT)
    processes.channels.send(handle.peer, MESSAGE)
    assert processes.gather(1) == [Received(handle.peer, MESSAGE)]
    processes.channels.send(handle.peer, Stop())
    assert handle.join(20.0)
    assert handle.exit_status() == 0


# -- the end of the coordinator ----------------------------------------------------------------------------------------

_APPLICATION = """
    import os, sys, time
    from pathlib import Path
    from kvbaton.control.zmq import ZmqCoordinatorChannels
    from kvbaton.launch import StageSpec
    from kvbaton.launch.process import ProcessLauncher
    from kvbaton.messages import Cancel

    sys.path.insert(0, {entries!r})
    channels = ZmqCoordinatorChannels(directory=Path({directory!r}))
    launcher = ProcessLauncher(channels, orphan_grace={grace!r})
    settings = {{"note": {note!r}}}
    spec = StageSpec(name="p", role="prefill", entry="stage_entries:" + {entry!r}, settings=settings)
    handle = launcher.start(spec)
    channels.send(handle.peer, Cancel("a" * 32))
    events = []
    while not events:
        channels.wait(10.0)
        events = channels.receive()
    if {fork!r} and os.fork() == 0:
        os.close(1)
        time.sleep(30)
        os._exit(0)
    print(handle.pid, flush=True)
    time.sleep(100)
"""


def application(directory, entry, note="", grace=60.0, fork=False):
    """An application with one stage; returns (the application, the stage's process)."""
    entries = str(Path(__file__).parent / "entries")
    source = textwrap.dedent(_APPLICATION).format(
        entries=entries, directory=str(directory), entry=entry, note=str(note), grace=grace, fork=fork
    )
    parent = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, start_new_session=True)
    with parent.stdout as output:
        return parent, psutil.Process(int(output.readline()))


def next_start(directory):
    """A killed application cannot remove its directory; the next one that starts in its place does."""
    assert [left.name.split("-")[0] for left in directory.iterdir()] == ["kvbaton"]
    ZmqCoordinatorChannels(directory=directory).close()
    assert list(directory.iterdir()) == []


def end(parent):
    os.killpg(parent.pid, signal.SIGKILL)
    parent.wait(10.0)


@pytest.mark.clause("C6.6")
@pytest.mark.parametrize("entry", ["echo", "echo_then_linger"])
def test_a_stage_whose_coordinator_was_killed_ends_by_itself(tmp_path, directory, until, entry):
    note = tmp_path / "note"
    parent, stage = application(directory, entry, note)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10.0)
    until(lambda: not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE, "the stage's own end")
    if entry == "echo":
        assert note.read_text().startswith("lost: the co")
    else:
        assert note.read_text() == "drained", "printing into a log that nobody reads did not stop it"
    assert list(directory.iterdir()) == [], "the killed application's directory was left to nobody"


@pytest.mark.clause("C6.6")
@pytest.mark.parametrize("entry", ["hang", "hang_in_native_code"])
def test_a_stage_that_hangs_without_a_coordinator_is_ended_by_its_watchdog(directory, until, entry):
    parent, stage = application(directory, entry, grace=0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait(10.0)
    until(lambda: not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE, "the watchdog")
    next_start(directory)


@pytest.mark.clause("C6.6")
def test_a_child_that_the_application_forked_does_not_hide_its_end(tmp_path, directory, until):
    """The fork holds the lifeline's pipe, and the channel's socket, open."""
    note = tmp_path / "note"
    parent, stage = application(directory, "echo", note, fork=True)
    try:
        parent.send_signal(signal.SIGKILL)
        parent.wait(10.0)
        until(lambda: not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE, "the stage's own end")
        assert note.read_text() == "lost: the coordinator's process is gone"
    finally:
        os.killpg(parent.pid, signal.SIGKILL)
    until(lambda: private_directory.remove_abandoned(next(directory.iterdir())), "the end of the child, which holds it")


# -- nothing grows -----------------------------------------------------------------------------------------------------


@pytest.mark.clause("T12", "T10")
def test_many_stages_leave_nothing_behind(processes):
    before = psutil.Process().num_fds()
    for _ in range(5):
        handle = processes.start("leave", status=0)
        assert processes.exits(1) == [handle]
        processes.channels.remove(handle.peer)
    processes.channels.wait(0.05)
    processes.channels.receive()
    assert psutil.Process().num_fds() <= before + 1


def test_a_lost_channel_and_the_end_of_the_process_are_two_events(processes):
    handle = processes.start("hang")
    processes.gather(1)
    begin = time.monotonic()
    handle.kill()
    [lost] = processes.gather(1)
    assert isinstance(lost, ChannelLost)
    assert processes.exits(1) == [handle]
    assert time.monotonic() - begin < 10.0


def test_the_order_survives_json():
    import msgspec

    from kvbaton.control.zmq import Ticket
    from kvbaton.identity import PeerId
    from kvbaton.launch import StageSpec
    from kvbaton.launch.worker import Order

    order = Order(
        spec=StageSpec(name="a", role="decode", entry="m:f", settings={"k": [1, {"x": None}]}),
        ticket=Ticket(address="ipc:///x", peer=PeerId("a", 2**62), coordinator_epoch=2**62 + 1, max_message=5),
        coordinator_pid=1,
        output=9,
        path=["/a"],
        orphan_grace=1.5,
    )
    line = msgspec.json.encode(order)
    assert b"\n" not in line
    assert msgspec.json.decode(line, type=Order) == order
    assert json.loads(line)["spec"]["name"] == "a"
