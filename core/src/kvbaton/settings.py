"""Every setting of a deployment, in one model: file < environment < command line.

:func:`load` merges the three, refuses what nobody knows, and says of each effective value where it came from.
:class:`Settings` itself is plain data: frozen, and ``Settings.model_validate_json(settings.model_dump_json())`` gives
an equal one without a look at any file or variable, which is how a stage's process gets it.

Environment variables are ``KVBATON_`` and the key in capitals, levels joined by two underscores:
``KVBATON_TRANSFER__CHUNK_BYTES=64MiB``.  Sizes in bytes take a unit (``64MiB``, ``1.5GB``); times are seconds.
The descriptions of the fields are the reference: ``kvbaton config --schema`` prints them.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from kvbaton.bounds import MAX_MESSAGE_BYTES, Deadlines, GuardLimits, Limits, Recovery
from kvbaton.byte_size import Bytes
from kvbaton.errors import SettingsError, closest

ENVIRONMENT_PREFIX = "KVBATON_"
_LEVEL = "__"

# -- kinds of values ---------------------------------------------------------------------------------------------------


#: What one writes who means host memory, and who means a device by a framework's name for it.
_NO_DEVICE = re.compile(r"\s*(cpu|host|none|null|off|no)?\s*", re.IGNORECASE)
_NAMED_DEVICE = re.compile(r"\s*(?:cuda|gpu):?(\d+)\s*", re.IGNORECASE)


def _devices(value: object) -> object:
    given = [part for part in value.split(",") if part.strip()] if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)):
        return given
    if all(isinstance(part, str) and _NO_DEVICE.fullmatch(part) for part in given):
        raise PydanticCustomError(
            "devices",
            "must be numbers of CUDA devices, such as 0,1; for host memory leave stages.devices out altogether",
        )
    numbers = [_NAMED_DEVICE.fullmatch(part) if isinstance(part, str) else None for part in given]
    if all(numbers):
        meant = ",".join(found[1] for found in numbers if found)
        raise PydanticCustomError("devices", "must be numbers of CUDA devices: write {meant}", {"meant": meant})
    return given


Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
#: Options of a plugin: its own ``Options`` model validates them.
Options = dict[str, Any]

KiB, MiB, GiB = 1 << 10, 1 << 20, 1 << 30

#: The defaults of what acts on these settings.
_GUARD, _QUEUE, _PHASES, _RECOVERY = GuardLimits(), Limits(), Deadlines(), Recovery()


_TCP = re.compile(r"tcp://(?:\*|[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")


def _tcp(value: str) -> str:
    found = _TCP.fullmatch(value)
    if not found or not 0 < int(found[1]) < 65536:
        raise PydanticCustomError("tcp", "not an address; write tcp://HOST:PORT, such as tcp://10.0.0.1:5555")
    return value


#: ``tcp://HOST:PORT``.
TcpAddress = Annotated[str, AfterValidator(_tcp)]


_LISTEN = re.compile(r"(?:(?P<host>[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])?:)?(?P<port>\d{1,5})")


def _listen(value: str) -> str:
    found = _LISTEN.fullmatch(value.strip())
    if not found or int(found["port"]) > 65535:
        raise PydanticCustomError("listen", "not an address; write HOST:PORT, such as 127.0.0.1:9400, or a port alone")
    return f"{found['host'] or '127.0.0.1'}:{int(found['port'])}"


#: ``HOST:PORT``; port 0 takes one that is free.
ListenAddress = Annotated[str, AfterValidator(_listen)]


class _Group(BaseModel):
    # Descriptions stand in the fields: to find docstrings, pydantic parses this file once per class, at every start.
    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


# -- the settings ------------------------------------------------------------------------------------------------------


class EngineSettings(_Group):
    """Which inference engine runs in the stages."""

    name: str = Field(
        default="transformers", min_length=1, description="The engine: a name of `kvbaton plugins`, or `module:object`."
    )
    options: Options = Field(
        default={}, description="The engine's own options; `kvbaton plugins --json` lists them for each engine."
    )


class TransportSettings(_Group):
    """Which transport carries the KV cache."""

    name: str = Field(
        default="auto",
        min_length=1,
        description="The transport: a name of `kvbaton plugins`, `module:object`, or `auto` for the best one that"
        " is usable here.",
    )
    options: Options = Field(
        default={}, description="The transport's own options; `kvbaton plugins --json` lists them for each transport."
    )


class StagesSettings(_Group):
    """How many stages there are and where they run."""

    prefill: Count = Field(default=1, description="Number of prefill stages.")
    decode: Count = Field(default=1, description="Number of decode stages.")
    launch: Literal["auto", "inproc", "process", "remote"] = Field(
        default="auto",
        description="`inproc`: every stage is a thread of this process. `process`: every stage is a process of its"
        " own. `remote`: every stage is started by `kvbaton stage`, on any host, and joins over TCP. `auto`:"
        " `inproc` where the transport reaches only within one process, else `process`.",
    )
    devices: Annotated[tuple[Annotated[int, Field(ge=0)], ...] | None, BeforeValidator(_devices)] = Field(
        default=None,
        description="CUDA device number of each stage, prefill stages first, such as `0,1`. Unset: the KV stays in"
        " host memory.",
    )

    @model_validator(mode="after")
    def _one_device_each(self) -> StagesSettings:
        stages = self.prefill + self.decode
        if self.devices is not None and len(self.devices) != stages:
            raise PydanticCustomError(
                "devices",
                "devices has {given} entries for {stages} stages ({prefill} prefill + {decode} decode): give one each",
                {"given": len(self.devices), "stages": stages, "prefill": self.prefill, "decode": self.decode},
            )
        return self


class TransferSettings(_Group):
    """How the KV of a request is cut into chunks, and how much may be under way."""

    chunk_bytes: Bytes = Field(
        default=ByteSize(64 * MiB),
        description="Largest chunk. Smaller chunks overlap better with the computation, larger ones cost less each.",
    )
    chunk_segments: Count = Field(
        default=65536,
        description="Most contiguous runs of memory in one chunk. The transport's own limit holds as well.",
    )
    inflight_bytes: Bytes = Field(
        default=ByteSize(_GUARD.inflight_bytes),
        description="Bytes that a stage may have handed to its transport and not seen completed.",
    )
    inflight_segments: Count = Field(
        default=_GUARD.inflight_segments,
        description="Segments that a stage may have handed to its transport and not seen completed.",
    )
    unreceipted_chunks: Count = Field(
        default=_GUARD.unreceipted_chunks,
        description="Chunks that one peer has not yet shown to have received; beyond that, this peer waits and"
        " others go on.",
    )

    @model_validator(mode="after")
    def _a_chunk_fits(self) -> TransferSettings:
        for unit in ("bytes", "segments"):
            chunk, budget = getattr(self, f"chunk_{unit}"), getattr(self, f"inflight_{unit}")
            if chunk > budget:
                raise PydanticCustomError(
                    "budget",
                    "chunk_{unit} ({chunk}) is larger than inflight_{unit} ({budget}): no full chunk could ever be"
                    " sent; lower the first or raise the second",
                    {"unit": unit, "chunk": int(chunk), "budget": int(budget)},
                )
        return self


class LimitsSettings(_Group):
    """Bounds on what may pile up."""

    waiting: Count = Field(
        default=_QUEUE.waiting, description="Requests that may wait for admission; one more is refused."
    )
    passes: Annotated[int, Field(ge=0)] = Field(
        default=_QUEUE.passes,
        description="How often smaller requests may be admitted past a waiting larger one (C2.6).",
    )
    retries: Annotated[int, Field(ge=0)] = Field(
        default=_QUEUE.retries,
        description="How often a request whose reservation a stage refused waits again, with its age, before it"
        " fails (C2.6).",
    )
    quarantine_bytes: Bytes = Field(
        default=ByteSize(_GUARD.quarantine_bytes),
        description="Memory of a stage that may be held because nobody can prove it quiet; beyond that the stage"
        " stops (T8).",
    )


class RoutingSettings(_Group):
    """Which pair of stages a request gets."""

    policy: Literal["least-loaded", "prefix-aware"] = Field(
        default="least-loaded",
        description="`least-loaded`: the pair with the least load. `prefix-aware`: among pairs within `imbalance`"
        " the one that holds most of the prompt's beginning: D need not be sent it, P need not compute it. A policy"
        " of your own is a hook, `kvbaton_choose_pair`, and is asked before either.",
    )
    imbalance: Annotated[float, Field(ge=0, le=2)] = Field(
        default=0.5,
        description="`prefix-aware`: by how much the load of the chosen pair may exceed the least there is, as the"
        " share of a stage's capacity, prefill and decode stage added up; 0: only equals are told apart.",
    )
    entries: Count = Field(
        default=65536,
        description="`prefix-aware`: marks of prompts remembered for each stage, the longest unused being forgotten"
        " first. A prompt's first 64 blocks are a mark each, from there on every 16th block is.",
    )


class RecoverySettings(_Group):
    """What becomes of the service when a stage dies or a connection breaks."""

    mode: Literal["off", "requeue", "recompute"] = Field(
        default="requeue",
        description="`off`: requests of a lost stage fail with the cause, and it stays dead. `requeue`: it is"
        " started again, and its requests begin again, except for those of which tokens were delivered. `recompute`:"
        " these, too, from their prompt and the delivered tokens: greedy requests go on as they would have, up to"
        " the numerics of another batch.",
    )
    attempts: Annotated[int, Field(ge=0)] = Field(
        default=_RECOVERY.attempts, description="How often one request may begin again before it fails."
    )
    restarts: Annotated[int, Field(ge=0)] = Field(
        default=_RECOVERY.restarts,
        description="How often in a row a stage is started again that has served nothing in between, before it is"
        " given up; and for a connection between two living stages over which nothing was served in between, before"
        " that is left as it is.",
    )


class DeadlineSettings(_Group):
    """How long each phase may take, in seconds; who watches it and what happens when it passes (C6.7)."""

    connect: Seconds = Field(
        default=10.0,
        description="Connecting two stages. Owner: the stage that connects. Then: the peer is unreachable and"
        " start-up fails.",
    )
    reserve: Seconds = Field(
        default=_PHASES.reserve,
        description="From Reserve to its answer. Owner: the coordinator. Then: the request fails, the decode stage"
        " releases.",
    )
    prefill_start: Seconds = Field(
        default=_PHASES.prefill_start,
        description="From Prefill to the first sign of progress, the stage's own queue included. Owner: the"
        " coordinator. Then: the request fails and is cancelled on both sides.",
    )
    prefill_idle: Seconds = Field(
        default=_PHASES.prefill_idle,
        description="Between two signs of progress of one prefill. Owner: the coordinator. Then: the request fails"
        " and is cancelled on both sides.",
    )
    chunk: Seconds = Field(
        default=30.0,
        description="From submitting a chunk to its completion. Owner: the prefill stage. Then: the request fails;"
        " the chunk's memory is quarantined until its transport or a fence proves it quiet.",
    )
    receipts: Seconds = Field(
        default=_PHASES.receipts,
        description="From Commit to Received. Owner: the decode stage, and `deadline.control` later the"
        " coordinator. Then: the request fails and says which chunks are missing; the decode stage holds its blocks"
        " until no writer is left.",
    )
    drain: Seconds = Field(
        default=_PHASES.drain,
        description="From the end of a request to the return of its last credit. Owner: the coordinator. Then: the"
        " stage that owes it counts as lost, is killed and joined; where a decode stage hangs that the prefill stage"
        " waits for, the former.",
    )
    step: Seconds = Field(
        default=120.0,
        description="One step of an engine, and a stage's silence. Owner: the coordinator, which asks each stage"
        " several times within it how it fares. Then: the stage counts as lost, is killed and joined; of its"
        " requests, see `recovery`.",
    )
    control: Seconds = Field(
        default=_PHASES.control,
        description="One generic control call such as statistics. Owner: the caller. Then: that peer's reply counts"
        " as missing; of a stage that was asked because a drain is overdue it is a sign that it hangs.",
    )
    startup: Seconds = Field(
        default=300.0,
        description="From launching the stages to all of them ready, loading the model included. Owner: the"
        " runtime. Then: everything is stopped again and start-up fails. Also until a stage that is started again"
        " reports: it is then killed, and its start counts as failed; or on another host it is waited for no longer.",
    )
    shutdown: Seconds = Field(
        default=_PHASES.shutdown,
        description="From Stop to a stage's exit. Owner: the runtime. Then: the stage is killed and joined.",
    )


class PumpSettings(_Group):
    """How a stage's progress thread waits when a transport gives it nothing to wait on."""

    idle_min: Seconds = Field(default=50e-6, description="First pause after a pass that found nothing.")
    idle_max: Seconds = Field(
        default=500e-6, description="Longest pause; the pause doubles from `idle_min` up to here."
    )

    @model_validator(mode="after")
    def _ordered(self) -> PumpSettings:
        if self.idle_min > self.idle_max:
            raise PydanticCustomError(
                "pump",
                "idle_min ({least}) is larger than idle_max ({most})",
                {"least": self.idle_min, "most": self.idle_max},
            )
        return self


