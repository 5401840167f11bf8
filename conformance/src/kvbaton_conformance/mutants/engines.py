"""The scripted engine, broken: what a stage engine must not do."""

from __future__ import annotations

from kvbaton_conformance.mutants.mutant import Registry, edit
from kvbaton_conformance.scripted import ScriptedEngine

_engine = Registry("engine")
MUTANTS = _engine.found
add = _engine.add
E = ScriptedEngine

add("release-forgets-blocks", "released blocks stay in use", "C8.4 C2.5",
    edit(E.release_transfer, "            self._disown(block)\n", "            pass\n"))  # fmt: skip
add("growth-is-promised-for-ever", "the growth budget of a released transfer is not given back", "C8.4 C2.5",
    edit(E.release_transfer, "    self._promised -= sequence.budget\n", ""))  # fmt: skip
add("a-final-slot-is-lost", "the final slot of a released transfer is not given back", "C8.4 C2.5",
    edit(E.release_transfer, "        self._give_slot(sequence)\n", "        pass\n"))  # fmt: skip
add("suspension-stops-nothing", "a suspended request is computed on", "C5.3 C8.2",
    edit(E.suspend_transfer, "            self._queue.remove(transfer)\n", "            pass\n"))  # fmt: skip
add("suspension-does-not-wait", "a suspended transfer is said to be quiet while its device works", "C5.3 C5.1",
    edit(E.suspend_transfer, "return self.device.event()", "return None"))  # fmt: skip
add("suspension-frees", "a suspended transfer's blocks are free at once", "C5.2 C5.3 C8.1",
    edit(E.suspend_transfer, "        sequence.suspended = True\n",
         "        sequence.suspended = True\n        for table in sequence.tables:\n            for block in table:\n"
         "                self._disown(block)\n            table.clear()\n"))  # fmt: skip
add("an-import-computes-at-once", "an imported request gets a compute slot past ordinary admission", "C2.3 C8.3",
    edit(E.accept_import, "    self._queue.append(transfer)\n",
         "    self._queue.appendleft(transfer)\n    sequence.active = True\n    self._tell.activated(transfer)\n"))  # fmt: skip
add("an-import-believes-its-reservation", "validity after an import is the reserved prefix, not the prompt", "C3.1 A1",
    edit(E.accept_import, "sequence.valid = valid", "sequence.valid = sequence.shared"))  # fmt: skip
add("the-final-payload-is-not-bound", "the final payload is read from another slot", "C3.4 A1",
    edit(E.accept_import, "sequence.final = self._final(sequence.slot).copy()",
         "sequence.final = self._final((sequence.slot + 1) % self.layout.final_slots).copy()"))  # fmt: skip
add("prefixes-are-published-before-they-are-valid", "a reservation's blocks can be matched before the import",
    "C3.1 C8.3 A1",
    edit(E.reserve_transfer, "    self._sequences[admission.transfer] = sequence\n",
         "    self._sequences[admission.transfer] = sequence\n    self._publish(sequence)\n"))  # fmt: skip
add("a-range-is-reported-before-it-is-final", "a range is reported one token further than it is computed", "C3.7 A1",
    edit(E._prefill_step, "                end,\n                tables", "                min(end + 1, total),\n                tables"))  # fmt: skip
add("events-come-too-early", "the device event of a range is one that is done already", "C4 C5.1",
    edit(E._prefill_step, "self.device.event(),", "None,"))  # fmt: skip
add("p-samples", "the prefill engine chooses a token", "A2",
    edit(E._prefill_step, "            self._queue.remove(transfer)\n            self._publish(sequence)\n",
         "            self._queue.remove(transfer)\n            self._publish(sequence)\n            self.sampled += 1\n"))  # fmt: skip
add("activation-is-not-told", "an admitted request is never activated", "C4 C2.3",
    edit(E._decode_step, "            self._tell.activated(transfer)\n", "            pass\n"))  # fmt: skip
add("an-unknown-transfer-is-an-error", "a call about a transfer that is gone raises", "C1.2",
    edit(E.release_transfer, "        return\n    if transfer in self._queue",
         "        raise KeyError(transfer)\n    if transfer in self._queue"),
    edit(E.suspend_transfer, "        return None\n    if not", "        raise KeyError(transfer)\n    if not"))  # fmt: skip
add("blocks-are-promised-twice", "growth of one request is given to another", "C2.4 C8.4 C6.3",
    edit(E._available, "return len(self._free) + unowned - self._promised", "return len(self._free) + unowned"))  # fmt: skip
add("reserved-before-the-device-is-quiet", "memory is promised to a writer while D's own device may use it", "C2.7",
    edit(E.reserve_transfer, "event = self.device.event() if self.device.pending() else None", "event = None"))  # fmt: skip
add("a-fault-is-an-exception", "a request that cannot be computed is an exception of the step", "C6.3",
    edit(E._prefill_step, 'outputs.append(StepOutput(transfer, error=RuntimeError("scripted: compute fails")))',
         'raise RuntimeError("scripted: compute fails")'),
    edit(E._decode_step, 'outputs.append(StepOutput(transfer, error=RuntimeError("scripted: decode fails")))',
         'raise RuntimeError("scripted: decode fails")'))  # fmt: skip
