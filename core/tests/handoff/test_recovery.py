"""The coordinator machine where a stage or a connection is lost and the request begins again: see
:mod:`kvbaton.bounds.Recovery`."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.bounds import FAIL_CLOSED
from kvbaton.engine import FinishReason, Request, Role, SamplingParams
from kvbaton.errors import RuntimeClosed
from kvbaton.handoff import coordinator
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Coordinator, Deadlines, Limits, Recovery
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
    Finished,
    Hello,
    Output,
    PeerDown,
    Progress,
    Received,
    Rejected,
    Release,
    Reserve,
    Reserved,
    Retired,
    Stop,
)
from kvbaton.reservation import Capacity, Reservation

P0, P1 = PeerId("prefill-0", 1), PeerId("prefill-1", 1)
D0, D1 = PeerId("decode-0", 1), PeerId("decode-1", 1)
STAGES = (P0, P1, D0, D1)
WAITING, RESERVING, ENDED = CoordinatorPhase.WAITING, CoordinatorPhase.RESERVING, CoordinatorPhase.ENDED
#: How far a generation has come when its stage is lost, in order.
STEPS = ("placed", "reserved", "computing", "committed", "received", "activated", "output")
#: P is needed until D has everything.
EXPOSED = ("placed", "reserved", "computing", "committed")


def again(peer: PeerId, epoch: int = 2) -> PeerId:
    return PeerId(peer.name, epoch)


def role(peer: PeerId) -> Role:
    return Role.PREFILL if peer.name.startswith("prefill") else Role.DECODE


def request(tokens: int = 16, growth: int = 16, **sampling) -> Request:
    return Request(tuple(range(tokens)), SamplingParams(max_tokens=growth, **sampling))


def sent(effects: list, kind=None) -> list:
    return [
        (e.peer, e.message) for e in effects if isinstance(e, fx.SendTo) and (kind is None or type(e.message) is kind)
    ]


def orders(effects: list, kind) -> list:
    return [e for e in effects if isinstance(e, kind)]


class Desk:
    """A coordinator that recovers, its stages, and a clock that moves only when told to."""

    def __init__(self, stages=STAGES, *, slots: int = 8, blocks: int = 100, recovery: Recovery | None = None, **more):
        self.now = 100.0
        self.log: list = []
        self.c = Coordinator(recovery=Recovery() if recovery is None else recovery, **more)
        for peer in stages:
            self.come(peer, slots=slots, blocks=blocks)

    def did(self, effects: list) -> list:
        self.log += effects
        return effects

    def hear(self, peer, message) -> list:
        return self.did(self.c.handle(peer, message, self.now))

    def come(self, peer: PeerId, *, slots: int = 8, blocks: int = 100) -> list:
        """A stage says Hello and is connected to all others that are up."""
        effects = self.hear(peer, Hello(peer, role(peer), Capacity(blocks, 4, slots, 16, 1000), b"e"))
        for other, message in sent(effects, Connect):
            if other != peer:
                effects += self.hear(other, Connected(peer))
                effects += self.hear(peer, Connected(other))
            assert isinstance(message, Connect)
        return effects

    def submit(self, name: str, what: Request | None = None) -> list:
        return self.did(self.c.submit(RequestKey(name), what or request(), self.now))

    def lose(self, peer: PeerId, cause: str = "gone") -> list:
        return self.did(self.c.peer_lost(peer, cause, self.now))

    def join(self, peer: PeerId) -> list:
        return self.did(self.c.peer_joined(peer, self.now))

    def wait(self, seconds: float = Deadlines().control) -> list:
        self.now += seconds
        return self.did(self.c.expire(self.now))

    def kill(self, peer: PeerId) -> list:
        return self.lose(peer) + self.join(peer)

    def placements(self, name: str) -> list[tuple[TransferId, fx.Placed]]:
        return [
            (e.transfer, e.event) for e in self.log
            if isinstance(e, fx.Tell) and e.key == name and isinstance(e.event, fx.Placed)
        ]  # fmt: skip

    def at(self, name: str) -> tuple[TransferId, PeerId, PeerId]:
        """The current generation and its stages."""
        transfer, placed = self.placements(name)[-1]
        return transfer, placed.prefill, placed.decode

    def life(self, name: str, until: str = "retired") -> TransferId:
        t, p, d = self.at(name)
        steps = [
            ("placed", None, None),
            ("reserved", d, Reserved(Reservation(t, ((0,),), 0, 0))),
            ("computing", p, Progress(t, 1)),
            ("committed", p, Commit(t, 1, segments=3, nbytes=4096)),
            ("received", d, Received(t)),
            ("activated", d, Activated(t)),
            ("output", d, Output(t, 0, (7, 8), (1, 1))),
            ("source retired", p, Retired(t)),
            ("finished", d, Finished(t, FinishReason.LENGTH)),
            ("retired", d, Retired(t)),
        ]
        for step, peer, message in steps:
            if peer is not None:
                self.hear(peer, message)
            if step == until:
                return t
        return t

    def tells(self, name: str, kind) -> list:
        return [e.event for e in self.log if isinstance(e, fx.Tell) and e.key == name and isinstance(e.event, kind)]

    def ends(self, name: str) -> list:
        return self.tells(name, fx.Ended)

    def end(self, name: str) -> fx.Ended:
        (end,) = self.ends(name)
        return end

    def phase(self, name: str) -> CoordinatorPhase | None:
        return self.c.phase_of(RequestKey(name))

    def out(self) -> dict[PeerId, tuple[int, int]]:
        return {v.peer: (v.blocks_out, v.slots_out) for v in self.c.peers() if v.slots_out or v.blocks_out}

    def balanced(self) -> bool:
        return not (self.out() or len(self.c) or self.c.live or any(v.repeated_returns for v in self.c.peers()))


def restarts(effects: list) -> list[str]:
    return [e.name for e in orders(effects, fx.Restart)]


# -- a generation is lost, and another one begins --------------------------------------------------------------------


@pytest.mark.clause("C1.2", "C6.2", "C6.5", "C2.6")
@pytest.mark.parametrize("step", EXPOSED)
def test_a_request_whose_prefill_stage_is_lost_begins_again_on_another_and_on_the_same_decode_stage(step):
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", step)
    effects = desk.lose(p)
    assert desk.tells("a", fx.Requeued) == [fx.Requeued(f"{p} is lost: gone")]
    assert not desk.ends("a")
    new, second_p, second_d = desk.at("a")
    assert (new != old, second_p != p, second_d == d) == (True, True, True)
    assert sent(effects, Reserve) == [(d, Reserve(new, 2, request(), second_p))], "numbered anew on D's channel (C1.2)"
    # the first word about the lost generation comes before the second one begins
    words = [type(message) for peer, message in sent(effects) if peer == d]
    assert words == ([Release, Reserve] if step == "placed" else [Cancel, Reserve])
    assert not [message for peer, message in sent(effects) if peer == p], "nobody speaks to the lost"
    desk.life("a")
    assert desk.end("a").ending is fx.Ending.FINISHED


@pytest.mark.clause("C2.5", "C5.2", "C6.4", "C7.4")
@pytest.mark.parametrize("step", EXPOSED)
def test_the_lost_generation_is_wound_up_and_its_credits_come_back_once(step):
    """Nothing of the fence depends on the recovery: D holds until P was joined, and both credits come back then."""
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", step)
    desk.lose(p)
    # untold, P never had anything (C2.5); and D was released at once
    assert desk.c.credits_out(old) == ((False, True) if step == "placed" else (True, True))
    desk.life("a")
    assert desk.end("a").ending is fx.Ending.FINISHED
    assert desk.c.phase(old) is ENDED
    assert set(desk.out()) == ({d} if step == "placed" else {p, d})
    effects = desk.join(p)
    assert sent(effects, Disconnect)[0][0] in (D0, D1)
    if step != "placed":
        words = [message for peer, message in sent(effects) if peer == d]
        assert words == [Disconnect(p), Release(old)], "D's end is closed first (C6.4)"
    assert set(desk.out()) == {d}
    desk.hear(d, Retired(old))
    assert desk.balanced()
    assert desk.c.phase(old) is None


@pytest.mark.clause("C1.2", "C7.4", "C1.1")
@pytest.mark.parametrize("victim", ["P", "D"])
@pytest.mark.parametrize("step", ["reserved", "committed"])
def test_late_words_of_the_lost_generation_move_nothing(step, victim):
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", step)
    desk.lose(p if victim == "P" else d)
    new, _, _ = desk.at("a")
    before = desk.out()
    for peer, message in (
        (d, Reserved(Reservation(old, ((0,),), 0, 0))), (p, Progress(old, 2)), (p, Commit(old, 1)), (d, Received(old)),
        (d, Activated(old)), (d, Output(old, 0, (9,))), (d, Finished(old, FinishReason.STOP)),
        (p, Failed(old, "late")), (d, Failed(old, "late", unmoved=True)),
    ):  # fmt: skip
        assert all(isinstance(effect, fx.Ignored) for effect in desk.hear(peer, message)), message
    assert (desk.out(), desk.c.phase(new), desk.at("a")[0]) == (before, RESERVING, new)
    desk.life("a")
    assert desk.tells("a", fx.Tokens) == [fx.Tokens(0, (7, 8), (1, 1))]
    assert desk.end("a").ending is fx.Ending.FINISHED


@pytest.mark.clause("C6.2", "C6.5")
@pytest.mark.parametrize("step", STEPS[:-1])
def test_a_request_whose_decode_stage_is_lost_begins_again_until_a_token_was_delivered(step):
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", step)
    effects = desk.lose(d)
    new, second_p, second_d = desk.at("a")
    assert (new != old, second_p, second_d != d) == (True, p, True), "P may hold its KV still"
    assert sent(effects, Cancel) == ([(p, Cancel(old))] if step in ("reserved", "computing", "committed") else [])
    desk.life("a")
    desk.join(d)
    if step != "placed":
        desk.hear(p, Retired(old))
    assert desk.end("a").ending is fx.Ending.FINISHED
    assert desk.balanced()


@pytest.mark.clause("C4.1", "C5.2")
@pytest.mark.parametrize("step", ["received", "activated", "output"])
def test_a_request_that_its_decode_stage_has_needs_no_prefill_stage(step):
    desk = Desk()
    desk.submit("a")
    t, p, d = desk.at("a")
    desk.life("a", step)
    effects = desk.kill(p)
    assert not orders(effects, fx.Tell)
    desk.hear(d, Finished(t, FinishReason.LENGTH))
    desk.hear(d, Retired(t))
    assert desk.end("a").ending is fx.Ending.FINISHED
    assert desk.balanced()


@pytest.mark.clause("C2.6")
def test_it_waits_with_its_age_ahead_of_those_that_came_later():
    desk = Desk((P0, P1, D0), slots=1)
    for name in "abc":
        desk.submit(name)
    # one decode slot: b and c wait, and so does a once its generation is lost, but ahead of them
    old, p, _ = desk.at("a")
    desk.life("a", "reserved")
    desk.lose(p)
    assert [desk.phase(name) for name in "abc"] == [WAITING] * 3, "the lost generation's memory is promised to nobody"
    desk.join(p)
    assert [desk.phase(name) for name in "abc"] == [WAITING] * 3
    desk.hear(D0, Retired(old))
    assert [desk.phase(name) for name in "abc"] == [RESERVING, WAITING, WAITING]


@pytest.mark.clause("C6.2")
def test_all_requests_of_a_stage_begin_again_and_those_of_others_never_notice():
    desk = Desk()
    for n in range(6):
        desk.submit(str(n))
        desk.life(str(n), STEPS[n % 4])
    at = {str(n): desk.at(str(n)) for n in range(6)}
    touched = {name for name, (_, p, _) in at.items() if p == P0}
    assert 0 < len(touched) < 6
    desk.kill(P0)
    assert {name for name in at if desk.at(name) != at[name]} == touched
    for name in at:
        assert not desk.ends(name)


@pytest.mark.clause("C6.2")
def test_it_prefers_the_stage_that_is_left_and_takes_another_where_that_is_full():
    desk = Desk(slots=2)
    desk.submit("a")
    _, p, d = desk.at("a")
    desk.life("a", "reserved")
    other = D1 if d == D0 else D0
    desk.did(desk.c.drain(other, desk.now))
    desk.submit("b")  # d's second slot
    desk.come(again(other))
    desk.lose(p)
    assert desk.at("a")[2] == again(other)
    assert desk.tells("a", fx.Requeued)


@pytest.mark.clause("C6.2")
def test_a_survivor_that_is_lost_while_the_request_waits_is_not_waited_for():
    desk = Desk((P0, P1, D0, D1), slots=1)
    desk.submit("a")
    desk.submit("b")
    old, p, d = desk.at("a")
    desk.life("a", "reserved")
    desk.lose(p)
    assert desk.phase("a") is WAITING  # a's own decode stage is full with its lost generation
    desk.lose(d)
    assert desk.c.credits_out(old) == (True, True)
    desk.life("b")
    assert desk.phase("a") is RESERVING
    assert desk.at("a")[1:] == ({P0, P1}.difference({p}).pop(), {D0, D1}.difference({d}).pop())
    assert len(desk.tells("a", fx.Requeued)) == 1, "it was lost once"


# -- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.3", "C6.5")
def test_a_request_begins_again_a_bounded_number_of_times_and_the_cause_says_how_often():
    desk = Desk((P0, D0), recovery=Recovery(attempts=2, restarts=99))
    desk.submit("a")
    seen = {desk.at("a")[0]}
    for epoch in (2, 3):
        desk.life("a", "computing")
        desk.kill(again(P0, epoch - 1))
        assert not desk.ends("a")
        desk.hear(D0, Retired(desk.at("a")[0]))
        desk.come(again(P0, epoch))
        seen.add(desk.at("a")[0])
    assert len(seen) == 3
    desk.life("a", "computing")
    desk.kill(again(P0, 3))
    end = desk.end("a")
    assert (end.ending, end.peer) == (fx.Ending.FAILED, again(P0, 3))
    assert end.cause == f"{again(P0, 3)} is lost: gone (begun 3 times)"


@pytest.mark.clause("C6.2", "C6.3")
def test_with_recovery_off_a_loss_is_the_end():
    desk = Desk(recovery=FAIL_CLOSED)
    desk.submit("a")
    _, p, _ = desk.at("a")
    desk.life("a", "computing")
    effects = desk.kill(p)
    assert (desk.end("a").cause, desk.end("a").peer) == (f"{p} is lost: gone", p)
    assert not restarts(effects)
    other = P1 if p == P0 else P0
    desk.kill(other)
    desk.submit("b")
    assert desk.end("b").cause == "no prefill stage is up and takes requests"


@pytest.mark.clause("C6.4")
def test_a_lost_stage_is_started_again_once_it_was_joined_and_not_before():
    desk = Desk((P0, D0))
    assert not restarts(desk.lose(P0))
    assert restarts(desk.join(P0)) == ["prefill-0"]
    assert not restarts(desk.join(P0))
    assert not restarts(desk.come(again(P0)))
    desk.submit("a")
    assert desk.at("a")[1] == again(P0), "it serves under its new epoch"


@pytest.mark.clause("C6.4")
def test_a_stage_that_ended_without_a_word_is_started_again_as_well():
    desk = Desk()
    assert restarts(desk.join(D0)) == ["decode-0"]


@pytest.mark.clause("C6.3", "C6.7")
def test_a_stage_is_started_again_a_bounded_number_of_times_in_a_row():
    desk = Desk((P0, D0), recovery=Recovery(restarts=2))
    assert restarts(desk.kill(P0)) == ["prefill-0"]
    desk.come(again(P0, 2))  # says Hello, serves nothing
    assert restarts(desk.kill(again(P0, 2))) == ["prefill-0"]
    desk.come(again(P0, 3))
    desk.submit("a")
    desk.life("a", "placed")
    assert not restarts(desk.kill(again(P0, 3)))
    assert desk.end("a").cause == f"{again(P0, 3)} is lost: gone; no prefill stage is up and takes requests"


@pytest.mark.clause("C6.7")
def test_a_stage_that_serves_has_all_its_restarts_again():
    desk = Desk((P0, D0), recovery=Recovery(restarts=1))
    for epoch in range(2, 8):
        desk.submit(f"r{epoch}")
        desk.life(f"r{epoch}")
        assert restarts(desk.kill(again(P0, epoch - 1))) == ["prefill-0"]
        desk.come(again(P0, epoch))
    assert not restarts(desk.kill(again(P0, 7)))


@pytest.mark.clause("C6.3", "C6.7")
@pytest.mark.parametrize("times", [0, 1, 3])
def test_starts_that_fail_are_counted_and_end_in_a_fault(times):
    desk = Desk(recovery=Recovery(restarts=times))
    started = restarts(desk.kill(P0))
    while started:
        times -= 1
        effects = desk.did(desk.c.start_failed("prefill-0", desk.now))
        started = restarts(effects)
    assert times == 0
    if desk.log and orders(desk.log, fx.Restart):
        assert "was started again" in orders(desk.log, fx.Fault)[-1].cause
        assert "given up" in orders(desk.log, fx.Fault)[-1].cause
    assert isinstance(desk.c.start_failed("prefill-0", desk.now)[0], fx.Ignored)
    desk.submit("a")
    assert desk.at("a")[1] == P1, "the others serve on"


@pytest.mark.clause("C6.3", "C6.7")
def test_a_stage_that_is_waited_for_no_longer_is_welcome_nevertheless():
    desk = Desk((P0, D0))
    desk.did(desk.c.peer_unjoinable(P0, desk.now))
    desk.submit("a")
    effects = desk.did(desk.c.start_failed("prefill-0", desk.now, final="nobody started it"))
    assert not restarts(effects)
    assert [fault.cause for fault in orders(effects, fx.Fault)] == ["nobody started it"]
    assert desk.end("a").cause == "no prefill stage is up and takes requests"
    desk.come(again(P0))
    desk.submit("b")
    desk.life("b")
    assert desk.end("b").ending is fx.Ending.FINISHED


@pytest.mark.clause("C6.4", "C6.7")
def test_a_late_word_of_the_lost_life_does_not_count_as_service_of_the_next():
    """The messages of a dead process may still be read after its end was seen."""
    desk = Desk((P0, D0), recovery=Recovery(restarts=1))
    desk.submit("a")
    old = desk.life("a", "reserved")
    desk.kill(D0)
    for message in (Received(old), Retired(old)):
        desk.hear(D0, message)
    effects = desk.did(desk.c.start_failed("decode-0", desk.now))
    assert not restarts(effects)
    assert "given up" in orders(effects, fx.Fault)[0].cause
    assert "no decode stage is up" in desk.end("a").cause


@pytest.mark.clause("C1.3", "C1.4", "C6.5", "C6.7")
def test_a_life_that_does_not_end_says_nothing_of_the_lives_after_it():
    desk = Desk((P0, D0))

    def never_ended(peer):
        return desk.did(desk.c.never_ended(peer, desk.now, f"{peer} has not ended"))

    desk.kill(P0)
    assert isinstance(never_ended(P0)[0], fx.Ignored), "its end was seen, and its successor is being started"
    desk.come(again(P0))
    desk.lose(again(P0))
    desk.submit("a")
    assert isinstance(never_ended(P0)[0], fx.Ignored), "another life's end is waited for"
    assert isinstance(desk.c.start_failed(P0.name, desk.now)[0], fx.Ignored), "and no start is under way"
    assert restarts(desk.join(again(P0))) == [P0.name]
    assert isinstance(never_ended(again(P0))[0], fx.Ignored)
    desk.come(again(P0, 3))
    desk.life("a")
    assert desk.end("a").ending is fx.Ending.FINISHED
    desk.lose(again(P0, 3))
    desk.submit("b")
    assert [fault.cause for fault in orders(never_ended(again(P0, 3)), fx.Fault)] == [f"{again(P0, 3)} has not ended"]
    assert desk.end("b").cause == "no prefill stage is up and takes requests"
    assert not restarts(desk.join(again(P0, 3)))


# -- requests wait for a stage that is expected ----------------------------------------------------------------------


@pytest.mark.clause("C2.6", "C6.7")
@pytest.mark.parametrize("victim", [P0, D0])
def test_requests_wait_for_a_stage_that_is_started_again(victim):
    desk = Desk((P0, D0))
    desk.submit("a")
    old = desk.life("a", "computing")
    desk.kill(victim)
    desk.submit("b")
    assert [desk.phase(name) for name in "ab"] == [WAITING, WAITING]
    survivor = D0 if victim == P0 else P0
    desk.hear(survivor, Retired(old))
    desk.come(again(victim))
    for name in "ab":
        desk.life(name)
        assert desk.end(name).ending is fx.Ending.FINISHED
    assert desk.balanced()


@pytest.mark.clause("C2.6", "C6.7")
def test_requests_wait_where_both_stages_are_started_again():
    desk = Desk((P0, D0))
    desk.submit("a")
    desk.life("a", "computing")
    desk.kill(P0)
    desk.kill(D0)
    desk.submit("b")
    assert [desk.phase(name) for name in "ab"] == [WAITING, WAITING]
    desk.come(again(D0))
    desk.come(again(P0))
    for name in "ab":
        desk.life(name)
        assert desk.end(name).ending is fx.Ending.FINISHED
    assert desk.balanced()


@pytest.mark.clause("C6.3", "C6.7")
def test_what_waits_for_a_stage_that_is_given_up_fails_with_both_causes():
    desk = Desk((P0, D0), recovery=Recovery(restarts=1))
    desk.submit("a")
    desk.life("a", "computing")
    desk.kill(P0)
    desk.submit("b")
    desk.did(desk.c.start_failed("prefill-0", desk.now))
    assert desk.end("a").cause == f"{P0} is lost: gone; no prefill stage is up and takes requests"
    assert desk.end("b").cause == "no prefill stage is up and takes requests"


@pytest.mark.clause("C2.4", "C6.7")
@pytest.mark.parametrize("victim", [P0, D0])
def test_a_request_that_the_stage_it_waited_for_cannot_hold_fails_when_that_is_known(victim):
    """A stage that comes back may have less memory than before; nobody waits for ever for what it had."""
    desk = Desk((P0, D0))
    desk.kill(victim)
    desk.submit("small")
    desk.submit("large", request(64, 64))
    desk.come(again(victim), blocks=3)
    assert desk.end("large").cause == "no connected pair of stages that is left can hold the request"
    desk.life("small")
    assert desk.end("small").ending is fx.Ending.FINISHED


@pytest.mark.clause("C1.1", "C2.5")
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_request_that_waits_again_is_aborted_like_any_that_waits(name):
    desk = Desk((P0, D0))
    desk.submit("a")
    old = desk.life("a", "computing")
    desk.kill(P0)
    desk.submit("b")
    effects = desk.did(desk.c.abort(RequestKey(name), desk.now))
    assert not sent(effects)
    assert (desk.end(name).ending, desk.c.waiting) == (fx.Ending.CANCELLED, 1)
    desk.submit(name)  # C1.1
    desk.hear(D0, Retired(old))
    desk.come(again(P0))
    for key in "ab":
        desk.life(key)
    assert [end.ending for end in desk.ends(name)] == [fx.Ending.CANCELLED, fx.Ending.FINISHED]
    assert desk.balanced()


@pytest.mark.clause("C1.1")
def test_the_outcome_of_a_request_that_began_again_is_told_once():
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", "committed")
    desk.lose(p)
    desk.life("a", "finished")
    for message in (Received(old), Finished(old, FinishReason.STOP), Failed(old, "no")):
        desk.hear(d, message)
    desk.join(p)
    assert desk.end("a").ending is fx.Ending.FINISHED


# -- what was delivered ----------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.2", "C6.3")
def test_a_request_of_which_tokens_were_delivered_fails_with_the_cause():
    desk = Desk()
    desk.submit("a")
    _, _, d = desk.at("a")
    desk.life("a", "output")
    desk.lose(d)
    assert (desk.end("a").ending, desk.end("a").peer) == (fx.Ending.FAILED, d)
    assert (
        desk.end("a").cause
        == f"{d} is lost: gone, after 2 tokens were delivered (recovery.mode = recompute would go on from them)"
    )
    assert not desk.tells("a", fx.Requeued)


@pytest.mark.clause("C6.2", "A1")
def test_or_it_is_recomputed_from_its_prompt_and_these():
    desk = Desk(recovery=Recovery(recompute=True))
    what = request(5, 6, temperature=0.0, stop_token_ids=(3,))
    desk.submit("a", what)
    old, p, d = desk.at("a")
    desk.life("a", "output")
    effects = desk.kill(d)
    new, second_p, second_d = desk.at("a")
    expected = msgspec.structs.replace(
        what, prompt=(*what.prompt, 7, 8), sampling=msgspec.structs.replace(what.sampling, max_tokens=4)
    )
    assert sent(effects, Reserve) == [(second_d, Reserve(new, 1, expected, second_p))]
    assert expected.max_length == what.max_length, "it never needs more than it did (C2.4)"
    desk.life("a", "activated")
    # and it is lost once more, having delivered one more
    desk.hear(second_d, Output(new, 0, (9,), (2,)))
    desk.hear(second_p, Retired(new))
    desk.come(again(d))
    effects = desk.kill(second_d)
    third, third_p, third_d = desk.at("a")
    ((_, reserve),) = sent(effects, Reserve)
    assert (reserve.request.prompt, reserve.request.sampling.max_tokens) == ((*what.prompt, 7, 8, 9), 3)
    desk.life("a", "activated")
    desk.hear(third_d, Output(third, 0, (10, 11), (3, 3)))
    desk.hear(third_d, Output(third, 2, (12,), (4,)))
    assert desk.tells("a", fx.Tokens) == [
        fx.Tokens(0, (7, 8), (1, 1)), fx.Tokens(2, (9,), (2,)), fx.Tokens(3, (10, 11), (3, 3)),
        fx.Tokens(5, (12,), (4,)),
    ], "positions are the caller's: one answer, without a gap"  # fmt: skip
    desk.hear(third_d, Finished(third, FinishReason.LENGTH))
    assert desk.end("a").ending is fx.Ending.FINISHED
    for transfer, peer in ((old, p), (third, third_p), (third, third_d)):
        desk.hear(peer, Retired(transfer))
    assert desk.balanced()


@pytest.mark.clause("C6.3")
def test_what_cannot_be_recomputed_says_why():
    desk = Desk(recovery=Recovery(recompute=True))
    desk.submit("a", request(4, 8, stop=("end",)))
    t, _, d = desk.at("a")
    desk.life("a", "activated")
    desk.hear(d, Output(t, 0, (7, 8)))
    desk.lose(d)
    why = "stop texts may span the tokens that were delivered"
    assert desk.end("a").cause == f"{d} is lost: gone; it cannot be recomputed: {why}"


@pytest.mark.clause("C7.1", "A1")
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("what", "reason"),
    [(request(4, 2), FinishReason.LENGTH), (request(4, 8, stop_token_ids=(8,)), FinishReason.STOP)],
    ids=["length", "stop"],
)
def test_a_request_all_of_whose_tokens_were_delivered_has_finished(recompute, what, reason):
    desk = Desk(recovery=Recovery(recompute=recompute))
    desk.submit("a", what)
    t, _, d = desk.at("a")
    desk.life("a", "activated")
    desk.hear(d, Output(t, 0, (7, 8)))
    desk.lose(d)
    assert (desk.end("a").ending, desk.end("a").reason) == (fx.Ending.FINISHED, reason)


@pytest.mark.clause("C6.3", "C6.7")
def test_a_pair_that_does_not_get_on_is_avoided_and_not_preferred():
    """D hangs: P's chunks to it fail, again and again, while another D is free."""
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", "computing")
    desk.hear(p, Failed(old, "late", (0,), unmoved=True))
    assert desk.at("a")[1:] != (p, d)


