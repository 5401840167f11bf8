"""The endpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kvbaton.serve.answers import ChatShape, CompletionShape
from kvbaton.serve.bodies import Body, ChatBody, CompletionBody
from kvbaton.serve.bridge import Bridge
from kvbaton.serve.door import Door
from kvbaton.serve.exchange import Exchange
from kvbaton.serve.readiness import Readiness
from kvbaton.serve.refusal import Refusal, bad, unavailable
from kvbaton.settings import Settings

if TYPE_CHECKING:
    from kvbaton.observe.metrics import Metrics


class Front:
    """What the endpoints share.  ``bridge`` is there once the runtime is."""

    def __init__(self, settings: Settings, readiness: Readiness, metrics: Metrics | None) -> None:
        self.settings = settings
        self.model = settings.serve.model_name or settings.model
        self.readiness = readiness
        self.metrics = metrics
        self.bridge: Bridge | None = None
        self.since = int(time.time())

    def exchange(self, body: Body, shape: type[CompletionShape] | type[ChatShape]) -> Response:
        """Raises :class:`Refusal`."""
        serve = self.settings.serve
        if body.model not in (None, "", self.model):
            raise Refusal(404, f"there is no model {body.model}; there is {self.model}", "model_not_found", "model")
        closed = self.readiness.closed
        if self.bridge is None or closed is not None:
            raise unavailable(closed or "starting")
        return Exchange(
            self.bridge, self.readiness, body, shape(self.model, body.include_usage), serve.max_tokens, serve.timeout
        )


def build(front: Front, keys: Collection[str]) -> FastAPI:
    """The application.  ``keys`` open ``/v1``."""
    serve = front.settings.serve
    # its pages of documentation would load scripts from elsewhere; the schema itself is at /openapi.json
    app = FastAPI(title="kvbaton", docs_url=None, redoc_url=None)
    app.add_middleware(Door, keys=keys, max_body=int(serve.max_body), read_timeout=serve.read_timeout)

    @app.exception_handler(Refusal)
    async def refused(_: Request, error: Exception) -> Response:
        refusal = cast("Refusal", error)
        return Response(refusal.encoded(), refusal.status, refusal.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: Exception) -> Response:
        return await refused(request, _explained(cast("RequestValidationError", error)))

    @app.exception_handler(HTTPException)
    async def failed(request: Request, error: Exception) -> Response:
        problem = cast("HTTPException", error)
        texts = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not take {request.method}"}
        return await refused(request, Refusal(problem.status_code, texts.get(problem.status_code, problem.detail)))

    @app.post("/v1/completions", response_model=None)
    async def completions(body: CompletionBody) -> Response:
        """Go on from a prompt."""
        return front.exchange(body, CompletionShape)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(body: ChatBody) -> Response:
        """The assistant's next message."""
        return front.exchange(body, ChatShape)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        return {"object": "list", "data": [_model()]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        if name != front.model:
            raise Refusal(404, f"there is no model {name}; there is {front.model}", "model_not_found", "model")
        return _model()

    def _model() -> dict[str, Any]:
        return {"id": front.model, "object": "model", "created": front.since, "owned_by": "kvbaton"}

    @app.get("/health", response_model=None)
    async def health() -> Response:
        """200 where requests are served; 503 with the reason where not."""
        reason = front.readiness.reason
        content = {"status": "ok" if reason is None else "unavailable", "reason": reason,
                   "stages": front.readiness.stages}  # fmt: skip
        return JSONResponse(content, 200 if reason is None else 503)

    @app.get("/metrics", response_model=None)
    async def metrics(request: Request) -> Response:
        """Prometheus' text format, or OpenMetrics where that is asked for."""
        if front.metrics is None:
            raise Refusal(404, "there are no metrics: pip install 'kvbaton[metrics]'")
        # the stages are asked, which may take deadline.control
        kind, text = await asyncio.to_thread(front.metrics.scrape, request.headers.get("accept"))
        return Response(text, headers={"content-type": kind})

    return app


def _explained(error: RequestValidationError) -> Refusal:
    """The first fault, and where it is."""
    fault = error.errors()[0]
    place = [part for part in fault["loc"][1:] if part != "body"]
    param = ".".join(map(str, place)) or None
    if fault["type"] == "json_invalid":
        return bad(f"the body is not JSON: {fault['ctx']['error']}")
    if fault["type"] == "unsupported":
        return bad(fault["msg"], str(fault["ctx"]["name"]), "unsupported_parameter")
    if param is None and fault["type"] in ("missing", "model_attributes_type", "dict_type"):
        return bad("the body must be a JSON object, sent with content-type: application/json")
    text = fault["msg"] if fault["type"] == "value" or param is None else f"{param}: {fault['msg']}"
    return bad(text, param)
