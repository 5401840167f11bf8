"""What only sockets have: foreign bytes, foreign epochs, stopped processes, directories."""

import contextlib
import fcntl
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import psutil
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvbaton.control import ChannelLost, Received
from kvbaton.control.zmq import ZmqCoordinatorChannels, ZmqStageChannel
from kvbaton.errors import ConfigurationError, ConnectError, ThreadError
from kvbaton.identity import PeerId
from kvbaton.messages import VERSION, Stop, encode, envelope

PEER = PeerId("decode-0", 1000)
GREETING = b"kvbaton/" + str(VERSION).encode()
#: Seconds: a busy machine, too, lets a process answer within them.
HEARTBEAT = 3.0


@contextlib.contextmanager
def raw_dealer(address: str, routing_id: bytes):
    """A client that says whatever it likes."""
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.routing_id = routing_id
        dealer.linger = 500
        dealer.reconnect_ivl = -1
        dealer.connect(address)
        yield dealer
    finally:
        dealer.close()
        context.term()


@pytest.fixture
def raw(zmq_links):
    """A coordinator that expects PEER, and a raw client in its place."""
    coordinator = zmq_links.coordinator(max_message=4096)
    coordinator.add(PEER)
    with raw_dealer(coordinator.ticket(PEER).address, b"decode-0@3e8") as dealer:
        yield coordinator, dealer


def settle(coordinator, dealer, seq=1):
    """Everything that the client sent before is dealt with; returns the events."""
    dealer.send(encode(envelope(PEER.epoch, seq, Stop())))
    events = []
    for _ in range(200):
        coordinator.wait(0.1)
        events += coordinator.receive()
        if Received(PEER, Stop()) in events:
            return events
    raise AssertionError(f"not settled: {events}")


# -- bytes that are not ours -------------------------------------------------------------------------------------------


@pytest.mark.clause("C9.3")
def test_rubbish_is_refused_and_counted_and_the_channel_goes_on(raw):
    coordinator, dealer = raw
    dealer.send(GREETING)
    rubbish = [b"", b"\x00", b"\xff" * 50, b"{}", os.urandom(100), encode(envelope(1000, 1, Stop()))[:-1]]
    for data in rubbish:
        dealer.send(data)
    dealer.send_multipart([encode(envelope(PEER.epoch, 1, Stop())), b"a second frame"])
    dealer.send(b"x" * 5000)
    assert settle(coordinator, dealer) == [Received(PEER, Stop())]
    assert coordinator.statistics().dropped == {
        ("unknown", "malformed"): len(rubbish) + 1,
        ("unknown", "oversized"): 1,
    }


@pytest.mark.clause("C9.3")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(junk=st.lists(st.lists(st.binary(max_size=300), min_size=1, max_size=4), min_size=1, max_size=20))
def test_no_bytes_whatsoever_disturb_the_coordinator(short_tmp, junk):
    coordinator = ZmqCoordinatorChannels(directory=short_tmp, max_message=256)
    try:
        coordinator.add(PEER)
        address = coordinator.ticket(PEER).address
        with raw_dealer(address, b"decode-0@3e8") as dealer, raw_dealer(address, b"who") as stranger:
            dealer.send(GREETING)
            for frames in junk:
                dealer.send_multipart(frames)
                stranger.send_multipart(frames)
            assert settle(coordinator, dealer) == [Received(PEER, Stop())]
            counted = 0
            for _ in range(200):
                coordinator.wait(0.1)
                assert coordinator.receive() == []
                counted = sum(coordinator.statistics().dropped.values())
                if counted == 2 * len(junk):
                    break
            assert counted == 2 * len(junk), "each is refused and counted"
    finally:
        coordinator.close()


