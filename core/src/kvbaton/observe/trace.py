"""A trace of a run: what every stage did and when, for Perfetto and for ``kvbaton report``.

::

    trace = Trace()
    with PDRuntime.start(settings, hooks=[trace]) as runtime:
        ...
    trace.write("out.json")

With the setting ``trace.path`` (``--trace``) a runtime makes one by itself and writes it when it closes.  The stages
note what they do (``kvbaton.stage.tracing``) and are read every so often by generic control, which disturbs no
transfer (C9.2); what the coordinator knows comes by hooks.  A stage that dies takes with it what was not read yet, and
nothing else; what it answers is believed only as far as it can be read (C9.3).  Memory is bounded: of each stage the
newest ``events`` are kept, and of requests a number in proportion.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import threading
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from kvbaton import tracing
from kvbaton.errors import RuntimeClosed, SettingsError, TraceNotWritten
from kvbaton.hooks import hookimpl
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.observe import perfetto
from kvbaton.observe.causes import ending_of
from kvbaton.observe.clock_offset import ClockOffset
from kvbaton.observe.timeline import Timeline
from kvbaton.records import RequestRecord

_log = logging.getLogger(__name__)

#: Events of each stage that are kept unless told otherwise.
EVENTS: Final = 200_000
#: A request makes so many events at a stage, at least.
_PER_REQUEST: Final = 20
#: Lives of a stage that are known at once: it may be started again and again.
_LIVES: Final = 16
#: Seconds between two readings of the stages.
_PERIOD: Final = 0.25


class Reply(Protocol):
    """A stage's answer to a call, and between which two moments of this clock it was given."""

    @property
    def result(self) -> Any: ...

    @property
    def asked(self) -> float: ...

    @property
    def heard(self) -> float: ...


#: ``ask(method, session, arguments, peers)``: the replies of these stages, or of all that are up; those that reply.
Ask = Callable[[str, str, Mapping[str, Any], Collection[PeerId] | None], Mapping[PeerId, Reply]]


@dataclass(slots=True, eq=False)
class Handoff:
    """A generation of a request, as the coordinator heard of it."""

    transfer: TransferId
    heard: dict[str, float] = field(default_factory=dict)
    prefill: str = ""
    decode: str = ""


@dataclass(slots=True, eq=False)
class Seen:
    """A request, as the coordinator knows it."""

    key: RequestKey
    added: float
    prompt_tokens: int
    handoffs: list[Handoff] = field(default_factory=list)
    ended: float | None = None
    record: RequestRecord | None = None
    cause: str = ""


@dataclass(slots=True, eq=False)
class Life:
    """One life of a stage, and what it has noted; each event, as it came, with the clock offset that it was read under.

    ``malformed``: answers, and events too large, that nobody can read; ``unreadable``: of ``events``, as found when
    they were last assembled.
    """

    peer: PeerId
    events: deque[tuple[ClockOffset, bytes]]
    offset: ClockOffset = field(default_factory=ClockOffset)
    read: int = 0
    dropped: int = 0
    malformed: int = 0
    unreadable: int = 0
    lost: float | None = None
    fenced: float | None = None
    cause: str = ""
    note: str = ""

    @property
    def pushed_out(self) -> int:
        """Events that were noted and are not kept any more, there or here."""
        return self.dropped + self.read - len(self.events)

    @property
    def unread(self) -> str:
        """How much of it nobody can read, in words; "" where there is nothing."""
        count = self.malformed + self.unreadable
        return f"{count} answers or events could not be read" if count else ""


