"""Quantities as people read them, each with its unit: the one way in which every table, page and message says them."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``0 ms``, ``41.2 us``, ``12.5 ms``, ``1.25 s``, ``48.7 s``; whole seconds without a point."""
    if seconds >= 10.0:
        return f"{seconds:.1f} s".replace(".0 s", " s")
    if seconds >= 1.0:
        return f"{seconds:.2f} s".replace(".00 s", " s")
    if seconds >= 0.1 or not seconds:
        return f"{seconds * 1e3:.0f} ms"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


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
