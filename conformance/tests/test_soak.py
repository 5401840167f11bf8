"""What a long run says of its figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvbaton_conformance.clauses import ClauseBroken
from kvbaton_conformance.soak import Figures, Result, Sample, _held, draw_plot

MIB = 1 << 20


def run_of(memory: list[float], descriptors: list[int] | None = None, threads: list[int] | None = None) -> Result:
    """One process, with a sample a second."""
    count = len(memory)
    columns = zip(memory, descriptors or [20] * count, threads or [5] * count, strict=True)
    samples = [Sample(at, at, {"decode-0": Figures(int(m), d, t)}) for at, (m, d, t) in enumerate(columns)]
    return Result(seconds=float(count), samples=samples)


def grown(result: Result) -> list[str]:
    return [level.figure for level in result.levels() if not level.holds]


@pytest.mark.clause("T12")
def test_what_grows_in_the_warm_up_only_is_level() -> None:
    warm = [100 * MIB + min(second, 20) * MIB for second in range(100)]
    assert grown(run_of(warm, [20 + min(second, 5) for second in range(100)])) == []


@pytest.mark.clause("T12")
def test_memory_that_grows_slowly_is_found() -> None:
    assert grown(run_of([100 * MIB + second * 0.05 * MIB for second in range(100)])) == ["memory"]
    within = [300 * MIB + second * 0.03 * MIB for second in range(100)]
    assert grown(run_of(within)) == [], "less than a hundredth"


@pytest.mark.clause("T12")
def test_one_descriptor_or_thread_more_at_the_end_is_found() -> None:
    late = [20 + (second > 80) for second in range(100)]
    assert grown(run_of([100.0 * MIB] * 100, late)) == ["descriptors"]
    assert grown(run_of([100.0 * MIB] * 100, None, late)) == ["threads"]
    for_a_moment = [20 + (second == 95) for second in range(100)]
    assert grown(run_of([100.0 * MIB] * 100, for_a_moment)) == []


@pytest.mark.clause("C6.4")
def test_a_process_that_has_ended_is_the_verdict_and_no_traceback() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait(30)
    assert _held({"coordinator": os.getpid()})["coordinator"].threads >= 1
    with pytest.raises(ClauseBroken, match="decode-0 has ended"):
        _held({"coordinator": os.getpid(), "decode-0": ended.pid})


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    draw_plot(run_of([100.0 * MIB] * 50), "a run", tmp_path / "run.svg")
    assert "<svg" in (tmp_path / "run.svg").read_text()
