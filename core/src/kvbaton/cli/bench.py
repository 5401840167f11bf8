"""``kvbaton bench``: from flags to a plan, the progress while it runs, and the tables at its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvbaton.bench import picture
from kvbaton.bench.circumstances import in_words
from kvbaton.bench.handoffs import HandOffs
from kvbaton.bench.measured import Measured
from kvbaton.bench.models import find, with_numbers
from kvbaton.bench.plan import Plan, carry_out
from kvbaton.bench.traffic import Layout, Traffic
from kvbaton.bench.wire import Carried
from kvbaton.cli.interrupt import Interrupt
from kvbaton.cli.memory import REMEDIES, memory_kind
from kvbaton.connector import MemoryKind
from kvbaton.errors import SettingsError, closest
from kvbaton.quantities import size
from kvbaton.settings import Settings
from kvbaton.spread import Spread

#: What is benched where nobody says.
DEFAULT_MODEL = "llama-8b"
#: Of a count that can be meant.
_DIGITS = 15
#: The longest that anything may measure, in seconds.
_DAY = 86_400.0
#: Columns of a terminal that everything fits.
_WIDTH = 80


@dataclass(frozen=True, slots=True)
class Flags:
    """What stood on the command line, as text where it was text; None where it was not given."""

    memory: str
    part: str
    like: str | None
    layers: str | None
    kv_heads: str | None
    head_dim: str | None
    dtype: str | None
    tokens: str
    block: str
    layout: str
    scattered: bool
    requests: str
    at_once: str | None
    seconds: str
    sweep: bool


def plan(settings: Settings, flags: Flags) -> Plan:
    """What to measure.  Raises :class:`~kvbaton.errors.ConfigurationError` for what cannot be meant."""
    memory = memory_kind(flags.memory)
    part = _one_of("--part", flags.part, ("all", "transport", "handoff"))
    layout: Layout = _one_of("--layout", flags.layout, ("block", "layer"))  # type: ignore[assignment]
    numbers = {
        name: None if text is None else _count(f"--{name.replace('_', '-')}", text)
        for name, text in (("layers", flags.layers), ("kv_heads", flags.kv_heads), ("head_dim", flags.head_dim))
    }
    like = flags.like
    if like is None and not any(numbers.values()):
        like = DEFAULT_MODEL
    model = with_numbers(None if like is None else find(like), dtype=flags.dtype, **numbers)
    traffic = Traffic(
        model, _count("--tokens", flags.tokens), _count("--block", flags.block), layout, flags.scattered
    )  # fmt: skip
    return Plan(
        settings, traffic, memory,
        transport=part in ("all", "transport"), handoffs=part in ("all", "handoff"), sweep=flags.sweep,
        requests=_count("--requests", flags.requests, "; --part transport leaves hand-offs out"),
        at_once=None if flags.at_once is None else _count("--at-once", flags.at_once),
        seconds=_seconds(flags.seconds), remedies=REMEDIES,
    )  # fmt: skip


def bench(plan: Plan, *, as_json: bool, plot: Path | None) -> None:
    """Measure and show.  Raises what :func:`~kvbaton.bench.plan.carry_out` does, and ``KeyboardInterrupt``."""
    if plot is not None:
        picture.check(plot)
    with Interrupt(), _progress() as progress:
        measured = carry_out(plan, progress)
    try:
        if plot is not None:
            picture.draw(measured, plot)
    finally:  # what was measured is told, whatever becomes of the picture
        if as_json:
            print(json.dumps(measured.as_json(), indent=2), flush=True)
        else:
            show(measured)


# -- flags -------------------------------------------------------------------------------------------------------------


def _one_of(flag: str, text: str, words: tuple[str, ...]) -> str:
    if text not in words:
        raise SettingsError(
            f"{flag} {text}: write {', '.join(words[:-1])} or {words[-1]}.{closest(text, words)}", key="", origin=None
        )
    return text


def _count(flag: str, text: str, none: str = "") -> int:
    """``none``: what does without, for whoever writes 0."""
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS or not int(text):
        raise SettingsError(f"{flag} {text[:40]}: write a whole number, at least 1{none}", key="", origin=None)
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= _DAY:
        raise SettingsError(
            f"--seconds {text[:40]}: write a number above 0 and up to {_DAY:.0f}, without a unit; 0.1 is about as"
            " short as it can be",
            key="", origin=None,
        )  # fmt: skip
    return seconds


# -- progress ----------------------------------------------------------------------------------------------------------


@contextmanager
def _progress() -> Iterator[Callable[[str, float], None]]:
    """A bar on stderr where that is a terminal; nothing elsewhere."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda what, share: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=1.0)
        yield lambda what, share: bar.update(task, description=escape(what), completed=share)


