"""What a request must pass before anything looks into it: its key, and the size and pace of its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from kvbaton.errors import SettingsError
from kvbaton.serve.refusal import Refusal

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Door:
    """ASGI middleware.  ``keys``: those that open ``/v1``; none: it is open.

    ``max_body``: bytes; ``read_timeout``: seconds that a whole body may take.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str], max_body: int, read_timeout: float) -> None:
        self._app = app
        self._keys = [_digest(key.encode()) for key in keys]
        self._max_body = max_body
        self._read_timeout = read_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        try:
            if scope["path"].startswith("/v1"):
                self._check_key(headers.get(b"authorization", b""))
            body = await self._read(headers, receive)
        except Refusal as refusal:
            await refuse(refusal, send, close=True)  # what is left of its body is not read
            return
        except ConnectionError:
            return
        await self._app(scope, _replayed(body, receive), send)

    def _check_key(self, authorization: bytes) -> None:
        if not self._keys:
            return
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip())
        # each in constant time, and all of them
        fits = [hmac.compare_digest(given, known) for known in self._keys]
        if scheme.lower() != b"bearer" or not any(fits):
            raise Refusal(401, "the API key is missing or wrong; send Authorization: Bearer KEY", "invalid_api_key")

    async def _read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > self._max_body:
            raise self._too_large()
        body = bytearray()
        try:
            async with asyncio.timeout(self._read_timeout):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionError
                    body += message.get("body", b"")
                    if len(body) > self._max_body:
                        raise self._too_large()
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise Refusal(
                408, f"the body did not come within serve.read_timeout of {self._read_timeout:g} s", "timeout"
            ) from None

    def _too_large(self) -> Refusal:
        return Refusal(413, f"the body has more than {self._max_body} bytes (serve.max_body)", "request_too_large")


async def refuse(refusal: Refusal, send: Send, *, close: bool = False) -> None:
    """Send ``refusal`` as the whole answer."""
    headers = {**refusal.headers, **({"connection": "close"} if close else {})}
    body = refusal.encoded()
    headers["content-length"] = str(len(body))
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refusal.status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def read_keys(path: Path | None) -> list[str]:
    """The keys in ``serve.api_key_file``, one per line.  Raises :class:`~kvbaton.errors.SettingsError`."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"serve.api_key_file {path} cannot be read: {reason}", key="serve.api_key_file") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise SettingsError(f"serve.api_key_file {path} holds no key; write one per line", key="serve.api_key_file")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()  # of equal length, so that comparing says nothing of a key's


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The body that was read, once; after that what ``receive`` says."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return first.pop() if first else await receive()

    return replay
