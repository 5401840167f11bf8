"""The transport ``ucx``: what is under way when somebody revokes, disconnects, stands still, dies or lies."""

import importlib.util
import random
import socket

import msgspec
import numpy as np
import pytest

from kvbaton import cuda
from kvbaton.connector import Chunk, ConnectorContext, MemoryRegion, Need, Outcome
from kvbaton.errors import OptionsError, PluginUnavailable, RegistrationError, TransportError
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.plugins import choose_connector
from kvbaton.segments import Segments
from kvbaton_conformance.harness import Pair, close_ends, open_end, open_pair, segments
from kvbaton_conformance.subject import Reference, resolve
from kvbaton_conformance.two_process import Processes, remote_pair
from kvbaton_cuda_ipc import library, ucx_plugin
from kvbaton_cuda_ipc import options as wire_options
from kvbaton_cuda_ipc.grants import Grant
from kvbaton_cuda_ipc.parts import Answer, Bye, Offer, Outgoing, plan, say
from kvbaton_cuda_ipc.ucx import PROTOCOL
from kvbaton_cuda_ipc.wire import Settings, Up, Wire

#: Some parts more than there are slots, of :data:`SHORT`.
LARGE = 10 << 20
SHORT = {"slot_bytes": 1 << 20}
ROW = segments((0, 0, 64))


@pytest.fixture
def pair():
    with open_pair(ucx_plugin, {}) as pair:
        yield pair


@pytest.fixture(scope="module")
def processes():
    kept = Processes()
    yield kept
    assert not kept.close()


def apart(processes, **how):
    return remote_pair(processes, resolve("ucx", SHORT, Reference("ucx"), "ucx"), **how)


def works(pair):
    sent = pair.send(segments((0, 0, 256)), segments((1, 0, 256)))
    pair.pump_until(lambda: sent.received and sent.done, "T3: a chunk arrives")
    pair.target.memory.check(sent.expected)
    return True


def under_way(pair):
    """A large chunk, of which a part has been written at the target, and not the last."""
    whole = segments((0, 0, LARGE))
    before = pair.target.memory.read(segments((0, 0, 4096)))
    sent = pair.send(whole, whole)
    pair.pump_until(lambda: pair.target.memory.read(segments((0, 0, 4096))) != before, "T3: the first bytes arrive")
    assert not sent.received
    return sent


# -- parts -------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T3", "C3.2")
@pytest.mark.parametrize("options", [{}, {"slots": 1, "slot_bytes": 4096}, {"slots": 3, "slot_bytes": 10_000}])
def test_chunks_of_any_shape_arrive_whole(options):
    draw = random.Random(11)
    with open_pair(ucx_plugin, options, regions={0: 1 << 20, 1: 300_000}) as pair:
        sent = []
        for _ in range(12):
            shape = draw.choice(["one", "rows", "any"])
            if shape == "one":
                lengths = [draw.randint(1, 250_000)]
            elif shape == "rows":
                lengths = [draw.choice([16, 512, 5000])] * draw.randint(2, 50)
            else:
                lengths = [draw.randint(1, 6000) for _ in range(draw.randint(2, 60))]
            reads, writes = [], []
            for ends in (reads, writes):
                region, limit = draw.choice([(0, 1 << 20), (1, 300_000)])
                gaps = sorted(draw.sample(range(limit - sum(lengths)), len(lengths)))
                place = 0
                for gap, length in zip(gaps, lengths, strict=True):
                    ends.append((region, gap + place, length))
                    place += length
            order = list(range(len(lengths)))
            draw.shuffle(order)
            source, target = Segments.of([reads[i] for i in order]), Segments.of([writes[i] for i in order])
            one = pair.send(source, target)
            sent.append(one)
            pair.pump_until(lambda one=one: one.received and one.done, "T3: it arrives")
            pair.target.memory.check(one.expected, "T3")


