"""What starts copies on a device: its tables, its events, and what it does where the device fails; without a device."""

import random
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_device import Device

from kvbaton_cuda_ipc import counters, kernels, mover
from kvbaton_cuda_ipc.counters import Reader
from kvbaton_cuda_ipc.driver import DriverError
from kvbaton_cuda_ipc.mover import Adrift, DeviceMover, Events

LANE = 7  # a stream


@pytest.fixture
def device(monkeypatch):
    device = Device()
    streams = iter(range(1, 100))

    def tables(count, rows):
        return [mover._Table(pinned) for pinned in torch.zeros((count, 3 * rows), dtype=torch.int64)]

    def stream(_):
        handle = next(streams)
        return SimpleNamespace(cuda_stream=handle, query=lambda: device.over(handle))

    monkeypatch.setattr(mover, "_tables", tables)
    monkeypatch.setattr(mover, "_TABLES", 3)
    monkeypatch.setattr(mover, "_ROWS", 16)
    monkeypatch.setattr(kernels, "kernels", lambda cuda, ordinal: device)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    return device


@pytest.fixture
def memory(device):
    source = np.random.default_rng(1).integers(0, 128, 1 << 16, np.uint8)
    target = np.full_like(source, 200)
    device.bounds = [(one.ctypes.data, one.ctypes.data + one.nbytes) for one in (source, target)]
    return source, target


def opened(device, engine_above=1 << 20):
    return DeviceMover(device, 0, 8, engine_above)


def counted(device, engine_above=1 << 20):
    """With counters, which the device proves to be able to raise."""
    device.gets_on = True
    ours = DeviceMover(device, 0, 8, engine_above, counted=True)
    device.gets_on = False
    return ours


def runs_of(memory, cells, length=64):
    """Every one of these cells, from its place in the one to that in the other."""
    source, target = memory
    cells = np.array(cells, np.int64)
    return np.stack((source.ctypes.data + cells * length, target.ctypes.data + cells * length, 0 * cells + length))


