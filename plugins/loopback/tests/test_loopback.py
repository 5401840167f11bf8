"""The reference transport against every clause of the transport contract, alone and inside the guard."""

import os
import random
import subprocess
import sys
import textwrap
import threading

import msgspec
import pytest
from pydantic import ValidationError

from kvbaton.connector import IDLE, Chunk, Endpoint, MemoryRegion, Need, Outcome
from kvbaton.errors import LocalProtocolError, Outstanding, PeerLost, RegistrationError
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton_conformance.harness import Pair, open_end, open_pair, segments
from kvbaton_loopback import connector as connector_module
from kvbaton_loopback import plugin
from kvbaton_loopback.copying import copy_segments
from kvbaton_loopback.ether import ETHER, Address
from kvbaton_loopback.options import LoopbackOptions

MANUAL = {"carrier": "manual"}


@pytest.fixture
def pair():
    with open_pair(plugin) as pair:
        yield pair


@pytest.fixture
def manual():
    """A pair whose bytes move when the test says so."""
    with open_pair(plugin, MANUAL) as pair:
        yield pair
        while pair.source.connector.wire.finish() or pair.source.connector.wire.step():
            pass


def send(pair, length=256, at=0, **fields):
    return pair.send(segments((0, at, length)), segments((1, at, length)), **fields)


def heard(end):
    return [(completion.outcome, completion.terminal) for completion in end.completions]


# -- T1, T2 ------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T1")
def test_device_memory_is_refused_at_once():
    connector = plugin.open(LoopbackOptions(), type("Context", (), {"peer": PeerId("d", 1)}))
    with pytest.raises(RegistrationError, match="cuda memory"):
        connector.register([MemoryRegion(0, "cuda", 0, 4096, 10)])
    connector.close()


@pytest.mark.clause("T1")
def test_region_memory_outlives_close():
    with open_pair(plugin) as pair:
        sent = send(pair)
        pair.pump_until(lambda: sent.received and sent.done)
        region = pair.target.memory.regions[1]
    assert region.view()[:4].tolist() == list(sent.expected.regions[1][:4])


@pytest.mark.clause("T2")
@pytest.mark.parametrize("first", [0, 1])
def test_up_means_that_both_have_accepted(first):
    with open_pair(plugin, connect=False) as pair:
        ends = [pair.source, pair.target]
        one, other = ends[first], ends[1 - first]
        one.guard.connect(other.guard.endpoint())
        pair.pump_idle()
        assert not one.peers  # the other has not accepted yet
        other.guard.connect(one.guard.endpoint())
        pair.pump_until(lambda: one.is_up(other.peer) and other.is_up(one.peer))
        assert len(one.peers) == len(other.peers) == 1


@pytest.mark.clause("T2")
def test_another_process_is_refused_with_the_reason():
    program = textwrap.dedent("""
        import sys
        from kvbaton_conformance.harness import open_end
        from kvbaton.identity import PeerId
        from kvbaton_loopback import plugin
        end = open_end(plugin, plugin.Options(), PeerId("decode-0", 5))
        sys.stdout.buffer.write(end.guard.endpoint().encode())
    """)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=True)
    assert result.stderr == b""  # T10: exit without close
    with open_pair(plugin, connect=False) as pair:
        elsewhere = Endpoint.decode(result.stdout)
        pair.source.guard.connect(elsewhere)
        pair.pump_until(lambda: bool(pair.source.peers))
        (event,) = pair.source.peers
        assert not event.up
        assert "loopback reaches its own process only" in str(event.error)
        assert str(os.getpid()) in str(event.error)


@pytest.mark.clause("T2")
def test_nonsense_and_closed_addresses_are_refused(pair):
    endpoint = pair.target.guard.endpoint()
    nonsense = msgspec.structs.replace(endpoint, peer=PeerId("other", 1), metadata=b"\xc1")
    pair.source.guard.connect(nonsense)
    gone = Address(os.getpid(), ETHER._process, 10**9)
    pair.source.guard.connect(msgspec.structs.replace(endpoint, peer=PeerId("gone", 1), metadata=gone.encode()))
    pair.pump_until(lambda: len(pair.source.peers) == 3)
    assert "did not send a loopback address" in str(pair.source.peers[1].error)
    assert "has closed" in str(pair.source.peers[2].error)


