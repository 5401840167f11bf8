"""What is special about shared memory: who may map it, for how long, and what is left of it."""

import contextlib
import dataclasses
import os
import re
import socket
import time
from pathlib import Path

import msgspec
import pytest

from kvbaton.connector import ConnectorContext, Need, Outcome
from kvbaton.errors import CapabilityError, RegistrationError
from kvbaton.identity import PeerId
from kvbaton_conformance.harness import PATIENCE, open_end, open_pair, segments
from kvbaton_conformance.leaks import holdings, left_behind
from kvbaton_conformance.subject import Reference, resolve
from kvbaton_conformance.two_process import Processes, remote_pair
from kvbaton_example_shm import plugin
from kvbaton_example_shm.connector import Hello, ShmConnector

NAME = "kvbaton-example-shm"


@pytest.fixture
def pair():
    with open_pair(plugin) as pair:
        yield pair


def works(pair):
    sent = pair.send(segments((0, 0, 256)), segments((1, 0, 256)))
    pair.pump_until(lambda: sent.received and sent.done, "T3: a chunk arrives")
    pair.target.memory.check(sent.expected)
    return True


def our_files():
    """Descriptors of files like ours."""
    names = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            names.append(str(entry.readlink()))
    return [name for name in names if NAME in name]


def flags_of(address):
    """What the kernel says about the mapping at an address."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, end = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
        if start <= address < end:
            assert NAME in mapping.splitlines()[0]
            return set(re.search(r"^VmFlags: (.*)$", mapping, re.MULTILINE)[1].split())
    return None


@pytest.mark.clause("C6.4")
def test_a_child_cannot_write_into_a_peers_memory(pair):
    """The end of our stream says that we write no more: it must hold for the processes that we fork, too."""
    theirs = pair.source.connector._links[pair.target.peer].memory[0]
    assert "dc" in flags_of(theirs.ctypes.data)  # "do not copy on fork"


@pytest.mark.clause("C6.4")
def test_the_stream_ends_when_the_peers_memory_is_unmapped_and_not_before(pair):
    link = pair.source.connector._links[pair.target.peer]
    address = link.memory[0].ctypes.data
    pair.source.guard.disconnect(pair.target.peer)
    assert flags_of(address) is None
    pair.pump_until(lambda: pair.target.told_quiet(pair.source.peer), "C6.4: quiet")


@pytest.mark.clause("T1", "T10")
def test_memory_outlives_the_connector_and_keeps_no_descriptor():
    connector = plugin.open(plugin.Options(), ConnectorContext(PeerId("a", 1)))
    region = connector.allocate(7, "host", 0, 5000)
    connector.register([region])
    connector.close()
    assert not our_files()
    region.view()[:] = 9
    assert int(region.view().sum()) == 9 * 5000
    address = region.address
    del region
    assert flags_of(address) is None


@pytest.mark.clause("T1")
def test_what_cannot_be_shared_is_refused():
    connector = ShmConnector(PeerId("a", 1))
    for kind, nbytes in (("cuda", 10), ("host", 0)):
        with pytest.raises(CapabilityError, match="T1: region 0"):
            connector.allocate(0, kind, 0, nbytes)
    other = ShmConnector(PeerId("b", 1))
    with pytest.raises(RegistrationError, match="did not come from allocate"):
        connector.register([other.allocate(0, "host", 0, 10)])
    connector.close()
    other.close()


@pytest.mark.clause("T10", "T7", "T5")
def test_a_killed_process_leaves_nothing_and_crashes_nobody():
    subject = resolve("example_shm", {}, Reference("example_shm"), "example_shm")
    before = holdings()
    processes = Processes()
    with remote_pair(processes, subject) as pair:
        sent = pair.send(segments((0, 0, 256)), segments((1, 0, 256)))
        pair.pump_until(lambda: sent.received and sent.done)
        name = msgspec.msgpack.decode(pair.target.guard.endpoint().metadata)["name"].replace("\0", "@")
        assert name in Path("/proc/net/unix").read_text()
        pair.target.kill()
        chunk = dataclasses.replace(sent.chunk, sequence=1)
        assert pair.source.guard.submit(chunk)  # its memory is still mapped, although its process is gone
        pair.pump_until(lambda: pair.source.told_quiet(pair.target.peer), "T7: the end of its stream is heard")
        ends = {c.sequence: (c.outcome, c.terminal) for c in pair.source.completions}
        assert ends == {0: (Outcome.DONE, True), 1: (Outcome.FAILED, True)}
    assert not processes.close()
    assert not left_behind(before)
    assert name not in Path("/proc/net/unix").read_text()


@pytest.mark.clause("C1.4", "T2")
def test_a_new_epoch_ends_the_connection_to_the_old_one(pair):
    old, connector = pair.source, pair.target.connector
    new = open_end(plugin, plugin.Options(), PeerId.start(old.peer.name))
    connector.connect(new.guard.endpoint())
    called = connector._links[new.peer]
    connector.connect(new.guard.endpoint())
    assert connector._links[new.peer] is called  # twice is once
    pair.pump_until(lambda: old.told_quiet(pair.target.peer), "C1.4: the old epoch hears it")
    new.guard.close()


# -- callers -----------------------------------------------------------------------------------------------------------


def call(connector, *messages, files=()):
    """A connection by hand."""
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    caller.settimeout(PATIENCE)
    caller.connect(connector._name)
    for message in messages:
        socket.send_fds(caller, [message], files)
    return caller


def hung_up(pair, caller):
    caller.setblocking(False)

    def ended():
        try:
            return caller.recv(1) == b""
        except BlockingIOError:
            return False

    pair.pump_until(ended, "T2: a caller that is not understood hears the end")
    caller.close()
    return True


@pytest.mark.clause("T2", "C9.3", "C1.4")
@pytest.mark.parametrize("what", ["nonsense", "no-file", "a-pipe", "older-epoch", "a-receipt", "twice"])
def test_a_caller_that_is_not_understood_is_hung_up_on(pair, what):
    connector = pair.target.connector
    me, you = PeerId("stranger", 5), connector.peer
    hello = msgspec.msgpack.encode(Hello(me, you))
    old = msgspec.msgpack.encode(Hello(me, PeerId(you.name, you.epoch - 1)))
    receipt = msgspec.msgpack.encode({"type": "Arrived", "transfer": "0" * 32, "sequence": 0})
    memory, (end, other) = os.memfd_create("strange"), os.pipe()
    os.ftruncate(memory, 4096)
    messages, files = {
        "nonsense": ([b"\xff" * 100], []),
        "no-file": ([hello], []),
        "a-pipe": ([hello], [end]),
        "older-epoch": ([old], [memory]),
        "a-receipt": ([receipt], []),
        "twice": ([hello, hello], [memory]),
    }[what]
    assert hung_up(pair, call(connector, *messages, files=files))
    for descriptor in (memory, end, other):
        os.close(descriptor)
    assert not connector._callers
    assert works(pair)


@pytest.mark.clause("T2")
def test_another_user_is_not_heard(pair, monkeypatch):
    monkeypatch.setattr(os, "getuid", lambda: 4711)
    assert hung_up(pair, call(pair.target.connector))
    assert not pair.target.connector._callers


@pytest.mark.clause("T2", "C9.3")
def test_a_peer_whose_file_is_too_small_does_not_come_up(pair):
    """Also nothing else may go wrong: an access behind the end of a file would kill the process."""
    connector = pair.target.connector
    endpoint = pair.source.guard.endpoint()
    false = PeerId("a-liar", 1)
    memory = os.memfd_create("small")
    os.ftruncate(memory, 4096)
    caller = call(connector, msgspec.msgpack.encode(Hello(false, connector.peer)), files=[memory])
    os.close(memory)
    connector.connect(msgspec.structs.replace(endpoint, peer=false))
    assert [(event.peer, event.up, event.quiet) for event in heard(connector)] == [(false, False, False)]
    caller.close()
    assert [(event.peer, event.up, event.quiet) for event in heard(connector)] == [(false, False, True)]


def heard(connector):
    """The next events of peers, past the guard."""
    end = time.monotonic() + PATIENCE
    while not (events := connector.poll().peers):
        assert time.monotonic() < end, "T7: nothing was heard"
        connector.wait(0.1)
    return events


# -- the plugin --------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T13")
def test_probe_says_what_it_reaches():
    assert plugin.probe(Need("host", "cross_process")).usable
    for need in (Need("cuda", "same_process"), Need("host", "cross_host")):
        answer = plugin.probe(need)
        assert not answer.usable
        assert answer.reason
        assert answer.remedy
