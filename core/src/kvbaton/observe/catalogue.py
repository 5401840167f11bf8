"""Every metric of kvbaton: its name, kind, labels, what it counts, and what to do when it moves.

This is data: the exporter makes its families from it, the page in the docs and the dashboard are checked against it.
Labels never hold an id.  ``stage`` and ``peer`` are a stage's name (``prefill-0``), or ``coordinator``; figures of a
stage begin at zero when it is started again, as Prometheus expects of a counter whose process ended.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram"]

PREFIX: Final = "kvbaton_"


@dataclass(frozen=True, slots=True)
class Figure:
    """One family.  ``name`` without :data:`PREFIX`; a counter's ends in ``_total``, as it is exported."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    text: str
    advice: str


#: The spans of ``transfer_phase_seconds``: from one milestone to another.  ``added`` is the call of ``add_request``.
PHASES: Final = {
    "queue": ("added", "placed"),
    "reserve": ("placed", "reserved"),
    "prefill": ("reserved", "committed"),
    "receive": ("committed", "received"),
    "import": ("received", "imported"),
    "admit": ("imported", "activated"),
    "decode": ("activated", "finished"),
    "first_token": ("added", "first_token"),
    "total": ("added", "finished"),
}

_PHASES = ", ".join(f"`{name}` ({start} to {end})" for name, (start, end) in PHASES.items())