@pytest.mark.clause("T2", "C1.4")
def test_a_restarted_peer_replaces_the_old_one(pair):
    pair.target.connector.kill()
    pair.pump_until(lambda: pair.source.is_down(pair.target.peer))
    reborn = open_end(plugin, LoopbackOptions(), PeerId.start(pair.target.peer.name))
    again = Pair(pair.source, reborn)
    again.connect()
    sent = send(again)
    again.pump_until(lambda: sent.received and sent.done)
    reborn.memory.check(sent.expected)
    reborn.guard.close()


@pytest.mark.clause("T2", "C1.4")
def test_a_new_epoch_while_the_old_one_lives_severs_the_old_one(pair):
    old = pair.target
    reborn = open_end(plugin, LoopbackOptions(), PeerId.start(old.peer.name))
    again = Pair(pair.source, reborn)
    again.connect()
    again.pump_until(lambda: pair.source.told_quiet(old.peer))
    old.pump()
    assert old.is_down(pair.source.peer)
    reborn.guard.close()


# -- T3, T4 ------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T3", "C3.1")
def test_exactly_the_segments_and_nothing_else(pair):
    reads = segments((0, 0, 100), (1, 5, 50), (0, 4096, 4096), (0, 12288, 4096), (0, 777, 1))
    writes = segments((0, 7, 100), (0, 900, 50), (0, 8192, 4096), (0, 20480, 4096), (1, 16383, 1))
    sent = pair.send(reads, writes)
    pair.pump_until(lambda: sent.received and sent.done)
    pair.target.memory.check(sent.expected)


@pytest.mark.clause("T3", "T4")
@pytest.mark.parametrize(
    "options", [{}, {"reorder": 5, "duplicate_receipts": 0.5}, {"latency": 0.001, "bandwidth": 1e9}]
)
@pytest.mark.parametrize("reverse", [False, True])
def test_random_chunks_of_several_transfers(options, reverse):
    draw = random.Random(5)
    with open_pair(plugin, options | {"seed": 3}) as pair:
        if reverse:
            pair.order = (pair.target, pair.source)
        places = list(range(0, 1 << 16, 512))
        draw.shuffle(places)
        base, everything = pair.target.memory.image(), []
        for _ in range(4):
            transfer = new_transfer_id()
            pair.target.guard.grant(transfer, pair.source.peer, segments())
            for sequence in range(8):
                rows = [(0, draw.randrange((1 << 16) - 512), draw.choice([1, 64, 512])) for _ in range(4)]
                writes = [(0, places.pop(), row[2]) for row in rows]
                sent = pair.send(segments(*rows), segments(*writes), transfer=transfer, sequence=sequence, base=base)
                base = sent.expected
                everything.append(sent)
        pair.pump_until(lambda: all(sent.received and sent.done for sent in everything))
        pair.pump_idle()
        pair.target.memory.check(base)
        assert all(len(sent.completions) == 1 for sent in everything)
        copies = [len(sent.receipts) for sent in everything]
        assert set(copies) == ({1, 2} if "duplicate_receipts" in options else {1})


@pytest.mark.clause("T3")
def test_no_receipt_before_its_bytes_and_no_byte_after(manual):
    before = manual.target.memory.image()
    sent = send(manual)
    wire = manual.source.connector.wire
    assert wire.start()
    manual.pump_idle()
    assert not sent.received
    assert not sent.completions
    manual.target.memory.untouched(before)
    assert wire.finish()
    manual.pump()
    assert sent.received
    manual.target.memory.check(sent.expected)
    manual.source.memory.poison()
    manual.pump_idle()
    manual.target.memory.check(sent.expected)


@pytest.mark.clause("T3", "T5")
def test_while_bytes_move_neither_end_has_heard_anything(manual, monkeypatch):
    def copy(*arguments):
        assert manual.target.connector.poll() is IDLE
        assert manual.source.connector.poll() is IDLE
        copy_segments(*arguments)

    monkeypatch.setattr(connector_module, "copy_segments", copy)
    sent = send(manual)
    manual.source.connector.wire.step()
    manual.pump()
    assert sent.received
    assert sent.done


