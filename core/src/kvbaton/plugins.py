"""Choosing one connector or one engine, and saying plainly why not.

A plugin is named by its entry point (groups ``kvbaton.connectors`` and ``kvbaton.engines``), by ``module:object``, or
given as an instance.  stevedore loads the one driver; what is installed is asked of ``importlib.metadata`` each time,
because stevedore's own listing is cached on disk, serves stale names after a reinstall and lost the distribution.

Every refusal is a :class:`~kvbaton.errors.PluginError` that names the plugin, the distribution it came from and what
to do.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, Literal, cast

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from stevedore.driver import DriverManager

from kvbaton import cuda
from kvbaton.answering import PATIENCE, Apart, Gone, NoAnswer, of_thread
from kvbaton.connector import API_VERSION, Availability, Capabilities, ConnectorPlugin, Need, Reach
from kvbaton.engine import ENGINE_API_VERSION, EnginePlugin
from kvbaton.errors import (
    EngineNotFound,
    OptionsError,
    PluginBroken,
    PluginConflict,
    PluginError,
    PluginNotFound,
    PluginUnavailable,
    TransportNotFound,
    closest,
)
from kvbaton.hooks import GROUP as HOOKS_GROUP
from kvbaton.hooks import Hooks
from kvbaton.settings import EngineSettings, Settings, TransportSettings, reason_of

CONNECTORS: Final = "kvbaton.connectors"
ENGINES: Final = "kvbaton.engines"
AUTO: Final = "auto"

#: First-party names and the distributions that bring them.
FIRST_PARTY: Final[Mapping[str, Mapping[str, str]]] = {
    CONNECTORS: {
        # in the order in which they were measured: a device's own memory, then what reaches everything, then what
        # makes up for it where it cannot be used
        "loopback": "kvbaton-loopback",
        "cuda_ipc": "kvbaton-cuda-ipc",
        "nixl": "kvbaton-nixl",
        "ucx": "kvbaton-cuda-ipc",
    },
    ENGINES: {"transformers": "kvbaton-transformers"},
}

_WORD = {CONNECTORS: "transport", ENGINES: "engine"}
_SETTING = {CONNECTORS: "transport", ENGINES: "engine"}
_MEMBERS = {CONNECTORS: ("probe", "open"), ENGINES: ("check", "tokenizer", "open")}
_VERSION = {CONNECTORS: API_VERSION, ENGINES: ENGINE_API_VERSION}

#: What other engines call their options, and what they are called here: by spelling alone, the nearest is another one.
_ELSEWHERE: Final[Mapping[str, Sequence[str]]] = {
    "block_size": ("block_tokens",),
    "page_size": ("block_tokens",),
    "num_blocks": ("blocks",),
    "num_gpu_blocks": ("blocks",),
    "max_num_seqs": ("max_running",),
    "max_num_batched_tokens": ("max_batch_tokens",),
    "chunked_prefill_size": ("prefill_chunk",),
    "enable_prefix_caching": ("prefix_caching",),
}

#: What brought an entry point that belongs to no distribution.
_UNKNOWN: Final = "an unknown distribution"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Placement:
    """A transport that was chosen together with how the stages are launched."""

    plugin: ConnectorPlugin
    need: Need
    launch: Literal["inproc", "process", "remote"]


@dataclass(frozen=True, slots=True)
class Remedies:
    """What to do about a transport that does not fit, in words that whoever asked can follow: commands have flags."""

    #: Where it does not move memory of devices, and where it moves no other.
    host: str = "use host memory (no stages.devices) or choose another transport"
    cuda: str = "set stages.devices or choose another transport"
    #: Where it works within one process only, and what asks for more.
    within: str = 'set stages.launch = "inproc" or choose another transport'
    process: str = 'stages.launch = "process" puts each stage in a process of its own'


OF_SETTINGS: Final = Remedies()


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One line of ``kvbaton plugins``."""

    kind: Literal["connector", "engine", "hooks"]
    name: str
    distribution: str
    version: str
    available: bool
    reason: str = ""
    remedy: str = ""
    capabilities: Capabilities | None = None
    #: Option name to its JSON schema (type, default, description).
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class _Loaded:
    plugin: Any
    name: str
    #: ``kvbaton-loopback 0.1.0``; empty for an instance.
    source: str
    #: In what is :data:`_mute`.
    key: object = None

    def __str__(self) -> str:
        return f"{self.name} ({self.source})" if self.source else self.name