def test_a_plan_has_every_byte_once_and_keeps_its_limits():
    draw = random.Random(5)
    for _ in range(200):
        lengths = [draw.randint(1, 900) for _ in range(draw.randint(0, 30))]
        begin = np.cumsum([0, *[length + draw.choice([0, 7]) for length in lengths]])[:-1]
        source = Segments([0] * len(lengths), begin, lengths) if lengths else Segments.empty()
        target = Segments([1] * len(lengths), begin + 5000, lengths) if lengths else Segments.empty()
        chunk = Chunk(new_transfer_id(), 0, PeerId("p", 1), source, target, source.nbytes)
        limit = draw.choice([64, 1000, 10**6])
        alone = draw.choice([None, 1, 400, 10**6])
        planned = list(plan(chunk, limit, alone))
        if alone == 1:
            assert all(len(one.source) <= 1 for one in planned)
        assert [one.number for one in planned] == list(range(len(planned)))
        assert {one.count for one in planned} == {len(planned)}
        assert all(one.nbytes <= limit for one in planned)
        read, written = bytes_of([one.source for one in planned]), bytes_of([one.target for one in planned])
        assert [(0, at) for _, at in read] == [(0, at - 5000) for _, at in written] == bytes_of([source])


def bytes_of(lists):
    return [
        (region, at) for one in lists for region, start, length in one.triples() for at in range(start, start + length)
    ]


def test_grants_against_a_reading_byte_by_byte():
    draw = random.Random(7)
    for _ in range(300):
        cuts = sorted(draw.sample(range(64), 8))
        granted = [(draw.randrange(3), start, end - start) for start, end in zip(cuts[::2], cuts[1::2], strict=True)]
        draw.shuffle(granted)
        allowed = {(region, at + byte) for region, at, length in granted for byte in range(length)}
        grant = Grant(PeerId("p", 1), Segments.of(granted))
        for _ in range(20):
            asked = [(draw.randrange(4), draw.randrange(60), draw.randint(1, 6)) for _ in range(draw.randint(1, 2))]
            wanted = {(region, at + byte) for region, at, length in asked for byte in range(length)}
            assert grant.covers(Segments.of(asked)) == (wanted <= allowed), (granted, asked)
    assert not grant.covers(Segments([0], [1], [(1 << 63) - 1]))
    assert Grant(PeerId("p", 1), Segments.empty()).covers(Segments.empty())


# -- revocation and disconnection in the middle of a chunk -------------------------------------------------------------


def is_frozen_and_revoked(pair, freeze, thaw):
    """The target takes its memory back while the sender is frozen, and uses it; what the sender goes on to send goes
    nowhere."""
    sent = under_way(pair)
    freeze()
    assert pair.target.guard.revoke(sent.chunk.transfer)
    pair.target.memory.poison()
    reused = pair.target.memory.image()
    thaw()
    pair.pump_until(lambda: sent.over, "T5: the chunk ends")
    pair.pump_idle()
    assert [(c.outcome, c.terminal) for c in sent.completions] == [(Outcome.FAILED, True)]
    assert "not any more" in str(sent.completions[0].error)
    assert not sent.received
    pair.target.memory.untouched(reused, "C5.2")
    pair.target.guard.forget(sent.chunk.transfer)


@pytest.mark.clause("C5.2", "T5")
def test_late_bytes_of_a_frozen_sender_go_nowhere_after_revoke():
    with open_pair(ucx_plugin, SHORT, regions={0: LARGE, 1: 4096}) as pair:
        is_frozen_and_revoked(pair, lambda: pair.clog(pair.source), pair.unclog)
        assert works(pair)


@pytest.mark.clause("C5.2", "T5")
def test_late_bytes_of_a_stopped_process_go_nowhere_after_revoke(processes):
    with apart(processes, regions={0: LARGE, 1: 4096}) as pair:
        is_frozen_and_revoked(pair, pair.source.hang, pair.source.resume)
        assert works(pair)


