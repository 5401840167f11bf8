"""The coordinator machine where the model does not reach: the queue, refusals, deadlines, placement, several peers."""

from __future__ import annotations

import math
import random

import pytest

from kvbaton.engine import FinishReason, Request, Role, SamplingParams
from kvbaton.errors import DuplicateRequest, LocalProtocolError, PromptTooLong, RequestRefused, RuntimeClosed
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Coordinator, Deadlines, Limits, Pair
from kvbaton.handoff.table import CoordinatorPhase, PeerStatus
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.messages import (
    Ack,
    Activated,
    Cancel,
    Commit,
    Connect,
    Connected,
    Disconnect,
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
    Reserve,
    Reserved,
    Retired,
    Stop,
    Unproven,
)
from kvbaton.reservation import Capacity, Reservation

P0, P1 = PeerId("prefill-0", 1), PeerId("prefill-1", 1)
D0, D1 = PeerId("decode-0", 1), PeerId("decode-1", 1)
C = CoordinatorPhase


def capacity(blocks: int = 100, slots: int = 8) -> Capacity:
    return Capacity(blocks, 4, slots, 16, 1000)


def request(tokens: int = 16, growth: int = 16) -> Request:
    return Request(tuple(range(tokens)), SamplingParams(max_tokens=growth))


class Desk:
    """A coordinator and a clock that moves only when told to."""

    def __init__(
        self, prefills=(P0,), decodes=(D0,), blocks: int = 100, slots: int = 8, connect: bool = True, **settings
    ):
        self.now = 100.0
        self.log: list = []
        self.c = Coordinator(**settings)
        for peer in prefills:
            self.hear(peer, Hello(peer, Role.PREFILL, capacity(blocks, slots), b"p"))
        for peer in decodes:
            self.hear(peer, Hello(peer, Role.DECODE, capacity(blocks, slots), b"d"))
        if connect:
            for p in prefills:
                for d in decodes:
                    self.hear(p, Connected(d))
                    self.hear(d, Connected(p))

    def did(self, effects: list) -> list:
        self.log += effects
        return effects

    def hear(self, peer, message) -> list:
        return self.did(self.c.handle(peer, message, self.now))

    def submit(self, name: str, what: Request | None = None) -> list:
        return self.did(self.c.submit(RequestKey(name), what or request(), self.now))

    def placed(self, name: str) -> TransferId:
        return next(
            e.transfer for e in reversed(self.log)
            if isinstance(e, fx.Tell) and e.key == name and isinstance(e.event, fx.Placed)
        )  # fmt: skip

    def life(self, name: str, until: str = "retired", p: PeerId = P0, d: PeerId = D0) -> TransferId:
        t = self.placed(name)
        steps = [
            ("reserved", d, Reserved(Reservation(t, ((0,),), 0, 0))),
            ("committed", p, Commit(t, 1, segments=3, nbytes=4096, timings={"submitted": 0.5})),
            ("received", d, Received(t)),
            ("source retired", p, Retired(t)),
            ("activated", d, Activated(t)),
            ("output", d, Output(t, 0, (1, 2), (1, 1))),
            ("finished", d, Finished(t, FinishReason.LENGTH)),
            ("retired", d, Retired(t)),
        ]
        for step, peer, message in steps:
            self.hear(peer, message)
            if step == until:
                break
        return t

    def wait(self, seconds: float) -> list:
        self.now += seconds
        return self.did(self.c.expire(self.now))

    def overdue(self, *answering: PeerId, after: float = 5.0) -> list:
        """A drain is overdue: what follows until it is clear who answers, which ``answering`` do."""
        asked = self.wait(after)
        self.now += 0.25
        for effect in orders(asked, fx.Ask):
            if effect.peer in answering:
                self.c.heard(effect.peer, self.now)
        return asked + self.wait(0.25)

    def ends(self, name: str) -> list:
        return [e.event for e in self.log if isinstance(e, fx.Tell) and e.key == name and isinstance(e.event, fx.Ended)]

    @property
    def phases(self):
        return {e.key: self.c.phase_of(e.key) for e in self.log if isinstance(e, fx.Tell)}


def sent(effects: list, kind=None) -> list:
    return [
        (e.peer, e.message) for e in effects if isinstance(e, fx.SendTo) and (kind is None or type(e.message) is kind)
    ]


def orders(effects: list, kind) -> list:
    return [e for e in effects if isinstance(e, kind)]


# -- a life, and who is told what ------------------------------------------------------------------------------------


