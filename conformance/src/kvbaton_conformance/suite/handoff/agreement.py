"""A1 and A2: what is decoded after a hand-off is what would have been decoded without it."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvbaton import messages
from kvbaton.engine import Request, Role, SamplingParams
from kvbaton.handoff import effects as fx
from kvbaton_conformance.clauses import require
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.gate import Weather
from kvbaton_conformance.scripted import ScriptedLayout, ScriptedModel
from kvbaton_conformance.suite.handoff.topic import DeploymentTopic, OpenDeployment, request


def steady(_world: Deployment, _turn: int) -> None:
    """Everybody at each turn."""


def slow_p(world: Deployment, turn: int) -> None:
    """P's transport is polled at every ninth turn only."""
    _polls(world, "prefill-0", turn % 9 == 0)


def slow_d(world: Deployment, turn: int) -> None:
    """D's transport is polled at every ninth turn only."""
    _polls(world, "decode-0", turn % 9 == 0)


def stopping(world: Deployment, turn: int) -> None:
    """Each side stops for forty turns of every hundred."""
    _polls(world, "prefill-0", turn % 100 >= 40)
    _polls(world, "decode-0", not 40 <= turn % 100 < 80)


def full(world: Deployment, turn: int) -> None:
    """The transport takes a chunk at every fifth turn only."""
    gate = world.seats["prefill-0"].gate
    if turn % 5:
        gate.hold("submissions")
    else:
        gate.let_go("submissions")


def _polls(world: Deployment, name: str, polled: bool) -> None:
    gate = world.seats[name].gate
    if polled:
        gate.let_go("polls")
    else:
        gate.hold("polls")


PACES = (steady, slow_p, slow_d, stopping, full)


