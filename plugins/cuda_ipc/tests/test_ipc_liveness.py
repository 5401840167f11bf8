"""Two ends never wait for each other: whatever happened, in any order, words and copies as late as may be, in the end
all is over once both do what a stage's pump does, which polls, and waits where there was nothing."""

from collections import deque

import pytest
import test_ipc
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvbaton.connector import Chunk, Outcome
from kvbaton.errors import PeerLost
from kvbaton.identity import new_transfer_id
from kvbaton.segments import Segments
from kvbaton_cuda_ipc import ipc
from kvbaton_cuda_ipc.driver import DriverError
from kvbaton_cuda_ipc.wire import Down, Up, Word

#: ``MAX_UNHEARD``, ``_ANSWERED_FROM``, ``_TOLD_FROM``: reached at once, soon, the second never, and the real ones.
BOUNDS = [(1, 1, 1), (6, 2, 4), (3, 256, 16), (1024, 256, 16)]


class Line:
    """The wire between two ends in one place.  A word comes once it is :meth:`delivered`."""

    dropped = 0

    def __init__(self, me, *_):
        self.me, self.other, self.card = me, None, b""
        self.joined, self.cut, self.asleep = False, False, False
        self.sent, self.come = deque(), deque()

    def delivered(self, count):
        """So many of what the other has sent."""
        while count and self.other.sent:
            self.come.append(self.other.sent.popleft())
            count -= 1

    def connect(self, *_):
        self.joined = True
        if self.other.joined:
            self.come.append(Up(self.other.me, b""))
            self.other.come.append(Up(self.me, b""))

    def up(self, _):
        return self.joined and self.other.joined and not self.cut

    def send(self, peer, word):
        if not self.up(peer):
            raise PeerLost("it is down", peer=peer)
        self.sent.append(Word(self.me, word))

    def leave(self, _):
        self.joined = False

    def drop(self, _):
        if self.joined and not self.cut:
            self.joined, self.cut = False, True
            self.sent.append(Down(self.me, PeerLost("the other has dropped it", peer=self.me)))

    def poll(self):
        events = list(self.come)
        self.come.clear()
        return events

    def wait(self, timeout):
        self.asleep = timeout > 0 and not self.come

    def close(self):
        pass


class Talk:
    def __init__(self, inflight, counted):
        self.ends = [
            test_ipc.End(name, fill, None, inflight, how)
            for name, fill, how in zip(("prefill-0", "decode-0"), (7, 200), counted, strict=True)
        ]
        self.lines = [end.connector._wire for end in self.ends]
        self.lines[0].other, self.lines[1].other = self.lines[1], self.lines[0]
        #: Of each end: what it was given and has accepted, and what was refused, to be offered again.
        self.accepted, self.owed, self.transfer = ([], []), (deque(), deque()), new_transfer_id()
        self.count = 0
        for which in (0, 1):
            self.ends[which].connector.connect(self.ends[1 - which].endpoint())

    def offer(self, which, count):
        for _ in range(count):
            row = Segments.of([(0, self.count * 8 % 4096, 8)] if self.count % 7 else [])
            self.owed[which].append(
                Chunk(self.transfer, self.count, self.ends[1 - which].peer, row, row, 8 if self.count % 7 else 0)
            )
            self.count += 1
        while self.owed[which] and self.ends[which].connector.submit(self.owed[which][0]):
            self.accepted[which].append(self.owed[which].popleft().sequence)

    def act(self, what, which, count):
        end = self.ends[which]
        match what:
            case "submit":
                self.offer(which, count)
            case "poll":
                end.poll()
            case "wait":
                end.wait()
            case "hear":
                self.lines[which].delivered(count)
            case "copy":
                end.mover.finish(count)
            case "cancel":
                end.connector.cancel(self.transfer)
                self.transfer = new_transfer_id()
            case "fail":
                end.mover.fails = DriverError("CUDA_ERROR_UNKNOWN")
            case "part":
                end.connector.disconnect(self.ends[1 - which].peer)

    def pump(self, over):
        """As two stages do.  One copy for each pass, and words come at once."""
        for _ in range(20_000):
            idle = 0
            for which, end in enumerate(self.ends):
                line, before = self.lines[which], (len(end.completions), len(end.receipts), len(end.peers))
                line.delivered(1)
                end.mover.finish()
                end.poll()
                owed = len(self.owed[which])
                self.offer(which, 0)
                if (len(end.completions), len(end.receipts), len(end.peers), len(self.owed[which])) == (*before, owed):
                    line.asleep = False
                    end.connector.wait(1.0)
                    idle += line.asleep
            if over():
                return
            assert idle < 2 or any(line.sent for line in self.lines), "T6: both wait for ever"
        raise AssertionError("T6: never over")

    def drained(self):
        return not any(self.owed) and not any(end.connector.outstanding() for end in self.ends)

    def parted(self):
        return self.drained() and all(end.downs and end.downs[-1].quiet for end in self.ends)

    def check(self):
        for which, (end, other) in enumerate(zip(self.ends, self.ends[::-1], strict=True)):
            assert sorted(one.sequence for one in end.completions) == self.accepted[which], "T5"
            done = sorted(one.sequence for one in end.completions if one.outcome is Outcome.DONE)
            received = sorted(one.sequence for one in other.receipts)
            assert len(received) == len(set(received)), "T4: received twice"
            assert received == done, "T4: done is what was received"

    def close(self):
        for end, other in (self.ends, self.ends[::-1]):
            end.mover.settle()
            end.connector.fenced(other.peer)
            for _ in range(3):
                end.poll()
            end.connector.close()


