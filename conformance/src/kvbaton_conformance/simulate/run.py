"""The scheduler of one run: a random part whose moves are kept, then a fair part without faults."""

from __future__ import annotations

import bisect
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvbaton_conformance.simulate.scenario import FAULTS, Scenario
from kvbaton_conformance.simulate.wire import Flight, Link, State
from kvbaton_conformance.simulate.world import Broken, Engines, Move, Seat, World

#: Moves of the random part for each request, at most.
_MOVES = 250
#: Rounds of the fair part, at most: each is a turn for everybody.
_ROUNDS = 4000
#: Weights of ordinary moves.
_ORDINARY = {
    "submit": 4.0,
    "pump": 30.0,
    "engine": 20.0,
    "device": 8.0,
    "hear": 22.0,
    "wire": 22.0,
    "link": 2.0,
    "time": 2.0,
    "launcher": 2.0,
}

#: Makes engines for a scenario.
MakeEngines = Callable[[Scenario], Engines]


@dataclass
class Result:
    """What came of one run."""

    scenario: Scenario
    moves: list[Move] = field(default_factory=list)
    broken: Broken | None = None
    handoffs: int = 0
    requests: int = 0
    finished: int = 0
    made: int = 0


class Dice:
    """Draws the next move of the random part; None where the draw came to nothing."""

    def __init__(self, world: World, seed: int) -> None:
        self._world = world
        self._draw = random.Random(seed)
        weights = {**_ORDINARY, **{name: FAULTS[name] for name in sorted(world.scenario.faults)}}
        # some stage or part is slow in some runs
        for name in _ORDINARY:
            weights[name] *= self._draw.choice((0.2, 1.0, 1.0, 1.0, 3.0))
        self._kinds = [getattr(self, f"_{name}") for name in weights]
        self._weights = list(itertools.accumulate(weights.values()))
        self._next = 0
        #: How much of the random part is left once everything was asked for; in looks of :meth:`over`.
        self._rest = self._draw.randint(0, 8)

    def draw(self) -> Move | None:
        kind = self._kinds[bisect.bisect(self._weights, self._draw.random() * self._weights[-1])]
        move: Move | None = kind()
        return move

    def done(self) -> bool:
        return self._next >= self._world.scenario.requests

    def over(self) -> bool:
        """Whether the random part ends here."""
        if self.done():
            self._rest -= 1
        return self._rest < 0

    def _any(self) -> Seat:
        return self._draw.choice(list(self._world.seats.values()))

    def _name(self) -> str:
        return self._any().peer.name

    # -- ordinary

    def _submit(self) -> Move | None:
        world = self._world
        if world.unended and self._draw.random() < 0.05:
            return ("again", self._draw.choice(world.unended).number)
        if self.done() or len(world.unended) >= world.scenario.crowd:
            return None
        if not any(seat.connector.up for seat in world.seats.values()) and self._draw.random() < 0.98:
            return None  # nobody could serve it
        self._next += 1
        return ("submit", self._next - 1)

    def _pump(self) -> Move | None:
        calling = [seat for seat in self._world.seats.values() if seat.calls and not seat.over]
        if calling and self._draw.random() < 0.95:
            seat = self._draw.choice(calling)
        elif self._draw.random() < 0.2:
            seat = self._any()
        else:
            return None
        coming = len(seat.channel.coming)
        return ("pump", seat.peer.name, coming if self._draw.random() < 0.7 else self._draw.randint(0, coming))

    def _engine(self) -> Move | None:
        eager = [seat.peer.name for seat in self._world.seats.values() if seat.eager and not seat.over]
        return ("engine", self._draw.choice(eager)) if eager else None

    def _device(self) -> Move | None:
        busy = [seat.peer.name for seat in self._world.seats.values() if seat.device.pending() and not seat.over]
        return ("device", self._draw.choice(busy)) if busy else None

    def _hear(self) -> Move | None:
        waiting = [seat.peer.name for seat in self._world.seats.values() if seat.channel.going]
        return ("hear", self._draw.choice(waiting)) if waiting else None

    def _flight(self) -> Flight | None:
        flights = self._world.wire.flights
        return self._draw.choice(flights) if flights else None

    def _wire(self) -> Move | None:
        flight = self._flight()
        if flight is None:
            return None
        chunk = self._world.chunk(flight)
        match flight.state:
            case State.QUEUED:
                return ("start", chunk)
            case State.POSTED if self._world.scenario.buffering and flight.copy is None:
                return ("copy", chunk)
            case State.POSTED | State.LANDING:
                return ("land", chunk, self._draw.random() < 0.3)
            case State.LANDED:
                return ("report", chunk)
            case _:
                return ("fail", chunk, True)

    def _link(self) -> Move | None:
        links = [(seat.peer.name, peer.name, link) for seat, peer, link in self._world.links()]
        able = [found for found in links if found[2] in (Link.CONNECTING, Link.CLOSING)]
        if not able:
            return None
        one, other, link = self._draw.choice(able)
        return ("up" if link is Link.CONNECTING else "closed", one, other)

    def _time(self) -> Move:
        return ("time", self._draw.choice((0.01, 0.05, 0.2)))

    def _launcher(self) -> Move:
        able = []
        for name, seat in self._world.seats.items():
            fates = (
                ("notice", seat.unnoticed), ("kill", seat.doomed and not seat.over),
                ("join", seat.over and not seat.joined),
                ("restart", seat.wanted), ("sever", (seat.unnoticed or seat.doomed) and not seat.over),
                ("thaw", seat.frozen),
            )  # fmt: skip
            able += [(fate, name) for fate, possible in fates if possible]
        return self._draw.choice(able) if able and self._draw.random() < 0.8 else ("expire",)

    # -- faults

    def _abort(self) -> Move | None:
        live = self._world.unended
        return ("abort", self._draw.choice(live).number) if live else None

    def _fail(self) -> Move | None:
        flight = self._flight()
        return ("fail", self._world.chunk(flight), self._draw.random() < 0.5) if flight else None

    def _stall(self) -> Move | None:
        flight = self._flight()
        return (self._draw.choice(("stall", "stall", "wake")), self._world.chunk(flight)) if flight else None

    def _echo(self) -> Move:
        return (self._draw.choice(("echo", "echo", "receipt")), self._name())

    def _replay(self) -> Move:
        return ("replay", self._name(), self._draw.random() < 0.5, self._draw.randrange(1 << 20))

    def _stop(self) -> Move | None:
        return ("stop",) if self._draw.random() < 0.2 else None

    def _freeze(self) -> Move:
        return ("freeze", self._name())

    def _crash(self) -> Move:
        return ("crash", self._name())

    def _lose(self) -> Move:
        return ("lose", self._name())

    def _drop(self) -> Move | None:
        links = [(seat.peer.name, peer.name) for seat, peer, link in self._world.links() if link is Link.UP]
        return ("drop", *self._draw.choice(links), self._draw.random() < 0.5) if links else None

    def _slow(self) -> Move | None:
        links = [(seat.peer.name, peer.name) for seat, peer, link in self._world.links() if link is Link.CONNECTING]
        return ("slow", *self._draw.choice(links), self._draw.random() < 0.5) if links else None

    def _target(self) -> tuple[str, int] | None:
        live = [asked.number for asked in self._world.unended]
        return (self._name(), self._draw.choice(live)) if live else None

    def _compute(self) -> Move | None:
        target = self._target()
        return ("compute", *target) if target else None

    def _refuse(self) -> Move | None:
        target = self._target()
        return ("refuse", *target) if target else None

    def _raise(self) -> Move:
        return ("raise", self._name(), self._draw.choice(("submit", "poll")))

    def _expire(self) -> Move:
        return ("time", self._draw.choice((5.0, 31.0, 70.0)))


