"""One engine on a bench: opened, told what to do, and heard; and two of them with a hand-off by plain byte copies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest

from kvbaton.engine import (
    Admission,
    Allocator,
    ComputedRange,
    EnginePlugin,
    FinishReason,
    Request,
    Role,
    SamplingParams,
    StepOutput,
)
from kvbaton.errors import KvbatonError
from kvbaton.geometry import KVMap
from kvbaton.identity import TransferId, new_transfer_id
from kvbaton.plugins import choose_engine
from kvbaton.reservation import Reservation, Tables
from kvbaton.segments import Segments
from kvbaton_conformance import device_memory
from kvbaton_conformance.clauses import require
from kvbaton_conformance.device_memory import window
from kvbaton_conformance.subject import SubjectRefused
from kvbaton_conformance.suite.topic import EngineTopic

Bytes = npt.NDArray[np.uint8]

#: Steps that anything may take, and seconds that a device may take.
STEPS, PATIENCE = 3000, 20.0


@dataclass(eq=False)
class Answer:
    """What one request came to."""

    token_ids: list[int] = field(default_factory=list)
    exit_depths: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    errors: list[Exception] = field(default_factory=list)

    @property
    def shown(self) -> tuple[list[int], list[int], FinishReason | None]:
        return self.token_ids, self.exit_depths, self.finish_reason


class Bench:
    """An engine in one role, its callbacks, and its memory under a test's own eyes."""

    def __init__(self, engine: Any, allocate: Allocator | None = None) -> None:
        self.engine = engine
        self.regions = {region.id: region for region in engine.regions(allocate)}
        self.ranges: list[ComputedRange] = []
        self.reservations: dict[TransferId, Reservation] = {}
        self.refusals: dict[TransferId, tuple[str, bool]] = {}
        self.active: list[TransferId] = []
        self.answers: dict[TransferId, Answer] = {}
        #: What ``can_schedule`` says.
        self.open = True
        #: Called in the moment of ``reserved``.
        self.on_reserved: Callable[[Reservation], None] = lambda reservation: None
        if engine.role is not Role.COLOCATED:
            engine.attach(self)
        self.before = dict(engine.statistics())

    # -- the callbacks -------------------------------------------------------------------------------------------------

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        return self.open

    def prefill_submitted(self, computed: ComputedRange) -> None:
        self.ranges.append(computed)

    def reserved(self, reservation: Reservation) -> None:
        require(
            reservation.transfer not in self.reservations, "C2.2", "one reservation was answered twice",
            seen=reservation.transfer,
        )  # fmt: skip
        self.reservations[reservation.transfer] = reservation
        self.on_reserved(reservation)

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> None:
        self.refusals[transfer] = reason, retry

    def activated(self, transfer: TransferId) -> None:
        self.active.append(transfer)

    # -- moving it -----------------------------------------------------------------------------------------------------

    def reserve(self, request: Request, *, prefix: int = 0, transfer: TransferId | None = None) -> TransferId:
        """Ask it to take part; on D the answer has come when this returns."""
        transfer = transfer or new_transfer_id()
        self.engine.reserve_transfer(Admission(transfer, request, prefix))
        if self.engine.role is Role.DECODE:
            self.run_until(
                lambda: transfer in self.reservations or transfer in self.refusals, "C2.7: D answers a reservation"
            )
        return transfer

    def hold(self, request: Request) -> Reservation:
        """A reservation that must be granted."""
        transfer = self.reserve(request)
        require(
            transfer in self.reservations, "C2.4", "an empty engine refuses a request that fits",
            seen=self.refusals.get(transfer),
        )  # fmt: skip
        return self.reservations[transfer]

    def step(self) -> Sequence[StepOutput]:
        try:
            outputs = list(self.engine.step())
        except Exception as error:
            require(False, "C6.3", "step() raised", expected="StepOutput(error=...)", seen=repr(error))
            raise
        for output in outputs:
            answer = self.answers.setdefault(output.transfer, Answer())
            require(
                answer.finish_reason is None and not answer.errors, "C7.2",
                "something was produced after the end of a request", seen=output,
            )  # fmt: skip
            answer.token_ids += output.token_ids
            answer.exit_depths += output.exit_depths
            answer.finish_reason = output.finish_reason
            if output.error is not None:
                answer.errors.append(output.error)
        return outputs

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        for _ in range(STEPS):
            if condition():
                return
            self.step()
        require(False, *_clause(what), seen=f"not so after {STEPS} steps: {self.engine.statistics()}")

    def finish(self) -> None:
        """Until it has nothing to do."""
        for _ in range(STEPS):
            if not self.engine.has_work():
                return
            self.step()
        require(False, "C6.7", "the engine has work without end", seen=self.engine.statistics())

    def prefill(self, transfer: TransferId) -> list[ComputedRange]:
        """Until the last range of a transfer is reported and its device work is done."""
        self.run_until(lambda: any(r.last for r in self.of(transfer)), "C3.4: P reports the last range")
        for computed in self.of(transfer):
            wait_for(computed)
        return self.of(transfer)

    def of(self, transfer: TransferId) -> list[ComputedRange]:
        return [computed for computed in self.ranges if computed.transfer == transfer]

    def quiet(self, transfer: TransferId) -> None:
        """Suspend, and wait until its device work is done."""
        event = self.engine.suspend_transfer(transfer)
        deadline = time.monotonic() + PATIENCE
        while event is not None and not event.query():
            if self.device is not None:
                self.device.complete()
            require(time.monotonic() < deadline, "C5.3", "the event of suspend_transfer() never completes")
            time.sleep(0)

    @property
    def device(self) -> Any:
        """The device under a test's control, where the engine has one."""
        device = getattr(self.engine, "device", None)
        return device if hasattr(device, "complete") else None

    # -- its memory ----------------------------------------------------------------------------------------------------

    def places(self, tables: Tables, start: int, end: int) -> Segments:
        """Where tokens ``[start, end)`` lie."""
        if start == end:
            return Segments.empty()
        return KVMap(self.engine.geometry, self.engine.geometry).plan(tables, tables, start, end)[0]

    def read(self, where: Segments) -> list[bytes]:
        return [window(self.regions[region])[at : at + size].tobytes() for region, at, size in where.triples()]

    def write(self, where: Segments, value: int) -> None:
        for region, at, size in where.triples():
            window(self.regions[region])[at : at + size] = value

    def final(self, slot: int) -> Segments:
        segment: Segments = self.engine.geometry.final_segment(slot)
        return segment

    def check_balance(self, clause: str = "C8.4") -> None:
        """Everything is back: blocks free or cached, slots free, nobody an owner."""
        now = self.engine.statistics()
        held = {name: now.get(name, 0) for name in ("blocks_used", "blocks_leased", "blocks_promised", "transfers")}
        lost = self.before["blocks_free"] + self.before["blocks_prefix"] - now["blocks_free"] - now["blocks_prefix"]
        slots = self.before["final_slots_free"] - now["final_slots_free"]
        require(
            not any(held.values()) and not lost and not slots, clause, "all has ended and the books do not balance",
            expected="no block and no slot in use, all of them free or cached",
            seen=f"{held}, {lost:g} blocks and {slots:g} slots lost",
        )  # fmt: skip


