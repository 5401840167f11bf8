"""A log record as one line of what a stage's process prints, so that the application's own log has it.

The line begins with a control character that no text has, and goes on in JSON.  Everything else that a stage prints
(native libraries, tracebacks, ``print``) is a line without it.
"""

from __future__ import annotations

import logging
from typing import Any, Final, TextIO

import msgspec

from kvbaton.identity import PeerId

#: The record separator of ASCII, as RFC 7464 has it.
MARK: Final = "\x1e"

#: Facts that a record may carry besides its message; see :mod:`kvbaton.observe.logs`.
FIELDS: Final = ("stage", "peer", "request", "transfer", "milestone", "seconds", "outcome", "clause")

#: Characters of a message, so that a line fits what is kept of one (:class:`~kvbaton.launch.log_ring.LogRing`).
_LONGEST: Final = 1200

#: Whose records a stage's unmarked lines become.
OUTPUT: Final = "kvbaton.stage.output"


class _Line(msgspec.Struct, frozen=True, omit_defaults=True):
    level: int
    name: str
    created: float
    message: str
    facts: dict[str, str | int | float] = {}


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(_Line)


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """What a record says besides its message."""
    found = ((name, record.__dict__.get(name)) for name in FIELDS)
    return {name: value for name, value in found if value is not None}


class LineFormatter(logging.Formatter):
    """In a stage's process.  A traceback follows as unmarked lines: it would be too long for one."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        if len(message) > _LONGEST:
            message = f"{message[:_LONGEST]}…"
        facts: dict[str, str | int | float] = {
            name: value if isinstance(value, int | float) else str(value) for name, value in facts_of(record).items()
        }
        text = MARK + _ENCODER.encode(_Line(record.levelno, record.name, record.created, message, facts)).decode()
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


def begin(stream: TextIO, level: int) -> None:
    """In a stage's process: kvbaton's own records from ``level`` on, and everybody's warnings, go to ``stream``."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    logging.getLogger("kvbaton").setLevel(level)


def _taken_apart(line: str) -> tuple[str, _Line | None]:
    """What stands before the mark, and the record behind it."""
    before, mark, rest = line.partition(MARK)
    if mark:
        try:
            return before, _DECODER.decode(rest)
        except msgspec.MsgspecError:  # cut, or somebody else's: it is text
            pass
    return line, None


def readable(line: str) -> str:
    """A line as people read it: in last words, say."""
    before, found = _taken_apart(line)
    if found is None:
        return line
    return f"{before}{logging.getLevelName(found.level)} {found.name}: {found.message}"


def relay(peer: PeerId, line: str) -> None:
    """In the application: a line of a stage becomes a record of the logger it came from, with ``stage``; an unmarked
    one of :data:`OUTPUT` at level DEBUG.
    """
    text, found = _taken_apart(line)
    if found is not None:
        _handle(peer, found.level, found.name, found.message, {**found.facts, "created": found.created})
    if text and (found is None or text.strip()):
        _handle(peer, logging.DEBUG, OUTPUT, text, {})


def _handle(peer: PeerId, level: int, name: str, message: str, facts: dict[str, Any]) -> None:
    logger = logging.getLogger(name)
    if logger.isEnabledFor(level):
        made = {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": message}
        facts = {k: v for k, v in facts.items() if k in FIELDS or k == "created"}
        logger.handle(logging.makeLogRecord({**made, **facts, "stage": peer.name, "relayed": True}))