def play(scenario: Scenario, engines: MakeEngines | None = None) -> Result:
    """One run from its seed."""
    result = Result(scenario)
    world = World(scenario, engines(scenario) if engines else None)
    try:
        dice = Dice(world, scenario.seed)
        for step in range(_MOVES * scenario.requests):
            move = dice.draw()
            if move is not None:
                _make(world, move, result.moves)
            if not step % 64:
                world.wire.tidy()
                if dice.over():
                    break
        _finish(world)
    except Broken as broken:
        result.broken = broken
    _sum_up(world, result)
    return result


def replay(
    scenario: Scenario,
    moves: Sequence[Move],
    engines: MakeEngines | None = None,
    story: Callable[[str], None] | None = None,
) -> Result:
    """The random part from a list of moves, then the fair part."""
    result = Result(scenario)
    world = World(scenario, engines(scenario) if engines else None, story)
    try:
        for step, move in enumerate(moves):
            _make(world, move, result.moves)
            if not step % 64:
                world.wire.tidy()
        if story is not None:
            story("-- from here on everybody gets their turn, and there are no more faults")
        _finish(world)
    except Broken as broken:
        if story is not None:
            story(f"!! {broken}")
        result.broken = broken
    _sum_up(world, result)
    return result


def _make(world: World, move: Move, made: list[Move]) -> None:
    made.append(move)
    if not world.make(move):
        made.pop()


def _sum_up(world: World, result: Result) -> None:
    result.handoffs, result.made, result.requests = world.handoffs, world.moves, len(world.asked)
    result.finished = sum(asked.ended is not None and asked.ended.reason is not None for asked in world.asked)


# -- the fair part ---------------------------------------------------------------------------------------------------


