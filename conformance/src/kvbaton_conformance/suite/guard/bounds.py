"""C3.6, T1, T13: arguments are checked before the plugin is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvbaton.connector import Capabilities, MemoryRegion, RegionInfo
from kvbaton.errors import CapabilityError, LocalProtocolError, PeerLost, RegistrationError, SegmentError
from kvbaton.guard import GuardedConnector
from kvbaton.identity import new_transfer_id
from kvbaton.segments import Segments
from kvbaton_conformance.clauses import require
from kvbaton_conformance.scripted_connector import ScriptedConnector
from kvbaton_conformance.suite.guard.rig import D0, D1, ME, REGION, Rig, RigTopic, chunk, endpoint, refused

_OUTSIDE: dict[str, dict[str, Any]] = {
    "source-past-its-end": {"source": Segments.of([(0, REGION - 5, 6)]), "target": Segments.of([(0, 0, 6)])},
    "target-past-its-end": {"source": Segments.of([(0, 0, 6)]), "target": Segments.of([(0, REGION - 5, 6)])},
    "unknown-region": {"source": Segments.of([(1, 0, 6)]), "target": Segments.of([(0, 0, 6)])},
    "end-beyond-64-bits": {"source": Segments.of([(0, 2**62, 2**62)]), "target": Segments.of([(0, 0, 2**62)])},
    "other-lengths": {"source": Segments.of([(0, 0, 6)]), "target": Segments.of([(0, 0, 7)])},
    "other-counts": {"source": Segments.of([(0, 0, 3), (0, 9, 3)]), "target": Segments.of([(0, 0, 6)])},
    "other-total": {"source": Segments.of([(0, 0, 6)]), "nbytes": 7},
}

_UNDECLARED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "max_segments": ({"max_segments": 1}, {"source": Segments.of([(0, 0, 8), (0, 16, 8)])}),
    "max_chunk_bytes": ({"max_chunk_bytes": 99}, {"length": 100}),
    "alignment-of-source": (
        {"alignment": 16},
        {"source": Segments.of([(0, 8, 16)]), "target": Segments.of([(0, 0, 16)])},
    ),
    "alignment-of-target": (
        {"alignment": 16},
        {"source": Segments.of([(0, 0, 16)]), "target": Segments.of([(0, 8, 16)])},
    ),
    "alignment-of-length": ({"alignment": 16}, {"length": 24}),
}


class Bounds(RigTopic):
    """C3.6, T1, T13: what is wrong is refused before a byte moves, and before the plugin hears of it."""

    @pytest.mark.clause("C3.6")
    @pytest.mark.parametrize("wrong", list(_OUTSIDE))
    def test_segments_are_checked_before_a_byte_moves(self, wrong: str) -> None:
        """Outside of a region, or lists that do not agree."""
        rig = Rig(D0)
        error = refused(
            lambda: rig.guard.submit(chunk(**_OUTSIDE[wrong])), SegmentError, "C3.6", f"{wrong} was accepted"
        )
        require(
            str(error).startswith("C3.6") and not rig.plugin.called("submit") and rig.balanced(), "C3.6",
            "a refused chunk has left something behind, or the error does not say why", seen=f"{error}, {rig}",
        )  # fmt: skip

    @pytest.mark.clause("C3.6")
    def test_each_sides_own_regions_are_its_bounds(self) -> None:
        """The peer's region 5 has 100 bytes: byte 99 is inside, byte 100 is not."""
        rig = Rig()
        rig.guard.connect(endpoint(D0, regions=(RegionInfo(5, "host", 100),)))
        rig.plugin.up(D0)
        rig.poll()
        rig.post(source=Segments.of([(0, REGION - 100, 100)]), target=Segments.of([(5, 0, 100)]))
        for target in (Segments.of([(5, 1, 100)]), Segments.of([(0, 0, 100)])):
            beyond = chunk(source=Segments.of([(0, 0, 100)]), target=target)
            refused(lambda beyond=beyond: rig.guard.submit(beyond), SegmentError, "C3.6", f"{target} was accepted")  # type: ignore[misc]

    @pytest.mark.clause("T13")
    @pytest.mark.parametrize("what", list(_UNDECLARED))
    def test_what_is_not_declared_is_refused_before_the_plugin_sees_it(self, what: str) -> None:
        """Each limit and capability of a chunk, exceeded by a little."""
        able, fields = _UNDECLARED[what]
        rig = Rig(D0, capabilities=able)
        error = refused(
            lambda: rig.guard.submit(chunk(**fields)), CapabilityError, "T13", f"{what} was exceeded and accepted"
        )
        require(
            what.startswith(error.capability) and not rig.plugin.called("submit"), "T13",
            "the plugin was asked for what it does not declare, or the error does not name it", seen=error.capability,
        )  # fmt: skip

    @pytest.mark.clause("T13")
    def test_undeclared_calls_do_not_reach_the_plugin(self) -> None:
        """allocate() where memory of any origin is taken, revoke() where it is not declared."""
        rig = Rig(D0, capabilities={"revocable": False})
        refused(lambda: rig.guard.allocate(3, "host", 0, 10), CapabilityError, "T13", "allocate() undeclared")
        refused(lambda: rig.guard.revoke(new_transfer_id()), CapabilityError, "T13", "revoke() undeclared")
        called = rig.plugin.called("allocate") + rig.plugin.called("revoke")
        require(not called, "T13", "an undeclared call reached the plugin", seen=called)

    @pytest.mark.clause("T1")
    @pytest.mark.parametrize(
        "regions",
        [
            [(0, "host", 4096, 10), (0, "host", 8192, 10)], [(0, "host", 4096, 0)], [(0, "host", 0, 10)],
            [(0, "cuda", 4096, 10)], [(0, "host", 4096, 100), (1, "host", 4195, 10)],
        ],
        ids=["id-twice", "no-bytes", "no-address", "wrong-kind", "overlap"],
    )  # fmt: skip
    def test_bogus_regions_are_refused_and_none_is_registered(self, regions: list[tuple[int, Any, int, int]]) -> None:
        """Libraries take bogus and overlapping registrations silently; core does not."""
        plugin = ScriptedConnector()
        guard = GuardedConnector(plugin, transport="scripted", version="1", peer=ME)
        wanted = [MemoryRegion(id, kind, 0, address, length) for id, kind, address, length in regions]
        refused(lambda: guard.register(wanted), RegistrationError, "T1", "a bogus region was registered")
        require(not plugin.called("register"), "T1", "the plugin was given a bogus region")
        refused(guard.endpoint, LocalProtocolError, "T1", "an end without regions has an endpoint")

    @pytest.mark.clause("T1", "T13")
    def test_memory_of_another_origin_is_refused(self) -> None:
        """The transport allocates; what it did not allocate it cannot reach."""
        plugin = ScriptedConnector(capabilities=Capabilities(memory_origin="allocated"))
        guard = GuardedConnector(plugin, transport="scripted", version="1", peer=ME)
        foreign = [MemoryRegion.of_array(0, np.zeros(8, np.uint8))]
        refused(lambda: guard.register(foreign), RegistrationError, "T1", "memory of another origin was registered")
        require(not plugin.called("register"), "T1", "the plugin was given memory of another origin")

    @pytest.mark.clause("C2.2", "C3.6", "T12")
    def test_grants_are_checked_and_forgotten(self) -> None:
        """A grant outside of our regions, for a peer that is not there, or twice; and that it ends."""
        rig = Rig(D0)
        transfer = new_transfer_id()
        inside = Segments.of([(0, 0, 1)])
        outside = Segments.of([(0, REGION, 1)])
        refused(lambda: rig.guard.grant(transfer, D0, outside), SegmentError, "C3.6", "a grant outside of our regions")
        refused(lambda: rig.guard.grant(transfer, D1, inside), PeerLost, "T7", "a grant to a peer that is not there")
        rig.guard.grant(transfer, D0, inside)
        require(rig.guard.needs_polling, "T7", "with a grant outstanding the stage would stop to poll")
        refused(lambda: rig.guard.grant(transfer, D0, inside), LocalProtocolError, "C2.2", "a second grant")
        rig.guard.forget(transfer)
        rig.guard.forget(transfer)
        require(
            not rig.figure("grants") and not rig.guard.needs_polling, "T12", "a grant outlives its transfer", seen=rig
        )
