"""What is refused, with which reason, without weights; and the shapes that are found."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from kvbaton.engine import Role
from kvbaton.errors import ConfigurationError, UnsupportedModel
from kvbaton_transformers import TransformersOptions, plugin, support
from kvbaton_transformers.paged import KVShape
from kvbaton_transformers.plugin import BEYOND, OLDEST
from kvbaton_transformers.random_weights import random_model, tiny_llama_config, tiny_qwen_config
from kvbaton_transformers.testing import tiny_llama, tiny_qwen

SMALL = {
    "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip


def config(name: str, **changes: object) -> PretrainedConfig:
    built: PretrainedConfig = getattr(transformers, f"{name}Config")(**{**SMALL, **changes})
    return built


@pytest.mark.parametrize(
    "supported",
    [
        tiny_llama_config(),
        tiny_qwen_config(),
        config("Qwen3", num_key_value_heads=2, head_dim=8),
        config("Mistral", num_key_value_heads=2, sliding_window=None),
        config("Olmo2"),
        config("GPTNeoX"),
        config("Phi3", num_key_value_heads=2),
        config("Mixtral", num_key_value_heads=2, num_local_experts=4),
    ],
    ids=lambda c: c.model_type,
)
def test_decoders_with_full_attention_are_supported(supported: PretrainedConfig) -> None:
    support.check(supported)


@pytest.mark.parametrize(
    ("family", "deviation"), [(config("Llama", initializer_range=0.3), 0.3), (config("OPT", init_std=0.3), 0.3)]
)
def test_random_weights_have_the_deviation_that_their_configuration_names(
    family: PretrainedConfig, deviation: float
) -> None:
    weights = random_model(family, 0).get_input_embeddings().weight
    assert 0.9 * deviation < float(weights.std()) < 1.1 * deviation


def test_a_family_that_names_no_deviation_gets_the_usual_one() -> None:
    family = config("Rwkv", attention_hidden_size=32, context_length=32)
    assert 0.018 < float(random_model(family, 0).get_input_embeddings().weight.std()) < 0.022


@pytest.mark.parametrize(
    ("unsupported", "reason"),
    [
        (config("Mistral", num_key_value_heads=2, sliding_window=8), "sliding-window"),
        (config("Gemma2", num_key_value_heads=2, head_dim=8), "sliding-window.*in 1 of 2 layers"),
        (
            config("Qwen2", num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=1),
            "sliding",
        ),
        (config("Llama4Text", num_key_value_heads=2, attention_chunk_size=8), "chunked attention"),
        (config("GPTNeo", attention_types=[[["global", "local"], 1]], num_layers=2), "sliding-window"),
        (config("Mamba"), "recurrent state"),
        (config("Qwen3Next", num_key_value_heads=2), "recurrent state"),
        (config("Gemma3nText"), "KV shared across layers"),
        (config("Bart"), "an encoder with cross attention"),
        (config("Bert"), "attention in both directions"),
        (config("Bloom"), "does not take .*position_ids"),
        (config("ViT"), "an output head for text"),
        (config("Llama", num_key_value_heads=2, quantization_config={"quant_method": "fp8"}), "quantised weights"),
        (config("Llama", hidden_act="zorp"), "transformers cannot build it"),
    ],
    ids=lambda value: value.model_type if isinstance(value, PretrainedConfig) else value.split()[0],
)
def test_everything_else_is_refused_with_the_reason(unsupported: PretrainedConfig, reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason) as caught:
        support.check(unsupported, "my/model")
    assert f"my/model ({unsupported.model_type}) cannot be served" in str(caught.value)
    assert caught.value.missing


@pytest.mark.parametrize("call", ["check", "open", "tokenizer"])
def test_a_transformers_that_is_too_old_is_no_fault_of_the_model(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": "5.16.2"}.__getitem__)
    # nothing of an old one is touched: it may lack what is imported of it
    monkeypatch.setitem(sys.modules, "kvbaton_transformers.checkpoints", None)
    more = (Role.PREFILL, None) if call == "open" else ()
    with pytest.raises(ConfigurationError) as caught:
        getattr(plugin, call)("tiny-llama", TransformersOptions(), *more)
    assert str(caught.value) == (
        "transformers 5.16.2 is too old for the transformers engine, which needs 5.17 or later:"
        " pip install 'transformers>=5.17,<6'"
    )


@pytest.mark.parametrize("version", ["5.17", "5.17.0.dev0", "5.100.1", "6.0rc1"])
def test_what_is_not_older_is_left_to_the_installer(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"transformers": version}.__getitem__)
    plugin.check("tiny-llama", TransformersOptions())


def test_the_oldest_transformers_is_that_which_an_installer_demands() -> None:
    oldest, beyond = (".".join(map(str, version)) for version in (OLDEST, BEYOND))
    [demanded] = [
        line for line in importlib.metadata.requires("kvbaton-transformers") or () if line.startswith("transformers")
    ]
    assert sorted(demanded.removeprefix("transformers").split(",")) == [f"<{beyond}", f">={oldest}"]


def test_a_configuration_is_checked_without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred gigabytes of weights are not allocated to find out."""
    large = config("Llama", hidden_size=8192, intermediate_size=28672, num_attention_heads=64, num_hidden_layers=4)
    devices = []
    build = AutoModelForCausalLM.from_config

    def watched(*args: object, **kwargs: object) -> PreTrainedModel:
        model: PreTrainedModel = build(*args, **kwargs)
        devices.append({parameter.device.type for parameter in model.parameters()})
        return model

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", watched)
    support.check(large)
    assert devices == [{"meta"}]