def _finish(world: World) -> None:
    """Everybody gets their turn until everything has ended; then the books, then the shutdown (C6.2, C6.7)."""
    world.fair_since = world.now
    _until(world, lambda: world.quiet, "C6.7", "everything live ends")
    # what the stages still have to do for what has ended, such as closing the end towards a dead peer
    _until(world, lambda: _idle(world), "C6.7", "every stage comes to rest")
    world.check_books()
    _serve_again(world)
    world.make(("stop",))
    _until(
        world, lambda: all(seat.over for seat in world.seats.values()), "C6.2", "every stage ends when it is told to"
    )
    for seat in world.seats.values():
        outcome = seat.stage.outcome
        if not seat.dead and outcome is not None and outcome.status and not seat.unnoticed:
            raise Broken("C6.2", f"{seat.peer.name} did not end as ordered: {outcome.reason}")
    world.check_memory()


def _serve_again(world: World) -> None:
    """Whatever has happened: every stage is back, connected to all others, and serves."""
    if not world.must_serve:
        return
    _until(
        world,
        lambda: not world.must_serve or world.whole,
        "C6.2",
        "every stage is up again and connected to all others",
    )
    number = len(world.asked)
    world.make(("submit", number))
    _until(world, lambda: world.quiet, "C6.7", "everything live ends")
    ended = world.asked[number].ended
    if world.must_serve and ended is not None and ended.reason is None:
        raise Broken("C6.2", f"every stage is up and connected, and r{number} fails: {ended.cause}")
    _until(world, lambda: _idle(world), "C6.7", "every stage comes to rest")
    world.check_books()


def _idle(world: World) -> bool:
    return all(
        seat.over or not (seat.channel.coming or seat.channel.going or seat.guard.outstanding())
        for seat in world.seats.values()
    ) and not any(flight.writes for flight in world.wire.flights)


def _until(world: World, condition: Callable[[], bool], clause: str, what: str) -> None:
    still = 0
    for _ in range(_ROUNDS):
        if condition():
            return
        busy = _round(world)
        still = 0 if busy else still + 1
        # nothing moves by itself any more: only time can help
        world.make(("time", 0.05 if still < 3 else 10.0))
    live = ", ".join(f"r{asked.number}" for asked in world.unended) or "no request"
    flights = ", ".join(f"{world.tell(flight)} {flight.state.value}" for flight in world.wire.flights)
    flights = flights or "nothing under way"
    stages = "; ".join(
        f"{name} {'dead' if seat.dead else 'over' if seat.over else 'up'}"
        f" {[f'{world.name_of(t)} {p.name}' for t, p in seat.stage.machine.transfers().items()]}"
        for name, seat in world.seats.items()
    )
    raise Broken(
        clause, f"{what}: not so after {_ROUNDS} rounds and {world.now - 1000:.0f} s; {live} live; {stages}; {flights}"
    )


def _round(world: World) -> bool:
    """A turn for everybody; whether anything but time and idle passes came of it."""
    busy = False
    for move in _fair(world):
        busy = (world.make(move) and move[0] not in ("pump", "time")) or busy
    world.wire.tidy()
    return busy


def _fair(world: World) -> Iterator[Move]:
    for name in tuple(world.seats):
        seat = world.seats[name]
        if seat.frozen or seat.unnoticed or seat.doomed or seat.over:
            for fate in ("thaw", "notice", "sever", "kill", "join", "restart"):
                yield (fate, name)
            seat = world.seats[name]
        seat.connector.raises.clear()
        yield ("pump", name, len(seat.channel.coming))
        yield ("engine", name)
        while seat.device.pending() and not seat.over:
            yield ("device", name)
        while seat.channel.going and not seat.joined:
            yield ("hear", name)
    for seat, peer, link in tuple(world.links()):
        if link is Link.CONNECTING and peer.name in world.seats and world.seats[peer.name].peer == peer:
            yield ("up", seat.peer.name, peer.name)
        elif link is Link.CLOSING:
            yield ("closed", seat.peer.name, peer.name)
        elif link is Link.UP and _broken(world, seat, peer):
            yield ("drop", seat.peer.name, peer.name, False)
    for flight in tuple(world.wire.flights):
        chunk = world.chunk(flight)
        for move in ("start", "copy", "report"):
            yield (move, chunk)
        yield ("land", chunk, False)
        yield ("report", chunk)
        if flight.state is State.VOID:
            yield ("fail", chunk, True)
    yield ("expire",)


def _broken(world: World, seat: Seat, peer: object) -> bool:
    """Whether the other end of a connection is down."""
    other = next((s for s in world.seats.values() if s.peer == peer), None)
    return other is not None and not other.over and other.connector.links.get(seat.peer) is Link.DOWN