@pytest.mark.clause("T3")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("aligned", [True, False])
def test_every_byte_comes_however_far_the_device_is_behind(device, memory, seed, aligned):
    """More launches than there are tables, of more rows than these have room for, written there or brought along."""
    source, target = memory
    draw = random.Random(seed)
    ours = opened(device)
    length = 64 if aligned else 61
    cells = list(range(len(source) // length))
    draw.shuffle(cells)
    events = []
    while cells:
        some = [cells.pop() for _ in range(min(len(cells), draw.choice((1, 5, 16, 40))))]
        runs = runs_of(memory, some, length)
        if draw.random() < 0.2:
            ours.room(draw.choice((3, len(some))))  # given, and not started
        if draw.random() < 0.6:
            here = ours.room(len(some))
            here[:] = runs
            origins = (0, 0)
            if draw.random() < 0.6:
                origins = (source.ctypes.data - draw.choice((0, 48, 5)), target.ctypes.data)
                here[:2] -= np.array(origins).reshape(2, 1)
            about = draw.choice(((), (len(some) * length, length), (None, 2 * length)))
            events.append(ours.start(here, **dict(zip(("nbytes", "longest"), about, strict=False)), origins=origins))
        else:
            events.append(ours.start(runs))
            runs[:] = 0  # the caller's again
        for _ in range(draw.randrange(6)):
            device.step(draw.choice((1, 2)))
        for event in draw.sample(events, draw.randrange(min(len(events), 4) + 1)):
            event.query()
    device.finish()
    assert all(event.query() for event in events)
    moved = len(source) // length * length
    assert np.array_equal(target[:moved], source[:moved])
    assert (target[moved:] == 200).all()
    assert ours.figures()["kernel_bytes_total"] == moved


@pytest.mark.clause("T12")
def test_a_table_is_used_again_once_its_launch_is_over(device, memory):
    ours = opened(device)
    for number in range(200):
        ours.room(2)
        runs = ours.room(1)
        runs[:] = runs_of(memory, [number])
        ours.start(runs)
        device.finish()
    assert ours.figures()["tables"] == 3
    assert len(device.reached_events) <= 3


@pytest.mark.clause("T12")
def test_a_table_remembers_a_bounded_number_of_views(device, monkeypatch):
    monkeypatch.setattr(mover, "_VIEWS", 3)
    ours = opened(device)
    for rows in (*range(1, 17), *range(1, 17)):
        assert ours.room(rows).shape == (3, rows)
        assert all(len(table._views) <= 3 for table in tables_of(ours))


@pytest.mark.clause("T12")
def test_of_launches_that_were_seen_to_be_over_nothing_is_kept(device, memory):
    """Else records grow until every table has been used once, and each start writes one that no cache holds."""
    ours = opened(device)
    used = set()
    for number in range(50):
        runs = ours.room(1)
        runs[:] = runs_of(memory, [number])
        used.add(runs.ctypes.data)
        event = ours.start(runs)
        device.finish()
        assert event.query()
        assert len(ours._busy) == 1
    assert len(used) == 1


@pytest.mark.parametrize(("option", "programs", "double"), [(3, 3, False), (None, 5, True)])
def test_programs_are_the_operators_or_what_the_device_has_and_twice_that(
    device, memory, monkeypatch, option, programs, double
):
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: SimpleNamespace(multi_processor_count=5))
    ours = DeviceMover(device, 0, option, 1 << 20)
    asked = []
    plan = ours._plan
    monkeypatch.setattr(ours, "_plan", lambda *given: asked.append((given[1], given[-1])) or plan(*given))
    ours.start(runs_of(memory, [1, 2]))
    device.finish()
    ours.close()
    assert asked == [(programs, double)]


@pytest.mark.clause("T3")
@pytest.mark.parametrize("told_from_origins", [False, True])
def test_long_runs_go_by_the_engine_and_the_others_by_the_kernel(device, memory, told_from_origins):
    source, target = memory
    ours = opened(device, engine_above=4096)
    runs = ours.room(3)
    runs[:] = np.concatenate((runs_of(memory, [0, 2], 4096), runs_of(memory, [70], 64)), axis=1)
    origins = (0, 0)
    if told_from_origins:
        origins = (source.ctypes.data, target.ctypes.data)
        runs[:2] -= np.array(origins).reshape(2, 1)
    event = ours.start(runs, origins=origins)
    assert not event.query()
    device.finish()
    assert event.query()
    for first, past in ((0, 4096), (8192, 12288), (4480, 4544)):
        assert np.array_equal(target[first:past], source[first:past])
    assert (target == 200).sum() == len(target) - 2 * 4096 - 64
    figures = ours.figures()
    assert (figures["engine_runs_total"], figures["engine_bytes_total"]) == (2, 8192)
    assert (figures["kernel_runs_total"], figures["kernel_bytes_total"], figures["launches_total"]) == (1, 64, 1)


@pytest.mark.clause("T5")
def test_a_start_that_fails_says_why_and_the_next_one_goes(device, memory):
    ours = opened(device)
    device.fails = DriverError("cuMemcpyAsync: CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        ours.start(runs_of(memory, [0]))
    device.fails = None
    event = ours.start(runs_of(memory, [1]))
    device.finish()
    assert event.query()
    assert np.array_equal(memory[1][64:128], memory[0][64:128])


@pytest.mark.clause("T12")
@pytest.mark.parametrize("call", ["run", "record"])
@pytest.mark.parametrize("aligned", [True, False])
def test_a_start_that_fails_loses_no_table(device, memory, monkeypatch, call, aligned):
    ours = opened(device)
    real = getattr(device, call)

    def fail(*_):
        device.finish()
        raise DriverError("CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES")

    for cell in range(10):
        monkeypatch.setattr(device, call, fail)
        with pytest.raises(DriverError, match="OUT_OF_RESOURCES"):
            ours.start(runs_of(memory, [cell], 64 if aligned else 61))
        device.finish()
        monkeypatch.setattr(device, call, real)
        assert ours.figures()["tables"] == 3
    ours.start(runs_of(memory, [99]))
    device.finish()
    assert np.array_equal(memory[1][99 * 64 : 100 * 64], memory[0][99 * 64 : 100 * 64])


@pytest.mark.clause("T5")
def test_a_device_that_does_not_say_what_it_still_does_is_adrift(device, memory, monkeypatch):
    """And what it may still read is written no more."""
    ours = opened(device)
    ours.start(runs_of(memory, [0]))
    monkeypatch.setattr(ours, "settle", lambda: False)
    real = device.record

    def fail(*_):
        raise DriverError("cuEventRecord: CUDA_ERROR_LAUNCH_FAILED")

    monkeypatch.setattr(device, "record", fail)
    with pytest.raises(Adrift, match="LAUNCH_FAILED"):
        ours.start(runs_of(memory, [1]))
    monkeypatch.setattr(device, "record", real)
    assert ours.figures()["tables"] == 3
    for cell in range(2, 12):
        ours.start(runs_of(memory, [cell]))
    device.finish()
    assert np.array_equal(memory[1][: 12 * 64], memory[0][: 12 * 64])


def tables_of(ours):
    """Every table that it still has, each once."""
    given = [] if ours._given is None else [ours._given]
    tables = [*ours._free, *(table for table, _ in ours._busy), *ours._adrift, *given]
    assert len({id(table) for table in tables}) == len(tables), "T3: a table is there twice, for two launches at once"
    assert ours.figures()["tables"] == len(tables)
    return tables


def moves_on(ours, device, memory, first=100, count=40):
    """So many launches, the device behind by one and more: all bytes come."""
    events = []
    for cell in range(first, first + count):
        events.append(ours.start(runs_of(memory, [cell])))
        device.step(1 + cell % 2)
    device.finish()
    assert all(event.query() for event in events)
    source, target = memory
    assert np.array_equal(target[first * 64 : (first + count) * 64], source[first * 64 : (first + count) * 64])


FAILING = [(when, name) for when in ("fails_in", "fails_after") for name in ("copy", "run", "record")]


@pytest.mark.clause("T5", "T12")
@pytest.mark.parametrize("brought", [False, True], ids=["in-the-room", "brought-along"])
@pytest.mark.parametrize(("when", "name"), [*FAILING, ("fails_in", "event")])
def test_a_start_that_fails_costs_no_table_once_the_device_is_settled(device, memory, when, name, brought):
    """Whichever of its calls fails, before or after the device took it: the table is free again, and not twice."""
    ours = opened(device, 64 if name == "copy" else 1 << 20)
    device.gets_on = True
    for number in range(10):
        getattr(device, when)[name] = DriverError(f"{name}: CUDA_ERROR_UNKNOWN")
        runs = runs_of(memory, [number])
        if not brought:
            runs, there = ours.room(1), runs
            runs[:] = there
        if name == "event":
            ours._events._free.clear()
        with pytest.raises(DriverError):
            ours.start(runs)
        assert len(tables_of(ours)) == 3
        assert len(ours._free) == 3
    device.gets_on = False
    moves_on(ours, device, memory)
    assert len(ours._adrift) == 0


@pytest.mark.clause("T5", "C6.1")
@pytest.mark.parametrize(("when", "name"), FAILING)
def test_a_table_that_is_adrift_is_kept_and_never_used_again(device, memory, monkeypatch, when, name):
    """The device may come to it yet: then it finds what was written for it, however many launches came behind."""
    monkeypatch.setattr(mover, "_SETTLING", 0.0)
    ours = opened(device, 64 if name == "copy" else 1 << 20)
    ours.start(runs_of(memory, [0]))
    ours.start(runs_of(memory, [1]))  # in both lanes something is under way
    runs = ours.room(1)
    runs[:] = wanted = runs_of(memory, [2])
    getattr(device, when)[name] = DriverError(f"{name}: CUDA_ERROR_UNKNOWN")
    with pytest.raises(Adrift, match="CUDA_ERROR_UNKNOWN"):
        ours.start(runs)
    (adrift,) = ours._adrift
    assert adrift.runs is runs
    assert len(tables_of(ours)) == 3
    moves_on(ours, device, memory)
    assert ours._adrift == [adrift]
    assert adrift not in (*ours._free, *(table for table, _ in ours._busy), ours._given)
    assert np.array_equal(runs, wanted)


class Interrupted(BaseException):
    pass


@pytest.mark.clause("T5")
def test_a_start_that_is_interrupted_leaves_its_table_to_the_device(device, memory):
    ours = opened(device)
    device.fails_after["run"] = Interrupted()
    with pytest.raises(Interrupted):
        ours.start(runs_of(memory, [0]))
    assert len(ours._adrift) == 1
    moves_on(ours, device, memory)
    assert np.array_equal(memory[1][:64], memory[0][:64])


@pytest.mark.clause("T3", "T5", "T12")
def test_where_there_is_no_memory_for_a_larger_table_the_others_stay_what_they_were(device, memory, monkeypatch):
    """Neither is one lost, nor is one that was given free at the same time."""
    ours = opened(device)
    makes = mover._tables

    def no_memory(*_):
        raise RuntimeError("CUDA out of memory")

    for held in (False, True):
        if held:
            ours.room(2)
        monkeypatch.setattr(mover, "_tables", no_memory)
        with pytest.raises(RuntimeError, match="out of memory"):
            ours.room(1000)
        with pytest.raises(RuntimeError, match="out of memory"):
            ours.start(runs_of(memory, range(1000)))
        assert len(tables_of(ours)) == 3
        monkeypatch.setattr(mover, "_tables", makes)
    ours.room(1000)
    assert len(tables_of(ours)) == 3
    moves_on(ours, device, memory)


@pytest.mark.clause("T10", "C6.1")
def test_what_the_device_may_still_read_outlives_the_mover(device, memory, monkeypatch):
    monkeypatch.setattr(mover, "_SETTLING", 0.0)
    monkeypatch.setattr(mover, "_NEVER_AGAIN", [])
    quiet = opened(device)
    quiet.start(runs_of(memory, [0]))
    device.finish()
    quiet.close()
    quiet.close()
    assert not mover._NEVER_AGAIN
    ours = opened(device)
    ours.start(runs_of(memory, [1]))
    device.fails_after["record"] = DriverError("cuEventRecord: CUDA_ERROR_UNKNOWN")
    with pytest.raises(Adrift):
        ours.start(runs_of(memory, [2]))
    kept = [ours._busy[0][0], *ours._adrift]
    ours.close()
    ours.close()
    assert sorted(map(id, mover._NEVER_AGAIN)) == sorted(map(id, kept))
    device.finish()
    assert np.array_equal(memory[1][64:192], memory[0][64:192])


@pytest.mark.clause("T5")
def test_an_event_is_used_again_only_once_it_was_seen():
    """One that was seen stays over, whatever its successor waits for."""
    device = Device()
    events = Events(device)
    first = events.record(LANE)
    assert not first.query()
    device.finish()
    assert first.query()
    second, third = events.record(LANE), events.record(LANE)
    assert first.query()
    assert not second.query()
    device.step(LANE)
    assert second.query()
    assert not third.query()
    assert len(device.reached_events) == 2
    events.close()
    assert third.query()


@pytest.mark.clause("T5")
def test_an_event_that_was_not_recorded_is_left():
    device = Device()
    events = Events(device)
    device.fails = DriverError("cuEventRecord: CUDA_ERROR_INVALID_HANDLE")
    with pytest.raises(DriverError):
        events.record(LANE)
    device.fails = None
    assert not events.record(LANE).query()
    assert len(device.reached_events) == 1


@pytest.mark.clause("T10")
def test_closing_gives_every_event_back_also_where_the_device_has_failed():
    device = Device()
    events = Events(device)
    for _ in range(3):
        events.record(LANE)
    device.fails = DriverError("cuEventDestroy_v2: CUDA_ERROR_ILLEGAL_ADDRESS")
    events.close()
    events.close()
    assert sorted(device.forgotten) == sorted(device.reached_events)


@pytest.mark.clause("T3", "C6.1")
def test_who_is_interrupted_once_all_was_started_keeps_the_table_too(device, memory):
    """The last moment of a start: the device reads the table from now on, whatever becomes of who has started it."""
    ours = opened(device)

    class Interrupted(deque):
        def append(self, _):
            raise KeyboardInterrupt

    ours._busy = Interrupted()
    runs = ours.room(1)
    runs[:] = runs_of(memory, [2])
    with pytest.raises(KeyboardInterrupt):
        ours.start(runs)
    ours._busy = deque()
    assert [table.runs is runs for table in ours._adrift] == [True]
    assert len(tables_of(ours)) == 3
    moves_on(ours, device, memory)
    assert np.array_equal(memory[1][128:192], memory[0][128:192])


# -- what others see -------------------------------------------------------------------------------------------------


@pytest.mark.clause("T3")
@pytest.mark.parametrize("engine_above", [1 << 20, 64], ids=["kernel", "engine"])
def test_a_counter_is_raised_behind_the_bytes_of_its_launch(device, memory, engine_above):
    """However the lanes get on: who reads a launch's number finds its bytes, and nobody reads it before."""
    source, target = memory
    draw = random.Random(engine_above)
    ours = counted(device, engine_above)
    reader = Reader(ours.counters)
    started = []
    for cell in range(200):
        started.append((cell, ours.start(runs_of(memory, [cell]))))
        for _ in range(draw.randrange(5)):
            device.step(draw.choice((1, 2)))
        for cell, event in started:
            seen = reader.value(event.mark.lane) >= event.mark.number
            there = np.array_equal(target[cell * 64 : cell * 64 + 64], source[cell * 64 : cell * 64 + 64])
            assert there or not seen, "T3: the counter is ahead of the bytes"
            assert seen or not event.query(), "the event is behind the counter"
        started = [(cell, event) for cell, event in started if not event.query()]
    device.finish()
    assert all(reader.value(event.mark.lane) >= event.mark.number for _, event in started)
    ours.close()
    assert not device.pinned
    reader.close()


@pytest.mark.clause("T3", "T5")
@pytest.mark.parametrize("when", ["fails_in", "fails_after"])
def test_a_number_is_given_once_also_where_raising_failed(device, memory, when):
    """Else the write that failed, and was begun, would tell of the launch behind it."""
    ours = counted(device)
    device.gets_on = True
    before = ours.start(runs_of(memory, [0])).mark, ours.start(runs_of(memory, [1])).mark
    getattr(device, when)["write_behind"] = DriverError("cuStreamWriteValue64: CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError):
        ours.start(runs_of(memory, [2]))
    device.gets_on = False
    behind = [ours.start(runs_of(memory, [cell])).mark for cell in (3, 4)]
    assert behind == [
        mover.Mark(before[1].lane, before[1].number + 1),
        mover.Mark(before[0].lane, before[0].number + 2),
    ]
    assert len(tables_of(ours)) == 3
    moves_on(ours, device, memory)


@pytest.mark.clause("T13")
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"fails_in": {"pin": DriverError("cuMemHostRegister: CUDA_ERROR_NOT_SUPPORTED")}}, "NOT_SUPPORTED"),
        ({"fails_in": {"write_behind": DriverError("CUDA's driver is too old")}}, "too old"),
        ({"miscounts": 1}, "should have written"),
    ],
    ids=["pinned", "written", "miscounted"],
)
def test_a_device_that_does_not_count_is_done_without(device, memory, monkeypatch, caplog, fault, reason):
    monkeypatch.setattr(counters, "_NEVER_AGAIN", [])
    before = len(list(Path("/proc/self/fd").iterdir()))
    for name, value in fault.items():
        setattr(device, name, value)
    with caplog.at_level("INFO", "kvbaton_cuda_ipc"):
        ours = counted(device)
    assert reason in caplog.text
    assert ours.counters is None
    assert not device.pinned
    assert not counters._NEVER_AGAIN
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "T10: the page is left"
    assert ours.start(runs_of(memory, [0])).mark is None
    moves_on(ours, device, memory)
    ours.close()


