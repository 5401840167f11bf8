"""A timeline as Chrome trace events, which ui.perfetto.dev opens.

Each life of a stage is a *process* with the tracks ``engine`` (its steps, and what it was told between them),
``transport`` (each chunk as it is handed over or received) and one track per destination for what holds its engine or
a chunk back.  ``requests`` is a process with the tracks of each request: its phases, and below them its chunks, on as
many rows as overlap.  A flow leads from each chunk's submission at P to its receipt at D.

Slices of one track nest or do not touch: everything is whole nanoseconds until it is written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kvbaton.observe.timeline import PHASES, Chunk, Generation, RequestLine, StageLine, StepLine, Timeline
from kvbaton.quantities import size

#: Characters of a request's id in a name.
_LABEL: Final = 48
_REQUESTS: Final = 1
_FIRST_STAGE: Final = 2
_ENGINE, _TRANSPORT, _HELD = 1, 2, 3
#: Rows of tracks that a request may take.
_ROWS: Final = 1024
#: Nanoseconds that a slice lasts at least which a flow begins or ends in.
_THIN: Final = 1000
_NOBODY: Final = 0

Event = dict[str, Any]
#: Of a stage's lives in order: when each was lost, and its process in the file.
_Lives = list[tuple[float, int]]
#: From when to when, whether it submits or receives, the chunk's name, its flow, its arguments.
_Call = tuple[int, int, Literal["submit", "receipt"], str, int, dict[str, Any]]


def draw(timeline: Timeline) -> dict[str, Any]:
    """The object that is written: ``traceEvents`` first, since a reader may stop at what it does not know."""
    events = [*_stages(timeline), *_requests(timeline)]
    about = {f"kvbaton.{name}": value for name, value in timeline.about.items()}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


@dataclass(slots=True)
class _Track:
    """Slices of one thread, nested."""

    pid: int
    tid: int
    events: list[Event] = field(default_factory=list)

    def slice(self, name: str, began: int, ended: int, category: str, args: Mapping[str, Any]) -> None:
        """From ``began`` to ``ended``, in nanoseconds."""
        self.events.append({
            "name": name, "cat": category, "ph": "X", "ts": began / 1000, "dur": max(ended - began, 0) / 1000,
            "pid": self.pid, "tid": self.tid, "args": dict(args),
        })  # fmt: skip

    def instant(self, name: str, at: int, args: Mapping[str, Any]) -> None:
        self.events.append({
            "name": name, "cat": "event", "ph": "i", "s": "t", "ts": at / 1000, "pid": self.pid, "tid": self.tid,
            "args": dict(args),
        })  # fmt: skip


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _label(text: str) -> str:
    return text if len(text) <= _LABEL else f"{text[: _LABEL - 1]}…"


def _named(pid: int, tid: int, name: str, order: int) -> Iterator[Event]:
    yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
    yield {"name": "thread_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": order}}


def _process(pid: int, name: str, order: int) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": order}}


# -- stages --------------------------------------------------------------------------------------------------------


def _stages(timeline: Timeline) -> Iterator[Event]:
    lives: dict[str, _Lives] = {}
    for place, stage in enumerate(timeline.stages):
        pid = _FIRST_STAGE + place
        mine = lives.setdefault(stage.name, [])
        mine.append((math.inf if stage.lost is None else stage.lost, pid))
        yield from _process(pid, stage.name if len(mine) == 1 else f"{stage.name} (life {len(mine)})", place)
        yield from _engine(pid, stage)
        yield from _held(pid, stage)
    yield from _transport(timeline, lives)


def _engine(pid: int, stage: StageLine) -> Iterator[Event]:
    yield from _named(pid, _ENGINE, "engine", _ENGINE)
    track = _Track(pid, _ENGINE)
    busy = 0
    work = [(step.began, step.ended, step.text, "step", step.args) for step in map(_Step, stage.steps)]
    work += [(c.began, c.ended, f"{c.name} {_label(c.request)}", "command", {"request": c.request})
             for c in stage.commands]  # fmt: skip
    for began, ended, text, category, args in sorted(work, key=lambda item: item[:2]):
        first = max(_ns(began), busy)  # two clocks' readings may differ by their grain
        busy = max(_ns(ended), first)
        track.slice(text, first, busy, category, args)
    if stage.lost is not None:
        track.instant(f"{stage.name} lost", _ns(stage.lost), {"cause": stage.cause})
    if stage.fenced is not None:
        track.instant(f"{stage.name} fenced", _ns(stage.fenced), {})
    yield from track.events


class _Step:
    """A step in words: what it ran."""

    def __init__(self, step: StepLine) -> None:
        self.began, self.ended = step.began, step.ended
        parts = []
        if len(step.computed) == 1 == step.ranges:
            request, start, end = step.computed[0]
            parts.append(f"prefill {_label(request)} [{start}, {end})")
        elif step.ranges:
            parts.append(f"prefill of {step.ranges} requests, {sum(end - start for _, start, end in step.computed)}"
                         " tokens")  # fmt: skip
        if step.batch:
            parts.append(f"decode {_label(step.produced[0])}" if step.batch == 1 else f"decode batch of {step.batch}")
        self.text = ", ".join(parts) or "step"
        self.args: dict[str, Any] = {}
        if step.computed:
            self.args["prefill"] = [f"{request} [{start}, {end})" for request, start, end in step.computed]
        if step.produced:
            self.args |= {"decode": step.produced, "tokens": step.tokens}
        unnamed = step.ranges - len(step.computed) + step.batch - len(step.produced)
        if unnamed:
            self.args["not named"] = unnamed


def _held(pid: int, stage: StageLine) -> Iterator[Event]:
    for place, destination in enumerate(sorted({span.name for span in stage.held})):
        tid = _HELD + place
        yield from _named(pid, tid, f"engine waits: backlog to {destination}", tid)
        track = _Track(pid, tid)
        free = 0
        for span in stage.held:
            if span.name == destination:
                first = max(_ns(span.began), free)
                free = max(_ns(span.ended), first)
                track.slice("too much waits to be sent", first, free, "back-pressure", {"to": destination})
        yield from track.events


def _transport(timeline: Timeline, lives: Mapping[str, _Lives]) -> Iterator[Event]:
    calls: dict[int, list[_Call]] = {}
    flying: dict[int, list[tuple[int, int]]] = {}
    number = 0
    for request in timeline.requests:
        for generation in request.generations:
            for chunk in generation.chunks:
                number += 1
                args = {**_sizes(chunk), "request": request.id, "transfer": generation.transfer}
                title = f"{_label(request.id)} #{chunk.sequence}"
                if chunk.submitted is not None and chunk.taken is not None:
                    pid = _life_of(lives, generation.prefill, chunk.submitted)
                    began = _ns(chunk.submitted)
                    calls.setdefault(pid, []).append((began, _ns(chunk.taken), "submit", title, number, args))
                    over = min((at for at in (chunk.completed, chunk.receipt) if at is not None), default=None)
                    if over is not None:
                        changes = (began, chunk.nbytes), (max(_ns(over), began), -chunk.nbytes)
                        flying.setdefault(pid, []).extend(changes)
                if chunk.receipt is not None and chunk.heard is not None:
                    pid = _life_of(lives, generation.decode, chunk.receipt)
                    calls.setdefault(pid, []).append(
                        (_ns(chunk.receipt), _ns(chunk.heard), "receipt", title, number, args)
                    )
    calls.pop(_NOBODY, None)
    #: Per flow: where it begins, and where it may end: track, first and last nanosecond.
    begins: dict[int, tuple[_Track, int, int]] = {}
    ends: dict[int, tuple[_Track, int, int]] = {}
    for pid, made in calls.items():
        yield from _named(pid, _TRANSPORT, "transport", _TRANSPORT)
        track, free = _Track(pid, _TRANSPORT), 0
        for began, ended, kind, title, flow, args in sorted(made, key=lambda call: call[:2]):
            first = max(began, free)
            free = max(ended, first + _THIN)
            track.slice(f"{kind} {title}", first, free, "transport", args)
            (begins if kind == "submit" else ends)[flow] = track, first, free
        yield from track.events
        yield from _counter(pid, flying.get(pid, []))
    for flow, (track, at, _) in begins.items():
        if flow in ends:
            other, first, last = ends[flow]
            if at < last:  # else its clock is known too badly for an arrow
                yield _end("s", flow, track, at)
                yield _end("f", flow, other, max(first, at)) | {"bp": "e"}


def _life_of(lives: Mapping[str, _Lives], name: str, at: float) -> int:
    """The process of the life that the stage of this name had then."""
    return next((pid for until, pid in lives.get(name, ()) if at <= until), _NOBODY)


def _end(phase: str, flow: int, track: _Track, at: int) -> Event:
    return {"name": "chunk", "cat": "chunk", "ph": phase, "id": flow, "ts": at / 1000, "pid": track.pid,
            "tid": track.tid}  # fmt: skip


def _counter(pid: int, changes: list[tuple[int, int]]) -> Iterator[Event]:
    total = 0
    for at, change in sorted(changes):
        total += change
        yield {"name": "bytes on their way", "ph": "C", "ts": at / 1000, "pid": pid, "args": {"bytes": total}}


def _sizes(chunk: Chunk) -> dict[str, Any]:
    return {"sequence": chunk.sequence, "bytes": chunk.nbytes, "segments": chunk.segments}


# -- requests ------------------------------------------------------------------------------------------------------


def _requests(timeline: Timeline) -> Iterator[Event]:
    if not timeline.requests:
        return
    yield from _process(_REQUESTS, "requests", len(timeline.stages))
    for number, request in enumerate(timeline.requests):
        base = 1 + number * _ROWS
        last = request.generations[-1]
        way = f" {last.prefill} → {last.decode}" if last.prefill and last.decode else ""
        yield from _named(_REQUESTS, base, f"{_label(request.id)}{way}", base)
        yield from _phases(_Track(_REQUESTS, base), request)
        yield from _rows(base + 1, request)


def _phases(track: _Track, request: RequestLine) -> Iterator[Event]:
    phases = [phase for generation in request.generations for phase in generation.phases]
    began = _ns(request.added)
    ended = max([began, *(_ns(phase.ended) for phase in phases)])
    facts: dict[str, Any] = {
        "outcome": request.outcome or "the trace ends before it does", "prompt tokens": request.prompt_tokens,
        "tokens": request.tokens, "bytes": request.nbytes, "chunks": request.chunks, "segments": request.segments,
        "cached at P": request.prefix_prefill, "cached at D": request.prefix_decode,
    }  # fmt: skip
    if request.error:
        facts["error"] = request.error
    track.slice(f"request {_label(request.id)}", began, ended, "request", facts)
    free = began
    for generation in request.generations:
        args = {"transfer": generation.transfer, "prefill": generation.prefill, "decode": generation.decode}
        for phase in generation.phases:
            first = max(_ns(phase.began), free)
            free = max(_ns(phase.ended), first)
            track.slice(phase.name, first, free, "phase", {**args, "what": PHASES[phase.name]})
    if request.first_token is not None:
        track.instant("first token", min(_ns(request.first_token), ended), {})
    if request.error and request.ended is not None:
        track.instant("failed", min(_ns(request.ended), ended), {"cause": request.error})
    yield from track.events


@dataclass(slots=True)
class _Bar:
    """What takes a row of a request for a while; ``parts`` lie in it, one after the other."""

    name: str
    began: int
    ended: int
    args: dict[str, Any]
    parts: list[tuple[str, int, int]]


def _rows(tid: int, request: RequestLine) -> Iterator[Event]:
    bars = [bar for generation in request.generations for bar in _bars(generation)]
    bars.sort(key=lambda bar: (bar.began, bar.ended))
    free: list[int] = []
    tracks: list[_Track] = []
    for bar in bars:
        row = next((row for row, until in enumerate(free) if until <= bar.began), len(free))
        if row == len(free):
            if row == _ROWS - 2:
                continue
            free.append(0)
            tracks.append(_Track(_REQUESTS, tid + row))
            name = f"{_label(request.id)} chunks" + (f" ({row + 1})" if row else "")
            yield from _named(_REQUESTS, tid + row, name, tid + row)
        free[row] = bar.ended
        tracks[row].slice(bar.name, bar.began, bar.ended, "chunk", bar.args)
        for name, began, ended in bar.parts:
            tracks[row].slice(name, began, ended, "chunk", {})
    for track in tracks:
        yield from track.events


def _bars(generation: Generation) -> Iterator[_Bar]:
    latest = 0
    for chunk in generation.chunks:
        known = [at for at in (chunk.planned, chunk.ready, chunk.submitted, chunk.receipt, chunk.completed)
                 if at is not None]  # fmt: skip
        over = chunk.receipt if chunk.receipt is not None else chunk.completed
        began = _ns(min(known))
        ended = max(_ns(over if over is not None else max(known)), began + 1000)
        moments = [("device", chunk.planned), ("waits for room", chunk.ready), ("on the way", chunk.submitted)]
        there = [(name, _ns(at)) for name, at in moments if at is not None]
        parts, since = [], began
        for place, (name, at) in enumerate(there):
            until = there[place + 1][1] if place + 1 < len(there) else ended
            first = max(at, since)
            since = max(min(until, ended), first)
            if since > first:
                parts.append((name, first, min(since, ended)))
        args = {**_sizes(chunk), "outcome": chunk.outcome, "transfer": generation.transfer}
        if chunk.full is not None:
            args["the transport was full"] = True
        latest = max(latest, ended)
        yield _Bar(f"chunk {chunk.sequence} ({size(chunk.nbytes)})", began, ended, args, parts)
    received, retired = generation.milestones.get("received"), generation.milestones.get("source_retired")
    if received is not None and retired is not None and _ns(retired) > max(_ns(received), latest):
        yield _Bar("P retires", max(_ns(received), latest), _ns(retired), {}, [])
