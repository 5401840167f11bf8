"""The commands and their flags.  Each flag is a setting by another name: :func:`kvbaton.settings.load` decides."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.table import Table

from kvbaton.cli.assignments import assignments
from kvbaton.cli.console import answers
from kvbaton.cli.devices import devices
from kvbaton.cli.faults import BAD_INPUT, OK, explained, say
from kvbaton.errors import PluginError, SettingsError
from kvbaton.observe.logs import TextFormatter, begin
from kvbaton.settings import Provenance, Settings, describe, load

app = typer.Typer(
    name="kvbaton",
    help="Carries a request's KV cache from the stage that prefilled it to the stage that decodes it.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

# -- flags that several commands share ---------------------------------------------------------------------------------

ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="Settings file, TOML (or JSON where it ends in .json).")
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="MODEL", help="Checkpoint folder or file, or a name such as smollm2.")
]
Transport = Annotated[
    str | None, typer.Option("--transport", metavar="NAME", help="Transport, module:object, or auto (the default).")
]
TransportOption = Annotated[
    list[str] | None,
    typer.Option("--transport-option", metavar="KEY=VALUE", help="Option of the transport. Repeatable."),
]
EngineOption = Annotated[
    list[str] | None, typer.Option("--engine-option", metavar="KEY=VALUE", help="Option of the engine. Repeatable.")
]
# numbers are text here: the settings model checks them, and names the flag
Prefill = Annotated[str | None, typer.Option("--prefill", metavar="N", help="Number of prefill stages.")]
Decode = Annotated[str | None, typer.Option("--decode", metavar="N", help="Number of decode stages.")]
Launch = Annotated[
    str | None, typer.Option("--launch", metavar="HOW", help="Where stages run: auto, inproc, process or remote.")
]
Trace = Annotated[
    str | None,
    typer.Option("--trace", metavar="FILE", help="Write a trace there, for ui.perfetto.dev and kvbaton report."),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting, such as deadline.chunk=5. Repeatable."),
]
Debug = Annotated[bool, typer.Option("--debug", help="Log more on stderr (level INFO), and show an error's traceback.")]


def _settings(
    config: Path | None,
    single: dict[str, str | None],
    transport_option: Sequence[str] | None,
    engine_option: Sequence[str] | None,
    assigned: Sequence[str] | None,
    defaults: dict[str, object] | None = None,
) -> tuple[Settings, Provenance]:
    """``single``: flag name to its value; the flag's key is in ``_KEYS``."""
    overrides: dict[str, object] = {}
    flags: dict[str, str] = {}

    def give(key: str, value: object, flag: str) -> None:
        overrides.pop(key, None)  # the last one counts, also in order
        overrides[key], flags[key] = value, flag

    for flag, prefix, pairs in (
        ("--set", "", assigned),
        ("--engine-option", "engine.options.", engine_option),
        ("--transport-option", "transport.options.", transport_option),
    ):
        for key, text in assignments(flag, pairs or ()):
            give(prefix + key, _value(text), flag)
    for flag, value in single.items():
        if value is not None:
            give(_KEYS[flag], value, flag)
    settings, provenance = load(config, overrides, os.environ, flags=flags, defaults=defaults)
    begin(settings.log, [handler for handler in logging.getLogger().handlers if isinstance(handler, _Stderr)])
    return settings, provenance


_KEYS = {
    "--model": "model",
    "--transport": "transport.name",
    "--prefill": "stages.prefill",
    "--decode": "stages.decode",
    "--launch": "stages.launch",
    "--connect": "control.connect",
    "--listen": "serve.listen",
    "--chunk-bytes": "transfer.chunk_bytes",
    "--trace": "trace.path",
}


def _value(text: str) -> object:
    """A table or list may be written as JSON; everything else is text that the settings model understands."""
    if text[:1] in ("{", "["):
        try:
            value: object = json.loads(text)
        except ValueError:
            return text
        return value
    return text


