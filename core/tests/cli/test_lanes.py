"""``kvbaton lanes``."""

import json
import sys
import types

import pytest
from pydantic import BaseModel, ConfigDict

from kvbaton.connector import API_VERSION, Availability, Capabilities, Lane
from kvbaton.errors import TransportError

LANES = [
    Lane("write", "host", "host", 0, None, "cma/memory", "zero-copy"),
    Lane("note", "host", "host", 0, 8184, "tcp/lo [slow]", "short"),
    Lane("note", "host", "host", 7, 7, "tcp/lo", ""),
]


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")
    way: str = "any"


class Plugin:
    name = "mine"
    api_version = API_VERSION
    Options = Options

    def __init__(self, says=lambda options, kind: LANES):
        self.asked = []
        if says is not None:
            self.lanes = lambda options, kind: (self.asked.append((options, kind)), says(options, kind))[1]

    def probe(self, need):
        return Availability(need.memory_kind == "host", "no device", "", Capabilities(cross_process=True))

    def open(self, options, context):
        raise AssertionError("nothing is opened")


class Within(Plugin):
    def probe(self, need):
        return Availability(need.reach == "same_process", "not so far", "", Capabilities(same_process=True))


class Devices(Plugin):
    def probe(self, need):
        return Availability(True, capabilities=Capabilities(cross_process=True, memory_kinds=frozenset({"cuda"})))


@pytest.fixture
def named(monkeypatch):
    """``named(plugin)``: the name by which the command line finds it."""

    def install(plugin):
        module = types.ModuleType("lanes_of_mine")
        module.plugin = plugin
        monkeypatch.setitem(sys.modules, "lanes_of_mine", module)
        return "lanes_of_mine:plugin"

    return install


def test_each_lane_is_a_row(kvbaton, named):
    plugin = Plugin()
    result = kvbaton("lanes", named(plugin), "--transport-option", "way=slow")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["operation", "from", "to", "bytes", "lane", "method"]
    assert rows[1] == ["write", "host", "host", "0", "and", "more", "cma/memory", "zero-copy"]
    assert rows[2] == ["note", "host", "host", "0", "to", "8184", "tcp/lo", "[slow]", "short"]
    assert rows[3] == ["note", "host", "host", "7", "tcp/lo"]
    ((options, kind),) = plugin.asked
    assert (options.way, kind) == ("slow", "host")


def test_as_json(kvbaton, named):
    rows = json.loads(kvbaton("lanes", named(Plugin()), "--json").stdout)
    assert rows[0] == {
        "operation": "write", "source": "host", "target": "host", "first": 0, "last": None, "lane": "cma/memory",
        "method": "zero-copy",
    }  # fmt: skip
    assert len(rows) == 3


def test_the_transport_of_the_settings_with_their_options(kvbaton, named, tmp_path):
    plugin, path = Plugin(), tmp_path / "k.toml"
    path.write_text(f'[transport]\nname = "{named(plugin)}"\noptions = {{ way = "here" }}\n')
    assert kvbaton("lanes", "--config", str(path)).exit_code == 0
    ((options, _kind),) = plugin.asked
    assert options.way == "here"


def fails(options, kind):
    raise TransportError("no lane: nothing was written")


def breaks(options, kind):
    raise RuntimeError("its library is gone")


@pytest.mark.parametrize(
    ("plugin", "arguments", "status", "says"),
    [
        (
            Plugin(None),
            (),
            2,
            "mine does not say by which ways it moves bytes; kvbaton doctor lanes_of_mine:plugin tries it",
        ),
        (Plugin(fails), (), 1, "no lane: nothing was written"),
        (Plugin(breaks), (), 1, "RuntimeError: its library is gone. kvbaton doctor lanes_of_mine:plugin tries it"),
        (
            Plugin(),
            ("--memory", "cuda"),
            2,
            "moves host memory only, and cuda memory is asked for: write --memory host",
        ),
        (Plugin(), ("--memory", "tape"), 2, "write host or cuda"),
        (Plugin(), ("--memory", "cpu"), 2, "--memory cpu: write host\n"),
        (Within(), (), 2, "ways are shown between two: kvbaton doctor lanes_of_mine:plugin tries it\n"),
        (Devices(None), ("--memory", "cuda"), 2, "kvbaton doctor lanes_of_mine:plugin --memory cuda tries it"),
        (Plugin(), ("--transport-option", "wey=1"), 2, "way"),
    ],
    ids=["has-none", "fails", "breaks", "no-device", "no-such-memory", "cpu", "within", "devices", "misspelt"],
)
def test_what_cannot_be_said_is_one_line(kvbaton, named, plugin, arguments, status, says):
    result = kvbaton("lanes", named(plugin), *arguments)
    assert result.exit_code == status, result.output
    assert says in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not result.stdout


def test_no_transport_is_named(kvbaton):
    result = kvbaton("lanes")
    assert result.exit_code == 2
    assert "kvbaton lanes NAME" in result.stderr
