"""A float8 cache: what it keeps, that it is final once written, and that a hand-off gives what one engine gives."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kvbaton import PDRuntime, load
from kvbaton.engine import Admission, ComputedRange, FinishReason, Request, Role, SamplingParams, StepOutput
from kvbaton.errors import ConfigurationError, GeometryMismatch
from kvbaton.geometry import KVMap, ready_range
from kvbaton.identity import new_transfer_id
from kvbaton.reservation import Reservation
from kvbaton_transformers import TransformersOptions, plugin
from kvbaton_transformers.checkpoints import ByteTokenizer, Checkpoint
from kvbaton_transformers.engine import TransformersEngine
from kvbaton_transformers.looped import Layout
from kvbaton_transformers.paged import KVShape, KVSpec, PagedCache, PagedKV, RowIndex
from kvbaton_transformers.quantised import Scales, constant_scales, dequantise, quantise, scales_of
from kvbaton_transformers.testing import tiny_llama, tiny_looped, tiny_qwen

LAYOUTS = pytest.mark.parametrize("layout", ["block", "head", "tensor"])
SAMPLING: Mapping[str, dict[str, Any]] = {"greedy": {}, "seeded": {"temperature": 0.9, "top_k": 40, "seed": 7}}
BLOCK = 4


# -- values ------------------------------------------------------------------------------------------------------------


@given(
    size=st.floats(-30, 30),
    growth=st.floats(0.1, 27),
    seed=st.integers(0, 50),
    layout=st.sampled_from([Scales.BLOCK, Scales.HEAD]),
)
@settings(max_examples=60, deadline=None)
def test_four_significant_bits_survive(size: float, growth: float, seed: int, layout: Scales) -> None:
    """Of the token that sets a block's scales, and of others that are up to 28 times as large or a hundredth."""
    generator = torch.Generator().manual_seed(seed)
    first = (torch.rand((1, 3, 8), generator=generator) + 0.1) * 2.0**size
    scales = scales_of(first, layout.count(3))
    assert scales.shape == (1, layout.count(3))
    assert torch.equal(torch.log2(scales).round(), torch.log2(scales)), "a power of two"
    # 0.1 to 1.1 times this: no more than 27 times the first token's largest in each head
    others = first.amax(dim=2, keepdim=True) * (torch.rand((5, 3, 8), generator=generator) + 0.1) / 1.1 * growth
    tokens = torch.cat([first, others])
    back = dequantise(quantise(tokens, scales.expand(6, -1))[None], scales, torch.float32)[0]
    assert ((back - tokens).abs() <= tokens.abs() / 16).all()


def test_what_is_too_large_saturates_and_what_is_broken_stays_broken() -> None:
    first = torch.ones((1, 1, 2))
    scales = scales_of(first, 1)
    huge = torch.tensor([[[1e9, -1e9]]])
    back = dequantise(quantise(huge, scales)[None], scales, torch.float32)[0]
    assert torch.equal(back, torch.tensor([[[56.0, -56.0]]]))
    assert torch.isnan(quantise(torch.tensor([[[1.0, float("nan")]]]), scales).float()[0, 0, 1])
    for broken in (float("nan"), float("inf")):
        assert torch.isnan(scales_of(torch.tensor([[[1.0, broken]]]), 1)).all()
    nothing = scales_of(torch.zeros((1, 1, 2)), 1)
    assert torch.equal(dequantise(quantise(first, nothing)[None], nothing, torch.float32)[0], first)


def test_scales_per_head_are_the_heads_own() -> None:
    tokens = torch.tensor([[[1.0, 0.5], [0.001, 0.002]]])
    assert torch.equal(scales_of(tokens, 2), torch.tensor([[2.0**-3, 2.0**-12]]))
    assert torch.equal(scales_of(tokens, 1), torch.tensor([[2.0**-3]]))


def test_constant_scales_are_the_same_in_every_block_and_follow_the_model() -> None:
    made = engine(kv_dtype="fp8", kv_scales="tensor")
    made.add(new_transfer_id(), Request(prompt(30), SamplingParams(max_tokens=8)))
    finish(made)
    again = engine(kv_dtype="fp8", kv_scales="tensor")
    for scales, own, constants, largest in zip(
        (made._storage.key_scales, made._storage.value_scales),
        (made._storage.keys, made._storage.values),
        made._storage.constants,
        again._storage.constants,
        strict=True,
    ):
        assert torch.equal(constants, largest), "P and D find the same"
        used = scales[0][:, :, 0].any(dim=1)
        assert int(used.sum()) == 10
        assert torch.equal(scales[0][used][:, :, 0], constants.expand(10, -1))
        # The text that they come from is like another one: neither saturated nor in the lowest bits.
        assert 16 <= own[0].float().abs().max() < 448
    with pytest.raises(ValueError, match="constant scales"):
        PagedKV(spec("tensor"))
    assert torch.equal(constant_scales(torch.tensor([1.0, 0.0, 100.0])), torch.tensor([1 / 32, 1 / 64, 2.0]))


