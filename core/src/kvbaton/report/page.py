"""The page: one file of HTML that needs nothing else, neither network nor script, by day and by night."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import groupby
from typing import Final

from kvbaton.observe.timeline import PHASES, RequestLine, Timeline
from kvbaton.quantities import duration, milliseconds, plural, rate, size
from kvbaton.report import figures, pictures
from kvbaton.report.style import STYLE

#: Rows of the tables of failures, and of the slowest requests; the others are counted.
_FAILURES: Final = 50
_SLOWEST: Final = 5
#: Requests in the table of all of them, which is folded away.
_ALL: Final = 2000

#: Heads of columns of text.
_WIDE: Final = ("what passes in it", "cause", "error")

Cell = str | tuple[str, str]


def page(timeline: Timeline, title: str) -> str:
    """The whole page.  Every text of the run is escaped; nothing on it is fetched or executed."""
    done = [request for request in timeline.requests if request.ended is not None]
    sections = [
        _head(timeline, title, done),
        _section("Where the time went", _shares(done)),
        _section("Requests over time", _fall(timeline)),
        _section("How long each phase took", _phases(done)),
        _section("What the engines did", _stages(timeline)),
        _section("Bytes and chunks", _bytes(timeline)),
        _section("Failures", _failures(timeline)),
        _section("The slowest requests", _slowest(done)),
        _everything(timeline.requests),
    ]
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(timeline))
    if notes:
        sections.append(_section("What is missing from this page", f"<ul>{notes}</ul>"))
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}: kvbaton report</title>'
        f"<style>{STYLE}</style></head><body><main>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


# -- the sections --------------------------------------------------------------------------------------------------


def _head(timeline: Timeline, title: str, done: Sequence[RequestLine]) -> str:
    about = timeline.about
    when = datetime.fromtimestamp(timeline.began, UTC).strftime("%Y-%m-%d %H:%M:%S UTC") if timeline.began > 0 else ""
    facts = [about.get("model", ""), about.get("transport", ""), about.get("stages", ""), when,
             f"{duration(timeline.length)} long"]  # fmt: skip
    line = " · ".join(escape(fact) for fact in facts if fact)
    ended = figures.outcomes(timeline)
    failed = ended["failed"]
    tokens = sum(request.tokens for request in timeline.requests)
    whole, first = figures.totals(done), figures.first_tokens(done)
    tiles = [
        ("requests", str(len(timeline.requests)), ", ".join(f"{count} {name}" for name, count in ended.most_common())),
        ("first token", duration(first.median) if first.count else "–", f"median; p99 {duration(first.p99)}"),
        ("whole request", duration(whole.median) if whole.count else "–", f"median; p99 {duration(whole.p99)}"),
        ("tokens made", f"{tokens:,}", f"{tokens / timeline.length:,.0f} a second" if timeline.length else ""),
        ("handed over", size(sum(request.nbytes for request in timeline.requests)),
         plural(sum(request.chunks for request in timeline.requests), "chunk")),
        ("failed", str(failed), "none" if not failed else f"{failed / len(timeline.requests):.1%} of all"),
    ]  # fmt: skip
    cards = "".join(
        f'<div class="tile{" bad" if name == "failed" and failed else ""}"><span>{escape(name)}</span>'
        f"<b>{escape(value)}</b><small>{escape(note)}</small></div>"
        for name, value, note in tiles
    )
    return (
        f'<header><span class="over">kvbaton report</span><h1>{escape(title)}</h1><p>{line}</p>'
        f'<div class="tiles">{cards}</div></header>'
    )


def _shares(done: Sequence[RequestLine]) -> str:
    shares = figures.shares(done)
    if not shares:
        return "<p>No request has ended.</p>"
    most = sorted(shares, key=lambda share: -share[2])
    whole = sum(seconds for _, seconds, _ in shares)
    words = ", ".join(f"{part:.0%} in <b>{escape(name)}</b>" for name, _, part in most[:3] if part >= 0.005)
    rows = [
        ((f'<span class="key p-{escape(name)}"></span>{escape(name)}', "raw"), milliseconds(seconds), f"{part:.1%}",
         (escape(PHASES[name]), "raw wide"))
        for name, seconds, part in shares
    ]  # fmt: skip
    return f"<p>A request took {escape(duration(whole))} on average: {words}.</p>{pictures.stacked(shares)}" + _table(
        ("phase", "ms per request", "part", "what passes in it"), rows
    )


def _fall(timeline: Timeline) -> str:
    if not timeline.requests:
        return "<p>There was no request.</p>"
    names = {phase.name for r in timeline.requests for g in r.generations for phase in g.phases}
    roomy = len(timeline.requests) <= pictures.ROOMY
    present = [name for name in PHASES if name in names]
    return (
        "<p>Each row is a request, from when it was added to when its memory was given back at D. Point at a row for"
        f" its figures.</p>{pictures.legend(present, roomy)}"
        f"{pictures.waterfall(timeline.requests, max(timeline.length, 1e-9))}"
    )


def _phases(done: Sequence[RequestLine]) -> str:
    spreads = [
        *figures.phases(done), ("first token", figures.first_tokens(done)), ("whole request", figures.totals(done))
    ]  # fmt: skip
    rows: list[Sequence[Cell]] = []
    for name, spread in spreads:
        key = f'<span class="key p-{escape(name)}"></span>' if name in PHASES else ""
        times = (spread.mean, spread.median, spread.p90, spread.p99, spread.most)
        rows.append(((key + escape(name), "raw"), f"{spread.count}", *map(milliseconds, times)))
    return "<p>Milliseconds, over the requests that were in it.</p>" + _table(
        ("phase", "requests", "mean", "median", "p90", "p99", "most"), rows
    )


def _stages(timeline: Timeline) -> str:
    if not timeline.stages:
        return "<p>No stage was traced.</p>"
    uses = [figures.use(stage, timeline.length) for stage in timeline.stages]
    rows, courses = [], []
    for use in uses:
        stage = use.stage
        name = escape(stage.name)
        if stage.lost is not None:
            name += f' <span class="bad">lost at {escape(duration(stage.lost))}</span>'
        rows.append((
            (name, "raw"), f"{use.busy:.0%}", f"{use.prefill:.0%}", f"{use.decode:.0%}", f"{use.other:.1%}",
            f"{use.steps.count}", milliseconds(use.steps.median), milliseconds(use.steps.most), f"{use.largest_batch}",
            f"{use.held:.1%}",
        ))  # fmt: skip
        label = f"{stage.name}: busy {use.busy:.0%} of the time"
        kind = "p-prefill" if stage.role == "prefill" else "p-decode"
        courses.append(f"<dt>{escape(stage.name)}</dt><dd>{pictures.course(use.course, 1.0, kind, label)}</dd>")
    head = (
        "stage",
        "busy",
        "prefill",
        "decode",
        "other",
        "steps",
        "step median ms",
        "most ms",
        "largest batch",
        "held back",
    )
    return (
        "<p>How busy each engine was: over the whole run, and over time (full height: all the time). "
        "<i>Other</i> is what it was told between steps: admissions, imports, releases. <i>Held back</i>: too much "
        "waited to be sent for it to go on.</p>"
        f'<dl class="courses">{"".join(courses)}<dt></dt><dd>{pictures.axis(timeline.length)}</dd></dl>'
        + _table(head, rows)
    )


def _bytes(timeline: Timeline) -> str:
    ways = figures.ways(timeline.requests)
    if not ways:
        return "<p>Nothing was seen on its way.</p>"
    rows = [
        (f"{way.source} → {way.destination}", f"{way.chunks}", size(way.nbytes), f"{way.segments:,}",
         rate(way.rate), milliseconds(way.on_the_way.median), milliseconds(way.on_the_way.p99),
         milliseconds(way.on_the_way.most), milliseconds(way.room.most), f"{way.refused}")
        for way in ways
    ]  # fmt: skip
    course = figures.flying(timeline.requests, timeline.length)
    most = float(course.max())
    label = f"bytes on their way, {size(most)} at most"
    head = ("way", "chunks", "bytes", "segments", "rate", "on the way median ms", "p99 ms", "most ms",
            "wait for room, most ms", "found it full")  # fmt: skip
    return (
        "<p>A chunk is on its way from its submission at the source to its receipt at the destination. The rate is of "
        f"the time in which any was. At most {escape(size(most))} were on their way at once.</p>"
        f'<dl class="courses"><dt>on their way</dt><dd>{pictures.course(course, most, "bytes", label)}</dd><dt></dt>'
        f"<dd>{pictures.axis(timeline.length)}</dd></dl>" + _table(head, rows)
    )


def _failures(timeline: Timeline) -> str:
    parts = []
    lost = [stage for stage in timeline.stages if stage.lost is not None]
    if lost:
        rows: list[Sequence[Cell]] = [
            (stage.name, duration(stage.lost or 0.0), "yes" if stage.fenced is not None else "no",
             (escape(stage.cause), "raw wide"))
            for stage in lost
        ]  # fmt: skip
        parts.append("<h3>Stages that were lost</h3>" + _table(("stage", "at", "fenced", "cause"), rows))
    failed = [request for request in timeline.requests if request.outcome == "failed"]
    if failed:
        failed.sort(key=lambda request: request.cause)
        counts = [(cause, len(list(some))) for cause, some in groupby(failed, key=lambda request: request.cause)]
        words = ", ".join(f"{count} × {cause or 'unknown'}" for cause, count in counts)
        rows = [
            (request.id, request.cause, duration((request.ended or request.added) - request.added), _last(request),
             (escape(request.error), "raw wide"))
            for request in failed[:_FAILURES]
        ]  # fmt: skip
        more = len(failed) - len(rows)
        parts.append(f"<p>{escape(words)}.</p>" + _table(("request", "cause", "after", "in phase", "error"), rows))
        if more:
            parts.append(f"<p>{plural(more, 'more request')} failed.</p>")
    again = [request for request in timeline.requests if len(request.generations) > 1]
    if again:
        parts.append(f"<p>{plural(len(again), 'request')} began again: a stage had no room, or was lost.</p>")
    return "".join(parts) or "<p>None.</p>"


def _last(request: RequestLine) -> str:
    names = [phase.name for phase in request.generations[-1].phases if phase.name != figures.AFTER]
    return names[-1] if names else ""


def _slowest(done: Sequence[RequestLine]) -> str:
    if not done:
        return "<p>No request has ended.</p>"
    slowest = sorted(done, key=lambda request: request.added - (request.ended or 0.0))[:_SLOWEST]
    return _table(
        ("request", "took", "of which longest in", "that phase", "prompt", "tokens", "bytes", "way"),
        [_slow(request) for request in slowest],
    )


def _slow(request: RequestLine) -> Sequence[Cell]:
    taken = {name: s for name, s in figures.phase_seconds(request).items() if name != figures.AFTER}
    name, seconds = max(taken.items(), key=lambda item: item[1])
    return (
        request.id, duration((request.ended or 0.0) - request.added),
        (f'<span class="key p-{escape(name)}"></span>{escape(name)}', "raw"), duration(seconds),
        f"{request.prompt_tokens}", f"{request.tokens}", size(request.nbytes), _way(request),
    )  # fmt: skip


def _way(request: RequestLine) -> str:
    last = request.generations[-1]
    return f"{last.prefill} → {last.decode}" if last.decode else "–"


def _everything(requests: Sequence[RequestLine]) -> str:
    if not requests:
        return ""
    rows = []
    for request in requests[:_ALL]:
        took = "–" if request.ended is None else milliseconds(request.ended - request.added)
        first = "–" if request.first_token is None else milliseconds(request.first_token - request.added)
        rows.append((
            request.id, request.outcome or "unfinished", took, first, f"{request.prompt_tokens}",
            f"{request.prefix_prefill}/{request.prefix_decode}", f"{request.tokens}", f"{request.chunks}",
            f"{request.segments}", size(request.nbytes), _way(request),
        ))  # fmt: skip
    head = ("request", "end", "took ms", "first token ms", "prompt", "cached P/D", "tokens", "chunks", "segments",
            "bytes", "way")  # fmt: skip
    more = len(requests) - len(rows)
    rest = f"<p>{plural(more, 'more request')} in the trace.</p>" if more else ""
    return f"<section><details><summary>All requests</summary>{_table(head, rows)}{rest}</details></section>"


def _notes(timeline: Timeline) -> Iterator[str]:
    if timeline.missing:
        yield f"{plural(timeline.missing, 'earlier request')}: only the newest are kept (trace.events)."
    for stage in timeline.stages:
        if stage.dropped:
            yield f"{stage.name}: {plural(stage.dropped, 'event')} of it, pushed out by newer ones (trace.events)."
        if stage.note:
            yield f"{stage.name}: {stage.note}"
        if stage.doubt:
            yield (
                f"{stage.name}: it has a clock of its own, known to {duration(stage.doubt)}; what is shorter than that"
                " between it and another stage means nothing."
            )


# -- tables --------------------------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A cell is a text, or a pair of markup and classes; the first column is a name, numbers stand to the right."""
    top = "".join(f'<th scope="col"{" class=wide" if name in _WIDE else ""}>{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    text, kinds = (escape(cell), "") if isinstance(cell, str) else cell
    return f'<td class="{kinds}">{text}</td>' if kinds else f"<td>{text}</td>"
