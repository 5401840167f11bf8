"""What a compiled kernel must show before it is used, and how the driver is handed one; without a device."""

import ctypes
import functools
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kvbaton.errors import TransportError
from kvbaton_cuda_ipc import kernels, scatter
from kvbaton_cuda_ipc.kernels import Launch, Proof, Unsuitable

PTX = """
.visible .entry _scatter(
	.param .u64 .ptr .global .align 1 _scatter_param_0,
	.param .u32 _scatter_param_1,
	.param .u32 _scatter_param_2,
	.param .u32 _scatter_param_3,
	.param .u32 _scatter_param_4,
	.param .u32 _scatter_param_5,
	.param .u64 _scatter_param_6,
	.param .u64 _scatter_param_7{rest}
)
.reqntid 512
{{
	ld.param.b32 	%r27, [_scatter_param_2];
}}
"""
SCRATCH = ",\n\t.param .u64 .ptr .global .align 1 _scatter_param_{}"


class Recorder:
    """The driver, as far as a launch needs it: what it was handed."""

    def launch(self, function, programs, threads, stream, arguments):
        places = (ctypes.c_void_p * 10).from_address(arguments)
        kinds = [ctypes.c_uint64, *[ctypes.c_int32] * 5, *[ctypes.c_uint64] * 4]
        values = [kind.from_address(place).value for kind, place in zip(kinds, places, strict=True)]
        self.launched = function, programs, threads, stream, values


USUAL = PTX.format(rest=SCRATCH.format(8) + SCRATCH.format(9))


def compiled(ptx=USUAL, **about):
    plain = {
        "num_ctas": 1, "num_warps": 16, "shared": 0, "global_scratch_size": 0, "profile_scratch_size": 0,
        "launch_cooperative_grid": False, "launch_pdl": False,
    }  # fmt: skip
    return SimpleNamespace(asm={"ptx": ptx}, function=77, metadata=SimpleNamespace(**{**plain, **about}))