@pytest.mark.clause("C9.3")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(position=st.integers(0, 10_000), byte=st.integers(0, 255))
def test_a_flipped_byte_never_crashes_a_stage(short_tmp, position, byte):
    """The stage's end, fed by a raw ROUTER in the coordinator's place."""
    path = short_tmp / "control"
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{path}")
    try:
        template = ticket_to(path)
        stage = ZmqStageChannel(template)
        try:
            routing_id, greeting = router.recv_multipart()
            assert greeting == GREETING
            data = bytearray(encode(envelope(77, 1, Stop())))
            data[position % len(data)] = byte
            router.send_multipart([routing_id, bytes(data)])
            router.send_multipart([routing_id, b"junk"])
            for _ in range(200):
                stage.wait(0.1)
                stage.receive()
                if stage.statistics().received + sum(stage.statistics().dropped.values()) == 2:
                    break
            assert stage.statistics().received + sum(stage.statistics().dropped.values()) == 2
        finally:
            stage.close()
    finally:
        router.close(0)
        context.term()
        path.unlink()


def ticket_to(path):
    from kvbaton.control.zmq import Ticket

    return Ticket(address=f"ipc://{path}", peer=PEER, coordinator_epoch=77, max_message=4096)


@pytest.mark.clause("C9.3")
def test_a_frame_far_beyond_the_limit_costs_its_sender_the_connection(raw):
    coordinator, dealer = raw
    dealer.send(GREETING)
    settle(coordinator, dealer)
    dealer.send(b"x" * 100_000)
    events = []
    for _ in range(100):
        coordinator.wait(0.1)
        events += coordinator.receive()
        if events:
            break
    assert events == [ChannelLost(PEER, "its connection ended")]


@pytest.mark.clause("C9.3")
def test_who_does_not_speak_the_protocol_at_all_is_turned_away_and_counted(zmq_links):
    coordinator, stage = zmq_links.pair()
    stage.send(Stop())
    zmq_links.gather(coordinator, 1)
    with socket.socket(socket.AF_UNIX) as plain:
        plain.connect(str(coordinator.directory / "control"))
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
    zmq_links.until(
        lambda: coordinator.receive() == [] and coordinator.statistics().dropped.get(("unknown", "stranger")),
        "the stranger's end",
    )
    stage.send(Stop())
    assert zmq_links.gather(coordinator, 1) == [Received(PEER, Stop())]


@pytest.mark.clause("C9.3")
def test_a_message_of_several_frames_is_refused_as_a_whole_or_is_several_envelopes(zmq_links, raw):
    coordinator, dealer = raw
    dealer.send(GREETING)
    good = [encode(envelope(PEER.epoch, seq, Stop())) for seq in (1, 2)]
    dealer.send_multipart([good[0], b"no envelope", good[1]])
    dealer.send_multipart(good)
    dealer.send(encode(envelope(PEER.epoch, 3, Stop())))
    assert zmq_links.gather(coordinator, 3) == [Received(PEER, Stop())] * 3
    assert coordinator.statistics().dropped == {("unknown", "malformed"): 1}


@pytest.mark.clause("C9.3", "C9.4")
def test_a_message_of_very_many_frames_is_refused_as_a_whole_too(zmq_links, raw, monkeypatch):
    """However many passes it takes to find the rubbish in it; what follows is heard, in order."""
    monkeypatch.setattr("kvbaton.control.zmq.ENVELOPES_PER_PASS", 3)
    coordinator, dealer = raw
    dealer.send(GREETING)
    good = [encode(envelope(PEER.epoch, seq, Stop())) for seq in range(1, 21)]
    dealer.send_multipart([*good[:17], b"no envelope", *good[17:]])
    dealer.send_multipart(good)
    dealer.send(encode(envelope(PEER.epoch, 21, Stop())))
    assert zmq_links.gather(coordinator, 21) == [Received(PEER, Stop())] * 21
    assert coordinator.statistics().dropped == {("unknown", "malformed"): 1}


