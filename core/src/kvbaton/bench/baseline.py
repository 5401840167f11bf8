"""What a transport is made of, used without kvbaton: the rate that a bench sets beside.

A plugin offers it by a method ``baseline(options, regions)`` (:class:`~kvbaton.connector.WithBaseline`).  Both ends
live in the processes of kvbaton's own two ends, over the same memory, and the two ways take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvbaton.segments import Segments


class Baseline(Protocol):
    """One end.  All calls come from one thread; each end is a source or a target, for good.

    An exception from any method is said in the bench's result in place of a rate, and harms nothing else.
    """

    name: str
    #: Whether the target learns by itself that everything has come; else the clock stops when :meth:`move` returns.
    tells: bool

    def address(self) -> bytes:
        """What the other end needs in order to :meth:`meet` this one."""

    def meet(self, peer: bytes) -> None:
        """Connect to the end with that address; both do."""

    def prepare_source(self, chunks: Sequence[tuple[Segments, Segments]]) -> None:
        """What is moved from now on, in the batches in which kvbaton moves it.  Not timed."""

    def prepare_target(self, writes: Sequence[Segments]) -> None:
        """The same at the target.  Not timed."""

    def begin(self) -> None:
        """Target: everything is about to come once more.  Not timed."""

    def move(self) -> None:
        """Source: move everything once; return when nothing is left to do here."""

    def arrived(self) -> int:
        """Target: how many batches have come since the last call; called again and again, never waits.

        Source: called while the target has not said that it has everything, for what is still to be driven here.
        """

    def close(self) -> None:
        """Release everything but the regions."""
