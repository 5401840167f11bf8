"""What two CUDA IPC connectors tell each other: metadata, and words on the wire.

Everything here comes from another process: it is decoded strictly, and what is not exactly ours raises
:class:`~kvbaton.errors.ProtocolViolation` (C9.3).
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import msgspec

from kvbaton.errors import ProtocolViolation
from kvbaton.identity import TransferId
from kvbaton_cuda_ipc.counters import MAX_LANES, Where
from kvbaton_cuda_ipc.mapping import MAX_OFFER

#: Chunks that one word can name.
MAX_NAMED = 4096
_NAME = struct.Struct("<16sQ")
_COUNT = struct.Struct("<Q")
_LAUNCH = struct.Struct("<BQ")
_WRITTEN, _BEGUN, _WATCHING, _HEARD, _BYE = b"w", b"g", b"c", b"h", b"b"

#: A chunk: transfer and sequence.
Key: TypeAlias = tuple[TransferId, int]


@dataclass(frozen=True, slots=True)
class Written:
    """All bytes of these chunks are where they should be."""

    chunks: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Begun:
    """All bytes of these chunks are where they should be once my counter of this lane says this number, or more."""

    lane: int
    number: int
    chunks: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Watching:
    """I read your counters: of what you begin from now on, tell me with which launch it went."""


@dataclass(frozen=True, slots=True)
class Heard:
    """So many chunks I have been told of in all, and have passed on."""

    count: int


@dataclass(frozen=True, slots=True)
class Bye:
    """I have nothing under way to you, have unmapped your memory, and will write nothing more."""


Said: TypeAlias = Written | Begun | Watching | Heard | Bye


def encode(word: Said) -> bytes:
    match word:
        case Written(chunks):
            return _WRITTEN + _names(chunks)
        case Begun(lane, number, chunks):
            return _BEGUN + _LAUNCH.pack(lane, number) + _names(chunks)
        case Watching():
            return _WATCHING
        case Heard(count):
            return _HEARD + _COUNT.pack(count)
        case Bye():
            return _BYE


def _names(chunks: Sequence[Key]) -> bytes:
    return b"".join(_NAME.pack(bytes.fromhex(transfer), sequence) for transfer, sequence in chunks)


def _named(body: bytes) -> tuple[Key, ...]:
    """None where they are not ours."""
    if len(body) % _NAME.size or len(body) > MAX_NAMED * _NAME.size:
        return ()
    return tuple((TransferId(name.hex()), sequence) for name, sequence in _NAME.iter_unpack(body))


def decode(data: bytes) -> Said:
    """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
    kind, body = data[:1], data[1:]
    if kind == _WRITTEN and (chunks := _named(body)):
        return Written(chunks)
    if kind == _BEGUN and (chunks := _named(body[_LAUNCH.size :])):
        lane, number = _LAUNCH.unpack_from(body)
        if lane < MAX_LANES:
            return Begun(lane, number, chunks)
    if data == _WATCHING:
        return Watching()
    if kind == _HEARD and len(body) == _COUNT.size:
        return Heard(*_COUNT.unpack(body))
    if data == _BYE:
        return Bye()
    raise ProtocolViolation("C9.3", f"a word of {len(data)} bytes that is none of ours")


def batches(chunks: Sequence[Key]) -> list[tuple[Key, ...]]:
    """In as few pieces as fit a word each."""
    return [tuple(chunks[start : start + MAX_NAMED]) for start in range(0, len(chunks), MAX_NAMED)]


class Metadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint says of its connector: how its wire is reached, and its memory, each checked by itself; and
    where its counters are, if it counts."""

    card: Annotated[bytes, msgspec.Meta(max_length=16 << 10)]
    offer: Annotated[bytes, msgspec.Meta(max_length=MAX_OFFER)]
    counters: Where | None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            raise ProtocolViolation("C9.3", f"{len(data)} bytes that are no metadata of ours: {error}") from error