# -- storage -----------------------------------------------------------------------------------------------------------


SHAPE = KVShape(layers=2, kv_heads=3, key_dim=4, value_dim=5, hidden=6, dtype=torch.float32)
TABLE = [5, 2, 6, 0]


def spec(layout: str) -> KVSpec:
    return KVSpec(SHAPE, planes=1, blocks=7, block_tokens=BLOCK, final_slots=3, scales=Scales(layout))


def storage_of(layout: str) -> PagedKV:
    constants = (torch.tensor([1.0, 2.0]) / 64, torch.tensor([4.0, 1.0]) / 64) if layout == "tensor" else None
    return PagedKV(spec(layout), constants=constants)


def states(new: int = 13) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    key, value = (torch.randn((1, 3, new, dim), generator=generator) for dim in (4, 5))
    return key, value


def store(storage: PagedKV, start: int, end: int, layer: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Store tokens ``[start, end)`` of :func:`states`; the history, ``[1, head, end, dim]``."""
    index = RowIndex([TABLE], [start], end - start, BLOCK, torch.device("cpu"))
    key, value = states()
    return PagedCache(storage, 0, index).update(key[:, :, start:end], value[:, :, start:end], layer)


def raw(storage: PagedKV) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for _, tensor in sorted(storage.tensors.items())]


@pytest.mark.clause("C3.1", "C3.7")
@LAYOUTS
@given(cuts=st.sets(st.integers(1, 12)))
@settings(max_examples=15, deadline=None)
def test_bytes_do_not_depend_on_chunks_and_are_written_once(layout: str, cuts: set[int]) -> None:
    whole, chunked = (storage_of(layout) for _ in range(2))
    for storage in (whole, chunked):
        for tensor in storage.tensors.values():
            tensor.view(torch.uint8).fill_(0x7F)  # not a number, in both of the types
    expected = store(whole, 0, 13)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 13], strict=True):
        keys, values = store(chunked, start, end)
        # C3.7: what a chunk left is what stands there in the end.
        assert torch.equal(keys, expected[0][:, :, :end])
        assert torch.equal(values, expected[1][:, :, :end])
    assert all(torch.equal(a, b) for a, b in zip(raw(whole), raw(chunked), strict=True))
    for got, original in zip(expected, states(), strict=True):
        assert torch.isfinite(got).all()
        # A standard normal value is rarely 28 times the first token's largest.
        torch.testing.assert_close(got, original, rtol=1 / 16, atol=0.01)


@pytest.mark.clause("C3.1")
@LAYOUTS
def test_a_token_that_was_taken_back_leaves_no_trace(layout: str) -> None:
    """Guesses are written over: also one that began a block, and so had set its scales."""
    plain, guessing = storage_of(layout), storage_of(layout)
    for end in range(1, 14):
        store(plain, end - 1, end)
    key, value = states()
    for start in range(13):
        guesses = min(3, 13 - start)
        index = RowIndex([TABLE], [start], guesses, BLOCK, torch.device("cpu"))
        wrong = torch.ones((1, 3, guesses, 1)) * 50
        wrong[:, :, 0] = 1
        PagedCache(guessing, 0, index).update(
            key[:, :, start : start + guesses] * wrong, value[:, :, start : start + guesses] * wrong, 1
        )
    assert all(torch.equal(a, b) for a, b in zip(raw(plain), raw(guessing), strict=True))


@pytest.mark.clause("C3.1")
@LAYOUTS
def test_memory_outside_the_valid_range_is_never_read(layout: str) -> None:
    storage = storage_of(layout)
    for tensor in storage.tensors.values():
        tensor.view(torch.uint8).fill_(0x7F)
    index = RowIndex([[5, 2], [3]], [0, 0], new=2, block_tokens=BLOCK, device=torch.device("cpu"))
    key, value = torch.randn((2, 3, 2, 4)), torch.randn((2, 3, 2, 5))
    PagedCache(storage, 0, index).update(key, value, 0)
    for start in ([2, 2], [3, 2]):
        index = RowIndex([[5, 2], [3]], start, new=1, block_tokens=BLOCK, device=torch.device("cpu"))
        keys, values = PagedCache(storage, 0, index).update(key[:, :, :1], value[:, :, :1], 0)
        assert torch.isfinite(keys).all()
        assert torch.isfinite(values).all()


@pytest.mark.clause("C3.2", "C3.5")
@LAYOUTS
def test_geometry_names_every_byte_of_a_block_scales_included(layout: str) -> None:
    storage = storage_of(layout)
    regions = {region.id: region for region in storage.regions()}
    geometry = spec(layout).geometry({"weights": "x"})
    assert sorted(regions) == sorted(spec(layout).region_bytes())
    for component in geometry.planes[0].components:
        size = component.token_bytes * (1 if component.per_block else BLOCK)
        at = component.base + 5 * component.block_stride
        view = regions[component.region].view()[at : at + size]
        assert not view.any(), "once only"
        view[:] = 1
    heads = 3 if layout == "head" else 1
    filled = [storage.keys[0], storage.values[0], storage.key_scales[0], storage.value_scales[0]]
    assert all((tensor[5].contiguous().view(torch.uint8) == 1).all() for tensor in filled)
    written = sum(int((region.view() == 1).sum()) for region in regions.values())
    assert written == BLOCK * 2 * 3 * (4 + 5) + 2 * 2 * heads * 4
    storage.copy_block(0, 5, 3)
    assert all(torch.equal(t[3].view(torch.uint8), t[5].view(torch.uint8)) for t in filled)


@pytest.mark.clause("C3.5")
@pytest.mark.parametrize(
    ("p", "d", "field", "values"),
    [
        ({}, {"kv_dtype": "fp8"}, "identity.kv_dtype", ("float32", "float8_e4m3fn")),
        (
            {"kv_dtype": "fp8"},
            {"kv_dtype": "fp8", "kv_scales": "head"},
            "identity.kv_scales",
            ("block", "head"),
        ),
        (
            {"kv_dtype": "fp8", "kv_scales": "tensor"},
            {"kv_dtype": "fp8"},
            "identity.kv_scales",
            ("tensor", "block"),
        ),
    ],
)
def test_a_peer_that_keeps_its_kv_otherwise_is_refused(
    p: dict[str, Any], d: dict[str, Any], field: str, values: tuple[str, str]
) -> None:
    for mine, its, ours, theirs in ((p, d, *values), (d, p, *values[::-1])):
        one, other = (engine(role=Role.PREFILL, **options).geometry for options in (mine, its))
        with pytest.raises(GeometryMismatch) as caught:
            one.require_compatible(other, "prefill-0", "decode-0")
        assert all(word in str(caught.value) for word in (field, ours, theirs, "prefill-0", "decode-0"))
        with pytest.raises(GeometryMismatch):
            KVMap(one, other)


# -- engines -----------------------------------------------------------------------------------------------------------


@functools.cache
def checkpoint(model: str) -> Checkpoint:
    build = {"llama": tiny_llama, "qwen": tiny_qwen}[model]
    return Checkpoint(model, build(), {"weights": model}, frozenset())


class Told:
    """What a stage is told."""

    def __init__(self) -> None:
        self.ranges: list[ComputedRange] = []
        self.reservations: list[Reservation] = []

    def can_schedule(self, transfer: Any, tokens: int) -> bool:
        return True

    def prefill_submitted(self, computed: ComputedRange) -> None:
        self.ranges.append(computed)

    def reserved(self, reservation: Reservation) -> None:
        self.reservations.append(reservation)

    def refused(self, transfer: Any, reason: str, retry: bool) -> None:
        raise AssertionError(reason)

    def activated(self, transfer: Any) -> None: ...


def engine(model: str = "llama", role: Role = Role.COLOCATED, **options: Any) -> Any:
    given = {"block_tokens": BLOCK, "blocks": 64, "prefill_chunk": 6, "batching": "isolated", **options}
    made = TransformersEngine(checkpoint(model), TransformersOptions(**given), role, ByteTokenizer)
    made.regions(None)
    made.attach(Told())
    return made


def prompt(length: int, text: int = 0) -> tuple[int, ...]:
    return tuple(torch.randint(1, 256, (length,), generator=torch.Generator().manual_seed(text)).tolist())


def finish(made: Any) -> list[StepOutput]:
    outputs: list[StepOutput] = []
    for _ in range(1000):
        if not made.has_work():
            return outputs
        outputs.extend(made.step())
    raise AssertionError("the engine does not come to an end")


def shown(outputs: Sequence[StepOutput]) -> tuple[list[int], FinishReason | None]:
    assert all(output.error is None for output in outputs), outputs
    return [token for output in outputs for token in output.token_ids], outputs[-1].finish_reason


def alone(request: Request, model: str = "llama", **options: Any) -> tuple[list[int], FinishReason | None]:
    made = engine(model, **options)
    made.add(new_transfer_id(), request)
    return shown(finish(made))


class Pair:
    """P and D, with bytes carried as core plans it: unfinished blocks are held back until the last range."""

    def __init__(self, model: str, without: Sequence[int] = (), **options: Any) -> None:
        self.p, self.d = engine(model, Role.PREFILL, **options), engine(model, Role.DECODE, **{**options, "blocks": 57})
        self.map = KVMap(self.p.geometry, self.d.geometry)
        self.without = without

    def run(self, request: Request) -> tuple[list[int], FinishReason | None]:
        transfer = new_transfer_id()
        self.d.reserve_transfer(Admission(transfer, request))
        reservation = self.d._callbacks.reservations[-1]
        self.p.reserve_transfer(Admission(transfer, request, reservation.valid))
        finish(self.p)
        sent = reservation.valid
        for computed in self.p._callbacks.ranges:
            start, end = ready_range(sent, computed.end, BLOCK, computed.last)
            if end > start:
                self.copy(*self.map.plan(computed.tables, reservation.arrays(), start, end))
                sent = end
            if computed.last:
                final = (self.p, computed.final_slot), (self.d, reservation.final_slot)
                self.copy(*(side.geometry.final_segment(slot) for side, slot in final))
        self.p._callbacks.ranges.clear()
        self.p.release_transfer_compute(transfer)
        self.p.release_transfer(transfer)
        self.d.accept_import(transfer, len(request.prompt))
        outputs = finish(self.d)
        self.d.release_transfer(transfer)
        for side in (self.p, self.d):
            side.check()
            assert side.statistics()["blocks_used"] == 0
        return shown(outputs)

    def copy(self, reads: Any, writes: Any) -> None:
        source, target = ({r.id: r.view() for r in side.regions(None)} for side in (self.p, self.d))
        columns = (column.tolist() for s in (reads, writes) for column in (s.region, s.offset, s.length))
        for region, at, size, into, to, _ in zip(*columns, strict=True):
            if into not in self.without:
                target[into][to : to + size] = source[region][at : at + size]


@pytest.mark.clause("A1", "C3.2", "C3.3")
@LAYOUTS
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("model", ["llama", "qwen"])
def test_a_hand_off_gives_what_one_engine_gives(model: str, sampling: str, layout: str) -> None:
    options = {"kv_dtype": "fp8", "kv_scales": layout}
    for length in (1, BLOCK, 2 * BLOCK + 1, 22):
        request = Request(prompt(length), SamplingParams(max_tokens=20, **SAMPLING[sampling]))
        expected = alone(request, model, **options)
        pair = Pair(model, **options)
        assert pair.run(request) == expected
        # again, with what both have cached by now: scales are shared with their blocks
        assert pair.run(request)[0][:1] == expected[0][:1]


@pytest.mark.clause("A1", "C3.2")
@LAYOUTS
def test_scales_that_do_not_arrive_are_noticed(layout: str) -> None:
    """The negative control: the values alone are worth nothing."""
    options = {"kv_dtype": "fp8", "kv_scales": layout}
    request = Request(prompt(22), SamplingParams(max_tokens=20))
    expected = alone(request, **options)
    for region in (3, 4):  # scales of K, of V
        assert Pair("llama", without=[region], **options).run(request) != expected


@pytest.mark.clause("A1")
@LAYOUTS
def test_a_cached_prefix_keeps_its_scales(layout: str) -> None:
    """Where P and D hold unequal prefixes, and one engine holds P's."""
    options = {"kv_dtype": "fp8", "kv_scales": layout, "prefill_chunk": BLOCK}
    request = Request(prompt(22), SamplingParams(max_tokens=20))
    begun = Request((*request.prompt[: 2 * BLOCK], 7, 8), SamplingParams(max_tokens=2))
    expected = alone(request, **options)
    for drop in ("p", "d", ""):
        pair = Pair("llama", **options)
        pair.run(begun)
        if drop:
            getattr(pair, drop)._cache.drop_prefix()
        # chunks end at the same places with and without the prefix
        assert pair.run(request) == expected


@pytest.mark.clause("A1", "C3.5")
@LAYOUTS
def test_it_is_close_to_the_models_own_and_not_equal(layout: str) -> None:
    """The precision that is lost is float8's; and it is in effect."""
    own, eight = engine(), engine(kv_dtype="fp8", kv_scales=layout)
    assert eight._storage.keys[0].dtype is torch.float8_e4m3fn
    assert own.geometry.nbytes_per_token == 4 * eight.geometry.nbytes_per_token
    seen = {}
    for made in (own, eight):
        made.add(new_transfer_id(), Request(prompt(30), SamplingParams(max_tokens=1)))
        draw = made._generator.draw

        def watched(hidden: Any, *others: Any, made: Any = made, draw: Any = draw) -> Any:
            seen[made] = made._runner.logits(torch.stack(hidden))
            return draw(hidden, *others)

        made._generator.draw = watched
        finish(made)
    assert not torch.equal(seen[own], seen[eight])
    error = (seen[own] - seen[eight]).norm() / seen[own].norm()
    assert error < 0.15


@pytest.mark.clause("A1")
@LAYOUTS
@pytest.mark.parametrize("batching", ["grouped", "isolated"])
def test_with_speculation_and_under_preemption(layout: str, batching: str) -> None:
    options = {"kv_dtype": "fp8", "kv_scales": layout, "batching": batching, "prefix_caching": False}
    requests = [Request((5 + text, 9, 4) * 3, SamplingParams(max_tokens=22)) for text in range(4)]
    expected = [alone(request, **options) for request in requests]
    made = engine(**options, speculation="prompt-lookup", ngram=1, blocks=13)
    transfers = [new_transfer_id() for _ in requests]
    for transfer, request in zip(transfers, requests, strict=True):
        made.add(transfer, request)
    outputs = finish(made)
    assert [shown([o for o in outputs if o.transfer == transfer]) for transfer in transfers] == expected
    assert made.statistics()["draft_tokens_accepted_total"] > 0
    assert made.statistics()["preemptions_total"] > 0


@pytest.mark.clause("A1", "A2")
@LAYOUTS
def test_over_a_transport(layout: str) -> None:
    options = {"block_tokens": BLOCK, "blocks": 64, "prefill_chunk": 8, "batching": "isolated"}
    options |= {"kv_dtype": "fp8", "kv_scales": layout}
    requests = [Request(prompt(3 + 7 * text, text), SamplingParams(max_tokens=16)) for text in range(4)]
    expected = []
    one = plugin.open_engine("tiny-llama", TransformersOptions(**options), Role.COLOCATED, None)
    for request in requests:
        one.add(new_transfer_id(), request)
        expected.append(shown(finish(one)))
    overrides = {
        "model": "tiny-llama",
        "transport.name": "loopback",
        "stages.launch": "inproc",
        "engine.options": options,
    }
    with PDRuntime.start(load(overrides=overrides)[0]) as runtime:
        keys = [runtime.add_request(request) for request in requests]
        streams = [list(runtime.stream(key)) for key in keys]
    for outputs, (tokens, reason) in zip(streams, expected, strict=True):
        assert [token for output in outputs for token in output.token_ids] == tokens
        assert FinishReason(outputs[-1].finish_reason) is reason


def test_bfloat16_models_have_it_too() -> None:
    model = Checkpoint("bf16", tiny_llama(dtype=torch.bfloat16), {}, frozenset())
    made = TransformersEngine(model, TransformersOptions(kv_dtype="fp8", blocks=8), Role.COLOCATED)
    made.add(new_transfer_id(), Request(prompt(20), SamplingParams(max_tokens=8)))
    assert len(shown(finish(made))[0]) == 8
    assert made._storage.final.dtype is torch.bfloat16


# -- settings ----------------------------------------------------------------------------------------------------------


def test_settings_that_cannot_go_together_are_refused() -> None:
    with pytest.raises(ValidationError, match="kv_dtype fp8 does not work with loops"):
        TransformersOptions(kv_dtype="fp8", loops={"max_depth": 2})
    with pytest.raises(ValidationError, match="kv_scales is for kv_dtype fp8"):
        TransformersOptions(kv_scales="head")
    for wrong in ({"kv_dtype": "int8"}, {"kv_dtype": "fp8", "kv_scales": "row"}):
        with pytest.raises(ValidationError, match=list(wrong)[-1]):
            TransformersOptions(**wrong)
    for layout in Layout:
        looped = Checkpoint("looped", tiny_looped(layout=layout), {}, frozenset())
        with pytest.raises(ConfigurationError, match="float8"):
            TransformersEngine(looped, TransformersOptions(kv_dtype="fp8"), Role.COLOCATED)
