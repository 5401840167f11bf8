"""The kernel, and what starts it, on a real device; without one these tests are absent."""

import functools
import multiprocessing
import time

import deaths
import numpy as np
import pytest
import torch

from kvbaton.errors import TransportError
from kvbaton_conformance.exits import CASES, CLOSES, Way, end_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")

ROOM = 64 << 20
POISON = 200
#: Runs, the longest of them in bytes, and what addresses and lengths are multiples of.
SHAPES = [
    (42, 1 << 20, 16), (700, 40000, 16), (1500, 16384, 16), (2000, 5000, 16), (3000, 700, 16), (300, 100000, 1),
    (3000, 40, 1),
]  # fmt: skip


@pytest.fixture
def cuda():
    from kvbaton_cuda_ipc import driver

    torch.zeros(1, device="cuda")
    cuda = driver.load()
    cuda.enter(0)
    return cuda


@pytest.fixture
def memory():
    """Bytes that differ by their place, and as many that are all alike."""
    place = torch.arange(ROOM, dtype=torch.int64, device="cuda")
    source = (place * 2654435761 >> 13 & 127).to(torch.uint8)
    target = torch.full_like(source, POISON)
    torch.cuda.synchronize()
    return source, target


def mover(cuda, **options):
    from kvbaton_cuda_ipc.mover import DeviceMover

    return DeviceMover(cuda, 0, options.get("programs"), options.get("engine_above"), counted=True)


