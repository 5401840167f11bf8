"""The destination machine where the model does not reach: late answers, the engine's thread, closing connections."""

from __future__ import annotations

import threading

import pytest

from kvbaton.connector import Receipt
from kvbaton.engine import FinishReason, Request
from kvbaton.handoff import effects as fx
from kvbaton.handoff.destination import MAX_CHUNKS, Destination
from kvbaton.handoff.table import DestinationPhase
from kvbaton.identity import PeerId, TransferId, new_transfer_id
from kvbaton.messages import (
    MAX_MISSING,
    Commit,
    Failed,
    Finished,
    Output,
    PeerDown,
    Received,
    Rejected,
    Reserve,
    Reserved,
    Retired,
    Unproven,
)
from kvbaton.reservation import Reservation

P0, P1 = PeerId("prefill-0", 1), PeerId("prefill-1", 1)
REQUEST = Request((1, 2, 3))


def held(t: TransferId) -> Reservation:
    return Reservation(t, ((0,),), 0, 0)


def reserve(m: Destination, ordinal: int = 1, source: PeerId = P0) -> TransferId:
    t = new_transfer_id()
    assert m.reserve(Reserve(t, ordinal, REQUEST, source)) == [fx.Admit(t, REQUEST)]
    return t


def reserved(m: Destination, ordinal: int = 1, source: PeerId = P0) -> TransferId:
    t = reserve(m, ordinal, source)
    m.reserved(held(t))
    return t


def received(m: Destination, ordinal: int = 1) -> TransferId:
    t = reserved(m, ordinal)
    m.commit(Commit(t, 1))
    m.receipt(Receipt(P0, t, 0))
    return t


def sends(effects: list) -> list:
    return [e.message for e in effects if isinstance(e, fx.Send)]


def machine() -> Destination:
    m = Destination()
    m.peer_up(P0)
    m.peer_up(P1)
    return m


@pytest.mark.clause("C4.2", "C7.3", "C2.3")
def test_a_life_from_reserve_to_retired():
    m = machine()
    t = reserve(m)
    assert m.reserved(held(t))[:2] == [fx.Grant(t, P0, held(t)), fx.Send(Reserved(held(t)))]
    assert m.receipt(Receipt(P0, t, 1)) == []
    assert m.commit(Commit(t, 2, segments=9, nbytes=9, timings={"x": 1.0})) == []
    assert m.commit(Commit(t, 2)) == [fx.Ignored(t, "Commit", "equal commit")]  # C7.1: statistics do not count
    effects = m.receipt(Receipt(P0, t, 0))
    assert effects == [fx.Send(Received(t)), fx.Milestone(t, "received"), fx.Import(t, 3)]
    assert m.begin_import(t)
    m.imported(t)
    m.activated(t)
    assert sends(m.output(t, (5, 6), (1, 2))) == [Output(t, 0, (5, 6), (1, 2))]
    assert sends(m.output(t, (7,), (1,))) == [Output(t, 2, (7,), (1,))]
    assert m.output(t, ()) == []
    effects = m.finished(t, FinishReason.STOP)
    assert sends(effects) == [Finished(t, FinishReason.STOP)]
    assert fx.Suspend(t) in effects
    assert fx.Free(t) not in effects  # C5.3
    assert m.device_quiet(t)[:2] == [fx.Free(t), fx.Send(Retired(t))]
    assert len(m) == 0


@pytest.mark.clause("C2.2", "C5.2")
@pytest.mark.parametrize("words", [("release",), ("cancel", "release"), ("cancel", "cancel", "release", "release")])
def test_a_release_that_outruns_the_engines_answer_is_applied_after_it(words):
    m = machine()
    t = reserve(m)
    for word in words:
        getattr(m, word)(t)
    assert m.phase(t) is DestinationPhase.RESERVING
    assert sends(m.reserved(held(t))) == [Reserved(held(t)), Retired(t)]
    assert len(m) == 0


@pytest.mark.clause("C5.2")
def test_a_cancel_that_outruns_the_engines_answer_holds_the_memory():
    m = machine()
    t = reserve(m)
    m.cancel(t)
    assert sends(m.reserved(held(t))) == [Reserved(held(t))]
    assert m.phase(t) is DestinationPhase.HELD
    assert fx.Free(t) in m.release(t)


@pytest.mark.clause("C2.6")
@pytest.mark.parametrize("word", ["cancel", "release", None])
def test_a_refusal_ends_it_whatever_came_meanwhile(word):
    m = machine()
    t = reserve(m)
    if word:
        getattr(m, word)(t)
    assert m.refused(t, "full", retry=True) == [fx.Send(Rejected(t, "full", True))]
    assert len(m) == 0


@pytest.mark.clause("C1.3")
def test_an_import_that_was_taken_back_never_begins():
    m = machine()
    t = received(m)
    assert fx.Free(t) in m.cancel(t)
    assert not m.begin_import(t)
    assert isinstance(m.imported(t)[0], fx.Ignored)


