"""Why requests end, in a bounded set of words: texts name peers and transfers, a metric's label must not.

The texts are core's own; what is recognised by nothing is ``other``, and its text is in the log and in the error.
"""

from __future__ import annotations

import re
from typing import Final

from kvbaton.records import RequestRecord

_DEADLINES: Final = ("reserve", "prefill_start", "prefill_idle", "chunk", "receipts", "drain", "control", "step")

#: Looked at in this order; the first that is found counts.
_PATTERNS: Final = tuple(
    (cause, re.compile(pattern))
    for cause, pattern in (
        ("shutdown", r"the runtime (closed|ended)|is stopping"),
        ("caller", r"^cancelled by the caller"),
        ("deadline_request", r"the request's own deadline passed"),
        ("stage_lost", r"is lost\b|its process ended|replaced by"),
        ("connection", r"the connection from .* is down|are not connected|is not connected"),
        ("no_stage", r"no (prefill|decode) stage is up|no connected pair|was given up|it is given up"),
        ("deadline_chunk", r"passed its deadline \("),
        *((f"deadline_{name}", rf"deadline\.{name} of ") for name in _DEADLINES),
        ("violation", r"violation|^C7\.\d"),
        ("engine", r"C6\.3: (prefill|decode): |the engine of "),
        ("refused", r" refused( \(\d+ times\))?: "),
        ("transport", r"C6\.3: chunk |C3\.6|\bT\d+: "),
        ("message", r"control\.max_message"),
    )
)

#: Every value of the label ``cause``.
CAUSES: Final = ("none", *(cause for cause, _ in _PATTERNS), "other")

#: Every value of the label ``outcome``.
OUTCOMES: Final = ("stop", "length", "cancelled", "failed")

#: Every value of the label ``role``: with which side the cause lies.
ROLES: Final = ("prefill", "decode", "none")


def cause_of(text: str) -> str:
    """The word for a cause's text, one of :data:`CAUSES`."""
    for cause, pattern in _PATTERNS:
        if pattern.search(text):
            return cause
    return "other"


def ending_of(record: RequestRecord) -> tuple[str, str, str]:
    """A request's role, outcome and cause, each out of its bounded set."""
    outcome = record.finish_reason if record.finish_reason in OUTCOMES else "failed"
    if record.error is None:
        return "none", outcome, "none"
    facts = getattr(record.error, "facts", {})
    text = str(facts.get("cause") or str(record.error).partition(": ")[2])
    role = str(facts.get("stage") or "none").rpartition("-")[0]
    return role if role in ROLES else "none", outcome, cause_of(text)
