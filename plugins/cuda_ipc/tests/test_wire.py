"""The wire: greetings, order, bounds, deaths and endings, between wires of this process and of others."""

import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kvbaton.errors import ConnectError, PeerLost, ProtocolViolation, TransportError
from kvbaton.identity import PeerId
from kvbaton_cuda_ipc import library
from kvbaton_cuda_ipc.wire import MAX_WORD, Bulk, Down, Settings, Up, Wire, Word
from kvbaton_cuda_ipc.words import TOKEN_BITS, VERSION, Card, Hello

LOOPBACK = Settings()
BOUND = 20.0


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


class Ends:
    """Wires of this process, and what they have reported."""

    def __init__(self):
        self.wires = {}
        self.seen = {}

    def open(self, name, protocol="test/1"):
        wire = Wire(PeerId.start(name), protocol, LOOPBACK)
        self.wires[wire.me] = wire
        self.seen[wire.me] = []
        return wire

    def poll(self):
        for me, wire in self.wires.items():
            self.seen[me] += wire.poll()

    def until(self, condition, what):
        end = time.monotonic() + BOUND
        while not condition():
            assert time.monotonic() < end, f"{what}: {self.seen}"
            self.poll()

    def idle(self, passes=50):
        for _ in range(passes):
            self.poll()

    def of(self, wire, kind):
        return [event for event in self.seen[wire.me] if isinstance(event, kind)]

    def pair(self):
        a, b = self.open("a"), self.open("b")
        a.connect(b.me, b.card, b"from a")
        b.connect(a.me, a.card, b"from b")
        self.until(lambda: a.up(b.me) and b.up(a.me), "up")
        return a, b


@pytest.fixture
def ends():
    before = descriptors()
    opened = Ends()
    yield opened
    for wire in opened.wires.values():
        wire.close()
        wire.close()
    assert descriptors() == before


