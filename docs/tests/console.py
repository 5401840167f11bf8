"""Console blocks of a page: commands, and how what they print is compared with what the page shows.

A line that begins with ``$`` is a command, continued while it ends with a backslash; the lines below it are what it
prints.  ``...`` as a line stands for any lines, within a line for anything, and a figure with a decimal point for any
figure; blanks count as one.  A command of which nothing is shown may print anything.  It must end with status 0, unless
the next command is ``echo $?``, which shows the other one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

#: Seconds that one command may take.
PATIENCE = 240
_FIGURE = re.compile(r"\d[\d,]*\.\d+")


class NotAsShown(AssertionError):
    """A command ended or printed otherwise than the page says."""


@dataclass
class Command:
    """One command of a block, and the lines that the page shows below it."""

    text: str
    shown: list[str] = field(default_factory=list)


def commands(block: str) -> Iterator[Command]:
    """The commands of a block, in order.  Raises ``ValueError`` where it begins with something else."""
    found: list[Command] = []
    lines = iter(block.rstrip().splitlines())
    for line in lines:
        if line.startswith("$ "):
            text = line[2:]
            while text.endswith("\\"):
                text = text[:-1] + next(lines).strip()
            found.append(Command(text))
        elif found:
            found[-1].shown.append(line)
        else:
            raise ValueError(f"a console block begins with a command: $ ..., not {line!r}")
    return iter(found)


def run(block: str, folder: Path) -> None:
    """Run a block's commands one after the other in ``folder``; raises :class:`NotAsShown` with what was printed."""
    here = list(commands(block))
    # the command line of this environment is found first, and a table is as wide as it likes
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    environment = {**os.environ, "PATH": path, "COLUMNS": "250", "NO_COLOR": "1"}
    status = 0
    for number, command in enumerate(here):
        done = subprocess.run(
            ["bash", "-c", f"(exit {status}); {command.text}"], cwd=folder, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=PATIENCE, check=False,
        )  # fmt: skip
        status = done.returncode
        said_next = number + 1 < len(here) and here[number + 1].text == "echo $?"
        if status and not said_next:
            raise NotAsShown(f"$ {command.text}\nended with status {status}:\n{done.stdout}")
        if command.shown:
            compare(command, done.stdout)


def compare(command: Command, printed: str) -> None:
    """Raises :class:`NotAsShown` at the first line that is not as shown."""
    rest = [_squeezed(line) for line in printed.splitlines()]
    anywhere = False
    for line in command.shown:
        if line.strip() == "...":
            anywhere = True
            continue
        wanted = _pattern(_squeezed(line))
        at = next((at for at, real in enumerate(rest) if wanted.fullmatch(real)), -1)
        if at < 0 or (at > 0 and not anywhere):
            where = "not printed, or not in this order" if at < 0 else f"printed, but after {rest[:at]}"
            raise NotAsShown(f"$ {command.text}\n{where}: {line}\nit printed:\n{printed}")
        rest, anywhere = rest[at + 1 :], False
    if any(rest) and not anywhere:
        raise NotAsShown(f"$ {command.text}\nprinted more than is shown, from {rest[0]!r} on:\n{printed}")


def _squeezed(line: str) -> str:
    return " ".join(line.split())


def _pattern(line: str) -> re.Pattern[str]:
    parts = [_FIGURE.split(part) for part in line.split("...")]
    return re.compile(".*".join(r"\d[\d,]*\.\d+".join(map(re.escape, part)) for part in parts))
