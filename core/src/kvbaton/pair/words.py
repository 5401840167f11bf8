"""What the two ends of a pair are told and what they answer: frames of msgpack over a private pair of sockets.

One order, one answer, except for :class:`Expect`, which is answered twice: when the end is ready, and when it is over.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, Literal

import msgspec

from kvbaton.connector import Capabilities, MemoryKind, Reach

_LENGTH = struct.Struct("<I")


class Open(msgspec.Struct, frozen=True, tag=True):
    """Open the connector, with zeroed memory: one region for each of ``regions``, which are bytes."""

    transport: str
    options: dict[str, Any]
    memory: MemoryKind
    device: int
    name: str
    regions: tuple[int, ...]
    connect: float
    chunk: float
    reach: Reach = "cross_process"


class Connect(msgspec.Struct, frozen=True, tag=True):
    """Connect to the other end and wait until it is up."""

    endpoint: bytes


class Fill(msgspec.Struct, frozen=True, tag=True):
    """Fill all memory with the pattern of ``seed``; with poison, where that is 0."""

    seed: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Move the segments once for each transfer, one after the other."""

    transfers: tuple[str, ...]
    reads: bytes
    writes: bytes
    chunk_bytes: int
    chunk_segments: int
    bound: float


class Expect(msgspec.Struct, frozen=True, tag=True):
    """Grant the segments to each transfer, and poll until each has had ``chunks`` receipts."""

    transfers: tuple[str, ...]
    writes: bytes
    chunks: int
    bound: float


class Check(msgspec.Struct, frozen=True, tag=True):
    """Compare memory with what a copy of ``reads``, out of the pattern of ``seed``, would have made of poison."""

    reads: bytes
    writes: bytes
    seed: int


class Copy(msgspec.Struct, frozen=True, tag=True):
    """At the source: copy the segments ``repeats`` times into shared memory, or from its device to ``device``."""

    reads: bytes
    writes: bytes
    repeats: int
    bound: float
    device: int = 0


class Watch(msgspec.Struct, frozen=True, tag=True):
    """At the target of :class:`Copy`: say when the copies are seen."""

    repeats: int
    bound: float


class Call(msgspec.Struct, frozen=True, tag=True):
    """Call ``module:function`` with the end and these arguments."""

    function: str
    arguments: dict[str, Any]


class Part(msgspec.Struct, frozen=True, tag=True):
    """Disconnect, and poll until the other end is gone."""

    bound: float


class Close(msgspec.Struct, frozen=True, tag=True):
    """Close the connector and exit."""


Order = Open | Connect | Fill | Send | Expect | Check | Copy | Watch | Call | Part | Close


class Done(msgspec.Struct, frozen=True, tag=True):
    """It is done."""


class Opened(msgspec.Struct, frozen=True, tag=True):
    endpoint: bytes
    capabilities: Capabilities


class Times(msgspec.Struct, frozen=True, tag=True):
    """Seconds since the first call, for each repetition; and of each chunk of all of them: in the ``submit`` that took
    it, and from then until its completion was seen."""

    done: tuple[float, ...]
    received: tuple[float, ...]
    chunks: int
    submit: tuple[float, ...] = ()
    each: tuple[float, ...] = ()


class Found(msgspec.Struct, frozen=True, tag=True):
    """Bytes within the segments that are wrong, bytes outside of them that have changed, and where the first is."""

    wrong: int
    outside: int
    region: int
    offset: int


class Result(msgspec.Struct, frozen=True, tag=True):
    value: Any


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It could not be done; ``late``: within the bound it was not done."""

    cause: Literal["refused", "late", "failed"]
    text: str
    trace: str = ""


Answer = Done | Opened | Times | Found | Result | Failed


class Frames:
    """Whole frames over a connected stream socket.  Every call raises ``EOFError`` where the other side is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._pending = bytearray()

    def send(self, message: Order | Answer) -> None:
        data = msgspec.msgpack.encode(message)
        try:
            self.socket.sendall(_LENGTH.pack(len(data)) + data)
        except OSError as error:
            raise EOFError(str(error)) from error

    def ready(self, timeout: float) -> bool:
        """Whether a frame, or the end, can be read within ``timeout`` seconds."""
        return self._complete() or bool(select.select([self.socket], [], [], max(timeout, 0.0))[0])

    def receive(self, kind: Any, timeout: float) -> Any:
        """The next frame as a ``kind``.  ``TimeoutError`` where it is not there within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while not self._complete():
            if not select.select([self.socket], [], [], max(until - time.monotonic(), 0.0))[0]:
                raise TimeoutError
            try:
                more = self.socket.recv(1 << 20)
            except OSError as error:
                raise EOFError(str(error)) from error
            if not more:
                raise EOFError
            self._pending += more
        end = _LENGTH.size + _LENGTH.unpack_from(self._pending)[0]
        data = bytes(self._pending[_LENGTH.size : end])
        del self._pending[:end]
        return msgspec.msgpack.decode(data, type=kind)

    def close(self) -> None:
        self.socket.close()

    def _complete(self) -> bool:
        if len(self._pending) < _LENGTH.size:
            return False
        length: int = _LENGTH.unpack_from(self._pending)[0]
        return len(self._pending) >= _LENGTH.size + length
