"""Channels between threads of one process: queues, and a bell for whoever waits.

Messages are immutable and pass as they are.  With ``through_codec`` they pass as the bytes that would be on a socket,
so that tests without processes still meet the codec and the sequence rules.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable

from kvbaton.bounds import ENVELOPES_PER_PASS
from kvbaton.control import ChannelEvent, ChannelLost, ChannelStatistics, Received
from kvbaton.control.bell import Bell
from kvbaton.control.envelopes import pack, unpack
from kvbaton.control.sequence import InboundSequence, Lifetimes
from kvbaton.errors import LocalProtocolError
from kvbaton.identity import PeerId
from kvbaton.messages import MAX_MESSAGE_BYTES, Message, family_of

#: Lets other threads run first that could; returns at once where there are none.
_give_way: Callable[[], None] = getattr(os, "sched_yield", lambda: None)

#: What lies in a queue: a message, or its bytes when it goes through the codec.
_Item = Message | bytes


class _Outbound:
    """The sender's half of one direction: numbers and, on demand, bytes."""

    __slots__ = ("_epoch", "_max_message", "_seq", "_through_codec")

    def __init__(self, epoch: int, through_codec: bool, max_message: int) -> None:
        self._epoch = epoch
        self._through_codec = through_codec
        self._max_message = max_message
        self._seq = 0

    def pack(self, message: Message) -> _Item:
        if not self._through_codec:
            return message
        data = pack(self._epoch, self._seq + 1, message, self._max_message)
        self._seq += 1
        return data


class _Inbound:
    """The receiver's half of one direction."""

    __slots__ = ("_max_message", "_sequence", "gap")

    def __init__(self, epoch: int, max_message: int) -> None:
        self._sequence = InboundSequence(epoch)
        self._max_message = max_message
        self.gap: str | None = None

    def unpack(self, item: _Item, dropped: Counter[tuple[str, str]]) -> Message | None:
        if not isinstance(item, bytes):
            return item
        found, gap = unpack(item, self._sequence, self._max_message, dropped)
        self.gap = gap or self.gap
        return found.body if found is not None else None


class InprocStageChannel:
    """A stage's end; see :class:`~kvbaton.control.StageChannel`.  Made by ``InprocCoordinatorChannels.connect``."""

    def __init__(
        self,
        peer: PeerId,
        outbound: _Outbound,
        inbound: _Inbound,
        deliver: Callable[[PeerId, _Item], None],
        closed: Callable[[PeerId], None],
    ) -> None:
        self._peer = peer
        self._outbound = outbound
        self._inbound = inbound
        self._deliver = deliver
        self._report_closed = closed
        self._inbox: deque[_Item] = deque()
        self._bell = Bell()
        self._lock = threading.Lock()
        self._lost: str | None = None
        self._closed = False
        self._sent = 0
        self._received = 0
        self._dropped: Counter[tuple[str, str]] = Counter()

    @property
    def peer(self) -> PeerId:
        return self._peer

    @property
    def lost(self) -> str | None:
        return self._lost

    def send(self, message: Message) -> None:
        if self._lost is not None or self._closed:
            self._dropped[family_of(message), "gone-peer"] += 1
            return
        self._deliver(self._peer, self._outbound.pack(message))
        self._sent += 1

    hold = send  # a queue has no journey to share

    def flush(self) -> None:
        pass

    def receive(self) -> list[Message]:
        messages: list[Message] = []
        if self._closed:
            return messages
        while self._inbox:
            message = self._inbound.unpack(self._inbox.popleft(), self._dropped)
            if message is not None:
                messages.append(message)
            elif self._inbound.gap is not None:
                self.sever(self._inbound.gap)
        self._received += len(messages)
        return messages

    def wait(self, timeout: float) -> None:
        self._bell.wait(timeout, lambda: self._inbox or self._closed)
        # All threads here share one interpreter.  Whoever rang was cut short by that, most likely, and has more to say:
        # what then comes together costs one waking, not one each (a hand-off took 20 changes of thread, and takes 4).
        _give_way()

    def wake(self) -> None:
        self._bell.ring()

    def sever(self, reason: str) -> None:
        with self._lock:
            if self._lost is None:
                self._lost = reason
        self._bell.ring()

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._sent, self._received, dict(self._dropped))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._bell.ring()
        self._report_closed(self._peer)

    def accept(self, item: _Item) -> None:
        """Called by the coordinator's end, from its thread."""
        self._inbox.append(item)
        self._bell.ring()


class _Peer:
    __slots__ = ("backlog", "channel", "inbound", "lost", "outbound")

    def __init__(self, outbound: _Outbound, inbound: _Inbound) -> None:
        self.outbound = outbound
        self.inbound = inbound
        self.backlog: list[_Item] = []
        self.channel: InprocStageChannel | None = None
        self.lost = False


