"""Channels between processes: ZeroMQ over ``ipc://`` in a private directory, or over ``tcp://`` with CURVE keys.

The coordinator binds one ROUTER; each stage connects one DEALER whose routing id begins with its name and epoch.  A
stage's first frame is a greeting, which says the version and lets the coordinator tie the connection to the stage; what
was sent to the stage before that waits for it.  Each further frame is one encoded envelope; what a stage says in one
breath is one message of several frames, refused as a whole where one of them is no envelope.  Whoever says more than
one pass takes (:data:`~kvbaton.bounds.ENVELOPES_PER_PASS`) is heard in pieces, and others between.

A connection that ends is a lost channel: nobody reconnects, since ZeroMQ drops what is under way when it ends.
The ends are seen by the sockets' monitors.  A stage that is alive but stopped is found by ZMTP heartbeats, which the
coordinator sends and ZeroMQ's own thread in the stage answers, however long the stage's Python computes: they show a
process that runs, not one that gets on (the coordinator asks for that, C6.7).  Over ``ipc://`` stages send none: a
coordinator that is stopped for a while (Ctrl-Z) is no reason to die, and its end is told by the lifeline.

Over ``tcp://`` the stages are started by somebody else, so nobody hands them a ticket: a stage *joins* first
(:mod:`kvbaton.control.join`), by the name that its key proves, and is then *admitted* under the epoch that it was
given.  Its routing id ends with a secret of its ticket, so that only who holds its key can take its place.  There is no
lifeline either: both ends send heartbeats, so that a coordinator that is stopped for longer than ``heartbeat`` has lost
its stages; a stage that ends says so with its status as its last word, and one that the coordinator gives up is
*expelled*, which it takes as the loss of its coordinator.  Four words of one frame carry that, beside the envelopes and
never among them.

Import this module where it is needed: it imports pyzmq.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import select
import stat
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import zmq

from kvbaton.bounds import ENVELOPES_PER_PASS
from kvbaton.control import ChannelEvent, ChannelLost, ChannelStatistics, Received, private_directory
from kvbaton.control.bell import DescriptorBell
from kvbaton.control.curve import ClientKeys, Gate, ServerKeys, user_of
from kvbaton.control.envelopes import judged, opened, pack, unpack
from kvbaton.control.sequence import InboundSequence, Lifetimes
from kvbaton.errors import ConfigurationError, ConnectError, LocalProtocolError, ThreadError
from kvbaton.identity import PeerId
from kvbaton.messages import MAX_MESSAGE_BYTES, VERSION, Envelope, Family, Hello, Message, family_of

_GREETING_PREFIX: Final = b"kvbaton/"
_GREETING: Final = _GREETING_PREFIX + str(VERSION).encode()

#: Words over TCP: a stage asks to join, is admitted, is expelled with a cause, has left with a status.
JOIN: Final = b"kvbaton-join "
_ADMITTED: Final = b"kvbaton-admitted"
_EXPELLED: Final = b"kvbaton-expelled "
_LEFT: Final = b"kvbaton-left "
_LONGEST_CAUSE: Final = 2000

#: ``struct sockaddr_un`` holds 107 bytes and a terminating zero.
_LONGEST_SOCKET_PATH: Final = 107

#: Over a frame of more than this many times the limit ZeroMQ ends the connection; up to there it is read and counted.
_HARD_LIMIT_FACTOR: Final = 4

#: Heartbeats sent in the time that one may stay unanswered.
_QUESTIONS: Final = 4

#: Frames handled in one ``receive``, so that a flood leaves its caller time for other things.
_FRAMES_PER_PASS: Final = 4096


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage needs to open its channel; survives JSON.  Whoever holds one may be this stage.

    ``secret``: the end of its routing id over TCP, where others reach the socket, too.
    """

    address: str
    peer: PeerId
    coordinator_epoch: int
    max_message: int
    secret: str = ""


class JoinRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a stage says to join: its name, and the version of the words it will use."""

    name: str
    version: int = VERSION


class JoinReply(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: a ticket, or why there is none."""

    ticket: Ticket | None = None
    refusal: str = ""


@dataclass(frozen=True, slots=True)
class Listen:
    """Where the coordinator listens for stages of other hosts (``tcp://HOST:PORT``), and whom it lets in."""

    address: str
    keys: ServerKeys


