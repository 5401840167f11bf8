"""What a mutant is, and how core is broken in one place without copying any of it."""

from __future__ import annotations
import __future__

import inspect
import linecache
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType
from typing import Any, Literal

#: Where the fault is: in a transport, in core's guard, in a hand-off machine, in a stage, in an engine.
Place = Literal["connector", "guard", "machine", "stage", "engine"]


class EditDoesNotApply(LookupError):
    """The text that a mutant replaces is not there exactly once: the code has changed, and the mutant must follow."""


@dataclass(frozen=True)
class Edit:
    """Replace each ``old`` by its ``new`` in the source of ``function``, where ``old`` must occur exactly once."""

    function: Any
    pieces: tuple[tuple[str, str], ...]

    @property
    def _target(self) -> FunctionType:
        found: Any = self.function
        if isinstance(found, property):
            found = found.fget
        found = inspect.unwrap(getattr(found, "__func__", found))
        assert isinstance(found, FunctionType)
        return found

    def compile(self) -> CodeType:
        """The function's code after the edit.  Raises :class:`EditDoesNotApply`."""
        target = self._target
        text = textwrap.dedent(inspect.getsource(target))
        for old, new in self.pieces:
            if text.count(old) != 1:
                raise EditDoesNotApply(
                    f"{target.__module__}.{target.__qualname__}: {old!r} occurs {text.count(old)} times, not once"
                )
            text = text.replace(old, new)
        text = text[text.index("def ") :] if text.startswith("@") else text
        name = f"<mutant of {target.__module__}.{target.__qualname__}>"
        linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name  # so that tracebacks show it
        flags = __future__.annotations.compiler_flag
        module = compile(text, name, "exec", flags, dont_inherit=True)
        code = next(
            constant for constant in module.co_consts if isinstance(constant, CodeType)
            and constant.co_name == target.__name__
        )  # fmt: skip
        if code.co_freevars != target.__code__.co_freevars:
            raise EditDoesNotApply(f"{target.__qualname__} is a closure over {target.__code__.co_freevars}")
        return code

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the function does what its edited source says, for whoever holds it."""
        target: Any = self._target
        code, before = self.compile(), target.__code__
        target.__code__ = code
        try:
            yield
        finally:
            target.__code__ = before


@dataclass(frozen=True)
class Mutant:
    """One way of being broken.

    ``clauses``: those that it breaks; it counts as caught when a test fails with one of them.  ``guard``: the guard of
    the protocol's model that is removed.  ``edits`` are applied together.  ``connector`` is the plugin to judge, as
    ``module:object``; where it is empty, the connector of the run.
    """

    name: str
    place: Place
    breaks: str
    clauses: tuple[str, ...]
    edits: Sequence[Edit] = ()
    guard: str = ""
    connector: str = ""
    #: Its fault shows between two processes only.
    two_processes: bool = False
    #: The connector whose tests are run, see :data:`kvbaton_conformance.mutants.trial.BASES`.
    base: str = "core"
    #: The simulator shows it, too, although the model has no guard for it.
    simulated: bool = False

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Within, core is broken.  A connector's mutant is installed by naming its plugin."""
        with ExitStack() as stack:
            for edit in self.edits:
                stack.enter_context(edit.applied())
            yield


@dataclass
class Registry:
    """Collects the mutants of one module."""

    place: Place
    found: list[Mutant] = field(default_factory=list)

    def guard(self, name: str, breaks: str, clauses: str, *edits: Edit) -> None:
        """A guard of the protocol's model, removed."""
        self.found.append(Mutant(name, self.place, breaks, tuple(clauses.split()), edits, guard=name))

    def add(
        self, name: str, breaks: str, clauses: str, *edits: Edit, base: str = "core", simulated: bool = False
    ) -> None:
        """Any other fault."""
        found = Mutant(name, self.place, breaks, tuple(clauses.split()), edits, base=base, simulated=simulated)
        self.found.append(found)


def edit(function: Any, *texts: str) -> Edit:
    """``edit(function, old, new, old, new, ...)``."""
    return Edit(function, tuple(zip(texts[::2], texts[1::2], strict=True)))