@pytest.mark.clause("C1.3", "C5.3")
def test_an_import_that_has_begun_is_waited_for():
    m = machine()
    t = received(m)
    assert m.begin_import(t)
    effects = m.cancel(t)
    assert effects == [fx.Suspend(t)]
    assert isinstance(m.imported(t)[0], fx.Ignored)
    assert fx.Free(t) in m.device_quiet(t)


@pytest.mark.clause("C1.3", "C5.3")
def test_a_request_that_the_engine_may_have_activated_meanwhile_waits_for_the_device():
    m = machine()
    t = received(m)
    m.begin_import(t)
    m.imported(t)
    assert m.cancel(t) == [fx.Suspend(t)]  # "activated" may be on its way from the engine's thread
    assert isinstance(m.activated(t)[0], fx.Ignored)
    assert fx.Free(t) in m.device_quiet(t)


@pytest.mark.clause("C1.3")
def test_engine_and_pump_never_both_have_the_import():
    m = machine()
    for ordinal in range(1, 200):
        t = received(m, ordinal)
        gate = threading.Barrier(2)
        won: list[bool] = []

        def engine(t=t, gate=gate, won=won) -> None:
            gate.wait(10)
            won.append(m.begin_import(t))

        thread = threading.Thread(target=engine)
        thread.start()
        gate.wait(10)
        freed = fx.Free(t) in m.cancel(t)
        thread.join(10)
        assert won == [not freed]
        if not freed:
            m.device_quiet(t)
    assert len(m) == 0


@pytest.mark.clause("C6.4")
def test_a_release_waits_until_the_dead_writers_connection_is_quiet():
    m = machine()
    t, other = reserved(m), reserved(m, 2, P1)
    m.cancel(t)
    assert m.disconnect(P0) == [fx.DisconnectPeer(P0)]
    assert m.release(t) == []
    assert m.phase(t) is DestinationPhase.HELD
    assert m.release(t) == [fx.Ignored(t, "Release", "repeated")]
    effects = m.peer_down(P0, quiet=True)
    assert fx.Free(t) in effects
    assert sends(effects) == [PeerDown(P0, True), Retired(t)]
    assert m.phase(other) is DestinationPhase.RESERVED


@pytest.mark.clause("C6.4")
def test_without_a_fence_the_memory_stays_held_until_the_process_exits():
    m = machine()
    t = reserved(m)
    m.disconnect(P0)
    m.release(t)
    effects = m.peer_down(P0, quiet=False)
    assert any(isinstance(e, fx.Fault) and e.retained for e in effects)
    assert m.quarantined() == (t,)
    for event in (m.release, m.cancel, m.device_quiet):
        assert isinstance(event(t)[0], fx.Ignored)
    assert m.phase(t) is DestinationPhase.HELD
    m.stop()
    assert not m.drained


@pytest.mark.clause("C6.4")
def test_a_release_after_the_failed_fence_is_held_too():
    m = machine()
    t = reserved(m)
    m.disconnect(P0)
    m.peer_down(P0, quiet=False)
    effects = m.release(t)
    assert any(isinstance(e, fx.Fault) and e.retained for e in effects)
    assert m.quarantined() == (t,)


@pytest.mark.clause("C5.2", "C6.4")
def test_a_writer_that_has_retired_needs_no_fence():
    m = machine()
    t = reserved(m)
    m.cancel(t)
    m.peer_down(P0, quiet=False)  # by itself, while its process lives
    assert fx.Free(t) in m.release(t)  # C says so only after P's Retired


@pytest.mark.clause("C6.4")
def test_an_end_that_was_quiet_before_the_join_needs_no_second_proof():
    m = machine()
    t = reserved(m)
    m.cancel(t)
    m.peer_down(P0, quiet=True)
    assert m.phase(t) is DestinationPhase.HELD  # C has not released it
    m.disconnect(P0)
    assert fx.Free(t) in m.release(t)


@pytest.mark.clause("C6.6")
def test_without_a_coordinator_a_quiet_writer_frees_what_it_could_write():
    m = machine()
    t, other, late = reserved(m), received(m, 2), reserve(m, 3)
    m.orphaned()
    assert m.phase(t) is DestinationPhase.HELD
    assert m.phase(other) is None
    m.reserved(held(late))
    assert m.phase(late) is DestinationPhase.HELD
    assert not m.drained
    assert m.sources() == {P0}
    m.peer_down(P0, quiet=True)
    assert m.drained
    assert m.reserve(Reserve(new_transfer_id(), 9, REQUEST, P0))[0].message.cause == "this stage is stopping"


@pytest.mark.clause("C5.2")
def test_a_successful_revoke_frees_without_the_writers_help():
    m = machine()
    t = reserved(m)
    assert fx.Revoke(t) in m.cancel(t)
    assert fx.Free(t) in m.revoked(t)


