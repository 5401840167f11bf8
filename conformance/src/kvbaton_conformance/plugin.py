"""The pytest plugin of the kit: options, collection rules, gating, the verdict.

It is loaded into every pytest run where the kit is installed, so it imports nothing of the suite until a module that
is being collected has done so.

What is an *error* here, because it would make a green run mean less than it says: a subclass that judges nothing; a
standard test that is overridden, deselected, or skipped by anybody but the kit; a module of such tests that skips
itself; a mandatory clause without a test that ran, or of which known failures excuse all; a known failure that passes
or matches nothing; an absent environment under ``--require-env``.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import inspect
import json
import re
import shlex
import sys
import time
from collections.abc import Generator, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvbaton_conformance.known_failures import KnownFailure, KnownFailuresError, read_known_failures

if TYPE_CHECKING:
    from kvbaton_conformance.interrupt import Interrupt
    from kvbaton_conformance.report.verdict import Result, Verdict
    from kvbaton_conformance.two_process import Processes

pytest.register_assert_rewrite("kvbaton_conformance.suite", "kvbaton_conformance.harness")

#: Seconds that one standard test may take, and before and after it what it needs; every wait within is bound by much
#: less.
TEST_BOUND = 90.0
#: Seconds to tear down the test in which a run was interrupted.
INTERRUPTED_BOUND = 10.0
#: Tests in a row that a deadline of the kit has ended, after which the others of the class are left: each costs as
#: much again, and says the same.
STUCK_BOUND = 3

#: What ``--conformance-report`` writes; pytest writes junit.xml beside it.
REPORT = ("conformance.html", "conformance.json", "badge.md")

LEVELS = ("connector", "handoff", "engine", "guard")
_SUITE = "kvbaton_conformance.suite"


@dataclass
class Judged:
    """One collected class: what it judges and which standard tests it must run."""

    name: str
    nodeid: str
    subject: Any
    #: Test name to the class of the suite that defines it; those of the chosen levels.
    tests: dict[str, type]
    all_tests: dict[str, type]
    unavailable: str = ""
    seen: set[str] = field(default_factory=set)
    #: Tests in a row, up to the last one, that a deadline of the kit has ended.
    stuck: int = 0
    #: Why its other tests are not run.
    given_up: str = ""


@dataclass
class Kit:
    """The kit's state in one run."""

    levels: tuple[str, ...]
    partial: bool
    known: list[KnownFailure]
    started: float
    judged: dict[type, Judged] = field(default_factory=dict)
    #: By node id.
    results: dict[str, Result] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    #: Node ids of standard tests, by class and name of the test, before anything was deselected.
    collected: dict[str, tuple[type, str]] = field(default_factory=dict)
    #: Called when the run ends; each returns what it found wrong.
    closers: list[Any] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)
    processes: Processes | None = None
    #: Classes that were warmed up: what a library keeps once per process is there.
    warm: set[type] = field(default_factory=set)
    #: By Ctrl-C.
    interrupted: bool = False
    #: None where nothing of the kit has run yet.
    interrupt: Interrupt | None = None
    #: Why there is no report; empty where there is one, or none was asked for.
    unwritten: str = ""


KIT = pytest.StashKey[Kit]()
_GATE = pytest.StashKey[tuple[str, str]]()
_KNOWN = pytest.StashKey[KnownFailure]()
#: A standard test that somebody answered for, skipped, or that lacks its environment.
_TAMPERED = pytest.StashKey[bool]()
#: How many deadlines of the kit had passed before a standard test.
_PASSED = pytest.StashKey[int]()


