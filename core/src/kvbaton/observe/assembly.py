"""From what was noted, on every stage's own clock, to one timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvbaton import tracing
from kvbaton.handoff.table import Milestones
from kvbaton.observe.timeline import (
    Chunk,
    CommandLine,
    Generation,
    RequestLine,
    Span,
    StageLine,
    StepLine,
    Timeline,
)

if TYPE_CHECKING:
    from kvbaton.observe.trace import Life, Seen

#: What ends one phase and begins the next.
_BOUNDS: Final = (
    ("reserve", Milestones.PLACED),
    ("prefill_queue", Milestones.RESERVED),
    ("prefill", "computing"),
    ("receive", Milestones.COMMITTED),
    ("import", Milestones.RECEIVED),
    ("admit", Milestones.IMPORTED),
    ("decode", Milestones.ACTIVATED),
)


@dataclass(slots=True)
class _Piece:
    """A chunk, put together from what both sides have noted."""

    nbytes: int = 0
    segments: int = 0
    planned: float | None = None
    ready: float | None = None
    full: float | None = None
    submitted: float | None = None
    taken: float | None = None
    receipt: float | None = None
    heard: float | None = None
    completed: float | None = None
    outcome: str = ""


@dataclass(slots=True)
class _Found:
    """What the stages have noted of one transfer."""

    marks: dict[str, float] = field(default_factory=dict)
    computing: float | None = None
    pieces: dict[int, _Piece] = field(default_factory=dict)


def assemble(
    requests: Iterable[Seen], lives: Iterable[Life], wall: float, missing: int, about: Mapping[str, str]
) -> Timeline:
    """``wall``: what the wall clock shows at second 0 of this process's monotonic one."""
    requests, lives = list(requests), list(lives)
    labels: dict[str, str] = {handoff.transfer: _text(seen.key) for seen in requests for handoff in seen.handoffs}
    found: dict[str, _Found] = {}
    lives.sort(key=lambda life: (life.peer.name.partition("-")[0] != "prefill", life.peer))
    stages = [_stage(life, found, labels) for life in lives]
    moments = [seen.added for seen in requests]
    moments += [step.began for stage in stages for step in stage.steps[:1]]
    moments += [command.began for stage in stages for command in stage.commands[:1]]
    moments += [moment for what in found.values() for moment in what.marks.values()]
    origin = min(moments, default=0.0)
    end = max(
        [
            origin,
            *moments,
            *(seen.ended for seen in requests if seen.ended is not None),
            *(at for seen in requests for handoff in seen.handoffs for at in handoff.heard.values()),
            *(stage.steps[-1].ended for stage in stages if stage.steps),
            *(moment for life in lives for moment in (life.lost, life.fenced) if moment is not None),
        ]
    )
    shift = _Shift(origin)
    lines = [_request(seen, found, end, shift) for seen in requests]
    return Timeline(
        max(wall + origin, 0.0),
        shift(end),
        lines,
        [_shifted(stage, shift) for stage in stages],
        missing,
        {name: _text(value) for name, value in about.items()},
    )


class _Shift:
    """From this process's clock to seconds since the origin."""

    def __init__(self, origin: float) -> None:
        self._origin = origin

    def __call__(self, at: float) -> float:
        return max(round(at - self._origin, 9), 0.0)

    def maybe(self, at: float | None) -> float | None:
        return None if at is None else self(at)


def _text(text: str) -> str:
    """What can be written: an id or a path may hold bytes that are no text, as Python keeps them (surrogates)."""
    return text.encode("utf-8", "backslashreplace").decode()


def _stage(life: Life, found: dict[str, _Found], labels: Mapping[str, str]) -> StageLine:
    """Its line, on our clock; what it has noted of transfers goes to ``found``."""
    steps: list[StepLine] = []
    commands: list[CommandLine] = []
    held: list[Span] = []
    paused: dict[str, float] = {}

    def label(transfer: str) -> str:
        return labels.get(transfer, transfer[:8])

    life.unreadable = 0
    for offset, data in life.events:
        off = offset.seconds
        event = tracing.decode(data)
        match event:
            case None:  # it takes no other with it (C9.3)
                life.unreadable += 1
            case tracing.Step():
                began, ended = event.began - off, event.ended - off
                for transfer, _, _ in event.computed:
                    what = found.setdefault(transfer, _Found())
                    if what.computing is None:
                        what.computing = began
                named = [(label(transfer), start, past) for transfer, start, past in event.computed]
                makes = [label(transfer) for transfer in event.produced]
                steps.append(StepLine(began, ended, named, event.ranges, makes, event.batch, event.tokens))
            case tracing.Command():
                commands.append(CommandLine(event.name, label(event.transfer), event.began - off, event.ended - off))
            case tracing.Paused():
                paused.setdefault(event.peer, event.at - off)
            case tracing.Resumed():
                since = paused.pop(event.peer, None)
                if since is not None and since <= event.at - off:
                    held.append(Span(event.peer.partition("@")[0], since, event.at - off))
            case _:
                _note(found.setdefault(event.transfer, _Found()), event, off)
    steps.sort(key=lambda step: step.began)
    role = life.peer.name.rpartition("-")[0]
    return StageLine(
        life.peer.name, life.peer.epoch, role, steps, commands, held, life.lost, life.fenced, _text(life.cause),
        max((offset.doubt for offset in {id(p): p for p, _ in life.events}.values()), default=0.0), life.pushed_out,
        life.note or life.unread,
    )  # fmt: skip


