"""The state tables of the hand-off: phases, legal transitions, and what every event does in every phase.

This is data.  The machines check each change of phase against :data:`LEGAL_SOURCE`, :data:`LEGAL_DESTINATION` and
:data:`LEGAL_COORDINATOR`; the tests drive every cell of :data:`SOURCE`, :data:`DESTINATION` and :data:`COORDINATOR`;
the docs draw their diagrams and tables from here.

A cell lists what may happen, separated by ``|``; each is ``phase; messages`` where ``=`` is the same phase and
``none`` is no record.  ``ignore``: late, repeated or about nobody (C7.4), nothing changes.  ``violation``: cannot be
true, refused (C7.2), and ``violation>PHASE`` what follows from it; C's bookkeeping aside, the event is not applied.
``-``: cannot occur.  Messages of C carry their receiver (``Ack>P``); what the caller is told reads ``tokens``,
``finished``, ``cancelled`` or ``failed``.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar


class _Phase(enum.Enum):
    """Members are compared, and so hashed, by identity: every change of phase is looked up in a table of legal ones,
    and ``Enum``'s own hash is a function in Python."""

    __hash__ = object.__hash__


class SourcePhase(_Phase):
    """Of a transfer at P.  No record: unknown or retired."""

    PREFILLING = "PREFILLING"
    COMMITTED = "COMMITTED"
    DRAINING = "DRAINING"


class DestinationPhase(_Phase):
    """Of a transfer at D.  A record exists exactly while D holds memory for it, or has asked its engine to."""

    RESERVING = "RESERVING"
    RESERVED = "RESERVED"
    HELD = "HELD"
    RECEIVED = "RECEIVED"
    IMPORTED = "IMPORTED"
    ACTIVE = "ACTIVE"
    CLOSING = "CLOSING"


class CoordinatorPhase(_Phase):
    """Of a request (WAITING) or of one of its generations at C.  Forgotten when ENDED and neither credit is out."""

    WAITING = "WAITING"
    RESERVING = "RESERVING"
    PREFILLING = "PREFILLING"
    COMMITTED = "COMMITTED"
    RECEIVED = "RECEIVED"
    ENDED = "ENDED"


class PeerStatus(enum.Enum):
    """Of a stage at C.  LOST: its channel is gone, which is final and frees nothing.  FENCED: its process was joined
    (C6.4).
    """

    UP = "UP"
    LOST = "LOST"
    FENCED = "FENCED"


class PeerLink(enum.Enum):
    """D's end of the connection from a writer."""

    UP = "up"
    #: Went down by itself, without a fence.
    DOWN = "down"
    #: C said Disconnect: its process is dead, what had arrived is being applied.
    CLOSING = "closing"
    #: Nothing of it can still be written here.
    QUIET = "quiet"
    #: It was closed and the transport cannot prove quiet.
    UNPROVEN = "unproven"


class ChunkState(enum.Enum):
    """Of a chunk at P.  A settled chunk is not kept.  *Quiet* = no chunk is left and the engine is done with the
    transfer.
    """

    #: The device may still be writing its source.
    COMPUTING = "computing"
    #: Computed, not yet taken by the transport.
    READY = "ready"
    #: The transport owns both sides.
    POSTED = "posted"
    #: Past its deadline, or failed without proof: both sides stay owned (T8).
    EXPIRED = "expired"
    #: The source is not read any more; the target may still be written.
    SENT = "sent"
    #: The target is not written any more; the source may still be read.
    PINNED = "pinned"


class Milestones:
    """Names of milestones (C4).  Each is its own event with its own evidence; none stands in for another."""

    PLACED: Final = "placed"
    RESERVED: Final = "reserved"
    PREFILL_STARTED: Final = "prefill_started"
    SOURCE_READY: Final = "source_ready"
    SUBMITTED: Final = "submitted"
    COMMITTED: Final = "committed"
    RECEIVED: Final = "received"
    ACKNOWLEDGED: Final = "acknowledged"
    IMPORTED: Final = "imported"
    ACTIVATED: Final = "activated"
    FINISHED: Final = "finished"
    SOURCE_RETIRED: Final = "source_retired"
    DESTINATION_RETIRED: Final = "destination_retired"


