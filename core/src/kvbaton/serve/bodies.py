"""What clients send.

Fields that nobody here knows are let pass, as OpenAI's servers do; fields that are known and would change the answer,
but are not supported, are refused: an answer that silently lacks what was asked for is worse than none.
"""

from __future__ import annotations

import abc
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from kvbaton.engine import SamplingParams, Tokenizer
from kvbaton.errors import UnsupportedModel

#: Stop texts of one request, and characters of each.
_STOPS, _STOP_LENGTH = 16, 256
#: Tokens of a completion that names no limit, as OpenAI has it.
_COMPLETION_TOKENS = 16

#: Known fields that are not supported, each with the values that ask for nothing.
_UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False,),
    "top_logprobs": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}


def _wrong(message: str) -> PydanticCustomError:
    # braces are placeholders there
    return PydanticCustomError("value", "{text}", {"text": message})


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong("the text holds half a surrogate pair, which is no character") from None
    return text


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class Body(BaseModel, abc.ABC):
    """What both endpoints take.  ``top_k``, ``stop_token_ids`` and ``ignore_eos`` are not OpenAI's."""

    model_config = ConfigDict(strict=True, extra="allow")

    #: The field that has the prompt.
    prompt_field: ClassVar[str]

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1 << 40)] | None = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    stop: Any = None
    stop_token_ids: list[Annotated[int, Field(ge=0, lt=1 << 63)]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name, neutral in _UNSUPPORTED.items():
                value = given.get(name)
                # 0 == False, and 0 log probabilities are some
                if value is not None and not any(value == one and _kind(value) is _kind(one) for one in neutral):
                    only = " other than 1" if name == "n" else ""
                    raise PydanticCustomError(
                        "unsupported", "{name}{only} is not supported", {"name": name, "only": only}
                    )
        return given

    @field_validator("stop")
    @classmethod
    def _texts(cls, stop: Any) -> Any:
        texts = [stop] if isinstance(stop, str) else stop or []
        if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
            raise _wrong("stop is a text or a list of texts, none of them empty")
        texts = [_unicode(text) for text in texts]
        if len(texts) > _STOPS or any(len(text) > _STOP_LENGTH for text in texts):
            raise _wrong(f"at most {_STOPS} stop texts of at most {_STOP_LENGTH} characters are taken")
        return texts

    @model_validator(mode="after")
    def _streamed(self) -> Body:
        if self.stream_options is not None and not self.stream:
            raise _wrong("stream_options is for stream = true")
        return self

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options is not None and self.stream_options.include_usage)

    @property
    def limit(self) -> int | None:
        """How many tokens the client asks for at most; None where it names no limit."""
        return self.max_tokens

    def sampling(self, max_tokens: int) -> SamplingParams:
        temperature = 1.0 if self.temperature is None else self.temperature
        top_p, top_k = 1.0 if self.top_p is None else self.top_p, max(self.top_k or 0, 0)
        if top_p == 0.0:  # the likeliest token alone makes up more than nothing
            top_p, top_k = 1.0, 1
        return SamplingParams(
            max_tokens=self.limit or max_tokens, temperature=temperature, top_k=top_k, top_p=top_p,
            # who names no seed wants another answer each time
            seed=secrets.randbits(62) if self.seed is None else self.seed,
            stop_token_ids=tuple(self.stop_token_ids or ()), stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
        )  # fmt: skip

    @abc.abstractmethod
    def encode(self, tokenizer: Tokenizer) -> list[int]:
        """The prompt's token ids.  May take long.  Raises what the tokenizer raises."""


def _kind(value: object) -> object:
    """1 and 1.0 are alike, True is not."""
    return float if type(value) is int else type(value)


class CompletionBody(Body):
    """``/v1/completions``."""

    prompt_field: ClassVar[str] = "prompt"

    #: A text, token ids, or a list of one of these.
    prompt: Any

    @field_validator("prompt")
    @classmethod
    def _one_prompt(cls, prompt: Any) -> Any:
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            prompt = prompt[0]
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)):
            raise _wrong(f"one prompt per request is supported, not {len(prompt)}")
        if not isinstance(prompt, str) and not (
            isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 63 for token in prompt)
        ):
            raise _wrong("prompt is a text or a list of token ids")
        if not prompt:
            raise _wrong("prompt is empty; give at least one token")
        return _unicode(prompt) if isinstance(prompt, str) else prompt

    @property
    def limit(self) -> int | None:
        return self.max_tokens or _COMPLETION_TOKENS

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        return tokenizer.encode(self.prompt) if isinstance(self.prompt, str) else self.prompt


_ROLES = ("system", "developer", "user", "assistant")


class Message(BaseModel):
    """One message of a conversation: text only."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Any = None

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, given: Any) -> Any:
        if isinstance(given, dict):
            for name in ("tool_calls", "function_call", "audio"):
                if given.get(name):
                    raise PydanticCustomError("unsupported", "{name} is not supported", {"name": name})
        return given

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role not in _ROLES:
            raise _wrong(f"role {role} is not supported; write one of {', '.join(_ROLES)}")
        return role

    @field_validator("content")
    @classmethod
    def _text(cls, content: Any) -> str:
        if content is None or isinstance(content, str):
            return _unicode(content or "")
        if not isinstance(content, list):
            raise _wrong("content is a text or a list of parts")
        parts: Sequence[Any] = content
        for part in parts:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise _wrong('content has parts that are no text; only {"type": "text", "text": ...} is supported')
        return "".join(_unicode(part["text"]) for part in parts)


class ChatBody(Body):
    """``/v1/chat/completions``."""

    prompt_field: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 40)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def encode(self, tokenizer: Tokenizer) -> list[int]:
        encode_chat = getattr(tokenizer, "encode_chat", None)
        if encode_chat is None:
            raise UnsupportedModel(
                "the model comes without a chat template; /v1/completions takes the prompt as it is",
                missing=("a chat template",),
            )
        ids: list[int] = encode_chat(
            [
                # what OpenAI calls so of late is the system's message in every template
                {"role": "system" if message.role == "developer" else message.role, "content": message.content}
                for message in self.messages
            ]
        )
        return ids
