"""The destination machine: what a decode stage D keeps for all its transfers.

Sans-IO: every method is one event and returns the effects it has, in order.  A record exists exactly while D holds
memory for a transfer or has asked its engine to; there are no tombstones (C1.2).

Before RECEIVED a writer may be left, so memory is kept (HELD) until C says Release, which C says only when none is.
From RECEIVED on D needs nobody: every byte is in and none is written again (T3), so it frees on its own evidence
(C5.2).

Two refinements of the published table, both because the engine runs on another thread:

* The engine answers a Reserve later.  Until then the record is RESERVING; a Cancel or Release that comes meanwhile is
  kept and applied after the answer.
* A cancelled request may have been imported or activated by the engine before D heard of it.  So where the import
  cannot be taken back, D asks for suspension and frees when the device is quiet (CLOSING); an engine that was not yet
  computing answers at once.

Threading: one thread, the stage's pump, except :meth:`Destination.begin_import`.
"""

from __future__ import annotations

from kvbaton.connector import Receipt
from kvbaton.engine import FinishReason
from kvbaton.errors import LocalProtocolError
from kvbaton.handoff.effects import (
    Admit,
    DestinationEffect,
    DisconnectPeer,
    Fault,
    Free,
    Grant,
    Ignored,
    Import,
    Milestone,
    Revoke,
    Send,
    Suspend,
    Violation,
)
from kvbaton.handoff.table import LEGAL_DESTINATION, DestinationPhase, Milestones, PeerLink
from kvbaton.identity import PeerId, TransferId
from kvbaton.messages import (
    MAX_MISSING,
    Activated,
    Commit,
    Connected,
    Failed,
    Fatal,
    Finished,
    Output,
    PeerDown,
    Received,
    Rejected,
    Reserve,
    Reserved,
    Retired,
    Unproven,
)
from kvbaton.reservation import Reservation

_RESERVING, _RESERVED, _HELD = DestinationPhase.RESERVING, DestinationPhase.RESERVED, DestinationPhase.HELD
_RECEIVED, _IMPORTED = DestinationPhase.RECEIVED, DestinationPhase.IMPORTED
_ACTIVE, _CLOSING = DestinationPhase.ACTIVE, DestinationPhase.CLOSING

#: Sequences at or above this are refused: no plan has that many chunks, and a set of receipts must not grow at will
#: (C9.3).
MAX_CHUNKS = 1 << 20

#: What :class:`Destination` methods return.
Effects = list[DestinationEffect]


class _Record:
    __slots__ = ("awaited", "cancelled", "count", "late", "phase", "position", "prompt", "released", "seen", "source",
                 "transfer")  # fmt: skip

    def __init__(self, transfer: TransferId, source: PeerId, prompt: int) -> None:
        self.transfer = transfer
        self.source = source
        #: Tokens of the prompt: what is valid once everything is in.
        self.prompt = prompt
        self.phase = _RESERVING
        #: Chunks, 0 until Commit.
        self.count = 0
        self.seen: set[int] = set()
        #: HELD: receipts since; and those of the chunks that P cannot prove which are still to come, None where P has
        #: not said which.
        self.late: set[int] = set()
        self.awaited: set[int] | None = None
        #: RESERVING: came before the engine's answer.  HELD: C has released it, but its writer's connection is not yet
        #: quiet.
        self.cancelled = False
        self.released = False
        #: Output tokens sent.
        self.position = 0

    @property
    def missing(self) -> tuple[int, ...]:
        """Sequences below the count without a receipt, at most MAX_MISSING of them."""
        found: list[int] = []
        for sequence in range(self.count):
            if sequence not in self.seen:
                found.append(sequence)
                if len(found) == MAX_MISSING:
                    break
        return tuple(found)


