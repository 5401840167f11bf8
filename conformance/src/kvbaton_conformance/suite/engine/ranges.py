"""C3 at P: which ranges it reports, and when."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from kvbaton.engine import ComputedRange
from kvbaton.errors import SegmentError
from kvbaton_conformance.clauses import ClauseBroken, require
from kvbaton_conformance.suite.engine.bench import Ask, Bench, BenchTopic, EngineSubject, wait_for


class Ranges(BenchTopic):
    """C3: the ranges of a transfer tile its prompt, are final when reported, and end with the final payload."""

    @pytest.mark.clause("C3.1", "C3.2", "C3.4")
    @pytest.mark.parametrize(
        "blocks", [(0, 1), (1, -1), (1, 0), (1, 1), (5, 0), (7, 2)], ids=lambda b: f"{b[0]}b{b[1]:+}"
    )
    def test_ranges_tile_the_prompt(self, p: Bench, ask: Ask, blocks: tuple[int, int]) -> None:
        """Prompts around the edges of blocks: from 0 to the end, without gap or overlap, one of them the last.

        Troubleshooting:
        - the last range is missing where nothing is left to compute: it is reported all the same (C3.4);
        - tables are too short: they cover at least ``end`` tokens in every plane.
        """
        block = p.engine.capacity().block_tokens
        request = ask(max(1, blocks[0] * block + blocks[1]))
        ranges = p.prefill(p.reserve(request))
        edges = [(one.start, one.end) for one in ranges]
        require(
            edges[0][0] == 0 and edges[-1][1] == len(request.prompt)
            and all(left[1] == right[0] for left, right in pairwise(edges)), "C3.2",
            "the ranges do not tile the prompt", expected=f"[0, {len(request.prompt)}) in order", seen=edges,
        )  # fmt: skip
        require(
            [one.last for one in ranges] == [False] * (len(ranges) - 1) + [True], "C3.4",
            "the last range is not marked, or another one is", seen=[one.last for one in ranges],
        )  # fmt: skip
        planes = len(p.engine.geometry.planes)
        for one in ranges:
            covered = [len(table) * block for table in one.tables]
            require(
                len(covered) == planes and min(covered) >= one.end, "C3.6", "block tables do not cover their range",
                expected=f"{planes} tables of at least {one.end} tokens", seen=covered,
            )  # fmt: skip
        p.engine.release_transfer(ranges[0].transfer)
        p.check_balance()

    @pytest.mark.clause("C3.6", "C3.5")
    def test_ranges_lie_within_the_regions(self, p: Bench, ask: Ask) -> None:
        """What the geometry makes of a range, and of the final slot, is inside of what was registered."""
        ranges = p.prefill(p.reserve(ask(3 * p.engine.capacity().block_tokens + 1)))
        lengths = {id: region.length for id, region in p.regions.items()}
        for one in ranges:
            try:
                p.places(one.tables, one.start, one.end).check_bounds(lengths, f"tokens [{one.start}, {one.end})")
                p.final(one.final_slot).check_bounds(lengths, "the final payload")
            except SegmentError as error:
                raise ClauseBroken("C3.6", "a reported range lies outside of the regions", seen=error) from error

    @pytest.mark.clause("C3.7", "C4", "C5.1")
    def test_what_is_reported_is_final(self, p: Bench, ask: Ask) -> None:
        """The bytes of each range and of the final payload, from the moment they are ready until the release, while
        other requests are computed.

        Troubleshooting:
        - bytes change: the range was reported before a later computation had written it, or its blocks were given away.
        """
        block = p.engine.capacity().block_tokens
        mine = p.reserve(ask(5 * block + 1, text=1))
        p.reserve(ask(5 * block + 1, text=2))
        seen: dict[int, list[bytes]] = {}

        def look() -> None:
            for one in p.of(mine):
                wait_for(one)
                now = p.read(p.places(one.tables, one.start, one.end))
                if one.last:
                    now += p.read(p.final(one.final_slot))
                before = seen.setdefault(one.start, now)
                require(
                    now == before, "C3.7", f"tokens [{one.start}, {one.end}) changed after they were reported",
                    expected="final from the report on",
                )  # fmt: skip

        def done() -> bool:
            look()
            return not p.engine.has_work()

        p.run_until(done, "C6.7: P computes both prompts")
        p.engine.release_transfer_compute(mine)
        for text in range(3, 6):
            p.prefill(p.reserve(ask(5 * block, text=text)))
            look()
        require(any(one.last for one in p.of(mine)), "C3.4", "P never reported the last range")

    @pytest.mark.clause("C4", "C5.1")
    @pytest.mark.requires("device_control")
    def test_a_range_is_ready_when_its_device_is(self, p: Bench, ask: Ask) -> None:
        """P's device has finished nothing of what it was given: each range has an event that says so, until it has."""
        p.device.automatic = False
        transfer = p.reserve(ask(5 * p.engine.capacity().block_tokens))
        p.run_until(lambda: len(p.of(transfer)) > 1, "C3.2: P reports ranges")
        early = [one.start for one in p.of(transfer) if one.ready is None or one.ready.query()]
        require(not early, "C4", "ranges are said to be ready while the device is at work on them", seen=early)
        p.device.complete(1)
        done = [one.start for one in p.of(transfer) if one.ready is not None and one.ready.query()]
        require(done == [0], "C4", "the device has finished the first range alone", expected=[0], seen=done)
        p.device.complete()
        p.device.automatic = True
        p.prefill(transfer)
        p.engine.release_transfer(transfer)
        p.check_balance()

    @pytest.mark.clause("C3.3", "C3.4")
    @pytest.mark.requires("prefix_caching")
    def test_what_p_had_cached_is_reported_too(self, p: Bench, ask: Ask) -> None:
        """The same prompt again: the ranges tile it all the same, and the final payload is the same bytes."""
        request = ask(4 * p.engine.capacity().block_tokens)
        finals = []
        ranges: list[ComputedRange] = []
        for _ in range(2):
            transfer = p.reserve(request)
            ranges = p.prefill(transfer)
            require(
                (ranges[0].start, ranges[-1].end) == (0, len(request.prompt)), "C3.3",
                "the cached prefix is not part of the first range", seen=[(one.start, one.end) for one in ranges],
            )  # fmt: skip
            finals.append(p.read(p.final(ranges[-1].final_slot)))
            p.engine.release_transfer(transfer)
        require(
            max(one.cached for one in ranges) > 0, "C3.3", "a prompt that was found in the cache is not said to be",
            expected="cached > 0", seen=[one.cached for one in ranges],
        )  # fmt: skip
        require(len(finals[0]) == len(finals[1]), "C3.4", "a cached prompt has no final payload")
        p.check_balance()

    @pytest.mark.clause("A2")
    def test_p_produces_no_token(self, p: Bench, ask: Ask) -> None:
        """Greedy and sampled: P's steps have nothing for the caller."""
        choices: list[dict[str, Any]] = [{}, {"temperature": 1.0, "seed": 3}]
        for text, sampling in enumerate(choices):
            transfer = p.reserve(ask(9, text=text, **sampling))
            p.prefill(transfer)
            require(
                transfer not in p.answers, "A2", "P produced an output", expected="none", seen=p.answers.get(transfer)
            )
            p.engine.release_transfer(transfer)
        p.check_balance()

    @pytest.mark.clause("T6")
    def test_p_pauses_when_it_is_asked_to(self, p: Bench, ask: Ask, subject: EngineSubject) -> None:
        """``can_schedule`` says no: P computes no more and is not busy; it says yes, and P goes on."""
        block = p.engine.capacity().block_tokens
        p.open = False
        transfer = p.reserve(ask(6 * block))
        for _ in range(5):
            p.step()
        require(
            not p.of(transfer) and not p.engine.has_work(), "T6", "P computes although the transport is full",
            expected="no range, and has_work() is false", seen=f"{len(p.of(transfer))} ranges of {subject.title}",
        )  # fmt: skip
        p.open = True
        p.prefill(transfer)
        p.engine.release_transfer(transfer)
        p.check_balance()
