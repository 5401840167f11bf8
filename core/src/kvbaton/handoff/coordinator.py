"""The coordinator machine: requests that wait, transfers under way, the peers they are on, and the books of credits.

Sans-IO: every method is one event and returns the effects it has, in order.  Times are seconds of one monotonic clock,
passed in as ``now``; :meth:`Coordinator.next_deadline` says when :meth:`Coordinator.expire` has something to do
(C6.7).

A request waits until a pair of stages can hold it; then a *generation* of it begins under a fresh ``TransferId`` with
two credits, one on each stage, returned apart and exactly once (C2.5).  The request ends for its caller as early as
its outcome is known; the entry stays until both credits are back and is then forgotten: there are no tombstones (C1.1,
C1.2, T12).

*Recovery*: where a generation is lost with a stage or a connection, the request may wait again with its age and begin
as another generation, under a fresh id and with fresh credits, while the lost one is wound up like any that has ended.
So nothing of the fence (C6.4) depends on it: what the dead stage could still touch stays held as it would anyhow.  A
stage that is being started again is *expected*: requests wait for it.

*Mending*: a connection never comes back within the two lives that it joined (C1.4).  So where two living stages are not
connected any more, one of them is lost, fenced and started again like any other: at once where a stage or a request
has nobody else, else when that costs nobody anything.

Cost: a message touches one entry and never looks at others.  What looks at all transfers of a peer happens when the
peer is lost or joined; what looks at all that wait, when a stage or a connection comes or goes.  Each other look at the
waiting requests is bounded by ``Limits.window``, and each of those by the number of pairs.  While a connection is
broken, what changes the books also looks at its two stages.

Threading: one thread, the coordinator's event loop.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import msgspec

from kvbaton.bounds import FAIL_CLOSED
from kvbaton.bounds import Deadlines as Deadlines
from kvbaton.bounds import Limits as Limits
from kvbaton.bounds import Recovery as Recovery
from kvbaton.engine import FinishReason, Request, Role
from kvbaton.errors import DuplicateRequest, LocalProtocolError, PromptTooLong, RuntimeClosed, TooManyWaiting
from kvbaton.handoff.credits import Ledger
from kvbaton.handoff.effects import (
    Ask,
    CoordinatorEffect,
    Ended,
    Ending,
    Fault,
    Fenced,
    Ignored,
    Join,
    Kill,
    Placed,
    Reached,
    Requeued,
    Restart,
    SendTo,
    Tell,
    Tokens,
    Violation,
)
from kvbaton.handoff.table import LEGAL_COORDINATOR, CoordinatorPhase, Milestones, PeerStatus
from kvbaton.identity import PeerId, RequestKey, TransferId, new_transfer_id
from kvbaton.messages import (
    Ack,
    Activated,
    Cancel,
    Commit,
    Connect,
    Connected,
    Disconnect,
    Failed,
    Fatal,
    Finished,
    Hello,
    Message,
    Output,
    PeerDown,
    Prefill,
    Progress,
    Received,
    Rejected,
    Release,
    Reserve,
    Reserved,
    Retired,
    Stop,
    Unproven,
)

_WAITING, _RESERVING, _PREFILLING = CoordinatorPhase.WAITING, CoordinatorPhase.RESERVING, CoordinatorPhase.PREFILLING
_COMMITTED, _RECEIVED, _ENDED = CoordinatorPhase.COMMITTED, CoordinatorPhase.RECEIVED, CoordinatorPhase.ENDED
_UP, _LOST, _FENCED = PeerStatus.UP, PeerStatus.LOST, PeerStatus.FENCED
_FINISHED, _CANCELLED, _FAILED = Ending.FINISHED, Ending.CANCELLED, Ending.FAILED

#: A generation in one of these has not everything at D: losing its writer ends it.
_EXPOSED: Final = (_RESERVING, _PREFILLING, _COMMITTED)

#: What :class:`Coordinator` methods return.
Effects: TypeAlias = list[CoordinatorEffect]


class Pair(msgspec.Struct, frozen=True):
    """A prefill and a decode stage that are up, connected to each other, and can hold the request now.

    Loads are the share of the stage's capacity that is promised, 0 to 1.
    """

    prefill: PeerId
    decode: PeerId
    prefill_load: float
    decode_load: float


#: Picks one of the pairs (never an empty sequence), or None: not now; the request waits on.
Choose: TypeAlias = Callable[[RequestKey, Request, Sequence[Pair]], Pair | None]


def least_loaded(key: RequestKey, request: Request, pairs: Sequence[Pair]) -> Pair:  # noqa: ARG001
    """The pair with the least load on both stages together; the first of equals."""
    return min(pairs, key=lambda pair: pair.prefill_load + pair.decode_load)


class PeerView(msgspec.Struct, frozen=True):
    """A stage as the coordinator's books have it."""

    peer: PeerId
    role: Role
    status: PeerStatus
    draining: bool
    transfers: int
    blocks_out: int
    blocks: int
    slots_out: int
    slots: int
    repeated_returns: int
    connected: tuple[PeerId, ...]
    load: float
    block_tokens: int


class _Peer:
    __slots__ = ("connected", "down", "draining", "endpoint", "entries", "id", "leaving", "ledger", "ordinal", "quiet",
                 "role", "status", "unjoinable", "words")  # fmt: skip

    def __init__(self, hello: Hello) -> None:
        self.id = hello.peer
        self.role = hello.role
        self.endpoint = hello.endpoint
        self.ledger = Ledger(hello.capacity)
        self.status = _UP
        #: How often it has said something, whatever it was.
        self.words = 0
        #: Last creating message sent on this channel (C1.2).
        self.ordinal = 0
        #: Lost for good: nobody will ever join it.
        self.unjoinable = False
        #: Takes nothing new.
        self.draining = False
        #: Was told to exit: the end of its channel is no news.
        self.leaving = False
        #: Peers that it reported up, and those whose connection has gone down for good.
        self.connected: set[PeerId] = set()
        self.down: set[PeerId] = set()
        #: Of the latter, those of whom it has said that nothing can arrive any more.
        self.quiet: set[PeerId] = set()
        #: Generations that are on it and not forgotten.
        self.entries: dict[TransferId, _Entry] = {}

    @property
    def open(self) -> bool:
        """Takes new transfers."""
        return self.status is _UP and not self.draining


class _Expected:
    __slots__ = ("after", "role")

    def __init__(self, role: Role, after: PeerId) -> None:
        self.role = role
        #: The life whose end it waits for; None: it is being started, and no other end starts it once more.
        self.after: PeerId | None = after


class _Break:
    """Two stages that live, and whose connection is down for good."""

    __slots__ = ("due", "hopeless", "spared", "words")

    def __init__(self, due: float, words: dict[PeerId, int]) -> None:
        #: Until when one of them may still turn out to be dead, or to hang; -inf once that was looked at.
        self.due = due
        #: What each had said when both were asked whether they live.
        self.words = words
        #: It was said that nothing mends it.
        self.hopeless = False
        #: Nobody needs it: no stage, and no request that waits.  True until stages change or such a request comes.
        self.spared = False


class _Waiting:
    __slots__ = ("age", "attempts", "avoid", "cause", "delivered", "key", "not_before", "passes", "prefer", "request",
                 "tries")  # fmt: skip

    def __init__(self, key: RequestKey, request: Request, age: int) -> None:
        self.key = key
        self.request = request
        #: Order of arrival; kept when the request waits again (C2.6).
        self.age = age
        #: Younger requests that have passed it.
        self.passes = 0
        #: Refusals in spite of credits so far, and when to ask again.
        self.tries = 0
        self.not_before = -math.inf
        #: Generations lost so far, and why the last one was.
        self.attempts = 0
        self.cause = ""
        #: Where to begin again if it can be helped: with the stage that is left, or not with this pair.
        self.prefer: PeerId | None = None
        self.avoid: tuple[PeerId, PeerId] | None = None
        #: Tokens that earlier generations have delivered; they are the end of ``request``'s prompt.
        self.delivered = 0


