"""How many bytes of KV a model has for each token, and in how many pieces: well-known models, and any checkpoint's.

The table's values are those of the models' own ``config.json`` on the Hugging Face Hub, of the repositories named
beside them: ``num_hidden_layers``, ``num_key_value_heads``, ``head_dim`` (where it is not stated, ``hidden_size`` over
``num_attention_heads``), ``hidden_size``, and for latent attention (MLA) ``kv_lora_rank + qk_rope_head_dim``, which is
all that a token leaves behind in a layer: there is no V.  ``dtype`` is that of the weights, in which engines keep the
cache unless told otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from kvbaton.errors import ModelNotFound, SettingsError, UnsupportedModel, closest

#: Bytes of one value.
DTYPES: Final[Mapping[str, int]] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
)
#: Larger than any number that a model has.
_MOST: Final = 1 << 32
#: What engines call them on their command lines.
_ALIASES: Final = {
    "fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16",
    "fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Model:
    """The KV cache of one token: in each of ``layers`` layers K and V of ``kv_heads * head_dim`` values each.

    ``latent``: values that a layer keeps in place of K and V (MLA); 0 where it keeps both.  ``planes``: how often the
    layers are run and kept apart (a looped model).  ``hidden``: values of the final payload; 0: none travels.
    """

    name: str
    layers: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    latent: int = 0
    planes: int = 1
    hidden: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("layers", "kv_heads", "head_dim", "planes"):
            if getattr(self, field) < 1:
                raise SettingsError(f"{field} is {getattr(self, field)}: at least 1 is needed", key=field, origin=None)

    @property
    def components(self) -> tuple[int, ...]:
        """Bytes of one token in each tensor of a layer: K and V, or the latent alone."""
        value = DTYPES[self.dtype]
        return (self.latent * value,) if self.latent else (self.kv_heads * self.head_dim * value,) * 2

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in all layers and planes."""
        return self.planes * self.layers * sum(self.components)

    @property
    def final_bytes(self) -> int:
        """Bytes of the final hidden state."""
        return self.hidden * DTYPES[self.dtype]

    def __str__(self) -> str:
        heads = f"latent {self.latent}" if self.latent else f"{self.kv_heads} KV heads of {self.head_dim}"
        runs = f"{self.planes} x " if self.planes > 1 else ""
        return f"{self.name}: {runs}{self.layers} layers, {heads}, {self.dtype}"


def _of(repository: str, layers: int, kv_heads: int, head_dim: int, hidden: int, **more: Any) -> Model:
    name = more.pop("name")
    return Model(name, layers, kv_heads, head_dim, hidden=hidden, source=repository, **more)


_MODELS: Final = (
    _of("meta-llama/Llama-3.1-8B", 32, 8, 128, 4096, name="llama-8b"),
    _of("meta-llama/Llama-3.1-70B", 80, 8, 128, 8192, name="llama-70b"),
    _of("meta-llama/Llama-3.1-405B", 126, 8, 128, 16384, name="llama-405b"),
    _of("meta-llama/Llama-3.2-1B", 16, 8, 64, 2048, name="llama-1b"),
    _of("meta-llama/Llama-3.2-3B", 28, 8, 128, 3072, name="llama-3b"),
    _of("meta-llama/Llama-2-7b-hf", 32, 32, 128, 4096, name="llama-2-7b", dtype="float16"),
    _of("mistralai/Mistral-7B-v0.3", 32, 8, 128, 4096, name="mistral-7b"),
    _of("mistralai/Mixtral-8x7B-v0.1", 32, 8, 128, 4096, name="mixtral-8x7b"),
    _of("Qwen/Qwen2.5-7B", 28, 4, 128, 3584, name="qwen2.5-7b"),
    _of("Qwen/Qwen2.5-72B", 80, 8, 128, 8192, name="qwen2.5-72b"),
    _of("Qwen/Qwen3-8B", 36, 8, 128, 4096, name="qwen3-8b"),
    _of("Qwen/Qwen3-32B", 64, 8, 128, 5120, name="qwen3-32b"),
    _of("Qwen/Qwen3-235B-A22B", 94, 4, 128, 4096, name="qwen3-235b"),
    _of("microsoft/phi-4", 40, 10, 128, 5120, name="phi-4"),
    _of("HuggingFaceTB/SmolLM2-135M", 30, 3, 64, 576, name="smollm2-135m"),
    _of("deepseek-ai/DeepSeek-V2-Lite", 27, 1, 576, 2048, name="deepseek-v2-lite", latent=576),
    _of("deepseek-ai/DeepSeek-V3", 61, 1, 576, 7168, name="deepseek-v3", latent=576),
    _of("moonshotai/Kimi-K2-Instruct", 61, 1, 576, 7168, name="kimi-k2", latent=576),
    _of("ByteDance/Ouro-1.4B", 24, 16, 128, 2048, name="ouro-1.4b", planes=4),
)
#: Name to model.
MODELS: Final[Mapping[str, Model]] = MappingProxyType({model.name: model for model in _MODELS})


