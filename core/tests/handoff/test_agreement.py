"""Long random event sequences, legal or not, given to the real machine and to the model's: same phase, messages,
verdict.

Unlike the world's, these sequences also contain what no correct peer does; the comparison is made inside ``oracle`` at
each step.  A violation is refused by both and leaves the state unchanged, so the sequence goes on.
"""

from __future__ import annotations

import random
from collections import Counter

import coordinator as co
import destination as de
import messages as words
import oracle
import pytest
import source as so
from world import Config

STEPS = 3000


def outcome(note: str | None) -> str:
    return (note or "applied").split(":")[0]


@pytest.mark.clause("C5.1", "C7.1", "C7.2", "C7.4")
@pytest.mark.parametrize("seed", range(4))
def test_the_source_agrees_with_the_model(seed):
    rng = random.Random(seed)
    seen: Counter = Counter()
    # what moves a transfer on comes more often, so that late phases are reached
    onward = (words.PREFILL, so.DEVICE_READY, so.SUBMITTED, so.TERMINAL)
    events = [e for e in so.EVENTS for _ in range(12 if e in onward else 1)]
    with oracle.real_machines(Config("", "")):
        record = None
        for _ in range(STEPS):
            kind = rng.choice(events)
            argument = rng.randrange(1, 4) if kind == words.PREFILL else None
            if kind in (so.DEVICE_READY, so.SUBMITTED, so.TERMINAL, so.TERMINAL_FAILED, so.DEADLINE):
                argument = rng.randrange(len(record.chunks)) if record else 0
                if kind == so.SUBMITTED and (record is None or record.phase == so.DRAINING
                                             or record.chunks[argument] != so.READY):  # fmt: skip
                    continue  # the pump looks first
            if kind == so.ENGINE_FAILED and record and record.phase != so.PREFILLING:
                continue  # nothing is left to compute
            phase = record.phase if record else None
            record, _, note = oracle.step_source(record, kind, argument)
            seen[phase, kind, outcome(note)] += 1
    assert len(seen) > 40, "the sequence went nowhere"
    assert any(key[2] == "violation" for key in seen)


@pytest.mark.clause("C4.2", "C5.2", "C7.1", "C7.2", "C7.3", "C7.4")
@pytest.mark.parametrize("seed", range(4))
def test_the_destination_agrees_with_the_model(seed):
    rng = random.Random(seed)
    seen: Counter = Counter()
    # what moves a transfer on comes more often, so that late phases are reached
    events = [e for e in de.EVENTS for _ in range(1 if e in (words.CANCEL, words.RELEASE, de.ENGINE_FAILED) else 6)]
    with oracle.real_machines(Config("", "")):
        record = None
        for _ in range(STEPS):
            kind = rng.choice(events)
            argument = rng.randrange(-1, 4) if kind == words.COMMIT else None
            if kind == de.RECEIPT:
                argument = rng.randrange(4)
            phase = record.phase if record else None
            record, _, note = oracle.step_destination(record, kind, argument)
            seen[phase, kind, outcome(note)] += 1
    assert {phase for phase, _, _ in seen} == {None, *de.PHASES}
    assert any(key[2] == "violation" for key in seen)


@pytest.mark.clause("C1.4", "C2.5", "C6.4", "C7.2", "C7.4")
@pytest.mark.parametrize("seed", range(6))
def test_the_coordinator_agrees_with_the_model(seed):
    rng = random.Random(seed)
    seen: Counter = Counter()
    for _ in range(40):
        config = Config("", "", external=(0, 1, 0, 2, 1), chunks=(1, 2, 1, 2, 1))
        with oracle.real_machines(config):
            one_sequence(rng, config, seen)
    assert {phase for phase, _, _ in seen} >= set(range(co.RESERVING, co.GONE))
    assert any(key[2] == "violation" for key in seen)


def one_sequence(rng: random.Random, config: Config, seen: Counter) -> None:
    rules = co.Rules(config.external, config.chunks)
    book = oracle.open_book(len(config.external), (2, 1), (2, 2))
    for _ in range(120):
        t = rng.randrange(len(config.external))
        e = book.entries[t]
        dice = rng.random()
        if e.phase == co.UNBORN:
            holders = [u for u in range(len(book.entries)) if u != t and config.external[u] == config.external[t]]
            first = not any(book.entries[u].phase == co.UNBORN for u in holders if u < t)
            if first and not book.stopping and all(book.entries[u].phase not in co.LIVE for u in holders):
                book = oracle.submit(book, t)[0]
        elif e.phase == co.WAITING:
            pairs = [
                (p, d)
                for p in range(2)
                for d in range(2)
                if book.status_p[p] == book.status_d[d] == co.UP and book.credits_p[p] and book.credits_d[d]
            ]
            if pairs and not book.stopping:
                book = oracle.place(book, rules, t, *rng.choice(pairs))[0]
            elif not oracle._served(book.shadow):
                book = oracle.refuse(book, t)[0]
        elif e.p < 0:
            continue  # refused before it was placed
        elif dice < 0.03:
            book = oracle.abort(book, t)[0]
        elif dice < 0.05:
            side, i = rng.choice("PD"), rng.randrange(2)
            status = (book.status_p if side == "P" else book.status_d)[i]
            if status == co.UP and rng.random() < 0.5:
                book = oracle.peer_lost(book, side, i)[0]
            elif status != co.FENCED:
                book = oracle.peer_joined(book, side, i)[0]
        elif dice < 0.06:
            p, d = rng.randrange(2), rng.randrange(2)
            if book.status_p[p] == co.LOST and book.status_d[d] == co.UP:
                book = oracle.peer_severed(book, p, d)[0]
        elif dice < 0.062 and not book.stopping:
            book = oracle.fatal(book)[0]
        else:
            kind = rng.choice((words.RESERVED, words.REJECTED, words.COMMIT, words.RECEIVED, words.ACTIVATED,
                               words.FINISHED, words.FAILED, words.RETIRED))  # fmt: skip
            expected = {co.RESERVING: words.RESERVED, co.PREFILLING: words.COMMIT, co.COMMITTED: words.RECEIVED,
                        co.HANDED_OVER: words.FINISHED}.get(e.phase)  # fmt: skip
            if expected and rng.random() < 0.5:
                kind = expected
            of_p = kind == words.COMMIT or (kind in (words.FAILED, words.RETIRED) and rng.random() < 0.5)
            sender = ("P", e.p) if of_p else ("D", e.d)
            stranger = (book.peers_p if of_p else book.peers_d)[1 - sender[1]]
            if rng.random() < 0.05 and stranger.known:  # a peer that is forgotten is ignored, not accused
                sender = (sender[0], 1 - sender[1])
            argument = rng.choice((1, 1, 2, 0)) if kind == words.COMMIT else None
            book, _, note = oracle.receive(book, rules, sender, (kind, t, argument))
            seen[e.phase, kind, outcome(note)] += 1