def by_hand(plan, table, *, longest_of=None, most=None):
    """What the kernel should do; ``longest_of``: how far the rows of a program's ``tile`` are moved; ``most``: how far
    any aligned row is."""
    source, target, length = table.numpy()[:, : plan.rows]
    tiles = -(-plan.wide // plan.tile_rows)
    for row in range(plan.rows):
        end = int(length[row])
        if row < plan.wide and longest_of is not None:
            tile = longest_of(row // plan.tile_rows, plan.programs)
            bound = int(length[: plan.wide][tile * plan.tile_rows : (tile + 1) * plan.tile_rows].max())
            width = 8 * dict(scatter.TILES)[plan.tile_rows]
            end = min(end, -(-bound // width) * width)
        if row < plan.wide and most is not None:
            end = min(end, most)
        ctypes.memmove(plan.origins[1] + int(target[row]), plan.origins[0] + int(source[row]), end)
    assert tiles > plan.programs, "a program that has one tile shows little"


@pytest.mark.clause("T3")
@pytest.mark.parametrize(("rows", "words"), scatter.TILES)
def test_a_proof_holds_for_what_moves_every_byte_and_no_other(rows, words):
    proof = Proof(rows, words, "cpu")
    proof.by(by_hand)
    assert proof.holds()
    proof.by(lambda plan, table: None)
    assert not proof.holds()


@pytest.mark.clause("T3")
@pytest.mark.parametrize(("rows", "words"), scatter.TILES)
@pytest.mark.parametrize("away", [0, -1])
def test_a_proof_sees_a_byte_at_either_end(rows, words, away):
    """One that is missing, or that is written beside a run."""
    proof = Proof(rows, words, "cpu")

    def wrong(plan, table):
        by_hand(plan, table)
        at = plan.origins[1] + int(table[1, 0]) + (int(table[2, 0]) if away == 0 else -1)
        ctypes.memset(at, 199, 1)

    proof.by(wrong)
    assert not proof.holds()


@pytest.mark.clause("T3")
@pytest.mark.parametrize(("rows", "words"), [tile for tile in scatter.TILES if tile[0] > 1])
def test_a_proof_sees_lengths_that_are_another_tiles(rows, words):
    """As Triton 3.6.0 compiled a kernel that asked for the longest of each tile: those of its program's first."""
    proof = Proof(rows, words, "cpu")
    proof.by(lambda plan, table: by_hand(plan, table, longest_of=lambda tile, programs: tile % programs))
    assert not proof.holds()
    proof.by(lambda plan, table: by_hand(plan, table, longest_of=lambda tile, programs: tile))
    assert proof.holds()


@pytest.mark.clause("T3")
@pytest.mark.parametrize(("rows", "words"), scatter.TILES)
def test_a_proof_sees_that_only_the_first_step_of_a_row_was_moved(rows, words):
    """Alike runs of up to 256 KiB go by tiles of eight and of two rows."""
    proof = Proof(rows, words, "cpu")
    proof.by(lambda plan, table: by_hand(plan, table, most=8 * words))
    assert not proof.holds()


@pytest.mark.clause("T3")
def test_a_proof_sees_that_only_the_first_piece_of_a_row_was_moved():
    proof = Proof(*scatter.TILES[0], "cpu")
    proof.by(lambda plan, table: by_hand(plan, table, most=plan.piece))
    assert not proof.holds()


@pytest.mark.clause("T12")
@pytest.mark.parametrize("beside", [0, 1, 2])
def test_the_driver_is_handed_the_kernels_arguments(beside):
    cuda = Recorder()
    launch = Launch(cuda, compiled(PTX.format(rest="".join(SCRATCH.format(8 + one) for one in range(beside)))))
    base = 1 << 46
    plan = scatter.plan(np.array([[256], [512], [1 << 33]]), 132, origins=(base, 2 * base))
    launch(plan, None, 5, base)
    function, programs, threads, stream, values = cuda.launched
    assert (function, programs, threads, stream) == (77, plan.programs, 512, 5)
    assert values == [base, plan.rows, plan.wide, plan.per, plan.piece, plan.narrow, base, 2 * base, 0, 0]


@pytest.mark.clause("T12")
@pytest.mark.parametrize(("rows", "words"), scatter.TILES)
def test_what_triton_compiles_takes_what_the_driver_is_handed(rows, words, monkeypatch, tmp_path):
    """For a device that need not be here; else each launch costs more, and nothing but a line in a log says so."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    about = scatter.plan(np.array([[1 << 40], [1 << 41], [16]]), 1)
    order = [parameter.name for parameter in scatter._scatter.params]
    values = dict(zip(order, scatter.arguments(about._replace(tile_rows=rows), None), strict=True))
    constants = {one.name: values[one.name] for one in scatter._scatter.params if one.is_constexpr}
    kinds = {one.name: one.annotation_type or "i32" for one in scatter._scatter.params}
    signature = {**kinds, "table": "*i64", **dict.fromkeys(constants, "constexpr")}
    made = triton.compile(
        ASTSource(scatter._scatter, signature, constants), GPUTarget("cuda", 90, 32), dict(scatter.OPTIONS)
    )
    assert constants["tile_words"] == words
    Launch(Recorder(), SimpleNamespace(asm=made.asm, metadata=made.metadata, function=1))


@pytest.mark.clause("T3", "T11")
def test_launches_of_two_threads_do_not_mix():
    """Two connectors of a process share what was compiled, and other threads run while the driver reads."""

    class Slow(Recorder):
        def launch(self, function, programs, threads, stream, arguments):
            if stream == 1:
                other = threading.Thread(target=launch, args=(plan, None, 2, 1 << 41))
                other.start()
                other.join(10)
            super().launch(function, programs, threads, stream, arguments)
            seen[stream] = self.launched[4][0]

    seen = {}
    launch = Launch(Slow(), compiled())
    plan = scatter.plan(np.array([[1 << 42], [1 << 43], [64]]), 132)
    launch(plan, None, 1, 1 << 40)
    assert seen == {1: 1 << 40, 2: 1 << 41}


@pytest.mark.clause("T12")
@pytest.mark.parametrize(
    "made",
    [
        compiled(PTX.format(rest=SCRATCH.format(8) + SCRATCH.format(9) + SCRATCH.format(10))),
        compiled(PTX.format(rest=",\n\t.param .u32 _scatter_param_8")),
        compiled(PTX.format(rest="").replace(".u64 _scatter_param_6", ".u32 _scatter_param_6")),
        compiled(PTX.format(rest="").replace(".u32 _scatter_param_3", ".u64 _scatter_param_3")),
        compiled("nothing of the kind"),
        compiled(shared=16),
        compiled(num_ctas=2),
        compiled(global_scratch_size=64),
        compiled(launch_pdl=True),
        SimpleNamespace(asm={}, function=1),
        SimpleNamespace(metadata=compiled().metadata, asm=compiled().asm, function=None),
    ],
)
def test_a_kernel_that_is_not_as_known_is_not_handed_to_the_driver(made):
    with pytest.raises(Unsuitable):
        Launch(Recorder(), made)


@pytest.fixture
def made(monkeypatch):
    """Kernels whose proofs are in the host's memory, where a test moves them."""
    monkeypatch.setattr(kernels, "Proof", functools.partial(Proof, device="cpu"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))
    return kernels.Kernels(Recorder())


@pytest.mark.clause("T3")
def test_what_moves_wrong_bytes_is_refused(made, monkeypatch):
    monkeypatch.setattr(scatter, "launch", lambda plan, table: compiled())
    with pytest.raises(TransportError, match=r"T3: .*triton \d.*wrong bytes.*install another version"):
        made.compile()


@pytest.mark.clause("T3")
def test_a_launch_by_the_driver_that_moves_nothing_is_left_to_triton(made, monkeypatch):
    def launch(plan, table):
        by_hand(plan, table)
        return compiled()

    monkeypatch.setattr(scatter, "launch", launch)
    made.compile()
    assert "was not moved" in made.indirect
    assert set(made._launches.values()) == {kernels._by_triton}


def test_a_compiler_that_fails_is_named_with_what_it_said(made, monkeypatch):
    def launch(plan, table):
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(scatter, "launch", launch)
    with pytest.raises(TransportError, match=r"triton \d.*RuntimeError: Failed to find C compiler;.*nixl"):
        made.compile()


@pytest.mark.clause("T2")
def test_a_refusal_is_remembered(monkeypatch):
    """To compile and prove again takes seconds, and says the same."""
    asked = []

    def refuse(made):
        asked.append(made)
        raise TransportError("T3: wrong bytes")

    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr(kernels.Kernels, "compile", refuse)
    cuda = Recorder()
    for _ in range(3):
        with pytest.raises(TransportError, match="wrong bytes"):
            kernels.kernels(cuda, 0)
    assert len(asked) == 1
