"""``kvbaton run``: prompts in, text out, and what it took."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbaton.bounds import MAX_PROFILE_SECONDS
from kvbaton.cli import console
from kvbaton.cli.ending import say_interrupted
from kvbaton.cli.faults import BAD_INPUT, FAILED, INTERRUPTED, OK, exit_status, say
from kvbaton.cli.interrupt import Interrupt
from kvbaton.cli.prompts import Prompt
from kvbaton.cli.report import Answer, as_json, differences, print_tables, verdict
from kvbaton.cli.screen import Front, Screen, Tally, screen_for
from kvbaton.detokenizer import Detokenizer
from kvbaton.engine import Request
from kvbaton.errors import KvbatonError, RequestRefused, SettingsError
from kvbaton.runtime import PDRuntime, run_colocated
from kvbaton.settings import Settings

#: Seconds between two looks at whether Ctrl-C was pressed.
_TICK = 0.1
#: Characters of a prompt in the line above its text.
_HEADER = 60


def run(
    settings: Settings, prompts: Sequence[Prompt], *, compare: bool, as_object: bool, profile: Path | None = None
) -> int:
    """Run ``prompts`` and show them; the exit status.

    ``compare`` runs them undisaggregated as well; ``as_object`` prints one JSON object in place of text and tables;
    ``profile`` is where the stages put their profiles, which costs no request anything but time.
    Raises :class:`~kvbaton.errors.KvbatonError` where nothing could be run.
    """
    # stages of other hosts make it there
    if profile is not None and settings.stages.launch != "remote" and not profile.absolute().parent.is_dir():
        raise SettingsError(
            f"the profiles cannot be written to {profile}: there is no directory {profile.parent}",
            key="profile", origin=None,
        )  # fmt: skip
    screen = screen_for(quiet=as_object)
    try:
        with Interrupt() as interrupt:
            answers, requests, late = _disaggregated(settings, prompts, screen, interrupt, profile)
            if interrupt.requested:
                screen.close()
                cancelled = len(prompts) - sum(a.record.finish_reason in ("stop", "length") for a in answers)
                say_interrupted(f"interrupted: {cancelled} of {len(prompts)} requests cancelled, everything stopped")
                return INTERRUPTED
            found = None
            if compare:
                screen.progress("running the same requests undisaggregated")
                found = differences(answers, run_colocated(settings, requests))
    finally:
        screen.close()
    if as_object:
        print(json.dumps(as_json(answers, None if found is None else not found), ensure_ascii=False), flush=True)
    else:
        print_tables(console.answers(), answers)
    status = _conclude(answers, found, as_object=as_object)
    if late is not None:
        say(str(late))
        status = status or FAILED
    return status


def _disaggregated(
    settings: Settings, prompts: Sequence[Prompt], screen: Screen, interrupt: Interrupt, profile: Path | None
) -> tuple[list[Answer], list[Request], KvbatonError | None]:
    """Answers, the requests behind them, and what went wrong only after all of them had ended."""
    tally = Tally()
    answers: list[Answer] | None = None
    requests: list[Request] = []
    screen.progress("starting")
    try:
        with PDRuntime.start(settings, hooks=[tally], progress=screen.progress) as runtime:
            interrupt.note()  # from here until everything is closed
            tokenizer = runtime.tokenizer
            for prompt in prompts:
                token_ids = tuple(tokenizer.encode(prompt.text))
                if not token_ids:
                    raise SettingsError(f"{prompt.origin}: the model's tokenizer makes no token of it", key="prompt")
                requests.append(Request(token_ids, prompt.sampling))
            serving = _Serving(runtime, settings.limits.waiting, prompts, requests, screen, tally)
            if profile is None:
                answers = serving.until_done(interrupt)
            else:
                with runtime.profile(profile, seconds=MAX_PROFILE_SECONDS) as session:
                    answers = serving.until_done(interrupt)
                for name, stage in session.stages.items():
                    if stage.error is not None:
                        say(f"{name} was not profiled: {stage.error}")
                    for file in stage.files:
                        say(f"{name} was profiled: {file}")
            screen.progress("stopping")
    except KvbatonError as error:
        if answers is None:
            raise
        return answers, requests, error  # a stage ended badly; the answers are there nevertheless
    finally:
        interrupt.interrupt()
    return answers, requests, None


class _Serving:
    """Requests going in as the runtime takes them, outputs coming out."""

    def __init__(
        self,
        runtime: PDRuntime,
        at_once: int,
        prompts: Sequence[Prompt],
        requests: Sequence[Request],
        screen: Screen,
        tally: Tally,
    ) -> None:
        self._runtime = runtime
        self._at_once = at_once
        self._pending = deque(zip(prompts, requests, strict=True))
        self._live: dict[str, tuple[Prompt, Detokenizer]] = {}
        self._answers: dict[str, Answer] = {}
        self._prompts = prompts
        self._screen = screen
        self._tally = tally
        several = len(prompts) > 1
        self._front = Front(screen, {prompt.id: _header(prompt) if several else "" for prompt in prompts})
        for prompt in prompts:
            tally.add(prompt.id)

    def until_done(self, interrupt: Interrupt) -> list[Answer]:
        """Answers in the order of the prompts; those that ended, where it was interrupted."""
        cancelled = False
        while self._pending or self._live:
            if interrupt.requested and not cancelled:
                cancelled = True
                self._pending.clear()
                self._screen.progress("interrupted: cancelling what runs (Ctrl-C again forces)")
                for request in self._live:
                    self._runtime.abort(request)
            self._fill()
            for output in self._runtime.step(_TICK):
                self._take(output)
            if not cancelled:
                self._screen.progress(self._tally.line())
        return [self._answers[prompt.id] for prompt in self._prompts if prompt.id in self._answers]

    def _fill(self) -> None:
        while self._pending and len(self._live) < self._at_once:
            prompt, request = self._pending.popleft()
            try:
                self._runtime.add_request(request, prompt.id)
            except RequestRefused as error:
                error.args = (f"{prompt.origin}: {error}",)
                raise
            self._live[prompt.id] = (prompt, Detokenizer(self._runtime.tokenizer))

    def _take(self, output: Any) -> None:
        live = self._live.get(output.request_id)
        if live is None:
            return
        prompt, detokenizer = live
        self._tally.tokens += len(output.token_ids)
        self._front.text(prompt.id, detokenizer.push(output.token_ids))
        if output.finished:
            del self._live[prompt.id]
            self._tally.finish(prompt.id)
            self._front.finish(prompt.id, detokenizer.finish())
            text = self._runtime.tokenizer.decode(output.record.token_ids) if output.record.token_ids else ""
            self._answers[prompt.id] = Answer(prompt, output.record, text)


def _header(prompt: Prompt) -> str:
    first = " ".join(prompt.text.split())
    return f"[{prompt.id}] {first[:_HEADER]}{'…' if len(first) > _HEADER else ''}"


def _conclude(answers: Sequence[Answer], found: Sequence[str] | None, *, as_object: bool) -> int:
    """The last lines and the exit status."""
    status = OK
    for answer in answers:
        if answer.failed:
            error = answer.record.error
            say(f"request {answer.prompt.id} failed: {error}")
            worse = exit_status(error) if error is not None else FAILED
            status = BAD_INPUT if BAD_INPUT in (status, worse) else FAILED
    if found is not None:
        if found and not as_object:
            for line in found:
                print(line)
        elif found:
            for line in found:
                say(line)
        if not as_object:
            print(verdict(len(answers), found), flush=True)
        if found and status == OK:
            status = FAILED
    return status