@pytest.mark.clause("C2.1", "C2.4", "C4.1")
def test_a_life_from_submit_to_forgotten():
    desk = Desk()
    effects = desk.submit("a", request(17, 16))
    t = desk.placed("a")
    assert sent(effects) == [(D0, Reserve(t, 1, request(17, 16), P0))]
    held = Reservation(t, ((0, 1, 2),), 0, 0)
    assert sent(desk.hear(D0, Reserved(held))) == [(P0, Prefill(t, 1, request(17, 16), held, D0))]
    assert {v.peer: (v.blocks_out, v.slots_out) for v in desk.c.peers()} == {P0: (2, 1), D0: (3, 1)}
    commit = Commit(t, 4, segments=9, nbytes=4096, timings={"submitted": 0.5})
    effects = desk.hear(P0, commit)
    assert sent(effects) == [(D0, commit)]
    (reached,) = orders(effects, fx.Reached)
    assert (reached.milestone, reached.chunks, reached.segments, reached.nbytes) == ("committed", 4, 9, 4096)
    assert sent(desk.hear(D0, Received(t))) == [(P0, Ack(t))]
    desk.hear(P0, Retired(t))
    desk.hear(D0, Activated(t))
    tokens = desk.hear(D0, Output(t, 0, (1, 2), (3, 3)))
    assert tokens == [fx.Tell(RequestKey("a"), t, fx.Tokens(0, (1, 2), (3, 3)))]
    assert isinstance(desk.hear(D0, Output(t, 0, (1, 2), (3, 3)))[0], fx.Ignored)  # C7.1
    desk.hear(D0, Finished(t, FinishReason.STOP))
    assert desk.ends("a") == [fx.Ended(fx.Ending.FINISHED, FinishReason.STOP)]
    assert (len(desk.c), desk.c.live) == (1, 0)
    desk.hear(D0, Retired(t))
    assert len(desk.c) == 0
    assert all(v.blocks_out == v.slots_out == 0 for v in desk.c.peers())


@pytest.mark.clause("C1.1")
def test_an_id_is_taken_again_while_the_old_transfer_still_drains():
    desk = Desk()
    desk.submit("a")
    old = desk.life("a", "committed")
    with pytest.raises(DuplicateRequest, match="request 'a' is still live"):
        desk.submit("a")
    desk.did(desk.c.abort(RequestKey("a"), desk.now))
    desk.submit("a")
    new = desk.life("a", "finished")
    assert new != old
    assert isinstance(desk.hear(D0, Finished(old, FinishReason.STOP))[0], fx.Ignored)
    assert [e.ending for e in desk.ends("a")] == [fx.Ending.CANCELLED, fx.Ending.FINISHED]


@pytest.mark.clause("C1.1", "C7.1")
def test_an_outcome_is_told_once():
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", "finished")
    for message in (Failed(t, "no"), Finished(t, FinishReason.STOP), Output(t, 2, (3,)), Activated(t)):
        desk.hear(D0, message)
    assert isinstance(desk.c.abort(RequestKey("a"), desk.now)[0], fx.Ignored)
    assert len(desk.ends("a")) == 1


@pytest.mark.clause("C2.5")
def test_a_second_return_is_reported_and_changes_no_balance():
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", "source retired")
    before = desk.c.peers()
    assert isinstance(desk.hear(P0, Retired(t))[0], fx.Ignored)
    after = desk.c.peers()
    assert [v.repeated_returns for v in after] == [1, 0]
    assert [(v.blocks_out, v.slots_out) for v in before] == [(v.blocks_out, v.slots_out) for v in after]


# -- the fence -------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.4")
def test_a_joined_stage_is_fenced_when_everybody_has_closed_towards_it():
    """Joined alone is half a fence; a lost receiver may be written to until it is joined itself."""
    desk = Desk(decodes=(D0, D1))
    D2 = PeerId("decode-2", 1)
    desk.hear(D2, Hello(D2, Role.DECODE, capacity(), b"d"))
    desk.did(desk.c.peer_lost(D1, "gone", desk.now))
    assert not orders(desk.did(desk.c.peer_joined(P0, desk.now)), fx.Fenced)
    assert not orders(desk.hear(D0, PeerDown(P0, False, "reset")), fx.Fenced)
    assert not orders(desk.hear(D0, PeerDown(P0, True)), fx.Fenced)
    assert not orders(desk.hear(D2, PeerDown(P0, True)), fx.Fenced)
    assert orders(desk.did(desk.c.peer_joined(D1, desk.now)), fx.Fenced) == [fx.Fenced(P0), fx.Fenced(D1)]
    assert not orders(desk.hear(D0, PeerDown(P0, True)), fx.Fenced)
    assert sorted(e.peer for e in orders(desk.log, fx.Fenced)) == [D1, P0]


@pytest.mark.clause("C6.4")
def test_who_closed_before_the_join_need_not_close_again():
    desk = Desk()
    desk.hear(D0, PeerDown(P0, True))
    assert orders(desk.did(desk.c.peer_joined(P0, desk.now)), fx.Fenced) == [fx.Fenced(P0)]


@pytest.mark.clause("C6.3")
def test_a_failure_names_the_stage_that_it_lies_with():
    desk = Desk()
    for name, peer, message in (
        ("prefill", P0, lambda t: Failed(t, "no")), ("decode", D0, lambda t: Failed(t, "no")),
        ("lie", P0, lambda t: Commit(t, 0)),
    ):  # fmt: skip
        desk.submit(name)
        t = desk.life(name, "reserved")
        desk.hear(peer, message(t))
        assert desk.ends(name)[0].peer == peer
        desk.hear(P0, Retired(t))
        desk.hear(D0, Retired(t))
    desk.submit("late")
    desk.wait(1000.0)
    assert desk.ends("late")[0].peer == D0
    desk.submit("lost")
    assert orders(desk.did(desk.c.peer_lost(P0, "gone", desk.now)), fx.Fault)[0].peer == P0
    assert desk.ends("lost")[0].peer == P0


@pytest.mark.clause("C7.2")
def test_a_writer_that_hit_memory_it_was_not_given_is_lost():
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", "received")
    effects = desk.hear(D0, Failed(t, "C7.2: sequence 1 of 1", (), P0))
    assert orders(effects, fx.Kill)[0].peer == P0
    assert desk.c.peers()[0].status is PeerStatus.LOST
    assert desk.ends("a")[0].ending is fx.Ending.FAILED


