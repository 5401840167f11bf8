"""What an outsider may listen to, and what it may decide.

:class:`Specifications` lists every hook and says when it runs.  An observer is any object (a module, an instance) with
methods of those names, marked with :data:`hookimpl`; a method takes the arguments it wants, by name.  Observers are
given to ``PDRuntime.start(..., hooks=[...])`` or found under the entry-point group ``kvbaton.hooks``.  kvbaton's own
displays and exporters are ordinary observers.

Hooks run at the granularity of milestones, never on the byte path: not per chunk, per segment or per pass of the pump.
They run on the thread that learns of the event, so an observer must be quick and must not call back into the runtime.
An observer that raises is isolated: it is reported once, by name, and everything else goes on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from kvbaton.errors import PluginBroken, closest

if TYPE_CHECKING:
    from kvbaton.identity import PeerId, RequestKey, TransferId
    from kvbaton.records import RequestRecord

PROJECT = "kvbaton"
GROUP = "kvbaton.hooks"
_PREFIX = "kvbaton_"

hookspec = pluggy.HookspecMarker(PROJECT)
#: Marks a method as an implementation of the hook of its name.
hookimpl = pluggy.HookimplMarker(PROJECT)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What a routing policy sees of one stage: its name, live transfers on it, and the credits that are left (C2.4).

    ``epoch``: which life of it this is (C1.4); another one has another cache.  ``load``: how much of it is promised, 0
    to 1, by the scarcer of blocks and slots.  ``block_tokens``: tokens per block, the unit in which prompts are shared.
    """

    name: str
    transfers: int
    blocks_free: int
    slots_free: int
    epoch: int = 0
    load: float = 0.0
    block_tokens: int = 1


class Specifications:
    """Every hook.  ``at`` is seconds of the coordinator's monotonic clock."""

    @hookspec
    def kvbaton_request_added(self, request: RequestKey, prompt_tokens: int, at: float) -> None:
        """A request was taken and waits for admission."""

    @hookspec
    def kvbaton_milestone(
        self,
        transfer: TransferId,
        request: RequestKey,
        stage: str,
        milestone: str,
        at: float,
        peer: PeerId | None,
        prefix: int,
    ) -> None:
        """A transfer reached ``milestone`` (of :class:`~kvbaton.handoff.table.Milestones`), as ``stage`` knows.

        Runs once for each milestone of a transfer, when the coordinator learns of it.  ``peer`` is the stage with its
        epoch, None where the coordinator itself knows.  ``prefix``: how many prompt tokens the stage had held before:
        D with ``reserved``, P with ``committed``; 0 with all others.
        """

    @hookspec
    def kvbaton_request_finished(self, record: RequestRecord) -> None:
        """A request is terminal for its caller: finished, cancelled or failed.  Runs exactly once per request.

        Its memory may still be draining: that is what later milestones tell.
        """

    @hookspec
    def kvbaton_fault(
        self, error: Exception, transfer: TransferId | None, request: RequestKey | None, stage: str | None
    ) -> None:
        """Something failed, with its first cause (C6.3).

        A request that ends as failed: ``request`` is set, ``transfer`` too where it had been placed, and ``stage`` is
        the one that the cause lies with, None where it lies with none.  Or a stage, or the connection to it: then
        ``transfer`` and ``request`` are None.  A stage that broke the protocol is told as a
        :class:`~kvbaton.errors.ProtocolViolation`, besides the request that it ended.
        """

    @hookspec
    def kvbaton_peer_up(self, peer: PeerId) -> None:
        """A stage has started and its connector is connected to every peer."""

    @hookspec
    def kvbaton_peer_lost(self, peer: PeerId, cause: str) -> None:
        """A stage's channel or process is gone; final (C6.4).  Not yet a fence: its memory is still held."""

    @hookspec
    def kvbaton_peer_fenced(self, peer: PeerId) -> None:
        """A lost or stopped stage was joined and its peers closed their connections: nothing of it can arrive now."""

    @hookspec
    def kvbaton_message_dropped(self, family: str, reason: str, peer: str | None, count: int) -> None:
        """The coordinator has refused or ignored ``count`` control messages: late, repeated, of an unknown transfer
        (C1.2), or input that is no message of a stage's (C9.3), as :class:`~kvbaton.control.ChannelStatistics` lists
        it.

        ``family`` is ``unknown`` and ``peer`` None where nobody can say.
        """

    @hookspec(firstresult=True)
    def kvbaton_choose_pair(
        self,
        request: RequestKey,
        prompt_tokens: int,
        prefill: Sequence[StageLoad],
        decode: Sequence[StageLoad],
        prompt: Sequence[int],
        pairs: Sequence[tuple[str, str]],
    ) -> tuple[str, str] | None:
        """Which prefill and decode stage a request gets, as a pair of names: one of ``pairs``.

        Runs when a request is about to be admitted; both stages of every pair are up, connected to each other and have
        the credits that the request needs.  The candidates may have been narrowed further: of a request that lost a
        generation with a stage or a connection, only pairs with the stage that is left are offered, or all but the pair
        whose connection broke, where there are such.  ``prefill`` and ``decode`` are the stages that occur in
        ``pairs``; not every combination of them need be one.  ``prompt``: what is to be prefilled; after a
        recomputation it ends with tokens that were delivered already.

        ``None`` leaves the choice to the next policy and at last to kvbaton (the least loaded).  The first answer
        counts.  :class:`kvbaton.routing.PrefixAware` is a policy over this hook; it is asked last.
        """