class _Stderr(logging.StreamHandler[TextIO]):
    """Whatever stderr is at the moment: a live display replaces it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def _begin(debug: bool) -> None:
    handler = _Stderr()
    handler.setFormatter(TextFormatter())
    logging.getLogger("kvbaton").setLevel(logging.NOTSET)  # what the settings say comes with them
    logging.basicConfig(level=logging.INFO if debug else logging.WARNING, handlers=[handler], force=True)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a model may write what this terminal cannot show


# -- the commands ------------------------------------------------------------------------------------------------------


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"kvbaton {version('kvbaton')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Carries a request's KV cache from the stage that prefilled it to the stage that decodes it."""


@app.command("run")
def run_command(
    config: ConfigFile = None,
    model: Model = None,
    transport: Transport = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", metavar="TEXT", help="A prompt. Repeatable. Stdin is then not read.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            "--prompts", metavar="FILE", help="Prompts, one per line; a .jsonl file has objects with a prompt."
        ),
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option("--max-tokens", metavar="N", help="Most tokens per request (16).", show_default=False)
    ] = None,
    temperature: Annotated[
        str | None, typer.Option("--temperature", metavar="T", help="0 (the default) is greedy.")
    ] = None,
    top_k: Annotated[
        str | None, typer.Option("--top-k", metavar="K", help="Sample from the K likeliest; 0: all.")
    ] = None,
    top_p: Annotated[
        str | None, typer.Option("--top-p", metavar="P", help="Sample from the likeliest that make up P.")
    ] = None,
    seed: Annotated[str | None, typer.Option("--seed", metavar="N", help="Makes sampling repeatable.")] = None,
    prefill: Prefill = None,
    decode: Decode = None,
    launch: Launch = None,
    transport_option: TransportOption = None,
    engine_option: EngineOption = None,
    assign: Set = None,
    compare: Annotated[
        bool, typer.Option("--compare", help="Run undisaggregated as well and say whether the tokens are equal.")
    ] = False,
    profile: Annotated[
        Path | None,
        typer.Option(
            "--profile", metavar="DIR", help="Profile each stage's engine; the files go there (read by pstats)."
        ),
    ] = None,
    trace: Trace = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object in place of text and tables.")] = False,
    debug: Debug = False,
) -> None:
    """Run prompts through prefill and decode stages; show text as it comes, then what each request took."""
    _begin(debug)
    with explained(debug=debug):
        single = {
            "--model": model,
            "--transport": transport,
            "--prefill": prefill,
            "--decode": decode,
            "--launch": launch,
            "--trace": trace,
        }
        settings, _ = _settings(config, single, transport_option, engine_option, assign)
        from kvbaton.cli.prompts import gather, number
        from kvbaton.cli.run import run

        written = {"max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        sampling = {name: number(name, text) for name, text in written.items() if text is not None}
        found = gather(prompt or (), prompts, sampling)
        status = run(settings, found, compare=compare, as_object=as_json, profile=profile)
    raise typer.Exit(status)


@app.command("serve")
def serve_command(
    config: ConfigFile = None,
    listen: Annotated[
        str | None,
        typer.Option("--listen", metavar="HOST:PORT", help="Where to listen (127.0.0.1:8000).", show_default=False),
    ] = None,
    model: Model = None,
    transport: Transport = None,
    prefill: Prefill = None,
    decode: Decode = None,
    launch: Launch = None,
    transport_option: TransportOption = None,
    engine_option: EngineOption = None,
    assign: Set = None,
    trace: Trace = None,
    debug: Debug = False,
) -> None:
    """Serve an OpenAI-compatible HTTP API until SIGTERM or Ctrl-C; what is under way then may end first."""
    _begin(debug)
    with explained(debug=debug):
        single = {
            "--listen": listen,
            "--model": model,
            "--transport": transport,
            "--prefill": prefill,
            "--decode": decode,
            "--launch": launch,
            "--trace": trace,
        }
        settings, _ = _settings(config, single, transport_option, engine_option, assign)
        from kvbaton.cli.serve import serve

        status = serve(settings)
    raise typer.Exit(status)


@app.command("report")
def report_command(
    trace: Annotated[Path, typer.Argument(metavar="TRACE", help="What kvbaton run --trace TRACE has written.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="Where the page goes (TRACE, but .html).", show_default=False),
    ] = None,
    debug: Debug = False,
) -> None:
    """Draw one HTML page from a trace: each request's phases, percentiles, where the time went, what failed."""
    _begin(debug)
    with explained(debug=debug):
        from kvbaton.report import report

        print(report(trace, output))


@app.command("stage")
def stage_command(
    name: Annotated[
        str, typer.Option("--name", metavar="NAME", help="Which stage this is: prefill-0, decode-0 and so on.")
    ],
    config: ConfigFile = None,
    connect: Annotated[
        str | None, typer.Option("--connect", metavar="ADDRESS", help="The coordinator's tcp://HOST:PORT.")
    ] = None,
    model: Model = None,
    transport: Transport = None,
    transport_option: TransportOption = None,
    engine_option: EngineOption = None,
    assign: Set = None,
    debug: Debug = False,
) -> None:
    """Be one stage of a deployment over several hosts: join the coordinator over TCP and work until it ends."""
    _begin(debug)
    with explained(debug=debug):
        single = {"--model": model, "--transport": transport, "--connect": connect}
        settings, _ = _settings(config, single, transport_option, engine_option, assign)
        from kvbaton.cli.faults import say
        from kvbaton.launch.host import run_stage

        logging.getLogger("kvbaton.stage").setLevel(logging.INFO)  # nobody else collects this stage's log
        status = run_stage(settings, name, say)
    raise typer.Exit(status)


@app.command("keys")
def keys_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the key files go; made if it is not there.")],
    names: Annotated[
        list[str],
        typer.Argument(metavar="NAME...", help='Whose: "coordinator", and each stage, such as prefill-0 decode-0.'),
    ],
    debug: Debug = False,
) -> None:
    """Make CURVE key pairs for stages on several hosts: NAME.key is public, NAME.key_secret for NAME's host alone."""
    _begin(debug)
    with explained(debug=debug):
        from kvbaton.control.curve import make_keys

        for path in make_keys(folder, names):
            print(path)


@app.command("plugins")
def plugins_command(
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list, with the options of each plugin.")
    ] = False,
    debug: Debug = False,
) -> None:
    """List the installed transports, engines and observers, and whether each can be used here."""
    _begin(debug)
    with explained(debug=debug):
        from kvbaton.plugins import list_plugins

        rows = list_plugins()
        if as_json:
            print(json.dumps([asdict(row) for row in rows], default=_builtin, indent=2))
            return
        if not rows:
            print("no plugin is installed: pip install kvbaton-loopback kvbaton-transformers")
            return
        table = Table(box=None, pad_edge=False)
        for column in ("kind", "name", "distribution", "version", "available"):
            table.add_column(column, no_wrap=True)
        table.add_column("reason", overflow="fold")
        for row in rows:
            reason = ": ".join(part for part in (row.reason, row.remedy) if part)
            yes = "[green]yes[/]" if row.available else "[red]no[/]"
            table.add_row(row.kind, _plain(row.name), row.distribution, row.version, yes, _plain(reason))
        answers().print(table)


