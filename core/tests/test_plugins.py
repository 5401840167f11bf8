"""Choosing a plugin, against real distributions: dist-info folders on ``sys.path``, as an installer leaves them."""

import itertools
import json
import logging
import sys
import threading
from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict

from kvbaton import plugins
from kvbaton.connector import API_VERSION, Availability, Capabilities, Need, wire_version
from kvbaton.errors import (
    ConfigurationError,
    EngineNotFound,
    OptionsError,
    PluginBroken,
    PluginConflict,
    PluginUnavailable,
    TransportNotFound,
)
from kvbaton.plugins import choose_connector, choose_engine, choose_placement, list_plugins
from kvbaton.runtime import PDRuntime
from kvbaton.settings import EngineSettings, TransportSettings, load

PROCESS = Need("host", "cross_process")
_serial = itertools.count()

CONNECTOR = """
from pydantic import BaseModel, ConfigDict
from kvbaton.connector import Availability, Capabilities

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    latency: float = 0.0
    rails: list[str] = []

class Plugin:
    name = {name!r}
    api_version = {version}
    Options = Options
    def probe(self, need):
        able = Capabilities(same_process=True, cross_process={cross}, quiet={quiet!r})
        return Availability({usable}, {reason!r}, {remedy!r}, able)
    def open(self, options, context):
        raise AssertionError("choosing opened a connector")

plugin = Plugin()
"""


