"""Memory whose owner is done with it while another process's mapping still points at it (docs/field-failures.md, 35).

Over the shared-memory example: P maps D's memory and writes it by itself, whenever it wants.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import pytest

from kvbaton.connector import Endpoint, RegionInfo
from kvbaton.engine import Request, Role, SamplingParams
from kvbaton.handoff.coordinator import Pair
from kvbaton.handoff.table import DestinationPhase
from kvbaton.identity import PeerId, RequestKey
from kvbaton_conformance.deployment import Deployment
from kvbaton_conformance.scripted import ScriptedLayout
from kvbaton_conformance.suite.handoff import boundaries
from kvbaton_example_shm.connector import ShmConnector


def prompt(start: int, length: int, max_tokens: int = 4) -> Request:
    return Request(tuple(range(start, start + length)), SamplingParams(max_tokens=max_tokens))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "not within 60 s"


@pytest.mark.clause("C5.2", "C6.4", "C5.4")
@pytest.mark.parametrize("end", ["the peer disconnects", "the peer is dead"])
def test_memory_that_a_frozen_peer_maps_is_nobody_elses(end: str) -> None:
    """P hangs with D's memory mapped; the request is cancelled, and D even closes its end of the connection.

    D gives its blocks to nobody until P has let go of its mapping, or its process was joined.
    """

    def for_frozen(key: RequestKey, _request: Request, pairs: Sequence[Pair]) -> Pair:
        return next((pair for pair in pairs if (pair.prefill.name == "prefill-0") is (key == "a")), pairs[0])

    world = Deployment(
        "example_shm", prefill=2, choose=for_frozen, prefix_caching=False, settings={"transfer.chunk_bytes": 400},
        layouts={Role.PREFILL: ScriptedLayout(blocks=96), Role.DECODE: ScriptedLayout(blocks=40, gap=5)},
    )  # fmt: skip
    try:
        answer = world.submit("a", prompt(0, 30))
        boundaries.computing(world)
        p, d = world.seats["prefill-0"], world.seats["decode-0"]
        mine = {block for table in d.engine.tables(answer.transfer) for block in table}
        p.frozen = True
        world.abort("a")
        d.guard.disconnect(p.peer)
        for number in range(6):
            world.submit(f"b{number}", prompt(1000 * number + 500, 7, max_tokens=9))
        world.run_until(lambda: all(world.answers[f"b{number}"].ended for number in range(6)))
        world.settle()
        assert d.phases == {answer.transfer: DestinationPhase.HELD}
        # P's mapping is alive, and a late write through it meets nobody
        memory = p.connector._links[d.peer].memory[0]
        stride, used = d.engine._stride, d.engine._used_bytes
        for block in mine:
            memory[block * stride : block * stride + used] = 0xEE
        world.submit("c", prompt(9000, 8, max_tokens=20))
        world.run_until(lambda: world.answers["c"].ended)
        assert d.phases[answer.transfer] is DestinationPhase.HELD
        if end == "the peer is dead":
            world.crash("prefill-0")
        world.let_go()
        world.run_until(world.idle)
        for key in world.answers:
            if key != "a":
                world.check_answer(key)
        assert not {seat.peer.name for seat in world.seats.values() if seat.engine.late_writes}
        world.submit("after", prompt(20_000, 30, max_tokens=40))
        world.run_until(world.idle)
        world.check_answer("after")
        world.close()
    finally:
        world.abandon()


@pytest.mark.clause("T1", "C5.4", "C6.4")
def test_what_an_owner_has_freed_is_handed_out_to_nobody_while_it_is_mapped() -> None:
    """The owner's connector is closed and its memory freed; the importer has not noticed, and writes all of it.

    Nothing crashes, and no memory that the owner's process allocates afterwards is hit; the importer unmaps at its
    next poll.
    """
    owner, importer = ShmConnector(PeerId("decode-0", 1)), ShmConnector(PeerId("prefill-0", 1))
    regions = {end: end.allocate(0, "host", 0, 1 << 16) for end in (owner, importer)}
    for end, region in regions.items():
        end.register([region])
    for one, other in ((owner, importer), (importer, owner)):
        info = (RegionInfo(0, "host", 1 << 16),)
        one.connect(Endpoint("example_shm", "1", other.peer, info, b"", other.metadata()))
    up: set[PeerId] = set()

    def both_up() -> bool:
        up.update(event.peer for end in (owner, importer) for event in end.poll().peers if event.up)
        return len(up) == 2

    until(both_up)
    memory = importer._links[owner.peer].memory
    assert memory is not None
    mapping = memory[0]
    owner.close()
    del regions[owner]
    fresh = [ShmConnector(PeerId("decode-0", 2 + number)) for number in range(8)]
    later = [end.allocate(0, "host", 0, 1 << 16) for end in fresh]
    mapping[:] = 0xEE
    assert not any(region.view().any() for region in later), "freed memory was handed out under a mapping"
    del mapping, memory
    until(lambda: any(event.quiet for event in importer.poll().peers))
    assert owner.peer not in importer._links
    for end in (*fresh, importer):
        end.close()
