"""``kvbaton report``: one page from the trace of a run, made of figures (:mod:`~kvbaton.report.figures`), pictures
(:mod:`~kvbaton.report.pictures`) and the page around them (:mod:`~kvbaton.report.page`).

The trace file is the one input: it alone has, besides what each request took, when each chunk was on its way and what
each engine did meanwhile.
"""

from __future__ import annotations

from pathlib import Path

from kvbaton.errors import SettingsError
from kvbaton.observe.timeline import read


def report(trace: Path, output: Path | None = None) -> Path:
    """Draw the page of a trace file, and return where it is: ``output``, or the trace's name with ``.html``.

    Raises :class:`~kvbaton.errors.TraceUnreadable` for what is no trace, and
    :class:`~kvbaton.errors.SettingsError` where the page cannot be written.
    """
    from kvbaton.report.page import page

    target = trace.with_suffix(".html") if output is None else output
    timeline = read(trace)
    if target.resolve() == trace.resolve():
        raise SettingsError(f"the page would be written over the trace {trace}: name another file", key="output")
    try:
        target.write_text(page(timeline, trace.stem), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise SettingsError(
            f"the page cannot be written to {target}: {error.strerror or error}", key="output"
        ) from error
    return target
