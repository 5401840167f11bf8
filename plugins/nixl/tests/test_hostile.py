"""Peers that lie, die early, stand still or come again; and callers that were not invited."""

import struct
import time

import far_actions
import msgspec
import pytest

from kvbaton.connector import Chunk, ConnectorContext, MemoryRegion, Outcome
from kvbaton.errors import RegistrationError
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton_conformance.harness import PATIENCE, Pair, segments
from kvbaton_conformance.leaks import holdings
from kvbaton_nixl import link as link_module
from kvbaton_nixl import plugin
from kvbaton_nixl.connector import MAX_CALLERS, NixlConnector
from kvbaton_nixl.descriptors import encode_places
from kvbaton_nixl.words import Hello, Kind, Lobby, Note


def works(pair):
    sent = pair.send(segments((0, 0, 256)), segments((1, 0, 256)))
    pair.pump_until(lambda: sent.received and sent.done, "T3: a chunk arrives")
    pair.target.memory.check(sent.expected)


def connected(open_here):
    pair = Pair(open_here("prefill-0"), open_here("decode-0", seed=1))
    pair.source.memory.fill()
    pair.connect()
    return pair


def dropped(end):
    return end.connector.statistics()["dropped_notes_total"]


def hello_to(end, me, **wrong):
    """A hello for ``end`` from ``me``, right but for ``wrong``."""
    secret = Lobby.decode(end.connector.metadata()).secret
    return msgspec.structs.replace(Hello(me, end.peer, secret, b"p" * 16, b"no agent", ()), **wrong).encode()


# -- strangers ---------------------------------------------------------------------------------------------------------


@pytest.mark.clause("C9.3", "C1.4", "T12")
def test_notes_of_another_process_are_counted_and_disturb_nothing(open_here, open_there):
    pair = connected(open_here)
    here, stranger = pair.target, PeerId("stranger", 1)
    words = [
        b"", b"nonsense", b"\x91" * 1000, b"\xc1", Note(Kind.BYE, here.peer.epoch, pair.source.peer.epoch).encode(),
        hello_to(here, stranger, secret=b"x" * 16), hello_to(here, stranger, secret=b""),
        hello_to(here, stranger, you=PeerId(here.peer.name, here.peer.epoch - 1)),
        hello_to(here, stranger, you=PeerId("somebody", here.peer.epoch)),
    ]  # fmt: skip
    other = open_there("caller")
    other.apply(far_actions.arrive, here.connector.metadata(), words)
    pair.between = lambda: other.apply(far_actions.linger)
    pair.pump_until(lambda: dropped(here) >= len(words), "C9.3: they are counted")
    pair.between = lambda: None
    other.apply(far_actions.leave)
    assert not here.connector._hellos
    assert not here.faults
    works(pair)


@pytest.mark.clause("T12", "C9.3")
def test_a_flood_of_hellos_is_bounded_and_the_peer_that_is_waited_for_is_heard(open_here, open_there):
    here = open_here("decode-0")
    waited_for = open_here("prefill-0", seed=1)
    here.guard.connect(waited_for.guard.endpoint())
    waited_for.guard.connect(here.guard.endpoint())
    words = [hello_to(here, PeerId(f"caller-{number}", number)) for number in range(10_000)]
    caller = open_there("caller")
    caller.apply(far_actions.arrive, here.connector.metadata(), words)
    most = 0
    deadline = time.monotonic() + 60
    while "caller-9999" not in {one.name for one in here.connector._hellos}:
        assert time.monotonic() < deadline, len(here.connector._hellos)
        here.pump()
        caller.apply(far_actions.linger)
        most = max(most, len(here.connector._hellos))
    caller.apply(far_actions.leave)
    assert most <= MAX_CALLERS
    pair = Pair(waited_for, here)
    waited_for.memory.fill()
    pair.pump_until(lambda: here.is_up(waited_for.peer) and waited_for.is_up(here.peer), "T2: they meet all the same")
    works(pair)


@pytest.mark.clause("T2", "C1.4")
def test_who_knows_one_endpoint_speaks_for_nobody_else(open_here):
    """A hello in a peer's name, with our secret and not with the peer's own."""
    here, peer = open_here("decode-0"), open_here("prefill-0", seed=1)
    here.guard.connect(peer.guard.endpoint())
    here.connector._hear_hello(hello_to(here, peer.peer))
    before = dropped(here)
    here.pump()
    assert not here.is_up(peer.peer)
    assert dropped(here) == before + 1
    peer.memory.fill()
    peer.guard.connect(here.guard.endpoint())
    pair = Pair(peer, here)
    pair.pump_until(lambda: here.is_up(peer.peer) and peer.is_up(here.peer), "T2: the true one is heard")
    works(pair)


