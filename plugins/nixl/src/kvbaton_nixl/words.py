"""What peers say to each other: *hellos* between lobbies, and *notes* on links.

Everything here comes from another process, or from anybody who can reach a port of ours: it is decoded strictly, and
what is not exactly a word of ours raises :class:`~kvbaton.errors.ProtocolViolation` (C9.3).
"""

from __future__ import annotations

import enum
import struct
from typing import Annotated

import msgspec

from kvbaton.connector import MemoryKind
from kvbaton.errors import ProtocolViolation
from kvbaton.identity import PeerId, TransferId
from kvbaton.sealed import seal, unseal

#: The first bytes of every note: what it is, and the version of this page.
_MAGIC = b"kvb1"
#: magic, kind, receiver's epoch, sender's epoch, transfer, sequence: 48 bytes, little-endian.
_NOTE = struct.Struct("<4sIQQ16sQ")


class Kind(enum.IntEnum):
    """What a note says."""

    #: All bytes of a chunk have been written.
    WRITTEN = 1
    #: I am here.
    PING = 2
    #: I have nothing under way to you and will post nothing more.
    BYE = 3
    #: A part of a packed chunk is in a slot of yours; the body says which (:mod:`kvbaton_nixl.packing`).
    PACKED = 4
    #: A part of a packed chunk is in its place, and its slot is free again.
    LANDED = 5


#: Notes that have a body behind their head.
_WITH_BODY = frozenset({Kind.PACKED, Kind.LANDED})
#: Segments of a chunk, at most: posting 131,000 descriptors at once takes half a second.
MAX_SEGMENTS = 16384
#: The longest body: more segments than a chunk may have do not come in one part.
MAX_BODY = 1 << 20
#: The longest hello: one with as many regions as an endpoint may announce is well below.
MAX_HELLO = 1 << 20


class Note(msgspec.Struct, frozen=True, array_like=True):
    """A notification on a link.  ``you`` and ``me`` are the epochs of receiver and sender (C1.4)."""

    kind: Kind
    you: int
    me: int
    transfer: TransferId = TransferId("0" * 32)
    sequence: int = 0
    body: bytes = b""

    def encode(self) -> bytes:
        head = _NOTE.pack(_MAGIC, self.kind, self.you, self.me, bytes.fromhex(self.transfer), self.sequence)
        return head + self.body

    @classmethod
    def decode(cls, data: bytes) -> Note:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
        if not _NOTE.size <= len(data) <= _NOTE.size + MAX_BODY:
            raise ProtocolViolation("C9.3", f"a notification of {len(data)} bytes: ours have {_NOTE.size} and a body")
        magic, kind, you, me, transfer, sequence = _NOTE.unpack_from(data)
        if magic != _MAGIC:
            raise ProtocolViolation("C9.3", f"a notification that begins with {magic!r}, not {_MAGIC!r}")
        try:
            known = Kind(kind)
        except ValueError:
            raise ProtocolViolation("C9.3", f"a notification of unknown kind {kind}") from None
        body = bytes(data[_NOTE.size :])
        if bool(body) != (known in _WITH_BODY):
            raise ProtocolViolation("C9.3", f"a notification ({known.name}) with a body of {len(body)} bytes")
        return cls(known, you, me, TransferId(transfer.hex()), sequence, body)


_Word = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Region(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A region that may be written through a link, as its owner addresses it.  Bytes."""

    id: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
    kind: MemoryKind
    device: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    address: _Word
    length: Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]


class Lobby(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An endpoint's metadata: where hellos are heard, and the secret that shows that one was given the endpoint."""

    agent: bytes
    secret: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

    def encode(self) -> bytes:
        return seal(self)

    @classmethod
    def decode(cls, data: bytes) -> Lobby:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
        return unseal(data, cls, MAX_HELLO)


class Staging(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where packed parts are received: ``count`` slots of ``nbytes`` each, one after the other, from ``region`` on."""

    region: Region
    count: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``me`` has made a link for ``you``: its agent, and what may be written through it.

    ``secret`` is that of your endpoint, ``proof`` that of mine: who was given only one of them can speak for nobody.
    """

    me: PeerId
    you: PeerId
    secret: bytes
    proof: bytes
    agent: bytes
    regions: tuple[Region, ...]
    staging: Staging | None = None

    def encode(self) -> bytes:
        return seal(self)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else."""
        return unseal(data, cls, MAX_HELLO)