class Hand:
    """P and D with a hand-off by hand between them: plain copies where ``KVMap`` says, and no transport."""

    def __init__(self, p: Bench, d: Bench) -> None:
        self.p, self.d = p, d
        self.map = KVMap(p.engine.geometry, d.engine.geometry)
        #: Bytes of KV that each transfer needed.
        self.sent: dict[TransferId, int] = {}

    def carry(self, computed: ComputedRange) -> None:
        """Copy what a range adds and D lacks; with the last one, the final payload."""
        reservation = self.d.reservations[computed.transfer]
        start = max(computed.start, reservation.valid)
        wait_for(computed)
        if computed.end > start:
            source, target = self.map.plan(computed.tables, reservation.arrays(), start, computed.end)
            self.sent[computed.transfer] = self.sent.get(computed.transfer, 0) + self._copy(source, target)
        if computed.last and self.map.source.final_bytes:
            self._copy(self.p.final(computed.final_slot), self.d.final(reservation.final_slot))

    def hand_over(self, request: Request, damage: Callable[[Reservation], None] | None = None) -> TransferId:
        """Reserve, prefill, carry, import; P has released it."""
        reservation = self.d.hold(request)
        transfer = reservation.transfer
        self.p.reserve(request, prefix=reservation.valid, transfer=transfer)
        for computed in self.p.prefill(transfer):
            self.carry(computed)
        self.p.engine.release_transfer_compute(transfer)
        self.p.engine.release_transfer(transfer)
        if damage is not None:
            damage(reservation)
        self.d.engine.accept_import(transfer, len(request.prompt))
        return transfer

    def run(self, request: Request, damage: Callable[[Reservation], None] | None = None) -> Answer:
        """The whole of one request, both engines balanced afterwards."""
        transfer = self.hand_over(request, damage)
        answer = self.d.answers.setdefault(transfer, Answer())
        self.d.run_until(
            lambda: answer.finish_reason is not None or bool(answer.errors), "A1: D decodes the request to its end"
        )
        self.d.quiet(transfer)
        self.d.engine.release_transfer(transfer)
        return answer

    def _copy(self, source: Segments, target: Segments) -> int:
        for (region, at, size), (into, start, wanted) in zip(source.triples(), target.triples(), strict=True):
            require(size == wanted, "C3.6", "source and destination segments have other lengths", seen=(size, wanted))
            window(self.d.regions[into])[start : start + size] = window(self.p.regions[region])[at : at + size]
        return source.nbytes


