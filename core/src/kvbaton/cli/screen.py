"""Text as it comes, and a live line that says what is going on.

Requests run side by side and their texts must not mix: one request at a time is *in front* and its text is shown as it
comes; the others' is kept until it is their turn.

On a terminal the text so far and the progress line are one live region.  Where stdout is a file or a pipe, text is
written to it as it comes, and the progress line goes to stderr if that is a terminal.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from kvbaton.hooks import hookimpl


class Tally:
    """How many requests are in which state; an ordinary observer.

    The furthest milestone that was seen decides.  Called from the coordinator's thread, read from the main thread: each
    update is one dictionary assignment.
    """

    _WORDS = {
        "placed": "reserving", "reserved": "prefilling", "prefill_started": "prefilling", "source_ready": "prefilling",
        "submitted": "prefilling", "committed": "arriving", "handle_done": "arriving", "received": "received",
        "imported": "received", "activated": "decoding", "first_token": "decoding",
    }  # fmt: skip
    _ORDER = ("waiting", "reserving", "prefilling", "arriving", "received", "decoding", "done")

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self.tokens = 0
        self._began = time.monotonic()

    def add(self, request: str) -> None:
        self._states[request] = "waiting"

    def finish(self, request: str) -> None:
        self._states[request] = "done"

    @hookimpl
    def kvbaton_milestone(self, request: str, milestone: str) -> None:
        word = self._WORDS.get(milestone)
        now = self._states.get(request, "done")
        if word is not None and self._ORDER.index(word) > self._ORDER.index(now):
            self._states[request] = word

    def line(self) -> str:
        counts = Counter(list(self._states.values()))
        states = ", ".join(f"{counts[word]} {word}" for word in self._ORDER if counts[word])
        total = len(self._states)
        seconds = time.monotonic() - self._began
        return f"{total} request{'s' if total != 1 else ''}: {states} · {self.tokens} tokens · {seconds:.1f} s"


class Screen(Protocol):
    """Where a run shows itself."""

    def progress(self, line: str) -> None: ...

    def header(self, line: str) -> None: ...

    def text(self, piece: str) -> None: ...

    def end_of_text(self) -> None: ...

    def close(self) -> None: ...


class SilentScreen:
    """Shows nothing: ``--json``, where stderr is no terminal."""

    def progress(self, line: str) -> None: ...

    def header(self, line: str) -> None: ...

    def text(self, piece: str) -> None: ...

    def end_of_text(self) -> None: ...

    def close(self) -> None: ...


class PipeScreen(SilentScreen):
    """stdout is no terminal: text goes there as it comes, progress to stderr where that is one."""

    def __init__(self, live: Live | None) -> None:
        self._live = live

    def progress(self, line: str) -> None:
        if self._live is not None:
            self._live.update(Text(line, style="dim", no_wrap=True, overflow="ellipsis"))

    def header(self, line: str) -> None:
        self.text(line + "\n")

    def text(self, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    def end_of_text(self) -> None:
        self.text("\n")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()


class ProgressScreen(PipeScreen):
    """Progress only: ``--json`` on a terminal."""

    def header(self, line: str) -> None: ...

    def text(self, piece: str) -> None: ...

    def end_of_text(self) -> None: ...


#: What a model writes is text: it moves no cursor, clears no screen and rings no bell of the reader's terminal.
_HARMLESS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")}, "\N{REPLACEMENT CHARACTER}")


class TerminalScreen:
    """stdout is a terminal: complete lines scroll away above; the one being written and the progress line are live."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, transient=True, auto_refresh=False, redirect_stdout=False,
                          redirect_stderr=False)  # fmt: skip
        self._live.start()
        self._line = ""
        self._status = ""

    def progress(self, line: str) -> None:
        self._status = line
        self._draw()

    def header(self, line: str) -> None:
        self._console.print(Text(line.translate(_HARMLESS), style="bold"))

    def text(self, piece: str) -> None:
        *complete, self._line = (self._line + piece.translate(_HARMLESS)).split("\n")
        for line in complete:
            self._console.print(Text(line))
        self._draw()

    def end_of_text(self) -> None:
        line, self._line = self._line, ""
        self._console.print(Text(line))
        self._draw()

    def close(self) -> None:
        self._live.stop()
        if self._line:
            self._console.print(Text(self._line))

    def _draw(self) -> None:
        status = Text(self._status, style="dim", no_wrap=True, overflow="ellipsis")
        self._live.update(Group(Text(self._line), status) if self._line else status, refresh=True)


def screen_for(*, quiet: bool) -> Screen:
    """The screen that fits where stdout and stderr lead; ``quiet`` keeps text off stdout."""
    errors = Console(stderr=True)
    live = None
    if errors.is_terminal and (quiet or not sys.stdout.isatty()):
        live = Live(console=errors, transient=True, redirect_stdout=False, redirect_stderr=False, refresh_per_second=8)
        live.start()
    if quiet:
        return ProgressScreen(live)
    if sys.stdout.isatty():
        return TerminalScreen(Console())
    return PipeScreen(live)


class Front:
    """Which request's text is shown now."""

    def __init__(self, screen: Screen, headers: dict[str, str]) -> None:
        """``headers``: the line before each request's text, in the order of their turns; none if it is one."""
        self._screen = screen
        self._headers = headers
        self._kept: dict[str, list[str]] = {request: [] for request in headers}
        self._finished: set[str] = set()
        self._turn: str | None = None

    def text(self, request: str, piece: str) -> None:
        if self._turn is None and piece:
            self._begin(request)
        if request == self._turn:
            if piece:
                self._screen.text(piece)
        else:
            self._kept[request].append(piece)

    def finish(self, request: str, note: str = "") -> None:
        """``note`` says why, where it is not the text's own end."""
        self.text(request, note)
        self._finished.add(request)
        if self._turn not in (None, request):
            return
        if self._turn is None:
            self._begin(request)
        self._end()
        while (following := next((r for r in self._kept if r in self._finished), None)) is not None:
            self._begin(following)
            self._end()
        live = next((r for r, pieces in self._kept.items() if any(pieces)), None)
        if live is not None:
            self._begin(live)

    def _begin(self, request: str) -> None:
        self._turn = request
        if self._headers[request]:
            self._screen.header(self._headers[request])
        kept = "".join(self._kept.pop(request))
        if kept:
            self._screen.text(kept)

    def _end(self) -> None:
        self._screen.end_of_text()
        self._turn = None
