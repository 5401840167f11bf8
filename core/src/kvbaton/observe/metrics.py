"""Metrics for Prometheus: an observer that counts what it is told, and asks the stages when it is scraped.

    metrics = Metrics()
    with PDRuntime.start(settings, hooks=[metrics]) as runtime:
        print(metrics.text())

With the setting ``metrics.listen`` a runtime makes one by itself and serves it over HTTP.  What is counted per request
costs one call of a hook; everything else is read when somebody scrapes, by one generic control call to the stages,
which disturbs no transfer (C9.2): scrapes that come while one is being answered share its answer, a stage that does
not answer within ``deadline.control`` is missing from it and ``kvbaton_scrape_ok`` says so.

Needs the extra ``metrics`` (prometheus-client).  :mod:`kvbaton.observe.catalogue` lists the metrics.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, MutableMapping
from itertools import accumulate
from typing import Any, Protocol
from wsgiref.simple_server import WSGIServer

from kvbaton import __version__
from kvbaton.durations import BOUNDS, Durations
from kvbaton.errors import ConfigurationError, KvbatonError, SettingsError
from kvbaton.hooks import hookimpl
from kvbaton.identity import PeerId
from kvbaton.observe.catalogue import FIGURES, PHASES, PREFIX
from kvbaton.observe.causes import ending_of
from kvbaton.records import RequestRecord
from kvbaton.settings import Settings

try:
    from prometheus_client import CollectorRegistry, exposition
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ConfigurationError(
        "metrics need the package prometheus-client, which is not installed: pip install 'kvbaton[metrics]'",
        extra="metrics",
    ) from error

_BUCKETS = (*(str(bound) for bound in BOUNDS), "+Inf")
_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily}
_COORDINATOR = "coordinator"

#: ASGI's words.
_Scope = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
_Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Watched(Protocol):
    """What is asked when somebody scrapes: a :class:`~kvbaton.PDRuntime`."""

    @property
    def stages(self) -> tuple[str, ...]: ...

    @property
    def settings(self) -> Settings: ...

    def statistics(self) -> dict[str, Any]: ...


class Listening:
    """An HTTP server for one registry; ``url`` is where the metrics are.  ``close`` is idempotent."""

    def __init__(self, url: str, server: WSGIServer, thread: threading.Thread) -> None:
        self.url = url
        self._server = server
        self._thread = thread

    def close(self) -> None:
        """Listen no more.  A scrape that is being answered is not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Metrics(Collector):
    """The metrics of one runtime.  Give it to ``PDRuntime.start`` among the ``hooks``, which also makes it watch that
    runtime.

    ``registry``: a :class:`prometheus_client.CollectorRegistry` with these metrics, for a server of your own.
    Threading: hooks on the coordinator's thread; everything else from any thread.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self._runtime: Watched | None = None
        self._lock = threading.Lock()
        self._asking: concurrent.futures.Future[dict[str, Any]] | None = None
        self._added = 0
        self._endings: Counter[tuple[str, str, str]] = Counter()
        self._tokens: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._fenced: Counter[str] = Counter()
        self._phases = {phase: Durations() for phase in PHASES}
        self.registry.register(self)

    # -- for applications --------------------------------------------------------------------------------------------

    def watch(self, runtime: Watched) -> None:
        """Ask ``runtime`` from now on when somebody scrapes.  ``PDRuntime.start`` does this for metrics it is given."""
        self._runtime = runtime

    def text(self, accept: str | None = None) -> bytes:
        """What a scrape gets, in the text format; ``accept``: the request's header, which may ask for OpenMetrics."""
        return self.scrape(accept)[1]

    def scrape(self, accept: str | None = None) -> tuple[str, bytes]:
        """A scrape's content type and body."""
        encode, content_type = exposition.choose_encoder(accept or "")
        return content_type, encode(self.registry)

    def asgi(self) -> Callable[[_Scope, _Receive, _Send], Awaitable[None]]:
        """An ASGI application that answers every GET with the metrics: mount it where they shall be found.

        The stages are asked on a thread of the event loop's executor, so that the loop goes on.
        """

        async def app(scope: _Scope, receive: _Receive, send: _Send) -> None:
            del receive  # a GET has no body
            if scope["type"] != "http":
                return
            headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
            status, content_type, body = 405, "text/plain", b"GET only\n"
            if scope["method"] in ("GET", "HEAD"):
                status = 200
                content_type, body = await asyncio.to_thread(self.scrape, headers.get("accept"))
            length = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": status, "headers": length})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

        return app

    def listen(self, address: str) -> Listening:
        """Serve the metrics at ``HOST:PORT`` (port 0: any that is free), from a thread, until it is closed.

        Raises :class:`~kvbaton.errors.SettingsError` for an address that is in use or is none of this host's.
        """
        host, _, port = address.rpartition(":")
        host = host.strip("[]") or "127.0.0.1"
        try:
            server, thread = exposition.start_http_server(int(port), host, self.registry)
        except (OSError, ValueError, OverflowError) as error:
            raise SettingsError(
                f"metrics.listen: cannot listen at {address}: {error}. Choose an address of this host and a port that"
                " nobody uses, or port 0 for any that is free",
                key="metrics.listen", origin=None,
            ) from error  # fmt: skip
        shown = f"[{host}]" if ":" in host else host
        return Listening(f"http://{shown}:{server.server_port}/metrics", server, thread)

    # -- hooks -------------------------------------------------------------------------------------------------------

    @hookimpl
    def kvbaton_request_added(self) -> None:
        self._added += 1

    @hookimpl
    def kvbaton_request_finished(self, record: RequestRecord) -> None:
        self._endings[ending_of(record)] += 1
        tokens = self._tokens
        tokens["prompt"] += record.prompt_tokens
        tokens["output"] += len(record.token_ids)
        tokens["cached_prefill"] += record.prefix_prefill
        tokens["cached_decode"] += record.prefix_decode
        reached = record.milestones
        for phase, (start, end) in PHASES.items():
            until = reached.get(end)
            since = 0.0 if start == "added" else reached.get(start)
            if until is not None and since is not None:
                self._phases[phase].add(until - since)

    @hookimpl
    def kvbaton_peer_lost(self, peer: PeerId) -> None:
        self._lost[peer.name] += 1

    @hookimpl
    def kvbaton_peer_fenced(self, peer: PeerId) -> None:
        self._fenced[peer.name] += 1

    # -- prometheus_client's Collector -------------------------------------------------------------------------------

    def describe(self) -> Iterable[Metric]:
        """Names alone, so that registering asks nobody."""
        return [_family(name) for name in FIGURES]

    def collect(self) -> Iterator[Metric]:
        """Everything, read now."""
        sheet = _Sheet()
        self._told(sheet)
        runtime = self._runtime
        began = time.monotonic()
        try:
            found = {} if runtime is None else self._ask(runtime)
        except KvbatonError:  # it is closed
            found = {}
        sheet.put("scrape_seconds", time.monotonic() - began)
        sheet.put("up", 1.0 if found else 0.0)
        if runtime is not None:
            _describe_build(sheet, runtime.settings)
            _read(sheet, found, runtime.stages)
        return iter(sheet.families.values())

    def _ask(self, runtime: Watched) -> dict[str, Any]:
        """The runtime's statistics.  Who comes while somebody asks gets that answer, so that scrapes never pile up on
        the stages.
        """
        with self._lock:
            asked = self._asking
            mine: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
            if asked is None:
                self._asking = mine
        if asked is not None:
            return asked.result()
        try:
            found = runtime.statistics()
        except BaseException as error:
            self._asking = None
            mine.set_exception(error)
            raise
        self._asking = None
        mine.set_result(found)
        return found

    def _told(self, sheet: _Sheet) -> None:
        """What hooks have counted."""
        sheet.put("requests_added_total", self._added)
        for ending, count in tuple(self._endings.items()):
            sheet.put("transfers_total", count, *ending)
        for kind in ("prompt", "output", "cached_prefill", "cached_decode"):
            sheet.put("tokens_total", self._tokens[kind], kind)
        for phase, times in self._phases.items():
            sheet.put_durations("transfer_phase_seconds", times.figures(), phase)
        for name, count in tuple(self._lost.items()):
            sheet.put("peers_lost_total", count, name)
        for name, count in tuple(self._fenced.items()):
            sheet.put("peers_fenced_total", count, name)


