"""What makes a class of tests part of the kit: its level, its fixtures, its identifiers.

::

    class Visibility(ConnectorTopic):
        '''T3: what a receipt promises about bytes.'''

        @pytest.mark.clause("T3")
        def test_every_byte_of_a_chunk_arrives(self, pair): ...

Markers that the kit understands:

``clause(*ids)``
    The clauses that the test proves.  Every standard test has one.
``requires(capability, ...)``, ``requires(name=value)``
    The test needs what the running connector may or may not declare; it is *absent* where it does not.
``mode("in-process")``, ``mode("two-processes")``
    The test makes sense with the ends placed so, and only so.
``absent_where(reason=function)``
    ``function(subject)`` says why the test makes no sense for what is judged; nothing where it does.

They count where they stand at the test's function in the suite.  What anybody else adds to a collected test does not.

A failure is raised with :func:`kvbaton_conformance.clauses.require`, so that its message begins with the clause and
says what was expected, what was seen and where to look.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from kvbaton.connector import MemoryKind
from kvbaton.identity import PeerId
from kvbaton_conformance.clauses import ClauseBroken, leading_clause
from kvbaton_conformance.harness import (
    REGIONS,
    End,
    LocalEnd,
    Pace,
    Pair,
    close_ends,
    drain_ends,
    open_end,
    raise_all,
    steady,
)
from kvbaton_conformance.leaks import holdings, left_behind
from kvbaton_conformance.placement import PAIR, shown
from kvbaton_conformance.subject import Mode, Reference, Subject, SubjectRefused, resolve
from kvbaton_conformance.two_process import Processes, RemoteEnd, open_remote_end
from kvbaton_conformance.warm_up import warm_up

#: Where standard tests are defined.
SUITE = "kvbaton_conformance.suite"


class Conformance:
    """Root of everything that the kit collects.  A subclass sets what :attr:`settable` names and nothing else."""

    #: ``connector``, ``handoff``, ``engine`` or ``guard``: of the class that defines a test, not of the collected one.
    level: ClassVar[str] = ""
    #: Attributes that a third party's subclass may set.
    settable: ClassVar[frozenset[str]] = frozenset()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if not cls.__module__.startswith(SUITE):
            return  # what a third party overrides is found when its class is collected
        owners: dict[str, type] = {}
        for base in cls.__mro__:
            for name in vars(base):
                if name.startswith("test") and base.__module__.startswith(SUITE):
                    other = owners.setdefault(name, base)
                    if other is not base:
                        raise TypeError(
                            f"{name} is in {other.__module__} and in {base.__module__}: one hides the other"
                        )

    @classmethod
    def subject_for(cls, config: pytest.Config) -> Any:  # noqa: ARG003
        """What this class judges, with ``modes``, ``header()`` and ``capabilities``.

        Raises :class:`~kvbaton_conformance.subject.SubjectRefused`.
        """
        raise SubjectRefused(f"{cls.__name__} belongs to no level of the kit: derive it from one of its classes")

    @classmethod
    def warm_up(cls, subject: Any) -> None:
        """Let ``subject`` do everything once in this process, before the first test of a class."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, request: pytest.FixtureRequest) -> Iterator[None]:
        """Nothing that was not there before is there after a test (T10).

        What a library keeps once per process is there before the first test: :meth:`warm_up`.
        """
        from kvbaton_conformance.plugin import be_warm, has_failed

        be_warm(request.node)
        before = holdings()
        yield
        if has_failed(request.node):
            return
        if left := left_behind(before):
            raise ClauseBroken(
                "T10", "something was left behind after everything was closed", expected="nothing new in this process",
                seen="; ".join(left), look="what close() joins, closes and unlinks, also after a failed connect",
            )  # fmt: skip

    @pytest.fixture
    def subject(self, request: pytest.FixtureRequest) -> Any:
        """What is judged."""
        from kvbaton_conformance.plugin import subject_of

        return subject_of(request.node)

    @pytest.fixture
    def seed(self, request: pytest.FixtureRequest) -> int:
        """This test's own seed, made from ``--conformance-seed`` and the test's name; a failure prints it."""
        base = int(request.config.getoption("--conformance-seed"))
        return base * 1_000_003 + zlib.crc32(request.node.name.encode())

    @pytest.fixture
    def draw(self, seed: int) -> random.Random:
        """A source of random values under :meth:`seed`."""
        return random.Random(seed)


