"""One stage's end of the transport.

All regions of an end lie in one anonymous file.  Two ends that connect hand each other that file through a unix
socket and map it, so that ``submit`` is a plain copy into the peer's memory.  The socket then carries short messages:

``Hello``
    I accept your epoch, and here is my file.
``Arrived``
    The bytes of that chunk are in your memory: the receipt.
end of stream
    I write no more into your memory: the fence.  The kernel says it for a process that has died.

Why the receipt is a message and not a flag in the shared memory: a processor may show the flag before the bytes, and
Python has no barrier to forbid it; a system call on either side is one.  Why nothing has a name in the file system: a
killed process cleans nothing up, and this way the kernel does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import socket
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from kvbaton.connector import (
    IDLE,
    Chunk,
    Completion,
    ConnectorBase,
    Endpoint,
    MemoryKind,
    MemoryRegion,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
)
from kvbaton.errors import CapabilityError, ConnectError, Outstanding, PeerLost, ProtocolViolation, RegistrationError
from kvbaton.identity import PeerId, WireTransferId
from kvbaton_example_shm import CAPABILITIES
from kvbaton_example_shm.mapping import Bytes, keep_from_children, mapped

Place = tuple[int, int]

#: What one ``poll()`` reads from one socket at most: its work is bounded, and no peer keeps another waiting.
MESSAGES_PER_POLL = 64
#: Callers that ``connect`` has not named yet; more are turned away.
MAX_CALLERS = 64


class Address(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An endpoint's metadata: the name to call, and where each region is in the file: offset and length by id."""

    name: str
    regions: dict[int, Place]


