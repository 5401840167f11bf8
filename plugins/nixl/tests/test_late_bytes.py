"""Bytes that are under way when something ends: none comes after the end was said to be quiet (C6.4, T5).

Over TCP a write is under way for a while, and what a writer has sent waits in the target's socket, whatever becomes of
the writer.
"""

import contextlib
import fcntl
import gc
import os
import socket
import struct
import termios
import time
from pathlib import Path

import far_actions
import pytest

from kvbaton.connector import Chunk, Outcome
from kvbaton.identity import new_transfer_id
from kvbaton_conformance.harness import Pair, segments

TCP = {"ucx": {"TLS": "tcp,self"}}
SOME = 64 << 20
LARGE = 256 << 20
#: One byte of each page and a bit: enough to see a write move on, and quick.
CANARIES = slice(None, None, 4099)
SENT, POISON = 0x11, 0xEE
ALL = 1.0


def waiting_bytes():
    """Bytes that sockets of this process hold and nobody has read."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if path.readlink().name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(path.name))) as one:
                    if one.family == socket.AF_INET and one.type == socket.SOCK_STREAM:
                        total += struct.unpack("i", fcntl.ioctl(one, termios.FIONREAD, b"\0\0\0\0"))[0]
    return total


def sockets():
    """How many sockets this process has."""
    return sum("socket:" in str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink())


def fill_sockets(source):
    """Let a source that is another process send until what waits here is more than words, however slow it is."""
    deadline = time.monotonic() + 60
    waits = 0
    while waits < 1 << 16:
        assert time.monotonic() < deadline, f"{waits} bytes wait in sockets: nothing could come late"
        source.apply(far_actions.pump_for, 0.5)
        waits = waiting_bytes()


def a_chunk(target, nbytes, transfer=None):
    rows = segments((0, 0, nbytes))
    return Chunk(transfer or new_transfer_id(), 0, target.peer, rows, rows, nbytes)


def memory_of(end):
    return end.memory.regions[0].view()


def open_ends(open_source, open_target, nbytes, options=TCP, **how):
    """A connected pair with one region on each side: the source's bytes differ from the target's everywhere."""
    source = open_source("prefill-0", options, regions={}, register=False, **how)
    target = open_target("decode-0", options, regions={}, register=False)
    source.apply(far_actions.give_memory, nbytes, SENT)
    target.apply(far_actions.give_memory, nbytes, POISON)
    pair = Pair(source, target)
    pair.connect()
    first = a_chunk(target, 8)  # UCX makes its connection for writes with the first one
    target.guard.grant(first.transfer, source.peer, first.target)
    assert source.guard.submit(first)
    pair.pump_until(lambda: source.completions and target.receipts, "T5: one write")
    source.completions.clear()
    target.receipts.clear()
    return pair


def under_way(open_source, open_target, nbytes, **how):
    """A write of which something has arrived and something has not."""
    pair = open_ends(open_source, open_target, nbytes, **how)
    source, target = pair.source, pair.target
    chunk = a_chunk(target, nbytes)
    target.guard.grant(chunk.transfer, source.peer, chunk.target)
    assert source.guard.submit(chunk)
    deadline = time.monotonic() + 60
    while arrived(target) < 0.001:
        assert time.monotonic() < deadline, "nothing arrives"
        source.pump()
        target.pump()
    assert arrived(target) < ALL, "it is over already: not what this test is about"
    assert not source.completions
    return pair, chunk


def arrived(target):
    """Which share of the bytes has come."""
    return float((memory_of(target)[CANARIES] == SENT).mean())


def stays(end, passes=200):
    """Poison an end's memory, as its next owner, and poll: not one byte changes."""
    memory = memory_of(end)
    memory[:] = 0xA5
    for _ in range(passes):
        end.pump()
        end.guard.wait(0.001)
    gc.collect()
    assert (memory == 0xA5).all(), "C6.4: bytes were written after the end was quiet"


# -- a writer that is killed and joined --------------------------------------------------------------------------------