@pytest.mark.clause("T5", "T7")
def test_a_copy_that_fails_has_no_receipt(manual, monkeypatch):
    def copy(*arguments):
        raise MemoryError("no")

    monkeypatch.setattr(connector_module, "copy_segments", copy)
    sent = send(manual)
    manual.source.connector.wire.step()
    manual.pump_idle()
    assert heard(manual.source) == [(Outcome.FAILED, True)]
    assert not sent.received


@pytest.mark.clause("T3")
def test_a_chunk_without_bytes_is_received(pair):
    sent = pair.send(segments(), segments())
    pair.pump_until(lambda: sent.received and sent.done)


@pytest.mark.clause("T4")
def test_reordering_is_the_same_for_the_same_seed():
    def order(seed):
        with open_pair(plugin, MANUAL | {"reorder": 6, "seed": seed}) as pair:
            transfer = new_transfer_id()
            pair.target.guard.grant(transfer, pair.source.peer, segments())
            for sequence in range(20):
                send(pair, at=256 * sequence, length=8, transfer=transfer, sequence=sequence)
            while pair.source.connector.wire.step():
                pair.pump()
            return [receipt.sequence for receipt in pair.target.receipts]

    assert order(1) == order(1) != order(2)
    assert sorted(order(1)) == list(range(20)) != order(1)


# -- T5, T6 ------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T5", "T6")
def test_a_full_queue_says_so_and_drops_nothing():
    with open_pair(plugin, MANUAL | {"queue_limit": 2}) as pair:
        transfer = new_transfer_id()
        pair.target.guard.grant(transfer, pair.source.peer, segments())
        sent = [send(pair, at=256 * number, length=8, transfer=transfer, sequence=number) for number in range(3)]
        assert [one.accepted for one in sent] == [True, True, False]
        pair.source.connector.wire.step()
        pair.pump()
        assert pair.source.guard.submit(sent[2].chunk)
        while pair.source.connector.wire.step():
            pass
        pair.pump_until(lambda: all(one.done for one in sent))
        assert pair.source.guard.statistics()["inflight_bytes"] == 0


@pytest.mark.clause("T6")
def test_a_frozen_peer_does_not_stall_another():
    with open_pair(plugin, {"queue_limit": 4}) as pair:
        third = open_end(plugin, LoopbackOptions(), PeerId.start("decode-1"))
        other = Pair(pair.source, third)
        other.connect()
        pair.source.connector.wire.hold(pair.target.peer)
        frozen = [send(pair, at=256 * number, length=8) for number in range(6)]
        assert [sent.accepted for sent in frozen] == [True] * 4 + [False] * 2
        for number in range(50):
            sent = send(other, at=256 * number, length=8)
            assert sent.accepted
            other.pump_until(lambda sent=sent: sent.received and sent.done)
        assert not any(sent.completions for sent in frozen)
        pair.source.connector.wire.resume(pair.target.peer)
        pair.pump_until(lambda: all(sent.done for sent in frozen[:4]))
        third.guard.close()


@pytest.mark.clause("T5", "T7")
def test_told_to_fail_a_chunk_fails_quiet_and_moves_no_byte():
    with open_pair(plugin, {"fail_chunks": [1]}) as pair:
        good, bad = send(pair), send(pair, at=512)
        pair.pump_until(lambda: good.over and bad.over)
        assert heard(pair.source) == [(Outcome.DONE, True), (Outcome.FAILED, True)]
        pair.pump_idle()
        assert not bad.received
        pair.target.memory.check(good.expected)


# -- T7, T8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T7")
@pytest.mark.parametrize("end", ["close", "kill"])
def test_a_peer_that_is_gone_is_an_event_and_its_chunks_fail(end):
    with open_pair(plugin, MANUAL) as pair:
        before = pair.target.memory.image()
        sent = [send(pair, at=512 * number) for number in range(3)]
        getattr(pair.target.connector, end)()
        pair.target.guard.close()
        for _ in range(3):
            pair.source.pump()
        assert [(one.completions[0].outcome, one.over) for one in sent] == [(Outcome.FAILED, True)] * 3
        (up, down) = pair.source.peers
        assert (up.up, down.up, down.quiet) == (True, False, True)
        assert isinstance(down.error, PeerLost)
        assert not pair.source.connector.wire.step()
        pair.target.memory.untouched(before)


