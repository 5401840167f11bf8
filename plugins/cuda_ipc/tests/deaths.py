"""A writer that is killed in mid-copy, and the owner of the memory that is written: what the one who is left learns.

python plugins/cuda_ipc/tests/deaths.py --rounds 5                  # on a CUDA device
python plugins/cuda_ipc/tests/deaths.py --rounds 5 --devices 0,1    # over the link between two
python plugins/cuda_ipc/tests/deaths.py --no-device                 # on a device that is none

Each round prints what was found.  The exit status is 0 if every survivor was told, was left no byte of a process that
had been joined, and then moved bytes with somebody new and did work of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

#: Seconds that anybody may need for an answer.
BOUND = 60.0
SENT, POISON, AGAIN = 0x11, 0xEE, 0xA5
#: Seconds for which nothing may come after a writer was joined.
LISTEN = 1.0


class Stage:
    """One end in a process of its own; every public method can be called from outside."""

    def __init__(self, name, device, nbytes, programs):
        from kvbaton.connector import ConnectorContext, MemoryRegion
        from kvbaton.guard import GuardedConnector, GuardLimits
        from kvbaton.identity import PeerId

        self.device, self.nbytes = device, nbytes
        if device is None:
            import numpy as np
            from fake_plugin import plugin

            self.bytes = np.zeros(nbytes, np.uint8)
            region = MemoryRegion.of_array(0, self.bytes)
        else:
            import torch

            from kvbaton_cuda_ipc import cuda_ipc as plugin

            self.bytes = torch.zeros(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
            torch.cuda.synchronize(device)
            region = MemoryRegion(0, "cuda", device, self.bytes.data_ptr(), nbytes, self.bytes)
        options = plugin.Options(programs=programs, engine_above=1 << 40)
        peer = PeerId.start(name)
        self.guard = GuardedConnector(
            plugin.open(options, ConnectorContext(peer, device)), transport="cuda_ipc", version="1", peer=peer,
            limits=GuardLimits(inflight_bytes=1 << 40),
        )  # fmt: skip
        self.guard.register([region])
        self.completions, self.receipts, self.events = [], [], []

    def poll(self):
        news = self.guard.poll()
        self.completions += news.completions
        self.receipts += news.receipts
        self.events += news.peers

    def endpoint(self):
        return self.guard.endpoint().encode()

    def connect(self, endpoint):
        from kvbaton.connector import Endpoint

        theirs = Endpoint.decode(endpoint)
        self.guard.connect(theirs)
        return theirs.peer

    def fill(self, value):
        self.bytes[:] = value
        self._settle()

    def count(self, value):
        found = int((self.bytes == value).sum())
        self._settle()
        return found

    def submit(self, peer, nbytes, pieces, chunks):
        """How many of so many chunks of ``nbytes`` bytes were taken."""
        import numpy as np

        from kvbaton.connector import Chunk
        from kvbaton.identity import new_transfer_id
        from kvbaton.segments import Segments

        rows = Segments(
            np.zeros(pieces, np.int32), np.arange(pieces) * (nbytes // pieces), np.full(pieces, nbytes // pieces)
        )
        transfer = new_transfer_id()
        return sum(self.guard.submit(Chunk(transfer, number, peer, rows, rows, nbytes)) for number in range(chunks))

    def news(self):
        return (
            [(one.outcome.value, one.source_quiet, one.target_quiet) for one in self.completions],
            len(self.receipts),
            [(event.peer, event.up, event.quiet, str(event.error)) for event in self.events],
        )

    def forget(self):
        self.completions, self.receipts, self.events = [], [], []

    def fenced(self, peer):
        self.guard.fenced(peer)

    def disconnect(self, peer):
        self.guard.disconnect(peer)

    def work(self):
        """Something of its own, on its device."""
        if self.device is None:
            return True
        import torch

        ones = torch.ones(512, 512, device=self.bytes.device)
        return bool((ones @ ones == 512).all())

    def counted(self):
        """Receipts that the other's device gave, and not its process."""
        return self.guard.statistics()["connector_counted_receipts_total"]

    def outstanding(self):
        return self.guard.outstanding()

    def close(self):
        self.guard.close()

    def _settle(self):
        if self.device is not None:
            import torch

            torch.cuda.synchronize(self.device)


