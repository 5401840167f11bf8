"""All that one bench has found, as one value, and as the JSON that ``--json`` prints.

The JSON is stable: within a ``schema`` number names keep their meaning, and what is added changes nothing of what was
there.  Times are seconds, rates bytes per second, sizes bytes; what was not measured is null.  ``docs/bench.md`` has
every field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from kvbaton.bench.handoffs import HandOffs
from kvbaton.bench.traffic import Traffic
from kvbaton.bench.wire import Carried
from kvbaton.connector import MemoryKind
from kvbaton.spread import Spread, significant

SCHEMA: Final = 1


@dataclass(frozen=True)
class Measured:
    """``before`` and ``after`` are the machine's load average; ``sweep`` has one entry for each length of segment."""

    transport: str
    options: Mapping[str, Any]
    memory: MemoryKind
    traffic: Traffic
    chunk_bytes: int
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    load: tuple[float, float]
    seconds: float
    moved: Carried | None = None
    sweep: tuple[Carried, ...] = ()
    handoffs: HandOffs | None = None
    notes: tuple[str, ...] = field(default=())

    @property
    def of_transport(self) -> float | None:
        """Bytes per second of whole hand-offs, several at once, over those of the transport alone."""
        if self.moved is None or self.handoffs is None:
            return None
        return self.handoffs.together.median * self.handoffs.nbytes / self.moved.rate.median

    def as_json(self) -> dict[str, Any]:
        traffic, model = self.traffic, self.traffic.model
        source, _ = traffic.segments
        return {
            "schema": SCHEMA,
            "transport": {"name": self.transport, "options": dict(self.options)},
            "memory": self.memory,
            "model": {
                "name": model.name, "layers": model.layers, "kv_heads": model.kv_heads, "head_dim": model.head_dim,
                "dtype": model.dtype, "latent": model.latent, "planes": model.planes, "hidden": model.hidden,
                "token_bytes": model.token_bytes, "source": model.source,
            },
            "traffic": {
                "tokens": traffic.tokens, "block": traffic.block, "layout": traffic.layout,
                "scattered": traffic.scattered, "bytes": traffic.request_bytes, "segments": len(source),
                "segment_bytes": traffic.segment_bytes, "chunk_bytes": self.chunk_bytes,
            },
            "machine": {**self.machine, "load": list(self.load)},
            "versions": dict(self.versions),
            "seconds": significant(self.seconds),
            "moved": None if self.moved is None else _moved(self.moved),
            "sweep": [_moved(moved) for moved in self.sweep],
            "handoffs": None if self.handoffs is None else _handoffs(self.handoffs, self.of_transport),
            "notes": list(self.notes),
        }  # fmt: skip


def _moved(moved: Carried) -> dict[str, Any]:
    raw = moved.baseline
    return {
        "segment_bytes": moved.segment_bytes,
        "segments": moved.segments,
        "chunks": moved.chunks,
        "bytes": moved.nbytes,
        "reach": moved.reach,
        "rate": moved.rate.as_dict(),
        "latency": moved.latency.as_dict(),
        "chunk_latency": moved.chunk_latency.as_dict(),
        "submit": moved.submit.as_dict(),
        "copy_rate": _spread(moved.copy),
        "of_copy": _spread(moved.of_copy),
        "baseline": None if raw is None else {"name": raw.name, "rate": raw.rate.as_dict()},
        "of_baseline": _spread(moved.of_baseline),
    }


def _spread(spread: Spread | None) -> dict[str, Any] | None:
    return None if spread is None else spread.as_dict()


def _handoffs(found: HandOffs, of_transport: float | None) -> dict[str, Any]:
    return {
        "stages": found.launch,
        "bytes": found.nbytes,
        "chunks": found.chunks,
        "segments": found.segments,
        "empty_latency": found.empty.as_dict(),
        "latency": found.alone.as_dict(),
        "at_once": found.at_once,
        "round": found.round,
        "rate": found.together.as_dict(),
        "bytes_per_second": found.together.times(found.nbytes).as_dict(),
        "of_transport": None if of_transport is None else significant(of_transport),
        "milestones": {name: spread.as_dict() for name, spread in found.milestones.items()},
    }
