"""What a plugin itself said and did, seen between it and the guard.

The guard mends what a plugin gets wrong: it drops a second completion, turns an exception into an event.  Tests that
talk to the guard alone would not notice.  A :class:`Witness` stands in the plugin's place, passes every call on, and
writes down what breaks the protocol of :class:`~kvbaton.connector.TransferConnector`, clause first.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvbaton.connector import (
    IDLE,
    Capabilities,
    Chunk,
    Endpoint,
    MemoryKind,
    MemoryRegion,
    Outcome,
    Progress,
    TransferConnector,
)
from kvbaton.errors import KvbatonError, Outstanding, RegistrationError
from kvbaton.identity import PeerId, TransferId
from kvbaton.segments import Segments
from kvbaton_conformance import shared_memory

Key = tuple[TransferId, int]
T = TypeVar("T")

#: Seconds that a call may take.  No call waits for a peer; what is slower than this waits for something.
CALL_BOUND = 2.0

#: Problems that are written down; what comes after them is their consequence.
_MOST = 20

#: What a method may raise, by its documentation.
_MAY_RAISE: dict[str, tuple[type[Exception], ...]] = {
    "register": (RegistrationError,),
    "allocate": (KvbatonError,),
    "connect": (KvbatonError,),
    "grant": (KvbatonError,),
    "metadata": (KvbatonError,),
    "close": (Outstanding,),
}

#: The clause that a call breaks which takes too long.
_WAITS = {"submit": "T6", "poll": "T7", "wait": "T7", "close": "T10"}


@dataclass(frozen=True)
class Testimony:
    """What a witness has to say; a snapshot that can be sent."""

    problems: tuple[str, ...]
    #: Chunks that were accepted, and of those, the ones that have had their completion.
    accepted: frozenset[Key]
    completed: frozenset[Key]
    #: Longest call of each method, seconds.
    longest: dict[str, float] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)


class Witness:
    """A :class:`~kvbaton.connector.TransferConnector` that passes everything on to ``connector``."""

    def __init__(self, connector: TransferConnector, name: str) -> None:
        self.connector = connector
        self.name = name
        self.problems: list[str] = []
        self._declared = connector.capabilities
        self._accepted: set[Key] = set()
        self._open: set[Key] = set()
        self._raised: set[Key] = set()
        #: ``outstanding()`` was wrong once: what comes after that is the same again.
        self._miscounts = False
        self._longest: dict[str, float] = {}
        self._calls: Counter[str] = Counter()

    @property
    def capabilities(self) -> Capabilities:
        now = self.connector.capabilities
        if now != self._declared:
            self.note("T13", f"the capabilities of a running connector changed from {self._declared} to {now}")
            self._declared = now
        return now

    def note(self, clause: str, text: str) -> None:
        if len(self.problems) < _MOST:
            self.problems.append(f"{clause}: {self.name}: {text}")

    def testimony(self) -> Testimony:
        return Testimony(
            tuple(self.problems), frozenset(self._accepted), frozenset(self._accepted - self._open),
            dict(self._longest), dict(self._calls),
        )  # fmt: skip

    def forget(self) -> None:
        """Keep nothing of chunks that have had their completion."""
        self._accepted &= self._open

    @contextmanager
    def _watch(self, method: str, allowed: float = CALL_BOUND) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        except Exception as error:
            if not isinstance(error, _MAY_RAISE.get(method, ())):
                self.note(
                    "T7" if method == "poll" else "C6.3",
                    f"{method}() raised {type(error).__name__}: {error}; it reports what went wrong by an event",
                )
            raise
        finally:
            took = time.monotonic() - start
            self._calls[method] += 1
            self._longest[method] = max(self._longest.get(method, 0.0), took)
            if took > allowed:
                self.note(
                    _WAITS.get(method, "T6"),
                    f"{method}() took {took:.1f} s in thread {threading.current_thread().name}; no call waits for a"
                    " peer",
                )

    def _pass(self, method: str, call: Callable[[], T]) -> T:
        with self._watch(method):
            return call()

    # -- the protocol ------------------------------------------------------------------------------------------------

    def register(self, regions: Sequence[MemoryRegion]) -> None:
        self._pass("register", lambda: self.connector.register(regions))
        shared_memory.notice()

    def metadata(self) -> bytes:
        metadata = self._pass("metadata", self.connector.metadata)
        if type(metadata) is not bytes:
            self.note("T2", f"metadata() returned {type(metadata).__name__}, not bytes")
        return metadata

    def connect(self, peer: Endpoint) -> None:
        self._pass("connect", lambda: self.connector.connect(peer))

    def disconnect(self, peer: PeerId) -> None:
        self._pass("disconnect", lambda: self.connector.disconnect(peer))

    def submit(self, chunk: Chunk) -> bool:
        key = (chunk.transfer, chunk.sequence)
        try:
            taken: Any = self._pass("submit", lambda: self.connector.submit(chunk))
        except Exception:
            self._raised.add(key)
            raise
        if not isinstance(taken, bool):
            self.note("T6", f"submit() returned {taken!r}: True says that the chunk was taken, False that it was not")
        if taken:
            self._accepted.add(key)
            self._open.add(key)
        return bool(taken)

    def poll(self) -> Progress:
        found: Any = self._pass("poll", self.connector.poll)
        if not isinstance(found, Progress):
            self.note("T5", f"poll() returned {type(found).__name__}, not Progress")
            return IDLE
        progress: Progress = found
        if progress:
            shared_memory.notice_now_and_then()
        for completion in progress.completions:
            self._completion(completion)
        for receipt in progress.receipts:
            if receipt.sequence < 0:
                self.note("T3", f"a receipt for sequence {receipt.sequence}")
        waiting = self._pass("outstanding", self.connector.outstanding)
        if not self._raised and waiting != len(self._open) and not self._miscounts:
            self._miscounts = True
            self.note(
                "T5",
                f"outstanding() says {waiting}, while {len(self._open)} accepted chunks have had no completion: "
                + (
                    "what is counted up for a chunk is not counted down again"
                    if waiting > len(self._open)
                    else "a chunk counts until poll() has returned its completion, or close() goes through under it"
                ),
            )
        return progress

    def _completion(self, completion: Any) -> None:
        key = (completion.transfer, completion.sequence)
        what = f"chunk {completion.sequence} of transfer {completion.transfer}"
        if key in self._open:
            self._open.discard(key)
        elif key in self._raised:
            self._raised.discard(key)
        elif key in self._accepted:
            self.note("T5", f"a second completion ({completion.outcome.value}) for {what}")
        else:
            self.note("T5", f"a completion ({completion.outcome.value}) for {what}, which submit() has not accepted")
        if completion.outcome is Outcome.TIMED_OUT:
            self.note("T5", f"{what} completed as TIMED_OUT, which is core's own word")
        if completion.outcome is Outcome.DONE and not completion.source_quiet:
            self.note("T5", f"{what} is DONE but its source is not quiet: DONE is said when the source is read")
        if self._declared.quiet == "exact" and completion.outcome is not Outcome.DONE and not completion.terminal:
            self.note(
                "T13",
                f"{what} ended as {completion.outcome.value} with source_quiet={completion.source_quiet},"
                f' target_quiet={completion.target_quiet}, but quiet="exact" is declared: every completion proves both',
            )

    def outstanding(self) -> int:
        return self._pass("outstanding", self.connector.outstanding)

    def close(self) -> None:
        shared_memory.notice()
        self._pass("close", self.connector.close)

    def allocate(self, id: int, kind: MemoryKind, device: int, nbytes: int) -> MemoryRegion:
        region = self._pass("allocate", lambda: self.connector.allocate(id, kind, device, nbytes))
        if self._declared.memory_origin != "allocated":
            self.note("T13", 'allocate() returned memory, although memory_origin="any" is declared')
        return region

    def grant(self, transfer: TransferId, peer: PeerId, target: Segments) -> None:
        self._pass("grant", lambda: self.connector.grant(transfer, peer, target))

    def revoke(self, transfer: TransferId) -> bool:
        revoked: Any = self._pass("revoke", lambda: self.connector.revoke(transfer))
        if not isinstance(revoked, bool):
            self.note("C5.2", f"revoke() returned {revoked!r}: True promises, False does not yet")
        return revoked is True

    def fenced(self, peer: PeerId) -> None:
        self._pass("fenced", lambda: self.connector.fenced(peer))

    def cancel(self, transfer: TransferId) -> None:
        self._pass("cancel", lambda: self.connector.cancel(transfer))

    def acknowledge(self, transfer: TransferId) -> None:
        self._pass("acknowledge", lambda: self.connector.acknowledge(transfer))

    def wait(self, timeout: float) -> None:
        with self._watch("wait", timeout + CALL_BOUND):
            self.connector.wait(timeout)

    def statistics(self) -> Mapping[str, float]:
        """From any thread, so nothing is noted."""
        return self.connector.statistics()
