"""A small connector that keeps the contract, made to be broken: each connector mutant overrides one step of it.

Two-sided, over stream sockets of this host: the source sends bytes and where they go, the target writes them into its
own memory in ``poll()`` and answers.  So it works in one process and between two, needs no thread, and does the same
thing at the same ``poll()`` in every run.

Each end listens under a name of its own.  Two connected ends have two streams, one each way: who dialled it sends on
it, who was called reads from it.  The first word on a stream is a *hello*, which names both epochs.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from kvbaton.connector import (
    API_VERSION,
    IDLE,
    Availability,
    Capabilities,
    Chunk,
    Completion,
    ConnectorBase,
    ConnectorContext,
    Endpoint,
    MemoryRegion,
    Need,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
)
from kvbaton.errors import ConnectError, Outstanding, PeerLost, TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments

CAPABILITIES = Capabilities(
    same_process=True, cross_process=True, quiet="peer_death", disconnect_fences=True, revocable=True
)

#: Chunks per peer that may be under way.
QUEUE = 64
#: Bytes that one ``poll()`` reads from one stream, at most.
READ = 8 << 20

_HEADER = struct.Struct("<I")
_numbers = itertools.count()


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Who calls whom."""

    source: PeerId
    target: PeerId


class Data(msgspec.Struct, tag=True, frozen=True):
    """One chunk: ``target`` holds the columns region, offset, length."""

    transfer: TransferId
    sequence: int
    target: tuple[bytes, bytes, bytes]
    payload: bytes


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What became of a chunk: it is written, or it never will be."""

    transfer: TransferId
    sequence: int
    written: bool


class Bye(msgspec.Struct, tag=True, frozen=True):
    """I write nothing more that you have sent, and send nothing more."""


Word = Hello | Data | Answer | Bye
Key = tuple[TransferId, int]

_decode = msgspec.msgpack.Decoder(Word).decode


class Options(BaseModel):
    """None."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(eq=False)
class Stream:
    """A stream that is read: what has come of the next word."""

    socket: socket.socket
    buffer: bytearray = field(default_factory=bytearray)
    #: Who it is, once it has said hello.
    peer: PeerId | None = None
    ended: bool = False

    def words(self) -> Iterator[Word]:
        """Every whole word that has come."""
        room = READ
        while room > 0:
            try:
                data = self.socket.recv(min(room, 1 << 20))
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.ended = True
                break
            room -= len(data)
            self.buffer += data
        while len(self.buffer) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self.buffer)
            if len(self.buffer) < _HEADER.size + length:
                break
            word = bytes(self.buffer[_HEADER.size : _HEADER.size + length])
            del self.buffer[: _HEADER.size + length]
            yield _decode(word)


@dataclass(eq=False)
class Route:
    """This end of the connection to one peer."""

    peer: PeerId
    #: What is sent on, and what waits to be written to it.
    out: socket.socket
    pending: bytearray = field(default_factory=bytearray)
    #: Chunks that have not been started, and those without an answer.
    queued: deque[Chunk] = field(default_factory=deque)
    posted: dict[Key, Chunk] = field(default_factory=dict)
    up: bool = False
    closing: bool = False

    @property
    def sending(self) -> int:
        return len(self.queued) + len(self.posted)


@dataclass
class Inbox:
    """Events for the next ``poll()``."""

    completions: list[Completion] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    peers: list[PeerEvent] = field(default_factory=list)


