"""A hundred thousand messages that no peer should say, at each end of a channel, with good ones between them.

None crashes its reader or costs a good message; each is counted under the reason for which it was refused, exactly.
"""

import random
from collections import Counter, deque

import msgspec
import pytest
import zmq

from kvbaton.control import Received
from kvbaton.control.zmq import Ticket, ZmqCoordinatorChannels, ZmqStageChannel
from kvbaton.errors import MessageError
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.messages import VERSION, Cancel, Commit, Failed, Output, PeerDown, Stop, decode, encode, envelope

PEER = PeerId("decode-0", 1000)
COORDINATOR = 77
GREETING = b"kvbaton/" + str(VERSION).encode()
COUNT = 100_000
#: Sent before the reader turns, so that neither end waits for the other.
BATCH = 250
MAX_MESSAGE = 2048


class Hostile:
    """Draws bad messages of every kind from a seed, and good ones; knows what the reader is to make of each."""

    def __init__(self, seed: int, epoch: int) -> None:
        self._draw = random.Random(seed)
        self._epoch = epoch
        self._good = 0
        #: Good ones of late, for replays.
        self._said: deque[tuple[str, bytes]] = deque(maxlen=50)
        self._kinds = [self._noise, self._cut, self._bent, self._longer, self._nested, self._oversized, self._several,
                       self._replay, self._stale, self._foreign]  # fmt: skip
        self.expected: Counter[tuple[str, str]] = Counter()
        self.kinds: Counter[str] = Counter()

    def good(self) -> tuple[list[bytes], object]:
        """The next one that counts."""
        body = self._body()
        self._good += 1
        sealed = envelope(self._epoch, self._good, body)
        data = encode(sealed)
        self._said.append((sealed.family, data))
        return [data], body

    def bad(self) -> list[bytes]:
        kind = self._draw.choice(self._kinds)
        frames, family, reason = kind()
        self.expected[family, reason] += 1
        self.kinds[kind.__name__] += 1
        return frames

    def _body(self):
        draw, transfer = self._draw, new_transfer_id()
        return draw.choice(
            [
                Cancel(transfer), Stop(), Commit(transfer, draw.randrange(1, 1000)),
                Failed(transfer, "x" * draw.randrange(200)),
                Output(transfer, draw.randrange(100), tuple(range(draw.randrange(1, 20)))),
                PeerDown(PeerId("prefill-0", draw.randrange(1, 99)), draw.random() < 0.5, "gone"),
            ]
        )  # fmt: skip

    def _whole(self) -> bytes:
        """A message that would be the next one, were it sent as it is."""
        return encode(envelope(self._epoch, self._good + 1, self._body()))

    def _noise(self):
        return [self._draw.randbytes(self._draw.randrange(400))], "unknown", "malformed"

    def _cut(self):
        data = self._whole()
        return [data[: self._draw.randrange(len(data))]], "unknown", "malformed"

    def _bent(self):
        """One byte is another, and what results means nothing."""
        while True:
            data = bytearray(self._whole())
            data[self._draw.randrange(len(data))] ^= self._draw.randrange(1, 256)
            try:
                decode(bytes(data), MAX_MESSAGE)
            except MessageError:
                return [bytes(data)], "unknown", "malformed"

    def _longer(self):
        return [self._whole() + self._draw.randbytes(self._draw.randrange(1, 9))], "unknown", "malformed"

    def _nested(self):
        """Well-formed, and not ours: as deep as a reader's stack, or other things in the places of ours."""
        deep = b"\x91" * self._draw.randrange(100, 1500) + b"\xc0"
        other = msgspec.msgpack.encode([VERSION, "transfer", self._epoch, self._good + 1, {"__class__": "os.system"}])
        return [self._draw.choice([deep, other])], "unknown", "malformed"

    def _oversized(self):
        return [self._whole().ljust(MAX_MESSAGE + self._draw.randrange(1, 200), b"\x00")], "unknown", "oversized"

    def _several(self):
        return [self._whole(), *(b"more",) * self._draw.randrange(1, 4)], "unknown", "malformed"

    def _replay(self):
        if not self._said:
            return self._noise()
        family, data = self._draw.choice(self._said)
        return [data], family, "repeat"

    def _stale(self):
        sealed = envelope(self._draw.randrange(self._epoch), self._good + 1, self._body())
        return [encode(sealed)], sealed.family, "stale-epoch"

    def _foreign(self):
        sealed = envelope(self._epoch + self._draw.randrange(1, 99), self._good + 1, self._body())
        return [encode(sealed)], sealed.family, "foreign-epoch"

    def flood(self, send, turn, found: list) -> None:
        """``COUNT`` bad ones; ``turn(goods)`` reads until as many good ones have been seen."""
        wanted = []
        for first in range(0, COUNT, BATCH):
            for number in range(first, first + BATCH):
                if self._draw.random() < 0.02:
                    frames, body = self.good()
                    send(frames)
                    wanted.append(body)
                assert number < COUNT
                send(self.bad())
            frames, body = self.good()  # what comes before it is dealt with once it is seen
            send(frames)
            wanted.append(body)
            for _ in range(200):
                found += turn()
                if len(found) == len(wanted):
                    break
            assert len(found) == len(wanted), "a good one is missing"
        assert found == wanted
        assert sum(self.expected.values()) == COUNT
        assert len(self.kinds) == len(self._kinds)


