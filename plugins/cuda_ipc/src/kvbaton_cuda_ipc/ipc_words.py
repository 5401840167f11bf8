"""What two CUDA IPC connectors tell each other: metadata, and words on the wire.

Everything here comes from another process: it is decoded strictly, and what is not exactly ours raises
:class:`~kvbaton.errors.ProtocolViolation` (C9.3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Annotated, TypeAlias

import msgspec

from kvbaton.errors import ProtocolViolation
from kvbaton.identity import TransferId, WireTransferId
from kvbaton_cuda_ipc.counters import MAX_LANES, Where
from kvbaton_cuda_ipc.mapping import MAX_OFFER

#: Chunks that one word can name.
MAX_NAMED = 4096
_Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Numbers: TypeAlias = Annotated[tuple[_Number, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMED)]

#: A chunk: transfer and sequence.
Key: TypeAlias = tuple[TransferId, int]


class Chunks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Some chunks of one transfer, by their sequences."""

    transfer: WireTransferId
    sequences: _Numbers


_Some: TypeAlias = Annotated[tuple[Chunks, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMED)]


class Launch(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """All bytes of these chunks are where they should be once my counter of this lane says this number, or more."""

    lane: Annotated[int, msgspec.Meta(ge=0, lt=MAX_LANES)]
    number: _Number
    chunks: _Some


class Written(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="written"):
    """All bytes of these chunks are where they should be."""

    chunks: _Some


class Begun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="begun"):
    """Launches, those of each lane in their order: all that I have to tell of, for a word costs more than what it
    says."""

    launches: Annotated[tuple[Launch, ...], msgspec.Meta(min_length=1, max_length=MAX_NAMED)]


class Watching(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="watching"):
    """I read your counters: of what you begin from now on, tell me with which launch it went."""


class Heard(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="heard"):
    """So many chunks I have been told of in all, and have passed on."""

    count: _Number


class Bye(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, tag="bye"):
    """I have nothing under way to you, have unmapped your memory, and will write nothing more."""


Said: TypeAlias = Written | Begun | Watching | Heard | Bye
_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Said)


def encode(word: Said) -> bytes:
    return _encoder.encode(word)


def decode(data: bytes) -> Said:
    """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
    try:
        word = _decoder.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:
        raise ProtocolViolation("C9.3", f"a word of {len(data)} bytes that is none of ours: {error}") from error
    match word:
        case Written(chunks):
            named = count(chunks)
        case Begun(launches):
            named = sum([count(launch.chunks) for launch in launches])
        case _:
            return word
    if named > MAX_NAMED:
        raise ProtocolViolation("C9.3", f"a word that names {named} chunks, and {MAX_NAMED} may be")
    return word


def count(chunks: Iterable[Chunks]) -> int:
    """How many they are."""
    return sum([len(some.sequences) for some in chunks])


def _chunks(keys: Iterable[Key]) -> tuple[Chunks, ...]:
    """Those of one transfer that follow each other, together."""
    return tuple(
        [
            Chunks(transfer, tuple([sequence for _, sequence in those]))
            for transfer, those in groupby(keys, itemgetter(0))
        ]
    )


def written(keys: Sequence[Key]) -> list[Written]:
    """In as few words as name them all."""
    return [Written(_chunks(keys[start : start + MAX_NAMED])) for start in range(0, len(keys), MAX_NAMED)]


def begun(launches: Iterable[tuple[int, int, Sequence[Key]]]) -> list[Begun]:
    """Lane, number and chunks of each, in as few words as name them all, or nearly so."""
    words: list[Begun] = []
    together: list[Launch] = []
    left = MAX_NAMED
    for lane, number, keys in launches:
        for start in range(0, len(keys), MAX_NAMED):
            some = keys[start : start + MAX_NAMED]
            if len(some) > left:
                words.append(Begun(tuple(together)))
                together, left = [], MAX_NAMED
            together.append(Launch(lane, number, _chunks(some)))
            left -= len(some)
    if together:
        words.append(Begun(tuple(together)))
    return words


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