# -- the queue -------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C2.6")
def test_requests_are_placed_in_order_as_capacity_comes_back():
    desk = Desk(slots=1)
    for name in "abc":
        desk.submit(name)
    assert (desk.phases["a"], desk.c.waiting) == (C.RESERVING, 2)
    desk.life("a")
    assert desk.c.phase_of(RequestKey("b")) is C.RESERVING
    assert desk.c.phase_of(RequestKey("c")) is C.WAITING


@pytest.mark.clause("C2.6")
def test_small_arrivals_pass_a_large_one_a_bounded_number_of_times():
    desk = Desk(blocks=20, limits=Limits(passes=3))
    desk.submit("holder", request(96, 64))  # 10 of D's 20 blocks
    desk.submit("large", request(160, 160))  # 20
    passed = 0
    for n in range(10):
        desk.submit(f"small-{n}")
        if desk.c.phase_of(RequestKey(f"small-{n}")) is C.RESERVING:
            passed += 1
            desk.life(f"small-{n}")
    assert passed == 3
    desk.life("holder")
    assert desk.c.phase_of(RequestKey("large")) is C.RESERVING
    desk.life("large")
    assert all(desk.c.phase_of(RequestKey(f"small-{n}")) is not C.WAITING for n in range(3, 10))


@pytest.mark.clause("C2.6")
def test_a_large_request_is_not_starved_by_an_endless_stream_of_small_ones():
    rng = random.Random(3)
    desk = Desk(blocks=20, slots=8, limits=Limits(passes=4, window=8))
    running: list[str] = []
    placed_large = None
    for n in range(400):
        name = f"r{n}"
        desk.submit(name, request(160, 160) if n == 20 else request(16, 16))
        running.append(name)
        live = [r for r in running if desk.c.phase_of(RequestKey(r)) is C.RESERVING]
        if "r20" in live:
            placed_large = n
            break
        if live and n > 4:
            done = rng.choice(live)
            desk.life(done)
            running.remove(done)
    assert placed_large is not None
    assert placed_large < 60


@pytest.mark.clause("C2.6")
def test_a_refusal_in_spite_of_credits_makes_the_request_wait_with_its_age_as_a_new_generation():
    desk = Desk(slots=1)
    for name in "abc":
        desk.submit(name)
    old = desk.placed("a")
    effects = desk.hear(D0, Rejected(old, "fragmented", retry=True))
    assert orders(effects, fx.Tell)[0].event == fx.Requeued("fragmented")
    assert not desk.ends("a")
    # b passes it while it waits for its second try
    assert desk.c.phase_of(RequestKey("b")) is C.RESERVING
    assert desk.c.next_deadline() == desk.now + Limits().retry_delay
    desk.wait(1.0)
    assert desk.c.phase_of(RequestKey("a")) is C.WAITING
    desk.life("b")
    assert desk.c.phase_of(RequestKey("a")) is C.RESERVING  # older than c
    assert desk.placed("a") != old
    assert isinstance(desk.hear(D0, Reserved(Reservation(old, ((0,),), 0, 0)))[0], fx.Ignored)


@pytest.mark.clause("C2.6")
def test_refusals_end_after_a_bounded_number_of_tries():
    desk = Desk(limits=Limits(retries=2))
    desk.submit("a")
    for _ in range(2):
        desk.hear(D0, Rejected(desk.placed("a"), "fragmented", retry=True))
        desk.wait(10.0)
    desk.hear(D0, Rejected(desk.placed("a"), "fragmented", retry=True))
    (end,) = desk.ends("a")
    assert end.ending is fx.Ending.FAILED
    assert "refused (3 times): fragmented" in end.cause
    assert len(desk.c) == 0
    assert all(v.slots_out == 0 for v in desk.c.peers())


@pytest.mark.clause("C2.6")
def test_a_cancelled_request_does_not_wait_again():
    desk = Desk()
    desk.submit("a")
    t = desk.placed("a")
    desk.did(desk.c.abort(RequestKey("a"), desk.now))
    desk.hear(D0, Rejected(t, "full", retry=True))
    assert (desk.c.waiting, len(desk.c)) == (0, 0)


@pytest.mark.clause("C2.4")
def test_what_can_never_fit_or_never_be_taken_is_refused_with_a_typed_error():
    desk = Desk(blocks=4, slots=1, limits=Limits(waiting=1))
    with pytest.raises(PromptTooLong, match="prompt is 65 tokens and no prefill stage holds more than 64"):
        desk.submit("a", request(65, 1))
    with pytest.raises(PromptTooLong, match="growth is 65 tokens and no decode stage holds more than 64"):
        desk.submit("a", request(33, 32))
    desk.submit("a")
    desk.submit("b")
    with pytest.raises(RequestRefused, match=r"raise limits\.waiting"):
        desk.submit("c")
    desk.did(desk.c.fatal("enough", desk.now))
    with pytest.raises(RuntimeClosed, match="enough"):
        desk.submit("d")
    assert (desk.c.live, desk.c.waiting) == (0, 0)


