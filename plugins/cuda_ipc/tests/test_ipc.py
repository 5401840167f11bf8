"""The connector's own logic: a device whose copies the test finishes, real UCX between two ends of one process."""

import ctypes
import functools
import time

import msgspec
import numpy as np
import pytest
from fake_cuda import FakeCuda, FakeMover
from fake_plugin import HostConnector

from kvbaton.connector import Chunk, ConnectorContext, Endpoint, MemoryRegion, Outcome, RegionInfo
from kvbaton.errors import ConnectError, Outstanding, RegistrationError, TransportError
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments
from kvbaton_cuda_ipc import ipc, ipc_words
from kvbaton_cuda_ipc.counters import MAX_LANES
from kvbaton_cuda_ipc.driver import DriverError
from kvbaton_cuda_ipc.ipc import IpcConnector
from kvbaton_cuda_ipc.ipc_plugin import IpcOptions, IpcPlugin
from kvbaton_cuda_ipc.ipc_words import Begun, Bye, Chunks, Heard, Launch, Watching, Written, encode
from kvbaton_cuda_ipc.mover import Adrift
from kvbaton_cuda_ipc.runs import AddressBook
from kvbaton_cuda_ipc.wire import Settings, Wire

SIZE = 4096


class End:
    """A connector with 4 KiB of memory, and everything that it has said."""

    def __init__(self, name, fill, patience=None, inflight=4, counted=True):
        self.peer = PeerId.start(name)
        self.cuda = FakeCuda()
        self.mover = FakeMover(self.cuda, patience, counted)
        wire = Wire(self.peer, ipc.PROTOCOL, Settings())
        self.connector = HostConnector(self.peer, 0, self.cuda, self.mover, wire, inflight)
        self.memory = np.full(SIZE, fill, np.uint8)
        self.connector.register([MemoryRegion.of_array(0, self.memory)])
        self.completions, self.receipts, self.peers = [], [], []

    def endpoint(self, **changes):
        values = {
            "transport": "cuda_ipc", "version": "1", "peer": self.peer, "regions": (RegionInfo(0, "cuda", SIZE),),
            "geometry": b"", "metadata": self.connector.metadata(), **changes
        }  # fmt: skip
        return Endpoint(**values)

    def poll(self):
        progress = self.connector.poll()
        self.completions += progress.completions
        self.receipts += progress.receipts
        self.peers += progress.peers

    def wait(self):
        self.connector.wait(0.0)

    @property
    def ups(self):
        return [event for event in self.peers if event.up]

    @property
    def downs(self):
        return [event for event in self.peers if not event.up]


class Two:
    def __init__(self, monkeypatch, **how):
        # handles are not opened by the process that made them; what stands in for the device can do it
        monkeypatch.setattr(ipc, "unreachable", lambda *_: "")
        self.source, self.target = End("prefill-0", 7, **how), End("decode-0", 200)
        self.ends = [self.source, self.target]

    def until(self, condition, passes=4000):
        for _ in range(passes):
            for end in self.ends:
                end.poll()
            if condition():
                return
            self.source.connector._wire.wait(0.001)
        raise AssertionError(f"not reached: {[(end.completions, end.receipts, end.peers) for end in self.ends]}")

    def connect(self):
        self.source.connector.connect(self.target.endpoint())
        self.target.connector.connect(self.source.endpoint())
        self.until(lambda: self.source.ups and self.target.ups)
        return self

    def chunk(self, sequence=0, offset=0, length=64, transfer=None):
        row = Segments.of([(0, offset, length)] if length else [])
        return Chunk(transfer or new_transfer_id(), sequence, self.target.peer, row, row, length)

    def close(self):
        for end in self.ends:
            if end.connector._closed:
                continue
            end.mover.settle()
            for other in self.ends:
                end.connector.fenced(other.peer)
            for _ in range(10):
                end.poll()
            end.connector.close()
            assert not end.cuda.mapped


@pytest.fixture
def pairs(monkeypatch):
    made = []

    def make(**how):
        made.append(Two(monkeypatch, **how))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture(params=[True, False], ids=["counted", "told"])
def two(pairs, request):
    """Receipts come by what the source's device counts, or by its words."""
    return functools.partial(pairs, counted=request.param)


@pytest.fixture
def watched(pairs):
    """A pair whose source knows that its counters are read."""

    def make(**how):
        pair = pairs(**how).connect()
        pair.until(lambda: pair.source.connector._links[pair.target.peer].watched)
        return pair

    return make


# -- the way of a chunk ----------------------------------------------------------------------------------------------


@pytest.mark.clause("T3", "T4", "T5")
def test_nothing_is_said_before_the_device_is_done(two):
    """While the copy is under way there is neither completion nor receipt; then there are both, once, and the bytes."""
    pair = two().connect()
    chunk = pair.chunk(length=100)
    assert pair.source.connector.submit(chunk)
    for _ in range(20):
        for end in pair.ends:
            end.poll()
    assert not pair.source.completions
    assert not pair.target.receipts
    assert pair.source.connector.outstanding() == 1
    pair.source.mover.finish()
    pair.until(lambda: pair.target.receipts and pair.source.completions)
    (completion,), (receipt,) = pair.source.completions, pair.target.receipts
    assert (completion.outcome, completion.terminal) == (Outcome.DONE, True)
    assert (receipt.peer, receipt.transfer, receipt.sequence) == (pair.source.peer, chunk.transfer, 0)
    assert pair.target.memory.tolist() == [7] * 100 + [200] * (SIZE - 100)
    assert pair.source.connector.outstanding() == 0


@pytest.mark.clause("T5")
def test_a_chunk_without_bytes_asks_nothing_of_the_device(two):
    pair = two().connect()
    assert pair.source.connector.submit(pair.chunk(length=0))
    pair.until(lambda: pair.target.receipts and pair.source.completions)
    assert not pair.source.mover.copies


@pytest.mark.clause("T4")
def test_chunks_end_as_the_device_ends_them(two):
    """Of two lanes the later chunk's may be done first."""
    pair = two().connect()
    transfer = new_transfer_id()
    for sequence in range(2):
        pair.source.connector.submit(pair.chunk(sequence, 64 * sequence, transfer=transfer))
        pair.source.poll()
    pair.source.mover.copies[1].finish()
    pair.until(lambda: pair.target.receipts)
    assert [receipt.sequence for receipt in pair.target.receipts] == [1]
    pair.source.mover.finish(2)
    pair.until(lambda: len(pair.target.receipts) == 2)
    assert [completion.sequence for completion in pair.source.completions] == [1, 0]


