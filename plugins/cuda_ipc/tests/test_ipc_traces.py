"""Whole traces of two ends, at random: the mover itself moves bytes, on a device that gets on when it is told to, and
between any two calls whatever may happen does.  A plain account of the bytes is kept beside them."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_cuda import FakeCuda, write_to
from fake_device import Device
from fake_plugin import HostConnector

from kvbaton.connector import Chunk, Endpoint, MemoryRegion, Outcome, RegionInfo
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments, split
from kvbaton_cuda_ipc import ipc, ipc_words, kernels, mover
from kvbaton_cuda_ipc.driver import DriverError
from kvbaton_cuda_ipc.ipc_words import Begun, Bye, Chunks, Heard, Launch, Watching, Written, encode
from kvbaton_cuda_ipc.mover import DeviceMover
from kvbaton_cuda_ipc.wire import Settings, Wire

#: What no byte of a source is.
UNTOUCHED = 200
ENGINE_ABOVE = 16384
#: On both sides of where vectors, pieces and the engine begin.
LENGTHS = (1, 15, 16, 17, 48, 64, 64, 64, 64, 255, 256, 257, 1024, 4095, 4096, 4097, ENGINE_ABOVE, ENGINE_ABOVE + 16)


class Reaching(Device):
    """What it writes through a mapping comes where that leads; through one that is closed it cannot."""

    def __init__(self, cuda):
        super().__init__()
        self.cuda = cuda

    def _move(self, target, source, nbytes):
        pid, there = self.cuda.where(target)
        write_to(pid, there, source, nbytes)

    def copy(self, target, source, nbytes, stream):
        self._put("copy", stream, lambda: self._move(target, source, nbytes))

    def run(self, plan, table, stream, address):
        assert address == table.data_ptr()

        def work():
            for source, target, length in table.numpy()[: 3 * plan.rows].reshape(3, plan.rows).T.tolist():
                self._move(plan.origins[1] + target, plan.origins[0] + source, length)

        self._put("run", stream, work)


class Side:
    """An end whose regions begin anywhere, and all that it has said."""

    def __init__(self, name, draw, inflight, counted, fill=None):
        self.peer = PeerId.start(name)
        self.cuda = FakeCuda()
        self.device = Reaching(self.cuda)
        self.arrays = {}
        for id in draw.sample((0, 1, 7, 300, 70_000), draw.choice((1, 1, 2, 3))):
            size, shift = draw.choice((40_000, 70_001)), draw.choice((0, 0, 1, 5, 16))
            array = np.empty(size + 64, np.uint8)
            array = array[-array.ctypes.data % 16 + shift :][:size]
            array[:] = np.frombuffer(draw.randbytes(size), np.uint8) % 128 if fill is None else fill
            self.arrays[id] = array
        self.streams = []

        def stream(_):
            handle = len(self.streams) + 1
            self.streams.append(handle)
            return SimpleNamespace(cuda_stream=handle, query=lambda: self.device.over(handle))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "kernels", lambda *_: self.device)
            patch.setattr(torch.cuda, "Stream", stream)
            patch.setattr(torch.cuda, "synchronize", lambda _: None)
            self.device.gets_on = True
            self.mover = DeviceMover(self.device, 0, 8, ENGINE_ABOVE, counted=counted)
            self.device.gets_on = False
        assert (self.mover.counters is not None) == counted
        wire = Wire(self.peer, ipc.PROTOCOL, Settings())
        self.connector = HostConnector(self.peer, 0, self.cuda, self.mover, wire, inflight)
        self.connector.register([MemoryRegion.of_array(id, array) for id, array in self.arrays.items()])
        self.completions, self.receipts, self.peers = [], [], []

    def endpoint(self):
        infos = tuple(RegionInfo(id, "cuda", len(array)) for id, array in self.arrays.items())
        return Endpoint("cuda_ipc", "1", self.peer, infos, b"", self.connector.metadata())

    def held(self, segments):
        """Its bytes there, a copy."""
        parts = [self.arrays[region][offset : offset + length] for region, offset, length in segments.triples()]
        return np.concatenate([np.empty(0, np.uint8), *parts])

    @property
    def downs(self):
        return [event for event in self.peers if not event.up]


class Trace:
    def __init__(self, seed):
        self.draw = draw = random.Random(seed)
        self.inflight = draw.choice((1, 2, 4, 14, 40))
        self.source = Side("prefill-0", draw, self.inflight, draw.random() < 0.75)
        self.target = Side("decode-0", draw, 4, True, UNTOUCHED)
        self.accepted = {}
        #: Of chunks that ended and were not done: what was at their targets then.
        self.ended = {}
        self.places = dict.fromkeys(self.target.arrays, 0)
        self.transfers = [new_transfer_id()]
        self.sequence = 0
        self.fenced = False

    def poll(self, side):
        progress = side.connector.poll()
        side.completions += progress.completions
        side.receipts += progress.receipts
        side.peers += progress.peers
        if side is self.target:
            assert not progress.completions
            for receipt in progress.receipts:
                chunk = self.accepted[receipt.transfer, receipt.sequence]
                assert receipt.peer == self.source.peer
                assert self.arrived(chunk), "T3: a receipt before its bytes"
        for one in progress.completions:
            chunk = self.accepted[one.transfer, one.sequence]
            if one.outcome is Outcome.DONE:
                assert one.terminal
                assert self.arrived(chunk), "T5: done before its bytes have come"
            elif one.terminal:
                held = self.ended[one.transfer, one.sequence] = self.target.held(chunk.target)
                assert one.outcome is Outcome.FAILED or (held == UNTOUCHED).all(), "T9: cancelled, and written"
        for event in progress.peers:
            if not event.up and event.quiet:
                assert not side.cuda.mapped
                under_way = side is self.target and not self.fenced and any(self.source.device.streams.values())
                assert not under_way, "C6.4: quiet, and it may be written"

    def arrived(self, chunk):
        return np.array_equal(self.source.held(chunk.source), self.target.held(chunk.target))

    # -- what happens

    def batches(self):
        """As core cuts them from a list."""
        draw = self.draw
        if draw.random() < 0.08:
            return [(Segments.empty(), Segments.empty())]
        length, grain = draw.choice(LENGTHS), draw.choice((1, 16, 16, 16))
        sources, targets = [], []
        for _ in range(draw.choice((1, 1, 2, 5, 9, 12, 20, 40))):
            if draw.random() < 0.05:
                length = draw.choice(LENGTHS)
            here, there = draw.choice(list(self.source.arrays)), draw.choice(list(self.target.arrays))
            place = -(-self.places[there] // grain) * grain
            if place + length <= len(self.target.arrays[there]):
                self.places[there] = place + length
                sources.append((here, draw.randrange(0, len(self.source.arrays[here]) - length, grain), length))
                targets.append((there, place, length))
        return split(Segments.of(sources), Segments.of(targets), draw.choice((1 << 14, 1 << 16)), draw.choice((7, 100)))

    def submit(self):
        transfer = self.draw.choice(self.transfers)
        for source, target in self.batches():
            chunk = Chunk(transfer, self.sequence, self.target.peer, source, target, source.nbytes)
            self.sequence += 1
            connector = self.source.connector
            before, link = connector.outstanding(), connector._links.get(self.target.peer)
            unheard = 0 if link is None else link.told - link.acknowledged
            if connector.submit(chunk):
                self.accepted[transfer, chunk.sequence] = chunk
                assert unheard < connector._unheard or link.closing, "T6: it stands still, and more is written"
            else:
                assert connector.outstanding() == before

    def fails_once(self):
        when = self.draw.choice(("fails_in", "fails_after"))
        name = self.draw.choice(("run", "copy", "record", "write_behind"))
        getattr(self.source.device, when)[name] = DriverError(f"{name}: CUDA_ERROR_UNKNOWN")

    def lies(self):
        """A word of the target's that may be true, or ours, or neither."""
        draw = self.draw

        def number():
            return draw.choice((0, 1, 2, 5, 1 << 40, (1 << 63) - 1))

        def some():
            numbers = tuple(number() for _ in range(draw.randrange(1, 3)))
            return tuple(Chunks(draw.choice(self.transfers), numbers) for _ in range(draw.randrange(1, 3)))

        launches = tuple(Launch(draw.randrange(3), number(), some()) for _ in range(draw.randrange(1, 4)))
        words = Written(some()), Begun(launches), Watching(), Heard(number()), Bye()
        word = bytearray(encode(draw.choice(words)))
        if draw.random() < 0.3:
            word[draw.randrange(len(word))] = draw.randrange(256)
        if self.target.connector._wire.up(self.source.peer):
            self.target.connector._wire.send(self.source.peer, bytes(word))

    def act(self):
        draw, source, target = self.draw, self.source, self.target
        what = draw.random()
        if what < 0.4:
            self.submit()
        elif what < 0.55:
            self.poll(source)
        elif what < 0.7:
            self.poll(target)
        elif what < 0.75:
            draw.choice((source, target)).connector.wait(0.0)
        elif what < 0.95:
            for _ in range(draw.choice((1, 3, 10))):
                source.device.step(draw.choice(source.streams))
        elif what < 0.98:
            source.connector.cancel(draw.choice(self.transfers))
        else:
            self.transfers.append(new_transfer_id())
        link = source.connector._links.get(target.peer)
        if link is not None:
            assert len(link.flights) + len(link.queued) <= self.inflight
            assert link.queued_bytes == sum(chunk.nbytes for chunk in link.queued)
            assert link.queued_rows == sum(len(chunk.source) for chunk in link.queued)
            assert 0 <= link.told - link.acknowledged < source.connector._unheard + self.inflight

    def until(self, condition):
        for _ in range(6000):
            self.poll(self.source)
            self.poll(self.target)
            self.source.device.finish()
            if condition():
                return
        raise AssertionError(f"not reached: {[(side.completions[-3:], side.peers) for side in self.sides]}")

    @property
    def sides(self):
        return [self.source, self.target]

    # -- how it ends

    def drained(self):
        return not self.source.connector.outstanding()

    def end(self, how):
        source, target = self.source, self.target
        if how in ("drained", "failing"):
            link = source.connector._links[target.peer]
            self.until(lambda: self.drained() and link.told == link.acknowledged)
        elif how == "parted":
            one, other = self.draw.sample(self.sides, 2)
            one.connector.disconnect(other.peer)
            for _ in range(20):
                self.act()
            self.until(lambda: self.drained() and source.downs and target.downs)
            assert [(event.quiet, event.error) for event in (*source.downs, *target.downs)] == [(True, None)] * 2
        elif how == "killed":
            target.connector._wire.close()
            for _ in range(20):
                self.act()
            self.until(lambda: self.drained() and source.downs)
        elif how == "fenced":
            self.fenced = True
            source.connector.fenced(target.peer)
            self.until(lambda: self.drained() and source.downs[-1].quiet)
        else:
            self.until(self.drained)
            assert len(source.downs) <= 2
            assert all(
                "C9.3" in str(event.error) or "C7.4" in str(event.error) for event in source.downs if event.error
            )

    def check(self, how):
        assert sorted((one.transfer, one.sequence) for one in self.source.completions) == sorted(self.accepted), "T5"
        came = [(one.transfer, one.sequence) for one in self.target.receipts]
        assert len(set(came)) == len(came)
        if how in ("drained", "failing", "parted"):
            done = [one for one in self.source.completions if one.outcome is Outcome.DONE]
            assert sorted((one.transfer, one.sequence) for one in done) == sorted(came)
        outside = {id: np.ones(len(array), bool) for id, array in self.target.arrays.items()}
        for key, chunk in self.accepted.items():
            held = self.target.held(chunk.target)
            assert np.array_equal(held, self.ended.get(key, held)), "T5: quiet, and written later"
            for region, offset, length in chunk.target.triples():
                outside[region][offset : offset + length] = False
        assert all((array[outside[id]] == UNTOUCHED).all() for id, array in self.target.arrays.items())
        ours = self.source.mover
        tables = [*ours._free, *(table for table, _ in ours._busy), *ours._adrift, *filter(None, [ours._given])]
        assert len({id(table) for table in tables}) == len(tables)

    def close(self):
        self.fenced = True
        for side, other in (self.sides, self.sides[::-1]):
            side.device.finish()
            side.connector.fenced(other.peer)
            for _ in range(3):
                self.poll(side)
            side.connector.close()
            assert not side.cuda.mapped
            assert not side.device.pinned


