"""What long runs of a whole deployment have in common: engine and stages, requests of many lengths, their commands."""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from kvbaton import Request, SamplingParams, Settings, load
from kvbaton.cli.assignments import assignments
from kvbaton.errors import KvbatonError
from kvbaton_conformance.clauses import ClauseBroken

_T = TypeVar("_T")

#: What a plain run is: an engine that needs no model.
SCRIPTED = {"model": "scripted:7", "engine.name": "kvbaton_conformance.scripted_plugin:plugin"}
#: What is computed together changes no bits, so that tokens may be compared (A3).
TRANSFORMERS = {"engine.name": "transformers", "engine.options": {"batching": "isolated"}}


def deployed(overrides: Mapping[str, Any]) -> Settings:
    """Two stages of each kind, as processes, unless ``overrides`` say otherwise."""
    base = {"stages.launch": "process", "stages.prefill": 2, "stages.decode": 2}
    return load(overrides={**base, **overrides})[0]


def many_requests(count: int, prompt_tokens: int, max_tokens: int, seed: int) -> list[Request]:
    """Of every length up to ``prompt_tokens``; a quarter of them begin alike."""
    draw = random.Random(seed)
    common = [draw.randrange(1, 40_000) for _ in range(prompt_tokens // 2)]
    made = []
    for number in range(count):
        start = common if number % 4 == 0 else []
        length = draw.randrange(len(start) + 1, prompt_tokens + 1)
        prompt = (*start, *(draw.randrange(1, 40_000) for _ in range(length - len(start))))
        made.append(Request(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True)))
    return made


class Defaults(Protocol):
    """What every plan has, and a command may say otherwise."""

    @property
    def together(self) -> int: ...

    @property
    def prompt_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def seed(self) -> int: ...

    @property
    def patience(self) -> float: ...


def command(name: str, documentation: str | None, plan: Defaults) -> argparse.ArgumentParser:
    """``python -m kvbaton_conformance.NAME`` with the options that every long run has."""
    parser = argparse.ArgumentParser(
        prog=f"python -m kvbaton_conformance.{name}", description=(documentation or "").partition("\n\n")[0]
    )
    parser.add_argument("--transport", required=True, help="a connector that reaches other processes")
    parser.add_argument("--model", help="a real model, which the transformers engine runs; else a scripted one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other setting")
    parser.add_argument("--together", type=int, default=plan.together, help="requests under way at a time")
    parser.add_argument("--prompt-tokens", type=int, default=plan.prompt_tokens, help="of one prompt, at most")
    parser.add_argument("--max-tokens", type=int, default=plan.max_tokens)
    parser.add_argument("--seed", type=int, default=plan.seed)
    parser.add_argument("--patience", type=float, default=plan.patience, help="seconds without any end: a hang")
    return parser


def overrides(given: argparse.Namespace) -> dict[str, Any]:
    """The settings that a command's options ask for."""
    engine = SCRIPTED if given.model is None else {**TRANSFORMERS, "model": given.model}
    return {**engine, "transport.name": given.transport, **dict(assignments("--set", given.set))}


def played(play: Callable[[Callable[[str], None]], _T]) -> _T | None:
    """What ``play`` finds, which is told where to say what it is at; ``None`` where it is broken, which was said."""
    logging.getLogger("kvbaton").addHandler(logging.NullHandler())
    logging.getLogger("kvbaton").propagate = False
    began = time.monotonic()

    def progress(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)

    try:
        return play(progress)
    except (ClauseBroken, KvbatonError) as error:
        print(f"BROKEN: {error}", flush=True)
        return None
