"""Quantities as people read them, each with its unit: the one way in which every table, page and message says them."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """``0 ms``, ``41.2 us``, ``12.5 ms``, ``1.25 s``, ``48.7 s``; whole seconds without a point."""
    if seconds >= 10.0:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    if seconds >= 1.0:
        return f"{seconds:.2f} s".replace(".00 s", " s")
    if seconds >= 0.1 or not seconds:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def moments(step: float, count: int) -> list[str]:
    """So many marks of an axis from 0 on, ``step`` seconds apart: in one unit, with the digits that the step has.

    ``0 s``, ``0.5 s``, ``1.0 s``; ``0 ms``, ``20 ms``, ``40 ms``.
    """
    last = step * (count - 1) or 1.0
    unit, factor = ("s", 1.0) if last >= 0.9995 else ("ms", 1e3) if last >= 0.9995e-3 else ("us", 1e6)
    digits = max(-math.floor(math.log10(step * factor) + 1e-9), 0) if step > 0.0 else 0
    return [f"0 {unit}", *(f"{step * factor * number:.{digits}f} {unit}" for number in range(1, count))]


def milliseconds(seconds: float) -> str:
    """For a column whose head has the unit: three digits or so."""
    value = seconds * 1e3
    if value == 0.0:
        return "0"
    if value >= 100.0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10.0 else f"{value:.2f}"


def rate(value: float) -> str:
    """Bytes per second: ``8.1 GB/s``, in MB/s below a tenth of one, in TB/s from a thousand: ten columns at most."""
    if value >= 999.95e9:
        return f"{value / 1e12:.2f} TB/s"
    return f"{value / 1e9:.1f} GB/s" if value >= 1e8 else f"{value / 1e6:.1f} MB/s"


def size(nbytes: float) -> str:
    """``0 B``, ``1.5 KiB``, ``64 MiB``: three digits that mean something."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.3g} {unit}" if abs(value) < 1000 else f"{value:.0f} {unit}"


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
