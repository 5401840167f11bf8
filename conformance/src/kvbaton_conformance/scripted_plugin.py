"""The scripted engine as an engine plugin: ``engine.name = "kvbaton_conformance.scripted_plugin:plugin"``.

Its model name is ``scripted:SEED``.  Whole runtimes can be run without any framework, in threads or in processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from kvbaton.engine import ENGINE_API_VERSION, Role, Tokenizer
from kvbaton.errors import ModelNotFound
from kvbaton_conformance.scripted import ScriptedEngine, ScriptedLayout, ScriptedModel

Positive = Annotated[int, Field(ge=1)]


class ScriptedOptions(BaseModel):
    """What a scripted stage may be told; see :class:`~kvbaton_conformance.scripted.ScriptedLayout`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    planes: Positive = 1
    token_bytes: tuple[Positive, ...] = (16, 16, 12, 12)
    final_bytes: Annotated[int, Field(ge=0)] = 24
    #: Different on the two sides, so that block tables, strides and counts are never equal by accident.
    prefill_blocks: Positive = 256
    decode_blocks: Positive = 200
    block_tokens: Positive = 4
    gap: Annotated[int, Field(ge=0)] = 5
    chunk: Positive = 8
    transfer_slots: Positive = 16
    compute_slots: Positive = 8
    max_tokens: Positive = 4096
    prefix_caching: bool = True
    #: A file: while it exists, a decode stage gives each request its first token and no other.
    held_by: Path | None = None


class ScriptedTokenizer:
    """Words to numbers and back, well enough for a demonstration."""

    def encode(self, text: str) -> list[int]:
        return [int.from_bytes(word.encode()[:3], "little") % 50_000 for word in text.split()] or [1]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode(" ".join(f"{message['role']}: {message['content']}" for message in messages))


class ScriptedPlugin:
    """An :class:`~kvbaton.engine.EnginePlugin`."""

    name = "scripted"
    api_version = ENGINE_API_VERSION
    Options: type[ScriptedOptions] = ScriptedOptions
    Engine: type[ScriptedEngine] = ScriptedEngine

    def check(self, model: str, options: Any) -> None:
        _seed(model)

    def tokenizer(self, model: str, options: Any) -> Tokenizer:
        return ScriptedTokenizer()

    def open(self, model: str, options: ScriptedOptions, role: Role, device: int | None) -> ScriptedEngine:
        prefill = role is Role.PREFILL
        layout = ScriptedLayout(
            blocks=options.prefill_blocks if prefill else options.decode_blocks, block_tokens=options.block_tokens,
            gap=0 if prefill else options.gap, final_slots=options.transfer_slots, compute_slots=options.compute_slots,
            max_tokens=options.max_tokens,
        )  # fmt: skip
        return self.Engine(
            role, scripted_model(model, options), layout, chunk=options.chunk, prefix_caching=options.prefix_caching,
            cuda=device, held_by=options.held_by,
        )  # fmt: skip


def scripted_model(model: str, options: ScriptedOptions) -> ScriptedModel:
    """The arithmetic behind a model name: what answers are right."""
    return ScriptedModel(_seed(model), options.planes, options.token_bytes, options.final_bytes)


def _seed(model: str) -> int:
    kind, _, seed = model.partition(":")
    if kind != "scripted" or not seed.isdigit():
        raise ModelNotFound(f'model {model!r} is not scripted: write "scripted:1"', model=model)
    return int(seed)


plugin = ScriptedPlugin()
