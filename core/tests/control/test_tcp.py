"""Channels to stages of other hosts: keys, joining, admission, every refusal, and the two ways to end."""

import concurrent.futures
import os
import socket
import stat
import time
from types import SimpleNamespace

import pytest
import zmq

from kvbaton.control import ChannelLost, Received
from kvbaton.control.curve import COORDINATOR, ClientKeys, ServerKeys, load_allowed, load_pair, load_public, make_keys
from kvbaton.control.join import join
from kvbaton.control.zmq import Departure, Listen, ZmqCoordinatorChannels, ZmqStageChannel
from kvbaton.errors import ConfigurationError, ConnectError
from kvbaton.identity import PeerId
from kvbaton.messages import Cancel, Stop

PREFILL, DECODE = PeerId("prefill-0", 1000), PeerId("decode-0", 1001)
NAMES = ["prefill-0", "decode-0"]
#: Seconds within which a busy machine, too, lets a process answer; nothing here waits for them.
HEARTBEAT = 10.0


@pytest.fixture
def folder(tmp_path):
    make_keys(tmp_path / "keys", [COORDINATOR, *NAMES, "stranger"])
    return tmp_path / "keys"


@pytest.fixture
def coordinator(folder):
    keys = ServerKeys(load_pair(folder, COORDINATOR), load_allowed(folder, NAMES))
    channels = ZmqCoordinatorChannels(listen=Listen("tcp://127.0.0.1:*", keys), heartbeat=HEARTBEAT)
    channels.add(PREFILL)
    channels.add(DECODE)
    yield channels
    channels.close()


def client(folder, name) -> ClientKeys:
    return ClientKeys(load_pair(folder, name), load_public(folder, COORDINATOR))


def beside(coordinator, action, *args, **options):
    """``action`` on a thread of its own while the coordinator does its part on this one; (its result, the events)."""
    events = []
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(action, *args, **options)
        while not future.done():  # which its own deadline ends
            coordinator.wait(0.01)
            events += coordinator.receive()
        return future.result(timeout=10), events


def enter(coordinator, folder, name) -> ZmqStageChannel:
    def both():
        keys = client(folder, name)
        return ZmqStageChannel(join(coordinator.address, name, keys, within=30), keys=keys, heartbeat=HEARTBEAT)

    return beside(coordinator, both)[0]


def passes(what):
    """As many as a hang alone can need."""
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        yield
    raise AssertionError(f"{what}: not within 60 s")


def gather(channels, count):
    found = []
    for _ in passes(f"{count} events"):
        if len(found) >= count:
            break
        channels.wait(0.01)
        found += channels.receive()
    return found


# -- keys --------------------------------------------------------------------------------------------------------------


def test_keys_are_private_and_are_never_overwritten(tmp_path):
    before = os.umask(0)
    try:
        made = make_keys(tmp_path / "k", ["coordinator"])
    finally:
        os.umask(before)
    assert [path.name for path in made] == ["coordinator.key", "coordinator.key_secret"]
    assert stat.S_IMODE(made[1].stat().st_mode) == 0o600
    assert stat.S_IMODE(made[0].parent.stat().st_mode) == 0o700
    secret = made[1].read_bytes()
    with pytest.raises(ConfigurationError, match="exists already"):
        make_keys(tmp_path / "k", ["coordinator"])
    assert made[1].read_bytes() == secret
    assert secret.split(b'secret-key = "')[1][:40].decode() not in repr(load_pair(tmp_path / "k", "coordinator"))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o602])
def test_a_secret_key_that_others_can_use_is_refused(folder, mode):
    (folder / "prefill-0.key_secret").chmod(mode)
    with pytest.raises(ConfigurationError, match=f"mode {mode:04o}.*chmod 600"):
        load_pair(folder, "prefill-0")


def test_keys_that_are_missing_or_no_keys_are_refused(folder, tmp_path):
    with pytest.raises(ConfigurationError, match=r"kvbaton keys .* decode-1"):
        load_pair(folder, "decode-1")
    (folder / "decode-0.key").write_text('public-key = "short"\n')
    with pytest.raises(ConfigurationError, match="no CURVE key file"):
        load_allowed(folder, NAMES)
    (folder / "decode-0.key").write_bytes((folder / "prefill-0.key").read_bytes())
    with pytest.raises(ConfigurationError, match="prefill-0 and decode-0 have the same public key"):
        load_allowed(folder, NAMES)
    with pytest.raises(ConfigurationError, match="cannot be the name"):
        make_keys(folder, ["../prefill-0"])
    with pytest.raises(ConfigurationError, match=f"there is no directory {tmp_path / 'mistyped'}$"):
        make_keys(tmp_path / "mistyped" / "keys", ["prefill-0"])


