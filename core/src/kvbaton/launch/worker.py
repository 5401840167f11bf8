"""The main program of a stage's process: ``python -P -m kvbaton.launch.worker``, started by ``launch.process`` only.

Standard input brings one line of JSON, the ``Order``, and then stays open as the lifeline.  What the stage prints, on
either stream, goes to the launcher's log: the application's own output is never touched.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Final

import msgspec

from kvbaton.control import private_directory
from kvbaton.control.zmq import Ticket, ZmqStageChannel
from kvbaton.errors import ConfigurationError
from kvbaton.launch import StageSpec
from kvbaton.launch.entry import resolve
from kvbaton.launch.lifeline import ProcessLifeline
from kvbaton.observe import log_line

#: Seconds that a coordinator may take to die once it has begun to.
_DYING: Final = 0.5


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher tells a stage's process.

    ``output``: the descriptor of the reading end of what the stage prints into.
    ``path``: the launcher's module search path, so that the entry is found where the application would find it.
    ``log_level``: from which level on it logs.
    ``orphan_grace``: seconds after which a stage without a coordinator is ended if it has not ended by itself.
    """

    spec: StageSpec
    ticket: Ticket
    coordinator_pid: int
    output: int
    path: list[str]
    orphan_grace: float
    log_level: int = logging.WARNING


def main() -> int:
    """Be the stage that standard input describes."""
    # Ctrl-C is the application's affair, which stops its stages in order; some tools signal a whole tree of processes
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    pipe = os.dup(0)  # not inheritable, as every descriptor that Python makes
    nowhere = os.open(os.devnull, os.O_RDWR)
    os.dup2(nowhere, 0)
    line = _read_line(pipe)
    if not line:
        os.close(pipe)
        print("the launcher went away before it had said what to do", file=sys.stderr)
        return 1
    order = msgspec.json.decode(line, type=Order)
    sys.path[:] = order.path
    log_line.begin(sys.stderr, order.log_level)
    with contextlib.suppress(OSError):  # what ps and top call this process; the kernel keeps 15 bytes of it
        Path("/proc/self/comm").write_text(f"kvb:{order.spec.name}"[:15])

    os.set_inheritable(order.output, False)

    def severed() -> None:
        # C6.6: the stage ends itself; should it hang from now on, even in native code that never lets Python run, this
        # ends it.  What it writes goes nowhere: nobody reads it, and a full pipe would hold it up.
        faulthandler.dump_traceback_later(order.orphan_grace, exit=True, file=nowhere)

    lifeline = ProcessLifeline(pipe, order.output, order.coordinator_pid, severed)
    try:
        entry = resolve(order.spec.entry)
        channel = ZmqStageChannel(order.ticket)
        lifeline.watch(lambda: channel.sever(lifeline.cut or ""))
        try:
            return entry(order.spec, channel, lifeline)
        finally:
            channel.close()
            if channel.lost is not None and order.ticket.address.startswith("ipc://"):
                _tidy(Path(order.ticket.address.removeprefix("ipc://")).parent, order.coordinator_pid)
    except ConfigurationError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1
    finally:
        lifeline.close()


def _tidy(directory: Path, coordinator_pid: int) -> None:
    """Remove the directory of a coordinator that was killed; other stages that have their connections do not need it.

    A process that dies cuts the lifeline a moment before it gives its lock back.
    """
    give_up = time.monotonic() + _DYING
    while os.getppid() == coordinator_pid and time.monotonic() < give_up:
        time.sleep(0.005)
    private_directory.remove_abandoned(directory)


def _read_line(fd: int) -> bytes:
    found = bytearray()
    while not found.endswith(b"\n"):
        # the launcher writes one line and no more, so that reading ahead takes nothing from the lifeline
        data = os.read(fd, 1 << 16)
        if not data:
            return b""
        found += data
    return bytes(found)


if __name__ == "__main__":
    sys.exit(main())