@pytest.mark.clause("T7", "T6")
@pytest.mark.parametrize("what", ["ended", "notes", "landed_here"])
def test_what_breaks_one_link_stops_no_other(open_here, monkeypatch, what):
    """Whatever it is that nobody had thought of: that peer is lost, with the cause, and the others go on."""
    here, one, other = open_here("prefill-0"), open_here("decode-0", seed=1), open_here("decode-1", seed=2)
    here.memory.fill()
    broken, fine = Pair(here, one), Pair(here, other)
    broken.connect()
    fine.connect()

    def fails():
        raise MemoryError("on purpose")

    monkeypatch.setattr(here.connector._links[one.peer], what, fails)
    fine.pump_until(lambda: not here.is_up(one.peer), "T7: the peer whose link is broken is lost")
    assert one.peer not in here.connector._links
    works(fine)


@pytest.mark.clause("T2")
def test_the_newest_hello_of_a_peer_counts(open_here):
    """A peer gave up and tried again before we had tried once: its first link is gone."""
    here, peer = open_here("decode-0"), open_here("prefill-0", seed=1)
    peer.memory.fill()
    for attempt in range(2):
        peer.connector.connect(here.guard.endpoint())
        deadline = time.monotonic() + 40
        while here.connector._hellos.get(peer.peer, None) is None:
            assert time.monotonic() < deadline
            peer.connector.poll()
            here.pump()
        agent = here.connector._hellos[peer.peer].agent
        if attempt == 0:
            first = agent
            peer.connector.disconnect(here.peer)
            peer.connector.poll()
    deadline = time.monotonic() + 40
    while here.connector._hellos[peer.peer].agent == first:
        assert time.monotonic() < deadline, "T2: the old hello is kept"
        peer.connector.poll()
        here.pump()


@pytest.mark.clause("T7")
def test_a_lobby_that_breaks_stops_nobody_who_is_connected(open_here, monkeypatch):
    pair = connected(open_here)

    class Broken:
        def __init__(self, lobby):
            self._lobby = lobby

        def __getattr__(self, name):
            return getattr(self._lobby, name)

        def get_new_notifs(self):
            raise RuntimeError("a caller's misfortune")

    monkeypatch.setattr(pair.target.connector, "_lobby", Broken(pair.target.connector._lobby))
    works(pair)
    assert not pair.target.faults
    monkeypatch.undo()


@pytest.mark.clause("T2", "C1.4")
@pytest.mark.parametrize("epoch", [-1, 1 << 64])
def test_an_epoch_that_no_note_can_carry_is_refused(open_here, epoch):
    here = open_here("decode-0")
    endpoint = open_here("prefill-0").guard.endpoint()
    here.connector.connect(msgspec.structs.replace(endpoint, peer=PeerId("odd", epoch)))
    (event,) = here.connector.poll().peers
    assert (event.up, event.quiet) == (False, True)
    assert "64 bits" in str(event.error)


# -- a peer that breaks its word ---------------------------------------------------------------------------------------


@pytest.mark.clause("C6.4", "C7.4")
def test_receipts_after_a_bye_are_dropped(open_here):
    pair = connected(open_here)
    (link,) = pair.source.connector._links.values()
    link.say(Kind.BYE)
    link.say(Kind.WRITTEN, (new_transfer_id(), 0))
    pair.pump_until(lambda: dropped(pair.target) >= 1, "C6.4: it is counted")
    assert not pair.target.receipts


@pytest.mark.clause("C1.4", "C9.3")
def test_notes_of_another_epoch_are_dropped(open_here):
    pair = connected(open_here)
    (link,) = pair.source.connector._links.values()
    ours, theirs = pair.source.peer.epoch, pair.target.peer.epoch
    for you, me in [(theirs - 1, ours), (theirs, ours - 1), (ours, theirs)]:
        link._agent.send_notif(link._remote, Note(Kind.WRITTEN, you, me, new_transfer_id(), 0).encode())
    link._agent.send_notif(link._remote, b"nonsense")
    pair.pump_until(lambda: dropped(pair.target) == 4, "C9.3: they are counted")
    assert not pair.target.receipts
    works(pair)


