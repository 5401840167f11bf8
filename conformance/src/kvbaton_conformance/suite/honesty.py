"""T13: what is declared is what is found, in both directions."""

from __future__ import annotations

import time
from dataclasses import fields

import numpy as np
import pytest

from kvbaton.connector import API_VERSION, Capabilities, Chunk, Need, Outcome
from kvbaton.errors import CapabilityError, KvbatonError
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import require
from kvbaton_conformance.harness import LocalEnd, Pair
from kvbaton_conformance.placement import kind_of
from kvbaton_conformance.subject import Subject
from kvbaton_conformance.suite.topic import ConnectorTopic, Ends
from kvbaton_conformance.two_process import open_remote_end


def probe_gives_no_capabilities(subject: Subject) -> str:
    """Why there is nothing to compare, where there is not."""
    if any(subject.plugin.probe(Need(subject.memory, reach)).capabilities is not None for reach in subject.reaches):
        return ""
    return "its probe gives no capabilities"


class Honesty(ConnectorTopic):
    """T13: undeclared behaves undeclared, and is refused before anything happens; declared works, up to its limit."""

    @pytest.mark.clause("T13")
    def test_the_plugin_object_is_what_it_must_be(self, subject: Subject) -> None:
        """Name, version of the interface, options that refuse what they do not know, a probe that answers."""
        plugin = subject.plugin
        require(plugin.api_version == API_VERSION, "T13", "the plugin was made for another version of the interface",
                expected=API_VERSION, seen=plugin.api_version)  # fmt: skip
        require(isinstance(plugin.name, str) and plugin.name, "T13", "the plugin has no name", seen=plugin.name)
        require(
            plugin.Options.model_config.get("extra") == "forbid", "T13", "Options takes what it does not know",
            expected='model_config = ConfigDict(extra="forbid")', seen=plugin.Options.model_config.get("extra"),
            look="the Options model: a misspelt option would be ignored in silence",
        )  # fmt: skip
        for kind in ("host", "cuda"):
            for reach in ("same_process", "cross_process", "cross_host"):
                answer = plugin.probe(Need(kind, reach))
                require(
                    answer.usable or answer.reason, "T13", f"probe({kind}, {reach}) says no and not why", seen=answer
                )

    @pytest.mark.clause("T13")
    @pytest.mark.absent_where(reason=probe_gives_no_capabilities)
    def test_a_running_connector_declares_no_more_than_the_probe(self, subject: Subject) -> None:
        """Each capability of the running connector is that of the probe, or narrower."""
        running = subject.capabilities
        for reach in sorted(subject.reaches):
            probed = subject.plugin.probe(Need(subject.memory, reach)).capabilities
            if probed is None:
                continue
            wider = [name for name in _names() if _wider(name, getattr(running, name), getattr(probed, name))]
            require(
                not wider, "T13", "a running connector declares more than its probe promised: " + ", ".join(wider),
                expected=probed, seen=running, look="capabilities of the connector, capabilities in probe()",
            )  # fmt: skip

    @pytest.mark.clause("T13")
    @pytest.mark.requires(cross_process=False)
    def test_another_process_is_not_reached_undeclared(self, ends: Ends, subject: Subject) -> None:
        """An end in another process is not up in silence.

        Troubleshooting:
        - up: declare cross_process, it works; or check who the peer is before accepting;
        - neither up nor down: metadata of another process is taken for one's own.
        """
        source = ends.end("prefill-0", connect_deadline=1.0)
        other = open_remote_end(
            ends.processes, _as_declared(subject), PeerId.start("decode-0"), {}, dict(subject.given_options)
        )
        try:
            _never_up(Pair(source, other))
        finally:
            other.kill()

    @pytest.mark.clause("T13")
    @pytest.mark.requires(same_process=False)
    def test_ones_own_process_is_not_reached_undeclared(self, ends: Ends, subject: Subject) -> None:
        """An end in the same process is not up in silence.

        Troubleshooting:
        - up: declare same_process, it works; or check who the peer is before accepting.
        """
        source = ends.end("prefill-0", connect_deadline=1.0)
        problem = source.apply(_reaches_its_own_process, subject.reference, dict(subject.given_options))
        require(not problem, "T13", problem, expected="down: same_process is not declared", seen="up")

    @pytest.mark.clause("T13", "C5.2")
    def test_revoking_is_what_is_declared(self, pair: Pair) -> None:
        """Declared: a granted transfer can be revoked.  Undeclared: refused, and the plugin itself never says True.

        Troubleshooting:
        - True although undeclared: revoke() of ConnectorBase returns False; declare revocable if yours works.
        """
        transfer = pair.grant(pair.rows((0, 0, 64)))
        target = pair.target
        if target.guard.capabilities.revocable:
            pair.pump_until(lambda: target.guard.revoke(transfer), "T13: revocable is declared, so revoke() succeeds")
            return
        calls = target.calls("revoke")
        try:
            target.guard.revoke(transfer)
        except CapabilityError:
            require(target.calls("revoke") == calls, "T13", "an undeclared revoke() reached the plugin")
        else:
            require(False, "T13", "revoke() was not refused although it is not declared", expected="CapabilityError")
        said = target.apply(_revokes, transfer)
        require(said is not True, "T13", "revoke() says True although revocable is not declared", seen=said)

    @pytest.mark.clause("T13")
    def test_allocating_is_what_is_declared(self, ends: Ends) -> None:
        """Memory of its own is given out by a transport that asks for it, and by no other."""
        end = ends.end("prefill-0", register=False, regions={})
        allocates, said = end.apply(_allocates)
        declared = end.guard.capabilities.memory_origin == "allocated"
        require(
            allocates == declared, "T13", f"memory_origin is {end.guard.capabilities.memory_origin!r} and allocate() "
            + ("works" if allocates else "does not"), seen=said,
        )  # fmt: skip

    @pytest.mark.clause("T13")
    def test_as_many_segments_as_declared(self, ends: Ends) -> None:
        """A chunk of ``max_segments`` segments arrives (of 65536 at most), one of one more is refused.

        Troubleshooting:
        - it fails at the limit: the native library's own limit is lower, or a message grows with the descriptors.
        """
        pair = ends.pair(regions={0: 1 << 20})
        limit = pair.source.guard.capabilities.max_segments
        count = min(limit, 65536)
        step = np.arange(count, dtype=np.int64) * (16 * pair.grain)
        many = Segments(np.zeros(count, np.int32), step, np.full(count, 8 * pair.grain))
        sent = pair.send(many, many)
        pair.pump_until(lambda: sent.received and sent.done, f"T13: a chunk of {count} segments arrives")
        pair.target.memory.check(sent.expected, "T3")
        if limit <= 65535:
            _beyond(pair, Segments.empty().concat(many, pair.rows((0, (1 << 20) - 64, 8))), "max_segments")

    @pytest.mark.clause("T13")
    def test_as_large_a_chunk_as_declared(self, ends: Ends) -> None:
        """A chunk of ``max_chunk_bytes`` arrives where that is 16 MiB at most; a larger one is refused."""
        size = 16 << 20
        limit = ends.subject.capabilities.max_chunk_bytes
        count = min(limit, size)
        grain = ends.subject.capabilities.alignment
        pair = ends.pair(regions={0: -(-(count + 4096) // grain)})
        whole = Segments([0], [0], [count - count % grain])
        sent = pair.send(whole, whole)
        pair.pump_until(lambda: sent.received and sent.done, f"T13: a chunk of {count} bytes arrives")
        pair.target.memory.check(sent.expected, "T3")
        if limit < size:
            _beyond(pair, Segments([0], [0], [limit + grain]), "max_chunk_bytes")

    @pytest.mark.clause("T13")
    def test_alignment_is_what_is_declared(self, pair: Pair) -> None:
        """Offsets and lengths that are no multiples are refused; odd ones work where nothing is declared."""
        if pair.grain > 1:
            _beyond(pair, Segments([0], [pair.grain // 2], [pair.grain]), "alignment")
        rows = pair.rows((0, 1, 3), (0, 7, 1), (1, 13, 5))
        sent = pair.send(rows, pair.rows((0, 3, 3), (0, 101, 1), (1, 1, 5)))
        pair.pump_until(lambda: sent.received and sent.done, "T13: odd multiples of the alignment arrive")
        pair.target.memory.check(sent.expected, "T3")

    @pytest.mark.clause("T13", "C6.4")
    @pytest.mark.requires("disconnect_fences")
    def test_a_disconnect_that_fences_keeps_later_writes_out(self, pair: Pair) -> None:
        """The target disconnects and hears *quiet*; the source, which has not noticed, goes on submitting.

        Troubleshooting:
        - bytes arrive: the peer still has what it needs to write here (a key, a mapping, an open socket). If that
          cannot be taken away, do not declare disconnect_fences.
        """
        source, target = pair.source, pair.target
        transfer = pair.grant(pair.rows((0, 0, 4096)))
        first = pair.send(pair.rows((0, 0, 64)), pair.rows((0, 0, 64)), transfer=transfer)
        pair.pump_until(lambda: first.received and first.done, "T5: one chunk is received and done")
        target.guard.disconnect(source.peer)
        alone = Pair(source, target, order=(target,))
        alone.pump_until(lambda: target.told_quiet(source.peer), "C6.4: a disconnect that fences ends in quiet")
        target.memory.poison()
        before = target.memory.image()
        late = []
        for number in range(1, 20):
            row = pair.rows((0, 64 * number, 64))
            chunk = Chunk(transfer, number, target.peer, row, row, row.nbytes)
            if source.guard.submit(chunk):
                late.append(chunk)
        pair.pump_idle(60)
        target.memory.untouched(before, "C6.4")
        done = [c.sequence for c in source.completions if c.outcome is Outcome.DONE and c.sequence > 0]
        require(not done, "C6.4", "chunks submitted after a fence are DONE", expected="FAILED", seen=done)

    @pytest.mark.clause("T13")
    @pytest.mark.requires(copies_in_submit=False)
    def test_copying_in_submit_is_declared(self, ends: Ends) -> None:
        """Submitting 32 MiB takes a small part of the time of copying them.

        Troubleshooting:
        - it takes as long: declare copies_in_submit, so that core offers smaller chunks.
        """
        size = min(32 << 20, ends.subject.capabilities.max_chunk_bytes)
        size -= size % ends.subject.capabilities.alignment
        pair = ends.pair(regions={0: size // ends.subject.capabilities.alignment})
        whole = Segments([0], [0], [size])
        submit = copy = float("inf")
        # What is interrupted takes longer: three looks for a fair copy, and more where no submit was left in peace.
        for look in range(10):
            transfer = pair.grant(whole)
            submitted, copied = pair.source.apply(_time_submit, transfer, pair.target.peer, size)
            submit, copy = min(submit, submitted), min(copy, copied)
            pair.pump_until(
                lambda transfer=transfer: (
                    any(c.transfer == transfer for c in pair.source.completions)  # type: ignore[misc]
                    and any(r.transfer == transfer for r in pair.target.receipts)
                ),
                "T5: a chunk of 32 MiB is received and done",
            )
            pair.finish(transfer)
            if look >= 2 and (submit < copy / 2 or submit < 0.001):
                return
        require(
            False, "T13", "submit() copies, and copies_in_submit is not declared",
            expected=f"much less than {copy * 1000:.1f} ms", seen=f"{submit * 1000:.1f} ms",
        )  # fmt: skip


def _names() -> list[str]:
    return [item.name for item in fields(Capabilities)]


def _wider(name: str, running: object, probed: object) -> bool:
    if running == probed:
        return False
    if isinstance(running, frozenset) and isinstance(probed, frozenset):
        return not running <= probed
    if name == "memory_origin":
        return running == "any"
    if name == "quiet":
        order = ("never", "peer_death", "exact")
        return order.index(str(running)) > order.index(str(probed))
    if name == "copies_in_submit":
        return running is False
    if isinstance(running, bool):
        return running
    assert isinstance(running, int)
    assert isinstance(probed, int)
    return running < probed if name == "alignment" else running > probed


def _as_declared(subject: Subject) -> Subject:
    """The same, asked for what it can do: another process opens it for its own sake."""

    class Asked(Subject):
        def need(self, mode: object) -> Need:
            return Need(self.memory, "same_process")

    return Asked(**{item.name: getattr(subject, item.name) for item in fields(subject)})


def _never_up(pair: Pair) -> None:
    source, target = pair.source, pair.target
    for end, other in ((source, target), (target, source)):
        try:
            end.guard.connect(other.guard.endpoint())
        except KvbatonError:
            continue
    pair.pump_until(
        lambda: source.told_down(target.peer) or source.is_up(target.peer) or source.is_down(target.peer),
        "T13: an end that cannot be reached is down by its deadline",
    )
    require(
        not source.is_up(target.peer), "T13", "an end in another process is up, and cross_process is not declared",
        expected="down, with the reason", seen="up",
    )  # fmt: skip


def _reaches_its_own_process(end: LocalEnd, reference: object, options: dict[str, object]) -> str:
    from kvbaton.plugins import choose_connector
    from kvbaton_conformance.harness import close_ends, open_end
    from kvbaton_conformance.subject import Reference

    assert isinstance(reference, Reference)
    device = end.memory.device
    plugin, valid = choose_connector(reference.load(), Need(kind_of(device), "cross_process"), options)
    other = open_end(plugin, valid, PeerId.start("decode-here"), connect_deadline=1.0, device=device)
    pair = Pair(end, other)
    try:
        for one, two in ((end, other), (other, end)):
            try:
                one.guard.connect(two.guard.endpoint())
            except KvbatonError:
                return ""
        pair.pump_until(lambda: end.is_up(other.peer) or end.is_down(other.peer), "T13: up or down by the deadline")
        return "an end in the same process is up, and same_process is not declared" if end.is_up(other.peer) else ""
    finally:
        close_ends([other])


def _revokes(end: LocalEnd, transfer: str) -> object:
    return end.connector.revoke(transfer)  # type: ignore[arg-type]


def _allocates(end: LocalEnd) -> tuple[bool, str]:
    """What the plugin itself does, not the guard."""
    try:
        region = end.connector.allocate(5, *end.memory.place, 4096)
    except CapabilityError as error:
        return False, str(error)
    return True, str(region)


def _beyond(pair: Pair, reads: Segments, capability: str) -> None:
    chunk = Chunk(new_transfer_id(), 0, pair.target.peer, reads, reads, reads.nbytes)
    calls = pair.source.calls("submit")
    try:
        pair.source.guard.submit(chunk)
    except CapabilityError as error:
        require(error.capability == capability, "T13", f"the refusal does not name {capability}", seen=error)
        require(pair.source.calls("submit") == calls, "T13", f"a chunk beyond {capability} reached the plugin")
        return
    require(False, "T13", f"a chunk beyond {capability} was accepted", expected="CapabilityError")


def _time_submit(end: LocalEnd, transfer: str, peer: PeerId, size: int) -> tuple[float, float]:
    """Seconds of one submit, and of copying as many bytes."""
    whole = Segments([0], [0], [size])
    chunk = Chunk(transfer, 0, peer, whole, whole, size)  # type: ignore[arg-type]
    start = time.perf_counter()
    taken = end.guard.submit(chunk)
    submit = time.perf_counter() - start
    require(taken, "T6", "a single chunk was said to be full")
    memory = np.frombuffer(end.memory.read(whole), np.uint8)
    other = np.empty_like(memory)
    start = time.perf_counter()
    np.copyto(other, memory)
    return submit, time.perf_counter() - start
