"""What an application calls: requests in, tokens out, over prefill and decode stages that it never sees.

::

    with PDRuntime.start(settings) as runtime:
        key = runtime.add_request(Request(prompt=tuple(runtime.tokenizer.encode("The capital of France is"))))
        for output in runtime.stream(key):
            print(runtime.tokenizer.decode(output.token_ids), end="")

:func:`run_colocated` runs the same requests on the same engine without a hand-off, for comparison (A1).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from kvbaton.connector import ConnectorPlugin
from kvbaton.engine import ColocatedEngine, Request, Role, StepOutput, Tokenizer
from kvbaton.errors import KvbatonError, LocalProtocolError, RequestRefused, SettingsError, TraceNotWritten
from kvbaton.hooks import Hooks
from kvbaton.identity import RequestKey, new_transfer_id
from kvbaton.observe.logs import set_level
from kvbaton.plugins import choose_engine, options_of
from kvbaton.profiling import Profiling
from kvbaton.records import RequestOutput, RequestRecord, StageState
from kvbaton.service import Service
from kvbaton.settings import Settings

if TYPE_CHECKING:
    from kvbaton.observe.metrics import Listening, Metrics
    from kvbaton.observe.otel import Spans
    from kvbaton.observe.trace import Trace

__all__ = ["PDRuntime", "RequestOutput", "RequestRecord", "StageState", "run_colocated"]

_log = logging.getLogger(__name__)

#: Where outputs of one request go.  Called on the coordinator's thread; must not block.
Sink = Callable[[RequestOutput], None]


class PDRuntime:
    """Prefill and decode stages behind one face.  Made by :meth:`start`; a context manager that closes.

    Threading: every method may be called from any thread.  ``step`` gives the outputs of requests that nobody streams.
    """

    def __init__(self, service: Service, tokenizer: Callable[[], Tokenizer]) -> None:
        self._service = service
        self._make_tokenizer = tokenizer
        self._tokenizer: Tokenizer | None = None
        self._loading = threading.Lock()  # its own: a load takes long, and the coordinator needs the other one
        self._lock = threading.Lock()
        #: Outputs that nobody streams and that no step has taken; ``_news`` tells of more.
        self._pending: deque[RequestOutput] = deque()
        self._news = threading.Condition(self._lock)
        #: Live requests, with the stream that takes their outputs (None: ``step`` does).
        self._live: dict[RequestKey, Sink | None] = {}
        self._listening: Listening | None = None
        #: Traces of it, and where the one of its own is to be written.
        self._traces: list[Trace] = []
        self._trace_path: Path | None = None
        self._spans: list[Spans] = []
        service.deliver, service.delivered = self._deliver, self._delivered

    @classmethod
    def start(
        cls,
        settings: Settings,
        *,
        hooks: Sequence[object] = (),
        progress: Callable[[str], None] | None = None,
        connector: ConnectorPlugin | None = None,
    ) -> PDRuntime:
        """Launch the stages, connect them, and return when requests may be added.

        ``progress`` is told in words what is going on, and nothing before the settings were accepted.  ``connector``
        takes the place of ``transport.name`` (stages in one process only).  Raises a
        :class:`~kvbaton.errors.ConfigurationError` before that, when no stage was started, or
        :class:`~kvbaton.errors.StartupError` after everything was stopped again.
        """
        set_level(settings.log)
        engine, options = choose_engine(settings.engine)
        if connector is None:
            options_of(settings, "transport")
        # what can be looked at in no time comes before the model: for that the engine imports what it computes with
        observed = _metrics(settings, hooks)
        traces = _traces(settings, hooks)
        with ExitStack() as undo:
            listening = None
            opening: list[str] = []
            if settings.metrics.listen is not None:
                listening = observed[0].listen(settings.metrics.listen)
                undo.callback(listening.close)
                opening.append(f"metrics at {listening.url}")
            engine.check(settings.model, options)
            spans = _spans(settings, hooks)
            for exporter in spans:
                undo.callback(exporter.close)
            own = [observer for observer in (*observed, *traces, *spans) if observer not in hooks]
            observers = Hooks([*hooks, *own])
            observers.add_installed()
            service = Service.start(settings, observers, progress or (lambda text: None), connector, opening)
            undo.pop_all()
        runtime = cls(service, lambda: engine.tokenizer(settings.model, options))
        runtime._listening = listening
        for metrics in observed:
            metrics.watch(runtime)
        runtime._traces = traces
        runtime._spans = spans
        try:
            for trace in traces:
                trace.watch(service.trace, _about(service))
        except BaseException:  # somebody interrupts, and will have nothing to close
            with contextlib.suppress(KvbatonError):
                runtime.close()
            raise
        runtime._trace_path = settings.trace.path
        return runtime

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; loaded on first use."""
        with self._loading:
            if self._tokenizer is None:
                self._tokenizer = self._make_tokenizer()
            return self._tokenizer

    @property
    def stages(self) -> tuple[str, ...]:
        """The names of the stages."""
        return self._service.stages

    @property
    def settings(self) -> Settings:
        """What it runs with; ``transport.name`` is the one that was chosen."""
        return self._service.settings

    @property
    def metrics_url(self) -> str | None:
        """Where the metrics are, if ``metrics.listen`` is set."""
        return None if self._listening is None else self._listening.url

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        request: Request,
        request_id: str | None = None,
        *,
        deadline: float | None = None,
        sink: Callable[[RequestOutput], None] | None = None,
    ) -> RequestKey:
        """Take a request; its outputs come from ``step``, or from ``stream`` if that is called for it.

        ``deadline``: seconds from now after which it fails, wherever it is.  ``sink`` is given the outputs instead: on
        the coordinator's thread, so that it must neither block nor call back into the runtime, and perhaps before this
        returns.

        Raises :class:`~kvbaton.errors.DuplicateRequest` for an id that is live,
        :class:`~kvbaton.errors.PromptTooLong` for what no stage can ever hold,
        :class:`~kvbaton.errors.TooManyWaiting` beyond ``limits.waiting``,
        :class:`~kvbaton.errors.RequestRefused` for what is no request,
        :class:`~kvbaton.errors.RuntimeClosed`.
        """
        return self._add(request, request_id, deadline, sink)

    def step(self, timeout: float = 0.0) -> list[RequestOutput]:
        """What is new of all requests that nobody streams; waits up to ``timeout`` seconds for the first."""
        with self._news:
            if not self._pending and timeout > 0:
                self._news.wait_for(lambda: self._pending, timeout)
            outputs = list(self._pending)
            self._pending.clear()
            return outputs

    def stream(self, request_id: str) -> Iterator[RequestOutput]:
        """The outputs of one request, from where ``step`` left off until its end, also if it has ended meanwhile.

        Raises :class:`~kvbaton.errors.LocalProtocolError` for a request that is unknown, streamed already, or whose
        end was taken by ``step``.
        """
        key = RequestKey(request_id)
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        with self._lock:
            mine = _generation([output for output in self._pending if output.request_id == key], key in self._live)
            if key not in self._live and not mine:
                raise LocalProtocolError(f"request {key!r} is unknown, or its end was taken already")
            if self._live.get(key) is not None:
                raise LocalProtocolError(f"request {key!r} is streamed already")
            for output in mine:
                self._pending.remove(output)
                outputs.put(output)
            if key in self._live:
                self._live[key] = outputs.put
        return _until_finished(outputs)

    async def generate(
        self, request: Request, request_id: str | None = None, *, deadline: float | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Add a request and iterate over its outputs; leaving the iterator early aborts it."""
        events = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

        def sink(output: RequestOutput) -> None:
            with contextlib.suppress(RuntimeError):  # the application's loop has ended; nobody listens any more
                events.call_soon_threadsafe(outputs.put_nowait, output)

        key = self._add(request, request_id, deadline, sink)
        finished = False
        try:
            while not finished:
                output = await outputs.get()
                finished = output.finished
                yield output
        finally:
            if not finished:
                self.abort(key)

    def abort(self, request_id: str) -> None:
        """Cancel a request; it ends as ``cancelled`` unless it ends otherwise first.  Unknown or ended: no effect."""
        self._service.abort(RequestKey(request_id))

    # -- the whole ---------------------------------------------------------------------------------------------------

    def drain(self, stage: str, timeout: float | None = None) -> bool:
        """Place nothing more on ``stage`` and wait until it is empty; whether it is, within ``timeout`` seconds.

        False as well where it never will be: it is lost, and its end will not be seen.

        Raises :class:`~kvbaton.errors.LocalProtocolError` for a name that is none of :attr:`stages`, and for a stage
        that is not up.
        """
        return self._service.drain(stage, timeout)

    def dismiss(self, stage: str, timeout: float | None = None) -> bool:
        """:meth:`drain` ``stage``, tell it to exit, and wait for that; whether it has ended, and was joined, within
        ``timeout`` seconds.  It is not started again; the others go on.  Where it has not ended in time, nothing is
        taken back: nothing more is placed on it, and another call waits on.  A stage that has not exited within
        ``deadline.shutdown`` is killed; False where even that does not end it.

        Raises :class:`~kvbaton.errors.LocalProtocolError` for a name that is none of :attr:`stages`, and for a stage
        that is not up.
        """
        return self._service.dismiss(stage, timeout)

    def confirm_ended(self, stage: str) -> int:
        """State that every process of ``stage`` that is lost has ended: you have seen to it on its host.

        For stages on other hosts, whose processes nobody here can join.  Your word counts as that join, the first half
        of a fence (C6.4): the other stages close their ends towards these processes, and what they might have written
        to is given back once that is done.  It must be true: a process that lives may still write there.  Processes
        that are up, or that ended in order, are not concerned.

        Returns how many lost processes that was.  Raises :class:`~kvbaton.errors.LocalProtocolError` for a name that is
        none of :attr:`stages`.
        """
        return self._service.confirm_ended(stage)

    def statistics(self) -> dict[str, Any]:
        """Books of the coordinator and, by name, of every stage; a stage that did not answer in time has an
        ``error``.  An engine that is in a step answers after it."""
        return self._service.ask("statistics")

    def health(self) -> dict[str, Any]:
        """As :meth:`statistics`, with the word of each stage's pump, which answers whatever its engine does:
        ``healthy``, and ``step_seconds``, for how long its engine has been in one step."""
        return self._service.ask("health")

    def profile(
        self,
        directory: str | os.PathLike[str],
        *,
        seconds: float = 60.0,
        tools: Iterable[str] = ("python",),
        stages: Iterable[str] | None = None,
    ) -> Profiling:
        """Begin a profiling session: each stage profiles its engine's thread, and writes a file when it is stopped.

        ``directory`` is made (0700) where it is missing, in a folder that is there; where it is there it must be yours
        alone, and on each stage's own host.  ``seconds``: after so many it ends by itself, 3600 at most.  ``tools``:
        ``python`` is cProfile, whose files are ``STAGE-EPOCH-SESSION.prof`` (from Python 3.12 on it sees all threads of
        the process, and a process has one session at a time); ``engine`` is what the engine itself offers, the
        transformers engine a trace by torch's profiler.  ``stages``: the names of those that take part; all by default.

        Returns once every stage has answered, or ``deadline.control`` has passed; whatever went wrong at one stage is
        in :attr:`Profiling.stages` and does not keep the others from it.  Raises
        :class:`~kvbaton.errors.ProfilingError` where nobody could do what is asked.
        """
        return Profiling.start(self._service.profile, self._service.lives(), directory, seconds, tools, stages)

    def stage(self, name: str) -> StageState:
        """How a stage stands, by what the coordinator has seen; asks nobody.

        Raises :class:`~kvbaton.errors.LocalProtocolError` for a name that is none of :attr:`stages`.
        """
        return self._service.stage(name)

    def close(self) -> None:
        """Cancel what runs, stop and join every stage, in the order that keeps memory safe (C6.2).  Idempotent.

        Raises :class:`~kvbaton.errors.KvbatonError` where a stage did not end as ordered, or where the trace
        (``trace.path``) could not be written; everything is over nevertheless.  A Ctrl-C that comes meanwhile is
        raised once every stage has been joined, which is bounded; a second one at once.
        """
        try:
            try:
                for trace in self._traces:
                    trace.close()
            finally:  # whoever interrupts that wants the stages ended
                self._service.close()
        except KvbatonError as error:
            late = self._written()
            if late is not None:
                error.add_note(str(late))  # the first cause is the one to see (C6.3)
            raise
        finally:
            if self._listening is not None:
                self._listening.close()
            for spans in self._spans:
                spans.close()
        late = self._written()
        if late is not None:
            raise late

    def __enter__(self) -> PDRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except KvbatonError as late:
            if error is None:
                raise
            error.add_note(f"while closing: {late}")  # the first cause is the one to see (C6.3)

    # -- inside ------------------------------------------------------------------------------------------------------

    def _written(self) -> TraceNotWritten | None:
        """Write the trace, once, where it is wanted; why it could not be."""
        path, self._trace_path = self._trace_path, None
        if path is None:
            return None
        trace = self._traces[0]
        try:
            trace.write(path)
        except TraceNotWritten as error:
            return error
        if trace.incomplete:
            _log.warning("the trace %s is incomplete: %s", path, trace.incomplete)
        return None

    def _add(self, request: Request, request_id: str | None, deadline: float | None, sink: Sink | None) -> RequestKey:
        key = RequestKey(uuid.uuid4().hex if request_id is None else request_id)
        if not isinstance(request, Request) or not isinstance(key, str):
            raise RequestRefused(
                f"add_request takes a kvbaton.Request and a text as its id, not {type(request).__name__} and"
                f" {type(key).__name__}: Request(prompt=tuple(runtime.tokenizer.encode(text)))",
                request=key,
            )

        def accepted() -> None:
            with self._lock:
                self._live[key] = sink

        self._service.add(key, request, deadline, accepted)
        return key

    def _deliver(self, output: RequestOutput) -> None:
        """On the coordinator's thread."""
        with self._lock:
            sink = self._live.get(output.request_id)
            if output.finished:
                self._live.pop(output.request_id, None)  # C1.1: free for reuse from here on
            if sink is not None:
                sink(output)
            else:
                self._pending.append(output)

    def _delivered(self) -> None:
        """On the coordinator's thread, after some outputs."""
        with self._news:
            if self._pending:
                self._news.notify_all()


def _metrics(settings: Settings, hooks: Sequence[object]) -> list[Metrics]:
    """The observers among ``hooks`` that are metrics, or one of our own where it is to be served and there is none."""
    loaded = sys.modules.get("kvbaton.observe.metrics")  # nobody has metrics who has not imported them
    found = [] if loaded is None else [hook for hook in hooks if isinstance(hook, loaded.Metrics)]
    if found or settings.metrics.listen is None:
        return found
    from kvbaton.observe.metrics import Metrics

    return [Metrics()]


def _traces(settings: Settings, hooks: Sequence[object]) -> list[Trace]:
    """The observers among ``hooks`` that are traces, or one of our own where it is to be written and there is none.

    Raises :class:`~kvbaton.errors.SettingsError` where it could not be.
    """
    loaded = sys.modules.get("kvbaton.observe.trace")
    found = [] if loaded is None else [hook for hook in hooks if isinstance(hook, loaded.Trace)]
    if any(trace.used for trace in found):
        raise SettingsError("this Trace is of another runtime already: make one for each", key="hooks")
    if settings.trace.path is None:
        return found
    from kvbaton.observe.trace import Trace, check_path

    check_path(settings.trace.path)
    return found or [Trace(events=settings.trace.events)]


def _spans(settings: Settings, hooks: Sequence[object]) -> list[Spans]:
    """An observer of our own where spans are wanted and nobody among ``hooks`` makes them."""
    loaded = sys.modules.get("kvbaton.observe.otel")
    given = loaded is not None and any(isinstance(hook, loaded.Spans) for hook in hooks)
    if given or not settings.trace.otel:
        return []
    from kvbaton.observe.otel import Spans

    return [Spans()]


def _about(service: Service) -> dict[str, str]:
    """What somebody who looks at a trace wants to know of the run."""
    settings = service.settings
    stages = settings.stages
    return {
        "kvbaton": sys.modules["kvbaton"].__version__, "model": settings.model, "engine": settings.engine.name,
        "transport": settings.transport.name, "stages": f"{stages.prefill} prefill, {stages.decode} decode",
        "launch": stages.launch,
    }  # fmt: skip


def _generation(outputs: list[RequestOutput], live: bool) -> list[RequestOutput]:
    """Of what is pending under one id: the live request's part, or that of the first one that has ended (C1.1)."""
    ends = [index for index, output in enumerate(outputs) if output.finished]
    if live:
        return outputs[ends[-1] + 1 :] if ends else outputs
    return outputs[: ends[0] + 1] if ends else outputs


def _until_finished(outputs: queue.SimpleQueue[RequestOutput]) -> Iterator[RequestOutput]:
    while True:
        output = outputs.get()
        yield output
        if output.finished:
            return


def run_colocated(settings: Settings, requests: Sequence[Request]) -> list[RequestRecord]:
    """The same requests on the same engine with the same settings, without a hand-off: what A1 compares with.

    Runs in the calling thread.  One record per request, in order; nothing crossed a transport, so those figures are 0.
    """
    plugin, options = choose_engine(settings.engine)
    plugin.check(settings.model, options)
    device = settings.stages.devices[0] if settings.stages.devices else None
    engine = cast("ColocatedEngine", plugin.open(settings.model, options, Role.COLOCATED, device))
    answers = {new_transfer_id(): _Answer(request) for request in requests}
    try:
        engine.regions(None)
        for transfer, answer in answers.items():
            engine.add(transfer, answer.request)
        while any(answer.reason is None for answer in answers.values()):
            if not engine.has_work():
                raise LocalProtocolError("the engine has no work left although requests are unfinished: a defect of it")
            for output in engine.step():
                answers[output.transfer].take(output)
    finally:
        engine.close()
    return [
        RequestRecord(
            RequestKey(str(index)), transfer, len(answer.request.prompt), tuple(answer.tokens), tuple(answer.depths),
            answer.reason or "failed", answer.error,
        )
        for index, (transfer, answer) in enumerate(answers.items())
    ]  # fmt: skip


@dataclass(slots=True, eq=False)
class _Answer:
    request: Request
    tokens: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    reason: str | None = None
    error: Exception | None = None

    def take(self, output: StepOutput) -> None:
        self.tokens += output.token_ids
        self.depths += output.exit_depths
        if output.error is not None:
            self.reason, self.error = "failed", output.error
        elif output.finish_reason is not None:
            self.reason = output.finish_reason.value
