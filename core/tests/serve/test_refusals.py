"""Every way not to get an answer: its status, OpenAI's error object, and that nothing is left behind."""

import contextlib
import http.client
import json
import threading
import time
import urllib.error
import urllib.request

import openai
import pytest

from kvbaton.engine import StepOutput
from kvbaton.errors import ConfigurationError, SettingsError
from kvbaton.identity import PeerId
from kvbaton.serve import Server, check_installed
from kvbaton.serve.readiness import Readiness
from kvbaton_conformance.books import check_books
from kvbaton_conformance.scripted import ScriptedEngine
from kvbaton_conformance.scripted_plugin import ScriptedTokenizer

from .conftest import MODEL, PATIENCE, running, until

HELLO = [{"role": "user", "content": "hello"}]


def post(url, body, **headers):
    """Status and JSON of a request that no client would make."""
    request = urllib.request.Request(url, body, {"content-type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@pytest.mark.parametrize(
    ("field", "value", "param", "says"),
    [
        ("n", 2, "n", "n other than 1 is not supported"),
        ("logprobs", 0, "logprobs", "logprobs is not supported"),
        ("echo", True, "echo", "echo is not supported"),
        ("best_of", 3, "best_of", "best_of is not supported"),
        ("presence_penalty", 0.5, "presence_penalty", "presence_penalty is not supported"),
        ("temperature", 3, "temperature", "less than or equal to 2"),
        ("temperature", "hot", "temperature", "valid number"),
        ("max_tokens", 0, "max_tokens", "greater than or equal to 1"),
        ("stop", ["a", ""], "stop", "none of them empty"),
        ("stop", ["x" * 257], "stop", "at most 256 characters"),
        ("prompt", ["a", "b"], "prompt", "one prompt per request is supported, not 2"),
        ("prompt", "", "prompt", "at least one token"),
        ("prompt", [1, "b"], "prompt", "a text or a list of token ids"),
        ("prompt", [-1], "prompt", "a text or a list of token ids"),
        ("stream_options", {"include_usage": True}, None, "stream_options is for stream = true"),
    ],
)
def test_a_completion_that_cannot_be_served(client, field, value, param, says):
    how = {"model": MODEL, "prompt": "hello", "extra_body": {field: value}}
    with pytest.raises(openai.BadRequestError, match=says) as caught:
        client.completions.create(**how)
    assert (caught.value.param, caught.value.type) == (param, "invalid_request_error")
    assert caught.value.code == ("unsupported_parameter" if "not supported" in says else None)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools is not supported"),
        ({"logprobs": True}, "logprobs is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "role tool is not supported"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "no text"),
    ],
)
def test_a_chat_that_cannot_be_served(client, how, says):
    with pytest.raises(openai.BadRequestError, match=says):
        client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **how})


def test_an_unknown_model_and_an_unknown_path(client, front):
    with pytest.raises(openai.NotFoundError, match="there is no model gpt-9; there is scripted:1") as caught:
        client.completions.create(model="gpt-9", prompt="hello")
    assert caught.value.code == "model_not_found"
    assert post(f"{front.url}/v1/embeddings", b"{}")[1]["error"]["message"] == "there is no /v1/embeddings"
    status, answer = post(f"{front.url}/health", b"{}")
    assert (status, answer["error"]["message"]) == (405, "/health does not take POST")


def test_a_prompt_that_can_never_fit(client):
    with pytest.raises(openai.BadRequestError, match="no prefill stage holds more than") as caught:
        client.completions.create(model=MODEL, prompt="word " * 1500)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "the body is not JSON"),
        (b"[1]", "must be a JSON object"),
        (b"", "must be a JSON object"),
        (b'{"model": "scripted:1"}', "prompt: Field required"),
        (b'{"prompt": "\\ud800"}', None),
        (b"[" * 100_000, None),
    ],
)
def test_a_body_that_is_no_request(front, body, says):
    status, answer = post(f"{front.url}/v1/completions", body)
    assert status == 400
    assert says is None or says in answer["error"]["message"]