class ControlSettings(_Group):
    """The channels between the coordinator and the stages."""

    dir: Path | None = Field(
        default=None,
        description="Folder for the sockets, private to you (0700). Unset: a fresh temporary folder, removed at the"
        " end.",
    )
    max_message: Bytes = Field(
        default=ByteSize(MAX_MESSAGE_BYTES),
        description="Largest control message accepted; a larger one is dropped and counted.",
    )
    heartbeat: Seconds = Field(
        default=10.0,
        description="A stage whose process answers no heartbeat for so many seconds (stopped, or its host gone) is"
        " lost, which is noticed up to a quarter later; over TCP also a coordinator.",
    )
    listen: TcpAddress | None = Field(
        default=None,
        description="Where the coordinator listens for stages of other hosts: `tcp://0.0.0.0:5555`, or an address"
        " of this host.",
    )
    connect: TcpAddress | None = Field(
        default=None,
        description="Where `kvbaton stage` finds the coordinator: `tcp://HOST:PORT`. Unset: `listen`, where that"
        " names one host.",
    )
    keys: Path | None = Field(
        default=None,
        description="Folder with the CURVE keys for TCP, made by `kvbaton keys`: the secret key of whoever runs on"
        " this host, and the public keys of those it speaks to.",
    )

    @property
    def coordinator(self) -> str | None:
        """Where a stage of another host finds the coordinator."""
        if self.connect is not None:
            return self.connect
        listen = self.listen
        return None if listen is None or listen.split("//")[1].startswith(("*", "0.0.0.0", "[::]")) else listen

    @model_validator(mode="after")
    def _tcp_with_keys(self) -> ControlSettings:
        given = "listen" if self.listen is not None else "connect" if self.connect is not None else None
        if given is not None and self.keys is None:
            raise PydanticCustomError(
                "keys",
                "{given} without keys: whoever reaches a control port can end the run, so that TCP is opened with keys"
                " only; make them with: kvbaton keys DIR, and set control.keys = DIR",
                {"given": given},
            )
        return self


