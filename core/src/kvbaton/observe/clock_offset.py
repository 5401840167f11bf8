"""By how much another process's clock is ahead of ours, as far as messages tell.

A stage answered after it was asked and before it was heard: its clock, at that moment, showed what it says.  Every
answer so bounds the offset of the two clocks, and all of them together bound it best.  On one host both clocks are
the system's one, the offset is nothing, and no answer ever speaks against that.
"""

from __future__ import annotations

import math


class ClockOffset:
    """How far one clock is ahead of ours, in seconds, between :attr:`least` and :attr:`most`."""

    __slots__ = ("least", "most")

    def __init__(self) -> None:
        self.least, self.most = -math.inf, math.inf

    def learn(self, asked: float, answered: float, heard: float) -> bool:
        """Take one answer into account: ``answered`` on its clock, the others on ours.

        False, and nothing learnt, where it contradicts what is known: the clocks have drifted apart since, and another
        estimate must begin.
        """
        least, most = max(self.least, answered - heard), min(self.most, answered - asked)
        if least > most:
            return False
        self.least, self.most = least, most
        return True

    @property
    def seconds(self) -> float:
        """To be taken from its times to have ours.  Nothing where that may be, for two clocks of two hosts do not
        agree to a message's time by chance.
        """
        if self.least <= 0.0 <= self.most:
            return 0.0
        return (self.least + self.most) / 2

    @property
    def doubt(self) -> float:
        """By how much :attr:`seconds` may be wrong."""
        return 0.0 if self.least <= 0.0 <= self.most else (self.most - self.least) / 2
