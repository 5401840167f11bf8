"""What every topic of the hand-off level starts from: deployments over the connector that is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvbaton.connector import Capabilities
from kvbaton.engine import Request, Role, SamplingParams
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.scripted import ScriptedLayout, ScriptedModel
from kvbaton_conformance.subject import Mode, Subject
from kvbaton_conformance.suite.topic import HandoffTopic

OpenDeployment = Callable[..., Deployment]

#: Thirty tokens: seven whole blocks of four and a half one.
PROMPT = tuple(range(30))
REQUEST = Request(PROMPT, SamplingParams(max_tokens=5))
OTHER = Request(tuple(range(100, 122)), SamplingParams(max_tokens=3))

#: Small enough for a prompt to need several chunks.
CHUNK_BYTES = 400


def request(start: int, length: int, max_tokens: int = 4, seed: int = 0) -> Request:
    """A prompt of ``length`` tokens that shares no beginning with one of another ``start``."""
    return Request(tuple(range(start, start + length)), SamplingParams(max_tokens=max_tokens, seed=seed))


class DeploymentTopic(HandoffTopic):
    """A hand-off turn by turn: both stages in this process."""

    @pytest.fixture
    def open_deployment(self, subject: Subject, mode: Mode) -> Iterator[OpenDeployment]:
        """``open_deployment(**how) -> Deployment`` over the connector, its memory laid out as the connector needs it.

        One that a failed test leaves open is closed.
        """
        opened: list[Deployment] = []

        def open_one(**how: Any) -> Deployment:
            deployment = Deployment(
                subject.plugin, subject.options, need=subject.need(mode), cuda=subject.device,
                **laid_out(subject.capabilities, how),
            )  # fmt: skip
            opened.append(deployment)
            return deployment

        yield open_one
        while opened:
            opened.pop().abandon()

    @pytest.fixture
    def world(self, open_deployment: OpenDeployment) -> Deployment:
        """One P and one D; D cannot take a grant back by itself, as with most transports."""
        return open_deployment(stepped=True, narrow={"revocable": False})


def laid_out(capabilities: Capabilities, how: dict[str, Any]) -> dict[str, Any]:
    """``how`` with what it leaves open, so that every offset and length suits the connector's alignment."""
    grain = capabilities.alignment
    settings = {"transfer.chunk_bytes": max(CHUNK_BYTES, 4 * grain), "deadline.chunk": 30.0, "deadline.shutdown": 5.0}
    filled = {**how, "settings": {**settings, **how.get("settings", {})}}
    filled["model"] = _aligned_model(how.get("model") or ScriptedModel(planes=2), grain)
    layouts = how.get("layouts") or {}
    filled["layouts"] = {
        role: _aligned_layout(layouts.get(role) or default, grain)
        for role, default in (
            (Role.PREFILL, ScriptedLayout(blocks=96, gap=0)), (Role.DECODE, ScriptedLayout(blocks=80, gap=5))
        )
    }  # fmt: skip
    return filled


def _up(size: int, grain: int) -> int:
    return -(-size // grain) * grain


def _aligned_model(model: ScriptedModel, grain: int) -> ScriptedModel:
    widths = tuple(_up(width, grain) for width in model.token_bytes)
    return ScriptedModel(model.seed, model.planes, widths, _up(model.final_bytes, grain), model.vocabulary)


def _aligned_layout(layout: ScriptedLayout, grain: int) -> ScriptedLayout:
    return ScriptedLayout(
        layout.blocks, layout.block_tokens, _up(layout.gap, grain), layout.final_slots, layout.compute_slots,
        layout.max_tokens,
    )  # fmt: skip
