"""A lane: whole frames in order, however the system cuts them; it never waits, and its end comes last."""

import os
import random
import time

import pytest

from kvbaton.control import ChannelLost, Received
from kvbaton.control.lane import Lane, lane_pair
from kvbaton.control.zmq import ZmqStageChannel
from kvbaton.errors import LocalProtocolError
from kvbaton.identity import PeerId
from kvbaton.messages import Output, Stop

LONGEST = 8 << 20


@pytest.fixture
def lanes():
    made = tuple(Lane(end, LONGEST) for end in lane_pair())
    yield made
    for one in made:
        one.close()


def exchange(sender: Lane, receiver: Lane, count: int) -> list[bytes]:
    """``count`` frames, both ends doing in turn what their owners do."""
    found = []
    deadline = time.monotonic() + 10
    while len(found) < count:
        assert time.monotonic() < deadline, f"{len(found)} of {count}"
        assert sender.flush()
        found += receiver.receive()
    return found


@pytest.mark.clause("C9.4")
@pytest.mark.parametrize("sizes", [[0, 1, 3, 4, 5], [65531, 65532, 65533, 131072], [3 << 20, 7, LONGEST, 1]])
def test_frames_arrive_whole_and_in_order(lanes, sizes):
    ours, theirs = lanes
    sent = [bytes([number % 251]) * size for number, size in enumerate(sizes)]
    for one in sent:
        assert ours.send(one)
    assert exchange(ours, theirs, len(sent)) == sent
    assert not ours.unsent


@pytest.mark.clause("C9.4")
def test_what_the_other_end_has_no_room_for_waits_and_follows_in_order(lanes):
    ours, theirs = lanes
    draw = random.Random(5)
    sent = [number.to_bytes(4, "little") * draw.choice([1, 10, 1000]) for number in range(40_000)]
    began = time.monotonic()
    for one in sent:
        assert ours.send(one)
    assert ours.unsent
    assert time.monotonic() - began < 10
    assert exchange(ours, theirs, len(sent)) == sent


def test_an_end_that_closed_is_seen_after_all_that_it_sent(lanes):
    ours, theirs = lanes
    assert theirs.send(b"left unread")
    for number in range(100):
        assert ours.send(b"%d" % number)
    ours.close()
    found = []
    while not theirs.ended:
        found += theirs.receive()
    assert found == [b"%d" % number for number in range(100)]
    assert theirs.receive() == []
    assert not theirs.send(b"nobody")


def test_closing_gives_what_waits_for_room_its_time_and_no_more(lanes):
    ours, _ = lanes
    for _ in range(50):
        ours.send(bytes(1 << 20))  # more than any system lets one socket hold
    assert ours.unsent
    began = time.monotonic()
    ours.close(linger=0.05)
    assert time.monotonic() - began < 5


@pytest.mark.clause("C9.3")
def test_who_announces_more_than_the_longest_frame_is_not_heard_any_more():
    end, theirs = lane_pair()
    theirs.sendall(b"\x02\0\0\0ok" + (LONGEST + 1).to_bytes(4, "little") + b"rubbish")
    lane = Lane(end, LONGEST)
    try:
        assert lane.receive() == [b"ok"]
        assert lane.ended
        assert lane.receive() == []
    finally:
        lane.close()
        theirs.close()


# -- as the channel of a process ---------------------------------------------------------------------------------------


@pytest.fixture
def laned(lane_links):
    coordinator = lane_links.coordinator(heartbeat=0.4)
    coordinator.add(lane_links.peer)
    return lane_links, coordinator


def forked(coordinator, peer, body) -> int:
    """A process that is the stage, and has nothing else of ours."""
    end = coordinator.lanes.pop(peer)
    ticket = coordinator.ticket(peer)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            for entry in tuple(coordinator._laned.values()):
                os.close(entry.lane.fileno())
            body(ZmqStageChannel(ticket, lane=end))
            status = 0
        finally:
            os._exit(status)
    end.close()
    return pid


@pytest.mark.clause("C9.4")
def test_the_last_words_of_a_process_that_dies_come_before_its_end(laned):
    links, coordinator = laned

    def body(stage):
        for number in range(50):
            stage.send(links.message(number))
        os._exit(0)  # nothing is closed in order

    pid = forked(coordinator, links.peer, body)
    events = links.gather(coordinator, 51)
    os.waitpid(pid, 0)
    assert events[:50] == [Received(links.peer, links.message(number)) for number in range(50)]
    assert events[50:] == [ChannelLost(links.peer, "its connection ended")]


@pytest.mark.clause("C6.4")
def test_a_stopped_process_is_lost_by_its_heartbeat_and_what_it_said_is_heard(laned):
    links, coordinator = laned

    def body(stage):
        stage.send(Stop())
        while not stage.receive():
            stage.wait(10.0)
        stage.send(links.message(1))
        os.kill(os.getpid(), 19)

    pid = forked(coordinator, links.peer, body)
    try:
        assert links.gather(coordinator, 1) == [Received(links.peer, Stop())]
        # the greeting has its own way: until it is here there is no heartbeat for this stage
        links.until(lambda: coordinator.receive() or coordinator._behind, "the greeting")
        coordinator.send(links.peer, Stop())
        assert links.gather(coordinator, 2) == [
            Received(links.peer, links.message(1)),
            ChannelLost(links.peer, "its connection ended"),
        ]
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


@pytest.mark.clause("C9.4")
def test_more_than_the_lane_holds_goes_on_once_there_is_room_again(laned):
    links, coordinator = laned
    stage = links.stage(coordinator)
    sent = [Output(f"{number:032x}", 0, tuple(range(number % 97))) for number in range(5000)]
    for one in sent:
        coordinator.send(links.peer, one)
        stage.send(one)
    heard, told = [], []
    deadline = time.monotonic() + 10
    while len(heard) < len(sent) or len(told) < len(sent):
        assert time.monotonic() < deadline
        coordinator.wait(1.0)
        heard += coordinator.receive()
        stage.wait(1.0)
        told += stage.receive()
    assert told == sent
    assert heard == [Received(links.peer, one) for one in sent]


def test_a_lane_is_made_once_and_before_the_first_word(laned):
    links, coordinator = laned
    with pytest.raises(LocalProtocolError, match="lane"):
        coordinator.lane(links.peer)
    late = PeerId("late", 1)
    super(type(coordinator), coordinator).add(late)
    coordinator.send(late, Stop())
    with pytest.raises(LocalProtocolError, match="lane"):
        coordinator.lane(late)


@pytest.mark.clause("C9.3", "C9.4")
def test_rubbish_on_a_lane_is_refused_and_a_gap_ends_the_channel(laned):
    links, coordinator = laned
    lane = Lane(coordinator.lanes.pop(links.peer), LONGEST)
    try:
        lane.send(b"rubbish")
        links.until(lambda: coordinator.receive() or coordinator.statistics().dropped, "the refusal")
        assert coordinator.statistics().dropped == {("unknown", "malformed"): 1}
        lane.send(bytes(coordinator._max_message * 5))  # far beyond the limit
        lane.flush()
        assert links.gather(coordinator, 1) == [ChannelLost(links.peer, "its connection ended")]
    finally:
        lane.close()