@dataclass(frozen=True, slots=True)
class Departure:
    """A stage of another host whose channel is over.

    ``status``: the exit status it gave as its last word; None where it went without one: lost, and not fenced (C6.4).
    """

    peer: PeerId
    status: int | None
    reason: str


class _Exclusive:
    """Turns the use of a socket by two threads at once, which would corrupt it, into an error (T11).

    It costs a fraction of a microsecond, and the lock is the memory fence that moving a socket to another thread needs.
    """

    __slots__ = ("_lock", "_what")

    def __init__(self, what: str) -> None:
        self._lock = threading.Lock()
        self._what = what

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ThreadError(f"{self._what} is used by two threads at once; only wake and sever may be called so")

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


#: As plain integers: it is asked several times for each message, and arithmetic with enumerations costs as much.
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)

#: ``select`` takes descriptors below this one.
_SELECTABLE: Final = 1024


class _Heard:
    """A socket that is asked for news only when it may have some: to ask costs as much as to take a message.

    Its descriptor is edge-triggered: once the socket was asked and had nothing, the descriptor gets readable with the
    next news, unless the socket is used before and takes note of it then.
    """

    __slots__ = ("fd", "quiet", "socket")

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.socket = socket
        self.fd = int(socket.fileno())
        #: It was asked, had nothing, and was not used since; and its descriptor was not seen readable.
        self.quiet = False

    def has_news(self) -> bool:
        """Whether there is something to take."""
        if not self.quiet:
            self.quiet = not int(self.socket.get(_EVENTS)) & _POLLIN
        return not self.quiet


class _Wire:
    """One ZeroMQ socket with its own context, its monitor and a bell: what both ends have in common."""

    def __init__(self, kind: int, watched: int, max_message: int, keys: ServerKeys | None = None) -> None:
        self._gate: Gate | None = None
        with ExitStack() as undo:
            self.bell = DescriptorBell()
            undo.callback(self.bell.close)
            # one input-output thread: then the event of a connection's begin comes before its first frame
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
            undo.callback(self._context.destroy, linger=0)
            self.socket = self._context.socket(kind)
            # lossless or lost, never dropped (C9.4); credits bound what queues
            self.socket.sndhwm = self.socket.rcvhwm = 0
            self.socket.maxmsgsize = max_message * _HARD_LIMIT_FACTOR
            self.socket.linger = 0
            name = f"inproc://monitor-{id(self)}"
            self.socket.monitor(name, watched)
            self._monitor = self._context.socket(zmq.PAIR)
            self._monitor.linger = 0
            self._monitor.connect(name)
            self._frames, self._connections = _Heard(self.socket), _Heard(self._monitor)
            #: The descriptors were looked at since something was last taken.
            self._looked = False
            self._poll = select.poll()
            self._fds = [self._frames.fd, self._connections.fd, self.bell.fileno()]
            if keys is not None:
                self._gate = Gate(self._context, keys)
                self._fds.append(self._gate.socket.fileno())
            for fd in self._fds:
                self._poll.register(fd, select.POLLIN)
            self._low = max(self._fds) < _SELECTABLE
            undo.pop_all()

    def look(self) -> None:
        """Find out where there may be news, unless a wait has just done so.  Before anything is taken."""
        if not self._looked and (self._frames.quiet or self._connections.quiet):
            self._stirred([fd for fd, _ in self._poll.poll(0)])
        self._looked = False

    def _stirred(self, readable: Sequence[int]) -> None:
        for heard in (self._frames, self._connections):
            if heard.fd in readable:
                heard.quiet = False

    def has_frames(self) -> bool:
        """Whether there is a message to take."""
        return self._frames.has_news()

    def send(self, *frames: bytes) -> None:
        """One message.  Never waits; raises what ZeroMQ raises."""
        self._frames.quiet = False  # it may take note of what has come, which the descriptor then tells no more
        # in single calls, since send_multipart costs five times as much; there is no limit that could part them
        for frame in frames[:-1]:
            self.socket.send(frame, _MORE)
        self.socket.send(frames[-1], _NOBLOCK)

    def connection_events(self, *, now: bool = False) -> list[tuple[int, int]]:
        """(event, file descriptor) of the connections that began or ended, oldest first.  ``now``: also of those that
        have since the last look.
        """
        if now:
            self._connections.quiet = False
        found = []
        while self._connections.has_news():
            head, _ = self._monitor.recv_multipart(_NOBLOCK)
            found.append(struct.unpack("=Hi", head))
        if found:
            self._frames.quiet = False  # what came over a connection counts although it has ended since
        return found

    @property
    def refused(self) -> int:
        """Connections refused for their keys, so far."""
        return 0 if self._gate is None else self._gate.refused

    def let_in(self) -> None:
        """Answer whom to let in, where keys decide that."""
        if self._gate is not None:
            self._gate.answer()

    def wait(self, timeout: float) -> None:
        # asked here too: the answer lets somebody in whose first frame then ends the wait
        self.let_in()
        # asking both looks first and arms the descriptors
        if not (self._frames.has_news() or self._connections.has_news()):
            timeout = max(timeout, 0.0)
            # poll counts whole milliseconds, too coarse for the pauses of a pump; select takes no high descriptors
            if timeout < 0.001 and self._low:
                readable = select.select(self._fds, (), (), timeout)[0]
            else:
                readable = [fd for fd, _ in self._poll.poll(math.ceil(timeout * 1000))]
            self._stirred(readable)
            self._looked = True
        self.bell.hush()

    def close(self, linger: float) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        if self._gate is not None:
            self._gate.close()
        self.socket.close(linger=int(linger * 1000))
        self._context.term()  # waits for the linger and for the sockets' threads
        self.bell.close()