class Trace:
    """The trace of one runtime.  Give it to ``PDRuntime.start`` among the ``hooks``, which also makes it read the
    stages.

    ``events``: how many of each stage are kept, the newest; about 150 bytes each.  Threading: hooks on the
    coordinator's thread; everything else from any thread.
    """

    def __init__(self, *, events: int = EVENTS) -> None:
        if isinstance(events, bool) or not isinstance(events, int) or events < 1:
            raise SettingsError(f"events is {events!r}; a whole number of at least 1 is wanted", key="trace.events")
        self._events = events
        self._session = uuid.uuid4().hex
        self._lock = threading.Lock()  # guards everything that hooks and the reader write
        self._began = time.time() - time.monotonic()
        self._requests: OrderedDict[int, Seen] = OrderedDict()
        self._live: dict[RequestKey, Seen] = {}
        self._handoffs: dict[TransferId, Handoff] = {}
        self._number = self._missing = 0
        self._lives: dict[PeerId, Life] = {}
        self._about: Mapping[str, str] = {}
        self._ask: Ask | None = None
        self._reading = threading.Lock()  # one reading at a time
        self._fresh = False  # a stage was started again, and has not been told yet
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    # -- for applications --------------------------------------------------------------------------------------------

    def timeline(self) -> Timeline:
        """What is known by now."""
        from kvbaton.observe.assembly import assemble  # only here is it needed

        with self._lock:  # copied, so that nobody's hook waits while it is put together
            requests = [
                replace(seen, handoffs=[replace(handoff, heard=dict(handoff.heard)) for handoff in seen.handoffs])
                for seen in self._requests.values()
            ]
            lives = {peer: replace(life, events=life.events.copy()) for peer, life in self._lives.items()}
            missing = self._missing
        timeline = assemble(requests, lives.values(), self._began, missing, self._about)
        with self._lock:
            for peer, life in lives.items():
                if peer in self._lives:  # not pushed out meanwhile
                    self._lives[peer].unreadable = life.unreadable
        return timeline

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write what is known by now: the whole file, or nothing.

        Raises :class:`~kvbaton.errors.TraceNotWritten`; the file that was there before is there still.
        """
        timeline = self.timeline()
        data = msgspec.json.encode({**perfetto.draw(timeline), "kvbaton": timeline})
        target = Path(path)
        try:
            _replace(target, data)
        except OSError as error:
            raise TraceNotWritten(
                f"the trace could not be written to {target}: {error.strerror or error}; the run itself is over and"
                " nothing of it is lost but its trace", path=str(target),
            ) from error  # fmt: skip

    @property
    def incomplete(self) -> str:
        """What is missing of the trace, in words; "" where nothing is."""
        with self._lock:
            parts = [f"{life.peer.name}: {text}" for life in self._lives.values() if (text := _lacks(life))]
            if self._missing:
                parts.append(f"{self._missing} earlier requests were pushed out (trace.events)")
        return "; ".join(parts)

    # -- for the runtime ---------------------------------------------------------------------------------------------

    @property
    def used(self) -> bool:
        """Whether it is, or was, some runtime's: it cannot be another's."""
        return self._ask is not None

    def watch(self, ask: Ask, about: Mapping[str, str]) -> None:
        """Tell every stage to note what it does, and read them from now on.  ``PDRuntime.start`` does this."""
        self._ask, self._about = ask, dict(about)
        with self._reading:
            self._start_stages(ask)
        self._thread = threading.Thread(target=self._run, name="kvbaton-trace", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Read what is left and let the stages note no more; the runtime is about to close.  Idempotent."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._closing.set()
        self._wake.set()
        thread.join()
        assert self._ask is not None
        with self._reading, contextlib.suppress(RuntimeClosed):
            self._read_all(self._ask, "trace_stop")

    def _run(self) -> None:
        assert self._ask is not None
        while not self._closing.is_set():
            self._wake.wait(_PERIOD)
            self._wake.clear()
            if self._closing.is_set():
                return
            try:
                with self._reading:
                    if self._fresh:
                        self._fresh = False
                        self._start_stages(self._ask)
                    self._read_all(self._ask, "trace_read")
            except RuntimeClosed:
                return
            except Exception as error:  # whatever it is, the run goes on
                _log.error("the stages' part of the trace: %s: %s", type(error).__name__, error)

    def _start_stages(self, ask: Ask) -> None:
        for peer, reply in ask("trace_start", self._session, {}, None).items():
            self._take(peer, reply)

    def _read_all(self, ask: Ask, method: str) -> None:
        """Page by page, until no stage has more; what one notes meanwhile is for the next time."""
        peers: Collection[PeerId] | None = None
        passes = 2 * tracing.MAX_UNREAD // tracing.PAGE_EVENTS + 8
        while passes and (peers is None or peers):
            replies = ask(method, self._session, {}, peers)
            peers = [peer for peer, reply in replies.items() if self._take(peer, reply)]
            method, passes = "trace_read", passes - 1

    def _take(self, peer: PeerId, reply: Reply) -> bool:
        """Whether it has more."""
        with self._lock:
            life = self._life(peer)
            result = reply.result
            if isinstance(result, Mapping) and result.get("error") is not None:
                life.note = str(result["error"])[:500]
                return False
            try:
                page = msgspec.convert(result, tracing.Page)
                if not abs(page.now) < tracing.LATEST:
                    raise ValueError("its clock shows no time")
            except (msgspec.MsgspecError, ValueError) as error:  # nonsense is this peer's alone (C9.3)
                life.malformed += 1
                life.note = f"an answer that is none: {error}"
                return False
            if not life.offset.learn(reply.asked, page.now, reply.heard):
                life.offset = ClockOffset()
                life.offset.learn(reply.asked, page.now, reply.heard)
            # what they say is looked at when somebody wants to know, not while requests run
            events = [data for data in page.events if len(data) <= tracing.MAX_EVENT_BYTES]
            life.malformed += len(page.events) - len(events)
            life.read += len(events)
            life.dropped = min(max(page.dropped, 0), 1 << 48)
            life.events.extend((life.offset, data) for data in events)
            self._bound(life)
            return page.more and bool(page.events)

    def _life(self, peer: PeerId) -> Life:
        if peer not in self._lives:
            self._lives[peer] = Life(peer, deque(maxlen=self._events))
            earlier = [known for known in self._lives if known.name == peer.name]
            for known in earlier[:-_LIVES]:
                del self._lives[known]
        return self._lives[peer]

    def _bound(self, life: Life) -> None:
        """All lives of a stage together keep what one may: the oldest give way."""
        earlier = [other for other in self._lives.values() if other.peer.name == life.peer.name and other is not life]
        over = len(life.events) + sum(len(other.events) for other in earlier) - self._events
        for other in earlier:
            while over > 0 and other.events:
                other.events.popleft()
                over -= 1

    # -- hooks -------------------------------------------------------------------------------------------------------

    @hookimpl
    def kvbaton_request_added(self, request: RequestKey, prompt_tokens: int, at: float) -> None:
        with self._lock:
            self._number += 1
            self._live[request] = self._requests[self._number] = Seen(request, at, prompt_tokens)
            while len(self._requests) > max(self._events // _PER_REQUEST, 1):
                _, oldest = self._requests.popitem(last=False)
                self._missing += 1
                for handoff in oldest.handoffs:
                    self._handoffs.pop(handoff.transfer, None)
                if self._live.get(oldest.key) is oldest:  # what it still does is not noted: nobody would forget it
                    del self._live[oldest.key]

    @hookimpl
    def kvbaton_milestone(
        self, transfer: TransferId, request: RequestKey, milestone: str, at: float, peer: PeerId | None
    ) -> None:
        with self._lock:
            handoff = self._handoffs.get(transfer)
            if handoff is None:
                seen = self._live.get(request)
                if seen is None:
                    return
                handoff = self._handoffs[transfer] = Handoff(transfer)
                seen.handoffs.append(handoff)
            handoff.heard.setdefault(milestone, at)
            if peer is not None and milestone in ("reserved", "received", "activated", "destination_retired"):
                handoff.decode = peer.name
            elif peer is not None:
                handoff.prefill = peer.name

    @hookimpl
    def kvbaton_request_finished(self, record: RequestRecord) -> None:
        now = time.monotonic()
        with self._lock:
            seen = self._live.pop(record.request_id, None)
            if seen is not None:
                seen.ended, seen.record, seen.cause = now, record, ending_of(record)[2]
                if seen.handoffs:
                    seen.handoffs[-1].prefill, seen.handoffs[-1].decode = record.prefill, record.decode

    @hookimpl
    def kvbaton_peer_up(self, peer: PeerId) -> None:
        with self._lock:
            self._life(peer)
        self._fresh = True
        self._wake.set()

    @hookimpl
    def kvbaton_peer_lost(self, peer: PeerId, cause: str) -> None:
        now = time.monotonic()
        if self._closing.is_set():  # what ends in order is not lost
            return
        with self._lock:
            life = self._life(peer)
            life.lost, life.cause = now, cause

    @hookimpl
    def kvbaton_peer_fenced(self, peer: PeerId) -> None:
        now = time.monotonic()
        if self._closing.is_set():
            return
        with self._lock:
            self._life(peer).fenced = now


def check_path(path: Path) -> None:
    """Whether a trace could be written there, found out before anything runs.

    Raises :class:`~kvbaton.errors.SettingsError`.
    """
    reason = ""
    try:
        if path.is_dir():
            reason = "it is a directory"
        elif path.exists() and not path.is_file():
            reason = "it is no ordinary file"
        elif not path.parent.is_dir():
            reason = f"there is no directory {path.parent}"
        else:
            _part(path).unlink()
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise SettingsError(f"the trace cannot be written to {path}: {reason}", key="trace.path")


def _replace(path: Path, data: bytes) -> None:
    part = _part(path)
    try:
        part.write_bytes(data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _part(path: Path) -> Path:
    """A new file beside ``path``, ours alone, for what will be called so once it is whole."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name[:20]}.", suffix=".part", dir=path.parent)
    os.close(descriptor)
    return Path(name)


def _lacks(life: Life) -> str:
    parts = []
    if life.pushed_out:
        parts.append(f"{life.pushed_out} events were pushed out (trace.events)")
    parts += [text for text in (life.unread, life.note) if text]
    return ", ".join(parts)