@app.command("lanes")
def lanes_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The transport, by default that of the settings.", show_default=False),
    ] = None,
    config: ConfigFile = None,
    transport_option: TransportOption = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="KIND", help="Between which memory: host or cuda.")
    ] = "host",
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list instead.")] = False,
    debug: Debug = False,
) -> None:
    """Show by which ways a transport moves bytes between two processes of this host, by letting it move some."""
    _begin(debug)
    with explained(debug=debug):
        from kvbaton.cli.lanes import show

        settings, _ = _settings(config, {"--transport": name}, transport_option, (), (), {"model": "(not set)"})
        chosen = settings.transport
        if chosen.name == "auto":
            raise SettingsError(
                "which transport? Write kvbaton lanes NAME, or set transport.name; kvbaton plugins lists them",
                key="transport.name", origin=None,
            )  # fmt: skip
        show(chosen.name, chosen.options, memory, as_json=as_json)


@app.command("bench")
def bench_command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="The transport, by default that of the settings.", show_default=False),
    ] = None,
    config: ConfigFile = None,
    memory: Annotated[str, typer.Option("--memory", metavar="KIND", help="Where the KV lies: host or cuda.")] = "host",
    part: Annotated[
        str, typer.Option("--part", metavar="PART", help="transport (bytes alone), handoff (whole ones), or all.")
    ] = "all",
    like: Annotated[
        str | None,
        typer.Option("--like", metavar="MODEL", help="A model's name, such as llama-8b, or its config.json."),
    ] = None,
    layers: Annotated[str | None, typer.Option("--layers", metavar="N", help="Layers, if not the model's.")] = None,
    kv_heads: Annotated[str | None, typer.Option("--kv-heads", metavar="N", help="KV heads of a layer.")] = None,
    head_dim: Annotated[str | None, typer.Option("--head-dim", metavar="N", help="Values of a head.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", metavar="TYPE", help="bfloat16, float8_e4m3fn...")] = None,
    tokens: Annotated[str, typer.Option("--tokens", metavar="N", help="Tokens of a prompt.")] = "2048",
    block: Annotated[str, typer.Option("--block", metavar="N", help="Tokens of a block of the cache.")] = "16",
    layout: Annotated[
        str,
        typer.Option("--layout", metavar="HOW", help="block: all layers of a block together; layer: a tensor each."),
    ] = "block",
    scattered: Annotated[
        bool, typer.Option("--scattered/--contiguous", help="Where a request's blocks lie in the cache.")
    ] = True,
    chunk_bytes: Annotated[
        str | None, typer.Option("--chunk-bytes", metavar="SIZE", help="The setting transfer.chunk_bytes, as 64MiB.")
    ] = None,
    requests: Annotated[
        str, typer.Option("--requests", metavar="N", help="Hand-offs that are timed one at a time, at most.")
    ] = "100",
    at_once: Annotated[
        str | None,
        typer.Option("--at-once", metavar="N", help="Hand-offs under way for the rate (4, or fewer that fit)."),
    ] = None,
    seconds: Annotated[
        str, typer.Option("--seconds", metavar="S", help="About how long each part may measure.")
    ] = "10",
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Also the rate over the length of a segment, 4 KiB to 16 MiB.")
    ] = False,
    transport_option: TransportOption = None,
    assign: Set = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead.")] = False,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw it there, as .svg or .png.")] = None,
    debug: Debug = False,
) -> None:
    """Measure what a transport, and whole hand-offs over it, make of a model's KV cache on this machine."""
    _begin(debug)
    with explained(debug=debug):
        from kvbaton.cli import bench

        single = {"--transport": name, "--chunk-bytes": chunk_bytes}
        settings, _ = _settings(config, single, transport_option, (), assign, {"model": "(not set)"})
        flags = bench.Flags(
            memory, part, like, layers, kv_heads, head_dim, dtype, tokens, block, layout, scattered, requests,
            at_once, seconds, sweep,
        )  # fmt: skip
        bench.bench(bench.plan(settings, flags), as_json=as_json, plot=plot)