@pytest.mark.clause("C2.6", "C6.3")
def test_a_stage_that_has_no_room_is_preferred_no_more():
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", "reserved")
    desk.kill(p)
    new, _, again = desk.at("a")
    assert (new != old, again) == (True, d), "what is left of its KV is there"
    desk.hear(d, Rejected(new, "full", retry=True))
    filler = desk.c._peers[d]
    filler.ledger.take(TransferId("f" * 32), 1)  # the other is the less loaded one now
    desk.now += 1.0
    desk.did(desk.c.expire(desk.now))
    assert desk.at("a")[2] != d


@pytest.mark.clause("C2.4", "C6.3")
def test_what_has_grown_beyond_every_prefill_stage_fails_with_both_causes():
    desk = Desk((), recovery=Recovery(recompute=True))
    desk.come(P0, blocks=1)
    desk.come(D0)
    desk.come(D1)
    desk.submit("a", request(15, 16))
    _, _, d = desk.at("a")
    desk.life("a", "output")
    desk.kill(d)
    assert desk.end("a").cause == (
        f"{d} is lost: gone; no connected pair of stages that is left can hold the request"
    )  # fmt: skip


# -- connections -----------------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.2", "C6.4", "C2.5")
@pytest.mark.parametrize("by", ["P", "D"])
@pytest.mark.parametrize("step", EXPOSED)
def test_a_broken_connection_between_living_stages_costs_its_requests_nothing(step, by):
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", step)
    effects = desk.hear(*((p, PeerDown(d, False, "reset")) if by == "P" else (d, PeerDown(p, False, "reset"))))
    assert not restarts(effects)
    assert not orders(effects, fx.Kill), "both live"
    new, second_p, second_d = desk.at("a")
    assert new != old
    assert (second_p, second_d) != (p, d)
    desk.life("a")
    if step != "placed":
        assert sent(effects, Cancel) == [(p, Cancel(old)), (d, Cancel(old))]
        assert sent(desk.hear(p, Retired(old)), Release) == [(d, Release(old))]
    desk.hear(d, Retired(old))
    assert desk.end("a").ending is fx.Ending.FINISHED
    assert desk.balanced()