@pytest.mark.clause("C9.4", "T12")
def test_another_ones_word_is_heard_between(zmq_links, monkeypatch):
    """Whoever is late says more and more; the socket deals in turn."""
    monkeypatch.setattr("kvbaton.control.zmq.ENVELOPES_PER_PASS", 3)
    coordinator = zmq_links.coordinator()
    other = PeerId("prefill-0", 7)
    for peer in (PEER, other):
        coordinator.add(peer)
        coordinator._peers[peer].connected = True
    much, little = (coordinator._peers[peer].routing_id for peer in (PEER, other))
    frames = [encode(envelope(PEER.epoch, seq, Stop())) for seq in range(1, 31)]
    dealt = [(much, frames[:20]), (little, [encode(envelope(other.epoch, 1, Stop()))])]
    for first in range(20, 30):
        dealt += [(much, frames[first : first + 1]), (little, [encode(envelope(other.epoch, first - 18, Stop()))])]
    halves = iter([half for one in dealt for half in one])
    left = [2 * len(dealt)]

    def take(*_, **__):
        left[0] -= 1
        return next(halves)

    monkeypatch.setattr(coordinator._wire, "socket", SimpleNamespace(recv=take, recv_multipart=take))
    monkeypatch.setattr(coordinator._wire, "has_frames", lambda: left[0] > 0)
    passes = []
    while coordinator.unheard(PEER) or not passes:
        passes.append([event.peer for event in coordinator.receive()])
        assert passes[-1].count(PEER) <= 3
    monkeypatch.undo()
    assert sum(some.count(PEER) for some in passes) == 30
    until_all_is_said = passes[1 : 1 + 10]
    assert all(other in some for some in until_all_is_said), "C9.4: it waited for somebody else"


@pytest.mark.clause("C9.4")
def test_behind_a_gap_in_very_many_frames_nothing_is_believed(zmq_links, raw, monkeypatch):
    monkeypatch.setattr("kvbaton.control.zmq.ENVELOPES_PER_PASS", 3)
    coordinator, dealer = raw
    dealer.send(GREETING)
    dealer.send_multipart([encode(envelope(PEER.epoch, seq, Stop())) for seq in (1, 2, 3, 4, 5, 7, 8, 9, 10)])
    dealer.send(encode(envelope(PEER.epoch, 6, Stop())))
    *heard, end = zmq_links.gather(coordinator, 6)
    assert heard == [Received(PEER, Stop())] * 5
    assert end == ChannelLost(PEER, "C9.4: message 7 came where 6 was due")
    assert not coordinator.unheard(PEER)
    assert coordinator.receive() == []


@pytest.mark.clause("C9.3")
def test_nothing_is_taken_of_several_frames_before_a_first_single_one(raw):
    coordinator, dealer = raw
    dealer.send_multipart([encode(envelope(PEER.epoch, seq, Stop())) for seq in (1, 2)])
    dealer.send(GREETING)
    assert settle(coordinator, dealer, seq=1) == [Received(PEER, Stop())]
    assert coordinator.statistics().dropped == {("unknown", "malformed"): 1}


# -- numbers and epochs on the wire ------------------------------------------------------------------------------------


@pytest.mark.clause("C9.4")
def test_a_repeat_is_dropped_and_counted(raw):
    coordinator, dealer = raw
    dealer.send(GREETING)
    assert settle(coordinator, dealer, seq=1) == [Received(PEER, Stop())]
    dealer.send(encode(envelope(PEER.epoch, 1, Stop())))
    assert settle(coordinator, dealer, seq=2) == [Received(PEER, Stop())]
    assert coordinator.statistics().dropped == {("peer", "repeat"): 1}


@pytest.mark.clause("C9.4")
def test_a_gap_makes_the_peer_lost_and_nothing_after_it_counts(raw):
    coordinator, dealer = raw
    for seq in (1, 3, 2, 4):
        dealer.send(encode(envelope(PEER.epoch, seq, Stop())))
    events = []
    for _ in range(100):
        coordinator.wait(0.1)
        events += coordinator.receive()
        if sum(coordinator.statistics().dropped.values()) == 3:
            break
    assert events == [Received(PEER, Stop()), ChannelLost(PEER, "C9.4: message 3 came where 2 was due")]
    assert coordinator.statistics().dropped == {("peer", "gap"): 1, ("unknown", "lost"): 2}


