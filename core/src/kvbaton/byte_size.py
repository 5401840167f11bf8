"""A number of bytes as an operator writes it: ``4096``, ``64MiB``, ``2 GB``."""

from __future__ import annotations

import re
from typing import Final

from pydantic import ByteSize, TypeAdapter
from pydantic_core import PydanticCustomError

_UNIT: Final = re.compile(r"^\s*(?:\d+(?:\.\d*)?|\.\d+)\s*(?:[kmgtpe]i?b?|b)?\s*$", re.IGNORECASE)
_BYTES: Final = TypeAdapter(ByteSize)


def in_bytes(value: object) -> object:
    """What is written with a unit, as a number; anything else as it is.  Goes before the validation of a number.

    Raises :class:`pydantic_core.PydanticCustomError` for what is no size.
    """
    # pydantic's own texts neither name the units nor refuse "12 lightyears" with a hint
    if isinstance(value, bool) or (isinstance(value, str) and not _UNIT.match(value)):
        raise PydanticCustomError("byte_size", "not a size in bytes; write for example 4096, 64MiB or 2GiB")
    return int(_BYTES.validate_python(value)) if isinstance(value, str) else value