@pytest.mark.clause("T5", "T7")
def test_no_completion_is_lost_where_the_next_write_breaks_the_link(open_here, monkeypatch):
    pair = connected(open_here)
    pair.clog(pair.target)
    sent = [pair.send(segments((0, 512 * n, 512)), segments((0, 512 * n, 512))) for n in range(4)]
    (link,) = pair.source.connector._links.values()
    third = list(link.posted.values())[2].handle

    class Breaks:
        def __init__(self, agent):
            self._agent = agent

        def __getattr__(self, name):
            return getattr(self._agent, name)

        def check_xfer_state(self, handle):
            if handle is third:
                raise RuntimeError("broken")
            return "DONE"

    monkeypatch.setattr(link, "_agent", Breaks(link._agent))
    monkeypatch.setattr(link_module, "destroy", lambda agent: None)
    pair.source.pump()
    assert [[one.outcome for one in chunk.completions] for chunk in sent] == [
        [Outcome.DONE], [Outcome.DONE], [Outcome.FAILED], [Outcome.FAILED],
    ]  # fmt: skip
    assert pair.source.connector.outstanding() == 0
    monkeypatch.undo()


@pytest.mark.clause("T12", "C9.3", "T7")
def test_a_peer_that_begins_packed_chunks_without_end_loses_its_link(open_here):
    """Over NIXL, each part in a slot that is free again."""
    pair = connected(open_here)
    source, target = pair.source, pair.target
    (link,) = source.connector._links.values()
    theirs = target.connector._links[source.peer]
    slots = target.connector._options.staging_slots
    body = struct.pack("<IIIIQ", 0, 2, 0, 1, 8) + encode_places(segments((0, 0, 8)))

    def begin(comes):
        link.say(Kind.PACKED, (new_transfer_id(), 0), body)
        deadline = time.monotonic() + 40
        while not comes():
            assert time.monotonic() < deadline, f"{target}, {len(theirs._unpacker)} unfinished"
            link._agent.get_new_notifs()  # it hears nothing of what it is told
            target.pump()

    for number in range(slots):
        begin(lambda number=number: len(theirs._unpacker) == number + 1)
    assert target.is_up(source.peer)
    begin(lambda: target.told_down(source.peer))
    assert not target.told_quiet(source.peer)
    assert not target.receipts


# -- death, early and late ---------------------------------------------------------------------------------------------


@pytest.mark.clause("T7", "T2")
@pytest.mark.parametrize("step", ["before-hello", "after-hello", "up"])
def test_a_peer_that_dies_at_each_step_of_the_handshake_is_down(open_here, open_there, step):
    # soon where the connection never comes up; where it must, a busy machine has time for it
    here = open_here("decode-0", connect_deadline=PATIENCE if step == "up" else 3.0)
    peer = open_there("prefill-0")
    endpoint = peer.guard.endpoint()
    if step != "before-hello":
        peer.guard.connect(here.guard.endpoint())
        peer.apply(far_actions.pump_for, 0.2)
    if step == "up":
        here.guard.connect(endpoint)
        Pair(peer, here).pump_until(lambda: here.is_up(peer.peer) and peer.is_up(here.peer), "T2: both are up")
    peer.kill()
    here.guard.connect(endpoint)
    deadline = time.monotonic() + 40
    while not here.told_down(peer.peer):
        assert time.monotonic() < deadline, f"T7: {here}"
        here.pump()
        here.guard.wait(0.005)
    here.guard.fenced(peer.peer)
    here.guard.disconnect(peer.peer)
    here.pump()
    assert here.told_quiet(peer.peer)
    assert not here.connector._links
    assert not here.connector._lobbies
    assert not here.connector._unquiet


@pytest.mark.clause("C1.4", "C6.4")
def test_a_peer_that_was_replaced_is_quiet_when_it_is_fenced(open_here, open_there):
    """Its next start connects before anybody has proved that the last one is dead."""
    here, first = open_here("decode-0"), open_there("prefill-0")
    Pair(first, here).connect()
    first.kill()
    second = open_there("prefill-0", seed=2)
    pair = Pair(second, here)
    second.memory.fill()
    pair.connect()
    assert here.told_down(first.peer)
    assert not here.told_quiet(first.peer)
    here.guard.fenced(first.peer)
    here.pump()
    assert here.told_quiet(first.peer)
    works(pair)
    assert not here.connector._unquiet


def _entries(connector):
    """Of every container that a connector keeps."""
    return {name: len(kept) for name, kept in vars(connector).items() if isinstance(kept, dict | set | list)}