def _note(what: _Found, event: tracing.Event, off: float) -> None:
    match event:
        case tracing.Marked():
            what.marks[event.milestone] = event.at - off
        case tracing.Planned():
            for sequence in range(event.first, min(event.past, event.first + tracing.PAGE_EVENTS)):
                what.pieces.setdefault(sequence, _Piece()).planned = event.at - off
        case tracing.Ready():
            what.pieces.setdefault(event.sequence, _Piece()).ready = event.at - off
        case tracing.Full():
            what.pieces.setdefault(event.sequence, _Piece()).full = event.at - off
        case tracing.Submitted():
            piece = what.pieces.setdefault(event.sequence, _Piece())
            piece.submitted, piece.taken = event.began - off, event.ended - off
            piece.nbytes, piece.segments = event.nbytes, event.segments
        case tracing.Completed():
            piece = what.pieces.setdefault(event.sequence, _Piece())
            piece.completed, piece.outcome = event.at - off, event.outcome
        case tracing.Receipt():
            piece = what.pieces.setdefault(event.sequence, _Piece())
            if piece.receipt is None:
                piece.receipt, piece.heard = event.began - off, event.ended - off
        case _:
            pass


def _request(seen: Seen, found: Mapping[str, _Found], end: float, shift: _Shift) -> RequestLine:
    record = seen.record
    generations: list[Generation] = []
    since = seen.added
    for place, handoff in enumerate(seen.handoffs):
        what = found.get(handoff.transfer, _Found())
        following = seen.handoffs[place + 1] if place + 1 < len(seen.handoffs) else None
        marks = {**handoff.heard, **what.marks}
        if what.computing is not None:
            marks["computing"] = what.computing
        else:
            marks["computing"] = marks.get(Milestones.PREFILL_STARTED, marks.get(Milestones.RESERVED, -1.0))
        until = seen.ended
        if following is not None:  # it was given up when it had reached its last milestone before the next one
            limit = following.heard.get(Milestones.PLACED, end)
            alive = [at for _, name in _BOUNDS if (at := marks.get(name)) is not None and since <= at <= limit]
            until = max(alive, default=since)
        phases = _phases(marks, since, end if until is None else until, until is not None and following is None)
        del marks["computing"]
        generations.append(
            Generation(
                handoff.transfer, handoff.prefill, handoff.decode,
                {name: shift(at) for name, at in sorted(marks.items(), key=lambda item: item[1])},
                [Span(phase.name, shift(phase.began), shift(phase.ended)) for phase in phases],
                [_chunk(sequence, piece, shift) for sequence, piece in sorted(what.pieces.items())],
            )
        )  # fmt: skip
        if following is not None and until is not None:
            since = until
    if not generations:
        until = end if seen.ended is None else seen.ended
        generations.append(Generation("", "", "", {}, [Span("queue", shift(seen.added), shift(until))], []))
    error = cause = outcome = ""
    first: float | None = None
    if record is not None:
        outcome, error = record.finish_reason, "" if record.error is None else _text(str(record.error))
        cause = "" if seen.cause == "none" else _text(seen.cause)
        if "first_token" in record.milestones:
            first = shift(seen.added + record.milestones["first_token"])
    last = [chunk for chunk in generations[-1].chunks if chunk.submitted is not None]
    return RequestLine(
        _text(seen.key), shift(seen.added), shift.maybe(seen.ended), outcome, error, cause, seen.prompt_tokens,
        0 if record is None else len(record.token_ids), first,
        0 if record is None else record.prefix_prefill, 0 if record is None else record.prefix_decode,
        record.chunks if record and record.chunks else len(last),
        record.segments if record and record.chunks else sum(chunk.segments for chunk in last),
        record.bytes if record and record.chunks else sum(chunk.nbytes for chunk in last),
        generations,
    )  # fmt: skip


def _phases(marks: Mapping[str, float], since: float, until: float, over: bool) -> list[Span]:
    """One after the other, without a gap, up to ``until``; then what comes after the end, if ``over``.

    A milestone that was never seen begins no phase: what was before it goes on.
    """
    phases: list[Span] = []
    name, began = "queue", since
    for following, milestone in _BOUNDS:
        at = marks.get(milestone)
        if at is None or not since <= at or at > until:
            continue
        at = max(at, began)
        phases.append(Span(name, began, at))
        name, began = following, at
    phases.append(Span(name, began, max(until, began)))
    if over:
        retired = marks.get(Milestones.DESTINATION_RETIRED)
        if retired is not None and retired > until:
            phases.append(Span("retire", until, retired))
    return phases


def _chunk(sequence: int, piece: _Piece, shift: _Shift) -> Chunk:
    receipt = piece.receipt
    if receipt is not None and piece.submitted is not None:
        receipt = max(receipt, piece.submitted)  # two hosts' clocks are known to within a message's time only
    heard = piece.heard if receipt is None or piece.heard is None else max(piece.heard, receipt)
    return Chunk(
        sequence, piece.nbytes, piece.segments, shift.maybe(piece.planned), shift.maybe(piece.ready),
        shift.maybe(piece.full), shift.maybe(piece.submitted), shift.maybe(piece.taken), shift.maybe(receipt),
        shift.maybe(heard), shift.maybe(piece.completed), piece.outcome,
    )  # fmt: skip


def _shifted(stage: StageLine, shift: _Shift) -> StageLine:
    return StageLine(
        stage.name, stage.epoch, stage.role,
        [StepLine(shift(s.began), shift(s.ended), s.computed, s.ranges, s.produced, s.batch, s.tokens)
         for s in stage.steps],
        [CommandLine(c.name, c.request, shift(c.began), shift(c.ended)) for c in stage.commands],
        [Span(h.name, shift(h.began), shift(h.ended)) for h in stage.held],
        shift.maybe(stage.lost), shift.maybe(stage.fenced), stage.cause, round(stage.doubt, 9), stage.dropped,
        stage.note,
    )  # fmt: skip
