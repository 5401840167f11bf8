"""The hand-off level's own tools: what a gate holds, what a deployment notices, and that a late write is seen."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kvbaton import Request, SamplingParams
from kvbaton.connector import Chunk, Outcome, Receipt
from kvbaton.engine import Role
from kvbaton.identity import PeerId, new_transfer_id
from kvbaton.segments import Segments
from kvbaton_conformance.deployment import Deployment, DeploymentStuck
from kvbaton_conformance.gate import Gate, Weather, broken_wire
from kvbaton_conformance.scripted import ScriptedEngine, ScriptedLayout
from kvbaton_conformance.scripted_connector import ScriptedConnector
from kvbaton_conformance.suite.handoff import boundaries

REQUEST = Request(tuple(range(30)), SamplingParams(max_tokens=5))
PEER = PeerId("decode-0", 1)


def chunk(sequence: int = 0) -> Chunk:
    return Chunk(new_transfer_id(), sequence, PEER, Segments.empty(), Segments.empty(), 0)


@pytest.fixture
def gate() -> Gate:
    return Gate(ScriptedConnector())


@pytest.fixture
def world() -> Iterator[Deployment]:
    world = Deployment("kvbaton_conformance.mutants.reference:plugin")
    yield world
    world.abandon()


# -- the gate ----------------------------------------------------------------------------------------------------------


def test_a_gate_holds_and_lets_go(gate: Gate) -> None:
    plugin: Any = gate.connector
    sent = chunk()
    gate.hold("submissions")
    assert not gate.submit(sent)
    gate.let_go()
    assert gate.submit(sent)
    gate.hold()
    plugin.complete(sent)
    plugin.receive(PEER, sent.transfer, 0)
    assert not gate.poll()
    assert gate.waiting == (1, 1)
    gate.let_go("receipts")
    assert [receipt.sequence for receipt in gate.poll().receipts] == [0]
    gate.of = lambda transfer: transfer != sent.transfer
    assert [end.outcome for end in gate.poll().completions] == [Outcome.DONE]


def test_what_is_not_polled_waits_at_the_transport(gate: Gate) -> None:
    plugin: Any = gate.connector
    gate.hold("polls")
    plugin.receive(PEER, new_transfer_id(), 0)
    assert not gate.poll()
    assert not plugin.called("poll")
    gate.let_go()
    assert gate.poll().receipts


def test_a_gate_fails_a_chunk_in_the_transports_place(gate: Gate) -> None:
    plugin: Any = gate.connector
    gate.fail_next(broken_wire(), source_quiet=True, target_quiet=False)
    gate.fail_next(broken_wire(), source_quiet=False, target_quiet=False, raises=True)
    assert gate.submit(chunk())
    (end,) = gate.poll().completions
    assert (end.outcome, end.source_quiet, end.target_quiet) == (Outcome.FAILED, True, False)
    with pytest.raises(Exception, match="wire broke"):
        gate.submit(chunk())
    assert not plugin.called("submit")


def test_what_is_injected_is_heard_whatever_is_held(gate: Gate) -> None:
    gate.hold()
    gate.inject(Receipt(PEER, new_transfer_id(), 3))
    assert [receipt.sequence for receipt in gate.poll().receipts] == [3]


@pytest.mark.parametrize("seed", range(3))
def test_weather_loses_nothing_and_repeats_receipts_only(gate: Gate, seed: int) -> None:
    plugin: Any = gate.connector
    gate.weather = Weather(random.Random(seed), report=0.4, repeat=0.5)
    transfer = new_transfer_id()
    for sequence in range(50):
        plugin.receive(PEER, transfer, sequence)
        plugin.complete(chunk(sequence))
    receipts: list[int] = []
    completions: list[int] = []
    for _ in range(200):
        progress = gate.poll()
        receipts += [receipt.sequence for receipt in progress.receipts]
        completions += [end.sequence for end in progress.completions]
    assert sorted(completions) == list(range(50))
    assert completions != sorted(completions)
    assert set(receipts) == set(range(50))
    assert len(receipts) > 50


# -- the deployment ----------------------------------------------------------------------------------------------------


def test_a_request_is_served_over_a_connector_that_cannot_be_stepped(world: Deployment) -> None:
    world.submit("a", REQUEST)
    world.run_until(world.idle, "C6.7: the request ends")
    world.check_answer("a")
    world.finish()


def test_one_wrong_byte_changes_the_answer(world: Deployment) -> None:
    world.submit("a", REQUEST)
    boundaries.received(world)
    d = world.seats["decode-0"]
    address = d.engine._addresses(d.engine.tables(world.answers["a"].transfer)[1], 2, 17, 18)[0]
    d.engine.memory[address] ^= 1
    world.let_go()
    world.run_until(world.idle, "C6.7: the request ends")
    with pytest.raises(DeploymentStuck, match=r"^A1: "):
        world.check_answer("a")


@pytest.mark.parametrize("where", ["free block", "gap", "final slot"])
def test_a_stray_byte_is_seen(world: Deployment, where: str) -> None:
    engine = world.seats["decode-0"].engine
    world.check_memory()
    if where == "final slot":
        engine.finals[5] = 1
    else:
        engine.memory[engine._stride - 1 if where == "gap" else 3] = 1
    with pytest.raises(DeploymentStuck, match=r"^C3.1, C5.2: "):
        world.check_memory()


def test_a_write_after_the_import_is_seen(world: Deployment) -> None:
    answer = world.submit("a", REQUEST)
    world.run_until(lambda: bool(answer.tokens), "C4: D decodes")
    engine = world.seats["decode-0"].engine
    engine.memory[engine._addresses(engine.tables(answer.transfer)[0], 0, 3, 4)[0]] ^= 1
    world.run_until(world.idle, "C6.7: the request ends")
    with pytest.raises(DeploymentStuck, match=r"^C5.2: "):
        world.check_memory()


def test_a_block_that_is_not_given_back_is_seen(world: Deployment) -> None:
    answer = world.submit("a", REQUEST)
    world.run_until(world.idle, "C6.7: the request ends")
    engine = world.seats["decode-0"].engine
    engine._free.pop()
    with pytest.raises(DeploymentStuck, match=r"^C2.5, C8.4: .*decode-0"):
        world.check_balance()
    assert answer.ended


def test_a_condition_that_does_not_come_true_says_where_everything_stands(
    world: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvbaton_conformance.deployment.PATIENCE", 0.05)
    world.submit("a", REQUEST)
    world.seats["prefill-0"].frozen = True
    with pytest.raises(DeploymentStuck, match=r"^C6.7: it ends: not so after \d+ turns") as caught:
        world.run_until(world.idle, "C6.7: it ends", turns=100)
    assert "prefill-0: frozen" in str(caught.value)
    assert "request a: live" in str(caught.value)


def test_held_mail_keeps_its_order(world: Deployment) -> None:
    world.hold_mail("from", "decode-0")
    world.hold_mail("to", "prefill-0")
    for key in "abc":
        world.submit(key, REQUEST)
    world.settle()
    assert not [mail for mail in world.mail if mail.message.__class__.__name__ == "Reserved"]
    world.let_mail_go()
    world.run_until(world.idle, "C9.4: all end")
    for key in "abc":
        world.check_answer(key)
    assert not world.violations
    world.finish()


# -- the engine --------------------------------------------------------------------------------------------------------


def test_expected_memory_is_what_the_engine_writes() -> None:
    engine = ScriptedEngine(Role.PREFILL, layout=ScriptedLayout(blocks=8, gap=3))
    engine.regions(None)
    table = [[2, 5, 1]]
    wanted = engine.expected_prompt(range(10), table)
    assert len(np.flatnonzero(wanted != 0xDD)) > 0
    assert (wanted[engine._used_bytes : engine._stride] == 0xDD).all()
    partial = engine.expected_prompt(range(10), table, start=8)
    changed = np.flatnonzero(partial != wanted)
    assert len(changed)
