"""The coordinator machine, broken."""

from __future__ import annotations

from kvbaton.handoff.coordinator import Coordinator, _DeadlineQueue
from kvbaton.handoff.credits import Ledger
from kvbaton_conformance.mutants.mutant import Registry, edit

_machine = Registry("machine")
MUTANTS = _machine.found
guard, add = _machine.guard, _machine.add
C = Coordinator

_CANCEL_P = "if (phase is _PREFILLING or phase is _COMMITTED) and entry.p.status is _UP:"
_CANCEL_D = "if entry.d_out and entry.d.status is _UP:"
_WORD = "word = Release(transfer) if phase is _RESERVING else Cancel(transfer)"
_UNTOLD = "if phase is _RESERVING and entry.p_out:"
_LOST = "if entry.phase in _EXPOSED or (entry.phase is _RECEIVED and entry.d is peer):"

# -- the guards of the model -----------------------------------------------------------------------------------------

guard(
    "C.prefill-after-reserved", "P is told to compute together with D's Reserve, into blocks that nobody has promised",
    "C2.1 C5.2",
    edit(C._begin, "    self._set_deadline(entry, self._reserve)\n", """\
    p.ordinal += 1
    from kvbaton.reservation import Reservation
    blocks = tuple(range(d.ledger.capacity.blocks_for(len(request.prompt)) // d.ledger.capacity.planes))
    guess = Reservation(transfer, (blocks,) * d.ledger.capacity.planes, 0, 0)
    effects.append(SendTo(p.id, Prefill(transfer, p.ordinal, request, guess, d.id)))
    self._set_deadline(entry, self._reserve)
"""),
    edit(C._reserved, "    effects.append(SendTo(p.id, prefill))\n", ""),
)  # fmt: skip
guard(
    "C.ordinal-when-sent", "Prefill is numbered when its request was taken, not when it is sent", "C1.2 C2.1 C6.7",
    edit(C._reserved, "p.ordinal += 1  #", "p.ordinal = entry.waiting.age  #"),
)  # fmt: skip
guard(
    "C.ack-on-received", "P is acknowledged when D's scheduler has activated the request", "C4.1",
    edit(C._received, "        effects.append(SendTo(entry.p.id, Ack(entry.transfer)))  # C4.1\n", ""),
    edit(C._activated, "entry.activated = True\n",
         "entry.activated = True\n        effects.append(SendTo(entry.p.id, Ack(entry.transfer)))\n"),
)  # fmt: skip
guard(
    "C.rejected-returns-credit", "a refusal by D does not give D's credit back", "C2.5 C2.6",
    edit(C._rejected, "            self._give_back_d(entry)\n            self._end(", "            self._end(",
         "        self._give_back_d(entry)\n        self._give_back_p(entry)\n", "        self._give_back_p(entry)\n"),
)  # fmt: skip
guard(
    "C.refuses-what-nobody-serves", "a waiting request waits on although no stage is left that could serve it",
    "C6.1 C6.4 C6.7 C2.6",
    edit(C._refuse_unserved, "if not self._served(w)]", "if False]"),
)  # fmt: skip
guard(
    "C.sever-is-one-way", "a connection that D has fenced also gives P's credit back", "C2.5 C6.4",
    edit(C._peer_down, "    if sender is d and message.quiet and d.status is _UP:\n", """\
    for e in pair if sender is d and message.quiet else ():
        if e.p_out:
            self._give_back_p(e)
    if sender is d and message.quiet and d.status is _UP:
"""),
)  # fmt: skip
guard(
    "C.reserved-only-while-reserving", "a Reserved that comes after the cancel starts P all the same",
    "C2.5 C5.2 C2.1 C7.4 C6.1",
    edit(C._reserved, "if entry.phase is not _RESERVING:\n", "if entry.phase is not _RESERVING and not _is_ended:\n",
         "    if entry.phase", "    _is_ended = entry.phase is _ENDED\n    if entry.phase",
         "self._move(entry, _PREFILLING)", "_is_ended or self._move(entry, _PREFILLING)"),
)  # fmt: skip
guard(
    "C.commit-only-while-prefilling", "a Commit that comes after the end is progress", "C7.4 C1.1 C6.1",
    edit(C._commit, "elif entry.phase is _PREFILLING:", "elif entry.phase is _PREFILLING or entry.phase is _ENDED:",
         "self._move(entry, _COMMITTED)", "entry.phase = _COMMITTED"),
)  # fmt: skip
guard(
    "C.received-only-while-committed", "a Received that comes after the end is progress", "C7.4 C1.1 C6.1",
    edit(C._received, "if entry.phase is _COMMITTED:", "if entry.phase is _COMMITTED or entry.phase is _ENDED:",
         "self._move(entry, _RECEIVED)", "entry.phase = _RECEIVED"),
)  # fmt: skip
guard(
    "C.outcome-is-final", "a Finished that comes after the end tells the caller a second outcome", "C1.1 C7.1 C7.4",
    edit(C._finished, "    else:\n", """\
    else:
        effects.append(Tell(entry.waiting.key, entry.transfer, Ended(_FINISHED, message.reason, "")))
"""),
)  # fmt: skip
guard(
    "C.outcome-by-generation", "Finished ends whatever request has the id now", "C1.1 C1.2 C1.3",
    edit(C._finished, "    if entry.phase is _RECEIVED:\n", """\
    holder = self._live.get(entry.waiting.key)
    entry = holder if isinstance(holder, _Entry) else entry
    if entry.phase is not _ENDED:
"""),
)  # fmt: skip
guard(
    "C.reuse-needs-terminal", "an id whose request is live is taken again", "C1.1",
    edit(C.submit, "if key in self._live:", "if False:"),
)  # fmt: skip
guard(
    "C.cancel-tells-p", "P is not told that a transfer has ended", "C2.5 C5.1 C6.1 C6.7 C6.3",
    edit(C._wind_up, _CANCEL_P, "if False:"),
)  # fmt: skip
guard(
    "C.cancel-tells-d", "D is not told that a transfer has ended", "C2.5 C5.2 C6.1 C6.7 C6.3",
    edit(C._wind_up, _CANCEL_D, "if False:"),
)  # fmt: skip
guard(
    "C.release-waits-for-p", "D is released at once, while P still writes", "C5.2", edit(C._wind_up, _WORD, "word = Release(transfer)"),
)  # fmt: skip
guard(
    "C.release-when-p-untold", "a D whose P was never told is cancelled and waits for a release", "C5.2 C2.5 C6.1",
    edit(C._wind_up, _WORD, "word = Cancel(transfer)"),
)  # fmt: skip
guard(
    "C.release-after-p", "D is not released when P has retired", "C2.5 C5.2",
    edit(C._retired_p, "    self._p_over(entry, effects)\n", "    self._give_back_p(entry)\n    self._forget(entry)\n"),
)  # fmt: skip
guard(
    "C.credit-p-waits", "P's credit is given out again when a request is cancelled", "C2.5",
    edit(C._wind_up, f"    {_UNTOLD}\n", f"""\
    if phase is not _RESERVING and ending is not _FINISHED and entry.p_out:
        entry.p.ledger.give_back(transfer)
        self._freed = True
    {_UNTOLD}
"""),
)  # fmt: skip
guard(
    "C.credit-d-waits", "D's credit is given out again when a request is cancelled", "C2.5",
    edit(C._wind_up, f"    {_UNTOLD}\n", f"""\
    if ending is not _FINISHED and entry.d_out:
        entry.d.ledger.give_back(transfer)
        self._freed = True
    {_UNTOLD}
"""),
)  # fmt: skip
guard(
    "C.credit-p-once", "a second Retired of P frees another slot", "C2.5 C7.1",
    edit(C._retired_p, "entry.p.ledger.give_back(entry.transfer)", "entry.p.ledger.slots_free += 1"),
)  # fmt: skip
guard(
    "C.credit-d-once", "a second Retired of D frees another slot", "C2.5 C7.1",
    edit(C._retired_d, "entry.d.ledger.give_back(entry.transfer)", "entry.d.ledger.slots_free += 1"),
)  # fmt: skip
guard(
    "C.untold-p-credit", "P's credit stays out when P was never told", "C2.5", edit(C._wind_up, _UNTOLD, "if False:"),
)  # fmt: skip
guard(
    "C.lost-is-no-fence", "a P whose channel is gone counts as proven quiet", "C6.4 C5.2 C2.5",
    edit(C._lose, "    self._refuse_unserved(effects)\n", """\
    for entry in tuple(peer.entries.values()):
        if entry.p is peer and entry.p_out:
            self._p_over(entry, effects)
    self._refuse_unserved(effects)
"""),
)  # fmt: skip
guard(
    "C.lost-p-ends", "the requests of a lost P go on waiting for it", "C6.4 C6.1 C6.3 C6.7",
    edit(C._lose, _LOST, "if entry.d is peer and (entry.phase in _EXPOSED or entry.phase is _RECEIVED):"),
)  # fmt: skip
guard(
    "C.lost-d-ends", "the requests of a lost D go on waiting for it", "C6.4 C6.1 C6.3 C6.7",
    edit(C._lose, _LOST, "if entry.p is peer and entry.phase in _EXPOSED:"),
)  # fmt: skip
guard(
    "C.fence-releases", "D is not released when its P's process was joined", "C5.2 C6.4 C2.5",
    edit(C.peer_joined, "self._p_over(entry, effects)", "self._give_back_p(entry), self._forget(entry)"),
)  # fmt: skip
guard(
    "C.disconnect-before-release", "D is released before it is told to close its end of a dead P's connection",
    "C6.4 C5.2",
    edit(C.peer_joined, "    effects += [SendTo", "    closing = [SendTo",
         "    self._forget_peer(found)\n", "    effects += closing\n    self._forget_peer(found)\n"),
)  # fmt: skip
guard(
    "C.fence-returns-credits", "a joined D's credits stay out", "C2.5 C6.4",
    edit(C.peer_joined, "            if entry.d_out:\n                self._d_over(entry)\n", ""),
)  # fmt: skip
guard(
    "C.stop-joins-senders", "receivers are stopped before every sender was joined", "C6.2",
    edit(C._stop_receivers, "if self._stopping != 1 or not all(_over(p) for p in self._prefills.values()):",
         "if self._stopping != 1:"),
)  # fmt: skip
guard(
    "C.fatal-ends-live", "a fatal shutdown leaves the live requests alone", "C6.2",
    edit(C.fatal, "self._end(found, _FAILED, cause, effects)", "pass"),
)  # fmt: skip