def killed_writer(open_here, open_there):
    """A target whose writer was killed and joined with a write under way, while the target did not poll."""
    pair = open_ends(open_there, open_here, SOME)
    source, target = pair.source, pair.target
    chunk = a_chunk(target, SOME)
    target.guard.grant(chunk.transfer, source.peer, chunk.target)
    assert source.guard.submit(chunk)
    fill_sockets(source)
    source.kill()  # and joined
    return target, source


@pytest.mark.clause("C6.4")
def test_control_without_a_fence_bytes_come_after_the_writer_was_joined(open_here, open_there):
    """What the next test is about does happen: a joined process is no fence."""
    target, _source = killed_writer(open_here, open_there)
    memory = memory_of(target)
    at_join = memory.copy()
    (link,) = target.connector._links.values()
    link._agent.get_new_notifs()  # what any progress does
    late = int((memory != at_join).sum())
    assert late > 0, f"{waiting_bytes()} bytes wait"


@pytest.mark.clause("C6.4", "C5.2")
def test_no_byte_of_a_joined_writer_comes_after_the_fence(open_here, open_there):
    target, source = killed_writer(open_here, open_there)
    before = sockets()
    target.guard.fenced(source.peer)
    target.guard.disconnect(source.peer)
    target.pump()
    assert target.told_quiet(source.peer)
    assert waiting_bytes() == 0, "a socket is left through which bytes could come"
    assert sockets() < before, "the link's agent lives on, and what it has open"
    stays(target)


@pytest.mark.clause("C6.4", "T7")
def test_the_fence_holds_although_somebody_keeps_the_errors(open_here, open_there):
    """An exception's traceback holds what the failed call was about; the agent must be gone all the same."""
    before = sockets()
    pair = open_ends(open_here, open_there, SOME)
    source, target = pair.source, pair.target
    of_the_link = sockets() - before
    chunks = [a_chunk(target, SOME) for _ in range(3)]
    for chunk in chunks:
        target.guard.grant(chunk.transfer, source.peer, chunk.target)
    assert all(far_actions.submit_all(source, chunks))
    target.kill()
    pair.pump_until(lambda: len(source.completions) == 3, "T7: all end")
    assert all(str(one.error) for one in source.completions)  # here they are kept
    assert source.told_down(target.peer)
    assert sockets() <= before + of_the_link // 2, "the link's agent lives on with the error that ended it"
    source.guard.fenced(target.peer)
    source.pump()
    assert source.told_quiet(target.peer)


# -- a write that is cancelled, disconnected, late, or whose target stands still ---------------------------------------


def drain(pair):
    """Pump until the source's terminal completion: until then the bytes have gone on, and then they are all there."""
    source, target = pair.source, pair.target
    deadline = time.monotonic() + 60
    shares = [arrived(target)]
    while not any(one.terminal for one in source.completions):
        assert time.monotonic() < deadline, str(source)
        target.pump()
        source.pump()
        shares.append(arrived(target))
    assert shares == sorted(shares)
    assert shares[0] < shares[-1] == ALL, "C6.1: it was said to be terminal, and bytes were still to come"


def outcomes(end):
    return [(one.outcome, one.terminal) for one in end.completions]


@pytest.mark.slow
@pytest.mark.clause("T9", "T5", "C5.2")
def test_a_cancelled_write_ends_only_when_its_bytes_have(open_here, open_there):
    pair, chunk = under_way(open_there, open_here, LARGE)
    pair.source.guard.cancel(chunk.transfer)
    drain(pair)
    assert outcomes(pair.source) == [(Outcome.DONE, True)]
    stays(pair.target, 50)


@pytest.mark.clause("C6.4", "T5")
@pytest.mark.parametrize("who", ["source", "target"])
def test_a_disconnect_in_the_middle_is_quiet_only_when_the_bytes_have_come(open_here, open_there, who):
    pair, _chunk = under_way(open_there, open_here, SOME)
    source, target = pair.source, pair.target
    one, other = (source, target) if who == "source" else (target, source)
    one.guard.disconnect(other.peer)
    assert not target.told_quiet(source.peer)
    drain(pair)
    pair.pump_until(lambda: target.told_quiet(source.peer) and source.told_quiet(target.peer), "C6.4: both are quiet")
    assert outcomes(source) == [(Outcome.DONE, True)]
    stays(target, 50)


