"""Let a connector do everything once, so that what a library keeps once per process is there before anybody counts.

What comes after that, and is not gone at the end of a test, was left behind by the test, the first one included.
"""

from __future__ import annotations

import contextlib
from typing import Any

from kvbaton.connector import ConnectorPlugin, MemoryKind
from kvbaton.identity import PeerId
from kvbaton_conformance.harness import LocalEnd, Pair, closing, open_end

#: Seconds that each step may take: a connector that is broken is not waited for here.
BOUND = 3.0


def warm_up(plugin: ConnectorPlugin, options: Any, kind: MemoryKind, *, meet: bool) -> None:
    """Open one end, or where ``meet`` says that they reach each other two, and carry one chunk; then close.

    What goes wrong here is for the tests to find.
    """
    ends: list[LocalEnd] = []
    with contextlib.suppress(Exception), closing(ends):
        ends.extend(
            open_end(plugin, options, PeerId.start(name), regions={0: 1 << 16}, memory_kind=kind)
            for name in ("warm-up-0", "warm-up-1")[: 2 if meet else 1]
        )
        if meet:
            pair = Pair(ends[0], ends[1])
            pair.connect(BOUND)
            sent = pair.send(pair.rows((0, 0, 64)), pair.rows((0, 0, 64)))
            pair.pump_until(lambda: sent.over, "T5: one chunk ends", BOUND)
