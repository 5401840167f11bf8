"""One stage on this host for a coordinator on another: what ``kvbaton stage`` runs.

The stage takes its settings from this host, so that paths, devices and a transport's options may differ from host to
host; what must agree is compared when stages connect (C3.5).  Its identity comes from the coordinator.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from kvbaton.control.curve import COORDINATOR, ClientKeys, load_pair, load_public
from kvbaton.control.join import join
from kvbaton.control.zmq import ZmqStageChannel
from kvbaton.errors import SettingsError, closest
from kvbaton.launch import StageSpec
from kvbaton.launch.entry import resolve
from kvbaton.launch.lifeline import FlagLifeline
from kvbaton.settings import Settings
from kvbaton.stage.worker import stage_specs


def run_stage(settings: Settings, name: str, progress: Callable[[str], None]) -> int:
    """Join the coordinator as ``name`` and be that stage until it ends; its exit status (0: as ordered).

    SIGTERM and Ctrl-C end it as the loss of its coordinator would: it drains and closes first, for at most
    ``deadline.shutdown`` (C6.6); a second one ends it at once.  Call it on the main thread.

    Raises: ConfigurationError or ConnectError if it could not join; nothing was started.
    """
    spec = _spec(settings, name)
    entry = resolve(spec.entry)
    control = settings.control
    address = control.coordinator
    if address is None or control.keys is None:
        raise SettingsError(
            "this stage does not know where its coordinator is: set control.connect = \"tcp://HOST:PORT\" and"
            " control.keys", key="control.connect", origin=None,
        )  # fmt: skip
    keys = ClientKeys(load_pair(control.keys, name), load_public(control.keys, COORDINATOR))
    lifeline = FlagLifeline()
    with _ends_on_signals(lifeline):
        progress(f"{name}: joining {address}")
        ticket = join(
            address, name, keys, within=settings.deadline.startup, waiting=lambda text: progress(f"{name}: {text}"),
            stop=lambda: lifeline.cut is not None,
        )  # fmt: skip
        channel = ZmqStageChannel(
            ticket, keys=keys, heartbeat=control.heartbeat, patience=settings.deadline.connect
        )  # fmt: skip
        try:
            progress(f"{name}: joined as {ticket.peer}")
            lifeline.watch(lambda: channel.sever(lifeline.cut or ""))
            status = 1
            try:
                status = entry(spec, channel, lifeline)
            finally:
                channel.leave(status)
        finally:
            channel.close()
    end = f": {channel.lost}" if channel.lost else ""
    progress(f"{name}: ended with status {status}{end}")
    return status


def _spec(settings: Settings, name: str) -> StageSpec:
    specs = {spec.name: spec for spec in stage_specs(settings, "cross_host", None)}
    if name not in specs:
        raise SettingsError(
            f'no stage is called "{name}".{closest(name, specs)} By stages.prefill and stages.decode there are'
            f" {', '.join(specs)}.", key="stages", origin=None,
        )  # fmt: skip
    return specs[name]


@contextmanager
def _ends_on_signals(lifeline: FlagLifeline) -> Iterator[None]:
    def end(number: int, _frame: FrameType | None) -> None:
        for known in before:
            signal.signal(known, signal.SIG_DFL)
        why = f"this stage was told to end by {signal.Signals(number).name}"
        # not here: this may interrupt the main thread while it holds the very locks that a cut takes
        threading.Thread(target=lifeline.sever, args=(why,), name="kvbaton-signal", daemon=True).start()

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
