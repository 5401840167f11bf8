"""Tiny random models for tests: deterministic by seed, on the CPU, in milliseconds.

Weights are drawn so that the models notice damage: one zeroed V row in the cache changes the logits that follow.
They have no end token.  The same models are there by name, ``tiny-llama`` and ``tiny-qwen``, wherever a model's
source is asked for.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kvbaton_transformers.looped import Layout, LoopedModel, LoopOptions
from kvbaton_transformers.random_weights import random_model, tiny_llama_config, tiny_qwen_config


def tiny_llama(seed: int = 0, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return random_model(tiny_llama_config(layers), seed, dtype=dtype)


def tiny_qwen(seed: int = 0, *, layers: int = 3, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return random_model(tiny_qwen_config(layers), seed, dtype=dtype)


def tiny_looped(
    seed: int = 0,
    *,
    layout: Layout = Layout.LAST_EXITED,
    max_depth: int = 4,
    threshold: float = 0.6,
    layers: int = 2,
    dtype: torch.dtype = torch.float32,
) -> LoopedModel:
    """A tiny Llama, looped; at the default threshold its tokens exit after one, two, three and four passes."""
    options = LoopOptions(max_depth, layout, threshold, gate_seed=seed)
    return LoopedModel(tiny_llama(seed, layers=layers, dtype=dtype), options).eval()
