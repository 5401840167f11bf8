"""The prefill stage P: the source of KV.

The engine reports computed ranges; the planner cuts them into chunks; a chunk waits for its device events, then for
room in the transport.  Every pass offers what is ready until the guard says that it is full, so the whole budget is
refilled each time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton import messages, tracing
from kvbaton.connector import Chunk, DeviceEvent, Endpoint, Outcome, Progress
from kvbaton.engine import Admission, ComputedRange, Request, Role
from kvbaton.errors import KvbatonError
from kvbaton.geometry import KVGeometry
from kvbaton.handoff import effects as fx
from kvbaton.handoff.source import Source
from kvbaton.identity import PeerId, TransferId
from kvbaton.reservation import Reservation
from kvbaton.stage import engine_loop as loop
from kvbaton.stage.planner import ChunkPlanner
from kvbaton.stage.stage import HANDLE_DONE, Stage


@dataclass(slots=True, eq=False)
class _Lane:
    """What goes to one destination: a frozen one holds up its own requests and nobody else's (T6)."""

    peer: PeerId
    #: Chunks that only wait for room in the transport, by transfer and sequence, in the order in which they got ready.
    ready: OrderedDict[tuple[TransferId, int], Chunk] = field(default_factory=OrderedDict)
    #: Bytes computed and not yet submitted.
    backlog: int = 0
    #: The engine was told to pause, and has not been told that it may go on.
    paused: bool = False
    #: The chunk that the transport had no room for, as noted in a trace.
    refused: tuple[TransferId, int] | None = None


@dataclass(slots=True)
class _Transfer:
    """Chunks between plan and submission."""

    lane: _Lane
    #: Device events in launch order, each with the chunks that were planned with it.  A chunk may carry tokens held
    #: back from earlier ranges, so it is ready only when every earlier event is.
    computing: deque[tuple[DeviceEvent | None, tuple[int, ...]]] = field(default_factory=deque)
    chunks: dict[int, Chunk] = field(default_factory=dict)
    #: Prompt tokens found in the prefix cache.
    cached: int = 0