def wait_for(computed: ComputedRange) -> None:
    """Until the device work behind a range is done."""
    deadline = time.monotonic() + PATIENCE
    while computed.ready is not None and not computed.ready.query():
        require(time.monotonic() < deadline, "C4", "the device event of a range never completes", seen=computed)
        time.sleep(0)


def _clause(what: str) -> tuple[str, str]:
    clause, _, text = what.partition(": ")
    return clause, f"it never comes that {text}"


# -- what is judged ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Abilities:
    """What of the optional the engine that is judged has; found by opening one."""

    #: ``engine.device`` completes events when a test says so: see ``ScriptedDevice``.
    device_control: bool
    #: The class has ``break_request``.
    breakable: bool
    #: An imported prompt is found again.
    prefix_caching: bool
    #: A long prompt is reported in several ranges.
    chunked: bool


@dataclass(frozen=True, eq=False)
class EngineSubject:
    """An engine that can be opened here, in any role."""

    title: str
    plugin: EnginePlugin
    model: str
    options: Any
    vocabulary: int
    capabilities: Abilities
    #: Number of the CUDA device that it runs on; None: none.
    device: int | None = None
    modes: tuple[str, ...] = ("in-process",)

    def header(self) -> list[str]:
        kind = type(self.plugin)
        given = ", ".join(f"{key}={value}" for key, value in sorted(self.options.model_dump().items()))
        able = self.capabilities
        return [
            f"engine {self.title} ({kind.__module__}.{kind.__qualname__}), options {given}",
            f"abilities found: device_control={able.device_control}, breakable={able.breakable}",
            f"abilities found: prefix_caching={able.prefix_caching}, chunked={able.chunked}",
        ]

    def open(self, role: Role) -> Any:
        return self.plugin.open(self.model, self.options, role, self.device)