class Installed:
    """A private site folder: nothing else that is installed offers a plugin."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def distribution(self, name: str, group: str, entries: dict[str, str], version: str = "1.2") -> Path:
        info = self.folder / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        lines = "".join(f"{entry} = {value}\n" for entry, value in entries.items())
        (info / "entry_points.txt").write_text(f"[{group}]\n{lines}")
        return info

    def module(self, text: str) -> str:
        name = f"plugin_under_test_{next(_serial)}"
        (self.folder / f"{name}.py").write_text(text)
        return name

    def connector(self, name: str, distribution: str | None = None, **how: object) -> str:
        facts = {"version": API_VERSION, "cross": False, "usable": True, "reason": "", "remedy": "", "quiet": "exact"}
        module = self.module(CONNECTOR.format(name=name, **{**facts, **how}))
        self.distribution(distribution or f"dist-{name}", "kvbaton.connectors", {name: f"{module}:plugin"})
        return f"{module}:plugin"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    real = plugins.entry_points

    def only_here(**params):
        found = real(**params)
        return [entry for entry in found if entry.dist is not None and entry.dist.locate_file("") == folder]

    monkeypatch.setattr(plugins, "entry_points", only_here)
    return Installed(folder)


def refusal(kind, *args):
    with pytest.raises(kind) as caught:
        choose_connector(*args)
    assert isinstance(caught.value, ConfigurationError)  # the command line exits with 2
    assert "\n" not in str(caught.value)
    return caught.value


# -- by name, by path, as an instance ----------------------------------------------------------------------------------


def test_a_connector_is_chosen_by_its_entry_point_and_its_options_are_validated(installed):
    installed.connector("mine")
    plugin, options = choose_connector(TransportSettings(name="mine", options={"latency": "0.5"}), Need())
    assert plugin.name == "mine"
    assert options.latency == 0.5


def test_an_option_that_is_a_list_may_come_as_text(installed):
    installed.connector("mine")
    _, options = choose_connector("mine", Need(), {"rails": '["a", "b"]'})
    assert options.rails == ["a", "b"]


def test_a_connector_is_chosen_by_module_and_object(installed):
    path = installed.connector("mine")
    plugin, _ = choose_connector(path, Need())
    assert plugin.name == "mine"


def test_an_instance_is_accepted_wherever_a_name_is(installed):
    path = installed.connector("mine")
    instance, options = choose_connector(path, Need(), {"latency": 1})
    again, same = choose_connector(instance, Need(), options)
    assert again is instance
    assert same is options


@pytest.mark.clause("T2")
def test_the_version_of_a_wire_is_also_that_which_a_wrapping_plugin_passes_on():
    class Inner:
        wire_version = 3

    class Wrapping:
        def __getattr__(self, name):
            return getattr(Inner, name)

    assert [wire_version(plugin) for plugin in (Inner(), Wrapping(), object())] == ["3", "3", "1"]


def test_a_reinstall_is_seen_at_once_and_stevedores_cache_is_not_touched(installed, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    refusal(TransportNotFound, "late", Need())
    installed.connector("late")
    assert choose_connector("late", Need())[0].name == "late"
    assert not (tmp_path / "cache").exists()


# -- not found ---------------------------------------------------------------------------------------------------------


def test_an_unknown_name_lists_what_is_installed_the_closest_match_and_the_first_party_commands(installed):
    installed.connector("nixl", "kvbaton-nixl")
    error = refusal(TransportNotFound, "nixxl", Need())
    assert str(error) == (
        'no transport "nixxl". Installed: nixl (kvbaton-nixl 1.2). Did you mean "nixl"? First-party transports:'
        " pip install kvbaton-loopback, pip install kvbaton-cuda-ipc"
    )
    assert error.name == "nixxl"
    assert error.installed == ("nixl",)


def test_a_name_that_resembles_nothing_still_gets_the_closest(installed):
    installed.connector("loopback", "kvbaton-loopback")
    assert 'The closest is "loopback".' in str(refusal(TransportNotFound, "nope", Need()))


def test_a_first_party_name_that_is_not_installed_says_how_to_install_it(installed):
    error = refusal(TransportNotFound, "loopback", Need())
    assert str(error) == 'no transport "loopback". Installed: none. Install it: pip install kvbaton-loopback'
    assert 'Did you mean "loopback"?' in str(refusal(TransportNotFound, "loop-back", Need()))


def test_an_unknown_engine(installed):
    with pytest.raises(EngineNotFound) as caught:
        choose_engine("transformer")
    assert str(caught.value) == (
        'no engine "transformer". Installed: none. Did you mean "transformers"? First-party engines:'
        " pip install kvbaton-transformers"
    )


# -- broken ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("import there_is_no_such_library\n", ModuleNotFoundError),
        ("assert False, 'refuses'\n", AssertionError),  # stevedore lets this one through
        ("raise SystemExit(3)\n", SystemExit),
        ("other = 1\n", AttributeError),
    ],
    ids=["import", "assertion", "exit", "attribute"],
)
def test_a_plugin_whose_import_fails_is_named_with_its_distribution_and_the_cause(installed, text, cause):
    module = installed.module(text)
    installed.distribution("broken-dist", "kvbaton.connectors", {"broken": f"{module}:plugin"}, "3.4")
    error = refusal(PluginBroken, "broken", Need())
    assert str(error).startswith(f'transport "broken" of broken-dist 3.4 cannot be imported ({module}:plugin): ')
    assert cause.__name__ in str(error)
    assert isinstance(error.__cause__, cause)
    assert error.distribution == "broken-dist 3.4"


def test_a_path_that_leads_nowhere():
    error = refusal(PluginBroken, "no_such_module_anywhere:plugin", Need())
    assert str(error).startswith('transport "no_such_module_anywhere:plugin" cannot be imported: ModuleNotFoundError')
    assert isinstance(error.__cause__, ModuleNotFoundError)
    assert "AttributeError" in str(refusal(PluginBroken, "json:plugin", Need()))


def test_what_is_no_plugin_says_what_it_lacks():
    class Half:
        name = "half"
        api_version = API_VERSION

    error = refusal(PluginBroken, Half(), Need())
    assert str(error) == "transport half is no transport plugin: Half has no Options, probe, open"
    assert "is a class, Half: name an instance of it" in str(refusal(PluginBroken, Half, Need()))


def test_a_plugin_for_another_version_of_the_protocol(installed):
    installed.connector("old", version=99)
    error = refusal(PluginBroken, "old", Need())
    assert f"was made for version 99 of the transport interface, and this kvbaton has version {API_VERSION}" in str(
        error
    )
    assert "dist-old 1.2" in str(error)


def test_two_distributions_that_claim_one_name(installed):
    first = installed.connector("same", "first-dist")
    second = installed.connector("same", "second-dist")
    error = refusal(PluginConflict, "same", Need())
    assert 'transport "same" is claimed more than once' in str(error)
    for fact in ("first-dist 1.2", "second-dist 1.2", first, second, "Uninstall all but one"):
        assert fact in str(error)
    assert error.distributions == ("first-dist 1.2", "second-dist 1.2")
    assert choose_connector(second, Need())[0].name == "same"  # the way out that the message names


# -- options -----------------------------------------------------------------------------------------------------------


def test_an_unknown_option_lists_the_options_and_the_closest(installed):
    installed.connector("mine")
    error = refusal(OptionsError, TransportSettings(name="mine", options={"latncy": 1}), Need())
    assert str(error) == (
        'transport mine (dist-mine 1.2) has no option "latncy". Did you mean "latency"? Options: latency, rails.'
    )
    assert error.option == "latncy"


def test_a_bad_value_of_an_option(installed):
    installed.connector("mine")
    error = refusal(OptionsError, "mine", Need(), {"latency": "slow"})
    assert str(error) == "transport mine (dist-mine 1.2): transport.options.latency = 'slow': must be a number"
    assert "options must be a table" in str(refusal(OptionsError, "mine", Need(), 7))


class Lax(BaseModel):
    """A plugin author who forgot ``extra="forbid"``."""

    knob: int


class Instance:
    name = "instance"
    api_version = API_VERSION
    Options: type[BaseModel] = Lax

    def __init__(self, answer: Availability | BaseException) -> None:
        self.answer = answer

    def probe(self, need):
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer

    def open(self, options, context):
        raise AssertionError("choosing opened a connector")


def test_an_option_nobody_reads_is_an_error_even_where_the_plugin_forgot_to_forbid_it():
    instance = Instance(Availability(True))
    assert 'has no option "nob". Did you mean "knob"?' in str(
        refusal(OptionsError, instance, Need(), {"nob": 1, "knob": 1})
    )
    assert "transport.options.knob: is required" in str(refusal(OptionsError, instance, Need(), {}))


def test_options_for_an_unnamed_transport_are_refused(installed):
    installed.connector("mine")
    error = refusal(OptionsError, TransportSettings(options={"latency": 1}), Need())
    assert "transport.name is auto: name the transport" in str(error)


# -- availability ------------------------------------------------------------------------------------------------------


class Plain(Instance):
    class Options(BaseModel):
        model_config = ConfigDict(extra="forbid")


def test_an_unusable_transport_gives_its_reason_and_the_remedy(installed):
    installed.connector("mine", usable=False, reason="libfoo.so is missing", remedy="apt install libfoo")
    error = refusal(PluginUnavailable, "mine", Need())
    assert str(error) == "transport mine (dist-mine 1.2) cannot be used here: libfoo.so is missing: apt install libfoo"
    assert (error.reason, error.remedy) == ("libfoo.so is missing", "apt install libfoo")


def test_a_transport_within_one_process_says_so_in_one_clear_line(installed):
    installed.connector("loopback", "kvbaton-loopback", usable=False, reason="no")
    error = refusal(PluginUnavailable, "loopback", PROCESS)
    assert str(error) == (
        "transport loopback (kvbaton-loopback 1.2) works only within one process, and"
        ' stages.launch = "process" puts each stage in a process of its own:'
        ' set stages.launch = "inproc" or choose another transport'
    )
    assert error.capability == "cross_process"


def test_what_is_not_reached_or_not_moved():
    only_cross = Plain(Availability(True, capabilities=Capabilities(cross_process=True)))
    assert 'set stages.launch = "process"' in str(refusal(PluginUnavailable, only_cross, Need()))
    assert "does not reach cross-host" in str(refusal(PluginUnavailable, only_cross, Need("host", "cross_host")))
    # memory comes first: how stages are launched is easily changed
    for reach in ("same_process", "cross_process"):
        error = refusal(PluginUnavailable, only_cross, Need("cuda", reach))
        assert "moves host memory only, and cuda memory is asked for" in str(error)
    assert "use host memory (no stages.devices) or choose another transport" in str(error)


@pytest.mark.parametrize("raised", [OSError("no such device"), SystemExit("no such device")])
def test_a_probe_that_raises_is_the_plugins_fault(raised):
    error = refusal(PluginBroken, Plain(raised), Need())
    assert f"its probe failed, which it must never do: {type(raised).__name__}: no such device" in str(error)
    assert error.__cause__ is raised


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "returned a NoneType and no Availability"),
        ("yes", "returned a str and no Availability"),
        (Availability(True, capabilities="all"), "capabilities are a str and no Capabilities"),
        (Availability(True, capabilities=Capabilities(quiet="always")), "quiet is 'always' and none of exact, "),
        (Availability(False, reason=b"no"), "reason is a bytes and no str"),
        (Availability(False, remedy=7), "remedy is a int and no str"),
    ],
    ids=["nothing", "text", "capabilities", "quiet", "reason", "remedy"],
)
def test_a_probe_that_answers_with_what_is_no_answer_is_the_plugins_fault(installed, caplog, answer, says):
    error = refusal(PluginBroken, Plain(answer), Need())
    assert "its probe is wrong: " in str(error)
    assert says in str(error)
    # and it keeps nobody from another
    installed.connector("a-wrong")
    plugin, _ = choose_connector("a-wrong", Need())
    plugin.probe = lambda need: answer
    installed.connector("near")
    with caplog.at_level(logging.INFO, "kvbaton"):
        assert choose_connector("auto", Need())[0].name == "near"
    assert says in caplog.text
    assert [says in row.reason for row in list_plugins() if row.name == "a-wrong"] == [True]


# -- auto --------------------------------------------------------------------------------------------------------------


def test_auto_takes_the_one_that_proves_most_and_logs_each_candidate(installed, caplog):
    installed.connector("careless", quiet="never")
    installed.connector("exact")
    installed.connector("gone", usable=False, reason="libgone is missing")
    broken = installed.module("import there_is_no_such_library")
    installed.distribution("broken-dist", "kvbaton.connectors", {"broken": f"{broken}:plugin"})

    with caplog.at_level(logging.INFO):
        plugin, _ = choose_connector("auto", Need())

    assert plugin.name == "exact"
    assert "exact (dist-exact 1.2) is chosen" in caplog.text
    assert "careless (dist-careless 1.2) is usable; exact (dist-exact 1.2) is preferred" in caplog.text
    assert "gone (dist-gone 1.2) cannot be used here: libgone is missing" in caplog.text
    assert '"broken" of broken-dist 1.2 cannot be imported' in caplog.text


def test_auto_does_not_depend_on_the_order_of_installation(installed):
    for name in ("zeta", "alpha", "loopback", "nixl"):
        installed.connector(name)
    assert choose_connector("auto", Need())[0].name == "loopback"


def test_auto_takes_of_those_that_prove_as_much_the_one_that_was_measured_to_be_fastest(installed):
    installed.connector("third", quiet="peer_death", copies_in_submit=False, revocable=True)
    for name, copies in (("ucx", False), ("nixl", True), ("cuda_ipc", False)):
        installed.connector(name, quiet="peer_death", copies_in_submit=copies, revocable=name == "ucx")
    assert choose_connector("auto", Need())[0].name == "cuda_ipc"
    installed.connector("careful", quiet="exact", copies_in_submit=True)
    assert choose_connector("auto", Need())[0].name == "careful"


def test_auto_without_a_usable_transport_gives_every_reason(installed):
    installed.connector("loopback", "kvbaton-loopback")
    error = refusal(PluginUnavailable, "auto", PROCESS)
    assert str(error).startswith("no installed transport can move host memory cross process. transport loopback")
    assert "works only within one process" in str(error)
    assert str(error).endswith("Others: pip install kvbaton-cuda-ipc or kvbaton-nixl")


def test_auto_with_nothing_installed(installed):
    assert "Installed: none" in str(refusal(TransportNotFound, "auto", Need()))


# -- placement ---------------------------------------------------------------------------------------------------------


def settings(**overrides):
    return load(None, {"model": "m", **overrides})[0]


def test_launch_auto_follows_what_the_transport_reaches(installed):
    installed.connector("near")
    installed.connector("far", cross=True)
    near = choose_placement(settings(transport={"name": "near"}))
    far = choose_placement(settings(transport={"name": "far"}))
    assert (near.launch, near.need.reach) == ("inproc", "same_process")
    assert (far.launch, far.need.reach) == ("process", "cross_process")
    assert choose_placement(settings()).plugin.name == "far"
    assert choose_placement(settings(transport={"name": "far"}, stages={"launch": "inproc"})).launch == "inproc"


def test_launch_process_over_a_transport_within_one_process_is_refused(installed):
    installed.connector("loopback", "kvbaton-loopback")
    with pytest.raises(PluginUnavailable, match="works only within one process"):
        choose_placement(settings(transport={"name": "loopback"}, stages={"launch": "process"}))


def test_under_launch_auto_the_cause_is_not_a_launch_that_nobody_asked_for(installed):
    far = Plain(Availability(False, capabilities=Capabilities(cross_process=True, memory_kinds=frozenset({"cuda"}))))
    near = Plain(Availability(False, "it is broken", capabilities=Capabilities(same_process=True)))
    with pytest.raises(PluginUnavailable, match="moves cuda memory only"):
        choose_placement(settings(), far)
    with pytest.raises(PluginUnavailable, match="it is broken"):
        choose_placement(settings(), near)


def test_an_instance_takes_the_place_of_the_name(installed):
    instance = Plain(Availability(True, capabilities=Capabilities(same_process=True)))
    placement = choose_placement(settings(), instance)
    assert placement.plugin is instance
    assert placement.launch == "inproc"


def test_device_memory_is_asked_for_where_stages_have_devices(installed):
    installed.connector("near")
    with pytest.raises(PluginUnavailable, match="moves host memory only"):
        choose_placement(settings(transport={"name": "near"}, stages={"devices": "0,1"}))


# -- engines -----------------------------------------------------------------------------------------------------------

ENGINE = """
from pydantic import BaseModel, ConfigDict, Field