class PrefillStage(Stage):
    """See the module's text.  ``backlog_bytes``: computed for one destination and not yet submitted; beyond it the
    engine is asked to pause the requests that go there."""

    role = Role.PREFILL
    machine: Source

    def __init__(self, planner: ChunkPlanner, *, backlog_bytes: int, **common: Any) -> None:
        super().__init__(**common)
        self.machine = Source()
        self._planner = planner
        self._backlog_limit = backlog_bytes
        self._transfers: dict[TransferId, _Transfer] = {}
        self._waiting: set[TransferId] = set()  # have unfinished device events
        self._lanes: dict[PeerId, _Lane] = {}
        #: Since when some ready chunk has found no room, and for how long that was so before.
        self._full_since: float | None = None
        self._full_seconds = 0.0
        #: Not said yet: of several in one pass the last says it all.
        self._progressed: dict[TransferId, messages.Progress] = {}

    def can_schedule(self, transfer: TransferId, tokens: int) -> bool:
        """Advisory; reads a snapshot, from the engine thread."""
        state = self._transfers.get(transfer)
        if state is None or state.lane.backlog <= self._backlog_limit:
            return True
        # first the flag, then the look that counts: the pump shrinks the backlog first and then looks at the flag,
        # so whichever is later, the engine goes on or is nudged
        recorder, known = self._recorder, state.lane.paused
        state.lane.paused = True
        if recorder is not None and not known:
            recorder.engine.note(tracing.Paused(self._clock(), str(state.lane.peer)))
        return state.lane.backlog <= self._backlog_limit

    # -- coordinator -------------------------------------------------------------------------------------------------

    def _on_transfer(self, message: messages.TransferMessage) -> Iterable[fx.Effect]:
        match message:
            case messages.Prefill():
                return self.machine.prefill(message)
            case messages.Ack(transfer):
                return self.machine.ack(transfer)
            case messages.Cancel(transfer):
                return self.machine.cancel(transfer)
            case _:
                kind = type(message).__name__
                return [fx.Violation("C7.4", message.transfer, None, f"a {kind} is not for a prefill stage")]

    def _coordinator_gone(self) -> Iterable[fx.Effect]:
        return self.machine.stop()

    def _peer_announced(self, endpoint: Endpoint) -> None:
        self._planner.peer_up(endpoint.peer, KVGeometry.decode(endpoint.geometry))

    def _peer_gone(self, peer: PeerId) -> None:
        self._planner.peer_down(peer)
        self._drop_lane(peer)

    # -- engine ------------------------------------------------------------------------------------------------------

    def _on_engine(self, report: loop.Report) -> Iterable[fx.Effect]:
        match report:
            case loop.Computed(computed):
                return self._on_computed(computed)
            case loop.Refused(transfer, reason, _):
                return self.machine.refused(transfer, reason)
            case loop.Produced(outputs):
                return [
                    effect
                    for output in outputs
                    if output.error is not None
                    for effect in self.machine.engine_failed(output.transfer, f"C6.3: prefill: {output.error}")
                ]
            case _:
                return [fx.Ignored(None, type(report).__name__, "a prefill engine has no such report")]

    def _on_computed(self, computed: ComputedRange) -> Iterable[fx.Effect]:
        transfer = computed.transfer
        if self.machine.next_sequence(transfer) is None:
            return [fx.Ignored(transfer, "computed", "nothing is to be computed any more")]
        try:
            chunks = self._planner.plan(computed)
        except KvbatonError as error:
            return self.machine.engine_failed(
                transfer, f"C3.6: the engine reported a range that cannot be sent: {error}"
            )
        state = self._transfers[transfer]
        state.cached = max(state.cached, computed.cached)
        state.computing.append((computed.ready, tuple(chunk.sequence for chunk in chunks)))
        for chunk in chunks:
            state.chunks[chunk.sequence] = chunk
            state.lane.backlog += chunk.nbytes
        if self._recorder is not None and chunks:
            past = chunks[-1].sequence + 1
            self._recorder.pump.note(tracing.Planned(self._clock(), transfer, chunks[0].sequence, past))
        effects: list[fx.Effect] = list(self.machine.computed(transfer, len(chunks), computed.last))
        self._waiting.add(transfer)
        effects += self._advance_device(transfer)
        return effects

    def _advance_device(self, transfer: TransferId) -> list[fx.Effect]:
        """The chunks whose device events, and all earlier ones, have completed."""
        state = self._transfers[transfer]
        effects: list[fx.Effect] = []
        while state.computing:
            event, sequences = state.computing[0]
            if event is not None and not event.query():
                return effects
            state.computing.popleft()
            for sequence in sequences:
                effects += self.machine.source_ready(transfer, sequence)
                if self._recorder is not None:
                    self._recorder.pump.note(tracing.Ready(self._clock(), transfer, sequence))
        self._waiting.discard(transfer)
        return effects

    def _on_suspended(self, transfer: TransferId) -> Iterable[fx.Effect]:
        return self.machine.suspended(transfer)

    # -- transport ---------------------------------------------------------------------------------------------------

    def _on_events(self, progress: Progress) -> None:
        recorder = self._recorder
        for completion in progress.completions:
            if recorder is not None:
                recorder.pump.note(
                    tracing.Completed(self._clock(), completion.transfer, completion.sequence, completion.outcome.value)
                )
            if completion.outcome is Outcome.DONE:
                self._mark(completion.transfer, HANDLE_DONE)
            self._run(self.machine.completion(completion))

    def _progress(self) -> bool:
        busy = False
        for transfer in tuple(self._waiting):
            effects = self._advance_device(transfer)
            if effects:
                busy = True
                self._run(effects)
        busy = self._submit_ready() or busy
        self._say_progress()
        return busy

    def _send(self, message: messages.Message) -> None:
        """A word of progress can wait until what was computed is submitted, but is never overtaken."""
        if isinstance(message, messages.Progress):
            self._progressed[message.transfer] = message
            return
        self._say_progress()
        super()._send(message)

    def _say_progress(self) -> None:
        while self._progressed:
            _, message = self._progressed.popitem()
            super()._send(message)

    def _submit_ready(self) -> bool:
        """Offer ready chunks, one per peer in turn, until nobody's is taken."""
        busy = False
        peers = [peer for peer, lane in self._lanes.items() if lane.ready]
        while peers:
            peers = [peer for peer in peers if self._submit_next(peer)]
            busy = busy or bool(peers)
        full = False
        for lane in self._lanes.values():
            full = full or bool(lane.ready)
            if lane.paused and lane.backlog <= self._backlog_limit:
                lane.paused = False
                self._command(loop.Nudge())
                if self._recorder is not None:
                    self._recorder.pump.note(tracing.Resumed(self._clock(), str(lane.peer)))
        if full is (self._full_since is None):
            self._note_full(full)
        return busy

    def _note_full(self, full: bool) -> None:
        """Some ready chunk finds no room from now on, or none is left over any more."""
        now = self._clock()
        if self._full_since is not None:
            self._full_seconds += now - self._full_since
        self._full_since = now if full else None

    def _submit_next(self, peer: PeerId) -> bool:
        """Whether this peer's next chunk was taken and another waits."""
        queue = self._lanes[peer].ready
        recorder = self._recorder
        while queue:
            key, chunk = next(iter(queue.items()))
            if not self.machine.may_submit(*key):  # T9
                del queue[key]
                continue
            began = 0.0 if recorder is None else self._clock()
            try:
                accepted = self.guard.submit(chunk)
            except KvbatonError as error:
                del queue[key]
                self._drop_chunk(chunk)
                self._fail(chunk.transfer, error)
                continue
            if not accepted:
                if recorder is not None and self._lanes[peer].refused != key:
                    self._lanes[peer].refused = key
                    recorder.pump.note(tracing.Full(began, *key))
                return False
            if recorder is not None:
                size = chunk.nbytes, len(chunk.source)
                recorder.pump.note(tracing.Submitted(began, self._clock(), *key, *size))
            del queue[key]
            self._drop_chunk(chunk)
            self._run(self.machine.submitted(chunk.transfer, chunk.sequence))
            self.channel.flush()  # a commit does not wait for the next chunk to be copied
            self._command()
            return bool(queue)
        return False

    def _drop_chunk(self, chunk: Chunk) -> None:
        state = self._transfers.get(chunk.transfer)
        if state is not None and state.chunks.pop(chunk.sequence, None) is not None:
            state.lane.backlog -= chunk.nbytes

    def _has_pending(self) -> bool:
        return bool(self._waiting) or any(lane.ready for lane in self._lanes.values())

    # -- effects -----------------------------------------------------------------------------------------------------

    def _on_role_effect(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Compute(transfer, request, reservation, destination):
                self._compute(transfer, request, reservation, destination)
            case fx.Post(transfer, sequence):
                state = self._transfers[transfer]
                state.lane.ready[transfer, sequence] = state.chunks[sequence]
            case fx.CancelChunks(transfer):
                self._drop_chunks(transfer)
                self.guard.cancel(transfer)
            case fx.Acknowledge(transfer):
                self.guard.acknowledge(transfer)
            case fx.ReleaseCompute(transfer):
                self._put_off.append(loop.ReleaseCompute(transfer))  # after what was computed is on its way
            case _:
                raise TypeError(f"a source machine has no effect {effect!r}")

    def _compute(self, transfer: TransferId, request: Request, reservation: Reservation, destination: PeerId) -> None:
        if not self._planner.knows(destination):
            self._run(self.machine.refused(transfer, f"T2: {destination} is not connected"))
            return
        try:
            self._planner.begin(transfer, destination, reservation, len(request.prompt))
        except KvbatonError as error:
            self._run(self.machine.refused(transfer, f"{destination} reserved what cannot be sent to: {error}"))
            return
        # before the engine hears of it: it asks can_schedule from its own thread
        self._transfers[transfer] = _Transfer(self._lanes.setdefault(destination, _Lane(destination)))
        self._command(loop.Admit(Admission(transfer, request, reservation.valid)))

    def _drop_chunks(self, transfer: TransferId) -> None:
        """Nothing of it is sent any more, nor kept: a frozen destination takes nothing from the head of its lane
        (T12)."""
        state = self._transfers.get(transfer)
        if state is not None:
            state.lane.backlog -= sum(chunk.nbytes for chunk in state.chunks.values())
            for sequence in state.chunks:
                state.lane.ready.pop((transfer, sequence), None)
            state.chunks.clear()

    def _drop_lane(self, peer: PeerId) -> None:
        """Nothing is kept of a destination that is gone and that no transfer goes to (T12)."""
        if not self._planner.knows(peer) and not any(s.lane.peer == peer for s in self._transfers.values()):
            self._lanes.pop(peer, None)

    def _forget(self, transfer: TransferId) -> None:
        self._drop_chunks(transfer)
        state = self._transfers.pop(transfer, None)
        self._waiting.discard(transfer)
        self._planner.forget(transfer)
        if state is not None:
            self._drop_lane(state.lane.peer)

    def _committed(self, message: messages.Commit) -> messages.Commit:
        segments, nbytes = self._planner.totals(message.transfer)
        cached = self._transfers[message.transfer].cached
        return msgspec.structs.replace(super()._committed(message), segments=segments, nbytes=nbytes, cached=cached)

    def _expects_transport(self) -> bool:
        return self.guard.outstanding() > 0

    def _settled(self) -> bool:
        return not self._exposed()

    def _role_figures(self) -> Mapping[str, float]:
        waits = 0.0 if self._full_since is None else self._clock() - self._full_since
        return {
            "planned_pieces": self._planner.pieces, "planned_segments": self._planner.segments,
            "backpressure_seconds_total": self._full_seconds + waits,
        }  # fmt: skip

    def _exposed(self) -> bool:
        return self.guard.outstanding() > 0
