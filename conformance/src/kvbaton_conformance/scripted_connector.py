"""A connector without a transport: it moves nothing and says what it is told to say.

With it the guard is tested alone, also against everything that a plugin must never do: completions twice or for
chunks nobody submitted, peers that nobody connected, exceptions out of any method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.connector import (
    IDLE,
    Capabilities,
    Chunk,
    Completion,
    ConnectorBase,
    Endpoint,
    MemoryKind,
    MemoryRegion,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
)
from kvbaton.errors import Outstanding
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments


@dataclass
class ManualClock:
    """Time that passes when a test says so; seconds."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class ScriptedConnector(ConnectorBase):
    """Every call is noted in ``calls`` as ``(method, first argument)``; the methods below say what ``poll`` reports.

    ``raises`` maps a method's name to what it raises, until removed.  With ``full`` set, ``submit`` takes nothing.
    """

    capabilities: Capabilities = field(default_factory=lambda: Capabilities(same_process=True, revocable=True))
    full: bool = False
    revocation: bool = True
    raises: dict[str, Exception] = field(default_factory=dict)
    calls: list[tuple[str, object]] = field(default_factory=list)
    #: Accepted and not completed, in order.
    posted: list[Chunk] = field(default_factory=list)
    _completions: list[Completion] = field(default_factory=list)
    _receipts: list[Receipt] = field(default_factory=list)
    _peers: list[PeerEvent] = field(default_factory=list)

    # -- what the test says ------------------------------------------------------------------------------------------

    def complete(
        self,
        chunk: Chunk,
        outcome: Outcome = Outcome.DONE,
        *,
        source: bool = True,
        target: bool = True,
        error: Exception | None = None,
    ) -> None:
        """The next ``poll`` reports ``chunk`` as completed, whether or not that makes sense."""
        self.posted = [posted for posted in self.posted if posted is not chunk]
        self._completions.append(Completion(chunk.transfer, chunk.sequence, outcome, source, target, error))

    def receive(self, peer: PeerId, transfer: TransferId, sequence: int) -> None:
        self._receipts.append(Receipt(peer, transfer, sequence))

    def up(self, peer: PeerId) -> None:
        self._peers.append(PeerEvent(peer, up=True))

    def down(self, peer: PeerId, *, quiet: bool = False, error: Exception | None = None) -> None:
        self._peers.append(PeerEvent(peer, up=False, quiet=quiet, error=error))

    def say(self, *, completions: Sequence[Any] = (), receipts: Sequence[Any] = (), peers: Sequence[Any] = ()) -> None:
        """The next ``poll`` reports these, too, whatever they are."""
        self._completions += completions
        self._receipts += receipts
        self._peers += peers

    def called(self, method: str) -> list[object]:
        """The first arguments of the calls of ``method``."""
        return [argument for name, argument in self.calls if name == method]

    # -- the protocol ------------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._note("register", regions)

    def metadata(self) -> bytes:
        self._note("metadata")
        return b"scripted"

    def connect(self, peer: Endpoint) -> None:
        self._note("connect", peer.peer)

    def disconnect(self, peer: PeerId) -> None:
        self._note("disconnect", peer)

    def submit(self, chunk: Chunk) -> bool:
        self._note("submit", chunk)
        if self.full:
            return False
        self.posted.append(chunk)
        return True

    def poll(self) -> Progress:
        self._note("poll")
        progress = Progress(tuple(self._completions), tuple(self._receipts), tuple(self._peers))
        self._completions, self._receipts, self._peers = [], [], []
        return progress or IDLE

    def outstanding(self) -> int:
        return len(self.posted)

    def close(self) -> None:
        self._note("close")
        if self.posted:
            raise Outstanding(f"T10: {len(self.posted)} chunks are outstanding", outstanding=len(self.posted))

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        self._note("allocate", id)
        return super().allocate(id, kind, device, nbytes)

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        self._note("grant", transfer)

    def revoke(self, transfer: TransferId) -> bool:
        self._note("revoke", transfer)
        return self.revocation

    def fenced(self, peer: PeerId) -> None:
        self._note("fenced", peer)

    def cancel(self, transfer: TransferId) -> None:
        self._note("cancel", transfer)

    def acknowledge(self, transfer: TransferId) -> None:
        self._note("acknowledge", transfer)

    def wait(self, timeout: float) -> None:
        self._note("wait", timeout)

    def _note(self, method: str, argument: object = None) -> None:
        self.calls.append((method, argument))
        if method in self.raises:
            raise self.raises[method]
