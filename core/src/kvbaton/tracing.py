"""What a stage notes for a trace, as it travels: typed, small, and read by nobody who does not check it first.

Times are seconds of the stage's own clock; whoever reads a page places them by :class:`Page.now` and by when he asked
and was answered.  Each event travels as bytes of its own, so that one that nobody can read takes no other with it
(C9.3).
"""

from __future__ import annotations

from typing import Annotated, Final, TypeAlias

import msgspec

from kvbaton.identity import WireTransferId

#: Events that a stage keeps, for each of its two threads, until they are read.
MAX_UNREAD: Final = 1 << 16
#: Events, and bytes of events, in one page.
PAGE_EVENTS, PAGE_BYTES = 4096, 1 << 20
#: No event takes more bytes.
MAX_EVENT_BYTES: Final = 1 << 13
#: Transfers that a step names at most; it counts the others.
MAX_NAMED: Final = 32

#: Seconds that no clock of a stage shows.
LATEST: Final = 1e10

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Word: TypeAlias = Annotated[str, msgspec.Meta(max_length=128)]


class _Event(msgspec.Struct, frozen=True, gc=False, array_like=True, tag=True, forbid_unknown_fields=True):
    """Something that a stage has done, and when.  The pump's, unless it says otherwise."""


class Told(_Event, frozen=True, gc=False):
    """The message that creates a transfer here was read."""

    at: float
    transfer: WireTransferId


class Marked(_Event, frozen=True, gc=False):
    """The transfer has reached a milestone here."""

    at: float
    transfer: WireTransferId
    milestone: _Word


class Planned(_Event, frozen=True, gc=False):
    """P's engine has reported a range, which makes the chunks ``[first, past)``."""

    at: float
    transfer: WireTransferId
    first: _Count
    past: _Count


class Ready(_Event, frozen=True, gc=False):
    """P's device has written a chunk's source: from here on it waits for room in the transport."""

    at: float
    transfer: WireTransferId
    sequence: _Count


class Full(_Event, frozen=True, gc=False):
    """The transport had no room for a chunk; said once for each."""

    at: float
    transfer: WireTransferId
    sequence: _Count


class Submitted(_Event, frozen=True, gc=False):
    """The transport took a chunk, in a call that lasted so long."""

    began: float
    ended: float
    transfer: WireTransferId
    sequence: _Count
    nbytes: _Count
    segments: _Count


class Completed(_Event, frozen=True, gc=False):
    """The transport said how a chunk ended."""

    at: float
    transfer: WireTransferId
    sequence: _Count
    outcome: _Word


class Receipt(_Event, frozen=True, gc=False):
    """D has the evidence that a chunk is there, and has dealt with it."""

    began: float
    ended: float
    transfer: WireTransferId
    sequence: _Count


class Paused(_Event, frozen=True, gc=False):
    """The engine's thread: P's engine was told to compute no more for ``peer``, to which too much waits."""

    at: float
    peer: _Word


class Resumed(_Event, frozen=True, gc=False):
    """Enough has gone to ``peer``."""

    at: float
    peer: _Word


class Step(_Event, frozen=True, gc=False):
    """The engine's thread: one step.  ``computed``: prompt ranges reported in it; ``produced``: whose tokens it made.

    Of each :data:`MAX_NAMED` at most; ``ranges`` and ``batch`` are how many there were, ``tokens`` how many tokens came
    out.
    """

    began: float
    ended: float
    computed: tuple[tuple[WireTransferId, _Count, _Count], ...]
    ranges: _Count
    produced: tuple[WireTransferId, ...]
    batch: _Count
    tokens: _Count


class Command(_Event, frozen=True, gc=False):
    """The engine's thread: what the pump asked of the engine between two steps."""

    began: float
    ended: float
    name: _Word
    transfer: WireTransferId


Event: TypeAlias = (
    Told | Marked | Planned | Ready | Full | Submitted | Completed | Receipt | Paused | Resumed | Step | Command
)  # fmt: skip

_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Event)


class Page(msgspec.Struct, frozen=True):
    """What a stage answers when it is read.  ``now``: its clock as it answered.  ``dropped``: events lost so far,
    because nobody read them in time.  ``more``: another page waits.
    """

    now: float
    events: list[bytes] = []
    dropped: int = 0
    more: bool = False


def span(event: Event) -> tuple[float, float]:
    """From when to when it lasted; twice the same where it is a moment."""
    if isinstance(event, Submitted | Receipt | Step | Command):
        return event.began, event.ended
    return event.at, event.at


def encode(event: Event) -> bytes:
    return _ENCODER.encode(event)


def decode(data: bytes) -> Event | None:
    """The event in ``data``, if it is one, at a time that a clock may show."""
    try:
        event: Event = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, OverflowError, ValueError):
        return None
    began, ended = span(event)
    return event if 0.0 <= began <= ended < LATEST else None
