"""Chunks of many short segments: gathered into a slot, written as one descriptor, scattered by the destination.

A transport pays for each descriptor, whatever its size.  So a chunk whose segments are short is cut into *parts*, each
as large as a slot, and a part travels like this::

    source                                            destination
      gather into a free slot of ours
      WRITE it into a free slot of theirs, with a note ──▶ scatter
                                                        LANDED: the slot is free again
      all parts landed: DONE               ◀────────────  all parts scattered: receipt

A part's slots bound what is under way, at both ends: the source uses a slot of the destination only when it knows that
it is free.  DONE is said after the last scatter, because only then is the *target* written (T5).  A chunk that has
begun is always finished: parts of a chunk are not taken back (T9).

Chunks begin one after another: the first part of one takes a slot after the last part of the one before.  So of those
that have begun and are not finished each holds a slot, and there are never more of them than slots: a destination
refuses a peer that begins more, and needs no memory for what such a peer may invent (T12).

:class:`Packer` is the source's half and :class:`Unpacker` the destination's.  Neither knows of NIXL: they return what
is to be posted or said, and are told what has come.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvbaton.connector import Chunk, DeviceEvent
from kvbaton.errors import ProtocolViolation, SegmentError
from kvbaton.identity import TransferId
from kvbaton_nixl.descriptors import Lattice, Places, decode_places, encode_places
from kvbaton_nixl.staging import Mover, Slots
from kvbaton_nixl.words import MAX_SEGMENTS

Key = tuple[TransferId, int]

#: What a packed part's note says behind its head: part, number of parts, slot, number of segments, and bytes; then
#: where the target segments are.
_PART = struct.Struct("<IIIIQ")
#: What LANDED says: part, slot.
_LANDED = struct.Struct("<II")


# -- the source ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A part that is to be written: from our slot to theirs, ``nbytes`` bytes, with a note behind."""

    chunk: Chunk
    number: int
    slot: int
    theirs: int
    nbytes: int
    note: bytes


@dataclass(eq=False, slots=True)
class _Packed:
    chunk: Chunk
    source: Places
    target: Places
    #: Index of the first segment of each part, and the end.
    bounds: list[int]
    next: int = 0
    landed: int = 0

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1


@dataclass(eq=False, slots=True)
class _Gathering:
    part: Part
    event: DeviceEvent | None