class _Entry:
    __slots__ = (
        "activated",
        "asked",
        "count",
        "d",
        "d_out",
        "deadlines",
        "last",
        "p",
        "p_out",
        "phase",
        "position",
        "tokens",
        "transfer",
        "unproven",
        "waiting",
    )

    def __init__(self, transfer: TransferId, waiting: _Waiting, p: _Peer, d: _Peer) -> None:
        self.transfer = transfer
        self.waiting = waiting
        self.phase = _RESERVING
        self.p = p
        self.d = d
        #: The two credits (C2.5).
        self.p_out = True
        self.d_out = True
        #: Chunks, 0 until Commit.
        self.count = 0
        #: Output tokens passed on; and which, where the request could go on from them.
        self.position = 0
        self.tokens: list[int] = []
        self.last = -1
        self.activated = False
        #: Ended, and P waits for D's receipts of what it cannot prove itself.
        self.unproven = False
        #: The queue its deadline is in.
        self.deadlines: _DeadlineQueue | None = None
        #: Who was asked whether it lives, the drain being overdue, and what its words were until then.
        self.asked: dict[PeerId, int] = {}


class _DeadlineQueue:
    """Entries in the order of their deadlines, which is the order in which they were set: each lasts equally long.

    A renewal moves an entry to the end, so the order holds whatever is renewed.  ``grace``: by so much later than the
    stage that watches the same deadline (it can say more) the coordinator acts on it.
    """

    __slots__ = ("entries", "grace", "name", "seconds")

    def __init__(self, name: str, seconds: float, grace: float = 0.0) -> None:
        self.name = name
        self.seconds = seconds
        self.grace = grace
        self.entries: OrderedDict[TransferId, tuple[float, _Entry]] = OrderedDict()

    def first(self) -> float | None:
        for deadline, _ in self.entries.values():
            return deadline
        return None

    def due(self, now: float) -> _Entry | None:
        for deadline, entry in self.entries.values():
            return entry if deadline <= now else None
        return None


