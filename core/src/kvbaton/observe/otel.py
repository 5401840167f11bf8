"""OpenTelemetry spans: one for each request, with a child for each phase.

::

    with PDRuntime.start(settings, hooks=[Spans(provider)]) as runtime:
        ...

With the setting ``trace.otel`` a runtime makes one by itself, over the provider that the application has set, or one
configured by OpenTelemetry's own environment: ``OTEL_TRACES_EXPORTER`` (``otlp`` unless told otherwise, ``console``,
``none``), ``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_SERVICE_NAME``, ``OTEL_RESOURCE_ATTRIBUTES``, ``OTEL_BSP_*``,
``OTEL_TRACES_SAMPLER``.

A request's span is made when it ends, from its record, so that a request costs nothing on its way; what a stage gives
back later is not waited for.  Spans leave on the exporter's own thread.  Needs the extra ``otel`` (opentelemetry-sdk).
"""

from __future__ import annotations

import os
import time
from importlib.metadata import entry_points
from typing import Any, Final

from kvbaton import __version__
from kvbaton.errors import ConfigurationError, SettingsError, closest
from kvbaton.hooks import hookimpl
from kvbaton.observe.catalogue import PHASES
from kvbaton.observe.causes import ending_of
from kvbaton.records import RequestRecord

try:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
except ImportError as error:
    raise ConfigurationError(
        "spans need the package opentelemetry-sdk, which is not installed: pip install 'kvbaton[otel]'", extra="otel"
    ) from error

#: Where distributions name their exporters of spans.
_EXPORTERS: Final = "opentelemetry_traces_exporter"
#: What spans the others is the request's own span, or an event of it.
_CHILDREN: Final = tuple(name for name in PHASES if name not in ("total", "first_token"))
#: Milliseconds that what is still to be exported may take at the end.
_FLUSH: Final = 5000


class Spans:
    """The spans of one runtime.  Give it to ``PDRuntime.start`` among the ``hooks``.

    ``provider``: where the spans go; it stays yours.  By default the application's (``set_tracer_provider``), or one
    made from OpenTelemetry's environment variables, which :meth:`close` shuts down.

    Raises :class:`~kvbaton.errors.SettingsError` for an exporter that is not installed.
    """

    def __init__(self, provider: trace.TracerProvider | None = None) -> None:
        self._own: TracerProvider | None = None
        if provider is None:
            provider = trace.get_tracer_provider()
            if isinstance(provider, trace.ProxyTracerProvider):  # nobody has set one
                provider = self._own = _configured()
        self._tracer = provider.get_tracer("kvbaton", __version__)
        self._wall = time.time_ns() - time.monotonic_ns()

    def close(self) -> None:
        """Export what is left, within seconds.  Idempotent.  A provider that was given stays open."""
        own, self._own = self._own, None
        if own is not None:
            own.force_flush(_FLUSH)
            own.shutdown()

    @hookimpl
    def kvbaton_request_finished(self, record: RequestRecord) -> None:
        reached = {"added": 0.0, **record.milestones}
        # the hook runs as the request ends
        added = self._wall + time.monotonic_ns() - _ns(record.milestones.get("finished", 0.0))
        role, outcome, cause = ending_of(record)
        facts: dict[str, Any] = {
            "kvbaton.request": str(record.request_id),
            "kvbaton.transfer": str(record.transfer or ""),
            "kvbaton.prefill": record.prefill,
            "kvbaton.decode": record.decode,
            "kvbaton.outcome": outcome,
            "kvbaton.prompt_tokens": record.prompt_tokens,
            "kvbaton.tokens": len(record.token_ids),
            "kvbaton.bytes": record.bytes,
            "kvbaton.chunks": record.chunks,
            "kvbaton.segments": record.segments,
            "kvbaton.prefix.prefill": record.prefix_prefill,
            "kvbaton.prefix.decode": record.prefix_decode,
            "kvbaton.requeued": record.requeued,
        }
        if record.error is not None:
            facts |= {"kvbaton.cause": cause, "kvbaton.cause.role": role}
        span = self._tracer.start_span("kvbaton.request", start_time=added, attributes=facts)
        if record.error is not None:
            span.record_exception(record.error, timestamp=added + _ns(reached.get("finished", 0.0)))
            if outcome == "failed":  # a request that its caller cancelled has not failed
                span.set_status(trace.StatusCode.ERROR, str(record.error))
        if "first_token" in reached:
            span.add_event("first_token", timestamp=added + _ns(reached["first_token"]))
        around = trace.set_span_in_context(span)
        ids = {name: facts[name] for name in ("kvbaton.request", "kvbaton.transfer")}
        for name in _CHILDREN:
            since, until = (reached.get(milestone) for milestone in PHASES[name])
            if since is not None and until is not None:
                child = self._tracer.start_span(
                    f"kvbaton.{name}", context=around, start_time=added + _ns(since), attributes=ids
                )
                child.end(added + _ns(max(until, since)))  # each is placed to within a message's time
        span.end(added + _ns(reached.get("finished", 0.0)))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _configured() -> TracerProvider:
    """As OpenTelemetry's environment says."""
    resource = Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME") or "kvbaton"})
    provider = TracerProvider(resource=resource)
    for name in os.environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        if name.strip() not in ("", "none"):
            provider.add_span_processor(BatchSpanProcessor(_exporter(name.strip())))
    return provider


def _exporter(name: str) -> Any:
    installed = {entry.name: entry for entry in entry_points(group=_EXPORTERS)}
    if name == "otlp" not in installed:  # each protocol is a distribution with a name of its own
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        kinds = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
        wanted = (kinds.get(protocol, protocol),) if protocol else tuple(kinds.values())
        name = next((kind for kind in wanted if kind in installed), name)
    if name not in installed:
        what = f"installed: {', '.join(sorted(installed)) or 'none'}.{closest(name, installed)}"
        raise SettingsError(
            f'OTEL_TRACES_EXPORTER: there is no exporter "{name}"; {what} For OTLP: pip install'
            " opentelemetry-exporter-otlp-proto-http",
            key="trace.otel",
        )
    try:
        return installed[name].load()()
    except Exception as error:
        raise SettingsError(
            f'OTEL_TRACES_EXPORTER: the exporter "{name}" cannot be used: {type(error).__name__}: {error}',
            key="trace.otel",
        ) from error
