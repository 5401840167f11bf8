"""The guard around a connector that says what it is told, and what every topic of the guard level starts from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest

from kvbaton.connector import Chunk, Endpoint, MemoryRegion, Progress, RegionInfo
from kvbaton.errors import KvbatonError
from kvbaton.guard import GuardedConnector, GuardLimits, GuardProgress
from kvbaton.identity import PeerId, TransferId, new_transfer_id
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import ClauseBroken, require
from kvbaton_conformance.scripted_connector import ManualClock, ScriptedConnector
from kvbaton_conformance.suite.topic import GuardTopic

ME = PeerId("prefill-0", 7)
D0 = PeerId("decode-0", 10)
D1 = PeerId("decode-1", 11)
#: Bytes of the one region on either side, and seconds of the two deadlines.
REGION, CONNECT, CHUNK = 1 << 16, 10.0, 30.0


class Rig:
    """A guard around a scripted connector, with a clock of its own, connected to ``peers``."""

    def __init__(self, *peers: PeerId, capabilities: dict[str, Any] | None = None, **limits: int) -> None:
        self.clock = ManualClock()
        self.plugin = ScriptedConnector()
        self.plugin.capabilities = replace(self.plugin.capabilities, **(capabilities or {}))
        self.guard = GuardedConnector(
            self.plugin, transport="scripted", version="1", peer=ME, limits=GuardLimits(**limits),
            connect_deadline=CONNECT, chunk_deadline=CHUNK, clock=self.clock,
        )  # fmt: skip
        self.guard.register([MemoryRegion.of_array(0, np.zeros(REGION, np.uint8))])
        for peer in peers:
            self.guard.connect(endpoint(peer))
            self.plugin.up(peer)
        self.poll()

    def poll(self) -> Progress:
        return self.guard.poll()

    def post(self, peer: PeerId = D0, **fields: Any) -> Chunk:
        """A chunk that must be accepted."""
        posted = chunk(peer, **fields)
        require(self.guard.submit(posted), "T6", "a chunk was refused although there is room", seen=str(self))
        return posted

    def figure(self, name: str) -> float:
        return self.guard.statistics().get(name, 0)

    def balanced(self) -> bool:
        figures = self.guard.statistics()
        return not any(figures[name] for name in figures if name.startswith(("inflight", "quarantined", "outstanding")))

    def __str__(self) -> str:
        return str({name: value for name, value in self.guard.statistics().items() if value})


def endpoint(peer: PeerId = D0, **changes: Any) -> Endpoint:
    fields: dict[str, Any] = {
        "transport": "scripted", "version": "1", "peer": peer, "regions": (RegionInfo(0, "host", REGION),),
        "geometry": b"", "metadata": b"",
    }  # fmt: skip
    return Endpoint(**(fields | changes))


def chunk(
    peer: PeerId = D0, *, source: Segments | None = None, target: Segments | None = None, nbytes: int | None = None,
    sequence: int = 0, transfer: TransferId | None = None, length: int = 256,
) -> Chunk:  # fmt: skip
    source = Segments.of([(0, 0, length)]) if source is None else source
    target = source if target is None else target
    total = source.nbytes if nbytes is None else nbytes
    return Chunk(transfer or new_transfer_id(), sequence, peer, source, target, total)


def refused(action: Callable[[], object], kind: type[KvbatonError], clause: str, what: str) -> KvbatonError:
    """``action`` raises ``kind``, or ``clause`` is broken."""
    try:
        action()
    except kind as error:
        return error
    except Exception as error:
        raise ClauseBroken(clause, what, expected=kind.__name__, seen=f"{type(error).__name__}: {error}") from error
    raise ClauseBroken(clause, what, expected=kind.__name__, seen="no error")


def faults(progress: Progress) -> tuple[KvbatonError, ...]:
    return progress.faults if isinstance(progress, GuardProgress) else ()


@dataclass(frozen=True)
class CoresGuard:
    """What the guard level judges."""

    title: str = "core's guard"
    modes: tuple[str, ...] = ("in-process",)
    capabilities: None = None

    def header(self) -> list[str]:
        return ["core's guard alone, around a connector that says what it is told"]


class RigTopic(GuardTopic):
    """The guard alone: what every connector gets from core."""

    settable: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def subject_for(cls, config: pytest.Config) -> CoresGuard:  # noqa: ARG003
        return CoresGuard()