class BenchTopic(EngineTopic):
    """Judges an engine, which a subclass names, with its memory on the host, or on CUDA device number ``device``.

    ``engine``: an entry point's name, ``module:object`` or a plugin object; ``model`` and ``engine_options`` as in the
    settings.  ``vocabulary``: token ids 1 up to this may be in a prompt.  ``break_request(engine, transfer)``, a
    staticmethod: make this one request fail while it is computed.
    """

    settable = frozenset(
        {"engine", "model", "engine_options", "vocabulary", "device", "break_request", "needs_hardware"}
    )

    engine: ClassVar[Any] = None
    model: ClassVar[str] = ""
    engine_options: ClassVar[Mapping[str, Any]] = {}
    vocabulary: ClassVar[int] = 200
    device: ClassVar[int | None] = None
    break_request: ClassVar[Any] = None
    needs_hardware: ClassVar[str] = ""

    @classmethod
    def subject_for(cls, config: pytest.Config) -> EngineSubject:  # noqa: ARG003
        if cls.engine is None or not cls.model:
            raise SubjectRefused(
                f"{cls.__name__} says nothing about which engine it judges: set engine and model in the class"
            )
        if cls.device is not None and (reason := device_memory.absent((cls.device,))):
            raise SubjectRefused(
                f"engine {cls.engine} cannot be judged on a device: {reason}", unavailable=True,
                hardware="a CUDA device",
            )  # fmt: skip
        try:
            plugin, options = choose_engine(cls.engine, dict(cls.engine_options))
            plugin.check(cls.model, options)
        except KvbatonError as error:
            raise SubjectRefused(str(error)) from error
        title = f"{plugin.name} {cls.model}"
        unknown = Abilities(False, False, False, False)
        look = EngineSubject(title, plugin, cls.model, options, cls.vocabulary, unknown, cls.device)
        try:
            able = _abilities(look, cls.break_request is not None)
        except Exception as error:
            raise SubjectRefused(f"engine {title} cannot be opened: {type(error).__name__}: {error}") from error
        return EngineSubject(title, plugin, cls.model, options, cls.vocabulary, able, cls.device)

    @pytest.fixture
    def open_bench(self, subject: EngineSubject) -> Iterator[Callable[..., Bench]]:
        """``open_bench(role) -> Bench``; what it opened is closed after the test."""
        opened: list[Bench] = []

        def open_one(role: Role, allocate: Allocator | None = None) -> Bench:
            opened.append(Bench(subject.open(role), allocate))
            return opened[-1]

        yield open_one
        while opened:
            opened.pop().engine.close()

    @pytest.fixture
    def p(self, open_bench: OpenBench) -> Bench:
        return open_bench(Role.PREFILL)

    @pytest.fixture
    def d(self, open_bench: OpenBench) -> Bench:
        return open_bench(Role.DECODE)

    @pytest.fixture
    def hand(self, p: Bench, d: Bench) -> Hand:
        """P and D with a hand-off by hand between them."""
        return Hand(p, d)

    @pytest.fixture
    def ask(self, subject: EngineSubject) -> Ask:
        """``ask(length, text) -> Request``: prompts of different ``text`` share no beginning."""
        return Ask(subject.vocabulary)


OpenBench = Callable[..., Bench]


class Ask:
    """Makes requests whose tokens are all in the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def __call__(self, length: int, text: int = 0, max_tokens: int = 4, **sampling: Any) -> Request:
        draw = np.random.default_rng(text)
        prompt = tuple(int(token) for token in draw.integers(1, self._vocabulary, size=length))
        return Request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling))


def _abilities(subject: EngineSubject, breakable: bool) -> Abilities:
    """Serve one request and look; whether it is served rightly is for the tests to say."""
    p, d = Bench(subject.open(Role.PREFILL)), Bench(subject.open(Role.DECODE))
    try:
        valid = 0
        with contextlib.suppress(Exception):
            request = Ask(subject.vocabulary)(6 * d.engine.capacity().block_tokens + 1)
            Hand(p, d).run(request)
            valid = d.hold(request).valid
        return Abilities(d.device is not None, breakable, valid > 0, len(p.ranges) > 1)
    finally:
        p.engine.close()
        d.engine.close()