class InprocCoordinatorChannels:
    """The coordinator's ends; see :class:`~kvbaton.control.CoordinatorChannels`.

    ``max_message`` (bytes) bounds what goes through the codec; without the codec there is nothing to measure.
    """

    def __init__(
        self, *, epoch: int | None = None, through_codec: bool = False, max_message: int = MAX_MESSAGE_BYTES
    ) -> None:
        self._epoch = time.time_ns() if epoch is None else epoch
        self._through_codec = through_codec
        self._max_message = max_message
        self._peers: dict[PeerId, _Peer] = {}
        self._lifetimes = Lifetimes()
        #: from any stage's thread; None marks the end of a channel
        self._inbox: deque[tuple[PeerId, _Item | None]] = deque()
        #: of whom more has come than one pass may take, and what that is
        self._late: dict[PeerId, deque[_Item | None]] = {}
        self._bell = Bell()
        self._lock = threading.Lock()
        self._closed = False
        self._sent = 0
        self._received = 0
        self._dropped: Counter[tuple[str, str]] = Counter()

    def add(self, peer: PeerId) -> None:
        if self._closed:
            raise LocalProtocolError(f"the channels are closed; {peer} cannot be added")
        self._lifetimes.add(peer)
        outbound = _Outbound(self._epoch, self._through_codec, self._max_message)
        with self._lock:
            self._peers[peer] = _Peer(outbound, _Inbound(peer.epoch, self._max_message))

    def connect(self, peer: PeerId) -> InprocStageChannel:
        """The stage's end of ``peer``'s channel, once.  From any thread.

        Raises: LocalProtocolError for a peer that was not added, or is connected already.
        """
        with self._lock:
            entry = self._peers.get(peer)
            if entry is None or entry.channel is not None:
                raise LocalProtocolError(f"{peer} {'is connected already' if entry else 'was not added'}", peer=peer)
            channel = InprocStageChannel(
                peer,
                _Outbound(peer.epoch, self._through_codec, self._max_message),
                _Inbound(self._epoch, self._max_message),
                self._accept,
                lambda peer: self._accept(peer, None),
            )
            for item in entry.backlog:
                channel.accept(item)
            entry.backlog.clear()
            entry.channel = channel
            return channel

    def remove(self, peer: PeerId) -> None:
        with self._lock:
            entry = self._peers.pop(peer, None)
        if entry is not None and entry.channel is not None:
            entry.channel.sever("the coordinator has forgotten this stage")

    def send(self, peer: PeerId, message: Message) -> None:
        # the lock orders a first ``connect`` from another thread against this
        with self._lock:
            entry = self._peers.get(peer)
            if entry is None or entry.lost or self._closed:
                self._dropped[family_of(message), "gone-peer"] += 1
                return
            item = entry.outbound.pack(message)
            if entry.channel is None:
                entry.backlog.append(item)
            else:
                entry.channel.accept(item)
        self._sent += 1

    def receive(self) -> list[ChannelEvent]:
        events: list[ChannelEvent] = []
        inbox = self._inbox
        count = len(inbox)  # what comes meanwhile is for the next pass
        if self._late or count > ENVELOPES_PER_PASS:
            items = self._shares(count)
        else:
            items = [inbox.popleft() for _ in range(count)]
        for peer, item in items:
            entry = self._peers.get(peer)
            if item is None:
                if entry is not None and not entry.lost:
                    events.append(self._lose(peer, entry, "the stage closed its channel"))
                continue
            if entry is None or entry.lost:
                family = "unknown" if isinstance(item, bytes) else family_of(item)
                self._dropped[family, "unknown-peer" if entry is None else "lost"] += 1
                continue
            message = entry.inbound.unpack(item, self._dropped)
            if message is not None:
                events.append(Received(peer, message))
                self._received += 1
            elif entry.inbound.gap is not None:
                events.append(self._lose(peer, entry, entry.inbound.gap))
        return events

    def _shares(self, count: int) -> list[tuple[PeerId, _Item | None]]:
        """Of each peer what one pass may take, oldest first, when ``count`` more have come; the rest waits."""
        for _ in range(count):
            peer, item = self._inbox.popleft()
            self._late.setdefault(peer, deque()).append(item)
        shares = []
        for peer, waiting in list(self._late.items()):
            shares += [(peer, waiting.popleft()) for _ in range(min(len(waiting), ENVELOPES_PER_PASS))]
            if not waiting:
                del self._late[peer]
        return shares

    def unheard(self, peer: PeerId) -> bool:
        entry = self._peers.get(peer)
        if entry is None or entry.lost:
            return False
        return peer in self._late or any(other == peer for other, _ in tuple(self._inbox))

    def wait(self, timeout: float) -> None:
        self._bell.wait(timeout, lambda: self._inbox or self._late or self._closed)

    def wake(self) -> None:
        self._bell.ring()

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._sent, self._received, dict(self._dropped))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for peer, entry in self._peers.items():
            if entry.channel is not None:
                entry.channel.sever(f"the coordinator closed the channel of {peer}")
        self._inbox.clear()
        self._late.clear()
        self._bell.ring()

    def _lose(self, peer: PeerId, entry: _Peer, reason: str) -> ChannelLost:
        entry.lost = True
        entry.backlog.clear()
        if entry.channel is not None:
            entry.channel.sever(f"the coordinator gave this channel up: {reason}")
        return ChannelLost(peer, reason)

    def _accept(self, peer: PeerId, item: _Item | None) -> None:
        """Called by a stage's end, from its thread."""
        if not self._closed:
            self._inbox.append((peer, item))
            self._bell.ring()