class Packer:
    """The source's half: which part goes next, and when a chunk is done.

    ``batch``: so many slots must be free before gathering begins again.

    Ownership: a slot of ours is taken by :meth:`ready` and given back by :meth:`written`; a slot of theirs until
    :meth:`landed`.
    """

    def __init__(self, mover: Mover, slots: Slots, theirs: int, theirs_nbytes: int, batch: int = 1) -> None:
        self._mover = mover
        self._nbytes = min(slots.nbytes, theirs_nbytes)
        self._count = slots.count
        self._free = deque(range(slots.count))
        self._theirs = deque(range(theirs))
        self._waiting: deque[_Packed] = deque()
        self._packed: dict[Key, _Packed] = {}
        self._gathering: deque[_Gathering] = deque()
        self._away: dict[int, tuple[Key, int]] = {}  # their slots, and what is in them
        self._batch = max(1, min(batch, slots.count, theirs))

    def __len__(self) -> int:
        return len(self._packed)

    def __contains__(self, key: object) -> bool:
        return key in self._packed

    @property
    def full(self) -> bool:
        """More waits than the slots hold: who has more to say should first hear what has come (T6)."""
        waiting = self._waiting
        return len(waiting) > self._count and sum(one.chunk.nbytes for one in waiting) > self._count * self._nbytes

    def fits(self, places: Places) -> bool:
        """Whether each segment fits a slot."""
        longest = places.length if isinstance(places, Lattice) else int(places.length.max(initial=0))
        return longest <= self._nbytes

    def add(self, chunk: Chunk, source: Places | None = None, target: Places | None = None) -> None:
        """Queue a chunk that fits.  ``source`` and ``target``: its bytes in a better form, if there is one."""
        source = chunk.source if source is None else source
        target = chunk.target if target is None else target
        if isinstance(source, Lattice):
            bounds = [*range(0, len(source), self._nbytes // source.length), len(source)]
        else:
            ends = np.cumsum(source.length)
            bounds, start, before = [0], 0, 0
            while start < len(ends):
                start = int(np.searchsorted(ends, before + self._nbytes, side="right"))
                bounds.append(start)
                before = int(ends[start - 1])
        packed = _Packed(chunk, source, target, bounds)
        self._packed[chunk.transfer, chunk.sequence] = packed
        self._waiting.append(packed)

    def ready(self) -> Iterator[Part]:
        """Parts that have been gathered and are to be posted now, each once."""
        begin = self._gathering or min(len(self._free), len(self._theirs)) >= self._batch
        while begin and self._waiting and self._free and self._theirs:
            packed = self._waiting[0]
            number, chunk = packed.next, packed.chunk
            first, end = packed.bounds[number : number + 2]
            slot, theirs = self._free[0], self._theirs[0]
            source, target = packed.source[first:end], packed.target[first:end]
            nbytes = source.nbytes
            event = self._mover.gather(source, slot)  # where it raises, nothing was taken
            # while a device gathers
            note = _PART.pack(number, packed.parts, theirs, len(target), nbytes) + encode_places(target)
            self._free.popleft()
            self._theirs.popleft()
            self._away[theirs] = ((chunk.transfer, chunk.sequence), number)
            self._gathering.append(_Gathering(Part(chunk, number, slot, theirs, nbytes, note), event))
            packed.next += 1
            if packed.next == packed.parts:
                self._waiting.popleft()
        while self._gathering and (self._gathering[0].event is None or self._gathering[0].event.query()):
            yield self._gathering.popleft().part

    def written(self, part: Part) -> None:
        """The write of a part is done: our slot may be used again."""
        self._free.append(part.slot)

    def landed(self, key: Key, body: bytes) -> Chunk | None:
        """The peer has put a part in its place.  Returns the chunk if that was its last.

        Raises :class:`~kvbaton.errors.ProtocolViolation` for what was never sent (C7.4).
        """
        if len(body) != _LANDED.size:
            raise ProtocolViolation("C9.3", f"{len(body)} bytes say that a part has landed: {_LANDED.size} are needed")
        number, theirs = _LANDED.unpack(body)
        if self._away.get(theirs) != (key, number):
            raise ProtocolViolation("C7.4", f"part {number} of chunk {key} has landed in slot {theirs}, says the peer")
        del self._away[theirs]
        self._theirs.append(theirs)
        packed = self._packed[key]
        packed.landed += 1
        if packed.landed < packed.parts:
            return None
        del self._packed[key]
        return packed.chunk

    def cancel(self, transfer: TransferId) -> list[Chunk]:
        """Take back the chunks of a transfer of which nothing has begun (T9)."""
        taken = [one.chunk for one in self._waiting if one.chunk.transfer == transfer and not one.next]
        self._waiting = deque(one for one in self._waiting if one.next or one.chunk.transfer != transfer)
        for chunk in taken:
            del self._packed[chunk.transfer, chunk.sequence]
        return taken

    def cancel_all(self) -> list[Chunk]:
        """Take back every chunk of which nothing has begun."""
        transfers = {one.chunk.transfer for one in self._waiting}
        return [chunk for transfer in transfers for chunk in self.cancel(transfer)]

    def give_up(self) -> list[Chunk]:
        """The link has ended: what was not done."""
        chunks = [packed.chunk for packed in self._packed.values()]
        self._packed.clear()
        self._waiting.clear()
        self._gathering.clear()
        return chunks


# -- the destination -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Landing:
    """A part that has been put in its place: what to tell the source, and whether its chunk is complete."""

    key: Key
    body: bytes
    complete: bool


@dataclass(eq=False, slots=True)
class _Arriving:
    parts: int
    #: A bit for each part that has come.
    seen: int = 0
    landed: int = 0


class Unpacker:
    """The destination's half: scatters what has come, and says so.

    What a peer can make it remember is bounded: unfinished chunks by the slots, parts of a chunk by its segments.
    """

    def __init__(self, mover: Mover, slots: Slots, lengths: Mapping[int, int]) -> None:
        self._mover = mover
        self._slots = slots
        self._lengths = lengths
        self._arriving: dict[Key, _Arriving] = {}
        self._scattering: deque[tuple[Key, bytes, DeviceEvent | None]] = deque()
        self._busy: set[int] = set()

    def __len__(self) -> int:
        return len(self._arriving)

    def arrived(self, key: Key, body: bytes) -> None:
        """A part is in a slot.  Everything that its note says is checked before a byte is put anywhere.

        Raises :class:`~kvbaton.errors.ProtocolViolation` where it is wrong; then nothing was written.
        """
        try:
            number, parts, slot, count, nbytes = _PART.unpack_from(body)
            target = decode_places(memoryview(body)[_PART.size :])
            target.check_bounds(self._lengths, f"part {number} of chunk {key}")
        except (struct.error, SegmentError) as error:
            raise ProtocolViolation("C9.3", f"a packed part that cannot be: {error}") from error
        arriving = self._arriving.get(key)
        if arriving is None:
            if len(self._arriving) == self._slots.count:
                raise ProtocolViolation(
                    "T12", f"chunk {key} begins while {len(self._arriving)} are unfinished, as many as there are slots"
                )
            arriving = _Arriving(parts)
        if not (
            number < parts == arriving.parts <= MAX_SEGMENTS  # a part has a segment at least
            and not arriving.seen >> number & 1
            and slot < self._slots.count
            and slot not in self._busy
            and len(target) == count > 0
            and target.nbytes == nbytes <= self._slots.nbytes
        ):
            raise ProtocolViolation("C9.3", f"part {number} of {parts} of chunk {key} in slot {slot} cannot be")
        self._arriving[key] = arriving
        arriving.seen |= 1 << number
        self._busy.add(slot)
        self._scattering.append((key, _LANDED.pack(number, slot), self._mover.scatter(slot, target)))

    def landed(self) -> Iterator[Landing]:
        """What has been put in its place since the last call, each once."""
        while self._scattering and (self._scattering[0][2] is None or self._scattering[0][2].query()):
            key, body, _ = self._scattering.popleft()
            self._busy.discard(_LANDED.unpack(body)[1])
            arriving = self._arriving[key]
            arriving.landed += 1
            complete = arriving.landed == arriving.parts
            if complete:
                del self._arriving[key]
            yield Landing(key, body, complete)
