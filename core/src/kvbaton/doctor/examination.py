"""The whole look: the machine, every transport's word, the trials, and what it means for the one that is configured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from kvbaton.connector import ConnectorPlugin, MemoryKind, Need, Reach
from kvbaton.doctor.machine import Machine, Note, notes, read_machine
from kvbaton.doctor.trial import Trial, attempt
from kvbaton.doctor.verdict import STATUSES, Standing, Verdict, judge
from kvbaton.errors import OptionsError, PluginBroken, PluginConflict, PluginError, PluginUnavailable
from kvbaton.plugins import AUTO, OF_SETTINGS, REACHES, PluginRow, Remedies, choose_connector, list_plugins
from kvbaton.settings import Settings

#: Of the JSON document; raised where a key changes its meaning or goes.
VERSION = 1

Progress = Callable[[str], object]
Attempt = Callable[..., Trial]


class Chosen(msgspec.Struct, frozen=True):
    """The transport that the exit status is about.  ``by``: who chose it."""

    name: str
    by: Literal["argument", "settings", "auto"]
    memory: MemoryKind
    reach: Reach
    standing: Standing
    text: str


class Transport(msgspec.Struct, frozen=True):
    """One transport.  ``reach``: how it was tried, ``None`` where it cannot be used, for the ``reason`` given."""

    name: str
    distribution: str
    version: str
    reach: Reach | None
    reason: str
    remedy: str
    trial: Trial | None = None
    verdict: Verdict | None = None


class Report(msgspec.Struct, frozen=True):
    version: int
    exit_status: int
    chosen: Chosen
    machine: Machine
    notes: tuple[Note, ...]
    transports: tuple[Transport, ...]


@dataclass(frozen=True)
class _Pick:
    """The configured transport, resolved."""

    name: str
    by: Literal["argument", "settings", "auto"]
    reach: Reach
    plugin: ConnectorPlugin | None
    options: Any
    refusal: PluginError | None


def examine(
    settings: Settings,
    *,
    named: Literal["argument", "settings"] = "settings",
    memory: MemoryKind | None = None,
    progress: Progress = lambda line: None,
    machine: Machine | None = None,
    attempt: Attempt = attempt,
    remedies: Remedies = OF_SETTINGS,
) -> Report:
    """Look at everything.  ``named``: where a transport's name came from that is not ``auto``.

    Where it is, only that one is tried, else each that is usable.  ``memory``: by default that of the settings.
    Takes seconds for each.  Raises :class:`~kvbaton.errors.OptionsError`, and
    :class:`~kvbaton.errors.PluginNotFound` and such, where what was named does not exist or refuses its options.
    """
    kind: MemoryKind = memory or ("host" if settings.stages.devices is None else "cuda")
    progress("reading the machine")
    machine = machine or read_machine()
    progress("asking the transports")
    rows = _rows(settings.transport.name)  # first: whoever does not answer here is asked no more
    pick = _pick(settings, kind, named, remedies)
    devices = _devices(settings, machine)
    transports = []
    for row in rows:
        mine = row.name == pick.name
        given = settings.transport.options if mine and pick.by != "auto" else {}
        reaches: Sequence[Reach] = ("cross_process", "same_process")
        if mine and pick.reach == "same_process":
            reaches = ("same_process",)
        transports.append(_transport(row, given, reaches, kind, devices, machine, progress, attempt, remedies))
    chosen = _chosen(pick, kind, {transport.name: transport for transport in transports})
    return Report(VERSION, STATUSES[chosen.standing], chosen, machine, tuple(notes(machine)), tuple(transports))


# -- the configured one ------------------------------------------------------------------------------------------------


def _pick(settings: Settings, memory: MemoryKind, named: Literal["argument", "settings"], remedies: Remedies) -> _Pick:
    """As :func:`kvbaton.plugins.choose_placement` chooses, for that memory; a refusal is an answer."""
    launches = ("process", "inproc") if settings.stages.launch == AUTO else (settings.stages.launch,)
    by: Literal["argument", "settings", "auto"] = "auto" if settings.transport.name == AUTO else named
    refusal: PluginError | None = None
    for launch in launches:
        reach = REACHES[launch]
        try:
            plugin, options = choose_connector(settings.transport, Need(memory, reach), None, remedies)
        except (PluginUnavailable, PluginBroken, PluginConflict) as error:
            refusal = refusal or error  # of what was wanted first
            continue
        name = plugin.name if by == "auto" else settings.transport.name
        return _Pick(name, by, reach, plugin, options, None)
    return _Pick(settings.transport.name, by, REACHES[launches[0]], None, None, refusal)


def _chosen(pick: _Pick, memory: MemoryKind, transports: dict[str, Transport]) -> Chosen:
    def told(standing: Standing, text: str) -> Chosen:
        return Chosen(pick.name, pick.by, memory, pick.reach, standing, text)

    if pick.refusal is not None:
        return told("unusable", str(pick.refusal))
    found = transports.get(pick.name)
    verdict = found.verdict if found is not None else None
    if verdict is None:
        return told("unusable", found.reason if found is not None else "it was not tried")
    worst = next((one.sentence() for one in verdict.findings if one.level == verdict.standing), "")
    text = worst or verdict.summary
    if pick.reach == "same_process":
        text += "; within one process, where the stages are threads"
    if pick.reach == "cross_host":
        text += "; tried on this host alone: between hosts it may go by other ways"
    return told(verdict.standing, text)


# -- all of them -------------------------------------------------------------------------------------------------------


def _rows(named: str) -> Sequence[PluginRow]:
    """Every installed connector for ``auto``; else the one that is asked for, also where it is no entry point."""
    if named == AUTO:
        return [row for row in list_plugins() if row.kind == "connector"]
    rows = [row for row in list_plugins(named) if row.kind == "connector"]
    return rows or [PluginRow("connector", named, "", "", True)]


def _transport(
    row: PluginRow, options: dict[str, Any], reaches: Sequence[Reach], memory: MemoryKind, devices: tuple[int, int],
    machine: Machine, progress: Progress, attempt: Attempt, remedies: Remedies,
) -> Transport:  # fmt: skip
    """Tried as far as it reaches, between processes first."""
    refusal: Transport | None = None
    for reach in reaches:
        try:
            plugin, valid = choose_connector(row.name, Need(memory, reach), options, remedies)
        except OptionsError:
            raise
        except PluginError as error:
            reason, remedy = (error.reason, error.remedy) if isinstance(error, PluginUnavailable) else (str(error), "")
            refusal = refusal or Transport(row.name, row.distribution, row.version, None, reason, remedy)
            continue
        trial = attempt(
            row.name, plugin, valid, memory, devices, reach=reach, progress=lambda line: progress(f"{row.name}: {line}")
        )
        verdict = judge(row.name, plugin, valid, trial, machine)
        return Transport(row.name, row.distribution, row.version, reach, "", "", trial, verdict)
    assert refusal is not None
    return refusal


def _devices(settings: Settings, machine: Machine) -> tuple[int, int]:
    """Those of the first prefill and the first decode stage; else two different ones, where there are."""
    given = settings.stages.devices
    if given is not None and len(given) > settings.stages.prefill:
        return given[0], given[settings.stages.prefill]
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    count = len(machine.gpus) if visible is None else len([part for part in visible.split(",") if part.strip()])
    return (0, 1) if count > 1 else (0, 0)