Phase = TypeVar("Phase", bound=enum.Enum)


@dataclass(frozen=True)
class Outcome:
    """One thing that may happen in a cell: a verdict (``apply``, ``ignore``, ``violation``), the next phase, the
    messages.
    """

    verdict: str
    phase: str
    sends: tuple[str, ...]


@dataclass(frozen=True)
class Table(Generic[Phase]):
    """What each event does in each phase: ``rows[event][i]`` belongs to ``phases[i]`` (None: no record)."""

    title: str
    phases: tuple[Phase | None, ...]
    rows: Mapping[str, tuple[str, ...]]

    def __post_init__(self) -> None:
        for event, cells in self.rows.items():
            if len(cells) != len(self.phases):
                raise ValueError(f"{self.title}: {event!r} has {len(cells)} cells for {len(self.phases)} phases")

    def cells(self) -> Iterator[tuple[str, Phase | None, tuple[Outcome, ...]]]:
        """Every (event, phase, what may happen); an impossible cell has nothing that may happen."""
        for event, row in self.rows.items():
            for phase, cell in zip(self.phases, row, strict=True):
                yield event, phase, outcomes(cell, phase)


def outcomes(cell: str, phase: enum.Enum | None) -> tuple[Outcome, ...]:
    """A cell's text, taken apart."""
    if cell == "-":
        return ()
    here = "none" if phase is None else phase.name
    found = []
    for option in cell.split(" | "):
        word, _, sends = option.partition("; ")
        messages = tuple(sends.split(" + ")) if sends else ()
        verdict, _, moved = word.partition(">")
        if verdict in ("ignore", "violation"):
            found.append(Outcome(verdict, moved or here, messages))
        else:
            found.append(Outcome("apply", here if word == "=" else word, messages))
    return tuple(found)


_S, _D, _C = SourcePhase, DestinationPhase, CoordinatorPhase

#: P: (from, to); None is "no record".
LEGAL_SOURCE: Final = frozenset({
    (None, _S.PREFILLING),
    (_S.PREFILLING, _S.COMMITTED), (_S.PREFILLING, _S.DRAINING),
    (_S.COMMITTED, _S.DRAINING),
    (_S.DRAINING, None),
})  # fmt: skip

#: D: (from, to).
LEGAL_DESTINATION: Final = frozenset({
    (None, _D.RESERVING),
    (_D.RESERVING, _D.RESERVED), (_D.RESERVING, None),
    (_D.RESERVED, _D.HELD), (_D.RESERVED, _D.RECEIVED), (_D.RESERVED, None),
    (_D.HELD, None),
    (_D.RECEIVED, _D.IMPORTED), (_D.RECEIVED, _D.CLOSING), (_D.RECEIVED, None),
    (_D.IMPORTED, _D.ACTIVE), (_D.IMPORTED, _D.CLOSING),
    (_D.ACTIVE, _D.CLOSING),
    (_D.CLOSING, None),
})  # fmt: skip

#: C: (from, to).  A placed request leaves WAITING and its generation begins in RESERVING.
LEGAL_COORDINATOR: Final = frozenset({
    (None, _C.WAITING), (_C.WAITING, _C.RESERVING), (_C.WAITING, None),
    (_C.RESERVING, _C.PREFILLING), (_C.RESERVING, _C.ENDED),
    (_C.PREFILLING, _C.COMMITTED), (_C.PREFILLING, _C.ENDED),
    (_C.COMMITTED, _C.RECEIVED), (_C.COMMITTED, _C.ENDED),
    (_C.RECEIVED, _C.ENDED),
    (_C.ENDED, None),
})  # fmt: skip


_DROPS = "DRAINING; Failed | ignore"
_FAILS = "DRAINING; Failed | none; Failed + Retired | ignore"
_DOWN = "DRAINING; PeerDown + Failed | none; PeerDown + Failed + Retired"