class MetricsSettings(_Group):
    """Where Prometheus finds the metrics; needs `pip install 'kvbaton[metrics]'`."""

    listen: ListenAddress | None = Field(
        default=None,
        description="Where the application serves `/metrics`: `127.0.0.1:9400`, or a port alone, which is then this"
        " host's own (loopback); port 0 is any that is free. Another host's name or `0.0.0.0` shows the metrics to"
        " whoever reaches it. Unset: nowhere.",
    )


class TraceSettings(_Group):
    """Where a run can be looked at afterwards."""

    path: Path | None = Field(
        default=None,
        description="File that a trace of everything is written to when the runtime closes, for ui.perfetto.dev and"
        " for `kvbaton report`. Unset: nothing is noted.",
    )
    events: Count = Field(
        default=200_000,
        description="Events that are kept of each stage, the newest; about 150 bytes each. What was pushed out is"
        " told.",
    )
    otel: bool = Field(
        default=False,
        description="Whether each request becomes an OpenTelemetry span, with its phases as children. Where they go"
        " is OpenTelemetry's own affair: `OTEL_TRACES_EXPORTER` and its kind. Needs `pip install 'kvbaton[otel]'`.",
    )


class ServeSettings(_Group):
    """The HTTP front, `kvbaton serve`."""

    listen: ListenAddress = Field(
        default="127.0.0.1:8000",
        description="Where it listens: `HOST:PORT`. Port 0: one that is free. Beyond this host, set `api_key_file`,"
        " and put a proxy with TLS before it.",
    )
    model_name: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="What clients call the model. Unset: as `model` has it."
    )
    api_key_file: Path | None = Field(
        default=None,
        description="File with the API keys that open `/v1`, one per line. Unset: whoever reaches the port may use it.",
    )
    max_tokens: Count = Field(
        default=256,
        description="Most tokens of a chat answer where the request names no limit; less where the prompt leaves"
        " less room.",
    )
    requests: Count = Field(
        default=256, description="Requests under way at once, waiting ones included; one more is answered 429."
    )
    connections: Count = Field(
        default=1024, description="Connections open at once, idle ones included; a request on one more is answered 503."
    )
    max_body: Bytes = Field(
        default=ByteSize(4 * MiB), description="Largest request body; a larger one is answered 413."
    )
    read_timeout: Seconds = Field(
        default=30.0, description="From a request's headers to the end of its body. Then: it is answered 408."
    )
    timeout: Seconds = Field(
        default=600.0,
        description="From a request to the end of its answer. Then: it is cancelled, and answered 504 or cut off.",
    )
    drain: Seconds = Field(
        default=30.0,
        description="At shutdown, how long requests under way may take to end by themselves. Then: they are cancelled.",
    )


