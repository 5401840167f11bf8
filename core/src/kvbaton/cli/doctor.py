"""``kvbaton doctor``: what is said of a machine and its transports, in at most eighty columns, or as JSON."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvbaton.cli.faults import FAILED, OK, say
from kvbaton.cli.interrupt import Interrupt
from kvbaton.cli.memory import REMEDIES
from kvbaton.connector import MemoryKind, WithLeftovers
from kvbaton.control import private_directory
from kvbaton.doctor import foreign
from kvbaton.doctor.examination import Progress, Report, Transport, examine
from kvbaton.doctor.leftovers import Leftover, Outcome, Places, clean
from kvbaton.doctor.machine import Machine, Note
from kvbaton.doctor.trial import Measured
from kvbaton.doctor.verdict import Finding
from kvbaton.plugins import OF_SETTINGS, each_plugin
from kvbaton.quantities import duration, rate, size
from kvbaton.settings import Settings

_WIDTH = 80
_STYLES = {"fit": "green", "degraded": "yellow", "unusable": "red", "note": "dim"}


def doctor(
    settings: Settings, *, named: Literal["argument", "settings"], memory: MemoryKind | None, as_json: bool
) -> int:
    """Examine and show; the exit status: 0 fit, 1 degraded, 2 unusable, for the configured transport."""
    with Interrupt(), _progress() as progress:
        configured = memory is None and settings.stages.devices is not None
        remedies = OF_SETTINGS if configured else REMEDIES
        report = examine(settings, named=named, memory=memory, progress=progress, remedies=remedies)
    if as_json:
        print(json.dumps(msgspec.to_builtins(report), indent=2), flush=True)
    else:
        _show(report, _console())
    return report.exit_status


def tidy(settings: Settings, *, dry_run: bool, as_json: bool) -> int:
    """Remove what dead processes left, and show what became of each thing; 1 where something could not be removed."""
    keys, control = settings.control.keys, settings.control.dir
    # in all of them: an earlier run may have had another environment
    folders = [*private_directory.bases(), *([] if control is None else [Path(control)])]
    places = Places(
        folders=tuple(dict.fromkeys(folders)), keys=() if keys is None else (Path(keys),), plugins=_of_plugins
    )  # fmt: skip
    outcomes = clean(places, dry_run=dry_run)
    if as_json:
        print(json.dumps([msgspec.to_builtins(one) for one in outcomes], indent=2), flush=True)
    else:
        _show_outcomes(outcomes, _console())
    return FAILED if any(one.fate == "failed" for one in outcomes) else OK


def _of_plugins() -> list[Leftover]:
    """What installed plugins tell of; one that cannot is passed over, with a line."""
    found: list[Leftover] = []
    for name, plugin in each_plugin(lambda error: say(str(error))):
        if not isinstance(plugin, WithLeftovers):
            continue
        try:
            found += foreign.leftovers(plugin.leftovers())
        except Exception as error:
            say(f"{name} could not say what it leaves behind: {type(error).__name__}: {error}")
    return found


# -- showing -----------------------------------------------------------------------------------------------------------


def _console() -> Console:
    """As wide everywhere: a narrower terminal wraps, where a table would be cut."""
    return Console(width=_WIDTH, highlight=False)


@contextlib.contextmanager
def _progress() -> Iterator[Progress]:
    """A line that changes where stderr is a terminal; else a line for each transport, as its turn comes."""
    if sys.stderr.isatty():
        with Console(stderr=True).status("...") as status:
            yield lambda line: status.update(escape(line))
        return
    told: set[str] = set()

    def tell(line: str) -> None:
        name, colon, _ = line.partition(":")
        if colon and name not in told:
            told.add(name)
            say(f"trying {name}")

    yield tell


def _show(report: Report, console: Console) -> None:
    _heading(console, "machine")
    console.print(_rows(_machine(report.machine)))
    for note in report.notes:
        _note(console, note)
    _heading(console, "transports", f"for {report.chosen.memory} memory between processes")
    names = max((len(one.name) for one in report.transports), default=0)
    for one in report.transports:
        word, style = ("no", "red") if one.reach is None else ("yes", "green")
        why = ": ".join(part for part in (one.reason, one.remedy) if part)
        if one.reach == "same_process":
            word, style, why = "no", "yellow", "not between processes: within one only"
        source = " ".join(part for part in (one.distribution, one.version) if part)
        gap = " " * (names - len(one.name))
        _hang(console, f"{escape(one.name)}{gap}  [{style}]{word:<3}[/]  {escape(source)}", 2)
        if why:
            _hang(console, escape(why), 6)
    for one in report.transports:
        if one.trial is not None:
            _show_trial(console, one)
    _heading(console, "verdict")
    chosen = report.chosen
    by = {"argument": "as asked", "settings": "as configured", "auto": "chosen by auto"}[chosen.by]
    style = _STYLES[chosen.standing]
    _hang(console, f"[{style}]{chosen.standing}[/]: {escape(chosen.name)} ({by}): {escape(chosen.text)}", 2)


def _show_trial(console: Console, one: Transport) -> None:
    assert one.trial is not None
    assert one.verdict is not None
    trial = one.trial
    where = f", devices {trial.devices[0]} and {trial.devices[1]}" if trial.memory == "cuda" else ""
    between = "two threads of one process" if one.reach == "same_process" else "two processes"
    _heading(console, one.name, f"{between}, {trial.memory} memory{where}, {trial.seconds:.1f} s")
    if trial.measured:
        console.print(_measured(trial.measured))
    if trial.lanes:
        words = [f"{lane.operation} {lane.lane}" for lane in trial.lanes]
        _hang(console, f"ways: {escape(', '.join(dict.fromkeys(words)))}", 2)
    elif trial.lanes_reason and trial.failure is None:
        _hang(console, f"ways: {escape(trial.lanes_reason)}", 2)
    standing = one.verdict.standing
    text = f": {escape(one.verdict.summary)}" if one.verdict.summary else ""
    _hang(console, f"[{_STYLES[standing]}]{standing}[/]{text}", 2)
    for finding in one.verdict.findings:
        _finding(console, one.name, finding)


def _measured(measured: Sequence[Measured]) -> Table:
    """A row for each size; for each direction, and for copying, what it took and the rate, below one heading."""
    sizes = list(dict.fromkeys(one.nbytes for one in measured))
    columns = {
        f"to {target}": {one.nbytes: (one.seconds, one.rate) for one in measured if one.target == target}
        for target in dict.fromkeys(one.target for one in measured)
    }
    best = [max((one for one in measured if one.nbytes == nbytes), key=lambda one: one.copy_rate) for nbytes in sizes]
    columns["copying"] = {one.nbytes: (one.copy_seconds, one.copy_rate) for one in best}
    table = Table.grid(padding=(0, 3, 0, 0))
    for _ in range(1 + len(columns)):
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *columns, style="dim")
    cells = {
        name: {nbytes: (duration(of[0]), rate(of[1])) for nbytes, of in by.items()} for name, by in columns.items()
    }
    for nbytes in sizes:
        row = []
        for by in cells.values():
            wide = max(len(per_second) for _, per_second in by.values())
            took, per_second = by.get(nbytes, ("", ""))
            row.append(f"{took}  {per_second:>{wide}}" if took else "")
        table.add_row(f"  {_size(nbytes)}", *row)
    return table


def _finding(console: Console, name: str, finding: Finding) -> None:
    _hang(console, f"[{_STYLES[finding.level]}]{finding.level}[/]: {escape(name)}: {escape(finding.sentence())}", 4)


def _note(console: Console, note: Note) -> None:
    remedy = f": {escape(note.remedy)}" if note.remedy else ""
    _hang(console, f"[yellow]![/] {escape(note.subject)}: {escape(note.text)}{remedy}", 2)


def _show_outcomes(outcomes: Sequence[Outcome], console: Console) -> None:
    if not outcomes:
        console.print("nothing was left behind")
        return
    styles = {"removed": "green", "would be removed": "green", "kept": "dim", "failed": "red"}
    together: dict[tuple[str, str, str], list[Outcome]] = {}
    for one in sorted(outcomes, key=lambda one: one.fate):
        together.setdefault((one.fate, one.what, one.why), []).append(one)
    for (fate, what, why), several in together.items():
        for one in several:
            room = f" [dim]{size(one.nbytes)}[/]" if one.nbytes else ""
            console.print(f"[{styles[fate]}]{fate}[/] {escape(one.path)}{room}", soft_wrap=True)
        _hang(console, f"{escape(what)}: {escape(why)}", 4)


def _heading(console: Console, text: str, more: str = "") -> None:
    console.print(f"[bold]{escape(text)}[/]" + (f" [dim]{escape(more)}[/]" if more else ""))


def _hang(console: Console, text: str, indent: int) -> None:
    """Wrapped, each line indented."""
    table = Table.grid()
    table.add_column(width=indent)
    table.add_column(overflow="fold")
    table.add_row("", text)
    console.print(table)


def _rows(rows: Sequence[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(f"  {name}", escape(text))
    return table


# -- in words ----------------------------------------------------------------------------------------------------------


def _machine(machine: Machine) -> list[tuple[str, str]]:
    limit = f", a cgroup allows {_size(machine.memory_limit)}" if machine.memory_limit else ""
    cores = f"{machine.cores_usable} of {machine.cores}"
    if machine.cpu_limit is not None:
        cores += f", a cgroup allows {machine.cpu_limit:g}"
    rows = [
        ("system", f"{machine.system}, kernel {machine.kernel}, {machine.architecture}"),
        ("cores", f"{cores}{' (' + machine.processor + ')' if machine.processor else ''}"),
        ("memory", f"{_size(machine.memory_available)} of {_size(machine.memory)} free{limit}"),
        *_gpus(machine),
        ("/dev/shm", f"{_size(machine.shm_free)} of {_size(machine.shm_bytes)} free"),
        ("attach", _attach(machine)),
        ("limits", f"{_limit(machine.nofile)} open files, {_limit_bytes(machine.memlock)} of locked memory"),
        ("RDMA", _rdma(machine)),
    ]
    inside = [machine.container] if machine.container else []
    inside += [f"own {name} namespace" for name in machine.namespaces]
    rows.append(("container", ", ".join(inside) if inside else "none seen"))
    rows += [(name, value) for name, value in machine.environment.items()]
    return rows


def _gpus(machine: Machine) -> list[tuple[str, str]]:
    if not machine.gpus:
        return [("GPUs", f"none: {machine.gpu_reason}" if machine.gpu_reason else "none")]
    versions = [f"driver {machine.gpu_driver}"] if machine.gpu_driver else []
    versions += [f"CUDA {machine.cuda}"] if machine.cuda else []
    rows = [("GPUs", f"{len(machine.gpus)}, {', '.join(versions)}")]
    for gpu in machine.gpus:
        more = "" if gpu.compute_mode in ("default", "unknown") else f", {gpu.compute_mode}"
        free = f"{_size(gpu.memory_free)} of " if gpu.memory_free is not None else ""
        rows.append((f"  {gpu.index}", f"{gpu.name}, {free}{_size(gpu.memory)}{more}{', MIG' if gpu.mig else ''}"))
    hows = sorted({how for _, _, how in machine.gpu_peers})
    for how in hows:
        pairs = [f"{a}-{b}" for a, b, one in machine.gpu_peers if one == how]
        whole = "all pairs" if len(hows) == 1 else " ".join(pairs)
        rows.append(("  peers", f"{'no access' if how == 'none' else how}: {whole}"))
    return rows


def _attach(machine: Machine) -> str:
    if machine.ptrace_scope is None:
        return "not restricted by yama"
    may = ", and CAP_SYS_PTRACE is there" if machine.may_ptrace else ""
    return f"kernel.yama.ptrace_scope is {machine.ptrace_scope}{may}"


def _rdma(machine: Machine) -> str:
    if not machine.rdma:
        return "no device"
    return ", ".join(
        f"{p.device}/{p.port} {p.link_layer} {p.state.split(':')[-1].strip()} {p.rate}" for p in machine.rdma
    )


def _limit(value: int | None) -> str:
    return "unlimited" if value is None else str(value)


def _limit_bytes(value: int | None) -> str:
    return "unlimited" if value is None else _size(value)


def _size(value: int | None) -> str:
    return "unknown" if value is None else size(value)
