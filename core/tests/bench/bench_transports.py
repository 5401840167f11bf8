"""Loopback with a baseline, which is broken in one way: a plugin for each, named ``bench_transports:NAME``."""

import os

from kvbaton_loopback.plugin import LoopbackPlugin


class Raw:
    """Both ends are threads of one process, so the source can write the target's memory itself."""

    name = "raw copies"
    tells = True
    ends = []

    def __init__(self, options, regions, fault):
        self.regions, self.fault = {region.id: region for region in regions}, fault
        if fault == "open":
            raise RuntimeError("no such device")
        self.came = self.count = 0
        Raw.ends.append(self)

    def address(self):
        return str(Raw.ends.index(self)).encode()

    def meet(self, peer):
        self.other = Raw.ends[int(peer)]

    def prepare_source(self, chunks):
        self.chunks = chunks

    def prepare_target(self, writes):
        self.count = len(writes)

    def begin(self):
        self.came = 0

    def move(self):
        if self.fault == "move":
            raise RuntimeError("the wire is cut")
        if self.fault == "die":
            os._exit(7)
        for reads, writes in self.chunks:
            for (source, at, length), (target, to, _) in zip(reads.triples(), writes.triples(), strict=True):
                bytes_ = self.regions[source].view()[at : at + length]
                self.other.regions[target].view()[to : to + length] = bytes_
                if self.fault == "wrong":
                    self.other.regions[target].view()[to] ^= 1
            self.other.came += 1

    def arrived(self):
        if self.fault == "early":
            return self.count
        came, self.came = self.came, 0
        return came

    def close(self):
        if self.fault == "close":
            raise RuntimeError("it would not go")


class Plugin(LoopbackPlugin):
    def __init__(self, fault):
        self.fault = fault

    def baseline(self, options, regions):
        return Raw(options, regions, self.fault)


sound, fails_at_open, fails_at_move, dies, wrong, early, fails_at_close = (
    Plugin(fault) for fault in ("", "open", "move", "die", "wrong", "early", "close")
)