class LogSettings(_Group):
    """What is logged, and how the command line writes it (to stderr)."""

    level: Literal["debug", "info", "warning", "error"] | None = Field(
        default=None,
        description="From which level on kvbaton logs, here and in the stages; `debug` has a line for each"
        " milestone of each request. Unset: warnings, or what the application has chosen for its loggers.",
    )
    format: Literal["text", "json"] = Field(
        default="text",
        description="`json`: one object a line, with the ids (`request`, `transfer`, `stage`) as fields of their own.",
    )


class Settings(_Group):
    """Everything that a deployment can be told.  Made by :func:`load`."""

    model: str = Field(
        min_length=1,
        description="The model: a checkpoint folder or file, or a name that the engine knows, such as `smollm2`.",
    )
    engine: EngineSettings = Field(default=EngineSettings(), description="Which inference engine runs in the stages.")
    transport: TransportSettings = Field(
        default=TransportSettings(), description="Which transport carries the KV cache."
    )
    stages: StagesSettings = Field(
        default=StagesSettings(), description="How many stages there are and where they run."
    )
    transfer: TransferSettings = Field(
        default=TransferSettings(),
        description="How the KV of a request is cut into chunks, and how much may be under way.",
    )
    limits: LimitsSettings = Field(default=LimitsSettings(), description="Bounds on what may pile up.")
    deadline: DeadlineSettings = Field(
        default=DeadlineSettings(), description="How long each phase may take, in seconds."
    )
    routing: RoutingSettings = Field(default=RoutingSettings(), description="Which pair of stages a request gets.")
    recovery: RecoverySettings = Field(
        default=RecoverySettings(), description="What becomes of the service when a stage dies."
    )
    pump: PumpSettings = Field(default=PumpSettings(), description="How a stage's progress thread waits.")
    control: ControlSettings = Field(
        default=ControlSettings(), description="The channels between the coordinator and the stages."
    )
    metrics: MetricsSettings = Field(default=MetricsSettings(), description="Where Prometheus finds the metrics.")
    trace: TraceSettings = Field(default=TraceSettings(), description="Where a run can be looked at afterwards.")
    serve: ServeSettings = Field(default=ServeSettings(), description="The HTTP front, `kvbaton serve`.")
    log: LogSettings = Field(default=LogSettings(), description="What is logged, and how the command line writes it.")

    @model_validator(mode="after")
    def _hosts(self) -> Settings:
        remote = self.stages.launch == "remote"
        if self.control.listen is not None and not remote:
            raise PydanticCustomError(
                "hosts",
                'control.listen is for stages.launch = "remote", not "{launch}": set the one or unset the other',
                {"launch": self.stages.launch},
            )
        if remote and self.control.listen is None and self.control.connect is None:
            raise PydanticCustomError(
                "hosts",
                'stages.launch = "remote" needs control.listen where the coordinator runs, control.connect where a'
                " stage runs, and control.keys on both",
            )
        if remote and self.transport.name == "auto":
            raise PydanticCustomError(
                "hosts",
                'stages.launch = "remote" needs transport.name: each host would choose for itself, and they may differ',
            )
        return self