@pytest.mark.clause("C6.4")
def test_a_severed_writer_is_released_from_and_its_request_begins_elsewhere():
    desk = Desk()
    desk.submit("a")
    old, p, d = desk.at("a")
    desk.life("a", "computing")
    effects = desk.hear(d, PeerDown(p, True, "severed"))
    words = [message for peer, message in sent(effects) if peer == d]
    assert words[:2] == [Cancel(old), Release(old)]
    desk.hear(d, Retired(old))
    assert desk.c.credits_out(old) == (True, False), "P may still read its own memory"
    desk.life("a")
    desk.hear(p, Retired(old))
    assert desk.balanced()


@pytest.mark.clause("C6.3")
@pytest.mark.parametrize("recovery", [FAIL_CLOSED, Recovery(restarts=0)], ids=["off", "no restarts"])
def test_without_restarts_a_broken_connection_between_the_only_two_stages_is_the_end_with_both_causes(recovery):
    desk = Desk((P0, D0), recovery=recovery)
    desk.submit("a")
    desk.life("a", "computing")
    effects = desk.hear(D0, PeerDown(P0, False, "reset"))
    both = f"the connection from {P0} to {D0} is down: reset"
    if recovery.attempts:
        both += "; no connected pair of stages that is left can hold the request"
    assert desk.end("a").cause == both
    assert not orders(effects, fx.Ask)
    assert not lost(desk.wait())
    desk.submit("b")
    assert desk.end("b").cause == "no connected pair of stages that is left can hold the request"


