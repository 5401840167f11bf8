"""A wire: one stage's UCX worker, and ordered messages between it and each peer's.

What a transport builds upon it::

    wire = Wire(me, "my_protocol/1", Settings())      # in open(); the only thing that loads UCX
    wire.card                                         # -> metadata(): how this wire is reached, with a checksum
    wire.connect(peer, card, body)                    # of the peer; body: what my hello tells it (ConnectError)
    wire.send(peer, word)                             # ordered, at most MAX_WORD bytes; never waits (PeerLost)
    for event in wire.poll(): ...                     # Up(peer, body), Word(peer, data), Bulk(peer, memory), Down(...)
    wire.wait(timeout)                                # sleeps on UCX's descriptor, until poll() may have something
    wire.leave(peer) / wire.drop(peer)                # orderly, what was sent still arrives / at once
    wire.close()                                      # idempotent; leaves no descriptor and no thread

**Up** means that the peer's hello has come, which names our epoch (C1.4): it can be sent to.  Both sides connect, in
whichever order; hellos of peers that nobody has named yet are kept, a bounded number of them.  **Down** is said once,
by UCX's error handling: a peer whose process ends is seen within milliseconds, also if nothing is under way; one that
stands still is not.  After ``drop`` or ``leave`` nothing of the peer is reported any more.

**Words** are ordered per peer and go to it alone: each side gives the other a random *token* that its messages carry in
their tag, so what comes under another tag is nobody's, is read into the void and counted (:attr:`Wire.dropped`).  Words
that have come before the end of a connection are reported before *down*.

**Bulk** is for large payloads in host or device memory, in order among themselves: ``sent = wire.send_bulk(peer,
memory)`` at the source, ``wire.expect(peer, memory)`` at the destination, which takes a message of exactly that length;
another length is a violation, and the peer is down.  Nothing is received that is not expected.  The memory must stay
until ``sent.done``, or until :class:`Bulk` is reported; after the end of a connection until ``wire.pending(peer)`` says
``False``: a receive that has begun cannot be taken back.  So receive into memory of your own.

Bounded: a poll takes at most :data:`WORDS_PER_POLL` words; one longer than :data:`MAX_WORD` is a violation.  What
``send`` could not give to the transport yet is counted by ``unsent(peer)``; a protocol must bound it by its own rules.

Threading: one thread.  No progress thread runs: everything happens in ``poll``.  No call waits for a peer.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import select
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvbaton.errors import ConnectError, PeerLost, ProtocolViolation, TransportError
from kvbaton.identity import PeerId
from kvbaton_cuda_ipc import library
from kvbaton_cuda_ipc.words import MAX_HELLO, TOKEN_BITS, VERSION, Card, Hello

#: The longest word.
MAX_WORD = 1 << 20
#: Words that one poll takes, and hellos.
WORDS_PER_POLL = 256
#: Steps of UCX's progress that one poll makes at most.
STEPS_PER_POLL = 128
#: Hellos of peers that ``connect`` has not named yet; the oldest gives way to one more.
MAX_CALLERS = 256
#: Messages that one poll throws away.
_TRASH_PER_POLL = 64
#: While UCX has something to do that shows on no descriptor (a copy between devices), it is looked at after so many
#: seconds, then after twice as many, and so on up to the longest, until something has come of it.
_SHORTEST, _LONGEST = 0.00002, 0.0005

#: Nothing listens on any other interface.
DEFAULTS = {"NET_DEVICES": "lo"}

# the two highest bits of a tag say what a message is, the others are the token
_TRASH, _HELLO, _WORD, _BULK = (kind << TOKEN_BITS for kind in range(4))
_KIND_MASK = 3 << TOKEN_BITS
_TOKEN_MASK = (1 << TOKEN_BITS) - 1
_ALL = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Settings:
    """``ucx``: UCX's settings without their prefix, over :data:`DEFAULTS`.  ``log_level``: what UCX prints, ``fatal``
    for nothing.
    """

    ucx: Mapping[str, str] = field(default_factory=dict)
    log_level: str = "fatal"


@dataclass(frozen=True, slots=True)
class Up:
    """The peer accepted our epoch; ``body`` is what its hello says."""

    peer: PeerId
    body: bytes


@dataclass(frozen=True, slots=True)
class Word:
    peer: PeerId
    data: bytes


@dataclass(frozen=True, slots=True)
class Bulk:
    """What was expected has come; ``memory`` is what was given to ``expect``."""

    peer: PeerId
    memory: Any


@dataclass(frozen=True, slots=True)
class Down:
    """The connection is over; ``error`` says why.  Nothing more of this peer is reported."""

    peer: PeerId
    error: TransportError


Event: TypeAlias = Up | Word | Bulk | Down


class Sent:
    """A message given to UCX.  Its memory is kept here, and must not change, until ``done``."""

    __slots__ = ("_request", "memory")

    def __init__(self, request: Any, memory: Any) -> None:
        self._request = request
        self.memory = memory

    @property
    def done(self) -> bool:
        """UCX reads the memory no more: the message is on its way, has arrived, or was given up."""
        if self._request is not None and self._request.completed:
            self._request = None
        return self._request is None

    def release(self) -> None:
        """With the worker: a request that somebody keeps would keep it alive, and its sockets."""
        self._request = None


@dataclass(eq=False)
class _Received:
    """A receive that was posted."""

    request: Any
    memory: Any

    @property
    def done(self) -> bool:
        return bool(self.request.completed)

    def release(self) -> None:
        self.request = None


@dataclass(eq=False)
class _Link:
    """One peer, as long as it is connected."""

    peer: PeerId
    card: Card
    #: What the peer's messages carry.
    token: int
    endpoint: Any
    #: What ours carry: known, and thus the peer is up, once its hello has come.
    theirs: int | None = None
    sending: deque[Sent] = field(default_factory=deque)
    words: deque[_Received] = field(default_factory=deque)
    expected: deque[Any] = field(default_factory=deque)
    bulks: deque[_Received] = field(default_factory=deque)

    @property
    def messages(self) -> list[Sent | _Received]:
        return [*self.sending, *self.words, *self.bulks]


@dataclass(eq=False)
class _Leaving:
    """An endpoint that is closed when what was sent has arrived, or its peer is gone."""

    endpoint: Any
    request: Any
    rest: list[Sent | _Received]


class Wire:
    """See the module.  ``protocol`` names what is spoken, with its version: two that differ do not connect."""

    def __init__(self, me: PeerId, protocol: str, settings: Settings) -> None:
        self.me = me
        self.protocol = protocol
        #: Messages that were nobody's, or no words of ours.
        self.dropped = 0
        self._ucxx = library.load(settings.log_level)
        self._links: dict[PeerId, _Link] = {}
        self._tokens: dict[int, _Link] = {}
        self._hellos: OrderedDict[PeerId, Hello] = OrderedDict()
        self._arriving: list[_Received] = []  # hellos that are being received
        self._trash: list[_Received] = []
        self._leaving: list[_Leaving] = []
        self._after: dict[PeerId, list[Sent | _Received]] = {}  # of peers that are down
        self._events: deque[Event] = deque()
        self._soon = False  # something was posted that may be done already
        self._pause = _SHORTEST
        self._lobby = secrets.randbits(TOKEN_BITS)
        self._secret = secrets.token_bytes(16)
        ucxx = self._ucxx
        try:
            self._context: Any = ucxx.UCXContext({**DEFAULTS, **settings.ucx}, (ucxx.Feature.TAG, ucxx.Feature.WAKEUP))
            self._worker: Any = ucxx.UCXWorker(self._context)
            self._worker.init_blocking_progress_mode()
            address = bytes(self._worker.address)
        except Exception as error:
            given = f" with the settings {dict(settings.ucx)}" if settings.ucx else ""
            raise TransportError(
                f"UCX does not start{given}: {library.describe(error)}. UCX_LOG_LEVEL=info in the environment shows why"
            ) from error
        self._poller = select.poll()
        self._poller.register(self._worker.epoll_file_descriptor, select.POLLIN)
        self.card = Card(VERSION, protocol, address, self._lobby, self._secret).encode()
        tag, mask = ucxx.UCXXTag, ucxx.UCXXTagMask
        self._kinds = {kind: (tag(kind), mask(_KIND_MASK)) for kind in (_TRASH, _HELLO, _WORD, _BULK)}
        self._exactly = mask(_ALL)

    # -- peers -------------------------------------------------------------------------------------------------------

    def connect(self, peer: PeerId, card: bytes, body: bytes = b"") -> None:
        """Say hello to the owner of ``card``; ``poll`` reports *up* or *down*.  A known peer is left as it is.

        Raises :class:`~kvbaton.errors.ConnectError` where ``card`` is no card of this protocol, or leads nowhere.
        """
        if peer in self._links:
            return
        try:
            theirs = Card.decode(card)
            if theirs.protocol != self.protocol:
                raise ProtocolViolation("T2", f"it speaks {theirs.protocol!r}, and this is {self.protocol!r}")
            address = self._ucxx.UCXAddress.create_from_buffer(theirs.address)
            endpoint = self._worker.create_endpoint_from_worker_address(address, True)
        except ProtocolViolation as error:
            raise ConnectError(f"T2: the metadata of {peer} is not ours: {error}", peer=peer) from error
        except Exception as error:
            raise ConnectError(f"T2: {peer} cannot be reached: {library.describe(error)}", peer=peer) from error
        link = _Link(peer, theirs, secrets.randbits(TOKEN_BITS), endpoint)
        self._links[peer] = link
        self._tokens[link.token] = link
        hello = Hello(VERSION, self.me, peer, theirs.secret, self._secret, link.token, body).encode()
        try:
            self._give(link, hello, _HELLO | theirs.lobby)
        except PeerLost as error:
            self._end(link)
            raise ConnectError(f"T2: {peer} does not hear: {error}", peer=peer) from error
        if peer in self._hellos:
            self._greeted(link, self._hellos.pop(peer))

    def up(self, peer: PeerId) -> bool:
        link = self._links.get(peer)
        return link is not None and link.theirs is not None

    def drop(self, peer: PeerId) -> None:
        """The end of a connection, at once: what was sent may be lost, and nothing of the peer is received any more but
        what had begun (``pending``).  No *down* is reported.  Unknown: no-op.
        """
        link = self._links.get(peer)
        if link is not None:
            self._end(link)

    def leave(self, peer: PeerId) -> None:
        """The same, but what was sent still arrives.  If the peer stands still, that is given up at ``close``."""
        link = self._links.get(peer)
        if link is not None:
            self._forget(link)
            endpoint, link.endpoint = link.endpoint, None
            self._leaving.append(_Leaving(endpoint, endpoint.close(), link.messages))

    def pending(self, peer: PeerId) -> bool:
        """Whether UCX still uses memory that was given to it for a peer that is down or was dropped."""
        rest = [one for one in self._after.get(peer, ()) if not one.done]
        if rest:
            self._after[peer] = rest
        else:
            self._after.pop(peer, None)
        return bool(rest)

    def _forget(self, link: _Link) -> None:
        del self._links[link.peer], self._tokens[link.token]
        self._hellos.pop(link.peer, None)
        self._after[link.peer] = [*self._after.get(link.peer, ()), *link.messages]
        self.pending(link.peer)

    def _end(self, link: _Link) -> None:
        endpoint, link.endpoint = link.endpoint, None
        with contextlib.suppress(Exception):  # it is broken already
            endpoint.close_blocking(0, 1)
        del endpoint
        self._forget(link)

    def _lose(self, link: _Link, error: TransportError) -> None:
        self._end(link)
        self._events.append(Down(link.peer, error))

    # -- sending -----------------------------------------------------------------------------------------------------

    def send(self, peer: PeerId, word: bytes) -> None:
        """To a peer that is up.  Raises :class:`~kvbaton.errors.PeerLost` where it is not."""
        link = self._link(peer)
        if not 0 < len(word) <= MAX_WORD:
            raise TransportError(f"a word of {len(word)} bytes: from 1 to {MAX_WORD} can be sent")
        assert link.theirs is not None
        self._give(link, word, _WORD | link.theirs)

    def send_bulk(self, peer: PeerId, memory: Any) -> Sent:
        """``memory``: contiguous, with Python's buffer protocol or ``__cuda_array_interface__``; not empty."""
        link = self._link(peer)
        assert link.theirs is not None
        return self._give(link, memory, _BULK | link.theirs)

    def unsent(self, peer: PeerId) -> int:
        """Messages that UCX has not taken off our hands."""
        link = self._links.get(peer)
        if link is None:
            return 0
        while link.sending and link.sending[0].done:
            link.sending.popleft()
        return len(link.sending)

    def expect(self, peer: PeerId, memory: Any) -> None:
        """The peer's next bulk, behind what is expected already, goes to ``memory`` and is as long."""
        link = self._link(peer)
        link.expected.append(memory)
        self._take_bulks(link)
        self._soon = self._soon or bool(link.bulks)

    def _link(self, peer: PeerId) -> _Link:
        link = self._links.get(peer)
        if link is None or link.theirs is None:
            raise PeerLost(f"T7: {peer} is not connected", peer=peer)
        return link

    def _give(self, link: _Link, memory: Any, tag: int) -> Sent:
        try:
            request = link.endpoint.tag_send(library.buffer_of(memory), self._ucxx.UCXXTag(tag))
        except Exception as error:
            raise library.lost("a message was not sent", link.peer, error) from error
        sent = Sent(request, memory)
        if not sent.done:
            self.unsent(link.peer)
            link.sending.append(sent)
        return sent

    # -- receiving ---------------------------------------------------------------------------------------------------

    def poll(self) -> list[Event]:
        """What has come since the last call; bounded work."""
        if self._worker is None:
            return []
        self._soon = False
        self._throw_away()
        self._progress()
        self._hear_hellos()
        self._hear_words()
        for link in list(self._links.values()):
            self._hear(link)
        self._leaving = [one for one in self._leaving if not self._has_left(one)]
        for peer in list(self._after):
            self.pending(peer)
        events = list(self._events)
        self._events.clear()
        if events:
            self._pause = _SHORTEST
        return events

    def _progress(self) -> None:
        worker = self._worker
        for _ in range(STEPS_PER_POLL):
            if not worker.progress_once():
                worker.progress()  # and ends what a broken endpoint has left
                return
        self._soon = True  # there may be more

    def _probe(self, kind: int) -> Any:
        found = self._worker.tag_probe(*self._kinds[kind])
        return found if found.matched else None

    def _receive(self, tag: int, memory: Any) -> _Received:
        """The message that a probe has found: the first under its tag.  What does not fit is cut off by UCX."""
        ucxx = self._ucxx
        request = self._worker.tag_recv(library.buffer_of(memory), ucxx.UCXXTag(tag), self._exactly)
        return _Received(request, memory)

    def _discard(self, tag: int) -> None:
        self.dropped += 1
        self._trash.append(self._receive(tag, bytearray(1)))

    def _throw_away(self) -> None:
        """Whatever is nobody's: otherwise it would fill our memory.

        Before anything new is heard: then what the words so far have announced is expected.
        """
        self._trash = [one for one in self._trash if not one.done]
        for _ in range(_TRASH_PER_POLL):
            found = self._probe(_TRASH)
            if found is None:
                break
            self._discard(found.sender_tag.value)
        for _ in range(_TRASH_PER_POLL):
            found = self._probe(_BULK)
            if found is None:
                break
            tag = found.sender_tag.value
            link = self._tokens.get(tag & _TOKEN_MASK)
            if link is None:
                self._discard(tag)
            elif link.expected or link.words or self._probe(_WORD) is not None:
                break
            else:
                self._violated(link, "a payload that nobody expects")

    def _hear_hellos(self) -> None:
        for _ in range(WORDS_PER_POLL):
            found = self._probe(_HELLO)
            if found is None:
                break
            tag, length = found.sender_tag.value, found.length
            if tag != _HELLO | self._lobby or not 0 < length <= MAX_HELLO or len(self._arriving) >= MAX_CALLERS:
                self._discard(tag)
            else:
                self._arriving.append(self._receive(tag, bytearray(length)))
        if self._arriving:
            came, self._arriving = self._arriving, []
            for one in came:
                if not one.done:
                    self._arriving.append(one)
                elif one.request.status:
                    self.dropped += 1
                else:
                    self._hear_hello(bytes(one.memory))

    def _hear_hello(self, data: bytes) -> None:
        """Keep the newest of each caller: an older one tells a token that its sender has given up since."""
        try:
            hello = Hello.decode(data)
        except ProtocolViolation:
            self.dropped += 1
            return
        # for this epoch of ours, by somebody who was given our card (C1.4)
        if hello.you != self.me or not hmac.compare_digest(hello.secret, self._secret):
            self.dropped += 1
            return
        link = self._links.get(hello.me)
        if link is not None:
            self._greeted(link, hello)
            return
        self._hellos.pop(hello.me, None)
        self._hellos[hello.me] = hello
        if len(self._hellos) > MAX_CALLERS:
            self._hellos.popitem(last=False)

    def _greeted(self, link: _Link, hello: Hello) -> None:
        if link.theirs is not None or not hmac.compare_digest(hello.proof, link.card.secret):
            self.dropped += 1  # said before; or somebody else, in its name
            return
        link.theirs = hello.token
        self._events.append(Up(link.peer, hello.body))

    def _hear_words(self) -> None:
        for _ in range(WORDS_PER_POLL):
            found = self._probe(_WORD)
            if found is None:
                return
            tag, length = found.sender_tag.value, found.length
            link = self._tokens.get(tag & _TOKEN_MASK)
            if link is None:
                self._discard(tag)
            elif not 0 < length <= MAX_WORD:
                self._violated(link, f"a word of {length} bytes")
            else:
                link.words.append(self._receive(tag, bytearray(length)))

    def _hear(self, link: _Link) -> None:
        """Report what of a peer has come, in its order, and whether it is gone."""
        alive = link.endpoint.alive
        if not alive:
            self._worker.progress()
            self._hear_words()  # what had come before the end
            if link.endpoint is None:
                return
        broken: TransportError | None = None
        if link.theirs is not None:
            while link.words and link.words[0].done:
                one = link.words.popleft()
                if one.request.status:
                    broken = broken or library.lost("a word was not received", link.peer)
                    break
                self._events.append(Word(link.peer, bytes(one.memory)))
            self._take_bulks(link)
            while link.endpoint is not None and link.bulks and link.bulks[0].done:
                one = link.bulks.popleft()
                if one.request.status:
                    broken = broken or library.lost("a payload was not received", link.peer)
                    break
                self._events.append(Bulk(link.peer, one.memory))
        if link.endpoint is None:
            return
        if not alive:
            self._lose(link, library.lost("the connection", link.peer, _reason(link.endpoint)))
        elif broken is not None:
            self._lose(link, broken)

    def _take_bulks(self, link: _Link) -> None:
        tag = _BULK | link.token
        while link.expected:
            found = self._worker.tag_probe(self._ucxx.UCXXTag(tag), self._exactly)
            if not found.matched:
                return
            memory = link.expected[0]
            wanted = library.buffer_of(memory).nbytes
            if found.length != wanted:
                self._violated(link, f"a payload of {found.length} bytes, and {wanted} were announced")
                return
            link.expected.popleft()
            link.bulks.append(self._receive(tag, memory))

    def _violated(self, link: _Link, what: str) -> None:
        self.dropped += 1
        self._lose(link, PeerLost(f"C9.3: {link.peer} sends {what}; it is heard no more", peer=link.peer))

    def _has_left(self, one: _Leaving) -> bool:
        if not one.request.completed and one.endpoint.alive:
            return False
        with contextlib.suppress(Exception):
            one.endpoint.close_blocking(0, 1)
        return all(message.done for message in one.rest)

    # -- waiting -----------------------------------------------------------------------------------------------------

    @property
    def fd(self) -> int:
        """Readable when UCX has something to do, after :meth:`arm` has said ``True``; for a selector of your own."""
        return int(self._worker.epoll_file_descriptor)

    def arm(self) -> bool:
        """Whether sleeping on :attr:`fd` is safe now; ``False``: there may be something already."""
        return not self._events and not self._soon and bool(self._worker.arm())

    def wait(self, timeout: float) -> None:
        """Return within ``timeout`` seconds, earlier when ``poll`` may have something."""
        if self._events or self._soon or self._worker is None:
            return
        if self._worker.arm():
            self._poller.poll(max(0.0, timeout) * 1000)
        elif self._worker.progress_once():
            self._soon = True  # something has come since; what it is the next poll finds
        elif self._worker.arm():
            self._poller.poll(max(0.0, timeout) * 1000)
        else:  # UCX has work that shows on no descriptor, and asking again at once would spin
            time.sleep(max(0.0, min(timeout, self._pause)))
            self._pause = min(2 * self._pause, _LONGEST)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Everything of UCX goes.  Memory that was pending is free afterwards: nobody is left who could write it."""
        if self._worker is None:
            return
        messages = [one for link in self._links.values() for one in link.messages]
        messages += [one for rest in self._after.values() for one in rest]
        messages += [one for leaving in self._leaving for one in leaving.rest]
        messages += [*self._arriving, *self._trash]
        kept = [one.memory for one in messages]
        for link in list(self._links.values()):
            self._end(link)
        for one in self._leaving:
            with contextlib.suppress(Exception):
                one.endpoint.close_blocking(0, 1)
        with contextlib.suppress(Exception):
            for _ in range(STEPS_PER_POLL):
                self._worker.progress()  # what was cancelled ends
                if all(one.done for one in messages):
                    break
        self._poller.unregister(self._worker.epoll_file_descriptor)
        for message in messages:  # also those that whoever has sent something still has
            message.release()
        self._leaving, self._arriving, self._trash = [], [], []
        self._after.clear()
        self._hellos.clear()
        self._events.clear()
        worker, context = self._worker, self._context
        self._worker = self._context = None
        library.destroy(worker, context)
        del kept  # not before


def _reason(endpoint: Any) -> Exception | None:
    try:
        endpoint.raise_on_error()
    except Exception as error:
        return error.with_traceback(None)  # which would keep the endpoint
    return None


__all__ = ["Bulk", "Down", "Event", "Sent", "Settings", "Up", "Wire", "Word"]
