"""What every kind of channel guarantees: the same tests in process, in process through the codec, and over ZeroMQ."""

import threading
import time

import pytest

from kvbaton.control import ChannelLost, Received
from kvbaton.control.inproc import InprocCoordinatorChannels
from kvbaton.errors import LocalProtocolError, MessageError
from kvbaton.identity import PeerId
from kvbaton.messages import Cancel, Output, Stop

A, B = PeerId("prefill-0", 7), PeerId("decode-0", 7)


@pytest.mark.clause("C9.4")
def test_both_directions_are_first_in_first_out_and_lossless(links):
    coordinator, stage = links.pair()
    sent = [links.message(number) for number in range(500)]
    for one in sent:
        coordinator.send(links.peer, one)
        stage.send(one)
    assert links.gather(coordinator, 500) == [Received(links.peer, one) for one in sent]
    assert links.gather(stage, 500) == sent
    assert coordinator.statistics().dropped == stage.statistics().dropped == {}
    assert coordinator.statistics().sent == stage.statistics().received == 500


@pytest.mark.clause("C9.4")
@pytest.mark.parametrize("then", ["send", "flush", "close"])
def test_what_is_held_goes_in_order_at_the_latest_with_what_follows(links, then):
    coordinator, stage = links.pair()
    for number in range(3):
        stage.hold(links.message(number))
    if then == "send":
        stage.send(links.message(3))
    elif then == "flush":
        stage.flush()
        stage.flush()
    else:
        stage.close()
    expected = 4 if then == "send" else 3
    events = links.gather(coordinator, expected)
    assert events[:expected] == [Received(links.peer, links.message(number)) for number in range(expected)]
    if then != "close":
        assert stage.statistics().sent == expected
        assert coordinator.statistics().dropped == {}


@pytest.mark.clause("C9.4")
def test_what_is_sent_before_the_stage_connects_waits_for_it(links):
    coordinator = links.coordinator()
    coordinator.add(links.peer)
    sent = [links.message(number) for number in range(50)]
    for one in sent:
        coordinator.send(links.peer, one)
    stage = links.stage(coordinator)
    found = []

    def arrived():
        coordinator.receive()  # over a socket, the coordinator sends once it has seen the greeting
        found.extend(stage.receive())
        return len(found) == len(sent)

    links.until(arrived, "the backlog")
    coordinator.send(links.peer, links.message(99))
    assert found + links.gather(stage, 1) == [*sent, links.message(99)]


def test_channels_do_not_mix(links):
    coordinator = links.coordinator()
    stages = {}
    for peer in (A, B):
        coordinator.add(peer)
        stages[peer] = links.stage(coordinator, peer)
    for number, (peer, stage) in enumerate(stages.items()):
        coordinator.send(peer, links.message(number))
        stage.send(links.message(10 + number))
    events = links.gather(coordinator, 2)
    assert sorted((event.peer, event.message.transfer) for event in events) == [
        (B, links.message(11).transfer),
        (A, links.message(10).transfer),
    ]
    assert links.gather(stages[A], 1) == [links.message(0)]
    assert links.gather(stages[B], 1) == [links.message(1)]


def test_receive_never_waits(links):
    coordinator, stage = links.pair()
    assert coordinator.receive() == []
    assert stage.receive() == []


@pytest.mark.parametrize("end", [0, 1])
def test_a_wake_from_another_thread_ends_a_wait(links, end):
    waiter = links.pair()[end]
    done = threading.Event()

    def wait():
        waiter.wait(60.0)
        done.set()

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        links.until(lambda: waiter.wake() or done.is_set(), "the end of the wait")
    finally:
        thread.join(10.0)


@pytest.mark.parametrize("end", [0, 1])
def test_a_wake_before_the_wait_counts_once(links, end):
    waiter = links.pair()[end]
    waiter.receive()
    waiter.wait(0.05)  # a greeting may be in
    waiter.receive()
    waiter.wake()
    begin = time.monotonic()
    waiter.wait(60.0)
    assert time.monotonic() - begin < 30.0
    waiter.wait(0.0005)  # shorter than a millisecond, and it ends


@pytest.mark.clause("C9.4")
def test_a_stage_that_closes_is_lost_once_and_after_its_last_message(links):
    coordinator, stage = links.pair()
    for number in range(20):
        stage.send(links.message(number))
    stage.close()
    events = links.gather(coordinator, 21)
    assert events[:20] == [Received(links.peer, links.message(number)) for number in range(20)]
    assert isinstance(events[20], ChannelLost)
    assert events[20].peer == links.peer
    coordinator.wait(0.01)
    assert coordinator.receive() == []


