"""One deployment in which nothing moves by itself: its moves, and what must hold after each.

A *move* is a tuple of plain values, its name first, for instance ``("pump", "decode-0", 2)``; :meth:`World.make` makes
it, or says that it cannot be made now.  Moves name stages by their names, requests by their numbers and chunks by
(request, generation, sequence), so that a move still means the same when others before it are left out.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from kvbaton import messages
from kvbaton.connector import DeviceEvent
from kvbaton.control import ChannelStatistics
from kvbaton.engine import (
    Admission,
    ComputedRange,
    FinishReason,
    Request,
    Role,
    StageCallbacks,
    StageEngine,
    StepOutput,
)
from kvbaton.errors import DuplicateRequest, KvbatonError
from kvbaton.geometry import KVMap
from kvbaton.guard import GuardedConnector
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Coordinator, Recovery
from kvbaton.handoff.table import CoordinatorPhase, Milestones, PeerStatus
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.reservation import Reservation
from kvbaton.segments import Segments
from kvbaton.settings import Settings, load
from kvbaton.stage.engine_loop import Command, EngineLoop
from kvbaton.stage.stage import Stage
from kvbaton.stage.worker import join, open_guard
from kvbaton_conformance.scripted import ScriptedDevice, ScriptedEngine, ScriptedLayout, ScriptedModel
from kvbaton_conformance.simulate.scenario import Scenario
from kvbaton_conformance.simulate.wire import Connector, Flight, Link, Options, Plugin, State, Wire

#: A move: its name, and to what.
Move = tuple[Any, ...]
#: What tokens a request must get: token ids, exit depths, reason.
Answer = tuple[tuple[int, ...], tuple[int, ...], FinishReason]


class Broken(AssertionError):
    """An invariant does not hold: ``clause`` and what happened."""

    def __init__(self, clause: str, text: str) -> None:
        super().__init__(f"{clause}: {text}")
        self.clause = clause


class Engines(Protocol):
    """What a world computes with.  :class:`ScriptedEngines` is the kit's; an engine's author brings another.

    An engine must do all that it does within the calls that it is given, and with little memory.
    """

    def open(self, role: Role) -> tuple[StageEngine, ScriptedDevice]:
        """A fresh engine, and the device whose events a world completes."""

    def answer(self, request: Request) -> Answer:
        """What an undisaggregated run says."""


class ScriptedEngines:
    """Engines without a model, as small as the scenario wants them."""

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._model = ScriptedModel(planes=scenario.planes, token_bytes=(3, 2), final_bytes=8)

    def open(self, role: Role) -> tuple[StageEngine, ScriptedDevice]:
        s = self._scenario
        blocks = s.prefill_blocks if role is Role.PREFILL else s.decode_blocks
        layout = ScriptedLayout(
            blocks=blocks, block_tokens=s.block_tokens, gap=1 if role is Role.DECODE else 0,
            final_slots=s.final_slots, compute_slots=s.compute_slots,
        )  # fmt: skip
        device = ScriptedDevice(automatic=False)
        engine = ScriptedEngine(
            role, self._model, layout, chunk=s.step_tokens, device=device, prefix_caching=s.prefix_caching
        )
        return engine, device

    def answer(self, request: Request) -> Answer:
        return self._model.generate(request)


@dataclass(eq=False)
class Asked:
    """One request, as its caller sees it."""

    number: int
    request: Request
    #: What the caller calls it; another request had the same name before, and ended.
    key: RequestKey
    generations: list[TransferId] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ended: fx.Ended | None = None
    aborted: bool = False


class SimulatedChannel:
    """A stage's end of its channel: what it has heard is put there by a move."""

    def __init__(self, peer: PeerId) -> None:
        self.peer = peer
        self.lost: str | None = None
        #: Said to the stage, not heard yet; and what it will hear at its next turn.
        self.coming: deque[messages.Message] = deque()
        self.heard: list[messages.Message] = []
        #: Said by the stage, not heard by the coordinator yet.
        self.going: deque[messages.Message] = deque()
        #: Said by the stage, which keeps it until it says more or flushes.
        self.held: list[messages.Message] = []

    def send(self, message: messages.Message) -> None:
        self.hold(message)
        self.flush()

    def hold(self, message: messages.Message) -> None:
        if self.lost is None:
            self.held.append(message)

    def flush(self) -> None:
        self.going += self.held
        self.held.clear()

    def deliver(self, message: messages.Message) -> None:
        """From the coordinator: on its way.  Nothing comes after the loss (C9.4)."""
        if self.lost is None:
            self.coming.append(message)

    def receive(self) -> list[messages.Message]:
        heard, self.heard = self.heard, []
        return heard

    def wait(self, timeout: float) -> None:
        pass

    def wake(self) -> None:
        pass

    def sever(self, reason: str) -> None:
        self.lost = self.lost or reason

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics()

    def close(self) -> None:
        pass


@dataclass(eq=False)
class Seat:
    """One life of one stage."""

    peer: PeerId
    role: Role
    engine: Watched
    device: ScriptedDevice
    connector: Connector
    guard: GuardedConnector
    stage: Stage
    loop: EngineLoop
    channel: SimulatedChannel
    frozen: bool = False
    #: Its process is dead.
    dead: bool = False
    #: The coordinator has been told that it was joined.
    joined: bool = False
    #: The coordinator wants it dead; it wants it started again.
    doomed: bool = False
    wanted: bool = False
    #: Its channel is gone, and the coordinator has yet to notice.
    unnoticed: bool = False
    #: Transfers that its machine was told to stop.
    cancelled: set[TransferId] = field(default_factory=set)
    #: Its engine has probably something to do; its pump has.
    eager: bool = True
    stirred: bool = True

    @property
    def calls(self) -> bool:
        """Whether its pump has probably something to do."""
        connector = self.connector
        return bool(
            self.stirred or self.channel.coming or connector.completions or connector.receipts or connector.events
        )

    @property
    def over(self) -> bool:
        return self.dead or self.stage.ended