class ConnectorSubject(Conformance):
    """Judges a connector, which a subclass names; without one, the command line must."""

    settable = frozenset({"connector", "connector_options", "connector_memory", "connector_devices", "needs_hardware"})

    #: An entry point's name, ``module:object``, a plugin object, or a callable that returns one (as a staticmethod).
    connector: ClassVar[Any] = None
    #: Options of the connector, as in ``transport.options``.
    connector_options: ClassVar[Mapping[str, Any]] = {}
    #: Where the memory is that it moves: ``host`` or ``cuda``; unset, the command line says so, or else host.  Without
    #: a CUDA device, ``cuda`` is a skip, and an error under ``--require-env``.
    connector_memory: ClassVar[MemoryKind | None] = None
    #: With ``cuda``: numbers of the devices that the ends lie on in turn, prefill's first; unset, the command line says
    #: so, or else device 0 for all.  One that is not there is treated as no device at all.
    connector_devices: ClassVar[Sequence[int] | None] = None
    #: Where set, a connector whose ``probe`` says no is skipped with this reason (and is an error under
    #: ``--require-env``); where not, it is an error always.
    needs_hardware: ClassVar[str] = ""

    @classmethod
    def warm_up(cls, subject: Subject) -> None:
        warm_up(subject.plugin, subject.options, subject.devices, meet="in-process" in subject.modes)

    @classmethod
    def subject_for(cls, config: pytest.Config) -> Subject:
        import inspect

        static = inspect.getattr_static(cls, "connector")
        options = dict(cls.connector_options)
        memory: MemoryKind = cls.connector_memory or config.getoption("--connector-memory")
        devices = cls._devices(config, memory)
        if static is None:
            named = config.getoption("--connector")
            if not named:
                raise SubjectRefused(
                    f"{cls.__name__} says nothing about which connector it judges: set"
                    f' connector = "NAME" in the class, or pass --connector NAME'
                )
            options |= command_line_options(config)
            return resolve(named, options, Reference(named), named, memory, devices)
        if isinstance(static, str):
            return resolve(static, options, Reference(static), static, memory, devices)
        owner = next(base for base in cls.__mro__ if "connector" in vars(base))
        reference = Reference(None, inspect.getfile(owner), owner.__module__, owner.__qualname__)
        title = getattr(static, "name", None) or f"of {cls.__name__}"
        return resolve(static, options, reference, str(title), memory, devices)

    @classmethod
    def _devices(cls, config: pytest.Config, memory: MemoryKind) -> Sequence[int]:
        """Where the ends are to lie.  Raises :class:`~kvbaton_conformance.subject.SubjectRefused`."""
        from kvbaton_conformance.plugin import command_line_devices

        own = cls.connector_devices
        if own is None:
            asked = command_line_devices(config)
            # a class that wants the host's memory does not mean the command line's devices
            if asked and memory != "cuda" and cls.connector_memory is None:
                raise SubjectRefused(
                    f"--connector-devices {shown(asked)}: it goes with --connector-memory cuda, which says that the"
                    " memory is on devices"
                )
            return asked
        if memory != "cuda":
            raise SubjectRefused(
                f"{cls.__name__} sets connector_devices, and its memory is the host's: set"
                ' connector_memory = "cuda", or pass --connector-memory cuda'
            )
        if not own or not all(type(device) is int and device >= 0 for device in own):
            raise SubjectRefused(
                f"{cls.__name__} sets connector_devices = {own!r}: write numbers of CUDA devices, such as (0, 1)"
            )
        return own


def command_line_options(config: pytest.Config) -> dict[str, str]:
    """``--connector-option KEY=VALUE`` as a mapping."""
    pairs: dict[str, str] = {}
    for text in config.getoption("--connector-option") or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SubjectRefused(f'--connector-option "{text}": write KEY=VALUE')
        pairs[key.strip()] = value
    return pairs


