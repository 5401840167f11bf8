"""What a client is told when it does not get what it asked for: a status and OpenAI's error object."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton.errors import (
    KvbatonError,
    PromptTooLong,
    RequestOverdue,
    RequestRefused,
    RuntimeClosed,
    TooManyWaiting,
    UnsupportedModel,
)

#: Seconds after which a client may try again where there was no room.
RETRY_AFTER = 1

_KINDS = {401: "authentication_error", 429: "rate_limit_error"}


class Refusal(Exception):
    """An answer that is an error.  ``param``: the field of the request that is to blame."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.status in (429, 503):
            headers["retry-after"] = str(RETRY_AFTER)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers

    @property
    def body(self) -> dict[str, Any]:
        kind = _KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def encoded(self) -> bytes:
        return msgspec.json.encode(self.body)


def bad(message: str, param: str | None = None, code: str | None = None) -> Refusal:
    """The client's fault."""
    return Refusal(400, message, code, param)


def unavailable(reason: str) -> Refusal:
    """Nobody's fault who asks: not yet, or no more."""
    return Refusal(503, reason, "unavailable")


def overdue(seconds: float) -> Refusal:
    """``serve.timeout`` passed."""
    return Refusal(504, f"the request was not done within serve.timeout of {seconds:g} s", "timeout")


def of(error: BaseException | None, *, prompt: str, timeout: float) -> Refusal:
    """The answer for what the runtime raised, or ended a request with.  ``prompt``: the field that has the prompt."""
    match error:
        case Refusal():
            return error
        case PromptTooLong():
            return bad(str(error), prompt, "context_length_exceeded")
        case TooManyWaiting():
            return Refusal(429, str(error), "rate_limit_exceeded")
        case RequestRefused():
            return bad(str(error), prompt)
        case UnsupportedModel():
            return bad(str(error), prompt, "unsupported_value")
        case RequestOverdue():
            return overdue(timeout)
        case RuntimeClosed():
            return unavailable(str(error))
        case KvbatonError():
            return Refusal(500, str(error), "transfer_failed")
        case _:
            return Refusal(500, "the server made an error; its log says which", "internal_error")
