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
from kvbaton_cuda_ipc.mapping import MAX_OFFER

#: Chunks that one word can name.
MAX_NAMED = 4096
_NAME = struct.Struct("<16sQ")
_COUNT = struct.Struct("<Q")
_WRITTEN, _HEARD, _BYE = b"w", b"h", b"b"

#: A chunk: transfer and sequence.
Key: TypeAlias = tuple[TransferId, int]


@dataclass(frozen=True, slots=True)
class Written:
    """All bytes of these chunks are where they should be."""

    chunks: tuple[Key, ...]


@dataclass(frozen=True, slots=True)
class Heard:
    """So many chunks I have been told of in all, and have passed on."""

    count: int


@dataclass(frozen=True, slots=True)
class Bye:
    """I have nothing under way to you, have unmapped your memory, and will write nothing more."""


Said: TypeAlias = Written | Heard | Bye


def encode(word: Said) -> bytes:
    match word:
        case Written(chunks):
            return _WRITTEN + b"".join(_NAME.pack(bytes.fromhex(transfer), sequence) for transfer, sequence in chunks)
        case Heard(count):
            return _HEARD + _COUNT.pack(count)
        case Bye():
            return _BYE


def decode(data: bytes) -> Said:
    """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
    kind, body = data[:1], data[1:]
    if kind == _WRITTEN and body and len(body) % _NAME.size == 0 and len(body) <= MAX_NAMED * _NAME.size:
        return Written(tuple((TransferId(name.hex()), sequence) for name, sequence in _NAME.iter_unpack(body)))
    if kind == _HEARD and len(body) == _COUNT.size:
        return Heard(*_COUNT.unpack(body))
    if data == _BYE:
        return Bye()
    raise ProtocolViolation("C9.3", f"a word of {len(data)} bytes that is none of ours")


def batches(chunks: Sequence[Key]) -> list[Written]:
    """As few words as name all chunks."""
    return [Written(tuple(chunks[start : start + MAX_NAMED])) for start in range(0, len(chunks), MAX_NAMED)]


class Metadata(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an endpoint says of its connector: how its wire is reached, and its memory; each checked by itself."""

    card: Annotated[bytes, msgspec.Meta(max_length=16 << 10)]
    offer: Annotated[bytes, msgspec.Meta(max_length=MAX_OFFER)]

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Metadata:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
        try:
            return msgspec.msgpack.decode(data, type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
            raise ProtocolViolation("C9.3", f"{len(data)} bytes that are no metadata of ours: {error}") from error