@app.command("doctor")
def doctor_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="Try this transport only; by default that of the settings, or each.",
            show_default=False,
        ),
    ] = None,
    config: ConfigFile = None,
    transport_option: TransportOption = None,
    assign: Set = None,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="KIND", help="Between which memory: host or cuda; by default as configured."),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Instead, remove what dead processes of kvbaton left behind.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --clean: only say what would be removed.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead.")] = False,
    debug: Debug = False,
) -> None:
    """Look at this machine, and let two processes move bytes over each transport.

    Exit status, for the configured transport: 0 fit, 1 degraded, 2 unusable.
    """
    _begin(debug)
    with explained(debug=debug):
        from kvbaton.cli.memory import memory_kind

        kind = None if memory is None else memory_kind(memory)
        if dry_run and not clean:
            raise SettingsError("--dry-run: it goes with --clean", key="", origin=None)
        from kvbaton.cli.doctor import doctor, tidy

        single = {"--transport": name}
        settings, _ = _settings(config, single, transport_option, (), assign, {"model": "(not set)"})
        if clean:
            status = tidy(settings, dry_run=dry_run, as_json=as_json)
        else:
            status = doctor(
                settings, named="argument" if name is not None else "settings", memory=kind, as_json=as_json
            )  # fmt: skip
    raise typer.Exit(status)


