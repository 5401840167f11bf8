"""The progress thread of a stage: it alone polls the connector and feeds the machine.

Completions must never wait for a model step, so the pump is independent of ``engine.step()``.  It shares the
interpreter with the engine thread, so it must not spin either: a spinning pump slowed a launch-bound engine 4.4
times, a half-millisecond pause at most 1.3 times.  Hence: after a pass that moved bytes, another pass at once; after
one that only dealt with words of others, a pause of ``idle_min``, which further words cut short (a pass that finds
nothing keeps the interpreter from the engine that was just told something); after one that did nothing, a pause that
doubles from ``idle_min`` to ``idle_max``, and is ``idle_max`` from the first where what is waited for cannot come soon
(a destination waits for a source that has still to compute: a hand-off cost it five passes for nothing); to ten times
as much where polling is
owed to a peer and nobody here waits for what it finds (a request decodes whose bytes have all come: polling for it at
``idle_max`` took 5.6 % of a core); with nothing live, sleep until the channel or the engine has something.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

from kvbaton.durations import Durations

#: How long a parked pump sleeps at most; a message or a report ends the sleep early.
PARKED_SECONDS = 0.5
#: Pauses may be so many times as long where nothing is urgent.
RELAXED = 10


class Pumped(Protocol):
    """What a pump drives."""

    def advance(self) -> bool:
        """One bounded pass; whether anything happened."""

    @property
    def flowing(self) -> bool:
        """Whether the last pass moved something through the transport, so that there may be more to move."""

    @property
    def live(self) -> bool:
        """Whether polling may bring something by itself (a grant, an operation, a device event under way)."""

    @property
    def urgent(self) -> bool:
        """Whether what polling may bring is waited for here.  Not so: it is live for the peers' sake only."""

    @property
    def imminent(self) -> bool:
        """Whether polling may bring it at any moment.  Not so: there is something to be waited for, but others have
        long work to do before it can come."""

    @property
    def ended(self) -> bool:
        """Nothing is left to do, ever."""

    def wait(self, timeout: float) -> None:
        """Return within ``timeout`` seconds, earlier when a message or a report came, or the transport has something.

        While an operation is under way the transport may be what is watched, and a message is then heard after
        ``timeout``, which is ``idle_max`` at most.
        """


class Pump:
    """Drives one :class:`Pumped` on a thread of its own until it has ended.

    ``failed`` is called on the pump thread with an exception that escaped a pass; the pump then ends.
    """

    def __init__(
        self, pumped: Pumped, *, name: str, idle_min: float, idle_max: float, failed: Callable[[BaseException], None]
    ) -> None:
        self._pumped = pumped
        self._idle_min, self._idle_max = idle_min, idle_max
        self._failed = failed
        #: What a pass takes that found something to do; and by how much longer than asked a pause was: the
        #: interpreter, or the processor, was somebody else's.
        self.passes, self.lags = Durations(), Durations()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout: float | None = None) -> bool:
        """Whether the pump has ended within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pumped, pause, clock = self._pumped, self._idle_min, time.monotonic
        now = clock()
        try:
            while True:
                began = now
                busy = pumped.advance()
                if pumped.ended:
                    return
                now = clock()
                if busy:
                    self.passes.add(now - began)
                    pause = self._idle_min
                if pumped.flowing:
                    continue
                if pumped.live:
                    longest = self._idle_max if pumped.urgent else self._idle_max * RELAXED
                    if pause < self._idle_max and not pumped.imminent:
                        pause = self._idle_max
                    asked = min(pause, longest)
                    pumped.wait(asked)
                    pause = min(pause * 2, longest)
                    began, now = now, clock()
                    if now - began > asked:
                        self.lags.add(now - began - asked)
                else:
                    pumped.wait(PARKED_SECONDS)
                    pause = self._idle_min
                    now = clock()
        except BaseException as error:
            self._failed(error)