@pytest.mark.clause("C7.2")
def test_a_write_past_the_count_names_its_writer():
    m = machine()
    t = received(m)
    effects = m.receipt(Receipt(P0, t, 1))
    (failed,) = sends(effects)
    assert failed.culprit == P0
    assert m.phase(t) is DestinationPhase.RECEIVED  # C ends it


@pytest.mark.clause("C7.2", "C1.4")
def test_a_receipt_of_another_epoch_counts_for_nothing():
    m = machine()
    t = reserved(m)
    m.commit(Commit(t, 1))
    effects = m.receipt(Receipt(PeerId(P0.name, 2), t, 0))
    assert isinstance(effects[0], fx.Violation)
    assert m.receipts(t) == frozenset()
    assert m.phase(t) is DestinationPhase.HELD


@pytest.mark.clause("C6.3")
def test_a_failure_says_what_is_missing_and_not_too_much_of_it():
    m = machine()
    t = reserved(m)
    m.commit(Commit(t, 1000))
    m.receipt(Receipt(P0, t, 0))
    (failed,) = sends(m.engine_failed(t, "no", unmoved=True))
    assert failed == Failed(t, "no", tuple(range(1, MAX_MISSING + 1)), unmoved=True)


@pytest.mark.clause("C9.3")
def test_sequences_cannot_grow_the_record_at_will():
    m = machine()
    t = reserved(m)
    assert isinstance(m.receipt(Receipt(P0, t, MAX_CHUNKS))[0], fx.Violation)
    t = reserved(m, 2)
    assert isinstance(m.commit(Commit(t, MAX_CHUNKS + 1))[0], fx.Violation)


@pytest.mark.clause("C1.2", "T12")
def test_nothing_is_kept_of_finished_transfers_and_restarted_writers():
    m = machine()
    for ordinal in range(1, 300):
        writer = PeerId("prefill-0", ordinal)
        m.peer_up(writer)
        t = reserved(m, ordinal, writer)
        m.cancel(t)
        m.disconnect(writer)
        m.release(t)
        m.peer_down(writer, quiet=True)
        for event in (m.cancel, m.release, m.imported, m.device_quiet):
            assert isinstance(event(t)[0], fx.Ignored)
        assert isinstance(m.receipt(Receipt(writer, t, 0))[0], fx.Ignored)
        assert isinstance(m.commit(Commit(t, 1))[0], fx.Ignored)
    assert len(m) == len(m._importable) == 0
    assert len(m._links) <= 2


@pytest.mark.clause("C6.2")
def test_stop_frees_what_no_writer_can_touch_and_waits_for_the_rest():
    m = machine()
    t, closing, running = reserved(m), reserved(m, 2, P1), received(m, 3)
    m.begin_import(running)
    m.disconnect(P1)
    m.stop()
    assert m.phase(t) is None
    assert m.phase(closing) is DestinationPhase.HELD
    assert not m.drained
    m.peer_down(P1, quiet=True)
    m.device_quiet(running)
    assert m.drained


@pytest.mark.clause("T3", "T5", "C5.2", "C6.7")
def test_a_receipt_that_comes_after_a_cancel_proves_that_its_chunk_is_written_no_more():
    m = machine()
    t = reserved(m)
    m.receipt(Receipt(P0, t, 0))
    m.cancel(t)
    assert m.receipt(Receipt(P0, t, 3)) == []
    assert isinstance(m.receipt(Receipt(P0, t, 3))[0], fx.Ignored)
    assert m.unproven(Unproven(t, ((0, 1), (2, 4)))) == [], "2 is still to come"
    assert m.receipt(Receipt(P0, t, 1)) == [], "of which P knows more than D"
    assert m.phase(t) is DestinationPhase.HELD
    assert sends(m.receipt(Receipt(P0, t, 2))) == [Received(t)]
    assert m.phase(t) is DestinationPhase.HELD, "P has still to say that it writes no more"
    assert sends(m.release(t)) == [Retired(t)]
    assert isinstance(m.unproven(Unproven(t, ((0, 1),)))[0], fx.Ignored)


@pytest.mark.clause("T3", "C7.1")
def test_where_everything_was_in_before_p_asked_d_answers_at_once_and_every_time():
    m = machine()
    t = reserved(m)
    m.receipt(Receipt(P0, t, 0))
    m.cancel(t)
    for _ in range(2):
        assert sends(m.unproven(Unproven(t, ((0, 1),)))) == [Received(t)]


@pytest.mark.clause("C9.3", "C7.2")
def test_no_run_of_chunks_is_so_long_that_it_hurts():
    m = machine()
    t = reserved(m)
    m.cancel(t)
    assert isinstance(m.unproven(Unproven(t, ((0, 1 << 60),)))[0], fx.Violation)
    assert m.unproven(Unproven(t, ((5, -(1 << 60)), (0, 1)))) == []