def _builtin(value: object) -> object:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


@app.command("conformance")
def conformance_command(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="The connector: an entry point's name, or module:object.", show_default=False
        ),
    ] = None,
    config: ConfigFile = None,
    transport_option: TransportOption = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="KIND", help="Where the memory is that it moves: host or cuda.")
    ] = "host",
    on: Annotated[
        str | None,
        typer.Option(
            "--devices",
            metavar="I,J",
            help="CUDA devices that the ends lie on in turn, prefill's first; with --memory cuda.",
        ),
    ] = None,
    level: Annotated[
        str, typer.Option("--level", metavar="LEVEL", help="connector (two ends), handoff (whole hand-offs), or all.")
    ] = "all",
    select: Annotated[
        str | None, typer.Option("-k", metavar="EXPRESSION", help="Only tests that match: a look, not a verdict.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="With -k: exit status 0, not 3, where the part passes.")
    ] = False,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="DIR", help="Write the verdict there: a page, JSON, JUnit, a badge."),
    ] = None,
    known_failures: Annotated[
        Path | None, typer.Option("--known-failures", metavar="FILE", help="TOML file of failures that are known.")
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", metavar="N", help="Of everything that is drawn.")] = None,
    require_env: Annotated[
        bool, typer.Option("--require-env", help="Hardware that is absent is an error, not a skip.")
    ] = False,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Go on although tests do not come back, one after the other.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="A line for each test.")] = False,
    debug: Debug = False,
) -> None:
    """Judge a connector by the contract, clause by clause.

    Exit status 0 where it conforms, 1 where it does not, 2 where there is nothing to judge or the report cannot be
    written, 3 where a part of the suite (-k) has passed, which is no verdict, 130 after Ctrl-C or SIGTERM.
    """
    _begin(debug)
    with explained(debug=debug):
        from kvbaton.cli.conformance import Order, judge
        from kvbaton.cli.memory import memory_kind

        if level not in ("connector", "handoff", "all"):
            raise SettingsError(f"--level {level}: write connector, handoff or all", key="", origin=None)
        kind = memory_kind(memory)
        chosen = () if on is None else devices("--devices", on)
        if chosen and kind != "cuda":
            raise SettingsError(f"--devices {on}: it goes with --memory cuda", key="", origin=None)
        options: dict[str, Any] = {}
        if config is not None or name is None:
            settings, _ = load(config, {}, os.environ, defaults={"model": "(not set)"})
            name = name or settings.transport.name
            if name == settings.transport.name:
                options.update(settings.transport.options)
        if name == "auto":
            raise SettingsError(
                "which connector? Write kvbaton conformance NAME, or set transport.name; kvbaton plugins lists them",
                key="transport.name", origin=None,
            )  # fmt: skip
        options.update(assignments("--transport-option", transport_option or ()))
        if partial and select is None:
            raise SettingsError("--partial: it goes with -k, which chooses the part", key="", origin=None)
        order = Order(
            name, options, level, select, report, known_failures, seed, require_env, verbose, memory, partial, chosen,
            keep_going,
        )  # fmt: skip
        status = judge(order)
    raise typer.Exit(status)


