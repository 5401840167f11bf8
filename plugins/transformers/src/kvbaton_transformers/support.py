"""Which models can be served: decoders with full attention.  Everything else is refused, with the reason.

Two questions.  :func:`check` asks a configuration, without weights and before any worker starts.  :func:`probe` asks
a built model by running two tokens through it and watching what it does with its cache; the answer is also the shape
of the cache to allocate.  ``check`` ends with the same probe on a skeleton without weights wherever the model's code
allows that.
"""

from __future__ import annotations

import inspect
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, Cache, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from kvbaton.errors import UnsupportedModel
from kvbaton_transformers.paged import KVShape

#: Held while transformers builds or loads a model: it sets torch's default dtype meanwhile, which is every thread's,
#: and the stages of one process may load at once.
BUILDING = threading.RLock()

_WINDOWS = "sliding-window or chunked attention (a layer forgets tokens, the paged cache keeps all)"
_RECURRENT = "recurrent state (a layer keeps a running state instead of KV per token)"
_INDEXED = "an indexer (a layer selects tokens by cached keys of its own)"
_BOTH_WAYS = "attention in both directions"

#: Part of the name of the cache layer that transformers would use -> what the model needs.
_LAYER_STATE = {"Sliding": _WINDOWS, "Linear": _RECURRENT, "Indexed": _INDEXED, "Dummy": "layers without attention"}

#: Configuration attribute that, when set, changes what attention reads -> what the model needs.
_ATTRIBUTES = {
    "is_encoder_decoder": "an encoder with cross attention",
    "add_cross_attention": "cross attention",
    "cross_attention_layers": "cross attention",
    "alibi": "ALiBi position biases",
    "use_bidirectional_attention": _BOTH_WAYS,
    "attention_chunk_size": _WINDOWS,
    "num_kv_shared_layers": "KV shared across layers",
    "index_topk": _INDEXED,
    "vision_config": "inputs other than text",
    "audio_config": "inputs other than text",
    "quantization_config": "quantised weights (convert the checkpoint to float32, bfloat16 or float16)",
}


def check(config: PretrainedConfig, source: str = "") -> None:
    """Raise :class:`~kvbaton.errors.UnsupportedModel` unless a model of this configuration can be served.

    Loads no weights.  ``source`` is what messages call the model.
    """
    missing = _missing(config)
    if missing:
        raise _unsupported(config, source, [f"it needs {what}" for what in missing], missing)
    try:
        with BUILDING, torch.device("meta"):
            skeleton: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    except Exception as error:
        reason = f"transformers cannot build it ({type(error).__name__}: {error})"
        raise _unsupported(config, source, [reason], [reason]) from error
    _judge_forward(skeleton, source)
    try:
        seen = _observe(skeleton)
    except Exception:
        # Code that looks at values (some experts and masks) cannot run without weights; the loaded model will be asked.
        return
    _judge(skeleton, source, seen)


def _missing(config: PretrainedConfig) -> list[str]:
    configs = list({id(c): c for c in (config, config.get_text_config(decoder=True))}.values())
    missing = [what for name, what in _ATTRIBUTES.items() if any(getattr(c, name, None) for c in configs)]
    if type(config) not in AutoModelForCausalLM._model_mapping:
        missing.append("an output head for text that transformers does not have for it")
    if not all(getattr(c, "is_causal", True) for c in configs):
        missing.append(_BOTH_WAYS)
    if any("local" in (getattr(c, "attention_layers", None) or ()) for c in configs):
        missing.append(_WINDOWS)
    if not missing:
        try:
            layers = DynamicCache(config=config).layers
        except Exception as error:
            return [f"layers that transformers has no cache for ({type(error).__name__}: {error})"]
        unlike = Counter(type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer)
        needs: Counter[str] = Counter()
        for layer_type, count in unlike.items():
            for what in [what for part, what in _LAYER_STATE.items() if part in layer_type] or [layer_type]:
                needs[what] += count
        missing = [f"{what}, in {count} of {len(layers)} layers" for what, count in needs.items()]
    return list(dict.fromkeys(missing))


