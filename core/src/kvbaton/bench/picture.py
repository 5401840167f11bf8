"""What a bench found, drawn: milestones of a hand-off, and the rate over the length of a segment."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any, Final

from kvbaton.bench.circumstances import in_words
from kvbaton.bench.measured import Measured
from kvbaton.errors import SettingsError
from kvbaton.quantities import size
from kvbaton.spread import Spread

ENDINGS: Final = (".svg", ".png")


def check(path: Path) -> None:
    """Raise :class:`~kvbaton.errors.SettingsError` where nothing could be drawn there: before anything is measured."""
    if path.suffix.lower() not in ENDINGS:
        raise SettingsError(f"--plot {path}: the name ends in .svg or .png", key="plot", origin=None)
    if not path.absolute().parent.is_dir():
        raise SettingsError(f"--plot {path}: there is no folder {path.parent}", key="plot", origin=None)
    reason = "it is a directory" if path.is_dir() else ""
    try:
        if not reason:
            part = tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=".kvbaton-plot-")  # noqa: SIM115
            part.close()
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise SettingsError(f"--plot {path}: it cannot be written: {reason}", key="plot", origin=None)
    if importlib.util.find_spec("matplotlib") is None:
        raise SettingsError(
            "--plot: drawing needs matplotlib, which is not installed: pip install 'kvbaton[plot]'",
            key="plot", origin=None,
        )  # fmt: skip


def draw(measured: Measured, path: Path) -> None:
    """Write the picture.  Its parts are those that were measured: rates, the sweep, the milestones.

    Raises :class:`~kvbaton.errors.SettingsError` where that is not possible any more.
    """
    import matplotlib

    matplotlib.use("agg")
    # the same figures, the same file; text that can be searched, and takes a quarter of the room
    matplotlib.rcParams.update({"svg.hashsalt": "kvbaton", "svg.fonttype": "none"})
    from matplotlib.figure import Figure

    parts = [_sweep] * bool(measured.sweep) + [_rates] * (measured.moved is not None and not measured.sweep)
    parts += [_milestones] * (measured.handoffs is not None)
    figure = Figure(figsize=(6.4 * len(parts), 4.4), layout="constrained")
    for place, part in enumerate(parts, 1):
        part(figure.add_subplot(1, len(parts), place), measured)
    model, traffic, machine = measured.traffic.model, measured.traffic, measured.machine
    figure.suptitle(
        f"{measured.transport}, {measured.memory} memory: {model.name}, {traffic.tokens} tokens in blocks of"
        f" {traffic.block}\n{in_words(machine)}, load {measured.load[0]:g} to"
        f" {measured.load[1]:g}",
        fontsize=10, parse_math=False,
    )  # fmt: skip
    metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
    try:
        figure.savefig(path, metadata=metadata, dpi=120)
    except OSError as error:
        said = error.strerror or str(error)
        raise SettingsError(f"--plot {path}: it cannot be written: {said}", key="plot", origin=None) from error


def _lines(measured: Measured) -> list[tuple[str, str, list[Any]]]:
    """Label, style and a spread (or none) for each point of the sweep."""
    points = measured.sweep
    raw = next((point.baseline.name for point in points if point.baseline is not None), "")
    lines: list[tuple[str, str, list[Any]]] = [
        ("copied, one thread" if measured.memory == "host" else "copied on the device", "k:", [p.copy for p in points]),
        (raw, "s--", [p.baseline and p.baseline.rate for p in points]),
        ("kvbaton", "o-", [p.rate for p in points]),
    ]
    return [line for line in lines if any(line[2])]


def _sweep(axes: Any, measured: Measured) -> None:
    for label, style, spreads in _lines(measured):
        points = [(p.segment_bytes, s) for p, s in zip(measured.sweep, spreads, strict=True) if s]
        lengths = [length for length, _ in points]
        (line,) = axes.plot(lengths, [spread.median / 1e9 for _, spread in points], style, label=label)
        low, high = [spread.p10 / 1e9 for _, spread in points], [spread.p90 / 1e9 for _, spread in points]
        axes.fill_between(lengths, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([point.segment_bytes for point in measured.sweep])
    axes.set_xticklabels([size(point.segment_bytes) for point in measured.sweep], rotation=45, ha="right", fontsize=8)
    axes.set_xlabel("length of a segment")
    axes.set_ylabel("GB/s, median (10th to 90th percentile)")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _rates(axes: Any, measured: Measured) -> None:
    moved = measured.moved
    assert moved is not None
    raw = moved.baseline
    bars: list[tuple[str, Spread | None]] = [("copied", moved.copy), ("kvbaton", moved.rate)]
    if raw is not None:
        bars.insert(1, (raw.name, raw.rate))
    if measured.handoffs is not None:
        bars += [("whole hand-offs", measured.handoffs.together.times(measured.handoffs.nbytes))]
    shown = [(name, spread) for name, spread in bars if spread]
    middle = [spread.median / 1e9 for _, spread in shown]
    errors = [[(s.median - s.p10) / 1e9 for _, s in shown], [(s.p90 - s.median) / 1e9 for _, s in shown]]
    axes.barh([name for name, _ in shown], middle, xerr=errors, color="tab:blue", alpha=0.8)
    axes.set_xlabel("GB/s, median (10th to 90th percentile)")
    axes.set_title(f"{moved.segments:,} segments of {size(moved.segment_bytes)}", fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)


def _milestones(axes: Any, measured: Measured) -> None:
    found = measured.handoffs
    assert found is not None
    names = list(found.milestones)
    spreads = [found.milestones[name].times(1e3) for name in names]
    axes.barh(names, [s.p90 - s.p10 for s in spreads], left=[s.p10 for s in spreads], color="tab:blue", alpha=0.4)
    axes.plot([s.median for s in spreads], names, "k|", markersize=10)
    axes.set_xlabel("ms since the request, one at a time: median, 10th to 90th percentile")
    axes.set_title(f"{found.alone.count} hand-offs of {size(found.nbytes)}", fontsize=9)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
