"""Let a connector do everything once, so that what a library keeps once per process is there before anybody counts.

What comes after that, and is not gone at the end of a test, was left behind by the test, the first one included.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

from kvbaton.connector import ConnectorPlugin
from kvbaton.identity import PeerId
from kvbaton_conformance.harness import LocalEnd, Pair, closing, open_end
from kvbaton_conformance.placement import device_of

#: Seconds that each step may take: a connector that is broken is not waited for here.
BOUND = 3.0


def warm_up(plugin: ConnectorPlugin, options: Any, devices: Sequence[int], *, meet: bool) -> None:
    """Open one end; where ``meet`` says that they reach each other two, or one on each of ``devices`` (none: on the
    host), and carry a chunk from each to the next; then close.

    What goes wrong here is for the tests to find.
    """
    ends: list[LocalEnd] = []
    with contextlib.suppress(Exception), closing(ends):
        ends.extend(
            open_end(plugin, options, PeerId.start(name), regions={0: 1 << 16}, device=device_of(name, devices))
            for name in (f"warm-up-{number}" for number in range(max(2, len(devices)) if meet else 1))
        )
        for end, other in itertools.pairwise(ends):
            _carry(Pair(end, other))


def _carry(pair: Pair) -> None:
    pair.connect(BOUND)
    sent = pair.send(pair.rows((0, 0, 64)), pair.rows((0, 0, 64)))
    pair.pump_until(lambda: sent.over, "T5: one chunk ends", BOUND)