# -- where a value came from -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Origin:
    """Where one effective value came from; ``where`` is a file with its line, a variable's name, or a flag."""

    kind: Literal["default", "file", "environment", "command line"]
    where: str = ""

    def __str__(self) -> str:
        return self.where or self.kind


#: Dotted key of each effective value, in the order of the model, to its origin.
Provenance = Mapping[str, Origin]

_DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class _Given:
    value: object
    origin: Origin


def load(
    config: Path | str | None = None,
    overrides: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> tuple[Settings, Provenance]:
    """The effective settings and where each came from: ``defaults`` < ``config`` < ``env`` < ``overrides``.

    ``config`` is a TOML file, or JSON where its name ends in ``.json``.  ``overrides`` (the command line's) and
    ``defaults`` (an application's own) are nested mappings or have dotted keys such as ``"transport.options.seed"``.
    ``env`` is usually ``os.environ``; only names that begin with ``KVBATON_`` are looked at.  Unless it is given, no
    variable counts: what a library call does must not depend on where it runs, unless its caller says so, as the
    command line does.  ``flags`` names the
    command line flag behind a dotted key, for messages.

    Plugin options are merged key by key, except where a higher layer names another plugin than a lower one: the lower
    layer's options were meant for that one and are dropped.

    Raises :class:`~kvbaton.errors.SettingsError`, which names the file with its line, the variable or the flag, and
    says what to do.  Facts: ``key``, ``origin``.
    """
    layers: list[dict[tuple[str, ...], _Given]] = [
        {key: _Given(value, _DEFAULT) for key, value in _leaves(_nested(defaults or {}, {}))},
        _from_file(Path(config)) if config is not None else {},
        _from_environment(env or {}),
        _from_overrides(overrides or {}, flags or {}),
    ]
    given: dict[tuple[str, ...], _Given] = {}
    for layer in layers:
        _drop_foreign_options(given, layer)
        # a value replaces what lies above and below it: options = {} clears, a table replaces a scalar
        for key in layer:
            for other in [k for k in given if k[: len(key)] == key or key[: len(k)] == k]:
                del given[other]
        given.update(layer)
    tree: dict[str, Any] = {}
    for key, item in given.items():
        _put(tree, key, item.value)
    try:
        settings = Settings.model_validate(tree)
    except ValidationError as error:
        raise _explained(error, given) from error
    provenance = {}
    for key, _ in _leaves(settings.model_dump()):
        found = next((given[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in given), None)
        provenance[".".join(key)] = found.origin if found else _DEFAULT
    return settings, provenance


def describe(key: str) -> str:
    """The description of the setting with this dotted key; empty for a plugin's own options."""
    model: type[BaseModel] = Settings
    description = ""
    for part in key.split("."):
        field = model.model_fields.get(part)
        if field is None:
            return ""
        description = " ".join((field.description or "").split())
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    return description


# -- the three sources -------------------------------------------------------------------------------------------------


def _from_file(path: Path) -> dict[tuple[str, ...], _Given]:
    kind = "JSON" if path.suffix == ".json" else "TOML"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(
            f"cannot read the configuration file {path}: {reason}. Give --config a readable {kind} file.",
            key="", origin=Origin("file", str(path)),
        ) from error  # fmt: skip
    try:
        tree = json.loads(text) if kind == "JSON" else tomllib.loads(text)
    except ValueError as error:
        named = re.search(r"line (\d+)", str(error))
        at = f":{named[1]}" if named else ""
        raise SettingsError(
            f"{path}{at} is not valid {kind}: {error}{_unquoted(text, named) if kind == 'TOML' else ''}",
            key="",
            origin=Origin("file", f"{path}{at}"),
        ) from error
    if not isinstance(tree, dict):
        raise SettingsError(
            f"{path} must hold a table of settings, not a {type(tree).__name__}",
            key="", origin=Origin("file", str(path)),
        )  # fmt: skip
    lines = _toml_lines(text) if kind == "TOML" else {}
    result = {}
    for key, value in _leaves(tree):
        if key[0] not in Settings.model_fields:  # its header is what is wrong, and not what is first below it
            line = min((number for known, number in lines.items() if known[0] == key[0]), default=None)
            raise _unknown(key[:1], Origin("file", f"{path}:{line}" if line else str(path)))
        line = next((lines[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in lines), None)
        result[key] = _Given(value, Origin("file", f"{path}:{line}" if line else str(path)))
    return result


def _unquoted(text: str, named: re.Match[str] | None) -> str:
    """What to write on that line of TOML, where it gives a key text without quotes."""
    lines = text.splitlines()
    number = int(named[1]) if named else 0
    found = _BARE.match(lines[number - 1]) if 0 < number <= len(lines) else None
    return f'. Text is written in quotes: {found[1]} = "{found[2]}"' if found else ""


_HEADER = re.compile(r"^\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = r"""(?:[A-Za-z0-9_-]+|"[^"]*"|'[^']*')"""
_BARE = re.compile(rf"""^\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=\s*([^\s"'\[{{#][^"'#]*?)\s*(?:#.*)?$""")
_ASSIGNED = re.compile(rf"^\s*({_KEY}(?:\s*\.\s*{_KEY})*)\s*=")


def _toml_lines(text: str) -> dict[tuple[str, ...], int]:
    """Key to the line that assigns it.  tomllib keeps none; a key that this misses is reported without its line."""
    lines: dict[tuple[str, ...], int] = {}
    table: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if header := _HEADER.match(line):
            table = _dotted(header[1])
            lines.setdefault(table, number)
        elif assigned := _ASSIGNED.match(line):
            lines.setdefault(table + _dotted(assigned[1]), number)
    return lines


def _dotted(name: str) -> tuple[str, ...]:
    return tuple(part.strip().strip("\"'") for part in name.split("."))


def _from_environment(env: Mapping[str, str]) -> dict[tuple[str, ...], _Given]:
    names = {name.lower(): name for name in env if name.upper().startswith(ENVIRONMENT_PREFIX)}
    if not names:
        return {}
    for lower, name in names.items():  # the source would pass over what is no field at all
        first = lower.removeprefix(ENVIRONMENT_PREFIX.lower()).split(_LEVEL)[0]
        if first not in Settings.model_fields:
            raise _one_underscore(first, name) or _unknown((first,), Origin("environment", name))
    # A stage's process reads no variables, and would pay for the import at each start.
    from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict
    from pydantic_settings import SettingsError as ForeignSettingsError

    class Environment(BaseSettings, Settings):
        """What pydantic-settings needs to know in order to read variables; never instantiated."""

        model_config = SettingsConfigDict(env_prefix=ENVIRONMENT_PREFIX, env_nested_delimiter=_LEVEL)

    source = EnvSettingsSource(Environment)
    source.env_vars = {lower: env[name] for lower, name in names.items()}
    try:
        tree = source()
    except ForeignSettingsError as error:
        field = re.search(r'field "(\w+)"', str(error))
        name = next((n for n in names.values() if field and field[1] in n.lower().split(_LEVEL)[-1]), "")
        where = name or ENVIRONMENT_PREFIX + "..."
        raise SettingsError(
            f"{where}: {env.get(name, '')!r} is not JSON, which a table or list needs here. Set single values instead,"
            f" such as {ENVIRONMENT_PREFIX}TRANSFER__CHUNK_BYTES=64MiB.",
            key=field[1] if field else "", origin=Origin("environment", where),
        ) from error  # fmt: skip
    result = {}
    for key, value in _leaves(tree):
        # the variable may hold a whole table as JSON: the longest name that leads to the key
        name = next(
            names[variable]
            for depth in range(len(key), 0, -1)
            if (variable := ENVIRONMENT_PREFIX.lower() + _LEVEL.join(key[:depth]).lower()) in names
        )
        result[key] = _Given(value, Origin("environment", name))
    return result


def _from_overrides(overrides: Mapping[str, object], flags: Mapping[str, str]) -> dict[tuple[str, ...], _Given]:
    result = {}
    for key, value in _leaves(_nested(overrides, flags)):
        name = next((flags[k] for d in range(len(key), 0, -1) if (k := ".".join(key[:d])) in flags), "")
        result[key] = _Given(value, Origin("command line", name))
    return result


def _drop_foreign_options(given: dict[tuple[str, ...], _Given], layer: Mapping[tuple[str, ...], _Given]) -> None:
    for group in ("engine", "transport"):
        new, old = layer.get((group, "name")), given.get((group, "name"))
        if new is not None and old is not None and new.value != old.value:
            for key in [k for k in given if k[:2] == (group, "options")]:
                del given[key]


# -- trees -------------------------------------------------------------------------------------------------------------


def _nested(mapping: Mapping[str, object], flags: Mapping[str, str]) -> dict[str, Any]:
    """``mapping`` with its dotted keys taken apart."""
    tree: dict[str, Any] = {}
    for key, value in mapping.items():
        path = tuple(key.split("."))
        if not all(path):
            where = Origin("command line", flags.get(key, ""))
            raise SettingsError(
                f'{where}: "{key}" is not a dotted key such as transfer.chunk_bytes', key=key, origin=where
            )
        _put(tree, path, _nested(value, {}) if isinstance(value, Mapping) else value)
    return tree


def _put(tree: dict[str, Any], path: tuple[str, ...], value: object) -> None:
    for part in path[:-1]:
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = tree[part] = {}
        tree = inner
    if isinstance(value, dict) and isinstance(tree.get(path[-1]), dict):
        for key, inner_value in value.items():
            _put(tree[path[-1]], (key,), inner_value)
    else:
        tree[path[-1]] = value


def _leaves(tree: Mapping[str, object], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Every value with its path; an empty mapping is a value too."""
    for name, value in tree.items():
        path = (*prefix, str(name))
        if isinstance(value, Mapping) and value:
            yield from _leaves(cast("Mapping[str, object]", value), path)
        else:
            yield path, value


# -- what went wrong ---------------------------------------------------------------------------------------------------


def _explained(error: ValidationError, given: Mapping[tuple[str, ...], _Given]) -> SettingsError:
    """The first fault, in the operator's words; unknown keys come first because they often cause the others."""
    faults = sorted(error.errors(), key=lambda fault: fault["type"] != "extra_forbidden")
    fault = faults[0]
    key = tuple(str(part) for part in fault["loc"] if not isinstance(part, int))
    key = tuple(part for part in key if not part.startswith("tuple["))  # pydantic names the branch of a union there
    origin = _origin_of(key, given)
    if fault["type"] == "extra_forbidden":
        return _unknown(key, origin)
    if fault["type"] == "missing":
        return SettingsError(
            f"{key[-1]} is not set. Give --{key[-1]}, set {ENVIRONMENT_PREFIX}{_LEVEL.join(key).upper()}, or write"
            f" `{key[-1]} = ...` in a configuration file.",
            key=".".join(key), origin=origin,
        )  # fmt: skip
    more = f" ({len(faults) - 1} more)" if len(faults) > 1 else ""
    value = given[key].value if key in given else fault["input"]
    shown = "" if isinstance(value, (BaseModel, Mapping)) else f" = {_shown(value)}"
    if not key:  # of settings that contradict each other, and that may come from anywhere
        return SettingsError(f"{reason_of(fault)}{more}", key="", origin=None)
    reason = _meant_name(key, value) or reason_of(fault)
    message = f"{_place(origin)}{'.'.join(key)}{shown}: {reason}{more}"
    return SettingsError(message, key=".".join(key), origin=origin)


def _meant_name(key: tuple[str, ...], value: object) -> str:
    """Of ``transport=nixl``, which means the ``name`` in that section; empty for what else is wrong."""
    section = Settings.model_fields.get(key[0]) if len(key) == 1 else None
    inside = section.annotation if section else None
    if not (isinstance(inside, type) and issubclass(inside, BaseModel) and "name" in inside.model_fields):
        return ""
    if not (isinstance(value, str) and re.fullmatch(r"[\w.:-]+", value)):
        return ""
    return f"is a table of settings, not a single value; did you mean {key[0]}.name={value}?"


def _origin_of(key: tuple[str, ...], given: Mapping[tuple[str, ...], _Given]) -> Origin:
    for depth in range(len(key), 0, -1):  # the value itself, or the table that holds it
        if key[:depth] in given:
            return given[key[:depth]].origin
    below = [item.origin for path, item in given.items() if path[: len(key)] == key]
    return below[-1] if below else _DEFAULT


def _one_underscore(first: str, variable: str) -> SettingsError | None:
    """Of a variable that names a setting, with one underscore where two stand between a section and a name."""
    for section, field in Settings.model_fields.items():
        name = first.removeprefix(f"{section}_")
        inside = field.annotation
        if name != first and isinstance(inside, type) and issubclass(inside, BaseModel) and name in inside.model_fields:
            meant = f"{ENVIRONMENT_PREFIX}{section}{_LEVEL}{name}".upper()
            return SettingsError(
                f'{variable}: no setting "{first}". Did you mean {meant}? Two underscores stand between the names.',
                key=first, origin=Origin("environment", variable),
            )  # fmt: skip
    return None


def _unknown(key: tuple[str, ...], origin: Origin) -> SettingsError:
    model: type[BaseModel] = Settings
    for part in key[:-1]:
        field = model.model_fields.get(part)
        if field is not None and isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            model = field.annotation
    parent = ".".join(key[:-1])
    names = sorted(model.model_fields)
    group = f" of {parent}" if parent else ""
    return SettingsError(
        f'{_place(origin)}no setting "{".".join(key)}".{closest(key[-1], names)} Settings{group}: {", ".join(names)}.',
        key=".".join(key), origin=origin,
    )  # fmt: skip


def _place(origin: Origin) -> str:
    return f"{origin.where}: " if origin.where else ""


def _shown(value: object) -> str:
    return json.dumps(value) if isinstance(value, (str, int, float, bool, list)) else str(value)


def reason_of(fault: ErrorDetails) -> str:
    """What is wrong with a value, in the operator's words."""
    context = fault.get("ctx", {})
    match fault["type"]:
        case "int_parsing" | "int_type" | "int_from_float":
            return "must be a whole number"
        case "float_parsing" if re.fullmatch(r"\s*[\d.]+\s*[a-z]+\s*", str(fault["input"]), re.IGNORECASE):
            return "must be a number, without a unit"
        case "float_parsing" | "float_type":
            return "must be a number"
        case "finite_number":
            return f"must be a finite number{_without_deadline(fault)}"
        case "greater_than_equal":
            return f"must be at least {context['ge']:g}"
        case "greater_than":
            return f"must be greater than {context['gt']:g}{_without_deadline(fault)}"
        case "literal_error":
            return f"must be one of {context['expected']}.{_closest_literal(fault)}"
        case "string_too_short":
            return "must not be empty"
        case "string_type":
            return "must be text"
        case "model_type" | "model_attributes_type" | "dict_type":
            name = next((part for part in reversed(fault["loc"]) if isinstance(part, str)), "name")
            return f"is a table of settings, not a single value; give them one by one: {name}.NAME=VALUE"
    return str(fault["msg"]).removeprefix("Value error, ")


def _without_deadline(fault: ErrorDetails) -> str:
    """For whoever writes 0 or inf where seconds are to be written, and means that it may take any time."""
    return ", and no deadline can be switched off: 86400 is a day" if fault["loc"][:1] == ("deadline",) else ""


def _closest_literal(fault: ErrorDetails) -> str:
    expected = re.findall(r"'([^']*)'", fault.get("ctx", {}).get("expected", ""))
    return closest(str(fault["input"]), expected)
