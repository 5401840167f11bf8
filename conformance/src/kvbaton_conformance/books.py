"""Whether a service that has nothing to do has given everything back, as its own statistics say it.

What a stage measures in use and what the coordinator has promised are two figures (C2.4); both must be nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvbaton import PDRuntime
from kvbaton_conformance.clauses import require

#: Seconds that what has ended may take to be retired everywhere.
SETTLE = 60.0

_NOTHING = (
    "transfers", "blocks_used", "blocks_promised", "outstanding", "inflight_bytes", "quarantined_bytes", "grants",
    "late_writes", "strays",
)  # fmt: skip


def check_books(runtime: PDRuntime) -> None:
    """Every credit is back, once; every stage is empty; nobody broke the protocol (C2.5, C8.4, C7.4).

    Waits :data:`SETTLE` seconds for what has ended to be retired.  Raises
    :class:`~kvbaton_conformance.clauses.ClauseBroken`.
    """

    def settled() -> bool:
        books = runtime.statistics()
        own = books["coordinator"]
        return not (own["live"] or own["waiting"] or own["transfers"]) and all(
            not books[name]["engine"]["transfers"] for name in runtime.stages
        )

    until(settled, SETTLE, "C2.5", "every stage retires every transfer")
    books = runtime.statistics()
    for name in runtime.stages:
        book, figures = books["coordinator"]["credits"][name], {**books[name]["engine"], **books[name]["transport"]}
        out = {key: book[key] for key in ("blocks_out", "slots_out", "repeated_returns") if book[key]}
        require(not out, "C2.5", f"credits of {name} do not balance", seen=out)
        wrong = {key: figures[key] for key in _NOTHING if figures.get(key)}
        require(not wrong, "C8.4", f"the books of {name} do not balance: these should be 0", seen=wrong)
    lies = {key: count for key, count in books["coordinator"]["counts"].items() if key.startswith("violations")}
    require(not lies, "C7.4", "the coordinator saw the protocol broken", seen=lies)


def until(condition: Callable[[], bool], seconds: float, clause: str, what: str) -> None:
    """Wait for ``condition``, which is asked twenty times a second; too long breaks ``clause``."""
    give_up = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        require(time.monotonic() < give_up, clause, f"{what}: not so within {seconds:g} s")
        pause.wait(0.05)
