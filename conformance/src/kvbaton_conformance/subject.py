"""What is being judged: one connector, as it was named, opened once to ask it what it can do."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import Any, Literal

from kvbaton.connector import (
    Capabilities,
    ConnectorContext,
    ConnectorPlugin,
    MemoryKind,
    Need,
    Reach,
    TransferConnector,
)
from kvbaton.errors import KvbatonError, PluginUnavailable
from kvbaton.identity import PeerId
from kvbaton_conformance import device_memory
from kvbaton_conformance.deadline import deadline
from kvbaton_conformance.placement import DEFAULT, PAIR, device_of, shown

#: How a test class may say which connector it means: a name, ``module:object``, a plugin object, or a callable that
#: returns one.
Named = str | ConnectorPlugin | Callable[[], ConnectorPlugin]

Mode = Literal["in-process", "two-processes"]

#: What every connector has, in the protocol's order.
METHODS = (
    "register", "metadata", "connect", "disconnect", "submit", "poll", "outstanding", "close",
    "allocate", "grant", "revoke", "fenced", "cancel", "acknowledge", "wait",
)  # fmt: skip


#: What a kind of memory needs of the machine.
#: Seconds that a connector may take to open, and to close again: kernels are compiled, libraries are loaded.
LOOK_BOUND = 90.0
_HARDWARE: Mapping[MemoryKind, str] = {"cuda": "a CUDA device"}


class SubjectRefused(Exception):
    """There is nothing to judge; the message says why and what to do.

    ``unavailable``: the connector is there, but what it needs is not (its ``probe`` said no).  ``hardware``: what that
    is, where what was asked for says so.
    """

    def __init__(self, message: str, *, unavailable: bool = False, hardware: str = "") -> None:
        super().__init__(message)
        self.unavailable = unavailable
        self.hardware = hardware


@dataclass(frozen=True)
class Reference:
    """How another process finds the same plugin object: by what was named, or by the attribute of a class in a file."""

    named: str | None
    file: str = ""
    module: str = ""
    class_name: str = ""

    def load(self) -> str | ConnectorPlugin:
        """What :func:`kvbaton.plugins.choose_connector` takes."""
        if self.named is not None:
            return self.named
        module = sys.modules.get(self.module)
        if module is None:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[self.module] = module
            spec.loader.exec_module(module)
        owner: Any = module
        for part in self.class_name.split("."):
            owner = getattr(owner, part)
        plugin: str | ConnectorPlugin = instance(inspect.getattr_static(owner, "connector"))
        return plugin


@dataclass(frozen=True, eq=False)
class Subject:
    """A connector that can be opened here.

    ``capabilities`` are those of a running connector, not of the plugin's description.
    """

    title: str
    plugin: ConnectorPlugin
    options: Any
    given_options: Mapping[str, Any]
    capabilities: Capabilities
    reaches: frozenset[Reach]
    reference: Reference
    origin: str
    #: Where the memory of its ends is ...
    memory: MemoryKind = "host"
    #: ... and the CUDA devices that they lie on in turn; none where it is the host's.
    devices: tuple[int, ...] = ()
    #: What it declares to reach and yet refuses for this kind of memory, and why.
    refused: Mapping[Reach, str] = field(default_factory=dict)

    @property
    def modes(self) -> tuple[Mode, ...]:
        """Where its ends are put: one process where it can, two always where it says that it reaches another."""
        modes: list[Mode] = []
        if "same_process" in self.reaches:
            modes.append("in-process")
        if "cross_process" in self.reaches:
            modes.append("two-processes")
        return tuple(modes)

    def device(self, name: str) -> int | None:
        """The CUDA device of the end, or stage, ``name``; None: it lies on the host."""
        return device_of(name, self.devices)

    def need(self, mode: Mode) -> Need:
        return Need(self.memory, "same_process" if mode == "in-process" else "cross_process")

    def header(self) -> list[str]:
        """What a reader of the run must know to judge it."""
        named = f"{self.title}: {self.origin}"
        options = ", ".join(f"{key}={value}" for key, value in sorted(self.given_options.items()))
        where = f", device{'s' if len(self.devices) > 1 else ''} {shown(self.devices)}" if self.devices else ""
        return [
            f"connector {named}" + (f", options {options}" if options else ""),
            "capabilities of the running connector: " + ", ".join(described(self.capabilities)),
            f"modes: {', '.join(self.modes)}; memory: {self.memory}{where}",
            *(f"absent with {self.memory} memory: {reach}: {reason}" for reach, reason in self.refused.items()),
        ]


def described(capabilities: Capabilities) -> list[str]:
    """``name=value`` for each, sets in order."""
    lines = []
    for item in fields(capabilities):
        value = getattr(capabilities, item.name)
        lines.append(f"{item.name}={'+'.join(sorted(value)) if isinstance(value, frozenset) else value}")
    return lines


def instance(named: Any) -> Any:
    """A name stays a name; a factory is called; anything else is the plugin itself."""
    if isinstance(named, staticmethod):
        named = named.__func__
    if isinstance(named, str) or hasattr(named, "open"):
        return named
    return named() if callable(named) else named


def resolve(
    named: Any, options: Mapping[str, Any], reference: Reference, title: str, memory: MemoryKind = "host",
    devices: Sequence[int] = DEFAULT, flag: str = "--connector-memory",
) -> Subject:  # fmt: skip
    """The subject behind a name, an object or a factory, with its ends' memory of one kind.

    ``devices``: where that is ``cuda``, those that the ends lie on in turn.  ``flag``: by which whoever asked names the
    kind.

    Raises :class:`SubjectRefused`.
    """
    from kvbaton.plugins import Remedies, choose_connector

    remedies = Remedies(host=f"judge it on host memory ({flag} host)", cuda=f"judge it on device memory ({flag} cuda)")
    try:
        chosen = instance(named)
    except Exception as error:
        raise SubjectRefused(
            f"the factory of connector {title} raised {type(error).__name__}: {error}. It must return a plugin object:"
            " name, api_version, Options, probe(need), open(options, context)."
        ) from error
    plugin: ConnectorPlugin | None = None
    valid: Any = None
    reaches: set[Reach] = set()
    refusal: KvbatonError | None = None
    refused: dict[Reach, str] = {}
    declared: dict[Reach, Capabilities | None] = {}
    for reach in ("same_process", "cross_process", "cross_host"):
        try:
            plugin, valid = choose_connector(chosen, Need(memory, reach), dict(options), remedies)
        except PluginUnavailable as error:
            refusal = refusal or error
            refused[reach] = str(error)
            continue
        except KvbatonError as error:
            raise SubjectRefused(str(error)) from error
        reaches.add(reach)
        declared[reach] = plugin.probe(Need(memory, reach)).capabilities
    if plugin is None:
        assert refusal is not None
        raise SubjectRefused(
            f"connector {title} cannot be judged here, because its probe says no: {refusal}", unavailable=True,
            hardware=_HARDWARE.get(memory, ""),
        ) from refusal  # fmt: skip
    places = (tuple(devices) or DEFAULT) if memory == "cuda" else ()
    if places and (reason := device_memory.absent(places)):
        raise SubjectRefused(
            f"connector {title} cannot be judged on device memory: {reason}", unavailable=True,
            hardware=_HARDWARE[memory],
        )  # fmt: skip
    capabilities = _capabilities(plugin, valid, title, device_of(PAIR[0], places))
    # a probe that gives no capabilities says only that it is usable: the running connector knows how far it reaches
    reaches = {reach for reach in reaches if declared[reach] is not None or capabilities.reaches(reach)}
    reaches = {reach for reach in reaches if capabilities.reaches(reach)} or reaches
    if not reaches & {"same_process", "cross_process"}:
        raise SubjectRefused(
            f"connector {title} declares neither same_process nor cross_process: there is no place on this machine"
            " where two of its ends could meet. Declare what it reaches in its Capabilities."
        )
    refused = {reach: reason for reach, reason in refused.items() if capabilities.reaches(reach)}
    return Subject(
        title, plugin, valid, dict(options), capabilities, frozenset(reaches), reference, _origin(chosen, plugin),
        memory, places, refused,
    )  # fmt: skip


def _capabilities(plugin: ConnectorPlugin, options: Any, title: str, device: int | None) -> Capabilities:
    """Open one, look, close it."""
    try:
        with deadline(LOOK_BOUND):
            connector: TransferConnector = plugin.open(
                options, ConnectorContext(PeerId.start("conformance-look"), device)
            )
    except Exception as error:
        raise SubjectRefused(
            f"connector {title} cannot be opened, although its probe says that it is usable:"
            f" {type(error).__name__}: {error}"
        ) from error
    if connector is None:
        raise SubjectRefused(
            f"connector {title}: its open() returned None, not a connector: it must return a"
            " kvbaton.connector.TransferConnector"
        )
    missing = [name for name in METHODS if not callable(getattr(connector, name, None))]
    if missing:
        raise SubjectRefused(
            f"connector {title} is half written: {type(connector).__name__} has no {', '.join(missing)}."
            " Derive it from kvbaton.connector.ConnectorBase for the optional half, and write the rest."
        )
    capabilities = getattr(connector, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        raise SubjectRefused(
            f"connector {title}: {type(connector).__name__}.capabilities is"
            f" {type(capabilities).__name__}, not kvbaton.connector.Capabilities"
        )
    try:
        with deadline(LOOK_BOUND):
            connector.close()
    except Exception as error:
        raise SubjectRefused(
            f"T10: connector {title}, just opened and never used, cannot be closed: {type(error).__name__}: {error}"
        ) from error
    return capabilities


def _origin(chosen: object, plugin: ConnectorPlugin) -> str:
    if isinstance(chosen, str) and ":" not in chosen:
        for entry in entry_points(group="kvbaton.connectors"):
            if entry.name == chosen and entry.dist is not None:
                return f"{entry.dist.name} {entry.dist.version} ({entry.value})"
    kind = type(plugin)
    module = sys.modules.get(kind.__module__)
    place = getattr(module, "__file__", None)
    return f"{kind.__module__}.{kind.__qualname__}" + (f" ({Path(place).name})" if place else "")


def versions() -> str:
    """kvbaton, the kit, and what runs them."""
    import pytest

    parts = []
    for name in ("kvbaton", "kvbaton-conformance", "numpy", "msgspec"):
        try:
            parts.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            parts.append(f"{name} (not installed)")
    return ", ".join([*parts, f"pytest {pytest.__version__}", f"Python {sys.version.split()[0]}", sys.platform])