@pytest.mark.clause("T13")
def test_where_no_memory_can_be_shared_nothing_is_counted(device, memory, monkeypatch, caplog):
    def none():
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(counters, "_memory", none)
    with caplog.at_level("INFO", "kvbaton_cuda_ipc"):
        ours = counted(device)
    assert "Too many open files" in caplog.text
    assert ours.counters is None
    moves_on(ours, device, memory)
    ours.close()


@pytest.mark.clause("T10", "C6.1")
def test_a_page_is_kept_where_the_trial_is_not_over(device, monkeypatch, caplog):
    """The device may write it yet."""
    monkeypatch.setattr(mover, "_SETTLING", 0.0)
    monkeypatch.setattr(counters, "_NEVER_AGAIN", [])
    with caplog.at_level("INFO", "kvbaton_cuda_ipc"):
        ours = DeviceMover(device, 0, 8, 1 << 20, counted=True)
    assert ours.counters is None
    (page,) = counters._NEVER_AGAIN
    assert page.nbytes == device.pinned[page.address]
    device.finish()
    assert [page.value(lane) for lane in range(2)] == [1, 1]


@pytest.mark.clause("T10")
def test_a_number_that_was_given_for_nothing_keeps_no_page(device, memory, monkeypatch):
    """It is never written; but nothing is under way that could."""
    monkeypatch.setattr(counters, "_NEVER_AGAIN", [])
    ours = counted(device)
    device.gets_on = True
    device.fails_in["write_behind"] = DriverError("cuStreamWriteValue64: CUDA_ERROR_UNKNOWN")
    with pytest.raises(DriverError):
        ours.start(runs_of(memory, [0]))
    ours.close()
    assert not device.pinned
    assert not counters._NEVER_AGAIN