@pytest.mark.clause("T6")
def test_no_more_is_under_way_than_may_be(two):
    pair = two(inflight=3).connect()
    assert [pair.source.connector.submit(pair.chunk(number)) for number in range(4)] == [True, True, True, False]
    pair.source.mover.finish(1)
    pair.until(lambda: pair.source.completions)
    assert pair.source.connector.submit(pair.chunk(4))


@pytest.mark.clause("T6", "T12")
def test_a_peer_that_hears_nothing_is_told_a_bounded_number_of_chunks(two, monkeypatch):
    """The target stands still: its receipts would pile up. It hears them later, each once, and there is room again."""
    monkeypatch.setattr(ipc, "MAX_UNHEARD", 10)
    pair = two(patience=0).connect()
    accepted = 0
    for _ in range(40):
        accepted += pair.source.connector.submit(pair.chunk(accepted, length=8))
        pair.source.poll()
    assert accepted <= 10 + 4
    assert not pair.source.connector.submit(pair.chunk(99))
    pair.until(lambda: len(pair.target.receipts) == accepted)
    pair.until(lambda: pair.source.connector.submit(pair.chunk(99)))


@pytest.mark.clause("T6")
def test_as_many_are_under_way_as_may_be_also_once_the_peer_was_told_of_them(watched, monkeypatch):
    """It is told when they begin, and can hear of none before it has come."""
    monkeypatch.setattr(ipc, "MAX_UNHEARD", 4)
    pair = watched(inflight=12)
    for number in range(12):
        assert pair.source.connector.submit(pair.chunk(number, length=8))
        pair.source.poll()
    assert pair.source.connector._links[pair.target.peer].told == 12
    assert not pair.source.connector.submit(pair.chunk(12))
    pair.source.mover.finish(12)
    pair.until(lambda: len(pair.target.receipts) == 12)


# -- what the device says by itself ----------------------------------------------------------------------------------


@pytest.mark.clause("T4", "T7")
def test_a_receipt_does_not_wait_for_the_sources_thread(watched):
    """It has said what it began, and stands still: the counter is enough."""
    pair = watched()
    source, target = pair.source, pair.target
    pair.ends = [target]
    transfer = several(pair, 4)
    source.poll()
    link = target.connector._links[source.peer]
    pair.until(lambda: link.expected == 4)
    source.mover.finish(1)
    pair.until(lambda: len(target.receipts) == 3)
    source.mover.finish(1)
    pair.until(lambda: len(target.receipts) == 4)
    assert [(one.peer, one.transfer, one.sequence) for one in target.receipts] == [
        (source.peer, transfer, number) for number in range(4)
    ]
    assert target.memory.tolist() == [7] * 256 + [200] * (SIZE - 256)
    assert not source.completions
    source.poll()
    assert [one.outcome for one in source.completions] == [Outcome.DONE] * 4
    assert target.connector.statistics()["counted_receipts_total"] == 4
    assert link.expected == 0
    pair.ends = [source, target]
    there = source.connector._links[target.peer]
    pair.until(lambda: there.acknowledged == 4)  # or a peer that only counts would be taken for one that stands still
    assert there.told == 4


def overheard(pair, monkeypatch):
    """All words from now on, with who said them."""
    said = []
    for end in pair.ends:
        send = end.connector._wire.send
        monkeypatch.setattr(
            end.connector._wire, "send",
            lambda peer, word, send=send, end=end: (said.append((end, ipc_words.decode(word))), send(peer, word)),
        )  # fmt: skip
    return said


@pytest.mark.clause("T4", "T12")
def test_of_many_chunks_most_are_told_before_all_are_submitted(watched, monkeypatch):
    """While the device is at them, so that the peer has few to pass on when the last one comes; from then on a word for
    each launch, and none before: what the device waits for comes first."""
    monkeypatch.setattr(ipc, "GROUP_ROWS", 4)
    pair = watched(inflight=23)
    source, target = pair.source, pair.target
    said = overheard(pair, monkeypatch)
    transfer = new_transfer_id()
    told = []
    for sequence in range(23):
        assert source.connector.submit(pair.chunk(sequence, 64 * sequence, transfer=transfer))
        told.append([[sum(len(one.sequences) for one in each.chunks) for each in word.launches] for _, word in said])
    # launches of 3, 3 and then 4 chunks, each begun by the one that had no room
    first, second = [3, 3, 4, 4, 4], [4]
    assert told[:18] == [[]] * 18
    assert told[18:22] == [[first]] * 4
    assert told[22] == [first, second]
    source.poll()
    source.mover.settle()
    pair.until(lambda: len(target.receipts) == 23 and len(source.completions) == 23)
    assert sorted(one.sequence for one in target.receipts) == list(range(23))


@pytest.mark.clause("T4", "T6")
@pytest.mark.parametrize(("much", "answers"), [(256, [4]), (2, [2, 4]), (3, [4])])
def test_what_has_come_is_answered_once_nothing_more_is_on_its_way_or_there_is_much(
    watched, monkeypatch, much, answers
):
    """A word costs as much as a copy takes, and whoever waits for the next receipt would pay for it."""
    assert ipc._ANSWERED_FROM == 256
    monkeypatch.setattr(ipc, "_ANSWERED_FROM", much)
    pair = watched()
    source, target = pair.source, pair.target
    transfer = new_transfer_id()
    for sequence in range(4):
        source.connector.submit(pair.chunk(sequence, 64 * sequence, transfer=transfer))
        if sequence % 2:
            source.poll()
    pair.ends = [target]
    link = target.connector._links[source.peer]
    pair.until(lambda: link.expected == 4)
    said = overheard(pair, monkeypatch)
    for received in (2, 4):
        source.mover.finish(1)
        pair.until(lambda received=received: len(target.receipts) == received)
        for _ in range(3):
            target.poll()
    assert said == [(target, Heard(count)) for count in answers]


@pytest.mark.clause("T4", "T12")
@pytest.mark.parametrize("how", ["poll", "wait"])
def test_one_word_tells_of_all_launches_of_a_poll_and_is_answered_behind_their_receipts(watched, monkeypatch, how):
    """A word costs as much as a copy takes, and at the destination whoever waits for the receipt would pay for it."""
    pair = watched(inflight=14)
    source, target = pair.source, pair.target
    said = overheard(pair, monkeypatch)
    transfer = several(pair, 14)
    assert not said
    source.poll()
    (told,) = said
    assert told[0] is source
    assert [[(one.transfer, len(one.sequences)) for one in launch.chunks] for launch in told[1].launches] == [
        [(transfer, 3)], [(transfer, 3)], [(transfer, 6)], [(transfer, 2)]
    ]  # fmt: skip
    source.mover.finish(4)
    pair.ends = [target]
    pair.until(lambda: target.receipts)
    assert len(target.receipts) == 14
    assert said == [told]
    for _ in range(3):
        getattr(target, how)()
        assert said == [told, (target, Heard(14))]