@pytest.mark.clause("T8", "C6.1")
def test_a_write_past_its_deadline_is_quarantined_until_its_bytes_have_come(open_here, open_there):
    pair, _chunk = under_way(open_there, open_here, SOME, manual_clock=True)
    source = pair.source
    source.advance(1000)
    source.pump()
    assert outcomes(source) == [(Outcome.TIMED_OUT, False)]
    assert source.guard.statistics()["quarantined_bytes"] == SOME
    drain(pair)
    assert outcomes(source)[1:] == [(Outcome.DONE, True)]
    assert source.guard.statistics()["quarantined_bytes"] == 0
    stays(pair.target, 50)


@pytest.mark.clause("T6", "T5")
def test_a_target_that_stands_still_keeps_the_write_in_progress(open_here, open_there):
    """SIGSTOP in the middle: no end of any kind, and the other peer's chunks pass; then it goes on."""
    pair = open_ends(open_here, open_there, SOME)
    source, target = pair.source, pair.target
    other = open_there("decode-1", TCP)
    with_other = Pair(source, other)
    with_other.connect()
    target.hang()
    chunk = a_chunk(target, SOME)
    assert source.guard.submit(chunk)
    for _ in range(20):
        small = a_chunk(other, 1 << 12)
        other.guard.grant(small.transfer, source.peer, small.target)
        assert source.guard.submit(small)
        with_other.pump_until(
            lambda small=small: any(one.transfer == small.transfer for one in other.receipts), "T6: it passes"
        )
    assert not any(one.transfer == chunk.transfer for one in source.completions)
    target.resume()
    pair.pump_until(lambda: any(one.transfer == chunk.transfer for one in source.completions), "T5: it ends", 60)
    assert all(outcome == (Outcome.DONE, True) for outcome in outcomes(source))
    assert target.apply(far_actions.only, SENT)


@pytest.mark.clause("C6.4", "T7", "T5")
def test_a_target_killed_in_the_middle_ends_its_chunks_and_only_its(open_here, open_there):
    pair = open_ends(open_here, open_there, SOME)
    source, target = pair.source, pair.target
    other = open_there("decode-1", TCP)
    with_other = Pair(source, other)
    with_other.connect()
    lost, kept = a_chunk(target, SOME), a_chunk(other, 1 << 16)
    assert all(far_actions.submit_all(source, [lost, kept]))
    target.kill()
    with_other.pump_until(lambda: len(source.completions) == 2 and len(other.receipts) == 1, "T7: both end")
    ends = {one.transfer: one for one in source.completions}
    assert (ends[kept.transfer].outcome, ends[kept.transfer].terminal) == (Outcome.DONE, True)
    assert (ends[lost.transfer].outcome, ends[lost.transfer].terminal) == (Outcome.FAILED, False)
    assert ends[lost.transfer].source_quiet
    source.guard.fenced(target.peer)
    source.pump()
    assert source.completions[-1].terminal
    assert source.guard.outstanding() == 0


# -- packed chunks: their bytes wait in slots, and are put in their places by the target -----------------------------

PACKED = {**TCP, "packing": "always", "staging_bytes": 4 << 20, "staging_slots": 2}
PIECE = 64 << 10


def a_packed_chunk(target, start, nbytes):
    """Many segments, each the mirror image's place of the other side, so that none can be merged."""
    places = range(start, start + nbytes, PIECE)
    rows = segments(*((0, place, PIECE) for place in places))
    mirrored = segments(*((0, place, PIECE) for place in reversed(places)))
    return Chunk(new_transfer_id(), 0, target.peer, rows, mirrored, nbytes)