@pytest.mark.clause("T7")
def test_a_killed_source_is_an_event_at_the_target_and_writes_no_more(manual):
    before = manual.target.memory.image()
    send(manual)
    manual.source.connector.kill()
    manual.source.dead = True
    manual.target.pump()
    assert manual.target.told_quiet(manual.source.peer)
    assert not manual.source.connector.wire.step()
    manual.target.memory.untouched(before)


@pytest.mark.clause("T8", "C6.1")
def test_a_stalled_chunk_times_out_stays_owned_and_ends_late():
    with open_pair(plugin, {"stall_chunks": [0]}, chunk_deadline=0.05) as pair:
        stalled, other = send(pair), send(pair, at=512)
        pair.pump_until(lambda: bool(stalled.completions) and other.done)
        assert [completion.outcome for completion in stalled.completions] == [Outcome.TIMED_OUT]
        assert pair.source.guard.statistics()["quarantined_bytes"] == 256
        with pytest.raises(Outstanding):
            pair.source.guard.close()
        pair.source.connector.wire.resume(pair.target.peer)
        pair.pump_until(lambda: stalled.over)
        assert stalled.completions[-1].outcome is Outcome.DONE
        assert pair.source.guard.statistics()["quarantined_bytes"] == 0


@pytest.mark.clause("T8", "C6.4")
def test_a_fence_ends_a_stalled_chunk():
    with open_pair(plugin, {"stall_chunks": [0]}, chunk_deadline=0.05) as pair:
        before = pair.target.memory.image()
        stalled = send(pair)
        pair.pump_until(lambda: bool(stalled.completions))
        pair.source.guard.fenced(pair.target.peer)
        pair.pump_until(lambda: stalled.over)
        assert stalled.completions[-1].outcome is Outcome.FAILED
        pair.pump_idle()
        pair.target.memory.untouched(before)


# -- T9, grants, fences ------------------------------------------------------------------------------------------------


@pytest.mark.clause("T9")
def test_cancel_takes_what_waits_and_lets_the_started_one_drain(manual):
    transfer = new_transfer_id()
    manual.target.guard.grant(transfer, manual.source.peer, segments())
    started, waiting = (send(manual, at=512 * number, transfer=transfer, sequence=number) for number in range(2))
    other = send(manual, at=4096)
    assert manual.source.connector.wire.start()
    manual.source.guard.cancel(transfer)
    manual.pump()
    assert [completion.outcome for completion in waiting.completions] == [Outcome.CANCELLED]
    assert waiting.over
    assert not started.completions
    while manual.source.connector.wire.finish() or manual.source.connector.wire.step():
        pass
    manual.pump()
    assert started.done
    assert other.done
    assert not waiting.received


@pytest.mark.clause("C5.2")
def test_after_revoke_nothing_of_the_transfer_is_written(manual):
    before = manual.target.memory.image()
    sent = send(manual)
    assert manual.target.guard.revoke(sent.chunk.transfer)
    manual.source.connector.wire.step()
    manual.pump()
    assert heard(manual.source) == [(Outcome.FAILED, True)]
    assert "has not granted" in str(manual.source.completions[0].error)
    assert not sent.received
    manual.target.memory.untouched(before)


@pytest.mark.clause("C5.2")
def test_revoke_promises_nothing_while_a_copy_is_under_way(manual):
    sent = send(manual)
    wire = manual.source.connector.wire
    wire.start()
    assert not manual.target.guard.revoke(sent.chunk.transfer)
    wire.finish()
    assert manual.target.guard.revoke(sent.chunk.transfer)
    manual.pump()
    assert sent.done