@pytest.mark.clause("C2.4")
@pytest.mark.parametrize(("blocks", "planes", "limit"), [(12, 3, 64), (13, 3, 64), (2, 3, 0)])
def test_the_limit_that_is_named_counts_every_plane(blocks, planes, limit):
    """The planes of a looped model share the pool: a token takes room in each of them."""
    desk = Desk(prefills=(), decodes=())
    for peer, role in ((P0, Role.PREFILL), (D0, Role.DECODE)):
        desk.hear(peer, Hello(peer, role, Capacity(blocks, 4, 8, 16, 1000, planes), b""))
    with pytest.raises(PromptTooLong, match=f"no prefill stage holds more than {limit};") as caught:
        desk.submit("a", request(limit + 1, 1))
    assert caught.value.limit == limit
    if limit:
        desk.submit("b", request(limit - 16, 16))


@pytest.mark.clause("C7.2")
@pytest.mark.parametrize(("at", "count"), [("reserved", 0), ("committed", 2)])
def test_a_commit_count_that_cannot_be_true_is_reported_by_its_own_clause(at, count):
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", at)
    (violation,) = orders(desk.hear(P0, Commit(t, count)), fx.Violation)
    assert (violation.clause, violation.peer) == ("C7.2", P0)
    assert desk.ends("a")[0].cause.startswith("C7.2: ")


@pytest.mark.clause("C6.1")
def test_a_waiting_request_fails_when_nobody_is_left_who_could_ever_hold_it():
    desk = Desk(choose=lambda key, what, pairs: None)
    desk.hear(D1, Hello(D1, Role.DECODE, capacity(2, 1), b""))
    desk.hear(D1, Connected(P0))
    desk.hear(P0, Connected(D1))
    desk.submit("small")
    desk.submit("large", request(64, 64))
    desk.did(desk.c.peer_lost(D0, "gone", desk.now))
    assert desk.ends("large")[0].cause == "no connected pair of stages that is left can hold the request"
    assert desk.ends("small") == []
    desk.did(desk.c.drain(D1, desk.now))
    assert desk.ends("small")[0].cause == "no decode stage is up and takes requests"


def test_aborting_a_waiting_request_takes_it_out_of_the_queue():
    desk = Desk(slots=1)
    for name in "abc":
        desk.submit(name)
    desk.did(desk.c.abort(RequestKey("b"), desk.now))
    assert desk.c.waiting == 1
    desk.life("a")
    assert desk.c.phase_of(RequestKey("c")) is C.RESERVING


# -- placement -------------------------------------------------------------------------------------------------------


def test_the_least_loaded_pair_is_taken():
    desk = Desk(prefills=(P0, P1), decodes=(D0, D1))
    for n in range(4):
        desk.submit(f"r{n}")
    assert {(v.peer, v.slots_out) for v in desk.c.peers()} == {(P0, 2), (P1, 2), (D0, 2), (D1, 2)}


def test_only_pairs_that_are_connected_both_ways_are_offered():
    offered: list = []

    def choose(key, what, pairs):
        offered.append({(pair.prefill, pair.decode) for pair in pairs})
        return None

    desk = Desk(prefills=(P0, P1), decodes=(D0, D1), connect=False, choose=choose)
    desk.submit("a")
    assert offered == []
    desk.hear(P0, Connected(D1))
    assert offered == []
    desk.hear(D1, Connected(P0))
    assert offered == [{(P0, D1)}]
    assert desk.c.connected(P0, D1)
    assert not desk.c.connected(P0, D0)


@pytest.mark.clause("C7.4", "C9.3")
@pytest.mark.parametrize("tokens", [-1, 17, 10**12, 2**63 - 1])
@pytest.mark.parametrize("by", [P0, D0], ids=str)
def test_no_stage_holds_more_of_a_prompt_than_there_is(by, tokens):
    """Who chooses the next pair believes these figures, and goes through as many blocks."""
    desk = Desk()
    desk.submit("a", request(16, 16))
    t = desk.placed("a")
    if by == P0:
        desk.life("a", "reserved")
    word = Commit(t, 1, cached=tokens) if by == P0 else Reserved(Reservation(t, ((0,),), tokens, 0))
    effects = desk.hear(by, word)
    (violation,) = orders(effects, fx.Violation)
    assert (violation.clause, violation.peer, violation.transfer) == ("C7.4", by, t)
    assert not orders(effects, fx.Reached), "nobody is told"
    assert "of a prompt of 16" in desk.ends("a")[0].cause


@pytest.mark.parametrize("policy", ["raises", "invents"])
def test_a_bad_placement_policy_takes_nothing_down(policy):
    def choose(key, what, pairs):
        if policy == "raises":
            raise RuntimeError("no idea")
        return Pair(P1, D1, 0.0, 0.0)

    desk = Desk(choose=choose)
    effects = desk.submit("a")
    assert "the placement policy" in orders(effects, fx.Fault)[0].cause
    assert desk.c.phase_of(RequestKey("a")) is C.RESERVING


