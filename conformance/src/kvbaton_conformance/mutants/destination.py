"""The destination machine, broken."""

from __future__ import annotations

from kvbaton.handoff.destination import Destination
from kvbaton_conformance.mutants.mutant import Registry, edit

_machine = Registry("machine")
MUTANTS = _machine.found
guard, add = _machine.guard, _machine.add
D = Destination

_NEWEST = "record = next(reversed(self._records.values()), None)"
_RECORD = "record = self._records.get(transfer)"
_COMPLETE = "if not record.count or len(record.seen) != record.count:"

# -- the guards of the model -----------------------------------------------------------------------------------------

guard(
    "D.cancel-holds", "Cancel frees memory that a writer may still touch", "C5.2",
    edit(D._cancel, "        self._move(record, _HELD)\n        effects.append(Revoke(record.transfer))\n",
         "        self._free(record, effects)\n"),
)  # fmt: skip
guard(
    "D.cancel-stops-import", "a cancelled transfer is received and imported when its last receipt comes",
    "C7.4 C4.2 C5.2 C6.1",
    edit(D.commit, "if record.phase is _HELD:", "if False:"),
    edit(D.receipt, "if record.phase is _HELD:", "if False:"),
    edit(D._complete, "self._move(record, _RECEIVED)", "record.phase = _RECEIVED"),
)  # fmt: skip
guard(
    "D.received-needs-commit", "the first receipt is taken for all there are", "C4.2 A1",
    edit(D._complete, _COMPLETE, "if record.count and len(record.seen) != record.count:"),
)  # fmt: skip
guard(
    "D.received-needs-all", "the commit is taken for the receipts", "C4.2 A1",
    edit(D._complete, _COMPLETE, "if not record.count:"),
)  # fmt: skip
guard(
    "D.receipts-are-a-set", "a repeated receipt counts for another one", "C4.2 C7.1 A1",
    edit(D.receipt, "    if sequence in record.seen:\n", """\
    if sequence in record.seen and record.phase is _RESERVED:
        record.seen.add(next(other for other in range(MAX_CHUNKS) if other not in record.seen))
        return self._complete(record)
    if sequence in record.seen:
"""),
)  # fmt: skip
guard(
    "D.import-rechecks", "an import that is under way does not look whether the transfer still is", "C1.3 C5.2 C5.3",
    edit(D.begin_import, "return self._importable.pop(transfer, False)",
         "self._importable.pop(transfer, False)\n    return True"),
)  # fmt: skip
guard(
    "D.abort-waits-for-device", "a cancelled request frees its blocks while the device still computes it", "C5.3 C5.2",
    edit(D._close, "effects.append(Suspend(record.transfer))", "self._free(record, effects)"),
)  # fmt: skip
guard(
    "D.unknown-creates-nothing", "a receipt of a transfer that is gone creates a record", "C1.2 C7.4 T12",
    edit(D.receipt, '        return [Ignored(transfer, "receipt", "unknown transfer")]\n', """\
        record = self._records[transfer] = _Record(transfer, receipt.peer, 1)
        record.phase = _RESERVED
"""),
)  # fmt: skip
guard(
    "D.ordinal", "a repeated Reserve is done again", "C1.2 C7.1 C7.2 C7.4",
    edit(D.reserve, "if message.ordinal <= self._ordinal:", "if False:"),
)  # fmt: skip
guard(
    "D.receipt-by-transfer", "a receipt counts for the newest transfer, as a look-up by request id would find it",
    "C1.1 C1.2 C1.3 C4.2 A1",
    edit(D.receipt, _RECORD, _NEWEST),
)  # fmt: skip
guard(
    "D.cancel-by-transfer", "Cancel and Release act on the newest transfer, as a look-up by request id would find it",
    "C1.1 C1.2 C1.3 C5.2",
    edit(D.cancel, _RECORD, _NEWEST),
    edit(D.release, _RECORD, _NEWEST),
)  # fmt: skip

# -- others ----------------------------------------------------------------------------------------------------------

add(
    "release-does-not-wait-for-a-dead-writers-end", "D frees before its end of a dead P's connection is quiet",
    "C6.4 C5.2",
    edit(D._release, "if self._links.get(record.source) in (PeerLink.CLOSING, PeerLink.UNPROVEN):", "if False:"),
)  # fmt: skip
add(
    "an-end-without-a-fence-is-one", "D frees although its end went down without proof", "C6.4 C5.2",
    edit(D.peer_down, "    effects: Effects = [Send(", "    quiet = True\n    effects: Effects = [Send("),
)  # fmt: skip
add(
    "a-receipt-from-anybody-counts", "a receipt from a peer that has no part in the transfer counts", "C7.2 C1.4 C6.3",
    edit(D.receipt, "if receipt.peer != record.source:", "if False:"),
)  # fmt: skip
add(
    "a-sequence-past-the-count-is-taken", "a receipt at or past the commit count is no violation", "C7.2",
    edit(D.receipt, "if sequence < 0 or sequence >= (record.count or MAX_CHUNKS):", "if False:"),
)  # fmt: skip
add(
    "a-conflicting-commit-is-taken-by-d", "a second Commit with another count is taken by D", "C7.2 C6.3",
    edit(D.commit, "if record.count == count:", "if True:"),
)  # fmt: skip
add(
    "a-cancel-before-the-answer-is-lost", "a Cancel or Release that comes before D's engine has answered is forgotten",
    "C2.5 C5.2 C7.4",
    edit(D.release, "        record.released = True\n        # nothing was", "        # nothing was"),
    edit(D.cancel, "record.cancelled = True", "pass"),
)  # fmt: skip
add(
    "an-orphan-frees-what-may-be-written", "a D whose coordinator is gone frees without a fence", "C6.6 C5.2 C6.4 C3.1",
    edit(D._release_if_fenced, "fenced = self._links.get(record.source) is PeerLink.QUIET", "fenced = True"),
)  # fmt: skip
add(
    "ds-failure-frees-at-once", "a transfer that fails at D is freed although its writer goes on", "C5.2 C6.1",
    edit(D.engine_failed, "    self._cancel(record, effects)\n",
         "    (self._free if record.phase is _RESERVED else self._cancel)(record, effects)\n"),
)  # fmt: skip
add(
    "ds-failure-is-silent", "a transfer that fails at D is not reported", "C6.3 C6.1 C6.7",
    edit(D.engine_failed, "        Send(Failed(transfer, cause, record.missing, unmoved=unmoved)),\n", ""),
)  # fmt: skip
add(
    "a-stopping-d-reserves", "D takes a Reserve after Stop", "C6.2 C6.6",
    edit(D.reserve, "if self._stopping:", "if False:"),
)  # fmt: skip
add(
    "receipts-must-come-in-order", "a receipt that is not the next one is dropped", "C7.3 C4.2",
    edit(D.receipt, "    record.seen.add(sequence)\n", """\
    if sequence != len(record.seen):
        return [Ignored(transfer, "receipt", "out of order")]
    record.seen.add(sequence)
"""),
)  # fmt: skip
add(
    "unproven-counts-as-proven", "D answers for chunks of which it has no receipt", "C5.2 C4.1 C2.5",
    edit(D.unproven, "record.awaited = awaited - record.seen - record.late", "record.awaited = set()"), simulated=True,
)  # fmt: skip
