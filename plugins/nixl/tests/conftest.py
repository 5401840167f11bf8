"""What the tests of this plugin share: ends in processes of their own, next to one in the test's own process."""

import sys
from pathlib import Path

import pytest

from kvbaton.identity import PeerId
from kvbaton_conformance.harness import close_ends, open_end
from kvbaton_conformance.subject import Reference, resolve
from kvbaton_conformance.two_process import Processes, open_remote_end
from kvbaton_nixl import plugin

# modules of this folder are named to other processes, which get our path
sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def processes():
    """Processes for ends, used again by later tests; all must exit silently."""
    kept = Processes()
    yield kept
    assert not kept.close()


@pytest.fixture
def open_here(open_there):
    """``open_here(name, options, **how)``: an end in this process, closed after the test.

    Before those in other processes, whose shared memory it may have attached.
    """
    opened = []

    def open_one(name="decode-0", options=None, **how):
        end = open_end(plugin, plugin.Options(**(options or {})), PeerId.start(name), **how)
        opened.append(end)
        return end

    yield open_one
    close_ends(opened)


@pytest.fixture
def open_there(processes):
    """``open_there(name, options, **how)``: an end in a process of its own, closed after the test."""
    opened = []

    def open_one(name="prefill-0", options=None, **how):
        subject = resolve("nixl", options or {}, Reference("nixl"), "nixl")
        end = open_remote_end(processes, subject, PeerId.start(name), how, options or {})
        opened.append(end)
        return end

    yield open_one
    problems = []
    for end in opened:
        if end.hung:
            end.resume()
        if not end.dead:
            end.process.call("close")
            problems += processes.give_back(end.process)
    assert not problems