SOURCE: Final = Table(
    "P, per transfer",
    (None, _S.PREFILLING, _S.COMMITTED, _S.DRAINING),
    {
        # from C
        "Prefill": ("PREFILLING", "violation; Failed", "violation; Failed", "violation"),
        "Prefill, replayed": ("ignore", "ignore", "ignore", "ignore"),
        "Prefill, after Stop": ("violation", "-", "-", "violation"),
        "Ack": ("ignore", "violation; Failed", "DRAINING | none; Retired", "= | none; Retired | ignore"),
        "Cancel": (
            "ignore", "DRAINING | none; Retired", "DRAINING | DRAINING; Unproven | none; Retired", "ignore",
        ),
        "Stop": (
            "ignore", "DRAINING | none; Retired", "DRAINING | DRAINING; Unproven | none; Retired", "ignore",
        ),
        "Disconnect": ("=", "DRAINING; Failed | none; Failed + Retired", "= | DRAINING; Failed", "= | none; Retired"),
        # from the engine
        "computed": ("ignore", "=; Progress | DRAINING; Failed", "ignore", "ignore"),
        "source ready": ("ignore", "= | ignore", "ignore", "= | none; Retired | ignore"),
        "refused": ("ignore", _FAILS + " | DRAINING; Failed + Unproven", "ignore", "= | none; Retired | ignore"),
        "engine failed": ("ignore", "DRAINING; Failed | none; Failed + Retired", "ignore", "ignore"),
        "suspended": ("ignore", "ignore", "ignore", "= | none; Retired | ignore"),
        # from the connector
        "submitted": ("violation", "= | COMMITTED; Commit | violation", "violation", "violation"),
        "done": ("ignore", "= | ignore", "= | ignore", "= | none; Retired | ignore"),
        "done, target not quiet": (
            "ignore", "= | ignore", "= | ignore", "= | =; Unproven | none; Retired | ignore",
        ),
        "only target quiet": (
            "ignore", "= | DRAINING; Failed | ignore", "= | DRAINING; Failed | ignore",
            "= | none; Retired | ignore",
        ),
        "failed": (
            "ignore", _FAILS, _FAILS, "= | none; Retired | ignore",
        ),
        "failed, not quiet": ("ignore", _DROPS, _DROPS, "= | ignore"),
        "deadline": ("ignore", _DROPS, _DROPS, "= | ignore"),
        "destination up": ("=; Connected", "=; Connected", "=; Connected", "=; Connected"),
        "destination down": (
            "=; PeerDown", _DOWN,
            "=; PeerDown | DRAINING; PeerDown + Failed | DRAINING; PeerDown + Failed + Unproven", "=; PeerDown",
        ),
        "destination down, quiet": (
            "=; PeerDown", _DOWN + " | DRAINING; PeerDown + Failed + Unproven",
            "=; PeerDown | DRAINING; PeerDown + Failed + Unproven",
            "=; PeerDown | =; PeerDown + Unproven | none; PeerDown + Retired",
        ),
        "quarantine bound": ("=; Fatal", "=; Fatal", "=; Fatal", "=; Fatal"),
    },
)  # fmt: skip

_V = "violation; Failed"

