"""Logs: the standard library's, with the ids of what a record is about as its attributes.

Every record of kvbaton's is of a logger below ``kvbaton``.  At level DEBUG there is one for each milestone of each
request, with ``request``, ``transfer``, ``milestone``, ``stage`` and ``seconds`` since it was added.  What stages log
in processes of their own reaches the application's log, under the same loggers, with ``stage``.

kvbaton adds no handler: where records go, and how they look, is the application's.  The command line writes them to
stderr, as the settings ``log`` say.  :class:`JsonFormatter` is for both.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from datetime import UTC, datetime

from kvbaton.observe.log_line import facts_of
from kvbaton.settings import LogSettings

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

#: Where stages are threads, their threads' names say whose a record is.
_THREAD = re.compile(r"kvbaton-(?:pump-)?((?:prefill|decode)-\d+)")


def _stage(record: logging.LogRecord) -> str | None:
    found = _THREAD.fullmatch(record.threadName or "")
    return found[1] if found else None


class JsonFormatter(logging.Formatter):
    """One JSON object a line: ``time`` (UTC), ``level``, ``logger``, ``message``, and of ``stage``, ``peer``,
    ``request``, ``transfer``, ``milestone``, ``seconds``, ``outcome``, ``clause`` and ``exception`` those that there
    are.
    """

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **facts_of(record),
        }
        if "stage" not in line and (stage := _stage(record)) is not None:
            line["stage"] = stage
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


class TextFormatter(logging.Formatter):
    """``LEVEL logger: message``; in front of the message the stage's name, where it came from another process."""

    def format(self, record: logging.LogRecord) -> str:
        stage = f"[{record.__dict__.get('stage')}] " if getattr(record, "relayed", False) else ""
        text = f"{record.levelname} {record.name}: {stage}{record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def set_level(settings: LogSettings) -> None:
    """Let the ``kvbaton`` loggers say what ``log.level`` asks for; unset, they stay as the application has them."""
    if settings.level is not None:
        logging.getLogger("kvbaton").setLevel(_LEVELS[settings.level])


def formatter(settings: LogSettings) -> logging.Formatter:
    """The one of ``log.format``."""
    return JsonFormatter() if settings.format == "json" else TextFormatter()


def begin(settings: LogSettings, handlers: Iterable[logging.Handler]) -> None:
    """For programs: level and format of ``settings``, the latter for ``handlers``."""
    set_level(settings)
    for handler in handlers:
        handler.setFormatter(formatter(settings))