@pytest.mark.clause("C1.4")
def test_another_epoch_in_an_envelope_is_refused_and_counted(raw):
    coordinator, dealer = raw
    dealer.send(GREETING)
    dealer.send(encode(envelope(PEER.epoch - 1, 1, Stop())))
    dealer.send(encode(envelope(PEER.epoch + 1, 1, Stop())))
    assert settle(coordinator, dealer) == [Received(PEER, Stop())]
    assert coordinator.statistics().dropped == {("peer", "stale-epoch"): 1, ("peer", "foreign-epoch"): 1}


@pytest.mark.clause("C1.4")
def test_a_process_of_an_older_epoch_is_not_heard(zmq_links):
    coordinator, stage = zmq_links.pair()
    stage.send(Stop())
    zmq_links.gather(coordinator, 1)
    coordinator.remove(PEER)
    newer = PeerId("decode-0", 2000)
    coordinator.add(newer)
    successor = zmq_links.stage(coordinator, newer)
    stage.send(Stop())
    successor.send(Stop())
    assert zmq_links.gather(coordinator, 1) == [Received(newer, Stop())]
    zmq_links.until(
        lambda: coordinator.receive() == [] and coordinator.statistics().dropped.get(("unknown", "stale-epoch")) == 1,
        "the refusal",
    )


@pytest.mark.clause("C9.3")
def test_a_stage_of_another_version_is_lost_with_the_reason(raw):
    coordinator, dealer = raw
    dealer.send(b"kvbaton/999")
    events = []
    for _ in range(100):
        coordinator.wait(0.1)
        events += coordinator.receive()
        if events:
            break
    [lost] = events
    assert isinstance(lost, ChannelLost)
    assert "kvbaton/999" in lost.reason


@pytest.mark.clause("C1.4")
def test_a_second_client_under_a_live_peers_name_is_not_heard(zmq_links):
    coordinator, stage = zmq_links.pair()
    stage.send(Stop())
    zmq_links.gather(coordinator, 1)
    with raw_dealer(coordinator.ticket(PEER).address, b"decode-0@3e8") as impostor:
        impostor.send(encode(envelope(PEER.epoch, 2, Stop())))
        stage.send(zmq_links.message(5))
        assert zmq_links.gather(coordinator, 1) == [Received(PEER, zmq_links.message(5))]
    coordinator.wait(0.05)
    assert coordinator.receive() == []


def test_the_last_words_of_a_stage_wait_for_a_coordinator_that_is_busy(short_tmp):
    """It has the connection in its queue, and comes to it after three seconds: else the cause of the end is lost."""
    path = short_tmp / "control"
    context = zmq.Context()
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(path))
            listening.listen()
            stage = ZmqStageChannel(ticket_to(path))
            stage.send(Stop())
            closing = threading.Thread(target=stage.close)
            closing.start()
            closing.join(3.0)
            assert closing.is_alive(), "what it said last is lost"
            router = context.socket(zmq.ROUTER)
            router.use_fd = listening.detach()
        router.bind(f"ipc://{path}")
        assert router.recv_multipart()[1] == GREETING
        assert router.recv_multipart()[1] == encode(envelope(PEER.epoch, 1, Stop()))
        closing.join()
    finally:
        context.destroy(linger=0)
        path.unlink(missing_ok=True)


# -- processes ---------------------------------------------------------------------------------------------------------