class _Watching(Cache):
    """A cache that keeps nothing and notes what a model asks of it."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.written: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.asked: list[str] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.written.append((layer_idx, key_states, value_states))
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0

    def has_previous_state(self, *args: Any, **kwargs: Any) -> bool:
        self.asked.append(_RECURRENT)
        return False

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self.asked.append(_RECURRENT)
        return args[0]

    update_recurrent_state = update_conv_state

    def update_indexer(self, indexer_key_states: torch.Tensor, layer_idx: int) -> torch.Tensor:
        self.asked.append(_INDEXED)
        return indexer_key_states


class _Attention(TorchFunctionMode):
    """Notes attention over several queries that is neither causal nor masked."""

    def __init__(self) -> None:
        super().__init__()
        self.unmasked = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention and args[0].shape[-2] > 1:
            mask = args[3] if len(args) > 3 else kwargs.get("attn_mask")
            causal = args[5] if len(args) > 5 else kwargs.get("is_causal", False)
            self.unmasked |= mask is None and not causal
        return func(*args, **kwargs)


@torch.no_grad()
def _observe(model: PreTrainedModel) -> tuple[_Watching, bool, int]:
    """Two tokens through the decoder stack: its cache, whether it looked ahead, the size of its hidden state."""
    cache, watch, device = _Watching(), _Attention(), model.device
    positions = torch.arange(2, device=device)[None]
    first = torch.tensor([[1, 2]], device=device)
    with watch:
        hidden = model.base_model(
            input_ids=first, position_ids=positions, use_cache=True, **{cache_argument(model): cache}
        ).last_hidden_state
    ahead = watch.unmasked
    if not ahead and hidden.device.type != "meta":
        other = torch.tensor([[1, 3]], device=device)
        changed = model.base_model(
            input_ids=other, position_ids=positions, use_cache=True, **{cache_argument(model): _Watching()}
        ).last_hidden_state
        # the roundings of another batch of experts aside, the first token cannot know the second
        ahead = not torch.allclose(hidden[0, 0].float(), changed[0, 0].float(), rtol=0.05, atol=0.05)
    return cache, ahead, hidden.shape[-1]


def cache_argument(model: PreTrainedModel) -> str:
    """By which name a decoder stack takes its cache: ``cache`` since transformers 5.24, ``past_key_values`` before, and
    still where a model's code is not transformers' own."""
    return "cache" if "cache" in inspect.signature(model.base_model.forward).parameters else "past_key_values"


def probe(model: PreTrainedModel, source: str = "") -> KVShape:
    """The shape of the cache that ``model`` needs, found by running two tokens through it.

    Raises :class:`~kvbaton.errors.UnsupportedModel` where it does not take its positions and its cache from outside,
    looks at later tokens, or does not write exactly one K and one V per layer and token, equally shaped in all
    layers.  No state of the model is changed.
    """
    _judge_forward(model, source)
    try:
        seen = _observe(model)
    except Exception as error:
        reason = f"it cannot run two tokens ({type(error).__name__}: {error})"
        raise _unsupported(model.config, source, [reason], [reason]) from error
    return _judge(model, source, seen)


@torch.no_grad()
def largest_kv(model: PreTrainedModel, tokens: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest absolute values of K and of V, each ``[layer]``, in a text of token ids from all over the vocabulary.

    The same for equal weights on equal devices.
    """
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    # A large prime as the step scatters them.
    ids = (torch.arange(tokens, device=model.device) * 7919 % vocabulary)[None]
    cache = _Watching()
    positions = torch.arange(tokens, device=model.device)[None]
    model.base_model(input_ids=ids, position_ids=positions, use_cache=True, **{cache_argument(model): cache})
    keys, values = zip(*((key.abs().amax(), value.abs().amax()) for _, key, value in cache.written), strict=True)
    return torch.stack(keys), torch.stack(values)


def _judge_forward(model: PreTrainedModel, source: str) -> None:
    if model._is_stateful:
        raise _unsupported(model.config, source, [f"it needs {_RECURRENT}"], [_RECURRENT])
    if model.base_model is model:
        reason = "its decoder stack does not run apart from its output head"
        raise _unsupported(model.config, source, [reason], [reason])
    takes = inspect.signature(model.base_model.forward).parameters
    absent = [what for what in ("inputs_embeds", "attention_mask", "position_ids") if what not in takes]
    if cache_argument(model) not in takes:
        absent.append("a cache")
    if absent:
        reason = f"its forward does not take {', '.join(absent)}"
        raise _unsupported(model.config, source, [reason], absent)


def _judge(model: PreTrainedModel, source: str, seen: tuple[_Watching, bool, int]) -> KVShape:
    cache, ahead, hidden = seen
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    needs = [*cache.asked, *([_BOTH_WAYS] if ahead else [])]
    reasons = [f"it needs {what}" for what in dict.fromkeys(needs)]
    wrote = [layer for layer, _, _ in cache.written]
    shapes = {(tuple(k.shape), tuple(v.shape), k.dtype, v.dtype) for _, k, v in cache.written}
    if wrote != list(range(layers)):
        reasons.append(f"its {layers} layers wrote KV {len(wrote)} times, to layers {sorted(set(wrote))}")
    elif len(shapes) > 1:
        reasons.append(f"its layers differ in the shape of their KV ({sorted(map(str, shapes))})")
    if not reasons:
        [(key, value, dtype, value_dtype)] = shapes
        if len(key) == 4 and key[:3] == value[:3] == (1, key[1], 2) and dtype == value_dtype:
            return KVShape(layers, key[1], key[3], value[3], hidden, dtype)
        reasons.append(f"its K and V are not [row, head, token, dim] but {list(key)} and {list(value)}")
    raise _unsupported(model.config, source, reasons, needs or reasons)


def _unsupported(
    config: PretrainedConfig, source: str, reasons: Sequence[str], missing: Sequence[str]
) -> UnsupportedModel:
    name = f"{source} ({config.model_type})" if source else str(config.model_type)
    return UnsupportedModel(
        f"{name} cannot be served by the transformers engine: {'; '.join(reasons)}. It serves decoders with full"
        " attention in every layer, such as Llama, Qwen2, Qwen3 or SmolLM2.",
        model=name,
        missing=tuple(missing),
    )
