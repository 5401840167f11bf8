"""One request of one client: from its body to the last byte of its answer, or to the client's going away.

The client is watched all the while: when it hangs up, waiting or reading, streamed to or not, the request is cancelled.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.responses import Response

from kvbaton.records import RequestOutput
from kvbaton.serve import answers
from kvbaton.serve.bodies import Body
from kvbaton.serve.bridge import Bridge, Call
from kvbaton.serve.door import refuse
from kvbaton.serve.readiness import Readiness
from kvbaton.serve.refusal import Refusal, of, overdue, unavailable
from kvbaton.serve.transcript import Transcript

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

#: How long after a request's own deadline its client may take to be told.
_GRACE = 1.0

_SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

_log = logging.getLogger(__name__)


class Exchange(Response):
    """The answer to one request, as an ASGI response that makes itself.

    A stream's status is sent with its first token, so that what fails before that has a status of its own.
    """

    def __init__(
        self, bridge: Bridge, readiness: Readiness, body: Body, shape: answers.Shape, max_tokens: int, timeout: float
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._readiness = readiness
        self._request = body
        self._shape = shape
        self._max_tokens = max_tokens
        self._timeout = timeout
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self._answer(send))
        leaving = asyncio.ensure_future(_hang_up(receive))
        try:
            await asyncio.wait((answering, leaving), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)
        if not answering.cancelled():
            answering.result()

    async def _answer(self, send: Send) -> None:
        try:
            async with asyncio.timeout(self._timeout + _GRACE):
                async with self._bridge.call(self._request, self._max_tokens) as call:
                    self.headers["x-request-id"] = call.key
                    await (self._stream(call, send) if self._request.stream else self._whole(call, send))
        except TimeoutError:
            await self._fail(overdue(self._timeout), send)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            refusal = of(error, prompt=self._request.prompt_field, timeout=self._timeout)
            if refusal.code == "internal_error":
                _log.error("a request failed", exc_info=error)
            await self._fail(refusal, send)

    async def _whole(self, call: Call, send: Send) -> None:
        transcript = Transcript(self._bridge.tokenizer, self._request.stop or ())
        text, end = "", None
        while end is None and not transcript.stopped:
            ids, end = await call.next()
            self._check(end)
            text += transcript.push(ids)
        text += transcript.finish()
        content = self._shape.whole(text, _reason(transcript, end), _usage(call, transcript, end))
        await self._begin(send, {"content-type": "application/json"})
        await send({"type": "http.response.body", "body": msgspec.json.encode(content)})

    async def _stream(self, call: Call, send: Send) -> None:
        transcript = Transcript(self._bridge.tokenizer, self._request.stop or ())
        end: RequestOutput | None = None
        while end is None and not transcript.stopped:
            ids, end = await call.next()
            if not self._started:
                self._check(end)
            text = transcript.push(ids)
            if end is not None or transcript.stopped:
                text += transcript.finish()
            if not self._started:
                await self._begin(send, _SSE)
                await _event(send, self._shape.opening())
            if text:
                await _event(send, self._shape.piece(text))
            self._check(end)
        await _event(send, self._shape.closing(_reason(transcript, end)))
        if self._request.include_usage:
            await _event(send, self._shape.tail(_usage(call, transcript, end)))
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _check(self, end: RequestOutput | None) -> None:
        if end is None or end.error is None:
            return
        if end.finish_reason == "cancelled":  # not by this client, which would not be here any more
            raise unavailable(str(end.error))
        missing = self._readiness.reason_beside(str(end.error))
        refusal = of(end.error, prompt=self._request.prompt_field, timeout=self._timeout)
        if missing is not None and refusal.status == 500:
            refusal = unavailable(f"{missing}; {end.error}")
        raise refusal

    async def _begin(self, send: Send, headers: dict[str, str]) -> None:
        self._started = True
        headers = {**headers, "x-request-id": self.headers["x-request-id"]}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})

    async def _fail(self, refusal: Refusal, send: Send) -> None:
        if not self._started:
            await refuse(refusal, send)
        elif self._request.stream:
            # a client that does not read is not waited for; its connection is closed
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_GRACE):
                    await _event(send, refusal.body)
                    await send({"type": "http.response.body", "body": b""})


async def _hang_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _event(send: Send, content: dict[str, Any] | None) -> None:
    if content is not None:
        data = b"data: " + msgspec.json.encode(content) + b"\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})


def _reason(transcript: Transcript, end: RequestOutput | None) -> str:
    return "stop" if transcript.stopped or end is None else end.finish_reason or "stop"


def _usage(call: Call, transcript: Transcript, end: RequestOutput | None) -> dict[str, Any]:
    cached = end.record.prefix_prefill if end is not None and end.record is not None else 0
    return answers.usage(call.prompt_tokens, transcript.tokens, cached)
