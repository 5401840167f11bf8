"""What the machines ask for: frozen values, to be carried out in the order in which they were returned.

Three kinds: *orders* (send this, free that), *milestones* (show this), and *notes* (:class:`Ignored`,
:class:`Violation`): an event was without effect, or a peer broke the protocol.  Notes are counted and shown; nothing
need be done about them, for the machine has already returned the orders that follow from them.
"""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from kvbaton.engine import FinishReason, Request
from kvbaton.identity import PeerId, RequestKey, TransferId
from kvbaton.messages import Message, Timings
from kvbaton.reservation import Reservation


class Effect(msgspec.Struct, frozen=True, gc=False):
    """Base of all effects."""


# -- orders of both stages --------------------------------------------------------------------------------------------


class Send(Effect, frozen=True, gc=False):
    """Put ``message`` on the channel to the coordinator.

    Statistics (``timings``, and ``segments``/``nbytes`` of a Commit) are left at their defaults: a machine has no
    clock.  The stage may fill them in with ``msgspec.structs.replace`` before it sends.
    """

    message: Message


class Suspend(Effect, frozen=True, gc=False):
    """``engine.suspend_transfer(transfer)``; when its device event has completed (or there is none), say so.

    To the source machine by ``suspended(transfer)``, to the destination machine by ``device_quiet(transfer)``.
    """

    transfer: TransferId


class Free(Effect, frozen=True, gc=False):
    """``engine.release_transfer(transfer)``, and forget whatever the stage itself kept for its memory (C5.1, C5.2)."""

    transfer: TransferId


class DisconnectPeer(Effect, frozen=True, gc=False):
    """The peer's process was joined: ``connector.fenced(peer)`` and ``connector.disconnect(peer)``; report *down*
    (C6.4).
    """

    peer: PeerId


class Milestone(Effect, frozen=True, gc=False):
    """``transfer`` reached ``name``, one of :class:`kvbaton.handoff.table.Milestones`."""

    transfer: TransferId
    name: str


class Fault(Effect, frozen=True, gc=False):
    """Something failed here (C6.3).  ``transfer`` is None where it is about the stage; ``retained``: memory stays
    held.  ``peer``: from the coordinator, the stage that it is about.
    """

    transfer: TransferId | None
    cause: str
    retained: bool = False
    peer: PeerId | None = None


class Ignored(Effect, frozen=True, gc=False):
    """An event without effect: late, repeated or about nobody (C7.4).  Count it."""

    transfer: TransferId | None
    event: str
    reason: str


class Violation(Effect, frozen=True, gc=False):
    """``peer`` (None: the coordinator, or this stage's own engine or transport) broke ``clause``; the event was not
    applied.
    """

    clause: str
    transfer: TransferId | None
    peer: PeerId | None
    text: str


# -- orders of the source ---------------------------------------------------------------------------------------------


class Compute(Effect, frozen=True, gc=False):
    """``engine.reserve_transfer``: P takes part in a transfer that goes to ``reservation`` at ``destination``."""

    transfer: TransferId
    request: Request
    reservation: Reservation
    destination: PeerId


class Post(Effect, frozen=True, gc=False):
    """Chunk ``sequence`` may go: queue it for ``connector.submit``.

    Ask ``source.may_submit(transfer, sequence)`` right before each attempt, drop it where that is False, and report an
    accepted one with ``source.submitted(transfer, sequence)``.
    """

    transfer: TransferId
    sequence: int


class CancelChunks(Effect, frozen=True, gc=False):
    """Drop the chunks still queued here and call ``connector.cancel(transfer)`` (T9)."""

    transfer: TransferId


class Acknowledge(Effect, frozen=True, gc=False):
    """``connector.acknowledge(transfer)``."""

    transfer: TransferId


class ReleaseCompute(Effect, frozen=True, gc=False):
    """``engine.release_transfer_compute(transfer)``: its last range is ready."""

    transfer: TransferId


# -- orders of the destination ----------------------------------------------------------------------------------------


class Admit(Effect, frozen=True, gc=False):
    """``engine.reserve_transfer``: hold memory.  Answered by ``destination.reserved`` or ``destination.refused``."""

    transfer: TransferId
    request: Request


