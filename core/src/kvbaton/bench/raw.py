"""A transport's baseline in the process of one end, called by :mod:`kvbaton.bench.wire` through a pair's ``call``.

What a plugin's baseline raises is an answer, not an error: kvbaton's own figures do not depend on it.
"""

from __future__ import annotations

import functools
import os
import select
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from kvbaton.bench.baseline import Baseline
from kvbaton.connector import MemoryKind, Need, Reach, WithBaseline
from kvbaton.errors import TransportError
from kvbaton.pair.batches import batched
from kvbaton.pair.end import End
from kvbaton.plugins import choose_connector
from kvbaton.segments import Segments

Answer = dict[str, Any]


@dataclass(slots=True)
class _State:
    raw: Baseline
    chunks: int = 0


_states: WeakKeyDictionary[End, _State] = WeakKeyDictionary()


def _answering(function: Callable[..., Answer]) -> Callable[..., Answer]:
    @functools.wraps(function)
    def answer(end: End, **arguments: Any) -> Answer:
        try:
            return function(end, **arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


@_answering
def open_end(end: End, transport: str, options: dict[str, Any], memory: MemoryKind, reach: Reach) -> Answer:
    """The name and the address of this end; an ``error`` without a text where the plugin offers no baseline."""
    plugin, valid = choose_connector(transport, Need(memory, reach), options)
    if not isinstance(plugin, WithBaseline):
        return {"error": ""}
    raw = plugin.baseline(valid, end.memory.regions)
    _states[end] = _State(raw)
    return {"name": str(raw.name), "address": bytes(raw.address())}


@_answering
def meet(end: End, address: bytes) -> Answer:
    _states[end].raw.meet(address)
    return {}


@_answering
def prepare(
    end: End, reads: bytes, writes: bytes, chunk_bytes: int, chunk_segments: int, source: bool
) -> Answer:  # fmt: skip
    state, able = _states[end], end.guard.capabilities
    chunks = batched(
        Segments.from_bytes(reads), Segments.from_bytes(writes), min(chunk_bytes, able.max_chunk_bytes),
        min(chunk_segments, able.max_segments), able.alignment,
    )  # fmt: skip
    state.chunks = len(chunks)
    if source:
        state.raw.prepare_source(chunks)
    else:
        state.raw.prepare_target([goal for _, goal in chunks])
    return {}


@_answering
def move(end: End, bound: float) -> Answer:
    """At the source: once the target has begun; seconds until the target knew, or else until it was done here."""
    by = time.monotonic() + bound
    raw = _states[end].raw
    if not select.select([end.bell], [], [], bound)[0]:
        raise TransportError("the target has not begun")
    end.heard()
    start = time.monotonic()
    raw.move()
    if not raw.tells:
        return {"seconds": time.monotonic() - start}
    while not select.select([end.bell], [], [], 0)[0]:
        raw.arrived()  # what was buffered here still has to leave
        os.sched_yield()
        if time.monotonic() > by:
            raise TransportError(f"the target did not have everything within {bound:g} s")
    return {"seconds": end.heard() - start}


@_answering
def receive(end: End, bound: float) -> Answer:
    """At the target: ring once ready, and once everything is there, where that can be known.  ``early``: it says that
    something is there before the source has heard that it may begin."""
    by = time.monotonic() + bound
    state = _states[end]
    state.raw.begin()
    early = state.raw.tells and state.raw.arrived() > 0
    end.ring()
    if not state.raw.tells:
        return {}
    left = state.chunks
    while left > 0:
        came = state.raw.arrived()
        left -= came
        if not came:
            os.sched_yield()
            if time.monotonic() > by:
                raise TransportError(f"{left} of {state.chunks} chunks have not come within {bound:g} s")
    end.ring()
    return {"early": early}


@_answering
def close_end(end: End) -> Answer:
    state = _states.pop(end, None)
    if state is not None:
        state.raw.close()
    return {}
