"""Core's guard, broken."""

from __future__ import annotations

from kvbaton.guard import GuardedConnector
from kvbaton_conformance.mutants.mutant import Registry, edit

_guard = Registry("guard")
MUTANTS = _guard.found
add = _guard.add
G = GuardedConnector

add("a-budget-leaks-on-failure", "a chunk that did not end as DONE keeps its budget", "T6",
    edit(G._prove, "        self._give_back(flight)\n        flight.peer.flights -= 1",
         "        if outcome is Outcome.DONE:\n            self._give_back(flight)\n        flight.peer.flights -= 1"))  # fmt: skip
add("a-full-budget-takes-one-more", "the byte budget is not looked at", "T6",
    edit(G._room, "if nbytes > limits.inflight_bytes // sharing or", "if"))  # fmt: skip
add("a-peer-may-have-any-number-of-chunks", "receipts of a frozen peer pile up", "T6",
    edit(G._room, "if peer.chunks >= limits.unreceipted_chunks:", "if False:"))  # fmt: skip
add("peers-do-not-share-the-budget", "one frozen peer takes the budget of all", "T6",
    edit(G._room, "sharing = sum(", "sharing = 1 or sum("))  # fmt: skip
add("a-second-completion-passes", "a chunk may end twice", "T5",
    edit(G._on_completions, "elif flight.completed:", "elif False:",
         "flight = posted.get(key) or lingering.get(key)",
         "flight = posted.get(key) or lingering.get(key)\n"
         "            if flight is None and outcome is not Outcome.TIMED_OUT:\n"
         "                self._news.completions.append(completion)"))  # fmt: skip
add("a-deadline-passes-in-silence", "a chunk past its deadline is not reported", "T8",
    edit(G._expire, "if flight.deadline > now:", "if True:"), base="reference")  # fmt: skip
add("a-deadline-is-reported-again-and-again", "a late chunk is reported at each poll", "T8",
    edit(G.poll, "    now = self._clock()\n",
         "    now = self._clock()\n    for flight in self._lingering.values():\n        if flight.quarantined and not flight.completed:\n"
         "            self._news.completions.append(\n"
         "                Completion(flight.transfer, flight.sequence, Outcome.TIMED_OUT, False, False)\n            )\n"), base="reference")  # fmt: skip
add("late-is-quiet", "memory of a late chunk is free at its deadline", "T8 C6.1",
    edit(G._expire, "Outcome.TIMED_OUT, False, False, TransportError(", "Outcome.TIMED_OUT, True, True, TransportError("), base="reference")  # fmt: skip
add("the-quarantine-is-not-bounded", "any amount may be in quarantine", "T8",
    edit(G.quarantine_full, "return self._quarantined_bytes > self._limits.quarantine_bytes", "return False"), base="reference")  # fmt: skip
add("the-quarantine-is-not-counted", "what is late is not counted", "T8",
    edit(G._linger, "self._quarantined_bytes += flight.nbytes", "pass"), base="reference")  # fmt: skip
add("the-quarantine-never-shrinks", "what became quiet stays in quarantine", "T8",
    edit(G._release_quarantine, "self._quarantined_bytes -= flight.nbytes", "pass"), base="reference")  # fmt: skip
add("an-older-epoch-may-connect", "an endpoint of an earlier start is accepted", "C1.4",
    edit(G.connect, "if known is not None and id.epoch < known.epoch:", "if False:"))  # fmt: skip
add("a-disconnected-epoch-comes-back", "a peer that was disconnected may connect again", "C6.4",
    edit(G.connect, "if peer.state is PeerState.CLOSING or peer.was_up:", "if False:"))  # fmt: skip
add("an-old-epoch-is-still-heard", "receipts of a replaced epoch count", "C1.4",
    edit(G._on_receipts, "if current.get(id.name, id) != id:", "if False:",
         "elif peer is None:", "elif False:", "elif peer.quiet:", "elif False:"))  # fmt: skip
add("a-fenced-peer-is-still-heard", "receipts count that come after the fence", "C6.4 C1.4",
    edit(G._on_receipts, "elif peer.quiet:", "elif False:"))  # fmt: skip
add("a-stranger-may-be-up", "a peer event about nobody that was connected is passed on", "T2 C1.4 C1.2",
    edit(G._on_peer, '        self._dropped["event_unknown_peer"] += 1\n',
         "        self._news.peers.append(event)\n"))  # fmt: skip
add("up-is-told-again", "an end hears of the same peer twice", "T2",
    edit(G._on_peer, "if peer.state is not PeerState.CONNECTING:", "if False:"))  # fmt: skip
add("connecting-never-gives-up", "an unreachable peer is never down", "T2 T7",
    edit(G._expire, "if peer.deadline <= now]", "if False]"))  # fmt: skip
add("another-transport-may-connect", "an endpoint of another transport is accepted", "T2",
    edit(G._check_endpoint, "if endpoint.transport != self._transport:", "if False:"))  # fmt: skip
