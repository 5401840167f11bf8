"""What a chunk travels as, and how it is said: *parts*, each answered by the destination.  No input or output here.

A part is a word (:mod:`kvbaton_cuda_ipc.wire`) that says where its bytes go; the bytes themselves follow as a payload,
or, where they are few, stand in the word.  All of it comes from another process and is decoded strictly (C9.3).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from kvbaton.connector import Chunk
from kvbaton.errors import ProtocolViolation, SegmentError
from kvbaton.identity import TransferId
from kvbaton.segments import Segments, coalesce, coalesce_one, split

Key = tuple[TransferId, int]

#: Segments of one part at most: 20 bytes each in its word.
MAX_ROWS = 8192
#: Up to so many bytes a part's payload stands in its word: one message instead of two.
INLINE = 4096
#: Parts of one peer that may be under way at once, those in words included.
WINDOW = 64

_PART, _ANSWER, _BYE = range(1, 4)
#: kind, transfer, sequence, number, count, bytes, segments; behind it the segments, and the bytes of an inline part.
_PART_HEAD = struct.Struct("<B16sQIIQI")
#: kind, transfer, sequence, number, whether it was taken.
_ANSWERED = struct.Struct("<B16sQI?")
_SEGMENT = 20


class Offer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a hello tells: in how many slots its sender receives, how long they are, and how many bytes it takes in a
    part's word.
    """

    slots: int
    slot_bytes: int
    inline: int

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Offer:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
        try:
            offer = msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise ProtocolViolation("T2", f"a hello that offers no slots: {error}") from error
        if not (1 <= offer.slots <= 4096 and INLINE <= offer.slot_bytes <= 1 << 40 and offer.inline >= 0):
            raise ProtocolViolation("T2", f"a hello that offers {offer.slots} slots of {offer.slot_bytes} bytes")
        return offer


@dataclass(frozen=True, slots=True)
class Outgoing:
    """One part at its source."""

    number: int
    count: int
    nbytes: int
    source: Segments
    target: Segments


@dataclass(frozen=True, slots=True)
class Part:
    """One part at its destination.  ``inline`` has its bytes; where it is empty, they come as a payload."""

    key: Key
    number: int
    count: int
    nbytes: int
    target: Segments
    inline: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """The destination is done with a part: its bytes are in their place, or nowhere."""

    key: Key
    number: int
    taken: bool

    def encode(self) -> bytes:
        return _ANSWERED.pack(_ANSWER, bytes.fromhex(self.key[0]), self.key[1], self.number, self.taken)


@dataclass(frozen=True, slots=True)
class Bye:
    """Nothing of yours is written here any more, and nothing comes."""

    def encode(self) -> bytes:
        return bytes([_BYE])


def plan(chunk: Chunk, part_bytes: int, alone: int | None = None) -> Iterator[Outgoing]:
    """The parts of a chunk, in order; at least one, which is empty where the chunk is.

    Where its segments are ``alone`` bytes long or longer, on average, each is a part of its own.
    """
    source, target = coalesce(chunk.source, chunk.target)
    rows = 1 if alone is not None and source.nbytes >= alone * len(source) else MAX_ROWS
    pairs = split(source, target, part_bytes, rows) or [(Segments.empty(), Segments.empty())]
    for number, (reads, writes) in enumerate(pairs):
        # each side in as few runs as it has: the bytes travel in a row
        yield Outgoing(number, len(pairs), reads.nbytes, coalesce_one(reads), coalesce_one(writes))


def say(key: Key, part: Outgoing, inline: bytes = b"") -> bytes:
    """The word for a part."""
    head = _PART_HEAD.pack(_PART, bytes.fromhex(key[0]), key[1], part.number, part.count, part.nbytes, len(part.target))
    return b"".join((head, part.target.to_bytes(), inline))


def read(word: bytes, part_bytes: int) -> Part | Answer | Bye:
    """Raises :class:`~kvbaton.errors.ProtocolViolation` for whatever is not exactly one of them, or a part of more than
    ``part_bytes`` bytes.
    """
    try:
        match word[:1]:
            case b"\x01":
                return _part(word, part_bytes)
            case b"\x02":
                _, transfer, sequence, number, taken = _ANSWERED.unpack(word)
                return Answer((TransferId(transfer.hex()), sequence), number, taken)
            case b"\x03" if len(word) == 1:
                return Bye()
    except (struct.error, SegmentError) as error:
        raise ProtocolViolation("C9.3", f"a word of {len(word)} bytes that is none of ours: {error}") from error
    raise ProtocolViolation("C9.3", f"a word of {len(word)} bytes that is none of ours")


def _part(word: bytes, part_bytes: int) -> Part:
    _, transfer, sequence, number, count, nbytes, rows = _PART_HEAD.unpack_from(word)
    end = _PART_HEAD.size + rows * _SEGMENT
    inline = word[end:]
    if not (rows <= MAX_ROWS and number < count and nbytes <= part_bytes and end <= len(word)):
        raise ProtocolViolation("C9.3", f"part {number} of {count} with {nbytes} bytes in {rows} segments")
    if len(inline) not in (0, nbytes) or len(inline) > INLINE:
        raise ProtocolViolation("C9.3", f"a part of {nbytes} bytes, and {len(inline)} in its word")
    target = Segments.from_bytes(memoryview(word)[_PART_HEAD.size : end])
    if sum(target.length.tolist()) != nbytes:  # as Python's numbers: what a peer says may not fit 64 bits
        raise ProtocolViolation("C9.3", f"a part of {nbytes} bytes whose segments have others")
    return Part((TransferId(transfer.hex()), sequence), number, count, nbytes, target, inline)
