"""From the ranges an engine reports to the chunks a connector carries (C3).

One planner per prefill stage.  Per transfer it remembers how far it has planned; per peer the geometry map built when
that peer came up.  Pure bookkeeping: no clock, no I/O; used by the pump thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbaton.connector import Chunk
from kvbaton.engine import ComputedRange
from kvbaton.geometry import KVGeometry, KVMap, Table, ready_range
from kvbaton.identity import PeerId, TransferId
from kvbaton.reservation import Reservation
from kvbaton.segments import Segments, coalesce, joined, split


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """What one chunk may hold: bytes, and segments (descriptors) on either side; offsets that cuts must respect."""

    max_bytes: int
    max_segments: int
    alignment: int = 1


@dataclass(slots=True)
class _Plan:
    map: KVMap
    peer: PeerId
    targets: Sequence[Table]
    #: Where the final payload goes.
    payload: Segments
    sent: int
    sequence: int = 0
    #: Totals so far, for the Commit message.
    segments: int = 0
    nbytes: int = 0
    finished: bool = field(default=False)


class ChunkPlanner:
    """P's side of C3: every valid byte that D lacks, exactly once; nothing of an unused tail."""

    def __init__(self, geometry: KVGeometry, limits: ChunkLimits) -> None:
        self._geometry = geometry
        self._limits = limits
        self._maps: dict[PeerId, KVMap] = {}
        self._plans: dict[TransferId, _Plan] = {}
        #: Runs of memory in one block: each component's are its own, as long as nothing is coalesced.
        self._runs = sum(len(plane.components) for plane in geometry.planes)
        #: Runs that were planned so far, and the segments that coalescing and splitting made of them.
        self.pieces = 0
        self.segments = 0

    def peer_up(self, peer: PeerId, geometry: KVGeometry) -> None:
        """``peer`` holds its KV in ``geometry``, which was found compatible."""
        self._maps[peer] = KVMap(self._geometry, geometry)

    def peer_down(self, peer: PeerId) -> None:
        self._maps.pop(peer, None)

    def knows(self, peer: PeerId) -> bool:
        return peer in self._maps

    def begin(self, transfer: TransferId, peer: PeerId, reservation: Reservation, tokens: int) -> None:
        """A transfer of ``tokens`` prompt tokens to ``peer`` starts: D's valid prefix counts as sent (C3.3).

        Raises :class:`~kvbaton.errors.SegmentError` for tables that are too short, that name blocks or a final slot
        which ``peer`` does not have, or that name a block twice.  Later ranges are planned one by one, so only here can
        it be seen that two of them would write the same bytes (C3.2).
        """
        tables, valid, onto = reservation.planning(), reservation.valid, self._maps[peer]
        if valid < tokens:
            onto.check_destination(tables, valid, tokens)
        payload = onto.destination.final_segment(reservation.final_slot)
        self._plans[transfer] = _Plan(onto, peer, tables, payload, valid)

    def plan(self, computed: ComputedRange) -> list[Chunk]:
        """The chunks of one reported range, in sequence; empty where the range only extends an unfinished block.

        The unfinished block is held back until the last range, because whole blocks are one segment over all layers and
        partial ones are one per layer.  The last range always gives at least one chunk: the final payload's, which
        may be empty (C3.4).  Unknown or finished transfer: nothing.

        Raises :class:`~kvbaton.errors.SegmentError` for a range that cannot be sent; then nothing of it was planned.
        """
        plan = self._plans.get(computed.transfer)
        if plan is None or plan.finished:
            return []
        start, end = ready_range(plan.sent, computed.end, self._geometry.block_tokens, computed.last)
        if end > start:
            planned = plan.map.plan(computed.tables, plan.targets, start, end)
        else:
            planned = Segments.empty(), Segments.empty()
        if computed.last:
            payload = self._geometry.final_segment(computed.final_slot), plan.payload
            planned = coalesce(*joined(planned, payload))
        source, target = planned
        limits = self._limits
        batches = split(source, target, limits.max_bytes, limits.max_segments, alignment=limits.alignment)
        if computed.last and not batches:
            batches = [(Segments.empty(), Segments.empty())]
        blocks = self._geometry.blocks_for(end) - start // self._geometry.block_tokens if start < end else 0
        self.pieces += self._runs * blocks + (computed.last and self._geometry.final_bytes > 0)
        plan.sent = end
        plan.finished = computed.last
        chunks = []
        for batch, goal in batches:
            nbytes = batch.nbytes
            chunks.append(Chunk(computed.transfer, plan.sequence, plan.peer, batch, goal, nbytes))
            plan.sequence += 1
            plan.segments += len(batch)
            self.segments += len(batch)
            plan.nbytes += nbytes
        return chunks

    def totals(self, transfer: TransferId) -> tuple[int, int]:
        """Segments and bytes planned so far."""
        plan = self._plans.get(transfer)
        return (plan.segments, plan.nbytes) if plan else (0, 0)

    def forget(self, transfer: TransferId) -> None:
        self._plans.pop(transfer, None)

    def __len__(self) -> int:
        return len(self._plans)