add("another-version-may-connect", "an endpoint of another version is accepted", "T2",
    edit(G._check_endpoint, "if endpoint.version != self._version:", "if False:"))  # fmt: skip
add("ones-own-name-may-connect", "an end may connect to its own name", "T2",
    edit(G._check_endpoint, "if id.name == self.peer.name:", "if False:"))  # fmt: skip
add("geometries-are-not-compared", "two stages with different caches connect", "C3.5",
    edit(G._check_endpoint, "    ours.require_compatible(theirs, str(self.peer), str(id))\n", "    pass\n"))  # fmt: skip
add("a-target-outside-is-accepted", "segments past their region at the target are submitted", "C3.6",
    edit(G._check_chunk, "if not target.within(peer.lengths):", "if False:"))  # fmt: skip
add("a-source-outside-is-accepted", "segments past their region at the source are submitted", "C3.6",
    edit(G._check_chunk, "if not source.within(self._lengths):", "if False:"))  # fmt: skip
add("unequal-lengths-are-accepted", "lists whose lengths differ are submitted", "C3.6",
    edit(G._check_chunk, "if not same_lengths(source, target):", "if False:"))  # fmt: skip
add("a-wrong-sum-is-accepted", "a chunk whose bytes are not the sum of its segments is submitted", "C3.6",
    edit(G._check_chunk, "if total != chunk.nbytes:", "if False:"))  # fmt: skip
add("any-number-of-segments-is-accepted", "max_segments is not looked at", "T13",
    edit(G._check_chunk, "if segments > capabilities.max_segments:", "if False:"))  # fmt: skip
add("any-size-is-accepted", "max_chunk_bytes is not looked at", "T13",
    edit(G._check_chunk, "if total > capabilities.max_chunk_bytes:", "if False:"))  # fmt: skip
add("any-alignment-is-accepted", "alignment is not looked at", "T13",
    edit(G._check_chunk, "if grain > 1 and", "if False and"))  # fmt: skip
add("revoke-is-always-tried", "a transport that cannot revoke is asked to", "T13",
    edit(G.revoke, "if not self.capabilities.revocable:", "if False:"))  # fmt: skip
add("any-memory-is-registered", "memory of an undeclared kind reaches the plugin", "T1 T13",
    edit(G._check_regions, "if region.kind not in capabilities.memory_kinds:", "if False:"))  # fmt: skip
add("foreign-memory-is-registered", "memory that did not come from allocate() reaches the plugin", "T1",
    edit(G._check_regions, 'if capabilities.memory_origin == "allocated" and (', "if False and ("))  # fmt: skip
add("regions-may-overlap", "overlapping regions are registered", "T1",
    edit(G._check_regions, "if (found := clash(regions)) is not None:", "if False:"))  # fmt: skip
add("regions-are-registered-again", "a second registration reaches the plugin", "T1",
    edit(G.register, "if self._regions is not None:", "if False:"))  # fmt: skip
add("any-thread-may-call", "a call from another thread reaches the plugin", "T11",
    edit(G._enter, "elif self._owner is not current:", "elif False:"))  # fmt: skip
add("close-goes-through", "a connector is closed with chunks that may still be read", "T10 C5.4",
    edit(G.close, "if unread:", "if False:",
         "    try:\n        self._connector.close()\n    except KvbatonError:\n        raise\n",
         "    try:\n        self._connector.close()\n    except KvbatonError:\n        pass\n"))  # fmt: skip
add("an-exception-of-poll-escapes", "what a plugin raises in poll() kills the pump", "T7 C6.3",
    edit(G.poll, "        if not self._poll_is_failing:\n            self._fault(\"poll\", error)\n", "        raise\n"))  # fmt: skip
add("an-exception-of-submit-escapes", "what a plugin raises in submit() reaches the stage", "C6.3 T5",
    edit(G.submit, "    except Exception as error:\n", "    except ZeroDivisionError as error:\n"))  # fmt: skip
add("an-exception-of-submit-proves-quiet", "a chunk whose posting raised is said to be quiet", "C6.1 T5 C5.2",
    edit(G.submit, "self._prove(flight, Outcome.FAILED, False, False, cause)",
         "self._prove(flight, Outcome.FAILED, True, True, cause)"))  # fmt: skip
add("faults-are-swallowed", "what a plugin raises is reported to nobody", "C6.3 T7",
    edit(G._report, "    self._news.faults.append(fault)\n", ""))  # fmt: skip
add("a-fence-proves-nothing", "chunks towards a fenced peer never end", "T8 C6.4 T7",
    edit(G.fenced, "    for flight in self._waiting_for_proof(peer):\n", "    for flight in ():\n"))  # fmt: skip
add("a-fence-proves-what-it-cannot", "a fence proves quiet although the transport says that nothing does", "C6.4 T8",
    edit(G.fenced, 'if self.capabilities.quiet == "never":', "if False:"))  # fmt: skip
add("down-is-quiet", "a peer that is down counts as quiet", "C6.4 T7",
    edit(G._lose, "peer.quiet = quiet", "peer.quiet = quiet = True"))  # fmt: skip