# -- choosing ----------------------------------------------------------------------------------------------------------


def choose_connector(
    transport: TransportSettings | ConnectorPlugin | str,
    need: Need,
    options: object = None,
    remedies: Remedies = OF_SETTINGS,
) -> tuple[ConnectorPlugin, Any]:
    """The one connector that is asked for, usable here for ``need``, and a valid instance of its ``Options``.

    ``options`` is for callers without settings: a mapping, or an instance of ``Options``.  ``"auto"`` takes the best
    usable one and logs each candidate with its reason.  ``remedies``: for callers whose users have no settings.

    Raises :class:`~kvbaton.errors.TransportNotFound`, :class:`~kvbaton.errors.PluginConflict`,
    :class:`~kvbaton.errors.PluginBroken`, :class:`~kvbaton.errors.OptionsError` or
    :class:`~kvbaton.errors.PluginUnavailable`.  Nothing is opened.
    """
    named: object = transport
    if isinstance(transport, TransportSettings):
        named, options = transport.name, transport.options
    if named == AUTO:
        if options:
            raise OptionsError(
                f"transport.options are given ({', '.join(_keys(options))}) but transport.name is auto: name the"
                " transport that they are for",
                name=AUTO, option=None,
            )  # fmt: skip
        loaded = _best(need, remedies)
    else:
        loaded = _resolve(CONNECTORS, named)
    # options first: a misspelt one is found even where the transport cannot be used
    valid = _validated(CONNECTORS, loaded, options)
    if named != AUTO:
        refusal = _refusal(loaded, need, remedies)
        if refusal is not None:
            raise refusal
    return loaded.plugin, valid


def choose_engine(engine: EngineSettings | EnginePlugin | str, options: object = None) -> tuple[EnginePlugin, Any]:
    """The engine that is asked for and a valid instance of its ``Options``.  Nothing is opened, no framework imported.

    Raises :class:`~kvbaton.errors.EngineNotFound` and the others of :func:`choose_connector`.
    """
    named: object = engine
    if isinstance(engine, EngineSettings):
        named, options = engine.name, engine.options
    loaded = _resolve(ENGINES, named)
    return loaded.plugin, _validated(ENGINES, loaded, options)


#: What the transport must reach where stages are launched so.
REACHES: Final[Mapping[str, Reach]] = {"inproc": "same_process", "process": "cross_process", "remote": "cross_host"}


def choose_placement(
    settings: Settings, connector: ConnectorPlugin | None = None, remedies: Remedies = OF_SETTINGS
) -> Placement:
    """Transport and launch together, because ``stages.launch = "auto"`` depends on what the transport reaches.

    ``connector`` is an instance that takes the place of ``transport.name``.  ``auto`` prefers a process per stage, and
    takes threads of this process where the transport reaches no further.  Raises as :func:`choose_connector` does.
    """
    kind: Literal["host", "cuda"] = "host" if settings.stages.devices is None else "cuda"
    launches: Sequence[Literal["inproc", "process", "remote"]]
    launches = ("process", "inproc") if settings.stages.launch == "auto" else (settings.stages.launch,)
    refusals: list[PluginUnavailable] = []
    for launch in launches:
        need = Need(kind, REACHES[launch])
        try:
            if connector is None:
                plugin, _ = choose_connector(settings.transport, need, remedies=remedies)
            else:
                plugin, _ = choose_connector(connector, need, settings.transport.options, remedies)
        except PluginUnavailable as error:
            refusals.append(error)
            continue
        return Placement(plugin, need, launch)
    # under "auto" nobody has asked for a launch: that it cannot be that one is no cause, what else is wrong is
    raise next((refusal for refusal in refusals if refusal.capability not in REACHES.values()), refusals[-1])


