"""Control channels: how the coordinator and its stages exchange messages.

A star: the coordinator holds one channel to each stage; stages have none to each other.  A channel belongs to one
``PeerId``, that is to one process lifetime: a restarted stage has another epoch and so another channel.

What every channel guarantees, whichever implementation carries it (C9.4, C1.4, C9.3):

- first-in first-out and lossless in both directions, or *lost*: each envelope carries the sender's epoch and a number
  counted per channel and direction from 1.  A gap makes the channel lost, a repeat is dropped and counted, an envelope
  of another epoch is refused and counted;
- lost is final.  What arrived in order before the loss is still delivered, nothing after a gap;
- input that is malformed, oversized or from nobody we know is refused and counted; none of it raises.

No order is promised between channels, or between control and data.  Lost is not fenced (C6.4): a lost channel says
nothing about what its process may still write; only its launcher's join does.

``kvbaton.control.inproc`` joins threads of one process, ``kvbaton.control.zmq`` processes of one host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from kvbaton.identity import PeerId
from kvbaton.messages import Message

__all__ = [
    "ChannelEvent",
    "ChannelLost",
    "ChannelStatistics",
    "CoordinatorChannels",
    "Received",
    "StageChannel",
]


class Received(msgspec.Struct, frozen=True, gc=False):
    """One message, the next of its channel."""

    peer: PeerId
    message: Message


class ChannelLost(msgspec.Struct, frozen=True, gc=False):
    """The channel to ``peer`` is gone, once and for good; every message of it that counts came before this."""

    peer: PeerId
    reason: str


#: What the coordinator's end of the channels reports.
ChannelEvent = Received | ChannelLost


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Totals since the channels were made.  ``dropped`` counts by (family, reason); input that could not be read as a
    message has the family ``unknown``.

    Reasons: ``malformed``; ``oversized``; ``unknown-peer`` (from nobody we expect); ``unknown-key`` (a connection that
    was refused for its key); ``stranger`` (one that ended, by itself or for what it sent, without having said who it
    is); ``stale-epoch``, ``foreign-epoch`` (older, or
    neither older nor ours); ``repeat``; ``gap`` (the envelope that showed it); ``lost`` (arrived after the loss);
    ``gone-peer`` (sent to a peer that is lost or unknown, or on a closed channel).
    """

    sent: int = 0
    received: int = 0
    dropped: Mapping[tuple[str, str], int] = field(default_factory=dict)


class StageChannel(Protocol):
    """A stage's end of its channel to the coordinator.

    Threading: one thread at a time (the stage's pump) for everything but ``wake`` and ``sever``, which any thread may
    call at any time, also during and after ``close``.
    """

    @property
    def peer(self) -> PeerId:
        """Who this stage is, with its epoch."""

    @property
    def lost(self) -> str | None:
        """Why the coordinator is gone, or None while it is not.  Final.  Any thread may read it."""

    def send(self, message: Message) -> None:
        """Put ``message`` in line.  Never blocks; the message must not be changed afterwards.

        Completion: none; a message that was sent may still be lost with the channel.  On a lost or closed channel it is
        dropped and counted.
        Raises: MessageError if the message is larger than the channel accepts; nothing was sent.
        """

    def hold(self, message: Message) -> None:
        """As ``send``, but it may stay here until ``flush``, the next ``send`` or ``close``, so that what is said
        together also travels together: each journey wakes three threads.  What cannot go any more is dropped and
        counted.
        """

    def flush(self) -> None:
        """Nothing stays here.  Cheap where nothing does."""

    def receive(self) -> list[Message]:
        """What has arrived, in order; empty if nothing has.  Never waits, never raises for bad input."""

    def wait(self, timeout: float) -> None:
        """Return when ``receive`` may have something, after ``wake``, or after ``timeout`` seconds, whichever is first.
        A ``wake`` since the last ``wait`` counts.  The loss of the channel wakes once.  Spurious returns are allowed;
        on a closed channel it returns at once."""

    def wake(self) -> None:
        """Make the present or the next ``wait`` return at once.  From any thread; cheap when nobody waits."""

    def sever(self, reason: str) -> None:
        """Declare the coordinator gone, for a reason known from elsewhere (a lifeline), and ``wake``.  From any thread.
        The first reason stays."""

    def statistics(self) -> ChannelStatistics:
        """The totals so far."""

    def close(self) -> None:
        """Give up every resource, after a bounded time for what was sent to leave.  Idempotent.  The coordinator sees
        the channel lost."""


class CoordinatorChannels(Protocol):
    """The coordinator's ends of all its channels.

    Threading: one thread at a time for everything but ``wake``, which any thread may call at any time, also during and
    after ``close``.
    """

    def add(self, peer: PeerId) -> None:
        """Expect ``peer`` from now on.  What is sent to it before it has connected waits, and is then sent in order.

        Raises: LocalProtocolError if an equal or newer epoch of its name has ever been added (C1.4).
        """

    def remove(self, peer: PeerId) -> None:
        """Forget a peer: no event of it follows, what still arrives from it is refused and counted.  Idempotent."""

    def send(self, peer: PeerId, message: Message) -> None:
        """Put ``message`` in line for ``peer``.  Never blocks.  To a lost or unknown peer: dropped and counted.

        Raises: MessageError if the message is larger than the channel accepts; nothing was sent.
        """

    def receive(self) -> list[ChannelEvent]:
        """What has happened, first-in first-out for each peer.  Never waits, never raises for bad input.

        Of each peer fewer messages than thrice :data:`~kvbaton.bounds.ENVELOPES_PER_PASS`; the others come with the
        next calls, and ``wait`` returns at once until they have.
        """

    def unheard(self, peer: PeerId) -> bool:
        """Whether more of ``peer`` may have come than ``receive`` has returned so far.  Not of one that is unknown, nor
        once it has returned its loss."""

    def wait(self, timeout: float) -> None:
        """As ``StageChannel.wait``."""

    def wake(self) -> None:
        """As ``StageChannel.wake``."""

    def statistics(self) -> ChannelStatistics:
        """The totals so far, over all channels."""

    def close(self) -> None:
        """Give up every resource: sockets, threads, descriptors, files, the directory.  Idempotent.  Every stage sees
        its channel lost."""