class Coordinator:
    """Every request, transfer and peer of one deployment.

    ``choose`` picks the pair for a request (default: least loaded); ``new_id`` makes transfer ids; ``recovery`` says
    what becomes of requests whose stage is lost (default: they fail).
    """

    def __init__(
        self,
        limits: Limits | None = None,
        deadlines: Deadlines | None = None,
        choose: Choose = least_loaded,
        new_id: Callable[[], TransferId] = new_transfer_id,
        recovery: Recovery = FAIL_CLOSED,
    ) -> None:
        self._limits = limits or Limits()
        self._recovery = recovery
        deadlines = deadlines or Deadlines()
        self._choose = choose
        self._new_id = new_id
        self._now = -math.inf
        self._peers: dict[PeerId, _Peer] = {}
        self._prefills: dict[PeerId, _Peer] = {}
        self._decodes: dict[PeerId, _Peer] = {}
        #: Stages that are to be started again, until they say Hello; and how often each was, since it has last served.
        self._expected: dict[str, _Expected] = {}
        self._restarts: dict[str, int] = {}
        #: P and D that both live and are not connected any more; and how often a pair of stages was mended by a start,
        #: since it has last served.
        self._broken: dict[tuple[PeerId, PeerId], _Break] = {}
        self._mended: dict[tuple[str, str], int] = {}
        #: Told to exit while the others go on: until when they may take for it (C6.7).
        self._dismissed: dict[PeerId, float] = {}
        #: Joined, and who has still to close its end of the connection: the second half of the fence (C6.4).
        self._unclosed: dict[PeerId, set[PeerId]] = {}
        self._entries: dict[TransferId, _Entry] = {}
        self._live: dict[RequestKey, _Waiting | _Entry] = {}
        self._queue: list[_Waiting] = []
        self._age = 0
        self._freed = False
        self._later: list[float] = []
        self._stopping = 0  # 1: senders, 2: receivers
        self._stop_cause = ""
        self._stop_deadline = math.inf
        self._shutdown = deadlines.shutdown
        self._reserve = _DeadlineQueue("reserve", deadlines.reserve)
        self._start = _DeadlineQueue("prefill_start", deadlines.prefill_start)
        self._idle = _DeadlineQueue("prefill_idle", deadlines.prefill_idle)
        self._receipts = _DeadlineQueue("receipts", deadlines.receipts, grace=deadlines.control)
        self._drain = _DeadlineQueue("drain", deadlines.drain)
        self._answers = _DeadlineQueue("control", deadlines.control)
        self._queues = (self._reserve, self._start, self._idle, self._receipts, self._drain, self._answers)

    # -- looking -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Generations that are not forgotten."""
        return len(self._entries)

    @property
    def waiting(self) -> int:
        """Requests that wait to be placed."""
        return len(self._queue)

    @property
    def live(self) -> int:
        """Requests that are not terminal for their caller."""
        return len(self._live)

    @property
    def stopping(self) -> bool:
        """After :meth:`fatal`."""
        return self._stopping > 0

    @property
    def closed(self) -> bool:
        """After :meth:`fatal`: every stage was joined, or can never be."""
        return self._stopping == 2 and all(_over(peer) for peer in self._decodes.values())

    def phase(self, transfer: TransferId) -> CoordinatorPhase | None:
        """None: no entry."""
        entry = self._entries.get(transfer)
        return entry.phase if entry else None

    def phase_of(self, key: RequestKey) -> CoordinatorPhase | None:
        """The phase of a live request; None: no live request has this key."""
        found = self._live.get(key)
        return None if found is None else found.phase if isinstance(found, _Entry) else _WAITING

    def key(self, transfer: TransferId) -> RequestKey | None:
        """The request of a generation that is not forgotten."""
        entry = self._entries.get(transfer)
        return entry.waiting.key if entry else None

    def credits_out(self, transfer: TransferId) -> tuple[bool, bool]:
        """Whether P's and D's credit of a generation are out."""
        entry = self._entries.get(transfer)
        return (entry.p_out, entry.d_out) if entry else (False, False)

    def unjoined(self, name: str) -> tuple[PeerId, ...]:
        """Lives of a stage that are lost and that nobody here will ever join; see :meth:`peer_unjoinable`.

        Their books, and what they may still write to, are kept until somebody who knows says :meth:`peer_joined`.
        """
        return tuple(p.id for p in self._peers.values() if p.id.name == name and p.unjoinable and p.status is _LOST)

    def idle(self, peer: PeerId) -> bool:
        """No transfer is on this stage: it may be stopped in peace (after :meth:`drain`)."""
        found = self._peers.get(peer)
        return found is None or not found.entries

    def connected(self, prefill: PeerId, decode: PeerId) -> bool:
        """Both are up and each has reported the other up, and neither down since."""
        p, d = self._prefills.get(prefill), self._decodes.get(decode)
        return p is not None and d is not None and p.status is _UP and d.status is _UP and _mutual(p, d)

    def peers(self) -> tuple[PeerView, ...]:
        """Every stage that is not forgotten."""
        return tuple(
            PeerView(
                p.id, p.role, p.status, p.draining, len(p.entries), p.ledger.blocks_out, p.ledger.capacity.blocks,
                p.ledger.slots_out, p.ledger.capacity.transfer_slots, p.ledger.repeated,
                tuple(sorted(p.connected - p.down)), p.ledger.load, p.ledger.capacity.block_tokens,
            )
            for p in self._peers.values()
        )  # fmt: skip

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, key: RequestKey, request: Request, now: float) -> Effects:
        """Take a request; it is placed now or waits.  One terminal :class:`Ended` follows for it, whatever happens.

        Raises (nothing was changed) :class:`DuplicateRequest` where ``key`` is live, :class:`PromptTooLong` where no
        stage that is up could ever hold it, :class:`TooManyWaiting` where too many wait, :class:`RuntimeClosed` after
        :meth:`fatal`.
        """
        self._tick(now)
        if self._stopping:
            raise RuntimeClosed(f"request {key!r}: the coordinator is stopping ({self._stop_cause})", request=key)
        if key in self._live:
            raise DuplicateRequest(
                f"request {key!r} is still live; wait for its end, abort it, or choose another id", request=key
            )
        if len(self._queue) >= self._limits.waiting:
            raise TooManyWaiting(
                f"request {key!r}: {len(self._queue)} requests wait already; try later, or raise limits.waiting",
                request=key, reason="too many wait",
            )  # fmt: skip
        self._refuse_too_long(key, request)
        self._age += 1
        waiting = _Waiting(key, request, self._age)
        self._live[key] = waiting
        self._queue.append(waiting)
        self._comes(waiting)
        effects: Effects = []
        if not self._served(waiting):
            self._refuse(waiting, self._nobody(), effects)
            return effects
        self._freed = True
        return self._settle(effects)

    def abort(self, key: RequestKey, now: float, cause: str = "cancelled by the caller") -> Effects:
        """End a request as cancelled; its memory comes back when its stages have drained."""
        self._tick(now)
        found = self._live.get(key)
        if found is None:
            return [Ignored(None, "abort", f"no live request {key!r}")]
        effects: Effects = []
        if isinstance(found, _Entry):
            self._end(found, _CANCELLED, cause, effects)
        else:
            self._dequeue(found)
            self._tell_end(found, None, _CANCELLED, cause, effects)
        return self._settle(effects)

    def place(self, now: float) -> Effects:
        """Place waiting requests as far as they fit.  Happens by itself whenever capacity comes back."""
        self._tick(now)
        effects: Effects = []
        self._place(effects)
        return effects

    # -- peers -------------------------------------------------------------------------------------------------------

    def handle(self, peer: PeerId, message: Message, now: float) -> Effects:
        """A transfer or peer message that arrived on ``peer``'s channel, in the channel's order (C9.4)."""
        self._tick(now)
        kind = type(message)
        sender = self._peers.get(peer)
        if sender is None:
            if isinstance(message, Hello):
                return self._hello(peer, message)
            return [Ignored(getattr(message, "transfer", None), kind.__name__, f"{peer} is not known")]
        sender.words += 1
        if kind in _PEER_HANDLERS:
            effects: Effects = []
            _PEER_HANDLERS[kind](self, sender, message, effects)
            return self._settle(effects)
        transfer: TransferId | None = getattr(message, "transfer", None)
        if transfer is None:
            return [Violation("C9.1", None, peer, f"{kind.__name__} is not for the coordinator")]
        entry = self._entries.get(transfer)
        if entry is None:
            return [Ignored(transfer, kind.__name__, "unknown transfer")]  # C1.2
        if self._restarts and sender.status is _UP:  # not a dead life's last words
            self._restarts.pop(peer.name, None)  # it serves
        effects = []
        if sender is entry.d:
            handler = _D_HANDLERS.get(kind)
        elif sender is entry.p:
            handler = _P_HANDLERS.get(kind)
        else:
            return [Violation("C1.4", transfer, peer, f"{kind.__name__} from a peer without part in this transfer")]
        if handler is None:
            self._violated(entry, sender, f"{kind.__name__} is not a word of a {sender.role.value} stage", effects)
        else:
            handler(self, entry, message, effects)
        if self._freed:
            self._settle(effects)
        return effects

    def heard(self, peer: PeerId, now: float) -> None:
        """``peer`` has said something that is not the machine's: a reply to a generic call, such as :class:`Ask` makes.

        It lives: its process runs and its pump answers.
        """
        self._tick(now)
        if peer in self._peers:
            self._peers[peer].words += 1

    def peer_lost(self, peer: PeerId, cause: str, now: float) -> Effects:
        """``peer``'s channel is gone, or its sequence has a gap (C9.4).  Ends what depends on it; frees nothing
        (C6.4).
        """
        self._tick(now)
        found = self._peers.get(peer)
        if found is None or found.status is not _UP:
            return [Ignored(None, "peer lost", f"{peer} is not up")]
        effects: Effects = []
        self._lose(found, cause, effects)
        return self._settle(effects)

    def peer_joined(self, peer: PeerId, now: float) -> Effects:
        """``peer``'s process was joined: it neither reads, writes nor sends any more.  The first half of a fence
        (C6.4).
        """
        self._tick(now)
        found = self._peers.get(peer)
        if found is None or found.status is _FENCED:
            return [Ignored(None, "peer joined", f"{peer} is not known or was joined before")]
        effects: Effects = []
        if found.status is _UP:
            self._lose(found, "its process ended", effects, kill=False)
        found.status = _FENCED
        self._dismissed.pop(peer, None)
        # what it had sent may still sit in the others' ends, so they close these first, on the same channel as any
        # Release
        others = self._decodes if found.role is Role.PREFILL else self._prefills
        effects += [SendTo(other.id, Disconnect(peer)) for other in others.values() if other.status is _UP]
        for entry in tuple(found.entries.values()):
            if entry.p is found and entry.p_out:
                self._p_over(entry, effects)
            elif entry.d is found:
                if entry.d_out:
                    self._d_over(entry)
                if entry.p_out:
                    self._set_deadline(entry, self._drain)  # P's time starts here: it drains towards nobody now
        # one that is lost and not joined may be written to all the same
        self._unclosed[peer] = {o.id for o in others.values() if o.status is not _FENCED and peer not in o.quiet}
        self._forget_peer(found)
        for joined in tuple(self._unclosed):
            self._closed(joined, peer, effects)
        self._restart_after(peer, effects)
        self._stop_receivers(effects)
        return self._settle(effects)

    def peer_unjoinable(self, peer: PeerId, now: float) -> Effects:
        """``peer`` is lost and nobody will ever join its process: it is on a host that cannot be reached.

        Nothing is freed by that: what it may write to stays held until it is severed, or for ever (C6.4).  But the
        shutdown waits for it no longer (C6.7).
        """
        self._tick(now)
        found = self._peers.get(peer)
        if found is None or found.status is _FENCED:
            return [Ignored(None, "peer unjoinable", f"{peer} is not known or was joined before")]
        effects: Effects = []
        found.unjoinable = True
        self._dismissed.pop(peer, None)
        if found.status is _UP:
            self._lose(found, "it cannot be reached", effects, kill=False)
        self._restart_after(peer, effects)
        self._stop_receivers(effects)
        return self._settle(effects)

    def start_failed(self, name: str, now: float, *, final: str = "") -> Effects:
        """A stage that was being started again cannot be, or ended before it said Hello.

        ``final``: why it is not to be tried once more; it is welcome when it comes nevertheless.  Without effect while
        its start still waits for the end of a life: see :meth:`never_ended`.
        """
        self._tick(now)
        effects: Effects = []
        expected = self._expected.get(name)
        if expected is None or expected.after is not None or self._stopping:
            return [Ignored(None, "start failed", f"{name} is not being started again")]
        times = self._restarts.get(name, 0)
        if not final and times < self._recovery.restarts:
            self._restart(name, effects)
        else:
            self._expect_no_more(name, final or self._given_up(name), effects)
        return self._settle(effects)

    def never_ended(self, peer: PeerId, now: float, cause: str) -> Effects:
        """``peer`` is lost and its end is not seen in the time it had: whoever waits for its successor waits no longer.

        That is about this life alone (C1.3, C1.4): where its end was seen, or another life's is awaited, it is without
        effect.  Its successor is welcome when it comes nevertheless.
        """
        self._tick(now)
        effects: Effects = []
        expected = self._expected.get(peer.name)
        if expected is None or expected.after != peer:
            return [Ignored(None, "never ended", f"nobody waits for the end of {peer}")]
        self._expect_no_more(peer.name, cause, effects)
        return self._settle(effects)

    def drain(self, peer: PeerId, now: float) -> Effects:
        """Place nothing more on ``peer``; what is on it goes on.  See :meth:`idle`, then :meth:`dismiss`.

        One that is lost, and would be started again once it was joined, is not.
        """
        self._tick(now)
        found = self._peers.get(peer)
        if found is None:
            known = ", ".join(map(str, self._peers)) or "none"
            raise LocalProtocolError(f"there is no stage {peer}, or it has ended; known: {known}", peer=peer)
        effects: Effects = []
        found.draining = True
        expected = self._expected.get(peer.name)
        if expected is not None and expected.after == peer:
            del self._expected[peer.name]
        self._changed()
        self._refuse_unserved(effects)
        return self._settle(effects)

    def dismiss(self, peer: PeerId, now: float) -> Effects:
        """Tell a drained, idle stage to exit; it is killed where it has not within :attr:`Deadlines.shutdown` (C6.7).

        Without effect where it was told before, or is lost, so that its end is coming.  Raises
        :class:`LocalProtocolError` while a transfer is on it, and where it has ended.
        """
        self._tick(now)
        found = self._peers.get(peer)
        if found is None or found.status is _FENCED:
            raise LocalProtocolError(f"{peer} has ended or was never there: nothing is left to dismiss", peer=peer)
        if not found.draining or found.entries:
            raise LocalProtocolError(f"{peer} is not drained and idle: drain it and wait first", peer=peer)
        if found.leaving or found.status is _LOST:
            return [Ignored(None, "dismiss", f"{peer} ends already")]
        effects: Effects = []
        self._dismissed[peer] = self._now + self._shutdown
        self._stop(found, effects)
        return effects

    def fatal(self, cause: str, now: float) -> Effects:
        """Stop everything: end every request, stop and join every P, then every D (C6.2).  See :attr:`closed`."""
        self._tick(now)
        if self._stopping:
            return [Ignored(None, "fatal", "already stopping")]
        self._stopping = 1
        self._expected.clear()
        self._broken.clear()
        self._stop_cause = cause
        self._stop_deadline = self._now + self._shutdown
        effects: Effects = []
        for found in tuple(self._live.values()):
            if isinstance(found, _Entry):
                self._end(found, _FAILED, cause, effects)
            else:
                self._refuse(found, cause, effects)
        for p in self._prefills.values():
            if p.status is _UP:
                self._stop(p, effects)
        self._stop_receivers(effects)
        self._freed = False
        return effects

    # -- time --------------------------------------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """When :meth:`expire` has something to do at the earliest; None: never, as things stand."""
        times = [first for queue in self._queues if queue.entries and (first := queue.first()) is not None]
        times += [broken.due for broken in self._broken.values() if broken.due > -math.inf]
        times += self._dismissed.values()
        if self._later and self._queue:
            times.append(self._later[0])
        if self._stopping and not self.closed:
            times.append(self._stop_deadline)
        soonest = min(times, default=math.inf)
        return soonest if soonest < math.inf else None

    def expire(self, now: float) -> Effects:
        """Act on every deadline that has passed (C6.7)."""
        self._tick(now)
        effects: Effects = []
        for queue in self._queues:
            while (entry := queue.due(self._now)) is not None:
                self._set_deadline(entry, None)
                text = f"C6.7: deadline.{queue.name} of {queue.seconds:g} s passed in {entry.phase.name}"
                if queue is self._drain:
                    self._overdue(entry, text, effects)
                elif queue is self._answers:
                    self._blame(entry, effects)
                else:
                    whom = entry.d if queue in (self._reserve, self._receipts) else entry.p
                    self._end(entry, _FAILED, f"{text}, waiting for {whom.id}", effects, at=whom)
        while self._later and self._later[0] <= self._now:
            heapq.heappop(self._later)
            self._freed = True
        text = f"C6.7: deadline.shutdown of {self._shutdown:g} s passed"
        for peer_id in [peer_id for peer_id, by in self._dismissed.items() if by <= self._now]:
            self._end_by_force(self._peers[peer_id], text, effects)
        if self._stopping and self._stop_deadline <= self._now:
            self._stop_deadline = math.inf
            for peer in tuple((self._prefills if self._stopping == 1 else self._decodes).values()):
                self._end_by_force(peer, text, effects)
        return self._settle(effects)

    # -- peer messages -----------------------------------------------------------------------------------------------

    def _hello(self, peer: PeerId, message: Hello) -> Effects:
        if message.peer != peer or message.role not in (Role.PREFILL, Role.DECODE):
            return [Violation("C1.4", None, peer, f"Hello of {message.peer} as {message.role.value}")]
        effects: Effects = []
        replaced = [p for p in self._peers.values() if p.id.name == peer.name and p.status is _UP]
        for old in replaced:
            if old.id.epoch > peer.epoch:
                return [Violation("C1.4", None, peer, f"{old.id} of a later start is up")]
        new = _Peer(message)
        self._peers[peer] = new
        mine, others = (self._prefills, self._decodes) if new.role is Role.PREFILL else (self._decodes, self._prefills)
        mine[peer] = new
        for old in replaced:  # after the new one is known: what waits has somewhere to go
            self._lose(old, f"replaced by {peer}", effects)
        self._expected.pop(peer.name, None)
        self._changed()
        if self._stopping:
            self._stop(new, effects)
            return effects
        for other in others.values():
            if other.status is _UP:
                effects += [SendTo(peer, Connect(other.endpoint)), SendTo(other.id, Connect(new.endpoint))]
        self._refuse_unserved(effects)  # what waited for it may be more than it holds
        return self._settle(effects)

    def _hello_again(self, sender: _Peer, message: Hello, effects: Effects) -> None:
        effects.append(Ignored(None, "Hello", "repeated"))

    def _connected(self, sender: _Peer, message: Connected, effects: Effects) -> None:
        if message.peer in sender.connected or message.peer in sender.down:
            effects.append(Ignored(None, "Connected", "repeated or late"))
            return
        sender.connected.add(message.peer)
        self._freed = True

    def _peer_down(self, sender: _Peer, message: PeerDown, effects: Effects) -> None:
        """A connection between two stages has ended; from D and quiet, P is *severed*: fenced in one direction (C6.4,
        A9).
        """
        other = self._peers.get(message.peer)
        sender.connected.discard(message.peer)
        if message.quiet and message.peer in self._unclosed:
            self._closed(message.peer, sender.id, effects)
            return
        if other is None or other.status is _FENCED or other.role is sender.role:
            effects.append(Ignored(None, "PeerDown", f"{message.peer} is not known or was joined"))
            return
        sender.down.add(other.id)
        if message.quiet:
            sender.quiet.add(other.id)
        self._changed()
        p, d = (sender, other) if sender.role is Role.PREFILL else (other, sender)
        self._broke(p, d, effects)
        pair = [entry for entry in sender.entries.values() if entry.p is p and entry.d is d]
        cause = f"the connection from {p.id} to {d.id} is down: {message.cause or 'no reason given'}"
        told = [entry for entry in pair if entry.phase is not _RESERVING]
        for entry in pair:
            if entry.phase in _EXPOSED:
                self._lost(entry, cause, effects, at=other)  # RESERVING: with a Release
        if sender is d and message.quiet and d.status is _UP:
            # D's memory is fenced; P may still be reading its own, so P's credit stays out
            effects += [SendTo(d.id, Release(e.transfer)) for e in told if e.phase is _ENDED and e.d_out]
        if other.status is _UP and not (p.leaving or d.leaving):  # else it is what was to be expected
            effects.append(Fault(None, cause, peer=other.id))
        self._refuse_unserved(effects)

    def _closed(self, joined: PeerId, by: PeerId, effects: Effects) -> None:
        """``by`` has closed its end of a joined peer's connection, or was joined itself."""
        unclosed = self._unclosed[joined]
        unclosed.discard(by)
        if not unclosed:
            del self._unclosed[joined]
            effects.append(Fenced(joined))

    def _fatal_peer(self, sender: _Peer, message: Fatal, effects: Effects) -> None:
        if sender.status is _UP:
            self._lose(sender, message.cause, effects)
        else:
            effects.append(Ignored(None, "Fatal", f"{sender.id} is not up"))

    # -- transfer messages -------------------------------------------------------------------------------------------
    # A message whose milestone has passed is late or repeated: ignored.  One whose milestone cannot be true yet is a
    # violation by its sender (C7.4).

    def _reserved(self, entry: _Entry, message: Reserved, effects: Effects) -> None:
        if entry.phase is not _RESERVING:
            self._late(entry, message, effects)
            return
        length, valid = len(entry.waiting.request.prompt), message.reservation.valid
        if not 0 <= valid <= length:  # observers and P believe it (C9.3)
            self._violated(entry, entry.d, f"Reserved with {valid} valid tokens of a prompt of {length}", effects)
            return
        self._move(entry, _PREFILLING)
        p = entry.p
        p.ordinal += 1  # numbered on its own channel, when it is sent (C1.2)
        prefill = Prefill(entry.transfer, p.ordinal, entry.waiting.request, message.reservation, entry.d.id)
        effects.append(SendTo(p.id, prefill))
        effects.append(
            Reached(
                entry.waiting.key, entry.transfer, Milestones.RESERVED, entry.d.id, prefix=message.reservation.valid
            )
        )  # fmt: skip
        self._set_deadline(entry, self._start)

    def _rejected(self, entry: _Entry, message: Rejected, effects: Effects) -> None:
        """D holds nothing: its Retired before it began."""
        if entry.phase is _RESERVING:
            waiting = entry.waiting
            again = message.retry and not self._stopping and waiting.tries < self._limits.retries
            if not again:
                times = f" ({waiting.tries + 1} times)" if waiting.tries else ""
                self._give_back_d(entry)
                self._end(entry, _FAILED, f"{entry.d.id} refused{times}: {message.cause}", effects, at=entry.d)
                return
            self._give_back_d(entry)
            self._give_back_p(entry)
            self._move(entry, _ENDED)
            self._set_deadline(entry, None)
            self._forget(entry)
            effects.append(Tell(waiting.key, entry.transfer, Requeued(message.cause)))
            waiting.prefer = None  # it was asked, and has no room
            self._wait_again(waiting, effects)
        elif entry.phase is _ENDED and entry.d_out:
            self._d_over(entry)
        else:
            self._violated(entry, entry.d, "Rejected after Reserved", effects)

    def _progress(self, entry: _Entry, message: Progress, effects: Effects) -> None:
        if entry.phase is _PREFILLING:
            first = entry.deadlines is self._start
            self._set_deadline(entry, self._idle)
            if first:
                effects.append(Reached(entry.waiting.key, entry.transfer, Milestones.PREFILL_STARTED, entry.p.id))
        elif entry.phase is _RESERVING:
            self._violated(entry, entry.p, "Progress before its time", effects)
        else:
            self._late(entry, message, effects)

    def _commit(self, entry: _Entry, message: Commit, effects: Effects) -> None:
        count = message.count
        if count <= 0 or (entry.count and entry.count != count):
            text = f"commit of {count} chunks" + (f" after one of {entry.count}" if entry.count else "")
            self._violated(entry, entry.p, text, effects, "C7.2")
        elif entry.phase is _PREFILLING:
            length = len(entry.waiting.request.prompt)
            if not 0 <= message.cached <= length or message.segments < 0 or message.nbytes < 0:  # observers believe it
                text = (
                    f"Commit with {message.cached} cached tokens of a prompt of {length}, {message.segments} segments"
                    f" and {message.nbytes} bytes"
                )
                self._violated(entry, entry.p, text, effects)
                return
            self._move(entry, _COMMITTED)
            entry.count = count
            effects.append(SendTo(entry.d.id, message))
            effects.append(
                Reached(
                    entry.waiting.key, entry.transfer, Milestones.COMMITTED, entry.p.id, message.timings, count,
                    message.segments, message.nbytes, message.cached,
                )
            )  # fmt: skip
            self._set_deadline(entry, self._receipts)
        elif entry.phase is _RESERVING:
            self._violated(entry, entry.p, "Commit before its time", effects)
        else:
            self._late(entry, message, effects)

    def _received(self, entry: _Entry, message: Received, effects: Effects) -> None:
        if entry.phase is _COMMITTED:
            self._move(entry, _RECEIVED)
            if self._mended:
                self._mended.pop((entry.p.id.name, entry.d.id.name), None)  # it serves
            effects.append(SendTo(entry.p.id, Ack(entry.transfer)))  # C4.1
            effects.append(Reached(entry.waiting.key, entry.transfer, Milestones.RECEIVED, entry.d.id, message.timings))
            self._set_deadline(entry, None)
        elif entry.phase is _RESERVING or entry.phase is _PREFILLING:
            self._violated(entry, entry.d, "Received before its time", effects)
        elif entry.unproven:
            self._prove(entry, effects)
        else:
            self._late(entry, message, effects)

    def _activated(self, entry: _Entry, message: Activated, effects: Effects) -> None:
        if entry.phase is _RECEIVED and not entry.activated:
            entry.activated = True
            effects.append(
                Reached(entry.waiting.key, entry.transfer, Milestones.ACTIVATED, entry.d.id, message.timings)
            )
        elif entry.phase in _EXPOSED:
            self._violated(entry, entry.d, "Activated before its time", effects)
        else:
            self._late(entry, message, effects)

    def _output(self, entry: _Entry, message: Output, effects: Effects) -> None:
        if entry.phase in _EXPOSED:
            self._violated(entry, entry.d, "Output before its time", effects)
        elif entry.phase is _ENDED or message.position < entry.position:
            self._late(entry, message, effects)
        elif message.position > entry.position:
            text = f"Output at {message.position} where {entry.position} comes next"
            self._violated(entry, entry.d, text, effects)
        else:
            entry.position += len(message.token_ids)
            if message.token_ids:
                entry.last = message.token_ids[-1]
            if self._recovery.recompute:
                entry.tokens += message.token_ids
            position = entry.waiting.delivered + message.position
            tokens = Tokens(position, message.token_ids, message.exit_depths)
            effects.append(Tell(entry.waiting.key, entry.transfer, tokens))

    def _finished(self, entry: _Entry, message: Finished, effects: Effects) -> None:
        if entry.phase is _RECEIVED:
            self._end(entry, _FINISHED, "", effects, message.reason)
        elif entry.phase in _EXPOSED:
            self._violated(entry, entry.d, "Finished before its time", effects)
        else:
            self._late(entry, message, effects)

    def _failed_p(self, entry: _Entry, message: Failed, effects: Effects) -> None:
        """The chunks will not all arrive.  After Received that is P's own affair."""
        if entry.phase is _PREFILLING or entry.phase is _COMMITTED:
            end = self._lost if message.unmoved else self._failed
            end(entry, f"{entry.p.id}: {message.cause}", effects, at=entry.p)
        elif entry.phase is _RESERVING:
            self._violated(entry, entry.p, "Failed before its time", effects)
        else:
            self._late(entry, message, effects)

    def _failed_d(self, entry: _Entry, message: Failed, effects: Effects) -> None:
        if entry.phase is _RESERVING:
            self._violated(entry, entry.d, "Failed before its time", effects)
        elif entry.phase is _ENDED:
            self._late(entry, message, effects)
        else:
            end = self._lost if message.unmoved else self._failed
            end(entry, f"{entry.d.id}: {message.cause}{_missing(message)}", effects, at=entry.d)
        if message.culprit is not None and message.culprit == entry.p.id and entry.p.status is _UP:
            self._lose(entry.p, f"{entry.d.id}: {message.cause}", effects)  # it may have hit memory (C7.2)

    def _retired_p(self, entry: _Entry, message: Retired, effects: Effects) -> None:
        if not entry.p_out:
            entry.p.ledger.give_back(entry.transfer)  # counts the second return (C2.5)
            self._late(entry, message, effects)
            return
        if entry.phase in _EXPOSED:
            text = "P retired a transfer that was neither acknowledged nor ended"
            self._violated(entry, entry.p, text, effects)
            return
        self._p_over(entry, effects)
        effects.append(
            Reached(entry.waiting.key, entry.transfer, Milestones.SOURCE_RETIRED, entry.p.id, message.timings)
        )

    def _retired_d(self, entry: _Entry, message: Retired, effects: Effects) -> None:
        if not entry.d_out:
            entry.d.ledger.give_back(entry.transfer)
            self._late(entry, message, effects)
            return
        if entry.phase is not _ENDED:
            self._violated(entry, entry.d, "D retired a transfer that has not ended", effects)
            return
        if entry.unproven:
            self._prove(entry, effects)
        self._d_over(entry)
        effects.append(
            Reached(entry.waiting.key, entry.transfer, Milestones.DESTINATION_RETIRED, entry.d.id, message.timings)
        )

    def _unproven_p(self, entry: _Entry, message: Unproven, effects: Effects) -> None:
        """P has drained, and only D's receipts can prove that some chunks are written no more (T3)."""
        if entry.phase in _EXPOSED:
            self._violated(entry, entry.p, "Unproven of a transfer that has not ended", effects)
        elif entry.phase is _RECEIVED or not entry.p_out:
            self._late(entry, message, effects)  # Ack is under way, or it has retired
        else:
            entry.unproven = True
            if not entry.d_out:
                self._prove(entry, effects)
            elif entry.d.status is _UP:  # else its end proves it
                effects.append(SendTo(entry.d.id, message))

    def _prove(self, entry: _Entry, effects: Effects) -> None:
        """Nothing is written at D any more, by its receipts or because it had everything, or nothing, at its end."""
        entry.unproven = False
        if entry.p_out and entry.p.status is _UP:
            effects.append(SendTo(entry.p.id, Ack(entry.transfer)))

    def _late(self, entry: _Entry, message: Message, effects: Effects) -> None:
        reason = "ended" if entry.phase is _ENDED else "repeated"
        effects.append(Ignored(entry.transfer, type(message).__name__, reason))

    def _violated(self, entry: _Entry, sender: _Peer, text: str, effects: Effects, clause: str = "C7.4") -> None:
        """The message is not applied; the transfer ends."""
        effects.append(Violation(clause, entry.transfer, sender.id, text))
        if entry.phase is not _ENDED:
            self._end(entry, _FAILED, f"{clause}: {sender.id}: {text}", effects, at=sender)

    # -- ending ------------------------------------------------------------------------------------------------------

    def _end(
        self,
        entry: _Entry,
        ending: Ending,
        cause: str,
        effects: Effects,
        reason: FinishReason | None = None,
        *,
        at: _Peer | None = None,
    ) -> None:
        """Terminal for the caller.  Tell whoever still works on it; keep the credits until they have retired (C2.5).

        ``at``: whom a failure lies with.
        """
        self._tell_end(entry.waiting, entry.transfer, ending, cause, effects, reason, at.id if at else None)
        self._wind_up(entry, effects, finished=ending is _FINISHED)

    def _wind_up(self, entry: _Entry, effects: Effects, *, finished: bool = False) -> None:
        """The generation is over for the caller; its stages are told, and keep what they must (C5.1, C5.2)."""
        phase, transfer = entry.phase, entry.transfer
        if not finished:
            if (phase is _PREFILLING or phase is _COMMITTED) and entry.p.status is _UP:
                effects.append(SendTo(entry.p.id, Cancel(transfer)))
            if entry.d_out and entry.d.status is _UP:
                # P was never told, so no writer is left
                word = Release(transfer) if phase is _RESERVING else Cancel(transfer)
                effects.append(SendTo(entry.d.id, word))
        self._move(entry, _ENDED)
        if phase is _RESERVING and entry.p_out:
            self._give_back_p(entry)
        self._set_deadline(entry, self._drain)
        self._forget(entry)

    def _failed(self, entry: _Entry, cause: str, effects: Effects, *, at: _Peer) -> None:
        self._end(entry, _FAILED, cause, effects, at=at)

    def _go_on(self, entry: _Entry, cause: str, effects: Effects, at: _Peer) -> bool:
        """Tokens were delivered: whether the request may be recomputed from them, and is prepared for it; else it has
        ended.
        """
        waiting, sampling = entry.waiting, entry.waiting.request.sampling
        left = sampling.max_tokens - entry.position
        if entry.last in sampling.stop_token_ids:
            self._end(entry, _FINISHED, "", effects, FinishReason.STOP)  # only the word of it was lost
        elif left < 1:
            self._end(entry, _FINISHED, "", effects, FinishReason.LENGTH)
        elif not self._recovery.recompute:
            after = f"after {entry.position} tokens were delivered (recovery.mode = recompute would go on from them)"
            self._end(entry, _FAILED, f"{cause.rstrip('.')}, {after}", effects, at=at)
        elif sampling.stop:
            why = "it cannot be recomputed: stop texts may span the tokens that were delivered"
            self._end(entry, _FAILED, f"{cause.rstrip('.')}; {why}", effects, at=at)
        else:
            waiting.request = msgspec.structs.replace(
                waiting.request,
                prompt=(*waiting.request.prompt, *entry.tokens),
                sampling=msgspec.structs.replace(sampling, max_tokens=left),
            )
            waiting.delivered += entry.position
            return True
        return False

    def _lost(self, entry: _Entry, cause: str, effects: Effects, *, at: _Peer) -> None:
        """The generation is lost with a stage or a connection: the request begins again, if it may, or fails."""
        waiting = entry.waiting
        if self._stopping or waiting.attempts >= self._recovery.attempts:
            if waiting.attempts:
                cause = f"{cause} (begun {waiting.attempts + 1} times)"
            self._end(entry, _FAILED, cause, effects, at=at)
            return
        if entry.position and not self._go_on(entry, cause, effects, at):
            return
        waiting.attempts += 1
        waiting.cause = cause
        # what is left of the lost generation's KV is on the stage that is left; where both are, they do not get on
        left = [peer.id for peer in (entry.p, entry.d) if peer.status is _UP]
        waiting.prefer = left[0] if len(left) == 1 else None
        waiting.avoid = (entry.p.id, entry.d.id) if len(left) == 2 else None
        effects.append(Tell(waiting.key, entry.transfer, Requeued(cause)))
        self._live[waiting.key] = waiting
        self._wind_up(entry, effects)
        bisect.insort(self._queue, waiting, key=_age)
        self._comes(waiting)
        self._freed = True  # it may fit at once
        if not self._served(waiting):
            self._refuse(waiting, self._nobody(), effects)

    def _tell_end(
        self,
        waiting: _Waiting,
        transfer: TransferId | None,
        ending: Ending,
        cause: str,
        effects: Effects,
        reason: FinishReason | None = None,
        at: PeerId | None = None,
    ) -> None:
        del self._live[waiting.key]  # C1.1
        effects.append(Tell(waiting.key, transfer, Ended(ending, reason, cause, at)))

    def _p_over(self, entry: _Entry, effects: Effects) -> None:
        """P's side holds nothing any more and writes nothing any more, by its own word or by a fence."""
        self._give_back_p(entry)
        if entry.phase is _ENDED and entry.d_out:
            if entry.d.status is _UP:
                effects.append(SendTo(entry.d.id, Release(entry.transfer)))  # C5.2
            self._set_deadline(entry, self._drain)  # D's time starts here
        self._forget(entry)

    def _d_over(self, entry: _Entry) -> None:
        self._give_back_d(entry)
        self._forget(entry)

    def _give_back_p(self, entry: _Entry) -> None:
        entry.p_out = False
        entry.p.ledger.give_back(entry.transfer)
        self._freed = True

    def _give_back_d(self, entry: _Entry) -> None:
        entry.d_out = False
        entry.d.ledger.give_back(entry.transfer)
        self._freed = True

    def _forget(self, entry: _Entry) -> None:
        if entry.phase is not _ENDED or entry.p_out or entry.d_out:
            return
        self._set_deadline(entry, None)
        del self._entries[entry.transfer]
        for peer in (entry.p, entry.d):
            del peer.entries[entry.transfer]
            self._forget_peer(peer)

    def _overdue(self, entry: _Entry, text: str, effects: Effects) -> None:
        """A stage that does not retire an ended transfer is lost.  P first: D cannot before P has.

        But neither can P while D hangs, where a chunk ends with D's help only.  So both are asked whether they live.
        """
        if not entry.p_out:
            if entry.d.status is _UP:
                self._lose(entry.d, f"{text} of {entry.transfer}", effects)
        elif entry.p.status is _UP:
            entry.asked = {peer.id: peer.words for peer in (entry.p, entry.d) if peer.status is _UP}
            effects += map(Ask, entry.asked)
            self._set_deadline(entry, self._answers)

    def _blame(self, entry: _Entry, effects: Effects) -> None:
        """P's drain is overdue and both were asked: lost are those that hang; P, where both live."""
        stages = [peer for peer in (entry.p, entry.d) if peer.status is _UP]
        silent = [peer for peer in stages if entry.asked.get(peer.id) == peer.words]
        text = f"C6.7: deadline.drain of {self._drain.seconds:g} s passed in ENDED of {entry.transfer}"
        for peer in silent:
            cause = f"{text}, and it has said nothing for deadline.control of {self._answers.seconds:g} s: it hangs"
            self._lose(peer, cause, effects)
        if not silent and entry.p.status is _UP:
            self._lose(entry.p, text, effects)

    # -- peers, inside -----------------------------------------------------------------------------------------------

    def _lose(self, peer: _Peer, cause: str, effects: Effects, kill: bool = True) -> None:
        peer.status = _LOST
        for pair in [pair for pair in self._broken if peer.id in pair]:
            del self._broken[pair]
        self._changed()
        # one that was drained stays away: nothing is to be placed there
        gone = peer.leaving or peer.draining or self._stopping
        again = self._restarts.get(peer.id.name, 0) < self._recovery.restarts
        if not gone and again:
            self._expected[peer.id.name] = _Expected(peer.role, peer.id)
        if not peer.leaving:
            effects.append(Fault(None, f"C6.4: {peer.id} is lost: {cause}", peer=peer.id))
            if not (gone or again) and self._recovery.restarts:
                effects.append(Fault(None, self._given_up(peer.id.name)))
            if kill:
                effects.append(Kill(peer.id, cause))
        for entry in tuple(peer.entries.values()):
            if entry.phase in _EXPOSED or (entry.phase is _RECEIVED and entry.d is peer):
                self._lost(entry, f"{peer.id} is lost: {cause}", effects, at=peer)
            elif entry.d is peer and entry.p_out:
                self._set_deadline(entry, self._drain)  # what P waits for comes to an end now
        self._refuse_unserved(effects)

    # -- mending -----------------------------------------------------------------------------------------------------

    def _broke(self, p: _Peer, d: _Peer, effects: Effects) -> None:
        """A connection is down.  One of the two may be dying or hang, which its partner has noticed first: both are
        asked whether they live, and have :attr:`Deadlines.control` to say so.
        """
        pair = (p.id, d.id)
        if pair in self._broken or not self._recovery.restarts or self._stopping:
            return
        if p.status is _UP and d.status is _UP and not (p.leaving or d.leaving):
            self._broken[pair] = _Break(self._now + self._answers.seconds, {p.id: p.words, d.id: d.words})
            effects += [Ask(p.id), Ask(d.id)]

    def _mend(self, effects: Effects) -> None:
        """Lose one of each two that live and are not connected, if anybody needs it or nobody is on it."""
        for pair, broken in tuple(self._broken.items()):
            if broken.due > self._now or pair not in self._broken:
                continue  # or the loss of another has mended it
            broken.due = -math.inf
            p, d = self._prefills[pair[0]], self._decodes[pair[1]]
            if not (p.open and d.open):
                continue
            if broken.spared and (not self._recovery.mend_idle or (p.entries and d.entries)):
                continue  # nobody needs it, and both have something to do: whoever it were, not now
            loser = self._to_lose(p, d)
            if loser is None:
                if not broken.hopeless:  # also where others serve: nobody would ever know, and nothing heals it
                    broken.hopeless = True
                    text = f"{p.id} and {d.id} are not connected, and starting one of them again has not helped"
                    others = "" if self._needed(p, d) else "; others serve in their place"
                    effects.append(Fault(None, f"C6.3: {text}: they are left as they are{others}"))
                    self._refuse_unserved(effects)
            elif (self._recovery.mend_idle and not loser.entries) or not self._spared(p, d):
                other = d if loser is p else p
                names = (p.id.name, d.id.name)
                self._mended[names] = self._mended.get(names, 0) + 1
                silent = broken.words[loser.id] == loser.words and broken.words[other.id] != other.words
                how = "it answers nothing" if silent else "both live, so that it is started again to be connected"
                self._lose(loser, f"its connection with {other.id} is down and {how}", effects)

    def _to_lose(self, p: _Peer, d: _Peer) -> _Peer | None:
        """Which of two that are not connected is to be lost; None: neither, for that has not helped or costs too much.

        Who hangs; else who has nobody else, for the other one serves on; else who has lost most connections; else who
        decodes for nobody; else who was started again less often; else P.
        """
        if self._mended.get((p.id.name, d.id.name), 0) >= self._recovery.restarts:
            return None
        words = self._broken[p.id, d.id].words
        silent = [peer for peer in (p, d) if words[peer.id] == peer.words]
        alone = [peer for peer in (p, d) if self._alone(peer)]
        some = silent if len(silent) == 1 and self._broken[p.id, d.id].due <= self._now else alone or [p, d]
        able = [peer for peer in some if self._restarts.get(peer.id.name, 0) < self._recovery.restarts]
        return min(
            able,
            key=lambda peer: (
                -sum(peer.id in pair for pair in self._broken), _decodes(peer), self._restarts.get(peer.id.name, 0),
                peer is d,
            ),
            default=None,
        )  # fmt: skip

    def _alone(self, peer: _Peer) -> bool:
        """No stage is up that it could be connected to, and none is coming: it serves nothing."""
        prefill = peer.role is Role.PREFILL
        if any(expected.role is not peer.role for expected in self._expected.values()):
            return False
        others = [other for other in (self._decodes if prefill else self._prefills).values() if other.open]
        return not any(_possible(peer, other) if prefill else _possible(other, peer) for other in others)

    def _spared(self, p: _Peer, d: _Peer) -> bool:
        """Whether nobody needs this pair; what was found is kept, for it takes a look at all that wait."""
        broken = self._broken[p.id, d.id]
        broken.spared = broken.spared or not self._needed(p, d)
        return broken.spared

    def _needed(self, p: _Peer, d: _Peer) -> bool:
        """Whether a stage or a request has nobody but this pair."""
        return self._alone(p) or self._alone(d) or any(self._needs(waiting, p, d) for waiting in self._queue)

    def _needs(self, waiting: _Waiting, p: _Peer, d: _Peer) -> bool:
        request = waiting.request
        able = _holds(p, len(request.prompt)) and _holds(d, request.max_length)
        return able and not self._served(waiting, mended=False)

    def _changed(self) -> None:
        """What stages there are, and which are connected or expected: so who needs whom has to be looked at again."""
        for broken in self._broken.values():
            broken.spared = False

    def _comes(self, waiting: _Waiting) -> None:
        """A request waits from now on: it alone may need what nobody has needed so far."""
        for (p, d), broken in self._broken.items():
            if broken.spared and self._needs(waiting, self._prefills[p], self._decodes[d]):
                broken.spared = False

    def _restart_after(self, end: PeerId, effects: Effects) -> None:
        """A life's end was seen: its stage is started again, if it is that end that its start waits for."""
        expected = self._expected.get(end.name)
        if expected is not None and expected.after == end:
            self._restart(end.name, effects)

    def _expect_no_more(self, name: str, cause: str, effects: Effects) -> None:
        del self._expected[name]
        self._changed()
        effects.append(Fault(None, cause))
        self._refuse_unserved(effects)

    def _restart(self, name: str, effects: Effects) -> None:
        self._expected[name].after = None
        self._restarts[name] = self._restarts.get(name, 0) + 1
        effects.append(Restart(name))

    def _given_up(self, name: str) -> str:
        times = self._restarts.get(name, 0)
        return f"C6.3: {name} was started again {times} times and did not serve: it is given up"

    def _forget_peer(self, peer: _Peer) -> None:
        """A joined peer without transfers is forgotten, also by the others (T12)."""
        if peer.status is not _FENCED or peer.entries or peer.id not in self._peers:
            return
        del self._peers[peer.id]
        (self._prefills if peer.role is Role.PREFILL else self._decodes).pop(peer.id)
        for other in self._peers.values():
            other.connected.discard(peer.id)
            other.down.discard(peer.id)
            other.quiet.discard(peer.id)

    def _stop_receivers(self, effects: Effects) -> None:
        if self._stopping != 1 or not all(_over(p) for p in self._prefills.values()):
            return
        self._stopping = 2
        self._stop_deadline = self._now + self._shutdown
        for d in self._decodes.values():
            if d.status is _UP:
                self._stop(d, effects)

    def _end_by_force(self, peer: _Peer, cause: str, effects: Effects) -> None:
        """It was told to exit and has not."""
        self._dismissed.pop(peer.id, None)
        peer.leaving = False
        if peer.status is _UP:
            self._lose(peer, cause, effects)
        elif peer.status is _LOST:
            effects.append(Kill(peer.id, cause))

    def _stop(self, peer: _Peer, effects: Effects) -> None:
        peer.leaving = True
        effects += [SendTo(peer.id, Stop()), Join(peer.id)]

    # -- the queue ---------------------------------------------------------------------------------------------------

    def _settle(self, effects: Effects) -> Effects:
        """Place what fits now that something has changed, and mend what may be mended now."""
        if self._broken:
            self._mend(effects)
        if self._freed:
            self._freed = False
            if self._queue:
                self._place(effects)
        return effects

    def _place(self, effects: Effects) -> None:
        self._freed = False
        while self._queue and not self._stopping and self._place_one(effects):
            pass

    def _place_one(self, effects: Effects) -> bool:
        """Place the oldest request that fits, unless it would pass one that was passed too often (C2.6)."""
        prefills = [p for p in self._prefills.values() if p.open and p.ledger.slots_free]
        decodes = [d for d in self._decodes.values() if d.open and d.ledger.slots_free]
        if not prefills or not decodes:
            return False
        for index, waiting in enumerate(self._queue[: self._limits.window]):
            if waiting.not_before <= self._now:
                pair = self._choose_pair(waiting, _pairs(waiting.request, prefills, decodes), effects)
                if pair is not None:
                    for older in self._queue[:index]:
                        older.passes += 1
                    del self._queue[index]
                    self._begin(waiting, self._prefills[pair.prefill], self._decodes[pair.decode], effects)
                    return True
            if waiting.passes >= self._limits.passes:
                return False
        return False

    def _choose_pair(self, waiting: _Waiting, pairs: list[Pair], effects: Effects) -> Pair | None:
        """Ask the policy; one that raises or invents a pair must not take the coordinator down."""
        if not pairs:
            return None
        if waiting.prefer is not None:
            pairs = [pair for pair in pairs if waiting.prefer in (pair.prefill, pair.decode)] or pairs
        if waiting.avoid is not None:
            pairs = [pair for pair in pairs if waiting.avoid != (pair.prefill, pair.decode)] or pairs
        try:
            pair = self._choose(waiting.key, waiting.request, pairs)
        except Exception as error:
            effects.append(Fault(None, f"the placement policy raised {error!r}; the least loaded pair was taken"))
            return least_loaded(waiting.key, waiting.request, pairs)
        if pair is not None and pair not in pairs:
            effects.append(
                Fault(None, f"the placement policy chose {pair}, which was not offered; the least loaded was taken")
            )
            return least_loaded(waiting.key, waiting.request, pairs)
        return pair

    def _begin(self, waiting: _Waiting, p: _Peer, d: _Peer, effects: Effects) -> None:
        """Take both credits at once and ask D first (C2.1)."""
        transfer = self._new_id()
        request = waiting.request
        p.ledger.take(transfer, p.ledger.capacity.blocks_for(len(request.prompt)))
        d.ledger.take(transfer, d.ledger.capacity.blocks_for(request.max_length))
        entry = _Entry(transfer, waiting, p, d)
        self._entries[transfer] = p.entries[transfer] = d.entries[transfer] = entry
        self._live[waiting.key] = entry
        d.ordinal += 1
        effects.append(Tell(waiting.key, transfer, Placed(p.id, d.id)))
        effects.append(SendTo(d.id, Reserve(transfer, d.ordinal, request, p.id)))
        effects.append(Reached(waiting.key, transfer, Milestones.PLACED))
        self._set_deadline(entry, self._reserve)

    def _wait_again(self, waiting: _Waiting, effects: Effects) -> None:
        waiting.tries += 1
        # bounded, for while it waits it is the oldest, and after some passes nobody may pass it
        delay = self._limits.retry_delay * 2 ** min(waiting.tries - 1, 32)
        waiting.not_before = self._now + min(delay, self._limits.longest_delay)
        self._live[waiting.key] = waiting
        bisect.insort(self._queue, waiting, key=_age)
        self._comes(waiting)
        heapq.heappush(self._later, waiting.not_before)
        if not self._served(waiting):
            self._refuse(waiting, self._nobody(), effects)

    def _dequeue(self, waiting: _Waiting) -> None:
        index = bisect.bisect_left(self._queue, waiting.age, key=_age)
        del self._queue[index]

    def _refuse(self, waiting: _Waiting, cause: str, effects: Effects) -> None:
        self._dequeue(waiting)
        if waiting.cause:
            cause = f"{waiting.cause.rstrip('.')}; {cause}"
        self._tell_end(waiting, None, _FAILED, cause, effects)

    def _refuse_unserved(self, effects: Effects) -> None:
        """No stage that is left can serve a waiting request: it fails now rather than wait for ever."""
        for waiting in [w for w in self._queue if not self._served(w)]:
            self._refuse(waiting, self._nobody(), effects)

    def _served(self, waiting: _Waiting, *, mended: bool = True) -> bool:
        """Whether some pair can serve it, or may be able to later.  ``mended``: or once their connection is mended."""
        request = waiting.request
        prefills = [p for p in self._prefills.values() if p.open and _holds(p, len(request.prompt))]
        decodes = [d for d in self._decodes.values() if d.open and _holds(d, request.max_length)]
        coming = {expected.role for expected in self._expected.values()}
        return (
            any(_possible(p, d) or (mended and self._mendable(p, d)) for p in prefills for d in decodes)
            or (Role.PREFILL in coming and (bool(decodes) or Role.DECODE in coming))
            or (Role.DECODE in coming and bool(prefills))
        )

    def _mendable(self, p: _Peer, d: _Peer) -> bool:
        return (p.id, d.id) in self._broken and self._to_lose(p, d) is not None

    def _nobody(self) -> str:
        if not any(p.open for p in self._prefills.values()):
            return "no prefill stage is up and takes requests"
        if not any(d.open for d in self._decodes.values()):
            return "no decode stage is up and takes requests"
        return "no connected pair of stages that is left can hold the request"

    def _refuse_too_long(self, key: RequestKey, request: Request) -> None:
        for peers, tokens, what in (
            (self._prefills, len(request.prompt), "prompt"),
            (self._decodes, request.max_length, "prompt plus permitted growth"),
        ):
            able = [peer for peer in peers.values() if peer.open]
            if able and not any(_holds(peer, tokens) for peer in able):
                limit = max(_longest(peer) for peer in able)
                raise PromptTooLong(
                    f"request {key!r}: its {what} is {tokens} tokens and no {able[0].role.value} stage holds more"
                    f" than {limit}; shorten it, lower max_tokens, or give the stages more blocks",
                    request=key, tokens=tokens, limit=limit,
                )  # fmt: skip

    # -- small -------------------------------------------------------------------------------------------------------

    def _tick(self, now: float) -> None:
        if now > self._now:
            self._now = now

    def _set_deadline(self, entry: _Entry, queue: _DeadlineQueue | None) -> None:
        if entry.deadlines is not None:
            del entry.deadlines.entries[entry.transfer]
        entry.deadlines = queue
        if queue is not None:
            queue.entries[entry.transfer] = (self._now + queue.seconds + queue.grace, entry)

    def _move(self, entry: _Entry, phase: CoordinatorPhase) -> None:
        if (entry.phase, phase) not in LEGAL_COORDINATOR:
            raise LocalProtocolError(f"C cannot go from {entry.phase} to {phase}: a defect in the coordinator machine")
        entry.phase = phase