def stage_process(ticket, body):
    """A forked process that holds the stage's end (it does nothing but that, so forking is safe enough)."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            stage = ZmqStageChannel(ticket)
            stage.send(Stop())
            body(stage)
            status = 0
        finally:
            os._exit(status)
    return pid


@pytest.mark.clause("C6.4")
def test_a_stopped_process_is_lost_by_its_heartbeat(zmq_links):
    coordinator = zmq_links.coordinator(heartbeat=HEARTBEAT)
    coordinator.add(PEER)
    pid = stage_process(coordinator.ticket(PEER), lambda stage: threading.Event().wait())
    try:
        assert zmq_links.gather(coordinator, 1) == [Received(PEER, Stop())]
        os.kill(pid, signal.SIGSTOP)
        assert zmq_links.gather(coordinator, 1) == [ChannelLost(PEER, "its connection ended")]
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.clause("C6.4")
def test_a_process_is_not_lost_before_it_has_answered_nothing_for_a_whole_heartbeat(zmq_links):
    """One that stands still for less, on a machine that is busy, goes on; and the cause that is told is true."""
    coordinator = zmq_links.coordinator(heartbeat=HEARTBEAT)
    coordinator.add(PEER)

    def answer(stage):
        while True:
            stage.wait(60.0)
            for _ in stage.receive():
                stage.send(Stop())

    began = time.monotonic()
    pid = stage_process(coordinator.ticket(PEER), answer)
    try:
        zmq_links.gather(coordinator, 1)
        while True:  # to a moment at which no heartbeat has just been sent
            asked = time.monotonic()
            coordinator.send(PEER, zmq_links.message(1))
            assert zmq_links.gather(coordinator, 1) == [Received(PEER, Stop())]
            if asked - began > 0.3 * HEARTBEAT:
                break
        os.kill(pid, signal.SIGSTOP)
        assert zmq_links.gather(coordinator, 1) == [ChannelLost(PEER, "its connection ended")]
        assert time.monotonic() - asked >= HEARTBEAT
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_stage_that_only_computes_keeps_its_channel(zmq_links):
    """ZeroMQ's own thread answers the heartbeat."""
    coordinator = zmq_links.coordinator(heartbeat=HEARTBEAT)
    coordinator.add(PEER)

    def compute(stage):
        reader, _ = os.pipe()
        os.read(reader, 1)

    pid = stage_process(coordinator.ticket(PEER), compute)
    try:
        zmq_links.gather(coordinator, 1)
        by = time.monotonic() + 1.5 * HEARTBEAT
        while time.monotonic() < by:
            coordinator.wait(0.1)
            assert coordinator.receive() == []
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_killed_process_is_lost_at_once(zmq_links):
    coordinator = zmq_links.coordinator(heartbeat=600.0)
    coordinator.add(PEER)
    pid = stage_process(coordinator.ticket(PEER), lambda stage: threading.Event().wait())
    try:
        zmq_links.gather(coordinator, 1)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert zmq_links.gather(coordinator, 1) == [ChannelLost(PEER, "its connection ended")]


@pytest.mark.clause("T11")
def test_two_threads_at_once_are_an_error_instead_of_a_crash(zmq_links):
    _, stage = zmq_links.pair()
    thread = threading.Thread(target=stage.wait, args=(60.0,))
    thread.start()
    try:
        with pytest.raises(ThreadError, match="two threads"):
            zmq_links.until(lambda: stage.receive() == ["never"], "the other thread to wait")
    finally:
        zmq_links.until(lambda: stage.wake() or not thread.is_alive(), "the end of the wait")
        thread.join()


# -- the directory -----------------------------------------------------------------------------------------------------


def test_the_socket_lies_in_a_fresh_private_directory_that_goes_with_it(short_tmp):
    coordinator = ZmqCoordinatorChannels(directory=short_tmp)
    directory = coordinator.directory
    assert directory.parent == short_tmp
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert str(os.getpid()) in directory.name
    coordinator.close()
    assert not directory.exists()