def test_json_is_to_be_sent_as_such(front):
    status, answer = post(f"{front.url}/v1/completions", b'{"prompt": "a"}', **{"content-type": "text/plain"})
    assert (status, "content-type: application/json" in answer["error"]["message"]) == (400, True)


def test_a_body_is_bounded_declared_or_not():
    with running(**{"serve.max_body": 1000}) as front:
        body = json.dumps({"model": MODEL, "prompt": "a" * 2000}).encode()
        where = front.url.removeprefix("http://")
        # The rest is never sent: a client that still writes when the answer has come and the connection is closed
        # may find a broken pipe in place of the answer.
        for header, sent in (
            (("content-length", str(len(body))), b""),
            (("transfer-encoding", "chunked"), b"%x\r\n%s\r\n" % (1500, body[:1500])),  # nobody says how long
        ):
            with contextlib.closing(http.client.HTTPConnection(where, timeout=20)) as client:
                client.putrequest("POST", "/v1/completions")
                client.putheader("content-type", "application/json")
                client.putheader(*header)
                client.endheaders()
                client.send(sent)
                answer = client.getresponse()
                assert (answer.status, json.load(answer)["error"]["code"]) == (413, "request_too_large")


def test_keys_open_v1_and_nothing_else_is_locked(tmp_path):
    (tmp_path / "keys").write_text("first\n\n  second \n")
    with running(**{"serve.api_key_file": tmp_path / "keys"}) as front:
        for key in ("", "first\n", "firs", "none"):
            with pytest.raises((openai.AuthenticationError, openai.APIConnectionError)):
                front.client(api_key=key or "x").models.list()
        assert post(f"{front.url}/v1/completions", b"{}")[0] == 401
        for key in ("first", "second"):
            assert front.client(api_key=key).models.list().data
        with urllib.request.urlopen(f"{front.url}/health", timeout=20) as answer:
            assert answer.status == 200


@pytest.mark.parametrize(("content", "says"), [(None, "cannot be read"), ("\n", "holds no key")])
def test_a_file_of_keys_must_have_some(tmp_path, settings_of, content, says):
    if content is not None:
        (tmp_path / "keys").write_text(content)
    with pytest.raises(SettingsError, match=says):
        Server(settings_of(**{"serve.api_key_file": tmp_path / "keys"}))


def test_an_address_that_is_taken(front, settings_of):
    with pytest.raises(SettingsError, match="cannot listen there: Address already in use"):
        Server(settings_of(**{"serve.listen": f"127.0.0.1:{front.server.port}"}))


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigurationError, match=r"pip install 'kvbaton\[serve\]'"):
        check_installed()


@pytest.mark.clause("C2.6")
@pytest.mark.parametrize(
    ("settings", "served"), [({"serve.requests": 2}, 2), ({"limits.waiting": 1, "engine.options.transfer_slots": 1}, 2)]
)
def test_too_many_are_told_to_come_back(gate, settings, served):
    with running(**settings) as front:
        with contextlib.ExitStack() as held:
            for count in range(1, served + 1):  # one runs, the other may wait
                held.enter_context(front.dial(prompt="a"))
                until(lambda count=count: front.live == count)
            with pytest.raises(openai.RateLimitError) as caught:
                front.client().completions.create(model=MODEL, prompt="a")
            assert caught.value.response.headers["retry-after"] == "1"
            assert caught.value.code == "rate_limit_exceeded"
        gate.set()
        until(lambda: front.live == 0)
        assert front.client().completions.create(model=MODEL, prompt="a").choices[0].text


def test_a_request_that_takes_too_long(gate, monkeypatch):
    monkeypatch.setattr("kvbaton.serve.exchange._GRACE", PATIENCE)  # the runtime has to tell of it
    with running(**{"serve.timeout": 0.3}) as front:
        began = time.monotonic()
        with pytest.raises(openai.InternalServerError, match=r"serve\.timeout of 0\.3 s") as caught:
            front.client().completions.create(model=MODEL, prompt="a")
        gate.set()
        assert caught.value.status_code == 504
        assert time.monotonic() - began < PATIENCE / 2
        # the next one has as long as a busy machine takes
        monkeypatch.setattr(front.server._bridge, "_timeout", PATIENCE)
        assert front.client().completions.create(model=MODEL, prompt="a").choices[0].text
        check_books(front.runtime)


