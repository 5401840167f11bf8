"""What the reader of a failure is shown: the last events of both ends, and what they look like."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvbaton.connector import Completion, Outcome, PeerEvent, Receipt
from kvbaton.errors import PeerLost
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton_conformance.events import SHOWN, EventLog, looks_like
from kvbaton_conformance.harness import ConditionNotReached, open_pair, segments
from kvbaton_loopback import plugin

P, D = PeerId("prefill-0", 1), PeerId("decode-0", 2)
T = new_transfer_id()


def completion(outcome=Outcome.DONE, sequence=0, error=None):
    return Completion(T, sequence, outcome, True, outcome is not Outcome.TIMED_OUT, error)


def test_events_are_told_with_transfer_and_sequence():
    log = EventLog()
    log.note(peers=[PeerEvent(D, True)])
    log.note([completion(Outcome.FAILED, 3, PeerLost("T7: it is gone\nand more"))], [Receipt(P, T, 4)])
    text = str(log)
    assert text.startswith("heard 1 peer events, 1 completions, 1 receipts\n")
    assert f"peer {D} is up" in text
    assert f"completion ({T[:8]}, 3) FAILED (T7: it is gone)" in text
    assert f"receipt ({T[:8]}, 4) from {P}" in text


def test_no_more_than_the_last_are_kept_and_the_rest_is_counted():
    log = EventLog()
    log.note(receipts=[Receipt(P, T, number) for number in range(100)])
    lines = str(log).splitlines()
    assert "heard 100 receipts" in lines[0]
    assert lines[1].strip() == f"... {100 - SHOWN} earlier"
    assert f"({T[:8]}, 99)" in lines[-1]
    assert len(lines) == SHOWN + 2
    log.clear()
    assert str(log) == "heard nothing"


def end(peer, other, *, up=True, completions=(), receipts=(), down=None):
    peers = [PeerEvent(other, True)] if up else []
    peers += [PeerEvent(other, False, False, down)] if down else []
    return SimpleNamespace(
        peer=peer, peers=peers, completions=list(completions), receipts=list(receipts), dead=False, hung=False
    )


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ({"up": False}, {"up": False}, "neither end was told that its peer is up"),
        ({}, {"up": False}, "only prefill-0@1 was told"),
        ({}, {}, "nothing has come of any chunk at either end"),
        ({"completions": [completion(Outcome.FAILED, 2, OSError("no key"))]}, {}, ", 2) FAILED at its source (no key)"),
        ({"completions": [completion()]}, {}, "1 chunks are DONE at their source and were not received"),
        ({}, {"receipts": [Receipt(P, T, 0)]}, "1 chunks were received, and their source was not told"),
        ({"completions": [completion(Outcome.TIMED_OUT)]}, {}, ", 0) passed its deadline"),
        ({"down": PeerLost("T7: reset")}, {}, "prefill-0@1 was told that decode-0@2 is down (T7: reset)"),
        ({"completions": [completion()]}, {"receipts": [Receipt(P, T, 0)]}, ""),
    ],
)
def test_what_it_looks_like(source, target, said):
    hint = looks_like(end(P, D, **source), end(D, P, **target))
    assert said in hint
    assert bool(said) == bool(hint)


def test_a_condition_that_is_not_reached_tells_both_stories_and_a_hint():
    with open_pair(plugin, {"stall_chunks": [0]}) as pair:
        sent = pair.send(segments((0, 0, 64)), segments((1, 64, 64)))
        with pytest.raises(ConditionNotReached) as caught:
            pair.pump_until(lambda: sent.done, "T5: one chunk is done", bound=0.05)
    text = str(caught.value)
    assert text.startswith("T5: one chunk is done: not reached within 0.05 s.\n")
    assert text.count("heard 1 peer events") == 2
    assert "\n  it looks like this: nothing has come of any chunk at either end" in text
    assert len(text) < 2000
