"""Pairs of channel ends for the tests, and a check that nothing is left of them."""

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.control.inproc import InprocCoordinatorChannels
from kvbaton.control.zmq import ZmqCoordinatorChannels, ZmqStageChannel
from kvbaton.identity import PeerId
from kvbaton.messages import Cancel

PEER = PeerId("decode-0", 1000)


def message(number: int) -> Cancel:
    """A message that can be told from the others."""
    return Cancel(f"{number:032x}")


def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Poll ``condition``, bounded."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.001)


def gather(channels, count: int, seconds: float = 20.0) -> list:
    """``count`` events or messages, waited for as an owner of the channel would."""
    found = []
    deadline = time.monotonic() + seconds
    while len(found) < count:
        channels.wait(1.5 * seconds)  # longer than it may take: the event itself must end it
        found += channels.receive()
        assert time.monotonic() < deadline, f"{len(found)} of {count} came within {seconds} s: {found[-3:]}"
    return found


class Links:
    """Makes both ends of channels in one way, and closes them in the end.  Carries what the tests share."""

    peer = PEER
    message = staticmethod(message)
    gather = staticmethod(gather)
    until = staticmethod(until)

    def __init__(self, kind: str, directory) -> None:
        self.kind = kind
        self.directory = directory
        self._made = []

    def coordinator(self, **options):
        if self.kind == "zmq":
            made = ZmqCoordinatorChannels(directory=self.directory, **options)
        else:
            made = InprocCoordinatorChannels(through_codec=self.kind == "inproc-codec", **options)
        self._made.append(made)
        return made

    def stage(self, coordinator, peer: PeerId = PEER):
        made = ZmqStageChannel(coordinator.ticket(peer)) if self.kind == "zmq" else coordinator.connect(peer)
        self._made.append(made)
        return made

    def pair(self, peer: PeerId = PEER, **options):
        coordinator = self.coordinator(**options)
        coordinator.add(peer)
        return coordinator, self.stage(coordinator, peer)

    def close(self) -> None:
        for made in reversed(self._made):
            made.close()


def _descriptors() -> set[tuple[str, str]]:
    found = set()
    for link in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself
            found.add((link.name, str(link.readlink())))
    return found


@pytest.fixture(autouse=True)
def nothing_left():
    """T10 in kind: no thread, descriptor or file outlives the channels' ``close``."""
    threads, descriptors = set(threading.enumerate()), _descriptors()
    yield
    assert set(threading.enumerate()) <= threads, "a thread is left"
    assert _descriptors() <= descriptors, "a descriptor is left"


@pytest.fixture
def short_tmp(tmp_path_factory):
    """A private directory whose path is short enough for a socket below it."""
    directory = tmp_path_factory.mktemp("c")
    directory.chmod(0o700)
    yield directory
    assert list(directory.iterdir()) == [], "a file is left"


@pytest.fixture(params=["inproc", "inproc-codec", "zmq"])
def links(request, short_tmp):
    made = Links(request.param, short_tmp)
    yield made
    made.close()


@pytest.fixture
def zmq_links(short_tmp):
    made = Links("zmq", short_tmp)
    yield made
    made.close()