@pytest.mark.clause("C5.2")
def test_once_revoked_nothing_more_starts_although_something_has_started(manual):
    transfer = new_transfer_id()
    manual.target.guard.grant(transfer, manual.source.peer, segments())
    started, late = (send(manual, at=512 * number, transfer=transfer, sequence=number) for number in range(2))
    wire = manual.source.connector.wire
    assert wire.start()
    assert not manual.target.guard.revoke(transfer)
    wire.finish()
    wire.step()
    manual.pump()
    assert [sent.completions[0].outcome for sent in (started, late)] == [Outcome.DONE, Outcome.FAILED]
    manual.target.memory.check(started.expected)
    assert not manual.target.connector._grants


@pytest.mark.clause("C1.4", "C5.2")
def test_a_grant_is_to_one_peer(manual):
    before = manual.target.memory.image()
    transfer = new_transfer_id()
    other = open_end(plugin, LoopbackOptions(), PeerId.start("prefill-1"))
    Pair(other, manual.target).connect()
    manual.target.guard.grant(transfer, other.peer, segments())
    sent = send(manual, transfer=transfer)
    manual.source.connector.wire.step()
    manual.pump()
    assert heard(manual.source) == [(Outcome.FAILED, True)]
    assert not sent.received
    manual.target.memory.untouched(before)
    other.guard.close()


@pytest.mark.clause("C6.4", "T5")
def test_once_disconnecting_nothing_more_starts_although_something_has_started():
    with open_pair(plugin, MANUAL | {"stall_chunks": [0]}) as pair:
        stalled, started = send(pair), send(pair, at=512)
        wire = pair.source.connector.wire
        assert wire.start()
        pair.target.guard.disconnect(pair.source.peer)
        wire.resume(pair.target.peer)
        wire.finish()
        wire.step()
        pair.pump()
        assert (stalled.completions[0].outcome, started.completions[0].outcome) == (Outcome.FAILED, Outcome.DONE)
        assert pair.source.told_quiet(pair.target.peer)
        assert not stalled.received


@pytest.mark.clause("C6.4")
def test_disconnect_fences_at_once_what_is_not_started(manual):
    before = manual.target.memory.image()
    sent = send(manual)
    manual.target.guard.disconnect(manual.source.peer)
    manual.pump()
    assert manual.target.told_quiet(manual.source.peer)
    assert manual.source.told_quiet(manual.target.peer)
    assert heard(manual.source) == [(Outcome.FAILED, True)]
    assert not manual.source.connector.wire.step()
    assert not manual.source.guard.submit(sent.chunk) or not manual.source.connector.wire.step()
    manual.target.memory.untouched(before)


@pytest.mark.clause("C6.4", "T5")
def test_disconnect_is_not_quiet_while_a_copy_is_under_way(manual):
    sent = send(manual)
    wire = manual.source.connector.wire
    wire.start()
    manual.target.guard.disconnect(manual.source.peer)
    manual.pump_idle()
    assert not manual.target.told_quiet(manual.source.peer)
    assert not manual.source.told_quiet(manual.target.peer)
    wire.finish()
    manual.pump()
    assert sent.done
    assert manual.target.told_quiet(manual.source.peer)
    assert manual.source.told_quiet(manual.target.peer)


@pytest.mark.clause("C6.4")
def test_a_stalled_writer_is_fenced_for_the_target_and_still_owns_its_source():
    with open_pair(plugin, MANUAL | {"stall_chunks": [0]}) as pair:
        before = pair.target.memory.image()
        stalled = send(pair)
        assert not pair.source.connector.wire.step()  # it stalls
        pair.target.guard.disconnect(pair.source.peer)
        pair.pump_idle()
        assert pair.target.told_quiet(pair.source.peer)
        assert not pair.source.told_quiet(pair.target.peer)  # one-way
        assert not stalled.over
        pair.source.connector.wire.resume(pair.target.peer)
        pair.source.connector.wire.step()
        pair.pump()
        assert heard(pair.source) == [(Outcome.FAILED, True)]
        assert pair.source.told_quiet(pair.target.peer)
        pair.target.memory.untouched(before)


# -- T10, T11, T12 -----------------------------------------------------------------------------------------------------


@pytest.mark.clause("T10")
def test_close_refuses_while_chunks_are_outstanding_and_leaves_nothing(manual):
    send(manual)
    connector = manual.source.connector
    with pytest.raises(Outstanding):
        connector.close()
    connector.wire.step()
    manual.pump()
    connector.close()
    connector.close()
    assert connector not in ETHER._present.values()
    assert manual.target.pump()
    assert manual.target.told_quiet(manual.source.peer)