@pytest.mark.clause("T3", "T5")
def test_lanes_are_counted_by_themselves(watched):
    """The second launch is over first, and the third, which is behind the first, is not told by that."""
    pair = watched()
    for number in range(3):
        pair.source.connector.submit(pair.chunk(number, 64 * number))
        pair.source.poll()
    link = pair.target.connector._links[pair.source.peer]
    pair.until(lambda: link.expected == 3)
    pair.source.mover.copies[1].finish()
    pair.until(lambda: pair.target.receipts)
    assert [receipt.sequence for receipt in pair.target.receipts] == [1]
    pair.source.mover.copies[2].finish()  # and with it the first, which is before it in its lane
    pair.until(lambda: len(pair.target.receipts) == 3)
    assert sorted(receipt.sequence for receipt in pair.target.receipts) == [0, 1, 2]


@pytest.mark.clause("T4")
def test_who_waits_says_what_has_begun(watched):
    """Also where a submit has started it."""
    pair = watched()
    several(pair, 3)
    pair.source.mover.finish(1)
    pair.source.connector.wait(0.001)
    pair.source.mover.finish(1)
    pair.ends = [pair.target]
    pair.until(lambda: len(pair.target.receipts) == 3)


@pytest.mark.clause("T10", "T12")
@pytest.mark.parametrize("how", ["agreed", "closed"])
def test_counters_are_let_go_of_with_their_link(watched, how):
    pair = watched()
    reader = pair.target.connector._links[pair.source.peer].reader
    assert reader.value(0) == 0
    if how == "agreed":
        pair.source.connector.disconnect(pair.target.peer)
        pair.until(lambda: pair.source.downs and pair.target.downs)
    else:
        pair.target.connector.close()
    with pytest.raises(ValueError, match="released"):
        reader.value(0)


@pytest.mark.clause("T3", "T4")
def test_what_was_begun_before_the_peer_said_that_it_reads_is_told_by_a_word(watched):
    pair = watched()
    link = pair.source.connector._links[pair.target.peer]
    link.watched = False  # its word is still on its way
    pair.source.connector.submit(pair.chunk(0))
    pair.source.connector._start_all(link)
    link.watched = True
    pair.source.connector.submit(pair.chunk(1, 64))
    pair.source.poll()
    pair.source.mover.finish(2)
    pair.until(lambda: len(pair.target.receipts) == 2 and len(pair.source.completions) == 2)
    assert pair.target.connector.statistics()["counted_receipts_total"] == 1
    assert link.told == 2


@pytest.mark.clause("T4", "T13")
def test_counters_that_cannot_be_read_are_done_without(pairs, monkeypatch, caplog):
    """Another user's process, say, or one that counts its processes apart: words say what has come."""

    def none(where):
        raise TransportError("a peer's counters cannot be opened: [Errno 13] Permission denied")

    monkeypatch.setattr(ipc, "Reader", none)
    with caplog.at_level("INFO", "kvbaton_cuda_ipc"):
        pair = pairs(patience=0).connect()
    assert "Permission denied" in caplog.text
    for count in (3, 6):  # the second time whatever was said when the link came up has been heard
        several(pair, 3)
        pair.until(lambda count=count: len(pair.target.receipts) == count)
    assert pair.target.connector.statistics()["counted_receipts_total"] == 0
    assert not pair.source.connector._links[pair.target.peer].watched


@pytest.mark.clause("T7", "T4")
def test_what_had_come_before_the_peer_was_gone_is_received_first(watched):
    """The source's process ends behind its last copy; what it had begun besides has not come."""
    pair = watched()
    source, target = pair.source, pair.target
    several(pair, 4)
    source.poll()
    link = target.connector._links[source.peer]
    pair.until(lambda: link.expected == 4)
    pair.ends = [target]
    source.mover.finish(1)
    source.connector._wire.close()
    pair.until(lambda: target.downs)
    assert [receipt.sequence for receipt in target.receipts] == [0, 1, 2]
    source.mover.finish(1)
    for _ in range(10):
        target.poll()
    assert len(target.receipts) == 3
    assert link.reader is None


@pytest.mark.clause("C9.3", "C7.4", "T12")
@pytest.mark.parametrize("wrong", ["not read", "behind", "many"])
def test_launches_that_cannot_have_been_begun_end_the_link(watched, wrong, monkeypatch):
    pair = watched()
    names = tuple(Chunks(new_transfer_id(), (number,)) for number in range(2))
    link = pair.target.connector._links[pair.source.peer]
    words = [Begun((Launch(0, 1 << 40, names),))]
    if wrong == "not read":
        pair.target.connector._watch_no_more(link)
    elif wrong == "behind":
        words.append(Begun((Launch(1, 1, names), Launch(0, (1 << 40) - 1, names))))
    else:
        monkeypatch.setattr(ipc, "MAX_EXPECTED", 3)
        words.append(Begun((Launch(1, 1 << 40, names),)))
    for word in words:
        pair.source.connector._wire.send(pair.target.peer, encode(word))
    pair.until(lambda: pair.target.downs)
    assert not pair.target.downs[0].quiet
    assert "C9.3" in str(pair.target.downs[0].error) or "C7.4" in str(pair.target.downs[0].error)
    assert not pair.target.receipts


@pytest.mark.clause("T4", "C7.4")
def test_what_has_come_is_received_though_bye_is_heard_first_and_the_rest_has_failed(watched):
    """The destination looks at the counters less often than words come."""
    pair = watched()
    source, target = pair.source, pair.target
    several(pair, 2)
    source.poll()
    link = target.connector._links[source.peer]
    pair.until(lambda: link.expected == 2)
    never = Launch(1, 1 << 40, (Chunks(new_transfer_id(), (0,)),))
    target.connector._hear(link, encode(Begun((never,))))
    source.mover.finish()
    source.connector.disconnect(target.peer)
    source.poll()
    words = []
    while not words:
        words = target.connector._wire.poll()
    assert [word.data for word in words] == [encode(Bye())]
    target.connector._hear(link, words[0].data)
    assert (link.expected, link.heard) == (0, 2)
    assert not link.coming
    pair.until(lambda: target.downs)
    assert [receipt.sequence for receipt in target.receipts] == [0, 1]
    assert target.downs[0].quiet


