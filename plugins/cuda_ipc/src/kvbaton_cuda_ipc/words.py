"""What wires say to each other before anything else: the *card* in an endpoint, and the *hello*.

Everything here comes from another process, or from anybody who can reach a port of ours: it is decoded strictly, and
what is not exactly ours raises :class:`~kvbaton.errors.ProtocolViolation` (C9.3).
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from kvbaton.errors import ProtocolViolation
from kvbaton.identity import PeerId
from kvbaton.sealed import seal, unseal

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
        return seal(self)

    @classmethod
    def decode(cls, data: bytes) -> Card:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else, and for another version."""
        card = unseal(data, cls, MAX_HELLO)
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
        return seal(self)

    @classmethod
    def decode(cls, data: bytes) -> Hello:
        """Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else, and for another version."""
        hello = unseal(data, cls, MAX_HELLO)
        if hello.version != VERSION:
            raise ProtocolViolation("T2", f"version {hello.version} of the wire, and this is {VERSION}")
        return hello
