"""A deployment at load, with cancels, for as long as one likes: nothing grows, everything ends, the books balance.

Several stages of each kind, as processes.  So many requests are under way at any time; a third of them is cancelled at
a moment of its own, from before it is placed until after its first tokens, and a few have a deadline that they miss.
Every so often the resident memory, the descriptors and the threads of the coordinator's process and of each stage are
written down.  What has to hold:

- what was not cancelled and not overdue ends with the tokens of an undisaggregated run (A1); none hangs;
- what was delivered of a cancelled one is the beginning of its right answer (C5.2);
- in each process the figures are level: the median of the last tenth against that of the first tenth after the
  warm-up, which is a fifth of the time (T12).  Memory may differ by :data:`MEMORY_SHARE` or :data:`MEMORY_BYTES`,
  whichever is more; descriptors and threads by nothing;
- no stage ended (its process is the one of the start), and afterwards all books balance (C2.5, C8.4);
- closing leaves nothing (T10).

From the command line::

    python -m kvbaton_conformance.soak --transport nixl --minutes 30 --json soak.json --plot soak.svg
"""

from __future__ import annotations

import heapq
import json
import math
import os
import platform
import random
import shlex
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvbaton import PDRuntime, Request, RequestRecord, Settings, run_colocated
from kvbaton_conformance.books import check_books
from kvbaton_conformance.clauses import ClauseBroken, require
from kvbaton_conformance.leaks import holdings, left_behind
from kvbaton_conformance.long_run import command, deployed, many_requests, overrides, played

#: How much more resident memory is no growth: allocators keep what they may use again.
MEMORY_SHARE, MEMORY_BYTES = 0.01, 2 << 20
#: The share of the time after which everything has been used once.
WARM_UP = 0.2
#: The coordinator's process in what is written down.
OWN = "coordinator"


@dataclass(frozen=True)
class Plan:
    """What is to be played.

    ``seconds``: how long requests are begun.  ``together``: requests under way at a time.  ``distinct``: different
    ones, asked in turn.  ``cancelled`` and ``overdue``: shares of them.  ``every``: seconds between two samples.
    ``patience``: seconds without the end of any request that count as a hang.
    """

    overrides: Mapping[str, Any]
    seconds: float = 60.0
    together: int = 16
    distinct: int = 200
    prompt_tokens: int = 160
    max_tokens: int = 12
    cancelled: float = 0.33
    overdue: float = 0.02
    every: float = 2.0
    seed: int = 1
    patience: float = 60.0

    def settings(self) -> Settings:
        """Two stages of each kind, as processes, unless ``overrides`` say otherwise."""
        return deployed(self.overrides)

    def prompts(self) -> list[Request]:
        """Of every length up to ``prompt_tokens``; a quarter of them begin alike."""
        return many_requests(self.distinct, self.prompt_tokens, self.max_tokens, self.seed)


@dataclass(frozen=True)
class Figures:
    """What one process holds at a moment: resident bytes, descriptors, threads."""

    memory: int
    descriptors: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> Figures:
        """Of a process that lives; raises :class:`OSError` for one that does not."""
        process = Path("/proc") / str(pid)
        pages = int((process / "statm").read_text().split()[1])
        descriptors, threads = (sum(1 for _ in (process / kind).iterdir()) for kind in ("fd", "task"))
        return cls(pages * os.sysconf("SC_PAGE_SIZE"), descriptors, threads)


@dataclass(frozen=True)
class Sample:
    """``at`` seconds from the start: requests that have ended by then, and what each process holds."""

    at: float
    ended: int
    processes: dict[str, Figures]


@dataclass(frozen=True)
class Level:
    """How one figure of one process has moved: ``first`` and ``last`` are the medians of a tenth of the time."""

    process: str
    figure: str
    first: float
    last: float

    @property
    def allowed(self) -> float:
        """How much more ``last`` may be."""
        return max(MEMORY_SHARE * self.first, MEMORY_BYTES) if self.figure == "memory" else 0.0

    @property
    def holds(self) -> bool:
        """Nothing has grown."""
        return self.last - self.first <= self.allowed

    def __str__(self) -> str:
        unit, scale = (" MiB", 1 << 20) if self.figure == "memory" else ("", 1)
        first, last, more = self.first / scale, self.last / scale, (self.last - self.first) / scale
        return f"{self.process:<12} {self.figure:<12} {first:9.1f} -> {last:9.1f}{unit}  ({more:+.2f})"


