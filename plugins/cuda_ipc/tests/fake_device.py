"""A device that is none, as the mover sees it: streams, events, counters, the kernel and copies of the engine."""

import ctypes
from collections import deque

OFFSET = 1 << 40  # between where the host has its memory and where a device sees it


class Device:
    """It does what is in a stream one after the other, and only when the test lets it."""

    def __init__(self):
        self.streams = {}
        self.reached_events = {}
        self.records = {}
        self.forgotten = []
        #: Where runs may be, from and to: what is elsewhere is not touched.
        self.bounds = []
        #: Raised by whatever is asked of it.
        self.fails = None
        #: Raised by one call of that name, before or after it did what it was asked to.
        self.fails_in = {}
        self.fails_after = {}
        #: It gets on while somebody waits for it.
        self.gets_on = False
        self.pinned = {}
        #: By how much what it writes is wrong.
        self.miscounts = 0

    def _put(self, name, stream, work):
        if self.fails is not None:
            raise self.fails
        if name in self.fails_in:
            raise self.fails_in.pop(name)
        self.streams.setdefault(stream, deque()).append(work)
        if name in self.fails_after:
            raise self.fails_after.pop(name)

    def over(self, stream):
        if self.gets_on:
            self.step(stream)
        return not self.streams.get(stream)

    def step(self, stream):
        if self.streams.get(stream):
            self.streams[stream].popleft()()

    def finish(self):
        for stream in self.streams:
            while self.streams[stream]:
                self.step(stream)

    # -- the driver

    def copy(self, target, source, nbytes, stream):
        self._put("copy", stream, lambda: ctypes.memmove(target, source, nbytes))

    def event(self):
        if "event" in self.fails_in:
            raise self.fails_in.pop("event")
        event = 100 + len(self.reached_events)
        self.reached_events[event] = True
        return event

    def record(self, event, stream):
        number = self.records[event] = self.records.get(event, 0) + 1

        def reach():
            if self.records[event] == number:  # an event tells of what it was recorded for last
                self.reached_events[event] = True

        self._put("record", stream, reach)
        self.reached_events[event] = False

    def reached(self, event):
        return self.reached_events[event]

    def forget(self, event):
        self.forgotten.append(event)
        if self.fails is not None:
            raise self.fails

    # -- counters, in memory of the host that it was shown

    def pin(self, address, nbytes):
        if "pin" in self.fails_in:
            raise self.fails_in.pop("pin")
        assert not address % 4096
        self.pinned[address] = nbytes
        return address + OFFSET

    def unpin(self, address):
        if "unpin" in self.fails_in:
            raise self.fails_in.pop("unpin")
        del self.pinned[address]

    def write_behind(self, stream, address, value):
        def write():
            assert any(first <= address - OFFSET < first + nbytes for first, nbytes in self.pinned.items())
            ctypes.c_uint64.from_address(address - OFFSET).value = value + self.miscounts

        self._put("write_behind", stream, write)

    # -- the kernel: it reads its table when it runs

    def run(self, plan, table, stream, address):
        assert address == table.data_ptr()

        def work():
            for source, target, length in table.numpy()[: 3 * plan.rows].reshape(3, plan.rows).T.tolist():
                source, target = plan.origins[0] + source, plan.origins[1] + target
                for (first, past), address in zip(self.bounds, (source, target), strict=True):
                    assert first <= address <= address + length <= past, "a table that is not this launch's"
                ctypes.memmove(target, source, length)

        self._put("run", stream, work)
