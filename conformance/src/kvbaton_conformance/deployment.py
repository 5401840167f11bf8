"""A whole deployment on one thread: coordinator, stages, scripted engines and any connector, moved turn by turn.

::

    deployment = Deployment("loopback", prefill=1, decode=1)
    outcome = deployment.submit("a", Request(prompt))
    deployment.run_until(lambda: outcome.ended, "C6.7: the request ends")
    deployment.check_answer("a")
    deployment.finish()                       # drains, closes, and checks every book

Nothing runs between turns, so a test can stop the world at any boundary, look, cancel, and go on:

- a stage is moved by :meth:`Deployment.turn` unless it is *frozen* (a hung process), its engine alone is
  (``engine_frozen``), or it has *crashed* (its process was killed and joined);
- device work completes at each turn unless ``device_runs`` is unset;
- control messages wait where :meth:`Deployment.hold_mail` says so, and all that were delivered are in
  :attr:`Deployment.mail`, to be looked at or sent again;
- between guard and connector is a :class:`~kvbaton_conformance.gate.Gate` that holds back what the transport reports;
- where the plugin offers a *stepped* mode, the bytes themselves wait while :attr:`Deployment.flow` is unset.

The order within a turn is drawn from ``seed`` where one is given.  Time is the clock's; the default one stands still
until a test moves it.  The machines, stages, guards and channels are the real ones; only the launcher and the threads
are missing.

**Stepped mode** is an offer that a connector's author may make to the kit, beside the protocol.  The plugin has an
attribute ``stepped_options``: options with which its connector moves no byte by itself.  Such a connector has an
attribute ``wire`` with two methods that return whether there was something to do: ``start()`` begins to move one more
chunk, so that it can no longer be cancelled, and ``finish()`` moves its bytes and reports it.  A connector may also
have ``kill()``: end as the process of a killed stage does; without it, its end is closed at once.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar, cast

from kvbaton import messages
from kvbaton.bounds import FAIL_CLOSED
from kvbaton.connector import Availability, ConnectorContext, ConnectorPlugin, Need, TransferConnector
from kvbaton.control import ChannelEvent, ChannelLost
from kvbaton.control.inproc import InprocCoordinatorChannels
from kvbaton.engine import Request, Role
from kvbaton.errors import KvbatonError
from kvbaton.guard import GuardedConnector
from kvbaton.handoff import effects as fx
from kvbaton.handoff.coordinator import Choose, Coordinator, Deadlines, Limits, PeerView, Recovery, least_loaded
from kvbaton.handoff.table import DestinationPhase, SourcePhase
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.plugins import choose_connector
from kvbaton.settings import load
from kvbaton.stage.engine_loop import EngineLoop
from kvbaton.stage.stage import Stage
from kvbaton.stage.worker import join, open_guard
from kvbaton_conformance.gate import Gate
from kvbaton_conformance.scripted import ScriptedDevice, ScriptedEngine, ScriptedLayout, ScriptedModel
from kvbaton_conformance.scripted_connector import ManualClock

#: Turns that a condition may take to come true ...
TURNS = 2_000
#: ... and seconds, for a transport that moves by itself: both must have passed.
PATIENCE = 10.0
#: Messages that are remembered.
_REMEMBERED = 4096

M = TypeVar("M", bound=messages.Message)


class DeploymentStuck(AssertionError):
    """A condition did not come true, or the books do not balance; the text says what everything was doing."""


@dataclass(frozen=True)
class Mail:
    """A control message that was delivered: ``to`` a stage or ``from`` it."""

    way: Literal["to", "from"]
    peer: PeerId
    message: messages.Message


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

    @property
    def transfer(self) -> TransferId:
        """Its latest generation."""
        return self.transfers[-1]

    def __str__(self) -> str:
        return f"{'ended as ' + str(self.ending) if self.ended else 'live'}, reached {', '.join(self.milestones)}"


@dataclass(eq=False)
class StageSeat:
    """One stage of a deployment and the parts it was joined from."""

    peer: PeerId
    engine: ScriptedEngine
    #: What the plugin opened: for a test's own controls, such as a wire that is stepped by hand.
    connector: Any
    gate: Gate
    guard: GuardedConnector
    stage: Stage
    loop: EngineLoop
    device: ScriptedDevice
    frozen: bool = False
    crashed: bool = False
    #: Only the engine stands still; its pump goes on.
    engine_frozen: bool = False
    #: Device work completes by itself.
    device_runs: bool = True
    #: Bytes on its stepped wire move.
    flows: bool = True
    joined: bool = False

    @property
    def over(self) -> bool:
        return self.crashed or self.stage.ended

    @property
    def phases(self) -> dict[TransferId, Any]:
        """Every transfer that its machine knows."""
        return dict(self.stage.machine.transfers())

    def figures(self) -> dict[str, float]:
        """Gauges of engine and transport."""
        return {**self.engine.statistics(), **self.guard.statistics()}

    def turn(self) -> bool:
        if self.over or self.frozen:
            return False
        if self.device_runs:
            self.device.complete()
        busy = self.stage.advance()
        return (not self.engine_frozen and self.loop.advance()) or busy


class Deployment:
    """See the module's text.  ``settings`` are dotted keys of :class:`~kvbaton.settings.Settings`.

    ``models`` gives a role a model of its own, which no correct deployment has.  ``narrow``: capabilities that the
    connector's instances take back.  ``stepped``: use the plugin's stepped mode where it has one.  ``between`` runs
    after every turn.  ``recovery``: the coordinator's; who is to be started again is.  ``connected`` False: do not wait
    until the stages are.  ``cuda``: the CUDA device of the stage that is named so; None: its memory is the host's.
    """

    def __init__(
        self,
        connector: str | ConnectorPlugin,
        options: Mapping[str, Any] | Any = None,
        *,
        prefill: int = 1,
        decode: int = 1,
        model: ScriptedModel | None = None,
        models: Mapping[Role, ScriptedModel] | None = None,
        layouts: Mapping[Role, ScriptedLayout] | None = None,
        devices: Mapping[Role, ScriptedDevice] | None = None,
        chunk: int = 8,
        prefix_caching: bool = True,
        settings: Mapping[str, object] | None = None,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        recovery: Recovery = FAIL_CLOSED,
        choose: Choose = least_loaded,
        clock: Callable[[], float] | None = None,
        seed: int | None = None,
        between: Callable[[], None] = lambda: None,
        need: Need | None = None,
        narrow: Mapping[str, Any] | None = None,
        stepped: bool = False,
        connected: bool = True,
        cuda: Callable[[str], int | None] = lambda name: None,
    ) -> None:
        self.model = model or ScriptedModel(planes=2)
        self.manual_clock = ManualClock()
        self.clock = clock or self.manual_clock
        self.between = between
        self.answers: dict[str, Answer] = {}
        self.violations: list[fx.Violation] = []
        self.faults: list[fx.Fault] = []
        self.kills: list[PeerId] = []
        self.seats: dict[str, StageSeat] = {}
        #: Control messages in the order of their delivery.
        self.mail: deque[Mail] = deque(maxlen=_REMEMBERED)
        #: The coordinator stands still.
        self.coordinator_frozen = False
        #: Stages that are to be killed are, and those that ended are joined.
        self.launcher_runs = True
        #: Stepped bytes move by themselves.
        self.flow = True
        #: Every word about a transfer is delivered twice, in both directions.
        self.echoing = False
        self._random = None if seed is None else random.Random(seed)
        self.settings, _ = load(overrides={"model": "scripted", **dict(settings or {})})
        self._plugin, self._options = choose_connector(connector, need or Need(), options)
        offer: Mapping[str, Any] | None = getattr(self._plugin, "stepped_options", None)
        self.stepped = stepped and offer is not None
        if self.stepped:
            given = self._options.model_dump() if hasattr(self._options, "model_dump") else {}
            self._plugin, self._options = choose_connector(self._plugin, need or Need(), {**given, **(offer or {})})
        self._layouts = layouts or {
            Role.PREFILL: ScriptedLayout(blocks=96, gap=0), Role.DECODE: ScriptedLayout(blocks=80, gap=5)
        }  # fmt: skip
        self._models = models or {}
        self._devices = devices or {}
        self._chunk = chunk
        self._prefix_caching = prefix_caching
        self._narrow = narrow or {}
        self._cuda = cuda
        self._channels = InprocCoordinatorChannels(through_codec=True)
        self._held_mail: set[tuple[str, str]] = set()
        self._outbox: list[tuple[PeerId, messages.Message]] = []
        self._inbox: list[ChannelEvent] = []
        self._doomed: list[StageSeat] = []
        #: Of the stages that were started again.
        self._former: list[StageSeat] = []
        self.coordinator = Coordinator(limits or Limits(), deadlines or Deadlines(), choose, recovery=recovery)
        for role, count in ((Role.PREFILL, prefill), (Role.DECODE, decode)):
            for index in range(count):
                self.add_stage(f"{role.value}-{index}", role)
        if connected:
            self.run_until(self.connected, "T2: every prefill stage is connected to every decode stage")

    # -- stages --------------------------------------------------------------------------------------------------------

    def add_stage(self, name: str, role: Role) -> StageSeat:
        """Start a stage, or start one again under a new epoch."""
        if name in self.seats:
            self._former.append(self.seats[name])
        peer = PeerId.start(name)
        self._channels.add(peer)
        channel = self._channels.connect(peer)
        device = self._devices.get(role) or ScriptedDevice(automatic=False)
        engine = ScriptedEngine(
            role, self._models.get(role, self.model), self._layouts.get(role), chunk=self._chunk, device=device,
            prefix_caching=self._prefix_caching, cuda=self._cuda(name),
        )  # fmt: skip
        plugin = _Gated(self._plugin, self._narrow)
        guard = open_guard(plugin, self._options, engine, self.settings, channel, self._cuda(name), self.clock)
        stage, loop = join(engine, guard, self.settings, channel, self.clock)
        assert plugin.gate is not None
        seat = StageSeat(peer, engine, plugin.gate.connector, plugin.gate, guard, stage, loop, device)
        seat.device_runs = role not in self._devices
        self.seats[name] = seat
        return seat

    def restart(self, name: str) -> StageSeat:
        """Start a crashed stage again and wait until it is connected."""
        seat = self.add_stage(name, self.seats[name].engine.role)
        self.run_until(self.connected, f"T2: {name} is connected again under a new epoch")
        return seat

    def crash(self, name: str) -> None:
        """As if the stage's process had been killed and joined: it does nothing more, and the coordinator is told."""
        seat = self.seats[name]
        self._die(seat)
        self._carry_out(self.coordinator.peer_lost(seat.peer, "killed by the test", self.clock()))
        self._joined(seat)

    def lose(self, name: str) -> None:
        """Its channel is gone; whether it lives nobody knows.  The launcher kills and joins it, if it runs."""
        self._carry_out(self.coordinator.peer_lost(self.seats[name].peer, "lost by the test", self.clock()))

    def _die(self, seat: StageSeat) -> None:
        if seat.crashed:
            return
        seat.crashed = True
        kill = getattr(seat.connector, "kill", None)
        if kill is not None:
            kill()
        else:
            _shut(seat.connector, tuple(seat.guard.peer_states()))

    def _joined(self, seat: StageSeat) -> None:
        seat.joined = True
        self._carry_out(self.coordinator.peer_joined(seat.peer, self.clock()))

    def connected(self) -> bool:
        """Every prefill stage that lives and every decode stage that does."""
        prefills = [s.peer for s in self.seats.values() if s.engine.role is Role.PREFILL and not s.over]
        decodes = [s.peer for s in self.seats.values() if s.engine.role is Role.DECODE and not s.over]
        return all(self.coordinator.connected(p, d) for p in prefills for d in decodes)

    def view(self, name: str) -> PeerView:
        """A stage in the coordinator's books."""
        peer = self.seats[name].peer
        return next(view for view in self.coordinator.peers() if view.peer == peer)

    @property
    def p(self) -> SourcePhase | None:
        """The phase at the first prefill stage of its oldest transfer; None: it has none."""
        return next(iter(self.seats["prefill-0"].phases.values()), None)

    @property
    def d(self) -> DestinationPhase | None:
        """The same at the first decode stage."""
        return next(iter(self.seats["decode-0"].phases.values()), None)

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, key: str, request: Request) -> Answer:
        answer = Answer(request)
        before = self.answers.get(key)
        self.answers[key] = answer
        try:
            effects = self.coordinator.submit(RequestKey(key), request, self.clock())
        except KvbatonError:
            del self.answers[key]
            if before is not None:
                self.answers[key] = before
            raise
        self._carry_out(effects)
        return answer

    def abort(self, key: str) -> None:
        self._carry_out(self.coordinator.abort(RequestKey(key), self.clock()))

    def check_answer(self, key: str) -> None:
        """A1: a finished request has the tokens of an undisaggregated run."""
        answer = self.answers[key]
        if not answer.ended or answer.ending.ending is not fx.Ending.FINISHED:
            raise DeploymentStuck(f"A1: request {key} was to finish; it is {answer}\n{self.describe()}")
        tokens, depths, reason = self.model.generate(answer.request)
        if (tuple(answer.tokens), tuple(answer.depths), answer.ending.reason) != (tokens, depths, reason):
            raise DeploymentStuck(
                f"A1: request {key} differs from the undisaggregated run: {answer.tokens[:8]} ... for"
                f" {list(tokens[:8])} ..., {answer.ending.reason} for {reason}. The KV or the final payload that D"
                " computed with is not what P computed: bytes were lost, put elsewhere, or read too early or too late."
            )

    def forget(self) -> None:
        """Drop everything that a test keeps of what is over: answers, mail, faults, calls."""
        self.answers = {key: answer for key, answer in self.answers.items() if not answer.ended}
        self.mail.clear()
        self.faults.clear()
        for seat in self.seats.values():
            seat.gate.submitted.clear()
            seat.gate.calls.clear()

    # -- control messages ----------------------------------------------------------------------------------------------

    def hold_mail(self, way: Literal["to", "from"], name: str) -> None:
        """What goes ``to`` a stage, or comes ``from`` it, waits, in order."""
        self._held_mail.add((way, name))

    def let_mail_go(self) -> None:
        """Nothing waits any more; what did is delivered first."""
        self._held_mail.clear()
        outbox, self._outbox = self._outbox, []
        for peer, message in outbox:
            self._send(peer, message)

    def letters(self, kind: type[M], transfer: TransferId | None = None) -> list[M]:
        """Every message of a kind that was delivered, about ``transfer`` if one is given."""
        return [
            mail.message
            for mail in self.mail
            if isinstance(mail.message, kind) and transfer in (None, getattr(mail.message, "transfer", None))
        ]

    def resend(self, name: str, message: messages.Message) -> None:
        """The coordinator says ``message`` to a stage, again or out of turn."""
        self._channels.send(self.seats[name].peer, message)

    def repeat(self, name: str, message: messages.Message) -> None:
        """A stage says ``message`` to the coordinator, again or out of turn."""
        self.seats[name].stage.channel.send(message)

    def waits(self, kind: type[messages.Message]) -> bool:
        """Whether a message of a kind has come from a stage and is held."""
        return any(isinstance(getattr(event, "message", None), kind) for event in self._inbox)

    def _send(self, peer: PeerId, message: messages.Message) -> None:
        if ("to", peer.name) in self._held_mail:
            self._outbox.append((peer, message))
            return
        self.mail.append(Mail("to", peer, message))
        self._channels.send(peer, message)
        if self.echoing and messages.family_of(message) == "transfer":
            self._channels.send(peer, message)

    def _receive(self) -> list[ChannelEvent]:
        waiting: list[ChannelEvent] = []
        now: list[ChannelEvent] = []
        for event in (*self._inbox, *self._channels.receive()):
            (waiting if ("from", event.peer.name) in self._held_mail else now).append(event)
        self._inbox = waiting
        return now

    # -- time ----------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let the clock go on."""
        self.manual_clock.advance(seconds)

    def turn(self) -> bool:
        """Move everything once; whether anything happened."""
        movers: list[Callable[[], bool]] = [seat.turn for seat in self.seats.values()]
        movers.append(self._coordinate)
        if self._random is not None:
            self._random.shuffle(movers)
        busy = False
        for move in movers:
            busy = move() or busy
        if self.stepped and self.flow:
            busy = self.carry() or busy
        self.between()
        return busy

    def carry(self) -> bool:
        """Move every byte that waits on a stepped wire."""
        busy = False
        for seat in self._wires():
            while seat.connector.wire.start() or seat.connector.wire.finish():
                busy = True
        return busy

    def begin(self) -> None:
        """What waits on a stepped wire is begun, so that it can be taken back no more."""
        for seat in self._wires():
            while seat.connector.wire.start():
                pass

    def _wires(self) -> Iterator[StageSeat]:
        # a dead stage's too: what it had begun still lands
        return (seat for seat in (*self.seats.values(), *self._former) if self.stepped and seat.flows)

    def hold(self) -> None:
        """No chunk comes to its end from now on: the bytes wait where the wire is stepped, else what is said of them
        does."""
        self.flow = False
        if not self.stepped:
            for seat in self.seats.values():
                seat.gate.hold()

    def let_go(self) -> None:
        """Everything flows again: wires, gates, devices, mail, engines, stages, the coordinator and the launcher."""
        self.flow = self.launcher_runs = True
        self.coordinator_frozen = False
        for seat in self.seats.values():
            seat.gate.let_go()
            seat.gate.of = lambda transfer: True
            seat.frozen = seat.engine_frozen = False
            seat.device_runs = seat.flows = True
        self.let_mail_go()

    def run_until(
        self, condition: Callable[[], bool], what: str = "the condition comes true", turns: int = TURNS
    ) -> None:
        """Turn until ``condition`` holds.  Raises :class:`DeploymentStuck` after so many turns and some seconds.

        ``what`` says what was to happen and begins with a clause.
        """
        started, count = time.monotonic(), 0
        while not condition():
            count += 1
            if count > turns and (self.stepped or time.monotonic() > started + PATIENCE):
                raise DeploymentStuck(f"{what}: not so after {count} turns.\n{self.describe()}")
            if not self.turn() and not self.stepped:
                self._wait()

    def settle(self, turns: int = 60) -> None:
        """So many turns: for what must *not* come.  A transport that moves by itself gets some milliseconds as well."""
        for _ in range(turns):
            if not self.turn() and not self.stepped:
                self._wait()

    def _wait(self) -> None:
        """A transport with threads or sockets of its own may want the processor."""
        for seat in self.seats.values():
            if not (seat.over or seat.frozen):
                seat.guard.wait(0.0002)
                return
        time.sleep(0)

    def idle(self) -> bool:
        """Every request has ended and every stage that is up has retired everything."""
        alive = [seat for seat in self.seats.values() if not seat.over]
        return (
            all(answer.ended for answer in self.answers.values())
            and not len(self.coordinator)
            and all(not len(seat.stage.machine) for seat in alive)
        )

    def _coordinate(self) -> bool:
        if self.coordinator_frozen:
            return False
        if self.launcher_runs and self._doomed:
            doomed, self._doomed = self._doomed, []
            for seat in doomed:
                self._die(seat)
                self._joined(seat)
        events = self._receive()
        for event in events:
            if isinstance(event, ChannelLost):
                self._carry_out(self.coordinator.peer_lost(event.peer, event.reason, self.clock()))
                continue
            self.mail.append(Mail("from", event.peer, event.message))
            if isinstance(event.message, messages.Reply):
                self.coordinator.heard(event.peer, self.clock())
            else:
                self._carry_out(self.coordinator.handle(event.peer, event.message, self.clock()))
                if self.echoing and messages.family_of(event.message) == "transfer":
                    self._carry_out(self.coordinator.handle(event.peer, event.message, self.clock()))
        for seat in self.seats.values():
            if seat.stage.ended and not seat.joined and self.launcher_runs:
                self._joined(seat)
        deadline = self.coordinator.next_deadline()
        if deadline is not None and deadline <= self.clock():
            self._carry_out(self.coordinator.expire(self.clock()))
        return bool(events)

    def _carry_out(self, effects: list[fx.CoordinatorEffect]) -> None:
        for effect in effects:
            match effect:
                case fx.SendTo(peer, message):
                    self._send(peer, message)
                case fx.Tell(key, transfer, event):
                    self._tell(self.answers[key], transfer, event)
                case fx.Reached(key, transfer, milestone):
                    if key in self.answers and transfer in self.answers[key].transfers:
                        self.answers[key].milestones.append(milestone)
                case fx.Ask(peer):
                    self._send(peer, messages.Call("alive", "coordinator", "health"))
                case fx.Kill(peer):
                    self.kills.append(peer)
                    seat = self.seats.get(peer.name)
                    if seat is not None and seat.peer == peer and not seat.over:
                        self._doomed.append(seat)
                case fx.Restart(name):
                    self.add_stage(name, self.seats[name].engine.role)
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

    def check_balance(self, *, returned_twice: int = 0) -> None:
        """Everything that was taken is back, on every stage that is up and in the coordinator's books (C2.5, C8.4).

        ``returned_twice``: how many second returns of a credit a test has provoked.
        """
        repeated = 0
        for view in self.coordinator.peers():
            seat = self.seats[view.peer.name]
            repeated += view.repeated_returns
            if seat.peer != view.peer or seat.over:
                continue
            self._check_seat(seat, view)
        if repeated != returned_twice:
            raise DeploymentStuck(
                f"C2.5: {repeated} credits were returned a second time, {returned_twice} were to be: Retired was said"
                f" twice, or a fence came after it.\n{self.describe()}"
            )
        self.check_memory()
        for key, answer in self.answers.items():
            if len(answer.endings) > 1:
                raise DeploymentStuck(f"C1.1: request {key} ended {len(answer.endings)} times: {answer.endings}")

    def _check_seat(self, seat: StageSeat, view: PeerView) -> None:
        figures = seat.figures()
        expected = {
            "transfers": 0, "blocks_used": 0, "blocks_leased": 0, "blocks_promised": 0, "outstanding": 0,
            "inflight_bytes": 0, "quarantined_bytes": 0, "grants": 0, "unproven_chunks": 0,
            "final_slots_free": seat.engine.layout.final_slots,
            "blocks_free": seat.engine.layout.blocks - figures["blocks_prefix"],
        }  # fmt: skip
        wrong = {
            name: f"{figures.get(name):g} instead of {value:g}"
            for name, value in expected.items()
            if figures.get(name) != value
        }
        out = {"blocks": view.blocks_out, "slots": view.slots_out}
        if wrong or any(out.values()):
            raise DeploymentStuck(
                f"C2.5, C8.4: nothing is live any more, and the books of {seat.peer.name} do not balance: {wrong};"
                f" credits out: {out}.\n{self.describe()}"
            )

    def check_memory(self) -> None:
        """Nothing was written where nothing may be (C5.2, C3.1)."""
        for seat in [*self.seats.values(), *self._former]:
            if seat.engine.late_writes:
                raise DeploymentStuck(
                    f"C5.2: memory of {seat.peer} was written after it was free, or after it was received: (block,"
                    f" first byte) {seat.engine.late_writes[:5]}; final slots count from -1 downwards"
                )
            if not seat.crashed and (strays := seat.engine.strays()):
                raise DeploymentStuck(
                    f"C3.1, C5.2: {seat.peer} holds bytes where nobody may write: (block, first byte) {strays[:5]} is"
                    f" free memory, or lies beyond the {seat.engine.layout.block_tokens} tokens of a block; final slots"
                    " count from -1 downwards"
                )

    def finish(self, turns: int = TURNS, *, returned_twice: int = 0) -> None:
        """Let everything end, check the books, stop every stage in the order of C6.2, and check that all went well."""
        self.run_until(self.idle, "C2.5: every request ends and every stage retires it", turns)
        self.check_balance(returned_twice=returned_twice)
        self.close(turns)

    def stop(self, cause: str = "stopped by the test") -> None:
        """Fatal shutdown: the coordinator ends everything (C6.2)."""
        self._carry_out(self.coordinator.fatal(cause, self.clock()))

    def close(self, turns: int = TURNS) -> None:
        """Stop every stage; each must end as ordered."""
        self.stop("the test is over")
        self.run_until(
            lambda: all(seat.over for seat in self.seats.values()), "C6.2: every stage drains, closes and ends", turns
        )
        for name, seat in self.seats.items():
            outcome = seat.stage.outcome
            if not seat.crashed and (outcome is None or outcome.status):
                raise DeploymentStuck(f"C6.2: {name} did not end as ordered: {outcome}\n{self.describe()}")
            seat.engine.close()
        self._channels.close()

    def abandon(self) -> None:
        """Close what is still open, whatever state it is in; checks nothing.  For the end of a test that failed."""
        for seat in self.seats.values():
            seat.flows = True
        if self.stepped:
            with contextlib.suppress(Exception):
                self.carry()
        for seat in [*self.seats.values(), *self._former]:
            if not (seat.crashed or seat.guard.closed):
                _shut(seat.connector, tuple(seat.guard.peer_states()))
            seat.engine.close()
        self._channels.close()
        self.seats.clear()
        self._former.clear()
        self.between = lambda: None

    def describe(self) -> str:
        """Where everything stands."""
        lines = [f"  request {key}: {answer}, {len(answer.tokens)} tokens" for key, answer in self.answers.items()]
        for name, seat in self.seats.items():
            phases = {t[:8]: p.name for t, p in seat.phases.items()}
            state = "crashed" if seat.crashed else "frozen" if seat.frozen else seat.stage.outcome or "running"
            figures = {k: v for k, v in seat.guard.statistics().items() if v}
            lines.append(f"  {name}: {state}, transfers {phases}, transport {figures}")
        lines += [f"  fault: {fault.cause}" for fault in self.faults[-5:]]
        lines += [f"  violation of {v.clause} by {v.peer}: {v.text}" for v in self.violations[-5:]]
        last = [f"{m.way} {m.peer.name} {type(m.message).__name__}" for m in list(self.mail)[-12:]]
        return "\n".join([*lines, f"  last messages: {', '.join(last)}"])