class _Peer:
    __slots__ = (
        "backlog",
        "connected",
        "ending",
        "introduced",
        "left",
        "lost",
        "peer",
        "routing_id",
        "secret",
        "seq",
        "sequence",
        "waiting",
    )

    def __init__(self, peer: PeerId, secret: str) -> None:
        self.peer = peer
        self.secret = secret
        self.routing_id = _routing_id(peer, secret)
        self.sequence = InboundSequence(peer.epoch)
        self.seq = 0
        self.backlog: deque[bytes] = deque()
        self.connected = False
        self.introduced = False
        #: why the connection is gone, while frames that came before may still be unread
        self.ending: str | None = None
        #: reported as lost
        self.lost = False
        #: the status that it gave as its last word, over TCP
        self.left: int | None = None
        #: what came beyond what one pass may take
        self.waiting: deque[_Waiting] = deque()


class _Waiting:
    """A message that is taken in pieces, in two rounds: first all of it is opened, then it is believed."""

    __slots__ = ("frames", "sealed")

    def __init__(self, frames: list[bytes]) -> None:
        self.frames = deque(frames)
        self.sealed: deque[Envelope] = deque()


class ZmqCoordinatorChannels:
    """The coordinator's ends; see :class:`~kvbaton.control.CoordinatorChannels`.

    ``directory``: a private folder to make the socket's own directory in (None: the user's runtime or temporary
    folder).  ``max_message``: bytes of one message.  ``heartbeat``: a connected stage whose process answers nothing for
    so many seconds is lost, and none sooner; it is noticed up to a quarter later.  ``linger``: seconds that ``close``
    gives what was sent to leave.  ``listen``: take stages of other hosts there, in place of stages of this host in a
    directory.

    Ownership: a ZeroMQ context with one input-output thread, one socket (two with keys), one directory; all are gone
    after ``close``.
    Raises: ConfigurationError if no private directory can be made, its path is too long for a socket, or there is no
    listening at ``listen``.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        max_message: int = MAX_MESSAGE_BYTES,
        heartbeat: float = 10.0,
        linger: float = 0.5,
        epoch: int | None = None,
        listen: Listen | None = None,
    ) -> None:
        self._listen = listen
        self._departures: list[Departure] = []
        #: connections over which a stage asked to join: their ends are no news
        self._joining: set[int] = set()
        self._heartbeat = heartbeat
        self._epoch = time.time_ns() if epoch is None else epoch
        self._max_message = max_message
        self._linger = linger
        self._exclusive = _Exclusive("the coordinator's end of the channels")
        self._peers: dict[PeerId, _Peer] = {}
        self._by_routing_id: dict[bytes, _Peer] = {}
        self._lifetimes = Lifetimes()
        #: connections that are up, and the peer behind each that has said who it is
        self._open: set[int] = set()
        self._behind: dict[int, _Peer] = {}
        self._ending: list[_Peer] = []
        #: of whom more has come than one pass may take
        self._late: list[_Peer] = []
        #: with so many events a pass looks for no further message
        self._enough = 0
        #: the last pass did not look at all that may have come
        self._more = False
        #: connections that ended before they were tied to a peer, whose greeting may still be unread
        self._ended_unread: list[int] = []
        self._sent = 0
        self._received = 0
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._closed = False
        with ExitStack() as undo:
            self._directory: private_directory.PrivateDirectory | None = None
            if listen is None:
                self._directory = private_directory.make(directory)
                undo.callback(self._directory.remove)
                address = f"ipc://{self._socket_path(self._directory.path)}"
            else:
                address = listen.address
            keys = None if listen is None else listen.keys
            self._wire = _Wire(zmq.ROUTER, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED, max_message, keys)
            undo.callback(self._wire.close, 0.0)
            socket = self._wire.socket
            socket.router_mandatory = True  # a connection that is gone is an error, not silence
            _send_heartbeats(socket, heartbeat)
            if keys is not None:
                Gate.guard(socket, keys)
                socket.ipv6 = "[" in address
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise ConfigurationError(
                    f"the coordinator cannot listen at {address}: {error.strerror}. Set control.listen to an address"
                    " and a free port of this host, such as tcp://0.0.0.0:5555.",
                    address=address,
                ) from error
            self._address = bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
            undo.pop_all()

    @staticmethod
    def _socket_path(directory: Path) -> Path:
        path = directory / "control"
        if len(os.fsencode(path)) > _LONGEST_SOCKET_PATH:
            raise ConfigurationError(
                f"the control socket {path} has a path of more than {_LONGEST_SOCKET_PATH} bytes, which the system"
                " does not allow. Set control.dir to a shorter one.",
                directory=str(directory),
            )
        return path

    @property
    def directory(self) -> Path | None:
        """The private directory of the socket; None where it listens for other hosts."""
        return self._directory.path if self._directory is not None else None

    @property
    def address(self) -> str:
        """Where it listens, with the port that the system chose where it was asked to (``:*``)."""
        return self._address

    def ticket(self, peer: PeerId) -> Ticket:
        """What the stage ``peer`` passes to ``ZmqStageChannel``."""
        entry = self._peers.get(peer)
        return Ticket(
            address=self._address, peer=peer, coordinator_epoch=self._epoch, max_message=self._max_message,
            secret="" if entry is None else entry.secret,
        )  # fmt: skip

    def add(self, peer: PeerId) -> None:
        with self._exclusive:
            if self._closed:
                raise LocalProtocolError(f"the channels are closed; {peer} cannot be added")
            self._lifetimes.add(peer)
            # a routing id belongs to whoever comes first with it: over TCP nobody can guess another's
            entry = _Peer(peer, "" if self._listen is None else secrets.token_hex(16))
            self._peers[peer] = entry
            self._by_routing_id[entry.routing_id] = entry

    def remove(self, peer: PeerId) -> None:
        with self._exclusive:
            entry = self._peers.pop(peer, None)
            if entry is not None:
                del self._by_routing_id[entry.routing_id]
                entry.lost = True
                entry.backlog.clear()
                entry.waiting.clear()

    def send(self, peer: PeerId, message: Message) -> None:
        with self._exclusive:
            entry = self._peers.get(peer)
            if entry is None or entry.lost or entry.ending or self._closed:
                self._dropped[family_of(message), "gone-peer"] += 1
                return
            data = pack(self._epoch, entry.seq + 1, message, self._max_message)
            entry.seq += 1
            if not entry.connected:
                entry.backlog.append(data)
            elif not self._post(entry, data):
                self._dropped[family_of(message), "gone-peer"] += 1
                return
            self._sent += 1

    def receive(self) -> list[ChannelEvent]:
        events: list[ChannelEvent] = []
        with self._exclusive:
            if self._closed:
                return events
            self._wire.let_in()
            self._wire.look()
            # connections first: an end seen now comes after every frame that is still to be read of it
            self._watch_connections()
            if self._late:
                self._catch_up(events)
            self._enough = len(events) + ENVELOPES_PER_PASS
            socket = self._wire.socket
            for _ in range(_FRAMES_PER_PASS):
                if not self._wire.has_frames():
                    self._report_endings(events)
                    self._more = False
                    if self._late:
                        self._wire.bell.ring()
                    return events
                sender = self._by_routing_id.get(routing_id := socket.recv(_NOBLOCK))
                if sender is not None and sender.connected and self._listen is None:
                    # what is heard oftenest, and nothing is asked of its frames but their bytes
                    self._take(sender, socket.recv_multipart(_NOBLOCK), events)
                else:
                    self._handle(routing_id, sender, socket.recv_multipart(zmq.NOBLOCK, copy=False), events)
                if len(events) >= self._enough:
                    break
            self._more = True
            self._wire.bell.ring()
        return events

    def unheard(self, peer: PeerId) -> bool:
        entry = self._peers.get(peer)
        # a loss is said behind all that was heard of it, however much others still say
        return entry is not None and not entry.lost and (self._more or bool(entry.waiting))

    def wait(self, timeout: float) -> None:
        with self._exclusive:
            if not self._closed:
                self._wire.wait(timeout)

    def wake(self) -> None:
        self._wire.bell.ring()

    def statistics(self) -> ChannelStatistics:
        dropped = dict(self._dropped)
        if self._wire.refused:
            dropped["unknown", "unknown-key"] = self._wire.refused
        return ChannelStatistics(self._sent, self._received, dropped)

    def close(self) -> None:
        with self._exclusive:
            if self._closed:
                return
            self._closed = True
            self._wire.close(self._linger)
            if self._directory is not None:
                self._directory.remove()

    # -- stages of other hosts -----------------------------------------------------------------------------------------

    def departures(self) -> Sequence[Departure]:
        """The stages of other hosts whose channels are over, each once."""
        found, self._departures = self._departures, []
        return found

    def introduced(self, peer: PeerId) -> bool:
        """Whether ``peer`` has said Hello; before that nobody was connected to it and it holds nothing of anybody's."""
        entry = self._peers.get(peer)
        return entry is not None and entry.introduced

    def expel(self, peer: PeerId, cause: str) -> None:
        """Tell ``peer`` that it has no coordinator any more; it drains and ends by itself (C6.6).  Not evidence."""
        with self._exclusive:
            entry = self._peers.get(peer)
            if entry is not None and entry.connected and not (entry.lost or entry.ending or self._closed):
                self._post(entry, _EXPELLED + cause.encode()[:_LONGEST_CAUSE])

    def _join(self, routing_id: bytes, frame: zmq.Frame) -> None:
        """Answer a stage of another host that wants to know its epoch."""
        fd = int(frame.get(zmq.SRCFD))
        if fd in self._open:
            self._joining.add(fd)
        else:
            with contextlib.suppress(ValueError):
                self._ended_unread.remove(fd)
        try:
            request = msgspec.json.decode(frame.bytes[len(JOIN) :], type=JoinRequest)
        except msgspec.MsgspecError:
            self._dropped["unknown", "malformed"] += 1
            return
        reply = self._reply(request, user_of(frame))
        with contextlib.suppress(zmq.ZMQError):  # it has gone again
            self._wire.send(routing_id, msgspec.json.encode(reply))

    def _reply(self, request: JoinRequest, user: str) -> JoinReply:
        name = request.name
        if request.version != VERSION:
            return JoinReply(
                refusal=f"the stage speaks kvbaton/{request.version}, the coordinator kvbaton/{VERSION}: run one"
                " release everywhere"
            )
        if user != name:
            return JoinReply(refusal=f"this key belongs to {user}, so that it cannot join as {name}")
        # of a stage that is to come again, its next life
        entry = next((entry for entry in reversed(self._peers.values()) if entry.peer.name == name), None)
        if entry is None:
            known = ", ".join(sorted(peer.name for peer in self._peers)) or "none any more"
            return JoinReply(refusal=f"no stage {name} is expected here; expected: {known}")
        if entry.connected:
            state = "is over" if entry.lost or entry.ending else "is connected"
            return JoinReply(
                refusal=f"{name} has joined already and {state}. A coordinator takes each stage again only once it has"
                " noticed its end, and with recovery.mode off never; try again, or start the coordinator anew"
            )
        return JoinReply(ticket=self.ticket(entry.peer))

    # -- one message: a routing id and one frame -----------------------------------------------------------------------

    def _handle(
        self, routing_id: bytes, entry: _Peer | None, frames: list[zmq.Frame], events: list[ChannelEvent]
    ) -> None:
        """From a connection that is not known yet, or from another host: who is it?"""
        if self._listen is not None:
            if entry is None and len(frames) == 1 and frames[0].bytes.startswith(JOIN):
                self._join(routing_id, frames[0])
                return
            if entry is not None and user_of(frames[-1]) != entry.peer.name:
                # it holds a key, but another's: what the key proves counts, not what a stage calls itself
                self._dropped["unknown", "unknown-peer"] += 1
                return
        if entry is None:
            self._dropped["unknown", self._why_unknown(routing_id)] += 1
            return
        if not entry.connected and not entry.lost:
            if len(frames) != 1:  # nothing is taken of a connection whose end would not be seen
                self._dropped["unknown", "malformed"] += 1
                return
            data = frames[0].bytes
            self._connect(entry, int(frames[0].get(zmq.SRCFD)))
            if data.startswith(_GREETING_PREFIX):
                if data != _GREETING:
                    theirs, ours = data[:32].decode(errors="replace"), _GREETING.decode()
                    reason = f"the stage speaks {theirs}, the coordinator {ours}: run one release everywhere"
                    self._lose(entry, reason, events)
                return
        self._take(entry, [frame.bytes for frame in frames], events)

    def _take(self, entry: _Peer, frames: list[bytes], events: list[ChannelEvent]) -> None:
        """From a peer."""
        if entry.lost:
            self._dropped["unknown", "lost"] += 1
            return
        if self._listen is not None and frames[0].startswith(_LEFT) and len(frames) == 1:
            with contextlib.suppress(ValueError):
                entry.left = int(frames[0][len(_LEFT) :])
            return
        if entry.waiting or len(frames) > ENVELOPES_PER_PASS:
            if not entry.waiting:
                self._late.append(entry)
            entry.waiting.append(_Waiting(frames))
            self._enough = 0  # the socket deals in turn: whoever says less comes before more of it
            return
        sealed: list[Envelope] = []
        for data in frames:
            envelope = opened(data, self._max_message, self._dropped)
            if envelope is None:
                return  # of a message with rubbish in it nothing is believed
            sealed.append(envelope)
        self._believe(entry, sealed, events)

    def _catch_up(self, events: list[ChannelEvent]) -> None:
        """Of everyone who is late as much as one pass may take."""
        late, self._late = self._late, []
        for entry in late:
            opening = believing = ENVELOPES_PER_PASS
            while entry.waiting and believing > 0:
                message = entry.waiting[0]
                while message.frames and opening > 0:
                    opening -= 1
                    envelope = opened(message.frames.popleft(), self._max_message, self._dropped)
                    if envelope is None:  # of a message with rubbish in it nothing is believed
                        message.frames.clear()
                        message.sealed.clear()
                    else:
                        message.sealed.append(envelope)
                if message.frames:
                    break
                some = [message.sealed.popleft() for _ in range(min(believing, len(message.sealed)))]
                believing -= len(some)
                if not message.sealed:
                    entry.waiting.popleft()
                self._believe(entry, some, events)
            if entry.waiting:
                self._late.append(entry)

    def _believe(self, entry: _Peer, sealed: Sequence[Envelope], events: list[ChannelEvent]) -> None:
        for envelope in sealed:
            found, gap = judged(envelope, entry.sequence, self._dropped)
            if found is not None:
                self._received += 1
                entry.introduced = entry.introduced or isinstance(found.body, Hello)
                events.append(Received(entry.peer, found.body))
            elif gap is not None:
                self._lose(entry, gap, events)
                return

    def _why_unknown(self, routing_id: bytes) -> str:
        name, _, epoch = routing_id.decode(errors="replace").partition("#")[0].rpartition("@")
        try:
            return "stale-epoch" if self._lifetimes.stale(name, int(epoch, 16)) else "unknown-peer"
        except ValueError:
            return "unknown-peer"

    # -- connections ---------------------------------------------------------------------------------------------------

    def _connect(self, entry: _Peer, fd: int) -> None:
        """The first frame of a peer came over connection ``fd``."""
        entry.connected = True
        self._watch_connections(now=True)
        before = self._behind.pop(fd, None)
        if before is not None:
            self._end(before, self._cut())  # the number was reused
        if fd in self._open:
            self._behind[fd] = entry
        else:
            with contextlib.suppress(ValueError):
                self._ended_unread.remove(fd)
            self._end(entry, self._cut())
        if self._listen is not None and entry.ending is None:
            self._post(entry, _ADMITTED)
        while entry.backlog and entry.ending is None:
            self._post(entry, entry.backlog.popleft())

    def _watch_connections(self, *, now: bool = False) -> None:
        for event, fd in self._wire.connection_events(now=now):
            if event == zmq.EVENT_ACCEPTED:
                self._open.add(fd)
                self._joining.discard(fd)
            else:
                self._open.discard(fd)
                entry = self._behind.pop(fd, None)
                if entry is None and fd in self._joining:
                    self._joining.discard(fd)
                elif entry is None:
                    self._ended_unread.append(fd)
                else:
                    self._end(entry, self._cut())

    def _post(self, entry: _Peer, data: bytes) -> bool:
        try:
            self._wire.send(entry.routing_id, data)
        except zmq.ZMQError as error:
            if error.errno not in (zmq.EHOSTUNREACH, zmq.EAGAIN):
                raise
            self._end(entry, self._cut())
            return False
        return True

    def _cut(self) -> str:
        if self._listen is None:
            return "its connection ended"
        return f"its connection ended, or it answered no heartbeat for {self._heartbeat:g} s"

    def _end(self, entry: _Peer, reason: str) -> None:
        if entry.ending is None and not entry.lost:
            entry.ending = reason
            self._ending.append(entry)
            self._wire.bell.ring()

    def _report_endings(self, events: list[ChannelEvent]) -> None:
        # only after everything that had arrived was read
        ending, self._ending = self._ending, []
        for entry in ending:
            if entry.waiting:
                self._ending.append(entry)
            else:
                self._lose(entry, entry.ending or "", events)
        if self._ended_unread:
            self._dropped["unknown", "stranger"] += len(self._ended_unread)
            self._ended_unread.clear()

    def _lose(self, entry: _Peer, reason: str, events: list[ChannelEvent]) -> None:
        if not entry.lost:
            entry.lost = True
            entry.backlog.clear()
            entry.waiting.clear()
            events.append(ChannelLost(entry.peer, reason))
            if self._listen is not None:
                self._departures.append(Departure(entry.peer, entry.left, reason))
                self._wire.bell.ring()


