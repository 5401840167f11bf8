"""The simulated transport: what a chunk may come to, one move at a time.

A chunk is *queued* (it can be taken back), then *posted* (its source may be read and its target written at any time),
*landing* (some of its segments are written), and *landed*.  Each stage has a connector of its own; the wire between
them outlives a sender's process, as bytes in sockets do: what a dead sender had posted may still land until the
receiver has closed its end (C6.4).

The transport keeps the contract.  What it says is true, but not more than that: its character (buffering, revocable,
exact or not) is the scenario's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from kvbaton.connector import (
    API_VERSION,
    IDLE,
    Availability,
    Capabilities,
    Chunk,
    Completion,
    ConnectorBase,
    ConnectorContext,
    Endpoint,
    MemoryRegion,
    Need,
    Outcome,
    PeerEvent,
    Progress,
    Receipt,
)
from kvbaton.errors import PeerLost, TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments

if TYPE_CHECKING:
    from kvbaton_conformance.simulate.scenario import Scenario


class State(enum.Enum):
    QUEUED = "queued"
    POSTED = "posted"
    LANDING = "landing"
    LANDED = "landed"
    #: It will never write anything (any more).
    VOID = "void"


@dataclass(eq=False)
class Flight:
    """One accepted chunk.  ``name``: (transfer, sequence)."""

    chunk: Chunk
    source: Connector
    state: State = State.QUEUED
    #: The source's bytes, once they have been copied (a buffering transport).
    copy: list[npt.NDArray[np.uint8]] | None = None
    #: The source has been told how it ended.
    told: bool = False
    #: It does not move until somebody wakes it.
    stalled: bool = False
    #: The source's end was cut off: nothing is read there any more.
    cut: bool = False

    @property
    def name(self) -> tuple[TransferId, int]:
        return self.chunk.transfer, self.chunk.sequence

    @property
    def reads(self) -> bool:
        """Whether source memory may still be read: until its end is told, for what has landed may be sent again."""
        moving = self.writes or (self.state is State.LANDED and not self.told)
        return moving and self.copy is None and not self.cut

    @property
    def writes(self) -> bool:
        """Whether target memory may still be written."""
        return self.state in (State.POSTED, State.LANDING)

    @property
    def over(self) -> bool:
        return self.told and self.state in (State.LANDED, State.VOID)


class Link(enum.Enum):
    CONNECTING = "connecting"
    UP = "up"
    #: Being closed: its peer is dead.
    CLOSING = "closing"
    DOWN = "down"


@dataclass
class Wire:
    """All connectors of one world.  ``landing(flight, segments)`` is called before bytes are written."""

    scenario: Scenario
    landing: Callable[[Flight, Segments], None]
    #: Called where a connector is closed while this may still read its memory.
    closed: Callable[[Flight], None]
    connectors: dict[PeerId, Connector] = field(default_factory=dict)
    flights: list[Flight] = field(default_factory=list)

    def tidy(self) -> None:
        self.flights = [flight for flight in self.flights if not flight.over]

    def find(self, name: tuple[TransferId, int]) -> Flight | None:
        return next((flight for flight in self.flights if flight.name == name), None)

    def of(self, transfer: TransferId) -> Iterator[Flight]:
        return (flight for flight in self.flights if flight.chunk.transfer == transfer)

    # -- moves; each says whether it could be made -------------------------------------------------------------------

    def start(self, flight: Flight) -> bool:
        if flight.state is not State.QUEUED or flight.source.dead:
            return False
        flight.state = State.POSTED if flight.source.reaches(flight.chunk) else State.VOID
        return True

    def take_copy(self, flight: Flight) -> bool:
        """A buffering transport reads the source once, says DONE, and writes later."""
        if not (self.scenario.buffering and flight.state is State.POSTED and flight.copy is None and not flight.told):
            return False
        flight.copy = flight.source.read(flight.chunk.source)
        flight.source.tell(flight, Outcome.DONE, source=True, target=False)
        return True

    def land(self, flight: Flight, half: bool) -> bool:
        """Write the first half of the segments, or all that are left; the last brings the receipt."""
        target = self.connectors.get(flight.chunk.peer)
        if not flight.writes or flight.stalled or target is None or target.dead:
            return False
        segments, source = flight.chunk.target, flight.chunk.source
        middle = len(segments) // 2
        part = (
            slice(middle, None)
            if flight.state is State.LANDING
            else slice(0, middle)
            if half and middle
            else slice(0, None)
        )
        self.landing(flight, segments[part])
        data = flight.copy[part] if flight.copy is not None else flight.source.read(source[part])
        target.write(segments[part], data)
        if part.stop is not None:
            flight.state = State.LANDING
            return True
        flight.state = State.LANDED
        target.receipts.append(Receipt(flight.source.peer, *flight.name))
        return True

    def report(self, flight: Flight) -> bool:
        """Tell the source that a chunk has landed."""
        if flight.told or flight.state is not State.LANDED or flight.stalled or flight.source.dead:
            return False
        flight.source.tell(flight, Outcome.DONE, source=True, target=True)
        return True

    def fail(self, flight: Flight, proof: bool) -> bool:
        """A chunk fails.  Without proof it may land all the same."""
        if flight.told or flight.source.dead or flight.state not in (State.POSTED, State.LANDING, State.VOID):
            return False
        if flight.state is State.VOID or (proof and self.scenario.exact):
            flight.state = State.VOID
            flight.source.tell(flight, Outcome.FAILED, source=True, target=self.scenario.exact)
        else:
            flight.source.tell(flight, Outcome.FAILED, source=False, target=False)
        return True

    def link_up(self, one: PeerId, other: PeerId) -> bool:
        """``one`` learns that it is connected to ``other``."""
        mine, theirs = self.connectors.get(one), self.connectors.get(other)
        if mine is None or theirs is None or mine.dead or theirs.dead or mine.links.get(other) is not Link.CONNECTING:
            return False
        if theirs.links.get(one) not in (Link.CONNECTING, Link.UP):
            return False
        mine.links[other] = Link.UP
        mine.events.append(PeerEvent(other, up=True))
        return True

    def close_link(self, one: PeerId, other: PeerId) -> bool:
        """``one`` has closed its end towards a dead peer: nothing of it can be written any more."""
        mine = self.connectors.get(one)
        if mine is None or mine.dead or mine.links.get(other) is not Link.CLOSING:
            return False
        mine.links[other] = Link.DOWN
        self.void(lambda flight: flight.source.peer == other and flight.chunk.peer == one)
        mine.events.append(PeerEvent(other, up=False, quiet=True))
        return True

    def joins(self, one: PeerId, other: PeerId) -> bool:
        """Whether each of the two has its connection to the other up."""
        ends = (self.connectors.get(one), other), (self.connectors.get(other), one)
        return all(mine is not None and mine.links.get(peer) is Link.UP for mine, peer in ends)

    def drop(self, one: PeerId, other: PeerId, quiet: bool) -> bool:
        """``one`` finds its connection broken.  ``quiet``: its end is closed for good; else what is under way stays."""
        return self._end(one, other, quiet, Link.UP, "the connection broke")

    def give_up(self, one: PeerId, other: PeerId, quiet: bool) -> bool:
        """``one`` has waited too long to be connected; the other end may be up."""
        return self._end(one, other, quiet, Link.CONNECTING, "the handshake took too long")

    def _end(self, one: PeerId, other: PeerId, quiet: bool, link: Link, why: str) -> bool:
        mine = self.connectors.get(one)
        if mine is None or mine.dead or mine.links.get(other) is not link:
            return False
        mine.links[other] = Link.DOWN
        if quiet:
            # nobody writes here for it any more, and nobody reads here for it
            self.void(lambda flight: flight.source.peer == other and flight.chunk.peer == one)
            self.void(lambda flight: flight.source is mine and flight.chunk.peer == other and flight.reads)
            for flight in self.flights:
                flight.cut = flight.cut or (flight.source is mine and flight.chunk.peer == other)
        for flight in [f for f in self.flights if f.source is mine and f.chunk.peer == other and not f.told]:
            if flight.state is State.QUEUED:
                flight.state = State.VOID
            over = flight.state is State.VOID and self.scenario.exact
            mine.tell(flight, Outcome.FAILED, source=not flight.reads, target=over)
        mine.events.append(PeerEvent(other, up=False, quiet=quiet, error=PeerLost(why, peer=other)))
        return True

    def void(self, which: Callable[[Flight], bool]) -> None:
        for flight in self.flights:
            if flight.writes and which(flight):
                flight.state = State.VOID


class Connector(ConnectorBase):
    """One stage's end."""

    def __init__(self, wire: Wire, peer: PeerId) -> None:
        scenario = wire.scenario
        self.wire = wire
        self.peer = peer
        self.dead = False
        self.capabilities = Capabilities(
            same_process=True, revocable=scenario.revocable, disconnect_fences=True,
            quiet="exact" if scenario.exact else "peer_death",
        )  # fmt: skip
        self.links: dict[PeerId, Link] = {}
        self.completions: list[Completion] = []
        self.receipts: list[Receipt] = []
        self.events: list[PeerEvent] = []
        #: What the next call of this name raises.
        self.raises: set[str] = set()
        self._untold = 0
        self._revoked: set[TransferId] = set()
        self._memory: dict[int, npt.NDArray[np.uint8]] = {}
        wire.connectors[peer] = self

    @property
    def up(self) -> bool:
        """Whether anybody is connected."""
        return not self.dead and Link.UP in self.links.values()

    def tell(self, flight: Flight, outcome: Outcome, *, source: bool, target: bool) -> None:
        flight.told = True
        self._untold -= 1
        error = None if outcome is Outcome.DONE else TransportError("the simulated wire failed it")
        self.completions.append(Completion(*flight.name, outcome, source, target, error))

    def read(self, segments: Segments) -> list[npt.NDArray[np.uint8]]:
        return [self._memory[region][offset : offset + length].copy() for region, offset, length in segments.triples()]

    def write(self, segments: Segments, data: Sequence[npt.NDArray[np.uint8]]) -> None:
        for (region, offset, length), piece in zip(segments.triples(), data, strict=True):
            self._memory[region][offset : offset + length] = piece

    def kill(self) -> None:
        """The process has died: what it had posted is on its own now, what was meant for it is void."""
        self.dead = True
        for flight in self.wire.flights:
            if flight.source is self:
                flight.told = True
                if flight.state is State.QUEUED:
                    flight.state = State.VOID
                elif flight.reads:
                    flight.copy = self.read(flight.chunk.source)  # what was in its sockets
        self.wire.void(lambda flight: flight.chunk.peer == self.peer)

    # -- the protocol ------------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._memory = {region.id: region.view() for region in regions}

    def metadata(self) -> bytes:
        return b"simulated"

    def connect(self, peer: Endpoint) -> None:
        for old in [old for old, link in self.links.items() if old.name == peer.peer.name and old != peer.peer]:
            if self.links[old] in (Link.UP, Link.CONNECTING):
                self.wire.drop(self.peer, old, quiet=False) or self.wire.give_up(self.peer, old, quiet=False)
        self.links.setdefault(peer.peer, Link.CONNECTING)

    def disconnect(self, peer: PeerId) -> None:
        if peer in self.links:
            self.links[peer] = Link.CLOSING

    def fenced(self, peer: PeerId) -> None:
        for flight in self.wire.flights:
            if flight.source is self and flight.chunk.peer == peer and not flight.told:
                flight.state = State.VOID
                self.tell(flight, Outcome.FAILED, source=True, target=True)

    def submit(self, chunk: Chunk) -> bool:
        if self._untold >= self.wire.scenario.queue:
            return False
        flight = Flight(chunk, self)
        self._untold += 1
        self.wire.flights.append(flight)
        if "submit" in self.raises:
            self.raises.discard("submit")
            self.wire.start(flight)
            flight.told = True
            self._untold -= 1
            raise RuntimeError("the simulated transport raises while posting")
        if not self.reaches(chunk):
            flight.state = State.VOID
            self.tell(flight, Outcome.FAILED, source=True, target=True)
        return True

    def reaches(self, chunk: Chunk) -> bool:
        """Whether both ends are open for it: what a destination has closed or revoked, it takes no more."""
        target = self.wire.connectors.get(chunk.peer)
        return (
            target is not None
            and not target.dead
            and self.links.get(chunk.peer) is Link.UP
            and target.links.get(self.peer) in (Link.CONNECTING, Link.UP)
            and chunk.transfer not in target._revoked
        )

    def cancel(self, transfer: TransferId) -> None:
        for flight in self.wire.of(transfer):
            if flight.source is self and flight.state is State.QUEUED and not flight.told:
                flight.state = State.VOID
                self.tell(flight, Outcome.CANCELLED, source=True, target=True)

    def revoke(self, transfer: TransferId) -> bool:
        mine = [flight for flight in self.wire.of(transfer) if flight.chunk.peer == self.peer]
        if not self.wire.scenario.revocable or any(flight.state is State.LANDING for flight in mine):
            return False
        self._revoked.add(transfer)
        for flight in mine:
            if flight.writes or flight.state is State.QUEUED:
                flight.state = State.VOID
        return True

    def poll(self) -> Progress:
        if "poll" in self.raises:
            self.raises.discard("poll")
            raise RuntimeError("the simulated transport raises while polling")
        if not (self.completions or self.receipts or self.events):
            return IDLE
        progress = Progress(tuple(self.completions), tuple(self.receipts), tuple(self.events))
        self.completions, self.receipts, self.events = [], [], []
        return progress

    def outstanding(self) -> int:
        return self._untold + len(self.completions)

    def wait(self, timeout: float) -> None:
        pass

    def close(self) -> None:
        reads = next((flight for flight in self.wire.flights if flight.source is self and flight.reads), None)
        if reads is not None:
            self.wire.closed(reads)
        self._memory = {}


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Plugin:
    """Opens connectors of one wire."""

    name = "simulated"
    api_version = API_VERSION
    Options: type[Any] = Options

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def probe(self, need: Need) -> Availability:
        return Availability(usable=True)

    def open(self, options: Any, context: ConnectorContext) -> Connector:
        return Connector(self._wire, context.peer)