def options_of(settings: Settings, group: Literal["engine", "transport"]) -> BaseModel | None:
    """The options of the engine or transport that ``settings`` name, defaults filled in; None for ``auto``.

    Nothing is probed or opened.  Raises as :func:`choose_engine` does.
    """
    chosen = settings.engine if group == "engine" else settings.transport
    if group == "transport" and chosen.name == AUTO:
        return None
    kind = ENGINES if group == "engine" else CONNECTORS
    valid: BaseModel = _validated(kind, _resolve(kind, chosen.name), chosen.options)
    return valid


def list_plugins(name: str | None = None) -> list[PluginRow]:
    """Every installed connector, engine and observer, or those called ``name``.  One that is broken is a row that says
    so, never an error.

    A process of its own imports and asks each before this one does: one that hangs there, or dies of it, is a row that
    says so, the former after 60 s, and is refused from then on.
    """
    rows: list[PluginRow] = []
    kinds: tuple[tuple[Literal["connector", "engine", "hooks"], str], ...]
    kinds = (("connector", CONNECTORS), ("engine", ENGINES), ("hooks", HOOKS_GROUP))
    installed = [
        (kind, group, sorted(_called(name, group), key=lambda entry: (entry.name, _source(entry))))
        for kind, group in kinds
    ]
    _ask_apart([entry for _, _, entries in installed for entry in entries])
    for kind, group, entries in installed:
        for entry in entries:
            dist = entry.dist
            source, version = (dist.name, dist.version) if dist else ("unknown", "")
            try:
                state = _state(group, entry, [e for e in entries if e.name == entry.name])
            except PluginUnavailable as error:
                state = _State(False, error.reason, error.remedy)
            except (Exception, SystemExit) as error:
                state = _State(False, str(error))
            rows.append(PluginRow(kind, entry.name, source, version, *state.astuple()))
    return rows


def _called(name: str | None, group: str) -> list[EntryPoint]:
    return [entry for entry in entry_points(group=group) if name is None or entry.name == name]


def each_plugin(broken: Callable[[PluginError], object]) -> Iterator[tuple[str, Any]]:
    """Name and plugin of every installed connector and engine; ``broken`` hears why one cannot be loaded."""
    for group in (CONNECTORS, ENGINES):
        for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
            try:
                plugin = _load(group, entry).plugin
            except PluginError as error:
                broken(error)
            else:
                yield entry.name, plugin


# -- finding and loading -----------------------------------------------------------------------------------------------


class _Driver(DriverManager[Any]):
    """stevedore's driver over a fresh listing, quiet, and raising what the import raised."""

    def list_entry_points(self) -> list[EntryPoint]:
        return list(entry_points(group=self.namespace))


def _resolve(group: str, named: object) -> _Loaded:
    if not isinstance(named, str):
        name = getattr(named, "name", type(named).__name__)
        return _checked(group, _Loaded(named, str(name), "", id(named)))
    if ":" in named:
        return _by_path(group, named)
    found = [entry for entry in entry_points(group=group) if entry.name == named]
    if not found:
        raise _not_found(group, named)
    _one_claim(group, named, found)
    return _load(group, found[0])


def _one_claim(group: str, name: str, found: Sequence[EntryPoint]) -> None:
    sources = sorted({_source(entry) for entry in found})
    if len(sources) > 1 or len({entry.value for entry in found}) > 1:
        values = ", ".join(sorted(f"{entry.value} ({_source(entry)})" for entry in found))
        raise PluginConflict(
            f'{_WORD[group]} "{name}" is claimed more than once: {values}. Uninstall all but one, or name the one you'
            f' mean as module:object, such as {_SETTING[group]}.name = "{found[0].value}".',
            name=name, distributions=tuple(sources),
        )  # fmt: skip