class ReferenceConnector(ConnectorBase):
    """See the module's text."""

    capabilities = CAPABILITIES

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.regions: dict[int, npt.NDArray[np.uint8]] = {}
        self.routes: dict[PeerId, Route] = {}
        self.grants: dict[TransferId, PeerId] = {}
        self.inbox = Inbox()
        self.streams: list[Stream] = []
        self.count = 0
        self.closed = False
        self.name = f"kvbaton-reference-{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind("\0" + self.name)
        self.listener.listen(64)
        self.listener.setblocking(False)

    # -- memory and peers --------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.regions = {region.id: region.view() for region in regions}

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(self.name)

    def connect(self, peer: Endpoint) -> None:
        try:
            name = msgspec.msgpack.decode(peer.metadata, type=str)
        except msgspec.MsgspecError as error:
            raise ConnectError(f"T2: {peer.peer} did not send a name: {error}", peer=peer.peer) from error
        for known in [route for route in self.routes.values() if route.peer.name == peer.peer.name]:
            if known.peer == peer.peer:
                return
            self.drop(known, PeerLost(f"C1.4: {known.peer} was replaced by {peer.peer}", peer=known.peer))
        out = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        out.setblocking(False)
        try:
            out.connect("\0" + name)
        except (OSError, ValueError) as error:
            out.close()
            self.inbox.peers.append(PeerEvent(peer.peer, False, True, ConnectError(f"T2: {error}", peer=peer.peer)))
            return
        route = self.routes[peer.peer] = Route(peer.peer, out)
        self.say(route, Hello(self.peer, peer.peer))
        if any(stream.peer == peer.peer for stream in self.streams):
            self.accepted(route)

    def accepted(self, route: Route) -> None:
        """Both ends have called ``connect``."""
        route.up = True
        self.inbox.peers.append(PeerEvent(route.peer, up=True))

    def disconnect(self, peer: PeerId) -> None:
        route = self.routes.get(peer)
        if route is not None and not route.closing:
            route.closing = True
            self.take_back(route, lambda chunk: True, None)
            self.end_if_drained(route)

    def end_if_drained(self, route: Route) -> None:
        """After a disconnect: *down*, when every chunk of ours has its answer."""
        if route.closing and not route.sending:
            self.say(route, Bye())
            self.flush(route)
            self.remove(route, True, None)

    def fenced(self, peer: PeerId) -> None:
        route = self.routes.get(peer)
        if route is not None:
            self.drop(route, PeerLost(f"C6.4: {peer} was fenced", peer=peer), target_quiet=True)

    def drop(self, route: Route, error: Exception, *, target_quiet: bool = False) -> None:
        """Its stream has ended: nothing comes from it any more and nothing is read for it.

        ``target_quiet``: what it has been sent is not written there either.
        """
        self.take_back(route, lambda chunk: True, error)
        for chunk in tuple(route.posted.values()):
            self.complete(route, chunk, Outcome.FAILED, True, target_quiet, error)
        self.remove(route, True, error)

    def remove(self, route: Route, quiet: bool, error: Exception | None) -> None:
        self.routes.pop(route.peer, None)
        route.out.close()
        for stream in [stream for stream in self.streams if stream.peer == route.peer]:
            stream.socket.close()
            self.streams.remove(stream)
        self.tell_down(route.peer, quiet, error)

    def tell_down(self, peer: PeerId, quiet: bool, error: Exception | None) -> None:
        self.inbox.peers.append(PeerEvent(peer, False, quiet, error))

    # -- chunks at the source ----------------------------------------------------------------------------------------

    def submit(self, chunk: Chunk) -> bool:
        route = self.routes.get(chunk.peer)
        if route is not None and route.sending >= QUEUE:
            return False
        self.count += 1
        if route is None or not route.up or route.closing:
            self.count -= 1
            error = PeerLost(f"T7: {chunk.peer} is not connected", peer=chunk.peer)
            self.report(Completion(chunk.transfer, chunk.sequence, Outcome.FAILED, True, True, error))
            return True
        self.queue(route, chunk)
        return True

    def queue(self, route: Route, chunk: Chunk) -> None:
        route.queued.append(chunk)

    def outstanding(self) -> int:
        return self.count

    def cancel(self, transfer: TransferId) -> None:
        for route in tuple(self.routes.values()):
            self.take_back(route, lambda chunk: chunk.transfer == transfer, None)

    def take_back(self, route: Route, wanted: Any, error: Exception | None) -> None:
        """End what was not started."""
        taken = [chunk for chunk in route.queued if wanted(chunk)]
        route.queued = deque(chunk for chunk in route.queued if not wanted(chunk))
        for chunk in taken:
            outcome = Outcome.CANCELLED if error is None else Outcome.FAILED
            self.complete(route, chunk, outcome, True, True, error)

    def start(self, route: Route, chunk: Chunk) -> None:
        """Read the source and send it."""
        route.posted[chunk.transfer, chunk.sequence] = chunk
        target = chunk.target
        columns = (target.region.tobytes(), target.offset.tobytes(), target.length.tobytes())
        self.say(route, Data(chunk.transfer, chunk.sequence, columns, self.gather(chunk.source)))

    def gather(self, source: Segments) -> bytes:
        return b"".join(self.regions[id][at : at + length].tobytes() for id, at, length in source.triples())

    def answered(self, route: Route, answer: Answer) -> None:
        chunk = route.posted.get((answer.transfer, answer.sequence))
        if chunk is None:
            return
        if answer.written:
            self.complete(route, chunk, Outcome.DONE, True, True, None)
        else:
            error = TransportError(f"C5.2: {route.peer} does not accept it", peer=route.peer, transfer=chunk.transfer)
            self.complete(route, chunk, Outcome.FAILED, True, True, error)
        self.end_if_drained(route)

    def complete(
        self, route: Route, chunk: Chunk, outcome: Outcome, source: bool, target: bool, error: Exception | None
    ) -> None:
        """A chunk that was accepted is over."""
        route.posted.pop((chunk.transfer, chunk.sequence), None)
        self.count -= 1
        self.report(Completion(chunk.transfer, chunk.sequence, outcome, source, target, error))

    def report(self, completion: Completion) -> None:
        self.inbox.completions.append(completion)

    # -- chunks at the target ----------------------------------------------------------------------------------------

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        self.grants[transfer] = peer

    def revoke(self, transfer: TransferId) -> bool:
        self.grants.pop(transfer, None)
        return True

    def arrived(self, route: Route, data: Data) -> None:
        """Write a chunk, if its transfer may still be written."""
        if route.closing or self.grants.get(data.transfer) != route.peer:
            self.say(route, Answer(data.transfer, data.sequence, False))
            return
        self.land(route, data)
        self.say(route, Answer(data.transfer, data.sequence, True))

    def land(self, route: Route, data: Data) -> None:
        self.scatter(data)
        self.receive(Receipt(route.peer, data.transfer, data.sequence))

    def targets(self, data: Data) -> list[tuple[int, int, int]]:
        region, offset, length = data.target
        columns = (np.frombuffer(region, np.int32), np.frombuffer(offset, np.int64), np.frombuffer(length, np.int64))
        return list(zip(*(column.tolist() for column in columns), strict=True))

    def scatter(self, data: Data) -> None:
        payload, done = np.frombuffer(data.payload, np.uint8), 0
        for id, at, length in self.targets(data):
            self.regions[id][at : at + length] = payload[done : done + length]
            done += length

    def receive(self, receipt: Receipt) -> None:
        self.inbox.receipts.append(receipt)

    # -- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        if not self.closed:
            self.listen()
            self.read()
            self.write()
        return self.collect()

    def collect(self) -> Progress:
        inbox, self.inbox = self.inbox, Inbox()
        return Progress(tuple(inbox.completions), tuple(inbox.receipts), tuple(inbox.peers)) or IDLE

    def listen(self) -> None:
        while True:
            try:
                caller, _ = self.listener.accept()
            except BlockingIOError:
                return
            caller.setblocking(False)
            self.streams.append(Stream(caller))

    def read(self) -> None:
        for stream in tuple(self.streams):
            try:
                for word in stream.words():
                    self.hear(stream, word)
            except msgspec.MsgspecError:
                stream.ended = True
            if stream.ended and stream in self.streams:
                self.streams.remove(stream)
                stream.socket.close()
                route = self.routes.get(stream.peer) if stream.peer is not None else None
                if route is not None:
                    self.drop(route, PeerLost(f"T7: the stream of {route.peer} has ended", peer=route.peer))

    def hear(self, stream: Stream, word: Word) -> None:
        if isinstance(word, Hello):
            if not self.is_for_us(word):
                stream.ended = True
                return
            stream.peer = word.source
            route = self.routes.get(word.source)
            if route is not None and not route.up:
                self.accepted(route)
            return
        route = self.routes.get(stream.peer) if stream.peer is not None else None
        if route is None:
            return
        match word:
            case Data():
                self.arrived(route, word)
            case Answer():
                self.answered(route, word)
            case Bye():
                # what it has not answered it has not written, and never will
                self.drop(route, PeerLost(f"T7: {route.peer} disconnected", peer=route.peer), target_quiet=True)

    def is_for_us(self, hello: Hello) -> bool:
        return hello.target == self.peer

    def write(self) -> None:
        for route in tuple(self.routes.values()):
            while route.queued and not route.pending:
                self.start(route, route.queued.popleft())
                self.flush(route)
            self.flush(route)

    def say(self, route: Route, word: Word) -> None:
        data = msgspec.msgpack.encode(word)
        route.pending += _HEADER.pack(len(data))
        route.pending += data

    def flush(self, route: Route) -> None:
        """Give the kernel what it takes.  A stream that has broken is found when it is read."""
        try:
            while route.pending:
                del route.pending[: route.out.send(memoryview(route.pending)[: 1 << 20].tobytes())]
        except BlockingIOError:
            pass
        except OSError:
            route.pending.clear()

    def wait(self, timeout: float) -> None:
        if self.inbox.completions or self.inbox.receipts or self.inbox.peers or self.closed:
            return
        routes = self.routes.values()
        if any(route.queued and not route.pending for route in routes):
            return
        waiting = [self.listener, *(stream.socket for stream in self.streams)]
        select.select(waiting, [route.out for route in routes if route.pending], [], timeout)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self.closed:
            return
        if self.count:
            raise Outstanding(f"T10: {self.count} chunks are outstanding", outstanding=self.count)
        self.closed = True
        for route in self.routes.values():
            self.say(route, Bye())
            with contextlib.suppress(OSError):
                self.flush(route)
        self.let_go()

    def let_go(self) -> None:
        for route in self.routes.values():
            route.out.close()
        for stream in self.streams:
            stream.socket.close()
        self.listener.close()
        self.routes.clear()
        self.streams.clear()
        self.grants.clear()
        self.regions = {}


class ReferencePlugin:
    """The plugin object around a class of connectors; a mutant's differs in ``connector`` and perhaps in what it
    declares.
    """

    api_version = API_VERSION
    Options = Options

    def __init__(self, connector: type[ReferenceConnector] = ReferenceConnector, name: str = "reference") -> None:
        self.connector = connector
        self.name = name

    def probe(self, need: Need) -> Availability:
        able = self.connector.capabilities
        if need.memory_kind != "host" or not able.reaches(need.reach):
            return Availability(False, f"it moves host memory on one host, not {need}", "choose another", able)
        return Availability(True, capabilities=able)

    def open(self, options: BaseModel, context: ConnectorContext) -> ReferenceConnector:
        return self.connector(context.peer)


#: ``--connector kvbaton_conformance.mutants.reference:plugin``
plugin = ReferencePlugin()
