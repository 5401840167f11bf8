"""Which prompts a run gets: from flags, a text or JSONL file, or stdin."""

from __future__ import annotations

import array
import fcntl
import json
import math
import os
import stat
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.cli.faults import say
from kvbaton.engine import SamplingParams
from kvbaton.errors import SettingsError, closest

#: What a line of a JSONL file may say besides ``prompt`` and ``id``.
SAMPLING_FIELDS = tuple(SamplingParams.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as the user wrote it.  ``origin`` is where, for messages."""

    id: str
    text: str
    sampling: SamplingParams
    origin: str


@dataclass(frozen=True, slots=True)
class _Written:
    text: str
    origin: str
    id: str | None = None
    sampling: Mapping[str, Any] | None = None


def gather(prompts: Sequence[str], file: Path | None, sampling: Mapping[str, Any]) -> list[Prompt]:
    """Every prompt, in order: ``--prompt``, then the file; stdin where there is neither, and else it is said that what
    waits there is not read.

    ``sampling`` are the command line's parameters; a JSONL line's own overrule them.  Text files and stdin hold one
    prompt per line; blank lines are skipped.  A prompt without an id gets its number, counted from 1.

    Raises :class:`~kvbaton.errors.SettingsError`, naming the flag, or file and line.
    """
    written = [_Written(text, f"--prompt {number}") for number, text in enumerate(prompts, 1)]
    for item in written:
        if not item.text.strip():
            raise SettingsError(f"{item.origin} is empty", key="prompt")
    if file is not None:
        written += _from_file(file)
    elif not prompts:
        written += _from_stdin()
    if (prompts or file is not None) and _waits_on_stdin():
        say(f"stdin is not read, because {'--prompt' if prompts else '--prompts'} is given")
    checked_sampling(sampling, "")
    found: list[Prompt] = []
    taken = {item.id: item.origin for item in written if item.id is not None}
    first: dict[str, str] = {}
    for number, item in enumerate(written, 1):
        name = item.id
        if name is None:
            name = next(n for n in _numbered(number) if n not in taken)
        elif name in first:
            raise SettingsError(f'{item.origin}: the id "{name}" is already that of {first[name]}', key="id")
        first[name] = item.origin
        own = checked_sampling({**sampling, **(item.sampling or {})}, f"{item.origin}: ")
        found.append(Prompt(name, item.text, own, item.origin))
    return found


def _numbered(number: int) -> Iterator[str]:
    yield str(number)
    copy = 2
    while True:
        yield f"{number}-{copy}"
        copy += 1


#: What msgspec says of a number that is out of range, and what a person says.
_BOUNDS = (
    ("int >= ", "a whole number, at least "),
    ("float >= 0.0", "a number, at least 0"),
    ("float > 0.0", "a number above 0"),
    ("float <= 1.0", "a number, at most 1"),
)


def checked_sampling(values: Mapping[str, Any], where: str) -> SamplingParams:
    """Raises :class:`~kvbaton.errors.SettingsError` for a value out of range, or of the wrong kind."""
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise SettingsError(f"{where or flag(name) + ': '}{name} = {value}: must be a finite number", key=name)
        try:
            msgspec.convert({name: value}, SamplingParams)
        except msgspec.ValidationError as error:
            reason = str(error).split(" - at ")[0].replace("Expected", "must be").replace("`", "")
            for said, meant in _BOUNDS:
                reason = reason.replace(said, meant)
            shown = json.dumps(value)
            raise SettingsError(f"{where or flag(name) + ': '}{name} = {shown}: {reason}", key=name) from error
    return msgspec.convert(dict(values), SamplingParams)


def number(name: str, text: str) -> int | float:
    """The value of a sampling flag.  Raises :class:`~kvbaton.errors.SettingsError` where it is no number."""
    whole = name not in ("temperature", "top_p")
    try:
        return int(text) if whole else float(text)
    except ValueError as error:
        reason = "must be a whole number" if whole else "must be a number"
        raise SettingsError(f"{flag(name)}: {name} = {json.dumps(text)}: {reason}", key=name) from error


def flag(name: str) -> str:
    """The command line flag of a sampling field."""
    return "--" + name.replace("_", "-")


# -- files and stdin ---------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> list[_Written]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"cannot read the prompt file {path}: {reason}", key="prompts") from error
    lines = _from_jsonl(text, path) if path.suffix in (".jsonl", ".ndjson") else _from_lines(text, str(path))
    if not lines:
        raise SettingsError(f"the prompt file {path} holds no prompt", key="prompts")
    return lines


def _from_stdin() -> list[_Written]:
    if sys.stdin is None or sys.stdin.isatty():
        raise SettingsError(
            "no prompt: give --prompt TEXT, --prompts FILE, or prompts on stdin, one per line", key="prompt"
        )
    try:
        text = sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise SettingsError("stdin is not UTF-8 text", key="prompt") from error
    lines = _from_lines(text, "stdin")
    if not lines:
        raise SettingsError("no prompt: stdin is empty; give --prompt TEXT or --prompts FILE", key="prompt")
    return lines


def _waits_on_stdin() -> bool:
    """Whether somebody has redirected something to stdin, as far as can be seen without waiting."""
    try:
        fd = sys.stdin.fileno()
        kind = os.fstat(fd)
        if stat.S_ISREG(kind.st_mode):
            return kind.st_size > os.lseek(fd, 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(kind.st_mode):
            return False
        waiting = array.array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, waiting)
        return waiting[0] > 0
    except (AttributeError, OSError, ValueError):  # closed, or none of the system's
        return False


def _from_lines(text: str, source: str) -> list[_Written]:
    # split at newlines alone: splitlines() would also cut at form feeds and the like inside a prompt
    lines = (line.removesuffix("\r") for line in text.split("\n"))
    return [_Written(line, f"{source}:{number}") for number, line in enumerate(lines, 1) if line.strip()]


def _from_jsonl(text: str, path: Path) -> list[_Written]:
    return [_parsed(item.text, item.origin) for item in _from_lines(text, str(path))]


def _parsed(line: str, origin: str) -> _Written:
    def refuse(reason: str) -> SettingsError:
        return SettingsError(f"{origin}: {reason}", key="prompts")

    try:
        fields = json.loads(line)
    except ValueError as error:
        raise refuse(f"not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise refuse(f'must be an object such as {{"prompt": "..."}}, not {type(fields).__name__}')
    known = ("prompt", "id", *SAMPLING_FIELDS)
    for name in fields:
        if name not in known:
            raise refuse(f'unknown field "{name}".{closest(name, known)} Fields: {", ".join(known)}.')
    prompt, name = fields.pop("prompt", None), fields.pop("id", None)
    if not isinstance(prompt, str):
        raise refuse('"prompt" is missing' if prompt is None else '"prompt" must be text')
    if not prompt.strip():
        raise refuse('"prompt" is empty')
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if name is not None and not (isinstance(name, str) and name):
        raise refuse('"id" must be text or a whole number')
    if isinstance(fields.get("stop"), str):
        fields["stop"] = [fields["stop"]]
    return _Written(prompt, origin, name, fields)