# -- from statistics to samples ----------------------------------------------------------------------------------------


def _family(name: str) -> Metric:
    figure = FIGURES[name]
    if figure.kind == "histogram":
        return HistogramMetricFamily(PREFIX + name, figure.text, labels=figure.labels)
    family: Metric = _FAMILIES[figure.kind](PREFIX + name, figure.text, labels=figure.labels)
    return family


class _Sheet:
    """The families of one scrape, made as they are needed."""

    def __init__(self) -> None:
        self.families: dict[str, Any] = {}

    def _get(self, name: str) -> Any:
        family = self.families.get(name)
        if family is None:
            family = self.families[name] = _family(name)
        return family

    def put(self, name: str, value: float, *labels: str) -> None:
        self._get(name).add_metric(labels, float(value))

    def put_durations(self, name: str, figures: Mapping[str, Any], *labels: str) -> None:
        counts = accumulate(figures["counts"])
        self._get(name).add_metric(labels, list(zip(_BUCKETS, counts, strict=True)), figures["seconds"])


def _describe_build(sheet: _Sheet, settings: Settings) -> None:
    names = settings.engine.name, settings.transport.name
    sheet.put("build_info", 1.0, __version__, *names, settings.stages.launch)


def _read(sheet: _Sheet, found: Mapping[str, Any], stages: Iterable[str]) -> None:
    books = found.get(_COORDINATOR)
    sheet.put("scrape_ok", 1.0 if books else 0.0, _COORDINATOR)
    if books:
        _read_books(sheet, books, stages)
    for stage in stages:
        figures = found.get(stage, {})
        answered = isinstance(figures, Mapping) and "transport" in figures
        sheet.put("scrape_ok", 1.0 if answered else 0.0, stage)
        if answered:
            _read_engine(sheet, stage, figures["engine"])
            _read_transport(sheet, stage, figures["transport"])
            _read_stage(sheet, stage, figures["stage"])
            for name, times in figures["durations"].items():
                if f"{name}_seconds" in FIGURES:
                    sheet.put_durations(f"{name}_seconds", times, stage)


