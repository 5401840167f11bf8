"""C3.5 and T1: what an engine says of its memory."""

from __future__ import annotations

import pytest

from kvbaton.connector import MemoryRegion
from kvbaton.engine import Role
from kvbaton.geometry import KVGeometry
from kvbaton_conformance import device_memory
from kvbaton_conformance.clauses import require
from kvbaton_conformance.suite.engine.bench import Ask, Bench, BenchTopic, Hand, OpenBench


class EngineMemory(BenchTopic):
    """C3.5, T1: regions and geometry agree, on both sides and over memory of a transport's own."""

    @pytest.mark.clause("C3.5", "C3.6")
    @pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE], ids=["p", "d"])
    def test_regions_and_geometry_agree(self, open_bench: OpenBench, role: Role) -> None:
        """Every block of every plane and every final slot lies within a region; it survives the wire."""
        bench = open_bench(role)
        geometry: KVGeometry = bench.engine.geometry
        lengths = {id: region.length for id, region in bench.regions.items()}
        require(len(lengths) == len(bench.engine.regions(None)), "T1", "two regions have one id", seen=lengths)
        for plane in geometry.planes:
            for component in plane.components:
                end = component.base + (plane.blocks - 1) * component.block_stride + component.token_bytes
                require(
                    component.region in lengths and end <= lengths[component.region], "C3.6",
                    f"plane {plane.name} lies outside of its region", expected=lengths, seen=component,
                )  # fmt: skip
        for slot in (0, geometry.final_slots - 1) if geometry.final_bytes else ():
            geometry.final_segment(slot).check_bounds(lengths, f"final slot {slot}")
        require(KVGeometry.decode(geometry.encode()) == geometry, "C3.5", "the geometry is another one after the wire")
        capacity = bench.engine.capacity()
        require(
            capacity == bench.engine.capacity() and capacity.block_tokens == geometry.block_tokens
            and capacity.planes == len(geometry.planes) and capacity.transfer_slots <= geometry.final_slots
            and capacity.blocks <= bench.before["blocks_free"] + bench.before["blocks_prefix"], "C2.4",
            "the capacity that credits are made of is not what the engine has", expected=bench.before, seen=capacity,
        )  # fmt: skip

    @pytest.mark.clause("C3.5")
    def test_both_roles_mean_the_same(self, p: Bench, d: Bench) -> None:
        """P and D of one model are compatible, in both directions."""
        p.engine.geometry.require_compatible(d.engine.geometry, "P", "D")
        d.engine.geometry.require_compatible(p.engine.geometry, "D", "P")

    @pytest.mark.clause("T1", "A1")
    def test_storage_lies_over_memory_that_a_transport_allocated(self, open_bench: OpenBench, ask: Ask) -> None:
        """Both engines are given an allocator: what they register is what it returned, and what they use."""
        given: list[MemoryRegion] = []

        def allocate(id: int, kind: str, device: int, nbytes: int) -> MemoryRegion:
            given.append(device_memory.allocate(id, kind, device, nbytes))  # type: ignore[arg-type]
            return given[-1]

        hand = Hand(open_bench(Role.PREFILL, allocate), open_bench(Role.DECODE, allocate))
        registered = {region.address for bench in (hand.p, hand.d) for region in bench.regions.values()}
        require(
            registered == {region.address for region in given}, "T1",
            "an engine registers memory that the transport did not allocate", expected=given, seen=registered,
        )  # fmt: skip
        plain = Hand(open_bench(Role.PREFILL), open_bench(Role.DECODE))
        request = ask(9, max_tokens=6)
        ours, theirs = hand.run(request), plain.run(request)
        require(ours.shown == theirs.shown, "A1", "memory of another origin changes the answer", seen=(ours, theirs))
