"""A lane: a connected pair of sockets that carries the envelopes between two processes of one host.

What is sent is in the other process's buffer when ``send`` returns, put there by the sending thread, and wakes the
receiving thread itself: one waking for a message, where a socket of ZeroMQ takes three, its own threads' included.  A
lane is made by whoever starts the other process, which inherits its end: nobody else can speak on it.

A frame is its length, four bytes, and as many bytes.  The system keeps their order and loses none while both ends are
open; what was sent before an end closed is read before the end is seen.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque
from typing import Final, TypeAlias

#: What a lane is made of, and what a process inherits.
End: TypeAlias = socket.socket

_LENGTH: Final = struct.Struct("<I")
#: Bytes that a lane holds, each message with the system's own overhead, before what is sent waits in this process.
_ROOM: Final = 1 << 22
#: Read at a time.
_READ: Final = 1 << 16


class Lane:
    """One end.  ``longest``: bytes of a frame; who announces a longer one is not heard any more.

    Threading: one thread at a time.  Ownership: the socket is the lane's, until ``close``.
    """

    def __init__(self, end: End, longest: int) -> None:
        end.setblocking(False)
        self._socket = end
        self._longest = longest
        self._read = bytearray()
        self._unsent: deque[memoryview] = deque()
        #: The other end is closed, or says what is no frame; everything that came before was read.
        self.ended = False

    def fileno(self) -> int:
        """The descriptor to poll: for reading, and for writing while anything is ``unsent``."""
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Whether something waits for room at the other end; ``flush`` sends it."""
        return bool(self._unsent)

    def send(self, data: bytes) -> bool:
        """Send one frame, or put it in line.  Never waits.  False if the other end is closed: it is dropped."""
        framed = memoryview(_LENGTH.pack(len(data)) + data)
        if not self._unsent:
            try:
                sent = self._socket.send(framed)
            except BlockingIOError:
                sent = 0
            except OSError:
                return False
            if sent == len(framed):
                return True
            framed = framed[sent:]
        self._unsent.append(framed)
        return True

    def flush(self) -> bool:
        """Send what was in line, as far as there is room.  False if the other end is closed."""
        while self._unsent:
            try:
                sent = self._socket.send(self._unsent[0])
            except BlockingIOError:
                return True
            except OSError:
                self._unsent.clear()
                return False
            if sent < len(self._unsent[0]):
                self._unsent[0] = self._unsent[0][sent:]
            else:
                self._unsent.popleft()
        return True

    def receive(self) -> list[bytes]:
        """The frames of one read, oldest first.  Empty: nothing is there, or no whole frame yet, or ``ended``."""
        while not self.ended:
            try:
                data = self._socket.recv(_READ)
            except BlockingIOError:
                return []
            except ConnectionResetError:  # said once where the other end left something unread; then the end
                continue
            except OSError:
                data = b""
            if not data:
                self.ended = True
                return []
            frames = self._cut(data)
            if frames or len(data) < _READ:
                return frames
        return []

    def end_input(self) -> None:
        """Take nothing from now on but what has come already, so that reading that comes to an end."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RD)

    def _cut(self, data: bytes) -> list[bytes]:
        if not self._read and len(data) >= 4 and _LENGTH.unpack_from(data)[0] == len(data) - 4 <= self._longest:
            return [data[4:]]  # as it is nearly always
        self._read += data
        frames: list[bytes] = []
        start = 0
        while len(self._read) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._read, start)
            if length > self._longest:
                self.ended = True
                break
            if len(self._read) - start - 4 < length:
                break
            frames.append(bytes(self._read[start + 4 : start + 4 + length]))
            start += 4 + length
        del self._read[:start]
        return frames

    def close(self, linger: float = 0.0) -> None:
        """Close, after ``linger`` seconds at most for what is in line.  Idempotent."""
        deadline = time.monotonic() + linger
        poll = select.poll()
        if self._unsent:
            poll.register(self._socket, select.POLLOUT)
        while self._unsent and (left := deadline - time.monotonic()) > 0:
            if poll.poll(left * 1000) and not self.flush():
                break
        self._unsent.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a child that was forked meanwhile may hold it, too
        self._socket.close()


def lane_pair() -> tuple[End, End]:
    """Both ends of a new lane; neither is inherited by what this process starts, unless it is told to."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)  # as far as the system allows
    return ends