def lost(effects: list) -> list[PeerId]:
    return [e.peer for e in orders(effects, fx.Kill)]


@pytest.mark.clause("C6.2", "C6.4", "C1.4", "C2.5")
@pytest.mark.parametrize("by", ["P", "D"])
@pytest.mark.parametrize("step", EXPOSED)
def test_the_only_two_stages_serve_again_once_one_of_them_was_started_again(step, by):
    """Field failure 26: the pair was broken for good."""
    desk = Desk((P0, D0))
    desk.submit("a")
    old = desk.life("a", step)
    effects = desk.hear(*((P0, PeerDown(D0, False, "reset")) if by == "P" else (D0, PeerDown(P0, False, "reset"))))
    assert [e.peer for e in orders(effects, fx.Ask)] == [P0, D0], "one of them may be dying, or hang"
    assert not lost(effects)
    assert desk.phase("a") is WAITING
    desk.submit("b")
    desk.c.heard(P0, desk.now)
    desk.c.heard(D0, desk.now)
    assert desk.c.next_deadline() == desk.now + Deadlines().control
    assert not lost(desk.wait(Deadlines().control - 0.1)), "a death would be noticed meanwhile"
    effects = desk.wait(0.1)
    assert lost(effects) == [P0], "whatever decodes at D goes on"
    assert "both live" in orders(effects, fx.Kill)[0].cause
    assert restarts(desk.join(P0)) == ["prefill-0"]
    if desk.c.phase(old) is ENDED and desk.c.credits_out(old)[1]:
        desk.hear(D0, Retired(old))
    desk.come(again(P0))
    for name in "ab":
        desk.life(name)
        assert desk.end(name).ending is fx.Ending.FINISHED
    assert desk.balanced()
    assert not desk.c._broken
    assert not desk.c._mended, "it serves"
    assert desk.c.next_deadline() is None