def test_a_draining_stage_gets_nothing_new_and_is_dismissed_when_idle():
    desk = Desk(decodes=(D0, D1))
    desk.submit("a")
    where = next(v.peer for v in desk.c.peers() if v.role is Role.DECODE and v.slots_out)
    other = D1 if where == D0 else D0
    desk.did(desk.c.drain(where, desk.now))
    with pytest.raises(LocalProtocolError, match="drain it"):
        desk.c.dismiss(where, desk.now)
    desk.submit("b")
    assert {v.peer: v.slots_out for v in desk.c.peers() if v.role is Role.DECODE} == {where: 1, other: 1}
    desk.life("a", d=where)
    assert desk.c.idle(where)
    effects = desk.did(desk.c.dismiss(where, desk.now))
    assert effects == [fx.SendTo(where, Stop()), fx.Join(where)]
    effects = desk.did(desk.c.peer_lost(where, "exited", desk.now))
    assert not orders(effects, fx.Kill)
    assert not orders(effects, fx.Fault)
    desk.did(desk.c.peer_joined(where, desk.now))
    assert [v.peer for v in desk.c.peers()] == [P0, other]
    with pytest.raises(LocalProtocolError, match="there is no stage"):
        desk.c.drain(where, desk.now)


# -- peers -----------------------------------------------------------------------------------------------------------


def test_every_prefill_stage_is_connected_with_every_decode_stage():
    desk = Desk(prefills=(P0, P1), decodes=(D0,), connect=False)
    assert sorted(sent(desk.log, Connect), key=lambda e: (e[0], e[1].endpoint)) == [
        (D0, Connect(b"p")), (D0, Connect(b"p")), (P0, Connect(b"d")), (P1, Connect(b"d")),
    ]  # fmt: skip


@pytest.mark.clause("C1.4")
def test_a_new_start_of_a_stage_replaces_the_old_one():
    desk = Desk()
    desk.submit("a")
    new = PeerId(P0.name, 2)
    effects = desk.hear(new, Hello(new, Role.PREFILL, capacity(), b"again"))
    assert orders(effects, fx.Kill)[0].peer == P0
    assert desk.ends("a")[0].ending is fx.Ending.FAILED
    assert sent(effects, Connect) == [(new, Connect(b"d")), (D0, Connect(b"again"))]
    old = PeerId(P0.name, 0)
    assert isinstance(desk.hear(old, Hello(old, Role.PREFILL, capacity(), b""))[0], fx.Violation)


@pytest.mark.clause("C1.4")
def test_a_hello_that_is_not_the_channels_own_is_refused():
    desk = Desk()
    stranger = PeerId("decode-7", 1)
    assert isinstance(desk.hear(stranger, Hello(D1, Role.DECODE, capacity(), b""))[0], fx.Violation)
    assert isinstance(desk.hear(stranger, Hello(stranger, Role.COLOCATED, capacity(), b""))[0], fx.Violation)
    assert isinstance(desk.hear(stranger, Ack(TransferId("a" * 32)))[0], fx.Ignored)
    assert isinstance(desk.hear(D0, Stop())[0], fx.Violation)
    assert isinstance(desk.hear(D0, Hello(D0, Role.DECODE, capacity(), b""))[0], fx.Ignored)


@pytest.mark.clause("C6.4", "C5.2")
def test_a_joined_prefill_stage_is_disconnected_everywhere_before_anything_is_released():
    desk = Desk(decodes=(D0, D1))
    desk.submit("a")
    d = next(v.peer for v in desk.c.peers() if v.role is Role.DECODE and v.slots_out)
    t = desk.life("a", "committed", d=d)
    effects = desk.did(desk.c.peer_lost(P0, "gone", desk.now))
    assert orders(effects, fx.Kill) == [fx.Kill(P0, "gone")]
    assert sent(effects) == [(d, Cancel(t))]
    effects = desk.did(desk.c.peer_joined(P0, desk.now))
    assert sent(effects) == [(D0, Disconnect(P0)), (D1, Disconnect(P0)), (d, Release(t))]


@pytest.mark.clause("C6.4")
def test_a_joined_decode_stage_is_told_to_the_prefill_stages_that_still_read_for_it():
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", "committed")
    effects = desk.did(desk.c.peer_joined(D0, desk.now))
    assert sent(effects) == [(P0, Cancel(t)), (P0, Disconnect(D0))]
    assert desk.c.credits_out(t) == (True, False)
    desk.hear(P0, Retired(t))
    assert len(desk.c) == 0
    assert [v.peer for v in desk.c.peers()] == [P0]


@pytest.mark.clause("C6.4", "C6.1")
def test_a_broken_connection_between_two_living_stages_ends_their_transfers_and_no_others():
    desk = Desk(decodes=(D0, D1))
    desk.submit("a")
    desk.submit("b")
    a_at = next(e.event.decode for e in desk.log if isinstance(e, fx.Tell) and e.key == "a")
    other = D1 if a_at == D0 else D0
    t, u = desk.life("a", "committed", d=a_at), desk.life("b", "committed", d=other)
    effects = desk.hear(a_at, PeerDown(P0, quiet=False, cause="reset"))
    assert sent(effects) == [(P0, Cancel(t)), (a_at, Cancel(t))]
    assert "reset" in desk.ends("a")[0].cause
    assert desk.c.phase(u) is C.COMMITTED
    assert sent(desk.hear(P0, Retired(t))) == [(a_at, Release(t))]
    desk.submit("c")
    assert desk.c.phase_of(RequestKey("c")) is C.RESERVING
    assert desk.placed("c") in {m.transfer for p, m in sent(desk.log, Reserve) if p == other}


@pytest.mark.clause("C6.4")
def test_a_severed_writer_frees_the_destination_and_keeps_its_own_credit():
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", "committed")
    effects = desk.hear(D0, PeerDown(P0, quiet=True))
    assert sent(effects) == [(P0, Cancel(t)), (D0, Cancel(t)), (D0, Release(t))]
    desk.hear(D0, Retired(t))
    assert desk.c.credits_out(t) == (True, False)
    desk.hear(P0, Retired(t))
    assert len(desk.c) == 0