def test_probe_finds_the_shape_of_the_cache() -> None:
    assert support.probe(tiny_llama()) == KVShape(2, 2, 8, 8, 32, torch.float32)
    assert support.probe(tiny_qwen(dtype=torch.bfloat16)) == KVShape(3, 1, 8, 8, 24, torch.bfloat16)


def test_probe_finds_keys_and_values_of_different_size() -> None:
    latent = config(
        "DeepseekV3", num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
        v_head_dim=8, first_k_dense_replace=2,
    )  # fmt: skip
    # the latent and the rotary part, as one head, is what its layers cache
    assert support.probe(random_model(latent, 0)) == KVShape(2, 1, 16, 4, 32, torch.float32)


class _Mistaken:
    """A tiny Llama of which one thing is not as it should be."""

    @staticmethod
    def writes_twice(model: PreTrainedModel) -> None:
        model.model.layers[1].self_attn.layer_idx = 0

    @staticmethod
    def looks_ahead(model: PreTrainedModel) -> None:
        def forward(*args: object, attention_mask: object = None, **kwargs: object) -> object:
            return inner(*args, attention_mask=torch.ones(1, 1, 2, 2, dtype=torch.bool), **kwargs)

        for layer in model.model.layers:
            inner = layer.self_attn.forward
            layer.self_attn.forward = forward

    @staticmethod
    def layers_differ(model: PreTrainedModel) -> None:
        attention = model.model.layers[1].self_attn
        attention.v_proj = torch.nn.Linear(32, 32, bias=False)
        attention.o_proj = torch.nn.Linear(64, 32, bias=False)

    @staticmethod
    def fails(model: PreTrainedModel) -> None:
        model.model.embed_tokens = torch.nn.Embedding(1, 32)


@pytest.mark.parametrize(
    ("mistake", "reason"),
    [
        ("writes_twice", "wrote KV 2 times, to layers \\[0\\]"),
        ("looks_ahead", "attention in both directions"),
        ("layers_differ", "its layers differ in the shape|cannot run two tokens"),
        ("fails", "cannot run two tokens"),
    ],
)
def test_probe_refuses_what_it_sees(mistake: str, reason: str) -> None:
    model = tiny_llama()
    getattr(_Mistaken, mistake)(model)
    with pytest.raises(UnsupportedModel, match=reason):
        support.probe(model)