@dataclass
class Result:
    """What came of it."""

    ends: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    longest: float = 0.0
    samples: list[Sample] = field(default_factory=list)

    def levels(self) -> list[Level]:
        """Each figure of each process."""
        after = [sample for sample in self.samples if sample.at >= WARM_UP * self.samples[-1].at]
        tenth = max(1, len(after) // 10)
        return [
            Level(process, figure, *(
                statistics.median(getattr(sample.processes[process], figure) for sample in part)
                for part in (after[:tenth], after[-tenth:])
            ))
            for process in self.samples[0].processes
            for figure in ("memory", "descriptors", "threads")
        ]  # fmt: skip

    def lines(self) -> list[str]:
        """For a reader."""
        ended = sum(self.ends.values())
        kinds = ", ".join(f"{kind} {count}" for kind, count in self.ends.most_common())
        return [
            f"{ended} requests in {self.seconds:.0f} s, {ended / self.seconds:.1f} a second: {kinds}",
            f"longest from start to end: {self.longest:.1f} s",
            *(f"  {level}" for level in self.levels()),
        ]


@dataclass
class _UnderWay:
    expected: RequestRecord
    began: float
    cancelled: bool = False
    overdue: bool = False


def play(plan: Plan, progress: Callable[[str], None] = lambda text: None) -> Result:
    """Play it.  Raises :class:`~kvbaton_conformance.clauses.ClauseBroken`, but not for what has grown: see ``levels``.

    Threading: takes the whole process.
    """
    settings, requests = plan.settings(), plan.prompts()
    progress("the undisaggregated run")
    expected = run_colocated(settings, requests)
    broken = [record.error for record in expected if record.error is not None]
    require(not broken, "A1", "the undisaggregated run fails", seen=broken[:1])
    before = holdings()
    result = Result()
    with PDRuntime.start(settings) as runtime:
        progress("stages are up")
        pids = {OWN: os.getpid(), **{name: runtime.stage(name).pid for name in runtime.stages}}
        _serve(runtime, pids, plan, list(zip(requests, expected, strict=True)), result, progress)
        now = {name: runtime.stage(name).pid for name in runtime.stages}
        require(
            {OWN: os.getpid(), **now} == pids, "C6.4", "a stage ended and was started again", expected=pids, seen=now
        )
        check_books(runtime)
    left = left_behind(before)
    require(not left, "T10", "something is left", seen=left)
    return result


def _serve(
    runtime: PDRuntime, pids: Mapping[str, int], plan: Plan, asked: Sequence[tuple[Request, RequestRecord]],
    result: Result, progress: Callable[[str], None],
) -> None:  # fmt: skip
    draw = random.Random(plan.seed + 1)
    under_way = dict[str, _UnderWay]()
    cancels: list[tuple[float, str]] = []  # when to cancel whom
    usual = 0.0  # seconds that a request takes, of late
    begun = 0
    began = last = time.monotonic()
    sample_at, show_at = began, began
    while under_way or time.monotonic() - began < plan.seconds:
        now = time.monotonic()
        while len(under_way) < plan.together and now - began < plan.seconds:
            request, expected = asked[begun % len(asked)]
            one = _UnderWay(expected, now, overdue=draw.random() < plan.overdue)
            # around what it takes while this many are under way: some before they are placed, some after their end
            moment = usual * draw.uniform(0.0, 1.2)
            deadline = max(moment, 1e-3) if one.overdue else None
            key = runtime.add_request(request, f"request-{begun}", deadline=deadline)
            under_way[key] = one
            if not one.overdue and draw.random() < plan.cancelled:
                heapq.heappush(cancels, (now + moment, key))
            begun += 1
        while cancels and cancels[0][0] <= now:
            _, whom = heapq.heappop(cancels)
            if whom in under_way:
                under_way[whom].cancelled = True
                runtime.abort(whom)
        for output in runtime.step(0.005):
            if output.record is not None:
                last = time.monotonic()
                one = under_way.pop(output.request_id)
                took = last - one.began
                result.longest = max(result.longest, took)
                usual += 0.05 * (took - usual)
                result.ends[_judge(output.record, one)] += 1
        now = time.monotonic()
        require(
            now - last < plan.patience, "C6.7", f"no request has ended for {plan.patience:g} s",
            seen=f"under way: {sorted(under_way)}; {runtime.statistics()['coordinator']}",
        )  # fmt: skip
        if now >= sample_at:
            sample_at = now + plan.every
            result.samples.append(Sample(round(now - began, 2), sum(result.ends.values()), _held(pids)))
        if now >= show_at:
            show_at = now + max(10.0, plan.seconds / 60)
            progress(f"{sum(result.ends.values())} requests have ended: {dict(result.ends)}")
    result.seconds = time.monotonic() - began


def _held(pids: Mapping[str, int]) -> dict[str, Figures]:
    """What each process holds now.  One that has ended is the verdict, whoever is started in its place."""
    held = {}
    for name, pid in pids.items():
        try:
            held[name] = Figures.of(pid)
        except OSError as error:
            raise ClauseBroken(
                "C6.4", f"the process of {name} has ended", expected=f"{pid} lives", seen=error
            ) from error
    return held


def _judge(record: RequestRecord, one: _UnderWay) -> str:
    """What has become of it, in a word."""
    tokens, wanted = record.token_ids, one.expected.token_ids
    if record.error is None and record.finish_reason == one.expected.finish_reason and tokens == wanted:
        return "right"
    if one.cancelled and record.finish_reason == "cancelled" and tokens == wanted[: len(tokens)]:
        return "cancelled"
    if one.overdue and record.error is not None and "deadline" in str(record.error) and tokens == wanted[: len(tokens)]:
        return "overdue"
    raise ClauseBroken(
        "A1", f"request {record.request_id} ended otherwise than it may (cancelled {one.cancelled}, overdue"
        f" {one.overdue})", expected=f"{wanted} {one.expected.finish_reason}",
        seen=f"{tokens} {record.finish_reason} {record.error or ''}",
    )  # fmt: skip


def draw_plot(result: Result, title: str, file: Path) -> None:
    """Each figure of each process over the time, one below the other; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(result.samples[0].processes)
    at = [sample.at / 60 for sample in result.samples]
    figure, rows = pyplot.subplots(4, 1, figsize=(9, 10), sharex=True, layout="constrained")
    rates = [
        (b.ended - a.ended) / (b.at - a.at) for a, b in zip(result.samples, result.samples[1:], strict=False)
    ]  # fmt: skip
    rows[0].plot(at[1:], rates, color="0.3", linewidth=0.8)
    rows[0].set_ylabel("requests ended / s")
    for axes, (attribute, label, scale) in zip(
        rows[1:], (("memory", "resident, MiB", 1 << 20), ("descriptors", "descriptors", 1), ("threads", "threads", 1)),
        strict=True,
    ):  # fmt: skip
        for name in names:
            values = [getattr(sample.processes[name], attribute) / scale for sample in result.samples]
            axes.plot(at, values, label=name, linewidth=1.1)
        axes.set_ylabel(label)
    for axes in rows:
        axes.set_ylim(bottom=0, top=1.08 * axes.get_ylim()[1])
        axes.grid(alpha=0.3)
        axes.axvline(WARM_UP * at[-1], color="0.5", linestyle=":", linewidth=1)
    rows[1].legend(ncols=len(names), fontsize=8, loc="lower right")
    rows[0].set_title(title, fontsize=10)
    rows[-1].set_xlabel("minutes (dotted: the end of the warm-up)")
    figure.savefig(file)
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> int:
    """Play one plan as a command; the status is 0 where everything held and nothing grew."""
    plan = Plan({})
    parser = command("soak", __doc__, plan)
    parser.add_argument("--minutes", type=float, default=plan.seconds / 60)
    parser.add_argument("--distinct", type=int, default=plan.distinct, help="different ones among them")
    parser.add_argument("--cancelled", type=float, default=plan.cancelled, help="the share that is cancelled")
    parser.add_argument("--every", type=float, default=plan.every, help="seconds between two samples")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every sample")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="where to draw them (.svg, .png); needs matplotlib")
    given = parser.parse_args(arguments)
    if not 0 < given.minutes < math.inf:
        parser.error("--minutes is a positive number")
    plan = Plan(
        overrides(given), seconds=60 * given.minutes, together=given.together, distinct=given.distinct,
        prompt_tokens=given.prompt_tokens, max_tokens=given.max_tokens, cancelled=given.cancelled, every=given.every,
        seed=given.seed, patience=given.patience,
    )  # fmt: skip
    result = played(lambda progress: play(plan, progress))
    if result is None:
        return 1
    lines = result.lines()
    print("\n".join(lines))
    said = "python -m kvbaton_conformance.soak " + shlex.join(arguments if arguments is not None else sys.argv[1:])
    if given.json is not None:
        machine = {"processors": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}
        asked = {"command": said, "machine": machine, "lines": lines}
        given.json.write_text(json.dumps({**asked, "samples": [asdict(sample) for sample in result.samples]}) + "\n")
    if given.plot is not None:
        draw_plot(result, f"{given.transport}: {given.together} requests under way, {lines[0]}", given.plot)
    grown = [str(level) for level in result.levels() if not level.holds]
    if grown:
        print("BROKEN: T12: something grows: " + "; ".join(" ".join(line.split()) for line in grown))
        return 1
    print("HOLDS: every request ended as it may, nothing grew, no stage ended, all books balance, nothing is left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
