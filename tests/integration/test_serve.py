"""``kvbaton serve`` as its operator starts it: a real model, prefill and decode in two processes, NIXL between them."""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from kvbaton import load

PROGRAM = "from kvbaton.cli import main; main()"
MODEL = "smollm2"
#: Seconds that anything may take.
PATIENCE = 100.0
CLIENTS = 50
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]


@dataclass(frozen=True)
class Served:
    """A server: its process and where it listens."""

    process: subprocess.Popen[str]
    url: str

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def sums(self, *series: str) -> dict[str, float]:
        """Of its metrics: for each beginning of a series' name and labels the sum of all that begin so."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as answer:
            lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
        return {wanted: sum(float(value) for name, _, value in lines if re.match(wanted, name)) for wanted in series}


#: What must be 0 where nothing is under way.
NOTHING = (
    r"kvbaton_requests\{",
    r"kvbaton_stage_transfers\{",
    "kvbaton_inflight_",
    "kvbaton_quarantined_",
    r'kvbaton_credits\{.*state="reserved"',
    r'kvbaton_blocks\{.*state="(used|leased)"',
    "kvbaton_credit_returns_repeated",
    "kvbaton_violations_total",
)


def start(*arguments: str) -> Served:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "serve", "--listen", "127.0.0.1:0", *arguments],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    said = []
    for line in process.stderr:
        said.append(line)
        if "serving" in line:
            assert "listening at" in said[0]
            # what it says from here on must not fill the pipe; it is read at the end
            return Served(process, line.split(" at ")[1].split("/v1")[0])
    raise AssertionError(f"it ended with {process.wait(30)}: {''.join(said)}")


def stop(served: Served, signum: int) -> None:
    served.process.send_signal(signum)
    out, err = served.process.communicate(timeout=60)
    assert (served.process.returncode, out) == (0, ""), err
    assert err.rstrip().endswith("kvbaton: stopped"), err


def until(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true"
        threading.Event().wait(0.05)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "smolm2"), 'no model "smolm2"'),
        (("--model", MODEL, "--transport", "lopback"), 'no transport "lopback"'),
        (("--model", MODEL, "--trace", "no/such/trace.json"), "there is no directory no/such"),
        (("--model", MODEL, "--set", "metrics.listen=192.0.2.1:0"), "cannot listen at 192.0.2.1:0"),
    ],
)
def test_what_is_refused_is_all_that_is_said(arguments: tuple[str, ...], says: str) -> None:
    """Nobody is told that it listens."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "serve", "--listen", "127.0.0.1:0", *arguments],
        text=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert says in done.stderr
    assert done.stderr.startswith("kvbaton: ")
    assert done.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = start("--model", MODEL, "--transport", "nixl", "--launch", "process", "--engine-option", "blocks=256")
    try:
        yield served
        stop(served, signal.SIGINT)
    finally:
        if served.process.poll() is None:
            served.process.kill()
            served.process.communicate(timeout=30)


@pytest.mark.clause("A1")
def test_a_chat_streamed_and_whole(served: Served) -> None:
    with served.client() as client:
        how: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "max_tokens": 24, "temperature": 0}
        whole = client.chat.completions.create(**how)
        stream = client.chat.completions.create(**how, stream=True, stream_options={"include_usage": True})
        chunks = list(stream)
    text = whole.choices[0].message.content
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert len(chunks) > 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert served.sums("kvbaton_bytes_total")["kvbaton_bytes_total"] > 0, "the KV crossed"


def test_a_stop_text_and_a_seed(served: Served) -> None:
    with served.client() as client:
        how: dict[str, Any] = {"model": MODEL, "prompt": "One, two, three, four,", "max_tokens": 8}
        plain = client.completions.create(**how, temperature=0).choices[0]
        assert " six" in plain.text
        cut = client.completions.create(**how, temperature=0, stop=" six").choices[0]
        assert (cut.text, cut.finish_reason) == (plain.text.partition(" six")[0], "stop")
        drawn = [client.completions.create(**how, temperature=0.9, top_p=0.9, seed=5).choices[0].text for _ in "ab"]
        assert drawn[0] == drawn[1]
        with pytest.raises(openai.BadRequestError, match="no prefill stage holds more"):
            client.completions.create(model=MODEL, prompt="word " * 5000)


