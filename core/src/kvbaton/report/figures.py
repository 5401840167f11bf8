"""The figures of a page: what a timeline comes to.  Seconds and bytes; nothing here knows how they are shown."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from kvbaton.observe.timeline import PHASES, Chunk, RequestLine, StageLine, Timeline
from kvbaton.spread import NOTHING, Spread

#: Moments at which a picture over time is drawn.
BINS: Final = 160
#: What a phase after the end of a request takes no part in.
AFTER: Final = "retire"


def spread(values: Sequence[float]) -> Spread:
    """Of however many; of none :data:`~kvbaton.spread.NOTHING`."""
    return Spread.of(values) if values else NOTHING


def phase_seconds(request: RequestLine) -> dict[str, float]:
    """How long a request was in each phase, over all of its generations."""
    taken: dict[str, float] = defaultdict(float)
    for generation in request.generations:
        for phase in generation.phases:
            taken[phase.name] += phase.ended - phase.began
    return dict(taken)


def phases(requests: Iterable[RequestLine]) -> list[tuple[str, Spread]]:
    """Seconds in every phase that occurred, over the requests that were in it, in the order of a request's life."""
    values: dict[str, list[float]] = defaultdict(list)
    for request in requests:
        for name, seconds in phase_seconds(request).items():
            values[name].append(seconds)
    return [(name, spread(values[name])) for name in PHASES if name in values]


def first_tokens(requests: Iterable[RequestLine]) -> Spread:
    return spread([r.first_token - r.added for r in requests if r.first_token is not None])


def totals(requests: Iterable[RequestLine]) -> Spread:
    return spread([r.ended - r.added for r in requests if r.ended is not None])


def shares(requests: Sequence[RequestLine]) -> list[tuple[str, float, float]]:
    """Where the time went: of each phase its name, its mean seconds per request, and its part of all."""
    sums: Counter[str] = Counter()
    for request in requests:
        sums.update({name: seconds for name, seconds in phase_seconds(request).items() if name != AFTER})
    whole = sum(sums.values())
    if not requests or whole <= 0.0:
        return []
    return [(name, sums[name] / len(requests), sums[name] / whole) for name in PHASES if sums[name] > 0.0]


@dataclass(frozen=True, slots=True)
class Use:
    """What an engine did: fractions of the run's length; ``course`` is how busy it was over time, 0 to 1."""

    stage: StageLine
    prefill: float
    decode: float
    other: float
    steps: Spread
    largest_batch: int
    tokens: int
    held: float
    course: np.ndarray

    @property
    def busy(self) -> float:
        return self.prefill + self.decode + self.other


def use(stage: StageLine, length: float) -> Use:
    length = max(length, 1e-9)
    spans: list[tuple[float, float]] = []
    prefill = decode = other = 0.0
    for step in stage.steps:
        seconds = step.ended - step.began
        spans.append((step.began, step.ended))
        if step.batch:
            decode += seconds
        elif step.ranges or stage.role == "prefill":
            prefill += seconds
        else:
            other += seconds
    for command in stage.commands:
        other += command.ended - command.began
        spans.append((command.began, command.ended))
    steps = spread([step.ended - step.began for step in stage.steps])
    return Use(
        stage, prefill / length, decode / length, other / length, steps,
        max((step.batch or step.ranges for step in stage.steps), default=0), sum(step.tokens for step in stage.steps),
        sum(span.ended - span.began for span in stage.held) / length, covered(spans, length),
    )  # fmt: skip


def covered(spans: Sequence[tuple[float, float]], length: float, bins: int = BINS) -> np.ndarray:
    """Which part of each of ``bins`` equal parts of ``[0, length]`` the spans cover, which do not overlap."""
    edges = np.linspace(0.0, length, bins + 1)
    if not spans:
        return np.zeros(bins)
    began, ended = np.asarray(spans, dtype=float).T
    order = np.argsort(began, kind="stable")
    began, ended = began[order], ended[order]
    before = np.concatenate(([0.0], np.cumsum(ended - began)))
    # seconds covered up to each edge: spans that have ended, and what of the one under way has passed
    place = np.searchsorted(began, edges, side="right")
    under_way = np.where(place > 0, np.maximum(ended[np.maximum(place - 1, 0)] - edges, 0.0), 0.0)
    return np.clip(np.diff(before[place] - under_way) / (length / bins), 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Way:
    """What went from one stage to another.  ``rate``: bytes a second while any was on its way."""

    source: str
    destination: str
    chunks: int
    nbytes: int
    segments: int
    rate: float
    on_the_way: Spread
    room: Spread
    refused: int


def ways(requests: Iterable[RequestLine]) -> list[Way]:
    """Of every pair of stages between which something was sent."""
    between: dict[tuple[str, str], list[Chunk]] = defaultdict(list)
    for request in requests:
        for generation in request.generations:
            sent = [chunk for chunk in generation.chunks if chunk.submitted is not None]
            if sent:
                between[generation.prefill, generation.decode] += sent
    return [_way(*pair, chunks) for pair, chunks in sorted(between.items())]


def _way(source: str, destination: str, chunks: Sequence[Chunk]) -> Way:
    there = [(c.submitted, c.receipt, c.nbytes) for c in chunks if c.submitted is not None and c.receipt is not None]
    seconds, until = 0.0, 0.0
    for began, ended, _ in sorted(there):
        seconds += max(ended - max(began, until), 0.0)
        until = max(until, ended)
    waited = [c.submitted - c.ready for c in chunks if c.submitted is not None and c.ready is not None]
    return Way(
        source, destination, len(chunks), sum(c.nbytes for c in chunks), sum(c.segments for c in chunks),
        sum(nbytes for _, _, nbytes in there) / seconds if seconds else 0.0,
        spread([ended - began for began, ended, _ in there]), spread(waited),
        sum(c.full is not None for c in chunks),
    )  # fmt: skip


def flying(requests: Iterable[RequestLine], length: float, bins: int = BINS) -> np.ndarray:
    """The most bytes that were on their way in each of ``bins`` equal parts of ``[0, length]``."""
    changes = []
    for request in requests:
        for generation in request.generations:
            for c in generation.chunks:
                if c.submitted is not None and c.receipt is not None:
                    changes += [(c.submitted, c.nbytes), (c.receipt, -c.nbytes)]
    course = np.zeros(bins)
    total, now = 0, 0
    for at, change in sorted(changes):
        place = min(int(at / max(length, 1e-9) * bins), bins - 1)
        course[now : place + 1] = np.maximum(course[now : place + 1], total)
        total, now = total + change, place
        course[place] = max(course[place], total)
    return course


def outcomes(timeline: Timeline) -> Counter[str]:
    """How many requests ended how; "unfinished" where the trace ends first."""
    return Counter(request.outcome or "unfinished" for request in timeline.requests)
