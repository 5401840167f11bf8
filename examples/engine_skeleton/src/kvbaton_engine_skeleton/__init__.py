"""The smallest engine that takes part in kvbaton's hand-off: copy this package and fill in your own.

This module is what is loaded before anybody knows whether the engine is wanted, so it is light: it says what can be
set, looks at a model's name, and opens engines.  The engine is :mod:`kvbaton_engine_skeleton.engine`; what stands for a
model is :mod:`kvbaton_engine_skeleton.toy`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from pydantic import BaseModel, ConfigDict, Field

from kvbaton.engine import ENGINE_API_VERSION, Role
from kvbaton.errors import ModelNotFound

if TYPE_CHECKING:
    from kvbaton_engine_skeleton.engine import SkeletonEngine

Count = Annotated[int, Field(ge=1)]


class SkeletonOptions(BaseModel):
    """What can be set, as ``engine.options``.  An option that nobody reads is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    block_tokens: Count = Field(default=16, description="tokens per KV block")
    blocks: Count = Field(default=256, description="KV blocks")
    prefill_chunk: Count = Field(default=64, description="prompt tokens computed at once")
    max_running: Count = Field(default=8, description="requests computed at once")
    transfer_slots: Count = Field(default=16, description="transfers alive at once: slots for final payloads")
    max_tokens: Count = Field(default=2048, description="the longest sequence")


class ByteTokenizer:
    """A token is a byte.  Fill in: your model's tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token_ids).decode(errors="replace")


class SkeletonPlugin:
    """``engine.name = "skeleton"``."""

    name = "skeleton"
    api_version = ENGINE_API_VERSION
    Options = SkeletonOptions

    def check(self, model: str, options: SkeletonOptions) -> None:
        """Refuse, before any worker starts, what cannot be served."""
        if model != "toy":
            raise ModelNotFound(f'the skeleton serves one model, "toy", and not {model!r}', model=model)

    def tokenizer(self, model: str, options: SkeletonOptions) -> ByteTokenizer:
        return ByteTokenizer()

    def open(self, model: str, options: SkeletonOptions, role: Role, device: int | None) -> SkeletonEngine:
        """Load the model.  Called in the stage's own thread or process, once per stage."""
        from kvbaton_engine_skeleton.engine import SkeletonEngine  # only who opens one pays for it

        return SkeletonEngine(options, role)


#: The object behind the entry point.
plugin = SkeletonPlugin()

__all__ = ["SkeletonPlugin", "plugin"]
