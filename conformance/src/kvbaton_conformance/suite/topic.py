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

A failure is raised with :func:`kvbaton_conformance.clauses.require`, so that its message begins with the clause and
says what was expected, what was seen and where to look.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from kvbaton_conformance.harness import Pair, open_pair
from kvbaton_conformance.subject import Mode, Reference, Subject, SubjectRefused, resolve

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

    settable = frozenset({"connector", "connector_options", "needs_hardware"})

    #: An entry point's name, ``module:object``, a plugin object, or a callable that returns one (as a staticmethod).
    connector: ClassVar[Any] = None
    #: Options of the connector, as in ``transport.options``.
    connector_options: ClassVar[Mapping[str, Any]] = {}
    #: Where set, a connector whose ``probe`` says no is skipped with this reason (and is an error under
    #: ``--require-env``); where not, it is an error always.
    needs_hardware: ClassVar[str] = ""

    @classmethod
    def subject_for(cls, config: pytest.Config) -> Subject:
        import inspect

        static = inspect.getattr_static(cls, "connector")
        options = dict(cls.connector_options)
        if static is None:
            named = config.getoption("--connector")
            if not named:
                raise SubjectRefused(
                    f"{cls.__name__} says nothing about which connector it judges: set"
                    f' connector = "NAME" in the class, or pass --connector NAME'
                )
            return resolve(named, {**options, **command_line_options(config)}, Reference(named), named)
        if isinstance(static, str):
            return resolve(static, options, Reference(static), static)
        owner = next(base for base in cls.__mro__ if "connector" in vars(base))
        reference = Reference(None, inspect.getfile(owner), owner.__module__, owner.__qualname__)
        title = getattr(static, "name", None) or f"of {cls.__name__}"
        return resolve(static, options, reference, str(title))


def command_line_options(config: pytest.Config) -> dict[str, str]:
    """``--connector-option KEY=VALUE`` as a mapping."""
    pairs: dict[str, str] = {}
    for text in config.getoption("--connector-option") or ():
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise SubjectRefused(f'--connector-option "{text}": write KEY=VALUE')
        pairs[key.strip()] = value
    return pairs


OpenPair = Callable[..., Pair]


class ConnectorTopic(ConnectorSubject):
    """Tests of two ends of a connector against the T clauses."""

    level = "connector"

    @pytest.fixture
    def open_pair(self, subject: Subject, mode: Mode) -> Iterator[OpenPair]:
        """``open_pair(**options_of_the_harness) -> Pair``: opened in this test's mode, audited and closed after it."""
        with ExitStack() as opened:

            def open_one(**how: Any) -> Pair:
                return opened.enter_context(open_pair(subject.plugin, subject.options, **how))

            yield open_one

    @pytest.fixture
    def pair(self, open_pair: OpenPair) -> Pair:
        """Two connected ends."""
        return open_pair()


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
