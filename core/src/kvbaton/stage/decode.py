"""The decode stage D: the destination of KV.

Receipts and the commit count meet in the machine; when all are in, the engine imports on its own thread and treats
the request like any other from then on.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvbaton import messages, tracing
from kvbaton.connector import Endpoint, Progress
from kvbaton.engine import Admission, Role, StepOutput
from kvbaton.errors import KvbatonError
from kvbaton.geometry import KVGeometry, KVMap
from kvbaton.handoff import effects as fx
from kvbaton.handoff.destination import Destination
from kvbaton.handoff.table import DestinationPhase
from kvbaton.identity import PeerId, TransferId
from kvbaton.reservation import Reservation
from kvbaton.segments import Segments
from kvbaton.stage import engine_loop as loop
from kvbaton.stage.stage import Stage

#: While a revocation is due the pump pauses for ``pump.idle_max`` at most: by default a try every 32 ms.
MAX_PASSES_BETWEEN_REVOCATIONS = 64


#: Leases end at the import (C8.3). From then on the request's memory is its own, as any other's is.
_LEASED = frozenset((
    DestinationPhase.RESERVING, DestinationPhase.RESERVED, DestinationPhase.HELD, DestinationPhase.RECEIVED,
))  # fmt: skip


class DecodeStage(Stage):
    """See the module's text.  ``geometry`` is the engine's own: it says which bytes a reservation covers.
    ``receipts_deadline``: seconds from Commit until all receipts are in, after which the transfer fails here.
    """

    role = Role.DECODE
    machine: Destination

    def __init__(self, geometry: KVGeometry, *, receipts_deadline: float, **common: Any) -> None:
        super().__init__(**common)
        self.machine = Destination()
        self._receipts_deadline = receipts_deadline
        #: Committed and not received, with the moment by which they shall be; all wait equally long, so the first is
        #: due first.
        self._incomplete: OrderedDict[TransferId, float] = OrderedDict()
        self._geometry = geometry
        self._map = KVMap(geometry, geometry)
        self._prompts: dict[TransferId, int] = {}
        #: Of these bytes have come, and more may be on their way.
        self._arriving: set[TransferId] = set()
        #: HELD, and the transport could not promise yet that nothing of it is written any more.
        self._revoking: dict[TransferId, _Attempts] = {}

    # -- coordinator -------------------------------------------------------------------------------------------------

    def _on_transfer(self, message: messages.TransferMessage) -> Iterable[fx.Effect]:
        match message:
            case messages.Reserve():
                return self.machine.reserve(message)
            case messages.Commit(transfer):
                effects = self.machine.commit(message)
                if self.machine.phase(transfer) is DestinationPhase.RESERVED:
                    self._incomplete.setdefault(transfer, self._clock() + self._receipts_deadline)
                return effects
            case messages.Unproven():
                return self.machine.unproven(message)
            case messages.Cancel(transfer):
                return self.machine.cancel(transfer)
            case messages.Release(transfer):
                return self.machine.release(transfer)
            case _:
                kind = type(message).__name__
                return [fx.Violation("C7.4", message.transfer, None, f"a {kind} is not for a decode stage")]

    def _coordinator_gone(self) -> Iterable[fx.Effect]:
        return self.machine.orphaned()

    # -- engine ------------------------------------------------------------------------------------------------------

    def _on_engine(self, report: loop.Report) -> Iterable[fx.Effect]:
        match report:
            case loop.Reserved(reservation):
                return self.machine.reserved(reservation)
            case loop.Refused(transfer, reason, retry):
                return self.machine.refused(transfer, reason, retry)
            case loop.Imported(transfer):
                return self.machine.imported(transfer)
            case loop.Activated(transfer):
                return self.machine.activated(transfer)
            case loop.Produced(outputs):
                return [effect for output in outputs for effect in self._on_output(output)]
            case _:
                return [fx.Ignored(None, type(report).__name__, "a decode engine has no such report")]

    def _on_output(self, output: StepOutput) -> list[fx.Effect]:
        if output.error is not None:
            return list(self.machine.engine_failed(output.transfer, f"C6.3: decode: {output.error}"))
        effects: list[fx.Effect] = list(self.machine.output(output.transfer, output.token_ids, output.exit_depths))
        if output.finish_reason is not None:
            effects += self.machine.finished(output.transfer, output.finish_reason)
        return effects

    def _on_suspended(self, transfer: TransferId) -> Iterable[fx.Effect]:
        return self.machine.device_quiet(transfer)

    # -- transport ---------------------------------------------------------------------------------------------------

    def _peer_announced(self, endpoint: Endpoint) -> None:
        """A writer: nothing to prepare, its own side plans."""

    def _peer_gone(self, peer: PeerId) -> None:
        """The machine decides what its transfers come to."""

    def _on_events(self, progress: Progress) -> None:
        recorder = self._recorder
        for receipt in progress.receipts:
            began = 0.0 if recorder is None else self._clock()
            self._run(self.machine.receipt(receipt))
            if recorder is not None:
                recorder.pump.note(tracing.Receipt(began, self._clock(), receipt.transfer, receipt.sequence))
            if self.machine.phase(receipt.transfer) is DestinationPhase.RESERVED:
                self._arriving.add(receipt.transfer)

    # -- effects -----------------------------------------------------------------------------------------------------

    def _leased(self, transfer: TransferId) -> bool:
        return self.machine.phase(transfer) in _LEASED

    def _on_role_effect(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Admit(transfer, request):
                self._prompts[transfer] = len(request.prompt)
                self._command(loop.Admit(Admission(transfer, request)))
            case fx.Grant(transfer, source, reservation):
                try:
                    self.guard.grant(transfer, source, self._granted(reservation))
                except KvbatonError as error:
                    self._fail(transfer, error)  # C hears of it after the Reserved, which is next in line
            case fx.Import(transfer, valid):
                self._arriving.discard(transfer)
                self._incomplete.pop(transfer, None)
                self.guard.received(transfer)
                self._command(loop.Import(transfer, valid, self.machine.begin_import))
            case fx.Revoke(transfer):
                if self.guard.capabilities.revocable:
                    self._revoking[transfer] = _Attempts()
                    self._revoke(transfer)
            case _:
                raise TypeError(f"a destination machine has no effect {effect!r}")

    @property
    def imminent(self) -> bool:
        return bool(self._incomplete or self._arriving) or self._stop_by is not None or bool(self._quiet)

    def _more_may_come(self) -> bool:
        """Not where all that was expected has come: another pass would keep the interpreter from the import."""
        return bool(self._incomplete or self._arriving)

    def _progress(self) -> bool:
        busy = bool(self._incomplete) and self._expire_receipts()
        if not self._revoking:
            return busy
        waiting = tuple(self._revoking)
        for transfer in waiting:
            self._revoke(transfer)
        return busy or len(self._revoking) < len(waiting)

    def _expire_receipts(self) -> bool:
        """C6.7: the receipts of a committed transfer are overdue.  Only here is it known which are missing (C6.3)."""
        now = self._clock()
        expired = list(itertools.takewhile(lambda item: item[1] <= now, self._incomplete.items()))
        for transfer, _ in expired:
            del self._incomplete[transfer]
            if self.machine.phase(transfer) is DestinationPhase.RESERVED:
                cause = f"C6.7: deadline.receipts of {self._receipts_deadline:g} s passed"
                self._run(self.machine.engine_failed(transfer, cause, unmoved=True))
        return bool(expired)

    def _revoke(self, transfer: TransferId) -> None:
        """Try until it is revoked or nobody waits for it: released by C, its writer fenced, or this stage ended."""
        attempts = self._revoking[transfer]
        if self.machine.phase(transfer) is not DestinationPhase.HELD:
            del self._revoking[transfer]
        elif attempts.due() and self.guard.revoke(transfer):
            del self._revoking[transfer]
            self._run(self.machine.revoked(transfer))

    def _granted(self, reservation: Reservation) -> Segments:
        """Every byte that the source may write: the prompt's KV behind the valid prefix, and the final payload."""
        tables = reservation.planning()
        end = self._prompts[reservation.transfer]
        kv = self._map.plan(tables, tables, reservation.valid, end)[0] if end > reservation.valid else Segments.empty()
        return kv.concat(self._geometry.final_segment(reservation.final_slot))

    def _exposed(self) -> bool:
        return bool(self.machine.sources())

    def _forget(self, transfer: TransferId) -> None:
        self._incomplete.pop(transfer, None)
        self._arriving.discard(transfer)
        self._prompts.pop(transfer, None)
        self._revoking.pop(transfer, None)


@dataclass(slots=True)
class _Attempts:
    """At once, after one more pass, after two more, four, and so on: what is stuck must not cost every pass."""

    passes: int = 0
    next: int = 0

    def due(self) -> bool:
        due = self.passes >= self.next
        if due:
            self.next = self.passes + min(self.passes + 1, MAX_PASSES_BETWEEN_REVOCATIONS)
        self.passes += 1
        return due
