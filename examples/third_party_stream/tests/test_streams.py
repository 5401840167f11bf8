"""What is special about streams: bytes are under way for a while, arrive in pieces, and can be anything."""

import contextlib
import random
import socket
import time

import msgspec
import pytest

from kvbaton.connector import Chunk, ConnectorContext, MemoryRegion, Need, Outcome
from kvbaton.errors import ProtocolViolation, RegistrationError
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments
from kvbaton_conformance.harness import PATIENCE, open_end, open_pair, segments
from kvbaton_conformance.subject import Reference, resolve
from kvbaton_conformance.two_process import Processes, remote_pair
from kvbaton_example_stream import connector as connector_module
from kvbaton_example_stream import plugin
from kvbaton_example_stream.frames import HEAD, Announced, Hello, Result, read_body
from kvbaton_example_stream.grants import Grant

#: More than sockets take at once, so that a chunk is under way for some passes.
LARGE = 24 << 20


@pytest.fixture(params=["unix", "tcp"])
def family(request):
    return request.param


@pytest.fixture
def pair(family):
    with open_pair(plugin, {"family": family}) as pair:
        yield pair


def works(pair):
    sent = pair.send(segments((0, 0, 256)), segments((1, 0, 256)))
    pair.pump_until(lambda: sent.received and sent.done, "T3: a chunk arrives")
    pair.target.memory.check(sent.expected)
    return True


# -- revocation and disconnection in the middle of a chunk -------------------------------------------------------------


def under_way(pair):
    """A large chunk, of which a part has been written at the target."""
    whole = segments((0, 0, LARGE))
    before = pair.target.memory.read(segments((0, 0, 4096)))
    sent = pair.send(whole, whole)
    pair.pump_until(lambda: pair.target.memory.read(segments((0, 0, 4096))) != before, "T3: the first bytes arrive")
    assert not sent.received
    return sent


def is_frozen_and_revoked(pair, freeze, thaw):
    """The target takes its memory back while the sender is frozen, and uses it; what the sender goes on to send goes
    nowhere."""
    sent = under_way(pair)
    freeze()
    assert pair.target.guard.revoke(sent.chunk.transfer)
    pair.target.memory.poison()
    reused = pair.target.memory.image()
    thaw()
    pair.pump_until(lambda: sent.over, "T5: the chunk ends")
    pair.pump_idle()
    assert [(c.outcome, c.terminal) for c in sent.completions] == [(Outcome.FAILED, True)]
    assert "not any more" in str(sent.completions[0].error)
    assert not sent.received
    pair.target.memory.untouched(reused, "C5.2")
    pair.target.guard.forget(sent.chunk.transfer)
    return True


@pytest.mark.clause("C5.2", "T5")
def test_late_bytes_of_a_frozen_sender_go_nowhere_after_revoke(family):
    with open_pair(plugin, {"family": family}, regions={0: LARGE, 1: 4096}) as pair:
        assert is_frozen_and_revoked(pair, lambda: pair.clog(pair.source), pair.unclog)
        assert works(pair)


@pytest.mark.clause("C5.2", "T5")
def test_late_bytes_of_a_stopped_process_go_nowhere_after_revoke(family):
    subject = resolve("example_stream", {"family": family}, Reference("example_stream"), "example_stream")
    processes = Processes()
    with remote_pair(processes, subject, regions={0: LARGE, 1: 4096}) as pair:
        assert is_frozen_and_revoked(pair, pair.source.hang, pair.source.resume)
        assert works(pair)
    assert not processes.close()


