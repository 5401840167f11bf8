"""Tiny random models for tests and for trying things out: deterministic by seed, on the CPU, in milliseconds.

Weights are drawn so that the models notice damage: one zeroed V row in the cache changes the tokens that follow.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from kvbaton_transformers.looped import Layout, LoopedModel, LoopOptions

#: Every byte is a token, so text needs no vocabulary file; the ids above are never produced by the tokenizer.
VOCABULARY = 256


def tiny_llama_config(layers: int = 2) -> LlamaConfig:
    """Grouped attention, two KV heads of 8, hidden size 32."""
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip


def tiny_qwen_config(layers: int = 3) -> Qwen2Config:
    """Biases on Q, K and V, one KV head of 8, tied embeddings."""
    return Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=4096, initializer_range=0.2, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0,
    )  # fmt: skip


def tiny_llama(seed: int = 0, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return random_model(tiny_llama_config(layers), seed, dtype=dtype)


def tiny_qwen(seed: int = 0, *, layers: int = 3, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return random_model(tiny_qwen_config(layers), seed, dtype=dtype)


def tiny_looped(
    seed: int = 0,
    *,
    layout: Layout = Layout.LAST_EXITED,
    max_depth: int = 4,
    threshold: float = 0.5,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
) -> LoopedModel:
    """A tiny Llama, looped; at the default threshold about half of the tokens exit after each pass."""
    options = LoopOptions(max_depth, layout, threshold, gate_seed=seed)
    return LoopedModel(tiny_llama(seed, layers=layers, dtype=dtype), options)