@contextmanager
def elsewhere(*behaviour):
    """A wire in a process of its own: ``(process, peer id, card)``."""
    process = subprocess.Popen(
        [sys.executable, "-P", str(Path(__file__).parent / "far_wire.py"), *behaviour],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        name, epoch, card = process.stdout.readline().split()
        yield process, PeerId(name, int(epoch)), bytes.fromhex(card)
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def introduce(process, wire, near=""):
    process.stdin.write(f"{wire.me.name} {wire.me.epoch} {wire.card.hex()} {near}\n")
    process.stdin.flush()


# -- greetings ---------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T2")
def test_both_are_up_and_have_what_the_other_says(ends):
    a, b = ends.pair()
    assert ends.of(a, Up) == [Up(b.me, b"from b")]
    assert ends.of(b, Up) == [Up(a.me, b"from a")]


@pytest.mark.clause("T2")
def test_who_is_named_later_has_been_heard(ends):
    a, b = ends.open("a"), ends.open("b")
    a.connect(b.me, b.card)
    ends.idle()
    assert not a.up(b.me)
    b.connect(a.me, a.card)
    ends.until(lambda: a.up(b.me) and b.up(a.me), "up")


@pytest.mark.clause("T2", "C1.4")
def test_an_older_epoch_of_us_is_not_greeted(ends):
    a, b = ends.open("a"), ends.open("b")
    a.connect(PeerId(b.me.name, b.me.epoch - 1), b.card)
    b.connect(a.me, a.card)
    ends.until(lambda: b.dropped, "the hello has come")
    ends.idle()
    assert not b.up(a.me)
    assert b.dropped == 1


@pytest.mark.clause("T2")
def test_another_protocol_and_no_card_are_refused(ends):
    a, b = ends.open("a"), ends.open("b", "other/7")
    with pytest.raises(ConnectError, match="'other/7', and this is 'test/1'"):
        a.connect(b.me, b.card)
    for damaged in (b"", b.card[:-1], b.card[:40] + bytes([b.card[40] ^ 1]) + b.card[41:], b"x" * 100_000):
        with pytest.raises(ConnectError, match="not ours"):
            a.connect(b.me, damaged)


@pytest.mark.clause("C9.3")
def test_a_card_or_hello_of_another_version_is_none_of_ours():
    with pytest.raises(ProtocolViolation, match="version 9"):
        Card.decode(Card(9, "p", b"a", 1, bytes(16)).encode())
    me = PeerId.start("a")
    with pytest.raises(ProtocolViolation, match="version 9"):
        Hello.decode(Hello(9, me, me, bytes(16), bytes(16), 1, b"").encode())
    assert Hello.decode(Hello(VERSION, me, me, bytes(16), bytes(16), 1, b"").encode()).me == me


@pytest.mark.clause("T2", "T7")
def test_who_is_not_there_is_down(ends):
    a, b = ends.open("a"), ends.open("b")
    card, peer = b.card, b.me
    ends.wires.pop(b.me).close()
    refused = False
    try:
        a.connect(peer, card)
    except ConnectError:  # where the system says at once that nobody listens
        refused = True
    ends.until(lambda: refused or ends.of(a, Down), "down")
    assert not a.up(peer)


# -- messages ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C9.4")
def test_words_of_all_lengths_keep_their_order(ends):
    a, b = ends.pair()
    lengths = [1, 7, 8000, 8191, 8192, 8193, 70_000, 3, MAX_WORD, 1, 1, 20_000]
    words = [secrets.token_bytes(length) for length in lengths]
    for word in words:
        a.send(b.me, word)
    b.send(a.me, b"back")
    ends.until(lambda: len(ends.of(b, Word)) == len(words) and ends.of(a, Word), "all words")
    assert [event.data for event in ends.of(b, Word)] == words
    assert ends.of(a, Word) == [Word(b.me, b"back")]
    ends.until(lambda: not a.unsent(b.me), "UCX has them")


@pytest.mark.clause("T6")
def test_words_that_cannot_be_sent_are_refused(ends):
    a, b = ends.pair()
    for word in (b"", bytes(MAX_WORD + 1)):
        with pytest.raises(TransportError, match="a word of"):
            a.send(b.me, word)
    with pytest.raises(PeerLost):
        a.send(PeerId.start("nobody"), b"word")


@pytest.mark.clause("T4")
def test_payloads_go_to_what_expects_them(ends):
    a, b = ends.pair()
    sizes = [5, 4096, 1 << 20, 8192, 8 << 20]
    payloads = [np.frombuffer(secrets.token_bytes(size), np.uint8) for size in sizes]
    places = [np.zeros(size, np.uint8) for size in sizes]
    for place in places:
        b.expect(a.me, place)
    sent = [a.send_bulk(b.me, payload) for payload in payloads]
    ends.until(lambda: len(ends.of(b, Bulk)) == len(sizes), "all payloads")
    ends.until(lambda: all(one.done for one in sent), "sent")
    for event, place, payload in zip(ends.of(b, Bulk), places, payloads, strict=True):
        assert event.memory is place
        assert (place == payload).all()


@pytest.mark.clause("C9.3", "T3")
@pytest.mark.parametrize("size", [100, 5000, 1 << 20])
def test_a_payload_of_another_length_lands_nowhere(ends, size):
    a, b = ends.pair()
    place = np.zeros(4096, np.uint8)
    b.expect(a.me, place)
    a.send_bulk(b.me, np.ones(size, np.uint8))
    ends.until(lambda: ends.of(b, Down), "down")
    assert "payload" in str(ends.of(b, Down)[0].error)
    assert not place.any()


@pytest.mark.clause("C9.3")
def test_a_payload_that_nobody_expects_ends_the_connection(ends):
    a, b = ends.pair()
    a.send_bulk(b.me, np.ones(1 << 20, np.uint8))
    ends.until(lambda: ends.of(b, Down), "down")


@pytest.mark.clause("C9.3")
def test_a_word_that_is_too_long_ends_the_connection(ends):
    a, b = ends.pair()
    theirs = a._links[b.me].theirs
    a._give(a._links[b.me], bytes(MAX_WORD + 1), (2 << TOKEN_BITS) | theirs)
    ends.until(lambda: ends.of(b, Down), "down")
    assert f"a word of {MAX_WORD + 1} bytes" in str(ends.of(b, Down)[0].error)


@pytest.mark.clause("C9.3", "T12")
def test_what_is_nobodys_is_thrown_away_and_disturbs_nothing(ends):
    a, b = ends.pair()
    link = a._links[b.me]
    for kind in range(4):
        for size in (1, 5000, 200_000):
            for _ in range(3):
                a._give(link, secrets.token_bytes(size), (kind << TOKEN_BITS) | secrets.randbits(TOKEN_BITS))
    a.send(b.me, b"word")
    ends.until(lambda: ends.of(b, Word) and b.dropped == 36, "word")
    ends.until(lambda: not a.unsent(b.me), "none of it is kept")
    assert ends.of(b, Word) == [Word(a.me, b"word")]
    assert not b._trash or ends.until(lambda: not b._trash, "none of it is kept") is None


@pytest.mark.clause("C9.3")
def test_hellos_of_strangers_are_bounded_and_refused(ends, monkeypatch):
    monkeypatch.setattr("kvbaton_cuda_ipc.wire.MAX_CALLERS", 5)
    a, b = ends.pair()
    link = a._links[b.me]
    lobby, secret = link.card.lobby, link.card.secret
    for number in range(20):
        stranger = Hello(VERSION, PeerId.start(f"s{number}"), b.me, secret, bytes(16), 1, b"").encode()
        a._give(link, stranger, (1 << TOKEN_BITS) | lobby)
        ends.idle(3)
    a._give(link, b"garbage", (1 << TOKEN_BITS) | lobby)
    a._give(link, Hello(VERSION, a.me, b.me, bytes(16), bytes(16), 1, b"").encode(), (1 << TOKEN_BITS) | lobby)
    a._give(link, Hello(VERSION, a.me, b.me, secret, bytes(16), 1, b"").encode(), (1 << TOKEN_BITS) | lobby)
    a.send(b.me, b"word")
    ends.until(lambda: ends.of(b, Word) and b.dropped >= 3, "word")
    assert len(b._hellos) == 5
    assert b._links[a.me].theirs == link.token


@pytest.mark.clause("C9.3")
def test_bytes_on_its_port_that_are_not_ucx_disturb_nothing(ends):
    a, b = ends.pair()
    ports = listening()
    assert ports
    strangers = []
    for port in ports:
        for words in (b"GET / HTTP/1.0\r\n\r\n", bytes(4096), secrets.token_bytes(4096), b"\xff" * 64):
            stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
            strangers.append(stranger)
            stranger.sendall(words)
            ends.idle(20)
    for stranger in strangers:
        stranger.close()
    ends.idle()
    a.send(b.me, b"word")
    ends.until(lambda: ends.of(b, Word), "word")


def listening():
    """Ports on which this process listens; all are of 127.0.0.1."""
    ours = {str(path.readlink())[8:-1] for path in Path("/proc/self/fd").iterdir() if _is_socket(path)}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    places = [row[1].split(":") for row in rows if row[3] == "0A" and row[9] in ours]
    assert {address for address, _ in places} == {"0100007F"}
    return [int(port, 16) for _, port in places]


def _is_socket(path):
    try:
        return str(path.readlink()).startswith("socket:")
    except OSError:
        return False


# -- ends of a connection ----------------------------------------------------------------------------------------------


@pytest.mark.clause("T7")
def test_who_leaves_is_understood_to_the_last_word(ends):
    a, b = ends.pair()
    big = secrets.token_bytes(MAX_WORD)
    a.send(b.me, big)
    a.send(b.me, b"bye")
    a.leave(b.me)
    ends.until(lambda: len(ends.of(b, Word)) == 2, "the last word")
    assert [event.data for event in ends.of(b, Word)] == [big, b"bye"]
    ends.until(lambda: not a._leaving and not a.pending(b.me), "it has left")
    assert not ends.of(a, Down)
    with pytest.raises(PeerLost):
        a.send(b.me, b"more")


@pytest.mark.clause("T7")
def test_who_closes_is_down_after_its_last_word(ends):
    a, b = ends.pair()
    b.send(a.me, b"last")
    ends.until(lambda: ends.of(a, Word), "word")
    ends.wires.pop(b.me).close()
    ends.until(lambda: ends.of(a, Down), "down")
    assert isinstance(ends.of(a, Down)[0].error, PeerLost)
    ends.idle()
    assert len(ends.of(a, Down)) == 1


@pytest.mark.clause("T7")
def test_a_killed_peer_is_down_with_nothing_under_way(ends):
    a = ends.open("a")
    with elsewhere("answer") as (process, peer, card):
        introduce(process, a)
        a.connect(peer, card)
        ends.until(lambda: a.up(peer), "up")
        a.send(peer, b"echo")
        ends.until(lambda: ends.of(a, Word), "an answer")
        process.kill()
        process.wait()
        killed = time.monotonic()
        ends.until(lambda: ends.of(a, Down), "down")
        assert time.monotonic() - killed < BOUND / 2
        assert a.dropped == 0


@pytest.mark.clause("T7", "T6")
def test_a_stopped_peer_holds_up_nobody_and_can_be_dropped(ends):
    a, b = ends.pair()
    with elsewhere("answer") as (process, peer, card):
        introduce(process, a)
        a.connect(peer, card)
        ends.until(lambda: a.up(peer), "up")
        process.send_signal(signal.SIGSTOP)
        payload = np.ones(32 << 20, np.uint8)
        sent = a.send_bulk(peer, payload)
        for number in range(100):
            a.send(peer, number.to_bytes(2) * 4000)
        ends.idle()
        assert a.unsent(peer)
        assert not sent.done
        a.send(b.me, b"word")
        ends.until(lambda: ends.of(b, Word), "word")
        started = time.monotonic()
        a.drop(peer)
        assert time.monotonic() - started < BOUND / 2
        process.send_signal(signal.SIGKILL)
        process.wait()
        ends.until(lambda: not a.pending(peer), "UCX has let go of it")
        assert sent.done
        assert not ends.of(a, Down)


@pytest.mark.clause("C6.4", "T7")
@pytest.mark.parametrize("end", ["dropped", "killed", "closed"])
def test_a_payload_that_stops_midway_is_pending_until_it_is_quiet(ends, end):
    """The sender stands still in the middle; nothing is written after ``pending`` says so."""
    a = ends.open("a")
    with elsewhere("payload") as (process, peer, card):
        introduce(process, a)
        a.connect(peer, card)
        ends.until(lambda: a.up(peer), "up")
        place = np.zeros(64 << 20, np.uint8)
        a.expect(peer, place)
        a.send(peer, b"go")
        ends.until(lambda: place[10_000], "it has begun")
        process.send_signal(signal.SIGSTOP)
        if end == "killed":
            process.kill()
            process.wait()
            ends.until(lambda: ends.of(a, Down), "down")
        else:
            a.drop(peer)
        if end == "closed":
            started = time.monotonic()
            a.close()
            assert time.monotonic() - started < BOUND / 2
        else:
            process.kill()
            process.wait()
            ends.until(lambda: not a.pending(peer), "quiet")
        assert not ends.of(a, Bulk)
        place[:] = 7
        ends.idle(200)
        assert (place == 7).all()


# -- waiting and cost --------------------------------------------------------------------------------------------------


@pytest.mark.clause("T12")
def test_waiting_ends_when_a_word_comes_and_costs_nothing_until_then(ends):
    a = ends.open("a")
    with elsewhere("answer") as (process, peer, card):
        introduce(process, a)
        a.connect(peer, card)
        ends.until(lambda: a.up(peer), "up")
        ends.idle()
        cpu, began = time.process_time(), time.monotonic()
        while time.monotonic() < began + 0.5:
            a.wait(0.1)
            ends.poll()
        assert time.process_time() - cpu < 0.25
        a.send(peer, b"later")  # answered after 0.2 seconds
        began = time.monotonic()
        while not ends.of(a, Word):
            assert time.monotonic() - began < BOUND
            a.wait(2 * BOUND)  # ended by the word
            ends.poll()
        assert time.monotonic() - began < BOUND


@pytest.mark.clause("T12")
def test_what_shows_on_no_descriptor_is_looked_at_soon_and_then_ever_more_rarely(ends, monkeypatch):
    """A copy between devices takes microseconds or milliseconds, and UCX cannot be armed while it is under way."""
    a, b = ends.pair()
    ends.idle()

    class Busy:
        def arm(self):
            return False

        def progress_once(self):
            return False

    pauses = []
    monkeypatch.setattr("kvbaton_cuda_ipc.wire.time.sleep", pauses.append)
    worker, a._worker = a._worker, Busy()
    for _ in range(12):
        a.wait(1.0)
    a.wait(0.0001)
    a._worker = worker
    assert pauses[0] <= 50e-6
    assert all(after <= 2 * before for before, after in itertools.pairwise(pauses))
    assert 0.0003 < pauses[-2] < 0.001
    assert sum(pauses[:-1]) > 0.002, "it does not spin"
    assert pauses[-1] == 0.0001, "no longer than it may"
    b.send(a.me, b"word")
    ends.until(lambda: ends.of(a, Word), "the word")
    a._worker = Busy()
    a.wait(1.0)
    a._worker = worker
    assert pauses[-1] == pauses[0], "something has come: the next may be as soon"


@pytest.mark.clause("T10")
def test_the_environment_is_what_it_was():
    before = dict(os.environ)
    wire = Wire(PeerId.start("a"), "test/1", LOOPBACK)
    wire.close()
    assert wire.poll() == []
    assert dict(os.environ) == before


@pytest.mark.clause("T13")
def test_another_copy_of_ucx_is_found(tmp_path):
    maps = tmp_path / "maps"
    ours = "/opt/libucx/lib/libucp.so.0.0.0"
    theirs = "/opt/nixl_cu13.libs/libucp-1a2b.so.0.0.0"
    maps.write_text(
        "".join(f"7f00-7f01 r-xp 00000000 fe:01 12 {path}\n" for path in (ours, theirs, "/lib/libucpp_not.txt"))
        + "7f02-7f03 rw-p 00000000 00:00 0\n"
    )
    assert library._foreign(maps, "/opt/libucx") == [theirs]
    assert library._foreign(tmp_path / "none", "/opt/libucx") == []
