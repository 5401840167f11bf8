"""The stages that join machine, connector and engine, broken; and what they plan."""

from __future__ import annotations

from kvbaton.stage.decode import DecodeStage
from kvbaton.stage.engine_loop import EngineLoop
from kvbaton.stage.planner import ChunkPlanner
from kvbaton.stage.prefill import PrefillStage
from kvbaton.stage.stage import Stage
from kvbaton_conformance.mutants.mutant import Registry, edit

_stage = Registry("stage")
MUTANTS = _stage.found
guard, add = _stage.guard, _stage.add
P, D = PrefillStage, DecodeStage

# -- the guards of the model that live in a stage --------------------------------------------------------------------

guard(
    "P.submit-after-source-ready", "a chunk is submitted although the device has not finished its source", "C4 C5.1 A1",
    edit(P._advance_device, "if event is not None and not event.query():", "if False:"),
)  # fmt: skip
guard(
    "P.stop-drains", "a stage that is told to stop exits with transfers under way", "C6.2 T10 C5.4 C6.6",
    edit(Stage._end_if_done,
         "drained = self.machine.drained and not self._releasing and not self._quiet and self._settled()",
         "drained = True"),
)  # fmt: skip

# -- others ----------------------------------------------------------------------------------------------------------

add("retired-before-the-engine-has-released", "RETIRED is said while the engine still holds the blocks", "C4 C2.5",
    edit(Stage._send, "if transfer in self._releasing:", "if False:"))  # fmt: skip
add("suspended-before-the-device-is-quiet", "a suspended transfer is freed while its device work runs", "C5.1 C5.3 C2.7",
    edit(Stage._on_report, "if quiet is None or quiet.query():", "if True:"))  # fmt: skip
add("a-stranger-endpoint-stops-the-stage", "an endpoint that cannot be decoded ends the pump", "C9.3 T2",
    edit(Stage._connect, "    except KvbatonError as error:\n        self._counts[\"endpoint_malformed\"]",
         "    except ZeroDivisionError as error:\n        self._counts[\"endpoint_malformed\"]"))  # fmt: skip
add("fences-are-not-passed-on", "the connector is not told that a peer's process was joined", "C6.4 T8",
    edit(Stage._carry_out, "            self.guard.fenced(peer)\n            self.guard.disconnect(peer)\n",
         "            self.guard.disconnect(peer)\n"))  # fmt: skip
add("ends-are-not-closed", "the connection to a joined peer is not closed", "C6.4 C5.2",
    edit(Stage._carry_out, "            self.guard.fenced(peer)\n            self.guard.disconnect(peer)\n",
         "            pass\n"))  # fmt: skip
add("grants-are-not-given-back", "the transport is not told that a transfer is over", "T12 C2.5",
    edit(Stage._carry_out, "            self.guard.forget(transfer)\n", ""))  # fmt: skip
add("acknowledgements-are-not-passed-on", "the source's connector is not told that D has received", "C4.1 T12",
    edit(P._on_role_effect, "            self.guard.acknowledge(transfer)\n", "            pass\n"))  # fmt: skip
add("cancels-are-not-passed-on", "the transport goes on with the queued chunks of a cancelled transfer", "T9",
    edit(P._on_role_effect, "            self.guard.cancel(transfer)\n", ""))  # fmt: skip
add("one-peer-blocks-all", "chunks of all peers wait in one line", "T6",
    edit(P._submit_ready, "        peers = [peer for peer in peers if self._submit_next(peer)]\n",
         "        peers = peers if self._submit_next(peers[0]) else []\n"))  # fmt: skip
add("back-pressure-is-not-passed-on", "the engine computes on although nothing is sent", "T6",
    edit(P.can_schedule, "if state is None or state.lane.backlog <= self._backlog_limit:", "if True:"))  # fmt: skip
add("a-backlog-leaks", "chunks of cancelled transfers count as backlog for ever", "T6 T12",
    edit(P._drop_chunks, "        state.lane.backlog -= sum(chunk.nbytes for chunk in state.chunks.values())\n", ""))  # fmt: skip
add("revocations-are-not-tried", "D waits for its writer although the transport could fence the transfer", "C5.2 C6.4",
    edit(D._on_role_effect, "if self.guard.capabilities.revocable:", "if False:"))  # fmt: skip
add("a-revocation-is-taken-for-granted", "D frees although the transport has not promised it", "C5.2",
    edit(D._revoke, "elif attempts.due() and self.guard.revoke(transfer):",
         "elif attempts.due() and (self.guard.revoke(transfer) or True):"))  # fmt: skip
add("granted-too-little", "D grants the prompt's KV without the final payload", "C2.2 C5.2",
    edit(D._granted, "return kv.concat(self._geometry.final_segment(reservation.final_slot))", "return kv"))  # fmt: skip