#: The names of all hooks.
HOOKS = tuple(sorted(name for name in vars(Specifications) if name.startswith(_PREFIX)))


class _Manager(pluggy.PluginManager):
    def parse_hookimpl_opts(self, plugin: object, name: str) -> pluggy.HookimplOpts | None:
        options = super().parse_hookimpl_opts(plugin, name)
        if options is None and name.startswith(_PREFIX) and callable(getattr(plugin, name, None)):
            # the name alone is meant seriously: without this, a forgotten marker is an observer that is never called
            return pluggy.HookimplOpts(
                wrapper=False, hookwrapper=False, optionalhook=False, tryfirst=False, trylast=False, specname=None
            )
        return options


class Hooks:
    """The observers of one runtime, and the guarded way to reach them.

    Threading: observers are added before the runtime starts; afterwards every method may be called from any thread.
    """

    def __init__(self, observers: Sequence[object] = ()) -> None:
        """Raises :class:`~kvbaton.errors.PluginBroken` where an observer implements a hook that does not exist."""
        self._manager = _Manager(PROJECT)
        self._manager.add_hookspecs(Specifications)
        self._lock = threading.Lock()
        #: Observer's name to the number of times it raised.
        self.failures: dict[str, int] = {}
        #: Of every hook that somebody implements, the newest first.
        self._listeners: dict[str, tuple[pluggy.HookImpl, ...]] = {}
        for observer in observers:
            self.add(observer)

    def add(self, observer: object, name: str | None = None) -> None:
        """Register an observer; the newest is told first.

        Raises :class:`~kvbaton.errors.PluginBroken`, and registers nothing, where it implements a hook that does not
        exist, asks for an argument that a hook does not have, or wraps.
        """
        name = name or _name_of(observer)
        unique, copies = name, 1
        while self._manager.has_plugin(unique):
            copies += 1
            unique = f"{name}-{copies}"
        try:
            self._manager.register(observer, unique)
            for caller in self._manager.get_hookcallers(observer) or ():
                for implementation in caller.get_hookimpls():
                    if implementation.plugin is observer:
                        _check(caller, implementation)
        except (pluggy.PluginValidationError, ValueError, _RefusedError) as error:
            if self._manager.is_registered(observer) and self._manager.get_name(observer) == unique:
                self._manager.unregister(observer)
            raise PluginBroken(f"observer {name}: {error}", name=name, distribution=None) from error
        found = {hook: tuple(reversed(getattr(self._manager.hook, hook).get_hookimpls())) for hook in HOOKS}
        self._listeners = {hook: listeners for hook, listeners in found.items() if listeners}

    def add_installed(self) -> None:
        """Register what installed distributions offer under ``kvbaton.hooks``, one by one.

        One that cannot be imported or does not fit is reported, with its distribution, and left out: an observer must
        not keep a deployment from running.
        """
        from importlib.metadata import entry_points  # not cheap, and not everybody's

        for entry in entry_points(group=GROUP):
            source = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "an unknown distribution"
            try:
                self.add(entry.load(), entry.name)
            except Exception as error:
                _log.error("observer %s of %s is left out: %s: %s", entry.name, source, type(error).__name__, error)

    def tell(self, hook: str, **facts: Any) -> None:
        """Call every implementation of an observing hook with ``facts``.  Never raises because of an observer."""
        for implementation in self._listeners.get(hook, ()):
            self._call(hook, implementation, facts)

    def heard(self, hook: str) -> bool:
        """Whether anybody implements this hook: what is told oftenest need not be put together for nobody."""
        return hook in self._listeners

    def choose_pair(
        self,
        request: RequestKey,
        prompt: Sequence[int],
        prefill: Sequence[StageLoad],
        decode: Sequence[StageLoad],
        pairs: Sequence[tuple[str, str]],
    ) -> tuple[str, str] | None:
        """The first policy's choice; None where none has one.  A policy that raises or names no candidate has none."""
        facts = {
            "request": request, "prompt_tokens": len(prompt), "prompt": prompt, "prefill": prefill, "decode": decode,
            "pairs": pairs,
        }  # fmt: skip
        for implementation in self._listeners.get("kvbaton_choose_pair", ()):
            choice = self._call("kvbaton_choose_pair", implementation, facts)
            if choice is None:
                continue
            try:
                pair = tuple(choice)
                if pair in pairs:
                    return pair[0], pair[1]
            except TypeError:  # not a pair, or of things that cannot be compared with names
                pass
            error = ValueError(f"returned {choice!r}, which is no pair out of the candidates")
            self._report("kvbaton_choose_pair", implementation.plugin_name, error)
        return None

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def _call(self, hook: str, implementation: pluggy.HookImpl, facts: dict[str, Any]) -> Any:
        # one by one: pluggy's own call stops at the first implementation that raises
        try:
            return implementation.function(*(facts[name] for name in implementation.argnames))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also a SystemExit: no observer ends a thread of kvbaton's
            self._report(hook, implementation.plugin_name, error)
            return None

    def _report(self, hook: str, name: str, error: BaseException) -> None:
        with self._lock:
            seen = self.failures.get(name, 0)
            self.failures[name] = seen + 1
        if not seen:
            _log.error(
                "observer %s failed in %s (%s: %s); it stays registered, and this is said once",
                name, hook, type(error).__name__, error, exc_info=error,
            )  # fmt: skip


class _RefusedError(Exception):
    """Why an observer was not registered."""


def _check(caller: pluggy.HookCaller, implementation: pluggy.HookImpl) -> None:
    if caller.spec is None:
        if implementation.optionalhook:  # pluggy's own word for a hook of another version
            return
        raise _RefusedError(f"there is no hook {caller.name}.{closest(caller.name, HOOKS)} Hooks: {', '.join(HOOKS)}")
    if implementation.wrapper or implementation.hookwrapper:
        raise _RefusedError(f"{caller.name} cannot be wrapped: observers are called one by one")


def _name_of(observer: object) -> str:
    if isinstance(observer, ModuleType):
        return observer.__name__
    kind = observer if isinstance(observer, type) else type(observer)
    return f"{kind.__module__}.{kind.__qualname__}"
