"""The source machine where the model does not reach: two-sided quiet, the engine's part, memory."""

from __future__ import annotations

import time

import pytest

from kvbaton.connector import Completion, Outcome
from kvbaton.engine import Request
from kvbaton.errors import CapabilityError, PeerLost, SegmentError, TransportError
from kvbaton.handoff import effects as fx
from kvbaton.handoff.source import Source
from kvbaton.handoff.table import ChunkState, SourcePhase
from kvbaton.identity import PeerId, TransferId, new_transfer_id
from kvbaton.messages import Commit, Connected, Failed, PeerDown, Prefill, Progress, Retired, Unproven
from kvbaton.reservation import Reservation

D0, D1 = PeerId("decode-0", 1), PeerId("decode-1", 1)
REQUEST = Request((1, 2, 3))


def prefill(machine: Source, ordinal: int = 1, to: PeerId = D0) -> TransferId:
    t = new_transfer_id()
    machine.prefill(Prefill(t, ordinal, REQUEST, Reservation(t, ((0,),), 0, 0), to))
    return t


def post(machine: Source, t: TransferId, chunks: int = 1, last: bool = True) -> None:
    first = machine.next_sequence(t)
    machine.computed(t, chunks, last)
    for i in range(first, first + chunks):
        machine.source_ready(t, i)
        machine.submitted(t, i)


def done(t: TransferId, i: int, source: bool = True, target: bool = True, how: Outcome = Outcome.DONE) -> Completion:
    return Completion(t, i, how, source, target)


def sends(effects: list) -> list:
    return [e.message for e in effects if isinstance(e, fx.Send)]


@pytest.mark.clause("C3.4", "C4.1", "C5.1")
def test_a_life_from_prefill_to_retired():
    m = Source()
    t = new_transfer_id()
    held = Reservation(t, ((0,),), 0, 0)
    assert m.prefill(Prefill(t, 1, REQUEST, held, D0))[0] == fx.Compute(t, REQUEST, held, D0)
    assert m.next_sequence(t) == 0
    assert m.computed(t, 2, last=False) == [fx.Send(Progress(t, 2))]
    assert m.computed(t, 0, last=False) == [fx.Send(Progress(t, 2))]
    assert m.computed(t, 1, last=True) == [fx.Send(Progress(t, 3))]
    assert m.next_sequence(t) is None
    assert not m.may_submit(t, 0)
    assert fx.Post(t, 0) in m.source_ready(t, 0)
    assert m.may_submit(t, 0)
    m.source_ready(t, 1)
    assert m.source_ready(t, 2) == [fx.Post(t, 2), fx.ReleaseCompute(t)]
    m.submitted(t, 0)
    m.submitted(t, 2)  # in any order
    assert sends(m.submitted(t, 1)) == [Commit(t, 3)]
    for i in range(3):
        assert m.completion(done(t, i)) == []
    assert m.ack(t) == [
        fx.Acknowledge(t), fx.Milestone(t, "acknowledged"), fx.Free(t), fx.Send(Retired(t)),
        fx.Milestone(t, "source_retired"),
    ]  # fmt: skip
    assert len(m) == 0


@pytest.mark.clause("C5.1", "T5")
def test_bytes_under_way_after_the_source_is_quiet_are_settled_by_the_receipts_behind_the_ack():
    m = Source()
    t = prefill(m)
    post(m, t)
    assert m.completion(done(t, 0, target=False)) == []
    assert m.chunks(t) == {0: ChunkState.SENT}
    assert sends(m.ack(t)) == [Retired(t)]


@pytest.mark.clause("C5.1", "C5.2", "C6.4")
def test_a_cancelled_transfer_frees_its_source_but_does_not_promise_to_write_no_more():
    m = Source()
    t = prefill(m)
    post(m, t)
    m.completion(done(t, 0, target=False))
    effects = m.cancel(t)
    assert fx.Free(t) in effects  # C5.1: nobody reads the source any more
    assert sends(effects) == [Unproven(t, ((0, 1),))]  # Retired would let C release D's memory
    assert m.phase(t) is SourcePhase.DRAINING
    assert sends(m.completion(done(t, 0))) == [Retired(t)]  # a later word that proves it


@pytest.mark.clause("C6.4")
def test_the_end_of_the_destinations_process_proves_its_targets():
    m = Source()
    t, other = prefill(m), prefill(m, 2, D1)
    post(m, t)
    m.completion(done(t, 0, target=False))
    m.cancel(t)
    effects = m.disconnect(D0)
    assert effects[0] == fx.DisconnectPeer(D0)
    assert sends(effects) == [Retired(t)]
    assert m.phase(other) is SourcePhase.PREFILLING


@pytest.mark.clause("C6.4")
def test_a_joined_destination_proves_nothing_about_reading_the_source():
    m = Source()
    t = prefill(m)
    post(m, t)
    assert sends(m.disconnect(D0)) == [Failed(t, f"{D0} is dead", (0,), unmoved=True)]
    assert m.phase(t) is SourcePhase.DRAINING
    assert sends(m.completion(done(t, 0, source=True, target=False, how=Outcome.FAILED))) == [Retired(t)]


