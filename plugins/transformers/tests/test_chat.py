"""A conversation as the model's own template writes it."""

import pytest

from kvbaton.errors import RequestRefused, UnsupportedModel
from kvbaton_transformers.checkpoints import load_tokenizer

HELLO = [{"role": "user", "content": "Hello"}]


def test_the_models_template_writes_the_prompt():
    tokenizer = load_tokenizer("smollm2")
    ids = tokenizer.encode_chat([{"role": "system", "content": "Be brief."}, *HELLO])
    text = tokenizer._tokenizer.decode(ids)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>")
    assert text.endswith("<|im_start|>assistant\n"), "the assistant is to go on"


def test_a_template_may_refuse_and_may_be_missing(monkeypatch):
    tokenizer = load_tokenizer("smollm2")
    inner = tokenizer._tokenizer
    monkeypatch.setattr(inner, "chat_template", "{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestRefused, match="roles must alternate"):
        tokenizer.encode_chat(HELLO)
    monkeypatch.setattr(inner, "chat_template", None)
    with pytest.raises(UnsupportedModel, match="without a chat template"):
        tokenizer.encode_chat(HELLO)
