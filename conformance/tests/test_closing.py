"""How ends are closed: without a false fence, each whatever becomes of the others, and all that is wrong is said."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from kvbaton.identity import PeerId
from kvbaton_conformance.clauses import ClauseBroken
from kvbaton_conformance.harness import Pair, close_ends, drain_ends, open_end, open_pair, segments
from kvbaton_conformance.subject import Reference, Subject, resolve
from kvbaton_conformance.suite.topic import Ends
from kvbaton_conformance.two_process import PeerProcess, Processes, RemoteEnd
from kvbaton_loopback import plugin

REFERENCE = "kvbaton_conformance.mutants.reference:plugin"


@pytest.fixture(scope="module")
def subject() -> Subject:
    return resolve(REFERENCE, {}, Reference(REFERENCE), "reference")


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    kept = Processes()
    yield kept
    assert not kept.close()


def two(**options) -> Pair:
    """Two connected ends that a test closes itself."""
    pair = Pair(*(open_end(plugin, plugin.Options(**options), PeerId.start(name)) for name in ("p-0", "d-0")))
    pair.source.memory.fill()
    pair.connect()
    return pair


def fenced(pair: Pair) -> list[int]:
    return [end.calls("fenced") for end in (pair.source, pair.target)]


@pytest.mark.clause("C6.4", "T10")
def test_nobody_is_said_to_be_fenced_who_lives():
    pair = two()
    for number in range(8):
        row = segments((0, 64 * number, 64))
        assert pair.send(row, row).accepted
    close_ends([pair.source, pair.target])
    assert fenced(pair) == [0, 0]
    assert pair.source.guard.closed
    assert pair.target.guard.closed
    assert all(completion.terminal for completion in pair.source.completions)


@pytest.mark.clause("C6.4", "T10")
def test_what_does_not_drain_is_closed_last_and_its_peer_is_fenced_when_it_is_closed(monkeypatch):
    pair = two(stall_chunks=[0])
    # a disconnect of the source would end it
    monkeypatch.setattr(pair.source.connector, "disconnect", lambda peer: None)
    monkeypatch.setattr(pair.target.connector, "disconnect", lambda peer: None)
    assert pair.send(segments((0, 0, 64)), segments((1, 64, 64))).accepted
    close_ends([pair.source, pair.target])
    assert fenced(pair) == [1, 0]
    assert pair.source.guard.closed
    assert pair.target.guard.closed


@pytest.mark.clause("T5")
def test_a_chunk_that_never_ends_although_both_ends_live_is_found():
    """A fence of a peer that lives would end it."""
    pair = two(stall_chunks=[0])
    stalled, other = (pair.send(segments((0, at, 64)), segments((1, at, 64))) for at in (0, 64))
    pair.pump_until(lambda: other.done, "T5: the other ends")
    (problem,) = drain_ends([pair.source, pair.target], 0.2)
    assert problem.startswith(f"T5: 1 chunks that {pair.source.peer} has accepted have had no completion")
    assert f"({stalled.chunk.transfer[:8]}, 0)" in problem
    close_ends([pair.source, pair.target])


@pytest.mark.clause("T10")
def test_one_that_cannot_be_closed_does_not_keep_the_other_open(monkeypatch):
    pair = two()

    def fails() -> None:
        raise OSError("in use")

    monkeypatch.setattr(pair.source.connector, "close", fails)
    with pytest.raises(ClauseBroken, match=r"^T10: p-0@\w+ could not be closed: .*in use"):
        close_ends([pair.source, pair.target])
    assert pair.target.guard.closed


@pytest.mark.clause("T10")
def test_both_are_reported_where_both_cannot_be_closed(monkeypatch):
    pair = two()
    for end in (pair.source, pair.target):
        monkeypatch.setattr(end.connector, "close", lambda: 1 / 0)
    with pytest.raises(ClauseBroken, match=r"^T10: p-0@\w+ could not be closed(.|\n)*and: T10: d-0@\w+ could not be"):
        close_ends([pair.source, pair.target])


def test_what_closing_finds_is_a_note_to_what_the_body_has_raised(monkeypatch):
    opened = open_pair(plugin)
    pair = opened.__enter__()
    monkeypatch.setattr(pair.source.connector, "close", lambda: 1 / 0)
    mine = KeyError("mine")
    assert not opened.__exit__(KeyError, mine, None)  # it is raised on
    assert any("could not be closed" in note for note in mine.__notes__)


# -- ends in processes of their own ------------------------------------------------------------------------------------


@pytest.mark.clause("T7", "T10")
def test_a_process_that_died_leaves_the_other_end_closed_and_its_process_in_use(subject, processes):
    ends = Ends(subject, "two-processes", processes)
    pair = ends.pair()
    assert isinstance(pair.source, RemoteEnd)
    assert isinstance(pair.target, RemoteEnd)
    os.kill(pair.source.process.pid, signal.SIGKILL)
    pair.source.process._process.wait(60)
    with pytest.raises(ClauseBroken, match=f"^T7: the process of {pair.source.peer} died$"):
        ends.close()
    assert pair.target.process.alive
    assert processes.take() is pair.target.process  # it was closed, and its process left nothing
    processes.give_back(pair.target.process)


@pytest.mark.clause("T7")
def test_both_processes_that_died_are_reported(subject, processes):
    ends = Ends(subject, "two-processes", processes)
    pair = ends.pair()
    for end in (pair.source, pair.target):
        assert isinstance(end, RemoteEnd)
        os.kill(end.process.pid, signal.SIGKILL)
        end.process._process.wait(60)
    with pytest.raises(ClauseBroken, match=f"{pair.source.peer} died(.|\n)*and: T7: the process of {pair.target.peer}"):
        ends.close()


@pytest.mark.clause("C6.4")
def test_a_killed_peer_is_fenced(subject, processes):
    """It is proven dead: what was posted to it ends, and its peer can be closed."""
    ends = Ends(subject, "two-processes", processes)
    pair = ends.pair()
    assert isinstance(pair.target, RemoteEnd)
    pair.target.hang()
    row = pair.rows((0, 0, 64))
    from kvbaton.connector import Chunk
    from kvbaton.identity import new_transfer_id

    assert pair.source.guard.submit(Chunk(new_transfer_id(), 0, pair.target.peer, row, row, row.nbytes))
    pair.source.pump()
    pair.target.hung = False
    pair.target.kill()
    ends.close()


# -- processes that wait for work -----------------------------------------------------------------------------------


class Idle:
    """Stands for a process that nobody has asked anything."""

    alive = True

    def __init__(self, device=None):
        self.device = device


def test_a_process_is_taken_for_what_it_was_made_ready_for(monkeypatch):
    monkeypatch.setattr("kvbaton_conformance.two_process.PeerProcess", Idle)
    kept = Processes()
    kept.prepare([None, None])
    kept.prepare([1, 1])
    kept.prepare([0, 1])
    assert [process.device for process in kept._idle] == [None] * 2 + [1] * 4 + [0] * 2  # spare ones on a device
    assert [kept.take(1).device for _ in range(5)] == [1] * 5
    assert [kept.take(0).device for _ in range(2)] == [0] * 2
    assert [process.device for process in kept._idle] == [None] * 2
    assert [kept.take().device for _ in range(3)] == [None] * 3
    assert not kept._idle


def test_a_real_process_says_what_it_is_ready_for():
    process = PeerProcess()
    assert process.device is None
    assert not process.leave()
