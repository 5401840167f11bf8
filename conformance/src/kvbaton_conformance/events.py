"""What an end has heard, for the reader of a failure: its last events with their times, and what they look like."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvbaton.connector import Completion, Outcome, PeerEvent, Receipt
from kvbaton.errors import KvbatonError

if TYPE_CHECKING:
    from kvbaton_conformance.harness import End

#: Events that are shown of each end.
SHOWN = 12
#: Characters of an error that are shown in a line.
_WIDTH = 160


class EventLog:
    """The last events of one end, in the order in which its ``poll()`` reported them; how many there were of each kind.

    It keeps text only, and no more than :data:`SHOWN` lines of it.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lines: deque[str] = deque(maxlen=SHOWN)
        self._count: Counter[str] = Counter()

    def note(
        self,
        completions: Iterable[Completion] = (),
        receipts: Iterable[Receipt] = (),
        peers: Iterable[PeerEvent] = (),
        faults: Iterable[KvbatonError] = (),
    ) -> None:
        """One pass."""
        for peer in peers:
            state = "up" if peer.up else "down and quiet" if peer.quiet else "down"
            self._line("peer events", f"peer {peer.peer} is {state}{_because(peer.error)}")
        for one in completions:
            quiet = "" if one.terminal else f", source_quiet={one.source_quiet}, target_quiet={one.target_quiet}"
            self._line("completions", f"completion {key(one)} {one.outcome.name}{quiet}{_because(one.error)}")
        for receipt in receipts:
            self._line("receipts", f"receipt {key(receipt)} from {receipt.peer}")
        for fault in faults:
            self._line("faults", f"fault: {shortened(str(fault))}")

    def clear(self) -> None:
        self._lines.clear()
        self._count.clear()

    def __str__(self) -> str:
        total = sum(self._count.values())
        if not total:
            return "heard nothing"
        counts = ", ".join(f"{count} {kind}" for kind, count in self._count.items())
        earlier = total - len(self._lines)
        lines = [f"heard {counts}", *([f"... {earlier} earlier"] if earlier else []), *self._lines]
        return "\n      ".join(lines)

    def _line(self, kind: str, text: str) -> None:
        self._count[kind] += 1
        self._lines.append(f"+{time.monotonic() - self._began:.3f} s {text}")


def key(of: Completion | Receipt) -> str:
    """``(transfer, sequence)``, the transfer by its first eight digits."""
    return f"({of.transfer[:8]}, {of.sequence})"


def shortened(text: str) -> str:
    """One line of a text, not too much of it."""
    line = text.strip().partition("\n")[0]
    return line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..."


def _because(error: Exception | None) -> str:
    return f" ({shortened(str(error) or type(error).__name__)})" if error is not None else ""


def looks_like(source: End, target: End) -> str:
    """The first thing that what both ends have heard shows to be wrong, in a sentence; nothing where nothing does.

    For a condition that did not come true: what is looked at is only what the ends have heard, so it is no proof.
    """
    for end, other in ((source, target), (target, source)):
        down = [event for event in end.peers if event.peer == other.peer and not event.up]
        if down and not other.dead:
            return (
                f"{end.peer} was told that {other.peer} is down{_because(down[-1].error)}: who ended that connection?"
            )
    up = [end for end, other in ((source, target), (target, source)) if _told_up(end, other)]
    if len(up) < 2 and not (source.completions or target.receipts):
        who = "neither end was" if not up else f"only {up[0].peer} was"
        return f"{who} told that its peer is up: the hello, its answer, or the poll() that has to read it"
    failed = [one for one in source.completions if one.outcome is Outcome.FAILED]
    if failed:
        return f"chunk {key(failed[0])} FAILED at its source{_because(failed[0].error)}"
    done = {(one.transfer, one.sequence) for one in source.completions if one.outcome is Outcome.DONE}
    received = {(one.transfer, one.sequence) for one in target.receipts}
    if late := [one for one in source.completions if one.outcome is Outcome.TIMED_OUT]:
        return f"chunk {key(late[0])} passed its deadline: what it waits for at either end"
    if received - done:
        return f"{len(received - done)} chunks were received, and their source was not told: what reports a completion"
    if done - received:
        return f"{len(done - received)} chunks are DONE at their source and were not received: what reports a receipt"
    if not done and not source.dead and not source.hung:
        return "nothing has come of any chunk at either end: does poll() of both ends make the transport move?"
    return ""


def _told_up(end: End, other: End) -> bool:
    return any(event.peer == other.peer and event.up for event in end.peers)