@pytest.mark.clause("T7")
def test_who_waits_is_woken_by_a_peers_counter(watched, monkeypatch):
    """By the very number that it was told."""
    monkeypatch.setattr(ipc, "_LOOKING", 60.0)
    pair = watched()
    pair.source.connector.submit(pair.chunk())
    pair.source.poll()
    link = pair.target.connector._links[pair.source.peer]
    pair.ends = [pair.target]
    pair.until(lambda: link.expected)
    pair.source.mover.finish()
    began = time.monotonic()
    pair.target.connector.wait(20.0)
    assert time.monotonic() - began < 10


@pytest.mark.clause("T7")
def test_who_waits_sees_what_a_peers_device_has_done(watched):
    """And does not sleep on the wire, which says nothing of it; nor for long, since words may come."""
    pair = watched()
    source, target = pair.source, pair.target
    source.connector.submit(pair.chunk())
    source.poll()
    pair.ends = [target]
    link = target.connector._links[source.peer]
    pair.until(lambda: link.expected)
    began = time.monotonic()
    target.connector.wait(60.0)
    assert time.monotonic() - began < 30
    assert not target.receipts
    source.mover.finish()
    target.connector.wait(60.0)
    assert time.monotonic() - began < 30
    target.poll()
    assert target.receipts


# -- what is started together ----------------------------------------------------------------------------------------


def several(pair, count):
    """Submitted in one pass, of one transfer."""
    transfer = new_transfer_id()
    for number in range(count):
        assert pair.source.connector.submit(pair.chunk(number, 64 * number, transfer=transfer))
    return transfer


@pytest.mark.clause("T4", "T5")
def test_chunks_of_one_pass_share_launches_and_end_one_by_one(two):
    """Three, three, and then as many as before in all; the poll starts the rest.  Each has its completion and its
    receipt."""
    pair = two(inflight=14).connect()
    several(pair, 14)
    mover = pair.source.mover
    assert [len(copy.runs) for copy in mover.copies] == [3, 3, 6]
    assert pair.source.connector.outstanding() == 14
    pair.source.poll()
    assert [len(copy.runs) for copy in mover.copies] == [3, 3, 6, 2]
    mover.finish(1)
    pair.until(lambda: len(pair.target.receipts) == 3)
    assert [completion.sequence for completion in pair.source.completions] == [0, 1, 2]
    mover.finish(3)
    pair.until(lambda: len(pair.target.receipts) == 14)
    assert sorted(receipt.sequence for receipt in pair.target.receipts) == list(range(14))
    assert pair.target.memory.tolist() == [7] * 896 + [200] * (SIZE - 896)
    several(pair, 3)
    assert [len(copy.runs) for copy in mover.copies if not copy.over] == [3], "the next pass begins anew"


@pytest.mark.clause("T4", "T5")
def test_the_last_of_many_chunks_have_a_launch_of_their_own(two):
    """What is said of them is short, and does not wait for those before."""
    pair = two(inflight=32).connect()
    several(pair, 32)
    mover = pair.source.mover
    assert [len(copy.runs) for copy in mover.copies] == [3, 3, 6, 12]
    pair.source.poll()
    assert [len(copy.runs) for copy in mover.copies] == [3, 3, 6, 12, 6, 2]
    (link,) = pair.source.connector._links.values()
    assert (link.queued_bytes, link.queued_rows) == (0, 0)
    mover.finish(6)
    pair.until(lambda: len(pair.target.receipts) == 32)
    assert [completion.sequence for completion in pair.source.completions] == list(range(32))


@pytest.mark.clause("T4", "T5", "C9.3")
def test_a_launch_may_have_more_chunks_than_a_word_names(two, monkeypatch):
    """And a peer as many under way as it may have."""
    monkeypatch.setattr(ipc_words, "MAX_NAMED", 2)
    monkeypatch.setattr(ipc, "MAX_EXPECTED", 10)
    pair = two(inflight=10).connect()
    there, here = pair.source.connector._links[pair.target.peer], pair.target.connector._links[pair.source.peer]
    counted = pair.source.mover.page is not None
    pair.until(lambda: there.watched == counted)
    several(pair, 10)
    pair.until(lambda: here.expected == 10 * counted and len(pair.source.mover.copies) == 3)
    pair.source.mover.finish(3)
    pair.until(lambda: len(pair.target.receipts) == 10)
    assert sorted(receipt.sequence for receipt in pair.target.receipts) == list(range(10))
    assert not pair.target.downs


@pytest.mark.clause("T5")
def test_who_waits_starts_what_is_queued(two):
    pair = two(patience=0).connect()
    several(pair, 2)
    pair.source.connector.wait(0.001)
    assert sum(len(copy.runs) for copy in pair.source.mover.copies) == 2


def recorded(pair, monkeypatch):
    """What the source's mover is given from now on: rows, bytes, the greatest length if it is told, origins."""
    given, start = [], pair.source.mover.start

    def record(runs, nbytes, longest, origins):
        given.append((runs.T.tolist(), nbytes, longest, origins))
        return start(runs, nbytes, longest, origins)

    monkeypatch.setattr(pair.source.mover, "start", record)
    return given


