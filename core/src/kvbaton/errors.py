"""Every exception of kvbaton, in one tree.

Each says what happened, to what, in which state, and what to do next; the facts are attributes as well, so that a
program need not read the text.  Foreign exceptions are mapped once, at the edge where they enter, with the cause
chained.

``ConfigurationError`` is the operator's to mend before anything runs; ``LocalProtocolError`` is the caller's bug;
``ProtocolViolation`` is the peer's; ``TransferFailed`` is one request's misfortune and leaves every other one alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any


class KvbatonError(Exception):
    """Base of all.  Keyword arguments become attributes."""

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.facts = facts

    def __getattr__(self, name: str) -> Any:
        # only called when ordinary lookup fails; "facts" itself must not recurse while unpickling
        if name != "facts" and name in self.facts:
            return self.facts[name]
        raise AttributeError(name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, self.facts)


def _rebuild(kind: type[KvbatonError], args: tuple[Any, ...], facts: dict[str, Any]) -> KvbatonError:
    error = kind.__new__(kind)
    Exception.__init__(error, *args)
    error.facts = facts
    return error


def closest(name: str, candidates: Iterable[str]) -> str:
    """`` Did you mean "x"?`` for the candidate nearest to ``name``, or nothing."""
    found = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.5)
    return f' Did you mean "{found[0]}"?' if found else ""


# -- configuration: the operator mends it before anything runs -------------------------------------------------------


class ConfigurationError(KvbatonError):
    """Something in the settings cannot work.  Nothing was started."""


class SettingsError(ConfigurationError):
    """A settings file, environment variable or flag is unreadable, unknown or out of range."""


class PluginError(ConfigurationError):
    """A connector or engine plugin cannot be chosen."""


class PluginNotFound(PluginError):
    """No plugin of that name is installed.  Facts: ``name``, ``installed``."""


class TransportNotFound(PluginNotFound):
    """No connector of that name is installed."""


class EngineNotFound(PluginNotFound):
    """No engine of that name is installed."""


class PluginConflict(PluginError):
    """Two distributions claim one name.  Facts: ``name``, ``distributions``."""


class PluginBroken(PluginError):
    """A plugin's import failed or it does not have the plugin interface.  Facts: ``name``, ``distribution``."""


class PluginUnavailable(PluginError):
    """The plugin is installed but cannot be used here.  Facts: ``name``, ``reason``, ``remedy``."""


class OptionsError(PluginError):
    """The options of a plugin do not validate.  Facts: ``name``, ``option``."""


class ModelError(ConfigurationError):
    """The model cannot be served."""


class ModelNotFound(ModelError):
    """No checkpoint is there: a path that does not exist, or a name that is not known."""


class UnsupportedModel(ModelError):
    """The model needs what the engine does not have.  Facts: ``model``, ``missing``."""


class TraceUnreadable(ConfigurationError):
    """A file is no trace of kvbaton's."""


class GeometryError(ConfigurationError):
    """A KV geometry contradicts itself.  Facts: ``field``."""


class GeometryMismatch(KvbatonError):
    """Two stages hold KV of different shape (C3.5).  Nothing was connected."""

    def __init__(self, field: str, ours: object, theirs: object, where: str = "") -> None:
        place = f" ({where})" if where else ""
        super().__init__(
            f"C3.5 GeometryMismatch{place}: {field} differs: {ours!r} here against {theirs!r} there. Both stages must"
            " serve the same model with the same cache layout. Nothing was connected.",
            field=field, ours=ours, theirs=theirs, where=where,
        )  # fmt: skip


# -- the caller's bugs -----------------------------------------------------------------------------------------------


class LocalProtocolError(KvbatonError):
    """You used an object of kvbaton in a way its documentation forbids.  Nothing was changed."""


class ProfilingError(LocalProtocolError):
    """A profiling session cannot be held as it was asked for.  Nothing is profiled because of it."""


class SegmentError(LocalProtocolError, ValueError):
    """Segment lists are unequal, empty-lengthed or outside their region (C3.6).  No byte moved."""


class ThreadError(LocalProtocolError):
    """A call came from another thread than the one that owns the object (T11)."""


