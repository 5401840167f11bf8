"""A front over a runtime of threads and scripted engines, at a free port of this host."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import openai
import pytest

from kvbaton import PDRuntime, load
from kvbaton.serve import Server
from kvbaton_conformance.scripted import ScriptedEngine

MODEL = "scripted:1"
SETTINGS = {
    "model": MODEL,
    "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
    "transport.name": "loopback",
    "serve.listen": "127.0.0.1:0",
}
#: Seconds that anything may take.
PATIENCE = 20.0


class Front:
    """A server and what is behind it."""

    def __init__(self, server: Server, runtime: PDRuntime) -> None:
        self.server, self.runtime, self.url = server, runtime, server.url
        self.clients: list[openai.OpenAI] = []

    def client(self, **how) -> openai.OpenAI:
        how = {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": PATIENCE, **how}
        self.clients.append(openai.OpenAI(**how))
        return self.clients[-1]

    def dial(self, path: str = "/v1/completions", **body) -> socket.socket:
        """A connection on which a request was sent, and nothing was read."""
        content = json.dumps({"model": MODEL, **body}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
        line = socket.create_connection((self.server.host, self.server.port), PATIENCE)
        line.sendall(head.encode() + b"\r\n\r\n" + content)
        return line

    @property
    def live(self) -> int:
        return self.books["live"]

    @property
    def books(self) -> dict:
        """The coordinator's alone: a stage answers after its step, and some stand still in theirs."""
        return self.runtime._service.call(self.runtime._service._books)


@contextlib.contextmanager
def running(**settings) -> Iterator[Front]:
    effective, _ = load(overrides={**SETTINGS, **settings})
    with Server(effective) as server, PDRuntime.start(effective, hooks=server.hooks) as runtime:
        server.attach(runtime)
        front = Front(server, runtime)
        try:
            yield front
        finally:
            for client in front.clients:
                client.close()


def until(condition, seconds: float = PATIENCE) -> None:
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "the condition did not come true"
        threading.Event().wait(0.005)


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    with running() as one:
        yield one


@pytest.fixture
def client(front) -> Iterator[openai.OpenAI]:
    with front.client() as client:
        yield client


@pytest.fixture
def gate(monkeypatch) -> Iterator[threading.Event]:
    """Decode steps wait for the event, so that a request is live for as long as a test wants."""
    gate = threading.Event()
    step = ScriptedEngine._decode_step
    monkeypatch.setattr(ScriptedEngine, "_decode_step", lambda self: step(self) if gate.wait(PATIENCE) else [])
    yield gate
    gate.set()


@pytest.fixture
def slow(monkeypatch) -> None:
    """Decode steps take a hundredth of a second."""
    step, pause = ScriptedEngine._decode_step, threading.Event()
    monkeypatch.setattr(ScriptedEngine, "_decode_step", lambda self: [pause.wait(0.01), step(self)][1])


@pytest.fixture
def settings_of():
    """Settings with overrides."""
    return lambda **settings: load(overrides={**SETTINGS, **settings})[0]


@pytest.fixture
def front_of_its_own() -> Iterator[Front]:
    with running() as one:
        yield one