@pytest.mark.clause("C9.3", "C9.4", "C1.4")
def test_a_hundred_thousand_bad_messages_at_the_coordinator(short_tmp):
    """Its peer's, between good ones; and as many more of strangers, and of the peer's earlier life."""
    hostile = Hostile(5, PEER.epoch)
    coordinator = ZmqCoordinatorChannels(directory=short_tmp, max_message=MAX_MESSAGE)
    context = zmq.Context()
    try:
        coordinator.add(PEER)
        dealers = {}
        for routing_id in (b"decode-0@3e8", b"decode-0@2", b"nobody"):
            dealers[routing_id] = dealer = context.socket(zmq.DEALER)
            dealer.setsockopt(zmq.SNDHWM, 0)
            dealer.routing_id = routing_id
            dealer.connect(coordinator.ticket(PEER).address)
        peer, earlier, stranger = dealers.values()
        peer.send(GREETING)
        others = 0

        def send(frames):
            nonlocal others
            peer.send_multipart(frames)
            if others < COUNT // 10:
                others += 1
                earlier.send_multipart(frames)
                stranger.send_multipart(frames)

        def turn():
            coordinator.wait(0.1)
            events = coordinator.receive()
            assert all(isinstance(event, Received) and event.peer == PEER for event in events), events
            return [event.message for event in events]

        hostile.flood(send, turn, [])
        hostile.expected["unknown", "stale-epoch"] += others
        hostile.expected["unknown", "unknown-peer"] += others
        for _ in range(200):  # other connections have an order of their own
            if sum(coordinator.statistics().dropped.values()) == hostile.expected.total():
                break
            assert turn() == []
        assert coordinator.statistics().dropped == hostile.expected
    finally:
        context.destroy(linger=0)
        coordinator.close()


@pytest.mark.clause("C9.3", "C9.4", "C1.4")
def test_a_hundred_thousand_bad_messages_at_a_stage(short_tmp):
    hostile = Hostile(6, COORDINATOR)
    path = short_tmp / "control"
    context = zmq.Context()
    try:
        router = context.socket(zmq.ROUTER)
        router.setsockopt(zmq.SNDHWM, 0)
        router.bind(f"ipc://{path}")
        stage = ZmqStageChannel(
            Ticket(address=f"ipc://{path}", peer=PEER, coordinator_epoch=COORDINATOR, max_message=MAX_MESSAGE)
        )
        try:
            routing_id, greeting = router.recv_multipart()
            assert greeting == GREETING

            def turn():
                stage.wait(0.1)
                return stage.receive()

            hostile.flood(lambda frames: router.send_multipart([routing_id, *frames]), turn, [])
            assert stage.statistics().dropped == hostile.expected
            assert stage.lost is None
        finally:
            stage.close()
    finally:
        context.destroy(linger=0)
        path.unlink()


def test_what_is_drawn_is_bad_for_the_reason_that_is_told():
    """The judge of the judge: by the codec alone, without a channel."""
    hostile = Hostile(7, PEER.epoch)
    for _ in range(100):
        hostile.good()
    seen = Counter()
    for _ in range(5000):
        frames = hostile.bad()
        try:
            found = decode(frames[0], MAX_MESSAGE) if len(frames) == 1 else None
        except MessageError:
            seen["malformed"] += 1
            continue
        if found is None:
            seen["malformed"] += 1
        elif found.epoch != PEER.epoch:
            seen["stale-epoch" if found.epoch < PEER.epoch else "foreign-epoch"] += 1
        else:
            assert found.seq <= 100
            seen["repeat"] += 1
    told = Counter()
    for (_, reason), count in hostile.expected.items():
        told["malformed" if reason == "oversized" else reason] += count
    assert seen == told
