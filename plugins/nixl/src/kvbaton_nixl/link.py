"""One peer, and the agent that serves it alone: written through, notified, and destroyed when the peer is gone.

A link is *made* when ``connect`` names the peer, *open* once the peer's hello has come, and *ended* by destroying its
agent, whatever the reason.  After the end nothing can come or go through it; whether the peer can still write here by
other means is the connector's to judge.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbaton.connector import Chunk, MemoryKind, MemoryRegion, Outcome, region_lengths
from kvbaton.errors import ProtocolViolation, SegmentError, TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import coalesce
from kvbaton_nixl import cuda, library
from kvbaton_nixl.descriptors import SPACES, AddressBook, Rows, lattices
from kvbaton_nixl.options import NixlOptions
from kvbaton_nixl.packing import Packer, Part, Unpacker
from kvbaton_nixl.staging import Slots, make_mover
from kvbaton_nixl.telemetry import Measured
from kvbaton_nixl.words import Hello, Kind, Note, Region, Staging

_log = logging.getLogger(__name__)

Key = tuple[TransferId, int]

#: Below this mean length segments are packed, and this large is a slot, unless options say otherwise; by kind of
#: memory, measured (``benchmarks/p2_nixl_host.py``, ``benchmarks/p8_nixl_device.py``).
PACKING_BELOW: dict[MemoryKind, int] = {"host": 12 << 10, "cuda": 2 << 20}
STAGING_BYTES: dict[MemoryKind, int] = {"host": 4 << 20, "cuda": 64 << 20}
#: Fewer segments than this are not worth packing.
_FEW = 8
#: Pings to a silent peer before they become rarer.
PATIENT_PINGS = 32


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
        self,
        me: PeerId,
        peer: PeerId,
        name: str,
        options: NixlOptions,
        regions: Sequence[MemoryRegion],
        measured: Measured | None = None,
    ) -> None:
        self._measured = measured if options.telemetry else None
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
        #: After the end: nothing on our side reads or writes on its behalf any more.
        self.settled = False
        #: Chunks of the peer that were complete when the link ended, and of which nobody had been told.
        self.late: list[Key] = []
        self.next_ping = 0.0
        self._unanswered = 0
        self.posted: dict[Key, Posted] = {}
        self._remote = ""
        self._theirs: AddressBook | None = None
        self._their_staging: Staging | None = None
        self._ours = AddressBook.of(regions)
        self._on_device = next((region for region in regions if region.kind == "cuda"), None)
        self._options = options
        self._below = options.packing_below or PACKING_BELOW[self._ours.kind]
        self._slots = Slots(options.staging_slots, options.staging_bytes or STAGING_BYTES[self._ours.kind])
        self._mover = make_mover(self._ours.kind, regions, self._slots, options.packing)
        self._packer: Packer | None = None
        self._unpacker = Unpacker(self._mover, self._slots, region_lengths(regions)) if self._mover else None
        self._parts: list[tuple[Part, Any]] = []
        self._agent: Any = library.make_agent(name, options)
        try:
            register(self._agent, regions)
            if self._mover is not None:
                register(self._agent, [self._mover.region])
            self.metadata: bytes = self._agent.get_agent_metadata()
        except BaseException:
            destroy(self._agent)  # and not when somebody lets go of the exception
            if self._mover is not None:
                self._mover.close()
                self._mover = self._unpacker = None
            raise

    @property
    def staging(self) -> Staging | None:
        """Where the peer may write packed parts, if it may."""
        if self._mover is None:
            return None
        memory, slots = self._mover.region, self._slots
        address, nbytes = memory.address + slots.receiving(0), slots.count * slots.nbytes
        return Staging(Region(0, memory.kind, memory.device, address, nbytes), slots.count, slots.nbytes)

    @property
    def memory(self) -> MemoryRegion | None:
        """What the peer may write besides our regions: it must live until the peer cannot any more."""
        return self._mover.region if self._mover is not None else None

    @property
    def under_way(self) -> int:
        """Chunks that were posted or queued and are not done."""
        return len(self.posted) + (len(self._packer) if self._packer is not None else 0)

    @property
    def full(self) -> bool:
        """Whether no further chunk is taken now (T6)."""
        packer = self._packer
        return self.under_way >= self._options.inflight_chunks or (packer is not None and packer.full)

    def has(self, chunk: Chunk) -> bool:
        """Whether a chunk is under way here."""
        key = (chunk.transfer, chunk.sequence)
        return key in self.posted or (self._packer is not None and key in self._packer)

    # -- the peer ----------------------------------------------------------------------------------------------------

    def greet(self, hello: Hello) -> None:
        """The peer's hello has come: from now on it can be written to."""
        try:
            theirs = AddressBook.of(hello.regions)
            name = self._agent.add_remote_agent(hello.agent)
            name = name.decode() if isinstance(name, bytes) else name
        except SegmentError as error:
            raise LinkBroken(
                TransportError(f"T2: the regions of {self.peer} are not ours to write: {error}")
            ) from error
        except Exception as error:
            raise LinkBroken(library.translate(error, "the hello names no agent of NIXL", self.peer)) from error
        self._remote = name
        self._theirs = theirs
        self._their_staging = hello.staging
        if self._mover is not None and hello.staging is not None:
            # two processes take turns on a device that both use, and a turn costs as much as moving 64 MiB
            batch = self._slots.count // 2 if self._ours.kind == "cuda" else 1
            self._packer = Packer(self._mover, self._slots, hello.staging.count, hello.staging.nbytes, batch)
        self.open = True

    def say(self, kind: Kind, key: Key | None = None, body: bytes = b"") -> None:
        """Send a note that belongs to no write."""
        note = self._note(kind, key, body)
        try:
            self._agent.send_notif(self._remote, note)
        except Exception as error:
            raise LinkBroken(library.translate(error, f"a note ({kind.name.lower()})", self.peer)) from error

    def _note(self, kind: Kind, key: Key | None = None, body: bytes = b"") -> bytes:
        if key is None:
            return Note(kind, self.peer.epoch, self.me.epoch).encode()
        return Note(kind, self.peer.epoch, self.me.epoch, *key, body).encode()

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
                if self._unanswered > PATIENT_PINGS:
                    self.next_ping = 0.0  # it is back: the long pauses are over
                self._unanswered = 0
                yield note

    def beat(self, now: float) -> None:
        """Say when the next ping is due: after one heartbeat, or later if the peer has not been heard for long.

        What is sent to a process that does not run piles up in UCX.  So of one that is silent, a death with nothing
        under way is noticed after at most as long again as it has been silent.
        """
        self.next_ping = now + self._options.heartbeat * 2.0 ** max(0, self._unanswered - PATIENT_PINGS)
        self._unanswered += 1

    # -- chunks ------------------------------------------------------------------------------------------------------

    def post(self, chunk: Chunk) -> Ended | None:
        """Give NIXL a chunk.  Returns its end only where it could not be posted: then no byte of it has moved.

        A write is never retried and its handle never posted twice.
        """
        key = (chunk.transfer, chunk.sequence)
        if not chunk.nbytes:
            self.say(Kind.WRITTEN, key)
            self.posted[key] = Posted(chunk, None)
            return None
        assert self._theirs is not None
        try:
            rows = None if self._pack(chunk) else self._rows(chunk)
        except SegmentError as error:
            return Ended(chunk, Outcome.FAILED, True, True, error)
        if rows is None:
            self._post_parts()
            return None
        try:
            handle = self._write(rows[0], self._theirs.kind, rows[1], self._note(Kind.WRITTEN, key))
        except Exception as error:
            return Ended(
                chunk, Outcome.FAILED, True, True,
                library.translate(error, f"chunk {chunk.sequence} was not posted", self.peer),
            )  # fmt: skip
        self.posted[key] = Posted(chunk, handle)
        self._transfer(handle, f"posting chunk {chunk.sequence}")
        return None

    def _rows(self, chunk: Chunk) -> tuple[Rows, Rows]:
        assert self._theirs is not None
        source, target = coalesce(chunk.source, chunk.target)
        return self._ours.rows(source), self._theirs.rows(target)

    def _pack(self, chunk: Chunk) -> bool:
        """Queue a chunk to be packed, if it is to be.  Raises :class:`~kvbaton.errors.SegmentError` as posting does."""
        assert self._theirs is not None
        if self._packer is None or not self._short(chunk, len(chunk.source)):
            return False  # nor would it be with fewer, longer segments
        source, target = lattices(chunk.source, chunk.target)
        if not self._short(chunk, len(source)) or not self._packer.fits(source):
            return False
        self._ours.require(source)
        self._theirs.require(target)
        self._packer.add(chunk, source, target)
        return True

    def _short(self, chunk: Chunk, descriptors: int) -> bool:
        """Whether the chunk is to be packed if it has so many segments."""
        match self._options.packing:
            case "auto":
                return descriptors >= _FEW and chunk.nbytes < self._below * descriptors
            case choice:
                return choice == "always"

    def _write(self, source: Rows, kind: MemoryKind, target: Rows, note: bytes) -> Any:
        return self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(source, SPACES[self._ours.kind]),
            self._agent.get_xfer_descs(target, SPACES[kind]),
            self._remote,
            note,
        )

    def _transfer(self, handle: Any, what: str) -> None:
        try:
            self._agent.transfer(handle)
        except Exception as error:
            raise LinkBroken(library.translate(error, what, self.peer)) from error

    def _post_parts(self) -> None:
        """Gather and write packed parts while slots are free."""
        if self._packer is None:
            return
        assert self._mover is not None
        assert self._their_staging is not None
        ours, theirs = self._mover.region, self._their_staging
        for part in self._packer.ready():
            source = np.array([(ours.address + self._slots.sending(part.slot), part.nbytes, ours.device)], np.uint64)
            target = np.array(
                [(theirs.region.address + part.theirs * theirs.nbytes, part.nbytes, theirs.region.device)], np.uint64
            )
            note = self._note(Kind.PACKED, (part.chunk.transfer, part.chunk.sequence), part.note)
            what = f"posting part {part.number} of chunk {part.chunk.sequence}"
            try:
                handle = self._write(source, theirs.region.kind, target, note)
            except Exception as error:
                raise LinkBroken(library.translate(error, what, self.peer)) from error
            self._parts.append((part, handle))
            self._transfer(handle, what)

    # -- packed parts ------------------------------------------------------------------------------------------------

    def arrived(self, note: Note) -> None:
        """A packed part has come."""
        try:
            if self._unpacker is None:
                raise ProtocolViolation("C9.3", "a packed part, and we have offered no slots", peer=self.peer)
            self._unpacker.arrived((note.transfer, note.sequence), note.body)
        except ProtocolViolation as violation:
            raise LinkBroken(_broken(violation, self.peer)) from violation

    def landed_there(self, note: Note) -> list[Ended]:
        """The peer has put a part of ours in its place."""
        try:
            if self._packer is None:
                raise ProtocolViolation("C7.4", "a packed part has landed, and none was sent", peer=self.peer)
            chunk = self._packer.landed((note.transfer, note.sequence), note.body)
        except ProtocolViolation as violation:
            raise LinkBroken(_broken(violation, self.peer)) from violation
        return [] if chunk is None else [Ended(chunk, Outcome.DONE, True, True)]

    def landed_here(self) -> Iterator[Key]:
        """Chunks of the peer that are complete: their last part is in its place."""
        if self._unpacker is not None:
            for landing in self._unpacker.landed():
                if landing.complete:
                    yield landing.key  # before the peer is told, which it may not live to hear
                self.say(Kind.LANDED, landing.key, landing.body)

    def cancel(self, transfer: TransferId | None) -> list[Ended]:
        """Take back what has not begun, of one transfer or of all (T9)."""
        if self._packer is None:
            return []
        taken = self._packer.cancel_all() if transfer is None else self._packer.cancel(transfer)
        return [Ended(chunk, Outcome.CANCELLED, True, True) for chunk in taken]

    def ended(self) -> Iterator[Ended]:
        """The writes that are done, each handed over before the next is looked at, so that none is lost when that one
        breaks the link.  Every posted one is looked at: NIXL sends a write's notification when its initiator looks
        (T3, T5).
        """
        for key, one in list(self.posted.items()):
            if one.handle is not None:
                try:
                    if not self._done(one.handle):
                        continue
                except Exception as error:
                    cause = library.translate(error, f"chunk {one.chunk.sequence}", self.peer)
                    raise LinkBroken(cause) from error
            del self.posted[key]
            yield Ended(one.chunk, Outcome.DONE, True, True)
        if self._packer is not None:
            self._look_at_parts(self._packer)
            self._post_parts()

    def _done(self, handle: Any) -> bool:
        """Whether a write is done; its handle is released then."""
        state = self._agent.check_xfer_state(handle)
        if state == "ERR":
            raise TransportError("NIXL reports an error and does not say which")
        if state != "DONE":
            return False
        if self._measured is not None:
            self._measured.add(self._agent.get_xfer_telemetry(handle))
        handle.release()
        return True

    def _look_at_parts(self, packer: Packer) -> None:
        still: list[tuple[Part, Any]] = []
        for part, handle in self._parts:
            try:
                if not self._done(handle):
                    still.append((part, handle))
                    continue
            except Exception as error:
                cause = library.translate(error, f"part {part.number} of chunk {part.chunk.sequence}", self.peer)
                raise LinkBroken(cause) from error
            packer.written(part)
        self._parts = still

    # -- the end -----------------------------------------------------------------------------------------------------

    def end(self, cause: Exception, *, peer_is_dead: bool) -> list[Ended]:
        """Destroy the agent.  What was under way has failed: its source is quiet, because nobody of ours reads it any
        more; its target is, only if the peer is dead.
        """
        orderly = self.heard_bye and not self.under_way
        chunks = [one.chunk for one in self.posted.values()]
        handles = [one.handle for one in self.posted.values()] + [handle for _, handle in self._parts]
        if self._packer is not None:
            chunks += self._packer.give_up()
        for handle in handles:
            let_go(handle)
        self._parts.clear()
        self.posted.clear()
        self.open = False
        destroy(self._agent)
        self._agent = None
        self.settled = True
        if self._on_device is not None and not orderly:
            # UCX destroys its streams and does not wait for them: a copy that they were given goes on reading what we
            # send, or writing what a peer has sent, until the device says that it has finished (T5, C6.4)
            self.settled = cuda.synchronize(self._on_device)
        try:
            if self._mover is not None:
                self._mover.close()  # waits for copies of ours, so that what is said to be quiet is
            if self._unpacker is not None:
                self.late = [landing.key for landing in self._unpacker.landed() if landing.complete]
        except Exception as error:
            # a device that has failed: its copies may or may not have been made, and nobody can tell
            _log.error("the end of the link to %s: %s", self.peer, library.describe(error))
            self.settled = False
        quiet = self.settled
        return [Ended(chunk, Outcome.FAILED, quiet, quiet and peer_is_dead, cause) for chunk in chunks]


def _broken(violation: ProtocolViolation, peer: PeerId) -> TransportError:
    return TransportError(f"{violation.clause}: {peer}: {violation}", peer=peer)


def register(agent: Any, regions: Iterable[MemoryRegion]) -> Any:
    """Register regions with an agent, all of one kind in one call.  Returns what deregistering wants."""
    rows = [(region.address, region.length, region.device, "") for region in regions]
    if not rows:
        return None
    kind = next(iter(regions)).kind
    return agent.register_memory(rows, SPACES[kind], backends=list(agent.backends))


def let_go(handle: Any) -> None:
    """Release a write's handle, if there is one, and part it from its agent.

    It may be under way, or its peer gone, and then it cannot be released; the agent goes next.  A handle keeps its
    agent alive, and so does whoever has kept the exception that a call with it raised: the traceback has it.  An agent
    that lives on has open sockets, through which a dead peer's bytes still come (C6.4).
    """
    if handle is None:
        return
    with contextlib.suppress(Exception):
        handle.release()
    handle._released = True
    handle._agent = None


def destroy(agent: Any) -> None:
    """Let NIXL end an agent now, on this thread, and not when a garbage collector comes by."""
    if agent is None:
        return
    raw = agent.agent
    agent.agent = None
    del raw
