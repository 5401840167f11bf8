"""Figures in words, each with its unit."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """``0 ms``, ``0.04 ms``, ``12.5 ms``, ``1.25 s``."""
    if seconds >= 10.0:
        return f"{seconds:.1f} s"
    if seconds >= 1.0:
        return f"{seconds:.2f} s".replace(".00 s", " s")
    return f"{milliseconds(seconds)} ms"


def milliseconds(seconds: float) -> str:
    """Without the unit: three digits or so."""
    value = seconds * 1e3
    if value == 0.0:
        return "0"
    if value >= 100.0:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10.0 else f"{value:.2f}"


def size(nbytes: float) -> str:
    """``0 B``, ``1.5 KiB``, ``64 MiB``."""
    value, unit = float(nbytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}".replace(".0 ", " ")


def plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
