"""One stage's end of the transport.

A source sends a chunk; the destination reads its bytes into their place, if it has granted that transfer, or else into
the void, and answers whether it took them.  :mod:`kvbaton_example_stream.frames` has what travels.

What is quiet when?  The source's bytes once the kernel has the last one; the target's once the destination has
answered.  Both are known with the answer, so that is when a chunk completes.  Where no answer comes, because the
destination has closed the connection or died, the end of its stream says the same: nobody but the destination writes
its memory, and it reads this stream no more.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import selectors
import socket
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import Annotated

import msgspec

from kvbaton.connector import (
    IDLE,
    Chunk,
    Completion,
    ConnectorBase,
    Endpoint,
    MemoryRegion,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
)
from kvbaton.errors import (
    ConnectError,
    Outstanding,
    PeerLost,
    ProtocolViolation,
    RegistrationError,
    TransportError,
)
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments
from kvbaton_example_stream import CAPABILITIES, MAX_QUEUE, StreamOptions
from kvbaton_example_stream.buffers import VOID, advance, void
from kvbaton_example_stream.frames import HEAD, Announced, Hello, Key, Result, read_body, read_head
from kvbaton_example_stream.grants import Grant

#: What one ``poll()`` moves over one socket at most: its work is bounded, and no peer keeps another waiting.
BYTES_PER_POLL = 4 << 20
#: Buffers that one system call takes.
MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
#: Callers that ``connect`` has not named yet; more are turned away.
MAX_CALLERS = 64


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An endpoint's metadata: whom to call, a unix socket's name or a port of this machine, and the secret to say."""

    at: str | Annotated[int, msgspec.Meta(ge=1, le=65535)]
    secret: bytes


@dataclass(eq=False)
class Post:
    """A frame to send, and the source bytes of a chunk behind it."""

    frame: bytes
    source: Segments = field(default_factory=Segments.empty)
    #: What is left of both.  ``None``: not started, so that a chunk can still be cancelled.
    left: deque[memoryview] | None = None


@dataclass(eq=False)
class Link:
    """A connection, called by us or calling us, until its end."""

    socket: socket.socket
    #: Who is at the other end: known if we called, else once it has said so.
    peer: PeerId | None = None
    up: bool = False
    #: What it says: an iterator that gives the buffers for the next bytes, and goes on when they are full.
    speech: Iterator[Iterable[memoryview]] = field(default_factory=lambda: iter(()))
    #: What is left of those buffers, and the transfer whose target they are.
    buffers: deque[memoryview] = field(default_factory=deque)
    landing: TransferId | None = None
    outgoing: deque[Post] = field(default_factory=deque)
    #: Accepted and not completed: waiting in ``outgoing``, or waiting for the answer.
    chunks: dict[Key, Post] = field(default_factory=dict)
    closing: bool = False
    cause: Exception | None = None


