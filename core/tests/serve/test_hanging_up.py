"""Clients that go away, at every moment: their requests end, and everything they held comes back."""

import asyncio
import random
import threading
from collections import Counter

import openai
import pytest

from kvbaton import hookimpl
from kvbaton_conformance.books import check_books

from .conftest import MODEL, PATIENCE, running, until

CLIENTS = 50


class Endings:
    """How requests ended; an observer."""

    def __init__(self):
        self.reasons = Counter()

    @hookimpl
    def kvbaton_request_finished(self, record):
        self.reasons[record.finish_reason] += 1


@pytest.fixture
def endings(monkeypatch):
    """Of every runtime that a test starts with a server's hooks."""
    from kvbaton.serve import Server

    found, hooks = Endings(), Server.hooks.fget
    monkeypatch.setattr(Server, "hooks", property(lambda self: [*hooks(self), found]))
    return found


@pytest.mark.clause("C2.5", "C5.2")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_before_the_first_token(gate, endings, path, stream):
    prompt = {"prompt": "a b"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "a b"}]}
    with running() as front:
        line = front.dial(path, max_tokens=500, stream=stream, **prompt)
        until(lambda: front.live == 1)
        line.close()
        until(lambda: front.live == 0)  # although the engine stands still
        assert endings.reasons == {"cancelled": 1}
        gate.set()
        check_books(front.runtime)


def test_while_the_answer_is_made(endings, slow):
    with running() as front:
        line = front.dial(prompt="a b", max_tokens=700)
        until(lambda: front.runtime.statistics()["decode-0"]["engine"]["blocks_used"] > 2)
        line.close()
        until(lambda: front.live == 0)
        assert endings.reasons == {"cancelled": 1}
        check_books(front.runtime)


def test_in_the_middle_of_a_stream(endings, slow):
    with running() as front:
        line = front.dial(prompt="a b", max_tokens=700, stream=True)
        text = b""
        while text.count(b"data: ") < 3:
            text += line.recv(4096)
        line.close()
        until(lambda: front.live == 0)
        assert endings.reasons == {"cancelled": 1}
        check_books(front.runtime)


@pytest.mark.clause("C2.6")
def test_while_it_waits_for_admission(gate, endings):
    with running(**{"engine.options.transfer_slots": 1}) as front:
        served = front.dial(prompt="a b", max_tokens=4)
        until(lambda: front.live == 1)
        line = front.dial(prompt="c d", max_tokens=4)
        until(lambda: front.books["waiting"] == 1)
        line.close()
        until(lambda: front.books["waiting"] == 0)
        gate.set()
        assert served.recv(4096).startswith(b"HTTP/1.1 200")
        served.close()
        assert endings.reasons == {"cancelled": 1, "length": 1}
        check_books(front.runtime)


def test_while_its_prompt_is_still_made_into_tokens(endings, monkeypatch):
    began, go_on = threading.Event(), threading.Event()
    with running() as front:
        tokenizer = front.runtime.tokenizer
        encode = tokenizer.encode

        def slowly(text):
            began.set()
            go_on.wait(PATIENCE)
            return encode(text)

        monkeypatch.setattr(tokenizer, "encode", slowly)
        front.dial(prompt="a b", max_tokens=700).close()
        assert began.wait(PATIENCE)
        until(lambda: not front.server._bridge._calls)
        go_on.set()
        until(lambda: sum(endings.reasons.values()) == 1)
        assert endings.reasons == {"cancelled": 1}
        check_books(front.runtime)


def test_a_reader_that_reads_nothing_holds_up_nobody(slow):
    with running() as front, front.dial(prompt="a b", max_tokens=700, stream=True):
        until(lambda: front.live == 1)
        assert front.client().completions.create(model=MODEL, prompt="c", max_tokens=5).choices[0].text
        assert front.live == 1


@pytest.mark.clause("C2.5")
def test_fifty_clients_of_which_a_third_hang_up(endings, slow):
    """At random moments: before the answer's first byte, while it comes, streamed to or not."""
    with running(**{"engine.options.transfer_slots": 12}) as front:
        outcomes = asyncio.run(storm(front.url, random.Random(7)))
        until(lambda: front.live == 0)
        check_books(front.runtime)
        assert front.client().completions.create(model=MODEL, prompt="after the storm").choices[0].text
    assert sum(outcomes.values()) == CLIENTS
    assert outcomes["served"] == CLIENTS - CLIENTS // 3
    assert endings.reasons["length"] >= outcomes["served"]
    assert outcomes["left reading"] == 8
    assert endings.reasons["cancelled"] >= 8, (outcomes, endings.reasons)
    assert not endings.reasons["failed"]


async def storm(url, rng):
    """What became of each client."""
    outcomes = Counter()
    impatient = rng.sample(range(CLIENTS), CLIENTS // 3)
    # some leave in the middle of a stream that has no end of its own, the others at any time, perhaps before they asked
    reading = {index: rng.randrange(1, 5) for index in impatient[::2]}
    patience = {index: rng.uniform(0.0, 1.0) for index in impatient[1::2]}
    tokens = [rng.randrange(20, 60) for _ in range(CLIENTS)]

    async def one(client, index):
        prompt = " ".join(f"w{index}x{word}" for word in range(5 + index))
        how = {"model": MODEL, "max_tokens": tokens[index]}
        try:
            async with asyncio.timeout(patience.get(index, PATIENCE * 3)):
                if index in reading:
                    stream = await client.completions.create(
                        prompt=prompt, stream=True, model=MODEL, max_tokens=600, extra_body={"ignore_eos": True}
                    )
                    async with stream:
                        for _ in range(reading[index]):
                            await anext(stream)
                    outcomes["left reading"] += 1
                    return
                if index % 4 == 0:
                    answer = await client.completions.create(prompt=prompt, **how)
                    assert answer.usage.completion_tokens == tokens[index]
                elif index % 4 == 1:
                    answer = await client.chat.completions.create(messages=[{"role": "user", "content": prompt}], **how)
                    assert answer.usage.completion_tokens == tokens[index]
                else:
                    pieces = 0
                    async for _ in await client.completions.create(prompt=prompt, stream=True, **how):
                        pieces += 1
                    assert pieces > 1
        except (TimeoutError, openai.APIConnectionError):
            assert index in patience
            outcomes["left"] += 1
        else:
            outcomes["in time" if index in patience else "served"] += 1

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        await asyncio.gather(*(one(client, index) for index in range(CLIENTS)))
    return outcomes