def test_a_start_removes_what_dead_processes_of_its_user_left_and_nothing_else(short_tmp):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait(30)
    names = {
        "left": f"kvbaton-{dead.pid}-abcd1234", "live": f"kvbaton-{os.getppid()}-abcd1234",
        "other": f"another-{dead.pid}-abcd1234", "link": f"kvbaton-{dead.pid}-link1234",
        "locked": f"kvbaton-{dead.pid}-lock1234",
    }  # fmt: skip
    places = {what: short_tmp / name for what, name in names.items()}
    for what in ("left", "live", "other", "locked"):
        places[what].mkdir(mode=0o700)
        (places[what] / "control").touch()
    places["link"].symlink_to(places["other"])
    # a live one in another container has a number that means nobody here
    lock = os.open(places["locked"], os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        first = ZmqCoordinatorChannels(directory=short_tmp)
        second = ZmqCoordinatorChannels(directory=short_tmp)
        assert first.directory is not None
        assert first.directory.is_dir(), "a live one was swept"
        assert {what for what, place in places.items() if place.exists()} == {"live", "other", "link", "locked"}
        first.close()
        second.close()
    finally:
        os.close(lock)
        places["link"].unlink()
        for what in ("live", "other", "locked"):
            shutil.rmtree(places[what])


def test_without_a_setting_the_directory_is_private_too(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    coordinator = ZmqCoordinatorChannels()
    try:
        assert coordinator.directory.parent == tmp_path
        assert stat.S_IMODE(coordinator.directory.stat().st_mode) == 0o700
    finally:
        coordinator.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mode", "what"), [(0o750, "0750"), (0o701, "0701")])
def test_a_directory_that_others_can_enter_is_refused_at_both_ends(short_tmp, mode, what):
    coordinator = ZmqCoordinatorChannels(directory=short_tmp)
    coordinator.add(PEER)
    try:
        coordinator.directory.chmod(mode)
        with pytest.raises(ConfigurationError, match=f"{what}.*chmod 700"):
            ZmqStageChannel(coordinator.ticket(PEER))
    finally:
        coordinator.close()
    base = short_tmp / "open"
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"{what}.*chmod 700"):
        ZmqCoordinatorChannels(directory=base)
    base.rmdir()


def test_a_directory_of_somebody_else_is_refused(short_tmp, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigurationError, match="belongs to user"):
        ZmqCoordinatorChannels(directory=short_tmp)


def test_a_directory_in_one_that_is_not_there_is_refused_and_not_made(short_tmp):
    mistyped = short_tmp / "mistyped"
    with pytest.raises(ConfigurationError, match=f"cannot be made: there is no directory {mistyped}. Set control.dir"):
        ZmqCoordinatorChannels(directory=mistyped / "a")
    assert not mistyped.exists()


def test_a_link_in_place_of_the_directory_is_refused(short_tmp):
    real, link = short_tmp / "real", short_tmp / "link"
    real.mkdir(mode=0o700)
    link.symlink_to(real)
    try:
        with pytest.raises(ConfigurationError, match="is not a directory"):
            ZmqCoordinatorChannels(directory=link)
    finally:
        link.unlink()
        real.rmdir()


def test_a_path_that_is_too_long_for_a_socket_says_what_to_set(short_tmp):
    deep = short_tmp / ("d" * 100)
    with pytest.raises(ConfigurationError, match=r"107 bytes.*control\.dir"):
        ZmqCoordinatorChannels(directory=deep)
    assert list(deep.iterdir()) == []
    deep.rmdir()


def test_a_stage_without_a_coordinator_says_so(short_tmp):
    with pytest.raises(ConnectError, match="no coordinator"):
        ZmqStageChannel(ticket_to(short_tmp / "control"))
    (short_tmp / "control").touch()
    with pytest.raises(ConnectError, match="not a socket"):
        ZmqStageChannel(ticket_to(short_tmp / "control"))
    (short_tmp / "control").unlink()


@pytest.mark.clause("T12")
def test_nothing_grows_with_the_number_of_messages(zmq_links):
    coordinator, stage = zmq_links.pair()
    for _ in range(20):
        for number in range(50):
            stage.send(zmq_links.message(number))
        zmq_links.gather(coordinator, 50)
    assert psutil.Process().num_fds() < 200
    assert coordinator.statistics().received == 1000
