"""One peer, and the agent that serves it alone: written through, notified, and destroyed when the peer is gone.

A link is *made* when ``connect`` names the peer, *open* once the peer's hello has come, and *ended* by destroying its
agent, whatever the reason.  After the end nothing can come or go through it; whether the peer can still write here by
other means is the connector's to judge.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvbaton.connector import Chunk, MemoryRegion, Outcome
from kvbaton.errors import ProtocolViolation, SegmentError, TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton_nixl import library
from kvbaton_nixl.descriptors import SPACES, AddressBook, merge
from kvbaton_nixl.options import NixlOptions
from kvbaton_nixl.words import Hello, Kind, Note

Key = tuple[TransferId, int]


@dataclass(eq=False, slots=True)
class Posted:
    """A write that NIXL has been given, or a note without bytes, which is done when it is sent."""

    chunk: Chunk
    handle: Any


@dataclass(frozen=True, slots=True)
class Ended:
    """A chunk's end, as this link knows it."""

    chunk: Chunk
    outcome: Outcome
    source_quiet: bool
    target_quiet: bool
    error: Exception | None = None


class LinkBroken(Exception):
    """The link cannot go on; ``cause`` is ours to report."""

    def __init__(self, cause: TransportError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class Link:
    """See the module.  All methods on the connector's one thread; none waits for the peer.

    Methods that talk to NIXL raise :class:`LinkBroken` where the peer is gone or NIXL refuses to go on; the connector
    then calls :meth:`end`.
    """

    def __init__(
        self, me: PeerId, peer: PeerId, name: str, options: NixlOptions, regions: Sequence[MemoryRegion]
    ) -> None:
        self.peer = peer
        self.me = me
        self.open = False
        #: ``disconnect`` was called here, or the peer has said bye.
        self.closing = False
        self.said_bye = False
        self.heard_bye = False
        #: The peer has said something on this link, so it has had our hello.
        self.heard = False
        self.dropped = 0
        self.next_ping = 0.0
        self.posted: dict[Key, Posted] = {}
        self._remote = ""
        self._theirs: AddressBook | None = None
        self._ours = AddressBook.of(regions)
        self._agent: Any = library.make_agent(name, options)
        register(self._agent, regions)
        self.metadata: bytes = self._agent.get_agent_metadata()

    # -- the peer ----------------------------------------------------------------------------------------------------

    def greet(self, hello: Hello) -> None:
        """The peer's hello has come: from now on it can be written to."""
        try:
            theirs = AddressBook.of(hello.regions)
            name = self._agent.add_remote_agent(hello.agent)
        except SegmentError as error:
            raise LinkBroken(
                TransportError(f"T2: the regions of {self.peer} are not ours to write: {error}")
            ) from error
        except Exception as error:
            raise LinkBroken(library.translate(error, "the hello names no agent of NIXL", self.peer)) from error
        self._remote = name.decode() if isinstance(name, bytes) else name
        self._theirs = theirs
        self.open = True

    def say(self, kind: Kind, transfer: TransferId | None = None, sequence: int = 0) -> None:
        """Send a note that belongs to no write."""
        note = self._note(kind, transfer, sequence)
        try:
            self._agent.send_notif(self._remote, note)
        except Exception as error:
            raise LinkBroken(library.translate(error, f"a note ({kind.name.lower()})", self.peer)) from error

    def _note(self, kind: Kind, transfer: TransferId | None = None, sequence: int = 0) -> bytes:
        if transfer is None:
            return Note(kind, self.peer.epoch, self.me.epoch).encode()
        return Note(kind, self.peer.epoch, self.me.epoch, transfer, sequence).encode()

    def notes(self) -> Iterator[Note]:
        """What the peer has said since the last call.  What is no note of ours, or for another epoch, is dropped and
        counted (C1.4, C9.3).
        """
        try:
            news = self._agent.get_new_notifs()
        except Exception as error:
            raise LinkBroken(library.translate(error, "asking for notes", self.peer)) from error
        for name, words in news.items():
            if (name.decode() if isinstance(name, bytes) else name) != self._remote and self._remote:
                self.dropped += len(words)
                continue
            for word in words:
                try:
                    note = Note.decode(word)
                except ProtocolViolation:
                    self.dropped += 1
                    continue
                if note.you != self.me.epoch or note.me != self.peer.epoch:
                    self.dropped += 1
                    continue
                self.heard = True
                yield note

    # -- chunks ------------------------------------------------------------------------------------------------------

    def post(self, chunk: Chunk) -> Ended | None:
        """Give NIXL a chunk.  Returns its end only where it could not be posted: then no byte of it has moved.

        A write is never retried and its handle never posted twice.
        """
        key = (chunk.transfer, chunk.sequence)
        if not chunk.nbytes:
            self.say(Kind.WRITTEN, chunk.transfer, chunk.sequence)
            self.posted[key] = Posted(chunk, None)
            return None
        assert self._theirs is not None
        try:
            source, target = merge(self._ours.rows(chunk.source), self._theirs.rows(chunk.target))
            handle = self._agent.initialize_xfer(
                "WRITE",
                self._agent.get_xfer_descs(source, SPACES[self._ours.kind]),
                self._agent.get_xfer_descs(target, SPACES[self._theirs.kind]),
                self._remote,
                self._note(Kind.WRITTEN, chunk.transfer, chunk.sequence),
            )
        except SegmentError as error:
            return Ended(chunk, Outcome.FAILED, True, True, error)
        except Exception as error:
            return Ended(
                chunk, Outcome.FAILED, True, True,
                library.translate(error, f"chunk {chunk.sequence} was not posted", self.peer),
            )  # fmt: skip
        self.posted[key] = Posted(chunk, handle)
        try:
            self._agent.transfer(handle)
        except Exception as error:
            raise LinkBroken(library.translate(error, f"posting chunk {chunk.sequence}", self.peer)) from error
        return None

    def ended(self) -> list[Ended]:
        """The writes that are done.  Every posted one is looked at: NIXL sends a write's notification when its
        initiator looks (T3, T5).
        """
        done: list[Ended] = []
        for key, one in list(self.posted.items()):
            if one.handle is not None:
                try:
                    if self._agent.check_xfer_state(one.handle) != "DONE":
                        continue
                    one.handle.release()
                except Exception as error:
                    cause = library.translate(error, f"chunk {one.chunk.sequence}", self.peer)
                    raise LinkBroken(cause) from error
            del self.posted[key]
            done.append(Ended(one.chunk, Outcome.DONE, True, True))
        return done

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, cause: Exception, *, peer_is_dead: bool) -> list[Ended]:
        """Destroy the agent.  What was under way has failed: its source is quiet, because nobody of ours reads it any
        more; its target is, only if the peer is dead.
        """
        failed = [Ended(one.chunk, Outcome.FAILED, True, peer_is_dead, cause) for one in self.posted.values()]
        for one in self.posted.values():
            if one.handle is not None:
                with contextlib.suppress(Exception):  # it is under way, or its peer is gone: its agent goes next
                    one.handle.release()
                one.handle = None
        self.posted.clear()
        self.open = False
        destroy(self._agent)
        self._agent = None
        return failed


def register(agent: Any, regions: Iterable[MemoryRegion]) -> Any:
    """Register regions with an agent, all of one kind in one call.  Returns what deregistering wants."""
    rows = [(region.address, region.length, region.device, "") for region in regions]
    if not rows:
        return None
    kind = next(iter(regions)).kind
    return agent.register_memory(rows, SPACES[kind], backends=list(agent.backends))


def destroy(agent: Any) -> None:
    """Let NIXL end an agent now, on this thread, and not when a garbage collector comes by."""
    if agent is None:
        return
    raw = agent.agent
    agent.agent = None
    del raw
