"""The source machine, broken."""

from __future__ import annotations

from kvbaton.handoff.source import Source
from kvbaton.stage.prefill import PrefillStage
from kvbaton_conformance.mutants.mutant import Registry, edit

_machine = Registry("machine")
MUTANTS = _machine.found
guard, add = _machine.guard, _machine.add
P = Source

_NEWEST = "record = next(reversed(self._records.values()), None)"
_RECORD = "record = self._records.get(transfer)"

# -- the guards of the model -----------------------------------------------------------------------------------------

guard(
    "P.no-submit-while-draining", "chunks that wait for the transport are submitted after a Cancel", "T9 C6.1 C5.2",
    edit(P.may_submit,
         "return record is not None and record.phase is _PREFILLING and record.chunks.get(sequence) is _READY",
         "return record is None or record.chunks.get(sequence) in (_READY, None)"),
    edit(PrefillStage._drop_chunks, "            state.lane.ready.pop((transfer, sequence), None)\n", "            pass\n"),
)  # fmt: skip
guard(
    "P.commit-counts-all", "Commit is sent with the first submission", "C4 C4.2 A1",
    edit(P.submitted, "if record.closed and not record.queued:", "if sequence == 0:",
         "self._move(record, _COMMITTED)", "pass"),
)  # fmt: skip
guard(
    "P.ack-waits-for-handles", "an acknowledged transfer is freed with handles under way", "C5.1",
    edit(P.ack, "        self._move(record, _DRAINING)\n",
         "        self._move(record, _DRAINING)\n        record.chunks.clear()\n        record.unproven = 0\n"),
)  # fmt: skip
guard(
    "P.cancel-waits-for-handles", "a cancelled transfer retires with handles under way", "C5.1 C5.2",
    edit(P._drain, "if state is _READY]", "if state is not _COMPUTING]"),
)  # fmt: skip
guard(
    "P.drain-waits-for-device", "a cancelled transfer retires while the device still computes it", "C5.1 C5.3",
    edit(P._drain, "        record.engine = _Engine.SUSPENDING\n", """\
        record.engine = _Engine.DONE
        for sequence in [s for s, state in record.chunks.items() if state is _COMPUTING]:
            del record.chunks[sequence]
"""),
)  # fmt: skip
guard(
    "P.expired-is-outstanding", "a chunk past its deadline is over", "T8 C5.1 C5.2 C6.1",
    edit(P.completion, "after = _PINNED if target_quiet else _EXPIRED",
         "after = None if timed_out else _PINNED if target_quiet else _EXPIRED"),
)  # fmt: skip
guard(
    "P.late-terminal-counts", "the end of a chunk that was late is ignored", "T8 C5.1 C2.5 C6.1",
    edit(P.completion, "if state not in (_POSTED, _EXPIRED, _SENT, _PINNED)",
         "if state not in (_POSTED, _SENT, _PINNED)"),
)  # fmt: skip
guard(
    "P.cancel-by-transfer", "Cancel acts on the newest transfer, as a look-up by request id would find it",
    "C1.1 C1.2 C1.3 A1",
    edit(P.cancel, _RECORD, _NEWEST),
)  # fmt: skip
guard(
    "P.fails-loudly", "a failed chunk is not reported to C", "C6.3 C6.1 C6.7 T8",
    edit(P._fail, "    effects.append(Send(Failed(record.transfer, cause, missing[:MAX_MISSING], unmoved=unmoved)))\n", ""),
)  # fmt: skip
guard(
    "P.ordinal", "a repeated Prefill is done again", "C1.2 C7.1 C7.2 C7.4",
    edit(P.prefill, "if message.ordinal <= self._ordinal:", "if False:"),
)  # fmt: skip

# -- others ----------------------------------------------------------------------------------------------------------

add(
    "a-failure-that-proves-nothing-is-terminal", "a chunk that failed without proof of quiet is over", "C6.1 C5.1 C5.2",
    edit(P.completion, "after = _PINNED if target_quiet else _EXPIRED", "after = None if not timed_out else _EXPIRED"),
)  # fmt: skip
add(
    "sent-is-retired", "P says that it writes no more while the target is not known to be quiet", "C5.2 C6.1",
    edit(P._retire_if_quiet, "if record.freed and not record.chunks:", "if record.freed:"),
)  # fmt: skip
add(
    "a-quiet-source-is-a-quiet-target", "that a connection is down proves its targets quiet", "C6.4 C5.2",
    edit(P.peer_down, "None if record.acked else _SENT", "None"),
)  # fmt: skip
add(
    "a-failed-chunk-stops-nothing", "after a chunk has failed, further ones are submitted", "C6.1",
    edit(P._fail, "    self._drain(record, effects)\n", ""),
)  # fmt: skip
add(
    "stop-takes-new-work", "P takes a Prefill after Stop", "C6.2",
    edit(P.prefill, "if self._stopping:", "if False:"),
)  # fmt: skip
add(
    "stop-cancels-nothing", "Stop does not end what P works on", "C6.2 C6.6",
    edit(P.stop, "if record.phase is not _DRAINING:", "if False:"),
)  # fmt: skip
add(
    "nothing-is-said-to-be-fatal", "a stage that must not go on does not say so", "T8 C6.3",
    edit(P.fatal, ", Send(Fatal(cause))]", "]"),
)  # fmt: skip
add(
    "unproven-is-not-said", "P does not say which chunks it cannot prove", "C2.5 C6.7 C5.2 C6.1",
    edit(P._retire_if_quiet, "if record.chunks:\n", "if False:\n"), simulated=True,
)  # fmt: skip