@pytest.mark.clause("T10", "C6.1")
@pytest.mark.parametrize("fault", ["late", "failed"])
def test_a_page_that_the_device_may_still_write_outlives_the_mover(device, memory, monkeypatch, fault):
    monkeypatch.setattr(counters, "_NEVER_AGAIN", [])
    ours = counted(device, engine_above=64)  # no table is kept for what the engine moves
    event = ours.start(runs_of(memory, [0]))
    if fault == "failed":
        device.finish()
        device.fails_in["unpin"] = DriverError("cuMemHostUnregister: CUDA_ERROR_ILLEGAL_ADDRESS")
    ours.close()
    ours.close()
    (page,) = counters._NEVER_AGAIN
    device.finish()
    assert page.value(event.mark.lane) == event.mark.number


@pytest.mark.clause("T10", "C6.1")
def test_a_device_that_has_failed_does_not_keep_its_mover_open(device, memory, monkeypatch):
    """The page stays: what is under way is not known."""
    monkeypatch.setattr(counters, "_NEVER_AGAIN", [])
    ours = counted(device, engine_above=64)
    ours.start(runs_of(memory, [0]))

    def fails(stream):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(device, "over", fails)
    ours.close()
    assert len(counters._NEVER_AGAIN) == len(device.pinned) == 1
    assert not ours._lanes


def test_bytes_are_counted_by_the_way_that_they_went_also_where_their_sum_was_told(device, memory):
    ours = opened(device, engine_above=128)
    short, long = runs_of(memory, [0, 1]), runs_of(memory, [4], length=128)
    ours.start(np.concatenate((short, long), axis=1), 256)
    device.finish()
    found = ours.figures()
    assert (found["kernel_bytes_total"], found["engine_bytes_total"]) == (128, 128)
    assert (found["kernel_runs_total"], found["engine_runs_total"]) == (2, 1)


def test_nobody_counts_who_was_not_asked_to(device, memory):
    ours = opened(device)
    assert ours.counters is None
    assert ours.start(runs_of(memory, [0])).mark is None
    assert not device.pinned
