"""The main program of an end in a process of its own: ``python -P -m kvbaton_conformance.peer_process DESCRIPTOR``.

It does what it is told over a private pair of sockets, one request and one answer at a time, until the other end is
gone.  The pipe carries Python objects: it connects this process with the one that started it and with nobody else.
The inspector is here, because the memory is.

An exception travels back with its traceback.  ``SIGUSR2`` writes every thread's stack to standard error.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from kvbaton.connector import Capabilities, Completion, Need, PeerEvent
from kvbaton.errors import KvbatonError, TransportError
from kvbaton.identity import PeerId, TransferId
from kvbaton.plugins import choose_connector
from kvbaton.segments import Segments
from kvbaton_conformance import device_memory, shared_memory
from kvbaton_conformance.harness import Heard, LocalEnd, Pair, close_ends, open_end
from kvbaton_conformance.leaks import Holdings, holdings, left_behind, of_the_driver, own
from kvbaton_conformance.placement import PAIR, device_of, kind_of
from kvbaton_conformance.subject import Reference
from kvbaton_conformance.warm_up import warm_up
from kvbaton_conformance.witness import Testimony


class Peer:
    """What can be asked of this process; each public method is a request."""

    def __init__(self) -> None:
        self._end: LocalEnd | None = None
        self._held: Holdings | None = None
        self._kept: list[LocalEnd] = []
        #: A first peer on another device may have CUDA open what stays for good.
        self._far = False

    def warm_up(self, device: int) -> None:
        """Load what memory of this device needs."""
        device_memory.allocate(0, kind_of(device), device, 1)

    # -- one end's life ------------------------------------------------------------------------------------------------

    def open(
        self, reference: Reference, options: Mapping[str, Any], need: Need, peer: PeerId, how: Mapping[str, Any]
    ) -> Capabilities:
        plugin, valid = choose_connector(reference.load(), need, dict(options))
        self._end = open_end(plugin, valid, peer, **how)
        return self._end.guard.capabilities

    def meet(
        self, reference: Reference, options: Mapping[str, Any], need: Need, meet: bool, device: int | None, far: bool
    ) -> None:
        """Let the connector do everything once, on ``device``; what is there then is there for good.

        ``far``: its peers' memory may be on other devices.
        """
        plugin, valid = choose_connector(reference.load(), need, dict(options))
        warm_up(plugin, valid, () if device is None else (device,), meet=meet)
        gc.collect()
        self._far = far
        self._held = holdings()

    def close(self) -> None:
        """Drain and close what is open, as at the end of a test."""
        if self._end is not None:
            close_ends([self._end])

    def left_behind(self) -> list[str]:
        """What the last end has left in this process, compared with the one before."""
        self._end = None
        gc.collect()
        before, self._held = self._held, None
        found = left_behind(before) if before is not None else []
        if self._far and any(map(of_the_driver, found)):
            # the first peer on another device came after the warm-up: what CUDA opens for it once is there only now
            self._far = False
            found = [thing for thing in found if not of_the_driver(thing)]
        self._held = holdings()
        return found

    def open_pair(self, reference: Reference, options: Mapping[str, Any], closes: str, devices: Sequence[int]) -> None:
        """Two ends here, one chunk across, and then close both or neither: what is left is for the process's exit."""
        places = [device_of(name, devices) for name in PAIR]
        plugin, valid = choose_connector(reference.load(), Need(kind_of(places[0]), "same_process"), dict(options))
        ends = [
            open_end(plugin, valid, PeerId.start(name), device=device)
            for name, device in zip(PAIR, places, strict=True)
        ]
        pair = Pair(ends[0], ends[1])
        pair.connect()
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 0, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T5: one chunk is received and done")
        if closes == "closed":
            close_ends(ends)
        self._kept = ends

    # -- what a test does with it --------------------------------------------------------------------------------------

    def guard(self, name: str, *arguments: Any) -> Any:
        found = getattr(self._here.guard, name)
        return found(*arguments) if callable(found) else found

    def memory(self, name: str, *arguments: Any) -> Any:
        return getattr(self._here.memory, name)(*arguments)

    def hear(self) -> Heard:
        return portable(self._here.hear())

    def expect(self, transfer: TransferId, sequence: int, writes: Segments, data: bytes) -> None:
        self._here.expect(transfer, sequence, writes, data)

    def testimony(self) -> Testimony:
        return self._here.testimony()

    def advance(self, seconds: float) -> None:
        self._here.advance(seconds)

    def forget_events(self) -> None:
        self._here.forget_events()

    def apply(self, action: Callable[..., Any], *arguments: Any) -> Any:
        return action(self._here, *arguments)

    @property
    def _here(self) -> LocalEnd:
        assert self._end is not None, "open an end first"
        return self._end


def portable(heard: Heard) -> Heard:
    """The same with exceptions that can be sent."""
    return replace(
        heard,
        completions=tuple(
            Completion(c.transfer, c.sequence, c.outcome, c.source_quiet, c.target_quiet, sendable(c.error))
            for c in heard.completions
        ),
        peers=tuple(PeerEvent(e.peer, e.up, e.quiet, sendable(e.error)) for e in heard.peers),
        faults=tuple(fault if (sent := sendable(fault)) is fault else _kvbaton(sent) for fault in heard.faults),
    )


def sendable(error: Exception | None) -> Exception | None:
    """``error`` where it survives the way, its text where it does not."""
    if error is None:
        return None
    try:
        pickle.dumps(error)
        return error
    except Exception:
        return TransportError(f"{type(error).__name__}: {error}")


def _kvbaton(error: Exception | None) -> KvbatonError:
    return error if isinstance(error, KvbatonError) else TransportError(str(error))


def serve(pipe: Connection) -> None:
    """Answer until the other end is gone or says so."""
    peer = Peer()
    while True:
        try:
            request, arguments = pipe.recv()
        except (EOFError, ConnectionResetError):
            return
        if request == "leave":
            return
        try:
            answer: tuple[Any, ...] = ("answer", getattr(peer, request)(*arguments))
        except Exception as error:
            answer = ("raised", sendable(error), traceback.format_exc())
        try:
            pipe.send(answer)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            pipe.send(("raised", TransportError(f"the answer to {request} cannot be sent: {error}"), ""))
        except BrokenPipeError:
            return


def main() -> int:
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test's own process decides when this one ends
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)
    own(descriptor=descriptor)
    shared_memory.join()
    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError):
        sys.path[:] = pipe.recv()
        pipe.send("ready")
        serve(pipe)
    pipe.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