add("tokens-are-lost", "the last output of a request is not sent", "A1 C7.1",
    edit(D._on_output, "    if output.finish_reason is not None:\n        effects += self",
         "    if output.finish_reason is not None:\n        effects = []\n        effects += self"))  # fmt: skip
add("a-stage-outlives-its-coordinator", "a stage whose coordinator is gone goes on", "C6.6",
    edit(Stage.advance, "if self.channel.lost is not None and not self._orphaned:", "if False:"))  # fmt: skip
add("the-shutdown-deadline-is-missing", "a stage that cannot drain does not exit", "C6.7 C6.6",
    edit(Stage._end_if_done, "late = self._clock() >= self._stop_by", "late = False"))  # fmt: skip
add("what-is-held-is-not-named", "a stage that exits with memory held does not say so", "C6.3 C6.6 C6.7",
    edit(Stage._end_if_done, "status = 0 if drained and self._fatal is None else 1", "status = 0"))  # fmt: skip
add("a-full-quarantine-stops-nobody", "a stage whose quarantine is full goes on", "T8",
    edit(Stage._on_progress, "            self._die(str(fault))\n", "            pass\n"))  # fmt: skip
add("a-control-call-is-not-answered", "a generic call gets no reply", "C9.2",
    edit(Stage._call, "            self._reply(call, {\"healthy\": healthy, \"step_seconds\": self.engine_age()})\n",
         "            pass\n"))  # fmt: skip
add("an-unknown-control-call-is-not-answered", "a call that a stage does not know gets no error", "C9.2",
    edit(Stage._call, "            self._reply(call, None, f\"C9.2: no method {method!r}; there are {known}\")\n",
         "            pass\n"))  # fmt: skip
add("a-failed-import-is-forgotten", "an import that raises is reported to nobody", "C6.3 C6.1",
    edit(EngineLoop._obey, "            self._report(CommandFailed(subject, error))\n", "            pass\n"))  # fmt: skip
add("a-step-that-raises-is-forgotten", "a step that raises is reported to nobody", "C6.3 C6.1",
    edit(EngineLoop._step, "self._break(error)", "pass"))  # fmt: skip
add("an-import-is-not-checked", "a queued import is done whatever has become of the transfer", "C1.3 C5.3",
    edit(EngineLoop._obey, "if begin(transfer):  # C1.3", "if begin(transfer) or True:"))  # fmt: skip

# -- planning --------------------------------------------------------------------------------------------------------

add("the-final-payload-is-not-sent", "the hidden state stays on P", "C3.4 A1",
    edit(ChunkPlanner.plan, "planned = coalesce(*joined(planned, payload))", "pass"))  # fmt: skip
add("a-cached-prompt-sends-nothing", "a prompt that D has whole gets no chunk", "C3.4 A1",
    edit(ChunkPlanner.plan, "if computed.last and not batches:", "if False:"))  # fmt: skip
add("ds-prefix-is-sent-again", "D's valid prefix is overwritten", "C3.3 C3.2",
    edit(ChunkPlanner.begin, "payload, valid)", "payload, 0)"))  # fmt: skip
add("the-unused-tail-is-sent", "the tail of a partial block travels", "C3.1 C3.2 C5.2",
    edit(ChunkPlanner.plan, "    if end > start:\n",
         "    if computed.last and end > start:\n"
         "        end = -(-end // self._geometry.block_tokens) * self._geometry.block_tokens\n    if end > start:\n"))  # fmt: skip
add("a-range-is-sent-twice", "the last block is written by two chunks", "C3.2",
    edit(ChunkPlanner.plan, "    plan.sent = end\n",
         "    plan.sent = max(end - self._geometry.block_tokens, 0) if not computed.last else end\n"))  # fmt: skip
add("the-first-block-is-forgotten", "the first block of a request is never sent", "C3.2 A1",
    edit(ChunkPlanner.plan, "start, end = ready_range(plan.sent, computed.end, self._geometry.block_tokens, computed.last)",
         "start, end = ready_range(plan.sent, computed.end, self._geometry.block_tokens, computed.last)\n"
         "    start = start or min(end, self._geometry.block_tokens)"))  # fmt: skip
add("limits-are-not-kept", "chunks are larger than the transport takes", "T13 C6.3 C3.2",
    edit(ChunkPlanner.plan, "limits.max_bytes, limits.max_segments, alignment=limits.alignment)",
         "1 << 40, 1 << 40, alignment=limits.alignment)"))  # fmt: skip
add("plans-are-kept", "what was planned for a transfer stays", "T12",
    edit(ChunkPlanner.forget, "self._plans.pop(transfer, None)", "pass"))  # fmt: skip
