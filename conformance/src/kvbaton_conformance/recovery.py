"""Stages that are killed at random while they serve, and started again, over any connector between processes.

A deployment with several stages of each kind gets requests, a few of them under way at a time, and every so often one
of its stages, whichever it is and whatever it does, a SIGKILL.  What has to hold:

- every request ends: with the tokens that an undisaggregated run of the same engine gives (A1), or as failed with a
  cause that names a stage that was killed, or says that none was left (C6.3); none hangs;
- what was delivered of a failed request is the beginning of its right answer (C5.2);
- each stage has had one process more than it was killed times: nobody else's was touched, and each came back (C6.4);
  but for those that the coordinator itself ends, saying so, to mend a connection that broke between two that live;
- afterwards a request over every pair of stages is answered rightly, and all books balance (C2.5, C8.4);
- closing ends every process, and nothing is left (C6.2, T10).

From the command line::

    python -m kvbaton_conformance.recovery --transport nixl --model smollm2 --requests 200 --every 6
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from kvbaton import PDRuntime, Request, RequestRecord, Settings, run_colocated
from kvbaton.errors import KvbatonError
from kvbaton.hooks import StageLoad, hookimpl
from kvbaton.identity import PeerId
from kvbaton_conformance.books import check_books, until
from kvbaton_conformance.clauses import ClauseBroken, require
from kvbaton_conformance.leaks import holdings, left_behind
from kvbaton_conformance.long_run import command, deployed, many_requests, overrides, played

#: A stage may be killed many times in a row before it has served anything, which is no fault of its own.
_OFTEN = 10_000


@dataclass(frozen=True)
class Plan:
    """What is to be played.

    ``requests``: so many, and more until there were ``kills`` kills as well.  ``distinct``: different ones among them,
    which are asked in turn; 0: all.  ``every``: seconds between two kills, on average.  ``together``: requests under
    way at a time.  ``patience``: seconds without the end of any request that count as a hang.
    """

    overrides: Mapping[str, Any]
    requests: int = 40
    distinct: int = 0
    kills: int = 0
    every: float = 1.0
    together: int = 8
    prompt_tokens: int = 48
    max_tokens: int = 12
    seed: int = 1
    patience: float = 90.0

    def settings(self) -> Settings:
        """Two stages of each kind, as processes, unless ``overrides`` say otherwise."""
        return deployed({"recovery.restarts": _OFTEN, **self.overrides})

    def prompts(self) -> list[Request]:
        """Of every length up to ``prompt_tokens``; some begin alike."""
        return many_requests(self.distinct or self.requests, self.prompt_tokens, self.max_tokens, self.seed)


@dataclass
class Result:
    """What came of it, all of which held."""

    right: int = 0
    #: Of these, requests that have begun again at least once.
    begun_again: int = 0
    #: Recomputed from delivered tokens, with another end than the undisaggregated run's: ``recompute`` promises the
    #: same only up to the numerics of another batch.
    other_end: int = 0
    #: Failures by their cause, without names and numbers.
    failed: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    #: Stages that were ended and started again because one of their connections was down.
    mended: Counter[str] = field(default_factory=Counter)
    generations: int = 0
    seconds: float = 0.0
    #: The longest time from a request's start to its end.
    longest: float = 0.0

    def lines(self) -> list[str]:
        """For a reader."""
        total = self.right + self.other_end + sum(self.failed.values())
        kills = ", ".join(f"{name} {count}" for name, count in sorted(self.kills.items()))
        return [
            f"{total} requests in {self.seconds:.0f} s, {sum(self.kills.values())} kills ({kills or 'none'})",
            f"started again for a connection: {sum(self.mended.values())}",
            f"right tokens: {self.right}, of which {self.begun_again} began again; generations: {self.generations}",
            f"recomputed with another end: {self.other_end}",
            f"failed with a cause: {sum(self.failed.values())}",
            *(f"  {count} x {cause}" for cause, count in self.failed.most_common()),
            f"longest from start to end: {self.longest:.1f} s",
        ]


class _Killer(threading.Thread):
    """Kills one stage after another, and keeps what it has seen of their processes."""

    def __init__(self, runtime: PDRuntime, plan: Plan) -> None:
        super().__init__(name="kvbaton-conformance-killer")
        self._runtime = runtime
        self._plan = plan
        self._draw = random.Random(plan.seed + 1)
        self._over = threading.Event()
        #: Every process that was seen of a stage, in order; and those of them that were killed here.
        self.lives = {name: [runtime.stage(name).pid] for name in runtime.stages}
        self.killed: dict[str, list[int]] = {name: [] for name in runtime.stages}

    @property
    def kills(self) -> int:
        return sum(map(len, self.killed.values()))

    def look(self) -> None:
        for name, lives in self.lives.items():
            pid = self._runtime.stage(name).pid
            if pid != lives[-1]:
                lives.append(pid)

    def run(self) -> None:
        due = time.monotonic() + self._pause()
        while not self._over.wait(0.02):
            self.look()
            if time.monotonic() >= due:
                name = self._draw.choice(self._runtime.stages)
                pid = self.lives[name][-1]
                if pid not in self.killed[name]:  # else it is not back yet
                    self.killed[name].append(pid)
                    os.kill(pid, signal.SIGKILL)
                    due = time.monotonic() + self._pause()

    def stop(self) -> None:
        self._over.set()
        self.join()

    def back(self) -> bool:
        """Every stage that was killed has a process again."""
        self.look()
        return all(lives[-1] not in self.killed[name] for name, lives in self.lives.items())

    def check(self, mended: Counter[str]) -> None:
        for name, lives in self.lives.items():
            ended, killed = lives[:-1], self.killed[name]
            others = len(ended) - len(killed)
            require(
                [pid for pid in ended if pid in killed] == killed and others <= mended[name], "C6.4",
                f"processes of {name} have ended that nobody killed, or the other way round",
                expected=f"{killed}, and {mended[name]} for a connection", seen=lives,
            )  # fmt: skip

    def _pause(self) -> float:
        return self._plan.every * self._draw.uniform(0.5, 1.5)


class _Placed:
    """Where a request is to go while pairs are tried one by one; everything else goes where it likes.

    Also what went wrong lately between stages, for whoever asks why a pair is not connected.
    """

    def __init__(self) -> None:
        self.pairs: dict[str, tuple[str, str]] = {}
        self.faults: deque[str] = deque(maxlen=6)
        self.mended: Counter[str] = Counter()

    @hookimpl
    def kvbaton_choose_pair(
        self, request: str, prefill: Sequence[StageLoad], decode: Sequence[StageLoad]
    ) -> tuple[str, str] | None:
        p, d = self.pairs.get(request, ("", ""))
        offered = p in {load.name for load in prefill} and d in {load.name for load in decode}
        return (p, d) if offered else None

    @hookimpl
    def kvbaton_peer_lost(self, peer: PeerId, cause: str) -> None:
        self.mended[peer.name] += cause.startswith("its connection with ")

    @hookimpl
    def kvbaton_fault(self, error: Exception) -> None:
        self.faults.append(str(error))


def play(plan: Plan, progress: Callable[[str], None] = lambda text: None) -> Result:
    """Play it; half a minute with the defaults.  Raises :class:`~kvbaton_conformance.clauses.ClauseBroken`.

    Threading: takes the whole process; a thread of it does the killing.
    """
    settings, requests = plan.settings(), plan.prompts()
    progress("the undisaggregated run")
    expected = run_colocated(settings, requests)
    broken = [record.error for record in expected if record.error is not None]
    require(not broken, "A1", "the undisaggregated run fails", seen=broken[:1])
    before = holdings()
    result = Result()
    with _running(settings) as (runtime, placed):
        progress("stages are up")
        began = time.monotonic()
        killer = _Killer(runtime, plan)
        killer.start()
        try:
            _serve(runtime, killer, plan, list(zip(requests, expected, strict=True)), result, progress)
        finally:
            killer.stop()
        result.seconds = time.monotonic() - began
        until(killer.back, 60.0, "C6.4", "every stage that was killed is started again")
        result.kills.update({name: len(pids) for name, pids in killer.killed.items() if pids})
        _try_pairs(runtime, placed, requests[0], expected[0])
        killer.look()
        killer.check(placed.mended)
        result.mended += placed.mended
        check_books(runtime)
    left = left_behind(before)
    require(not left, "T10", "something is left", seen=left)
    return result


@contextmanager
def _running(settings: Settings) -> Iterator[tuple[PDRuntime, _Placed]]:
    placed = _Placed()
    runtime = PDRuntime.start(settings, hooks=[placed])
    try:
        yield runtime, placed
    except BaseException:
        try:
            runtime.close()
        except KvbatonError as error:
            logging.getLogger(__name__).warning("while giving up: %s", error)
        raise
    runtime.close()  # an end that is not as ordered is an error (C6.2)


def _serve(
    runtime: PDRuntime, killer: _Killer, plan: Plan, asked: Sequence[tuple[Request, RequestRecord]], result: Result,
    progress: Callable[[str], None],
) -> None:  # fmt: skip
    recompute = plan.settings().recovery.mode == "recompute"
    begun = 0
    under_way = dict[str, tuple[RequestRecord, float]]()
    last = shown = time.monotonic()
    while under_way or begun < plan.requests or killer.kills < plan.kills:
        while len(under_way) < plan.together and (begun < plan.requests or killer.kills < plan.kills):
            request, expected = asked[begun % len(asked)]
            under_way[runtime.add_request(request, f"request-{begun}")] = expected, time.monotonic()
            begun += 1
        for output in runtime.step(0.05):
            if output.record is not None:
                last = time.monotonic()
                expected, since = under_way.pop(output.request_id)
                result.longest = max(result.longest, last - since)
                _judge(output.record, expected, recompute, result)
        now = time.monotonic()
        require(
            now - last < plan.patience, "C6.7", f"no request has ended for {plan.patience:g} s",
            seen=f"under way: {sorted(under_way)}; {runtime.statistics()['coordinator']}",
        )  # fmt: skip
        if now - shown > 10.0:
            shown = now
            progress(f"{begun - len(under_way)} requests have ended, {killer.kills} kills")


def _judge(record: RequestRecord, expected: RequestRecord, recompute: bool, result: Result) -> None:
    result.generations += 1 + record.requeued
    tokens, wanted = record.token_ids, expected.token_ids
    if record.error is None:
        if tokens == wanted and record.finish_reason == expected.finish_reason:
            result.right += 1
            result.begun_again += bool(record.requeued)
            return
        if recompute and record.requeued and len(tokens) == len(wanted):
            result.other_end += 1
            return
    else:
        cause = str(getattr(record.error, "cause", ""))
        require(
            record.finish_reason == "failed" and bool(re.search(r" is lost: | is down: |^no ", cause)), "C6.3",
            f"request {record.request_id} failed for another reason than a lost stage", seen=record.error,
        )  # fmt: skip
        result.failed[_kind(cause)] += 1
        if tokens == wanted[: len(tokens)] or (recompute and record.requeued):
            return
    raise ClauseBroken(
        "A1", f"request {record.request_id} differs from the undisaggregated run (begun {1 + record.requeued} times)",
        expected=f"{wanted} {expected.finish_reason}", seen=f"{tokens} {record.finish_reason} {record.error or ''}",
    )  # fmt: skip


def _kind(cause: str) -> str:
    """A cause without what differs from one to the next."""
    line = re.sub(r"\S*-\d+@\S*?(?=[:,. ]|$)|\S+-\d+(?=\b)", "STAGE", cause.split("\n")[0])
    return re.sub(r"\d+", "N", line)[:150]


def _try_pairs(runtime: PDRuntime, placed: _Placed, request: Request, expected: RequestRecord) -> None:
    """Every prefill stage hands over to every decode stage, those that came back included."""
    for p in [name for name in runtime.stages if name.startswith("prefill")]:
        for d in [name for name in runtime.stages if name.startswith("decode")]:
            give_up = time.monotonic() + 60.0
            while True:  # until the pair is connected it is not offered, and the request goes elsewhere
                key = f"after-{p}-{d}-{time.monotonic_ns()}"
                placed.pairs[key] = p, d
                record = list(runtime.stream(runtime.add_request(request, key)))[-1].record
                assert record is not None
                require(
                    record.error is None and record.token_ids == expected.token_ids, "C6.4",
                    "a request is not answered although every stage is back", expected=expected.token_ids,
                    seen=record.error or record.token_ids,
                )  # fmt: skip
                if (record.prefill, record.decode) == (p, d):
                    break
                require(
                    time.monotonic() < give_up, "C6.4", f"{p} and {d} are not connected again", seen=list(placed.faults)
                )


def main(arguments: Sequence[str] | None = None) -> int:
    """Play one plan as a command; the status is 0 where everything held."""
    plan = Plan({})
    parser = command("recovery", __doc__, plan)
    parser.add_argument("--requests", type=int, default=plan.requests)
    parser.add_argument("--distinct", type=int, default=plan.distinct, help="different ones among them; 0: all")
    parser.add_argument("--kills", type=int, default=plan.kills, help="so many at least, with more requests if need be")
    parser.add_argument("--every", type=float, default=plan.every, help="seconds between two kills, on average")
    given = parser.parse_args(arguments)
    plan = Plan(
        overrides(given), given.requests, given.distinct, given.kills, given.every, given.together,
        given.prompt_tokens, given.max_tokens, given.seed, given.patience,
    )  # fmt: skip
    result = played(lambda progress: play(plan, progress))
    if result is None:
        return 1
    print("\n".join(result.lines()))
    print("HOLDS: no other process ended, every stage came back, every pair serves, all books balance, nothing is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