# -- joining -----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C1.4", "C9.4")
def test_a_stage_that_joins_gets_its_epoch_and_a_channel_both_ways(coordinator, folder):
    coordinator.send(PREFILL, Cancel("0" * 32))  # waits for the stage
    stage = enter(coordinator, folder, "prefill-0")
    try:
        assert stage.peer == PREFILL
        stage.send(Stop())
        assert gather(coordinator, 1) == [Received(PREFILL, Stop())]
        assert gather(stage, 1) == [Cancel("0" * 32)]
        assert coordinator.statistics().dropped == {}
    finally:
        stage.close()


@pytest.mark.clause("C9.3")
def test_a_key_that_the_coordinator_does_not_know_is_refused_and_counted(coordinator, folder):
    for times in (1, 2):
        with pytest.raises(ConfigurationError, match=r"does not know the key of stranger: copy stranger\.key"):
            beside(coordinator, join, coordinator.address, "stranger", client(folder, "stranger"), within=30)
        assert coordinator.statistics().dropped["unknown", "unknown-key"] == times


@pytest.mark.clause("C1.4", "C9.4")
def test_nobody_takes_the_place_of_another_with_a_key_of_its_own(coordinator, folder):
    """A routing id belongs to whoever comes first with it: a place could be taken before its stage has joined."""
    coordinator.send(PREFILL, Cancel("0" * 32))
    context = zmq.Context()
    try:
        early = context.socket(zmq.DEALER)
        client(folder, "decode-0").apply(early)
        early.routing_id = b"prefill-0@3e8"
        early.connect(coordinator.address)
        early.send(b"kvbaton/1")
        for _ in passes("it is dropped"):
            coordinator.wait(0.01)
            assert coordinator.receive() == []
            if coordinator.statistics().dropped.get(("unknown", "unknown-peer")):
                break
        stage = enter(coordinator, folder, "prefill-0")
        try:
            stage.send(Stop())
            assert gather(coordinator, 1) == [Received(PREFILL, Stop())]
            assert gather(stage, 1) == [Cancel("0" * 32)]
            assert not early.poll(0)
        finally:
            stage.close()
    finally:
        context.destroy(linger=0)


@pytest.mark.clause("C1.4")
def test_a_routing_id_that_was_found_out_is_not_believed_under_another_key(coordinator, folder):
    context = zmq.Context()
    try:
        imposter = context.socket(zmq.DEALER)
        client(folder, "decode-0").apply(imposter)
        imposter.routing_id = f"prefill-0@3e8#{coordinator.ticket(PREFILL).secret}".encode()
        imposter.connect(coordinator.address)
        imposter.send(b"kvbaton/1")
        for _ in passes("it is dropped"):
            coordinator.wait(0.01)
            assert coordinator.receive() == []
            if coordinator.statistics().dropped.get(("unknown", "unknown-peer")):
                break
        assert coordinator.statistics().dropped == {("unknown", "unknown-peer"): 1}
    finally:
        context.destroy(linger=0)


def test_a_key_proves_one_name_only(coordinator, folder):
    with pytest.raises(ConfigurationError, match=r"this key belongs to decode-0, so that it cannot join as prefill-0"):
        beside(coordinator, join, coordinator.address, "prefill-0", client(folder, "decode-0"), within=30)


def test_a_name_that_is_not_expected_is_refused(coordinator, folder):
    coordinator.remove(DECODE)
    with pytest.raises(ConfigurationError, match="no stage decode-0 is expected here; expected: prefill-0"):
        beside(coordinator, join, coordinator.address, "decode-0", client(folder, "decode-0"), within=30)


def test_a_stage_joins_once(coordinator, folder):
    stage = enter(coordinator, folder, "prefill-0")
    try:
        with pytest.raises(ConfigurationError, match="prefill-0 has joined already and is connected"):
            beside(coordinator, join, coordinator.address, "prefill-0", client(folder, "prefill-0"), within=30)
    finally:
        stage.close()


def test_another_coordinators_key_is_noticed(coordinator, folder):
    wrong = ClientKeys(load_pair(folder, "prefill-0"), load_public(folder, "stranger"))
    with pytest.raises(ConfigurationError, match=r"its key is not the one in coordinator\.key"):
        beside(coordinator, join, coordinator.address, "prefill-0", wrong, within=30)


def test_a_server_without_keys_is_no_coordinator(folder):
    context = zmq.Context()
    try:
        plain = context.socket(zmq.ROUTER)
        port = plain.bind_to_random_port("tcp://127.0.0.1")
        with pytest.raises(ConfigurationError, match="it is no coordinator"):
            join(f"tcp://127.0.0.1:{port}", "prefill-0", client(folder, "prefill-0"), within=30)
    finally:
        context.destroy(linger=0)


