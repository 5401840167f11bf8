"""The source machine: what a prefill stage P keeps for all its transfers.

Sans-IO: every method is one event and returns the effects it has, in order.  A record exists from Prefill until
Retired; there are no tombstones, so an event about a transfer without a record is
:class:`~kvbaton.handoff.effects.Ignored` (C1.2).

What P must prove before memory is used again:

* Its *own* memory (KV blocks, final slot) is freed, by ``Free``, once C let go of the transfer (Ack, Cancel, Stop, or
  P's own failure), the engine is done with it or suspended with its device quiet, and every chunk is *source quiet*
  (C5.1).
* ``Retired`` tells C in addition that P writes no more, and C may then release D's memory.  So it also needs every
  chunk *target quiet*.  A transport that completes a chunk while its bytes are still under way (``source_quiet``
  alone) leaves it SENT: not a failure, and settled by C's Ack, because D has a receipt of it and a receipt is the last
  write (T3); by a later completion that proves it; or by the end of D's process.  A cancelled transfer with SENT
  chunks is freed here but not retired: P says which they are (``Unproven``), and once D has receipts of these C's Ack
  settles them as well.  C's drain deadline bounds that, for what was sent and never arrives.

Threading: one thread, the stage's pump.  :meth:`Source.may_submit` is a plain look-up.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from kvbaton.connector import Completion
from kvbaton.connector import Outcome as ChunkOutcome
from kvbaton.errors import CapabilityError, LocalProtocolError
from kvbaton.handoff.effects import (
    Acknowledge,
    CancelChunks,
    Compute,
    DisconnectPeer,
    Fault,
    Free,
    Ignored,
    Milestone,
    Post,
    ReleaseCompute,
    Send,
    SourceEffect,
    Suspend,
    Violation,
)
from kvbaton.handoff.table import LEGAL_SOURCE, ChunkState, Milestones, SourcePhase
from kvbaton.identity import PeerId, TransferId
from kvbaton.messages import (
    MAX_MISSING,
    Commit,
    Connected,
    Failed,
    Fatal,
    PeerDown,
    Prefill,
    Progress,
    Retired,
    Unproven,
)

_COMPUTING, _READY, _POSTED = ChunkState.COMPUTING, ChunkState.READY, ChunkState.POSTED
_EXPIRED, _SENT, _PINNED = ChunkState.EXPIRED, ChunkState.SENT, ChunkState.PINNED
_PREFILLING, _COMMITTED, _DRAINING = SourcePhase.PREFILLING, SourcePhase.COMMITTED, SourcePhase.DRAINING

#: What :meth:`Source` methods return.
Effects = list[SourceEffect]


class _Engine(enum.Enum):
    """What the engine does for a transfer."""

    RUNNING = "running"
    SUSPENDING = "suspending"
    DONE = "done"


class _Record:
    __slots__ = ("acked", "assigned", "cancelled", "chunks", "closed", "computing", "destination", "engine", "freed",
                 "phase", "queued", "transfer", "unproven")  # fmt: skip

    def __init__(self, transfer: TransferId, destination: PeerId) -> None:
        self.transfer = transfer
        self.destination = destination
        self.phase = _PREFILLING
        #: Unsettled chunks by sequence.
        self.chunks: dict[int, ChunkState] = {}
        #: Sequences handed out so far; the count, once ``closed``.
        self.assigned = 0
        #: The last range was reported.
        self.closed = False
        #: Chunks COMPUTING: counted, because looking for them at each one that gets ready grows with the square.
        self.computing = 0
        #: Chunks COMPUTING or READY: still to be submitted.
        self.queued = 0
        #: Chunks SENT: only their target is not known to be quiet.
        self.unproven = 0
        self.engine = _Engine.RUNNING
        #: Every target is quiet by other evidence: D's receipts (Ack), or the end of D's process.
        self.acked = False
        #: C has said Cancel, so it has not heard Received: an Ack after that answers Unproven.
        self.cancelled = False
        #: The source memory was given back; only Retired is still owed.
        self.freed = False


class Source:
    """All transfers of one prefill stage on one channel from C."""

    def __init__(self) -> None:
        self._records: dict[TransferId, _Record] = {}
        self._ordinal = 0
        self._stopping = False

    # -- looking -----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Transfers that have not retired."""
        return len(self._records)

    @property
    def drained(self) -> bool:
        """After :meth:`stop`: nothing is left, the stage may exit."""
        return self._stopping and not self._records

    def phase(self, transfer: TransferId) -> SourcePhase | None:
        """None: no record."""
        record = self._records.get(transfer)
        return record.phase if record else None

    def transfers(self) -> dict[TransferId, SourcePhase]:
        """Every transfer with a record."""
        return {transfer: record.phase for transfer, record in self._records.items()}

    def chunks(self, transfer: TransferId) -> dict[int, ChunkState]:
        """The unsettled chunks of a transfer, by sequence."""
        record = self._records.get(transfer)
        return dict(record.chunks) if record else {}

    def next_sequence(self, transfer: TransferId) -> int | None:
        """The sequence that the next computed chunk gets; None where there is nothing to compute any more."""
        record = self._records.get(transfer)
        return record.assigned if record and record.phase is _PREFILLING and not record.closed else None

    def may_submit(self, transfer: TransferId, sequence: int) -> bool:
        """Whether a posted chunk may be handed to the connector now.  Look right before every attempt (T9)."""
        record = self._records.get(transfer)
        return record is not None and record.phase is _PREFILLING and record.chunks.get(sequence) is _READY

    # -- from the coordinator ----------------------------------------------------------------------------------------

    def prefill(self, message: Prefill) -> Effects:
        """Create a record and start to compute."""
        transfer = message.transfer
        if message.ordinal <= self._ordinal:
            return [Ignored(transfer, "Prefill", "replayed")]  # C1.2
        self._ordinal = message.ordinal
        record = self._records.get(transfer)
        if record:
            return self._violated(record, "C7.2", "Prefill for a live transfer")
        if self._stopping:
            return [Violation("C6.2", transfer, None, "Prefill after Stop")]
        self._records[transfer] = _Record(transfer, message.destination)
        return [
            Compute(transfer, message.request, message.reservation, message.destination),
            Milestone(transfer, Milestones.PREFILL_STARTED),
        ]

    def ack(self, transfer: TransferId) -> Effects:
        """D has received everything, or, after Cancel, what was unproven: retire when quiet.

        Either is evidence that no target is written any more (T3).
        """
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "Ack", "unknown transfer")]
        if record.phase is _PREFILLING:
            return self._violated(record, "C7.2", "Ack before Commit")
        asked = record.freed and bool(record.chunks)
        if record.phase is _DRAINING and (record.acked or not (asked or (record.closed and not record.queued))):
            return [Ignored(transfer, "Ack", "repeated, or it never committed")]
        self._prove_targets(record)
        effects: Effects = [Acknowledge(transfer)]
        if not record.cancelled:
            effects.append(Milestone(transfer, Milestones.ACKNOWLEDGED))  # C4: of Received
        if record.phase is _COMMITTED:
            self._move(record, _DRAINING)
        self._retire_if_quiet(record, effects)
        return effects

    def cancel(self, transfer: TransferId) -> Effects:
        """Nobody wants it: drop what is not submitted, drain the rest, retire when quiet."""
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "Cancel", "unknown transfer")]
        record.cancelled = True
        if record.phase is _DRAINING:
            return [Ignored(transfer, "Cancel", "already draining")]
        effects: Effects = []
        self._drain(record, effects)
        return effects

    def stop(self) -> Effects:
        """Cancel everything, take nothing new; the stage exits once :attr:`drained` (C6.2).  Also when C is gone
        (C6.6).
        """
        self._stopping = True
        effects: Effects = []
        for record in tuple(self._records.values()):
            if record.phase is not _DRAINING:
                self._drain(record, effects)
        return effects or [Ignored(None, "Stop", "nothing to cancel")]

    def disconnect(self, peer: PeerId) -> Effects:
        """``peer``'s process was joined: its memory is gone, so no target there is written any more.

        What the transport still reads here ends with the completions that ``DisconnectPeer`` brings about.
        """
        effects: Effects = [DisconnectPeer(peer)]
        for record in self._towards(peer):
            self._prove_targets(record)
            self._abandon(record, f"{peer} is dead", effects)
            self._retire_if_quiet(record, effects)
        return effects

    # -- from the engine ---------------------------------------------------------------------------------------------

    def computed(self, transfer: TransferId, chunks: int, last: bool) -> Effects:
        """The engine launched a range that was planned into ``chunks`` new chunks, numbered from :meth:`next_sequence`.

        0 chunks are legal except in the last range, which carries the final payload (C3.4).
        """
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "computed", "unknown transfer")]
        if record.phase is _DRAINING:
            return [Ignored(transfer, "computed", "draining")]
        if record.closed:
            record.engine = _Engine.RUNNING  # it was not done after all
            return self.engine_failed(transfer, "C3.7: the engine reported a range after the last one")
        if chunks < 0 or (last and chunks < 1):
            return self.engine_failed(transfer, f"C3.4: the last range was planned into {chunks} chunks")
        first = record.assigned
        for sequence in range(first, first + chunks):
            record.chunks[sequence] = _COMPUTING
        record.assigned += chunks
        record.computing += chunks
        record.queued += chunks
        record.closed = last
        return [Send(Progress(transfer, record.assigned))]

    def source_ready(self, transfer: TransferId, sequence: int) -> Effects:
        """The device event behind a chunk's source has completed."""
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "source ready", "unknown transfer")]
        if record.chunks.get(sequence) is not _COMPUTING:
            return [Ignored(transfer, "source ready", f"chunk {sequence} is not being computed")]
        effects: Effects = []
        record.computing -= 1
        if record.phase is _PREFILLING:
            record.chunks[sequence] = _READY
            if sequence == 0:
                effects.append(Milestone(transfer, Milestones.SOURCE_READY))
            effects.append(Post(transfer, sequence))
        else:
            del record.chunks[sequence]
        if record.closed and record.engine is not _Engine.DONE and not record.computing:
            record.engine = _Engine.DONE
            effects.append(ReleaseCompute(transfer))
        self._retire_if_quiet(record, effects)
        return effects

    def refused(self, transfer: TransferId, cause: str) -> Effects:
        """The engine can never compute it and holds nothing for it."""
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "engine refused", "unknown transfer")]
        if record.engine is _Engine.DONE:
            return [Ignored(transfer, "engine refused", "the engine had done its part")]
        record.engine = _Engine.DONE
        self._drop_computing(record)
        effects: Effects = []
        self._fail(record, cause, (), effects)
        return effects

    def engine_failed(self, transfer: TransferId, cause: str) -> Effects:
        """The engine cannot go on with it.  Its device work may still run: it is suspended and waited for (C5.1)."""
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "engine failed", "unknown transfer")]
        if record.phase is not _PREFILLING:
            return [Ignored(transfer, "engine failed", "nothing was left to compute")]
        effects: Effects = []
        self._fail(record, cause, (), effects)
        return effects

    def suspended(self, transfer: TransferId) -> Effects:
        """The engine computes no more of it and all device work launched for it has completed (answers ``Suspend``)."""
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "suspended", "unknown transfer")]
        if record.engine is not _Engine.SUSPENDING:
            return [Ignored(transfer, "suspended", "was not asked for")]
        record.engine = _Engine.DONE
        self._drop_computing(record)
        effects: Effects = []
        self._retire_if_quiet(record, effects)
        return effects

    # -- from the connector ------------------------------------------------------------------------------------------

    def submitted(self, transfer: TransferId, sequence: int) -> Effects:
        """The connector accepted the chunk.  With the last one the count is known: Commit."""
        record = self._records.get(transfer)
        if not record:
            return [Violation("T9", transfer, None, f"chunk {sequence} was submitted for a transfer that is gone")]
        if record.phase is not _PREFILLING or record.chunks.get(sequence) is not _READY:
            if record.phase is _DRAINING and record.chunks.get(sequence) is None and sequence < record.assigned:
                record.chunks[sequence] = _POSTED  # not allowed, but true: the wire has it, so it must be waited for
            return [Violation("T9", transfer, None, f"chunk {sequence} was submitted although it may not be")]
        record.chunks[sequence] = _POSTED
        record.queued -= 1
        effects: Effects = []
        if sequence == 0:
            effects.append(Milestone(transfer, Milestones.SUBMITTED))
        if record.closed and not record.queued:
            self._move(record, _COMMITTED)
            effects += [Send(Commit(transfer, record.assigned)), Milestone(transfer, Milestones.COMMITTED)]
        return effects

    def completion(self, completion: Completion) -> Effects:
        """A chunk ended at its source, was found late (TIMED_OUT), or a late one ended after all.

        Failed without proof of quiet is handled exactly like a passed deadline: both sides stay owned (T8, C6.1).  A
        chunk that the transport cannot take for what it is, its segments or its size, is a fault of the plan, which
        another pair of stages would have as well; any other failure is the connection's.
        """
        transfer, sequence = completion.transfer, completion.sequence
        record = self._records.get(transfer)
        if not record:
            return [Ignored(transfer, "completion", "unknown transfer")]
        state = record.chunks.get(sequence)
        timed_out = completion.outcome is ChunkOutcome.TIMED_OUT
        after: ChunkState | None
        source_quiet = completion.source_quiet or state is _SENT
        target_quiet = completion.target_quiet or state is _PINNED or record.acked
        if source_quiet:
            after = None if target_quiet else _SENT
        else:
            after = _PINNED if target_quiet else _EXPIRED
        if state not in (_POSTED, _EXPIRED, _SENT, _PINNED) or (state is after) or (timed_out and state is not _POSTED):
            return [Ignored(transfer, "completion", f"chunk {sequence} is not outstanding")]
        self._set(record, sequence, after)
        effects: Effects = []
        if record.phase is _DRAINING or (completion.outcome is ChunkOutcome.DONE and source_quiet):
            self._retire_if_quiet(record, effects)
        else:
            said = completion.outcome.value if completion.error is None else completion.error
            cause = f"C6.3: chunk {sequence} to {record.destination}: {said}"
            self._fail(record, cause, (sequence,), effects, unmoved=not _unfit(completion.error))
        return effects

    def peer_up(self, peer: PeerId) -> Effects:
        """The transport reports a destination up."""
        return [Send(Connected(peer))]

    def peer_down(self, peer: PeerId, quiet: bool, cause: str = "") -> Effects:
        """The transport reports a destination down.  ``quiet``: nothing here is read for it any more.

        It says nothing about the target: what had left may still be written by the other end's own progress (C6.4, A8).
        """
        effects: Effects = [Send(PeerDown(peer, quiet, cause))]
        for record in self._towards(peer):
            self._abandon(record, f"{peer} is down: {cause or 'connection closed'}", effects)
            if quiet:
                for sequence, state in tuple(record.chunks.items()):
                    if state in (_POSTED, _EXPIRED):
                        self._set(record, sequence, None if record.acked else _SENT)
                    elif state is _PINNED:
                        self._set(record, sequence, None)
            self._retire_if_quiet(record, effects)
        return effects

    def fatal(self, cause: str) -> Effects:
        """The stage must not go on: its quarantine reached its bound, or a clause is broken (T8)."""
        return [Fault(None, cause, retained=True), Send(Fatal(cause))]

    # -- shared ------------------------------------------------------------------------------------------------------

    def _towards(self, peer: PeerId) -> list[_Record]:
        return [record for record in self._records.values() if record.destination == peer]

    def _violated(self, record: _Record, clause: str, text: str) -> Effects:
        """State unchanged; C is told, and ends the transfer."""
        effects: Effects = [Violation(clause, record.transfer, None, text)]
        if record.phase is not _DRAINING:
            effects.append(Send(Failed(record.transfer, f"{clause}: {text}")))
        return effects

    def _fail(
        self, record: _Record, cause: str, missing: tuple[int, ...], effects: Effects, *, unmoved: bool = False
    ) -> None:
        """Compute or a chunk failed.  Once draining, that is our own affair."""
        if record.phase is _DRAINING:
            self._retire_if_quiet(record, effects)
            return
        effects.append(Fault(record.transfer, cause, retained=bool(record.chunks)))
        effects.append(Send(Failed(record.transfer, cause, missing[:MAX_MISSING], unmoved=unmoved)))
        self._drain(record, effects)

    def _abandon(self, record: _Record, cause: str, effects: Effects) -> None:
        """The destination cannot be reached: whatever has not arrived never will."""
        if record.phase is _PREFILLING or (record.phase is _COMMITTED and record.chunks):
            self._fail(record, cause, tuple(record.chunks), effects, unmoved=True)

    def _drain(self, record: _Record, effects: Effects) -> None:
        """Drop what was handed neither to the device nor to the wire."""
        transfer = record.transfer
        self._move(record, _DRAINING)
        for sequence in [s for s, state in record.chunks.items() if state is _READY]:
            del record.chunks[sequence]
        effects.append(CancelChunks(transfer))
        if record.engine is _Engine.RUNNING:
            record.engine = _Engine.SUSPENDING
            effects.append(Suspend(transfer))
        self._retire_if_quiet(record, effects)

    def _drop_computing(self, record: _Record) -> None:
        for sequence in [s for s, state in record.chunks.items() if state is _COMPUTING]:
            del record.chunks[sequence]
        record.computing = 0

    def _prove_targets(self, record: _Record) -> None:
        record.acked = True
        for sequence in [s for s, state in record.chunks.items() if state is _SENT]:
            self._set(record, sequence, None)

    def _set(self, record: _Record, sequence: int, state: ChunkState | None) -> None:
        record.unproven += (state is _SENT) - (record.chunks[sequence] is _SENT)
        if state is None:
            del record.chunks[sequence]
        else:
            record.chunks[sequence] = state

    def _retire_if_quiet(self, record: _Record, effects: Effects) -> None:
        if record.phase is not _DRAINING or record.transfer not in self._records:
            return
        if not record.freed and record.engine is _Engine.DONE and len(record.chunks) == record.unproven:
            record.freed = True
            effects.append(Free(record.transfer))  # C5.1
            if record.chunks:
                effects.append(Send(Unproven(record.transfer, _runs(record.chunks))))
        if record.freed and not record.chunks:
            effects += [Send(Retired(record.transfer)), Milestone(record.transfer, Milestones.SOURCE_RETIRED)]
            _check(record.phase, None)
            del self._records[record.transfer]

    def _move(self, record: _Record, phase: SourcePhase) -> None:
        _check(record.phase, phase)
        record.phase = phase


def _runs(sequences: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """``[first, past)`` of each run of sequences."""
    runs: list[tuple[int, int]] = []
    for sequence in sorted(sequences):
        if runs and runs[-1][1] == sequence:
            runs[-1] = (runs[-1][0], sequence + 1)
        else:
            runs.append((sequence, sequence + 1))
    return tuple(runs)


def _unfit(error: BaseException | None) -> bool:
    """Whether a chunk itself was refused (C3.6, T13), by the error or by what it was raised from."""
    seen: set[int] = set()  # one may be raised from itself
    while error is not None and id(error) not in seen:
        if isinstance(error, LocalProtocolError | CapabilityError):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def _check(before: SourcePhase | None, after: SourcePhase | None) -> None:
    if (before, after) not in LEGAL_SOURCE:
        raise LocalProtocolError(f"P cannot go from {before} to {after}: a defect in the source machine")