@pytest.fixture
def small(monkeypatch):
    """Every bound is reached soon."""

    def tables(count, rows):
        return [mover._Table(pinned) for pinned in torch.zeros((count, 3 * rows), dtype=torch.int64)]

    monkeypatch.setattr(mover, "_tables", tables)
    monkeypatch.setattr(ipc, "unreachable", lambda *_: "")
    for module, bounds in (
        (mover, {"_TABLES": 3, "_ROWS": 16, "_VIEWS": 3, "_SETTLING": 0.0}),
        (ipc, {"MAX_UNHEARD": 6, "_ANSWERED_FROM": 2, "_TOLD_FROM": 4, "GROUP_ROWS": 30, "GROUP_BYTES": 40_000}),
        (ipc_words, {"MAX_NAMED": 5}),
    ):
        for name, value in bounds.items():
            monkeypatch.setattr(module, name, value)


@pytest.mark.clause("T3", "T4", "T5", "T9", "T12", "C6.4")
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("how", ["drained", "failing", "adrift", "lied to", "parted", "killed", "fenced"])
def test_whatever_happens_between_launches_no_chunk_is_lost_nor_one_told_of_before_its_bytes(small, how, seed):
    """``failing``: starts fail, and the device settles; ``adrift``: it does not; ``lied to``: by the target."""
    trace = Trace(f"{how} {seed}")
    source, target = trace.sides
    source.connector.connect(target.endpoint())
    target.connector.connect(source.endpoint())
    trace.until(lambda: source.peers and target.peers)
    for _ in range(trace.draw.choice((10, 40, 120))):
        source.device.gets_on = how == "failing"
        if how in ("failing", "adrift") and trace.draw.random() < 0.15:
            trace.fails_once()
        if how == "lied to" and trace.draw.random() < 0.1:
            trace.lies()
        trace.act()
    source.device.fails_in.clear()
    source.device.fails_after.clear()
    trace.end(how)
    trace.check(how)
    trace.close()
