"""Two guarded connectors of one transport in one process, and a bounded way to make them move.

::

    with open_pair("loopback") as pair:                   # registered, connected, memory filled and poisoned
        sent = pair.send(reads, writes)                   # granted at the target, submitted at the source
        pair.pump_until(lambda: sent.received and sent.done)
        pair.target.memory.check(sent.expected)

Nothing here waits for something without a bound, and a bound that passes says what has been seen until then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvbaton.connector import (
    Chunk,
    Completion,
    ConnectorContext,
    ConnectorPlugin,
    Need,
    Outcome,
    PeerEvent,
    Receipt,
    TransferConnector,
)
from kvbaton.errors import KvbatonError, Outstanding
from kvbaton.guard import Clock, GuardedConnector, GuardLimits, GuardProgress, PeerState
from kvbaton.identity import PeerId, TransferId, new_transfer_id
from kvbaton.segments import Segments
from kvbaton_conformance.inspector import ByteInspector, Image

#: Seconds that a condition may take to come true.  Far more than a healthy transport needs, far less than a test's
#: own limit.
PATIENCE = 10.0

#: Bytes of each region of an end, by id, unless a test asks for others.
REGIONS: Mapping[int, int] = {0: 1 << 16, 1: 1 << 14}


def segments(*rows: tuple[int, int, int]) -> Segments:
    """Segments from rows ``(region, offset, length)``."""
    return Segments.of(rows)


class ConditionNotReached(AssertionError):
    """A condition did not come true within its bound."""


@dataclass(eq=False)
class End:
    """One stage's end: connector, guard, memory, and every event that ``pump`` has seen."""

    peer: PeerId
    #: What the plugin opened.  Tests of a contract talk to ``guard``; this is for the kit's own controls.
    connector: TransferConnector
    guard: GuardedConnector
    memory: ByteInspector
    completions: list[Completion] = field(default_factory=list)
    receipts: list[Receipt] = field(default_factory=list)
    peers: list[PeerEvent] = field(default_factory=list)
    faults: list[KvbatonError] = field(default_factory=list)
    #: A test killed it: there is nothing left to close.
    dead: bool = False

    def pump(self) -> bool:
        """One ``poll()``; whether anything happened."""
        progress = self.guard.poll()
        self.completions += progress.completions
        self.receipts += progress.receipts
        self.peers += progress.peers
        if isinstance(progress, GuardProgress):
            self.faults += progress.faults
        return bool(progress)

    def is_up(self, peer: PeerId) -> bool:
        return self.guard.peer_states().get(peer) is PeerState.UP

    def is_down(self, peer: PeerId) -> bool:
        return self.guard.peer_states().get(peer) in (PeerState.DOWN, None)

    def told_quiet(self, peer: PeerId) -> bool:
        """Whether this end has heard that ``peer`` is down and quiet."""
        return any(event.peer == peer and not event.up and event.quiet for event in self.peers)

    def __str__(self) -> str:
        figures = {name: value for name, value in self.guard.statistics().items() if value}
        return (
            f"{self.peer}: {len(self.receipts)} receipts,"
            f" completions {[(c.sequence, c.outcome.name) for c in self.completions]},"
            f" peers {[(str(e.peer), 'up' if e.up else 'down') for e in self.peers]}, faults {self.faults}, {figures}"
        )


@dataclass(eq=False)
class Sent:
    """One submitted chunk and what both ends have heard of it.  ``expected``: the target's memory once it arrived."""

    chunk: Chunk
    accepted: bool
    expected: Image
    source: End
    target: End

    @property
    def completions(self) -> list[Completion]:
        """In the order in which they were reported."""
        chunk = self.chunk
        return [
            done
            for done in self.source.completions
            if (done.transfer, done.sequence) == (chunk.transfer, chunk.sequence)
        ]

    @property
    def receipts(self) -> list[Receipt]:
        chunk = self.chunk
        return [
            receipt
            for receipt in self.target.receipts
            if (receipt.transfer, receipt.sequence) == (chunk.transfer, chunk.sequence)
        ]

    @property
    def received(self) -> bool:
        return bool(self.receipts)

    @property
    def over(self) -> bool:
        """A terminal completion was reported."""
        return any(completion.terminal for completion in self.completions)

    @property
    def done(self) -> bool:
        """It completed as DONE."""
        return any(completion.outcome is Outcome.DONE for completion in self.completions)


