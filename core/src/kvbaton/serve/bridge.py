"""From the runtime's threads to an event loop and back.

One way, the coordinator's thread puts each output on a list and rings the loop once for as many as have come; the loop
hands them out to their :class:`Call`.  Nothing in it waits, so no reader, however slow, holds up the coordinator; and a
call keeps what its reader has not taken as token ids, of which it can have ``max_tokens``.

The other way, one thread turns prompts into tokens and adds requests, in turn: a long prompt makes others wait for
their admission, never for their tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec

from kvbaton.engine import Request
from kvbaton.errors import PromptTooLong, RuntimeClosed
from kvbaton.records import RequestOutput
from kvbaton.runtime import PDRuntime
from kvbaton.serve.bodies import Body
from kvbaton.serve.refusal import Refusal

#: Seconds that readers whose calls were stopped may take to write down why.
_PARTING = 2.0


class Call:
    """One request, as its reader sees it.  Used on the event loop only, but for ``left``."""

    def __init__(self) -> None:
        self.key = uuid.uuid4().hex
        self.prompt_tokens = 0
        #: The reader takes nothing more; set by the loop, looked at by the admitting thread.
        self.left = threading.Event()
        self._ids: list[int] = []
        self._end: RequestOutput | None = None
        self._stopped: Refusal | None = None
        self._news = asyncio.Event()
        self._reader = asyncio.current_task()

    async def next(self) -> tuple[list[int], RequestOutput | None]:
        """All token ids since the last time, at least one unless the end is there, and the end once it is.

        Raises the :class:`Refusal` that the call was stopped with.
        """
        await self._news.wait()
        if self._stopped is not None:
            raise self._stopped
        self._news.clear()
        ids, self._ids = self._ids, []
        return ids, self._end

    @property
    def ended(self) -> bool:
        return self._end is not None

    def take(self, output: RequestOutput) -> None:
        self._ids += output.token_ids
        if output.finished:
            self._end = output
        self._news.set()

    def stop(self, refusal: Refusal) -> None:
        self._stopped = refusal
        self._news.set()

    def cut(self) -> None:
        """End the reader itself, whatever it waits for."""
        if self._reader is not None:
            self._reader.cancel()


class Bridge:
    """Made on the event loop that it serves.  ``limit``: calls at once.

    ``timeout``: seconds until a request fails, from its admission on.
    """

    def __init__(self, runtime: PDRuntime, limit: int, timeout: float) -> None:
        self.tokenizer = runtime.tokenizer
        self._runtime = runtime
        self._limit = limit
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._calls: dict[str, Call] = {}
        self._admitting = ThreadPoolExecutor(1, "kvbaton-admission")
        self._arrived: deque[RequestOutput] = deque()
        self._rung = False
        self._idle = asyncio.Event()
        self._idle.set()
        #: Told when the runtime turns out to have ended.
        self.on_closed: Callable[[str], None] = lambda reason: None

    @contextlib.asynccontextmanager
    async def call(self, body: Body, max_tokens: int) -> AsyncIterator[Call]:
        """A request that lives no longer than the block: leaving it early, or being cancelled in it, aborts.

        ``max_tokens`` counts where ``body`` names no limit, or as many as the prompt leaves room for.
        Raises :class:`Refusal` beyond the limit, and what the tokenizer and ``PDRuntime.add_request`` raise.
        """
        if len(self._calls) >= self._limit:
            raise Refusal(429, f"{self._limit} requests are under way (serve.requests); try later",
                          "rate_limit_exceeded")  # fmt: skip
        call = Call()
        self._calls[call.key] = call
        self._idle.clear()
        try:
            await self._loop.run_in_executor(self._admitting, self._admit, call, body, max_tokens)
            yield call
        except RuntimeClosed as error:
            self.on_closed(str(error))
            raise
        finally:
            self._leave(call)

    async def drained(self, seconds: float) -> bool:
        """Whether all calls have ended, which may take ``seconds``."""
        return await _within(self._idle.wait(), seconds)

    async def stop(self, refusal: Refusal) -> None:
        """End every call with ``refusal``, and its reader, too, where it does not take that in time."""
        for call in tuple(self._calls.values()):
            call.stop(refusal)
        if not await _within(self._idle.wait(), _PARTING):
            for call in tuple(self._calls.values()):
                call.cut()
            await _within(self._idle.wait(), _PARTING)

    def close(self) -> None:
        """Wait for the admitting thread; there are no calls any more."""
        self._admitting.shutdown(wait=True)

    # -- the admitting thread ----------------------------------------------------------------------------------------

    def _admit(self, call: Call, body: Body, max_tokens: int) -> None:
        if call.left.is_set():
            return
        request = Request(tuple(body.encode(self.tokenizer)), body.sampling(max_tokens))
        call.prompt_tokens = len(request.prompt)
        try:
            self._add(call, request)
        except PromptTooLong as error:
            room = error.limit - call.prompt_tokens
            if body.limit is not None or not 0 < room < max_tokens:
                raise
            self._add(call, msgspec.structs.replace(request, sampling=body.sampling(room)))
        if call.left.is_set():  # meanwhile; its own abort may have come too early
            self._runtime.abort(call.key)

    def _add(self, call: Call, request: Request) -> None:
        self._runtime.add_request(request, call.key, deadline=self._timeout, sink=self._take)

    # -- the coordinator's thread ------------------------------------------------------------------------------------

    def _take(self, output: RequestOutput) -> None:
        self._arrived.append(output)
        if not self._rung:
            self._rung = True
            with contextlib.suppress(RuntimeError):  # the loop has ended; nobody listens any more
                self._loop.call_soon_threadsafe(self._hand_out)

    # -- the event loop ----------------------------------------------------------------------------------------------

    def _hand_out(self) -> None:
        self._rung = False  # first: what comes from here on rings again
        while self._arrived:
            output = self._arrived.popleft()
            call = self._calls.get(output.request_id)
            if call is not None:
                call.take(output)

    def _leave(self, call: Call) -> None:
        call.left.set()
        if not call.ended:
            self._runtime.abort(call.key)
        del self._calls[call.key]
        if not self._calls:
            self._idle.set()


async def _within(waiting: Awaitable[object], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await waiting
    except TimeoutError:
        return False
    return True