class StreamConnector(ConnectorBase):
    """The promises are those of :class:`~kvbaton.connector.TransferConnector`; comments say where each is kept."""

    capabilities = CAPABILITIES

    def __init__(self, peer: PeerId, options: StreamOptions) -> None:
        self.peer = peer
        self._queue_limit = options.queue_limit
        self._memory: dict[int, memoryview] = {}
        self._grants: dict[TransferId, Grant] = {}
        self._named: dict[PeerId, Address] = {}  # by connect, until down
        self._links: dict[PeerId, Link] = {}  # to those
        self._callers: list[Link] = []  # from anybody else
        self._completions: list[Completion] = []
        self._receipts: list[Receipt] = []
        self._events: list[PeerEvent] = []
        self._secret = secrets.token_bytes(16)
        # an abstract name goes with its socket, however the process ends; port 0 is one that is free
        at: str | int = f"\0kvbaton-example-stream-{secrets.token_hex(16)}" if options.family == "unix" else 0
        self._listener = _socket(at)
        self._listener.bind(_place(at))
        self._at = at or self._listener.getsockname()[1]
        self._listener.listen(MAX_CALLERS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = False

    # -- memory (T1) and grants (C5.2) -------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """Nothing to pin: the kernel copies from and to any memory of ours."""
        for region in regions:
            if region.kind != "host":
                reason = f"it is {region.kind} memory"
                raise RegistrationError(f"T1: region {region.id}: {reason}", region=region.id, reason=reason)
        self._memory = {region.id: region.view().data for region in regions}

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        self._grants[transfer] = Grant(peer, target)

    def revoke(self, transfer: TransferId) -> bool:
        """Always at once: this very thread writes the memory, and from now on it does not.  The sender may be frozen in
        the middle of a chunk; when it goes on, the rest of it goes into the void.
        """
        self._grants.pop(transfer, None)
        for link in self._links.values():
            if link.landing == transfer:
                self._divert(link)
        return True

    def _divert(self, link: Link) -> None:
        if link.landing is not None:
            link.landing = None
            link.buffers = deque(void(sum(map(len, link.buffers))))

    # -- the handshake (T2) ------------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        return msgspec.msgpack.encode(Address(self._at, self._secret))

    def connect(self, peer: Endpoint) -> None:
        """The smaller of the two ids calls, the other waits for the call."""
        id = peer.peer
        for old in [known for known in self._named if known.name == id.name and known != id]:
            self._sever(old, PeerLost(f"C1.4: {old} was replaced by {id}", peer=old))
        if id in self._named:
            return
        try:
            address = self._named[id] = msgspec.msgpack.decode(peer.metadata, type=Address)
        except msgspec.MsgspecError as error:
            self._down(id, ConnectError(f"T2: the metadata of {id} is not ours: {error}", peer=id))
            return
        if id < self.peer:
            for caller in [caller for caller in self._callers if caller.peer == id]:
                self._match(caller)
            return
        link = self._links[id] = self._attach(_socket(address.at), id)
        try:
            link.socket.connect(_place(address.at))
        except OSError as error:
            if error.errno != errno.EINPROGRESS:
                self._end(link, ConnectError(f"T2: {id} cannot be called: {error}", peer=id))
                return
        self._greet(link)

    def _attach(self, connection: socket.socket, peer: PeerId | None = None) -> Link:
        link = Link(connection, peer)
        link.speech = self._listen(link)
        link.buffers.extend(next(link.speech))
        self._selector.register(connection, selectors.EVENT_READ, link)
        return link

    def _greet(self, link: Link) -> None:
        assert link.peer is not None
        self._say(link, Post(Hello(self.peer, link.peer, self._named[link.peer].secret).frame()))

    def _answer(self) -> None:
        """Somebody calls.  Any process can; it will be heard if it knows the secret."""
        with contextlib.suppress(BlockingIOError):
            connection, _ = self._listener.accept()
            connection.setblocking(False)
            if len(self._callers) < MAX_CALLERS:
                self._callers.append(self._attach(connection))
            else:
                connection.close()

    def _match(self, link: Link) -> None:
        """It has said hello, and ``connect`` has named it, in whichever order.  Its hello named our epoch: up."""
        if link.peer is None or link.peer not in self._named or self._links.get(link.peer) not in (None, link):
            return
        if link in self._callers:
            self._callers.remove(link)
            self._links[link.peer] = link
            self._greet(link)
        link.up = True
        self._events.append(PeerEvent(link.peer, up=True))

    # -- what a peer says --------------------------------------------------------------------------------------------

    def _listen(self, link: Link) -> Iterator[Iterable[memoryview]]:
        """Frame after frame.  Raises :class:`~kvbaton.errors.ProtocolViolation` for one that is out of place (C9.3)."""
        while True:
            head = bytearray(HEAD.size)
            yield [memoryview(head)]
            kind, size = read_head(head)
            body = bytearray(size)
            yield [memoryview(body)]
            match read_body(kind, body):
                case Hello() as hello if not link.up:
                    self._hello(link, hello)
                case Announced(key, target) if link.up:
                    yield from self._land(link, key, target)
                case Result(key, taken) if link.up:
                    self._result(link, key, taken)
                case other:
                    raise ProtocolViolation("C9.3", f"{type(other).__name__} is out of place", peer=link.peer)

    def _hello(self, link: Link, hello: Hello) -> None:
        """For this epoch of us, and not for an earlier one (C1.4)."""
        known = hmac.compare_digest(hello.secret, self._secret)
        if not known or hello.you != self.peer or link.peer not in (None, hello.me):
            raise ProtocolViolation("T2", f"{hello.me} calls {hello.you}, not {self.peer}", peer=hello.me)
        link.peer = hello.me
        self._match(link)

    def _land(self, link: Link, key: Key, target: Segments) -> Iterator[Iterable[memoryview]]:
        """Read a payload into its place, if this peer may write there, and answer."""
        assert link.peer is not None
        nbytes = sum(target.length.tolist())  # not target.nbytes: what a peer says may not fit 64 bits
        if nbytes > CAPABILITIES.max_chunk_bytes or len(link.outgoing) > 2 * MAX_QUEUE:
            raise ProtocolViolation("C9.3", f"chunk {key} of {nbytes} bytes is too much", peer=link.peer)
        grant = self._grants.get(key[0])
        if grant is not None and grant.peer == link.peer and grant.covers(target) and not link.closing:
            link.landing = key[0]
            yield self._views(target)
        else:
            yield void(nbytes)
        taken = link.landing is not None  # still: what came in after a revocation or a disconnect was diverted
        link.landing = None
        if taken:
            self._receipts.append(Receipt(link.peer, *key))  # T3: all its bytes are there, and none is written again
        self._say(link, Post(Result(key, taken).frame()))

    def _result(self, link: Link, key: Key, taken: bool) -> None:
        post = link.chunks.get(key)
        if post is None or post.left is None or post.left:
            raise ProtocolViolation("C7.4", f"an answer to chunk {key}, which is not complete", peer=link.peer)
        del link.chunks[key]
        error = TransportError(f"C5.2: {link.peer} has not granted this, or not any more", transfer=key[0])
        self._complete(key, Outcome.DONE if taken else Outcome.FAILED, None if taken else error)

    def _views(self, segments: Segments) -> Iterable[memoryview]:
        return [self._memory[region][offset : offset + length] for region, offset, length in segments.triples()]

    # -- chunks at the source (T5, T6, T9) ---------------------------------------------------------------------------

    def submit(self, chunk: Chunk) -> bool:
        key = (chunk.transfer, chunk.sequence)
        link = self._links.get(chunk.peer)
        if link is None or not link.up or link.closing:
            self._complete(key, Outcome.FAILED, PeerLost(f"T7: {chunk.peer} is not connected", peer=chunk.peer))
            return True
        if len(link.chunks) >= self._queue_limit:
            return False  # T6: per peer, so that a frozen one fills only its own queue
        link.chunks[key] = Post(Announced(key, chunk.target).frame(), chunk.source)
        self._say(link, link.chunks[key])
        return True

    def outstanding(self) -> int:
        return sum(len(link.chunks) for link in self._links.values())

    def cancel(self, transfer: TransferId) -> None:
        for link in self._links.values():
            self._withdraw(link, [key for key in link.chunks if key[0] == transfer])

    def _withdraw(self, link: Link, keys: Iterable[Key]) -> None:
        """T9: what has started cannot be taken back, the frame has to be finished; its answer ends it."""
        for key in keys:
            if link.chunks[key].left is None:
                link.outgoing.remove(link.chunks.pop(key))
                self._complete(key, Outcome.CANCELLED)

    def _complete(self, key: Key, outcome: Outcome, error: Exception | None = None) -> None:
        """T5: never said before both sides are quiet."""
        self._completions.append(Completion(*key, outcome, source_quiet=True, target_quiet=True, error=error))

    # -- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._answer()
            elif self._receive(key.data):
                self._send(key.data)
        if not (self._completions or self._receipts or self._events):
            return IDLE
        progress = Progress(tuple(self._completions), tuple(self._receipts), tuple(self._events))
        self._completions, self._receipts, self._events = [], [], []
        return progress

    def wait(self, timeout: float) -> None:
        if not (self._completions or self._receipts or self._events):
            self._selector.select(timeout)

    def _receive(self, link: Link) -> bool:
        """Whether the link is still there afterwards."""
        budget = BYTES_PER_POLL
        while budget > 0:
            try:
                count, _, _, _ = link.socket.recvmsg_into(list(islice(link.buffers, MAX_BUFFERS)))
            except BlockingIOError:
                break
            except ConnectionError:  # it has closed without reading everything
                count = 0
            if not count:
                lost = PeerLost(f"T7: {link.peer} has disconnected, or its process has ended", peer=link.peer)
                self._end(link, link.cause if link.closing else lost)
                return False
            budget -= count
            advance(link.buffers, count)
            try:
                while not link.buffers:
                    link.buffers.extend(next(link.speech))
            except ProtocolViolation as error:
                return self._distrust(link, error)
        return True

    def _say(self, link: Link, post: Post) -> None:
        link.outgoing.append(post)
        self._selector.modify(link.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, link)

    def _send(self, link: Link) -> None:
        budget = BYTES_PER_POLL
        with contextlib.suppress(OSError):  # there is no room; or nobody, which the end of the stream will tell
            while link.outgoing and budget > 0:
                post = link.outgoing[0]
                if post.left is None:
                    post.left = deque([memoryview(post.frame), *self._views(post.source)])
                count = link.socket.sendmsg(islice(post.left, MAX_BUFFERS))
                budget -= count
                advance(post.left, count)
                if not post.left:
                    link.outgoing.popleft()
        if link.closing and not link.chunks:
            self._end(link, link.cause)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.outgoing else 0)
        self._selector.modify(link.socket, wanted, link)

    # -- the end of a connection (C6.4, T7) --------------------------------------------------------------------------

    def disconnect(self, peer: PeerId) -> None:
        """From here on nothing of the peer lands; down when nothing of ours is under way to it."""
        self._sever(peer, None)

    def fenced(self, peer: PeerId) -> None:
        if peer in self._links:
            self._end(self._links[peer], PeerLost(f"C6.4: {peer} was fenced", peer=peer))

    def _sever(self, peer: PeerId, cause: Exception | None) -> None:
        link = self._links.get(peer)
        if link is None:
            if self._named.pop(peer, None) is not None:
                self._down(peer, cause)
        elif not link.closing:
            link.closing, link.cause = True, cause
            self._withdraw(link, list(link.chunks))
            self._divert(link)
            self._send(link)

    def _distrust(self, link: Link, error: Exception) -> bool:
        """It breaks the protocol: it is heard no more, and our end of the stream tells it so.  Of a chunk that it may
        still be reading only the end of its own stream is proof.
        """
        if link.peer is None or link in self._callers:
            self._end(link, error)
            return False
        self._sever(link.peer, error)
        if self._links.get(link.peer) is not link:
            return False  # nothing of ours was under way to it
        self._events.append(PeerEvent(link.peer, up=False, quiet=False, error=error))
        link.speech, link.buffers = repeat([VOID]), deque([VOID])
        link.outgoing.clear()
        with contextlib.suppress(OSError):
            link.socket.shutdown(socket.SHUT_WR)
        return True

    def _end(self, link: Link, cause: Exception | None) -> None:
        """The connection is closed, or the peer's process is gone: neither end hears anything of the other any more."""
        self._selector.unregister(link.socket)
        with contextlib.suppress(OSError):
            link.socket.shutdown(socket.SHUT_RDWR)  # also where a forked child holds a copy of the descriptor
        link.socket.close()
        link.buffers.clear()
        if link in self._callers:
            self._callers.remove(link)
        elif link.peer is not None:
            for key in link.chunks:
                self._complete(key, Outcome.FAILED, cause)
            del self._links[link.peer], self._named[link.peer]
            self._down(link.peer, cause)

    def _down(self, peer: PeerId, cause: Exception | None) -> None:
        self._events.append(PeerEvent(peer, up=False, quiet=True, error=cause))

    # -- teardown (T10) ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self._closed:
            return
        if waiting := self.outstanding():
            raise Outstanding(f"T10: {waiting} chunks are outstanding; poll until they are not", outstanding=waiting)
        self._closed = True
        for link in [*self._links.values(), *self._callers]:
            self._end(link, None)
        self._selector.close()
        self._listener.close()
        self._memory.clear()
        self._grants.clear()


def _socket(at: str | int) -> socket.socket:
    """A stream that never waits."""
    made = socket.socket(socket.AF_UNIX if isinstance(at, str) else socket.AF_INET)
    made.setblocking(False)
    if isinstance(at, int):
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def _place(at: str | int) -> str | tuple[str, int]:
    """What ``bind`` and ``connect`` take."""
    return at if isinstance(at, str) else ("127.0.0.1", at)