def _over(peer: _Peer) -> bool:
    """It was joined, or it is lost and nobody ever will."""
    return peer.status is _FENCED or peer.unjoinable


def _decodes(peer: _Peer) -> bool:
    """Whether answers come from it: they, and not only what can begin again, end with it."""
    return any(entry.phase is _RECEIVED and entry.d is peer for entry in peer.entries.values())


def _age(waiting: _Waiting) -> int:
    return waiting.age


def _mutual(p: _Peer, d: _Peer) -> bool:
    return d.id in p.connected and p.id in d.connected and d.id not in p.down and p.id not in d.down


def _possible(p: _Peer, d: _Peer) -> bool:
    """Connected, or may yet be."""
    return d.id not in p.down and p.id not in d.down


def _holds(peer: _Peer, tokens: int) -> bool:
    capacity = peer.ledger.capacity
    return tokens <= capacity.max_tokens and peer.ledger.fits_ever(capacity.blocks_for(tokens))


def _longest(peer: _Peer) -> int:
    capacity = peer.ledger.capacity
    blocks = capacity.blocks // capacity.planes  # the planes share the pool, and each holds every token
    return min(capacity.max_tokens, blocks * capacity.block_tokens) if capacity.transfer_slots else 0


def _fits(peer: _Peer, tokens: int) -> bool:
    capacity = peer.ledger.capacity
    return tokens <= capacity.max_tokens and peer.ledger.fits(capacity.blocks_for(tokens))