# -- options ---------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvbaton conformance", "kvbaton: is a transport or an engine what the contract asks for?")
    group.addoption(
        "--connector", metavar="NAME", help="the connector to judge: an entry point's name, or module:object"
    )
    group.addoption(
        "--connector-option", action="append", metavar="KEY=VALUE", help="an option of that connector; repeatable"
    )
    group.addoption(
        "--connector-memory", choices=("host", "cuda"), default="host", help="where the memory is that it moves (host)"
    )
    group.addoption(
        "--connector-devices", metavar="I,J",
        help="with --connector-memory cuda: the devices that the ends lie on in turn, prefill's first (0)",
    )  # fmt: skip
    group.addoption(
        "--require-env", action="store_true", help="an environment or hardware that is absent is an error, not a skip"
    )
    group.addoption(
        "--known-failures", metavar="FILE", help="TOML file of failures that are known, each with reason and link"
    )
    group.addoption("--conformance-report", metavar="DIR", help="write the verdict there: JSON, JUnit, a page, a badge")
    group.addoption("--conformance-seed", metavar="N", type=int, default=1, help="seed of everything drawn (1)")
    group.addoption(
        "--conformance-level", choices=(*LEVELS, "all"), default="all", help="run the tests of this level only"
    )
    group.addoption(
        "--conformance-partial",
        action="store_true",
        help="a selection of the standard tests is meant: no error that others did not run, and no verdict",
    )
    group.addoption(
        "--conformance-keep-going", action="store_true",
        help="go on with a class whose tests do not come back, one after the other",
    )  # fmt: skip
    # kvbaton conformance, which has started this with signals held back and says itself what has become of it; a pipe
    # ends with it
    group.addoption("--conformance-command", metavar="FD", type=int, help=argparse.SUPPRESS)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "clause(*ids): the clauses of the contract that this test proves",
        "requires(*capabilities, **values): what the running connector must declare for this test to make sense",
        "mode(name): in-process or two-processes, where the test makes sense in one of them only",
        "absent_where(reason=function): function(subject) says why the test makes no sense there, or nothing",
        "mutant(name): a defect that this test is known to find",
    ):
        config.addinivalue_line("markers", line)
    known: list[KnownFailure] = []
    if path := config.getoption("--known-failures"):
        try:
            known = read_known_failures(Path(path))
        except KnownFailuresError as error:
            raise pytest.UsageError(str(error)) from error
    command_line_devices(config)
    level = config.getoption("--conformance-level")
    config.stash[KIT] = Kit(
        LEVELS if level == "all" else (level,), config.getoption("--conformance-partial"), known, time.monotonic()
    )
    config.pluginmanager.register(_CtrlC(config), "kvbaton-conformance-ctrl-c")
    if folder := config.getoption("--conformance-report"):
        from kvbaton.cli.folder import ready
        from kvbaton.errors import SettingsError

        try:
            ready("--conformance-report", Path(folder), REPORT)
        except SettingsError as error:
            raise pytest.UsageError(str(error)) from error


def _by_command(config: pytest.Config) -> bool:
    """Whether ``kvbaton conformance`` runs this."""
    return config.getoption("--conformance-command") is not None


