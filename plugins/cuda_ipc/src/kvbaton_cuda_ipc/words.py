"""What wires say to each other before anything else: the *card* in an endpoint, and the *hello*.

Everything here comes from another process, or from anybody who can reach a port of ours: it is decoded strictly, and
what is not exactly ours raises :class:`~kvbaton.errors.ProtocolViolation` (C9.3).
"""

from __future__ import annotations

import hashlib
from typing import Annotated, TypeVar

import msgspec

from kvbaton.errors import ProtocolViolation
from kvbaton.identity import PeerId

#: The version of this page and of :mod:`kvbaton_cuda_ipc.wire`.
VERSION = 1
#: Bits of a *token*: what tells the messages of one sender from everybody else's.
TOKEN_BITS = 62
#: The longest body of a hello; it must fit an endpoint's metadata where it is also told there.
MAX_BODY = 48 << 10
#: The longest hello, and the longest card.
MAX_HELLO = 64 << 10

Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << TOKEN_BITS)]
Secret = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How a wire is reached: the address of its worker, the token that hellos carry, and the secret they must say."""

    version: int
    protocol: str
    address: bytes
    lobby: Token
    secret: Secret

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Card:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else, and for another version."""
        card = _decode(data, cls)
        if card.version != VERSION:
            raise ProtocolViolation("T2", f"version {card.version} of the wire, and this is {VERSION}")
        return card


class Hello(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``me`` talks to ``you``, and wants to be answered under ``token``.

    ``secret`` is that of your card, ``proof`` that of mine: who was given only one of them can speak for nobody.
    ``body`` is the protocol's own.
    """

    version: int
    me: PeerId
    you: PeerId
    secret: Secret
    proof: Secret
    token: Token
    body: Annotated[bytes, msgspec.Meta(max_length=MAX_BODY)]

    def encode(self) -> bytes:
        return _encode(self)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else, and for another version."""
        hello = _decode(data, cls)
        if hello.version != VERSION:
            raise ProtocolViolation("T2", f"version {hello.version} of the wire, and this is {VERSION}")
        return hello


_T = TypeVar("_T")


def _encode(value: msgspec.Struct) -> bytes:
    body = msgspec.msgpack.encode(value)
    return body + _sum(body)


def _sum(body: bytes) -> bytes:
    """UCX crashes or hangs on a worker's address of which one byte is wrong, so damage is found before it sees it."""
    return hashlib.blake2b(body, digest_size=8).digest()


def _decode(data: bytes, kind: type[_T]) -> _T:
    if len(data) > MAX_HELLO:
        raise ProtocolViolation("C9.3", f"{len(data)} bytes for a {kind.__name__}: at most {MAX_HELLO} are accepted")
    body, checksum = data[:-8], data[-8:]
    if _sum(body) != checksum:
        raise ProtocolViolation("C9.3", f"{len(data)} bytes that are no {kind.__name__}, or a damaged one")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:  # bombs are malformed bytes too
        raise ProtocolViolation("C9.3", f"{len(data)} bytes that are no {kind.__name__}: {error}") from error