@dataclass(eq=False)
class _Held:
    """Memory of a transfer at one engine: what may be written there (D), or read from there (P)."""

    segments: dict[int, list[tuple[int, int]]]

    def covers(self, segments: Segments) -> bool:
        return all(
            any(start <= offset and offset + length <= end for start, end in self.segments.get(region, ()))
            for region, offset, length in segments.triples()
        )


def _held(segments: Segments) -> _Held:
    found: dict[int, list[tuple[int, int]]] = {}
    for region, offset, length in segments.triples():
        found.setdefault(region, []).append((offset, offset + length))
    return _Held(found)


class Watched:
    """An engine, and what it has given and taken back: seen from outside, by the protocol alone."""

    def __init__(self, engine: StageEngine, device: ScriptedDevice, world: World, peer: PeerId) -> None:
        self.inner = engine
        self._device = device
        self._world = world
        self._peer = peer
        self._map = KVMap(engine.geometry, engine.geometry)
        self._prompts: dict[TransferId, int] = {}
        #: D: what may be written, by transfer, from its reservation until its release.
        self.owned: dict[TransferId, _Held] = {}
        #: Transfers that the engine has been asked to take and not to release.
        self.live: set[TransferId] = set()
        #: Device work launched for a transfer.
        self._launched: dict[TransferId, list[DeviceEvent]] = {}
        self._callbacks: StageCallbacks | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def attach(self, callbacks: StageCallbacks) -> None:
        self._callbacks = callbacks
        self.inner.attach(_Overheard(callbacks, self))

    def reserve_transfer(self, admission: Admission) -> None:
        self._prompts[admission.transfer] = len(admission.request.prompt)
        self.live.add(admission.transfer)
        self.inner.reserve_transfer(admission)

    def step(self) -> Sequence[StepOutput]:
        """What a decode step launches is on the device for as long as a move pleases."""
        outputs = self.inner.step()
        if self.inner.role is Role.DECODE:
            for output in outputs:
                self.launched(output.transfer, self._device.event())
        return outputs

    def accept_import(self, transfer: TransferId, valid: int) -> None:
        if self._world.stage(self._peer).machine.phase(transfer) is None:
            self._world.breaks(
                "C1.3", f"{self._peer.name} imports {self._world.name_of(transfer)}, which its stage has given up"
            )
        if transfer in self._world.seats[self._peer.name].cancelled:
            self._world.breaks(
                "C1.3", f"{self._peer.name} imports {self._world.name_of(transfer)}, which was cancelled before"
            )
        if transfer not in self.live:
            self._world.breaks(
                "C1.3", f"{self._peer.name} imports {self._world.name_of(transfer)}, which it has released"
            )
        missing = [f for f in self._world.wire.of(transfer) if f.writes and f.chunk.peer == self._peer]
        if missing:
            self._world.breaks(
                "C4.2",
                f"{self._peer.name} imports {self._world.name_of(transfer)} while {self._world.tell(missing[0])} is"
                " still to land",
            )
        self.inner.accept_import(transfer, valid)

    def suspend_transfer(self, transfer: TransferId) -> DeviceEvent | None:
        event = self.inner.suspend_transfer(transfer)
        if self.inner.role is Role.DECODE:  # P's work has an event for each range, and those say more
            self.launched(transfer, event)
        return event

    def launched(self, transfer: TransferId, event: DeviceEvent | None) -> None:
        if event is not None and transfer in self.live:
            self._launched.setdefault(transfer, []).append(event)

    def release_transfer(self, transfer: TransferId) -> None:
        """Nothing may be able to touch the memory any more, whoever it belongs to next."""
        if transfer in self.live:
            for flight in self._world.wire.of(transfer):
                if flight.source.peer == self._peer and flight.reads:
                    self._world.breaks(
                        "C5.1", f"{self._peer.name} gives up the source of {self._world.tell(flight)}, still to be read"
                    )
                if flight.chunk.peer == self._peer and flight.writes:
                    self._world.breaks(
                        "C5.2",
                        f"{self._peer.name} gives up the target of {self._world.tell(flight)}, still to be written",
                    )
            if not all(event.query() for event in self._launched.get(transfer, ())):
                self._world.breaks(
                    "C5.3", f"{self._peer.name} gives up {self._world.name_of(transfer)} while its device works on it"
                )
        self._launched.pop(transfer, None)
        self.live.discard(transfer)
        self.owned.pop(transfer, None)
        self._prompts.pop(transfer, None)
        self.inner.release_transfer(transfer)

    def reserved(self, reservation: Reservation) -> None:
        tables, end = reservation.arrays(), self._prompts[reservation.transfer]
        segments = Segments.empty()
        if end > reservation.valid:
            segments = self._map.plan(tables, tables, reservation.valid, end)[0]
        self.owned[reservation.transfer] = _held(
            segments.concat(self.inner.geometry.final_segment(reservation.final_slot))
        )

    def refused(self, transfer: TransferId, reason: str) -> None:
        self.live.discard(transfer)
        self._prompts.pop(transfer, None)
        if not self._world.may_refuse(self._peer, transfer):
            self._world.breaks(
                "C2.4", f"{self._peer.name} has no room for {self._world.name_of(transfer)}, and its credit was given:"
                f" {reason}",
            )  # fmt: skip


