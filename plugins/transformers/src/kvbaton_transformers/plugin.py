"""The plugin object behind the entry point, and the engine's own settings.  Importing it loads no framework."""

from __future__ import annotations

import contextlib
import importlib.metadata
import re
from typing import TYPE_CHECKING, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from kvbaton.engine import ENGINE_API_VERSION
from kvbaton.errors import ConfigurationError
from kvbaton_transformers import sources

if TYPE_CHECKING:
    from kvbaton.doctor.leftovers import Leftover
    from kvbaton.engine import Role, StageEngine, Tokenizer
    from kvbaton_transformers.engine import TransformersEngine
    from kvbaton_transformers.looped import LoopOptions

#: The oldest transformers whose models take their cache as this engine gives it, and the first that may not: as in
#: pyproject.toml.
OLDEST: Final = (5, 17)
BEYOND: Final = (6,)


class Loops(BaseModel):
    """Run the model's decoder stack several times over, with a gate that ends a token's loops early."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_depth: int = Field(ge=1, description="passes over the decoder stack, at most")
    layout: Literal["last_exited", "shared"] = Field(
        default="last_exited", description="one storage plane per depth, or one for all"
    )
    threshold: float = Field(
        default=0.5, ge=0.0, le=1.0, description="a token exits once the gate exceeds it; 1: never early"
    )
    gate_seed: int = Field(default=0, ge=0, description="seeds the gate's random weights")

    def build(self) -> LoopOptions:
        from kvbaton_transformers.looped import Layout, LoopOptions

        return LoopOptions(self.max_depth, Layout(self.layout), self.threshold, self.gate_seed)


class TransformersOptions(BaseModel):
    """Settings of the transformers engine.  Both stages need equal ones where KV depends on them; sizes may differ."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32", description="precision of weights and cache"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto: the stage's GPU if it has one, else CPU"
    )
    kv_dtype: Literal["model", "fp8"] = Field(
        default="model", description="what K and V are kept in: the model's dtype, or float8 (e4m3) with scales"
    )
    kv_scales: Literal["block", "head", "tensor"] = Field(
        default="block",
        description="fp8: scales of K and V of a layer: one per block, one per block and head, or one for all blocks",
    )
    block_tokens: int = Field(default=16, ge=1, description="tokens per KV block")
    blocks: int = Field(default=512, ge=1, description="KV blocks in each storage plane")
    prefill_chunk: int = Field(default=256, ge=1, description="prompt tokens computed at once for one request")
    max_batch_tokens: int = Field(default=2048, ge=1, description="tokens in one forward; one chunk may always go")
    max_running: int = Field(default=16, ge=1, description="requests computed at once")
    transfer_slots: int = Field(default=32, ge=1, description="transfers alive at once: slots for final payloads")
    prefix_caching: bool = Field(default=True, description="share the KV of equal prompt beginnings")
    batching: Literal["grouped", "isolated"] = Field(
        default="grouped",
        description="isolated: each request's bits are independent of what else runs, at the cost of speed",
    )
    speculation: Literal["off", "prompt-lookup"] = Field(
        default="off", description="prompt-lookup: check several guessed tokens at once; the output stays the same"
    )
    draft_tokens: int = Field(default=4, ge=1, description="speculation: guesses per request and step, at most")
    ngram: int = Field(default=2, ge=1, description="speculation: tokens that must have occurred before, for a guess")
    loops: Loops | None = Field(default=None, description="run the decoder as a looped model")

    @model_validator(mode="after")
    def _agree(self) -> TransformersOptions:
        if self.loops is not None and self.loops.layout == "shared" and self.speculation != "off":
            raise ValueError(
                "speculation does not work with loops.layout shared, where a result depends on how tokens are cut into"
                " chunks, so that checking several at once would change them; use last_exited, or speculation off"
            )
        if self.kv_dtype == "fp8" and self.loops is not None:
            raise ValueError(
                "kv_dtype fp8 does not work with loops: a token that exits is copied to blocks with other scales, or"
                " its block's scales are overwritten; leave one of the two out"
            )
        if self.kv_dtype != "fp8" and "kv_scales" in self.model_fields_set:
            raise ValueError("kv_scales is for kv_dtype fp8: set the one too, or leave the other out")
        return self


class TransformersPlugin:
    """Hugging Face decoders with full attention, over a paged KV cache."""

    name = "transformers"
    api_version = ENGINE_API_VERSION
    Options = TransformersOptions

    def check(self, model: str, options: TransformersOptions) -> None:
        """Raise unless ``model`` can be served; converts a GGUF file on the way, so that workers start fast.

        Raises :class:`~kvbaton.errors.ModelError`, or :class:`~kvbaton.errors.ConfigurationError` for a missing GPU or
        a transformers that is too old.
        """
        _recent_enough()
        sources.checkpoint(model)  # what is not there is said before seconds have gone into imports
        from kvbaton_transformers import checkpoints

        self._device(options, None if options.device == "auto" else 0)
        checkpoints.prepare(model)

    def tokenizer(self, model: str, options: TransformersOptions) -> Tokenizer:
        _recent_enough()
        sources.find(model)
        from kvbaton_transformers import checkpoints

        return checkpoints.load_tokenizer(model)

    def open(self, model: str, options: TransformersOptions, role: Role, device: int | None) -> StageEngine:
        """Load the model for ``role``; ``device`` numbers the stage's GPU, None: it has none."""
        return self.open_engine(model, options, role, device)

    def open_engine(
        self, model: str, options: TransformersOptions, role: Role, device: int | None
    ) -> TransformersEngine:
        """The same with its own type: a COLOCATED engine's ``add`` is no part of the protocol."""
        _recent_enough()  # this may be another host than that of the check
        from kvbaton_transformers import checkpoints
        from kvbaton_transformers.engine import TransformersEngine

        checkpoint = checkpoints.load(
            model,
            dtype=options.dtype,
            device=self._device(options, device),
            loops=options.loops.build() if options.loops else None,
        )
        return TransformersEngine(checkpoint, options, role, lambda: checkpoints.load_tokenizer(model))

    def leftovers(self) -> list[Leftover]:
        """Conversions that were killed; see :class:`~kvbaton.connector.ConnectorPlugin`."""
        from kvbaton_transformers.cache_folder import leftovers

        return leftovers()

    @staticmethod
    def _device(options: TransformersOptions, device: int | None) -> str:
        if options.device == "cpu" or (options.device == "auto" and device is None):
            return "cpu"
        import torch

        number, present = device or 0, torch.cuda.device_count()
        if number >= present:
            raise ConfigurationError(
                f"the engine is to run on GPU {number}, and this machine has {present}. Set the option device to"
                ' "cpu", or give the stage a GPU that exists.', device=number, present=present,
            )  # fmt: skip
        return f"cuda:{number}"


def _recent_enough() -> None:
    """Raise where the installed transformers is too old.  Before anything of it is imported: an old one lacks names,
    and what else it lacks would be taken for a fault of the model."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # none at all: the import says so
        installed = importlib.metadata.version("transformers")
        if tuple(map(int, re.findall(r"\d+", installed)[:2])) < OLDEST:
            oldest, beyond = (".".join(map(str, version)) for version in (OLDEST, BEYOND))
            raise ConfigurationError(
                f"transformers {installed} is too old for the transformers engine, which needs {oldest} or later:"
                f" pip install 'transformers>={oldest},<{beyond}'", installed=installed, oldest=oldest,
            )  # fmt: skip


plugin = TransformersPlugin()