@pytest.mark.clause("C6.1", "C6.4")
def test_a_quiet_end_of_the_connection_frees_the_source_and_not_the_target():
    m = Source()
    t = prefill(m)
    post(m, t)
    effects = m.peer_down(D0, quiet=True, cause="reset")
    assert sends(effects)[0] == PeerDown(D0, True, "reset")
    assert isinstance(sends(effects)[1], Failed)
    assert fx.Free(t) in effects
    assert Retired(t) not in sends(effects)
    assert m.chunks(t) == {0: ChunkState.SENT}


@pytest.mark.clause("C6.1", "T8")
def test_a_connection_lost_without_proof_keeps_both_sides():
    m = Source()
    t = prefill(m)
    post(m, t)
    effects = m.peer_down(D0, quiet=False)
    assert fx.Free(t) not in effects
    assert any(isinstance(e, fx.Fault) and e.retained for e in effects)
    assert m.chunks(t) == {0: ChunkState.POSTED}
    m.completion(done(t, 0, False, False, Outcome.TIMED_OUT))
    assert m.chunks(t) == {0: ChunkState.EXPIRED}
    assert fx.Free(t) in m.completion(done(t, 0, how=Outcome.FAILED))


@pytest.mark.clause("C6.1")
def test_a_lost_connection_leaves_alone_what_has_all_arrived():
    m = Source()
    t, other = prefill(m), prefill(m, 2, D1)
    post(m, t)
    m.completion(done(t, 0))
    assert sends(m.peer_down(D0, quiet=False)) == [PeerDown(D0, False)]
    assert (m.phase(t), m.phase(other)) == (SourcePhase.COMMITTED, SourcePhase.PREFILLING)


@pytest.mark.clause("C5.1", "C5.3")
def test_memory_waits_for_the_engine_even_when_every_chunk_is_settled():
    m = Source()
    t = prefill(m)
    post(m, t, last=False)
    m.completion(done(t, 0))
    effects = m.cancel(t)
    assert fx.Suspend(t) in effects
    assert fx.CancelChunks(t) in effects
    assert fx.Free(t) not in effects
    assert m.computed(t, 1, last=True) == [fx.Ignored(t, "computed", "draining")]  # was under way
    assert fx.Free(t) in m.suspended(t)


@pytest.mark.clause("T9", "C6.1")
def test_what_was_queued_may_not_be_submitted_any_more():
    m = Source()
    t = prefill(m)
    m.computed(t, 2, last=True)
    m.source_ready(t, 0)
    m.cancel(t)
    assert not m.may_submit(t, 0)
    effects = m.submitted(t, 0)
    assert isinstance(effects[0], fx.Violation)
    assert effects[0].clause == "T9"
    # it is true all the same, so it is waited for
    m.suspended(t)
    assert m.chunks(t) == {0: ChunkState.POSTED}
    assert sends(m.completion(done(t, 0))) == [Retired(t)]


@pytest.mark.clause("C3.4", "C3.7")
@pytest.mark.parametrize("wrong", ["a last range without a chunk", "a range after the last"])
def test_an_engine_that_reports_nonsense_fails_that_transfer_only(wrong):
    m = Source()
    t, other = prefill(m), prefill(m, 2)
    if wrong == "a last range without a chunk":
        effects = m.computed(t, 0, last=True)
    else:
        m.computed(t, 1, last=True)
        m.source_ready(t, 0)
        effects = m.computed(t, 1, last=True)
    assert isinstance(sends(effects)[0], Failed)
    assert fx.Suspend(t) in effects
    assert m.phase(other) is SourcePhase.PREFILLING


@pytest.mark.clause("C6.2", "C6.6")
def test_stop_drains_everything_and_then_the_stage_may_exit():
    m = Source()
    first, second = prefill(m), prefill(m, 2)
    post(m, second)
    assert not m.drained
    m.stop()
    assert not m.drained
    m.suspended(first)
    m.completion(done(second, 0))
    assert m.drained
    late = new_transfer_id()
    effects = m.prefill(Prefill(late, 3, REQUEST, Reservation(late, ((0,),), 0, 0), D0))
    assert isinstance(effects[0], fx.Violation)
    assert len(m) == 0


@pytest.mark.clause("C1.2", "T12")
def test_nothing_is_kept_of_finished_transfers_and_unknown_ids_leave_nothing_behind():
    m = Source()
    for ordinal in range(1, 300):
        t = prefill(m, ordinal)
        post(m, t)
        m.completion(done(t, 0))
        m.ack(t)
        for event in (m.ack, m.cancel, m.suspended):
            assert isinstance(event(t)[0], fx.Ignored)
        assert isinstance(m.completion(done(t, 0))[0], fx.Ignored)
    assert len(m) == 0
    assert not m.transfers()


def test_connections_and_fatal_causes_are_told():
    m = Source()
    assert sends(m.peer_up(D0)) == [Connected(D0)]
    assert sends(m.fatal("the quarantine is full"))[0].cause == "the quarantine is full"


