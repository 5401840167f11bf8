"""The end: nothing new is taken, what is under way may end, and what does not is told so."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.request

import openai
import pytest
from typer.testing import CliRunner

from kvbaton.cli.app import app
from kvbaton_conformance.books import check_books

from .conftest import MODEL, PATIENCE, SETTINGS, running, until

PROGRAM = "from kvbaton.cli import main; main()"


def dialled(front):
    """Whether it still listens."""
    try:
        socket.create_connection((front.server.host, front.server.port), 5).close()
    except (ConnectionRefusedError, ConnectionResetError):  # reset: it ceased while this one waited to be accepted
        return False
    return True


def in_background(action):
    """A thread with ``action``, and what comes of it."""
    results = []
    thread = threading.Thread(target=lambda: results.append(action()))
    thread.start()
    return thread, results


def test_what_is_under_way_may_end(gate):
    with running() as front:
        client = front.client()
        asked, answers = in_background(lambda: client.completions.create(model=MODEL, prompt="a b", max_tokens=5))
        until(lambda: front.live == 1)
        drained, whether = in_background(lambda: front.server.drain(PATIENCE))
        until(lambda: not dialled(front))
        gate.set()
        asked.join(PATIENCE)
        drained.join(PATIENCE)
        assert whether == [True]
        assert answers[0].usage.completion_tokens == 5
        check_books(front.runtime)


def test_on_an_open_connection_nothing_new_is_taken(gate):
    with running() as front:
        other, client = front.client(), front.client()
        client.models.list()  # its connection stays open
        asked, _ = in_background(lambda: other.completions.create(model=MODEL, prompt="a b", max_tokens=5))
        until(lambda: front.live == 1)
        drained, _ = in_background(lambda: front.server.drain(PATIENCE))
        until(lambda: not dialled(front))
        with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
            client.completions.create(model=MODEL, prompt="a")
        assert caught.value.status_code == 503
        gate.set()
        asked.join(PATIENCE)
        drained.join(PATIENCE)


def test_what_takes_too_long_is_cancelled_and_told(slow):
    with running() as front:

        def ask():
            with pytest.raises(openai.InternalServerError, match="shutting down") as caught:
                front.client().completions.create(model=MODEL, prompt="a b", max_tokens=700)
            return caught.value.status_code

        def stream():
            with pytest.raises(openai.APIError, match="shutting down"):
                list(front.client().completions.create(model=MODEL, prompt="c", max_tokens=700, stream=True))

        threads = [in_background(ask), in_background(stream)]
        # a reader that reads nothing must not keep the server up
        with front.dial(prompt="d", max_tokens=700, stream=True) as line:
            until(lambda: front.live == 3)
            line.recv(10)
            assert front.server.drain(0.1) is False
            for thread, _ in threads:
                thread.join(PATIENCE)
        assert threads[0][1] == [503]
        until(lambda: front.live == 0)
        check_books(front.runtime)


@pytest.fixture
def kvbaton():
    """``kvbaton(*arguments)``: ``kvbaton serve`` as a process; killed at the end where it still runs."""
    started = []

    def start(*arguments, **environment):
        settings = [part for key, value in SETTINGS.items() for part in ("--set", f"{key}={value}")]
        child = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "serve", *settings, *arguments], text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **environment},
        )  # fmt: skip
        started.append(child)
        return child

    yield start
    for child in started:
        if child.poll() is None:
            child.kill()
        child.communicate(timeout=30)


def ready(child):
    """The address, once it serves."""
    for line in child.stderr:
        if "serving" in line:
            return line.split(" at ")[1].split("/v1")[0]
    raise AssertionError(f"it ended: {child.wait(30)}")


def test_the_command_ends_with_0_when_it_is_told_to(kvbaton):
    child = kvbaton()
    url = ready(child)
    body = json.dumps({"prompt": "a b", "max_tokens": 3}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == 3
    child.send_signal(signal.SIGTERM)
    out, err = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "")
    assert err.rstrip().endswith("kvbaton: stopped")


@pytest.mark.parametrize(("listen", "says"), [(None, "cannot listen there"), ("nowhere", "write HOST:PORT")])
def test_the_command_says_why_it_cannot_start(front, listen, says):
    listen = listen or f"127.0.0.1:{front.server.port}"
    result = CliRunner().invoke(app, ["serve", "--model", MODEL, "--listen", listen])
    assert (result.exit_code, says in result.stderr) == (2, True)
