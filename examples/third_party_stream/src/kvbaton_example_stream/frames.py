"""What travels over a connection: frames of ``kind (1 byte), size (4 bytes), body (size bytes)``, little-endian.

======  ================================================================================
hello   who I am, whom I mean, and the secret that stands in your endpoint
chunk   transfer (16 bytes), sequence (8), target segments (20 each); the payload follows
result  transfer (16), sequence (8), 1 if the chunk was taken, 0 if it was refused
======  ================================================================================
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec

from kvbaton.errors import ProtocolViolation, SegmentError
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments
from kvbaton_example_stream import CAPABILITIES

#: Which chunk is meant: its transfer and its sequence.
Key = tuple[TransferId, int]

HEAD = struct.Struct("<BI")
_HELLO, _CHUNK, _RESULT = range(3)
_KEY = struct.Struct("<16sQ")
_ANSWER = struct.Struct("<16sQ?")
#: The longest body is a chunk of as many segments as we declare.
_LONGEST = _KEY.size + 20 * CAPABILITIES.max_segments


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    me: PeerId
    you: PeerId
    secret: bytes

    def frame(self) -> bytes:
        return _frame(_HELLO, msgspec.msgpack.encode(self))


@dataclass(frozen=True, slots=True)
class Announced:
    """A chunk; its payload follows."""

    key: Key
    target: Segments

    def frame(self) -> bytes:
        return _frame(_CHUNK, _KEY.pack(bytes.fromhex(self.key[0]), self.key[1]) + self.target.to_bytes())


@dataclass(frozen=True, slots=True)
class Result:
    key: Key
    taken: bool

    def frame(self) -> bytes:
        return _frame(_RESULT, _ANSWER.pack(bytes.fromhex(self.key[0]), self.key[1], self.taken))


def _frame(kind: int, body: bytes) -> bytes:
    return HEAD.pack(kind, len(body)) + body


def read_head(head: bytearray) -> tuple[int, int]:
    """Kind and size of the body.  Raises :class:`~kvbaton.errors.ProtocolViolation` for a size that no frame has."""
    kind, size = HEAD.unpack(head)
    if not 0 < size <= _LONGEST:
        raise ProtocolViolation("C9.3", f"a frame of {size} bytes")
    return kind, size


def read_body(kind: int, body: bytearray) -> Hello | Announced | Result:
    """Raises :class:`~kvbaton.errors.ProtocolViolation` for whatever is not exactly a frame (C9.3)."""
    try:
        if kind == _HELLO:
            return msgspec.msgpack.decode(body, type=Hello)
        if kind == _CHUNK:
            transfer, sequence = _KEY.unpack_from(body)
            target = Segments.from_bytes(memoryview(body)[_KEY.size :])
            return Announced((TransferId(transfer.hex()), sequence), target)
        if kind == _RESULT:
            transfer, sequence, taken = _ANSWER.unpack(body)
            return Result((TransferId(transfer.hex()), sequence), taken)
    except (struct.error, SegmentError, msgspec.MsgspecError) as error:
        raise ProtocolViolation("C9.3", f"no frame of kind {kind}: {error}") from error
    raise ProtocolViolation("C9.3", f"there is no frame of kind {kind}")