def places(draw, lengths, align):
    """Where runs of these lengths are, nowhere two at once."""
    order = draw.permutation(len(lengths))
    free = ROOM - int(lengths.sum()) - align
    gaps = np.sort(draw.integers(0, free // align, len(lengths))) * align
    at = np.empty_like(lengths)
    at[order] = gaps + np.concatenate(([0], lengths[order].cumsum()[:-1]))
    return at


def over(event):
    limit = time.monotonic() + 20
    while not event.query():
        assert time.monotonic() < limit, "the device does not finish"


@pytest.mark.clause("T3")
@pytest.mark.parametrize(("runs", "longest", "align"), SHAPES)
@pytest.mark.parametrize("options", [{}, {"programs": 3}, {"engine_above": 30000}], ids=str)
def test_every_byte_and_no_other(cuda, memory, runs, longest, align, options):
    source, target = memory
    draw = np.random.default_rng(runs)
    lengths = (draw.integers(1, longest, runs) + align - 1) // align * align
    reads, writes = places(draw, lengths, align), places(draw, lengths, align)
    ours = mover(cuda, **options)
    over(ours.start(np.stack((source.data_ptr() + reads, target.data_ptr() + writes, lengths))))
    expected = np.full(ROOM, POISON, np.uint8)
    held = source.cpu().numpy()
    for read, write, length in zip(reads.tolist(), writes.tolist(), lengths.tolist(), strict=True):
        expected[write : write + length] = held[read : read + length]
    assert np.array_equal(target.cpu().numpy(), expected)
    ours.close()


@pytest.mark.clause("T3")
def test_the_driver_launches_what_triton_compiles_as_we_know_it(cuda):
    """Else the transport works, and each launch costs more."""
    from kvbaton_cuda_ipc.kernels import kernels

    assert kernels(cuda, 0).indirect == ""


@pytest.mark.clause("T3")
def test_what_the_driver_cannot_be_handed_goes_by_triton(cuda, monkeypatch):
    from kvbaton_cuda_ipc import kernels

    monkeypatch.setattr(kernels, "_PARAMETERS", ["u64"] * 6)
    made = kernels.Kernels(cuda)
    made.compile()
    assert "u32" in made.indirect
    for rows, words in kernels.scatter.TILES:
        proof = kernels.Proof(rows, words)
        stream = torch.cuda.current_stream().cuda_stream
        proof.by(functools.partial(made.run, stream=stream, address=proof.address))
        assert proof.holds()


@pytest.mark.clause("T3")
def test_a_kernel_that_moves_wrong_bytes_is_not_used(cuda, monkeypatch):
    from kvbaton_cuda_ipc import kernels

    monkeypatch.setattr(kernels.scatter, "launch", lambda plan, table: None)
    with pytest.raises(TransportError, match=r"triton \d.*wrong bytes.*install another version"):
        kernels.Kernels(cuda).compile()


@pytest.mark.clause("T3")
def test_tables_are_not_written_while_they_are_read(cuda, memory):
    """More launches than there are tables, faster than they end."""
    source, target = memory
    ours = mover(cuda, programs=1)
    length = 4096
    cells = ROOM // length
    order = np.random.default_rng(0).permutation(cells)
    events = []
    for first in range(0, cells, 64):
        writes = np.arange(first, min(first + 64, cells))
        runs = ours.room(len(writes))
        runs[0], runs[1] = source.data_ptr() + order[writes] * length, target.data_ptr() + writes * length
        runs[2] = length
        events.append(ours.start(runs))
    for event in events:
        over(event)
    there = torch.from_numpy(order).to("cuda")
    assert bool((target.view(cells, length) == source.view(cells, length)[there]).all())
    assert ours.figures()["launches_total"] == len(events)
    ours.close()


@pytest.mark.clause("T3")
@pytest.mark.parametrize("options", [{}, {"programs": 1}, {"engine_above": 1}], ids=str)
def test_a_counter_is_raised_behind_the_bytes_and_never_before(cuda, memory, options):
    """Read through another mapping, as another process does; nothing else says that a launch is over."""
    from kvbaton_cuda_ipc.counters import Reader

    source, target = memory
    ours = mover(cuda, **options)
    assert ours.counters is not None
    reader = Reader(ours.counters)
    before = [reader.value(lane) for lane in range(2)]
    launches = 60
    size = ROOM // launches // 4096 * 4096
    started = []
    for number in range(launches):
        rows = np.arange(size // 4096) * 4096 + number * size
        runs = np.stack((source.data_ptr() + rows, target.data_ptr() + rows, np.full(len(rows), 4096)))
        started.append(ours.start(runs))
    looking = torch.cuda.Stream()
    for number, one in enumerate(started):
        limit = time.monotonic() + 20
        while reader.value(one.mark.lane) < one.mark.number:
            assert time.monotonic() < limit, "the device does not count"
        with torch.cuda.stream(looking):
            part = slice(number * size, (number + 1) * size)
            assert torch.equal(target[part], source[part])
    assert [reader.value(lane) - before[lane] for lane in range(2)] == [launches // 2] * 2
    over(started[-1])
    reader.close()
    ours.close()


@pytest.fixture
def writer():
    """Of launches that are started, and the counters of who has started them."""
    from kvbaton_cuda_ipc.counters import Reader

    made = []

    def start(launches, bad=0):
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=deaths.copy_slowly, args=(theirs, launches, bad), daemon=True)
        process.start()
        made.append(process)
        theirs.close()
        assert ours.poll(60), "the writer does not start"
        where, marks = ours.recv()
        return process, ours, Reader(where), marks

    yield start
    for process in made:
        process.kill()
        process.join()


@pytest.mark.clause("T3", "C6.4")
def test_a_counter_of_a_writer_that_was_killed_tells_of_no_launch_that_was_cut_off(writer):
    """Once it was joined the device does nothing more for it, and writes no number either."""
    process, _, reader, marks = writer(24)
    limit = time.monotonic() + 30
    while reader.value(marks[0].lane) < marks[0].number:
        assert time.monotonic() < limit, "the device does not count"
    process.kill()
    process.join()
    joined = [reader.value(lane) for lane in range(2)]
    assert joined[marks[-1].lane] < marks[-1].number, "it was over before it was killed"
    ones = torch.ones(4096, 4096, device="cuda")
    for _ in range(200):
        ones = ones @ ones / 4096
    torch.cuda.synchronize()
    assert [reader.value(lane) for lane in range(2)] == joined
    reader.close()


@pytest.mark.clause("T3", "T5")
def test_a_launch_that_fails_raises_no_counter_and_nothing_behind_it_does(writer):
    """It reads where there is nothing: the device ends everything of its process."""
    _, pipe, reader, marks = writer(4, bad=1 << 45)
    assert pipe.poll(60), "the device does not fail"
    assert pipe.recv() == "the device has failed"
    assert all(reader.value(mark.lane) < mark.number for mark in marks)
    reader.close()


@pytest.mark.clause("T6")
def test_nothing_waits_for_somebody_elses_copies_from_the_host(cuda, memory):
    """A cache that comes back from the host, say: half a second of it, in the device's queue for such copies."""
    source, target = memory
    ours = mover(cuda)
    away = torch.empty(1 << 30, dtype=torch.uint8, pin_memory=True)
    back = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    lengths = np.full(512, 32768)
    starts = np.arange(512) * 65536
    others = torch.cuda.Stream()
    with torch.cuda.stream(others):
        for _ in range(25):
            back.copy_(away, non_blocking=True)
    over(ours.start(np.stack((source.data_ptr() + starts, target.data_ptr() + starts, lengths))))
    assert not others.query()
    others.synchronize()
    assert torch.equal(target.view(1024, -1)[:512, :32768], source.view(1024, -1)[:512, :32768])
    assert (target.view(1024, -1)[:512, 32768:] == POISON).all()
    ours.close()


@pytest.mark.clause("T5", "C6.4")
@pytest.mark.parametrize("killed", ["source", "target"])
def test_a_process_that_dies_in_mid_copy(killed):
    found = deaths.one_round(killed, (0, 0), 256 << 20, 1, 0.01, 2)
    assert not any(found.get("LATE BYTES", ()))


@pytest.mark.clause("T10")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("closes", CLOSES)
def test_exits(case, closes):
    options = {"programs": 1} if case in ("busy", "stopped-peer") else {}
    way = Way("cuda_ipc", case, closes, memory="cuda", options=options, nbytes=256 << 20)
    if way.possible:
        assert end_of(way) == ""