def serve(pipe, *arguments):
    """The process of a stage: polls, and answers."""
    stage = Stage(*arguments)
    pipe.send(("answer", None))
    while True:
        if stage.guard.closed:
            if not pipe.poll(BOUND):
                return
        else:
            stage.poll()
            if not pipe.poll(0.001):
                continue
        try:
            word, *rest = pipe.recv()
        except EOFError:
            os._exit(3)
        if word == "leave":
            return
        try:
            pipe.send(("answer", getattr(stage, word)(*rest)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))


def copy_slowly(pipe, launches, astray=0):
    """The process of one who copies within its device by one program, and tells where its launches are counted.

    ``astray``: so many bytes from its memory is where it reads."""
    import numpy as np
    import torch

    from kvbaton.errors import TransportError
    from kvbaton_cuda_ipc import driver
    from kvbaton_cuda_ipc.mover import DeviceMover

    size = 512 << 20
    held = torch.zeros(2 * size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    cuda = driver.load()
    cuda.enter(0)
    mover = DeviceMover(cuda, 0, 1, 1 << 40, counted=True)
    runs = np.array([[held.data_ptr() + astray], [held.data_ptr() + size], [size]])
    started = [mover.start(runs) for _ in range(launches)]
    pipe.send((mover.counters, [one.mark for one in started]))
    try:
        while not started[-1].query():
            pass
    except TransportError:
        pipe.send("the device has failed")
    pipe.recv()


class Far:
    """A stage, from outside."""

    def __init__(self, name, device, nbytes, programs=None):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self.name = name
        self.process = context.Process(target=serve, args=(theirs, name, device, nbytes, programs))
        self.process.start()
        theirs.close()
        self._answer("start")

    def _answer(self, word):
        if not self._pipe.poll(BOUND):
            raise RuntimeError(f"{self.name}: no answer to {word} within {BOUND:g} s")
        kind, answer = self._pipe.recv()
        if kind == "error":
            raise RuntimeError(f"{self.name}, {word}: {answer}")
        return answer

    def __getattr__(self, word):
        def ask(*rest):
            self._pipe.send((word, *rest))
            return self._answer(word)

        return ask

    def until(self, condition, what, bound=20.0):
        """Ask for news until they are as they should be; and seconds that it took."""
        started = time.monotonic()
        while not condition(news := self.news()):
            if time.monotonic() - started > bound:
                raise RuntimeError(f"{self.name}: not within {bound:g} s: {what}; heard {news}")
            time.sleep(0.002)
        return news, time.monotonic() - started

    def kill(self):
        """And join."""
        self.process.kill()
        started = time.monotonic()
        self.process.join(BOUND)
        return time.monotonic() - started

    def leave(self):
        self._pipe.send(("leave",))
        self.process.join(BOUND)
        if self.process.exitcode != 0:
            raise RuntimeError(f"{self.name}: exit status {self.process.exitcode}")


def meet(one, other):
    here, there = other.connect(one.endpoint()), one.connect(other.endpoint())
    for far, peer in ((one, there), (other, here)):
        far.until(lambda news, peer=peer: any(event[0] == peer and event[1] for event in news[2]), f"{peer} is up")
    return here, there


def told(peer, *, quiet):
    return lambda news: any(event[0] == peer and not event[1] and event[2] >= quiet for event in news[2])


def lives(survivor, other, survivor_writes):
    """It moves bytes with somebody new, works, and closes."""
    survivor.forget()
    ids = meet(survivor, other)
    before = survivor.counted(), other.counted()
    source, target, peer = (survivor, other, ids[1]) if survivor_writes else (other, survivor, ids[0])
    source.fill(SENT)
    target.fill(POISON)
    assert source.submit(peer, 1 << 20, 64, 1) == 1
    source.until(lambda news: news[0] == [("done", True, True)], "a new chunk is done")
    target.until(lambda news: news[1] == 1, "a new chunk is received")
    assert target.count(SENT) == 1 << 20, "T3"
    after = survivor.counted(), other.counted()
    assert sum(after) - sum(before) == 1, f"the device has given {before} and then {after} receipts"
    assert survivor.work()
    survivor.disconnect(ids[1])
    other.disconnect(ids[0])
    for far in (survivor, other):
        far.until(lambda _, far=far: far.outstanding() == 0, "nothing is outstanding")
        far.until(lambda news: any(not event[1] and event[2] for event in news[2]), "an orderly end")
        far.close()
        far.leave()


def one_round(killed, devices, nbytes, programs, pause, chunks):
    """``killed``: ``source`` or ``target``.  What was found; raises what was wrong."""
    source = Far("prefill-0", devices[0], nbytes, programs)
    target = Far("decode-0", devices[1], nbytes)
    ends = [source, target]
    try:
        source_id, target_id = meet(source, target)
        source.fill(SENT)
        target.fill(POISON)
        source.forget()
        assert source.submit(target_id, nbytes, 64, chunks) == chunks
        time.sleep(pause)
        found = {"killed": killed, "programs": programs, "after s": pause}
        if killed == "source":
            found["done before"] = len(source.news()[0])
            found["joined after s"] = round(source.kill(), 3)
            found["bytes there"] = target.count(SENT)
            target.fill(AGAIN)
            late = [nbytes - target.count(AGAIN)]
            for _ in range(2):
                time.sleep(LISTEN / 2)
                late.append(nbytes - target.count(AGAIN))
            found["LATE BYTES"] = late
            _, found["told after s"] = target.until(told(source_id, quiet=False), "its peer is down")
            target.fenced(source_id)
            _, found["quiet after s"] = target.until(told(source_id, quiet=True), "its peer is quiet")
            other = Far("prefill-0", devices[0], nbytes)
            ends.append(other)
            lives(target, other, survivor_writes=False)
            if any(late):
                raise RuntimeError(f"C6.4: bytes came after their writer was joined: {found}")
        else:
            found["done before"] = len(source.news()[0])
            found["joined after s"] = round(target.kill(), 3)
            news, found["over after s"] = source.until(lambda news: len(news[0]) == chunks, "every chunk is over")
            _, found["told after s"] = source.until(told(target_id, quiet=False), "its peer is down")
            source.fenced(target_id)
            _, found["quiet after s"] = source.until(told(target_id, quiet=True), "its peer is quiet")
            found["outcomes"] = {one: news[0].count(one) for one in set(news[0])}
            found["error"] = next(event[3] for event in source.news()[2] if not event[1])[:120]
            other = Far("decode-0", devices[1], nbytes)
            ends.append(other)
            lives(source, other, survivor_writes=True)
        return found
    finally:
        for far in ends:
            far.process.kill()
            far.process.join(BOUND)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1, help="of each")
    parser.add_argument("--devices", default="0,0", help="of source and target")
    parser.add_argument("--no-device", dest="device", action="store_false")
    asked = parser.parse_args()
    devices = tuple(map(int, asked.devices.split(","))) if asked.device else (None, None)
    nbytes = (512 if asked.device else 16) << 20
    ways = ((1, 0.02, 4), (None, 0.005, 16), (2, 0.0, 4), (4, 0.05, 16), (1, 0.1, 4))
    wrong = 0
    for number in range(asked.rounds):
        for killed in ("source", "target"):
            try:
                print(one_round(killed, devices, nbytes, *ways[number % len(ways)]), flush=True)
            except Exception:
                wrong += 1
                print(f"WRONG: {killed} killed, round {number}\n{traceback.format_exc()}", flush=True)
    print(f"{2 * asked.rounds} deaths, {wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