def _load(group: str, entry: EntryPoint) -> _Loaded:
    source = _source(entry)
    key = (group, entry.value)
    if key in _mute:
        raise _mute[key].refusal(f'{_WORD[group]} "{entry.name}" of {source}', entry.name)
    try:
        driver = _Driver(group, entry.name, on_missing_entrypoints_callback=None)
        plugin = driver.driver
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f'{_WORD[group]} "{entry.name}" of {source} cannot be imported ({entry.value}):'
            f" {type(error).__name__}: {error}. Reinstall or upgrade {source.split()[0]}.",
            name=entry.name, distribution=source,
        ) from error  # fmt: skip
    return _checked(group, _Loaded(plugin, entry.name, source, key))


def _by_path(group: str, path: str) -> _Loaded:
    try:
        plugin = EntryPoint(path, path, group).load()
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f'{_WORD[group]} "{path}" cannot be imported: {type(error).__name__}: {error}. It must be module:object,'
            " with the module importable here.",
            name=path, distribution=None,
        ) from error  # fmt: skip
    return _checked(group, _Loaded(plugin, path, "", (group, path)))


def _checked(group: str, loaded: _Loaded) -> _Loaded:
    """The plugin interface, as far as attributes show it."""
    plugin, word = loaded.plugin, _WORD[group]
    facts = {"name": loaded.name, "distribution": loaded.source or None}
    if isinstance(plugin, type):
        raise PluginBroken(f"{word} {loaded} is a class, {plugin.__name__}: name an instance of it", **facts)
    missing = [member for member in ("name", "api_version", "Options") if not hasattr(plugin, member)]
    missing += [member for member in _MEMBERS[group] if not callable(getattr(plugin, member, None))]
    if missing:
        raise PluginBroken(
            f"{word} {loaded} is no {word} plugin: {type(plugin).__name__} has no {', '.join(missing)}", **facts
        )
    if plugin.api_version != _VERSION[group]:
        raise PluginBroken(
            f"{word} {loaded} was made for version {plugin.api_version!r} of the {word} interface, and this kvbaton has"
            f" version {_VERSION[group]}: install versions that were made for each other",
            **facts,
        )
    if not (isinstance(plugin.Options, type) and issubclass(plugin.Options, BaseModel)):
        raise PluginBroken(f"{word} {loaded} is no {word} plugin: its Options is not a pydantic model", **facts)
    return loaded


def _source(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else _UNKNOWN


def _not_found(group: str, name: str) -> PluginNotFound:
    entries = sorted(entry_points(group=group), key=lambda entry: entry.name)
    installed = [f"{entry.name} ({_source(entry)})" for entry in entries]
    names = {entry.name for entry in entries}
    first_party = FIRST_PARTY[group]
    word = _WORD[group]
    known = names | set(first_party) | ({AUTO} if group == CONNECTORS else set())
    # one distribution may bring several
    absent = dict.fromkeys(f"pip install {dist}" for first, dist in first_party.items() if first not in names)
    if name in first_party:
        advice = f" Install it: pip install {first_party[name]}"
    else:
        nearest = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.0)
        advice = closest(name, known) or (f' The closest is "{nearest[0]}".' if nearest else "")
        advice += f" First-party {word}s: {', '.join(absent)}" if absent else ""
    kind = TransportNotFound if group == CONNECTORS else EngineNotFound
    return kind(
        f'no {word} "{name}". Installed: {", ".join(installed) or "none"}.{advice}',
        name=name,
        installed=tuple(sorted(names)),
    )


# -- options -----------------------------------------------------------------------------------------------------------


def _keys(options: object) -> list[str]:
    return sorted(map(str, options)) if isinstance(options, Mapping) else [type(options).__name__]


def _parsed(field: FieldInfo | None, value: object) -> object:
    """A list or table that came as text, from a variable or a flag; the model itself turns text into numbers."""
    if isinstance(value, str) and value[:1] in ("[", "{") and field is not None and field.annotation is not str:
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


