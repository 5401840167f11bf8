"""A whole deployment on one thread: coordinator, stages, scripted engines and any connector, moved turn by turn.

::

    deployment = Deployment("loopback", prefill=1, decode=1)
    outcome = deployment.submit("a", Request(prompt))
    deployment.run_until(lambda: outcome.ended)
    deployment.check_answer("a")
    deployment.finish()                       # drains, closes, and checks every book

Nothing runs between turns, so a test can stop the world at any boundary, look, cancel, and go on.  A stage is moved by
:meth:`Deployment.turn` unless it is *frozen* (a hung process) or *crashed* (its process was killed and joined).  The
order within a turn is drawn from ``seed`` where one is given.  Time is the clock's that is passed in; by default the
real one.

The machines, stages, guards and channels are the real ones; only the launcher and the threads are missing.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbaton.connector import Availability, ConnectorContext, ConnectorPlugin, Need, TransferConnector
from kvbaton.control import ChannelLost
from kvbaton.control.inproc import InprocCoordinatorChannels
from kvbaton.engine import Request, Role
from kvbaton.guard import GuardedConnector
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Choose, Coordinator, Deadlines, Limits, least_loaded
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.plugins import choose_connector
from kvbaton.settings import load
from kvbaton.stage.engine_loop import EngineLoop
from kvbaton.stage.stage import Stage
from kvbaton.stage.worker import join, open_guard
from kvbaton_conformance.scripted import ScriptedDevice, ScriptedEngine, ScriptedLayout, ScriptedModel

#: Turns that a condition may take to come true.
TURNS = 20_000


class DeploymentStuck(AssertionError):
    """A condition did not come true, or the books do not balance; the text says what everything was doing."""


@dataclass(eq=False)
class Answer:
    """What the caller of a request has been told."""

    request: Request
    transfers: list[TransferId] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    milestones: list[str] = field(default_factory=list)
    endings: list[fx.Ended] = field(default_factory=list)
    requeued: int = 0

    @property
    def ended(self) -> bool:
        return bool(self.endings)

    @property
    def ending(self) -> fx.Ended:
        return self.endings[0]


@dataclass(eq=False)
class StageSeat:
    """One stage of a deployment and the parts it was joined from."""

    peer: PeerId
    engine: ScriptedEngine
    #: What the plugin opened: for a test's own controls, such as a wire that is stepped by hand.
    connector: Any
    guard: GuardedConnector
    stage: Stage
    loop: EngineLoop
    frozen: bool = False
    crashed: bool = False
    #: Only the engine stands still; its pump goes on.
    engine_frozen: bool = False
    joined: bool = False

    @property
    def over(self) -> bool:
        return self.crashed or self.stage.ended

    def turn(self) -> bool:
        if self.over or self.frozen:
            return False
        busy = self.stage.advance()
        return (not self.engine_frozen and self.loop.advance()) or busy


class Deployment:
    """See the module's text.  ``settings`` are dotted keys of :class:`~kvbaton.settings.Settings`.

    ``between`` runs after every turn: where a test moves a wire by hand, or a fake clock.
    """

    def __init__(
        self,
        connector: str | ConnectorPlugin,
        options: Mapping[str, Any] | None = None,
        *,
        prefill: int = 1,
        decode: int = 1,
        model: ScriptedModel | None = None,
        layouts: Mapping[Role, ScriptedLayout] | None = None,
        devices: Mapping[Role, ScriptedDevice] | None = None,
        chunk: int = 8,
        prefix_caching: bool = True,
        settings: Mapping[str, object] | None = None,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        choose: Choose = least_loaded,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
        between: Callable[[], None] = lambda: None,
        need: Need | None = None,
    ) -> None:
        self.model = model or ScriptedModel(planes=2)
        self.clock = clock
        self.between = between
        self.answers: dict[str, Answer] = {}
        self.violations: list[fx.Violation] = []
        self.faults: list[fx.Fault] = []
        self.kills: list[PeerId] = []
        self.seats: dict[str, StageSeat] = {}
        self._random = None if seed is None else random.Random(seed)
        self.settings, _ = load(overrides={"model": "scripted", **dict(settings or {})})
        self._plugin, self._options = choose_connector(connector, need or Need(), dict(options or {}))
        self._layouts = layouts or {
            Role.PREFILL: ScriptedLayout(blocks=96, gap=0), Role.DECODE: ScriptedLayout(blocks=80, gap=5)
        }  # fmt: skip
        self._devices = devices or {}
        self._chunk = chunk
        self._prefix_caching = prefix_caching
        self._channels = InprocCoordinatorChannels(through_codec=True)
        self.coordinator = Coordinator(limits or Limits(), deadlines or Deadlines(), choose)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for index in range(count):
                self.add_stage(f"{role.value}-{index}", role)
        self.run_until(self._connected)

    # -- stages --------------------------------------------------------------------------------------------------------

    def add_stage(self, name: str, role: Role) -> StageSeat:
        """Start a stage, or start one again under a new epoch."""
        peer = PeerId.start(name)
        self._channels.add(peer)
        channel = self._channels.connect(peer)
        engine = ScriptedEngine(
            role, self.model, self._layouts.get(role), chunk=self._chunk, device=self._devices.get(role),
            prefix_caching=self._prefix_caching,
        )  # fmt: skip
        plugin = _Remembering(self._plugin)
        guard = open_guard(plugin, self._options, engine, self.settings, channel, None, self.clock)
        stage, loop = join(engine, guard, self.settings, channel, self.clock)
        seat = StageSeat(peer, engine, plugin.connector, guard, stage, loop)
        self.seats[name] = seat
        return seat

    def crash(self, name: str) -> None:
        """As if the stage's process had been killed and joined: it does nothing more, and the coordinator is told."""
        seat = self.seats[name]
        seat.crashed = True
        kill = getattr(seat.connector, "kill", None)  # an in-process transport's own way to die
        if kill is not None:
            kill()
        self._carry_out(self.coordinator.peer_lost(seat.peer, "killed by the test", self.clock()))
        self._joined(seat)

    def _joined(self, seat: StageSeat) -> None:
        seat.joined = True
        self._carry_out(self.coordinator.peer_joined(seat.peer, self.clock()))

    def _connected(self) -> bool:
        prefills = [s.peer for s in self.seats.values() if s.engine.role is Role.PREFILL]
        decodes = [s.peer for s in self.seats.values() if s.engine.role is Role.DECODE]
        return all(self.coordinator.connected(p, d) for p in prefills for d in decodes)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, key: str, request: Request) -> Answer:
        answer = Answer(request)
        effects = self.coordinator.submit(RequestKey(key), request, self.clock())
        self.answers[key] = answer
        self._carry_out(effects)
        return answer

    def abort(self, key: str) -> None:
        self._carry_out(self.coordinator.abort(RequestKey(key), self.clock()))

    def check_answer(self, key: str) -> None:
        """A1: a finished request has the tokens of an undisaggregated run."""
        answer = self.answers[key]
        tokens, depths, reason = self.model.generate(answer.request)
        if answer.ending.ending is not fx.Ending.FINISHED:
            raise DeploymentStuck(f"A1: request {key} ended as {answer.ending}, not finished")
        if (tuple(answer.tokens), tuple(answer.depths), answer.ending.reason) != (tokens, depths, reason):
            raise DeploymentStuck(
                f"A1: request {key} differs from the undisaggregated run: {answer.tokens[:8]} ... for"
                f" {list(tokens[:8])} ... The KV or the final payload that D computed with is not what P computed."
            )

    # -- time ----------------------------------------------------------------------------------------------------------

    def turn(self) -> bool:
        """Move everything once; whether anything happened."""
        movers: list[Callable[[], bool]] = [seat.turn for seat in self.seats.values()]
        movers.append(self._coordinate)
        if self._random is not None:
            self._random.shuffle(movers)
        busy = False
        for move in movers:
            busy = move() or busy
        self.between()
        return busy

    def run_until(self, condition: Callable[[], bool], turns: int = TURNS) -> None:
        """Turn until ``condition`` holds.  Raises :class:`DeploymentStuck` after so many turns."""
        for _ in range(turns):
            if condition():
                return
            if not self.turn():
                time.sleep(0)  # a wire thread may want the processor
        if not condition():
            raise DeploymentStuck(f"the condition did not come true within {turns} turns.\n{self.describe()}")

    def idle(self) -> bool:
        """Every request has ended and every stage that is up has retired everything."""
        alive = [seat for seat in self.seats.values() if not seat.over]
        return (
            all(answer.ended for answer in self.answers.values())
            and not len(self.coordinator)
            and all(not len(seat.stage.machine) for seat in alive)
        )

    def _coordinate(self) -> bool:
        events = self._channels.receive()
        for event in events:
            if isinstance(event, ChannelLost):
                self._carry_out(self.coordinator.peer_lost(event.peer, event.reason, self.clock()))
            else:
                self._carry_out(self.coordinator.handle(event.peer, event.message, self.clock()))
        for seat in self.seats.values():
            if seat.stage.ended and not seat.joined:
                self._joined(seat)
        deadline = self.coordinator.next_deadline()
        if deadline is not None and deadline <= self.clock():
            self._carry_out(self.coordinator.expire(self.clock()))
        return bool(events)

    def _carry_out(self, effects: list[fx.CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.SendTo(peer, message):
                    self._channels.send(peer, message)
                case fx.Tell(key, transfer, event):
                    self._tell(self.answers[key], transfer, event)
                case fx.Reached(key, _, milestone):
                    if key in self.answers:
                        self.answers[key].milestones.append(milestone)
                case fx.Kill(peer):
                    self.kills.append(peer)
                    seat = self.seats.get(peer.name)
                    if seat is not None and seat.peer == peer and not seat.over:
                        seat.crashed = True
                case fx.Violation():
                    self.violations.append(effect)
                case fx.Fault():
                    self.faults.append(effect)
                case _:
                    pass

    @staticmethod
    def _tell(answer: Answer, transfer: TransferId | None, event: Any) -> None:
        match event:
            case fx.Placed() if transfer is not None:
                answer.transfers.append(transfer)
            case fx.Tokens(_, token_ids, exit_depths):
                answer.tokens += token_ids
                answer.depths += exit_depths
            case fx.Requeued():
                answer.requeued += 1
            case fx.Ended():
                answer.endings.append(event)
            case _:
                pass

    # -- the books -----------------------------------------------------------------------------------------------------

    def check_balance(self) -> None:
        """Everything that was taken is back, on every stage that is up and in the coordinator's books (C2.5, C8.4)."""
        for view in self.coordinator.peers():
            seat = self.seats[view.peer.name]
            if seat.peer != view.peer or seat.over:
                continue
            figures = {**seat.engine.statistics(), **seat.guard.statistics()}
            expected = {
                "transfers": 0, "blocks_used": 0, "blocks_leased": 0, "blocks_promised": 0, "outstanding": 0,
                "inflight_bytes": 0, "quarantined_bytes": 0, "grants": 0, "unproven_chunks": 0,
                "final_slots_free": seat.engine.layout.final_slots,
                "blocks_free": seat.engine.layout.blocks - figures["blocks_prefix"],
            }  # fmt: skip
            wrong = {k: (figures.get(k), v) for k, v in expected.items() if figures.get(k) != v}
            if wrong or view.blocks_out or view.slots_out or view.repeated_returns:
                raise DeploymentStuck(
                    f"C2.5, C8.4: the books of {view.peer.name} do not balance: {wrong} (found, expected),"
                    f" credits out: {view.blocks_out} blocks, {view.slots_out} slots, returned twice:"
                    f" {view.repeated_returns}"
                )
        for name, seat in self.seats.items():
            if seat.engine.late_writes:
                raise DeploymentStuck(
                    f"C5.2: memory of {name} was written after it was freed: (block, byte) {seat.engine.late_writes}"
                )
        for key, answer in self.answers.items():
            if len(answer.endings) > 1:
                raise DeploymentStuck(f"C1.1: request {key} ended {len(answer.endings)} times: {answer.endings}")

    def finish(self, turns: int = TURNS) -> None:
        """Let everything end, check the books, stop every stage in the order of C6.2, and check that all went well."""
        self.run_until(self.idle, turns)
        self.check_balance()
        self.close(turns)

    def close(self, turns: int = TURNS) -> None:
        """Stop every stage; each must end as ordered."""
        self._carry_out(self.coordinator.fatal("the test is over", self.clock()))
        self.run_until(lambda: all(seat.over for seat in self.seats.values()), turns)
        for name, seat in self.seats.items():
            outcome = seat.stage.outcome
            if not seat.crashed and (outcome is None or outcome.status):
                raise DeploymentStuck(f"C6.2: {name} did not end as ordered: {outcome}")
            seat.engine.close()
        self._channels.close()

    def describe(self) -> str:
        """Where everything stands."""
        lines = [
            f"request {key}: {'ended ' + str(answer.ending) if answer.ended else 'live'}, reached {answer.milestones},"
            f" {len(answer.tokens)} tokens"
            for key, answer in self.answers.items()
        ]
        for name, seat in self.seats.items():
            phases = {t[:8]: p.name for t, p in seat.stage.machine.transfers().items()}
            state = "crashed" if seat.crashed else "frozen" if seat.frozen else seat.stage.outcome or "running"
            figures = {k: v for k, v in seat.guard.statistics().items() if v}
            lines.append(f"{name}: {state}, transfers {phases}, transport {figures}")
        lines += [f"fault: {fault.cause}" for fault in self.faults[-5:]]
        lines += [f"violation: {v.clause} {v.text}" for v in self.violations[-5:]]
        return "\n".join(lines)


class _Remembering:
    """A connector plugin that keeps what it opened last."""

    def __init__(self, plugin: ConnectorPlugin) -> None:
        self._plugin = plugin
        self.name, self.api_version, self.Options = plugin.name, plugin.api_version, plugin.Options
        self.connector: Any = None

    def probe(self, need: Need) -> Availability:
        return self._plugin.probe(need)

    def open(self, options: Any, context: ConnectorContext) -> TransferConnector:
        self.connector = self._plugin.open(options, context)
        return self.connector  # type: ignore[no-any-return]