@pytest.mark.clause("C6.4")
@pytest.mark.parametrize("decoding", [True, False])
def test_who_was_started_again_less_often_is_lost_but_not_while_it_decodes(decoding):
    desk = Desk((P0, D0))
    desk.submit("a")
    old = desk.life("a", "output")
    desk.kill(P0)
    desk.come(again(P0))
    if not decoding:
        desk.hear(D0, Finished(old, FinishReason.LENGTH))
        desk.c._restarts["prefill-0"] = 1  # that word said that D serves
    desk.hear(again(P0), PeerDown(D0, False, "not within deadline.connect"))
    assert lost(desk.wait()) == [again(P0) if decoding else D0]


@pytest.mark.clause("C6.7", "C6.4")
def test_a_handshake_that_never_came_to_an_end_is_mended_like_a_connection_that_broke():
    desk = Desk((P0,))
    desk.hear(D0, Hello(D0, Role.DECODE, Capacity(100, 4, 8, 16, 1000), b"e"))
    desk.hear(P0, Connected(D0))
    desk.submit("a")
    desk.hear(D0, PeerDown(P0, True, "T2: not within deadline.connect"))
    assert desk.phase("a") is WAITING
    assert lost(desk.wait()) == [P0]


@pytest.mark.clause("C6.7")
def test_a_moment_that_passes_while_others_speak_is_not_missed():
    desk = Desk((P0, D0, P1))
    desk.submit("a")
    t, p, d = desk.at("a")
    alone = P1 if p == P0 else P0
    desk.life("a", "reserved")
    desk.hear(alone, PeerDown(d, False, "reset"))
    desk.now += 60.0
    desk.hear(p, Progress(t, 1))
    assert (desk.c.next_deadline() or desk.now + 1) <= desk.now
    assert lost(desk.wait(0.0)) == [alone]