@pytest.mark.clause("C6.4", "T5")
def test_a_disconnect_in_the_middle_of_a_chunk_is_quiet_at_once_without_the_sender(family):
    with open_pair(plugin, {"family": family}, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        pair.target.guard.disconnect(pair.source.peer)
        pair.target.pump()
        assert pair.target.told_quiet(pair.source.peer)
        pair.target.memory.poison()
        reused = pair.target.memory.image()
        pair.pump_until(lambda: sent.over and pair.source.told_quiet(pair.target.peer), "T5: the chunk ends")
        assert [(c.outcome, c.terminal) for c in sent.completions] == [(Outcome.FAILED, True)]
        pair.target.memory.untouched(reused, "C6.4")


@pytest.mark.clause("C6.4", "T5")
def test_a_source_that_disconnects_finishes_what_it_has_started(family):
    with open_pair(plugin, {"family": family}, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        waiting = pair.send(segments((1, 0, 64)), segments((1, 0, 64)))
        pair.source.guard.disconnect(pair.target.peer)
        pair.source.pump()
        assert [c.outcome for c in waiting.completions] == [Outcome.CANCELLED]
        assert not pair.source.told_quiet(pair.target.peer)
        pair.pump_until(lambda: pair.source.told_quiet(pair.target.peer), "C6.4: quiet when it has drained")
        assert sent.done
        assert sent.received
        pair.pump_until(lambda: pair.target.told_quiet(pair.source.peer), "C6.4: and so is the target")
        assert not waiting.received


@pytest.mark.clause("C6.4", "T5")
def test_while_a_disconnect_waits_for_our_own_chunk_nothing_of_the_peer_lands(family):
    """Both send: what has started at the disconnected peer, and what it has queued, is refused."""
    with open_pair(plugin, {"family": family}, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        queued = pair.send(segments((1, 0, 64)), segments((1, 0, 64)))
        back, row = new_transfer_id(), segments((1, 512, 64))
        pair.source.guard.grant(back, pair.target.peer, row)
        assert pair.target.guard.submit(Chunk(back, 0, pair.source.peer, row, row, 64))
        pair.target.pump()  # it has started, and the source does not answer yet
        pair.target.guard.disconnect(pair.source.peer)
        pair.target.memory.poison()
        reused = pair.target.memory.image()
        pair.pump_until(lambda: sent.over and queued.over and bool(pair.target.completions), "T5: all chunks end")
        assert [c.outcome for c in (*sent.completions, *queued.completions)] == [Outcome.FAILED] * 2
        assert [c.outcome for c in pair.target.completions] == [Outcome.DONE]
        pair.pump_until(lambda: pair.target.told_quiet(pair.source.peer), "C6.4: quiet")
        assert not sent.received
        assert not queued.received
        pair.target.memory.untouched(reused, "C6.4")


@pytest.mark.clause("C1.4", "T2")
def test_a_new_epoch_ends_the_connection_to_the_old_one(pair, family):
    old, connector = pair.source, pair.target.connector
    new = open_end(plugin, plugin.Options(family=family), PeerId.start(old.peer.name))
    connector.connect(new.guard.endpoint())
    called = connector._links[new.peer]
    connector.connect(new.guard.endpoint())
    assert connector._links[new.peer] is called  # twice is once
    pair.pump_until(lambda: old.told_quiet(pair.target.peer), "C1.4: the old epoch hears it")
    new.guard.close()


@pytest.mark.clause("T9")
def test_a_started_chunk_cannot_be_cancelled_and_waiting_ones_are(family):
    with open_pair(plugin, {"family": family}, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        row = segments((1, 0, 64))
        late = Chunk(sent.chunk.transfer, 1, pair.target.peer, row, row, 64)
        assert pair.source.guard.submit(late)
        pair.source.guard.cancel(sent.chunk.transfer)
        pair.pump_until(lambda: sent.over)
        assert {c.sequence: c.outcome for c in pair.source.completions} == {0: Outcome.DONE, 1: Outcome.CANCELLED}


@pytest.mark.clause("T7", "T5")
def test_a_peer_that_closes_with_bytes_unread_is_the_end_of_its_stream(family):
    """The kernel calls it a reset, not an end.  It proves the same: who has closed reads, and writes, no more."""
    with open_pair(plugin, {"family": family}, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        for _ in range(5):
            pair.source.pump()  # the target has not read all of this
        pair.target.guard.close()
        pair.pump_until(lambda: sent.over, "T5: the chunk ends")
        assert [(c.outcome, c.terminal) for c in sent.completions] == [(Outcome.FAILED, True)]
        assert pair.source.told_quiet(pair.target.peer)
        assert not pair.source.faults


@pytest.mark.clause("T6")
def test_the_queue_is_as_long_as_its_option_says_and_full_is_not_lost(family):
    with open_pair(plugin, {"family": family, "queue_limit": 3}) as pair:
        row = segments((0, 0, 64))
        transfer = pair.grant(row)
        chunks = [Chunk(transfer, number, pair.target.peer, row, row, 64) for number in range(5)]
        assert [pair.source.connector.submit(chunk) for chunk in chunks] == [True] * 3 + [False] * 2
        assert pair.source.connector.outstanding() == 3
        pair.pump_until(lambda: len(pair.target.receipts) == 3 and not pair.source.connector.outstanding())
        assert all(pair.source.connector.submit(chunk) for chunk in chunks[3:])
        pair.pump_until(lambda: len(pair.target.receipts) == 5, "T6: what was refused can be offered again")


# -- grants ------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C2.2", "C5.2")
@pytest.mark.parametrize("row", [(0, 90, 20), (0, 0, 64), (0, 399, 2), (1, 150, 8), (0, 350, 100), (0, 4096, 1)])
def test_a_write_beyond_the_grant_is_refused(pair, row):
    """The grant is ``[100, 400)`` of region 0, in two pieces."""
    before = pair.target.memory.image()
    transfer = pair.grant(segments((0, 250, 150), (0, 100, 150)))
    read = segments((0, 0, row[2]))
    assert pair.source.guard.submit(Chunk(transfer, 0, pair.target.peer, read, segments(row), row[2]))
    pair.pump_until(lambda: bool(pair.source.completions), "T5: it ends")
    assert [(c.outcome, c.terminal) for c in pair.source.completions] == [(Outcome.FAILED, True)]
    pair.target.memory.untouched(before, "C2.2")
    inside = segments((0, 200, 100))
    assert pair.source.guard.submit(Chunk(transfer, 1, pair.target.peer, segments((0, 0, 100)), inside, 100))
    pair.pump_until(lambda: len(pair.target.receipts) == 1, "T3: what is granted arrives")


def test_grants_against_a_reading_byte_by_byte():
    draw = random.Random(7)
    for _ in range(300):
        cuts = sorted(draw.sample(range(64), 8))
        granted = [(draw.randrange(3), start, end - start) for start, end in zip(cuts[::2], cuts[1::2], strict=True)]
        draw.shuffle(granted)
        allowed = {(region, at + byte) for region, at, length in granted for byte in range(length)}
        grant = Grant(PeerId("p", 1), Segments.of(granted))
        for _ in range(20):
            asked = [(draw.randrange(3), draw.randrange(60), draw.randint(1, 6)) for _ in range(draw.randint(1, 2))]
            wanted = {(region, at + byte) for region, at, length in asked for byte in range(length)}
            # neighbouring pieces of different grants are one run only where they are in one region
            assert grant.covers(Segments.of(asked)) == (wanted <= allowed), (granted, asked)


@pytest.mark.clause("C1.4", "C5.2")
def test_a_grant_is_to_one_peer(pair, family):
    other = open_end(plugin, plugin.Options(family=family), PeerId.start("prefill-1"))
    pair.source.guard.disconnect(pair.target.peer)
    row = segments((0, 0, 64))
    transfer = pair.grant(row)
    before = pair.target.memory.image()
    pair.source = other
    pair.order = (other, pair.target)
    pair.connect()
    assert other.guard.submit(Chunk(transfer, 0, pair.target.peer, row, row, 64))
    pair.pump_until(lambda: bool(other.completions), "T5: it ends")
    assert other.completions[0].outcome is Outcome.FAILED
    pair.target.memory.untouched(before)
    other.guard.close()


# -- bytes by hand -----------------------------------------------------------------------------------------------------


class ByHand:
    """A peer that is a socket and no more."""

    def __init__(self, end, me=None, **false):
        self.me = me or PeerId.start("by-hand")
        self.end = end
        address = msgspec.msgpack.decode(end.guard.endpoint().metadata)
        at = address["at"]
        self.socket = socket.socket(socket.AF_UNIX if isinstance(at, str) else socket.AF_INET)
        self.socket.settimeout(PATIENCE)
        self.socket.connect(at if isinstance(at, str) else ("127.0.0.1", at))
        self.hello = Hello(**({"me": self.me, "you": end.peer, "secret": address["secret"]} | false)).frame()

    def send(self, *parts):
        for part in parts:
            self.socket.sendall(part)
        return self

    def closed(self):
        """Whether the other end has closed, what it has said before aside."""
        self.socket.setblocking(False)
        try:
            while self.socket.recv(65536):
                pass
        except BlockingIOError:
            return False
        except ConnectionResetError:
            pass
        self.socket.close()
        return True


KEY = (new_transfer_id(), 0)


@pytest.mark.clause("T2", "C9.3", "C1.4")
@pytest.mark.parametrize(
    ("said", "false"),
    [
        pytest.param(lambda hello: [b"GET / HTTP/1.1\r\n\r\n"], {}, id="another-protocol"),
        pytest.param(lambda hello: [HEAD.pack(0, 1 << 31)], {}, id="endless-frame"),
        pytest.param(lambda hello: [HEAD.pack(0, 0)], {}, id="empty-frame"),
        pytest.param(lambda hello: [HEAD.pack(0, 4), b"\xc1" * 4], {}, id="no-hello"),
        pytest.param(lambda hello: [Announced(KEY, segments((0, 0, 8))).frame()], {}, id="chunk-before-hello"),
        pytest.param(lambda hello: [Result(KEY, True).frame()], {}, id="result-before-hello"),
        pytest.param(lambda hello: [hello], {"secret": b"guessed"}, id="wrong-secret"),
        pytest.param(lambda hello: [hello], {"you": PeerId("decode-0", 1)}, id="older-epoch"),
        pytest.param(lambda hello: [hello, Result(KEY, True).frame()], {}, id="result-before-up"),
        pytest.param(lambda hello: [hello[:9]], {}, id="half-a-hello"),
    ],
)
def test_a_caller_that_is_not_understood_is_hung_up_on(pair, said, false):
    caller = ByHand(pair.target, **false)
    caller.send(*said(caller.hello))
    if said(caller.hello)[0] == caller.hello[:9]:
        caller.socket.shutdown(socket.SHUT_WR)
    pair.pump_until(caller.closed, "C9.3: it is hung up on")
    assert not pair.target.connector._callers
    assert works(pair)


def connected(pair):
    """A peer by hand that is up at the target."""
    peer = ByHand(pair.target, PeerId("a-by-hand", 1))
    endpoint = msgspec.structs.replace(pair.source.guard.endpoint(), peer=peer.me)
    pair.target.guard.connect(endpoint)
    peer.send(peer.hello)
    pair.pump_until(lambda: pair.target.is_up(peer.me), "T2: it is up")
    return peer


@pytest.mark.clause("C9.3", "C3.6", "T7")
@pytest.mark.parametrize(
    "said",
    [
        pytest.param([b"\xff" * 64], id="nonsense"),
        pytest.param([Announced(KEY, segments((0, 0, 1 << 40))).frame()], id="endless-chunk"),
        pytest.param([Announced(KEY, segments(*[(0, 0, 1 << 62)] * 4)).frame()], id="more-than-64-bits"),
        pytest.param([HEAD.pack(1, 30), bytes(30)], id="half-a-segment"),
        pytest.param([HEAD.pack(1, 44), bytes(44)], id="empty-segment"),
        pytest.param([Result(KEY, True).frame()], id="an-answer-to-nothing"),
        pytest.param([HEAD.pack(9, 1), b"x"], id="no-such-kind"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_down_and_breaks_nothing_else(pair, said):
    peer = connected(pair)
    before = pair.target.memory.image()
    peer.send(*said)
    pair.pump_until(lambda: pair.target.told_quiet(peer.me), "T7: it is down")
    (error,) = [event.error for event in pair.target.peers if event.peer == peer.me and not event.up]
    assert isinstance(error, ProtocolViolation)
    assert str(error).startswith(("C9.3", "C3.6", "C7.4"))
    pair.target.memory.untouched(before)
    assert peer.closed()
    assert works(pair)


@pytest.mark.clause("T3", "T4")
def test_frames_that_arrive_byte_by_byte_are_frames(pair):
    peer = connected(pair)
    target = segments((0, 10, 5), (1, 7, 3))
    pair.target.guard.grant(KEY[0], peer.me, target)
    for byte in Announced(KEY, target).frame() + b"abcdefg":
        peer.send(bytes([byte]))
        pair.target.pump()
        assert not pair.target.receipts
    peer.send(b"h")
    pair.pump_until(lambda: bool(pair.target.receipts), "T3: the chunk is received with its last byte")
    assert pair.target.memory.read(target) == b"abcdefgh"
    assert [(r.peer, r.transfer, r.sequence) for r in pair.target.receipts] == [(peer.me, *KEY)]
    peer.socket.close()
    pair.pump_until(lambda: pair.target.told_quiet(peer.me), "T7: it is down")


@pytest.mark.clause("T5", "C6.4")
def test_a_chunk_of_a_peer_that_breaks_the_protocol_ends_when_its_stream_does(pair):
    """What it may still read of us, and write at its own end, nobody knows before."""
    peer = connected(pair)
    row = segments((0, 0, 64))
    pair.target.guard.grant(KEY[0], peer.me, row)
    assert pair.target.guard.submit(Chunk(KEY[0], 0, peer.me, row, row, 64))
    pair.pump_idle()  # all of it is with the kernel
    peer.send(HEAD.pack(9, 1), b"x")
    pair.pump_until(lambda: pair.target.told_down(peer.me), "T7: it is down")
    pair.pump_idle()
    assert not pair.target.told_quiet(peer.me)
    assert not pair.target.completions
    before = pair.target.memory.image()
    peer.send(Announced(KEY, row).frame(), b"!" * 64, Result(KEY, True).frame())
    pair.pump_idle()
    pair.target.memory.untouched(before)
    assert not pair.target.receipts
    assert not pair.target.completions
    assert peer.closed()
    pair.pump_until(lambda: pair.target.told_quiet(peer.me), "C6.4: and quiet")
    assert [(c.outcome, c.terminal) for c in pair.target.completions] == [(Outcome.FAILED, True)]


@pytest.mark.clause("T5", "C7.4")
def test_an_answer_to_a_chunk_that_is_still_being_sent_is_no_answer(family):
    """The source would be called quiet while it is still read."""
    with open_pair(plugin, {"family": family}, regions={0: LARGE, 1: 4096}) as pair:
        peer = connected(pair)
        whole = segments((0, 0, LARGE))
        assert pair.target.guard.submit(Chunk(KEY[0], 0, peer.me, whole, whole, LARGE))
        pair.pump_idle()
        peer.send(Result(KEY, True).frame())
        pair.pump_until(lambda: pair.target.told_down(peer.me), "T7: it is down")
        assert not pair.target.completions
        peer.socket.close()
        pair.pump_until(lambda: bool(pair.target.completions), "T5: its chunk ends with its stream")
        assert [(c.outcome, c.terminal) for c in pair.target.completions] == [(Outcome.FAILED, True)]


@pytest.mark.clause("C9.3")
def test_whatever_a_body_is_it_is_a_frame_or_a_violation():
    draw = random.Random(11)
    good = [
        Hello(PeerId("p", 1), PeerId("d", 2), b"s").frame(),
        Announced(KEY, segments((0, 0, 8), (1, 4, 4))).frame(),
        Result(KEY, False).frame(),
    ]
    for _ in range(2000):
        frame = bytearray(draw.choice(good))
        for _ in range(draw.randrange(4)):
            frame[draw.randrange(len(frame))] = draw.randrange(256)
        body = bytearray(frame[HEAD.size : draw.randint(HEAD.size + 1, len(frame))])
        with contextlib.suppress(ProtocolViolation):
            read_body(frame[0], body)


@pytest.mark.clause("C3.6", "C5.2")
@pytest.mark.parametrize("row", [(0, 65530, 8), (7, 0, 8), (0, 100, 1 << 29), (0, (1 << 63) - 9, 8)])
def test_a_chunk_for_other_memory_than_ours_is_refused(pair, row):
    peer = connected(pair)
    before = pair.target.memory.image()
    pair.target.guard.grant(KEY[0], peer.me, segments((0, 100, 65436)))
    peer.send(Announced(KEY, segments(row)).frame(), bytes(min(row[2], 8)))
    pair.pump_idle()
    pair.target.memory.untouched(before, "C3.6")
    assert not pair.target.receipts
    peer.socket.close()
    pair.pump_until(lambda: pair.target.told_quiet(peer.me), "T7: it is down")


@pytest.mark.clause("T6", "T7")
def test_one_poll_reads_a_bounded_part_of_what_is_there(pair, monkeypatch):
    """A peer that sends faster than we read would otherwise keep us in one poll for ever."""
    monkeypatch.setattr(connector_module, "BYTES_PER_POLL", 4096)
    peer = connected(pair)
    pair.target.guard.grant(KEY[0], peer.me, segments((0, 0, 65536)))
    rows = [segments((0, 1024 * number, 1024)) for number in range(20)]
    peer.send(b"".join(Announced((KEY[0], number), row).frame() + bytes(1024) for number, row in enumerate(rows)))
    pair.pump_until(lambda: bool(pair.target.receipts), "T3: the first chunks arrive")
    assert 0 < len(pair.target.receipts) <= 4
    pair.pump_until(lambda: len(pair.target.receipts) == 20, "T3: all of them arrive")
    peer.socket.close()
    pair.pump_until(lambda: pair.target.told_quiet(peer.me), "T7: it is down")


@pytest.mark.clause("T6", "T12")
def test_a_peer_that_reads_no_answers_does_not_fill_our_memory(pair):
    peer = connected(pair)
    peer.socket.setblocking(False)
    empty = Announced(KEY, Segments.empty()).frame() * 500
    end, rest = time.monotonic() + PATIENCE, b""
    while not pair.target.told_quiet(peer.me):
        assert time.monotonic() < end, "T6: answers pile up"
        with contextlib.suppress(BlockingIOError, ConnectionError):
            rest = rest or empty
            rest = rest[peer.socket.send(rest) :]
            continue
        pair.pump()
    assert isinstance(pair.target.peers[-1].error, ProtocolViolation)
    peer.socket.close()
    assert works(pair)


# -- the plugin --------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T13", "T1")
def test_what_it_cannot_do_is_said():
    assert plugin.probe(Need("host", "cross_process")).usable
    for need in (Need("cuda", "same_process"), Need("host", "cross_host")):
        answer = plugin.probe(need)
        assert not answer.usable
        assert answer.reason
        assert answer.remedy
    connector = plugin.open(plugin.Options(), ConnectorContext(PeerId("a", 1)))
    with pytest.raises(RegistrationError, match="cuda memory"):
        connector.register([MemoryRegion(0, "cuda", 0, 4096, 10)])
    connector.close()
