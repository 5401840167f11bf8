"""Thirty thousand well-formed messages that make no sense, at the coordinator machine.

They come from stages that are up, lost, dead or unknown, and are about transfers that live, have ended or never were.

Whatever they do to the requests that they are about: none raises, each request has one end, no credit is returned
twice, and when all is over nothing is kept.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from kvbaton.bounds import FAIL_CLOSED
from kvbaton.engine import FinishReason, Request, Role, SamplingParams
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Coordinator, Limits, Recovery
from kvbaton.handoff.table import CoordinatorPhase as C
from kvbaton.handoff.table import PeerStatus
from kvbaton.identity import PeerId, RequestKey, new_transfer_id
from kvbaton.messages import (
    Activated,
    Commit,
    Connected,
    Failed,
    Fatal,
    Finished,
    Hello,
    Output,
    PeerDown,
    Prefill,
    Progress,
    Received,
    Rejected,
    Release,
    Reserved,
    Retired,
    Unproven,
)
from kvbaton.reservation import Capacity, Reservation

WORDS = 30_000
CAPACITY = Capacity(400, 4, 16, 16, 1000)
REQUEST = Request(tuple(range(16)), SamplingParams(max_tokens=16))
NAMES = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


class Bedlam:
    """Draws everything from one seed."""

    def __init__(self, seed: int, recovery: Recovery) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.c = Coordinator(Limits(waiting=64), recovery=recovery)
        self.epochs = dict.fromkeys(NAMES, 1)
        self.ends: Counter[str] = Counter()
        self.submitted: list[str] = []
        #: Live and ended, and some that never were.
        self.transfers: deque[str] = deque([new_transfer_id() for _ in range(3)], maxlen=12)
        self.stages: dict[str, tuple[PeerId, PeerId]] = {}
        self.reached: Counter[str] = Counter()
        self.said: Counter[str] = Counter()
        self.done: Counter[str] = Counter()
        for name in NAMES:
            self.come(name)

    def take(self, effects: list) -> None:
        for effect in effects:
            self.done[type(effect).__name__] += 1
            match effect:
                case fx.Tell(key, _, fx.Ended()):
                    self.ends[key] += 1
                case fx.Tell(_, transfer, fx.Placed(p, d)):
                    self.transfers.append(transfer)
                    self.stages[transfer] = p, d
                case fx.Reached():
                    self.reached[effect.milestone] += 1
                case fx.Kill(peer):
                    self.bury(peer)
                case _:
                    pass

    def bury(self, peer: PeerId) -> None:
        """The launcher has joined it; it comes back, sooner or later."""
        self.take(self.c.peer_joined(peer, self.now))
        if self.draw.random() < 0.8:
            self.come(peer.name)

    def come(self, name: str) -> None:
        if any(v.peer.name == name and v.status is PeerStatus.UP for v in self.c.peers()):
            return
        self.epochs[name] += 1
        peer = PeerId(name, self.epochs[name])
        self.take(self.c.handle(peer, Hello(peer, NAMES[name], CAPACITY, b""), self.now))
        for view in self.c.peers():
            if view.role is not NAMES[name] and view.status is PeerStatus.UP:
                self.take(self.c.handle(peer, Connected(view.peer), self.now))
                self.take(self.c.handle(view.peer, Connected(peer), self.now))

    def peer(self) -> PeerId:
        name = self.draw.choice([*NAMES, "nobody-0"])
        return PeerId(name, max(self.epochs.get(name, 1) - self.draw.choice([0, 0, 0, 0, 1, 5]), 0))

    def word(self):
        draw, t, n = self.draw, self.draw.choice(self.transfers), self.draw.randrange(-1, 4)
        figure = draw.choice([0, 0, 0, 0, 1, 16, 17, -1, 2**62])
        reservation = Reservation(t, ((0, 1),), figure, 0)
        kinds = [
            Reserved(reservation), Rejected(t, "no", retry=n > 0), Progress(t, n), Commit(t, n, cached=figure),
            Received(t), Activated(t), Output(t, n, (1,) * max(n, 0)), Finished(t, FinishReason.LENGTH),
            Failed(t, "no", unmoved=n > 1), Retired(t), Unproven(t, ((0, n),)), Release(t),
            Prefill(t, n, REQUEST, reservation, self.peer()),
            Hello(self.peer(), draw.choice(list(Role)), CAPACITY, b""), Connected(self.peer()),
        ]  # fmt: skip
        rare = [
            PeerDown(self.peer(), n > 1, "gone"), Fatal("no more"), Failed(t, "it hit memory", (), self.peer()),
            Failed(t, "no", (1, 2), self.peer(), unmoved=True),
        ]  # fmt: skip
        return draw.choice(rare) if draw.random() < 0.02 else draw.choice(kinds)

    def go_on(self) -> None:
        """What one of the transfers would really hear next; else nothing would ever get far."""
        t = self.draw.choice(self.transfers)
        if t not in self.stages or self.c.phase(t) is None:
            return
        p, d = self.stages[t]
        phase = self.c.phase(t)
        word = {
            C.RESERVING: (d, Reserved(Reservation(t, ((0, 1),), 0, 0))), C.PREFILLING: (p, Commit(t, 1)),
            C.COMMITTED: (d, Received(t)), C.RECEIVED: (d, Finished(t, FinishReason.LENGTH)),
            C.ENDED: (p if self.c.credits_out(t)[0] else d, Retired(t)),
        }[phase]  # fmt: skip
        self.take(self.c.handle(*word, self.now))

    def turn(self) -> None:
        draw = self.draw
        for _ in range(draw.randrange(6)):
            self.go_on()
        self.now += draw.random() * 0.05
        sender, word = self.peer(), self.word()
        if draw.random() < 0.7:  # else nothing would ever get far
            sender = draw.choice(self.stages.get(getattr(word, "transfer", ""), (sender,)))
        if isinstance(word, Hello) and word.peer == sender and sender not in {v.peer for v in self.c.peers()}:
            return  # whoever a channel admits is a stage; this one's would not
        self.said[type(word).__name__] += 1
        self.take(self.c.handle(sender, word, self.now))
        if draw.random() < 0.3 and self.c.waiting < 60:
            name = f"r{len(self.submitted)}"
            self.submitted.append(name)
            self.take(self.c.submit(RequestKey(name), REQUEST, self.now))
        if draw.random() < 0.05:
            self.take(self.c.abort(RequestKey(draw.choice(self.submitted or ["x"])), self.now))
        if draw.random() < 0.05:
            self.take(self.c.expire(self.now))
        if draw.random() < 0.01:
            self.come(draw.choice(list(NAMES)))

    def check(self) -> None:
        assert max(self.ends.values(), default=0) <= 1, "C1.1: an outcome is told once"
        for view in self.c.peers():
            assert 0 <= view.slots_out <= view.slots, view
            assert 0 <= view.blocks_out <= view.blocks, view

    def end(self) -> None:
        """All over, by force: nothing is kept."""
        self.take(self.c.fatal("enough", self.now))
        for role in (Role.PREFILL, Role.DECODE):
            for view in self.c.peers():
                if view.role is role:
                    self.take(self.c.peer_joined(view.peer, self.now))
        assert self.ends == Counter(self.submitted), "each request has had its end"
        assert (len(self.c), self.c.live, self.c.waiting, self.c.peers()) == (0, 0, 0, ())
        assert self.c.closed


@pytest.mark.clause("C1.2", "C1.4", "C2.5", "C7.4", "C9.3", "T12")
@pytest.mark.parametrize(
    "recovery", [FAIL_CLOSED, Recovery(restarts=50), Recovery(recompute=True, restarts=50)],
    ids=["off", "requeue", "recompute"],
)  # fmt: skip
def test_no_word_brings_the_coordinator_down(recovery: Recovery) -> None:
    bedlam = Bedlam(3, recovery)
    for number in range(WORDS // 3):
        bedlam.turn()
        if number % 500 == 0:
            bedlam.check()
    assert len(bedlam.said) == 17
    assert bedlam.reached["received"] > 100, "they get far enough to be disturbed everywhere"
    assert bedlam.done["Violation"] > 500
    assert bedlam.done["Ignored"] > 500
    bedlam.end()