def killed_packer(open_here, open_there, passes):
    """A target whose writer of packed parts was killed and joined with parts under way.

    ``passes``: how often the target has polled, so that some parts may be in their places.
    """
    pair = open_ends(open_there, open_here, SOME, PACKED)
    source, target = pair.source, pair.target
    chunk = a_packed_chunk(target, 0, SOME)
    target.guard.grant(chunk.transfer, source.peer, chunk.target)
    assert source.guard.submit(chunk)
    deadline = time.monotonic() + 60
    while arrived(target) < min(passes, 0.1):
        assert time.monotonic() < deadline, "no part comes to its place"
        source.pump()
        target.pump()
    fill_sockets(source)
    source.kill()  # and joined
    assert arrived(target) < ALL
    return target, source


@pytest.mark.clause("C6.4")
def test_control_without_a_fence_packed_bytes_come_after_the_writer_was_joined(open_here, open_there):
    """Into the slots: what the next test is about does happen."""
    target, _source = killed_packer(open_here, open_there, 0)
    (link,) = target.connector._links.values()
    slots = link._mover._memory
    at_join = slots.copy()
    link._agent.get_new_notifs()  # what any progress does
    assert (slots != at_join).any()


@pytest.mark.clause("C6.4", "C5.2", "T3")
@pytest.mark.parametrize("passes", [0, 1], ids=["before-any-part", "after-some-parts"])
def test_no_packed_byte_of_a_joined_writer_comes_after_the_fence(open_here, open_there, passes):
    target, source = killed_packer(open_here, open_there, passes)
    before = sockets()
    target.guard.fenced(source.peer)
    target.guard.disconnect(source.peer)
    target.pump()
    assert target.told_quiet(source.peer)
    assert waiting_bytes() == 0, "a socket is left through which bytes could come"
    assert sockets() < before, "the link's agent lives on, and what it has open"
    assert [receipt.transfer for receipt in target.receipts] == [], "T3: the chunk is not complete"
    stays(target)


@pytest.mark.clause("T9", "T5", "C5.2")
def test_of_cancelled_packed_chunks_one_that_has_begun_ends_with_its_bytes_and_another_writes_none(
    open_here, open_there
):
    pair = open_ends(open_there, open_here, SOME, PACKED)
    source, target = pair.source, pair.target
    half = SOME // 2
    chunks = [a_packed_chunk(target, start, half) for start in (0, half)]
    for chunk in chunks:
        target.guard.grant(chunk.transfer, source.peer, chunk.target)
        assert source.guard.submit(chunk)
    deadline = time.monotonic() + 60
    while arrived(target) < 0.01:
        assert time.monotonic() < deadline, "nothing arrives"
        source.pump()
        target.pump()
    for chunk in chunks:
        source.guard.cancel(chunk.transfer)
    pair.pump_until(lambda: sum(one.terminal for one in source.completions) == 2, "T9: both end", 60)
    ends = {one.transfer: one.outcome for one in source.completions if one.terminal}
    assert [ends[chunk.transfer] for chunk in chunks] == [Outcome.DONE, Outcome.CANCELLED]
    memory = memory_of(target)
    assert (memory[:half] == SENT).all(), "C6.1: it was said to be terminal, and bytes were still to come"
    assert (memory[half:] == POISON).all(), "T9: a chunk that was taken back has been written"
    stays(target, 50)


@pytest.mark.clause("C6.4", "T7", "T5")
def test_a_target_killed_under_packed_parts_ends_them_all(open_here, open_there):
    pair = open_ends(open_here, open_there, SOME, PACKED)
    source, target = pair.source, pair.target
    chunks = [a_packed_chunk(target, 0, SOME) for _ in range(2)]
    assert all(far_actions.submit_all(source, chunks))
    source.pump()
    target.kill()
    pair.pump_until(lambda: len(source.completions) == 2, "T7: both end")
    assert {one.outcome for one in source.completions} == {Outcome.FAILED}
    assert all(one.source_quiet for one in source.completions)
    source.guard.fenced(target.peer)
    source.pump()
    assert source.told_quiet(target.peer)
    assert source.guard.outstanding() == 0