DESTINATION: Final = Table(
    "D, per transfer",
    (None, _D.RESERVING, _D.RESERVED, _D.HELD, _D.RECEIVED, _D.IMPORTED, _D.ACTIVE, _D.CLOSING),
    {
        # from C
        "Reserve": ("RESERVING", _V, "violation>HELD; Failed", "violation", _V, _V, _V, "violation"),
        "Reserve, replayed": ("ignore",) * 8,
        "Reserve, after Stop": (
            "=; Rejected", _V, "-", "violation", "-", "-", "-", "violation",
        ),
        "Commit": (
            "ignore", _V, "= | RECEIVED; Received | violation>HELD; Failed | ignore", "violation | ignore",
            "ignore | " + _V, "ignore | " + _V, "ignore | " + _V, "ignore | violation",
        ),
        "Unproven": (
            "ignore", _V, "violation>HELD; Failed", "= | =; Received | violation", "ignore", "ignore", "ignore",
            "ignore",
        ),
        "Cancel": ("ignore", "= | ignore", "HELD", "ignore", "none; Retired | CLOSING", "CLOSING", "CLOSING", "ignore"),
        "Release": (
            "ignore", "= | ignore", "none; Retired | HELD", "none; Retired | = | ignore",
            "none; Retired | CLOSING", "CLOSING", "CLOSING", "ignore",
        ),
        "Disconnect": ("=", "=", "=", "=", "=", "=", "=", "="),
        "Stop": (
            "ignore", "= | ignore", "none; Retired", "none; Retired | ignore", "none; Retired | CLOSING", "CLOSING",
            "CLOSING", "ignore",
        ),
        "C gone": (
            "=", "=", "HELD | none; Retired", "= | none; Retired", "none; Retired | CLOSING", "CLOSING", "CLOSING", "=",
        ),
        # from the engine
        "reserved": (
            "ignore", "RESERVED; Reserved | HELD; Reserved | none; Reserved + Retired", "ignore", "ignore", "ignore",
            "ignore", "ignore", "ignore",
        ),
        "refused": ("ignore", "none; Rejected", "ignore", "ignore", "ignore", "ignore", "ignore", "ignore"),
        "imported": ("ignore", "ignore", "ignore", "ignore", "IMPORTED", "ignore", "ignore", "ignore"),
        "activated": ("ignore", "ignore", "ignore", "ignore", "ignore", "ACTIVE; Activated", "ignore", "ignore"),
        "output": ("ignore", "ignore", "ignore", "ignore", "ignore", "ignore", "=; Output", "ignore"),
        "finished": ("ignore", "ignore", "ignore", "ignore", "ignore", "ignore", "CLOSING; Finished", "ignore"),
        "device quiet": ("ignore", "ignore", "ignore", "ignore", "ignore", "ignore", "ignore", "none; Retired"),
        "engine failed": (
            "ignore", "none; Rejected", "HELD; Failed", "ignore", "none; Failed + Retired | CLOSING; Failed",
            "CLOSING; Failed", "CLOSING; Failed", "ignore",
        ),
        # from the connector
        "receipt": (
            "ignore", _V, "= | RECEIVED; Received | violation>HELD; Failed | ignore", "= | =; Received | ignore",
            "ignore | " + _V, "ignore | " + _V, "ignore | " + _V, "ignore | violation",
        ),
        "receipt from another peer": (
            "ignore", _V, "violation>HELD; Failed", "violation", _V, _V, _V, "violation",
        ),
        "revoked": ("ignore", "ignore", "ignore", "none; Retired", "ignore", "ignore", "ignore", "ignore"),
        "writer up": ("=; Connected",) * 8,
        "writer down": ("=; PeerDown",) * 8,
        "writer down, quiet": (
            "=; PeerDown", "=; PeerDown", "=; PeerDown", "=; PeerDown | none; PeerDown + Retired", "=; PeerDown",
            "=; PeerDown", "=; PeerDown", "=; PeerDown",
        ),
        "quarantine bound": ("=; Fatal",) * 8,
    },
)  # fmt: skip

_E = "failed + Cancel>P + Cancel>D"
#: C ends the transfer for a violation: of D while P is untold, of either while P may write, of D once it has received.
_V1, _V2 = "violation>ENDED; failed + Release>D", "violation>ENDED; " + _E
_V3 = "violation>ENDED; failed + Cancel>D"