def test_what_is_sent_to_a_gone_peer_is_dropped_and_counted(links):
    coordinator, stage = links.pair()
    coordinator.send(PeerId("nobody", 1), Stop())
    stage.send(links.message(1))
    stage.close()
    links.gather(coordinator, 2)
    coordinator.send(links.peer, links.message(2))
    assert coordinator.statistics().dropped == {("peer", "gone-peer"): 1, ("transfer", "gone-peer"): 1}


@pytest.mark.clause("C6.6")
def test_a_coordinator_that_closes_is_seen_by_its_stages(links):
    coordinator, stage = links.pair()
    coordinator.send(links.peer, links.message(1))
    links.until(lambda: coordinator.receive() or stage.receive(), "the connection")
    coordinator.close()
    links.until(lambda: stage.wait(1.0) or stage.receive() or stage.lost, "the loss")
    stage.send(links.message(2))
    assert stage.statistics().dropped == {("transfer", "gone-peer"): 1}
    begin = time.monotonic()
    for _ in range(20):
        stage.wait(0.02)
    assert time.monotonic() - begin > 0.2, "a lost channel must not make its owner spin"


def test_a_severed_channel_keeps_its_first_reason_and_wakes(links):
    _, stage = links.pair()
    stage.sever("the coordinator's process is gone")
    stage.sever("something else")
    begin = time.monotonic()
    stage.wait(60.0)
    assert time.monotonic() - begin < 30.0
    assert stage.lost == "the coordinator's process is gone"


@pytest.mark.clause("C1.4")
def test_a_name_comes_back_only_with_a_newer_epoch(links):
    coordinator = links.coordinator()
    coordinator.add(PeerId("decode-0", 5))
    for epoch in (5, 4):
        with pytest.raises(LocalProtocolError, match=r"C1\.4"):
            coordinator.add(PeerId("decode-0", epoch))
    coordinator.remove(PeerId("decode-0", 5))
    with pytest.raises(LocalProtocolError, match=r"C1\.4"):
        coordinator.add(PeerId("decode-0", 5))
    coordinator.add(PeerId("decode-0", 6))


def test_a_removed_peer_is_not_heard_any_more(links):
    coordinator, stage = links.pair()
    stage.send(links.message(1))
    links.gather(coordinator, 1)
    coordinator.remove(links.peer)
    coordinator.remove(links.peer)
    before = stage.statistics().sent
    stage.send(links.message(2))
    stage.close()
    coordinator.wait(0.05)
    assert coordinator.receive() == []
    dropped = sum(coordinator.statistics().dropped.values())
    assert dropped == stage.statistics().sent - before  # nothing at all where the stage was told at once


@pytest.mark.clause("C9.3")
def test_a_message_beyond_the_limit_is_not_sent(links):
    if links.kind == "inproc":
        coordinator, stage = links.pair()  # nothing is encoded, so there is nothing to measure
        stage.send(Output("0" * 32, 0, tuple(range(5000))))
        assert len(links.gather(coordinator, 1)) == 1
        return
    coordinator, stage = links.pair(max_message=1000)
    large = Output("0" * 32, 0, tuple(range(5000)))
    with pytest.raises(MessageError, match=r"C9\.3.*control\.max_message"):
        stage.send(large)
    with pytest.raises(MessageError, match=r"C9\.3"):
        coordinator.send(links.peer, large)
    stage.send(links.message(1))
    coordinator.send(links.peer, links.message(2))
    assert links.gather(coordinator, 1) == [Received(links.peer, links.message(1))]  # the numbers have no gap
    assert links.gather(stage, 1) == [links.message(2)]


def test_closing_twice_and_using_what_is_closed_is_harmless(links):
    coordinator, stage = links.pair()
    for end in (stage, coordinator):
        end.close()
        end.close()
        end.wake()
        end.wait(60.0)
        assert end.receive() == []
    stage.send(Stop())
    stage.sever("late")
    coordinator.send(links.peer, Stop())
    coordinator.remove(links.peer)
    with pytest.raises(LocalProtocolError, match="closed"):
        coordinator.add(PeerId("late", 1))


@pytest.mark.clause("C9.4")
def test_both_ends_on_threads_of_their_own_lose_nothing(links):
    coordinator, stage = links.pair()
    count = 2000

    def echo():
        answered = 0
        while answered < count and stage.lost is None:
            stage.wait(1.0)
            for one in stage.receive():
                stage.send(one)
                answered += 1

    thread = threading.Thread(target=echo)
    thread.start()
    events = []
    for number in range(count):
        coordinator.send(links.peer, links.message(number))
        if number % 7 == 0:
            events += coordinator.receive()
    try:
        events += links.gather(coordinator, count - len(events), seconds=30.0)
    finally:
        stage.sever("the test is over")
        thread.join(10.0)
    assert events == [Received(links.peer, links.message(number)) for number in range(count)]