ACTS = st.tuples(
    st.sampled_from(["submit"] * 4 + ["poll", "hear", "copy"] * 3 + ["wait", "wait", "cancel", "fail"]),
    st.sampled_from([0, 0, 1]),
    st.sampled_from([1, 2, 3, 5, 24, 70]),
)


@pytest.mark.clause("T4", "T5", "T6", "T7")
@given(
    inflight=st.sampled_from([1, 2, 64, 4096]), counted=st.tuples(st.booleans(), st.booleans()),
    bounds=st.sampled_from(BOUNDS), acts=st.lists(ACTS, max_size=40), late=st.lists(ACTS, max_size=12),
    parts=st.sampled_from(["neither", "first", "second", "both"]), owed=st.sampled_from([0, 1, 24, 200]),
)  # fmt: skip
@example(inflight=1, counted=(True, True), bounds=BOUNDS[2], acts=[], late=[], parts="neither", owed=24)
@example(inflight=64, counted=(True, True), bounds=BOUNDS[3], acts=[], late=[], parts="neither", owed=3000)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_neither_end_waits_for_ever(inflight, counted, bounds, acts, late, parts, owed):
    """Every chunk that was accepted is over once, and everything that is done was received once.  ``owed``: chunks that
    the first has to write yet when both only poll and wait.  ``parts``: who ends it, at what moment whatever."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ipc, "unreachable", lambda *_: "")
        patch.setattr(ipc, "_LOOKING", 0.0)  # a look at the device is no wait for it
        patch.setattr(test_ipc, "Wire", Line)
        for name, bound in zip(("MAX_UNHEARD", "_ANSWERED_FROM", "_TOLD_FROM"), bounds, strict=True):
            patch.setattr(ipc, name, bound)
        talk = Talk(inflight, counted)
        talk.pump(lambda: all(end.ups for end in talk.ends) and not any(line.sent for line in talk.lines))
        for act in acts:
            talk.act(*act)
        if parts == "neither":
            talk.offer(0, owed)
            talk.pump(talk.drained)
        for which in {"first": [0], "second": [1]}.get(parts, [0, 1]):
            talk.act("part", which, 0)
        for act in late:
            talk.act(*act)
        talk.pump(talk.parted)
        talk.check()
        talk.close()
