"""The decode stage D: the destination of KV.

Receipts and the commit count meet in the machine; when all are in, the engine imports on its own thread and treats
the request like any other from then on.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvbaton import messages
from kvbaton.connector import Endpoint, Progress
from kvbaton.engine import Admission, Role, StepOutput
from kvbaton.errors import KvbatonError
from kvbaton.geometry import KVGeometry, KVMap
from kvbaton.handoff import effects as fx
from kvbaton.handoff.destination import Destination
from kvbaton.identity import PeerId, TransferId
from kvbaton.reservation import Reservation
from kvbaton.segments import Segments
from kvbaton.stage import engine_loop as loop
from kvbaton.stage.stage import Stage


class DecodeStage(Stage):
    """See the module's text.  ``geometry`` is the engine's own: it says which bytes a reservation covers."""

    role = Role.DECODE
    machine: Destination

    def __init__(self, geometry: KVGeometry, **common: Any) -> None:
        super().__init__(**common)
        self.machine = Destination()
        self._geometry = geometry
        self._map = KVMap(geometry, geometry)
        self._prompts: dict[TransferId, int] = {}

    # -- coordinator -------------------------------------------------------------------------------------------------

    def _on_transfer(self, message: messages.TransferMessage) -> Iterable[fx.Effect]:
        match message:
            case messages.Reserve():
                return self.machine.reserve(message)
            case messages.Commit():
                return self.machine.commit(message)
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
        for receipt in progress.receipts:
            self._run(self.machine.receipt(receipt))

    # -- effects -----------------------------------------------------------------------------------------------------

    def _on_role_effect(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Admit(transfer, request):
                self._prompts[transfer] = len(request.prompt)
                self._post_command(loop.Admit(Admission(transfer, request)))
            case fx.Grant(transfer, source, reservation):
                try:
                    self.guard.grant(transfer, source, self._granted(reservation))
                except KvbatonError as error:
                    # told after the Reserved that is on its way, or C would hear of a failure before its time
                    self._reports.append(loop.CommandFailed(transfer, error))
            case fx.Import(transfer, valid):
                self._post_command(loop.Import(transfer, valid, self.machine.begin_import))
            case fx.Revoke(transfer):
                if self.guard.capabilities.revocable and self.guard.revoke(transfer):
                    self._run(self.machine.revoked(transfer))
            case _:
                raise TypeError(f"a destination machine has no effect {effect!r}")

    def _granted(self, reservation: Reservation) -> Segments:
        """Every byte that the source may write: the prompt's KV behind the valid prefix, and the final payload."""
        tables = reservation.arrays()
        end = self._prompts[reservation.transfer]
        kv = self._map.plan(tables, tables, reservation.valid, end)[0] if end > reservation.valid else Segments.empty()
        return kv.concat(self._geometry.final_segment(reservation.final_slot))

    def _forget(self, transfer: TransferId) -> None:
        self._prompts.pop(transfer, None)