@app.command("config")
def config_command(
    config: ConfigFile = None,
    model: Model = None,
    transport: Transport = None,
    prefill: Prefill = None,
    decode: Decode = None,
    launch: Launch = None,
    transport_option: TransportOption = None,
    engine_option: EngineOption = None,
    assign: Set = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of the settings instead.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead.")] = False,
    debug: Debug = False,
) -> None:
    """Print every effective setting and option of the chosen plugins, each with where it came from.

    Exit status 2 where a plugin that was asked for is not there or refuses its options.
    """
    _begin(debug)
    with explained(debug=debug):
        if schema:
            print(json.dumps(Settings.model_json_schema(), indent=2))
            return
        single = {
            "--model": model,
            "--transport": transport,
            "--prefill": prefill,
            "--decode": decode,
            "--launch": launch,
        }
        unset = "(not set)"
        settings, provenance = _settings(config, single, transport_option, engine_option, assign, {"model": unset})
        values = settings.model_dump(mode="json")
        rows: dict[str, tuple[Any, str]] = {}
        for key, origin in provenance.items():
            value: Any = values
            for part in key.split("."):
                value = value[part]
            rows[key] = (None if key == "model" and value == unset else value, str(origin))
        descriptions = {key: describe(key) for key in rows}
        status = _add_options(settings, rows, descriptions)
        if as_json:
            listing = {k: {"value": v, "from": where, "description": descriptions[k]} for k, (v, where) in rows.items()}
            print(json.dumps(listing, indent=2))
            raise typer.Exit(status)
        table = Table(box=None, pad_edge=False)
        table.add_column("setting", no_wrap=True)
        table.add_column("value", overflow="fold")
        table.add_column("from", overflow="fold")
        for key, (value, where) in rows.items():
            style = "" if where == "default" else "bold"
            table.add_row(key, unset if value is None else _plain(_shown(value)), _plain(where), style=style)
        answers().print(table)
    raise typer.Exit(status)


def _add_options(settings: Settings, rows: dict[str, tuple[Any, str]], descriptions: dict[str, str]) -> int:
    """Add what the chosen plugins take by default; the exit status.

    A plugin that cannot be chosen, or that refuses its options, is a line on stderr.
    """
    from kvbaton.plugins import options_of

    status = OK

    for group in ("engine", "transport"):
        prefix = f"{group}.options"
        try:
            options = options_of(settings, group)
        except PluginError as error:
            say(f"{prefix} are shown as given: {error}")
            asked = (key for key in rows if key == f"{group}.name" or key.startswith(prefix))
            if any(rows[key][1] != "default" for key in asked):  # nobody has asked for a default that is not installed
                status = BAD_INPUT
            continue
        if options is None:
            continue
        given = {key: rows.pop(key) for key in list(rows) if key == prefix or key.startswith(prefix + ".")}
        values = options.model_dump(mode="json")
        for name, field in type(options).model_fields.items():
            key = f"{prefix}.{name}"
            origins = [where for k, (_, where) in given.items() if k == key or k.startswith(key + ".")]
            rows[key] = (values[name], origins[0] if origins else "default")
            descriptions[key] = " ".join((field.description or "").split())
    order = {group: place for place, group in enumerate(Settings.model_fields)}
    for key in sorted(rows, key=lambda key: order[key.split(".")[0]]):  # a group's rows keep their order
        rows[key] = rows.pop(key)
    return status


def _shown(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _plain(text: str) -> str:
    from rich.markup import escape

    return escape(text)
