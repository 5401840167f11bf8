"""What a caller is told: of a request its outputs as they come and one record at the end, of a stage how it stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvbaton.identity import RequestKey, TransferId


@dataclass(frozen=True)
class RequestRecord:
    """One request after its end.  ``milestones``: seconds since ``add_request``; a stage's own are placed
    by its clock's distance from the message that started it.  ``bytes`` and ``segments`` crossed the transport in
    ``chunks``."""

    request_id: RequestKey
    transfer: TransferId | None
    prompt_tokens: int
    token_ids: tuple[int, ...]
    exit_depths: tuple[int, ...]
    finish_reason: str
    error: Exception | None = None
    chunks: int = 0
    segments: int = 0
    bytes: int = 0
    #: Prompt tokens that each side held already: P computed the rest, D was sent the rest.
    prefix_prefill: int = 0
    prefix_decode: int = 0
    prefill: str = ""
    decode: str = ""
    milestones: Mapping[str, float] = field(default_factory=dict)
    #: How often it waited again: a stage had no room for it, or was lost with it.
    requeued: int = 0


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What is new of one request: its next tokens, or its end.

    ``finish_reason`` on the last one: ``stop``, ``length``, ``cancelled`` or ``failed`` (then ``error`` says why).
    """

    request_id: RequestKey
    token_ids: tuple[int, ...] = ()
    exit_depths: tuple[int, ...] = ()
    finished: bool = False
    finish_reason: str | None = None
    error: Exception | None = None
    record: RequestRecord | None = None


@dataclass(frozen=True, slots=True)
class StageState:
    """A stage at one moment.

    ``pid``: its process; this one where stages are threads, 0 on another host.  ``status``: None until its end was
    joined; then its exit status, negative for the signal that killed it.  ``log``: its last lines, oldest first.
    """

    name: str
    pid: int
    status: int | None
    log: tuple[str, ...]