class _Gated:
    """A connector plugin that puts a gate before what it opens, and keeps it."""

    def __init__(self, plugin: ConnectorPlugin, narrow: Mapping[str, Any]) -> None:
        self._plugin = plugin
        self._narrow = narrow
        self.name, self.api_version, self.Options = plugin.name, plugin.api_version, plugin.Options
        self.wire_version = getattr(plugin, "wire_version", 1)
        self.gate: Gate | None = None

    def probe(self, need: Need) -> Availability:
        return self._plugin.probe(need)

    def open(self, options: Any, context: ConnectorContext) -> TransferConnector:
        self.gate = Gate(self._plugin.open(options, context), **self._narrow)
        return cast("TransferConnector", self.gate)


def _shut(connector: TransferConnector, peers: tuple[PeerId, ...]) -> None:
    """Close an end at once: its peers count as dead, which nobody can contradict.  Bounded; never raises."""
    with contextlib.suppress(Exception):
        for peer in peers:
            connector.fenced(peer)
            connector.disconnect(peer)
        deadline = time.monotonic() + 2.0
        wire = getattr(connector, "wire", None)
        while connector.outstanding() and time.monotonic() < deadline:
            if wire is not None:
                wire.finish()
            connector.poll()
            connector.wait(0.001)
        connector.close()