@pytest.mark.clause("C6.4")
@pytest.mark.parametrize("hangs", [P0, D0], ids=["P", "D"])
def test_of_two_that_are_not_connected_the_one_that_hangs_is_lost(hangs):
    desk = Desk((P0, D0))
    desk.hear(P0, PeerDown(D0, False, "reset"))
    desk.c.heard(D0 if hangs == P0 else P0, desk.now)
    effects = desk.wait()
    assert lost(effects) == [hangs]
    assert "answers nothing" in orders(effects, fx.Kill)[0].cause


@pytest.mark.clause("C6.4")
@pytest.mark.parametrize("victim", [P0, D0], ids=["P", "D"])
def test_of_two_that_are_not_connected_one_that_dies_meanwhile_is_enough(victim):
    desk = Desk((P0, D0))
    desk.submit("a")
    desk.hear(D0 if victim == P0 else P0, PeerDown(victim, False, "reset"))
    desk.kill(victim)
    desk.come(again(victim))
    assert not lost(desk.wait())
    desk.life("a")
    assert desk.end("a").ending is fx.Ending.FINISHED


@pytest.mark.clause("C6.2", "C6.4")
@pytest.mark.parametrize("alone", [P0, D0], ids=["P", "D"])
def test_who_has_nobody_else_is_lost_and_never_one_that_serves_others(alone):
    others = (D0,) if alone == P0 else (P0, P1)
    desk = Desk((P0, P1, D0) if alone == P0 else (P0, D0, D1))
    other = others[0]
    desk.submit("busy")
    desk.hear(alone, PeerDown(other, False, "reset"))
    assert lost(desk.wait()) == [alone]
    assert restarts(desk.join(alone)) == [alone.name]


@pytest.mark.clause("C6.2", "C6.4")
def test_who_has_lost_all_its_connections_is_lost_rather_than_each_of_its_partners():
    desk = Desk((P0, P1, D0))
    for p in (P0, P1):
        desk.hear(p, PeerDown(D0, False, "reset"))
        desk.c.heard(p, desk.now)
    desk.c.heard(D0, desk.now)
    assert lost(desk.wait()) == [D0]
    desk.join(D0)
    desk.come(again(D0))
    assert not lost(desk.wait())


@pytest.mark.clause("C6.2", "C6.4")
def test_where_others_serve_in_its_place_nobody_is_lost_before_that_costs_nothing():
    desk = Desk(slots=1)
    desk.submit("a")
    _, p, d = desk.at("a")
    desk.life("a", "received")
    desk.hear(p, PeerDown(d, False, "reset"))
    assert not lost(desk.wait())
    assert not lost(desk.wait(1000.0)), "P has not retired it"
    assert desk.c.next_deadline() is None, "nothing is due, and nobody looks again and again"
    assert lost(desk.hear(p, Retired(next(iter(desk.c._entries))))) == [], "D decodes, and its books say so"
    desk.life("a")
    assert desk.end("a").ending is fx.Ending.FINISHED


@pytest.mark.clause("C6.2", "C6.4")
def test_a_connection_is_mended_once_nothing_is_on_the_stage_that_is_started_for_it():
    desk = Desk()
    desk.submit("a")
    t, p, d = desk.at("a")
    desk.life("a", "received")
    desk.hear(p, PeerDown(d, False, "reset"))
    assert not lost(desk.wait())
    desk.hear(p, Retired(t))
    desk.hear(d, Finished(t, FinishReason.LENGTH))
    assert lost(desk.hear(d, Retired(t))) == [p]
    desk.join(p)
    desk.come(again(p))
    assert desk.c.connected(again(p), d)


@pytest.mark.clause("C6.4")
def test_on_other_hosts_nobody_is_lost_for_a_connection_in_whose_place_others_serve():
    desk = Desk(recovery=Recovery(mend_idle=False))
    desk.hear(P0, PeerDown(D0, False, "reset"))
    assert not lost(desk.wait())
    effects = desk.kill(D1)
    assert lost(effects) == [D1], "it comes back"
    desk.did(desk.c.start_failed("decode-1", desk.now, final="it does not come back"))
    assert lost(desk.log) == [D1, P0], "now P0 has nobody else"


@pytest.mark.clause("C6.2", "T12")
@pytest.mark.parametrize("mend_idle", [True, False])
def test_what_a_connection_that_stays_broken_costs_does_not_grow_with_what_waits(mend_idle, monkeypatch):
    """Counted: each look at whether a stage could hold a request."""
    looks = 0
    holds = coordinator._holds

    def counted(peer, tokens):
        nonlocal looks
        looks += 1
        return holds(peer, tokens)

    def cost(waiting: int) -> tuple[int, int]:
        nonlocal looks
        desk = Desk(slots=2, recovery=Recovery(mend_idle=mend_idle))
        for n in range(4):
            desk.submit(f"busy{n}")
        used = [desk.at(f"busy{n}") for n in range(4)]
        assert {p for _, p, _ in used} == {P0, P1}
        assert {d for _, _, d in used} == {D0, D1}
        for n in range(waiting):
            desk.submit(f"w{n}")
        pair = next((p, d) for p in (P0, P1) for d in (D0, D1) if (p, d) not in {u[1:] for u in used})
        desk.hear(pair[0], PeerDown(pair[1], False, "reset"))
        assert not lost(desk.wait())
        looks = 0
        desk.submit("one more")
        submitted, looks = looks, 0
        desk.life("busy0")
        assert desk.end("busy0").ending is fx.Ending.FINISHED
        return submitted, looks

    monkeypatch.setattr(coordinator, "_holds", counted)
    assert cost(40) == cost(400)


@pytest.mark.clause("C6.2", "C6.4")
@pytest.mark.parametrize("how", ["a request", "given up", "drained", "down", "smaller"])
def test_a_connection_that_nobody_needed_is_mended_once_somebody_does(how):
    """What was found of it holds until the stages change, or a request comes that only this pair can hold."""
    desk = Desk((), recovery=Recovery(mend_idle=False))
    for peer in (P0, D0):
        desk.come(peer)
    for peer in (P1, D1):
        desk.come(peer, blocks=4 if how == "a request" or (how, peer) == ("smaller", D1) else 100)
    desk.hear(P0, PeerDown(D0, False, "reset"))
    for peer in (P0, D0):
        desk.c.heard(peer, desk.now)
    assert not lost(desk.wait())
    if how == "a request":
        assert not lost(desk.submit("small", request(8, 8)))
        assert lost(desk.submit("large", request(70, 40))) == [P0]
    elif how == "given up":
        desk.kill(D1)
        assert not lost(desk.wait()), "it is expected again"
        assert lost(desk.did(desk.c.start_failed(D1.name, desk.now, final="enough"))) == [P0]
    elif how == "drained":
        assert lost(desk.did(desk.c.drain(D1, desk.now))) == [P0]
    elif how == "down":
        assert lost(desk.hear(P0, PeerDown(D1, False, "reset"))) == [P0], "it has nobody"
    else:
        desk.kill(P1)
        assert not lost(desk.submit("large", request(70, 40))), "P1 may come to hold it"
        assert lost(desk.come(again(P1), blocks=4)) == [P0]