@pytest.mark.clause("T3")
@pytest.mark.parametrize(("here", "there"), [(1, 1), (1, 3), (3, 1), (3, 3)])
def test_places_are_told_from_where_regions_begin(pairs, monkeypatch, here, there):
    """As they are where a side has one region, and else as addresses; the regions begin at odd ones."""
    pair = pairs(patience=0)
    for end, count in ((pair.source, here), (pair.target, there)):
        end.arrays = {3 * at - 1: end.memory[1 + 1000 * at :][:999] for at in range(count)}
        end.connector.register([MemoryRegion.of_array(id, array) for id, array in end.arrays.items()])
        end.infos = tuple(RegionInfo(id, "cuda", len(array)) for id, array in end.arrays.items())
    pair.source.memory[:] = np.arange(SIZE) % 131
    pair.source.connector.connect(pair.target.endpoint(regions=pair.target.infos))
    pair.target.connector.connect(pair.source.endpoint(regions=pair.source.infos))
    pair.until(lambda: pair.source.ups and pair.target.ups)
    given = recorded(pair, monkeypatch)
    expected = pair.target.memory.copy()
    for number in range(6):
        rows = [
            (
                (3 * (at % here) - 1, 7 * at + number, 1 + at),
                (3 * ((at + 1) % there) - 1, 150 * number + 20 * at, 1 + at),
            )
            for at in range(4)
        ]
        for (id, offset, length), (goal, place, _) in rows:
            begin = 1 + 1000 * ((goal + 1) // 3) + place
            expected[begin : begin + length] = pair.source.arrays[id][offset : offset + length]
        source, target = (Segments.of([row[side] for row in rows]) for side in (0, 1))
        assert pair.source.connector.submit(Chunk(new_transfer_id(), number, pair.target.peer, source, target, 10))
        pair.source.poll()
    pair.until(lambda: len(pair.target.receipts) == 6)
    assert np.array_equal(pair.target.memory, expected)
    (link,) = pair.source.connector._links.values()
    begins = pair.source.arrays[-1].ctypes.data, link.mapping.addresses[-1]
    for side, count in enumerate((here, there)):
        assert {origins[side] for *_, origins in given} == {begins[side] if count == 1 else 0}
        if count == 1:
            assert [rows[0][side] for rows, *_ in given] == [(1, 150)[side] * number for number in range(6)]


@pytest.mark.clause("T3", "C3.2")
def test_the_greatest_length_is_told_where_all_are_alike_and_only_there(pairs, monkeypatch):
    """Also of chunks whose lengths are in all what so many of the first one's were: the kernel would cut them short."""
    pair = pairs(patience=0).connect()
    given = recorded(pair, monkeypatch)
    place = iter(range(0, SIZE, 128))
    for lengths in ([[64], [64, 64]], [[64], [16, 112]], [[16, 112], [64]], [[64], [16]]):
        for number, some in enumerate(lengths):
            rows = Segments.of([(0, next(place), length) for length in some])
            chunk = Chunk(new_transfer_id(), number, pair.target.peer, rows, rows, sum(some))
            assert pair.source.connector.submit(chunk)
        pair.source.poll()
    assert [(nbytes, longest) for _, nbytes, longest, _ in given] == [(192, 64), (192, None), (192, None), (80, None)]
    pair.until(lambda: len(pair.target.receipts) == 8)


@pytest.mark.clause("T5")
def test_a_group_is_bounded(two, monkeypatch):
    monkeypatch.setattr(ipc, "GROUP_ROWS", 2)
    pair = two(inflight=8).connect()
    several(pair, 7)
    assert [len(copy.runs) for copy in pair.source.mover.copies] == [2, 2, 2]
    pair.source.poll()
    assert [len(copy.runs) for copy in pair.source.mover.copies] == [2, 2, 2, 1]


@pytest.mark.clause("T9")
def test_what_is_not_started_is_cancelled(two):
    pair = two().connect()
    mine = several(pair, 4)
    other = pair.chunk(7, 512)
    pair.source.connector.cancel(new_transfer_id())
    pair.source.connector.cancel(mine)
    assert pair.source.connector.submit(other)
    pair.source.poll()
    (cancelled,) = pair.source.completions
    assert (cancelled.sequence, cancelled.outcome, cancelled.terminal) == (3, Outcome.CANCELLED, True)
    pair.source.mover.finish(2)
    pair.until(lambda: len(pair.target.receipts) == 4)
    assert sorted(receipt.sequence for receipt in pair.target.receipts) == [0, 1, 2, 7]
    assert pair.target.memory[192:256].tolist() == [200] * 64


@pytest.mark.clause("T2", "T5")
def test_an_orderly_end_is_after_what_is_queued(two):
    pair = two(patience=0).connect()
    several(pair, 2)
    pair.source.connector.disconnect(pair.target.peer)
    pair.until(lambda: pair.source.downs and pair.target.downs)
    assert [completion.outcome for completion in pair.source.completions] == [Outcome.DONE] * 2
    assert len(pair.target.receipts) == 2


@pytest.mark.clause("T7", "C6.4")
def test_what_is_queued_for_a_peer_that_is_fenced_is_never_started(two):
    pair = two().connect()
    several(pair, 4)
    pair.source.connector.fenced(pair.target.peer)
    pair.source.poll()
    (failed,) = pair.source.completions
    assert (failed.sequence, failed.outcome, failed.terminal) == (3, Outcome.FAILED, True)
    assert len(pair.source.mover.copies) == 1


@pytest.mark.clause("T5")
def test_a_group_that_is_not_started_fails_whole(two):
    pair = two().connect()
    transfer = new_transfer_id()
    pair.source.connector.submit(pair.chunk(0, transfer=transfer))
    pair.source.poll()
    pair.source.mover.fails = RuntimeError("no such kernel")
    for number in (1, 2):
        pair.source.connector.submit(pair.chunk(number, 64 * number, transfer=transfer))
    pair.source.poll()
    assert [(one.sequence, one.outcome, one.terminal) for one in pair.source.completions] == [
        (1, Outcome.FAILED, True), (2, Outcome.FAILED, True)
    ]  # fmt: skip


# -- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.clause("T5")
def test_a_copy_that_is_not_started_is_a_failed_chunk_that_is_quiet(two):
    pair = two().connect()
    pair.source.mover.fails = RuntimeError("no such kernel")
    assert pair.source.connector.submit(pair.chunk())
    pair.until(lambda: pair.source.completions)
    (completion,) = pair.source.completions
    assert (completion.outcome, completion.terminal) == (Outcome.FAILED, True)
    assert "no such kernel" in str(completion.error)


@pytest.mark.clause("T5", "T11")
def test_a_context_that_cannot_be_entered_fails_what_was_queued(two, monkeypatch):
    """Another thread has taken over, and what it submits is started at once: nothing that was accepted is lost."""
    pair = two().connect()
    source = pair.source

    def fail(device):
        raise DriverError("cuCtxSetCurrent: CUDA_ERROR_CONTEXT_IS_DESTROYED")

    source.connector._thread = 0
    with monkeypatch.context() as patch:
        patch.setattr(source.cuda, "enter", fail)
        several(pair, 3)
    assert source.connector.outstanding() == 3
    source.poll()
    assert [(one.sequence, one.outcome, one.terminal) for one in source.completions] == [
        (number, Outcome.FAILED, True) for number in range(3)
    ]
    assert "CONTEXT_IS_DESTROYED" in str(source.completions[0].error)
    assert not source.mover.copies


@pytest.mark.clause("T7")
def test_who_waits_is_not_kept_from_what_is_to_be_told(two):
    """A call has found it, and the next poll reports it."""
    pair = two().connect()
    pair.source.connector.fenced(pair.target.peer)
    began = time.monotonic()
    pair.source.connector.wait(20.0)
    assert time.monotonic() - began < 10


@pytest.mark.clause("T5", "C6.1")
def test_a_device_that_says_nothing_any_more_makes_nothing_quiet(two):
    """Neither a start that it has half done, nor what was under way, nor the link."""
    pair = two().connect()
    source = pair.source
    source.connector.submit(pair.chunk(0))
    source.poll()
    source.mover.fails = Adrift("an illegal address was accessed")
    source.connector.submit(pair.chunk(1))
    source.poll()

    def broken():
        raise RuntimeError("unspecified launch failure")

    source.mover.copies[0].query = broken
    source.connector.submit(pair.chunk(2))
    pair.until(lambda: len(source.completions) == 3)
    assert {completion.outcome for completion in source.completions} == {Outcome.FAILED}
    assert not any(completion.source_quiet or completion.target_quiet for completion in source.completions)
    assert source.connector.outstanding() == 0
    source.connector.disconnect(pair.target.peer)
    for _ in range(10):
        source.poll()
    assert not any(event.quiet for event in source.downs)


@pytest.mark.clause("T5", "C6.1", "C6.4")
def test_what_was_being_started_when_its_thread_was_interrupted_is_not_quiet(two):
    """Nor is it lost: it ends, and the link is never quiet while the peer's memory may be written."""
    pair = two().connect()
    source = pair.source
    source.mover.fails = KeyboardInterrupt()
    source.connector.submit(pair.chunk(0))
    with pytest.raises(KeyboardInterrupt):
        source.connector.poll()
    assert source.connector.outstanding() == 1
    source.poll()
    (failed,) = source.completions
    assert (failed.outcome, failed.source_quiet, failed.target_quiet) == (Outcome.FAILED, False, False)
    source.connector.disconnect(pair.target.peer)
    pair.target.connector.disconnect(source.peer)
    for _ in range(50):
        source.poll()
        pair.target.poll()
    assert not source.downs
    assert not pair.target.downs, "C6.4: bye was said, and the memory may be written"


@pytest.mark.clause("T5", "T7")
def test_what_had_landed_before_the_device_failed_is_done_once(two):
    pair = two().connect()
    source = pair.source
    for number in range(2):
        source.connector.submit(pair.chunk(number, 64 * number))
        source.poll()

    def broken():
        raise RuntimeError("unspecified launch failure")

    source.mover.copies[0].finish()
    source.mover.copies[1].query = broken
    pair.until(lambda: len(source.completions) == 2)
    assert sorted((one.sequence, one.outcome, one.terminal) for one in source.completions) == [
        (0, Outcome.DONE, True), (1, Outcome.FAILED, False)
    ]  # fmt: skip
    assert source.connector.outstanding() == 0


@pytest.mark.clause("T7", "C6.4", "T5")
def test_a_peer_that_is_gone_leaves_the_copies_to_it_to_end_by_themselves(two):
    """Down at once, and not quiet while we read; the mapping stays until the copy is over; a fence then makes quiet."""
    pair = two().connect()
    source = pair.source
    source.connector.submit(pair.chunk())
    source.poll()
    pair.target.connector._wire.close()
    pair.ends = [source]
    pair.until(lambda: source.downs)
    source.connector.fenced(pair.target.peer)
    source.poll()
    assert [event.quiet for event in source.downs] == [False]
    assert source.cuda.mapped
    assert source.connector.outstanding() == 1
    source.mover.finish()
    source.poll()
    (completion,) = source.completions
    assert (completion.outcome, completion.terminal) == (Outcome.FAILED, True)
    assert [event.quiet for event in source.downs] == [False, True]
    assert not source.cuda.mapped
    assert not source.connector._ebbing


@pytest.mark.clause("T7")
def test_a_chunk_for_a_peer_that_is_gone_fails(two):
    pair = two().connect()
    pair.source.connector.fenced(pair.target.peer)
    assert pair.source.connector.submit(pair.chunk())
    pair.source.poll()
    assert [completion.outcome for completion in pair.source.completions] == [Outcome.FAILED]


@pytest.mark.clause("C7.4", "T6")
def test_what_a_peer_has_heard_does_not_become_less(two):
    """It may be said again, and then is nothing new."""
    pair = two(patience=0).connect()
    several(pair, 2)
    link = pair.source.connector._links[pair.target.peer]
    pair.until(lambda: link.acknowledged == 2)
    for count, lost in ((2, False), (1, True)):
        pair.source.connector._hear(link, encode(Heard(count)))
        pair.source.poll()
        assert bool(pair.source.downs) == lost
    assert "C7.4" in str(pair.source.downs[0].error)


@pytest.mark.clause("C9.3", "C7.4")
@pytest.mark.parametrize("word", [b"", b"x", b"w123", b"h1", encode(Heard(1)), encode(Bye()) + b"x"])
def test_a_peer_that_says_what_cannot_be_is_down_and_not_quiet(two, word):
    pair = two().connect()
    if word:
        pair.target.connector._wire.send(pair.source.peer, word)
    else:
        pair.source.connector._hear(pair.source.connector._links[pair.target.peer], word)
    pair.until(lambda: pair.source.downs)
    assert not pair.source.downs[0].quiet
    assert "C9.3" in str(pair.source.downs[0].error) or "C7.4" in str(pair.source.downs[0].error)


# -- the end of a link -----------------------------------------------------------------------------------------------


@pytest.mark.clause("C6.4", "T10")
def test_an_agreed_end_waits_for_the_copies_and_unmaps_before_it_says_so(two):
    """One end disconnects while a copy is under way: it drains, both unmap, and both are quiet."""
    pair = two().connect()
    source, target = pair.source, pair.target
    source.connector.submit(pair.chunk())
    source.connector.disconnect(target.peer)
    for _ in range(20):
        source.poll()
        target.poll()
    assert source.cuda.mapped
    assert not source.downs
    assert not target.downs
    source.mover.finish()
    pair.until(lambda: source.downs and target.downs)
    assert source.completions[0].outcome is Outcome.DONE
    assert target.receipts
    assert source.downs[0].quiet
    assert target.downs[0].quiet
    assert not source.cuda.mapped
    assert not target.cuda.mapped


@pytest.mark.clause("C6.4")
def test_the_other_end_says_bye_only_when_its_own_copies_are_over(two):
    pair = two().connect()
    source, target = pair.source, pair.target
    source.connector.submit(pair.chunk())
    target.connector.disconnect(source.peer)
    for _ in range(20):
        source.poll()
        target.poll()
    assert not target.downs
    assert source.connector.submit(pair.chunk(1))
    source.poll()
    assert [completion.outcome for completion in source.completions] == [Outcome.FAILED]
    source.mover.finish()
    pair.until(lambda: source.downs and target.downs)
    assert target.downs[0].quiet
    assert len(target.receipts) == 1


@pytest.mark.clause("T10", "C5.4")
def test_close_refuses_while_a_copy_is_under_way_and_then_leaves_nothing(two):
    pair = two().connect()
    source = pair.source
    source.connector.submit(pair.chunk())
    with pytest.raises(Outstanding):
        source.connector.close()
    source.poll()
    with pytest.raises(Outstanding):
        source.connector.close()
    source.mover.finish()
    pair.until(lambda: source.completions)
    source.connector.close()
    source.connector.close()
    assert not source.cuda.mapped
    assert source.mover.closed
    assert not source.connector.poll()


# -- the handshake ---------------------------------------------------------------------------------------------------


@pytest.mark.clause("T2", "C3.6")
@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": b""},
        {"metadata": b"\x92\xc4\x01a\xc4\x01b"},
        {"regions": (RegionInfo(0, "cuda", 2 * SIZE),)},
        {"regions": ()},
    ],
)
def test_metadata_that_is_not_right_is_refused_with_the_reason(two, changes):
    """At once, quiet: it was never greeted."""
    pair = two()
    pair.source.connector.connect(pair.target.endpoint(**changes))
    pair.source.poll()
    (event,) = pair.source.downs
    assert event.quiet
    assert isinstance(event.error, ConnectError)
    assert not pair.source.cuda.opened