def _meant(key: str, known: Iterable[str]) -> str:
    """`` Did you mean "x"?``: what other engines call so, or else the name that looks most alike."""
    known = sorted(known)
    for name in _ELSEWHERE.get(key, ()):
        if name in known:
            return f' Did you mean "{name}"?'
    return closest(key, known)


def _validated(group: str, loaded: _Loaded, options: object) -> Any:
    model: type[BaseModel] = loaded.plugin.Options
    word, setting = _WORD[group], _SETTING[group]
    if isinstance(options, model):
        return options
    if options is None:
        options = {}
    if not isinstance(options, Mapping):
        raise OptionsError(
            f"{word} {loaded}: options must be a table or a {model.__name__}, not a {type(options).__name__}",
            name=loaded.name, option=None,
        )  # fmt: skip
    fields = model.model_fields
    known = set(fields) | {field.alias for field in fields.values() if field.alias}
    if model.model_config.get("extra") != "allow":
        # also where the plugin's model forgot extra="forbid": an option nobody reads is a mistake
        for key in options:
            if key not in known:
                raise OptionsError(
                    f'{word} {loaded} has no option "{key}".{_meant(str(key), known)}'
                    f" Options: {', '.join(sorted(fields)) or 'none'}.",
                    name=loaded.name, option=str(key),
                )  # fmt: skip
    try:
        return model.model_validate({key: _parsed(fields.get(str(key)), value) for key, value in options.items()})
    except ValidationError as error:
        fault = error.errors()[0]
        option = ".".join(str(part) for part in fault["loc"])
        first = str(fault["loc"][0]) if fault["loc"] else ""
        shown = f" = {options[first]!r}" if first in options else ""
        reason = "is required" if fault["type"] == "missing" else reason_of(fault)
        where = f"{setting}.options" + (f".{option}" if option else "")
        raise OptionsError(
            f"{word} {loaded}: {where}{shown}: {reason}", name=loaded.name, option=option or None
        ) from error


# -- availability ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Mute:
    """Why a plugin is asked no more: what hung once would hang again, and whoever else imports it would wait for it."""

    reason: str
    remedy: str
    #: An instance that was given: kept, so that no other can have its identity.
    plugin: object = None

    @classmethod
    def after(cls, error: NoAnswer, group: str, source: str, plugin: object = None) -> _Mute:
        """``source`` as in :class:`_Loaded`: the distribution that can be uninstalled, where it is known."""
        if isinstance(error, Gone):
            return cls(str(error), "reinstall or upgrade it, or choose another", plugin)
        advice = []
        if group in _WORD:
            advice.append(f"name another {_WORD[group]} ({_SETTING[group]}.name)")
        if source not in ("", _UNKNOWN):
            advice.append(f"uninstall {source.split()[0]}")
        remedy = ", or ".join(advice) or "remove it"
        if cuda.present():
            remedy += (
                "; if nvidia-smi does not answer either, the GPU's driver is stuck, and the machine has to be restarted"
            )
        return cls(str(error), remedy, plugin)

    def refusal(self, who: str, name: str) -> PluginUnavailable:
        return PluginUnavailable(
            f"{who} {self.reason}: {self.remedy}", name=name, reason=self.reason, remedy=self.remedy, capability=None
        )


#: By group and ``module:object``, of an instance by its identity.
_mute: dict[object, _Mute] = {}


def _probe(loaded: _Loaded, need: Need) -> Availability:
    if loaded.key in _mute:
        raise _mute[loaded.key].refusal(f"transport {loaded}", loaded.name)
    try:
        answer: Availability = of_thread(f"transport {loaded}", lambda: loaded.plugin.probe(need), PATIENCE)
    except NoAnswer as error:
        _mute[loaded.key] = _Mute.after(error, CONNECTORS, loaded.source, loaded.plugin)
        raise _mute[loaded.key].refusal(f"transport {loaded}", loaded.name) from error
    except (Exception, SystemExit) as error:
        raise PluginBroken(
            f"transport {loaded}: its probe failed, which it must never do: {type(error).__name__}: {error}",
            name=loaded.name, distribution=loaded.source or None,
        ) from error  # fmt: skip
    if wrong := _wrong(answer):
        raise PluginBroken(
            f"transport {loaded}: its probe is wrong: {wrong}", name=loaded.name, distribution=loaded.source or None
        )
    return answer


