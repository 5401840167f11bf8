"""Lists of buffers that the kernel fills or empties from the front, a part at a time."""

from __future__ import annotations

from collections import deque

#: Where bytes go that nobody wants.
VOID = memoryview(bytearray(64 << 10))


def void(nbytes: int) -> list[memoryview]:
    """Buffers for ``nbytes`` bytes that nobody wants."""
    whole, rest = divmod(nbytes, len(VOID))
    return [VOID] * whole + ([VOID[:rest]] if rest else [])


def advance(buffers: deque[memoryview], count: int) -> None:
    """The first ``count`` bytes are done."""
    while count:
        if count < len(buffers[0]):
            buffers[0] = buffers[0][count:]
            return
        count -= len(buffers.popleft())
