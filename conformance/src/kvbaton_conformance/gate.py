"""A gate between the guard and any connector: it holds back, reorders and repeats what passes, as transports may.

Everything that it does is within the contract, so nothing above it may come out differently (T4, C7): a slow poller
sees events late and in another order, a full queue takes nothing, a receipt may be reported twice.  With it a test
stops a hand-off at any boundary over a transport that knows nothing of tests::

    gate.hold("receipts")            # the destination does not notice what arrives
    ...
    gate.let_go()

What it can do beyond that stands for transports that fail (:meth:`Gate.fail_next`) or break the contract
(:meth:`Gate.inject`).

Threading: as the connector's.  The switches may be set from the same thread only.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kvbaton.connector import (
    IDLE,
    Capabilities,
    Chunk,
    Completion,
    Endpoint,
    MemoryKind,
    MemoryRegion,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
    TransferConnector,
)
from kvbaton.errors import TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments
from kvbaton_conformance import shared_memory

#: What can be held: new chunks are not taken; completions, receipts are not reported; the transport is not polled.
Held = Literal["submissions", "completions", "receipts", "polls"]

#: How many calls are remembered.
_REMEMBERED = 4096


@dataclass(frozen=True)
class _Failure:
    error: Exception
    source_quiet: bool
    target_quiet: bool
    raises: bool


@dataclass
class Weather:
    """How a poller behaves that is slow and careless, drawn from ``draw``: which of the waiting events it reports, in
    which order, and which receipts it reports again."""

    draw: random.Random
    report: float = 0.5
    repeat: float = 0.2
    _echoes: list[Receipt] = field(default_factory=list)

    def pick(self, waiting: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """What is reported now, in a new order, and what waits on."""
        shuffled = list(waiting)
        self.draw.shuffle(shuffled)
        count = sum(self.draw.random() < self.report for _ in shuffled)
        return shuffled[:count], shuffled[count:]

    def echoes(self, reported: Sequence[Receipt]) -> list[Receipt]:
        """Receipts to report again, some polls after they were reported first."""
        now, self._echoes = self.pick(self._echoes)
        self._echoes += [receipt for receipt in reported if self.draw.random() < self.repeat]
        return now


class Gate:
    """A :class:`~kvbaton.connector.TransferConnector` around ``connector``.

    ``narrow``: capabilities to take back, such as ``revocable=False``; an instance may declare less than it can.
    """

    def __init__(self, connector: TransferConnector, **narrow: Any) -> None:
        self.connector = connector
        self.weather: Weather | None = None
        #: Chunks that the transport has taken, in order, and everything else that it was told: (method, argument).
        self.submitted: deque[Chunk] = deque(maxlen=_REMEMBERED)
        self.calls: deque[tuple[str, Any]] = deque(maxlen=_REMEMBERED)
        #: Holds back only events of transfers for which this is true.
        self.of: Callable[[TransferId], bool] = lambda transfer: True
        self._narrow = narrow
        self._held: set[Held] = set()
        self._completions: list[Completion] = []
        self._receipts: list[Receipt] = []
        self._peers: list[PeerEvent] = []
        self._injected: list[Completion | Receipt | PeerEvent] = []
        self._failures: deque[_Failure] = deque()

    # -- what a test says --------------------------------------------------------------------------------------------

    def hold(self, *what: Held) -> None:
        """From now on hold these back (all but submissions and polls, where none is named)."""
        self._held |= set(what or ("completions", "receipts"))

    def let_go(self, *what: Held) -> None:
        """Hold these back no more (anything, where none is named)."""
        self._held -= set(what or self._held)

    def reverse(self) -> None:
        """Report what is held in the opposite order, once it is let go."""
        self._completions.reverse()
        self._receipts.reverse()

    def fail_next(self, error: Exception, *, source_quiet: bool, target_quiet: bool, raises: bool = False) -> None:
        """The next chunk is not given to the transport: it ends as FAILED, with so much proven.

        ``raises``: ``submit`` raises ``error`` instead, and nothing more is heard of the chunk.
        """
        self._failures.append(_Failure(error, source_quiet, target_quiet, raises))

    def inject(self, event: Completion | Receipt | PeerEvent) -> None:
        """Report ``event`` at the next poll, whether or not it is true, and whatever is held."""
        self._injected.append(event)

    def set_aside(self) -> list[Receipt]:
        """Take the receipts that are held away; :meth:`inject` gives each back."""
        aside, self._receipts = self._receipts, []
        return aside

    @property
    def waiting(self) -> tuple[int, int]:
        """How many completions and receipts are held back now."""
        return len(self._completions), len(self._receipts)

    def called(self, method: str) -> list[Any]:
        """Arguments of the calls of ``method`` (the transfer, or the peer), in order."""
        return [argument for name, argument in self.calls if name == method]

    # -- the protocol ------------------------------------------------------------------------------------------------

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.connector.capabilities, **self._narrow)

    def submit(self, chunk: Chunk) -> bool:
        if "submissions" in self._held:
            return False
        if self._failures:
            failure = self._failures.popleft()
            if failure.raises:
                raise failure.error
            self._completions.append(
                Completion(
                    chunk.transfer, chunk.sequence, Outcome.FAILED, failure.source_quiet, failure.target_quiet,
                    failure.error,
                )
            )  # fmt: skip
            return True
        taken = self.connector.submit(chunk)
        if taken:
            self.submitted.append(chunk)
        return taken

    def poll(self) -> Progress:
        if "polls" not in self._held:
            progress = self.connector.poll()
            self._completions += progress.completions
            self._receipts += progress.receipts
            self._peers += progress.peers
        completions = self._take("completions", self._completions)
        receipts = self._take("receipts", self._receipts)
        if self.weather is not None:
            receipts += self.weather.echoes(receipts)
        peers, self._peers = self._peers, []
        injected, self._injected = self._injected, []
        for event in injected:
            match event:
                case Completion():
                    completions.append(event)
                case Receipt():
                    receipts.append(event)
                case PeerEvent():
                    peers.append(event)
        return Progress(tuple(completions), tuple(receipts), tuple(peers)) or IDLE

    def _take(self, what: Held, waiting: list[Any]) -> list[Any]:
        holds = [what in self._held and self.of(event.transfer) for event in waiting]
        held = [event for event, hold in zip(waiting, holds, strict=True) if hold]
        free = [event for event, hold in zip(waiting, holds, strict=True) if not hold]
        if self.weather is not None:
            free, later = self.weather.pick(free)
            held += later
        waiting[:] = held
        return free

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self.connector.register(regions)

    def metadata(self) -> bytes:
        return self.connector.metadata()

    def connect(self, peer: Endpoint) -> None:
        self.calls.append(("connect", peer.peer))
        self.connector.connect(peer)

    def disconnect(self, peer: PeerId) -> None:
        self.calls.append(("disconnect", peer))
        self.connector.disconnect(peer)

    def outstanding(self) -> int:
        return self.connector.outstanding()

    def close(self) -> None:
        self.calls.append(("close", None))
        shared_memory.notice()
        self.connector.close()

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        return self.connector.allocate(id, kind, device, nbytes)

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        self.calls.append(("grant", (transfer, peer, target)))
        self.connector.grant(transfer, peer, target)

    def revoke(self, transfer: TransferId) -> bool:
        self.calls.append(("revoke", transfer))
        return self.connector.revoke(transfer)

    def fenced(self, peer: PeerId) -> None:
        self.calls.append(("fenced", peer))
        self.connector.fenced(peer)

    def cancel(self, transfer: TransferId) -> None:
        self.calls.append(("cancel", transfer))
        self.connector.cancel(transfer)

    def acknowledge(self, transfer: TransferId) -> None:
        self.calls.append(("acknowledge", transfer))
        self.connector.acknowledge(transfer)

    def wait(self, timeout: float) -> None:
        self.connector.wait(timeout)

    def statistics(self) -> Mapping[str, float]:
        return self.connector.statistics()


def broken_wire() -> TransportError:
    """What a transport says that has failed."""
    return TransportError("the test's own wire broke")