def _wrong(answer: object) -> str:
    """Why this is no answer of a probe; empty where it is one."""
    if not isinstance(answer, Availability):
        return f"it returned a {type(answer).__name__} and no Availability"
    for name in ("reason", "remedy"):
        text = getattr(answer, name)
        if text is not None and not isinstance(text, str):
            return f"{name} is a {type(text).__name__} and no str"
    able: object = answer.capabilities
    if able is None:
        return ""
    if not isinstance(able, Capabilities):
        return f"capabilities are a {type(able).__name__} and no Capabilities"
    return "" if able.quiet in tuple(_QUIET) else f"quiet is {able.quiet!r} and none of {', '.join(_QUIET)}"


def _ask_apart(entries: Sequence[EntryPoint]) -> None:
    """Let another process import and ask each; those that hang there, or end it, are :data:`_mute` from now on."""
    waiting = [entry for entry in entries if (entry.group, entry.value) not in _mute]
    while waiting:
        with Apart("kvbaton.plugins:_asked", *(json.dumps([e.group, e.name, e.value]) for e in waiting)) as process:
            while waiting:
                entry = waiting.pop(0)
                try:
                    process.answer(f"{entry.name} of {_source(entry)}", PATIENCE)
                except NoAnswer as error:
                    _mute[entry.group, entry.value] = _Mute.after(error, entry.group, _source(entry))
                    break


def _asked(*entries: str) -> Iterator[str]:
    """What :func:`_ask_apart` has run: that each of ``entries`` comes back counts, and not with what.

    Nothing is bounded here, so that one that hangs does not come back.
    """
    for group, name, value in map(json.loads, entries):
        entry = EntryPoint(name, value, group)
        with contextlib.suppress(Exception, SystemExit):
            plugin = entry.load()
            if group == CONNECTORS:
                for need in _every_need():
                    plugin.probe(need)
        yield ""


def _refusal(loaded: _Loaded, need: Need, remedies: Remedies) -> PluginUnavailable | None:
    """Why this transport cannot serve ``need`` here; None where it can."""
    availability = _probe(loaded, need)
    able = availability.capabilities
    reason, remedy = availability.reason, availability.remedy
    capability: str | None = None
    # memory first: how stages are launched is easily changed
    if able is not None and need.memory_kind not in able.memory_kinds:
        capability = "memory_kinds"
        kinds = " and ".join(sorted(able.memory_kinds)) or "no"
        reason = f"moves {kinds} memory only, and {need.memory_kind} memory is asked for"
        remedy = remedies.host if need.memory_kind == "cuda" else remedies.cuda
    elif able is not None and not able.reaches(need.reach):
        capability = need.reach
        reason, remedy = _reach(able, need, remedies)
    elif availability.usable:
        return None
    said = reason if capability else f"cannot be used here: {reason or 'it gives no reason'}"
    return PluginUnavailable(
        f"transport {loaded} {said}{': ' + remedy if remedy else ''}",
        name=loaded.name, reason=reason, remedy=remedy, capability=capability,
    )  # fmt: skip


def _reach(able: Capabilities, need: Need, remedies: Remedies) -> tuple[str, str]:
    if need.reach == "cross_process" and able.same_process:
        return f"works only within one process, and {remedies.process}", remedies.within
    if need.reach == "same_process":
        return (
            'works only between processes, and stages.launch = "inproc" puts all stages in one',
            'set stages.launch = "process" or choose another transport',
        )
    return (f"does not reach {need.reach.replace('_', '-')}", "choose another transport")


_QUIET = {"exact": 0, "peer_death": 1, "never": 2}


