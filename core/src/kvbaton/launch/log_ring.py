"""The last lines of a stream of bytes, in bounded memory."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

#: A carriage return starts a line anew (progress bars), which for a log is a line of its own.
_LINE_END = re.compile(rb"\r\n|\n|\r")


class LogRing:
    """Holds the last ``lines`` lines, each cut at ``width`` bytes.  One thread feeds, any may read.

    ``shown``: what is kept of a line, for people to read; ``feed`` returns it as it came.
    """

    def __init__(self, lines: int, width: int = 4000, shown: Callable[[str], str] = str) -> None:
        self._lines: deque[str] = deque(maxlen=lines)
        self._width = width
        self._shown = shown
        self._partial = b""

    def feed(self, data: bytes) -> list[str]:
        """Take in what was read; returns the lines that it completed, without empty ones."""
        *whole, rest = _LINE_END.split(self._partial + data)
        # a line without an end must not grow without one
        self._partial = rest[: self._width]
        return self._keep(whole)

    def finish(self) -> list[str]:
        """The stream is over: what has no line end is a line as well."""
        rest, self._partial = self._partial, b""
        return self._keep([rest])

    def tail(self) -> list[str]:
        """The last lines, oldest first."""
        while True:
            try:
                return list(self._lines)
            except RuntimeError:  # fed meanwhile
                continue

    def _keep(self, lines: list[bytes]) -> list[str]:
        found = [text for line in lines if (text := line[: self._width].decode(errors="replace").rstrip())]
        self._lines.extend(map(self._shown, found))
        return found
