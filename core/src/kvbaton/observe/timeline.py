"""A run as it was seen, on one clock: requests with their phases and chunks, stages with what they did.

This is data.  ``kvbaton.observe.trace`` makes it from what was noted, ``kvbaton.observe.perfetto`` draws it as
tracks, ``kvbaton report`` as a page; it travels inside the trace file.  All times are seconds since the first event;
of something that was never seen there is none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, TypeAlias

import msgspec

from kvbaton.errors import TraceUnreadable

#: The version of this vocabulary.
VERSION: Final = 1

#: The phases of a request in order, each with what passes in it.  All but two are those of the metric
#: ``transfer_phase_seconds``, whose ``prefill`` is ``prefill_queue`` and ``prefill`` here.
PHASES: Final = {
    "queue": "waits for admission: no pair of stages has the credits",
    "reserve": "D finds and holds memory for it",
    "prefill_queue": "admitted, and P has not begun to compute it",
    "prefill": "P computes the prompt; what is ready is sent meanwhile",
    "receive": "everything is computed and submitted; the last bytes are on their way",
    "import": "D has every byte, and its engine takes the request over",
    "admit": "waits for a compute slot at D",
    "decode": "D makes tokens",
    "retire": "over for the caller; D gives its memory back",
}


#: What a file may say, which may be anybody's: seconds, and counts, that can be reckoned with.
Moment: TypeAlias = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class Span(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """``name`` from ``began`` to ``ended``."""

    name: str
    began: Moment
    ended: Moment


class Chunk(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A chunk's life.  ``submitted`` to ``taken`` is the call that gave it to the transport; ``receipt`` D's evidence,
    dealt with by ``heard``; ``full`` when the transport first had no room for it.
    """

    sequence: Count
    nbytes: Count
    segments: Count
    planned: Moment | None
    ready: Moment | None
    full: Moment | None
    submitted: Moment | None
    taken: Moment | None
    receipt: Moment | None
    heard: Moment | None
    completed: Moment | None
    outcome: str


class Generation(msgspec.Struct, frozen=True, gc=False):
    """One hand-off of a request.  ``milestones``: in the order in which they were reached."""

    transfer: str
    prefill: str
    decode: str
    milestones: dict[str, Moment]
    phases: Annotated[list[Span], msgspec.Meta(min_length=1)]
    chunks: list[Chunk]


class RequestLine(msgspec.Struct, frozen=True, gc=False):
    """One request.  ``outcome``: its finish reason, or "" where the trace ends before it does."""

    id: str
    added: Moment
    ended: Moment | None
    outcome: str
    error: str
    cause: str
    prompt_tokens: Count
    tokens: Count
    first_token: Moment | None
    prefix_prefill: Count
    prefix_decode: Count
    chunks: Count
    segments: Count
    nbytes: Count
    generations: Annotated[list[Generation], msgspec.Meta(min_length=1)]


class StepLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One step of an engine: prompt ranges ``(request, start, end)`` that it computed, requests that it made tokens
    for; ``ranges`` and ``batch`` count those that are not named as well.
    """

    began: Moment
    ended: Moment
    computed: list[tuple[str, Count, Count]]
    ranges: Count
    produced: list[str]
    batch: Count
    tokens: Count


class CommandLine(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What an engine was told between two steps."""

    name: str
    request: str
    began: Moment
    ended: Moment


class StageLine(msgspec.Struct, frozen=True, gc=False):
    """One life of a stage.  ``held``: per destination, while too much waited for the engine to go on.  ``doubt``: by
    how many seconds its times may be off.  ``dropped``: events of it that are missing.  ``note``: what is wrong with
    its part.
    """

    name: str
    epoch: int
    role: str
    steps: list[StepLine] = []
    commands: list[CommandLine] = []
    held: list[Span] = []
    lost: Moment | None = None
    fenced: Moment | None = None
    cause: str = ""
    doubt: Moment = 0.0
    dropped: Count = 0
    note: str = ""


class Timeline(msgspec.Struct, frozen=True, gc=False):
    """A whole run.  ``length`` in seconds; ``began``: the wall clock's time of second 0; ``missing``: earlier requests
    that were pushed out; ``about``: settings worth knowing.
    """

    began: Moment
    length: Moment
    requests: list[RequestLine]
    stages: list[StageLine]
    missing: Count = 0
    about: dict[str, str] = {}
    version: int = VERSION


class _File(msgspec.Struct):
    kvbaton: Timeline


def read(path: Path) -> Timeline:
    """The timeline in a trace file.  Raises :class:`~kvbaton.errors.TraceUnreadable`, with what to do."""
    hint = "give a file that kvbaton run --trace FILE has written"
    try:
        if path.exists() and not path.is_file():  # a pipe, or a device, may never end
            raise TraceUnreadable(f"{path} is no file; {hint}")
        data = path.read_bytes()
    except OSError as error:
        raise TraceUnreadable(f"cannot read the trace {path}: {error.strerror or error}") from error
    try:
        timeline = msgspec.json.decode(data, type=_File).kvbaton
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise TraceUnreadable(f"{path} is no trace of kvbaton ({error}); {hint}") from error
    if timeline.version != VERSION:
        raise TraceUnreadable(
            f"{path} is a trace of version {timeline.version}, this kvbaton reads {VERSION}: use the release that wrote"
            " it"
        )
    return timeline
