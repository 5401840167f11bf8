"""The rules of C9.4 and C1.4 on every stream of envelopes, without a socket."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.control.sequence import InboundSequence, Lifetimes, Verdict
from kvbaton.errors import LocalProtocolError
from kvbaton.identity import PeerId

EPOCH = 50


def judge_all(numbers, epoch=EPOCH):
    sequence = InboundSequence(EPOCH)
    return [sequence.judge(epoch, number) for number in numbers]


@pytest.mark.clause("C9.4")
def test_what_arrives_in_order_is_all_delivered():
    assert judge_all(range(1, 100)) == [Verdict.NEXT] * 99


@pytest.mark.clause("C9.4")
def test_the_first_number_is_one():
    assert judge_all([2]) == [Verdict.GAP]
    assert judge_all([0, -1]) == [Verdict.REPEAT] * 2


@pytest.mark.clause("C9.4")
def test_nothing_is_delivered_after_a_gap_not_even_what_was_missing():
    assert judge_all([1, 3, 2, 3, 4]) == [
        Verdict.NEXT, Verdict.GAP, Verdict.LOST, Verdict.LOST, Verdict.LOST,
    ]  # fmt: skip


@pytest.mark.clause("C1.4")
def test_another_epoch_is_refused_and_moves_nothing():
    sequence = InboundSequence(EPOCH)
    assert sequence.judge(EPOCH, 1) is Verdict.NEXT
    assert sequence.judge(EPOCH - 1, 2) is Verdict.STALE_EPOCH
    assert sequence.judge(EPOCH + 1, 9) is Verdict.FOREIGN_EPOCH
    assert sequence.judge(EPOCH, 2) is Verdict.NEXT


@pytest.mark.clause("C9.4", "C1.4")
@given(
    st.lists(
        st.one_of(
            st.just(("next", 0)),
            st.tuples(st.just("repeat"), st.integers(0, 30)),
            st.tuples(st.just("skip"), st.integers(1, 5)),
            st.tuples(st.just("older"), st.integers(1, EPOCH)),
            st.tuples(st.just("newer"), st.integers(1, 5)),
        ),
        max_size=60,
    )
)
def test_every_stream_delivers_exactly_the_numbers_before_the_first_gap(moves):
    """Whatever repeats, skips and foreign epochs are mixed in, delivered is 1, 2, 3 ... up to the first gap."""
    sequence = InboundSequence(EPOCH)
    delivered, sent, gaps = [], 0, 0
    for move, amount in moves:
        if move == "older":
            assert sequence.judge(EPOCH - amount, sent + 1) is Verdict.STALE_EPOCH
        elif move == "newer":
            assert sequence.judge(EPOCH + amount, sent + 1) is Verdict.FOREIGN_EPOCH
        elif move == "repeat":
            number = sent - amount
            verdict = sequence.judge(EPOCH, number)
            assert verdict is (Verdict.LOST if gaps and number > len(delivered) else Verdict.REPEAT)
        else:
            sent += 1 + amount
            verdict = sequence.judge(EPOCH, sent)
            if verdict is Verdict.NEXT:
                delivered.append(sent)
            gaps += verdict is Verdict.GAP
            assert verdict is Verdict.NEXT if not gaps else verdict in {Verdict.GAP, Verdict.LOST}
    assert delivered == list(range(1, len(delivered) + 1))
    assert gaps <= 1
    assert bool(gaps) == any(move == "skip" for move, _ in moves)


@pytest.mark.clause("C1.4")
def test_a_name_comes_back_only_with_a_newer_epoch():
    lifetimes = Lifetimes()
    lifetimes.add(PeerId("decode-0", 5))
    lifetimes.add(PeerId("decode-1", 4))
    for epoch in (5, 4):
        with pytest.raises(LocalProtocolError, match=rf"C1.4: decode-0@{epoch} is not newer than decode-0@5"):
            lifetimes.add(PeerId("decode-0", epoch))
    lifetimes.add(PeerId("decode-0", 6))
    assert lifetimes.stale("decode-0", 5)
    assert not lifetimes.stale("decode-0", 6)
    assert not lifetimes.stale("nobody", 1)
