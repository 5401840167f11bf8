"""What a stage's process (or thread) runs: open engine and connector, join them, run until told to stop.

The main thread is the engine's; the pump has its own.  Whatever goes wrong on the way up is one ``Fatal`` with the
reason, so that the application can say it in one line.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvbaton import messages
from kvbaton.connector import ConnectorContext, ConnectorPlugin, MemoryKind, Need, Reach, wire_version
from kvbaton.control import StageChannel
from kvbaton.engine import EnginePlugin, Role, StageEngine
from kvbaton.errors import CapabilityError, ConfigurationError, KvbatonError
from kvbaton.guard import GuardedConnector, GuardLimits
from kvbaton.launch import Lifeline, StageSpec
from kvbaton.plugins import choose_connector, choose_engine
from kvbaton.settings import Settings
from kvbaton.stage.decode import DecodeStage
from kvbaton.stage.engine_loop import EngineLoop
from kvbaton.stage.planner import ChunkLimits, ChunkPlanner
from kvbaton.stage.prefill import PrefillStage
from kvbaton.stage.pump import Pump
from kvbaton.stage.stage import Stage

_log = logging.getLogger(__name__)

ENTRY = "kvbaton.stage.worker:main"


#: Connector plugins that were given as objects, for stages that are threads of this process.
_given: dict[str, ConnectorPlugin] = {}
_numbers = itertools.count(1)


def stage_settings(
    settings: Settings, device: int | None, reach: Reach, connector: ConnectorPlugin | None = None
) -> Mapping[str, Any]:
    """What :func:`main` wants in ``StageSpec.settings``.

    ``connector`` takes the place of ``transport.name``, in stages of this process only: an object does not travel.
    """
    key = "" if connector is None else f"given-{next(_numbers)}"  # one of its own: two runtimes may share a connector
    if connector is not None:
        _given[key] = connector
    # the text: a dump keeps pydantic's own kinds of numbers, which no other encoder knows
    plain = json.loads(settings.model_dump_json())
    return {"settings": plain, "device": device, "reach": reach, "connector": key}


def forget_given(settings: Mapping[str, Any]) -> None:
    """The stage that these settings were made for starts no more: let go of the connector that it was given."""
    _given.pop(settings.get("connector", ""), None)


def stage_specs(settings: Settings, reach: Reach, connector: ConnectorPlugin | None) -> list[StageSpec]:
    """What each stage of a deployment is started with; prefill stages first, as ``stages.devices`` counts them."""
    names = [(Role.PREFILL, i) for i in range(settings.stages.prefill)]
    names += [(Role.DECODE, i) for i in range(settings.stages.decode)]
    devices = settings.stages.devices or [None] * len(names)
    return [
        StageSpec(
            name=f"{role.value}-{i}", role=role.value, entry=ENTRY,
            settings=stage_settings(settings, device, reach, connector),
        )
        for (role, i), device in zip(names, devices, strict=True)
    ]  # fmt: skip


def main(spec: StageSpec, channel: StageChannel, lifeline: Lifeline) -> int:
    """Be one stage.  The status is 0 where it ended as ordered.

    The channel is severed when the lifeline is cut, so the stage looks at the channel alone (C6.6).
    """
    if lifeline.cut is not None:
        return 1
    settings = Settings.model_validate(spec.settings["settings"])
    device: int | None = spec.settings["device"]
    kind: MemoryKind = "host" if device is None else "cuda"
    try:
        engine_plugin, engine_options = choose_engine(settings.engine)
        connector_plugin, connector_options = choose_connector(
            _given.get(spec.settings["connector"], settings.transport),
            Need(kind, spec.settings["reach"]),
            settings.transport.options,
        )
        engine = engine_plugin.open(settings.model, engine_options, Role(spec.role), device)
    except KvbatonError as error:
        _refuse(spec, channel, str(error), error)
        return 1
    except Exception as error:  # out of memory, a broken checkpoint: the operator reads one line, the log has the rest
        _log.debug("stage %s", spec.name, exc_info=error)
        _refuse(spec, channel, f"the engine could not be opened: {type(error).__name__}: {error}")
        return 1
    try:
        guard = open_guard(connector_plugin, connector_options, engine, settings, channel, device)
    except KvbatonError as error:
        engine.close()
        _refuse(spec, channel, str(error), error)
        return 1
    except Exception as error:
        engine.close()
        _log.debug("stage %s", spec.name, exc_info=error)
        _refuse(spec, channel, f"its memory could not be set up: {type(error).__name__}: {error}")
        return 1
    stage, loop = join(engine, guard, settings, channel)
    return run(stage, loop, engine, settings)


def open_guard(
    plugin: ConnectorPlugin, options: Any, engine: StageEngine, settings: Settings, channel: StageChannel,
    device: int | None, clock: Callable[[], float] = time.monotonic,
) -> GuardedConnector:  # fmt: skip
    """A guarded connector with the engine's memory registered, not yet owned by any thread."""
    connector = plugin.open(options, ConnectorContext(channel.peer, device))
    guard = GuardedConnector(
        connector,
        transport=plugin.name,
        version=wire_version(plugin),
        peer=channel.peer,
        geometry=engine.geometry.encode(),
        limits=GuardLimits(
            inflight_bytes=settings.transfer.inflight_bytes,
            inflight_segments=settings.transfer.inflight_segments,
            unreceipted_chunks=settings.transfer.unreceipted_chunks,
            quarantine_bytes=settings.limits.quarantine_bytes,
        ),
        connect_deadline=settings.deadline.connect,
        chunk_deadline=settings.deadline.chunk,
        clock=clock,
    )
    try:
        allocated = guard.capabilities.memory_origin == "allocated"
        guard.register(engine.regions(guard.allocate if allocated else None))
        guard.endpoint()  # one that cannot be announced is refused here, in one line (T2)
    except BaseException:
        with contextlib.suppress(Exception):  # that is not what went wrong
            guard.close()
        raise
    guard.detach()
    return guard