class CacheError(LocalProtocolError):
    """The logical KV cache was asked for something that would break its books (C8)."""


# -- transports ------------------------------------------------------------------------------------------------------


class TransportError(KvbatonError):
    """A transport could not do what it was asked.  Facts: ``transport``, ``status``, ``peer`` where known."""


class RegistrationError(TransportError):
    """A region cannot be registered (T1).  No region was.  Facts: ``region``, ``reason``."""


class CapabilityError(TransportError):
    """The transport did not declare this capability (T13).  Nothing was done.  Facts: ``capability``."""


class ConnectError(TransportError):
    """A peer cannot be reached, refused the connection, or is another one than expected (T2)."""


class PeerLost(TransportError):
    """A peer's process or connection is gone (T7).  Facts: ``peer``."""


class Outstanding(TransportError):
    """``close()`` was called while chunks are outstanding (T10, C5.4).  Facts: ``outstanding``."""


class ConnectorFault(TransportError):
    """A plugin raised where its protocol forbids it; the guard went on without it (C6.3).  Facts: ``call``."""


class QuarantineFull(TransportError):
    """More memory is neither quiet nor fenced than the limits allow: the stage must not go on (T8).  Facts:
    ``bytes``, ``limit``."""


# -- the peer's faults, and one request's misfortune -----------------------------------------------------------------


class ProtocolViolation(KvbatonError):
    """A peer said what cannot be true (C7.2).  Our state is unchanged.  Facts: ``clause``, ``peer``, ``transfer``."""

    def __init__(self, clause: str, message: str, **facts: Any) -> None:
        super().__init__(f"{clause} violation: {message}", clause=clause, **facts)


class MessageError(KvbatonError):
    """Bytes on a control channel are not a message of its family (C9.1, C9.3).  They were dropped and counted."""


class TransferFailed(KvbatonError):
    """One transfer failed (C6.3).  Facts: ``transfer``, ``request``, ``cause``, ``retained``, and ``stage``, with which
    the cause lies, or None."""


class RequestOverdue(TransferFailed):
    """A request's own deadline passed (C6.7); otherwise as :class:`TransferFailed`."""


class RequestCancelled(KvbatonError):
    """A request was aborted, or ended with its runtime.  Facts: ``request``, ``cause``."""


class RequestRefused(KvbatonError):
    """A request was not admitted; nothing is held for it.  Facts: ``request``, ``reason``."""


class TooManyWaiting(RequestRefused):
    """As many requests wait already as may; later there may be room."""


class DuplicateRequest(RequestRefused):
    """The external id belongs to a request that is still live (C1.1).  The first one is unaffected."""


class PromptTooLong(RequestRefused):
    """Prompt plus permitted growth can never fit.  Facts: ``tokens``, ``limit``."""


class TraceNotWritten(KvbatonError):
    """The trace of a run could not be written, at its end; everything that ran has run."""


class StageDied(KvbatonError):
    """A stage's process ended.  Facts: ``stage``, ``status``, ``log``."""

    def __init__(self, stage: str, status: str, log: Sequence[str] = ()) -> None:
        tail = "".join(f"\n  {stage}: {line}" for line in log)
        super().__init__(f"stage {stage} ended: {status}.{' Its last words:' if log else ''}{tail}", stage=stage,
                         status=status, log=tuple(log))  # fmt: skip


class StageLost(StageDied):
    """A stage on another host is lost: its channel went without its last word.  Facts: ``stage``, ``status``."""

    def __init__(self, stage: str, reason: str) -> None:
        KvbatonError.__init__(
            self,
            f"C6.4: stage {stage} is lost: {reason}. It runs on another host and cannot be joined from here, so it is"
            " not fenced: what it may still write to, and its own memory, stay held unless the transport states a"
            " fence. See to it that its process is gone.",
            stage=stage, status="lost", log=(),
        )  # fmt: skip


class StartupError(KvbatonError):
    """The stages did not come up by the start-up deadline, or one refused to start.  Everything was stopped again."""


class RuntimeClosed(LocalProtocolError):
    """The runtime is closed or closing; it takes no more requests."""
