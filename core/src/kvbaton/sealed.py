"""A value as bytes that tell of damage: for what two connectors of one plugin say to each other before anything else.

Libraries crash or hang on an address of theirs of which one byte is wrong, so damage is found before they see it.  It
is no protection from who means harm: anybody can seal.
"""

from __future__ import annotations

import hashlib
from typing import Final, TypeVar

import msgspec

from kvbaton.errors import ProtocolViolation

_T = TypeVar("_T")
_LENGTH: Final = 8


def seal(value: msgspec.Struct) -> bytes:
    """``value`` as msgpack, and a checksum."""
    body = msgspec.msgpack.encode(value)
    return body + checksum(body)


def unseal(data: bytes, kind: type[_T], most: int) -> _T:
    """What :func:`seal` was given, a ``kind``.

    Raises :class:`~kvbaton.errors.ProtocolViolation` for anything else, and for more than ``most`` bytes (C9.3).
    """
    if len(data) > most:
        raise ProtocolViolation("C9.3", f"{len(data)} bytes for a {kind.__name__}: at most {most} are accepted")
    body, found = data[:-_LENGTH], data[-_LENGTH:]
    if checksum(body) != found:
        raise ProtocolViolation("C9.3", f"{len(data)} bytes that are no {kind.__name__}, or a damaged one")
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as error:  # bombs are malformed bytes too
        raise ProtocolViolation("C9.3", f"{len(data)} bytes that are no {kind.__name__}: {error}") from error


def checksum(body: bytes) -> bytes:
    """What :func:`seal` puts behind ``body``."""
    return hashlib.blake2b(body, digest_size=_LENGTH).digest()
