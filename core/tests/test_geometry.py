"""What a geometry accepts, what two of them must agree in, and how one travels."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.connector import MAX_ENDPOINT_BYTES, Endpoint, RegionInfo
from kvbaton.errors import GeometryError, GeometryMismatch, SegmentError
from kvbaton.geometry import Component, KVGeometry, KVMap, Plane, ready_range
from kvbaton.identity import PeerId

# no test asserts a time on the wall, which is what the default deadline does
untimed = settings(deadline=None)

BLOCK = 4


def component(**changes: Any) -> Component:
    return msgspec.structs.replace(Component(0, 0, 64, 4, "float16"), **changes)


def plane(*components: Component, name: str = "kv", blocks: int = 8) -> Plane:
    return Plane(name, components or (component(),), blocks)


def geometry(**changes: Any) -> KVGeometry:
    fields: dict[str, Any] = {
        "identity": {"weights": "abc", "dtype": "float16"},
        "block_tokens": BLOCK,
        "planes": (plane(),),
        "final_bytes": 16,
        "final_region": 9,
        "final_base": 32,
        "final_stride": 24,
        "final_slots": 3,
    }
    return KVGeometry(**{**fields, **changes})


def of(*components: Component, **changes: Any) -> KVGeometry:
    return geometry(planes=(plane(*components),), **changes)


class TestConstruction:
    @pytest.mark.parametrize(
        ("build", "field"),
        [
            pytest.param(lambda: geometry(block_tokens=0), "block_tokens", id="no tokens"),
            pytest.param(lambda: geometry(block_tokens=4.0), "block_tokens", id="float"),
            pytest.param(lambda: geometry(block_tokens=True), "block_tokens", id="bool"),
            pytest.param(lambda: geometry(identity={"layers": 3}), "identity", id="identity is no text"),
            pytest.param(lambda: geometry(planes=()), "planes", id="no plane"),
            pytest.param(lambda: geometry(planes=(plane(), plane())), "planes", id="a name twice"),
            pytest.param(lambda: geometry(planes=(Plane("kv", (), 4),)), "plane kv", id="no component"),
            pytest.param(lambda: geometry(planes=(plane(blocks=0),)), "plane kv, blocks", id="no block"),
            pytest.param(lambda: of(component(token_bytes=0)), "component 0, token_bytes", id="no bytes"),
            pytest.param(lambda: of(component(region=-1)), "component 0, region", id="negative region"),
            pytest.param(lambda: of(component(base=-1)), "component 0, base", id="negative base"),
            pytest.param(lambda: of(component(base=np.int64(0))), "component 0, base", id="numpy integer"),
            pytest.param(lambda: of(component(block_stride=15)), "component 0, block_stride", id="blocks overlap"),
            pytest.param(lambda: of(component(region=2**31)), "component 0", id="region beyond 32 bits"),
            pytest.param(lambda: of(component(base=2**63 - 8)), "component 0", id="end beyond 64 bits"),
            pytest.param(lambda: of(component(block_stride=2**63)), "component 0, block_stride", id="stride too large"),
            pytest.param(lambda: geometry(block_tokens=2**63), "block_tokens", id="block_tokens too large"),
            pytest.param(lambda: of(component(dtype=np.float16)), "component 0, dtype", id="dtype is no text"),
            pytest.param(lambda: of(component(per_block=np.True_)), "component 0, per_block", id="numpy bool"),
            pytest.param(lambda: geometry(planes=(plane(name=3),)), "planes", id="name is no text"),
            pytest.param(
                lambda: geometry(final_bytes=0, final_stride=2**63), "final_stride", id="final stride too large"
            ),
            pytest.param(lambda: geometry(final_region=2**31), "the final slots", id="final region beyond 32 bits"),
            pytest.param(lambda: geometry(final_bytes=-1), "final_bytes", id="negative final"),
            pytest.param(lambda: geometry(final_slots=0), "final_slots", id="no slot"),
            pytest.param(lambda: geometry(final_stride=15), "final_stride", id="slots overlap"),
            pytest.param(lambda: geometry(final_base=-1), "final_base", id="negative final base"),
            pytest.param(lambda: geometry(final_base=2**63 - 8), "the final slots", id="final beyond 64 bits"),
        ],
    )
    def test_a_contradiction_is_refused_and_its_field_named(self, build, field):
        with pytest.raises(GeometryError) as caught:
            build()
        assert caught.value.field.endswith(field)
        assert caught.value.field in str(caught.value)

    @pytest.mark.clause("C3.2")
    @untimed
    @given(
        st.lists(
            st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(0, 12), st.integers(1, 3), st.booleans()),
            min_size=2,
            max_size=3,
        ),
        st.integers(1, 4),
        st.integers(1, 3),
        st.one_of(st.none(), st.integers(9, 24)),
    )
    def test_no_byte_belongs_to_two_components(self, raw, blocks, tokens, stride):
        """Sharing a byte is always refused; the reverse holds where strides are equal, as in every real layout."""
        components, touched = [], []
        for region, base, gap, size, per_block in raw:
            extent = size * (1 if per_block else tokens)
            c = Component(region, base, stride or extent + gap, size, "", per_block)
            components.append(c)
            touched += [(region, base + b * c.block_stride + i) for b in range(blocks) for i in range(extent)]
        shares = len(touched) != len(set(touched))
        try:
            KVGeometry({}, tokens, (plane(*components, blocks=blocks),), 0)
            refused = False
        except GeometryError:
            refused = True
        if len({c.block_stride for c in components}) == 1:
            assert refused == shares
        else:
            assert refused or not shares

    @pytest.mark.clause("C3.2")
    def test_final_slots_are_apart_from_the_cache(self):
        with pytest.raises(GeometryError, match=r"component 0 and to the final slots"):
            of(component(region=9))

    def test_planes_may_share_storage(self):
        geometry(planes=(plane(name="depth0"), plane(name="depth1")))

    def test_overlap_is_found_far_down_a_long_list(self):
        many = [component(base=16 * i, block_stride=16 * 600) for i in range(600)]
        of(*many)
        with pytest.raises(GeometryError, match="component 500"):
            of(*many[:-1], component(base=16 * 500 + 15, block_stride=16 * 600))


class TestValue:
    def test_equal_values_are_equal_and_hash_alike(self):
        one, other = geometry(), geometry(identity={"dtype": "float16", "weights": "abc"})
        assert one == other
        assert hash(one) == hash(other)
        assert one != geometry(final_base=33)
        assert one != "geometry"

    def test_sizes(self):
        g = of(component(), component(base=16, token_bytes=6), component(base=40, token_bytes=2, per_block=True))
        assert g.nbytes_per_token == 10
        assert [g.blocks_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]

    @pytest.mark.clause("C3.4", "C3.6")
    def test_final_segment(self):
        assert geometry().final_segment(2).triples() == [(9, 32 + 2 * 24, 16)]
        assert geometry(final_bytes=0).final_segment(5).triples() == []
        for slot in (-1, 3):
            with pytest.raises(SegmentError, match="final slot"):
                geometry().final_segment(slot)


class TestAgreement:
    @pytest.mark.clause("C3.5")
    @pytest.mark.parametrize(
        ("theirs", "field", "values"),
        [
            pytest.param(
                geometry(identity={"weights": "abd", "dtype": "float16"}),
                "identity.weights",
                ("abc", "abd"),
                id="weights",
            ),
            pytest.param(
                geometry(identity={"dtype": "float16"}), "identity.weights", ("abc", "absent"), id="absent there"
            ),
            pytest.param(
                geometry(identity={"weights": "abc", "dtype": "float16", "rope": "x"}),
                "identity.rope",
                ("absent", "x"),
                id="absent here",
            ),
            pytest.param(geometry(block_tokens=2), "block_tokens", (4, 2), id="block_tokens"),
            pytest.param(geometry(planes=(plane(), plane(name="b"))), "planes", (("kv",), ("kv", "b")), id="planes"),
            pytest.param(geometry(planes=(plane(name="depth0"),)), "planes", (("kv",), ("depth0",)), id="plane name"),
            pytest.param(of(component(), component(base=16)), "components (plane kv)", (1, 2), id="components"),
            pytest.param(of(component(token_bytes=8)), "token_bytes (plane kv, component 0)", (4, 8), id="token_bytes"),
            pytest.param(of(component(dtype="int8")), "dtype (plane kv, component 0)", ("float16", "int8"), id="dtype"),
            pytest.param(
                of(component(per_block=True)), "per_block (plane kv, component 0)", (False, True), id="per_block"
            ),
            pytest.param(geometry(final_bytes=8), "final_bytes", (16, 8), id="final_bytes"),
        ],
    )
    def test_a_difference_in_meaning_is_refused_with_field_and_both_values(self, theirs, field, values):
        with pytest.raises(GeometryMismatch, match=r"C3\.5") as caught:
            geometry().require_compatible(theirs, "prefill-0", "decode-1")
        assert (caught.value.field, (caught.value.ours, caught.value.theirs)) == (field, values)
        for part in ("prefill-0 and decode-1", field, *map(str, values)):
            assert part in str(caught.value)
        with pytest.raises(GeometryMismatch):
            KVMap(geometry(), theirs)

    @pytest.mark.clause("C3.5")
    def test_a_difference_in_place_is_none(self):
        elsewhere = geometry(
            planes=(plane(component(region=3, base=7, block_stride=100), blocks=2),),
            final_region=1, final_base=0, final_stride=16, final_slots=1,
        )  # fmt: skip
        geometry().require_compatible(elsewhere)
        KVMap(geometry(), elsewhere)


class TestWire:
    @pytest.mark.clause("C9.3")
    def test_encode_and_back(self):
        g = of(component(), component(base=16, per_block=True), identity={"rope": "θ=10000"})
        assert KVGeometry.decode(g.encode()) == g

    @pytest.mark.clause("C3.5")
    def test_a_large_one_leaves_room_in_an_endpoint(self):
        components = [component(region=r, base=r << 40, block_stride=1 << 30, dtype="float8_e4m3fn") for r in range(96)]
        g = geometry(planes=tuple(plane(*components, name=f"depth{p}") for p in range(4)), final_region=1000)
        assert len(g.encode()) < 16 << 10
        assert KVGeometry.decode(g.encode()) == g
        regions = tuple(RegionInfo(r, "cuda", 1 << 40) for r in range(97))
        endpoint = Endpoint("nixl", "1.0", PeerId.start("prefill-0"), regions, g.encode(), bytes(8 << 10))
        assert len(endpoint.encode()) < MAX_ENDPOINT_BYTES // 2
        assert KVGeometry.decode(Endpoint.decode(endpoint.encode()).geometry) == g

    @pytest.mark.clause("C9.3")
    @untimed
    @given(st.integers(0, 200), st.integers(0, 255), st.booleans())
    def test_a_changed_byte_gives_a_geometry_or_an_error(self, at, value, cut):
        data = bytearray(geometry().encode())
        at %= len(data)
        data[at] = value
        try:
            decoded = KVGeometry.decode(bytes(data[: at if cut else None]))
        except GeometryError:
            return
        assert KVGeometry.decode(decoded.encode()) == decoded

    @pytest.mark.clause("C9.3")
    @untimed
    @given(st.data())
    def test_any_numbers_in_its_place_give_a_geometry_or_an_error(self, data):
        """Every number off the wire may be the smallest, the largest or anything between."""
        number = st.one_of(st.sampled_from([0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1]), st.integers(0, 80))
        draw = data.draw
        components = [
            [draw(number), draw(number), draw(number), draw(number), "f", draw(st.booleans())]
            for _ in range(draw(st.integers(0, 2)))
        ]
        wire = [{}, draw(number), [["kv", components, draw(number)]], *(draw(number) for _ in range(5))]
        try:
            decoded = KVGeometry.decode(msgspec.msgpack.encode(wire))
        except GeometryError:
            return
        assert KVGeometry.decode(decoded.encode()) == decoded
        KVMap(decoded, decoded)

    @pytest.mark.clause("C9.3")
    @untimed
    @given(st.binary(max_size=60))
    def test_any_bytes_give_a_geometry_or_an_error(self, data):
        try:
            KVGeometry.decode(data)
        except GeometryError:
            return

    @pytest.mark.clause("C9.3")
    @pytest.mark.parametrize(
        "wire",
        [
            pytest.param([{}, 4, [["kv", [[0, 0, 64, 4, "", False, 7]], 8]], 0, 0, 0, 0, 0], id="a field too many"),
            pytest.param([{}, 4, [["kv", [[0, 0, 64, 4]], 8]], 0, 0, 0, 0, 0, 0], id="one more at the end"),
            pytest.param([{}, 4, [["kv", [[0, 0, 64]], 8]], 0, 0, 0, 0, 0], id="a field too few"),
            pytest.param([{}, "4", [["kv", [[0, 0, 64, 4]], 8]], 0, 0, 0, 0, 0], id="text for a number"),
            pytest.param([{}, 0, [["kv", [[0, 0, 64, 4]], 8]], 0, 0, 0, 0, 0], id="no tokens"),
            pytest.param([{}, 4, [["kv", [[0, 2**64 - 1, 64, 4]], 8]], 0, 0, 0, 0, 0], id="beyond 64 bits"),
            pytest.param([{}, 4, [["kv", [[0, 0, 64, 4]], 2**63]], 0, 0, 0, 0, 0], id="too many blocks"),
            pytest.param([{}, 4, [["kv", [[0, 0, 2**64 - 1, 4]], 1]], 0, 0, 0, 0, 0], id="stride beyond 64 bits"),
            pytest.param([{}, 2**63, [["kv", [[0, 0, 64, 4, "", True]], 1]], 0, 0, 0, 0, 0], id="huge block"),
            pytest.param([{"a": 1}, 4, [["kv", [[0, 0, 64, 4]], 8]], 0, 0, 0, 0, 0], id="identity is no text"),
            pytest.param([{}, 4, [["kv", [[0, 0, 64, 4], [0, 8, 64, 4]], 8]], 0, 0, 0, 0, 0], id="overlap"),
        ],
    )
    def test_what_is_no_geometry_is_refused(self, wire):
        with pytest.raises(GeometryError):
            KVGeometry.decode(msgspec.msgpack.encode(wire))


class TestReadyRange:
    @pytest.mark.parametrize(
        ("sent", "computed", "last", "expected"),
        [
            (0, 3, False, (0, 0)),
            (0, 4, False, (0, 4)),
            (0, 7, False, (0, 4)),
            (4, 7, True, (4, 7)),
            (6, 7, False, (6, 6)),  # a prefix inside a block
            (6, 8, False, (6, 8)),
            (9, 7, False, (9, 9)),  # the destination holds more than was computed
            (7, 7, True, (7, 7)),
        ],
    )
    def test_the_unfinished_block_waits_for_the_last_range(self, sent, computed, last, expected):
        assert ready_range(sent, computed, BLOCK, last) == expected

    @pytest.mark.clause("C3.1", "C3.3")
    @untimed
    @given(st.integers(0, 40), st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(1, 6))
    def test_ranges_follow_each_other_from_the_prefix_to_the_end(self, prefix, steps, block_tokens):
        sent, computed = prefix, 0
        for index, step in enumerate(steps):
            computed += step
            last = index == len(steps) - 1
            start, end = ready_range(sent, computed, block_tokens, last)
            assert start == sent
            assert last or end == start or end % block_tokens == 0
            sent = end
        assert sent == max(prefix, computed)