class Ends:
    """Opens ends in one mode; afterwards audits and closes all of them."""

    def __init__(self, subject: Subject, mode: Mode, processes: Processes) -> None:
        self.subject = subject
        self.mode = mode
        self.processes = processes
        self._ends: list[End] = []

    def end(self, name: str, *, peer: PeerId | None = None, **how: Any) -> End:
        """One end, its memory poisoned; ``how`` as for :func:`kvbaton_conformance.harness.open_end`."""
        subject, peer = self.subject, peer or PeerId.start(name)
        grain = subject.capabilities.alignment
        regions = how.pop("regions", REGIONS)
        sizes = {id: nbytes * grain for id, nbytes in regions.items()}
        how = {"seed": len(self._ends), "regions": sizes, **how}
        end: End
        if self.mode == "in-process":
            how = {"device": subject.device(peer.name), **how}
            end = open_end(subject.plugin, subject.options, peer, **how)
        else:
            end = open_remote_end(self.processes, subject, peer, how, subject.given_options)
        self._ends.append(end)
        return end

    def pair(self, *, connect: bool = True, pace: Pace = steady, **how: Any) -> Pair:
        """A source whose memory is filled and a target, connected unless told otherwise."""
        if self.mode == "two-processes":
            self.processes.prepare([self.subject.device(name) for name in PAIR])
        pair = Pair(self.end(PAIR[0], **how), self.end(PAIR[1], **how), pace=pace)
        pair.source.memory.fill()
        if connect:
            pair.connect()
        return pair

    def lose(self, end: End) -> None:
        """``end`` goes away: killed and joined where it has a process of its own, else closed.

        What is posted *by* it must be over where it cannot be killed.
        """
        if isinstance(end, RemoteEnd):
            end.kill()
        else:
            end.guard.close()

    @property
    def opened(self) -> Sequence[End]:
        """Those that are to be closed, in the order in which they were opened."""
        return tuple(self._ends)

    def done(self, end: End) -> None:
        """Close one end before the test is over, as :meth:`close` does it."""
        self._ends.remove(end)
        raise_all(self._heard_of(end) + self._close([end]))

    def close(self, *, failed: bool = False) -> None:
        """As at the end of every test: resume what was stopped, look at what each plugin did, drain, close all.

        What is wrong at one end keeps no other from being closed.  ``failed``: the test has found something already, so
        that nobody waits for chunks that may never end.

        Raises :class:`~kvbaton_conformance.clauses.ClauseBroken` with everything that is wrong.
        """
        ends = tuple(self._ends)
        self._ends.clear()
        for end in ends:
            if isinstance(end, RemoteEnd) and end.hung:
                end.resume()
        problems = [problem for end in ends for problem in self._heard_of(end)]
        problems += self._receipts_for_nothing(ends)
        if not failed:
            problems += drain_ends(ends)
        raise_all(problems + self._close(ends))

    def _heard_of(self, end: End) -> list[str]:
        """What is wrong at an end, or that it cannot be asked any more: then its process is joined."""
        if isinstance(end, RemoteEnd) and not end.dead and not end.process.alive:
            end.kill()
            return [f"T7: the process of {end.peer} died", *end.problems()]
        try:
            return end.problems()
        except Exception as error:
            end.put_down()
            return [_clause_first("T7", f"{end.peer} does not answer: {error}")]

    def _receipts_for_nothing(self, ends: Sequence[End]) -> list[str]:
        if any(end.dead for end in ends):
            return []  # nobody knows what it had submitted
        try:
            submitted = {key for end in ends for key in end.testimony().accepted}
        except Exception:
            return []  # closing it will say why
        return [
            f"T3: {end.peer} got a receipt for chunk {receipt.sequence} of transfer {receipt.transfer}, which nobody"
            " has submitted"
            for end in ends
            for receipt in end.receipts
            if (receipt.transfer, receipt.sequence) not in submitted
        ]

    def _close(self, ends: Sequence[End]) -> list[str]:
        """What is wrong with how they could be closed, and with what is left of them."""
        problems: list[str] = []
        try:
            close_ends(ends)
        except ClauseBroken as error:
            problems.append(str(error))
        for end in ends:
            if end.dead:
                continue
            try:
                problems += self._unbalanced(end)
                if isinstance(end, RemoteEnd):
                    problems += self.processes.give_back(end.process)
            except Exception as error:
                end.put_down()
                problems.append(_clause_first("T10", f"{end.peer} could not be seen off: {error}"))
            if isinstance(end, LocalEnd):
                end.let_go()
        return problems

    def _unbalanced(self, end: End) -> list[str]:
        figures = end.guard.statistics()
        held = {name: figures[name] for name in ("inflight_bytes", "inflight_chunks", "quarantined_bytes")}
        return [f"T6: {end.peer} is closed and its budget has not come back: {held}"] if any(held.values()) else []


def _clause_first(clause: str, text: str) -> str:
    return text if leading_clause(text) else f"{clause}: {text}"


class ConnectorTopic(ConnectorSubject):
    """Tests of two ends of a connector against the T clauses."""

    level = "connector"

    @pytest.fixture
    def ends(self, request: pytest.FixtureRequest, subject: Subject, mode: Mode) -> Iterator[Ends]:
        """Opens ends in this test's mode; audits and closes them after it."""
        from kvbaton_conformance.plugin import has_failed, processes_of

        ends = Ends(subject, mode, processes_of(request.config))
        yield ends
        failed = has_failed(request.node)
        try:
            ends.close(failed=failed)
        except Exception:
            # what the test itself has found is the cause
            if not failed:
                raise

    @pytest.fixture
    def pair(self, ends: Ends) -> Pair:
        """Two connected ends."""
        return ends.pair()


class EngineTopic(Conformance):
    """Tests of a :class:`~kvbaton.engine.StageEngine` alone."""

    level = "engine"


class GuardTopic(Conformance):
    """Tests of core's guard alone, against a scripted plugin."""

    level = "guard"


class HandoffTopic(ConnectorSubject):
    """Tests of a whole hand-off over a connector against the C clauses.

    ``subject`` is the connector; ``mode`` places the stages.
    """

    level = "handoff"
