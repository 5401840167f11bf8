"""Order and identity on one channel in one direction: the rules of C9.4 and C1.4 without a socket.

Numbers start at 1 and grow by 1.  A sender needs no more than a counter; this is the receiver's half.
"""

from __future__ import annotations

import enum

from kvbaton.errors import LocalProtocolError
from kvbaton.identity import PeerId


class Verdict(enum.Enum):
    """What an envelope is to its receiver.  All but ``NEXT`` are dropped; the value is the reason that is counted."""

    NEXT = "next"
    REPEAT = "repeat"
    STALE_EPOCH = "stale-epoch"
    FOREIGN_EPOCH = "foreign-epoch"
    #: Something before it is missing: the channel is lost from here on.
    GAP = "gap"
    #: It arrived after a gap.
    LOST = "lost"


class InboundSequence:
    """Judges each envelope of one sender's epoch, in the order of arrival.  Memory does not grow with their number."""

    __slots__ = ("_epoch", "_last", "_lost")

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self._last = 0
        self._lost = False

    @property
    def expected(self) -> int:
        """The number of the next envelope."""
        return self._last + 1

    def judge(self, epoch: int, seq: int) -> Verdict:
        """Take note of one envelope and say what to do with it."""
        # the epoch is looked at first: the numbers of another process lifetime say nothing about this one's (C1.4)
        if epoch != self._epoch:
            return Verdict.STALE_EPOCH if epoch < self._epoch else Verdict.FOREIGN_EPOCH
        if seq <= self._last:
            return Verdict.REPEAT
        if self._lost:
            return Verdict.LOST
        if seq != self._last + 1:
            self._lost = True
            return Verdict.GAP
        self._last = seq
        return Verdict.NEXT


class Lifetimes:
    """The newest process lifetime of each stage that was added: its name comes back only with a newer one."""

    __slots__ = ("_newest",)

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}

    def add(self, peer: PeerId) -> None:
        """Raises :class:`~kvbaton.errors.LocalProtocolError` for one that is not newer than what was added (C1.4)."""
        newest = self._newest.get(peer.name, -1)
        if peer.epoch <= newest:
            raise LocalProtocolError(
                f"C1.4: {peer} is not newer than {peer.name}@{newest:x}, which was added before", peer=peer
            )
        self._newest[peer.name] = peer.epoch

    def stale(self, name: str, epoch: int) -> bool:
        """Whether a newer one of that name was added."""
        return epoch < self._newest.get(name, 0)
