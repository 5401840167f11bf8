"""How many bytes a model's token has, from its name, its checkpoint, or numbers."""

import json

import pytest

from kvbaton.bench.models import MODELS, find, known_dtype, of_checkpoint, with_numbers
from kvbaton.errors import ModelNotFound, SettingsError, UnsupportedModel

GROUPED = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_size": 4096, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "token_bytes"),
    [
        ("llama-8b", 128 << 10),
        ("Llama-70B", 320 << 10),
        ("smollm2-135m", 30 * 2 * 3 * 64 * 2),
        ("deepseek-v3", 61 * 576 * 2),
        ("ouro-1.4b", 4 * 24 * 2 * 16 * 128 * 2),
    ],
)
def test_well_known_models(name, token_bytes):
    assert find(name).token_bytes == token_bytes


def test_every_model_names_its_source():
    assert all("/" in model.source and model.hidden for model in MODELS.values())


@pytest.mark.parametrize(
    ("config", "token_bytes", "final_bytes"),
    [
        (GROUPED, 128 << 10, 8192),
        ({**GROUPED, "head_dim": 64}, 64 << 10, 8192),
        ({**GROUPED, "torch_dtype": "torch.float32"}, 256 << 10, 16384),
        ({"text_config": GROUPED, "model_type": "sees"}, 128 << 10, 8192),
        ({**GROUPED, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, 32 * 576 * 2, 8192),
        ({**GROUPED, "total_ut_steps": 4}, 512 << 10, 8192),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768}, 12 * 2 * 768 * 2, 1536),
    ],
    ids=["grouped", "head_dim", "dtype", "nested", "latent", "looped", "older-names"],
)
def test_a_checkpoints_configuration(tmp_path, config, token_bytes, final_bytes):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for like in (tmp_path, tmp_path / "config.json"):
        model = find(str(like))
        assert (model.token_bytes, model.final_bytes) == (token_bytes, final_bytes)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"num_attention_heads": 8, "hidden_size": 64}', "[" * 100_000,
     f'{{"num_hidden_layers": 1{"0" * 400}, "num_attention_heads": 8, "hidden_size": 64}}'],
    ids=["empty", "list", "nothing", "some", "deep", "large"],
)  # fmt: skip
def test_a_configuration_that_does_not_say_it(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UnsupportedModel, match=r"config\.json: "):
        of_checkpoint(tmp_path / "config.json")


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(ModelNotFound, match='Did you mean "llama-8b"'):
        find("lama-8b")
    with pytest.raises(ModelNotFound, match="no such file"):
        find("nowhere/config.json")


def test_numbers_change_a_model_or_make_one():
    assert with_numbers(find("llama-8b"), 16, None, None, "fp8").token_bytes == 32 << 10
    assert with_numbers(None, 2, 1, 8, None).token_bytes == 64
    assert with_numbers(find("deepseek-v3"), None, 1, 64, None).latent == 0
    with pytest.raises(SettingsError, match="--kv-heads, --head-dim"):
        with_numbers(None, 2, None, None, None)


def test_dtypes_by_the_names_that_engines_use():
    assert [known_dtype(name) for name in ("bf16", "torch.float16", "FP8")] == ["bfloat16", "float16", "float8_e4m3fn"]
    with pytest.raises(SettingsError, match='Did you mean "bf16"'):
        known_dtype("bf17")