def _rank(loaded: _Loaded, able: Capabilities | None) -> tuple[object, ...]:
    """Best first: what it can prove, then first-party order, which is that of their speed; of others what they cost
    the calling thread, whether they can take memory back, then the name."""
    able = able or Capabilities(quiet="never")
    order = list(FIRST_PARTY[CONNECTORS])
    return (
        _QUIET[able.quiet],
        order.index(loaded.name) if loaded.name in order else len(order),
        able.copies_in_submit,
        not (able.disconnect_fences or able.revocable),
        loaded.name,
    )


def _best(need: Need, remedies: Remedies) -> _Loaded:
    names = sorted({entry.name for entry in entry_points(group=CONNECTORS)})
    if not names:
        raise _not_found(CONNECTORS, AUTO)
    usable: list[tuple[tuple[object, ...], _Loaded]] = []
    verdicts: dict[str, str] = {}
    for name in names:
        try:
            loaded = _resolve(CONNECTORS, name)
            refusal = _refusal(loaded, need, remedies)
            if refusal is None:
                usable.append((_rank(loaded, _probe(loaded, need).capabilities), loaded))
            else:
                verdicts[name] = str(refusal)
        except (PluginBroken, PluginConflict, PluginUnavailable) as error:
            verdicts[name] = str(error)
    for verdict in verdicts.values():
        _log.info("transport auto: %s", verdict)
    if not usable:
        absent = dict.fromkeys(dist for first, dist in FIRST_PARTY[CONNECTORS].items() if first not in names)
        more = f" Others: pip install {' or '.join(absent)}" if absent else ""
        raise PluginUnavailable(
            f"no installed transport can move {need.memory_kind} memory {need.reach.replace('_', ' ')}. "
            + " ".join(f"{verdict.rstrip('.')}." for verdict in verdicts.values()) + more,
            name=AUTO, reason="; ".join(verdicts.values()), remedy="", capability=None,
        )  # fmt: skip
    usable.sort(key=lambda pair: cast("Any", pair[0]))
    best = usable[0][1]
    for _, other in usable[1:]:
        _log.info("transport auto: %s is usable; %s is preferred", other, best)
    _log.info("transport auto: %s is chosen for %s memory, %s", best, need.memory_kind, need.reach.replace("_", " "))
    return best


# -- listing -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _State:
    available: bool
    reason: str = ""
    remedy: str = ""
    capabilities: Capabilities | None = None
    options: Mapping[str, Any] | None = None

    def astuple(self) -> tuple[bool, str, str, Capabilities | None, Mapping[str, Any] | None]:
        return self.available, self.reason, self.remedy, self.capabilities, self.options


def _state(group: str, entry: EntryPoint, claims: Sequence[EntryPoint]) -> _State:
    if group == HOOKS_GROUP:
        if (group, entry.value) in _mute:
            raise _mute[group, entry.value].refusal(entry.name, entry.name)
        Hooks().add(entry.load(), entry.name)
        return _State(True)
    _one_claim(group, entry.name, claims)
    loaded = _load(group, entry)
    options = loaded.plugin.Options.model_json_schema().get("properties", {})
    if group == ENGINES:
        return _State(True, options=options)
    needs = list(_every_need())
    answers = [_probe(loaded, need) for need in needs]
    # of refusals that for memory which it was made for: what it never does is no reason
    meant = [answer for answer, need in zip(answers, needs, strict=True) if _made_for(answer.capabilities, need)]
    best = next((answer for answer in answers if answer.usable), (meant or answers)[0])
    return _State(best.usable, "" if best.usable else best.reason, "" if best.usable else best.remedy,
                  best.capabilities, options)  # fmt: skip


def _made_for(able: Capabilities | None, need: Need) -> bool:
    return able is not None and need.memory_kind in able.memory_kinds and able.reaches(need.reach)


def _every_need() -> Iterable[Need]:
    for kind in ("host", "cuda"):
        for reach in ("same_process", "cross_process", "cross_host"):
            yield Need(cast("Any", kind), cast("Any", reach))
