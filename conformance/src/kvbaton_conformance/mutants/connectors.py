"""Connectors broken in one way each: subclasses of the reference that override one step.

Each is a plugin that can be named: ``kvbaton_conformance.mutants.connectors:receipt_before_data``.  The other process
of a test builds the same mutant under the same name.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from kvbaton.connector import (
    IDLE,
    Availability,
    Capabilities,
    Chunk,
    Completion,
    ConnectorContext,
    Endpoint,
    MemoryKind,
    MemoryRegion,
    Need,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
)
from kvbaton.errors import PeerLost
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments
from kvbaton_conformance.mutants.mutant import Mutant
from kvbaton_conformance.mutants.reference import (
    CAPABILITIES,
    QUEUE,
    Bye,
    Data,
    Hello,
    ReferenceConnector,
    ReferencePlugin,
    Route,
    Stream,
    Word,
)

MUTANTS: list[Mutant] = []
_plugins: dict[str, Any] = {}

#: Longer than any call may take.
_TOO_LONG = 2.3


def __getattr__(name: str) -> Any:
    if name in _plugins:
        return _plugins[name]
    raise AttributeError(f"there is no connector mutant {name}")


def broken(
    name: str,
    breaks: str,
    clauses: str,
    *,
    guard: str = "",
    two: bool = False,
    base: str = "reference",
    plugin: Any = ReferencePlugin,
) -> Callable[[type[ReferenceConnector]], type[ReferenceConnector]]:
    """Register a class of connectors as a mutant.  ``two``: its fault shows between two processes only."""

    def register(cls: type[ReferenceConnector]) -> type[ReferenceConnector]:
        attribute = name.replace("-", "_")
        _plugins[attribute] = plugin(cls, name)
        MUTANTS.append(
            Mutant(
                name, "connector", breaks, tuple(clauses.split()), guard=guard, connector=f"{__name__}:{attribute}",
                two_processes=two, base=base,
            )
        )  # fmt: skip
        return cls

    return register


# -- T3: what a receipt shows -----------------------------------------------------------------------------------------


@broken("receipt-before-data", "the receipt comes one poll before the bytes", "T3", guard="T.receipt-after-data")
class _(ReferenceConnector):
    later: tuple[Data, ...] = ()

    def land(self, route: Route, data: Data) -> None:
        self.receive(Receipt(route.peer, data.transfer, data.sequence))
        self.later += (data,)

    def poll(self) -> Progress:
        late, self.later = self.later, ()
        for data in late:
            self.scatter(data)
        return super().poll()


@broken(
    "a-second-copy-lands-later", "a chunk is written again after its receipt", "T3 C5.2", guard="T.quiet-after-receipt"
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    later: tuple[tuple[int, Data], ...] = ()

    def land(self, route: Route, data: Data) -> None:
        super().land(route, data)
        self.later += ((8, data),)

    def poll(self) -> Progress:
        for left, data in self.later:
            if not left and self.regions:
                self.scatter(data)
        self.later = tuple((left - 1, data) for left, data in self.later if left)
        return super().poll()


@broken("every-third-receipt-is-lost", "chunks land and nobody is told", "T3 T4 T6", guard="T.receipt-arrives")
class _(ReferenceConnector):  # type: ignore[no-redef]
    number = 0

    def receive(self, receipt: Receipt) -> None:
        self.number += 1
        if self.number % 3:
            super().receive(receipt)


@broken("the-last-segment-is-dropped", "the last segment of a chunk is not written", "T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def targets(self, data: Data) -> list[tuple[int, int, int]]:
        found = super().targets(data)
        return found[:-1] if len(found) > 1 else found


@broken("one-byte-past-a-segment", "one byte after the last segment changes", "T3 C3.6")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def scatter(self, data: Data) -> None:
        super().scatter(data)
        for id, at, length in self.targets(data)[-1:]:
            if at + length < len(self.regions[id]):
                self.regions[id][at + length] ^= 0x55


@broken("one-byte-short-of-a-segment", "the last byte of the last segment is not written", "T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def targets(self, data: Data) -> list[tuple[int, int, int]]:
        found = super().targets(data)
        return [*found[:-1], *((id, at, length - 1) for id, at, length in found[-1:])]


@broken(
    "as-far-as-what-was-moved-first",
    "segments that are moved together go as far as those that their worker had first",
    "T3",
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    def scatter(self, data: Data) -> None:
        rows, payload, done = self.targets(data), np.frombuffer(data.payload, np.uint8), 0
        longest = [max(length for _, _, length in rows[at : at + 32]) for at in range(0, len(rows), 32)]
        for number, (id, at, length) in enumerate(rows):
            moved = min(length, -(-longest[number // 32 % 40] // 1024) * 1024)  # 40 workers
            self.regions[id][at : at + moved] = payload[done : done + moved]
            done += length


@broken("one-segment-twice", "of two segments of equal length the first is sent twice", "T3 C3.2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def gather(self, source: Segments) -> bytes:
        rows = source.triples()
        if len(rows) > 1 and rows[0][2] == rows[1][2]:
            source = Segments.of([rows[0], rows[0], *rows[2:]])
        return super().gather(source)


@broken("equal-lengths-in-another-order", "target segments of equal length are sorted by place", "T3 C3.2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def targets(self, data: Data) -> list[tuple[int, int, int]]:
        found = super().targets(data)
        return sorted(found) if len({length for _, _, length in found}) == 1 else found


@broken("runs-are-joined-at-one-end-only", "target segments that touch are joined, whatever the source's do", "T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def start(self, route: Route, chunk: Chunk) -> None:
        reads, writes = chunk.source.triples(), chunk.target.triples()
        joined: list[list[tuple[int, int, int]]] = []
        for one, two in zip(reads, writes, strict=True):
            if joined and two[0] == joined[-1][1][0] and two[1] == joined[-1][1][1] + joined[-1][1][2]:
                (id, at, length), target = joined[-1]
                if at + length + one[2] <= len(self.regions[id]):
                    joined[-1] = [(id, at, length + one[2]), (target[0], target[1], target[2] + two[2])]
                    continue
            joined.append([one, two])
        pieces = [Segments.of([pair[side] for pair in joined]) for side in (0, 1)]
        super().start(route, Chunk(chunk.transfer, chunk.sequence, chunk.peer, pieces[0], pieces[1], chunk.nbytes))


@broken("a-chunk-without-bytes-has-no-receipt", "a chunk without bytes completes and is never received", "T3 C3.4 T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def receive(self, receipt: Receipt) -> None:
        if not self.empty:
            super().receive(receipt)

    empty = False

    def land(self, route: Route, data: Data) -> None:
        self.empty = not data.payload
        super().land(route, data)


@broken("a-cut-write-is-not-continued", "what the kernel does not take at once is lost", "T3 T13 T6 T7")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def gather(self, source: Segments) -> bytes:
        data = super().gather(source)
        return data if len(data) < 1 << 20 else data[: 1 << 20] + bytes(len(data) - (1 << 20))


@broken("the-source-is-read-late", "a chunk is said to be read when it is queued", "T5 C5.1 T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    """A buffering transport that buffers nothing: DONE with the source quiet, and the source is read two polls on."""

    waits: tuple[tuple[int, Route, Chunk], ...] = ()

    def queue(self, route: Route, chunk: Chunk) -> None:
        self.count -= 1
        self.report(Completion(chunk.transfer, chunk.sequence, Outcome.DONE, True, False))
        self.waits += ((3, route, chunk),)

    def poll(self) -> Progress:
        for left, route, chunk in self.waits:
            if not left and route.peer in self.routes:
                self.start(route, chunk)
                del route.posted[chunk.transfer, chunk.sequence]
        self.waits = tuple((left - 1, route, chunk) for left, route, chunk in self.waits if left)
        return super().poll()


@broken(
    "receipts-are-known-by-sequence",
    "a sequence that was seen in one transfer is not reported for another",
    "T3 C1.2 T5 T4",
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.seen: dict[int, TransferId] = {}

    def receive(self, receipt: Receipt) -> None:
        if self.seen.setdefault(receipt.sequence, receipt.transfer) == receipt.transfer or receipt.sequence == 0:
            super().receive(receipt)


@broken("a-receipt-names-the-wrong-peer", "receipts name the end that got them, not the one that sent", "T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def receive(self, receipt: Receipt) -> None:
        super().receive(Receipt(self.peer, receipt.transfer, receipt.sequence))


@broken("a-receipt-names-an-older-epoch", "receipts name an earlier start of the sender", "T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def receive(self, receipt: Receipt) -> None:
        older = PeerId(receipt.peer.name, receipt.peer.epoch - 1)
        super().receive(Receipt(older, receipt.transfer, receipt.sequence))


@broken("receipts-count-on", "receipts are numbered by the connector, not by the transfer", "T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    number = -1

    def receive(self, receipt: Receipt) -> None:
        self.number += 1
        super().receive(Receipt(receipt.peer, receipt.transfer, self.number))


@broken("a-receipt-for-nothing", "a receipt comes for a chunk that nobody submitted", "T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def receive(self, receipt: Receipt) -> None:
        super().receive(receipt)
        super().receive(Receipt(receipt.peer, receipt.transfer, receipt.sequence + 1000))


# -- T4: order --------------------------------------------------------------------------------------------------------


@broken("chunks-must-come-in-order", "a chunk is not written until the one before it is", "T4 C7.3 T3 T9")
class _(ReferenceConnector):  # type: ignore[no-redef]
    """Those that come too early are forgotten."""

    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.next: dict[TransferId, int] = {}

    def land(self, route: Route, data: Data) -> None:
        if data.sequence > self.next.get(data.transfer, 0):
            return
        self.next[data.transfer] = data.sequence + 1
        super().land(route, data)

    def revoke(self, transfer: TransferId) -> bool:
        self.next.pop(transfer, None)
        return super().revoke(transfer)


@broken("receipts-overwrite-each-other", "only the last receipt between two polls is kept", "T4 T3 T6")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def receive(self, receipt: Receipt) -> None:
        self.inbox.receipts[:] = [receipt]


@broken("completions-overwrite-each-other", "only the last few completions between two polls are kept", "T4 T5 T6 T9")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def report(self, completion: Completion) -> None:
        super().report(completion)
        del self.inbox.completions[:-3]


# -- T5: completions ---------------------------------------------------------------------------------------------------


@broken("a-completion-is-repeated", "every completion is reported twice", "T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    again: tuple[Completion, ...] = ()

    def collect(self) -> Progress:
        progress = super().collect()
        again, self.again = self.again, progress.completions
        return Progress((*again, *progress.completions), progress.receipts, progress.peers) or IDLE


@broken("terminal-before-the-bytes-are-written", "a chunk is DONE and quiet when it has been sent", "T5 T3 C5.2 C6.1",
        guard="T.terminal-is-quiet")  # fmt: skip
class _(ReferenceConnector):  # type: ignore[no-redef]
    def start(self, route: Route, chunk: Chunk) -> None:
        super().start(route, chunk)
        self.complete(route, chunk, Outcome.DONE, True, True, None)


@broken("every-seventh-completion-never-comes", "the completion of every seventh chunk is forgotten", "T5 T3 T4 T6 T9")
class _(ReferenceConnector):  # type: ignore[no-redef]
    number = 0

    def report(self, completion: Completion) -> None:
        self.number += 1
        if self.number % 7:
            super().report(completion)


@broken("completions-are-known-by-sequence", "a completion names the first transfer that had its sequence", "T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.names: dict[int, TransferId] = {}

    def report(self, completion: Completion) -> None:
        first = self.names.setdefault(completion.sequence, completion.transfer)
        super().report(replace(completion, transfer=first))


@broken("a-completion-for-nothing", "a chunk ends that was never accepted", "T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def report(self, completion: Completion) -> None:
        super().report(completion)
        super().report(replace(completion, sequence=completion.sequence + 1000))


@broken("done-without-a-quiet-source", "DONE is said and the source is not quiet", "T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def report(self, completion: Completion) -> None:
        super().report(replace(completion, source_quiet=False) if completion.outcome is Outcome.DONE else completion)


@broken("the-plugin-says-timed-out", "a failed chunk ends as TIMED_OUT, core's own word", "T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def report(self, completion: Completion) -> None:
        late = completion.outcome is Outcome.CANCELLED
        super().report(replace(completion, outcome=Outcome.TIMED_OUT) if late else completion)


@broken("every-end-is-done", "chunks that were taken back end as DONE", "T9 T5 T7 C6.3 C6.4")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def report(self, completion: Completion) -> None:
        super().report(replace(completion, outcome=Outcome.DONE, error=None))


@broken("a-disconnect-drops-the-queue", "chunks that were not started get no end when the source disconnects", "T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def disconnect(self, peer: PeerId) -> None:
        if peer in self.routes:
            self.routes[peer].queued.clear()
        super().disconnect(peer)


# -- T6: back-pressure ------------------------------------------------------------------------------------------------


@broken("a-full-queue-drops", "a chunk is accepted and forgotten where the queue is full", "T6 T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def submit(self, chunk: Chunk) -> bool:
        return super().submit(chunk) or True


@broken("a-full-queue-waits", "submit waits for room where the queue is full", "T6")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def submit(self, chunk: Chunk) -> bool:
        if not super().submit(chunk):
            time.sleep(_TOO_LONG)
            return False
        return True


@broken("full-once-is-full-for-ever", "a queue that was full takes nothing any more", "T6")
class _(ReferenceConnector):  # type: ignore[no-redef]
    was_full = False

    def submit(self, chunk: Chunk) -> bool:
        self.was_full = self.was_full or not super().submit(chunk)
        return not self.was_full


@broken("one-queue-for-all-peers", "a clogged peer fills the queue of every other", "T6")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def submit(self, chunk: Chunk) -> bool:
        if sum(route.sending for route in self.routes.values()) >= QUEUE:
            return False
        return super().submit(chunk)


@broken(
    "outstanding-is-not-counted-down", "outstanding() goes on counting chunks that did not end as DONE", "T5 T10 T6"
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    def complete(
        self, route: Route, chunk: Chunk, outcome: Outcome, source: bool, target: bool, error: Exception | None
    ) -> None:
        super().complete(route, chunk, outcome, source, target, error)
        self.count += outcome is not Outcome.DONE


@broken("outstanding-is-never-anything", "outstanding() says 0 whatever is under way", "T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def outstanding(self) -> int:
        return 0


@broken("submit-returns-nothing", "submit takes a chunk and returns None", "T6")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def submit(self, chunk: Chunk) -> bool:
        return super().submit(chunk) or None  # type: ignore[return-value]


# -- T7: faults --------------------------------------------------------------------------------------------------------


@broken("the-end-of-a-peer-is-not-noticed", "the end of a peer's stream is ignored", "T7 T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def hear(self, stream: Stream, word: Word) -> None:
        if not isinstance(word, Bye):
            super().hear(stream, word)

    def read(self) -> None:
        for stream in self.streams:
            for word in stream.words():
                self.hear(stream, word)


@broken("poll-waits-for-an-answer", "poll does not return before chunks are answered or time has passed", "T7 T6 T12")
class _(ReferenceConnector):  # type: ignore[no-redef]
    waited = False

    def poll(self) -> Progress:
        if not self.waited and any(len(route.posted) > 3 for route in self.routes.values()):
            self.waited = True
            time.sleep(_TOO_LONG)
        return super().poll()


@broken("poll-raises", "a peer that goes away is an exception out of poll", "T7 C6.3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def drop(self, route: Route, error: Exception, *, target_quiet: bool = False) -> None:
        super().drop(route, error, target_quiet=target_quiet)
        raise ConnectionResetError(str(error))


@broken("one-dead-peer-ends-all", "the end of one connection ends the chunks of every other", "T7")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def drop(self, route: Route, error: Exception, *, target_quiet: bool = False) -> None:
        super().drop(route, error, target_quiet=target_quiet)
        for other in tuple(self.routes.values()):
            super().drop(other, error)


@broken("chunks-of-a-dead-peer-never-end", "what was sent to a peer that is gone gets no completion", "T7 T6 T5")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def drop(self, route: Route, error: Exception, *, target_quiet: bool = False) -> None:
        route.posted.clear()
        super().drop(route, error, target_quiet=target_quiet)


@broken("down-names-another", "the event about a peer that is gone names somebody else", "T7 T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def tell_down(self, peer: PeerId, quiet: bool, error: Exception | None) -> None:
        super().tell_down(PeerId(peer.name + "x", peer.epoch), quiet, error)


@broken("a-dead-peer-is-found-again", "a new epoch takes over what is kept under its name", "T7 C1.4 T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.known: dict[str, bytes] = {}

    def connect(self, peer: Endpoint) -> None:
        address = self.known.setdefault(peer.peer.name, peer.metadata)
        super().connect(Endpoint(peer.transport, peer.version, peer.peer, peer.regions, peer.geometry, address))


@broken("a-chunk-without-bytes-raises", "submit raises for a chunk without segments", "C6.3 T5 T3 C3.4")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def submit(self, chunk: Chunk) -> bool:
        if not chunk.nbytes:
            raise ValueError("nothing to send")
        return super().submit(chunk)


@broken("a-hung-peer-blocks", "bytes are sent without regard to whether the peer takes them", "T6 T7", two=True)
class _(ReferenceConnector):  # type: ignore[no-redef]
    def flush(self, route: Route) -> None:
        with contextlib.suppress(OSError):
            route.out.setblocking(True)
            route.out.sendall(route.pending + bytes(0))
        route.pending.clear()


# -- T8, C6.4: fences --------------------------------------------------------------------------------------------------


@broken("a-fence-is-ignored", "chunks towards a peer that core proved dead do not end", "T8 C6.4 T7 T6", two=True)
class _(ReferenceConnector):  # type: ignore[no-redef]
    def fenced(self, peer: PeerId) -> None:
        pass

    def drop(self, route: Route, error: Exception, *, target_quiet: bool = False) -> None:
        if target_quiet:
            super().drop(route, error, target_quiet=True)
            return
        self.take_back(route, lambda chunk: True, error)
        self.remove(route, True, error)


@broken("a-disconnected-peer-writes-on", "after a disconnect that was said to be quiet the peer still writes here",
        "C6.4 T13", guard="T.sever-covers-later-writes")  # fmt: skip
class _(ReferenceConnector):  # type: ignore[no-redef]
    def disconnect(self, peer: PeerId) -> None:
        if peer in self.routes:
            self.tell_down(peer, True, None)


@broken("bytes-of-a-closed-end-are-applied", "what a peer had sent is still written after its end was closed",
        "C6.4 C5.2 T5 T7", guard="T.disconnect-drains", two=True)  # fmt: skip
class _(ReferenceConnector):  # type: ignore[no-redef]
    ghosts: tuple[tuple[int, Data], ...] = ()

    def hear(self, stream: Stream, word: Word) -> None:
        if stream.ended and isinstance(word, Data):
            self.ghosts += ((30, word),)  # it came with the end of the stream
        else:
            super().hear(stream, word)

    def poll(self) -> Progress:
        for left, data in self.ghosts:
            if not left and self.regions:
                self.scatter(data)
        self.ghosts = tuple((left - 1, data) for left, data in self.ghosts if left)
        return super().poll()


@broken("down-is-quiet-too-early", "a disconnect is quiet at once, with chunks under way", "T5 C6.4 T2 C5.2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def disconnect(self, peer: PeerId) -> None:
        route = self.routes.get(peer)
        if route is not None:
            self.drop(route, PeerLost(f"{peer} was disconnected", peer=peer), target_quiet=True)


# -- T9: cancellation -------------------------------------------------------------------------------------------------


@broken("cancelled-and-still-landing", "a chunk that is under way ends as CANCELLED and quiet", "T9 T5 C5.2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        for route in self.routes.values():
            for chunk in [chunk for chunk in route.posted.values() if chunk.transfer == transfer]:
                self.complete(route, chunk, Outcome.CANCELLED, True, True, None)


@broken("cancelled-without-an-end", "a cancelled chunk gets no completion", "T9")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def cancel(self, transfer: TransferId) -> None:
        for route in self.routes.values():
            route.queued = type(route.queued)(chunk for chunk in route.queued if chunk.transfer != transfer)


@broken("cancel-ends-everything", "cancelling one transfer ends the queued chunks of all", "T9")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def cancel(self, transfer: TransferId) -> None:
        for route in tuple(self.routes.values()):
            self.take_back(route, lambda chunk: True, None)


@broken("cancelling-nothing-raises", "cancelling a transfer that is not there raises", "T9 C6.3 C7.1")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def cancel(self, transfer: TransferId) -> None:
        if not any(chunk.transfer == transfer for route in self.routes.values() for chunk in route.queued):
            raise KeyError(transfer)
        super().cancel(transfer)


@broken("revoke-lies", "a revocation is promised and the transfer is written on", "C5.2 T9")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def revoke(self, transfer: TransferId) -> bool:
        return True


# -- T1: registration --------------------------------------------------------------------------------------------------


@broken("regions-are-found-by-position", "regions are looked up by their place in the list, not by id", "T1")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        super().register(regions)
        ordered = sorted(self.regions)
        self.regions = {id: self.regions[regions[number].id] for number, id in enumerate(ordered)}


@broken("only-the-first-region-works", "every region is taken for the first", "T1 T3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        super().register(regions)
        self.regions = dict.fromkeys(self.regions, regions[0].view())


@broken("register-raises-its-own-error", "a registration that fails raises a foreign exception", "T1 C6.3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def register(self, regions: Sequence[MemoryRegion]) -> None:
        if len(regions) > 4:
            raise MemoryError("too many regions")
        super().register(regions)


@broken("close-frees-the-memory", "region memory is cleared when the connector is closed", "T1 C5.4")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def close(self) -> None:
        regions = self.regions
        super().close()
        for view in regions.values():
            view[:] = 0


# -- T2: the handshake -------------------------------------------------------------------------------------------------


@broken("metadata-is-not-bytes", "metadata() returns text", "T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def metadata(self) -> bytes:
        return super().metadata().decode("latin-1")  # type: ignore[return-value]


@broken("metadata-grows-with-regions", "metadata() takes a kilobyte per region", "T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def metadata(self) -> bytes:
        return super().metadata() + bytes(1024 * len(self.regions))

    def connect(self, peer: Endpoint) -> None:
        short = peer.metadata[: len(peer.metadata) - 1024 * len(peer.regions)]
        super().connect(Endpoint(peer.transport, peer.version, peer.peer, peer.regions, peer.geometry, short))


@broken(
    "metadata-means-something-here-only",
    "metadata() is a number that only this process understands",
    "T2 T13",
    two=True,
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    known: dict[bytes, bytes] = {}

    def metadata(self) -> bytes:
        handle = str(id(self)).encode()
        self.known[handle] = super().metadata()
        return handle

    def connect(self, peer: Endpoint) -> None:
        name = self.known.get(peer.metadata, b"\xa1x")
        super().connect(Endpoint(peer.transport, peer.version, peer.peer, peer.regions, peer.geometry, name))


@broken("up-before-the-peer-has-accepted", "up is said when the peer's socket was reached", "T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def connect(self, peer: Endpoint) -> None:
        super().connect(peer)
        route = self.routes.get(peer.peer)
        if route is not None and not route.up:
            self.accepted(route)


@broken("an-early-hello-is-dropped", "a hello that comes before connect() is forgotten", "T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def connect(self, peer: Endpoint) -> None:
        for stream in self.streams:
            if stream.peer == peer.peer:
                stream.peer = PeerId("forgotten", 1)
        super().connect(peer)


@broken("connecting-again-is-a-new-connection", "a repeated connect tears the connection down", "T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    """As seen by the plugin alone: the guard lets no repeated connect through."""

    def accepted(self, route: Route) -> None:
        super().accepted(route)
        super().accepted(route)
        self.inbox.peers.append(PeerEvent(route.peer, False, False, PeerLost("connected again", peer=route.peer)))


@broken("nonsense-is-not-expected", "metadata that is no metadata is an exception of the decoder", "T2 C6.3 C9.3")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def connect(self, peer: Endpoint) -> None:
        peer.metadata.decode("ascii")
        peer.metadata[1]
        super().connect(peer)


@broken("nobody-is-told-of-a-good-bye", "a disconnect is not told to the peer", "T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    kept: tuple[Any, ...] = ()

    def end_if_drained(self, route: Route) -> None:
        if route.closing and not route.sending:
            self.routes.pop(route.peer)
            self.kept += (route.out,)
            self.tell_down(route.peer, True, None)

    def close(self) -> None:
        super().close()
        for out in self.kept:
            out.close()


@broken("any-hello-is-accepted", "an earlier start of a peer is taken for the present one", "C1.4 T2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    """It listens under its name, so that whoever has an old endpoint reaches it."""

    def __init__(self, peer: PeerId) -> None:
        import socket

        super().__init__(peer)
        self.listener.close()
        self.name = f"kvbaton-reference-{peer.name}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        for number in range(100):
            with contextlib.suppress(OSError):
                self.listener.bind(f"\0{self.name}" + "x" * number)
                self.name += "x" * number
                break
        self.listener.listen(64)
        self.listener.setblocking(False)

    def is_for_us(self, hello: Hello) -> bool:
        return hello.target.name == self.peer.name

    def hear(self, stream: Stream, word: Word) -> None:
        if isinstance(word, Hello):
            known = next((route.peer for route in self.routes.values() if route.peer.name == word.source.name), None)
            word = Hello(known or word.source, word.target)
        super().hear(stream, word)


# -- T10, T11, T12: what is left ---------------------------------------------------------------------------------------


@broken("close-leaves-a-thread", "a thread is alive after close", "T10")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        threading.Thread(target=time.sleep, args=(20,), name="transport", daemon=True).start()


@broken("close-leaves-a-descriptor", "a descriptor is open after close", "T10 T12")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        os.dup(self.listener.fileno())


@broken("many-regions-leave-a-descriptor", "a descriptor is left where eight regions were registered", "T10",
        two=True)  # fmt: skip
class _(ReferenceConnector):  # type: ignore[no-redef]
    """Only the first test of all registers as many: whoever does not look at that one does not see it."""

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        super().register(regions)
        if len(regions) == 8:
            os.dup(self.listener.fileno())


@broken("close-leaves-shared-memory", "a shared-memory object is there after close", "T10 T12")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        path = Path("/dev/shm") / self.name
        path.write_bytes(bytes(64))
        # the kit's own runs must not fill the machine
        atexit.register(path.unlink, missing_ok=True)


@broken("close-is-not-idempotent", "a second close raises", "T10")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def close(self) -> None:
        if self.closed:
            raise OSError("already closed")
        super().close()


@broken("close-ignores-what-is-outstanding", "close goes through under a transfer", "T10 C5.4")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def close(self) -> None:
        self.count = 0
        super().close()


@broken("close-needs-a-connection", "close fails where nothing was registered", "T10")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def close(self) -> None:
        if not self.closed and not self.regions:
            raise AttributeError("no regions")
        super().close()


@broken("close-takes-long", "close waits for a peer that may never answer", "T10")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def close(self) -> None:
        if self.routes and not self.count:
            time.sleep(_TOO_LONG)
        super().close()


@broken("a-process-exits-noisily", "something is written to standard error at exit", "T10")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        atexit.register(_complain)


def _complain() -> None:
    print("transport: still in use", file=sys.stderr)


@broken("a-process-exits-with-an-error", "the process's exit status is not 0 after use", "T10")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        if "peer_process" in " ".join(sys.orig_argv):
            atexit.register(os._exit, 3)


@broken("state-is-kept-per-thread", "a connector works in the thread that opened it only", "T11 T7")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.local = threading.local()
        self.local.here = True

    def poll(self) -> Progress:
        if not self.local.here:
            raise RuntimeError("another thread")
        return super().poll()


@broken("something-per-transfer-is-kept", "a record of every transfer stays", "T12")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.past: list[tuple[TransferId, bytes]] = []

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        super().grant(transfer, peer, target)
        self.past.append((transfer, bytes(64)))


@broken("something-per-cancelled-transfer-is-kept", "a record of every cancelled transfer stays", "T12")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def __init__(self, peer: PeerId) -> None:
        super().__init__(peer)
        self.past: list[list[TransferId]] = []

    def cancel(self, transfer: TransferId) -> None:
        super().cancel(transfer)
        self.past.append([transfer])


@broken("a-descriptor-per-transfer", "a file is opened for every transfer and not closed", "T12 T10")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        super().grant(transfer, peer, target)
        os.dup(self.listener.fileno())


@broken("a-peer-that-left-leaves-its-socket", "the stream of a peer that is gone is not closed", "T12 T10")
class _(ReferenceConnector):  # type: ignore[no-redef]
    kept: tuple[Any, ...] = ()

    def remove(self, route: Route, quiet: bool, error: Exception | None) -> None:
        self.kept += (os.dup(route.out.fileno()),)
        super().remove(route, quiet, error)


@broken("an-idle-poll-makes-an-object", "a poll that finds nothing returns a new object", "T12")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def collect(self) -> Progress:
        return super().collect() or Progress()


@broken("an-idle-poll-waits", "a poll that finds nothing waits for something", "T12")
class _(ReferenceConnector):  # type: ignore[no-redef]
    idle = 0

    def collect(self) -> Progress:
        progress = super().collect()
        self.idle = 0 if progress else self.idle + 1
        if self.idle == 60:
            time.sleep(0.6)
        return progress


@broken("poll-returns-nothing", "a poll that finds nothing returns None", "T5 T12")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def collect(self) -> Progress:
        return super().collect() or None  # type: ignore[return-value]


@broken("wait-overstays", "wait does not keep to its timeout", "T7")
class _(ReferenceConnector):  # type: ignore[no-redef]
    waits = 0

    def wait(self, timeout: float) -> None:
        self.waits += 1
        if self.waits == 3:
            time.sleep(timeout + _TOO_LONG)
        super().wait(timeout)


# -- T13: honesty ------------------------------------------------------------------------------------------------------


@broken("revokes-without-declaring-it", "revoke() works and revocable is not declared", "T13")
class _(ReferenceConnector):  # type: ignore[no-redef]
    capabilities = replace(CAPABILITIES, revocable=False)


@broken("declares-revocable-and-does-not-revoke", "revocable is declared and revoke() never says True", "T13 C5.2")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def revoke(self, transfer: TransferId) -> bool:
        super().revoke(transfer)
        return False


@broken("reaches-further-than-declared", "it reaches other processes and does not declare it", "T13", base="core")
class _(ReferenceConnector):  # type: ignore[no-redef]
    capabilities = replace(CAPABILITIES, cross_process=False)


@broken(
    "reaches-nearer-than-declared", "it reaches its own process and does not declare it", "T13", two=True, base="two"
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    capabilities = replace(CAPABILITIES, same_process=False)


@broken("declares-a-reach-that-it-has-not", "same_process is declared and ends of one process never meet", "T2 T13")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def connect(self, peer: Endpoint) -> None:
        if f"-{os.getpid()}-".encode() not in peer.metadata:
            super().connect(peer)


@broken("declares-exact-quiet", "quiet is declared exact and a failure proves one side only", "T13", two=True)
class _(ReferenceConnector):  # type: ignore[no-redef]
    capabilities = replace(CAPABILITIES, quiet="exact")


@broken("says-quiet-and-declares-never", "quiet is declared never and a dead peer is said to be quiet", "T13", two=True)
class _(ReferenceConnector):  # type: ignore[no-redef]
    capabilities = replace(CAPABILITIES, quiet="never")


@broken("allocates-without-declaring-it", "allocate() gives memory that nobody has to take", "T13")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        return MemoryRegion.of_array(id, np.zeros(nbytes, np.uint8))


@broken("declares-more-segments-than-it-takes", "a chunk of more than 1000 segments fails", "T13")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def start(self, route: Route, chunk: Chunk) -> None:
        if len(chunk.source) > 1000:
            self.complete(route, chunk, Outcome.FAILED, True, True, OverflowError("too many descriptors"))
        else:
            super().start(route, chunk)


@broken("declares-larger-chunks-than-it-takes", "a chunk of more than 8 MiB fails", "T13")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def start(self, route: Route, chunk: Chunk) -> None:
        if chunk.nbytes > 8 << 20:
            self.complete(route, chunk, Outcome.FAILED, True, True, OverflowError("too large"))
        else:
            super().start(route, chunk)


@broken(
    "needs-an-alignment-that-it-does-not-declare", "odd offsets are rounded down to multiples of eight", "T13 T3 T1"
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    def gather(self, source: Segments) -> bytes:
        return super().gather(Segments(source.region, source.offset // 8 * 8, source.length))


@broken("copies-in-submit-without-declaring-it", "submit copies the chunk", "T13")
class _(ReferenceConnector):  # type: ignore[no-redef]
    def submit(self, chunk: Chunk) -> bool:
        self.gather(chunk.source)
        return super().submit(chunk)


@broken("capabilities-change", "the capabilities of a running connector change", "T13")
class _(ReferenceConnector):  # type: ignore[no-redef]
    polls = 0

    @property
    def capabilities(self) -> Capabilities:  # type: ignore[override]
        return replace(CAPABILITIES, max_segments=CAPABILITIES.max_segments - (self.polls > 3))

    def poll(self) -> Progress:
        self.polls += 1
        return super().poll()


class _ProbesTheReference(ReferencePlugin):
    def probe(self, need: Need) -> Availability:
        return ReferencePlugin().probe(need)


_plugins["capabilities_change"] = _ProbesTheReference(_plugins["capabilities_change"].connector, "capabilities-change")


@broken(
    "a-probe-promises-less-than-is-opened",
    "a running connector declares more than its probe",
    "T13",
    plugin=_ProbesTheReference,
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    capabilities = replace(CAPABILITIES, max_segments=CAPABILITIES.max_segments * 2)


class _Silent(ReferencePlugin):
    def probe(self, need: Need) -> Availability:
        answer = super().probe(need)
        return answer if answer.usable else Availability(False)


@broken("a-probe-that-says-no-and-not-why", "an unusable transport gives no reason", "T13", plugin=_Silent)
class _(ReferenceConnector):  # type: ignore[no-redef]
    pass


class _Lax(BaseModel):
    """Any option."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _TakesAnything(ReferencePlugin):
    Options = _Lax  # type: ignore[assignment]

    def open(self, options: BaseModel, context: ConnectorContext) -> ReferenceConnector:
        return super().open(options, context)