def blocks(language: str) -> list[str]:
    """Of the page about serving."""
    page = Path(__file__).parents[2] / "docs" / "serve.md"
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_pages_clients_are_served(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    asking, embedding = blocks("python")
    exec(compile(asking.replace("http://127.0.0.1:8000", served.url), "serve.md", "exec"), {})
    assert "Paris" in capsys.readouterr().out
    exec(compile(embedding, "serve.md", "exec"), {})
    assert "serving at http://127.0.0.1:" in capsys.readouterr().out
    commands = blocks("console")[1].replace("http://127.0.0.1:8000", served.url).replace("\\\n", " ")
    answers = []
    for command in re.findall(r"^\$ (curl .*)$", commands, re.MULTILINE):
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=PATIENCE, check=True)
        answers.append(done.stdout)
    assert " six" in json.loads(answers[0])["choices"][0]["text"]
    assert answers[1].endswith("data: [DONE]\n\n")
    assert answers[2] in blocks("console")[1]
    assert "kvbaton_tokens_total" in answers[3]
    for text in blocks("toml"):
        load(overrides={"model": MODEL, **tomllib.loads(text)})


@pytest.mark.clause("C2.5")
def test_fifty_clients_of_which_a_third_hang_up(served: Served) -> None:
    began = time.monotonic()
    outcomes = asyncio.run(storm(served.url, random.Random(3)))
    print(f"{dict(outcomes)} in {time.monotonic() - began:.1f} s")
    assert outcomes["served"] == CLIENTS - CLIENTS // 3
    assert sum(outcomes.values()) == CLIENTS

    until(lambda: not any(served.sums(*NOTHING).values()))
    with served.client() as client:
        assert client.completions.create(model=MODEL, prompt="After the storm", max_tokens=4).choices[0].text


async def storm(url: str, rng: random.Random) -> Counter[str]:
    """What became of each client."""
    outcomes: Counter[str] = Counter()
    impatient = set(rng.sample(range(CLIENTS), CLIENTS // 3))
    patience = [rng.uniform(0.0, 4.0) if index in impatient else PATIENCE for index in range(CLIENTS)]

    async def one(client: openai.AsyncOpenAI, index: int) -> None:
        messages: list[Any] = [{"role": "user", "content": f"Tell me about the number {index}."}]
        how: dict[str, Any] = {"model": MODEL, "messages": messages, "max_tokens": 8 if index in impatient else 3}
        try:
            async with asyncio.timeout(patience[index]):
                if index % 2:
                    answer = await client.chat.completions.create(**how)
                    assert answer.usage.completion_tokens > 0
                else:
                    async for _ in await client.chat.completions.create(**how, stream=True):
                        pass
        except (TimeoutError, openai.APIConnectionError):
            assert index in impatient
            outcomes["hung up"] += 1
        else:
            outcomes["in time" if index in impatient else "served"] += 1

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=PATIENCE) as client:
        await asyncio.gather(*(one(client, index) for index in range(CLIENTS)))
    return outcomes


@pytest.mark.clause("C6.4")
def test_a_stage_that_dies_is_seen_in_health() -> None:
    scripted = ("--model", "scripted:1", "--set", "engine.name=kvbaton_conformance.scripted_plugin:plugin")
    served = start(*scripted, "--transport", "nixl", "--launch", "process", "--set", "recovery.mode=off")
    try:
        health = f"{served.url}/health"
        with urllib.request.urlopen(health, timeout=PATIENCE) as answer:
            assert answer.status == 200
        stages = [
            child
            for child in psutil.Process(served.process.pid).children()
            if "resource_tracker" not in " ".join(child.cmdline())
        ]
        stages[-1].kill()
        bodies: list[str] = []

        def unhealthy() -> bool:
            try:
                urllib.request.urlopen(health, timeout=PATIENCE).close()
            except urllib.error.HTTPError as error:
                with error:
                    bodies.append(error.read().decode())
            return bool(bodies)

        until(unhealthy)
        assert "stage is up; " in bodies[0]
        with served.client() as client, pytest.raises(openai.InternalServerError) as caught:
            client.completions.create(model="scripted:1", prompt="a")
        assert caught.value.status_code == 503
    finally:
        served.process.terminate()
        served.process.communicate(timeout=60)
