"""What cannot be judged is one clear error by each of the three doors, never a green run and never "no tests ran"."""

import os
import subprocess
import sys

import pytest

#: Transports that are there and cannot be judged.
TRANSPORTS = """
import abc

from kvbaton.connector import Availability, Capabilities, ConnectorBase
from kvbaton_loopback.connector import LoopbackConnector
from kvbaton_loopback.plugin import LoopbackPlugin

class Refuses(LoopbackPlugin):
    name = "refuses"
    def probe(self, need):
        return Availability(False, "there is no such device here", "plug one in")

class HalfWritten(LoopbackPlugin):
    name = "half"
    def open(self, options, context):
        class Written(ConnectorBase):
            capabilities = Capabilities(same_process=True)
            def register(self, regions): ...
            def close(self): ...
        return Written()

class Abstract(LoopbackPlugin):
    name = "abstract"
    def open(self, options, context):
        class Template(LoopbackConnector, abc.ABC):
            @abc.abstractmethod
            def poll(self): ...
        return Template(context.peer, options)

class NoPlugin:
    name = "no_plugin"

class Hollow(LoopbackPlugin):
    name = "hollow"
    def open(self, options, context): ...

refuses, half, abstract, no_plugin, hollow = Refuses(), HalfWritten(), Abstract(), NoPlugin(), Hollow()
"""

#: Connector as it is named, what must be said.
REFUSED = {
    "unknown-name": ("nope", 'no transport "nope"'),
    "no-such-module": ("nowhere:plugin", "cannot be imported"),
    "module-fails": ("broken:plugin", "ZeroDivisionError"),
    "no-such-attribute": ("transports:nobody", "nobody"),
    "no-plugin": ("transports:no_plugin", "no_plugin"),
    "probe-says-no": ("transports:refuses", "there is no such device here"),
    "half-written": ("transports:half", "is half written: Written has no metadata, connect, disconnect, submit, poll"),
    "hollow": ("transports:hollow", "its open() returned None, not a connector"),
    "abstract": ("transports:abstract", "cannot be opened, although its probe says that it is usable: TypeError"),
}

#: Of pytest's plugins the kit's alone: others that are installed beside it are a third of the start of a run.
ALONE = ["-p", "no:cacheprovider", "-p", "no:anyio", "-p", "no:hypothesispytest"]


@pytest.fixture
def door(tmp_path):
    """``door(connector, ...)``: exit status and everything that was said."""
    (tmp_path / "transports.py").write_text(TRANSPORTS)
    (tmp_path / "broken.py").write_text("1 / 0\n")
    by_pytest = [sys.executable, "-m", "pytest", "-q", *ALONE, "-c", "/dev/null", "--rootdir", "."]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}

    def run(*connectors: str, pytest: bool = True) -> tuple[int, str]:
        """By a test file of a class for each; by name, where there is one; by the command."""
        if len(connectors) > 1:
            lines = ["from kvbaton_conformance import ConnectorConformance"]
            for number, connector in enumerate(connectors):
                lines += [f"class Test{number}(ConnectorConformance):", f"    connector = {connector!r}"]
            (tmp_path / "test_mine.py").write_text("\n".join(lines))
            command = [*by_pytest, "test_mine.py"]
        elif pytest:
            command = [*by_pytest, "--pyargs", "kvbaton_conformance.run", "--connector", *connectors]
        else:
            command = [sys.executable, "-c", "from kvbaton.cli import main; main()", "conformance", *connectors]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
        return done.returncode, done.stdout + done.stderr

    return run


def is_an_error(status: int, said: str) -> None:
    assert status == 2, said
    assert "Traceback" not in said
    assert "CONFORM" not in said
    assert "NO VERDICT" not in said
    assert "passed" not in said
    assert "no tests ran" not in said


def test_by_a_file_of_three_lines_each_is_an_error_of_its_own(door):
    status, said = door(*(connector for connector, _ in REFUSED.values()))
    is_an_error(status, said)
    assert said.count("ERROR collecting") == len(REFUSED)
    for number, (_, reason) in enumerate(REFUSED.values()):
        assert reason in said.partition(f"\nTest{number}: ")[2].partition("ERROR coll")[0], said


@pytest.mark.parametrize("name", ["unknown-name", "module-fails", "probe-says-no", "half-written", "abstract"])
def test_by_name_it_is_one_error(door, name):
    connector, reason = REFUSED[name]
    status, said = door(connector)
    is_an_error(status, said)
    assert said.count("ERROR collecting") == 1, said
    assert reason in said


@pytest.mark.parametrize("name", REFUSED)
def test_by_the_command_it_is_one_error(door, name):
    connector, reason = REFUSED[name]
    status, said = door(connector, pytest=False)
    is_an_error(status, said)
    assert reason in said
    assert said.count("\n") == 1 or said.count("ERROR collecting") == 1, said


#: Subclasses that are no more than begun; there is one door for them.
SUBCLASSES = {
    "empty": ("class TestMine(ConnectorConformance): pass", "says nothing about which connector it judges"),
    "abstract": (
        (
            "import abc\nclass TestMine(ConnectorConformance, abc.ABC):\n"
            "    @property\n    @abc.abstractmethod\n    def connector(self): ..."
        ),
        "TestMine is abstract, so pytest would not run it: write its connector",
    ),
    "abstract-method": (
        (
            "import abc\nclass TestMine(ConnectorConformance, abc.ABC):\n    connector = 'loopback'\n"
            "    @abc.abstractmethod\n    def device(self): ..."
        ),
        "TestMine is abstract, so pytest would not run it: write its device",
    ),
    "nested": (
        "class Mine:\n    class TestMine(ConnectorConformance): connector = 'loopback'",
        "TestMine is inside of Mine, where nothing judges it",
    ),
    "of-no-level": (
        "from kvbaton_conformance.suite.topic import Conformance\nclass TestMine(Conformance): pass",
        "TestMine has no standard test",
    ),
}  # fmt: skip


def test_a_subclass_that_is_only_begun_is_one_clear_error(tmp_path):
    for number, (body, _) in enumerate(SUBCLASSES.values()):
        text = f"from kvbaton_conformance import ConnectorConformance\n{body}\n"
        (tmp_path / f"test_{number}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", *ALONE, "-c", "/dev/null", "--rootdir", "."]
    done = subprocess.run(
        [*command, "--conformance-level", "connector", *(f"test_{number}.py" for number in range(len(SUBCLASSES)))],
        cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    said = done.stdout + done.stderr
    is_an_error(done.returncode, said)
    assert said.count("ERROR collecting") == len(SUBCLASSES), said
    for number, (_, reason) in enumerate(SUBCLASSES.values()):
        assert reason in said.partition(f"ERROR collecting test_{number}.py")[2].partition("ERROR collecting")[0], said