add("an-acknowledgement-proves-nothing", "a chunk that a buffering transport reported DONE is never terminal", "T5 T12 C5.1",
    edit(G.acknowledge, "        if flight.source_quiet:", "        if False:"))  # fmt: skip
add("grants-are-kept", "the grant of a finished transfer stays", "T12",
    edit(G.forget, "self._grants.pop(transfer, None)", "pass", "        self._revoke(transfer)\n", ""))  # fmt: skip
add("a-second-grant-is-taken", "the grant of a live transfer may change", "C2.2",
    edit(G.grant, "if transfer in self._grants:", "if False:"))  # fmt: skip
add("old-epochs-are-kept", "what is known of peers that have gone stays", "T12",
    edit(G._forget_peer, "    self._peers.pop(peer.id, None)\n", "    pass\n"))  # fmt: skip
add("a-chunk-for-a-dead-peer-is-full", "a chunk for a peer that is down is refused for ever", "T5 T7",
    edit(G.submit, "if peer is None or peer.state in _LEAVING:", "if peer is None:",
         "peer.state is _CONNECTING\n", "peer.state is not _UP\n"))  # fmt: skip
add("plugins-word-for-late-is-believed", "TIMED_OUT from a plugin counts as core's own", "T5 T8",
    edit(G._on_completions, "elif outcome is not _DONE and (type(outcome) is not Outcome or outcome is _TIMED_OUT):",
         "elif outcome is None:"))  # fmt: skip
add("cancelling-what-is-over-ends-it-again", "a cancel of a transfer that has nothing under way is reported as an end",
    "T9 C7.1",
    edit(G.cancel, "    self._enter()\n", "    self._enter()\n    self._news.completions += [\n"
         "        Completion(transfer, number, Outcome.CANCELLED, True, True) for number in (0, 1)\n    ]\n"))  # fmt: skip
add("chunks-are-posted-before-their-peer-is-up", "a chunk for a peer that is still connecting reaches the plugin", "T6 T2",
    edit(G.submit, "peer.state is _CONNECTING\n", "False\n"))  # fmt: skip
add("the-transports-queue-goes-to-the-first", "a peer with many chunks takes each place of a full queue", "T6",
    edit(G._room, "other.refused_in >= self._pass - 1 and", "False and"))  # fmt: skip
add("a-chunk-may-be-under-way-twice", "a chunk that has not ended is taken again", "T5",
    edit(G.submit, "if key in self._posted or key in self._lingering:", "if False:"))  # fmt: skip
add("any-cancel-reaches-the-plugin", "the plugin is asked to cancel what it was never given", "T9",
    edit(G.cancel, "if any(not flight.completed for flight in self._flights.get(transfer, {}).values()):", "if True:"))  # fmt: skip
add("what-is-known-is-said-again", "a proof of nothing new is reported", "T5 T8 C6.1",
    edit(G._prove, "if flight.told and not grew:", "if False:"))  # fmt: skip
add("an-exception-of-connect-escapes", "what a plugin raises in connect() reaches the stage", "T2 C6.3 T7",
    edit(G.connect, "    except Exception as error:\n", "    except ZeroDivisionError as error:\n"))  # fmt: skip
add("the-transports-fence-proves-the-target", "a connection's quiet end proves that nothing is written there any more",
    "C6.4 T5 C5.2",
    edit(G._lose, "self._prove(flight, Outcome.FAILED, True, False, error)",
         "self._prove(flight, Outcome.FAILED, True, True, error)"))  # fmt: skip
add("foreign-memory-is-registered-where-own-is-demanded", "memory that did not come from allocate() reaches the plugin",
    "T1",
    edit(G._check_regions, 'if capabilities.memory_origin == "allocated" and (', "if False and ("), base="own")  # fmt: skip
add("a-fence-is-forgotten", "a chunk that is reported after its peer's fence stays in quarantine", "C6.4 T8",
    edit(G._on_completions, "fenced = flight.peer.fenced", "fenced = False"))  # fmt: skip
add("a-malformed-event-swallows-the-rest", "what comes behind an event that is none is lost", "T5 T7 C6.3",
    edit(G._on_completions, "        except Exception as wrong:\n            self._refuse(wrong)\n",
         "        except ZeroDivisionError:\n            pass\n"))  # fmt: skip
add("a-malformed-event-swallows-other-kinds", "what no completion is costs the receipts beside it", "T7 C6.3 T3",
    edit(G._filter, "            self._on_completions(completions, self._clock())\n",
         "            self._on_completions(completions, self._clock())\n"
         "            if not all(type(one) is Completion for one in completions):\n                return\n"))  # fmt: skip
add("anything-proves-quiet", "whatever is true proves a side quiet", "T5 C6.1",
    edit(G._on_completions, "    _check_completion(completion, sequence, source, target, error)\n", "    pass\n"))  # fmt: skip
add("rubbish-is-told-each-time", "each malformed event is a fault", "T12 C6.3",
    edit(G._refuse, "if count < self._malformed_told_at or self._malformed_in == self._pass:", "if False:"))  # fmt: skip