@dataclass(eq=False)
class Pair:
    """A source end and a target end (both can do both).

    ``between`` is called between passes: where a test carries bytes itself, this is where it does.
    """

    source: End
    target: End
    between: Callable[[], object] = lambda: None
    #: The ends, in the order in which a pass polls them.
    order: Sequence[End] = ()

    def __post_init__(self) -> None:
        self.order = self.order or (self.source, self.target)

    def connect(self) -> None:
        """Exchange endpoints and wait until each end has heard that the other is up."""
        source, target = self.source, self.target
        source.guard.connect(target.guard.endpoint())
        target.guard.connect(source.guard.endpoint())
        self.pump_until(lambda: source.is_up(target.peer) and target.is_up(source.peer), "T2: both ends are up")

    def send(
        self,
        reads: Segments,
        writes: Segments,
        *,
        transfer: TransferId | None = None,
        sequence: int = 0,
        base: Image | None = None,
    ) -> Sent:
        """Grant ``writes`` (for a transfer's first chunk) and submit one chunk.

        ``base``: the target's memory before, where more than one chunk is under way (another ``Sent``'s ``expected``).
        """
        known = transfer is not None
        transfer = transfer or new_transfer_id()
        if not known:
            self.target.guard.grant(transfer, self.source.peer, writes)
        chunk = Chunk(transfer, sequence, self.target.peer, reads, writes, reads.nbytes)
        before = base or self.target.memory.image()
        expected = before.with_copy(self.source.memory.image(), reads, writes)
        return Sent(chunk, self.source.guard.submit(chunk), expected, self.source, self.target)

    def pump(self) -> bool:
        """One pass: poll each end once.  Whether anything happened."""
        moved = [end.pump() for end in self.order]
        self.between()
        return any(moved)

    def pump_until(self, condition: Callable[[], bool], what: str = "the condition", bound: float = PATIENCE) -> None:
        """Pump until ``condition()``; raises :class:`ConditionNotReached` after ``bound`` seconds.

        ``what`` begins with a clause: it is the message.
        """
        end = time.monotonic() + bound
        while not condition():
            if time.monotonic() > end:
                raise ConditionNotReached(f"{what}: not reached within {bound:g} s.\n  {self.source}\n  {self.target}")
            if not self.pump():
                self.order[-1].guard.wait(0.001)

    def pump_idle(self, passes: int = 20) -> None:
        """Pump until nothing has happened for ``passes`` passes in a row: for what must *not* come."""
        end = time.monotonic() + PATIENCE
        quiet = 0
        while quiet < passes:
            assert time.monotonic() < end, f"T12: events without end.\n  {self.source}\n  {self.target}"
            quiet = 0 if self.pump() else quiet + 1


def open_end(
    plugin: ConnectorPlugin,
    options: Any,
    peer: PeerId,
    *,
    regions: Mapping[int, int] = REGIONS,
    geometry: bytes = b"",
    limits: GuardLimits | None = None,
    connect_deadline: float = PATIENCE,
    chunk_deadline: float = PATIENCE,
    clock: Clock = time.monotonic,
    seed: int = 0,
) -> End:
    """Open one connector, guarded, with poisoned host memory registered (``regions``: id to bytes)."""
    connector = plugin.open(options, ConnectorContext(peer))
    guard = GuardedConnector(
        connector, transport=plugin.name, version=str(plugin.api_version), peer=peer, geometry=geometry, limits=limits,
        connect_deadline=connect_deadline, chunk_deadline=chunk_deadline, clock=clock,
    )  # fmt: skip
    memory = ByteInspector(str(peer), seed)
    for id, nbytes in regions.items():
        if guard.capabilities.memory_origin == "allocated":
            memory.adopt(guard.allocate(id, "host", 0, nbytes))
        else:
            memory.allocate(id, nbytes)
    guard.register(memory.regions)
    return End(peer, connector, guard, memory)


@contextmanager
def open_pair(
    connector: ConnectorPlugin | str,
    options: Mapping[str, Any] | Any = None,
    *,
    names: tuple[str, str] = ("prefill-0", "decode-0"),
    connect: bool = True,
    **end_options: Any,
) -> Iterator[Pair]:
    """Two ends of one transport in this process, the source's memory filled, connected unless told otherwise.

    ``connector`` is an entry point's name, ``module:object`` or an instance; ``options`` a mapping or an instance of
    its ``Options``; ``end_options`` go to :func:`open_end` for both ends.  On leaving, both ends are closed; an end
    that cannot be, because chunks are outstanding, has its peers fenced first, which in one process is true: nobody
    acts for them any more.
    """
    from kvbaton.plugins import choose_connector

    plugin, valid = choose_connector(connector, Need("host", "same_process"), options)
    ends: list[End] = []
    try:
        for number, name in enumerate(names):
            ends.append(open_end(plugin, valid, PeerId.start(name), seed=number, **end_options))
        pair = Pair(ends[0], ends[1])
        pair.source.memory.fill()
        if connect:
            pair.connect()
        yield pair
    finally:
        close_ends(ends)


def close_ends(ends: Sequence[End]) -> None:
    """Close every end that is open and alive, draining first, within :data:`PATIENCE`."""
    ends = [end for end in ends if not (end.guard.closed or end.dead)]
    for end in ends:
        for peer in end.guard.peer_states():
            end.guard.fenced(peer)
            end.guard.disconnect(peer)
    deadline = time.monotonic() + PATIENCE
    for end in ends:
        while True:
            try:
                end.guard.close()
                break
            except Outstanding:
                if time.monotonic() > deadline:
                    raise
                end.pump()
                end.guard.wait(0.001)