class ZmqStageChannel:
    """A stage's end; see :class:`~kvbaton.control.StageChannel`.

    ``linger``: seconds that ``close`` gives what was sent to leave, as many as a coordinator on a busy machine may take
    to hear a stage's last words.  ``keys``: for an address on another host; then ``heartbeat`` is as the coordinator's,
    and the channel is open once the coordinator has admitted the stage, for which it has ``patience`` seconds.

    Raises: ConfigurationError if the socket's directory is not private to this user or keys are missing, ConnectError
    if nobody is there or nobody admits.
    """

    def __init__(
        self,
        ticket: Ticket,
        *,
        linger: float = 10.0,
        keys: ClientKeys | None = None,
        heartbeat: float = 10.0,
        patience: float = 10.0,
    ) -> None:
        self._ticket = ticket
        self._linger = linger
        self._said_last_word = False
        self._exclusive = _Exclusive(f"the channel of {ticket.peer}")
        self._sequence = InboundSequence(ticket.coordinator_epoch)
        self._seq = 0
        #: Packed and not sent yet, and to which family each belongs.
        self._held: list[bytes] = []
        self._families: list[Family] = []
        self._lost: str | None = None
        self._lost_lock = threading.Lock()
        self._sent = 0
        self._received = 0
        self._dropped: Counter[tuple[str, str]] = Counter()
        self._closed = False
        if ticket.address.startswith("ipc://"):
            _check_socket(Path(ticket.address.removeprefix("ipc://")))
        elif keys is None:
            raise ConfigurationError(f"{ticket.peer.name} has no keys for {ticket.address}; set control.keys")
        with ExitStack() as undo:
            self._wire = _Wire(zmq.DEALER, zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED, ticket.max_message)
            undo.callback(self._wire.close, 0.0)
            socket = self._wire.socket
            socket.routing_id = _routing_id(ticket.peer, ticket.secret)
            socket.reconnect_ivl = -1
            if keys is not None:
                keys.apply(socket)
                socket.ipv6 = "[" in ticket.address
                _send_heartbeats(socket, heartbeat)
            socket.connect(ticket.address)
            self._wire.send(_GREETING)
            if keys is not None:
                self._await_admission(patience)
            undo.pop_all()

    def _await_admission(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        place = f"{self.peer.name} was given its place by the coordinator at {self._ticket.address}, but not admitted:"
        while not self._wire.has_frames():
            left = deadline - time.monotonic()
            if self._wire.connection_events():
                raise ConnectError(f"{place} the connection ended", address=self._ticket.address)
            if left <= 0:
                raise ConnectError(
                    f"{place} no word within {patience:g} s. Has another process of that name joined?",
                    address=self._ticket.address,
                )
            self._wire.wait(left)
        if self._wire.socket.recv_multipart(zmq.NOBLOCK) != [_ADMITTED]:
            raise ConnectError(f"{place} it answered something else", address=self._ticket.address)

    @property
    def peer(self) -> PeerId:
        return self._ticket.peer

    @property
    def lost(self) -> str | None:
        return self._lost

    def send(self, message: Message) -> None:
        self.hold(message)
        self.flush()

    def hold(self, message: Message) -> None:
        with self._exclusive:
            if self._lost is not None or self._closed:
                self._dropped[family_of(message), "gone-peer"] += 1
                return
            self._held.append(pack(self.peer.epoch, self._seq + 1, message, self._ticket.max_message))
            self._families.append(family_of(message))
            self._seq += 1

    def flush(self) -> None:
        if self._held:
            with self._exclusive:
                self._flush()

    def _flush(self) -> None:
        if not self._held or self._closed:
            return
        try:
            # more than the coordinator takes in one pass goes in several messages, so that it can hear others between
            for first in range(0, len(self._held), ENVELOPES_PER_PASS):
                some = self._held[first : first + ENVELOPES_PER_PASS]
                self._wire.send(*some)
                self._sent += len(some)
        except zmq.Again:
            # the socket has no connection any more, and will have no other
            self._dropped.update((family, "gone-peer") for family in self._families[first:])
            self.sever("the connection to the coordinator ended")
        self._held.clear()
        self._families.clear()

    def receive(self) -> list[Message]:
        messages: list[Message] = []
        with self._exclusive:
            if self._closed:
                return messages
            self._wire.look()
            if self._wire.connection_events():
                self.sever("the connection to the coordinator ended")
            socket = self._wire.socket
            while len(messages) < _FRAMES_PER_PASS and self._wire.has_frames():
                frames = socket.recv_multipart(_NOBLOCK)
                if len(frames) != 1:
                    self._dropped["unknown", "malformed"] += 1
                    continue
                if frames[0].startswith(_EXPELLED):
                    self.sever(frames[0][len(_EXPELLED) :].decode(errors="replace"))
                    continue
                found, gap = unpack(frames[0], self._sequence, self._ticket.max_message, self._dropped)
                if found is not None:
                    self._received += 1
                    messages.append(found.body)
                elif gap is not None:
                    self.sever(gap)
        return messages

    def wait(self, timeout: float) -> None:
        with self._exclusive:
            if not self._closed:
                self._wire.wait(timeout)

    def leave(self, status: int) -> None:
        """Say, as the last word of a stage of another host, with which status it ends; ``close`` follows.

        Status 0 says that it was drained and that its transport is closed.
        """
        with self._exclusive:
            if not self._closed:
                self._flush()
                with contextlib.suppress(zmq.Again):
                    self._wire.send(_LEFT + str(status).encode())
                    self._said_last_word = True

    def wake(self) -> None:
        self._wire.bell.ring()

    def sever(self, reason: str) -> None:
        with self._lost_lock:
            if self._lost is None:
                self._lost = reason
        self._wire.bell.ring()

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._sent, self._received, dict(self._dropped))

    def close(self) -> None:
        with self._exclusive:
            if self._closed:
                return
            self._flush()
            self._closed = True
            self._wire.close(self._linger if self._lost is None or self._said_last_word else 0.0)


def _routing_id(peer: PeerId, secret: str) -> bytes:
    found = f"{peer.name}@{peer.epoch:x}{'#' if secret else ''}{secret}".encode()
    if not 1 <= len(found) <= 255 or found[0] == 0:
        raise LocalProtocolError(f"a stage cannot be called {peer.name!r}: its ZeroMQ routing id would be too long")
    return found


def _send_heartbeats(socket: zmq.Socket[bytes], seconds: float) -> None:
    # who has said nothing for so long after it was asked is gone, and nobody sooner: to ask again meanwhile changes
    # nothing of that, and how often that is done is what an end may be noticed later
    socket.heartbeat_ivl = max(1, int(seconds * 1000 / _QUESTIONS))
    socket.heartbeat_timeout = max(1, int(seconds * 1000))
    socket.heartbeat_ttl = 0  # no time to live for the other end (see above)


def _check_socket(path: Path) -> None:
    private_directory.check(path.parent)
    try:
        is_socket = stat.S_ISSOCK(os.lstat(path).st_mode)
    except OSError as error:
        raise ConnectError(f"there is no coordinator at {path}: {error}", address=str(path)) from error
    if not is_socket:
        raise ConnectError(f"there is no coordinator at {path}: it is not a socket", address=str(path))