def fail_after(monkeypatch, steps, told=None):
    """Decode steps end their requests with an error, after so many, and once it is told."""
    step, count = ScriptedEngine._decode_step, iter(range(1000))

    def failing(self):
        outputs = step(self)
        if not outputs or next(count) < steps:
            return outputs
        if told is not None:
            told.wait(20)
        return [StepOutput(output.transfer, error=ValueError("the GPU is on fire")) for output in outputs]

    monkeypatch.setattr(ScriptedEngine, "_decode_step", failing)


def test_a_failure_has_its_cause(monkeypatch):
    fail_after(monkeypatch, 0)
    with running() as front:
        for stream in (False, True):
            with pytest.raises(openai.InternalServerError, match="the GPU is on fire") as caught:
                front.client().completions.create(model=MODEL, prompt="a", stream=stream)
            assert (caught.value.status_code, caught.value.code) == (500, "transfer_failed")


def test_a_failure_in_the_middle_of_a_stream_is_an_event(monkeypatch):
    told = threading.Event()
    fail_after(monkeypatch, 1, told)
    with running() as front:
        stream = front.client().completions.create(model=MODEL, prompt="a", stream=True, max_tokens=9)
        assert next(stream).choices[0].text
        told.set()
        with pytest.raises(openai.APIError, match="the GPU is on fire"):
            list(stream)
        check_books(front.runtime)


def test_a_model_without_a_chat_template(monkeypatch):
    monkeypatch.delattr(ScriptedTokenizer, "encode_chat")
    with running() as front, pytest.raises(openai.BadRequestError, match="without a chat template"):
        front.client().chat.completions.create(model=MODEL, messages=HELLO)


def test_before_the_stages_are_up(settings_of):
    with Server(settings_of()) as server:
        server.progress("starting prefill-0")
        status, answer = post(f"{server.url}/v1/completions", b'{"prompt": "a"}')
        assert (status, answer["error"]["message"]) == (503, "starting: starting prefill-0")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"{server.url}/health", timeout=20)
        with caught.value as answer:
            assert (answer.code, json.load(answer)["reason"]) == (503, "starting: starting prefill-0")


@pytest.mark.clause("C6.4")
def test_health_says_which_role_has_no_stage_left():
    readiness, lives = Readiness(), [PeerId("decode-0", 1), PeerId("decode-1", 1), PeerId("prefill-0", 1)]
    for peer in lives:
        readiness.kvbaton_peer_up(peer)
    readiness.ready(["prefill-0", "decode-0", "decode-1"])
    readiness.kvbaton_peer_lost(lives[0], "killed")
    assert readiness.reason is None
    readiness.kvbaton_peer_lost(lives[1], "hung")
    assert readiness.reason == "no decode stage is up; decode-0: killed; decode-1: hung"
    assert readiness.reason_beside("decode-1@2 is lost: hung, after 3 tokens") == (
        "no decode stage is up; decode-0: killed"
    ), "what is said once need not be said again"
    assert readiness.stages == {"prefill-0": "up", "decode-0": "down", "decode-1": "down"}
    readiness.kvbaton_peer_up(PeerId("decode-0", 2))
    readiness.kvbaton_peer_lost(lives[0], "an old tale")
    assert readiness.reason is None


def test_a_runtime_that_has_ended_is_noticed(front_of_its_own):
    front = front_of_its_own
    front.runtime.close()
    with pytest.raises(openai.InternalServerError, match="closed") as caught:
        front.client().completions.create(model=MODEL, prompt="a")
    assert caught.value.status_code == 503
    with pytest.raises(urllib.error.HTTPError) as unhealthy:
        urllib.request.urlopen(f"{front.url}/health", timeout=20)
    with unhealthy.value as answer:
        assert answer.code == 503


def test_the_books_balance_after_all_that(front):
    until(lambda: front.live == 0)
    check_books(front.runtime)