#: In the order of the page, by section.
SECTIONS: Final[dict[str, tuple[Figure, ...]]] = {
    "Requests": (
        Figure(
            "requests_added_total", "counter", (), "Requests taken by `add_request`.",
            "The load. Compare its rate with that of `transfers_total`: what comes in and does not go out, waits.",
        ),
        Figure(
            "requests_refused_total", "counter", ("reason",),
            "Requests that `add_request` refused: `queue_full`, `too_long`, `duplicate`, `invalid`, `closed`.",
            "`queue_full`: more load than capacity; add stages, or raise `limits.waiting` if waiting is better than"
            " refusing. `too_long`: no stage can ever hold it; give the engine more blocks. The others are the"
            " caller's.",
        ),
        Figure(
            "requests", "gauge", ("state",),
            "Requests now: `waiting` for admission, `running`, `draining` (over for the caller, memory not yet given"
            " back everywhere).",
            "`waiting` grows: see `credits` for what is scarce. `draining` stays: a stage does not retire; see"
            " `oldest_transfer_seconds`.",
        ),
        Figure(
            "transfers_total", "counter", ("role", "outcome", "cause"),
            "Requests that ended. `outcome`: `stop`, `length`, `cancelled`, `failed`. `cause`: one of a bounded set,"
            " `none` where all went well. `role`: with which side it lies, `prefill`, `decode` or `none`.",
            "`failed` moves: `cause` says where to look; the log has the text, with the ids. `deadline_*` names the"
            " setting that passed (see `kvbaton config`), `stage_lost` a stage that died, `engine` an engine that"
            " raised, `transport` bytes that did not get there.",
        ),
        Figure(
            "transfer_phase_seconds", "histogram", ("phase",),
            f"How long the phases of requests took that came to an end of each phase: {_PHASES}.",
            "`queue`: too little capacity. `prefill`: P's computing, and sending what does not overlap with it."
            " `receive`: what is left to send when P has computed; large means that the transport is the bottleneck:"
            " `kvbaton lanes`. `admit`: D has the bytes and no compute slot. `first_token` is what the user sees.",
        ),
        Figure(
            "oldest_transfer_seconds", "gauge", ("state",),
            "Age of the oldest request that is `waiting` or `running`, since it was added, and of the oldest that is"
            " `draining`, since its end.",
            "`waiting` above your patience: it is starved or nothing moves. `draining` near `deadline.drain`: a stage"
            " is about to count as lost.",
        ),
        Figure(
            "tokens_total", "counter", ("kind",),
            "Tokens of requests that ended: `prompt`, `output`, and of the prompts what the sides had cached:"
            " `cached_prefill` (not computed), `cached_decode` (not sent).",
            "Cached over prompt is the hit rate; it falls: prompts share less, caches are too small, or requests go"
            " to the wrong pair (`routing.policy`).",
        ),
        Figure(
            "requeued_total", "counter", (),
            "Generations of requests that waited again: D had no room in spite of credits, or a stage or connection"
            " was lost.",
            "With `restarts_total`: recovery at work. Without: D refuses what credits promised (C2.6); its prefix"
            " cache or growth takes more than was budgeted.",
        ),
        Figure(
            "routing", "gauge", ("figure",), "What the built-in routing policy counts, by its own names.",
            "`prefix-aware`: tokens found against tokens expected says how well it guesses.",
        ),
    ),
    "Stages": (
        Figure(
            "peer_up", "gauge", ("peer",), "1 while the stage is up, 0 while it is lost, starting or given up.",
            "0: the log says why. It is started again as `recovery` says; stays 0: it was given up, or is on another"
            " host and must be started there.",
        ),
        Figure(
            "peers_lost_total", "counter", ("peer",), "Times that a stage was lost: its channel or process went.",
            "Look at its last words in the log. Every loss costs its requests a generation.",
        ),
        Figure(
            "peers_fenced_total", "counter", ("peer",),
            "Times that a stage's end was proven: joined, and its connections closed (C6.4). Also at an orderly stop.",
            "Less than `peers_lost_total` for long: see `unfenced_peers`.",
        ),
        Figure(
            "unfenced_peers", "gauge", (), "Lost stages that are not fenced: what they might write to is held.",
            "Stays above 0: on another host, make sure that the process is gone, then `confirm_ended`; here, a"
            " process that does not die (waits for a device).",
        ),
        Figure(
            "restarts_total", "counter", (), "Stages started again.",
            "A stage that dies again and again is given up after `recovery.restarts`; mend the first cause.",
        ),
        Figure(
            "stage_transfers", "gauge", ("stage",), "Transfers that the stage has a record of.",
            "Unequal over stages of one role: the routing policy, or a stage that drains.",
        ),
        Figure(
            "engine_step_seconds", "histogram", ("stage",), "What a step of the engine takes.",
            "Rises with batch and context. A step near `deadline.step` ends the stage.",
        ),
        Figure(
            "pump_pass_seconds", "histogram", ("stage",), "What a pass of the pump takes that found something to do.",
            "Above some milliseconds: a transport that copies in `submit`, or an interpreter that is held by native"
            " code.",
        ),
        Figure(
            "pump_lag_seconds", "histogram", ("stage",), "By how much longer than asked a pause of the pump was.",
            "High: the engine holds the interpreter or the processor; hand-offs wait for that. Give stages a core"
            " each.",
        ),
        Figure(
            "faults_total", "counter", ("stage",), "Faults that a stage reported, its transport's included.",
            "Each is a line in the log.",
        ),
        Figure(
            "build_info", "gauge", ("version", "engine", "transport", "launch"), "1; the labels say what runs.",
            "Nothing to do; join it with others to compare releases and transports.",
        ),
    ),
    "Memory": (
        Figure(
            "credits", "gauge", ("kind", "peer", "state"),
            "The coordinator's books of what it has promised: `kind` is `blocks` or `slots`, `state` is `reserved` or"
            " `capacity`. Not a measurement (C2.4).",
            "`reserved` at `capacity`: requests wait for this kind on this stage. `slots` on D short: raise the"
            " engine's transfer slots.",
        ),
        Figure(
            "credit_returns_repeated_total", "counter", ("peer",),
            "Credits that were returned a second time; it changed nothing (C2.5).", "Above 0 is a defect: report it.",
        ),
        Figure(
            "blocks", "gauge", ("stage", "state"),
            "The engine's own measurement of its cache: `free`, `used`, `leased`, `prefix` (cached, no owner), and"
            " what else it counts. Beside `credits`: promised and in use are two figures (C2.4).",
            "`used` with no request running: a leak. `free` at 0 while `credits` are left: growth that was not"
            " budgeted.",
        ),
        Figure(
            "final_slots_free", "gauge", ("stage",), "Free slots for the final payload.",
            "0 for long: imports, or retirements on P, are slow.",
        ),
        Figure(
            "oldest_lease_seconds", "gauge", ("stage",),
            "Age of the oldest lease, the hold on a transfer's memory: on P until the transfer is over there, on D"
            " until its request is imported. 0 without one.",
            "A lease ends by events and never by age (C8.5). Above the longest prefill: a stage waits for a peer, a"
            " transport or an acknowledgement; `oldest_transfer_seconds` and the log say for what.",
        ),
        Figure(
            "inflight_bytes", "gauge", ("stage",), "Bytes handed to the transport and not seen completed.",
            "At `transfer.inflight_bytes`: the transport is the bottleneck. Stays above 0 with nothing running: a"
            " peer that does not complete; see `quarantined_bytes`.",
        ),
        Figure("inflight_segments", "gauge", ("stage",), "Segments of these.", "As `inflight_bytes`."),
        Figure("inflight_chunks", "gauge", ("stage",), "Chunks of these.", "As `inflight_bytes`."),
        Figure(
            "quarantined_bytes", "gauge", ("stage",),
            "Bytes whose quiet nobody can prove: held on either side (T8).",
            "Above 0: a chunk passed `deadline.chunk` or failed half-way; freed once it completes or its peer is"
            " fenced. At `limits.quarantine_bytes` the stage stops.",
        ),
        Figure("quarantined_chunks", "gauge", ("stage",), "Chunks of these.", "As `quarantined_bytes`."),
        Figure(
            "unproven_chunks", "gauge", ("stage",),
            "Chunks that are done at the source and not yet known to have arrived; ordinary with transports that"
            " buffer.",
            "Grows: the destination does not receive.",
        ),
    ),
    "Transport": (
        Figure(
            "bytes_total", "counter", ("stage",), "Bytes that the transport took for sending.",
            "The rate of transfer. Cached tokens are not sent.",
        ),
        Figure(
            "chunks_total", "counter", ("stage",), "Chunks that the transport took.",
            "Bytes over chunks is the size of a chunk; small ones cost: raise `transfer.chunk_bytes`, or let the"
            " engine prefill in larger pieces.",
        ),
        Figure(
            "chunk_outcomes_total", "counter", ("stage", "outcome"),
            "Chunks that ended: `done`, `failed`, `cancelled`, `timed_out`.",
            "`failed` or `timed_out` moves: the transport or the peer; the log has its status.",
        ),
        Figure("receipts_total", "counter", ("stage",), "Receipts that a decode stage took in.", "As `chunks_total`."),
        Figure(
            "segments_total", "counter", ("stage", "coalescing"),
            "Runs of memory in what was planned, `before` neighbours were joined and `after`, when it is in chunks.",
            "`after` near `before`: blocks are scattered or the layouts differ, and every segment costs; larger"
            " blocks, or one layout on both sides, mend it.",
        ),
        Figure(
            "chunk_seconds", "histogram", ("stage",), "From a chunk's submission until the transport said it is done.",
            "Rises with load up to the budget in flight; with bytes per chunk constant it is the transport's speed.",
        ),
        Figure(
            "transport_full_total", "counter", ("stage",),
            "Times that a chunk was ready and the transport, or its budget, had no room: back-pressure (T6).",
            "Rises steadily: the transport is the bottleneck, or `transfer.inflight_bytes` is too small.",
        ),
        Figure(
            "backpressure_seconds_total", "counter", ("stage",),
            "How long chunks were ready on a prefill stage and the transport, or its budget, had no room for one (T6).",
            "Its rate is the share of the time: near 1, transfer and not computing is the bottleneck; see"
            " `transport_full_total`.",
        ),
        Figure(
            "transport_faults_total", "counter", ("stage",),
            "Calls in which the transport plugin raised, or that returned what is no event.",
            "Above 0 is a defect of the plugin: the log names the call. `kvbaton conformance` judges it.",
        ),
        Figure(
            "transport_dropped_total", "counter", ("stage", "reason"),
            "Events of the transport that were refused: late, doubled, malformed, of an old epoch or an unknown peer.",
            "A few after a peer was lost are ordinary; without a loss, or `malformed`, the plugin is at fault.",
        ),
        Figure(
            "connector", "gauge", ("stage", "figure"), "What the transport plugin itself counts, by its own names.",
            "See the plugin's page.",
        ),
    ),
    "Control": (
        Figure(
            "dropped_messages_total", "counter", ("stage", "family", "reason"),
            "Control messages that were refused: malformed, oversized, from nobody known, of another epoch, repeated"
            " (C9.3).",
            "`oversized`: raise `control.max_message` on all. `malformed`: two releases, or somebody else's traffic."
            " `gap`: that stage is lost.",
        ),
        Figure(
            "ignored_events_total", "counter", ("stage",),
            "Events that came after their milestone had passed, or about an unknown transfer; without effect (C7.4).",
            "Ordinary with cancellations and losses.",
        ),
        Figure(
            "violations_total", "counter", ("stage", "clause"),
            "What a peer said that cannot be true, by the clause it broke (`docs/contracts.md`); refused.",
            "Above 0 is a defect of the engine, the transport or kvbaton: report it with the log.",
        ),
    ),
    "The metrics themselves": (
        Figure(
            "up", "gauge", (), "1 while the runtime answers; 0 once it is closed: then only what it counted is left.",
            "0 though it should serve: it ended; the log says why.",
        ),
        Figure(
            "scrape_ok", "gauge", ("stage",), "Whether this stage, or the coordinator, is in this scrape.",
            "0: it did not answer within `deadline.control` (its engine is in a long step), or is down; its other"
            " figures are missing from this scrape, those of the others are there.",
        ),
        Figure(
            "scrape_seconds", "gauge", (), "What asking the stages took, for this scrape.",
            "Near `deadline.control`: see `scrape_ok`. It must stay below Prometheus' own `scrape_timeout`.",
        ),
    ),
}  # fmt: skip

#: Every family by its name without the prefix.
FIGURES: Final = {figure.name: figure for figures in SECTIONS.values() for figure in figures}