class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    block_tokens: int = Field(16, ge=1, description="Tokens per block.")

class Plugin:
    name = "toy"
    api_version = 1
    Options = Options
    def check(self, model, options): ...
    def tokenizer(self, model, options): ...
    def open(self, model, options, role, device): ...

plugin = Plugin()
"""


@pytest.fixture
def toy(installed):
    installed.distribution("toy-engine", "kvbaton.engines", {"toy": f"{installed.module(ENGINE)}:plugin"})
    return installed


def test_an_engine_is_chosen_and_its_options_validated(toy):
    plugin, options = choose_engine(EngineSettings(name="toy", options={"block_tokens": "8"}))
    assert plugin.name == "toy"
    assert options.block_tokens == 8


@pytest.mark.parametrize(
    ("said", "meant"), [("block_size", "block_tokens"), ("page_size", "block_tokens"), ("block_tokns", "block_tokens")]
)
def test_an_option_by_another_engines_name_leads_to_ours(toy, said, meant):
    with pytest.raises(OptionsError, match=f'has no option "{said}". Did you mean "{meant}"?'):
        choose_engine("toy", {said: 16})


@pytest.mark.parametrize("transport", [{"name": "absent"}, {"name": "mine", "options": {"latancy": 1}}])
def test_a_misspelt_transport_is_found_before_the_engine_looks_at_the_model(toy, monkeypatch, transport):
    """An engine imports a framework for that, which takes seconds."""
    toy.connector("mine")
    plugin, _ = choose_engine("toy")
    monkeypatch.setattr(plugin, "check", lambda *_: pytest.fail("the engine was asked"))
    with pytest.raises((TransportNotFound, OptionsError)):
        PDRuntime.start(settings(engine={"name": "toy"}, transport=transport))


def test_a_block_size_of_zero_and_one_that_is_no_number(toy):
    for value, says in ((0, "must be at least 1"), ("many", "must be a whole number")):
        with pytest.raises(OptionsError) as caught:
            choose_engine("toy", {"block_tokens": value})
        assert f"engine toy (toy-engine 1.2): engine.options.block_tokens = {value!r}: {says}" == str(caught.value)


# -- the list ----------------------------------------------------------------------------------------------------------


def test_the_list_tells_why_a_transport_cannot_do_what_it_was_made_for(installed):
    """And not that it does not do what it never does, which comes first."""
    text = CONNECTOR.format(
        name="far", version=API_VERSION, cross=True, usable=False, reason="", remedy="", quiet="exact"
    )
    text = text.replace("Capabilities(", 'Capabilities(memory_kinds=frozenset({"cuda"}), ', 1)
    text = text.replace("Availability(False, '',", "Availability(False, f'{need.memory_kind} {need.reach}',")
    text = text.replace("same_process=True", "same_process=False")
    installed.distribution("dist-far", "kvbaton.connectors", {"far": f"{installed.module(text)}:plugin"})
    (row,) = list_plugins()
    assert row.reason == "cuda cross_process"


def test_the_list_shows_every_plugin_and_says_what_is_wrong_with_the_broken(toy):
    toy.connector("near")
    toy.connector("gone", usable=False, reason="libgone is missing", remedy="install libgone")
    toy.connector("same", "first-dist")
    toy.connector("same", "second-dist")
    toy.distribution("b-dist", "kvbaton.connectors", {"broken": f"{toy.module('raise SystemExit(1)')}:plugin"})
    toy.distribution("h-dist", "kvbaton.hooks", {"watcher": toy.module("def kvbaton_milestone(at): ...\n")})
    toy.distribution("m-dist", "kvbaton.hooks", {"misspelt": toy.module("def kvbaton_milestonee(at): ...\n")})

    rows = {(row.kind, row.name, row.distribution): row for row in list_plugins()}

    assert len(rows) == 8
    near = rows["connector", "near", "dist-near"]
    assert (near.available, near.version, near.capabilities.same_process) == (True, "1.2", True)
    assert set(near.options) == {"latency", "rails"}
    gone = rows["connector", "gone", "dist-gone"]
    assert (gone.available, gone.reason, gone.remedy) == (False, "libgone is missing", "install libgone")
    for dist in ("first-dist", "second-dist"):
        assert "claimed more than once" in rows["connector", "same", dist].reason
    assert "cannot be imported" in rows["connector", "broken", "b-dist"].reason
    assert rows["engine", "toy", "toy-engine"].available
    assert rows["engine", "toy", "toy-engine"].options["block_tokens"]["description"] == "Tokens per block."
    assert rows["hooks", "watcher", "h-dist"].available
    assert "kvbaton_milestonee" in rows["hooks", "misspelt", "m-dist"].reason


# -- no answer ---------------------------------------------------------------------------------------------------------

#: As a call of a driver that is stuck.  PyDLL keeps the interpreter meanwhile, CDLL does not.
HANGS = "        import ctypes; ctypes.{library}(None).pause()\n"
PROBE = "    def probe(self, need):\n"


def hanging_connector(installed, name, how):
    text = CONNECTOR.format(
        name=name, version=API_VERSION, cross=True, usable=True, reason="", remedy="", quiet="exact"
    )
    text = {
        "import": "import ctypes; ctypes.CDLL(None).pause()\n",
        "dies": text.replace(PROBE, PROBE + "        import os; os.abort()\n"),
    }.get(how) or text.replace(PROBE, PROBE + HANGS.format(library=how))
    module = installed.module(text)
    installed.distribution(f"dist-{name}", "kvbaton.connectors", {name: f"{module}:plugin"})
    return module


@pytest.fixture
def no_driver(monkeypatch):
    monkeypatch.setattr(plugins.cuda, "present", lambda: False)
    return monkeypatch


@pytest.fixture
def impatient(monkeypatch, no_driver):
    """With what is called stuck, and with nothing else; on a machine without a driver."""

    class Impatient(plugins.Apart):
        def answer(self, what, seconds):
            return super().answer(what, 0.2 if "stuck" in what else seconds)

    ask = plugins.of_thread
    monkeypatch.setattr(plugins, "Apart", Impatient)
    monkeypatch.setattr(
        plugins, "of_thread", lambda what, call, seconds: ask(what, call, 0.2 if "stuck" in what else seconds)
    )


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("how", ["CDLL", "PyDLL", "import"])
def test_a_plugin_that_does_not_answer_is_a_row_that_says_so_and_the_others_are_listed(installed, how):
    module = hanging_connector(installed, "a-stuck", how)
    installed.connector("near")
    rows = {row.name: row for row in list_plugins()}
    assert [rows[name].available for name in ("a-stuck", "near")] == [False, True]
    assert rows["a-stuck"].reason == "did not answer within 0.2 s"
    assert rows["a-stuck"].remedy == "name another transport (transport.name), or uninstall dist-a-stuck"
    # and from then on nobody here asks it again
    error = refusal(PluginUnavailable, "a-stuck", Need())
    assert module not in sys.modules
    assert "a-stuck" in str(error)
    assert "did not answer within 0.2 s: name another transport (transport.name), or uninstall dist-" in str(error)
    assert not {row.name: row for row in list_plugins()}["a-stuck"].available


def test_in_the_other_process_nothing_ends_before_the_answer_but_the_process(monkeypatch, installed):
    """Or what hangs would come back from there as soon as it is given up here."""
    module = installed.connector("near").split(":")[0]
    monkeypatch.setattr(plugins, "of_thread", lambda *asked: pytest.fail("it is asked with a bound"))
    entry = json.dumps(["kvbaton.connectors", "near", f"{module}:plugin"])
    assert list(plugins._asked(entry)) == [""]


def test_a_plugin_that_ends_the_process_is_a_row_that_says_so(installed):
    hanging_connector(installed, "a-deadly", "dies")
    installed.connector("near")
    rows = {row.name: row for row in list_plugins()}
    assert [rows[name].available for name in ("a-deadly", "near")] == [False, True]
    assert rows["a-deadly"].reason == "ended the process that asked it (killed by SIGABRT)"
    assert rows["a-deadly"].remedy == "reinstall or upgrade it, or choose another"


@pytest.mark.usefixtures("impatient")
def test_auto_passes_over_one_that_does_not_answer(installed, caplog):
    hanging_connector(installed, "a-stuck", "CDLL")
    installed.connector("near")
    with caplog.at_level(logging.INFO, "kvbaton"):
        assert choose_connector("auto", Need())[0].name == "near"
    assert "a-stuck (dist-a-stuck 1.2) did not answer within 0.2 s (" in caplog.text
    assert "in probe): name another transport (transport.name), or uninstall dist-a-stuck" in caplog.text
    assert "nvidia-smi" not in caplog.text


@pytest.mark.parametrize(
    ("group", "source", "says"),
    [
        (plugins.CONNECTORS, "third 1.0", "name another transport (transport.name), or uninstall third"),
        (plugins.CONNECTORS, "", "name another transport (transport.name)"),
        (plugins.CONNECTORS, "an unknown distribution", "name another transport (transport.name)"),
        (plugins.ENGINES, "third 1.0", "name another engine (engine.name), or uninstall third"),
        (plugins.HOOKS_GROUP, "third 1.0", "uninstall third"),
        (plugins.HOOKS_GROUP, "an unknown distribution", "remove it"),
    ],
)
def test_what_to_do_about_one_that_hangs_is_about_a_driver_only_where_there_is_one(group, source, says, no_driver):
    after = plugins._Mute.after
    assert after(plugins.NoAnswer("did not answer"), group, source).remedy == says
    no_driver.setattr(plugins.cuda, "present", lambda: True)
    assert after(plugins.NoAnswer("did not answer"), group, source).remedy == (
        f"{says}; if nvidia-smi does not answer either, the GPU's driver is stuck, and the machine has to be restarted"
    )


@pytest.mark.usefixtures("impatient")
def test_an_instance_that_does_not_answer_is_refused_and_waited_for_once():
    over = threading.Event()
    asked = []

    class Stuck:
        name = "stuck"
        api_version = API_VERSION
        Options = type("Options", (BaseModel,), {})

        def probe(self, need):
            asked.append(need)
            over.wait()

        def open(self, options, context):
            raise AssertionError("opened")

    stuck = Stuck()
    with pytest.raises(PluginUnavailable, match=r"transport stuck did not answer within 0\.2 s"):
        choose_placement(settings(), stuck)
    over.set()
    assert len(asked) == 1


def test_choosing_imports_only_the_chosen(installed):
    other = installed.connector("other").split(":")[0]
    chosen = installed.connector("chosen").split(":")[0]
    choose_connector("chosen", Need())
    assert chosen in sys.modules
    assert other not in sys.modules