class _Overheard:
    """Callbacks of an engine on their way to the stage."""

    def __init__(self, callbacks: StageCallbacks, watched: Watched) -> None:
        self._callbacks = callbacks
        self._watched = watched

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        return self._callbacks.can_schedule(transfer, tokens)

    def prefill_submitted(self, computed: ComputedRange) -> None:
        self._watched.launched(computed.transfer, computed.ready)
        self._callbacks.prefill_submitted(computed)

    def reserved(self, reservation: Reservation) -> None:
        self._watched.reserved(reservation)
        self._callbacks.reserved(reservation)

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> None:
        self._watched.refused(transfer, reason)
        self._callbacks.refused(transfer, reason, retry)

    def activated(self, transfer: TransferId) -> None:
        self._callbacks.activated(transfer)


#: What comes before what, by the order of evidence (C4): a milestone of a transfer never comes after a later one.
_ORDER = {
    Milestones.PLACED: 0, Milestones.RESERVED: 1, Milestones.PREFILL_STARTED: 2, Milestones.COMMITTED: 3,
    Milestones.RECEIVED: 4, Milestones.ACTIVATED: 5,
}  # fmt: skip
#: A generation in one of these has not everything at D.
EXPOSED = (CoordinatorPhase.RESERVING, CoordinatorPhase.PREFILLING, CoordinatorPhase.COMMITTED)
_RETIREMENTS = frozenset({Milestones.SOURCE_RETIRED, Milestones.DESTINATION_RETIRED})


@lru_cache(maxsize=4096)
def _settings(chunk_bytes: int, chunk_segments: int, inflight_bytes: int, unreceipted: int) -> Settings:
    settings, _ = load(
        overrides={
            "model": "simulated", "transfer.chunk_bytes": chunk_bytes, "transfer.chunk_segments": chunk_segments,
            "transfer.inflight_bytes": inflight_bytes, "transfer.unreceipted_chunks": unreceipted,
        }
    )  # fmt: skip
    return settings


