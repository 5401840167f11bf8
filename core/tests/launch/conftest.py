"""Launchers with their channels, and a check that no thread, process, descriptor or file outlives them."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvbaton.control.inproc import InprocCoordinatorChannels
from kvbaton.control.zmq import ZmqCoordinatorChannels
from kvbaton.launch import StageSpec
from kvbaton.launch.inproc import InprocLauncher
from kvbaton.launch.process import ProcessLauncher

ENTRIES = Path(__file__).parent / "entries"


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add((link.name, str(link.readlink())))
    return found


class Launched:
    """A launcher of one kind and its channels; carries what the tests share."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        if kind == "process":
            self.channels = ZmqCoordinatorChannels(directory=directory)
            self.launcher = ProcessLauncher(self.channels)
        else:
            self.channels = InprocCoordinatorChannels()
            self.launcher = InprocLauncher(self.channels)

    def start(self, entry: str, name: str = "prefill-0", environment=None, **settings):
        return self.launcher.start(self.spec(entry, name, environment, **settings))

    @staticmethod
    def spec(entry: str, name: str = "prefill-0", environment=None, **settings) -> StageSpec:
        return StageSpec(
            name=name,
            role="prefill",
            entry=f"stage_entries:{entry}",
            settings=settings,
            environment=environment or {},
        )

    # Each wait below is longer than the test may take: it must be ended by the event itself, not by its timeout.

    def gather(self, count: int, seconds: float = 20.0) -> list:
        """``count`` events of the channels."""
        found = []
        deadline = time.monotonic() + seconds
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} within {seconds} s: {found}"
            self.channels.wait(30.0)
            found += self.channels.receive()
        return found

    def exits(self, count: int, seconds: float = 20.0) -> list:
        """``count`` stages that ended, waited for as a coordinator would: on its channels."""
        found = []
        deadline = time.monotonic() + seconds
        while len(found) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} ends within {seconds} s"
            self.channels.wait(30.0)
            self.channels.receive()
            found += self.launcher.exited()
        return found

    def close(self) -> None:
        self.launcher.close()
        self.channels.close()


def until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll ``condition``, bounded."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.005)


@pytest.fixture(name="until")
def _until():
    return until


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """T10 in kind, for launchers."""
    monkeypatch.syspath_prepend(ENTRIES)
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    assert psutil.Process().children(recursive=True) == [], "a process is left"
    assert set(threading.enumerate()) <= threads, "a thread is left"
    assert _descriptors() <= descriptors, "a descriptor is left"


@pytest.fixture
def directory(tmp_path_factory):
    """Where the control sockets go."""
    made = tmp_path_factory.mktemp("l")
    made.chmod(0o700)
    yield made
    assert list(made.iterdir()) == [], "a file is left"


@pytest.fixture(params=["inproc", "process"])
def launched(request, directory):
    made = Launched(request.param, directory)
    yield made
    made.close()


@pytest.fixture
def processes(directory):
    made = Launched("process", directory)
    yield made
    made.close()


@pytest.fixture
def threads():
    made = Launched("inproc", Path())
    yield made
    made.close()
