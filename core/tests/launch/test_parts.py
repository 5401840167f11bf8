"""The small parts: last lines, exit statuses, lifelines."""

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.launch.exit_status import describe
from kvbaton.launch.lifeline import FlagLifeline, ProcessLifeline
from kvbaton.launch.log_ring import LogRing


@given(st.lists(st.text("ab\n\r", max_size=30), max_size=20), st.integers(1, 5))
def test_the_ring_holds_the_last_lines_however_they_were_cut(pieces, size):
    ring = LogRing(size)
    for piece in pieces:
        ring.feed(piece.encode())
    ring.finish()
    whole = "".join(pieces).replace("\r", "\n").split("\n")
    assert ring.tail() == [line for line in whole if line][-size:]


def test_a_line_without_end_does_not_grow():
    ring = LogRing(3, width=10)
    for _ in range(1000):
        ring.feed(b"x" * 100)
    ring.feed(b"\nshort\n\xff\xfe\n")
    assert ring.tail() == ["x" * 10, "short", "��"]


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-250, "killed by signal 250")],
)
def test_statuses_in_words(status, words):
    assert describe(status) == words


def test_a_lifeline_calls_each_watcher_once_and_keeps_its_first_reason():
    lifeline, calls = FlagLifeline(), []
    lifeline.watch(lambda: calls.append("before"))
    assert lifeline.cut is None
    assert not lifeline.wait(0.0)
    lifeline.sever("gone")
    lifeline.sever("again")
    lifeline.watch(lambda: calls.append("after"))
    assert calls == ["before", "after"]
    assert lifeline.cut == "gone"
    assert lifeline.wait(0.0)


@pytest.fixture
def output():
    """The reading end of what a stage prints into."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    yield read
    os.close(read)
    os.close(write)


@pytest.mark.clause("C6.6")
def test_a_process_lifeline_is_cut_when_the_pipe_ends(output):
    read, write = os.pipe()
    severed = threading.Event()
    lifeline = ProcessLifeline(read, output, os.getppid(), severed.set)
    try:
        assert lifeline.cut is None
        os.close(write)
        assert severed.wait(20.0)
        assert "let go" in lifeline.cut
    finally:
        lifeline.close()


@pytest.mark.clause("C6.6")
def test_a_process_lifeline_knows_a_coordinator_that_was_gone_before(output):
    read, write = os.pipe()
    severed = threading.Event()
    lifeline = ProcessLifeline(read, output, 2**22 - 1, severed.set)
    try:
        assert severed.wait(20.0)
        assert "before" in lifeline.cut
    finally:
        lifeline.close()
        os.close(write)


def test_a_process_lifeline_that_is_closed_is_not_cut(output):
    read, write = os.pipe()
    lifeline = ProcessLifeline(read, output, os.getppid(), lambda: None)
    lifeline.close()
    lifeline.close()
    assert lifeline.cut is None
    os.close(write)
