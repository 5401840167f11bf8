"""Models with random weights: of any shape, deterministic by seed, without a checkpoint."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, PreTrainedModel, Qwen2Config

from kvbaton_transformers.support import BUILDING

#: In the tiny models every byte is a token, so that text needs no vocabulary file.
BYTES = 256
#: Where a family's configuration has the deviation of new weights.
_DEVIATIONS = ("initializer_range", "init_std")


@torch.no_grad()
def random_model(
    config: PretrainedConfig, seed: int, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> PreTrainedModel:
    """A causal model of ``config`` with random weights, in ``eval`` mode and without gradients, built on ``device``.

    Matrices and biases are normal with the deviation that ``config`` names (``initializer_range``, or ``init_std`` in
    older families, else 0.02, which is what most name), norms as the model's own code sets them.  Equal seed, dtype and
    kind of device give equal weights, whatever else draws random numbers meanwhile.
    """
    with BUILDING, torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    generator = torch.Generator(device).manual_seed(seed)
    text = config.get_text_config()
    std = next((getattr(text, name) for name in _DEVIATIONS if hasattr(text, name)), 0.02)
    for name, parameter in model.named_parameters():  # tied ones once
        if parameter.dim() > 1 or name.endswith("bias"):
            parameter.normal_(0.0, std, generator=generator)
    model.eval()
    model.requires_grad_(False)
    return model


def tiny_llama_config(layers: int = 2) -> LlamaConfig:
    """Four heads over two KV heads of 8, hidden size 32."""
    return LlamaConfig(
        vocab_size=BYTES, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, initializer_range=0.2, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def tiny_qwen_config(layers: int = 3) -> Qwen2Config:
    """Biases on Q, K and V, three heads over one KV head of 8, tied embeddings."""
    return Qwen2Config(
        vocab_size=BYTES, hidden_size=24, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=3,
        num_key_value_heads=1, max_position_embeddings=4096, initializer_range=0.2, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