class World:
    """See the module's text.  ``tell`` is given a line for each thing that happens, where a story is wanted."""

    def __init__(
        self,
        scenario: Scenario,
        engines: Engines | None = None,
        story: Callable[[str], None] | None = None,
    ) -> None:
        self.scenario = scenario
        self.engines = engines or ScriptedEngines(scenario)
        self.now = 1000.0
        self.wire = Wire(scenario, self._landing, self._closed)
        self.seats: dict[str, Seat] = {}
        #: Earlier lives of stages that were started again.
        self.former: list[Seat] = []
        self.asked: list[Asked] = []
        #: Faults have stopped.
        self.fair_since: float | None = None
        self.moves = 0
        self.handoffs = 0
        self._story = story
        self._plugin = Plugin(self.wire)
        self._epoch = 0
        self._transfers: list[TransferId] = []
        self._owner: dict[TransferId, Asked] = {}
        self._reached: dict[TransferId, set[str]] = {}
        self._refusals: set[TransferId] = set()
        self._pairs: dict[TransferId, tuple[PeerId, PeerId]] = {}
        self._keys: dict[RequestKey, Asked] = {}
        #: Seconds in which somebody was waiting to be connected.
        self._connecting = 0.0
        #: Something has happened that a stage may be given up for, or a request fail for.
        self.excused = False
        #: Stages have been connected once, so that requests have been served.
        self._served = False
        self._excused: set[int] = set()
        #: Stages of which a chunk has failed without proof, so that only a fence can end it.
        self._unproven: set[PeerId] = set()
        #: Words about transfers that were heard, by stage and direction, for replays.
        self._history: dict[tuple[str, bool], deque[messages.Message]] = {}
        #: When each stage last had something under way.
        self._under_way: dict[PeerId, float] = {}
        self._echoed = 0
        #: The coordinator has given a stage or a connection up, having started stages again in vain.
        self._given_up = False
        self._broken: Broken | None = None
        self._settings = _settings(
            scenario.chunk_bytes, scenario.chunk_segments, scenario.inflight_bytes, scenario.unreceipted_chunks
        )
        recovery = Recovery(scenario.attempts, scenario.recompute, restarts=3 if scenario.restarts else 0)
        self.coordinator = Coordinator(new_id=self._new_id, recovery=recovery)
        self._doing: Mapping[str, Callable[..., bool]] = {
            name.removeprefix("_do_"): getattr(self, name) for name in dir(self) if name.startswith("_do_")
        }
        for role, count in ((Role.PREFILL, scenario.prefills), (Role.DECODE, scenario.decodes)):
            for index in range(count):
                self._start(f"{role.value}-{index}", role)

    # -- looking -----------------------------------------------------------------------------------------------------

    @property
    def unended(self) -> list[Asked]:
        return [asked for asked in self.asked if asked.ended is None]

    @property
    def quiet(self) -> bool:
        """Every request has ended and nobody knows a transfer any more."""
        return not len(self.coordinator) and all(asked.ended is not None for asked in self.asked)

    @property
    def must_serve(self) -> bool:
        """Whether nothing that has happened is an excuse for not serving, once faults have stopped."""
        return self.scenario.restarts and not (self.coordinator.stopping or self._given_up)

    @property
    def whole(self) -> bool:
        """Every stage is up and connected to all others, as the coordinator has it and as it is.

        A fault is over once it has been told: a connection may have broken before and its stage not have said so yet.
        """
        up = [view.peer for view in self.coordinator.peers() if view.status is PeerStatus.UP]
        living = [seat for seat in self.seats.values() if not (seat.over or seat.unnoticed or seat.doomed)]
        roles = {seat.peer: seat.role for seat in living}
        return len(up) == len(roles) == len(self.seats) and all(
            self.coordinator.connected(p, d) and self.wire.joins(p, d)
            for p in up if roles.get(p) is Role.PREFILL for d in up if roles.get(d) is Role.DECODE
        )  # fmt: skip

    def name_of(self, transfer: TransferId | None) -> str:
        """A transfer in words: its request, and the generation where it is not the first."""
        asked = self._owner.get(transfer) if transfer is not None else None
        if asked is None or transfer is None:
            return "an unknown transfer"
        generation = asked.generations.index(transfer)
        return f"r{asked.number}" + (f" (again, {generation})" if generation else "")

    def tell(self, flight: Flight) -> str:
        return f"chunk {flight.chunk.sequence} of {self.name_of(flight.chunk.transfer)}"

    def chunk(self, flight: Flight) -> tuple[int, int, int]:
        """What a move calls a chunk."""
        asked = self._owner[flight.chunk.transfer]
        return asked.number, asked.generations.index(flight.chunk.transfer), flight.chunk.sequence

    def _flight(self, chunk: tuple[int, int, int]) -> Flight | None:
        number, generation, sequence = chunk
        if number >= len(self.asked) or generation >= len(self.asked[number].generations):
            return None
        return self.wire.find((self.asked[number].generations[generation], sequence))

    def may_refuse(self, peer: PeerId, transfer: TransferId) -> bool:
        """Whether a refusal was ordered."""
        return transfer in self._refusals

    def stage(self, peer: PeerId) -> Stage:
        """A stage that is up."""
        return self.seats[peer.name].stage

    def links(self) -> Iterator[tuple[Seat, PeerId, Link]]:
        for seat in self.seats.values():
            if not seat.over:
                for peer, link in tuple(seat.connector.links.items()):
                    yield seat, peer, link

    # -- moves -------------------------------------------------------------------------------------------------------

    def make(self, move: Move) -> bool:
        """Make a move and check everything; whether it could be made.  Raises :class:`Broken`."""
        self.moves += 1
        made = self._doing[move[0]](*move[1:])
        if self._broken is not None:
            raise self._broken
        return made

    def breaks(self, clause: str, text: str) -> None:
        """An invariant does not hold, as seen from within a call by core, which would catch what is raised there."""
        self._broken = self._broken or Broken(clause, text)

    def _do_submit(self, number: int) -> bool:
        if number < len(self.asked):
            return False
        while len(self.asked) < number:  # left out of a shortened run: it ended before it began
            self.asked.append(
                Asked(
                    len(self.asked),
                    self.scenario.request(len(self.asked)),
                    RequestKey(""),
                    ended=fx.Ended(fx.Ending.CANCELLED),
                )
            )
        # names are used again as soon as they are free (C1.1)
        key = next(k for k in map(RequestKey, map(str, itertools.count())) if self._free(k))
        asked = Asked(number, self.scenario.request(number), key)
        self.asked.append(asked)
        self._say(f"a caller asks for r{number} ({len(asked.request.prompt)} tokens)")
        before, self._keys[key] = self._keys.get(key), asked
        try:
            effects = self.coordinator.submit(key, asked.request, self.now)
        except KvbatonError as error:
            self._say(f"r{number} is refused: {error}")
            asked.ended = fx.Ended(fx.Ending.FAILED, cause=str(error))
            if before is not None:
                self._keys[key] = before
            if not self.excused and self._served:
                raise Broken("C6.3", f"r{number} is refused, and nothing has happened: {error}") from error
            return True
        self._served = self._served or any(seat.connector.up for seat in self.seats.values())
        self._carry_out(effects)
        return True

    def _free(self, key: RequestKey) -> bool:
        asked = self._keys.get(key)
        return asked is None or asked.ended is not None

    def _do_again(self, number: int) -> bool:
        """A second request under the name of one that is live: it must be refused (C1.1)."""
        if number >= len(self.asked) or self.asked[number].ended is not None:
            return False
        try:
            self.coordinator.submit(self.asked[number].key, self.scenario.request(number), self.now)
        except DuplicateRequest:
            return True
        except KvbatonError:
            return False
        raise Broken("C1.1", f"a second request under the name of r{number} was taken while it is live")

    def _do_stop(self) -> bool:
        """Everything ends (C6.2)."""
        if self.coordinator.stopping:
            return False
        self._say("everything is to stop")
        self.excused = True
        self._carry_out(self.coordinator.fatal("stopped", self.now))
        if self.unended:
            raise Broken("C6.2", f"r{self.unended[0].number} is live after the stop")
        return True

    def _do_replay(self, name: str, to_stage: bool, index: int) -> bool:
        """A word about a transfer that was heard long ago is heard again."""
        history = self._history.get((name, to_stage))
        seat = self.seats[name]
        if not history or seat.over:
            return False
        message = history[index % len(history)]
        self._echoed += isinstance(message, messages.Retired)
        (seat.channel.coming if to_stage else seat.channel.going).append(message)
        self._say(f"a {self._text(message)} {'to' if to_stage else 'from'} {name} comes once more")
        return True

    def _heard(self, name: str, to_stage: bool, message: messages.Message) -> None:
        if "replay" in self.scenario.faults and messages.family_of(message) == "transfer":
            self._history.setdefault((name, to_stage), deque(maxlen=64)).append(message)

    def _do_abort(self, number: int) -> bool:
        if number >= len(self.asked) or self.asked[number].ended is not None:
            return False
        self._say(f"the caller of r{number} gives up")
        self.asked[number].aborted = True
        self._carry_out(self.coordinator.abort(self.asked[number].key, self.now))
        return True

    def _do_pump(self, name: str, hears: int) -> bool:
        """A stage's pump makes one pass, having heard so many of the messages that are on their way."""
        seat = self.seats[name]
        if seat.over or seat.frozen:
            return False
        channel = seat.channel
        for _ in range(min(hears, len(channel.coming))):
            message = channel.coming.popleft()
            self._say(f"  {name} hears {self._text(message)}")
            channel.heard.append(message)
            self._heard(name, True, message)
        heard = tuple(channel.heard)
        said = len(channel.going)
        try:
            seat.stage.advance()
        except Broken:
            raise
        except Exception as error:
            raise Broken("C6.3", f"an exception escaped the pump of {name}: {type(error).__name__}: {error}") from error
        if channel.held:
            raise Broken("C9.4", f"{name} keeps {self._text(channel.held[0])} although its pass is over")
        seat.stirred = False
        # what the machine has heard: from here on nothing of these is imported (C1.3)
        seat.cancelled.update(m.transfer for m in heard if isinstance(m, messages.Cancel | messages.Release))
        if (
            seat.stage.ended
            and seat.stage.outcome is not None
            and not seat.stage.outcome.status
            and len(seat.stage.machine)
        ):
            raise Broken("C6.2", f"{name} ends as ordered with {len(seat.stage.machine)} transfers under way")
        if self._story is not None:
            for message in list(channel.going)[said:]:
                self._say(f"  {name} says {self._text(message)}")
            if seat.stage.ended:
                self._say(f"  {name} has ended: {seat.stage.outcome}")
        self._check_counts(seat)
        return True

    def _do_engine(self, name: str) -> bool:
        """An engine carries out what it was told and makes one step."""
        seat = self.seats[name]
        if seat.over or seat.frozen:
            return False
        seat.eager = seat.loop.advance()
        seat.stirred = seat.stirred or seat.eager
        return seat.eager

    def _do_device(self, name: str) -> bool:
        """The oldest work on a stage's device completes."""
        seat = self.seats[name]
        if seat.over or not seat.device.pending():
            return False
        seat.device.complete(1)
        seat.eager = seat.stirred = True
        return True

    def _do_hear(self, name: str) -> bool:
        """The coordinator hears the oldest message of a stage."""
        seat = self.seats[name]
        if not seat.channel.going or seat.joined:
            return False
        message = seat.channel.going.popleft()
        self._say(f"C hears {self._text(message)} from {name}")
        self._heard(name, False, message)
        if isinstance(message, messages.Reply):
            self.coordinator.heard(seat.peer, self.now)
        else:
            self._carry_out(self.coordinator.handle(seat.peer, message, self.now))
        return True

    def _do_expire(self) -> bool:
        """The coordinator looks at its deadlines."""
        deadline = self.coordinator.next_deadline()
        if deadline is None or deadline > self.now:
            return False
        self._carry_out(self.coordinator.expire(self.now))
        return True

    def _do_time(self, seconds: float) -> bool:
        self.now += seconds
        self._under_way.update((flight.source.peer, self.now) for flight in self.wire.flights)
        if any(link is Link.CONNECTING for _, _, link in self.links()):
            self._connecting += seconds  # a slow handshake passes its deadline, and a pair is lost with it
            self.excused = self.excused or self._connecting > 8
        if seconds >= 1:
            self.excused = self.excused or self.fair_since is None
            self._say(f"{seconds:g} s pass")
        return True

    # -- moves of the wire

    def _do_start(self, chunk: tuple[int, int, int]) -> bool:
        flight = self._flight(chunk)
        return flight is not None and self.wire.start(flight)

    def _do_copy(self, chunk: tuple[int, int, int]) -> bool:
        flight = self._flight(chunk)
        return flight is not None and self.wire.take_copy(flight)

    def _do_land(self, chunk: tuple[int, int, int], half: bool) -> bool:
        flight = self._flight(chunk)
        if flight is None or not self.wire.land(flight, half):
            return False
        self._say(f"  {self.tell(flight)} {'lands' if flight.state is State.LANDED else 'begins to land'}")
        return True

    def _do_report(self, chunk: tuple[int, int, int]) -> bool:
        flight = self._flight(chunk)
        return flight is not None and self.wire.report(flight)

    def _do_fail(self, chunk: tuple[int, int, int], proof: bool) -> bool:
        flight = self._flight(chunk)
        if flight is None or not self.wire.fail(flight, proof):
            return False
        self.excused = True
        if flight.state is not State.VOID or not self.scenario.exact:
            self._unproven.add(flight.source.peer)
        self._say(f"  {self.tell(flight)} fails{', for certain' if flight.state is State.VOID else ', or so it seems'}")
        return True

    def _do_stall(self, chunk: tuple[int, int, int]) -> bool:
        flight = self._flight(chunk)
        if flight is None or flight.stalled or not flight.writes:
            return False
        self.excused = True
        flight.stalled = True
        self._say(f"  {self.tell(flight)} gets stuck")
        return True

    def _do_wake(self, chunk: tuple[int, int, int]) -> bool:
        flight = self._flight(chunk)
        if flight is None or not flight.stalled:
            return False
        flight.stalled = False
        return True

    def _do_up(self, one: str, other: str) -> bool:
        return self.wire.link_up(self.seats[one].peer, self.seats[other].peer)

    def _do_closed(self, one: str, other: str) -> bool:
        """A stage's end towards a dead peer is closed."""
        seat = self.seats[one]
        done = False
        for peer in tuple(seat.connector.links):
            if peer.name == other:
                done = self.wire.close_link(seat.peer, peer) or done
        if done:
            self._say(f"  the end of {one} towards {other} is closed")
        return done

    def _do_drop(self, one: str, other: str, quiet: bool) -> bool:
        if not self.wire.drop(self.seats[one].peer, self.seats[other].peer, quiet):
            return False
        self.excused = True
        self._unproven.update((self.seats[one].peer, self.seats[other].peer))
        self._say(f"{one} finds its connection to {other} broken{', its end is closed' if quiet else ''}")
        return True

    def _do_slow(self, one: str, other: str, quiet: bool) -> bool:
        if not self.wire.give_up(self.seats[one].peer, self.seats[other].peer, quiet):
            return False
        self.excused = True
        self._unproven.update((self.seats[one].peer, self.seats[other].peer))
        self._say(f"{one} has waited too long to be connected to {other}")
        return True

    # -- moves of fate

    def _do_echo(self, name: str) -> bool:
        """What a stage has said last, or is about to hear first, comes twice."""
        channel = self.seats[name].channel
        line = channel.coming or channel.going
        if not line or messages.family_of(line[0]) != "transfer":
            return False
        self._echoed += isinstance(line[0], messages.Retired)
        line.insert(1, line[0])
        return True

    def _do_receipt(self, name: str) -> bool:
        """A receipt comes twice."""
        connector = self.seats[name].connector
        if connector.dead or not connector.receipts:
            return False
        connector.receipts.append(connector.receipts[0])
        return True

    def _do_freeze(self, name: str) -> bool:
        seat = self.seats[name]
        if seat.over or seat.frozen:
            return False
        self.excused = True
        seat.frozen = True
        self._say(f"{name} hangs")
        return True

    def _do_thaw(self, name: str) -> bool:
        seat = self.seats[name]
        if seat.dead or not seat.frozen:
            return False
        seat.frozen = False
        self._say(f"{name} goes on")
        return True

    def _do_crash(self, name: str) -> bool:
        seat = self.seats[name]
        if seat.dead:
            return False
        self._say(f"{name} dies")
        self._die(seat)
        return True

    def _die(self, seat: Seat) -> None:
        self.excused = True
        seat.dead = seat.unnoticed = True
        seat.connector.kill()

    def _do_lose(self, name: str) -> bool:
        """The channel between a stage and the coordinator breaks; the stage lives on, and finds out by a move."""
        seat = self.seats[name]
        if seat.over or seat.unnoticed:
            return False
        self.excused = True
        seat.unnoticed = True
        self._say(f"the channel of {name} breaks")
        return True

    def _do_sever(self, name: str) -> bool:
        """A stage notices that its channel is gone."""
        seat = self.seats[name]
        if seat.over or not (seat.unnoticed or seat.doomed) or seat.channel.lost is not None:
            return False
        seat.channel.sever("the coordinator is gone")
        seat.channel.coming.clear()  # nothing comes after the loss (C9.4)
        return True

    def _do_notice(self, name: str) -> bool:
        """The coordinator notices that a stage's channel is gone; what had come before is heard first (C9.4)."""
        seat = self.seats[name]
        if not seat.unnoticed or seat.joined:
            return False
        while seat.channel.going:
            self._do_hear(name)
        seat.unnoticed = False
        self._say(f"C finds the channel of {name} gone")
        self._carry_out(self.coordinator.peer_lost(seat.peer, "its channel is gone", self.now))
        self._check_lost(seat.peer)
        return True

    def _check_lost(self, peer: PeerId) -> None:
        """What depends on a lost stage has ended, or was begun anew elsewhere (C6.3)."""
        for asked in self.unended:
            if asked.generations and peer in self._pairs[asked.generations[-1]]:
                phase = self.coordinator.phase(asked.generations[-1])
                at_decode = self._pairs[asked.generations[-1]][1] == peer
                if phase in EXPOSED or (at_decode and phase is CoordinatorPhase.RECEIVED):
                    raise Broken(
                        "C6.3", f"{self.name_of(asked.generations[-1])} goes on ({phase.name}) without {peer.name}"
                    )

    def _do_kill(self, name: str) -> bool:
        """The launcher ends a stage that is lost."""
        seat = self.seats[name]
        if not seat.doomed or seat.over:
            return False
        self._say(f"the launcher kills {name}")
        self._die(seat)
        return True

    def _do_join(self, name: str) -> bool:
        """The launcher joins a stage that has ended; what it had said is heard first."""
        seat = self.seats[name]
        if not seat.over or seat.joined:
            return False
        while seat.channel.going:
            self._do_hear(name)
        if not seat.dead:
            seat.dead = True
            seat.connector.kill()
        seat.joined = True
        self._say(f"the launcher joins {name}")
        known = any(view.peer == seat.peer for view in self.coordinator.peers())
        self._carry_out(self.coordinator.peer_joined(seat.peer, self.now))
        if not known:  # it ended before it said Hello
            effects = self.coordinator.start_failed(name, self.now)
            # in its very first life: that is a start-up that failed, and nobody starts it again
            self._given_up = self._given_up or any(isinstance(effect, fx.Ignored) for effect in effects)
            self._carry_out(effects)
        self._check_lost(seat.peer)
        return True

    def _do_restart(self, name: str) -> bool:
        seat = self.seats[name]
        if not seat.wanted or self.coordinator.stopping:
            return False
        self._say(f"{name} is started again")
        self.former.append(seat)
        for way in (False, True):
            self._history.pop((name, way), None)  # a word belongs to one channel
        self._start(name, seat.role)
        return True

    def _transfer(self, number: int) -> TransferId | None:
        """The latest generation of a request that is live."""
        asked = self.asked[number] if number < len(self.asked) else None
        return asked.generations[-1] if asked is not None and asked.generations and asked.ended is None else None

    def _do_compute(self, name: str, number: int) -> bool:
        """An engine fails at a request."""
        seat, transfer = self.seats[name], self._transfer(number)
        engine = seat.engine.inner
        if transfer is None or not isinstance(engine, ScriptedEngine):
            return False
        fails = (
            engine.fail_compute
            if seat.role is Role.PREFILL
            else engine.fail_decode
            if number % 2
            else engine.fail_import
        )
        fails.add(transfer)
        self._excused.add(number)
        self._say(f"the engine of {name} is to fail at r{number}")
        return True

    def _do_refuse(self, name: str, number: int) -> bool:
        """An engine refuses a request in spite of its credit, once."""
        seat, transfer = self.seats[name], self._transfer(number)
        engine = seat.engine.inner
        if transfer is None or transfer in seat.engine.live or not isinstance(engine, ScriptedEngine):
            return False
        self._refusals.add(transfer)
        self._excused.add(number)
        engine.refuse = self._refuses
        self._say(f"the engine of {name} is to refuse r{number}")
        return True

    def _refuses(self, admission: Admission) -> str | None:
        return "simulated: no" if admission.transfer in self._refusals else None

    def _do_raise(self, name: str, call: str) -> bool:
        seat = self.seats[name]
        if seat.over:
            return False
        self.excused = True
        seat.connector.raises.add(call)
        self._unproven.add(seat.peer)
        self._say(f"the transport of {name} is to raise in {call}()")
        return True

    # -- stages ------------------------------------------------------------------------------------------------------

    def _start(self, name: str, role: Role) -> None:
        self._epoch += 1
        peer = PeerId(name, self._epoch)
        inner, device = self.engines.open(role)
        channel = SimulatedChannel(peer)
        engine = Watched(inner, device, self, peer)
        guard = open_guard(self._plugin, Options(), engine, self._settings, channel, None, self.clock)
        stage, loop = join(engine, guard, self._settings, channel, self.clock)
        seat = Seat(peer, role, engine, device, self.wire.connectors[peer], guard, stage, loop, channel)
        self.seats[name] = seat
        post = loop.post

        def posted(command: Command) -> None:
            seat.eager = True
            post(command)

        loop.post = posted  # type: ignore[method-assign]

    def clock(self) -> float:
        return self.now

    def _new_id(self) -> TransferId:
        transfer = TransferId(f"{len(self._transfers) + 1:032x}")
        self._transfers.append(transfer)
        return transfer

    # -- the coordinator's effects -----------------------------------------------------------------------------------

    def _carry_out(self, effects: Sequence[fx.CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.SendTo(peer, message):
                    seat = self.seats.get(peer.name)
                    self._say(f"  C says {self._text(message)} to {peer.name}")
                    if seat is not None and seat.peer == peer and not seat.dead:
                        if isinstance(message, messages.Stop):
                            self._check_order(seat)
                        seat.channel.deliver(message)
                case fx.Tell(key, transfer, event):
                    self._told(self._keys[key], transfer, event)
                case fx.Reached(key, transfer, milestone):
                    self._milestone(key, transfer, milestone)
                case fx.Kill(peer):
                    if not self.excused:
                        raise Broken("C6.7", f"C gives up {peer.name}, and nothing has happened to it: {effect.cause}")
                    if "deadline.drain" in effect.cause and self._idle_for_long(peer):
                        raise Broken(
                            "C6.7", f"C gives up {peer.name}, which does not retire what is over: {effect.cause}"
                        )
                    seat = self.seats.get(peer.name)
                    if seat is not None and seat.peer == peer:
                        seat.doomed = True
                    self._say(f"  C wants {peer.name} dead: {effect.cause}")
                case fx.Restart(name):
                    self.seats[name].wanted = True
                case fx.Ask(peer):
                    seat = self.seats.get(peer.name)
                    self._say(f"  C asks {peer.name} whether it lives")
                    if seat is not None and seat.peer == peer and not seat.dead:
                        seat.channel.deliver(messages.Call("alive", "alive", "health"))
                case fx.Fault(cause=cause) if "given up" in cause or "has not helped" in cause:
                    self._given_up = True
                    self._say(f"  C says: {cause}")
                case fx.Violation(clause, transfer, peer, text):
                    raise Broken(
                        "C7.4",
                        f"C accuses {peer} of breaking {clause} with {self.name_of(transfer)}: {text}; it has not",
                    )
                case _:
                    pass

    def _check_order(self, seat: Seat) -> None:
        """A D is stopped when nobody can write to it any more; one that was never connected, at any time (C6.2)."""
        if seat.role is Role.DECODE:
            writers = [p.peer.name for p in self.seats.values() if p.peer in seat.connector.links and not p.joined]
            if writers:
                raise Broken("C6.2", f"C stops {seat.peer.name} before {', '.join(writers)} was joined")

    def _idle_for_long(self, peer: PeerId) -> bool:
        """Faults have stopped, and all that this stage has sent was over long before its time to drain was."""
        if self.fair_since is None or peer in self._unproven:
            return False
        return self.now > max(self._under_way.get(peer, 0.0), self.fair_since) + 40

    def _told(self, asked: Asked, transfer: TransferId | None, event: Any) -> None:
        if transfer is not None and transfer in self._owner and self._owner[transfer] is not asked:
            raise Broken("C1.2", f"{event} of {self.name_of(transfer)} is told to the caller of r{asked.number}")
        if asked.ended is not None:
            raise Broken("C1.1", f"r{asked.number} has ended ({asked.ended.ending.value}), and now comes {event}")
        match event:
            case fx.Placed(prefill, decode):
                assert transfer is not None
                self.handoffs += 1
                asked.generations.append(transfer)
                if len(asked.generations) > 1 + self.scenario.attempts and not self._refusals & set(asked.generations):
                    raise Broken("C6.7", f"r{asked.number} begins for the {len(asked.generations)}th time")
                self._owner[transfer] = asked
                self._reached[transfer] = set()
                self._pairs[transfer] = (prefill, decode)
                self._say(f"  C places r{asked.number} on {prefill.name} and {decode.name}")
            case fx.Requeued(cause):
                self._say(f"  r{asked.number} waits again: {cause}")
            case fx.Tokens(position, token_ids, exit_depths):
                if position != len(asked.tokens):
                    raise Broken("C7.1", f"tokens of r{asked.number} at {position} after {len(asked.tokens)}")
                asked.tokens += token_ids
                asked.depths += exit_depths
            case fx.Ended(ending, reason, cause):
                asked.ended = event
                self._say(f"  r{asked.number} ends: {ending.value} {cause}")
                if ending is fx.Ending.FINISHED:
                    expected = self.engines.answer(asked.request)
                    if (tuple(asked.tokens), tuple(asked.depths), reason) != expected:
                        raise Broken(
                            "A1", f"r{asked.number} got {asked.tokens}, an undisaggregated run says {list(expected[0])}"
                        )
                elif ending is fx.Ending.CANCELLED and not asked.aborted:
                    raise Broken("C6.3", f"r{asked.number} is said to be cancelled, and nobody has: {cause}")
                elif ending is fx.Ending.FAILED and not cause:
                    raise Broken("C6.3", f"r{asked.number} failed without a cause")
                elif (
                    ending is fx.Ending.FAILED and self._served and not (self.excused or asked.number in self._excused)
                ):
                    raise Broken("C6.7", f"r{asked.number} fails, and nothing has happened to it: {cause}")
            case _:
                pass

    def _milestone(self, key: RequestKey, transfer: TransferId, milestone: str) -> None:
        if self._owner[transfer].key != key:
            raise Broken("C1.2", f"{milestone} of {self.name_of(transfer)} is told of another request")
        reached = self._reached[transfer]
        if milestone in reached:
            raise Broken("C4", f"{self.name_of(transfer)} reached {milestone} twice")
        place = _ORDER.get(milestone)
        later = [name for name in reached if place is not None and _ORDER.get(name, -1) > place]
        if later or (milestone not in _RETIREMENTS and reached & {Milestones.DESTINATION_RETIRED}):
            raise Broken("C4", f"{self.name_of(transfer)} reached {milestone} after {', '.join(sorted(reached))}")
        reached.add(milestone)

    # -- invariants --------------------------------------------------------------------------------------------------

    def _landing(self, flight: Flight, segments: Segments) -> None:
        seat = self.seats[flight.chunk.peer.name]
        if flight.copy is None:
            source = next((s for s in self.seats.values() if s.peer == flight.source.peer), None)
            if source is not None and flight.chunk.transfer not in source.engine.live:
                raise Broken("C5.1", f"the source of {self.tell(flight)} is read after {source.peer.name} gave it up")
        held = seat.engine.owned.get(flight.chunk.transfer)
        if held is None:
            raise Broken("C5.2", f"{self.tell(flight)} lands at {seat.peer.name}, which holds nothing for it any more")
        if not held.covers(segments):
            raise Broken("C2.2", f"{self.tell(flight)} lands outside of what {seat.peer.name} has reserved for it")

    def _closed(self, flight: Flight) -> None:
        self.breaks("C5.4", f"{flight.source.peer.name} closes its transport under {self.tell(flight)}")

    def _check_counts(self, seat: Seat) -> None:
        for name, count in seat.stage.counts.items():
            if count and name.startswith("violations_"):
                raise Broken("C7.4", f"{seat.peer.name} says that somebody broke {name.removeprefix('violations_')}")

    def check_books(self) -> None:
        """Nothing is live: everything that was taken is back (C2.5, C8.4)."""
        repeated = 0
        for view in self.coordinator.peers():
            repeated += view.repeated_returns
            seat = self.seats[view.peer.name]
            if seat.peer != view.peer or seat.over:
                continue
            if view.blocks_out or view.slots_out:
                raise Broken("C2.5", f"{view.blocks_out} blocks and {view.slots_out} slots of {view.peer.name} are out")
            figures = {**seat.engine.statistics(), **seat.guard.statistics(), "transfers": len(seat.stage.machine)}
            wrong = {
                name: figures[name]
                for name in ("transfers", "blocks_used", "blocks_leased", "outstanding", "inflight_bytes",
                             "quarantined_bytes", "grants", "unproven_chunks")
                if figures.get(name)
            }  # fmt: skip
            if wrong:
                raise Broken("C8.4", f"nothing is live, and {view.peer.name} still has {wrong}")
        if repeated > self._echoed:
            raise Broken("C2.5", f"{repeated} credits were returned twice")
        self.check_memory()

    def check_memory(self) -> None:
        """No byte is where none may be."""
        for seat in (*self.seats.values(), *self.former):
            engine = seat.engine.inner
            if not isinstance(engine, ScriptedEngine):
                continue
            if engine.late_writes:
                raise Broken(
                    "C5.2", f"memory of {seat.peer.name} was written when it was free: {engine.late_writes[:3]}"
                )
            if not seat.dead and (strays := engine.strays()):
                raise Broken("C3.1", f"{seat.peer.name} holds bytes where nobody may write: {strays[:3]}")

    # -- the story ---------------------------------------------------------------------------------------------------

    def _say(self, line: str) -> None:
        if self._story is not None:
            self._story(line)

    def _text(self, message: messages.Message) -> str:
        name = type(message).__name__
        transfer = getattr(message, "transfer", None)
        if transfer is not None:
            extra = f", {message.count} chunks" if isinstance(message, messages.Commit) else ""
            extra = f": {message.cause}" if isinstance(message, messages.Failed | messages.Rejected) else extra
            return f"{name}({self.name_of(transfer)}{extra})"
        if isinstance(message, messages.Fatal):
            return f"Fatal: {message.cause}"
        peer = getattr(message, "peer", None)
        return f"{name}({peer.name})" if isinstance(peer, PeerId) else name