@pytest.mark.clause("C6.3", "C6.7")
def test_what_is_not_mended_by_starting_them_again_is_said_and_its_requests_fail_with_both_causes():
    desk = Desk((P0, D0), recovery=Recovery(attempts=9, restarts=2))
    desk.submit("a")
    stages = {P0.name: P0, D0.name: D0}
    order = []
    for _ in range(20):
        p, d = stages[P0.name], stages[D0.name]
        desk.hear(p, PeerDown(d, True, "no route"))
        effects = desk.wait()
        if not lost(effects):
            break
        (victim,) = lost(effects)
        order.append(victim.name)
        assert restarts(desk.join(victim)) == [victim.name]
        stages[victim.name] = again(victim, victim.epoch + 1)
        desk.hear(stages[victim.name], Hello(stages[victim.name], role(victim), Capacity(100, 4, 8, 16, 1000), b"e"))
    assert order == [P0.name, D0.name], "the one that was started less often, and each pair so often in a row"
    assert "has not helped" in orders(desk.log, fx.Fault)[-1].cause
    assert desk.end("a").cause == (
        f"the connection from {P0} to {D0} is down: no route; no connected pair of stages that is left can hold the"
        " request"
    )
    desk.submit("b")
    assert desk.end("b").ending is fx.Ending.FAILED, "it does not wait for ever"
    assert desk.c.next_deadline() is None


@pytest.mark.clause("C6.3")
@pytest.mark.parametrize("bound", ["of the pair", "of its stages"])
def test_a_connection_that_is_given_up_is_said_once_also_where_others_serve(bound):
    """Nothing heals it any more, and no request that fails would tell."""
    desk = Desk(recovery=Recovery(restarts=2))
    p = P0
    if bound == "of the pair":
        for _ in range(2):
            desk.hear(p, PeerDown(D0, False, "no route"))
            assert lost(desk.wait()) == [p]
            assert restarts(desk.join(p)) == [p.name]
            p = again(p, p.epoch + 1)
            desk.come(p)
            desk.c._restarts.clear()  # it serves with the other one
    else:
        desk.c._restarts.update({P0.name: 2, D0.name: 2})
    desk.hear(p, PeerDown(D0, False, "no route"))
    assert not said(desk.log), "not before both had time to say whether they live"
    assert not lost(desk.wait())
    (cause,) = said(desk.log)
    assert cause == (
        f"C6.3: {p} and {D0} are not connected, and starting one of them again has not helped: they are left as they"
        " are; others serve in their place"
    )
    desk.submit("a")
    desk.life("a")
    assert desk.end("a").ending is fx.Ending.FINISHED
    desk.wait()
    assert len(said(desk.log)) == 1
    assert desk.c.next_deadline() is None


def said(effects: list) -> list[str]:
    return [e.cause for e in orders(effects, fx.Fault) if "has not helped" in e.cause]


@pytest.mark.clause("C6.2")
def test_a_connection_of_a_stage_that_is_drained_or_of_a_service_that_stops_is_not_mended():
    desk = Desk((P0, D0))
    desk.hear(P0, PeerDown(D0, False, "reset"))
    desk.did(desk.c.drain(P0, desk.now))
    assert not lost(desk.wait())
    desk = Desk((P0, D0))
    desk.hear(P0, PeerDown(D0, False, "reset"))
    desk.did(desk.c.fatal("enough", desk.now))
    assert not lost(desk.wait())


@pytest.mark.clause("C6.3")
def test_a_request_that_only_a_broken_pair_can_hold_waits_until_it_is_mended():
    desk = Desk(())
    desk.come(P0)
    desk.come(D0)
    desk.come(P1, blocks=4)
    desk.come(D1, blocks=4)
    filler = [f"f{n}" for n in range(3)]
    for name in filler:
        desk.submit(name)
    desk.hear(P0, PeerDown(D0, False, "reset"))
    desk.submit("large", request(70, 40))
    assert desk.phase("large") is WAITING
    assert lost(desk.wait()) == [P0]
    desk.join(P0)
    desk.come(again(P0))
    assert desk.at("large")[1:] == (again(P0), D0)


@pytest.mark.clause("C6.2")
@pytest.mark.parametrize("side", ["P", "D"])
def test_a_chunk_that_did_not_get_there_is_no_fault_of_the_request(side):
    """``unmoved``: the bytes did not arrive, so another generation may be luckier; any other failure is final."""
    desk = Desk()
    for name, unmoved in (("a", True), ("b", False)):
        desk.submit(name)
        t, p, d = desk.at(name)
        desk.life(name, "computing")
        desk.hear(p if side == "P" else d, Failed(t, "no", unmoved=unmoved))
        assert bool(desk.tells(name, fx.Requeued)) is unmoved
        assert bool(desk.ends(name)) is not unmoved


# -- stages that nobody can join, and stages that come back by themselves --------------------------------------------


@pytest.mark.clause("C6.4")
def test_a_stage_that_nobody_can_join_is_expected_again_and_what_it_may_touch_stays_held():
    desk = Desk((P0, D0))
    desk.submit("a")
    old = desk.life("a", "computing")
    desk.lose(P0)
    effects = desk.did(desk.c.peer_unjoinable(P0, desk.now))
    assert restarts(effects) == ["prefill-0"]
    assert not restarts(desk.did(desk.c.peer_unjoinable(P0, desk.now))), "once"
    assert desk.c.credits_out(old) == (True, True)
    assert desk.c.unjoined("prefill-0") == (P0,)
    desk.come(again(P0))
    desk.life("a")
    assert desk.end("a").ending is fx.Ending.FINISHED
    assert set(desk.out()) == {P0, D0}, "lost is not fenced"
    effects = desk.join(P0)  # somebody has seen to it
    assert desk.c.unjoined("prefill-0") == ()
    assert not restarts(effects)
    assert sent(effects, Release) == [(D0, Release(old))]
    desk.hear(D0, Retired(old))
    assert desk.balanced()


@pytest.mark.clause("C6.4")
def test_a_stage_that_is_joined_while_its_successor_starts_is_not_started_twice():
    desk = Desk((P0, D0))
    desk.lose(P0)
    assert restarts(desk.did(desk.c.peer_unjoinable(P0, desk.now))) == ["prefill-0"]
    assert not restarts(desk.join(P0)), "its successor is on its way"
    desk.come(again(P0))
    desk.submit("a")
    desk.life("a")
    assert desk.end("a").ending is fx.Ending.FINISHED


@pytest.mark.clause("C1.4", "C6.4")
@pytest.mark.parametrize("recovery", [Recovery(), Recovery(restarts=0)], ids=["restarts", "no-restarts"])
def test_a_newer_start_that_replaces_a_stage_takes_its_requests_over(recovery):
    desk = Desk((P0, D0), recovery=recovery)
    desk.submit("a")
    old = desk.life("a", "computing")
    effects = desk.come(again(P0))
    assert orders(effects, fx.Kill)[0].peer == P0
    assert not desk.ends("a")
    assert not restarts(desk.join(P0)), "it is there already"
    desk.hear(D0, Retired(old))
    desk.life("a")
    assert desk.at("a")[1] == again(P0)
    assert desk.end("a").ending is fx.Ending.FINISHED
    assert desk.balanced()