@pytest.mark.clause("T2")
def test_two_ends_of_one_process_are_refused_with_the_reason(two, monkeypatch):
    pair = two()
    monkeypatch.undo()
    pair.source.connector.connect(pair.target.endpoint())
    pair.source.poll()
    assert "cannot be opened in the process that made it" in str(pair.source.downs[0].error)


@pytest.mark.clause("T2", "T7")
def test_memory_that_cannot_be_mapped_ends_the_link(two):
    pair = two()
    pair.source.cuda.fails["open"] = DriverError("CUDA_ERROR_INVALID_VALUE")
    pair.source.connector.connect(pair.target.endpoint())
    pair.target.connector.connect(pair.source.endpoint())
    pair.until(lambda: pair.source.downs)
    assert "CUDA_ERROR_INVALID_VALUE" in str(pair.source.downs[0].error)
    assert not pair.source.downs[0].quiet  # it was greeted, and may have mapped ours
    assert not pair.source.cuda.mapped


@pytest.mark.clause("C1.4")
def test_a_new_epoch_replaces_the_old_one(two):
    pair = two().connect()
    new = End("decode-0", 200)
    pair.ends.append(new)
    pair.source.connector.connect(new.endpoint())
    new.connector.connect(pair.source.endpoint())
    pair.until(lambda: new.ups and len(pair.source.ups) == 2)
    assert [event.peer for event in pair.source.downs] == [pair.target.peer]
    assert len(pair.source.cuda.mapped) == 1