@pytest.mark.clause("C6.4", "T5")
@pytest.mark.parametrize("sender", ["polls", "stands-still"])
def test_a_disconnect_in_the_middle_of_a_chunk_is_quiet_at_once_without_the_sender(processes, sender):
    with apart(processes, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        if sender == "stands-still":
            pair.source.hang()
        pair.target.guard.disconnect(pair.source.peer)
        pair.target.pump()
        assert pair.target.told_quiet(pair.source.peer)
        pair.target.memory.poison()
        reused = pair.target.memory.image()
        if sender == "stands-still":
            pair.source.resume()
        pair.pump_until(lambda: sent.over and pair.source.told_quiet(pair.target.peer), "T5: the chunk ends")
        assert [(c.outcome, c.terminal) for c in sent.completions] == [(Outcome.FAILED, True)]
        pair.target.memory.untouched(reused, "C6.4")


@pytest.mark.clause("C6.4", "T5")
def test_a_source_that_disconnects_finishes_what_it_has_started():
    with open_pair(ucx_plugin, SHORT, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        waiting = pair.send(segments((1, 0, 64)), segments((1, 0, 64)))
        pair.source.guard.disconnect(pair.target.peer)
        pair.source.pump()
        assert [c.outcome for c in waiting.completions] == [Outcome.CANCELLED]
        assert not pair.source.told_quiet(pair.target.peer)
        pair.pump_until(lambda: pair.source.told_quiet(pair.target.peer), "C6.4: quiet when it has drained")
        assert sent.done
        assert sent.received
        pair.pump_until(lambda: pair.target.told_quiet(pair.source.peer), "C6.4: and so is the target")
        assert not waiting.received


@pytest.mark.clause("C6.4", "T5")
def test_while_a_disconnect_waits_for_our_own_chunk_nothing_of_the_peer_lands():
    """Both send: what has started at the disconnected peer, and what it has queued, is refused."""
    with open_pair(ucx_plugin, SHORT, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        queued = pair.send(segments((1, 0, 64)), segments((1, 0, 64)))
        back, row = new_transfer_id(), segments((1, 512, 64))
        pair.source.guard.grant(back, pair.target.peer, row)
        assert pair.target.guard.submit(Chunk(back, 0, pair.source.peer, row, row, 64))
        pair.target.pump()  # it has started, and the source does not answer yet
        pair.target.guard.disconnect(pair.source.peer)
        pair.target.memory.poison()
        reused = pair.target.memory.image()
        pair.pump_until(lambda: sent.over and queued.over and bool(pair.target.completions), "T5: all chunks end")
        assert [c.outcome for c in (*sent.completions, *queued.completions)] == [Outcome.FAILED] * 2
        assert [c.outcome for c in pair.target.completions] == [Outcome.DONE]
        pair.pump_until(lambda: pair.target.told_quiet(pair.source.peer), "C6.4: quiet")
        pair.target.memory.untouched(reused, "C6.4")


@pytest.mark.clause("T9")
def test_a_started_chunk_cannot_be_cancelled_and_waiting_ones_are():
    with open_pair(ucx_plugin, SHORT, regions={0: LARGE, 1: 4096}) as pair:
        sent = under_way(pair)
        row = segments((1, 0, 64))
        late = Chunk(sent.chunk.transfer, 1, pair.target.peer, row, row, 64)
        assert pair.source.guard.submit(late)
        pair.source.guard.cancel(sent.chunk.transfer)
        pair.pump_until(lambda: sent.over)
        assert {c.sequence: c.outcome for c in pair.source.completions} == {0: Outcome.DONE, 1: Outcome.CANCELLED}


@pytest.mark.clause("T6")
def test_the_queue_is_as_long_as_its_option_says_and_full_is_not_lost():
    with open_pair(ucx_plugin, {"queue_limit": 3}) as pair:
        transfer = pair.grant(ROW)
        chunks = [Chunk(transfer, number, pair.target.peer, ROW, ROW, 64) for number in range(5)]
        assert [pair.source.connector.submit(chunk) for chunk in chunks] == [True] * 3 + [False] * 2
        assert pair.source.connector.outstanding() == 3
        pair.pump_until(lambda: len(pair.target.receipts) == 3 and not pair.source.connector.outstanding())
        assert all(pair.source.connector.submit(chunk) for chunk in chunks[3:])
        pair.pump_until(lambda: len(pair.target.receipts) == 5, "T6: what was refused can be offered again")


# -- deaths ------------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T7", "T5", "C6.4")
def test_a_source_killed_in_the_middle_of_a_chunk_writes_no_more_once_that_is_said(processes):
    with apart(processes, regions={0: LARGE, 1: 4096}) as pair:
        under_way(pair)
        pair.source.kill()
        target = pair.target
        pair.pump_until(lambda: target.told_quiet(pair.source.peer), "T7: the killed source is down, and quiet")
        assert not target.receipts
        target.memory.poison()
        reused = target.memory.image()
        pair.pump_idle(200)
        target.memory.untouched(reused, "C6.4")


@pytest.mark.clause("T7", "T5")
@pytest.mark.parametrize("stops_first", [False, True])
def test_a_target_killed_in_the_middle_of_a_chunk_fails_it_and_death_is_the_proof(processes, stops_first):
    with apart(processes, regions={0: LARGE, 1: 4096}) as there:
        pair = Pair(there.target, there.source)
        sent, far = under_way(pair), pair.target
        if stops_first:
            far.hang()
            pair.source.pump()
        far.kill()
        pair.pump_until(lambda: pair.source.told_down(far.peer) and sent.completions, "T7: it is down")
        first = sent.completions[0]
        assert (first.outcome, first.source_quiet, first.target_quiet) == (Outcome.FAILED, True, False)
        pair.source.guard.fenced(far.peer)
        pair.pump_until(lambda: sent.over, "C6.4: its death ends the chunk")
        assert not pair.source.guard.outstanding()


@pytest.mark.clause("C1.4", "T2")
def test_a_new_epoch_ends_the_connection_to_the_old_one(pair):
    old, connector = pair.source, pair.target.connector
    new = open_end(ucx_plugin, ucx_plugin.Options(), PeerId.start(old.peer.name))
    connector.connect(new.guard.endpoint())
    kept = connector._links[new.peer]
    connector.connect(new.guard.endpoint())
    assert connector._links[new.peer] is kept  # twice is once
    pair.pump_until(lambda: pair.target.told_quiet(old.peer), "C1.4: the old epoch is over")
    close_ends([new])


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C2.2", "C5.2")
@pytest.mark.parametrize("row", [(0, 90, 20), (0, 0, 64), (0, 399, 2), (1, 150, 8), (0, 350, 100), (0, 4096, 1)])
def test_a_write_beyond_the_grant_is_refused(pair, row):
    """The grant is ``[100, 400)`` of region 0, in two pieces."""
    before = pair.target.memory.image()
    transfer = pair.grant(segments((0, 250, 150), (0, 100, 150)))
    read = segments((0, 0, row[2]))
    assert pair.source.guard.submit(Chunk(transfer, 0, pair.target.peer, read, segments(row), row[2]))
    pair.pump_until(lambda: bool(pair.source.completions), "T5: it ends")
    assert [(c.outcome, c.terminal) for c in pair.source.completions] == [(Outcome.FAILED, True)]
    pair.target.memory.untouched(before, "C2.2")
    inside = segments((0, 200, 100))
    assert pair.source.guard.submit(Chunk(transfer, 1, pair.target.peer, segments((0, 0, 100)), inside, 100))
    pair.pump_until(lambda: len(pair.target.receipts) == 1, "T3: what is granted arrives")


@pytest.mark.clause("T1")
def test_memory_that_it_cannot_have_is_refused_with_the_reason():
    connector = ucx_plugin.open(ucx_plugin.Options(), ConnectorContext(PeerId.start("p")))
    array = np.zeros(100, np.uint8)
    whole = MemoryRegion.of_array(0, array)
    within = MemoryRegion(1, "host", 0, array.ctypes.data + 50, 50, array)
    cases = {
        "no CUDA device": [MemoryRegion(0, "cuda", 0, 4096, 64)],
        "it begins inside region 0": [whole, within],
        "its id appears twice": [whole, MemoryRegion.of_array(0, np.zeros(8, np.uint8))],
    }
    if "cuda" in connector.capabilities.memory_kinds:
        del cases["no CUDA device"]
    for reason, regions in cases.items():
        with pytest.raises(RegistrationError, match=reason):
            connector.register(regions)
    connector.register([whole])
    connector.close()


@pytest.mark.clause("T13")
def test_it_says_why_it_is_not_usable(monkeypatch):
    plugin = ucx_plugin
    assert plugin.probe(Need("host", "cross_process")).usable
    far = plugin.probe(Need("host", "cross_host"))
    assert not far.usable
    assert "one host" in far.reason
    monkeypatch.setattr(cuda, "visible", lambda: False)
    device = plugin.probe(Need("cuda", "cross_process"))
    assert not device.usable
    assert "no CUDA device" in device.reason
    monkeypatch.setattr(library, "missing", lambda: "ucxx is not installed")
    # what nobody can change comes before packages
    assert "no CUDA device" in plugin.probe(Need("cuda", "cross_process")).reason
    assert "not installed" in plugin.probe(Need("host", "cross_process")).reason
    monkeypatch.undo()
    monkeypatch.setattr(library, "conflict", lambda: "this process has loaded NIXL")
    beside = plugin.probe(Need("host", "cross_process"))
    assert not beside.usable
    assert "NIXL" in beside.reason
    assert "processes of their own" in beside.remedy


@pytest.mark.clause("T13")
def test_with_a_device_and_without_torch_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(cuda, "visible", lambda: True)
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    with pytest.raises(PluginUnavailable, match=r"torch or triton cannot be found.*pip install .kvbaton-cuda-ipc\[dev"):
        choose_connector("ucx", Need("cuda", "cross_process"))


@pytest.mark.parametrize(
    "options",
    [{"nonsense": 1}, {"slots": 0}, {"slot_bytes": "1 parsec"}, {"ucx": {"UCX_TLS": "tcp"}}, {"ucx": {"tls": "tcp"}}],
)
def test_options_that_nobody_reads_are_errors(options):
    with pytest.raises(ValueError, match="validation error"):
        ucx_plugin.Options(**options)


@pytest.mark.clause("C6.3")
def test_settings_that_ucx_refuses_are_named():
    with pytest.raises(TransportError, match="NO_SUCH_THING"):
        ucx_plugin.open(ucx_plugin.Options(ucx={"TLS": "NO_SUCH_THING"}), ConnectorContext(PeerId.start("p")))


@pytest.fixture
def interfaces(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(wire_options, "_INFINIBAND", tmp_path)


@pytest.mark.parametrize("options", [{"interface": "eth77"}, {"ucx": {"NET_DEVICES": "eth77"}}])
def test_an_interface_that_is_not_there_is_refused_at_once(interfaces, options):
    with pytest.raises(OptionsError, match=r'no interface "eth77"; there are lo, eth0'):
        choose_connector("ucx", Need(), options)


def test_of_several_interfaces_one_has_to_be_there(interfaces):
    with pytest.raises(OptionsError, match=r'no interface "eth7" or "eth8"; there are lo, eth0'):
        choose_connector("ucx", Need(), {"interface": "eth7,eth8"})


@pytest.mark.parametrize(
    "name", ["lo", "eth0", "all", "eth77,eth0", "mlx5_7:1", "mlx5_0", "^eth77", "eth77:1", "mlx5_*"]
)
def test_what_may_be_a_device_of_ucx_is_left_to_it(interfaces, name):
    assert ucx_plugin.Options(interface=name).settings()["NET_DEVICES"] == name
    assert ucx_plugin.Options(ucx={"NET_DEVICES": name}).settings()["NET_DEVICES"] == name


# -- peers that lie ----------------------------------------------------------------------------------------------------

KEY = (new_transfer_id(), 0)
PART = Outgoing(0, 1, 64, ROW, ROW)
HEAD_AND_ROW = say(KEY, PART)


@pytest.mark.clause("C9.3", "C7.4", "T7")
@pytest.mark.parametrize(
    "word",
    [
        pytest.param(b"\xff" * 64, id="nonsense"),
        pytest.param(b"\x01", id="half-a-head"),
        pytest.param(HEAD_AND_ROW[:-1], id="half-a-segment"),
        pytest.param(HEAD_AND_ROW + bytes(63), id="too-few-bytes"),
        pytest.param(HEAD_AND_ROW + bytes(65), id="too-many-bytes"),
        pytest.param(say(KEY, Outgoing(0, 1, 65, ROW, ROW)), id="another-sum"),
        pytest.param(say(KEY, Outgoing(1, 1, 64, ROW, ROW)), id="no-such-part"),
        pytest.param(say(KEY, Outgoing(1, 2, 64, ROW, ROW), bytes(64)), id="not-the-first-part"),
        pytest.param(say(KEY, Outgoing(0, 1, 1 << 40, ROW, segments((0, 0, 1 << 40)))), id="longer-than-a-slot"),
        pytest.param(
            say(KEY, Outgoing(0, 1, 0, ROW, Segments([0] * 4, [0] * 4, [1 << 62] * 4))), id="more-than-64-bits"
        ),
        pytest.param(Answer(KEY, 0, True).encode(), id="answer-to-nothing"),
        pytest.param(Answer(KEY, 0, True).encode() + b"x", id="long-answer"),
        pytest.param(Bye().encode() + b"x", id="long-bye"),
    ],
)
def test_a_peer_that_breaks_the_protocol_is_lost_and_nobody_else(pair, word):
    liar = Liar(pair)
    before = pair.target.memory.image()
    liar.wire.send(pair.target.peer, word)
    liar.until(lambda: pair.target.told_quiet(liar.me), "T7: it is heard no more")
    pair.target.memory.untouched(before)
    assert not pair.target.faults
    liar.close()
    assert works(pair)


@pytest.mark.clause("C9.3", "T6")
def test_a_peer_that_uses_more_slots_than_it_was_offered_is_lost(pair):
    liar = Liar(pair)
    for number in range(6):
        large = segments((0, 0, 8192))
        liar.wire.send(pair.target.peer, say((KEY[0], number), Outgoing(0, 1, 8192, large, large)))
    liar.until(lambda: pair.target.told_quiet(liar.me), "T7: it is heard no more")
    liar.close()
    assert works(pair)


@pytest.mark.clause("T2", "C9.3")
@pytest.mark.parametrize(
    "body",
    [b"", b"\xc1", msgspec.msgpack.encode([1]), Offer(0, 8192, 0).encode(), Offer(4, 0, 0).encode(), b"\x91" * 900],
    ids=["nothing", "nonsense", "too-little", "no-slots", "no-bytes", "deep"],
)
def test_a_hello_that_offers_nothing_is_refused(pair, body):
    liar = Liar(pair, body)
    liar.until(lambda: pair.target.told_down(liar.me), "T2: it is refused")
    liar.close()
    assert works(pair)


class Liar:
    """A peer that is a wire and no more; up at the target, if its hello will do."""

    def __init__(self, pair, body=None):
        self.pair = pair
        self.me = PeerId.start("liar")
        self.wire = Wire(self.me, PROTOCOL, Settings())
        endpoint = msgspec.structs.replace(pair.source.guard.endpoint(), peer=self.me, metadata=self.wire.card)
        pair.target.guard.connect(endpoint)
        offer = Offer(4, 8192, 0).encode() if body is None else body
        self.wire.connect(pair.target.peer, pair.target.guard.endpoint().metadata, offer)
        if body is None:
            seen = []

            def met():
                seen.extend(self.wire.poll())
                return pair.target.is_up(self.me) and any(isinstance(event, Up) for event in seen)

            pair.pump_until(met, "T2: it is up")

    def until(self, condition, what):
        def so():
            self.wire.poll()
            return condition()

        self.pair.pump_until(so, what)

    def close(self):
        self.wire.close()