# -- the tables --------------------------------------------------------------------------------------------------------


def show(measured: Measured, console: Console | None = None) -> None:
    """What was measured, on stdout."""
    console = console or Console(width=None if sys.stdout.isatty() else _WIDTH, highlight=False)
    traffic, machine = measured.traffic, measured.machine
    where = "scattered" if traffic.scattered else "contiguous"
    console.print(escape(str(traffic.model)))
    console.print(
        f"{traffic.tokens:,} tokens, {where} blocks of {traffic.block}, layout {traffic.layout}:"
        f" {len(traffic.segments[0]):,} segments, {size(traffic.request_bytes)}"
    )
    console.print(
        escape(f"{measured.transport}, {measured.memory} memory; load {measured.load[0]:g} to {measured.load[1]:g}")
    )
    console.print(escape(in_words(machine)))
    if measured.moved is not None:
        console.print()
        console.print(_transport_table(measured.moved, measured.memory))
    if measured.sweep:
        console.print()
        console.print(_sweep_table(measured))
    if measured.handoffs is not None:
        console.print()
        console.print(_handoff_table(measured.handoffs, measured.of_transport))
        console.print()
        console.print(_milestone_table(measured.handoffs))
    for note in measured.notes:
        console.print()
        console.print(escape(note))


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place in (0, len(columns) - 1) else "right", overflow="fold")
    return table


def _row(table: Table, name: str, spread: Spread | None, unit: str, factor: float = 1.0) -> None:
    if spread is not None:
        of = spread.times(factor)
        table.add_row(escape(name), *map(_number, (of.median, of.p10, of.p90)), str(of.count), unit)


def _transport_table(moved: Carried, memory: MemoryKind) -> Table:
    ends = "two processes" if moved.reach == "cross_process" else "one process"
    copied = "copied by one thread" if memory == "host" else "copied on the device"
    raw = moved.baseline
    table = _table(f"transport, {ends}", "median", "p10", "p90", "runs", "")
    _row(table, f"{moved.chunks} chunk{'s' if moved.chunks > 1 else ''}, until received", moved.latency, "ms", 1e3)
    _row(table, "rate", moved.rate, "GB/s", 1e-9)
    if raw is not None:
        _row(table, raw.name, raw.rate, "GB/s", 1e-9)
        _row(table, "rate / that", moved.of_baseline, "")
    _row(table, copied, moved.copy, "GB/s", 1e-9)
    _row(table, "rate / that", moved.of_copy, "")
    _row(table, "a chunk, submitted to done", moved.chunk_latency, "ms", 1e3)
    _row(table, "a chunk, in submit", moved.submit, "us", 1e6)
    return table


def _sweep_table(measured: Measured) -> Table:
    raw = next((point.baseline.name for point in measured.sweep if point.baseline is not None), None)
    beside = [raw] if raw else []
    table = _table("segments", "GB/s", "p10", "p90", "runs", *beside, "copied", "ratio")
    table.columns[-1].justify = "right"
    for point in measured.sweep:
        of = point.rate.times(1e-9)
        against = point.of_baseline if raw else point.of_copy
        table.add_row(
            f"{point.segments:,} x {size(point.segment_bytes)}", *map(_number, (of.median, of.p10, of.p90)),
            str(of.count), *([_number(point.baseline.rate.median * 1e-9) if point.baseline else "-"] if raw else []),
            _number(point.copy.median * 1e-9) if point.copy else "-", _number(against.median) if against else "-",
        )  # fmt: skip
    return table


def _handoff_table(found: HandOffs, of_transport: float | None) -> Table:
    table = _table(f"whole hand-offs, stages as {found.launch}", "median", "p10", "p90", "runs", "")
    _row(table, "without a payload, one at a time", found.empty, "ms", 1e3)
    _row(table, f"of {size(found.nbytes)}, one at a time", found.alone, "ms", 1e3)
    _row(table, f"{found.at_once} at a time", found.together, "/s")
    _row(table, "their bytes", found.together, "GB/s", found.nbytes * 1e-9)
    if of_transport is not None:
        table.add_row("their rate / the transport's", _number(of_transport), "", "", "", "")
    return table


def _milestone_table(found: HandOffs) -> Table:
    table = _table("since the request, one at a time", "median", "p10", "p90", "p99", "")
    for name, spread in found.milestones.items():
        of = spread.times(1e3)
        table.add_row(name, *map(_number, (of.median, of.p10, of.p90, of.p99)), "ms")
    return table


def _number(value: float) -> str:
    """Three digits that mean something, and always a decimal point below a thousand."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}" if value >= 0.1 or value == 0 else f"{value:.4f}"


__all__ = ["DEFAULT_MODEL", "Flags", "bench", "plan", "show"]