def join(
    engine: StageEngine, guard: GuardedConnector, settings: Settings, channel: StageChannel,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Stage, EngineLoop]:  # fmt: skip
    """The stage around an engine and a connector, and the loop that runs the engine.  Starts nothing."""
    stage: Stage
    loop: EngineLoop
    common: dict[str, Any] = {
        "peer": channel.peer,
        "guard": guard,
        "channel": channel,
        "capacity": engine.capacity(),
        "post": lambda command: loop.post(command),
        "clock": clock,
        "shutdown_deadline": settings.deadline.shutdown,
    }
    if engine.role is Role.PREFILL:
        able = guard.capabilities
        limits = ChunkLimits(
            min(settings.transfer.chunk_bytes, able.max_chunk_bytes),
            min(settings.transfer.chunk_segments, able.max_segments),
            able.alignment,
        )
        planner = ChunkPlanner(engine.geometry, limits)
        prefill = PrefillStage(planner, backlog_bytes=settings.transfer.inflight_bytes, **common)
        stage, can_schedule = prefill, prefill.can_schedule
    else:
        decode = DecodeStage(engine.geometry, receipts_deadline=settings.deadline.receipts, **common)
        stage, can_schedule = decode, lambda transfer, tokens: True
    loop = EngineLoop(engine, stage.report, can_schedule, clock)
    stage.engine_age = loop.age
    stage.record_engine = loop.record
    stage.durations["engine_step"] = loop.steps
    return stage, loop


def run(stage: Stage, loop: EngineLoop, engine: StageEngine, settings: Settings) -> int:
    """Run the engine on this thread and the pump on its own until the stage has ended.

    The engine is closed then, unless a transport may still touch its memory: that is left to the end of the process.
    """
    pump = Pump(
        stage, name=f"kvbaton-pump-{stage.peer.name}", idle_min=settings.pump.idle_min,
        idle_max=settings.pump.idle_max, failed=stage.pump_failed,
    )  # fmt: skip
    stage.durations |= {"pump_pass": pump.passes, "pump_lag": pump.lags}
    pump.start()
    try:
        loop.run()
    finally:
        # the loop ends on the pump's word only; a hung pump is the launcher's to kill
        pump.join()
        if stage.outcome is None or not stage.outcome.exposed:
            engine.close()
    outcome = stage.outcome
    assert outcome is not None, "the pump ends with an outcome"
    _log.info("%s ended: %s", stage.peer, outcome.reason)
    if outcome.status:
        stage.channel.send(messages.Fatal(outcome.reason))  # so that whoever joins it can say why
    return outcome.status


def _refuse(spec: StageSpec, channel: StageChannel, why: str, error: KvbatonError | None = None) -> None:
    _log.info("stage %s cannot start: %s", spec.name, why)
    channel.send(messages.Fatal(why, isinstance(error, (ConfigurationError, CapabilityError))))


__all__ = ["ENTRY", "EnginePlugin", "join", "main", "open_guard", "run", "stage_settings", "stage_specs"]
