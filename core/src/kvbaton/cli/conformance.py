"""``kvbaton conformance NAME``: the conformance kit as a command.

The suite runs under pytest in a process of its own, in an empty folder, so that no configuration and no conftest of the
place where it was called can change it.  What that process prints is passed on as it comes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbaton.cli.devices import present
from kvbaton.cli.faults import BAD_INPUT, FAILED, INTERRUPTED, OK, say
from kvbaton.cli.folder import ready
from kvbaton.cli.interrupt import Interrupt
from kvbaton.cli.memory import REMEDIES, memory_kind
from kvbaton.connector import Need
from kvbaton.control import private_directory
from kvbaton.errors import ConfigurationError, PluginUnavailable
from kvbaton.plugins import choose_connector

#: Exit status: nothing failed, and not everything was tried.
NO_VERDICT = 3


@dataclass(frozen=True)
class Order:
    """What is to be judged, and how."""

    connector: str
    options: Mapping[str, Any] = field(default_factory=dict)
    level: str = "all"
    select: str | None = None
    report: Path | None = None
    known_failures: Path | None = None
    seed: int | None = None
    require_env: bool = False
    verbose: bool = False
    memory: str = "host"
    #: A part of the suite that passes is what was asked for, although it is no verdict.
    partial: bool = False
    #: CUDA devices that the ends lie on in turn; none: as the kit does by itself.
    devices: tuple[int, ...] = ()
    #: Go on although tests do not come back, one after the other.
    keep_going: bool = False


def command(order: Order, report: Path, lifeline: int) -> list[str]:
    """The pytest command for an order.

    ``report``: where its verdict is written.  ``lifeline``: a pipe, inherited, whose other end is this process's alone.
    """
    words = [
        sys.executable, "-P", "-m", "pytest", "--pyargs", "kvbaton_conformance.run",
        # nothing of the caller's: neither its configuration nor its conftest files nor its cache
        "-c", os.devnull, "--rootdir", ".", "--noconftest", "-p", "no:cacheprovider", "--strict-markers",
        "-W", "error", "-v" if order.verbose else "-q", "--color", "yes" if sys.stdout.isatty() else "no",
        "--tb", "short", "--conformance-command", str(lifeline), "--connector", order.connector,
        "--conformance-report", str(report), "--conformance-level", order.level,
    ]  # fmt: skip
    for key, value in order.options.items():
        words += ["--connector-option", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
    if order.memory != "host":
        words += ["--connector-memory", order.memory]
    if order.devices:
        words += ["--connector-devices", ",".join(map(str, order.devices))]
    if order.select is not None:
        words += ["-k", order.select, "--conformance-partial"]
    if order.known_failures is not None:
        words += ["--known-failures", str(order.known_failures.resolve())]
    if order.seed is not None:
        words += ["--conformance-seed", str(order.seed)]
    if order.require_env:
        words += ["--require-env"]
    if order.keep_going:
        words += ["--conformance-keep-going"]
    return words


def judge(order: Order) -> int:
    """Run the suite and say the verdict.

    The exit status: 0 conforms; 1 does not; 2 there was nothing to judge, or the report could not be written at the
    end; 3 no verdict, because only a part was looked at and nothing in it failed, which is 0 where ``order.partial``
    says that this is meant; 130 after Ctrl-C or SIGTERM.

    Raises :class:`~kvbaton.errors.ConfigurationError` where the kit is not installed, the connector cannot be chosen or
    the report cannot be written.
    """
    if importlib.util.find_spec("kvbaton_conformance") is None:
        raise ConfigurationError("the conformance kit is not installed: pip install kvbaton-conformance")
    _look(order)
    with Interrupt() as interrupt, ExitStack() as stack:
        private = private_directory.make(None)
        stack.callback(private.remove)
        folder = str(private.path)
        report = order.report or Path(folder, "report")
        ready("--report", report, ["conformance.json"])
        report = report.resolve()
        verdict_file = report / "conformance.json"
        environment = {
            name: value for name, value in os.environ.items()
            if name not in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTEST_DISABLE_PLUGIN_AUTOLOAD")
        }  # fmt: skip
        # what the caller can import by a relative path, it shall find from the empty folder as well
        paths = [str(Path(entry).resolve()) for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if ":" in order.connector:
            paths.append(str(Path.cwd()))
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        lifeline, held = os.pipe()
        stack.callback(os.close, held)
        # held back here until it is waited for, and there, which inherits that, until pytest ends in order on it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            try:
                process = subprocess.Popen(
                    command(order, report, lifeline), cwd=folder, env=environment, stdin=subprocess.DEVNULL,
                    # the lock, so that the folder is in use for as long as it runs
                    pass_fds=(private.lock, lifeline),
                )  # fmt: skip
            finally:
                os.close(lifeline)
            interrupt.forced = process.kill
            status = _wait(process, before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        if status == INTERRUPTED:
            say("interrupted")  # what was not tried has not failed, whatever was still written
            return INTERRUPTED
        if not verdict_file.is_file():
            return BAD_INPUT  # it ended before there was a verdict; pytest has said why
        verdict = json.loads(verdict_file.read_text(encoding="utf-8"))
    if order.report is not None:
        print(f"report: {order.report / 'conformance.html'}")
    if status == 0 and verdict["conforms"]:
        return OK
    if status == 0 and not verdict["tried"]:
        return BAD_INPUT
    if status == 0 and verdict["partial"]:
        if order.partial:
            return OK
        say("that was a part of the suite, which is no verdict: exit status 3, or 0 with --partial")
        return NO_VERDICT
    return FAILED


def _look(order: Order) -> None:
    """Whether there is such a connector, its options are valid, and it can be used on what is here; raises what is not
    so.
    """
    if ":" in order.connector and str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    kind = memory_kind(order.memory)
    try:
        choose_connector(order.connector, Need(kind, "same_process"), dict(order.options), REMEDIES)
    except PluginUnavailable as within:
        # one that works between processes only; if it cannot be used at all, the answer that says why counts
        try:
            choose_connector(order.connector, Need(kind, "cross_process"), dict(order.options), REMEDIES)
        except PluginUnavailable as between:
            raise (between if within.capability == "same_process" else within) from None
    present("--devices", order.devices)


def _wait(process: subprocess.Popen[bytes], mask: Collection[int]) -> int:
    """Its exit status.  On Ctrl-C or SIGTERM pytest ends its tests, and is waited for; a second one forces.

    ``mask``: the signals that are held back meanwhile.
    """
    interrupted = False
    while True:
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            status = process.wait()
        except KeyboardInterrupt:
            interrupted = True
            process.terminate()  # Ctrl-C has reached the whole group, any other signal this process alone
        else:
            return INTERRUPTED if interrupted else status