def find(like: str) -> Model:
    """The model of that name, or the one whose ``config.json`` (or folder) that is.

    Raises :class:`~kvbaton.errors.ModelNotFound`, with the nearest names, and :class:`~kvbaton.errors.UnsupportedModel`
    for a file that does not say what is needed.
    """
    if like.lower() in MODELS:
        return MODELS[like.lower()]
    path = Path(like).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.is_file():
        return of_checkpoint(path)
    if path.suffix == ".json" or "/" in like:
        raise ModelNotFound(
            f"--like {like}: there is no such file; a name ({', '.join(MODELS)}) or the config.json of a checkpoint",
            model=like,
        )
    raise ModelNotFound(
        f'--like {like}: no model "{like}" is known.{closest(like, MODELS)} Known: {", ".join(MODELS)}. Or name the'
        " config.json of a checkpoint, or give --layers, --kv-heads, --head-dim and --dtype",
        model=like,
    )


def with_numbers(
    model: Model | None, layers: int | None, kv_heads: int | None, head_dim: int | None, dtype: str | None
) -> Model:
    """``model`` with what is given in place of its own; where there is none, all but ``dtype`` are needed.

    Raises :class:`~kvbaton.errors.SettingsError`.
    """
    given = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim}
    changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if dtype is not None:
        changes["dtype"] = known_dtype(dtype)
    if model is not None:
        if not changes:
            return model
        # who gives heads describes a cache with K and V
        if changes.keys() & {"kv_heads", "head_dim"}:
            changes["latent"] = 0
        return replace(model, name=f"{model.name}, changed", **changes)
    missing = [f"--{name.replace('_', '-')}" for name in given if name not in changes]
    if missing:
        raise SettingsError(
            f"{', '.join(missing)}: needed as well where no --like is given", key=missing[0], origin=None
        )
    return Model("as given", **changes)


def known_dtype(name: str) -> str:
    """The name in :data:`DTYPES` of what an engine or a checkpoint calls so."""
    plain = name.lower().removeprefix("torch.")
    plain = _ALIASES.get(plain, plain)
    if plain not in DTYPES:
        raise SettingsError(
            f'dtype "{name}" is not known.{closest(plain, [*DTYPES, *_ALIASES])} Known: {", ".join(DTYPES)}',
            key="dtype", origin=None,
        )  # fmt: skip
    return plain


def of_checkpoint(path: Path) -> Model:
    """What the ``config.json`` of a Hugging Face checkpoint says about its KV cache.

    Raises :class:`~kvbaton.errors.UnsupportedModel` where it does not say it.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: not a configuration that can be read: {error}", model=str(path)) from error
    if not isinstance(config, dict):
        raise UnsupportedModel(f"{path}: not a configuration: an object is expected", model=str(path))
    # a model for images and text keeps the numbers of its language part apart
    text = config.get("text_config")
    if isinstance(text, dict) and "num_hidden_layers" not in config:
        config = {**config, **text}

    def number(*names: str) -> int | None:
        for name in names:
            value = config.get(name)
            if type(value) is int and 0 < value <= _MOST:
                return value
        return None

    def needed(*names: str) -> int:
        value = number(*names)
        if value is None:
            raise UnsupportedModel(
                f"{path}: it has no {' or '.join(names)}; give --layers, --kv-heads and --head-dim", model=str(path)
            )
        return value

    hidden = number("hidden_size", "n_embd", "d_model") or 0
    latent = number("kv_lora_rank") or 0
    if latent:
        latent += number("qk_rope_head_dim") or 0
        heads, head_dim = 1, latent
    else:
        queries = needed("num_attention_heads", "n_head")
        heads = number("num_key_value_heads", "num_kv_heads", "multi_query_group_num") or queries
        head_dim = number("head_dim", "kv_channels") or (hidden or needed("hidden_size")) // queries
    written = config.get("torch_dtype") or config.get("dtype")
    return Model(
        str(config.get("_name_or_path") or config.get("model_type") or path.parent.name or path.stem),
        needed("num_hidden_layers", "n_layer", "num_layers"),
        heads,
        head_dim,
        known_dtype(written) if isinstance(written, str) else "bfloat16",
        latent,
        number("total_ut_steps") or 1,
        hidden,
        str(path),
    )