@pytest.mark.clause("T8")
def test_a_stage_that_says_fatal_is_lost():
    desk = Desk()
    desk.submit("a")
    assert orders(desk.hear(P0, Fatal("quarantine")), fx.Kill) == [fx.Kill(P0, "quarantine")]
    assert isinstance(desk.hear(P0, Fatal("quarantine"))[0], fx.Ignored)
    assert "quarantine" in desk.ends("a")[0].cause


# -- deadlines -------------------------------------------------------------------------------------------------------

SHORT = Deadlines(reserve=1.0, prefill_start=2.0, prefill_idle=3.0, receipts=4.0, drain=5.0, control=0.5, shutdown=6.0)


@pytest.mark.clause("C6.7")
@pytest.mark.parametrize(
    ("until", "seconds", "grace", "name", "whom"),
    [
        (None, 1.0, 0.0, "reserve", D0),
        ("reserved", 2.0, 0.0, "prefill_start", P0),
        ("committed", 4.0, 0.5, "receipts", D0),  # D comes first, for it can say which are missing
    ],
)
def test_each_phase_has_a_deadline_and_it_ends_the_request(until, seconds, grace, name, whom):
    desk = Desk(deadlines=SHORT)
    desk.submit("a")
    if until:
        desk.life("a", until)
    assert desk.c.next_deadline() == desk.now + seconds + grace
    desk.wait(seconds + grace - 0.001)
    assert desk.ends("a") == []
    desk.wait(0.001)
    (end,) = desk.ends("a")
    assert end.cause.startswith(f"C6.7: deadline.{name} of {seconds:g} s passed")
    assert end.cause.endswith(f"waiting for {whom}")


@pytest.mark.clause("C6.7", "C8.5")
def test_progress_renews_the_idle_deadline_and_hides_no_other():
    desk = Desk(deadlines=SHORT)
    for name in "ab":
        desk.submit(name)
    a, _b = desk.life("a", "reserved"), desk.life("b", "reserved")
    desk.hear(P0, Progress(a, 1))
    desk.wait(1.5)
    desk.hear(P0, Progress(a, 2))
    desk.wait(0.5)  # b never started; a, set earlier and renewed, is in nobody's way
    assert [bool(desk.ends(n)) for n in "ab"] == [False, True]
    desk.wait(2.4)
    assert not desk.ends("a")
    desk.wait(0.1)
    assert "prefill_idle" in desk.ends("a")[0].cause


@pytest.mark.clause("C6.7", "C8.5")
def test_a_renewal_does_not_hide_the_deadlines_behind_it():
    desk = Desk(deadlines=SHORT)
    for name in "ab":
        desk.submit(name)
    transfers = [desk.life(name, "reserved") for name in "ab"]
    for t in transfers:
        desk.hear(P0, Progress(t, 1))
    desk.wait(2.0)
    desk.hear(P0, Progress(transfers[0], 2))  # the first in line is renewed
    assert desk.c.next_deadline() == desk.now + 1.0
    desk.wait(1.0)
    assert [bool(desk.ends(name)) for name in "ab"] == [False, True]


@pytest.mark.clause("C6.7")
def test_after_received_only_the_request_decides_how_long_it_takes():
    desk = Desk(deadlines=SHORT)
    desk.submit("a")
    desk.life("a", "source retired")
    assert desk.c.next_deadline() is None
    desk.wait(1e9)
    assert desk.ends("a") == []


@pytest.mark.clause("C6.7", "C6.4")
def test_a_stage_that_does_not_retire_an_ended_transfer_is_lost():
    desk = Desk(deadlines=SHORT)
    desk.submit("a")
    t = desk.life("a", "committed")
    desk.did(desk.c.abort(RequestKey("a"), desk.now))
    assert [e.peer for e in orders(desk.overdue(P0, D0), fx.Kill)] == [P0]
    assert desk.c.next_deadline() is None
    effects = desk.did(desk.c.peer_joined(P0, desk.now))
    assert (D0, Release(t)) in sent(effects)
    assert desk.c.next_deadline() == desk.now + 5.0  # D's time starts with its Release
    effects = desk.wait(5.0)
    assert [e.peer for e in orders(effects, fx.Kill)] == [D0]
    desk.did(desk.c.peer_joined(D0, desk.now))
    assert len(desk.c) == 0
    assert desk.c.peers() == ()