@pytest.mark.clause("C6.7")
def test_an_address_where_nobody_is_fails_by_its_deadline_and_says_so_at_once(folder, monkeypatch):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound and not listening: nobody else gets the port
        told, now = [], [0.0]
        # its 0.8 s pass once it has said that it waits, however late that is on a busy machine
        monkeypatch.setattr("kvbaton.control.join.time", SimpleNamespace(monotonic=lambda: now[0]))

        def waiting(text):
            told.append(text)
            now[0] = 0.8

        address = f"tcp://127.0.0.1:{held.getsockname()[1]}"
        with pytest.raises(ConnectError, match=r"C6\.7: no coordinator could be reached at .*control\.connect"):
            join(address, "prefill-0", client(folder, "prefill-0"), within=0.8, waiting=waiting)
    assert len(told) == 1
    assert "no coordinator answers at tcp://127.0.0.1:" in told[0]

    def nobody(*_args, **_options):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)  # a test asks no name server
    with pytest.raises(ConfigurationError, match="the host nowhere is not known here: Name or service not known"):
        join("tcp://nowhere:1", "prefill-0", client(folder, "prefill-0"), within=5)


@pytest.mark.clause("C9.3")
def test_who_has_no_key_is_not_heard_and_who_has_anothers_is_not_believed(coordinator, folder):
    context = zmq.Context()
    try:
        plain = context.socket(zmq.DEALER)
        plain.connect(coordinator.address)
        plain.send(b"kvbaton-join {}")
        imposter = context.socket(zmq.DEALER)
        client(folder, "decode-0").apply(imposter)
        imposter.routing_id = b"prefill-0@3e8"
        imposter.connect(coordinator.address)
        imposter.send(b"kvbaton/1")
        for _ in passes("it is dropped"):
            coordinator.wait(0.01)
            assert coordinator.receive() == []
            dropped = coordinator.statistics().dropped
            if dropped.get(("unknown", "unknown-peer")) and dropped.get(("unknown", "stranger")):
                break
        assert dropped["unknown", "unknown-peer"] == 1, dropped
        assert dropped["unknown", "stranger"] >= 1
    finally:
        context.destroy(linger=0)


def test_an_address_that_is_taken_is_refused(coordinator, folder):
    keys = ServerKeys(load_pair(folder, COORDINATOR), {})
    with pytest.raises(ConfigurationError, match=r"cannot listen at .*Set control\.listen"):
        ZmqCoordinatorChannels(listen=Listen(coordinator.address, keys))


def test_a_ticket_for_another_host_needs_keys(coordinator):
    with pytest.raises(ConfigurationError, match="has no keys"):
        ZmqStageChannel(coordinator.ticket(PREFILL))


# -- ends --------------------------------------------------------------------------------------------------------------


def ends(coordinator):
    events, departures = [], []
    for _ in passes("a departure"):
        coordinator.wait(0.01)
        events += coordinator.receive()
        departures += coordinator.departures()
        if departures:
            break
    return events, departures


@pytest.mark.clause("C6.4")
def test_a_stage_that_says_its_last_word_has_left(coordinator, folder):
    stage = enter(coordinator, folder, "prefill-0")
    stage.send(Stop())
    stage.leave(0)
    stage.close()
    events, departures = ends(coordinator)
    assert [type(event) for event in events] == [Received, ChannelLost], "the word comes after everything else"
    assert [(d.peer, d.status) for d in departures] == [(PREFILL, 0)]


@pytest.mark.clause("C6.4")
def test_a_stage_that_goes_without_a_word_is_lost(coordinator, folder):
    enter(coordinator, folder, "prefill-0").close()
    events, departures = ends(coordinator)
    reason = "its connection ended, or it answered no heartbeat for 10 s"
    assert departures == [Departure(PREFILL, None, reason)]
    assert events == [ChannelLost(PREFILL, reason)]


@pytest.mark.clause("C1.4", "C6.4")
def test_a_stage_that_was_lost_joins_again_as_its_next_life_once_that_is_expected(coordinator, folder):
    enter(coordinator, folder, "prefill-0").close()
    ends(coordinator)
    with pytest.raises(ConfigurationError, match="prefill-0 has joined already and is over"):
        beside(coordinator, join, coordinator.address, "prefill-0", client(folder, "prefill-0"), within=30)
    again = PeerId("prefill-0", PREFILL.epoch + 1)
    coordinator.add(again)
    stage = enter(coordinator, folder, "prefill-0")
    try:
        stage.send(Stop())
        assert gather(coordinator, 1) == [Received(again, Stop())]
        coordinator.send(again, Cancel("0" * 32))
        assert gather(stage, 1) == [Cancel("0" * 32)]
    finally:
        stage.close()


@pytest.mark.clause("C6.6")
def test_a_stage_that_is_expelled_has_no_coordinator_any_more(coordinator, folder):
    stage = enter(coordinator, folder, "prefill-0")
    try:
        coordinator.expel(PREFILL, "given up")
        for _ in passes("the loss"):
            stage.wait(0.01)
            assert stage.receive() == []
            if stage.lost:
                break
        assert stage.lost == "given up"
    finally:
        stage.close()
