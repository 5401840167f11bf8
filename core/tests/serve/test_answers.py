"""What the real client gets."""

import json
import urllib.request

import pytest

from kvbaton import Request, SamplingParams
from kvbaton_conformance.books import check_books
from kvbaton_conformance.scripted_plugin import ScriptedOptions, ScriptedTokenizer, scripted_model

from .conftest import MODEL, until

ARITHMETIC = scripted_model(MODEL, ScriptedOptions())
WORDS = "one two three four five six seven eight nine ten"
PROMPT = tuple(ScriptedTokenizer().encode(WORDS))
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two"}]


def expected(count, prompt=PROMPT, **sampling):
    """The right answer, by arithmetic alone."""
    params = SamplingParams(max_tokens=count, temperature=1.0, seed=7, **sampling)
    return ScriptedTokenizer().decode(ARITHMETIC.generate(Request(prompt, params))[0])


def ask(client, **how):
    return client.completions.create(**{"model": MODEL, "prompt": WORDS, "max_tokens": 12, "seed": 7, **how})


def test_a_completion_is_the_models_answer(client):
    answer = ask(client)
    assert answer.choices[0].text == expected(12)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (10, 12, 22)
    assert (answer.object, answer.model) == ("text_completion", MODEL)


@pytest.mark.parametrize("prompt", [list(PROMPT), [list(PROMPT)], [WORDS]])
def test_a_prompt_may_be_token_ids_or_the_only_one_of_a_list(client, prompt):
    assert ask(client, prompt=prompt).choices[0].text == expected(12)


def test_a_streamed_completion_is_the_same(client, slow):
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    *text, last = chunks
    assert "".join(chunk.choices[0].text for chunk in text) == expected(12)
    assert len(text) > 5, "it came piece by piece"
    assert [chunk.choices[0].finish_reason for chunk in text] == [None] * (len(text) - 1) + ["length"]
    assert all(chunk.usage is None for chunk in text)
    assert (last.choices, last.usage.completion_tokens) == ([], 12)
    assert len({chunk.id for chunk in chunks}) == 1


def test_without_the_option_a_stream_has_no_usage(client):
    assert all(chunk.usage is None and chunk.choices for chunk in ask(client, stream=True))


def test_chat_whole_and_streamed(client):
    how = {"model": MODEL, "messages": MESSAGES, "max_completion_tokens": 6, "seed": 7}
    whole = client.chat.completions.create(**how)
    prompt = tuple(ScriptedTokenizer().encode_chat(MESSAGES))
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == expected(6, prompt)
    assert whole.usage.prompt_tokens == len(prompt)
    first, *rest = client.chat.completions.create(**how, stream=True)
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == expected(6, prompt)
    assert rest[-1].choices[0].finish_reason == "length"


def test_content_in_parts_is_their_text(client):
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    how = {"model": MODEL, "max_tokens": 4, "seed": 7}
    plain = client.chat.completions.create(messages=[{"role": "user", "content": "one two"}], **how)
    assert plain.usage.prompt_tokens == 3
    inparts = client.chat.completions.create(messages=[{"role": "user", "content": parts}], **how)
    assert plain.choices[0].message.content == inparts.choices[0].message.content


def test_the_clients_own_streaming_helper_understands_it(client):
    right = expected(6, tuple(ScriptedTokenizer().encode_chat(MESSAGES))).split()
    how = {"model": MODEL, "messages": MESSAGES, "max_tokens": 6, "seed": 7, "stop": f" {right[4]}"}
    with client.chat.completions.stream(**how) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == " ".join(right[:4])


def test_a_stream_on_the_wire(front):
    body = json.dumps({"model": MODEL, "prompt": WORDS, "max_tokens": 2, "stream": True}).encode()
    request = urllib.request.Request(f"{front.url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["x-request-id"]
        text = answer.read().decode()
    assert all(event.startswith("data: ") for event in text.strip().split("\n\n"))
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_text_ends_the_answer_and_the_request(front, client, stream):
    word = expected(400).split()[7]
    answer = ask(client, stop=[f" {word}", "never"], max_tokens=400, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else [answer.choices[0]]
    assert "".join(choice.text for choice in choices) == expected(400).partition(f" {word}")[0]
    assert choices[-1].finish_reason == "stop"
    until(lambda: front.live == 0)
    check_books(front.runtime)


def test_a_seed_makes_it_repeatable_and_none_makes_it_new(client):
    assert ask(client, seed=3).choices[0].text == ask(client, seed=3).choices[0].text
    assert ask(client, seed=None).choices[0].text != ask(client, seed=None).choices[0].text


def test_what_nobody_knows_and_what_asks_for_nothing_is_let_pass(client):
    neutral = {"n": 1, "echo": False, "logit_bias": {}, "presence_penalty": 0.0, "best_of": 1, "user": "me",
               "top_k": -1, "ignore_eos": True, "min_p": 0.0, "unheard_of": {"a": [1]}}  # fmt: skip
    assert ask(client, extra_body=neutral).choices[0].text == expected(12)
    client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=1, tools=[], response_format={"type": "text"}, logprobs=False
    )


def test_chat_without_a_limit_is_given_what_the_prompt_leaves(client):
    # the decode stage holds 200 blocks of 4 tokens
    long = [{"role": "user", "content": "word " * 700}]
    answer = client.chat.completions.create(model=MODEL, messages=long)
    assert answer.usage.prompt_tokens == 701
    assert answer.usage.total_tokens <= 800
    assert 50 < answer.usage.completion_tokens < 256


def test_the_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvbaton"


def test_health_and_the_schema(front):
    with urllib.request.urlopen(f"{front.url}/health", timeout=20) as answer:
        assert json.load(answer) == {"status": "ok", "reason": None, "stages": {"prefill-0": "up", "decode-0": "up"}}
    with urllib.request.urlopen(f"{front.url}/openapi.json", timeout=20) as answer:
        assert "/v1/chat/completions" in json.load(answer)["paths"]


def test_the_metrics(front, client):
    ask(client)
    with urllib.request.urlopen(f"{front.url}/metrics", timeout=20) as answer:
        assert answer.headers["content-type"].startswith("text/plain; version=")
        assert "kvbaton_requests_" in answer.read().decode()