@pytest.mark.clause("C6.7", "C6.4", "C6.3")
@pytest.mark.parametrize(
    ("answering", "lost"), [((P0,), [D0]), ((D0,), [P0]), ((), [P0, D0])], ids=["D hangs", "P hangs", "both hang"]
)
@pytest.mark.parametrize("until", ["committed", "finished"])
def test_who_hangs_is_lost_and_not_who_waits_for_it(answering, lost, until):
    """A chunk may end with D's help only: a P that lives cannot retire while D hangs, and is not to blame."""
    desk = Desk(prefills=(P0,), decodes=(D0,), deadlines=SHORT)
    desk.submit("a")
    desk.submit("b")
    for name in "ab":
        t = desk.placed(name)
        for message in (Reserved(Reservation(t, ((0,),), 0, 0)), Commit(t, 1), Received(t), Activated(t)):
            if until == "committed" and isinstance(message, Received):
                break
            desk.hear(P0 if isinstance(message, Commit) else D0, message)
        if until == "finished":
            desk.hear(D0, Finished(t, FinishReason.LENGTH))
        else:
            desk.did(desk.c.abort(RequestKey(name), desk.now))
        desk.now += 0.25  # one is overdue while the other is judged
    before = len(desk.log)
    effects = desk.overdue(*answering, after=4.5)
    assert [e.peer for e in orders(effects, fx.Kill)] == lost
    assert all("has said nothing for deadline.control of 0.5 s: it hangs" in e.cause for e in orders(effects, fx.Kill))
    desk.wait(0.25)
    for peer in lost:
        desk.did(desk.c.peer_joined(peer, desk.now))
    if lost == [D0]:  # P has its time again, from the end of what it waited for
        assert desk.c.next_deadline() == desk.now + 5.0
        for name in "ab":
            desk.hear(P0, Retired(desk.placed(name)))
    elif lost == [P0]:
        for name in "ab":
            desk.hear(D0, Retired(desk.placed(name)))
    assert len(desk.c) == 0
    assert [e.peer for e in orders(desk.log[before:], fx.Kill)] == lost


@pytest.mark.clause("C6.7")
def test_p_is_lost_where_d_lives_and_p_has_its_time_again_where_d_was_lost():
    desk = Desk(deadlines=SHORT)
    desk.submit("a")
    desk.life("a", "committed")
    desk.did(desk.c.abort(RequestKey("a"), desk.now))
    desk.overdue(P0)
    desk.did(desk.c.peer_joined(D0, desk.now))
    effects = desk.overdue(P0)
    assert [e.peer for e in orders(effects, fx.Ask)] == [P0], "the dead are not asked"
    assert [e.peer for e in orders(effects, fx.Kill)] == [P0]
    assert "hangs" not in orders(effects, fx.Kill)[0].cause


@pytest.mark.clause("C6.7")
def test_a_transfer_that_retires_while_its_stages_are_asked_costs_nobody():
    desk = Desk(deadlines=SHORT)
    desk.submit("a")
    t = desk.life("a", "committed")
    desk.did(desk.c.abort(RequestKey("a"), desk.now))
    desk.wait(5.0)
    desk.hear(P0, Retired(t))
    desk.hear(D0, Retired(t))
    desk.wait(100.0)
    assert not orders(desk.log, fx.Kill)
    desk.c.heard(PeerId("prefill-7", 1), desk.now)  # of nobody: no effect


@pytest.mark.clause("C6.7")
def test_an_infinite_deadline_never_passes():
    desk = Desk(deadlines=Deadlines(reserve=math.inf))
    desk.submit("a")
    assert desk.c.next_deadline() is None
    desk.wait(1e12)
    assert desk.ends("a") == []


def test_a_clock_that_is_read_late_or_goes_back_changes_no_order():
    desk = Desk(deadlines=SHORT)
    desk.submit("a")
    desk.now -= 50
    desk.submit("b")
    desk.now += 51
    desk.did(desk.c.expire(desk.now))
    assert [len(desk.ends(n)) for n in "ab"] == [1, 1]


# -- shutdown --------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T3", "C5.2", "C2.5", "C6.7")
@pytest.mark.parametrize("until", ["reserved", "committed"])
def test_what_p_cannot_prove_of_a_cancelled_transfer_d_proves_and_nobody_is_given_up_for_it(until):
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", until)
    desk.did(desk.c.abort(RequestKey("a"), desk.now))
    asked = Unproven(t, ((0, 2),))
    assert sent(desk.hear(P0, asked)) == [(D0, asked)]
    assert desk.c.credits_out(t) == (True, True)
    assert sent(desk.hear(D0, Received(t))) == [(P0, Ack(t))]
    assert not sent(desk.hear(D0, Received(t))), "asked once"
    assert sent(desk.hear(P0, Retired(t))) == [(D0, Release(t))]
    desk.hear(D0, Retired(t))
    assert desk.c.phase(t) is None


@pytest.mark.clause("T3", "C5.2", "C2.5")
@pytest.mark.parametrize("first", ["P asks", "D retires"])
def test_d_had_everything_when_the_cancel_came_and_p_hears_of_it(first):
    """Received and Cancel cross: D frees at once, and its Received is too late for an Ack."""
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", "committed")
    desk.did(desk.c.abort(RequestKey("a"), desk.now))
    desk.hear(D0, Received(t))
    words = [(P0, Unproven(t, ((0, 2),))), (D0, Retired(t))]
    effects = []
    for peer, word in words if first == "P asks" else words[::-1]:
        effects += desk.hear(peer, word)
    assert sent(effects, Ack) == [(P0, Ack(t))]
    desk.hear(P0, Retired(t))
    assert desk.c.phase(t) is None


@pytest.mark.clause("C7.4")
@pytest.mark.parametrize("until", ["reserved", "committed"])
def test_a_transfer_that_goes_on_has_nothing_unproven(until):
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", until)
    assert isinstance(desk.hear(P0, Unproven(t, ((0, 1),)))[0], fx.Violation)