class Grant(Effect, frozen=True, gc=False):
    """``connector.grant(transfer, source, segments of the reservation)``, before the Reserved that follows is sent."""

    transfer: TransferId
    source: PeerId
    reservation: Reservation


class Import(Effect, frozen=True, gc=False):
    """On the engine's thread: if ``destination.begin_import(transfer)`` is still True then
    ``engine.accept_import(transfer, valid)``, and report it with ``destination.imported(transfer)`` (C1.3).
    """

    transfer: TransferId
    valid: int


class Revoke(Effect, frozen=True, gc=False):
    """Where the transport is revocable: ``connector.revoke(transfer)``; if it returns True, call
    ``destination.revoked``.
    """

    transfer: TransferId


# -- orders of the coordinator ----------------------------------------------------------------------------------------


class SendTo(Effect, frozen=True, gc=False):
    """Put ``message`` on the channel to ``peer``."""

    peer: PeerId
    message: Message


class Ask(Effect, frozen=True, gc=False):
    """Ask ``peer`` whether it lives, by a generic call that disturbs nothing; ``coordinator.heard`` of its reply."""

    peer: PeerId


class Kill(Effect, frozen=True, gc=False):
    """``peer`` is lost: make sure its process ends, join it, then call ``coordinator.peer_joined(peer)`` (C6.4)."""

    peer: PeerId
    cause: str


class Join(Effect, frozen=True, gc=False):
    """``peer`` was told to exit: join its process, then call ``coordinator.peer_joined(peer)`` (C6.2)."""

    peer: PeerId


class Fenced(Effect, frozen=True, gc=False):
    """``peer`` was joined, and every stage that it could reach has closed its end or was joined: nothing of it can
    arrive any more (C6.4).  Once for each peer.
    """

    peer: PeerId


class Restart(Effect, frozen=True, gc=False):
    """Start the stage of this name again: its last process was joined.  It says Hello under a new epoch; where it
    cannot, call ``coordinator.start_failed(name)``.
    """

    name: str


class Ending(enum.Enum):
    """How a request ended for its caller."""

    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class Placed(Effect, frozen=True, gc=False):
    """A generation of the request was placed on a pair of stages."""

    prefill: PeerId
    decode: PeerId


class Tokens(Effect, frozen=True, gc=False):
    """New output tokens; ``position`` of the first, from 0.  In order, without gap or repeat."""

    position: int
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]


class Requeued(Effect, frozen=True, gc=False):
    """D refused in spite of credits, or the generation was lost with a stage or a connection; the request waits again
    with its age (C2.6).
    """

    cause: str


class Ended(Effect, frozen=True, gc=False):
    """The one terminal outcome of the request.  Its key is free for reuse from here on (C1.1).

    ``peer``: the stage that a failure lies with; None where it lies with none.
    """

    ending: Ending
    reason: FinishReason | None = None
    cause: str = ""
    peer: PeerId | None = None


class Tell(Effect, frozen=True, gc=False):
    """Tell the caller of ``key``.  ``transfer`` is None while the request has not been placed."""

    key: RequestKey
    transfer: TransferId | None
    event: Placed | Tokens | Requeued | Ended


class Reached(Effect, frozen=True, gc=False):
    """``transfer`` of request ``key`` reached ``milestone``, by ``peer``'s word (None: the coordinator's own).

    May come after the request ended for its caller (P and D retire later).  ``timings``, ``segments`` and ``nbytes``
    are what the message carried.
    """

    key: RequestKey
    transfer: TransferId
    milestone: str
    peer: PeerId | None = None
    timings: Timings = {}
    chunks: int = 0
    segments: int = 0
    nbytes: int = 0
    #: Prompt tokens held already: by D (with RESERVED), by P (with COMMITTED).
    prefix: int = 0


SourceEffect: TypeAlias = (
    Send | Compute | Post | CancelChunks | Suspend | Acknowledge | ReleaseCompute | Free | DisconnectPeer | Milestone
    | Fault | Ignored | Violation
)  # fmt: skip
DestinationEffect: TypeAlias = (
    Send | Admit | Grant | Import | Suspend | Revoke | Free | DisconnectPeer | Milestone | Fault | Ignored | Violation
)
CoordinatorEffect: TypeAlias = (
    SendTo | Tell | Reached | Ask | Kill | Join | Restart | Fenced | Fault | Ignored | Violation
)
