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
add("blocks-are-promised-twice", "growth of one request is given to another", "C2.4 C8.4",
    edit(E._available, "return len(self._free) + unowned - self._promised", "return len(self._free) + unowned"))  # fmt: skip
