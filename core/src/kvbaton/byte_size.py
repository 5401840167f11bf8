"""A number of bytes as an operator writes it: ``4096``, ``64MiB``, ``2 GB``.  For fields of settings and options."""

from __future__ import annotations

import re
from typing import Annotated, Final

from pydantic import AfterValidator, BeforeValidator, ByteSize, TypeAdapter
from pydantic_core import PydanticCustomError

_UNIT: Final = re.compile(r"^\s*(?:\d+(?:\.\d+)?|\.\d+)\s*(?:[kmgtpe]i?b?|b)?\s*$", re.IGNORECASE)
_BYTES: Final = TypeAdapter(ByteSize)


def _in_bytes(value: object) -> object:
    # pydantic's own texts neither name the units nor refuse "12 lightyears" with a hint
    if isinstance(value, bool) or (isinstance(value, str) and not _UNIT.match(value)):
        raise PydanticCustomError("byte_size", "not a size in bytes; write for example 4096, 64MiB or 2GiB")
    return int(_BYTES.validate_python(value)) if isinstance(value, str) else value


def _positive(value: ByteSize) -> ByteSize:
    if value < 1:
        raise PydanticCustomError("byte_size", "must be at least 1 byte")
    return value


#: At least one, which shows itself with a unit.
Bytes = Annotated[ByteSize, BeforeValidator(_in_bytes), AfterValidator(_positive)]
#: A plain number, for a field with bounds of its own.
InBytes = Annotated[int, BeforeValidator(_in_bytes)]