class _CtrlC:
    """A Ctrl-C ends the run, and is noted before the test that it came in is torn down.

    Whoever has dropped it, it is raised at the end of the phase that it came in, before anything is made of that.
    """

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._kit = config.stash[KIT]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionstart(self) -> None:
        if _by_command(self._config):  # from here on pytest ends in order
            self._interrupt().serve(self._config.getoption("--conformance-command"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def _phase(self) -> Generator[None, Any, Any]:
        try:
            return (yield)
        finally:
            if self._kit.interrupt is not None:
                self._kit.interrupt.check()

    pytest_collection = pytest_runtestloop = _phase
    pytest_runtest_setup = pytest_runtest_call = pytest_runtest_teardown = _phase

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        if item.nodeid not in self._kit.results:
            return (yield)
        with self._interrupt().heard():
            return (yield from self._phase())

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        if excinfo.type is not KeyboardInterrupt:
            return  # pytest's own way of ending a run
        kit = self._kit
        kit.interrupted = True
        if kit.interrupt is not None:
            kit.interrupt.ends = True
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        if _by_command(self._config) and reporter is not None:
            if any(result.outcome != "unrun" for result in kit.results.values()):
                reporter.write_line("")  # after its dots
            self._config.pluginmanager.unregister(reporter)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self) -> Generator[None, Any, Any]:
        if self._kit.interrupt is not None:
            self._kit.interrupt.ends = True
        return (yield)

    def _interrupt(self) -> Interrupt:
        if self._kit.interrupt is None:
            from kvbaton_conformance.interrupt import Interrupt

            self._kit.interrupt = Interrupt()
        return self._kit.interrupt


def command_line_devices(config: pytest.Config) -> tuple[int, ...]:
    """Those of ``--connector-devices``; none where it was not given.  Raises :class:`pytest.UsageError`."""
    text = config.getoption("--connector-devices")
    if text is None:
        return ()
    from kvbaton.cli.devices import devices
    from kvbaton.errors import SettingsError

    try:
        return devices("--connector-devices", text)
    except SettingsError as error:
        raise pytest.UsageError(str(error)) from error


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    # before pytest's own junit plugin is configured
    folder = config.getoption("--conformance-report")
    if folder and not getattr(config.option, "xmlpath", None):
        config.option.xmlpath = str(Path(folder) / "junit.xml")


# -- collection ------------------------------------------------------------------------------------------------------


class Refused(pytest.Collector):
    """Stands where a class would, and ends the run with the reason why that class cannot be judged."""

    reason: str = ""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        raise self.CollectError(self.reason)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and isinstance(collector, pytest.Module) and (names := _would_judge(collector.path)):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        collector.config.stash[KIT].problems.append(
            f"{collector.nodeid} skipped itself, and with it {', '.join(names)}: {reason}. Where hardware may be"
            " absent, set needs_hardware in the class"
        )
    return report


def _would_judge(path: Path) -> list[str]:
    """The classes in a test file that derive from one of the kit's, by its text: it has not been run to its end."""
    try:
        module = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return []
    if not any(_imports_the_kit(node) for node in ast.walk(module)):
        return []
    return [
        node.name for node in ast.walk(module)
        if isinstance(node, ast.ClassDef) and any(_last_name(base).endswith("Conformance") for base in node.bases)
    ]  # fmt: skip


def _imports_the_kit(node: ast.AST) -> bool:
    names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    return any(name.split(".")[0] == "kvbaton_conformance" for name in names)


def _last_name(base: ast.expr) -> str:
    return base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""


def _root() -> type | None:
    """The root class of the suite, if anything has imported it."""
    module = sys.modules.get(f"{_SUITE}.topic")
    return getattr(module, "Conformance", None)


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> Any:
    root = _root()
    if root is None:
        return None
    if isinstance(collector, pytest.Class):
        judged = collector.config.stash[KIT].judged.get(collector.obj)
        # a standard test of a level that was not asked for
        return [] if judged and name in judged.all_tests and name not in judged.tests else None
    if not (isinstance(collector, pytest.Module) and inspect.isclass(obj)) or obj.__module__.startswith(_SUITE):
        return [] if inspect.isclass(obj) and issubclass(obj, root) else None
    if issubclass(obj, root):
        reason = _judge(collector, name, obj)
    else:
        inner = [
            key for key, value in vars(obj).items()
            if inspect.isclass(value) and issubclass(value, root) and value.__qualname__ == f"{obj.__qualname__}.{key}"
        ]  # fmt: skip
        reason = f"{inner[0]} is inside of {name}, where nothing judges it: move it to the module" if inner else ""
    if reason:
        collector.config.stash[KIT].refusals.append(reason)
        refused = Refused.from_parent(collector, name=name)
        refused.reason = reason
        return refused
    return None


def _judge(collector: pytest.Module, name: str, cls: Any) -> str:
    """Take a subclass in, or say why it cannot be judged."""
    from kvbaton_conformance.subject import SubjectRefused

    kit = collector.config.stash[KIT]
    here = collector.obj
    derived = [
        other for other in vars(here).values() if inspect.isclass(other) and other is not cls and issubclass(other, cls)
    ]
    if not collector.classnamefilter(name):
        if derived or cls.__module__ != here.__name__:
            return ""  # a base of one's own
        return f"{name} would not be run, because pytest collects classes named Test...: call it Test{name}"
    if inspect.isabstract(cls):
        if derived:
            return ""
        return f"{name} is abstract, so pytest would not run it: write its {_listed(cls.__abstractmethods__)}"
    if cls.__init__ is not object.__init__:
        return f"{name} has an __init__, so pytest would not run it: set connector and connector_options on the class"
    tests = standard_tests(cls)
    if problem := _overrides(cls, tests):
        return problem
    chosen = {test: owner for test, owner in tests.items() if owner.level in kit.levels}  # type: ignore[attr-defined]
    if not tests:
        return f"{name} has no standard test: derive it from ConnectorConformance"
    unavailable, subject = "", None
    try:
        subject = cls.subject_for(collector.config)
    except SubjectRefused as error:
        hardware: str = getattr(cls, "needs_hardware", "") or error.hardware
        if not (error.unavailable and hardware):
            return f"{name}: {error}"
        unavailable = f"{hardware}: {error}"
    except Exception as error:
        return f"{name}: what it judges could not be found out: {type(error).__name__}: {error}"
    kit.judged[cls] = Judged(name, f"{collector.nodeid}::{name}", subject, chosen, tests, unavailable)
    return ""


def standard_tests(cls: type) -> dict[str, type]:
    """Name of each standard test of a class to the class of the suite that defines it."""
    tests: dict[str, type] = {}
    for base in cls.__mro__:
        if base.__module__.startswith(_SUITE):
            for name, value in vars(base).items():
                if name.startswith("test") and callable(value):
                    tests.setdefault(name, base)
    return tests


def _overrides(cls: Any, tests: dict[str, type]) -> str:
    """What a subclass changes and must not, or seems to misspell."""
    ours = {name for base in cls.__mro__ if base.__module__.startswith(_SUITE) for name in vars(base)}
    for base in cls.__mro__:
        if base.__module__.startswith(_SUITE) or base is object:
            continue
        for key, value in vars(base).items():
            name = str(key)
            if name.startswith("__") or name in cls.settable:
                continue
            if name in tests:
                return (
                    f"{cls.__name__} overrides the standard test {test_id(tests[name], name)}. A failure that is known"
                    " goes into a file: --known-failures FILE"
                )
            if name in ours:
                return f"{cls.__name__} overrides {name}, which is the kit's own; it may set {_listed(cls.settable)}"
            near = difflib.get_close_matches(name, cls.settable, n=1, cutoff=0.8)
            if near and not callable(value):
                return f"{cls.__name__} sets {name}, which nothing reads. Did you mean {near[0]}?"
    return ""


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def test_id(owner: type, name: str) -> str:
    """``topic::test_name``; the topic is the module below ``suite``."""
    return f"{owner.__module__.removeprefix(_SUITE + '.')}::{name}"


test_id.__test__ = False  # type: ignore[attr-defined]


def marks(owner: type, test: str, name: str) -> list[pytest.Mark]:
    """The kit's markers of a standard test: those that stand at its function in the suite, and nobody else's."""
    return [mark for mark in getattr(vars(owner)[test], "pytestmark", ()) if mark.name == name]


def _clauses(owner: type, test: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(str(id) for mark in marks(owner, test, "clause") for id in mark.args))


def _judged(item: pytest.Item | pytest.Metafunc) -> Judged | None:
    cls: Any = getattr(item, "cls", None)
    return item.config.stash[KIT].judged.get(cls) if cls is not None else None


def subject_of(node: pytest.Item) -> Any:
    """What the class of a running test judges."""
    judged = _judged(node)
    assert judged is not None
    return judged.subject


def processes_of(config: pytest.Config) -> Processes:
    """The peer processes of this run, started on first use and seen off at its end."""
    from kvbaton_conformance.two_process import Processes

    kit = config.stash[KIT]
    if kit.processes is None:
        kit.processes = Processes()
        kit.closers.append(kit.processes.close)
    return kit.processes


def has_failed(node: pytest.Item) -> bool:
    """Whether a running test has failed already, or was interrupted, so that what is left of it proves nothing."""
    kit = node.config.stash[KIT]
    result = kit.results.get(node.nodeid)
    return kit.interrupted or (result is not None and result.outcome == "failed")


def be_warm(node: pytest.Item) -> None:
    """Before the first test of a class: what a library keeps once per process comes now."""
    judged = _judged(node)
    assert judged is not None
    cls: Any = node.cls  # type: ignore[attr-defined]
    warm = node.config.stash[KIT].warm
    if cls not in warm:
        warm.add(cls)
        cls.warm_up(judged.subject)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    judged = _judged(metafunc)
    if judged is None or "mode" not in metafunc.fixturenames:
        return
    owner = judged.tests.get(metafunc.function.__name__)
    own = marks(owner, metafunc.function.__name__, "mode") if owner is not None else ()
    wanted = [mark.args[0] for mark in own] or ["in-process", "two-processes"]
    modes = [mode for mode in getattr(judged.subject, "modes", ()) if mode in wanted]
    metafunc.parametrize("mode", modes or wanted[:1])


def pytest_itemcollected(item: pytest.Item) -> None:
    """``-k visibility`` and ``-k T3`` select a topic and a clause."""
    judged = _judged(item)
    name = getattr(item, "originalname", item.name)
    if judged is not None and name in judged.tests:
        item.config.stash[KIT].collected[item.nodeid] = (getattr(item, "cls", object), name)
        item.extra_keyword_matches.update(judged.tests[name].__module__.removeprefix(_SUITE + ".").split("."))
        item.extra_keyword_matches.update(_clauses(judged.tests[name], name))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kit = config.stash[KIT]
    _in_order_of_topics(items)
    for item in items:
        judged = _judged(item)
        name = getattr(item, "originalname", item.name)
        if judged is None or name not in judged.tests:
            continue
        judged.seen.add(name)
        result = _result(item, judged, name)
        kit.results[item.nodeid] = result
        item.user_properties.append(("clauses", " ".join(result.clauses)))
        item.user_properties.append(("conformance_id", result.id))
        if gate := _gate(judged, name):
            item.stash[_GATE] = gate
            item.add_marker(pytest.mark.skip(reason=": ".join(gate)), append=False)
        for known in kit.known:
            if known.covers(result.id):
                known.matched.append(result.id)
                item.stash[_KNOWN] = known


def _in_order_of_topics(items: list[pytest.Item]) -> None:
    """Within a class, topics in the order in which its level lists them: the first failure is the plainest one."""
    first: dict[type, int] = {}
    keys: dict[pytest.Item, tuple[int, int, int]] = {}
    for index, item in enumerate(items):
        judged = _judged(item)
        owner = judged.tests.get(getattr(item, "originalname", item.name)) if judged else None
        if owner is None:
            keys[item] = (index, 0, index)
            continue
        cls: Any = getattr(item, "cls", None)
        keys[item] = (first.setdefault(cls, index), cls.__mro__.index(owner), index)
    items.sort(key=lambda item: keys[item])


def _result(item: pytest.Item, judged: Judged, name: str) -> Result:
    from kvbaton_conformance.report.verdict import Result

    owner = judged.tests[name]
    parameters = item.name[len(name) :]
    clauses = _clauses(owner, name)
    documentation = inspect.getdoc(getattr(owner, name)) or ""
    troubleshooting = documentation.partition("Troubleshooting:")[2].strip()
    seed = item.config.getoption("--conformance-seed")
    return Result(
        id=test_id(owner, name) + parameters, nodeid=item.nodeid, judged=judged.name,
        subject=getattr(judged.subject, "title", judged.name), level=owner.level,  # type: ignore[attr-defined]
        clauses=clauses, troubleshooting=troubleshooting,
        replay=f"{_command(item.config)} -k '{_quoted(item.name)}' --conformance-partial --conformance-seed {seed}",
    )  # fmt: skip


def _command(config: pytest.Config) -> str:
    """The command line of this run without what selects or reports."""
    words = ["pytest", *(["--pyargs"] if config.option.pyargs else []), *config.args]
    if connector := config.getoption("--connector"):
        words += ["--connector", connector]
    for pair in config.getoption("--connector-option") or ():
        words += ["--connector-option", pair]
    if (memory := config.getoption("--connector-memory")) != "host":
        words += ["--connector-memory", memory]
    if (devices := config.getoption("--connector-devices")) is not None:
        words += ["--connector-devices", devices]
    return shlex.join(words)


def _quoted(name: str) -> str:
    # -k takes words: brackets and what stands in them are its own syntax
    return " and ".join(part for part in re.split(r"[\[\]]", name) if part)


def _gate(judged: Judged, test: str) -> tuple[str, str] | None:
    """Why a standard test cannot run here: ``(absent | unavailable, reason)``."""
    if judged.unavailable:
        return "unavailable", judged.unavailable
    capabilities = getattr(judged.subject, "capabilities", None)
    owner = judged.tests[test]
    for mark in marks(owner, test, "absent_where"):
        if reason := mark.kwargs["reason"](judged.subject):
            return "absent", reason
    for mark in marks(owner, test, "requires"):
        for name in mark.args:
            if not getattr(capabilities, name):
                return "absent", f"{name} is not declared"
        for name, value in mark.kwargs.items():
            declared = getattr(capabilities, name)
            if declared != value and not (isinstance(declared, frozenset) and value in declared):
                shown = "+".join(sorted(declared)) if isinstance(declared, frozenset) else declared
                return "absent", f"{name} is declared as {shown}, not {value}"
    wanted = [mark.args[0] for mark in marks(owner, test, "mode")]
    if wanted and not set(wanted) & set(judged.subject.modes):
        reach = {"in-process": "same_process", "two-processes": "cross_process"}[wanted[0]]
        refused = getattr(judged.subject, "refused", {}).get(reach)
        return "absent", f"{reach}: {refused}" if refused else f"{reach} is not declared"
    return None


def pytest_collection_finish(session: pytest.Session) -> None:
    kit = session.config.stash[KIT]
    for judged in kit.judged.values():
        missing = [test_id(owner, name) for name, owner in judged.tests.items() if name not in judged.seen]
        if missing and not kit.partial and not session.config.option.collectonly:
            kit.problems.append(
                f"{judged.name}: {len(missing)} of {len(judged.tests)} standard tests were deselected or removed:"
                f" {_first(missing)}. To look at a part on purpose, add --conformance-partial"
            )
    kept = {item.nodeid for item in session.items}
    # of a test that is still there some of its runs: a mode, a parameter
    parts = [
        node for node, (cls, name) in kit.collected.items()
        if node not in kept and cls in kit.judged and name in kit.judged[cls].seen
    ]  # fmt: skip
    if parts and not kit.partial and not session.config.option.collectonly:
        kit.problems.append(
            f"{len(parts)} runs of standard tests were deselected or removed: {_first(parts)}. To look at a part on"
            " purpose, add --conformance-partial"
        )
    if not kit.judged:
        return
    everything = {test_id(owner, name) for judged in kit.judged.values() for name, owner in judged.all_tests.items()}
    selected = {test_id(owner, name) for judged in kit.judged.values() for name, owner in judged.tests.items()}
    for known in kit.known:
        base = known.test.split("[")[0]
        beyond_this_level = base in everything and base not in selected
        if not known.matched and not beyond_this_level and not (kit.partial and base in everything):
            near = difflib.get_close_matches(base, everything, n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            kit.problems.append(f"known failure {known.test} matches no test.{hint}")


def _first(names: list[str], count: int = 5) -> str:
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def pytest_report_collectionfinish(config: pytest.Config) -> list[str]:
    kit = config.stash[KIT]
    if not kit.judged:
        return []
    from kvbaton_conformance.subject import versions

    lines = [f"conformance: {versions()}"]
    for judged in kit.judged.values():
        if judged.subject is not None:
            lines += [f"conformance: {line}" for line in judged.subject.header()]
    return [*lines, f"conformance: seed {config.getoption('--conformance-seed')}, levels {', '.join(kit.levels)}"]


# -- running ---------------------------------------------------------------------------------------------------------


def _bounded(item: pytest.Item) -> Generator[None, None, None]:
    if item.nodeid not in item.config.stash[KIT].results:
        return (yield)
    from kvbaton_conformance.deadline import deadline

    with deadline(TEST_BOUND):  # most connectors that block do so in connect() or close()
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, None, None]:
    judged = _judged(item)
    if judged is not None and item.nodeid in item.config.stash[KIT].results:
        from kvbaton_conformance.deadline import passed

        if judged.given_up and _GATE not in item.stash:
            item.stash[_GATE] = ("unrun", judged.given_up)
            item.add_marker(pytest.mark.skip(reason=judged.given_up), append=False)
        item.stash[_PASSED] = passed()
    return (yield from _bounded(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    return (yield from _bounded(item))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    if item.nodeid not in item.config.stash[KIT].results:
        return (yield)
    from kvbaton_conformance.deadline import deadline

    test, entered = item.obj, []  # type: ignore[attr-defined]

    def run(**given: Any) -> Any:
        entered.append(True)
        return test(**given)

    item.obj = run  # type: ignore[attr-defined]
    try:
        with deadline(TEST_BOUND):
            result = yield
    finally:
        item.obj = test  # type: ignore[attr-defined]
    if not entered:
        item.stash[_TAMPERED] = True
        raise RuntimeError("something else than pytest answered for a standard test, whose body did not run")
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    kit = item.config.stash[KIT]
    result = kit.results.get(item.nodeid)
    if result is None:
        return report
    result.seconds += report.duration
    raised = call.excinfo is not None and not isinstance(call.excinfo.value, pytest.skip.Exception)
    if raised and not report.failed:
        # what was raised counts, whatever somebody else has made of the report
        item.stash[_TAMPERED] = True
        report.outcome = "failed"
        report.longrepr = f"{result.id} failed, and something else than the kit reported otherwise: {call.excinfo}"
    if report.failed:
        _failed(report, call, result)
        _tell_events(item, report, result)
        if result.replay:
            report.sections.append(("to replay it", result.replay))
    elif report.skipped:
        gate = item.stash.get(_GATE, None)
        if gate is None:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            item.stash[_TAMPERED] = True
            report.outcome = "failed"
            report.longrepr = f"{result.id} is a standard test, and something else than the kit skipped it: {reason}"
            result.outcome, result.message = "failed", report.longrepr
        elif gate[0] == "unavailable" and item.config.getoption("--require-env"):
            item.stash[_TAMPERED] = True
            report.outcome = "failed"
            report.longrepr = f"--require-env: {result.id} needs what is not here: {gate[1]}"
            result.outcome, result.message = "failed", report.longrepr
        else:
            result.outcome, result.message = gate  # type: ignore[assignment]
    elif report.when == "call":
        result.outcome = "passed"
    known = item.stash.get(_KNOWN, None)
    # what the kit says of how the test was run is no failure of what is judged
    if known is not None and not item.stash.get(_TAMPERED, False):
        _known(report, result, known)
    if report.when == "teardown":
        _count_stuck(item, result)
    return report


def _count_stuck(item: pytest.Item, result: Result) -> None:
    """After a test: give up its class where too many in a row did not come back."""
    judged = _judged(item)
    if judged is None or result.outcome not in ("passed", "failed"):
        return  # what is known or absent is no news of the class
    from kvbaton_conformance.deadline import passed

    came_back = result.outcome == "passed" or passed() == item.stash.get(_PASSED, passed())
    judged.stuck = 0 if came_back else judged.stuck + 1
    if judged.stuck == STUCK_BOUND and not item.config.getoption("--conformance-keep-going"):
        flag = "--keep-going" if _by_command(item.config) else "--conformance-keep-going"
        judged.given_up = f"{STUCK_BOUND} tests in a row did not come back; {flag} runs the others as well"


def _failed(report: pytest.TestReport, call: pytest.CallInfo[None], result: Result) -> None:
    from kvbaton_conformance.clauses import ClauseBroken, clauses, leading_clause

    error = call.excinfo.value if call.excinfo is not None else None
    while isinstance(error, BaseExceptionGroup) and error.exceptions:
        error = error.exceptions[0]
    message = str(error) if error is not None and str(error) else f"{type(error).__name__} without a message"
    if result.outcome == "failed":  # its teardown adds to what its call has found
        result.message += f"\n\nand in {report.when}: {message}"
        return
    result.outcome = "failed"
    clause = leading_clause(message)
    if clause is None:
        clause = result.clauses[0] if result.clauses else ""
        message = f"{clause}: could not be judged, {report.when} raised {type(error).__name__}: {message}"
    result.message, result.broken = message, clause
    if isinstance(error, ClauseBroken):
        result.expected, result.seen, result.look = error.expected, error.seen, error.look
    if clause in clauses():
        report.sections.append((f"{clause} says", clauses()[clause].text))
    if result.troubleshooting:
        report.sections.append(("troubleshooting", result.troubleshooting))


def _tell_events(item: pytest.Item, report: pytest.TestReport, result: Result) -> None:
    """What each end has heard, unless the message has it already."""
    if report.when != "call":
        return
    ends: Any = getattr(item, "funcargs", {}).get("ends")
    stories = [end.story() for end in getattr(ends, "opened", ())]
    result.events = "\n".join(story for story in stories if story not in result.message)
    if result.events:
        report.sections.append(("what each end has heard", result.events))


def _known(report: pytest.TestReport, result: Result, known: KnownFailure) -> None:
    """Strict: any phase may fail as known, and one must."""
    if report.failed:
        report.outcome = "skipped"
        report.wasxfail = f"{known.reason} ({known.link})"
        result.outcome = "known"
        result.message = f"{known.reason} ({known.link}): {result.message}"
    elif report.when == "teardown" and result.outcome == "passed":
        report.outcome = "failed"
        report.longrepr = (
            f"{result.id} is a known failure ({known.reason}, {known.link}), and passed: take it out of the file"
        )
        result.outcome, result.message = "failed", report.longrepr


# -- the verdict -----------------------------------------------------------------------------------------------------


@pytest.hookimpl(wrapper=True, trylast=True)  # within that of the terminal, which shows what is found here
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Generator[None, Any, Any]:
    kit = session.config.stash[KIT]
    if not kit.interrupted:
        kit.problems += _close(kit)
        kit.interrupted = kit.interrupt is not None and kit.interrupt.seen  # while that was closed
        _conclude(session, exitstatus)
        return (yield from _with_files(session))
    from kvbaton_conformance.deadline import deadline

    _conclude(session, exitstatus)
    try:
        with deadline(INTERRUPTED_BOUND):
            return (yield from _with_files(session))  # pytest tears down the test that was interrupted
    except Exception:
        return []  # what is wrong after half a test is nobody's fault
    finally:
        _close(kit)


def _with_files(session: pytest.Session) -> Generator[None, Any, Any]:
    """What pytest does at the end, which writes a file of the report."""
    try:
        return (yield)
    except OSError as error:
        if not session.config.getoption("--conformance-report"):
            raise
        _not_written(session, error)
        return []


def _not_written(session: pytest.Session, error: OSError) -> None:
    from kvbaton.cli.folder import refused

    flag = "--report" if _by_command(session.config) else "--conformance-report"
    folder = Path(session.config.getoption("--conformance-report"))
    kit = session.config.stash[KIT]
    kit.unwritten = kit.unwritten or str(refused(flag, folder, error))
    session.exitstatus = pytest.ExitCode.USAGE_ERROR
    for name in REPORT:  # half a report is none
        with contextlib.suppress(OSError):
            (folder / name).unlink()


def _close(kit: Kit) -> list[str]:
    problems = [problem for close in kit.closers for problem in close()]
    kit.closers.clear()
    return problems


def _conclude(session: pytest.Session, exitstatus: int) -> None:
    """What the run as a whole has shown: its exit status and its report."""
    kit = session.config.stash[KIT]
    if _nothing_to_judge(session.config, exitstatus):
        return
    if not kit.results or session.config.option.collectonly:
        if kit.judged and not session.config.option.collectonly:
            # before all that follows from it
            kit.problems.insert(0, _nothing_matches(kit, session.config.option.keyword) or "no standard test ran")
        if kit.problems and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        return
    if not kit.partial and not kit.interrupted:
        kit.problems += _mandatory(kit)
    unrun = [result.id for result in kit.results.values() if result.outcome == "unrun" and not result.message]
    for judged in kit.judged.values():
        if judged.given_up:
            left = sum(
                result.outcome == "unrun" and result.nodeid.startswith(judged.nodeid + "::")
                for result in kit.results.values()
            )
            kit.problems.append(f"{judged.name}: {left} standard tests were not run, because {judged.given_up}")
    if unrun:
        ended = "was interrupted" if kit.interrupted else "ended"
        kit.problems.append(f"the run {ended} before {len(unrun)} standard tests had run: {_first(unrun)}")
    if (kit.problems or any(result.outcome == "failed" for result in kit.results.values())) and exitstatus in (
        pytest.ExitCode.OK,
        pytest.ExitCode.NO_TESTS_COLLECTED,
    ):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    if folder := session.config.getoption("--conformance-report"):
        try:
            _write(Path(folder), _verdict(session.config))
        except OSError as error:
            _not_written(session, error)


def _nothing_matches(kit: Kit, selection: str) -> str:
    """That there were tests and ``-k`` matched none of them, and what it takes; empty where that is not so."""
    if not selection or not kit.collected:
        return ""
    from kvbaton.errors import closest

    words: set[str] = set()
    for cls, name in kit.collected.values():
        owner = kit.judged[cls].tests[name]
        words.update(owner.__module__.removeprefix(_SUITE + ".").split("."), _clauses(owner, name))
    return (
        f'no standard test matches -k "{selection}".{closest(selection, words)} It takes a topic such as visibility, a'
        ' clause such as T3, or a part of a test\'s name, and "and", "or", "not" between them'
    )


def _nothing_to_judge(config: pytest.Config, exitstatus: int) -> bool:
    """No standard test has run, for a cause that is said by whoever has ended the run and is all there is to say: a
    class that could not be judged, a setting that pytest does not know, Ctrl-C.
    """
    kit = config.stash[KIT]
    if kit.interrupted and _by_command(config):
        return True
    ended = exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    return bool(kit.refusals or (ended and kit.results)) and all(
        result.outcome == "unrun" for result in kit.results.values()
    )


def _mandatory(kit: Kit) -> list[str]:
    """Mandatory clauses that nothing has tried."""
    from kvbaton_conformance.clauses import MANDATORY

    problems = []
    for judged in kit.judged.values():
        if judged.unavailable or judged.given_up:
            continue
        levels = {owner.level for owner in judged.tests.values()}  # type: ignore[attr-defined]
        tried: dict[str, set[str]] = {}
        for result in kit.results.values():
            if result.nodeid.startswith(judged.nodeid + "::"):
                for clause in result.clauses:
                    tried.setdefault(clause, set()).add(result.outcome)
        for level in sorted(levels):
            seen = {clause: tried.get(clause, set()) & {"passed", "failed", "known"} for clause in MANDATORY[level]}
            if missing := [clause for clause, outcomes in seen.items() if not outcomes]:
                problems.append(f"{judged.name}: no test of a mandatory clause ran: {', '.join(missing)} ({level})")
            if excused := [clause for clause, outcomes in seen.items() if outcomes == {"known"}]:
                problems.append(
                    f"{judged.name}: known failures excuse tests, not a mandatory clause of which no test passes:"
                    f" {', '.join(excused)} ({level})"
                )
    return problems


def _verdict(config: pytest.Config) -> Verdict:
    from kvbaton_conformance.report.verdict import Verdict
    from kvbaton_conformance.subject import versions

    kit = config.stash[KIT]
    subjects = tuple(dict.fromkeys(result.subject for result in kit.results.values())) or tuple(
        dict.fromkeys(getattr(judged.subject, "title", judged.name) for judged in kit.judged.values())
    )
    header = [versions()]
    for judged in kit.judged.values():
        if judged.subject is not None:
            header += judged.subject.header()
    return Verdict(
        subjects, tuple(dict.fromkeys(header)), list(kit.results.values()), list(dict.fromkeys(kit.problems)),
        kit.partial, time.monotonic() - kit.started,
        next((judged.given_up for judged in kit.judged.values() if judged.given_up), ""),
    )  # fmt: skip


def _write(folder: Path, verdict: Verdict) -> None:
    content = {
        "verdict": verdict.sentence, "conforms": verdict.conforms, "partial": verdict.partial, "tried": verdict.tried,
        "subjects": verdict.subjects,
        "environment": verdict.header, "problems": verdict.problems, "seconds": round(verdict.seconds, 2),
        "clauses": [{"id": row.id, "verdict": row.word, **row.counts} for row in verdict.rows],
        "tests": [asdict(result) for result in verdict.results],
    }  # fmt: skip
    from kvbaton_conformance.report.page import badge, page

    (folder / "conformance.html").write_text(page(verdict), encoding="utf-8")
    (folder / "badge.md").write_text(badge(verdict), encoding="utf-8")
    # at last, since what reads it takes it for a whole report
    (folder / "conformance.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config) -> None:
    kit = config.stash[KIT]
    if _nothing_to_judge(config, exitstatus) or not (kit.results or kit.problems):
        return
    from kvbaton_conformance.report.verdict import OUTCOMES

    verdict = _verdict(config)
    write = terminalreporter.write_line
    terminalreporter.section("kvbaton conformance")
    if verdict.results:
        write(f"{'clause':8}{'verdict':16}" + "".join(f"{word:>12}" for word in OUTCOMES))
    for row in verdict.rows:
        colour = {"BROKEN": {"red": True}, "holds": {"green": True}}.get(row.word, {"yellow": True})
        write(f"{row.id:8}{row.word:16}" + "".join(f"{row.counts[word] or '':>12}" for word in OUTCOMES), **colour)
    for reason in verdict.reasons:
        write(reason)
    for problem in verdict.problems:
        if not (problem in verdict.sentence and verdict.subjects and not verdict.results):  # that line says it all
            write(f"error: {problem}", red=True)
    bad = bool(verdict.problems or verdict.count("failed"))
    write(verdict.sentence, bold=True, green=verdict.conforms, red=bad)
    if kit.unwritten:
        write(f"error: {kit.unwritten}", red=True)