# -- who says very much at once ----------------------------------------------------------------------------------------

#: Envelopes of one peer that one pass takes, in these tests.
A_FEW = 7


def takes(monkeypatch, count):
    for module in ("inproc", "zmq"):
        monkeypatch.setattr(f"kvbaton.control.{module}.ENVELOPES_PER_PASS", count)


@pytest.fixture(params=[True, False], ids=["one-message", "several"])
def says(monkeypatch, request):
    """In one breath: a stage of this release sends that in several messages, another one might not."""

    def says(stage, messages):
        for one in messages:
            stage.hold(one)
        if request.param:
            takes(monkeypatch, len(messages))
        stage.flush()
        takes(monkeypatch, A_FEW)

    takes(monkeypatch, A_FEW)
    return says


def something_has_come(links, coordinator):
    if links.kind == "zmq":
        links.until(lambda: coordinator._wire.socket.poll(0), "a message")
        coordinator._wire._frames.quiet = False  # to look has told the socket's descriptor that it is known


@pytest.mark.clause("C9.4", "T12")
def test_of_who_says_very_much_at_once_a_pass_hears_some_in_order(links, says):
    coordinator = links.coordinator()
    coordinator.add(A)
    stage = links.stage(coordinator, A)
    said = [links.message(number) for number in range(50)]
    says(stage, said[:45])
    says(stage, said[45:47])
    says(stage, said[47:])
    heard, more = [], 0
    for _ in range(200):
        coordinator.wait(20.0)  # it ends by what is waiting
        some = coordinator.receive()
        assert len(some) < 2 * A_FEW
        heard += some
        more += coordinator.unheard(A)
        if len(heard) == len(said):
            break
    assert heard == [Received(A, one) for one in said]
    assert more
    assert coordinator.receive() == []
    assert not coordinator.unheard(A)
    stage.send(links.message(100))
    assert links.gather(coordinator, 1) == [Received(A, links.message(100))]
    assert coordinator.statistics().dropped == {}


@pytest.mark.clause("C9.4", "T12")
@pytest.mark.parametrize("codec", [False, True])
def test_another_ones_word_is_heard_between(monkeypatch, codec):
    takes(monkeypatch, A_FEW)
    coordinator = InprocCoordinatorChannels(through_codec=codec)
    for peer in (A, B):
        coordinator.add(peer)
    much, little = coordinator.connect(A), coordinator.connect(B)
    for number in range(50):
        much.send(Cancel(f"{number:032x}"))
    little.send(Cancel("9" * 32))
    events = coordinator.receive()
    assert events == [
        *(Received(A, Cancel(f"{number:032x}")) for number in range(A_FEW)),
        Received(B, Cancel("9" * 32)),
    ]
    assert coordinator.unheard(A)
    assert not coordinator.unheard(B)
    little.send(Cancel("8" * 32))
    assert Received(B, Cancel("8" * 32)) in coordinator.receive()
    coordinator.close()


@pytest.mark.clause("C9.4", "C6.3")
def test_a_loss_comes_behind_all_that_was_said_however_much(links, says):
    coordinator, stage = links.pair()
    said = [links.message(number) for number in range(50)]
    says(stage, said)
    stage.close()
    *heard, end = links.gather(coordinator, 51)
    assert heard == [Received(links.peer, one) for one in said]
    assert isinstance(end, ChannelLost)
    assert coordinator.receive() == []


@pytest.mark.clause("C1.2", "C9.4")
def test_of_one_that_is_forgotten_nothing_more_is_heard(links, says):
    coordinator, stage = links.pair()
    says(stage, [links.message(number) for number in range(50)])
    while not coordinator.unheard(links.peer):
        something_has_come(links, coordinator)
        coordinator.receive()
    coordinator.remove(links.peer)
    assert not coordinator.unheard(links.peer)
    for _ in range(10):
        assert coordinator.receive() == []


@pytest.mark.clause("C6.3", "C9.4")
def test_of_one_that_is_lost_nothing_is_unheard_however_much_others_say(links, says):
    """Or its end would wait for them, and all that is known of it would be the loss."""
    coordinator = links.coordinator()
    for peer in (A, B):
        coordinator.add(peer)
    links.stage(coordinator, A).close()
    (lost,) = links.gather(coordinator, 1)
    assert isinstance(lost, ChannelLost)
    says(links.stage(coordinator, B), [links.message(number) for number in range(50)])
    while not coordinator.unheard(B):
        something_has_come(links, coordinator)
        coordinator.receive()
    assert not coordinator.unheard(A)
    assert len(links.gather(coordinator, 1)) >= 1