@pytest.mark.clause("C6.2")
def test_senders_are_stopped_and_joined_before_receivers_are_stopped():
    desk = Desk(prefills=(P0, P1))
    desk.submit("a")
    effects = desk.did(desk.c.fatal("enough", desk.now))
    assert {peer for peer, _ in sent(effects, Stop)} == {P0, P1}
    assert {e.peer for e in orders(effects, fx.Join)} == {P0, P1}
    assert desk.ends("a")[0].ending is fx.Ending.FAILED
    assert not sent(desk.did(desk.c.peer_joined(P0, desk.now)), Stop)
    assert not orders(desk.hear(D0, PeerDown(P1, quiet=True)), fx.Fault)  # it was to be expected
    effects = desk.did(desk.c.peer_joined(P1, desk.now))
    assert sent(effects)[-1] == (D0, Stop())
    assert sent(effects, Disconnect) == [(D0, Disconnect(P1))]
    assert not desk.c.closed
    desk.did(desk.c.peer_joined(D0, desk.now))
    assert desk.c.closed
    assert desk.c.next_deadline() is None
    assert len(desk.c) == 0
    assert isinstance(desk.c.fatal("again", desk.now)[0], fx.Ignored)


@pytest.mark.clause("C6.4", "C6.2", "C6.7")
def test_what_nobody_can_join_is_never_fenced_and_holds_no_shutdown_up():
    desk = Desk()
    desk.submit("a")
    t = desk.life("a", "committed")
    desk.did(desk.c.peer_lost(P0, "cut off", desk.now))
    effects = desk.did(desk.c.peer_unjoinable(P0, desk.now))
    assert sent(effects) == [], "neither Disconnect nor Release: it may still write"
    desk.wait(1000.0)
    assert desk.c.credits_out(t) == (True, True)
    assert not orders(desk.log, fx.Fenced)
    assert sent(desk.did(desk.c.fatal("enough", desk.now)), Stop) == [(D0, Stop())]
    assert not desk.c.closed
    desk.did(desk.c.peer_unjoinable(D0, desk.now))
    assert desk.c.closed
    assert desk.c.credits_out(t) == (True, True)


@pytest.mark.clause("C6.2", "C6.7")
def test_a_stage_that_does_not_exit_is_killed_at_the_deadline():
    desk = Desk(deadlines=SHORT)
    desk.did(desk.c.fatal("enough", desk.now))
    assert not orders(desk.did(desk.c.peer_lost(P0, "closed", desk.now)), fx.Kill)  # its exit is joined, not announced
    assert [e.peer for e in orders(desk.wait(6.0), fx.Kill)] == [P0]
    desk.did(desk.c.peer_joined(P0, desk.now))
    assert [e.peer for e in orders(desk.wait(6.0), fx.Kill)] == [D0]
    desk.did(desk.c.peer_joined(D0, desk.now))
    assert desk.c.closed


@pytest.mark.clause("C6.2")
def test_a_stage_that_comes_up_during_shutdown_is_sent_home():
    desk = Desk()
    desk.did(desk.c.fatal("enough", desk.now))
    assert desk.hear(P1, Hello(P1, Role.PREFILL, capacity(), b"")) == [fx.SendTo(P1, Stop()), fx.Join(P1)]
    desk.did(desk.c.peer_joined(P0, desk.now))
    assert sent(desk.log, Stop)[-1][0] != D0
    desk.did(desk.c.peer_joined(P1, desk.now))
    assert sent(desk.log, Stop)[-1] == (D0, Stop())


def test_a_coordinator_without_stages_closes_at_once():
    c = Coordinator()
    c.fatal("enough", 0.0)
    assert c.closed


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T12", "C1.2")
def test_nothing_is_kept_of_finished_requests_unknown_ids_and_joined_stages():
    desk = Desk()
    for n in range(200):
        desk.submit(f"r{n}")
        t = desk.life(f"r{n}")
        for peer, message in ((P0, Retired(t)), (D0, Finished(t, FinishReason.STOP)), (P0, Commit(t, 9))):
            assert desk.hear(peer, message)[0].reason == "unknown transfer"
        restarted = PeerId("prefill-9", n)
        desk.hear(restarted, Hello(restarted, Role.PREFILL, capacity(), b""))
        desk.hear(D0, Connected(restarted))
        desk.hear(D0, PeerDown(restarted, quiet=False))
        desk.did(desk.c.peer_joined(restarted, desk.now))
    c = desk.c
    assert (len(c), c.live, c.waiting, len(c.peers())) == (0, 0, 0, 2)
    assert not any(queue.entries for queue in c._queues)
    assert all(not p.entries and not p.down and len(p.connected) == 1 for p in c._peers.values())


@pytest.mark.clause("C2.5", "C2.6")
def test_after_a_burst_of_cancels_in_every_state_one_request_completes():
    rng = random.Random(1)
    desk = Desk(slots=4)
    steps = ["reserved", "committed", "received", "source retired", "activated", "output", "finished"]
    for n in range(300):
        name = f"r{n}"
        desk.submit(name)
        t = desk.placed(name)
        until = rng.choice(steps)
        desk.life(name, until)
        desk.did(desk.c.abort(RequestKey(name), desk.now))
        for peer, message in rng.sample([(P0, Retired(t)), (D0, Retired(t)), (P0, Retired(t))], 3):
            desk.hear(peer, message)
    assert len(desk.c) == 0
    assert all(v.slots_out == v.blocks_out == 0 for v in desk.c.peers())
    desk.submit("last")
    desk.life("last")
    assert desk.ends("last") == [fx.Ended(fx.Ending.FINISHED, FinishReason.LENGTH)]