COORDINATOR: Final = Table(
    "C, per transfer",
    (None, _C.WAITING, _C.RESERVING, _C.PREFILLING, _C.COMMITTED, _C.RECEIVED, _C.ENDED),
    {
        # the caller and C itself
        "placed": ("-", "RESERVING; Reserve>D", "-", "-", "-", "-", "-"),
        "abort": (
            "ignore", "none; cancelled", "ENDED; cancelled + Release>D", "ENDED; cancelled + Cancel>P + Cancel>D",
            "ENDED; cancelled + Cancel>P + Cancel>D", "ENDED; cancelled + Cancel>D", "ignore",
        ),
        "deadline": (
            "-", "-", "ENDED; failed + Release>D", "ENDED; " + _E, "ENDED; " + _E, "-", "=",
        ),
        "nobody serves": ("-", "none; failed", "-", "-", "-", "-", "-"),
        "fatal": (
            "=; Stop>P", "none; failed + Stop>P", "ENDED; failed + Release>D + Stop>P", "ENDED; " + _E + " + Stop>P",
            "ENDED; " + _E + " + Stop>P", "ENDED; failed + Cancel>D + Stop>P", "=; Stop>P",
        ),
        # from D
        "Reserved": ("ignore", "-", "PREFILLING; Prefill>P", "ignore", "ignore", "ignore", "ignore"),
        "Rejected": ("ignore", "-", "none; failed", _V2, _V2, _V3, "none | = | violation"),
        "Rejected, retry": ("ignore", "-", "WAITING", _V2, _V2, _V3, "none | = | violation"),
        "Received": ("ignore", "-", _V1, _V2, "RECEIVED; Ack>P", "ignore", "=; Ack>P | ignore"),
        "Activated": ("ignore", "-", _V1, _V2, _V2, "= | ignore", "ignore"),
        "Output": ("ignore", "-", _V1, _V2, _V2, "=; tokens | ignore | " + _V3, "ignore"),
        "Finished": ("ignore", "-", _V1, _V2, _V2, "ENDED; finished", "ignore"),
        "Failed (D)": ("ignore", "-", _V1, "ENDED; " + _E, "ENDED; " + _E, "ENDED; failed + Cancel>D", "ignore"),
        "Retired (D)": ("ignore", "-", _V1, _V2, _V2, _V3, "none | = | =; Ack>P | ignore"),
        # from P
        "Progress": ("ignore", "-", _V1, "=", "ignore", "ignore", "ignore"),
        "Commit": (
            "ignore", "-", _V1, "COMMITTED; Commit>D | " + _V2, "ignore | " + _V2, "ignore | " + _V3,
            "ignore | violation",
        ),
        "Failed (P)": ("ignore", "-", _V1, "ENDED; " + _E, "ENDED; " + _E, "ignore", "ignore"),
        "Unproven": ("ignore", "-", _V1, _V2, _V2, "ignore", "=; Unproven>D | =; Ack>P | ignore"),
        "Retired (P)": ("ignore", "-", _V1, _V2, _V2, "= | ignore", "none | = | =; Release>D | ignore"),
        # a peer that has no part in it, or a word that is not of its role
        "stranger": ("ignore", "-", "violation", "violation", "violation", "violation", "violation"),
        "word of the other role": ("ignore", "-", _V1, _V2, _V2, _V3, "violation"),
        # peers
        "P lost": ("=", "none; failed", "ENDED; failed + Release>D", "ENDED; failed + Cancel>D",
                   "ENDED; failed + Cancel>D", "=", "="),
        "P joined": (
            "=; Disconnect>D", "none; failed + Disconnect>D", "ENDED; failed + Release>D + Disconnect>D",
            "ENDED; failed + Cancel>D + Disconnect>D + Release>D",
            "ENDED; failed + Cancel>D + Disconnect>D + Release>D", "=; Disconnect>D",
            "none; Disconnect>D | =; Disconnect>D | =; Disconnect>D + Release>D",
        ),
        "D lost": ("=", "none; failed", "ENDED; failed", "ENDED; failed + Cancel>P", "ENDED; failed + Cancel>P",
                   "ENDED; failed", "="),
        "D joined": (
            "=; Disconnect>P", "none; failed + Disconnect>P", "none; failed + Disconnect>P",
            "ENDED; failed + Cancel>P + Disconnect>P", "ENDED; failed + Cancel>P + Disconnect>P",
            "ENDED; failed + Disconnect>P | none; failed + Disconnect>P", "none; Disconnect>P | =; Disconnect>P",
        ),
        "down at D": (
            "=", "none; failed", "ENDED; failed + Release>D", "ENDED; " + _E, "ENDED; " + _E, "=", "=",
        ),
        "severed": (
            "=", "none; failed", "ENDED; failed + Release>D", "ENDED; " + _E + " + Release>D",
            "ENDED; " + _E + " + Release>D", "=", "= | =; Release>D",
        ),
        "down at P": (
            "=", "none; failed", "ENDED; failed + Release>D", "ENDED; " + _E, "ENDED; " + _E, "=", "=",
        ),
    },
)  # fmt: skip