def _pairs(request: Request, prefills: Sequence[_Peer], decodes: Sequence[_Peer]) -> list[Pair]:
    """Every pair that can hold the request now."""
    able = [d for d in decodes if _fits(d, request.max_length)]
    if not able:
        return []
    return [
        Pair(p.id, d.id, p.ledger.load, d.ledger.load)
        for p in prefills
        if _fits(p, len(request.prompt))
        for d in able
        if _mutual(p, d)
    ]


def _missing(message: Failed) -> str:
    return f" (no receipt of chunks {', '.join(map(str, message.missing))})" if message.missing else ""


_Handler: TypeAlias = Callable[[Coordinator, _Entry, Any, Effects], None]
_PeerHandler: TypeAlias = Callable[[Coordinator, _Peer, Any, Effects], None]

_P_HANDLERS: Final[dict[type[Any], _Handler]] = {
    Progress: Coordinator._progress,
    Commit: Coordinator._commit,
    Failed: Coordinator._failed_p,
    Retired: Coordinator._retired_p,
    Unproven: Coordinator._unproven_p,
}
_D_HANDLERS: Final[dict[type[Any], _Handler]] = {
    Reserved: Coordinator._reserved,
    Rejected: Coordinator._rejected,
    Received: Coordinator._received,
    Activated: Coordinator._activated,
    Output: Coordinator._output,
    Finished: Coordinator._finished,
    Failed: Coordinator._failed_d,
    Retired: Coordinator._retired_d,
}
_PEER_HANDLERS: Final[dict[type[Any], _PeerHandler]] = {
    Hello: Coordinator._hello_again,
    Connected: Coordinator._connected,
    PeerDown: Coordinator._peer_down,
    Fatal: Coordinator._fatal_peer,
}
