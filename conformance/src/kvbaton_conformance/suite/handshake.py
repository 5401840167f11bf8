"""T2: who is connected with whom, and how each end learns it."""

from __future__ import annotations

import time

import msgspec
import pytest

from kvbaton.connector import Chunk, Endpoint, Outcome
from kvbaton.errors import ConnectError, GeometryMismatch
from kvbaton.geometry import Component, KVGeometry, Plane
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import End, Pair, Sent
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends

#: Seconds after which connecting to nobody must have been given up in these tests.
_DEADLINE = 1.0


class Handshake(ConnectorTopic):
    """T2: *up* means that the peer accepted my epoch; what cannot be a peer is refused or *down*, by a deadline."""

    @pytest.mark.clause("T2")
    def test_an_endpoint_survives_the_wire(self, ends: Ends) -> None:
        """Encoded and decoded, an endpoint still connects.

        Troubleshooting:
        - metadata() must return bytes that mean the same in another process: no addresses of objects, no descriptors.
        """
        pair = ends.pair(connect=False)
        source, target = pair.source, pair.target
        source.guard.connect(Endpoint.decode(target.guard.endpoint().encode()))
        target.guard.connect(Endpoint.decode(source.guard.endpoint().encode()))
        pair.pump_until(lambda: source.is_up(target.peer) and target.is_up(source.peer), "T2: both ends are up")

    @pytest.mark.clause("T2")
    @pytest.mark.parametrize("first", ["source-first", "target-first"])
    def test_both_are_told_up_once_whoever_calls_first(self, ends: Ends, first: str) -> None:
        """One end connects, some passes later the other.

        Troubleshooting:
        - the second caller never hears up: the hello of the first came before connect() was called and was dropped; it
          must be kept, or answered when the call comes.
        """
        pair = ends.pair(connect=False)
        one, other = (pair.source, pair.target) if first == "source-first" else (pair.target, pair.source)
        one.guard.connect(other.guard.endpoint())
        pair.pump_idle()
        other.guard.connect(one.guard.endpoint())
        pair.pump_until(lambda: one.is_up(other.peer) and other.is_up(one.peer), "T2: both ends are up")
        pair.pump_idle()
        for end in (one, other):
            events = [event.up for event in end.peers]
            require(
                events == [True], "T2", "an end was not told up exactly once", expected=[True], seen=events,
                look="the peer events that poll() returns",
            )  # fmt: skip

    @pytest.mark.clause("T2", "C1.4")
    def test_nobody_is_up_before_the_peer_has_accepted(self, ends: Ends) -> None:
        """One end connects, the other has not been told of it.

        Troubleshooting:
        - up after a successful socket connect or mapping: that shows that the peer is there, not that it knows my
          epoch. Wait for its answer.
        """
        pair = ends.pair(connect=False)
        pair.source.guard.connect(pair.target.guard.endpoint())
        pair.pump_idle(50)
        require(
            not pair.source.is_up(pair.target.peer), "T2", "up was said before the peer had accepted our epoch",
            expected="nothing yet", seen="up", look="connect(): what the peer's answer is waited for",
        )  # fmt: skip
        sent = pair.source.peers
        require(not sent, "T2", "an event came for a peer that has not called connect()", seen=sent)
        pair.target.guard.connect(pair.source.guard.endpoint())
        pair.pump_until(
            lambda: pair.source.is_up(pair.target.peer) and pair.target.is_up(pair.source.peer), "T2: then both are up"
        )

    @pytest.mark.clause("T2")
    def test_connecting_twice_is_once(self, pair: Pair) -> None:
        """A repeated connect changes nothing."""
        for end, other in ((pair.source, pair.target), (pair.target, pair.source)):
            end.guard.connect(other.guard.endpoint())
        pair.pump_idle()
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 64, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T2: after a repeated connect a chunk still arrives")
        seen = [len(pair.source.peers), len(pair.target.peers)]
        require(seen == [1, 1], "T2", "a repeated connect brought further events", expected=[1, 1], seen=seen)

    @pytest.mark.clause("T2")
    def test_another_transport_or_version_or_our_own_name_is_refused(self, ends: Ends) -> None:
        """What cannot be a peer is refused before the plugin is asked."""
        pair = ends.pair(connect=False)
        endpoint = pair.target.guard.endpoint()
        before = pair.source.calls("connect")
        wrong = {
            "another transport": msgspec.structs.replace(endpoint, transport="other"),
            "another version": msgspec.structs.replace(endpoint, version="999"),
            "our own name": msgspec.structs.replace(endpoint, peer=PeerId(pair.source.peer.name, 1)),
        }
        for what, one in wrong.items():
            _refused(pair.source, one, what, "T2")
        require(pair.source.calls("connect") == before, "T2", "a refused endpoint reached the plugin")

    @pytest.mark.clause("T2", "C3.5")
    def test_another_geometry_is_refused_by_its_field(self, ends: Ends) -> None:
        """Two caches of different token size: the error names the field and both values, and nothing connects."""
        source = ends.end("prefill-0", geometry=_geometry(256))
        target = ends.end("decode-0", geometry=_geometry(128))
        try:
            source.guard.connect(target.guard.endpoint())
        except GeometryMismatch as error:
            text = str(error)
            require(
                "token_bytes" in text and "256" in text and "128" in text, "C3.5",
                "the error does not name the field and both values", expected="token_bytes, 256, 128", seen=text,
            )  # fmt: skip
        else:
            require(False, "C3.5", "two geometries that differ were connected", expected="GeometryMismatch")

    @pytest.mark.clause("C1.4", "T2")
    def test_an_older_epoch_is_refused(self, pair: Pair) -> None:
        """The endpoint of an earlier start of a peer that is connected."""
        endpoint = pair.target.guard.endpoint()
        older = PeerId(pair.target.peer.name, pair.target.peer.epoch - 1)
        _refused(pair.source, msgspec.structs.replace(endpoint, peer=older), "an older epoch", "C1.4")
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 64, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "C1.4: the present epoch is unaffected")

    @pytest.mark.clause("C1.4", "T2")
    def test_a_restarted_peer_takes_its_old_place(self, ends: Ends) -> None:
        """A target goes away and comes back under its name with a new epoch.

        Troubleshooting:
        - the new one is never up: something is kept under the peer's name, not under name and epoch;
        - its bytes do not arrive: an address, a key or a mapping of the old one is still used.
        """
        pair = ends.pair()
        ends.lose(pair.target)
        pair.pump_until(lambda: pair.source.told_down(pair.target.peer), "T7: a peer that is gone is down")
        reborn = Pair(pair.source, ends.end(pair.target.peer.name))
        reborn.connect()
        sent = reborn.send(pair.rows((0, 0, 512)), pair.rows((0, 1024, 512)))
        reborn.pump_until(lambda: sent.received and sent.done, "C1.4: a chunk to the new epoch arrives")
        reborn.target.memory.check(sent.expected, "C1.4")

    @pytest.mark.clause("C1.4", "T2")
    def test_a_new_epoch_replaces_one_that_still_lives(self, ends: Ends) -> None:
        """The old process lingers while the new one connects: chunks go to the new one, and the old one gets none.

        Troubleshooting:
        - old memory changes: routes are found by name;
        - a chunk to the old epoch is DONE: submit() must look at the epoch, not at the name.
        """
        pair = ends.pair()
        old = pair.target
        before = old.memory.image()
        reborn = Pair(pair.source, ends.end(old.peer.name))
        reborn.connect()
        require(old.peer != reborn.target.peer, "C1.4", "two starts of one name have one epoch")
        sent = reborn.send(pair.rows((0, 0, 512)), pair.rows((0, 1024, 512)))
        reborn.pump_until(lambda: sent.received and sent.done, "C1.4: a chunk to the new epoch arrives")
        stale = Pair(pair.source, old)
        chunk = Chunk(new_transfer_id(), 0, old.peer, pair.rows((0, 0, 64)), pair.rows((0, 0, 64)), 64 * pair.grain)
        late = Sent(chunk, pair.source.guard.submit(chunk), before, pair.source, old)
        stale.pump_until(lambda: late.over, "C1.4: a chunk to the old epoch ends")
        require(
            late.completions[-1].outcome is Outcome.FAILED, "C1.4", "a chunk for a replaced epoch did not fail",
            expected="FAILED", seen=late.completions[-1].outcome.name, look="how submit() finds the peer",
        )  # fmt: skip
        for _ in range(20):
            old.pump()
        old.memory.untouched(before, "C1.4")
        reborn.target.memory.check(sent.expected, "C1.4")

    @pytest.mark.clause("T2", "T7")
    def test_an_unreachable_peer_is_down_by_its_deadline(self, ends: Ends) -> None:
        """Connecting to an endpoint whose process has ended.

        Troubleshooting:
        - connect() blocks: resolve and connect without waiting, or in small steps from poll();
        - connect() raises a foreign exception: turn it into down with that error.
        """
        source = ends.end("prefill-0", connect_deadline=_DEADLINE)
        gone = ends.end("decode-0")
        endpoint = gone.guard.endpoint()
        ends.lose(gone)
        start = time.monotonic()
        source.guard.connect(endpoint)
        pair = Pair(source, gone, order=(source,))
        pair.pump_until(lambda: source.told_down(gone.peer), "T2: a peer that is not there is down by its deadline")
        took = time.monotonic() - start
        require(took < _DEADLINE + 1.0, "T2", "down was said too late", expected=f"{_DEADLINE} s", seen=f"{took:.1f} s")
        require(
            not any(event.up for event in source.peers), "T2", "a peer that does not exist was up", seen=source.peers
        )

    @pytest.mark.clause("T2", "C9.3")
    def test_nonsense_is_refused_and_leaves_the_connector_usable(self, ends: Ends) -> None:
        """Endpoints whose metadata is empty, cut off, or random bytes.

        Troubleshooting:
        - metadata comes from another process: decode it strictly and answer with down, whatever it is.
        """
        pair = ends.pair(connect=False, connect_deadline=_DEADLINE)
        source = pair.source
        good = pair.target.guard.endpoint()
        nonsense = (b"", b"\xc1", b"\xff" * 300, good.metadata[: len(good.metadata) // 2])
        for number, metadata in enumerate(nonsense):
            peer = PeerId(f"nobody-{number}", number + 1)
            endpoint = msgspec.structs.replace(good, peer=peer, metadata=metadata)
            try:
                source.guard.connect(endpoint)
            except ConnectError:
                continue
            pair.pump_until(lambda peer=peer: source.is_down(peer), f"T2: nonsense ({metadata[:8]!r}) is down")  # type: ignore[misc]
        source.faults_expected = True
        pair.connect()
        sent = pair.send(pair.rows((0, 0, 64)), pair.rows((1, 64, 64)))
        pair.pump_until(lambda: sent.received and sent.done, "T2: after nonsense a real peer still connects")

    @pytest.mark.clause("T2", "C6.4")
    def test_a_disconnected_peer_is_down_at_both_ends(self, pair: Pair) -> None:
        """An orderly good-bye.

        Troubleshooting:
        - the other end never hears: say good-bye before closing, or let poll() see the end of the stream;
        - up again later: a disconnected epoch comes back only as a new one.
        """
        source, target = pair.source, pair.target
        source.guard.disconnect(target.peer)
        pair.pump_until(
            lambda: source.told_down(target.peer) and target.told_down(source.peer), "T2: both ends are down"
        )
        _refused(source, target.guard.endpoint(), "an epoch that was disconnected", "C6.4")


def _refused(end: End, endpoint: Endpoint, what: str, clause: str) -> None:
    try:
        end.guard.connect(endpoint)
    except ConnectError:
        return
    require(False, clause, f"{what} was accepted by connect()", expected="ConnectError", seen="nothing was raised")


def _geometry(token_bytes: int) -> bytes:
    plane = Plane("kv", (Component(0, 0, token_bytes * 4, token_bytes, "float16"),), 8)
    return KVGeometry({"model": "conformance"}, 4, (plane,), 0).encode()
