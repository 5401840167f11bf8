"""What one bench measures, in which order, and whether there is room for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from kvbaton import room
from kvbaton.bench import handoffs, wire
from kvbaton.bench.circumstances import machine, versions
from kvbaton.bench.measured import Measured
from kvbaton.bench.traffic import Traffic
from kvbaton.connector import MemoryKind
from kvbaton.errors import SettingsError
from kvbaton.plugins import OF_SETTINGS, Remedies, choose_placement
from kvbaton.quantities import size
from kvbaton.settings import Settings
from kvbaton.spread import significant

#: Requests under way at once where nobody says: the first that fits.
_AT_ONCE = (4, 2, 1)
#: What two processes with a transport and Python in them take besides: bytes.
_PROCESSES = 300 << 20
#: Of one request, at most.
_PIECES, _CHUNKS = 1 << 23, 1 << 16


@dataclass(frozen=True)
class Plan:
    """``transport``: bytes alone; ``sweep``: over the length of a segment; ``handoffs``: whole ones.

    ``requests``: hand-offs timed one at a time, at most.  ``at_once``: under way for the rate; None: what fits, 4 at
    most.  ``seconds``: about how long each part may measure.
    """

    settings: Settings
    traffic: Traffic
    memory: MemoryKind
    transport: bool
    handoffs: bool
    sweep: bool
    requests: int
    at_once: int | None
    seconds: float
    remedies: Remedies = OF_SETTINGS


def carry_out(plan: Plan, progress: Callable[[str, float], None]) -> Measured:
    """Everything that the plan asks for.

    Raises a :class:`~kvbaton.errors.ConfigurationError` before anything is started for a transport that cannot be used
    and for memory that is not there; later what each part raises.
    """
    began, before = time.monotonic(), os.getloadavg()[0]
    traffic, settings = plan.traffic, plan.settings
    if settings.stages.launch == "remote":  # what is measured is this host
        stages = settings.stages.model_copy(update={"launch": "auto"})
        settings = settings.model_copy(update={"stages": stages})
    asked = handoffs.bench_settings(settings, traffic, plan.at_once or 1, plan.memory)
    placement = choose_placement(asked, remedies=plan.remedies)
    able = placement.plugin.probe(placement.need).capabilities
    if settings.transport.name == "auto":
        named = settings.transport.model_copy(update={"name": placement.plugin.name})
        settings = settings.model_copy(update={"transport": named})
    devices = asked.stages.devices
    advice = "Take fewer --tokens, a smaller model"
    space = _Space(plan.memory, devices, able is not None and able.memory_origin == "allocated")
    each = traffic.request_bytes
    if plan.transport:
        # a plain copy goes into memory that both ends see
        room.check(space.need(f"moving {size(each)} between two processes", each, shared=each), f"{advice}.")
    if plan.sweep:
        most = wire.sweep_bytes()
        room.check(space.need("the sweep", most, shared=most), "Leave out --sweep.")
    at_once = plan.at_once or 1
    if plan.handoffs:
        at_once = _at_once(plan, space, advice)
    _check_count(traffic, settings)
    over = wire.Wire(
        settings.transport.name, settings.transport.options, plan.memory,
        (0, 0) if devices is None else (devices[0], devices[-1]), placement.need.reach,
        int(settings.transfer.chunk_bytes), settings.transfer.chunk_segments,
    )  # fmt: skip
    moved, points, found = None, [], None
    if plan.transport:
        regions = [traffic.kv_bytes(1), traffic.final_stored(1)]
        moved = wire.measure(over, regions, *traffic.segments, plan.seconds, progress)
    if plan.sweep:
        points = wire.sweep(over, plan.seconds, progress)
    if plan.handoffs:
        found = handoffs.measure(
            handoffs.bench_settings(settings, traffic, at_once, plan.memory), traffic, at_once=at_once,
            requests=plan.requests, seconds=plan.seconds, progress=progress,
        )  # fmt: skip
    return Measured(
        settings.transport.name, settings.transport.options, plan.memory, traffic, over.chunk_bytes, machine(),
        versions(), (significant(before, 3), significant(os.getloadavg()[0], 3)), time.monotonic() - began, moved,
        tuple(points), found, tuple(dict.fromkeys(over.notes)),
    )  # fmt: skip


def _check_count(traffic: Traffic, settings: Settings) -> None:
    """Each piece and each chunk is an object or a row of our own, which takes more than its bytes."""
    if traffic.pieces > _PIECES:
        raise SettingsError(
            f"one request is {traffic.pieces:,} pieces of a block and layer each, and at most {_PIECES:,} can be"
            " planned here. Take a larger --block, or fewer --tokens.",
            key="tokens", origin=None,
        )  # fmt: skip
    cut = settings.transfer
    chunks = traffic.request_bytes // int(cut.chunk_bytes) + traffic.pieces // cut.chunk_segments
    if chunks > _CHUNKS:
        raise SettingsError(
            f"one request is {chunks:,} chunks of {size(int(cut.chunk_bytes))} and {cut.chunk_segments:,} segments"
            f" at most, and more than {_CHUNKS:,} are none that anybody sends. Take a larger --chunk-bytes"
            " (transfer.chunk_bytes, transfer.chunk_segments).",
            key="transfer.chunk_bytes", origin=None,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Space:
    memory: MemoryKind
    devices: tuple[int, ...] | None
    #: The transport allocates what it moves: in shared memory, where it is the host's.
    allocated: bool

    def need(self, what: str, each: int, shared: int = 0) -> room.Need:
        """``each``: bytes at either end."""
        if self.memory == "cuda":
            assert self.devices is not None
            on: dict[int, int] = {}
            for device in (self.devices[0], self.devices[-1]):
                on[device] = on.get(device, 0) + each
            if shared:  # a copy to the target's device
                on[self.devices[-1]] += shared
            return room.Need(what, host=_PROCESSES, devices=on)
        # what lies in /dev/shm is memory, too
        return room.Need(what, host=2 * each + shared + _PROCESSES, shm=2 * each if self.allocated else 0)


def _at_once(plan: Plan, space: _Space, advice: str) -> int:
    """What was asked for; else the first that there is room for."""
    for at_once in _AT_ONCE if plan.at_once is None else (plan.at_once,):
        each = plan.traffic.kv_bytes(at_once) + plan.traffic.final_stored(at_once)
        what = f"{at_once} hand-off{'s' if at_once > 1 else ''} of {size(plan.traffic.request_bytes)} at once"
        try:
            room.check(space.need(what, each), f"{advice}, or fewer --at-once." if at_once > 1 else f"{advice}.")
        except SettingsError:
            if plan.at_once is None and at_once > 1:
                continue
            raise
        return at_once
    raise AssertionError("the last one has returned or raised")