def ready_seconds(chunks: int) -> float:
    """The best of three, of this thread's own time: to tell of each chunk of a closed transfer that it is ready."""
    best = float("inf")
    for _ in range(3):
        m = Source()
        t = prefill(m)
        m.computed(t, chunks, last=True)
        began = time.thread_time()
        for sequence in range(chunks):
            m.source_ready(t, sequence)
        best = min(best, time.thread_time() - began)
    return best


@pytest.mark.clause("T12")
def test_readiness_of_many_chunks_costs_the_same_for_each():
    """16,384 chunks took 2 s when each looked at all: eight times as many must not take much more than eight times."""
    few, many = ready_seconds(1024), ready_seconds(8192)
    assert many < 24 * few, f"{few * 1e3:.1f} ms for 1024 chunks, {many * 1e3:.1f} ms for 8192"


@pytest.mark.clause("T3", "T5", "C5.1", "C5.2", "C6.7")
def test_of_a_cancelled_transfer_the_receipts_of_what_was_sent_settle_it():
    """P names what it cannot prove once nothing else is left, and only that."""
    m = Source()
    t = prefill(m)
    post(m, t, 7, last=False)
    m.computed(t, 1, True)
    for i in (0, 2, 3, 6):
        m.completion(done(t, i, target=False))
    m.completion(done(t, 1))
    assert sends(m.cancel(t)) == [], "two chunks may still be read here"
    assert isinstance(m.ack(t)[0], fx.Ignored), "nobody was asked, so this is another transfer's, or a lie"
    m.suspended(t)
    assert sends(m.completion(done(t, 4, how=Outcome.FAILED))) == []
    effects = m.completion(done(t, 5, target=False, how=Outcome.FAILED))
    assert fx.Free(t) in effects
    assert sends(effects) == [Unproven(t, ((0, 1), (2, 4), (5, 7)))]
    assert sends(m.completion(done(t, 3))) == [], "proven here after all; the others are still D's to prove"
    effects = m.ack(t)
    assert effects[0] == fx.Acknowledge(t), "the transport has nothing to remember"
    assert sends(effects) == [Retired(t)]
    assert fx.Free(t) not in effects, "once"
    assert len(m) == 0


@pytest.mark.clause("C4", "T3")
@pytest.mark.parametrize("cancelled", [False, True], ids=["received", "cancelled"])
@pytest.mark.parametrize("unproven", [False, True], ids=["no-one-was-asked", "D-was-asked"])
def test_an_ack_is_acknowledged_where_it_is_of_received_and_not_where_it_answers_unproven(cancelled, unproven):
    """P fails by itself while the Ack of Received is under way, or C has ended the transfer before it heard that."""
    m = Source()
    t = prefill(m)
    post(m, t, 2)
    m.completion(done(t, 0, target=False))
    m.completion(done(t, 1, source=unproven, target=False, how=Outcome.FAILED))
    if cancelled:
        assert isinstance(m.cancel(t)[0], fx.Ignored), "it drains already"
    assert (m.phase(t), bool(m.chunks(t))) == (SourcePhase.DRAINING, True)
    effects = m.ack(t)
    assert effects[0] == fx.Acknowledge(t)
    assert (fx.Milestone(t, "acknowledged") in effects) is not cancelled
    assert isinstance(m.ack(t)[0], fx.Ignored)


def _from(cause: Exception) -> TransportError:
    error = TransportError("C6.3: the transport raised while posting")
    error.__cause__ = cause
    return error


@pytest.mark.clause("C3.6", "C6.3", "T13")
@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize(
    ("error", "unmoved"),
    [
        (SegmentError("C3.6: outside"), False), (CapabilityError("T13: too large"), False),
        (_from(SegmentError("C3.6: outside")), False), (PeerLost("T7: gone"), True), (_from(OSError("reset")), True),
        (None, True),
    ],
)  # fmt: skip
def test_a_chunk_that_is_refused_for_what_it_is_would_be_refused_anywhere(error, unmoved, quiet):
    m = Source()
    t = prefill(m)
    post(m, t)
    effects = m.completion(Completion(t, 0, Outcome.FAILED, quiet, quiet, error))
    cause = f"C6.3: chunk 0 to {D0}: {error or 'failed'}"
    assert sends(effects)[0] == Failed(t, cause, (0,), unmoved=unmoved)


class Falsy(Exception):
    def __len__(self) -> int:
        return 0


@pytest.mark.clause("C6.3")
@pytest.mark.parametrize("error", [OSError("it went"), Falsy("it went")], ids=["of-itself", "empty"])
def test_an_error_that_is_its_own_cause_and_one_that_is_empty_are_told(error: Exception):
    """As ``raise error from error`` makes one."""
    error.__cause__ = error
    m = Source()
    t = prefill(m)
    post(m, t)
    (failed,) = [
        e for e in sends(m.completion(Completion(t, 0, Outcome.FAILED, True, True, error))) if type(e) is Failed
    ]
    assert "it went" in failed.cause
