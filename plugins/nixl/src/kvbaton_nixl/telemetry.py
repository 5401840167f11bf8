"""What NIXL measures of each write, added up (the option ``telemetry``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Measured:
    """Sums over the writes that are done; nothing is kept of a single one.  Read from any thread."""

    def __init__(self) -> None:
        self._writes = 0
        self._descriptors = 0
        self._bytes = 0
        self._posting = 0
        self._writing = 0

    def add(self, record: Any) -> None:
        """``record``: what ``get_xfer_telemetry`` says of a write; its times are in microseconds."""
        self._writes += 1
        self._descriptors += record.descCount
        self._bytes += record.totalBytes
        self._posting += record.postDuration
        self._writing += record.xferDuration

    def figures(self) -> Mapping[str, float]:
        """Counts, bytes and seconds.

        Posting is the time in which NIXL had the calling thread; writing is from there until the connector saw that
        the write was done, so the pause between two looks is in it.
        """
        return {
            "writes_total": self._writes,
            "write_descriptors_total": self._descriptors,
            "write_bytes_total": self._bytes,
            "write_posting_seconds_total": self._posting / 1e6,
            "write_seconds_total": self._writing / 1e6,
        }
