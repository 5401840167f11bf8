"""What may pile up and how long it may take: the bounds that parts of core act on, with their defaults.

They stand here once.  :mod:`kvbaton.settings` takes its own defaults from here, and must stay cheap to import; so must
this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import msgspec

from kvbaton.errors import LocalProtocolError

#: Bytes of one encoded message unless the channel is configured otherwise (a prompt of a million tokens fits).
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024

#: Envelopes of one stage that the coordinator hears in one pass, or little more; what is left waits, in its order, for
#: the next one, so that nobody who says very much at once keeps the others waiting.  Some milliseconds.
ENVELOPES_PER_PASS: Final = 2048

#: Seconds that a profiling session may last: nobody forgets one for longer.
MAX_PROFILE_SECONDS: Final = 3600.0


@dataclass(frozen=True, slots=True)
class GuardLimits:
    """Bounds on what may be under way.  The peers that are up share the first two evenly.

    For :class:`~kvbaton.guard.GuardedConnector`; the settings ``transfer`` and ``limits``.
    """

    inflight_bytes: int = 2 << 30
    inflight_segments: int = 1 << 20
    #: Chunks per peer that are posted and not completed: of a frozen peer no more receipts than this can pile up.
    unreceipted_chunks: int = 1024
    #: More than this in quarantine and the stage must not go on (:class:`~kvbaton.errors.QuarantineFull`).
    quarantine_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name in ("inflight_bytes", "inflight_segments", "unreceipted_chunks", "quarantine_bytes"):
            if getattr(self, name) < 1:
                raise LocalProtocolError(f"guard limit {name} is {getattr(self, name)}: at least 1 is needed")


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds on the queue of waiting requests.  For the coordinator; the settings ``limits``.

    ``waiting``: requests that may wait.  ``passes``: how often a request that fits may pass an older one that does not
    (C2.6). ``window``: waiting requests looked at, at most, each time capacity is freed.  ``retries``: how often a
    request waits again after a stage refused it in spite of credits, and ``retry_delay`` how long at first, in
    seconds; it doubles each time, up to ``longest_delay``.
    """

    waiting: int = 4096
    passes: int = 16
    window: int = 32
    retries: int = 64
    retry_delay: float = 0.05
    longest_delay: float = 1.0


class Recovery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What becomes of a lost stage and of its requests.  For the coordinator; the settings ``recovery``.

    ``attempts``: how often a request whose stage or connection is lost may begin again as a new generation; 0: it
    fails, with the cause (C6.2).  ``recompute``: also one of which tokens were delivered, from its prompt and these;
    otherwise such a one fails.  ``restarts``: how often in a row a stage is started again that has served nothing since
    its last start, and how often in a row one is started again for a connection over which nothing was served since;
    0: what is dead stays dead, and a connection that broke stays down.  ``mend_idle``: a stage is started again for the
    sake of a connection also where others serve in its place, once nothing is on it; else only where nobody does.
    """

    attempts: int = 3
    recompute: bool = False
    restarts: int = 3
    mend_idle: bool = True


#: Nothing begins again, nobody is started again.
FAIL_CLOSED: Final = Recovery(attempts=0, restarts=0)


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds that each phase may last (C6.7); ``inf``: for ever.  For the coordinator; the settings
    ``deadline``.

    ``reserve``: until D answers.  ``prefill_start``: from then until P's first progress, its queue included.
    ``prefill_idle``: between two signs of progress.  ``receipts``: from Commit to Received.  Each of these ends the
    request as failed.  ``drain``: from the end of a transfer until a stage has retired it; that stage is then lost,
    unless it waits for one that hangs.  ``shutdown``: from Stop until a stage was joined; it is then killed.
    ``control``: until a stage that lives has answered, or has itself failed what is overdue.
    """

    reserve: float = 60.0
    prefill_start: float = 120.0
    prefill_idle: float = 120.0
    receipts: float = 30.0
    drain: float = 60.0
    shutdown: float = 30.0
    control: float = 5.0