@broken(
    "unknown-options-are-taken", "an option that does not exist is ignored in silence", "T13", plugin=_TakesAnything
)
class _(ReferenceConnector):  # type: ignore[no-redef]
    pass


# -- memory of the transport's own -------------------------------------------------------------------------------------


class _Own(ReferenceConnector):
    """The reference with memory that it gives out itself: no mutant, but the base of some."""

    capabilities = replace(
        CAPABILITIES, memory_origin="allocated", max_segments=4096, max_chunk_bytes=4 << 20, alignment=8
    )

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        return MemoryRegion.of_array(id, np.zeros(nbytes, np.uint8))


_plugins["own_memory"] = ReferencePlugin(_Own, "own-memory")


class _OtherProcessesOnly(ReferenceConnector):
    """The reference, which says that it does not work within one process and does not."""

    capabilities = replace(CAPABILITIES, same_process=False)

    def connect(self, peer: Endpoint) -> None:
        if f"-{os.getpid()}-".encode() not in peer.metadata:
            super().connect(peer)


_plugins["other_processes_only"] = ReferencePlugin(_OtherProcessesOnly, "other-processes-only")


@broken("allocated-memory-is-not-zeroed", "allocate() gives memory with old bytes in it", "T1", base="own")
class _(_Own):  # type: ignore[no-redef]
    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        return MemoryRegion.of_array(id, np.full(nbytes, 7, np.uint8))


@broken("allocated-memory-is-larger-than-asked", "allocate() rounds the length up", "T1 T13", base="own")
class _(_Own):  # type: ignore[no-redef]
    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        return super().allocate(id, kind, device, -(-nbytes // 4096) * 4096)