@pytest.mark.clause("C6.4")
def test_the_join_of_an_earlier_life_does_not_start_a_later_one_twice():
    desk = Desk((P0, D0))
    desk.come(again(P0, 2))  # replaces P0, which is lost and not joined yet
    assert restarts(desk.kill(again(P0, 2))) == ["prefill-0"]
    assert not restarts(desk.join(P0))
    desk.come(again(P0, 3))
    assert not restarts(desk.log[-1:])
    (view,) = [v for v in desk.c.peers() if v.role is Role.PREFILL]
    assert (view.peer, view.status) == (again(P0, 3), PeerStatus.UP)


# -- stages that shall go, and the end -------------------------------------------------------------------------------


@pytest.mark.clause("C6.2")
def test_a_stage_that_was_told_to_go_is_not_started_again():
    desk = Desk()
    desk.did(desk.c.drain(P0, desk.now))
    assert sent(desk.did(desk.c.dismiss(P0, desk.now)), Stop) == [(P0, Stop())]
    assert not restarts(desk.join(P0))
    desk.submit("a")
    assert desk.at("a")[1] == P1


@pytest.mark.clause("C6.4", "C6.7")
@pytest.mark.parametrize("meanwhile", ["nothing", "its channel ends", "it is told again", "everything stops"])
def test_a_dismissed_stage_that_does_not_exit_is_killed_and_not_started_again(meanwhile):
    desk = Desk()
    desk.did(desk.c.drain(P0, desk.now))
    desk.did(desk.c.dismiss(P0, desk.now))
    due = desk.now + Deadlines().shutdown
    assert desk.c.next_deadline() == due
    desk.now += 1.0
    match meanwhile:
        case "its channel ends":
            assert not orders(desk.lose(P0), fx.Kill), "it is about to exit"
        case "it is told again":
            assert not sent(desk.did(desk.c.dismiss(P0, desk.now)))
        case "everything stops":
            desk.did(desk.c.fatal("enough", desk.now))
    assert desk.c.next_deadline() == due
    assert not orders(desk.wait(due - desk.now - 0.5), fx.Kill)
    effects = desk.wait(0.5)
    (kill,) = orders(effects, fx.Kill)
    assert kill.peer == P0
    assert kill.cause.startswith("C6.7: deadline.shutdown of ")
    assert orders(effects, fx.Fault) or meanwhile == "its channel ends"
    assert not sent(desk.did(desk.c.dismiss(P0, desk.now))), "its end is coming"
    assert not restarts(desk.join(P0))
    assert P0 not in {view.peer for view in desk.c.peers()}
    if meanwhile != "everything stops":
        assert desk.c.next_deadline() is None
        desk.submit("a")
        assert desk.at("a")[1] == P1


@pytest.mark.clause("C6.2")
def test_a_drained_stage_that_dies_stays_away():
    """Who drained it wants nothing placed there; a new life of it would be given requests."""
    desk = Desk((P0, P1, D0))
    desk.submit("a")
    _, p, _ = desk.at("a")
    desk.life("a", "computing")
    desk.did(desk.c.drain(p, desk.now))
    assert not restarts(desk.kill(p))
    assert desk.at("a")[1] != p, "what was on it goes on elsewhere"
    assert not desk.ends("a")


@pytest.mark.clause("C6.2")
def test_nor_does_one_come_back_that_is_drained_between_its_loss_and_its_end():
    desk = Desk((P0, P1, D0))
    desk.lose(P0)
    desk.did(desk.c.drain(P0, desk.now))
    assert not restarts(desk.join(P0))
    desk = Desk((P0, D0))
    desk.lose(P0)
    desk.submit("a")
    assert desk.phase("a") is WAITING
    desk.did(desk.c.drain(P0, desk.now))
    assert desk.end("a").cause == "no prefill stage is up and takes requests"


@pytest.mark.clause("C6.2")
@pytest.mark.parametrize("how", ["dies", "is lost", "was lost", "waits"])
def test_once_everything_stops_nothing_begins_again(how):
    desk = Desk((P0, D0))
    desk.submit("a")
    desk.life("a", "computing")
    if how == "waits":
        desk.kill(P0)
        assert desk.phase("a") is WAITING
    if how == "was lost":
        desk.lose(P0)
    desk.did(desk.c.fatal("enough", desk.now))
    assert "enough" in desk.end("a").cause
    with pytest.raises(RuntimeClosed):
        desk.submit("b")
    effects = desk.lose(P0) if how == "is lost" else []
    effects += desk.join(P0)
    effects += desk.join(D0)
    assert not restarts(effects)
    assert isinstance(desk.c.start_failed("prefill-0", desk.now)[0], fx.Ignored)
    assert desk.c.closed


@pytest.mark.clause("C6.2")
def test_a_stage_that_comes_back_while_everything_stops_is_sent_home():
    desk = Desk((P0, D0))
    desk.kill(P0)
    desk.did(desk.c.fatal("enough", desk.now))
    assert sent(desk.come(again(P0)), Stop) == [(again(P0), Stop())]
    desk.join(again(P0))
    desk.join(D0)
    assert desk.c.closed


# -- nothing is kept -------------------------------------------------------------------------------------------------


@pytest.mark.clause("T12", "C2.5")
def test_nothing_is_kept_of_lost_generations_and_dead_stages():
    desk = Desk(recovery=Recovery(attempts=1000, restarts=1000, recompute=True), deadlines=Deadlines(),
                limits=Limits(waiting=8))  # fmt: skip
    alive = {peer.name: peer for peer in STAGES}
    for n in range(200):
        name = str(n)
        desk.submit(name)
        old, p, d = desk.at(name)
        step = STEPS[n % len(STEPS)]
        desk.life(name, step)
        victim = p if n % 2 else d
        survivor = d if victim is p else p
        desk.kill(victim)
        if desk.c.phase(old) is ENDED and desk.c.credits_out(old)[survivor is d]:
            desk.hear(survivor, Retired(old))
        alive[victim.name] = again(victim, victim.epoch + 1)
        desk.come(alive[victim.name])
        if desk.at(name)[0] != old:
            desk.life(name)
        else:  # D had everything
            desk.hear(d, Finished(old, FinishReason.LENGTH))
            desk.hear(d, Retired(old))
        assert desk.end(name).ending is fx.Ending.FINISHED, (name, step, desk.end(name))
    for peer in alive.values():  # their ends are closed
        for other in alive.values():
            if role(peer) is not role(other):
                for epoch in range(1, other.epoch):
                    desk.hear(peer, PeerDown(PeerId(other.name, epoch), True))
    assert desk.balanced()
    assert {v.peer for v in desk.c.peers()} == set(alive.values())
    assert all(len(v.connected) == 2 for v in desk.c.peers())
    assert desk.c.next_deadline() is None
    assert not desk.c._unclosed
    assert not desk.c._expected
    assert len(desk.c._restarts) <= len(STAGES)


@pytest.mark.clause("C4.1")
def test_acknowledgements_go_to_the_generation_that_was_received():
    desk = Desk()
    desk.submit("a")
    old, p, _ = desk.at("a")
    desk.life("a", "committed")
    desk.lose(p)
    new, second_p, second_d = desk.at("a")
    desk.life("a", "committed")
    assert sent(desk.hear(second_d, Received(new)), Ack) == [(second_p, Ack(new))]
    assert old != new