@pytest.mark.clause("T12")
@pytest.mark.slow
def test_peers_that_come_and_go_leave_nothing(open_here):
    """New epochs of one name, and names that were never seen before, beneath the guard."""
    here = open_here("decode-0")

    def once(number):
        peer = plugin.open(plugin.Options(), ConnectorContext(PeerId(f"p-{number % 3}-{number}", number)))
        peer.register([])
        endpoint = msgspec.structs.replace(here.guard.endpoint(), peer=peer.peer, metadata=peer.metadata())
        peer.connect(here.guard.endpoint())
        here.connector.connect(endpoint)
        deadline = time.monotonic() + 40
        up = set()
        while len(up) < 2:
            assert time.monotonic() < deadline
            up |= {one.peer for end in (peer, here.connector) for one in end.poll().peers if one.up}
        peer.close()
        if number % 2:
            here.connector.fenced(peer.peer)
        while number % 2 == 0 and peer.peer in here.connector._links:
            assert time.monotonic() < deadline
            here.connector.poll()
        here.connector.fenced(peer.peer)
        here.connector.poll()

    for number in range(3):
        once(number)
    before, held = _entries(here.connector), len(holdings().descriptors)
    for number in range(3, 13):
        once(number)
    assert _entries(here.connector) == before
    assert len(holdings().descriptors) <= held


# -- a peer that stands still ------------------------------------------------------------------------------------------


@pytest.mark.clause("T6", "T12")
def test_pings_to_a_stopped_peer_do_not_pile_up_and_others_are_unaffected(open_here, open_there, monkeypatch):
    """Twelve hours of it, by a clock that is ours."""
    here, stopped, other = open_here("decode-0", seed=1), open_there("prefill-0"), open_here("prefill-1")
    now = [time.monotonic()]
    here.connector._clock = lambda: now[0]
    for end in (stopped, other):
        Pair(end, here).connect()
    other.memory.fill()
    stopped.hang()
    said = []
    link = here.connector._links[stopped.peer]
    monkeypatch.setattr(link, "say", lambda kind, *rest: (said.append(kind), type(link).say(link, kind, *rest)))
    pair = Pair(other, here)
    works(pair)
    for _ in range(12 * 3600 * 2):
        now[0] += 0.5
        if now[0] >= link.next_ping:
            here.pump()
    assert link_module.PATIENT_PINGS <= len(said) < link_module.PATIENT_PINGS + 32
    assert here.is_up(stopped.peer)
    works(pair)
    stopped.resume()
    Pair(stopped, here).pump_until(lambda: link._unanswered < 3, "T7: it is heard again")


# -- memory (T1) -------------------------------------------------------------------------------------------------------


@pytest.mark.clause("T1", "T13")
@pytest.mark.parametrize(
    ("regions", "reason"),
    [
        ([(0, "host", 4096, 100), (1, "host", 4195, 100)], "begins inside"),
        ([(0, "host", 4096, 100), (1, "host", 4096, 100)], "begins inside"),
        ([(0, "host", 4096, 8192), (1, "host", 8192, 1)], "begins inside"),
        ([(0, "cuda", 4096, 100)], "CUDA"),
        ([(0, "host", 4096, 100), (0, "host", 40960, 100)], "twice"),
    ],
    ids=["overlap", "duplicate", "inside", "no-device", "one-id"],
)
def test_memory_that_nixl_would_take_silently_is_refused(regions, reason):
    connector = plugin.open(plugin.Options(), ConnectorContext(PeerId("d", 1)))
    assert isinstance(connector, NixlConnector)
    try:
        with pytest.raises(RegistrationError, match=reason):
            connector.register([MemoryRegion(id, kind, 0, at, length) for id, kind, at, length in regions])
        assert connector._regions == ()
    finally:
        connector.close()


@pytest.mark.clause("C3.6")
def test_segments_that_the_peer_has_no_region_for_end_as_failed_and_nothing_moves(open_here):
    pair = connected(open_here)
    before = pair.target.memory.image()
    transfer = new_transfer_id()
    bad = Chunk(transfer, 0, pair.target.peer, segments((0, 0, 8)), segments((77, 0, 8)), 8)
    assert pair.source.connector.submit(bad)  # beneath the guard, which refuses it
    (completion,) = pair.source.connector.poll().completions
    assert (completion.outcome, completion.terminal) == (Outcome.FAILED, True)
    assert "77" in str(completion.error)
    pair.target.memory.untouched(before)
    works(pair)