# -- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T1")
def test_memory_of_another_device_than_the_stages_is_refused(two):
    pair = two()
    with pytest.raises(RegistrationError, match="was opened on device 0"):
        IpcConnector.register(pair.source.connector, [MemoryRegion(5, "cuda", 1, 4096, 64)])


@pytest.mark.clause("T2")
def test_there_is_no_metadata_before_memory_is_registered():
    cuda = FakeCuda()
    wire = Wire(PeerId.start("prefill-0"), ipc.PROTOCOL, Settings())
    connector = IpcConnector(wire.me, 0, cuda, FakeMover(cuda), wire, 4)
    with pytest.raises(TransportError, match="register"):
        connector.metadata()
    connector.close()


@pytest.mark.clause("T3")
@pytest.mark.parametrize("bases", [{4: 1 << 50}, {-3: 1000, 0: 1 << 50, 9: 5, 70_000: 1 << 60}])
def test_addresses_of_segments(bases):
    ids = sorted(bases)
    rows = [(ids[index % len(ids)], index << 30, 1) for index in range(20)]
    found = np.array([offset for _, offset, _ in rows], np.int64)
    book = AddressBook(bases)
    book.locate([Segments.of(rows[:7]), Segments.of(rows[7:])], found)
    assert (book.origin + found).tolist() == [bases[id] + offset for id, offset, _ in rows]
    assert book.origin == (1 << 50 if len(bases) == 1 else 0)


# -- the plugin object -----------------------------------------------------------------------------------------------


class Here(IpcPlugin):
    """The plugin object on a machine that a test describes."""

    def __init__(self, cuda=None, lacks=""):
        self._cuda, self._lacks = cuda, lacks

    def cuda(self):
        return self._cuda

    def lacks(self):
        return self._lacks

    def mover(self, cuda, device, options, *, counted):
        raise RuntimeError("the kernel does not compile")


@pytest.mark.clause("T2", "T13")
@pytest.mark.parametrize(
    ("plugin", "need", "word"),
    [
        (Here(FakeCuda()), ("cuda", "cross_process"), ""),
        (Here(FakeCuda()), ("host", "cross_process"), "memory of a device"),
        (Here(FakeCuda()), ("cuda", "same_process"), "in the process that made it"),
        (Here(FakeCuda()), ("cuda", "cross_host"), "one host"),
        (Here(None), ("cuda", "cross_process"), "no CUDA driver"),
        (Here(FakeCuda(devices=())), ("cuda", "cross_process"), "no device"),
        (Here(FakeCuda(), "triton cannot be found"), ("cuda", "cross_process"), "triton"),
    ],
)
def test_what_is_missing_is_told_with_a_remedy(plugin, need, word):
    from kvbaton.connector import Need

    found = plugin.probe(Need(*need))
    assert found.usable == (not word)
    assert word in found.reason
    assert bool(found.remedy) == bool(word)
    assert found.capabilities is not None


@pytest.mark.clause("T13")
def test_that_there_is_no_gpu_is_said_before_packages_that_would_not_help(monkeypatch):
    from kvbaton.connector import Need
    from kvbaton_cuda_ipc import library

    monkeypatch.setattr(library, "missing", lambda: "ucxx is not installed")
    need = Need("cuda", "cross_process")
    assert "no CUDA driver" in Here(None, "torch and triton cannot be found").probe(need).reason
    with_a_gpu = Here(FakeCuda(), "torch and triton cannot be found").probe(need)
    assert with_a_gpu.reason == "ucxx is not installed"
    assert "memory of a device" in Here(FakeCuda()).probe(Need("host", "cross_process")).reason


