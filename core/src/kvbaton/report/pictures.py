"""Pictures as SVG that grows with the page: across in per cent, so that text keeps its size; down in pixels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import Final

import numpy as np

from kvbaton.observe.timeline import PHASES, RequestLine
from kvbaton.quantities import duration, moments, size

#: Rows up to which each is labelled, and has its chunks drawn below its phases.
ROOMY: Final = 48
#: Pixels between two labels where not every row has one.
_LABELS: Final = 16
#: Least width of what is drawn, in per cent: a short phase is a hairline, not nothing.
_HAIR: Final = 0.06
_AXIS: Final = 22


def legend(names: Iterable[str], roomy: bool) -> str:
    """The colours of phases, and the marks that there are where each row has room for them."""
    entries = [
        f'<li title="{escape(PHASES[name])}"><span class="key p-{escape(name)}"></span>{escape(name)}</li>'
        for name in names
    ]
    if roomy:
        entries.append('<li><span class="key line"></span>chunks on their way</li>')
        entries.append('<li><span class="key mark"></span>first token</li>')
    return f'<ul class="legend">{"".join(entries)}</ul>'


def stacked(shares: Sequence[tuple[str, float, float]]) -> str:
    """One bar: the parts of a whole, with what each comes to."""
    bars, texts, at = [], [], 0.0
    for name, seconds, part in shares:
        tip = f"{name}: {duration(seconds)} per request, {part:.1%}"
        bars.append(f"<g><title>{escape(tip)}</title>{_rect(at, part * 100, 0, 34, f'p-{name}')}</g>")
        if part >= 0.08:
            place = f'x="{at + part * 50:.3f}%" y="22" text-anchor="middle"'
            texts.append(f'<text class="on-{escape(name)}" {place}>{escape(name)} {part:.0%}</text>')
        at += part * 100
    return f'<svg class="stack" height="34" role="img" aria-label="Where the time went">{"".join(bars + texts)}</svg>'


def waterfall(requests: Sequence[RequestLine], length: float) -> str:
    """A row for each request: its phases over time, and where there is room its chunks below them."""
    roomy = len(requests) <= ROOMY
    pitch = 22 if roomy else 10 if len(requests) <= 150 else 5
    bar = 11 if roomy else pitch - 1
    every = 1 if roomy else -(-_LABELS // pitch)
    height = _AXIS + pitch * len(requests) + 4
    labels, rows = [], []
    for place, request in enumerate(requests):
        top = _AXIS + place * pitch
        failed = request.outcome == "failed"
        if place % every == 0:
            middle = top + (9 if roomy else min(pitch, 10))
            kind = "label bad" if failed and roomy else "label"
            where = f'class="{kind}" x="100%" y="{middle}" text-anchor="end" dx="-8"'
            name = f"{escape(_short(request.id))}<title>{escape(request.id)}</title>"
            labels.append(f"<text {where}>{name}</text>")
        rows.append(f"<g><title>{escape(_tip(request))}</title>{''.join(_row(request, length, top, bar, roomy))}</g>")
    grid = "".join(_grid(length, height))
    return (
        f'<div class="fall"><svg class="labels" height="{height}" aria-hidden="true">{"".join(labels)}</svg>'
        f'<svg class="rows" height="{height}" role="img" aria-label="Phases of each request over time">{grid}'
        f"{''.join(rows)}</svg></div>"
    )


def _row(request: RequestLine, length: float, top: int, bar: int, roomy: bool) -> Iterator[str]:
    for generation in request.generations:
        for phase in generation.phases:
            yield _rect(*_across(phase.began, phase.ended, length), top, bar, f"p-{phase.name}")
        if roomy:
            for chunk in generation.chunks:
                if chunk.submitted is not None:
                    until = chunk.receipt if chunk.receipt is not None else chunk.completed
                    across = _across(chunk.submitted, chunk.submitted if until is None else until, length)
                    yield _rect(*across, top + bar + 1, 4, "chunk")
    if request.first_token is not None and roomy:
        at = request.first_token / length * 100
        yield f'<line class="first" x1="{at:.3f}%" x2="{at:.3f}%" y1="{top - 1}" y2="{top + bar + 1}"/>'
    if request.outcome == "failed" and request.ended is not None:
        at = min(request.ended / length * 100, 99.2)
        yield f'<text class="cross" x="{at:.3f}%" y="{top + (10 if roomy else 7)}">✕</text>'


def _tip(request: RequestLine) -> str:
    taken = [f"{phase.name} {duration(phase.ended - phase.began)}" for g in request.generations for phase in g.phases]
    whole = "" if request.ended is None else f" after {duration(request.ended - request.added)}"
    last = request.generations[-1]
    way = f", {last.prefill} → {last.decode}" if last.decode else ""
    sent = f"{size(request.nbytes)} in {request.chunks} chunks"
    lines = [
        f"{request.id}: {request.outcome or 'unfinished'}{whole}{way}",
        f"{request.prompt_tokens} prompt tokens, {request.tokens} tokens, {sent}",
        *taken,
    ]
    if request.error:
        lines.append(request.error)
    return "\n".join(lines)


def course(values: np.ndarray, most: float, kind: str, label: str) -> str:
    """How much of ``most`` there was, over time, as an area."""
    height, count = 30, len(values)
    bars = []
    start = 0
    levels = np.clip(values / most if most else values, 0.0, 1.0)
    while start < count:
        end = start
        while end < count and levels[end] == levels[start]:
            end += 1
        tall = float(levels[start]) * height
        if tall > 0.0:
            tall = max(tall, 1.0)
            width = (end - start) / count * 100
            bars.append(_rect(start / count * 100, width, height - tall, tall, kind))
        start = end
    return (
        f'<svg class="course" height="{height}" role="img" aria-label="{escape(label)}">'
        f"<title>{escape(label)}</title>{''.join(bars)}</svg>"
    )


def axis(length: float) -> str:
    """A time axis by itself, below pictures over time."""
    return f'<svg class="axis" height="{_AXIS}" aria-hidden="true">{"".join(_grid(length, 6, below=True))}</svg>'


def _grid(length: float, height: int, below: bool = False) -> Iterator[str]:
    marks = ticks(length)
    for tick, text in zip(marks, moments(marks[1] if len(marks) > 1 else 0.0, len(marks)), strict=True):
        at = tick / max(length, 1e-9) * 100
        anchor = "start" if at < 1 else "end" if at > 96 else "middle"
        yield f'<line class="grid" x1="{at:.3f}%" x2="{at:.3f}%" y1="{0 if below else _AXIS - 6}" y2="{height}"/>'
        y = 18 if below else 11
        yield f'<text class="tick" x="{at:.3f}%" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def ticks(length: float) -> list[float]:
    """Round moments from 0 to ``length``: some four to ten."""
    if length <= 0.0:
        return [0.0]
    rough = length / 9
    scale = 10.0 ** np.floor(np.log10(rough))
    step = float(min((scale * m for m in (1, 2, 5, 10) if scale * m >= rough), default=scale * 10))
    return [step * n for n in range(int(length / step + 1e-9) + 1)]


def _across(began: float, ended: float, length: float) -> tuple[float, float]:
    return began / length * 100, max((ended - began) / length * 100, _HAIR)


def _rect(x: float, width: float, y: float, height: float, kind: str) -> str:
    return f'<rect class="{escape(kind)}" x="{x:.3f}%" y="{y:g}" width="{width:.3f}%" height="{height:g}"/>'


def _short(text: str) -> str:
    return text if len(text) <= 14 else f"{text[:13]}…"