def _read_books(sheet: _Sheet, books: Mapping[str, Any], stages: Iterable[str]) -> None:
    running = books["live"] - books["waiting"]
    for state, count in (
        ("waiting", books["waiting"]), ("running", running), ("draining", max(books["transfers"] - running, 0)),
    ):  # fmt: skip
        sheet.put("requests", count, state)
        sheet.put("oldest_transfer_seconds", books["oldest"][state], state)
    for reason, count in books["refused"].items():
        sheet.put("requests_refused_total", count, reason)
    counts = books["counts"]
    sheet.put("requeued_total", counts.get("requeued", 0))
    sheet.put("restarts_total", counts.get("restarts", 0))
    sheet.put("unfenced_peers", books["unfenced"])
    _read_counts(sheet, _COORDINATOR, counts)
    _read_dropped(sheet, _COORDINATOR, books["dropped"])
    for figure, value in books["routing"].items():
        sheet.put("routing", value, figure)
    credit = books["credits"]
    for stage in stages:
        view = credit.get(stage)
        sheet.put("peer_up", 1.0 if view and view["status"] == "UP" else 0.0, stage)
        if view is None:
            continue
        for kind in ("blocks", "slots"):
            sheet.put("credits", view[f"{kind}_out"], kind, stage, "reserved")
            sheet.put("credits", view[kind], kind, stage, "capacity")
        sheet.put("credit_returns_repeated_total", view["repeated_returns"], stage)


def _read_engine(sheet: _Sheet, stage: str, figures: Mapping[str, float]) -> None:
    for name, value in figures.items():
        if name.startswith("blocks_"):
            sheet.put("blocks", value, stage, name.removeprefix("blocks_"))
    if "final_slots_free" in figures:
        sheet.put("final_slots_free", figures["final_slots_free"], stage)


def _read_transport(sheet: _Sheet, stage: str, figures: Mapping[str, float]) -> None:
    for name in (
        "inflight_bytes", "inflight_segments", "inflight_chunks", "quarantined_bytes", "quarantined_chunks",
        "unproven_chunks", "bytes_total", "chunks_total", "receipts_total",
    ):  # fmt: skip
        sheet.put(name, figures[name], stage)
    sheet.put("transport_full_total", figures["full_total"], stage)
    sheet.put("transport_faults_total", figures["faults_total"], stage)
    for outcome in ("done", "failed", "cancelled", "timed_out"):
        sheet.put("chunk_outcomes_total", figures[f"{outcome}_total"], stage, outcome)
    for name, value in figures.items():
        if name.startswith("dropped_"):
            sheet.put("transport_dropped_total", value, stage, name.removeprefix("dropped_"))
        elif name.startswith("connector_"):
            sheet.put("connector", value, stage, name.removeprefix("connector_"))


def _read_stage(sheet: _Sheet, stage: str, figures: Mapping[str, float]) -> None:
    sheet.put("stage_transfers", figures["transfers"], stage)
    sheet.put("oldest_lease_seconds", figures["oldest_lease_seconds"], stage)
    sheet.put("faults_total", figures.get("faults", 0), stage)
    if "planned_pieces" in figures:
        sheet.put("segments_total", figures["planned_pieces"], stage, "before")
        sheet.put("segments_total", figures["planned_segments"], stage, "after")
        sheet.put("backpressure_seconds_total", figures["backpressure_seconds_total"], stage)
    _read_counts(sheet, stage, figures)
    dropped = {name.removeprefix("dropped_"): v for name, v in figures.items() if name.startswith("dropped_")}
    _read_dropped(sheet, stage, dropped)


def _read_counts(sheet: _Sheet, stage: str, counts: Mapping[str, float]) -> None:
    sheet.put("ignored_events_total", counts.get("ignored", 0), stage)
    for name, count in counts.items():
        if name.startswith("violations_"):
            sheet.put("violations_total", count, stage, name.removeprefix("violations_"))


def _read_dropped(sheet: _Sheet, stage: str, dropped: Mapping[str, float]) -> None:
    for name, count in dropped.items():
        family, _, reason = name.partition("_")
        sheet.put("dropped_messages_total", count, stage, family, reason)


__all__ = ["Listening", "Metrics", "Watched"]