@pytest.mark.clause("T2")
def test_a_driver_that_is_too_old_or_broken_is_told():
    from kvbaton.connector import Need

    class Old(FakeCuda):
        def version(self):
            return 11020

    class Broken(FakeCuda):
        def devices(self):
            raise DriverError("cuDeviceGetCount failed with CUDA_ERROR_SYSTEM_NOT_READY (802)")

    need = Need("cuda", "cross_process")
    assert "CUDA 11.2" in Here(Old()).probe(need).reason
    assert "SYSTEM_NOT_READY" in Here(Broken()).probe(need).reason


@pytest.mark.clause("T10")
@pytest.mark.parametrize(
    ("plugin", "device", "error"),
    [
        (Here(FakeCuda()), None, "has no device"),
        (Here(FakeCuda()), 3, "this process sees 1"),
        (Here(None), 0, "no CUDA driver"),
        (Here(FakeCuda(), "triton cannot be found"), 0, "triton"),
        (Here(FakeCuda()), 0, "does not compile"),
    ],
)
def test_what_cannot_be_opened_says_why_and_leaves_nothing(plugin, device, error):
    before = _descriptors()
    with pytest.raises(Exception, match=error):
        plugin.open(IpcOptions(), ConnectorContext(PeerId.start("prefill-0"), device))
    assert _descriptors() <= before + 1  # what UCX opens once for a process, if this was its first worker


def _descriptors():
    from pathlib import Path

    return len(list(Path("/proc/self/fd").iterdir()))


def test_options_are_strict():
    from pydantic import ValidationError

    assert IpcOptions(engine_above="16MiB").engine_above == 16 << 20
    for wrong in ({"programs": 0}, {"inflight_chunks": 0}, {"nothing": 1}, {"engine_above": "much"}):
        with pytest.raises(ValidationError):
            IpcOptions(**wrong)


@pytest.mark.clause("C9.3")
def test_words_are_what_they_say():
    from hypothesis import given
    from hypothesis import strategies as st

    from kvbaton.errors import ProtocolViolation
    from kvbaton_cuda_ipc.ipc_words import MAX_NAMED, begun, count, decode, written
    from kvbaton_cuda_ipc.wire import MAX_WORD

    keys = [(new_transfer_id(), sequence) for sequence in range(MAX_NAMED + 1)]
    alike = [(keys[0][0], sequence) for sequence in (*range(MAX_NAMED), (1 << 63) - 1)]
    for some in (keys, alike):
        words = written(some)
        assert [count(word.chunks) for word in words] == [MAX_NAMED, 1]
        alone = [(0, number, [key]) for number, key in enumerate(some)]
        for launches, sizes in (
            (alone, [MAX_NAMED, 1]), ([(0, 1, some)], [MAX_NAMED, 1]), ([], []),
            ([(0, 1, some[:9]), (1, (1 << 63) - 1, some[9:]), alone[1]], [9, MAX_NAMED - 7]),
        ):  # fmt: skip
            told = begun(launches)
            assert [sum(count(launch.chunks) for launch in word.launches) for word in told] == sizes
            assert [
                (launch.lane, launch.number, (those.transfer, sequence))
                for word in told for launch in word.launches for those in launch.chunks for sequence in those.sequences
            ] == [(lane, number, key) for lane, number, keys in launches for key in keys]  # fmt: skip
            words += told
        for word in (*words, Watching(), Heard(7), Bye()):
            assert len(encode(word)) <= MAX_WORD
            assert decode(encode(word)) == word

    one, many = Chunks(keys[0][0], (1,)), Chunks(keys[0][0], tuple(range(MAX_NAMED)))
    wrong = [
        b"", b"g", b"cc", msgspec.msgpack.encode(["bye", 1]), encode(Bye()) + b"x", msgspec.msgpack.encode(["else"]),
        *map(
            encode,
            (
                Written(()), Written((one, many)), Written((Chunks(keys[0][0], ()),)), Written((Chunks("x", (1,)),)),
                Written((Chunks(keys[0][0] + "\n", (1,)),)),
                Written((Chunks(keys[0][0], (-1,)),)), Heard(-1), Begun(()), Begun((Launch(0, 1, ()),)),
                Begun((Launch(0, 1, (one,)), Launch(MAX_LANES, 1, (one,)))), Begun((Launch(-1, 1, (one,)),)),
                Begun((Launch(0, -1, (one,)),)), Begun((Launch(0, 1, (one,)), Launch(1, 1, (many,)))),
                Heard(1 << 63), Written((Chunks(keys[0][0], (1 << 63,)),)), Begun((Launch(0, 1 << 63, (one,)),)),
            ),
        ),
    ]  # fmt: skip
    those = [keys[0][0], [1]]
    more_or_less = [
        ["written"], ["written", [those[:1]]], ["written", [[*those, 0]]], ["written", [those], 0], ["bye", 0],
        ["begun"], ["begun", [[0, 1]]], ["begun", [[0, 1, [[*those, 0]]]]], ["begun", [[0, 1, [those], 0]]],
        ["begun", [[0, 1, [those]]], 0], ["watching", 0], ["heard"], ["heard", 1, 0],
    ]  # fmt: skip
    wrong += map(msgspec.msgpack.encode, more_or_less)
    for word in wrong:
        with pytest.raises(ProtocolViolation, match=r"C9\.3"):
            decode(word)

    @given(st.binary(max_size=80))
    def anything(data):
        try:
            word = decode(data)
        except ProtocolViolation:
            return
        assert decode(encode(word)) == word

    anything()


def test_the_fake_really_writes_where_it_says():
    """The control of everything above: a copy lands in the mapped memory, and through a closed mapping in none."""
    cuda = FakeCuda()
    source, target = np.arange(64, dtype=np.uint8), np.zeros(4096, np.uint8)
    base = cuda.open(cuda.export(target.ctypes.data))
    mover = FakeMover(cuda, patience=None)
    runs = np.array([[source.ctypes.data], [base + 8], [64]])
    copy = mover.start(runs)
    assert not copy.query()
    assert not target.any()
    mover.finish()
    assert copy.query()
    assert target[8:72].tolist() == source.tolist()
    late = mover.start(runs)
    cuda.close(base)
    with pytest.raises(KeyError):
        late.finish()
    assert ctypes.sizeof(ctypes.c_void_p) == 8
