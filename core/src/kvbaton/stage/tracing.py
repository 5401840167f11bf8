"""A stage's part of a trace: begun, read and ended by generic control (C9.2); off, it costs one look at a None.

A :class:`Recorder` is where the stage's two threads note what they do while somebody wants to know.  It is bounded:
what is not read in time pushes out what is oldest, and is counted.  :class:`TraceSession` keeps it, on the pump's
thread; neither touches a transfer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from kvbaton.errors import KvbatonError, LocalProtocolError
from kvbaton.identity import PeerId
from kvbaton.messages import Call
from kvbaton.tracing import MAX_UNREAD, PAGE_BYTES, PAGE_EVENTS, Event, Page, encode

#: Answers a call with a result, or with an error.
Answer = Callable[[Call, Any, str | None], None]


class Ring:
    """What one thread notes and another one takes: the newest ``limit`` events.  One writer, one reader, no lock."""

    __slots__ = ("_events", "noted", "taken")

    def __init__(self, limit: int) -> None:
        self._events: deque[Event] = deque(maxlen=limit)
        #: How many were ever noted, and taken: the rest waits, or was pushed out.
        self.noted = self.taken = 0

    def note(self, event: Event) -> None:
        self._events.append(event)
        self.noted += 1

    def take(self) -> Event | None:
        try:
            event = self._events.popleft()
        except IndexError:
            return None
        self.taken += 1
        return event

    @property
    def dropped(self) -> int:
        # the writer may be between its two steps: never less than nothing
        return max(self.noted - self.taken - len(self._events), 0)

    def __len__(self) -> int:
        return len(self._events)


class Recorder:
    """The two rings of a stage that is traced: ``pump`` for its thread, ``engine`` for the engine's."""

    __slots__ = ("engine", "pump")

    def __init__(self, limit: int = MAX_UNREAD) -> None:
        self.pump, self.engine = Ring(limit), Ring(limit)

    def page(self, now: float, events: int, nbytes: int) -> Page:
        """Up to ``events`` events in about ``nbytes`` bytes, and at least one if there is one.  The pump's thread."""
        found: list[bytes] = []
        for ring in (self.pump, self.engine):
            while nbytes > 0 and len(found) < events and (event := ring.take()) is not None:
                found.append(encode(event))
                nbytes -= len(found[-1])
        more = bool(len(self.pump) or len(self.engine))
        return Page(now, found, self.pump.dropped + self.engine.dropped, more)


class TraceSession:
    """The one session of a stage.  ``record`` is told the recorder that both threads note to, or None for the end.

    Threading: the pump's thread.  Every call is answered at once: the engine may be busy.
    """

    def __init__(
        self, peer: PeerId, record: Callable[[Recorder | None], None], answer: Answer, clock: Callable[[], float]
    ) -> None:
        self._peer, self._record, self._answer, self._clock = peer, record, answer, clock
        self._session = ""
        self._recorder: Recorder | None = None

    def start(self, call: Call) -> None:
        """Note from now on, for the session ``call.session_id``; again: no effect."""
        if self._recorder is not None and self._session != call.session_id:
            self._answer(call, None, f"C9.2: {self._peer.name} is traced already, in session {self._session}")
            return
        if self._recorder is None:
            self._recorder, self._session = Recorder(), call.session_id
            self._record(self._recorder)
        self._answer(call, _plain(Page(self._clock())), None)

    def read(self, call: Call) -> None:
        """Answer with what was noted and not yet read: ``events`` and ``bytes`` at most."""
        self._read(call)

    def stop(self, call: Call) -> None:
        """Note no more; answer with the first page of what is left, which ``read`` goes on with."""
        if self._recorder is not None and self._session == call.session_id:
            self._record(None)
        self._read(call)
        if self._recorder is not None and self._session == call.session_id and not (
            len(self._recorder.pump) or len(self._recorder.engine)
        ):  # fmt: skip
            self._recorder = None

    def _read(self, call: Call) -> None:
        try:
            if self._recorder is None or self._session != call.session_id:
                raise LocalProtocolError(f"{self._peer.name} knows no trace session {call.session_id[:40]!r}")
            events, nbytes = _bound(call, "events", PAGE_EVENTS), _bound(call, "bytes", PAGE_BYTES)
        except KvbatonError as error:
            self._answer(call, None, f"C9.2: {error}")
            return
        self._answer(call, _plain(self._recorder.page(self._clock(), events, nbytes)), None)


def _bound(call: Call, name: str, most: int) -> int:
    """What a call asks for, not believed before it was looked at (C9.3)."""
    given = call.arguments.get(name, most)
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= most:
        raise LocalProtocolError(f"{name} is {given!r}; a whole number from 1 to {most} is wanted")
    return given


def _plain(page: Page) -> dict[str, Any]:
    return {"now": page.now, "events": page.events, "dropped": page.dropped, "more": page.more}