class Destination:
    """All transfers of one decode stage on one channel from C."""

    def __init__(self) -> None:
        self._records: dict[TransferId, _Record] = {}
        #: Received and not yet taken by the engine.  The one thing that two threads touch; ``pop`` decides who was
        #: first.
        self._importable: dict[TransferId, bool] = {}
        self._links: dict[PeerId, PeerLink] = {}
        self._ordinal = 0
        self._stopping = False
        self._orphaned = False

    # -- looking -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Transfers that have not retired."""
        return len(self._records)

    @property
    def drained(self) -> bool:
        """After :meth:`stop` or :meth:`orphaned`: nothing is left, the stage may exit."""
        return self._stopping and not self._records

    def phase(self, transfer: TransferId) -> DestinationPhase | None:
        """None: no record."""
        record = self._records.get(transfer)
        return record.phase if record else None

    def transfers(self) -> dict[TransferId, DestinationPhase]:
        """Every transfer with a record."""
        return {transfer: record.phase for transfer, record in self._records.items()}

    def receipts(self, transfer: TransferId) -> frozenset[int]:
        """The sequences with a receipt."""
        record = self._records.get(transfer)
        return frozenset(record.seen) if record else frozenset()

    def sources(self) -> frozenset[PeerId]:
        """Peers that may still write here."""
        return frozenset(r.source for r in self._records.values() if r.phase in (_RESERVING, _RESERVED, _HELD))

    def quarantined(self) -> tuple[TransferId, ...]:
        """Released by C, but their writer's connection went down without a fence: held until this process exits
        (C6.4).
        """
        return tuple(
            t for t, r in self._records.items() if r.released and self._links.get(r.source) is PeerLink.UNPROVEN
        )

    # -- from the coordinator ----------------------------------------------------------------------------------------

    def reserve(self, message: Reserve) -> Effects:
        """Create a record and ask the engine for memory."""
        transfer = message.transfer
        if message.ordinal <= self._ordinal:
            return [Ignored(transfer, "Reserve", "replayed")]  # C1.2
        self._ordinal = message.ordinal
        record = self._records.get(transfer)
        if record:
            return self._violated(record, "C7.2", "Reserve for a live transfer")
        if self._stopping:
            return [Send(Rejected(transfer, "this stage is stopping"))]
        self._records[transfer] = _Record(transfer, message.source, len(message.request.prompt))
        return [Admit(transfer, message.request)]

    def commit(self, message: Commit) -> Effects:
        """The number of chunks is known."""
        transfer, count = message.transfer, message.count
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "Commit", "unknown transfer")]
        if record.phase is _RESERVING:
            return self._violated(record, "C7.4", "Commit before Reserved")
        if count <= 0 or count > MAX_CHUNKS:
            return self._violated(record, "C7.2", f"commit of {count} chunks")
        if record.phase is _HELD:
            return [Ignored(transfer, "Commit", "cancelled")]
        if record.count:
            if record.count == count:
                return [Ignored(transfer, "Commit", "equal commit")]  # C7.1
            return self._violated(record, "C7.2", f"commit of {count} chunks after one of {record.count}")
        if record.seen and max(record.seen) >= count:
            return self._trespassed(record, f"commit of {count} chunks, but {max(record.seen)} was received")
        record.count = count
        return self._complete(record)

    def unproven(self, message: Unproven) -> Effects:
        """Which chunks of a cancelled transfer may still be written: a receipt of each proves that none is (T3)."""
        transfer = message.transfer
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "Unproven", "unknown transfer")]
        if record.phase is _RESERVING or record.phase is _RESERVED:
            return self._violated(record, "C7.4", "Unproven before Cancel")
        if record.phase is not _HELD:
            return [Ignored(transfer, "Unproven", "everything is in")]
        if sum(max(past - first, 0) for first, past in message.chunks) > MAX_CHUNKS:
            return self._violated(record, "C7.2", f"more than {MAX_CHUNKS} chunks are unproven")
        awaited = {sequence for first, past in message.chunks for sequence in range(first, past)}
        record.awaited = awaited - record.seen - record.late
        return self._proven(record)

    def cancel(self, transfer: TransferId) -> Effects:
        """Stop; keep what a writer may still touch (C5.2)."""
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "Cancel", "unknown transfer")]
        if record.phase is _RESERVING:
            if record.cancelled or record.released:
                return [Ignored(transfer, "Cancel", "repeated")]
            record.cancelled = True
            return []
        if record.phase in (_HELD, _CLOSING):
            return [Ignored(transfer, "Cancel", "already ending")]
        effects: Effects = []
        self._cancel(record, effects)
        return effects

    def release(self, transfer: TransferId) -> Effects:
        """No writer is left: stop and free.  Waits for the end of a dead writer's connection, if that is closing
        (C6.4).
        """
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "Release", "unknown transfer")]
        if record.released:
            return [Ignored(transfer, "Release", "repeated")]
        if record.phase is _CLOSING:
            return [Ignored(transfer, "Release", "already closing")]
        effects: Effects = []
        if record.phase is _RESERVING:
            record.released = True
            # nothing was granted yet, so the writer's connection does not matter
            return effects
        if record.phase in (_RESERVED, _HELD):
            self._release(record, effects)
        else:
            self._cancel(record, effects)
        return effects

    def disconnect(self, peer: PeerId) -> Effects:
        """``peer``'s process was joined: drain and close this end.  A Release of its transfers waits until it is quiet
        (A8).
        """
        link = self._links.get(peer)
        if link is PeerLink.CLOSING:
            return [Ignored(None, "Disconnect", "already closing")]
        if link is PeerLink.UP or link is PeerLink.DOWN:
            self._links[peer] = PeerLink.CLOSING
        return [DisconnectPeer(peer)]

    def stop(self) -> Effects:
        """Every P was joined and its connection told to close: cancel everything and free what is quiet (C6.2)."""
        self._stopping = True
        going = [record for record in self._records.values() if record.phase is not _CLOSING and not record.released]
        if not going:
            return [Ignored(None, "Stop", "nothing to cancel")]
        effects: Effects = []
        for record in going:
            effects += self.release(record.transfer)
        return effects

    def orphaned(self) -> Effects:
        """C is gone: start nothing, cancel everything, free what each writer's quiet end proves (C6.6)."""
        self._stopping = self._orphaned = True
        effects: Effects = []
        for record in tuple(self._records.values()):
            if record.phase is _RESERVING:
                record.cancelled = True
            elif record.phase not in (_HELD, _CLOSING):
                self._cancel(record, effects)
            self._release_if_fenced(record, effects)
        return effects

    # -- from the engine ---------------------------------------------------------------------------------------------

    def reserved(self, reservation: Reservation) -> Effects:
        """The engine holds memory, frozen and locally quiet (C2.2, C2.7).  What came meanwhile is applied now."""
        transfer = reservation.transfer
        record = self._records.get(transfer)
        if not record or record.phase is not _RESERVING:
            return [Ignored(transfer, "reserved", "was not asked for")]
        effects: Effects = []
        self._move(record, _RESERVED)
        if record.released:
            effects.append(Send(Reserved(reservation)))
            self._free(record, effects)
            return effects
        effects += [
            Grant(transfer, record.source, reservation),
            Send(Reserved(reservation)),
            Milestone(transfer, Milestones.RESERVED),
        ]
        if record.cancelled:
            self._cancel(record, effects)
            self._release_if_fenced(record, effects)
        return effects

    def refused(self, transfer: TransferId, reason: str, retry: bool) -> Effects:
        """The engine holds nothing for it."""
        record = self._records.get(transfer)
        if not record or record.phase is not _RESERVING:
            return [Ignored(transfer, "refused", "was not asked for")]
        self._forget(record)
        return [Send(Rejected(transfer, reason, retry))]

    def begin_import(self, transfer: TransferId) -> bool:
        """Whether the engine may import now; looked at again on the engine's thread, right before it does (C1.3).

        True at most once for a transfer, and from then on a Cancel waits for the engine.  Safe to call from any thread.
        """
        return self._importable.pop(transfer, False)

    def imported(self, transfer: TransferId) -> Effects:
        """The engine has published validity, bound the final payload and queued the request."""
        record = self._records.get(transfer)
        if not record or record.phase is not _RECEIVED:
            return [Ignored(transfer, "imported", "the record has moved on")]
        self._importable.pop(transfer, None)
        self._move(record, _IMPORTED)
        return [Milestone(transfer, Milestones.IMPORTED)]

    def activated(self, transfer: TransferId) -> Effects:
        """Ordinary admission gave the request a compute slot (C2.3)."""
        record = self._records.get(transfer)
        if not record or record.phase is not _IMPORTED:
            return [Ignored(transfer, "activated", "the record has moved on")]
        self._move(record, _ACTIVE)
        return [Send(Activated(transfer)), Milestone(transfer, Milestones.ACTIVATED)]

    def output(self, transfer: TransferId, token_ids: tuple[int, ...], exit_depths: tuple[int, ...] = ()) -> Effects:
        """New tokens; passed on while the request is active."""
        record = self._records.get(transfer)
        if not record or record.phase is not _ACTIVE:
            return [Ignored(transfer, "output", "the record has moved on")]
        if not token_ids:
            return []
        position = record.position
        record.position += len(token_ids)
        return [Send(Output(transfer, position, token_ids, exit_depths))]

    def finished(self, transfer: TransferId, reason: FinishReason) -> Effects:
        """The last output was produced.  Work launched ahead may still run, so memory waits for the device (C5.3)."""
        record = self._records.get(transfer)
        if not record or record.phase is not _ACTIVE:
            return [Ignored(transfer, "finished", "the record has moved on")]
        effects: Effects = [Send(Finished(transfer, reason)), Milestone(transfer, Milestones.FINISHED)]
        self._close(record, effects)
        return effects

    def device_quiet(self, transfer: TransferId) -> Effects:
        """Nothing runs for it on the device any more, and nothing will (answers ``Suspend``)."""
        record = self._records.get(transfer)
        if not record or record.phase is not _CLOSING:
            return [Ignored(transfer, "device quiet", "the record has moved on")]
        effects: Effects = []
        self._free(record, effects)
        return effects

    def engine_failed(self, transfer: TransferId, cause: str, *, unmoved: bool = False) -> Effects:
        """The engine or the receiving end cannot go on with it.  As after Cancel, and C is told.

        ``unmoved``: it is the bytes that did not come.
        """
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "engine failed", "unknown transfer")]
        if record.phase in (_HELD, _CLOSING):
            return [Ignored(transfer, "engine failed", "already ending")]
        if record.phase is _RESERVING:
            return self.refused(transfer, cause, retry=False)
        effects: Effects = [
            Fault(transfer, cause, retained=record.phase is _RESERVED),
            Send(Failed(transfer, cause, record.missing, unmoved=unmoved)),
        ]
        self._cancel(record, effects)
        return effects

    # -- from the connector ------------------------------------------------------------------------------------------

    def receipt(self, receipt: Receipt) -> Effects:
        """One chunk's bytes are visible here, and are written no more (T3)."""
        transfer, sequence = receipt.transfer, receipt.sequence
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "receipt", "unknown transfer")]
        if receipt.peer != record.source:
            return self._violated(
                record, "C7.2", f"a receipt from {receipt.peer}, not from {record.source}", receipt.peer
            )
        if record.phase is _HELD:
            return self._receipt_held(record, sequence)
        if sequence < 0 or sequence >= (record.count or MAX_CHUNKS):
            return self._trespassed(record, f"sequence {sequence} of {record.count or MAX_CHUNKS}")
        if record.phase is _RESERVING:
            return self._trespassed(record, f"sequence {sequence} arrived before anything was reserved")
        if sequence in record.seen:
            return [Ignored(transfer, "receipt", "repeated")]
        record.seen.add(sequence)
        return self._complete(record)

    def _receipt_held(self, record: _Record, sequence: int) -> Effects:
        """It moves nothing, but proves that this chunk is written no more."""
        if not 0 <= sequence < MAX_CHUNKS or sequence in record.seen or sequence in record.late:
            return [Ignored(record.transfer, "receipt", "cancelled")]
        record.late.add(sequence)
        if not record.awaited or sequence not in record.awaited:
            return []
        record.awaited.discard(sequence)
        return self._proven(record)

    def _proven(self, record: _Record) -> Effects:
        return [] if record.awaited else [Send(Received(record.transfer))]

    def revoked(self, transfer: TransferId) -> Effects:
        """``connector.revoke`` returned True: a fence for this transfer without its writer's help (answers
        ``Revoke``).
        """
        record = self._records.get(transfer)
        if not record or record.phase is not _HELD:
            return [Ignored(transfer, "revoked", "the record has moved on")]
        effects: Effects = []
        self._free(record, effects)
        return effects

    def peer_up(self, peer: PeerId) -> Effects:
        """The transport reports a writer up."""
        for old in [p for p in self._links if p.name == peer.name and p != peer]:
            self._prune(old)
        self._links[peer] = PeerLink.UP
        return [Send(Connected(peer))]

    def peer_down(self, peer: PeerId, quiet: bool, cause: str = "") -> Effects:
        """The transport reports a writer down.  ``quiet`` is its fence: nothing of it can still be written here
        (C6.4).
        """
        effects: Effects = [Send(PeerDown(peer, quiet, cause))]
        before = self._links.get(peer)
        if quiet:
            self._links[peer] = PeerLink.QUIET
        else:
            self._links[peer] = PeerLink.UNPROVEN if before in (PeerLink.CLOSING, PeerLink.UNPROVEN) else PeerLink.DOWN
        for record in [r for r in self._records.values() if r.source == peer]:
            if quiet:
                self._release_if_fenced(record, effects)
            elif record.released and record.phase is _HELD:
                text = f"C6.4: {peer} went down without a fence; held until this stage exits"
                effects.append(Fault(record.transfer, text, retained=True))
        self._prune(peer)
        return effects

    def fatal(self, cause: str) -> Effects:
        """The stage must not go on."""
        return [Fault(None, cause, retained=True), Send(Fatal(cause))]

    # -- shared ------------------------------------------------------------------------------------------------------

    def _violated(self, record: _Record, clause: str, text: str, peer: PeerId | None = None) -> Effects:
        """The event is not applied; C is told and ends the transfer; nothing is imported meanwhile."""
        return self._refuse(record, clause, text, peer, culprit=None)

    def _trespassed(self, record: _Record, text: str) -> Effects:
        """The writer wrote what nobody reserved for: C treats it as lost."""
        return self._refuse(record, "C7.2", text, record.source, culprit=record.source)

    def _refuse(self, record: _Record, clause: str, text: str, peer: PeerId | None, culprit: PeerId | None) -> Effects:
        effects: Effects = [Violation(clause, record.transfer, peer, text)]
        if record.phase in (_HELD, _CLOSING):
            return effects
        effects.append(Send(Failed(record.transfer, f"{clause}: {text}", record.missing, culprit)))
        if record.phase is _RESERVED:
            self._cancel(record, effects)
        return effects

    def _complete(self, record: _Record) -> Effects:
        """RECEIVED needs the count and every receipt below it (C4.2)."""
        if not record.count or len(record.seen) != record.count:
            return []
        self._move(record, _RECEIVED)
        self._importable[record.transfer] = True
        return [
            Send(Received(record.transfer)),
            Milestone(record.transfer, Milestones.RECEIVED),
            Import(record.transfer, record.prompt),
        ]

    def _cancel(self, record: _Record, effects: Effects) -> None:
        """Stop a record that is RESERVED, RECEIVED, IMPORTED or ACTIVE."""
        if record.phase is _RESERVED:
            self._move(record, _HELD)
            effects.append(Revoke(record.transfer))
        elif record.phase is _RECEIVED and self._importable.pop(record.transfer, False):
            self._free(record, effects)  # the import can no longer begin (C1.3)
        else:
            self._close(record, effects)

    def _close(self, record: _Record, effects: Effects) -> None:
        self._move(record, _CLOSING)
        effects.append(Suspend(record.transfer))

    def _release(self, record: _Record, effects: Effects) -> None:
        if self._links.get(record.source) in (PeerLink.CLOSING, PeerLink.UNPROVEN):
            record.released = True
            if record.phase is _RESERVED:
                self._move(record, _HELD)
            if self._links[record.source] is PeerLink.UNPROVEN:
                text = f"C6.4: {record.source} went down without a fence; held until this stage exits"
                effects.append(Fault(record.transfer, text, retained=True))
        else:
            self._free(record, effects)

    def _release_if_fenced(self, record: _Record, effects: Effects) -> None:
        """A writer's quiet end proves its HELD records, if C has released them or is gone."""
        fenced = self._links.get(record.source) is PeerLink.QUIET
        if fenced and record.phase is _HELD and (record.released or self._orphaned):
            self._free(record, effects)

    def _free(self, record: _Record, effects: Effects) -> None:
        self._move(record, None)
        self._forget(record)
        effects += [
            Free(record.transfer),
            Send(Retired(record.transfer)),
            Milestone(record.transfer, Milestones.DESTINATION_RETIRED),
        ]

    def _forget(self, record: _Record) -> None:
        del self._records[record.transfer]
        self._importable.pop(record.transfer, None)

    def _prune(self, peer: PeerId) -> None:
        """Forget a link that has ended in peace and that no record is about (T12)."""
        if self._links.get(peer) is PeerLink.QUIET and not any(r.source == peer for r in self._records.values()):
            del self._links[peer]

    def _move(self, record: _Record, phase: DestinationPhase | None) -> None:
        if (record.phase, phase) not in LEGAL_DESTINATION:
            raise LocalProtocolError(f"D cannot go from {record.phase} to {phase}: a defect in the destination machine")
        if phase is not None:
            record.phase = phase