@pytest.mark.clause("T10")
def test_no_thread_is_left():
    before, present = set(threading.enumerate()), dict(ETHER._present)
    with open_pair(plugin) as pair:
        sent = send(pair)
        pair.pump_until(lambda: sent.done and sent.received)
        assert set(threading.enumerate()) - before
    assert set(threading.enumerate()) == before
    assert present == ETHER._present


@pytest.mark.clause("T10")
@pytest.mark.parametrize("close", [True, False])
def test_exit_is_silent_with_and_without_close(close):
    program = textwrap.dedent(f"""
        from kvbaton.identity import PeerId
        from kvbaton_conformance.harness import Pair, close_ends, open_end, segments
        from kvbaton_loopback import plugin
        pair = Pair(*(open_end(plugin, plugin.Options(latency=60), PeerId(name, 1)) for name in "pd"))
        pair.connect()
        assert pair.send(segments((0, 0, 256)), segments((0, 0, 256))).accepted
        if {close}:
            close_ends([pair.source, pair.target])
    """)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stderr, result.stdout) == (0, b"", b"")


@pytest.mark.clause("T11")
def test_wait_returns_when_something_arrives(manual):
    end = manual.source
    send(manual)
    stepper = threading.Thread(target=manual.source.connector.wire.step)
    stepper.start()
    end.guard.wait(30.0)  # far below the test's own limit only if it is woken
    stepper.join(10)
    assert end.pump()


@pytest.mark.clause("T12")
def test_nothing_grows_with_finished_transfers(pair):
    def sizes():
        return [
            (name, len(value))
            for end in (pair.source, pair.target)
            for owner in (end.connector, end.connector.wire)
            for name, value in vars(owner).items()
            if isinstance(value, (dict, list, set))
        ]

    def once():
        sent = send(pair)
        pair.pump_until(lambda: sent.received and sent.done)
        pair.source.guard.acknowledge(sent.chunk.transfer)
        for end in (pair.source, pair.target):
            end.guard.forget(sent.chunk.transfer)
            end.completions.clear()
            end.receipts.clear()

    once()
    before = sizes()
    for _ in range(100):
        once()
    assert sizes() == before
    assert not pair.source.guard.needs_polling
    assert not pair.target.guard.needs_polling


@pytest.mark.clause("T12")
def test_poll_says_idle_when_nothing_happened(pair):
    pair.pump_idle()
    assert pair.source.connector.poll() is IDLE


# -- T13, the plugin object --------------------------------------------------------------------------------------------


@pytest.mark.clause("T13")
def test_probe_tells_what_it_reaches():
    assert plugin.probe(Need()).usable
    for need in (Need("cuda", "same_process"), Need("host", "cross_process"), Need("host", "cross_host")):
        answer = plugin.probe(need)
        assert not answer.usable
        assert answer.reason
        assert answer.remedy
    assert plugin.probe(Need()).capabilities.same_process


@pytest.mark.parametrize(
    "bad", [{"latncy": 1}, {"latency": -1}, {"queue_limit": 0}, {"carrier": "pigeon"}, {"duplicate_receipts": 2}]
)
def test_bad_options_are_refused(bad):
    with pytest.raises(ValidationError):
        LoopbackOptions(**bad)


def test_importing_the_plugin_opens_and_loads_no_connector():
    program = (
        "import sys, kvbaton_loopback; assert 'kvbaton_loopback.connector' not in sys.modules;"
        " assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_chunk_for_a_peer_that_was_never_connected_fails_without_the_guard_too(pair):
    stranger = PeerId("nobody", 1)
    connector = pair.source.connector
    with pytest.raises(LocalProtocolError):
        pair.source.guard.submit(Chunk(new_transfer_id(), 0, stranger, segments(), segments(), 0))
    assert connector.submit(Chunk(new_transfer_id(), 0, stranger, segments(), segments(), 0))
    (completion,) = connector.poll().completions
    assert (completion.outcome, completion.terminal) == (Outcome.FAILED, True)