add("the-figures-do-not-add-up", "cached blocks that are in use are counted twice", "C8.4",
    edit(E.statistics, "for block in self._cached_blocks if not self._owners.get(block))", "for block in self._cached_blocks)"))  # fmt: skip
add("a-suspended-transfer-is-imported", "an import of a transfer that was suspended makes it run", "C1.3",
    edit(E.accept_import, "if sequence is None or sequence.suspended:", "if sequence is None:"))  # fmt: skip
add("the-final-slot-is-kept", "the final slot is held until the release", "C4 C2.5",
    edit(E.accept_import, "    self._give_slot(sequence)\n", ""))  # fmt: skip
add("leased-blocks-are-evicted", "blocks of a reservation count as free", "C8.1 C5.2",
    edit(E.reserve_transfer, "    self._sequences[admission.transfer] = sequence\n",
         "    self._sequences[admission.transfer] = sequence\n    if self.role is Role.DECODE:\n"
         "        self._free.extendleft(sequence.tables[0][-1:])\n"))  # fmt: skip
add("released-compute-releases-all", "the end of compute gives P's blocks away", "C5.1 C8.1",
    edit(E.release_transfer_compute,
         '"""The scripted P holds no runner state: its slot is free once the last range was computed."""',
         "self.release_transfer(transfer)"))  # fmt: skip
add("the-roles-differ", "D's cache has another block size", "C3.5",
    edit(E.__init__, "block_tokens=s.block_tokens,", "block_tokens=s.block_tokens + (role is Role.DECODE),"))  # fmt: skip
add("the-geometry-lies-outside-of-the-region", "the geometry has more blocks than the region holds", "C3.6 T1",
    edit(E.__init__, "blocks=s.blocks) for p", "blocks=s.blocks + 1) for p"))  # fmt: skip
add("the-transports-memory-is-not-used", "memory is of the engine's own, whatever the transport allocates", "T1",
    edit(E.regions, "make = allocate or device_memory.allocate", "make = device_memory.allocate"))  # fmt: skip
add("p-does-not-pause", "P computes although it is asked not to", "T6",
    edit(E._runnable, "if self.role is Role.PREFILL:", "if False:"))  # fmt: skip
add("p-has-something-for-the-caller", "P's steps produce outputs", "A2",
    edit(E._prefill_step, "        sequence.reported = end\n",
         "        sequence.reported = end\n        outputs.append(StepOutput(transfer, (1,), (1,)))\n"))  # fmt: skip
add("a-range-lies-outside", "the tables of a range name blocks that do not exist", "C3.6",
    edit(E._prefill_step, "astray = self.layout.blocks if", "astray = self.layout.blocks if True or"))  # fmt: skip
add("ranges-overlap", "a range begins before the end of the one before it", "C3.2",
    edit(E._prefill_step, "                sequence.reported,\n", "                max(sequence.reported - 1, 0),\n"))  # fmt: skip
add("a-cached-prefix-is-not-reported", "P reports only what it has computed", "C3.3 C3.2",
    edit(E._prefill_step, "                sequence.reported,\n", "                start,\n"))  # fmt: skip
add("a-reservation-is-too-short", "a reservation has a block too few", "C3.6",
    edit(E._tell_reserved, "tuple(tuple(table) for table in sequence.tables)",
         "tuple(tuple(table[:-1]) for table in sequence.tables)"))  # fmt: skip
add("a-reservation-is-queued", "a reservation is computed before it is imported", "C2.3 C8.3",
    edit(E._tell_reserved, "    tables = ", "    self._queue.append(sequence.admission.transfer)\n    tables = "))  # fmt: skip
add("a-reservation-is-cleared-late", "blocks are zeroed after they were promised", "C2.7 C2.2 C5.2",
    edit(E._tell_reserved, "    self._tell.reserved(", "    self._late = getattr(self, \"_late\", ()) + tuple(sequence.tables[0][-1:])\n"
         "    self._tell.reserved("),
    edit(E.step, "    self._say_reserved()\n", "    self._say_reserved()\n    for block in getattr(self, \"_late\", ()):\n"
         "        self._block(block)[: self._used_bytes] = 0\n    self._late = ()\n"))  # fmt: skip
add("a-full-engine-says-never", "what does not fit now is refused for good", "C2.6",
    edit(E.reserve_transfer, 'self._tell.refused(admission.transfer, "no room now", True)',
         'self._tell.refused(admission.transfer, "no room now", False)'))  # fmt: skip
add("what-never-fits-may-ask-again", "what can never fit is refused for now", "C2.6",
    edit(E.reserve_transfer, 'self._tell.refused(admission.transfer, f"{growth} tokens never fit", False)',
         'self._tell.refused(admission.transfer, f"{growth} tokens never fit", True)'))  # fmt: skip
