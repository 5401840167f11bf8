"""The same hand-off as an application runs it: stages with threads and channels of their own, or real processes."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvbaton import PDRuntime, Request, RequestRecord, SamplingParams, load
from kvbaton.errors import KvbatonError, RuntimeClosed
from kvbaton_conformance.clauses import ClauseBroken, require
from kvbaton_conformance.gate_plugin import transport_settings
from kvbaton_conformance.placement import stage_devices
from kvbaton_conformance.scripted import ScriptedModel
from kvbaton_conformance.scripted_plugin import ScriptedOptions, scripted_model
from kvbaton_conformance.subject import Mode, Subject
from kvbaton_conformance.suite.topic import HandoffTopic

#: Seconds that everything of one test may take together; a healthy run needs two.
PATIENCE = 40.0

#: Short enough for a hung stage to be found within a test, long enough for a busy machine.
DEADLINES = {
    "deadline.prefill_start": 3.0, "deadline.prefill_idle": 3.0, "deadline.receipts": 3.0, "deadline.drain": 2.0,
    "deadline.chunk": 3.0, "deadline.shutdown": 6.0, "control.heartbeat": 4.0,
}  # fmt: skip


@dataclass(eq=False)
class Fleet:
    """A runtime over the judged connector, what it was asked and what has come of it."""

    runtime: PDRuntime
    model: ScriptedModel
    requests: dict[str, Request] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, RequestRecord] = field(default_factory=dict)
    give_up: float = field(default_factory=lambda: time.monotonic() + PATIENCE)

    def add(self, key: str, request: Request) -> None:
        self.requests[key] = request
        self.tokens[key] = []
        self.runtime.add_request(request, key)

    def step(self) -> bool:
        """Take what is new; whether anything was."""
        outputs = self.runtime.step(0.005)
        for output in outputs:
            self.tokens[output.request_id] += output.token_ids
            if output.finished:
                assert output.record is not None
                self.ends[output.request_id] = output.record
        return bool(outputs)

    def run_until(self, condition: Callable[[], bool], what: str) -> None:
        while not condition():
            if time.monotonic() > self.give_up:
                live = sorted(set(self.requests) - set(self.ends))
                raise ClauseBroken(
                    "C6.7", f"{what}: not so within {PATIENCE:g} s", seen=f"live: {live}; {self.books()}"
                )
            self.step()

    def all_ended(self) -> bool:
        return len(self.ends) == len(self.requests)

    def books(self) -> dict[str, Any]:
        return self.runtime.statistics()

    def check_answer(self, key: str) -> None:
        """A1: an ended request was told what an undisaggregated run answers, whole or, if it was cut short, in part."""
        record, expected = self.ends[key], self.model.generate(self.requests[key])
        tokens = tuple(self.tokens[key])
        cut = record.finish_reason in ("cancelled", "failed")
        wanted = expected[0][: len(tokens)] if cut else expected[0]
        require(
            tokens == wanted == record.token_ids and (cut or record.finish_reason == expected[2].value), "A1",
            f"request {key} differs from the undisaggregated run", expected=f"{expected[0][:6]} {expected[2]}",
            seen=f"{tokens[:6]} {record.finish_reason} {record.error or ''}",
            look="bytes that were lost, put elsewhere, or read too early or too late",
        )  # fmt: skip

    def check_balance(self) -> None:
        """C2.5, C8.4, C5.2: everything is back on every stage that is up, and no byte was written where none may be."""
        self.run_until(lambda: not self.books()["coordinator"]["transfers"], "C2.5: every stage retires every transfer")
        books = self.books()
        for name, book in books["coordinator"]["credits"].items():
            require(
                (book["blocks_out"], book["slots_out"], book["repeated_returns"]) == (0, 0, 0), "C2.5",
                f"credits of {name} do not balance", expected="none out, none returned twice", seen=book,
            )  # fmt: skip
            figures = {**books[name]["engine"], **books[name]["transport"]}
            wanted = {
                "transfers": 0, "blocks_used": 0, "blocks_promised": 0, "outstanding": 0, "inflight_bytes": 0,
                "quarantined_bytes": 0, "grants": 0, "unproven_chunks": 0, "final_slots_free": book["slots"],
                "blocks_free": figures["blocks_total"] - figures["blocks_prefix"],
            }  # fmt: skip
            wrong = {key: (figures[key], value) for key, value in wanted.items() if figures[key] != value}
            require(not wrong, "C8.4", f"the books of {name} do not balance (found, expected)", seen=wrong)
            require(
                not figures["late_writes"] and not figures["strays"], "C5.2",
                f"memory of {name} was written where nobody may write", expected="no late and no stray write",
                seen={key: figures[key] for key in ("late_writes", "strays")},
            )  # fmt: skip
            lies = {key: count for key, count in books[name]["stage"].items() if key.startswith("violations")}
            require(not lies, "C7.4", f"{name} saw the protocol broken", seen=lies)

    def pid(self, name: str) -> int:
        return self.runtime.stage(name).pid

    def statuses(self) -> Mapping[str, int | None]:
        return {name: self.runtime.stage(name).status for name in self.runtime.stages}


OpenFleet = Callable[..., Fleet]


class Runtime(HandoffTopic):
    """C1 to C9 at once, with the threads, sockets and processes that an application has."""

    @pytest.fixture
    def open_fleet(self, subject: Subject, mode: Mode, seed: int) -> Iterator[OpenFleet]:
        """``open_fleet(prefill, decode) -> Fleet``, closed after the test."""
        opened: list[Fleet] = []

        def open_one(prefill: int = 1, decode: int = 1, report: float = 0.5, repeat: float = 0.2) -> Fleet:
            reach = subject.need(mode).reach
            grain = subject.capabilities.alignment
            engine = ScriptedOptions(
                planes=2, token_bytes=tuple(math.ceil(width / grain) * grain for width in (16, 16, 12, 12)),
                final_bytes=math.ceil(24 / grain) * grain, gap=math.ceil(5 / grain) * grain,
            )  # fmt: skip
            settings, _ = load(
                overrides={
                    "model": "scripted:1", "engine.name": "kvbaton_conformance.scripted_plugin:plugin",
                    "engine.options": engine.model_dump(mode="json"), "stages.prefill": prefill,
                    "stages.decode": decode, "stages.launch": "inproc" if mode == "in-process" else "process",
                    "stages.devices": stage_devices(prefill, decode, subject.devices),
                    "transfer.chunk_bytes": max(400, 4 * grain), "recovery.mode": "off", **DEADLINES,
                    **transport_settings(subject, reach, seed=seed, report=report, repeat=repeat),
                }
            )  # fmt: skip
            try:
                runtime = PDRuntime.start(settings)
            except KvbatonError as error:
                raise ClauseBroken(
                    "T2", "stages over this connector do not come up", seen=error, look="open, register, connect"
                ) from error
            opened.append(Fleet(runtime, scripted_model("scripted:1", engine)))
            return opened[-1]

        yield open_one
        for fleet in opened:
            try:
                fleet.runtime.close()
            except (KvbatonError, RuntimeClosed):
                continue  # a test that cares for it has closed it itself

    @pytest.mark.clause("A1", "A2", "C1.2", "C2.5", "C4.2", "C5.1", "C5.2", "C6.1", "C7.1", "C7.3", "C8.4", "T10")
    def test_real_stages_agree_and_balance(self, open_fleet: OpenFleet, draw: random.Random) -> None:
        """Twenty requests, a third cancelled at random moments, with slow and careless pollers; then an ordered end.

        Troubleshooting:
        - only this test fails: something depends on which thread calls, or on who is polled when;
        - it hangs: what must be polled at one end for the other to get on is not polled any more.
        """
        fleet = open_fleet()
        doomed = set()
        for index in range(20):
            start = 0 if index % 3 == 0 else 1000 * index
            prompt = (*range(start, start + 12), *(draw.randrange(10_000) for _ in range(draw.randrange(1, 25))))
            fleet.add(str(index), Request(prompt, SamplingParams(max_tokens=draw.randrange(1, 12), seed=index)))
            if draw.random() < 0.3:
                doomed.add(str(index))
        waiting = set(doomed)
        while not fleet.all_ended():
            for key in sorted(waiting):
                if draw.random() < 0.1:
                    fleet.runtime.abort(key)
                    waiting.discard(key)
            fleet.run_until(lambda: fleet.step() or fleet.all_ended(), "C6.7: requests end")
        for key, record in fleet.ends.items():
            require(
                record.finish_reason in ("length", "stop") or key in doomed, "C6.3", f"request {key} failed",
                seen=record.error,
            )  # fmt: skip
            fleet.check_answer(key)
        fleet.check_balance()
        self._ends_well(fleet)

    @pytest.mark.clause("C6.3", "C6.4", "C2.5", "T7")
    @pytest.mark.mode("two-processes")
    @pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
    @pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hung"])
    def test_a_stage_dies_under_load(
        self, open_fleet: OpenFleet, draw: random.Random, victim: str, how: signal.Signals
    ) -> None:
        """Two P and two D at work; one of the four is killed, or stops and says nothing.

        Its requests fail and say why, the others' go on, memory comes back on those that are left, and they serve the
        next request.  A hung stage is found by a deadline or a heartbeat, and killed.

        Troubleshooting:
        - a request never ends: the death of a peer is not noticed, or its chunks never end;
        - the books do not balance: what was under way to or from the dead process is never quiet.
        """
        fleet = open_fleet(prefill=2, decode=2)
        for index in range(16):
            length = draw.randrange(5, 40)
            fleet.add(
                str(index), Request(tuple(range(100 * index, 100 * index + length)), SamplingParams(max_tokens=8))
            )
        first = draw.randrange(1, 5)
        fleet.run_until(lambda: len(fleet.ends) >= first, "C6.7: the first requests end")
        os.kill(fleet.pid(victim), how)
        fleet.run_until(lambda: fleet.statuses()[victim] is not None, "C6.4: it is killed and joined")
        fleet.run_until(fleet.all_ended, "C6.4: every request ends although a stage is dead")
        for key, record in fleet.ends.items():
            fleet.check_answer(key)
            require(
                record.finish_reason in ("length", "stop") or victim in (record.prefill, record.decode), "C6.4",
                f"request {key} failed and had no part in the stage that died", seen=record.error,
            )  # fmt: skip
            if record.finish_reason == "failed":
                # who only hangs may be known by the deadline that somebody else's waiting for it has passed
                cause = str(record.error)
                named = victim in cause or (how is signal.SIGSTOP and "deadline" in cause)
                require(named, "C6.3", "a failure does not name its cause", expected=victim, seen=cause)
        fleet.add("after", Request(tuple(range(9000, 9020)), SamplingParams(max_tokens=4)))
        fleet.run_until(fleet.all_ended, "C6.4: those that are left serve the next request")
        require(fleet.ends["after"].error is None, "C6.4", "the next request failed", seen=fleet.ends["after"].error)
        fleet.check_answer("after")
        fleet.check_balance()
        self._ends_well(fleet, victim)

    @staticmethod
    def _ends_well(fleet: Fleet, victim: str = "") -> None:
        """C6.2, T10: closed, every stage was joined, and all but a killed one ended with status 0."""
        try:
            fleet.runtime.close()
        except KvbatonError as error:
            raise ClauseBroken("C6.2", "a stage did not end as ordered", seen=error) from error
        wrong = {name: status for name, status in fleet.statuses().items() if status != 0 and name != victim}
        require(not wrong, "C6.2", "a stage did not end with status 0", seen=wrong)