# -- others ----------------------------------------------------------------------------------------------------------

add(
    "a-stranger-is-heard", "words about a transfer count from a stage that has no part in it", "C1.4",
    edit(C.handle, "elif sender is entry.p:", "elif sender.role is Role.PREFILL:",
         "if sender is entry.d:", "if sender.role is Role.DECODE:"),
)  # fmt: skip
add(
    "a-conflicting-commit-counts", "a second Commit with another count is taken", "C7.2",
    edit(C._commit, "count <= 0 or (entry.count and entry.count != count)", "count <= 0"),
)  # fmt: skip
add(
    "a-commit-of-nothing-counts", "a Commit of no chunks is taken by C", "C7.2 C9.3",
    edit(C._commit, "if count <= 0 or (entry.count", "if (entry.count"),
)  # fmt: skip
add(
    "output-is-repeated", "a repeated Output is passed on to the caller again", "C7.1 A1",
    edit(C._output, "elif entry.phase is _ENDED or message.position < entry.position:", "elif entry.phase is _ENDED:",
         "elif message.position > entry.position:", "elif False:"),
)  # fmt: skip
add(
    "nobody-is-ever-passed-over-too-often", "small requests pass a large one without bound", "C2.6",
    edit(C._place_one, "if waiting.passes >= self._limits.passes:", "if False:"),
)  # fmt: skip
add(
    "nobody-is-ever-passed", "a request that fits waits behind one that does not", "C2.6",
    edit(C._place_one, "if waiting.passes >= self._limits.passes:", "if True:"),
)  # fmt: skip
add(
    "a-refused-request-loses-its-place", "a request that a stage refused waits again at the end of the queue", "C2.6",
    edit(C._wait_again, "    bisect.insort(self._queue, waiting, key=_age)\n",
         "    self._age += 1\n    waiting.age = self._age\n    self._queue.append(waiting)\n"),
)  # fmt: skip
add(
    "a-refusal-is-final", "a request that a stage refused in spite of credits is not tried again", "C2.6",
    edit(C._rejected, "again = message.retry and", "again = False and"),
)  # fmt: skip
add(
    "credits-do-not-budget-growth", "D's credit is the prompt's, not the worst case", "C2.4",
    edit(C._begin, "d.ledger.capacity.blocks_for(request.max_length)",
         "d.ledger.capacity.blocks_for(len(request.prompt))"),
)  # fmt: skip
add(
    "credits-of-blocks-are-lost", "a credit that comes back leaves a block out", "C2.5",
    edit(Ledger.give_back, "self.blocks_free += credit.blocks", "self.blocks_free += credit.blocks - 1"),
)  # fmt: skip
add(
    "no-deadline-passes", "deadlines of phases are set and never act", "C6.7",
    edit(_DeadlineQueue.due, "return entry if deadline <= now else None", "return None"),
)  # fmt: skip
add(
    "the-reserve-deadline-is-missing", "a D that never answers a Reserve holds its request for ever", "C6.7 C6.3",
    edit(C._begin, "    self._set_deadline(entry, self._reserve)\n", ""),
)  # fmt: skip
add(
    "the-receipts-deadline-is-missing", "receipts that never come are waited for without end", "C6.7 C6.3",
    edit(C._commit, "self._set_deadline(entry, self._receipts)", "self._set_deadline(entry, None)"),
)  # fmt: skip
add(
    "who-hangs-is-not-asked", "a P that waits for a D that hangs is lost in its place", "C6.7 C6.4",
    edit(C._blame, "silent = [peer for peer in stages if entry.asked.get(peer.id) == peer.words]", "silent = []"),
)  # fmt: skip
add(
    "a-broken-connection-is-left", "two stages that live and lost their connection stay apart for ever", "C6.2 C6.4",
    edit(C._broke, "if p.status is _UP and d.status is _UP and not (p.leaving or d.leaving):", "if False:"), simulated=True,
)  # fmt: skip
add(
    "a-connection-is-given-up-in-silence", "nobody is told that a connection is mended no more where others serve",
    "C6.3 C6.2",
    edit(C._mend, "if not broken.hopeless:", "if self._needed(p, d) and not broken.hopeless:"),
)  # fmt: skip
add(
    "unproven-stays-with-c", "D is not asked for the receipts that P waits for", "C2.5 C6.7 C5.2 C6.1",
    edit(C._unproven_p, "effects.append(SendTo(entry.d.id, message))", "pass"), simulated=True,
)  # fmt: skip
add(
    "the-drain-deadline-is-missing", "a stage that does not retire is waited for without end", "C6.7",
    edit(C._wind_up, "    self._set_deadline(entry, self._drain)\n", "    self._set_deadline(entry, None)\n"),
)  # fmt: skip
add(
    "progress-renews-nothing", "a long prefill fails by the deadline of its start", "C6.7",
    edit(C._progress, "self._set_deadline(entry, self._idle)", "pass"),
)  # fmt: skip
add(
    "a-trespasser-is-kept", "a writer that wrote what nobody reserved for goes on", "C7.2",
    edit(C._failed_d, "if message.culprit is not None and", "if False and"),
)  # fmt: skip
add(
    "the-first-cause-is-lost", "a request that failed says nothing of why", "C6.3",
    edit(C._failed_p, 'f"{entry.p.id}: {message.cause}"', '"failed"'),
    edit(C._failed_d, 'f"{entry.d.id}: {message.cause}{_missing(message)}"', '"failed"'),
)  # fmt: skip
add(
    "an-older-start-replaces-a-newer-one", "the Hello of an earlier start of a stage takes the place of the present",
    "C1.4",
    edit(C._hello, "if old.id.epoch > peer.epoch:", "if False:"),
)  # fmt: skip
add(
    "finished-transfers-are-kept", "an entry stays when both credits are back", "T12 C1.2 C2.5",
    edit(C._forget, "    del self._entries[entry.transfer]\n", ""),
)  # fmt: skip
add(
    "a-lost-peer-is-used-again", "a stage that was lost gets new requests", "C6.4",
    edit(C._lose, "    peer.status = _LOST\n", "    kill = False\n"),
)  # fmt: skip
add(
    "an-early-word-is-only-ignored", "a word before its time is taken for a late one", "C7.4",
    edit(C._received, 'self._violated(entry, entry.d, "Received before its time", effects)',
         "self._late(entry, message, effects)"),
    edit(C._output, 'self._violated(entry, entry.d, "Output before its time", effects)',
         "self._late(entry, message, effects)"),
)  # fmt: skip
add(
    "a-lease-ends-by-age", "a transfer is given up after an hour, whatever its deadlines say", "C8.5",
    edit(_DeadlineQueue.due, "return entry if deadline <= now else None",
         "return entry if min(deadline, 1000.0 + 3600.0) <= now else None"),
    edit(C.next_deadline, "    times = [", "    times = [1000.0 + 3600.0] if any(q.entries for q in self._queues) else []\n"
         "    times += ["),
)  # fmt: skip
