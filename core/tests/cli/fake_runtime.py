"""A runtime without stages, for the command line's own logic.  Put into ``sys.modules`` as ``kvbaton.runtime``.

The "model" answers with the words of the prompt in reverse order, one token per step; its tokens are words.  What a
prompt says steers it: ``refuse``, ``overlong``, ``fail``, ``differ``, ``slow`` (never ends by itself); so does the name
of the model: ``absent``, ``late``, ``crash``, ``bug``, ``open-files``, ``sleepy`` (start-up takes for ever), ``stuck``
(aborting has no effect).
"""

from __future__ import annotations

import errno
import sys
import time
import types
from collections.abc import Callable, Sequence

from kvbaton.engine import Request
from kvbaton.errors import ModelNotFound, PromptTooLong, StageDied, StartupError, TransferFailed
from kvbaton.hooks import Hooks
from kvbaton.records import RequestOutput, RequestRecord
from kvbaton.settings import Settings

WORDS: list[str] = ["\N{REPLACEMENT CHARACTER}"]


class WordTokenizer:
    def encode(self, text: str) -> list[int]:
        ids = []
        for word in text.split():
            if word == "zero":
                continue
            if word not in WORDS:
                WORDS.append(word)
            ids.append(WORDS.index(word))
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(WORDS[token] for token in token_ids)


class FakeRuntime:
    #: What happened, for tests to look at.
    log: list[str] = []

    def __init__(self, settings: Settings, hooks: Hooks) -> None:
        self.settings = settings
        self.hooks = hooks
        self.tokenizer = WordTokenizer()
        self.live: dict[str, tuple[Request, list[int]]] = {}
        self.aborted: set[str] = set()

    @classmethod
    def start(
        cls, settings: Settings, *, hooks: Sequence[object] = (), progress: Callable[[str], None] | None = None
    ) -> FakeRuntime:
        cls.log.append("start")
        if progress is not None:
            progress("loading the model")
        if settings.model == "absent":
            raise StartupError("prefill-0 did not start: no such model") from ModelNotFound("no such model")
        if settings.model == "late":
            raise StartupError("prefill-0 did not start in time")
        if settings.model == "open-files":
            raise StartupError("prefill-0 cannot be started: Too many open files") from OSError(
                errno.EMFILE, "Too many"
            )
        if settings.model == "open-files-elsewhere":
            raise OSError(errno.EMFILE, "Too many open files")
        if settings.model == "bug":
            raise ZeroDivisionError("a bug")
        if settings.model == "sleepy":
            print("starting", file=sys.stderr, flush=True)
            time.sleep(600)
        return cls(settings, Hooks(hooks))

    def __enter__(self) -> FakeRuntime:
        return self

    def __exit__(self, *_: object) -> None:
        self.log.append("close")

    def add_request(self, request: Request, request_id: str | None = None, *, deadline: float | None = None) -> str:
        assert request_id is not None
        words = [WORDS[token] for token in request.prompt]
        if "refuse" in words:
            raise PromptTooLong("a prompt of 9 tokens plus 16 can never fit into 8", tokens=9, limit=8)
        self.log.append(f"add {request_id}")
        answer = list(reversed(request.prompt))[: request.sampling.max_tokens]
        self.live[request_id] = (request, answer)
        for milestone in ("reserved", "received", "activated"):
            self.hooks.tell(
                "kvbaton_milestone", transfer="0" * 32, request=request_id, stage="d", milestone=milestone, at=0.0
            )
        return request_id

    def abort(self, request_id: str) -> None:
        self.log.append(f"abort {request_id}")
        self.aborted.add(request_id)
        if self.settings.model == "stuck":
            print("aborting in vain", file=sys.stderr, flush=True)

    def step(self, timeout: float = 0.0) -> list[RequestOutput]:
        if self.settings.model == "crash":
            raise StageDied("decode-0", "killed by signal 9")
        outputs = []
        for request_id, (request, answer) in list(self.live.items()):
            done = len(request.prompt[: request.sampling.max_tokens]) - len(answer)
            words = [WORDS[token] for token in request.prompt]
            new = (answer.pop(0),) if answer else ()
            reason: str | None = None
            error: Exception | None = None
            if "fail" in words and done == 1:
                reason, error = "failed", TransferFailed("C6.3 chunk 1 passed its deadline", transfer="0" * 32)
            elif "overlong" in words:
                reason, error = "failed", PromptTooLong("prefill-0 cannot hold it", tokens=9, limit=8)
            elif request_id in self.aborted and self.settings.model != "stuck":
                reason = "cancelled"
            elif not answer and "slow" not in words:
                reason = "length"
            record = None
            if reason is not None:
                del self.live[request_id]
                record = self.record(request, request_id, done + len(new), reason, error)
            outputs.append(
                RequestOutput(request_id, new, (1,) * len(new), reason is not None, reason, error, record)  # type: ignore[arg-type]
            )
        if not outputs or all(not output.token_ids and not output.finished for output in outputs):
            time.sleep(min(timeout, 0.01))
            if "slow" in WORDS:
                print("decoding", file=sys.stderr, flush=True)
        return outputs

    def record(
        self, request: Request, request_id: str, count: int, reason: str, error: Exception | None
    ) -> RequestRecord:
        tokens = tuple(reversed(request.prompt))[:count]
        return RequestRecord(
            request_id, "0" * 32, len(request.prompt), tokens, (1,) * count, reason, error,  # type: ignore[arg-type]
            chunks=2, segments=6, bytes=4096, prefill="prefill-0", decode="decode-0",
            milestones={"reserved": 0.001, "received": 0.0125},
        )  # fmt: skip


def run_colocated(settings: Settings, requests: Sequence[Request]) -> list[RequestRecord]:
    FakeRuntime.log.append("colocated")
    records = []
    for request in requests:
        answer = list(reversed(request.prompt))[: request.sampling.max_tokens]
        words = [WORDS[token] for token in request.prompt]
        if "differ" in words:
            answer[-1] += 1
        depths = (2 if "depth" in words else 1,) * len(answer)
        reason = "stop" if "reason" in words else "length"
        records.append(RequestRecord("", None, len(request.prompt), tuple(answer), depths, reason))  # type: ignore[arg-type]
    return records


def install() -> None:
    """From now on the command line talks to this runtime."""
    module = types.ModuleType("kvbaton.runtime")
    module.PDRuntime = FakeRuntime  # type: ignore[attr-defined]
    module.run_colocated = run_colocated  # type: ignore[attr-defined]
    sys.modules["kvbaton.runtime"] = module