class Hello(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    me: PeerId
    you: PeerId


class Arrived(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    transfer: WireTransferId
    sequence: Annotated[int, msgspec.Meta(ge=0)]


_encode = msgspec.msgpack.encode
#: Typed and strict, no pickle (C9.3).
_decode = msgspec.msgpack.Decoder(Hello | Arrived).decode


@dataclass(eq=False)
class Link:
    """A connection, called by us or calling us, until its end."""

    socket: socket.socket
    #: Who is at the other end: known if we called, else once it has said so.
    peer: PeerId | None = None
    #: The peer's file, mapped, since its hello.
    file: Bytes | None = None
    #: The peer's regions in it, while we may write them.
    memory: Mapping[int, Bytes] | None = None
    #: A chunk that is copied, and whose receipt the socket had no room for.
    unsent: Chunk | None = None
    closing: bool = False
    cause: Exception | None = None

    def greets(self, peer: PeerId) -> bool:
        """Whether ``peer`` may say hello here: the one that we called, or anybody who calls, and once."""
        return self.file is None and self.peer in (None, peer)


class ShmConnector(ConnectorBase):
    """The promises are those of :class:`~kvbaton.connector.TransferConnector`; comments say where each is kept."""

    capabilities = CAPABILITIES

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self._file = os.memfd_create("kvbaton-example-shm")
        self._size = mmap.PAGESIZE
        os.ftruncate(self._file, self._size)  # an empty file could not be mapped
        self._memory: dict[int, Bytes] = {}
        self._places: dict[int, Place] = {}
        self._named: dict[PeerId, Address] = {}  # by connect, until down
        self._links: dict[PeerId, Link] = {}  # to those
        self._callers: list[Link] = []  # from anybody else
        self._completions: list[Completion] = []
        self._receipts: list[Receipt] = []
        self._events: list[PeerEvent] = []
        self._name = f"\0kvbaton-example-shm-{uuid.uuid4().hex}"  # an abstract name: it goes with the socket
        self._listener = _socket()
        self._listener.bind(self._name)
        self._listener.listen(MAX_CALLERS)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._closed = False

    # -- memory (T1) -------------------------------------------------------------------------------------------------

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        """A further piece of our file, zeroed.  Its mapping belongs to the region, and outlives ``close()``."""
        if kind != "host" or nbytes < 1:
            raise CapabilityError(f"T1: region {id}: there are no {nbytes} bytes of {kind} memory to share", region=id)
        offset = -(-self._size // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._size = offset + nbytes
        os.ftruncate(self._file, self._size)
        self._places[id] = (offset, nbytes)
        self._memory[id] = mapped(self._file, nbytes, offset)
        return MemoryRegion.of_array(id, self._memory[id])

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        """What we allocated is in our file already.  Anything else no peer could map."""
        for region in regions:
            ours = self._memory.get(region.id)
            if ours is None or (ours.ctypes.data, ours.nbytes) != (region.address, region.length):
                reason = "it did not come from allocate()"
                raise RegistrationError(f"T1: region {region.id}: {reason}", region=region.id, reason=reason)

    # -- the handshake (T2) ------------------------------------------------------------------------------------------

    def metadata(self) -> bytes:
        return _encode(Address(self._name, self._places))

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
        link = self._links[id] = Link(_socket(), id)
        self._selector.register(link.socket, selectors.EVENT_READ, link)
        try:
            link.socket.connect(address.name)  # answered at once, by the kernel for the peer
            self._greet(link.socket, id)
        except OSError as error:
            self._end(link, ConnectError(f"T2: {id} cannot be called: {error}", peer=id))

    def _greet(self, connection: socket.socket, you: PeerId) -> None:
        socket.send_fds(connection, [_encode(Hello(self.peer, you))], [self._file])

    def _answer(self) -> None:
        """Somebody calls.  Any process can; only those of our own user are heard."""
        with contextlib.suppress(BlockingIOError):
            caller = Link(self._listener.accept()[0])
            caller.socket.setblocking(False)
            _, uid, _ = struct.unpack("3i", caller.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid != os.getuid() or len(self._callers) == MAX_CALLERS:
                caller.socket.close()
                return
            self._callers.append(caller)
            self._selector.register(caller.socket, selectors.EVENT_READ, caller)

    def _match(self, link: Link) -> None:
        """It has said hello, and ``connect`` has named it, in whichever order.  Its hello named our epoch: up."""
        if link.peer is None or link.file is None or link.peer not in self._named:
            return
        if self._links.get(link.peer) not in (None, link):
            return
        if link in self._callers:
            self._callers.remove(link)
            self._links[link.peer] = link
            with contextlib.suppress(OSError):  # gone again: then we shall read that its stream has ended
                self._greet(link.socket, link.peer)
        places = self._named[link.peer].regions
        memory = {id: link.file[offset:][:length] for id, (offset, length) in places.items()}
        if any(memory[id].size != length for id, (_, length) in places.items()):
            self._distrust(link, places)
        elif not link.closing:
            link.memory = memory
            self._events.append(PeerEvent(link.peer, up=True))

    # -- chunks at the source (T5, T6) -------------------------------------------------------------------------------

    def submit(self, chunk: Chunk) -> bool:
        link = self._links.get(chunk.peer)
        if link is not None and link.unsent is not None:
            return False  # T6: this peer does not listen; it keeps no other one waiting
        if link is None or link.memory is None:
            self._complete(chunk, Outcome.FAILED, PeerLost(f"T7: {chunk.peer} is not connected", peer=chunk.peer))
            return True
        # One step per segment: for runs of 4 KiB and more nothing that Python has is faster.
        for (region, start, length), (into, to, _) in zip(chunk.source.triples(), chunk.target.triples(), strict=True):
            link.memory[into][to : to + length] = self._memory[region][start : start + length]
        link.unsent = chunk
        self._flush(link)  # T3, T4: the receipt comes after the bytes, and they are not written again
        return True

    def outstanding(self) -> int:
        return sum(link.unsent is not None for link in self._links.values())

    def _flush(self, link: Link) -> None:
        """Send what is to be said.  A chunk is done when the kernel has its receipt."""
        with contextlib.suppress(OSError):  # there is no room; or nobody, which the end of the stream will tell
            if link.unsent is not None:
                link.socket.send(_encode(Arrived(link.unsent.transfer, link.unsent.sequence)))
                self._complete(link.unsent, Outcome.DONE)
                link.unsent = None
            if link.closing:
                link.memory = link.file = None
                link.socket.shutdown(socket.SHUT_WR)  # C6.4: said when it is true
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if link.unsent else 0)
        self._selector.modify(link.socket, wanted, link)

    def _complete(self, chunk: Chunk, outcome: Outcome, error: Exception | None = None) -> None:
        """T5: no copy is under way outside of ``submit``, so both sides are quiet, whatever the outcome."""
        self._completions.append(Completion(chunk.transfer, chunk.sequence, outcome, True, True, error))

    # -- progress ----------------------------------------------------------------------------------------------------

    def poll(self) -> Progress:
        for key, _ in self._selector.select(0):
            if key.data is None:
                self._answer()
            else:
                self._read(key.data)
        if not (self._completions or self._receipts or self._events):
            return IDLE
        progress = Progress(tuple(self._completions), tuple(self._receipts), tuple(self._events))
        self._completions, self._receipts, self._events = [], [], []
        return progress

    def wait(self, timeout: float) -> None:
        if not (self._completions or self._receipts or self._events):
            self._selector.select(timeout)

    def _read(self, link: Link) -> None:
        for _ in range(MESSAGES_PER_POLL):
            match _receive(link.socket):
                case None:
                    self._flush(link)
                    return
                case Hello(me, you), file if file is not None and you == self.peer and link.greets(me):
                    link.peer, link.file = me, file
                    self._match(link)
                case Arrived(transfer, sequence), _ if link.peer is not None and link not in self._callers:
                    self._receipts.append(Receipt(link.peer, transfer, sequence))
                case None, _:
                    lost = PeerLost(f"T7: {link.peer} has disconnected, or its process has ended", peer=link.peer)
                    self._end(link, link.cause if link.closing else lost)
                    return
                case nonsense, _:
                    self._distrust(link, nonsense)
                    return
        self._flush(link)

    # -- the end of a connection (C6.4, T7) --------------------------------------------------------------------------

    def disconnect(self, peer: PeerId) -> None:
        """We end our stream, the peer ends its own, and then nobody writes any more."""
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
            self._flush(link)

    def _distrust(self, link: Link, message: object) -> None:
        """It breaks the protocol: down now, and quiet when its stream has ended, like anybody's."""
        error = ProtocolViolation("C9.3", f"{link.peer} said {message!r}, which has no meaning here", peer=link.peer)
        if link in self._callers:
            self._end(link, error)
        elif link.peer is not None and not link.closing:
            self._events.append(PeerEvent(link.peer, up=False, quiet=False, error=error))
            self._sever(link.peer, error)

    def _end(self, link: Link, cause: Exception | None) -> None:
        """The stream has ended, so the peer writes no more: it has said so, or its process is gone.

        A process loses its mappings before its descriptors, and no child inherits them (``MADV_DONTFORK``).
        """
        self._selector.unregister(link.socket)
        with contextlib.suppress(OSError):
            link.socket.shutdown(socket.SHUT_RDWR)  # also where a forked child holds a copy of the descriptor
        link.socket.close()
        if link in self._callers:
            self._callers.remove(link)
        elif link.peer is not None:
            if link.unsent is not None:
                self._complete(link.unsent, Outcome.FAILED, cause)
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
        os.close(self._file)
        self._memory.clear()


def _socket() -> socket.socket:
    """It keeps the borders of messages, sends each whole or not at all, and never waits."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    made.setblocking(False)
    return made


def _receive(connection: socket.socket) -> tuple[Hello | Arrived | bytes | None, Bytes | None] | None:
    """The next message, and the file that came with it.  Bytes that are no message stay bytes; ``None`` in the
    message's place is the end of the stream; ``None`` alone: nothing yet.
    """
    try:
        data, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
    except BlockingIOError:
        return None
    except ConnectionResetError:  # said once where the peer left something unread; what it wrote is still to come
        return _receive(connection)
    file = _opened(descriptors[0]) if descriptors else None
    try:
        return (_decode(data) if data else None), file
    except msgspec.MsgspecError:
        return data, file


def _opened(descriptor: int) -> Bytes | None:
    """The whole of a peer's file; ``None`` where the descriptor is of something else.  It is closed."""
    try:
        file = mapped(descriptor, os.fstat(descriptor).st_size)
        keep_from_children(file)  # a child that outlives us would write where we have promised not to
        return file
    except OSError:
        return None
    finally:
        os.close(descriptor)
