"""Two processes that move given segments, and what is said of those that do not."""

import contextlib
import os
import sys
from pathlib import Path

import pytest
from impatience import with_what_hangs

from kvbaton.errors import LocalProtocolError, SegmentError
from kvbaton.pair import Bounds, PairFailed, open_pair
from kvbaton.pair.process import EndProcess
from kvbaton.pair.words import Connect
from kvbaton.segments import Segments

HERE = str(Path(__file__).parent)
TRANSPORT = "datagram_transport:plugin"
SCATTERED = Segments.of([(0, 0, 5), (0, 100, 40000), (1, 7, 1)])
ELSEWHERE = Segments.of([(1, 3, 5), (0, 50, 40000), (1, 0, 1)])


@pytest.fixture(autouse=True)
def _importable(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    before = children()
    yield
    assert children() == before


def children():
    import psutil

    return {child.pid for child in psutil.Process().children(recursive=True)}


def opened(fault="", reached="", **how):
    how = {"regions": (1 << 18, 4096), "bounds": Bounds(60.0, 40.0, 60.0, 5.0 if fault else 40.0), **how}
    return open_pair(TRANSPORT, {"fault": fault, "reached": str(reached)} if fault else {}, **how)


def test_segments_go_both_ways_and_every_byte_is_looked_at():
    problems = []
    with opened(problems=problems.append) as pair:
        assert pair.capabilities.cross_process
        for way in (pair.forward, pair.back):
            way.prepare()
            moved = way.move(SCATTERED, ELSEWHERE, repeats=3, chunk_bytes=20000)
            way.check(SCATTERED, ELSEWHERE)
            assert (moved.nbytes, moved.segments, moved.chunks) == (40006, 3, 4)
            assert len(moved.done) == len(moved.received) == 3
            assert all(0 < seconds < 30 for seconds in (*moved.done, *moved.received))
            assert moved.rate == moved.nbytes / moved.seconds
            assert len(moved.submit) == len(moved.each) == 3 * moved.chunks
            assert all(spent > 0 for spent in moved.submit)
        copied = pair.forward.copy(SCATTERED, ELSEWHERE, repeats=2)
        assert len(copied.received) == 2
        empty = pair.forward.move(Segments.empty(), Segments.empty())
        assert (empty.nbytes, empty.chunks) == (0, 1)
    assert problems == []
    with pytest.raises(LocalProtocolError, match="closed"):
        pair.forward.prepare()


def test_both_ends_are_threads_of_one_process_where_the_transport_reaches_no_further():
    problems = []
    how = {"regions": (1 << 18, 4096), "reach": "same_process", "problems": problems.append}
    with open_pair("loopback", **how) as pair:
        assert len(set(pair.pids)) == 1
        for way in (pair.forward, pair.back):
            way.prepare()
            way.move(SCATTERED, ELSEWHERE, chunk_bytes=20000)
            way.check(SCATTERED, ELSEWHERE)
        assert len(pair.forward.copy(SCATTERED, ELSEWHERE, repeats=2).received) == 2
    assert problems == []


def test_a_function_of_the_callers_runs_at_an_end():
    with opened() as pair:
        assert pair.forward.call("decode-0", "end_calls:regions", factor=2) == [1 << 19, 8192]
        with pytest.raises(PairFailed, match=r"prefill-0: ZeroDivisionError"):
            pair.forward.call("prefill-0", "end_calls:divide", by=0)


def test_both_ends_are_called_at_once():
    with opened() as pair:
        heard, told = pair.forward.call_both(("end_calls:listen", {}), ("end_calls:tell", {"word": 5}))
    assert (heard, told) == (5, "told")


def test_segments_outside_of_memory_are_refused_before_anybody_is_asked():
    with opened() as pair:
        with pytest.raises(SegmentError, match="prefill-0"):
            pair.forward.move(Segments.one(0, 1 << 18, 1), Segments.one(0, 0, 1))
        pair.forward.prepare()  # and the pair is as good as before


@pytest.mark.parametrize(
    ("fault", "cause", "says"),
    [
        ("refuse", "refused", "cannot connect to decode-0.*no route to there"),
        ("raise", "failed", "prefill-0: .*no more descriptors"),
        ("half", "failed", "prefill-0: what it answers in opening is not what it should be: .*max_segments"),
        ("surrogate", "failed", r"prefill-0: its answer cannot be sent: UnicodeEncodeError: .*udcff"),
        ("hang", "hung", r"prefill-0: its process hangs in sending, in submit \(datagram_transport.py:\d+\)"),
        ("die", "died", r"prefill-0: its process died in sending \(killed by SIGKILL\): the last straw"),
        ("target dies", "died", r"decode-0: its process died in \w+ \(exit status 3\)"),
        ("no receipt", "late", "prefill-0: no receipt came for what is done"),
        ("outside", "wrong", "1 bytes outside of what was to be written have changed, the first at byte 131072 of"),
        ("lose", "wrong", "131072 of 131072 bytes are wrong"),
    ],
    ids=lambda value: value if " " not in value else "",
)
def test_what_is_broken_is_named_and_nothing_is_left(fault, cause, says, monkeypatch, tmp_path):
    if cause == "hung":
        with_what_hangs(monkeypatch, tmp_path / "reached")
    bound = {"hung": 1.0, "late": 5.0}.get(cause, 20.0)
    segments = Segments.one(0, 0, 1 << 17)

    def everything():
        with opened(fault, reached=tmp_path / "reached") as pair:
            pair.forward.prepare()
            pair.forward.move(segments, segments, bound=bound)
            pair.forward.check(segments, segments)

    with pytest.raises(PairFailed, match=says) as caught:
        everything()
    assert caught.value.cause == cause


def test_the_death_of_one_end_is_the_cause_of_what_the_other_could_not_do(monkeypatch):
    """However late whoever started them looks: on a busy machine the other's failure is there to be read, too."""
    hear = EndProcess.hear

    def late(self, order, bound, other=None):
        if isinstance(order, Connect):
            assert self._frames.ready(60.0)
        return hear(self, order, bound, other)

    monkeypatch.setattr(EndProcess, "hear", late)
    says = r"decode-0: its process died in connecting \(exit status 3\)"
    with pytest.raises(PairFailed, match=says) as caught, opened("target dies unheard"):
        pass
    assert caught.value.cause == "died"


def test_an_end_that_dies_once_it_has_answered_is_the_cause_of_what_the_other_waits_for():
    """Its answer is read later, and is no reason to overlook its end: else the other would be taken to hang."""
    says = r"prefill-0: its process died in call \(exit status 3\)"
    with opened() as pair, pytest.raises(PairFailed, match=says) as caught:
        pair.forward.call_both(("end_calls:dies_later", {}), ("end_calls:waits", {}), bound=20.0)
    assert caught.value.cause == "died"


def test_what_is_wrong_with_closing_is_told():
    problems = []
    with opened("close", problems=problems.append):
        pass
    assert any("still busy" in problem for problem in problems), problems


def test_an_end_does_not_outlive_who_started_it(tmp_path):
    import subprocess

    program = (
        "import os, signal, sys; sys.path[:0] = sys.argv[1:]\n"
        "from kvbaton.pair import open_pair\n"
        f"with open_pair({TRANSPORT!r}, regions=(4096,)) as pair:\n"
        "    print(*pair.pids, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    import psutil

    ran = subprocess.run([sys.executable, "-c", program, HERE], capture_output=True, text=True, timeout=60)
    ends = [int(pid) for pid in ran.stdout.split()]
    assert len(ends) == 2, ran.stderr
    alive = []
    for pid in ends:
        with contextlib.suppress(psutil.NoSuchProcess):  # it may end at any moment
            process = psutil.Process(pid)
            if HERE in str(process.environ()):
                alive.append(process)
    _, left = psutil.wait_procs(alive, timeout=40)
    assert not left
    assert os.getpid() not in ends