class Agreement(DeploymentTopic):
    """A1, A2: equal tokens, exit depths and finish reasons; D alone chooses tokens."""

    @pytest.mark.clause("A1", "C3.1", "C3.2", "T3", "T4")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("pace", PACES, ids=lambda pace: pace.__name__.replace("_", "-"))
    def test_prompts_of_every_length(
        self, open_deployment: OpenDeployment, pace: Callable[[Deployment, int], None]
    ) -> None:
        """Lengths around the edges of blocks and chunks, one after the other and together, at several paces of polling.

        Troubleshooting:
        - only some lengths differ: partial blocks at the edges of ranges;
        - only some paces differ: something is reported before it is true, or lost when nobody looks.
        """
        world = open_deployment(prefix_caching=False)
        turns = iter(range(10**9))
        world.between = lambda: pace(world, next(turns))
        for length in (1, 3, 4, 5, 8, 9, 31, 32, 33, 50):
            world.submit(str(length), request(1000 * length, length, max_tokens=4))
        world.run_until(world.idle, "C6.7: all requests end", turns=8000)
        world.between = lambda: None
        world.let_go()
        for key in world.answers:
            world.check_answer(key)
        world.finish()

    @pytest.mark.clause("A1", "C3.2")
    @pytest.mark.mode("in-process")
    @pytest.mark.parametrize("planes", [1, 5])
    def test_many_planes(self, open_deployment: OpenDeployment, planes: int) -> None:
        """One plane and five, with components of odd widths; chunk sizes that cut through all of them."""
        model = ScriptedModel(seed=planes, planes=planes, token_bytes=(16, 7, 1, 24, 3))
        world = open_deployment(
            model=model, chunk=5, settings={"transfer.chunk_bytes": 333},
            layouts={
                Role.PREFILL: ScriptedLayout(blocks=200, block_tokens=3), Role.DECODE: ScriptedLayout(
                    blocks=190, block_tokens=3, gap=11
                )
            },
        )  # fmt: skip
        for index in range(4):
            world.submit(str(index), request(100 * index, 10 + 9 * index, max_tokens=4, seed=index))
        world.run_until(world.idle, "C6.7: all requests end")
        for key in world.answers:
            world.check_answer(key)
        world.finish()

    @pytest.mark.clause("A1", "C2.5", "C8.4", "C9.4")
    @pytest.mark.mode("in-process")
    def test_many_requests_at_once_some_cancelled(self, open_deployment: OpenDeployment, seed: int) -> None:
        """Two P and two D, everything in random order, a third cancelled at random moments; the rest agree."""
        draw = random.Random(seed)
        world = open_deployment(
            prefill=2, decode=2, seed=seed, narrow={"revocable": False} if draw.random() < 0.5 else {}
        )
        for seat in world.seats.values():
            seat.gate.weather = Weather(random.Random(draw.random()), report=0.6, repeat=0.1)
        beginning = tuple(range(500, 512))
        doomed: dict[str, int] = {}
        for index in range(24):
            rest = tuple(draw.randrange(10_000) for _ in range(draw.randrange(1, 30)))
            prompt = (*beginning, *rest) if index % 3 == 0 else rest
            sampling = SamplingParams(max_tokens=draw.randrange(1, 10), seed=index)
            world.submit(str(index), Request(prompt, sampling))
            if draw.random() < 0.3:
                doomed[str(index)] = draw.randrange(120)
        for turn in range(120):
            world.turn()
            for key in [key for key, when in doomed.items() if when == turn]:
                world.abort(key)
        world.run_until(world.idle, "C6.7: all requests end", turns=8000)
        finished = 0
        for key, answer in world.answers.items():
            tokens, _, _ = world.model.generate(answer.request)
            require(
                tuple(answer.tokens) == tokens[: len(answer.tokens)], "A1",
                f"request {key} was told tokens that are not those of an undisaggregated run",
                expected=tokens[:8], seen=answer.tokens[:8],
            )  # fmt: skip
            if key not in doomed:
                finished += 1
                world.check_answer(key)
        require(
            finished == 24 - len(doomed) and not world.violations, "A1", "a request was lost or somebody lied",
            seen=world.violations,
        )  # fmt: skip
        world.finish()

    @pytest.mark.clause("A2")
    @pytest.mark.mode("in-process")
    def test_p_never_samples(self, world: Deployment) -> None:
        """Seeded sampling: every token comes from D, the first one too, and none was drawn at P."""
        for index in range(3):
            world.submit(str(index), request(100 * index, 12, max_tokens=5, seed=index))
        world.run_until(world.idle, "C6.7: all requests end")
        p, d = (world.seats[name] for name in ("prefill-0", "decode-0"))
        require(
            (p.engine.sampled, d.engine.sampled) == (0, 15), "A2", "tokens were not all drawn by D",
            expected="0 at P, 15 at D", seen=f"{p.engine.sampled} at P, {d.engine.sampled} at D",
        )  # fmt: skip
        words = {type(mail.message) for mail in world.mail if mail.peer == p.peer and mail.way == "from"}
        require(
            not words & {messages.Output, messages.Finished, messages.Activated}, "A2", "P said something of decoding",
            seen=words,
        )  # fmt: skip
        for key in world.answers:
            world.check_answer(key)
        world.finish()

    @pytest.mark.clause("A1")
    @pytest.mark.mode("in-process")
    def test_the_finish_reason_is_the_same(self, world: Deployment) -> None:
        """A stop token in the middle, and at once; a length of one."""
        plain = request(50, 9, max_tokens=9)
        tokens, _, _ = world.model.generate(plain)
        for key, sampling in (
            ("stop", SamplingParams(max_tokens=9, stop_token_ids=(tokens[4],))),
            ("at once", SamplingParams(max_tokens=9, stop_token_ids=(tokens[0],))),
            ("one", SamplingParams(max_tokens=1)),
        ):
            answer = world.submit(key, Request(plain.prompt, sampling))
            world.run_until(world.idle, f"C6.7: request {key} ends")
            world.check_answer(key)
            require(answer.ending.ending is fx.Ending.FINISHED, "A1", "it did not finish", seen=answer)
        world.finish()
