"""A pickle on a control socket is bytes like any other: dropped as malformed, counted, and never run (C9.3)."""

import contextlib
import pickle

import msgspec
import pytest
import zmq

from kvbaton.control import Received
from kvbaton.control.zmq import Ticket, ZmqCoordinatorChannels, ZmqStageChannel
from kvbaton.identity import PeerId
from kvbaton.messages import VERSION, Stop, encode, envelope

PEER = PeerId("decode-0", 1000)
GREETING = b"kvbaton/" + str(VERSION).encode()


class Bomb:
    """Whoever unpickles this makes a folder."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        import os

        return os.mkdir, (str(self.path),)


@pytest.fixture
def bombs(tmp_path):
    """(what went off, the bytes): in every protocol of pickle, bare and where a message has its fields."""
    crater = tmp_path / "crater"
    bare = [pickle.dumps(Bomb(crater), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    for bomb in bare:  # they are live
        pickle.loads(bomb)  # noqa: S301  our own, to prove that it works
        crater.rmdir()
    fields = {"version": VERSION, "family": "control", "epoch": PEER.epoch, "seq": 1}
    wrapped = [msgspec.msgpack.encode({**fields, "body": bomb}) for bomb in bare]
    extension = [msgspec.msgpack.encode(msgspec.msgpack.Ext(1, bomb)) for bomb in bare]
    yield crater, [*bare, *wrapped, *extension]
    assert not crater.exists(), "the bomb went off"


@contextlib.contextmanager
def raw(kind):
    context = zmq.Context()
    made = context.socket(kind)
    made.linger = 500
    try:
        yield made
    finally:
        made.close()
        context.term()


def turn_until(end, condition):
    """What ``end`` receives until ``condition`` holds; bounded."""
    found = []
    for _ in range(200):
        found += end.receive()
        if condition(found):
            return found
        end.wait(0.05)
    raise AssertionError(f"not within its bound: {found}, {end.statistics()}")


@pytest.mark.clause("C9.3")
def test_a_pickle_bomb_on_the_coordinators_socket_is_malformed(short_tmp, bombs):
    _, frames = bombs
    coordinator = ZmqCoordinatorChannels(directory=short_tmp)
    try:
        coordinator.add(PEER)
        with raw(zmq.DEALER) as dealer:
            dealer.routing_id = b"decode-0@3e8"
            dealer.connect(coordinator.ticket(PEER).address)
            for frame in (GREETING, *frames, encode(envelope(PEER.epoch, 1, Stop()))):
                dealer.send(frame)
            events = turn_until(coordinator, bool)
        assert events == [Received(PEER, Stop())], "the channel goes on"
        assert coordinator.statistics().dropped == {("unknown", "malformed"): len(frames)}
    finally:
        coordinator.close()


@pytest.mark.clause("C9.3")
def test_a_pickle_bomb_of_a_stranger_is_counted_and_not_looked_at(short_tmp, bombs):
    _, frames = bombs
    coordinator = ZmqCoordinatorChannels(directory=short_tmp)
    try:
        coordinator.add(PEER)
        with raw(zmq.DEALER) as dealer:
            dealer.routing_id = b"who"
            dealer.connect(coordinator.ticket(PEER).address)
            for frame in frames:
                dealer.send(frame)
            events = turn_until(coordinator, lambda _: sum(coordinator.statistics().dropped.values()) == len(frames))
        assert events == []
    finally:
        coordinator.close()


@pytest.mark.clause("C9.3")
def test_a_pickle_bomb_on_a_stages_socket_is_malformed(short_tmp, bombs):
    _, frames = bombs
    path = short_tmp / "control"
    with raw(zmq.ROUTER) as router:
        router.bind(f"ipc://{path}")
        stage = ZmqStageChannel(Ticket(address=f"ipc://{path}", peer=PEER, coordinator_epoch=77, max_message=65536))
        try:
            routing_id, greeting = router.recv_multipart()
            assert greeting == GREETING
            for frame in (*frames, encode(envelope(77, 1, Stop()))):
                router.send_multipart([routing_id, frame])
            assert turn_until(stage, bool) == [Stop()], "the channel goes on"
            assert stage.statistics().dropped == {("unknown", "malformed"): len(frames)}
            assert stage.lost is None
        finally:
            stage.close()
    path.unlink()
